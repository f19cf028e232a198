"""Proves facts of sm_90a machine code: issue slots per k-tile, boxes of stores, overlap of launches."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cudal2gen.generation import compiler
from cudal2gen.kernel import Record, Sm90Wgmma
from kernelproof import sass
from tests.cudal2gen.paths import PATHS
from tests.cudal2gen.strategies import wgmma

TIGHT: dict[str, Any] = {"registers": [24, 240], "stages": 3}
# Changes of a record whose k-tiles are 64 wide, and the most issue slots that a k-tile may take. CUTLASS's cooperative
# 128 x 256 x 64 has 47.
LOOPS: list[tuple[dict[str, Any], int]] = [
    ({}, 50),
    ({"cluster": [2, 1]}, 50),
    ({"cluster": [2, 2]}, 50),
    ({"layout": "nn", "cluster": [1, 2]}, 50),
    ({"bm": 256, "bn": 208, "atom_n": 208, **TIGHT}, 66),
    ({"bm": 128, "bn": 208, "atom_n": 208, "schedule": "pingpong", **TIGHT}, 68),
    ({"bm": 128, "bn": 384, "atom_n": 192, "stages": 3}, 66),
    ({"bm": 64, "bn": 32, "atom_n": 32, "consumers": 1, "registers": None, "stages": 8}, 50),
    ({"bm": 16, "bn": 64, "atom_n": 16, "swap_ab": True, "consumers": 1, "registers": None, "stages": 8}, 50),
]
# Changes of a record, and the number of boxes in which a warp stores its rows of D.
BOXES: list[tuple[dict[str, Any], int]] = [
    ({}, 4),
    ({"bm": 256, "bn": 208, "atom_n": 208, **TIGHT}, 2 * (3 + 1)),
    ({"bm": 128, "bn": 160, "atom_n": 160}, 2 + 1),
    ({"bm": 128, "bn": 176, "atom_n": 176}, 2 + 3),
    ({"bm": 48, "bn": 128, "atom_n": 48, "swap_ab": True}, 1),
    # Wider buffers do not fit together with four stages.
    ({"bm": 256, "bn": 176, "atom_n": 176}, 2 * 11),
]


def record_of(changes: dict[str, Any]) -> Sm90Wgmma:
    """The plain record with these changes."""
    return wgmma(**changes)


BUILT_AHEAD: list[Record] = [*(record_of(changes) for changes, _ in LOOPS + BOXES), PATHS["wgmma"], PATHS["once"]]


def ptx(record: Record) -> str:
    """A record's PTX."""
    return compiler.build([record])[0].ptx.read_text()


def main_loop(record: Record) -> list[sass.Instruction]:
    """The instructions on the longest path of the innermost loop with wgmma; the path repeats a wait once."""
    (function,) = sass.disassemble(compiler.build([record])[0].directory / "kernel.cubin")
    graph = sass.Graph(function)
    bodies = {
        loop: [item for block in sorted(loop.blocks) for item in graph.blocks[block].instructions]
        for loop in graph.loops
    }
    loops = [loop for loop, body in bodies.items() if any(item.name == "HGMMA" for item in body)]
    innermost = min(loops, key=lambda loop: len(loop.blocks))
    way = graph.longest([innermost.header], innermost.blocks, lambda block: len(block.instructions))
    return [item for block in way for item in graph.blocks[block].instructions]


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(("changes", "most"), LOOPS, ids=str)
def test_a_k_tile_takes_few_issue_slots_and_its_descriptors_are_uniform(changes: dict[str, Any], most: int) -> None:
    record = record_of(changes)
    names = [item.name for item in main_loop(record)]
    assert names.count("HGMMA") == 4 * record.rows // 64 // record.sharers * (record.cols // record.atom_n)
    assert [name for name in names if name in ("R2UR", "S2R", "S2UR", "SHFL")] == []
    assert len(names) <= most


@pytest.mark.parametrize(("changes", "boxes"), BOXES, ids=str)
def test_rows_of_d_are_stored_in_the_widest_boxes(changes: dict[str, Any], boxes: int) -> None:
    assert ptx(record_of(changes)).count("cp.async.bulk.tensor.2d.global") == boxes


@pytest.mark.parametrize("path", ["wgmma", "once"])
def test_the_next_kernel_may_start_before_this_one_waits_and_touches_memory(path: str) -> None:
    lines = [line.strip() for line in ptx(PATHS[path]).splitlines()]
    at = {name: [i for i, line in enumerate(lines) if re.match(name, line)] for name in ACCESSES}
    (start,), wait = at["griddepcontrol.launch_dependents"], min(at["griddepcontrol.wait"])
    assert start < wait
    accesses = at["ld.global"] + at["st.global"] + at["cp.async.c"] + at["cp.async.bulk"]
    assert accesses
    assert wait < min(accesses)


# Beginnings of the instructions whose order counts.
ACCESSES = (
    *("griddepcontrol.launch_dependents", "griddepcontrol.wait"),
    *("ld.global", "st.global", "cp.async.c", "cp.async.bulk"),
)
