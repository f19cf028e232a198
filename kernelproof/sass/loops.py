"""Finds the role of each loop of a matrix product, and the main loop among them.

A loop with MMAs steps through k, or through tiles of the output if k is unrolled. In the second case each iteration
stores its results, so that every path from its MMAs to its next iteration passes a store. Warps that only copy (by TMA,
on Hopper) have a loop of their own.
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

# Opcodes of copies from global to shared memory, of stores to global memory, and of instructions by which a warp waits
# (a loop that polls reads the flag by a load).
COPIES = frozenset(("UTMALDG", "UBLKCP", "LDGSTS"))
STORES = frozenset(("STG", "ST", "UTMASTG", "UTMAREDG", "RED", "REDG", "ATOMG", "ATOM"))
WAITS = frozenset(("SYNCS", "USETMAXREG", "NANOSLEEP", "LD", "LDG", "LDS", "BAR"))
MAX_WAIT_LENGTH = 12  # most instructions of a loop that only waits


class Role(StrEnum):
    """What an iteration of a loop does.

    ``TILES`` computes a tile of the output, ``MMA`` multiplies a step of k, ``COPY`` fills shared memory, ``STORE``
    stores results, and ``WAIT`` only polls whether an event has happened.
    """

    TILES = "tiles"
    MMA = "mma"
    COPY = "copy"
    STORE = "store"
    WAIT = "wait"
    OTHER = "other"


@dataclass(frozen=True)
class CodeLoop:
    """A loop with its role and its code.

    ``iteration``: the instructions of one iteration on its longest path, with every wait taken once. ``iterations``:
    the number of iterations; None if it depends on the problem.
    """

    loop: Loop
    role: Role
    iteration: tuple[Instruction, ...]
    iterations: int | None

    @property
    def mmas(self) -> int:
        """MMAs of a warp in one iteration."""
        return count(self.iteration, MMA)


class Loops:
    """The loops of a function with their roles."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @cached_property
    def waits(self) -> frozenset[int]:
        """Blocks of loops that only wait."""
        return frozenset(chain.from_iterable(loop.blocks for loop in self.graph.loops if self._role(loop) is Role.WAIT))

    @cached_property
    def all(self) -> tuple[CodeLoop, ...]:
        """Every loop. Outer loops come before the loops inside them."""
        loops = sorted(self.graph.loops, key=lambda loop: (-len(loop.blocks), loop.header))
        return tuple(CodeLoop(loop, self._role(loop), self.iteration(loop), self._iterations(loop)) for loop in loops)

    @cached_property
    def main(self) -> CodeLoop | None:
        """The loop over k with the most MMAs. None if k is unrolled, or if the function has no MMA."""
        return max((item for item in self.all if item.role is Role.MMA), key=lambda item: item.mmas, default=None)

    @cached_property
    def tiles(self) -> CodeLoop | None:
        """The loop over tiles of a persistent kernel. None if each CTA has one tile, or if k has an outer loop."""
        candidates = [item for item in self.all if item.role is Role.TILES]
        if self.main is not None:
            candidates = [item for item in candidates if self.main.loop.blocks < item.loop.blocks]
        return min(candidates, key=lambda item: len(item.loop.blocks), default=None)

    @cached_property
    def producer(self) -> CodeLoop | None:
        """The innermost loop of warps that copy and have no MMAs. None if the warps with MMAs copy too."""
        copies = [item for item in self.all if item.role is Role.COPY]
        innermost = [item for item in copies if not any(other.loop.blocks < item.loop.blocks for other in copies)]
        with_mmas = [item.loop.blocks for item in self.all if item.role in (Role.TILES, Role.MMA)]
        of_producers = [item for item in innermost if not any(item.loop.blocks < blocks for blocks in with_mmas)]
        return max(of_producers, key=lambda item: count(item.iteration, COPIES), default=None)

    def iteration(self, loop: Loop) -> tuple[Instruction, ...]:
        """The instructions of one iteration on its longest path.

        Paths that repeat a wait are taken only if there is no other. The same holds for paths that store, in a loop
        over k.
        """

        def weight(block: Block) -> int:
            avoided = block.index in self.waits or (block.index in storing and over_k)
            # Outweighs any path, so that an avoided block is passed only if every path passes one.
            return -1_000_000 if avoided else len(block.instructions)

        storing = frozenset(block for block in loop.blocks if count(self.graph.blocks[block].instructions, STORES))
        over_k = self._role(loop) is Role.MMA
        return self.code(self.graph.longest([loop.header], loop.blocks, weight))

    def code(self, blocks: Iterable[int]) -> tuple[Instruction, ...]:
        """The instructions of blocks, in the order in which these are given."""
        return tuple(chain.from_iterable(self.graph.blocks[block].instructions for block in blocks))

    def _role(self, loop: Loop) -> Role:
        """The role of a loop, from the opcodes in its blocks and in the loops inside it."""
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
        return Role.WAIT if len(code) <= MAX_WAIT_LENGTH and count(code, WAITS) else Role.OTHER

    def _always_stores(self, loop: Loop) -> bool:
        """Whether every path from a loop's MMAs to its next iteration passes a block that stores."""
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

    def _iterations(self, loop: Loop) -> int | None:
        """The number of iterations of a loop, if constants before it determine the number."""
        body = self.code(self.graph.longest([loop.header], loop.blocks, lambda block: len(block.instructions)))
        before = sorted(self.graph.dominators[loop.header] - {loop.header})
        return trips(self.code(before), body)


def count(instructions: Iterable[Instruction], names: frozenset[str] | set[str]) -> int:
    """How many of the instructions have one of these names."""
    return sum(instruction.name in names for instruction in instructions)
