"""Two sets of results, problem by problem: what became faster or slower, beyond noise.

The two were not measured in turns, so their samples make no pairs: each side is resampled by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from cudal2gen.report.measured import Group, groups
from cudal2gen.report.statistics import share, summarise
from cudal2gen.report.tables import Section, Table, interval, microseconds, percent
from cudal2gen.results import KERNEL, Measurement, Measurements, Ratio, resampled_medians

if TYPE_CHECKING:
    from cudal2gen.results import Array

SHOWN = 20


class Pair(NamedTuple):
    """One problem in both sets, for one contender. ``ratio``: time before over time after, so above 1 is faster."""

    before: Measurement
    after: Measurement
    ratio: Ratio

    @property
    def verdict(self) -> str:
        """Beyond noise: the whole interval on one side of 1."""
        return "faster" if self.ratio.low > 1 else "slower" if self.ratio.high < 1 else "within noise"


def compare(a: Measurements, b: Measurements, wanted: Callable[[Measurement], bool] = lambda _: True) -> list[Section]:
    """Sections on everything that both sets hold, ours first, then the baselines as a control."""
    before = {_conditions(group): group for group in groups(a, wanted)}
    after = {_conditions(group): group for group in groups(b, wanted)}
    both = [key for key in before if key in after]
    lonely = [f"only in A: {before[key].title}" for key in before if key not in after]
    lonely += [f"only in B: {after[key].title}" for key in after if key not in before]
    sections = [_intro(lonely, bool(both))]
    sections += [_section(f"compared-{i}", before[key], after[key]) for i, key in enumerate(both)]
    return sections


def pairs(before: Group, after: Group, contender: str = KERNEL) -> list[Pair]:
    """Problems that both groups timed for this contender, in the order of the first."""
    later = {one.mnk: one for one in after.measured}
    shared = [
        (one, later[one.mnk])
        for one in before.measured
        if one.mnk in later and one.timing(contender) and later[one.mnk].timing(contender)
    ]
    ratios = zip(_ratios([old for old, _ in shared], [new for _, new in shared], contender), shared, strict=True)
    return [Pair(old, new, ratio) for ratio, (old, new) in ratios]


def _ratios(before: list[Measurement], after: list[Measurement], contender: str) -> list[Ratio]:
    """Ratios of medians with percentile bootstrap intervals, the two sides resampled independently."""
    import numpy as np

    sides = [_resampled(measured, contender, seed) for seed, measured in enumerate((before, after))]
    found = []
    for (old, olds), (new, news) in zip(*sides, strict=True):
        low, high = np.percentile(olds - news, (2.5, 97.5))
        found.append(Ratio(*(float(np.exp(value)) for value in (old - new, low, high))))
    return found


def _resampled(measured: list[Measurement], contender: str, seed: int) -> list[tuple[float, Array]]:
    """Median log time and its resamples, of each measurement."""
    import numpy as np

    logs = [np.log(found.wall_us or found.event_us) for one in measured if (found := one.timing(contender))]
    return [(float(np.median(row)), resampled_medians(row[None], seed)[0]) for row in logs]


def _conditions(group: Group) -> tuple[object, ...]:
    return group.name, group.gpu, group.acc, group.layout, group.protocol, group.l2, group.target_qps


def _intro(lonely: list[str], shared: bool) -> Section:
    text = (
        "A ratio is the time in A over the time in B: above 1, B is faster. Problems are paired, samples are not: the "
        "two sets were not taken in turns, and an interval knows nothing of what changed between the runs. The "
        "baselines did not change, or were meant not to: where their ratio leaves 1, the machine did, and ours is to "
        "be read against theirs. Of unchanged kernels about 2.5 % appear faster and 2.5 % slower by chance."
    )
    alerts = lonely if shared else [*lonely, "The two sets share no card, protocol and L2 state: nothing is compared."]
    return Section("compared", "What is compared", (text,), tuple(alerts))


def _section(anchor: str, before: Group, after: Group) -> Section:
    ours = pairs(before, after)
    measured = [name for name in before.contenders if name in after.contenders]
    rows, alerts = [], []
    for name in measured:
        found = pairs(before, after, name)
        summary = summarise([pair.ratio for pair in found])
        if summary is None:
            continue
        sides = [share(pair.verdict == verdict for pair in found) for verdict in ("faster", "slower")]
        rows.append((name, str(summary.shapes), interval(summary.geomean), *map(percent, sides)))
        if name != KERNEL and not summary.geomean.low <= 1 <= summary.geomean.high:
            alerts.append(f"{name} itself moved by {interval(summary.geomean)}: the two runs were not alike.")
    table = Table(
        "Time in A over time in B: our kernels, and the baselines as a control",
        ("contender", "shared shapes", "geomean [95 %]", "B faster beyond noise", "B slower beyond noise"),
        tuple(rows),
    )
    text = (
        f"{len(before.measured)} problems in A, {len(after.measured)} in B, {len(ours)} in both with our kernel's time."
    )
    return Section(
        anchor, before.title, (text,), tuple(alerts), (table, _listed(ours, "slower"), _listed(ours, "faster"))
    )


def _listed(ours: list[Pair], verdict: str) -> Table:
    found = [pair for pair in ours if pair.verdict == verdict]
    found.sort(key=lambda pair: pair.ratio.value, reverse=verdict == "faster")
    title = "Regressions" if verdict == "slower" else "Improvements"
    shown = f", the first {SHOWN}" if len(found) > SHOWN else ""
    return Table(
        f"{title} beyond noise: {len(found)} of {len(ours)}{shown}",
        ("M_N_K", "class", "A / B [95 %]", "A, µs", "B, µs", "record in B"),
        tuple(_row(pair) for pair in found[:SHOWN]),
    )


def _row(pair: Pair) -> tuple[str, ...]:
    old, new = pair.before.timing(KERNEL), pair.after.timing(KERNEL)
    assert old, "paired by it"
    assert new, "paired by it"
    return (
        pair.before.mnk,
        pair.before.problem.size_class,
        interval(pair.ratio),
        microseconds(old.median_us),
        microseconds(new.median_us),
        new.record or "—",
    )
