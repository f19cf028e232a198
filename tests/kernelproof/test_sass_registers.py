"""Proves which registers instructions read and write, by sets written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernelproof.sass import Function, Graph, Instruction
from kernelproof.sass.banks import conflict_cycles, port_uses
from kernelproof.sass.decoding import FREE
from kernelproof.sass.registers import RegisterLiveness, access, register_names, unread_instructions


def code(text: str, target: int | None = None) -> Instruction:
    """The instruction with this text, which may begin with its guard."""
    guard = None
    if text.startswith("@"):
        guard, text = text[1:].split(" ", 1)
    opcode, _, operands = text.partition(" ")
    return Instruction(0, guard, opcode, tuple(operands.split(", ")) if operands else (), FREE, target)


def function(*lines: Instruction | str) -> Function:
    """A function of these instructions, at their addresses."""
    codes = [line if isinstance(line, Instruction) else code(line) for line in lines]
    return Function("f", 0, tuple(replace(item, address=16 * at) for at, item in enumerate(codes)))


def span(kind: str, first: int, count: int) -> list[str]:
    """The names of ``count`` consecutive registers."""
    return [f"{kind}{number}" for number in range(first, first + count)]


# An instruction, the registers that it reads, and those that it writes.
ACCESSES: list[tuple[str, list[str], list[str]]] = [
    ("HMMA.16816.F32 R4, R8.reuse, R12, R4", span("R", 4, 10), span("R", 4, 4)),
    ("HMMA.16816.F16 R4, R8, R12, RZ", span("R", 8, 6), span("R", 4, 2)),
    ("HMMA.1688.F32 R4, R8, R12, R4", [*span("R", 4, 6), "R12"], span("R", 4, 4)),
    ("IMMA.16832.S8.S8 R4, R8, R12, RZ", span("R", 8, 6), span("R", 4, 4)),
    ("HGMMA.64x64x16.F32 R24, gdesc[UR8].tnspB, R24, !UPT, gsb0", [*span("R", 24, 32), *span("UR", 8, 4)],
     span("R", 24, 32)),
    ("HGMMA.64x128x16.F16 R24, R4, gdesc[UR8], RZ, UP0", [*span("R", 4, 4), "UR8", "UR9", "UP0"], span("R", 24, 32)),
    ("LDSM.16.M88.4 R56, [R141+UR5+0x200]", ["R141", "UR5"], span("R", 56, 4)),
    ("LDG.E.128 R4, desc[UR4][R2.64+0x10]", ["R2", "R3", "UR4", "UR5"], span("R", 4, 4)),
    ("STG.E.64 desc[UR4][R2.64], R8", ["R2", "R3", "R8", "R9", "UR4", "UR5"], []),
    ("@!P1 LDGSTS.E.BYPASS.128 [R39], desc[UR20][R22.64], P6", ["R22", "R23", "R39", "UR20", "UR21", "P1", "P6"],
     []),
    ("IMAD.WIDE R2, R4, c[0x0][0x168], R6", ["R4", "R6", "R7"], ["R2", "R3"]),
    ("IMAD.HI.U32 R9, R9, R11, R8", ["R8", "R9", "R11"], ["R9"]),
    ("IADD3 R2, P0, P1, R4, -R5, RZ", ["R4", "R5"], ["R2", "P0", "P1"]),
    ("IADD3.X R3, RZ, R6, RZ, P0, !PT", ["R6", "P0"], ["R3"]),
    ("ISETP.GE.U32.AND.EX P0, PT, R3, UR5, PT, P1", ["R3", "UR5", "P1"], ["P0"]),
    ("LOP3.LUT P2, RZ, R7, 0x3, RZ, 0xc0, !PT", ["R7"], ["P2"]),
    ("SEL R8, R7, R9, !P3", ["R7", "R9", "P3"], ["R8"]),
    ("SHFL.IDX PT, R4, R5, RZ, 0x1f", ["R5"], ["R4"]),
    ("VOTE.ANY R2, P1, P0", ["P0"], ["R2", "P1"]),
    ("CS2R R4, SRZ", [], ["R4", "R5"]),
    ("DFMA R4, R6, R8, R10", span("R", 6, 6), ["R4", "R5"]),
    ("F2F.F64.F32 R4, R6", ["R6"], ["R4", "R5"]),
    ("F2I.U64.F64.TRUNC R4, R6", ["R6", "R7"], ["R4", "R5"]),
    ("LDCU.128 UR8, c[0x0][0x390]", [], span("UR", 8, 4)),
    ("@UP3 UTMALDG.2D [UR8], [UR20]", [*span("UR", 8, 4), "UR20", "UR21", "UP3"], []),
    ("UTMAPF.L2.2D [UR8], [UR20]", ["UR8", "UR9", "UR20", "UR21"], []),
    ("SYNCS.EXCH.64 URZ, [UR8+0xe000], UR18", ["UR8", "UR18", "UR19"], []),
    ("SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR13+0xe000], R15", ["R15", "UR13"], ["P2"]),
    ("LDTM.x32 R4, tmem[UR14]", ["UR14"], span("R", 4, 32)),
    ("P2R R20, PR, RZ, 0x41", ["P0", "P6"], ["R20"]),
    ("R2P PR, R20, 0x6", ["R20"], ["P1", "P2"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reads", "writes"), ACCESSES)
def test_an_instruction_reads_and_writes_whole_registers(text: str, reads: list[str], writes: list[str]) -> None:
    accessed = access(code(text))
    assert register_names(accessed.reads) == reads
    assert register_names(accessed.writes) == writes


def test_registers_are_live_from_their_writer_to_their_last_reader() -> None:
    """A loop keeps its counter and sums live, and a guarded write keeps the former value live."""
    text = function(
        "MOV R2, 0x4",  # 0
        "CS2R R4, SRZ",  # 1
        "MOV R9, RZ",  # 2
        "HFMA2 R4, R5, R5, R4",  # 3: the loop
        "IADD3 R2, R2, -0x1, RZ",
        "ISETP.NE.AND P0, PT, R2, RZ, PT",
        code("@P0 BRA", target=48),  # 6
        "@P1 MOV R9, R4",
        "STG.E desc[UR4][R6.64], R9",  # 8
        "EXIT",
    )
    liveness = RegisterLiveness(Graph(text))
    inputs = {"R1", "R6", "R7", "UR4", "UR5", "P1"}  # registers that nothing writes, and the stack pointer
    assert set(register_names(liveness.before[0])) == inputs
    assert set(register_names(liveness.before[3])) == inputs | {"R2", "R4", "R5", "R9"}
    assert set(register_names(liveness.after[6])) == inputs | {"R2", "R4", "R5", "R9"}
    assert set(register_names(liveness.before[8])) == inputs - {"P1"} | {"R9"}
    assert register_names(liveness.after[8]) == ["R1"]
    assert liveness.pressure[4] == len({"R1", "R2", "R4", "R5", "R6", "R7", "R9"})


def test_results_that_nobody_reads_are_idle_slots() -> None:
    text = function(
        "MOV R2, 0x4",
        "MOV R3, 0x4",  # overwritten
        "LDS R3, [R2]",
        "LDS R8, [R2]",  # a load whose result nobody reads
        "ATOMS.ADD R9, [R2], R3",  # has an effect
        "ELECT P0, URZ, PT",
        "EXIT",
    )
    idle = unread_instructions(text.instructions, RegisterLiveness(Graph(text)), "sm_80")
    assert [item.address for item in idle] == [16, 48]


def test_operands_of_one_bank_wait_for_its_port() -> None:
    """Three even registers take the even port for three cycles. sm_86 issues an FFMA per cycle, sm_80 one in two."""
    same, mixed = code("FFMA R11, R10, R12, R14"), code("FFMA R13, R16, R19, R21")
    assert port_uses([same, mixed]) == [(3, 0), (1, 2)]
    assert conflict_cycles([same, mixed], "sm_86") == [2, 1]
    assert conflict_cycles([same, mixed], "sm_80") == [1, 0]
    assert port_uses([code("HMMA.16816.F32 R4, R8, R12, R4")]) == [(5, 5)]


def test_a_reused_operand_needs_no_port_in_its_place() -> None:
    first, second, third = (
        code("FFMA R11, R10.reuse, R12, R14"),
        code("FFMA R13, R10, R10, R15"),  # its second operand has another slot
        code("FFMA R17, R10, R19, R21"),  # the second instruction did not keep it
    )
    assert port_uses([first, second, third]) == [(3, 0), (1, 1), (1, 2)]
