"""Writes the sections of a report that describe measurements: an overview, then one section for each group.

A group's section has the environment and conditions, the paper's tables of speedups, the worst cases, doubts about
results, and charts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from cudal2gen.kernel import GPUS, Record
from cudal2gen.report import aims, floors
from cudal2gen.report.groups import WORST, Group, tflops
from cudal2gen.report.published import Published
from cudal2gen.report.statistics import Summary
from cudal2gen.results import DERIVED, KERNEL, ON_OPERANDS, Environment
from cudal2gen.results.ratios import interval
from kernelproof.ground.pages import Chart, Section, Table, microseconds, percent, ratio_text, spread

NO_TIMING = (
    "No timing is in this report: {} no measurement. 'cudal2gen bench --all' takes them on a GPU; without one, "
    "'cudal2gen try' and 'show' give modelled figures. The sections below are computed from the catalog of kernels, "
    "from verdicts and from published figures."
)
MAX_DOUBTS = 20  # further doubts are only counted
LOW_CLOCK = 0.75  # a report warns if the SM clock fell below this share of the card's highest clock
FILTERED = "No measurement matches the filters of this report; the results files hold {} of other kinds."
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
STATISTICS = ("baseline", "shapes", "mean", "median", "std", "geomean [95 %]")
HOW_TO_READ = (
    "A speedup is the baseline's time over our kernel's: above 1, our kernel is faster. For one problem it is the "
    "exponential of the median log ratio of samples taken in turns; its interval is the 95 % percentile bootstrap over "
    "those pairs. Geometric means have 95 % bootstrap intervals over problems: they measure how the mean depends on "
    "the choice of problems, not how it repeats on another card. A loss is beyond noise where its whole interval is "
    "below 1; about 2.5 % of equally fast kernels appear so by chance. A “-max” baseline is the faster of its two "
    "layouts, problem by problem and resample by resample, so that its interval covers the choice. Arithmetic "
    "means of speedups favour the numerator; they stand beside the geometric means because the paper prints them."
)


def no_timing(sources: Sequence[str]) -> str:
    """The opening sentence of a report without measurements. ``sources``: the files that were searched."""
    files = " and ".join(sources) or "the results files"
    return NO_TIMING.format(f"{files} {'hold' if len(sources) != 1 else 'holds'}")


def overview(groups: Sequence[Group], empty_text: str) -> Section:
    """The first section: one row for each group, with the speedup over its strictest baseline. ``empty_text`` stands
    there if there is no group."""
    if not groups:
        return Section("overview", "In short", (empty_text,))
    summaries = [
        (group, name, summary) for group in groups if (name := group.strictest) and (summary := group.summary(name))
    ]
    first = tuple(
        f"{group.title}: {ratio_text(summary.geomean.value)} times as fast as {name}, the strictest baseline, "
        f"in the geometric mean over {_of_all(summary, group)} problems{_mixed(group)}."
        for group, name, summary in summaries[:1]
    )
    table = Table(
        "Our kernels against the strictest baseline of each set of conditions",
        ("conditions", "geomean speedup [95 %]", "strictest baseline", "shapes", "wins", "wins beyond noise", "losses",
         "losses beyond noise"),
        tuple(
            (group.title + _mixed(group), interval(summary.geomean), name, _of_all(summary, group),
             percent(summary.wins), percent(summary.sure_wins), percent(summary.losses), percent(summary.sure_losses))
            for group, name, summary in summaries
        ),
    )  # fmt: skip
    doubtful = sum(len(group.doubts) for group in groups)
    alert = f"{doubtful} results are too good to be true without a check; the sections below name them."
    return Section("overview", "In short", first, (alert,) if doubtful else (), (table,), notes=(HOW_TO_READ,))


def _of_all(summary: Summary, group: Group) -> str:
    """The number of problems behind a figure, such as "98 of 100" if some of the group's lack it."""
    total = len(group.measurements)
    return str(total) if summary.shapes == total else f"{summary.shapes} of {total}"


def _mixed(group: Group) -> str:
    """A remark if the group mixes several environments, whose drivers, libraries or clocks differ."""
    return f", of {len(group.environments)} environments" if len(group.environments) > 1 else ""


def section(group: Group, anchor: str, published: Published, records: Mapping[tuple[str, str], Record]) -> Section:
    """The section about one group of measurements: environment, conditions, tables, charts.

    ``records``: the record of each measured kernel, by the kernel's name and the problem's sizes.
    """
    words = [PROTOCOLS[group.protocol], L2_STATES[group.l2]]
    if group.target_qps is not None:
        words.append(f"Target: {group.target_qps:g} calls a second.")
    tables = [_environment(group), _conditions(group)]
    charts: tuple[Chart, ...] = ()
    if group.baselines:
        tables += [table_1(group), table_2(group), by_class(group), worst(group)]
        published_table = _published_table(group, published)
        tables += [published_table] if published_table else []
        aims_table = aims.table(group)
        tables += [aims_table] if aims_table else []
    predictions = floors.predictions(group, records)
    if group.measurements:
        model_table = floors.by_class(group, predictions)
        tables += [model_table] if model_table else []
        tables.append(floors.by_problem(group, predictions))
        charts = _charts(group, anchor)
    return Section(
        anchor,
        group.title,
        (" ".join(words), _samples(group) + floors.model_summary(predictions)),
        tuple(_alerts(group)),
        tuple(tables),
        charts,
    )


def table_1(group: Group) -> Table:
    """The paper's Table 1, with geometric means, intervals and losses, which the paper does not have."""
    return Table(
        f"Table 1. Speedup of our kernels over each baseline ({group.title})",
        (*STATISTICS, "wins", "wins beyond noise", "losses", "losses beyond noise"),
        tuple(
            (name, *_statistics(summary), percent(summary.wins), percent(summary.sure_wins), percent(summary.losses),
             percent(summary.sure_losses))
            for name, summary in _summaries(group)
        ),
    )  # fmt: skip


def table_2(group: Group) -> Table:
    """The paper's Table 2: speedups of a dispatcher between our kernel and one baseline."""
    summaries = [(name, summary) for name in group.baselines if (summary := group.dispatched(name))]
    return Table(
        "Table 2. Speedup of a dispatcher that takes the faster of our kernel and the baseline, max(ours, baseline). "
        "It chooses by the samples that it is judged by, so the figures are optimistic by the noise",
        (*STATISTICS, "ours taken"),
        tuple((name, *_statistics(summary), percent(summary.wins)) for name, summary in summaries),
    )


def by_class(group: Group) -> Table:
    """The statistics of each size class, over one baseline for each interface (its "-max" if there is one)."""
    rows = [
        (size_class, name, str(summary.shapes), ratio_text(summary.mean), ratio_text(summary.median),
         interval(summary.geomean), percent(summary.wins), percent(summary.losses), percent(summary.sure_losses))
        for size_class in group.size_classes
        for name in _principal(group)
        if (summary := group.summary(name, size_class))
    ]  # fmt: skip
    return Table(
        "By size class",
        ("class", "baseline", "shapes", "mean", "median", "geomean [95 %]", "wins", "losses", "losses beyond noise"),
        tuple(rows),
    )


def worst(group: Group) -> Table:
    """The lowest speedups over the strictest baseline, with times and rates."""
    name = group.strictest or group.baselines[0]
    rows = []
    for measurement, ratio in group.worst(name):
        kernel, vendor = measurement.timing(KERNEL), measurement.timing(name)
        if kernel and vendor:
            rows.append(
                (measurement.mnk, measurement.problem.size_class, interval(ratio), microseconds(kernel.median_us),
                 microseconds(vendor.median_us), f"{tflops(measurement, kernel.median_us):.3g}",
                 percent(tflops(measurement, kernel.median_us) / group.roof.tflops(measurement)), kernel.record or "—")
            )  # fmt: skip
    return Table(
        f"The {min(WORST, len(rows))} lowest speedups, over {name}",
        ("M_N_K", "class", "speedup [95 %]", "ours, µs", "baseline, µs", "ours, TFLOP/s", "of the roof", "record"),
        tuple(rows),
    )


def _statistics(summary: Summary) -> tuple[str, ...]:
    """The cells under ``STATISTICS``, without the first (the baseline's name)."""
    return (
        str(summary.shapes),
        ratio_text(summary.mean),
        ratio_text(summary.median),
        ratio_text(summary.std),
        interval(summary.geomean),
    )


def _summaries(group: Group) -> list[tuple[str, Summary]]:
    """The baselines of a group, each with a summary of the kernels' speedups, where there is one."""
    return [(name, summary) for name in group.baselines if (summary := group.summary(name))]


def _principal(group: Group) -> list[str]:
    """The baselines, without the two layouts of an interface whose "-max" exists."""
    parts = {part for name in group.baselines for part in DERIVED.get(name, ())}
    return [name for name in group.baselines if name not in parts]


def _samples(group: Group) -> str:
    """Sentences on the samples: their number and dates, who took them, and how many problems are padded."""
    fewest, most, median = group.samples
    dates = [measurement.when for measurement in group.measurements]
    exceeded = sum(measurement.l2 == "exceeded" for measurement in group.measurements)
    text = (
        f"{len(group.measurements)} problems, {spread((fewest, most))} samples each (median {median:g}), taken between "
        f"{min(dates)} and {max(dates)}."
    )
    if exceeded and group.l2 != "exceeded":
        text += f" The operands of {exceeded} of them exceed three times the L2: they count as hot and as cold."
    details = [measurement.timings[0].detail for measurement in group.measurements]
    if by_calls := sum(detail.startswith(ON_OPERANDS) for detail in details):
        of_buckets = sum(detail.startswith(f"{ON_OPERANDS},") for detail in details)
        text += f" Calls measured {by_calls} of them on their own operands, {of_buckets} of these at an end of a bucket"
        text += " of rows (docs/autotune.md)."
    if group.padded:
        text += (
            f" The caller pads {len(group.padded)} of them; the copies are inside our time, "
            f"{percent(min(group.padded))} to {percent(max(group.padded))} of it."
        )
    return text


def _alerts(group: Group) -> list[str]:
    """Sentences on what a reader must know before using the figures: clocks, mixed environments, absences, doubts."""
    alerts = []
    if throttled := group.throttled():
        reasons = ", ".join(f"{reason} in {count}" for reason, count in sorted(throttled.items()))
        alerts.append(f"The card reported limits on its clocks: {reasons} of {len(group.measurements)} measurements.")
    if group.slowest_clock < LOW_CLOCK:
        alerts.append(
            f"The SM clock fell to {percent(group.slowest_clock)} of the highest that the card allows: times are those "
            "of slower clocks, speedups are of contenders in turns."
        )
    if len(group.environments) > 1:
        counts = Counter(measurement.environment for measurement in group.measurements)
        shares = " and ".join(str(counts[environment.id]) for environment in group.environments)
        alerts.append(
            f"{len(group.environments)} environments, with {shares} measurements, differ in: "
            f"{', '.join(_differences(group))}. A figure over all of them is of no one of them."
        )
    alerts += [
        f"{contender} is missing in {count} of {len(group.measurements)} problems: {reason}."
        for (contender, reason), count in sorted(group.absences().items())
    ]
    if not group.roof.peak_tflops or not group.roof.bandwidth_tbs:
        flagged = f"only results above {group.suspicious_tflops:.0f} TFLOP/s are flagged"
        flagged = flagged if math.isfinite(group.suspicious_tflops) else "no result is flagged by its rate"
        alerts.append(f"The card's peak or its memory clock is not known: the roofline is incomplete, and {flagged}.")
    doubts = [doubt.words for doubt in group.doubts]
    rest = len(doubts) - MAX_DOUBTS
    return [*alerts, *doubts[:MAX_DOUBTS], *([f"And {rest} more like these."] if rest > 0 else [])]


def _differences(group: Group) -> list[str]:
    """The facts and library versions in which the group's environments differ."""
    fields = [name for name in Environment.model_fields if name not in ("id", "kind", "versions")]
    first, *rest = group.environments
    names = [name for name in fields if any(getattr(environment, name) != getattr(first, name) for environment in rest)]
    libraries = sorted({name for environment in group.environments for name in environment.versions})
    return names + [
        f"version of {name}"
        for name in libraries
        if len({environment.versions.get(name) for environment in group.environments}) > 1
    ]


def _environment(group: Group) -> Table:
    """The table of a group's card, driver and libraries."""

    def values(field: str) -> str:
        return " / ".join(dict.fromkeys(str(getattr(environment, field)) for environment in group.environments))

    libraries = sorted({name for environment in group.environments for name in environment.versions})
    versions = {
        name: " / ".join(dict.fromkeys(environment.versions.get(name, "absent") for environment in group.environments))
        for name in libraries
    }
    peak, bandwidth = group.roof.peak_tflops, group.roof.bandwidth_tbs
    rows = [
        ("card", f"{values('name')} ({group.card or 'unknown card'}), capability {values('capability')}, "
         f"{values('sms')} SMs"),
        ("L2, device memory", " / ".join(
            f"{card.l2_bytes / 2**20:g} MiB, {card.memory_bytes / 2**30:.0f} GiB" for card in group.environments[:1])),
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
    """The table of clocks, power and temperature during a group's measurements."""
    rows = (
        ("SM clock, MHz", spread(group.readings(lambda measurement: measurement.conditions.sm_mhz))),
        ("memory clock, MHz", spread(group.readings(lambda measurement: measurement.conditions.memory_mhz))),
        ("power, W", spread(group.readings(lambda measurement: measurement.conditions.power_w))),
        ("temperature, °C", spread(group.readings(lambda measurement: measurement.conditions.temperature_c))),
        ("throttle reasons", ", ".join(sorted(group.throttled())) or "none reported"),
    )
    return Table("Read while it ran", ("what", "lowest to highest"), rows)


def _published_table(group: Group, published: Published) -> Table | None:
    """Our figures beside CUDA-L2's published ones; None if no published set fits."""
    mode = "server" if group.protocol == "server" else "offline"
    of_half = group.types == group.acc  # fp16 operands without fusion or batch, as in all published figures
    published_rows = published.nearest(group.gpu, group.acc, mode) if of_half else {}
    rows = [
        (name, ratio_text(summary.mean), ratio_text(row.mean), ratio_text(summary.median), ratio_text(row.median),
         ratio_text(summary.geomean.value), ratio_text(row.geomean), percent(summary.wins), percent(row.wins))
        for name, summary in _summaries(group)
        if (row := published_rows.get(name))
    ]  # fmt: skip
    if not rows:
        return None
    reference = next(iter(published_rows.values()))
    return Table(
        f"Beside CUDA-L2's published figures ({published.source['paper']}). Not the same experiment. "
        f"Ours: {group.title}, {len(group.measurements)} shapes. Theirs: {GPUS[reference.gpu].title}, "
        f"{reference.acc}, {mode} (host clock, padding outside it), {reference.shapes} shapes",
        ("baseline", "mean", "published", "median", "published", "geomean", "published", "wins", "published"),
        tuple(rows),
    )


def _charts(group: Group, anchor: str) -> tuple[Chart, ...]:
    """The charts of a group, drawn by the page's script."""
    strictest = group.strictest
    summary = group.summary(strictest) if strictest else None
    words = (
        f"Each problem's speedup over the chosen baseline, {strictest} at first: geometric mean "
        f"{interval(summary.geomean)}, {percent(summary.losses)} below 1."
        if summary
        else "No baseline was measured."
    )
    speedup = [
        Chart("speedups", title, f"{title}. {words}", {"group": anchor, "x": axis, "label": label})
        for axis, (label, title) in X_AXES.items()
        if summary
    ]
    roofline = Chart(
        "roofline",
        "Roofline",
        f"Rate of our kernels against arithmetic intensity, under a peak of {group.roof.peak_tflops:.0f} TFLOP/s and "
        f"{group.roof.bandwidth_tbs:.2f} TB/s; {len(group.doubts)} results of any contender are doubtful.",
        {"group": anchor},
    )
    return (*speedup, roofline)
