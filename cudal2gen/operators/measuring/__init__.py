"""Measuring during calls: races before a plan is made, between calls, or when a shape of a bucket has become hot.

This is a layer of its own beside planning. The dispatcher asks it for two things: ``Measuring.choose``, the choice of a
kernel by what was measured, and ``Measuring.observe``, which measures now or lets later calls do it. Everything else in
this package is its own business, and nothing here calls the dispatcher.

``once``: one thread races, outside of the lock of plans; other threads' calls whose products are still to be measured
run torch meanwhile. ``background``: a plan's calls advance its race while the stream is idle. There is no thread of its
own, so that nothing outlives the process or delays its end. While torch is asked for deterministic algorithms, no race
begins or goes on, since which kernel wins may differ from run to run; what was measured counts.
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
from cudal2gen.operators.measuring.tuned import Raced, Store
from cudal2gen.operators.plan_packs import Packs
from cudal2gen.operators.plan_requests import Arguments, Request
from cudal2gen.operators.plans import CallPlan, Plans
from cudal2gen.pack import Pack
from cudal2gen.results.choice import Choice, Prefer, Table
from kernelproof.ground.errors import WrongInput

__all__ = ["Measuring", "Mode", "Watch", "mode_of"]

KEPT = (
    "what was measured counts until this process ends; make room there or allow writing, or name another folder by "
    "CUDAL2GEN_RESULTS"
)


class Measuring:
    """What the calls of a process measure, by device. ``plans``: those whose calls are observed; ``packs``: their
    kernels. Why nothing is measured is warned of once."""

    def __init__(self, mode: Mode, plans: Plans, packs: Packs) -> None:
        self.mode, self._plans, self._packs = mode, plans, packs
        self._tuners: dict[int, Autotuner | None] = {}

    def observe(self, device: LaunchDevice, pack: Pack, request: Request, arguments: Arguments) -> Watch:
        """Measures what a call leaves to be measured, before its plan is decided: at once in mode ``once``, else by
        later calls, which the watch follows. Raises ByTorch as ``Packs.table``."""
        with self._plans.lock:  # which makes one tuner of each device, and reads the store once for all threads
            watch = Watch(self, device, pack, request)
        watch.begin(arguments)
        return watch

    def choose(
        self, device: LaunchDevice, pack: Pack, problem: Problem, request: Request, prefer: Prefer, extra_us: float
    ) -> Choice:
        """``Table.choose`` of a pack's table with what calls measured, also for other rows of the same bucket. Raises
        as that and as ``Packs.table``."""
        table, products = self.table(device, pack, request.device), request.batches.products
        if self.mode != "off" and prefer == "measured":
            of_bucket = buckets.choose(table, problem, request.operands, extra_us, products)
            if of_bucket is not None:
                return of_bucket
        return table.choose(problem, request.operands, prefer, extra_us, products)

    def table(self, device: LaunchDevice, pack: Pack, index: int) -> Table:
        """A pack's table with what calls measured. Raises ByTorch as ``Packs.table``."""
        return self.raced(self._packs.table(pack), index, device).whole

    def tuner(self, index: int, device: LaunchDevice) -> Autotuner | None:
        """The races of a device; None if its clock or the store cannot be used."""
        if index not in self._tuners:
            try:
                meter = device.meter()
                self._tuners[index] = Autotuner(meter, Store(meter.environment))
            except (GpuError, OSError) as error:
                self._packs.warn(f"no autotuning: {error}")
                self._tuners[index] = None
        return self._tuners[index]

    def raced(self, table: Table, index: int, device: LaunchDevice) -> Raced:
        """A pack's table with what calls measured, and without what they measured when there were other kernels. If
        the store cannot be read, what this process has read before counts."""
        tuner = self.tuner(index, device) if self.mode != "off" else None
        if tuner is None:
            return Raced(table, table)
        try:
            return tuner.store.raced(table)
        except (OSError, WrongInput) as error:
            self.stop(error, index)
            remembered = tuner.store.remembered(table)
            return Raced(remembered, remembered)

    def stop(self, error: Exception, index: int) -> None:
        """Ends races after a failed one. If the store cannot be used they end for good: nothing new is measured, and
        what is known stays in use."""
        tuner = self._tuners.get(index)
        if not isinstance(error, OSError | WrongInput) or tuner is None:
            self._packs.warn(f"no autotuning: {error}")
        elif not tuner.halted:
            tuner.halted = True
            reason = str(error)
            if isinstance(error, OSError):
                reason = f"cannot use {error.filename or tuner.store.file}: {error.strerror or error}"
            self._packs.warn(f"no autotuning: {reason}; {KEPT}")

    def drop(self) -> None:
        """Ends the race in the background."""
        for tuner in self._tuners.values():
            if tuner is not None:
                tuner.drop()


class Variant(NamedTuple):
    """A problem of a request that may be measured: with its fusion, or without."""

    request: Request
    problem: Problem

    @property
    def products(self) -> int:
        return self.request.batches.products


class Watch:
    """What one request leaves to be measured on a device. ``busy``: whether another thread measures it right now."""

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
        """In mode ``once``, races to the end what is due, on a call's own operands. The caller must not hold the lock
        of plans, so that other calls go on."""
        measuring, device = self._measuring, self._device
        if self._due and measuring.mode == "once" and not (deterministic() or device.capturing()):
            self.busy = not self.run(arguments)
            self._due = not self.busy and self.due()  # still, if the race told nothing of other calls

    def follow(self, plan: CallPlan) -> None:
        """Lets a plan's calls measure what is still missing, now or when the shape has become hot. At the end of the
        race the plan is dropped, and the next call decides anew."""
        hot = not self._due
        if not (self._due or self.due(hot=True)):
            return
        run, left = plan.run, buckets.HOT_CALLS if hot else self.pause()

        def watched(*operands: Any) -> Any:
            # Threads may call this at once: a lost decrement only delays the race, which has a lock of its own.
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
        """Whether measurements are missing; ``hot``: of the sizes themselves rather than of their bucket."""
        return next(self._targets(hot), None) is not None

    def pause(self, *, hot: bool = False) -> int:
        """Calls before what is due is raced."""
        target = next((target for _, target in self._targets(hot)), None)
        return 0 if target is None or self._tuner is None else self._tuner.pause(target)

    def run(self, arguments: Arguments, *, hot: bool = False) -> bool:
        """Races to the end; False if another thread is racing."""
        tuner = self._alive()
        if tuner is None:
            return True
        if not tuner.racing.acquire(blocking=False):
            return False
        try:
            tuner.meter.synchronize()  # work that the caller enqueued before counts neither as time nor as a fault
            for _ in self._steps(tuner, arguments, hot):
                pass
        except Exception as error:  # the call goes on after any failure of its race
            self._measuring.stop(error, self._index)
        finally:
            tuner.racing.release()
        return True

    def advance(self, owner: object, arguments: Arguments, *, hot: bool = False) -> bool:
        """One call's contribution to its race: all of it, or in the background one step. Returns whether the race has
        ended."""
        tuner = self._alive()
        if tuner is None:
            return True
        try:
            if deterministic() or self._device.capturing():
                return False
            if self._measuring.mode == "once":
                return self.run(arguments, hot=hot)
            return tuner.meter.idle() and tuner.advance(owner, lambda: self._steps(tuner, arguments, hot))
        except Exception as error:  # the call goes on after any failure of its race
            self._measuring.stop(error, self._index)
            return True

    def _alive(self) -> Autotuner | None:
        return self._tuner if self._measuring.tuner(self._index, self._device) is self._tuner else None

    def _targets(self, hot: bool) -> Iterator[tuple[Variant, RaceTarget]]:
        """What is to be measured, in order. It is found step by step: once a fused kernel wins, the plain one is not
        raced."""
        for variant in self._variants:
            tuner, raced = self._alive(), self._measuring.raced(self._table, self._index, self._device)
            if tuner is None:
                return
            if target := tuner.target(raced.current, variant.problem, variant.products, hot=hot):
                yield variant, target
                raced = self._measuring.raced(self._table, self._index, self._device)
            if buckets.wins(raced.whole, variant.problem, variant.products):
                return

    def _steps(self, tuner: Autotuner, arguments: Arguments, hot: bool) -> Iterator[None]:
        for variant, target in self._targets(hot):
            if self._device.place is not None:  # the host's time is that of calls by C++
                NATIVE.serves(self._device.place, self._pack.torch_library)
            opened = partial(self._measuring._packs.open, self._pack, index=self._index, device=self._device)
            outlive = self._measuring.mode == "background"
            contests = Contests(self._device, variant.request, arguments, opened, outlive)
            yield from tuner.race(self._table, target, contests)
