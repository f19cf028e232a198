"""Proves that each warp's fences order its own accesses to tensor memory, and those of no other warp."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernelproof.emulator.test_tensor_memory import launch

# Each of warps 0 to 3 stores a word per lane, which the warp four further loads. The steps in between are the wait for
# the stores, the fence before the barrier, and the fence after it.
STEPS = {
    "wait": "tcgen05.wait::st.sync.aligned;",
    "before": "tcgen05.fence::before_thread_sync;",
    "after": "tcgen05.fence::after_thread_sync;",
}


def handover_body(step: str = "", warp: int = -1) -> str:
    """The body in which a warp leaves out a step of ``STEPS``. By default no warp leaves anything out."""
    guarded = {
        name: f"setp.eq.u32 %F, %w, {warp}; @%F bra past_{name}; {text} past_{name}:" if name == step else text
        for name, text in STEPS.items()
    }
    return f"""
  .reg .pred %F, %R; .reg .b32 %w;
  shr.u32 %w, %t, 5; setp.ge.u32 %R, %t, 128; @%R bra meet;
  mad.wide.u32 %g, %t, 4, %p; ld.global.u32 %a0, [%g];
  tcgen05.st.sync.aligned.32x32b.x1.b32 [%own], {{%a0}};
  {guarded["wait"]} {guarded["before"]}
meet:
  bar.sync 0; @!%R bra done;
  {guarded["after"]}
  tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%b0}}, [%own]; tcgen05.wait::ld.sync.aligned;
  add.u32 %u, %t, -128; mad.wide.u32 %g, %u, 4, %q; st.global.u32 [%g], %b0;
done:
"""


@pytest.mark.parametrize("step", STEPS)
def test_what_a_warp_leaves_out_is_found_of_that_warp(step: str) -> None:
    x = np.arange(7, 135, dtype=np.uint32)
    for warp in range(4):
        # Warps 0 to 3 store to tensor memory and execute the steps "wait" and "before". Warp ``warp + 4`` loads what
        # ``warp`` has stored, and executes the step "after".
        left_out = warp + 4 * (step == "after")
        _, result = launch(handover_body(step, left_out), x, np.empty(128, np.uint32), block=256)
        assert {report.kind for report in result.reports} == {"tensor-memory-race"}
        assert result.reports[0].threads[0] // 32 == warp + 4


def test_warps_that_leave_nothing_out_hand_over_what_they_stored() -> None:
    x = np.arange(7, 135, dtype=np.uint32)
    got, result = launch(handover_body(), x, np.empty(128, np.uint32), block=256)
    assert result.reports == []
    np.testing.assert_array_equal(got, x)
