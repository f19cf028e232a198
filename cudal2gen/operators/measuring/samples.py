"""Takes the samples of a race: the time of a call under the conditions of its use.

Decoding and training read each weight once in a step, from device memory. So before each sample other data is read, and
the sample's calls alternate between sets of operands, as under ``bench``'s device protocol. A stream of eager calls is
limited by the device or by the host, whichever takes longer, so the longer of the two times counts. The host's time is
that of planned calls, which C++ makes if it can.
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

HOST_ROUNDS, HOST_CALLS = 3, 10  # samples of the host's time, of which the least counts, and calls in each of them


class Sample(NamedTuple):
    """The time of a call in microseconds: on the device, and as an eager call (the longer of device and host)."""

    device: float
    eager: float


@dataclass
class Entrant:
    """A kernel in a race.

    - ``sample`` takes one sample; ``samples``: those of the present heat or duel.
    - ``error``: the largest error of its first result.
    - ``sample_us``: the microseconds of the budget that a sample takes, 0 before the first sample.
    - ``first_log``: the log ratio of torch's time to the kernel's, by the first samples.
    """

    kernel: TableKernel
    sample: Callable[[], Sample]
    error: float
    sample_us: float = 0.0
    first_log: float = 0.0
    samples: list[Sample] = field(default_factory=list)


def eager_us(samples: Iterable[Sample]) -> list[float]:
    """The times of eager calls in microseconds."""
    return [sample.eager for sample in samples]


class Stopwatch:
    """Takes the samples of a race.

    ``calls``: the number of calls in a sample. ``l2``: the state of the L2 before them. ``torch_us``: the host's time
    for torch's product, in microseconds.
    """

    def __init__(self, meter: Meter, environment: Environment) -> None:
        self._meter, self._environment = meter, environment
        self.calls, self.torch_us = 1, 0.0
        self.l2: L2 = "cold"
        self._overhead_us = math.inf  # time of a sample without its calls, mostly for evicting the L2

    def ready(self, contest: Contest) -> None:
        """Prepares for samples of a contest, before which no sample of it is taken."""
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
        calls_us = self._meter.elapsed_us(call, self.calls)
        self._overhead_us = min(self._overhead_us, (self._meter.now() - began) * 1e6 - calls_us)
        us = calls_us / self.calls
        return Sample(us, max(us, host_us))

    def cost_us(self, us: float) -> float:
        """The microseconds of the budget that a sample takes whose calls each take ``us`` on the device. At least one
        sample must have been taken before."""
        return us * self.calls + max(0.0, self._overhead_us)

    def host_us(self, call: Callable[[], object]) -> float:
        """The host's time in microseconds for a call that is made like planned calls."""
        return min(self._meter.host_us(call, HOST_CALLS) for _ in range(HOST_ROUNDS)) / HOST_CALLS
