"""Lowers moves between registers, constant banks and special registers, selection, and permutation of bytes."""

from __future__ import annotations

from kernelproof.emulator.machine_code.lowering import Lowering, is_predicate, is_zero, mnemonic
from kernelproof.emulator.machine_code.operands import Constant, operand
from kernelproof.emulator.state.windows import SHIFT_TO_WINDOW, Window
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
    "SR_GLOBALTIMERLO": "%globaltimer_lo",
    "SR_GLOBALTIMERHI": "%globaltimer_hi",
    "SR_CgaCtaId": "%cluster_ctarank",
    "SR_SMEMSZ": "%total_smem_size",
}
# Special registers of 64 bits, by the name of their lower word.
_PAIRS = {"SR_CLOCKLO": "%clock64", "SR_GLOBALTIMERLO": "%globaltimer"}
# Registers with a fixed number: the upper word of generic addresses in shared memory; and SR_CgaSize. Compilers use the
# latter only as a factor of the index into the words of bank 0 that describe the cluster, of which there is one copy.
_FIXED_NUMBERS = {"SRZ": 0, "SR_SWINHI": Window.SHARED << SHIFT_TO_WINDOW - 32, "SR_CgaSize": 0}
# Registers that hold the number or count of warps from bit 8 up.
_WARP_NUMBERS = {"SR_VIRTID": "%warpid", "SR_VIRTCFG": "%nwarpid"}


@mnemonic("MOV UMOV", "64")
def mov(low: Lowering, ins: Instruction) -> None:
    """A move of a word, or of two words, from registers, a literal or a constant bank."""
    if "64" in ins.modifiers:
        low.set_pair(ins.operands[0], low.pair(ins.operands[1]))
        return
    low.set(ins.operands[0], low.word(ins.operands[1]))


@mnemonic("S2R S2UR CS2R", "32")
def special(low: Lowering, ins: Instruction) -> None:
    """A read of a special register. CS2R reads 64 bits, unless it has ``.32``."""
    result, name = ins.operands
    wide = ins.name == "CS2R" and "32" not in ins.modifiers
    if name in _FIXED_NUMBERS:
        low.set(result, str(_FIXED_NUMBERS[name]))
        if wide and not is_zero(result):
            low.emit("mov.b32", low.target(result, 1), "0")
    elif wide and name in _PAIRS:
        low.set_pair(result, low.computed("mov.u64", _PAIRS[name], kind="b64"))
    elif name in _WARP_NUMBERS:
        low.set(result, low.computed("shl.b32", low.computed("mov.u32", _WARP_NUMBERS[name]), "8"))
    elif name in _SPECIALS and not wide:
        low.set(result, _SPECIALS[name])
    else:
        raise low.refusal(f"special register {name} is not modelled")


@mnemonic("ULDC LDC LDCU", "64 128 U8 S8 U16 S16")
def load_constant(low: Lowering, ins: Instruction) -> None:
    """Words of a constant bank, or a byte or half of one word.

    LDC may add an index register to the offset. What is indexed is a parameter, another constant bank, or the words
    that describe the cluster; for these the index is 0 (see ``_FIXED_NUMBERS``).
    """
    result, text = ins.operands
    source = operand(text)
    assert isinstance(source, Constant)
    narrow = next((part.lower() for part in ins.modifiers if part not in ("64", "128")), "")
    count = 4 if "128" in ins.modifiers else 2 if "64" in ins.modifiers else 1
    if source.base is not None and source.base.number is not None:
        if not source.bank and low.bank.word(source.offset) in low.bank.words.values():
            # The index may be dropped: on sm_100 a word of the launch is only indexed by a multiple of SR_CgaSize,
            # which is 0 here. That is assumed of ptxas, not checked.
            word = Constant(0, source.offset)
            for i in range(count):
                low.emit("mov.b32", low.target(result, i), low.bits(word, i))
            return
        index = low.computed("cvt.u64.u32", low.bits(source.base), kind="b64")
        vector, target = (f".v{count}", low.targets(result, count)) if count > 1 else ("", low.target(result))
        if (variable := low.data.variable(source.bank)) is not None:
            base = low.computed("mov.u64", variable, kind="b64")
            address = f"[{low.computed('add.s64', base, index, kind='b64')}+{source.offset}]"
            low.emit(f"ld.const{vector}.{narrow or 'b32'}", target, address)
            return
        if source.bank or source.offset < low.bank.start:
            raise low.refusal(f"an index into constant bank {source.bank} at offset {source.offset:#x} is not modelled")
        low.emit(f"ld.param{vector}.{narrow or 'b32'}", target, f"[{index}+{source.offset - low.bank.start}]")
        return
    if narrow:
        _load_part(low, result, source, narrow)
        return
    for i in range(count):
        low.emit("mov.b32", low.target(result, i), low.word(text, i))


def _load_part(low: Lowering, result: str, source: Constant, narrow: str) -> None:
    """A byte or a half of a word of a constant bank."""
    word = low.bits(source._replace(offset=source.offset & ~3, base=None))
    bits = narrow[1:]
    if word.isdigit():
        word = low.computed("mov.b32", word)
    low.set(result, low.computed(f"bfe.{narrow[0]}32", word, str(8 * (source.offset & 3)), bits))


@mnemonic("R2UR", "OR FILL BROADCAST")
def to_uniform(low: Lowering, ins: Instruction) -> None:
    """A move to a uniform register of a value that all lanes of the warp share.

    On hardware the result predicate is true in lanes whose value differs from the moved one, and a loop repeats the
    move for them; ``.OR`` combines it with its old value. Here each lane has its own uniform registers, so no lane
    differs and the predicate is 0. With ``.BROADCAST`` a loop elects lanes in turn, and each moves its own value.

    A move to URZ only compares: the predicate is true in lanes whose value differs from that of the last active lane.
    """
    if is_predicate(ins.operands[0]):
        differs, value = "0", low.word(ins.operands[2])
        if is_zero(ins.operands[1]) and "OR" not in ins.modifiers:
            active = low.computed("activemask.b32")
            moved = low.computed("shfl.sync.idx.b32", value, low.computed("bfind.u32", active), "31", active)
            differs = low.computed("setp.ne.u32", value, moved, kind="pred")
        if "OR" not in ins.modifiers:
            low.set_predicate(ins.operands[0], differs)
        low.set(ins.operands[1], value)
        return
    low.set(ins.operands[0], low.word(ins.operands[-1]))


@mnemonic("SEL USEL", "64")
def select(low: Lowering, ins: Instruction) -> None:
    """The first source if the predicate holds, else the second."""
    result, a, b, p = ins.operands
    test = low.predicate(p)
    if test[0] == "!":
        a, b, test = b, a, test[1:]
    if "64" in ins.modifiers:
        low.set_pair(result, low.computed("selp.b64", low.pair(a), low.pair(b), test, kind="b64"))
    elif not is_zero(result):
        low.emit("selp.b32", low.target(result), low.word(a), low.word(b), test)


@mnemonic("PRMT UPRMT")
def permute(low: Lowering, ins: Instruction) -> None:
    """Bytes of two words, selected by the digits of a third: prmt.b32 with its operands in another order."""
    result, a, selector, b = ins.operands
    low.emit("prmt.b32", low.target(result), low.word(a), low.word(b), low.word(selector))
