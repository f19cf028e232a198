"""What surrounds a kernel's main loop on the chip: how its CTAs lie over the SMs, what crosses the L2 and device
memory, the sums of a split k, and the launch. Both forms of the model use it. Times are in microseconds.
"""

from __future__ import annotations

from math import ceil

from cudal2gen.chips import Rates
from cudal2gen.kernel import Record, Work, ceil_div

LAUNCH_US = 1.6
DESCRIPTOR_US = 0.35  # the first TMA of a kernel fetches its tensor map
CLUSTER_REDUCE_US = 1.0  # two cluster barriers and a round of distributed shared memory
# Of partial sums in device memory: a thread's 16-byte loads from the L2 in flight, and the trips there before the
# first: its last store, the arrival, the look at the counter.
SUM_LOADS, SUM_TRIPS = 8, 3


def usable_sms(record: Record) -> int:
    """SMs that clusters can use: those of four and more strand some, since GPCs have 16 or 18 SMs."""
    ctas = record.cluster_ctas
    return record.target.sms // ctas * ctas if ctas <= 2 else record.target.sms * 15 // 16 // ctas * ctas


def dram_bytes(record: Record, work: Work, rates: Rates, at_once: int) -> float:
    """Bytes between device memory and chip: what is there once, and again what the L2 forgot between waves."""
    once = record.problem.traffic_bytes
    operands = record.element.bytes * record.k * (record.m + record.n)
    if operands <= rates.l2_size * 2 // 3:
        return once
    band = min(work.raster_band, record.tiles_m)
    tiles = record.tiles_m * record.tiles_n
    wave = min(tiles, max(1, at_once // record.split_k))
    rows, cols = min(band, wave), ceil_div(wave, band)
    per_wave = record.element.bytes * record.k * (rows * record.bm + min(cols, record.tiles_n) * record.bn)
    return max(once, tiles / wave * per_wave + record.element.bytes * record.m * record.n)


def sums_us(record: Record, work: Work, rates: Rates, sms: int, together: int) -> float:
    """Where a tile's k is shared out: partial sums to the L2, and from there, trips and bytes, behind the launch that
    clears counters; or within clusters."""
    if record.split_k > 1 and work.summed_by == "cluster":
        return CLUSTER_REDUCE_US
    kept, added = _partial_sums(record, work, sms, together)
    if not kept:
        return 0.0
    threads = together * (128 * work.issuers if work.instruction == "wgmma" else record.threads)
    loads = ceil(added * record.bm * record.bn / 4 / threads)
    trips = SUM_TRIPS + ceil_div(loads, SUM_LOADS)
    moved = (kept + added) * record.bm * record.bn * 4
    return LAUNCH_US + (trips * rates.l2_clocks + moved / rates.l2_bytes) / rates.mhz


def _partial_sums(record: Record, work: Work, sms: int, together: int) -> tuple[float, float]:
    """Tiles of fp32 that the busiest SM keeps in device memory, and that it reads there."""
    if record.shares_last_wave:
        last_wave = record.ctas % (sms * together)
        kept = together + last_wave / sms if last_wave else 0.0
        return kept, kept
    if record.split_k == 1:
        return 0.0, 0.0
    kept = ceil_div(record.ctas, sms)
    return kept, kept if work.summed_by == "all" else ceil_div(record.tiles_m * record.tiles_n, sms) * record.split_k
