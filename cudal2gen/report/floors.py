"""Compares our kernels' times with a lower bound for the card, and with the times that the timing model predicts.

The first comparison shows how much faster a kernel could be at best, the second how far the model can be trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isnan
from statistics import median, quantiles

from cudal2gen.kernel import IllegalRecord, Record, revise
from cudal2gen.report.groups import Group
from cudal2gen.results import KERNEL, Measurement
from cudal2gen.results.ratios import spearman
from cudal2gen.timing import model
from kernelproof.ground.pages import Table, microseconds, times

COLUMNS = (
    "M_N_K", "ours, µs", "floor, µs", "ours / floor", "modelled, µs", "ours / modelled",
)  # fmt: skip


def records_by_kernel(records: Sequence[Record], groups: Iterable[Group]) -> dict[tuple[str, str], Record]:
    """The records of measured sizes, by the kernel's name and the problem's sizes, as measurements name them."""
    sizes = {measurement.mnk for group in groups for measurement in group.measurements}
    return {(record.name, record.mnk): record for record in records if record.mnk in sizes}


def each(group: Group, records: Mapping[tuple[str, str], Record]) -> Table:
    """The table of all problems, those closest to their lower bound first. A time below the bound is pointed out."""
    rows = []
    for measurement in group.measurements:
        timing = measurement.timing(KERNEL)
        if timing is None:
            continue
        us, floor = timing.median_us, group.floor_us(measurement)
        modelled = _modelled_us(group, measurement, records)
        over = f"{times(us / floor)}{': faster than the card can be' if us < floor else ''}"
        beside = (microseconds(modelled), times(us / modelled)) if modelled else ("—", "—")
        rows.append((us / floor, (measurement.mnk, microseconds(us), microseconds(floor), over, *beside)))
    return Table(
        "Beside the card's floor (FLOP at peak, bytes at full bandwidth, an empty kernel) and the timing model",
        COLUMNS,
        tuple(row for _, row in sorted(rows)),
    )


def by_class(group: Group, records: Mapping[tuple[str, str], Record]) -> Table | None:
    """How well the timing model predicts the times of each size class; None if no kernel has both times.

    A calibration of the model's constants starts from these figures.
    """
    rows = []
    for size_class in group.size_classes:
        pairs = [
            (measured, modelled)
            for row, measured, modelled in _pairs(group, records)
            if row.problem.size_class == size_class
        ]
        if pairs:
            ratios = [measured / modelled for measured, modelled in pairs]
            low, high = (quantiles(ratios, n=10)[end] for end in (0, -1)) if len(ratios) > 1 else ratios * 2
            correlation = spearman([measured for measured, _ in pairs], [modelled for _, modelled in pairs])
            cells = (times(median(ratios)), f"{times(low)} to {times(high)}")
            rows.append((size_class, str(len(pairs)), *cells, "—" if isnan(correlation) else f"{correlation:.2f}"))
    if not rows:
        return None
    return Table(
        "The timing model, by size class",
        ("class", "kernels", "ours / modelled, median", "eight of ten", "rank correlation"),
        tuple(rows),
    )


def _pairs(group: Group, records: Mapping[tuple[str, str], Record]) -> Iterator[tuple[Measurement, float, float]]:
    """The measurements for which both exist, each with the kernel's measured and modelled time in microseconds."""
    for measurement in group.measurements:
        timing, modelled = measurement.timing(KERNEL), _modelled_us(group, measurement, records)
        if timing and modelled:
            yield measurement, timing.median_us, modelled


def _modelled_us(group: Group, measurement: Measurement, records: Mapping[tuple[str, str], Record]) -> float | None:
    """The modelled time in microseconds of our kernel on the card that measured it.

    The record may have been made for another GPU model; it is modelled on the card's. The answer is None if the
    kernel's record or the card's rates are not known.
    """
    timing = measurement.timing(KERNEL)
    record = records.get((timing.record or "", measurement.mnk)) if timing else None
    if record is None or not group.card:
        return None
    try:
        return model.estimate(revise(record, gpu=group.card)).us
    except IllegalRecord:
        return None


def apart(group: Group, records: Mapping[tuple[str, str], Record]) -> str:
    """A sentence on how far measured and modelled times differ; empty if no kernel has both."""
    ratios = [measured / modelled for _, measured, modelled in _pairs(group, records)]
    if not ratios:
        return ""
    text = f" Ours take {times(median(ratios))} of their modelled time (median of {len(ratios)}"
    if len(ratios) >= 10:
        deciles = quantiles(ratios, n=10)
        text += f"; eight of ten between {times(deciles[0])} and {times(deciles[-1])}"
    return f"{text})."
