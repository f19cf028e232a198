"""Chooses the record of the catalog that answers a problem: its own, one that measurements choose, or the nearest."""

from __future__ import annotations

from typing import Any

from cudal2gen.generation import catalog
from cudal2gen.kernel import Problem, Record, serving
from cudal2gen.kernel.launch import LaunchOperands
from cudal2gen.results import Measurements
from cudal2gen.results.choice import Table, tabulate


class Answers:
    """Chooses the record of the catalog for a problem: every command uses it, and ``cudal2gen.matmul`` through a pack.

    The table for a GPU and a kind of problems is built at its first use and then kept.
    """

    def __init__(self, measured: Measurements) -> None:
        self.measured = measured
        self._tables: dict[tuple[Any, ...], Table] = {}

    def __call__(self, problem: Problem) -> catalog.Match:
        """The problem's own record, or the one that measurements of its neighbours choose, or the nearest one.

        Raises CatalogError if no record with this accumulator can be adapted to the problem.
        """
        if record := catalog.own(problem):
            return catalog.Match(record)
        table = self._table(problem)
        choice = table.choose(problem, LaunchOperands.packed(problem.layout, serving.sizes_of(problem)))
        if choice.kernel is not None:
            resized = serving.resized(table.kernels[choice.kernel].record, problem, same_binary=True)
            if resized is not None:
                return catalog.Match(resized[0], f"no record for {problem.mnk}; {choice.reason}")
        return catalog.find(problem)

    def _table(self, problem: Problem) -> Table:
        """The table of measurements for the problem's GPU and kind."""
        kind = (problem.gpu, *problem.kind)
        if kind not in self._tables:
            records = measured_records(problem, self.measured)
            self._tables[kind] = tabulate(problem.gpu, records, self.measured)
        return self._tables[kind]


def answer(problem: Problem, measured: Measurements) -> catalog.Match:
    """The record of the catalog for a single problem, see ``Answers``."""
    return Answers(measured)(problem)


def measured_records(problem: Problem, measured: Measurements) -> list[Record]:
    """Records of all measured problems that have the GPU and the kind of ``problem``.

    For a problem without a record of its own ``bench`` measured the nearest record, which is found here again.
    """
    all_problems = {item.problem for item in measured.measurements}
    same_kind = {item for item in all_problems if (item.gpu, *item.kind) == (problem.gpu, *problem.kind)}
    records = catalog.load() if same_kind else []
    own = {record.problem: record for record in records if record.problem in same_kind}
    ordered = sorted(same_kind, key=lambda item: item.key)
    return [own.get(item) or catalog.nearest(item, records).record for item in ordered]
