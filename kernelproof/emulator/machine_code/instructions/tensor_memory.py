"""Lowers instructions of tensor memory (sm_100): products, commits, loads, stores, and the allocations that ``idioms``
has found.

Machine code has no trace of tcgen05.fence, so every arrival and wait gets one. Loads are complete where an instruction
waits for their scoreboard.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import reduce
from operator import or_

from kernelproof.emulator.blackwell.fragments import SHAPES
from kernelproof.emulator.machine_code.lowering import Lowering, label_of, mnemonic
from kernelproof.emulator.machine_code.operands import Register, operand
from kernelproof.sass import Instruction, queue_names

_TENSOR_OPERAND = re.compile(r"(\w+)\[(UR\d+)(?:\+(-?0x[0-9a-f]+))?\]$")
# The shapes of loads and stores, as nvdisasm and as PTX names them.
_SHAPES = {"16dp64bit": "16x64b", "16dp128bit": "16x128b", "16dp256bit": "16x256b", "32dp32bit": "32x32b"}
_TIMES = " ".join(f"x{1 << n}" for n in range(8))


def _group(ins: Instruction) -> str:
    """The modifier ``cta_group`` of the PTX instruction."""
    return f"cta_group::{2 if '2CTA' in ins.modifiers else 1}"


def _place(text: str, kind: str) -> tuple[Register, int]:
    """The uniform register and the offset of an operand such as ``tmem[UR4]``."""
    match = _TENSOR_OPERAND.match(text)
    assert match is not None
    assert match[1] == kind
    register = operand(match[2])
    assert isinstance(register, Register)
    return register, int(match[3] or "0", 16)


def _tensor(low: Lowering, text: str) -> str:
    """An address in tensor memory, in brackets."""
    register, offset = _place(text, "tmem")
    return f"[{low.bits(register)}{f'{offset:+}' if offset else ''}]"


@mnemonic("TMEM_ALLOC", "2CTA")
def allocate(low: Lowering, ins: Instruction) -> None:
    """tcgen05.alloc, in place of the code that ptxas generates for it."""
    address, columns = ins.operands
    assert ins.target is not None
    low.emit(f"tcgen05.alloc.{_group(ins)}.sync.aligned.shared::cta.b32", low.near_address(address, 0), columns)
    low.emit("bra", label_of(ins.target))


_RELEASED = "%released"


@mnemonic("TMEM_RELEASED")
def save_released(low: Lowering, ins: Instruction) -> None:
    """Saves the address that the next tcgen05.dealloc releases."""
    low.kinds[_RELEASED] = "b32"
    low.emit("mov.b32", _RELEASED, low.word(ins.operands[0]))


@mnemonic("TMEM_DEALLOC", "2CTA")
def free(low: Lowering, ins: Instruction) -> None:
    """tcgen05.dealloc, in place of the code that ptxas generates for it."""
    assert ins.target is not None
    low.emit(f"tcgen05.dealloc.{_group(ins)}.sync.aligned.b32", _RELEASED, ins.operands[0])
    low.emit("bra", label_of(ins.target))


@mnemonic("TMEM_RELINQUISH", "2CTA")
def relinquish(low: Lowering, ins: Instruction) -> None:
    """tcgen05.relinquish_alloc_permit."""
    low.emit(f"tcgen05.relinquish_alloc_permit.{_group(ins)}.sync.aligned")


@mnemonic("UTCHMMA", "2CTA")
def multiply(low: Lowering, ins: Instruction) -> None:
    """tcgen05.mma of kind::f16 or kind::tf32, by the types in its instruction descriptor.

    After that descriptor come the mask of lanes of D that are not written (optional), the predicate that products are
    added to D, and the scale of D (optional).
    """
    low.once()
    a, b, d, _, instruction_descriptor, *disabled, accumulates = [
        text for text in ins.operands if not text.startswith("0x")
    ]
    scale = [str(int(text, 0)) for text in ins.operands if text.startswith("0x")]
    left = _tensor(low, a) if a.startswith("tmem") else _descriptor(low, a, "gdesc")
    lanes = [low.words(text, 8 if "2CTA" in ins.modifiers else 4) for text in disabled]
    kind, _ = _place(instruction_descriptor, "idesc")
    test = low.predicate(accumulates)
    if test in ("0", "1"):
        test = low.computed("setp.eq.u32", test, "1", kind="pred")
    op = f"tcgen05.mma.{_group(ins)}.kind::of_descriptor"
    low.emit(
        op, _tensor(low, d), left, _descriptor(low, b, "gdesc"), low.bits(kind), *lanes, low.unnegated(test), *scale
    )


def _descriptor(low: Lowering, text: str, kind: str) -> str:
    """The descriptor of 64 bits in a pair of uniform registers."""
    register, offset = _place(text, kind)
    assert not offset
    return low.join(low.bits(register), low.bits(register, 1))


@mnemonic("UTCBAR", "2CTA MULTICAST")
def commit(low: Lowering, ins: Instruction) -> None:
    """tcgen05.commit."""
    low.once()
    address, _, *ranks = ins.operands
    op = f"tcgen05.commit.{_group(ins)}.mbarrier::arrive::one.shared::cluster"
    mask = []
    if "MULTICAST" in ins.modifiers:
        op, mask = f"{op}.multicast::cluster", [low.computed("cvt.u16.u32", low.word(ranks[0]), kind="b16")]
    low.emit(f"{op}.b64", low.near_address(address, 0), *mask)


def _form(ins: Instruction) -> tuple[str, int]:
    """The shape and repetition of a load or store as PTX names them, and its number of registers. nvdisasm leaves out
    ``32dp32bit`` and ``x1``."""
    shape = next((_SHAPES[part] for part in ins.modifiers if part in _SHAPES), "32x32b")
    times = next((int(part[1:]) for part in ins.modifiers if part in _TIMES.split()), 1)
    return f"{shape}.x{times}", SHAPES[shape][0] * times


def load_scoreboards(instructions: Sequence[Instruction], sm: str) -> int:
    """The mask of the scoreboards that show when loads of tensor memory are complete. A load may set none of its own:
    later instructions in its queue end after it, so a wait for one of them is also a wait for the load."""
    queue = next((queue_names(ins, sm)[0] for ins in instructions if ins.name == "LDTM"), None)
    taken = (ins.control.write_barrier for ins in instructions if queue and queue_names(ins, sm)[0] == queue)
    return reduce(or_, (1 << board for board in taken if board is not None), 0)


@mnemonic("LDTM", f"{' '.join(_SHAPES)} {_TIMES} PACK16BIT")
def load(low: Lowering, ins: Instruction) -> None:
    """tcgen05.ld."""
    result, address = ins.operands
    form, count = _form(ins)
    packed = ".pack::16b" if "PACK16BIT" in ins.modifiers else ""
    low.emit(f"tcgen05.ld.sync.aligned.{form}{packed}.b32", low.targets(result, count), _tensor(low, address))


@mnemonic("STTM", f"{' '.join(_SHAPES)} {_TIMES} EXPAND16BIT")
def store(low: Lowering, ins: Instruction) -> None:
    """tcgen05.st. FENCE.VIEW.ASYNC.T waits for it."""
    address, source = ins.operands
    form, count = _form(ins)
    unpacked = ".unpack::16b" if "EXPAND16BIT" in ins.modifiers else ""
    low.emit(f"tcgen05.st.sync.aligned.{form}{unpacked}.b32", _tensor(low, address), low.words(source, count))
