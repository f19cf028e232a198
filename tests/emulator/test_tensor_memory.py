"""tcgen05: tensor memory, products and their order, against NumPy; and mutants of a kernel that has all of it."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest

from cudal2gen import emulator
from cudal2gen.chips import GPUS
from cudal2gen.emulator import Device, EmulatorError, LaunchResult, Memory, Options, PtxError, Severity, mutants
from cudal2gen.emulator.blackwell.fragments import SHAPES
from tests.emulator.build import compiled

B200 = Device.of(GPUS["b200"])
HEAD = """
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 s[];
.visible .entry k(.param .u64 x, .param .u64 y) {
  .reg .b32 %t, %u, %base, %own, %s, %a<128>, %b<128>; .reg .b64 %p, %q, %g; .reg .pred %P;
  mov.u32 %t, %tid.x; mov.u32 %s, s; ld.param.u64 %p, [x]; ld.param.u64 %q, [y];
  setp.lt.u32 %P, %t, 32; @!%P bra ready;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%s], 128;
ready:
  bar.sync 0; ld.shared.u32 %base, [%s];
  and.b32 %own, %t, 0x60; shl.b32 %own, %own, 16; add.u32 %own, %own, %base;
"""
TAIL = """
  bar.sync 0; @!%P bra end;
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %base, 128;
end:
  ret;
}
"""


def launch(body: str, x: np.ndarray, y: np.ndarray, **settings: Any) -> tuple[np.ndarray, LaunchResult]:
    memory = Memory()
    out = memory.upload(y, "output")
    settings = {"grid": 1, "block": 128, "shared_bytes": 1024, "device": B200, **settings}
    program = emulator.load(HEAD + body + TAIL)
    result = program.launch("k", args=[memory.upload(x), out], memory=memory, **settings)
    return out.download(), result


def registers(name: str, count: int) -> str:
    return "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"


def moves(count: int, op: str, name: str, base: str) -> str:
    text = f" mad.wide.u32 %g, %t, {4 * count}, {base};"
    for i in range(count):
        at, register = f"[%g+{4 * i}]", f"%{name}{i}"
        text += f" ld.global.u32 {register}, {at};" if op == "ld" else f" st.global.u32 {at}, {register};"
    return text


# --- loads and stores


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("shape", ["32x32b", "16x64b", "16x128b", "16x256b"])
def test_what_is_stored_is_loaded_by_another_shape(shape: str, times: int) -> None:
    """Words go to the lanes and columns of the figures: written by a shape, read lane by lane."""
    count = SHAPES[shape][0] * times
    columns = SHAPES[shape][1] * times
    body = moves(count, "ld", "a", "%p")
    body += f" tcgen05.st.sync.aligned.{shape}.x{times}.b32 [%own], {registers('a', count)};"
    body += " tcgen05.wait::st.sync.aligned;"
    other = 1 << (columns - 1).bit_length()
    if shape != "32x32b":
        # The upper half of the lanes, which a 16-lane shape does not reach.
        body += f" add.u32 %u, %own, 0x100000; tcgen05.st.sync.aligned.{shape}.x{times}.b32 [%u], "
        body += f"{registers('a', count)}; tcgen05.wait::st.sync.aligned;"
    body += f" tcgen05.ld.sync.aligned.32x32b.x{other}.b32 {registers('b', other)}, [%own];"
    body += " tcgen05.wait::ld.sync.aligned;" + moves(other, "st", "b", "%q")
    x = np.random.default_rng(times).integers(0, 1 << 32, (4, 32, count)).astype(np.uint32)
    got, result = launch(body, x, np.empty((4, 32, other), np.uint32))
    assert result.reports == []
    want = np.zeros((4, 32, columns), np.uint32)
    for thread in range(32):
        for r in range(count):
            lane, column = {
                "32x32b": (thread, r),
                "16x64b": (thread // 4 + 8 * (thread & 1), 2 * r + (thread >> 1 & 1)),
                "16x128b": (thread // 4 + 8 * (r & 1), 4 * (r >> 1) + (thread & 3)),
                "16x256b": (thread // 4 + 8 * (r >> 1 & 1), 8 * (r >> 2) + 2 * (thread & 3) + (r & 1)),
            }[shape]
            want[:, lane, column] = x[:, thread, r]
    if shape != "32x32b":
        want[:, 16:] = want[:, :16]
    assert np.array_equal(got, want)


def test_halves_are_packed_and_unpacked() -> None:
    body = (
        moves(2, "ld", "a", "%p")
        + """
      tcgen05.st.sync.aligned.32x32b.x2.unpack::16b.b32 [%own], {%a0, %a1};
      tcgen05.wait::st.sync.aligned;
      tcgen05.ld.sync.aligned.32x32b.x4.b32 {%b0, %b1, %b2, %b3}, [%own];
      tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32 {%b4, %b5}, [%own];
      tcgen05.wait::ld.sync.aligned;"""
        + moves(6, "st", "b", "%q")
    )
    x = np.random.default_rng(5).integers(0, 1 << 16, (128, 4)).astype(np.uint16)
    got, result = launch(body, x, np.empty((128, 6), np.uint32))
    assert result.reports == []
    assert np.array_equal(got[:, :4], x)
    assert np.array_equal(got[:, 4:].copy().view(np.uint16), x)


# --- products


@cache
def tile_text() -> str:
    return compiled("tensor_memory", ".ptx", arch="sm_100a").read_text()


def form(m: int, n: int, kind: str = "f16", acc: str = "f32") -> int:
    """An instruction descriptor."""
    types = (kind == "bf16") * (1 << 7 | 1 << 10)
    return (acc == "f32") << 4 | types | n >> 3 << 17 | m >> 4 << 24


def tile(
    text: str, n: int = 64, turns: int = 2, kind: str = "f16", acc: str = "f32", options: Options | None = None
) -> tuple[np.ndarray, np.ndarray, LaunchResult]:
    """(D, what it should be, findings) of ``tile``."""
    rng = np.random.default_rng(n + turns)
    a, b = (rng.integers(-2, 3, (rows, 64)).astype(np.float32) for rows in (128, n))
    raw = [(v.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else v.astype(np.float16) for v in (a, b)]
    memory = Memory()
    d = memory.upload(np.empty((128, n), np.float32), "output")
    arguments = [*(memory.upload(v) for v in raw), d, n, form(128, n, kind, acc), turns]
    result = emulator.load(text).launch(
        "tile", grid=1, block=128, args=arguments, memory=memory, device=B200, options=options or Options()
    )
    got = d.download()
    if acc == "f16":
        got = got.view(np.uint16)[:, ::2].copy().view(np.float16).astype(np.float32)
    return got, turns * (a @ b.T), result


@pytest.mark.parametrize("adverse", [False, True])
@pytest.mark.parametrize(
    ("n", "turns", "kind", "acc"), [(64, 2, "f16", "f32"), (256, 1, "bf16", "f32"), (16, 3, "f16", "f16")]
)
def test_a_tile_is_exact_and_clean(n: int, turns: int, kind: str, acc: str, adverse: bool) -> None:
    got, want, result = tile(tile_text(), n, turns, kind, acc, Options(adverse=adverse))
    assert result.reports == []
    assert np.array_equal(got, want)


def finding(text: str) -> str:
    """The first thing that is noticed about a variant of the tile's kernel."""
    for adverse in (False, True):
        try:
            got, want, result = tile(text, options=Options(adverse=adverse, loop_limit=2000))
        except (EmulatorError, PtxError) as error:
            return str(error)
        for report in result.reports:
            if report.severity is not Severity.LINT:
                return report.kind
        if not np.array_equal(got, want):
            return "wrong values"
    return ""


# (kind, instruction) -> how many are not noticed, and why nothing is wrong.
EQUIVALENT = {
    ("swap", "fence.proxy.async.shared::cta"): (1, "behind the barrier, the thread that issues the product fences"),
    ("drop", "tcgen05.fence::after_thread_sync"): (1, "nothing has touched tensor memory before the first product"),
    ("swap", "tcgen05.fence::after_thread_sync"): (2, "with address arithmetic"),
    ("swap", "tcgen05.wait::ld.sync.aligned"): (1, "with address arithmetic"),
    ("drop", "tcgen05.fence::before_thread_sync"): (1, "tcgen05.dealloc needs no fence behind a barrier"),
    ("swap", "tcgen05.fence::before_thread_sync"): (1, "the same"),
}


def test_mutants_of_a_tile_are_noticed() -> None:
    assert finding(tile_text()) == ""
    chosen = [m for m in mutants(tile_text()) if "tcgen05" in m.name or "proxy" in m.name]
    assert {m.kind for m in chosen} >= {"drop", "fewer", "step", "swizzle", "shape", "type"}
    left = Counter((m.kind, m.name.split()[1]) for m in chosen if not finding(m.text))
    assert left == {key: count for key, (count, _) in EQUIVALENT.items()}
