"""What the families for compute capability 9.0 share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from cudal2gen.chips import GPUS, Chip
from cudal2gen.element import F16
from cudal2gen.kernel.record import Record

CHUNK = 128 // F16.bytes  # elements in 128 bytes: a row of the widest swizzle
CLUSTER_SPLITS = (2, 4, 8)  # slices of k that CTAs of one cluster sum; 8 CTAs are the largest portable cluster
Overlap = Annotated[bool, Field(description="programmatic dependent launch: start while the kernel before still runs")]


class Sm90Kernel(Record):
    """What the families for compute capability 9.0 share: which GPUs, and the architecture they compile for."""

    def shared_violations(self) -> Iterator[str]:
        yield from super().shared_violations()
        if self.gpu in GPUS and not self.target.capability.has_wgmma:
            able = ", ".join(name for name, chip in GPUS.items() if chip.capability.has_wgmma)
            yield f"gpu={self.gpu}: {self.family} needs one of {able}"

    def sum_violations(self, field: str, place: str, place_bytes: int) -> Iterator[str]:
        """Whether fp32 partial sums of a tile fit where its operands were; ``field`` is the one to blame."""
        if (size := self.bm * self.bn * 4) > place_bytes:
            yield f"{field}: {size} bytes of partial sums exceed the {place} {place_bytes}"

    @property
    def arch(self) -> str:
        """The ``a`` unlocks wgmma and setmaxnreg, on exactly this architecture."""
        return "sm_90a"

    @property
    def facts(self) -> dict[str, int | str]:
        return {
            "arch": self.arch,
            "accumulator_registers": self.accumulator_registers,
            "cluster_ctas": self.cluster_ctas,
        }

    # What the tuner and the cost model ask of a family.

    @classmethod
    def serves(cls, chip: Chip) -> bool:
        return chip.capability.has_wgmma
