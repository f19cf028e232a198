"""Proves that TMA and wgmma kernels as a whole are exact on data of 0 and 1, without a report."""

from __future__ import annotations

import pytest

from kernelproof.emulator import Options
from tests.kernelproof.emulator.hopper import gemm, program

# Launchers of the fixture: layout, type of the sums, and cluster or schedule.
ENTRIES = [
    "tn_f32_1x1", "nn_f32_1x1", "tn_f16_2x1", "nn_f32_2x1", "tn_f32_1x2", "nn_f16_2x2", "tn_f32_pingpong",
    "nn_f32_pingpong_2x1",
]  # fmt: skip


@pytest.mark.parametrize("mnk", [(256, 256, 256), (72, 40, 72), (136, 264, 328)])
@pytest.mark.parametrize("entry", ENTRIES)
def test_exact(entry: str, mnk: tuple[int, int, int]) -> None:
    run = gemm(entry, mnk)
    assert (run.code, run.session.refusals, run.session.errors) == (0, [], [])
    assert run.exact
    assert run.session.reports == []


@pytest.mark.parametrize("entry", ["tn_f32_1x1", "nn_f16_2x2", "tn_f32_pingpong", "nn_f32_pingpong_2x1"])
def test_persistent(entry: str) -> None:
    run = gemm(entry, (520, 264, 136), clusters=2, pdl=True)
    assert run.exact
    assert run.session.reports == []


@pytest.mark.parametrize("mnk", [(64, 64, 512), (128, 192, 256), (72, 40, 328), (64, 64, 64)])
@pytest.mark.parametrize("entry", ["split_2", "split_4"])
def test_split_over_a_cluster(entry: str, mnk: tuple[int, int, int]) -> None:
    run = gemm(entry, mnk, pdl=True, source=program("tma_split"))
    assert (run.code, run.session.refusals, run.session.errors) == (0, [], [])
    assert run.exact
    assert run.session.reports == []


@pytest.mark.parametrize("lanes", [384, 8192])
def test_batches_do_not_matter(lanes: int) -> None:
    run = gemm("tn_f16_2x1", (512, 256, 128), options=Options(lanes=lanes))
    assert run.exact
    assert run.session.reports == []


def test_counters() -> None:
    run = gemm("tn_f32_1x1", (256, 256, 256), options=Options(counters=True))
    counters = run.session.launches[0].counters
    assert counters is not None
    # The product of 4 CTAs, 2 warpgroups, 4 k-tiles and 4 k-steps.
    assert counters.wgmma == 128
    assert counters.wgmma_flops == 2 * 256**3
    summary = counters.summary()
    loaded, stored = 4 * 4 * 2 * 128 * 64 * 2, 256 * 256 * 2
    # Each k-tile has two boxes, and each 16 x 64 elements of D have one.
    assert summary["bulk"] == {
        "boxes": 4 * 4 * 2 + 256 * 256 // (16 * 64),
        "load_bytes": loaded,
        "delivered_bytes": loaded,
        "store_bytes": stored,
    }
    assert counters.shared_banks["stmatrix"].conflicts == 0
    assert counters.shared_banks["stmatrix"].requests == 256 * 256 // 256
    # Per CTA and k-tile: 8 consumer warps for a full stage, the producer for an empty one.
    assert counters.mbarrier_waits == 4 * 4 * 9
    multicast = gemm("tn_f16_2x1", (256, 256, 256), options=Options(counters=True)).session.launches[0].counters
    assert multicast is not None
    # Each CTA of the pair loads half of B for both.
    assert (multicast.bulk_load_bytes, multicast.bulk_delivered_bytes) == (loaded * 3 // 4, loaded)
