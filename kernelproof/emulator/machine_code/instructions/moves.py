"""Moves between registers, constant banks and special registers; selection; permutation of bytes."""

from __future__ import annotations

from kernelproof.emulator.machine_code.lowering import Lowering, is_zero, mnemonic
from kernelproof.emulator.machine_code.operands import Constant, operand
from kernelproof.sass import Instruction

# Special registers by their PTX names.
_SPECIALS = {
    **{f"SR_{name}.{axis}": f"%{name.lower()}.{axis.lower()}" for name in ("TID", "CTAID") for axis in "XYZ"},
    "SR_LANEID": "%laneid",
    "SR_EQMASK": "%lanemask_eq",
    "SR_LEMASK": "%lanemask_le",
    "SR_LTMASK": "%lanemask_lt",
    "SR_GEMASK": "%lanemask_ge",
    "SR_GTMASK": "%lanemask_gt",
    "SR_CLOCKLO": "%clock",
    "SR_CLOCKHI": "%clock_hi",
    "SR_VIRTUALSMID": "%smid",
}


_WIDE_SPECIALS = {"SR_CLOCKLO": "%clock64", "SR_GLOBALTIMERLO": "%globaltimer"}


@mnemonic("MOV UMOV")
def mov(low: Lowering, ins: Instruction) -> None:
    """A word of a register, a literal or a constant bank."""
    low.set(ins.operands[0], low.word(ins.operands[1]))


@mnemonic("S2R S2UR CS2R", "32")
def special(low: Lowering, ins: Instruction) -> None:
    """Special registers. CS2R reads 64 bits, without ``.32``."""
    result, name = ins.operands
    wide = ins.name == "CS2R" and "32" not in ins.modifiers
    if wide and name in _WIDE_SPECIALS:
        low.set_pair(result, low.computed("mov.u64", _WIDE_SPECIALS[name], kind="b64"))
        return
    if name == "SRZ":
        low.set(result, "0")
        if wide and not is_zero(result):
            low.emit("mov.b32", low.target(result, 1), "0")
        return
    if name not in _SPECIALS or wide:
        raise low.refusal(f"special register {name} is not modelled")
    low.set(result, _SPECIALS[name])


@mnemonic("ULDC LDC", "64 U8 S8 U16 S16")
def load_constant(low: Lowering, ins: Instruction) -> None:
    """Words of a constant bank, or a part of one. LDC adds a register to the offset of a parameter."""
    result, text = ins.operands
    source = operand(text)
    assert isinstance(source, Constant)
    narrow = next((part.lower() for part in ins.modifiers if part != "64"), "")
    count = 2 if "64" in ins.modifiers else 1
    if source.base is not None and source.base.number is not None:
        index = low.computed("cvt.u64.u32", low.bits(source.base), kind="b64")
        vector, target = (".v2", low.targets(result, 2)) if count == 2 else ("", low.target(result))
        if (variable := low.data.variable(source.bank)) is not None:
            base = low.computed("mov.u64", variable, kind="b64")
            at = f"[{low.computed('add.s64', base, index, kind='b64')}+{source.offset}]"
            low.emit(f"ld.const{vector}.{narrow or 'b32'}", target, at)
            return
        if source.bank or source.offset < low.bank.start:
            raise low.refusal(f"an index into constant bank {source.bank} is not modelled there")
        low.emit(f"ld.param{vector}.{narrow or 'b32'}", target, f"[{index}+{source.offset - low.bank.start}]")
        return
    if narrow:
        _load_part(low, result, source, narrow)
        return
    for i in range(count):
        low.emit("mov.b32", low.target(result, i), low.word(text, i))


def _load_part(low: Lowering, result: str, source: Constant, narrow: str) -> None:
    """A byte or half of a word of a constant bank."""
    word = low.bits(source._replace(offset=source.offset & ~3, base=None))
    bits = narrow[1:]
    if word.isdigit():
        word = low.computed("mov.b32", word)
    low.set(result, low.computed(f"bfe.{narrow[0]}32", word, str(8 * (source.offset & 3)), bits))


@mnemonic("R2UR")
def to_uniform(low: Lowering, ins: Instruction) -> None:
    """The value of a register that all lanes of the warp share."""
    low.set(ins.operands[0], low.word(ins.operands[-1]))


@mnemonic("SEL USEL")
def select(low: Lowering, ins: Instruction) -> None:
    """The first source where the predicate holds, else the second."""
    result, a, b, p = ins.operands
    test = low.predicate(p)
    if test[0] == "!":
        a, b, test = b, a, test[1:]
    if not is_zero(result):
        low.emit("selp.b32", low.target(result), low.word(a), low.word(b), test)


@mnemonic("PRMT UPRMT")
def permute(low: Lowering, ins: Instruction) -> None:
    """Bytes of two words, chosen by the digits of a third: prmt.b32 with its operands in another order."""
    result, a, selector, b = ins.operands
    low.emit("prmt.b32", low.target(result), low.word(a), low.word(b), low.word(selector))
