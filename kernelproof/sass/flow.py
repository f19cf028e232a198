"""Basic blocks of a function, its natural loops, and the longest way through a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from kernelproof.sass.decoding import BYTES, Function, Instruction

JUMPS = frozenset(("BRA", "JMP", "BRX", "JMX"))  # BSSY names a target too, but goes on to the next instruction
ENDS = frozenset(("EXIT", "RET", "KILL"))


@dataclass(frozen=True)
class Block:
    """Instructions with one entry and one exit; ``successors`` are indices of blocks."""

    index: int
    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """A natural loop: the blocks from which ``header`` is reached again, ``latches`` those that jump to it."""

    header: int
    latches: frozenset[int]
    blocks: frozenset[int]


class Graph:
    """The control flow of a function. ``blocks`` are in the order of addresses; unreachable ones have no loops."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.blocks = _blocks(function.instructions)

    @cached_property
    def predecessors(self) -> list[list[int]]:
        predecessors: list[list[int]] = [[] for _ in self.blocks]
        for block in self.blocks:
            for successor in block.successors:
                predecessors[successor].append(block.index)
        return predecessors

    @cached_property
    def dominators(self) -> list[frozenset[int]]:
        """For each block the blocks that every way from the entry passes; empty for an unreachable block."""
        everything = frozenset(range(len(self.blocks)))
        dominators = [frozenset((0,)), *(everything for _ in self.blocks[1:])]
        reached = self.reachable(0)
        changed = True
        while changed:
            changed = False
            for block in sorted(reached - {0}):
                before = [dominators[index] for index in self.predecessors[block] if index in reached]
                dominating = frozenset.intersection(*before) | {block}
                changed |= dominating != dominators[block]
                dominators[block] = dominating
        return [blocks if index in reached else frozenset() for index, blocks in enumerate(dominators)]

    def reachable(self, start: int) -> frozenset[int]:
        reached, pending = {start}, [start]
        while pending:
            for successor in self.blocks[pending.pop()].successors:
                if successor not in reached:
                    reached.add(successor)
                    pending.append(successor)
        return frozenset(reached)

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops; those with one header are one loop."""
        latches: dict[int, set[int]] = {}
        for block in self.blocks:
            for successor in block.successors:
                if successor in self.dominators[block.index]:
                    latches.setdefault(successor, set()).add(block.index)
        return [Loop(header, frozenset(ends), self._body(header, ends)) for header, ends in sorted(latches.items())]

    def _body(self, header: int, latches: Iterable[int]) -> frozenset[int]:
        body, pending = {header}, [latch for latch in latches if latch != header]
        while pending:
            block = pending.pop()
            if block not in body:
                body.add(block)
                pending += self.predecessors[block]
        return frozenset(body)

    def longest(self, starts: Iterable[int], within: frozenset[int], weight: Callable[[Block], int]) -> list[int]:
        """The heaviest way of blocks from any of ``starts`` to the end of ``within``, which takes no jump backwards
        to a block that dominates the jump."""
        ways: dict[int, tuple[int, list[int]]] = {}

        def way(index: int) -> tuple[int, list[int]]:
            if index not in ways:
                onward = [
                    way(successor)
                    for successor in self.blocks[index].successors
                    if successor in within and successor not in self.dominators[index]
                ]
                most, path = max(onward, key=lambda ahead: ahead[0], default=(0, []))
                ways[index] = weight(self.blocks[index]) + most, [index, *path]
            return ways[index]

        return max((way(start) for start in starts), key=lambda ahead: ahead[0], default=(0, []))[1]


def _blocks(instructions: tuple[Instruction, ...]) -> list[Block]:
    # ptxas also jumps by CALL.REL.NOINC; it is a call only where something returns.
    jumps = JUMPS if any(instruction.name == "RET" for instruction in instructions) else JUMPS | {"CALL"}
    ends = {at for at, instruction in enumerate(instructions) if instruction.name in jumps | ENDS}
    targets = {instruction.target for instruction in instructions if instruction.name in jumps}
    starts = [
        at for at, instruction in enumerate(instructions) if at == 0 or at - 1 in ends or instruction.address in targets
    ]
    at_address = {instructions[start].address: index for index, start in enumerate(starts)}
    blocks = []
    for index, (start, stop) in enumerate(zip(starts, [*starts[1:], len(instructions)], strict=True)):
        last = instructions[stop - 1]
        goes_on = last.name not in jumps | ENDS or conditional(last)
        following = [last.address + BYTES] if goes_on else []
        jump = [last.target] if last.name in jumps and last.target is not None else []
        successors = dict.fromkeys(at_address[address] for address in following + jump if address in at_address)
        blocks.append(Block(index, instructions[start:stop], tuple(successors)))
    return blocks


def conditional(jump: Instruction) -> bool:
    """Whether a jump or exit may let the warp go on: its guard, or a predicate among its operands."""
    return jump.guard is not None or any(operand.lstrip("!U").startswith("P") for operand in jump.operands)
