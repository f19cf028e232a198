"""Proves tcgen05 (tensor memory, products and their order) against NumPy, and that faults in a kernel that uses it are
reported.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import Device, EmulatorError, LaunchResult, Memory, Options, PtxError, Severity, mutants
from kernelproof.emulator.blackwell.fragments import SHAPES
from kernelproof.emulator.hopper.tensor_map import TensorMap
from kernelproof.ground.chips import GPUS
from tests.kernelproof.emulator.build import compile_file

# The device of all launches.
B200 = Device.of(GPUS["b200"])
# The beginning and the end of a kernel that has 128 columns of tensor memory, at %base.
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
    """Launches a body between ``HEAD`` and ``TAIL``. Returns its output and the result of the launch."""
    memory = Memory()
    out = memory.upload(y, "output")
    settings = {"grid": 1, "block": 128, "shared_bytes": 1024, "device": B200, **settings}
    program = emulator.load(HEAD + body + TAIL)
    result = program.launch("k", args=[memory.upload(x), out], memory=memory, **settings)
    return out.download(), result


def registers(name: str, count: int) -> str:
    """A list of registers in PTX."""
    return "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"


def moves(count: int, op: str, name: str, base: str) -> str:
    """PTX that loads (``op`` ld) or stores (st) the registers NAME0, NAME1, ... of each thread. The words of a thread
    lie in a row, those of thread 0 at ``base``."""
    text = f" mad.wide.u32 %g, %t, {4 * count}, {base};"
    for i in range(count):
        at, register = f"[%g+{4 * i}]", f"%{name}{i}"
        text += f" ld.global.u32 {register}, {at};" if op == "ld" else f" st.global.u32 {at}, {register};"
    return text


# --- loads and stores


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("shape", ["32x32b", "16x64b", "16x128b", "16x256b"])
def test_what_is_stored_is_loaded_by_another_shape(shape: str, times: int) -> None:
    """Words go to the lanes and columns of the PTX manual's figures: they are written by a shape and read lane by
    lane."""
    count = SHAPES[shape][0] * times
    columns = SHAPES[shape][1] * times
    body = moves(count, "ld", "a", "%p")
    body += f" tcgen05.st.sync.aligned.{shape}.x{times}.b32 [%own], {registers('a', count)};"
    body += " tcgen05.wait::st.sync.aligned;"
    other = 1 << (columns - 1).bit_length()
    if shape != "32x32b":
        # A 16-lane shape does not reach the upper half of the lanes.
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


def test_a_warp_that_names_lanes_of_another_reaches_the_same_half_of_its_own() -> None:
    body = moves(4, "ld", "a", "%p")
    for half in (0, 0x100000):
        body += f" add.u32 %u, %own, {half}; tcgen05.st.sync.aligned.16x256b.x1.b32 [%u], {registers('a', 4)};"
        body += " tcgen05.wait::st.sync.aligned; add.u32 %a0, %a0, 1;"
    body += f" add.u32 %u, %base, 0x100000; tcgen05.ld.sync.aligned.16x256b.x1.b32 {registers('b', 4)}, [%u];"
    body += " tcgen05.wait::ld.sync.aligned;" + moves(4, "st", "b", "%q")
    x = np.arange(128 * 4, dtype=np.uint32).reshape(128, 4)
    got, result = launch(body, x, np.empty((128, 4), np.uint32))
    assert [r.kind for r in result.reports] == ["tensor-memory-bounds"]
    assert "lane 16 of tensor memory: warp 1 may touch lanes 32 to 63" in str(result.reports[0])
    assert np.array_equal(got, x + np.array([1, 0, 0, 0], np.uint32))


def test_lanes_outside_of_a_guard_keep_what_was_loaded() -> None:
    body = moves(1, "ld", "a", "%p")
    body += " tcgen05.st.sync.aligned.32x32b.x1.b32 [%own], {%a0}; tcgen05.wait::st.sync.aligned;"
    body += " tcgen05.ld.sync.aligned.32x32b.x1.b32 {%b0}, [%own]; tcgen05.wait::ld.sync.aligned;"
    body += " and.b32 %u, %t, 1; setp.eq.u32 %Q, %u, 0; @%Q mov.b32 %b0, 7;" + moves(1, "st", "b", "%q")
    x = np.arange(100, 228, dtype=np.uint32)
    got, result = launch(".reg .pred %Q;" + body, x, np.empty(128, np.uint32))
    assert result.reports == []
    assert np.array_equal(got, np.where(np.arange(128) % 2 == 0, 7, x))


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


def test_a_packed_load_gives_neighbours_of_a_row_as_mma_sync_has_them() -> None:
    """Of 16 rows and 8 columns of words, lane t gets the low halves of columns 2 (t % 4) and the next one, in rows t //
    4 and t // 4 + 8. This is CuTe's SM100_TMEM_LOAD_16dp128b1x_16b."""
    body = moves(8, "ld", "a", "%p") + f" tcgen05.st.sync.aligned.32x32b.x8.b32 [%own], {registers('a', 8)};"
    body += " tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.16x128b.x1.pack::16b.b32 {%b0, %b1}, [%own];"
    body += " tcgen05.wait::ld.sync.aligned;" + moves(2, "st", "b", "%q")
    words = np.random.default_rng(7).integers(0, 1 << 32, (4, 32, 8)).astype(np.uint32)
    got, result = launch(body, words, np.empty((4, 32, 2, 2), np.uint16))
    assert result.reports == []
    for t in range(32):
        for r in (0, 1):
            row = words[:, t // 4 + 8 * r, 2 * (t % 4) : 2 * (t % 4) + 2]
            assert np.array_equal(got[:, t, r], row.astype(np.uint16)), (t, r)


# --- products


@cache
def tile_text() -> str:
    """The PTX of a kernel with tcgen05 instructions."""
    return compile_file("tensor_memory", ".ptx", arch="sm_100a").read_text()


def form(m: int, n: int, kind: str = "f16", acc: str = "f32") -> int:
    """An instruction descriptor."""
    types = (kind == "bf16") * (1 << 7 | 1 << 10)
    return (acc == "f32") << 4 | types | n >> 3 << 17 | m >> 4 << 24


def tile(
    text: str, n: int = 64, repeats: int = 2, kind: str = "f16", acc: str = "f32", options: Options | None = None
) -> tuple[np.ndarray, np.ndarray, LaunchResult]:
    """Launches ``tile``; returns D, its expected value, and the result with findings."""
    rng = np.random.default_rng(n + repeats)
    a, b = (rng.integers(-2, 3, (rows, 64)).astype(np.float32) for rows in (128, n))
    raw = [(v.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else v.astype(np.float16) for v in (a, b)]
    memory = Memory()
    d = memory.upload(np.empty((128, n), np.float32), "output")
    arguments = [*(memory.upload(v) for v in raw), d, n, form(128, n, kind, acc), repeats]
    result = emulator.load(text).launch(
        "tile", grid=1, block=128, args=arguments, memory=memory, device=B200, options=options or Options()
    )
    got = d.download()
    if acc == "f16":
        got = got.view(np.uint16)[:, ::2].copy().view(np.float16).astype(np.float32)
    return got, repeats * (a @ b.T), result


@pytest.mark.parametrize("adverse", [False, True])
@pytest.mark.parametrize(
    ("n", "repeats", "kind", "acc"), [(64, 2, "f16", "f32"), (256, 1, "bf16", "f32"), (16, 3, "f16", "f16")]
)
def test_a_tile_is_exact_and_clean(n: int, repeats: int, kind: str, acc: str, adverse: bool) -> None:
    got, want, result = tile(tile_text(), n, repeats, kind, acc, Options(adverse=adverse))
    assert result.reports == []
    assert np.array_equal(got, want)


def pair(
    text: str, m: int = 256, n: int = 64, k: int = 256, options: Options | None = None
) -> tuple[np.ndarray, np.ndarray, LaunchResult]:
    """Launches ``pair``; returns D, its expected value, and the result with findings."""
    rng = np.random.default_rng(m + n + k)
    a, b = (rng.integers(-2, 3, (rows, k)).astype(np.float16) for rows in (m, n))
    memory = Memory()
    d = memory.upload(np.empty((m, n), np.float32), "output")
    maps = []
    for values in (a, b):
        at, rows = memory.upload(values).address, len(values)
        maps.append(TensorMap(6, at, (k, rows), (2 * k,), (64, rows // 2), (1, 1), 0, 3, 0, 0).encode())
    result = emulator.load(text).launch(
        "pair", grid=2, block=128, args=[*maps, d, m, n, k, form(m, n)], memory=memory, device=B200, cluster=2,
        shared_bytes=65536, options=options or Options(),
    )  # fmt: skip
    return d.download(), a.astype(np.float32) @ b.T.astype(np.float32), result


def test_products_of_a_pair_are_counted() -> None:
    counters = pair(tile_text(), 256, 64, 128, Options(counters=True))[2].counters
    assert counters is not None
    assert (counters.tcgen05, counters.tcgen05_flops) == (8, 2 * 256 * 64 * 128)


@pytest.mark.parametrize("adverse", [False, True])
@pytest.mark.parametrize(("m", "n"), [(256, 256), (256, 48), (128, 64)])
def test_a_pair_is_exact_and_clean(m: int, n: int, adverse: bool) -> None:
    got, want, result = pair(tile_text(), m, n, options=Options(adverse=adverse))
    assert [str(report) for report in result.reports] == []
    assert np.array_equal(got, want)


def first_finding(run: Callable[..., tuple[np.ndarray, np.ndarray, LaunchResult]], text: str) -> str:
    """The first thing that is noticed about a variant of a kernel."""
    for adverse in (False, True):
        try:
            got, want, result = run(text, options=Options(adverse=adverse, loop_limit=2000))
        except (EmulatorError, PtxError) as error:
            return str(error)
        for report in result.reports:
            if report.severity is not Severity.LINT:
                return report.kind
        if not np.array_equal(got, want):
            return "wrong values"
    return ""


def text_of_kernel(kernel: str) -> str:
    """The text of one kernel."""
    head, *entries = re.split(r"(?=\.visible \.entry)", tile_text())
    return head + next(entry for entry in entries if f".entry {kernel}(" in entry)


# For each (kind, instruction): how many mutants are not noticed, and why they are right.
EQUIVALENT = {
    ("swap", "fence.proxy.async.shared::cta"): (1, "after the barrier, the thread that issues the product fences"),
    ("drop", "tcgen05.fence::after_thread_sync"): (1, "nothing has touched tensor memory before the first product"),
    ("swap", "tcgen05.fence::after_thread_sync"): (2, "they swap it with address arithmetic"),
    ("swap", "tcgen05.wait::ld.sync.aligned"): (1, "it swaps it with address arithmetic"),
    ("drop", "tcgen05.fence::before_thread_sync"): (1, "tcgen05.dealloc needs no fence after a barrier"),
    ("swap", "tcgen05.fence::before_thread_sync"): (1, "tcgen05.dealloc needs no fence after a barrier"),
}


@pytest.mark.slow
def test_mutants_of_a_tile_are_noticed() -> None:
    text = text_of_kernel("tile")
    assert first_finding(tile, text) == ""
    chosen = [m for m in mutants(text) if "tcgen05" in m.name or "proxy" in m.name]
    assert {m.kind for m in chosen} >= {
        "drop", "fewer", "late", "step", "swizzle", "shape", "type", "keep", "group", "shift",
    }  # fmt: skip
    left = Counter((m.kind, m.name.split()[1]) for m in chosen if not first_finding(tile, m.text))
    assert left == {key: count for key, (count, _) in EQUIVALENT.items()}


# The same for a kernel of a pair of CTAs.
EQUIVALENT_IN_PAIRS = {
    ("narrow", "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64"): (
        1,
        "the arrival only permits the next load, it passes no data on",
    ),
    ("swap", "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"): (
        1,
        "it swaps it with arithmetic",
    ),
    ("swap", "tcgen05.fence::after_thread_sync"): (2, "they swap it with arithmetic"),
    ("drop", "tcgen05.fence::before_thread_sync"): (1, "tcgen05.dealloc needs no fence after a barrier"),
    ("swap", "tcgen05.fence::before_thread_sync"): (1, "tcgen05.dealloc needs no fence after a barrier"),
}


@pytest.mark.slow
def test_mutants_of_a_pair_are_noticed() -> None:
    text = text_of_kernel("pair")
    assert first_finding(pair, text) == ""
    chosen = [m for m in mutants(text) if re.search("tcgen05|bulk|cluster|mbarrier", m.name)]
    assert {m.kind for m in chosen} >= {"drop", "alone", "narrow", "skip", "parity", "bytes", "count"}
    left = Counter((m.kind, m.name.split()[1]) for m in chosen if not first_finding(pair, m.text))
    assert left == {key: count for key, (count, _) in EQUIVALENT_IN_PAIRS.items()}


# Instructions of the kernel, which tests replace.
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32"
RELINQUISH = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"


@pytest.mark.parametrize(
    ("old", "new", "rule", "words"),
    [
        (r", 256;(\s+// end inline asm\s+\.loc.*\s+// begin inline asm\s+tcgen05.rel)", r", 96;\1",
         "tensor-memory-allocation", "a power of two from 32 to 512"),
        (rf"({re.escape(ALLOC)} (\[%\w+\]), 256;)", rf"{RELINQUISH} \1",
         "tensor-memory-allocation", "after tcgen05.relinquish_alloc_permit"),
        (rf"({re.escape(ALLOC)} (\[%\w+\]), 256;)", rf"{ALLOC} \2, 32; \1",
         "tensor-memory-allocation", "256 columns after one of 32: sizes may not grow"),
        (rf"({re.escape(ALLOC)} (\[%\w+\]), 256;)", rf"\1 {ALLOC} \2, 256; {ALLOC} \2, 256;",
         "deadlock", "tcgen05.alloc of 256 columns of tensor memory, of which 0 are free"),
        (r"(dealloc\S+ %\w+), 256;", r"\1, 128;", "tensor-memory-allocation", "its alloc gave 256"),
        (r"tcgen05.dealloc.*;", "", "tensor-memory-allocation", "exits without tcgen05.dealloc of 256 columns"),
        (r"tcgen05.wait::ld.*;", "", "tensor-memory-registers", "no tcgen05.wait::ld of this warp follows"),
        (r"tcgen05.commit\S+ (\[%\w+\]);", r"mbarrier.arrive.shared::cta.b64 _, \1;",
         "tensor-memory-race", "no wait for an mbarrier on which its tcgen05.commit arrives"),
        (r"tcgen05.fence::after_thread_sync;", "",
         "tensor-memory-race", "no tcgen05.fence::after_thread_sync follows"),
        (r"setp.ne.u32 p, (%\w+), 0; tcgen05.mma", r"setp.ne.u32 p, 1, 0; tcgen05.mma",
         "uninitialised-tensor-memory", "which nobody has written"),
        (r"fence.proxy.async.shared::cta;", "", "proxy-fence", "tcgen05.mma reads what a thread wrote"),
        (r"elect.sync _\|e, -1;", "setp.ne.u32 e, 1, 0;", "tcgen05-issuer", "tcgen05.mma by 32 threads at once"),
        (r"tcgen05.commit.cta_group::1", "tcgen05.commit.cta_group::2", "tcgen05-group", "cta_group::2 in a kernel"),
        (r"(tcgen05.ld\S+ \{.*\}, \[)%\w+\]", r"\g<1>0]", "tensor-memory-bounds", "may touch lanes 32 to 63"),
        (r"(tcgen05.mma\S+) \[%\w+\]", r"\1 [0x100]", "tensor-memory-bounds", "which are not allocated"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_reported(old: str, new: str, rule: str, words: str) -> None:
    text, changes = re.subn(old, new, text_of_kernel("tile"))
    assert changes
    reports = tile(text, options=Options(loop_limit=2000))[2].reports
    assert any(report.kind == rule and words in report.message for report in reports), [str(r) for r in reports]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (1 << 2, "bits 0x4, which are zero"),
        (8 << 24, "M 0, N 64 with cta_group::1: M 64 or 128"),
        (1 << 17, "M 128, N 72 with cta_group::1: M 64 or 128, N a multiple of 16"),
        (1 << 7, "A is bf16 and B is f16"),
    ],
)
def test_a_descriptor_of_no_product_is_reported(change: int, words: str) -> None:
    memory = Memory()
    tiles = [memory.upload(np.zeros((rows, 64), np.float16)) for rows in (128, 64)]
    d = memory.upload(np.empty((128, 64), np.float32), "output")
    arguments = [*tiles, d, 64, form(128, 64) ^ change, 1]
    result = emulator.load(tile_text()).launch("tile", grid=1, block=128, args=arguments, memory=memory, device=B200)
    report = next(report for report in result.reports if report.kind == "tcgen05-descriptor")
    assert words in report.message


def test_an_operand_under_way_is_reported() -> None:
    """The issuer of products does not wait for TMA, or TMA does not wait for products that still read the stage."""
    text = text_of_kernel("pair")
    skipped = [m.text for m in mutants(text) if m.kind == "skip"]
    kinds = {report.kind for changed in skipped for report in pair(changed)[2].reports}
    assert {"in-flight", "tensor-memory-race"} <= kinds
    arrival = r"mbarrier.arrive.release.cluster.shared::cluster.b64 _, \1;"
    early = re.sub(r"tcgen05.commit\S+ (\[%\w+\]), %\w+;", arrival, text, count=1)
    races = [report for report in pair(early)[2].reports if report.kind == "shared-race"]
    assert any("a bulk copy starts: write after read" in report.message for report in races)


@pytest.mark.parametrize("adverse", [False, True])
@pytest.mark.parametrize("late", ["0", "1"])
def test_a_pair_gives_columns_back_after_the_accesses_of_both_ctas(late: str, adverse: bool) -> None:
    """This holds whichever CTA loads later. With barriers of each CTA alone, a CTA would free columns that the other
    one reads."""
    text = text_of_kernel("pair")
    head, last = text.rsplit("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", 1)
    delay = "{.reg .pred p; .reg .b32 r, i; mov.u32 r, %cluster_ctarank; setp.ne.u32 p, r, " + late + "; @p bra late;"
    delay += " mov.u32 i, 0; more: add.u32 i, i, 1; setp.lt.u32 p, i, 100; @p bra more; late:}"
    first, loads = head.rsplit("tcgen05.fence::after_thread_sync;", 1)
    reports = pair(f"{first}tcgen05.fence::after_thread_sync; {delay}{loads}bar.sync 0;{last}",
                   options=Options(adverse=adverse))[2].reports  # fmt: skip
    assert {report.kind for report in reports} == {"tensor-memory-race"}, [str(report) for report in reports]
    assert any("of the CTA's peer" in report.message for report in reports)


@pytest.mark.parametrize("column", [0, 63])
@pytest.mark.parametrize(("used", "freed"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("ordered", [False, True])
def test_columns_are_given_back_after_the_accesses_to_them_alone(
    column: int, used: int, freed: int, ordered: bool
) -> None:
    """Warp 2 stores to a column of one of two blocks, and warp 0 gives one back. Warp 0 knows by a flag that the store
    is over, but only a barrier orders it."""
    allocate = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32"
    free = "tcgen05.dealloc.cta_group::1.sync.aligned.b32"
    head = HEAD.replace(f"{allocate} [%s], 128;", f"{allocate} [%s], 64; {allocate} [%s+4], 64;")
    text = f"""{head}
      ld.shared.u32 %a0, [%s]; ld.shared.u32 %a1, [%s+4]; st.volatile.shared.u32 [%s+8], 0; bar.sync 0;
      sub.u32 %own, %own, %base; add.u32 %own, %own, %a{used};
      setp.eq.u32 %P, %t, 64; shr.u32 %u, %t, 5; setp.ne.u32 %Q, %u, 2; @%Q bra stored;
      tcgen05.st.sync.aligned.32x32b.x1.b32 [%own+{column}], {{%t}}; tcgen05.wait::st.sync.aligned;
      @%P st.volatile.shared.u32 [%s+8], 1;
    stored: {"bar.sync 0;" if ordered else ""}
      setp.lt.u32 %P, %t, 32; @!%P bra freed;
    again: ld.volatile.shared.u32 %u, [%s+8]; setp.eq.u32 %Q, %u, 0; @%Q bra again;
      {free} %a{freed}, 64;
    freed: bar.sync 0; @!%P bra end;
      {free} %a{1 - freed}, 64;
    end: ret; }}"""
    text = text.replace(".reg .pred %P;", ".reg .pred %P, %Q;")
    memory = Memory()
    arguments = [memory.upload(np.zeros(1, np.uint32)) for _ in range(2)]
    result = emulator.load(text).launch(
        "k", grid=1, block=128, args=arguments, memory=memory, shared_bytes=1024, device=B200
    )
    kinds = {report.kind for report in result.reports if report.kind.startswith("tensor")}
    assert kinds == ({"tensor-memory-race"} if used == freed and not ordered else set())


# --- cluster launch control


def claims(text: str, options: Options | None = None) -> tuple[np.ndarray, np.ndarray, LaunchResult]:
    """Launches 6 by 4 CTAs on 4 SMs; returns how often each CTA's work was done, how much each CTA did, and the
    result."""
    memory = Memory()
    times, done = (memory.upload(np.zeros(24, np.int32), "inout") for _ in range(2))
    device = replace(B200, sm_count=4)
    result = emulator.load(text).launch(
        "claims", grid=(6, 4), block=64, args=[times, done], memory=memory, device=device, options=options or Options()
    )
    return times.download(), done.download(), result


def test_running_ctas_do_the_work_of_those_that_have_not_started() -> None:
    times, done, result = claims(text_of_kernel("claims"))
    assert [str(report) for report in result.reports] == []
    assert (times == 1).all()
    assert (done[:4] > 0).all()
    assert not done[4:].any()


def test_work_is_done_once_though_requests_fail_at_random() -> None:
    times, done, result = claims(text_of_kernel("claims"), Options(adverse=True))
    assert [str(report) for report in result.reports] == []
    assert (times == 1).all()
    # CTAs whose request failed have made room for other CTAs, which started.
    assert 4 < np.count_nonzero(done) < 24


def test_misuse_of_requests_is_reported() -> None:
    text = text_of_kernel("claims")
    request = re.search(r"clusterlaunchcontrol.try_cancel[^;]*;", text)
    assert request is not None
    # A CTA sends one more request after a negative response, and nobody waits for it.
    again = text.replace("\tret;", f"\t{request[0]} ret;")
    reports = claims(again)[2].reports
    assert {report.kind for report in reports} >= {"cluster-launch-control", "in-flight"}
    short = text.replace("], 16;", "], 32;")
    assert any("0 of 1 arrivals and 16 bytes" in report.message for report in claims(short)[2].reports)


@pytest.mark.slow
def test_mutants_of_requests_are_noticed() -> None:
    def run_checked(text: str, options: Options) -> tuple[np.ndarray, np.ndarray, LaunchResult]:
        times, _, result = claims(text, options)
        return times, np.ones_like(times), result

    text = text_of_kernel("claims")
    # Without a guard, the coordinates after a negative response are undefined, but not used.
    chosen = [m for m in mutants(text) if "clusterlaunch" in m.name and m.kind != "unguard"]
    assert {m.kind for m in chosen} == {"drop", "always", "negate"}
    assert [m.name for m in chosen if not first_finding(run_checked, m.text)] == []


# --- layouts of operands

# A kernel that copies x to shared memory, where the descriptors a and b have the operands. It multiplies them twice;
# the second product is added, except in the lanes that off0 and off1 disable.
IMAGE = (
    HEAD.replace(
        ".visible .entry k(.param .u64 x, .param .u64 y)",
        ".visible .entry k(.param .u64 x, .param .u64 y,"
        " .param .u64 a, .param .u64 b, .param .u32 form, .param .u32 off0, .param .u32 off1)",
    )
    + """
  .reg .b64 %d<4>; .reg .b32 %f<4>, %bar, %i; .reg .pred %Q, %E;
  ld.param.u64 %d0, [a]; ld.param.u64 %d1, [b]; ld.param.u32 %f0, [form]; ld.param.u32 %f1, [off0];
  ld.param.u32 %f2, [off1];
  add.u32 %bar, %s, 64; mad.lo.u32 %u, %t, 16, %s; add.u32 %u, %u, 1024; mad.wide.u32 %g, %t, 16, %p;
  mov.u32 %i, 0;
copy:
  ld.global.v4.u32 {%a0, %a1, %a2, %a3}, [%g]; st.shared.v4.u32 [%u], {%a0, %a1, %a2, %a3};
  add.u64 %g, %g, 2048; add.u32 %u, %u, 2048; add.u32 %i, %i, 1; setp.lt.u32 %Q, %i, 32; @%Q bra copy;
  setp.eq.u32 %E, %t, 0;
  @%E mbarrier.init.shared::cta.b64 [%bar], 1;
  fence.proxy.async.shared::cta; bar.sync 0; tcgen05.fence::after_thread_sync;
  @!%E bra issued;
  add.u32 %u, %s, 1024; shr.u32 %u, %u, 4; cvt.u64.u32 %d2, %u;
  add.u64 %d0, %d0, %d2; add.u64 %d1, %d1, %d2; setp.ne.u32 %Q, 0, 0;
  tcgen05.mma.cta_group::1.kind::f16 [%base], %d0, %d1, %f0, %Q;
  setp.eq.u32 %Q, 0, 0;
  tcgen05.mma.cta_group::1.kind::f16 [%base], %d0, %d1, %f0, {%f1, %f2, 0, 0}, %Q, 2;
  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];
issued:
  mbarrier.try_wait.parity.shared::cta.b64 %Q, [%bar], 0; @!%Q bra issued;
  tcgen05.fence::after_thread_sync;
"""
)


def laid_out(values: np.ndarray, span: int, along: bool) -> tuple[np.ndarray, int, int]:
    """An operand (rows, 16) of halves as bytes in shared memory, and its leading and stride offsets. ``span``: bytes of
    a row of the swizzle pattern, 16 for none. ``along``: whether rows are contiguous."""
    rows = len(values)
    if span == 16:
        leading, stride = (256 * rows // 16, 128) if along else (128, 256)
    elif along:
        leading, stride = 16 * span, 8 * span
    else:
        leading, stride = 0, 8 * span
    out = np.zeros(32768, np.uint8)
    for r in range(rows):
        for k in range(16):
            if span == 16:
                inner, outer = (r, k) if along else (k, r)
                at = inner % 8 * 2 + outer % 8 * 16 + r // 8 * stride + k // 8 * leading
            elif along:
                at = r % (span // 2) * 2 + r // (span // 2) * leading + k % 8 * span + k // 8 * stride
            else:
                at = r % 8 * span + r // 8 * stride + 2 * k
            at ^= (at >> 7 & (span // 16 - 1)) << 4
            out[at : at + 2] = values[r, k : k + 1].view(np.uint8)
    return out, leading, stride


def descriptor(offset: int, leading: int, stride: int, span: int) -> int:
    """A descriptor of a matrix in shared memory, with offset and distances in bytes. ``span``: the bytes of its
    swizzle."""
    swizzle = {16: 0, 32: 6, 64: 4, 128: 2}[span]
    return offset >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | swizzle << 61


@pytest.mark.parametrize(("along_a", "along_b"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("span", "m"), [(16, 128), (32, 64), (64, 128), (128, 64), (128, 128)])
def test_operands_lie_as_their_descriptors_say(span: int, m: int, along_a: bool, along_b: bool) -> None:
    """The kernel computes a product, and adds a second one to a quarter of it (scale-input-d), except in disabled
    lanes."""
    rng = np.random.default_rng(span + m)
    a, b = (rng.integers(-3, 4, (rows, 16)).astype(np.float16) for rows in (m, 64))
    (raw_a, *offsets_a), (raw_b, *offsets_b) = laid_out(a, span, along_a), laid_out(b, span, along_b)
    descriptors = [
        descriptor(0, *offsets_a, span), descriptor(32768, *offsets_b, span),
    ]  # fmt: skip
    disabled = [0x0000FF01, 0x80000000]
    kind = form(m, 64) | along_a << 15 | along_b << 16
    body = "".join(
        f" add.u32 %u, %own, {c}; tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers('a', 8)}, [%u];"
        f" tcgen05.wait::ld.sync.aligned; mad.wide.u32 %g, %t, 256, %q;"
        + "".join(f" st.global.f32 [%g+{4 * (c + i)}], %a{i};" for i in range(8))
        for c in range(0, 64, 8)
    )
    memory = Memory()
    out = memory.upload(np.zeros((128, 64), np.float32), "inout")
    result = emulator.load(IMAGE + body + TAIL).launch(
        "k", grid=1, block=128, memory=memory, shared_bytes=1024 + 65536, device=B200,
        args=[memory.upload(np.concatenate([raw_a, raw_b])), out, *descriptors, kind, *disabled],
    )  # fmt: skip
    assert {report.kind for report in result.reports} <= ({"uninitialised-tensor-memory"} if m == 64 else set())
    lanes = np.arange(128) if m == 128 else np.arange(64) // 16 * 32 + np.arange(64) % 16
    words = np.array([*disabled, 0, 0], np.uint64)
    left = (words[lanes // 32] >> (lanes % 32).astype(np.uint64) & 1).astype(bool)
    product = a.astype(np.float32) @ b.astype(np.float32).T
    assert np.array_equal(out.download()[lanes], np.where(left[:, None], product, 1.25 * product))
