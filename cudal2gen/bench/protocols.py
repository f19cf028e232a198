"""Benchmark protocols: three ways to time every contender on the same random data, in turns.

- ``device``: kernels alone. CUDA graphs of repeated launches, between device events. L2 ``cold``: between two uses of a
  matrix at least three times the L2's size goes through the cache, other matrices or a scratch buffer read outside of
  the timing. L2 ``hot``: one set of matrices, used once more just before. Where one set exceeds three times the L2
  there is no difference, and it is measured once.
- ``offline``: synchronise, call, synchronise: the host's clock, launch and wake-up inside. ``server``: the same after
  an exponentially distributed pause. Device events around a call are taken in turns of their own, since they would cost
  host time. These are the modes of the CUDA-L2 paper.

Order: each round is a random order of the contenders and its mirror image (A B C C B A), so drift of clocks and
temperature meets all alike. Inputs are standard normal; after the timing every result is compared with the fp64
product, within the accumulator's error bound. Times are in microseconds, durations in seconds.
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
from cudal2gen.bench.race import RACE_CALLS, race
from cudal2gen.kernel import Problem
from cudal2gen.launch.gpu import Absent, Call, Contender, Device, Kernel, Reading, Staged
from cudal2gen.launch.launcher import LaunchError
from cudal2gen.launch.operands import Operands
from cudal2gen.results import L2, MIN_US, Conditions, Environment, Measurement, ProtocolName, Timing
from kernelproof.ground.errors import Failure

SAMPLE_US = 200.0  # device time of one sample, where the problem allows it
MAX_CALLS = 64
MIN_ROUNDS, MAX_ROUNDS = 3, 15  # a round is two samples; fewer than six pairs often differ by noise of one sign alone
MAX_HOST_ROUNDS = 500

EXCEEDED = 3  # times the L2's size
READING_SECONDS = 0.05  # between two readings of the card: NVML may take milliseconds, and the device idles meanwhile


class TooGood(Failure):
    """The time of ``contender`` is below what the hardware allows."""

    def __init__(self, message: str, contender: str = "") -> None:
        super().__init__(message)
        self.contender = contender


@dataclass(frozen=True)
class Settings:
    """How long to measure. Seconds: ``warmup`` once per run, ``benchmark`` per problem, protocol and L2 state.

    ``products``: of a launch, where problems are batched; of one that is grouped its groups.
    """

    protocols: tuple[ProtocolName, ...] = ("device",)
    warmup_seconds: float = 3.0
    benchmark_seconds: float = 0.25
    target_qps: float = 1000.0
    seed: int = 0
    products: int = 1


class Work(NamedTuple):
    """One measurement to take."""

    protocol: ProtocolName
    l2: L2


class Ready(NamedTuple):
    """A contender with its calls, one for each set of operands."""

    contender: Contender
    calls: list[Call]


@dataclass
class Samples:
    """Times of one contender's turns."""

    event_us: list[float] = field(default_factory=list)
    wall_us: list[float] = field(default_factory=list)


Turn = Callable[[Ready, Samples], None]


def states(problem: Problem, protocol: ProtocolName, l2_bytes: int, products: int = 1) -> tuple[L2, ...]:
    """The L2 states in which a problem, or a batch of so many ``products``, is measured."""
    if products * problem.traffic_bytes >= EXCEEDED * l2_bytes:
        return ("exceeded",)
    return ("cold", "hot") if protocol == "device" else ("hot",)


def target_qps(settings: Settings, protocol: ProtocolName) -> float | None:
    """Calls per second that arrive in the mean; None where a protocol does not wait for arrivals."""
    return settings.target_qps if protocol == "server" else None


def calls_per_sample(problem: Problem, environment: Environment, products: int = 1) -> int:
    """Launches in one sample of the ``device`` protocol, from the least time that they can take."""
    least_us = max(environment.floor_us(problem, cold=True, products=products), 2.0)
    return min(MAX_CALLS, max(1, int(SAMPLE_US / least_us)))


def _sets(count: int, work: Sequence[Work]) -> int:
    """How many sets of operands: one for each call from a cold L2, those of a race, or one that exceeds the L2."""
    l2_states = {item.l2 for item in work}
    return 1 if "exceeded" in l2_states else count if "cold" in l2_states else min(count, RACE_CALLS)


def measure(
    device: Device,
    problem: Problem,
    contenders: Sequence[Contender],
    work: Sequence[Work],
    settings: Settings,
    warm: bool = False,
) -> Iterator[Measurement]:
    """Measures one problem, after a warm-up unless ``warm``; yields a measurement for each piece of work, checked.

    A contender that cannot compute the problem, or whose result is wrong after the timing, is absent, with the reason.
    Raises TooGood for a time below what the hardware allows.
    """
    count = calls_per_sample(problem, device.environment, settings.products)
    operands = device.operands(problem, _sets(count, work), settings.seed, settings.products)
    if not warm:
        _warm_up(device, device.evict, settings.warmup_seconds)
    ready, absent = _ready(device, problem, contenders, operands)
    reference = Reference(problem, operands[0])
    kernel = next((contender for contender in contenders if isinstance(contender, Kernel)), None)
    for item in work:
        samples, readings = _sample(device, problem, ready, item, count, settings)
        timings: list[Timing] = []
        refused = dict(absent)
        for entry in ready:
            strict = isinstance(entry.contender, Kernel)
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
    device: Device, problem: Problem, ready: Sequence[Ready], item: Work, count: int, settings: Settings
) -> tuple[dict[str, Samples], list[Reading]]:
    """Samples by contender, ``count`` calls in each of the ``device`` protocol's, and the card's state between rounds.

    Raises TooGood.
    """
    protocol, l2 = item
    rng = random.Random(f"{settings.seed} {problem.mnk} {protocol} {l2}")
    on_device = protocol == "device"
    turn = _graph_turn(device, ready, count, l2) if on_device else _host_turn(device, protocol, settings, rng)
    samples = {entry.contender.name: Samples() for entry in ready}
    readings = []
    most = MAX_ROUNDS if on_device else MAX_HOST_ROUNDS
    for entry in _turns(device, ready, settings.benchmark_seconds, most, rng):
        if isinstance(entry, Reading):
            readings.append(entry)
        else:
            turn(entry, samples[entry.contender.name])
    _sound(problem, device.environment, samples, on_device and l2 != "hot", settings.products)
    return samples, readings


def first_line(error: Exception) -> str:
    """An error in one line; the name of its type if it has no text."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def measurement_of(
    environment: Environment,
    problem: Problem,
    work: Work,
    digest: str,
    options: dict[str, int],
    settings: Settings,
    *,
    absent: dict[str, str],
    timings: Sequence[Timing] = (),
    readings: Sequence[Reading] = (),
) -> Measurement:
    """A measurement, as it is stored. ``digest`` and ``options`` are our kernel's; ``absent``: reasons by contender."""
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
    device: Device, problem: Problem, contenders: Sequence[Contender], operands: Sequence[Operands]
) -> tuple[list[Ready], dict[str, str]]:
    """Contenders bound to every set and run once: what is loaded lazily is loaded now.

    One that fails, in whatever way, is absent; the vendors' libraries have exceptions of their own. Raises RuntimeError
    where that stopped the device.
    """
    ready, absent = [], {}
    for contender in contenders:
        try:
            contender.prepare(problem, race(device, operands))
            calls = [contender.bind(matrices) for matrices in operands]
            calls[0]()
            device.synchronize()
        except Exception as error:
            device.synchronize()
            in_words = isinstance(error, Absent | LaunchError)
            absent[contender.name] = str(error) if in_words else f"{type(error).__name__}: {first_line(error)}"
            continue
        ready.append(Ready(contender, calls))
    return ready, absent


def prepare(device: Device, contender: Contender, problem: Problem) -> Contender:
    """The contender, prepared for a problem as ``measure`` does. Raises Absent."""
    count = min(RACE_CALLS, calls_per_sample(problem, device.environment))
    contender.prepare(problem, race(device, device.operands(problem, count, 0)))
    return contender


def _turns(
    device: Device, ready: Sequence[Ready], seconds: float, most: int, rng: random.Random
) -> Iterator[Ready | Reading]:
    """Whose turn it is, and between rounds the card's state; ends when a further round would outlast ``seconds``."""
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


def _graph_turn(device: Device, ready: Sequence[Ready], count: int, l2: L2) -> Turn:
    graphs = {}
    for entry in ready:
        calls = [entry.calls[0 if l2 == "hot" else i % len(entry.calls)] for i in range(count)]
        graphs[entry.contender.name] = device.capture(calls)

    def turn(entry: Ready, samples: Samples) -> None:
        graph = graphs[entry.contender.name]
        samples.event_us.append(device.elapsed_us(graph, graph if l2 == "hot" else device.evict) / count)

    for entry in ready:  # not kept: the first launch of a graph also loads it
        turn(entry, Samples())
    return turn


def _host_turn(device: Device, protocol: ProtocolName, settings: Settings, rng: random.Random) -> Turn:
    def arrive() -> None:
        if protocol == "server":
            device.sleep(rng.expovariate(settings.target_qps))

    def turn(entry: Ready, samples: Samples) -> None:
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


def _padding_us(device: Device, entry: Ready, operands: Operands) -> float | None:
    """Device time of copies to and from padded matrices; None for a contender without copies."""
    copies = entry.contender.stages(operands)[1] if isinstance(entry.contender, Staged) else None
    if copies is None:
        return None
    graph = device.capture([copies] * 8)
    return median(device.elapsed_us(graph, device.evict) / 8 for _ in range(5))


def _timing(entry: Ready, samples: Samples, calls: int, error: float, padding_us: float | None) -> Timing:
    kernel = entry.contender if isinstance(entry.contender, Kernel) else None
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


def _conditions(readings: Sequence[Reading]) -> Conditions:
    return Conditions(
        sm_mhz=tuple(reading.sm_mhz for reading in readings),
        memory_mhz=tuple(reading.memory_mhz for reading in readings),
        power_w=tuple(round(reading.power_w, 1) for reading in readings),
        temperature_c=tuple(reading.temperature_c for reading in readings),
        throttle=tuple(sorted({reason for reading in readings for reason in reading.throttle})),
    )


def _sound(problem: Problem, environment: Environment, samples: dict[str, Samples], cold: bool, products: int) -> None:
    """Raises TooGood if a contender is faster than the card can be."""
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


def _warm_up(device: Device, call: Call, seconds: float) -> None:
    """Keeps the device busy until its clocks have settled."""
    end = device.now() + seconds
    while device.now() < end:
        for _ in range(20):
            call()
        device.synchronize()
