"""Finds the kernels that are faster or slower in one set of measurements than in another, beyond noise.

Problems occur in both sets and are paired. Samples are not: the two sets were measured one after the other, not in
turns, so the bootstrap resamples each set independently. The interval therefore does not cover changes of the machine
between the two runs. The baselines, which should not have changed, serve as a control for those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from cudal2gen.report.groups import Group, by_conditions
from cudal2gen.report.statistics import share, summarise
from cudal2gen.results import KERNEL, Measurement, Measurements
from cudal2gen.results.ratios import Ratio, interval, percentile_interval, resampled_medians
from kernelproof.ground.pages import Section, Table, microseconds, percent

if TYPE_CHECKING:
    from cudal2gen.results.ratios import Array

MAX_ROWS = 20  # most rows in a table of improvements or regressions


class Pair(NamedTuple):
    """One problem that was measured in both sets, for one contender.

    ``ratio`` is the time before divided by the time after. It is above 1 if the contender became faster.
    """

    before: Measurement
    after: Measurement
    ratio: Ratio

    @property
    def verdict(self) -> str:
        """Whether the contender became "faster" or "slower", or the change is "within noise".

        It is faster or slower if the whole interval of the ratio is on one side of 1.
        """
        return "faster" if self.ratio.low > 1 else "slower" if self.ratio.high < 1 else "within noise"


def compare(
    a: Measurements, b: Measurements, predicate: Callable[[Measurement], bool] = lambda _: True
) -> list[Section]:
    """One section for each set of conditions (card, types, protocol, L2 state) that ``a`` and ``b`` share.

    Each compares our kernels, and the baselines as a control. The first section names the conditions that only one of
    them has.
    """
    before = {_conditions(group): group for group in by_conditions(a, predicate)}
    after = {_conditions(group): group for group in by_conditions(b, predicate)}
    shared = [key for key in before if key in after]
    unshared = [f"only in A: {before[key].title}" for key in before if key not in after]
    unshared += [f"only in B: {after[key].title}" for key in after if key not in before]
    sections = [_intro(unshared, bool(shared))]
    sections += [_section(f"compared-{i}", before[key], after[key]) for i, key in enumerate(shared)]
    return sections


def pairs(before: Group, after: Group, contender: str = KERNEL) -> list[Pair]:
    """The problems on which both groups timed this contender, in the order of ``before``."""
    after_by_size = {
        measurement.mnk: measurement for measurement in after.measurements if measurement.timing(contender)
    }
    shared = [
        (measurement, after_by_size[measurement.mnk])
        for measurement in before.measurements
        if measurement.mnk in after_by_size and measurement.timing(contender)
    ]
    ratios = zip(_ratios([old for old, _ in shared], [new for _, new in shared], contender), shared, strict=True)
    return [Pair(old, new, ratio) for ratio, (old, new) in ratios]


def _ratios(before: list[Measurement], after: list[Measurement], contender: str) -> list[Ratio]:
    """The ratios of median times with 95 % bootstrap intervals; the two sides are resampled independently."""
    import numpy as np

    sides = [_resampled(measured, contender, seed) for seed, measured in enumerate((before, after))]
    ratios = []
    for (old, olds), (new, news) in zip(*sides, strict=True):
        low, high = percentile_interval(olds - news)
        ratios.append(Ratio(*(float(np.exp(value)) for value in (old - new, low, high))))
    return ratios


def _resampled(measured: list[Measurement], contender: str, seed: int) -> list[tuple[float, Array]]:
    """For each measurement, the median log time and its bootstrap resamples."""
    import numpy as np

    logs = [
        np.log(timing.wall_us or timing.event_us)
        for measurement in measured
        if (timing := measurement.timing(contender))
    ]
    return [(float(np.median(row)), resampled_medians(row[None], seed)[0]) for row in logs]


def _conditions(group: Group) -> tuple[object, ...]:
    """The conditions that two groups must share to be compared."""
    return group.name, group.gpu, group.types, group.layout, group.protocol, group.l2, group.target_qps


def _intro(unshared: list[str], shared: bool) -> Section:
    """The section on what is compared. ``unshared``: alerts; ``shared``: whether any group is in both sets."""
    text = (
        "A ratio is the time in A over the time in B: above 1, B is faster. Problems are paired, samples are not: the "
        "two sets were not taken in turns, so an interval does not cover changes of the machine between the runs. The "
        "baselines are the control: where their ratio differs from 1, the machine changed, and our ratio counts "
        "relative to theirs. Of unchanged kernels about 2.5 % appear faster and 2.5 % slower by chance."
    )
    alerts = (
        unshared
        if shared
        else [*unshared, "The two sets share no card, protocol and L2 state, so there is nothing to compare."]
    )
    return Section("compared", "What is compared", (text,), tuple(alerts))


def _section(anchor: str, before: Group, after: Group) -> Section:
    """The section on a group that is in both sets: its ratios by contender, and the problems that changed."""
    kernel_pairs = pairs(before, after)
    contenders = [name for name in before.contenders if name in after.contenders]
    rows, alerts = [], []
    for name in contenders:
        contender_pairs = pairs(before, after, name)
        summary = summarise([pair.ratio for pair in contender_pairs])
        if summary is None:
            continue
        sides = [share(pair.verdict == verdict for pair in contender_pairs) for verdict in ("faster", "slower")]
        rows.append((name, str(summary.shapes), interval(summary.geomean), *map(percent, sides)))
        if name != KERNEL and not summary.geomean.low <= 1 <= summary.geomean.high:
            alerts.append(f"{name} itself moved by {interval(summary.geomean)}: the two runs were not alike.")
    table = Table(
        "Time in A over time in B: our kernels, and the baselines as a control",
        ("contender", "shared shapes", "geomean [95 %]", "B faster beyond noise", "B slower beyond noise"),
        tuple(rows),
    )
    text = (
        f"{len(before.measurements)} problems in A, {len(after.measurements)} in B; "
        f"{len(kernel_pairs)} in both with our kernel's time."
    )
    return Section(
        anchor,
        before.title,
        (text,),
        tuple(alerts),
        (table, _changes(kernel_pairs, "slower"), _changes(kernel_pairs, "faster")),
    )


def _changes(kernel_pairs: list[Pair], verdict: str) -> Table:
    """The table of pairs with this verdict ("faster" or "slower"), the largest change first."""
    changes = [pair for pair in kernel_pairs if pair.verdict == verdict]
    changes.sort(key=lambda pair: pair.ratio.value, reverse=verdict == "faster")
    title = "Regressions" if verdict == "slower" else "Improvements"
    limit = f", the first {MAX_ROWS}" if len(changes) > MAX_ROWS else ""
    return Table(
        f"{title} beyond noise: {len(changes)} of {len(kernel_pairs)}{limit}",
        ("M_N_K", "class", "A / B [95 %]", "A, µs", "B, µs", "record in B"),
        tuple(_row(pair) for pair in changes[:MAX_ROWS]),
    )


def _row(pair: Pair) -> tuple[str, ...]:
    """The row of a problem: its size and class, the ratio, both times and the record."""
    old, new = pair.before.timing(KERNEL), pair.after.timing(KERNEL)
    assert old, "a pair has our kernel's time before"
    assert new, "a pair has our kernel's time after"
    return (
        pair.before.mnk,
        pair.before.problem.size_class,
        interval(pair.ratio),
        microseconds(old.median_us),
        microseconds(new.median_us),
        new.record or "—",
    )
