"""Loops of small functions by what they are for, and whole kernels of this catalog and of Triton."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cudal2gen.generation import compiler
from kernelproof import sass
from kernelproof.ground.toolchain import find_nvdisasm
from kernelproof.sass import Graph, Liveness, Loops, Pipe, Role, access, pipe_use, register_names
from kernelproof.sass.registers import unread
from tests.cudal2gen.paths import PATHS
from tests.kernelproof.test_sass_registers import code, function

MMA = "HMMA.16816.F32 R4, R8, R12, R4"
STORE = "STG.E desc[UR4][R2.64], R4"


def loops(*lines: Any) -> Loops:
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
    assert [item.opcode for item in parts.main.turn] == ["LDGSTS.E.128", "HMMA.16816.F32", "BRA"]
    assert (parts.main.mmas, parts.tiles.mmas) == (1, 1)
    assert [item.role for item in parts.all] == [Role.TILES, Role.MMA]
    assert parts.producer is None


def test_a_loop_that_stores_in_every_turn_is_one_over_tiles() -> None:
    parts = loops("MOV R0, 0x0", MMA, MMA, STORE, code("@P1 BRA", target=16), "EXIT")
    assert parts.main is None
    assert parts.tiles is not None
    assert parts.tiles.mmas == 2


def test_a_loop_that_stores_in_some_turns_is_one_over_k() -> None:
    """Triton makes one loop of both; the way of its turn leaves the store out."""
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
    assert [item.opcode for item in parts.main.turn] == ["HMMA.16816.F32", "BRA", "BRA"]


def test_producers_have_a_loop_and_waits_are_left_out() -> None:
    parts = loops(
        code("@P6 BRA", target=112),  # 0
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8], R2",  # 1: the consumers' loop
        code("@P0 BRA", target=80),
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8], R2",  # 3: waits again
        code("@!P0 BRA", target=48),
        "HGMMA.64x64x16.F32 R24, gdesc[UR8], R24",  # 5
        code("@P1 BRA", target=16),
        "@UP3 UTMALDG.2D [UR8], [UR20]",  # 7: the producers' loop
        code("@P2 BRA", target=112),
        "EXIT",
    )
    assert parts.main is not None
    assert parts.producer is not None
    assert [item.opcode for item in parts.producer.turn] == ["UTMALDG.2D", "BRA"]
    assert [item.name for item in parts.main.turn] == ["SYNCS", "BRA", "HGMMA", "BRA"]
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


def test_the_turns_of_a_loop_with_constant_bounds_are_counted() -> None:
    parts = loops(
        "MOV R0, RZ",
        "IADD3 R0, R0, 0x4, RZ",
        MMA,
        "ISETP.NE.AND P0, PT, R0, 0x20, PT",
        code("@P0 BRA", target=16),
        "EXIT",
    )
    assert parts.main is not None
    assert parts.main.turns == 8


KERNELS = ("wgmma", "single f32")


@pytest.fixture(scope="module")
def kernels() -> dict[str, Path]:
    artifacts = compiler.build([PATHS[name] for name in KERNELS])
    return {name: artifact.cubin for name, artifact in zip(KERNELS, artifacts, strict=True)}


def live_ranges(cubin: Path) -> list[tuple[set[str], set[str]]]:
    """What each instruction reads and writes, by nvdisasm: ``v`` and ``^`` in a column for each register."""
    command = [str(find_nvdisasm()), "-c", "-plr", "-lrm", "narrow", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kinds: list[str] = []
    heads: list[list[str]] = []
    rows: list[tuple[set[str], set[str]]] = []
    names = {"GPR": "R", "PRED": "P", "UGPR": "UR", "UPRED": "UP"}
    for line in text.splitlines():
        left, _, table = line.partition("// |")
        cells = table.split("|")[:-1]
        if re.search(r"\bGPR\b", table):
            kinds, heads = [names[cell.strip()] for cell in cells], []
        elif re.fullmatch(r"[\d #]*\d[\d #]*", "".join(cells)) and not any("#" in head[0] for head in heads):
            heads.append(cells)
        elif re.search(r"/\*[0-9a-f]{4,}\*/", left):
            row: dict[str, set[str]] = {"v": set(), "^": set()}
            for index, (kind, cell) in enumerate(zip(kinds, cells, strict=True)):
                for at in range(heads[-1][index].index("#") + 1, len(cell)):
                    marks = {"x": "v^"}.get(cell[at], cell[at])
                    digits = "".join(head[index][at] for head in heads).strip()
                    for mark in set(marks) & set(row):
                        row[mark].add(f"{kind}{int(digits)}")
            rows.append((row["v"], row["^"]))
    return rows


@pytest.mark.parametrize("name", KERNELS)
def test_reads_and_writes_are_those_of_nvdisasm(name: str, kernels: dict[str, Path]) -> None:
    (kernel,) = sass.disassemble(kernels[name])
    ranges = live_ranges(kernels[name])
    assert len(ranges) > 100
    assert {item.name for item in kernel.instructions[len(ranges) :]} <= {"NOP"}
    for instruction, (reads, writes) in zip(kernel.instructions, ranges, strict=False):
        if instruction.name in ("P2R", "UP2UR"):  # nvdisasm leaves out the predicates that they read
            continue
        accessed = access(instruction)
        assert set(register_names(accessed.reads)) == reads, str(instruction)
        assert set(register_names(accessed.writes)) == writes, str(instruction)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_of_this_catalog_is_taken_apart(name: str, kernels: dict[str, Path]) -> None:
    analysis = sass.analyse(kernels[name])
    main = analysis.loops.main
    assert main is not None
    assert (analysis.loops.producer is not None) == (name == "wgmma")
    liveness = Liveness(analysis.graph)
    assert 0 < max(liveness.pressure) <= analysis.function.registers
    assert unread(analysis.function.instructions, liveness, analysis.function.sm) == []
    pipes = [pipe_use(instruction, analysis.function.sm).pipe for instruction in main.turn]
    assert pipes.count(Pipe.TENSOR) == main.mmas > 0
    assert analysis.function.resources.threads == PATHS[name].threads
    # Built with -lineinfo: most instructions of the loop come from a line of the text.
    text = kernels[name].with_name("kernel.cu").read_text().splitlines()
    lines = [item.source[0] for item in main.turn if item.source]
    assert len(lines) > len(main.turn) / 2
    assert all(line.file.endswith("kernel.cu") and 0 < line.line <= len(text) for line in lines)
