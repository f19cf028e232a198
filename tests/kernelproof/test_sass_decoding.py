"""Proves that cubins and control words are decoded as by hand, and that loops and counters are found in them."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelproof import sass
from kernelproof.ground.errors import UserError
from kernelproof.sass import Control, Function, Graph, Instruction, RegisterLiveness
from kernelproof.sass.decoding import FREE
from kernelproof.sass.elf import sections
from kernelproof.sass.registers import unread_instructions
from kernelproof.sass.stripping import without_lines
from kernelproof.sass.trips import trips
from tests.kernelproof.emulator import build


def test_a_control_word_has_stall_yield_barriers_waits_and_reuse() -> None:
    """Upper 64 bits of sm_80 instructions: MOV, S2R with write barrier 1, UIMAD that waits for it, LDGSTS, and HMMA."""
    assert Control.decode(0x000FE40000000F00) == replace(FREE, stall=2)
    assert Control.decode(0x000E620000002700) == replace(FREE, write_barrier=1)
    assert Control.decode(0x002FC6000F8E0204) == replace(FREE, stall=3, yields=True, waits=(1,))
    assert Control.decode(0x0003E8000B901C46).read_barrier == 1
    assert Control.decode(0x082FF00000000810) == replace(FREE, stall=8, waits=(1,), reuse=2)


@pytest.mark.slow
def test_a_function_is_chosen_by_name(tmp_path: Path) -> None:
    cubin = build.compile_cubin(
        "__global__ void first(int* p) { *p = 1; }\n__global__ void second(int* p) { *p = 2; }\n"
    )
    functions = sass.disassemble(cubin)
    assert {function.name for function in functions} == {"_Z5firstPi", "_Z6secondPi"}
    assert all(any(code.name == "STG" for code in function.instructions) for function in functions)
    with pytest.raises(sass.DisassemblyError, match="no function has an MMA"):
        sass.summarise(cubin, tile_mmas=1)
    text = tmp_path / "text.cubin"
    text.write_text("no ELF file\n")
    for wrong in (tmp_path / "none.cubin", text):
        with pytest.raises(UserError, match=rf"{wrong.stem}\.cubin.*cuobjdump"):
            sass.disassemble(wrong)


# A kernel with a function that is inlined into another inlined one.
INLINED = """__device__ __forceinline__ float inner(float x) { return x * x; }
__device__ __forceinline__ float outer(float x) { return inner(x) + 2.0f; }
__global__ void __launch_bounds__(96) kernel(float* p) {
  __shared__ float s[500];
  s[threadIdx.x] = outer(p[threadIdx.x]);
  __syncthreads();
  p[threadIdx.x] = s[95 - threadIdx.x];
}
"""


@pytest.mark.slow
def test_an_instruction_has_its_line_where_that_is_inlined_and_its_window() -> None:
    """The load reads the pair of uniform registers of its memory window, which nvdisasm does not print for sm_80."""
    analysis = sass.analyse(build.compile_cubin(INLINED, "-lineinfo", "-fmad=false"), "kernel")
    codes = {item.name: item for item in analysis.function.instructions}
    assert [line for _, line in codes["FMUL"].source] == [1, 2, 5]
    assert [line for _, line in codes["FADD"].source] == [2, 5]
    assert {Path(file).name for file, _ in codes["FMUL"].source} == {"program.cu"}
    window = sass.register_names(sass.access(codes["ULDC"]).writes)
    assert len(window) == 2
    assert set(window) < set(sass.register_names(sass.access(codes["LDG"]).reads))
    assert set(window) < set(sass.register_names(sass.access(codes["STG"]).reads))
    assert (
        unread_instructions(analysis.function.instructions, RegisterLiveness(analysis.graph), analysis.function.sm)
        == []
    )
    resources = analysis.function.resources
    assert (resources.threads, resources.shared_bytes, resources.stack_bytes) == (96, 2000, 0)
    assert resources.registers == analysis.function.registers > 0


def segments(cubin: bytes) -> list[tuple[Any, ...]]:
    """Each segment's type, flags, addresses, sizes and alignment, and its bytes."""
    (table,), (count,) = struct.unpack_from("<Q", cubin, 0x20), struct.unpack_from("<H", cubin, 0x38)
    rows = [struct.unpack_from("<IIQQQQQQ", cubin, table + 56 * index) for index in range(count)]
    # The bytes of the segment table contain their own offset, which may change.
    return [(row[:2], row[3:], cubin[row[2] : row[2] + row[5]] if row[2] != table else b"") for row in rows]


def test_sections_that_are_the_same_bytes_stay_so() -> None:
    """A cubin of sm_120 has the address of a variable in two sections: that of its code and that of the code's second
    form."""
    text = "__device__ int counter;\n__global__ void kernel() { atomicAdd(&counter, threadIdx.x); }\n"
    whole = build.compile_cubin(text, "-lineinfo", arch="sm_120a").read_bytes()
    stripped = without_lines(whole)
    assert len(stripped) < len(whole)
    assert segments(stripped) == segments(whole)
    constants = [section for section in sections(stripped) if "nv.constant" in section.name and section.size == 8]
    assert len(constants) == 2
    assert len({section.offset for section in constants}) == 1


def code(
    opcode: str, *operands: str, guard: str | None = None, target: int | None = None, **control: Any
) -> Instruction:
    """An instruction with these control bits."""
    return Instruction(0, guard, opcode, operands, replace(FREE, **control), target)


def placed_function(*instructions: Instruction) -> Function:
    """A function of these instructions, at their addresses."""
    return Function("f", 0, tuple(replace(item, address=16 * at) for at, item in enumerate(instructions)))


def test_loops_are_natural_loops() -> None:
    jump = code("BRA", guard="P0", target=16)
    graph = Graph(placed_function(code("MOV"), code("IADD3"), jump, code("EXIT")))
    assert [(loop.header, loop.blocks) for loop in graph.loops] == [(1, {1})]
    assert graph.blocks[1].successors == (2, 1)
    nested = placed_function(
        code("MOV"),
        code("MOV"),
        code("IADD3"),
        code("BRA", "P0", target=32),
        code("BRA", "P1", target=16),
        code("EXIT"),
    )
    assert [len(loop.blocks) for loop in Graph(nested).loops] == [3, 1]
    # ptxas also jumps by CALL; it is a call only if the function has a RET.
    assert (
        len(Graph(placed_function(code("MOV"), code("CALL.REL.NOINC", guard="P0", target=0), code("EXIT"))).loops) == 1
    )
    called = placed_function(code("MOV"), code("CALL.REL.NOINC", target=48), code("EXIT"), code("RET.REL.NODEC"))
    assert Graph(called).loops == []


BY_R3 = ["IADD3 R0, R0, 0x4, RZ", "ISETP.NE.AND P0, PT, R0, R3, PT"]  # a loop in which R0 counts up to R3
# Instructions before a loop and in it, the guard of its branch back, and its number of iterations, None if unknown.
COUNTERS = [
    (["MOV R0, RZ"], ["IADD3 R0, R0, 0x4, RZ", "ISETP.NE.AND P0, PT, R0, 0x20, PT"], "P0", 8),
    (["IMAD.MOV.U32 R0, RZ, RZ, 0x5"], ["IADD3 R0, R0, -0x1, RZ", "ISETP.GT.AND P0, PT, R0, RZ, PT"], "P0", 5),
    (["CS2R R0, SRZ"], ["IADD3 R1, R1, 0x1, RZ", "ISETP.GE.U32.AND P0, PT, R1, 0x7, PT"], "!P0", 7),
    (["UMOV UR4, URZ"], ["UIADD3 UR4, UR4, 0x1, URZ", "UISETP.NE.AND UP0, UPT, UR4, 0x3, UPT"], "UP0", 3),
    (["S2R R0, SR_TID.X"], ["IADD3 R0, R0, 0x4, RZ", "ISETP.NE.AND P0, PT, R0, 0x20, PT"], "P0", None),
    (["MOV R0, RZ"], ["IADD3 R0, R0, R2, RZ", "ISETP.NE.AND P0, PT, R0, 0x20, PT"], "P0", None),
    # Instructions that overwrite the limit R3, though it is not their first operand.
    (["MOV R3, 0x20", "MOV R0, RZ", "SHFL.IDX PT, R3, R4, RZ, 0x1f"], BY_R3, "P0", None),
    (["MOV R3, 0x20", "MOV R0, RZ", "LDS.64 R2, [R4]"], BY_R3, "P0", None),
    (["MOV R3, 0x20", "MOV R0, RZ", "IMAD.HI.U32 R3, R3, R3, RZ"], BY_R3, "P0", None),
    (["MOV R3, 0x20", "MOV R0, RZ"], BY_R3, "P0", 8),
]


@pytest.mark.parametrize(("before", "body", "guard", "count"), COUNTERS)
def test_a_loop_with_constant_bounds_has_its_number_of_iterations(
    before: list[str], body: list[str], guard: str, count: int | None
) -> None:
    def parse_alone(text: str) -> Instruction:
        opcode, operands = text.split(" ", 1)
        return code(opcode, *operands.split(", "))

    start = [parse_alone(text) for text in before]
    for jump in (code("BRA", guard=guard, target=0), code("BRA.U", guard, target=0)):
        assert trips(start, [*map(parse_alone, body), jump]) == count
