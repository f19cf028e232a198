"""Proves that only threads which wait are ordered, with the roles of warps or CTAs swapped in each synchronisation."""

from __future__ import annotations

import numpy as np
import pytest

from kernelproof import emulator
from tests.kernelproof.emulator.hopper_ptx import exchange, run_body
from tests.kernelproof.emulator.test_tensor_memory import launch

# A test runs with the roles of both warps or CTAs swapped, and in both orders of events.
ROLES = pytest.mark.parametrize("waiter", [0, 1])
ADVERSE = pytest.mark.parametrize("adverse", [False, True])


def kinds(result: emulator.LaunchResult) -> set[str]:
    """The kinds of a launch's findings."""
    return {report.kind for report in result.reports}


# Two warps write a word each and arrive. Warp WAITER waits, and warp READER reads the other's word.
MBARRIER = """
  add.u32 %bar, %s, 1024; setp.ne.u32 %P, %t, 0; @%P bra ready;
  mbarrier.init.shared::cta.b64 [%bar], 64;
ready: bar.sync 0;
  shr.u32 %n, %t, 5; xor.b32 %x0, %t, 32; PLACES
  st.SPACE.u32 [OWN], %t;
  mbarrier.arrive.shared::cta.b64 _, [%bar];
  setp.ne.u32 %Q, %n, WAITER; @%Q bra went;
again: mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0; @!%P bra again;
went: mov.u32 %w, %x0;
  setp.ne.u32 %Q, %n, READER; @%Q bra done;
  ld.SPACE.u32 %w, [OTHER];
done: mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %w;"""
# By memory: the addresses of a warp's own word and of the other's, and their registers.
PLACES = {
    "shared": ("mad.lo.u32 %v, %t, 4, %s; mad.lo.u32 %u, %x0, 4, %s;", "%v", "%u"),
    "global": ("mad.wide.u32 %d0, %t, 4, %q; add.u64 %d0, %d0, 256; mad.wide.u32 %d1, %x0, 4, %q; "
               "add.u64 %d1, %d1, 256;", "%d0", "%d1"),
}  # fmt: skip


@ROLES
@ADVERSE
@pytest.mark.parametrize("reads_waiting", [True, False])
@pytest.mark.parametrize("space", ["shared", "global"])
def test_an_arrival_at_an_mbarrier(space: str, reads_waiting: bool, waiter: int, adverse: bool) -> None:
    places, own, other = PLACES[space]
    text = MBARRIER.replace("PLACES", places).replace("OWN", own).replace("OTHER", other).replace("SPACE", space)
    text = text.replace("WAITER", str(waiter)).replace("READER", str(waiter if reads_waiting else 1 - waiter))
    got, result = run_body(
        text, np.zeros(1, np.uint32), np.empty(128, np.uint32), block=64, check_outputs=False,
        options=emulator.Options(adverse=adverse),
    )  # fmt: skip
    assert kinds(result) == (set() if reads_waiting else {f"{space}-race"})
    assert not reads_waiting or (got[:64] == np.arange(64) ^ 32).all()


# The CTAs of a cluster write a word each and arrive. CTA EARLY reads the other's word before it waits.
CLUSTER = """
  mov.u32 %n, %cluster_ctarank; mad.lo.u32 %u, %n, 32, %t; mad.lo.u32 %v, %t, 4, %s; xor.b32 %x0, %n, 1;
  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
  mapa.shared::cluster.u32 %x1, %v, %x0;
  st.shared.u32 [%v], %u;
  barrier.cluster.arrive.release.aligned;
  setp.ne.u32 %P, %n, EARLY; @%P bra waits;
  ld.shared::cluster.u32 %w, [%x1];
waits:
  barrier.cluster.wait.acquire.aligned;
  @!%P bra over; ld.shared::cluster.u32 %w, [%x1];
over: mad.wide.u32 %g, %u, 4, %q; st.global.u32 [%g], %w;
  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""


@pytest.mark.parametrize(("early", "wrong"), [(0, True), (1, True), (2, False)])
def test_an_arrival_at_the_barrier_of_a_cluster(early: int, wrong: bool) -> None:
    got, reports = exchange(CLUSTER.replace("EARLY", str(early)))
    assert {report.split(":")[0] for report in reports} == ({"shared-race"} if wrong else set())
    assert wrong or (got == np.arange(64) ^ 32).all()


# CTA RECEIVER writes a word and expects 128 bytes, which the other CTA sends. The receiver may wait. The sender may
# read the receiver's word, which nothing orders.
ASYNC = """
  add.u32 %bar, %s, 1024; mov.u32 %n, %cluster_ctarank; xor.b32 %x0, %n, 1; mad.lo.u32 %v, %t, 4, %s;
  setp.ne.u32 %P, %t, 0; @%P bra ready;
  mbarrier.init.shared::cta.b64 [%bar], 1; fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 128;
ready:
  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
  mapa.shared::cluster.u32 %x1, %v, %x0; mapa.shared::cluster.u32 %x2, %bar, %x0; mov.u32 %w, 0;
  setp.eq.u32 %Q, %n, RECEIVER;
  @%Q st.shared.u32 [%v+512], %t;
  @%Q bra receives;
  st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%x1], %t, [%x2];
  SENDER
  bra over;
receives:
  WAIT
  ld.shared.u32 %w, [%v];
over:
  mad.lo.u32 %u, %n, 32, %t; mad.wide.u32 %g, %u, 4, %q; st.global.u32 [%g], %w;
  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
# A wait for the first phase of the mbarrier.
WAIT = "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %P, [%bar], 0; @!%P bra again;"


@pytest.mark.parametrize("receiver", [0, 1])
@pytest.mark.parametrize(
    ("waits", "sender", "wrong"),
    [
        (WAIT, "", set()),
        ("", "", {"in-flight"}),
        (WAIT, "ld.shared::cluster.u32 %w, [%x1+512];", {"shared-race"}),
        (WAIT, "ld.shared::cluster.u32 %w, [%x1];", {"in-flight"}),
    ],
)
def test_an_asynchronous_store(waits: str, sender: str, wrong: set[str], receiver: int) -> None:
    text = ASYNC.replace("WAIT", waits).replace("SENDER", sender).replace("RECEIVER", str(receiver))
    got, reports = exchange(text)
    assert {report.split(":")[0] for report in reports} == wrong
    assert wrong or (got.reshape(2, 32)[receiver] == np.arange(32)).all()


# A thread of warp ISSUER starts a bulk copy, warp WAITER waits for it, and the warps read the copied data.
BULK = """
  add.u32 %bar, %s, 4096; shr.u32 %n, %t, 5; setp.ne.u32 %P, %t, ISSUER; @%P bra ready;
  mbarrier.init.shared::cta.b64 [%bar], 1; fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 128;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%p], 128, [%bar];
ready: bar.sync 0;
  and.b32 %u, %t, 31; mad.lo.u32 %v, %u, 4, %s; mov.u32 %w, 0;
  setp.ne.u32 %Q, %n, WAITER; @%Q bra went;
again: mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0; @!%P bra again;
went: setp.ne.u32 %Q, %n, READER; @%Q bra done;
  ld.shared.u32 %w, [%v];
done: mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %w;"""


@ROLES
@pytest.mark.parametrize("issuer", [0, 1])
@pytest.mark.parametrize("reads_waiting", [True, False])
def test_the_completion_of_a_bulk_copy(reads_waiting: bool, issuer: int, waiter: int) -> None:
    reader = waiter if reads_waiting else 1 - waiter
    text = BULK.replace("ISSUER", str(32 * issuer)).replace("WAITER", str(waiter)).replace("READER", str(reader))
    got, result = run_body(text, np.arange(32, dtype=np.uint32), np.empty(64, np.uint32), block=64)
    assert kinds(result) == (set() if reads_waiting else {"shared-race"})
    assert not reads_waiting or (got.reshape(2, 32)[reader] == np.arange(32)).all()


# Warp ISSUER multiplies and commits. Warp WAITER waits for the commit, and warp READER reads the product from tensor
# memory.
COMMIT = """
  .reg .b32 %bar, %n; .reg .pred %Q; .reg .b64 %da;
  add.u32 %bar, %s, 64; shr.u32 %n, %t, 5; setp.ne.u32 %Q, %t, 0; @%Q bra made;
  mbarrier.init.shared::cta.b64 [%bar], 1; fence.mbarrier_init.release.cluster;
made: mad.lo.u32 %u, %t, 128, %s; mov.u32 %a0, 0;
zero: add.u32 %a1, %u, %a0; st.shared.u32 [%a1+1024], 0; add.u32 %a0, %a0, 4; setp.lt.u32 %Q, %a0, 128; @%Q bra zero;
  fence.proxy.async.shared::cta; bar.sync 0; tcgen05.fence::after_thread_sync;
  setp.ne.u32 %Q, %t, ISSUER; @%Q bra issued;
  add.u32 %u, %s, 1024; shr.u32 %u, %u, 4; and.b32 %u, %u, 0x3FFF; cvt.u64.u32 %da, %u;
  or.b64 %da, %da, 0x4000404000000000;
  setp.ne.u32 %Q, 0, 0;
  tcgen05.mma.cta_group::1.kind::f16 [%base], %da, %da, 0x8040010, %Q;
  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];
issued: bar.sync 0; mov.u32 %b0, 0;
  setp.ne.u32 %Q, %n, WAITER; @%Q bra went;
again: mbarrier.try_wait.parity.shared::cta.b64 %Q, [%bar], 0; @!%Q bra again;
  tcgen05.fence::after_thread_sync;
went: setp.ne.u32 %Q, %n, READER; @%Q bra done;
  tcgen05.ld.sync.aligned.32x32b.x1.b32 {%b0}, [%own];
  tcgen05.wait::ld.sync.aligned; tcgen05.fence::before_thread_sync;
done: mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %b0;
  bar.sync 0;
last: mbarrier.try_wait.parity.shared::cta.b64 %Q, [%bar], 0; @!%Q bra last;"""


@ROLES
@pytest.mark.parametrize("issuer", [0, 1])
@pytest.mark.parametrize("reads_waiting", [True, False])
def test_a_commit_of_tensor_cores(reads_waiting: bool, issuer: int, waiter: int) -> None:
    reader = waiter if reads_waiting else 1 - waiter
    text = COMMIT.replace("ISSUER", str(32 * issuer)).replace("WAITER", str(waiter)).replace("READER", str(reader))
    _, result = launch(text, np.zeros(1, np.uint32), np.empty(128, np.uint32), shared_bytes=32768)
    assert bool(kinds(result)) == (not reads_waiting), result.reports


# CTA FIRST writes and ends. The other CTA reads without synchronisation.
EXIT = """
  mov.u32 %n, %ctaid.x; mad.wide.u32 %g, %t, 4, %q; setp.ne.u32 %P, %n, FIRST; @%P bra reads;
  st.global.u32 [%g], %t; bra over;
reads: ld.global.u32 %w, [%g]; st.global.u32 [%g+128], %w;
over:"""


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("lanes", [32, None])
def test_the_end_of_a_cta(first: int, lanes: int | None, cluster: int) -> None:
    _, result = run_body(
        EXIT.replace("FIRST", str(first)), np.zeros(1, np.uint32), np.zeros(64, np.uint32), grid=2, cluster=cluster,
        check_outputs=False, options=emulator.Options(lanes=lanes),
    )  # fmt: skip
    assert "global-race" in kinds(result)


# Warp FIRST writes and ends. The other warp waits at a barrier of the cluster, which does not order ended threads.
EXIT_BEFORE_CLUSTER = """
  shr.u32 %n, %t, 5; xor.b32 %u, %t, 32; setp.ne.u32 %P, %n, FIRST; @%P bra reads;
  mad.lo.u32 %v, %t, 4, %s; st.shared.u32 [%v], %t; ret;
reads: barrier.cluster.arrive; barrier.cluster.wait;
  mad.lo.u32 %v, %u, 4, %s; ld.shared.u32 %w, [%v]; mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %w;"""


@pytest.mark.parametrize("first", [0, 1])
def test_threads_that_end_before_a_barrier_of_the_cluster(first: int) -> None:
    _, result = run_body(
        EXIT_BEFORE_CLUSTER.replace("FIRST", str(first)), np.zeros(1, np.uint32), np.zeros(64, np.uint32), block=64,
        check_outputs=False,
    )  # fmt: skip
    assert kinds(result) == {"shared-race"}
