"""A kernel's machine code in numbers: its main loop per k-tile, its epilogue, registers and spills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from cudal2gen.sass.decoding import DisassemblyError, Function, Instruction, disassemble
from cudal2gen.sass.flow import Block, Graph, Loop
from cudal2gen.sass.pipes import MMA, access_bytes
from cudal2gen.sass.simulation import Machine, Stream, simulate, steady_cycles
from cudal2gen.sass.trips import trips

LOCAL = frozenset(("LDL", "STL"))
STORES = frozenset(("STS", "STSM", "STG"))


@dataclass(frozen=True)
class Summary:
    """Issue slots, stalls and cycles are of one warp and one k-tile, after the main loop's MMAs were counted.

    ``loop_cycles``: T1, the warp alone (``simulation.steady_cycles``). ``epilogue``: instructions that a warp executes
    from the end of the main loop to its exit. ``counts``: the main loop's opcodes. ``rolled``: False
    where it is straight code.
    ``spill_bytes``: of one thread's local loads and stores, each counted once.
    """

    name: str
    registers: int
    spill_bytes: int
    issue_slots: float
    stall_cycles: float
    loop_cycles: float
    epilogue: int
    counts: Mapping[str, int]
    rolled: bool


def summarise(cubin: Path, *, tile_mmas: int, function: str | None = None) -> Summary:
    """The numbers of a kernel: the function whose name has ``function``, or else the longest with MMAs.

    ``tile_mmas``: MMAs of one warp in one k-tile. Raises DisassemblyError where no function has an MMA.
    """
    functions = [
        candidate
        for candidate in disassemble(cubin)
        if (function is None or function in candidate.name) and _mmas(candidate.instructions)
    ]
    if not functions:
        raise DisassemblyError(f"{cubin}: no function{f' {function}' if function else ''} has an MMA")
    code = KernelCode(max(functions, key=lambda candidate: len(candidate.instructions)))
    tiles = _mmas(code.main_path) / tile_mmas
    cycles = _cycles(code)
    return Summary(
        name=code.function.name,
        registers=code.function.registers,
        spill_bytes=sum(access_bytes(spill) for spill in code.function.instructions if spill.name in LOCAL),
        issue_slots=len(code.main_path) / tiles,
        stall_cycles=sum(max(1, instruction.control.stall) for instruction in code.main_path) / tiles,
        loop_cycles=cycles / tiles,
        epilogue=code.epilogue,
        counts=Counter(instruction.name for instruction in code.main_path),
        rolled=code.main_loop is not None,
    )


def _cycles(code: KernelCode) -> float:
    """T1: of a turn of the main loop, or of the straight code."""
    if code.main_loop:
        return steady_cycles(code.main_path, code.function.sm)
    return simulate([Stream(((code.main_path, 1),))], Machine(code.function.sm, l2_cycles=0)).cycles


class KernelCode:
    """The parts of a matrix product's code: the main loop is the innermost loop with the most MMAs."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.graph = Graph(function)

    @cached_property
    def main_loop(self) -> Loop | None:
        """None where the main loop is unrolled whole."""
        loops = [loop for loop in self.graph.loops if self._mmas(loop)]
        innermost = [loop for loop in loops if not any(other.blocks < loop.blocks for other in loops)]
        return max(innermost, key=self._mmas, default=None)

    @cached_property
    def main_path(self) -> tuple[Instruction, ...]:
        """The main loop's instructions in a steady iteration, which copies; or the straight code's, MMA to MMA."""
        if self.main_loop is not None:
            loop = self.main_loop
            return self._code(self.graph.longest([loop.header], loop.blocks, _length))
        path = self._code(self.graph.longest([0], self.graph.reachable(0), _length))
        at = [index for index, instruction in enumerate(path) if instruction.name in MMA]
        return path[at[0] : at[-1] + 1]

    @cached_property
    def epilogue(self) -> int:
        """Executed instructions after the main loop; a turn of an outer loop ends them.

        ptxas interleaves the last MMAs with the epilogue where there is no loop: there the epilogue starts at the first
        store, and the MMAs and their loads are not counted.
        """
        if self.main_loop is not None:
            main = self.main_loop.blocks
            starts = {exit for block in main for exit in self.graph.blocks[block].successors if exit not in main}
        else:
            main, starts = frozenset(), {0}
        reached = frozenset(chain.from_iterable(self.graph.reachable(start) for start in starts))
        outer = frozenset(
            chain.from_iterable(loop.blocks - {loop.header} for loop in self.graph.loops if main and main < loop.blocks)
        )
        before = self.graph.dominators[self.main_loop.header] if self.main_loop is not None else frozenset[int]()
        within = (reached - before - main) & (outer or reached)
        loops = [loop for loop in self.graph.loops if loop.blocks <= within and not self._mmas(loop)]
        outermost = [loop for loop in loops if not any(loop.blocks < other.blocks for other in loops)]
        factor = dict.fromkeys(within, 1)
        for loop in outermost:
            turns = self._trips(loop)
            factor |= dict.fromkeys(loop.blocks, turns)
        path = self.graph.longest(starts, within, lambda block: factor[block.index] * len(block.instructions))
        executed = [
            (instruction, factor[block]) for block in path for instruction in self.graph.blocks[block].instructions
        ]
        mmas = [at for at, (instruction, _) in enumerate(executed) if instruction.name in MMA]
        if not mmas:
            return sum(times for _, times in executed)
        stores = (at for at, (code, _) in enumerate(executed) if code.name in STORES and at > mmas[0])
        start = min(next(stores, mmas[-1] + 1), mmas[-1] + 1)
        return sum(times for code, times in executed[start:] if code.name not in MMA | {"LDSM"})

    def _trips(self, loop: Loop) -> int:
        """A loop's iterations, from constants on the way to it; 1 where they are no constants."""
        body = self._code(self.graph.longest([loop.header], loop.blocks, _length))
        way = sorted(self.graph.dominators[loop.header] - {loop.header})
        return trips(self._code(way), body) or 1

    def _code(self, blocks: Iterable[int]) -> tuple[Instruction, ...]:
        return tuple(chain.from_iterable(self.graph.blocks[block].instructions for block in blocks))

    def _mmas(self, loop: Loop) -> int:
        return _mmas(self._code(sorted(loop.blocks)))


def _mmas(instructions: Iterable[Instruction]) -> int:
    return sum(instruction.name in MMA for instruction in instructions)


def _length(block: Block) -> int:
    return len(block.instructions)
