"""Times published CUDA-L2 kernels alternating with this project's and torch.matmul, on the same data.

    python -m scripts.race_published CHECKOUT --gpu h200 --acc f32 --sample 60 --build-only    compiles, on any machine
    python -m scripts.race_published --budget 60s --out DIR           on the card: times what build/published/ holds
    python -m scripts.race_published CHECKOUT --gpu h200 --acc f16 --mnk 4096_4096_64          does both
    python -m scripts.race_published --table --out DIR                prints what is stored

CHECKOUT is a clone of deepreinforce-ai/CUDA-L2. Nothing of it enters this repository, and git ignores build/. A kernel
is called through its own host function (``published_library``). It is timed and checked as `cudal2gen bench` does it,
and stored in the same form, in ``published.jsonl``. A contender is named after the GPU for which its kernels were
published: cuda-l2-h100, cuda-l2-a100.

A published kernel is not timed, and is stored as absent with the reason, if its product is wrong, if a CUDA graph
cannot hold it, or if it ends the process. The published benchmark does not time the padding of matrices; here the
copies are timed, as they are for this project's kernels, and their time is also stored on its own.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cudal2gen import bench, results
from cudal2gen.bench.check import Reference
from cudal2gen.cli.selection import Selection
from cudal2gen.kernel import GPUS, Acc, Problem
from cudal2gen.launch.gpu import Absent, Call, Contender, Gpu, Race
from cudal2gen.launch.operands import Operands
from cudal2gen.results import KERNEL, Measurement, ratios
from kernelproof.ground.chips import related
from kernelproof.ground.command_line.options import seconds
from kernelproof.ground.errors import Failure, UserError, WrongInput
from kernelproof.ground.pages import grid
from scripts.published_library import SETS, Library, Loaded, Source, build, libraries

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "published"
# The store of these measurements, the contender to which kernels are compared, and how names of published ones begin.
STORE = "published"
TORCH = "torch.matmul"
PREFIX = "cuda-l2-"
ACCS: tuple[Acc, ...] = ("f32", "f16")
# The published kernels' GPUs.
DEVICES = ("a100", "h100", "3090")
ENDED = 86  # exit code of a process whose device a published kernel stopped
TRIAL_SECONDS = 20  # for a published kernel's first product on a GPU; one that hangs ends its process


class Matrices(NamedTuple):
    """The matrices that a published function is called on: ``a`` (m,k), ``b_rows`` (k,n), ``b`` (n,k), ``d`` (m,n).

    ``b_rows`` and ``b`` are the same matrix B in two layouts. If the sizes are padded, ``before`` and ``after`` are the
    copies into and out of these matrices, as pairs (target, source).
    """

    a: torch.Tensor
    b_rows: torch.Tensor
    b: torch.Tensor
    d: torch.Tensor
    before: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    after: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()


class Published:
    """The published kernels of one folder, as a ``gpu.Contender``.

    ``published_for``: the GPU that the folder is named after. ``graphs``: whether the calls must fit into a CUDA graph,
    as the protocol ``device`` demands. ``ended``: paths of the sources whose kernels ended an earlier process.
    ``trial``: the file that has the path of a kernel's source while its first product runs.
    """

    def __init__(
        self, published_for: str, card: Gpu, kernels: dict[Problem, Library],
        graphs: bool, ended: Sequence[str], trial: Path,
    ) -> None:  # fmt: skip
        self.name = f"{PREFIX}{published_for}"
        self.detail = ""
        self._card, self._kernels, self._graphs, self._ended, self._trial = card, kernels, graphs, ended, trial
        self._loaded: dict[Problem, Loaded] = {}
        self._too_good: dict[Problem, str] = {}
        self._problem: Problem | None = None
        self._tried = False

    def prepare(self, problem: Problem, race: Race) -> None:  # noqa: ARG002
        """Loads the problem's kernel. Raises Absent."""
        library = self._kernels.get(problem)
        if library is None:
            raise Absent("not built: no published kernel of this problem, or it does not compile")
        if library.source.path in self._ended:
            raise Absent(f"{library.source.path} stopped the device or ended the process")
        if problem in self._too_good:
            raise Absent(self._too_good[problem])
        if problem not in self._loaded:
            try:
                self._loaded[problem] = Loaded(library, self._card.runtime_library)
            except Failure as error:
                raise Absent(str(error)) from None
        self._problem, self._tried = problem, False
        self.detail = library.title
        if library.padded != library.source.sizes:
            self.detail += f", padded to {'_'.join(map(str, library.padded))}, in the timing"

    def refuse(self, error: bench.TooGood) -> None:
        """Makes the current problem's kernel absent from now on, because its time is below what the hardware allows."""
        self._too_good[self._current] = str(error)

    def bind(self, operands: Operands) -> Call:
        """A call of the product on these tensors. The first time it is also checked: raises Absent if it is wrong."""
        product, _ = self.stages(operands)
        if not self._tried:
            self._try(operands, product)
            self._tried = True
        return product

    def stages(self, operands: Operands) -> tuple[Call, Call | None]:
        """The whole call, and the part of it that copies to and from padded matrices, if there is any."""
        matrices = self._matrices(operands)
        run = self._loaded[self._current].call(*matrices[:4], self._card.stream)

        # ``run`` has only the addresses of the operands, so ``call`` keeps them alive by its default argument.
        def call(_keep: object = operands) -> None:
            if fault := run():
                raise Absent(fault)

        if not matrices.before:
            return call, None

        def padded_call() -> None:
            _copy(matrices.before)
            call()
            _copy(matrices.after)

        return padded_call, lambda: _copy((*matrices.before, *matrices.after))

    @property
    def _current(self) -> Problem:
        """The problem that is measured."""
        assert self._problem is not None, "prepare comes first"
        return self._problem

    def _matrices(self, operands: Operands) -> Matrices:
        """The matrices for the published function: the operands, or zero-padded copies if its sizes are padded."""
        library = self._kernels[self._current]
        own = Matrices(operands.a, operands.b_nn, operands.b, operands.d)
        if library.padded == library.source.sizes:
            return own
        m, n, k = library.padded
        shapes = ((m, k), (k, n), (n, k), (m, n))
        a, b_rows, b, d = (self._card.empty(*shape).zero_() for shape in shapes)
        inputs = [(a, own.a), (b, own.b), *([(b_rows, own.b_rows)] if library.reads_rows else [])]
        before = tuple((_corner(padded, part), part) for padded, part in inputs)
        return Matrices(a, b_rows, b, d, before, ((own.d, _corner(d, own.d)),))

    def _try(self, operands: Operands, call: Call) -> None:
        """Runs the kernel for the first time. Raises Absent if its product is wrong or if no graph can hold it.

        If the kernel stops the device, this process ends, because it can no longer use the device. The process that
        started it (``supervise``) then continues without the kernel, whose name it reads from the file ``trial``.
        """
        library = self._kernels[self._current]
        self._trial.write_text(library.source.path)
        faulthandler.dump_traceback_later(TRIAL_SECONDS, exit=True)
        try:
            finding = self._product_fault(operands, call)
            if not finding and self._graphs:
                matrices = self._matrices(operands)
                refusal = self._loaded[self._current].refusal(*matrices[:4], self._card.stream)
                finding = f"a CUDA graph cannot hold it: {refusal}" if refusal else ""
            self._card.synchronize()
        except Absent:
            self._leave_if_stopped()
            raise
        except RuntimeError as error:
            self._leave_if_stopped()
            finding = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._trial.unlink()
        if finding:
            raise Absent(finding)

    def _product_fault(self, operands: Operands, call: Call) -> str:
        """What is wrong with a fresh product; empty if nothing is."""
        # The references are made before the call, which may write to A and B.
        problem = self._current
        reference, fp16_reference = (Reference(problem.revised(acc=acc), operands) for acc in (problem.acc, "f16"))
        _, finding = reference.error(self._card, call, strict=False)
        if not finding:
            return ""
        # The finding says if the product is within the bounds of sums in fp16. Nothing has been timed yet.
        _, fp16_finding = fp16_reference.compare(operands.d, strict=False)
        return finding.replace(" after the timing", "" if fp16_finding else ", as of sums in fp16")

    def _leave_if_stopped(self) -> None:
        """Ends this process with the exit code ``ENDED`` if the device no longer works."""
        try:
            self._card.synchronize()
        except RuntimeError as error:
            print(f"{self._current.mnk}: {error}", file=sys.stderr, flush=True)
            os._exit(ENDED)


def _corner(matrix: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The upper left corner of a matrix, of the size of ``part``."""
    return matrix[: part.shape[0], : part.shape[1]]


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Makes copies that are given as pairs (target, source)."""
    for target, source in pairs:
        target.copy_(source)


def compile_all(options: argparse.Namespace) -> tuple[list[str], int]:
    """Compiles the published kernels of the selected problems; returns the files' names, and how many failed."""
    if not (options.checkout / "kernels").is_dir():
        raise WrongInput(f"{options.checkout}: no folder kernels; name a clone of deepreinforce-ai/CUDA-L2")
    options.acc = options.acc or "f32"
    problems = [record.problem for record in _selection(options, options.gpu).records(seed=options.seed)]
    folders = options.kernels_of or ("a100", "h100")
    sources = [
        Source(published_for, acc, problem.mnk)
        for published_for, acc in SETS
        for problem in problems
        if published_for in folders and acc == problem.acc
    ]
    present = [source for source in sources if (options.checkout / source.path).is_file()]
    print(f"{len(present)} published kernels of {len(problems)} problems, compiled into {options.built}")

    def attempt(source: Source) -> tuple[str, str]:
        start = time.monotonic()
        try:
            path = build(options.checkout, source, options.gpu, options.built).path
        except Failure as error:
            return "", f"fault: {error}"
        print(f"{path.name}: {path.stat().st_size >> 10} KiB, {time.monotonic() - start:.0f} s", flush=True)
        return path.name, ""

    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(attempt, present))
    names = [name for name, _ in outcomes if name]
    faults = [fault for _, fault in outcomes if fault]
    print("\n".join([*faults, f"{len(names)} libraries, {len(faults)} faults"]))
    return names, len(faults)


def _selection(options: argparse.Namespace, gpu: str) -> Selection:
    """The problems that the options select."""
    return Selection(
        mnk=tuple(options.mnk or ()),
        everything=options.all,
        size_class=options.size_class,
        sample=options.sample,
        gpu=gpu,
        acc=options.acc,
    )


def supervise(arguments: Sequence[str], budget: float | None) -> int:
    """Runs the race in a process of its own, and again in another one if a published kernel ended it; returns its exit
    code."""
    begin, ended = time.monotonic(), list[str]()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as scratch:
        trial = Path(scratch) / "trial"
        while True:
            command = [sys.executable, "-m", "scripts.race_published", *arguments, "--trial", str(trial)]
            command += [word for path in ended for word in ("--ended", path)]
            if budget is not None:
                remaining = budget - (time.monotonic() - begin)
                if remaining < 1:
                    print("the budget is spent; the same command goes on with what is left", file=sys.stderr)
                    return 0
                command += ["--budget", f"{remaining:.1f}s"]
            code = subprocess.run(command, env=environment, check=False).returncode
            if not trial.is_file():
                return code
            ended.append(trial.read_text())
            trial.unlink()
            print(f"{ended[-1]} ended the process; going on without it", file=sys.stderr)


def race(options: argparse.Namespace) -> int:
    """Times what is built for the card, in this process; returns the number of faults."""
    from cudal2gen.launch.gpu import connect, reserved_device

    everything = list(libraries(options.built))
    if not everything:
        print(f"nothing to race: {options.built} has no published kernels; compile some from a CHECKOUT")
        return 0
    card = connect(options.device)
    gpu = card.environment.gpu
    built = [library for library in everything if related(library.gpu, gpu)]
    if options.library:
        built = [library for library in built if library.path.name in options.library]
    elif options.mnk:
        built = [library for library in built if library.source.mnk in options.mnk]
    accs: list[Acc] = [acc for acc in ACCS if any(library.source.acc == acc for library in built)]
    if options.acc:
        accs = [acc for acc in accs if acc == options.acc]
    if not accs:
        print(f"nothing to race: {options.built} has no such kernels for {gpu or card.name}")
        return 0
    begin, faults = card.now(), 0
    with reserved_device(options.device):
        for number, acc in enumerate(accs):
            remaining = None if options.budget is None else options.budget - (card.now() - begin)
            acc_budget = None if remaining is None else remaining / (len(accs) - number)
            acc_libraries = [library for library in built if library.source.acc == acc]
            faults += _race_of(card, acc, gpu, acc_libraries, acc_budget, options)
    return faults


def _race_of(
    card: Gpu, acc: Acc, gpu: str, built: Sequence[Library], budget: float | None, options: argparse.Namespace
) -> int:
    """Times the kernels of one accumulator within a budget in seconds; returns the number of faults."""
    from cudal2gen.bench import baselines
    from cudal2gen.cli.building import Compilation

    mnks = tuple(dict.fromkeys(library.source.mnk for library in built))
    records = Selection(mnk=mnks, gpu=gpu, acc=acc).records()
    kernels = Compilation().kernels(records)
    problem_of = {record.problem.mnk: record.problem for record in records}
    names = tuple(name for name in options.baselines.split(",") if name != "none")
    rivals = baselines.contenders(names, acc, card, options.store.with_name("cublaslt.jsonl"))
    faults = 0
    for protocol in options.protocol.split(","):
        contenders = []
        for published_for in dict.fromkeys(library.source.device for library in built):
            folder = [library for library in built if library.source.device == published_for]
            of_problem = {problem_of[library.source.mnk]: library for library in folder}
            graphs = protocol == "device"
            contenders.append(Published(published_for, card, of_problem, graphs, options.ended, options.trial))
        settings = bench.Settings((protocol,), options.warmup_seconds, options.benchmark_seconds, seed=options.seed)

        def run(rivals: Sequence[Contender], settings: bench.Settings = settings) -> bench.RunOutcome:
            plan = bench.BenchPlan(
                [record for record in records if record.problem in kernels],
                lambda record: kernels[record.problem].open(card),
                lambda record: kernels[record.problem].artifact.digest,
                rivals,
                settings,
                options.store,
                budget_seconds=budget,
                again=options.again,
            )
            return bench.run(card, plan)

        outcome = until_possible(run, contenders, rivals)
        print("\n".join(f"fault: {fault}" for fault in outcome.faults), file=sys.stderr)
        print(
            f"{gpu} {acc} {protocol}: {outcome.measured} measurements added to {options.store}, {outcome.stored} "
            f"problems stored before, {outcome.left} left, {len(outcome.faults)} faults"
        )
        faults += len(outcome.faults)
    return faults


def until_possible(
    run: Callable[[Sequence[Contender]], bench.RunOutcome], published: Sequence[Published], rivals: Sequence[Contender]
) -> bench.RunOutcome:
    """Runs a race, and begins it again if a published kernel's time is below what the hardware allows."""
    while True:
        try:
            return run([*published, *rivals])
        except bench.TooGood as error:
            by_name = {contender.name: contender for contender in published}
            if error.contender not in by_name:
                raise
            by_name[error.contender].refuse(error)


def table(rows: Sequence[Measurement]) -> list[str]:
    """Times and ratios by problem, protocol and L2 state, geometric means, and what could not be timed."""
    names = sorted({name for row in rows for name in (*row.contenders, *row.absent) if name.startswith(PREFIX)})
    lines: list[str] = []
    for name in names:
        columns = (
            "problem",
            "acc",
            "protocol, L2",
            f"{KERNEL} us",
            f"{name} us",
            "of it padding",
            f"{TORCH} us",
            f"{KERNEL} over {name} [95 %]",
        )
        cells = []
        speedups: dict[str, list[float]] = {}
        for row, ratio in zip(rows, results.speedups(rows, name), strict=True):
            published = row.timing(name)
            if published is None or ratio is None:
                continue
            state = f"{row.acc}, {row.protocol}, L2 {row.l2}"
            speedups.setdefault(state, []).append(ratio.value)
            cells.append(
                (
                    row.mnk,
                    row.acc,
                    f"{row.protocol}, {row.l2}",
                    _us(row, KERNEL),
                    f"{published.median_us:.2f}",
                    f"{published.padding_us or 0:.2f}",
                    _us(row, TORCH),
                    f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
                )
            )
        lines += [f"## {name}", "", *grid(columns, cells, left=3).split("\n"), ""]
        for state, values in sorted(speedups.items()):
            mean = ratios.geomean(values)
            assert mean is not None
            wins = sum(value > 1 for value in values)
            lines.append(
                f"- {state}: geometric mean {mean.value:.3f} [{mean.low:.3f}, {mean.high:.3f}] over {len(values)} "
                f"problems, {wins} faster than published"
            )
        missing = sorted({(row.acc, row.mnk, row.absent[name]) for row in rows if name in row.absent})
        lines += [f"- {acc} {mnk} not timed: {reason}" for acc, mnk, reason in missing]
        lines.append("")
    return lines


def _us(row: Measurement, name: str) -> str:
    """A contender's median time in microseconds, - if it was not measured."""
    timing = row.timing(name)
    return f"{timing.median_us:.2f}" if timing else "-"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("checkout", type=Path, nargs="?", help="a clone of deepreinforce-ai/CUDA-L2, to compile from")
    options.add_argument("--gpu", choices=tuple(GPUS), default="h200", help="compile for this GPU (default h200)")
    options.add_argument("--acc", choices=ACCS, help="accumulator; f32 to compile, both to race")
    options.add_argument("--mnk", action="append", metavar="M_N_K", help="problem size; repeatable")
    options.add_argument("--all", action="store_true", help="all sizes")
    options.add_argument("--class", dest="size_class", choices=bench.CLASSES, help="the sizes of this class")
    options.add_argument("--sample", type=int, help="number of sizes, spread over the classes")
    options.add_argument("--kernels-of", action="append", choices=DEVICES, help="by default a100 and h100")
    options.add_argument("--jobs", "-j", type=int, default=os.cpu_count(), help="compiler processes at a time")
    options.add_argument("--built", type=Path, default=BUILT, help="compiled kernels, default build/published")
    options.add_argument("--build-only", action="store_true", help="compile only; race on a machine with a GPU")
    options.add_argument("--table", action="store_true", help="only print what is stored")
    options.add_argument("--out", type=Path, help="folder of published.jsonl, default results/")
    options.add_argument("--budget", type=seconds, help="end after, e.g., 60s; no problem is begun without time for it")
    options.add_argument("--protocol", default="device", help="of device, offline, server, separated by commas")
    options.add_argument("--baselines", default=TORCH, help=f"further contenders, default {TORCH}; or none")
    options.add_argument("--warmup-seconds", type=float, default=3.0)
    options.add_argument("--benchmark-seconds", type=float, default=0.25, help="of timing per problem and L2 state")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--device", type=int, default=0)
    options.add_argument("--again", action="store_true", help="measure what is stored again")
    options.add_argument("--trial", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--library", action="append", default=[], help=argparse.SUPPRESS)
    options.add_argument("--ended", action="append", default=[], help=argparse.SUPPRESS)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: done; 1: a kernel does not compile, or a fault in the race; 2: an error that the user can fix, such
    as a wrong option, a missing compiler or a missing GPU."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    options.store = options.out.resolve() / f"{STORE}.jsonl" if options.out else results.store(STORE)
    try:
        if options.trial is not None:
            return 1 if race(options) else 0
        if options.build_only and options.checkout is None:
            raise WrongInput("--build-only needs CHECKOUT, a clone of deepreinforce-ai/CUDA-L2")
        code = 0
        if options.checkout is not None and not options.table:
            names, faults = compile_all(options)
            code = 1 if faults else 0
            words += [word for name in names for word in ("--library", name)]
        if not (options.table or options.build_only):
            code = supervise(words, options.budget) or code
        if options.store.is_file():
            print("\n".join(table(results.measurements(options.store).latest())))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
