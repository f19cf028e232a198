"""Makes mutants of a PTX text: versions with one mechanical mistake, which a checker of kernels must notice.

In a mutant, one wait, barrier, fence, commit, copy, access or predicate is dropped, weakened, shifted, swapped with its
neighbour, or negated. The registration of each instruction names the mutations that apply to it. A mutant is legal PTX
of the same kernel; the caller finds out whether it behaves differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernelproof.emulator.frontend.instructions import facts
from kernelproof.emulator.frontend.mutation_operators import ARITHMETIC, Source, Statement, change_guard
from kernelproof.emulator.frontend.parser import parse
from kernelproof.emulator.frontend.ptx import Function


@dataclass(frozen=True)
class Mutant:
    """A PTX text with one mistake. ``name``: the change, as ``kind opcode at line``. ``kind``: its first word.
    ``line``: the PTX line that was changed. ``text``: the complete text."""

    name: str
    kind: str
    line: int
    text: str


def mutants(text: str, kernel: str | None = None, *, arithmetic: bool = False) -> Iterator[Mutant]:
    """All mutants of a PTX text, of one kernel or (None) of all kernels, in the order of the text.

    ``arithmetic``: also yields mutants whose kind is in ``ARITHMETIC``: sums and products that lack an operand or have
    it twice, values read as another type, arguments larger by 8, CTA numbers that are always 0.

    Raises PtxError for text that is not PTX and KeyError for an unknown kernel.
    """
    module = parse(text)
    functions = list(module.kernels.values()) if kernel is None else [module.kernels[kernel]]
    source = Source(text)
    for function in functions:
        yield from (
            mutant for mutant in _function_mutants(function, source) if arithmetic or mutant.kind not in ARITHMETIC
        )


def _function_mutants(function: Function, source: Source) -> Iterator[Mutant]:
    """All mutants of a function."""
    for index in range(len(function.body)):
        statement = Statement.of(source, function.body, index)
        if statement is None:
            continue
        ins = statement.ins
        form = facts(ins)
        for mutation in (*(form.mutations if form is not None else ()), change_guard):
            for change in mutation(statement):
                name = f"{change.kind} {ins.op} at {ins.line}"
                yield Mutant(name, change.kind, ins.line, change.apply(source.text))
