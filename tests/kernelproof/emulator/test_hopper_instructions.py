"""Instructions of sm_90a one by one, against scalar formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import HOPPER, LaunchResult, Memory, Options
from kernelproof.emulator.hopper.bulk import TensorMap

HEAD = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 s[];
"""
REGISTERS = """
  .reg .b32 %t, %u, %v, %w, %s, %bar, %n, %a<8>, %x<8>; .reg .b64 %p, %q, %g, %d<8>; .reg .pred %P, %Q, %E;
  .reg .b16 %h<4>;
  mov.u32 %t, %tid.x; mov.u32 %s, s;
"""


def entry(body: str, params: str = ".param .u64 x, .param .u64 y") -> str:
    load = "ld.param.u64 %p, [x]; ld.param.u64 %q, [y];" if " x" in params else ""
    return f"{HEAD}.visible .entry k({params}) {{{REGISTERS}{load}\n{body}\n ret;\n}}\n"


def launch(text: str, args: list[Any], memory: Memory, **settings: Any) -> LaunchResult:
    settings = {"grid": 1, "block": 32, "shared_bytes": 65536, "device": HOPPER, **settings}
    return emulator.load(text).launch("k", args=args, memory=memory, **settings)


def run(body: str, x: np.ndarray, y: np.ndarray, **settings: Any) -> tuple[np.ndarray, LaunchResult]:
    memory = Memory()
    out = memory.upload(y, "output")
    result = launch(entry(body), [memory.upload(x), out], memory, **settings)
    return out.download(), result


# --- stmatrix ---


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_stmatrix(n: int, trans: str) -> None:
    loads = "".join(f" mad.wide.u32 %g, %t, {4 * n}, %p; ld.global.u32 %a{i}, [%g+{4 * i}];" for i in range(n))
    registers = ", ".join(f"%a{i}" for i in range(n))
    body = f"""{loads}
      shl.b32 %u, %t, 4; add.u32 %u, %u, %s;
      stmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 [%u], {{{registers}}};
      bar.warp.sync -1;
      mad.lo.u32 %v, %t, {4 * n}, %s; mad.wide.u32 %g, %t, {4 * n}, %q;
      """ + "".join(f" ld.shared.u32 %w, [%v+{4 * i}]; st.global.u32 [%g+{4 * i}], %w;" for i in range(n))
    values = np.random.default_rng(n).integers(0, 1 << 16, (32, n, 2)).astype(np.uint16)
    got, result = run(body, values, np.empty((n, 8, 8), np.uint16))
    assert result.reports == []
    for matrix in range(n):
        for lane in range(32):
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                place = (column, row) if trans else (row, column)
                assert got[matrix][place] == values[lane, matrix, half]


# --- wgmma ---

SPAN = {"none": 16, "32": 32, "64": 64, "128": 128}
MODE = {"none": 0, "32": 3, "64": 2, "128": 1}


def element_address(mode: str, along: bool, outer: int, k: int, leading: int, stride: int) -> int:
    """Byte offset of element (m or n, k) of a 16-bit operand in the canonical layout, before the swizzle's exclusive or
    of address bits."""
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
    """(bytes, leading, stride) of a (rows, 16) operand."""
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


def descriptor(offset: int, leading: int, stride: int, mode: str) -> int:
    # The window's first kilobyte belongs to the system: shared variables start at address 1024.
    return (1024 + offset) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | MODE[mode] << 62


def wgmma_kernel(n: int, acc: str, kind: str, da: int, db: int, ta: bool, tb: bool, signs: str, registers: bool) -> str:
    count = n // 2 if acc == "f32" else n // 4
    names = ", ".join(f"%c{i}" for i in range(count))
    loads = "\n".join(f"ld.global.u32 %c{i}, [%d2+{4 * i}];" for i in range(count))
    stores = "\n".join(f"st.global.u32 [%d3+{4 * i}], %c{i};" for i in range(count))
    a = "{%a0, %a1, %a2, %a3}" if registers else str(da)
    trans = f"{int(tb)}" if registers else f"{int(ta)}, {int(tb)}"
    fragments = "\n".join(f"ld.global.u32 %a{i}, [%d4+{4 * i}];" for i in range(4)) if registers else ""
    return (
        HEAD
        + f""".visible .entry k(.param .u64 x, .param .u64 c, .param .u64 y, .param .u64 f, .param .u32 keep) {{
      {REGISTERS} .reg .b32 %c<{count}>; .reg .b64 %A, %B;
      ld.param.u64 %p, [x]; ld.param.u64 %d0, [c]; ld.param.u64 %d1, [y]; ld.param.u64 %d5, [f];
      ld.param.u32 %n, [keep]; setp.ne.u32 %P, %n, 0;
      mov.u32 %u, 0;
    more:
      mad.lo.u32 %v, %t, 16, %u; cvt.u64.u32 %g, %v; add.u64 %g, %g, %p; add.u32 %v, %v, %s;
      ld.global.v4.u32 {{%x0, %x1, %x2, %x3}}, [%g]; st.shared.v4.u32 [%v], {{%x0, %x1, %x2, %x3}};
      add.u32 %u, %u, 2048; setp.lt.u32 %Q, %u, 32768; @%Q bra more;
      fence.proxy.async.shared::cta; bar.sync 0;
      mad.wide.u32 %d2, %t, {4 * count}, %d0; mad.wide.u32 %d3, %t, {4 * count}, %d1; mad.wide.u32 %d4, %t, 16, %d5;
      {loads} {fragments}
      mov.b64 %A, {da}; mov.b64 %B, {db};
      wgmma.fence.sync.aligned;
      wgmma.mma_async.sync.aligned.m64n{n}k16.{acc}.{kind}.{kind}
        {{{names}}}, {a if registers else "%A"}, %B, %P, {signs}, {trans};
      wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
      {stores} ret; }}"""
    )


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
    n, acc, mode_a, along_a, mode_b, along_b = case
    check_wgmma(n, acc, "f16", mode_a, along_a, mode_b, along_b, keep, "1, 1", registers=False)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("signs", ["1, -1", "-1, 1", "-1, -1"])
def test_wgmma_from_registers(kind: str, signs: str) -> None:
    check_wgmma(64, "f32", kind, "128", False, "128", True, 1, signs, registers=True)


def check_wgmma(
    n: int, acc: str, kind: str, mode_a: str, along_a: bool, mode_b: str, along_b: bool, keep: int, signs: str,
    registers: bool,
) -> None:  # fmt: skip
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

    def where(thread: int, i: int) -> tuple[int, int]:
        return thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2

    for thread in range(128):
        for i in range(n // 2):
            accumulators[thread, i] = c[where(thread, i)]
        for i in range(4):
            for j in range(2):
                row, column = where(thread, 2 * i + j)
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
            assert got[thread, i] == want[where(thread, i)]


# --- mbarrier ---


def test_mbarrier_states_and_phases() -> None:
    body = """
      mov.u32 %bar, s;
      setp.ne.u32 %P, %t, 0; @%P bra over;
      mbarrier.init.shared::cta.b64 [%bar], 2;
      mbarrier.arrive.shared::cta.b64 %d0, [%bar];
      mbarrier.test_wait.shared::cta.b64 %Q, [%bar], %d0; selp.u32 %x0, 1, 0, %Q;
      mbarrier.test_wait.parity.shared::cta.b64 %Q, [%bar], 1; selp.u32 %x1, 1, 0, %Q;
      mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%bar], 32;
      mbarrier.arrive.release.cta.shared::cta.b64 %d1, [%bar], 1;
      mbarrier.test_wait.shared::cta.b64 %Q, [%bar], %d1; selp.u32 %x2, 1, 0, %Q;
      mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%bar], 32;
      mbarrier.try_wait.shared::cta.b64 %Q, [%bar], %d1; selp.u32 %x3, 1, 0, %Q;
      mbarrier.test_wait.parity.shared::cta.b64 %Q, [%bar], 0; selp.u32 %x4, 1, 0, %Q;
      mbarrier.test_wait.parity.shared::cta.b64 %Q, [%bar], 1; selp.u32 %x5, 1, 0, %Q;
      mbarrier.inval.shared::cta.b64 [%bar];
      st.global.u32 [%q], %x0; st.global.u32 [%q+4], %x1; st.global.u32 [%q+8], %x2; st.global.u32 [%q+12], %x3;
      st.global.u32 [%q+16], %x4; st.global.u32 [%q+20], %x5;
    over:"""
    got, result = run(body, np.zeros(1, np.uint32), np.empty(6, np.uint32))
    assert result.reports == []
    assert got.tolist() == [0, 1, 0, 1, 1, 0]


def test_try_wait_gives_up_where_nothing_else_can_run() -> None:
    # A try_wait has a time limit: the loop that counts its failures ends.
    body = """
      mov.u32 %bar, s; mbarrier.init.shared::cta.b64 [%bar], 64; bar.warp.sync -1; mov.u32 %x0, 0;
      mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0, 100; @!%P add.u32 %x0, %x0, 1;
      mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %x0;"""
    got, _ = run(body, np.zeros(1, np.uint32), np.empty(32, np.uint32))
    assert (got == 1).all()


@pytest.mark.parametrize(("between", "failures"), [("", [1, 0]), ("bar.sync 0;", [0, 0])])
@pytest.mark.parametrize("adverse", [False, True])
def test_a_wait_may_come_before_an_arrival_that_nothing_orders(
    between: str, failures: list[int], adverse: bool
) -> None:
    # Thread 32 completes the phase. Its own warp sees that, another one only behind a barrier between.
    body = f"""
      mov.u32 %bar, s; setp.eq.u32 %P, %t, 0; @%P mbarrier.init.shared::cta.b64 [%bar], 1; bar.sync 0;
      mov.u32 %x0, 0; setp.eq.u32 %P, %t, 32; @%P mbarrier.arrive.shared::cta.b64 _, [%bar]; {between}
    again: mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0; @!%P add.u32 %x0, %x0, 1; @!%P bra again;
      mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %x0;"""
    options = Options(adverse=adverse)
    got, result = run(body, np.zeros(1, np.uint32), np.empty(64, np.uint32), block=64, options=options)
    assert result.reports == []
    assert got.reshape(2, 32).min(axis=1).tolist() == got.reshape(2, 32).max(axis=1).tolist() == failures


def test_deadlock_names_barrier_phase_and_threads() -> None:
    body = """
      mov.u32 %bar, s; setp.ne.u32 %P, %t, 0; @%P bra wait;
      mbarrier.init.shared::cta.b64 [%bar], 2; mbarrier.arrive.shared::cta.b64 _, [%bar];
    wait: bar.warp.sync -1;
    again: mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0; @!%P bra again;"""
    _, result = run(body, np.zeros(1), np.empty(0), check_outputs=False)
    (report,) = result.reports
    assert (
        "32 threads (0-31) wait at the mbarrier at shared offset 0, whose phase 0 lacks 1 of 2 arrivals"
        in report.message
    )


def test_a_deadlock_names_bytes_that_nobody_expected() -> None:
    body = """
      mov.u32 %bar, s; mbarrier.init.shared::cta.b64 [%bar], 1;
      mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 32;
      mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%bar], 48;
    again: mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0; @!%P bra again;"""
    _, result = run(body, np.zeros(1), np.empty(0), block=1, check_outputs=False)
    (report,) = result.reports
    assert "phase 0 lacks 0 of 1 arrivals, and has 16 bytes more than expect_tx named" in report.message


def test_uninitialised_and_overfull_mbarriers() -> None:
    _, result = run("mbarrier.arrive.shared::cta.b64 _, [%s];", np.zeros(1), np.empty(0), check_outputs=False)
    assert [r.kind for r in result.reports] == ["mbarrier"]
    body = "mbarrier.init.shared::cta.b64 [%s], 2; bar.warp.sync -1; mbarrier.arrive.shared::cta.b64 _, [%s], 3;"
    _, result = run(body, np.zeros(1), np.empty(0), block=1, check_outputs=False)
    assert "expects 2 more of 2" in result.reports[0].message


def test_initialisation_must_be_visible() -> None:
    body = """setp.ne.u32 %P, %t, 0; @!%P mbarrier.init.shared::cta.b64 [%s], 64; BARRIER
      mbarrier.arrive.shared::cta.b64 _, [%s];"""
    for barrier, count in (("bar.sync 0;", 0), ("", 1)):
        _, result = run(body.replace("BARRIER", barrier), np.zeros(1), np.empty(0), block=64, check_outputs=False)
        assert len(result.reports) == count, result.reports


def test_cp_async_mbarrier_arrive() -> None:
    body = """
      mov.u32 %bar, s; setp.eq.u32 %P, %t, 0; @%P mbarrier.init.shared::cta.b64 [%bar], 32; bar.sync 0;
      shl.b32 %u, %t, 4; cvt.u64.u32 %g, %u; add.u64 %g, %g, %p; add.u32 %v, %u, %s; add.u32 %v, %v, 1024;
      cp.async.cg.shared.global [%v], [%g], 16;
      cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%bar];
    again: WAIT
      xor.b32 %u, %u, 16; add.u32 %v, %u, %s; ld.shared.v4.u32 {%x0, %x1, %x2, %x3}, [%v+1024];
      cvt.u64.u32 %g, %u; add.u64 %g, %g, %q; st.global.v4.u32 [%g], {%x0, %x1, %x2, %x3};"""
    wait = "mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0; @!%P bra again;"
    x = np.arange(128, dtype=np.uint32)
    got, result = run(body.replace("WAIT", wait), x, np.empty(128, np.uint32))
    assert result.reports == []
    assert (got == x).all()
    _, result = run(body.replace("WAIT", ""), x, np.empty(128, np.uint32))
    assert {r.kind for r in result.reports} == {"in-flight"}


# --- bulk copies ---


def tensor_map(
    buffer: Any, dims: tuple[int, ...], pitches: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> bytes:
    return TensorMap(6, buffer.address, dims, pitches, box, (1,) * len(dims), 0, swizzle, 0, 0).encode()


def load_kernel(rank: int, nbytes: int) -> str:
    coordinates = ", ".join(f"%a{i}" for i in range(rank))
    reads = " ".join(f"ld.param.u32 %a{i}, [c{i}];" for i in range(rank))
    params = ".param .align 64 .b8 map[128], .param .u64 y, " + ", ".join(f".param .u32 c{i}" for i in range(rank))
    return (
        HEAD
        + f""".visible .entry k({params}) {{ {REGISTERS}
      ld.param.u64 %q, [y]; {reads} add.u32 %bar, %s, {nbytes};
      mov.b64 %d0, map; cvta.param.u64 %d1, %d0;
      setp.ne.u32 %P, %t, 0; @%P bra over;
      prefetch.tensormap [%d1];
      mbarrier.init.shared::cta.b64 [%bar], 1; fence.mbarrier_init.release.cluster;
      mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {nbytes};
      cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint
        [%s], [%d1, {{{coordinates}}}], [%bar], 0;
    over: bar.warp.sync -1;
    again: mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0; @!%P bra again;
      mov.u32 %u, %t;
    more: mad.lo.u32 %v, %u, 4, %s; ld.shared.u32 %w, [%v]; mad.wide.u32 %g, %u, 4, %q; st.global.u32 [%g], %w;
      add.u32 %u, %u, 32; setp.lt.u32 %P, %u, {nbytes // 4}; @%P bra more;
      ret; }}"""
    )


LOADS = [
    ((37,), (64,), (24,), 0), ((64, 20), (64, 8), (0, 0), 3), ((72, 20), (64, 8), (64, 16), 3),
    ((72, 20), (32, 8), (-8, -3), 2), ((40, 9), (16, 16), (33, -2), 1), ((24, 6, 5), (8, 4, 3), (20, 4, -1), 0),
    ((64, 6, 5), (64, 4, 3), (3, 4, 3), 3),
]  # fmt: skip


@pytest.mark.parametrize(("dims", "box", "at", "swizzle"), LOADS)
def test_tensor_load(dims: tuple[int, ...], box: tuple[int, ...], at: tuple[int, ...], swizzle: int) -> None:
    # Rows are padded, so that what lies outside of the tensor is not zero.
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
        linear = int(np.ravel_multi_index(index, box[::-1])) * 2
        linear ^= ((linear >> 7) % (span // 16)) << 4
        assert got[linear // 2] == (x[tuple(place)] if inside else 0)


@pytest.mark.parametrize("reduce", [False, True])
def test_tensor_store(reduce: bool) -> None:
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
    want = start.copy()
    want[6:10, 0:20] = np.arange(8, 28) + (7 if reduce else 0)
    np.testing.assert_array_equal(y.download(), want)


@pytest.mark.parametrize(("op", "start", "kinds"), [
    ("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile", 7, []),
    ("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile", None, ["uninitialised-global"]),
    ("cp.async.bulk.tensor.2d.global.shared::cta", 7, ["global-race"]),
])  # fmt: skip
def test_reductions_of_several_ctas_are_atomic(op: str, start: int | None, kinds: list[str]) -> None:
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
        np.testing.assert_array_equal(y.download().reshape(-1), 7 + 2 * np.arange(32) + 1)


def test_runs_of_bytes() -> None:
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
    got, result = run(body, x, np.empty(128, np.uint32), options=Options(counters=True))
    assert result.reports == []
    assert (got == x).all()
    assert result.counters is not None
    assert result.counters.summary()["bulk"] == {
        "boxes": 1, "load_bytes": 512, "delivered_bytes": 512, "store_bytes": 0,
    }  # fmt: skip
    _, result = run(body.replace("cp.async.bulk.wait_group.read 0;", ""), x, np.empty(128, np.uint32))
    assert "wait_group.read is missing" in result.reports[0].message
    _, result = run(body.replace("fence.proxy.async;", ""), x, np.empty(128, np.uint32))
    assert "whose initialisation no" in result.reports[0].message


# --- clusters ---


@pytest.mark.parametrize("cluster", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)])
def test_special_registers(cluster: tuple[int, int, int]) -> None:
    grid = (4, 2, 2)
    bases = ("ctaid", "cluster_ctaid", "clusterid", "nclusterid", "cluster_nctaid")
    names = [f"%{base}{axis}" for base in bases for axis in (".x", ".y", ".z")]
    names += ["%cluster_ctarank", "%cluster_nctarank"]
    body = "mov.u32 %u, %ctaid.y; mov.u32 %v, %ctaid.z; mad.lo.u32 %u, %v, 2, %u; mov.u32 %v, %ctaid.x;"
    body += f" mad.lo.u32 %u, %u, 4, %v; mad.wide.u32 %g, %u, {4 * len(names)}, %q;"
    body += "".join(f" mov.u32 %w, {name}; st.global.u32 [%g+{4 * i}], %w;" for i, name in enumerate(names))
    body += " mapa.shared::cluster.u32 %w, %s, 0;"
    got, result = run(body, np.zeros(1), np.empty((16, len(names)), np.uint32), grid=grid, cluster=cluster, block=1)
    assert result.reports == []
    for row in got.tolist():
        id_, inside, cluster_id = row[:3], row[3:6], row[6:9]
        assert inside == [i % c for i, c in zip(id_, cluster, strict=True)]
        assert cluster_id == [i // c for i, c in zip(id_, cluster, strict=True)]
        assert row[9:12] == [g // c for g, c in zip(grid, cluster, strict=True)]
        assert tuple(row[12:15]) == cluster
        assert row[15:] == [inside[0] + cluster[0] * (inside[1] + cluster[1] * inside[2]), int(np.prod(cluster))]


EXCHANGE = """
  mov.u32 %n, %cluster_ctarank; mad.lo.u32 %u, %n, 32, %t; mad.lo.u32 %v, %t, 4, %s;
  st.shared.u32 [%v], %u;
  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
  xor.b32 %x0, %n, 1; mapa.shared::cluster.u32 %x1, %v, %x0;
  ld.shared::cluster.u32 %w, [%x1];
  mad.wide.u32 %g, %u, 4, %q; st.global.u32 [%g], %w;
  barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"""


def exchange(body: str, **settings: Any) -> tuple[np.ndarray, list[str]]:
    settings = {"grid": 2, "cluster": 2, "check_outputs": False, **settings}
    got, result = run(body, np.zeros(1, np.uint32), np.empty(64, np.uint32), **settings)
    return got, [f"{r.kind}: {r.message}" for r in result.reports]


def test_distributed_shared_memory() -> None:
    want = np.concatenate([np.arange(32, 64), np.arange(32)])
    got, reports = exchange(EXCHANGE)
    assert reports == []
    assert (got == want).all()
    first = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    _, reports = exchange(EXCHANGE.replace(first, ""))
    assert any("before a cluster barrier says that it has started" in r for r in reports)
    assert any("uninitialised" in r or "race" in r for r in reports)
    # An arrival without release starts the CTA, but orders nothing.
    _, reports = exchange(EXCHANGE.replace("arrive.aligned", "arrive.relaxed.aligned"))
    assert [r.split(":")[0] for r in reports] == ["shared-race"]
    last = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    _, reports = exchange(EXCHANGE.replace(last, ""))
    assert any("this CTA may exit before" in r or "which has exited" in r for r in reports)


def test_generic_addresses_and_atomics_of_peers() -> None:
    body = EXCHANGE.replace("mapa.shared::cluster.u32 %x1, %v, %x0;", """
      cvt.u64.u32 %d0, %v; cvta.shared.u64 %d0, %d0; mapa.u64 %d1, %d0, %x0;
      cvta.to.shared.u64 %d2, %d1; cvt.u32.u64 %x1, %d2; atom.shared::cluster.add.u32 %x2, [%x1], 100;
      barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;""")  # fmt: skip
    body = body.replace("ld.shared::cluster.u32 %w, [%x1];", "ld.u32 %w, [%d1];")
    got, reports = exchange(body)
    assert reports == []
    assert (got == np.concatenate([np.arange(32, 64), np.arange(32)]) + 100).all()


ASYNC_STORE = """
  add.u32 %bar, %s, 1024; mov.u32 %n, %cluster_ctarank; xor.b32 %x0, %n, 1; mad.lo.u32 %v, %t, 4, %s;
  setp.ne.u32 %P, %t, 0; @%P bra ready;
  mbarrier.init.shared::cta.b64 [%bar], 1; fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 128;
ready:
  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
  mapa.shared::cluster.u32 %x1, %v, %x0; mapa.shared::cluster.u32 %x2, %bar, %x0; mad.lo.u32 %u, %n, 32, %t;
  st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%x1], %u, [%x2];
again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %P, [%bar], 0; @!%P bra again;
  xor.b32 %v, %v, 4; ld.shared.u32 %w, [%v];
  xor.b32 %u, %u, 1; mad.wide.u32 %g, %u, 4, %q; st.global.u32 [%g], %w;"""


def test_async_stores_to_a_peer() -> None:
    got, reports = exchange(ASYNC_STORE)
    assert reports == []
    assert (got == np.concatenate([np.arange(32, 64), np.arange(32)])).all()
    _, reports = exchange(ASYNC_STORE.replace("[%bar], 128", "[%bar], 124"))
    assert reports
    _, reports = exchange(
        ASYNC_STORE.replace(
            "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %P, [%bar], 0; @!%P bra again;", ""
        )
    )
    assert any("in-flight" in r for r in reports)


def test_remote_arrivals_and_copies() -> None:
    body = """
      add.u32 %bar, %s, 1024; mov.u32 %n, %cluster_ctarank; xor.b32 %x0, %n, 1;
      mad.lo.u32 %u, %n, 32, %t; mad.lo.u32 %v, %t, 4, %s; st.shared.u32 [%v], %u; fence.proxy.async;
      setp.ne.u32 %P, %t, 0; @%P bra ready;
      mbarrier.init.shared::cta.b64 [%bar], 2; fence.mbarrier_init.release.cluster;
      mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 128;
    ready:
      barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
      @%P bra again;
      add.u32 %x1, %s, 512; mapa.shared::cluster.u32 %x1, %x1, %x0; mapa.shared::cluster.u32 %x2, %bar, %x0;
      cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%x1], [%s], 128, [%x2];
      mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%x2];
    again: mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0; @!%P bra again;
      ld.shared.u32 %w, [%v+512]; mad.wide.u32 %g, %u, 4, %q; st.global.u32 [%g], %w;
      barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    got, reports = exchange(body)
    assert reports == []
    assert (got == np.concatenate([np.arange(32, 64), np.arange(32)])).all()


def test_cluster_barrier_counts_threads_that_have_exited() -> None:
    body = """setp.gt.u32 %P, %t, 7; @%P bra out; barrier.cluster.arrive; barrier.cluster.wait; out:"""
    assert exchange(body)[1] == []


# --- warps ---


def test_elect() -> None:
    body = (
        """elect.sync %u|%P, -1; selp.u32 %v, 1, 0, %P; mad.wide.u32 %g, %t, 8, %q; st.global.v2.u32 [%g], {%u, %v};"""
    )
    got, result = run(body, np.zeros(1), np.empty((64, 2), np.uint32), block=64)
    assert result.reports == []
    assert got[:, 0].tolist() == [0] * 64
    assert np.flatnonzero(got[:, 1]).tolist() == [0, 32]


def test_named_barriers_of_a_block_that_is_no_multiple_of_128() -> None:
    # Warps 0 to 3 and warp 8 meet at barrier 1; the others at barrier 2, where warp 8 only arrives.
    body = """
      mad.lo.u32 %v, %t, 4, %s; st.shared.u32 [%v], %t;
      setp.lt.u32 %P, %t, 128; @%P bra first; setp.ge.u32 %P, %t, 256; @%P bra last;
      bar.sync 2, 160; mov.u32 %u, 256; bra read;
    last: bar.arrive 2, 160; bar.sync 1, 160; mov.u32 %u, 0; bra read;
    first: barrier.sync 1, 160; mov.u32 %u, 256;
    read: and.b32 %w, %t, 31; add.u32 %u, %u, %w; mad.lo.u32 %v, %u, 4, %s; ld.shared.u32 %w, [%v];
      mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %w;"""
    got, result = run(body, np.zeros(1), np.empty(288, np.uint32), block=288)
    assert result.reports == []
    assert got.tolist() == [256 + t % 32 if t < 256 else t % 32 for t in range(288)]
    _, result = run(body.replace("bar.arrive 2, 160;", ""), np.zeros(1), np.empty(288, np.uint32), block=288)
    assert result.reports[0].kind == "barrier-divergence"


@pytest.mark.parametrize(("threads", "dec", "inc", "kinds"), [
    (384, 40, 232, []), (384, 24, 240, []), (384, 40, 240, ["registers"]), (384, 44, 200, ["registers"]),
    (384, 16, 200, ["registers"]),
    # ptxas 13.0 reports 168 registers for 384 threads, less where all numbers are less; 248 for 256 threads.
    (384, 40, 160, []), (384, 176, 200, ["registers"] * 2), (256, 48, 248, []), (256, 40, 232, []), (512, 24, 152, []),
])  # fmt: skip
def test_register_pool(threads: int, dec: int, inc: int, kinds: list[str]) -> None:
    text = entry(f"""setp.ge.u32 %P, %t, 128; @%P bra more; setmaxnreg.dec.sync.aligned.u32 {dec}; bra out;
      more: setmaxnreg.inc.sync.aligned.u32 {inc}; out:""", ".param .u32 z")  # fmt: skip
    text = text.replace("(.param .u32 z)", f"(.param .u32 z) .maxntid {threads}, 1, 1 .minnctapersm 1")
    result = launch(text, [0], Memory(), block=threads)
    assert [r.kind for r in result.reports] == kinds


def test_set_of_registers_by_a_part_of_a_warpgroup() -> None:
    text = entry("setp.gt.u32 %P, %t, 63; @%P bra out; setmaxnreg.dec.sync.aligned.u32 40; out:", ".param .u32 z")
    result = launch(text, [0], Memory(), block=128)
    assert "executed by 2 of 4 warps" in result.reports[0].message


# --- programmatic dependent launch ---


@pytest.mark.parametrize("overlapping", [False, True])
def test_grid_dependency(overlapping: bool) -> None:
    good = """griddepcontrol.wait; griddepcontrol.launch_dependents;
      mad.wide.u32 %g, %t, 4, %p; ld.global.u32 %u, [%g]; mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %u;"""
    x = np.arange(32, dtype=np.uint32)
    assert run(good, x, np.empty(32, np.uint32), overlapping=overlapping)[1].reports == []
    bad = good.replace("griddepcontrol.wait;", "")
    kinds = [r.kind for r in run(bad, x, np.empty(32, np.uint32), overlapping=overlapping)[1].reports]
    assert kinds == (["grid-dependency"] * 2 if overlapping else [])
    # One warp waits, a barrier tells the others.
    single_wait = good.replace(
        "griddepcontrol.wait;", "setp.gt.u32 %P, %t, 31; @%P bra j; griddepcontrol.wait; j: bar.sync 0;"
    )
    x = np.arange(64, dtype=np.uint32)
    assert run(single_wait, x, np.empty(64, np.uint32), overlapping=overlapping, block=64)[1].reports == []


# --- what the asynchronous proxy needs ---


def test_accumulators_in_flight_and_fences() -> None:
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
        # Whoever issues the access may fence after the barrier.
        ("fence.proxy.async.shared::cta; bar.sync 0;", "bar.sync 0; fence.proxy.async;", ""),
    ):
        assert old in text
        result = launch(text.replace(old, new), [x, c, y, c, 0], memory, block=128, check_outputs=False)
        assert {r.kind for r in result.reports} == ({kind} if kind else set()), (old, new)


@pytest.mark.parametrize(
    ("waits", "unwaited"),
    [
        ("setp.lt.u32 %Q, %t, 96; @%Q wgmma.wait_group.sync.aligned 0;", range(96, 128)),
        ("setp.gt.u32 %Q, %t, 31; @%Q wgmma.wait_group.sync.aligned 0;", range(32)),
        # Every warp waits, in one branch or in the other.
        ("@%Q bra own; wgmma.wait_group.sync.aligned 0; bra both; own: wgmma.wait_group.sync.aligned 0; both:", ()),
        # A warp that does not wait, and does not read either.
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


def test_bulk_copy_over_what_threads_wrote() -> None:
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
        _, result = run(body.replace("FIRST", first).replace("FENCE", fence), x, np.empty(1, np.uint32))
        assert [r.kind for r in result.reports] == kinds


def test_a_whole_warp_that_stores_one_box_stores_it_once() -> None:
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
    memory = Memory()
    x = memory.upload(np.zeros((8, 64), np.float16))
    y = memory.upload(np.empty(512, np.uint16), "output")
    none = launch(load_kernel(2, 1024), [bytes(128), y, 0, 0], memory, check_outputs=False)
    assert [r.kind for r in none.reports] == ["tensor-map", "deadlock"]
    far = launch(load_kernel(2, 1024), [tensor_map(x, (64, 9), (128,), (64, 8), 3), y, 0, 5], memory)
    assert [r.kind for r in far.reports] == ["global-out-of-bounds"]
    near = launch(load_kernel(2, 1024), [tensor_map(x, (64, 9), (128,), (64, 8), 3), y, 0, 0], memory)
    assert near.reports == []


def test_misplaced_destinations() -> None:
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


def test_ranks_outside_the_cluster() -> None:
    _, reports = exchange(EXCHANGE.replace("xor.b32 %x0, %n, 1;", "add.u32 %x0, %n, 1;"))
    assert any("names CTA 2 of a cluster of 2" in r for r in reports)


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


def test_clusters_of_a_block_that_is_no_multiple_of_128() -> None:
    body = EXCHANGE.replace("mad.lo.u32 %u, %n, 32, %t;", "mad.lo.u32 %u, %n, 160, %t;")
    got, result = run(body, np.zeros(1), np.empty(320, np.uint32), grid=2, cluster=2, block=160)
    assert result.reports == []
    assert (got == np.concatenate([np.arange(160, 320), np.arange(160)])).all()


def test_fences_of_tensor_maps_are_accepted() -> None:
    body = """
      fence.proxy.tensormap::generic.release.gpu; fence.proxy.tensormap::generic.acquire.gpu [%p], 128;
      fence.proxy.async.global; fence.proxy.alias; fence.acq_rel.cluster; nanosleep.u32 20; mov.u64 %g, %globaltimer;
      createpolicy.fractional.L2::evict_first.b64 %d0, 1.0; prefetch.global.L2 [%p];
      mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %t;"""
    got, result = run(body, np.zeros(64, np.uint32), np.empty(32, np.uint32))
    assert result.reports == []
    assert got.tolist() == list(range(32))


def test_polling_lets_the_others_run() -> None:
    body = """
      setp.eq.u32 %P, %t, 0; @%P mbarrier.init.shared::cta.b64 [%s], 32; bar.sync 0;
      setp.gt.u32 %P, %t, 31; @%P bra last;
    again: mbarrier.test_wait.parity.shared::cta.b64 %Q, [%s], 0; @!%Q bra again;
      bra out;
    last: ARRIVE
    out: mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %t;"""
    arrive = "mbarrier.arrive.shared::cta.b64 _, [%s];"
    got, result = run(body.replace("ARRIVE", arrive), np.zeros(1), np.empty(64, np.uint32), block=64)
    assert result.reports == []
    assert got.tolist() == list(range(64))
    _, result = run(body.replace("ARRIVE", ""), np.zeros(1), np.empty(64, np.uint32), block=64, check_outputs=False)
    assert [r.kind for r in result.reports] == ["deadlock"]


def test_threads_that_read_what_a_bulk_copy_brings() -> None:
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
    got, result = run(body.replace("WAIT", wait), x, np.empty((64, 4), np.uint32), block=64)
    assert result.reports == []
    assert got[1].view(np.uint16).tolist() == [2, 3, 66, 67, 130, 131, 194, 195]
    # One warp waits, the other does not: the data is there, but not for it.
    half = "setp.gt.u32 %E, %t, 31; @%E bra over; WAIT over:".replace("WAIT", wait)
    _, result = run(body.replace("WAIT", half), x, np.empty((64, 4), np.uint32), block=64)
    assert [r.kind for r in result.reports] == ["shared-race"]
    _, result = run(body.replace("WAIT", ""), x, np.empty((64, 4), np.uint32), block=64)
    assert {r.kind for r in result.reports} == {"in-flight"}


def test_a_dropped_arrival_is_not_expected_in_the_next_phase() -> None:
    """Two arrivals complete the first phase; one of them was a drop, so one arrival completes the second."""
    body = """
      setp.eq.u32 %P, %t, 0; setp.eq.u32 %Q, %t, 1;
      @%P mbarrier.init.shared::cta.b64 [%s], 2;
      bar.sync 0;
      @%P mbarrier.arrive_drop.shared::cta.b64 %d0, [%s];
      bar.warp.sync -1;
      @%Q mbarrier.arrive.shared::cta.b64 %d1, [%s];
      bar.warp.sync -1;
      mbarrier.test_wait.parity.shared::cta.b64 %E, [%s], 0; selp.u32 %a0, 1, 0, %E;
      mbarrier.test_wait.parity.shared::cta.b64 %E, [%s], 1; selp.u32 %a1, 2, 0, %E;
      @%Q mbarrier.arrive.shared::cta.b64 %d1, [%s];
      bar.warp.sync -1;
      mbarrier.test_wait.parity.shared::cta.b64 %E, [%s], 1; selp.u32 %a2, 4, 0, %E;
      add.u32 %a0, %a0, %a1; add.u32 %a0, %a0, %a2;
      mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %a0;
    """
    phases, result = run(body, np.zeros(1, np.uint32), np.empty(32, np.uint32))
    assert result.reports == []
    assert (phases == 1 + 4).all()


# A map of 24 rows of 64 fp16 in boxes of 8 rows, made in shared memory at 2048, published at %q, and loaded by.
EDITS = """
      add.u32 %v, %s, 2048; shl.b32 %u, %t, 2; add.u32 %u, %u, %v; st.shared.u32 [%u], 0; bar.warp.sync -1;
      setp.ne.u32 %P, %t, 0; @%P bra edited;
      tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%v], %p;
      tensormap.replace.tile.rank.shared::cta.b1024.b32 [%v], 1;
      tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%v], 0, 64;
      tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%v], 1, 8;
      tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%v], 0, 64;
      tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%v], 1, 24;
      STRIDE
      tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%v], 0, 1;
      tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%v], 1, 1;
      tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%v], TYPE;
      tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%v], 0;
    edited: bar.warp.sync -1;
      tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%q], [%v], 128;
      fence.proxy.tensormap::generic.acquire.gpu [%q], 128;
      add.u32 %bar, %s, 4096; @%P bra over;
      mbarrier.init.shared::cta.b64 [%bar], 1; fence.mbarrier_init.release.cluster;
      mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 1024;
      cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%q, {0, 8}], [%bar];
    over: bar.warp.sync -1;
    again: mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0; @!%P bra again;
      mov.u32 %u, %t;
    more: mad.lo.u32 %v, %u, 4, %s; ld.shared.u32 %w, [%v]; mad.wide.u32 %g, %u, 4, %q; st.global.u32 [%g+128], %w;
      add.u32 %u, %u, 32; setp.lt.u32 %P, %u, 256; @%P bra more;"""
STRIDE = "mov.b64 %d0, 128; tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%v], 0, %d0;"


def edited(stride: str = STRIDE, kind: int = 6, text: str = EDITS, **settings: Any) -> tuple[np.ndarray, LaunchResult]:
    x = np.arange(24 * 64, dtype=np.uint16).reshape(24, 64)
    body = text.replace("STRIDE", stride).replace("TYPE", str(kind))
    return run(body, x, np.empty(64 + 512, np.uint16), check_outputs=False, **settings)


@pytest.mark.parametrize("kind", [6, 10])  # fp16; bf16, which the host counts as 9
def test_tensor_maps_made_by_a_kernel(kind: int) -> None:
    written, result = edited(kind=kind)
    assert result.reports == []
    assert (written[64:] == np.arange(8 * 64, 16 * 64)).all()


def test_tensor_maps_that_a_kernel_makes_wrongly() -> None:
    _, result = edited(stride=STRIDE.replace("128;", "120;"))
    (report, *_) = [report for report in result.reports if report.kind == "tensor-map"]
    assert "stride of 120 bytes" in report.message
    assert "tensor-map" in {report.kind for report in edited(kind=13)[1].reports}


ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%q], 128;"
PUBLISH = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%q], [%v], 128;"
COPY = "ld.shared.u32 %w, [%u]; mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %w; {} bar.warp.sync -1;"
RELEASE = "fence.proxy.tensormap::generic.release.gpu;"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (ACQUIRE, "", "generic.acquire"),
        (ACQUIRE, ACQUIRE.replace("[%q]", "[%q+128]"), "generic.acquire"),
        # Before the map is written, it says nothing about what is written.
        (f"{PUBLISH}\n      {ACQUIRE}", f"{ACQUIRE} {PUBLISH}", "generic.acquire"),
        (ACQUIRE, "fence.proxy.async.global; fence.acq_rel.gpu;", "generic.acquire"),
        # Of one CTA, the smallest scope suffices.
        (ACQUIRE, ACQUIRE.replace("gpu", "cta"), ""),
        # A copy by threads has no release.
        (PUBLISH, COPY.format(""), "release of its writer"),
        (PUBLISH, COPY.format(RELEASE), ""),
    ],
)
def test_fences_of_tensor_maps_that_a_kernel_makes(old: str, new: str, words: str) -> None:
    text = EDITS.replace(old, new)
    assert text != EDITS
    _, result = edited(text=text)
    assert [r.kind for r in result.reports] == ["tensor-map-fence"] * bool(words)
    assert all(words in r.message for r in result.reports)


# Warp 0 makes the map, warp 1 uses it; between them stands what BETWEEN is, and warp 0 reads what has come.
TWO_WARPS = (
    EDITS.replace("shl.b32 %u, %t, 2;", "setp.gt.u32 %Q, %t, 31; @%Q bra made; shl.b32 %u, %t, 2;")
    .replace(ACQUIRE, "FIRST made: BETWEEN setp.ne.u32 %P, %t, 32;")
    .replace("add.u32 %bar, %s, 4096; @%P bra over;", "add.u32 %bar, %s, 4096; @%P bra over; SECOND")
    .replace("over: bar.warp.sync -1;", "over: bar.sync 0; @%Q bra out;")
    + " out:"
)


@pytest.mark.parametrize(
    ("first", "between", "second", "kinds"),
    [
        ("", "bar.sync 0;", ACQUIRE, set()),
        # A fence of another warp counts where a barrier orders it before.
        (ACQUIRE, "bar.sync 0;", "", set()),
        ("", "bar.sync 0;", "", {"tensor-map-fence"}),
    ],
)
def test_a_tensor_map_that_another_warp_makes(first: str, between: str, second: str, kinds: set[str]) -> None:
    text = TWO_WARPS.replace("FIRST", first).replace("BETWEEN", between).replace("SECOND", second)
    written, result = edited(text=text, block=64)
    assert {r.kind for r in result.reports} == kinds
    assert (written[64:] == np.arange(8 * 64, 16 * 64)).all()


def test_a_tensor_map_that_another_cta_makes() -> None:
    """CTA 0 makes the map and raises a flag, CTA 1 waits for that and uses the map."""
    memory = Memory()
    x = memory.upload(np.arange(24 * 64, dtype=np.uint16).reshape(24, 64))
    for acquire, kinds in ((ACQUIRE, set()), (ACQUIRE.replace("gpu", "cluster"), {"tensor-map-fence"})):
        y = memory.upload(np.zeros(1024, np.uint16), "inout")
        make = EDITS[: EDITS.index(ACQUIRE)].replace("STRIDE", STRIDE).replace("TYPE", "6")
        use = EDITS[EDITS.index("add.u32 %bar") :]
        body = f"""
          mov.u32 %n, %ctaid.x; setp.ne.u32 %Q, %n, 0; @%Q bra wait; {make}
          setp.eq.u32 %P, %t, 0; @%P st.release.gpu.global.u32 [%q+2000], 1; bra out;
        wait: ld.acquire.gpu.global.u32 %w, [%q+2000]; setp.eq.u32 %P, %w, 0; @%P bra wait;
          {acquire} setp.ne.u32 %P, %t, 0; {use} out:"""
        result = launch(entry(body), [x, y], memory, grid=2)
        assert {r.kind for r in result.reports} == kinds
        assert (y.download()[64:576] == np.arange(8 * 64, 16 * 64)).all()
