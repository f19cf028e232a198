"""Cycles from an instruction to the use of its result.

Two kinds. An instruction of fixed latency has no scoreboard: ptxas writes the wait into stall counts, so ptxas is the
source (``fixed``). The others set a scoreboard when they are done; what they take was measured on devices
(``scoreboard``), unloaded: queues and bank conflicts come on top.
"""

from __future__ import annotations

from typing import NamedTuple

from cudal2gen.sass.decoding import Instruction
from cudal2gen.sass.pipes import access_bytes


class Release(NamedTuple):
    """Cycles from issue until a scoreboard is free: ``result`` is there, or operands are ``read`` and may change."""

    result: int
    read: int


# Huerta et al., "Analyzing Modern NVIDIA GPU cores" (MICRO 2025, arXiv 2503.20481), of an RTX A6000: by bytes of a lane
# (4, 8, 16), result and read of operands, for addresses in vector registers; L1 hits.
WIDTHS = (4, 8, 16)
GLOBAL_LOADS = {4: Release(32, 11), 8: Release(34, 11), 16: Release(38, 11)}
UNIFORM_LOADS = {4: Release(29, 9), 8: Release(31, 9), 16: Release(35, 9)}
SHARED_LOADS = {4: Release(24, 9), 8: Release(24, 9), 16: Release(26, 9)}
GLOBAL_STORES = {4: Release(0, 14), 8: Release(0, 16), 16: Release(0, 20)}
SHARED_STORES = {4: Release(0, 12), 8: Release(0, 14), 16: Release(0, 18)}
OTHERS = {"LDC": Release(29, 10), "LDGSTS": Release(39, 13)}

# L1 hits, L2 hits and misses of the L2, cycles of a dependent load: arXiv 2402.13499, 2501.12084 and
# markdewing/AI_kernels, for A100, RTX 3090 (the RTX 4090's), RTX 4090, H100, B200, RTX 5090.
GLOBAL_LATENCY = {
    "sm_80": (38, 262, 466),
    "sm_86": (43, 273, 542),
    "sm_89": (43, 273, 542),
    "sm_90": (41, 263, 479),
    "sm_100": (40, 295, 860),
    "sm_120": (44, 360, 936),
}
# ldmatrix of 1, 2 and 4 matrices, A100: Sun et al., arXiv 2206.02874.
MATRIX_LOADS = {4: Release(23, 9), 8: Release(25, 9), 16: Release(29, 9)}
UNKNOWN = Release(14, 11)  # conversions, special functions, uniform moves: what nobody published, an estimate


def scoreboard(sm: str, instruction: Instruction, *, l2: bool = True) -> Release:
    """Cycles from issue until an instruction frees its write barrier (result) and its read barrier.

    ``l2``: a load from global memory hits the L2, not the L1.
    """
    name, size = instruction.name, min(16, max(4, access_bytes(instruction)))
    if name in ("LDG", "LD", "LDGSTS", "ATOMG", "ATOM", "RED", "REDG"):
        read = OTHERS["LDGSTS"].read if name == "LDGSTS" else GLOBAL_LOADS[size].read
        hit = GLOBAL_LATENCY[sm.rstrip("af")][1] + GLOBAL_LOADS[size].result - GLOBAL_LOADS[4].result
        return Release(hit, read) if l2 else Release(OTHERS.get(name, GLOBAL_LOADS[size]).result, read)
    tables = {"LDS": SHARED_LOADS, "LDSM": MATRIX_LOADS, "LDL": GLOBAL_LOADS, "STG": GLOBAL_STORES, "ST": GLOBAL_STORES,
              "STL": GLOBAL_STORES, "STS": SHARED_STORES, "STSM": SHARED_STORES}  # fmt: skip
    if name in tables:
        return tables[name][size]
    return OTHERS.get(name, MEASURED.get(name, UNKNOWN))


MEASURED: dict[str, Release] = {"S2R": Release(25, 11), "SHFL": Release(24, 11), "LDGDEPBAR": Release(0, 0)}
