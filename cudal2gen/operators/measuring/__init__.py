"""Measures during calls which kernels are fastest, by races before a plan is made or between calls.

The dispatcher uses two methods: ``Measuring.choose`` chooses a kernel by the measurements, and ``Measuring.observe``
measures now or lets later calls measure. The rest of this package is internal, and nothing here calls the dispatcher.

In mode ``once`` one thread races, without the lock of plans. Other threads' calls that would have to measure run torch
meanwhile. In mode ``background`` the calls of a plan advance its race while the stream is idle. No thread is started,
so nothing outlives the process or delays its end. While torch is set to deterministic algorithms, no race begins or
continues, because the winner may differ from run to run; earlier measurements count.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from cudal2gen.kernel import Problem
from cudal2gen.kernel.fusion import PLAIN
from cudal2gen.launch.gpu import GpuError
from cudal2gen.operators.call_native import NATIVE
from cudal2gen.operators.check_modes import deterministic
from cudal2gen.operators.devices import LaunchDevice
from cudal2gen.operators.measuring import buckets
from cudal2gen.operators.measuring.contests import Contests
from cudal2gen.operators.measuring.races import Autotuner, Mode, RaceTarget, mode_of
from cudal2gen.operators.measuring.tuned import RacedTables, Store
from cudal2gen.operators.plan_packs import Packs
from cudal2gen.operators.plan_requests import Arguments, Request
from cudal2gen.operators.plans import CallPlan, Plans
from cudal2gen.pack import Pack
from cudal2gen.results.choice import Choice, Prefer, Table
from kernelproof.ground.errors import WrongInput

__all__ = ["Measuring", "Mode", "Watch", "mode_of"]

ADVICE = (  # the end of the warning that the store cannot be used
    "what was measured counts until this process ends; make room there or allow writing, or name another folder by "
    "CUDAL2GEN_RESULTS"
)


class Measuring:
    """Measures during the calls of a process, separately for each device.

    ``plans``: the plans whose calls are observed. ``packs``: the packs with their kernels. If nothing can be measured,
    one warning states the reason. In all methods ``index`` is CUDA's number of the device.
    """

    def __init__(self, mode: Mode, plans: Plans, packs: Packs) -> None:
        self.mode, self._plans, self._packs = mode, plans, packs
        self._tuners: dict[int, Autotuner | None] = {}

    def observe(self, device: LaunchDevice, pack: Pack, request: Request, arguments: Arguments) -> Watch:
        """Measures what is missing for a call, before its plan is decided: now in mode ``once``, else during later
        calls, which the watch observes. Raises ByTorch as ``Packs.table``."""
        with self._plans.lock:  # so that each device gets one tuner, and one thread reads the store
            watch = Watch(self, device, pack, request)
        watch.begin(arguments)
        return watch

    def choose(
        self, device: LaunchDevice, pack: Pack, problem: Problem, request: Request, prefer: Prefer, extra_us: float
    ) -> Choice:
        """``Table.choose`` for a pack's table and the measurements of calls, including those for other numbers of rows
        in the same bucket. ``extra_us``: time that our kernel needs besides its launch, such as copies. Raises as
        ``Table.choose`` and ``Packs.table``."""
        table, products = self.table(device, pack, request.device), request.batches.products
        if self.mode != "off" and prefer == "measured":
            of_bucket = buckets.choose(table, problem, request.operands, extra_us, products)
            if of_bucket is not None:
                return of_bucket
        return table.choose(problem, request.operands, prefer, extra_us, products)

    def table(self, device: LaunchDevice, pack: Pack, index: int) -> Table:
        """A pack's table with the measurements of calls. Raises ByTorch as ``Packs.table``."""
        return self.tables(self._packs.table(pack), index, device).complete

    def tuner(self, index: int, device: LaunchDevice) -> Autotuner | None:
        """The autotuner of a device; None if its clock or the store cannot be used."""
        if index not in self._tuners:
            try:
                meter = device.meter()
                self._tuners[index] = Autotuner(meter, Store(meter.environment))
            except (GpuError, OSError) as error:
                self._packs.warn(f"no autotuning: {error}")
                self._tuners[index] = None
        return self._tuners[index]

    def tables(self, table: Table, index: int, device: LaunchDevice) -> RacedTables:
        """A pack's tables with the measurements of calls (``RacedTables``). If the store cannot be read, they have what
        this process has read before."""
        tuner = self.tuner(index, device) if self.mode != "off" else None
        if tuner is None:
            return RacedTables(table, table)
        try:
            return tuner.store.tables(table)
        except (OSError, WrongInput) as error:
            self.stop(error, index)
            remembered = tuner.store.remembered(table)
            return RacedTables(remembered, remembered)

    def stop(self, error: Exception, index: int) -> None:
        """Warns of a failed race. If the store cannot be used, no further race begins; earlier measurements count."""
        tuner = self._tuners.get(index)
        if not isinstance(error, OSError | WrongInput) or tuner is None:
            self._packs.warn(f"no autotuning: {error}")
        elif not tuner.halted:
            tuner.halted = True
            reason = str(error)
            if isinstance(error, OSError):
                reason = f"cannot use {error.filename or tuner.store.file}: {error.strerror or error}"
            self._packs.warn(f"no autotuning: {reason}; {ADVICE}")

    def drop(self) -> None:
        """Ends the race in the background."""
        for tuner in self._tuners.values():
            if tuner is not None:
                tuner.drop()


class Variant(NamedTuple):
    """A request with its fusion or without, and its problem, which may be measured."""

    request: Request
    problem: Problem

    @property
    def products(self) -> int:
        """The number of products of the request's batch, or of its groups."""
        return self.request.batches.products


class Watch:
    """Measures what is missing for one request on a device. ``busy``: whether another thread is measuring it now.

    In all methods ``hot`` means: measure the sizes of the request themselves, because they are called often, and not
    the ends of their bucket (see ``buckets``).
    """

    def __init__(self, measuring: Measuring, device: LaunchDevice, pack: Pack, request: Request) -> None:
        self._measuring, self._device, self._pack = measuring, device, pack
        self._index, self._table = request.device, measuring._packs.table(pack)
        self._tuner = measuring.tuner(self._index, device)
        variants = [request._replace(fusion=PLAIN, finish=None)]
        if request.fusion:
            variants.insert(0, request.fused)
        problems = [(each, each.problem.model_copy(update={"gpu": pack.gpu})) for each in variants if each.problem]
        self._variants = [Variant(each, problem) for each, problem in problems if problem.kind in self._table.kinds]
        self.busy, self._due = False, self.due()

    def begin(self, arguments: Arguments) -> None:
        """In mode ``once``, measures what is missing on a call's own operands, to the end of the race. The caller must
        not hold the lock of plans, so that other calls continue."""
        measuring, device = self._measuring, self._device
        if self._due and measuring.mode == "once" and not (deterministic() or device.capturing()):
            self.busy = not self.run(arguments)
            self._due = not self.busy and self.due()  # still true if the race was inconclusive for other calls

    def follow(self, plan: CallPlan) -> None:
        """Lets a plan's calls measure what is still missing, or measure the shape itself after ``HOT_CALLS`` calls. At
        the end of the race the plan is dropped, and the next call decides anew."""
        hot = not self._due
        if not (self._due or self.due(hot=True)):
            return
        run, left = plan.run, buckets.HOT_CALLS if hot else self.pause()

        def watched(*operands: Any) -> Any:
            # Several threads may call this: a lost decrement only delays the race, which has a lock of its own.
            nonlocal left
            if left > 0:
                left -= 1
            elif plan.run is watched and self.advance(plan, Arguments(*operands), hot=hot):
                if self.due(hot=hot):
                    left = self.pause(hot=hot)
                    return run(*operands)
                plan.run = run
                self._measuring._plans.drop(plan)
            return run(*operands)

        plan.run = watched

    def due(self, *, hot: bool = False) -> bool:
        """Whether measurements are missing."""
        return next(self._targets(hot), None) is not None

    def pause(self, *, hot: bool = False) -> int:
        """The number of calls before the next race."""
        target = next((target for _, target in self._targets(hot)), None)
        return 0 if target is None or self._tuner is None else self._tuner.pause(target)

    def run(self, arguments: Arguments, *, hot: bool = False) -> bool:
        """Races to the end. Returns False without racing if another thread is racing."""
        tuner = self._alive()
        if tuner is None:
            return True
        if not tuner.racing.acquire(blocking=False):
            return False
        try:
            tuner.meter.synchronize()  # so that times and faults of the caller's earlier work are not the race's
            for _ in self._steps(tuner, arguments, hot):
                pass
        except Exception as error:  # the call continues after any failure of its race
            self._measuring.stop(error, self._index)
        finally:
            tuner.racing.release()
        return True

    def advance(self, owner: object, arguments: Arguments, *, hot: bool = False) -> bool:
        """Runs the race during a call of ``owner``, a plan: completely, or in mode ``background`` one step of it.
        Returns whether the race has ended."""
        tuner = self._alive()
        if tuner is None:
            return True
        try:
            if deterministic() or self._device.capturing():
                return False
            if self._measuring.mode == "once":
                return self.run(arguments, hot=hot)
            return tuner.meter.idle() and tuner.advance(owner, lambda: self._steps(tuner, arguments, hot))
        except Exception as error:  # the call continues after any failure of its race
            self._measuring.stop(error, self._index)
            return True

    def _alive(self) -> Autotuner | None:
        """The autotuner if it is still the device's; else None."""
        return self._tuner if self._measuring.tuner(self._index, self._device) is self._tuner else None

    def _targets(self, hot: bool) -> Iterator[tuple[Variant, RaceTarget]]:
        """The targets that are still to be measured, in their order. They are found one after the other: if a fused
        kernel wins, the plain one is not raced."""
        for variant in self._variants:
            tuner, raced = self._alive(), self._measuring.tables(self._table, self._index, self._device)
            if tuner is None:
                return
            if target := tuner.target(raced.current, variant.problem, variant.products, hot=hot):
                yield variant, target
                raced = self._measuring.tables(self._table, self._index, self._device)
            if buckets.wins(raced.complete, variant.problem, variant.products):
                return

    def _steps(self, tuner: Autotuner, arguments: Arguments, hot: bool) -> Iterator[None]:
        """Races all targets on a call's tensors, and yields after each step of a race."""
        for variant, target in self._targets(hot):
            if self._device.place is not None:  # connects the library, since the host's time is that of calls by C++
                NATIVE.serves(self._device.place, self._pack.torch_library)
            open_kernel = partial(self._measuring._packs.open, self._pack, index=self._index, device=self._device)
            outlives_call = self._measuring.mode == "background"
            contests = Contests(self._device, variant.request, arguments, open_kernel, outlives_call)
            yield from tuner.race(self._table, target, contests)
