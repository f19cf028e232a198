"""Lowers bulk copies: UTMA* copy by tensor maps, UBLK* copy consecutive bytes.

The first operand names consecutive uniform registers: they have the shared address, then the address of the mbarrier
(loads only), then the coordinates. A register with a size, in units of 16 bytes, has the mask of a multicast in its
upper half.
"""

from __future__ import annotations

from kernelproof.emulator.machine_code.lowering import Lowering, mnemonic
from kernelproof.emulator.machine_code.operands import Address, Register, operand
from kernelproof.sass import Instruction

_DIMENSIONS = "1D 2D 3D 4D 5D"  # the modifiers that say how many a tensor has
_COMPLETION = "mbarrier::complete_tx::bytes"


def _first(text: str) -> Register:
    """The first register of an operand in brackets."""
    address = operand(text)
    assert isinstance(address, Address)
    assert not address.offset
    (register,) = address.registers
    return register


def _words(low: Lowering, text: str, start: int, count: int) -> str:
    """``count`` of the consecutive registers that an operand names, from number ``start`` on."""
    return ", ".join(low.bits(_first(text), start + i) for i in range(count))


def _box(low: Lowering, ins: Instruction, registers: str, start: int, tensor: str) -> str:
    """The PTX operand of a box: the tensor map, and the coordinates. ``registers``: the operand that names consecutive
    registers, of which those from number ``start`` on have the coordinates."""
    rank = next(int(part[0]) for part in ins.modifiers if part in _DIMENSIONS.split())
    return f"[{_pointer(low, tensor)}, {{{_words(low, registers, start, rank)}}}]"


def _pointer(low: Lowering, text: str) -> str:
    """The address of 64 bits in a pair of registers."""
    first = _first(text)
    return low.join(low.bits(first), low.bits(first, 1))


def _shared_address(low: Lowering, text: str, number: int = 0) -> str:
    """The PTX operand, in brackets, for the shared address that an operand's register ``number`` holds. The operand
    names the first of consecutive registers."""
    return f"[{low.bits(_first(text), number)}]"


def _ranks(low: Lowering, text: str) -> str:
    """The mask of a multicast, in the upper half of a register."""
    return low.computed("cvt.u16.u32", low.computed("shr.u32", low.word(text), "16"), kind="b16")


@mnemonic("UTMALDG", f"{_DIMENSIONS} MULTICAST 2CTA")
def load_box(low: Lowering, ins: Instruction) -> None:
    """cp.async.bulk.tensor to shared memory. Cache hints, the last operands, are ignored."""
    low.once()
    registers, tensor, *rest = ins.operands
    op = f"cp.async.bulk.tensor.{_rank(ins)}.shared::cluster.global.tile.{_COMPLETION}"
    ranks = []
    if "MULTICAST" in ins.modifiers:
        op, ranks = f"{op}.multicast::cluster", [_ranks(low, rest[0])]
    if "2CTA" in ins.modifiers:
        op += ".cta_group::2"
    low.emit(
        op, _shared_address(low, registers), _box(low, ins, registers, 2, tensor), _shared_address(low, registers, 1),
        *ranks,
    )  # fmt: skip


def _rank(ins: Instruction) -> str:
    """The number of dimensions, as PTX names it."""
    return next(part.lower() for part in ins.modifiers if part in _DIMENSIONS.split())


@mnemonic("UTMASTG", _DIMENSIONS)
def store_box(low: Lowering, ins: Instruction) -> None:
    """cp.async.bulk.tensor to global memory."""
    low.once()
    registers, tensor, *_ = ins.operands
    op = f"cp.async.bulk.tensor.{_rank(ins)}.global.shared::cta.tile.bulk_group"
    low.emit(op, _box(low, ins, registers, 1, tensor), _shared_address(low, registers))


@mnemonic("UTMAREDG", f"{_DIMENSIONS} ADD MIN MAX INC DEC AND OR XOR")
def reduce_box(low: Lowering, ins: Instruction) -> None:
    """cp.reduce.async.bulk.tensor."""
    low.once()
    registers, tensor, *_ = ins.operands
    function = next(part.lower() for part in ins.modifiers if part not in _DIMENSIONS.split())
    op = f"cp.reduce.async.bulk.tensor.{_rank(ins)}.global.shared::cta.{function}.tile.bulk_group"
    low.emit(op, _box(low, ins, registers, 1, tensor), _shared_address(low, registers))


@mnemonic("UBLKCP", "S G MULTICAST")
def copy(low: Lowering, ins: Instruction) -> None:
    """cp.async.bulk. The first modifier names the state space of the destination, the second that of the source."""
    low.once()
    destination, source, size, *_ = ins.operands
    count = low.computed("shl.b32", low.computed("and.b32", low.word(size), "0xffff"), "4")
    if ins.modifiers[0] == "G":
        low.emit(
            "cp.async.bulk.global.shared::cta.bulk_group",
            f"[{_pointer(low, destination)}]",
            _shared_address(low, source),
            count,
        )
        return
    ranks = [_ranks(low, size)] if "MULTICAST" in ins.modifiers else []
    multicast = ".multicast::cluster" if ranks else ""
    if ins.modifiers[1] == "G":
        origin, start = "global", f"[{_pointer(low, source)}]"
    else:
        origin, start = "shared::cta", _shared_address(low, source)
    op = f"cp.async.bulk.shared::cluster.{origin}.{_COMPLETION}{multicast}"
    low.emit(op, _shared_address(low, destination), start, count, _shared_address(low, destination, 1), *ranks)


@mnemonic("UTMACMDFLUSH")
def commit(low: Lowering, ins: Instruction) -> None:  # noqa: ARG001
    """cp.async.bulk.commit_group. DEPBAR waits for the group."""
    low.once()
    low.emit("cp.async.bulk.commit_group")


@mnemonic("UTMACCTL UBLKPF", "PF L2")
def prefetch(low: Lowering, ins: Instruction) -> None:
    """Prefetches of tensor maps and of consecutive bytes, which change no value."""


@mnemonic("UTMAPF", f"L2 {_DIMENSIONS}")
def prefetch_box(low: Lowering, ins: Instruction) -> None:
    """cp.async.bulk.prefetch.tensor. Its first operand has the coordinates alone."""
    low.once()
    registers, tensor, *_ = ins.operands
    low.emit(f"cp.async.bulk.prefetch.tensor.{_rank(ins)}.L2.global.tile", _box(low, ins, registers, 0, tensor))


_WORDS = {"64": 2, "128": 4}  # modifier -> words that are stored


@mnemonic("STAS", "64 128")
def store_async(low: Lowering, ins: Instruction) -> None:
    """st.async. A pair of registers has the address, and the address of the mbarrier."""
    addresses, value = ins.operands
    pair = _first(addresses)
    count = _WORDS[ins.modifiers[0]] if ins.modifiers else 1
    vector, data = (f".v{count}", low.words(value, count)) if count > 1 else ("", low.word(value))
    op = f"st.async.shared::cluster.{_COMPLETION}{vector}.b32"
    low.emit(op, f"[{low.bits(pair)}]", data, f"[{low.bits(pair, 1)}]")
