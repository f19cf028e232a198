"""Control flow of a function: its basic blocks, its natural loops, and the heaviest path through some blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from kernelproof.sass.decoding import BYTES, Function, Instruction

JUMPS = frozenset(("BRA", "JMP", "BRX", "JMX"))  # BSSY has a target too, but execution continues after it
ENDS = frozenset(("EXIT", "RET", "KILL"))


@dataclass(frozen=True)
class Block:
    """Instructions with one entry and one exit. ``successors``: indices of the blocks that may follow."""

    index: int
    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """A natural loop, by indices of blocks: ``header`` is its entry, ``latches`` jump back to it, ``blocks`` has
    all of them."""

    header: int
    latches: frozenset[int]
    blocks: frozenset[int]


class Graph:
    """The control flow of a function. ``blocks`` are in the order of addresses; ``blocks[0]`` is the entry."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.blocks = _blocks(function.instructions)

    @cached_property
    def predecessors(self) -> list[list[int]]:
        """For each block, the indices of the blocks that it may follow."""
        predecessors: list[list[int]] = [[] for _ in self.blocks]
        for block in self.blocks:
            for successor in block.successors:
                predecessors[successor].append(block.index)
        return predecessors

    @cached_property
    def dominators(self) -> list[frozenset[int]]:
        """The dominators of each block: the blocks on every path from the entry to it, itself included. Unreachable
        blocks have none."""
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
        """The blocks that some path from ``start`` reaches, ``start`` included."""
        reached, pending = {start}, [start]
        while pending:
            for successor in self.blocks[pending.pop()].successors:
                if successor not in reached:
                    reached.add(successor)
                    pending.append(successor)
        return frozenset(reached)

    @cached_property
    def loops(self) -> list[Loop]:
        """The natural loops, in the order of their headers. Loops that share a header count as one."""
        latches: dict[int, set[int]] = {}
        for block in self.blocks:
            for successor in block.successors:
                if successor in self.dominators[block.index]:
                    latches.setdefault(successor, set()).add(block.index)
        return [Loop(header, frozenset(ends), self._body(header, ends)) for header, ends in sorted(latches.items())]

    def _body(self, header: int, latches: Iterable[int]) -> frozenset[int]:
        """The blocks from which a latch can be reached without passing the header, and the header itself."""
        body, pending = {header}, [latch for latch in latches if latch != header]
        while pending:
            block = pending.pop()
            if block not in body:
                body.add(block)
                pending += self.predecessors[block]
        return frozenset(body)

    def longest(self, starts: Iterable[int], within: frozenset[int], weight: Callable[[Block], int]) -> list[int]:
        """The path with the largest sum of weights from one of ``starts`` through blocks of ``within``.

        The path takes no jump to a block that dominates the jump. It therefore passes each natural loop once, and the
        recursion ends.
        """
        heaviest: dict[int, tuple[int, list[int]]] = {}  # block -> weight and path from it

        def path_from(index: int) -> tuple[int, list[int]]:
            if index not in heaviest:
                onward = [
                    path_from(successor)
                    for successor in self.blocks[index].successors
                    if successor in within and successor not in self.dominators[index]
                ]
                most, path = max(onward, key=lambda ahead: ahead[0], default=(0, []))
                heaviest[index] = weight(self.blocks[index]) + most, [index, *path]
            return heaviest[index]

        return max((path_from(start) for start in starts), key=lambda ahead: ahead[0], default=(0, []))[1]


def _blocks(instructions: tuple[Instruction, ...]) -> list[Block]:
    """The basic blocks of a function, in the order of addresses."""
    # ptxas also jumps by CALL.REL.NOINC. It is a call only if the function has a RET.
    jumps = JUMPS if any(instruction.name == "RET" for instruction in instructions) else JUMPS | {"CALL"}
    ends = {at for at, instruction in enumerate(instructions) if instruction.name in jumps | ENDS}
    targets = {target for instruction in instructions if instruction.name in jumps for target in _targets(instruction)}
    starts = [
        at for at, instruction in enumerate(instructions) if at == 0 or at - 1 in ends or instruction.address in targets
    ]
    at_address = {instructions[start].address: index for index, start in enumerate(starts)}
    blocks = []
    for index, (start, stop) in enumerate(zip(starts, [*starts[1:], len(instructions)], strict=True)):
        last = instructions[stop - 1]
        falls_through = last.name not in jumps | ENDS or conditional(last)
        following = [last.address + BYTES] if falls_through else []
        jump = _targets(last) if last.name in jumps else []
        successors = dict.fromkeys(at_address[address] for address in following + jump if address in at_address)
        blocks.append(Block(index, instructions[start:stop], tuple(successors)))
    return blocks


def _targets(jump: Instruction) -> list[int]:
    """The addresses to which an instruction may jump."""
    return [*jump.targets, *([] if jump.target is None else [jump.target])]


def conditional(jump: Instruction) -> bool:
    """Whether execution may continue after a jump or exit. It may if the instruction has a guard or a predicate among
    its operands, or depends on whether the lanes of the warp have diverged (``.DIV``, ``.CONV``)."""
    return (
        jump.guard is not None
        or any(operand.lstrip("!U").startswith("P") for operand in jump.operands)
        or not {"DIV", "CONV"}.isdisjoint(jump.modifiers)
    )
