"""Sums over slices of k: how often a thread waits for the L2, counted from the PTX, and the order of the sums."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cudal2gen import compiler
from cudal2gen.kernel import MmaSyncKernel, ceil_div
from tests.strategies import STRAIGHT, TO_GLOBAL, direct, multistage
from tests.test_ptx import instructions

LOAD = re.compile(r"ld\.global\.cg\S*\s+(\{[^}]*\}|\S+),")


def trips(lines: list[str]) -> list[tuple[int, bool]]:
    """Groups of loads past the L1, as (loads, whether a loop repeats them): those of one group are all issued before an
    instruction reads what one of them brings."""
    groups: list[tuple[int, bool]] = []
    pending: set[str] = set()
    loads = 0
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    jumps = [(labels[name], i) for i, line in enumerate(lines) for name in re.findall(r"bra\S*\s+(\$L\w+);", line)]
    for i, line in enumerate(lines):
        if load := LOAD.search(line):
            pending |= set(re.findall(r"%\w+", load.group(1)))
            loads += 1
        elif pending & set(re.findall(r"%\w+", line)):
            groups.append((loads, any(start < i < end for start, end in jumps)))
            pending, loads = set(), 0
    assert not pending
    return groups


SPLIT: list[dict[str, Any]] = [
    {"split_k": 2},
    {"split_k": 5, "acc": "f32"},
    {"split_k": 3, "acc": "f32", "bm": 32, "bn": 32, "mma_repeat": [1, 2, 1], "c_batch": 1, "bk": 64, "g2s_cols": 4},
    {"split_k": 4, "bm": 96, "bn": 96, "m": 96, "n": 96},
    {"split_k": 8, "acc": "f32", "bm": 256, "mma_repeat": [4, 2, 1], **STRAIGHT},
    {"split_k": 7, "layout": "nn", **TO_GLOBAL},
]
SPLIT_RECORDS: list[MmaSyncKernel] = [
    *(multistage(**changes) for changes in SPLIT),
    direct(split_k=3),
    direct(split_k=2, acc="f32"),
]
BUILT_AHEAD = SPLIT_RECORDS


@pytest.mark.parametrize("record", SPLIT_RECORDS, ids=lambda record: record.name)
def test_the_last_ctas_trips_to_the_l2(record: MmaSyncKernel) -> None:
    artifact = compiler.build([record])[0]
    groups = trips(instructions(artifact.ptx.read_text()))
    pairs = record.bm * record.bn // record.threads // 2
    once = [loads for loads, repeated in groups if not repeated]
    repeated = [loads for loads, repeated in groups if repeated]
    rounds, rest = divmod(pairs * record.split_k - sum(once), sum(repeated)) if repeated else (0, 0)
    assert rest == 0, "all pairs of all slices are loaded once"
    in_flight = max(once + repeated)
    assert in_flight >= min(8, pairs * record.split_k)
    assert len(once) + rounds * len(repeated) <= ceil_div(pairs * record.split_k, in_flight)
    assert artifact.ptxas.spill_store_bytes == artifact.ptxas.spill_load_bytes == 0
