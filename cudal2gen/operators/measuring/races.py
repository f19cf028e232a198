"""Races a few kernels of a pack against torch on a call's own operands, and stores the result.

A sample is the time of an eager call: the longer of the device's time, with operands that are not in the L2, and the
host's time. There are three modes. ``off`` is the default. In mode ``once`` the first call of a problem that was never
measured races before it returns. In mode ``background`` each later call makes one step of the race if the device is
idle.

A kernel runs for the first time only after a ban of it is on disk, so that a crash leaves it banned. It takes part only
after its result was compared with an fp64 product. It wins only if it beats torch twice (``rule``): in a heat with
several kernels, and in a duel of two; for a bucket of rows, in a duel at each end of it. Nothing is compiled, nothing
is measured while a graph is captured, and no step begins that exceeds the time budget.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Literal, NamedTuple, get_args

import numpy as np

from cudal2gen import results
from cudal2gen.kernel import IllegalRecord, Problem, Use, serving
from cudal2gen.kernel.launch import LaunchOperands
from cudal2gen.launch.gpu import GpuError
from cudal2gen.launch.launcher import LaunchError
from cudal2gen.operators.measuring import buckets, rule
from cudal2gen.operators.measuring.contests import Contest, Contests
from cudal2gen.operators.measuring.samples import Entrant, Sample, Stopwatch, eager_us
from cudal2gen.operators.measuring.tuned import Store
from cudal2gen.operators.meter import Meter
from cudal2gen.results import KERNEL, MIN_US, ON_OPERANDS, Conditions, Measurement, Timing
from cudal2gen.results.choice import MARGIN, Table, TableKernel
from cudal2gen.results.ratios import paired
from kernelproof.ground.errors import WrongInput

Mode = Literal["off", "once", "background"]
VARIABLE = "CUDAL2GEN_AUTOTUNE"
SHAPE_SECONDS, PROCESS_SECONDS = 0.1, 60.0  # time budgets of each target's race and of the process
FASTEST = 5  # kernels that race because the timing model expects them to be fastest
STAND_INS = 2  # further kernels that race because their sizes are nearest
# Pairs of samples, of torch and of a kernel, by which the kernel is ranked and the field's spread is estimated. With
# fewer pairs, spikes widen the spread, and ``rule`` takes biases for true differences.
FIRST_PAIRS = 7
FINALISTS = 3  # most kernels of a heat
MIN_ROUNDS, MAX_ROUNDS = 6, 30  # rounds of two samples per contender
SAMPLE_US = 30.0  # least time of a sample; shorter ones would mostly measure the events around them
STALE_SECONDS = 5.0  # seconds without calls after which another race may replace a race in the background
MAX_MODELLED = 64  # most records, the nearest ones, that the timing model ranks
# Most inconclusive races of a target. About twice as many calls precede each further race (``Autotuner.pause``).
MAX_INCONCLUSIVE = 10


class RaceTarget(NamedTuple):
    """What a race measures: a problem of ``products`` products. If ``least`` is below the problem's number of rows, the
    problem represents the bucket from ``least`` to that number."""

    problem: Problem
    products: int
    least: int

    @property
    def is_bucket(self) -> bool:
        """Whether the problem also represents others with fewer rows."""
        return self.least < self.problem.m

    @property
    def rows(self) -> str:
        """The bucket in words for a measurement's detail; empty if the problem represents itself alone."""
        return f", for {self.least} to {self.problem.m} rows" if self.is_bucket else ""


def mode_of(value: str | None) -> Mode:
    """The mode of this name; of the environment variable ``CUDAL2GEN_AUTOTUNE`` if it is None. Raises WrongInput."""
    name = os.environ.get(VARIABLE, "off") if value is None else value
    modes: tuple[Mode, ...] = get_args(Mode)
    for mode in modes:
        if name == mode:
            return mode
    raise WrongInput(f"{VARIABLE if value is None else 'autotune'}={name}: must be one of {', '.join(modes)}")


class Autotuner:
    """Runs the races of one device and stores their results. ``seconds``: the budgets of each target and of the
    process."""

    def __init__(
        self, meter: Meter, store: Store, seconds: tuple[float, float] = (SHAPE_SECONDS, PROCESS_SECONDS)
    ) -> None:
        self.meter, self.store, self.seconds, self.spent = meter, store, seconds, 0.0
        self.tried: set[RaceTarget] = set()
        self.failed: set[str] = set()  # digests of kernels that this process could not launch
        self.inconclusive: Counter[RaceTarget] = Counter()  # races whose result holds for the racing call alone
        self.halted = False  # whether races have ended for good, because the store cannot be used
        # Two locks, which are never held together. ``racing`` is held by the thread that races to the end; other
        # threads do not wait for it but let torch compute. ``_background`` guards the fields of the race in the
        # background, which follow.
        self.racing = threading.Lock()
        self._background = threading.Lock()
        self._owner: object | None = None
        self._steps: Iterator[None] = iter(())
        self._stepped = 0.0

    def target(self, table: Table, problem: Problem, products: int, *, hot: bool = False) -> RaceTarget | None:
        """What is still to be measured for a problem: its bucket, or if it is ``hot`` the problem itself.

        None if that was measured or tried, or if the process's budget is spent. ``table``: ``RacedTables.current``.
        """
        if self.halted or self.spent >= self.seconds[1] or table.measured(problem, products) is not None:
            return None
        least, most = buckets.bucket(problem, products)
        if hot or least == most:
            target = RaceTarget(problem, products, problem.m)
        elif buckets.measured(table, problem, products):
            return None
        else:
            target = RaceTarget(buckets.with_rows(problem, most), products, least)
        return None if target in self.tried else target

    def advance(self, owner: object, begin: Callable[[], Iterator[None]]) -> bool:
        """Makes a step of the owner's race in the background. Returns whether the race has ended. Raises what ``race``
        raises.

        There is one race at a time, because each keeps copies of its operands. Others wait until it ends, or until it
        had no call for ``STALE_SECONDS``. ``begin`` makes the steps of a race that has not begun.
        """
        if not self._background.acquire(blocking=False):
            return False
        try:
            if self._owner is not owner:
                if self._owner is not None and self.meter.now() - self._stepped < STALE_SECONDS:
                    return False
                self._steps = iter(())  # frees the other race's copies before new ones are made
                self._owner, self._steps = owner, begin()
            for _ in self._steps:
                self._stepped = self.meter.now()
                return False
            self._end()
        except BaseException:
            self._end()
            raise
        finally:
            self._background.release()
        return True

    def drop(self) -> None:
        """Ends the race in the background, and frees its copies."""
        with self._background:
            self._end()

    def _end(self) -> None:
        """Forgets the race in the background, and with it frees its copies."""
        self._owner, self._steps = None, iter(())

    def race(self, table: Table, target: RaceTarget, contests: Contests) -> Iterator[None]:
        """Races a problem step by step and stores the result at the end. Between steps the caller may do other work.

        Kernels that fail in their first run stay banned. Raises OSError if the store cannot be written, and errors of
        torch or of a launch after the first run.
        """
        is_conclusive = True
        try:
            is_conclusive = yield from self._in_steps(table, target, contests)
        except GeneratorExit:  # replaced by another race: later calls begin this one anew
            is_conclusive = False
            raise
        finally:
            # This comes after the race, because other threads make plans for a target that counts as tried, and these
            # plans need the result.
            if is_conclusive or self.inconclusive[target] >= MAX_INCONCLUSIVE:
                self.tried.add(target)
            contests.close()

    def pause(self, target: RaceTarget) -> int:
        """The number of calls before the next race of a target: 0 before the first race, and then 1, 3, 7, .. after
        each inconclusive one."""
        return (1 << self.inconclusive[target]) - 1

    def _in_steps(self, table: Table, target: RaceTarget, contests: Contests) -> Generator[None, None, bool]:
        """Makes the race's steps. Each runs outside of torch's modes, and its time is counted. Returns what ``steps``
        returns."""
        race: _Race | None = None
        steps: Generator[None, None, bool]
        while True:
            start = self.meter.now()
            try:
                with _without_modes():
                    if race is None:
                        race = _Race(self, table, target, contests)
                        steps = race.steps()
                    race.began = start
                    next(steps)
            except StopIteration as end:
                self.inconclusive[target] += not end.value
                return bool(end.value)
            finally:
                elapsed = self.meter.now() - start
                self.spent += elapsed
                if race is not None:
                    race.spent += elapsed
            yield

    def candidates(self, table: Table, target: RaceTarget, contest: Contest) -> list[tuple[TableKernel, Use]]:
        """The kernels to race: the nearest, those that the timing model expects to be fastest, and the next nearest.

        Each binary races once, and banned ones do not race. For a bucket a kernel must also take its least rows.
        """
        problem, banned = target.problem, self.store.first_runs.banned() | self.failed
        computing = [kernel for kernel in table.kernels if kernel.computes(problem) and kernel.digest not in banned]
        near = sorted(computing, key=lambda kernel: kernel.distance(problem))
        fast = sorted(near[:MAX_MODELLED], key=lambda kernel: _modelled_us(kernel, problem))
        chosen: dict[str, tuple[TableKernel, Use]] = {}
        for count, order in ((1, near), (FASTEST, fast), (STAND_INS, near)):
            most = len(chosen) + count
            for kernel in order:
                if len(chosen) >= most:
                    break
                if kernel.digest not in chosen and (use := _use(kernel, target, contest)):
                    chosen[kernel.digest] = kernel, use
        return list(chosen.values())


def _use(kernel: TableKernel, target: RaceTarget, contest: Contest) -> Use | None:
    """How a kernel computes the target's problem; None if it cannot compute that or the least rows of its bucket."""
    sizes = serving.sizes_of(target.problem)
    with suppress(IllegalRecord):
        least, most = (kernel.use(sizes._replace(m=rows), contest.operands) for rows in (target.least, sizes.m))
        if least is not None and most is not None and contest.takes(kernel, least) and contest.takes(kernel, most):
            return most
    return None


@contextmanager
def _without_modes() -> Iterator[None]:
    """A context without gradients, autocast and inference mode.

    Autocast would change torch's product. A race's tensors outlive the call, and a tensor from inference mode could
    later be neither changed nor saved for a derivative.
    """
    import torch

    # Leaving inference mode turns gradients on again, so it comes before no_grad.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cuda", enabled=False),
        torch.autocast("cpu", enabled=False),
    ):
        yield


class _Race:
    """The race of one target. ``spent``: seconds of its finished steps. ``began``: the meter's time at the beginning of
    the present step."""

    def __init__(self, tuner: Autotuner, table: Table, target: RaceTarget, contests: Contests) -> None:
        self.tuner, self.meter, self.store = tuner, tuner.meter, tuner.store
        self.table, self.target, self.contests = table, target, contests
        self.spent, self.began = 0.0, 0.0
        self.watch = Stopwatch(tuner.meter, tuner.store.environment)
        # For each kernel that was timed, the median log ratio of torch's time to its own in the first samples.
        self.field: list[float] = []

    def steps(self) -> Generator[None, None, bool]:
        """The steps of the race: first runs, a heat of the finalists, and a duel of the best kernel with torch; for a
        bucket, a second duel at its least rows. Results are stored only if the race ends.

        Returns whether the race is conclusive for other calls of the target. It is not if results cannot be compared,
        or if the kernel lost because it copied operands that other calls need not copy.
        """
        contest = self.contests.on(self.target.problem)
        candidates = self.tuner.candidates(self.table, self.target, contest)
        samples = self._least_samples
        if not candidates or not self._covers(samples * self._floor_us(contest)):
            return True
        if not contest.comparable:
            return False
        yield
        contest.by_torch()
        once_us = self.watch.sample(contest.by_torch).device
        self.watch.calls = max(1, math.ceil(SAMPLE_US / max(once_us, MIN_US)))
        self.watch.ready(contest)
        entrants: list[Entrant] = []
        for kernel, use in candidates:
            if not self._covers(samples * self.watch.cost_us(once_us)):
                break
            if entrant := self._first_run(contest, kernel, use):
                entrants.append(entrant)
            yield
        heat = yield from self._heat(contest, entrants, once_us)
        if heat is None:
            return True
        best, vendor = heat
        measurements = [self._measurement(contest, best, vendor)]
        if rule.promising(_logs(eager_us(vendor), eager_us(best.samples))):
            # The two are timed again, because the samples that selected the best of several kernels favour it.
            duels = yield from self._duels(contest, best)
            if duels is None:
                return True
            measurements = duels
        if self._copies_more(contest, best.kernel) and not all(_is_win(measurement) for measurement in measurements):
            return False
        self.store.add(measurements)
        return True

    @property
    def _least_samples(self) -> int:
        """The least number of samples of a heat and the duels (one, or two for a bucket), if torch competes with one
        kernel: a round takes two samples of each of the two."""
        return 4 * MIN_ROUNDS * (2 + self.target.is_bucket)

    def _copies_more(self, contest: Contest, kernel: TableKernel) -> bool:
        """Whether the kernel copies operands here that it would take in place if they were packed. A stored loss would
        then wrongly apply to calls with packed operands."""
        problem, sizes = contest.problem, serving.sizes_of(contest.problem)
        packed = LaunchOperands.packed(problem.layout, sizes, problem.fusion)
        use, packed_use = (kernel.use(sizes, operands) for operands in (contest.operands, packed))
        return use is not None and packed_use is not None and sum(use.copied) > sum(packed_use.copied)

    def _heat(
        self, contest: Contest, entrants: list[Entrant], once_us: float
    ) -> Generator[None, None, tuple[Entrant, list[Sample]] | None]:
        """Ranks the entrants by their first samples, and times as many finalists as the budget covers.

        Returns the fastest finalist and torch's samples from the same rounds; None if there is none. ``once_us``: the
        device's time for torch's call.
        """
        vendor_us = self.watch.cost_us(once_us)
        logs = yield from self._first_logs(contest, entrants, once_us)
        for entrant, own in zip(entrants, logs, strict=False):
            entrant.first_log = median(own)
        ranked = sorted(entrants[: len(logs)], key=lambda entrant: -entrant.first_log)
        self.field = [entrant.first_log for entrant in ranked]
        finalists = ranked[:FINALISTS]
        while finalists:
            slowest = max(entrant.sample_us for entrant in finalists)
            # For one sample of each contender, in the heat and in the duels; any finalist may reach the duels.
            heat_us = vendor_us + sum(entrant.sample_us for entrant in finalists)
            duels_us = (1 + self.target.is_bucket) * (vendor_us + slowest)
            if self._covers(2 * MIN_ROUNDS * (heat_us + duels_us)):
                break
            finalists.pop()
        vendor: list[Sample] = []
        if not (yield from self._rounds(contest, finalists, vendor, MIN_ROUNDS)):
            return None
        sound = [entrant for entrant in finalists if self._is_possible(contest, entrant)]
        if not sound or min(vendor).device < self._floor_us(contest):
            return None
        return min(sound, key=lambda entrant: median(eager_us(entrant.samples))), vendor

    def _first_logs(
        self, contest: Contest, entrants: list[Entrant], once_us: float
    ) -> Generator[None, None, list[list[float]]]:
        """Times each entrant once, and then in up to ``FIRST_PAIRS`` pairs with torch, all entrants in turns.

        Returns the log ratios of torch's time to each entrant's; no entry for those that the budget did not reach.
        ``once_us``: as for ``_heat``.
        """
        logs: list[list[float]] = []
        for entrant in entrants:
            if not self._covers(0.0):
                break
            own = entrant.sample()
            entrant.sample_us = self.watch.cost_us(own.device)
            logs.append([_log(max(once_us, self.watch.torch_us), own.eager)])
            yield
        # Pairs are taken only if the budget then still covers the heat and the duels.
        vendor_us = self.watch.cost_us(once_us)
        reserved_us = self._least_samples * vendor_us
        for _ in range(1, FIRST_PAIRS):
            for entrant, of_entrant in zip(entrants, logs, strict=False):
                if self._covers(reserved_us + vendor_us + entrant.sample_us):
                    of_entrant.append(_log(self.watch.by_torch(contest).eager, entrant.sample().eager))
                    yield
        return logs

    def _duels(self, contest: Contest, best: Entrant) -> Generator[None, None, list[Measurement] | None]:
        """Measures the best kernel against torch at the problem's rows, and if it wins there, at the bucket's least
        rows. Returns the measurements; None if the rule does not accept the kernel, or a duel is impossible."""
        measurements: list[Measurement] = []
        for duel in range(1 + self.target.is_bucket):
            if duel:  # the second duel, at the bucket's least rows
                contest = self.contests.on(buckets.with_rows(self.target.problem, self.target.least))
                self.watch.ready(contest)
                use = _use(best.kernel, self.target._replace(problem=contest.problem), contest)
                lower = self._first_run(contest, best.kernel, use) if use else None
                if lower is None:
                    return None
                contest.by_torch()
                best = lower
            vendor: list[Sample] = []
            best.samples.clear()
            duels_after = 0 if duel else self.target.is_bucket
            if not (yield from self._rounds(contest, [best], vendor, MAX_ROUNDS, duels_after)):
                return None
            if not self._is_possible(contest, best) or min(vendor).device < self._floor_us(contest):
                return None
            measurements.append(self._measurement(contest, best, vendor))
            if not faster(eager_us(vendor), eager_us(best.samples)):
                return measurements
            if not rule.accepts(_logs(eager_us(vendor), eager_us(best.samples)), np.array(self.field)):
                return None
        return measurements

    def _rounds(
        self, contest: Contest, entrants: Sequence[Entrant], vendor: list[Sample], most: int, duels_after: int = 0
    ) -> Generator[None, None, bool]:
        """Takes samples of torch and of the entrants in up to ``most`` rounds. Returns whether there were enough.

        A round takes two samples of each, in forward and in reverse order so that drifts of the clock cancel. Which
        order comes first follows the Thue-Morse sequence, so that no period of a disturbance favours a contender.
        ``duels_after``: the number of later duels, for which time of the budget is reserved.
        """
        by_torch = partial(self.watch.by_torch, contest)
        contenders: list[tuple[list[Sample], Callable[[], Sample]]] = [(vendor, by_torch)]
        contenders += [(entrant.samples, entrant.sample) for entrant in entrants]
        round_us = 0.0
        for count in range(most if entrants else 0):
            reserved = duels_after * MIN_ROUNDS if count >= MIN_ROUNDS else 0
            if not self._covers(round_us * (1 + reserved)):
                break
            start = self.meter.now()
            order = contenders[::-1] if count.bit_count() % 2 else contenders
            for column, sample in (*order, *reversed(order)):
                column.append(sample())
            round_us = (self.meter.now() - start) * 1e6
            yield
        return len(vendor) >= 2 * MIN_ROUNDS

    def _covers(self, us: float) -> bool:
        """Whether the budgets of the race and of the process still have this many microseconds, after the time that the
        present step has taken."""
        race_s, process_s = self.tuner.seconds
        step_s = self.meter.now() - self.began
        return us / 1e6 <= min(race_s - self.spent, process_s - self.tuner.spent) - step_s

    def _floor_us(self, contest: Contest) -> float:
        """A lower bound of any kernel's time for a contest's product, in microseconds."""
        return max(self.store.environment.floor_us(contest.computed, cold=False, products=contest.products), MIN_US)

    def _is_possible(self, contest: Contest, entrant: Entrant) -> bool:
        """Whether no sample is faster than the card's limits allow. If one is, the kernel cheats and is banned."""
        floor_us = self._floor_us(contest)
        if min(entrant.samples).device >= floor_us:
            return True
        self.store.first_runs.ban(entrant.kernel.digest, f"faster than {floor_us:.2f} us, which no kernel can be")
        return False

    def _first_run(self, contest: Contest, kernel: TableKernel, use: Use) -> Entrant | None:
        """Runs the kernel for the first time and compares its result. None if that fails; a wrong kernel is banned."""
        import torch

        with self.store.first_runs.begin(kernel.digest) as note:
            try:
                result = contest.call(kernel, use, stale=True)()
                self.meter.synchronize()
                largest_error, wrong = contest.compare(result)
            except (LaunchError, GpuError, OSError) as error:  # of the driver, the operands or the memory, not a crash
                note("not run", f"does not run: {error}")
                self.tuner.failed.add(kernel.digest)
                return None
            except torch.OutOfMemoryError:  # not the kernel's fault
                note("not run", "")
                raise
            note("wrong" if wrong else "right", wrong)
        if wrong:
            warnings.warn(f"cudal2gen: {kernel.record.name}: {wrong}; it is not used on this card", stacklevel=2)
            return None
        host_us = self.watch.host_us(contest.planned(kernel, use))
        return Entrant(kernel, self._guarded(kernel, contest.call(kernel, use), host_us), largest_error)

    def _guarded(self, kernel: TableKernel, call: Callable[[], object], host_us: float) -> Callable[[], Sample]:
        """A function that takes a sample of the kernel's calls, and bans the kernel if the device fails meanwhile."""
        import torch

        def sample() -> Sample:
            try:
                return self.watch.sample(call, host_us)
            except (LaunchError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # a fault of the device, which torch raises at the next synchronisation
                self.store.first_runs.ban(kernel.digest, f"fails after its first run: {error}")
                raise

        return sample

    def _measurement(self, contest: Contest, best: Entrant, vendor: Sequence[Sample]) -> Measurement:
        """The measurement to store: the samples of a kernel, and those of torch from the same rounds (``vendor``)."""
        record, digest, problem = best.kernel.record, best.kernel.digest, contest.problem
        contenders = (
            (KERNEL, record.name, digest, best.samples, best.error),
            (results.rivals(problem)[0], None, None, vendor, 0.0),
        )
        timings = tuple(
            Timing(
                contender=contender,
                record=name,
                digest=binary,
                detail=f"{ON_OPERANDS}{self.target.rows}",
                calls=self.watch.calls,
                event_us=tuple(round(sample.device, 4) for sample in samples),
                wall_us=tuple(round(sample.eager, 4) for sample in samples),
                error=error,
            )
            for contender, name, binary, samples, error in contenders
        )
        return Measurement(
            environment=self.store.environment.id,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            **dict(problem),
            products=contest.products,
            protocol="device",
            l2=self.watch.l2,
            seed=0,
            digest=digest,
            options=record.launch_options,
            offer=self.store.offer(self.table, problem),
            timings=timings,
            conditions=Conditions(sm_mhz=(), memory_mhz=(), power_w=(), temperature_c=(), throttle=()),
        )


def faster(vendor: Sequence[float], kernel: Sequence[float]) -> bool:
    """Whether a kernel is faster than torch in paired samples beyond noise, by at least ``MARGIN``."""
    return paired(vendor, kernel).low >= 1 + MARGIN


def _is_win(measurement: Measurement) -> bool:
    """Whether the kernel of a race's measurement was faster than torch."""
    kernel, vendor = measurement.timings
    return faster(vendor.samples_us, kernel.samples_us)


def _log(torch_us: float, own_us: float) -> float:
    """The logarithm of the ratio of torch's time to a kernel's. Times below ``MIN_US`` count as that."""
    return math.log(max(torch_us, MIN_US) / max(own_us, MIN_US))


def _logs(vendor: Sequence[float], kernel: Sequence[float]) -> rule.Array:
    """The log ratio of each pair of samples: torch's time over the kernel's."""
    return np.array([_log(*pair) for pair in zip(vendor, kernel, strict=True)])


def _modelled_us(kernel: TableKernel, problem: Problem) -> float:
    """The modelled time of a kernel on a problem in µs."""
    from cudal2gen.timing import model  # imported late: it takes a fifth of the time of importing the operators

    return model.estimate(kernel.record.model_copy(update={"problem": problem})).us
