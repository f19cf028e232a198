"""Proves the simulated warps of a sub-core by small streams of instructions whose cycles follow by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kernelproof import sass
from kernelproof.ground.chips import TMA_CYCLES
from kernelproof.sass import Instruction, Machine, Stall, Stream, Timeline, simulate
from kernelproof.sass.decoding import FREE
from kernelproof.sass.simulation import BARRIER_CYCLES, WAKE_CYCLES, steady_cycles

SM80, SM90 = Machine("sm_80"), Machine("sm_90a")
LDSM_CYCLES = 29  # until its result, from arXiv 2206.02874


def code(opcode: str, *operands: str, guard: str | None = None, **control: Any) -> Instruction:
    """An instruction with these control bits."""
    return Instruction(0, guard, opcode, operands, replace(FREE, **control))


# A tensor-core instruction and a load of its operands.
MMA = code("HMMA.16816.F16")
LDSM = code("LDSM.16.M88.4", write_barrier=0)


def simulate_warps(
    *warps: Sequence[Instruction], machine: Machine = SM80, iterations: int = 1, ctas: Sequence[int] = ()
) -> Timeline:
    """The timeline of warps that each execute a list of instructions. ``ctas``: the CTA of each warp; all are in CTA 0
    by default."""
    owners = ctas or [0] * len(warps)
    return simulate(
        [Stream(((warp, iterations),), cta) for warp, cta in zip(warps, owners, strict=True)], machine, detail=True
    )


def cycles(timeline: Timeline, warp: int = 0) -> list[float]:
    """The cycles in which a warp issues."""
    return [issue.cycle for issue in timeline.issues if issue.warp == warp]


def test_one_warp_alone() -> None:
    assert steady_cycles([MMA] * 5) == 40  # each takes 8 cycles of a tensor core
    assert steady_cycles([code("HMMA.1688.F16")] * 5) == 20
    assert steady_cycles([LDSM, code("HMMA.16816.F16", waits=(0,))]) == LDSM_CYCLES + 1
    assert steady_cycles([code("IADD3", stall=4), code("MOV")]) == 4 + 2  # the ALU has 16 lanes


def test_two_warps_share_a_tensor_core_and_the_one_that_issued_last_goes_on() -> None:
    timeline = simulate_warps([MMA] * 3, [MMA] * 3)
    # The youngest warp starts and continues (greedy, then youngest).
    assert cycles(timeline, 1) == [0, 8, 16]
    assert cycles(timeline, 0) == [24, 32, 40]
    assert timeline.busy[sass.Pipe.TENSOR] == 48
    throttled = timeline.issues[1].stalls
    assert throttled == {Stall.SELECTED: 1, Stall.MATH_PIPE_THROTTLE: 7}


def test_a_yielding_warp_lets_another_issue() -> None:
    nop = code("NOP", yields=True)
    assert cycles(simulate_warps([nop] * 2, [nop] * 2), 1) == [0, 2]
    assert cycles(simulate_warps([code("NOP")] * 2, [code("NOP")] * 2), 1) == [0, 1]


def test_a_scoreboard_is_free_when_its_result_is_there() -> None:
    timeline = simulate_warps([LDSM, code("MOV", waits=(0,))])
    assert cycles(timeline) == [0, LDSM_CYCLES]
    assert timeline.issues[1].stalls[Stall.SHORT_SCOREBOARD] == LDSM_CYCLES - 1
    # Two loads share one scoreboard. The younger one is done 4 cycles of shared memory after the older one.
    pair = [LDSM, LDSM]
    assert cycles(simulate_warps([*pair, code("DEPBAR.LE", "SB0", "0x1")]))[-1] == LDSM_CYCLES
    assert cycles(simulate_warps([*pair, code("DEPBAR.LE", "SB0", "0x0")]))[-1] == LDSM_CYCLES + 4


def test_a_full_memory_queue_holds_a_warp_back() -> None:
    many = 24
    at = cycles(simulate_warps([LDSM] * many))
    # One load of 512 bytes is served in 4 cycles, at 128 bytes a cycle, so load i leaves the queue in cycle 4 i (i from
    # 0). A load issues once at most five earlier ones are in the queue: load 9 waits until load 3 leaves in cycle 12.
    assert at == [*range(9), *range(12, 12 + 4 * (many - 9), 4)]
    shared = simulate_warps([LDSM] * many, machine=replace(SM80, sub_cores=4))
    assert cycles(shared)[-1] - cycles(shared)[-2] == 16  # each sub-core has a quarter of shared memory's bandwidth
    assert shared.issues[-1].stalls[Stall.MIO_THROTTLE] == 15


def test_warps_of_a_cta_wait_at_a_barrier_and_those_of_another_do_not() -> None:
    barrier, late = code("BAR.SYNC.DEFER_BLOCKING", "0x0"), code("MOV", stall=15)
    after = code("MOV")
    together = simulate_warps([barrier, after], [late] * 4 + [barrier, after])
    assert cycles(together, 0)[-1] >= 60 + BARRIER_CYCLES
    assert together.issues[-1].stalls.keys() >= {Stall.BARRIER}
    apart = simulate_warps([barrier, after], [late] * 4 + [barrier, after], ctas=(0, 1))
    assert cycles(apart, 0)[-1] <= 2 + BARRIER_CYCLES
    # A barrier does not wait for warps that have ended.
    assert (
        cycles(simulate_warps([barrier, after], [late] * 4, [late] * 20, ctas=(0, 0, 1)), 0)[-1] <= 61 + BARRIER_CYCLES
    )
    # A barrier for 128 threads has four warps, one per sub-core, so neither warp here waits for the other.
    named = code("BAR.SYNC.DEFER_BLOCKING", "0x1", "0x80")
    assert cycles(simulate_warps([named, after], [late] * 4 + [named, after]), 0)[-1] <= 2 + BARRIER_CYCLES


def ring_cycles(stages: int, latency: float) -> float:
    """Cycles per iteration of a ring by cp.async with all stages but one in flight; its MMAs take 80 cycles."""
    copy = [code("LDGSTS.E.BYPASS.LTC128B.128"), code("LDGDEPBAR", write_barrier=0)]
    iteration = [code("DEPBAR.LE", "SB0", hex(stages - 2), stall=4), *copy, *[MMA] * 10]
    ends = simulate([Stream(((copy * (stages - 1), 1), (iteration, 24)))], replace(SM80, l2_cycles=latency)).ends[0]
    return (ends[-1] - ends[8]) / (len(ends) - 9)  # skips the warm-up


def test_a_ring_that_is_too_shallow_waits_for_its_copies() -> None:
    assert ring_cycles(8, 300) == 80  # MMAs alone
    # With one stage in flight, a copy is issued 4 cycles after the wait for the previous one, and takes 300.
    assert ring_cycles(2, 300) == pytest.approx(300 + 4, abs=6)
    assert ring_cycles(3, 300) == pytest.approx(ring_cycles(2, 300) / 2, abs=3)
    assert ring_cycles(4, 300) == pytest.approx(ring_cycles(2, 300) / 3, abs=3)


def test_a_loaded_path_to_the_l2_bounds_copies() -> None:
    copy = code("LDGSTS.E.BYPASS.LTC128B.128")
    iteration = [*[copy] * 4, code("LDGDEPBAR", write_barrier=0), code("DEPBAR.LE", "SB0", "0x3", stall=4)]
    timeline = simulate([Stream(((iteration, 40),))], replace(SM80, l2_bytes=16))
    ends = timeline.ends[0]
    assert (ends[-1] - ends[-11]) / 10 == pytest.approx(4 * 512 / 16, rel=0.01)


def test_warpgroups_multiply_asynchronously_until_they_are_waited_for() -> None:
    mma = code("HGMMA.64x256x16.F32", "R24", "gdesc[UR4]", "R24")
    last = code("HGMMA.64x256x16.F32", "R24", "gdesc[UR4]", "R24", "gsb0")
    wait = code("WARPGROUP.DEPBAR.LE", "gsb0", "0x0")
    timeline = simulate_warps([mma, last, wait], machine=SM90)
    assert cycles(timeline) == [0, 1, 256]  # each takes 128 cycles, but does not delay the warp's next instruction
    assert timeline.issues[-1].stalls[Stall.GMMA] == 254


def roles(stages: int, iterations: int = 12) -> float:
    """Cycles per iteration of a consumer that multiplies one MMA of 128 cycles, and waits for a producer with TMA."""
    fills = range(iterations)
    consumer = [
        code("SYNCS.PHASECHK.TRANS64.TRYWAIT", "P0", write_barrier=1),
        code("BRA", guard="!P0", waits=(1,)),
        code("HGMMA.64x256x16.F32", "R24", "gdesc[UR4]", "R24", "gsb0"),
        code("WARPGROUP.DEPBAR.LE", "gsb0", "0x0"),
        code("SYNCS.ARRIVE.TRANS64.A1T0", "RZ"),
    ]
    producer = [
        code("SYNCS.PHASECHK.TRANS64.TRYWAIT", "P0", write_barrier=1),
        code("BRA", guard="!P0", waits=(1,)),
        code("UTMALDG.2D", "[UR8]"),
    ]
    machine = replace(SM90, stages=stages, l2_cycles=263, l2_bytes=64, fill_bytes=4096)
    warps = [
        Stream(((consumer, iterations),), fills=fills),
        Stream(((producer, iterations),), fills=fills, produces=True),
    ]
    ends = simulate(warps, machine).ends[0]
    return (ends[-1] - ends[4]) / (iterations - 5)


def test_a_producer_fills_what_consumers_hand_back() -> None:
    alone = roles(1)
    # The ring has one stage. Each round is a load by TMA, an MMA, and a wake of each side.
    assert alone == pytest.approx(263 + TMA_CYCLES + 4096 / 64 + 128 + 2 * WAKE_CYCLES, rel=0.05)
    assert roles(2) == pytest.approx(alone / 2, rel=0.1)
    assert roles(8) == pytest.approx(128, rel=0.15)
