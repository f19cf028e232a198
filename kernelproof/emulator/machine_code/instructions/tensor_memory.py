"""Tensor memory of sm_100: its products, commits, loads and, as ``idioms`` has found them, allocations.

Machine code has no trace of tcgen05.fence, and waits for loads by a scoreboard, so every arrival, wait and load is
ordered as its PTX would be with its fence.
"""

from __future__ import annotations

import re

from kernelproof.emulator.blackwell.fragments import SHAPES
from kernelproof.emulator.machine_code.lowering import Lowering, label_of, mnemonic
from kernelproof.emulator.machine_code.operands import Register, operand
from kernelproof.sass import Instruction

_PLACE = re.compile(r"(\w+)\[(UR\d+)(?:\+(-?0x[0-9a-f]+))?\]$")
_SHAPES = {"16dp64bit": "16x64b", "16dp128bit": "16x128b", "16dp256bit": "16x256b", "32dp32bit": "32x32b"}
_TIMES = " ".join(f"x{1 << n}" for n in range(8))


def _group(ins: Instruction) -> str:
    return f"cta_group::{2 if '2CTA' in ins.modifiers else 1}"


def _place(text: str, kind: str) -> tuple[Register, int]:
    """The uniform register and the offset of an operand such as ``tmem[UR4]``."""
    match = _PLACE.match(text)
    assert match is not None
    assert match[1] == kind
    register = operand(match[2])
    assert isinstance(register, Register)
    return register, int(match[3] or "0", 16)


def _tensor(low: Lowering, text: str) -> str:
    register, offset = _place(text, "tmem")
    return f"[{low.bits(register)}{f'{offset:+}' if offset else ''}]"


@mnemonic("TMEM_ALLOC", "2CTA")
def allocate(low: Lowering, ins: Instruction) -> None:
    """tcgen05.alloc, in place of the code that ptxas makes of it."""
    at, columns = ins.operands
    assert ins.target is not None
    low.emit(f"tcgen05.alloc.{_group(ins)}.sync.aligned.shared::cta.b32", low.near_address(at, 0), columns)
    low.emit("bra", label_of(ins.target))


@mnemonic("TMEM_DEALLOC", "2CTA")
def free(low: Lowering, ins: Instruction) -> None:
    """tcgen05.dealloc, in place of the code that ptxas makes of it."""
    at, columns = ins.operands
    assert ins.target is not None
    low.emit(f"tcgen05.dealloc.{_group(ins)}.sync.aligned.b32", low.word(at), columns)
    low.emit("bra", label_of(ins.target))


@mnemonic("TMEM_RELINQUISH", "2CTA")
def relinquish(low: Lowering, ins: Instruction) -> None:
    """tcgen05.relinquish_alloc_permit."""
    low.emit(f"tcgen05.relinquish_alloc_permit.{_group(ins)}.sync.aligned")


@mnemonic("UTCHMMA", "2CTA")
def multiply(low: Lowering, ins: Instruction) -> None:
    """tcgen05.mma of kind::f16, with A and B in shared memory."""
    low.once()
    a, b, d, _, form, keep = ins.operands
    pairs = [low.join(low.bits(first), low.bits(first, 1)) for first, _ in (_place(text, "gdesc") for text in (a, b))]
    kind, _ = _place(form, "idesc")
    test = low.unnegated(low.predicate(keep))
    low.emit(f"tcgen05.mma.{_group(ins)}.kind::f16", _tensor(low, d), *pairs, low.bits(kind), test)


@mnemonic("UTCBAR", "2CTA MULTICAST")
def commit(low: Lowering, ins: Instruction) -> None:
    """tcgen05.commit."""
    low.once()
    at, _, *ranks = ins.operands
    op = f"tcgen05.commit.{_group(ins)}.mbarrier::arrive::one.shared::cluster"
    mask = []
    if "MULTICAST" in ins.modifiers:
        op, mask = f"{op}.multicast::cluster", [low.computed("cvt.u16.u32", low.word(ranks[0]), kind="b16")]
    low.emit(f"{op}.b64", low.near_address(at, 0), *mask)


@mnemonic("LDTM", f"{' '.join(_SHAPES)} {_TIMES} PACK16BIT")
def load(low: Lowering, ins: Instruction) -> None:
    """tcgen05.ld and the wait for it."""
    result, at = ins.operands
    shape = _SHAPES[ins.modifiers[0]]
    times = next((int(part[1:]) for part in ins.modifiers if part in _TIMES.split()), 1)
    packed = ".pack::16b" if "PACK16BIT" in ins.modifiers else ""
    count = SHAPES[shape][0] * times
    low.emit(f"tcgen05.ld.sync.aligned.{shape}.x{times}{packed}.b32", low.targets(result, count), _tensor(low, at))
    low.emit("tcgen05.wait::ld.sync.aligned")
