"""Autotuning of calls: races before a plan is made, between calls, or when a shape of a bucket has become hot.

``once``: one thread races, outside of the dispatcher's lock; calls of other threads whose products are still to be
measured are torch's meanwhile. ``background``: a plan's calls advance its race where the stream is idle, without a
thread of its own, so that nothing outlives the process or delays its end. While torch is asked for deterministic
algorithms no race begins or goes on, since which kernel wins may differ from run to run; what was measured counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from cudal2gen.kernel import Problem
from cudal2gen.kernel.fusion import PLAIN
from cudal2gen.launch.gpu import GpuError
from cudal2gen.launch.launcher import OpenKernel
from cudal2gen.operators import buckets
from cudal2gen.operators.binding import Device
from cudal2gen.operators.contests import Arguments, Contest, copies
from cudal2gen.operators.products import Request
from cudal2gen.operators.races import Autotuner, Contests, Mode, Target
from cudal2gen.operators.tuned import Raced, Store
from cudal2gen.operators.watching import deterministic
from cudal2gen.results.choice import Kernel, Table
from kernelproof.ground.errors import WrongInput

KEPT = (
    "what was measured counts until this process ends; make room there or allow writing, or name another folder by "
    "CUDAL2GEN_RESULTS"
)
Opened = Callable[[Kernel], OpenKernel]  # raises LaunchError, GpuError or OSError


class Entry(NamedTuple):
    """A problem of a request that may be measured: with its fusion, or without."""

    request: Request
    problem: Problem

    @property
    def products(self) -> int:
        return self.request.batches.products


class Autotuning:
    """The races of a process in one mode, by device. ``warn`` receives, once, the reason why there are none."""

    def __init__(self, mode: Mode, warn: Callable[[str], None]) -> None:
        self.mode, self._warn = mode, warn
        self._tuners: dict[int, Autotuner | None] = {}

    def tuner(self, index: int, device: Device) -> Autotuner | None:
        """The races of a device; None where its clock or the store cannot be used."""
        if index not in self._tuners:
            try:
                meter = device.meter()
                self._tuners[index] = Autotuner(meter, Store(meter.environment))
            except (GpuError, OSError) as error:
                self._warn(f"no autotuning: {error}")
                self._tuners[index] = None
        return self._tuners[index]

    def table(self, table: Table, index: int, device: Device) -> Table:
        """A pack's table with what calls measured by themselves."""
        return self.raced(table, index, device).whole

    def raced(self, table: Table, index: int, device: Device) -> Raced:
        """The same, also without what was measured when there were other kernels; where that cannot be read, with what
        this process has read before."""
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
        """Ends races after a failed one; for good if the store cannot be used, from which on nothing new is measured
        and what is known stays in use."""
        tuner = self._tuners.get(index)
        if not isinstance(error, OSError | WrongInput) or tuner is None:
            self._warn(f"no autotuning: {error}")
        elif not tuner.halted:
            tuner.halted = True
            reason = str(error)
            if isinstance(error, OSError):
                reason = f"cannot use {error.filename or tuner.store.file}: {error.strerror or error}"
            self._warn(f"no autotuning: {reason}; {KEPT}")

    def drop(self) -> None:
        """Ends the race in the background."""
        for tuner in self._tuners.values():
            if tuner is not None:
                tuner.drop()


class Race:
    """What a request leaves to be measured on a device; ``opened``: opens kernels of the pack's ``table``."""

    def __init__(
        self, tuning: Autotuning, device: Device, table: Table, request: Request, opened: Opened
    ) -> None:  # fmt: skip
        self._tuning, self._device, self._table, self._opened = tuning, device, table, opened
        self._index = request.device
        self._tuner = tuning.tuner(self._index, device)
        variants = [request._replace(fusion=PLAIN, finish=None)]
        if request.fusion:
            variants.insert(0, request.fused)
        problems = [(each, each.problem.model_copy(update={"gpu": table.gpu})) for each in variants if each.problem]
        self._entries = [Entry(each, problem) for each, problem in problems if problem.kind in table.kinds]

    def due(self, *, hot: bool = False) -> bool:
        """Whether measurements are still missing; ``hot``: of the sizes themselves rather than of their bucket."""
        return next(self._targets(hot), None) is not None

    def pause(self, *, hot: bool = False) -> int:
        """Calls before what is due is raced."""
        target = next((target for _, target in self._targets(hot)), None)
        return 0 if target is None or self._tuner is None else self._tuner.pause(target)

    def run(self, arguments: Arguments, *, hot: bool = False) -> bool:
        """Races to the end; False where another thread is racing."""
        tuner = self._alive()
        if tuner is None:
            return True
        if not tuner.racing.acquire(blocking=False):
            return False
        try:
            tuner.meter.synchronize()  # the caller's own work before it is not of the race, neither its time nor faults
            for _ in self._steps(tuner, arguments, hot):
                pass
        except Exception as error:  # the call goes on after any failure of its race
            self._tuning.stop(error, self._index)
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
            if self._tuning.mode == "once":
                return self.run(arguments, hot=hot)
            return tuner.meter.idle() and tuner.advance(owner, lambda: self._steps(tuner, arguments, hot))
        except Exception as error:  # the call goes on after any failure of its race
            self._tuning.stop(error, self._index)
            return True

    def _alive(self) -> Autotuner | None:
        return self._tuner if self._tuning.tuner(self._index, self._device) is self._tuner else None

    def _targets(self, hot: bool) -> Iterator[tuple[Entry, Target]]:
        """What is to be measured, each when it is asked for; behind a fused kernel that wins nothing."""
        for entry in self._entries:
            tuner, raced = self._alive(), self._tuning.raced(self._table, self._index, self._device)
            if tuner is None:
                return
            if target := tuner.target(raced.current, entry.problem, entry.products, hot=hot):
                yield entry, target
                raced = self._tuning.raced(self._table, self._index, self._device)
            if buckets.wins(raced.whole, entry.problem, entry.products):
                return

    def _steps(self, tuner: Autotuner, arguments: Arguments, hot: bool) -> Iterator[None]:
        for entry, target in self._targets(hot):
            yield from tuner.race(self._table, target, self._contests(entry, arguments))

    def _contests(self, entry: Entry, arguments: Arguments) -> Callable[[], Contests]:
        def begin() -> Contests:
            own = copies(self._device, arguments) if self._tuning.mode == "background" else arguments
            return lambda problem: Contest(self._device, entry.request, problem, own, self._opened)

        return begin
