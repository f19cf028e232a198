"""Finds the paths of a warp through a function and its subroutines: which instructions may follow which.

``Graph`` (flow) merges the callers of a subroutine. Here a subroutine has a copy of its blocks for each call, so that
instructions in flight at one call do not seem to be in flight after another. Indirect jumps lead to the targets of
their table, or nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kernelproof.sass.decoding import Function
from kernelproof.sass.flow import ENDS, conditional

BRANCHES = frozenset(("BRA", "JMP"))
INDIRECT = frozenset(("BRX", "BRXU", "JMX", "JMXU"))
BLOCK_ENDS = BRANCHES | INDIRECT | ENDS | {"CALL"}  # instructions after which the next one need not be executed
MAX_DEPTH = 4  # how deeply nested calls are followed; ptxas nests its own subroutines twice at most


class Point(NamedTuple):
    """The start of a block: the index of its first instruction, and the indices to which the calls around it return,
    the innermost last."""

    start: int
    returns: tuple[int, ...] = ()


class Paths:
    """The blocks of a function, and which of them may follow each other.

    ``ends``: for the index of a block's first instruction, the index after its last one.
    """

    def __init__(self, function: Function) -> None:
        self.code = function.instructions
        self._index = {instruction.address: at for at, instruction in enumerate(self.code)}
        self._has_returns = any(instruction.name == "RET" for instruction in self.code)
        starts = {0}
        for at, instruction in enumerate(self.code):
            if instruction.name in BLOCK_ENDS:
                starts.add(at + 1)
                targets = (instruction.target, *instruction.targets)
                starts.update(self._index[target] for target in targets if target in self._index)
        ordered = sorted(start for start in starts if start < len(self.code))
        self.ends = dict(zip(ordered, [*ordered[1:], len(self.code)], strict=True))

    def after(self, point: Point) -> Iterator[tuple[Point, bool]]:
        """The points that may follow a block. Each comes with whether the state of the registers is known there, which
        it is not after a call of another function."""
        end = self.ends[point.start]
        last = self.code[end - 1]
        following = [Point(end, point.returns)] if end < len(self.code) else []
        if last.name not in BLOCK_ENDS or conditional(last):
            yield from ((point, True) for point in following)
        target = self._index.get(last.target) if last.target is not None else None
        if last.name in BRANCHES and target is not None:
            yield Point(target, point.returns), True
        elif last.name in INDIRECT:
            yield from ((Point(self._index[address], point.returns), True) for address in last.targets)
        elif last.name == "CALL" and target is None:
            yield from ((point, False) for point in following)
        elif last.name == "CALL" and target is not None:
            # ptxas also jumps by CALL.REL.NOINC. It is a call only if the function has a RET.
            if not self._has_returns:
                yield Point(target, point.returns), True
            elif len(point.returns) < MAX_DEPTH:
                yield Point(target, (*point.returns, end)), True
        elif last.name == "RET" and point.returns and point.returns[-1] in self.ends:
            yield Point(point.returns[-1], point.returns[:-1]), True
