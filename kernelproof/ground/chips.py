"""Lists the facts about GPUs: all numbers and names that belong to a GPU model or to a compute capability.

``CAPABILITIES`` has the facts that all models of a compute capability share. ``GPUS`` has the models for which there
may be records, by the name in a record's field ``gpu``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

WARP = 32  # threads of a warp
REGISTERS_SM = 65536  # 32-bit registers of an SM; on all capabilities here
REGISTERS_THREAD = 255  # registers that a thread can address
SUB_CORES = 4  # sub-cores of an SM; each has a scheduler and a quarter of the registers
TMA_CYCLES = 170  # clocks by which a load by TMA takes longer than a plain load (H800, arXiv 2501.12084)
MIN_SMEM_BLOCK_BYTES = 99 << 10  # shared memory that a CTA can have on every capability since 8.0
MMA_FLOPS_BYTES = 2  # bytes per element of A and B for which rates are stated; half as many bytes have twice the rate
SMEM_UNIT, SYSTEM_SMEM = 128, 1024  # bytes: a CTA gets a multiple of the first, and the system reserves the second
L2_PORT = 64  # the most bytes per clock that an SM loads from the L2 (NVIDIA's white paper for GA100)


def allocated_smem(smem_bytes: int) -> int:
    """The bytes of shared memory that a CTA gets for itself."""
    return -(-smem_bytes // SMEM_UNIT) * SMEM_UNIT


class Residency(NamedTuple):
    """How many CTAs fit on an SM by each of its limits. The smallest of these numbers is how many are resident."""

    by_registers: int
    by_smem: int
    by_threads: int
    by_blocks: int

    @property
    def ctas(self) -> int:
        """How many CTAs are resident."""
        return min(self)


class Capability(NamedTuple):
    """The facts that all GPUs of one compute capability share.

    ``sm``: the architecture for which nvcc compiles. ``smem_block_bytes``: the most shared memory of a CTA;
    ``smem_sm_bytes``: that of an SM. ``threads_sm``, ``blocks_sm``: the most resident threads and CTAs of an SM.
    Source: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".

    ``mma_flops``: dense fp16 FLOP per clock and SM of the tensor cores with their best instruction and fp16
    accumulators; NVIDIA's peak rates divided by SMs and boost clocks give it (A100 312 TFLOP/s, RTX 3090 142, L40S
    362, RTX 4090 330, H100 989, B200 2250, RTX 5090 419). ``mma_sync_share``: the share of this rate that mma.sync
    reaches, measured by users of such cards; for 10.0, where no measurement is known, the rate of 8.0 is assumed.
    ``has_wgmma``: whether warpgroups multiply by wgmma, which binds code to this capability. ``has_tcgen05``: the same
    for tcgen05, where one thread starts the tensor cores and accumulators lie in tensor memory.
    """

    sm: str
    smem_block_bytes: int
    smem_sm_bytes: int
    threads_sm: int
    blocks_sm: int
    mma_flops: int
    mma_sync_share: float = 1.0
    has_wgmma: bool = False
    has_tcgen05: bool = False

    @property
    def number(self) -> tuple[int, int]:
        """The major and the minor number."""
        major, minor = divmod(int(self.sm.removeprefix("sm_")), 10)
        return major, minor

    @property
    def has_tma(self) -> bool:
        """Whether the GPUs have TMA, and mbarriers that count its bytes. They do from 9.0 on."""
        return self.number >= (9, 0)

    def ctas_by_smem(self, smem_bytes: int) -> int:
        """How many CTAs an SM's shared memory holds. Each takes whole units, and some bytes for the system."""
        return self.smem_sm_bytes // (allocated_smem(smem_bytes) + SYSTEM_SMEM)

    def residency(self, threads: int, registers: int, smem_bytes: int) -> Residency:
        """How many CTAs fit on an SM, as NVIDIA's occupancy calculator counts them. ``threads``: a multiple of 32 per
        CTA. ``registers``: per thread. ``smem_bytes``: per CTA."""
        # A sub-core has a quarter of the registers, and allocates them to whole warps in units of 256.
        register_warps = REGISTERS_SM // SUB_CORES // (-(-registers * WARP // 256) * 256) * SUB_CORES
        return Residency(
            by_registers=register_warps // (threads // WARP),
            by_smem=self.ctas_by_smem(smem_bytes),
            by_threads=self.threads_sm // threads,
            by_blocks=self.blocks_sm,
        )


CAPABILITIES: dict[str, Capability] = {
    "8.0": Capability("sm_80", 163 << 10, 164 << 10, 2048, 32, mma_flops=2048),
    "8.6": Capability("sm_86", 99 << 10, 100 << 10, 1536, 16, mma_flops=1024),
    "8.9": Capability("sm_89", 99 << 10, 100 << 10, 1536, 24, mma_flops=1024),
    "9.0": Capability("sm_90", 227 << 10, 228 << 10, 2048, 32, mma_flops=4096, mma_sync_share=0.62, has_wgmma=True),
    "10.0": Capability("sm_100", 227 << 10, 228 << 10, 2048, 32, mma_flops=8192, mma_sync_share=0.25, has_tcgen05=True),
    "12.0": Capability("sm_120", 99 << 10, 100 << 10, 1536, 24, mma_flops=1024),
}


class Rates(NamedTuple):
    """The rates of a GPU for the cost model, from data sheets, or measured by users of such cards if these are silent.

    ``mhz``: clock under load (measured). ``smem_bytes``: bytes per clock and SM from shared memory (32 banks of 4
    bytes); ``l2_bytes``: the same from the L2 (measured). ``dram_bytes_us``: bytes per microsecond of a copy in device
    memory (data sheet, less 10 to 17 %). ``l2_size``: bytes of the L2, as devices report it. ``latency_us``:
    microseconds of a load from device memory (measured). ``l2_clocks``: clocks of a load that hits the L2 (measured:
    arXiv 2402.13499, 2501.12084; nothing is published for the RTX 3090, for which the RTX 4090's number is used, and
    for H20 and B200, for which the H200's is used).
    """

    mhz: int
    l2_bytes: int
    dram_bytes_us: float
    l2_size: int
    latency_us: float
    l2_clocks: int
    smem_bytes: int = 128


class Chip(NamedTuple):
    """One GPU model.

    ``title``: its name without the vendor, as the driver spells it. ``sms``: multiprocessors (data sheet).
    ``stand_ins``: models of other capabilities whose records are tried if this model has none, nearest first.
    ``heuristics``: its name in ``NvMatmulHeuristicsNvidiaGpu`` of nvidia-matmul-heuristics. ``mma_share``: the share of
    its capability's ``mma_flops`` that this model has.
    """

    title: str
    capability: Capability
    sms: int
    rates: Rates
    stand_ins: tuple[str, ...]
    heuristics: str
    mma_share: float = 1.0

    def tensor_flops(self, fp32_sums: bool, operand_bytes: float) -> float:
        """Dense FLOP per clock and SM of the tensor cores with their best instruction. ``operand_bytes``: the size of
        an element of A and B."""
        flops = _with_sums(self.capability.mma_flops * self.mma_share, self.title, fp32_sums)
        return flops * MMA_FLOPS_BYTES / operand_bytes

    def mma_sync_flops(self, fp32_sums: bool, operand_bytes: float) -> float:
        """Dense FLOP per clock and SM of the tensor cores with mma.sync. ``operand_bytes`` as in ``tensor_flops``."""
        most = self.capability.mma_flops * self.capability.mma_sync_share * MMA_FLOPS_BYTES / operand_bytes
        return min(self.tensor_flops(fp32_sums, operand_bytes), most)

    def mma_sync_share(self, fp32_sums: bool) -> float:
        """The rate of mma.sync as a share of the best instruction's rate."""
        return self.mma_sync_flops(fp32_sums, MMA_FLOPS_BYTES) / self.tensor_flops(fp32_sums, MMA_FLOPS_BYTES)

    @property
    def limits(self) -> dict[str, str | int]:
        """The limits of this model that kernels have to keep, as JSON values."""
        capability = self.capability
        return {
            "title": self.title,
            "sm": capability.sm,
            "sms": self.sms,
            "smem_block_bytes": capability.smem_block_bytes,
            "smem_sm_bytes": capability.smem_sm_bytes,
            "threads_sm": capability.threads_sm,
            "blocks_sm": capability.blocks_sm,
            "registers_sm": REGISTERS_SM,
            "registers_thread": REGISTERS_THREAD,
        }


# Data sheets: NVIDIA's architecture white papers for GA100, GA102, AD102, GH100 and GB202 give SMs, L2, peak rates and
# bandwidth (RTX 4090: 128 SMs, 72 MiB, 1008 GB/s, 330 TFLOP/s with fp16 sums and 165 with fp32 ones). B200: the
# Blackwell Tuning Guide gives shared memory, the HGX data sheet 2250 TFLOP/s, the driver 148 SMs, an L2 of 126.5 MiB
# and 7.67 TB/s (7680 bits at 3996 MHz, github.com/pytorch/ao/pull/4002); its L2 gave TMA 49.5 bytes per clock and SM at
# most (github.com/SemiAnalysisAI/microbench-blackwell, tma2dmcast_sweep_results.csv: lts_sectors_tex_read * 32 /
# sm_cycles / 148). NVIDIA publishes no data sheet of the H20: 96 GB at 4.0 TB/s, an L2 of 60 MB and 148 TFLOP/s (a
# quarter of the H100's rate of an SM) are what its sellers state; its 78 SMs are Geekbench's reading of the driver. RTX
# PRO 6000 Blackwell (Workstation Edition): its data sheet gives 24064 CUDA cores, so 188 SMs, and 1792 GB/s, reviews an
# L2 of 128 MiB; clocks and latencies are the RTX 5090's.
GPUS: dict[str, Chip] = {
    "a100": Chip("A100", CAPABILITIES["8.0"], 108, Rates(1380, 40, 1.7e6, 40 << 20, 0.6, 262), (), "A100_SXM_80GB"),
    "rtx3090": Chip(
        "GeForce RTX 3090", CAPABILITIES["8.6"], 82, Rates(1700, 28, 0.85e6, 6 << 20, 0.5, 273), ("l40s", "a100"),
        "RTX_3090",
    ),
    "rtx4090": Chip(
        "GeForce RTX 4090", CAPABILITIES["8.9"], 128, Rates(2500, 28, 0.88e6, 72 << 20, 0.6, 273), ("rtx3090", "a100"),
        "RTX_4090",
    ),
    "l40s": Chip(
        "L40S", CAPABILITIES["8.9"], 142, Rates(2200, 28, 0.75e6, 96 << 20, 0.6, 273), ("rtx3090", "a100"), "L40S"
    ),
    "h100": Chip(
        "H100", CAPABILITIES["9.0"], 132, Rates(1700, 40, 3.0e6, 50 << 20, 0.7, 263), ("a100",), "H100_SXM"
    ),
    "h200": Chip(
        "H200", CAPABILITIES["9.0"], 132, Rates(1700, 40, 4.1e6, 60 << 20, 0.7, 263), ("a100",), "H200_SXM"
    ),
    "h20": Chip(
        "H20", CAPABILITIES["9.0"], 78, Rates(1800, 40, 3.5e6, 60 << 20, 0.7, 263), ("a100",), "H20_SXM", mma_share=0.25
    ),
    "b200": Chip(
        "B200", CAPABILITIES["10.0"], 148, Rates(1850, 48, 6.6e6, 126 << 20, 0.7, 263), ("a100", "rtx3090"), "B200"
    ),
    "rtx5090": Chip(
        "GeForce RTX 5090", CAPABILITIES["12.0"], 170, Rates(2400, 28, 1.6e6, 96 << 20, 0.7, 360),
        ("rtx4090", "l40s", "rtx3090", "a100"), "RTX_5090",
    ),
    "rtxpro6000": Chip(
        "RTX PRO 6000 Blackwell", CAPABILITIES["12.0"], 188, Rates(2400, 28, 1.6e6, 128 << 20, 0.7, 360),
        ("rtx4090", "l40s", "rtx3090", "a100"), "RTX_PRO_6000",
    ),
}  # fmt: skip

# Distances in octaves; see ``distance``.
OTHER_MODEL, FURTHEST_RELATIVE = 0.1, 0.95
OTHER_CAPABILITY, FURTHER_STAND_IN, WITHOUT_WGMMA = 1.0, 0.5, 4.0

# Words in the names of a model's slower or cut-down relatives, such as "H100 PCIe": these are other GPUs.
VARIANTS = frozenset({"ti", "super", "laptop", "max", "d", "nvl", "pcie", "mig", "3e"})


def model_of(name: str, sms: int | None = None) -> str | None:
    """The model in ``GPUS`` for a device name such as ``NVIDIA H200``; None if the model or variant is not in it.

    With ``sms``, also None for a cut-down card or a part of a card, which has the same name but fewer SMs.
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    for gpu, chip in GPUS.items():
        title = set(chip.title.lower().split())
        if title <= words and not (words - title) & VARIANTS:
            return gpu if sms in (None, chip.sms) else None
    return None


LAST_OF_FAMILY = {10: 103, 11: 110, 12: 121}  # the last capability of a family, by the major number


def capability_range(arch: str) -> tuple[int, int]:
    """The first and the last compute capability (90 for 9.0) that run a cubin for an architecture such as sm_90a.

    Plain code runs on its capability and on later ones with the same major number. Code with the suffix ``a`` runs on
    exactly one capability, code with ``f`` also on later ones of its family, as far as the family is known. Source:
    CUDA C++ Programming Guide, "Compute Capabilities", family- and architecture-specific features; ptxas 13.0 assembles
    sm_100f for sm_103 and sm_120f for sm_121, and sm_100f neither for sm_110 nor for sm_120.
    """
    number, suffix = re.fullmatch(r"sm_(\d+)([af]?)", arch).groups()  # type: ignore[union-attr]
    first = int(number)
    last = {"a": first, "f": LAST_OF_FAMILY.get(first // 10, first)}
    return first, last.get(suffix, first // 10 * 10 + 9)


def runs(arch: str, capability: tuple[int, int]) -> bool:
    """Whether a device of a compute capability runs a cubin for an architecture."""
    first, last = capability_range(arch)
    return first <= 10 * capability[0] + capability[1] <= last


class CardFacts(NamedTuple):
    """A card as its driver describes it, whether it is a model of ``GPUS`` or not.

    ``model``: its name in ``GPUS``, or None, see ``model_of``. ``smem_block_bytes``: the most shared memory of a CTA.
    """

    name: str
    model: str | None
    capability: tuple[int, int]
    sms: int
    smem_block_bytes: int

    @classmethod
    def of(cls, name: str, capability: tuple[int, int], sms: int, smem_block_bytes: int = 0) -> CardFacts:
        """Makes the facts of a card from the driver's answers. If the driver does not report shared memory, the
        capability's limit is used."""
        kind = CAPABILITIES.get(".".join(map(str, capability)))
        smem = smem_block_bytes or (kind.smem_block_bytes if kind else MIN_SMEM_BLOCK_BYTES)
        return cls(name, model_of(name, sms), capability, sms, smem)

    @property
    def sm(self) -> str:
        """The architecture, such as sm_90."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def text(self) -> str:
        """Name, architecture and SMs."""
        return f"{self.name} ({self.sm}, {self.sms} SMs)"

    def takes(self, arch: str, smem_bytes: int) -> bool:
        """Whether a kernel runs on this card, by its cubin's architecture and the shared memory of its CTA.

        Clusters have portable sizes, and grids of persistent kernels depend on the device, so these need no check.
        """
        return runs(arch, self.capability) and smem_bytes <= self.smem_block_bytes

    def stand_ins(self, models: Iterable[str]) -> list[str]:
        """The models whose records can serve this card, nearest first: its own model, then models of its capability by
        the ratio of SMs, then models of earlier capabilities whose plain code this card runs."""

        def order(model: str) -> tuple[bool, int, float]:
            chip = GPUS[model]
            return model != self.model, -chip.capability.number[1], abs(math.log2(chip.sms / max(1, self.sms)))

        return sorted(
            (model for model in models if model in GPUS and runs(GPUS[model].capability.sm, self.capability)), key=order
        )


def distance(gpu: str, other: str) -> float:
    """How far another GPU's records are from serving a GPU, in octaves; a size and its double are one octave apart.

    Models of one capability run the same code. With half the SMs each SM has twice the work, like for a problem of
    twice the size. So the distance is the logarithm of the ratio of SMs, plus a little so that a model's own records
    come first; it stays below the distance of any other capability. Tiles and stages are tuned for the shared memory
    and the rates of a capability, so the first stand-in of another capability is one octave away, and each further one
    half an octave more. Records without wgmma on a GPU that has it lose a third of the rate, so they come after all but
    the most distant sizes of the GPU's own records.
    """
    if gpu == other:
        return 0.0
    if related(gpu, other):
        return min(OTHER_MODEL + abs(math.log2(GPUS[gpu].sms / GPUS[other].sms)), FURTHEST_RELATIVE)
    order = GPUS[gpu].stand_ins if gpu in GPUS else ()
    place = order.index(other) if other in order else len(order)
    loses_wgmma = gpu in GPUS and GPUS[gpu].capability.has_wgmma
    return OTHER_CAPABILITY + FURTHER_STAND_IN * place + (WITHOUT_WGMMA if loses_wgmma else 0.0)


def related(gpu: str, other: str) -> bool:
    """Whether two models have the same compute capability. A model that is not in ``GPUS`` is related only to
    itself."""
    return gpu == other or (gpu in GPUS and other in GPUS and GPUS[gpu].capability == GPUS[other].capability)


def tensor_flops(capability: str, title: str, fp32_sums: bool, operand_bytes: float) -> float:
    """``Chip.tensor_flops`` for a device by its name; 0 for a capability that is not in ``CAPABILITIES``."""
    if model := model_of(title):
        return GPUS[model].tensor_flops(fp32_sums, operand_bytes)
    flops = CAPABILITIES[capability].mma_flops if capability in CAPABILITIES else 0
    return _with_sums(flops, title, fp32_sums) * MMA_FLOPS_BYTES / operand_bytes


def _with_sums(flops: float, title: str, fp32_sums: bool) -> float:
    """``flops``, or with ``fp32_sums`` the rate for sums in fp32: GeForce cards halve it (NVIDIA's white papers for
    GA102, AD102 and GB202)."""
    return flops / 2 if fp32_sums and "GeForce" in title else flops
