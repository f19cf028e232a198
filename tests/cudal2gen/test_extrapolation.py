"""Proves that the modelled time of few simulated iterations, tiles and CTAs is that of simulating all of them.

The machine code is made up, so that simulations are small: loads from shared memory, MMAs and moves.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudal2gen.kernel import Record
from cudal2gen.timing.model import code as code_model
from cudal2gen.timing.model import memory
from kernelproof.sass import Instruction, Machine, Way, simulate
from kernelproof.sass.decoding import FREE
from tests.cudal2gen.paths import PINGPONG, ring, small


def instructions(opcode: str, count: int, **control: Any) -> tuple[Instruction, ...]:
    """So many equal instructions without operands."""
    return (Instruction(0, None, opcode, (), replace(FREE, **control)),) * count


MMA = "HMMA.16816.F16"  # 16 x 8 x 16
BEFORE, AFTER, NEXT = instructions("MOV", 7, stall=4), instructions("MOV", 5, stall=6), instructions("MOV", 3, stall=4)
# A warp of two multiplies a k-tile of 32 x 32 x 64 by 16 MMAs.
ITERATION = (*instructions("LDSM.16.M88.4", 2, write_barrier=0), *instructions(MMA, 16, waits=(0,)))


def workload(record: Record, iteration: tuple[Instruction, ...], persistent: bool, has_producer: bool = False) -> Any:
    """The work of a record with made-up machine code. ``has_producer``: whether another warpgroup copies."""
    way = Way(BEFORE, iteration, AFTER, NEXT if persistent else ())
    producer = (
        Way(instructions("MOV", 2), instructions("MOV", 1), instructions("MOV", 1), instructions("MOV", 1))
        if has_producer
        else None
    )
    ways: Any = SimpleNamespace(consumer=way, producer=producer)
    return code_model.Workload(record, ways, Machine(record.arch))


@pytest.mark.parametrize("tiles", [1, 2, 5])
@pytest.mark.parametrize("iterations", [1, 2, 3, 9, 60])
def test_all_tiles_and_iterations_take_what_they_take_if_simulated(
    iterations: int, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_model, "ISSUES", 400)  # about 8 iterations of two warps
    work = workload(small(k=64 * iterations), ITERATION, persistent=tiles > 1)
    assert work.iterations == iterations
    _, cycles, iteration = code_model._sub_core(work, 3, tiles)
    assert cycles == pytest.approx(
        simulate(code_model.streams(work, 3, iterations, tiles), work.machine).cycles, rel=0.02
    )
    # Three CTAs of two warps have two warps on the sub-core. A tensor core takes 8 cycles for an MMA.
    assert iteration == pytest.approx(2 * 16 * 8, rel=0.02 if iterations > 2 else 0.3)


@pytest.mark.parametrize("tiles", [2, 3, 4, 7, 8])
def test_tiles_that_alternate_between_warpgroups_take_what_they_take_if_simulated(
    tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_model, "ISSUES", 400)
    # A warpgroup's warp multiplies 16 x 32 x 64 by 16 MMAs.
    work = workload(ring(k=64 * 40, **PINGPONG), ITERATION, persistent=True, has_producer=True)
    assert (work.iterations, work.warps, work.concurrent_tiles) == (40, 4, 2)
    _, cycles, iteration = code_model._sub_core(work, 1, tiles)
    # The last of an odd number of tiles waits for its loads, which the model does not know.
    tolerance = 0.08 if tiles % 2 else 0.005
    assert cycles == pytest.approx(simulate(code_model.streams(work, 1, 40, tiles), work.machine).cycles, rel=tolerance)
    many, few = (simulate(code_model.streams(work, 1, count), work.machine).cycles for count in (40, 20))
    assert iteration == pytest.approx((many - few) / 20 / 2, rel=0.02)


def test_waves_of_ctas_follow_each_other() -> None:
    work = workload(small(k=64 * 4), ITERATION, persistent=False)
    alone = {ctas: simulate(code_model.streams(work, ctas, 4), work.machine_for(4)).cycles for ctas in (1, 2, 3, 4, 8)}
    for sm_ctas, at_once, expected in (
        (8, 8, alone[8]), (16, 8, 2 * alone[8]), (11, 8, alone[8] + alone[3]), (9, 4, 2 * alone[4] + alone[1]),
    ):  # fmt: skip
        assert code_model._busiest_sm(work, sm_ctas, at_once)[1] == pytest.approx(expected)
    persistent = workload(small(k=64 * 4), ITERATION, persistent=True)
    _, cycles, _ = code_model._busiest_sm(persistent, 12, 4)
    assert cycles == pytest.approx(simulate(code_model.streams(persistent, 4, 4, 3), work.machine).cycles, rel=0.02)


@settings(max_examples=40)
@given(st.integers(1, 90), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2))
def test_iterations_are_the_multiplications_that_are_left(steps: int, per: int, before: int, after: int) -> None:
    """``per``: k-tiles of an iteration; ``before``, ``after``: k-tiles that are multiplied outside of the loop."""
    mmas = instructions(MMA, 16)
    steps = max(1, steps) * per + before + after
    work = workload(small(k=64 * steps), mmas * per, persistent=False)
    way = replace(work.ways.consumer, before=BEFORE + mmas * before, after=mmas * after)
    work = replace(work, ways=SimpleNamespace(consumer=way, producer=None))
    assert work.iterations * per + before + after == steps == work.tile_steps
    # A simulation of fewer iterations has as many fewer groups of copies as k-tiles.
    fewer = max(1, work.iterations // 2)
    assert work.machine_for(fewer).copy_groups == steps - per * (work.iterations - fewer)


@settings(max_examples=12)
@given(st.integers(1, 96), st.integers(1, 96), st.booleans(), st.integers(1, 3))
def test_a_kernels_time_is_that_of_its_parts(rows: int, cols: int, persistent: bool, resident: int) -> None:
    """On an A100, whose L2 of 40 MiB keeps 20 MiB of D. SMs wait for device memory to store the rest while no tensor
    core works, unless CTAs are persistent."""
    record = small(m=64 * rows, n=64 * cols, k=64 * 3)
    work = workload(record, ITERATION, persistent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_model, "ISSUES", 100)
        patch.setattr(code_model, "Ways", lambda function: work.ways)
        function: Any = SimpleNamespace(registers=64)
        estimate = code_model.estimate_code(record, function, resident)
        rates, most = record.target.rates, -(-2 * rows * 2 * cols // 108)
        at_once = min(most, resident)
        assert estimate.resident == at_once
        work = replace(work, machine=code_model.machine_of(record, 108, at_once))
        _, cycles, iteration = code_model._busiest_sm(work, most, at_once)
    assert estimate.iteration_cycles == iteration
    assert estimate.sm_us == pytest.approx(cycles / 1380)
    assert estimate.main_us == pytest.approx(min(estimate.sm_us, most / at_once * 3 * iteration / 1380))
    moved = memory.dram_bytes(record, record.work, rates, 108 * at_once)
    assert estimate.dram_us == pytest.approx(moved / 1.7e6)
    beyond = 0 if persistent else max(0, 2 * 64 * rows * 64 * cols - 20 * 2**20)
    assert estimate.stores_us == pytest.approx(beyond / 1.7e6 * estimate.main_us / estimate.sm_us)
    assert estimate.around_us == pytest.approx(1.6), "a launch, without tensor maps or a split k"
    hidden = max(estimate.sm_us, estimate.dram_us - estimate.stores_us + 0.6)
    assert estimate.us == pytest.approx(1.6 + hidden + estimate.stores_us)
