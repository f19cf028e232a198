"""The verbs on measurements: bench takes them, report shows them, contribute hands them on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from cudal2gen.cli.building import Compilation
from cudal2gen.cli.options import Device, Duration, ResultFiles
from cudal2gen.cli.program import app
from cudal2gen.cli.selection import ANY, LATER, PLAIN, Filter, Selection
from cudal2gen.generation import catalog
from cudal2gen.kernel import GPUS, Problem
from kernelproof.ground.command_line import progress
from kernelproof.ground.command_line.groups import Offer, OneOf, verb
from kernelproof.ground.command_line.messages import EXIT_FAILED, note, refuse
from kernelproof.ground.command_line.options import Names, listed_names
from kernelproof.ground.files import write

if TYPE_CHECKING:
    from cudal2gen import bench, report, results
    from cudal2gen.launch.gpu import Contender, Gpu
    from cudal2gen.results import ProtocolName

DEVICE = Names(("device",))


def _protocols() -> tuple[ProtocolName, ...]:
    from cudal2gen.results import ProtocolName

    return get_args(ProtocolName)


def _baselines() -> tuple[str, ...]:
    from cudal2gen.bench import baselines

    return (*baselines.MEASURED, *baselines.PEERS, *baselines.LATER, "none")


@dataclass(frozen=True)
class Timing:
    """What to time beside our kernels, how, and for how long."""

    protocol: Annotated[
        Names, listed_names("--protocol", _protocols, "Any of device, offline, server, separated by commas.")
    ] = DEVICE
    warmup_seconds: Annotated[float, typer.Option(min=0, help="Warm-up before the first problem.")] = 3.0
    benchmark_seconds: Annotated[
        float | None, typer.Option(min=0, help="Timing per problem, protocol and L2 state; 0.25, or 2 with the host.")
    ] = None
    target_qps: Annotated[float, typer.Option(min=0.001, help="Arrivals per second in the server protocol.")] = 1000.0
    seed: Annotated[int, typer.Option(help="Seed of inputs and order.")] = 0
    baselines: Annotated[
        Names | None,
        listed_names(
            "--baselines",
            _baselines,
            "Names separated by commas, or none; by default the seven vendor ones, or torch's of --fusion or --batch.",
        ),
    ] = None

    products: Annotated[
        int, typer.Option("--products", min=1, max=65535, help="Products of a launch, with --batch.")
    ] = 1

    @property
    def settings(self) -> bench.Settings:
        """The benchmark's settings."""
        from cudal2gen.bench import Settings

        protocols = tuple(name for name in _protocols() if name in self.protocol)
        return Settings(
            protocols=protocols,
            warmup_seconds=self.warmup_seconds,
            benchmark_seconds=self.benchmark_seconds or (0.25 if protocols == ("device",) else 2.0),
            target_qps=self.target_qps,
            seed=self.seed,
            products=self.products,
        )

    def check(self, selection: Selection) -> None:
        """Ends the command where several products are asked of kernels that compute one."""
        if self.products > 1 and selection.batch == "none":
            refuse(f"--products {self.products}: needs --batch strided, other kernels compute one product a launch")

    def contenders(self, problem: Problem, card: Gpu, tuned: Path) -> list[Contender]:
        """The baselines of problems of this kind; ``tuned`` is the file of tuned vendor algorithms. Raises GpuError
        without a library."""
        from cudal2gen.bench import baselines

        names = baselines.usual(problem) if self.baselines is None else self.baselines
        return baselines.contenders([name for name in names if name != "none"], problem.acc, card, tuned)


RecordsOf = Annotated[
    str | None,
    OneOf(tuple(GPUS)),
    typer.Option(
        "--records-of", help="Measure this GPU's records, as far as they are legal here, into a file of their own."
    ),
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
            only=(*PLAIN, *LATER),
            wildcards=("gpu",),
            defaults={"gpu": ANY},
            helps={"gpu": "The GPU's model, by its records; any: as the device says."},
        ),
    ],
    timing: Timing,
    compilation: Compilation,
    source: RecordsOf = None,
    budget: Duration = None,
    resume: Annotated[
        bool, typer.Option("--resume/--again", help="Skip what is stored (the default), or measure it again.")
    ] = True,
    device: Device = 0,
    out: MeasurementsFile = None,
) -> None:
    """Measure kernels against the vendor's libraries on the GPU. Every measurement is stored as it is taken."""
    from cudal2gen import bench, results
    from cudal2gen.launch.gpu import alone, connect

    timing.check(selection)
    card = connect(device)
    if not card.environment.gpu and selection.gpu == ANY:
        note(f"{card.facts.text} has no records of its own: measuring those of {card.records_of}, under its own name")
    records = selection.on(card.records_of).records(source, timing.seed)
    card.check(records[0])
    _check_model(card, records[0].gpu)
    # Times of another GPU's records never replace those of the card's own in choices and reports.
    store = out or results.store(f"{source}-records" if source else "measurements")
    # Before anything is compiled: the vendor's packages may be missing.
    contenders = timing.contenders(records[0].problem, card, store.with_name("cublaslt.jsonl"))
    kernels = compilation.kernels(records)
    uncompiled = sum(record.problem not in kernels for record in records)
    plan = bench.Plan(
        [record for record in records if record.problem in kernels],
        lambda record: kernels[record.problem].open(card),
        lambda record: kernels[record.problem].artifact.digest,
        contenders,
        timing.settings,
        store,
        budget_seconds=budget,
        again=not resume,
    )
    with alone(device), progress.countdown("measuring") as report:
        outcome = bench.run(card, plan, report)
    for fault in outcome.faults:
        print(f"fault: {fault}", file=sys.stderr)
    print(
        f"{len(records)} problems, {outcome.stored} of them stored before: {outcome.measured} measurements added to "
        f"{store}, {outcome.left} problems left, {len(outcome.faults) + uncompiled} faults"
    )
    if outcome.faults or uncompiled:
        raise typer.Exit(EXIT_FAILED)


def _check_model(card: Gpu, model: str) -> None:
    """Ends the command where records are for another model than that of the card, whose measurements they would be."""
    if card.environment.gpu not in ("", model):
        refuse(
            f"{model}: this is {card.environment.name}, and measurements are of the card that takes them; "
            f"leave out --gpu, or choose --records-of {model}"
        )


@verb(app, "report")
def write_report(
    selection: Filter,
    out: Annotated[
        Path | None, typer.Option("--out", help="Page to write: one HTML file that needs no network.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Markdown file to write; with neither, Markdown is printed.")
    ] = None,
    result_files: ResultFiles = (),
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="Two result files: what is faster or slower in B, beyond noise."),
    ] = None,
    validated: Annotated[
        Path | None,
        typer.Option("--validation", metavar="FILE", help="What model --validate --json printed, as a section."),
    ] = None,
    verify: Annotated[
        Path | None,
        typer.Option("--verify", metavar="FILE", help="Only check a file of measurements: exit 1 where it cannot be."),
    ] = None,
) -> None:
    """Report what was measured, beside what others published.

    In tables and pictures, with the catalog's choices and verdicts.
    """
    from cudal2gen import report
    from cudal2gen.timing.evidence import section

    if verify is not None:
        _verify(verify)
        return
    if compare is not None:
        before, after = (measurements([path]) for path in compare)
        content = report.comparison(before, after, (compare[0].name, compare[1].name), selection.lists)
    else:
        rows = section.load(validated) if validated else ()
        measured = measurements(result_files)
        content = report.report(measured, report.named(measured), selection.lists, _stock(result_files), rows)
    forms = ((out, content.html), (markdown, content.markdown))
    texts = {path: text() for path, text in forms if path is not None}
    for path, text in texts.items():
        write(path, text)
        print(f"written to {path}", file=sys.stderr)
    if not texts:
        print(content.markdown(), end="")


def _verify(path: Path) -> None:
    """Prints what a file of measurements holds and what speaks against it."""
    from cudal2gen import report

    if not path.is_file():
        refuse(f"no results file at {path}; `cudal2gen bench` on a GPU writes one")
    inspection = report.inspect(path)
    for fault in inspection.faults:
        print(f"fault: {fault}")
    print(f"{path}: {inspection.summary}; faults: {len(inspection.faults) or 'none'}")
    if inspection.faults:
        raise typer.Exit(EXIT_FAILED)


@verb(app, "contribute")
def contribute(
    selection: Filter,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("contribution.jsonl"),
    result_files: ResultFiles = (),
) -> None:
    """Write your measurements as one file to hand on, and check it. It names no machine of yours."""
    from cudal2gen import report

    rows = report.anonymous(measurements(result_files), selection.lists)
    if not rows.measurements:
        refuse("no measurements to contribute: run `cudal2gen bench` on a GPU first, or name a file with --results")
    lines = [*rows.environments.values(), *rows.measurements]
    write(out, "".join(f"{line.model_dump_json()}\n" for line in lines))
    _verify(out)
    print(f"attach {out} to a pull request as results/contributed/<gpu>-<date>.jsonl; it names no host and no folder")


def _stock(result_files: Sequence[Path]) -> report.Stock:
    """What a report says there is, and where it looked for measurements."""
    from cudal2gen import places, report, results
    from cudal2gen.generation import compiler

    files = result_files or (results.store("measurements"),)
    sources = [str(path) if path.is_file() else f"{path}, which is not there," for path in files]
    return report.Stock(sources, catalog.entries(), results.rulings(), compiler.stored(), str(places.build_dir()))


def measurements(paths: Sequence[Path]) -> results.Measurements:
    """What files hold together, or the store where none is named; refuses a file that is not there."""
    from cudal2gen import results

    if not paths:
        return results.measurements()
    total = results.Measurements({}, [])
    for path in paths:
        if not path.is_file():
            refuse(f"no results file at {path}; `cudal2gen bench` on a GPU writes one")
        part = results.measurements(path)
        total.environments.update(part.environments)
        total.measurements.extend(part.measurements)
    return total
