"""Proves that launches with counters find them at zero: on several streams, in graphs, and after launches that died."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from cudal2gen.generation import catalog, compiler
from cudal2gen.launch.launcher import OpenKernel
from kernelproof import emulator
from tests.cudal2gen import idle_runtime
from tests.cudal2gen.paths import ring, small

# The sizes of all products, and the ways in which kernels use counters.
M, N, K = 64, 64, 256
TICKETS = small(split_k=2)
SLICED = ring(split_k=2, reduce="workspace", pdl=True)
STREAMED = ring(stream_k=True, pdl=True)
RECORDS = {"tickets": TICKETS, "sliced": SLICED, "streamed": STREAMED}
BUILT_AHEAD = [*RECORDS.values()]
by_record = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
BLOCKS, COUNTERS = 64, 1024  # of counters.h


class Product(NamedTuple):
    """One product on the emulated device: D, its expected value, and the ``arguments`` of its launch but the stream.
    The last argument is the address of its workspace."""

    arguments: tuple[int, ...]
    d: emulator.Buffer
    expected: NDArray[Any]

    @property
    def right(self) -> bool:
        """Whether D has the expected numbers."""
        return bool((self.d.bytes().view(np.float16).reshape(M, N) == self.expected).all())


class Bench:
    """A kernel that is opened in a session, and the emulated runtime that both use."""

    def __init__(self, session: emulator.Session, kernel: OpenKernel, memory: emulator.Memory) -> None:
        self.session, self.kernel, self.memory = session, kernel, memory
        self.runtime = ctypes.CDLL(str(emulator.runtime_path()))

    def product(self, seed: int) -> Product:
        """A product of drawn matrices of 0 and 1 that has not been launched."""
        rng = np.random.default_rng(seed)
        a, b = (rng.integers(0, 2, size).astype(np.float16) for size in ((M, K), (N, K)))
        d = self.memory.upload(np.full((M, N), np.nan, np.float16), "output")
        at_a, at_b = (self.memory.upload(matrix).address for matrix in (a, b))
        workspace = self.memory.allocate(self.kernel.workspace_bytes(M, N, K)).address
        expected = (a.astype(np.float64) @ b.T.astype(np.float64)).astype(np.float16)
        return Product((at_a, K, at_b, K, d.address, N, M, N, K, workspace), d, expected)

    @contextmanager
    def capture(self, stream: int) -> Iterator[list[int]]:
        """Captures a stream in a ``with`` statement, whose end appends the executable graph's handle to the list."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        made: list[int] = []
        assert self.runtime.cudaStreamBeginCapture(ctypes.c_void_p(stream), 0) == 0
        yield made
        assert self.runtime.cudaStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)) == 0
        assert self.runtime.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_uint64()) == 0
        made.append(executable.value or 0)

    def replay(self, executable: int, stream: int) -> None:
        """Launches an executable graph on a stream."""
        assert self.runtime.cudaGraphLaunch(ctypes.c_void_p(executable), ctypes.c_void_p(stream)) == 0

    @property
    def findings(self) -> list[str]:
        """The kinds of the session's findings so far."""
        return [report.kind for report in self.session.reports]


@contextmanager
def bench(record: catalog.Record, library: Path, **options: Any) -> Iterator[Bench]:
    """A record's kernel, opened in a session with a device of three SMs; ``options`` are those of the emulator."""
    (artifact,) = compiler.build([record])
    memory = emulator.Memory()
    device = replace(emulator.Device.of(record.target), sm_count=3, threads_per_sm=record.threads)
    with (
        emulator.session(memory, device, emulator.Options(**options)) as session,
        OpenKernel(library, artifact.directory, record.launch_options, emulator.runtime_path()) as kernel,
    ):
        yield Bench(session, kernel, memory)


@by_record
def test_launches_that_follow_each_other_share_counters(record: catalog.Record, library: Path) -> None:
    memsets = 0

    with bench(record, library) as on:
        clear = on.session.calls["memset"]

        def counted(words: Any) -> int:
            nonlocal memsets
            memsets += 1
            return clear(words)

        on.session.calls["memset"] = counted
        products = [on.product(seed) for seed in range(3)]
        for product in products:
            on.kernel.launch(*product.arguments)
        assert [product.right for product in products] == [True] * 3
        assert on.findings == []
    assert memsets == 0


@by_record
def test_streams_have_counters_of_their_own(record: catalog.Record, library: Path) -> None:
    """Launches on two streams are not ordered. They only race if they share a workspace."""
    with bench(record, library) as on:
        one, other = on.session.streams.new_stream(), on.session.streams.new_stream()
        first, second = on.product(1), on.product(2)
        for _ in range(2):
            on.kernel.launch(*first.arguments, one)
            on.kernel.launch(*second.arguments, other)
        assert (first.right, second.right, on.findings) == (True, True, [])
        on.kernel.launch(*second.arguments[:-1], first.arguments[-1], other)
        assert "stream-race" in on.findings


@by_record
def test_a_graph_has_counters_of_its_own(record: catalog.Record, library: Path) -> None:
    """The graph is launched on another stream than the captured one, which has concurrent launches."""
    with bench(record, library) as on:
        stream, elsewhere = on.session.streams.new_stream(), on.session.streams.new_stream()
        before, inside, outside = (on.product(seed) for seed in range(3))
        on.kernel.launch(*before.arguments, stream)
        with on.capture(stream) as made:
            on.kernel.launch(*inside.arguments, stream)
            on.kernel.launch(*inside.arguments, stream)
        for _ in range(2):
            on.replay(made[0], elsewhere)
            on.kernel.launch(*outside.arguments, stream)
        assert [product.right for product in (before, inside, outside)] == [True] * 3
        assert on.findings == []


@by_record
def test_a_kernel_that_is_opened_after_a_launch_died_has_fresh_counters(record: catalog.Record, library: Path) -> None:
    """A dead launch does not reset its counters; on a GPU the context is lost with them."""
    with bench(record, library, loop_limit=1) as on:
        died = on.product(1)
        on.kernel.launch(*died.arguments)
        assert "runaway" in on.findings
    with bench(record, library) as on:
        product = on.product(2)
        on.kernel.launch(*product.arguments)
        assert (product.right, on.findings) == (True, [])


# --- what the launcher asks of the runtime ---


def open_idle(record: catalog.Record, library: Path, idle: Path, folder: Path, facts: str = "") -> OpenKernel:
    """A kernel that is opened on a runtime that launches nothing, with these facts of its launch."""
    (folder / "kernel.launch").write_text(facts or record.launch.write())
    return OpenKernel(library, folder, record.launch_options, idle)


def launch(kernel: OpenKernel, m: int = M, stream: int = 0) -> None:
    """Launches a kernel at invented addresses."""
    kernel.launch(1 << 20, K, 1 << 21, K, 1 << 22, N, m, N, K, 1 << 23, stream)


def clears_counters(idle: Path, kernel: OpenKernel, **changes: int) -> bool:
    """Whether a launch first clears counters by a memset."""
    before = idle_runtime.memsets(idle)
    launch(kernel, **changes)
    return idle_runtime.memsets(idle) > before


@by_record
def test_launches_without_a_block_clear_counters(
    record: catalog.Record, library: Path, idle: Path, tmp_path: Path
) -> None:
    """Launches work with more streams and graphs than blocks, and with kernels that do not return their counters to
    zero."""
    with open_idle(record, library, idle, tmp_path) as kernel:
        assert not any(clears_counters(idle, kernel, stream=16 * (1 + i)) for i in range(BLOCKS - 1))
        try:
            idle_runtime.capture(idle, [idle_runtime.KERNEL_NODE], number=1)
            assert not clears_counters(idle, kernel, stream=16)
            idle_runtime.capture(idle, [idle_runtime.KERNEL_NODE], number=2)
            assert clears_counters(idle, kernel, stream=16)
            assert not idle_runtime.overlaps(idle)
        finally:
            idle_runtime.capture(idle, None)
        assert not clears_counters(idle, kernel, stream=16)
        assert idle_runtime.overlaps(idle) == ("pdl" in record.launch_options)
    facts = record.launch.write()
    assert "counters=returned\n" in facts
    with open_idle(record, library, idle, tmp_path, facts.replace("counters=returned\n", "")) as kernel:
        assert clears_counters(idle, kernel)


def test_launches_with_more_tiles_than_a_block_has_counters_clear_them(
    library: Path, idle: Path, tmp_path: Path
) -> None:
    tiles = SLICED.bm * COUNTERS // (N // SLICED.bn)
    with open_idle(SLICED, library, idle, tmp_path) as kernel:
        assert not clears_counters(idle, kernel, m=tiles)
        assert clears_counters(idle, kernel, m=tiles + 1)


def test_a_driver_that_refuses_cooperation_with_an_overlap_gets_the_launch_without_it(
    library: Path, idle: Path, tmp_path: Path
) -> None:
    """Whether a real driver accepts both is unknown."""
    with open_idle(SLICED, library, idle, tmp_path) as kernel:
        launch(kernel)
        assert (idle_runtime.cooperates(idle), idle_runtime.overlaps(idle)) == (True, True)
        before = idle_runtime.launches(idle)
        idle_runtime.refuse_both(idle, True)
        try:
            launch(kernel)
            launch(kernel)
        finally:
            idle_runtime.refuse_both(idle, False)
        assert (idle_runtime.cooperates(idle), idle_runtime.overlaps(idle)) == (True, False)
        assert idle_runtime.launches(idle) - before == 3
