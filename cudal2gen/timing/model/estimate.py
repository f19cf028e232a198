"""Models a kernel's time by formulas from its parameters. This cheap form takes tens of microseconds per estimate.

A CTA computes k-steps one after the other. Each part of the chip bounds the time of a step: tensor cores, shared
memory, the L2, device memory, issue, a CTA's chain of waits, and the latency of a load divided by the loads under way.
CTAs come in waves; in the last one, with fewer CTAs, an SM hides less latency. The bounds of a wave are combined by a
norm (``OVERLAP``). Launch, first load, epilogue and the sums of a split k are added.

Not modelled: bank conflicts, the order of instructions, and a clock that falls under load. Times are in microseconds.
docs/timing-model.md has the constants and their sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cudal2gen.kernel import GPUS, CtaWork, Problem, Record, ceil_div
from cudal2gen.timing.model import memory
from kernelproof.ground.chips import REGISTERS_THREAD, SUB_CORES, TMA_CYCLES, Chip
from kernelproof.profile import LAUNCH_US, l2_share

# Exponents of the norm. Bounds delay one another: while a warp waits for one resource, it leaves another idle. With
# exponent 4, two equal bounds take 2^(1/4) = 1.19 times either of them, and if two differ much, only the larger counts.
# If the TMA copies, no warp with MMAs waits for its own copies, and the time is nearly that of the largest bound.
OVERLAP = {"threads": 4, "tma": 16}
STORE_BYTES = {"tma": 64, "direct": 20}  # bytes per clock and SM; bytes of TMA pass through shared memory twice
# Share of the MMA rate that one warpgroup, or several, sustain. tcgen05.mma, which one thread queues, counts as
# several.
ISSUE = {"one": 0.80, "many": 0.93}
MMA_SYNC_ISSUE = 0.85  # the same share for mma.sync
# Clocks in the main loops of 150 sm_80 kernels of the catalog (ptxas 13.0): a k-block takes at least BLOCK_CLOCKS;
# ITERATION_CLOCKS pass from a k-step's last MMA to the next step's first (barrier, address arithmetic, ldmatrix).
BLOCK_CLOCKS, ITERATION_CLOCKS = 38, 100
PROLOGUE_US = 0.3  # from a CTA's start to its first load
EPILOGUE_US = 0.3  # from the last MMA to the first store, and from the last store to the end


class ModelledKernel(NamedTuple):
    """Parameters of a kernel that the model reads. Extents are in elements.

    - ``k_step``: the k of one step of the main loop.
    - ``threads``: threads per CTA; ``warps``: its warps with MMAs; ``resident``: CTAs per SM.
    - ``flight``: how many k-steps are loaded while one is multiplied; 0 if a CTA waits for each load as soon as it has
      issued it.
    - ``persistent``: whether a CTA computes several tiles.
    - ``shares_last_wave``: whether all CTAs share the last tiles.
    """

    problem: Problem
    target: Chip
    work: CtaWork
    bm: int
    bn: int
    k_step: int
    threads: int
    warps: int
    flight: int
    resident: int
    split_k: int = 1
    cluster_ctas: int = 1
    persistent: bool = False
    shares_last_wave: bool = False

    @property
    def tiles_m(self) -> int:
        """CTA tiles along m."""
        return ceil_div(self.problem.m, self.bm)

    @property
    def tiles_n(self) -> int:
        """CTA tiles along n."""
        return ceil_div(self.problem.n, self.bn)

    @property
    def ctas(self) -> int:
        """CTA tiles; slices of k count as tiles of their own."""
        return self.tiles_m * self.tiles_n * self.split_k

    @property
    def tile_steps(self) -> int:
        """k-steps of one CTA's tile."""
        return ceil_div(ceil_div(self.problem.k, self.k_step), self.split_k)


class Estimate(NamedTuple):
    """A modelled time (``us``) and its parts, in microseconds.

    ``bounds_us``: the time of the main loop if it needed only one part of the chip, by part. ``main_us``: the time of
    the main loop, which combines them wave by wave. ``around_us``: all that the main loop does not hide.
    """

    us: float
    main_us: float
    bounds_us: dict[str, float]
    around_us: float


class Floor(NamedTuple):
    """The least time of a problem at rates that a chip sustains (``chips.Rates``), in microseconds.

    ``compute_us``: its FLOP at the tensor cores' rate under load. ``memory_us``: its operands once through device
    memory. ``us``: the longer of the two, and a launch. Higher clocks, or operands that are in the L2, can beat it;
    ``kernelproof.grading.floor`` is the bound for claims.
    """

    us: float
    compute_us: float
    memory_us: float


class Wave(NamedTuple):
    """``times`` equal waves, in each of which ``ctas`` CTAs run, ``on_busiest_sm`` of them on the busiest SM.

    ``times`` is a fraction if all CTAs share the last tiles.
    """

    times: float
    ctas: int
    on_busiest_sm: int


def estimate(record: Record) -> Estimate:
    """The modelled time of a record on its own problem and GPU."""
    return estimate_kernel(kernel_of(record))


def floor(problem: Problem) -> Floor:
    """The least time of a problem on its GPU; see ``Floor``."""
    chip = GPUS[problem.gpu]
    compute = problem.flops / (problem.tensor_flops * chip.sms * chip.rates.mhz)
    moved = problem.traffic_bytes / chip.rates.dram_bytes_us
    return Floor(LAUNCH_US + max(compute, moved), compute, moved)


def kernel_of(record: Record) -> ModelledKernel:
    """The parameters of a record that the model reads."""
    work = record.work
    return ModelledKernel(
        record.problem,
        record.target,
        work,
        record.bm,
        record.bn,
        record.k_step,
        record.threads,
        4 * work.issuers if work.asynchronous else record.threads // 32,  # a warpgroup is four warps
        record.steps_in_flight,
        max(1, record.ctas_per_sm(min(REGISTERS_THREAD, record.estimated_registers))),
        record.split_k,
        record.cluster_ctas,
        work.asynchronous,
        record.shares_last_wave,
    )


def estimate_kernel(kernel: ModelledKernel) -> Estimate:
    """The modelled time of any kernel."""
    rates, sms, work = kernel.target.rates, memory.usable_sms(kernel), kernel.work
    waves = list(_waves(kernel, sms))
    concurrent_ctas = min(kernel.ctas, sms * kernel.resident)
    dram_us = memory.dram_bytes(kernel, work, rates, concurrent_ctas) / rates.dram_bytes_us
    latency = rates.latency_us * rates.mhz + (TMA_CYCLES if work.tensor_maps else 0)
    step = _Step(kernel, latency)
    overlap = OVERLAP["tma" if work.tensor_maps else "threads"]
    bounds: dict[str, float] = {}
    main = 0.0
    for wave in waves:
        # µs of the wave, for each clock that a k-step takes. Device memory's time is divided among waves by their CTAs.
        us_per_clock = wave.times * kernel.tile_steps / rates.mhz
        parts = {name: us_per_clock * clocks for name, clocks in step.clocks(wave, sms).items()}
        parts["device memory"] = dram_us * wave.times * wave.ctas / kernel.ctas
        main += sum(part**overlap for part in parts.values()) ** (1 / overlap)
        for name, part in parts.items():
            bounds[name] = bounds.get(name, 0.0) + part
    around_us = LAUNCH_US + _ends_us(kernel, waves, latency / rates.mhz)
    around_us += memory.sums_us(kernel, work, rates, sms, min(kernel.resident, ceil_div(kernel.ctas, sms)))
    if work.tensor_maps:
        around_us += memory.DESCRIPTOR_US
    return Estimate(main + around_us, main, bounds, around_us)


def hides_issue(record: Record) -> bool:
    """Whether the MMAs of a k-step take at least as long as the issue of a warp's other instructions."""
    return record.work.issue_clocks <= _mma_clocks(kernel_of(record))


def _waves(kernel: ModelledKernel, sms: int) -> Iterator[Wave]:
    """The full waves, and the last one. If all CTAs share the last tiles, they count as a fraction of a full wave."""
    slots = sms * kernel.resident
    full, remainder = divmod(kernel.ctas, slots)
    if kernel.shares_last_wave:
        yield Wave(kernel.ctas / slots, slots, kernel.resident)
        return
    if full:
        yield Wave(full, slots, kernel.resident)
    if remainder:
        yield Wave(1, remainder, ceil_div(remainder, sms))


class _Step:
    """How many clocks of each part of the chip one k-step of a CTA takes. ``latency``: clocks of a load."""

    def __init__(self, kernel: ModelledKernel, latency: float) -> None:
        self._kernel = kernel
        self._latency = latency
        self._mma = _mma_clocks(kernel)
        work = kernel.work
        self._shared = work.shared_bytes / kernel.target.rates.smem_bytes + work.lines
        if work.epilogue_hidden:
            # The epilogue takes no time of its own, but its accesses of shared memory delay the main loop's.
            self._shared += _store_clocks(kernel) / kernel.tile_steps
        # A load delays the k-step only if the CTA waits for it as soon as it has issued it.
        waits = latency if kernel.flight == 0 else 0.0
        self._chain = max(work.issue_clocks, self._lone_clocks()) + waits

    def _lone_clocks(self) -> float:
        """Clocks of a k-step by mma.sync if the CTA has the SM to itself, fitted to the machine code of such loops.

        Fragments of one k-block are loaded while the MMAs of the previous block run. The MMAs of the last block hide as
        much of ``ITERATION_CLOCKS`` as they take.
        """
        kernel = self._kernel
        if kernel.work.asynchronous:
            return 0.0
        blocks = max(1, kernel.k_step // kernel.problem.element.mma_k)
        issued = self._mma * max(1.0, SUB_CORES / kernel.warps)
        return max(issued + max(0.0, ITERATION_CLOCKS - issued / blocks), blocks * BLOCK_CLOCKS)

    def clocks(self, wave: Wave, sms: int) -> dict[str, float]:
        """Clocks that each part of the chip needs for one k-step of all CTAs of a wave on the busiest SM."""
        kernel, on_busiest_sm = self._kernel, wave.on_busiest_sm
        # Latency is no bound if it is in the chain already, or if all loads of a tile are issued at its start.
        latency_counted = kernel.flight == 0 or kernel.tile_steps <= kernel.flight
        return {
            "mma": max(on_busiest_sm * self._mma, self._chain),
            "shared memory": on_busiest_sm * self._shared,
            "L2": on_busiest_sm * kernel.work.l2_bytes / l2_share(kernel.target.rates, sms, wave.ctas),
            "latency": 0.0 if latency_counted else self._latency / kernel.flight,
        }


def _mma_clocks(kernel: ModelledKernel) -> float:
    """Clocks that an SM's tensor cores take for one k-step of one CTA."""
    flops = 2 * kernel.bm * kernel.bn * kernel.k_step
    if kernel.work.asynchronous:
        single_issuer = kernel.work.instruction == "wgmma" and kernel.work.issuers == 1
        return flops / kernel.problem.tensor_flops / ISSUE["one" if single_issuer else "many"]
    return flops / kernel.problem.mma_sync_flops / MMA_SYNC_ISSUE


def _ends_us(kernel: ModelledKernel, waves: list[Wave], latency_us: float) -> float:
    """Time before the first MMA of CTAs and after their last MMA.

    The first wave counts in full. Further waves count only as far as neither the SM's other CTAs nor the next tile's
    main loop hides this time.
    """
    before, after = PROLOGUE_US + latency_us, EPILOGUE_US + _store_clocks(kernel) / kernel.target.rates.mhz
    further_waves = sum(wave.times for wave in waves) - 1
    between = 0.0 if kernel.work.epilogue_hidden else after if kernel.persistent else before + after
    return before + after + max(0.0, further_waves) * between / kernel.resident


def _store_clocks(kernel: ModelledKernel) -> float:
    """Clocks that a CTA takes to store its share of a tile."""
    tile_bytes = kernel.bm * kernel.bn * kernel.problem.output.bytes / kernel.split_k
    return tile_bytes / STORE_BYTES[kernel.work.store]
