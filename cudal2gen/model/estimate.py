"""An analytic model of a kernel's time. Its figures are estimates from a dozen constants, never measurements.

A CTA's k-tile takes as long as the slowest of: MMAs, reading operands from shared memory, bringing them from the L2,
the latency of a load shared out over the ring, and a warp's own instructions between MMAs where the family counts them.
An SM works off its share of CTAs; device memory bounds the whole. Around that stand launch, first load, epilogue and
the reduction of a split k. Not modelled: bank conflicts, power, and what one warp does while others wait. Times are in
microseconds.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from cudal2gen.chips import Rates
from cudal2gen.kernel import Record, Work, ceil_div
from cudal2gen.model import memory

STORE_BYTES = {"tma": 32, "direct": 20}  # per clock and SM
ISSUE = {"one": 0.80, "many": 0.93}  # share of the MMA rate that one, or several, warpgroups sustain
MMA_SYNC_ISSUE = 0.85


class Estimate(NamedTuple):
    """A modelled time and what it is made of; the parts of the main loop are bounds of which the largest counts."""

    us: float
    main_us: float
    bounds_us: dict[str, float]
    around_us: float


def estimate(record: Record) -> Estimate:
    """The modelled time of a record on its own problem and GPU."""
    rates, sms, work = record.target.rates, memory.usable_sms(record), record.work
    resident = max(1, record.ctas_per_sm(record.estimated_registers))
    per_sm: float = ceil_div(record.ctas, sms)
    together = min(ceil_div(record.ctas, sms), resident)
    tile_steps = ceil_div(ceil_div(record.k, record.k_step), record.split_k)
    clock = rates.mhz
    if record.shares_last_wave:
        per_sm, together = record.ctas / sms, resident

    steps = ceil(per_sm * tile_steps)
    flight = record.steps_in_flight * together
    bounds = {
        "mma": steps * _mma_clocks(record, work) / clock,
        "shared memory": steps * (work.shared_bytes / rates.smem_bytes) / clock,
        "L2": steps * work.l2_bytes / rates.l2_bytes / clock,
        "latency": steps * rates.latency_us / flight if tile_steps > record.steps_in_flight else 0.0,
        "issue": steps / together * work.issue_clocks / clock,
        "device memory": memory.dram_bytes(record, work, rates, sms * together) / rates.dram_bytes_us,
    }
    main = max(bounds.values())
    around = memory.LAUNCH_US + rates.latency_us + _epilogue_us(record, work, rates, per_sm)
    around += memory.sums_us(record, work, rates, sms, together)
    if work.tensor_maps:
        around += memory.DESCRIPTOR_US
    return Estimate(main + around, main, bounds, around)


def hides_issue(record: Record) -> bool:
    """Whether a k-step's MMAs take at least as long as the instructions between them that a warp issues by itself."""
    return record.work.issue_clocks <= _mma_clocks(record, record.work)


def _mma_clocks(record: Record, work: Work) -> float:
    """Clocks of the tensor cores for one k-step of one CTA."""
    flops, chip, fp32_sums = 2 * record.bm * record.bn * record.k_step, record.target, record.acc == "f32"
    if work.instruction == "wgmma":
        return flops / chip.tensor_flops(fp32_sums) / ISSUE["many" if work.issuers > 1 else "one"]
    return flops / chip.mma_sync_flops(fp32_sums) / MMA_SYNC_ISSUE


def _epilogue_us(record: Record, work: Work, rates: Rates, per_sm: float) -> float:
    """From the last MMA to the last store; between tiles only where nothing else runs meanwhile."""
    tile_us = record.bm * record.bn * record.element.bytes / STORE_BYTES[work.store] / rates.mhz
    if record.split_k > 1:
        tile_us /= record.split_k
    return 0.3 + tile_us * (1 if work.epilogue_hidden else per_sm)
