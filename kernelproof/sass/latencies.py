"""Gives the latency of an instruction: the cycles from its issue to the use of its result.

There are two kinds. For instructions of fixed latency ptxas writes the wait into stall counts, so its output is the
source: ``fixed`` reads a table that scripts/latencies.py generates from it. Other instructions free a scoreboard when
they are done. Their latencies (``scoreboard``) were measured on idle devices, without queues and bank conflicts.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kernelproof.sass.decoding import Instruction
from kernelproof.sass.flow import ENDS, JUMPS
from kernelproof.sass.pipes import MMA, Pipe, access_bytes, pipe_use
from kernelproof.sass.registers import access, address_reads

TABLE = Path(__file__).with_name("latencies.json")  # written by scripts/latencies.py
# How a reader may use a result, apart from an operand of arithmetic, for which the role is the name of the pipe.
ROLES = ("address", "data", "branch", "guard", "mbarrier")


class Release(NamedTuple):
    """Cycles from issue until the ``result`` is available, and until the operands have been ``read`` and may change."""

    result: int
    read: int


# By bytes per lane, for addresses in vector registers and data in the L1. Source: Huerta et al., "Analyzing Modern
# NVIDIA GPU cores" (MICRO 2025, arXiv 2503.20481), on an RTX A6000.
GLOBAL_LOADS = {4: Release(32, 11), 8: Release(34, 11), 16: Release(38, 11)}
SHARED_LOADS = {4: Release(24, 9), 8: Release(24, 9), 16: Release(26, 9)}
GLOBAL_STORES = {4: Release(0, 14), 8: Release(0, 16), 16: Release(0, 20)}
SHARED_STORES = {4: Release(0, 12), 8: Release(0, 14), 16: Release(0, 18)}
OTHERS = {
    "LDC": Release(29, 10), "LDGSTS": Release(39, 13), "S2R": Release(25, 11), "SHFL": Release(24, 11),
    "LDGDEPBAR": Release(0, 0),
}  # fmt: skip

# Cycles of a dependent load that hits the L1, hits the L2, and misses the L2. Sources: arXiv 2402.13499, 2501.12084 and
# markdewing/AI_kernels, for A100, RTX 3090 (figures of the RTX 4090), RTX 4090, H100, B200 and RTX 5090.
GLOBAL_LATENCY = {
    "sm_80": (38, 262, 466),
    "sm_86": (43, 273, 542),
    "sm_89": (43, 273, 542),
    "sm_90": (41, 263, 479),
    "sm_100": (40, 295, 860),
    "sm_120": (44, 360, 936),
}
# ldmatrix of 1, 2 and 4 matrices, which are 4, 8 and 16 bytes per lane. Source: Sun et al., arXiv 2206.02874, on an
# A100.
MATRIX_LOADS = {4: Release(23, 9), 8: Release(25, 9), 16: Release(29, 9)}
ESTIMATE = Release(14, 11)  # conversions, special functions, uniform moves, for which no measurement is published


def producer_key(instruction: Instruction) -> str:
    """The key of an instruction in the table of fixed latencies: its opcode and the modifiers that change its
    latency."""
    name = instruction.name
    if name in MMA:
        shape = next((part for part in instruction.modifiers if part[:1].isdigit()), "")
        return f"{name}.{shape}" if shape else name
    # HFMA2.MMA has its own pipe on sm_80 and sm_90.
    modifier = {"IMAD": "WIDE", "UIMAD": "WIDE", "HFMA2": "MMA"}.get(name)
    return f"{name}.{modifier}" if modifier in instruction.modifiers else name


@cache
def _fixed_table() -> dict[str, dict[str, dict[str, int]]]:
    """Latencies by sm, producer and role of the reader, of the newest toolkit in the file."""
    toolkits: dict[str, dict[str, dict[str, dict[str, int]]]] = json.loads(TABLE.read_text())
    return toolkits[max(toolkits, key=lambda version: [int(part) for part in version.split(".")])]


def fixed(sm: str, producer: str, reader: str) -> int | None:
    """Cycles that ptxas leaves between the issue of ``producer`` and of a ``reader`` of its result.

    ``producer``: an opcode with modifiers. ``reader``: an opcode, or one of ``ROLES``. A memory instruction reads both
    address and data; the longer latency of the two is returned. If the table lacks the reader, the producer's longest
    latency is returned. None if the table lacks the producer; most of those have variable latency.
    """
    rows = next((rows for name, rows in _fixed_table().items() if name.rstrip("af") == sm.rstrip("af")), {})
    readers = rows.get(producer_key(Instruction.bare(producer)))
    if not readers:
        return None
    use = pipe_use(Instruction.bare(reader), sm)
    roles = [reader] if reader in ROLES else ["address", "data"] if use.address_cycles else [str(use.pipe)]
    if reader in JUMPS | ENDS:
        roles = ["branch"]
    elif reader.startswith("SYNCS"):
        roles = ["mbarrier"]
    return max((readers[name] for name in roles if name in readers), default=max(readers.values()))


def role(reader: Instruction, used: int, sm: str) -> str:
    """The role in which an instruction uses the registers of mask ``used``: one of ``ROLES``, or the name of its
    pipe."""
    if reader.name in JUMPS | ENDS:
        return "branch"
    if reader.guard is not None and used & access(Instruction.bare("NOP", reader.guard)).reads:
        return "guard"
    use = pipe_use(reader, sm)
    if reader.name == "SYNCS":
        return "mbarrier"
    if use.address_cycles or use.pipe is Pipe.TMA:
        return "address" if used & address_reads(reader) else "data"
    return str(use.pipe)


def scoreboard(sm: str, instruction: Instruction, *, l2: bool = True) -> Release:
    """Cycles from issue until an instruction frees its write barrier (result) and its read barrier.

    ``l2``: whether loads from global memory hit the L2; else they hit the L1.
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
    return OTHERS.get(name, ESTIMATE)
