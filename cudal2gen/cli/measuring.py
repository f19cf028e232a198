"""The verbs ``bench``, ``report`` and ``contribute`` take measurements, show them, and export them for sharing."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from cudal2gen.cli.building import Compilation
from cudal2gen.cli.options import Duration
from cudal2gen.cli.program import app
from cudal2gen.cli.selection import ANY, PLAIN, VARIANT_FIELDS, Filter, Selection
from cudal2gen.generation import catalog
from cudal2gen.kernel import Problem
from kernelproof.ground.command_line import progress
from kernelproof.ground.command_line.groups import Offer, Shared, verb
from kernelproof.ground.command_line.messages import EXIT_FAILED, note, refuse
from kernelproof.ground.command_line.options import Names, listed_names
from kernelproof.ground.files import write

if TYPE_CHECKING:
    from cudal2gen import bench, report, results
    from cudal2gen.launch.gpu import Contender, Gpu
    from cudal2gen.results import ProtocolName

DEFAULT_PROTOCOLS = Names(("device",))


def _protocol_names(text: str) -> Names:
    """Names of protocols joined by +. Raises ValueError."""
    names = Names(text.split("+"))
    if unknown := set(names) - set(_protocols()):
        raise ValueError(f"{min(unknown)!r} is not one of {', '.join(map(repr, _protocols()))}")
    return names


def _seconds(text: str) -> float:
    """A number of seconds, 0 included. Raises ValueError."""
    return _number(text, 0.0)


def _rate(text: str) -> float:
    """A positive number of calls per second. Raises ValueError."""
    return _number(text, 0.001)


def _number(text: str, least: float) -> float:
    """A finite number from ``least`` on. Raises ValueError."""
    value = float(text)
    if not least <= value < math.inf:
        raise ValueError(f"expected a number of at least {least:g}")
    return value


def _protocols() -> tuple[ProtocolName, ...]:
    """The names that ``--timing protocol=`` takes."""
    from cudal2gen.results import ProtocolName

    return get_args(ProtocolName)


def _baselines() -> tuple[str, ...]:
    """The names that ``--baselines`` takes."""
    from cudal2gen.bench import baselines

    return (*baselines.DEFAULT_BASELINES, *baselines.OPTIONAL_BASELINES, *baselines.VARIANT_BASELINES, "none")


@dataclass(frozen=True)
class TimingOptions:
    """The options that say which baselines are timed, under which protocols, and for how long."""

    protocol: Annotated[
        Names,
        Shared(
            "protocol",
            "any of device, offline, server, joined by +; by default device",
            _protocol_names,
            option="--timing",
        ),
    ] = DEFAULT_PROTOCOLS
    warmup_seconds: Annotated[
        float,
        Shared("warmup", "seconds of warm-up before the first problem, by default 3", _seconds, option="--timing"),
    ] = 3.0
    benchmark_seconds: Annotated[
        float | None,
        Shared(
            "seconds",
            "seconds of timing per problem, protocol and L2 state; by default 0.25, or 2 with host time",
            _seconds,
            option="--timing",
        ),
    ] = None
    target_qps: Annotated[
        float, Shared("qps", "arrivals per second in the protocol server, by default 1000", _rate, option="--timing")
    ] = 1000.0
    seed: Annotated[
        int, Shared("seed", "seed of inputs and of the order of problems, by default 0", int, option="--timing")
    ] = 0
    baselines: Annotated[
        Names | None,
        listed_names(
            "--baselines",
            _baselines,
            "Names separated by commas, or none; by default the vendor's, or torch's for a fusion or a batch.",
        ),
    ] = None

    def settings(self, products: int) -> bench.Settings:
        """The benchmark's settings for launches of this number of ``products``."""
        from cudal2gen.bench import Settings

        protocols = tuple(name for name in _protocols() if name in self.protocol)
        return Settings(
            protocols=protocols,
            warmup_seconds=self.warmup_seconds,
            benchmark_seconds=self.benchmark_seconds or (0.25 if protocols == ("device",) else 2.0),
            target_qps=self.target_qps,
            seed=self.seed,
            products=products,
        )

    def contenders(self, problem: Problem, card: Gpu, tuned: Path) -> list[Contender]:
        """The baselines for a problem. ``tuned`` is the file of auto-tuned algorithms.

        Raises GpuError if a baseline's library is not installed.
        """
        from cudal2gen.bench import baselines

        names = baselines.default_names(problem) if self.baselines is None else self.baselines
        return baselines.contenders([name for name in names if name != "none"], problem.acc, card, tuned)


FORMS = (".html", ".md")  # suffixes of the files that a report can be written to
ResultFiles = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[FILES]", help="Files of measurements; by default the store's.", show_default=False),
]
MeasurementsFile = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="The file of measurements to add to; by default results/measurements.jsonl."),
]


@verb(app, "bench")
def measure(
    selection: Annotated[
        Selection,
        Offer(
            only=(*PLAIN, *VARIANT_FIELDS, "products", "source"),
            wildcards=("gpu",),
            indexed=("gpu",),
            defaults={"gpu": ANY},
            helps={"gpu": "the card's model, or any to ask the driver; after a colon its CUDA index, as in any:1"},
        ),
    ],
    timing: TimingOptions,
    compilation: Compilation,
    budget: Duration = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure stored problems again; by default they are skipped.")
    ] = False,
    out: MeasurementsFile = None,
) -> None:
    """Measure kernels against the vendor's libraries on the GPU. Every measurement is stored as it is taken."""
    from cudal2gen import bench, results
    from cudal2gen.launch.gpu import connect, reserved_device

    if selection.products > 1 and selection.batch == "none":
        refuse(
            f"--where products={selection.products}: needs --where batch=strided; other kernels compute one a launch"
        )
    card, source = connect(selection.device), selection.source
    if not card.environment.gpu and selection.gpu == ANY:
        note(f"{card.facts.text} has no records of its own: measuring those of {card.record_model}, under its own name")
    records = selection.on(card.record_model).records(source, timing.seed)
    card.check(records[0])
    _check_model(card, records[0].gpu)
    # Measurements of another GPU's records go to a file of their own: in the usual file they would replace those of the
    # card's own records in choices and reports.
    store = out or results.store(f"{source}-records" if source else "measurements")
    # This comes before compiling, which takes long, because it fails if the vendor's packages are missing.
    contenders = timing.contenders(records[0].problem, card, store.with_name("cublaslt.jsonl"))
    kernels = compilation.kernels(records)
    uncompiled = sum(record.problem not in kernels for record in records)
    plan = bench.BenchPlan(
        [record for record in records if record.problem in kernels],
        lambda record: kernels[record.problem].open(card),
        lambda record: kernels[record.problem].artifact.digest,
        contenders,
        timing.settings(selection.products),
        store,
        budget_seconds=budget,
        again=again,
    )
    with reserved_device(selection.device), progress.countdown("measuring") as show:
        outcome = bench.run(card, plan, show)
    for fault in outcome.faults:
        print(f"fault: {fault}", file=sys.stderr)
    print(
        f"{len(records)} problems, {outcome.stored} of them stored before: {outcome.measured} measurements added to "
        f"{store}, {outcome.left} problems left, {len(outcome.faults) + uncompiled} faults"
    )
    if outcome.faults or uncompiled:
        raise typer.Exit(EXIT_FAILED)


def _check_model(card: Gpu, model: str) -> None:
    """Ends the command if the records are for another GPU model: measurements belong to the card that takes them."""
    if card.environment.gpu not in ("", model):
        refuse(
            f"{model}: this is {card.environment.name}, and measurements are of the card that takes them; "
            f"leave out --gpu, or give --where records={model}"
        )


@verb(app, "report")
def write_report(
    selection: Filter,
    files: ResultFiles = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out",
            "-o",
            help="File to write: a page (.html) that needs no network, or Markdown (.md), which is else printed. "
            "Repeatable.",
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show what is faster or slower in the second of two FILES, beyond noise.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Only check FILES: exit 1 if a measurement in them is impossible.")
    ] = False,
) -> None:
    """Report what was measured, beside what others published.

    The report has tables and pictures, and the catalog's choices and verdicts. FILES are measurements (.jsonl), by
    default those of the store, and the output of `cudal2gen model --json` (.json), which becomes a section.
    """
    from cudal2gen import report, results
    from cudal2gen.timing.evidence import section

    result_files = [path for path in files or () if path.suffix != ".json"]
    if verify:
        _verify(result_files or [results.store("measurements")])
        return
    for path in out or ():
        if path.suffix not in FORMS:
            refuse(f"--out {path}: expected a file that ends in {' or '.join(FORMS)}")
    if compare:
        if len(result_files) != 2:
            refuse(f"--compare: expected two FILES of measurements, got {len(result_files)}")
        before, after = (measurements([path]) for path in result_files)
        content = report.comparison(before, after, (result_files[0].name, result_files[1].name), selection.selects)
    else:
        rows = [row for path in files or () if path.suffix == ".json" for row in section.load(path)]
        measured = measurements(result_files)
        content = report.report(
            measured, report.needed_records(measured), selection.selects, _stock(result_files), rows
        )
    for path in out or ():
        write(path, content.html() if path.suffix == ".html" else content.markdown())
        print(f"written to {path}", file=sys.stderr)
    if not out:
        print(content.markdown(), end="")


def _verify(paths: Sequence[Path]) -> None:
    """Prints what each file of measurements holds, and its faults. Ends with exit code 1 if there is a fault."""
    from cudal2gen import report

    faults = 0
    for path in paths:
        _check_exists(path)
        inspection = report.inspect(path)
        for fault in inspection.faults:
            print(f"fault: {fault}")
        print(f"{path}: {inspection.summary}; faults: {len(inspection.faults) or 'none'}")
        faults += len(inspection.faults)
    if faults:
        raise typer.Exit(EXIT_FAILED)


def _check_exists(path: Path) -> None:
    """Ends the command if there is no results file at this path."""
    if not path.is_file():
        refuse(f"no results file at {path}; `cudal2gen bench` on a GPU writes one")


@verb(app, "contribute")
def contribute(
    files: ResultFiles = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("contribution.jsonl"),
) -> None:
    """Write your measurements as one file to share, and check it. It does not name your machine."""
    from cudal2gen import report

    rows = report.anonymous(measurements(files or ()))
    if not rows.measurements:
        refuse("no measurements to contribute: run `cudal2gen bench` on a GPU first, or name FILES")
    lines = [*rows.environments.values(), *rows.measurements]
    write(out, "".join(f"{line.model_dump_json()}\n" for line in lines))
    _verify([out])
    print(f"attach {out} to a pull request as results/contributed/<gpu>-<date>.jsonl; it names no host and no folder")


def _stock(result_files: Sequence[Path]) -> report.Stock:
    """What a report counts besides measurements, and the files in which it looked for measurements."""
    from cudal2gen import places, report, results
    from cudal2gen.generation import compiler
    from cudal2gen.results.proofs import proofs

    files = result_files or (results.store("measurements"),)
    sources = [str(path) if path.is_file() else f"{path}, which is not there," for path in files]
    return report.Stock(
        sources,
        catalog.entries(),
        results.rulings(),
        compiler.count_kernels(),
        str(places.build_dir()),
        proofs().values(),
    )


def measurements(paths: Sequence[Path]) -> results.Measurements:
    """All measurements of the files; without files, those of the store. Raises WrongInput if a file is missing."""
    from cudal2gen import results

    if not paths:
        return results.measurements()
    total = results.Measurements({}, [])
    for path in paths:
        _check_exists(path)
        part = results.measurements(path)
        total.environments.update(part.environments)
        total.measurements.extend(part.measurements)
    return total
