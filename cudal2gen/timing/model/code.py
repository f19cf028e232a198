"""Models the time of built kernels by simulating their machine code, from prologue to epilogue.

One sub-core of an SM is simulated, with its share of the CTAs that the SM holds (``kernelproof.sass.simulation``).
Launch, device memory and sums of a split k come from ``memory``, as in the cheap form. If k is long, a few dozen
iterations of the main loop are simulated, and each further one is assumed to take as long as a late one of these. Times
are in microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cudal2gen.kernel import Record, ceil_div
from cudal2gen.timing.model import memory
from kernelproof.ground.chips import SUB_CORES
from kernelproof.profile import LAUNCH_US, l2_share
from kernelproof.sass import (
    MMA,
    WARPGROUP,
    Function,
    Instruction,
    Machine,
    Stream,
    Timeline,
    Way,
    Ways,
    mma_shape,
    simulate,
)

ISSUES = 8000  # about how many instructions a simulation issues; the time of further iterations is extrapolated
MIN_ITERATIONS = 6  # least number of iterations that are simulated beyond those that fill the ring
# Share of the L2 that can keep D. The other half holds copies: A100 and H100 have two partitions, and each that reads a
# line gets its own copy.
L2_SHARE = 0.5


@dataclass(frozen=True)
class CodeEstimate:
    """A modelled time (``us``) and its parts.

    ``sm_us``: time of the busiest SM, from its first instruction to its last store. ``main_us``: the part of it that
    iterations of main loops take. ``dram_us``: time of all traffic of device memory. ``stores_us``: the part of it that
    SMs wait for. ``around_us``: launch and sums of a split k. ``iteration_cycles``: cycles of one steady iteration of
    the ``resident`` CTAs of an SM. ``timeline``: their simulation.
    """

    us: float
    sm_us: float
    main_us: float
    dram_us: float
    stores_us: float
    around_us: float
    iteration_cycles: float
    resident: int
    timeline: Timeline


@dataclass(frozen=True)
class Workload:
    """A record, the paths through its machine code (``ways``), and the machine that runs it."""

    record: Record
    ways: Ways
    machine: Machine

    @cached_property
    def tile_steps(self) -> int:
        """k-steps of one CTA's tile."""
        return ceil_div(ceil_div(self.record.k, self.record.k_step), self.record.split_k)

    @cached_property
    def warps(self) -> int:
        """Warps that share the MMAs of one tile."""
        if self.ways.producer is None:
            return self.record.threads // 32
        return 4 * self.consumers // self.concurrent_tiles

    @cached_property
    def consumers(self) -> int:
        """Warpgroups that multiply, for kernels in which another warpgroup copies."""
        return max(1, self.record.threads // 128 - 1)

    @cached_property
    def concurrent_tiles(self) -> int:
        """How many tiles a CTA computes at a time, each by other warpgroups."""
        return self.consumers if self.record.work.epilogue_hidden else 1

    @cached_property
    def iterations(self) -> int:
        """Iterations of the main loop for one tile. The loop does all multiplications of a tile but those of the code
        before and after it."""
        way, record = self.ways.consumer, self.record
        total = record.bm * record.bn * record.k_step * self.tile_steps / self.warps
        iteration = _products(way.iteration)
        return max(1, round((total - _products(way.before) - _products(way.after)) / iteration)) if iteration else 0

    def machine_for(self, iterations: int) -> Machine:
        """The machine for a simulation with this number of iterations: a cp.async ring copies only the k-tiles that
        these iterations multiply."""
        record = self.record
        iteration_steps = _products(self.ways.consumer.iteration) * self.warps / (record.bm * record.bn * record.k_step)
        return replace(
            self.machine, copy_groups=self.tile_steps - round((self.iterations - iterations) * iteration_steps)
        )


def _products(code: Sequence[Instruction]) -> float:
    """How many multiplications the MMAs of one warp do."""
    total = 0.0
    for instruction in code:
        if instruction.name in MMA and (shape := mma_shape(instruction)) is not None:
            m, n, k = shape
            total += m * n * k / (4 if instruction.name in WARPGROUP else 1)
    return total


def estimate_code(record: Record, function: Function, resident: int | None = None) -> CodeEstimate:
    """The modelled time of a built record on its own problem and GPU.

    ``function``: the kernel's machine code. ``resident``: CTAs per SM, by default as many as registers and shared
    memory allow.
    """
    rates, sms, work = record.target.rates, memory.usable_sms(record), record.work
    resident = resident or max(1, record.ctas_per_sm(function.registers))
    sm_ctas = ceil_div(record.ctas, sms)
    ctas_at_once = min(sm_ctas, resident)  # CTAs that run on the busiest SM at a time
    workload = Workload(record, Ways(function), machine_of(record, sms, ctas_at_once))
    timeline, cycles, iteration = _busiest_sm(workload, sm_ctas, ctas_at_once)
    sm_us = cycles / rates.mhz
    main_us = min(sm_us, sm_ctas / ctas_at_once * iteration * workload.iterations / rates.mhz)
    dram_us = memory.dram_bytes(record, work, rates, sms * ctas_at_once) / rates.dram_bytes_us
    # Stores overlap the part of the time in which the SMs do not multiply; the SMs wait for the other stores.
    # Persistent CTAs do not run in step, so some store while others multiply.
    in_waves = not workload.ways.consumer.next_tile
    stores_us = _stores_us(record) * min(1.0, main_us / sm_us) if in_waves else 0.0
    around_us = LAUNCH_US + memory.sums_us(record, work, rates, sms, ctas_at_once)
    if work.tensor_maps:
        around_us += memory.DESCRIPTOR_US
    us = around_us + max(sm_us, dram_us - stores_us + rates.latency_us) + stores_us
    return CodeEstimate(us, sm_us, main_us, dram_us, stores_us, around_us, iteration, ctas_at_once, timeline)


def _stores_us(record: Record) -> float:
    """Time of the bytes of D that the L2 cannot keep, at the rate of device memory.

    The CTAs of a wave run in step and store together. The L2 is then full of what the previous wave stored, and must
    write as much back while no tensor core works.
    """
    rates = record.target.rates
    stored = record.m * record.n * record.output.bytes
    return max(0.0, stored - L2_SHARE * rates.l2_size) / rates.dram_bytes_us


def machine_of(record: Record, sms: int, ctas_at_once: int) -> Machine:
    """An SM that runs ``ctas_at_once`` CTAs of a record, and shares the L2 with the other SMs that have CTAs."""
    rates = record.target.rates
    return Machine(
        record.arch,
        record.target,
        sub_cores=min(SUB_CORES, ctas_at_once * record.threads // 32),
        l2_bytes=l2_share(rates, sms, record.ctas),
        l2_cycles=rates.l2_clocks,
        fill_bytes=record.work.l2_bytes,
        stages=record.ring_steps,
    )


def _busiest_sm(workload: Workload, sm_ctas: int, ctas_at_once: int) -> tuple[Timeline, float, float]:
    """Simulates an SM that computes ``sm_ctas`` tiles, ``ctas_at_once`` of them at a time.

    Returns the simulation of the first tiles, the cycles of all, and the cycles of an iteration of the main loop.
    Persistent CTAs take one tile after the other; other CTAs come in waves.
    """
    if workload.ways.consumer.next_tile:
        return _sub_core(workload, ctas_at_once, ceil_div(sm_ctas, ctas_at_once))
    timeline, cycles, iteration = _sub_core(workload, ctas_at_once, 1)
    cycles *= sm_ctas // ctas_at_once
    if remainder := sm_ctas % ctas_at_once:
        cycles += _sub_core(workload, remainder, 1)[1]
    return timeline, cycles, iteration


def _sub_core(workload: Workload, ctas: int, tiles: int) -> tuple[Timeline, float, float]:
    """Simulates one sub-core's share of ``ctas`` CTAs with ``tiles`` tiles each. Returns what ``_busiest_sm`` does."""
    if not workload.ways.consumer.iteration:
        timeline = simulate(streams(workload, ctas, 0), workload.machine)
        return timeline, timeline.cycles * tiles, 0.0
    # Three simulations give the time of all tiles and iterations: the first tiles with many iterations (``timeline``),
    # the same with fewer iterations (``before``), and more tiles with those fewer iterations (``after``).
    first, more = min(tiles, workload.concurrent_tiles), min(tiles, 2 * workload.concurrent_tiles)
    issues = len(workload.ways.consumer.iteration) * len(streams(workload, ctas, 1, first))
    iterations = min(workload.iterations, max(ISSUES // issues, workload.record.ring_steps + MIN_ITERATIONS))
    fewer = max(1, min(iterations - 2, (iterations + workload.record.ring_steps) // 2))
    # If all iterations are simulated, the last ones commit groups without copies, and fewer iterations stand for a
    # shorter k.
    all_iterations = iterations == workload.iterations and tiles == 1
    timeline = simulate(
        streams(workload, ctas, iterations, first),
        workload.machine_for(iterations) if all_iterations else workload.machine,
    )
    # The difference of a long and a short run is what further iterations add, without prologue and epilogue.
    if fewer < iterations:
        before = simulate(
            streams(workload, ctas, fewer, first), workload.machine_for(fewer) if all_iterations else workload.machine
        )
        iteration = (timeline.cycles - before.cycles) / (iterations - fewer)
    else:
        before, iteration = timeline, _only_iteration(timeline, streams(workload, ctas, iterations, first))
    cycles = timeline.cycles + (workload.iterations - iterations) * iteration
    if tiles > first:
        # ``after`` are the cycles that ``more - first`` further tiles add, with ``fewer`` iterations each. Their other
        # iterations are added, and the sum is scaled to all further tiles. In ``iteration`` cycles each of ``first``
        # concurrent tiles makes an iteration.
        after = simulate(streams(workload, ctas, fewer, more), workload.machine).cycles - before.cycles
        cycles += (
            (tiles - first)
            / (more - first)
            * (after + (more - first) / first * (workload.iterations - fewer) * iteration)
        )
    return timeline, cycles, iteration / first


def _only_iteration(timeline: Timeline, warps: Sequence[Stream]) -> float:
    """Cycles of a main loop of one iteration, from the first warp with MMAs that enters it to the last that leaves
    it."""
    ends = [ends for ends, stream in zip(timeline.ends, warps, strict=True) if not stream.produces]
    return max(end[1] for end in ends) - min(end[0] for end in ends)


def streams(workload: Workload, ctas: int, iterations: int, tiles: int | None = None) -> list[Stream]:
    """The warps of one sub-core, which has its share of ``ctas`` CTAs.

    ``iterations``: iterations of the main loop per tile. ``tiles``: tiles of a CTA, by default as many as it computes
    at a time.
    """
    tiles = tiles or workload.concurrent_tiles
    way, warps = workload.ways.consumer, workload.record.threads // 32
    if workload.ways.producer is not None:
        return [
            stream for cta in range(ctas) for stream in _roles(workload, workload.ways.producer, cta, iterations, tiles)
        ]
    # A CTA has ``warps_here`` warps on the sub-core; of CTAs with fewer than four warps, not all have one here.
    warps_here = ceil_div(warps, SUB_CORES)
    ctas_here = ceil_div(ctas * warps, warps_here * SUB_CORES)
    parts = _parts(way, iterations, tiles)
    return [Stream(parts, cta) for cta in range(ctas_here) for _ in range(warps_here)]


def _parts(way: Way, iterations: int, tiles: int) -> tuple[tuple[Sequence[Instruction], int], ...]:
    """The code of a warp for several tiles, as parts that are repeated: pairs of instructions and repetitions."""
    first = ((way.before, 1), (way.iteration, iterations), (way.after, 1))
    return first + ((way.next_tile, 1), (way.iteration, iterations), (way.after, 1)) * (tiles - 1)


def _roles(workload: Workload, producer: Way, cta: int, iterations: int, tiles: int) -> list[Stream]:
    """One warp of each warpgroup of a CTA: those that multiply, which share the tiles, and the one that fills the ring
    in the order of tiles."""
    multiplying = []
    for group in range(workload.consumers):
        own = range(group % workload.concurrent_tiles, tiles, workload.concurrent_tiles)
        fills = [tile * iterations + iteration for tile in own for iteration in range(iterations)]
        if fills:
            multiplying.append(Stream(_parts(workload.ways.consumer, iterations, len(own)), cta, fills))
    fills = list(range(tiles * iterations))
    return [*multiplying, Stream(_parts(producer, iterations, tiles), cta, fills, produces=True)]
