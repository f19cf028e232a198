"""Models streams and events. Work is executed when it is issued; vector clocks tell which work CUDA would have ordered.

Every stream has a clock, and so has the host. Work on a stream is ordered after everything that the host knew to be
over when it issued the work. The default stream waits for all streams that block on it, and they wait for it. Events
and synchronisation join clocks. It is a finding if two pieces of work touch the same bytes, at least one writes, and no
clock orders them.

``graphs`` records the work of streams under capture and of graph nodes; each captured stream and each node has a clock,
too. ``order`` finds accesses of host code to bytes that pending work uses.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kernelproof.emulator.host.cuda import INVALID_HANDLE, SUCCESS
from kernelproof.emulator.host.graph_memory import GraphMemory
from kernelproof.emulator.host.graphs import CapturedGraph, Graphs, Work
from kernelproof.emulator.host.host_order import HostOrder
from kernelproof.emulator.host.runtime_state import Call, RuntimeState, put
from kernelproof.emulator.host.standin import Words, standin
from kernelproof.emulator.host.work import BufferAccess, Clock, conflict, join
from kernelproof.emulator.memory.arena import Buffer
from kernelproof.emulator.memory.device_state import AccessedGranules
from kernelproof.emulator.state.mangled import plain_name
from kernelproof.emulator.state.participants import Place, Space
from kernelproof.emulator.state.reports import Report

HOST, DEFAULT = -1, 0  # keys of ``Streams.clocks``: the host, and the default stream
PER_THREAD = 2  # cudaStreamPerThread: the default stream of the thread that calls
NON_BLOCKING = 1  # cudaStreamNonBlocking
FIRST_HANDLE, HANDLE_DISTANCE = 0x10000, 16  # handles look like addresses
LONGEST_HISTORY = 32  # pieces of work that are kept per buffer


@dataclass
class _Event:
    """The state of an event when it was last recorded: the stream's clock and the time in seconds. If the stream was
    under capture, ``graph`` is its graph, and ``mark`` is the number of that moment in ``Streams.marks``."""

    clock: Clock = field(default_factory=dict)
    seconds: float = 0.0
    graph: CapturedGraph | None = None
    mark: int = 0


class Streams:
    """The streams, events and graphs of a session."""

    def __init__(self, state: RuntimeState) -> None:
        self.state = state
        self.clocks: dict[int, Clock] = {HOST: {}, DEFAULT: {}}
        self.created: set[int] = set()
        self.blocking: set[int] = set()
        self.branches: set[int] = set()  # branches of graphs, which have clocks like streams
        self.of_threads: dict[int, int] = {}  # thread of host code -> its default stream, if each thread has one
        self.events: dict[int, _Event] = {}
        self.last_handle = FIRST_HANDLE  # of streams, events and moments
        self.graphs = Graphs(self._handle, self._play, GraphMemory(state.memory, self.touch_whole, self.forget))
        # Number of a captured event record -> the clock of its branch at this record in the latest run of the graph.
        self.marks: dict[int, Clock] = {}
        self.history: dict[int, list[BufferAccess]] = {}  # start of a buffer -> the latest accesses to it
        self.order = HostOrder(state, self.clocks[HOST], self.history)
        self.calls: dict[str, Call] = {
            "stream_create": self.create,
            "stream_destroy": self.destroy,
            "stream_id": self.identify,
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
            **self.order.calls,
        }

    @property
    def has_own_streams(self) -> bool:
        """Is there any clock but those of the host and the default stream? Streams and branches of graphs have one."""
        return len(self.clocks) > 2

    def forget(self, buffer: Buffer) -> None:
        """Forget the accesses to a buffer that the present line of host code frees."""
        buffer.freed_at = self.state.site
        self.history.pop(buffer.start, None)
        self.order.forget(buffer)

    def give(self, stream: int, work: Work) -> int:
        """Do work on a stream now, or record it while the stream is under capture; returns CUDA's error code. Findings
        of the work name the present line of host code, even if a graph does it later."""
        site = self.state.site

        def work_at_site(actual_stream: int) -> int:
            present, self.state.site = self.state.site, site
            try:
                return work(actual_stream)
            finally:
                self.state.site = present

        return self.graphs.give(stream, work_at_site)

    # --- work ---

    def matters(self, buffer: Buffer) -> bool:
        """Are accesses to a buffer compared with other work, or with host code?"""
        return self.has_own_streams or self.order.watches_over(buffer)

    def touch(self, stream: int, name: str, touched: Iterable[AccessedGranules], wait: bool = False) -> int:
        """Compare the accesses of new work on a stream with earlier work, and keep them. Each buffer that unordered
        work has touched is a finding. ``wait``: the host waits for the end of the work. Returns the number of the work
        on its stream."""
        stream = self._number(stream)
        clock = self._issue(stream)
        for buffer, size, read, written, first, strong in touched:
            if (read is not None or written is not None) and self.matters(buffer):
                access = BufferAccess(stream, clock[stream], name, size, read, written, first, self.state.site, strong)
                self._compare(buffer, access, clock)
                if not wait:
                    self.order.watch(buffer)
        if wait:
            join(self.clocks[HOST], clock)
        return clock[stream]

    def watch_own(self, stream: int, tick: int, address: int, count: int, *, writes: bool) -> None:
        """Watch the ``count`` bytes of host memory at ``address`` that an asynchronous copy reads or, if it ``writes``,
        writes, so that host code which touches them too early is found. ``tick``: the copy's number on its stream."""
        if self.state.memory.host_view is not None:
            everything = np.broadcast_to(np.True_, count)
            read, written = (None, everything) if writes else (everything, None)
            access = BufferAccess(self._number(stream), tick, "a copy", 1, read, written, 0, self.state.site)
            self.order.own_memory.watch(address, count, access)

    def touch_whole(self, stream: int, name: str, buffer: Buffer) -> None:
        """Account for an allocation or a free on a stream, which orders like a write to all bytes of the buffer."""
        everything = np.broadcast_to(np.True_, buffer.nbytes)
        self.touch(stream, name, [AccessedGranules(buffer, 1, None, everything)])

    def _number(self, stream: int) -> int:
        """The stream that a handle denotes, as a key of ``clocks``: the calling thread's own default stream, a stream,
        or the default stream for handles that are no stream of this session."""
        if stream == PER_THREAD or (stream == DEFAULT and standin().emulator_per_thread()):
            thread = threading.get_ident()
            if thread not in self.of_threads:
                self.of_threads[thread] = self._new_handle()
                self.add(self.of_threads[thread], blocking=True)
            return self.of_threads[thread]
        return stream if stream in self.clocks else DEFAULT

    def _issue(self, stream: int) -> Clock:
        """Begin new work on a stream; returns the stream's clock, in which the work is counted."""
        clock = self.clocks[stream]
        # The host gives work in order, so the stream knows all that the host knows.
        join(clock, self.clocks[HOST])
        if stream == DEFAULT:
            for other in self.blocking:
                join(clock, self.clocks[other])
        elif stream in self.blocking:
            join(clock, self.clocks[DEFAULT])
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def _compare(self, buffer: Buffer, access: BufferAccess, clock: Clock) -> None:
        """Report an access that conflicts with an earlier one which ``clock`` does not order before it; keep it."""
        earlier = self.history.setdefault(buffer.start, [])
        for other in earlier:
            if not other.is_over(clock) and (byte := conflict(access, other)) is not None:
                address = buffer.address + byte
                first, second = (
                    f"{plain_name(item.name)} on {self._stream_name(item.stream)}" for item in (access, other)
                )
                text = f"{first} and {second} touch the same memory, and nothing orders them"
                sides = access.site.participant(), other.site.participant(second)
                place = Place(Space.GLOBAL, address, self.state.memory.name(buffer), byte)
                self.state.reports.append(Report("stream-race", text, access.name, *sides, place))
                break
        # Work that the host knows to be over is ordered before all work to come.
        earlier[:] = [other for other in earlier if not other.is_over(self.clocks[HOST])]
        earlier.append(access)
        del earlier[:-LONGEST_HISTORY]

    def _stream_name(self, stream: int) -> str:
        """The name of a stream in findings."""
        if stream == DEFAULT:
            return "the default stream"
        if stream in self.of_threads.values():
            return "the default stream of a thread"
        kind = "stream" if stream in self.created else "branch" if stream in self.branches else "graph node"
        return f"{kind} {(stream - FIRST_HANDLE) // HANDLE_DISTANCE}"

    # --- streams ---

    def _new_handle(self) -> int:
        """The next handle."""
        self.last_handle += HANDLE_DISTANCE
        return self.last_handle

    def _handle(self, out: int) -> int:
        """Make a handle and write it to host memory at ``out``."""
        handle = self._new_handle()
        put(out, "Q", handle)
        return handle

    def create(self, a: Words) -> int:
        """cudaStreamCreateWithFlags: out, flags."""
        self.add(self._handle(a[0]), blocking=not a[1] & NON_BLOCKING)
        return SUCCESS

    def new_stream(self) -> int:
        """Make a stream; it and the default stream do not wait for each other. Returns its handle."""
        stream = self._new_handle()
        self.add(stream, blocking=False)
        return stream

    def add(self, stream: int, blocking: bool) -> None:
        """Give a stream of this handle a clock. ``blocking``: it and the default stream wait for each other."""
        self.clocks[stream] = {}
        self.created.add(stream)
        if blocking:
            self.blocking.add(stream)

    def destroy(self, a: Words) -> int:
        """cudaStreamDestroy: stream. Later work on the default stream remains ordered after the stream's work if the
        stream blocks."""
        if a[0] in self.blocking:
            join(self.clocks[DEFAULT], self.clocks[a[0]])
        self.blocking.discard(a[0])
        return SUCCESS

    def identify(self, a: Words) -> int:
        """cudaStreamGetId: stream, out. Every stream of a session has a different number."""
        put(a[1], "Q", self._number(a[0]))
        return SUCCESS

    def synchronize(self, a: Words) -> int:
        """cudaStreamSynchronize: stream. The host then knows that the stream's work is over."""
        stream = self._number(a[0])
        if stream == DEFAULT:
            self._issue(DEFAULT)
        join(self.clocks[HOST], self.clocks[stream])
        return SUCCESS

    def synchronize_device(self, _: Words) -> int:
        """cudaDeviceSynchronize: the host then knows that all work is over."""
        for stream, clock in self.clocks.items():
            if stream != HOST:
                join(self.clocks[HOST], clock)
        self.history.clear()
        return SUCCESS

    def host_function(self, a: Words) -> int:
        """cudaLaunchHostFunc and cudaStreamAddCallback: stream, function, its argument, and 1 for the latter.

        A host function takes its argument, a callback the stream, a status and the argument. The function runs now, as
        work on the stream.
        """
        stream, data, callback = a[0], a[2], bool(a[3])
        plain = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(a[1])
        with_status = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(a[1])

        def work(actual_stream: int) -> int:
            with self.order.acting(dict(self._issue(self._number(actual_stream)))):
                if callback:
                    with_status(stream, SUCCESS, data)
                else:
                    plain(data)
            return SUCCESS

        return self.give(stream, work)

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
        if event.graph is not None:
            mark = event.mark = self._new_handle()
            return self.graphs.give(a[1], lambda branch: self._mark(mark, branch))
        event.clock = dict(self._issue(self._number(a[1])))
        event.seconds = time.perf_counter()
        return SUCCESS

    def _mark(self, mark: int, branch: int) -> int:
        """Keep the clock of a branch, because a captured event is recorded there."""
        self.marks[mark] = dict(self._issue(self._number(branch)))
        return SUCCESS

    def _wait_for_mark(self, mark: int, branch: int) -> int:
        """Let a branch wait for a captured event."""
        join(self.clocks[self._number(branch)], self.marks[mark])
        return SUCCESS

    def wait_event(self, a: Words) -> int:
        """cudaStreamWaitEvent: stream, event. A stream that waits for an event of a captured stream is captured,
        too."""
        event = self.events.get(a[1])
        if event is None:
            return INVALID_HANDLE
        if event.graph is not None:
            mark = event.mark
            if a[0] not in self.graphs.captured:
                self.graphs.join_capture(a[0], event.graph, self._new_handle())
            return self.graphs.give(a[0], lambda branch: self._wait_for_mark(mark, branch))
        join(self.clocks[self._number(a[0])], event.clock)
        return SUCCESS

    def synchronize_event(self, a: Words) -> int:
        """cudaEventSynchronize and cudaEventQuery: event. The host then knows that the work before the event is
        over."""
        event = self.events.get(a[0])
        if event is None:
            return INVALID_HANDLE
        join(self.clocks[HOST], event.clock)
        return SUCCESS

    def elapsed(self, a: Words) -> int:
        """cudaEventElapsedTime: out milliseconds, start, end. The result is the emulator's own time, at least 0.001."""
        start, end = self.events.get(a[1]), self.events.get(a[2])
        if start is None or end is None:
            return INVALID_HANDLE
        number = np.float32(max(1e-3, 1e3 * (end.seconds - start.seconds)))
        ctypes.memmove(a[0], number.tobytes(), 4)
        return SUCCESS

    # --- graphs ---

    def _play(self, graph: CapturedGraph, stream: int) -> int:
        """Do the work of a graph on a stream: captured work first, then each node after those that it waits for.

        Branch 0 is the stream on which the graph is launched.
        """
        begin = dict(self._issue(self._number(stream)))
        branches = {branch for branch, _ in graph.work} - {0}
        self.branches |= branches
        for branch in branches:
            join(self.clocks.setdefault(branch, {}), begin)
        for branch, work in list(graph.work):
            if code := work(branch or stream):
                return code
        for branch in branches:
            join(self.clocks[self._number(stream)], self.clocks[branch])
        begin = dict(self._issue(self._number(stream)))
        nodes = graph.ordered()
        for node in nodes:
            clock = self.clocks.setdefault(node, {})
            join(clock, begin)
            for earlier in graph.predecessors[node]:
                join(clock, self.clocks[earlier])
            for work in list(graph.nodes[node]):
                if code := work(node):
                    return code
        for node in nodes:
            join(self.clocks[self._number(stream)], self.clocks[node])
        return SUCCESS
