"""Counts the iterations of loops whose counter starts and ends at constants, by executing the counter."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence

from kernelproof.sass.decoding import Instruction
from kernelproof.sass.flow import conditional
from kernelproof.sass.registers import access, register_names

MAX_ITERATIONS = 1 << 14  # loops with more iterations count as loops without constant bounds
WORD_MASK = (1 << 32) - 1
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "EQ": operator.eq, "NE": operator.ne, "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
}  # fmt: skip

Values = dict[str, int]  # the known values of registers and predicates by name, as unsigned 32-bit numbers


def trips(before: Sequence[Instruction], body: Sequence[Instruction]) -> int | None:
    """The number of iterations of a loop; None if it does not follow from constants.

    ``before``: the instructions up to the loop. ``body``: an iteration, which ends with the jump to its start.
    """
    values: Values = {}
    _run(before, values)
    jump = body[-1]
    for count in range(1, MAX_ITERATIONS):
        _run(body, values)
        jumps = _jumps(jump, values)
        if jumps is None:
            return None
        if not jumps:
            return count
    return None


def _jumps(jump: Instruction, values: Values) -> bool | None:
    """Whether a conditional jump is taken; None if that is not known."""
    if not conditional(jump):
        return None
    predicates = [jump.guard] if jump.guard else jump.operands[:1]
    states = [_operand(predicate or "", values) for predicate in predicates]
    return None if None in states else all(states)


def _run(instructions: Iterable[Instruction], values: Values) -> None:
    """Executes instructions on the known values; values that become unknown are removed."""
    for instruction in instructions:
        result = _result(instruction, values)
        written = register_names(access(instruction).writes)
        for register in written:
            values.pop(register, None)
        if result is not None and not instruction.guard:
            for register in written if instruction.name == "CS2R" else instruction.operands[:1]:
                values[register] = result & WORD_MASK


def _result(instruction: Instruction, values: Values) -> int | None:
    """The value of an instruction's first result, for the opcodes that counters are made of; else None."""
    name, operands = instruction.name.removeprefix("U"), instruction.operands
    if {"X", "HI"} & set(instruction.modifiers):  # a sum with a carry, or the upper half of a product
        return None
    sources = [_operand(operand, values) for operand in operands[1:]]
    if name == "MOV":
        return sources[0]
    if name == "CS2R":
        return 0 if operands[1] == "SRZ" else None
    if name == "IADD3" and len(sources) >= 3:
        return _sum(sources[-3:])
    if name == "IMAD" and len(sources) == 3:
        return _product(sources)
    if name == "ISETP" and len(sources) >= 3 and operands[-1] in ("PT", "UPT"):
        return _comparison(instruction, sources[1:3])
    # A PLOP3 with this truth table copies its predicate, if the other two are true.
    if name == "PLOP3" and operands[1:4] == ("PT", "PT", "PT") and operands[4:] and operands[-2:] == ("0x80", "0x0"):
        return _operand(operands[4], values)
    return None


def _sum(sources: Sequence[int | None]) -> int | None:
    """The sum of the terms; None if one is unknown."""
    return None if None in sources else sum(source for source in sources if source is not None)


def _product(sources: Sequence[int | None]) -> int | None:
    """a * b + c; it is known if a factor is 0, even if the other one is not."""
    a, b, c = sources
    if a == 0 or b == 0:
        return c
    return None if a is None or b is None or c is None else a * b + c


def _comparison(instruction: Instruction, sources: Sequence[int | None]) -> int | None:
    """The result of ISETP as 0 or 1; None if an operand or the comparison is not known."""
    compare = next((COMPARISONS[part] for part in instruction.modifiers if part in COMPARISONS), None)
    a, b = sources
    if compare is None or a is None or b is None:
        return None
    return int(compare(a, b) if "U32" in instruction.modifiers else compare(_signed(a), _signed(b)))


def _signed(value: int) -> int:
    """A number of 32 bits, read as signed."""
    value &= WORD_MASK
    return value - (1 << 32) if value >> 31 else value


def _operand(operand: str, values: Values) -> int | None:
    """The value of an operand: a constant, a zero register, or a known register; None if it is unknown."""
    operand = operand.removesuffix(".reuse")
    if operand.startswith("!"):
        value = _operand(operand[1:], values)
        return None if value is None else 1 - value
    if operand.startswith("-") and not operand.startswith("-0x"):
        value = _operand(operand[1:], values)
        return None if value is None else -value
    if operand in ("RZ", "URZ", "SRZ"):
        return 0
    if operand in ("PT", "UPT"):
        return 1
    if operand.lstrip("-").startswith("0x"):
        return int(operand, 16)
    return values.get(operand)
