"""Proves loops, registers and pipes of the catalog's kernels; registers are compared with nvdisasm's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from cudal2gen.generation import compiler
from kernelproof import sass
from kernelproof.ground.toolchain import find_nvdisasm
from kernelproof.sass import Pipe, RegisterLiveness, access, pipe_use, register_names
from kernelproof.sass.registers import unread_instructions
from tests.cudal2gen.paths import PATHS

KERNELS = ("wgmma", "single f32")  # names in ``PATHS``


@pytest.fixture(scope="module")
def kernels() -> dict[str, Path]:
    """The cubins of ``KERNELS``."""
    artifacts = compiler.build([PATHS[name] for name in KERNELS])
    return {name: artifact.cubin for name, artifact in zip(KERNELS, artifacts, strict=True)}


def live_ranges(cubin: Path) -> list[tuple[set[str], set[str]]]:
    """The registers that each instruction reads and writes, by nvdisasm, which prints ``v`` and ``^`` in a column per
    register."""
    command = [str(find_nvdisasm()), "-c", "-plr", "-lrm", "narrow", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # After the code, a line has a row of a table with a cell for each kind of register. A row with the kinds' names
    # begins the table. The rows below it have the registers' numbers, one digit above the other; the last of them has a
    # '#' before each cell's first register, above the counts of live registers. Other rows belong to instructions.
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


@pytest.mark.slow
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
    liveness = RegisterLiveness(analysis.graph)
    assert 0 < max(liveness.pressure) <= analysis.function.registers
    assert unread_instructions(analysis.function.instructions, liveness, analysis.function.sm) == []
    pipes = [pipe_use(instruction, analysis.function.sm).pipe for instruction in main.iteration]
    assert pipes.count(Pipe.TENSOR) == main.mmas > 0
    assert analysis.function.resources.threads == PATHS[name].threads
    # Built with -lineinfo: most instructions of the loop come from a line of the text.
    text = kernels[name].with_name("kernel.cu").read_text().splitlines()
    lines = [item.source[0] for item in main.iteration if item.source]
    assert len(lines) > len(main.iteration) / 2
    assert all(line.file.endswith("kernel.cu") and 0 < line.line <= len(text) for line in lines)
