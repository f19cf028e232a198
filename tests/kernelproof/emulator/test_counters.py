"""Proves that a launch's counters are those of a count by hand, access by access, over drawn accesses."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from kernelproof.emulator.state.counters import Counters
from kernelproof.emulator.state.sites import NOWHERE


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_wavefronts_are_those_of_the_fullest_bank(width: int) -> None:
    """Lanes that a wavefront may serve together need one for each word of the bank with the most different words."""
    generator = np.random.default_rng(width)
    together = {16: 8, 8: 16}.get(width, 32)
    for step, masked in [(step, masked) for step in (1, 2, 3, 4, 8, 32, 33, 0) for masked in (False, True)]:
        lanes = np.arange(96)
        address = (lanes * step if step else generator.integers(0, 512, 96)) * width
        mask = generator.random(96) < 0.3 if masked else None
        if masked:
            mask[32:64] = False
        counters = Counters([], [])
        counters.shared("ld.shared", address, width, mask)
        active = [int(lane) for lane in lanes if mask is None or mask[lane]]
        wavefronts = ideal = 0
        for first in range(0, 96, together):
            mine = [lane for lane in active if first <= lane < first + together]
            words = {int(address[lane]) // max(4, width) for lane in mine}
            banks = Counter(word % (128 // max(4, width)) for word in words)
            wavefronts += max(banks.values(), default=0)
            ideal += bool(mine)
        entry = counters.shared_banks["ld.shared"]
        requests = len({lane // 32 for lane in active})
        assert (entry.requests, entry.wavefronts, entry.ideal) == (requests, wavefronts, ideal)
        assert entry.conflicts == wavefronts - ideal
        counters.shared("ld.shared", address, width, mask)
        assert (entry.requests, entry.wavefronts, entry.ideal) == (2 * requests, 2 * wavefronts, 2 * ideal)
        shared = counters.summary()["shared"]
        assert shared == {"ld.shared": {"requests": 2 * requests, "wavefronts": 2 * wavefronts, "ideal": 2 * ideal}}


@pytest.mark.parametrize("width", [1, 4, 16])
def test_sectors_are_those_of_each_warp_and_bytes_those_of_each_sector_once(width: int) -> None:
    generator = np.random.default_rng(width)
    counters, touched = Counters([], []), set()
    requests = sectors = ideal = moved = 0
    for number in range(12):
        lanes = None if number % 3 == 0 else np.flatnonzero(generator.random(96) < 0.4)
        count = 96 if lanes is None else len(lanes)
        # Some accesses are on both sides of the end of a MiB.
        start = int(generator.integers(0, 1 << 16)) + (1 << 20) * int(generator.integers(1, 3)) - 1024
        offset = (start // 16 + generator.integers(0, 200, count)) * 16 // width * width
        counters.memory("ld.global", 96, offset, lanes, width)
        warps = [int(lane) // 32 for lane in (range(96) if lanes is None else lanes)]
        pairs = {(warp, int(at) // 32) for warp, at in zip(warps, offset, strict=True)}
        requests += len({*warps})
        sectors += len(pairs)
        moved += count * width
        ideal += sum(-(-lanes_of * width // 32) for lanes_of in Counter(warps).values())
        touched |= {sector for _, sector in pairs}
    entry = counters.global_traffic["ld.global"]
    assert (entry.requests, entry.sectors, entry.ideal, entry.bytes) == (requests, sectors, ideal, moved)
    assert counters.unique_bytes == {"ld.global": 32 * len(touched)}
    assert counters.summary()["global"]["ld.global"] == {
        "requests": requests, "sectors": sectors, "ideal_sectors": ideal, "bytes": moved,
    }  # fmt: skip


def test_instructions_are_those_of_the_blocks_that_warps_began() -> None:
    generator = random.Random(0)
    opcodes = ("mma.sync", "wmma.mma", "ldmatrix.sync", "add.u32", "bar.sync")
    blocks = [{op: generator.randrange(1, 9) for op in generator.sample(opcodes, 3)} for _ in range(4)]
    counters, expected = Counters(blocks, []), Counter[str]()
    for _ in range(30):
        block, mask = generator.randrange(4), None
        warps = 3
        if generator.random() < 0.7:
            mask = np.array([generator.random() < 0.02 for _ in range(96)])
            warps = len({int(lane) // 32 for lane in np.flatnonzero(mask)})
        counters.block(block, 96, mask)
        expected.update({op: n * warps for op, n in blocks[block].items()})
    assert counters.instructions == {op: n for op, n in expected.items() if n or op in counters.instructions}
    assert [*counters.instructions.values()] == sorted(counters.instructions.values(), reverse=True)
    assert (counters.mma, counters.ldmatrix) == (expected["mma.sync"] + expected["wmma.mma"], expected["ldmatrix.sync"])
    summary = counters.summary()
    assert (summary["instructions"], summary["mma"]) == (expected.total(), counters.mma)


def test_a_comparison_has_its_outcomes_and_the_operands_that_never_changed() -> None:
    generator = np.random.default_rng(0)
    for _ in range(40):
        counters = Counters([], [NOWHERE])
        outcomes: set[bool] = set()
        seen: list[set[int]] = [set(), set()]
        for _ in range(3):
            mask = None if generator.random() < 0.3 else generator.permutation(64) < generator.integers(1, 5)
            chosen = slice(None) if mask is None else mask
            truth = generator.integers(0, 3, 64) * int(generator.random() < 0.5)
            operands = np.full(64, 7), generator.integers(5, 7, 64)
            # A value that all lanes have may be one number.
            single = generator.random() < 0.5
            counters.comparison(
                0 if single and not truth.any() else truth, (7 if single else operands[0], operands[1]), mask, 0
            )
            outcomes |= {bool(value) for value in truth[chosen]}
            for values, operand in zip(seen, operands, strict=True):
                values |= {int(value) for value in operand[chosen]}
        (found,) = counters.comparisons.values()
        assert found.outcomes == outcomes
        wanted = {i: min(values) if len(values) == 1 else None for i, values in enumerate(seen) if values}
        assert found.operands == wanted
