"""Stores the measurements that calls make, in a file that the user's processes share, in the format of ``bench``.

A measurement counts only on the same card, with the same driver, clocks and versions. Its ``offer`` is a digest of the
kernels among which the race could choose. If a pack has other kernels, the measurement counts until they have raced.
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

MAX_US = 1e5  # most microseconds of a sample, since a race ends after that time
Key = tuple[tuple[Any, ...], Any, int]  # a problem's kind, its sizes, and the number of products


class StoreConditions(NamedTuple):
    """The conditions that two measurements must share to be comparable."""

    name: str
    driver: str
    max_sm_mhz: int
    power_limit_w: float
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, environment: Environment) -> StoreConditions:
        """The conditions in an environment."""
        versions = tuple(sorted(environment.versions.items()))
        return cls(environment.name, environment.driver, environment.max_sm_mhz, environment.power_limit_w, versions)


def _is_possible(measurement: Measurement, environment: Environment) -> bool:
    """Whether the times of a measurement are possible on this card. A damaged line may have any number."""
    problem, least = measurement.problem, MIN_US
    if not problem.grouped:  # a grouped product may compute fewer rows than the problem states
        least = max(least, environment.floor_us(problem, cold=False, products=measurement.products))
    return all(
        timing.calls > 0 and least <= timing.median_us <= MAX_US / timing.calls for timing in measurement.timings
    )


class RacedTables(NamedTuple):
    """A pack's table with the measurements of races. ``complete`` has all of them, and ``current`` only those whose
    races could choose among the pack's present kernels."""

    complete: Table
    current: Table


class Store:
    """The store of one card. ``folder``: the folder of its files, by default that of the user's other results."""

    def __init__(self, environment: Environment, folder: Path | None = None) -> None:
        self.environment = environment
        self.file = results.store("autotune") if folder is None else folder / "autotune.jsonl"
        self.first_runs = FirstRuns(environment.name, self.file.with_name("autotune-first-runs.jsonl"))
        self._inode, self._end = -1, results.START  # the file that was read last, and the end of what was read
        self._environments: dict[str, Environment] = {}
        self._measurements: list[Measurement] = []
        self._unstored: list[Measurement] = []  # measurements that could not be written yet
        self._rows = _RowsOfTable(Table("", [], []))

    def add(self, measurements: Sequence[Measurement]) -> None:
        """Stores measurements with their environment; they are on disk when this returns.

        If it raises OSError, they are kept in memory, and the next call tries to store them too.
        """
        try:
            results.append([self.environment, *self._unstored, *measurements], self.file)
        except OSError:
            self._unstored.extend(measurements)
            self._measurements.extend(measurements)
            raise
        self._unstored.clear()

    def measurements(self) -> Sequence[Measurement]:
        """The measurements under this card's conditions, in their order. Raises WrongInput.

        Reads what this process or another one has added to the file since the last call. If the file is gone, the
        measurements that were read before remain.
        """
        try:
            status = self.file.stat()
        except OSError:
            return self._measurements
        # A file with another inode, or a shorter one, was replaced, and is read from the start. A file that has grown
        # is read from where the last reading ended, which is the end of a line.
        if status.st_ino != self._inode or status.st_size < self._end.bytes:
            self._inode, self._end, self._environments = status.st_ino, results.START, {}
            self._measurements, self._rows = list(self._unstored), _RowsOfTable(self._rows.table)
        if status.st_size > self._end.bytes:
            end = results.end_of(self.file, self._end)
            stored = results.measurements(self.file, self._end, end, self._environments)
            own = StoreConditions.of(self.environment)
            conditions = {name: StoreConditions.of(each) for name, each in stored.environments.items()}
            rows = [row for row in stored.measurements if conditions[row.environment] == own]
            self._measurements.extend(row for row in rows if _is_possible(row, self.environment))
            self._end, self._environments = end, stored.environments
        return self._measurements

    def tables(self, table: Table) -> RacedTables:
        """A pack's table with the latest measurement of each problem, if the pack has the measured kernel.

        Races that could choose among all of the pack's kernels have precedence over others. Raises WrongInput.
        """
        measurements = self.measurements()
        return self._rows_of(table).read(measurements)

    def remembered(self, table: Table) -> Table:
        """``RacedTables.complete`` by the measurements that were read before, without reading the file."""
        return self._rows_of(table).read(self._measurements).complete

    def offer(self, table: Table, problem: Problem) -> str:
        """A digest of the kernels among which a race of a problem can choose, for a measurement's ``offer``."""
        return self._rows_of(table).offers[problem.kind]

    def _rows_of(self, table: Table) -> _RowsOfTable:
        """The maker of a table's rows. That of the last table is kept."""
        if self._rows.table is not table:
            self._rows = _RowsOfTable(table)
        return self._rows


class _RowsOfTable:
    """Makes a table's rows from measurements. Each row is made once, because its intervals take a millisecond."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._read = 0  # number of measurements that were read
        self._current: dict[Key, Row] = {}
        self._others: dict[Key, Row] = {}
        self._raced = RacedTables(table, table)

    @cached_property
    def offers(self) -> dict[tuple[Any, ...], str]:
        """Digests of the binaries of each kind."""
        binaries: defaultdict[tuple[Any, ...], set[str]] = defaultdict(set)
        for kernel in self.table.kernels:
            binaries[Problem.kind_of(kernel.fields)].add(kernel.digest)
        return {
            kind: hashlib.sha256(" ".join(sorted(digests)).encode()).hexdigest()[:16]
            for kind, digests in binaries.items()
        }

    @cached_property
    def _numbers(self) -> dict[tuple[str, str], int]:
        """The indices of kernels in the table, by binary and options."""
        numbers: dict[tuple[str, str], int] = {}
        for number, kernel in enumerate(self.table.kernels):
            numbers.setdefault((kernel.digest, options_of(kernel)), number)
        return numbers

    def read(self, measurements: Sequence[Measurement]) -> RacedTables:
        """The tables with all ``measurements``, which must begin with those of the last call."""
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
        current = self._table_with(self._current)
        self._raced = RacedTables(self._table_with(self._others | self._current) if self._others else current, current)
        return self._raced

    def _table_with(self, raced: dict[Key, Row]) -> Table:
        """The pack's table, in which the ``raced`` rows replace those of the same problems."""
        table = self.table
        kept = [row for row in table.rows if (row.kind, row.sizes, row.products) not in raced]
        return replace(table, rows=[*kept, *raced.values()])


def options_of(kernel: TableKernel) -> str:
    """A kernel's launch options as a text that can be compared with a measurement's."""
    return repr(kernel.record.launch_options)
