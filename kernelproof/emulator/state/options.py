"""Defines the options of a launch: the device, and which checks and counters are on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kernelproof.emulator.state.sites import Site
from kernelproof.ground.chips import GPUS, REGISTERS_SM, Chip

_A100 = GPUS["a100"]
# Bytes of an SM's shared memory that the system takes per CTA.
RESERVED_SHARED = 1024


@dataclass(frozen=True)
class Device:
    """The GPU that a host launcher sees; by default an A100. ``sm_count``: its SMs. ``smem_optin_bytes``: the most
    shared memory of a CTA. ``capability``: major and minor number. ``registers_per_sm``: of 32 bits. ``l2_bytes``: the
    size of the L2 cache. The other fields are the limits of one SM."""

    sm_count: int = _A100.sms
    smem_optin_bytes: int = _A100.capability.smem_block_bytes
    capability: tuple[int, int] = _A100.capability.number
    name: str = "emulated"
    smem_per_sm_bytes: int = _A100.capability.smem_sm_bytes
    registers_per_sm: int = REGISTERS_SM
    threads_per_sm: int = _A100.capability.threads_sm
    blocks_per_sm: int = _A100.capability.blocks_sm
    l2_bytes: int = _A100.rates.l2_size

    @classmethod
    def of(cls, chip: Chip) -> Device:
        """The device of a chip in the catalogue of GPUs."""
        kind = chip.capability
        return cls(
            chip.sms, kind.smem_block_bytes, kind.number, chip.title, kind.smem_sm_bytes,
            threads_per_sm=kind.threads_sm, blocks_per_sm=kind.blocks_sm, l2_bytes=chip.rates.l2_size,
        )  # fmt: skip

    def resident(self, threads: int, shared_bytes: int) -> int:
        """How many CTAs an SM can hold at a time, by their threads and shared memory. Registers also limit this, but
        only ptxas knows how many a kernel uses."""
        if shared_bytes > self.smem_optin_bytes:
            return 0
        by_threads = self.threads_per_sm // (32 * -(-threads // 32))
        by_shared = self.smem_per_sm_bytes // (128 * -(-shared_bytes // 128) + RESERVED_SHARED)
        return min(self.blocks_per_sm, by_threads, by_shared)


HOPPER = Device.of(GPUS["h200"])


# How many threads are executed as one vector: in the first batch of a launch, and in the largest one.
MIN_LANES, MAX_LANES = 2048, 32768


RoundingName = Literal["model", "a100", "h100"]  # how tensor cores round fp32 sums


@dataclass(frozen=True)
class Options:
    """What is checked and counted while a kernel runs, and the order of events.

    - ``hazards``: checks of order and initialisation. ``counters``: performance counters.
    - ``lanes``: how many threads are executed as one vector. None: ``MIN_LANES`` at first, and up to ``MAX_LANES``
      while that makes execution faster.
    - ``loop_limit``: how many backward branches a batch may take before the launch counts as hung. None: no limit. A
      loop whose state repeats counts as hung in any case.
    - ``adverse``: use another order of events that hardware may choose. The last warpgroup of all that can run runs
      until it must wait, and every try_wait that must wait times out at first. Otherwise only a thread's first try_wait
      at each instruction does.
    - ``rounding``: how tensor cores add products of f16 and bf16 to fp32 sums. ``model`` rounds once per instruction.
      The others follow published measurements bit by bit (``arithmetic.tensor_rounding``) and are slower.
    - ``environment``: a seed for values that a kernel can read of its machine and on which no program may depend. With
      0, clocks begin at zero, the SM is the number of the CTA, the grid is number 0, and approximate functions are
      exact. Any other seed draws these; errors are within what PTX allows.
    - ``progress``: called with the number of CTAs that have ended and of all that run. It begins at 0 again when a
      launch is executed again.
    - ``looping``: called with the backward branch of a loop and how often it was taken, each time that number has
      doubled.
    """

    hazards: bool = True
    counters: bool = False
    lanes: int | None = None
    loop_limit: int | None = 1_000_000
    adverse: bool = False
    rounding: RoundingName = "model"
    environment: int = 0
    progress: Callable[[int, int], None] | None = None
    looping: Callable[[Site, int], None] | None = None
