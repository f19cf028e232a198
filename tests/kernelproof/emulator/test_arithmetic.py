"""Proves every arithmetic instruction against an exact reference, on edges of its operands and on drawn ones."""

from __future__ import annotations

import numpy as np
import pytest
from _pytest.mark import ParameterSet

from kernelproof import emulator
from kernelproof.emulator import Memory
from kernelproof.emulator.frontend.instruction import facts, registered
from kernelproof.emulator.frontend.parser import parse
from kernelproof.emulator.frontend.ptx import Instr, PtxError
from tests.kernelproof.emulator import conversion_cases, float_cases, integer_cases
from tests.kernelproof.emulator.lane_arithmetic import Case, Group, execute, mismatches, text_of

# All cases, by the name of their group.
GROUPS = {**float_cases.GROUPS, **integer_cases.GROUPS, **conversion_cases.GROUPS}
# Instructions that are not arithmetic of one lane, and the reasons why they have no cases here.
EXEMPT = {
    "accesses to memory": "ld ldu st red atom prefetch prefetchu discard applypriority createpolicy cvta isspacep mapa "
    "getctarank",
    "copies under way": "cp.async cp.async.commit_group cp.async.wait_group cp.async.wait_all cp.async.bulk st.async "
    "cp.async.bulk.tensor cp.async.bulk.prefetch.tensor cp.async.bulk.prefetch cp.async.bulk.commit_group "
    "cp.async.bulk.wait_group tensormap.replace tensormap.cp_fenceproxy",
    "order between threads": "bar bar.red bar.arrive bar.warp.sync barrier barrier.red barrier.arrive fence membar "
    "barrier.cluster.arrive barrier.cluster.wait emu_meet emu_vote emu_reduced membar.proxy fence.mbarrier_init "
    "fence.proxy fence.proxy.tensormap:generic griddepcontrol.wait griddepcontrol cp.async.mbarrier.arrive "
    "mbarrier.arrive_drop mbarrier.arrive mbarrier.expect_tx mbarrier.complete_tx mbarrier.init mbarrier.inval "
    "mbarrier.test_wait mbarrier.try_wait emu_try_wait emu_waited clusterlaunchcontrol.try_cancel "
    "clusterlaunchcontrol.query_cancel clusterlaunchcontrol.query_cancel.is_canceled "
    "clusterlaunchcontrol.query_cancel.get_first_ctaid setmaxnreg",
    "lanes of a warp together": "shfl.sync vote.sync match redux activemask elect",
    "matrices, in test_operand_types": "ldmatrix stmatrix movmatrix mma wmma.mma wmma.load wmma.store wgmma.fence "
    "wgmma.commit_group wgmma.wait_group wgmma.mma_async tcgen05.alloc tcgen05.dealloc tcgen05.ld tcgen05.st "
    "tcgen05.relinquish_alloc_permit tcgen05.wait:ld tcgen05.wait:st tcgen05.fence:before_thread_sync "
    "tcgen05.fence:after_thread_sync tcgen05.mma tcgen05.commit tcgen05.cp tcgen05.shift emu_loaded",
    "no result": "trap emu_nofunction emu_assertfail emu_vprintf nanosleep pmevent brkpt",
}


# The number of results that are compared in about a second.
FEW = 40_000


def _names(groups: dict[str, Group]) -> list[ParameterSet]:
    """The names of groups as parameters. Those with many results are marked slow."""
    return [
        pytest.param(name, marks=[pytest.mark.slow] if len(group.cases) * len(group.triples) > FEW else [])
        for name, group in groups.items()
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", _names(GROUPS))
def test_results_are_exact(name: str) -> None:
    group = GROUPS[name]
    assert mismatches(group, group.triples) == []


@pytest.mark.parametrize("name", [name for name, group in GROUPS.items() if group.uniform])
def test_operands_of_all_lanes_give_the_same(name: str) -> None:
    """Operands that all lanes share are Python ints. Each triple of them has a launch of its own."""
    group = GROUPS[name]
    assert mismatches(group, group.triples[:: len(group.triples) // 16 + 1], shared=True) == []


def test_every_arithmetic_instruction_has_cases() -> None:
    exempt = [opcode for opcodes in EXEMPT.values() for opcode in opcodes.split()]
    assert len(exempt) == len(set(exempt))
    forms = list(registered())
    assert set(exempt) <= {form.opcode for form in forms}
    tested = set()
    for group in GROUPS.values():
        (function,) = parse(text_of(group.cases)).kernels.values()
        tested |= {id(facts(item)) for item in function.body if isinstance(item, Instr)}
    untested = {form.opcode for form in forms if id(form) not in tested and form.opcode not in exempt}
    assert untested == set()


@pytest.mark.parametrize(
    ("statement", "modifier"),
    [
        ("cvt.pack.sat.s16.s32 %D, %A, %B;", "pack"),
        ("cvt.rn.relu.ftz.f16.f32 %m, %A;", "ftz"),
        ("fma.rn.oob.f16 %m, %h, %k, %l;", "oob"),
        ("add.f32.f16 %D, %h, %A;", "f32"),
        ("fma.rn.f32.bf16 %D, %h, %k, %A;", "f32"),
    ],
)
def test_a_modifier_that_changes_the_result_is_refused(statement: str, modifier: str) -> None:
    with pytest.raises(emulator.UnknownInstruction, match=rf"\.{modifier} is not modelled: .*; modelled: "):
        execute([Case(statement, 32, lambda *_: 0)], [(0, 0, 0)])


@pytest.mark.parametrize(
    "statement",
    ["vadd4.u32.u32.u32 %D.b10, %A, %B, %C;", "vset2.u32.u32.lt %D, %A.h00, %B, %C;", "min.f32 %D, %A, %B, %C;"],
)
def test_a_form_that_is_not_modelled_is_refused(statement: str) -> None:
    with pytest.raises((emulator.UnknownInstruction, PtxError)):
        execute([Case(statement, 32, lambda *_: 0)], [(0, 0, 0)])


def test_a_chain_on_launch_constants_and_on_lanes_gives_the_same() -> None:
    """``first`` puts the launch's constant n into %r1: directly, so that the emulator computes with Python ints, or by
    way of the thread's number, so that it computes with arrays."""
    chain = """
  add.s32 %r2, %r1, -7; mul.lo.s32 %r3, %r2, 48271; shr.s32 %r4, %r3, 5; xor.b32 %r5, %r4, %r3; shl.b32 %r6, %r5, 3;
  div.s32 %r7, %r6, 77; rem.s32 %r8, %r6, 13; min.s32 %r9, %r7, %r8; abs.s32 %r10, %r9; neg.s32 %r11, %r10;
  not.b32 %r12, %r11;
  mul.hi.s32 %r13, %r12, %r6; mul.wide.s32 %rd5, %r13, %r6; cvt.u32.u64 %r14, %rd5; cvt.s64.s32 %rd6, %r14;
  shr.s64 %rd7, %rd6, 9;
  cvt.u32.u64 %r15, %rd7; setp.lt.s32 %p1, %r15, %r14; selp.b32 %r16, %r15, %r3, %p1; mad.lo.s32 %r17, %r16, 3, %r12;
  cvt.s32.s8 %r18, %r17;
  add.s32 %r19, %r18, %r17; sub.s32 %r20, %r19, %r16; cvt.u32.u16 %r21, %rs1; max.u32 %r22, %r20, %r21;
  cnot.b32 %r23, %r22; add.s32 %r24, %r22, %r23;
"""

    def source(first: str) -> str:
        return f""".version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p, .param .u32 n) {{
  .reg .b32 %r<30>; .reg .b64 %rd<9>; .reg .b16 %rs<3>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [p]; mov.u32 %r0, %tid.x; {first} cvt.u16.u32 %rs1, %r1; {chain}
  mul.wide.u32 %rd2, %r0, 4; add.s64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], %r24; ret;
}}
"""

    varying = "ld.param.u32 %r29, [n]; sub.s32 %r28, %r0, %r0; add.s32 %r1, %r29, %r28;"
    for n in (0, 1, 7, 1000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF0, 123456789):
        results = []
        for first in ("ld.param.u32 %r1, [n];", varying):
            memory = Memory()
            out = memory.upload(np.empty(32, np.uint32), "output")
            assert emulator.load(source(first)).launch("k", 1, 32, [out, n], memory=memory).reports == []
            results.append(out.download())
        np.testing.assert_array_equal(results[0], results[1])
