"""States what a schedule of machine code has to wait for, by architecture: results, and operands that are read late.

An instruction either has a fixed latency, which stall counts cover, or frees a scoreboard when it is done. NVIDIA
documents neither which instructions are of which kind nor their latencies. ``scheduling.json`` was derived by
scripts/scheduling.py from a corpus of ptxas's own output. It lists the opcodes that take scoreboards for results and
for operands. For the other opcodes it has the least number of cycles that ptxas ever left between the issue of a
producer and of a reader. The opcodes of a pipe share these bounds. If the corpus has few pairs for a role of the
reader, or if the producer's opcode differs from its pipe, the bound is one less than the least over all readers.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from kernelproof.sass.decoding import Instruction
from kernelproof.sass.latencies import producer_key, role
from kernelproof.sass.pipes import Pipe, pipe_use
from kernelproof.sass.registers import UNIFORM, VECTOR, access

TABLE = Path(__file__).with_name("scheduling.json")  # written by scripts/scheduling.py
MEMORY = "memory"  # the queue of instructions with addresses, in which operands are read
ANY = "any"  # the role of readers that the table does not name
# Cycles from the issue of an instruction until waits see the scoreboard that it takes. ptxas never waits earlier.
SETTLE = 2
# Pipes that finish their instructions in the order of issue. So a wait for the last one is a wait for all before it.
IN_ORDER = (Pipe.XU, Pipe.CONSTANT, Pipe.SHARED)
# Pipes whose opcodes have the same latency for a role of the reader, and opcodes on them that have other latencies.
REGULAR_PIPES = (Pipe.ALU, Pipe.FMA, Pipe.FP16, Pipe.UNIFORM)
_EXCEPTIONS = frozenset(
    ("CS2R", "R2UR", "HFMA2.MMA", "ULDC", "UMOV", "UFLO", "UPOPC", "VOTEU", "VOTE", "ELECT", "MOVM")
)
_LANE_EXCHANGES = frozenset(("SHFL", "REDUX", "CREDUX", "MATCH"))  # they read data sooner than stores do
_ODD_REGISTERS = sum(1 << at for at in range(1, 256, 2))


@dataclass(frozen=True)
class SchedulingFacts:
    """The facts of one architecture.

    ``scoreboards``: opcodes whose result needs a scoreboard. ``late``: opcodes that read vector registers after issue
    and free a scoreboard when they have; ``late_uniform``: the same for uniform registers. ``latencies``: cycles from
    the issue of a producer of fixed latency to that of a reader, by producer (``latency_row``) and role of the
    reader (``latency_column``).
    """

    sm: str
    scoreboards: frozenset[str]
    late: frozenset[str]
    late_uniform: frozenset[str]
    latencies: dict[str, dict[str, int]]

    def latency(self, producer: Instruction, reader: Instruction, used: int) -> int:
        """Cycles from the issue of a producer after which a reader may issue; 0 if the producer is not in the table.

        ``used``: the mask of the producer's results that the reader uses.
        """
        if producer.name == "R2UR" and not used & UNIFORM:
            return 0  # the table has the latency of the uniform register, not that of the predicate
        row = self.latencies.get(latency_row(producer, self.sm), {})
        return row.get(latency_column(producer, reader, used, self.sm), row.get(ANY, 0))

    def longest(self, producer: Instruction) -> int:
        """Cycles from the issue of a producer after which every reader may issue."""
        return max(self.latencies.get(latency_row(producer, self.sm), {}).values(), default=0)


@cache
def facts(sm: str) -> SchedulingFacts | None:
    """The facts of an architecture (``sm_90a``); None if ptxas's output for it was not studied."""
    rows = json.loads(TABLE.read_text())["facts"].get(sm.rstrip("af"))
    if rows is None:
        return None
    scoreboards, late, uniform = (frozenset(rows[name].split()) for name in ("scoreboards", "late", "late_uniform"))
    return SchedulingFacts(sm, scoreboards, late, uniform, rows["latencies"])


def latency_row(producer: Instruction, sm: str) -> str:
    """The name of the row of ``latencies`` for a producer: its pipe, or its opcode."""
    key, pipe = producer_key(producer), pipe_use(producer, sm).pipe
    return str(pipe) if pipe in REGULAR_PIPES and key not in _EXCEPTIONS else key


@lru_cache(maxsize=1 << 16)
def latency_column(producer: Instruction, reader: Instruction, used: int, sm: str) -> str:
    """The name of the column of ``latencies`` for a reader: how it uses the registers of mask ``used``.

    It is the role of ``latencies.role``, ``jump`` for the address that RET takes from registers, or ``lanes`` for data
    that lanes exchange. ``low`` or ``high`` is appended for half of a pair of registers: the low half of a wide product
    is available earlier, and the high half of a wide addend is read later.
    """
    column = role(reader, used, sm)
    if column == "branch" and used & VECTOR:
        column = "jump"
    if column == "data" and reader.name in _LANE_EXCHANGES:
        column = "lanes"
    if "WIDE" in producer.modifiers and used.bit_length() != access(producer).writes.bit_length():
        column += " low"
    if reader.name in ("IMAD", "UIMAD") and {"WIDE", "HI"} & set(reader.modifiers) and not used & ~_ODD_REGISTERS:
        column += " high"
    return column


def queue_names(instruction: Instruction, sm: str) -> tuple[str | None, str]:
    """The names of two queues that an instruction passes in the order of issue.

    The first orders when results are written; it is None if results of this kind may overtake each other. The second
    orders when operands are read.
    """
    unit = pipe_use(instruction, sm)
    results = str(unit.pipe) if unit.pipe in IN_ORDER else None
    return results, MEMORY if unit.address_cycles else results or instruction.name


def drains(instruction: Instruction) -> bool:
    """Whether the operands of everything before an instruction in the queue of memory have been read once it is
    through: ptxas overwrites the operand of a store after a BAR.SYNC without another wait."""
    return instruction.name == "BAR" and "SYNC" in instruction.modifiers and instruction.guard is None


def waits(instruction: Instruction) -> int:
    """The mask of scoreboards that an instruction waits for. ``DEPBAR.LE SB0, 0x1, {3,2}`` waits for 3 and 2, and until
    one load is left at 0, which counts as a wait for 0."""
    boards = set(instruction.control.waits)
    if instruction.name == "DEPBAR":
        for operand in instruction.operands:
            if not operand.startswith("0x"):
                boards |= {int(number) for number in re.findall(r"\d+", operand)}
    return sum(1 << board for board in boards)
