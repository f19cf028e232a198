"""The model's form for built kernels: prologue, main loop and epilogue by simulating the machine code.

The CTAs that an SM holds at a time run through their own instructions on one of its sub-cores (``sass.simulation``).
What surrounds that is ``memory``'s, as in the cheap form. Where k is long a few dozen turns are simulated, the others
take what the last of them took. Times are in microseconds, and estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cudal2gen.kernel import Record, ceil_div
from cudal2gen.timing.model import memory
from kernelproof.ground.chips import SUB_CORES
from kernelproof.profile.rates import LAUNCH_US, l2_share
from kernelproof.sass.decoding import Function, Instruction
from kernelproof.sass.pipes import MMA, WARPGROUP, mma_shape
from kernelproof.sass.simulation import Machine, Stream, Timeline, simulate
from kernelproof.sass.ways import Way, Ways

ISSUES = 8000  # instructions of a simulation, about; further turns are extrapolated
MIN_TURNS = 6  # least simulated turns beyond those that fill the ring
# Share of the L2 that keeps D: A100 and H100 copy a line into each of their two partitions that reads it.
L2_SHARE = 0.5


@dataclass(frozen=True)
class CodeEstimate:
    """A modelled time and its parts.

    ``sm_us``: of the busiest SM, from its first instruction to its last store; ``main_us``: of that the turns of main
    loops. ``dram_us``: of all bytes between device memory and chip; ``stores_us``: of that what the SMs wait for.
    ``around_us``: launch and sums of a split k. ``turn_cycles``: of one steady turn of all CTAs that are ``resident``
    together. ``timeline``: of their simulation.
    """

    us: float
    sm_us: float
    main_us: float
    dram_us: float
    stores_us: float
    around_us: float
    turn_cycles: float
    resident: int
    timeline: Timeline


@dataclass(frozen=True)
class Load:
    """A record's work as its machine code does it, and the machine that runs it."""

    record: Record
    ways: Ways
    machine: Machine

    @cached_property
    def tile_steps(self) -> int:
        """k-steps of one CTA tile."""
        return ceil_div(ceil_div(self.record.k, self.record.k_step), self.record.split_k)

    @cached_property
    def warps(self) -> int:
        """Warps that share the MMAs of one tile."""
        if self.ways.producer is None:
            return self.record.threads // 32
        return 4 * self.consumers // self.alternating

    @cached_property
    def consumers(self) -> int:
        """Warpgroups that multiply, where one beside them copies."""
        return max(1, self.record.threads // 128 - 1)

    @cached_property
    def alternating(self) -> int:
        """Tiles that a CTA has under way, each of other warpgroups."""
        return self.consumers if self.record.work.epilogue_hidden else 1

    @cached_property
    def turns(self) -> int:
        """Turns of the main loop for one tile: as many as its MMAs take beside those before and after it."""
        way, record = self.ways.consumer, self.record
        total = record.bm * record.bn * record.k_step * self.tile_steps / self.warps
        turn = _products(way.turn)
        return max(1, round((total - _products(way.before) - _products(way.after)) / turn)) if turn else 0

    def copying(self, turns: int) -> Machine:
        """The machine for a tile of so many turns, whose ring by cp.async has no more copies than they multiply."""
        record = self.record
        turn_steps = _products(self.ways.consumer.turn) * self.warps / (record.bm * record.bn * record.k_step)
        return replace(self.machine, copy_groups=self.tile_steps - round((self.turns - turns) * turn_steps))


def _products(code: Sequence[Instruction]) -> float:
    """Multiplications that one warp's MMAs stand for."""
    total = 0.0
    for instruction in code:
        if instruction.name in MMA and (shape := mma_shape(instruction)) is not None:
            m, n, k = shape
            total += m * n * k / (4 if instruction.name in WARPGROUP else 1)
    return total


def estimate_code(record: Record, function: Function, resident: int | None = None) -> CodeEstimate:
    """The modelled time of a built record on its own problem and GPU.

    ``function``: its kernel's; ``resident``: CTAs of an SM, by default as many as registers and shared memory allow.
    """
    rates, sms, work = record.target.rates, memory.usable_sms(record), record.work
    resident = resident or max(1, record.ctas_per_sm(function.registers))
    per_sm = ceil_div(record.ctas, sms)
    together = min(per_sm, resident)
    load = Load(record, Ways(function), machine_of(record, sms, together))
    timeline, cycles, turn = _busiest_sm(load, per_sm, together)
    sm_us = cycles / rates.mhz
    main_us = min(sm_us, per_sm / together * turn * load.turns / rates.mhz)
    dram_us = memory.dram_bytes(record, work, rates, sms * together) / rates.dram_bytes_us
    in_waves = not load.ways.consumer.again
    stores_us = _stores_us(record) * min(1.0, main_us / sm_us) if in_waves else 0.0
    around = LAUNCH_US + memory.sums_us(record, work, rates, sms, together)
    if work.tensor_maps:
        around += memory.DESCRIPTOR_US
    us = around + max(sm_us, dram_us - stores_us + rates.latency_us) + stores_us
    return CodeEstimate(us, sm_us, main_us, dram_us, stores_us, around, turn, together, timeline)


def _stores_us(record: Record) -> float:
    """Time of the bytes of D that the L2 cannot keep, at the rate of device memory.

    CTAs of a wave run in step, so they store together: the L2 is full of what the wave before stored and must write as
    much back, while no tensor core works. What overlaps is the part of the time that the SMs do not multiply in.
    """
    rates = record.target.rates
    stored = record.m * record.n * record.output.bytes
    return max(0.0, stored - L2_SHARE * rates.l2_size) / rates.dram_bytes_us


def machine_of(record: Record, sms: int, together: int) -> Machine:
    """An SM with so many CTAs of a record, when as many SMs as there are CTAs for ask the L2."""
    rates = record.target.rates
    return Machine(
        record.arch,
        record.target,
        sub_cores=min(SUB_CORES, together * record.threads // 32),
        l2_bytes=l2_share(rates, sms, record.ctas),
        l2_cycles=rates.l2_clocks,
        fill_bytes=record.work.l2_bytes,
        stages=record.ring_steps,
    )


def _busiest_sm(load: Load, per_sm: int, together: int) -> tuple[Timeline, float, float]:
    """An SM that computes ``per_sm`` tiles: the simulation of its first, cycles of all, and of a turn of the main loop.

    Persistent CTAs take one tile behind the other, others come in waves.
    """
    if load.ways.consumer.again:
        return _sub_core(load, together, ceil_div(per_sm, together))
    timeline, cycles, turn = _sub_core(load, together, 1)
    cycles *= per_sm // together
    if remainder := per_sm % together:
        cycles += _sub_core(load, remainder, 1)[1]
    return timeline, cycles, turn


def _sub_core(load: Load, ctas: int, tiles: int) -> tuple[Timeline, float, float]:
    """One sub-core's share of so many CTAs, each of so many tiles, as ``_busiest_sm`` returns it."""
    if not load.ways.consumer.turn:
        timeline = simulate(streams(load, ctas, 0), load.machine)
        return timeline, timeline.cycles * tiles, 0.0
    first, more = min(tiles, load.alternating), min(tiles, 2 * load.alternating)
    issues = len(load.ways.consumer.turn) * len(streams(load, ctas, 1, first))
    turns = min(load.turns, max(ISSUES // issues, load.record.ring_steps + MIN_TURNS))
    fewer = max(1, min(turns - 2, (turns + load.record.ring_steps) // 2))
    # Where all turns are simulated, the last ones commit groups without copies, and fewer turns stand for a shorter k.
    all_turns = turns == load.turns and tiles == 1
    timeline = simulate(streams(load, ctas, turns, first), load.copying(turns) if all_turns else load.machine)
    if fewer < turns:
        before = simulate(streams(load, ctas, fewer, first), load.copying(fewer) if all_turns else load.machine)
        turn = (timeline.cycles - before.cycles) / (turns - fewer)
    else:
        before, turn = timeline, _only_turn(timeline, streams(load, ctas, turns, first))
    cycles = timeline.cycles + (load.turns - turns) * turn
    if tiles > first:
        behind = simulate(streams(load, ctas, fewer, more), load.machine).cycles - before.cycles
        cycles += (tiles - first) / (more - first) * (behind + (more - first) / first * (load.turns - fewer) * turn)
    return timeline, cycles, turn / first


def _only_turn(timeline: Timeline, warps: Sequence[Stream]) -> float:
    """Cycles of a main loop of one turn: from the first warp that multiplies and enters it to the last one to leave."""
    ends = [ends for ends, stream in zip(timeline.ends, warps, strict=True) if not stream.produces]
    return max(end[1] for end in ends) - min(end[0] for end in ends)


def streams(load: Load, ctas: int, turns: int, tiles: int | None = None) -> list[Stream]:
    """The warps of one sub-core that holds a share of so many CTAs; each makes so many turns for each of its tiles, by
    default as many tiles as are under way at a time."""
    tiles = tiles or load.alternating
    way, warps = load.ways.consumer, load.record.threads // 32
    if load.ways.producer is not None:
        return [stream for cta in range(ctas) for stream in _roles(load, load.ways.producer, cta, turns, tiles)]
    own = ceil_div(warps, SUB_CORES)
    parts = _parts(way, turns, tiles)
    return [Stream(parts, cta) for cta in range(ceil_div(ctas * warps, own * SUB_CORES)) for _ in range(own)]


def _parts(way: Way, turns: int, tiles: int) -> tuple[tuple[Sequence[Instruction], int], ...]:
    first = ((way.before, 1), (way.turn, turns), (way.after, 1))
    return first + ((way.again, 1), (way.turn, turns), (way.after, 1)) * (tiles - 1)


def _roles(load: Load, producer: Way, cta: int, turns: int, tiles: int) -> list[Stream]:
    """A warp of each warpgroup of a CTA: those that multiply, the tiles shared out among them, and the one that fills
    the ring in the order of tiles."""
    multiplying = []
    for group in range(load.consumers):
        own = range(group % load.alternating, tiles, load.alternating)
        fills = [tile * turns + turn for tile in own for turn in range(turns)]
        if fills:
            multiplying.append(Stream(_parts(load.ways.consumer, turns, len(own)), cta, fills))
    fills = list(range(tiles * turns))
    return [*multiplying, Stream(_parts(producer, turns, tiles), cta, fills, produces=True)]
