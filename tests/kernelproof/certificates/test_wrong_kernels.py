"""Proves that kernels are not certified whose faults exploit gaps between a proof's arithmetic and a device's.

Each kernel sums rows by one or two warps. Before the sum is stored, it executes instructions that a device and a
careless proof evaluate differently. The kernel is right if ``OK`` is reached with the predicate %p1, and wrong
otherwise.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from kernelproof.certificates import NotCertified, by_contract
from kernelproof.certificates.cells import Cells, Kind, Kinds
from kernelproof.certificates.contract_file import check
from kernelproof.certificates.facts import Facts
from kernelproof.certificates.machine import State
from kernelproof.certificates.polynomials import Polynomial
from kernelproof.certificates.products import Products
from kernelproof.certificates.shared_memory import Contents, SharedMemory
from kernelproof.certificates.slices import SlabContents, Stage
from kernelproof.certificates.words import Word
from kernelproof.emulator.machine.tensor import Shape
from kernelproof.ground.errors import WrongInput
from tests.kernelproof.certificates.subjects import Subject

# The contract of all kernels, and the parts of their texts: a lane's sum, the sum of a warp, and the store.
CONTRACT = """
kernel = "k"
parameters = ["A", "D", "n", "z", "most"]
result = "D(i) = sum over k of A(i,k)"

[sizes]
m = { most = 1000000 }
n = { multiple = 32 }
z = { multiple = 16777216, most = 16777216 }
most = { most = 33554432 }

[operands]
A = { type = "f32", shape = ["m", "n"] }
D = { type = "f32", shape = ["m"] }

[launch]
grid = ["m"]
block = [32]
tile = [1]
"""

HEAD = """
.version 9.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 a, .param .u64 d, .param .u32 n, .param .u64 z, .param .u32 most) ATTRIBUTES
{
  .reg .pred %p<9>; .reg .f32 %f<9>; .reg .b16 %h<9>; .reg .b32 %r<19>; .reg .b64 %q<19>;
  .shared .align 16 .b8 s[256];
  ld.param.u64 %q1, [a];
  ld.param.u64 %q2, [d];
  ld.param.u32 %r1, [n];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %tid.x;
  cvt.u64.u32 %q3, %r2;
  cvt.u64.u32 %q4, %r1;
  mul.lo.s64 %q4, %q3, %q4;
  cvt.u64.u32 %q5, %r3;
  add.s64 %q4, %q4, %q5;
  shl.b64 %q4, %q4, SHIFT;
  add.s64 %q4, %q1, %q4;
  mov.f32 %f1, 0f00000000;
  mov.u32 %r4, %r3;
LOOP:
  LOAD
  add.f32 %f1, %f1, %f2;
  add.s64 %q4, %q4, ROUND;
  add.s32 %r4, %r4, THREADS;
  setp.lt.s32 %p2, %r4, %r1;
  @%p2 bra LOOP;
  mov.u32 %r5, -1;
"""

SHUFFLE = """
  mov.b32 %r6, %f1;
  shfl.sync.bfly.b32 %r7|%p3, %r6, {}, 31, %r5;
  mov.b32 %f3, %r7;
  add.f32 %f1, %f1, %f3;
"""

TAIL = """
  setp.ne.s32 %p4, %r3, 0;
  @%p4 bra END;
  shl.b64 %q6, %q3, 2;
  add.s64 %q7, %q2, %q6;
  st.global.f32 [%q7], %f1;
END:
  ret;
}
"""

# The load in the loop, and instructions that zero the sum unless %p1 holds.
LOAD = "ld.global.f32 %f2, [%q4];"
ZERO = "@%p1 bra OK; mov.f32 %f1, 0f00000000; OK:"


def row_sum(more: str = "", load: str = LOAD, threads: int = 32, attributes: str = "", width: int = 4) -> Subject:
    """A kernel with instructions before the store, or another load. ``width``: bytes of an element of A."""
    fields = {"ATTRIBUTES": attributes, "SHIFT": width // 2, "LOAD": load, "ROUND": threads * width, "THREADS": threads}
    text = HEAD + "".join(SHUFFLE.format(distance) for distance in (16, 8, 4, 2, 1)) + more + TAIL
    for name, value in fields.items():
        text = text.replace(name, str(value))
    return Subject(text, CONTRACT.replace("block = [32]", f"block = [{threads}]"))


def outcome(subject: Subject) -> str:
    """The outcome of a proof attempt: certified, refuted or not certified."""
    return by_contract.prove(subject.ptx, subject.contract).outcome


# Conditions that are false on a device for some problem. Proofs once took each of them for true.
WRONG = {
    "a predicate of data": row_sum(load=LOAD + "setp.eq.f32 %p1, %f2, 0f3F800000; @%p1 mov.f32 %f2, 0f00000000;"),
    "a predicate of data's bits": row_sum(
        load=LOAD + "mov.b32 %r8, %f2; setp.ne.s32 %p1, %r8, 5; @%p1 bra A; mov.f32 %f2, 0f00000000; A:"
    ),
    "a register that both sides of a branch set": row_sum(
        "mov.u32 %r8, %r3; mov.u32 %r9, 1000; setp.lt.s32 %p5, %r3, 16; @%p5 bra A; mov.u32 %r8, %r9; bra.uni B;"
        "A: mov.u32 %r8, %r9; B: setp.ne.s32 %p1, %r8, %r9;" + ZERO
    ),
    "a sum of integers as floats": row_sum(
        "ld.param.u32 %r8, [most]; mov.b32 %f5, %r8; add.f32 %f6, %f5, %f5; mov.b32 %r9, %f6; shl.b32 %r10, %r8, 1;"
        "setp.eq.s32 %p1, %r9, %r10;" + ZERO
    ),
    "a product of integers as floats": row_sum(
        "mov.b32 %f5, %r1; mul.f32 %f6, %f5, %f5; mov.b32 %r9, %f6; setp.ne.s32 %p1, %r9, 0;" + ZERO
    ).revise_contract("multiple = 32", "multiple = 32, most = 32768"),
    "a known product above 2^64": row_sum(
        "ld.param.u64 %q8, [z]; mul.lo.s64 %q9, %q8, %q8; mul.lo.s64 %q9, %q9, %q8; setp.ne.s64 %p1, %q9, 0;" + ZERO
    ),
    "a known product above 2^64 is compared": row_sum(
        "ld.param.u64 %q8, [z]; mul.lo.s64 %q9, %q8, %q8; mul.lo.s64 %q9, %q9, %q8; setp.gt.u64 %p1, %q9, %q8;" + ZERO
    ),
    "a known product above 2^32 is compared": row_sum(
        "ld.param.u64 %q8, [z]; cvt.u32.u64 %r8, %q8; mul.lo.u32 %r8, %r8, 256; add.u32 %r8, %r8, 32;"
        "setp.ne.s32 %p1, %r1, %r8;" + ZERO
    ),
    "a known product above 2^32 is divided": row_sum(
        "ld.param.u64 %q8, [z]; cvt.u32.u64 %r8, %q8; mul.lo.u32 %r8, %r8, 256; add.u32 %r8, %r8, 32;"
        "div.u32 %r9, %r8, 64; setp.ne.s32 %p1, %r9, 0;" + ZERO
    ),
    "a number above 2^63 is compared": row_sum(
        "mov.u64 %q8, -1; cvt.u64.u32 %q9, %r1; setp.gt.u64 %p1, %q9, %q8;" + ZERO
    ),
    "the minimum with a number above 2^63": row_sum(
        "mov.u64 %q8, -1; cvt.u64.u32 %q9, %r1; min.u64 %q10, %q9, %q8; setp.ne.s64 %p1, %q10, %q9;" + ZERO
    ),
    "more threads than the kernel is compiled for": row_sum(attributes=".maxntid 16, 1, 1"),
    "other threads than the kernel requires": row_sum(attributes=".reqntid 64, 1, 1"),
    "more shared memory than there is": row_sum().revise_contract("tile = [1]", "tile = [1]\nshared = 1000000"),
    "bf16 that is read as f16": row_sum(
        load="ld.global.u16 %h1, [%q4]; cvt.f32.f16 %f2, %h1;", width=2
    ).revise_contract('"f32", shape = ["m", "n"]', '"bf16", shape = ["m", "n"]'),
}  # fmt: skip

# Two warps write their sums to shared memory, and a thread adds them.
PARTIALS = """
  shr.u32 %r8, %r3, 5; shl.b32 %r9, %r8, 2; mov.u32 %r10, s; add.s32 %r10, %r10, %r9;
  and.b32 %r11, %r3, 31; setp.ne.s32 %p5, %r11, 0; @%p5 bra A; st.shared.f32 [%r10], %f1; A:
  BARRIER
  ld.shared.f32 %f2, [s]; ld.shared.f32 %f3, [s+4]; add.f32 %f1, %f2, %f3;
"""


def two_warps(barrier: str) -> Subject:
    """The sum of rows by two warps, with this text in place of the barrier between them."""
    return row_sum(PARTIALS.replace("BARRIER", barrier), threads=64).revise_contract("multiple = 32", "multiple = 64")


def test_the_kernels_without_a_fault_are_certified() -> None:
    half = row_sum(load="ld.global.u16 %h1, [%q4]; cvt.f32.f16 %f2, %h1;", width=2)
    right = [
        row_sum(),
        row_sum("setp.ge.s32 %p1, %r1, 32;" + ZERO),
        row_sum(attributes=".maxntid 32, 1, 1"),
        half.revise_contract('"f32", shape = ["m", "n"]', '"f16", shape = ["m", "n"]'),
        two_warps("bar.sync 0;"),
        two_warps("bar.sync 0, 64;"),
    ]
    assert [outcome(subject) for subject in right] == ["certified"] * len(right)


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_kernel_is_not_certified(fault: str) -> None:
    assert outcome(WRONG[fault]) != "certified"


@pytest.mark.parametrize("barrier", ["bar.sync %r8;", "bar.sync %r8, 64;", "bar.sync 0, 32;", ""])
def test_warps_that_do_not_meet_are_not_certified(barrier: str) -> None:
    assert outcome(two_warps(barrier)) != "certified"


def test_of_lanes_that_read_a_place_none_may_write_it() -> None:
    """Of several lanes that have read an element, none may write it before a barrier, not even the last that read."""
    memory, lanes = SharedMemory(64, 0), np.array([3, 40])
    place = np.zeros((1, 1), np.int64)
    memory.read(place, lanes[1:])
    memory.read(np.repeat(place, 2, 0), lanes)
    with pytest.raises(NotCertified):
        memory.write(place, lanes[1:], memory.read(place, lanes[1:]))


def test_a_state_is_another_one_after_a_store_to_d_or_the_workspace() -> None:
    first = State(0, {}, Contents.empty(4), SlabContents.nothing(2))
    stored, counted = first.copied(), first.copied()
    stored.written.append((np.zeros(1, int), np.zeros(1, int)))
    counted.slab.stage = Stage.COUNTED
    assert [each.stored_the_same(first) for each in (first.copied(), stored, counted)] == [True, False, False]


def test_a_shift_that_wraps_and_operands_beyond_memory_end_no_proof_with_an_error() -> None:
    wraps = "ld.param.u64 %q8, [z]; mul.lo.s64 %q9, %q5, %q8; shl.b64 %q9, %q9, 63; setp.eq.s64 %p1, %q9, 0;"
    assert outcome(row_sum(wraps + ZERO)) in ("certified", "not certified")
    gaps = row_sum().revise_contract('shape = ["m", "n"] }', 'shape = ["m", "n"], ld = "z" }')
    assert outcome(gaps.revise_contract("m = { most", "m = { least = 100000, most")) == "not certified"


def test_two_types_of_16_bits_are_not_covered() -> None:
    """Otherwise it would not be known of which type 16 bits are."""
    both = row_sum().revise_contract('"f32", shape = ["m", "n"]', '"f16", shape = ["m", "n"]')
    contract = both.contract
    contract.operands["D"] = contract.operands["D"].model_copy(update={"type": "bf16"})
    with pytest.raises(WrongInput):
        check(contract)


@pytest.mark.parametrize("look", [lambda word: word.view("f4"), lambda word: word.astype("f4")])
def test_a_word_is_no_float(look: object) -> None:
    with pytest.raises(NotCertified):
        look(Word(Polynomial.named("x"), 32, Facts({("x",): (0, 9)})))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("field", "value"),
    [("outcome", "refuted"), ("assumptions", []), ("terms", {"%f9": 32}), ("words", {"%r4": {"": 32, "y": 1}})],
)
def test_an_edited_certificate_does_not_hold(field: str, value: object) -> None:
    subject = row_sum()
    fields = json.loads(by_contract.prove(subject.ptx, subject.contract).model_dump_json())
    certificate = fields["certificate"]
    for part in (fields, certificate, certificate["claims"][0]["invariant"]):
        if field in part:
            part[field] = part[field] | value if isinstance(value, dict) else value
    with pytest.raises(NotCertified):
        by_contract.recheck(by_contract.Attempt.model_validate_json(json.dumps(fields)), subject.ptx)


@pytest.mark.parametrize(("output", "covered"), [("f16", True), ("f32", False)])
def test_sums_in_f16_are_not_those_of_another_type(output: str, covered: bool) -> None:
    kinds, lane = Kinds(), np.arange(32)

    def registers(source: str, count: int, halves: int) -> tuple[Cells, ...]:
        number = kinds.number(Kind(source, Polynomial.of(0), Polynomial.of(0)))
        places = [(lane // 4 + 8 * (r % halves), lane % 4 * 2 + 8 * (r // halves)) for r in range(count)]
        return tuple(
            Cells(np.full((32, 2), number), np.stack([row, row], 1), np.stack([k, k + 1], 1), 2) for row, k in places
        )

    shape = Shape("m16n8k16", 16, "f16", "f16")
    arguments = shape, registers("A", 4, 2), registers("B", 2, 1), (np.zeros(32, "u4"),) * 2
    products = Products(kinds, "f16", output)
    if covered:
        assert len(products.multiply(*arguments)) == 2
    else:
        with pytest.raises(NotCertified):
            products.multiply(*arguments)
