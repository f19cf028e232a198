"""The launcher: what it refuses and in which words, what it passes on, on the emulator's runtime."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudal2gen import catalog, compiler, emulator
from cudal2gen.emulator.host import program as host
from cudal2gen.launcher import LaunchError, OpenKernel
from tests.paths import IN_CLUSTER, SWAPPED, TWO, once, ring, small

VALUE, MISALIGNED, NO_FILE = 1, 716, 301


@pytest.fixture(scope="module")
def library() -> Path:
    return compiler.launcher()


@pytest.fixture
def session() -> Iterator[emulator.Session]:
    with emulator.session(device=emulator.Device(sm_count=2)) as opened:
        yield opened


def opened(record: catalog.Record, library: Path, options: dict[str, int] | None = None) -> OpenKernel:
    directory = compiler.build([record])[0].directory
    return OpenKernel(
        library, directory, record.launch_options if options is None else options, emulator.runtime_path()
    )


# A launch that the plain 32x32x64 kernel takes, and what makes it one that it does not.
GOOD: dict[str, Any] = {
    "a": 1 << 20,
    "lda": 64,
    "b": 1 << 21,
    "ldb": 64,
    "d": 1 << 22,
    "ldd": 32,
    "m": 32,
    "n": 32,
    "k": 64,
}
REFUSED = [
    ({}, {"m": 0}, VALUE, "m, n and k must be positive"),
    ({}, {"k": 1 << 25, "lda": 1 << 25, "ldb": 1 << 25}, VALUE, "must not exceed 16777216"),
    ({}, {"m": 2**32 + 32}, VALUE, "out of range"),
    ({}, {"n": -32}, VALUE, "out of range"),
    ({}, {"lda": 56}, VALUE, "leading dimension is shorter than its row"),
    ({}, {"ldb": 56}, VALUE, "leading dimension is shorter than its row"),
    ({}, {"ldd": 24}, VALUE, "leading dimension is shorter than its row"),
    ({"layout": "nn"}, {"ldb": 24}, VALUE, "leading dimension is shorter than its row"),
    ({}, {"m": 40}, VALUE, "the tile does not divide the problem"),
    ({}, {"n": 40, "ldd": 40}, VALUE, "the tile does not divide the problem"),
    ({}, {"k": 72, "lda": 72, "ldb": 72}, VALUE, "the tile does not divide the problem"),
    ({"padding": "predicate"}, {"k": 60}, VALUE, "k must be a multiple of 8"),
    ({}, {"a": (1 << 20) + 8}, MISALIGNED, "A and B must be aligned to 16 bytes"),
    ({}, {"ldb": 68}, MISALIGNED, "lda and ldb be multiples of 8"),
    ({}, {"d": (1 << 22) + 8}, MISALIGNED, "D must be aligned to 16 bytes"),
    ({}, {"ldd": 36}, MISALIGNED, "ldd be a multiple of 8"),
    ({"padding": "predicate"}, {"d": (1 << 22) + 1}, MISALIGNED, "D must be aligned"),
    ({"bake": ["k"], "k": 128}, {}, VALUE, "has k baked in"),
    ({"bake": ["k"], "k": 64}, {"lda": 72}, VALUE, "has k baked in: it takes that k only, packed"),
    ({"split_k": 2}, {}, VALUE, "k has fewer steps than this kernel has slices"),
    ({"split_k": 2}, {"k": 128, "lda": 128, "ldb": 128}, VALUE, "needs a workspace, aligned to 256 bytes"),
    ({"split_k": 2}, {"k": 128, "lda": 128, "ldb": 128, "workspace": 128}, VALUE, "needs a workspace, aligned"),
    ({}, {"m": 32 * 65536}, VALUE, "more rows or slices of CTAs than a grid has"),
    (
        {"padding": "predicate", "raster": "persistent", "bm": 32, "bn": 32},
        {"m": 1 << 24, "n": 1 << 24, "ldd": 1 << 24},
        VALUE,
        "more CTA tiles",
    ),
]


@pytest.mark.parametrize(("changes", "arguments", "code", "message"), REFUSED)
def test_what_a_kernel_cannot_do_is_refused_in_words(
    changes: dict[str, Any],
    arguments: dict[str, Any],
    code: int,
    message: str,
    library: Path,
    session: emulator.Session,
) -> None:
    with opened(small(**changes), library) as kernel, pytest.raises(LaunchError, match=message) as caught:
        kernel.launch(**(GOOD | arguments))
    assert caught.value.code == code
    assert session.launches == []


# The same for a Hopper kernel of 64 x 32 tiles.
TMA_GOOD: dict[str, Any] = GOOD | {"m": 64, "k": 128, "lda": 128, "ldb": 128}
TMA_REFUSED: list[tuple[catalog.Record, dict[str, Any], int, str]] = [
    (ring(), {"a": (1 << 20) + 8}, MISALIGNED, "A and B must be aligned to 16 bytes"),
    (ring(), {"lda": 132}, MISALIGNED, "lda and ldb be multiples of 8"),
    (ring(), {"ldb": 132}, MISALIGNED, "lda and ldb be multiples of 8"),
    (ring(), {"d": (1 << 22) + 8}, MISALIGNED, "D must be aligned to 16 bytes"),
    (ring(), {"ldd": 36}, MISALIGNED, "ldd be a multiple of 8"),
    (ring(epilogue="direct"), {"d": (1 << 22) + 1}, MISALIGNED, "D must be aligned"),
    (ring(layout="nn"), {"ldb": 24}, VALUE, "leading dimension is shorter than its row"),
    (ring(split_k=3, reduce="workspace"), {}, VALUE, "k has fewer steps than this kernel has slices"),
    (ring(split_k=2, reduce="workspace"), {}, VALUE, "needs a workspace, aligned to 256 bytes"),
    (ring(**IN_CLUSTER, split_k=4), {}, VALUE, "k has fewer steps than this kernel has slices"),
    (once(), {"k": 256, "lda": 256, "ldb": 256}, VALUE, "k is larger than this kernel holds in shared memory"),
    (once(), {"k": 60}, VALUE, "k must be a multiple of 8"),
]


@pytest.mark.parametrize(("record", "arguments", "code", "message"), TMA_REFUSED)
def test_what_a_hopper_kernel_cannot_do_is_refused_in_words(
    record: catalog.Record,
    arguments: dict[str, Any],
    code: int,
    message: str,
    library: Path,
    session: emulator.Session,
) -> None:
    with opened(record, library) as kernel, pytest.raises(LaunchError, match=message) as caught:
        kernel.launch(**(TMA_GOOD | arguments))
    assert caught.value.code == code
    assert session.launches == []


def test_options_of_hopper_kernels_are_checked(library: Path, session: emulator.Session) -> None:
    with pytest.raises(LaunchError, match="unknown option swizzle_stride"):
        opened(ring(), library, {"swizzle_stride": 64})
    with pytest.raises(LaunchError, match="hint_a and hint_b are 0, 1 or 2"):
        opened(ring(), library, {"hint_a": 3})


HOPPER_GRIDS: list[tuple[catalog.Record, tuple[int, int, int], tuple[int, int, int]]] = [
    # Four SMs, one CTA each: fewer tiles than SMs, and more.
    (ring(**TWO), (200, 64, 64), (4, 1, 1)),
    (ring(**TWO), (100, 64, 64), (2, 1, 1)),
    (ring(**TWO), (1000, 64, 64), (4, 1, 1)),
    # Clusters that reach beyond the matrix; two at a time.
    (ring(**TWO, cluster=[2, 1]), (100, 96, 64), (4, 1, 1)),
    (ring(**TWO, cluster=[2, 1]), (100, 32, 64), (2, 1, 1)),
    (ring(cluster=[2, 2], bk=128, stages=2), (64, 32, 64), (4, 1, 1)),
    (ring(**SWAPPED), (32, 64, 64), (1, 1, 1)),
    # Slices are work of their own, or CTAs of a cluster; the latter are not persistent.
    (ring(**TWO, split_k=3, reduce="workspace"), (128, 32, 192), (3, 1, 1)),
    (ring(**IN_CLUSTER, split_k=2), (200, 40, 128), (4 * 2 * 2, 1, 1)),
    (once(bm=64, split_k=2), (100, 40, 256), (2 * 2 * 2, 1, 1)),
    (once(bm=64), (100, 40, 128), (2 * 2, 1, 1)),
]


@pytest.mark.parametrize(("record", "size", "grid"), HOPPER_GRIDS)
def test_hopper_grids_by_hand(
    record: catalog.Record, size: tuple[int, int, int], grid: tuple[int, int, int], library: Path
) -> None:
    m, n, k = size
    memory = emulator.Memory()
    device = emulator.Device(
        sm_count=4,
        capability=(9, 0),
        smem_optin_bytes=232448,
        smem_per_sm_bytes=233472,
        threads_per_sm=record.threads,
    )
    with emulator.session(memory, device) as session, opened(record, library) as kernel:
        a = memory.upload(np.zeros((m, k), np.float16))
        b = memory.upload(np.zeros((n, k), np.float16))
        d = memory.upload(np.zeros((m, n + 8), np.float16), "output", region=np.s_[:, :n])
        size_bytes = kernel.workspace_bytes(m, n, k)
        assert (size_bytes > 0) == (getattr(record, "reduce", None) == "workspace")
        workspace = memory.allocate(max(1, size_bytes))
        arguments = (a.address, k, b.address, k, d.address, n + 8, m, n, k, workspace.address)
        kernel.launch(*arguments)
        kernel.launch(*arguments)
    assert [launch.grid for launch in session.launches] == [grid, grid]
    assert session.launches[-1].block == (record.threads, 1, 1)
    assert session.reports == []
    assert session.errors == []


def test_tensor_maps_follow_their_operands(library: Path) -> None:
    """The same kernel, other matrices at the same and at other addresses, from several threads at once."""
    record, rng = ring(epilogue="tma"), np.random.default_rng(1)
    memory = emulator.Memory()
    with emulator.session(memory, emulator.Device(sm_count=2, capability=(9, 0))), opened(record, library) as kernel:
        for m, n, k in ((64, 32, 64), (40, 32, 72), (64, 40, 64), (64, 32, 64)):
            a, b = (rng.integers(0, 2, size).astype(np.float16) for size in ((m, k), (n, k)))
            buffers = [memory.upload(a), memory.upload(b), memory.upload(np.zeros((m, n), np.float16), "output")]
            (at_a, at_b, at_d) = (buffer.address for buffer in buffers)
            kernel.launch(at_a, k, at_b, k, at_d, n, m, n, k)
            d = buffers[2].bytes().view(np.float16).reshape(m, n)
            assert (d == a.astype(np.float32) @ b.astype(np.float32).T).all()


def test_only_kernels_that_follow_kernels_overlap_with_them(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a kernel with a workspace its counters are cleared, by what is no kernel."""
    overlapping: list[bool] = []
    read = host._launch_attributes

    def seen(pointer: int, count: int) -> tuple[tuple[int, int, int], bool]:
        found = read(pointer, count)
        overlapping.append(found[1])
        return found

    monkeypatch.setattr(host, "_launch_attributes", seen)
    m, n, k = 64, 32, 128
    for record in (ring(pdl=True), ring(pdl=True, split_k=2, reduce="workspace"), ring()):
        memory = emulator.Memory()
        with (
            emulator.session(memory, emulator.Device(sm_count=2, capability=(9, 0))),
            opened(record, library) as kernel,
        ):
            a, b, d = (memory.upload(np.zeros(size, np.float16)).address for size in ((m, k), (n, k), (m, n)))
            workspace = memory.allocate(max(1, kernel.workspace_bytes(m, n, k))).address
            kernel.launch(a, k, b, k, d, n, m, n, k, workspace)
    assert overlapping == [True, False, False]


def test_opening_is_refused_in_words(library: Path, session: emulator.Session, tmp_path: Path) -> None:
    record = small(raster="zsplit", swizzle_stride=64)
    with pytest.raises(LaunchError, match="needs the option swizzle_stride"):
        opened(record, library, {})
    with pytest.raises(LaunchError, match="unknown option bm"):
        opened(record, library, {"bm": 1, "swizzle_stride": 64})
    with pytest.raises(LaunchError, match=r"kernel.launch is missing; build the kernel first") as caught:
        OpenKernel(library, tmp_path, {}, emulator.runtime_path())
    assert caught.value.code == NO_FILE
    (tmp_path / "kernel.launch").write_text("launch=rings threads=128")
    with pytest.raises(LaunchError, match="not one that this launcher understands"):
        OpenKernel(library, tmp_path, {}, emulator.runtime_path())
    with pytest.raises(LaunchError, match="no_such_runtime"):
        OpenKernel(library, compiler.build([small()])[0].directory, {}, Path("/no_such_runtime.so"))
    with pytest.raises(LaunchError, match="is missing from the CUDA runtime"):
        OpenKernel(library, compiler.build([small()])[0].directory, {}, library)


def test_shared_memory_beyond_the_device_is_refused_when_opened(library: Path) -> None:
    with (
        emulator.session(device=emulator.Device(smem_optin_bytes=48 * 1024)),
        pytest.raises(LaunchError, match="65536 bytes"),
    ):
        opened(small(bm=64, bn=64, stages=4), library)


GRIDS: list[tuple[dict[str, Any], tuple[int, int, int], tuple[int, int, int]]] = [
    ({}, (96, 64, 128), (2, 3, 1)),
    ({"raster": "zsplit", "swizzle_stride": 64}, (32, 160, 64), (2, 1, 3)),
    ({"raster": "zsplit", "swizzle_stride": 48}, (32, 160, 64), (2, 1, 4)),
    ({"raster": "zsplit", "swizzle_stride": 16}, (32, 64, 64), (1, 1, 4)),
    ({"raster": "persistent"}, (32 * 9, 32 * 9, 64), (2 * 6, 1, 1)),
    ({"raster": "persistent"}, (64, 64, 64), (4, 1, 1)),
    ({"split_k": 2}, (64, 64, 128), (2, 4, 1)),
    ({"padding": "predicate"}, (33, 65, 64), (3, 2, 1)),
]


@pytest.mark.parametrize(("changes", "size", "grid"), GRIDS)
def test_grids_by_hand(
    changes: dict[str, Any], size: tuple[int, int, int], grid: tuple[int, int, int], library: Path
) -> None:
    m, n, k = size
    memory = emulator.Memory()
    # Two SMs that hold six CTAs of 24 KiB and 64 threads each.
    device = emulator.Device(sm_count=2, smem_per_sm_bytes=160 * 1024)
    with emulator.session(memory, device) as session, opened(small(**changes), library) as kernel:
        a = memory.upload(np.zeros((m, k), np.float16))
        b = memory.upload(np.zeros((n, k), np.float16))
        d = memory.upload(np.zeros((m, n + 8), np.float16), "output", region=np.s_[:, :n])
        workspace = memory.allocate(max(1, kernel.workspace_bytes(m, n, k)))
        kernel.launch(a.address, k, b.address, k, d.address, n + 8, m, n, k, workspace.address)
    assert session.launches[-1].grid == grid
    assert session.launches[-1].block == (64, 1, 1)
    assert session.reports == []


def test_workspace_is_counters_then_partials(library: Path, session: emulator.Session) -> None:
    with opened(small(split_k=3), library) as kernel:
        assert kernel.workspace_bytes(64, 96, 256) == 256 + 6 * 3 * 32 * 32 * 4
        assert kernel.workspace_bytes(32 * 65, 32, 256) == 512 + 65 * 3 * 32 * 32 * 4
    with opened(small(), library) as kernel:
        assert kernel.workspace_bytes(64, 96, 256) == 0


KERNELS = [
    *(small(**changes) for changes, *_ in (*REFUSED, *GRIDS)),
    *(record for record, *_ in (*TMA_REFUSED, *HOPPER_GRIDS)),
]
