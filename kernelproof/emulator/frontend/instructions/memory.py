"""Loads, stores, atomics and cp.async."""

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
from kernelproof.emulator.state.scopes import CHECKED, ORDERS, READ_ONLY, VOLATILE, Scope, scope_in, sized

_SPACES = ("global", "shared", "local", "param", "const")
# Cache operators are hints: with .cg or .cv a load stays weak, even where it is used to poll.
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


def _named_space(e: Emitter, space: str, at: Mem) -> str:
    """The state space of an address; a generic address of a variable is in the variable's space."""
    return e.symbols[at.base.name][0] if space == "generic" and isinstance(at.base, Sym) else space


def _vector(ins: Instr) -> int:
    return 2 if "v2" in ins.parts else 4 if "v4" in ins.parts else 8 if "v8" in ins.parts else 1


def _pieces(total: int) -> list[tuple[int, int]]:
    """(first byte, bytes) of the moves, of at most 16 bytes each, that make up an access."""
    return [(0, total)] if total <= 16 else [(i, 16) for i in range(0, total, 16)]


def _require_aligned(e: Emitter, space: str, at: Mem, total: int, mask: str) -> None:
    """Write a check that an access which consists of several moves is aligned as a whole."""
    if total > 16 and space in ("global", "generic"):
        e.line(f"G.require_aligned({e.address(at, space)}, {total}, {mask}, {e.site()})")


def _within(at: Mem, start: int) -> Mem:
    return Mem(at.base, at.offset + start) if start else at


# --- facts of accesses


def _reaches(ins: Instr, space: str) -> bool:
    """May the access be to this state space?"""
    named = {p.split(":")[0] for p in ins.parts} & set(_SPACES)
    return not named or space in named


def _access(ins: Instr, space: str) -> int:
    return TYPE_BYTES.get(ins.parts[-1], 4) * _vector(ins) if _reaches(ins, space) else 0


def _atomic_access(ins: Instr, space: str) -> int:
    return min(TYPE_BYTES.get(p, 16) for p in ins.parts[1:]) if _reaches(ins, space) else 0


def copy_access(ins: Instr, space: str) -> int:
    """The access of cp.async, and of bulk copies whose size is a literal."""
    size = ins.operands[2] if len(ins.operands) > 2 else None
    width = size.value if isinstance(size, Imm) else 16
    # A fourth operand is a size that only the launch knows: fewer bytes may be read from global memory.
    partial = len(ins.operands) > 3 and space == "global" and "bulk" not in ins.parts
    return min(width, 4) if partial else width


def _from_param(ins: Instr) -> bool:
    at = ins.operands[1]
    return space_of(ins) == "param" and isinstance(at, Mem) and isinstance(at.base, Sym)


def _polls(ins: Instr) -> bool:
    return not _READ_POLLS.isdisjoint(ins.parts)


def _strength(ins: Instr, strong: frozenset[str], orders: tuple[str, ...]) -> int:
    """The strength of an access, see ``state.scopes``; 0 for a weak one."""
    if strong.isdisjoint(ins.parts):
        return 0
    strong_access = scope_in(ins.parts, Scope.GPU) | (0 if set(orders).isdisjoint(ins.parts) else ORDERS)
    return sized(strong_access, TYPE_BYTES.get(ins.parts[-1], 4))


def _strength_in_shared(e: Emitter, ins: Instr, strong: int) -> int:
    """The strength of an access where it reaches shared memory. Volatile accesses count as weak if no loop of the
    kernel polls: lanes that exchange data by them, one step after the other, forget their barriers."""
    if e.polls or not strong:
        return strong & ~READ_ONLY
    if "volatile" in ins.parts:
        return VOLATILE if ins.base == "ld" else 0
    return 0 if strong & (CHECKED | READ_ONLY) else strong


def observed_spaces(ins: Instr, polls: bool) -> frozenset[str]:
    """The state spaces of which an instruction may return older values: a strong load, or an atomic that can leave its
    place as it is, in a loop that ``polls``."""
    strong_load = ins.base == "ld" and _strength(ins, _READ_STRONG, ()) > 0
    if not strong_load and not (polls and ins.base == "atom" and _may_leave(ins)):
        return frozenset()
    return frozenset(space for space in ("global", "shared") if _reaches(ins, space))


def read_flags(ins: Instr, used: set[str]) -> frozenset[str]:
    """The state spaces in which an instruction tells its thread what strong writes have left: a strong load, or an
    atomic whose result is ``used``. Where there is none, no thread knows after which writes its atomics came, so that
    nothing may depend on that order. Relaxed operations on mbarriers count too: they pass on what was fenced."""
    if ins.base in ("mbarrier", "emu_try_wait") and "relaxed" in ins.parts:
        return frozenset(("shared",))
    strong_load = ins.base == "ld" and _strength(ins, _READ_STRONG, ()) > 0
    if not strong_load and not (ins.base == "atom" and not used.isdisjoint(registers(ins.operands[0]))):
        return frozenset()
    return frozenset(space for space in ("global", "shared") if _reaches(ins, space))


def _may_leave(ins: Instr) -> bool:
    """May an atomic write what it has read?"""
    operand = ins.operands[-1]
    literal = isinstance(operand, Imm) and operand.value in (0, -1)
    return literal or not {"cas", "min", "max"}.isdisjoint(ins.parts)


def _address_shifted(s: Statement) -> Iterator[Change]:
    """A mutation of an access to shared or global memory: the address beside it."""
    named = next((p.split(":")[0] for p in s.ins.parts if p.split(":")[0] in _SPACES), "")
    addressed = any(isinstance(op, Mem) and isinstance(op.base, Reg | Sym) for op in s.ins.operands)
    if named in ("shared", "global") and addressed:
        yield from shift(0, "shift", vector_bytes)(s)


def _store_dropped(s: Statement) -> Iterator[Change]:
    """A mutation: without a store to shared or global memory."""
    if any(True for _ in _address_shifted(s)):
        yield from drop(s)


def _argument(s: Statement) -> Iterator[Change]:
    """A mutation: an argument of the kernel that is larger by 8."""
    if space_of(s.ins) == "param" and len(s.ins.operands) == 2:
        yield from nudge(s)


def _element_bytes(ins: Instr) -> int:
    return TYPE_BYTES.get(ins.parts[-1], 4)


# --- loads and stores


@instruction(
    "ld",
    "ldu",
    uniform=_from_param,
    polls=_polls,
    access=_access,
    mutations=(_address_shifted, narrow, relax, _argument),
)
def load(e: Emitter, ins: Instr) -> None:
    """ld from any space."""
    kind = ins.parts[-1]
    n, width = _vector(ins), TYPE_BYTES[kind]
    d, at = ins.operands[:2]
    assert isinstance(at, Mem)
    targets = d.items if isinstance(d, Vec) else (d,)
    k = f"{'i' if kind[0] == 's' else 'u'}{width}"
    space = space_of(ins)
    if space == "param" and isinstance(at.base, Sym):
        _load_parameter(e, at.base.name, at.offset, targets, k)
        return
    strong = _strength(ins, _READ_STRONG, ("acquire",)) or (Scope.GPU | CHECKED) * (id(ins) in e.checked)
    if ins.base == "ldu" or "nc" in ins.parts:
        strong = READ_ONLY
    e.trace(at)
    mask = e.mask()
    _require_aligned(e, _named_space(e, space, at), at, n * width, mask)
    for start, size in _pieces(n * width):
        strengths = strong, _strength_in_shared(e, ins, strong)
        piece = e.temp(_load_call(e, space, _within(at, start), size, mask, strengths))
        count = size // width
        if count > 1:
            piece = e.temp(f"SPLIT({piece}, {count}, {width}, M.size)")
        for i in range(count):
            text = piece if count == 1 else f"{piece}[{i}]"
            e.assign(targets[start // width + i], Value(text if k[0] == "u" else f"{text}.view({k})", k, False))


def _load_parameter(e: Emitter, name: str, offset: int, targets: tuple[Operand, ...], kind: str) -> None:
    place = e.symbols.get(name)
    if place is None or place[0] != "param":
        raise e.fail(f"{name} is not a parameter")
    width = int(kind[1:])
    for i, target in enumerate(targets):
        text = f"P.constant({place[1] + offset + i * width}, {width})"
        e.assign(target, Value(f"S{8 * width}({text})" if kind[0] == "i" else text, kind, True))


def _load_call(e: Emitter, space: str, at: Mem, size: int, mask: str, strengths: tuple[int, int]) -> str:
    """``strengths``: in global and in shared memory."""
    space = _named_space(e, space, at)
    strong, in_shared = strengths
    if space in ("shared", "cluster"):
        return f"S.load({e.shared(at)}, {size}, {mask}, {e.site()}, {in_shared})"
    address = e.address(at, space)
    if space in ("local", "param"):
        return f"{'L' if space == 'local' else 'P'}.load({address}, {size}, {mask}, {e.site()})"
    if space == "generic":
        return f"N.load({address}, {size}, {mask}, {e.site()}, {strong}, {in_shared})"
    if space in ("global", "const"):
        return f"G.load({address}, {size}, {mask}, {e.site()}, {strong})"
    raise e.fail(f"state space {space}")


@instruction("st", writes=Writes.MEMORY, access=_access, mutations=(_address_shifted, _store_dropped, narrow, relax))
def store(e: Emitter, ins: Instr) -> None:
    """st to any space."""
    n, width = _vector(ins), TYPE_BYTES[ins.parts[-1]]
    at, s = ins.operands[:2]
    assert isinstance(at, Mem)
    sources = s.items if isinstance(s, Vec) else (s,)
    strong = _strength(ins, _WRITE_STRONG, ("release",))
    e.trace(at)
    mask = e.mask()
    _require_aligned(e, _named_space(e, space_of(ins), at), at, n * width, mask)
    for start, size in _pieces(n * width):
        value = joined(e, sources[start // width : (start + size) // width], width)
        strengths = strong, _strength_in_shared(e, ins, strong)
        e.line(_store_call(e, _named_space(e, space_of(ins), at), _within(at, start), value, size, mask, strengths))


def joined(e: Emitter, sources: tuple[Operand, ...], width: int) -> str:
    """Elements of ``width`` bytes as one wide value to store."""
    if len(sources) == 1:
        return e.array(sources[0], f"u{width}")
    return f"JOIN({e.arrays(sources, f'u{width}')}, {width})"


def _store_call(e: Emitter, space: str, at: Mem, value: str, size: int, mask: str, strengths: tuple[int, int]) -> str:
    """``strengths``: in global and in shared memory."""
    strong, in_shared = strengths
    if space in ("shared", "cluster"):
        return f"S.store({e.shared(at)}, {value}, {size}, {mask}, {e.site()}, {in_shared})"
    if space == "local":
        return f"L.store({e.address(at, space)}, {value}, {size}, {mask}, {e.site()})"
    if space == "generic":
        return f"N.store({e.address(at, space)}, {value}, {size}, {mask}, {e.site()}, {strong}, {in_shared})"
    if space == "global":
        return f"G.store({e.address(at, space)}, {value}, {size}, {mask}, {e.site()}, {strong})"
    raise e.fail(f"store to state space {space}")


# --- atomics


@instruction(
    "atom",
    writes=Writes.RESULT | Writes.MEMORY,
    polls=True,
    access=_atomic_access,
    mutations=(shift(0, "shift", _element_bytes), narrow, relax),
)
@instruction(
    "red",
    writes=Writes.MEMORY,
    access=_atomic_access,
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
    at = operands.pop(0)
    assert isinstance(at, Mem)
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
    e.trace(at)
    mask = e.mask()
    values: tuple[Operand, ...] = operands[0].items if isinstance(operands[0], Vec) else (operands[0],)
    targets: tuple[Operand | None, ...] = d.items if isinstance(d, Vec) else (d,) * len(values)
    # nvcc writes atom where ptxas makes red of it, because nothing uses the result.
    returns = any(isinstance(target, Reg) and target.name in e.read for target in targets)
    form = e.bind("atomic", AtomicKind(op, kind, space, read, write, returns))
    u = f"u{width}"
    compare = "None"
    if op == "cas":
        compare, values = e.array(operands[0], u), (operands[1],)
    for i, (value, target) in enumerate(zip(values, targets, strict=True)):
        place = _within(at, i * width)
        address = e.shared(place) if space == "shared" else e.address(place, space)
        text = f"Q.apply({form}, {address}, {e.array(value, u)}, {compare}, {mask}, {e.site()})"
        if target is not None and returns:
            e.assign(target, Value(text, u, False))
        else:
            e.line(text)


# --- cp.async


def _widened(s: Statement) -> Iterator[Change]:
    """A mutation: without its size operand (or ignore predicate) the copy reads all its bytes."""
    operands = s.ins.operands
    if len(operands) > 3 and isinstance(operands[3], Reg):
        yield s.become("widen", re.sub(r",\s*\d+\s*,[^;]*;$", f", {_copy_bytes(s.ins)};", s.text))


def _copy_bytes(ins: Instr) -> int:
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
        _widened,
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
