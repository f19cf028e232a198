"""Proves that barriers in loops of different lengths are errors if and only if warps synchronise at different
barriers."""

from __future__ import annotations

import numpy as np
import pytest

from kernelproof.emulator import Memory, Report
from tests.kernelproof.emulator.kernel_cases import program

LOOPS = "barrier_loops"  # the name of the CUDA file with these kernels


def launch_kernel(kernel: str, grid: int, block: int, *numbers: int) -> tuple[list[Report], list[float]]:
    """The findings of a launch, and the content of its buffer afterwards.

    The buffer has one float for each thread of a block. ``numbers``: the kernel's arguments after the buffer. Those of
    ``rounds`` are: rounds of warp 0, rounds of the other warps, whether a barrier follows the loop, and the number of
    threads that exit before it.
    """
    memory = Memory()
    out = memory.upload(np.zeros(block, np.float32), "inout")
    result = program(LOOPS).launch(kernel, grid, block, [out, *numbers], memory=memory)
    return result.reports, out.download().tolist()


def kinds(reports: list[Report]) -> set[str]:
    """The rules of findings."""
    return {report.kind for report in reports}


@pytest.mark.parametrize("grid", [1, 3])
@pytest.mark.parametrize(("first", "rest"), [(3, 5), (5, 3), (3, 4), (8, 9), (0, 2), (2, 0)])
def test_a_barrier_after_loops_of_different_lengths_is_mismatched(first: int, rest: int, grid: int) -> None:
    reports, _ = launch_kernel("rounds", grid, 128, first, rest, 1, 0)
    (error,) = [report for report in reports if report.is_error]
    assert error.kind == "barrier-divergence"
    assert error.other is not None
    # Line 14 of barrier_loops.cu has the barrier in the loop, and line 16 that after it.
    homes = [side.site.home for side in (error.access, error.other)]
    assert {home.line for home in homes if home is not None} == {14, 16}


@pytest.mark.parametrize(
    "numbers", [(3, 3, 1, 0), (3, 3, 1, 32), (3, 3, 1, 10), (9, 9, 0, 40), (3, 5, 0, 0), (5, 3, 0, 0), (0, 4, 0, 0)]
)
def test_threads_that_exit_are_not_waited_for(numbers: tuple[int, int, int, int]) -> None:
    """Either the loops have equal lengths, or the warps with the shorter loop exit after it.

    Threads that exit while others still wait at barriers are remarked upon, which is no error.
    """
    reports, _ = launch_kernel("rounds", 2, 128, *numbers)
    assert kinds(reports) <= {"exit-before-barrier"}
    assert bool(reports) == (numbers[0] != numbers[1] or numbers[3] > 0)


def test_lanes_of_a_warp_come_by_one_instruction() -> None:
    """Even lanes go round twice and odd lanes three times, so lanes of one warp arrive at different barriers."""
    reports, _ = launch_kernel("lanes", 1, 64)
    assert "barrier-divergence" in {report.kind for report in reports if report.is_error}


def test_roles_with_their_own_barriers_meet() -> None:
    reports, out = launch_kernel("roles", 2, 64)
    # The second warp adds up 0, 1, 2 and 3, which the first one has stored between barriers.
    assert (reports, out) == ([], [0.0] * 32 + [6.0] * 32)


def test_threads_leave_a_reduction() -> None:
    reports, out = launch_kernel("tree", 1, 256)
    assert kinds(reports) == {"exit-before-barrier"}
    assert out[0] == 255 * 128  # the sum of 0 to 255
