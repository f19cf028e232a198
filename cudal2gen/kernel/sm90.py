"""What the families for compute capability 9.0 and later share."""

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
    """What the families from compute capability 9.0 on share: GPUs, architecture, alignment of rows.

    Copies of 16 bytes and tensor maps need rows that start at multiples of 16 bytes. Tiles may reach beyond the
    problem.
    """

    padding: Annotated[
        Literal["none", "pad"],
        Field(description="rows that do not start on 16 bytes: pad has the caller pad, none forbids them"),
    ] = "none"

    DATA_FIELDS: ClassVar[frozenset[str]] = Record.DATA_FIELDS | {"padding"}
    FOLLOWING: ClassVar[frozenset[str]] = frozenset({"padding"})
    SIZE_VARIANTS: ClassVar[tuple[Fields, ...]] = ({}, {"padding": "pad"})

    def shared_violations(self) -> Iterator[str]:
        yield from super().shared_violations()
        if self.gpu in GPUS and not self.serves(self.target):
            able = ", ".join(name for name, chip in GPUS.items() if self.serves(chip))
            yield f"gpu={self.gpu}: {self.family} needs one of {able}"

    @property
    def vector_rows(self) -> tuple[str, ...]:
        """Extents along which rows must start at multiples of 16 bytes."""
        return self.problem.row_extents

    def row_violations(self) -> Iterator[str]:
        """The rule that rows start at multiples of 16 bytes, unless the caller pads them."""
        if not self.caller_pads:
            yield from self.vector_violations(*self.vector_rows)

    def wider(self, sizes: Sizes) -> Sizes:
        """Rows of whole vectors."""
        return sizes._replace(**{name: aligned(getattr(sizes, name), self.element.vector) for name in self.vector_rows})

    def cluster_sum_bytes(self, threads: int, pairs: bool) -> int:
        """Bytes of the fp32 partial sums that the first CTA of a cluster gets: each CTA adds some of a thread's vectors
        of four over all slices, one or with ``pairs`` two at a time. ``threads`` share a tile."""
        together = 2 if pairs else 1
        dealt = ceil_div(self.bm * self.bn // (4 * threads), self.split_k * together) * self.split_k * together
        return dealt * threads * 16

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
