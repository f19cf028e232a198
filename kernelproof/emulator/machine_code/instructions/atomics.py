"""Lowers atomics, fences, and the invalidation of the L1 cache that completes an acquire."""

from __future__ import annotations

from kernelproof.emulator.machine_code.instructions.memory import SCOPES, lies_in, place
from kernelproof.emulator.machine_code.lowering import Lowering, is_predicate, is_zero, mnemonic
from kernelproof.sass import Instruction

_OPERATIONS = "ADD MIN MAX AND OR XOR EXCH INC DEC CAS"
# The modifiers of those that return a value only.
_RETURNING = "CAST SPIN POPC"
_TYPES = "32 64 S32 U32 S64 U64 F32 F64 F16x2 BF16_V2 BF16x2"
_HINTS = "E STRONG CTA SM GPU SYS FTZ RN"
# The types of vectors: the PTX type of a register, and the number of registers.
_VECTORS = {"F32x2": ("f32", 2), "F32x4": ("f32", 4), "F16x4": ("f16x2", 2), "F16x8": ("f16x2", 4),
            "BF16x4": ("bf16x2", 2), "BF16x8": ("bf16x2", 4)}  # fmt: skip


def _kind(ins: Instruction, operation: str) -> str:
    """The PTX type of an atomic; u32 if none is named."""
    floats = {"F32": "f32", "F64": "f64", "F16x2": "f16x2", "BF16_V2": "bf16x2", "BF16x2": "bf16x2"}
    for part in ins.modifiers:
        if part in floats:
            return floats[part]
    wide = "64" if any(part.endswith("64") for part in ins.modifiers) else "32"
    if operation in ("AND", "OR", "XOR", "EXCH", "CAS"):
        return f"b{wide}"
    signed = any(part in ("S32", "S64") for part in ins.modifiers)
    return f"s{wide}" if signed and operation in ("MIN", "MAX") else f"u{wide}"


def _scope(ins: Instruction) -> str:
    """The scope of an instruction, as PTX names it."""
    return next((SCOPES[part] for part in ins.modifiers if part in SCOPES), "cta")


@mnemonic("ATOMG ATOM ATOMS", f"{_OPERATIONS} {_TYPES} {_HINTS} {_RETURNING} {' '.join(_VECTORS)}")
@mnemonic("RED REDG", f"{_OPERATIONS} {_TYPES} {_HINTS} {' '.join(_VECTORS)}")
def atomic(low: Lowering, ins: Instruction) -> None:
    """A relaxed read-modify-write. RED returns nothing. ``.CAST.SPIN`` is a compare-and-swap that returns whether it
    has swapped. ``.POPC.INC`` adds one for each lane."""
    if "CAST" in ins.modifiers:
        _compare_and_swap(low, ins)
        return
    if "POPC" in ins.modifiers:
        if not is_zero(ins.operands[0]):
            raise low.refusal("what this instruction returns to each lane is not known")
        space, address = place(low, ins, ins.operands[1])
        low.emit(f"atom.relaxed.cta{space}.add.u32", low.target(ins.operands[0]), address, "1")
        return
    operation = next(part for part in ins.modifiers if part in _OPERATIONS.split())
    kind = _kind(ins, operation)
    vector = next((part for part in ins.modifiers if part in _VECTORS), "")
    if vector:
        _add_vector(low, ins, *_VECTORS[vector])
        return
    operands = list(ins.operands)
    if is_predicate(operands[0]):
        has_succeeded = operands.pop(0)
        if ins.name == "ATOM" and has_succeeded != "PT":
            # The generic form does nothing at addresses in shared memory, and says so by a predicate. A loop that
            # follows then executes the atomic there.
            in_global = lies_in(low, operands[1], "global")
            low.set_predicate(has_succeeded, in_global)
            low.restrict(in_global)
    returns = not ins.name.startswith("RED")
    result = operands.pop(0) if returns else ""
    space, address = place(low, ins, operands.pop(0))
    wide = kind.endswith("64")
    values = [low.pair(text) if wide else low.word(text) for text in operands]
    option = ".noftz" if kind in ("f16x2", "bf16x2") else ""
    op = f"{'atom' if returns else 'red'}.relaxed.{_scope(ins)}{space}.{operation.lower()}{option}.{kind}"
    if not returns:
        low.emit(op, address, *values)
    elif wide:
        old = low.guarded_register("b64")
        low.emit(op, old, address, *values)
        low.set_pair(result, old)
    else:
        low.emit(op, low.target(result), address, *values)


def _add_vector(low: Lowering, ins: Instruction, kind: str, count: int) -> None:
    """Sums of ``count`` consecutive registers in global memory, each of them an atomic of its own."""
    operands = list(ins.operands)
    returns = ins.name == "ATOMG"
    if returns and operands.pop(0) != "PT":
        raise low.refusal("a predicate of this atomic is not modelled")
    result = operands.pop(0) if returns else ""
    space, address = place(low, ins, operands.pop(0))
    (source,) = operands
    values = "{" + ", ".join(low.computed("mov.b32", low.word(source, i)) for i in range(count)) + "}"
    option = "" if kind == "f32" else ".noftz"
    op = f"{'atom' if returns else 'red'}.relaxed.{_scope(ins)}{space}.v{count}.{kind}.add{option}"
    low.emit(op, *([low.targets(result, count)] if returns else []), address, values)


def _compare_and_swap(low: Lowering, ins: Instruction) -> None:
    """A compare-and-swap that returns 1 if it has swapped, else 0; or a predicate that says so."""
    result, address_text, compared, new = ins.operands
    space, address = place(low, ins, address_text)
    wide = "64" in ins.modifiers
    kind, read = ("b64", low.pair) if wide else ("b32", low.word)
    before = read(compared)
    old = low.guarded_register(kind)
    low.emit(f"atom.relaxed.cta{space}.cas.{kind}", old, address, before, read(new))
    swapped = low.computed(f"setp.eq.{kind}", old, before, kind="pred")
    if is_predicate(result):
        low.set_predicate(result, swapped)
        return
    has_swapped = low.number(swapped)
    if wide:
        low.set_pair(result, low.join(has_swapped, "0"))
    else:
        low.set(result, has_swapped)


@mnemonic("MEMBAR", "SC ALL CTA SM GPU SYS VC")
def fence(low: Lowering, ins: Instruction) -> None:
    """A fence that acquires and releases (``.ALL``), or that is sequentially consistent (``.SC``)."""
    low.emit(f"fence.{'sc' if 'SC' in ins.modifiers else 'acq_rel'}.{_scope(ins)}")


@mnemonic("CCTL", "IVALL E PF1 PF2 PML2 DML2")
def control_cache(low: Lowering, ins: Instruction) -> None:
    """With ``.IVALL``, invalidate the L1 cache, which is the second half of an acquire. Prefetches, and priorities
    of lines in the L2 cache (``.PML2``, ``.DML2``), change no value."""
    if "IVALL" in ins.modifiers:
        low.emit("fence.acquire.gpu")


@mnemonic("ERRBAR CGAERRBAR")
def error_barrier(low: Lowering, ins: Instruction) -> None:
    """A wait for errors of earlier accesses, which changes no value."""
