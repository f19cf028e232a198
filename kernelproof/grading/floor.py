"""The least time that a GPU needs: what no kernel can be faster than."""

from __future__ import annotations

from typing import NamedTuple

from kernelproof.grading.arithmetic import rank
from kernelproof.ground.chips import GPUS, Chip
from kernelproof.ground.errors import WrongInput

# Rates in ``chips`` are what GPUs reach under load: boost clocks and data-sheet bandwidths are up to a fifth above.
HEADROOM = 1.25


class Floor(NamedTuple):
    """Microseconds that each of them takes alone: arithmetic at the tensor cores' peak, the L2, device memory for what
    the L2 cannot hold, and one load from device memory."""

    arithmetic: float
    l2: float
    dram: float
    latency: float

    @property
    def us(self) -> float:
        return max(self)

    @property
    def bound(self) -> str:
        return max(self._fields, key=lambda name: float(getattr(self, name)))


def chip(name: str) -> Chip:
    """A GPU by its name. Raises WrongInput."""
    if name not in GPUS:
        raise WrongInput(f"gpu {name!r}: one of {', '.join(GPUS)}")
    return GPUS[name]


def floor(target: Chip, flops: float, nbytes: int, operands: str) -> Floor:
    """The least time of a problem of ``flops`` operations that reads and writes ``nbytes``.

    Every choice is the kernel's: the fastest instruction with fp16 sums, all that fits in the L2 already there."""
    rates = target.rates
    operand_bytes = 1 if rank(operands) < rank("bf16") else 2  # at least of narrower ones, at most of tf32
    rate = target.tensor_flops(False, operand_bytes) * target.sms * rates.mhz * HEADROOM  # per microsecond
    return Floor(
        arithmetic=flops / rate,
        l2=nbytes / (rates.l2_bytes * target.sms * rates.mhz * HEADROOM * 2),
        dram=max(0, nbytes - rates.l2_size) / (rates.dram_bytes_us * HEADROOM),
        latency=rates.latency_us / HEADROOM,
    )
