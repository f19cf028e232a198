"""Finds changes of a kernel that would make it faster, by running the model with one input changed.

A change that shortens the time by 1 % or more becomes advice. Two kinds follow from machine code. The first uses fewer
registers or less shared memory, which makes room for one more CTA on an SM. The second removes one kind of instructions
from the main loop; the time that this saves is the most that optimising them can win.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from kernelproof.profile.figures import Advice, Occupancy
from kernelproof.sass import Instruction, Pipe, pipe_use
from kernelproof.sass.simulation import Machine, Stream, simulate


class InstructionKind(NamedTuple):
    """Instructions with one of these opcodes, and those that one of these pipes executes."""

    opcodes: frozenset[str] = frozenset()
    pipes: frozenset[Pipe] = frozenset()

    def includes(self, instruction: Instruction, sm: str) -> bool:
        """Whether an instruction is of this kind."""
        return instruction.name in self.opcodes or pipe_use(instruction, sm).pipe in self.pipes


# The same change, in words for a main loop that writes shared memory and for one that does not.
NO_COPIES, NO_LOADS = "copies into shared memory at no cost", "loads from global memory at no cost"
NO_INSTRUCTIONS = InstructionKind()
# The changes that are tried, each with the instructions that it removes from the main loop.
REMOVALS = {
    "address arithmetic, counters and moves at no cost": InstructionKind(
        frozenset(("BRA",)), frozenset((Pipe.ALU, Pipe.FMA, Pipe.UNIFORM, Pipe.XU, Pipe.CONSTANT))
    ),
    "barriers of the CTA at no cost": InstructionKind(frozenset(("BAR",))),
    "loads of operands from shared memory at no cost": InstructionKind(frozenset(("LDSM", "LDS", "LDSMT"))),
    NO_COPIES: InstructionKind(frozenset(("LDGSTS", "LDGDEPBAR", "DEPBAR", "LDG", "STS"))),
}
MIN_GAIN = 0.01  # of the time, of a change that is worth a line
MAX_LINES = 10  # of advice


def worthwhile(advice: Sequence[Advice]) -> tuple[Advice, ...]:
    """Advice with a gain of at least ``MIN_GAIN``, the largest gain first, at most ``MAX_LINES``."""
    return tuple(sorted((item for item in advice if item.gain >= MIN_GAIN), key=lambda item: -item.gain)[:MAX_LINES])


def more_residents(occupancy: Occupancy, least_registers: int) -> str | None:
    """The change of registers and shared memory, in words, that makes room for one more CTA on an SM.

    None if no such change exists: another limit decides, or a thread would get no more than ``least_registers``, the
    registers that the kernel needs in any case for its accumulators.
    """
    if {"threads", "blocks"} & set(occupancy.limits) or None in (occupancy.most_registers, occupancy.most_smem_bytes):
        return None
    if (occupancy.most_registers or 0) <= least_registers:
        return None
    parts = []
    if (registers := occupancy.registers - (occupancy.most_registers or 0)) > 0:
        parts.append(f"{registers} registers fewer per thread ({occupancy.most_registers})")
    if (smem := occupancy.smem_bytes - (occupancy.most_smem_bytes or 0)) > 0:
        parts.append(f"{smem} bytes less shared memory ({occupancy.most_smem_bytes})")
    return f"{' and '.join(parts)}, for {occupancy.ctas + 1} CTAs per SM" if parts else None


def removals(streams: Callable[[int], Sequence[Stream]], machine: Machine, iterations: int) -> Iterator[Advice]:
    """Yields advice from simulating the main loop without the instructions of each kind of ``REMOVALS``.

    ``streams``: returns the warps of one scheduler, each of which makes the given number of iterations.
    ``iterations``: the number of iterations to simulate.
    """
    before = _iteration_cycles(streams, machine, iterations, NO_INSTRUCTIONS)
    main_loops = [part for stream in streams(iterations) for part, times in stream.parts if times == iterations]
    stores = {"LDGSTS", "STS"} & {code.name for part in main_loops for code in part}
    for change, removed in REMOVALS.items():
        # The simulation can take longer with fewer instructions, since warps then issue in another order.
        after = min(before, _iteration_cycles(streams, machine, iterations, removed))
        change = NO_LOADS if change == NO_COPIES and not stores else change
        yield Advice(change=change, figure="main loop", form="machine code", before=before, after=after)


def _iteration_cycles(
    streams: Callable[[int], Sequence[Stream]], machine: Machine, iterations: int, removed: InstructionKind
) -> float:
    """Cycles of one iteration of all warps without the instructions of ``removed``. It is the difference of a long and
    a short run divided by their iterations, so that prologue and epilogue cancel."""
    # All streams share the same few parts of the code, so each part is filtered once. Its id is a safe key, since the
    # kernel's `Ways` keep the parts alive. `simulate` uses the ids of parts in the same way to decode each part once.
    kept: dict[int, tuple[Instruction, ...]] = {}

    def without_removed(stream: Stream) -> Stream:
        for part, _ in stream.parts:
            if id(part) not in kept:
                kept[id(part)] = tuple(code for code in part if not removed.includes(code, machine.sm))
        return replace(stream, parts=tuple((kept[id(part)], times) for part, times in stream.parts))

    half = max(1, iterations // 2)
    short_run, long_run = (
        simulate([without_removed(stream) for stream in streams(count)], machine).cycles for count in (half, iterations)
    )
    return (long_run - short_run) / max(1, iterations - half)
