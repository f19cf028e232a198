"""Proves that instructions of a warp wait for the lanes that their mask names, if these wait for something else.

The instructions are shuffles, votes, matches and reductions. Some lanes wait for memory or at an mbarrier.
"""

from __future__ import annotations

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import Memory, Options
from tests.kernelproof.emulator.hopper_ptx import run_body

# The numbers of a warp's lanes.
LANES = np.arange(32)
# Lane 3 waits for the second warp, from which it gets 42. The other lanes of the first warp continue with 7.
WAIT = """
  setp.eq.u32 %P, %t, 0; @%P mbarrier.init.shared::cta.b64 [%s], 1; bar.sync 0;
  mov.u32 %v, 7; mov.u32 %w, 0; setp.gt.u32 %P, %t, 31; @%P bra other;
  setp.ne.u32 %P, %t, 3; @%P bra join;
again: mbarrier.try_wait.parity.shared::cta.b64 %Q, [%s], 0; @!%Q bra again;
  ld.shared.u32 %v, [%s+16];
join: setp.eq.u32 %E, %v, 42; setp.gt.u32 %P, %t, 15;
  COLLECTIVE
  bra store;
other: setp.ne.u32 %P, %t, 32; @%P bra store;
  st.shared.u32 [%s+16], 42; ARRIVE
store: mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %w;"""
# An arrival at the mbarrier.
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%s];"
# By instruction: the value of %w in each lane of the first warp. %v is 42 in lane 3 and 7 in the others, %E is true in
# lane 3, and %P in lanes 16 to 31.
COLLECTIVES = {
    "shfl.sync.idx.b32 %w, %v, 3, 31, -1;": np.full(32, 42),
    "vote.sync.ballot.b32 %w, %E, -1;": np.full(32, 8),
    "match.any.sync.b32 %w, %v, -1;": np.where(LANES == 3, 8, 0xFFFFFFF7),
    "redux.sync.max.u32 %w, %v, 0xffffffff;": np.full(32, 42),
    "shfl.sync.up.b32 %u, %v, 1, 0, -1; add.u32 %v, %v, %u; shfl.sync.idx.b32 %w, %v, 4, 31, -1;": np.full(32, 49),
    # Masks are a part of the warp without and with the lane that waits, and each lane's half.
    "@%P redux.sync.max.u32 %w, %v, 0xffff0000;": np.where(LANES > 15, 7, 0),
    "@%P bra store; redux.sync.max.u32 %w, %v, 0xffff;": np.where(LANES > 15, 0, 42),
    "selp.b32 %u, 0xffff0000, 0xffff, %P; redux.sync.max.u32 %w, %v, %u;": np.where(LANES > 15, 7, 42),
}


@pytest.mark.parametrize("adverse", [False, True])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_lanes_at_an_mbarrier_are_waited_for(collective: str, adverse: bool) -> None:
    body = WAIT.replace("COLLECTIVE", collective).replace("ARRIVE", ARRIVE)
    got, result = run_body(body, np.zeros(1), np.empty(64, np.uint32), block=64, options=Options(adverse=adverse))
    assert result.reports == []
    assert got.tolist() == [*COLLECTIVES[collective], *[0] * 32]


def test_lanes_that_never_come_are_a_deadlock() -> None:
    vote = WAIT.replace("COLLECTIVE", "vote.sync.ballot.b32 %w, %E, -1;").replace("ARRIVE", "")
    _, result = run_body(vote, np.zeros(1), np.empty(64, np.uint32), block=64, check_outputs=False)
    assert [r.kind for r in result.reports] == ["deadlock"]
    assert "31 threads (0-2, 4-31) wait at an instruction that their warp executes together" in str(result.reports[0])
    assert "1 threads (3) wait at the mbarrier" in str(result.reports[0])


@pytest.mark.parametrize(
    ("after", "rule"),
    [("", "warp-divergence"), ("bar.sync 0;", "deadlock"), ("vote.sync.ballot.b32 %u, %E, -1;", "deadlock")],
)
def test_lanes_that_go_elsewhere_are_reported(after: str, rule: str) -> None:
    """Lanes 0 to 15 vote with a mask of all lanes. The others skip the vote, and exit or wait at ``after``."""
    body = f"""
      setp.eq.u32 %P, %t, 0; @%P mbarrier.init.shared::cta.b64 [%s], 1; mov.u32 %w, 0;
      setp.gt.u32 %P, %t, 15; @%P bra over;
      vote.sync.any.pred %Q, %P, -1;
    over: {after} mad.wide.u32 %g, %t, 4, %q; st.global.u32 [%g], %w;"""
    _, result = run_body(body, np.zeros(1), np.empty(32, np.uint32), check_outputs=False)
    assert [r.kind for r in result.reports] == [rule]


# Lane 0 of CTA 0 polls a flag in global memory that CTA 1 sets to 42, while its other lanes wait for it at a shuffle.
POLL = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 y) {
  .reg .b32 %t, %c, %v; .reg .b64 %p, %q, %g; .reg .pred %P;
  ld.param.u64 %p, [x]; ld.param.u64 %q, [y]; mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x; mov.u32 %v, 0;
  setp.eq.u32 %P, %c, 1; @%P bra other;
  setp.ne.u32 %P, %t, 0; @%P bra join;
again: ld.acquire.gpu.global.u32 %v, [%p]; setp.eq.u32 %P, %v, 0; @%P bra again;
join: shfl.sync.idx.b32 %v, %v, 0, 31, -1;
store: mad.lo.u32 %c, %c, 32, %t; mad.wide.u32 %g, %c, 4, %q; st.global.u32 [%g], %v;
  ret;
other: setp.ne.u32 %P, %t, 0; @%P bra store;
  st.release.gpu.global.u32 [%p], 42; bra store;
}
"""


def test_lanes_that_poll_global_memory_are_waited_for() -> None:
    memory = Memory()
    out = memory.upload(np.empty(64, np.uint32), "output")
    flag = memory.upload(np.zeros(1, np.uint32), "inout")
    result = emulator.load(POLL).launch("k", grid=2, block=32, args=[flag, out], memory=memory)
    assert result.reports == []
    assert out.download().tolist() == [42] * 32 + [0] * 32
