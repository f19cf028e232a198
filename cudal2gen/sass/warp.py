"""One warp alone, simulated in order: what its instructions cost when no other warp and no DRAM is in the way.

It issues an instruction when the stall of the instruction before has passed, and the scoreboards of its wait mask and
its unit are free. A tensor core takes an m16n8k16 every 8 cycles of a sub-core (sm_80: 256 FMA a cycle), shared memory
moves 128 bytes a cycle; a scoreboard is free ``LATENCY`` cycles after its unit took the instruction. Copies by cp.async
have landed when they are waited for, and barriers are open: the figure is a lower bound of a k-tile's time, to compare
two kernels by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cudal2gen.sass.decoding import Instruction
from cudal2gen.sass.pipes import LANES, MMA, SHARED_BYTES, access_bytes

TENSOR_CYCLES = {"16816": 8, "1688": 4}  # by shape, of a sub-core of sm_80
SHARED = frozenset(("LDSM", "LDS", "STS", "LDGSTS", "STSM"))
LATENCY = {"LDSM": 33, "LDS": 29, "STS": 18, "LDGSTS": 13, "S2R": 25, "LDC": 29, "LDG": 290, "LDGDEPBAR": 0}
OTHERS = 14  # scoreboard latency of what is not listed: conversions, special functions, uniform moves
READ = 11  # cycles until operands of an instruction with a scoreboard are read


@dataclass
class Warp:
    """The state of a warp: ``cycle`` is the earliest one in which it can issue."""

    cycle: int = 0
    units: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    scoreboards: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # cycles of their releases

    def run(self, instructions: Sequence[Instruction]) -> int:
        """Issues the instructions and returns the cycle of the last."""
        issued = self.cycle
        for instruction in instructions:
            issued = self._issue(instruction)
        return issued

    def _issue(self, instruction: Instruction) -> int:
        control = instruction.control
        unit, busy = occupancy(instruction)
        start = max([self.cycle, *(self._left(barrier, 0) for barrier in control.waits)])
        if instruction.name == "DEPBAR":
            start = max(start, self._left(*_scoreboard(instruction)))
        if unit == "tensor":  # issue waits for the tensor core; a queue takes shared memory's instructions
            start = max(start, self.units[unit])
        served = max(start, self.units[unit]) + busy if unit else start
        if unit:
            self.units[unit] = served
        if control.write_barrier is not None:
            self.scoreboards[control.write_barrier].append(served + LATENCY.get(instruction.name, OTHERS))
        if control.read_barrier is not None:
            self.scoreboards[control.read_barrier].append(served + READ)
        self.cycle = start + max(1, control.stall)
        return start

    def _left(self, barrier: int, most: int) -> int:
        """The cycle from which at most ``most`` instructions hold a scoreboard."""
        releases = sorted(release for release in self.scoreboards[barrier] if release > self.cycle)
        self.scoreboards[barrier] = releases
        return releases[-1 - most] if len(releases) > most else self.cycle


def _scoreboard(depbar: Instruction) -> tuple[int, int]:
    """The scoreboard of ``DEPBAR.LE SB0, 0x1``, and how many may still hold it."""
    barrier, *most = depbar.operands
    return int(barrier.removeprefix("SB")), int(most[0], 16) if most else 0


def occupancy(instruction: Instruction) -> tuple[str, int]:
    """The unit that an instruction occupies, "" for none, and for how many cycles."""
    if instruction.name in MMA:
        return "tensor", next((TENSOR_CYCLES[shape] for shape in instruction.modifiers if shape in TENSOR_CYCLES), 8)
    if instruction.name in SHARED:
        return "shared", max(1, LANES * access_bytes(instruction) // SHARED_BYTES)
    return "", 0


def steady_cycles(instructions: Sequence[Instruction], repeats: int = 6) -> float:
    """Cycles of one iteration of a loop in its steady state: the mean of all but the first ``repeats``."""
    warp = Warp()
    for _ in range(repeats):
        warp.run(instructions)
    start = warp.cycle
    for _ in range(repeats):
        warp.run(instructions)
    return (warp.cycle - start) / repeats
