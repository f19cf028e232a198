"""Lowers loads, stores and asynchronous copies.

A modifier names the width, which is 32 bits by default. Cache hints (``.BYPASS``, ``.LTC128B`` ..) change no value.
"""

from __future__ import annotations

from kernelproof.emulator.machine_code.lowering import Lowering, mnemonic
from kernelproof.emulator.machine_code.operands import Address, operand
from kernelproof.emulator.memory.shared import WINDOW_START
from kernelproof.sass import Instruction

_HINTS = "E LTC64B LTC128B LTC256B EF EL LU EU NA"
_WIDTHS = "U8 S8 U16 S16 64 128 U"
SCOPES = {"CTA": "cta", "SM": "cta", "GPU": "gpu", "SYS": "sys"}
_STRENGTHS = "STRONG CTA SM GPU SYS"
_SPACES = {"G": "global", "S": "shared", "L": "local"}


def _kind(ins: Instruction) -> tuple[str, int]:
    """The PTX type of an element and the number of registers."""
    narrow = next((part for part in ins.modifiers if part in ("U8", "S8", "U16", "S16")), "")
    if narrow:
        return narrow.lower(), 1
    return "b32", 4 if "128" in ins.modifiers else 2 if "64" in ins.modifiers else 1


def _strength(ins: Instruction) -> str:
    """The modifiers of a strong access, as PTX names them; empty for a weak one."""
    if "STRONG" not in ins.modifiers:
        return ""
    return f".relaxed.{next(SCOPES[part] for part in ins.modifiers if part in SCOPES)}"


def place(low: Lowering, ins: Instruction, text: str) -> tuple[str, str]:
    """The state space of an access, as a modifier of PTX, and its address in brackets."""
    space = _SPACES.get(ins.name[-1], "generic")
    if space == "shared":
        return ".shared", shared_address(low, text)
    if space == "local":
        return ".local", low.stack_address(text)
    parsed = operand(text)
    # ``.E`` says that addresses have 64 bits, which the operand repeats unless the access has no memory window.
    wide = isinstance(parsed, Address) and (parsed.wide or "E" in ins.modifiers)
    if isinstance(parsed, Address) and not wide and any(register.number is not None for register in parsed.registers):
        raise low.refusal("an address of 32 bits in global memory is not modelled")
    return "" if space == "generic" else ".global", low.address(text, wide)


def shared_address(low: Lowering, text: str) -> str:
    """An address in shared memory, in brackets. In some machine code, shared memory begins at another address than in
    the emulator."""
    return low.near_address(text, WINDOW_START - low.bank.shared)


@mnemonic("LDG LD LDS LDL", f"{_HINTS} {_WIDTHS} {_STRENGTHS} CONSTANT ENL2 256")
def load(low: Lowering, ins: Instruction) -> None:
    """Loads of one to eight registers. ``.CONSTANT`` is ld.nc. With ``.ENL2`` the first operand gets the last four
    registers, and the second one the first four."""
    result, address_text, *rest = ins.operands
    order = ".nc" if "CONSTANT" in ins.modifiers else _strength(ins)
    if "ENL2" in ins.modifiers:
        space, address = place(low, ins, rest[0])
        registers = ", ".join(low.targets(text, 4)[1:-1] for text in (address_text, result))
        low.emit(f"ld{order}{space}.v8.b32", f"{{{registers}}}", address)
        return
    if rest:
        raise low.refusal("a load with a predicate is not modelled")
    kind, count = _kind(ins)
    space, address = place(low, ins, address_text)
    vector = f".v{count}" if count > 1 else ""
    target = low.targets(result, count) if count > 1 else low.target(result)
    low.emit(f"ld{order}{space}{vector}.{kind}", target, address)


@mnemonic("STG ST STS STL", f"{_HINTS} {_WIDTHS} {_STRENGTHS} ENL2 256")
def store(low: Lowering, ins: Instruction) -> None:
    """Stores of one to eight registers. With ``.ENL2`` each of two operands has four."""
    address_text, source, *others = ins.operands
    kind, count = _kind(ins)
    space, address = place(low, ins, address_text)
    if "ENL2" in ins.modifiers:
        registers = ", ".join(low.words(text, 4)[1:-1] for text in (source, *others))
        low.emit(f"st{_strength(ins)}{space}.v8.b32", address, f"{{{registers}}}")
        return
    vector = f".v{count}" if count > 1 else ""
    value = low.words(source, count) if count > 1 else low.word(source)
    if kind[1:] in ("8", "16"):
        kind = f"u{kind[1:]}"
    low.emit(f"st{_strength(ins)}{space}{vector}.{kind}", address, value)


@mnemonic("QSPC", "E S L G")
def query_space(low: Lowering, ins: Instruction) -> None:
    """A predicate: does a generic address lie in shared (S), local (L) or global memory?"""
    p, _, address_text = ins.operands
    low.set_predicate(p, lies_in(low, address_text, next(_SPACES[part] for part in ins.modifiers if part in _SPACES)))


def lies_in(low: Lowering, text: str, space: str) -> str:
    """A predicate: does the generic address of an operand lie in a state space? The register of the address decides;
    the offset is assumed not to leave the space."""
    source = operand(text)
    assert isinstance(source, Address)
    (register,) = source.registers
    address = low.join(low.bits(register), low.bits(register, 1))
    return low.computed(f"isspacep.{space}", address, kind="pred")


# --- asynchronous copies


@mnemonic("LDGSTS", f"{_HINTS} 64 128 BYPASS ACCESS ZFILL")
def copy(low: Lowering, ins: Instruction) -> None:
    """cp.async. Lanes for which the predicate does not hold write zeros. With ``.ZFILL`` the source operand is the
    aligned address plus the number of bytes at the end that also become zero."""
    destination, source, *rest = ins.operands
    size = 4 * _kind(ins)[1]
    operands = [shared_address(low, destination), low.address(source), str(size)]
    if "ZFILL" in ins.modifiers:
        total = low.sum64(source)
        zeros = low.computed("cvt.u32.u64", low.computed("and.b64", total, str(size - 1), kind="b64"))
        operands[1] = f"[{low.computed('and.b64', total, str(-size & (1 << 64) - 1), kind='b64')}]"
        factor = low.number(low.predicate(rest[0])) if rest else "1"
        count = low.computed("sub.s32", str(size), zeros)
        operands.append(count if factor == "1" else low.computed("mul.lo.s32", count, factor))
    elif rest:
        operands.append(low.unnegated(low.inverse(low.predicate(rest[0]))))
    low.emit(f"cp.async.{'cg' if 'BYPASS' in ins.modifiers else 'ca'}.shared.global", *operands)


@mnemonic("LDGDEPBAR")
def commit(low: Lowering, ins: Instruction) -> None:  # noqa: ARG001
    """cp.async.commit_group. A scoreboard counts the groups that are not complete."""
    low.emit("cp.async.commit_group")


@mnemonic("DEPBAR", "LE")
def wait(low: Lowering, ins: Instruction) -> None:
    """A wait until a scoreboard counts at most so many groups of copies. A wait for a register's scoreboard does
    nothing.

    A wait for complete bulk stores differs from one for their reads only by the invalidation of the L1 cache that
    follows.
    """
    board, count = ins.operands[:2]
    if board in low.copy_scoreboards and board in low.bulk_scoreboards:
        raise low.refusal("a scoreboard of copies and of bulk stores is not modelled")
    if board in low.copy_scoreboards:
        low.emit("cp.async.wait_group", str(int(count, 0)))
    elif board in low.bulk_scoreboards:
        complete = any(other.name == "CCTL" for other in low.following(1))
        low.emit(f"cp.async.bulk.wait_group{'' if complete else '.read'}", str(int(count, 0)))
