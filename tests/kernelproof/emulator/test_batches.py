"""Proves that CTAs of a batch do not affect each other.

A launch has the same findings and values whichever CTAs execute together and in whichever order, also if a CTA is alone
in its batch.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernelproof import emulator
from kernelproof.emulator import HOPPER, Memory, Options
from tests.kernelproof.emulator.build import compile_file, ptx_of_text
from tests.kernelproof.emulator.kernel_cases import program

Array = Any
THREADS = 96  # of a CTA
# Numbers of steps, which programs.cu describes. A step after EXIT that needs all threads would be a deadlock, so none
# follows.
BARRIER, WAIT, EXIT = 1, 11, 19
# All steps that a drawn program may have besides a barrier and EXIT.
STEPS = [2, 3, 4, 5, 6, 7, 8, 9, 10, WAIT, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22]


@st.composite
def programs(draw: st.DrawFn) -> list[list[int]]:
    """Draws programs of some CTAs. Most steps have a barrier before them, so that some programs are right and some have
    a race."""
    out = []
    for _ in range(draw(st.integers(2, 4))):
        steps = draw(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 3)), max_size=8))
        row = [number for step, gap in steps for number in ([BARRIER] * (gap > 0) + [step])]
        out.append(row + draw(st.sampled_from([[WAIT, BARRIER], [], [EXIT], [EXIT, WAIT, BARRIER, 4, 5]])))
    return out


def findings(reports: list[emulator.Report]) -> list[tuple[str, ...]]:
    """Rule, severity and the source lines of both sides of each finding, sorted and without repetitions."""
    return sorted(
        {(r.kind, str(r.severity), r.source, r.other.site.source if r.other is not None else "") for r in reports}
    )


def interpret(rows: list[list[int]], order: list[int], options: Options) -> tuple[Any, Array, Any]:
    """Findings, output and counters of a launch of programs. ``rows``: the steps of each program. CTA b executes row
    ``order[b]``."""
    longest = max(map(len, rows)) + 1
    table = np.zeros((len(rows), longest), np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    memory = Memory()
    scratch, out = (memory.upload(np.zeros((len(rows), THREADS), np.int32), "inout") for _ in range(2))
    inputs = [memory.upload(np.array(a, np.int32), "input") for a in (table, order, np.arange(THREADS) * 7)]
    args = [*inputs, scratch, out, longest]
    result = program("programs").launch(
        "interpret", len(rows), THREADS, args, memory=memory, options=replace(options, counters=True)
    )
    assert result.counters is not None
    return findings(result.reports), out.download(), result.counters.summary()


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(programs(), st.randoms(use_true_random=False))
def test_programs_of_ctas_give_the_same_alone_and_together(rows: list[list[int]], random: Any) -> None:
    order = list(range(len(rows)))
    shuffled = order.copy()
    random.shuffle(shuffled)
    verdicts = []
    for adverse in (False, True):
        options = Options(lanes=THREADS, adverse=adverse)
        found, values, counters = interpret(rows, order, options)
        verdicts.append((any(f[1] == "error" for f in found), values))
        for lanes, mix in ((THREADS * len(rows), order), (2 * THREADS, shuffled)):
            also_found, also, also_counters = interpret(rows, mix, replace(options, lanes=lanes))
            assert also_found == found
            np.testing.assert_array_equal(also, values)
            assert also_counters == counters
    # In another order of warps a race may have another kind and other values, but a right program stays right.
    assert verdicts[0][0] == verdicts[1][0]
    if not verdicts[0][0]:
        np.testing.assert_array_equal(verdicts[0][1], verdicts[1][1])


# Programs with early exits and different numbers of rounds (see programs.cu). Each row is one CTA's program. The set
# has the violated rules.
FIXED: list[tuple[list[list[int]], set[str]]] = [
    # A warp reads a word. After a barrier one of its threads reads and writes the word.
    ([[1, 5, 1, 4, 3], [1], [], [1, 5, 1, 4, 3, 1, 5, 1, 4, 3]], set()),
    ([[1, 5, 4, 3], [1], []], {"shared-race"}),
    ([[1, 6, 1, 8, 5], [8, 15, 13, 1], []], set()),
    ([[1, 6, 8, 1, 5], [6, 5], []], {"shared-race"}),
    # Copies whose threads have ended.
    ([[10, EXIT, 1, WAIT, 1, 5], [10, WAIT, 1, 5], [1, 1, 1]], {"in-flight"}),
    ([[14, 13, 14, 13], [13], [7, 13, 2, 13]], set()),
    ([[16, 1, 17], [17, 1, 16], [17]], set()),
    ([[16, 17], [1, 1], [17, 1, 16]], {"global-race"}),
]


@pytest.mark.parametrize(("rows", "rules"), FIXED)
@pytest.mark.parametrize("adverse", [False, True])
def test_ctas_of_a_batch_end_at_different_times(rows: list[list[int]], rules: set[str], adverse: bool) -> None:
    order = list(range(len(rows)))
    results = [
        interpret(rows, mix, Options(lanes=lanes, adverse=adverse))
        for lanes, mix in ((THREADS, order), (THREADS * len(rows), order), (THREADS * len(rows), order[::-1]))
    ]
    assert {f[0] for f in results[0][0] if f[1] == "error"} == rules
    for found, values, _ in results[1:]:
        assert found == results[0][0]
        np.testing.assert_array_equal(values, results[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("adverse", [False, True])
@pytest.mark.parametrize(
    ("kernel", "ctas", "rules"), [("ring", 1, ("deadlock", "shared-race")), ("exchange", 2, ("shared-race",))]
)
def test_mbarriers_and_clusters_take_different_numbers_of_rounds(
    kernel: str, ctas: int, rules: tuple[str, ...], adverse: bool
) -> None:
    code = emulator.load(compile_file("phases", ".ptx", arch="sm_90a"))
    for fault in (0, 1):
        results = []
        for lanes in (64, 192, 512):
            memory = Memory()
            rounds = memory.upload(np.array([1, 5, 2, 0], np.int32), "input")
            out = memory.upload(np.zeros(4 * 64 * ctas, np.int32), "inout")
            options = Options(lanes=lanes, adverse=adverse)
            result = code.launch(
                kernel, 4 * ctas, 64, [rounds, out, fault], memory=memory, device=HOPPER, options=options
            )
            results.append((findings(result.reports), out.download().tolist()))
        assert all(found == results[0][0] for found, _ in results)
        assert {f[0] for f in results[0][0]} <= set(rules)
        assert bool(results[0][0]) == bool(fault)
        if not fault:
            assert all(result == results[0] for result in results)


def findings_of_sharing_ctas(rows: list[list[int]], order: list[int], options: Options) -> list[str]:
    """The findings, as texts, of CTAs that share words. CTA b executes row ``order[b]``."""
    longest = max(map(len, rows)) + 1
    table = np.array([row + [0] * (longest - len(row)) for row in rows], np.int32)
    memory = Memory()
    inputs = [memory.upload(array, "input") for array in (table, np.array(order, np.int32))]
    outputs = [memory.upload(np.zeros(size, np.int32), "inout") for size in (128, 64 * len(rows))]
    result = program("programs").launch(
        "share", len(rows), 64, [*inputs, *outputs, longest], memory=memory, options=options
    )
    return [str(report) for report in result.reports]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_a_race_of_ctas_has_the_same_names_in_every_batch(first: int) -> None:
    for seed in range(first, first + 20):
        rng = random.Random(seed)
        rows = [[rng.randrange(2, 18) for _ in range(rng.randrange(7))] for _ in range(rng.randrange(2, 6))]
        order = list(range(len(rows)))
        found = findings_of_sharing_ctas(rows, order, Options(lanes=64))
        for lanes in (128, 64 * len(rows), None):
            assert findings_of_sharing_ctas(rows, order, Options(lanes=lanes)) == found
        # Another order shows other pairs of lines, but does not change whether a program is right.
        rng.shuffle(order)
        assert bool(findings_of_sharing_ctas(rows, order, Options(lanes=64))) == bool(found)
        assert bool(findings_of_sharing_ctas(rows, order, Options(adverse=True))) == bool(found)


# Threads read their own element and one of another CTA, in either order. A CTA writes what all have read.
ACROSS = """
extern "C" __global__ void before(int* x) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, other = x[i + blockDim.x]; x[i] = x[i] + other;
}
extern "C" __global__ void after(int* x) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, own = x[i]; x[i] = x[i + blockDim.x] + own;
}
extern "C" __global__ void last(int* x) {
  int n = x[0]; x[64 + blockIdx.x * blockDim.x + threadIdx.x] = n;
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) x[0] = n + 9;
}
extern "C" __global__ void apart(int* x) {
  int i = blockIdx.x * blockDim.x, n = x[i + (threadIdx.x + 32) % 64] + x[i + threadIdx.x];
  __syncthreads(); x[i + threadIdx.x] = n;
}"""


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "races"), [("before", True), ("after", True), ("last", True), ("apart", False)])
def test_a_write_races_with_reads_before_the_last_one(kernel: str, races: bool) -> None:
    code = emulator.load(ptx_of_text(ACROSS, "sm_80"))
    results = []
    for lanes in (64, 128, 256):
        memory = Memory()
        x = memory.upload(np.arange(64 * 5, dtype=np.int32), "inout")
        result = code.launch(kernel, 4, 64, [x], memory=memory, options=Options(lanes=lanes))
        results.append(findings(result.reports))
    assert bool(results[0]) == races
    assert results[1:] == results[:1] * 2
