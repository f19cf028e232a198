"""Finds the instructions that are in flight on the paths of a warp, and the later ones that use their registers.

An instruction is in flight until its result is available and its operands have been read. This is a forward data-flow
analysis. On entry to each block it knows, for each instruction in flight, the registers concerned, the least number of
cycles since its issue, and a set of scoreboards; waiting for any of them suffices. Where paths join, an instruction
is in flight if it is in flight on any of them.

``dependencies`` yields each pair of instructions of which the later one uses registers of the earlier one while that is
in flight. ``hazards`` decides whether the later one waits long enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeVar

from kernelproof.sass.decoding import Function, Instruction
from kernelproof.sass.paths import Paths, Point
from kernelproof.sass.registers import UNIFORM, VECTOR, RegisterAccess, access
from kernelproof.sass.scheduling import MEMORY, SETTLE, SchedulingFacts, drains, queue_names, waits

NEVER = ("!PT", "!UPT")  # guards of instructions that only fill time
MAX_STEPS = 100_000  # most blocks that are walked until nothing changes; ptxas's largest kernels take a tenth


class DependencyKind(StrEnum):
    """What a later instruction does with registers of one in flight.

    ``FIXED``: it reads a result of fixed latency. ``READ`` and ``OVERWRITE``: it reads or overwrites a result that a
    scoreboard guards. ``OPERAND``: it overwrites an operand that may not have been read yet.
    """

    FIXED = "fixed"
    READ = "read"
    OVERWRITE = "overwrite"
    OPERAND = "operand"


class Dependency(NamedTuple):
    """A later instruction that uses registers of an earlier one in flight; both are indices into the function's code.

    ``registers``: the mask of registers that they have in common. ``cycles``: the least number of cycles between their
    issues; for other kinds than ``FIXED`` it is exact only below ``SETTLE``. ``scoreboards``: the mask of those that
    guard the earlier one's registers.
    """

    kind: DependencyKind
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
    """What is in flight at a point of the program: each item with the least number of cycles since its issue.

    ``fixed_results``: results of fixed latency. ``guarded_results``: results that scoreboards guard.
    ``late_operands``: operands that are read some time after issue.
    """

    fixed_results: dict[Fixed, int] = field(default_factory=dict)
    guarded_results: dict[Guarded, int] = field(default_factory=dict)
    late_operands: dict[Guarded, int] = field(default_factory=dict)

    def copy(self) -> FlightState:
        return FlightState(dict(self.fixed_results), dict(self.guarded_results), dict(self.late_operands))

    def join(self, other: FlightState) -> bool:
        """Adds what is in flight on another path, and returns whether anything changed."""
        joined = (
            _join(self.fixed_results, other.fixed_results),
            _join(self.guarded_results, other.guarded_results),
            _join(self.late_operands, other.late_operands),
        )
        return any(joined)


def _join(own: dict[Item, int], other: dict[Item, int]) -> bool:
    """Adds the items of another path to ``own`` with the smaller number of cycles. Returns whether ``own`` changed."""
    changed = False
    for key, cycles in other.items():
        if cycles < own.get(key, cycles + 1):
            own[key], changed = cycles, True
    return changed


@dataclass(frozen=True)
class _Step:
    """What the analysis needs to know of an instruction. Sets of registers and of scoreboards are masks.

    ``predicated``: whether it has a guard (@P). ``complement``: the opposite of its guard, or "" without one.
    ``stall``: cycles until the next issue. ``fixed_results``: the registers that it writes, if their latency is fixed;
    ``guarded_results``: those, if a scoreboard guards them. ``late_operands``: the registers that it reads some time
    after issue. ``result_board``: the scoreboard of its result; ``boards``: those of its result and its operands.
    ``waits``: scoreboards that it waits for. ``queues``: see ``scheduling.queue_names``. ``horizon``: for how many
    cycles its results of fixed latency are followed.
    """

    reads: int
    writes: int
    predicated: bool
    complement: str
    waits: int
    stall: int
    fixed_results: int
    guarded_results: int
    late_operands: int
    result_board: int
    boards: int
    queues: tuple[str | None, str]
    horizon: int


class InFlight:
    """The analysis of one function.

    ``horizon``: returns for how many cycles the result of an instruction of fixed latency is followed; by default its
    longest latency. ``complete``: False if the analysis ended at ``MAX_STEPS`` and may have missed dependencies.
    """

    def __init__(
        self, function: Function, facts: SchedulingFacts, horizon: Callable[[Instruction], int] | None = None
    ) -> None:
        self.code = function.instructions
        self.paths = Paths(function)
        self.complete = True
        self._horizon = horizon or facts.longest
        self._steps = [self._step(instruction, facts, function.sm) for instruction in self.code]
        self._entries = self._entry_states()

    def dependencies(self) -> Iterator[Dependency]:
        """Every dependency on some path, in the order of blocks; those in a subroutine once for each call of it."""
        for point, entry in self._entries.items():
            found: list[Dependency] = []
            self._walk(point.start, entry.copy(), found)
            yield from found

    def _entry_states(self) -> dict[Point, FlightState]:
        """The state on entry to each block. Blocks that only unknown jumps reach begin with nothing in flight."""
        entries = {Point(0): FlightState()}
        self._spread([Point(0)], entries)
        reached = {point.start for point in entries}
        for start in self.paths.ends:
            if start not in reached and Point(start) not in entries:
                entries[Point(start)] = FlightState()
                self._spread([Point(start)], entries)
        return entries

    def _spread(self, pending: list[Point], entries: dict[Point, FlightState]) -> None:
        """Walks pending blocks and adds their states to those of their followers, until nothing changes."""
        steps = 0
        while pending:
            point = pending.pop()
            steps += 1
            if steps > MAX_STEPS:
                self.complete = False
                return
            leaving = self._walk(point.start, entries[point].copy(), None)
            for follower, is_state_known in self.paths.after(point):
                state = leaving if is_state_known else FlightState()
                if follower not in entries:
                    entries[follower] = state.copy()
                elif not entries[follower].join(state):
                    continue
                if follower not in pending:
                    pending.append(follower)

    def _walk(self, start: int, state: FlightState, found: list[Dependency] | None) -> FlightState:
        """Returns the state after a block, and appends the block's dependencies to ``found``. Changes ``state``."""
        for at in range(start, self.paths.ends[start]):
            step = self._steps[at]
            if step.waits:
                _wait(state, step.waits)
            if found is not None:
                self._find(at, step, state, found)
            self._issue(at, step, state)
            if self.code[at].name == "USETMAXREG":
                state.fixed_results = {}  # its scoreboard is waited for, which takes longer than any fixed latency
            if drains(self.code[at]):
                pending = state.late_operands.items()
                state.late_operands = {key: age for key, age in pending if self._steps[key[0]].queues[1] != MEMORY}
        return state

    def _find(self, at: int, step: _Step, state: FlightState, found: list[Dependency]) -> None:
        """Appends the dependencies of instruction ``at`` on those in flight to ``found``."""
        reads, writes = step.reads, step.writes

        def add(kind: DependencyKind, earlier: int, registers: int, cycles: int, boards: int = 0) -> None:
            # If the two have opposite guards, no lane executes both.
            if registers and not (step.complement and self.code[earlier].guard == step.complement):
                found.append(Dependency(kind, earlier, at, registers, cycles, boards))

        for (earlier, mask), cycles in state.fixed_results.items():
            if mask & reads:
                add(DependencyKind.FIXED, earlier, mask & reads, cycles)
        for (earlier, mask, boards), cycles in state.guarded_results.items():
            if mask & (reads | writes):
                add(DependencyKind.READ, earlier, mask & reads, cycles, boards)
                if not self._same_queue(earlier, step, 0):
                    add(DependencyKind.OVERWRITE, earlier, mask & writes & ~reads, cycles, boards)
        for (earlier, mask, boards), cycles in state.late_operands.items():
            # An instruction writes its result after the operands of those before it in the same queue have been read.
            if mask & writes and not self._same_queue(earlier, step, 1):
                add(DependencyKind.OPERAND, earlier, mask & writes, cycles, boards)

    def _same_queue(self, earlier: int, step: _Step, queue: int) -> bool:
        """Whether a queue ensures that the result of ``step`` is written after an earlier instruction has written its
        result (``queue`` 0), or has read its operands (1)."""
        own = step.queues[queue]
        return bool(step.guarded_results) and own is not None and self._steps[earlier].queues[queue] == own

    def _issue(self, at: int, step: _Step, state: FlightState) -> None:
        """Adds the instruction's results and operands to the state, and lets its cycles pass."""
        overwritten = 0 if step.predicated else step.writes
        if state.fixed_results:
            state.fixed_results = self._aged_results(at, step, state.fixed_results, overwritten)
        if state.guarded_results:
            state.guarded_results = self._aged_items(at, step, state.guarded_results, overwritten, step.result_board, 0)
        if state.late_operands:
            state.late_operands = self._aged_items(at, step, state.late_operands, overwritten, step.boards, 1)
        if step.fixed_results and step.stall < step.horizon:
            state.fixed_results[at, step.fixed_results] = step.stall
        if step.guarded_results:
            state.guarded_results[at, step.guarded_results, step.result_board] = step.stall
        if step.late_operands:
            state.late_operands[at, step.late_operands, step.boards] = step.stall

    def _aged_results(self, at: int, step: _Step, results: dict[Fixed, int], overwritten: int) -> dict[Fixed, int]:
        """The results in flight after an instruction: older by its stall count, without what it overwrites."""
        aged: dict[Fixed, int] = {}
        for (earlier, mask), cycles in results.items():
            remaining, age = mask & ~overwritten, cycles + step.stall
            if remaining and earlier != at and age < self._steps[earlier].horizon:
                key = earlier, remaining
                aged[key] = min(age, aged.get(key, age))
        return aged

    def _aged_items(
        self, at: int, step: _Step, items: dict[Guarded, int], overwritten: int, taken: int, queue: int
    ) -> dict[Guarded, int]:
        """The items in flight after an instruction: older by its stall count, without what it overwrites.

        ``taken``: the mask of scoreboards that the instruction takes. It frees them in the order of the queue
        ``step.queues[queue]``. A wait for such a scoreboard is also a wait for everything ahead of the instruction in
        that queue, so the mask is added to the items of that queue.
        """
        aged: dict[Guarded, int] = {}
        for (earlier, mask, boards), cycles in items.items():
            remaining, age = mask & ~overwritten, min(cycles + step.stall, SETTLE)
            if remaining and earlier != at:
                name = step.queues[queue]
                in_queue = name is not None and self._steps[earlier].queues[queue] == name
                key = earlier, remaining, boards | (taken if in_queue else 0)
                aged[key] = min(age, aged.get(key, age))
        return aged

    def _step(self, instruction: Instruction, facts: SchedulingFacts, sm: str) -> _Step:
        """The facts about an instruction. One that never executes reads and writes nothing and takes no scoreboard."""
        control, accessed = instruction.control, access(instruction)
        if instruction.guard in NEVER:
            accessed = RegisterAccess(0, 0)
        active = instruction.guard not in NEVER
        result = 1 << control.write_barrier if active and control.write_barrier is not None else 0
        operand = 1 << control.read_barrier if active and control.read_barrier is not None else 0
        # ptxas gives some other opcodes a scoreboard too, but does not always wait for it. Those are not followed.
        waited = instruction.name in facts.scoreboards
        late = (VECTOR if instruction.name in facts.late else 0) | (
            UNIFORM if instruction.name in facts.late_uniform else 0
        )
        guard = instruction.guard or ""
        return _Step(
            reads=accessed.reads,
            writes=accessed.writes,
            predicated=instruction.guard is not None,
            complement=(guard[1:] if guard.startswith("!") else f"!{guard}") if guard else "",
            waits=waits(instruction),
            stall=max(1, control.stall),
            fixed_results=0 if waited or result else accessed.writes,
            guarded_results=accessed.writes if waited else 0,
            late_operands=accessed.reads & late,
            result_board=result,
            boards=result | operand,
            queues=queue_names(instruction, sm),
            horizon=self._horizon(instruction),
        )


def _wait(state: FlightState, boards: int) -> None:
    """Removes what one of these scoreboards guards, except what was issued less than ``SETTLE`` cycles ago."""
    for name in ("guarded_results", "late_operands"):
        items: dict[Guarded, int] = getattr(state, name)
        if any(key[2] & boards for key in items):
            kept = {key: cycles for key, cycles in items.items() if cycles < SETTLE or not key[2] & boards}
            setattr(state, name, kept)
