"""Proves that the emulator reports a fence, release or acquire whose scope is too narrow for two CTAs.

It reports none whose scope suffices. The CTAs are those of a cluster or of a grid.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernelproof.emulator import Memory
from tests.kernelproof.emulator.hopper_ptx import entry, exchange, launch

# CTA 1 writes to its own shared memory and arrives at CTA 0, which waits and then reads what CTA 1 wrote.
READ_REMOTE_KERNEL = """
  add.u32 %bar, %s, 1024; mov.u32 %n, %cluster_ctarank; mad.lo.u32 %v, %t, 4, %s;
  setp.ne.u32 %P, %t, 0; @%P bra ready;
  mbarrier.init.shared::cta.b64 [%bar], 32; fence.mbarrier_init.release.cluster;
ready:
  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
  setp.eq.u32 %Q, %n, 0; @%Q bra again;
  st.shared.u32 [%v], %t; BEFORE
  mapa.shared::cluster.u32 %x2, %bar, 0; mbarrier.arrive{release}.shared::cluster.b64 _, [%x2];
  bra done;
again: mbarrier.try_wait.parity{acquire}.shared::cta.b64 %P, [%bar], 0; @!%P bra again; AFTER
  mapa.shared::cluster.u32 %x1, %v, 1; ld.shared::cluster.u32 %w, [%x1];
  mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %w;
done:
  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
# The other way round: CTA 1 has read, and CTA 0 may overwrite.
OVERWRITE_REMOTE_KERNEL = """
  add.u32 %bar, %s, 1024; mov.u32 %n, %cluster_ctarank; mad.lo.u32 %v, %t, 4, %s;
  setp.ne.u32 %P, %t, 0; @%P bra ready;
  mbarrier.init.shared::cta.b64 [%bar], 32; fence.mbarrier_init.release.cluster;
ready: st.shared.u32 [%v], %t;
  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
  setp.eq.u32 %Q, %n, 0; @%Q bra again;
  ld.shared.u32 %w, [%v]; mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %w; BEFORE
  mapa.shared::cluster.u32 %x2, %bar, 0; mbarrier.arrive{release}.shared::cluster.b64 _, [%x2];
  bra done;
again: mbarrier.try_wait.parity{acquire}.shared::cta.b64 %P, [%bar], 0; @!%P bra again; AFTER
  mapa.shared::cluster.u32 %x1, %v, 1; st.shared::cluster.u32 [%x1], 7;
done:
  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""


def cluster_findings(text: str, release: str, acquire: str, before: str = "", after: str = "") -> set[str]:
    """The kinds of findings if a cluster's CTAs exchange numbers with this release and acquire, which are suffixes of
    the arrival and of the wait. ``before``, ``after``: instructions before the arrival and after the wait."""
    text = text.replace("{release}", release).replace("{acquire}", acquire)
    values, reports = exchange(text.replace("BEFORE", before).replace("AFTER", after))
    assert (values[:32] == np.arange(32)).all()
    return {report.split(":")[0] for report in reports}


FENCE = "fence.acq_rel.cluster;"
SHARED_RELEASE = "fence.release.sync_restrict::shared::cta.cluster;"
SHARED_ACQUIRE = "fence.acquire.sync_restrict::shared::cluster.cluster;"


@pytest.mark.parametrize(
    ("release", "acquire", "before", "after", "expected"),
    [
        (".release.cluster", ".acquire.cluster", "", "", set()),
        ("", "", "", "", {"memory-scope"}),
        (".release.cta", ".acquire.cluster", "", "", {"memory-scope"}),
        (".release.cluster", "", "", "", {"memory-scope"}),
        (".release.cluster", ".relaxed.cluster", "", "", {"memory-scope"}),
        (".release.cluster", ".relaxed.cluster", "", FENCE, set()),
        (".relaxed.cluster", ".acquire.cluster", "", "", {"shared-race"}),
        (".relaxed.cluster", ".acquire.cluster", FENCE, "", set()),
        (".relaxed.cluster", ".relaxed.cluster", FENCE, FENCE, set()),
        (".relaxed.cluster", ".relaxed.cluster", FENCE, "fence.acq_rel.cta;", {"memory-scope"}),
        (".relaxed.cluster", ".acquire.cluster", "fence.acq_rel.cta;", "", {"shared-race"}),
        ("", "", FENCE, FENCE, {"memory-scope"}),
        (".relaxed.cluster", ".relaxed.cluster", SHARED_RELEASE, SHARED_ACQUIRE, set()),
        (".relaxed.cluster", ".relaxed.cluster", SHARED_ACQUIRE, SHARED_ACQUIRE, {"shared-race"}),
        (".relaxed.cluster", ".relaxed.cluster", SHARED_RELEASE, SHARED_RELEASE, {"memory-scope"}),
        (".relaxed.cluster", ".relaxed.cluster", "fence.release.cluster;", "fence.acquire.cluster;", set()),
        (".relaxed.cluster", ".acquire.cluster", "fence.acquire.cluster;", "", {"shared-race"}),
        (".release.cluster", ".relaxed.cluster", "", "fence.release.cluster;", {"memory-scope"}),
    ],
)
def test_data_between_the_ctas_of_a_cluster(
    release: str, acquire: str, before: str, after: str, expected: set[str]
) -> None:
    assert cluster_findings(READ_REMOTE_KERNEL, release, acquire, before, after) == expected


@pytest.mark.parametrize(
    ("release", "expected"),
    [("", set()), (".release.cluster", set()), (".relaxed.cluster", {"shared-race"})],
)
def test_permission_needs_no_cluster_scope(release: str, expected: set[str]) -> None:
    assert cluster_findings(OVERWRITE_REMOTE_KERNEL, release, "") == expected


def test_a_relaxed_arrival_permits_after_the_reads_are_complete() -> None:
    """The store of what was read, and the barrier of the warp, come after the loads; so no load is left to be
    ordered."""
    assert cluster_findings(OVERWRITE_REMOTE_KERNEL, ".relaxed.cluster", "", "bar.warp.sync -1;") == set()


# --- global memory ---

# CTA 0 writes data, then a flag; CTA 1 polls the flag and reads the data.
FLAG_KERNEL = """
  mov.u32 %n, %ctaid.x; setp.ne.u32 %P, %t, 0; @%P bra done; setp.eq.u32 %Q, %n, 1; @%Q bra again;
  st.global.u32 [%q], 5; {before} {set}
  bra done;
again: {poll} setp.eq.u32 %P, %w, 0; @%P bra again; {after}
  {read} st.global.u32 [%q+4], %w;
done:"""
# How CTA 0 sets the flag and CTA 1 polls it, in a scope.
SET, POLL = "st.relaxed.{}.global.u32 [%p], 1;", "ld.relaxed.{}.global.u32 %w, [%p];"


def flag_findings(cluster: int = 1, **parts: str) -> set[str]:
    """The kinds of findings if one CTA waits for a flag of another; ``parts`` replace instructions."""
    memory = Memory()
    flag = memory.allocate(4, "scratch", name="flag")
    flag.bytes()[:] = 0
    assert flag.written is not None
    flag.written[:] = 1
    out = memory.upload(np.zeros(2, np.uint32), "inout")
    body = FLAG_KERNEL
    for name, text in ({"read": "ld.global.u32 %w, [%q];"} | parts).items():
        body = body.replace("{" + name + "}", text)
    settings: dict[str, Any] = {"grid": 2, "cluster": cluster, "check_outputs": False}
    result = launch(entry(body), [flag, out], memory, **settings)
    assert (out.download() == 5).all()
    return {report.kind for report in result.reports}


@pytest.mark.parametrize(
    ("scope", "fence", "cluster", "wrong"),
    [
        ("gpu", "gpu", 1, False),
        ("sys", "sys", 1, False),
        ("gpu", "cta", 1, True),
        ("gpu", "cluster", 1, True),
        ("gpu", "cluster", 2, False),
        ("cluster", "gpu", 1, True),
        ("cluster", "gpu", 2, False),
        ("cta", "gpu", 2, True),
    ],
)
def test_fences_and_flags_between_ctas(scope: str, fence: str, cluster: int, wrong: bool) -> None:
    fence = f"fence.acq_rel.{fence};"
    reported = flag_findings(cluster, before=fence, set=SET.format(scope), poll=POLL.format(scope), after=fence)
    assert reported == ({"global-race"} if wrong else set())


@pytest.mark.parametrize("use", ["", "st.global.u32 [%q+4], %x1;"])
def test_an_atomic_acquires_whether_its_result_is_used_or_not(use: str) -> None:
    """The polling load has seen the flag set, so the atomic reads the set flag too, and can acquire by it."""
    acquire = "atom.acquire.gpu.global.add.u32 %x1, [%p], 0; " + use
    parts = {"before": "fence.acq_rel.gpu;", "set": SET.format("gpu"), "poll": POLL.format("gpu")}
    assert flag_findings(**parts, after=acquire) == set()
    assert flag_findings(**parts, after=acquire.replace(".acquire", ".relaxed")) == {"global-race"}


# CTA 1 writes to global memory instead of its own shared memory.
READ_GLOBAL_KERNEL = READ_REMOTE_KERNEL.replace(
    "st.shared.u32 [%v], %t;", "mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g+128], %t;"
).replace("ld.shared::cluster.u32 %w, [%x1];", "mad.wide.u32 %g, %t, 4, %q; ld.global.u32 %w, [%g+128];")


@pytest.mark.parametrize("before", [FENCE, SHARED_RELEASE])
@pytest.mark.parametrize("after", [FENCE, SHARED_ACQUIRE])
def test_fences_of_shared_memory_order_no_global_memory(before: str, after: str) -> None:
    expected = set() if before == after == FENCE else {"global-race"}
    assert cluster_findings(READ_GLOBAL_KERNEL, ".relaxed.cluster", ".relaxed.cluster", before, after) == expected
    # A full fence after a restricted one makes up for it.
    assert (
        cluster_findings(READ_GLOBAL_KERNEL, ".relaxed.cluster", ".relaxed.cluster", before + FENCE, after + FENCE)
        == set()
    )


@pytest.mark.parametrize(
    ("before", "after", "wrong"),
    [
        ("fence.release.gpu;", "fence.acquire.gpu;", False),
        ("fence.acquire.gpu;", "fence.acq_rel.gpu;", True),
        ("fence.acq_rel.gpu;", "fence.release.gpu;", True),
        (SHARED_RELEASE, "fence.acq_rel.cluster;", True),
        ("fence.acq_rel.cluster;", SHARED_ACQUIRE, True),
    ],
)
def test_fences_of_one_direction_and_of_shared_memory_with_flags(before: str, after: str, wrong: bool) -> None:
    cluster = 2 if "cluster" in before else 1
    reported = flag_findings(cluster, before=before, set=SET.format("gpu"), poll=POLL.format("gpu"), after=after)
    assert reported == ({"global-race"} if wrong else set())


@pytest.mark.parametrize(("scope", "wrong"), [("gpu", False), ("cta", True), ("cluster", True)])
def test_release_and_acquire_between_ctas(scope: str, wrong: bool) -> None:
    parts = {"before": "", "after": ""}
    release, acquire = f"st.release.{scope}.global.u32 [%p], 1;", f"ld.acquire.{scope}.global.u32 %w, [%p];"
    reported = flag_findings(**parts, set=release, poll=acquire)
    assert reported == ({"global-race"} if wrong else set())
    exchanged = f"atom.release.{scope}.global.exch.b32 %x0, [%p], 1;"
    assert flag_findings(**parts, set=exchanged, poll=acquire) == ({"global-race"} if wrong else set())


@pytest.mark.parametrize(
    ("read", "wrong"), [("ld.global.cg", True), ("ld.global.cv", True), ("ld.relaxed.gpu.global", False)]
)
@pytest.mark.parametrize("order", ["relaxed", "acquire"])
def test_cache_operators_are_hints(read: str, wrong: bool, order: str) -> None:
    """Data is ordered after an acquiring read of its flag. A .cg or .cv read of the data does not make up for a relaxed
    one."""
    release, poll = "st.release.gpu.global.u32 [%p], 1;", f"ld.{order}.gpu.global.u32 %w, [%p];"
    reported = flag_findings(before="", after="", set=release, poll=poll, read=f"{read}.u32 %w, [%q];")
    assert reported == ({"global-race"} if order == "relaxed" and wrong else set())


def test_a_release_covers_its_own_flag_only() -> None:
    parts = {"before": "st.release.gpu.global.u32 [%q+4], 0;", "after": "fence.acq_rel.gpu;"}
    assert "global-race" in flag_findings(**parts, set=SET.format("gpu"), poll=POLL.format("gpu"))


@pytest.mark.parametrize(("scope", "wrong"), [("", False), (".gpu", False), (".cta", True)])
def test_atomics_of_several_ctas(scope: str, wrong: bool) -> None:
    memory = Memory()
    counter = memory.upload(np.zeros(1, np.uint32), "inout")
    body = f"red.relaxed{scope}.global.add.u32 [%p], 1;" if scope else "red.global.add.u32 [%p], 1;"
    result = launch(entry(body), [counter, counter], memory, grid=4, check_outputs=False)
    assert {report.kind for report in result.reports} == ({"global-race"} if wrong else set())
    assert (counter.download() == 128).all()
