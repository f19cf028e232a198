"""Makes the profile of a built record from its machine code and its launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cudal2gen.kernel import Record
from cudal2gen.timing.model import estimate, floor, memory
from cudal2gen.timing.model.code import CodeEstimate, Workload, estimate_code, machine_of, streams
from cudal2gen.timing.profile.advice import edits
from cudal2gen.timing.profile.occupancy import busiest_sm, tail_share
from cudal2gen.timing.profile.occupancy import of_record as occupancy_of
from cudal2gen.timing.profile.tensor_memory import TensorMemoryKernel, has_tensor_memory
from kernelproof import sass
from kernelproof.ground.pages import microseconds, percent
from kernelproof.profile import LAUNCH_US, Listing, LoopWindow, advice, compose, figures, loop_words, steady_window
from kernelproof.sass import Stream, Timeline, Ways, simulate

NEARLY = 0.9  # from this share of the main loop's time on, a part of the chip counts as its bound
DETAILED_ITERATIONS = 8  # iterations of the main loop that are simulated, beyond those that fill the ring


def of_record(record: Record, cubin: Path, source: Path) -> figures.Profile:
    """The profile of a record's kernel. ``source``: its CUDA text. Raises DisassemblyError and ToolchainError."""
    return _kernel(record, cubin, source).profile


def brief(record: Record, cubin: Path) -> dict[str, str]:
    """A record's modelled time, its main loop, and what bounds it, in words. Raises as ``of_record`` does."""
    kernel = _kernel(record, cubin, cubin)  # no lines are shown, so the source is not read
    return {
        "modelled_time": f"{microseconds(kernel.time.us)} µs",
        "modelled_main_loop": loop_words(kernel.loop),
        "modelled_bound": kernel.time.bound,
    }


def _kernel(record: Record, cubin: Path, source: Path) -> _SimulatedKernel | TensorMemoryKernel:
    """The kernel of a record in a cubin: the function with the record's name, else the first one."""
    functions = sass.disassemble(cubin)
    function = next((function for function in functions if function.name == record.name), functions[0])
    if has_tensor_memory(record):
        return TensorMemoryKernel(record, function, source)
    return _SimulatedKernel(record, function, source)


@dataclass(frozen=True)
class _SimulatedKernel:
    """A record's kernel whose warps are simulated."""

    record: Record
    function: sass.Function
    source: Path

    @cached_property
    def estimate(self) -> CodeEstimate:
        """The modelled time, from a simulation of the machine code."""
        return estimate_code(self.record, self.function)

    @cached_property
    def workload(self) -> Workload:
        """The record and the machine that runs it, with as many CTAs on an SM as ``estimate`` assumes."""
        sms = memory.usable_sms(self.record)
        return Workload(self.record, Ways(self.function), machine_of(self.record, sms, self.estimate.resident))

    @property
    def iterations(self) -> int:
        """Iterations of the main loop that are simulated."""
        return min(self.workload.iterations, self.record.ring_steps + DETAILED_ITERATIONS)

    def _streams(self, iterations: int) -> list[Stream]:
        """The warps of one scheduler, each with this number of iterations of the main loop."""
        return streams(self.workload, self.estimate.resident, iterations)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulation of one scheduler's warps, with the cycle of each instruction."""
        return simulate(self._streams(self.iterations), self.workload.machine, detail=True)

    @cached_property
    def window(self) -> LoopWindow:
        """The part of the timeline in which the main loop runs steadily."""
        return steady_window(self.timeline.issues, self.workload.ways.consumer.iteration)

    @cached_property
    def listing(self) -> Listing:
        return Listing(self.window, self.function, self.record.target)

    @cached_property
    def loop(self) -> figures.MainLoop:
        tiles = self.workload.tile_steps / max(1, self.workload.iterations)
        return self.listing.loop("k-tile", tiles, bool(self.workload.ways.consumer.iteration))

    @cached_property
    def occupancy(self) -> figures.Occupancy:
        return occupancy_of(self.record, self.function.registers)

    @cached_property
    def sm_tiles(self) -> int:
        """CTA tiles of the busiest SM."""
        return busiest_sm(self.record)

    @cached_property
    def time(self) -> figures.Time:
        """The modelled time, its parts and its bounds, in microseconds."""
        record, modelled = self.record, self.estimate
        rates = record.target.rates
        launch = LAUNCH_US + (memory.DESCRIPTOR_US if record.work.tensor_maps else 0)
        first = [ends[0] for ends in self.timeline.ends if ends]
        # The busiest SM runs this many sets of resident CTAs one after the other, each with a prologue of its own.
        generations = self.sm_tiles / modelled.resident
        sm_us = modelled.sm_us + modelled.stores_us
        main_us = modelled.main_us
        outside = modelled.sm_us - main_us
        prologue = min(outside, generations * min(first, default=0.0) / rates.mhz)
        parts = {
            "launch": launch,
            "prologue": prologue,
            "main loop": main_us,
            "epilogue": outside - prologue,
            "sums of split k": modelled.around_us - launch,
            "stores that the L2 cannot keep": modelled.stores_us,
            "device memory, beyond the SMs' time": modelled.us - modelled.around_us - sm_us,
        }
        cheap = estimate(record).bounds_us
        bounds = {
            "tensor cores": self._tensor_us,
            "machine code": main_us,
            "L2": cheap["L2"],
            "device memory": modelled.dram_us,
        }
        memory_bound = modelled.dram_us - modelled.stores_us > modelled.sm_us
        l2_bound = bounds["L2"] >= NEARLY * main_us and self.loop.pipes.get("tensor", 0.0) < NEARLY
        return figures.Time(
            us=modelled.us,
            parts={name: us for name, us in parts.items() if us > 1e-6},
            bounds=bounds,
            bound="device memory" if memory_bound else "L2" if l2_bound else self.loop.bound,
            ctas=record.ctas,
            waves=record.waves(self.function.registers),
            tail_share=tail_share(record),
            floor_us=floor(record.problem).us,
        )

    @property
    def _tensor_us(self) -> float:
        """Microseconds of the busiest SM's tiles at the rate of its tensor cores."""
        record, problem = self.record, self.record.problem
        rate = problem.tensor_flops if record.work.asynchronous else problem.mma_sync_flops
        flops = 2 * self.sm_tiles * record.bm * record.bn * record.k_step * self.workload.tile_steps
        return flops / rate / record.target.rates.mhz

    def _advice(self) -> Iterator[figures.Advice]:
        """Changes that shorten the modelled time: another resident CTA, less waiting, no idle end, other fields."""
        more = advice.more_residents(self.occupancy, self.record.accumulator_registers)
        if more and self.sm_tiles > self.occupancy.ctas:
            after = estimate_code(self.record, self.function, self.occupancy.ctas + 1).us
            yield figures.Advice(change=more, figure="time", form="machine code", before=self.estimate.us, after=after)
        if self.workload.ways.consumer.iteration and self.workload.iterations > 1:
            yield from advice.removals(self._streams, self.workload.machine, self.iterations)
        if not self.record.shares_last_wave and self.time.tail_share:
            without_tail = self.estimate.us - self.time.tail_share * self.estimate.sm_us
            yield figures.Advice(
                change=f"work for the {percent(self.time.tail_share)} of the SMs' time that is idle at the end",
                figure="time", form="machine code", before=self.estimate.us, after=without_tail,
            )  # fmt: skip
        yield from edits(self.record)

    @property
    def profile(self) -> figures.Profile:
        """The profile of the record."""
        record = self.record
        return compose(
            self.function, self.listing, self.loop, self.occupancy, self.time, self._advice(),
            arch=record.arch,
            gpu=record.gpu,
            problem=f"{record.mnk} {record.problem.types} {record.layout}{record.problem.suffix}",
            source=self.source,
        )  # fmt: skip
