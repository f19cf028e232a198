"""Searches a written kernel's PTX for cheats that an execution may not show, such as branches that only a GPU takes.

A cheating kernel may skip writing D if D already has the result, keep state in a device variable, distinguish machines
by addresses, or do less work for contents that no check uses. It is right whenever it is executed here, and fast when
it is timed. Therefore the review finds out which registers depend on which pointer, or on the contents of A and B, and
refuses such uses. It considers all instructions regardless of their order.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from kernelproof.emulator import Imm, Instr, Operand, PtxError, Reg, Sym, parse
from kernelproof.ground.errors import brief

_NOT_GLOBAL = re.compile(r"\.(?:param|shared|local|const)\b")  # state spaces other than global memory
_FLOAT = re.compile(r"\.(?:b?f(?:16|32|64)(?:x2)?|[bsu]16)$")  # comparisons of numbers, also as 16 bits
_HALF = re.compile(r"ld\.shared\b.*\.(?:b16|u16|f16|bf16)$")  # loads of one 16-bit number from shared memory
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
_NULL = Imm(0)  # a pointer may be compared with null


def findings(ptx: str, pointers: Collection[int], outputs: Collection[int], inputs: Collection[int]) -> list[str]:
    """The forbidden things that a kernel does, one line each; empty for an honest kernel.

    ``pointers``: the positions of the parameters that are buffers or tensor maps. ``outputs``: those of D among them.
    ``inputs``: those of the buffers A and B.
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
    floats, integers = (_content_registers(instructions, origins, read, for_integers) for for_integers in (False, True))
    lines: dict[str, None] = {}
    for instruction in instructions:
        lines |= dict.fromkeys(_faults(instruction, origins, results, set(variables)))
        compared = {*_names(instruction.operands[1:])} if instruction.op.startswith(("setp.", "set.")) else set()
        if compared & (floats if _FLOAT.search(instruction.op) else integers):
            lines[f"content-test: {instruction.op} compares values of the operands, on which no work may depend"] = None
    return list(lines)


def _read_address(item: Instr) -> Operand | None:
    """The operand with the address at which an instruction reads global memory; None if it does not read there."""
    if item.op.startswith(("ld.", "ldu.")) and not _NOT_GLOBAL.search(item.op):
        return item.operands[1]
    if item.op.startswith("atom."):
        return None if _NOT_GLOBAL.search(item.op) else item.operands[1]
    # A copy names its destination before its source: ".shared" before ".global" reads global memory.
    shared_at, global_at = item.op.find(".shared"), item.op.find(".global")
    return item.operands[1] if item.op.startswith("cp.") and -1 < shared_at < global_at else None


def _written_address(item: Instr) -> Operand | None:
    """The operand with the address at which an instruction writes global memory; None if it does not write there."""
    if item.op.startswith(("st.", "red.")):
        return None if _NOT_GLOBAL.search(item.op) else item.operands[0]
    return _read_address(item) if item.op.startswith("atom.") else None


def _names(operand: object) -> Iterator[str]:
    """The registers and symbols of an operand and of its parts."""
    if isinstance(operand, Reg | Sym):
        yield operand.name
    elif isinstance(operand, tuple):
        for part in operand:
            yield from _names(part)


def _origins(instructions: Collection[Instr], sources: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """For each register and symbol the pointers on which its value depends.

    Values from memory, tensor cores and other lanes count as depending on none: they are contents, not addresses.
    Dependencies are propagated through all instructions until nothing changes, so their order does not matter.
    """
    origins = {name: frozenset((source,)) for name, source in sources.items()}
    content_ops = ("ld", "atom", "mma", "wgmma", "tcgen05", "shfl")
    grown = True
    while grown:
        grown = False
        for item in instructions:
            if not item.operands or item.op.startswith(_WITHOUT_RESULT):
                continue
            if item.op.startswith(content_ops) and not item.op.startswith("ld.param"):
                continue
            pointers = _pointers(item.operands[1:], origins)
            for register in _names(item.operands[0]):
                if pointers - origins.get(register, frozenset()):
                    origins[register] = origins.get(register, frozenset()) | pointers
                    grown = True
    return origins


def _content_registers(
    instructions: Collection[Instr], origins: Mapping[str, frozenset[str]], inputs: Collection[str], for_integers: bool
) -> set[str]:
    """Registers whose values depend on the contents of the inputs.

    The sources are loads from the inputs, and for comparisons of floating-point numbers also 16-bit values from shared
    memory, fragments, and results of MMAs. ``for_integers`` is for comparisons of integers: then moves are ignored,
    because nvcc zeroes accumulators and loop counters by the same moves.
    """
    tainted: set[str] = set()
    grown = True
    while grown:
        grown = False
        for item in instructions:
            if not item.operands or item.op.startswith(_WITHOUT_RESULT):
                continue
            if for_integers and item.op.startswith(("mov", "mma.", "wmma.")):
                continue
            is_source = not item.op.startswith("cp.") and bool(_pointers(_read_address(item), origins) & set(inputs))
            if not for_integers:
                is_source |= item.op.startswith(("ldmatrix", "mma.", "wmma.")) or _HALF.match(item.op) is not None
            if is_source or tainted & {*_names(item.operands[1:])}:
                new = {*_names(item.operands[0])} - tainted
                tainted |= new
                grown |= bool(new)
    return tainted


def _pointers(operand: object, origins: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The pointers on which the registers of an operand depend."""
    return frozenset().union(*(origins.get(name, frozenset()) for name in _names(operand)))


def _faults(
    item: Instr, origins: Mapping[str, frozenset[str]], results: Collection[str], variables: Collection[str]
) -> Iterator[str]:
    """The findings on one instruction, except comparisons of contents."""
    opcode, operands = item.op, item.operands
    if _pointers(_read_address(item), origins) & set(results):
        yield f"reads-output: {opcode} reads D, which a call must only write"
    for variable in sorted(_pointers(_written_address(item), origins) & set(variables)):
        yield f"state-kept: {opcode} writes the device variable {variable}, which outlives a call"
    if opcode.startswith("st.") and (pointers := _pointers(operands[1:], origins)):
        yield f"address-kept: {opcode} stores the address of {', '.join(sorted(pointers))}: pass it in a register"
    if opcode.startswith(("setp.", "set.", "slct.")):
        left, right = (_pointers(operand, origins) for operand in operands[1:3])
        null_test = opcode.startswith(("setp.eq", "setp.ne")) and _NULL in operands[1:3]
        if left != right and not null_test:
            yield f"address-test: {opcode} compares the address of {', '.join(sorted(left | right))}, as no result may"
