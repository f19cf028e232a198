"""Measurements in groups of equal conditions, and what each group says: speedups, roofline, worst cases, doubts.

Times are in microseconds, rates in TFLOP/s, arithmetic intensities in FLOP per byte.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from statistics import median
from typing import NamedTuple, get_args

from cudal2gen.kernel import Acc, SizeClass
from cudal2gen.report.statistics import Summary, best_of, summarise
from cudal2gen.results import KERNEL, Environment, Measurement, Measurements, Ratio, speedups

SIZE_CLASSES: tuple[SizeClass, ...] = get_args(SizeClass)
# No dense fp16 GEMM of NVIDIA's own sustains more on a card of these architectures: such a rate is checked by hand.
SUSPICIOUS_TFLOPS = 800.0
WORST = 20
INTERFACES = ("torch.matmul", "cublas", "cublaslt-heuristic", "cublaslt-autotuning")
LAYOUTS = ("nn", "tn", "max")

Key = tuple[str, str, Acc, str, str, str, float | None]


class Roof(NamedTuple):
    """What a card can do at its highest clocks; a rate of 0 is not known."""

    peak_tflops: float
    bandwidth_tbs: float
    l2_bytes: int

    def tflops(self, measurement: Measurement) -> float:
        """The rate that the problem cannot exceed; infinite where nothing is known.

        Unless the L2 was cold, what it holds of the operands need not come from device memory again.
        """
        problem = measurement.problem
        kept = 0 if measurement.l2 == "cold" else self.l2_bytes
        moved = max(0, problem.traffic_bytes - kept)
        compute = self.peak_tflops or float("inf")
        memory = self.bandwidth_tbs * problem.flops / moved if moved and self.bandwidth_tbs else float("inf")
        return min(compute, memory)


def roof(environment: Environment, acc: Acc) -> Roof:
    """From the environment's SMs, highest clocks and bus."""
    return Roof(environment.peak_flops_us(acc) / 1e6, environment.bandwidth_bytes_us / 1e6, environment.l2_bytes)


def tflops(measurement: Measurement, us: float) -> float:
    """The rate at which so long a time works off the problem."""
    return measurement.problem.flops / us / 1e6


class Doubt(NamedTuple):
    """A result too good to be taken as it is."""

    measurement: Measurement
    contender: str
    tflops: float
    limit: float

    @property
    def words(self) -> str:
        """What is wrong with it."""
        if self.tflops > self.limit:
            reason = (
                f"above the roofline's {self.limit:.1f} TFLOP/s there: the clock, the L2 state or the work is wrong"
            )
        else:
            reason = f"above {SUSPICIOUS_TFLOPS:.0f} TFLOP/s: to be checked by hand before it is believed"
        return f"{self.measurement.mnk}, {self.contender}: {self.tflops:.1f} TFLOP/s is {reason}"


class Group:
    """Measurements of one card, accumulator, layout, protocol and L2 state, one of each problem."""

    def __init__(self, key: Key, environments: Sequence[Environment], measured: Sequence[Measurement]) -> None:
        self.name, self.gpu, self.acc, self.layout, self.protocol, self.l2, self.target_qps = key
        self.environments = environments
        self.measured = measured
        self._summaries: dict[tuple[str, str | None], Summary | None] = {}

    @property
    def title(self) -> str:
        """What was held equal."""
        state = f", L2 {self.l2}" if self.protocol == "device" else ""
        load = f", {self.target_qps:g} calls/s" if self.target_qps is not None else ""
        return f"{self.name}, {self.acc}, {self.layout}, {self.protocol}{state}{load}"

    @cached_property
    def contenders(self) -> list[str]:
        """Measured and derived, ours first, a "-max" after its two layouts."""
        return sorted({name for one in self.measured for name in one.contenders}, key=_order)

    @cached_property
    def baselines(self) -> list[str]:
        return [name for name in self.contenders if name != KERNEL]

    @cached_property
    def ratios(self) -> dict[str, list[Ratio | None]]:
        """Speedup over each baseline, one per measurement."""
        return {name: speedups(self.measured, name) for name in self.baselines}

    @cached_property
    def roof(self) -> Roof:
        """The highest of the environments' roofs, were there several."""
        roofs = [roof(environment, self.acc) for environment in self.environments]
        return Roof(*(max(values) for values in zip(*roofs, strict=True)))

    def summary(self, baseline: str, size_class: str | None = None) -> Summary | None:
        """Over all problems, or over those of a class."""
        if (baseline, size_class) not in self._summaries:
            self._summaries[baseline, size_class] = summarise(self.of(baseline, size_class))
        return self._summaries[baseline, size_class]

    def dispatched(self, baseline: str) -> Summary | None:
        """The same of a dispatcher that takes the baseline where that is faster."""
        return summarise(best_of(self.of(baseline)))

    def of(self, baseline: str, size_class: str | None = None) -> list[Ratio]:
        """Speedups over a baseline where both ran."""
        pairs = zip(self._classes, self.ratios[baseline], strict=True)
        return [ratio for own, ratio in pairs if ratio and size_class in (None, own)]

    @property
    def size_classes(self) -> list[SizeClass]:
        """Those that occur."""
        return [name for name in SIZE_CLASSES if name in self._classes]

    @cached_property
    def _classes(self) -> list[SizeClass]:
        return [one.problem.size_class for one in self.measured]

    def worst(self, baseline: str) -> list[tuple[Measurement, Ratio]]:
        """The lowest speedups over a baseline, lowest first."""
        pairs = [(one, ratio) for one, ratio in zip(self.measured, self.ratios[baseline], strict=True) if ratio]
        return sorted(pairs, key=lambda pair: pair[1].value)[:WORST]

    @cached_property
    def strictest(self) -> str | None:
        """The baseline that beats us most, by geometric mean."""
        means = {name: found.geomean.value for name in self.baselines if (found := self.summary(name))}
        return min(means, key=means.__getitem__) if means else None

    @cached_property
    def doubts(self) -> list[Doubt]:
        """Results above the roofline or above what such cards sustain, of every measured contender."""
        found = []
        for one in self.measured:
            limit = self.roof.tflops(one)
            for timing in one.timings:
                rate = tflops(one, timing.median_us)
                if rate > min(limit, SUSPICIOUS_TFLOPS):
                    found.append(Doubt(one, timing.contender, rate, limit))
        return found

    def absences(self) -> Counter[tuple[str, str]]:
        """How often a contender could not run, by (contender, reason)."""
        return Counter(item for one in self.measured for item in one.absent.items())

    def throttled(self) -> Counter[str]:
        """How many measurements saw each throttle reason."""
        return Counter(reason for one in self.measured for reason in one.conditions.throttle)

    def readings(self, take: Callable[[Measurement], Iterable[float]]) -> list[float]:
        """Some reading of the card over all measurements."""
        return [value for one in self.measured for value in take(one)]

    @property
    def padded(self) -> list[float]:
        """Share of our time that is copying to and from padded matrices, where there is any."""
        ours = [one.timing(KERNEL) for one in self.measured]
        return [found.padding_us / found.median_us for found in ours if found and found.padding_us]

    @property
    def samples(self) -> tuple[int, int, float]:
        """Fewest, most, and the median number of samples of our kernel."""
        counts = [len(found.event_us) for one in self.measured if (found := one.timing(KERNEL))]
        return (min(counts), max(counts), median(counts)) if counts else (0, 0, 0)


def groups(read: Measurements, wanted: Callable[[Measurement], bool] = lambda _: True) -> list[Group]:
    """The latest measurements that are ``wanted``, by conditions.

    Where one set of operands exceeds the L2 three times, hot and cold are the same and measured once: such problems
    belong to the hot and to the cold group of their protocol; a group of their own they are only where it has neither.
    """
    by_state: dict[Key, dict[str, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
    for one in filter(wanted, read.latest()):
        name = read.environments[one.environment].name
        key: Key = (name, one.gpu, one.acc, one.layout, one.protocol, "", one.target_qps)
        by_state[key][one.l2].append(one)
    found = []
    for key, states in sorted(by_state.items(), key=lambda item: tuple(map(str, item[0]))):
        large = states.pop("exceeded", [])
        for state in sorted(states) or ["exceeded"]:
            own = {one.mnk: one for one in [*large, *states.get(state, [])]}
            measured = sorted(own.values(), key=lambda one: (one.m, one.n, one.k))
            used = {one.environment for one in measured}
            environments = [environment for id_, environment in read.environments.items() if id_ in used]
            found.append(Group((*key[:5], state, key[6]), environments, measured))
    return found


def _order(name: str) -> tuple[bool, int, str, int, str]:
    """Ours, then the paper's order of interfaces, then others; of one interface nn, tn, max."""
    stem, _, last = name.rpartition("-")
    if last not in LAYOUTS:
        stem, last = name, ""
    rank = INTERFACES.index(stem) if stem in INTERFACES else len(INTERFACES)
    return name != KERNEL, rank, stem, LAYOUTS.index(last) if last else 0, name
