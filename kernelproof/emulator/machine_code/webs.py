"""Gives each value of a function a register of its own.

ptxas reuses a register for many values. Here a *web* is a set of writes and reads of one register that belong together:
each read with all writes that may reach it. Every web gets a name, so that the analyses of the front end (which values
are uniform, which live across blocks) see values in place of registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from kernelproof.emulator.frontend.flow.inline import renamed
from kernelproof.emulator.frontend.instruction import defs_uses, facts
from kernelproof.emulator.frontend.ptx import Instr, Label, Reg, Sym, Vec

Body = list[Instr | Label]
_ENTRY = -1  # stands for the value that a register has at the start


class _Piece:
    """Items without a branch or a label between them. ``items``: a range of the body. ``next``: pieces that may
    follow."""

    def __init__(self, items: range) -> None:
        self.items, self.next = items, list[int]()
        # Register -> the writes that reach the start of the piece; and the last write in it.
        self.reaching: dict[str, frozenset[int]] = {}
        self.last: dict[str, frozenset[int]] = {}


def separated(body: Body, kinds: Mapping[str, str]) -> tuple[Body, dict[str, str]]:
    """The body with a register for each web, and the types of these registers."""
    pieces = _pieces(body)
    accesses = [_accesses(item, kinds) for item in body]
    _spread(pieces, accesses)
    webs = _Union()
    readings: dict[tuple[int, str], tuple[str, int]] = {}
    for piece in pieces:
        present = dict(piece.reaching)
        for at in piece.items:
            defs, uses = accesses[at]
            for name in uses:
                sources = [(name, write) for write in present.get(name, frozenset((_ENTRY,)))]
                for other in sources[1:]:
                    webs.join(sources[0], other)
                readings[at, name] = sources[0]
            for name in defs:
                if name in uses and _keeps(body[at]):
                    webs.join((name, at), readings[at, name])
                present[name] = frozenset((at,))
    names = _Names(webs, kinds)
    return [_rewritten(item, at, names, readings) for at, item in enumerate(body)], names.kinds


def _accesses(item: Instr | Label, kinds: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The registers that an item writes and reads; special registers do not count."""
    defs, uses = defs_uses(item) if isinstance(item, Instr) else ([], [])
    return defs, [name for name in uses if name in kinds]


def _keeps(item: Instr | Label) -> bool:
    """Does an instruction leave the old value of a register where its guard does not hold, or update it?"""
    if not isinstance(item, Instr):
        return False
    form = facts(item)
    return item.guard is not None or (form is not None and form.updates)


def _pieces(body: Body) -> list[_Piece]:
    starts = {0}
    for at, item in enumerate(body):
        if isinstance(item, Label):
            starts.add(at)
        elif item.base in ("bra", "exit", "brx"):
            starts.add(at + 1)
    edges = sorted(start for start in starts if start < len(body))
    pieces = [_Piece(range(start, stop)) for start, stop in zip(edges, [*edges[1:], len(body)], strict=True)]
    at_label = {item.name: i for i, piece in enumerate(pieces) if isinstance(item := body[piece.items[0]], Label)}
    for i, piece in enumerate(pieces):
        last = body[piece.items[-1]]
        ends = isinstance(last, Instr) and last.base in ("bra", "exit", "brx")
        if not ends or (isinstance(last, Instr) and last.guard is not None):
            piece.next += [i + 1] if i + 1 < len(pieces) else []
        if isinstance(last, Instr) and ends:
            piece.next += [at_label[name] for name in _labels(last)]
    return pieces


def _labels(branch: Instr) -> Iterator[str]:
    for operand in branch.operands:
        for item in operand.items if isinstance(operand, Vec) else (operand,):
            if isinstance(item, Sym):
                yield item.name


def _spread(pieces: list[_Piece], accesses: list[tuple[list[str], list[str]]]) -> None:
    """Find the writes that reach each piece. Sets only grow, so this ends."""
    for piece in pieces:
        for at in piece.items:
            for name in accesses[at][0]:
                own = frozenset((at,))
                piece.last[name] = own
    pending = set(range(len(pieces)))
    everything = {name for defs, uses in accesses for name in (*defs, *uses)}
    pieces[0].reaching = dict.fromkeys(everything, frozenset((_ENTRY,)))
    while pending:
        index = min(pending)
        pending.discard(index)
        piece = pieces[index]
        leaving = piece.reaching | piece.last
        for follower in piece.next:
            arriving = pieces[follower].reaching
            changed = False
            for name, writes in leaving.items():
                before = arriving.get(name, frozenset())
                if not writes <= before:
                    arriving[name], changed = before | writes, True
            if changed:
                pending.add(follower)


class _Union:
    """Sets of writes that are joined one by one."""

    def __init__(self) -> None:
        self.parents: dict[tuple[str, int], tuple[str, int]] = {}

    def find(self, write: tuple[str, int]) -> tuple[str, int]:
        root = write
        while (parent := self.parents.get(root, root)) != root:
            root = parent
        while write != root:
            self.parents[write], write = root, self.parents.get(write, write)
        return root

    def join(self, a: tuple[str, int], b: tuple[str, int]) -> None:
        self.parents[self.find(a)] = self.find(b)


class _Names:
    """The names of webs: a register's own name for its first web, then with a number."""

    def __init__(self, webs: _Union, kinds: Mapping[str, str]) -> None:
        self.webs, self.old_kinds = webs, kinds
        self.kinds: dict[str, str] = {}
        self.names: dict[tuple[str, int], str] = {}
        self.counts: dict[str, int] = {}

    def of(self, write: tuple[str, int]) -> str:
        root = self.webs.find(write)
        name = self.names.get(root)
        if name is None:
            register = write[0]
            count = self.counts.get(register, 0)
            self.counts[register] = count + 1
            name = self.names[root] = f"{register}_{count}" if count else register
            self.kinds[name] = self.old_kinds[register]
        return name


def _rewritten(
    item: Instr | Label, at: int, names: _Names, readings: dict[tuple[int, str], tuple[str, int]]
) -> Instr | Label:
    if isinstance(item, Label):
        return item
    defs, _ = defs_uses(item)

    def read(name: str) -> str:
        return names.of(readings[at, name]) if (at, name) in readings else name

    def write(name: str) -> str:
        return names.of((name, at))

    keep = str
    results = 1 if defs else 0
    operands = tuple(renamed(operand, write if i < results else read, keep) for i, operand in enumerate(item.operands))
    guard = Reg(read(item.guard.name), item.guard.negated) if item.guard is not None else None
    return replace(item, operands=operands, guard=guard)
