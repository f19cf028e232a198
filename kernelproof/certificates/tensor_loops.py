"""Finds the loops over items of a kernel with accumulators in tensor memory, and where its threads meet around them."""

from __future__ import annotations

from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.program import Program
from kernelproof.certificates.role_loops import items_of_store, loops_of
from kernelproof.certificates.role_state import CONSUMER, MULTIPLIER, PRODUCER
from kernelproof.emulator.frontend.flow.loops import reachable


def heads_of(program: Program) -> dict[str, int]:
    """The head of each role's loop over items."""
    heads = {what: loops_of(program, what)[0] for what in (PRODUCER, MULTIPLIER)}
    return heads | {CONSUMER: items_of_store(program)}


def end_of_setup(program: Program) -> int:
    """The block after the last barrier that comes before all loops over items. Raises NotCertified without one."""
    heads = set(heads_of(program).values())
    waits = ("barrier.cluster.wait", "bar.sync", "barrier.sync")
    looped = set[int]().union(*program.loops.values())
    found = [
        block for block in program.blocks
        if block.index not in looped and block.end == "wait" and any(x.op.startswith(waits) for x in block.all())
        and heads <= reachable(program.blocks, block.targets)
    ]  # fmt: skip
    # All of them lie on every path, so all the others can be reached from the first one, and none from the last.
    last = [x for x in found if not {y.index for y in found} & reachable(program.blocks, x.targets)]
    if len(last) != 1:
        raise NotCertified("a CTA without one barrier of all its threads before they have roles")
    return last[0].targets[0]


def meeting_of(program: Program) -> int:
    """The block at which threads of all roles meet after their items. Raises NotCertified without one."""
    at: int | None = end_of_setup(program)
    heads = set(heads_of(program).values())
    while at is not None and heads & (reachable(program.blocks, [at]) | {at}):
        at = program.joins[at]
    if at is None:
        raise NotCertified("threads of different roles do not meet after their items")
    return at
