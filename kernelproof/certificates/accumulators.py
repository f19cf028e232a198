"""Checks that nothing touches a wgmma's accumulators while they are in flight, on any path through the kernel.

The accumulators of a wgmma are in flight until a wait for its group. A data-flow analysis finds, before each
instruction, the fewest commits since a wgmma has written each accumulator in flight, and whether an accumulator may
have been touched since the last wgmma.fence. Where paths meet, the fewest commits of both count, and touches of either.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.program import Program, place_of
from kernelproof.emulator.frontend.instruction import defs_uses
from kernelproof.emulator.frontend.ptx import Imm, Instr, Vec
from kernelproof.emulator.frontend.registers import registers

OPEN = -1  # the count of a wgmma that is committed to no group yet; its own commit makes that 0
MOST_COMMITS = 16  # limit of a count, so that the analysis ends


@dataclass
class _InFlight:
    """The state before an instruction. ``touched``: an accumulator may have been touched since the last wgmma.fence.
    ``commits``: accumulator in flight -> the fewest commits after that of its wgmma, or OPEN."""

    touched: bool = True
    commits: dict[str, int] = field(default_factory=dict)

    def joined(self, other: _InFlight) -> _InFlight:
        """The state where two paths meet."""
        commits = dict(self.commits)
        for name, count in other.commits.items():
            commits[name] = min(count, commits.get(name, count))
        return _InFlight(self.touched or other.touched, commits)


def is_wgmma(ins: Instr, what: str) -> bool:
    """Whether an instruction is the wgmma of a name, such as ``mma_async`` or ``fence``."""
    return ins.parts[:2] == ("wgmma", what)


def tuples_of(program: Program) -> dict[tuple[str, ...], str]:
    """The accumulators of each wgmma -> its opcode. Raises NotCertified if two of them share a part of their
    accumulators, or all of them but with different opcodes."""
    found: dict[tuple[str, ...], str] = {}
    owner: dict[str, tuple[str, ...]] = {}
    for block in program.blocks:
        for ins in block.all():
            if not is_wgmma(ins, "mma_async"):
                continue
            names = tuple(registers(ins.operands[0]))
            if found.setdefault(names, ins.op) != ins.op or len(set(names)) < len(names):
                raise NotCertified("accumulators of wgmmas of two shapes", place_of(ins))
            if any(owner.setdefault(name, names) != names for name in names):
                raise NotCertified("two wgmmas have a part of their accumulators in common", place_of(ins))
    return found


def check_accumulators(program: Program) -> None:
    """Raise NotCertified where an instruction may touch an accumulator in flight, or a wgmma may follow a touch without
    a wgmma.fence between."""
    accumulators = {name for names in tuples_of(program) for name in names}
    if not accumulators:
        return
    at: dict[int, _InFlight] = {0: _InFlight()}
    todo = [0]
    while todo:
        block = todo.pop()
        state = _InFlight(at[block].touched, dict(at[block].commits))
        node = program.blocks[block]
        for ins in node.all():
            _step(state, ins, accumulators)
        for target in node.targets:
            met = state if target not in at else at[target].joined(state)
            if target not in at or met != at[target]:
                at[target] = _InFlight(met.touched, dict(met.commits))
                todo.append(target)


def _step(state: _InFlight, ins: Instr, accumulators: set[str]) -> None:
    """Change the state to that after an instruction. Raises NotCertified if it may touch an accumulator in flight."""
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
