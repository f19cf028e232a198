"""A written kernel's PTX, read for what no execution need show: branches that only a GPU takes, or large sizes.

A kernel that leaves D alone where it holds the result, that keeps something in a device variable, or that tells
machines apart by addresses is right wherever it is executed here, and fast where it is timed. So these are read: which
registers follow from which pointer, over all instructions, in whatever order they run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from cudal2gen.errors import brief

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|^\s*\.(?:loc|file)\b[^\n]*", re.S | re.M)
_DECLARATION = re.compile(r"(?:\.(?:reg|local|shared|pragma|branchtargets|callprototype)\b.*)?", re.S)
_BODY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)[^{;]*\{(.*)\}", re.S)
_VARIABLE = re.compile(r"^\s*(?:\.\w+\s+)*\.global\b[^;=]*?([\w$]+)(?:\[[^;=]*\])?\s*(?:=|;)", re.M)
_STATEMENT = re.compile(r"(?:@!?%?\w+\s+)?([a-z][\w.:]*)(?:\s+(.*))?", re.S)
_NAME = re.compile(r"[%$\w]+")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_ELSEWHERE = re.compile(r"\.(?:param|shared|local|const)\b")
# Instructions without a destination: what follows their name are sources.
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


class Instruction(NamedTuple):
    """An opcode with its operands."""

    opcode: str
    operands: list[str]

    @property
    def has_result(self) -> bool:
        return not self.opcode.startswith(_WITHOUT_RESULT)

    @property
    def read(self) -> str:
        """The operand by which it reads global memory; empty where it does not."""
        if self.opcode.startswith(("ld.", "ldu.")) and not _ELSEWHERE.search(self.opcode):
            return self.operands[-1] if len(self.operands) < 3 else self.operands[1]
        if self.opcode.startswith("atom."):
            return "" if _ELSEWHERE.search(self.opcode) else self.operands[1]
        shared, far = self.opcode.find(".shared"), self.opcode.find(".global")
        return self.operands[1] if self.opcode.startswith("cp.") and -1 < shared < far else ""

    @property
    def written(self) -> str:
        """The operand by which it writes global memory; empty where it does not."""
        if self.opcode.startswith(("st.", "red.")):
            return "" if _ELSEWHERE.search(self.opcode) else self.operands[0]
        return self.read if self.opcode.startswith("atom.") else ""


def findings(ptx: str, pointers: Collection[int], outputs: Collection[int]) -> list[str]:
    """What a kernel must not do, a line each. ``pointers``: positions of parameters that are buffers or tensor maps,
    ``outputs``: those of D among them."""
    text = _COMMENT.sub("", ptx)
    entry = _BODY.search(text)
    if entry is None:
        return ["its PTX has no kernel"]
    name, _, body = entry.groups()
    sources = {f"{name}_param_{position}": f"parameter {position}" for position in pointers}
    variables = {variable: variable for variable in _VARIABLE.findall(text[: entry.start()])}
    instructions = list(_instructions(body))
    origins = _origins(instructions, sources | variables)
    results = {f"parameter {position}" for position in outputs}
    lines: dict[str, None] = {}
    for instruction in instructions:
        lines |= dict.fromkeys(_faults(instruction, origins, results, set(variables)))
    return list(lines)


def _instructions(body: str) -> Iterator[Instruction]:
    for part in re.sub(r"[$\w]+:(?!:)", ";", body).split(";"):
        statement = re.sub(r"^[{}\s]+", "", part).strip()
        if (match := _STATEMENT.fullmatch(statement)) is not None:
            yield Instruction(match[1], _operands(match[2] or ""))
        elif not _DECLARATION.fullmatch(statement):
            yield Instruction("", [statement])


def _operands(text: str) -> list[str]:
    """Operands at commas that stand in no brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "[{(") - (char in ")}]")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _origins(instructions: Collection[Instruction], sources: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """By register and name: the pointers that its value follows from. A value that is loaded follows from none."""
    origins = {name: frozenset((source,)) for name, source in sources.items()}
    grown = True
    while grown:
        grown = False
        for opcode, operands in ((item.opcode, item.operands) for item in instructions if item.has_result):
            if opcode.startswith(("ld", "atom", "mma", "wgmma", "tcgen05", "shfl")) and not opcode.startswith(
                "ld.param"
            ):
                continue
            follows = _follows(" ".join(operands[1:]), origins)
            for register in _NAME.findall(operands[0]):
                if follows - origins.get(register, frozenset()):
                    origins[register] = origins.get(register, frozenset()) | follows
                    grown = True
    return origins


def _follows(operand: str, origins: Mapping[str, frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*(origins.get(name, frozenset()) for name in _NAME.findall(operand)))


def _faults(
    instruction: Instruction,
    origins: Mapping[str, frozenset[str]],
    results: Collection[str],
    variables: Collection[str],
) -> Iterator[str]:
    opcode, operands = instruction
    if not opcode:
        yield f"not read: the statement {brief(operands[0], 80)!r}: write it as nvcc does"
    if _follows(instruction.read, origins) & set(results):
        yield f"reads-output: {opcode} reads D, which a call must only write"
    for variable in sorted(_follows(instruction.written, origins) & set(variables)):
        yield f"state-kept: {opcode} writes the device variable {variable}, which outlives a call"
    if opcode.startswith("st.") and (kept := _follows(" ".join(operands[1:]), origins)):
        yield f"address-kept: {opcode} stores the address of {', '.join(sorted(kept))}: pass it in a register"
    if opcode.startswith(("setp.", "set.", "slct.")):
        left, right = (_follows(operand, origins) for operand in operands[1:3])
        null_test = opcode.startswith(("setp.eq", "setp.ne")) and "0" in operands[1:3]
        if left != right and not null_test:
            yield f"address-test: {opcode} compares the address of {', '.join(sorted(left | right))}, as no result may"
