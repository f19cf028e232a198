"""Finds a role's two loops in a kernel: over items, and over an item's k-tiles, with the blocks that end the latter."""

from __future__ import annotations

from kernelproof.certificates.accumulators import is_wgmma
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.program import Program
from kernelproof.certificates.role_state import PRODUCER
from kernelproof.emulator.frontend.flow.blocks import Block
from kernelproof.emulator.frontend.flow.loops import reachable
from kernelproof.emulator.frontend.instruction import defs_uses
from kernelproof.emulator.frontend.ptx import Instr


def registers_of(program: Program, blocks: set[int]) -> tuple[set[str], set[str]]:
    """Two sets for some blocks: the registers that they read or write, and those that they write. A branch reads its
    condition."""
    written, used = set[str](), set[str]()
    for block in blocks:
        node = program.blocks[block]
        if node.cond is not None:
            used.add(node.cond.name)
        for ins in node.all():
            defs, uses = defs_uses(ins)
            written.update(defs)
            used.update(uses)
            if ins.guard is not None:
                used.add(ins.guard.name)
    return written | used, written


def exits_of(program: Program, head: int) -> list[int]:
    """The blocks outside of a loop to which the loop branches."""
    body = program.loops[head]
    targets = {target for block in body for target in program.blocks[block].targets}
    return sorted(targets - body)


def after_items(program: Program, items: int) -> int:
    """The block that follows the loop over items. Raises NotCertified if there are several."""
    blocks = exits_of(program, items)
    if len(blocks) != 1:
        raise NotCertified("the loop over items is left for different places")
    return blocks[0]


def is_asynchronous(program: Program, block: int) -> bool:
    """Whether a block multiplies by wgmma."""
    return any(is_wgmma(ins, "mma_async") for ins in program.blocks[block].all())


def tail_of(program: Program, items: int, exits: list[int]) -> tuple[set[int], int]:
    """The blocks after a loop over k-tiles that may still touch an mbarrier or a wgmma, and the block that follows
    them.

    ``exits``: the blocks to which the loop is left. ``items``: the head of the loop over items, where an item ends.
    These blocks end where all paths meet, and before the first wait for an mbarrier. Raises NotCertified for several
    exits.
    """
    if len(exits) != 1:
        raise NotCertified("the main loop is left for different places")
    at = end = exits[0]
    passed, tail = set[int](), set[int]()
    while (join := program.joins[at]) is not None and join != items:
        between = reachable(program.blocks, [at], join)
        if items in between or any(_waits(program.blocks[block]) for block in between):
            break
        passed |= between
        at = join
        if any(ins.base in ("mbarrier", "wgmma") for block in between for ins in program.blocks[block].all()):
            tail, end = set(passed), at
    return tail, end


def loops_of(program: Program, role: str, several: bool = True) -> tuple[int, int]:
    """The heads of a role's loops over items and over k-tiles; one head for both if a CTA does not have ``several``
    items. Raises NotCertified if there are other loops or none."""
    does = loads_box if role == PRODUCER else multiplies
    work = {block.index for block in program.blocks if any(does(ins) for ins in block.all())}
    heads = [head for head, body in program.loops.items() if work and work <= body]
    if len(heads) != 1 + several:
        loops = "two loops, over items and over k-tiles" if several else "one loop, over k-tiles"
        raise NotCertified(f"a {role} that has not {loops}")
    heads.sort(key=lambda head: len(program.loops[head]))
    return heads[-1], heads[0]


def block_after_waits(program: Program, exits: list[int]) -> int:
    """The block after the last loop that waits for an mbarrier, among the loops that follow the one over k-tiles.
    Raises NotCertified if no such loop is the last one."""
    following = reachable(program.blocks, exits)
    heads = [
        head for head in program.loops
        if head in following and spins(program, head)
    ]  # fmt: skip
    after = [exits_of(program, head) for head in heads]
    last = [
        targets[0] for targets in after
        if len(targets) == 1 and not set(heads) & reachable(program.blocks, targets)
    ]  # fmt: skip
    if len(last) != 1:
        raise NotCertified("a consumer without one last wait for the sums of its cluster")
    return last[0]


def block_after_products(program: Program) -> int:
    """The block where a program's products have ended: all paths lead through it, none leads from it to a product, and
    it is the first such block. Raises NotCertified if there is none."""
    at: int | None = 0
    while at is not None:
        if not any(multiplies(ins) for block in reachable(program.blocks, [at]) for ins in program.blocks[block].all()):
            return at
        at = program.joins[at]
    raise NotCertified("a kernel without a block after all of its products")


def spins(program: Program, head: int) -> bool:
    """Whether a loop waits for an mbarrier."""
    return any(_waits(program.blocks[block]) for block in program.loops[head])


def is_wait(ins: Instr) -> bool:
    """Whether an instruction tries to wait for an mbarrier."""
    return ins.op == "emu_try_wait"


def _waits(block: Block) -> bool:
    """Whether a block waits for an mbarrier."""
    return any(map(is_wait, block.all()))


def loads_box(ins: Instr) -> bool:
    """Whether an instruction loads a box to shared memory."""
    return ins.op.startswith("cp.async.bulk.tensor") and "mbarrier" in ins.op


def multiplies(ins: Instr) -> bool:
    """Whether an instruction multiplies matrices."""
    return ins.base == "mma" or is_wgmma(ins, "mma_async") or ins.parts[:2] == ("tcgen05", "mma")


def loads_sums(ins: Instr) -> bool:
    """Whether an instruction loads sums from tensor memory."""
    return ins.parts[:2] == ("tcgen05", "ld")


def items_of_store(program: Program) -> int:
    """The head of the loop over items in which sums are loaded from tensor memory. It may have inner loops. Raises
    NotCertified if there is none."""
    work = {block.index for block in program.blocks if any(map(loads_sums, block.all()))}
    heads = [head for head, body in program.loops.items() if work and work <= body]
    if not heads:
        raise NotCertified("no loop over items loads sums from tensor memory")
    return max(heads, key=lambda head: len(program.loops[head]))
