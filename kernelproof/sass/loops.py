"""Loops of a matrix product by their role, and the main loop among them.

A loop with MMAs steps through k, or through tiles of the output where k is unrolled whole: then every turn stores its
results, so that no way from its MMAs to its next turn avoids a store. Warps that only copy (by TMA, on Hopper) have a
loop of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain

from kernelproof.sass.decoding import Instruction
from kernelproof.sass.flow import Block, Graph, Loop
from kernelproof.sass.pipes import MMA
from kernelproof.sass.trips import trips

COPIES = frozenset(("UTMALDG", "UBLKCP", "LDGSTS"))
STORES = frozenset(("STG", "ST", "UTMASTG", "UTMAREDG", "RED", "REDG", "ATOMG", "ATOM"))
WAITS = frozenset(("SYNCS", "USETMAXREG", "NANOSLEEP", "LD", "LDG", "LDS", "BAR"))
SPIN = 12  # most instructions of a loop that only waits


class Role(StrEnum):
    """``TILES``: a turn is a tile of the output; ``MMA``: a step of k; ``WAIT``: tries again until something came."""

    TILES = "tiles"
    MMA = "mma"
    COPY = "copy"
    STORE = "store"
    WAIT = "wait"
    OTHER = "other"


@dataclass(frozen=True)
class CodeLoop:
    """A loop and one turn of it, on its longest way without waits that have to be repeated.

    ``turns``: how often it runs, None where that depends on the problem.
    """

    loop: Loop
    role: Role
    turn: tuple[Instruction, ...]
    turns: int | None

    @property
    def mmas(self) -> int:
        """MMAs of a warp in one turn."""
        return count(self.turn, MMA)


class Loops:
    """The loops of a function by what they are for, those around others first."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @cached_property
    def waits(self) -> frozenset[int]:
        """Blocks of loops that only wait."""
        return frozenset(chain.from_iterable(loop.blocks for loop in self.graph.loops if self._role(loop) is Role.WAIT))

    @cached_property
    def all(self) -> tuple[CodeLoop, ...]:
        loops = sorted(self.graph.loops, key=lambda loop: (-len(loop.blocks), loop.header))
        return tuple(CodeLoop(loop, self._role(loop), self.turn(loop), self._turns(loop)) for loop in loops)

    @cached_property
    def main(self) -> CodeLoop | None:
        """The loop over k with the most MMAs; None where k is unrolled whole, or nothing multiplies."""
        return max((item for item in self.all if item.role is Role.MMA), key=lambda item: item.mmas, default=None)

    @cached_property
    def tiles(self) -> CodeLoop | None:
        """The loop over tiles of a persistent kernel; None where each CTA has one tile, or k has an outer loop."""
        around = [item for item in self.all if item.role is Role.TILES]
        if self.main is not None:
            around = [item for item in around if self.main.loop.blocks < item.loop.blocks]
        return min(around, key=lambda item: len(item.loop.blocks), default=None)

    @cached_property
    def producer(self) -> CodeLoop | None:
        """The innermost loop of warps that copy and do not multiply; None where those that multiply copy, too."""
        copies = [item for item in self.all if item.role is Role.COPY]
        innermost = [item for item in copies if not any(other.loop.blocks < item.loop.blocks for other in copies)]
        around = [item.loop.blocks for item in self.all if item.role in (Role.TILES, Role.MMA)]
        own = [item for item in innermost if not any(item.loop.blocks < blocks for blocks in around)]
        return max(own, key=lambda item: count(item.turn, COPIES), default=None)

    def turn(self, loop: Loop) -> tuple[Instruction, ...]:
        """The instructions of one turn, on its longest way; ways that wait again, or store where others need not, are
        taken only where there is no other."""

        def weight(block: Block) -> int:
            avoided = block.index in self.waits or (block.index in storing and steps)
            return -1_000_000 if avoided else len(block.instructions)

        storing = frozenset(block for block in loop.blocks if count(self.graph.blocks[block].instructions, STORES))
        steps = self._role(loop) is Role.MMA
        return self.code(self.graph.longest([loop.header], loop.blocks, weight))

    def code(self, blocks: Iterable[int]) -> tuple[Instruction, ...]:
        return tuple(chain.from_iterable(self.graph.blocks[block].instructions for block in blocks))

    def _role(self, loop: Loop) -> Role:
        code = self.code(sorted(loop.blocks))
        if count(code, MMA):
            inner = (other for other in self.graph.loops if other.blocks < loop.blocks)
            if any(count(self.code(other.blocks), MMA) for other in inner):
                return Role.TILES if count(code, STORES) else Role.OTHER
            return Role.TILES if self._always_stores(loop) else Role.MMA
        if count(code, COPIES):
            return Role.COPY
        if count(code, STORES | {"STS", "STSM"}):
            return Role.STORE
        return Role.WAIT if len(code) <= SPIN and count(code, WAITS) else Role.OTHER

    def _always_stores(self, loop: Loop) -> bool:
        """Whether no way leads from a loop's MMAs to its next turn without a block that stores."""
        blocks = self.graph.blocks
        pending = [block for block in loop.blocks if count(blocks[block].instructions, MMA)]
        if not any(count(blocks[block].instructions, STORES) for block in loop.blocks):
            return False
        reached = set(pending)
        while pending:
            block = pending.pop()
            if count(blocks[block].instructions, STORES):
                continue
            if block in loop.latches:
                return False
            fresh = {successor for successor in blocks[block].successors if successor in loop.blocks} - reached
            reached |= fresh
            pending += fresh
        return True

    def _turns(self, loop: Loop) -> int | None:
        body = self.code(self.graph.longest([loop.header], loop.blocks, lambda block: len(block.instructions)))
        way = sorted(self.graph.dominators[loop.header] - {loop.header})
        return trips(self.code(way), body)


def count(instructions: Iterable[Instruction], names: frozenset[str] | set[str]) -> int:
    """How many of the instructions have one of these names."""
    return sum(instruction.name in names for instruction in instructions)
