"""Compares the hazards of drawn programs with those that a walk along every single path finds."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from kernelproof.sass import Function, hazards
from kernelproof.sass.scheduling import SETTLE, SchedulingFacts, facts
from tests.kernelproof.test_sass_hazards import function

TARGET = "sm_80"
SUMS, LOADED = ("R0", "R1", "R2", "R3"), ("R8", "R9", "R10")  # registers that integer sums write, and that loads write
MOST_JUMPS = 4  # jumps of a path; a loop is walked a second time by two


class Line(NamedTuple):
    """An instruction: a sum of two registers, a load if ``board`` is a scoreboard, or a jump to a line. A load from
    shared memory (``ordered``) is done after those before it; loads from global memory may overtake each other."""

    written: str = ""
    read: tuple[str, ...] = ()
    board: int | None = None
    target: int | None = None
    guard: str = ""
    stall: int = 1
    waits: tuple[int, ...] = ()
    ordered: bool = False

    def __str__(self) -> str:
        if self.target is not None:
            text = f"BRA @{self.target}"
        elif self.board is not None:
            text = f"LDS {self.written}, [R20]" if self.ordered else f"LDG.E {self.written}, desc[UR4][R20.64]"
        else:
            text = f"IADD3 {self.written}, {self.read[0]}, {self.read[1]}, RZ"
        board = "" if self.board is None else f" write={self.board}"
        waits = f" waits={''.join(map(str, self.waits))}" if self.waits else ""
        return f"{f'@{self.guard} ' if self.guard else ''}{text} ; stall={self.stall}{board}{waits}"


GUARDS = st.sampled_from(("", "", "P0", "!P0", "P1"))
WAITS = st.lists(st.integers(0, 2), max_size=2, unique=True).map(tuple)
ADDEND = st.sampled_from((*SUMS, *LOADED))
SUM = st.tuples(
    st.sampled_from(SUMS), st.tuples(ADDEND, ADDEND), st.none(), st.none(), GUARDS, st.integers(1, 6), WAITS
)
LOAD = st.tuples(
    st.sampled_from(LOADED), st.just(()), st.integers(0, 2), st.none(), GUARDS, st.integers(1, 3), WAITS, st.booleans()
)  # fmt: skip
JUMP = st.tuples(
    st.just(""), st.just(()), st.none(), st.integers(0, 8), st.sampled_from(("P0", "!P0", "P1")), st.integers(1, 5),
    st.just(()),
).map(lambda fields: Line(*fields))  # fmt: skip
CODE = st.lists(st.one_of(SUM, SUM, LOAD).map(lambda fields: Line(*fields)), min_size=2, max_size=7)


class Item(NamedTuple):
    """A result in flight: of which line, in which register, guarded by which scoreboards; cycles since its issue."""

    line: int
    register: str
    boards: frozenset[int]
    age: int


Found = set[tuple[int, str]]


def walk(lines: list[Line], at: int, flight: list[Item], jumps: int, code: Function, known: SchedulingFacts) -> Found:
    """The results that some path from a line on reads too early: line and register. ``flight``: what is in flight."""
    found: Found = set()
    while at < len(lines):
        line = lines[at]
        flight = [x for x in flight if not (x.boards & set(line.waits) and x.age >= SETTLE)]
        for item in flight:
            other = lines[item.line]
            if (
                line.guard
                and other.guard in (f"!{line.guard}", line.guard.removeprefix("!"))
                and other.guard != line.guard
            ):
                continue  # no lane executes both
            if item.register in line.read:
                latency = known.latency(
                    code.instructions[item.line], code.instructions[at], 1 << int(item.register[1:])
                )
                if other.board is not None or item.age < latency:
                    found.add((item.line, item.register))
            elif item.register == line.written and other.board is not None and not (line.ordered and other.ordered):
                found.add((item.line, item.register))
        flight = [x for x in flight if (line.guard or x.register != line.written) and x.line != at]
        taken = frozenset(() if line.board is None else (line.board,))
        # What is done in order is guarded by the scoreboards of later ones as well.
        flight = [
            x._replace(
                age=x.age + line.stall, boards=x.boards | taken if line.ordered and lines[x.line].ordered else x.boards
            )
            for x in flight
        ]
        if line.written:
            flight.append(Item(at, line.written, taken, line.stall))
        if line.target is not None and jumps < MOST_JUMPS:
            found |= walk(lines, line.target, flight, jumps + 1, code, known)
        at += 1
    return found


@settings(max_examples=150)
@given(CODE, st.lists(JUMP, max_size=2), st.data())
def test_hazards_are_those_of_all_single_paths(drawn: list[Line], jumps: list[Line], data: st.DataObject) -> None:
    lines = drawn
    for jump in jumps:
        lines.insert(data.draw(st.integers(0, len(lines))), jump)
    lines = [line if line.target is None else line._replace(target=line.target % len(lines)) for line in lines]
    code = function("\n".join(map(str, (*lines, "EXIT"))), TARGET)
    known = facts(TARGET)
    assert known is not None
    reported = {(hazard.earlier.address // 16, register) for hazard in hazards(code) for register in hazard.registers}
    assert reported == walk(lines, 0, [], 0, code, known)
