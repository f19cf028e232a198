"""Analyses one kernel: finds its loops, its epilogue and its spills, and the path that a warp with MMAs executes."""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from pathlib import Path

from kernelproof.sass.decoding import DisassemblyError, Function, Instruction, disassemble
from kernelproof.sass.flow import Graph, Loop
from kernelproof.sass.loops import Loops, count
from kernelproof.sass.pipes import MMA, access_bytes

LOCAL_ACCESSES = frozenset(("LDL", "STL"))
STORES = frozenset(("STS", "STSM", "STG"))


def analyse(cubin: Path, kernel: str | None = None) -> Analysis:
    """Analyses one function of a cubin: the longest one with MMAs among those whose name contains ``kernel``.

    If ``kernel`` is given and no such function has MMAs, the longest of them is analysed. Raises ToolchainError if
    nvdisasm is not installed, and DisassemblyError if the cubin has no such function.
    """
    functions = [function for function in disassemble(cubin) if kernel is None or kernel in function.name]
    with_mmas = [function for function in functions if count(function.instructions, MMA)]
    candidates = with_mmas or (functions if kernel is not None else [])
    if not candidates:
        if kernel is not None:
            raise DisassemblyError(f"{cubin}: no function's name has {kernel}; nvdisasm lists them")
        raise DisassemblyError(f"{cubin}: no function has an MMA; name a kernel that multiplies matrices")
    return Analysis(max(candidates, key=lambda function: len(function.instructions)))


class Analysis:
    """A function, its control flow (``graph``) and its loops.

    ``main_path`` and ``epilogue_length`` describe a warp with MMAs. A path is a sequence of instructions in the order
    in which a warp executes them.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.graph = Graph(function)
        self.loops = Loops(self.graph)

    @property
    def spill_bytes(self) -> int:
        """Bytes of one thread's local loads and stores, each counted once."""
        return spill_bytes(self.function)

    @cached_property
    def main_path(self) -> tuple[Instruction, ...]:
        """One iteration of the main loop, including its copies.

        If k is unrolled there is no main loop; the path is then a tile's instructions from the first MMA to the last.
        It is empty if the function has no MMA.
        """
        if self.loops.main is not None:
            return self.loops.main.iteration
        if self.loops.tiles is not None:
            path = self.loops.tiles.iteration
        else:
            blocks = self.graph.longest([0], self.graph.reachable(0), lambda block: len(block.instructions))
            path = self.loops.code(blocks)
        mmas = [index for index, instruction in enumerate(path) if instruction.name in MMA]
        return path[mmas[0] : mmas[-1] + 1] if mmas else ()

    @cached_property
    def epilogue_length(self) -> int:
        """The number of instructions that a warp executes after the main loop, up to the exit or to the next iteration
        of a loop around it.

        If k is unrolled, ptxas mixes the last MMAs with the epilogue. The epilogue then starts at the first store;
        MMAs after it, and the LDSM instructions that load their operands, are not counted.
        """
        starts, within = self._after_main()
        # A loop of the epilogue lies in it completely and has no MMA. Its iterations count if their number is known.
        loops = [
            loop for loop in self.graph.loops if loop.blocks <= within and not count(self.loops.code(loop.blocks), MMA)
        ]
        outermost = [loop for loop in loops if not any(loop.blocks < other.blocks for other in loops)]
        factor = dict.fromkeys(within, 1)  # how often a pass through the epilogue executes each block
        for loop in outermost:
            iterations = self._trips(loop)
            factor |= dict.fromkeys(loop.blocks, iterations)
        path = self.graph.longest(starts, within, lambda block: factor[block.index] * len(block.instructions))
        # The instructions of the path, each with the number of its executions.
        executed = [
            (instruction, factor[block]) for block in path for instruction in self.graph.blocks[block].instructions
        ]
        mmas = [at for at, (instruction, _) in enumerate(executed) if instruction.name in MMA]
        if not mmas:
            return sum(times for _, times in executed)
        stores = (at for at, (code, _) in enumerate(executed) if code.name in STORES and at > mmas[0])
        start = min(next(stores, mmas[-1] + 1), mmas[-1] + 1)
        return sum(times for code, times in executed[start:] if code.name not in MMA | {"LDSM"})

    def _after_main(self) -> tuple[frozenset[int], frozenset[int]]:
        """Returns the blocks to which the main loop exits, and all blocks of the epilogue.

        The epilogue ends at the exit, or at the next iteration of a loop around the main loop. If there is no main
        loop, the epilogue is taken from all blocks of a tile.
        """
        graph = self.graph
        if self.loops.main is None:
            tiles = self.loops.tiles
            return (
                (frozenset((tiles.loop.header,)), tiles.loop.blocks) if tiles else (frozenset((0,)), graph.reachable(0))
            )
        main, header = self.loops.main.loop.blocks, self.loops.main.loop.header
        starts = frozenset(after for block in main for after in graph.blocks[block].successors if after not in main)
        reached = frozenset(chain.from_iterable(graph.reachable(start) for start in starts))
        outer = frozenset(
            chain.from_iterable(loop.blocks - {loop.header} for loop in graph.loops if main < loop.blocks)
        )
        # Blocks that dominate the main loop are executed before it.
        return starts, (reached - graph.dominators[header] - main) & (outer or reached)

    def _trips(self, loop: Loop) -> int:
        """The number of iterations of a loop if it follows from constants before the loop, else 1."""
        return next(item.iterations for item in self.loops.all if item.loop == loop) or 1


def spill_bytes(function: Function) -> int:
    """Bytes of one thread's local loads and stores, each counted once."""
    return sum(access_bytes(spill) for spill in function.instructions if spill.name in LOCAL_ACCESSES)
