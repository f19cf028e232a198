"""Times all contenders (our kernel and the baselines) on one problem, under one of three protocols.

- ``device`` times kernels without the host's part of a launch: a CUDA graph of repeated launches runs between two
  device events. With a ``cold`` L2, data of at least three times the L2's size passes through the cache between two
  uses of a matrix, so operands come from device memory. With a ``hot`` L2, the same matrices are used in every launch
  and once more just before. If one set of operands is itself larger than three times the L2, the two states do not
  differ, and the problem is measured once, as ``exceeded``.
- ``offline`` times single calls on the host's clock, from one synchronisation to the next, so launch and wake-up count.
- ``server`` is ``offline`` with an exponentially distributed pause before each call, in which the card may idle.

``offline`` and ``server`` are the modes of the CUDA-L2 paper. They also time each call with device events, but in a
separate call, because recording events would add to the host's time.

In each round the contenders run in random order and then in the reverse order (A B C C B A), so that drift of clocks
and temperature affects all of them equally. Inputs are normally distributed. After the timing, every result is compared
with the fp64 product (see ``check``). Times are in microseconds, durations in seconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import NamedTuple

from cudal2gen.bench.check import Reference
from cudal2gen.bench.race import RACE_SETS, race
from cudal2gen.kernel import Problem
from cudal2gen.launch.gpu import (
    Absent,
    Call,
    CardReading,
    Contender,
    KernelContender,
    MeasuringDevice,
    PaddingContender,
)
from cudal2gen.launch.launcher import LaunchError
from cudal2gen.launch.operands import Operands
from cudal2gen.results import L2, MIN_US, Conditions, Environment, Measurement, ProtocolName, Timing, exceeds
from kernelproof.ground.errors import Failure

SAMPLE_US = 200.0  # intended device time of one sample; short kernels are launched repeatedly to fill it
MIN_LAUNCH_US = 2.0  # even a launch with nearly no work takes about this long in a graph
MAX_CALLS = 64  # most launches in one sample
# A contender's copies to and from padded matrices: how often a sample makes them, and samples, whose median counts.
PADDING_CALLS, PADDING_SAMPLES = 8, 5
# A round gives each contender two samples. With fewer than three rounds (six pairs), noise alone often makes all pairs
# differ in the same direction, and the bootstrap interval would then exclude 1.
MIN_ROUNDS, MAX_ROUNDS = 3, 15
MAX_HOST_ROUNDS = 500  # most rounds of the protocols that the host times

# Least time between two readings of the card. A reading by NVML may take milliseconds in which the device idles and its
# clocks change, so it must be rare.
READING_SECONDS = 0.05


class TooGood(Failure):
    """A measured time is shorter than the hardware allows, so something was not computed or the clock is wrong.

    ``contender`` is the name of the contender with this time.
    """

    def __init__(self, message: str, contender: str = "") -> None:
        super().__init__(message)
        self.contender = contender


@dataclass(frozen=True)
class Settings:
    """What to measure, and for how long.

    ``warmup_seconds`` are spent once per run, ``benchmark_seconds`` on each problem, protocol and L2 state.
    ``target_qps``: mean number of calls per second under the ``server`` protocol. ``seed``: of the inputs, of the
    contenders' order and of pauses. ``products``: number of products in a batched launch, or of groups in a grouped
    one.
    """

    protocols: tuple[ProtocolName, ...] = ("device",)
    warmup_seconds: float = 3.0
    benchmark_seconds: float = 0.25
    target_qps: float = 1000.0
    seed: int = 0
    products: int = 1


class Condition(NamedTuple):
    """The conditions of one measurement of a problem: a protocol and an L2 state."""

    protocol: ProtocolName
    l2: L2


class BoundContender(NamedTuple):
    """A contender that can run the problem, with its calls, one for each set of operands."""

    contender: Contender
    calls: list[Call]


@dataclass
class Samples:
    """One contender's times in microseconds per call: between device events, and on the host's clock."""

    event_us: list[float] = field(default_factory=list)
    wall_us: list[float] = field(default_factory=list)


Turn = Callable[[BoundContender, Samples], None]  # takes one sample of a contender and adds it to its samples


def states(problem: Problem, protocol: ProtocolName, l2_bytes: int, products: int = 1) -> tuple[L2, ...]:
    """The L2 states in which a problem is measured. ``l2_bytes``: size of the card's L2. ``products``: as in
    ``Settings``."""
    if exceeds(problem, l2_bytes, products):
        return ("exceeded",)
    return ("cold", "hot") if protocol == "device" else ("hot",)


def target_qps(settings: Settings, protocol: ProtocolName) -> float | None:
    """Mean number of calls per second; None for protocols that do not wait between calls."""
    return settings.target_qps if protocol == "server" else None


def calls_per_sample(problem: Problem, environment: Environment, products: int = 1) -> int:
    """Number of launches in one sample of the ``device`` protocol.

    It follows from a lower bound of the time, not from a measurement, so that it is the same in every run.
    """
    least_us = max(environment.floor_us(problem, cold=True, products=products), MIN_LAUNCH_US)
    return min(MAX_CALLS, max(1, int(SAMPLE_US / least_us)))


def _set_count(count: int, work: Sequence[Condition]) -> int:
    """How many sets of operands are needed. ``count``: launches in one sample.

    With a cold L2 each launch of a sample has a set of its own, so that no launch finds its operands in the cache.
    Otherwise only the race between a library's algorithms needs several. Operands that exceed the L2 need one set.
    """
    l2_states = {item.l2 for item in work}
    return 1 if "exceeded" in l2_states else count if "cold" in l2_states else min(count, RACE_SETS)


def measure(
    device: MeasuringDevice,
    problem: Problem,
    contenders: Sequence[Contender],
    work: Sequence[Condition],
    settings: Settings,
    warm: bool = False,
) -> Iterator[Measurement]:
    """Measures one problem and yields one checked measurement for each item of ``work``.

    The device is warmed up first unless it is ``warm`` already. A contender that cannot compute the problem, or whose
    result is wrong after the timing, is listed as absent with the reason. Raises TooGood if a time is shorter than the
    hardware allows.
    """
    count = calls_per_sample(problem, device.environment, settings.products)
    operands = device.operands(problem, _set_count(count, work), settings.seed, settings.products)
    if not warm:
        _warm_up(device, device.evict, settings.warmup_seconds)
    ready, absent = _ready(device, problem, contenders, operands)
    reference = Reference(problem, operands[0])
    kernel = next((contender for contender in contenders if isinstance(contender, KernelContender)), None)
    for item in work:
        samples, readings = _sample(device, problem, ready, item, count, settings)
        timings: list[Timing] = []
        refused = dict(absent)
        for entry in ready:
            strict = isinstance(entry.contender, KernelContender)
            error, finding = reference.error(device, entry.calls[0], strict)
            if finding:
                refused[entry.contender.name] = finding
                continue
            padding_us = _padding_us(device, entry, operands[0])
            calls = count if item.protocol == "device" else 1
            timings.append(_timing(entry, samples[entry.contender.name], calls, error, padding_us))
        digest, options = (kernel.digest, kernel.record.launch_options) if kernel else ("", {})
        yield measurement_of(
            device.environment, problem, item, digest, options, settings,
            absent=refused, timings=timings, readings=readings,
        )  # fmt: skip


def _sample(
    device: MeasuringDevice,
    problem: Problem,
    ready: Sequence[BoundContender],
    item: Condition,
    count: int,
    settings: Settings,
) -> tuple[dict[str, Samples], list[CardReading]]:
    """Times all contenders alternately; returns their samples by name, and readings of the card between rounds.

    Under the ``device`` protocol each sample has ``count`` calls. Raises TooGood.
    """
    protocol, l2 = item
    rng = random.Random(f"{settings.seed} {problem.mnk} {protocol} {l2}")
    on_device = protocol == "device"
    turn = _graph_turn(device, ready, count, l2) if on_device else _host_turn(device, protocol, settings, rng)
    samples = {entry.contender.name: Samples() for entry in ready}
    readings = []
    most = MAX_ROUNDS if on_device else MAX_HOST_ROUNDS
    for entry in _turns(device, ready, settings.benchmark_seconds, most, rng):
        if isinstance(entry, CardReading):
            readings.append(entry)
        else:
            turn(entry, samples[entry.contender.name])
    _check_plausible(problem, device.environment, samples, on_device and l2 != "hot", settings.products)
    return samples, readings


def first_line(error: Exception) -> str:
    """An error in one line; the name of its type if it has no text."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def measurement_of(
    environment: Environment,
    problem: Problem,
    work: Condition,
    digest: str,
    options: dict[str, int],
    settings: Settings,
    *,
    absent: dict[str, str],
    timings: Sequence[Timing] = (),
    readings: Sequence[CardReading] = (),
) -> Measurement:
    """The measurement as it is stored. ``digest`` and ``options`` are our kernel's; ``absent`` gives, for each
    contender without times, the reason."""
    return Measurement(
        environment=environment.id,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        **problem.model_dump(),
        products=settings.products if problem.batched else 1,
        protocol=work.protocol,
        l2=work.l2,
        target_qps=target_qps(settings, work.protocol),
        seed=settings.seed,
        digest=digest,
        options=options,
        timings=tuple(timings),
        absent=absent,
        conditions=_conditions(readings),
    )


def _ready(
    device: MeasuringDevice, problem: Problem, contenders: Sequence[Contender], operands: Sequence[Operands]
) -> tuple[list[BoundContender], dict[str, str]]:
    """Binds each contender to every set of operands and runs it once, so that lazily loaded code is loaded.

    Returns the contenders that work, and the reasons of those that do not. Any exception counts as a reason, because
    the vendors' libraries raise their own types. Raises RuntimeError if a failure made the device unusable.
    """
    ready, absent = [], {}
    for contender in contenders:
        try:
            contender.prepare(problem, race(device, operands))
            calls = [contender.bind(matrices) for matrices in operands]
            calls[0]()
            device.synchronize()
        except Exception as error:
            device.synchronize()  # raises if the failure stopped the device, since no other contender can run then
            in_words = isinstance(error, Absent | LaunchError)
            absent[contender.name] = str(error) if in_words else f"{type(error).__name__}: {first_line(error)}"
            continue
        ready.append(BoundContender(contender, calls))
    return ready, absent


def prepare(device: MeasuringDevice, contender: Contender, problem: Problem) -> Contender:
    """Prepares a contender for a problem as ``measure`` does, and returns it. Raises Absent."""
    count = min(RACE_SETS, calls_per_sample(problem, device.environment))
    contender.prepare(problem, race(device, device.operands(problem, count, 0)))
    return contender


def _turns(
    device: MeasuringDevice, ready: Sequence[BoundContender], seconds: float, most: int, rng: random.Random
) -> Iterator[BoundContender | CardReading]:
    """Yields the contenders in the order of their turns, and readings of the card between rounds.

    It ends after ``most`` rounds, or when another round of average length would exceed ``seconds`` (but not before
    ``MIN_ROUNDS``).
    """
    start, read = device.now(), -math.inf
    for rounds in range(1, most + 1):
        order = rng.sample(ready, len(ready))
        yield from order
        yield from reversed(order)
        if device.now() - read >= READING_SECONDS:
            yield device.reading()
            read = device.now()
        if rounds >= MIN_ROUNDS and (device.now() - start) * (rounds + 1) / rounds > seconds:
            return


def _graph_turn(device: MeasuringDevice, ready: Sequence[BoundContender], count: int, l2: L2) -> Turn:
    """A turn of the ``device`` protocol: a graph of ``count`` launches between two device events.

    Just before the timing, the graph itself runs once for a hot L2, so that the operands are cached; otherwise other
    data is read, so that none of them are.
    """
    graphs = {}
    for entry in ready:
        calls = [entry.calls[0 if l2 == "hot" else i % len(entry.calls)] for i in range(count)]
        graphs[entry.contender.name] = device.capture(calls)

    def turn(entry: BoundContender, samples: Samples) -> None:
        graph = graphs[entry.contender.name]
        samples.event_us.append(device.elapsed_us(graph, graph if l2 == "hot" else device.evict) / count)

    for entry in ready:  # a graph's first launch also uploads it, so this sample is discarded
        turn(entry, Samples())
    return turn


def _host_turn(device: MeasuringDevice, protocol: ProtocolName, settings: Settings, rng: random.Random) -> Turn:
    """A turn of ``offline`` or ``server``: one call on the host's clock, then one between device events."""

    def arrive() -> None:
        if protocol == "server":
            device.sleep(rng.expovariate(settings.target_qps))

    def turn(entry: BoundContender, samples: Samples) -> None:
        call = entry.calls[0]
        arrive()
        device.synchronize()
        start = device.now()
        call()
        device.synchronize()
        samples.wall_us.append((device.now() - start) * 1e6)
        arrive()
        samples.event_us.append(device.elapsed_us(call, device.synchronize))

    return turn


def _padding_us(device: MeasuringDevice, entry: BoundContender, operands: Operands) -> float | None:
    """Median device time of a contender's copies to and from padded matrices; None if it makes no copies."""
    copies = entry.contender.stages(operands)[1] if isinstance(entry.contender, PaddingContender) else None
    if copies is None:
        return None
    graph = device.capture([copies] * PADDING_CALLS)
    return median(device.elapsed_us(graph, device.evict) / PADDING_CALLS for _ in range(PADDING_SAMPLES))


def _timing(entry: BoundContender, samples: Samples, calls: int, error: float, padding_us: float | None) -> Timing:
    """A contender's row of a measurement. ``calls``: calls of one sample; ``error``: the largest of its result;
    ``padding_us``: what copies take, None without copies."""
    kernel = entry.contender if isinstance(entry.contender, KernelContender) else None
    return Timing(
        contender=entry.contender.name,
        record=kernel.record.name if kernel else None,
        digest=kernel.digest if kernel else None,
        detail=entry.contender.detail,
        calls=calls,
        event_us=tuple(round(sample, 4) for sample in samples.event_us),
        wall_us=tuple(round(sample, 3) for sample in samples.wall_us),
        padding_us=padding_us,
        error=error,
    )


def _conditions(readings: Sequence[CardReading]) -> Conditions:
    """The readings of a card during a measurement, one element of each tuple for each reading."""
    return Conditions(
        sm_mhz=tuple(reading.sm_mhz for reading in readings),
        memory_mhz=tuple(reading.memory_mhz for reading in readings),
        power_w=tuple(round(reading.power_w, 1) for reading in readings),
        temperature_c=tuple(reading.temperature_c for reading in readings),
        throttle=tuple(sorted({reason for reading in readings for reason in reading.throttle})),
    )


def _check_plausible(
    problem: Problem, environment: Environment, samples: dict[str, Samples], cold: bool, products: int
) -> None:
    """Raises TooGood if a contender's fastest sample is shorter than the card allows.

    ``cold``: A and B must have come from device memory, so that its bandwidth is a limit as well.
    """
    floor = max(environment.floor_us(problem, cold, products), MIN_US)
    for name, times in samples.items():
        fastest = min([*times.event_us, *times.wall_us])
        if fastest < floor:
            raise TooGood(
                f"{name} on {problem.mnk} {problem.types}: {fastest:.3f} us, but {environment.name} cannot do it in "
                f"less than {floor:.3f} us (tensor cores at {environment.max_sm_mhz} MHz"
                f"{', A and B from device memory' if cold else ''}). Something is not computed, or the clock is wrong: "
                f"no measurement of this problem is stored",
                name,
            )


def _warm_up(device: MeasuringDevice, call: Call, seconds: float) -> None:
    """Keeps the device busy for some seconds, so that its clocks and temperature settle before the timing."""
    end = device.now() + seconds
    while device.now() < end:
        for _ in range(20):  # several per synchronisation, so that the device does not idle between calls
            call()
        device.synchronize()
