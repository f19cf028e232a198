"""Checks that no instruction accesses a wgmma's accumulators while it may be writing them, on any path of the kernel.

A wgmma is asynchronous: its accumulators are in flight until ``wgmma.wait_group`` has waited for its group. To read or
write such a register is a race that the symbolic execution of ``warpgroup_machine`` cannot see, so ``pipeline_proof``
calls this check of the whole control-flow graph.

It is a forward data-flow analysis. The state before an instruction has, for each accumulator in flight, the least
number of ``commit_group`` instructions that were executed after the one that committed its wgmma. A wait for all but
the last n groups therefore completes the accumulators whose number is n or more. Where paths meet, the smaller number
counts. The state also says whether an accumulator may have been accessed ("touched") by another instruction since the
last ``wgmma.fence``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.program import Program, place_of
from kernelproof.emulator.frontend.instruction import defs_uses
from kernelproof.emulator.frontend.ptx import Imm, Instr, Vec
from kernelproof.emulator.frontend.registers import registers

OPEN = -1  # the commits of a wgmma that is in no group yet; its own commit makes that 0
MOST_COMMITS = 16  # commits are counted up to here, so that the analysis ends


@dataclass
class _InFlight:
    """The state before an instruction.

    ``touched``: whether an accumulator may have been accessed since the last wgmma.fence (true at the kernel's entry).
    ``commits``: register of an accumulator in flight -> the fewest commits after that of its wgmma, or OPEN.
    """

    touched: bool = True
    commits: dict[str, int] = field(default_factory=dict)

    def joined(self, other: _InFlight) -> _InFlight:
        """The state where two paths meet."""
        commits = dict(self.commits)
        for name, count in other.commits.items():
            commits[name] = min(count, commits.get(name, count))
        return _InFlight(self.touched or other.touched, commits)


def is_wgmma(ins: Instr, name: str) -> bool:
    """Whether an instruction is ``wgmma.<name>``, such as ``mma_async`` or ``fence``."""
    return ins.parts[:2] == ("wgmma", name)


def accumulator_tuples(program: Program) -> dict[tuple[str, ...], str]:
    """Maps the accumulator registers of each wgmma, in the order of its operand, to its opcode.

    Wgmmas that add to the same registers have one entry. Raises NotCertified if a wgmma names an accumulator twice, if
    two wgmmas have only a part of their accumulators in common, or if they have the same ones but different opcodes.
    """
    found: dict[tuple[str, ...], str] = {}
    owner: dict[str, tuple[str, ...]] = {}  # register -> the accumulators of which it is one
    for block in program.blocks:
        for ins in block.all():
            if not is_wgmma(ins, "mma_async"):
                continue
            names = tuple(registers(ins.operands[0]))
            if len(set(names)) < len(names):
                raise NotCertified("a wgmma names a register twice as an accumulator", place_of(ins))
            if found.setdefault(names, ins.op) != ins.op:
                raise NotCertified("wgmmas of two opcodes have the same accumulators", place_of(ins))
            if any(owner.setdefault(name, names) != names for name in names):
                raise NotCertified("two wgmmas have a part of their accumulators in common", place_of(ins))
    return found


def check_accumulators(program: Program) -> None:
    """Raise NotCertified if, on some path, an instruction accesses an accumulator in flight, or a wgmma follows another
    instruction's access to an accumulator without a wgmma.fence between them."""
    accumulators = {name for names in accumulator_tuples(program) for name in names}
    if not accumulators:
        return
    # The states before blocks only grow worse (more in flight, fewer commits, touched), so the analysis ends.
    before: dict[int, _InFlight] = {0: _InFlight()}
    todo = [0]
    while todo:
        block = todo.pop()
        state = _InFlight(before[block].touched, dict(before[block].commits))
        node = program.blocks[block]
        for ins in node.all():
            _step(state, ins, accumulators)
        for target in node.targets:
            joined = state if target not in before else before[target].joined(state)
            if target not in before or joined != before[target]:
                before[target] = _InFlight(joined.touched, dict(joined.commits))
                todo.append(target)


def _step(state: _InFlight, ins: Instr, accumulators: set[str]) -> None:
    """Change the state to that after an instruction. Raises NotCertified as ``check_accumulators`` does, and for a
    wgmma that is predicated or reads A from registers."""
    commits = state.commits
    if ins.base == "wgmma" and ins.guard is not None:
        raise NotCertified("an instruction of wgmma under a predicate", place_of(ins))
    if is_wgmma(ins, "mma_async"):
        if isinstance(ins.operands[1], Vec) or accumulators & {x for op in ins.operands[1:] for x in registers(op)}:
            raise NotCertified("a wgmma that reads A from registers", place_of(ins))
        if state.touched:
            raise NotCertified("accumulators may have been touched since the last wgmma.fence", place_of(ins))
        commits.update(dict.fromkeys(registers(ins.operands[0]), OPEN))
    elif is_wgmma(ins, "commit_group"):
        commits.update({name: min(count + 1, MOST_COMMITS) for name, count in commits.items()})
    elif is_wgmma(ins, "wait_group"):
        most = ins.operands[0]
        if not isinstance(most, Imm):
            raise NotCertified("a wait for a number of groups that is not known", place_of(ins))
        for name in [name for name, count in commits.items() if count >= most.value]:
            del commits[name]
    elif is_wgmma(ins, "fence"):
        state.touched = False
    else:
        defs, uses = defs_uses(ins)
        touched = accumulators.intersection((*defs, *uses))
        if touched & commits.keys():
            raise NotCertified("an accumulator is touched while a wgmma may be writing it", place_of(ins))
        state.touched |= bool(touched)
