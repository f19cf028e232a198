"""Proves when a bulk store to global memory is complete, and which fences bulk loads of it need."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernelproof.emulator.hopper_ptx import run_body

# Thread 0 of CTA 0 stores 16 words of shared memory in bulk and sets a flag. Thread 0 of CTA 1 reads them.
STORE = """
  setp.ne.u32 %P, %t, 0; @%P bra out; mov.u32 %n, %ctaid.x; setp.ne.u32 %P, %n, 0; @%P bra other;
  mov.u32 %u, 7; st.shared.v4.u32 [%s], {%u, %u, %u, %u}; fence.proxy.async;
  cp.async.bulk.global.shared::cta.bulk_group [%q], [%s], 16; cp.async.bulk.commit_group;
  WAIT
  st.release.gpu.global.u32 [%q+64], 1; cp.async.bulk.wait_group.read 0; bra out;
other: ld.acquire.gpu.global.u32 %w, [%q+64]; setp.ne.u32 %P, %w, 1; @%P bra other;
  ld.global.u32 %w, [%q+4]; st.global.u32 [%q+68], %w;
out:"""
# A second copy from shared to global memory, in a group of its own.
ANOTHER = """
  cp.async.bulk.global.shared::cta.bulk_group [%q+32], [%s], 16; cp.async.bulk.commit_group;"""


@pytest.mark.parametrize(
    ("wait", "kinds"),
    [
        ("cp.async.bulk.wait_group 0;", []),
        # The source has been read, but the destination may not have been written.
        ("cp.async.bulk.wait_group.read 0;", ["global-race"]),
        ("cp.async.bulk.wait_group.read 0; cp.async.bulk.wait_group 0;", []),
        ("", ["global-race"]),
        # One group may be in flight: the other store's, or this one.
        (ANOTHER + "cp.async.bulk.wait_group 1;", []),
        ("cp.async.bulk.wait_group 1;", ["global-race"]),
    ],
)
def test_a_bulk_store_is_complete_when_its_group_has_been_waited_for(wait: str, kinds: list[str]) -> None:
    """Another CTA may read what was stored only after wait_group without .read, for this group."""
    y, result = run_body(STORE.replace("WAIT", wait), np.zeros(1), np.zeros(32, np.uint32), grid=2, check_outputs=False)
    assert [report.kind for report in result.reports] == kinds
    assert y[17] == 7
    assert all("wait_group, without .read" in report.message for report in result.reports)


def test_stores_of_several_lanes_are_complete_lane_by_lane() -> None:
    """The wait of one lane completes its own stores only: the data of a lane that does not wait is a race."""
    body = """
      mov.u32 %n, %ctaid.x; setp.ne.u32 %P, %n, 0; @%P bra other;
      mad.lo.u32 %v, %t, 16, %s; mad.wide.u32 %g, %t, 16, %q; st.shared.v4.u32 [%v], {%t, %t, %t, %t};
      fence.proxy.async; cp.async.bulk.global.shared::cta.bulk_group [%g], [%v], 16; cp.async.bulk.commit_group;
      setp.ne.u32 %Q, %t, SKIPPED; @%Q cp.async.bulk.wait_group 0; fence.acq_rel.gpu; bar.warp.sync -1;
      setp.eq.u32 %P, %t, 0; @%P st.release.gpu.global.u32 [%q+512], 1; cp.async.bulk.wait_group 0; bra out;
    other: ld.acquire.gpu.global.u32 %w, [%q+512]; setp.ne.u32 %P, %w, 1; @%P bra other;
      mad.wide.u32 %g, %t, 16, %q; ld.global.u32 %w, [%g]; mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g+1024], %w;
    out:"""
    for skipped, readers in ((32, set()), (5, {5})):
        text = body.replace("SKIPPED", str(skipped))
        y, result = run_body(text, np.zeros(1), np.zeros(288, np.uint32), grid=2, check_outputs=False)
        assert (y[256:] == np.arange(32)).all()
        assert {thread for report in result.reports for thread in report.access.threads} == readers


# Thread 0 writes 16 bytes to global memory and copies them to shared memory in bulk.
LOAD = """
  setp.ne.u32 %P, %t, 0; @%P bra out;
  add.u32 %bar, %s, 64; mbarrier.init.shared::cta.b64 [%bar], 1; fence.mbarrier_init.release.cluster;
  mov.u32 %u, 7; st.global.v4.u32 [%q], {%u, %u, %u, %u};
  FENCE
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 16;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [FROM], 16, [%bar];
again: mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0; @!%P bra again;
  ld.shared.u32 %w, [%s]; st.global.u32 [%q+64], %w;
out:"""


@pytest.mark.parametrize(
    ("fence", "start", "kinds"),
    [
        ("fence.proxy.async;", "%q", []),
        ("fence.proxy.async.global;", "%q", []),
        ("fence.proxy.async.shared::cta;", "%q", ["proxy-fence"]),
        ("fence.acq_rel.gpu;", "%q", ["proxy-fence"]),
        # Data from an earlier launch or from the host needs no fence.
        ("", "%p", []),
    ],
)
def test_a_bulk_load_of_what_threads_wrote(fence: str, start: str, kinds: list[str]) -> None:
    """A bulk load of global memory that a thread of the kernel wrote needs a proxy fence for global memory."""
    y, result = run_body(LOAD.replace("FENCE", fence).replace("FROM", start), np.full(8, 7, np.uint32),
                    np.zeros(32, np.uint32), check_outputs=False)  # fmt: skip
    assert [report.kind for report in result.reports] == kinds
    assert y[16] == 7


@pytest.mark.parametrize(("writer", "reader", "kinds"), [("", "", ["proxy-fence"]), ("F", "", []), ("", "F", [])])
def test_a_bulk_load_of_what_another_cta_wrote(writer: str, reader: str, kinds: list[str]) -> None:
    """The fence may be executed by the writer's CTA or by the one that copies."""
    fence = "fence.proxy.async.global;"
    between = f"""{writer.replace("F", fence)} mov.u32 %n, %ctaid.x; setp.eq.u32 %P, %n, 0;
      @%P st.release.gpu.global.u32 [%q+96], 1; @%P bra out;
    wait: ld.acquire.gpu.global.u32 %w, [%q+96]; setp.ne.u32 %P, %w, 1; @%P bra wait; {reader.replace("F", fence)}"""
    text = LOAD.replace("FENCE", between).replace("FROM", "%q")
    store = "st.global.v4.u32 [%q], {%u, %u, %u, %u};"
    text = text.replace(store, f"mov.u32 %n, %ctaid.x; setp.eq.u32 %Q, %n, 0; @%Q {store}")
    y, result = run_body(text, np.zeros(1), np.zeros(32, np.uint32), grid=2, check_outputs=False)
    assert [report.kind for report in result.reports] == kinds
    assert y[16] == 7
