"""Defines ``Sm90Kernel``, the base class of the kernel families for compute capability 9.0 and later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cudal2gen.kernel.launch import Sizes
from cudal2gen.kernel.problem import aligned
from cudal2gen.kernel.record import Fields, Record
from kernelproof.ground.chips import GPUS, Chip
from kernelproof.ground.integers import ceil_div

CLUSTER_SPLITS = (2, 4, 8)  # slices of k that CTAs of one cluster sum; 8 CTAs are the largest portable cluster
Overlap = Annotated[bool, Field(description="programmatic dependent launch: start while the kernel before still runs")]


class Sm90Kernel(Record):
    """A family for compute capability 9.0 or later.

    Its copies of 16 bytes and its tensor maps need rows that start at multiples of 16 bytes. Its tiles may reach
    beyond the problem.
    """

    padding: Annotated[
        Literal["none", "pad"],
        Field(
            description="for rows that do not start at multiples of 16 bytes: the caller pads them, or they are illegal"
        ),
    ] = "none"

    DATA_FIELDS: ClassVar[frozenset[str]] = Record.DATA_FIELDS | {"padding"}
    FOLLOWING: ClassVar[frozenset[str]] = frozenset({"padding"})
    SIZE_VARIANTS: ClassVar[tuple[Fields, ...]] = ({}, {"padding": "pad"})

    def shared_violations(self) -> Iterator[str]:
        yield from super().shared_violations()
        if self.gpu in GPUS and not self.serves(self.target):
            served = ", ".join(name for name, chip in GPUS.items() if self.serves(chip))
            yield f"gpu={self.gpu}: {self.family} needs one of {served}"

    @property
    def vector_rows(self) -> tuple[str, ...]:
        """Extents along which rows must start at multiples of 16 bytes."""
        return self.problem.row_extents

    def row_violations(self) -> Iterator[str]:
        """The rule that rows start at multiples of 16 bytes, unless the caller pads them."""
        if not self.caller_pads:
            yield from self.vector_violations(*self.vector_rows)

    def wider(self, sizes: Sizes) -> Sizes:
        """The sizes rounded up so that rows are whole vectors."""
        return sizes._replace(**{name: aligned(getattr(sizes, name), self.element.vector) for name in self.vector_rows})

    def cluster_sum_bytes(self, threads: int, pairs: bool) -> int:
        """Bytes of shared memory in which a CTA receives fp32 partial sums from the CTAs of its cluster.

        ``threads`` hold a tile's accumulators in vectors of four floats. A thread's vectors are dealt to the CTAs in
        turn, one at a time or with ``pairs`` two at a time. Each CTA receives its vectors from every slice and adds
        them. The first CTA is dealt the most vectors, so its bytes suffice for all.
        """
        dealt_at_a_time = self.split_k * (2 if pairs else 1)
        vectors = ceil_div(self.bm * self.bn // (4 * threads), dealt_at_a_time) * dealt_at_a_time
        return vectors * threads * 16

    @property
    def arch(self) -> str:
        """The suffix ``a`` unlocks wgmma and setmaxnreg, for exactly this architecture."""
        return "sm_90a"

    @property
    def facts(self) -> dict[str, int | str]:
        return {
            "arch": self.arch,
            "accumulator_registers": self.accumulator_registers,
            "cluster_ctas": self.cluster_ctas,
        }

    # For the tuner and the cost model.

    @classmethod
    def serves(cls, chip: Chip) -> bool:
        return chip.capability.has_wgmma
