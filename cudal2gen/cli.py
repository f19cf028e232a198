"""The command line: verbs that compose the rooms below, and nothing else."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from cudal2gen import catalog, places
from cudal2gen.kernel import FAMILIES, GPUS, IllegalRecord, Problem, Record, parse

if TYPE_CHECKING:
    from cudal2gen import choice as choices
    from cudal2gen import gpu as gpu_room
    from cudal2gen import results
    from cudal2gen.compiler import Artifact


EXIT_FAILED, EXIT_USAGE, EXIT_TOOLCHAIN = 1, 2, 3
SAVED_EVERY = 20  # problems between two checkpoints of a policy

app = typer.Typer(
    help="Half-precision matrix-multiply kernels for NVIDIA GPUs, regenerated from records. "
    "Exit codes: 0 done, 1 a kernel or a file operation failed, 2 the input is wrong, 3 a tool is missing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Mnk = Annotated[str, typer.Option("--mnk", metavar="M_N_K", help="Problem size, e.g. 4096_4096_64.")]
OptionalMnk = Annotated[str | None, typer.Option("--mnk", metavar="M_N_K", help="Problem size, e.g. 4096_4096_64.")]
Gpu = Annotated[str, typer.Option("--gpu", help=f"One of {', '.join(GPUS)}.")]
Acc = Annotated[str, typer.Option("--acc", help="Accumulator in the MMA: f16 or f32.")]
Layout = Annotated[str, typer.Option("--layout", help="tn: B stored (N,K); nn: B stored (K,N).")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Change a field of the record, e.g. bm=256, mma_repeat=2,4,1, prefetch=multi:3, c_batch=null. Repeatable.",
    ),
]
All = Annotated[bool, typer.Option("--all", help="All records of --gpu, --acc and --layout; each may be any.")]
Problems = Annotated[
    Path | None,
    typer.Option("--problems", metavar="FILE", help="A list as tune-model writes; those of --acc and --layout."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Compiler processes at a time; all cores by default.")
]
On = Annotated[str, typer.Option("--on", help="Where kernels run: emulator, or gpu for validate.")]
Device = Annotated[int, typer.Option("--device", min=0, help="The CUDA device, counted from 0.")]
Nvcc = Annotated[Path | None, typer.Option("--nvcc", help="The nvcc to use, instead of the one that is found.")]

Results = Annotated[
    list[Path] | None,
    typer.Option("--results", metavar="FILE", help="Measurements to read, instead of the store's. Repeatable."),
]


def _version(wanted: bool) -> None:
    if wanted:
        from cudal2gen import __version__

        print(f"cudal2gen {__version__}")
        raise typer.Exit


@app.callback()
def _settings(
    _: Annotated[bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")] = False,
    catalog_path: Annotated[
        Path | None, typer.Option("--catalog", envvar="CUDAL2GEN_CATALOG", help="The catalog: a kernels.jsonl.")
    ] = None,
    build_dir: Annotated[
        Path | None, typer.Option("--build-dir", envvar="CUDAL2GEN_BUILD_DIR", help="Where compiled kernels are kept.")
    ] = None,
) -> None:
    if catalog_path is not None:
        os.environ["CUDAL2GEN_CATALOG"] = str(catalog_path)
    if build_dir is not None:
        os.environ["CUDAL2GEN_BUILD_DIR"] = str(build_dir)


@app.command("list")
def list_records(
    gpu: Annotated[str | None, typer.Option("--gpu", help="Only this GPU.")] = None,
    acc: Annotated[str | None, typer.Option("--acc", help="Only this accumulator.")] = None,
    layout: Annotated[str | None, typer.Option("--layout", help="Only this layout.")] = None,
    family: Annotated[str | None, typer.Option("--family", help="Only this family.")] = None,
    structure: Annotated[
        str | None, typer.Option("--structure", help="Only this origin: exact, nearest, tuned, modelled.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the records of the catalog, one line each."""
    with _user_errors():
        filters = {"gpu": gpu, "acc": acc, "layout": layout, "family": family}
        chosen = [
            record
            for record in catalog.load()
            if all(value in (None, getattr(record, name)) for name, value in filters.items())
            and structure in (None, record.origin.structure)
        ]
    for record in chosen:
        if as_json:
            print(catalog.dump(record))
        else:
            tile = f"{record.bm}x{record.bn}x{record.k_step}" if record.ring_steps > 1 else f"{record.bm}x{record.bn}"
            print(
                f"{record.gpu:8} {record.acc} {record.layout} {record.mnk:18} {record.family:16} {tile:12} "
                f"{record.threads:4} threads  {record.smem_bytes:6} B  {record.origin.structure}"
            )
    if not chosen:
        print("no record matches", file=sys.stderr)


@app.command()
def show(
    mnk: Mnk,
    gpu: Gpu = "a100",
    acc: Acc = "f16",
    layout: Layout = "tn",
    changes: Set = None,
    as_json: Json = False,
) -> None:
    """Show a record and what follows from it: threads, shared memory, registers, occupancy, waves, padding."""
    with _user_errors():
        record = _record(mnk, gpu, acc, layout, changes)
        facts = _facts(record, _built(record))
    if as_json:
        print(json.dumps({"record": record.model_dump(mode="json"), "derived": facts}, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for title, rows in (("record", record.model_dump(mode="json")), ("follows from it", facts)):
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        for name, value in rows.items():
            table.add_row(name, value if isinstance(value, str) else json.dumps(value))
        console.print(table)
    for remark in record.remarks:
        console.print(f"note: {remark}")


@app.command()
def render(
    mnk: OptionalMnk = None,
    gpu: Gpu = "a100",
    acc: Acc = "f16",
    layout: Layout = "tn",
    changes: Set = None,
    everything: All = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write; with --all, the folder to write one file per text to.")
    ] = None,
) -> None:
    """Print the CuTe source of a record's kernel, highlighted on a terminal and plain in a pipe."""
    from cudal2gen.renderer import render as text_of

    with _user_errors():
        if everything:
            if out is None:
                _usage("--all needs --out DIR")
            texts = {record.name: text_of(record) for record in _chosen(None, True, gpu, acc, layout, changes)}
            for name, text in texts.items():
                _write(out / f"{name}.cu", text)
            print(f"{len(texts)} distinct texts in {out}", file=sys.stderr)
            return
        text = text_of(_chosen(mnk, False, gpu, acc, layout, changes)[0])
        if out is not None:
            _write(out, text)
            return
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    from rich.console import Console
    from rich.syntax import Syntax

    Console().print(Syntax(text, "cuda", word_wrap=True))


@app.command()
def build(
    mnk: OptionalMnk = None,
    gpu: Gpu = "a100",
    acc: Acc = "f16",
    layout: Layout = "tn",
    changes: Set = None,
    everything: All = False,
    jobs: Jobs = None,
    nvcc: Nvcc = None,
    as_json: Json = False,
) -> None:
    """Compile a record's kernel, or all of them. A kernel that spills or has a stack frame fails."""
    from cudal2gen import compiler, toolchain

    with _user_errors():
        records = _chosen(mnk, everything, gpu, acc, layout, changes)
        tools = toolchain.discover(nvcc)
        with _progress(f"compiling for {gpu}") as progress:
            artifacts = compiler.build(records, tools=tools, jobs=jobs, progress=progress)
    faults = 0
    distinct = {artifact.digest: (record, artifact) for record, artifact in zip(records, artifacts, strict=True)}
    for record, artifact in distinct.values():
        for finding in artifact.ptxas.findings:
            faults += 1
            print(f"error: {record.name} {finding}", file=sys.stderr)
        if as_json:
            row = {"name": record.name, "directory": str(artifact.directory), "registers": artifact.ptxas.registers}
            print(json.dumps(row | {"findings": artifact.ptxas.findings}))
        elif not everything:
            print(
                f"{artifact.directory}: {artifact.ptxas.registers} registers, "
                f"{record.smem_bytes} bytes of shared memory"
            )
    if everything and not as_json:
        rss = compiler.peak_rss_bytes() >> 20
        print(
            f"{len(records)} records, {len(distinct)} distinct kernels in {places.build_dir()}; "
            f"peak {rss} MiB a process"
        )
    if faults:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def run(
    mnk: Mnk,
    gpu: Gpu = "a100",
    acc: Acc = "f16",
    layout: Layout = "tn",
    changes: Set = None,
    inputs: Annotated[
        str,
        typer.Option(
            "--inputs", help="binary (0 and 1), sparse, integers, normal, cancelling or special (NaN, infinities)."
        ),
    ] = "normal",
    on: On = "emulator",
    nvcc: Nvcc = None,
    as_json: Json = False,
) -> None:
    """Build a record's kernel, execute it on one problem and compare it with NumPy.

    The problem is the record's own. Of a large one the CTAs at the corners of the grid are executed.
    """
    from cudal2gen import compiler, toolchain, validator

    with _user_errors():
        if on != "emulator":
            _usage(f"--on {on}: run prints the emulator's findings and counters; validate also takes --on gpu")
        if inputs not in validator.INPUTS:
            _usage(f"--inputs {inputs}: must be one of {', '.join(validator.INPUTS)}")
        record = _record(mnk, gpu, acc, layout, changes)
        tools = toolchain.discover(nvcc)
        artifact = compiler.build([record], tools=tools)[0]
        library = compiler.launcher(tools=tools)
        shape = validator.own_shape(record)
        case, done = validator.run_case(record, artifact, library, shape, inputs, counters=True)
    counters = validator.summary(record, done)
    if as_json:
        print(json.dumps({"name": record.name, "case": case.model_dump(), "counters": counters}, indent=1))
    else:
        print(f"kernel   {record.name}")
        print(
            f"built    {artifact.directory}, {artifact.ptxas.registers} registers, {record.smem_bytes} B shared memory"
        )
        part = f"the {case.ctas} CTAs at the grid's corners" if shape.corners else f"{case.ctas} CTAs"
        print(f"ran      {case.m}_{case.n}_{case.k} on the emulator, {part}, {inputs} inputs")
        allowed = "" if case.allowed is None else f", allowed there {case.allowed:.3g}"
        print(f"compared {case.compared}: max error {case.max_error:.3g}{allowed}")
        for name, value in counters.items():
            print(f"         {name:32} {value:g}")
        for finding in case.findings:
            print(f"found    {finding}")
        print("verdict  right, no hazards" if case.passed else "verdict  WRONG")
    if not case.passed:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def validate(
    mnk: OptionalMnk = None,
    gpu: Gpu = "a100",
    acc: Acc = "f16",
    layout: Layout = "tn",
    changes: Set = None,
    everything: All = False,
    changed: Annotated[bool, typer.Option("--changed", help="Like --all, but only records without a verdict.")] = False,
    on: On = "emulator",
    device: Device = 0,
    sanitize: Annotated[
        bool,
        typer.Option("--sanitize", help="With --on gpu: compute-sanitizer's memcheck and racecheck as well; slow."),
    ] = False,
    compare_emulator: Annotated[
        bool,
        typer.Option(
            "--compare-emulator", help="With --on gpu: the same bits as the emulator's? Stores how they differ."
        ),
    ] = False,
    jobs: Jobs = None,
    nvcc: Nvcc = None,
    as_json: Json = False,
) -> None:
    """Say whether kernels are right: build them, execute problems that stress them, compare, look for hazards.

    With --on gpu the records' own problems are executed as well. Records of one GPU are tried on another by
    --set gpu=h200.
    """
    from cudal2gen import compiler, results, toolchain, validator

    if on not in ("emulator", "gpu"):
        _usage(f"--on {on}: must be emulator or gpu")
    if on == "emulator" and (sanitize or compare_emulator):
        _usage("--sanitize and --compare-emulator need --on gpu")
    with _user_errors():
        records = _chosen(mnk, everything or changed, gpu, acc, layout, changes)
        bed = _gpu(device, records) if on == "gpu" else None
        place = bed.model if bed else on
        tools = toolchain.discover(nvcc)
        with _progress("compiling") as progress:
            artifacts = compiler.build(records, tools=tools, jobs=jobs, progress=progress)
        library = compiler.launcher(tools=tools)
        work = {artifact.digest: (record, artifact) for record, artifact in zip(records, artifacts, strict=True)}
        known = results.latest() if changed else {}
        pending = [pair for digest, pair in work.items() if (digest, place) not in known]
        verdicts: list[results.Verdict] = []
        with _progress("validating") as progress:

            def note(verdict: results.Verdict) -> None:
                verdicts.append(verdict)
                results.append([verdict])
                if progress:
                    progress(len(verdicts), len(pending))

            if bed is None:
                validator.validate_all(pending, library, jobs or os.cpu_count() or 1, note)
            else:
                _validate_on_gpu(bed, device, pending, library, sanitize, compare_emulator, note)
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if as_json:
        for verdict in verdicts:
            print(verdict.model_dump_json())
    else:
        for verdict in verdicts if mnk else failed:
            _print_verdict(verdict)
        cases = sum(len(verdict.cases) for verdict in verdicts)
        skipped = f", {len(work) - len(pending)} had a verdict" if changed else ""
        print(
            f"{len(records)} records, {len(pending)} kernels executed in {cases} cases{skipped}: "
            f"{len(verdicts) - len(failed)} right, {len(failed)} wrong"
        )
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _print_verdict(verdict: results.Verdict) -> None:
    print(f"{verdict.record}: {'right' if verdict.passed else 'WRONG'}")
    for case in verdict.cases:
        allowed = "" if case.allowed is None else f" (allowed there {case.allowed:.3g})"
        slices = "" if case.swizzle_stride is None else f", slices of {case.swizzle_stride} columns"
        slices += "".join(f", {name}={value}" for name, value in case.options.items())
        print(
            f"  {case.m}_{case.n}_{case.k} {case.inputs}, {case.ctas} CTAs{slices}: {case.compared}, "
            f"max error {case.max_error:.3g}{allowed}{'' if case.passed else ': failed'}"
        )
    if verdict.deterministic is False:
        print("  the same problem gave other bits in another run")
    for tool, said in verdict.tools.items():
        print(f"  {tool}: {said}")
    for finding in verdict.findings:
        print(f"  found: {finding}")


def _gpu(index: int, records: list[Record]) -> gpu_room.Gpu:
    """The GPU, if all records are for it. Raises GpuError."""
    from cudal2gen.gpu import Gpu

    bed = Gpu(index)
    for record in records:
        bed.check(record)
    return bed


def _validate_on_gpu(
    bed: gpu_room.Gpu,
    index: int,
    work: list[tuple[Record, Artifact]],
    library: Path,
    sanitize: bool,
    compare_emulator: bool,
    done: Callable[[results.Verdict], None],
) -> None:
    """Tries kernels one after the other; each verdict is stored before the next, and a broken device ends it."""
    from cudal2gen import baselines, bench, results, rounding
    from cudal2gen.gpu import Absent, Contender, GpuError
    from cudal2gen.validator.device import BuiltKernel
    from cudal2gen.validator.judgement import judge

    vendors: dict[tuple[str, str], Contender] = {}

    def vendor(problem: Problem) -> Contender:
        key = (problem.acc, problem.layout)
        if key not in vendors:
            name, tuned = f"cublaslt-autotuning-{problem.layout}", results.store("cublaslt")
            try:
                (vendors[key],) = baselines.contenders([name], problem.acc, bed, tuned)
            except GpuError as error:
                raise Absent(str(error)) from None
        return bench.made_ready(bed, vendors[key], problem)

    for record, artifact in work:
        verdict, lines = judge(
            bed,
            BuiltKernel(record, artifact, library),
            baseline=vendor,
            sanitize=index if sanitize else None,
            emulator=compare_emulator,
        )
        if lines:
            results.append(lines, results.store("rounding"))
        done(verdict)
        try:
            bed.wait()
        except RuntimeError as error:
            _fail(f"the device has stopped over {record.name}: {str(error).splitlines()[0]}", EXIT_FAILED)
    if compare_emulator:
        table = results.store("rounding").with_suffix(".md")
        table.write_text(rounding.markdown(results.roundings()))
        print(f"{table}: where emulator and GPU round differently", file=sys.stderr)


Duration = Annotated[str | None, typer.Option("--budget", metavar="DURATION", help="Stop after, e.g., 8m or 90s.")]


@app.command()
def bench(
    mnk: Annotated[list[str] | None, typer.Option("--mnk", metavar="M_N_K", help="Problem size; repeatable.")] = None,
    everything: All = False,
    sample: Annotated[
        int | None, typer.Option("--sample", min=1, help="This many problems, spread over the size classes.")
    ] = None,
    problems: Problems = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="The GPU's model; by default as the device says.")] = None,
    acc: Acc = "f16",
    layout: Layout = "tn",
    changes: Set = None,
    of: Annotated[
        str | None, typer.Option("--records-of", help="Measure this GPU's records, as far as they are legal here.")
    ] = None,
    protocol: Annotated[
        str, typer.Option("--protocol", help="Any of device, offline, server, separated by commas.")
    ] = "device",
    baselines: Annotated[
        str | None,
        typer.Option("--baselines", help="Names separated by commas, or none; by default the seven vendor ones."),
    ] = None,
    budget: Duration = None,
    resume: Annotated[
        bool,
        typer.Option("--resume/--again", help="Skip what is stored (the default), or not."),
    ] = True,
    warmup_seconds: Annotated[float, typer.Option(min=0, help="Warm-up before the first problem.")] = 3.0,
    benchmark_seconds: Annotated[
        float | None, typer.Option(min=0, help="Timing per problem, protocol and L2 state; 0.25, or 2 with the host.")
    ] = None,
    target_qps: Annotated[float, typer.Option(min=0.001, help="Arrivals per second in the server protocol.")] = 1000.0,
    device: Device = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file of measurements to add to.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of inputs and order.")] = 0,
    jobs: Jobs = None,
    nvcc: Nvcc = None,
) -> None:
    """Measure kernels against the vendor's libraries on the GPU; every measurement is stored as it is taken."""
    from cudal2gen import baselines as vendors
    from cudal2gen import bench as timing
    from cudal2gen import compiler, results, toolchain
    from cudal2gen.gpu import Gpu, Kernel, alone

    with _user_errors():
        seconds = None if budget is None else _seconds(budget)
        protocols = _protocols(protocol)
        card = Gpu(device)
        model = gpu or card.environment.gpu
        if not model:
            _usage(f"{card.environment.name} is not in the table of GPUs; choose the nearest by --gpu")
        if (bool(mnk), everything, sample is not None, problems is not None).count(True) != 1:
            _usage("give one of --mnk M_N_K, --all, --sample N and --problems FILE")
        records = (
            _listed(problems, model, acc, layout, changes)
            if problems is not None
            else _to_measure(mnk, sample, model, acc, layout, of, changes, seed)
        )
        card.check(records[0])
        tools = toolchain.discover(nvcc)
        with _progress("compiling") as progress:
            artifacts = compiler.build(records, tools=tools, jobs=jobs, progress=progress)
        directories = {record.problem: one.directory for record, one in zip(records, artifacts, strict=True)}
        library = compiler.launcher(tools=tools)
        store = out or results.store("measurements")
        names = list(vendors.MEASURED) if baselines is None else [one for one in baselines.split(",") if one != "none"]
        tuned = store.with_name("cublaslt.jsonl")
        try:
            contenders = vendors.contenders(names, records[0].acc, card, tuned)
        except ValueError as error:
            _usage(f"--baselines {baselines}: {error}")
        settings = timing.Settings(
            protocols=protocols,
            warmup_seconds=warmup_seconds,
            benchmark_seconds=benchmark_seconds or (0.25 if protocols == ("device",) else 2.0),
            target_qps=target_qps,
            seed=seed,
        )
        with alone(device), _countdown() as progress:
            outcome = timing.run(
                card,
                records,
                lambda record: Kernel(record, directories[record.problem], library, card.stream),
                lambda record: directories[record.problem].name,
                contenders,
                settings,
                store,
                budget_seconds=seconds,
                again=not resume,
                progress=progress,
            )
    for fault in outcome.faults:
        print(f"fault: {fault}", file=sys.stderr)
    print(
        f"{len(records)} problems, {outcome.known} of them stored before: {outcome.measured} measurements added to "
        f"{store}, {outcome.left} problems left, {len(outcome.faults)} faults"
    )
    if outcome.faults:
        raise typer.Exit(EXIT_FAILED)


def _to_measure(
    mnk: list[str] | None,
    sample: int | None,
    gpu: str,
    acc: str,
    layout: str,
    of: str | None,
    changes: list[str] | None,
    seed: int,
) -> list[Record]:
    from cudal2gen.bench import stratified

    if mnk and not of:
        return [_record(one, gpu, acc, layout, changes) for one in mnk]
    records = {record.problem: record for record in catalog.library(gpu, acc, layout, of)}
    if mnk:
        wanted = [_problem(one, gpu, acc, layout) for one in mnk]
        if absent := [one.mnk for one in wanted if one not in records]:
            _usage(f"--records-of {of}: has no {', '.join(absent)} that is legal on {gpu}")
    else:
        wanted = stratified(records, seed)[:sample]
    return [_changed(records[one], changes or []) for one in wanted]


def _alike(path: Path, gpu: str, acc: str, layout: str) -> list[Problem]:
    """A list's problems of this GPU, accumulator and layout."""
    wanted = catalog.problems(path)
    alike = [one for one in wanted if (one.gpu, one.acc, one.layout) == (gpu, acc, layout)]
    if left := len(wanted) - len(alike):
        print(f"note: {left} problems of {path} are not for {gpu} {acc} {layout}, and left out", file=sys.stderr)
    if not alike:
        _usage(f"{path} has no problem for {gpu} {acc} {layout}")
    return alike


def _listed(path: Path, gpu: str, acc: str, layout: str, changes: list[str] | None) -> list[Record]:
    """Records for the problems of a list, at their very sizes."""
    records = catalog.load()
    found = []
    for problem in _alike(path, gpu, acc, layout):
        try:
            one = catalog.fitted(problem, records)
        except catalog.CatalogError as error:
            print(f"note: {error}; left out", file=sys.stderr)
            continue
        if one.note:
            print(f"note: {one.note}", file=sys.stderr)
        found.append(_changed(one.record, changes or []))
    return found


def _protocols(text: str) -> tuple[results.ProtocolName, ...]:
    known: tuple[results.ProtocolName, ...] = ("device", "offline", "server")
    names = text.split(",")
    if unknown := set(names) - set(known):
        _usage(f"--protocol {', '.join(sorted(unknown))}: must be of {', '.join(known)}")
    return tuple(name for name in known if name in names)


def _seconds(text: str) -> float:
    """A duration such as 90s, 8m or 1.5h; a number alone counts seconds."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        seconds = float(number) * units[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        _usage(f"--budget {text}: expected a duration such as 90s, 8m or 1h")
    return seconds


@app.command()
def tune(
    mnk: Annotated[list[str] | None, typer.Option("--mnk", metavar="M_N_K", help="Problem size; repeatable.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All sizes of the catalog.")] = False,
    size_class: Annotated[
        str | None, typer.Option("--class", help="Sizes of the catalog of this class: small-m, split-k, tiny, ...")
    ] = None,
    sample: Annotated[
        int | None, typer.Option("--sample", min=1, help="This many sizes, spread over the size classes.")
    ] = None,
    listed: Problems = None,
    gpu: Gpu = "a100",
    acc: Acc = "f16",
    layout: Layout = "tn",
    environment: Annotated[
        str | None,
        typer.Option(
            "--environment",
            help="gpu (the default) measures; replay answers from recorded trials; model is an analytic model with "
            "hidden terms, for trying the tuner itself: nothing that it says goes into the catalog.",
        ),
    ] = None,
    proposers: Annotated[
        str,
        typer.Option(
            "--proposers", help="Any of policy, prior, llm, nearest, heuristics, tpe, evolution, random, by commas."
        ),
    ] = "policy,nearest,evolution,random",
    budget: Duration = None,
    evaluations: Annotated[int, typer.Option("--evaluations", min=1, help="Short timings of each problem.")] = 64,
    patience: Annotated[
        int | None, typer.Option(min=1, help="End a problem after so many evaluations without an improvement.")
    ] = None,
    alpha: Annotated[
        float, typer.Option(min=0, help="Reward: t_ref / t - alpha * largest error - beta * length of the source.")
    ] = 0.01,
    beta: Annotated[float, typer.Option(min=0, help="Reward: cost of a character of the source.")] = 0.0,
    lower_bound: Annotated[
        bool, typer.Option("--lower-bound", help="Reward: the lower end of the speed's 95 % interval, not its median.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change in the catalog.")] = False,
    benchmark: Annotated[
        bool,
        typer.Option("--benchmark", help="Compare the proposers on held-out problems, in the model environment."),
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Of --benchmark.")] = 10,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="The policy's file; made by imitating published kernels.")
    ] = None,
    trials: Annotated[
        Path | None, typer.Option("--trials", help="The file of trials to add to, and to replay from.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="SVG file to write: the learning curve.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="With --benchmark: file for the table.")] = None,
    device: Device = 0,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds for a batch before it is ended.")] = 300.0,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn; trials of a seed are taken up.")] = 0,
    llm_url: Annotated[
        str, typer.Option("--llm-url", help="For proposer llm: a server of the chat-completions protocol, to /v1.")
    ] = "",
    llm_model: Annotated[str, typer.Option("--llm-model", help="The model's name there.")] = "",
    llm_key: Annotated[
        str, typer.Option("--llm-key", metavar="VARIABLE", help="The environment variable that holds the key.")
    ] = "CUDAL2GEN_LLM_KEY",
    llm_timeout: Annotated[float, typer.Option("--llm-timeout", min=0.1, help="Seconds for an answer.")] = 120.0,
    llm_prices: Annotated[
        tuple[float, float], typer.Option("--llm-prices", help="Per million tokens in and out: cost is shown.")
    ] = (0.0, 0.0),
    llm_transcript: Annotated[
        Path | None, typer.Option("--llm-transcript", help="File that every exchange is added to.")
    ] = None,
    llm_replay: Annotated[
        Path | None, typer.Option("--llm-replay", help="A transcript to take answers from, instead of a server.")
    ] = None,
    runs_on: Annotated[
        str, typer.Option("--executor", help="local: beside this process; ray: on the GPUs of a Ray cluster.")
    ] = "local",
    address: Annotated[
        str | None, typer.Option("--address", help="Of the Ray cluster, as host:port; without it one is started here.")
    ] = None,
) -> None:
    """Search for better records: propose, check, time, learn. What is beyond doubt faster goes to the catalog.

    Every trial is stored as it is made; the same command takes up what was stored.
    """
    from cudal2gen.tuner import memory, reward
    from cudal2gen.tuner import proposers as who

    with _user_errors():
        environment = environment or ("model" if benchmark else "gpu")
        if environment not in ("gpu", "replay", "model"):
            _usage(f"--environment {environment}: must be gpu, replay or model")
        if benchmark and environment != "model":
            _usage(f"--environment {environment}: --benchmark compares in the model environment only, so far")
        if benchmark:
            _compare_proposers(gpu, acc, seeds, seed, plot, markdown)
            return
        problems = _to_tune(mnk, everything, size_class, sample, listed, gpu, acc, layout, seed)
        records = catalog.load()
        store = trials or _trial_store(environment)
        if runs_on == "ray":
            executor = _on_ray(environment, records, address, timeout, seed)
        elif runs_on == "local":
            executor = _executor(environment, records, device, timeout, store, seed)
        else:
            _usage(f"--executor {runs_on}: must be local or ray")
        lessons = memory.load(memory.beside(store))
        asked: list[Any] = []

        def llm() -> Any:
            from cudal2gen.tuner import llm as model
            from cudal2gen.tuner.chat import Endpoint

            server = Endpoint.from_environment(
                llm_url, llm_model, llm_key, seconds=llm_timeout, price_in=llm_prices[0], price_out=llm_prices[1]
            )
            transcript = llm_transcript or store.with_name(f"{store.stem}-llm.jsonl")
            asked.append(model.connect(server, lessons, transcript, llm_replay))
            return asked[0]

        names = proposers.split(",")
        file = checkpoint or places.build_dir() / "tuner" / f"policy-{gpu}-{acc}-{environment}.pt"
        # What the analytic model chose is no prior for its own environment.
        pool = [one for one in records if environment != "model" or one.origin.structure != "modelled"]
        made: list[Any] = []
        rewarded = reward.Settings(alpha, beta, lower_bound)
        try:
            proposer = who.named(names, lambda: _policy(file, records, acc, seed, made), pool, seed, rewarded, llm)
        except (ValueError, OSError) as error:
            _usage(f"--proposers {proposers}: {error}")
        except who.Absent as error:
            _fail(str(error), EXIT_TOOLCHAIN)
        _tune(
            problems, records, proposer, executor, store, environment, budget, evaluations, patience,
            f"{environment} {proposers} seed {seed}", dry_run, plot, lambda: [one.save(file) for one in made],
            lessons.learn,
        )  # fmt: skip
        for one in asked:
            print(f"llm: {one.spent}")


def _tune(
    problems: list[Problem],
    records: list[Record],
    proposer: Any,
    executor: Any,
    store: Path,
    environment: str,
    budget: str | None,
    evaluations: int,
    patience: int | None,
    run_name: str,
    dry_run: bool,
    plot: Path | None,
    keep: Callable[[], Any],
    learn: Callable[[Any], Any],
) -> None:
    """Runs a campaign and says what came of it."""
    from cudal2gen.tuner import campaign, curve, progress, race
    from cudal2gen.tuner.environment import Unrecorded
    from cudal2gen.tuner.ray_executor import Unreachable

    settings = race.Settings(evaluations, patience=patience, prune=None if environment == "model" else 4.0)
    begin = time.monotonic()

    ended = [0]

    def after(one: race.Race) -> None:
        learn(one)
        ended[0] += 1
        if not ended[0] % SAVED_EVERY:
            keep()

    try:
        with progress.shown() as show:
            standing = campaign.run(
                problems,
                campaign.Incumbents(records),
                proposer,
                executor,
                store,
                settings,
                run_name,
                None if budget is None else _seconds(budget),
                show,
                after,
            )
    except Unrecorded as error:
        _fail(str(error), EXIT_USAGE)
    except Unreachable as error:
        _fail(str(error), EXIT_TOOLCHAIN)
    finally:
        executor.close()
        keep()
    for fault in standing.faults:
        print(f"fault: {fault}", file=sys.stderr)
    for one in standing.improved:
        _say_improved(one, dry_run)
    if plot is not None:
        curves = [curve.Curve("best so far", points)] if (points := campaign.mean_curve(standing)) else []
        title = f"Best cost so far, mean of {len(standing.races)} problems, {executor.name} environment: {executor.on}"
        _write(plot, curve.svg(title, "evaluations", "cost, first = 1", curves))
    print(progress.line(standing, time.monotonic() - begin))
    print(f"trials in {store}")
    if executor.name == "model":
        print(_model_against_measured())


def _model_against_measured() -> str:
    """How far the analytic model orders records as measurements do."""
    from cudal2gen import results
    from cudal2gen.tuner.environment import agreement

    found = agreement(results.trials())
    if math.isnan(found):
        return "the analytic model has not been compared with measurements: no problem has three measured trials"
    return f"rank correlation of the analytic model with measured trials: {found:.3f}"


def _say_improved(race: Any, dry_run: bool) -> None:
    """What improved, by how much; written to the catalog where that is allowed, else why not, and what would change."""
    from cudal2gen import results
    from cudal2gen.tuner import campaign, progress

    verdicts = results.latest() if race.winner.environment == "gpu" else {}
    clean = any(
        one.passed for (digest, on), one in verdicts.items() if digest == race.winner.digest and on != "emulator"
    )
    print(f"{race.problem.mnk}: {progress.gain(race)}, proposed by {race.winner.proposer}")
    refusal = campaign.may_write(race, clean)
    if dry_run or refusal:
        for line in campaign.diff(race):
            print(f"  {line}")
        print(f"  not written: {refusal or 'this is a dry run'}")
        return
    print(f"  written to {catalog.put(campaign.answer(race))}")


def _policy(file: Path, records: list[Record], acc: str, seed: int, made: list[Any]) -> Any:
    """The policy of a checkpoint; without one, a policy that imitates published kernels. It is put into ``made``."""
    from cudal2gen.tuner.policy import CheckpointError, Policy

    _on_one_core()
    if file.is_file():
        try:
            policy = Policy.load(file, seed)
        except CheckpointError as error:
            _fail(str(error), EXIT_USAGE)
    else:
        published = [one for one in records if one.gpu == "a100" and one.acc == acc and one.origin.structure != "tuned"]
        print(f"imitating {len(published)} published kernels, at most half a minute", file=sys.stderr, flush=True)
        policy = Policy(seed)
        policy.imitate(published, 30.0)
        policy.save(file)
    made.append(policy)
    return policy


def _on_one_core() -> None:
    from cudal2gen.tuner import policy

    try:
        policy.on_one_core()
    except ImportError:
        _fail("the policy needs torch: pip install 'cudal2gen[tune]', or leave it out of --proposers", EXIT_TOOLCHAIN)


def _trial_store(environment: str) -> Path:
    """Trials of a model are kept apart from what was measured."""
    from cudal2gen import results

    if environment == "model":
        return places.build_dir() / "tuner" / "modelled-trials.jsonl"
    return results.store("trials")


def _executor(environment: str, records: list[Record], device: int, timeout: float, store: Path, seed: int) -> Any:
    """Who evaluates. Measurements run in a process of their own, which may be ended."""
    from cudal2gen import results
    from cudal2gen.tuner import campaign, executor
    from cudal2gen.tuner.environment import Model, Replay

    if environment == "model":
        return executor.InProcess(Model(campaign.Incumbents(records), seed))
    if environment == "replay":
        recorded = results.trials(store)
        if not recorded:
            _usage(f"--environment replay: no trials in {store}; record some with --environment gpu")
        return executor.InProcess(Replay(recorded))
    from cudal2gen.gpu import Gpu as Card
    from cudal2gen.tuner import on_gpu

    Card(device)  # says at once, and in words, what is missing
    return executor.Worker(partial(on_gpu.connect, device, campaign.Incumbents(records), seed), timeout)


def _on_ray(environment: str, records: list[Record], address: str | None, timeout: float, seed: int) -> Any:
    """Evaluations on a Ray cluster: on its GPUs, or, for the model environment, on its CPUs."""
    from cudal2gen.tuner import campaign, on_gpu, ray_executor
    from cudal2gen.tuner.environment import Model

    incumbents = campaign.Incumbents(records)
    try:
        if environment == "model":
            return ray_executor.OnRay(partial(Model, incumbents, seed), address, resource="CPU", seconds=timeout)
        if environment == "gpu":
            make = partial(on_gpu.connect, 0, incumbents, seed)  # the one GPU that Ray lets it see
            return ray_executor.OnRay(
                make, address, ray_executor.compiled, seconds=timeout, keep=ray_executor.keep_verdicts
            )
    except ImportError:
        _fail("--executor ray needs Ray: pip install 'cudal2gen[ray]'", EXIT_TOOLCHAIN)
    except ray_executor.Unreachable as error:
        _fail(str(error), EXIT_TOOLCHAIN)
    _usage(f"--executor ray: is for --environment gpu or model, not {environment}")


def _to_tune(
    mnk: list[str] | None,
    everything: bool,
    size_class: str | None,
    sample: int | None,
    listed: Path | None,
    gpu: str,
    acc: str,
    layout: str,
    seed: int,
) -> list[Problem]:
    from cudal2gen.bench import CLASSES, stratified

    if (bool(mnk), everything, size_class is not None, sample is not None, listed is not None).count(True) != 1:
        _usage("give one of --mnk M_N_K, --all, --class NAME, --sample N and --problems FILE, or --benchmark")
    if listed is not None:
        return _alike(listed, gpu, acc, layout)
    if mnk:
        return [_problem(one, gpu, acc, layout) for one in mnk]
    if size_class is not None and size_class not in CLASSES:
        _usage(f"--class {size_class}: must be one of {', '.join(CLASSES)}")
    sizes = dict.fromkeys(record.mnk for record in catalog.load())
    problems = stratified([_problem(one, gpu, acc, layout) for one in sizes], seed)
    return [one for one in problems if size_class in (None, one.size_class)][:sample]


def _compare_proposers(gpu: str, acc: str, seeds: int, seed: int, plot: Path | None, markdown: Path | None) -> None:
    from cudal2gen.tuner import benchmark, curve

    problem = _problem("64_64_64", gpu, acc, "tn")
    published = [one for one in catalog.load() if one.gpu == "a100" and one.acc == problem.acc]
    settings = benchmark.Settings(gpu=gpu, acc=problem.acc, seeds=seeds, seed=seed)
    _on_one_core()
    found = benchmark.compare(published, settings, lambda text: print(text, file=sys.stderr, flush=True))
    table = benchmark.markdown(found)
    if markdown is not None:
        _write(markdown, table)
    if plot is not None:
        title = f"Regret on problems held out, {gpu} {acc}: modelled, not measured"
        _write(plot, curve.svg(title, "evaluations", "regret", benchmark.curves(found)))
    print(table, end="")
    print(_model_against_measured())


@app.command()
def edit(
    mnk: Mnk,
    gpu: Gpu = "a100",
    acc: Acc = "f16",
    layout: Layout = "tn",
    changes: Set = None,
) -> None:
    """Write a changed record to the catalog, after checking that it is legal."""
    with _user_errors():
        if not changes:
            _usage("nothing to change; give --set FIELD=VALUE")
        problem = _problem(mnk, gpu, acc, layout)
        found = catalog.find(problem)
        if found.record.key != problem.key:
            _usage(f"{found.note}; edit changes records of the catalog's own sizes only")
        record = _changed(found.record, changes)
        if record.key != problem.key:
            _usage("a record's problem does not change; name the other problem by --mnk, --gpu, --acc and --layout")
        target = catalog.put(record)
    print(f"{record.gpu} {record.acc} {record.layout} {record.mnk} written to {target}")


@app.command()
def report(
    out: Annotated[
        Path | None, typer.Option("--out", help="Page to write: one HTML file that needs no network.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Markdown file to write; with neither, Markdown is printed.")
    ] = None,
    result_files: Results = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="Two result files: what is faster or slower in B, beyond noise."),
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="Only measurements on this GPU.")] = None,
    acc: Annotated[str | None, typer.Option("--acc", help="Only measurements with this accumulator.")] = None,
    layout: Annotated[str | None, typer.Option("--layout", help="Only measurements with this layout.")] = None,
) -> None:
    """Report what was measured, in tables and pictures, beside the catalog's choices and published figures."""
    from cudal2gen import report as reports
    from cudal2gen import results

    filters = {"gpu": gpu, "acc": acc, "layout": layout}

    def wanted(one: results.Measurement) -> bool:
        return all(value in (None, getattr(one, name)) for name, value in filters.items())

    with _user_errors():
        try:
            if compare is not None:
                a, b = (_measurements([path]) for path in compare)
                made = reports.comparison(a, b, (compare[0].name, compare[1].name), wanted)
            else:
                made = reports.report(_measurements(result_files), catalog.load(), wanted)
            texts = {path: text() for path, text in ((out, made.html), (markdown, made.markdown)) if path is not None}
        except results.Unpaired as error:
            _fail(str(error), EXIT_FAILED)
    for path, text in texts.items():
        _write(path, text)
        print(f"written to {path}", file=sys.stderr)
    if not texts:
        print(made.markdown(), end="")


def _measurements(paths: list[Path] | None) -> results.Measurements:
    """What the given files hold together, or the store; a given file must be there."""
    from cudal2gen import results

    if paths is None:
        return results.measurements()
    read = results.Measurements({}, [])
    for path in paths:
        if not path.is_file():
            _usage(f"no results file at {path}")
        part = results.measurements(path)
        read.environments.update(part.environments)
        read.measurements.extend(part.measurements)
    return read


@app.command()
def pack(
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write, or a wheel where it ends in .whl.")],
    gpu: Gpu = "a100",
    acc: Annotated[
        list[str] | None, typer.Option("--acc", help="Only this accumulator, f16 or f32. Repeatable.")
    ] = None,
    layout: Annotated[list[str] | None, typer.Option("--layout", help="Only this layout. Repeatable.")] = None,
    mnk: Annotated[
        list[str] | None,
        typer.Option("--mnk", metavar="M_N_K", help="Records of these sizes, measured or not. Repeatable."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All records; by default those that were measured faster than the vendor's.")
    ] = False,
    result_files: Results = None,
    with_ptx: Annotated[
        bool, typer.Option("--with-ptx", help="PTX beside the cubins: for the emulator, and for reading.")
    ] = False,
    jobs: Jobs = None,
    nvcc: Nvcc = None,
) -> None:
    """Write what a machine without nvcc and CUTLASS needs: cubins, the table of choices, the launcher, a C header."""
    from cudal2gen import choice, compiler, toolchain
    from cudal2gen import pack as packs

    with _user_errors():
        if gpu not in GPUS:
            _usage(f"--gpu {gpu}: must be one of {', '.join(GPUS)}")
        if mnk and everything:
            _usage("give --mnk or --all, not both")
        kinds = [(one, other) for one in acc or ("f16", "f32") for other in layout or ("tn", "nn")]
        measured = _measurements(result_files)
        records = _to_pack(gpu, kinds, mnk, everything, measured)
        if not records:
            _usage(f"nothing is measured of {gpu}: run cudal2gen bench there, or give --mnk or --all")
        tools = toolchain.discover(nvcc)
        with _progress("compiling") as progress:
            artifacts = compiler.build(records, tools=tools, jobs=jobs, progress=progress)
        for record, artifact in zip(records, artifacts, strict=True):
            if artifact.ptxas.findings:
                _fail(f"{record.name} {artifact.ptxas.findings[0]}: no kernel for a pack", EXIT_FAILED)
        digests = {record.name: artifact.digest for record, artifact in zip(records, artifacts, strict=True)}
        table = choice.tabulate(gpu, records, measured, lambda record: digests[record.name])
        table = table if mnk or everything else table.chosen()
        built = {artifact.digest: artifact for artifact in artifacts}
        library = compiler.launcher(tools=tools)
        files = packs.contents(table, built, library, tools.nvcc_version, with_ptx)
        written = packs.write_wheel(files, out) if out.suffix == ".whl" else packs.write_folder(files, out)
    for note in table.notes:
        print(f"note: {note}", file=sys.stderr)
    won = sum(row.wins for row in table.rows)
    size = sum(map(len, files.values())) >> 10
    print(
        f"{written}: {len(table.kernels)} kernels, {len({one.digest for one in table.kernels})} binaries, {size} KiB; "
        f"{won} of {len(table.rows)} measured problems won"
    )


def _to_pack(
    gpu: str,
    kinds: list[tuple[str, str]],
    mnk: list[str] | None,
    everything: bool,
    measured: results.Measurements,
) -> list[Record]:
    """Records of these accumulators and layouts: of given sizes, all, or those of measured problems."""
    if mnk:
        return [_record(one, gpu, *kind, changes=None) for one in mnk for kind in kinds]
    chosen: list[Record] = []
    everyone = catalog.load()
    for acc, layout in kinds:
        own = {one.problem for one in measured.measurements if (one.gpu, one.acc, one.layout) == (gpu, acc, layout)}
        try:
            pool = catalog.library(gpu, acc, layout)
        except catalog.CatalogError:
            continue
        known = {record.problem: record for record in pool}
        # What bench measured of a list of problems are records made for them, and so made again.
        made = [catalog.fitted(one, everyone).record for one in sorted(own - set(known), key=lambda one: one.key)]
        chosen += (pool if everything else [known[one] for one in known if one in own]) + made
    return chosen


@app.command()
def explain(
    mnk: Mnk,
    gpu: Gpu = "a100",
    acc: Acc = "f16",
    layout: Layout = "tn",
    directory: Annotated[
        Path | None, typer.Option("--pack", metavar="DIR", help="A pack to ask, instead of the installed one.")
    ] = None,
    result_files: Results = None,
    as_json: Json = False,
) -> None:
    """Say what cudal2gen.matmul would run for packed operands, and why.

    It is asked of a pack; without one, of the catalog and of the measurements that there are.
    """
    from cudal2gen.choice import Operands

    with _user_errors():
        problem = _problem(mnk, gpu, acc, layout)
        table, source = _table(problem, directory, result_files)
        operands = Operands.packed(problem.layout, problem.n, problem.k)
        chosen = table.choose(problem, operands)
        nearest = table.choose(problem, operands, "kernel")

    def said(one: choices.Choice) -> str:
        if one.kernel is None or one.served is None:
            return "torch.matmul"
        record = table.kernels[one.kernel].record
        copies = [name for name, copied in zip("ABD", one.served.copied, strict=True) if copied]
        how = f"copies of {', '.join(copies)}" if copies else "no copies"
        return f"{record.name}, of {record.mnk}; launched as {one.served.launched.text}, {how}"

    if as_json:
        answer = {"runs": said(chosen), "why": chosen.reason, "kernel": said(nearest), "source": source}
        print(json.dumps(answer, indent=1))
        return
    print(f"runs     {said(chosen)}\nbecause  {chosen.reason}\nasked    {source}")
    if chosen.kernel is None:
        print(f"a kernel {said(nearest)}, where CUDAL2GEN_PREFER=kernel")


def _table(problem: Problem, directory: Path | None, result_files: list[Path] | None) -> tuple[choices.Table, str]:
    """The table that answers for a problem, and where it is from."""
    from cudal2gen import choice
    from cudal2gen import pack as packs

    if directory is not None:
        found = packs.open_pack(directory)
        if found.gpu != problem.gpu:
            _usage(f"--pack {directory}: is for {found.gpu}, not {problem.gpu}")
        return found.table, f"the pack in {directory}"
    if result_files is None:
        there, refused = packs.search(packs.installed())
        for reason in refused:
            print(f"note: {reason}", file=sys.stderr)
        if problem.gpu in there:
            return there[problem.gpu].table, f"the pack in {there[problem.gpu].directory}"
    measured = _measurements(result_files)
    kinds = [(problem.acc, problem.layout)]
    records = _to_pack(problem.gpu, [(acc, layout) for acc, layout in kinds], None, True, measured)
    table = choice.tabulate(problem.gpu, records, measured)
    return table, f"no pack; {len(records)} records of the catalog, {len(table.rows)} of them measured"


@app.command("tune-model")
def tune_model(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="module:callable or file.py:callable, which builds and runs a model.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The list to write, for --problems of bench and tune; else it is printed."),
    ] = None,
    gpu: Gpu = "a100",
    acc: Acc = "f32",
    real: Annotated[bool, typer.Option("--real", help="Run it on real tensors, not on ones without data.")] = False,
    any_type: Annotated[
        bool, typer.Option("--any-type", help="Count products of other types of number as if they were fp16.")
    ] = False,
) -> None:
    """Collect the products that a model really asks for, as a list of problems to measure and to tune for.

    The model runs without data, unless --real: neither its weights nor a GPU need be there.
    """
    from cudal2gen.operators import shapes

    with _user_errors():
        _problem("1_1_1", gpu, acc, "tn")
        try:
            found = shapes.collect(shapes.find_model(model), fake=not real, any_type=any_type)
        except shapes.ModelError as error:
            _usage(str(error))
        rows = found.problems(gpu, "f16" if acc == "f16" else "f32")
        for kind, count in sorted(found.others.items()):
            print(f"note: {count} products of {kind} are left out; --any-type takes them", file=sys.stderr)
        text = "".join(json.dumps(row) + "\n" for row in rows)
    if out is None:
        print(text, end="")
    else:
        _write(out, text)
        print(f"{len(rows)} problems, {sum(row['count'] for row in rows)} products, in {out}")


@app.command()
def doctor(nvcc: Nvcc = None, as_json: Json = False) -> None:
    """Tell what this machine can do, and what would add the rest."""
    from cudal2gen import build_folder, toolchain
    from cudal2gen import pack as packs

    checks: dict[str, tuple[bool, str]] = {}
    try:
        checks["catalog"] = (True, f"{len(catalog.load())} records in {places.catalog()}")
    except catalog.CatalogError as error:
        checks["catalog"] = (False, str(error))
    try:
        tools = toolchain.discover(nvcc)
        checks["compile"] = (
            True,
            f"nvcc {tools.nvcc_version} ({tools.nvcc}), "
            f"CuTe of CUTLASS {tools.cutlass_version} ({tools.cutlass_include})",
        )
    except toolchain.ToolchainError as error:
        checks["compile"] = (False, str(error))
    checks["build directory"] = build_folder.writable(places.build_dir())
    there, refused = packs.search(packs.installed())
    found = [f"{gpu} in {pack.directory}" for gpu, pack in there.items()]
    said = "; ".join([*found, *refused]) or "none installed: cudal2gen.matmul is torch's"
    checks["packs"] = (bool(there) and not refused, said)
    driver = Path("/dev/nvidiactl")
    checks["gpu"] = (
        driver.exists(),
        str(driver) if driver.exists() else "no NVIDIA driver; kernels are compiled, not run here",
    )
    if as_json:
        print(json.dumps({name: {"ok": ok, "detail": detail} for name, (ok, detail) in checks.items()}, indent=1))
    else:
        for name, (ok, detail) in checks.items():
            print(f"{'ok     ' if ok else 'missing'}  {name:16} {detail}")
    if not all(checks[name][0] for name in ("catalog", "compile", "build directory")):
        raise typer.Exit(EXIT_TOOLCHAIN)


@contextmanager
def _user_errors() -> Iterator[None]:
    """What a user can mend is one line on stderr and an exit code, never a traceback."""
    try:
        yield
    except (IllegalRecord, catalog.CatalogError) as error:
        _fail(str(error), EXIT_USAGE)
    except RuntimeError as error:
        from cudal2gen.bench import Stopped, TooGood
        from cudal2gen.compiler import BuildError
        from cudal2gen.gpu import GpuError
        from cudal2gen.pack import PackError
        from cudal2gen.toolchain import ToolchainError

        if isinstance(error, ToolchainError | GpuError):
            _fail(str(error), EXIT_TOOLCHAIN)
        if isinstance(error, BuildError | PackError | Stopped | TooGood):
            _fail(str(error), EXIT_FAILED)
        raise


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _usage(message: str) -> NoReturn:
    _fail(message, EXIT_USAGE)


def _problem(mnk: str, gpu: str, acc: str, layout: str) -> Problem:
    from pydantic import ValidationError

    from cudal2gen.kernel import explain

    parts = mnk.split("_")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) <= 9 for part in parts):
        _usage(f"--mnk {mnk}: expected three sizes M_N_K, such as 4096_4096_64")
    if gpu not in GPUS:
        _usage(f"--gpu {gpu}: must be one of {', '.join(GPUS)}")
    m, n, k = (int(part) for part in parts)
    try:
        return Problem.model_validate({"gpu": gpu, "acc": acc, "layout": layout, "m": m, "n": n, "k": k})
    except ValidationError as error:
        _usage(explain(error))


def _record(mnk: str, gpu: str, acc: str, layout: str, changes: list[str] | None) -> Record:
    found = catalog.find(_problem(mnk, gpu, acc, layout))
    if found.note:
        print(f"note: {found.note}", file=sys.stderr)
    return _changed(found.record, changes or [])


def _chosen(
    mnk: str | None, everything: bool, gpu: str, acc: str, layout: str, changes: list[str] | None
) -> list[Record]:
    if (mnk is None) != everything:
        _usage("give either --mnk M_N_K or --all")
    if mnk is not None:
        return [_record(mnk, gpu, acc, layout, changes)]
    wanted = {"gpu": gpu, "acc": acc, "layout": layout}
    records = [
        record
        for record in catalog.load()
        if all(value in ("any", getattr(record, name)) for name, value in wanted.items())
    ]
    if not records:
        _usage(f"no records for {gpu} {acc} {layout}; see 'cudal2gen list'")
    return [_changed(record, changes or []) for record in records]


def _changed(record: Record, changes: list[str]) -> Record:
    if not changes:
        return record
    before = record.model_dump(mode="json")
    fields = dict(before)
    wanted = next((change.removeprefix("family=") for change in changes if change.startswith("family=")), record.family)
    if wanted in FAMILIES and wanted != record.family:
        # Another family: what it shares with the old one stays, unless it has a better start; what it lacks goes.
        known = FAMILIES[wanted].model_fields
        fields = {name: value for name, value in fields.items() if name in known}
        fields |= FAMILIES[wanted].plain(record.problem)
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            _usage(f"--set {change}: expected FIELD=VALUE")
        name, dot, inner = name.partition(".")
        if dot and not isinstance(fields.get(name), dict):
            _usage(f"--set {change}: {name} has no parts")
        fields[name] = fields[name] | {inner: _value(text)} if dot else _field(name, text, fields.get(name))
    touched = {name for name, value in fields.items() if value != before.get(name, ...)}
    if touched and "origin" not in touched:
        changed = sorted({*record.origin.changed, *touched})
        fields["origin"] = {"source": record.origin.source, "structure": "modelled", "changed": changed}
    return parse(fields)


def _field(name: str, text: str, old: Any) -> Any:
    """A field's value from its spelling: JSON, or ``2,2,1`` for a list and ``multi:3`` for a prefetch."""
    if name == "prefetch" and not text.startswith("{"):
        kind, _, distance = text.partition(":")
        return {"kind": kind, "distance": _value(distance) if distance else None}
    if text.startswith("[") and isinstance(value := _value(text), str):
        text = value.strip("[]")
    if isinstance(old, list) and not text.startswith("[") and text != "null":
        return [_value(part.strip()) for part in text.split(",") if part.strip()]
    return [_value(part) for part in text.split(",")] if "," in text and text[0] not in "[{" else _value(text)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        _usage(f"cannot write {path}: {error.strerror}")


def _built(record: Record) -> Artifact | None:
    from cudal2gen import compiler, toolchain

    try:
        return compiler.find(record)
    except toolchain.ToolchainError:
        return None


def _facts(record: Record, artifact: Artifact | None) -> dict[str, Any]:
    registers = artifact.ptxas.registers if artifact else record.estimated_registers
    facts: dict[str, Any] = {
        "name": record.name,
        "threads": record.threads,
        "smem_bytes": record.smem_bytes,
        "smem_limit_bytes": record.target.smem_block_bytes,
        "registers_estimated": record.estimated_registers,
        "registers": artifact.ptxas.registers if artifact else None,
        "ctas": record.ctas,
        "ctas_per_sm": record.ctas_per_sm(registers),
        "waves": round(record.waves(registers), 2),
        "padding_waste": round(record.padding_waste, 4),
        **record.facts,
        "remarks": record.remarks,
    }
    if artifact:
        from cudal2gen import results

        verdict = results.latest().get((artifact.digest, "emulator"))
        facts["verdict"] = None if verdict is None else "right" if verdict.passed else "wrong"
        facts |= verdict.counters if verdict else {}
        facts |= {"directory": str(artifact.directory), "findings": artifact.ptxas.findings}
    return facts


@contextmanager
def _progress(title: str) -> Iterator[Any]:
    """A progress bar on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report


@contextmanager
def _countdown() -> Iterator[Callable[[int, int, float], None]]:
    """Progress on stderr: a bar on a terminal, else a line every ten seconds."""
    with _progress("measuring") as bar:
        last = [0.0]

        def report(done: int, total: int, left: float) -> None:
            if bar:
                bar(done, total)
            elif time.monotonic() - last[0] > 10:
                last[0] = time.monotonic()
                print(f"{done} of {total} problems, about {left:.0f} s left", file=sys.stderr, flush=True)

        yield report


def main() -> None:
    """Entry point of the ``cudal2gen`` command: what a user or a system can mend is one line and an exit code."""
    import signal

    # A reader that has seen enough ends this program quietly, as it does others.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # As an exit, so that compilers are ended and scratch folders removed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        print(f"error: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        # What Python still holds back would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(EXIT_FAILED)
