"""The verbs that execute kernels to see whether they are right: run, validate."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cudal2gen.cli import progress
from cudal2gen.cli.building import Compilation
from cudal2gen.cli.groups import verb
from cudal2gen.cli.messages import EXIT_FAILED, refuse
from cudal2gen.cli.options import Device, Json, names_when_needed
from cudal2gen.cli.program import app
from cudal2gen.cli.selection import OneRecord, SeveralRecords
from cudal2gen.errors import Failure
from cudal2gen.kernel import Problem, Record

if TYPE_CHECKING:
    from cudal2gen import gpu, results
    from cudal2gen.compiler import Artifact

On = Annotated[
    Literal["emulator", "gpu"], typer.Option("--on", help="Where kernels run: on the CPU by emulation, or on a GPU.")
]


def _inputs() -> tuple[str, ...]:
    from cudal2gen import validator

    return validator.INPUTS


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
    on: On = "emulator",
    as_json: Json = False,
) -> None:
    """Build a record's kernel, execute it on one problem and compare it with NumPy.

    The problem is the record's own. Of a large one only the CTAs at the corners of the grid are executed.
    """
    from cudal2gen import validator

    if on != "emulator":
        refuse(f"--on {on}: run prints the emulator's findings and counters; validate also takes --on gpu")
    record = selection.record()
    (artifact,) = compilation.build([record])
    shape = validator.own_shape(record)
    case, done = validator.run_case(record, artifact, compilation.launcher(), shape, inputs, counters=True)
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


@verb(app, "validate")
def validate(
    selection: SeveralRecords,
    compilation: Compilation,
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
            "--compare-emulator", help="With --on gpu: compare the bits with the emulator's, and store how they differ."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Judge whether kernels are right: build them, execute problems that stress them, compare, look for hazards.

    With --on gpu the records' own problems are executed as well. Records of one GPU are tried on another by
    --set gpu=h200.
    """
    from cudal2gen import results, validator

    if on == "emulator" and (sanitize or compare_emulator):
        refuse("--sanitize and --compare-emulator need --on gpu")
    records = (replace(selection, everything=True) if changed else selection).records()
    card = _gpu(device, records) if on == "gpu" else None
    artifacts = compilation.build(records)
    kernels = {artifact.digest: (record, artifact) for record, artifact in zip(records, artifacts, strict=True)}
    stored = results.latest() if changed else {}
    place = card.model if card else on
    pending = [kernel for digest, kernel in kernels.items() if (digest, place) not in stored]
    verdicts: list[results.Verdict] = []
    with _stored(verdicts, len(pending)) as store:
        if card is None:
            processes = compilation.jobs or os.cpu_count() or 1
            validator.validate_all(pending, compilation.launcher(), processes, store)
        else:
            sanitized = device if sanitize else None
            _validate_on_gpu(card, pending, compilation.launcher(), sanitized, compare_emulator, store)
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if as_json:
        for verdict in verdicts:
            print(verdict.model_dump_json())
    else:
        for verdict in verdicts if selection.mnk else failed:
            _print_verdict(verdict)
        cases = sum(len(verdict.cases) for verdict in verdicts)
        skipped = f", {len(kernels) - len(pending)} had a verdict" if changed else ""
        print(
            f"{len(records)} records, {len(pending)} kernels executed in {cases} cases{skipped}: "
            f"{len(verdicts) - len(failed)} right, {len(failed)} wrong"
        )
    if failed:
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def _stored(verdicts: list[results.Verdict], total: int) -> Iterator[Callable[[results.Verdict], None]]:
    """A function that stores a verdict and adds it to the list, under a progress bar."""
    from cudal2gen import results

    with progress.bar("validating") as report:

        def store(verdict: results.Verdict) -> None:
            verdicts.append(verdict)
            results.append([verdict])
            if report:
                report(len(verdicts), total)

        yield store


def _print_verdict(verdict: results.Verdict) -> None:
    print(f"{verdict.record}: {'right' if verdict.passed else 'WRONG'}")
    for case in verdict.cases:
        allowed = "" if case.allowed is None else f" (allowed there {case.allowed:.3g})"
        options = "" if case.swizzle_stride is None else f", slices of {case.swizzle_stride} columns"
        options += "".join(f", {name}={value}" for name, value in case.options.items())
        print(
            f"  {case.m}_{case.n}_{case.k} {case.inputs}, {case.ctas} CTAs{options}: {case.compared}, "
            f"max error {case.max_error:.3g}{allowed}{'' if case.passed else ': failed'}"
        )
    if verdict.deterministic is False:
        print("  the same problem gave other bits in another run")
    for tool, finding in verdict.tools.items():
        print(f"  {tool}: {finding}")
    for finding in verdict.findings:
        print(f"  found: {finding}")


def _gpu(index: int, records: list[Record]) -> gpu.Gpu:
    """The GPU. Raises GpuError where there is none, or a record is for another."""
    from cudal2gen.gpu import connect

    card = connect(index)
    for record in records:
        card.check(record)
    return card


def _validate_on_gpu(
    card: gpu.Gpu,
    kernels: list[tuple[Record, Artifact]],
    library: Path,
    sanitize: int | None,
    compare_emulator: bool,
    store: Callable[[results.Verdict], None],
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
                (vendors[key],) = baselines.contenders([name], problem.acc, card, tuned)
            except GpuError as error:
                raise Absent(str(error)) from None
        return bench.prepare(card, vendors[key], problem)

    for record, artifact in kernels:
        kernel = BuiltKernel(record, artifact, library)
        verdict, lines = judge(card, kernel, baseline=vendor, sanitize=sanitize, emulator=compare_emulator)
        if lines:
            results.append(lines, results.store("rounding"))
        store(verdict)
        try:
            card.wait()
        except RuntimeError as error:
            raise Failure(f"the device has stopped over {record.name}: {str(error).splitlines()[0]}") from None
    if compare_emulator:
        table = results.store("rounding").with_suffix(".md")
        table.write_text(rounding.markdown(results.roundings()))
        print(f"{table}: where emulator and GPU round differently", file=sys.stderr)
