"""Defines mutations: mechanical mistakes in one statement of a PTX text, which a checker of kernels must notice.

The registration of an instruction names the mutations that apply to it. A mutation yields changes after which the text
is still legal PTX; the caller finds out whether the kernel then behaves differently. The docstring of a mutation says
how the changed kernel differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kernelproof.emulator.frontend.ptx import TYPE_BYTES, Imm, Instr, Label, Mem, Reg, Vec


class Change(NamedTuple):
    """A change of a PTX text. ``kind``: a word for it. ``edits``: (start, end, new text), with ascending offsets in the
    complete text."""

    kind: str
    edits: tuple[tuple[int, int, str], ...]

    def apply(self, text: str) -> str:
        """The changed text."""
        for start, end, new in reversed(self.edits):
            text = text[:start] + new + text[end:]
        return text


class Source:
    """A PTX text in which the statements of parsed instructions can be found."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = [0] + [m.end() for m in re.finditer("\n", text)]

    def span(self, ins: Instr) -> tuple[int, int]:
        """The start and end (after the semicolon) of an instruction in the text."""
        head = ins.text.split("\n")[0].rstrip()
        start = self.text.index(head, self.lines[ins.line - 1])
        return start, self.text.index(";", start) + 1


@dataclass(frozen=True)
class Statement:
    """Instruction number ``index`` of a function's body. Its text is characters [start, end) of the source."""

    source: Source
    body: Sequence[Instr | Label]
    index: int
    ins: Instr
    start: int
    end: int

    @classmethod
    def of(cls, source: Source, body: Sequence[Instr | Label], index: int) -> Statement | None:
        """The statement with this number; None for a label."""
        ins = body[index] if index < len(body) else None
        return cls(source, body, index, ins, *source.span(ins)) if isinstance(ins, Instr) else None

    @property
    def text(self) -> str:
        """The statement's text, semicolon included."""
        return self.source.text[self.start : self.end]

    @property
    def operands(self) -> list[str]:
        """The texts of the operands."""
        return _top_level(self.text.rstrip(";").split(None, 1)[1])

    def become(self, kind: str, new: str) -> Change:
        """The change that replaces the statement by another text."""
        return Change(kind, ((self.start, self.end, new),))

    def following(self) -> Iterator[Statement]:
        """The statements after it, in the order of the text."""
        for i in range(self.index + 1, len(self.body)):
            statement = Statement.of(self.source, self.body, i)
            if statement is not None:
                yield statement

    def with_operand(self, index: int, new: str) -> str:
        """The statement's text with operand ``index`` replaced."""
        operands = self.operands
        operands[index] = new
        return f"{self.text.split(None, 1)[0]} {','.join(operands)};"


Mutation = Callable[[Statement], Iterator[Change]]


def _top_level(text: str) -> list[str]:
    """Split operands at commas outside brackets and braces."""
    out, depth = [""], 0
    for ch in text:
        depth += (ch in "[{(") - (ch in "]})")
        if ch == "," and depth == 0:
            out.append("")
        else:
            out[-1] += ch
    return out


def drop(s: Statement) -> Iterator[Change]:
    """The statement is dropped."""
    yield s.become("drop", "")


def weaken(s: Statement) -> Iterator[Change]:
    """A wait for groups leaves one more of them pending."""
    pending = s.ins.operands[0]
    if isinstance(pending, Imm):
        yield s.become("weaken", re.sub(r"\b\d+\s*;$", f"{pending.value + 1};", s.text))


def narrow(s: Statement) -> Iterator[Change]:
    """The scope is .cta instead of a larger one."""
    head, _, rest = s.text.partition(".")
    op, _, operands = rest.partition(" ")
    parts = op.rstrip(";").split(".")
    wide = next((part for part in parts if part in ("cluster", "gpu", "sys", "gl")), None)
    if wide is None and s.ins.base not in ("atom", "red"):
        return
    parts = ["cta" if part == wide else part for part in parts] if wide else ["cta", *parts]
    yield s.become("narrow", f"{head}.{'.'.join(parts)}{' ' + operands if operands else ';'}")


def relax(s: Statement) -> Iterator[Change]:
    """An access is relaxed, so it no longer acquires or releases."""
    head, space, operands = s.text.partition(" ")
    relaxed = re.sub(r"\.(acq_rel|acquire|release)(?=\.|$)", ".relaxed", head)
    if relaxed != head:
        yield s.become("relax", f"{relaxed}{space}{operands}")


def swap(s: Statement) -> Iterator[Change]:
    """The statement and the next one are exchanged, unless the next one branches or commits a group."""
    other = Statement.of(s.source, s.body, s.index + 1)
    if other is None or other.ins.base in ("bra", "ret", "exit", "brx", "call") or "commit_group" in other.ins.parts:
        return
    between = s.source.text[s.end : other.start]
    if other.start >= s.end and "{" not in between and "}" not in between:
        yield Change("swap", ((s.start, s.end, other.text), (other.start, other.end, s.text)))


def drop_with(prefix: str) -> Mutation:
    """The statement is dropped, and so is the next one whose opcode begins with ``prefix``, which would be illegal
    without it."""

    def mutation(s: Statement) -> Iterator[Change]:
        other = next((t for t in s.following() if t.ins.op.startswith(prefix)), None)
        if other is not None:
            yield Change("drop", ((s.start, s.end, ""), (other.start, other.end, "")))

    return mutation


def shift(index: int = 0, kind: str = "shift", nbytes: Callable[[Instr], int] | int = 16) -> Mutation:
    """``nbytes`` are added to the address in the statement's brackets number ``index``, counted from 0."""

    def mutation(s: Statement) -> Iterator[Change]:
        increment = nbytes if isinstance(nbytes, int) else nbytes(s.ins)
        chosen = list(re.finditer(r"\[([^\]]*)\]", s.text))[index]
        m = re.match(r"\s*([\w$%@.]+)\s*(?:([+-])\s*(-?\d+))?\s*$", chosen[1])
        new = s.text
        if m is not None:
            offset = int(m[3] or 0) * (-1 if m[2] == "-" else 1) + increment
            new = f"{s.text[: chosen.start()]}[{m[1]}+{offset}]{s.text[chosen.end() :]}"
        yield s.become(kind, new)

    return mutation


def adjust(kind: str, index: int, type_: str, op: str, operand: str) -> Mutation:
    """Operand number ``index`` is first changed by an instruction ``op``, whose second operand is ``operand``. Both
    statements are in a new scope, which declares a register of type ``type_`` for the result."""

    def mutation(s: Statement) -> Iterator[Change]:
        old = s.operands[index].strip()
        changed = s.with_operand(index, " mutant")
        yield s.become(kind, f"{{ .reg .{type_} mutant; {op} mutant, {old}, {operand}; {changed} }}")

    return mutation


def without_last_warp(s: Statement) -> Iterator[Change]:
    """The last warp of each warpgroup does not wait. Only waits for all groups are changed, because after other waits
    no result is read."""
    if not s.text.startswith("@") and s.ins.operands == (Imm(0),):
        guarded = f"mov.u32 own, %tid.x; and.b32 own, own, 96; setp.ne.u32 mutant, own, 96; @mutant {s.text}"
        yield s.become("warp", f"{{ .reg .b32 own; .reg .pred mutant; {guarded} }}")


def shift_register(nbytes: int) -> Mutation:
    """``nbytes`` are added to the first address in a register, which must be 32 bits wide. Without one, the statement
    is dropped."""

    def mutation(s: Statement) -> Iterator[Change]:
        index = next(
            (i for i, op in enumerate(s.ins.operands) if isinstance(op, Mem) and isinstance(op.base, Reg)), None
        )
        if index is None:
            yield s.become("shift", "")
            return
        old = s.operands[index].strip().strip("[]").strip()
        changed = s.with_operand(index, " [mutant]")
        yield s.become("shift", f"{{ .reg .b32 mutant; add.u32 mutant, {old}, {nbytes}; {changed} }}")

    return mutation


# Comparison -> the one that takes its place.
_EXCHANGED = {
    "lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq", "lo": "ls", "ls": "lo", "hi": "hs",
    "hs": "hi",
}  # fmt: skip


def compare(s: Statement) -> Iterator[Change]:
    """The comparison is another one: lt and le are exchanged, as are other pairs of ``_EXCHANGED``."""
    test = s.ins.parts[1]
    if test in _EXCHANGED:
        yield s.become("compare", s.text.replace(f"{s.ins.base}.{test}.", f"{s.ins.base}.{_EXCHANGED[test]}.", 1))


# --- arithmetic (the kinds are in ARITHMETIC)


def unguarded(mutation: Mutation) -> Mutation:
    """The mutation, limited to statements without a guard, because it cannot split a guarded one into its operands."""

    def unless_guarded(s: Statement) -> Iterator[Change]:
        if not s.text.startswith("@"):
            yield from mutation(s)

    return unless_guarded


@unguarded
def drop_operand(s: Statement) -> Iterator[Change]:
    """A sum of floats lacks its last addend, or a product its last factor. An fma gives both changes."""
    if s.ins.parts[-1] not in ("f32", "f64"):
        return
    head, *operands = s.text.split(None, 1)[0], *(operand.strip() for operand in s.operands)
    if s.ins.base == "fma":
        d, a, b, c = operands
        yield s.become("addend", f"{head.replace('fma', 'mul', 1)} {d}, {a}, {b};")
        yield s.become("product", f"mov.{s.ins.parts[-1]} {d}, {c};")
    else:
        kind = "factor" if s.ins.base == "mul" else "addend"
        yield s.become(kind, f"mov.{s.ins.parts[-1]} {operands[0]}, {operands[1]};")


@unguarded
def repeat_operand(s: Statement) -> Iterator[Change]:
    """The last operand of an f32 sum or product is added or multiplied twice."""
    if s.ins.parts[-1] == "f32":
        last = s.operands[-1].strip()
        head = "add.f32" if s.ins.base == "fma" else s.text.split(None, 1)[0]
        changed = s.with_operand(0, " mutant")
        yield s.become("twice", f"{{ .reg .f32 mutant; {changed} {head} {s.operands[0].strip()}, mutant, {last}; }}")


def retype(s: Statement) -> Iterator[Change]:
    """The bits of bf16 are read as f16, or the other way round."""
    head, rest = s.text.split(None, 1)
    swapped = re.sub(r"\b(b?)f16(?=\.|x2|$)", lambda m: "f16" if m[1] else "bf16", head)
    # Tensor cores sum products of bf16 in f32 only.
    if swapped != head and not (s.ins.base in ("mma", "wgmma") and "f32" not in s.ins.parts):
        yield s.become("retype", f"{swapped} {rest}")


def truncate(s: Statement) -> Iterator[Change]:
    """A conversion rounds toward zero instead of to nearest."""
    if "rn" in s.ins.parts:
        yield s.become("truncate", s.text.replace(".rn.", ".rz.", 1))


def lose_nan(s: Statement) -> Iterator[Change]:
    """A minimum or maximum of NaN and a number is the number instead of NaN."""
    if "NaN" in s.ins.parts:
        yield s.become("nan", s.text.replace(".NaN.", ".", 1))


@unguarded
def nudge(s: Statement) -> Iterator[Change]:
    """An integer argument of the kernel is larger by 8. If it is a number of elements, these are a vector of 8 halves;
    if it is an address, half of such a vector."""
    bits, register = s.ins.parts[-1][1:], s.operands[0].strip()
    if s.ins.parts[-1] in ("u32", "u64", "b32", "b64", "s32", "s64") and register.startswith("%"):
        yield s.become("nudge", f"{s.text} add.s{bits} {register}, {register}, 8;")


@unguarded
def zero_result(s: Statement) -> Iterator[Change]:
    """A quotient, a remainder or the number of a CTA is always 0."""
    register = s.operands[0].strip()
    yield s.become("first", f"mov.b{s.ins.parts[-1][1:]} {register}, 0;")


ARITHMETIC = frozenset({"addend", "factor", "product", "twice", "retype", "truncate", "nan", "nudge", "first"})


def vector_bytes(ins: Instr) -> int:
    """The bytes that a load or store moves per thread."""
    lanes = next((int(p[1]) for p in ins.parts if p in ("v2", "v4", "v8")), 1)
    return TYPE_BYTES.get(ins.parts[-1], 4) * (lanes if any(isinstance(op, Vec) for op in ins.operands) else 1)


def change_guard(s: Statement) -> Iterator[Change]:
    """The guard ``@p`` is negated or missing; or a guarded branch is never taken."""
    mark = re.match(r"@\s*(!?)\s*([\w$%]+)\s*", s.text)
    if mark is None:
        return
    yield s.become("negate", ("@" if mark[1] else "@!") + s.text[mark.start(2) :])
    yield s.become("unguard", s.text[mark.end() :])
    if s.ins.base == "bra":
        yield s.become("never", "")
