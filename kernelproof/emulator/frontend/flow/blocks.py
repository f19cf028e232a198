"""Splits the body of a kernel into basic blocks, which end at a branch, a label or a wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from kernelproof.emulator.frontend.instruction import InstructionForm, facts, waits
from kernelproof.emulator.frontend.ptx import Imm, Instr, Label, PtxError, Reg, Sym, Vec

_ALL_LANES = 0xFFFFFFFF


@dataclass(slots=True)
class Block:
    """Straight-line code, and the way it ends. ``line``: the PTX line at which it begins.

    ``end`` is one of ``jump`` (to targets[0]), ``cond`` (to targets[0] if ``cond`` is true, else to targets[1]),
    ``switch`` (``cond`` is the index of the target), ``wait`` (the blocking instruction ``last``, then to targets[0])
    and ``exit``.
    """

    index: int
    instrs: list[Instr]
    end: str = "jump"
    targets: list[int] = field(default_factory=list)
    cond: Reg | None = None
    last: Instr | None = None
    line: int = 0

    def all(self) -> Iterator[Instr]:
        """The instructions of the block, including a blocking one."""
        yield from self.instrs
        if self.end == "wait" and self.last is not None:
            yield self.last


def expand_composites(items: Iterable[Instr | Label]) -> Iterator[Instr | Label]:
    """The statements of a body; composite instructions are replaced by the instructions that they consist of."""
    for item in items:
        form = facts(item) if isinstance(item, Instr) else None
        if isinstance(item, Instr) and form is not None and form.expands is not None:
            yield from form.expands(item)
        else:
            yield item


def insert_meetings(items: Iterable[Instr | Label]) -> Iterator[Instr | Label]:
    """The statements of a body, with an ``emu_meet`` before instructions that several lanes must execute together.

    At an ``emu_meet``, lanes, a warp or a warpgroup wait for each other. A warp or warpgroup needs only one for a
    sequence of such instructions, because nothing in between lets its lanes diverge.
    """
    last_meeting = ""
    for item in items:
        form = facts(item) if isinstance(item, Instr) else None
        if not isinstance(item, Instr) or form is None:
            last_meeting = last_meeting if isinstance(item, Instr) and item.base not in ("bra", "brx") else ""
            yield item
            continue
        meeting = _meeting(item, form)
        if meeting and (meeting == "lanes" or meeting != last_meeting):
            lanes = {"lanes": item.operands[-1:], "warp": (Imm(_ALL_LANES),)}.get(meeting, ())
            yield replace(item, op="emu_meet", parts=("emu_meet", meeting), operands=lanes)
        if item.guard is not None and (meeting or form.waits):
            last_meeting = ""
        elif meeting != "lanes" and (meeting or form.waits):
            last_meeting = meeting
        yield item


def _meeting(ins: Instr, form: InstructionForm) -> str:
    """Which threads must reach an instruction together; see ``InstructionForm.meets``. A mask of all 32 lanes is
    ``warp``."""
    if form.meets != "lanes":
        return form.meets
    members = ins.operands[-1]
    return "warp" if isinstance(members, Imm) and members.value & _ALL_LANES == _ALL_LANES else "lanes"


def split(items: Iterable[Instr | Label]) -> list[Block]:
    """The basic blocks of a body in text order; the last one is the common exit."""
    splitter = _Splitter()
    for item in items:
        if isinstance(item, Label):
            splitter.label(item)
        else:
            splitter.instruction(item)
    return splitter.finish()


# Targets that have no label: the next block, and the common exit.
_NEXT, _EXIT = "", "\n"


class _Splitter:
    """Splits a body into blocks from front to back. Invariant: ``current`` is the last block; if it has ``ended``, the
    next instruction opens a new one. Branch targets are resolved at the end, because labels may follow their
    branches."""

    def __init__(self) -> None:
        self.blocks = [Block(0, [])]
        self.current, self.ended = self.blocks[0], False
        self.block_of_label: dict[str, int] = {}
        self.targets: list[tuple[Block, list[str]]] = []

    def open(self, line: int) -> Block:
        """Open a new block, which is then the current one."""
        self.current, self.ended = Block(len(self.blocks), [], line=line), False
        self.blocks.append(self.current)
        return self.current

    def label(self, label: Label) -> None:
        """Begin a block at a label, unless the current block is still empty."""
        if self.current.instrs or self.ended or self.current.index == 0:
            previous = None if self.ended else self.current
            current = self.open(label.line)
            if previous is not None:
                previous.targets = [current.index]
        self.block_of_label[label.name] = self.current.index
        self.ended = False

    def instruction(self, item: Instr) -> None:
        """Add an instruction to the current block, or end the block with it."""
        if self.ended:
            self.open(item.line)
        if not self.current.instrs:
            self.current.line = item.line
        if item.base in ("bra", "brx", "ret", "exit"):
            self.leave(item)
        elif waits(item):
            self.wait(item)
        else:
            self.current.instrs.append(item)

    def leave(self, item: Instr) -> None:
        """End the block with a branch or an exit."""
        block = self.current
        block.last, self.ended = item, True
        if item.base == "brx":
            index, labels = item.operands
            if item.guard is not None or not isinstance(index, Reg) or not isinstance(labels, Vec):
                raise PtxError(item.line, "this form of brx.idx is not modelled")
            block.end, block.cond = "switch", index
            self.targets.append((block, [t.name for t in labels.items if isinstance(t, Sym)]))
            return
        target = _EXIT
        if item.base == "bra":
            label = item.operands[0]
            if not isinstance(label, Sym):
                raise PtxError(item.line, "branch without a label")
            target = label.name
        if item.guard is not None:
            block.end, block.cond = "cond", item.guard
            self.targets.append((block, [target, _NEXT]))
        else:
            self.targets.append((block, [target]))

    def wait(self, item: Instr) -> None:
        """End the block with a blocking instruction. A guarded one gets its own block, which a branch leads to."""
        if item.guard is not None:
            head = self.current
            head.end, head.cond = "cond", item.guard
            guarded = self.open(item.line)
            head.targets = [guarded.index, guarded.index + 1]
            item = replace(item, guard=None)
        block = self.current
        block.end, block.last, block.targets = "wait", item, [len(self.blocks)]
        self.open(item.line)

    def finish(self) -> list[Block]:
        """All blocks, the common exit last."""
        if not self.ended:
            self.targets.append((self.current, [_EXIT]))
        final = self.open(self.current.line)
        final.end = "exit"
        for block, names in self.targets:
            block.targets = [self.resolve(block, name, final.index) for name in names]
        return self.blocks

    def resolve(self, block: Block, name: str, final: int) -> int:
        """The block of a target. Raises PtxError for an unknown label."""
        if name == _NEXT:
            return block.index + 1
        if name == _EXIT:
            return final
        if name not in self.block_of_label:
            raise PtxError(block.line, f"label {name} does not exist")
        return self.block_of_label[name]
