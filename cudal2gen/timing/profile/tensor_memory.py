"""The profile of a record whose products one thread queues (tcgen05): counts of its roles, and bounds of its main loop.

No warp waits for a product, so there are no stalls to simulate: instructions are counted in the machine code of each
role, and the time is the cheap form's (``model.estimate``). ``LIMITS`` says in words what that leaves out.
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
from cudal2gen.timing.profile import advice, figures
from cudal2gen.timing.profile.assembly import assembled
from cudal2gen.timing.profile.loop import ISSUE_PORT, Listing, Window
from cudal2gen.timing.profile.occupancy import busiest_sm, of_record, tail_share
from kernelproof import sass
from kernelproof.sass import Graph, Instruction, Pipe, pipe_use
from kernelproof.sass.loops import COPIES, Loops, Role, count
from kernelproof.sass.pipes import MMA
from kernelproof.sass.simulation import Issue

TENSOR_LOADS = frozenset(("LDTM",))
LIMITS = (
    "Warps are not simulated: one thread queues products and no warp waits for one, so there are no stalls and no "
    "picture. The time is the model's cheap form, from the record alone.",
    "The tensor rate is the data sheet's peak by SMs and boost clock, the same for one CTA and for a pair; latencies "
    "of the L2 are the H200's. Nothing was measured on a B200.",
    "Not modelled: how long LDTM, UTCBAR and a commit take, products that wait for their pair's other CTA, the two "
    "halves of the L2, a clock that falls under load.",
)


def has_tensor_memory(record: Record) -> TypeGuard[TmaRing]:
    """Whether one thread queues a record's products, out of a ring, into tensor memory."""
    return isinstance(record, TmaRing) and record.work.instruction == "tcgen05.mma"


@dataclass(frozen=True)
class TensorMemoryKernel:
    """A record's kernel; ``source``: its CUDA text."""

    record: TmaRing
    function: sass.Function
    source: Path

    @cached_property
    def loops(self) -> Loops:
        return Loops(Graph(self.function))

    @cached_property
    def products(self) -> tuple[Instruction, ...]:
        """A turn of the thread that multiplies: a k-tile."""
        if self.loops.main is None:
            raise sass.DisassemblyError(f"{self.function.name}: has no loop over k whose products could be counted")
        return self.loops.main.turn

    @cached_property
    def copies(self) -> tuple[Instruction, ...]:
        """A turn of the lane that fills the ring: a k-tile."""
        return self.loops.producer.turn if self.loops.producer else ()

    @cached_property
    def stores(self) -> tuple[Instruction, ...]:
        """A turn of a warp that stores: the columns of one or two loads from tensor memory."""
        turns = [item for item in self.loops.all if item.role is Role.STORE and count(item.turn, TENSOR_LOADS)]
        return min(turns, key=lambda item: len(item.loop.blocks)).turn if turns else ()

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.record)

    @property
    def tiles(self) -> int:
        """k-tiles that the busiest SM multiplies."""
        record = self.record
        return busiest_sm(record) * ceil_div(ceil_div(record.k, record.k_step), record.split_k)

    @property
    def tensor_cycles(self) -> float:
        """Cycles of an SM's tensor cores for a k-tile at the chip's peak."""
        record = self.record
        flops = 2 * record.bm * record.bn * record.k_step
        return flops / record.problem.tensor_flops

    @cached_property
    def bounds(self) -> dict[str, float]:
        """Microseconds of the main loop if it needed one part of the chip alone."""
        tensor = self.tensor_cycles * self.tiles / self.record.target.rates.mhz
        other_bounds = {name: us for name, us in self.estimate.bounds_us.items() if name != "mma"}
        return {"tensor cores": tensor, **other_bounds}

    @cached_property
    def listing(self) -> Listing:
        code = (*self.products, *self.copies)
        issues = [Issue(0, instruction, float(at), {}) for at, instruction in enumerate(code)]
        return Listing(Window(issues, 0.0, float(len(code)), 1.0, 1), self.function, self.record.target)

    @cached_property
    def loop(self) -> figures.Loop:
        """The main loop of the warp whose thread multiplies."""
        main_us, bounds = self.estimate.main_us, self.bounds
        cycles = main_us * self.record.target.rates.mhz / self.tiles
        return figures.Loop(
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
            unread=len(self.listing.unread & self.listing.uses.keys()),
            stalls={},
            idle={},
        )

    @cached_property
    def time(self) -> figures.Time:
        record, modelled = self.record, self.estimate
        launch = memory.LAUNCH_US + memory.DESCRIPTOR_US
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
    def roles(self) -> tuple[figures.Role, ...]:
        record = self.record
        unit = f"{record.atom_cols} columns"
        return (
            self._role("loads", 1, "k-tile", self.copies),
            self._role("multiplies", 1, "k-tile", self.products),
            self._role("stores", record.store_warps, unit, self.stores, count(self.stores, TENSOR_LOADS) // 2),
        )

    def _role(self, name: str, warps: int, unit: str, code: tuple[Instruction, ...], units: int = 1) -> figures.Role:
        """A role's instructions of one unit; ``units``: of a turn."""
        share = 1 / max(1, units)
        pipes = Counter(pipe_use(instruction, self.function.sm, self.record.target).pipe.value for instruction in code)
        opcodes = Counter(instruction.name for instruction in code)
        return figures.Role(
            name=name,
            warps=warps,
            unit=unit,
            instructions=len(code) * share,
            pipes={pipe: number * share for pipe, number in pipes.most_common()},
            opcodes={opcode: number * share for opcode, number in opcodes.most_common()},
        )

    @property
    def ring(self) -> figures.Ring:
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
        record = self.record
        kernel_profile = assembled(
            self.function, self.listing, self.loop, of_record(record, self.function.registers), self.time,
            advice.edits(record),
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
        changes = {"lines": tuple(lines), "issues": (), "roles": self.roles, "ring": self.ring, "limits": LIMITS}
        return kernel_profile.model_copy(update=changes)
