"""Writes reports: how fast our kernels are, what the catalog's records choose, and what CUDA-L2 published.

``report`` describes one set of measurements and ``comparison`` compares two. Both return a ``Report``, which
``Report.markdown`` and ``Report.html`` print with the same figures.
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
    """The sections of a report, and the measurements and records that its charts show.

    ``groups``: the measurements of each section, by the section's anchor. ``records``: targets of links in the charts.
    """

    title: str
    sections: tuple[Section, ...]
    groups: dict[str, Group]
    records: Sequence[Record]

    def markdown(self) -> str:
        """The report as Markdown, for a terminal, a README or a pull request."""
        return pages.markdown(self.title, self.sections)

    def html(self) -> str:
        """The report as one HTML page that needs no network."""
        return page.html(self.title, self.sections, self.groups, self.records)


def report(
    measurements: Measurements,
    records: Sequence[Record],
    predicate: Callable[[Measurement | Problem], bool] = lambda _: True,
    stock: Stock | None = None,
    validated: Sequence[validation.Finding] = (),
) -> Report:
    """The report on the measurements that satisfy ``predicate``.

    Its sections are an overview, one section for each group of measurements, the counts in ``stock``, the choices of
    the catalog's ``records`` (see ``needed_records``), CUDA-L2's published figures, and how the timing model was
    ``validated``.
    """
    # The group with the most measurements comes first, because the opening sentence and the charts show the first one.
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


def needed_records(measurements: Measurements) -> list[Record]:
    """The records of the catalog that a report on these measurements needs. Raises CatalogError.

    These are the records of measured sizes, among which the measured kernels are found, and those that the section on
    choices counts. If a measured kernel is not among them (its record is of another size), the whole catalog is loaded.
    """
    sizes = {(row.m, row.n, row.k) for row in measurements.measurements}
    names = {timing.record for row in measurements.measurements for timing in row.timings if timing.record}
    records = catalog.some(lambda problem: choices.is_counted(problem) or (problem.m, problem.n, problem.k) in sizes)
    return records if names <= {record.name for record in records} else catalog.load()


def comparison(
    a: Measurements,
    b: Measurements,
    names: tuple[str, str] = ("A", "B"),
    predicate: Callable[[Measurement], bool] = lambda _: True,
) -> Report:
    """The report that compares measurements B with measurements A, problem by problem. ``names``: the names of A and B
    in the report's title."""
    return Report(f"cudal2gen: {names[1]} (B) against {names[0]} (A)", tuple(compare(a, b, predicate)), {}, ())
