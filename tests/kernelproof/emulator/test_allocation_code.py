"""Proves that the code which ptxas generates to free tensor memory is read in each order in which it was seen."""

from __future__ import annotations

import pytest

from kernelproof.emulator.machine_code.idioms import with_allocations
from kernelproof.sass import Control, Instruction

FREE = Control(1, False, None, None, (), 0)
# Opcode and operands, from the load of the granules that are taken up to the last trap. ``{mask}`` moves the mask of
# granules to R5.
LOAD = "LDS R3, [UR6+0x14]"
COLUMN = "LOP3.LUT R0, R0, 0xffff, RZ, 0xc0, !PT"
REST = """SHF.R.U32.HI R0, RZ, 0x5, R0
SHF.L.U32 R2, R5, R0, RZ
R2UR UR4, R2
UTCATOMSWS.AND URZ, UR4
CALL trap_unallocated_columns_being_dealloced"""


def instructions(text: str) -> list[Instruction]:
    """The instructions of a listing, of which each has 16 bytes."""
    pairs = (line.partition(" ")[::2] for line in text.splitlines())
    return [
        Instruction(16 * i, None, opcode, tuple(operands.split(", ")), FREE)
        for i, (opcode, operands) in enumerate(pairs)
    ]


@pytest.mark.parametrize("order", [(LOAD, COLUMN), (COLUMN, LOAD)], ids=["loaded late", "loaded early"])
@pytest.mark.parametrize(("mask", "columns"), [
    ("UMOV R5, 0xffff", 512), ("IMAD.MOV.U32 R5, RZ, RZ, 0xff", 256),
    ("HFMA2 R5, -RZ, RZ, 0, 8.94069671630859375e-07", 128), ("HFMA2 R5, -RZ, RZ, 0, 5.9604644775390625e-08", 32),
])  # fmt: skip
def test_columns_are_freed_after_their_address_is_kept(order: tuple[str, str], mask: str, columns: int) -> None:
    read = with_allocations(instructions("\n".join((mask, *order, REST))))
    names = [item.opcode for item in read]
    assert names.index("TMEM_RELEASED") < names.index("TMEM_DEALLOC")
    (released,) = (item for item in read if item.opcode == "TMEM_RELEASED")
    assert released.operands == ("R0",)
    (freed,) = (item for item in read if item.opcode == "TMEM_DEALLOC")
    assert freed.operands == (str(columns),)
    assert freed.target == read[-1].address + 16
    assert not any(item.opcode == "LDS" for item in read), "the system's memory is not there"


@pytest.mark.parametrize("branches", [False, True])
def test_the_right_to_allocate_is_given_up_by_a_whole_warp(branches: bool) -> None:
    branch = [Instruction(32, "!P1", "BRA", ("NEXT",), FREE, 64)] if branches else []
    code = [*instructions("WARPSYNC.ALL\nELECT P1, URZ, PT"), *branch, *instructions("UVIRTCOUNT.DEALLOC.SMPOOL 0x80")]
    other = instructions("UTCATOMSWS.OR URZ, UR4")
    names = [item.opcode for item in with_allocations([*code, *other])]
    assert names.count("TMEM_RELINQUISH") == 1
    assert names.index("TMEM_RELINQUISH") == (0 if branches else 2)
