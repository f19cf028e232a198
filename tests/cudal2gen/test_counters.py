"""The checker is checked: faults of the counters by which CTAs share the sums of a tile are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudal2gen.generation import compiler
from cudal2gen.generation.renderer import render
from cudal2gen.validator import run_case, stress_shapes
from cudal2gen.validator.problems import thorough_shape
from tests.cudal2gen.faulty import Faulty
from tests.cudal2gen.paths import PATHS

pytestmark = pytest.mark.slow

# Tickets of slices, parts in a workspace, parts of a stream, and sums in a cluster.
SHARING = ["split_k persistent", "wgmma workspace", "wgmma stream", "wgmma cluster split 2"]
# Fault -> before, after.
FAULTS = {
    "one ticket too few": ("== kSplitK - 1", "== kSplitK - 2"),
    "the first ticket": ("== kSplitK - 1", "== 0"),
    "a ticket without a fence before it": ("__threadfence();\n  __syncthreads();", "__syncthreads();"),
    "a ticket without a fence behind it": ("}\n  __threadfence();", "}"),
    "one arrival too few": ("while ((kept & 0xffff) < count)", "while ((kept & 0xffff) + 1 < count)"),
    "no wait": ("while ((kept & 0xffff) < count)", "while ((kept & 0xffff) < 0)"),
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
    "a relaxed arrival in a cluster": ("barrier.cluster.arrive.release", "barrier.cluster.arrive.relaxed"),
}
PLANTED = [(name, fault) for name in SHARING for fault, (before, _) in FAULTS.items() if before in render(PATHS[name])]
BUILT_AHEAD = [
    *(PATHS[name] for name in SHARING),
    *(Faulty(PATHS[name], *FAULTS[fault]) for name, fault in PLANTED),
]


@pytest.fixture(scope="module")
def library() -> Path:
    return compiler.launcher()


def passes(name: str, kernel: compiler.Artifact, library: Path, adverse: bool) -> bool:
    record = PATHS[name]
    shape = thorough_shape(record, stress_shapes(record))
    return run_case(record, kernel, library, shape, "binary", adverse=adverse)[0].passed


def test_every_fault_has_a_kernel() -> None:
    assert {fault for _, fault in PLANTED} == set(FAULTS)


@pytest.mark.parametrize(("name", "fault"), PLANTED, ids=[f"{name}: {fault}" for name, fault in PLANTED])
def test_a_faulty_counter_is_noticed(name: str, fault: str, library: Path) -> None:
    """In one of the two orders of a verdict: who arrives last misses nothing, however few it waits for."""
    kernel = Faulty(PATHS[name], *FAULTS[fault]).built()
    assert not all(passes(name, kernel, library, adverse) for adverse in (False, True))
