"""Follows what is under way on every path of a warp: results that are not there yet, and operands that are still read.

A forward data-flow analysis. On entry to each block it knows for each earlier instruction that may matter the
registers concerned, the least number of cycles since its issue, and the scoreboards of which one has to be waited for.
Where paths meet, the union counts. ``meetings`` yields each pair of instructions whose registers meet while the earlier
one is under way; ``hazards`` judges them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeVar

from kernelproof.sass.decoding import Function, Instruction
from kernelproof.sass.paths import Paths, Point
from kernelproof.sass.registers import RegisterAccess, access
from kernelproof.sass.scheduling import SETTLE, SchedulingFacts, order

NEVER = ("!PT", "!UPT")  # guards of instructions that only fill time
VECTOR, UNIFORM = (1 << 256) - 1, (1 << 512) - (1 << 256)
MAX_STEPS = 100_000  # blocks walked until nothing changes; ptxas's largest kernels take a tenth


class Meets(StrEnum):
    """How two instructions meet: the later one reads a result of fixed latency, reads or overwrites a result that a
    scoreboard guards, or overwrites an operand that is still read."""

    FIXED = "fixed"
    READ = "read"
    OVERWRITE = "overwrite"
    OPERAND = "operand"


class RegisterMeeting(NamedTuple):
    """Two instructions by index, the mask of registers in which they meet, the least cycles between their issues
    (counted up to the horizon), and the scoreboards of the earlier one as a mask."""

    how: Meets
    earlier: int
    later: int
    registers: int
    cycles: int
    scoreboards: int


Fixed = tuple[int, int]  # an instruction of fixed latency, and the mask of its results
Guarded = tuple[int, int, int]  # an instruction, the mask of its registers, and the mask of scoreboards that guard them
Item = TypeVar("Item", Fixed, Guarded)


@dataclass
class FlightState:
    """What is under way at a place: each item with the least number of cycles since it was issued.

    ``results``: of fixed latency. ``loads``: results that scoreboards guard. ``reads``: operands that are read late.
    """

    results: dict[Fixed, int] = field(default_factory=dict)
    loads: dict[Guarded, int] = field(default_factory=dict)
    reads: dict[Guarded, int] = field(default_factory=dict)

    def copy(self) -> FlightState:
        return FlightState(dict(self.results), dict(self.loads), dict(self.reads))

    def join(self, other: FlightState) -> bool:
        """Add what another path has under way; whether anything changed."""
        joined = (_join(self.results, other.results), _join(self.loads, other.loads), _join(self.reads, other.reads))
        return any(joined)


def _join(own: dict[Item, int], other: dict[Item, int]) -> bool:
    changed = False
    for key, cycles in other.items():
        if cycles < own.get(key, cycles + 1):
            own[key], changed = cycles, True
    return changed


@dataclass(frozen=True)
class _Step:
    """What the analysis needs of an instruction, as masks. ``takes``: the scoreboards that its results, and that its
    results or operands take. ``waits``: those that it waits for. ``queues``: see ``scheduling.order``."""

    reads: int
    writes: int
    guarded: bool
    complement: str
    waits: int
    stall: int
    results: int
    loads: int
    late: int
    result_board: int
    boards: int
    queues: tuple[str | None, str]
    horizon: int


class InFlight:
    """The analysis of one function. ``horizon``: for how many cycles a result of fixed latency is followed, given its
    producer."""

    def __init__(
        self, function: Function, facts: SchedulingFacts, horizon: Callable[[Instruction], int] | None = None
    ) -> None:
        self.code = function.instructions
        self.paths = Paths(function)
        self.complete = True
        self._horizon = horizon or facts.longest
        self._steps = [self._step(instruction, facts, function.sm) for instruction in self.code]
        self._entries = self._solved()

    def meetings(self) -> Iterator[RegisterMeeting]:
        """Every meeting on some path, in order of blocks; those of several calls of a subroutine once for each."""
        for point, entry in self._entries.items():
            found: list[RegisterMeeting] = []
            self._walk(point.start, entry.copy(), found)
            yield from found

    def _solved(self) -> dict[Point, FlightState]:
        """The state on entry to each block. Blocks that only unknown jumps reach begin with nothing under way."""
        entries = {Point(0): FlightState()}
        self._spread([Point(0)], entries)
        reached = {point.start for point in entries}
        for start in self.paths.ends:
            if start not in reached and Point(start) not in entries:
                entries[Point(start)] = FlightState()
                self._spread([Point(start)], entries)
        return entries

    def _spread(self, pending: list[Point], entries: dict[Point, FlightState]) -> None:
        steps = 0
        while pending:
            point = pending.pop()
            steps += 1
            if steps > MAX_STEPS:
                self.complete = False
                return
            leaving = self._walk(point.start, entries[point].copy(), None)
            for follower, known in self.paths.after(point):
                state = leaving if known else FlightState()
                if follower not in entries:
                    entries[follower] = state.copy()
                elif not entries[follower].join(state):
                    continue
                if follower not in pending:
                    pending.append(follower)

    def _walk(self, start: int, state: FlightState, found: list[RegisterMeeting] | None) -> FlightState:
        """The state after a block. ``found``: where meetings go."""
        for at in range(start, self.paths.ends[start]):
            step = self._steps[at]
            if step.waits:
                _wait(state, step.waits)
            if found is not None:
                self._meet(at, step, state, found)
            self._issue(at, step, state)
        return state

    def _meet(self, at: int, step: _Step, state: FlightState, found: list[RegisterMeeting]) -> None:
        reads, writes = step.reads, step.writes

        def met(how: Meets, earlier: int, registers: int, cycles: int, boards: int = 0) -> None:
            # Where the two have opposite guards no lane executes both.
            if registers and not (step.complement and self.code[earlier].guard == step.complement):
                found.append(RegisterMeeting(how, earlier, at, registers, cycles, boards))

        for (earlier, mask), cycles in state.results.items():
            if mask & reads:
                met(Meets.FIXED, earlier, mask & reads, cycles)
        for (earlier, mask, boards), cycles in state.loads.items():
            if mask & (reads | writes):
                met(Meets.READ, earlier, mask & reads, cycles, boards)
                if not self._same_queue(earlier, step, 0):
                    met(Meets.OVERWRITE, earlier, mask & writes & ~reads, cycles, boards)
        for (earlier, mask, boards), cycles in state.reads.items():
            # What passes the same queue writes its result after the operands before it were read.
            if mask & writes and not self._same_queue(earlier, step, 1):
                met(Meets.OPERAND, earlier, mask & writes, cycles, boards)

    def _same_queue(self, earlier: int, step: _Step, queue: int) -> bool:
        """Whether the result of ``step`` comes after the results (0) or the reads (1) of an earlier instruction."""
        own = step.queues[queue]
        return bool(step.loads) and own is not None and self._steps[earlier].queues[queue] == own

    def _issue(self, at: int, step: _Step, state: FlightState) -> None:
        """Let the cycles of an instruction pass, and add what it starts."""
        overwritten = 0 if step.guarded else step.writes
        if state.results:
            state.results = self._aged_results(at, step, state.results, overwritten)
        if state.loads:
            board = (step.result_board, 0)
            state.loads = self._aged(at, step, state.loads, overwritten, board)
        if state.reads:
            board = (step.boards, 1)
            state.reads = self._aged(at, step, state.reads, overwritten, board)
        if step.results and step.stall < step.horizon:
            state.results[at, step.results] = step.stall
        if step.loads:
            state.loads[at, step.loads, step.result_board] = step.stall
        if step.late:
            state.reads[at, step.late, step.boards] = step.stall

    def _aged_results(self, at: int, step: _Step, results: dict[Fixed, int], overwritten: int) -> dict[Fixed, int]:
        aged: dict[Fixed, int] = {}
        for (earlier, mask), cycles in results.items():
            left, later = mask & ~overwritten, cycles + step.stall
            if left and earlier != at and later < self._steps[earlier].horizon:
                key = earlier, left
                aged[key] = min(later, aged.get(key, later))
        return aged

    def _aged(
        self, at: int, step: _Step, items: dict[Guarded, int], overwritten: int, board: tuple[int, int]
    ) -> dict[Guarded, int]:
        """``board``: the scoreboards that the instruction takes, and the queue in whose order it frees them: they stand
        for what is before it in the queue, too."""
        aged: dict[Guarded, int] = {}
        taken, queue = board
        for (earlier, mask, boards), cycles in items.items():
            left, later = mask & ~overwritten, min(cycles + step.stall, SETTLE)
            if left and earlier != at:
                own = step.queues[queue]
                same = own is not None and self._steps[earlier].queues[queue] == own
                key = earlier, left, boards | (taken if same else 0)
                aged[key] = min(later, aged.get(key, later))
        return aged

    def _step(self, instruction: Instruction, facts: SchedulingFacts, sm: str) -> _Step:
        control, accessed = instruction.control, access(instruction)
        if instruction.guard in NEVER:
            accessed = RegisterAccess(0, 0)
        active = instruction.guard not in NEVER
        result = 1 << control.write_barrier if active and control.write_barrier is not None else 0
        operand = 1 << control.read_barrier if active and control.read_barrier is not None else 0
        # ptxas gives some opcodes a scoreboard, and does not always wait for it: of these nothing is known.
        waited = instruction.name in facts.scoreboards
        late = (VECTOR if instruction.name in facts.late else 0) | (
            UNIFORM if instruction.name in facts.late_uniform else 0
        )
        guard = instruction.guard or ""
        return _Step(
            reads=accessed.reads,
            writes=accessed.writes,
            guarded=instruction.guard is not None,
            complement=(guard[1:] if guard.startswith("!") else f"!{guard}") if guard else "",
            waits=_waits(instruction),
            stall=max(1, control.stall),
            results=0 if waited or result else accessed.writes,
            loads=accessed.writes if waited else 0,
            late=accessed.reads & late,
            result_board=result,
            boards=result | operand,
            queues=order(instruction, sm),
            horizon=self._horizon(instruction),
        )


def _wait(state: FlightState, boards: int) -> None:
    """Drop what one of these scoreboards guards, unless it was only just taken."""
    for name in ("loads", "reads"):
        items: dict[Guarded, int] = getattr(state, name)
        if any(key[2] & boards for key in items):
            kept = {key: cycles for key, cycles in items.items() if cycles < SETTLE or not key[2] & boards}
            setattr(state, name, kept)


def _waits(instruction: Instruction) -> int:
    """The scoreboards that an instruction waits for, as a mask. ``DEPBAR.LE SB0, 0x1, {3,2}`` waits for 2 and 3; how
    many loads it leaves under way at 0 is not followed."""
    boards = set(instruction.control.waits)
    if instruction.name == "DEPBAR":
        for operand in instruction.operands:
            if not operand.startswith("0x"):
                boards |= {int(number) for number in re.findall(r"\d+", operand)}
    return sum(1 << board for board in boards)
