"""Summarises a kernel's machine code in a few numbers: its main loop per k-tile, its epilogue, registers and spills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernelproof.sass.analysis import Analysis, analyse
from kernelproof.sass.decoding import DisassemblyError
from kernelproof.sass.loops import count
from kernelproof.sass.pipes import MMA
from kernelproof.sass.simulation import Machine, Stream, simulate, steady_cycles


@dataclass(frozen=True)
class Summary:
    """Numbers of one kernel.

    ``registers``: per thread. ``spill_bytes``: bytes of a thread's loads and stores of local memory, each instruction
    counted once. ``rolled``: whether there is a main loop. If not, k is unrolled; the instructions from the first MMA
    of a tile to the last then take the place of an iteration of the main loop.

    ``issue_slots``, ``stall_cycles``, ``loop_cycles``: the main loop's instructions, the sum of their stall counts, and
    the simulated cycles of one warp alone (see ``simulation.steady_cycles``), each per k-tile. ``counts``: opcode ->
    executions in one iteration of the main loop. ``epilogue``: instructions that a warp executes after the main loop
    (see ``Analysis.epilogue_length``).
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
    """Summarises a cubin's kernel: the longest one with MMAs among the functions whose name contains ``function``.

    ``tile_mmas``: MMAs of one warp in one k-tile. Raises DisassemblyError if no function has an MMA.
    """
    code = analyse(cubin, function)
    if not code.main_path:
        raise DisassemblyError(f"{cubin}: {code.function.name} has no MMA")
    tiles = count(code.main_path, MMA) / tile_mmas
    cycles = _cycles(code)
    return Summary(
        name=code.function.name,
        registers=code.function.registers,
        spill_bytes=code.spill_bytes,
        issue_slots=len(code.main_path) / tiles,
        stall_cycles=sum(max(1, instruction.control.stall) for instruction in code.main_path) / tiles,
        loop_cycles=cycles / tiles,
        epilogue=code.epilogue_length,
        counts=Counter(instruction.name for instruction in code.main_path),
        rolled=code.loops.main is not None,
    )


def _cycles(code: Analysis) -> float:
    """Cycles of one warp alone for an iteration of the main loop, or for all of k if it is unrolled."""
    if code.loops.main is not None:
        return steady_cycles(code.main_path, code.function.sm)
    return simulate([Stream(((code.main_path, 1),))], Machine(code.function.sm, l2_cycles=0)).cycles
