"""Lowers LDSM, STSM, MOVM and HMMA: the matrix instructions of a warp."""

from __future__ import annotations

from kernelproof.emulator.machine_code.instructions.memory import shared_address
from kernelproof.emulator.machine_code.lowering import Lowering, mnemonic
from kernelproof.sass import Instruction


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
