"""Models what lies outside of a kernel's main loop: usable SMs, device-memory traffic, and the sums of a split k.

Both forms of the model use it, the cheap one (``estimate``) and the one for machine code (``code``). Times are in
microseconds.
"""

from __future__ import annotations

from math import ceil
from typing import Protocol

from cudal2gen.kernel import CtaWork, Problem, ceil_div
from kernelproof.ground.chips import Chip, Rates

DESCRIPTOR_US = 0.35  # the first TMA of a kernel fetches its tensor map
# Shared memory of another CTA of the cluster: clocks of an access, and bytes per clock and SM in clusters of four
# (arXiv 2402.13499: 180 clocks; 2.65 TB/s over the 114 SMs of an H100 PCIe at 1755 MHz, in pairs 3.27 TB/s).
PEER_CLOCKS, PEER_BYTES = 180, 13
PEER_TRIPS = 2  # trips between CTAs: the message that a CTA's ring is free, then the partial sums
# Partial sums in device memory: 16-byte loads from the L2 that a thread has in flight, and round trips to the L2
# before the first load (last store, arrival, look at the counter).
SUM_LOADS, SUM_TRIPS = 8, 3


class Tiled(Protocol):
    """The tiles of a record or of another kernel: CTAs of ``bm`` x ``bn`` elements, in ``split_k`` slices of k."""

    @property
    def problem(self) -> Problem: ...
    @property
    def target(self) -> Chip: ...
    @property
    def bm(self) -> int: ...
    @property
    def bn(self) -> int: ...
    @property
    def tiles_m(self) -> int: ...
    @property
    def tiles_n(self) -> int: ...
    @property
    def split_k(self) -> int: ...
    @property
    def ctas(self) -> int: ...
    @property
    def cluster_ctas(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def shares_last_wave(self) -> bool: ...


def usable_sms(tiled: Tiled) -> int:
    """How many SMs clusters can use. Clusters of four and more leave some idle, because GPCs have 16 or 18 SMs: 15 of
    16 are assumed to be usable, rounded down to whole clusters."""
    ctas = tiled.cluster_ctas
    return tiled.target.sms // ctas * ctas if ctas <= 2 else tiled.target.sms * 15 // 16 // ctas * ctas


def dram_bytes(tiled: Tiled, work: CtaWork, rates: Rates, concurrent_ctas: int) -> float:
    """Traffic of device memory in bytes: each operand once, and what must be loaded again because the L2 evicted it.

    ``concurrent_ctas``: CTAs that run at a time.
    """
    problem = tiled.problem
    once, column_bytes = problem.traffic_bytes, problem.element.bytes * problem.k
    operands = column_bytes * (problem.m + problem.n)
    if operands <= rates.l2_size * 2 // 3:  # A and B stay in the L2, of which D and other data take the rest
        return once
    # A wave of CTAs covers a rectangle of tiles, in the order of the raster. It loads this rectangle's rows of A and
    # columns of B, and the model assumes that the L2 keeps none of them for the next wave.
    rows, cols, tiles = tiled.tiles_m, tiled.tiles_n, tiled.tiles_m * tiled.tiles_n
    wave = min(tiles, max(1, concurrent_ctas // tiled.split_k))
    if work.raster_along == "m":
        rows = min(work.raster_band, rows, wave)
        cols = min(cols, ceil_div(wave, rows))
    else:
        cols = min(work.raster_band, cols, wave)
        rows = min(rows, ceil_div(wave, cols))
    per_wave = column_bytes * (rows * tiled.bm + cols * tiled.bn)
    return max(once, tiles / wave * per_wave + problem.output.bytes * problem.m * problem.n)


def sums_us(tiled: Tiled, work: CtaWork, rates: Rates, sms: int, ctas_at_once: int) -> float:
    """Time of the sums of a split k, in microseconds.

    Within clusters, CTAs send each other the parts that they do not add themselves. Otherwise partial sums are written
    to the L2 and read back. Both take round trips and move bytes. ``ctas_at_once``: CTAs that an SM runs at a time.
    """
    if tiled.split_k > 1 and work.summed_by == "cluster":
        sent = ceil_div(tiled.ctas, sms) * tiled.bm * tiled.bn * 4 * (tiled.split_k - 1) / tiled.split_k
        return (PEER_TRIPS * PEER_CLOCKS + sent / PEER_BYTES) / rates.mhz
    stored, loaded = _partial_sums(tiled, work, sms, ctas_at_once)
    if not stored:
        return 0.0
    threads = ctas_at_once * (128 * work.issuers if work.asynchronous else tiled.threads)
    loads = ceil(loaded * tiled.bm * tiled.bn / 4 / threads)  # of 16 bytes, or four fp32 sums, for each thread
    trips = SUM_TRIPS + ceil_div(loads, SUM_LOADS)
    moved = (stored + loaded) * tiled.bm * tiled.bn * 4  # bytes
    return (trips * rates.l2_clocks + moved / rates.l2_bytes) / rates.mhz


def _partial_sums(tiled: Tiled, work: CtaWork, sms: int, ctas_at_once: int) -> tuple[float, float]:
    """How many fp32 tiles of partial sums the busiest SM writes, and how many it reads."""
    if tiled.shares_last_wave:
        # Each CTA of the SM stores one partial tile, and so do the SM's CTAs of the last wave, whose tiles are shared.
        last_wave = tiled.ctas % (sms * ctas_at_once)
        stored = ctas_at_once + last_wave / sms if last_wave else 0.0
        return stored, stored
    if tiled.split_k == 1:
        return 0.0, 0.0
    stored = ceil_div(tiled.ctas, sms)
    return stored, stored if work.summed_by == "all" else ceil_div(tiled.tiles_m * tiled.tiles_n, sms) * tiled.split_k
