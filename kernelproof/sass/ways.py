"""Lists the instructions that a warp of each role executes: before its main loop, in an iteration of it, and after it.

If a branch depends on the problem, the path with more instructions is taken, which is the one that copies and stores.
Loops that only poll an mbarrier are left out. Loops with constant bounds are repeated as often as they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from kernelproof.sass.decoding import Function, Instruction
from kernelproof.sass.flow import Block, Graph, Loop
from kernelproof.sass.loops import Loops, count
from kernelproof.sass.pipes import MMA
from kernelproof.sass.trips import trips

MAX_ITERATIONS = 64  # most repetitions of a loop other than the main loop


@dataclass(frozen=True)
class Way:
    """Instructions of one warp: ``before`` its main loop, in one ``iteration`` of it, and ``after`` it.

    ``next_tile``: in a persistent kernel, the instructions from the end of ``after`` to the start of the main loop for
    the next tile; else empty. Without a main loop all instructions are in ``before``.
    """

    before: tuple[Instruction, ...]
    iteration: tuple[Instruction, ...]
    after: tuple[Instruction, ...]
    next_tile: tuple[Instruction, ...] = ()

    def count(self, names: frozenset[str]) -> tuple[int, int, int]:
        """How many instructions have one of these names: before the loop, in an iteration of it, and after it."""
        before, iteration, after = (
            sum(instruction.name in names for instruction in part) for part in (self.before, self.iteration, self.after)
        )
        return before, iteration, after


class Ways:
    """The ways of a function's warps.

    ``consumer``: the way of warps with MMAs. ``producer``: that of warps that only copy, or None if there are none.
    """

    def __init__(self, function: Function) -> None:
        self.graph = Graph(function)
        self._loop_iterations: dict[int, int] = {}  # iterations of loops, by header
        loops = Loops(self.graph)
        self._waiting_blocks = loops.waits
        self.consumer = self._way(loops.main.loop) if loops.main else self._way_without_loop()
        self.producer = self._way(loops.producer.loop) if loops.main and loops.producer else None

    def _way(self, loop: Loop) -> Way:
        """The way of the warps whose main loop this is.

        Blocks before the loop reach its header without a back edge. Blocks after it are reachable from its exits and do
        not dominate its header; in a persistent kernel they belong to the innermost loop around it (over tiles).
        """
        graph, inside = self.graph, loop.blocks
        outer_loops = [other for other in graph.loops if inside < other.blocks]
        outer = min(outer_loops, key=lambda other: len(other.blocks), default=None)
        before = self._reaching_blocks(loop.header) - inside
        exits = {successor for block in inside for successor in graph.blocks[block].successors} - inside
        after = frozenset(chain.from_iterable(graph.reachable(block) for block in exits)) - inside
        after -= graph.dominators[loop.header]
        if outer is not None:
            after &= outer.blocks
        tail = [] if outer is None else graph.longest([outer.header], outer.blocks & before, self._weight(inside))
        iteration = graph.longest([loop.header], inside, self._weight(frozenset()))
        return Way(
            before=self._walk(graph.longest([0], frozenset(before), self._weight(inside)), inside),
            iteration=self._code(iteration),
            after=self._walk(graph.longest(exits & after, after, self._weight(inside)), inside),
            next_tile=self._walk(tail, inside),
        )

    def _way_without_loop(self) -> Way:
        """The way of the warps of a function without a main loop."""
        within = self.graph.reachable(0)
        return Way(self._walk(self.graph.longest([0], within, self._weight(frozenset())), frozenset()), (), ())

    def _reaching_blocks(self, target: int) -> set[int]:
        """The blocks from which a path leads to ``target`` without a jump back to a block that dominates the jump."""
        graph = self.graph
        reaching, pending = {target}, [target]
        while pending:
            block = pending.pop()
            for before in graph.predecessors[block]:
                if before not in reaching and block not in graph.dominators[before]:
                    reaching.add(before)
                    pending.append(before)
        return reaching

    def _weight(self, main: frozenset[int]) -> Callable[[Block], int]:
        """The weight of a block for ``Graph.longest``: the instructions that it executes. Blocks of loops that only
        wait have a negative weight, so that a path avoids them. ``main``: the blocks of the main loop."""

        def weight(block: Block) -> int:
            if block.index in self._waiting_blocks:
                return -len(block.instructions) - 8  # one more block of a wait is worse than a few instructions less
            return self._iterations(block.index, main) * len(block.instructions)

        return weight

    def _loop_of(self, block: int, main: frozenset[int]) -> Loop | None:
        """The outermost loop around a block that contains neither the main loop nor MMAs."""
        loops = [
            loop
            for loop in self.graph.loops
            if block in loop.blocks and not main & loop.blocks and not count(self._code(loop.blocks), MMA)
        ]
        return max(loops, key=lambda loop: len(loop.blocks), default=None)

    def _iterations(self, block: int, main: frozenset[int]) -> int:
        """How often a block's outermost loop runs, at most ``MAX_ITERATIONS``; 1 if that is not known."""
        loop = self._loop_of(block, main)
        if loop is None or block in self._waiting_blocks:
            return 1
        if loop.header not in self._loop_iterations:
            body = self._code(self.graph.longest([loop.header], loop.blocks, lambda inner: len(inner.instructions)))
            before = self._code(sorted(self.graph.dominators[loop.header] - {loop.header}))
            self._loop_iterations[loop.header] = min(MAX_ITERATIONS, trips(before, body) or 1)
        return self._loop_iterations[loop.header]

    def _walk(self, blocks: Iterable[int], main: frozenset[int]) -> tuple[Instruction, ...]:
        """The instructions of a path of blocks. Those of a loop are repeated as often as it runs."""
        walked: list[Instruction] = []
        path = list(blocks)
        at = 0
        while at < len(path):
            loop = self._loop_of(path[at], main)
            end = at + 1
            while loop is not None and end < len(path) and path[end] in loop.blocks:
                end += 1
            walked += self._code(path[at:end]) * self._iterations(path[at], main)
            at = end
        return tuple(walked)

    def _code(self, blocks: Iterable[int]) -> tuple[Instruction, ...]:
        """The instructions of blocks: of a list in its order, of a set in the order of addresses."""
        ordered = blocks if isinstance(blocks, list) else sorted(blocks)
        return tuple(chain.from_iterable(self.graph.blocks[block].instructions for block in ordered))
