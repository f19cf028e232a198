"""Proves the rules whose violations may leave results right: defects break them, and right programs do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import Memory

# Words of a buffer.
WORDS = 256


def kinds(
    body: str, target: str = "sm_80", block: int = 64, grid: int = 1, values: Any = None, **how: Any
) -> list[str]:
    """The ids of the errors of a kernel with this body.

    It has buffers %p and %q of 256 words, which it may change, and %r, an input; the thread's number %t; the addresses
    of the thread's words of %p in %g and of %q in %h; shared memory from %s on; and %n, which is 0. Parameter ``shift``
    is the distance from %p to %q in bytes. ``values``: the contents of %p in place of 0, 1, 2 and so on; ``how``:
    further arguments of the launch.
    """
    text = f""".version 8.6\n.target {target}\n.address_size 64
    .const .align 16 .b8 table[64]; .shared .align 128 .b8 s[8192];
    .visible .entry k(.param .u64 p, .param .u64 q, .param .u64 r, .param .u32 n, .param .u64 shift) {{
      .reg .b32 %t, %n, %a, %b, %c, %d, %s, %x<8>, %y<8>; .reg .b64 %p, %q, %r, %g, %h, %i, %w; .reg .pred %P, %Q, %R;
      .local .align 16 .b8 own[64]; .reg .f32 %f<9>;
      ld.param.u64 %p, [p]; ld.param.u64 %q, [q]; ld.param.u64 %r, [r]; ld.param.u32 %n, [n];
      mov.u32 %t, %tid.x; mov.u32 %s, s; mad.wide.u32 %g, %t, 4, %p; mad.wide.u32 %h, %t, 4, %q;
      {body}
      ret; }}"""
    memory = Memory()
    p = memory.upload(np.arange(WORDS, dtype=np.uint32) if values is None else values, "inout", name="p")
    q = memory.upload(np.zeros(WORDS, np.uint32), "inout", name="q")
    r = memory.upload(np.arange(WORDS, dtype=np.uint32), name="r")
    shift = np.int64(q.address - p.address)
    result = emulator.load(text).launch("k", grid, block, [p, q, r, np.uint32(0), shift], memory=memory, **how)
    return [report.kind for report in result.reports if report.is_error]


# Writes a local array, whose generic address is in %i. Thread 0 has the predicate %P.
OWN = "mov.u64 %i, own; cvta.local.u64 %i, %i; st.v2.u32 [%i], {%t, %t}; setp.eq.u32 %P, %t, 0;"
# Each thread copies 16 bytes from %p to its own address %a.
COPY = "shl.b32 %a, %t, 4; add.u32 %a, %a, %s; mov.u64 %w, %p; cp.async.ca.shared.global [%a], [%w], 16;"
# By rule: bodies that break it.
DEFECTS = {
    "read-only-path": [
        "st.global.u32 [%g], 7; ld.global.nc.u32 %a, [%g]; st.global.u32 [%h], %a;",
        "ld.global.nc.u32 %a, [%g]; add.u32 %a, %a, 1; st.global.u32 [%g], %a;",
        "red.global.add.u32 [%g], 1; bar.sync 0; ld.global.nc.v2.u32 {%a, %b}, [%p]; st.global.u32 [%h], %a;",
        "st.global.u32 [%g], %t; bar.sync 0; ldu.global.u32 %a, [%p+252]; st.global.u32 [%h], %a;",
    ],
    "another-buffer": [
        "ld.param.u64 %w, [shift]; add.u64 %g, %g, %w; st.global.u32 [%g], %t;",
        "ld.param.u64 %w, [shift]; add.u64 %w, %p, %w; ld.global.u32 %a, [%w]; st.global.u32 [%g], %a;",
        "ld.param.u64 %w, [shift]; add.u64 %g, %g, %w; red.global.add.u32 [%g], 1;",
        "ld.param.u64 %w, [shift]; sub.u64 %h, %h, %w; cvta.to.global.u64 %h, %h; ld.global.u32 %a, [%h];"
        "st.global.u32 [%g+256], %a;",
        "ld.param.u64 %w, [shift]; add.u64 %w, %p, %w; shl.b32 %a, %t, 4; add.u32 %a, %a, %s;"
        "cp.async.ca.shared.global [%a], [%w], 16; cp.async.wait_all;",
        "ld.param.u64 %w, [shift]; setp.lt.u32 %P, %t, 70; selp.b64 %i, %g, %p, %P; add.u64 %i, %i, %w;"
        "st.u32 [%i], %t;",
    ],
    "in-flight": [
        COPY + "xor.b32 %b, %a, 16; ld.shared.u32 %c, [%b]; st.global.u32 [%h], %c;",
        COPY + "cp.async.commit_group; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%x0, %x1, %x2, %x3}, [%a];"
        "st.global.u32 [%h], %x2;",
        COPY + "cp.async.commit_group; cp.async.ca.shared.global [%a], [%p], 16; cp.async.wait_all;",
        COPY + "st.shared.u32 [%a], 1; cp.async.wait_all;",
        COPY + "cp.async.commit_group; setp.lt.u32 %P, %t, 63; @%P cp.async.wait_group 0; bar.sync 0;"
        "xor.b32 %b, %a, 16; ld.shared.u32 %c, [%b]; st.global.u32 [%h], %c;",
        COPY + "cp.async.commit_group; add.u32 %b, %a, 1024; cp.async.ca.shared.global [%b], [%w], 16;"
        "cp.async.commit_group; cp.async.wait_group 1; ld.shared.u32 %c, [%b]; st.global.u32 [%h], %c;",
    ],
    "shared-race": [
        COPY + "cp.async.wait_all; xor.b32 %b, %a, 512; ld.shared.u32 %c, [%b]; st.global.u32 [%h], %c;",
        "shl.b32 %b, %t, 4; add.u32 %b, %b, %s; st.shared.v4.u32 [%b], {%t, %t, %t, %t}; bar.sync 0;"
        "xor.b32 %b, %b, 512; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%x0, %x1, %x2, %x3}, [%b];"
        "st.global.u32 [%h], %x0;" + COPY + "cp.async.wait_all;",
        "shl.b32 %b, %t, 4; add.u32 %b, %b, %s; st.shared.v4.u32 [%b], {%t, %t, %t, %t};"
        "xor.b32 %b, %t, 32; shl.b32 %b, %b, 4; add.u32 %b, %b, %s; cp.async.ca.shared.global [%b], [%p], 16;"
        "cp.async.wait_all;",
    ],
    "barrier-count": [
        "bar.sync 1, 32;",
        "bar.sync 16;",
        "bar.sync 2, 48;",
        "setp.lt.u32 %P, %t, 32; @%P bra low; bar.sync 3, 64; bra done; low: bar.sync 3, 32; done: bar.sync 0;",
        "mov.u32 %a, 17; bar.sync %a, 64;",
        "bar.arrive 1, 32; bar.sync 0;",
    ],
    "barrier-divergence": [
        "and.b32 %a, %t, 1; setp.eq.u32 %P, %a, 0; @%P bra even; bar.sync 0; bra done; even: bar.sync 0; done:",
        "setp.eq.u32 %P, %t, 5; @%P bra some; barrier.sync.aligned 1, 64; bra done;"
        "some: barrier.sync.aligned 1, 64; done:",
        "setp.lt.u32 %P, %t, 16; @%P bar.sync 2, 64; @!%P bar.sync 2, 64;",
    ],
    "uninitialised-register": [
        "add.u32 %a, %b, 1; st.global.u32 [%g], %a;",
        "setp.lt.u32 %P, %t, 60; @%P mov.u32 %a, 3; st.global.u32 [%g], %a;",
        "mov.u32 %c, 0; more: add.u32 %a, %a, %c; add.u32 %c, %c, 1; setp.lt.u32 %P, %c, 4; @%P bra more;"
        "st.global.u32 [%g], %a;",
        "@%Q st.global.u32 [%g], 9;",
    ],
    "uninitialised-local": [
        "ld.local.u32 %a, [own+8]; st.global.u32 [%g], %a;",
        "st.local.u32 [own], 5; ld.local.v2.u32 {%a, %b}, [own]; add.u32 %a, %a, %b; st.global.u32 [%g], %a;",
        "mov.u64 %i, own; cvta.local.u64 %i, %i; and.b32 %a, %t, 7; mad.wide.u32 %i, %a, 4, %i; st.u32 [%i], %t;"
        "ld.local.u32 %b, [own+4]; st.global.u32 [%g], %b;",
    ],
    "shuffle-source": [
        "setp.lt.u32 %P, %t, 48; @!%P bra done; shfl.sync.down.b32 %a, %t, 1, 31, 0xffff;"
        "st.global.u32 [%g], %a; done:",
        "and.b32 %c, %t, 1; setp.eq.u32 %P, %c, 0; @!%P bra done; shfl.sync.bfly.b32 %a, %t, 1, 31, 0x55555555;"
        "st.global.u32 [%g], %a; done:",
        "and.b32 %c, %t, 31; setp.lt.u32 %P, %c, 8; @!%P bra done; shfl.sync.idx.b32 %a, %t, 9, 31, 255;"
        "st.global.u32 [%g], %a; done:",
    ],
    "input-modified": [
        "st.global.u32 [%r], 1;",
        "mov.u64 %i, table; cvta.const.u64 %i, %i; st.u32 [%i+4], %t;",
        "mov.u64 %i, table; cvta.const.u64 %i, %i; atom.add.u32 %a, [%i], 1;",
        "mov.u64 %i, table; cvta.const.u64 %i, %i; cvta.to.global.u64 %i, %i; red.global.or.b32 [%i+60], 4;",
    ],
    "uninitialised-global": [
        "setp.eq.u32 %P, %t, 0; @%P discard.global.L2 [%p], 128; bar.sync 0; ld.global.u32 %a, [%g];"
        "st.global.u32 [%h], %a;",
        "discard.L2 [%q+128], 128; ld.global.u32 %a, [%q+252]; st.global.u32 [%g], %a;",
        "setp.eq.u32 %P, %t, 0; @%P discard.global.L2 [%p], 128; bar.sync 0; red.global.add.u32 [%g], 1;",
    ],
    "address-space": [
        "cvta.to.shared.u64 %i, %p; cvt.u32.u64 %a, %i; st.global.u32 [%g], %a;",
        "mov.u64 %i, own; cvta.local.u64 %i, %i; cvta.to.shared.u64 %i, %i; cvt.u32.u64 %a, %i;"
        "st.global.u32 [%g], %a;",
        "cvta.to.local.u64 %i, %g; cvt.u32.u64 %a, %i; st.global.u32 [%g], %a;",
    ],
    "division-by-zero": [
        "div.u32 %a, %t, %n; st.global.u32 [%g], %a;",
        "rem.s32 %a, 5, %n; st.global.u32 [%g], %a;",
        "and.b32 %b, %t, 3; div.s32 %a, 100, %b; st.global.u32 [%g], %a;",
        "cvt.s64.s32 %w, %t; rem.s64 %w, %w, %w; mad.wide.u32 %i, %t, 8, %p; st.global.u64 [%i], %w;",
    ],
    "warp-divergence": [
        "bar.warp.sync 0xfffffffe;",
        "setp.lt.u32 %P, %t, 16; @!%P bra done; bar.warp.sync 0xff; done:",
        "and.b32 %a, %t, 31; shl.b32 %b, 1, %a; not.b32 %b, %b; bar.warp.sync %b;",
        "mov.u32 %b, -1; and.b32 %a, %t, 31; setp.lt.u32 %P, %a, 9; @%P mov.u32 %b, 0xffff;"
        "vote.sync.ballot.b32 %a, %P, %b; st.global.u32 [%g], %a;",
        "setp.lt.u32 %P, %t, 16; @%P movmatrix.sync.aligned.m8n8.trans.b16 %a, %t;",
    ],
    "foreign-local": [
        # The address is passed by shared memory, a shuffle or global memory, and is read, written, or used with an
        # offset.
        OWN + "@%P st.shared.u64 [s], %i; bar.sync 0; ld.shared.u64 %i, [s]; ld.u32 %a, [%i]; st.global.u32 [%g], %a;",
        OWN + "mov.b64 {%a, %b}, %i; shfl.sync.idx.b32 %a, %a, 0, 31, -1; shfl.sync.idx.b32 %b, %b, 0, 31, -1;"
        "mov.b64 %i, {%a, %b}; st.u32 [%i+4], 3;",
        OWN + "@%P st.global.u64 [%q], %i; bar.sync 0; ld.global.u64 %i, [%q]; ld.v2.u32 {%a, %b}, [%i];"
        "st.global.u32 [%g], %b;",
    ],
    "matrix-alignment": [
        "wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%x0,%x1,%x2,%x3,%x4,%x5,%x6,%x7}, [s+16], 16;",
        "wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%x0,%x1,%x2,%x3,%x4,%x5,%x6,%x7}, [s], 20;",
        "mov.u32 %x0, 0;"
        "wmma.store.d.sync.aligned.row.m8n32k16.shared.s32 [s+16], {%x0,%x0,%x0,%x0,%x0,%x0,%x0,%x0}, 32;",
        "wmma.load.b.sync.aligned.col.m16n16k8.shared.tf32 {%x0,%x1,%x2,%x3}, [s], 10;",
        "wmma.load.a.sync.aligned.row.m16n16k16.shared.u8 {%x0,%x1}, [s+4], 32;",
        "wmma.load.a.sync.aligned.row.m16n16k16.shared.u8 {%x0,%x1}, [s+8], 28;",
    ],
    "grid-sync": [
        "mov.u32 %a, %envreg2; st.global.u32 [%g], 0;",
        "mov.u32 %a, %envreg1; st.global.u32 [%g], 0;",
        "mov.u32 %a, %envreg1; mov.u32 %b, %envreg2; mov.b64 %i, {%b, %a}; red.add.u32 [%i+4], 1;",
    ],
}  # fmt: skip
# Each thread stores zeros to 128 bytes of shared memory, so that loads of matrices read defined memory.
ZERO = "shl.b32 %d, %t, 7; add.u32 %d, %d, %s; more: st.shared.u32 [%d], 0; add.u32 %d, %d, 4; and.b32 %c, %d, 127;"
FILLED = ZERO + "setp.ne.u32 %R, %c, 0; @%R bra more; bar.sync 0;"


@pytest.mark.parametrize(("rule", "body"), [(rule, body) for rule, bodies in DEFECTS.items() for body in bodies])
def test_defects(rule: str, body: str) -> None:
    if rule == "matrix-alignment":
        body = FILLED + body
    assert rule in kinds(body)


# Bodies that break no rule.
RIGHT = {
    "read-only input": "ld.global.nc.u32 %a, [%r]; st.global.u32 [%g], %a;",
    "read-only words next to written ones": "ld.global.nc.u32 %a, [%g+512]; st.global.u32 [%g], %a;",
    "pointer of either buffer": "setp.lt.u32 %P, %t, 7; selp.b64 %i, %g, %h, %P; st.global.u32 [%i], %t;",
    "pointer differences": "sub.u64 %w, %q, %p; add.u64 %g, %g, %w; st.global.u32 [%g], %t;",
    "pointer out of memory": "st.shared.u64 [s], %q; ld.shared.u64 %i, [s]; ld.global.u32 %a, [%i];",
    "whole barriers": "bar.sync 1, 64; bar.sync 15; bar.sync 0, 64;",
    "two halves": "setp.lt.u32 %P, %t, 32; @%P bra low; bar.sync 1, 32; bra done; low: bar.sync 2, 32;"
    "done: bar.sync 0;",
    "producer and consumer": "setp.lt.u32 %P, %t, 32; @%P bra low; bar.arrive 1, 64; bra done;"
    "low: bar.sync 1, 64; done:",
    "barriers that are not aligned": "and.b32 %a, %t, 1; setp.eq.u32 %P, %a, 0; @%P bra even; barrier.sync 1; bra done;"
    "even: barrier.sync 1; done:",
    "lanes that exit while others wait for their warp": "setp.lt.u32 %P, %t, 8; @%P bra here; mov.u32 %c, 0;"
    "more: add.u32 %c, %c, 1; setp.lt.u32 %Q, %c, 9; @%Q bra more; ret; here: bar.warp.sync 0xffffffff;"
    "st.global.u32 [%g], 3;",
    "an aligned tile of bytes": FILLED + "wmma.load.a.sync.aligned.row.m16n16k16.shared.u8 {%x0,%x1}, [s+8], 24;",
    "a register that is read and dropped": "setp.lt.u32 %P, %t, 99; add.u32 %a, %b, 1; selp.b32 %a, %t, %a, %P;"
    "st.global.u32 [%g], %a;",
    "an array that is read and dropped": "ld.local.u32 %a, [own]; mul.lo.u32 %a, %a, 0; st.global.u32 [%g], %a;",
    "a shuffle whose value is dropped": "setp.lt.u32 %P, %t, 16; @!%P bra done;"
    "shfl.sync.down.b32 %a, %t, 1, 31, 0xffff; setp.lt.u32 %Q, %t, 15; @%Q st.global.u32 [%g], %a; done:",
    "shared addresses": "cvta.shared.u64 %i, %g; mov.u64 %i, s; cvta.shared.u64 %i, %i; cvta.to.shared.u64 %i, %i;"
    "cvt.u32.u64 %a, %i; st.shared.u32 [%a], 1;",
    "a quotient that is dropped": "and.b32 %b, %t, 3; div.u32 %a, 100, %b; setp.eq.u32 %P, %b, 0;"
    "selp.b32 %a, 0, %a, %P;"
    "st.global.u32 [%g], %a;",
    "equal masks of disjoint groups": "mov.u32 %b, 0xffff; and.b32 %a, %t, 16; setp.ne.u32 %P, %a, 0;"
    "@%P mov.u32 %b, 0xffff0000; vote.sync.ballot.b32 %a, %P, %b; st.global.u32 [%g], %a;",
    "a local address that comes back": OWN + "mad.lo.u32 %a, %t, 8, %s; st.shared.u64 [%a], %i;"
    "bar.sync 0; ld.shared.u64 %i, [%a]; ld.u32 %b, [%i]; cvta.to.local.u64 %i, %i; ld.local.u32 %c, [%i+4];"
    "add.u32 %b, %b, %c; st.global.u32 [%g], %b;",
    "discarded, then written": "setp.eq.u32 %P, %t, 0; @%P discard.global.L2 [%p], 128; bar.sync 0;"
    "st.global.u32 [%g], 3; ld.global.u32 %a, [%g];",
}  # fmt: skip


@pytest.mark.parametrize("body", RIGHT.values(), ids=RIGHT)
def test_right_programs(body: str) -> None:
    assert kinds(body) == []


# An mbarrier of 64 threads at byte 64 of shared memory, and an arrival on it.
BARRIER = "setp.eq.u32 %P, %t, 0; @%P mbarrier.init.shared.b64 [s+64], 64; bar.sync 0;"
ARRIVE = "bar.sync 0; mbarrier.arrive.shared.b64 %w, [s+64];"
OVERWRITES = {  # writes into its 8 bytes
    "a store": "@%P st.shared.u32 [s+68], 0;",
    "a wide store": "@%P mov.u32 %a, 0; @%P st.shared.v4.u32 [s+64], {%a, %a, %a, %a};",
    "an atomic": "@%P red.shared.add.u32 [s+64], 1;",
    "an element beyond an array": "mad.lo.u32 %a, %t, 4, %s; st.shared.u32 [%a], %t;",
    "cp.async": "@%P cp.async.ca.shared.global [s+64], [%p], 16; cp.async.wait_all;",
    "a generic store": "mov.u64 %i, s; cvta.shared.u64 %i, %i; @%P st.u8 [%i+71], 1;",
}


@pytest.mark.parametrize("body", OVERWRITES.values(), ids=OVERWRITES)
def test_a_barrier_that_is_overwritten(body: str) -> None:
    assert "mbarrier-overwritten" in kinds(BARRIER + body + ARRIVE)


@pytest.mark.parametrize(
    "body",
    [
        BARRIER + "@%P st.shared.u32 [s+72], 0; @%P st.shared.u32 [s+60], 0;" + ARRIVE,
        "setp.eq.u32 %P, %t, 0; @%P st.shared.u32 [s+64], 5;" + BARRIER + ARRIVE,
        BARRIER + ARRIVE + "bar.sync 0; @%P mbarrier.inval.shared.b64 [s+64]; @%P st.shared.u32 [s+64], 0;"
        "@%P mbarrier.init.shared.b64 [s+64], 64;" + ARRIVE,
    ],
    ids=["next to it", "before", "after inval"],
)
def test_a_barrier_that_is_not_overwritten(body: str) -> None:
    assert kinds(body) == []


@pytest.mark.parametrize(("opcode", "value"), [("div.u32", 0xFFFFFFFF), ("rem.u32", 70)])
def test_a_quotient_by_zero_is_what_hardware_gives(opcode: str, value: int) -> None:
    """A quotient has all bits set, and a remainder is the dividend, which is 70."""
    memory = Memory()
    text = f""".version 8.6\n.target sm_80\n.address_size 64
    .visible .entry k(.param .u64 p, .param .u32 n) {{ .reg .b64 %p; .reg .b32 %n, %a; ld.param.u64 %p, [p];
      ld.param.u32 %n, [n]; {opcode} %a, 70, %n; st.global.u32 [%p], %a; ret; }}"""
    out = memory.upload(np.zeros(1, np.uint32), "output")
    result = emulator.load(text).launch("k", 1, 1, [out, np.uint32(0)], memory=memory)
    assert [report.kind for report in result.reports] == ["division-by-zero"]
    assert out.download() == value


def test_a_grid_barrier_of_a_cooperative_launch() -> None:
    """%envreg1 and %envreg2 hold the address of the grid's barrier, which only a cooperative launch has."""
    assert kinds("mov.u32 %a, %envreg2; st.global.u32 [%g], 0;", cooperative=True) == []


def test_the_report_names_both_buffers() -> None:
    memory = Memory()
    text = """.version 8.6\n.target sm_80\n.address_size 64
    .visible .entry k(.param .u64 p, .param .u64 shift) { .reg .b64 %p, %w;
      ld.param.u64 %p, [p]; ld.param.u64 %w, [shift]; add.u64 %p, %p, %w; st.global.u32 [%p], 1; ret; }"""
    # A buffer without a name is named by its parameter.
    for number, (pointer, target) in enumerate((("first", "second"), ("", "second"))):
        a, b = (memory.upload(np.zeros(8, np.uint32), "inout", name=name) for name in (pointer, target))
        result = emulator.load(text).launch("k", 1, 1, [a, np.int64(b.address - a.address)], memory=memory)
        (report,) = result.reports
        assert f"a pointer into {('first', 'parameter 0')[number]} (" in str(report)
        assert "second" in str(report)
