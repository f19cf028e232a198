"""Lists the special registers of PTX, and finds the registers in operands."""

from __future__ import annotations

from collections.abc import Iterator

from kernelproof.emulator.frontend.ptx import Mem, Operand, Pair, Reg, TensorOperand, Vec

_XYZ, _XYZW = (".x", ".y", ".z"), (".x", ".y", ".z", ".w")
# Register -> the shift that gives its half of the 64-bit address of the grid's workspace. In the workspace of a
# cooperative launch, cooperative groups count arrivals.
WORKSPACE_HALVES = {"%envreg1": 32, "%envreg2": 0}
# Special registers that have the same value in all threads of a launch.
LAUNCH_CONSTANTS = frozenset(
    f"%{base}{axis}" for base in ("ntid", "nctaid", "nclusterid", "cluster_nctaid") for axis in _XYZ
) | {
    "%nsmid", "%nwarpid", "%gridid", "%dynamic_smem_size", "%total_smem_size", "%aggr_smem_size",
    "%is_explicit_cluster", "%cluster_nctarank", *WORKSPACE_HALVES,
}  # fmt: skip
CLOCKS = frozenset(("%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"))
SPECIALS = (
    LAUNCH_CONSTANTS
    | CLOCKS
    | {f"%{base}{axis}" for base in ("tid", "ctaid", "clusterid", "cluster_ctaid") for axis in _XYZW}
    | {f"%{base}.w" for base in ("ntid", "nctaid", "nclusterid", "cluster_nctaid")}
    | {f"%lanemask_{relation}" for relation in ("eq", "le", "lt", "ge", "gt")}
    | {f"%reserved_smem_offset_{which}" for which in ("begin", "end", "cap", "0", "1")}
    | {"%laneid", "%warpid", "%smid", "%cluster_ctarank"}
)


def registers(operand: Operand) -> Iterator[str]:
    """Names of all registers in an operand, special registers included."""
    if isinstance(operand, Reg):
        yield operand.name
    elif isinstance(operand, Vec):
        for item in operand.items:
            yield from registers(item)
    elif isinstance(operand, Mem):
        if isinstance(operand.base, Reg):
            yield operand.base.name
    elif isinstance(operand, TensorOperand):
        if isinstance(operand.base, Reg):
            yield operand.base.name
        for item in operand.coordinates:
            yield from registers(item)
    elif isinstance(operand, Pair):
        yield operand.first.name
        yield operand.second.name
