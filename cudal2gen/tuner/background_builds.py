"""Compilation in the background: kernels of the next evaluations are built while the device times others."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from cudal2gen.kernel import Record

# A batch ends with its slowest kernel, and its other cores idle until then: several small builders idle less.
CORES_EACH = 3  # cores of a builder
MOST_EACH = 8  # kernels of a batch for each core; kernels of a batch share the compiler's reading of headers


class Build(Protocol):
    """Compiles records into the build directory, on so many cores. It calls ``report`` now and then with the number of
    kernels done and of all kernels; an exception from ``report`` ends the compilers."""

    def __call__(self, records: Sequence[Record], cores: int, report: Callable[[int, int], None]) -> object: ...


class BackgroundBuilds:
    """Threads that build records in batches, in the order in which the records were added.

    ``cores``: for all builders together. By default they are the machine's, less one for proposers and the device if
    there are more than ``CORES_EACH``.
    """

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
        """Queues the records that were never queued, and returns at once."""
        with self._change:
            for record in records:
                if record.kernel_key not in self._added:
                    self._added.add(record.kernel_key)
                    self._waiting.append(record)
            self._change.notify_all()

    def wait(self, records: Sequence[Record]) -> None:
        """Waits until compiling was tried for all of these records that were added, or ``close`` was called."""
        keys = {record.kernel_key for record in records}
        with self._change:
            self._change.wait_for(lambda: self._closed or keys & self._added <= self._built)

    def close(self) -> None:
        """Drops the queue, and ends each compiler after its current kernel."""
        with self._change:
            self._closed = True
            self._waiting.clear()
            self._change.notify_all()

    def _serve(self) -> None:
        while batch := self._next():
            with suppress(Exception):  # the evaluation of the record meets the same failure, and reports it
                self._build(batch, self._cores, self._report)
            with self._change:
                self._built |= {record.kernel_key for record in batch}
                self._change.notify_all()

    def _next(self) -> list[Record]:
        """An equal share of the queue, so that all builders have work; empty after ``close``."""
        with self._change:
            self._change.wait_for(lambda: self._closed or self._waiting)
            share = min(MOST_EACH * self._cores, -(-len(self._waiting) // self._builders))
            return [self._waiting.popleft() for _ in range(share)]

    def _report(self, _done: int, _total: int) -> None:
        if self._closed:
            raise _Closed


class _Closed(Exception):
    """Ends compilers after ``close``."""
