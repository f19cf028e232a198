"""Proves by machine code that fused operations cost nothing in the main loop of a tile, and cause no spills."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from cudal2gen.generation import compiler
from cudal2gen.kernel import Record
from kernelproof import sass
from tests.cudal2gen.strategies import multistage, wgmma
from tests.draws import draw_part

# The problem of all tiles.
SIZE = {"acc": "f32", "m": 4096, "n": 4096, "k": 4096}
TILES: dict[str, Record] = {
    "sm_80 64x64": multistage(**SIZE, bm=64, bn=64, c_batch=2),
    "sm_80 128x128": multistage(**SIZE),
    "sm_80 128x256": multistage(**SIZE, bn=256, mma_repeat=[2, 4, 1]),
    "sm_80 64x64 predicated": multistage(**SIZE, bm=64, bn=64, c_batch=2, padding="predicate"),
    "sm_80 128x256 predicated": multistage(**SIZE, bn=256, mma_repeat=[2, 4, 1], padding="predicate"),
    "sm_90 64x64": wgmma(**SIZE, bm=64, bn=64, atom_n=64, consumers=1, registers=None),
    "sm_90 128x128": wgmma(**SIZE, bn=128, atom_n=128),
    "sm_90 128x256": wgmma(**SIZE),
}
MOST = {"bias_n": 2.0, "bias_n+silu": 8.0}  # the most instructions per sum of a lane
LOOP = 2  # ptxas compiles the same loop with a difference of up to so many instructions
# Every tile is tested with two of the fusions that layers of models have, and each fusion on both architectures.
LAYERS = ("bias_n+relu", "bias_n+gelu", "bias_n+gelu_tanh", "silu+gate", "bias_n+silu+gate", "residual")
UNSPILLED = {tile: (LAYERS[number % 6], LAYERS[(number + 2) % 6]) for number, tile in enumerate(TILES)}


def with_fusion(tile: str, fusion: str) -> Record:
    """The record of a tile with another fusion."""
    record = TILES[tile]
    return record.at(record.problem.revised(fusion=fusion))


# One in three tiles, unless all are compiled.
COMPILED = draw_part(list(TILES), 3)
BUILT_AHEAD = [with_fusion(tile, fusion) for tile in COMPILED for fusion in ("none", *MOST, *UNSPILLED[tile])]


class Code(NamedTuple):
    """The instructions of a warp with MMAs on its longest path through a tile, and in an iteration of its main loop."""

    outside: int
    loop: int


def code(record: Record) -> Code:
    """The code of a compiled record, whose build must have no finding."""
    (artifact,) = compiler.build([record])
    assert artifact.ptxas.findings == []
    loops = sass.analyse(artifact.cubin).loops
    assert loops.main is not None
    graph, tile_loop = loops.graph, loops.tiles.loop if loops.tiles else None
    start, blocks = (tile_loop.header, tile_loop.blocks) if tile_loop else (0, graph.reachable(0))
    path = loops.code(graph.longest([start], blocks, lambda block: len(block.instructions)))
    return Code(len(path) - len(loops.main.iteration), len(loops.main.iteration))


@pytest.mark.slow
@pytest.mark.parametrize("tile", COMPILED)
def test_a_bias_and_an_activation_cost_few_instructions_and_none_in_the_main_loop(tile: str) -> None:
    plain = code(TILES[tile])
    for fusion, most in MOST.items():
        record = with_fusion(tile, fusion)
        warps = record.threads // 32 if record.arch == "sm_80" else 4 * (record.threads // 128 - 1)
        cost = code(record)
        assert cost.outside - plain.outside <= most * record.bm * record.bn / (32 * warps), fusion
        assert cost.loop <= plain.loop + LOOP, fusion


@pytest.mark.parametrize("tile", COMPILED)
def test_what_layers_fuse_does_not_spill(tile: str) -> None:
    for artifact in compiler.build([with_fusion(tile, fusion) for fusion in UNSPILLED[tile]]):
        assert artifact.ptxas.findings == [], artifact.directory
