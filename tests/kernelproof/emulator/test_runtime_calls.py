"""Proves answers of the stand-in runtime: graphs against a model of them, times, memory, and what a module holds."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator.host.cuda import INVALID_HANDLE, INVALID_VALUE

# A module with two variables, one of them with a value.
MODULE = b""".version 8.0
.target sm_80
.address_size 64
.visible .global .align 8 .b8 table[24];
.visible .global .u32 number = 77;
.visible .entry k() { ret; }
"""
NO_SYMBOL, NO_IMAGE = 500, 200
DEVICE_TO_DEVICE = 3


class Api:
    """The functions of the runtime and the driver. Handles and sizes are passed as 64 bits."""

    def __init__(self) -> None:
        self.c = ctypes.CDLL(str(emulator.runtime_path()))

    def code(self, name: str, *words: Any) -> int:
        """The code of a call."""
        return int(getattr(self.c, name)(*(ctypes.c_uint64(x) if isinstance(x, int) else x for x in words)))

    def made(self, name: str, *words: Any) -> int:
        """The first result of a call that succeeds: a handle, or another number of 64 bits."""
        out = ctypes.c_uint64()
        assert self.code(name, ctypes.byref(out), *words) == 0
        return out.value


@pytest.fixture
def session() -> Iterator[emulator.Session]:
    """An open session, without findings at its end."""
    with emulator.session(memory=emulator.Memory()) as opened:
        yield opened
    assert (opened.errors, [report for report in opened.reports if report.is_error]) == ([], [])


def handles(*numbers: int) -> Any:
    """An array of handles."""
    return (ctypes.c_uint64 * len(numbers))(*numbers)


@dataclass
class Model:
    """A graph: the copy (to, from) of each node by its handle, and the nodes that each waits for."""

    handle: int
    copies: dict[int, tuple[int, int]] = field(default_factory=dict)
    before: dict[int, set[int]] = field(default_factory=dict)

    def play(self, content: list[int]) -> None:
        """Execute the copies in an order of the nodes, which is the only one."""
        done: set[int] = set()
        while len(done) < len(self.copies):
            (node,) = (node for node in self.copies if node not in done and self.before[node] <= done)
            to, source = self.copies[node]
            content[to] = content[source]
            done.add(node)

    def copy(self, handle: int) -> Model:
        """Another graph with the same nodes."""
        return Model(handle, dict(self.copies), {node: set(before) for node, before in self.before.items()})


@pytest.mark.parametrize("seed", range(10))
def test_graphs_do_what_a_model_of_them_does(session: emulator.Session, seed: int) -> None:
    """Chains of copies are made node by node or by edges, changed in a graph or in an executable one, cloned, updated,
    nested and launched."""
    generator, api, count = random.Random(seed), Api(), 6
    buffers = [session.memory.upload(np.full(1, i, np.int32)) for i in range(count)]
    content = list(range(count))

    def arguments(copy: tuple[int, int]) -> list[Any]:
        to, source = (ctypes.c_uint64(buffers[i].address) for i in copy)
        return [to, source, 4, ctypes.c_int(DEVICE_TO_DEVICE)]

    def drawn() -> tuple[int, int]:
        to, source = generator.sample(range(count), 2)
        return to, source

    graphs: list[Model] = []
    for _ in range(3):
        model = Model(api.made("cudaGraphCreate", ctypes.c_uint(0)))
        last: list[int] = []
        for _ in range(generator.randint(1, 5)):
            copy, by_edge = drawn(), generator.random() < 0.5
            before = handles() if by_edge else handles(*last)
            node = api.made("cudaGraphAddMemcpyNode1D", model.handle, before, len(before), *arguments(copy))
            if by_edge and last:
                assert api.code("cudaGraphAddDependencies", model.handle, handles(*last), handles(node), None, 1) == 0
            model.copies[node], model.before[node] = copy, set(last)
            last = [node]
        graphs.append(model)
    clones = [model.copy(api.made("cudaGraphClone", model.handle)) for model in graphs]
    executables = [model.copy(api.made("cudaGraphInstantiate", model.handle, 0)) for model in graphs]
    for _ in range(25):
        number, copy = generator.randrange(3), drawn()
        graph, executable = graphs[number], executables[number]
        match generator.randrange(6):
            case 0:  # a graph changes, and what was made of it does not
                node = generator.choice([*graph.copies])
                assert api.code("cudaGraphMemcpyNodeSetParams1D", node, *arguments(copy)) == 0
                graph.copies[node] = copy
            case 1:
                node = generator.choice([*executable.copies])
                assert api.code("cudaGraphExecMemcpyNodeSetParams1D", executable.handle, node, *arguments(copy)) == 0
                executable.copies[node] = copy
            case 2:
                source = generator.choice((graph, clones[number]))
                executables[number] = source.copy(api.made("cudaGraphInstantiate", source.handle, 0))
            case 3:
                clones[number] = graph.copy(api.made("cudaGraphClone", graph.handle))
            case 4:
                assert api.code("cudaGraphExecUpdate", executable.handle, graph.handle, handles(0)) == 0
                executables[number] = graph.copy(executable.handle)
            case _:
                assert api.code("cudaGraphLaunch", executable.handle, 0) == 0
                executable.play(content)
        assert [int(buffer.download()[0]) for buffer in buffers] == content
        for model in graphs + clones:
            roots = [node for node, before in model.before.items() if not before]
            for name, wanted in (("cudaGraphGetNodes", [*model.copies]), ("cudaGraphGetRootNodes", roots)):
                found, size = handles(*[0] * 9), ctypes.c_uint64(9)
                assert api.code(name, model.handle, found, ctypes.byref(size)) == 0
                assert sorted(found[: size.value]) == sorted(wanted)
    parent = api.made("cudaGraphCreate", ctypes.c_uint(0))
    first = api.made("cudaGraphAddChildGraphNode", parent, handles(), 0, graphs[0].handle)
    api.made("cudaGraphAddChildGraphNode", parent, handles(first), 1, graphs[1].handle)
    assert api.code("cudaGraphLaunch", api.made("cudaGraphInstantiate", parent, 0), 0) == 0
    graphs[0].play(content)
    graphs[1].play(content)
    assert [int(buffer.download()[0]) for buffer in buffers] == content


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dropped", [False, True])
def test_captured_work_of_several_streams_is_ordered_by_events_alone(seed: int, dropped: bool) -> None:
    """Each copy of a chain is issued on a drawn stream, which waits for the copy before by an event. Nothing happens
    before the graph is launched. Without one of the waits the graph's launch is a race."""
    generator, count = random.Random(seed), 7
    with emulator.session(memory=emulator.Memory()) as opened:
        api = Api()
        buffers = [opened.memory.upload(np.full(1, i, np.int32)) for i in range(count)]
        streams = [api.made("cudaStreamCreate") for _ in range(3)]

        def capturing() -> list[int]:
            out = [ctypes.c_int(7) for _ in streams]
            for stream, status in zip(streams, out, strict=True):
                assert api.code("cudaStreamIsCapturing", stream, ctypes.byref(status)) == 0
            return [status.value for status in out]

        def content() -> list[int]:
            return [int(buffer.download()[0]) for buffer in buffers]

        def move(to: int, stream: int) -> None:
            ends = [ctypes.c_uint64(buffers[i].address) for i in (to, to - 1)]
            assert api.code("cudaMemcpyAsync", *ends, 4, ctypes.c_int(DEVICE_TO_DEVICE), stream) == 0

        def follow(later: int, earlier: int) -> None:
            event = api.made("cudaEventCreate")
            assert api.code("cudaEventRecord", event, earlier) == 0
            assert api.code("cudaStreamWaitEvent", later, event, ctypes.c_uint(0)) == 0

        assert api.code("cudaStreamEndCapture", streams[0], ctypes.byref(ctypes.c_uint64())) == INVALID_VALUE
        assert api.code("cudaStreamBeginCapture", streams[0], ctypes.c_int(0)) == 0
        assert api.code("cudaStreamBeginCapture", streams[0], ctypes.c_int(0)) == INVALID_VALUE
        assert capturing() == [1, 0, 0]
        follow(streams[1], streams[0])
        follow(streams[2], streams[1])
        assert capturing() == [1, 1, 1]
        chosen = [generator.randrange(3) for _ in range(1, count)]
        if len({*chosen}) < 2:
            chosen[0] = 1 - min(chosen[1], 1)
        changes = [i for i in range(1, len(chosen)) if chosen[i] != chosen[i - 1]]
        lost = generator.choice(changes) if dropped else -1
        for i, stream in enumerate(chosen):
            if i and stream != chosen[i - 1] and i != lost:
                follow(streams[stream], streams[chosen[i - 1]])
            move(i + 1, streams[stream])
        for other in (1, 2):
            follow(streams[0], streams[other])
        assert content() == [*range(count)]
        graph = ctypes.c_uint64()
        assert api.code("cudaStreamEndCapture", streams[0], ctypes.byref(graph)) == 0
        assert capturing() == [0, 0, 0]
        move(1, streams[0])
        assert content() == [0, 0, *range(2, count)]
        for stream in streams:
            assert api.code("cudaStreamSynchronize", stream) == 0
        assert api.code("cudaGraphLaunch", api.made("cudaGraphInstantiate", graph.value, 0), streams[2]) == 0
        assert content() == [0] * count
    assert {report.kind for report in opened.reports if report.is_error} == ({"stream-race"} if dropped else set())


def test_nodes_of_other_graphs_are_refused(session: emulator.Session) -> None:
    api = Api()
    x = session.memory.upload(np.zeros(2, np.int32)).address
    copy = [ctypes.c_uint64(x), ctypes.c_uint64(x + 4), 4, ctypes.c_int(DEVICE_TO_DEVICE)]
    own, other = (api.made("cudaGraphCreate", ctypes.c_uint(0)) for _ in range(2))
    node, strange = (api.made("cudaGraphAddMemcpyNode1D", graph, handles(), 0, *copy) for graph in (own, other))
    out = ctypes.byref(ctypes.c_uint64())
    assert api.code("cudaGraphAddMemcpyNode1D", out, own, handles(strange), 1, *copy) == INVALID_VALUE
    for ends in ((node, strange), (strange, node)):
        first, second = map(handles, ends)
        assert api.code("cudaGraphAddDependencies", own, first, second, None, 1) == INVALID_VALUE
    executable = api.made("cudaGraphInstantiate", own, 0)
    assert api.code("cudaGraphExecMemcpyNodeSetParams1D", executable, strange, *copy) == INVALID_HANDLE
    assert api.code("cudaGraphMemcpyNodeSetParams1D", 12345, *copy) == INVALID_HANDLE


def test_times_between_events_add_up(session: emulator.Session) -> None:
    api, events = Api(), []
    for _ in range(4):
        events.append(api.made("cudaEventCreate"))
        assert api.code("cudaEventRecord", events[-1], 0) == 0
        time.sleep(0.003)

    def between(start: int, end: int) -> float:
        out = ctypes.c_float()
        assert api.code("cudaEventElapsedTime", ctypes.byref(out), start, end) == 0
        return out.value

    for i, j in product(range(4), repeat=2):
        steps = [between(events[k], events[k + 1]) for k in range(i, j)]
        assert all(step > 1 for step in steps), "milliseconds, and none is skipped"
        assert between(events[i], events[j]) == pytest.approx(sum(steps) if j > i else 0.001, rel=1e-4)
    out = ctypes.c_float()
    assert api.code("cudaEventDestroy", events[1]) == 0
    for start, end in ((events[1], events[2]), (events[2], events[1])):
        assert api.code("cudaEventElapsedTime", ctypes.byref(out), start, end) == INVALID_HANDLE
    for name, more in (("cudaEventRecord", (0,)), ("cudaEventSynchronize", ()), ("cudaEventDestroy", ())):
        assert api.code(name, events[1], *more) == INVALID_HANDLE
        assert api.code(name, events[2], *more) == 0


def test_free_memory_is_what_is_not_allocated(session: emulator.Session) -> None:
    api = Api()

    def info() -> tuple[int, int]:
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        assert api.code("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value, total.value

    (free, total), used = info(), 0
    for size in (1, 1 << 20, 3 << 20):
        api.made("cudaMalloc", size)
        used += size
        now, same = info()
        assert same == total
        assert used <= free - now <= used + (1 << 16)


@pytest.mark.parametrize("text", [MODULE, b"// a comment\n" + MODULE, b"\n\t " + MODULE])
def test_a_module_answers_with_the_addresses_and_sizes_that_are_asked_for(
    session: emulator.Session, text: bytes
) -> None:
    api = Api()
    module = api.made("cuModuleLoadData", ctypes.c_char_p(text))
    addresses = set()
    for name, size in ((b"table", 24), (b"number", 4)):
        for wants_address, wants_size in product((False, True), repeat=2):
            address, bytes_ = ctypes.c_uint64(7), ctypes.c_uint64(7)
            asked = [ctypes.byref(address) if wants_address else None, ctypes.byref(bytes_) if wants_size else None]
            assert api.code("cuModuleGetGlobal_v2", *asked, module, ctypes.c_char_p(name)) == 0
            assert bytes_.value == (size if wants_size else 7)
            if wants_address:
                addresses.add(address.value)
            else:
                assert address.value == 7
    value = ctypes.c_uint32()
    assert api.code("cuMemcpyDtoH_v2", ctypes.byref(value), address.value, 4) == 0
    assert (len(addresses), value.value) == (2, 77)
    function = api.made("cuModuleGetFunction", module, ctypes.c_char_p(b"k"))
    assert function
    out = ctypes.byref(ctypes.c_uint64())
    assert api.code("cuModuleGetFunction", out, module, ctypes.c_char_p(b"none")) == NO_SYMBOL
    assert api.code("cuModuleGetGlobal_v2", out, None, module, ctypes.c_char_p(b"none")) == NO_SYMBOL
    assert api.code("cuModuleGetGlobal_v2", out, None, 12345, ctypes.c_char_p(b"table")) == INVALID_HANDLE
    assert api.code("cuModuleUnload", module) == 0
    assert api.code("cuModuleUnload", module) == INVALID_HANDLE
    assert api.code("cuModuleLoadData", out, ctypes.c_char_p(b"\xff\xfe\x80\x81 image")) == NO_IMAGE
