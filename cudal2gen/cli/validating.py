"""The verbs ``run`` and ``validate`` execute kernels and say whether their results are right.

``run`` executes one kernel once and prints details. ``validate`` judges many kernels on problems that stress them, and
stores each verdict before the next kernel runs. It executes a kernel again even if a verdict with the same digest is
stored, except with ``--changed``, which therefore resumes after an interruption.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cudal2gen.cli.building import Compilation
from cudal2gen.cli.program import app
from cudal2gen.cli.selection import ALL_HELP, FILTERS, GPU_HELP, PLAIN, VARIANT_FIELDS, OneRecord, Selection
from cudal2gen.kernel import Record
from kernelproof.ground.command_line import progress, signals
from kernelproof.ground.command_line.groups import Offer, verb
from kernelproof.ground.command_line.messages import EXIT_FAILED, error, note, refuse
from kernelproof.ground.command_line.options import Json, Names, listed_names, names_when_needed
from kernelproof.ground.command_line.tables import number
from kernelproof.ground.files import write
from kernelproof.ground.pages import counted

if TYPE_CHECKING:
    from cudal2gen.generation.compiler import Artifact
    from cudal2gen.launch.gpu import Gpu
    from cudal2gen.results import Verdict
    from cudal2gen.results.proofs import Proof
    from cudal2gen.validator.machine_code import Unexecuted
    from kernelproof.emulator import RoundingName
    from kernelproof.ground.workers import Lost

    Judgement = Verdict | Unexecuted | Lost

HELP_ON = (
    "Where kernels run: on the CPU by emulation. Its tensor cores round fp32 sums once; with :a100 or :h100 they round "
    "bit by bit as published of that GPU, which is slow. With :machine-code the cubin's instructions are executed in "
    "place of PTX, for sm_80 and later"
)
Emulator = Literal["emulator", "emulator:a100", "emulator:h100", "emulator:machine-code"]
Place = Literal["emulator", "emulator:a100", "emulator:h100", "emulator:machine-code", "gpu"]


def _inputs() -> tuple[str, ...]:
    """The kinds of inputs, for ``--inputs``."""
    from cudal2gen import validator

    return validator.INPUTS


def _extra_checks() -> tuple[str, ...]:
    return (SANITIZER, EMULATOR)


SANITIZER, EMULATOR = "sanitizer", "emulator"
MACHINE_CODE = "emulator:machine-code"


@verb(app, "run")
def run(
    selection: OneRecord,
    compilation: Compilation,
    inputs: Annotated[
        str,
        names_when_needed(
            "--inputs", _inputs, "binary (0 and 1), sparse, integers, normal, cancelling or special (NaN, infinities)."
        ),
    ] = "normal",
    on: Annotated[Emulator, typer.Option("--on", help=f"{HELP_ON}.")] = "emulator",
    as_json: Json = False,
) -> None:
    """Execute a kernel on one problem, and compare it with NumPy.

    The kernel is built if it is not. The problem is the record's own; if it is large, only the CTAs at the corners of
    the grid are executed.
    """
    from cudal2gen import validator
    from kernelproof import emulator

    record = selection.record()
    (artifact,) = compilation.build([record])
    shape = validator.own_shape(record)
    modes = validator.Modes(counters=True, rounding=_rounding(on), machine_code=on == MACHINE_CODE)
    try:
        case, execution = validator.run_case(record, artifact, compilation.launcher(), shape, inputs, **modes)
    except emulator.UnknownMachineCode as unknown:
        refuse(str(unknown))
    counters = validator.summary(record, execution)
    if as_json:
        print(json.dumps({"name": record.name, "case": case.model_dump(), "counters": counters}, indent=1))
    else:
        print(f"kernel   {record.name}")
        print(
            f"built    {artifact.directory}, {artifact.ptxas.registers} registers, {record.smem_bytes} B shared memory"
        )
        part = f"the {case.ctas} CTAs at the grid's corners" if shape.corners else counted(case.ctas, "CTA")
        several = f", {len(shape.groups)} groups of rows," if shape.groups else ""
        several = f", {shape.batch} products," if shape.batch > 1 else several
        launched = shape.launched(record)
        padded = "" if launched == shape.mnk else f", zero-padded to {launched.text}"
        print(f"ran      {case.m}_{case.n}_{case.k}{padded}{several} on the emulator, {part}, {inputs} inputs")
        allowed = "" if case.allowed is None else f", allowed there {case.allowed:.3g}"
        print(f"compared {case.compared}: max error {case.max_error:.3g}{allowed}")
        for name, value in counters.items():
            print(f"         {name:32} {number(value)}")
        for finding in case.findings:
            print(f"found    {finding}")
        for remark in case.remarks:
            print(f"noted    {remark}")
        print("verdict  right, no hazards" if case.passed else "verdict  WRONG")
    if not case.passed:
        raise typer.Exit(EXIT_FAILED)


@verb(app, "validate")
def validate(
    selection: Annotated[
        Selection,
        Offer(only=(*PLAIN, *VARIANT_FIELDS), wildcards=FILTERS, indexed=("gpu",), helps=ALL_HELP | {"gpu": GPU_HELP}),
    ],
    compilation: Compilation,
    changed: Annotated[
        bool,
        typer.Option("--changed", help="Only kernels without a verdict, by default of all records; resumes a run."),
    ] = False,
    on: Annotated[Place, typer.Option("--on", help=f"{HELP_ON}; or on a GPU.")] = "emulator",
    extra: Annotated[
        Names | None,
        listed_names(
            "--also",
            _extra_checks,
            "With --on gpu, separated by commas: sanitizer runs compute-sanitizer's memcheck and racecheck (slow); "
            "emulator compares the bits with the emulator's, and stores how they differ.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Judge whether kernels are right, on problems that stress them.

    They are built and executed; results are compared, and hazards reported. A kernel with a stored verdict is executed
    again, unless --changed leaves it out.

    Each verdict is stored before the next kernel runs.
    With --on gpu the records' own problems are executed as well. Records of one GPU are tried on another by
    --set gpu=h200.
    """
    from cudal2gen.results.proofs import proofs

    sanitize, compare_emulator = (name in (extra or ()) for name in _extra_checks())
    if extra and on != "gpu":
        refuse(f"--also {','.join(extra)}: needs --on gpu")
    records = (replace(selection, everything=True) if changed and not selection.names_sizes else selection).records()
    card = _gpu(selection.device, records) if on == "gpu" else None
    kernels = compilation.distinct(records)
    pending = (
        _without_verdict(kernels, card.model if card else _emulator_origin(on)) if changed else list(kernels.values())
    )
    built = compilation.attempt(pending)
    judgements = _emulator_judgements(built, compilation, on)
    if card is not None:
        judgements = _gpu_verdicts(
            card, built, compilation.launcher(), selection.device if sanitize else None, compare_emulator
        )
    verdicts = store_verdicts(judgements, len(built))
    if compare_emulator:
        _write_roundings()
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if as_json:
        for verdict in verdicts:
            print(verdict.model_dump_json())
    else:
        proven = proofs()
        for verdict in verdicts if selection.mnk else failed:
            _print_verdict(verdict, proven.get(verdict.digest))
        cases = sum(len(verdict.cases) for verdict in verdicts)
        skipped = f", {len(kernels) - len(pending)} had a verdict" if changed else ""
        lost = f", {len(pending) - len(verdicts)} without a verdict" if len(verdicts) < len(pending) else ""
        executed = f"{counted(len(records), 'record')}, {counted(len(verdicts), 'kernel')} executed in {cases} cases"
        print(f"{executed}{skipped}: {len(verdicts) - len(failed)} right, {len(failed)} wrong{lost}")
    if failed or len(verdicts) < len(pending):
        raise typer.Exit(EXIT_FAILED)


def _without_verdict(kernels: dict[str, Record], origin: str) -> list[Record]:
    """The records whose kernels, given by digest, have no stored verdict of this origin (``Verdict.on``)."""
    from cudal2gen import results

    stored = results.latest()
    return [record for digest, record in kernels.items() if (digest, origin) not in stored]


def _rounding(on: str) -> RoundingName:
    """How the emulator's tensor cores round, given a value of ``--on`` such as emulator:a100."""
    named: dict[str, RoundingName] = {"a100": "a100", "h100": "h100"}
    return named.get(on.partition(":")[2], "model")


def _emulator_origin(on: str) -> str:
    """The origin (``Verdict.on``) of the verdicts that ``--on`` gives in the emulator."""
    from cudal2gen import validator

    return validator.verdict_origin(_rounding(on), on == MACHINE_CODE)


def _emulator_judgements(
    built: Sequence[tuple[Record, Artifact]], compilation: Compilation, on: str
) -> Iterator[Judgement]:
    """Yields the emulator's judgement on each built kernel, in the order in which they are ready."""
    from cudal2gen import validator
    from cudal2gen.validator import machine_code

    if built:
        processes = compilation.jobs or os.cpu_count() or 1
        judge_all = machine_code.judge_all if on == MACHINE_CODE else validator.validate_all
        with closing(judge_all(built, compilation.launcher(), processes, _rounding(on))) as judgements:
            yield from judgements


def _gpu_verdicts(
    card: Gpu, built: Sequence[tuple[Record, Artifact]], library: Path, sanitize: int | None, compare_emulator: bool
) -> Iterator[Verdict]:
    """Yields the verdicts of a device, and stores how its tensor cores round if that was compared."""
    from cudal2gen import bench, results
    from cudal2gen.validator.device import BuiltKernel
    from cudal2gen.validator.judgement import judge_all

    kernels = [BuiltKernel(record, artifact, library) for record, artifact in built]
    vendor = bench.autotuned_vendor(card, results.store("cublaslt"))
    judgements = judge_all(card, kernels, baseline=vendor, sanitize=sanitize, emulator=compare_emulator)
    for verdict, roundings in judgements:
        if roundings:
            results.append(roundings, results.store("rounding"))
        yield verdict


def store_verdicts(judgements: Iterable[Judgement], total: int) -> list[Verdict]:
    """Stores each verdict before it waits for the next one, unless the kernel's latest verdict from the same place is
    equal. An error line names each kernel without a verdict. Returns the verdicts."""
    from cudal2gen import results

    verdicts: list[Verdict] = []
    try:
        with signals.exit_restored(), progress.bar("validating") as show:
            for done, judgement in enumerate(judgements, 1):
                if isinstance(judgement, results.Verdict):
                    if results.verdict(judgement.digest, judgement.on) != judgement:
                        results.append([judgement])
                    verdicts.append(judgement)
                else:
                    error(f"{judgement.name}: {judgement.reason}")
                if show:
                    show(done, total)
    except SystemExit:
        note("interrupted; finished verdicts are stored, and the same command with --changed continues")
        raise
    return verdicts


def _write_roundings() -> None:
    """Writes the table of stored roundings as Markdown beside them."""
    from cudal2gen import results
    from cudal2gen.validator import rounding

    table = results.store("rounding").with_suffix(".md")
    write(table, rounding.markdown(results.roundings()))
    print(f"{table}: where emulator and GPU round differently", file=sys.stderr)


def _print_verdict(verdict: Verdict, proof: Proof | None) -> None:
    """Prints a verdict with its cases, and what is proven of the kernel."""
    from cudal2gen.results.proofs import in_words

    print(f"{verdict.record}: {'right' if verdict.passed else 'WRONG'}")
    for case in verdict.cases:
        allowed = "" if case.allowed is None else f" (allowed there {case.allowed:.3g})"
        options = "" if case.swizzle_stride is None else f", slices of {case.swizzle_stride} columns"
        options += "".join(f", {name}={value}" for name, value in case.options.items())
        print(
            f"  {case.m}_{case.n}_{case.k} {case.inputs}, {counted(case.ctas, 'CTA')}{options}: {case.compared}, "
            f"max error {case.max_error:.3g}{allowed}{'' if case.passed else ': failed'}"
        )
    print(f"  proof: {in_words(proof)}")
    if verdict.deterministic is False:
        print("  the same problem gave other bits in another run")
    for tool, finding in verdict.tools.items():
        print(f"  {tool}: {finding}")
    for finding in verdict.findings:
        print(f"  found: {finding}")
    for remark in verdict.remarks:
        print(f"  noted: {remark}")


def _gpu(index: int, records: Sequence[Record]) -> Gpu:
    """The GPU. Raises GpuError if there is none, or if a record is for another model."""
    from cudal2gen.launch.gpu import connect

    card = connect(index)
    for record in records:
        card.check(record)
    return card
