"""Translates instructions that access memory (loads, stores, atomics and cp.async) to Python text.

In this text, the letters ``S``, ``G``, ``L``, ``P`` and ``N`` are the batch's units for shared, global and local
memory, parameters and generic addresses; ``Q`` executes atomics and ``Z`` executes cp.async.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kernelproof.emulator.frontend.emitter import Emitter, Value
from kernelproof.emulator.frontend.instruction import Writes, instruction
from kernelproof.emulator.frontend.mutation_operators import (
    Change,
    Statement,
    drop,
    narrow,
    nudge,
    relax,
    shift,
    swap,
    vector_bytes,
    weaken,
)
from kernelproof.emulator.frontend.ptx import TYPE_BYTES, Imm, Instr, Mem, Operand, Reg, Sym, Vec
from kernelproof.emulator.frontend.registers import registers
from kernelproof.emulator.memory.atomics import AtomicKind
from kernelproof.emulator.state.scopes import CHECKED, CONSTANT, ORDERS, READ_ONLY, VOLATILE, Scope, scope_in, sized

_SPACES = ("global", "shared", "local", "param", "const")
# Cache operators are hints: a load with .cg or .cv is weak, even if it is used to poll.
_READ_STRONG = frozenset(("volatile", "relaxed", "mmio", "acquire"))
_READ_POLLS = _READ_STRONG | {"cv", "cg"}
_WRITE_STRONG = frozenset(("volatile", "relaxed", "mmio", "release"))
_ATOMICS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


def space_of(ins: Instr) -> str:
    """The state space of an access; ``generic`` if none is named."""
    for part in ins.parts[1:]:
        head = part.split(":")[0]
        if head in _SPACES:
            if part.startswith("shared:") and "cluster" in part:
                return "cluster"
            return head
    return "generic"


def _named_space(e: Emitter, space: str, mem: Mem) -> str:
    """The state space of an address; a generic address of a variable is in the variable's space."""
    return e.symbols[mem.base.name][0] if space == "generic" and isinstance(mem.base, Sym) else space


def _element_count(ins: Instr) -> int:
    """The number of elements per thread."""
    return 2 if "v2" in ins.parts else 4 if "v4" in ins.parts else 8 if "v8" in ins.parts else 1


def _pieces(total: int) -> list[tuple[int, int]]:
    """The pieces of an access of ``total`` bytes, each as (first byte, bytes). A piece has at most 16 bytes."""
    return [(0, total)] if total <= 16 else [(i, 16) for i in range(0, total, 16)]


def _require_aligned(e: Emitter, space: str, mem: Mem, total: int, mask: str) -> None:
    """Write a check that an access which consists of several pieces is aligned to its total size."""
    if total > 16 and space in ("global", "generic"):
        e.line(f"G.require_aligned({e.address(mem, space)}, {total}, {mask}, {e.site()})")


def _offset_address(mem: Mem, start: int) -> Mem:
    """The address ``start`` bytes after another one."""
    return Mem(mem.base, mem.offset + start) if start else mem


# --- facts of accesses


def _reaches(ins: Instr, space: str) -> bool:
    """May the access be to this state space?"""
    named = {p.split(":")[0] for p in ins.parts} & set(_SPACES)
    return not named or space in named


def _access_bytes(ins: Instr, space: str) -> int:
    """Bytes of a load or store, 0 if it cannot be to this state space."""
    return TYPE_BYTES.get(ins.parts[-1], 4) * _element_count(ins) if _reaches(ins, space) else 0


def _atomic_bytes(ins: Instr, space: str) -> int:
    """Bytes of an atomic, 0 if it cannot be to this state space."""
    return min(TYPE_BYTES.get(p, 16) for p in ins.parts[1:]) if _reaches(ins, space) else 0


def copy_access(ins: Instr, space: str) -> int:
    """Bytes of the smallest access of a cp.async, or of a bulk copy (16 if its size is no literal)."""
    size = ins.operands[2] if len(ins.operands) > 2 else None
    width = size.value if isinstance(size, Imm) else 16
    # A fourth operand of cp.async is a size in a register, so fewer bytes may be read from global memory.
    partial = len(ins.operands) > 3 and space == "global" and "bulk" not in ins.parts
    return min(width, 4) if partial else width


def _from_param(ins: Instr) -> bool:
    """Does this load read a kernel's parameter by name?"""
    mem = ins.operands[1]
    return space_of(ins) == "param" and isinstance(mem, Mem) and isinstance(mem.base, Sym)


def _polls(ins: Instr) -> bool:
    """May other threads change what this load reads, so that a loop around it waits?"""
    return not _READ_POLLS.isdisjoint(ins.parts)


def _strength(ins: Instr, modifiers: frozenset[str], ordering: tuple[str, ...]) -> int:
    """The strength of an access, see ``state.scopes``; 0 for a weak one. ``modifiers``: those that make it strong.
    ``ordering``: those of them that order other accesses, too."""
    if modifiers.isdisjoint(ins.parts):
        return 0
    scope_and_order = scope_in(ins.parts, Scope.GPU) | (0 if set(ordering).isdisjoint(ins.parts) else ORDERS)
    return sized(scope_and_order, TYPE_BYTES.get(ins.parts[-1], 4))


def _strength_in_shared(e: Emitter, ins: Instr, strength: int) -> int:
    """The strength of an access to shared memory. If no loop of the kernel polls, volatile accesses count as weak: code
    that exchanges data between lanes by them in lockstep lacks barriers, which must be reported."""
    if e.polls or not strength:
        return strength & ~READ_ONLY
    if "volatile" in ins.parts:
        return VOLATILE if ins.base == "ld" else 0
    return 0 if strength & (CHECKED | READ_ONLY) else strength


def observed_spaces(ins: Instr, polls: bool) -> frozenset[str]:
    """The state spaces in which an instruction may return another value than the newest. Only strong loads do this,
    and, if ``polls`` (the instruction is in a loop that polls), atomics that may leave memory unchanged."""
    strong_load = ins.base == "ld" and _strength(ins, _READ_STRONG, ()) > 0
    if not strong_load and not (polls and ins.base == "atom" and _may_preserve(ins)):
        return frozenset()
    return frozenset(space for space in ("global", "shared") if _reaches(ins, space))


def read_flags(ins: Instr, used: set[str]) -> frozenset[str]:
    """The state spaces in which an instruction may return the value of a strong write to its thread.

    Such instructions are strong loads, atomics whose result is ``used``, and relaxed operations on mbarriers, which
    make fenced accesses visible. In a state space without them, no thread can depend on the order of strong writes.
    """
    if ins.base in ("mbarrier", "emu_try_wait") and "relaxed" in ins.parts:
        return frozenset(("shared",))
    strong_load = ins.base == "ld" and _strength(ins, _READ_STRONG, ()) > 0
    if not strong_load and not (ins.base == "atom" and not used.isdisjoint(registers(ins.operands[0]))):
        return frozenset()
    return frozenset(space for space in ("global", "shared") if _reaches(ins, space))


def _may_preserve(ins: Instr) -> bool:
    """May an atomic leave memory unchanged, that is, write the value that it has read?"""
    # The literal 0 preserves memory in add, or and xor, and the literal -1 in and.
    operand = ins.operands[-1]
    literal = isinstance(operand, Imm) and operand.value in (0, -1)
    return literal or not {"cas", "min", "max"}.isdisjoint(ins.parts)


def _shift_address(s: Statement) -> Iterator[Change]:
    """A mutation of an access to shared or global memory: it is to the next address."""
    named = next((p.split(":")[0] for p in s.ins.parts if p.split(":")[0] in _SPACES), "")
    addressed = any(isinstance(op, Mem) and isinstance(op.base, Reg | Sym) for op in s.ins.operands)
    if named in ("shared", "global") and addressed:
        yield from shift(0, "shift", vector_bytes)(s)


def _drop_store(s: Statement) -> Iterator[Change]:
    """A mutation: a store to shared or global memory is dropped."""
    if any(True for _ in _shift_address(s)):
        yield from drop(s)


def _nudge_argument(s: Statement) -> Iterator[Change]:
    """A mutation: an argument of the kernel is larger by 8."""
    if space_of(s.ins) == "param" and len(s.ins.operands) == 2:
        yield from nudge(s)


def _element_bytes(ins: Instr) -> int:
    """Bytes of an element of an atomic."""
    return TYPE_BYTES.get(ins.parts[-1], 4)


# --- loads and stores


@instruction(
    "ld",
    "ldu",
    uniform=_from_param,
    polls=_polls,
    access=_access_bytes,
    mutations=(_shift_address, narrow, relax, _nudge_argument),
)
def load(e: Emitter, ins: Instr) -> None:
    """ld from any space."""
    kind = ins.parts[-1]
    n, width = _element_count(ins), TYPE_BYTES[kind]
    d, mem = ins.operands[:2]
    assert isinstance(mem, Mem)
    targets = d.items if isinstance(d, Vec) else (d,)
    k = f"{'i' if kind[0] == 's' else 'u'}{width}"
    space = space_of(ins)
    if space == "param" and isinstance(mem.base, Sym):
        _load_parameter(e, mem.base.name, mem.offset, targets, k)
        return
    strength = _strength(ins, _READ_STRONG, ("acquire",))
    if not strength and id(ins) in e.checked_loads:
        strength = Scope.GPU | CHECKED
    if ins.base == "ldu" or "nc" in ins.parts:
        strength = READ_ONLY
    e.trace(mem)
    mask = e.mask()
    _require_aligned(e, _named_space(e, space, mem), mem, n * width, mask)
    for start, size in _pieces(n * width):
        strengths = strength, _strength_in_shared(e, ins, strength)
        piece = e.temp(_load_call(e, space, _offset_address(mem, start), size, mask, strengths))
        count = size // width
        if count > 1:
            piece = e.temp(f"SPLIT({piece}, {count}, {width}, M.size)")
        for i in range(count):
            text = piece if count == 1 else f"{piece}[{i}]"
            e.assign(targets[start // width + i], Value(text if k[0] == "u" else f"{text}.view({k})", k, False))


def _load_parameter(e: Emitter, name: str, offset: int, targets: tuple[Operand, ...], kind: str) -> None:
    """Write loads of consecutive elements of a kernel parameter, which are uniform."""
    place = e.symbols.get(name)
    if place is None or place[0] != "param":
        raise e.fail(f"{name} is not a parameter")
    width = int(kind[1:])
    for i, target in enumerate(targets):
        text = f"P.constant({place[1] + offset + i * width}, {width})"
        e.assign(target, Value(f"S{8 * width}({text})" if kind[0] == "i" else text, kind, True))


def _load_call(e: Emitter, space: str, mem: Mem, size: int, mask: str, strengths: tuple[int, int]) -> str:
    """The call that loads ``size`` bytes per lane. ``strengths``: of an access to global, and to shared memory."""
    space = _named_space(e, space, mem)
    strength, in_shared = strengths
    if space in ("shared", "cluster"):
        return f"S.load({e.shared(mem)}, {size}, {mask}, {e.site()}, {in_shared})"
    address = e.address(mem, space)
    if space in ("local", "param"):
        return f"{'L' if space == 'local' else 'P'}.load({address}, {size}, {mask}, {e.site()})"
    if space == "generic":
        return f"N.load({address}, {size}, {mask}, {e.site()}, {strength}, {in_shared})"
    if space in ("global", "const"):
        return f"G.load({address}, {size}, {mask}, {e.site()}, {CONSTANT if space == 'const' else strength})"
    raise e.fail(f"state space {space}")


@instruction("st", writes=Writes.MEMORY, access=_access_bytes, mutations=(_shift_address, _drop_store, narrow, relax))
def store(e: Emitter, ins: Instr) -> None:
    """st to any space."""
    n, width = _element_count(ins), TYPE_BYTES[ins.parts[-1]]
    mem, s = ins.operands[:2]
    assert isinstance(mem, Mem)
    sources = s.items if isinstance(s, Vec) else (s,)
    strength = _strength(ins, _WRITE_STRONG, ("release",))
    e.trace(mem)
    mask = e.mask()
    _require_aligned(e, _named_space(e, space_of(ins), mem), mem, n * width, mask)
    for start, size in _pieces(n * width):
        value = join_elements(e, sources[start // width : (start + size) // width], width)
        strengths = strength, _strength_in_shared(e, ins, strength)
        piece = _offset_address(mem, start)
        e.line(_store_call(e, _named_space(e, space_of(ins), mem), piece, value, size, mask, strengths))


def join_elements(e: Emitter, sources: tuple[Operand, ...], width: int) -> str:
    """Elements of ``width`` bytes as one wide value to store."""
    if len(sources) == 1:
        return e.array(sources[0], f"u{width}")
    return f"JOIN({e.arrays(sources, f'u{width}')}, {width})"


def _store_call(e: Emitter, space: str, mem: Mem, value: str, size: int, mask: str, strengths: tuple[int, int]) -> str:
    """The call that stores ``size`` bytes per lane. ``strengths``: of an access to global, and to shared memory."""
    strength, in_shared = strengths
    if space in ("shared", "cluster"):
        return f"S.store({e.shared(mem)}, {value}, {size}, {mask}, {e.site()}, {in_shared})"
    if space == "local":
        return f"L.store({e.address(mem, space)}, {value}, {size}, {mask}, {e.site()})"
    if space == "generic":
        return f"N.store({e.address(mem, space)}, {value}, {size}, {mask}, {e.site()}, {strength}, {in_shared})"
    if space == "global":
        return f"G.store({e.address(mem, space)}, {value}, {size}, {mask}, {e.site()}, {strength})"
    raise e.fail(f"store to state space {space}")


# --- atomics


@instruction(
    "atom",
    writes=Writes.RESULT | Writes.MEMORY,
    polls=True,
    access=_atomic_bytes,
    mutations=(shift(0, "shift", _element_bytes), narrow, relax),
)
@instruction(
    "red",
    writes=Writes.MEMORY,
    access=_atomic_bytes,
    mutations=(shift(0, "shift", _element_bytes), drop, narrow, relax),
)
def atomic(e: Emitter, ins: Instr) -> None:
    """atom and red."""
    parts = ins.parts
    op = next((p for p in parts[1:] if p in _ATOMICS), None)
    kind = next((p for p in reversed(parts) if p in TYPE_BYTES), "")
    if op is None or kind in ("", "b128") or "async" in parts:
        raise e.fail()
    operands = list(ins.operands)
    d = operands.pop(0) if ins.base == "atom" else None
    mem = operands.pop(0)
    assert isinstance(mem, Mem)
    width = TYPE_BYTES[kind]
    space = space_of(ins)
    space = "shared" if space == "cluster" else space
    if space not in ("global", "shared", "generic"):
        raise e.fail(f"atomic on state space {space}")
    scope = scope_in(parts, Scope.GPU)
    read, write = (
        sized(scope | ORDERS * bool({"acq_rel", order} & set(parts)), width, read_modify_write=True)
        for order in ("acquire", "release")
    )
    e.trace(mem)
    mask = e.mask()
    values: tuple[Operand, ...] = operands[0].items if isinstance(operands[0], Vec) else (operands[0],)
    targets: tuple[Operand | None, ...] = d.items if isinstance(d, Vec) else (d,) * len(values)
    # nvcc writes atom even if nothing uses the result, and ptxas makes it a red.
    returns = any(isinstance(target, Reg) and target.name in e.read_registers for target in targets)
    form = e.bind("atomic", AtomicKind(op, kind, space, read, write, returns))
    u = f"u{width}"
    compare = "None"
    if op == "cas":
        compare, values = e.array(operands[0], u), (operands[1],)
    sources = [e.array(value, u) for value in values]
    if returns and len(values) > 1:  # a result may be a register of a later source
        sources = [e.temp(source) for source in sources]
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        place = _offset_address(mem, i * width)
        address = e.shared(place) if space == "shared" else e.address(place, space)
        text = f"Q.apply({form}, {address}, {source}, {compare}, {mask}, {e.site()})"
        if target is not None and returns:
            e.assign(target, Value(text, u, False))
        else:
            e.line(text)


# --- cp.async


def _read_all_bytes(s: Statement) -> Iterator[Change]:
    """A mutation: the copy has no size operand (or ignore predicate), so it reads all its bytes."""
    operands = s.ins.operands
    if len(operands) > 3 and isinstance(operands[3], Reg):
        yield s.become("widen", re.sub(r",\s*\d+\s*,[^;]*;$", f", {_copy_bytes(s.ins)};", s.text))


def _copy_bytes(ins: Instr) -> int:
    """Bytes that a cp.async writes per thread."""
    size = ins.operands[2]
    return size.value if isinstance(size, Imm) else 16


@instruction(
    "cp.async",
    writes=Writes.MEMORY,
    completed_by=("cp.async.wait_group", "cp.async.wait_all", "cp.async.mbarrier.arrive"),
    access=copy_access,
    mutations=(
        drop,
        shift(0, "shift-destination", _copy_bytes),
        shift(1, "shift-source", _copy_bytes),
        _read_all_bytes,
    ),
)
def copy(e: Emitter, ins: Instr) -> None:
    """cp.async of 4, 8 or 16 bytes, with an optional number of bytes to read or predicate to read none."""
    dst, src, size = ins.operands[:3]
    if not isinstance(size, Imm) or size.value not in (4, 8, 16) or ins.parts[1] != "async":
        raise e.fail()
    e.trace(src)
    count = "None"
    for extra in ins.operands[3:]:
        if isinstance(extra, Reg) and e.operand_bits(extra) == 64:
            # The operand is a cache policy, which has no effect here.
            continue
        if isinstance(extra, Reg) and e.operand_bits(extra) == 1:
            p = e.predicate(extra)
            count = f"(0 if {p.text} else {size.value})" if p.uniform else f"WHERE({p.text}, 0, {size.value})"
        else:
            count = e.scalar(extra)
    e.line(f"Z.issue({e.shared(dst)}, {e.address(src, 'global')}, {size.value}, {count}, {e.lanes()})")


@instruction("cp.async.commit_group", writes=Writes.MEMORY, mutations=(drop,))
def commit(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """cp.async.commit_group."""
    e.line(f"Z.commit({e.mask()})")


@instruction("cp.async.wait_group", writes=Writes.MEMORY, mutations=(drop, weaken, swap))
def wait(e: Emitter, ins: Instr) -> None:
    """cp.async.wait_group."""
    e.line(f"Z.wait({e.literal(ins.operands[0])}, {e.mask()})")


@instruction("cp.async.wait_all", writes=Writes.MEMORY, mutations=(drop, swap))
def wait_all(e: Emitter, ins: Instr) -> None:  # noqa: ARG001
    """cp.async.wait_all."""
    e.line(f"Z.wait_all({e.mask()})")
