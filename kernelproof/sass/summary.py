"""A kernel's machine code in numbers: its main loop per k-tile, its epilogue, registers and spills."""

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
    """Issue slots, stalls and cycles are of one warp and one k-tile, after the main loop's MMAs were counted.

    ``loop_cycles``: T1, the warp alone (``simulation.steady_cycles``). ``epilogue``: instructions that a warp executes
    from the end of the main loop to its exit. ``counts``: the main loop's opcodes. ``rolled``: False where it is
    straight code. ``spill_bytes``: of one thread's local loads and stores, each counted once.
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
        epilogue=code.epilogue,
        counts=Counter(instruction.name for instruction in code.main_path),
        rolled=code.loops.main is not None,
    )


def _cycles(code: Analysis) -> float:
    """T1: of a turn of the main loop, or of the straight code."""
    if code.loops.main is not None:
        return steady_cycles(code.main_path, code.function.sm)
    return simulate([Stream(((code.main_path, 1),))], Machine(code.function.sm, l2_cycles=0)).cycles
