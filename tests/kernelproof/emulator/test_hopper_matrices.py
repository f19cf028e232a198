"""Proves stmatrix and wgmma of sm_90a against scalar formulas, and that accesses to registers in flight are noticed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kernelproof.emulator import Memory
from tests.kernelproof.emulator.hopper_ptx import (
    SPAN,
    descriptor,
    launch,
    run_body,
    wgmma_kernel,
)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_stmatrix(n: int, trans: str) -> None:
    """stmatrix stores 8 x 8 matrices so that lane 4 r + c holds columns 2 c and 2 c + 1 of row r, or transposed."""
    loads = "".join(f" mad.wide.u32 %g, %t, {4 * n}, %p; ld.global.u32 %a{i}, [%g+{4 * i}];" for i in range(n))
    registers = ", ".join(f"%a{i}" for i in range(n))
    body = f"""{loads}
      shl.b32 %u, %t, 4; add.u32 %u, %u, %s;
      stmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 [%u], {{{registers}}};
      bar.warp.sync -1;
      mad.lo.u32 %v, %t, {4 * n}, %s; mad.wide.u32 %g, %t, {4 * n}, %q;
      """ + "".join(f" ld.shared.u32 %w, [%v+{4 * i}]; st.global.u32 [%g+{4 * i}], %w;" for i in range(n))
    values = np.random.default_rng(n).integers(0, 1 << 16, (32, n, 2)).astype(np.uint16)
    got, result = run_body(body, values, np.empty((n, 8, 8), np.uint16))
    assert result.reports == []
    for matrix in range(n):
        for lane in range(32):
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                place = (column, row) if trans else (row, column)
                assert got[matrix][place] == values[lane, matrix, half]


def element_address(mode: str, along: bool, outer: int, k: int, leading: int, stride: int) -> int:
    """Byte offset of element (outer, k) of a 16-bit operand in the canonical layout of a swizzle mode.

    ``outer``: m or n. ``along``: whether ``outer`` is contiguous, else k is. ``leading``, ``stride``: the offsets of
    the descriptor in bytes. The swizzle exclusive-ors the number of a 16-byte unit with address bits 7 and up.
    """
    span = SPAN[mode]
    if along:
        if mode == "none":
            linear = outer // 8 * stride + outer % 8 * 2 + k % 8 * 16 + k // 8 * leading
        else:
            per = span // 2
            linear = outer % per * 2 + outer // per * leading + k % 8 * span + k // 8 * stride
    elif mode == "none":
        linear = outer % 8 * 16 + outer // 8 * stride + k // 8 * leading + k % 8 * 2
    else:
        linear = outer % 8 * span + outer // 8 * stride + k * 2
    return linear ^ ((linear >> 7) % (span // 16)) << 4


def operand_image(matrix: np.ndarray, mode: str, along: bool, nbytes: int) -> tuple[np.ndarray, int, int]:
    """The bytes of a (rows, 16) operand in shared memory, and its leading and stride offsets in bytes.

    ``along``: whether the outer index (m or n) is contiguous, else k is. Bytes between elements are 0xFF.
    """
    rows, span = matrix.shape[0], SPAN[mode]
    if along:
        if mode == "none":
            stride, leading = 128, 128 * (rows // 8)
        else:
            stride = 8 * span
            leading = 16 * span
    elif mode == "none":
        leading, stride = 128, 256
    else:
        leading, stride = 16, 8 * span
    image = np.full(nbytes, 0xFF, np.uint8)
    for outer in range(rows):
        for k in range(16):
            at = element_address(mode, along, outer, k, leading, stride)
            image[at : at + 2] = matrix[outer, k : k + 1].view(np.uint8)
    return image, leading, stride


CASES = [
    (8, "f32", "none", False, "none", False), (24, "f32", "32", False, "64", False),
    (64, "f32", "64", False, "32", True), (128, "f32", "128", False, "128", False),
    (256, "f32", "128", True, "128", True), (64, "f16", "128", False, "64", True),
    (96, "f16", "none", True, "none", True), (32, "f32", "32", True, "32", True),
    (256, "f16", "64", True, "64", False),
]  # fmt: skip


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_wgmma(case: tuple[int, str, str, bool, str, bool], keep: int) -> None:
    """wgmma is exact for each swizzle and orientation of A and B in shared memory."""
    n, acc, mode_a, along_a, mode_b, along_b = case
    check_wgmma(n, acc, "f16", mode_a, along_a, mode_b, along_b, keep, "1, 1", registers=False)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("signs", ["1, -1", "-1, 1", "-1, -1"])
def test_wgmma_from_registers(kind: str, signs: str) -> None:
    """wgmma is exact with A in registers, also with negated operands."""
    check_wgmma(64, "f32", kind, "128", False, "128", True, 1, signs, registers=True)


def check_wgmma(
    n: int, acc: str, kind: str, mode_a: str, along_a: bool, mode_b: str, along_b: bool, keep: int, signs: str,
    registers: bool,
) -> None:  # fmt: skip
    """Checks a wgmma of drawn integers exactly.

    ``mode_a``, ``mode_b``: swizzle modes. ``along_a``, ``along_b``: as in ``element_address``. ``keep``: 1 if the
    accumulators are added, else 0. ``signs``: the factors of A and B. ``registers``: whether A is in registers.
    """
    rng = np.random.default_rng(n)
    a, b, c = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((64, 16), (n, 16), (64, n)))

    def encode(values: np.ndarray) -> np.ndarray:
        if kind == "bf16":
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(np.float16).view(np.uint16)

    image_a, la, sa = operand_image(encode(a), mode_a, along_a, 16384)
    image_b, lb, sb = operand_image(encode(b), mode_b, along_b, 16384)
    text = wgmma_kernel(
        n,
        acc,
        kind,
        descriptor(0, la, sa, mode_a),
        descriptor(16384, lb, sb, mode_b),
        along_a,
        along_b,
        signs,
        registers,
    )
    count = n // 2 if acc == "f32" else n // 4
    item: Any = np.float32 if acc == "f32" else np.float16
    accumulators = np.zeros((128, n // 2), item)
    fragments = np.zeros((128, 4, 2), np.uint16)

    def position_of_sum(thread: int, i: int) -> tuple[int, int]:
        """Row and column of a thread's sum i: thread 32 w + 4 g + t has rows 16 w + g (+ 8), columns 2 t (+ 1) of 8."""
        return thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2

    for thread in range(128):
        for i in range(n // 2):
            accumulators[thread, i] = c[position_of_sum(thread, i)]
        for i in range(4):
            for j in range(2):
                row, column = position_of_sum(thread, 2 * i + j)
                fragments[thread, i, j] = encode(a[row : row + 1, column : column + 1].reshape(-1))[0]
    memory = Memory()
    y = memory.upload(np.empty((128, count), np.uint32), "output")
    x = memory.upload(np.concatenate([image_a, image_b]))
    args = [x, memory.upload(accumulators), y, memory.upload(fragments), keep]
    result = launch(text, args, memory, block=128)
    assert result.reports == []
    first, second = (int(s) for s in signs.split(","))
    want = first * second * (a @ b.T) + keep * c
    got = y.download().view(item).reshape(128, n // 2)
    for thread in range(0, 128, 7):
        for i in range(n // 2):
            assert got[thread, i] == want[position_of_sum(thread, i)]


def test_accumulators_in_flight_and_fences() -> None:
    """A missing fence, commit, wait or barrier around a wgmma is reported by its rule."""
    a, b = descriptor(0, 128, 256, "none"), descriptor(16384, 128, 256, "none")
    text = wgmma_kernel(8, "f32", "f16", a, b, False, False, "1, 1", False)
    memory = Memory()
    x = memory.upload(np.zeros(32768, np.uint8))
    c = memory.upload(np.zeros((128, 4), np.float32))
    y = memory.upload(np.empty((128, 4), np.float32), "output")
    for old, new, kind in (
        ("wgmma.fence.sync.aligned;", "", "wgmma-registers"),
        ("wgmma.wait_group.sync.aligned 0;", "", "wgmma-registers"),
        ("wgmma.commit_group.sync.aligned;", "", "wgmma-registers"),
        ("wgmma.wait_group.sync.aligned 0;", "mov.b32 %c1, 0; wgmma.wait_group.sync.aligned 0;", "wgmma-registers"),
        ("fence.proxy.async.shared::cta; bar.sync 0;", "bar.sync 0;", "proxy-fence"),
        ("fence.proxy.async.shared::cta; bar.sync 0;", "fence.proxy.async.shared::cta;", "shared-race"),
        # The thread that issues the access may fence after the barrier.
        ("fence.proxy.async.shared::cta; bar.sync 0;", "bar.sync 0; fence.proxy.async;", ""),
    ):
        assert old in text
        result = launch(text.replace(old, new), [x, c, y, c, 0], memory, block=128, check_outputs=False)
        assert {r.kind for r in result.reports} == ({kind} if kind else set()), (old, new)


def test_lanes_outside_of_a_guard_keep_their_sums() -> None:
    a, b = descriptor(0, 128, 256, "none"), descriptor(16384, 128, 256, "none")
    wait = "wgmma.wait_group.sync.aligned 0;"
    text = wgmma_kernel(8, "f32", "f16", a, b, False, False, "1, 1", False)
    text = text.replace(wait, wait + "setp.gt.u32 %Q, %t, 31; @%Q mov.b32 %c1, 0f40E00000;")
    memory = Memory()
    x = memory.upload(np.ones(16384, np.float16))
    c = memory.upload(np.zeros((128, 4), np.float32))
    y = memory.upload(np.empty((128, 4), np.float32), "output")
    assert launch(text, [x, c, y, c, 0], memory, block=128).reports == []
    want = np.full((128, 4), 16.0)
    want[32:, 1] = 7
    assert np.array_equal(y.download(), want)


@pytest.mark.parametrize(
    ("waits", "unwaited"),
    [
        ("setp.lt.u32 %Q, %t, 96; @%Q wgmma.wait_group.sync.aligned 0;", range(96, 128)),
        ("setp.gt.u32 %Q, %t, 31; @%Q wgmma.wait_group.sync.aligned 0;", range(32)),
        # Every warp waits in one of the branches.
        ("@%Q bra own; wgmma.wait_group.sync.aligned 0; bra both; own: wgmma.wait_group.sync.aligned 0; both:", ()),
        # One warp neither waits nor reads.
        ("setp.gt.u32 %Q, %t, 31; @!%Q bra out; wgmma.wait_group.sync.aligned 0;", ()),
    ],
)
def test_a_wait_counts_for_the_warp_that_waits(waits: str, unwaited: Sequence[int]) -> None:
    a, b = descriptor(0, 128, 256, "none"), descriptor(16384, 128, 256, "none")
    text = wgmma_kernel(8, "f32", "f16", a, b, False, False, "1, 1", False)
    text = text.replace("wgmma.fence", "setp.gt.u32 %Q, %t, 63; wgmma.fence", 1).replace("ret; }", "out: ret; }")
    memory = Memory()
    x, c = memory.upload(np.zeros(32768, np.uint8)), memory.upload(np.zeros((128, 4), np.float32))
    y = memory.upload(np.empty((128, 4), np.float32), "output")
    text = text.replace("wgmma.wait_group.sync.aligned 0;", waits)
    result = launch(text, [x, c, y, c, 0], memory, block=128, check_outputs=False)
    assert {r.kind for r in result.reports} == ({"wgmma-registers"} if unwaited else set())
    assert {thread for r in result.reports for thread in r.access.threads} <= set(unwaited)


def test_sources_in_registers_are_lent() -> None:
    text = wgmma_kernel(8, "f32", "f16", 0, descriptor(16384, 128, 256, "none"), False, False, "1, 1", True)
    memory = Memory()
    x = memory.upload(np.zeros(32768, np.uint8))
    c = memory.upload(np.zeros((128, 4), np.float32))
    y = memory.upload(np.empty((128, 4), np.float32), "output")
    wait = "wgmma.wait_group.sync.aligned 0;"
    for new, reports in (
        ("add.u32 %x0, %a1, 1; " + wait, 0),
        ("add.u32 %a1, %a1, 1; " + wait, 1),
        (wait + " add.u32 %a1, %a1, 1;", 0),
    ):
        result = launch(text.replace(wait, new), [x, c, y, c, 0], memory, block=128)
        assert [r.kind for r in result.reports] == ["wgmma-registers"] * reports, new
    late = "wgmma.fence.sync.aligned; add.u32 %a1, %a1, 0;"
    result = launch(text.replace("wgmma.fence.sync.aligned;", late), [x, c, y, c, 0], memory, block=128)
    assert "since the last wgmma.fence" in result.reports[0].message


def test_wgmma_by_a_part_of_a_warpgroup() -> None:
    a, b = descriptor(0, 128, 256, "none"), descriptor(16384, 128, 256, "none")
    text = wgmma_kernel(8, "f32", "f16", a, b, False, False, "1, 1", False)
    text = text.replace("wgmma.fence", "setp.gt.u32 %Q, %t, 63; @%Q bra out; wgmma.fence").replace(
        "ret; }", "out: ret; }"
    )
    memory = Memory()
    x, c = memory.upload(np.zeros(32768, np.uint8)), memory.upload(np.zeros((128, 4), np.float32))
    y = memory.upload(np.empty((128, 4), np.float32), "output")
    result = launch(text, [x, c, y, c, 0], memory, block=128, check_outputs=False)
    assert "warp-divergence" in {r.kind for r in result.reports}
