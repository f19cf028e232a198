"""Proves that schedules of ptxas have no hazard, and that each removed wait is found.

A hazard is a register that is read or written before an earlier instruction has written or read it. An instruction of
fixed latency is waited for by stall counts, and one of variable latency by a scoreboard that it sets.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kernelproof.sass import Function, Instruction, RegisterHazard, disassemble, hazards
from kernelproof.sass.decoding import FREE
from tests.draws import THOROUGH
from tests.kernelproof.emulator import drawn_programs
from tests.kernelproof.emulator.build import assemble

LINE = re.compile(r"(?:@(\S+) )?(\S+) ?(.*)$")  # of an instruction: guard, opcode, operands
# A register as an operand.
REGISTER = re.compile(r"-?R(\d+)")
SEEDS = range(500, 560 if THOROUGH else 503)  # of drawn programs, other ones than those of other tests
# By target: the least version of PTX that drawn programs need for it.
TARGETS = {"sm_80": 8.0, "sm_86": 8.0, "sm_89": 8.0, "sm_90a": 9.0, "sm_100a": 9.0, "sm_120a": 9.0}


def function(listing: str, sm: str = "sm_80") -> Function:
    """The function of a listing. A line has an instruction and, after a semicolon, the parts of its control word that
    differ from a stall of 1, such as ``stall=4 write=0 read=1 waits=02 reuse=1``.

    ``write``, ``read``: the scoreboard that the instruction sets until it has written or read its registers; ``waits``:
    the scoreboards that it waits for, a digit each; ``reuse``: the mask of operands that are kept for the next
    instruction. A jump has the number of a line, counted from 0, as in ``@5``.
    """
    return Function("k", 32, tuple(_instruction(at, line) for at, line in enumerate(listing.strip().split("\n"))), sm)


def _instruction(at: int, line: str) -> Instruction:
    """The instruction of a line: its text, and after a semicolon its control bits. A target @n is instruction n."""
    text, _, control = line.partition(";")
    match = LINE.match(text.strip())
    assert match is not None
    guard, opcode, operands = match.groups()
    fields = dict(item.split("=") for item in control.split())
    listed = tuple(operand.strip() for operand in operands.split(",")) if operands else ()
    target = 16 * int(listed[-1][1:]) if listed and listed[-1].startswith("@") else None
    return Instruction(
        16 * at,
        guard,
        opcode,
        listed,
        replace(
            FREE,
            stall=int(fields.get("stall", 1)),
            write_barrier=int(fields["write"]) if "write" in fields else None,
            read_barrier=int(fields["read"]) if "read" in fields else None,
            waits=tuple(map(int, fields.get("waits", ""))),
            reuse=int(fields.get("reuse", 0)),
        ),
        target,
        code=_slots(listed),
    )


def _slots(operands: tuple[str, ...]) -> int:
    """The bits of an encoding that hold the numbers of the source registers: from bit 24, 32 and 64 on, one byte each.
    255 is RZ, and stands here for operands that are no register."""
    numbers = [REGISTER.match(operand) for operand in operands[1:]]
    return sum(int(match[1] if match else 255) << place for match, place in zip(numbers, (24, 32, 64), strict=False))


def pairs(found: list[RegisterHazard]) -> list[tuple[int, int, tuple[str, ...]]]:
    """Lines of both instructions of each hazard, and its registers."""
    return [(hazard.earlier.address // 16, hazard.later.address // 16, hazard.registers) for hazard in found]


# A load of R1, and a store that reads it.
LOAD = "LDG.E R1, desc[UR4][R2.64] ; stall=2 write=0\n"
STORE = "STG.E desc[UR4][R2.64], R1 ; stall=2 read=3\n"
# By what is waited for: a listing without a hazard, a part of it, and a text in its place that makes one hazard.
WAITS_FOR = {
    "an integer sum by another": ("IADD3 R1, R2, R3, RZ ; stall=4\nIADD3 R4, R1, R3, RZ", "stall=4", "stall=3"),
    "a predicate by a guard": ("ISETP.GE.AND P0, PT, R1, R2, PT ; stall=13\n@P0 EXIT", "stall=13", "stall=12"),
    "a uniform sum by a vector one": ("UIADD3 UR4, UR5, 0x1, URZ ; stall=6\nIADD3 R4, R1, UR4, RZ", "=6", "=5"),
    "a uniform sum by another": ("UIADD3 UR4, UR5, 0x1, URZ ; stall=4\nUSEL UR6, UR4, UR5, !UP0", "=4", "=3"),
    "sums of an MMA": (
        "HMMA.16816.F32 R4, R8, R12, RZ ; stall=15\nNOP ; stall=9\nHMMA.16816.F32 R4, R8, R12, R4", "=9", "=1",
    ),
    "a load": (f"{LOAD}IADD3 R4, R1, R5, RZ ; waits=0", "waits=0", "waits=1"),
    "a load whose register is written": (f"{LOAD}MOV R1, R5 ; waits=0", "waits=0", ""),
    "a load without a scoreboard": (f"{LOAD}IADD3 R4, R1, R5, RZ ; waits=0", "write=0", ""),
    "a load in the cycle before": (f"{LOAD}IADD3 R4, R1, R5, RZ ; waits=0", "stall=2", "stall=1"),
    "the operand of a store": (f"{STORE}MOV R1, R5 ; waits=3", "waits=3", "waits=2"),
    "the address of a store": (f"{STORE}MOV R3, R5 ; waits=3", "read=3", "read=4"),
    "a fence": ("FENCE.VIEW.ASYNC.S ; stall=2 write=2\nBAR.SYNC 0x0 ; waits=2", "waits=2", "waits=1"),
    "a copy after a fence": ("FENCE.VIEW.ASYNC.S ; stall=2 write=2\nNOP ; waits=2\nUTMASTG [UR4]", "write=2", ""),
    "an mbarrier": ("SYNCS.EXCH.64 URZ, [UR5], UR6 ; stall=2 write=0\nBAR.SYNC 0x0 ; waits=0", "write=0", "write=1"),
    "the predicate of a shuffle": (
        "SHFL.IDX P1, R1, R2, R3, 0x1f ; stall=2 write=0\n@P1 IADD3 R4, R5, R6, RZ ; waits=0", "waits=0", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("later", ["FENCE.VIEW.ASYNC.S", "STG.E desc[UR4][R2.64], R1", "BAR.SYNC 0x0"])
def test_fences_of_the_cta_are_waited_for_on_sm_90_and_sm_100(later: str) -> None:
    """ptxas waits for the scoreboard of such a fence in the next instruction. On sm_120 it takes none."""
    listing = f"MEMBAR.ALL.CTA ; stall=6 read=1\nNOP ; waits=1\n{later} ; stall=2 write=2\nEXIT ; waits=2"
    early = listing.replace("waits=1", ""), listing.replace("read=1", "read=3"), listing.replace("read=1", "")
    for sm in ("sm_90a", "sm_100a"):
        assert hazards(function(listing, sm)) == []
        assert [pairs(hazards(function(text, sm))) for text in early] == [[(0, 2, ())]] * 3
    assert [hazards(function(text, "sm_120a")) for text in early] == [[], [], []]


@pytest.mark.parametrize("name", WAITS_FOR)
def test_a_missing_wait_is_found(name: str) -> None:
    listing, wait, missing = WAITS_FOR[name]
    assert hazards(function(listing)) == []
    assert len(hazards(function(listing.replace(wait, missing)))) == 1


# Right code with a loop.
LOOP = """
MOV R1, RZ ; stall=5
LDG.E R2, desc[UR4][R4.64] ; stall=2 write=0
IADD3 R1, R1, R3, RZ ; stall=5 waits=1
ISETP.GE.AND P0, PT, R1, R6, PT ; stall=13
LDS R3, [R8] ; stall=2 write=1
@!P0 BRA @2 ; stall=5
IADD3 R7, R2, R7, RZ ; waits=0
EXIT
"""


def test_waits_are_followed_around_loops() -> None:
    assert hazards(function(LOOP)) == []
    assert pairs(hazards(function(LOOP.replace("waits=1", "")))) == [(4, 2, ("R3",))]
    assert pairs(hazards(function(LOOP.replace("waits=0", "waits=1")))) == [(1, 6, ("R2",))]


def test_of_two_paths_the_shorter_counts() -> None:
    """A sum is there after 4 cycles. The path over the jump takes 1 + 3, the other one 10 more."""
    listing = """
        IADD3 R1, R2, R3, RZ
        @P0 BRA @4 ; stall=3
        NOP ; stall=5
        NOP ; stall=5
        IADD3 R4, R1, R3, RZ
        EXIT"""
    assert hazards(function(listing)) == []
    assert pairs(hazards(function(listing.replace("stall=3", "stall=2")))) == [(0, 4, ("R1",))]


# Right code with a function that is called from two places.
CALLS = """
MOV R20, 0x20 ; stall=5
CALL.REL.NOINC @7 ; stall=5
LDG.E R1, desc[UR4][R2.64] ; stall=2 write=0
MOV R20, 0x50 ; stall=5
CALL.REL.NOINC @7 ; stall=5
IADD3 R4, R1, R3, RZ ; waits=0
EXIT
IADD3 R9, R9, 0x1, RZ ; stall=5
RET.REL.NODEC R20
"""


def test_a_subroutine_returns_after_its_own_call() -> None:
    """The load is in flight during the second call. After the first call its register is free."""
    assert hazards(function(CALLS)) == []
    first = CALLS.replace("LDG.E R1", "IADD3 R8, R1, R3, RZ\nLDG.E R1").replace("0x50", "0x60").replace("@7", "@8")
    assert hazards(function(first)) == []
    assert pairs(hazards(function(first.replace("waits=0", "")))) == [(3, 6, ("R1",))]


def test_the_last_of_a_queue_stands_for_those_before_it() -> None:
    """Loads of shared memory end in the order of their issue, so waiting for the last suffices. So do FCHK and MUFU,
    which share a queue. Loads of global memory may overtake each other."""
    shared = "LDS R1, [R2]\nLDS R3, [R4] ; stall=2 write=0\nIADD3 R5, R1, R3, RZ ; waits=0"
    assert hazards(function(shared)) == []
    checked = "FCHK P0, R1, R2 ; stall=8\nMUFU.EX2 R3, R4 ; stall=2 write=1\n@P0 FADD R5, R3, R3 ; waits=1"
    assert hazards(function(checked)) == []
    far = shared.replace("LDS", "LDG.E").replace("[R2]", "desc[UR4][R2.64]").replace("[R4]", "desc[UR4][R6.64]")
    assert pairs(hazards(function(far))) == [(0, 2, ("R1",))]


def test_a_barrier_of_the_cta_ends_the_reads_of_a_store() -> None:
    store = "STS [R2], R1\nBAR.SYNC 0x0\nMOV R1, R5"
    assert hazards(function(store)) == []
    assert len(hazards(function(store.replace("SYNC", "ARV")))) == 1


def test_a_load_of_256_bits_has_two_results() -> None:
    load = "LDG.E.ENL2.256 R8, R4, desc[UR4][R2.64] ; stall=2 write=0\n"
    assert hazards(function(f"{load}IADD3 R12, R15, R16, RZ", "sm_100")) == []
    for register in ("R4", "R7", "R8", "R11"):
        assert len(hazards(function(f"{load}IADD3 R12, {register}, R16, RZ", "sm_100"))) == 1


def test_the_predicate_of_a_move_is_there_before_its_uniform_register() -> None:
    move = "R2UR.OR P0, UR6, R9 ; stall=8\n"
    assert hazards(function(f"{move}PLOP3.LUT P1, PT, P0, P2, PT, 0xa2, 0x0", "sm_90a")) == []
    assert len(hazards(function(f"{move}IADD3 R4, R5, UR6, RZ", "sm_90a"))) == 1


@pytest.mark.parametrize("sm", ["sm_90a", "sm_120a"])
def test_an_arrival_reads_its_address_at_issue_and_its_bytes_later(sm: str) -> None:
    arrival, load = "SYNCS.ARRIVE.TRANS64 RZ, [UR9], R6; read=1", "UTMALDG.2D [UR8], [UR22]; read=1"
    address = "ULEA UR9, UR36, UR38, 0x4"
    assert hazards(function(f"{arrival}\n{address}", sm)) == []
    assert len(hazards(function(f"{arrival}\nMOV R6, 0x3000", sm))) == 1
    assert len(hazards(function(f"{load}\n{address}", sm))) == 1


def test_guards_that_exclude_each_other_do_not_meet() -> None:
    listing = f"@P0 {LOAD}@!P0 MOV R1, RZ ; stall=5\nIADD3 R4, R1, R3, RZ ; waits=0"
    assert hazards(function(listing)) == []
    assert pairs(hazards(function(listing.replace("@!P0", "@P1"))))[0] == (0, 1, ("R1",))


@pytest.mark.parametrize(
    ("listing", "stale"),
    [
        ("IADD3 R1, R1.reuse, R2, RZ ; stall=5 reuse=1\nIADD3 R3, R1, R4, RZ", True),
        ("IADD3 R1, R1, R2, RZ ; stall=5\nIADD3 R3, R1, R4, RZ", False),
        ("IADD3 R1, R1.reuse, R2, RZ ; stall=5 reuse=1\nIADD3 R3, R4, R1, RZ", False),  # read in the other slot
        ("IADD3 R5, R1.reuse, R2, RZ ; reuse=1\nMOV R1, 0x7 ; stall=5\nIADD3 R3, R1, R4, RZ", True),
        ("IADD3 R5, R1.reuse, R2, RZ ; reuse=1\nIADD3 R1, R6, R2, RZ ; stall=5\nIADD3 R3, R1, R4, RZ", False),
    ],
)
def test_the_operand_cache_does_not_see_writes(listing: str, stale: bool) -> None:
    assert len(hazards(function(listing))) == stale


def function_of(listing: str, *codes: int) -> Function:
    """The function of a listing, with the 128 bits of its instructions without their control words."""
    made = function(listing)
    pairs = zip(made.instructions, codes, strict=True)
    return replace(made, instructions=tuple(replace(item, code=code) for item, code in pairs))


# The low 12 bits of encodings: the opcode, and which operands are registers or literals.
SHIFT, SHIFT_BY_LITERAL, ADD, COMPARE, MOVE_LITERAL = 0x219, 0x419, 0x221, 0x20C, 0x802


def bits(opcode: int, a: int = 255, b: int = 255, c: int = 255) -> int:
    """The bits of an opcode and its form, and of register numbers in the fields of operands A, B and C; 255 is RZ."""
    return opcode | a << 24 | b << 32 | c << 64


@pytest.mark.parametrize("read", [9, 7])
def test_a_literal_moves_the_register_before_it_to_another_field(read: int) -> None:
    """The first shift keeps R9 in slot B, and the second shift writes R9. The comparison would read the old R9 from the
    slot, but the second shift has freed it: its register operand is in slot B, because of the literal."""
    listing = f"""
        SHF.R.U32.HI R10, RZ, R9.reuse, R10 ; stall=5 reuse=2
        SHF.L.U64.HI R9, RZ, R{read}, 0x10000 ; stall=5
        ISETP.NE.AND P0, PT, R12, R9, PT"""
    codes = bits(SHIFT, 255, 9, 10), bits(SHIFT_BY_LITERAL, 255, 0, read), bits(COMPARE, 12, 9)
    assert hazards(function_of(listing, *codes)) == []


@pytest.mark.parametrize(("kept", "stale"), [(4, True), (2, False)])
def test_the_second_register_of_an_addition_is_in_the_third_slot(kept: int, stale: bool) -> None:
    listing = f"""
        FADD R4, R4, R5.reuse ; stall=5 reuse={kept}
        MOV R5, 0x7 ; stall=5
        FADD R6, R4, R5"""
    codes = bits(ADD, 4, 5), bits(MOVE_LITERAL, 255, 7), bits(ADD, 4, 5)
    assert len(hazards(function_of(listing, *codes))) == stale


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.slow
def test_what_ptxas_writes_has_no_hazard(target: str) -> None:
    for seed in SEEDS:
        text = drawn_programs.text(seed, target).replace(".version 8.0", f".version {TARGETS[target]}")
        for level in (0, 1, 3):
            (kernel,) = disassemble(assemble(text, level, target))
            assert hazards(kernel) == [], (seed, level)
