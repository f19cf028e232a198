"""A call measures what is fastest for it: a few kernels of the pack against torch, on its own operands.

Modes: ``off``, the default; ``once``: the first call of a problem that was never measured races before it returns;
``background``: later calls race a little each while the device has nothing to do. A kernel runs only after a ban of it
is on disk, counts only after its result was compared with an fp64 product, and is chosen only where it beats torch
twice: among others, and in a race of two. Nothing is compiled, and nothing is measured in a graph capture.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from cudal2gen import model
from cudal2gen.bench.check import bands
from cudal2gen.choice import MARGIN, Kernel, Table
from cudal2gen.correctness import Bounds, in_order
from cudal2gen.errors import WrongInput
from cudal2gen.gpu import GpuError
from cudal2gen.kernel import IllegalRecord, Problem, Use, serving
from cudal2gen.kernel.launch import Operands, Sizes
from cudal2gen.launcher import LaunchError, OpenKernel
from cudal2gen.operators.binding import Device, bind, d_memory
from cudal2gen.operators.meter import Meter
from cudal2gen.operators.products import Request
from cudal2gen.operators.tuned import Store
from cudal2gen.ratios import paired
from cudal2gen.results import KERNEL, LEAST_US, Conditions, Measurement, Timing

if TYPE_CHECKING:
    import torch

Mode = Literal["off", "once", "background"]
VARIABLE = "CUDAL2GEN_AUTOTUNE"
SHAPE_SECONDS, PROCESS_SECONDS = 0.1, 60.0
MODELLED = 5  # kernels that the timing model expects to be fastest, beside the nearest one
STAND_INS = 2  # the next nearest ones, of other sizes
FINALISTS = 3
LEAST_ROUNDS, MOST_ROUNDS = 6, 30  # of two samples a contender
SAMPLE_US = 30.0  # a shorter sample is mostly the events around it
STALE_SECONDS = 5.0  # after which a race in the background whose calls do not come gives way to another
MOST_MODELLED = 64  # records that the timing model is asked about, the nearest ones
VENDOR = "torch.matmul"


class Contest(NamedTuple):
    """A product as a call wants it: A (m,k) and B (n,k), views of its operands; memory for D (m,n); torch's product;
    and what binds a kernel to the operands, which raises LaunchError, GpuError or OSError."""

    a: torch.Tensor
    b: torch.Tensor
    empty_d: Callable[[], torch.Tensor]
    by_torch: Callable[[], object]
    bind: Callable[[Kernel, Use], Callable[[torch.Tensor | None], torch.Tensor]]


class Tensors(NamedTuple):
    """What a call multiplies: x of linear or a, and a weight (n,k) or, where ``transposed``, b (k,n)."""

    a: torch.Tensor
    b: torch.Tensor
    transposed: bool


def contest_of(
    device: Device, request: Request, tensors: Tensors, copied: bool, opened: Callable[[Kernel], OpenKernel]
) -> Contest:
    """The contest for a plain product. ``copied``: on copies of the tensors, which lie like them, for a race that goes
    on when the call has returned."""
    import torch

    problem, operands, (a, b, _) = request.problem, request.operands, tensors
    assert problem is not None
    if copied:
        a, b = (_copy(device, matrix) for matrix in (a, b))
    # By the request's matrices: operands may be vectors, or have batch dimensions that are rows, or that B repeats.
    rows = a.as_strided((problem.m, problem.k), (operands.a.ld, 1))
    if problem.layout == "tn":
        cols = b.as_strided((problem.n, problem.k), (operands.b.ld, 1))
    else:
        cols = b.as_strided((problem.k, problem.n), (operands.b.ld, 1)).t()
    whole = problem.d != "same"

    def bound(kernel: Kernel, use: Use) -> Callable[[torch.Tensor | None], torch.Tensor]:
        run = bind(device, opened(kernel), use, request, problem.layout)
        return lambda out: run(a, b, out)

    return Contest(
        rows,
        cols,
        lambda: d_memory(device, request)(a, *request.shape),
        lambda: request.by_torch(a, b, None) if whole else torch.mm(rows, cols.t()),
        bound,
    )


def _copy(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the device's memory with the same strides and values."""
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = device.empty(tensor, span)
    memory.copy_(tensor.detach().as_strided((span,), (1,)))
    return memory.as_strided(tensor.shape, tensor.stride())


@dataclass
class Entrant:
    """A kernel in a race."""

    kernel: Kernel
    call: Callable[[], object]
    error: float
    samples_us: list[float]


def mode_of(value: str | None) -> Mode:
    """A mode by its name; by ``CUDAL2GEN_AUTOTUNE`` for None. Raises WrongInput."""
    name = os.environ.get(VARIABLE, "off") if value is None else value
    modes: tuple[Mode, ...] = get_args(Mode)
    for mode in modes:
        if name == mode:
            return mode
    raise WrongInput(f"{VARIABLE if value is None else 'autotune'}={name}: must be one of {', '.join(modes)}")


class Autotuner:
    """Races of one device, and what they found. ``seconds``: for each problem, and for the process."""

    def __init__(
        self, meter: Meter, store: Store, seconds: tuple[float, float] = (SHAPE_SECONDS, PROCESS_SECONDS)
    ) -> None:
        self.meter, self.store, self.seconds, self.spent = meter, store, seconds, 0.0
        self.tried: set[Problem] = set()
        self._turn = threading.Lock()  # of the race in the background
        self._owner: object | None = None
        self._steps: Iterator[None] = iter(())
        self._stepped = 0.0
        self._merged: tuple[object, Table, Table] | None = None

    def table(self, table: Table) -> Table:
        """The pack's table with the rows that this card's own races add or replace. Raises OSError or WrongInput where
        the store cannot be read."""
        measurements, merged = self.store.measurements(), self._merged
        if merged is not None and merged[0] is measurements and merged[1] is table:
            return merged[2]
        self._merged = measurements, table, (whole := self._with_raced(table))
        return whole

    def _with_raced(self, table: Table) -> Table:
        raced = self.store.rows(table)
        replaced = {(row.kind, row.sizes, row.products) for row in raced}
        kept = [row for row in table.rows if (row.kind, row.sizes, row.products) not in replaced]
        return Table(table.gpu, table.kernels, [*kept, *raced], table.bandwidth, table.notes)

    def races(self, table: Table, problem: Problem) -> bool:
        """Whether a problem is still to be raced: a plain product that was neither measured nor tried, while the
        process has time left."""
        if problem.later or self.spent >= self.seconds[1] or problem in self.tried:
            return False
        return table.measured(problem) is None

    def advance(self, owner: object, begin: Callable[[], Iterator[None]]) -> bool:
        """A step of the owner's race in the background; whether it is at its end. Raises what ``race`` raises.

        One race at a time, since each has copies of its operands: others wait, and one whose calls have stopped coming
        is given up.
        """
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if self._owner is not owner:
                if self._owner is not None and self.meter.now() - self._stepped < STALE_SECONDS:
                    return False
                self._steps = iter(())  # the other's copies go before there are new ones
                self._owner, self._steps = owner, begin()
            for _ in self._steps:
                self._stepped = self.meter.now()
                return False
            self._end()
        except BaseException:
            self._end()
            raise
        finally:
            self._turn.release()
        return True

    def drop(self) -> None:
        """Ends the race in the background, and with it its copies."""
        with self._turn:
            self._end()

    def _end(self) -> None:
        self._owner, self._steps = None, iter(())

    def race(
        self, table: Table, problem: Problem, operands: Operands, contest: Callable[[], Contest]
    ) -> Iterator[None]:
        """Races a problem step by step, and stores the result at the end; between steps the caller may do other work.

        Kernels that fail in their first run stay banned. Raises OSError where the store cannot be written, and what
        torch or a launch raises later.
        """
        self.tried.add(problem)
        steps: Iterator[None] = iter(())
        race: _Race | None = None
        while True:
            start = self.meter.now()
            try:
                with _plainly():
                    if race is None:
                        race = _Race(self, table, problem, operands, contest())
                        steps = race.steps()
                    next(steps)
            except StopIteration:
                return
            finally:
                elapsed = self.meter.now() - start
                self.spent += elapsed
                if race is not None:
                    race.spent += elapsed
            yield

    def candidates(self, table: Table, problem: Problem, operands: Operands) -> list[tuple[int, Use]]:
        """Kernels to race: the nearest, those that the timing model expects to be fastest, the next nearest ones; each
        binary once, none that is banned."""
        sizes = Sizes(problem.m, problem.n, problem.k)
        banned, binaries = self.store.banned(), set[str]()
        able: list[tuple[float, int, Use]] = []
        for number, kernel in enumerate(table.kernels):
            if not kernel.computes(problem) or kernel.digest in banned:
                continue
            with suppress(IllegalRecord):
                if use := kernel.use(sizes, operands):
                    able.append((kernel.distance(problem), number, use))
        near = [(number, use) for _, number, use in sorted(able)]
        fast = sorted(near[:MOST_MODELLED], key=lambda pair: _modelled_us(table.kernels[pair[0]], problem))
        chosen: list[tuple[int, Use]] = []
        for number, use in (*near[:1], *fast[:MODELLED], *near[1 : 1 + STAND_INS]):
            if table.kernels[number].digest not in binaries:
                binaries.add(table.kernels[number].digest)
                chosen.append((number, use))
        return chosen


@contextmanager
def _plainly() -> Iterator[None]:
    """Whatever the caller has switched on: no gradients, and no autocast that changes torch's product."""
    import torch

    with torch.no_grad(), torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield


class _Race:
    """A race of one problem. ``spent``: seconds of its steps."""

    def __init__(self, tuner: Autotuner, table: Table, problem: Problem, operands: Operands, contest: Contest) -> None:
        self.tuner, self.meter, self.store = tuner, tuner.meter, tuner.store
        self.table, self.problem, self.operands, self.contest = table, problem, operands, contest
        self.spent, self.calls = 0.0, 1  # of a sample
        self.vendor_us: list[float] = []
        self.floor_us = max(self.store.environment.floor_us(problem, cold=False), LEAST_US)

    def steps(self) -> Iterator[None]:
        """First runs, a heat of the finalists, and a duel of the best with torch."""
        bounds = _Reference(self.problem, self.contest)
        if not bounds.finite:  # no result can be judged
            return
        entrants: list[Entrant] = []
        for number, use in self.tuner.candidates(self.table, self.problem, self.operands):
            if entrant := self._first_run(self.table.kernels[number], use, bounds):
                entrants.append(entrant)
            yield
            if self._late:
                break
        self.contest.by_torch()
        once_us = self.meter.elapsed_us(self.contest.by_torch, 1)
        self.calls = max(1, math.ceil(SAMPLE_US / max(once_us, LEAST_US)))
        for entrant in entrants:
            entrant.samples_us.append(self._sample(entrant.call))
            yield
        finalists = sorted(entrants, key=lambda entrant: entrant.samples_us[0])[:FINALISTS]
        for entrant in finalists:
            entrant.samples_us.clear()
        for _ in range(LEAST_ROUNDS):
            self._round(finalists)
            yield
        sound = [entrant for entrant in finalists if self._possible(entrant)]
        if not sound or min(self.vendor_us) < self.floor_us:
            return
        best = min(sound, key=lambda entrant: median(entrant.samples_us))
        if faster(self.vendor_us, best.samples_us):
            # Again, by themselves: the best of several is flattered by the samples that chose it.
            self.vendor_us, best.samples_us = [], []
            for rounds in range(1, MOST_ROUNDS + 1):
                self._round([best])
                yield
                if rounds >= LEAST_ROUNDS and self._late:
                    break
            if not self._possible(best) or min(self.vendor_us) < self.floor_us:
                return
            if faster(self.vendor_us, best.samples_us) and not steadily_faster(self.vendor_us, best.samples_us):
                return
        self.store.add(self._measurement(best))

    @property
    def _late(self) -> bool:
        of_race, of_process = self.tuner.seconds
        return self.spent > of_race or self.tuner.spent > of_process

    def _round(self, entrants: Sequence[Entrant]) -> None:
        """Two samples of torch and each entrant, forwards and backwards."""
        field = [(self.vendor_us, self.contest.by_torch), *((entry.samples_us, entry.call) for entry in entrants)]
        for samples, call in (*field, *reversed(field)):
            samples.append(self._sample(call))

    def _sample(self, call: Callable[[], object]) -> float:
        return self.meter.elapsed_us(call, self.calls) / self.calls

    def _possible(self, entrant: Entrant) -> bool:
        """Whether no sample is faster than the card can be; else the kernel is banned."""
        if min(entrant.samples_us) >= self.floor_us:
            return True
        self.store.end(entrant.kernel.digest, f"faster than {self.floor_us:.2f} us, which no kernel can be")
        return False

    def _first_run(self, kernel: Kernel, use: Use, bounds: _Reference) -> Entrant | None:
        """The kernel, run once and compared; None where it fails, which bans it."""
        import torch

        self.store.begin(kernel.digest)
        try:
            run = self.contest.bind(kernel, use)
            result = run(self.contest.empty_d().fill_(math.nan))  # so that no stale result passes
            self.meter.synchronize()
        except (LaunchError, GpuError, OSError) as error:  # of the driver or of the operands, and no crash
            self.store.end(kernel.digest, f"does not run: {error}")
            return None
        except torch.OutOfMemoryError:  # no fault of the kernel's
            self.store.lift(kernel.digest)
            raise
        largest_error, wrong = bounds.compare(result)
        self.store.end(kernel.digest, wrong)
        if wrong:
            warnings.warn(f"cudal2gen: {kernel.record.name} is {wrong}; it is not used on this card", stacklevel=2)
            return None
        return Entrant(kernel, lambda: run(None), largest_error, [])

    def _measurement(self, best: Entrant) -> Measurement:
        record, digest = best.kernel.record, best.kernel.digest
        winner = (KERNEL, record.name, digest, best.samples_us, best.error)
        timings = tuple(
            Timing(
                contender=contender,
                record=name,
                digest=binary,
                detail="on a call's own operands",
                calls=self.calls,
                event_us=tuple(round(sample, 4) for sample in samples),
                error=error,
            )
            for contender, name, binary, samples, error in (winner, (VENDOR, None, None, self.vendor_us, 0.0))
        )
        return Measurement(
            environment=self.store.environment.id,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            **self.problem.model_dump(),
            protocol="device",
            l2="hot",
            seed=0,
            digest=digest,
            options=record.launch_options,
            timings=timings,
            conditions=Conditions(sm_mhz=(), memory_mhz=(), power_w=(), temperature_c=(), throttle=()),
        )


def faster(vendor: Sequence[float], kernel: Sequence[float]) -> bool:
    """Whether a kernel is faster than torch by paired samples, beyond noise and by a margin."""
    return paired(vendor, kernel).low >= 1 + MARGIN


def steadily_faster(vendor: Sequence[float], kernel: Sequence[float]) -> bool:
    """Whether the kernel won all pairs but one of twelve: intervals of few samples are at times narrow by chance."""
    lost = sum(kernel_us >= vendor_us for vendor_us, kernel_us in zip(vendor, kernel, strict=True))
    return lost <= len(kernel) // 12


class _Reference:
    """Some rows and columns of the product, in fp64, with the error bounds of sums in order."""

    def __init__(self, problem: Problem, contest: Contest) -> None:
        self._rows, self._cols = (bands(extent) for extent in (problem.m, problem.n))
        a, b, order = contest.a, contest.b, in_order(problem.k)
        self._of_rows = Bounds(problem.acc, a[self._rows], b, order, problem.output)
        self._of_cols = Bounds(problem.acc, a, b[self._cols], order, problem.output)

    @property
    def finite(self) -> bool:
        """Whether all elements that are compared are numbers."""
        return all(bool(bounds.reference.isfinite().all()) for bounds in (self._of_rows, self._of_cols))

    def compare(self, d: torch.Tensor) -> tuple[float, str]:
        """The largest error of D (m,n), and what is wrong with it; empty where nothing is."""
        largest = 0.0
        d = d.reshape(-1, d.shape[-1])
        for bounds, part in ((self._of_rows, d[self._rows]), (self._of_cols, d[:, self._cols])):
            comparison = bounds.compare(part)
            largest = max(largest, comparison.largest_error)
            if comparison.wrong:
                return largest, f"wrong by {comparison.max_error:.4g}, {comparison.allowed:.4g} is allowed"
        return largest, ""


def _modelled_us(kernel: Kernel, problem: Problem) -> float:
    """What the timing model expects of a kernel on a problem; infinite where its record has no such form."""
    resized = serving.resized(kernel.record, problem, same_binary=True)
    return model.estimate(resized[0]).us if resized else math.inf
