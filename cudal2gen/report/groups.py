"""Groups measurements that were taken under equal conditions, and computes the figures of each group.

Only measurements with the same card, types, layout, protocol, L2 state and load may be averaged. For each such group
this module gives speedups over the baselines, the roofline, the worst cases, and doubts: results that are too good to
be believed without a check. Times are in microseconds, rates in TFLOP/s.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from statistics import median
from typing import NamedTuple, get_args

from cudal2gen.kernel import Acc, SizeClass
from cudal2gen.report.statistics import Summary, best_of, summarise
from cudal2gen.results import KERNEL, MIN_US, Environment, Measurement, Measurements, speedups
from cudal2gen.results.ratios import Ratio
from kernelproof.ground.element import Element

SIZE_CLASSES: tuple[SizeClass, ...] = get_args(SizeClass)
# Before compute capability 10.0, no dense fp16 product of NVIDIA's libraries sustains a higher rate than this. A result
# above it needs a check by hand.
SUSPICIOUS_TFLOPS = 800.0
WORST = 20  # how many of the lowest speedups a report lists
INTERFACES = ("torch.matmul", "cublas", "cublaslt-heuristic", "cublaslt-autotuning")  # baselines, without an ending
ENDINGS = ("nn", "tn", "max")  # endings of baselines' names: how B is stored, or the faster of both

Key = tuple[str, str, str, str, str, str, float | None]  # card, GPU, types, layout, protocol, L2, load


class Roof(NamedTuple):
    """The roofline of a card at its highest clocks: peak rate and memory bandwidth. 0 means that one is not known."""

    peak_tflops: float
    bandwidth_tbs: float
    l2_bytes: int

    def tflops(self, measurement: Measurement) -> float:
        """The rate that no kernel can exceed on this problem; infinite if no limit is known.

        Unless the L2 is cold, it may already hold as many bytes of the operands as fit, so only the rest must come from
        device memory.
        """
        cached_bytes = 0 if measurement.l2 == "cold" else self.l2_bytes
        moved_bytes = max(0, measurement.traffic_bytes - cached_bytes)
        compute = self.peak_tflops or float("inf")
        memory = (
            self.bandwidth_tbs * measurement.flops / moved_bytes if moved_bytes and self.bandwidth_tbs else float("inf")
        )
        return min(compute, memory)


def roof(environment: Environment, acc: Acc, element: Element) -> Roof:
    """The roofline of an environment's card, from its number of SMs, highest clocks and memory bus."""
    peak = environment.peak_flops_us(acc, element)
    return Roof(peak / 1e6, environment.bandwidth_bytes_us / 1e6, environment.l2_bytes)


def tflops(measurement: Measurement, us: float) -> float:
    """The rate in TFLOP/s of a measurement's problem if it takes ``us`` microseconds."""
    return measurement.flops / us / 1e6


class Doubt(NamedTuple):
    """A result that is too good to be believed without a check. Rates are in TFLOP/s."""

    measurement: Measurement
    contender: str
    tflops: float
    limit: float

    @property
    def words(self) -> str:
        """A sentence that names the result and the limit that it exceeds."""
        if self.tflops > self.limit:
            reason = (
                f"above the roofline's {self.limit:.1f} TFLOP/s there: the clock, the L2 state or the work is wrong"
            )
        else:
            reason = f"above {SUSPICIOUS_TFLOPS:.0f} TFLOP/s: check it by hand before you believe it"
        return f"{self.measurement.mnk}, {self.contender}: {self.tflops:.1f} TFLOP/s is {reason}"


class Group:
    """Measurements under the same conditions, one of each problem.

    The conditions are the card (``name``), the GPU model of the problems (``gpu``), types (with fusion and batch),
    layout, protocol, L2 state and load (``target_qps``: mean calls per second, or None).
    """

    def __init__(self, key: Key, environments: Sequence[Environment], measurements: Sequence[Measurement]) -> None:
        self.name, self.gpu, self.types, self.layout, self.protocol, self.l2, self.target_qps = key
        self.environments = environments
        self.measurements = measurements
        self._summaries: dict[tuple[str, str | None], Summary | None] = {}

    @property
    def title(self) -> str:
        """The conditions that all measurements share."""
        state = f", L2 {self.l2}" if self.protocol == "device" else ""
        load = f", {self.target_qps:g} calls/s" if self.target_qps is not None else ""
        return f"{self.name}, {self.types}, {self.layout}, {self.protocol}{state}{load}"

    @property
    def card(self) -> str:
        """The model of the card that measured, which may differ from the problems' ``gpu``; empty if the card is not in
        ``GPUS``."""
        return self.environments[0].gpu

    @property
    def acc(self) -> Acc:
        """The accumulator type of all measurements."""
        return self.measurements[0].acc

    @cached_property
    def contenders(self) -> list[str]:
        """The names of all contenders, our kernel first and each "-max" after its two layouts."""
        return sorted({name for measurement in self.measurements for name in measurement.contenders}, key=_order)

    @cached_property
    def baselines(self) -> list[str]:
        """The names of all contenders but our kernel."""
        return [name for name in self.contenders if name != KERNEL]

    @cached_property
    def ratios(self) -> dict[str, list[Ratio | None]]:
        """For each baseline, our speedup in every measurement; None where one of the two was absent."""
        return {name: speedups(self.measurements, name) for name in self.baselines}

    @cached_property
    def roof(self) -> Roof:
        """The roofline of the card. If the group has several environments, the highest limits count."""
        element = self.measurements[0].problem.element
        roofs = [roof(environment, self.acc, element) for environment in self.environments]
        return Roof(*(max(values) for values in zip(*roofs, strict=True)))

    def summary(self, baseline: str, size_class: str | None = None) -> Summary | None:
        """The statistics of speedups over a baseline, for all problems or those of one class; None without any."""
        if (baseline, size_class) not in self._summaries:
            self._summaries[baseline, size_class] = summarise(self.speedups_over(baseline, size_class))
        return self._summaries[baseline, size_class]

    def dispatched(self, baseline: str) -> Summary | None:
        """The statistics of a dispatcher that uses the baseline wherever it is faster than our kernel."""
        return summarise(best_of(self.speedups_over(baseline)))

    def speedups_over(self, baseline: str, size_class: str | None = None) -> list[Ratio]:
        """The speedups over a baseline for the problems on which both ran."""
        pairs = zip(self._classes, self.ratios[baseline], strict=True)
        return [ratio for own_class, ratio in pairs if ratio and size_class in (None, own_class)]

    @property
    def size_classes(self) -> list[SizeClass]:
        """The size classes that occur, in the report's order."""
        return [name for name in SIZE_CLASSES if name in self._classes]

    @cached_property
    def _classes(self) -> list[SizeClass]:
        """The size class of each measurement."""
        return [measurement.problem.size_class for measurement in self.measurements]

    def floor_us(self, measurement: Measurement) -> float:
        """A lower bound of any kernel's time in microseconds: by the roofline, and by the time of an empty kernel."""
        rate = self.roof.tflops(measurement)
        return max(measurement.flops / rate / 1e6, MIN_US)

    def worst(self, baseline: str) -> list[tuple[Measurement, Ratio]]:
        """The ``WORST`` lowest speedups over a baseline, lowest first."""
        pairs = [
            (measurement, ratio)
            for measurement, ratio in zip(self.measurements, self.ratios[baseline], strict=True)
            if ratio
        ]
        return sorted(pairs, key=lambda pair: pair[1].value)[:WORST]

    @cached_property
    def strictest(self) -> str | None:
        """The baseline over which our geometric-mean speedup is lowest; None without baselines."""
        means = {name: summary.geomean.value for name in self.baselines if (summary := self.summary(name))}
        return min(means, key=means.__getitem__) if means else None

    @cached_property
    def doubts(self) -> list[Doubt]:
        """The results, of our kernel or a baseline, above the roofline or above ``suspicious_tflops``."""
        doubts = []
        for measurement in self.measurements:
            limit = self.roof.tflops(measurement)
            for timing in measurement.timings:
                rate = tflops(measurement, timing.median_us)
                if rate > min(limit, self.suspicious_tflops):
                    doubts.append(Doubt(measurement, timing.contender, rate, limit))
        return doubts

    @property
    def suspicious_tflops(self) -> float:
        """The rate above which a result needs a check by hand; infinite for cards of compute capability 10 or more, for
        which only the roofline is known."""
        generations = {int(environment.capability.partition(".")[0]) for environment in self.environments}
        return SUSPICIOUS_TFLOPS if max(generations) < 10 else math.inf

    def absences(self) -> Counter[tuple[str, str]]:
        """How many measurements lack a contender, by (contender, reason)."""
        return Counter(item for measurement in self.measurements for item in measurement.absent.items())

    @property
    def slowest_clock(self) -> float:
        """The lowest SM clock that was read during the measurements, as a share (0 to 1) of the card's highest clock; 1
        if no clock is known."""
        highest = {environment.id: environment.max_sm_mhz for environment in self.environments}
        shares = [
            mhz / highest[measurement.environment]
            for measurement in self.measurements
            for mhz in measurement.conditions.sm_mhz
            if mhz and highest[measurement.environment]
        ]
        return min(shares, default=1.0)

    def throttled(self) -> Counter[str]:
        """The number of measurements in which the card reported each reason for limited clocks."""
        return Counter(reason for measurement in self.measurements for reason in measurement.conditions.throttle)

    def readings(self, take: Callable[[Measurement], Iterable[float]]) -> list[float]:
        """One kind of reading of the card (what ``take`` selects) from all measurements."""
        return [value for measurement in self.measurements for value in take(measurement)]

    @property
    def padded(self) -> list[float]:
        """For each problem that needs padded matrices, the share (0 to 1) of our time that the copies take."""
        timings = [measurement.timing(KERNEL) for measurement in self.measurements]
        return [timing.padding_us / timing.median_us for timing in timings if timing and timing.padding_us]

    @property
    def samples(self) -> tuple[int, int, float]:
        """The fewest, the most, and the median number of samples of our kernel per measurement."""
        counts = [len(timing.event_us) for measurement in self.measurements if (timing := measurement.timing(KERNEL))]
        return (min(counts), max(counts), median(counts)) if counts else (0, 0, 0)


def by_conditions(measurements: Measurements, predicate: Callable[[Measurement], bool] = lambda _: True) -> list[Group]:
    """The latest measurements that satisfy ``predicate``, grouped by their conditions.

    Problems whose operands exceed three times the L2 are measured once, since hot and cold are the same for them. They
    belong to both the hot and the cold group of their protocol. If there is neither, they form a group of their own,
    "exceeded".
    """
    by_state: dict[Key, dict[str, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
    for measurement in filter(predicate, measurements.latest()):
        name = measurements.environments[measurement.environment].name
        key: Key = (
            name,
            measurement.gpu,
            measurement.types,
            measurement.layout,
            measurement.protocol,
            "",
            measurement.target_qps,
        )
        by_state[key][measurement.l2].append(measurement)
    groups = []
    for key, states in sorted(by_state.items(), key=lambda item: tuple(map(str, item[0]))):
        large = states.pop("exceeded", [])
        for state in sorted(states) or ["exceeded"]:
            by_size = {measurement.mnk: measurement for measurement in [*large, *states.get(state, [])]}
            ordered = sorted(by_size.values(), key=lambda measurement: (measurement.m, measurement.n, measurement.k))
            environment_ids = {measurement.environment for measurement in ordered}
            environments = [
                environment for id_, environment in measurements.environments.items() if id_ in environment_ids
            ]
            groups.append(Group((*key[:5], state, key[6]), environments, ordered))  # the L2 state in its place
    return groups


def _order(name: str) -> tuple[bool, int, str, int, str]:
    """The sort key of a contender: our kernel, then the interfaces in CUDA-L2's order, then others; within an interface
    nn, tn, max."""
    stem, _, last = name.rpartition("-")
    if last not in ENDINGS:
        stem, last = name, ""
    rank = INTERFACES.index(stem) if stem in INTERFACES else len(INTERFACES)
    return name != KERNEL, rank, stem, ENDINGS.index(last) if last else 0, name
