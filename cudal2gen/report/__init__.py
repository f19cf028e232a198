"""Tables and pictures: what the measurements say, what the catalog's records choose, what others have published.

``report`` and ``comparison`` give sections; ``Report.markdown`` and ``Report.html`` print the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cudal2gen.kernel import Record
from cudal2gen.report import choices, page, published, sections, tables
from cudal2gen.report.comparison import compare
from cudal2gen.report.measured import Group, groups
from cudal2gen.report.tables import Section
from cudal2gen.results import Measurement, Measurements


class Report(NamedTuple):
    """What is to be said, and the measurements and records behind its pictures."""

    title: str
    sections: tuple[Section, ...]
    groups: dict[str, Group]
    records: Sequence[Record]

    def markdown(self) -> str:
        """For a terminal, a README, a pull request."""
        return tables.markdown(self.title, self.sections)

    def html(self) -> str:
        """For a browser, without a network."""
        return page.html(self.title, self.sections, self.groups, self.records)


def report(
    read: Measurements, records: Sequence[Record], wanted: Callable[[Measurement], bool] = lambda _: True
) -> Report:
    """All that is known of the measurements that are ``wanted``. Raises results.Unpaired."""
    found = {f"measured-{i}": group for i, group in enumerate(groups(read, wanted), 1)}
    theirs = published.load()
    nothing = sections.FILTERED.format(len(read.measurements)) if read.measurements else sections.NO_TIMING
    parts = (
        sections.overview(list(found.values()), nothing),
        *(sections.section(group, anchor, theirs) for anchor, group in found.items()),
        choices.section(records),
        published.section(theirs),
    )
    return Report("cudal2gen: report on HGEMM kernels", parts, found, records)


def comparison(
    a: Measurements,
    b: Measurements,
    names: tuple[str, str] = ("A", "B"),
    wanted: Callable[[Measurement], bool] = lambda _: True,
) -> Report:
    """B against A, problem by problem."""
    return Report(f"cudal2gen: {names[1]} (B) against {names[0]} (A)", tuple(compare(a, b, wanted)), {}, ())
