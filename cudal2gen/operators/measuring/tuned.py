"""The user's store of measurements made during calls, shared by processes, in the format of ``bench``.

A measurement counts on the card and with the driver, clocks and versions that it was taken with. Its ``offer`` names
the kernels that the race could choose from; if a pack has others, it counts until these have raced.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from cudal2gen import results
from cudal2gen.kernel import Problem
from cudal2gen.operators.measuring.first_runs import FirstRuns
from cudal2gen.results import MIN_US, Environment, Measurement
from cudal2gen.results.choice import Row, Table, TableKernel, row_of

MAX_US = 1e5  # of a sample: a race ends after as long
Key = tuple[tuple[Any, ...], Any, int]  # of a problem: its kind, its sizes, and how many products


class StoreConditions(NamedTuple):
    """What two measurements must share to be comparable."""

    name: str
    driver: str
    max_sm_mhz: int
    power_limit_w: float
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, environment: Environment) -> StoreConditions:
        versions = tuple(sorted(environment.versions.items()))
        return cls(environment.name, environment.driver, environment.max_sm_mhz, environment.power_limit_w, versions)


def _possible(measurement: Measurement, environment: Environment) -> bool:
    """Whether a race on this card can have taken these times: a damaged line may state any number."""
    problem, least = measurement.problem, MIN_US
    if not problem.grouped:  # of groups the rows of some are computed
        least = max(least, environment.floor_us(problem, cold=False, products=measurement.products))
    return all(
        timing.calls > 0 and least <= timing.median_us <= MAX_US / timing.calls for timing in measurement.timings
    )


class Raced(NamedTuple):
    """A pack's table with measurements of races: ``whole`` has all, ``current`` those whose races had the pack's
    kernels to choose from."""

    whole: Table
    current: Table


class Store:
    """The store of one card. ``folder``: where its files are, by default beside the user's other results."""

    def __init__(self, environment: Environment, folder: Path | None = None) -> None:
        self.environment = environment
        self.file = results.store("autotune") if folder is None else folder / "autotune.jsonl"
        self.first_runs = FirstRuns(environment.name, self.file.with_name("autotune-first-runs.jsonl"))
        self._inode, self._end = -1, results.START  # how far the file was read
        self._environments: dict[str, Environment] = {}
        self._measurements: list[Measurement] = []
        self._unstored: list[Measurement] = []  # what the file did not take
        self._rows = _RowsOfTable(Table("", [], []))

    def add(self, measurements: Sequence[Measurement]) -> None:
        """Stores measurements with their environment; they are on disk when this returns. If it raises OSError, they
        are kept in memory and stored by the next call that can."""
        try:
            results.append([self.environment, *self._unstored, *measurements], self.file)
        except OSError:
            self._unstored.extend(measurements)
            self._measurements.extend(measurements)
            raise
        self._unstored.clear()

    def measurements(self) -> Sequence[Measurement]:
        """The measurements under this card's conditions, in their order. Reads what was added to the file since the
        last call, by this process or another; if the file is gone, what was read stays. Raises WrongInput."""
        try:
            status = self.file.stat()
        except OSError:
            return self._measurements
        # A file of another inode, or a shorter one, was replaced: it is read from the start. One that grew is read from
        # where the last reading ended, which is the end of a line.
        if status.st_ino != self._inode or status.st_size < self._end.bytes:
            self._inode, self._end, self._environments = status.st_ino, results.START, {}
            self._measurements, self._rows = list(self._unstored), _RowsOfTable(self._rows.table)
        if status.st_size > self._end.bytes:
            end = results.end_of(self.file, self._end)
            stored = results.measurements(self.file, self._end, end, self._environments)
            alike = StoreConditions.of(self.environment)
            conditions = {name: StoreConditions.of(each) for name, each in stored.environments.items()}
            rows = [row for row in stored.measurements if conditions[row.environment] == alike]
            self._measurements.extend(row for row in rows if _possible(row, self.environment))
            self._end, self._environments = end, stored.environments
        return self._measurements

    def raced(self, table: Table) -> Raced:
        """A pack's table with the latest measurement of each problem whose kernel the pack has; races that could choose
        from all of the pack's kernels come before others. Raises WrongInput."""
        measurements = self.measurements()
        return self._rows_of(table).read(measurements)

    def remembered(self, table: Table) -> Table:
        """``Raced.whole`` by what was read before, without the file."""
        return self._rows_of(table).read(self._measurements).whole

    def offer(self, table: Table, problem: Problem) -> str:
        """A digest of the kernels that a race of a problem can choose from, for a measurement's ``offer``."""
        return self._rows_of(table).offers[problem.kind]

    def _rows_of(self, table: Table) -> _RowsOfTable:
        if self._rows.table is not table:
            self._rows = _RowsOfTable(table)
        return self._rows


class _RowsOfTable:
    """The rows that measurements give a pack's table. Each is made once, since its intervals take a millisecond."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._read = 0  # so many measurements
        self._current: dict[Key, Row] = {}
        self._others: dict[Key, Row] = {}
        self._raced = Raced(table, table)

    @cached_property
    def offers(self) -> dict[tuple[Any, ...], str]:
        """Digests of the binaries of each kind."""
        binaries: defaultdict[tuple[Any, ...], set[str]] = defaultdict(set)
        for kernel in self.table.kernels:
            binaries[Problem.kind_of(kernel.fields)].add(kernel.digest)
        return {kind: hashlib.sha256(" ".join(sorted(of)).encode()).hexdigest()[:16] for kind, of in binaries.items()}

    @cached_property
    def _numbers(self) -> dict[tuple[str, str], int]:
        """Places of kernels in the table, by binary and options."""
        numbers: dict[tuple[str, str], int] = {}
        for place, kernel in enumerate(self.table.kernels):
            numbers.setdefault((kernel.digest, options_of(kernel)), place)
        return numbers

    def read(self, measurements: Sequence[Measurement]) -> Raced:
        """The table with all measurements, of which those that an earlier call had come first."""
        if self._read == len(measurements):
            return self._raced
        for measurement in measurements[self._read :]:
            number, problem = self._numbers.get((measurement.digest, repr(measurement.options))), measurement.problem
            if number is None or not self.table.kernels[number].computes(problem):
                continue
            row = row_of(problem, measurement.products, number, {measurement.l2: measurement})
            if row is not None:
                rows = self._current if measurement.offer == self.offers.get(problem.kind) else self._others
                rows[problem.kind, row.sizes, row.products] = row
        self._read = len(measurements)
        current = self._with(self._current)
        self._raced = Raced(self._with(self._others | self._current) if self._others else current, current)
        return self._raced

    def _with(self, raced: dict[Key, Row]) -> Table:
        table = self.table
        kept = [row for row in table.rows if (row.kind, row.sizes, row.products) not in raced]
        return replace(table, rows=[*kept, *raced.values()])


def options_of(kernel: TableKernel) -> str:
    """A kernel's launch options as measurements are compared by."""
    return repr(kernel.record.launch_options)
