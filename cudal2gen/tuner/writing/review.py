"""Reads a written kernel's PTX for cheats that an execution may not show, such as branches that only a GPU takes.

A kernel may leave D alone if D already holds the result, keep something in a device variable, tell machines apart by
addresses, or work less for contents that no check has. It would be right whenever it is executed here, and fast when it
is timed. Therefore the review finds out which registers follow from which pointer or from contents, over all
instructions and whatever their order, and refuses such uses.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from kernelproof.emulator import Imm, Instr, Operand, PtxError, Reg, Sym, parse
from kernelproof.ground.errors import brief

_ELSEWHERE = re.compile(r"\.(?:param|shared|local|const)\b")
_FLOAT = re.compile(r"\.(?:b?f(?:16|32|64)(?:x2)?|[bsu]16)$")
_HALF = re.compile(r"ld\.shared\b.*\.(?:b16|u16|f16|bf16)$")
# Instructions without a destination: all of their operands are sources.
_WITHOUT_RESULT = (
    "st.",
    "red.",
    "cp.",
    "prefetch",
    "bar",
    "bra",
    "brx",
    "fence",
    "membar",
    "ret",
    "discard",
    "tensormap",
)
_NULL = Imm(0)


def findings(ptx: str, pointers: Collection[int], outputs: Collection[int], inputs: Collection[int]) -> list[str]:
    """What a kernel does that it must not do, a line each.

    ``pointers``: the positions of parameters that are buffers or tensor maps; ``outputs``: those of D among them;
    ``inputs``: the buffers of A and B.
    """
    try:
        module = parse(ptx)
    except PtxError as error:
        return [f"not read: {brief(str(error), 80)}: write it as nvcc does"]
    if not module.kernels:
        return ["its PTX has no kernel"]
    kernel = next(iter(module.kernels.values()))
    sources = {kernel.params[position].name: f"parameter {position}" for position in pointers}
    variables = {name: name for name, variable in module.variables.items() if variable.space == "global"}
    instructions = [item for item in kernel.body if isinstance(item, Instr)]
    origins = _origins(instructions, sources | variables)
    results = {f"parameter {position}" for position in outputs}
    read = {f"parameter {position}" for position in inputs}
    floats, wholes = (_contents(instructions, origins, read, whole) for whole in (False, True))
    lines: dict[str, None] = {}
    for instruction in instructions:
        lines |= dict.fromkeys(_faults(instruction, origins, results, set(variables)))
        compared = {*_names(instruction.operands[1:])} if instruction.op.startswith(("setp.", "set.")) else set()
        if compared & (floats if _FLOAT.search(instruction.op) else wholes):
            lines[f"content-test: {instruction.op} compares values of the operands, on which no work may depend"] = None
    return list(lines)


def _read(item: Instr) -> Operand | None:
    """The operand by which an instruction reads global memory; None if it does not."""
    if item.op.startswith(("ld.", "ldu.")) and not _ELSEWHERE.search(item.op):
        return item.operands[1]
    if item.op.startswith("atom."):
        return None if _ELSEWHERE.search(item.op) else item.operands[1]
    shared, far = item.op.find(".shared"), item.op.find(".global")
    return item.operands[1] if item.op.startswith("cp.") and -1 < shared < far else None


def _written(item: Instr) -> Operand | None:
    """The operand by which an instruction writes global memory; None if it does not."""
    if item.op.startswith(("st.", "red.")):
        return None if _ELSEWHERE.search(item.op) else item.operands[0]
    return _read(item) if item.op.startswith("atom.") else None


def _names(operand: object) -> Iterator[str]:
    """The registers and symbols of an operand and of its parts."""
    if isinstance(operand, Reg | Sym):
        yield operand.name
    elif isinstance(operand, tuple):
        for part in operand:
            yield from _names(part)


def _origins(instructions: Collection[Instr], sources: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """For each register and symbol the pointers that its value follows from. A loaded value follows from none.

    The rule is applied to all instructions until nothing changes, so their order does not matter.
    """
    origins = {name: frozenset((source,)) for name, source in sources.items()}
    loads = ("ld", "atom", "mma", "wgmma", "tcgen05", "shfl")
    grown = True
    while grown:
        grown = False
        for item in instructions:
            if not item.operands or item.op.startswith(_WITHOUT_RESULT):
                continue
            if item.op.startswith(loads) and not item.op.startswith("ld.param"):
                continue
            follows = _follows(item.operands[1:], origins)
            for register in _names(item.operands[0]):
                if follows - origins.get(register, frozenset()):
                    origins[register] = origins.get(register, frozenset()) | follows
                    grown = True
    return origins


def _contents(
    instructions: Collection[Instr], origins: Mapping[str, frozenset[str]], inputs: Collection[str], wholes: bool
) -> set[str]:
    """Registers whose values follow from the contents of the inputs.

    Loads from the inputs are the sources; unless ``wholes`` also halves from shared memory, fragments and results of
    MMAs. Registers of these are zeroed by moves that nvcc shares with loop counters, so with ``wholes``, which is for
    comparisons of integers, moves are not followed.
    """
    tainted: set[str] = set()
    grown = True
    while grown:
        grown = False
        for item in instructions:
            if not item.operands or item.op.startswith(_WITHOUT_RESULT) or (wholes and item.op.startswith("mov")):
                continue
            source = not item.op.startswith("cp.") and bool(_follows(_read(item), origins) & set(inputs))
            if not wholes:
                source |= item.op.startswith(("ldmatrix", "mma.", "wmma.")) or _HALF.match(item.op) is not None
            elif item.op.startswith(("mma.", "wmma.")):
                continue
            if source or tainted & {*_names(item.operands[1:])}:
                new = {*_names(item.operands[0])} - tainted
                tainted |= new
                grown |= bool(new)
    return tainted


def _follows(operand: object, origins: Mapping[str, frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*(origins.get(name, frozenset()) for name in _names(operand)))


def _faults(
    item: Instr, origins: Mapping[str, frozenset[str]], results: Collection[str], variables: Collection[str]
) -> Iterator[str]:
    opcode, operands = item.op, item.operands
    if _follows(_read(item), origins) & set(results):
        yield f"reads-output: {opcode} reads D, which a call must only write"
    for variable in sorted(_follows(_written(item), origins) & set(variables)):
        yield f"state-kept: {opcode} writes the device variable {variable}, which outlives a call"
    if opcode.startswith("st.") and (pointers := _follows(operands[1:], origins)):
        yield f"address-kept: {opcode} stores the address of {', '.join(sorted(pointers))}: pass it in a register"
    if opcode.startswith(("setp.", "set.", "slct.")):
        left, right = (_follows(operand, origins) for operand in operands[1:3])
        null_test = opcode.startswith(("setp.eq", "setp.ne")) and _NULL in operands[1:3]
        if left != right and not null_test:
            yield f"address-test: {opcode} compares the address of {', '.join(sorted(left | right))}, as no result may"
