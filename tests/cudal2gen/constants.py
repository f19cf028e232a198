"""Makes PTX texts that differ in one constant: of an address, a swizzle, a stage, a comparison or an argument."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kernelproof.emulator import Mutant

# Instructions with an immediate operand that compute addresses, stages and predicates; the last number is the
# immediate.
_COMPUTES = re.compile(r"\s*(add|sub|mul|mad|and|or|xor|shl|shr|bfi|setp|selp|mov)\.\S+\s.*?(?<![\w.])(-?\d+);$")
# Accesses whose address has an immediate.
_ADDRESSES = re.compile(r"\s*(?:@\S+\s+)?(?:ld|st|ldmatrix|cp)\.(?!param)\S+\s.*\[[%\w]+(\+\d+)?\]")


def changed_constants(ptx: str) -> Iterator[Mutant]:
    """One text for each constant, which is replaced by another one of its kind: even numbers remain even."""
    lines = ptx.splitlines()
    for number, line in enumerate(lines, 1):
        if match := _COMPUTES.match(line):
            kind, value = match[1], int(match[2])
            other = value + (1 if kind in ("shl", "shr", "bfi", "setp", "selp", "mov") else max(16, value & -value))
            if kind == "mov" and not re.match(r"\s*mov\.[bu]32\s+%r\d+, -?\d+;$", line):
                continue
            changed = f"{line[: match.start(2)]}{other}{line[match.end(2) :]}"
        elif (match := _ADDRESSES.match(line)) and match[1]:
            kind = "offset"
            changed = f"{line[: match.start(1)]}+{int(match[1]) + 16}{line[match.end(1) :]}"
        else:
            continue
        text = "\n".join([*lines[: number - 1], changed, *lines[number:]]) + "\n"
        yield Mutant(f"constant {kind} at {number}", f"constant {kind}", number, text)
