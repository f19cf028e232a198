"""Compares the measured speedups on an H100 or H200 with those that the project aims at.

An aim is a least geometric-mean speedup over auto-tuned cuBLASLt, for one accumulator and some or all problems of the
catalog. It counts as reached only if the whole 95 % interval is at or above it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cudal2gen.kernel import Problem
from cudal2gen.report.groups import Group
from cudal2gen.report.statistics import Summary, summarise
from cudal2gen.results.ratios import interval
from kernelproof.ground.pages import Table, counted, ratio_text

CARDS, BASELINE = ("h100", "h200"), "cublaslt-autotuning-max"
LARGE_FLOP = 1e10  # a problem with at least this many operations is large
PROBLEMS = 1000  # the number of problems in the catalog; with fewer measured ones, an aim is judged provisionally


class Aim(NamedTuple):
    """The aim that the geometric-mean speedup over ``BASELINE`` is at least ``least``, under the ``device`` protocol
    with a cold L2. ``types``: the types of the problems, as ``Group.types`` names them. ``admits``: which of these
    problems count."""

    types: str
    title: str
    least: float
    admits: Callable[[Problem], bool]


AIMS = (
    Aim("f32", "all problems", 1.05, lambda _: True),
    Aim("f32", f"at least {LARGE_FLOP:.0e} FLOP", 1.0, lambda problem: problem.flops >= LARGE_FLOP),
    Aim("f32", "class split-k", 1.15, lambda problem: problem.size_class == "split-k"),
    Aim("f16", "all problems", 1.1, lambda _: True),
)


def table(group: Group) -> Table | None:
    """The aims that apply to a group of measurements, with the measured figures; None if no aim applies."""
    if group.card not in CARDS or (group.protocol, group.l2) != ("device", "cold") or BASELINE not in group.baselines:
        return None
    rows = []
    for aim in AIMS:
        if aim.types != group.types:
            continue
        pairs = zip(group.measurements, group.ratios[BASELINE], strict=True)
        summary = summarise([ratio for row, ratio in pairs if ratio and aim.admits(row.problem)])
        if summary is not None:
            cells = (str(summary.shapes), ratio_text(aim.least), interval(summary.geomean))
            rows.append((aim.title, *cells, _reached(aim, summary, len(group.measurements))))
    if not rows:
        return None
    return Table(
        f"The project's aims on {group.name}, over {BASELINE}; they are of all {PROBLEMS} problems of the catalog, and "
        "reached or missed where the whole interval is",
        ("problems", "measured", "aim", "geomean speedup [95 %]", "reached"),
        tuple(rows),
    )


def _reached(aim: Aim, summary: Summary, measured: int) -> str:
    """Whether an aim is reached, in words. ``measured``: the number of measured problems in the group."""
    low, high = summary.geomean.low, summary.geomean.high
    verdict = "yes" if low >= aim.least else "no" if high < aim.least else "within noise"
    return verdict if measured >= PROBLEMS else f"{verdict}, of {counted(measured, 'problem')}"
