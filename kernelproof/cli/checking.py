"""The verb ``check`` executes a CUDA program on the emulated GPU and reports its faults."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from kernelproof.cli.program import app
from kernelproof.ground.command_line.groups import verb
from kernelproof.ground.command_line.messages import refuse
from kernelproof.ground.command_line.options import Json
from kernelproof.ground.command_line.progress import LOG_INTERVAL_S

if TYPE_CHECKING:
    from kernelproof.checking.plan import CheckPlan
    from kernelproof.checking.supervision import Progress

PROGRAM_ARGUMENTS = "kernelproof.program_arguments"  # in a context's meta: the words after ``--``
# The kinds of input files, by suffix.
KINDS = {
    "source": (".cu", ".cpp", ".cc", ".cxx", ".c"), "ptx": (".ptx",), "library": (".so",), "cubin": (".cubin",),
}  # fmt: skip
TIMEOUT_S, MEMORY_GIB = 600.0, 8.0  # default limits of a program
TERMINAL_INTERVAL_S = 1.0  # least seconds between two updates of progress on a terminal


@dataclass(frozen=True)
class EntryOptions:
    """The options that name what runs in place of the program's ``main``."""

    launch: Annotated[
        str | None,
        typer.Option(
            "--launch",
            metavar="KERNEL<<<GRID,BLOCK[,SMEM]>>>|FILE.json",
            help="Launch this kernel, in quotes and as in CUDA: 'add<<<4,256>>>' or 'add<<<(4,2),(16,16)>>>'. A short "
            "name will do; by default one CTA of 32 threads. FILE.json describes several launches.",
        ),
    ] = None
    args: Annotated[
        str,
        typer.Option(
            "--args",
            help="Arguments of --launch or --call, separated by blanks: 5, 2.5, i64:5, in:f32[64,32]=random, "
            "out:f32[64]; also inout and scratch, and zeros, ones, iota or FILE.npy.",
        ),
    ] = ""
    call: Annotated[str | None, typer.Option("--call", metavar="FUNCTION", help='Call this extern "C" function.')] = (
        None
    )


@dataclass(frozen=True)
class RunOptions:
    """The options that say how the program is compiled and run."""

    nvcc_args: Annotated[str, typer.Option("--nvcc-args", help='For nvcc: "-I... -D... -std=...".')] = ""
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="GPU", help="sm_80, sm_86, sm_89, sm_90a, ... or a model such as a100."),
    ] = None
    sample: Annotated[
        int, typer.Option("--sample", min=0, help="CTAs of a grid to run: corners and random ones; 0 runs all.")
    ] = 0
    seed: Annotated[int, typer.Option("--seed", help="Seed of random inputs and of --sample.")] = 0
    adverse: Annotated[bool, typer.Option("--adverse", help="Run in another order that hardware may choose.")] = False
    machine_code: Annotated[
        bool, typer.Option("--machine-code", help="Execute machine code in place of PTX, for sm_80 and later.")
    ] = False
    counters: Annotated[bool, typer.Option("--counters", help="Count bank conflicts, sectors, barriers.")] = False
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that the program may take.")] = TIMEOUT_S
    memory: Annotated[float, typer.Option("--memory", min=0.1, help="GiB that the program may need.")] = MEMORY_GIB


@dataclass(frozen=True)
class ReportOptions:
    """The options that say how findings are shown and to which files they are written.

    In GitHub Actions findings are also printed as annotations.
    """

    as_json: Json = False
    expect: Annotated[
        Path | None, typer.Option("--expect", metavar="FILE", help="Known findings, which count as passed.")
    ] = None
    out: Annotated[
        tuple[Path, ...],
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="File to write: SARIF (.sarif), or a page of source lines with findings (.html). Repeatable.",
        ),
    ] = ()


class CheckCommand(TyperCommand):
    """A command that keeps the words after ``--`` for the checked program, in the ``meta`` of its context."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parses the words before ``--`` and stores those after it."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[PROGRAM_ARGUMENTS] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


@verb(app, "check", CheckCommand)
def check(
    context: typer.Context,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILES [-- ARGS]", help="x.cu ..., x.ptx, x.so, or x.cubin (beside x.ptx, or with --machine-code)."
        ),
    ],
    entry: EntryOptions,
    settings: RunOptions,
    output: ReportOptions,
) -> None:
    """Run a CUDA program on an emulated GPU and report its faults.

    It finds races, wrong addresses, missing fences and deadlocks.

    Exit codes: 0 nothing found, 1 errors found or the program failed, 2 wrong input or what cannot be checked, 3 a
    missing tool. docs/kernelproof/check.md has more.
    """
    from kernelproof.checking import expectations, supervision, writing

    writers = {".sarif": writing.sarif, ".html": writing.page}
    for path in output.out:
        if path.suffix not in writers:
            refuse(f"--out {path}: expected a file that ends in {' or '.join(writers)}")
    expected = expectations.read(output.expect) if output.expect else ()
    plan = _plan([Path(file) for file in files], entry, settings, output, context.meta[PROGRAM_ARGUMENTS])
    sys.stdout.flush()
    result = supervision.run(plan, " ".join(files), settings.timeout, settings.memory, _progress())
    expectations.apply(result, expected)
    for path in output.out:
        writers[path.suffix](result, path)
    if output.as_json:
        print(json.dumps(result.document(), indent=1))
    else:
        print(result.summary())
    if os.environ.get("GITHUB_ACTIONS", "false") not in ("", "false"):
        print("\n".join(writing.github(result)), file=sys.stderr if output.as_json else sys.stdout)
    raise typer.Exit(result.code)


def _plan(
    files: list[Path], entry: EntryOptions, settings: RunOptions, output: ReportOptions, arguments: tuple[str, ...]
) -> CheckPlan:
    """Compiles sources and collects everything that the process of the check needs. Raises UserError."""
    from kernelproof.checking import compilation, devices, plan
    from kernelproof.ground import toolchain

    for file in files:
        if not file.is_file():
            refuse(
                f"{file}: no such file; name .cu, .cpp, .ptx, .so or .cubin files, a program's own arguments after --"
            )
    kinds = {kind: [file for file in files if file.suffix.lower() in suffixes] for kind, suffixes in KINDS.items()}
    others = [file for file in files if not any(file in group for group in kinds.values())]
    if others:
        refuse(f"{others[0]}: not a .cu, .cpp, .ptx, .so or .cubin file; a program's own arguments stand after --")
    nvcc_args, sm = compilation.split_arguments(settings.nvcc_args)
    kernels = [*kinds["ptx"], *(cubin if settings.machine_code else _ptx_of(cubin) for cubin in kinds["cubin"])]
    targets = plan.target_of([file for file in kernels if file.suffix == ".ptx"])
    if settings.machine_code:
        toolchain.find_nvdisasm()
        targets = targets or plan.target_of_cubins(kernels)
    device = settings.gpu or devices.nearest(sm or targets or devices.DEFAULT)
    devices.device(device)
    if settings.machine_code and kinds["source"]:
        number = (sm or devices.target(device)).removeprefix("sm_")
        nvcc_args.append(f"-gencode=arch=compute_{number},code=sm_{number}")
    library = kinds["library"][0] if kinds["library"] else None
    if len(kinds["library"]) > 1 or (library and kinds["source"]):
        refuse("one library, or sources, make a program; name them alone")
    listed = tuple(plan.argument(word, {}) for word in entry.args.split())
    launches: tuple[plan.LaunchSpec, ...] = ()
    buffers: dict[str, plan.BufferSpec] = {}
    if entry.launch and entry.call:
        refuse("--launch and --call exclude each other; give one of them")
    if entry.launch and entry.launch.endswith(".json"):
        launches, buffers = plan.launch_file(Path(entry.launch))
    elif entry.launch:
        launches = (plan.launch(entry.launch, listed),)
    runs_main = not (launches or entry.call)
    if runs_main and not (kinds["source"] or library):
        refuse(f"{files[0]} has no main: give --launch 'KERNEL<<<GRID,BLOCK>>>' with --args, or --launch FILE.json")
    if kinds["source"]:
        library = compilation.library(kinds["source"], nvcc_args, sm or devices.target(device), toolchain.discover())
    return plan.CheckPlan(
        device, library, tuple(kernels), (str(files[0].with_suffix("")), *arguments) if runs_main else None,
        (entry.call, listed) if entry.call else None, launches, buffers, settings.counters, settings.adverse,
        settings.sample, settings.seed, machine_code=settings.machine_code, quiet=output.as_json,
        output_to_stderr=output.as_json,
    )  # fmt: skip


def _ptx_of(cubin: Path) -> Path:
    """The PTX file from which a cubin was assembled. Ends the command if it is missing."""
    ptx = cubin.with_suffix(".ptx")
    if not ptx.is_file():
        refuse(f"{cubin}: {ptx} is missing; keep it with nvcc --keep, or execute the cubin itself with --machine-code")
    return ptx


def _progress() -> Progress:
    """Returns a function that prints a slow kernel's progress: every second on a terminal, else every 10 s."""
    from kernelproof.checking.names import plain
    from kernelproof.checking.supervision import expected_time

    terminal = sys.stderr.isatty()
    interval = TERMINAL_INTERVAL_S if terminal else LOG_INTERVAL_S
    printed = 0.0  # the time of the last output, in seconds from the start of the kernel

    def show(kernel: str, seconds: float, done: int, ctas: int) -> None:
        nonlocal printed
        if seconds < printed:  # another kernel
            printed = 0.0
        if seconds - printed > interval:
            printed = seconds
            part = f"{done} of {ctas} CTAs in" if ctas else "running for"
            line = f"{plain(kernel)}: {part} {seconds:.0f} s{expected_time(seconds, done, ctas)}"
            print(f"\r{line}\r" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)

    return show
