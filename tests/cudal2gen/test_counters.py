"""Proves that planted faults of the counters and mbarriers by which CTAs share the sums of a tile are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudal2gen.generation import compiler
from cudal2gen.generation.renderer import render
from cudal2gen.validator import run_case, stress_shapes
from cudal2gen.validator.problems import thorough_shape
from tests.cudal2gen.faulty import Faulty
from tests.cudal2gen.paths import PATHS
from tests.draws import draw_few_by_key, draw_part

pytestmark = pytest.mark.slow

# The records count tickets of slices, parts in a workspace, parts of a stream, and parts that CTAs of a cluster send
# each other.
SHARING = ["split_k persistent", "wgmma workspace", "wgmma stream", "wgmma cluster split 2", "once split 2"]
# By fault: a part of the rendered CUDA text, and the text that replaces it.
FAULTS = {
    "one ticket too few": ("== kSplitK - 1", "== kSplitK - 2"),
    "the first ticket": ("== kSplitK - 1", "== 0"),
    "a ticket without a fence before it": ("fence_device();\n  __syncthreads();", "__syncthreads();"),
    "a ticket without a fence after it": ("}\n  fence_device();", "}"),
    "one arrival too few": ("while ((kept & 0xffff) < count)", "while ((kept & 0xffff) + 1 < count)"),
    "no wait": ("while ((kept & 0xffff) < count)", "while ((kept & 0xffff) < 0)"),
    "a counter that the first adder returns": ("(before >> 16) + vectors == kVectors", "before >> 16 == 0"),
    "tickets that do not return to zero": (
        "atomicInc(gemm.arrivals + tile, kSplitK - 1)",
        "atomicAdd(gemm.arrivals + tile, 1u)",
    ),
    "a counter that is not returned": ("if (last_group)", "if (last_group && tile % 2)"),
    "an arrival that counts twice": (
        "red.release.gpu.global.add.u32 [%0], 1;",
        "red.release.gpu.global.add.u32 [%0], 2;",
    ),
    "a relaxed arrival": ("red.release.gpu.global", "red.relaxed.gpu.global"),
    "a relaxed wait": ("ld.acquire.gpu.global", "ld.relaxed.gpu.global"),
    "parts that are sent before operands are read": ("wait(shared.freed(), 0);", ""),
    "an operand that one warp may still read": ("kSplitK * kSharingThreads / 32", "kSharingThreads / 32"),
    "a CTA that does not say that it has read": ("threadIdx.x % 32 < kSplitK", "threadIdx.x % 32 < kSplitK - 1"),
    "parts that are not awaited": ("wait(shared.arrived(), 0);", ""),
    "parts of a small tile that are not awaited": ("wait(arrived, 0);", ""),
    "parts that are sent before the mbarrier is there": ("  cluster_wait();\n  CUTE_UNROLL", "  CUTE_UNROLL"),
    "parts of which one is not awaited": ("kSplitK * vectors_of(rank)", "(kSplitK - 1) * vectors_of(rank)"),
    "slices in one place": ("(rank * vectors_of(to)", "(0 * vectors_of(to)"),
    "parts that count on the sender": ("at_rank(shared.arrived(), to)", "at_rank(shared.arrived(), rank)"),
}
# Each fault in the first record whose text has a place for it, in ``make thorough`` in all of them.
PLANTED = draw_few_by_key(
    lambda planted: planted[1],
    [(name, fault) for name in SHARING for fault, (before, _) in FAULTS.items() if before in render(PATHS[name])],
    1,
)
# The faults that this run of the tests executes.
EXECUTED = draw_part(PLANTED, 3)
BUILT_AHEAD = [
    *(PATHS[name] for name in SHARING),
    *(Faulty(PATHS[name], *FAULTS[fault]) for name, fault in EXECUTED),
]


def passes(name: str, kernel: compiler.Artifact, library: Path, adverse: bool, several_adders: bool) -> bool:
    """Whether a kernel passes a check. ``several_adders``: use a problem of one tile, whose parts all CTAs add; in the
    thorough problem each CTA adds whole tiles."""
    record = PATHS[name]
    shapes = stress_shapes(record)
    shape = shapes[0] if several_adders else thorough_shape(record, shapes)
    return run_case(record, kernel, library, shape, "binary", adverse=adverse)[0].passed


def test_every_fault_has_a_kernel() -> None:
    assert {fault for _, fault in PLANTED} == set(FAULTS)


@pytest.mark.parametrize(("name", "fault"), EXECUTED, ids=[f"{name}: {fault}" for name, fault in EXECUTED])
def test_a_faulty_counter_is_noticed(name: str, fault: str, library: Path) -> None:
    """Each fault is noticed in one of the two orders of a verdict: a CTA that arrives last misses nothing, however few
    it waits for."""
    kernel = Faulty(PATHS[name], *FAULTS[fault]).build()
    one_tile = "(before >> 16)" in FAULTS[fault][0]
    assert not all(passes(name, kernel, library, adverse, one_tile) for adverse in (False, True))
