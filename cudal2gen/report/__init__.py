"""Reports: tables and charts of measurements, of the choices in the catalog, and of published figures.

``report`` and ``comparison`` give sections; ``Report.markdown`` and ``Report.html`` print the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cudal2gen.generation import catalog
from cudal2gen.kernel import Problem, Record
from cudal2gen.report import choices, floors, page, published, sections
from cudal2gen.report.comparison import compare
from cudal2gen.report.contribution import anonymous as anonymous
from cudal2gen.report.contribution import inspect as inspect
from cudal2gen.report.groups import Group, by_conditions
from cudal2gen.report.stock import Stock as Stock
from cudal2gen.report.stock import section as in_stock
from cudal2gen.results import Measurement, Measurements
from cudal2gen.timing.evidence import section as validation
from kernelproof.ground import pages
from kernelproof.ground.pages import Section


class Report(NamedTuple):
    """Sections, and the measurements and records behind their charts."""

    title: str
    sections: tuple[Section, ...]
    groups: dict[str, Group]
    records: Sequence[Record]

    def markdown(self) -> str:
        """Markdown, for a terminal, a README, a pull request."""
        return pages.markdown(self.title, self.sections)

    def html(self) -> str:
        """One HTML page, for a browser without a network."""
        return page.html(self.title, self.sections, self.groups, self.records)


def report(
    measurements: Measurements,
    records: Sequence[Record],
    predicate: Callable[[Measurement | Problem], bool] = lambda _: True,
    stock: Stock | None = None,
    validated: Sequence[validation.Finding] = (),
) -> Report:
    """Sections on the measurements that satisfy ``predicate``, on ``stock``, on choices of the catalog, on published
    figures, on how the timing model was ``validated``. ``records``: see ``named``."""
    # The largest first: the first sentence, and what charts show at first, are of it.
    groups = sorted(by_conditions(measurements, predicate), key=lambda group: -len(group.measurements))
    groups_by_anchor = {f"measured-{i}": group for i, group in enumerate(groups, 1)}
    figures, kernels = published.load(), floors.records_by_kernel(records, groups_by_anchor.values())
    empty_text = (
        sections.FILTERED.format(len(measurements.measurements))
        if measurements.measurements
        else sections.no_timing(stock.sources if stock else ())
    )
    parts = (
        sections.overview(list(groups_by_anchor.values()), empty_text),
        *(sections.section(group, anchor, figures, kernels) for anchor, group in groups_by_anchor.items()),
        *((in_stock(stock, predicate),) if stock else ()),
        choices.section(records),
        published.section(figures),
        *((validation.section(validated),) if validated else ()),
    )
    return Report("cudal2gen: report on HGEMM kernels", parts, groups_by_anchor, records)


def named(measurements: Measurements) -> list[Record]:
    """The catalog's records that a report is about: those of measured sizes, in which measured kernels are looked up,
    and those whose choices are counted; all of them where a kernel is of another size. Raises CatalogError."""
    sizes = {(row.m, row.n, row.k) for row in measurements.measurements}
    names = {timing.record for row in measurements.measurements for timing in row.timings if timing.record}
    records = catalog.some(lambda problem: choices.counts(problem) or (problem.m, problem.n, problem.k) in sizes)
    return records if names <= {record.name for record in records} else catalog.load()


def comparison(
    a: Measurements,
    b: Measurements,
    names: tuple[str, str] = ("A", "B"),
    predicate: Callable[[Measurement], bool] = lambda _: True,
) -> Report:
    """B against A, problem by problem."""
    return Report(f"cudal2gen: {names[1]} (B) against {names[0]} (A)", tuple(compare(a, b, predicate)), {}, ())
