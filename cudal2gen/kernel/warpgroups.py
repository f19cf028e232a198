"""Defines ``Warpgroups``, the base class of families with a producer warpgroup and consumer warpgroups.

It has the rules for setmaxnreg and for how consumers share a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from cudal2gen.kernel.problem import Problem
from cudal2gen.kernel.tma_ring import TmaRing
from kernelproof.ground.chips import REGISTERS_SM, REGISTERS_THREAD
from kernelproof.ground.integers import ceil_div

# What the tuner tries: bm, bn, schedule, consumers, registers.
Tile = tuple[int, int, str, int, list[int] | None]
Setmaxnreg = Annotated[int, Field(ge=24, le=240, multiple_of=8)]
Consumers = Annotated[Literal[1, 2, 3], Field(description="warpgroups that multiply, besides one that loads")]
Schedule = Annotated[
    Literal["cooperative", "pingpong"],
    Field(description="cooperative: consumers share a tile; pingpong: two take tiles in turn, one stores meanwhile"),
]
Registers = Annotated[
    tuple[Setmaxnreg, Setmaxnreg] | None,
    Field(description="registers per thread of producer and consumers after setmaxnreg; null: without setmaxnreg"),
]
MinBlocks = Annotated[Literal[1, 2], Field(description="CTAs per SM that the compiler bounds registers for")]


class Warpgroups(TmaRing):
    """A producer warpgroup, in which one lane loads, and up to three consumers, whose warps multiply 16 of every 64
    rows."""

    if TYPE_CHECKING:
        consumers: Literal[1, 2, 3]
        schedule: Literal["cooperative", "pingpong"]
        registers: tuple[int, int] | None
        min_blocks: Literal[1, 2]

    warp_rows: ClassVar[int] = 16
    holds_tile: ClassVar[bool] = True

    def share_violations(self) -> Iterator[str]:
        """Rules for two consumers that alternate tiles, and for consumers that share the rows of a tile."""
        if self.schedule == "pingpong" and self.consumers != 2:
            yield f"consumers={self.consumers}: must be 2 for schedule pingpong, which gives each its own tile"
        if self.rows % (unit := self.atom_rows * self.sharers):
            several = f"{self.sharers} warpgroups of {self.atom_rows} rows each"
            shares = several if self.sharers > 1 else f"the {self.atom_rows} rows of a warpgroup"
            yield f"{'bn' if self.swap_ab else 'bm'}={self.rows}: must be a multiple of {unit}, {shares}"

    def consumer_violations(self) -> Iterator[str]:
        """The rule that a consumer thread has enough registers for its accumulators and its other values."""
        available = self.registers[1] if self.registers else self.entry_registers
        if self.accumulator_registers + self.live_registers > available:
            yield (
                f"{'bm' if self.swap_ab else 'bn'}={self.cols}: "
                f"{self.accumulator_registers} accumulator registers, and {self.live_registers} besides them, "
                f"exceed the {available} of a consumer thread"
            )

    def stream_violations(self) -> Iterator[str]:
        if self.stream_k and self.schedule != "cooperative":
            yield "schedule=pingpong: must be cooperative for stream_k, where all consumers work on each share of k"
        yield from super().stream_violations()

    def occupancy_violations(self) -> Iterator[str]:
        """The rule that shared memory suffices for the CTAs that ``min_blocks`` promises."""
        if broken := list(self.smem_violations(f"stages={self.stages}")):
            yield from broken
        elif self.min_blocks > self.ctas_by_smem:
            yield (
                f"min_blocks={self.min_blocks}: {self.smem_bytes} bytes of shared memory each, "
                f"{self.ctas_by_smem} fits on an SM"
            )

    def pool_violations(self, producer: int, consumer: int) -> Iterator[str]:
        """Rules for setmaxnreg, which moves registers from the producer to the consumers. ``producer``, ``consumer``:
        registers of a thread after that."""
        field = f"registers={[producer, consumer]}"
        entry, consumers = self.entry_registers // 8 * 8, self.consumers  # setmaxnreg moves registers in units of 8
        # All warpgroups are of one size, so one thread of each stands for it.
        needed, pool = producer + consumers * consumer, (consumers + 1) * entry
        if needed > pool:
            yield (
                f"{field}: {needed} for a producer and {consumers} consumers "
                f"exceed the {pool} that {self.threads} threads start with; the kernel would wait forever"
            )
        elif producer > entry or consumer < entry:
            yield (
                f"{field}: the producer must give and consumers take, "
                f"from the {entry} that {self.threads} threads start with"
            )
        elif producer < self.producer_registers:
            yield (
                f"{field}: a producer for cluster {list(self.cluster)} "
                f"and boxes of {min(self.chunk_a, self.chunk_b)} columns needs {self.producer_registers} registers"
            )

    @property
    def producer_registers(self) -> int:
        """The fewest registers with which the producer does not spill."""
        raise NotImplementedError

    @property
    def live_registers(self) -> int:
        """Registers that a consumer needs besides its accumulators."""
        raise NotImplementedError

    @property
    def sharers(self) -> int:
        """Consumer warpgroups that share one tile."""
        return 1 if self.schedule == "pingpong" else self.consumers

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def entry_registers(self) -> int:
        """Registers per thread at entry: the register file divided among warpgroups, in units of 8."""
        most = REGISTERS_SM // self.min_blocks // self.threads
        return min(REGISTERS_THREAD, most // 8 * 8)

    @property
    def accumulator_registers(self) -> int:
        return self.bm * self.bn // (128 * self.sharers) // (2 if self.acc == "f16" else 1)

    @property
    def barrier_bytes(self) -> int:
        """The ring's two mbarriers per stage, and 32 bytes of order barriers and flags."""
        return 16 * self.stages + 32

    @property
    def store_warps(self) -> int:
        return 4 * self.consumers

    @property
    def alone_on_sm(self) -> bool:
        return self.min_blocks == 1

    @property
    def estimated_registers(self) -> int:
        """Registers that ptxas will report. With setmaxnreg, these are exactly the registers at entry. Without it, this
        is a rough estimate that counts 38 registers for all but the accumulators."""
        return self.entry_registers if self.registers else min(self.entry_registers, self.accumulator_registers + 38)

    @property
    def warnings(self) -> list[str]:
        """Adds warnings about idle warpgroups and SMs."""
        warnings = super().warnings
        tiles = self.tiles_m * self.tiles_n * self.split_k
        if self.schedule == "pingpong" and tiles <= self.target.sms:
            warnings.append("schedule pingpong with one tile per CTA leaves every second warpgroup without work")
        return [*warnings, *self.cluster_warnings()]

    @property
    def facts(self) -> dict[str, int | str]:
        return super().facts | {"entry_registers": self.entry_registers}

    # For the tuner and the cost model.

    @classmethod
    def swapped_tiles(cls, problem: Problem) -> list[Tile]:
        """Tiles of D^T = B^T A^T for a D with at most as many rows as a wgmma computes. The few rows of D are columns
        of D^T, and a wgmma may have few columns. Empty for a D with more rows."""
        if problem.m > cls.atom_rows:
            return []
        bm = ceil_div(problem.m, 16) * 16
        return [(bm, bn, "cooperative", groups, None) for bn, groups in ((64, 1), (128, 1), (128, 2))]

    @classmethod
    def wastes_tile(cls, problem: Problem, bm: int, bn: int) -> bool:
        """Whether half of a tile or more lies beyond the problem and the tuner also tries a smaller tile."""
        return bm >= 2 * problem.m > 2 * cls.atom_rows or (bn >= 2 * problem.n and bn > cls.atom_rows)
