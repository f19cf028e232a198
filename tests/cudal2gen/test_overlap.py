"""Proves what a kernel does before it waits for the previous one: it computes its first tile, and reads no memory, but
may ask the L2 for its first tiles of B."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cudal2gen.generation import compiler
from cudal2gen.kernel import Record
from cudal2gen.kernel.tma_ring import TmaRing
from cudal2gen.validator import Shape, run_case, stress_shapes
from kernelproof import sass
from kernelproof.emulator.hopper.bulk import Bulk
from tests.cudal2gen.faulty import Faulty
from tests.cudal2gen.paths import ring, tensor, warps

WAIT = "wait_for_previous_kernel();"
BEHIND_TILE = f"    if (work.row + work.col >= 0) {{\n      {WAIT}\n    }}\n"
LOOP = "    for (int step = work.first; step < work.last; ++step) {\n      const uint32_t stage"
STORING = f"    {WAIT}\n    store_tiles(gemm, shared, rank, load_word(shared.columns()));"
CONSUMING = f"    {WAIT}\n    consume(gemm, shared, rank);"
SLICED = tensor(split_k=3, pdl=True)
Box = tuple[int, ...]  # the address of its tensor map, and its coordinates
Boxes = dict[tuple[Bulk, int], list[Box]]  # those of each loading thread, a lane of a batch of threads
# Records whose loading thread computes its first tile before the wait.
EARLY: dict[str, Record] = {
    "wgmma": ring(pdl=True),
    "wgmma, a shared last wave": ring(stream_k=True, pdl=True),
    "mma.sync": warps(pdl=True),
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
ASKING: dict[str, Record] = {
    "wgmma, parts of a shared B": ring(cluster=[2, 1], k=320, pdl=True, prefetch_b=True),
    "wgmma, slices, along n": ring(
        layout="nn", split_k=2, reduce="cluster", epilogue="direct", k=640, pdl=True, prefetch_b=True
    ),
    "tcgen05, halves of two panels": tensor(
        pair=True, cluster=[2, 1], bn=320, accumulators=1, stages=4, pdl=True, prefetch_b=True
    ),
}
EARLIEST = "(work.first + stage) * kBK"
# Texts that ask for other boxes than they load first.
ASKING_AMISS = {
    "other k-tiles": Faulty(ASKING["wgmma, slices, along n"], EARLIEST, "stage * kBK"),
    "another CTA's part": Faulty(ASKING["wgmma, parts of a shared B"], f"{EARLIEST}, rank_m", f"{EARLIEST}, 0"),
}
BUILT_AHEAD = [*EARLY.values(), *FAULTS.values(), *ASKING.values(), *ASKING_AMISS.values()]
MOST_AFTER = 40  # instructions between the wait and the first load
MOST_BEFORE = 150  # instructions from the kernel's entry to the first load


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_memory_that_is_read_before_the_wait_is_a_finding(fault: str, library: Path) -> None:
    record = FAULTS[fault].record
    case = run_case(record, FAULTS[fault].build(), library, stress_shapes(record)[0], "binary")[0]
    assert any(finding.startswith("grid-dependency: ") for finding in case.findings), case.findings


@pytest.mark.parametrize("name", EARLY)
def test_no_tile_is_computed_between_the_wait_and_the_first_load(name: str) -> None:
    (function,) = sass.disassemble(compiler.build([EARLY[name]])[0].cubin)
    after = min(ways_to_a_load(sass.Graph(function)), key=len)
    divisions = [item for item in after if item.name == "MUFU"]  # of numbers that are known at run time
    assert not divisions
    assert len(after) <= MOST_AFTER


@pytest.mark.parametrize("name", [name for name in EARLY if "shared" not in name])
def test_the_way_to_the_first_load_has_no_division(name: str) -> None:
    """Tile numbers are divided by reciprocals."""
    (function,) = sass.disassemble(compiler.build([EARLY[name]])[0].cubin)
    graph = sass.Graph(function)
    way = shortest(graph, 0, list(graph.blocks[0].instructions), "UTMALDG")
    assert way is not None
    names = [item.name for item in way]
    assert "MUFU" not in names
    assert len(names) <= MOST_BEFORE


@pytest.mark.parametrize("name", ASKING)
def test_weights_are_asked_for_before_the_wait(name: str) -> None:
    """The loading thread prefetches all boxes, waits, and only then loads."""
    (function,) = sass.disassemble(compiler.build([ASKING[name]])[0].cubin)
    graph = sass.Graph(function)
    names = [[item.name for item in block.instructions] for block in graph.blocks]
    (asking,) = (each for each in graph.blocks if "UTMAPF" in names[each.index])
    assert len(list(ways_to_a_load(graph))) == 1  # so no other wait precedes loads
    way, at = list(names[asking.index]), asking
    while "ACQBULK" not in way:
        assert "UTMALDG" not in way
        at = graph.blocks[max(at.successors, key=lambda to: "ACQBULK" in names[to])]
        way += names[at.index]
    assert "UTMALDG" not in way[: way.index("ACQBULK")]
    assert way.index("ACQBULK") > max(i for i, each in enumerate(way) if each == "UTMAPF")


def boxes(record: Record, built: compiler.Artifact, library: Path) -> tuple[Boxes, Boxes]:
    """The boxes for which each loading thread asks, and those that it loads by the same tensor map, in their order."""
    asked: Boxes = defaultdict(list)
    loaded: Boxes = defaultdict(list)

    def spy(into: Boxes, method: Callable[..., None]) -> Callable[..., None]:
        def seen(unit: Bulk, address: Any, coordinates: list[Any], *rest: Any) -> None:
            for lane in unit.batch.lanes(rest[-2]).tolist():
                into[unit, lane].append((int(address[lane]), *(int(each[lane]) for each in coordinates)))
            method(unit, address, coordinates, *rest)

        return seen

    shape = Shape(record.m, record.n, record.k)
    with (
        mock.patch.object(Bulk, "prefetch_tensor", spy(asked, Bulk.prefetch_tensor)),
        mock.patch.object(Bulk, "load_tensor", spy(loaded, Bulk.load_tensor)),
    ):
        case = run_case(record, built, library, shape, "binary")[0]
    assert not case.findings
    maps = {box[0] for each in asked.values() for box in each}
    return asked, {lane: [box for box in each if box[0] in maps] for lane, each in loaded.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ASKING, *ASKING_AMISS])
def test_the_boxes_that_are_asked_for_are_those_that_are_loaded_first(name: str, library: Path) -> None:
    faulty = ASKING_AMISS.get(name)
    record = faulty.record if faulty else ASKING[name]
    assert isinstance(record, TmaRing)
    built = faulty.build() if faulty else compiler.build([record])[0]
    asked, loaded = boxes(record, built, library)
    assert len(asked) == len(loaded) >= record.cluster_ctas
    assert {len(each) % record.stages for each in asked.values()} == {0}
    same = all(each == loaded[lane][: len(each)] for lane, each in asked.items())
    assert same == (faulty is None)


def test_a_record_that_asks_without_overlap_says_so() -> None:
    assert not any("prefetch_b" in remark for remark in ring(prefetch_b=True, pdl=True).remarks)
    assert any("prefetch_b" in remark for remark in ring(prefetch_b=True).remarks)


def ways_to_a_load(graph: sass.Graph) -> Iterator[list[sass.Instruction]]:
    """For each wait for the previous kernel from which a load of a box can be reached: the instructions between them,
    on the shortest way."""
    for block in waits(graph):
        names = [item.name for item in block.instructions]
        way = shortest(graph, block.index, list(block.instructions[names.index("ACQBULK") + 1 :]), "UTMALDG")
        if way is not None:
            yield way


def waits(graph: sass.Graph) -> list[sass.Block]:
    """The blocks in which a kernel waits for the previous one."""
    return [block for block in graph.blocks if any(item.name == "ACQBULK" for item in block.instructions)]


def shortest(graph: sass.Graph, block: int, way: list[sass.Instruction], end: str) -> list[sass.Instruction] | None:
    """The shortest way from a block to an instruction of the name ``end``, which it does not include; None if there is
    none. ``way``: the instructions in the block from which it begins."""
    todo, seen = [(way, block)], set[int]()
    while todo:
        way, at = todo.pop(min(range(len(todo)), key=lambda i: len(todo[i][0])))
        last = next((i for i, item in enumerate(way) if item.name == end), None)
        if last is not None:
            return way[:last]
        ahead = set(graph.blocks[at].successors) - seen
        seen |= ahead
        todo += [([*way, *graph.blocks[to].instructions], to) for to in sorted(ahead)]
    return None
