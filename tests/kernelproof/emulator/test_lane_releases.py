"""Proves which accesses a release by some lanes of a warp covers.

It covers those of these lanes, and those of the other lanes before the warp last executed an instruction together.
"""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest

from kernelproof.emulator import Device, Options
from kernelproof.emulator.frontend.gathering import gather_places
from kernelproof.emulator.frontend.parser import parse
from kernelproof.emulator.frontend.ptx import Instr
from kernelproof.emulator.memory.shared_checks import SharedChecks
from kernelproof.ground.chips import GPUS
from tests.kernelproof.emulator import hopper_ptx
from tests.kernelproof.emulator.drawn_releases import THREADS, draw
from tests.kernelproof.emulator.hopper_ptx import run_body

# Runs a test in the usual and in the adverse order of events.
ADVERSE = pytest.mark.parametrize("adverse", [False, True])

# The ways in which lane 0 of warp 0 releases and warp 1 waits, each a pair of texts. %P is true in thread 0 alone.
# [%bar] is an mbarrier, [%bar+8] a flag in shared memory, and [%q+1024] one in global memory.
MBARRIER = (
    "@%P mbarrier.arrive.shared::cta.b64 _, [%bar];",
    "wait: mbarrier.try_wait.parity.shared::cta.b64 %Q, [%bar], 0; @!%Q bra wait;",
)
RELAXED = (
    "@%P fence.acq_rel.cta; @%P mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%bar];",
    "wait: mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %Q, [%bar], 0; @!%Q bra wait; fence.acq_rel.cta;",
)
STORE = (
    "@%P st.release.cta.shared.u32 [%bar+8], 1;",
    "wait: ld.acquire.cta.shared.u32 %v, [%bar+8]; setp.eq.u32 %Q, %v, 0; @%Q bra wait;",
)
FENCED = (
    "@%P fence.acq_rel.cta; @%P st.volatile.shared.u32 [%bar+8], 1;",
    "wait: ld.volatile.shared.u32 %v, [%bar+8]; setp.eq.u32 %Q, %v, 0; @%Q bra wait; fence.acq_rel.cta;",
)
ATOMIC = (
    "@%P red.release.cta.shared.add.u32 [%bar+8], 1;",
    "wait: ld.acquire.cta.shared.u32 %v, [%bar+8]; setp.eq.u32 %Q, %v, 0; @%Q bra wait;",
)
GLOBAL = (
    "@%P st.release.gpu.global.u32 [%q+1024], 1;",
    "wait: ld.acquire.gpu.global.u32 %v, [%q+1024]; setp.ne.u32 %Q, %v, 1; @%Q bra wait;",
)
WAYS = {
    "mbarrier": MBARRIER,
    "relaxed": RELAXED,
    "store": STORE,
    "fenced": FENCED,
    "atomic": ATOMIC,
    "global": GLOBAL,
}
# Instructions that all lanes of a warp execute together.
TOGETHER = {
    "bar.warp.sync": "bar.warp.sync -1;",
    "shfl": "shfl.sync.idx.b32 %v|%Q, %t, 0, 31, -1;",
    "vote": "vote.sync.ballot.b32 %v, %P, -1;",
    "match": "match.any.sync.b32 %v, %t, -1;",
    "redux": "redux.sync.add.u32 %v, %t, -1;",
    "elect": "elect.sync %v|%P, -1;",
    "barrier": "bar.sync 1, 32;",
    "movmatrix": "movmatrix.sync.aligned.m8n8.trans.b16 %v, %t;",
    "ldmatrix": "shl.b32 %v, %t, 4; and.b32 %v, %v, 127; add.u32 %v, %v, %s;"
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%v}, [%v+2048];",
    "mma": "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%x0, %x1, %x2, %x3}, {%t, %t}, {%t},"
    "{%x4, %x5, %x6, %x7};",
}


def body(
    way: tuple[str, str],
    between: str,
    *,
    write: str = "st.shared.u32 [%a0], %t;",
    read: str = "ld.shared.u32 %v, [%a1];",
    clears: bool = True,
    arrivals: int = 1,
) -> str:
    """Warp 0 writes, and lane 0 releases; warp 1 waits, and each of its lanes reads what another lane has written.

    In shared memory %a0 is the address of the thread's own word, and for warp 1 %a1 is that of the word of lane
    31 - lane in warp 0. %d2 and %d3 - 128 are the same in y. Warp 1 stores what it has read 2048 bytes after %d2.
    ``between``: what warp 0 executes between write and release. ``clears``: whether all words are first set to 0.
    ``arrivals``: those that the mbarrier counts.
    """
    release, wait = way
    # A kernel without mbarriers runs on sm_80.
    init = f"@%P mbarrier.init.shared::cta.b64 [%bar], {arrivals};" if "mbarrier" in release else ""
    return f"""
      add.u32 %bar, %s, 1024; mov.f32 %x4, 0f00000000; mov.b32 %x5, %x4; mov.b32 %x6, %x4; mov.b32 %x7, %x4;
      shl.b32 %a0, %t, 2; xor.b32 %a1, %a0, 124; sub.u32 %a1, %a1, 128; add.u32 %a2, %a1, 128;
      mul.wide.u32 %d0, %a0, 1; add.u64 %d2, %q, %d0; xor.b32 %a3, %a0, 124; mul.wide.u32 %d1, %a3, 1;
      add.u64 %d3, %q, %d1; add.u32 %a0, %a0, %s; add.u32 %a1, %a1, %s; add.u32 %a2, %a2, %s;
      setp.eq.u32 %P, %t, 0; st.shared.u32 [%a0+2048], 0;
      {init} @%P st.shared.u32 [%bar+8], 0;
      {"st.shared.u32 [%a0], 0;" if clears else ""} {"@%P st.global.u32 [%q+1024], 0;" if "%q" in release else ""}
      bar.sync 0;
      setp.gt.u32 %E, %t, 31; @%E bra other;
      {write}
      {between}
      {release}
      bra done;
    other: {wait}
      {read}
      st.global.u32 [%d2+2048], %v;
    done:"""


@cache
def read_values(text: str, adverse: bool) -> tuple[list[int], set[str]]:
    """The values that warp 1 has read, and the kinds of errors."""
    y = np.zeros(1024, np.uint32)
    out, result = run_body(
        text, np.zeros(1, np.uint32), y, block=64, options=Options(adverse=adverse), check_outputs=False
    )
    # Warp 1 has threads 32 to 63, and stores from word 512 on.
    return out[544:576].tolist(), {report.kind for report in result.reports if report.is_error}


WRITTEN = [lane ^ 31 for lane in range(32)]  # what the lanes of warp 1 read: the numbers of the writing lanes


@ADVERSE
@pytest.mark.parametrize("way", WAYS)
def test_a_lane_does_not_release_for_its_warp(way: str, adverse: bool) -> None:
    assert read_values(body(WAYS[way], ""), adverse) == (WRITTEN, {"shared-race"})


@ADVERSE
@pytest.mark.parametrize("between", TOGETHER)
@pytest.mark.parametrize("way", ["mbarrier", "relaxed", "store", "fenced", "atomic"])
def test_an_instruction_of_the_whole_warp_comes_between(way: str, between: str, adverse: bool) -> None:
    assert read_values(body(WAYS[way], TOGETHER[between]), adverse) == (WRITTEN, set())


# The arrival of every lane in place of one.
ALL_LANES = MBARRIER[0].removeprefix("@%P ")
# One lane after the other arrives.
IN_TURN = f"""mov.u32 %u, 0;
    next: setp.eq.u32 %Q, %t, %u; @%Q {ALL_LANES} add.u32 %u, %u, 1; setp.lt.u32 %Q, %u, 32; @%Q bra next;"""


@ADVERSE
@pytest.mark.parametrize("release", [ALL_LANES, IN_TURN])
def test_every_lane_releases(release: str, adverse: bool) -> None:
    assert read_values(body((release, MBARRIER[1]), "", arrivals=32), adverse) == (WRITTEN, set())


@ADVERSE
def test_every_lane_releases_by_an_atomic(adverse: bool) -> None:
    wait = ATOMIC[1].replace("%Q, %v, 0", "%Q, %v, 32").replace("setp.eq", "setp.ne")
    assert read_values(body((ATOMIC[0].removeprefix("@%P "), wait), ""), adverse) == (WRITTEN, set())


@ADVERSE
@pytest.mark.parametrize(("arrives", "kinds"), [(31, set()), (30, {"shared-race"}), (15, {"shared-race"})])
def test_those_lanes_release_that_have_written(arrives: int, kinds: set[str], adverse: bool) -> None:
    # All lanes write, and each lane up to the given one arrives.
    release = f"setp.le.u32 %P, %t, {arrives}; {MBARRIER[0]}"
    assert read_values(body((release, MBARRIER[1]), "", arrivals=arrives + 1), adverse) == (WRITTEN, kinds)


@ADVERSE
@pytest.mark.parametrize("way", ["mbarrier", "relaxed", "store", "fenced", "atomic"])
def test_a_lane_releases_what_it_has_written_itself(way: str, adverse: bool) -> None:
    alone = body(WAYS[way], "", write="@%P st.shared.u32 [%s], 7;", read="ld.shared.u32 %v, [%s];")
    assert read_values(alone, adverse) == ([7] * 32, set())


@ADVERSE
@pytest.mark.parametrize(("between", "kinds"), [("bar.warp.sync -1;", set()), ("", {"global-race"})])
@pytest.mark.parametrize("way", ["mbarrier", "relaxed", "store"])
def test_what_lanes_have_written_to_global_memory(way: str, between: str, kinds: set[str], adverse: bool) -> None:
    text = body(WAYS[way], between, write="st.global.u32 [%d2], %t;", read="ld.global.u32 %v, [%d3+-128];")
    assert read_values(text, adverse) == (WRITTEN, kinds)


@ADVERSE
@pytest.mark.parametrize(("between", "kinds"), [("bar.warp.sync -1;", set()), ("", {"shared-race"})])
@pytest.mark.parametrize("write", ["st.shared.u32 [%a1], 5;", "atom.shared.exch.b32 %v, [%a1], 5;"])
def test_what_lanes_have_read_is_written_again(write: str, between: str, kinds: set[str], adverse: bool) -> None:
    read = "ld.shared.u32 %v, [%a0]; st.global.u32 [%d2+2176], %v;"
    text = body(MBARRIER, between, write=read, read=f"{write} bra done;")
    assert read_values(text, adverse) == ([0] * 32, kinds)


@ADVERSE
@pytest.mark.parametrize(("between", "kinds"), [("bar.warp.sync -1;", set()), ("", {"shared-race"})])
@pytest.mark.parametrize("fence", ["", "fence.proxy.async.shared::cta; bar.warp.sync -1;"])
def test_what_lanes_have_written_is_copied(fence: str, between: str, kinds: set[str], adverse: bool) -> None:
    text = body(
        MBARRIER,
        f"fence.proxy.async.shared::cta; {between}",
        read=f"""{fence} setp.ne.u32 %Q, %t, 32; @%Q bra done; add.u64 %d1, %q, 2176;
          cp.async.bulk.global.shared::cta.bulk_group [%d1], [%s], 128;
          cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; bra done;""",
    )
    assert read_values(text, adverse) == (list(range(32)), kinds)


@ADVERSE
@pytest.mark.parametrize(("between", "kinds"), [("bar.warp.sync -1;", set()), ("", {"shared-race"})])
def test_what_lanes_have_read_is_overwritten_by_a_copy(between: str, kinds: set[str], adverse: bool) -> None:
    text = body(
        MBARRIER,
        f"st.global.u32 [%d2+2176], %v; fence.proxy.async.shared::cta; {between}",
        write="ld.shared.u32 %v, [%a0];",
        read="""setp.ne.u32 %Q, %t, 32; @%Q bra done; add.u32 %u, %bar, 16;
          mbarrier.init.shared::cta.b64 [%u], 1; fence.mbarrier_init.release.cluster;
          mbarrier.arrive.expect_tx.shared::cta.b64 _, [%u], 128; add.u64 %d1, %q, 512;
          cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%d1], 128, [%u];
        land: mbarrier.try_wait.parity.shared::cta.b64 %Q, [%u], 0; @!%Q bra land; bra done;""",
    )
    assert read_values(text, adverse) == ([0] * 32, kinds)


@ADVERSE
def test_all_lanes_write_what_the_first_one_releases(adverse: bool) -> None:
    text = body(MBARRIER, "", write="st.shared.u32 [%s], 7;", read="ld.shared.u32 %v, [%s];")
    assert read_values(text, adverse) == ([7] * 32, set())


@ADVERSE
def test_lanes_of_a_warp_poll_one_word_in_two_loops(adverse: bool) -> None:
    # Each loop gets the values of the word at its own pace. The first loop waits for a value that precedes the second
    # one's.
    text = body(
        (ATOMIC[0], ""),
        "",
        write="@%P st.shared.u32 [%s], 7;",
        read="""
          setp.ne.u32 %P, %t, 40; @%P bra rest;
          one: ld.acquire.cta.shared.u32 %v, [%bar+8]; setp.ne.u32 %Q, %v, 1; @%Q bra one; bra both;
          rest: ld.acquire.cta.shared.u32 %v, [%bar+8]; setp.ne.u32 %Q, %v, 1; @%Q bra rest;
          both: bar.warp.sync -1; ld.shared.u32 %v, [%s];""",
    )
    assert read_values(text, adverse) == ([7] * 32, set())


@ADVERSE
@pytest.mark.parametrize(("between", "ordered"), [("setp.lt.u32 %E, %t, 2; @%E bar.warp.sync 3;", True), ("", False)])
@pytest.mark.parametrize("space", ["shared", "global"])
@pytest.mark.parametrize("way", ["store", "fenced", "atomic", "global"])
def test_a_lane_releases_for_one_that_it_has_met(
    way: str, space: str, between: str, ordered: bool, adverse: bool
) -> None:
    at = {"shared": "%s", "global": "%q"}[space]
    write = f"setp.eq.u32 %Q, %t, 1; @%Q st.{space}.u32 [{at}], 7;"
    assert read_values(body(WAYS[way], between, write=write, read=f"ld.{space}.u32 %v, [{at}];"), adverse) == (
        [7] * 32,
        set() if ordered else {f"{space}-race"},
    )


# Each lane writes, synchronises with the other lanes of its tile of 2**tile lanes, and reads what the lane at exclusive
# or with ``distance`` has written. ``mask``: the lanes of the first tile.
TILES = """shl.b32 %a0, %t, 2; add.u32 %a0, %a0, %s; xor.b32 %a1, %t, {distance}; shl.b32 %a1, %a1, 2;
  add.u32 %a1, %a1, %s; shr.u32 %u, %t, {tile}; shl.b32 %u, %u, {tile}; mov.u32 %n, {mask}; shl.b32 %n, %n, %u;
  {write}; {sync} ld.{space}.u32 %v, {read}; mul.wide.u32 %d0, %t, 4; add.u64 %d1, %q, %d0;
  st.global.u32 [%d1+128], %v;"""


@ADVERSE
@pytest.mark.parametrize("sync", ["bar.warp.sync %n;", "shfl.sync.idx.b32 %w, %t, 0, 31, %n;"])
@pytest.mark.parametrize(("tile", "distance", "races"), [(3, 7, False), (3, 8, True), (4, 15, False), (4, 31, True)])
@pytest.mark.parametrize("space", ["shared", "global"])
def test_lanes_of_two_tiles_do_not_meet(
    space: str, tile: int, distance: int, races: bool, sync: str, adverse: bool
) -> None:
    place = {"shared": ("[%a0]", "[%a1]"), "global": ("[%d2]", "[%d3]")}[space]
    text = TILES.format(
        tile=tile, distance=distance, mask=(1 << (1 << tile)) - 1, sync=sync, space=space, read=place[1],
        write=f"mul.wide.u32 %d2, %t, 4; add.u64 %d2, %q, %d2; xor.b32 %x0, %t, {distance}; mul.wide.u32 %d3, %x0, 4;"
        f"add.u64 %d3, %q, %d3; st.{space}.u32 {place[0]}, %t",
    )  # fmt: skip
    y = np.zeros(64, np.uint32)
    out, result = run_body(text, np.zeros(1, np.uint32), y, options=Options(adverse=adverse), check_outputs=False)
    assert {report.kind for report in result.reports} == ({f"{space}-race"} if races else set())
    assert races or out[32:].tolist() == [lane ^ distance for lane in range(32)]


@ADVERSE
def test_lanes_wait_for_those_that_name_the_same_lanes(adverse: bool) -> None:
    # Lane 2 meets lane 1, which waits for a flag, and then lane 0, which is early.
    text = """setp.eq.u32 %P, %t, 0; @%P st.shared.u32 [%s], 0; mov.u32 %w, 0; bar.warp.sync -1;
      setp.gt.u32 %Q, %t, 2; @%Q bra last; @%P bra early; setp.eq.u32 %Q, %t, 2; @%Q bra middle;
      wait: ld.acquire.cta.shared.u32 %v, [%s]; setp.ne.u32 %E, %v, 1; @%E bra wait;
      st.shared.u32 [%s+16], %t; bar.warp.sync 6; bra done;
      middle: bar.warp.sync 6; ld.shared.u32 %v, [%s+16]; add.u32 %v, %v, 1; st.shared.u32 [%s+20], %v;
      bar.warp.sync 5; bra done;
      early: bar.warp.sync 5; ld.shared.u32 %w, [%s+20]; bra done;
      last: setp.eq.u32 %Q, %t, 31; @%Q st.release.cta.shared.u32 [%s], 1;
      done: mul.wide.u32 %d0, %t, 4; add.u64 %d1, %q, %d0; st.global.u32 [%d1], %w;"""
    options = Options(adverse=adverse)
    out, result = run_body(text, np.zeros(1, np.uint32), np.zeros(32, np.uint32), options=options, check_outputs=False)
    assert {report.kind for report in result.reports if report.is_error} == set()
    assert out[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize(("seed", "syncs"), [(0, 0.55), (1, 0.55), (2, 0.55), (3, 0.55), (10, 0.15), (23, 0.15)])
def test_drawn_programs_race_where_only_some_lanes_meet(
    seed: int, syncs: float, right: bool, ampere_device: Device
) -> None:
    text, races = draw(seed, right, ("released", "fenced")[seed % 2], whole_warps=0.2, syncs=syncs)
    y = np.zeros(THREADS, np.uint32)
    _, result = run_body(text, np.zeros(1, np.uint32), y, block=THREADS, device=ampere_device, check_outputs=False)
    assert ("shared-race" in {report.kind for report in result.reports}) == races


@pytest.fixture
def ampere_device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device whose shared memory defers the tags of reads."""
    monkeypatch.setattr(hopper_ptx, "HEAD", hopper_ptx.HEAD.replace("sm_90a", "sm_80"))
    return Device.of(GPUS["a100"])


@pytest.mark.slow
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_drawn_programs_race_whenever_tags_are_written(
    seed: int, right: bool, ampere_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, races = draw(seed, right, ("released", "fenced")[seed % 2])
    y = np.zeros(THREADS, np.uint32)
    for defers in (True, False):
        monkeypatch.setattr(SharedChecks, "DEFERS", defers)
        _, result = run_body(text, np.zeros(1, np.uint32), y, block=THREADS, device=ampere_device, check_outputs=False)
        assert ("shared-race" in {report.kind for report in result.reports}) == races


@pytest.mark.slow
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("seed", range(18))
def test_drawn_programs_race_where_threads_have_no_order(seed: int, right: bool) -> None:
    text, races = draw(seed, right, ("mbarrier", "released", "fenced")[seed % 3])
    options = Options(adverse=seed % 2 == 1)
    y = np.zeros(THREADS, np.uint32)
    _, result = run_body(text, np.zeros(1, np.uint32), y, block=THREADS, options=options, check_outputs=False)
    assert ("shared-race" in {report.kind for report in result.reports}) == races


# Statements that touch memory, and such that do not.
TOUCHING = ("st.shared.u32 [%s], %t;", "ld.global.u32 %v, [%p];", "fence.acq_rel.cta;", "atom.add.u32 %v, [%s], 1;")
PLAIN = ("add.u32 %v, %v, 1;", "mov.u32 %u, %t;", "setp.eq.u32 %P, %v, 0;", "selp.u32 %v, 1, 2, %P;")


def test_lanes_are_gathered_between_what_they_execute_together_and_the_next_access() -> None:
    """Once for each sequence of such instructions, as late as possible: before an access, or at the end."""
    together = [text for text in TOGETHER.values() if text.count(";") == 1]
    generator = random.Random(0)
    for _ in range(60):
        kinds = [generator.choice((together, TOUCHING, PLAIN)) for _ in range(12)]
        text = hopper_ptx.entry("\n".join(generator.choice(kind) for kind in kinds), params=".param .u64 y0")
        body = [item for item in parse(text).kernels["k"].body if isinstance(item, Instr)]
        first = len(body) - len(kinds) - 1
        expected = set()
        for place in range(len(kinds) + 1):
            since = max((i for i in range(place) if kinds[i] is TOUCHING), default=-1)
            at_access = place == len(kinds) or kinds[place] is TOUCHING
            if at_access and any(kind is together for kind in kinds[since + 1 : place]):
                expected.add(place)
        assert gather_places(body[first : first + len(kinds)]) == expected


@pytest.mark.parametrize("space", ["shared", "global"])
@pytest.mark.parametrize(
    ("middle", "is_ordered"),
    [("st.relaxed.{}.u32 [{}], 2;", False), ("st.volatile.{}.u32 [{}], 2;", False),
     ("red.relaxed.{}.add.u32 [{}], 1;", True), ("atom.relaxed.{}.exch.b32 %u, [{}], 2;", True)],
)  # fmt: skip
def test_a_store_by_another_warp_ends_a_release_sequence_and_an_atomic_continues_it(
    space: str, middle: str, is_ordered: bool
) -> None:
    """Warp 0 writes and releases 1, warp 1 makes 2 of it, and warp 2 waits for 2, acquires it and reads."""
    data, flag, scope = ("%s", "%bar", "cta") if space == "shared" else ("%q", "%q+1024", "gpu")
    where = space if "volatile" in middle else f"{scope}.{space}"
    body = f"""
      add.u32 %bar, %s, 64; setp.eq.u32 %P, %t, 0; @%P st.{space}.u32 [{flag}], 0; bar.sync 0;
      and.b32 %u, %t, 31; setp.ne.u32 %P, %u, 0; @%P bra end;
      setp.eq.u32 %P, %t, 32; @%P bra second; setp.eq.u32 %P, %t, 64; @%P bra third;
      st.{space}.u32 [{data}], 7; st.release.{scope}.{space}.u32 [{flag}], 1; bra end;
    second: ld.relaxed.{scope}.{space}.u32 %v, [{flag}]; setp.ne.u32 %P, %v, 1; @%P bra second;
      {middle.format(where, flag)} bra end;
    third: ld.relaxed.{scope}.{space}.u32 %v, [{flag}]; setp.ne.u32 %P, %v, 2; @%P bra third;
      ld.acquire.{scope}.{space}.u32 %v, [{flag}];
      ld.{space}.u32 %v, [{data}]; st.global.u32 [%q+512], %v;
    end:"""
    _, result = run_body(body, np.zeros(1, np.uint32), np.zeros(320, np.uint32), block=96, check_outputs=False)
    races = {report.kind for report in result.reports if report.kind.endswith("race")}
    assert races == (set() if is_ordered else {f"{space}-race"})
