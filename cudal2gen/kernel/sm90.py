"""What the families for compute capability 9.0 share: TMA's tiles, and wgmma's view of them."""

from __future__ import annotations

from collections.abc import Iterator

from cudal2gen.chips import GPUS, REGISTERS_SM, REGISTERS_THREAD
from cudal2gen.kernel.problem import VECTOR, ceil_div
from cudal2gen.kernel.record import Record

WGMMA_M = 64  # rows of one wgmma, 16 per warp
CHUNK = 64  # halves in the 128 bytes that the widest swizzle of TMA covers
MAX_BOX = 256  # rows or columns of one TMA box
# What ptxas wants beside the accumulators: of one wgmma at entry (C7602), and live in the main loop (C7511, spills).
ATOM_REGISTERS, LIVE_REGISTERS = 26, 32


class Sm90Kernel(Record):
    """What the families for compute capability 9.0 share: TMA's tiles, and wgmma's view of them.

    ``swap_ab`` computes D^T = B^T A^T: n runs along the 64 rows of a wgmma and m along its columns, of which there may
    be as few as 16. The tile keeps its meaning: bm rows and bn columns of D.
    """

    swap_ab: bool

    def shared_violations(self) -> Iterator[str]:
        yield from super().shared_violations()
        if self.gpu in GPUS and self.target.sm != "sm_90":
            able = ", ".join(name for name, gpu in GPUS.items() if gpu.sm == "sm_90")
            yield f"gpu={self.gpu}: {self.family} needs one of {able}"

    def alignment_violations(self) -> Iterator[str]:
        """Packed rows must be whole 16-byte vectors, for tensor maps as for cp.async."""
        if self.k % VECTOR:
            yield f"k={self.k}: must be a multiple of {VECTOR}, rows along k start on 16 bytes"
        if self.n % VECTOR and (self.layout == "nn" or self.launch["box_d_cols"]):
            yield f"n={self.n}: must be a multiple of {VECTOR}, rows along n start on 16 bytes"

    def register_violations(self, atom_n: int, blamed: str, consumer_registers: int) -> Iterator[str]:
        """ptxas's own limits: operands of one wgmma against the registers at entry, the tile against a thread's."""
        atom = atom_n // (4 if self.acc == "f16" else 2)
        if atom + ATOM_REGISTERS > self.entry_registers:
            yield (
                f"{blamed}: {atom} accumulator registers of one wgmma, and {ATOM_REGISTERS} beside them, "
                f"exceed the {self.entry_registers} that {self.threads} threads start with"
            )
        elif self.accumulator_registers + self.live_registers > consumer_registers:
            yield (
                f"{'bm' if self.swap_ab else 'bn'}={self.cols}: "
                f"{self.accumulator_registers} accumulator registers, and {self.live_registers} beside them, "
                f"exceed the {consumer_registers} of a consumer thread"
            )

    @property
    def arch(self) -> str:
        """The ``a`` unlocks wgmma and setmaxnreg, on exactly this architecture."""
        return "sm_90a"

    @property
    def live_registers(self) -> int:
        """Registers of a consumer beside its accumulators."""
        return LIVE_REGISTERS

    @property
    def ctas_at_least(self) -> int:
        """CTAs that ptxas must leave registers for on an SM."""
        return 1

    @property
    def entry_registers(self) -> int:
        """Registers that a thread starts with: the file shared out among warpgroups, in units of 8."""
        most = REGISTERS_SM // self.ctas_at_least // (ceil_div(self.threads, 128) * 128)
        return min(REGISTERS_THREAD, most // 8 * 8)

    @property
    def rows(self) -> int:
        """Extent of the tile along the rows of a wgmma."""
        return self.bn if self.swap_ab else self.bm

    @property
    def cols(self) -> int:
        """Extent of the tile along the columns of a wgmma."""
        return self.bm if self.swap_ab else self.bn

    @property
    def stores_vectors(self) -> bool:
        return bool(self.launch["box_d_cols"]) or not self.predicated

    @property
    def facts(self) -> dict[str, int | str]:
        return {
            "arch": self.arch,
            "accumulator_registers": self.accumulator_registers,
            "entry_registers": self.entry_registers,
            "cluster_ctas": self.cluster_ctas,
        }


def widest(extent: int) -> int:
    """The widest swizzled row, in halves, that divides an extent."""
    return next(width for width in (64, 32, 16) if extent % width == 0)
