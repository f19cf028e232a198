"""Lowers F2FP: conversions of singles and halves to halves, to numbers of 8 bits and to tf32, packed in a register."""

from __future__ import annotations

from kernelproof.emulator.machine_code.instructions.floating import single
from kernelproof.emulator.machine_code.lowering import Lowering, is_zero, mnemonic
from kernelproof.emulator.machine_code.modifiers import rounding
from kernelproof.emulator.machine_code.operands import Register, operand
from kernelproof.sass import Instruction

_BYTES = ("E4M3", "E5M2")


@mnemonic("F2FP", f"F16 BF16 F32 TF32 {' '.join(_BYTES)} PACK_AB PACK_B PACK_AB_MERGE_C UNPACK_B UNPACK_B_MERGE_C "
          "MERGE_C RELU SATFINITE RZ")  # fmt: skip
def convert_packed(low: Lowering, ins: Instruction) -> None:
    """A conversion whose first type is that of the result. Of two sources the first one goes to the upper half.

    On sm_80 the sources are singles, and the result is fp16 if no type is named. A result of 16 bits goes to the lower
    half. The upper half comes from the last source (``MERGE_C``), which must be zero here.
    """
    types = [part.lower() for part in ins.modifiers if part in ("F16", "BF16", "F32", "TF32", *_BYTES)]
    kind, origin = types if len(types) == 2 else (*(types or ["f16"]), "f32")
    options = "".join(f".{part.lower()}" for part in ("RELU", "SATFINITE") if part in ins.modifiers)
    mode = f"cvt{rounding(ins)}{options}"
    result, *sources = ins.operands
    if any(part.endswith("MERGE_C") for part in ins.modifiers):
        if not is_zero(sources.pop()):
            raise low.refusal("a conversion that keeps the upper half of a register is not modelled")
        if origin == "f16":
            op, values = f"{mode}.{kind}x2.f16x2", [_whole(low, sources[-1])]
        else:
            op = f"{mode}.{kind}{'' if kind in ('f16', 'bf16') else 'x2'}.f32"
            values = [single(low, text) for text in sources]
        low.set(result, low.computed("cvt.u32.u16", low.computed(op, *values, kind="b16")))
    elif origin == "f32":
        op = f"{mode}.tf32.f32" if kind == "tf32" else f"{mode}.{kind}x2.f32"
        low.emit(op, low.target(result), *(single(low, text) for text in sources))
    else:
        pair = low.computed("cvt.u16.u32", _whole(low, sources[0]), kind="b16")
        low.emit(f"{mode}.{kind}x2.{origin}x2", low.target(result), pair)


def _whole(low: Lowering, text: str) -> str:
    """A source register without modifiers."""
    source = operand(text)
    assert isinstance(source, Register)
    assert not source.parts + tuple(source.signs)
    return low.bits(source)
