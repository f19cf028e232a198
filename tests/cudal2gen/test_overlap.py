"""Proves what a kernel does before it waits for the previous one: it computes its first tile, and reads no memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cudal2gen.generation import compiler
from cudal2gen.kernel import Record
from cudal2gen.validator import run_case, stress_shapes
from kernelproof import sass
from tests.cudal2gen.faulty import Faulty
from tests.cudal2gen.paths import ring, tensor

WAIT = "wait_for_previous_kernel();"
BEHIND_TILE = f"    if (work.row + work.col >= 0) {{\n      {WAIT}\n    }}\n"
LOOP = "    for (int step = work.first; step < work.last; ++step) {\n      const uint32_t stage"
STORING = f"    {WAIT}\n    store_tiles(gemm, shared, rank, columns);"
CONSUMING = f"    {WAIT}\n    consume(gemm, shared, rank);"
SLICED = tensor(split_k=3, pdl=True)
# Records whose loading thread computes its first tile before the wait.
EARLY: dict[str, Record] = {
    "wgmma": ring(pdl=True),
    "wgmma, a shared last wave": ring(stream_k=True, pdl=True),
    "tcgen05": tensor(pdl=True),
    "tcgen05, a shared last wave": tensor(stream_k=True, pdl=True),
}
# By fault: a text that reads memory before the wait.
FAULTS: dict[str, Faulty] = {
    "boxes are loaded without a wait": Faulty(EARLY["tcgen05"], BEHIND_TILE, ""),
    "the first box is loaded before the wait": Faulty(
        EARLY["tcgen05"], BEHIND_TILE + LOOP, LOOP.replace("{", f"{{ if (step > work.first) {WAIT}"),
    ),
    "boxes are loaded without a wait, wgmma": Faulty(EARLY["wgmma"], BEHIND_TILE, ""),
    "parts are stored and counted before the wait, wgmma": Faulty(
        ring(split_k=3, reduce="workspace", pdl=True), CONSUMING, CONSUMING.replace(WAIT, "") + WAIT,
    ),
    "groups' ends are read without a wait": Faulty(
        tensor(batch="grouped", pdl=True), f"  {WAIT}  // each tile reads the groups' ends\n", "",
    ),
    "a counter is read before the wait": Faulty(
        SLICED, STORING, f"    if (*(unsigned volatile*)gemm.arrivals == 77) {{\n      return;\n    }}\n{STORING}",
    ),
    "parts are stored and counted before the wait": Faulty(SLICED, STORING, STORING.replace(WAIT, "") + WAIT),
    "the bias is read before the wait": Faulty(
        tensor(fusion="bias_n", pdl=True), STORING, STORING.replace(WAIT, "") + WAIT,
    ),
}  # fmt: skip
BUILT_AHEAD = [*EARLY.values(), *FAULTS.values()]
MOST_BEHIND = 40  # instructions between the wait and the first load


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_memory_that_is_read_before_the_wait_is_a_finding(fault: str, library: Path) -> None:
    record = FAULTS[fault].record
    case = run_case(record, FAULTS[fault].built(), library, stress_shapes(record)[0], "binary")[0]
    assert any(finding.startswith("grid-dependency: ") for finding in case.findings), case.findings


@pytest.mark.parametrize("name", EARLY)
def test_no_tile_is_computed_between_the_wait_and_the_first_load(name: str) -> None:
    (function,) = sass.disassemble(compiler.build([EARLY[name]])[0].cubin)
    behind = min(ways_to_a_load(sass.Graph(function)), key=len)
    divisions = [item for item in behind if item.name == "MUFU"]  # of numbers that are known at run time
    assert not divisions
    assert len(behind) <= MOST_BEHIND


def ways_to_a_load(graph: sass.Graph) -> Iterator[list[sass.Instruction]]:
    """For each wait for the previous kernel from which a load of a box can be reached: the instructions between them,
    on the shortest way."""
    for block in graph.blocks:
        names = [item.name for item in block.instructions]
        if "ACQBULK" not in names:
            continue
        todo, seen = [(list(block.instructions[names.index("ACQBULK") + 1 :]), block.index)], set[int]()
        while todo:
            way, at = todo.pop(min(range(len(todo)), key=lambda i: len(todo[i][0])))
            load = next((i for i, item in enumerate(way) if item.name == "UTMALDG"), None)
            if load is not None:
                yield way[:load]
                break
            ahead = set(graph.blocks[at].successors) - seen
            seen |= ahead
            todo += [([*way, *graph.blocks[to].instructions], to) for to in sorted(ahead)]
