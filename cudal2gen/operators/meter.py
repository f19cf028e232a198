"""Device clocks for measurements during calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from cudal2gen.gpu import Card
from cudal2gen.results import Environment


class Meter(Protocol):
    """A device's clock."""

    @property
    def environment(self) -> Environment:
        """The card and what else times depend on. Raises GpuError where it cannot be read."""
        ...

    def elapsed_us(self, call: Callable[[], object], times: int) -> float:
        """Device time of so many calls in a row, in microseconds."""
        ...

    def synchronize(self) -> None: ...
    def idle(self) -> bool:
        """Whether the current stream has nothing to do."""
        ...

    def now(self) -> float:
        """The host's clock in seconds."""
        ...


class CudaMeter:
    """The clock of a CUDA device of torch, on that device's current stream, whichever device is current."""

    def __init__(self, index: int) -> None:
        import torch

        self._torch, self._card = torch, Card(index)
        self._stream = partial(torch.cuda.current_stream, index)

    @property
    def environment(self) -> Environment:
        return self._card.environment

    def elapsed_us(self, call: Callable[[], object], times: int) -> float:
        start, stop = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = self._stream()
        start.record(stream)
        for _ in range(times):
            call()
        stop.record(stream)
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1000

    def synchronize(self) -> None:
        self._stream().synchronize()

    def idle(self) -> bool:
        return bool(self._stream().query())

    def now(self) -> float:
        return time.perf_counter()
