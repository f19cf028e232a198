"""Proves the phases, waits and deadlocks of mbarriers, and that their misuse is reported."""

from __future__ import annotations

import numpy as np
import pytest

from kernelproof.emulator import Options
from tests.kernelproof.emulator.hopper_ptx import (
    run_body,
)


def test_mbarrier_states_and_phases() -> None:
    """A phase completes when all arrivals and bytes have come, and test_wait by state and by parity tell it."""
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
    got, result = run_body(body, np.zeros(1, np.uint32), np.empty(6, np.uint32))
    assert result.reports == []
    assert got.tolist() == [0, 1, 0, 1, 1, 0]


def test_try_wait_gives_up_where_nothing_else_can_run() -> None:
    # A try_wait has a time limit, so the loop that counts its failures ends.
    body = """
      mov.u32 %bar, s; mbarrier.init.shared::cta.b64 [%bar], 64; bar.warp.sync -1; mov.u32 %x0, 0;
      mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0, 100; @!%P add.u32 %x0, %x0, 1;
      mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %x0;"""
    got, _ = run_body(body, np.zeros(1, np.uint32), np.empty(32, np.uint32))
    assert (got == 1).all()


@pytest.mark.parametrize(("between", "failures"), [("", [1, 0]), ("bar.sync 0;", [0, 0])])
@pytest.mark.parametrize("adverse", [False, True])
def test_a_wait_may_come_before_an_arrival_that_nothing_orders(
    between: str, failures: list[int], adverse: bool
) -> None:
    # Thread 32 completes the phase. Its own warp is ordered after that. Another warp is ordered only by a barrier
    # between.
    body = f"""
      mov.u32 %bar, s; setp.eq.u32 %P, %t, 0; @%P mbarrier.init.shared::cta.b64 [%bar], 1; bar.sync 0;
      mov.u32 %x0, 0; setp.eq.u32 %P, %t, 32; @%P mbarrier.arrive.shared::cta.b64 _, [%bar]; {between}
    again: mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0; @!%P add.u32 %x0, %x0, 1; @!%P bra again;
      mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %x0;"""
    options = Options(adverse=adverse)
    got, result = run_body(body, np.zeros(1, np.uint32), np.empty(64, np.uint32), block=64, options=options)
    assert result.reports == []
    assert got.reshape(2, 32).min(axis=1).tolist() == got.reshape(2, 32).max(axis=1).tolist() == failures


def test_deadlock_names_barrier_phase_and_threads() -> None:
    """The report of a deadlock has the mbarrier, its phase, the missing arrivals and the waiting threads."""
    body = """
      mov.u32 %bar, s; setp.ne.u32 %P, %t, 0; @%P bra wait;
      mbarrier.init.shared::cta.b64 [%bar], 2; mbarrier.arrive.shared::cta.b64 _, [%bar];
    wait: bar.warp.sync -1;
    again: mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0; @!%P bra again;"""
    _, result = run_body(body, np.zeros(1), np.empty(0), check_outputs=False)
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
    _, result = run_body(body, np.zeros(1), np.empty(0), block=1, check_outputs=False)
    (report,) = result.reports
    assert "phase 0 lacks 0 of 1 arrivals, and has 16 bytes more than expect_tx named" in report.message


def test_uninitialised_and_overfull_mbarriers() -> None:
    """An arrival at an mbarrier without initialisation is reported, and so is one that exceeds its count."""
    _, result = run_body("mbarrier.arrive.shared::cta.b64 _, [%s];", np.zeros(1), np.empty(0), check_outputs=False)
    assert [r.kind for r in result.reports] == ["mbarrier"]
    body = "mbarrier.init.shared::cta.b64 [%s], 2; bar.warp.sync -1; mbarrier.arrive.shared::cta.b64 _, [%s], 3;"
    _, result = run_body(body, np.zeros(1), np.empty(0), block=1, check_outputs=False)
    assert "expects 2 more of 2" in result.reports[0].message


def test_initialisation_must_be_visible() -> None:
    """Threads that use an mbarrier must be ordered after its initialisation."""
    body = """setp.ne.u32 %P, %t, 0; @!%P mbarrier.init.shared::cta.b64 [%s], 64; BARRIER
      mbarrier.arrive.shared::cta.b64 _, [%s];"""
    for barrier, count in (("bar.sync 0;", 0), ("", 1)):
        _, result = run_body(body.replace("BARRIER", barrier), np.zeros(1), np.empty(0), block=64, check_outputs=False)
        assert len(result.reports) == count, result.reports


def test_cp_async_mbarrier_arrive() -> None:
    """cp.async.mbarrier.arrive completes a phase when the copies of all threads have landed; without a wait they are in
    flight."""
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
    got, result = run_body(body.replace("WAIT", wait), x, np.empty(128, np.uint32))
    assert result.reports == []
    assert (got == x).all()
    _, result = run_body(body.replace("WAIT", ""), x, np.empty(128, np.uint32))
    assert {r.kind for r in result.reports} == {"in-flight"}


def test_polling_lets_the_others_run() -> None:
    """A loop of test_wait lets the threads run that it waits for; if nobody arrives, it is a deadlock."""
    body = """
      setp.eq.u32 %P, %t, 0; @%P mbarrier.init.shared::cta.b64 [%s], 32; bar.sync 0;
      setp.gt.u32 %P, %t, 31; @%P bra last;
    again: mbarrier.test_wait.parity.shared::cta.b64 %Q, [%s], 0; @!%Q bra again;
      bra out;
    last: ARRIVE
    out: mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %t;"""
    arrive = "mbarrier.arrive.shared::cta.b64 _, [%s];"
    got, result = run_body(body.replace("ARRIVE", arrive), np.zeros(1), np.empty(64, np.uint32), block=64)
    assert result.reports == []
    assert got.tolist() == list(range(64))
    _, result = run_body(
        body.replace("ARRIVE", ""), np.zeros(1), np.empty(64, np.uint32), block=64, check_outputs=False
    )
    assert [r.kind for r in result.reports] == ["deadlock"]


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
    phases, result = run_body(body, np.zeros(1, np.uint32), np.empty(32, np.uint32))
    assert result.reports == []
    assert (phases == 1 + 4).all()


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("expected", [17, 20, 31, 32, 33, 40])
@pytest.mark.parametrize("dropped", [False, True])
def test_arrivals_of_many_lanes_are_one_after_the_other(expected: int, each: int, dropped: bool) -> None:
    """An instruction may complete a phase and begin the next one. As many lanes as complete phases find theirs over,
    and an arrival that is dropped counts once."""
    drop = "_drop" if dropped else ""
    body = f"""
      mov.u32 %bar, s; setp.eq.u32 %P, %t, 0; @%P mbarrier.init.shared::cta.b64 [%bar], {expected * each};
      bar.sync 0;
      mbarrier.arrive{drop}.shared::cta.b64 %d0, [%bar], {each};
      bar.warp.sync -1;
      mbarrier.test_wait.shared::cta.b64 %Q, [%bar], %d0; selp.u32 %x0, 1, 0, %Q;
      mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %x0;"""
    lanes = min(32, expected) if dropped else 32
    got, result = run_body(body, np.zeros(1, np.uint32), np.empty(lanes, np.uint32), block=lanes)
    assert [report.kind for report in result.reports] == ["phase-at-exit"] * (lanes % expected > 0 and not dropped)
    assert got.sum() == lanes // expected * expected
