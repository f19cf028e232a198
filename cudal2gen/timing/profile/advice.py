"""Advice: changes of one input that shorten the modelled time by 1 % or more.

Three kinds of changes: CTAs that an SM holds, by the registers or shared memory that one more takes; parts of the
machine code that cost nothing, which bounds what work on them can win; and other values of one field of the record,
by the model's cheap form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cudal2gen.kernel import IllegalRecord, Record
from cudal2gen.kernel.fieldset import fieldset, spell
from cudal2gen.timing.model import estimate
from cudal2gen.timing.profile.figures import Advice, Occupancy
from kernelproof.sass import Instruction, Pipe, pipe_use
from kernelproof.sass.simulation import Machine, Stream, simulate


class Part(NamedTuple):
    """Instructions of these opcodes, and of these pipes."""

    names: frozenset[str] = frozenset()
    pipes: frozenset[Pipe] = frozenset()

    def has(self, code: Instruction, sm: str) -> bool:
        return code.name in self.names or pipe_use(code, sm).pipe in self.pipes


NOTHING = Part()
FREE = {
    "address arithmetic, counters and moves at no cost": Part(
        frozenset(("BRA",)), frozenset((Pipe.ALU, Pipe.FMA, Pipe.UNIFORM, Pipe.XU, Pipe.CONSTANT))
    ),
    "barriers of the CTA at no cost": Part(frozenset(("BAR",))),
    "loads of operands from shared memory at no cost": Part(frozenset(("LDSM", "LDS", "LDSMT"))),
    "copies into shared memory at no cost": Part(frozenset(("LDGSTS", "LDGDEPBAR", "DEPBAR", "LDG", "STS"))),
}
MIN_GAIN, MAX_EDITS, MAX_LINES = 0.01, 4, 10


def worthwhile(advice: Sequence[Advice]) -> tuple[Advice, ...]:
    """Advice that shortens its figure by ``MIN_GAIN`` or more, the most helpful first."""
    return tuple(sorted((item for item in advice if item.gain >= MIN_GAIN), key=lambda item: -item.gain)[:MAX_LINES])


def more_residents(occupancy: Occupancy, least_registers: int) -> str | None:
    """The change that makes room for one more resident CTA; None if no use of registers or memory does.
    ``least_registers``: registers of a thread that the kernel needs in any case, its accumulators."""
    if {"threads", "blocks"} & set(occupancy.limits) or None in (occupancy.most_registers, occupancy.most_smem_bytes):
        return None
    if (occupancy.most_registers or 0) <= least_registers:
        return None
    parts = []
    if (registers := occupancy.registers - (occupancy.most_registers or 0)) > 0:
        parts.append(f"{registers} registers fewer a thread ({occupancy.most_registers})")
    if (smem := occupancy.smem_bytes - (occupancy.most_smem_bytes or 0)) > 0:
        parts.append(f"{smem} bytes less shared memory ({occupancy.most_smem_bytes})")
    return f"{' and '.join(parts)}, for {occupancy.ctas + 1} CTAs an SM" if parts else None


def free_parts(streams: Callable[[int], Sequence[Stream]], machine: Machine, turns: int) -> Iterator[Advice]:
    """The main loop with a part of its instructions at no cost: bounds of what work on that part can win.

    ``streams``: a scheduler's warps that make so many turns.
    """
    before = _turn_cycles(streams, machine, turns, NOTHING)
    for change, part in FREE.items():
        after = _turn_cycles(streams, machine, turns, part)
        yield Advice(change=change, figure="main loop", form="machine code", before=before, after=min(before, after))


def _turn_cycles(streams: Callable[[int], Sequence[Stream]], machine: Machine, turns: int, free: Part) -> float:
    """Cycles from turn to turn of all warps without a part of the instructions: what more turns add."""
    parts: dict[int, tuple[Instruction, ...]] = {}

    def thinner(stream: Stream) -> Stream:
        for part, _ in stream.parts:
            if id(part) not in parts:
                parts[id(part)] = tuple(code for code in part if not free.has(code, machine.sm))
        return replace(stream, parts=tuple((parts[id(part)], times) for part, times in stream.parts))

    fewer = max(1, turns // 2)
    cycles = [simulate([thinner(stream) for stream in streams(count)], machine).cycles for count in (fewer, turns)]
    return (cycles[1] - cycles[0]) / max(1, turns - fewer)


def edits(record: Record) -> Iterator[Advice]:
    """Values of one field that shorten the modelled time by the cheap form, the best of each field; legal ones that
    are not likely to spill."""
    before = estimate(record).us
    best: dict[str, Advice] = {}
    for field, value in other_values(record):
        try:
            candidate = record.at(record.problem, **{field: tuple(value) if isinstance(value, list) else value})
        except IllegalRecord:
            continue
        after = before if candidate.spill_remarks else estimate(candidate).us
        if after < (best[field].after if field in best else before):
            change = f"--set {field}={spell(value)}"
            best[field] = Advice(change=change, figure="time", form="cheap form", before=before, after=after)
    yield from sorted(best.values(), key=lambda advice: advice.after)[:MAX_EDITS]


def other_values(record: Record) -> Iterator[tuple[str, Any]]:
    """Each field of the family with each other value that its type lists, as JSON values; legal or not."""
    fields = fieldset(type(record))
    for field, value in fields.flat(record.decisions()).items():
        if "." not in field:
            yield from ((field, other) for other in fields.values[field] if other != value)
