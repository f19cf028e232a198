"""Computes the liveness of registers, and which registers hold one value for all lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kernelproof.emulator.frontend.flow.blocks import Block
from kernelproof.emulator.frontend.flow.loops import immediate_postdominators, reachable
from kernelproof.emulator.frontend.instruction import defs_uses, is_uniform, symbols
from kernelproof.emulator.frontend.ptx import Instr
from kernelproof.emulator.frontend.registers import LAUNCH_CONSTANTS, SPECIALS


class RegisterWrite(NamedTuple):
    """An instruction that writes a register: its block, the registers that it reads, and whether equal operands give an
    equal result."""

    block: int
    ins: Instr
    uses: list[str]
    uniform: bool


@dataclass
class Liveness:
    """Facts about reads and writes of registers. Per block: ``live`` has the registers that are live at its start,
    ``defs`` those that it writes, ``uses`` those that it reads before it writes them. ``sites``: register -> all
    instructions that write it."""

    live: list[set[str]]
    defs: list[set[str]]
    uses: list[set[str]]
    sites: dict[str, list[RegisterWrite]]

    @classmethod
    def of(cls, blocks: list[Block], varying_symbols: frozenset[str]) -> Liveness:
        """Compute the liveness of all registers. ``varying_symbols``: variables whose addresses differ between CTAs."""
        out = cls([], [], [], {})
        for block in blocks:
            used: set[str] = set()
            written: set[str] = set()
            for ins in block.all():
                defs, uses = defs_uses(ins)
                used.update(name for name in uses if name not in written)
                written.update(defs)
                if defs:
                    uniform = is_uniform(ins) and varying_symbols.isdisjoint(symbols(ins))
                    write = RegisterWrite(block.index, ins, uses, uniform)
                    for name in defs:
                        out.sites.setdefault(name, []).append(write)
            if block.cond is not None and block.cond.name not in written:
                used.add(block.cond.name)
            out.uses.append(used)
            out.defs.append(written)
        # A register is live at the start of a block if the block reads it first, or if it is live at the start of a
        # successor and the block does not write it. Sets only grow; going backwards reaches the fixed point in few
        # passes.
        out.live = [set(names) for names in out.uses]
        changed = True
        while changed:
            changed = False
            for block in reversed(blocks):
                live = out.live[block.index]
                size = len(live)
                for target in block.targets:
                    live |= out.live[target] - out.defs[block.index]
                changed |= len(live) != size
        return out

    def live_registers(self) -> set[str]:
        """Registers that are live at the start of some block, so that several blocks may access them."""
        return set().union(*self.live)


def launch_constants(sites: dict[str, list[RegisterWrite]]) -> set[str]:
    """Registers that always have one value in all lanes: a single unguarded instruction writes them, and its operands
    are launch constants themselves."""
    # This starts from no constants and adds what is proven, so a register that depends on itself is never added.
    constant: set[str] = set()
    changed = True
    while changed:
        changed = False
        for name, writes in sites.items():
            if name in constant or len(writes) != 1:
                continue
            (write,) = writes
            launch_wide = all(u in constant or u in LAUNCH_CONSTANTS for u in write.uses)
            if write.ins.guard is None and write.uniform and launch_wide:
                constant.add(name)
                changed = True
    return constant


def varying_registers(
    blocks: list[Block], liveness: Liveness, constant: set[str], conservative: bool
) -> set[str] | None:
    """Registers that may differ between lanes.

    A register varies if an instruction that writes it gives varying results, or reads a register that varies. It also
    varies if a varying branch separates lanes that execute different writes of it (``_separated_registers``). Both
    rules are applied until nothing changes. If lanes may overtake each other, these rules are not enough, and the
    result is None. The ``conservative`` answer is right in any case: every register that several blocks access varies,
    unless it is a launch constant.
    """
    sites = liveness.sites
    varying: set[str] = set()
    if conservative:
        live = liveness.live_registers()
        varying |= {r for r in sites if r in live and r not in constant}
    ipdom = immediate_postdominators(blocks)
    branches = {b.index for b in blocks if b.cond is not None}
    changed = True
    while changed:
        changed = _propagate(sites, varying, constant)
        if conservative:
            continue
        for index in sorted(branches):
            cond = blocks[index].cond
            if cond is not None and cond.name in varying:
                branches.discard(index)
                separated = _separated_registers(blocks, blocks[index], ipdom[index], liveness, constant)
                if separated is None:
                    return None
                changed |= bool(separated - varying)
                varying |= separated
    return varying


def _propagate(sites: dict[str, list[RegisterWrite]], varying: set[str], constant: set[str]) -> bool:
    """Add registers that depend on varying ones; returns whether any were added."""
    changed = False
    for name, writes in sites.items():
        if name not in varying and name not in constant and any(_varies(write, varying) for write in writes):
            varying.add(name)
            changed = True
    return changed


def _varies(write: RegisterWrite, varying: set[str]) -> bool:
    """May a write give different results in different lanes?"""
    return not write.uniform or any(u in varying or (u in SPECIALS and u not in LAUNCH_CONSTANTS) for u in write.uses)


def _separated_registers(
    blocks: list[Block], branch: Block, join: int | None, liveness: Liveness, constant: set[str]
) -> set[str] | None:
    """Registers that vary because lanes diverge at ``branch``. None: lanes may overtake each other.

    A side of the branch has the blocks that can be reached from one target before the ``join``, its immediate
    post-dominator. Only lanes on this side execute its writes. So a register that a side writes varies if it is read at
    the join or later. It also varies if another side reads it, because lanes on that side run later and would find this
    side's value.

    This holds only if no side has a wait: lanes that sleep there would be overtaken by lanes on other sides, unless
    those exit the kernel.
    """
    sides = [reachable(blocks, [target], join) for target in dict.fromkeys(branch.targets)]
    at_join = liveness.live[join] if join is not None else set()
    nonempty = [side for side in sides if side]
    waits = any(blocks[i].end == "wait" for side in nonempty for i in side)
    if len(nonempty) > 1 and waits and not _others_exit(blocks, nonempty):
        return None
    out: set[str] = set()
    for k, side in enumerate(sides):
        read = set(at_join).union(*(liveness.live[i] for j, other in enumerate(sides) if j != k for i in other))
        for i in side:
            out |= liveness.defs[i] & read
    return out - constant


def _others_exit(blocks: list[Block], sides: list[set[int]]) -> bool:
    """Do the lanes of all sides but the one that waits exit the kernel? True if at most one side waits and no two sides
    have a block in common."""
    waiting = [side for side in sides if any(blocks[i].end == "wait" for i in side)]
    return len(waiting) <= 1 and sum(map(len, sides)) == len(set().union(*sides))
