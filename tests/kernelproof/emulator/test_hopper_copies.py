"""Proves what bulk copies (TMA) load, store and reduce, and that the fences and waits they need are checked."""

from __future__ import annotations

import numpy as np
import pytest

from kernelproof.emulator import Memory, Options
from tests.kernelproof.emulator.hopper_ptx import (
    entry,
    launch,
    load_kernel,
    run_body,
    tensor_map,
)

# Extents of the tensor and of the box, and the coordinates of the box, innermost first; the number of the swizzle.
LOADS = [
    ((37,), (64,), (24,), 0), ((64, 20), (64, 8), (0, 0), 3), ((72, 20), (64, 8), (64, 16), 3),
    ((72, 20), (32, 8), (-8, -3), 2), ((40, 9), (16, 16), (33, -2), 1), ((24, 6, 5), (8, 4, 3), (20, 4, -1), 0),
    ((64, 6, 5), (64, 4, 3), (3, 4, 3), 3),
]  # fmt: skip


@pytest.mark.parametrize(("dims", "box", "at", "swizzle"), LOADS)
def test_tensor_load(dims: tuple[int, ...], box: tuple[int, ...], at: tuple[int, ...], swizzle: int) -> None:
    """A TMA load brings the box with its swizzle, and zeros beyond the tensor, for 1 to 3 dimensions."""
    # Rows are padded, so that memory outside of the tensor is not zero.
    pitch = -(-dims[0] // 8) * 8 + 8
    x = np.random.default_rng(1).integers(1, 1000, (*dims[:0:-1], pitch)).astype(np.uint16)
    memory = Memory()
    source = memory.upload(x)
    pitches, size = [], pitch * 2
    for extent in dims[1:]:
        pitches.append(size)
        size *= extent
    nbytes = int(np.prod(box)) * 2
    y = memory.upload(np.empty(nbytes // 2, np.uint16), "output")
    args = [tensor_map(source, dims, tuple(pitches), box, swizzle), y, *at]
    result = launch(load_kernel(len(dims), nbytes), args, memory)
    assert result.reports == []
    got = y.download()
    span = {0: 16, 1: 32, 2: 64, 3: 128}[swizzle]
    for index in np.ndindex(*box[::-1]):
        place = [c + i for c, i in zip(at[::-1], index, strict=True)]
        inside = all(0 <= p < d for p, d in zip(place, dims[::-1], strict=True))
        # The byte of the element in the box. A swizzle of ``span`` bytes adds, by exclusive or, the number of the line
        # of 128 bytes to the number of the chunk of 16 bytes within the span.
        linear = int(np.ravel_multi_index(index, box[::-1])) * 2
        linear ^= ((linear >> 7) % (span // 16)) << 4
        assert got[linear // 2] == (x[tuple(place)] if inside else 0)


@pytest.mark.parametrize("reduce", [False, True])
def test_tensor_store(reduce: bool) -> None:
    """A TMA store, or a reduction, changes the part of its box that lies within the tensor."""
    kind = "reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group" if reduce else ""
    op = f"cp.{kind}" if reduce else "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
    body = f"""
      mov.b64 %d0, map; cvta.param.u64 %d1, %d0; cvt.rn.f16.u32 %h0, %t;
      mov.u32 %u, 0;
    more: mad.lo.u32 %v, %t, 2, %u; add.u32 %v, %v, %s; st.shared.b16 [%v], %h0;
      add.u32 %u, %u, 64; setp.lt.u32 %P, %u, 512; @%P bra more;
      fence.proxy.async; bar.warp.sync -1;
      elect.sync _|%E, -1;
      @!%E bra over;
      {op} [%d1, {{-8, 6}}], [%s];
      cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    over:"""
    memory = Memory()
    start = np.full((10, 40), 7, np.float16)
    y = memory.upload(start, "inout")
    text = entry(body, ".param .align 64 .b8 map[128]")
    result = launch(text, [tensor_map(y, (20, 10), (80,), (32, 8), 0)], memory)
    assert result.reports == []
    want = start.copy()  # column t of the box has the value t; its corner is at column -8 and row 6
    want[6:10, 0:20] = np.arange(8, 28) + (7 if reduce else 0)
    np.testing.assert_array_equal(y.download(), want)


@pytest.mark.parametrize(("op", "start", "kinds"), [
    ("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile", 7, []),
    ("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile", None, ["uninitialised-global"]),
    ("cp.async.bulk.tensor.2d.global.shared::cta", 7, ["global-race"]),
])  # fmt: skip
def test_reductions_of_several_ctas_are_atomic(op: str, start: int | None, kinds: list[str]) -> None:
    """CTAs may add to the same elements by TMA, if these are initialised; plain stores to them race."""
    body = f"""
      mov.b64 %d0, map; cvta.param.u64 %d1, %d0; mov.u32 %u, %ctaid.x; add.u32 %v, %t, %u; cvt.rn.f16.u32 %h0, %v;
      shl.b32 %u, %t, 1; add.u32 %u, %u, %s; st.shared.b16 [%u], %h0; fence.proxy.async; bar.warp.sync -1;
      elect.sync _|%E, -1; @!%E bra over;
      {op}.bulk_group [%d1, {{0, 0}}], [%s]; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    over:"""
    memory = Memory()
    y = memory.upload(np.full((4, 8), start or 0, np.float16), "inout" if start else "output")
    text = entry(body, ".param .align 64 .b8 map[128]")
    result = launch(text, [tensor_map(y, (8, 4), (16,), (8, 4), 0)], memory, grid=2, check_outputs=False)
    assert [r.kind for r in result.reports if r.is_error] == kinds
    if not kinds:
        # Thread t of CTA c adds t + c.
        np.testing.assert_array_equal(y.download().reshape(-1), 7 + 2 * np.arange(32) + 1)


def test_runs_of_bytes() -> None:
    """Bulk copies without a tensor map load and store bytes, and count them; a missing wait or fence is reported."""
    body = """
      setp.ne.u32 %P, %t, 0; @%P bra over;
      add.u32 %bar, %s, 1024;
      mbarrier.init.shared::cta.b64 [%bar], 1; fence.proxy.async;
      mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 512;
      cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%p], 512, [%bar];
    again: mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0; @!%P bra again;
      cp.async.bulk.global.shared::cta.bulk_group [%q], [%s], 512;
      cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
    over:"""
    x = np.arange(128, dtype=np.uint32)
    got, result = run_body(body, x, np.empty(128, np.uint32), options=Options(counters=True))
    assert result.reports == []
    assert (got == x).all()
    assert result.counters is not None
    assert result.counters.summary()["bulk"] == {
        "boxes": 1, "load_bytes": 512, "delivered_bytes": 512, "store_bytes": 0,
    }  # fmt: skip
    _, result = run_body(body.replace("cp.async.bulk.wait_group.read 0;", ""), x, np.empty(128, np.uint32))
    assert "wait_group.read is missing" in result.reports[0].message
    _, result = run_body(body.replace("fence.proxy.async;", ""), x, np.empty(128, np.uint32))
    assert "whose initialisation no" in result.reports[0].message


def test_bulk_copy_over_what_threads_wrote() -> None:
    """A bulk copy needs a proxy fence after a thread's write to its target, but not after a read."""
    body = """
      setp.ne.u32 %P, %t, 0; @%P bra over;
      add.u32 %bar, %s, 1024; FIRST
      mbarrier.init.shared::cta.b64 [%bar], 1; fence.mbarrier_init.release.cluster; FENCE
      mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 512;
      cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%p], 512, [%bar];
    again: mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0; @!%P bra again;
      ld.shared.u32 %u, [%s]; st.global.u32 [%q], %u;
    over:"""
    x = np.arange(128, dtype=np.uint32)
    for first, fence, kinds in (
        ("st.shared.u32 [%s], %t;", "", ["proxy-fence"]),
        ("st.shared.u32 [%s], %t;", "fence.proxy.async.shared::cta;", []),
        # A read before the copy needs no fence.
        ("st.shared.u32 [%s], %t; fence.proxy.async.shared::cta; ld.shared.u32 %w, [%s];", "", []),
    ):
        _, result = run_body(body.replace("FIRST", first).replace("FENCE", fence), x, np.empty(1, np.uint32))
        assert [r.kind for r in result.reports] == kinds


def test_a_whole_warp_that_stores_one_box_stores_it_once() -> None:
    """A store that all lanes issue with equal operands counts once, and each lane has to wait for its own."""
    body = """
      mov.b64 %d0, map; cvta.param.u64 %d1, %d0; mad.lo.u32 %v, %t, 16, %s;
      st.shared.v4.u32 [%v], {%t, %t, %t, %t}; fence.proxy.async.shared::cta; bar.warp.sync -1;
      cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d1, {0, 0}], [%s];
      cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
      st.shared.v4.u32 [%v], {%t, %t, %t, %t};"""
    memory = Memory()
    y = memory.upload(np.empty((8, 32), np.float16), "output")
    text = entry(body, ".param .align 64 .b8 map[128]")
    result = launch(text, [tensor_map(y, (32, 8), (64,), (32, 8), 0)], memory, options=Options(counters=True))
    assert result.reports == []
    assert result.counters is not None
    assert result.counters.bulk_boxes == 1
    # Without the wait, every lane's own store may still be reading.
    text = text.replace(
        "cp.async.bulk.wait_group.read 0;", "setp.ne.u32 %P, %t, 5; @%P cp.async.bulk.wait_group.read 0;"
    )
    result = launch(text, [tensor_map(y, (32, 8), (64,), (32, 8), 0)], memory)
    assert {r.kind for r in result.reports} == {"shared-race", "in-flight"}


def test_tensor_maps_that_are_none_or_reach_too_far() -> None:
    """Zeros are no tensor map, and a box within a tensor that exceeds its buffer is reported."""
    memory = Memory()
    x = memory.upload(np.zeros((8, 64), np.float16))
    y = memory.upload(np.empty(512, np.uint16), "output")
    none = launch(load_kernel(2, 1024), [bytes(128), y, 0, 0], memory, check_outputs=False)
    assert [r.kind for r in none.reports] == ["tensor-map", "deadlock"]
    far = launch(load_kernel(2, 1024), [tensor_map(x, (64, 9), (128,), (64, 8), 3), y, 0, 5], memory)
    assert [r.kind for r in far.reports] == ["global-out-of-bounds"]
    near = launch(load_kernel(2, 1024), [tensor_map(x, (64, 9), (128,), (64, 8), 3), y, 0, 0], memory)
    assert near.reports == []


@pytest.mark.parametrize(("start", "kinds"), [("%d1", []), ("%q", ["tensor-map"])])
def test_a_prefetch_changes_nothing_but_needs_a_tensor_map(start: str, kinds: list[str]) -> None:
    """Any coordinates may be prefetched, also outside of the tensor, and also before the previous kernel has ended."""
    prefetch = f"cp.async.bulk.prefetch.tensor.2d.L2.global [{start}, {{%a0, %x0}}];"
    text = load_kernel(2, 1024).replace("prefetch.tensormap [%d1];", f"mov.u32 %x0, -77; {prefetch}")
    memory = Memory()
    x = memory.upload(np.arange(512, dtype=np.uint16))
    y = memory.upload(np.empty(512, np.uint16), "output")
    result = launch(text, [tensor_map(x, (64, 8), (128,), (64, 8), 0), y, 0, 0], memory)
    assert [r.kind for r in result.reports] == kinds
    np.testing.assert_array_equal(y.download(), np.arange(512))


def test_misplaced_destinations() -> None:
    """A TMA load is reported if its target is misaligned or outside of shared memory."""
    memory = Memory()
    x = memory.upload(np.zeros((8, 64), np.float16))
    y = memory.upload(np.empty(512, np.uint16), "output")
    text = (
        load_kernel(2, 1024)
        .replace("[%s], [%d1", "[%u], [%d1")
        .replace("prefetch.tensormap", "add.u32 %u, %s, 64; prefetch.tensormap")
    )
    args = [tensor_map(x, (64, 8), (128,), (64, 8), 3), y, 0, 0]
    crooked = launch(text, args, memory, check_outputs=False)
    assert crooked.reports[0].kind == "shared-misaligned"
    outside = launch(text.replace("%s, 64", "%s, 65536"), args, memory, check_outputs=False)
    assert outside.reports[0].kind == "shared-out-of-bounds"


def test_threads_that_read_what_a_bulk_copy_brings() -> None:
    """Each thread that reads copied data must have waited for the mbarrier, or be ordered after one that has."""
    body = """
      add.u32 %bar, %s, 4096; setp.ne.u32 %P, %t, 0; @%P bra ready;
      mbarrier.init.shared::cta.b64 [%bar], 1; fence.mbarrier_init.release.cluster;
      mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 512;
      cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%p], 512, [%bar];
    ready: bar.sync 0;
      WAIT
      and.b32 %u, %t, 31; shl.b32 %u, %u, 4; add.u32 %v, %u, %s;
      ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%a0, %a1, %a2, %a3}, [%v];
      mad.wide.u32 %g, %t, 16, %q; st.global.v4.u32 [%g], {%a0, %a1, %a2, %a3};"""
    wait = "again: mbarrier.try_wait.parity.shared::cta.b64 %Q, [%bar], 0; @!%Q bra again;"
    x = np.arange(256, dtype=np.uint16)
    got, result = run_body(body.replace("WAIT", wait), x, np.empty((64, 4), np.uint32), block=64)
    assert result.reports == []
    # Thread 1 gets halves 2 and 3 of the first row of each of four matrices of 8 x 8 halves.
    assert got[1].view(np.uint16).tolist() == [2, 3, 66, 67, 130, 131, 194, 195]
    # One warp waits, and the other does not. The data has arrived, but is not visible to the other.
    half = "setp.gt.u32 %E, %t, 31; @%E bra over; WAIT over:".replace("WAIT", wait)
    _, result = run_body(body.replace("WAIT", half), x, np.empty((64, 4), np.uint32), block=64)
    assert [r.kind for r in result.reports] == ["shared-race"]
    _, result = run_body(body.replace("WAIT", ""), x, np.empty((64, 4), np.uint32), block=64)
    assert {r.kind for r in result.reports} == {"in-flight"}
