"""Samples of a race: what a call takes as it is used, with cold operands, and with the host's time.

Decoding and training read each weight once in a step, from device memory. So before each sample other data is read, and
its calls take turns on sets of operands, as under ``bench``'s device protocol. A stream of eager calls goes at the pace
of the device or of the host, whichever takes longer, so the sample of a call is the longer one of the two. The host's
time is that of planned calls, which C++ makes where it can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from cudal2gen.operators.measuring.contests import Contest
from cudal2gen.operators.meter import Meter
from cudal2gen.results import L2, Environment, exceeds
from cudal2gen.results.choice import TableKernel

HOST_ROUNDS, HOST_CALLS = 3, 10  # samples of the host's time for a call, of which the least counts, and calls of each


class Sample(NamedTuple):
    """Microseconds of a call on the device, and of an eager call."""

    device: float
    eager: float


@dataclass
class Entrant:
    """A kernel in a race. ``sample`` takes one sample; ``error`` is that of its first result; ``sample_us``: what a
    sample costs the budget, 0 before the first; ``first``: the log ratio of torch's time to its own, by its first
    samples."""

    kernel: TableKernel
    sample: Callable[[], Sample]
    error: float
    sample_us: float = 0.0
    first: float = 0.0
    samples: list[Sample] = field(default_factory=list)


def eager(samples: Iterable[Sample]) -> list[float]:
    """The times of eager calls."""
    return [sample.eager for sample in samples]


class Stopwatch:
    """Takes the samples of a race. ``calls``: in a sample; ``l2``: the state of the L2 before them; ``torch_us``: the
    host's time for torch's product."""

    def __init__(self, meter: Meter, environment: Environment) -> None:
        self._meter, self._environment = meter, environment
        self.calls, self.torch_us = 1, 0.0
        self.l2: L2 = "cold"
        self._beside_us = math.inf  # what a sample takes beside its calls, mostly to read other data

    def ready(self, contest: Contest) -> None:
        """Readies a contest for samples, which are of this one from now on."""
        exceeded = exceeds(contest.problem, self._environment.l2_bytes, contest.products)
        self.l2 = "exceeded" if exceeded else "cold"
        if not exceeded:
            contest.rotate(self.calls)
        self.torch_us = self.host_us(contest.planned_by_torch())

    def by_torch(self, contest: Contest) -> Sample:
        """A sample of torch's product."""
        return self.sample(contest.by_torch, self.torch_us)

    def sample(self, call: Callable[[], object], host_us: float = 0.0) -> Sample:
        """A sample of calls for each of which the host takes ``host_us``."""
        began = self._meter.now()
        if self.l2 == "cold":
            self._meter.evict()
        of_calls = self._meter.elapsed_us(call, self.calls)
        self._beside_us = min(self._beside_us, (self._meter.now() - began) * 1e6 - of_calls)
        us = of_calls / self.calls
        return Sample(us, max(us, host_us))

    def cost_us(self, us: float) -> float:
        """What a sample of calls that take ``us`` on the device costs the budget. Some sample was taken before."""
        return us * self.calls + max(0.0, self._beside_us)

    def host_us(self, call: Callable[[], object]) -> float:
        """The host's time for a call that is made as planned ones are."""
        return min(self._meter.host_us(call, HOST_CALLS) for _ in range(HOST_ROUNDS)) / HOST_CALLS
