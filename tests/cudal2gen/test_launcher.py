"""Proves what the launcher refuses and what it passes to the kernel, on the emulator's runtime."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cudal2gen.generation import catalog, compiler
from cudal2gen.kernel import launch as contract
from cudal2gen.kernel.launch import CONVENTIONS, LaunchFileError, LaunchOperands, Matrix, Sizes
from cudal2gen.kernel.problem import MAX_EXTENT, Layout
from cudal2gen.kernel.tma_ring import MAX_BAND
from cudal2gen.launch.launcher import LaunchError, OpenKernel
from kernelproof import emulator
from kernelproof.emulator.host import kernel_calls as host
from tests.cudal2gen import bands, idle_runtime
from tests.cudal2gen.paths import IN_CLUSTER, PATHS, SWAPPED, TWO_CONSUMERS, once, ring, small

VALUE, NO_DEVICE, NO_FILE, NO_SYMBOL, MISALIGNED = 1, 100, 301, 500, 716  # codes of cudaError


@pytest.fixture
def session() -> Iterator[emulator.Session]:
    """A session with a device of two SMs."""
    with emulator.session(device=emulator.Device(sm_count=2)) as opened:
        yield opened


def open_kernel(record: catalog.Record, library: Path, options: dict[str, int] | None = None) -> OpenKernel:
    """A record's kernel, built and opened with these launch options, or with the record's own."""
    directory = compiler.build([record])[0].directory
    return OpenKernel(
        library, directory, record.launch_options if options is None else options, emulator.runtime_path()
    )


# A launch that the plain 32x32x64 kernel accepts, and changes after which it refuses it.
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
# Changed fields of the record, changed arguments of the launch, the code and a part of the error.
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
    with open_kernel(small(**changes), library) as kernel, pytest.raises(LaunchError, match=message) as caught:
        kernel.launch(**(GOOD | arguments))
    assert caught.value.code == code
    assert session.launches == []


# The same for a Hopper kernel with 64 x 32 tiles.
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
    with open_kernel(record, library) as kernel, pytest.raises(LaunchError, match=message) as caught:
        kernel.launch(**(TMA_GOOD | arguments))
    assert caught.value.code == code
    assert session.launches == []


def test_options_of_hopper_kernels_are_checked(library: Path, session: emulator.Session) -> None:
    with pytest.raises(LaunchError, match=r"\bswizzle_stride\b"):
        open_kernel(ring(), library, {"swizzle_stride": 64})
    with pytest.raises(LaunchError, match=r"^hint_a=3:"):
        open_kernel(ring(), library, {"hint_a": 3})


# The record, the sizes m, n, k, and the grid.
HOPPER_GRIDS: list[tuple[catalog.Record, tuple[int, int, int], tuple[int, int, int]]] = [
    # Four SMs with one CTA each, for fewer tiles than SMs and for more.
    (ring(**TWO_CONSUMERS), (200, 64, 64), (4, 1, 1)),
    (ring(**TWO_CONSUMERS), (100, 64, 64), (2, 1, 1)),
    (ring(**TWO_CONSUMERS), (1000, 64, 64), (4, 1, 1)),
    # Clusters that extend beyond the matrix, two at a time.
    (ring(**TWO_CONSUMERS, cluster=[2, 1]), (100, 96, 64), (4, 1, 1)),
    (ring(**TWO_CONSUMERS, cluster=[2, 1]), (100, 32, 64), (2, 1, 1)),
    (ring(cluster=[2, 2], bk=128, stages=2), (64, 32, 64), (4, 1, 1)),
    (ring(**SWAPPED), (32, 64, 64), (1, 1, 1)),
    # Slices are separate work items, or CTAs of a cluster, which are not persistent.
    (ring(**TWO_CONSUMERS, split_k=3, reduce="workspace"), (128, 32, 192), (3, 1, 1)),
    (ring(**IN_CLUSTER, split_k=2), (200, 40, 128), (4 * 2 * 2, 1, 1)),
    (once(bm=64, split_k=2), (100, 40, 256), (2 * 2 * 2, 1, 1)),
    (once(bm=64), (100, 40, 128), (2 * 2, 1, 1)),
]


@pytest.mark.slow
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
    with emulator.session(memory, device) as session, open_kernel(record, library) as kernel:
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
    """Several threads launch one kernel on different matrices at the same and at other addresses."""
    record, rng = ring(epilogue="tma"), np.random.default_rng(1)
    memory = emulator.Memory()
    with (
        emulator.session(memory, emulator.Device(sm_count=2, capability=(9, 0))),
        open_kernel(record, library) as kernel,
    ):
        for m, n, k in ((64, 32, 64), (40, 32, 72), (64, 40, 64), (64, 32, 64)):
            a, b = (rng.integers(0, 2, size).astype(np.float16) for size in ((m, k), (n, k)))
            buffers = [memory.upload(a), memory.upload(b), memory.upload(np.zeros((m, n), np.float16), "output")]
            (at_a, at_b, at_d) = (buffer.address for buffer in buffers)
            kernel.launch(at_a, k, at_b, k, at_d, n, m, n, k)
            d = buffers[2].bytes().view(np.float16).reshape(m, n)
            assert (d == a.astype(np.float32) @ b.astype(np.float32).T).all()


def test_kernels_overlap_as_their_records_say(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with counters overlap too, since they return the counters to zero."""
    overlapping: list[bool] = []
    read = host.launch_attributes

    def spy(pointer: int, count: int) -> tuple[tuple[int, int, int], bool]:
        attributes = read(pointer, count)
        overlapping.append(attributes[1])
        return attributes

    monkeypatch.setattr(host, "launch_attributes", spy)
    m, n, k = 64, 32, 128
    for record in (ring(pdl=True), ring(pdl=True, split_k=2, reduce="workspace"), ring(), once(pdl=True), once()):
        memory = emulator.Memory()
        with (
            emulator.session(memory, emulator.Device(sm_count=2, capability=(9, 0))),
            open_kernel(record, library) as kernel,
        ):
            a, b, d = (memory.upload(np.zeros(size, np.float16)).address for size in ((m, k), (n, k), (m, n)))
            workspace = memory.allocate(max(1, kernel.workspace_bytes(m, n, k))).address
            kernel.launch(a, k, b, k, d, n, m, n, k, workspace)
    assert overlapping == [True, True, False, True, False]


def test_opening_is_refused_in_words(library: Path, session: emulator.Session, tmp_path: Path) -> None:
    record = small(raster="zsplit", swizzle_stride=64)
    with pytest.raises(LaunchError, match=r"\bswizzle_stride\b"):
        open_kernel(record, library, {})
    with pytest.raises(LaunchError, match=r"\bbm\b"):
        open_kernel(record, library, {"bm": 1, "swizzle_stride": 64})
    with pytest.raises(LaunchError, match=r"kernel\.launch") as caught:
        OpenKernel(library, tmp_path, {}, emulator.runtime_path())
    assert caught.value.code == NO_FILE
    with pytest.raises(LaunchError, match="no_such_runtime"):
        OpenKernel(library, compiler.build([small()])[0].directory, {}, Path("/no_such_runtime.so"))
    with pytest.raises(LaunchError) as caught:
        OpenKernel(library, compiler.build([small()])[0].directory, {}, library)
    assert caught.value.code == NO_SYMBOL


def test_shared_memory_beyond_the_device_is_refused_when_opened(library: Path) -> None:
    with (
        emulator.session(device=emulator.Device(smem_optin_bytes=48 * 1024)),
        pytest.raises(LaunchError, match="65536 bytes"),
    ):
        open_kernel(small(bm=64, bn=64, stages=4), library)


# Changes of the kernel of 32x32x64 tiles, the sizes m, n, k, and the grid.
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


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "size", "grid"), GRIDS)
def test_grids_by_hand(
    changes: dict[str, Any], size: tuple[int, int, int], grid: tuple[int, int, int], library: Path
) -> None:
    m, n, k = size
    memory = emulator.Memory()
    # Two SMs that hold six CTAs of 24 KiB and 64 threads each.
    device = emulator.Device(sm_count=2, smem_per_sm_bytes=160 * 1024)
    with emulator.session(memory, device) as session, open_kernel(small(**changes), library) as kernel:
        a = memory.upload(np.zeros((m, k), np.float16))
        b = memory.upload(np.zeros((n, k), np.float16))
        d = memory.upload(np.zeros((m, n + 8), np.float16), "output", region=np.s_[:, :n])
        workspace = memory.allocate(max(1, kernel.workspace_bytes(m, n, k)))
        kernel.launch(a.address, k, b.address, k, d.address, n + 8, m, n, k, workspace.address)
    assert session.launches[-1].grid == grid
    assert session.launches[-1].block == (64, 1, 1)
    assert session.reports == []


@pytest.mark.slow
def test_workspace_is_counters_then_partials(library: Path, session: emulator.Session) -> None:
    """Each tile has a counter of 4 bytes, in 256 or 512 bytes for 6 or 65 tiles, and a partial sum in fp32 for each of
    three slices. A kernel without slices needs nothing."""
    with open_kernel(small(split_k=3), library) as kernel:
        assert kernel.workspace_bytes(64, 96, 256) == 256 + 6 * 3 * 32 * 32 * 4
        assert kernel.workspace_bytes(32 * 65, 32, 256) == 512 + 65 * 3 * 32 * 32 * 4
    with open_kernel(small(), library) as kernel:
        assert kernel.workspace_bytes(64, 96, 256) == 0


BUILT_AHEAD = [
    *(small(**changes) for changes, *_ in (*REFUSED, *GRIDS)),
    *(record for record, *_ in (*TMA_REFUSED, *HOPPER_GRIDS)),
]
# --- the contract with kernel/launch.py ---

# A record of each convention of launches, by its name.
BY_CONVENTION = {record.launch.convention: record for record in (small(), ring(), once())}
# Each fact of each convention of launches, by the name that ``kernel.launch`` gives it.
FACTS = [
    (convention, line.split("=")[0])
    for convention, record in BY_CONVENTION.items()
    for line in record.launch.write().splitlines()
]


def errors_of_both(text: str, library: Path, folder: Path) -> tuple[str, str]:
    """The errors of the launcher and of Python for a text of ``kernel.launch``."""
    (folder / "kernel.launch").write_text(text)
    with pytest.raises(LaunchError) as by_launcher:
        OpenKernel(library, folder, {}, emulator.runtime_path())
    with pytest.raises(LaunchFileError) as by_python:
        contract.read(text)
    assert by_launcher.value.code == VALUE
    return str(by_launcher.value), str(by_python.value)


def test_a_launch_is_read_as_it_was_written() -> None:
    assert set(BY_CONVENTION) == set(CONVENTIONS)
    for name, record in PATHS.items():
        assert contract.read(record.launch.write()) == record.launch, name


@pytest.mark.parametrize(("convention", "fact"), FACTS)
def test_every_fact_is_read_by_both(convention: str, fact: str, library: Path, tmp_path: Path) -> None:
    lines = BY_CONVENTION[convention].launch.write().splitlines(keepends=True)
    rest = "".join(line for line in lines if not line.startswith(f"{fact}="))
    for message in errors_of_both(rest, library, tmp_path):
        assert f"fact {fact} is missing" in message
    for message in errors_of_both("".join(lines) + f"{fact}=0\n", library, tmp_path):
        assert f"fact {fact} appears more than once" in message


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_facts_that_are_none_are_named(convention: str, library: Path, tmp_path: Path) -> None:
    record = BY_CONVENTION[convention]
    text = record.launch.write()
    threads = f"threads={record.threads}"
    for change, message in (
        (text + "colour=red\n", "unknown fact colour"),
        (text + "fusion=bias\n", "fusion=bias: "),
        (text + "element=f64\n", "element=f64: "),
        (text + "lonely\n", "lonely is no fact, which is name=value"),
        (text.replace(f"launch={convention}", "launch=rings"), "launch=rings: must be one of tiles, "),
        (text.replace(threads, "threads=many"), "threads=many: "),
        (text.replace(threads, "threads=0"), "threads=0: "),
        (text.replace(threads, f"threads={2**31}"), f"threads={2**31}: "),
        (text.replace(f"layout={record.layout}", "layout=mn"), "layout=mn: "),
    ):
        for refusal in errors_of_both(change, library, tmp_path):
            assert message in refusal


def test_a_fact_at_its_neutral_value_may_be_left_out(library: Path, idle: Path, tmp_path: Path) -> None:
    text = small().launch.write()
    neutral = "fusion=none\nelement=f16\n"
    assert "fusion" not in text
    assert "element" not in text
    assert contract.read(text + neutral) == contract.read(text)
    (tmp_path / "kernel.launch").write_text(text + neutral)
    OpenKernel(library, tmp_path, {}, idle).close()


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_options_are_those_that_python_declares(convention: str, library: Path, idle: Path, tmp_path: Path) -> None:
    (tmp_path / "kernel.launch").write_text(BY_CONVENTION[convention].launch.write())
    declared = {option.name: option for option in CONVENTIONS[convention].options}
    for option in (option for kind in CONVENTIONS.values() for option in kind.options):
        if option.name not in declared:
            with pytest.raises(LaunchError, match=rf"\b{option.name}\b"):
                OpenKernel(library, tmp_path, {option.name: 1}, idle)
            continue
        for number in range(len(option.values)) if option.values else (1, 64):
            assert option.number(option.value(number)) == number
            OpenKernel(library, tmp_path, {option.name: number}, idle).close()
        with pytest.raises(LaunchError, match=f"^{option.name}={len(option.values)}:"):
            OpenKernel(library, tmp_path, {option.name: len(option.values)}, idle)


def test_records_have_the_options_of_their_convention() -> None:
    for name, record in PATHS.items():
        declared = {option.name for option in record.CONVENTION.options}
        assert type(record.launch) is record.CONVENTION, name
        assert set(record.launch_options) <= declared, name
        assert declared & set(type(record).model_fields) <= record.DATA_FIELDS, name
        assert record.launched_with(record.launch_options) == record, name
        for options in record.other_options:
            changed = record.launched_with(options)
            assert changed.launch_options == record.launch_options | options, name


# --- which operands a kernel takes ---

# Every rule of `Launch.takes`, in every layout: vectors of D or none, a baked k, tensor maps of D or none.
TAKING: list[catalog.Record] = [
    record
    for layout in get_args(Layout)
    for record in (
        *(small(layout=layout), small(layout=layout, padding="predicate"), small(layout=layout, bake=["k"])),
        *(ring(layout=layout, n=64), ring(layout=layout, n=64, epilogue="direct"), once(layout=layout)),
    )
]


@pytest.fixture(scope="module")
def idle_kernels(library: Path, idle: Path, tmp_path_factory: pytest.TempPathFactory) -> list[OpenKernel]:
    """Kernels of ``TAKING`` that are opened on a runtime that launches nothing."""
    kernels = []
    for record in TAKING:
        folder = tmp_path_factory.mktemp("kernel")
        (folder / "kernel.launch").write_text(record.launch.write())
        kernels.append(OpenKernel(library, folder, record.launch_options, idle))
    return kernels


@st.composite
def drawn_matrix(draw: st.DrawFn, row: int) -> Matrix:
    """Draws a matrix with rows of this length: packed, spaced, overlapping or too far apart, aligned to 16 bytes or
    not."""
    ld = draw(st.sampled_from([row - 8, row - 1, row, row + 1, row + 4, row + 8, row + 64, MAX_EXTENT + 8]))
    return Matrix(ld, draw(st.booleans()))


@pytest.mark.slow
@settings(max_examples=400)
@given(data=st.data())
def test_the_launcher_refuses_what_python_says_is_not_taken(
    data: st.DataObject, idle_kernels: list[OpenKernel]
) -> None:
    number = data.draw(st.integers(0, len(TAKING) - 1))
    record, kernel = TAKING[number], idle_kernels[number]
    n = data.draw(st.sampled_from([record.n, record.n - 7] if record.predicated else [record.n]))
    sizes = Sizes(record.bm, n, record.k)
    packed = LaunchOperands.packed(record.layout, sizes)
    operands = LaunchOperands(*(data.draw(drawn_matrix(matrix.ld)) for matrix in packed))
    takes = record.launch.takes(sizes, operands)
    arguments = [value for m in operands for value in ((1 << 20) + (0 if m.aligned else 8), m.ld)]
    code = kernel.bound(*arguments, *sizes)(0)
    assert (code == 0) == all(takes), (record.name, sizes, operands, takes)
    # Each matrix is tested alone, so that no other matrix hides its fault.
    spaced = record.launch.spaced(sizes)
    assert all(record.launch.takes(sizes, spaced))
    for place, matrix in enumerate(operands):
        others = LaunchOperands(*(matrix if i == place else other for i, other in enumerate(spaced)))
        arguments = [value for m in others for value in ((1 << 20) + (0 if m.aligned else 8), m.ld)]
        assert (kernel.bound(*arguments, *sizes)(0) == 0) == takes[place], (record.name, place, matrix)


# --- the runtime that torch shares ---


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_kernel_is_told_how_its_tiles_are_numbered(
    data: st.DataObject, library: Path, idle: Path, tmp_path: Path
) -> None:
    """Rows and columns of tiles, bands and the reciprocals for divisions, up to the largest extents."""
    record = ring(cluster=data.draw(st.sampled_from([[1, 1], [1, 2], [2, 1]])))
    along_n, band = data.draw(st.integers(0, 1)), data.draw(st.integers(1, MAX_BAND))
    (tmp_path / "kernel.launch").write_text(record.launch.write())
    with OpenKernel(library, tmp_path, {"raster_axis": along_n, "raster_group": band}, idle) as kernel:
        m = data.draw(st.integers(1, MAX_EXTENT))
        n = 8 * data.draw(st.integers(1, MAX_EXTENT // 8 if m < MAX_EXTENT // 1024 else 64))
        with idle_runtime.words_of(idle, 8, bands.WORDS) as passed:
            kernel.launch(1 << 20, 64, 1 << 21, 64, 1 << 22, n, m, n, 64, 0, 0)
            high, wide = record.bm * record.cluster[0], record.bn * record.cluster[1]
            assert list(passed) == bands.words(-(-m // high), -(-n // wide), along_n, band)


def last_error() -> int:
    """The runtime's last error, which is not cleared."""
    return int(ctypes.CDLL(str(emulator.runtime_path())).cudaPeekAtLastError())


def test_a_refusal_leaves_no_error_in_the_runtime(library: Path, tmp_path: Path) -> None:
    """torch checks the last error after its own launches, and would raise ours as its own."""
    (tmp_path / "kernel.launch").write_text(small().launch.write())
    with emulator.session(device=emulator.Device(smem_optin_bytes=48 * 1024)):
        with pytest.raises(LaunchError, match=r"kernel\.cubin: "):
            OpenKernel(library, tmp_path, {}, emulator.runtime_path())
        assert last_error() == 0
        with pytest.raises(LaunchError, match="65536 bytes"):
            open_kernel(small(bm=64, bn=64, stages=4), library)
        assert last_error() == 0
    with emulator.session():
        kernels = [open_kernel(record, library) for record in (small(), small(split_k=2))]
    # Without a session there is no device: the launch, the clearing of counters and the unloading fail.
    with pytest.raises(LaunchError) as caught:
        kernels[0].launch(**GOOD)
    assert caught.value.code == NO_DEVICE
    assert last_error() == 0
    with pytest.raises(LaunchError) as caught:
        kernels[1].launch(**(GOOD | {"k": 128, "lda": 128, "ldb": 128, "workspace": 1 << 23}))
    assert caught.value.code == NO_DEVICE
    assert last_error() == 0
    for kernel in kernels:
        with suppress(LaunchError):
            kernel.close()
        assert last_error() == 0


# The record, k, and whether its launch must be cooperative.
WAITING: list[tuple[catalog.Record, int, bool]] = [
    (ring(), 128, False),
    (ring(split_k=2, reduce="workspace"), 128, True),
    (ring(**IN_CLUSTER, split_k=2), 128, False),
    (ring(stream_k=True), 128, True),
    # One CTA is a whole wave, and a single step of k is not divided.
    (ring(stream_k=True), 64, False),
    (small(bm=64, split_k=2, padding="predicate"), 128, False),
]


@pytest.mark.parametrize(("record", "k", "cooperates"), WAITING)
def test_ctas_that_wait_for_each_other_are_launched_together(
    record: catalog.Record, k: int, cooperates: bool, library: Path, idle: Path, tmp_path: Path
) -> None:
    """Otherwise kernels on two streams might each hold the SMs that the other one needs."""
    (tmp_path / "kernel.launch").write_text(record.launch.write())
    with OpenKernel(library, tmp_path, record.launch_options, idle) as kernel:
        kernel.launch(**(TMA_GOOD | {"k": k, "workspace": 1 << 23}))
    assert idle_runtime.cooperates(idle) == cooperates


# The kinds of nodes that a graph may contain.
NODES = idle_runtime.KERNEL_NODE, idle_runtime.MEMCPY_NODE, idle_runtime.MEMSET_NODE


@pytest.mark.parametrize(
    ("nodes", "overlaps"),
    [
        (None, True),
        ([], True),
        ([NODES[0]], True),
        ([NODES[0], NODES[0]], True),
        ([NODES[1]], False),
        ([NODES[2]], False),
        ([NODES[0], NODES[2]], False),
    ],
)
def test_only_kernels_are_overlapped_with_in_a_graph_capture(
    nodes: list[int] | None, overlaps: bool, library: Path, idle: Path, tmp_path: Path
) -> None:
    record = ring(pdl=True)
    (tmp_path / "kernel.launch").write_text(record.launch.write())
    idle_runtime.capture(idle, nodes)
    try:
        with OpenKernel(library, tmp_path, record.launch_options, idle) as kernel:
            kernel.launch(**TMA_GOOD)
    finally:
        idle_runtime.capture(idle, None)
    assert idle_runtime.overlaps(idle) == overlaps
