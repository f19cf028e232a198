"""Prints a report as one self-contained HTML file, from the same sections as the Markdown.

The page embeds the measurements as JSON, from which its script draws the charts; it loads nothing from a network.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from cudal2gen import places
from cudal2gen.kernel import Record
from cudal2gen.report.groups import SIZE_CLASSES, Group
from cudal2gen.results import KERNEL, Measurement, Timing
from kernelproof.ground import pages
from kernelproof.ground.pages import Section


def html(title: str, sections: Sequence[Section], groups: dict[str, Group], records: Iterable[Record]) -> str:
    """The complete page.

    ``groups``: the measurements that charts show, by the anchor of their section. ``records``: the records to which
    points of the charts link.
    """
    links = _Records(records)
    data = {
        "classes": SIZE_CLASSES,
        "groups": {anchor: _group(group, links) for anchor, group in groups.items()},
        "charts": [chart.data | {"kind": chart.kind} for section in sections for chart in section.charts],
        "records": links.linked,
    }
    baselines = list(dict.fromkeys(name for group in groups.values() for name in group.baselines))
    return pages.html(
        places.shipped("templates"),
        "report/page.html.j2",
        script="report/script.js",
        title=title,
        sections=sections,
        timed=bool(groups),
        classes=SIZE_CLASSES,
        baselines=baselines,
        strictest=next((name for group in groups.values() if (name := group.strictest)), None),
        data=pages.embedded(data),
    )


class _Records:
    """The records that measurements name, each once, for links from the charts.

    A record's name does not contain its problem's fields, so several records may share it. The record of the measured
    problem's own sizes is preferred, even if it is made for another GPU.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self._catalog = list(records)
        self._places: dict[tuple[object, ...], int] = {}
        self.linked: list[dict[str, Any]] = []

    def place(self, measurement: Measurement, timing: Timing) -> int:
        """The index of a timing's record in ``linked``. The record is appended at its first use."""
        record = self._find(measurement, timing.record or "")
        key = (timing.record, timing.digest, record.key if record else None)
        if key not in self._places:
            self._places[key] = len(self.linked)
            self.linked.append(
                {
                    "name": timing.record or "(no name stored)",
                    "digest": timing.digest or "(not stored)",
                    "record": record.model_dump(mode="json") if record else None,
                }
            )
        return self._places[key]

    @cached_property
    def _by_name(self) -> dict[tuple[str, str], list[Record]]:
        """The records by name and sizes; all records of a name under empty sizes."""
        by_name: dict[tuple[str, str], list[Record]] = defaultdict(list)
        for record in self._catalog:
            name = record.name  # read once, because it is a digest that is computed at each access
            by_name[name, record.mnk].append(record)
            by_name[name, ""].append(record)
        return by_name

    def _find(self, measurement: Measurement, name: str) -> Record | None:
        """The record of that name: the measured problem's own, else one of its sizes, else any."""
        key = measurement.problem.key
        candidates = self._by_name.get((name, measurement.mnk)) or self._by_name.get((name, ""), [])[:1]
        return min(candidates, key=lambda record: record.key != key, default=None)


def _group(group: Group, records: _Records) -> dict[str, Any]:
    """A group of measurements as the script expects it."""
    doubts: dict[str, list[str]] = defaultdict(list)
    for doubt in group.doubts:
        doubts[doubt.measurement.mnk].append(f"{doubt.contender}: {doubt.tflops:.0f} TFLOP/s, limit {doubt.limit:.0f}")
    return {
        "title": group.title,
        "contenders": group.contenders,
        "baselines": group.baselines,
        "strictest": group.strictest,
        "roof": [group.roof.peak_tflops, group.roof.bandwidth_tbs],
        "shapes": [_shape(group, i, records, doubts) for i in range(len(group.measurements))],
    }


def _shape(group: Group, i: int, records: _Records, doubts: dict[str, list[str]]) -> list[Any]:
    """One measurement as the script expects it: [m, n, k, class, index of the record, median times, speedups, doubts].

    Times are in the order of ``contenders``; speedups, each with its bounds, in the order of ``baselines``.
    """
    measurement = group.measurements[i]
    kernel_timing = measurement.timing(KERNEL)
    times = [measurement.timing(name) for name in group.contenders]
    return [
        measurement.m,
        measurement.n,
        measurement.k,
        SIZE_CLASSES.index(measurement.problem.size_class),
        records.place(measurement, kernel_timing) if kernel_timing else None,
        [_digits(timing.median_us) if timing else None for timing in times],
        [[*map(_digits, ratio)] if (ratio := group.ratios[name][i]) else None for name in group.baselines],
        doubts.get(measurement.mnk, []),
    ]


def _digits(value: float) -> float:
    """The value rounded to five significant digits, for charts only; statistics use the unrounded values."""
    return round(value, 4 - math.floor(math.log10(value)))
