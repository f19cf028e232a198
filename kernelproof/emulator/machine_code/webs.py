"""Gives each value of a function a register of its own (renaming of live ranges, or "webs").

ptxas reuses a register for many values. A *web* is a set of writes and reads of one register that belong together: each
read belongs to the same web as all writes that may reach it. Every web gets its own name. So the analyses of the front
end, such as which values are uniform and which are live across blocks, see values and not registers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from kernelproof.emulator.frontend.flow.inline import rename_operand
from kernelproof.emulator.frontend.instruction import defs_uses, facts
from kernelproof.emulator.frontend.ptx import Instr, Label, Reg, Sym, Vec

Body = list[Instr | Label]
_ENTRY = -1  # stands for the value that a register has at the start


@dataclass
class _Block:
    """A basic block. ``items``: a range of the body. ``next``: the blocks that may follow. ``reaching``: the writes
    that reach its start, as the bits of a ``_Writes``."""

    items: range
    next: list[int] = field(default_factory=list)
    reaching: int = 0


class _Writes:
    """All writes of a function, each with the number of a bit. A register's bits are consecutive, and the first of them
    stands for its value at the function's start.

    So a set of writes is one integer, and the writes that reach the end of a block need two operations for all
    registers together.
    """

    def __init__(self, accesses: Sequence[tuple[list[str], list[str]]]) -> None:
        # Register -> the items of the body that write it, after _ENTRY.
        self.writers: dict[str, list[int]] = {}
        for index, (defs, uses) in enumerate(accesses):
            for name in (*defs, *uses):
                self.writers.setdefault(name, [_ENTRY])
            for name in dict.fromkeys(defs):
                self.writers[name].append(index)
        self.starts = dict(zip(self.writers, accumulate(map(len, self.writers.values()), initial=0), strict=False))

    def all_writes(self, name: str) -> int:
        """All writes of a register."""
        return ((1 << len(self.writers[name])) - 1) << self.starts[name]

    def last_write(self, name: str, before: int) -> int:
        """The last write of a register before an item of the body."""
        return 1 << (self.starts[name] + bisect_left(self.writers[name], before) - 1)

    def entries(self) -> int:
        """The values that registers have at the function's start."""
        return sum(1 << start for start in self.starts.values())

    def reached_by(self, name: str, present: int) -> list[tuple[str, int]]:
        """The writes of a register that are in a set; if none is, its value at the function's start."""
        writes, of_register = self.writers[name], present >> self.starts[name]
        return [(name, write) for i, write in enumerate(writes) if of_register >> i & 1] or [(name, _ENTRY)]


def with_webs(body: Body, kinds: Mapping[str, str]) -> tuple[Body, dict[str, str]]:
    """The body with a register for each web, and the types of these registers by name.

    ``kinds``: the types of the body's registers by name, without special registers.
    """
    blocks = _blocks(body)
    accesses = [_accesses(item, kinds) for item in body]
    writes = _Writes(accesses)
    _find_reaching_writes(blocks, accesses, writes)
    webs = _Union()
    readings: dict[tuple[int, str], tuple[str, int]] = {}
    for block in blocks:
        present: dict[str, tuple[str, int]] = {}  # register -> a write of the web that it holds
        for index in block.items:
            defs, uses = accesses[index]
            for name in uses:
                if name not in present:
                    present[name], *others = writes.reached_by(name, block.reaching)
                    for other in others:
                        webs.join(present[name], other)
                readings[index, name] = present[name]
            for name in defs:
                if name in uses and _keeps(body[index]):
                    webs.join((name, index), readings[index, name])
                present[name] = (name, index)
    names = _Names(webs, kinds)
    return [_rewritten(item, index, names, readings) for index, item in enumerate(body)], names.kinds


def _accesses(item: Instr | Label, kinds: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The registers that an item writes, and those that it reads, without special registers."""
    defs, uses = defs_uses(item) if isinstance(item, Instr) else ([], [])
    return defs, [name for name in uses if name in kinds]


def _keeps(item: Instr | Label) -> bool:
    """Does an instruction keep the old value of its result in some lanes, because of a guard, or update it?"""
    if not isinstance(item, Instr):
        return False
    form = facts(item)
    return item.guard is not None or (form is not None and form.updates)


def _blocks(body: Body) -> list[_Block]:
    """The basic blocks of a body, with their successors."""
    starts = {0}
    for index, item in enumerate(body):
        if isinstance(item, Label):
            starts.add(index)
        elif item.base in ("bra", "exit", "brx"):
            starts.add(index + 1)
    ordered_starts = sorted(start for start in starts if start < len(body))
    stops = [*ordered_starts[1:], len(body)]
    blocks = [_Block(range(start, stop)) for start, stop in zip(ordered_starts, stops, strict=True)]
    at_label = {item.name: i for i, block in enumerate(blocks) if isinstance(item := body[block.items[0]], Label)}
    for i, block in enumerate(blocks):
        last = body[block.items[-1]]
        ends = isinstance(last, Instr) and last.base in ("bra", "exit", "brx")
        if not ends or (isinstance(last, Instr) and last.guard is not None):
            block.next += [i + 1] if i + 1 < len(blocks) else []
        if isinstance(last, Instr) and ends:
            block.next += [at_label[name] for name in _labels(last)]
    return blocks


def _labels(branch: Instr) -> Iterator[str]:
    """The labels to which a branch may lead."""
    for operand in branch.operands:
        for item in operand.items if isinstance(operand, Vec) else (operand,):
            if isinstance(item, Sym):
                yield item.name


def _find_reaching_writes(
    blocks: list[_Block], accesses: Sequence[tuple[list[str], list[str]]], writes: _Writes
) -> None:
    """Find the writes that reach each block (reaching definitions). Sets only grow, so this ends."""
    kept, own_writes = [], []  # for each block: the writes that it does not overwrite, and its own that reach its end
    for block in blocks:
        written = {name for item_index in block.items for name in accesses[item_index][0]}
        kept.append(~sum(map(writes.all_writes, written)))
        own_writes.append(sum(writes.last_write(name, block.items.stop) for name in written))
    blocks[0].reaching = writes.entries()
    pending = set(range(len(blocks)))
    while pending:
        index = min(pending)
        pending.discard(index)
        leaving = blocks[index].reaching & kept[index] | own_writes[index]
        for follower in blocks[index].next:
            if leaving & ~blocks[follower].reaching:
                blocks[follower].reaching |= leaving
                pending.add(follower)


class _Union:
    """Disjoint sets of writes (union-find)."""

    def __init__(self) -> None:
        self.parents: dict[tuple[str, int], tuple[str, int]] = {}

    def find(self, write: tuple[str, int]) -> tuple[str, int]:
        """The write that represents the set of a write."""
        root = write
        while (parent := self.parents.get(root, root)) != root:
            root = parent
        while write != root:
            self.parents[write], write = root, self.parents.get(write, write)
        return root

    def join(self, a: tuple[str, int], b: tuple[str, int]) -> None:
        """Unite the sets of two writes."""
        self.parents[self.find(a)] = self.find(b)


class _Names:
    """The names of webs: the register's name for its first web, and that name with a number for further ones."""

    def __init__(self, webs: _Union, kinds: Mapping[str, str]) -> None:
        self.webs, self.old_kinds = webs, kinds
        self.kinds: dict[str, str] = {}
        self.names: dict[tuple[str, int], str] = {}
        self.counts: dict[str, int] = {}

    def of(self, write: tuple[str, int]) -> str:
        """The name of the web with a write."""
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
    item: Instr | Label, index: int, names: _Names, readings: dict[tuple[int, str], tuple[str, int]]
) -> Instr | Label:
    """An item with registers named by their webs. ``readings``: (item, register) -> a write of the web that it
    reads."""
    if isinstance(item, Label):
        return item
    defs, _ = defs_uses(item)

    def read(name: str) -> str:
        return names.of(readings[index, name]) if (index, name) in readings else name

    def write(name: str) -> str:
        return names.of((name, index))

    # The first operand is the result, if there is one. ``str`` leaves the names of symbols as they are.
    results = 1 if defs else 0
    operands = tuple(
        rename_operand(operand, write if i < results else read, str) for i, operand in enumerate(item.operands)
    )
    guard = Reg(read(item.guard.name), item.guard.negated) if item.guard is not None else None
    return replace(item, operands=operands, guard=guard)
