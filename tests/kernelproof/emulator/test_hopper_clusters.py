"""Proves clusters (special registers, distributed shared memory, barriers), and what else sm_90 adds to a CTA."""

from __future__ import annotations

import numpy as np
import pytest

from kernelproof.emulator import Memory
from kernelproof.emulator.hopper.async_stores import AsyncStores
from tests.kernelproof.emulator.hopper_ptx import (
    EXCHANGE,
    entry,
    exchange,
    launch,
    run_body,
)


@pytest.mark.parametrize("cluster", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)])
def test_special_registers(cluster: tuple[int, int, int]) -> None:
    """The special registers of clusters have the values of the PTX manual for each shape of a cluster."""
    grid = (4, 2, 2)
    bases = ("ctaid", "cluster_ctaid", "clusterid", "nclusterid", "cluster_nctaid")
    names = [f"%{base}{axis}" for base in bases for axis in (".x", ".y", ".z")]
    names += ["%cluster_ctarank", "%cluster_nctarank"]
    body = "mov.u32 %u, %ctaid.y; mov.u32 %v, %ctaid.z; mad.lo.u32 %u, %v, 2, %u; mov.u32 %v, %ctaid.x;"
    body += f" mad.lo.u32 %u, %u, 4, %v; mad.wide.u32 %g, %u, {4 * len(names)}, %q;"
    body += "".join(f" mov.u32 %w, {name}; st.global.u32 [%g+{4 * i}], %w;" for i, name in enumerate(names))
    body += " mapa.shared::cluster.u32 %w, %s, 0;"
    got, result = run_body(
        body, np.zeros(1), np.empty((16, len(names)), np.uint32), grid=grid, cluster=cluster, block=1
    )
    assert result.reports == []
    for row in got.tolist():
        id_, inside, cluster_id = row[:3], row[3:6], row[6:9]
        assert inside == [i % c for i, c in zip(id_, cluster, strict=True)]
        assert cluster_id == [i // c for i, c in zip(id_, cluster, strict=True)]
        assert row[9:12] == [g // c for g, c in zip(grid, cluster, strict=True)]
        assert tuple(row[12:15]) == cluster
        assert row[15:] == [inside[0] + cluster[0] * (inside[1] + cluster[1] * inside[2]), int(np.prod(cluster))]


def test_distributed_shared_memory() -> None:
    """A CTA reads its peer's shared memory between two cluster barriers; a missing barrier or release is reported."""
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
    """A peer's shared memory can be read by a generic address and changed by an atomic."""
    body = EXCHANGE.replace("mapa.shared::cluster.u32 %x1, %v, %x0;", """
      cvt.u64.u32 %d0, %v; cvta.shared.u64 %d0, %d0; mapa.u64 %d1, %d0, %x0;
      cvta.to.shared.u64 %d2, %d1; cvt.u32.u64 %x1, %d2; atom.shared::cluster.add.u32 %x2, [%x1], 100;
      barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;""")  # fmt: skip
    body = body.replace("ld.shared::cluster.u32 %w, [%x1];", "ld.u32 %w, [%d1];")
    got, reports = exchange(body)
    assert reports == []
    assert (got == np.concatenate([np.arange(32, 64), np.arange(32)]) + 100).all()


# In a cluster of two CTAs each thread stores a word to the other CTA, whose mbarrier counts 128 bytes, waits for the
# words of the other CTA, and reads one that another thread has sent.
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
    """st.async delivers words to a peer, whose mbarrier counts their bytes; wrong counts and missing waits are
    reported."""
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


# Parts of ASYNC_STORE: the store, the address at the peer, and the wait. BEGIN lets CTAs of a cluster meet.
STORE = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%x1], %u, [%x2];"
TO_PLACE = "mapa.shared::cluster.u32 %x1, %v, %x0;"
WAITED = "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %P, [%bar], 0; @!%P bra again;"
BEGIN = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
# By variant: a part of ASYNC_STORE, and the text that replaces it.
STORES = {
    "right": ("", ""),
    "twice": (STORE, STORE * 2),
    "one place": (TO_PLACE, f"{TO_PLACE} mapa.shared::cluster.u32 %x1, %s, %x0;"),
    "pairs on one place": (TO_PLACE, f"and.b32 %w, %v, 0xfffffffb; {TO_PLACE.replace('%v', '%w')}"),
    "misaligned": (TO_PLACE, f"{TO_PLACE} add.u32 %x1, %x1, 2;"),
    "out of bounds": (TO_PLACE, f"{TO_PLACE} add.u32 %x1, %x1, 2000;"),
    "onto the mbarrier": (TO_PLACE, f"{TO_PLACE} add.u32 %x1, %x1, 1024;"),
    "another CTA's mbarrier": ("%x2, %bar, %x0", "%x2, %bar, %n"),
    "no mbarrier": ("%x2, %bar, %x0", "%x2, %s, %x0"),
    "some lanes without an mbarrier": ("%x2, %bar, %x0;", "%x2, %bar, %x0; and.b32 %w, %t, 8; add.u32 %x2, %x2, %w;"),
    "after a write": (BEGIN, f"st.shared.u32 [%v], %t; {BEGIN}"),
    "before a write": (WAITED, f"st.shared.u32 [%v], %t; {WAITED}"),
    "after a read": (BEGIN, f"st.shared.u32 [%v], %t; ld.shared.u32 %w, [%v]; {BEGIN}"),
    "together with a read": (WAITED, f"ld.shared.u32 %w, [%v]; {WAITED}"),
    "phase within": ("[%bar], 128", "[%bar], 64"),
    "not waited for": (WAITED, ""),
}


@pytest.mark.parametrize("name", STORES)
def test_async_stores_at_once_as_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path for all lanes of a store changes neither values nor findings."""
    before, after = STORES[name]
    text = ASYNC_STORE.replace(before, after, 1) if before else ASYNC_STORE
    assert name == "right" or text != ASYNC_STORE
    at_once = []
    whole = AsyncStores._store_together
    monkeypatch.setattr(
        AsyncStores, "_store_together", lambda *arguments: at_once.append(whole(*arguments)) or at_once[-1]
    )
    got, reports = exchange(text)
    monkeypatch.setattr(AsyncStores, "_store_together", lambda *arguments: False)
    want, one_by_one = exchange(text)
    assert reports == one_by_one
    assert (got == want).all()
    assert name != "right" or all(at_once)


def test_remote_arrivals_and_copies() -> None:
    """A bulk copy to a peer and an arrival at the peer's mbarrier order the data for the peer."""
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


def test_ranks_outside_the_cluster() -> None:
    """mapa with a rank that the cluster does not have is reported."""
    _, reports = exchange(EXCHANGE.replace("xor.b32 %x0, %n, 1;", "add.u32 %x0, %n, 1;"))
    assert any("names CTA 2 of a cluster of 2" in r for r in reports)


def test_clusters_of_a_block_that_is_no_multiple_of_128() -> None:
    """Clusters work with blocks whose last warpgroup is not full."""
    body = EXCHANGE.replace("mad.lo.u32 %u, %n, 32, %t;", "mad.lo.u32 %u, %n, 160, %t;")
    got, result = run_body(body, np.zeros(1), np.empty(320, np.uint32), grid=2, cluster=2, block=160)
    assert result.reports == []
    assert (got == np.concatenate([np.arange(160, 320), np.arange(160)])).all()


def test_elect() -> None:
    """elect.sync elects the first lane of each warp."""
    body = (
        """elect.sync %u|%P, -1; selp.u32 %v, 1, 0, %P; mad.wide.u32 %g, %t, 8, %q; st.global.v2.u32 [%g], {%u, %v};"""
    )
    got, result = run_body(body, np.zeros(1), np.empty((64, 2), np.uint32), block=64)
    assert result.reports == []
    assert got[:, 0].tolist() == [0] * 64
    assert np.flatnonzero(got[:, 1]).tolist() == [0, 32]


def test_named_barriers_of_a_block_that_is_no_multiple_of_128() -> None:
    # Warps 0 to 3 and warp 8 synchronise at barrier 1, the others at barrier 2, where warp 8 only arrives.
    body = """
      mad.lo.u32 %v, %t, 4, %s; st.shared.u32 [%v], %t;
      setp.lt.u32 %P, %t, 128; @%P bra first; setp.ge.u32 %P, %t, 256; @%P bra last;
      bar.sync 2, 160; mov.u32 %u, 256; bra read;
    last: bar.arrive 2, 160; bar.sync 1, 160; mov.u32 %u, 0; bra read;
    first: barrier.sync 1, 160; mov.u32 %u, 256;
    read: and.b32 %w, %t, 31; add.u32 %u, %u, %w; mad.lo.u32 %v, %u, 4, %s; ld.shared.u32 %w, [%v];
      mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %w;"""
    got, result = run_body(body, np.zeros(1), np.empty(288, np.uint32), block=288)
    assert result.reports == []
    assert got.tolist() == [256 + t % 32 if t < 256 else t % 32 for t in range(288)]
    _, result = run_body(body.replace("bar.arrive 2, 160;", ""), np.zeros(1), np.empty(288, np.uint32), block=288)
    assert result.reports[0].kind == "barrier-divergence"


# Threads of a CTA; the registers to which the first warpgroup lowers its own, and to which the others raise theirs; the
# findings.
@pytest.mark.parametrize(("threads", "dec", "inc", "kinds"), [
    (384, 40, 232, []), (384, 24, 240, []), (384, 40, 240, ["registers"]), (384, 44, 200, ["registers"]),
    (384, 16, 200, ["registers"]),
    # ptxas 13.0 reports 168 registers for 384 threads (less if all numbers are less), and 248 for 256 threads.
    (384, 40, 160, []), (384, 176, 200, ["registers"] * 2), (256, 48, 248, []), (256, 40, 232, []), (512, 24, 152, []),
])  # fmt: skip
def test_register_pool(threads: int, dec: int, inc: int, kinds: list[str]) -> None:
    """setmaxnreg is reported if the warpgroups demand more registers than the CTA has, or release none."""
    text = entry(f"""setp.ge.u32 %P, %t, 128; @%P bra more; setmaxnreg.dec.sync.aligned.u32 {dec}; bra out;
      more: setmaxnreg.inc.sync.aligned.u32 {inc}; out:""", ".param .u32 z")  # fmt: skip
    text = text.replace("(.param .u32 z)", f"(.param .u32 z) .maxntid {threads}, 1, 1 .minnctapersm 1")
    result = launch(text, [0], Memory(), block=threads)
    assert [r.kind for r in result.reports] == kinds


def test_set_of_registers_by_a_part_of_a_warpgroup() -> None:
    """setmaxnreg must be executed by all warps of a warpgroup."""
    text = entry("setp.gt.u32 %P, %t, 63; @%P bra out; setmaxnreg.dec.sync.aligned.u32 40; out:", ".param .u32 z")
    result = launch(text, [0], Memory(), block=128)
    assert "executed by 2 of 4 warps" in result.reports[0].message


def test_constant_memory_may_be_read_before_the_previous_kernel_has_ended() -> None:
    """No kernel writes it."""
    memory = Memory()
    out = memory.upload(np.empty(32, np.uint32), "output")
    body = "ld.const.u32 %u, [table+4]; griddepcontrol.wait; mad.wide.u32 %g, %t, 4, %p; st.global.u32 [%g], %u;"
    text = entry(body).replace(".visible .entry", ".const .align 4 .u32 table[2] = {5, 7};\n.visible .entry")
    result = launch(text, [out, out], memory, overlapping=True)
    assert result.reports == []
    assert (out.download() == 7).all()


@pytest.mark.parametrize("overlapping", [False, True])
def test_grid_dependency(overlapping: bool) -> None:
    """A kernel that overlaps with the previous one must wait before it touches memory; one waiting warp and a barrier
    suffice."""
    good = """griddepcontrol.wait; griddepcontrol.launch_dependents;
      mad.wide.u32 %g, %t, 4, %p; ld.global.u32 %u, [%g]; mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %u;"""
    x = np.arange(32, dtype=np.uint32)
    assert run_body(good, x, np.empty(32, np.uint32), overlapping=overlapping)[1].reports == []
    bad = good.replace("griddepcontrol.wait;", "")
    kinds = [r.kind for r in run_body(bad, x, np.empty(32, np.uint32), overlapping=overlapping)[1].reports]
    assert kinds == (["grid-dependency"] * 2 if overlapping else [])
    # One warp waits, and a barrier orders the others.
    single_wait = good.replace(
        "griddepcontrol.wait;", "setp.gt.u32 %P, %t, 31; @%P bra j; griddepcontrol.wait; j: bar.sync 0;"
    )
    x = np.arange(64, dtype=np.uint32)
    assert run_body(single_wait, x, np.empty(64, np.uint32), overlapping=overlapping, block=64)[1].reports == []
