"""What a user chooses for a launch: the device, and which checks and figures are on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kernelproof.emulator.state.sites import Site
from kernelproof.ground.chips import GPUS, REGISTERS_SM, Chip

_A100 = GPUS["a100"]


@dataclass(frozen=True)
class Device:
    """The GPU that a host launcher sees, without arguments an A100. Sizes in bytes."""

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
        kind = chip.capability
        return cls(
            chip.sms, kind.smem_block_bytes, kind.number, chip.title, kind.smem_sm_bytes,
            threads_per_sm=kind.threads_sm, blocks_per_sm=kind.blocks_sm, l2_bytes=chip.rates.l2_size,
        )  # fmt: skip


HOPPER = Device.of(GPUS["h200"])


# Threads that are executed as one vector: in the first batch of a launch, and at most.
MIN_LANES, MAX_LANES = 2048, 32768


RoundingName = Literal["model", "a100", "h100"]  # how tensor cores round fp32 sums


@dataclass(frozen=True)
class Options:
    """``hazards``: ordering checks; ``counters``: performance counters; ``lanes``: threads executed as one vector
    (None: ``MIN_LANES`` at first, up to ``MAX_LANES`` while that pays); ``loop_limit``: taken backward branches per
    batch before a launch counts as hung (None: no limit; a loop whose state repeats is hung in any case). ``adverse``:
    another order of events that hardware may choose: of all
    warpgroups that can run the last one does, until it waits, and every try_wait that has to wait times out at first;
    otherwise only a thread's first one at each instruction. ``rounding``: how tensor cores add products of f16 and bf16
    to fp32 sums: ``model`` rounds once an instruction, others are of ``arithmetic.tensor_rounding``, bit by bit and
    slower. ``progress`` is called with the CTAs that have ended and
    all that run; a launch that is tried again begins anew. ``looping`` is called with the backward branch of a loop and
    how many were taken, each time that their number has doubled."""

    hazards: bool = True
    counters: bool = False
    lanes: int | None = None
    loop_limit: int | None = 1_000_000
    adverse: bool = False
    rounding: RoundingName = "model"
    progress: Callable[[int, int], None] | None = None
    looping: Callable[[Site, int], None] | None = None
