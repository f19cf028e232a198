"""Compilation ahead of measurements: records are compiled in the background while the device times others."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from cudal2gen.kernel import Record

CORES_EACH = 3  # of a builder: a batch ends with its slowest kernel, and its other cores idle until then
MOST_EACH = 8  # kernels of a batch, for each core: they share the compiler's reading of headers


class Build(Protocol):
    """Compiles records on so many cores into the build directory. ``report`` is called now and then with the numbers of
    kernels done and of all; what it raises ends the compilers."""

    def __call__(self, records: Sequence[Record], cores: int, report: Callable[[int, int], None]) -> object: ...


class BackgroundBuilds:
    """Builders on threads. They take what waits in the order in which it came, in batches; ``cores``: of all together,
    by default those of the machine, of which one stays free for proposers and the device where there are enough."""

    def __init__(self, build: Build, cores: int | None = None) -> None:
        machine = os.cpu_count() or 1
        cores = cores or machine - (machine > CORES_EACH)
        self._build, self._closed = build, False
        self._builders = max(1, cores // CORES_EACH)
        self._cores = cores // self._builders
        self._waiting: deque[Record] = deque()
        self._added: set[object] = set()
        self._built: set[object] = set()
        self._change = threading.Condition()
        for _ in range(self._builders):
            threading.Thread(target=self._serve, name="compile-ahead", daemon=True).start()

    def add(self, records: Sequence[Record]) -> None:
        """Puts the records in the queue that were never in it, and returns at once."""
        with self._change:
            for record in records:
                if record.kernel_key not in self._added:
                    self._added.add(record.kernel_key)
                    self._waiting.append(record)
            self._change.notify_all()

    def wait(self, records: Sequence[Record]) -> None:
        """Until compiling has been tried of all of these that were added."""
        keys = {record.kernel_key for record in records}
        with self._change:
            self._change.wait_for(lambda: self._closed or keys & self._added <= self._built)

    def close(self) -> None:
        """Drops what waits, and ends the compilers when they have finished their next kernel."""
        with self._change:
            self._closed = True
            self._waiting.clear()
            self._change.notify_all()

    def _serve(self) -> None:
        while batch := self._next():
            with suppress(Exception):  # whoever evaluates the records meets the same failure, and reports it
                self._build(batch, self._cores, self._report)
            with self._change:
                self._built |= {record.kernel_key for record in batch}
                self._change.notify_all()

    def _next(self) -> list[Record]:
        """An equal share of what waits; empty after the end."""
        with self._change:
            self._change.wait_for(lambda: self._closed or self._waiting)
            share = min(MOST_EACH * self._cores, -(-len(self._waiting) // self._builders))
            return [self._waiting.popleft() for _ in range(share)]

    def _report(self, _done: int, _total: int) -> None:
        if self._closed:
            raise _Closed


class _Closed(Exception):
    """Nobody waits for kernels any more."""
