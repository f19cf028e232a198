"""Reads and appends the stores: files of JSON lines that hold verdicts, measurements and trials.

Nothing in a store is ever rewritten: a newer row supersedes an older one about the same subject, and readers take the
last. Several processes may append at once, since each locks the file while it writes. A process that is killed leaves
at most one incomplete last line, which the next writer cuts off; readers skip damaged lines with a warning.
"""

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

MAX_WARNINGS = 5  # at most this many skipped lines of a file are named; the rest are only counted

T = TypeVar("T")

_MEASUREMENT: TypeAdapter[Environment | Measurement] = TypeAdapter(
    Annotated[Environment | Measurement, Field(discriminator="kind")]
)


def store(name: str = "verdicts") -> Path:
    """The file ``<name>.jsonl`` in ``CUDAL2GEN_RESULTS``, the checkout's ``results``, or the user's data folder."""
    return places.results() / f"{name}.jsonl"


def append(lines: Iterable[Line], path: Path | None = None) -> None:
    """Appends rows to a store. When it returns, they are on disk.

    The file is locked meanwhile, so that rows of several processes do not mix. If writing fails, the file keeps its
    earlier rows and OSError is raised.
    """
    target = path or store()
    rows = "".join(line.model_dump_json() + "\n" for line in lines).encode()
    with files.locked(target) as file:
        # No other process writes while the file is locked, so a killed process left an incomplete last line behind.
        # Appending to that line would damage the first new row as well.
        file.truncate(_whole_lines(file.fileno()))
        files.append(file, rows)


def _whole_lines(descriptor: int) -> int:
    """The length of a file in bytes up to and including its last line break; 0 if there is none."""
    end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - 65536)
        line_break = os.pread(descriptor, end - start, start).rfind(b"\n")
        if line_break >= 0:
            return start + line_break + 1
        end = start
    return 0


class LineStart(NamedTuple):
    """Where a line of a file begins: the number of bytes and of lines before it."""

    bytes: int
    lines: int


START = LineStart(0, 0)


def end_of(path: Path, start: LineStart = START) -> LineStart:
    """The place after the last complete line of a file, searched from ``start`` on.

    An incomplete line after it is not counted, since another process may still be writing it. Raises WrongInput.
    """
    with reading(path), path.open("rb") as file:
        file.seek(start.bytes)
        rest = file.read()
    return LineStart(start.bytes + rest.rfind(b"\n") + 1, start.lines + rest.count(b"\n"))


def read(
    adapter: TypeAdapter[T], path: Path, start: LineStart = START, end: LineStart | None = None, *, part: bytes = b""
) -> Iterator[tuple[int, T]]:  # fmt: skip
    """Yields the rows of a file between ``start`` and ``end``, each with its line number. A missing file has no rows.

    A line that is damaged or is not such a row is skipped; warnings follow after the last row. Lines that do not
    contain the bytes ``part`` are skipped silently and without parsing. Raises WrongInput if the file cannot be read.
    """
    if not path.exists():
        return
    faults: list[str] = []
    with reading(path), path.open("rb") as file:
        file.seek(start.bytes)
        lines = file if end is None else islice(file, end.lines - start.lines)
        for number, line in enumerate(lines, start.lines + 1):
            if part not in line:
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
    """Warns of the skipped lines of a file: of the first ``MAX_WARNINGS`` one by one, of the others by their number."""
    for fault in faults[:MAX_WARNINGS]:
        warnings.warn(fault, SkippedLine, stacklevel=4)
    if (more := len(faults) - MAX_WARNINGS) > 0:
        warnings.warn(f"{path}: {more} more lines skipped", SkippedLine, stacklevel=4)


def latest(path: Path | None = None) -> dict[tuple[str, str], Verdict]:
    """The last verdict on each binary, by its digest and the place of execution: (digest, on)."""
    rows = read(TypeAdapter(Verdict), path or store())
    return {(verdict.digest, verdict.on): verdict for _, verdict in rows}


def rulings(path: Path | None = None) -> list[Ruling]:
    """The outcome of the last verdict on each binary and place of execution, without the details of its cases."""
    rows = read(TypeAdapter(Ruling), path or store())
    return list({(ruling.digest, ruling.on): ruling for _, ruling in rows}.values())


def verdict(digest: str, on: str, path: Path | None = None) -> Verdict | None:
    """The last verdict on one binary, or None. Lines that do not contain its digest are not parsed."""
    name = digest.encode()
    rows = [row for _, row in read(TypeAdapter(Verdict), path or store(), part=name)]
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
    """Every trial of a file, in the file's order.

    A measured trial whose record is no longer legal is skipped with a warning.
    """
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
    """The rows of a file of measurements: environments by id, and measurements in the file's order."""

    environments: dict[str, Environment]
    measurements: list[Measurement]

    def latest(self) -> list[Measurement]:
        """The last measurement of each problem, protocol, load and L2 state on each card."""
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
    path: Path, start: LineStart = START, end: LineStart | None = None
) -> Iterator[tuple[int, Environment | Measurement]]:
    """The rows of a file of measurements, each with its line number; see ``read``."""
    return read(_MEASUREMENT, path, start, end)


def measurements(
    path: Path | None = None, start: LineStart = START, end: LineStart | None = None,
    environments: Mapping[str, Environment] | None = None,
) -> Measurements:  # fmt: skip
    """Reads a file of measurements, or the part of it from ``start`` to ``end``.

    ``environments`` are those that an earlier part of the file described. A measurement whose environment no earlier
    line describes is skipped with a warning.
    """
    target = path or store("measurements")
    rows = Measurements(dict(environments or {}), [])
    faults = []
    for number, line in lines(target, start, end):
        if isinstance(line, Environment):
            rows.environments[line.id] = line
        elif line.environment in rows.environments:
            rows.measurements.append(line)
        else:
            faults.append(
                f"{target}:{number}: {line.mnk} names an environment that no line before it describes, skipped"
            )
    _warn(target, faults)
    return rows
