"""Lowers LDSM, STSM, MOVM, HMMA, IMMA and QMMA: the matrix instructions of a warp."""

from __future__ import annotations

from kernelproof.emulator.machine_code.instructions.memory import shared_address
from kernelproof.emulator.machine_code.lowering import Lowering, mnemonic
from kernelproof.sass import Instruction, mma_shape


def _form(ins: Instruction) -> tuple[int, str]:
    """How many matrices are moved, and the modifiers of the PTX instruction that moves them."""
    count = next((int(part) for part in ins.modifiers if part in ("2", "4")), 1)
    return count, f"sync.aligned.m8n8.x{count}{'.trans' if 'MT88' in ins.modifiers else ''}.shared.b16"


@mnemonic("LDSM", "16 M88 MT88 2 4")
def load_matrices(low: Lowering, ins: Instruction) -> None:
    """ldmatrix of one, two or four matrices."""
    count, form = _form(ins)
    result, address = ins.operands
    low.emit(f"ldmatrix.{form}", low.targets(result, count), shared_address(low, address))


@mnemonic("STSM", "16 M88 MT88 2 4")
def store_matrices(low: Lowering, ins: Instruction) -> None:
    """stmatrix of one, two or four matrices."""
    count, form = _form(ins)
    address, source = ins.operands
    low.emit(f"stmatrix.{form}", shared_address(low, address), low.words(source, count))


@mnemonic("MOVM", "16 MT88")
def transpose(low: Lowering, ins: Instruction) -> None:
    """movmatrix."""
    low.emit("movmatrix.sync.aligned.m8n8.trans.b16", low.target(ins.operands[0]), low.word(ins.operands[1]))


_INTEGERS = "S8 U8 S4 U4"
_EIGHTS = "E4M3 E5M2"


def _product(low: Lowering, ins: Instruction, shape: tuple[int, int, int], bits: int, types: str) -> None:
    """mma.sync. ``bits``: of an element of A and B. ``types``: the modifiers of the PTX instruction after its shape."""
    m, n, k = shape
    left, right = m * k * bits // 1024, n * k * bits // 1024  # registers of 4 bytes in each of 32 lanes
    total = m * n // (64 if types.startswith("f16") else 32)
    d, a, b, c = ins.operands[:4]
    satfinite = ".satfinite" if "SAT" in ins.modifiers else ""
    low.emit(
        f"mma.sync.aligned.m{m}n{n}k{k}.row.col{satfinite}.{types}", low.targets(d, total), low.words(a, left),
        low.words(b, right), low.words(c, total),
    )  # fmt: skip


@mnemonic("IMMA", f"16816 16832 16864 8816 8832 SAT {_INTEGERS}")
def multiply_integers(low: Lowering, ins: Instruction) -> None:
    """mma.sync of integers."""
    shape = mma_shape(ins)
    assert shape is not None
    left, right = (part.lower() for part in ins.modifiers if part in _INTEGERS.split())
    _product(low, ins, shape, int(left[1:]), f"s32.{left}.{right}.s32")


@mnemonic("QMMA", f"16816 16832 F16 F32 {_EIGHTS}")
def multiply_bytes(low: Lowering, ins: Instruction) -> None:
    """mma.sync of floating-point numbers of 8 bits."""
    shape = mma_shape(ins)
    assert shape is not None
    sums, left, right = (part.lower() for part in ins.modifiers[1:4])
    _product(low, ins, shape, 8, f"{sums}.{left}.{right}.{sums}")


_SHAPES = {"1688": "m16n8k8", "16816": "m16n8k16", "1684": "m16n8k4"}


@mnemonic("HMMA", "1688 16816 1684 F16 F32 BF16 TF32")
def multiply(low: Lowering, ins: Instruction) -> None:
    """mma.sync. Modifiers name the shape, the type of the sums, and that of the operands, which is f16 by default."""
    shape = _SHAPES[ins.modifiers[0]]
    sums = ins.modifiers[1].lower()
    kind = ins.modifiers[2].lower() if len(ins.modifiers) > 2 else "f16"
    row = int(shape.rpartition("k")[2]) * (4 if kind == "tf32" else 2)  # bytes of a row of A
    # Registers of 4 bytes in each of 32 lanes: 16 rows of A, 8 columns of B, 16 x 8 sums.
    left, right, total = row * 16 // 128, row * 8 // 128, 2 if sums == "f16" else 4
    d, a, b, c = ins.operands[:4]
    low.emit(
        f"mma.sync.aligned.{shape}.row.col.{sums}.{kind}.{kind}.{sums}", low.targets(d, total), low.words(a, left),
        low.words(b, right), low.words(c, total),
    )  # fmt: skip
