"""Computes the least time that a GPU needs for a problem. A kernel that claims to be faster did not do the work."""

from __future__ import annotations

from typing import NamedTuple

from kernelproof.grading.arithmetic import rank
from kernelproof.ground.chips import GPUS, Chip
from kernelproof.ground.errors import WrongInput

# The rates in ``chips`` are those that GPUs reach under load. Boost clocks and data-sheet bandwidths are up to a fifth
# higher; the factor makes sure that no honest time falls below the floor.
HEADROOM = 1.25
# The rate of the L2 in ``chips`` is that of loads. Reads and writes together are allowed twice as much.
L2_DIRECTIONS = 2


class Floor(NamedTuple):
    """The microseconds that each part takes alone: arithmetic at the tensor cores' peak rate, traffic of the L2,
    traffic of device memory beyond what the L2 holds, and the latency of one load from device memory."""

    arithmetic: float
    l2: float
    dram: float
    latency: float

    @property
    def us(self) -> float:
        """The least time in microseconds, if all parts overlap."""
        return max(self)

    @property
    def bound(self) -> str:
        """The name of the longest part."""
        return max(self._fields, key=lambda name: float(getattr(self, name)))


def chip(name: str) -> Chip:
    """Find a GPU by its name. Raises WrongInput."""
    if name not in GPUS:
        raise WrongInput(f"gpu {name!r}: one of {', '.join(GPUS)}")
    return GPUS[name]


def floor(target: Chip, flops: float, nbytes: int, operands: str) -> Floor:
    """The least time of a problem of ``flops`` operations that reads and writes ``nbytes``. ``operands``: the type of
    the matrices that it multiplies, such as ``f16``.

    Every doubt is decided in the kernel's favour: it uses the fastest instruction, with sums in fp16, and as much data
    as the L2 holds is in the L2 before the launch.
    """
    rates = target.rates
    operand_bytes = 1 if rank(operands) < rank("bf16") else 2  # one byte also for narrower types, two also for tf32
    flops_per_clock = target.tensor_flops(fp32_sums=False, operand_bytes=operand_bytes)
    rate = flops_per_clock * target.sms * rates.mhz * HEADROOM  # per microsecond
    return Floor(
        arithmetic=flops / rate,
        l2=nbytes / (rates.l2_bytes * L2_DIRECTIONS * target.sms * rates.mhz * HEADROOM),
        dram=max(0, nbytes - rates.l2_size) / (rates.dram_bytes_us * HEADROOM),
        latency=rates.latency_us / HEADROOM,
    )
