"""Finds plain loads whose value may be stale without harm: those that begin a loop of compare-and-swaps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kernelproof.emulator.frontend.flow.blocks import Block
from kernelproof.emulator.frontend.flow.loops import immediate_postdominators
from kernelproof.emulator.frontend.instruction import Writes, defs_uses, facts
from kernelproof.emulator.frontend.ptx import Instr, Mem, Operand, Reg
from kernelproof.emulator.frontend.registers import registers


class _Definition(NamedTuple):
    """A write of the register ``name`` by the instruction at ``position`` in a block. ``uncompared``: on the path that
    is followed, no swap has compared memory with the value yet."""

    block: int
    position: int
    name: str
    uncompared: bool = True


def checked_loads(blocks: list[Block]) -> set[int]:
    """Identities (``id``) of the loads whose value a later atom.cas compares with memory at the same address.

    Only moves may lie between the load and that comparison. Apart from it, the value may only help to compute what is
    swapped in, or decide a branch. Until the paths of such a branch join, they must write nothing except by the swaps.
    If the first swap that compares the value succeeds, the value was current, so uses after that swap do not count.
    """
    lists = [list(block.all()) for block in blocks]
    writers: dict[str, list[Instr]] = {}
    definitions: dict[int, _Definition] = {}
    swaps = []
    for index, instructions in enumerate(lists):
        for position, ins in enumerate(instructions):
            for name in defs_uses(ins)[0]:
                writers.setdefault(name, []).append(ins)
                definitions[id(ins)] = _Definition(index, position, name)
            if _is_swap(ins):
                swaps.append(ins)
    if not swaps:
        return set()
    swaps_of_load: dict[int, set[int]] = {}
    for swap in swaps:
        for load in _compared_loads(swap, writers):
            swaps_of_load.setdefault(load, set()).add(id(swap))
    uses = _ValueUses(blocks, lists)
    return {load for load, its_swaps in swaps_of_load.items() if uses.are_harmless(definitions[load], its_swaps)}


class _ValueUses:
    """Follows the uses of loaded values through a kernel. ``lists``: per block, all its instructions, also one that
    blocks at its end."""

    def __init__(self, blocks: list[Block], lists: list[list[Instr]]) -> None:
        self.blocks, self.lists = blocks, lists
        self.joins = immediate_postdominators(blocks)

    def are_harmless(self, loaded: _Definition, swaps: set[int]) -> bool:
        """Are all uses of a loaded value allowed (see ``checked_loads``)? ``swaps``: identities of the atom.cas that
        compare it."""
        todo, visited = [loaded], set[_Definition]()
        while todo:
            definition = todo.pop()
            if definition in visited:
                continue
            visited.add(definition)
            for block, position, uncompared in self._uses(definition, swaps):
                if position == len(self.lists[block]):
                    if not self._writes_nothing(block, swaps):
                        return False
                    continue
                ins = self.lists[block][position]
                if id(ins) in swaps:
                    # The value may be compared or swapped in, but must not be the address of the swap.
                    if definition.name in registers(ins.operands[1]):
                        return False
                    continue
                form = facts(ins)
                if form is None or form.writes is not Writes.RESULT or form.waits:
                    return False
                todo += [_Definition(block, position, name, uncompared) for name in defs_uses(ins)[0]]
        return True

    def _uses(self, definition: _Definition, swaps: set[int]) -> Iterator[tuple[int, int, bool]]:
        """All reads of a definition: the block, the position of the instruction in it, and whether the value is still
        ``uncompared``. The position after the last instruction stands for the block's branch."""
        name = definition.name
        todo = [(definition.block, definition.position + 1, definition.uncompared)]
        visited = set[tuple[int, bool]]()
        while todo:
            index, start, uncompared = todo.pop()
            block, instructions = self.blocks[index], self.lists[index]
            for position in range(start, len(instructions)):
                defs, uses = defs_uses(instructions[position])
                if name in uses:
                    yield index, position, uncompared
                if name in defs and name not in uses:
                    break
            else:
                if block.cond is not None and block.cond.name == name:
                    yield index, len(instructions), uncompared
                # If the first swap that compares the value succeeds, the value is proven current, and this path is not
                # followed. The success of a later swap proves nothing about the value: that swap may compare memory
                # with what the first one has returned instead.
                equal = self._success_block(index, swaps)
                for target in block.targets:
                    state = target, uncompared and equal is None
                    if not (uncompared and target == equal) and state not in visited:
                        visited.add(state)
                        todo.append((target, 0, state[1]))

    def _success_block(self, index: int, swaps: set[int]) -> int | None:
        """The block that follows if a block's swap has succeeded; None if its branch does not test that."""
        block, test, between = self.blocks[index], None, set[str]()
        if block.end != "cond" or block.cond is None:
            return None
        # Going back from the branch, the first write of its condition is the test, and then comes the swap. The test
        # tells whether the swap has succeeded if it compares the swap's result with the value that the swap expected,
        # and no instruction in between writes either register.
        for ins in reversed(self.lists[index]):
            defs, _ = defs_uses(ins)
            if test is None:
                if block.cond.name in defs:
                    compares = ins.base == "setp" and ins.parts[1] in ("eq", "ne") and ins.parts[-1][0] != "f"
                    if not compares or len(ins.operands) != 3:
                        return None
                    test = ins
                continue
            if id(ins) in swaps:
                sides = {op.name for op in test.operands[1:3] if isinstance(op, Reg)}
                swapped = {op.name for op in (ins.operands[0], ins.operands[2]) if isinstance(op, Reg)}
                if len(sides) != 2 or sides != swapped or sides & between or ins.guard or test.guard:
                    return None
                return block.targets[(test.parts[1] == "ne") != block.cond.negated]
            between.update(defs)
        return None

    def _writes_nothing(self, branch: int, swaps: set[int]) -> bool:
        """Do no instructions but swaps write memory between a branch and the block where its paths join?"""
        todo, visited = list(self.blocks[branch].targets), {self.joins[branch]}
        while todo:
            index = todo.pop()
            if index in visited:
                continue
            visited.add(index)
            todo += self.blocks[index].targets
            for ins in self.lists[index]:
                form = facts(ins)
                if id(ins) not in swaps and (form is None or Writes.MEMORY in form.writes or ins.op == "emu_vprintf"):
                    return False
        return True


def _is_swap(ins: Instr) -> bool:
    """Is this an atomic compare-and-swap?"""
    return ins.base == "atom" and "cas" in ins.parts


def _compared_loads(swap: Instr, writers: dict[str, list[Instr]]) -> set[int]:
    """The identities of the loads that give an atom.cas the value which it compares with memory. The value comes from
    the load by moves, or is the result of an earlier swap at the same address that compares the loaded value. If it may
    come from any other instruction, the set is empty."""
    out: set[int] = set()
    address = _address_expression(swap.operands[1], writers)
    todo, visited = [swap.operands[2]], set[str]()
    while todo:
        operand = todo.pop()
        if not isinstance(operand, Reg):
            return set()
        if operand.name in visited:
            continue
        visited.add(operand.name)
        for ins in writers.get(operand.name, ()):
            if ins.base == "mov":
                todo.append(ins.operands[1])
            elif (ins.base != "ld" and not _is_swap(ins)) or _address_expression(ins.operands[1], writers) != address:
                return set()
            elif ins.base == "ld":
                out.add(id(ins))
            else:
                todo.append(ins.operands[2])
    return out


def _address_expression(operand: Operand, writers: dict[str, list[Instr]], depth: int = 8) -> object:
    """A value that two address operands share only if their addresses are equal. It looks through moves, cvta and
    additions of registers that are written once, at most ``depth`` instructions back."""
    if isinstance(operand, Mem):
        return _address_expression(operand.base, writers), operand.offset
    if not isinstance(operand, Reg) or depth == 0 or len(writers.get(operand.name, ())) != 1:
        return operand
    (ins,) = writers[operand.name]
    if ins.base in ("mov", "cvta") and ins.guard is None:
        return _address_expression(ins.operands[1], writers, depth - 1)
    if ins.base == "add" and ins.guard is None:
        return frozenset(_address_expression(term, writers, depth - 1) for term in ins.operands[1:3])
    return operand
