"""Stores are files of JSON lines. Processes append to them in turns; a reader skips damaged lines with a warning."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from cudal2gen import places
from cudal2gen.kernel import IllegalRecord, explain, parse
from cudal2gen.results.rows import Algorithm, Environment, Line, Measurement, Rounding, Ruling, Trial, Verdict
from kernelproof.ground import files
from kernelproof.ground.errors import SkippedLine, WrongInput, parse_json, reading

MAX_WARNINGS = 5  # most warnings of a file that name a line

T = TypeVar("T")

_MEASUREMENT: TypeAdapter[Environment | Measurement] = TypeAdapter(
    Annotated[Environment | Measurement, Field(discriminator="kind")]
)


def store(name: str = "verdicts") -> Path:
    """The file ``<name>.jsonl`` in ``CUDAL2GEN_RESULTS``, the checkout's ``results``, or the user's data folder."""
    return places.results() / f"{name}.jsonl"


def append(lines: Iterable[Line], path: Path | None = None) -> None:
    """Appends rows, which are on disk when it returns. Processes take turns; a failed write leaves the file as it was.

    The incomplete last line of a killed process is cut off first. Raises OSError.
    """
    target = path or store()
    rows = "".join(line.model_dump_json() + "\n" for line in lines).encode()
    with files.locked(target) as file:
        file.truncate(_whole_lines(file.fileno()))
        files.append(file, rows)


def _whole_lines(descriptor: int) -> int:
    """Bytes of a file up to its last line break."""
    end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - 65536)
        at = os.pread(descriptor, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


class Place(NamedTuple):
    """Where a line of a file begins: bytes and lines before it."""

    bytes: int
    lines: int


START = Place(0, 0)


def end_of(path: Path, start: Place = START) -> Place:
    """The place behind the last whole line of a file, searched from ``start`` on.

    Another process may be writing the next line. Raises WrongInput.
    """
    with reading(path), path.open("rb") as file:
        file.seek(start.bytes)
        rest = file.read()
    return Place(start.bytes + rest.rfind(b"\n") + 1, start.lines + rest.count(b"\n"))


def read(
    adapter: TypeAdapter[T], path: Path, start: Place = START, end: Place | None = None, *, about: bytes = b""
) -> Iterator[tuple[int, T]]:  # fmt: skip
    """The rows of a file from ``start`` on, to ``end``, and the numbers of their lines; none without a file. Raises
    WrongInput.

    A line of another form, such as a killed process leaves, is skipped with a warning. ``about``: what a line must
    contain to be looked at.
    """
    if not path.exists():
        return
    faults: list[str] = []
    with reading(path), path.open("rb") as file:
        file.seek(start.bytes)
        lines = file if end is None else islice(file, end.lines - start.lines)
        for number, line in enumerate(lines, start.lines + 1):
            if about not in line:
                continue
            try:
                row = adapter.validate_python(parse_json(line))
            except WrongInput as error:
                faults.append(f"{path}:{number}: not a whole line of JSON, skipped ({error})")
            except ValidationError as error:
                faults.append(f"{path}:{number}: a line of another form, skipped: {explain(error)}")
            else:
                yield number, row
    _warn(path, faults)


def _warn(path: Path, faults: Sequence[str]) -> None:
    for fault in faults[:MAX_WARNINGS]:
        warnings.warn(fault, SkippedLine, stacklevel=4)
    if (more := len(faults) - MAX_WARNINGS) > 0:
        warnings.warn(f"{path}: {more} more lines skipped", SkippedLine, stacklevel=4)


def latest(path: Path | None = None) -> dict[tuple[str, str], Verdict]:
    """The last verdict of each (digest, on)."""
    rows = read(TypeAdapter(Verdict), path or store())
    return {(verdict.digest, verdict.on): verdict for _, verdict in rows}


def rulings(path: Path | None = None) -> list[Ruling]:
    """The outcome of the last verdict of each (digest, on), without its cases."""
    rows = read(TypeAdapter(Ruling), path or store())
    return list({(ruling.digest, ruling.on): ruling for _, ruling in rows}.values())


def verdict(digest: str, on: str, path: Path | None = None) -> Verdict | None:
    """The last verdict on one binary; other lines are not parsed."""
    name = digest.encode()
    rows = [row for _, row in read(TypeAdapter(Verdict), path or store(), about=name)]
    return next((row for row in reversed(rows) if (row.digest, row.on) == (digest, on)), None)


def algorithms(path: Path | None = None) -> dict[tuple[str | int, ...], Algorithm]:
    """The last tuned cuBLASLt algorithm of each problem, by ``Algorithm.key``."""
    rows = read(TypeAdapter(Algorithm), path or store("cublaslt"))
    return {algorithm.key: algorithm for _, algorithm in rows}


def roundings(path: Path | None = None) -> list[Rounding]:
    """The last comparison of each binary, problem and kind of inputs."""
    rows = read(TypeAdapter(Rounding), path or store("rounding"))
    return list({(row.on, row.digest, row.m, row.n, row.k, row.inputs): row for _, row in rows}.values())


def trials(path: Path | None = None) -> list[Trial]:
    """Every trial of a file, in the file's order. A measured one whose record no rule allows any more is skipped."""
    target = path or store("trials")
    rows, faults = [], []
    for number, trial in read(TypeAdapter(Trial), target):
        try:
            if trial.measured:
                parse(trial.record)
            rows.append(trial)
        except IllegalRecord as error:
            faults.append(f"{target}:{number}: a trial of no legal record, skipped: {error}")
    _warn(target, faults)
    return rows


class Measurements(NamedTuple):
    """The rows of a file: environments by id, and measurements in the file's order."""

    environments: dict[str, Environment]
    measurements: list[Measurement]

    def latest(self) -> list[Measurement]:
        """The last measurement of each problem, protocol and L2 state, per GPU."""
        last = {
            (
                row.problem.key,
                row.products,
                self.environments[row.environment].name,
                row.protocol,
                row.l2,
                row.target_qps,
            ): row
            for row in self.measurements
        }
        return list(last.values())


def lines(
    path: Path, start: Place = START, end: Place | None = None
) -> Iterator[tuple[int, Environment | Measurement]]:
    """The rows of a file of measurements with their numbers, see ``read``."""
    return read(_MEASUREMENT, path, start, end)


def measurements(
    path: Path | None = None, start: Place = START, end: Place | None = None,
    environments: Mapping[str, Environment] | None = None,
) -> Measurements:  # fmt: skip
    """Reads a file of measurements, or the part of it from ``start`` to ``end``, before which ``environments`` stand.
    One whose environment does not stand before it is skipped with a warning."""
    target = path or store("measurements")
    rows = Measurements(dict(environments or {}), [])
    strangers = []
    for number, line in lines(target, start, end):
        if isinstance(line, Environment):
            rows.environments[line.id] = line
        elif line.environment in rows.environments:
            rows.measurements.append(line)
        else:
            strangers.append(
                f"{target}:{number}: {line.mnk} names an environment that no line before it describes, skipped"
            )
    _warn(target, strangers)
    return rows
