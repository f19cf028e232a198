"""Makes the profile of a record whose MMAs one thread starts (tcgen05).

No warp waits for an MMA, so there are no stalls to simulate. The instructions of each role are counted in the machine
code, and time and bounds come from the model's cheap form (``model.estimate``). ``LIMITS`` says what that leaves out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeGuard

from cudal2gen.kernel import Record, ceil_div
from cudal2gen.kernel.tma_ring import TmaRing
from cudal2gen.timing.model import Estimate, estimate, floor, memory
from cudal2gen.timing.profile.advice import edits
from cudal2gen.timing.profile.occupancy import busiest_sm, of_record, tail_share
from kernelproof import sass
from kernelproof.profile import ISSUE_PORT, LAUNCH_US, Listing, LoopWindow, compose, figures
from kernelproof.sass import COPIES, MMA, Graph, Instruction, Issue, Loops, Pipe, Role, count, pipe_use

TENSOR_LOADS = frozenset(("LDTM",))  # opcodes of machine code that read tensor memory
LIMITS = (
    "Warps are not simulated: one thread starts all MMAs and no warp waits for one, so there are no stalls and no "
    "picture. The time comes from the model's formulas and the record alone.",
    "The tensor rate is the data sheet's peak divided by SMs and boost clock, and is the same for one CTA and for a "
    "pair. Latencies of the L2 are those of the H200. Nothing was measured on a B200.",
    "Not modelled: how long LDTM, UTCBAR and a commit take, MMAs that wait for the other CTA of their pair, the two "
    "halves of the L2, and a clock that falls under load.",
)


def has_tensor_memory(record: Record) -> TypeGuard[TmaRing]:
    """Whether one thread starts a record's MMAs, which multiply stages of a ring into tensor memory."""
    return isinstance(record, TmaRing) and record.work.instruction == "tcgen05.mma"


@dataclass(frozen=True)
class TensorMemoryKernel:
    """A record's kernel with tensor memory. ``source``: its CUDA text."""

    record: TmaRing
    function: sass.Function
    source: Path

    @cached_property
    def loops(self) -> Loops:
        """The loops of the machine code."""
        return Loops(Graph(self.function))

    @cached_property
    def products(self) -> tuple[Instruction, ...]:
        """An iteration of the thread that multiplies: one k-tile. Raises DisassemblyError if it has no loop over k."""
        if self.loops.main is None:
            raise sass.DisassemblyError(f"{self.function.name}: has no loop over k whose products could be counted")
        return self.loops.main.iteration

    @cached_property
    def copies(self) -> tuple[Instruction, ...]:
        """An iteration of the lane that fills the ring: one k-tile."""
        return self.loops.producer.iteration if self.loops.producer else ()

    @cached_property
    def stores(self) -> tuple[Instruction, ...]:
        """An iteration of a warp that stores: the columns that it loads from tensor memory at a time."""
        iterations = [
            item for item in self.loops.all if item.role is Role.STORE and count(item.iteration, TENSOR_LOADS)
        ]
        return min(iterations, key=lambda item: len(item.loop.blocks)).iteration if iterations else ()

    @cached_property
    def estimate(self) -> Estimate:
        """The time by the model's cheap form."""
        return estimate(self.record)

    @property
    def k_tiles(self) -> int:
        """How many k-tiles the busiest SM multiplies."""
        record = self.record
        return busiest_sm(record) * ceil_div(ceil_div(record.k, record.k_step), record.split_k)

    @property
    def tensor_cycles(self) -> float:
        """Cycles that an SM's tensor cores take for a k-tile at the chip's peak rate."""
        record = self.record
        flops = 2 * record.bm * record.bn * record.k_step
        return flops / record.problem.tensor_flops

    @cached_property
    def bounds(self) -> dict[str, float]:
        """Microseconds of the main loop if it needed only one part of the chip, by part."""
        tensor = self.tensor_cycles * self.k_tiles / self.record.target.rates.mhz
        other_bounds = {name: us for name, us in self.estimate.bounds_us.items() if name != "mma"}
        return {"tensor cores": tensor, **other_bounds}

    @cached_property
    def listing(self) -> Listing:
        """The instructions of one k-tile: those that multiply, then those that copy."""
        code = (*self.products, *self.copies)
        issues = [Issue(0, instruction, float(at), {}) for at, instruction in enumerate(code)]
        return Listing(LoopWindow(issues, 0.0, float(len(code)), 1.0, 1), self.function, self.record.target)

    @cached_property
    def loop(self) -> figures.MainLoop:
        """The main loop of the warp whose thread multiplies."""
        main_us, bounds = self.estimate.main_us, self.bounds
        cycles = main_us * self.record.target.rates.mhz / self.k_tiles
        return figures.MainLoop(
            unit="k-tile",
            rolled=True,
            warps=1,
            cycles=cycles,
            tensor_cycles=self.tensor_cycles,
            bound=max(self.bounds, key=lambda name: self.bounds[name]),
            issue_slots=len(self.products),
            opcodes=dict(Counter(instruction.name for instruction in self.products).most_common()),
            pipes={
                Pipe.TENSOR.value: bounds["tensor cores"] / main_us,
                "L2": bounds["L2"] / main_us,
                Pipe.SHARED.value: bounds["shared memory"] / main_us,
                ISSUE_PORT: len(self.products) / cycles,
            },
            live_registers=max(self.listing.live[item.address] for item in self.listing.instructions),
            bank_conflicts=0.0,
            unread=len(self.listing.unread & self.listing.index.keys()),
            stalls={},
            idle={},
        )

    @cached_property
    def time(self) -> figures.Time:
        """The modelled time and its parts, in microseconds."""
        record, modelled = self.record, self.estimate
        launch = LAUNCH_US + memory.DESCRIPTOR_US
        return figures.Time(
            us=modelled.us,
            parts={
                "launch": launch,
                "main loop": modelled.main_us,
                "first load, last store, sums of split k": modelled.around_us - launch,
            },
            bounds=self.bounds,
            bound=self.loop.bound,
            ctas=record.ctas,
            waves=record.waves(self.function.registers),
            tail_share=tail_share(record),
            floor_us=floor(record.problem).us,
        )

    @property
    def roles(self) -> tuple[figures.WarpRole, ...]:
        """The roles of warps: those that load, multiply and store."""
        record = self.record
        unit = f"{record.atom_cols} columns"  # two instructions load them from tensor memory
        return (
            self._role("loads", 1, "k-tile", self.copies),
            self._role("multiplies", 1, "k-tile", self.products),
            self._role("stores", record.store_warps, unit, self.stores, count(self.stores, TENSOR_LOADS) // 2),
        )

    def _role(
        self, name: str, warps: int, unit: str, code: tuple[Instruction, ...], units: int = 1
    ) -> figures.WarpRole:
        """A role with the instructions of one unit. ``code``: one iteration of its loop, which has ``units`` units."""
        share = 1 / max(1, units)
        pipes = Counter(pipe_use(instruction, self.function.sm, self.record.target).pipe.value for instruction in code)
        opcodes = Counter(instruction.name for instruction in code)
        return figures.WarpRole(
            name=name,
            warps=warps,
            unit=unit,
            instructions=len(code) * share,
            pipes={pipe: number * share for pipe, number in pipes.most_common()},
            opcodes={opcode: number * share for opcode, number in opcodes.most_common()},
        )

    @property
    def ring(self) -> figures.Ring:
        """The ring of k-tiles in shared memory, with the copies and MMAs of each, and the use of tensor memory."""
        record = self.record
        return figures.Ring(
            stages=record.stages,
            tile_bytes=record.step_bytes,
            l2_bytes=record.work.l2_bytes,
            copies=count(self.copies, COPIES),
            products=count(self.products, MMA),
            tensor_columns=int(record.facts["tensor_memory_columns"]),
            accumulators=2 if record.work.epilogue_hidden else 1,
        )

    @property
    def profile(self) -> figures.Profile:
        """The complete profile."""
        record = self.record
        kernel_profile = compose(
            self.function, self.listing, self.loop, of_record(record, self.function.registers), self.time,
            edits(record),
            arch=record.arch,
            gpu=record.gpu,
            problem=f"{record.mnk} {record.problem.types} {record.layout}{record.problem.suffix}",
            source=self.source,
        )  # fmt: skip
        busy = self.tensor_cycles / count(self.products, MMA)
        lines = (
            line.model_copy(update={"busy": busy}) if line.pipe == Pipe.TENSOR.value else line
            for line in kernel_profile.lines
        )
        changes = {"lines": tuple(lines), "roles": self.roles, "ring": self.ring, "limits": LIMITS}
        # The counted instructions have no times, so there is nothing to draw.
        return kernel_profile.model_copy(update=changes | {"issues": (), "busy": {}})
