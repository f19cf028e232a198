"""Groups of measurements under equal conditions, and the figures of each: speedups, roofline, worst cases, doubts.

Times are in microseconds, rates in TFLOP/s, arithmetic intensities in FLOP per byte.
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
# No dense fp16 GEMM of NVIDIA's libraries sustains more before compute capability 10.0: a higher rate needs a check.
SUSPICIOUS_TFLOPS = 800.0
WORST = 20
INTERFACES = ("torch.matmul", "cublas", "cublaslt-heuristic", "cublaslt-autotuning")
LAYOUTS = ("nn", "tn", "max")

Key = tuple[str, str, str, str, str, str, float | None]  # card, GPU, types, layout, protocol, L2, load


class Roof(NamedTuple):
    """Limits of a card at its highest clocks; a rate of 0 means that it is not known."""

    peak_tflops: float
    bandwidth_tbs: float
    l2_bytes: int

    def tflops(self, measurement: Measurement) -> float:
        """The rate that the problem cannot exceed; infinite where no limit is known.

        A warm L2 serves its capacity's worth of operands, so only the rest comes from device memory.
        """
        cached_bytes = 0 if measurement.l2 == "cold" else self.l2_bytes
        moved_bytes = max(0, measurement.traffic_bytes - cached_bytes)
        compute = self.peak_tflops or float("inf")
        memory = (
            self.bandwidth_tbs * measurement.flops / moved_bytes if moved_bytes and self.bandwidth_tbs else float("inf")
        )
        return min(compute, memory)


def roof(environment: Environment, acc: Acc, element: Element) -> Roof:
    """From the environment's SMs, highest clocks and bus."""
    peak = environment.peak_flops_us(acc, element)
    return Roof(peak / 1e6, environment.bandwidth_bytes_us / 1e6, environment.l2_bytes)


def tflops(measurement: Measurement, us: float) -> float:
    """The rate of a product that takes ``us`` microseconds."""
    return measurement.flops / us / 1e6


class Doubt(NamedTuple):
    """A result that is too good to be true without a check. Rates in TFLOP/s."""

    measurement: Measurement
    contender: str
    tflops: float
    limit: float

    @property
    def words(self) -> str:
        """A sentence that names the result and the limit it exceeds."""
        if self.tflops > self.limit:
            reason = (
                f"above the roofline's {self.limit:.1f} TFLOP/s there: the clock, the L2 state or the work is wrong"
            )
        else:
            reason = f"above {SUSPICIOUS_TFLOPS:.0f} TFLOP/s: check it by hand before you believe it"
        return f"{self.measurement.mnk}, {self.contender}: {self.tflops:.1f} TFLOP/s is {reason}"


class Group:
    """Measurements of one card, of one choice of types, layout, protocol and L2 state, one of each problem. ``types``:
    with fusion and batch."""

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
        """The model of the card that measured, whatever its problems say; empty for one that is not in ``GPUS``."""
        return self.environments[0].gpu

    @property
    def acc(self) -> Acc:
        """The accumulator of all."""
        return self.measurements[0].acc

    @cached_property
    def contenders(self) -> list[str]:
        """Names, measured and derived: our kernel first, a "-max" after its two layouts."""
        return sorted({name for measurement in self.measurements for name in measurement.contenders}, key=_order)

    @cached_property
    def baselines(self) -> list[str]:
        return [name for name in self.contenders if name != KERNEL]

    @cached_property
    def ratios(self) -> dict[str, list[Ratio | None]]:
        """Speedup over each baseline, one per measurement."""
        return {name: speedups(self.measurements, name) for name in self.baselines}

    @cached_property
    def roof(self) -> Roof:
        """The highest of the environments' roofs, were there several."""
        element = self.measurements[0].problem.element
        roofs = [roof(environment, self.acc, element) for environment in self.environments]
        return Roof(*(max(values) for values in zip(*roofs, strict=True)))

    def summary(self, baseline: str, size_class: str | None = None) -> Summary | None:
        """Over all problems, or over those of a class."""
        if (baseline, size_class) not in self._summaries:
            self._summaries[baseline, size_class] = summarise(self.speedups_over(baseline, size_class))
        return self._summaries[baseline, size_class]

    def dispatched(self, baseline: str) -> Summary | None:
        """Speedups of a dispatcher that takes the baseline where that is faster."""
        return summarise(best_of(self.speedups_over(baseline)))

    def speedups_over(self, baseline: str, size_class: str | None = None) -> list[Ratio]:
        """Speedups over a baseline where both ran."""
        pairs = zip(self._classes, self.ratios[baseline], strict=True)
        return [ratio for own_class, ratio in pairs if ratio and size_class in (None, own_class)]

    @property
    def size_classes(self) -> list[SizeClass]:
        """The size classes that occur, in the report's order."""
        return [name for name in SIZE_CLASSES if name in self._classes]

    @cached_property
    def _classes(self) -> list[SizeClass]:
        return [measurement.problem.size_class for measurement in self.measurements]

    def floor_us(self, measurement: Measurement) -> float:
        """A lower bound of any kernel's time, by FLOP, by bytes, and by the time of an empty kernel."""
        rate = self.roof.tflops(measurement)
        return max(measurement.flops / rate / 1e6, MIN_US)

    def worst(self, baseline: str) -> list[tuple[Measurement, Ratio]]:
        """The lowest speedups over a baseline, lowest first."""
        pairs = [
            (measurement, ratio)
            for measurement, ratio in zip(self.measurements, self.ratios[baseline], strict=True)
            if ratio
        ]
        return sorted(pairs, key=lambda pair: pair[1].value)[:WORST]

    @cached_property
    def strictest(self) -> str | None:
        """The baseline with our lowest geometric-mean speedup; None without baselines."""
        means = {name: summary.geomean.value for name in self.baselines if (summary := self.summary(name))}
        return min(means, key=means.__getitem__) if means else None

    @cached_property
    def doubts(self) -> list[Doubt]:
        """Results above the roofline or above what such cards sustain, of every measured contender."""
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
        """The rate above which a result needs a check by hand; infinite where none is known but the roofline's."""
        generations = {int(environment.capability.partition(".")[0]) for environment in self.environments}
        return SUSPICIOUS_TFLOPS if max(generations) < 10 else math.inf

    def absences(self) -> Counter[tuple[str, str]]:
        """How often a contender could not run, by (contender, reason)."""
        return Counter(item for measurement in self.measurements for item in measurement.absent.items())

    @property
    def slowest_clock(self) -> float:
        """The lowest SM clock that was read while it ran, as a share of the highest that the card allows; 1 where
        neither is known."""
        highest = {environment.id: environment.max_sm_mhz for environment in self.environments}
        shares = [
            mhz / highest[measurement.environment]
            for measurement in self.measurements
            for mhz in measurement.conditions.sm_mhz
            if mhz and highest[measurement.environment]
        ]
        return min(shares, default=1.0)

    def throttled(self) -> Counter[str]:
        """How many measurements saw each throttle reason."""
        return Counter(reason for measurement in self.measurements for reason in measurement.conditions.throttle)

    def readings(self, take: Callable[[Measurement], Iterable[float]]) -> list[float]:
        """Some reading of the card over all measurements."""
        return [value for measurement in self.measurements for value in take(measurement)]

    @property
    def padded(self) -> list[float]:
        """Shares (0 to 1) of our time that copies to and from padded matrices take, for problems that need copies."""
        timings = [measurement.timing(KERNEL) for measurement in self.measurements]
        return [timing.padding_us / timing.median_us for timing in timings if timing and timing.padding_us]

    @property
    def samples(self) -> tuple[int, int, float]:
        """Fewest, most, and the median number of samples of our kernel."""
        counts = [len(timing.event_us) for measurement in self.measurements if (timing := measurement.timing(KERNEL))]
        return (min(counts), max(counts), median(counts)) if counts else (0, 0, 0)


def by_conditions(measurements: Measurements, predicate: Callable[[Measurement], bool] = lambda _: True) -> list[Group]:
    """The latest measurements that satisfy ``predicate``, in groups of equal conditions.

    Where the operands exceed three times the L2, hot and cold are the same and measured once: such problems belong to
    the hot and to the cold group of their protocol, and to a group "exceeded" only where it has neither.
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
    sets = []
    for key, states in sorted(by_state.items(), key=lambda item: tuple(map(str, item[0]))):
        large = states.pop("exceeded", [])
        for state in sorted(states) or ["exceeded"]:
            by_size = {measurement.mnk: measurement for measurement in [*large, *states.get(state, [])]}
            ordered = sorted(by_size.values(), key=lambda measurement: (measurement.m, measurement.n, measurement.k))
            environment_ids = {measurement.environment for measurement in ordered}
            environments = [
                environment for id_, environment in measurements.environments.items() if id_ in environment_ids
            ]
            sets.append(Group((*key[:5], state, key[6]), environments, ordered))
    return sets


def _order(name: str) -> tuple[bool, int, str, int, str]:
    """Our kernel, then the paper's order of interfaces, then the rest; within an interface nn, tn, max."""
    stem, _, last = name.rpartition("-")
    if last not in LAYOUTS:
        stem, last = name, ""
    rank = INTERFACES.index(stem) if stem in INTERFACES else len(INTERFACES)
    return name != KERNEL, rank, stem, LAYOUTS.index(last) if last else 0, name
