"""Builds the kernels of the next evaluations in the background, while the device times others."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from cudal2gen.kernel import Record

# A batch ends with its slowest kernel, and until then the builder's other cores are idle. Several small builders
# therefore waste less than one large builder.
CORES_EACH = 3  # cores of each builder
MOST_EACH = 8  # most kernels of a batch, for each core of its builder; the headers are parsed once for a batch


class Build(Protocol):
    """Compiles records into the build directory on ``cores`` cores.

    It calls ``report`` now and then with the number of finished kernels and the number of all kernels. An exception
    that ``report`` raises ends the compilers.
    """

    def __call__(self, records: Sequence[Record], cores: int, report: Callable[[int, int], None]) -> object: ...


class BackgroundBuilds:
    """Threads that build records in batches, in the order in which the records were added.

    ``cores``: the cores of all builders together. The default is the machine's cores; if there are more than
    ``CORES_EACH``, one of them is left to the proposers and the device's host thread.
    """

    def __init__(self, build: Build, cores: int | None = None) -> None:
        machine = os.cpu_count() or 1
        cores = cores or machine - (machine > CORES_EACH)
        self._build, self._closed = build, False
        self._builders = max(1, cores // CORES_EACH)
        self._cores = cores // self._builders
        self._queue: deque[Record] = deque()
        self._added_keys: set[object] = set()
        self._finished_keys: set[object] = set()
        self._condition = threading.Condition()
        for _ in range(self._builders):
            threading.Thread(target=self._serve, name="compile-ahead", daemon=True).start()

    def add(self, records: Sequence[Record]) -> None:
        """Queues the records that were never queued, and returns immediately."""
        with self._condition:
            for record in records:
                if record.kernel_key not in self._added_keys:
                    self._added_keys.add(record.kernel_key)
                    self._queue.append(record)
            self._condition.notify_all()

    def wait(self, records: Sequence[Record]) -> None:
        """Waits until those of these records that were added are compiled or have failed to, or until ``close``."""
        keys = {record.kernel_key for record in records}
        with self._condition:
            self._condition.wait_for(lambda: self._closed or keys & self._added_keys <= self._finished_keys)

    def close(self) -> None:
        """Drops the queue, and ends each compiler after its current kernel."""
        with self._condition:
            self._closed = True
            self._queue.clear()
            self._condition.notify_all()

    def _serve(self) -> None:
        """Builds batches until there are no more; the thread runs this."""
        while batch := self._next_batch():
            with suppress(Exception):  # the evaluation of the record compiles it again, and reports the failure
                self._build(batch, self._cores, self._report)
            with self._condition:
                self._finished_keys |= {record.kernel_key for record in batch}
                self._condition.notify_all()

    def _next_batch(self) -> list[Record]:
        """Takes the next batch from the queue: an equal part for each builder, so that all have work. Empty after
        ``close``."""
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._queue)
            size = min(MOST_EACH * self._cores, -(-len(self._queue) // self._builders))
            return [self._queue.popleft() for _ in range(size)]

    def _report(self, _done: int, _total: int) -> None:
        if self._closed:
            raise _Closed


class _Closed(Exception):
    """Ends compilers after ``close``."""
