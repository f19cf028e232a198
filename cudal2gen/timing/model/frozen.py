"""Models a kernel's time by the analytic formulas of 2026-11-22, for the tuner's model environment alone.

The environment multiplies these times by hidden terms. Proposers may use the model that is under development
(``timing.model.estimate``), so the environment's times must come from another one. This module never changes, so that
searches remain comparable.

A CTA's k-tile takes as long as the slowest of its MMAs, its operands from shared memory, its operands from the L2, the
latency of a load divided by the loads under way, and a warp's other instructions if the family counts them. Device
memory bounds the whole. Launch, first load, epilogue and the sums of a split k are added. Times are in microseconds.
"""

from __future__ import annotations

from math import ceil

from cudal2gen.kernel import CtaWork, Record, ceil_div
from kernelproof.ground.chips import Rates

LAUNCH_US = 1.6
EPILOGUE_US = 0.3  # every epilogue, in addition to its stores
DESCRIPTOR_US = 0.35  # the first TMA of a kernel fetches its tensor map
CLUSTER_REDUCE_US = 1.0  # two cluster barriers and a round of distributed shared memory
# Partial sums in device memory: 16-byte loads from the L2 that a thread has in flight, and round trips to the L2
# before the first load (last store, arrival, look at the counter).
SUM_LOADS, SUM_TRIPS = 8, 3
STORE_BYTES = {"tma": 32, "direct": 20}  # per clock and SM
ISSUE = {"one": 0.80, "many": 0.93}  # share of the MMA rate that one, or several, warpgroups sustain
MMA_SYNC_ISSUE = 0.85


def frozen_us(record: Record) -> float:
    """The frozen model's time of a record on its own problem and GPU."""
    rates, sms, work = record.target.rates, _usable_sms(record), record.work
    # How many CTAs the busiest SM computes, and how many of them at a time.
    resident = max(1, record.ctas_per_sm(record.estimated_registers))
    ctas_of_busiest: float = ceil_div(record.ctas, sms)
    ctas_at_once = min(ceil_div(record.ctas, sms), resident)
    tile_steps = ceil_div(ceil_div(record.k, record.k_step), record.split_k)
    clock = rates.mhz
    if record.shares_last_wave:
        # The tiles of the last wave are divided among all CTAs, so no SM has a whole tile more than others.
        ctas_of_busiest, ctas_at_once = record.ctas / sms, resident

    steps = ceil(ctas_of_busiest * tile_steps)
    flight = record.steps_in_flight * ctas_at_once
    # A CTA whose k-loop is no longer than its ring issues all loads at once. It waits for one load's latency only,
    # which ``outside_us`` counts.
    bounds = {
        "mma": steps * _mma_clocks(record, work) / clock,
        "shared memory": steps * (work.shared_bytes / rates.smem_bytes) / clock,
        "L2": steps * work.l2_bytes / rates.l2_bytes / clock,
        "latency": steps * rates.latency_us / flight if tile_steps > record.steps_in_flight else 0.0,
        "issue": steps / ctas_at_once * work.issue_clocks / clock,
        "device memory": _dram_bytes(record, work, rates, sms * ctas_at_once) / rates.dram_bytes_us,
    }
    outside_us = LAUNCH_US + rates.latency_us + _epilogue_us(record, work, rates, ctas_of_busiest)
    outside_us += _sums_us(record, work, rates, sms, ctas_at_once)
    if work.tensor_maps:
        outside_us += DESCRIPTOR_US
    return max(bounds.values()) + outside_us


def _usable_sms(record: Record) -> int:
    """How many SMs clusters can use. Clusters of four and more leave some idle, because GPCs have 16 or 18 SMs."""
    ctas = record.cluster_ctas
    return record.target.sms // ctas * ctas if ctas <= 2 else record.target.sms * 15 // 16 // ctas * ctas


def _mma_clocks(record: Record, work: CtaWork) -> float:
    """Clocks that an SM's tensor cores take for one k-step of one CTA."""
    flops, problem = 2 * record.bm * record.bn * record.k_step, record.problem
    if work.instruction == "wgmma":
        return flops / problem.tensor_flops / ISSUE["many" if work.issuers > 1 else "one"]
    return flops / problem.mma_sync_flops / MMA_SYNC_ISSUE


def _dram_bytes(record: Record, work: CtaWork, rates: Rates, at_once: int) -> float:
    """Traffic of device memory in bytes: every operand once, and what must be loaded again because the L2 evicted
    it. Nothing is evicted if the operands fill at most 2/3 of the L2."""
    once = record.problem.traffic_bytes
    operands = record.element.bytes * record.k * (record.m + record.n)
    if operands <= rates.l2_size * 2 // 3:
        return once
    # A wave of CTAs covers a rectangle of rows * cols tiles, in the order of the raster. It loads this rectangle's rows
    # of A and columns of B, and the model assumes that the L2 keeps none of them for the next wave.
    band = min(work.raster_band, record.tiles_m)
    tiles = record.tiles_m * record.tiles_n
    wave = min(tiles, max(1, at_once // record.split_k))
    rows, cols = min(band, wave), ceil_div(wave, band)
    per_wave = record.element.bytes * record.k * (rows * record.bm + min(cols, record.tiles_n) * record.bn)
    return max(once, tiles / wave * per_wave + record.element.bytes * record.m * record.n)


def _epilogue_us(record: Record, work: CtaWork, rates: Rates, ctas_of_busiest: float) -> float:
    """Time from the last MMA to the last store, in microseconds. The stores count for each of the busiest SM's CTAs, or
    once if the epilogue is hidden."""
    tile_us = record.bm * record.bn * record.element.bytes / STORE_BYTES[work.store] / rates.mhz
    if record.split_k > 1:
        tile_us /= record.split_k
    return EPILOGUE_US + tile_us * (1 if work.epilogue_hidden else ctas_of_busiest)


def _sums_us(record: Record, work: CtaWork, rates: Rates, sms: int, ctas_at_once: int) -> float:
    """Time of the sums of a split k, within clusters or through the L2.

    Through the L2, partial sums are written and read back, which takes round trips and bytes, and a launch clears the
    counters.
    """
    if record.split_k > 1 and work.summed_by == "cluster":
        return CLUSTER_REDUCE_US
    stored, loaded = _partial_sums(record, work, sms, ctas_at_once)
    if not stored:
        return 0.0
    threads = ctas_at_once * (128 * work.issuers if work.instruction == "wgmma" else record.threads)
    loads = ceil(loaded * record.bm * record.bn / 4 / threads)
    trips = SUM_TRIPS + ceil_div(loads, SUM_LOADS)
    moved = (stored + loaded) * record.bm * record.bn * 4
    return LAUNCH_US + (trips * rates.l2_clocks + moved / rates.l2_bytes) / rates.mhz


def _partial_sums(record: Record, work: CtaWork, sms: int, ctas_at_once: int) -> tuple[float, float]:
    """How many fp32 tiles of partial sums the busiest SM writes, and how many it reads."""
    if record.shares_last_wave:
        # Each CTA of the SM stores one partial tile, and so do the SM's CTAs of the last wave, whose tiles are shared.
        # The last wave's tiles are counted as if spread evenly over the SMs.
        last_wave = record.ctas % (sms * ctas_at_once)
        stored = ctas_at_once + last_wave / sms if last_wave else 0.0
        return stored, stored
    if record.split_k == 1:
        return 0.0, 0.0
    stored = ceil_div(record.ctas, sms)
    return stored, stored if work.summed_by == "all" else ceil_div(
        record.tiles_m * record.tiles_n, sms
    ) * record.split_k
