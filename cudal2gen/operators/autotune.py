"""A call measures what is fastest for it: a few kernels of the pack against torch, on its own operands.

Modes: ``off``, the default; ``once``: the first call of a problem that was never measured races before it returns;
``background``: later calls race a little each while the device has nothing to do. A kernel runs only after a ban of it
is on disk, counts only after its result was compared with an fp64 product, and is chosen only where the interval of the
paired ratios lies above torch by `choice.MARGIN`. Nothing is compiled, and nothing is measured in a graph capture.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args

from cudal2gen import model
from cudal2gen.bench.check import bands
from cudal2gen.choice import Kernel, Table
from cudal2gen.correctness import Bounds, in_order
from cudal2gen.errors import WrongInput
from cudal2gen.gpu import GpuError
from cudal2gen.kernel import IllegalRecord, Problem, Use, serving
from cudal2gen.kernel.launch import Operands, Sizes
from cudal2gen.launcher import LaunchError
from cudal2gen.operators.tuned import Store
from cudal2gen.results import KERNEL, LEAST_US, Conditions, Environment, Measurement, Timing

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
BAND_STEP = 4  # of the rows and columns that a benchmark compares, every fourth
MOST_MODELLED = 64  # records that the timing model is asked about, the nearest ones
VENDOR = "torch.matmul"


class Meter(Protocol):
    """A device's clock."""

    @property
    def environment(self) -> Environment:
        """The card and what else times depend on. Raises GpuError where it cannot be read."""
        ...

    def elapsed_us(self, call: Callable[[], object], times: int) -> float:
        """Device time of so many calls in a row, in microseconds."""
        ...

    def synchronize(self) -> None: ...
    def idle(self) -> bool:
        """Whether the current stream has nothing to do."""
        ...

    def now(self) -> float:
        """The host's clock in seconds."""
        ...


class CudaMeter:
    """The clock of a CUDA device of torch, on the current stream."""

    def __init__(self, index: int) -> None:
        import torch

        from cudal2gen.gpu import Card

        self._torch, self._card = torch, Card(index)
        self._stream = torch.cuda.current_stream

    @property
    def environment(self) -> Environment:
        return self._card.environment

    def elapsed_us(self, call: Callable[[], object], times: int) -> float:
        start, stop = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1000

    def synchronize(self) -> None:
        self._stream().synchronize()

    def idle(self) -> bool:
        return bool(self._stream().query())

    def now(self) -> float:
        return time.perf_counter()


class Contest(NamedTuple):
    """A product as a call wants it: A (m,k) and B (n,k), views of its operands; memory for D (m,n); torch's product;
    and what binds a kernel to the operands, which raises LaunchError, GpuError or OSError."""

    a: torch.Tensor
    b: torch.Tensor
    empty_d: Callable[[], torch.Tensor]
    by_torch: Callable[[], object]
    bind: Callable[[Kernel, Use], Callable[[torch.Tensor | None], torch.Tensor]]


@dataclass
class Entrant:
    """A kernel in a race."""

    number: int
    kernel: Kernel
    call: Callable[[], object]
    error: float
    samples_us: list[float]


def mode_of_environment() -> Mode:
    """``CUDAL2GEN_AUTOTUNE``. Raises WrongInput."""
    return checked(os.environ.get(VARIABLE, "off"), VARIABLE)


def checked(value: str, name: str) -> Mode:
    """A mode by its name. Raises WrongInput."""
    for mode in get_args(Mode):
        if value == mode:
            return mode  # type: ignore[no-any-return]
    raise WrongInput(f"{name}={value}: must be one of {', '.join(get_args(Mode))}")


class Autotuner:
    """Races of one device, and what they found. ``seconds``: for each problem, and for the process."""

    def __init__(
        self, meter: Meter, store: Store, seconds: tuple[float, float] = (SHAPE_SECONDS, PROCESS_SECONDS)
    ) -> None:
        self.meter, self.store, self.seconds, self.spent = meter, store, seconds, 0.0
        self.tried: set[tuple[Problem, int]] = set()

    def table(self, table: Table) -> Table:
        """The pack's table with the rows that this card's own races add or replace."""
        own = self.store.rows(table)
        replaced = {(row.kind, row.sizes, row.products) for row in own}
        kept = [row for row in table.rows if (row.kind, row.sizes, row.products) not in replaced]
        return Table(table.gpu, table.kernels, [*kept, *own], table.bandwidth, table.notes)

    def races(self, table: Table, problem: Problem, products: int) -> bool:
        """Whether a problem is still to be raced: a plain product that was neither measured nor tried, while the
        process has time left."""
        if problem.later or self.spent >= self.seconds[1] or (problem, products) in self.tried:
            return False
        return not table.measured(problem, products)

    def race(self, table: Table, problem: Problem, operands: Operands, contest: Contest) -> Iterator[None]:
        """Races a problem step by step, and stores the result at the end; between steps the caller may do other work.

        Raises nothing for kernels that fail: they stay banned. A GpuError of the store is the caller's.
        """
        self.tried.add((problem, 1))
        begin, before = self.meter.now(), self.spent
        entrants: list[Entrant] = []
        sizes = Sizes(problem.m, problem.n, problem.k)
        bounds = _Reference(problem, contest)
        if not bounds.finite:  # no result can be judged
            return
        floor_us = max(self.store.environment.floor_us(problem, cold=False), LEAST_US)
        for number, use in self.candidates(table, problem, sizes, operands):
            entrant = self._first_run(number, table.kernels[number], use, contest, bounds)
            if entrant is not None:
                entrants.append(entrant)
            self.spent = before + self.meter.now() - begin
            yield
            if self.spent - before > self.seconds[0] or self.spent > self.seconds[1]:
                break
        if not entrants:
            return
        vendor: list[float] = []
        times = self._times(contest.by_torch)
        for entrant in entrants:
            entrant.samples_us.append(self._sample(entrant.call, times))
            yield
        finalists = sorted(entrants, key=lambda entrant: entrant.samples_us[0])[:FINALISTS]
        for entrant in finalists:
            entrant.samples_us.clear()
        for rounds in range(MOST_ROUNDS):
            order = [(vendor, contest.by_torch), *((entrant.samples_us, entrant.call) for entrant in finalists)]
            for samples, call in (*order, *reversed(order)):
                samples.append(self._sample(call, times))
            self.spent = before + self.meter.now() - begin
            yield
            if rounds + 1 >= LEAST_ROUNDS and self.spent - before > self.seconds[0]:
                break
        sound = [entrant for entrant in finalists if min(entrant.samples_us) >= floor_us]
        for entrant in finalists:
            if entrant not in sound:
                self.store.end(entrant.kernel.digest, f"faster than {floor_us:.2f} us, which no kernel can be")
        if sound and min(vendor) >= floor_us:
            best = min(sound, key=lambda entrant: median(entrant.samples_us))
            self.store.add(self._measurement(problem, best, vendor, times))

    def candidates(self, table: Table, problem: Problem, sizes: Sizes, operands: Operands) -> list[tuple[int, Use]]:
        """Kernels to race: the nearest, those that the timing model expects to be fastest, the next nearest ones; each
        binary once, none that is banned."""
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

    def _first_run(self, number: int, kernel: Kernel, use: Use, contest: Contest, bounds: _Reference) -> Entrant | None:
        """The kernel, run once and compared; None where it fails, which bans it."""
        self.store.begin(kernel.digest)
        try:
            run = contest.bind(kernel, use)
            result = run(contest.empty_d().fill_(math.nan))  # so that no stale result passes
            self.meter.synchronize()
        except (LaunchError, GpuError, OSError) as error:  # of the driver or of the operands, and no crash
            self.store.end(kernel.digest, f"does not run: {error}")
            return None
        largest_error, wrong = bounds.compare(result)
        self.store.end(kernel.digest, wrong)
        if wrong:
            warnings.warn(f"cudal2gen: {kernel.record.name} is {wrong}; it is not used on this card", stacklevel=2)
            return None
        return Entrant(number, kernel, lambda: run(None), largest_error, [])

    def _times(self, call: Callable[[], object]) -> int:
        """Calls in a sample, so that it is long enough to be timed."""
        call()
        return max(1, math.ceil(SAMPLE_US / max(self.meter.elapsed_us(call, 1), LEAST_US)))

    def _sample(self, call: Callable[[], object], times: int) -> float:
        return self.meter.elapsed_us(call, times) / times

    def _measurement(self, problem: Problem, best: Entrant, vendor: Sequence[float], calls: int) -> Measurement:
        samples = {KERNEL: best.samples_us, VENDOR: vendor}
        timings = tuple(
            Timing(
                contender=name,
                record=best.kernel.record.name if name == KERNEL else None,
                digest=best.kernel.digest if name == KERNEL else None,
                detail="on a call's own operands",
                calls=calls,
                event_us=tuple(round(sample, 4) for sample in taken),
                error=best.error if name == KERNEL else 0.0,
            )
            for name, taken in samples.items()
        )
        return Measurement(
            environment=self.store.environment.id,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            **problem.model_dump(),
            protocol="device",
            l2="hot",
            seed=0,
            digest=best.kernel.digest,
            options=best.kernel.record.launch_options,
            timings=timings,
            conditions=Conditions(sm_mhz=(), memory_mhz=(), power_w=(), temperature_c=(), throttle=()),
        )


class _Reference:
    """Some rows and columns of the product, in fp64, with the error bounds of sums in order."""

    def __init__(self, problem: Problem, contest: Contest) -> None:
        self._rows, self._cols = (bands(extent)[::BAND_STEP] for extent in (problem.m, problem.n))
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
