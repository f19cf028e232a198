"""Proves which role each loop of small functions has, and which instructions an iteration executes."""

from __future__ import annotations

from typing import Any

import pytest

from kernelproof.sass import Graph, Loops, Role
from tests.kernelproof.test_sass_registers import code, function

# A product and a store to global memory.
MMA = "HMMA.16816.F32 R4, R8, R12, R4"
STORE = "STG.E desc[UR4][R2.64], R4"


def loops(*lines: Any) -> Loops:
    """The loops of a function of these instructions."""
    return Loops(Graph(function(*lines)))


def test_a_loop_over_k_lies_in_one_over_tiles() -> None:
    parts = loops(
        "MOV R0, 0x0",  # 0
        "CS2R R4, SRZ",  # 1: a tile
        "LDGSTS.E.128 [R1], desc[UR4][R2.64]",  # 2: a step
        MMA,
        code("@P0 BRA", target=32),  # 4
        STORE,  # 5
        code("@P1 BRA", target=16),
        "EXIT",
    )
    assert parts.main is not None
    assert parts.tiles is not None
    assert [item.opcode for item in parts.main.iteration] == ["LDGSTS.E.128", "HMMA.16816.F32", "BRA"]
    assert (parts.main.mmas, parts.tiles.mmas) == (1, 1)
    assert [item.role for item in parts.all] == [Role.TILES, Role.MMA]
    assert parts.producer is None


@pytest.mark.parametrize(("lines", "role"), [
    ([MMA], Role.MMA), ([MMA, STORE], Role.TILES), (["LDGSTS.E.128 [R1], desc[UR4][R2.64]", STORE], Role.COPY),
    (["UTMALDG.2D [UR8], [UR20]"], Role.COPY), ([STORE], Role.STORE), (["STS [R2], R1"], Role.STORE),
    (["SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8], R2"], Role.WAIT), (["IADD3 R1, R2, R3, RZ"], Role.OTHER),
    (["SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8], R2", *["IADD3 R1, R2, R3, RZ"] * 12], Role.OTHER),
])  # fmt: skip
def test_the_role_of_a_loop_follows_from_its_opcodes(lines: list[str], role: Role) -> None:
    (loop,) = loops("MOV R0, 0x0", *lines, code("@P1 BRA", target=16), "EXIT").all
    assert loop.role is role


def test_a_loop_that_stores_in_every_iteration_is_one_over_tiles() -> None:
    parts = loops("MOV R0, 0x0", MMA, MMA, STORE, code("@P1 BRA", target=16), "EXIT")
    assert parts.main is None
    assert parts.tiles is not None
    assert parts.tiles.mmas == 2


def test_a_loop_that_stores_in_some_iterations_is_one_over_k() -> None:
    """Triton compiles tiles and steps of k to one loop; the path of its iteration leaves the store out."""
    parts = loops(
        "MOV R0, 0x0",
        MMA,  # 1
        code("@P0 BRA", target=96),
        STORE,  # 3
        STORE,
        STORE,
        code("@P1 BRA", target=16),  # 6
        "EXIT",
    )
    assert parts.tiles is None
    assert parts.main is not None
    assert [item.opcode for item in parts.main.iteration] == ["HMMA.16816.F32", "BRA", "BRA"]


def test_producers_have_a_loop_and_waits_are_left_out() -> None:
    parts = loops(
        code("@P6 BRA", target=112),  # 0
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8], R2",  # 1: the consumers' loop
        code("@P0 BRA", target=80),
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8], R2",  # 3: the second wait
        code("@!P0 BRA", target=48),
        "HGMMA.64x64x16.F32 R24, gdesc[UR8], R24",  # 5
        code("@P1 BRA", target=16),
        "@UP3 UTMALDG.2D [UR8], [UR20]",  # 7: the producers' loop
        code("@P2 BRA", target=112),
        "EXIT",
    )
    assert parts.main is not None
    assert parts.producer is not None
    assert [item.opcode for item in parts.producer.iteration] == ["UTMALDG.2D", "BRA"]
    assert [item.name for item in parts.main.iteration] == ["SYNCS", "BRA", "HGMMA", "BRA"]
    assert parts.waits == {2}


def test_a_loop_that_fills_the_ring_of_a_tile_belongs_to_no_producer() -> None:
    copy = "LDGSTS.E.128 [R1], desc[UR4][R2.64]"
    parts = loops(
        "MOV R0, 0x0",
        copy,  # 1: the ring
        code("@P2 BRA", target=16),
        MMA,  # 3: the main loop
        code("@P0 BRA", target=48),
        STORE,
        code("@P1 BRA", target=0),
        "EXIT",
    )
    assert [item.role for item in parts.all] == [Role.TILES, Role.COPY, Role.MMA]
    assert parts.producer is None


def test_the_iterations_of_a_loop_with_constant_bounds_are_counted() -> None:
    parts = loops(
        "MOV R0, RZ",
        "IADD3 R0, R0, 0x4, RZ",
        MMA,
        "ISETP.NE.AND P0, PT, R0, 0x20, PT",
        code("@P0 BRA", target=16),
        "EXIT",
    )
    assert parts.main is not None
    assert parts.main.iterations == 8
