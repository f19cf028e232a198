"""Finds synchronisation that is issued before a fence, or the initialisation of an mbarrier, has taken effect.

Such a fence or initialisation has no result in a register. It takes a scoreboard, and frees it when it has taken
effect. ptxas's own output waits for that, on every path, before anything by which other threads or copies may learn of
the effect.

On sm_90 and sm_100 a fence of the CTA (``MEMBAR.ALL.CTA``) takes a scoreboard, that of operands, and ptxas waits for it
in the next instruction. On sm_80 and sm_120, and in fences of a wider scope, it takes none.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelproof.sass.decoding import Function, Instruction
from kernelproof.sass.in_flight import NEVER
from kernelproof.sass.paths import Paths, Point
from kernelproof.sass.pipes import GLOBAL_ACCESSES, SHARED_ACCESSES
from kernelproof.sass.scheduling import SETTLE, waits

# Barriers, and arrivals at mbarriers. SYNCS stands for all but initialisations, which take effect in their order.
_BARRIERS = frozenset(("BAR", "UCGABAR_ARV", "SYNCS"))
# Copies, products and commits, which other units than the warp execute.
_ASYNCHRONOUS = ("UTMASTG", "UTMAREDG", "UTMALDG", "UBLKCP", "UTCBAR", "UTCHMMA", "UTMACMDFLUSH")
_AFTER_FENCE = _BARRIERS.union(_ASYNCHRONOUS)
_AFTER_MEMBAR = _AFTER_FENCE | GLOBAL_ACCESSES | SHARED_ACCESSES | {"FENCE"}
_LATE_MEMBARS = ("sm_90", "sm_10")  # architectures whose fences of the CTA take a scoreboard


def unawaited(function: Function) -> Iterator[tuple[Instruction, Instruction, str]]:
    """Pairs of an instruction that takes effect late and one that must not be issued before that, if on some path
    nothing waits in between. Each pair comes with the reason, as a clause of a message; a late instruction is in one
    pair at most."""
    paths = Paths(function)
    for start, end in paths.ends.items():
        for at in range(start, end):
            late = paths.code[at]
            if _is_late(late, function.sm) and late.guard not in NEVER:
                early = _first_early(paths, Point(start), at)
                if early is not None:
                    yield late, early, _reason(late, early)


def _is_late(instruction: Instruction, sm: str) -> bool:
    """Whether an instruction takes effect some time after its issue, and has no result in a register."""
    if instruction.name == "FENCE":
        return "ASYNC" in instruction.modifiers
    if instruction.name == "MEMBAR":
        return "CTA" in instruction.modifiers and sm.startswith(_LATE_MEMBARS)
    return _initialises(instruction)


def _initialises(instruction: Instruction) -> bool:
    """Whether an instruction initialises an mbarrier."""
    return instruction.name == "SYNCS" and "EXCH" in instruction.modifiers


def _needs(late: Instruction, later: Instruction) -> bool:
    """Whether the effect of ``late`` must have come before ``later`` is issued."""
    if later.guard in NEVER or (later.guard is not None and _opposite(later.guard) == late.guard):
        return False
    if late.name == "FENCE":
        return later.name in _AFTER_FENCE
    if late.name == "MEMBAR":
        return later.name in _AFTER_MEMBAR
    return later.name in _BARRIERS and not _initialises(later)


def _opposite(guard: str) -> str:
    """The guard that holds where this one does not."""
    return guard[1:] if guard.startswith("!") else f"!{guard}"


def _first_early(paths: Paths, point: Point, at: int) -> Instruction | None:
    """The first instruction, on some path from the one at index ``at`` of a block, that needs its effect before
    anything has waited for it."""
    late = paths.code[at]
    board = _board(late)
    mask = 0 if board is None else 1 << board
    pending, seen = [(point, at + 1)], set[Point]()
    while pending:
        point, start = pending.pop()
        # A wait in the cycle after the scoreboard was taken does not see it.
        cycles = max(1, late.control.stall) if start == at + 1 else SETTLE
        is_over = False  # does the path end in this block?
        for index in range(start, paths.ends[point.start]):
            later = paths.code[index]
            replaced = late.name == later.name == "MEMBAR"  # it waits for what the earlier one waits for
            if later is late or replaced or (waits(later) & mask and cycles >= SETTLE):
                is_over = True
                break
            if _needs(late, later):
                return later
            cycles += max(1, later.control.stall)
        if not is_over:
            after = [follower for follower, known in paths.after(point) if known and follower not in seen]
            seen.update(after)
            pending += [(follower, follower.start) for follower in after]
    return None


def _board(late: Instruction) -> int | None:
    """The scoreboard that is freed when an instruction has taken effect."""
    return late.control.read_barrier if late.name == "MEMBAR" else late.control.write_barrier


def _reason(late: Instruction, early: Instruction) -> str:
    """Why a pair is a hazard, as a clause of a message."""
    board = _board(late)
    waited = "it takes no scoreboard" if board is None else f"nothing has waited for scoreboard {board}"
    return f"{early.name} is issued before {late.name} has taken effect: {waited}"
