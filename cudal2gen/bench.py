"""How fast is it? Three protocols, each with every contender on the same random data, in turns.

- ``device``: kernels alone. CUDA graphs of repeated launches, between device events. L2 ``cold``: between two uses of a
  matrix at least three times the L2's size goes through the cache, other matrices or a scratch buffer read outside of
  the timing. L2 ``hot``: one set of matrices, used once more just before. Where one set exceeds three times the L2
  there is no difference, and it is measured once.
- ``offline``: synchronise, call, synchronise: the host's clock, launch and wake-up inside. ``server``: the same after
  an exponentially distributed pause. Device events around a call are taken in turns of their own, since they would cost
  host time. These are the modes of the CUDA-L2 paper.

Order: each round is a random order of the contenders and its mirror image (A B C C B A), so drift of clocks and
temperature meets all alike. Inputs are standard normal. Times are in microseconds, durations in seconds.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from cudal2gen import results
from cudal2gen.gpu import (
    Absent,
    Binder,
    Call,
    Contender,
    Device,
    GpuError,
    Kernel,
    Operands,
    Race,
    Reading,
    Winner,
)
from cudal2gen.kernel import Acc, Problem, Record, SizeClass
from cudal2gen.launcher import LaunchError
from cudal2gen.results import KERNEL, L2, Conditions, Environment, Measurement, ProtocolName, Timing

if TYPE_CHECKING:
    import torch

SAMPLE_US = 200.0  # device time of one sample, where the problem allows it
MOST_CALLS = 64
LEAST_ROUNDS, MOST_ROUNDS = 3, 15  # of two samples: with fewer than six pairs, noise of one sign is no rarity
MOST_HOST_ROUNDS = 500
LEAST_US = 0.5  # a kernel that does nothing takes a microsecond in a CUDA graph
EXCEEDED = 3  # times the L2's size
READING_SECONDS = 0.05  # between two readings of the card: NVML may take milliseconds, and the device idles meanwhile
# A race of candidates: how long its first stage takes at most (kernels that the library loads for the first time make
# it long, and problems of 10^12 FLOP); then, stage by stage, how many stay and how often each is timed.
RACE_SECONDS = 1.0
RACE_STAGES = ((16, 3), (4, 8))
RACE_CALLS = 16
CHECKED_ROWS = 256
# What matters most comes first; from there on the classes take turns.
CLASSES: tuple[SizeClass, ...] = ("large", "split-k", "medium", "small-m", "tiny", "huge")


class TooGood(RuntimeError):
    """A time that no correct kernel and honest clock can give; ``contender``: whose."""

    def __init__(self, message: str, contender: str = "") -> None:
        super().__init__(message)
        self.contender = contender


class Stopped(RuntimeError):
    """A kernel or a library took the device down: this process can use it no more."""


@dataclass(frozen=True)
class Settings:
    """How long to measure. Seconds: ``warmup`` once per run, ``benchmark`` per problem, protocol and L2 state."""

    protocols: tuple[ProtocolName, ...] = ("device",)
    warmup_seconds: float = 3.0
    benchmark_seconds: float = 0.25
    target_qps: float = 1000.0
    seed: int = 0


class Work(NamedTuple):
    """One measurement to take."""

    protocol: ProtocolName
    l2: L2


class Ready(NamedTuple):
    """A contender with its calls, one for each set of operands."""

    contender: Contender
    calls: list[Call]


@dataclass
class Outcome:
    """What a run did: measurements taken, problems that were stored already and that are left, and what went wrong."""

    measured: int = 0
    known: int = 0
    left: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass
class Samples:
    """What one contender's turns gave."""

    event_us: list[float] = field(default_factory=list)
    wall_us: list[float] = field(default_factory=list)


Turn = Callable[[Ready, Samples], None]


def stratified(problems: Iterable[Problem], seed: int = 0) -> list[Problem]:
    """The problems in such an order that any beginning of it is a sample of all size classes."""
    classes: dict[SizeClass, list[Problem]] = {name: [] for name in CLASSES}
    for problem in problems:
        classes[problem.size_class].append(problem)
    rng = random.Random(seed)
    for members in classes.values():
        rng.shuffle(members)
    return [problem for turn in zip_longest(*classes.values()) for problem in turn if problem is not None]


def states(problem: Problem, protocol: ProtocolName, l2_bytes: int) -> tuple[L2, ...]:
    """The L2 states in which a problem is measured."""
    if problem.traffic_bytes >= EXCEEDED * l2_bytes:
        return ("exceeded",)
    return ("cold", "hot") if protocol == "device" else ("hot",)


def pending(
    record: Record,
    digest: str,
    names: Iterable[str],
    settings: Settings,
    environment: Environment,
    stored: Iterable[Measurement],
) -> list[Work]:
    """What stored measurements of this problem and card, with this binary, data and contenders, leave to be done."""
    names = set(names)
    done = {
        Work(one.protocol, one.l2)
        for one in stored
        if (one.digest, one.options) == (digest, record.launch_options)
        and (KERNEL in one.absent or names <= {timing.contender for timing in one.timings} | set(one.absent))
        and one.target_qps == (settings.target_qps if one.protocol == "server" else None)
    }
    return [
        Work(protocol, l2)
        for protocol in settings.protocols
        for l2 in states(record.problem, protocol, environment.l2_bytes)
        if (protocol, l2) not in done
    ]


def _on_this_card(stored: results.Measurements, environment: Environment) -> dict[Problem, list[Measurement]]:
    """Stored measurements by problem, of the same card, driver and library versions."""
    found: dict[Problem, list[Measurement]] = {}
    for one in stored.measurements:
        if _same(stored.environments[one.environment], environment):
            found.setdefault(one.problem, []).append(one)
    return found


def _same(one: Environment, other: Environment) -> bool:
    return (one.name, one.driver, one.versions) == (other.name, other.driver, other.versions)


def calls_per_sample(problem: Problem, environment: Environment) -> int:
    """Launches in one sample of the ``device`` protocol, from the least time that they can take."""
    least_us = max(environment.floor_us(problem, cold=True), 2.0)
    return min(MOST_CALLS, max(1, int(SAMPLE_US / least_us)))


def _sets(count: int, work: Sequence[Work]) -> int:
    """How many sets of operands: one for each call from a cold L2, those of a race, or one that exceeds the L2."""
    states = {one.l2 for one in work}
    return 1 if "exceeded" in states else count if "cold" in states else min(count, RACE_CALLS)


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
    environment = device.environment
    count = calls_per_sample(problem, environment)
    operands = device.operands(problem, _sets(count, work), settings.seed)
    if not warm:
        _warm_up(device, device.evict, settings.warmup_seconds)
    ready, absent = _ready(device, problem, contenders, operands)
    reference = Reference(problem, operands[0])
    for protocol, l2 in work:
        rng = random.Random(f"{settings.seed} {problem.mnk} {protocol} {l2}")
        calls = count if protocol == "device" else 1
        turn = (
            _graph_turn(device, ready, count, l2)
            if protocol == "device"
            else _host_turn(device, protocol, settings, rng)
        )
        samples = {one.contender.name: Samples() for one in ready}
        most = MOST_ROUNDS if protocol == "device" else MOST_HOST_ROUNDS
        readings = []
        for one in _turns(device, ready, settings.benchmark_seconds, most, rng):
            if isinstance(one, Reading):
                readings.append(one)
            else:
                turn(one, samples[one.contender.name])
        _sound(problem, environment, samples, cold=protocol == "device" and l2 != "hot")
        timings: list[Timing] = []
        refused = dict(absent)
        for one in ready:
            error, finding = reference.error(device, one.calls[0])
            if finding:
                refused[one.contender.name] = finding
            else:
                timings.append(
                    _timing(one, samples[one.contender.name], calls, error, _padding_us(device, one, operands[0]))
                )
        digest, options = next(
            ((one.digest, one.record.launch_options) for one in contenders if isinstance(one, Kernel)), ("", {})
        )
        yield _measurement(
            environment, problem, Work(protocol, l2), digest, options, settings, timings, refused, readings
        )


def run(
    device: Device,
    records: Sequence[Record],
    open_kernel: Callable[[Record], Kernel],
    digest: Callable[[Record], str],
    baselines: Sequence[Contender],
    settings: Settings,
    store: Path,
    budget_seconds: float | None = None,
    again: bool = False,
    progress: Callable[[int, int, float], None] = lambda *_: None,
) -> Outcome:
    """Measures records in stratified order and stores each measurement as it is taken.

    What ``store`` holds is not measured again, unless ``again``; no problem is begun that the budget does not leave
    time for. ``progress`` is called with problems done, problems in all, and seconds left to the end of all or of the
    budget. Raises TooGood, and Stopped where a kernel took the device down; that kernel is not tried again.
    """
    begin = device.now()
    environment = device.environment
    stored = results.measurements(store)
    known = {} if again else _on_this_card(stored, environment)
    names = [one.name for one in baselines]
    by_problem = {record.problem: record for record in records}
    outcome, todo = Outcome(), []
    for problem in stratified(by_problem, settings.seed):
        record = by_problem[problem]
        work = pending(record, digest(record), names, settings, environment, known.get(problem, ()))
        outcome.known += not work
        todo += [(problem, record, work)] if work else []
    if todo and environment.id not in stored.environments:
        results.append([environment], store)
    spent: dict[SizeClass, list[float]] = {}
    to_come = Counter(problem.size_class for problem, _, _ in todo)
    for number, (problem, record, work) in enumerate(todo):
        start = device.now()
        if budget_seconds is not None and start - begin + _expected(spent, problem.size_class) > budget_seconds:
            outcome.left = len(todo) - number
            break
        to_come.subtract([problem.size_class])
        try:
            with open_kernel(record) as kernel:
                for one in measure(device, problem, [kernel, *baselines], work, settings, warm=number > 0):
                    results.append([one], store)
                    outcome.measured += 1
                    if reason := one.absent.get(KERNEL):
                        outcome.faults.append(f"{problem.mnk}: {reason}")
        except (GpuError, LaunchError) as error:
            outcome.faults.append(f"{problem.mnk}: {error}")
        except TooGood:
            raise
        except RuntimeError as error:
            if not _stopped(device):  # such as memory that was too small
                outcome.faults.append(f"{problem.mnk}: {_first_line(error)}")
                continue
            reason = f"stopped the device: {_first_line(error)}"
            given_up = [
                _measurement(
                    environment, problem, one, digest(record), record.launch_options, settings, [], {KERNEL: reason}, []
                )
                for one in work
            ]
            results.append(given_up, store)
            raise Stopped(f"{problem.mnk}: {record.name} or a baseline {reason}") from error
        spent.setdefault(problem.size_class, []).append(device.now() - start)
        left = sum(count * _expected(spent, size_class) for size_class, count in to_come.items())
        if budget_seconds is not None:
            left = min(left, budget_seconds - (device.now() - begin))
        progress(number + 1, len(todo), left)
    return outcome


def _stopped(device: Device) -> bool:
    """Whether the device refuses all work: an error of a kernel outlasts it."""
    try:
        device.synchronize()
    except RuntimeError:
        return True
    return False


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _measurement(
    environment: Environment,
    problem: Problem,
    work: Work,
    digest: str,
    options: dict[str, int],
    settings: Settings,
    timings: Sequence[Timing],
    absent: dict[str, str],
    readings: Sequence[Reading],
) -> Measurement:
    return Measurement(
        environment=environment.id,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        **problem.model_dump(),
        protocol=work.protocol,
        l2=work.l2,
        target_qps=settings.target_qps if work.protocol == "server" else None,
        seed=settings.seed,
        digest=digest,
        options=options,
        timings=tuple(timings),
        absent=absent,
        conditions=_conditions(readings),
    )


def _expected(spent: dict[SizeClass, list[float]], size_class: SizeClass) -> float:
    """Seconds that a problem will take, from those of its class, or of any, that were measured."""
    known = spent.get(size_class) or [one for times in spent.values() for one in times]
    return sum(known) / len(known) if known else 1.0


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
            contender.prepare(problem, _race(device, operands))
            calls = [contender.bind(one) for one in operands]
            calls[0]()
            device.synchronize()
        except Exception as error:
            device.synchronize()
            told = isinstance(error, Absent | LaunchError)
            absent[contender.name] = str(error) if told else f"{type(error).__name__}: {_first_line(error)}"
            continue
        ready.append(Ready(contender, calls))
    return ready, absent


def made_ready(device: Device, contender: Contender, problem: Problem) -> Contender:
    """The contender, prepared for a problem as ``measure`` does. Raises Absent."""
    count = min(RACE_CALLS, calls_per_sample(problem, device.environment))
    contender.prepare(problem, _race(device, device.operands(problem, count, 0)))
    return contender


def _race(device: Device, operands: Sequence[Operands]) -> Race:
    """The race in which a baseline's candidates are timed: the ``device`` protocol, from a cold L2."""
    sets = operands[:RACE_CALLS]

    def race(binders: Sequence[Binder]) -> Winner:
        graphs: dict[int, Call] = {}
        times: dict[int, list[float]] = {}

        def sample(index: int) -> None:
            times[index].append(device.elapsed_us(graphs[index], device.evict) / len(sets))

        deadline = device.now() + RACE_SECONDS
        for index, binder in enumerate(binders):
            if times and device.now() > deadline:
                break
            try:
                calls = [binder(one) for one in sets]
                calls[0]()
                graphs[index] = device.capture(calls)
            except Absent:
                continue
            if len(sets) > 1:  # a graph's first launch also loads it, which short calls do not hide
                graphs[index]()
            times[index] = []
            sample(index)
        if not times:
            raise Absent(f"none of {len(binders)} candidates runs")
        timed = len(times)
        for stay, samples in RACE_STAGES:
            field = sorted(times, key=lambda index: median(times[index]))[:stay]
            times, graphs = {index: times[index] for index in field}, {index: graphs[index] for index in field}
            for _ in range(samples):
                for index in field:
                    sample(index)
        best = min(times, key=lambda index: median(times[index]))
        return Winner(best, median(times[best]), timed)

    return race


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
        if rounds >= LEAST_ROUNDS and (device.now() - start) * (rounds + 1) / rounds > seconds:
            return


def _graph_turn(device: Device, ready: Sequence[Ready], count: int, l2: L2) -> Turn:
    graphs = {}
    for one in ready:
        calls = [one.calls[0 if l2 == "hot" else i % len(one.calls)] for i in range(count)]
        graphs[one.contender.name] = device.capture(calls)

    def turn(one: Ready, samples: Samples) -> None:
        graph = graphs[one.contender.name]
        samples.event_us.append(device.elapsed_us(graph, graph if l2 == "hot" else device.evict) / count)

    for one in ready:
        turn(one, Samples())
    return turn


def _host_turn(device: Device, protocol: ProtocolName, settings: Settings, rng: random.Random) -> Turn:
    def arrive() -> None:
        if protocol == "server":
            device.sleep(rng.expovariate(settings.target_qps))

    def turn(one: Ready, samples: Samples) -> None:
        call = one.calls[0]
        arrive()
        device.synchronize()
        start = device.now()
        call()
        device.synchronize()
        samples.wall_us.append((device.now() - start) * 1e6)
        arrive()
        samples.event_us.append(device.elapsed_us(call, device.synchronize))

    return turn


def _padding_us(device: Device, one: Ready, operands: Operands) -> float | None:
    """Device time of copying to and from padded matrices; None for a contender that does not."""
    copies = one.contender.stages(operands)[1] if isinstance(one.contender, Kernel) else None
    if copies is None:
        return None
    graph = device.capture([copies] * 8)
    return median(device.elapsed_us(graph, device.evict) / 8 for _ in range(5))


def _timing(one: Ready, samples: Samples, calls: int, error: float, padding_us: float | None) -> Timing:
    ours = one.contender if isinstance(one.contender, Kernel) else None
    return Timing(
        contender=one.contender.name,
        record=ours.record.name if ours else None,
        digest=ours.digest if ours else None,
        detail=one.contender.detail,
        calls=calls,
        event_us=tuple(round(sample, 4) for sample in samples.event_us),
        wall_us=tuple(round(sample, 3) for sample in samples.wall_us),
        padding_us=padding_us,
        error=error,
    )


def _conditions(readings: Sequence[Reading]) -> Conditions:
    return Conditions(
        sm_mhz=tuple(one.sm_mhz for one in readings),
        memory_mhz=tuple(one.memory_mhz for one in readings),
        power_w=tuple(round(one.power_w, 1) for one in readings),
        temperature_c=tuple(one.temperature_c for one in readings),
        throttle=tuple(sorted({reason for one in readings for reason in one.throttle})),
    )


def _sound(problem: Problem, environment: Environment, samples: dict[str, Samples], cold: bool) -> None:
    """Raises TooGood for a contender that is faster than the card can be."""
    floor = max(environment.floor_us(problem, cold), LEAST_US)
    for name, taken in samples.items():
        fastest = min([*taken.event_us, *taken.wall_us])
        if fastest < floor:
            raise TooGood(
                f"{name} on {problem.mnk} {problem.acc}: {fastest:.3f} us, but {environment.name} cannot do it in less "
                f"than {floor:.3f} us (tensor cores at {environment.max_sm_mhz} MHz"
                f"{', A and B from device memory' if cold else ''}). Something is not computed, or the clock is wrong: "
                f"nothing of this problem was stored",
                name,
            )


class Reference:
    """The fp32 product of one set of operands; of a large problem a row and a column in each of 256 bands."""

    def __init__(self, problem: Problem, operands: Operands) -> None:
        self._problem, self._operands = problem, operands
        self._rows, self._cols = _bands(problem.m), _bands(problem.n)
        a, b = operands.a, operands.b_nn
        self._of_rows = a[self._rows].float() @ b.float()
        self._of_cols = a.float() @ b[:, self._cols].float()

    def error(self, device: Device, call: Call) -> tuple[float, str]:
        """The largest |D - reference| of a fresh call, and what is wrong with it, if anything."""
        d = self._operands.d
        d.fill_(float("nan"))
        call()
        device.synchronize()
        error = max(_distance(d[self._rows], self._of_rows), _distance(d[:, self._cols], self._of_cols))
        allowed = tolerance(self._problem.acc, self._problem.k)
        if error <= allowed:
            return error, ""
        return error, f"wrong result after the timing: an error of {error:.4g}, {allowed:.4g} is allowed"


def _bands(extent: int) -> list[int]:
    """One index in each of up to 256 bands, not always at the same place within it."""
    bands = min(extent, CHECKED_ROWS)
    edges = [extent * band // bands for band in range(bands + 1)]
    return [start + (7 * band) % (end - start) for band, (start, end) in enumerate(pairwise(edges))]


def _distance(d: torch.Tensor, reference: torch.Tensor) -> float:
    worst = float((d.float() - reference).abs().max())
    return float("inf") if math.isnan(worst) else worst


def tolerance(acc: Acc, k: int) -> float:
    """What rounding explains for standard normal inputs, generously: elements of D have the deviation sqrt(k).

    D's own rounding is 2^-11 of up to six deviations. An fp16 accumulator is rounded every 8 of k at the least, so its
    error walks to 2^-11 * sqrt(k/8) of that. A wrong tile is off by several deviations.
    """
    deviations = 0.01 + (6 * 2.0**-11 * math.sqrt(k / 8) if acc == "f16" else 0.0)
    return deviations * math.sqrt(k)


def _warm_up(device: Device, call: Call, seconds: float) -> None:
    """Keeps the device busy until its clocks have settled."""
    end = device.now() + seconds
    while device.now() < end:
        for _ in range(20):
            call()
        device.synchronize()
