"""Compares our kernels' times with a lower bound for the card, and with the times that the timing model predicts.

The first comparison shows how much faster a kernel could be at best, the second how far the model can be trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from statistics import median, quantiles
from typing import NamedTuple

from cudal2gen.kernel import IllegalRecord, Record, revise
from cudal2gen.report.groups import Group
from cudal2gen.results import KERNEL, Measurement
from cudal2gen.results.ratios import spearman
from cudal2gen.timing import model
from kernelproof.ground.pages import Table, microseconds, ratio_text

COLUMNS = (
    "M_N_K", "ours, µs", "floor, µs", "ours / floor", "modelled, µs", "ours / modelled",
)  # fmt: skip


def records_by_kernel(records: Sequence[Record], groups: Iterable[Group]) -> dict[tuple[str, str], Record]:
    """The records of measured sizes, by the kernel's name and the problem's sizes, as measurements name them."""
    sizes = {measurement.mnk for group in groups for measurement in group.measurements}
    return {(record.name, record.mnk): record for record in records if record.mnk in sizes}


class Prediction(NamedTuple):
    """Our kernel's time on one problem, and what the timing model predicts for it; both in microseconds."""

    measurement: Measurement
    measured_us: float
    modelled_us: float | None  # None if the kernel's record or the card's rates are not known


def predictions(group: Group, records: Mapping[tuple[str, str], Record]) -> list[Prediction]:
    """The times of a group's problems that our kernel was measured on.

    The record may have been made for another GPU model; its time is modelled for the card's GPU model.
    """
    timed = [(row, row.timing(KERNEL)) for row in group.measurements]
    return [
        Prediction(row, timing.median_us, _modelled_us(group, records.get((timing.record or "", row.mnk))))
        for row, timing in timed
        if timing
    ]


def by_problem(group: Group, predictions: Sequence[Prediction]) -> Table:
    """The table of all problems, those closest to their lower bound first. A time below the bound is pointed out."""
    rows = []
    for measurement, us, modelled in predictions:
        floor = group.floor_us(measurement)
        ratio_cell = f"{ratio_text(us / floor)}{': faster than the card can be' if us < floor else ''}"
        model_cells = (microseconds(modelled), ratio_text(us / modelled)) if modelled else ("—", "—")
        rows.append((us / floor, (measurement.mnk, microseconds(us), microseconds(floor), ratio_cell, *model_cells)))
    return Table(
        "Beside the card's floor (FLOP at peak, bytes at full bandwidth, an empty kernel) and the timing model",
        COLUMNS,
        tuple(row for _, row in sorted(rows)),
    )


def by_class(group: Group, predictions: Sequence[Prediction]) -> Table | None:
    """How well the timing model predicts the times of each size class; None if no kernel has both times.

    A calibration of the model's constants starts from these figures.
    """
    rows = []
    for size_class in group.size_classes:
        pairs = [
            (prediction.measured_us, prediction.modelled_us)
            for prediction in predictions
            if prediction.modelled_us and prediction.measurement.problem.size_class == size_class
        ]
        if pairs:
            ratios = [measured / modelled for measured, modelled in pairs]
            low, high = (quantiles(ratios, n=10)[end] for end in (0, -1)) if len(ratios) > 1 else ratios * 2
            correlation = spearman([measured for measured, _ in pairs], [modelled for _, modelled in pairs])
            cells = (ratio_text(median(ratios)), f"{ratio_text(low)} to {ratio_text(high)}")
            rows.append((size_class, str(len(pairs)), *cells, "—" if isnan(correlation) else f"{correlation:.2f}"))
    if not rows:
        return None
    return Table(
        "The timing model, by size class",
        ("class", "kernels", "ours / modelled, median", "eight of ten", "rank correlation"),
        tuple(rows),
    )


def model_summary(predictions: Sequence[Prediction]) -> str:
    """A sentence on how far measured and modelled times differ; empty if no kernel has both."""
    ratios = [prediction.measured_us / prediction.modelled_us for prediction in predictions if prediction.modelled_us]
    if not ratios:
        return ""
    text = f" Ours take {ratio_text(median(ratios))} of their modelled time (median of {len(ratios)}"
    if len(ratios) >= 10:
        deciles = quantiles(ratios, n=10)
        text += f"; eight of ten between {ratio_text(deciles[0])} and {ratio_text(deciles[-1])}"
    return f"{text})."


def _modelled_us(group: Group, record: Record | None) -> float | None:
    """The modelled time of a record on the group's card; None if the record or the card's rates are not known."""
    if record is None or not group.card:
        return None
    try:
        return model.estimate(revise(record, gpu=group.card)).us
    except IllegalRecord:
        return None
