"""Device clocks, for measurements during calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from cudal2gen.launch.gpu import Card, evict
from cudal2gen.results import Environment

CYCLES_US = 2000  # cycles of an SM in a microsecond on fast cards; slower cards are held a little longer
HOLD_MARGIN = 1.25
FIRST_CALL_US, MAX_CALL_US = 20.0, 100.0  # time that the host takes for a call: assumed at first, believed at most


class Meter(Protocol):
    """The clock of a device."""

    @property
    def environment(self) -> Environment:
        """The card and everything else that times depend on. Raises GpuError if it cannot be read."""
        ...

    def elapsed_us(self, call: Callable[[], object], times: int) -> float:
        """Device time of this many calls in a row, in microseconds."""
        ...

    def host_us(self, call: Callable[[], object], times: int) -> float:
        """The host's time for this many calls in a row, in microseconds, without the device's."""
        ...

    def evict(self) -> None:
        """Enqueues a read that evicts everything else from the L2."""
        ...

    def synchronize(self) -> None: ...
    def idle(self) -> bool:
        """Whether the current stream has nothing to do."""
        ...

    def now(self) -> float:
        """The host's clock in seconds."""
        ...


class CudaMeter:
    """The clock of a CUDA device of torch, on that device's current stream, whichever device is current.

    The stream is kept busy until the host has enqueued all calls of a sample. Otherwise short kernels would wait for
    the host, and a sample would measure the host.
    """

    def __init__(self, index: int) -> None:
        import torch

        self._torch, self._card, self._index = torch, Card(index), index
        # The host's time for a call, as a maximum that fades: long and short calls alternate.
        self._call_us = FIRST_CALL_US
        self._stream = partial(torch.cuda.current_stream, index)

    @property
    def environment(self) -> Environment:
        return self._card.environment

    def elapsed_us(self, call: Callable[[], object], times: int) -> float:
        start, stop = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = self._stream()
        self._hold(times * self._call_us)
        began = self.now()
        start.record(stream)
        for _ in range(times):
            call()
        stop.record(stream)
        call_us = (self.now() - began) * 1e6 / times
        self._call_us = min(max(call_us, 0.9 * self._call_us), MAX_CALL_US)
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1000

    def host_us(self, call: Callable[[], object], times: int) -> float:
        self.synchronize()  # a full queue would make the host wait
        began = self.now()
        for _ in range(times):
            call()
        return (self.now() - began) * 1e6

    def evict(self) -> None:
        with self._torch.cuda.device(self._index), self._torch.cuda.stream(self._stream()):
            evict(self._torch.device("cuda", self._index))

    def _hold(self, us: float) -> None:
        """Keeps the stream busy for at least this long."""
        with self._torch.cuda.device(self._index):
            self._torch.cuda._sleep(int(us * HOLD_MARGIN * CYCLES_US))

    def synchronize(self) -> None:
        self._stream().synchronize()

    def idle(self) -> bool:
        return bool(self._stream().query())

    def now(self) -> float:
        return time.perf_counter()
