"""Measures times of calls on a device and on the host, for measurements during calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from cudal2gen.launch.gpu import Card, evict
from cudal2gen.results import Environment

CYCLES_US = 2000  # cycles of an SM in a microsecond on fast cards; on slower cards a stream stays busy a little longer
HOLD_MARGIN = 1.25  # factor on the time for which a stream is kept busy
FIRST_CALL_US, MAX_CALL_US = 20.0, 100.0  # the host's time for a call: the assumption at first, and the upper limit


class Meter(Protocol):
    """The clock of a device."""

    @property
    def environment(self) -> Environment:
        """The card, and everything else on which times depend. Raises GpuError if it cannot be read."""
        ...

    def elapsed_us(self, call: Callable[[], object], times: int) -> float:
        """The device's time for ``times`` calls in a row, in microseconds."""
        ...

    def host_us(self, call: Callable[[], object], times: int) -> float:
        """The host's time for ``times`` calls in a row, in microseconds, without waiting for the device."""
        ...

    def evict(self) -> None:
        """Enqueues a read that evicts everything else from the L2."""
        ...

    def synchronize(self) -> None:
        """Waits until the current stream has nothing to do."""
        ...

    def idle(self) -> bool:
        """Whether the current stream has nothing to do."""
        ...

    def now(self) -> float:
        """The host's clock in seconds."""
        ...


class CudaMeter:
    """The clock of a CUDA device of torch. It uses that device's current stream, even if another device is current.

    The stream is kept busy until the host has enqueued all calls of a sample. Otherwise short kernels would wait for
    the host, and a sample would measure the host's time.
    """

    def __init__(self, index: int) -> None:
        import torch

        self._torch, self._card, self._index = torch, Card(index), index
        # The host's time for a call, as a slowly decaying maximum, because long and short calls alternate.
        self._call_us = FIRST_CALL_US
        self._stream = partial(torch.cuda.current_stream, index)

    @property
    def environment(self) -> Environment:
        """See ``Meter``."""
        return self._card.environment

    def elapsed_us(self, call: Callable[[], object], times: int) -> float:
        """See ``Meter``."""
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
        """See ``Meter``."""
        self.synchronize()  # so that the host does not wait for room in the queue
        began = self.now()
        for _ in range(times):
            call()
        return (self.now() - began) * 1e6

    def evict(self) -> None:
        """See ``Meter``."""
        with self._torch.cuda.device(self._index), self._torch.cuda.stream(self._stream()):
            evict(self._torch.device("cuda", self._index))

    def _hold(self, us: float) -> None:
        """Keeps the stream busy for at least this long."""
        with self._torch.cuda.device(self._index):
            self._torch.cuda._sleep(int(us * HOLD_MARGIN * CYCLES_US))

    def synchronize(self) -> None:
        """See ``Meter``."""
        self._stream().synchronize()

    def idle(self) -> bool:
        """See ``Meter``."""
        return bool(self._stream().query())

    def now(self) -> float:
        """See ``Meter``."""
        return time.perf_counter()
