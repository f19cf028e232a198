"""Looks up the facts that the simulation needs of an instruction: resources, latencies and reasons for stalls."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from kernelproof.ground.chips import Chip
from kernelproof.sass.decoding import Instruction
from kernelproof.sass.latencies import scoreboard
from kernelproof.sass.pipes import LANES, WARPGROUP, Pipe, access_bytes, pipe_use


class Stall(StrEnum):
    """Why a warp does not issue, by the names of Nsight Compute's warp states."""

    SELECTED = "selected"
    NOT_SELECTED = "not_selected"
    WAIT = "wait"
    MATH_PIPE_THROTTLE = "math_pipe_throttle"
    MIO_THROTTLE = "mio_throttle"
    LG_THROTTLE = "lg_throttle"
    SHORT_SCOREBOARD = "short_scoreboard"
    LONG_SCOREBOARD = "long_scoreboard"
    BARRIER = "barrier"
    GMMA = "gmma"
    DISPATCH_STALL = "dispatch_stall"
    BRANCH_RESOLVING = "branch_resolving"
    NO_INSTRUCTION = "no_instruction"
    MEMBAR = "membar"


@dataclass(frozen=True)
class Machine:
    """The hardware that a sub-core's warps run on, and the ring of stages in shared memory that they use.

    ``sub_cores``: sub-cores of the SM that run the same warps and share its memory unit. ``l2_bytes``: bytes per clock
    that the SM gets from the L2. ``l2_cycles``: latency of a load from the L2 if the queue is empty, by default that of
    an A100. ``fill_bytes``: bytes that TMA loads into one stage of the ring. ``stages``: stages of the ring.
    ``copy_groups``: how many of a warp's cp.async groups copy anything (the last iterations of a main loop commit empty
    groups); by default all.
    """

    sm: str
    chip: Chip | None = None
    sub_cores: int = 1
    l2_bytes: float = inf
    l2_cycles: float = 262
    fill_bytes: float = 0
    stages: int = 1
    copy_groups: int | None = None


class Kind(StrEnum):
    """How an instruction uses resources that warps share, such as queues, barriers and rings."""

    PLAIN = "plain"
    LOCAL = "local"  # memory instruction that does not leave the SM
    COPY = "copy"  # cp.async
    LOAD = "load"
    STORE = "store"
    COMMIT = "commit"  # commit of a group of cp.async
    BARRIER = "barrier"
    WARPGROUP_MMA = "warpgroup mma"
    FILL = "fill"  # TMA load
    WAIT = "wait for an mbarrier"
    RELEASE = "arrival at an mbarrier"


KINDS = {
    "LDGSTS": Kind.COPY, "LDG": Kind.LOAD, "LD": Kind.LOAD, "STG": Kind.STORE, "ST": Kind.STORE, "RED": Kind.STORE,
    "REDG": Kind.STORE, "LDGDEPBAR": Kind.COMMIT, "UTMALDG": Kind.FILL, "UBLKCP": Kind.FILL,
} | dict.fromkeys(WARPGROUP, Kind.WARPGROUP_MMA)  # fmt: skip
LONG_SCOREBOARD_KINDS = frozenset((Kind.LOAD, Kind.COPY, Kind.COMMIT, Kind.FILL, Kind.WAIT))


class Operation:
    """An instruction with everything that the simulation looks up for it. All warps and iterations share the object.

    ``stall``: cycles until the warp's next issue. ``busy_cycles``, ``address_cycles``: cycles for which it occupies its
    pipe and the address unit. ``result_cycles``, ``read_cycles``: cycles until the result is available, and until the
    operands have been read. ``bytes``: bytes that the warp moves beyond the SM. ``throttle``: the stall while its pipe
    is full; ``reason``: the stall of instructions that wait for its result. ``depbar``: see ``_depbar``.
    ``waits``: the scoreboards that it waits for. ``open_groups``: for a wait for groups of wgmma, how many may still be
    in flight; else None. ``ends_group``: for a wgmma, whether it ends a group; else None. ``members``: the warps that a
    barrier of the CTA waits for; 0 means all.
    """

    __slots__ = (
        "address_cycles",
        "busy_cycles",
        "bytes",
        "depbar",
        "ends_group",
        "instruction",
        "kind",
        "members",
        "open_groups",
        "pipe",
        "read_barrier",
        "read_cycles",
        "reason",
        "result_cycles",
        "stall",
        "throttle",
        "waits",
        "write_barrier",
    )  # fmt: skip

    def __init__(self, instruction: Instruction, machine: Machine) -> None:
        name, control = instruction.name, instruction.control
        use = pipe_use(instruction, machine.sm, machine.chip)
        self.instruction = instruction
        # A warp that yields does not issue in the next cycle: arXiv 2503.20481.
        self.stall, self.waits = max(2 if control.yields else 1, control.stall), control.waits
        self.write_barrier, self.read_barrier = control.write_barrier, control.read_barrier
        self.kind = _kind(instruction, use.address_cycles)
        self.pipe, self.busy_cycles, self.address_cycles = use.pipe, use.busy_cycles, use.address_cycles
        release = scoreboard(machine.sm, instruction)
        self.result_cycles, self.read_cycles = release.result, release.read
        self.reason = Stall.LONG_SCOREBOARD if self.kind in LONG_SCOREBOARD_KINDS else Stall.SHORT_SCOREBOARD
        self.bytes = LANES * access_bytes(instruction) if self.kind in (Kind.COPY, Kind.LOAD, Kind.STORE) else 0
        self.throttle = Stall.MATH_PIPE_THROTTLE
        if self.address_cycles:
            self.throttle = Stall.LG_THROTTLE if self.bytes else Stall.MIO_THROTTLE
        if instruction.guard == "!PT":  # never executed: ptxas inserts it for spacing
            self.kind, self.pipe, self.address_cycles = Kind.PLAIN, Pipe.NONE, 0
            self.write_barrier = self.read_barrier = None
        self.depbar = _depbar(instruction)
        self.ends_group = self.open_groups = None
        if name == "WARPGROUP" and "DEPBAR" in instruction.modifiers:
            self.open_groups = int(instruction.operands[-1], 16)
        if self.kind is Kind.WARPGROUP_MMA:
            self.ends_group = any(operand.startswith("gsb") for operand in instruction.operands)
        self.members = 0
        if self.kind is Kind.BARRIER and len(instruction.operands) > 1 and instruction.operands[-1].startswith("0x"):
            self.members = int(instruction.operands[-1], 16) // LANES


def _kind(instruction: Instruction, address_cycles: int) -> Kind:
    """The kind of an instruction. ``address_cycles`` is not 0 if it goes through the address unit."""
    name, modifiers = instruction.name, instruction.modifiers
    if name == "SYNCS":
        if "TRYWAIT" in modifiers:
            return Kind.WAIT
        return Kind.RELEASE if "ARRIVE" in modifiers else Kind.PLAIN
    if name == "BAR" and ("SYNC" in modifiers or "RED" in modifiers):
        return Kind.BARRIER
    return KINDS.get(name, Kind.LOCAL if address_cycles else Kind.PLAIN)


def _depbar(instruction: Instruction) -> tuple[int, int] | None:
    """The scoreboard that a DEPBAR waits for, and how many instructions may still hold it after the wait. None for
    other instructions. For example, ``DEPBAR.LE SB0, 0x1`` gives (0, 1)."""
    if instruction.name != "DEPBAR" or not instruction.operands:
        return None
    barrier, *most = instruction.operands
    if not barrier.startswith("SB"):
        return None
    return int(barrier.removeprefix("SB")), int(most[0], 16) if most else 0
