"""Walks the paths that follow single instructions of machine code, to find registers that are used too early.

A schedule consists of stall counts and scoreboards. If a test changes it, an instruction may use a register before the
result is there. ``kernelproof.sass.hazards`` finds this by a data-flow analysis; here is a second, independent way. It
asks for more: every opcode to which ptxas gave a scoreboard in this function counts as one that must be waited for, and
every use of a result of fixed latency within ``FOLLOWED`` cycles counts, whether its latency is known or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kernelproof.sass import Function, access, queue_names, waits
from kernelproof.sass.in_flight import NEVER
from kernelproof.sass.paths import Paths, Point
from kernelproof.sass.registers import UNIFORM, VECTOR
from kernelproof.sass.scheduling import MEMORY, SETTLE, SchedulingFacts, drains, facts, latency_column, latency_row

FOLLOWED = 40  # cycles for which results of fixed latency are followed


class Use(NamedTuple):
    """An instruction that uses registers of an earlier one without a wait for it.

    ``earlier``, ``later``: indices of the two instructions. ``how``: ``fixed`` if the later one reads a result of fixed
    latency; ``result`` if it reads or overwrites a result that a scoreboard guards; ``operand`` if it overwrites an
    operand that a scoreboard guards. ``registers``: the mask of these registers. ``cycles``: from the issue of the one
    to the issue of the other if ``how`` is ``fixed``, else 0.
    """

    earlier: int
    later: int
    how: str
    registers: int
    cycles: int


class _Pending(NamedTuple):
    """Which registers of an instruction are still in use by it, ``cycles`` after its issue on a path.

    ``fixed``, ``result`` and ``operand`` are masks of registers, named after the kinds of ``Use.how``. The masks
    ``result_boards`` and ``operand_boards`` have the scoreboards that guard ``result`` and ``operand``.
    """

    cycles: int
    fixed: int
    result: int
    operand: int
    result_boards: int
    operand_boards: int


class Walker:
    """Walks one function. ``original``: the function as ptxas scheduled it."""

    def __init__(self, function: Function, original: Function) -> None:
        schedule = facts(function.sm)
        assert schedule is not None
        self.facts: SchedulingFacts = schedule
        self.code, self.sm, self.paths = function.instructions, function.sm, Paths(function)
        self.results = set(schedule.scoreboards) | {
            item.name for item in original.instructions if item.control.write_barrier is not None
        }
        self.operands = set(schedule.late | schedule.late_uniform) | {
            item.name for item in original.instructions if item.control.read_barrier is not None
        }

    def uses(self) -> set[Use]:
        """All uses without a wait, of every instruction."""
        starts = {at: start for start, end in self.paths.ends.items() for at in range(start, end)}
        return {use for at, start in starts.items() for use in self._uses_after(at, start)}

    def _uses_after(self, at: int, start: int) -> Iterator[Use]:
        """The uses of registers of the instruction with index ``at``, on all paths that follow it. ``start``: the index
        at which its block begins."""
        item = self.code[at]
        if item.guard in NEVER:
            return
        own, control = access(item), item.control
        guarded = item.name in self.results
        board = 0 if control.write_barrier is None else 1 << control.write_barrier
        operand_board = 0 if control.read_barrier is None else 1 << control.read_barrier
        first = _Pending(
            max(1, control.stall), 0 if guarded else own.writes, own.writes if guarded else 0,
            own.reads & (VECTOR | UNIFORM) if item.name in self.operands else 0, board, board | operand_board,
        )  # fmt: skip
        # Blocks that are still to be walked: each with the index to begin at, and what is pending there.
        todo, seen = [(Point(start), at + 1, first)], set[tuple[Point, _Pending]]()
        while todo:
            point, index, pending = todo.pop()
            found: list[Use] = []
            pending_at_end = self._along(at, point, index, pending, found)
            yield from found
            for follower, known in self.paths.after(point) if pending_at_end else ():
                if known and (follower, pending_at_end) not in seen:
                    seen.add((follower, pending_at_end))
                    todo.append((follower, follower.start, pending_at_end))

    def _along(self, at: int, point: Point, index: int, pending: _Pending, found: list[Use]) -> _Pending | None:
        """What is pending of the instruction ``at`` at the end of a block; None if nothing is. ``index``: the first
        instruction of the block to walk. Uses are appended to ``found``."""
        for later in range(index, self.paths.ends[point.start]):
            pending = self._step(at, later, pending, found)
            if later == at or not (pending.fixed or pending.result or pending.operand):
                return None
        return pending

    def _step(self, at: int, later: int, pending: _Pending, found: list[Use]) -> _Pending:
        """What is pending of the instruction ``at`` after the instruction ``later`` of the path. The uses by ``later``
        are appended to ``found``."""
        cycles, fixed, result, operand, result_boards, operand_boards = pending
        item, earlier = self.code[later], self.code[at]
        if cycles >= SETTLE:
            result = 0 if waits(item) & result_boards else result
            operand = 0 if waits(item) & operand_boards else operand
        if item.guard not in NEVER:
            own, queues, earlier_queues = access(item), queue_names(item, self.sm), queue_names(earlier, self.sm)
            # A queue serves its instructions in order. So an instruction in the same queue writes its result after the
            # earlier one has written its result (queue 0) or has read its operands (queue 1).
            loads = item.name in self.facts.scoreboards
            after_result = loads and queues[0] is not None and queues[0] == earlier_queues[0]
            after_operand = loads and queues[1] == earlier_queues[1]
            if earlier.guard is None or item.guard != _opposite(earlier.guard):
                touched = result & own.reads | (0 if after_result else result & own.writes & ~own.reads)
                overwritten = 0 if after_operand else operand & own.writes
                uses = ("fixed", fixed & own.reads), ("result", touched), ("operand", overwritten)
                found += [Use(at, later, how, mask, cycles if how == "fixed" else 0) for how, mask in uses if mask]
            if drains(item) and earlier_queues[1] == MEMORY:
                operand = 0
            if item.guard is None:
                fixed, result, operand = (mask & ~own.writes for mask in (fixed, result, operand))
            # An instruction of the same queue frees its scoreboards after the earlier one is through. So a wait for
            # them is a wait for the earlier instruction, too.
            taken = 0 if item.control.write_barrier is None else 1 << item.control.write_barrier
            either = taken | (0 if item.control.read_barrier is None else 1 << item.control.read_barrier)
            result_boards |= taken if queues[0] is not None and queues[0] == earlier_queues[0] else 0
            operand_boards |= either if queues[1] == earlier_queues[1] else 0
        cycles = min(FOLLOWED, cycles + max(1, item.control.stall))
        return _Pending(cycles, fixed if cycles < FOLLOWED else 0, result, operand, result_boards, operand_boards)

    def allowed(self, found: Use) -> bool:
        """Whether ptxas is known to let this use happen.

        For a result of fixed latency: at least as many cycles pass as the table has for the role of the reader or, if
        it has none for that role, as its longest latency. Else: ptxas does not always wait for the earlier opcode.
        """
        earlier, later = self.code[found.earlier], self.code[found.later]
        if found.how == "fixed":
            known = self.facts.latencies.get(latency_row(earlier, self.sm), {})
            predicates = found.registers & ~(VECTOR | UNIFORM)
            others = [bound for role, bound in known.items() if predicates or role not in ("branch", "guard")]
            role = latency_column(earlier, later, found.registers, self.sm)
            return found.cycles >= known.get(role, max(others, default=FOLLOWED))
        late = self.facts.late if found.registers & VECTOR else self.facts.late_uniform
        return earlier.name not in (self.facts.scoreboards if found.how == "result" else late)


def _opposite(guard: str) -> str:
    """The guard that holds where this one does not."""
    return guard[1:] if guard.startswith("!") else f"!{guard}"
