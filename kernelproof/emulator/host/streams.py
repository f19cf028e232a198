"""Streams and events: work is done when it is given, and clocks say what CUDA would have ordered.

Every stream has a clock, and so has the host. Work on a stream knows what the host knew when it gave the work. The
default stream waits for all streams that block on it, and they wait for it. Events and synchronisation join clocks. Two
pieces of work on the same bytes, of which one writes and which no clock orders, are a finding. ``graphs`` records the
work of streams under capture and of graph nodes; each node has a clock, too.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kernelproof.emulator.host.cuda import INVALID_HANDLE, SUCCESS
from kernelproof.emulator.host.graph_memory import GraphMemory
from kernelproof.emulator.host.graphs import Graph, Graphs
from kernelproof.emulator.host.runtime_state import Call, RuntimeState, put
from kernelproof.emulator.host.standin import Words
from kernelproof.emulator.memory.arena import Buffer
from kernelproof.emulator.memory.device_state import Touched
from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.mangled import plain_name
from kernelproof.emulator.state.participants import placed
from kernelproof.emulator.state.reports import Report

HOST, DEFAULT = -1, 0
NON_BLOCKING = 1
FIRST_HANDLE = 0x10000
LONGEST_HISTORY = 32  # pieces of work that are remembered per buffer

Clock = dict[int, int]  # stream -> number of its pieces of work that are known to be over


@dataclass
class _Event:
    """What an event passes on: a clock, its time in seconds, and the graph under capture that it was recorded in."""

    clock: Clock = field(default_factory=dict)
    seconds: float = 0.0
    graph: Graph | None = None


@dataclass
class _Access:
    """Work that touched a buffer: its stream, the number of that work on the stream, and the bytes: masks of granules
    of ``size`` bytes from byte ``first`` on (None: none)."""

    stream: int
    tick: int
    name: str
    size: int
    read: Array | None
    written: Array | None
    first: int

    @property
    def end(self) -> int:
        """The byte after the last granule."""
        return self.first + self.size * max(len(mask) for mask in (self.read, self.written, ()) if mask is not None)

    def window(self, mask: Array, size: int, first: int, end: int) -> Array:
        """The part of a mask from byte ``first`` to before ``end``, in finer granules of ``size`` bytes."""
        skipped = (first - self.first) // self.size
        coarse = mask[skipped : -((self.first - end) // self.size)]
        fine = coarse if size == self.size else np.repeat(coarse, self.size // size)
        return fine[(first - self.first - skipped * self.size) // size :][: (end - first) // size]


class Streams:
    """The streams, events and graphs of a session."""

    def __init__(self, state: RuntimeState) -> None:
        self.state = state
        self.clocks: dict[int, Clock] = {HOST: {}, DEFAULT: {}}
        self.created: set[int] = set()
        self.blocking: set[int] = set()
        self.events: dict[int, _Event] = {}
        self.last_handle = FIRST_HANDLE
        self.graphs = Graphs(self._handle, self._play, GraphMemory(state.memory, self.touch_whole, self.forget))
        self.give = self.graphs.give
        self.history: dict[int, list[_Access]] = {}
        self.calls: dict[str, Call] = {
            "stream_create": self.create,
            "stream_destroy": self.destroy,
            "stream_synchronize": self.synchronize,
            "stream_wait_event": self.wait_event,
            "synchronize": self.synchronize_device,
            "event_create": self.create_event,
            "event_destroy": self.destroy_event,
            "event_record": self.record,
            "event_synchronize": self.synchronize_event,
            "event_elapsed": self.elapsed,
            "host_function": self.host_function,
            **self.graphs.calls,
        }

    @property
    def several(self) -> bool:
        """Has the program made streams of its own?"""
        return len(self.clocks) > 2

    def forget(self, buffer: Buffer) -> None:
        """Forget a buffer that is about to be freed: the host waits for all work on it."""
        self.history.pop(buffer.start, None)

    # --- work ---

    def touch(self, stream: int, name: str, touched: Iterable[Touched], wait: bool = False) -> None:
        """Account for work on a stream. There is a finding for each buffer that unordered work has touched. ``wait``:
        the host waits for the end of the work."""
        stream = self._number(stream)
        clock = self._issue(stream)
        if self.several:
            for buffer, size, read, written, at in touched:
                self._compare(buffer, _Access(stream, clock[stream], name, size, read, written, at), clock)
        if wait:
            _join(self.clocks[HOST], clock)

    def touch_whole(self, stream: int, name: str, buffer: Buffer) -> None:
        """An allocation begins or ends on a stream; for the order of streams it is an access to all of its bytes."""
        everything = np.broadcast_to(np.True_, buffer.nbytes)
        self.touch(stream, name, [Touched(buffer, 1, None, everything)] if self.several else [])

    def _number(self, stream: int) -> int:
        """The number of a stream with a clock: the default stream for handles that are no stream of this session."""
        return stream if stream in self.clocks else DEFAULT

    def _issue(self, stream: int) -> Clock:
        """The clock of a stream on which new work begins."""
        clock = self.clocks[stream]
        # The host gives work in order, so the stream knows all that the host knows.
        _join(clock, self.clocks[HOST])
        if stream == DEFAULT:
            for other in self.blocking:
                _join(clock, self.clocks[other])
        elif stream in self.blocking:
            _join(clock, self.clocks[DEFAULT])
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def _compare(self, buffer: Buffer, access: _Access, clock: Clock) -> None:
        earlier = self.history.setdefault(buffer.start, [])
        for other in earlier:
            ordered = other.tick <= clock.get(other.stream, 0)
            if not ordered and (place := _conflict(access, other)) is not None:
                address = buffer.address + place
                first, second = (f"{plain_name(item.name)} on {self._spelled(item.stream)}" for item in (access, other))
                text = f"{first} and {second} touch {self.state.memory.describe(address)}, and nothing orders them"
                self.state.reports.append(Report("stream-race", text, access.name, place=placed("global", address)))
                break
        # Work that the host knows to be over is ordered before all work to come.
        earlier[:] = [other for other in earlier if other.tick > self.clocks[HOST].get(other.stream, 0)]
        earlier.append(access)
        del earlier[:-LONGEST_HISTORY]

    def _spelled(self, stream: int) -> str:
        if stream == DEFAULT:
            return "the default stream"
        return f"{'stream' if stream in self.created else 'graph node'} {(stream - FIRST_HANDLE) // 16}"

    # --- streams ---

    def _handle(self, out: int) -> int:
        self.last_handle += 16
        put(out, "Q", self.last_handle)
        return self.last_handle

    def create(self, a: Words) -> int:
        """cudaStreamCreateWithFlags: out, flags."""
        self.add(self._handle(a[0]), blocking=not a[1] & NON_BLOCKING)
        return SUCCESS

    def own(self) -> int:
        """A new stream that neither waits for the default stream nor lets that wait for it."""
        self.last_handle += 16
        self.add(self.last_handle, blocking=False)
        return self.last_handle

    def add(self, stream: int, blocking: bool) -> None:
        """A stream of this handle."""
        self.clocks[stream] = {}
        self.created.add(stream)
        if blocking:
            self.blocking.add(stream)

    def destroy(self, a: Words) -> int:
        """cudaStreamDestroy: what the stream has done stays, in the clock of the default stream only if it blocks."""
        if a[0] in self.blocking:
            _join(self.clocks[DEFAULT], self.clocks[a[0]])
        self.blocking.discard(a[0])
        return SUCCESS

    def synchronize(self, a: Words) -> int:
        """cudaStreamSynchronize: the host knows what the stream has done."""
        stream = self._number(a[0])
        if stream == DEFAULT:
            self._issue(DEFAULT)
        _join(self.clocks[HOST], self.clocks[stream])
        return SUCCESS

    def synchronize_device(self, _: Words) -> int:
        """cudaDeviceSynchronize: the host knows everything."""
        for stream, clock in self.clocks.items():
            if stream != HOST:
                _join(self.clocks[HOST], clock)
        self.history.clear()
        return SUCCESS

    def host_function(self, a: Words) -> int:
        """cudaLaunchHostFunc: stream, function, its argument. It runs now, as part of the stream."""
        function, data = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(a[1]), a[2]

        def work(_: int) -> int:
            function(data)
            return SUCCESS

        return self.give(a[0], work)

    # --- events ---

    def create_event(self, a: Words) -> int:
        """cudaEventCreate."""
        self.events[self._handle(a[0])] = _Event()
        return SUCCESS

    def destroy_event(self, a: Words) -> int:
        """cudaEventDestroy."""
        return SUCCESS if self.events.pop(a[0], None) is not None else INVALID_HANDLE

    def record(self, a: Words) -> int:
        """cudaEventRecord: event, stream."""
        event = self.events.get(a[0])
        if event is None:
            return INVALID_HANDLE
        event.graph = self.graphs.captured.get(a[1])
        if event.graph is None:
            event.clock = dict(self._issue(self._number(a[1])))
            event.seconds = time.perf_counter()
        return SUCCESS

    def wait_event(self, a: Words) -> int:
        """cudaStreamWaitEvent: stream, event. A stream that waits for one under capture is captured too."""
        event = self.events.get(a[1])
        if event is None:
            return INVALID_HANDLE
        if event.graph is not None:
            self.graphs.join_capture(a[0], event.graph)
        else:
            _join(self.clocks[self._number(a[0])], event.clock)
        return SUCCESS

    def synchronize_event(self, a: Words) -> int:
        """cudaEventSynchronize and cudaEventQuery: the host knows what was done before the event."""
        event = self.events.get(a[0])
        if event is None:
            return INVALID_HANDLE
        _join(self.clocks[HOST], event.clock)
        return SUCCESS

    def elapsed(self, a: Words) -> int:
        """cudaEventElapsedTime: out milliseconds, start, end. It is the time that the emulator took, and never 0."""
        start, end = self.events.get(a[1]), self.events.get(a[2])
        if start is None or end is None:
            return INVALID_HANDLE
        number = np.float32(max(1e-3, 1e3 * (end.seconds - start.seconds)))
        ctypes.memmove(a[0], number.tobytes(), 4)
        return SUCCESS

    # --- graphs ---

    def _play(self, graph: Graph, stream: int) -> int:
        """Do the work of a graph on a stream: captured work first, then each node after those that it waits for."""
        for work in list(graph.work):
            if code := work(stream):
                return code
        begin = dict(self._issue(self._number(stream)))
        nodes = graph.ordered()
        for node in nodes:
            clock = self.clocks.setdefault(node, {})
            _join(clock, begin)
            for earlier in graph.before[node]:
                _join(clock, self.clocks[earlier])
            for work in list(graph.nodes[node]):
                if code := work(node):
                    return code
        for node in nodes:
            _join(self.clocks[self._number(stream)], self.clocks[node])
        return SUCCESS


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


def _conflict(a: _Access, b: _Access) -> int | None:
    """The first byte that both pieces of work touch and at least one writes; None if there is none."""
    start, end, size = max(a.first, b.first), min(a.end, b.end), min(a.size, b.size)
    if start >= end:
        return None
    first = None
    for x, y in ((a.written, b.written), (a.written, b.read), (a.read, b.written)):
        if x is None or y is None:
            continue
        common = np.flatnonzero(a.window(x, size, start, end) & b.window(y, size, start, end))
        if len(common) and (first is None or start + common[0] * size < first):
            first = start + int(common[0]) * size
    return first
