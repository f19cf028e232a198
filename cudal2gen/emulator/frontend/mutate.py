"""Mutants of a PTX text: the mechanical mistakes that a checker of kernels must notice.

Every wait, barrier, fence, commit, copy, shared or global access and predicate gives one or more mutants: dropped,
weakened, shifted, swapped with its neighbour, negated. A mutant is legal PTX of the same kernel; whether it behaves
differently is for the caller to see.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cudal2gen.emulator.frontend import ptx
from cudal2gen.emulator.frontend.ptx import TYPE_BYTES, Function, Imm, Instr, Label, Mem, Reg, Sym, Vec

_SWAPPED = {
    "lt": "le",
    "le": "lt",
    "gt": "ge",
    "ge": "gt",
    "eq": "ne",
    "ne": "eq",
    "lo": "ls",
    "ls": "lo",
    "hi": "hs",
    "hs": "hi",
}


@dataclass(frozen=True)
class Mutant:
    """``name``: what was done, as ``kind opcode at line``; ``kind``: the first word; ``line``: the PTX line changed;
    ``text``: the file."""

    name: str
    kind: str
    line: int
    text: str


def mutants(text: str, kernel: str | None = None) -> Iterator[Mutant]:
    """All mutants of a PTX text, of one kernel or (None) of all kernels, in the order of the text.

    Raises PtxError for text that is not PTX and KeyError for an unknown kernel.
    """
    module = ptx.parse(text)
    functions = list(module.kernels.values()) if kernel is None else [module.kernels[kernel]]
    spans = _Spans(text)
    for function in functions:
        yield from _of_function(function, spans)


class _Spans:
    """Where statements lie in the text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0] + [m.end() for m in re.finditer("\n", text)]

    def find(self, ins: Instr) -> tuple[int, int]:
        """Start and end (after the semicolon) of an instruction."""
        at = self.starts[ins.line - 1]
        head = ins.text.split("\n")[0].rstrip()
        start = self.text.index(head, at)
        return start, self.text.index(";", start) + 1

    def replace(self, start: int, end: int, new: str) -> str:
        return self.text[:start] + new + self.text[end:]


def _of_function(function: Function, spans: _Spans) -> Iterator[Mutant]:
    body = function.body
    for i, ins in enumerate(body):
        if isinstance(ins, Label):
            continue
        following = body[i + 1] if i + 1 < len(body) else None
        start, end = spans.find(ins)
        statement = spans.text[start:end]

        def made(kind: str, new: str, ins: Instr = ins, start: int = start, end: int = end) -> Mutant:
            return Mutant(f"{kind} {ins.op} at {ins.line}", kind, ins.line, spans.replace(start, end, new))

        if _is_wait(ins) or _is_barrier(ins):
            yield made("drop", "")
            if "wait_group" in ins.parts and isinstance(ins.operands[0], Imm):
                n = ins.operands[0].value
                yield made("weaken", re.sub(r"\b\d+\s*;$", f"{n + 1};", statement))
            if (
                isinstance(following, Instr)
                and following.base not in ("bra", "ret", "exit", "brx", "call")
                and not _is_commit(following)
            ):
                s2, e2 = spans.find(following)
                if s2 >= end and "{" not in spans.text[end:s2] and "}" not in spans.text[end:s2]:
                    swapped = spans.text[:start] + spans.text[s2:e2] + spans.text[end:s2] + statement + spans.text[e2:]
                    yield Mutant(f"swap {ins.op} at {ins.line}", "swap", ins.line, swapped)
        elif _is_commit(ins):
            yield made("drop", "")
        elif ins.base == "barrier" and "arrive" in ins.parts and "cluster" in ins.parts:
            yield from _without_pair(ins, body[i:], spans)
        elif ins.base in _ASYNCHRONOUS or (ins.base == "cp" and "bulk" in ins.parts):
            for kind, new in _of_asynchronous(ins, statement):
                yield made(kind, new)
        elif ins.base == "cp" and "async" in ins.parts and len(ins.operands) >= 3:
            size = ins.operands[2].value if isinstance(ins.operands[2], Imm) else 16
            yield made("drop", "")
            yield made("shift-destination", _shift(statement, 0, size))
            yield made("shift-source", _shift(statement, 1, size))
            if len(ins.operands) > 3 and isinstance(ins.operands[3], Reg):
                # Without its size operand (or ignore predicate) the copy reads all its bytes.
                yield made("widen", re.sub(r",\s*\d+\s*,[^;]*;$", f", {size};", statement))
        elif ins.base in ("ldmatrix", "stmatrix"):
            yield made("shift", _shift(statement, 0, 16))
        elif ins.base in ("ld", "st") and _space(ins) in ("shared", "global") and _has_address(ins):
            yield made("shift", _shift(statement, 0, _access_bytes(ins)))
            if ins.base == "st":
                yield made("drop", "")
        elif ins.base in ("red", "atom"):
            yield made("shift", _shift(statement, 0, TYPE_BYTES.get(ins.parts[-1], 4)))
            if ins.base == "red":
                yield made("drop", "")
        elif ins.base == "setp" and ins.parts[1] in _SWAPPED:
            yield made("compare", statement.replace(f"setp.{ins.parts[1]}.", f"setp.{_SWAPPED[ins.parts[1]]}.", 1))
        if ins.guard is not None:
            mark = re.match(r"@\s*(!?)\s*", statement)
            assert mark is not None
            rest = statement[mark.end() :]
            yield made("negate", ("@" if mark[1] else "@!") + rest)
            yield made("unguard", rest[re.match(r"[\w$%]+\s*", rest).end() :])  # type: ignore[union-attr]
            if ins.base == "bra":
                yield made("never", "")


def _without_pair(ins: Instr, following: list[Instr | Label], spans: _Spans) -> Iterator[Mutant]:
    """Without the arrival at a cluster barrier the wait would be illegal: both go."""
    wait = next((x for x in following if isinstance(x, Instr) and x.op.startswith("barrier.cluster.wait")), None)
    if wait is not None:
        start, end = spans.find(ins)
        s2, e2 = spans.find(wait)
        without = spans.text[:start] + spans.text[end:s2] + spans.text[e2:]
        yield Mutant(f"drop {ins.op} at {ins.line}", "drop", ins.line, without)


_ASYNCHRONOUS = ("mbarrier", "wgmma", "mapa", "setmaxnreg", "griddepcontrol")


def _of_asynchronous(ins: Instr, statement: str) -> Iterator[tuple[str, str]]:
    """(kind, statement) of mutants of mbarriers, bulk copies, wgmma and their like."""
    what = ins.parts[1]
    if ins.base == "mbarrier":
        if what in ("arrive", "complete_tx", "expect_tx"):
            yield "drop", ""
        if what == "init":
            yield "count", _changed(statement, 1, "b32", "add.u32", "1")
            yield "discount", _changed(statement, 1, "b32", "sub.u32", "1")
        if what == "expect_tx" or "expect_tx" in ins.parts:
            yield "bytes", _changed(statement, len(ins.operands) - 1, "b32", "add.u32", "16")
        if what in ("try_wait", "test_wait"):
            target = ins.operands[0]
            if isinstance(target, Reg):
                name = statement.split(what, 1)[1].split(None, 1)[1].split(",", maxsplit=1)[0].strip()
                yield "skip", f"setp.eq.u32 {name}, 0, 0;"
                yield "once", f"{statement} setp.eq.u32 {name}, 0, 0;"
            if "parity" in ins.parts:
                yield "parity", _changed(statement, 2, "b32", "xor.b32", "1")
    elif ins.base == "wgmma":
        if what == "fence":
            yield "drop", ""
        elif what == "mma_async":
            first = 2 if not isinstance(ins.operands[1], Vec) else 3
            yield "step", _changed(statement, first, "b64", "add.u64", "2")
            yield "swizzle", _changed(statement, first, "b64", "xor.b64", "0xC000000000000000")
    elif ins.base == "mapa":
        d, a = (part.strip() for part in statement.split(None, 1)[1].split(",")[:2])
        yield "own", f"mov.b{ins.parts[-1][1:]} {d}, {a};"
    elif ins.base == "setmaxnreg":
        count = ins.operands[0]
        if isinstance(count, Imm):
            yield "raise", re.sub(r"\b\d+\s*;$", f"{count.value + 8};", statement)
    elif ins.base == "griddepcontrol":
        if what == "wait":
            yield "drop", ""
    else:
        yield "drop", ""
        yield "shift", _shift_operand(statement, ins)


def _changed(statement: str, which: int, kind: str, op: str, by: str) -> str:
    """The statement with its ``which``-th operand changed by an instruction in a scope of its own."""
    head, rest = statement.rstrip(";").split(None, 1)
    operands = _top_level(rest)
    old = operands[which].strip()
    operands[which] = " mutant"
    return f"{{ .reg .{kind} mutant; {op} mutant, {old}, {by}; {head} {','.join(operands)}; }}"


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


def _shift_operand(statement: str, ins: Instr) -> str:
    """Move a bulk copy by one row of a swizzle pattern, 128 bytes, in shared memory."""
    which = next((i for i, op in enumerate(ins.operands) if isinstance(op, Mem) and isinstance(op.base, Reg)), None)
    if which is None:
        return ""
    operands = _top_level(statement.rstrip(";").split(None, 1)[1])
    head = statement.split(None, 1)[0]
    old = operands[which].strip().strip("[]").strip()
    operands[which] = " [mutant]"
    return f"{{ .reg .b32 mutant; add.u32 mutant, {old}, 128; {head} {','.join(operands)}; }}"


def _is_wait(ins: Instr) -> bool:
    return ins.base in ("cp", "wgmma") and ("wait_group" in ins.parts or "wait_all" in ins.parts)


def _is_commit(ins: Instr) -> bool:
    return ins.base in ("cp", "wgmma") and "commit_group" in ins.parts


def _is_barrier(ins: Instr) -> bool:
    if ins.base == "barrier" and "cluster" in ins.parts and "arrive" in ins.parts:
        return False
    return (ins.base in ("bar", "barrier") and "red" not in ins.parts) or ins.base in ("membar", "fence")


def _space(ins: Instr) -> str:
    return next(
        (p.split(":")[0] for p in ins.parts if p.split(":")[0] in ("shared", "global", "local", "param", "const")), ""
    )


def _has_address(ins: Instr) -> bool:
    return any(isinstance(op, Mem) and isinstance(op.base, Reg | Sym) for op in ins.operands)


def _access_bytes(ins: Instr) -> int:
    lanes = next((int(p[1]) for p in ins.parts if p in ("v2", "v4", "v8")), 1)
    values = [op for op in ins.operands if isinstance(op, Vec)]
    return TYPE_BYTES.get(ins.parts[-1], 4) * (lanes if values else 1)


def _shift(statement: str, which: int, by: int) -> str:
    """Add ``by`` bytes to the ``which``-th bracketed address."""
    brackets = list(re.finditer(r"\[([^\]]*)\]", statement))
    chosen = brackets[which]
    m = re.match(r"\s*([\w$%@.]+)\s*(?:([+-])\s*(-?\d+))?\s*$", chosen[1])
    if m is None:
        return statement
    offset = int(m[3] or 0) * (-1 if m[2] == "-" else 1) + by
    return f"{statement[: chosen.start()]}[{m[1]}+{offset}]{statement[chosen.end() :]}"
