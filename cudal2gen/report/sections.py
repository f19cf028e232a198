"""What is said of measured groups: conditions, the paper's tables, classes, worst cases, doubts."""

from __future__ import annotations

from collections.abc import Sequence

from cudal2gen.kernel import GPUS
from cudal2gen.report.measured import SUSPICIOUS_TFLOPS, WORST, Group, tflops
from cudal2gen.report.published import Published
from cudal2gen.report.statistics import Summary
from cudal2gen.report.tables import Chart, Section, Table, interval, microseconds, percent, spread, times
from cudal2gen.results import DERIVED, KERNEL, Environment

NO_TIMING = (
    "No timing is in this report: no results file that it read holds a measurement. What follows is computed from the "
    "catalog of kernels and from published figures."
)
SHOWN_DOUBTS = 20
FILTERED = "No measurement matches the filters of this report: {} were read, and none is of that kind."
PROTOCOLS = {
    "device": "Device time: repeated launches as a CUDA graph between device events; the host's launch is not in it.",
    "offline": "The paper's offline mode: consecutive calls, the host's launch inside the host's clock.",
    "server": "The paper's server mode: calls at exponentially distributed intervals, the host's launch inside the "
    "host's clock, the card idle in between.",
}
L2_STATES = {
    "cold": "L2 cold: buffers rotate through at least three times the L2, so operands come from device memory.",
    "hot": "L2 hot: the same buffers in every call, so operands are in the L2 as far as they fit.",
    "exceeded": "Every problem's operands exceed three times the L2: hot and cold are the same.",
}
X_AXES = {
    "mnk": ("M·N·K", "Speedup against M·N·K"),
    "mean": ("mean of M, N and K", "Speedup against the mean dimension"),
    "max": ("largest of M, N and K", "Speedup against the largest dimension"),
}
HOW_TO_READ = (
    "A speedup is the baseline's time over ours: above 1 we are faster. Of one problem it is the exponential of the "
    "median log ratio of samples taken in turns, its interval the 95 % percentile bootstrap over those pairs. "
    "Geometric means have 95 % bootstrap intervals over problems: they say how far the mean depends on which problems "
    "were taken, not how it would repeat on another card. A loss is beyond noise where its whole interval is below 1; "
    "of equally fast kernels about 2.5 % would appear so by chance. A “-max” baseline is the faster of its two "
    "layouts, problem by problem. Arithmetic means of speedups flatter whoever is in the numerator; they are given "
    "because the paper gives them, beside the geometric ones."
)


def overview(groups: Sequence[Group], nothing: str = NO_TIMING) -> Section:
    """The first thing to read: one line per group, against the baseline that beats us most."""
    if not groups:
        return Section("overview", "In short", (nothing,))
    rows = []
    for group in groups:
        name = group.strictest
        found = group.summary(name) if name else None
        if name and found:
            rows.append(
                (group.title, name, str(found.shapes), interval(found.geomean), percent(found.wins),
                 percent(found.losses), percent(found.sure_losses))
            )  # fmt: skip
    table = Table(
        "Our kernels against the strictest baseline of each set of conditions",
        ("conditions", "strictest baseline", "shapes", "geomean speedup [95 %]", "wins", "losses", "beyond noise"),
        tuple(rows),
    )
    doubtful = sum(len(group.doubts) for group in groups)
    alerts = (f"{doubtful} results are too good to be taken as they are; they are named below.",) if doubtful else ()
    return Section("overview", "In short", (HOW_TO_READ,), alerts, (table,))


def section(group: Group, anchor: str, published: Published) -> Section:
    """All of a group."""
    words = [PROTOCOLS[group.protocol], L2_STATES[group.l2]]
    if group.target_qps is not None:
        words.append(f"Target: {group.target_qps:g} calls a second.")
    tables = [_environment(group), _conditions(group)]
    charts: tuple[Chart, ...] = ()
    if group.baselines:
        tables += [table_1(group), table_2(group), by_class(group), worst(group)]
        beside = _beside(group, published)
        tables += [beside] if beside else []
    if group.measured:
        charts = _charts(group, anchor)
    return Section(
        anchor, group.title, (" ".join(words), _samples(group)), tuple(_alerts(group)), tuple(tables), charts
    )


def table_1(group: Group) -> Table:
    """The paper's Table 1, with what it lacks: geometric means, intervals, losses."""
    return Table(
        f"Table 1. Speedup of our kernels over each baseline ({group.title})",
        ("baseline", "shapes", "mean", "median", "std", "geomean [95 %]", "wins", "wins beyond noise", "losses",
         "losses beyond noise"),
        tuple(
            (name, str(one.shapes), times(one.mean), times(one.median), times(one.std), interval(one.geomean),
             percent(one.wins), percent(one.sure_wins), percent(one.losses), percent(one.sure_losses))
            for name, one in _summaries(group)
        ),
    )  # fmt: skip


def table_2(group: Group) -> Table:
    """The paper's Table 2: what a dispatcher would see."""
    found = [(name, best) for name in group.baselines if (best := group.dispatched(name))]
    return Table(
        "Table 2. Speedup of a dispatcher that takes the faster of ours and the baseline, max(ours, baseline), chosen "
        "by the same samples, so optimistic by the noise",
        ("baseline", "shapes", "mean", "median", "std", "geomean [95 %]", "ours taken"),
        tuple(
            (name, str(one.shapes), times(one.mean), times(one.median), times(one.std), interval(one.geomean),
             percent(one.wins))
            for name, one in found
        ),
    )  # fmt: skip


def by_class(group: Group) -> Table:
    """Geometric means and losses per size class, over the baselines that stand for an interface."""
    rows = []
    for size_class in group.size_classes:
        for name in _principal(group):
            if one := group.summary(name, size_class):
                rows.append(
                    (size_class, name, str(one.shapes), times(one.mean), times(one.median), interval(one.geomean),
                     percent(one.wins), percent(one.losses), percent(one.sure_losses))
                )  # fmt: skip
    return Table(
        "By size class",
        ("class", "baseline", "shapes", "mean", "median", "geomean [95 %]", "wins", "losses", "losses beyond noise"),
        tuple(rows),
    )


def worst(group: Group) -> Table:
    """Where we lose most, against the baseline that beats us most."""
    name = group.strictest or group.baselines[0]
    rows = []
    for one, ratio in group.worst(name):
        ours, theirs = one.timing(KERNEL), one.timing(name)
        if ours and theirs:
            rows.append(
                (one.mnk, one.problem.size_class, interval(ratio), microseconds(ours.median_us),
                 microseconds(theirs.median_us), f"{tflops(one, ours.median_us):.3g}",
                 percent(tflops(one, ours.median_us) / group.roof.tflops(one)), ours.record or "—")
            )  # fmt: skip
    return Table(
        f"The {min(WORST, len(rows))} lowest speedups, over {name}",
        ("M_N_K", "class", "speedup [95 %]", "ours, µs", "baseline, µs", "ours, TFLOP/s", "of the roof", "record"),
        tuple(rows),
    )


def _summaries(group: Group) -> list[tuple[str, Summary]]:
    return [(name, found) for name in group.baselines if (found := group.summary(name))]


def _principal(group: Group) -> list[str]:
    """Baselines of one layout give way to their "-max", where that could be made."""
    parts = {part for name in group.baselines for part in DERIVED.get(name, ())}
    return [name for name in group.baselines if name not in parts]


def _samples(group: Group) -> str:
    few, many, usual = group.samples
    exceeded = sum(one.l2 == "exceeded" for one in group.measured)
    text = (
        f"{len(group.measured)} problems, {spread((few, many))} samples each (median {usual:g}), taken between "
        f"{min(one.when for one in group.measured)} and {max(one.when for one in group.measured)}."
    )
    if exceeded and group.l2 != "exceeded":
        text += f" {exceeded} of them exceed the L2 three times and count as hot and as cold."
    if group.padded:
        text += (
            f" {len(group.padded)} are padded by the caller; the copies are inside our time, "
            f"{percent(min(group.padded))} to {percent(max(group.padded))} of it."
        )
    return text


def _alerts(group: Group) -> list[str]:
    found = []
    if throttled := group.throttled():
        reasons = ", ".join(f"{reason} in {count}" for reason, count in sorted(throttled.items()))
        found.append(f"The card reported limits on its clocks: {reasons} of {len(group.measured)} measurements.")
    if len(group.environments) > 1:
        found.append(f"{len(group.environments)} environments differ in: {', '.join(_differences(group))}.")
    found += [
        f"{contender} is missing in {count} of {len(group.measured)} problems: {reason}."
        for (contender, reason), count in sorted(group.absences().items())
    ]
    if not group.roof.peak_tflops or not group.roof.bandwidth_tbs:
        found.append(
            "The card's peak or its memory clock is not known: the roofline is incomplete, and results above "
            f"{SUSPICIOUS_TFLOPS:.0f} TFLOP/s are all that is flagged."
        )
    doubts = [doubt.words for doubt in group.doubts]
    more = len(doubts) - SHOWN_DOUBTS
    return [*found, *doubts[:SHOWN_DOUBTS], *([f"And {more} more like these."] if more > 0 else [])]


def _differences(group: Group) -> list[str]:
    fields = [name for name in Environment.model_fields if name not in ("id", "kind", "versions")]
    first, *others = group.environments
    named = [name for name in fields if any(getattr(one, name) != getattr(first, name) for one in others)]
    libraries = sorted({name for one in group.environments for name in one.versions})
    return named + [
        f"version of {name}" for name in libraries if len({one.versions.get(name) for one in group.environments}) > 1
    ]


def _environment(group: Group) -> Table:
    def values(take: str) -> str:
        return " / ".join(dict.fromkeys(str(getattr(one, take)) for one in group.environments))

    libraries = sorted({name for one in group.environments for name in one.versions})
    versions = {
        name: " / ".join(dict.fromkeys(one.versions.get(name, "absent") for one in group.environments))
        for name in libraries
    }
    peak, bandwidth = group.roof.peak_tflops, group.roof.bandwidth_tbs
    rows = [
        ("card", f"{values('name')} ({values('gpu')}), capability {values('capability')}, {values('sms')} SMs"),
        ("L2, device memory", " / ".join(
            f"{one.l2_bytes / 2**20:g} MiB, {one.memory_bytes / 2**30:.0f} GiB" for one in group.environments[:1])),
        ("highest clocks", f"SM {values('max_sm_mhz')} MHz, memory {values('max_memory_mhz')} MHz, "
         f"{values('memory_bus_bits')} bits"),
        ("roofs at these clocks", f"{peak:.0f} TFLOP/s, {bandwidth:.2f} TB/s" if peak and bandwidth else "not known"),
        ("power limit", f"{values('power_limit_w')} W"),
        ("ECC", values("ecc")),
        ("driver", values("driver")),
        *versions.items(),
    ]  # fmt: skip
    return Table("Environment", ("what", "value"), tuple(rows))


def _conditions(group: Group) -> Table:
    rows = (
        ("SM clock, MHz", spread(group.readings(lambda one: one.conditions.sm_mhz))),
        ("memory clock, MHz", spread(group.readings(lambda one: one.conditions.memory_mhz))),
        ("power, W", spread(group.readings(lambda one: one.conditions.power_w))),
        ("temperature, °C", spread(group.readings(lambda one: one.conditions.temperature_c))),
        ("throttle reasons", ", ".join(sorted(group.throttled())) or "none seen"),
    )
    return Table("Read while it ran", ("what", "lowest to highest"), rows)


def _beside(group: Group, published: Published) -> Table | None:
    mode = "server" if group.protocol == "server" else "offline"
    theirs = published.nearest(group.gpu, group.acc, mode)
    rows = [
        (name, times(one.mean), times(row.mean), times(one.median), times(row.median), times(one.geomean.value),
         times(row.geomean), percent(one.wins), percent(row.wins))
        for name, one in _summaries(group)
        if (row := theirs.get(name))
    ]  # fmt: skip
    if not rows:
        return None
    other = next(iter(theirs.values()))
    return Table(
        f"Beside CUDA-L2's published figures ({published.source['paper']}). Not the same experiment. "
        f"Ours: {group.title}, {len(group.measured)} shapes. Theirs: {GPUS[other.gpu].title}, {other.acc}, {mode} "
        f"(host clock, padding outside it), {other.shapes} shapes",
        ("baseline", "mean", "published", "median", "published", "geomean", "published", "wins", "published"),
        tuple(rows),
    )


def _charts(group: Group, anchor: str) -> tuple[Chart, ...]:
    strictest = group.strictest
    found = group.summary(strictest) if strictest else None
    words = (
        f"Each problem's speedup over the chosen baseline, {strictest} at first: geometric mean "
        f"{interval(found.geomean)}, {percent(found.losses)} below 1."
        if found
        else "No baseline was measured."
    )
    speedup = [
        Chart("speedups", title, f"{title}. {words}", {"group": anchor, "x": axis, "label": label})
        for axis, (label, title) in X_AXES.items()
        if found
    ]
    roofline = Chart(
        "roofline",
        "Roofline",
        f"Rate of our kernels against arithmetic intensity, under a peak of {group.roof.peak_tflops:.0f} TFLOP/s and "
        f"{group.roof.bandwidth_tbs:.2f} TB/s; {len(group.doubts)} results of any contender are doubtful.",
        {"group": anchor},
    )
    return (*speedup, roofline)
