"""Matrices in guarded memory: what a kernel reads or writes outside of them shows.

All matrices lie inside larger allocations, and their rows are longer than what is computed unless sizes are compiled
in: what lies around A and B is NaN, what lies around D must stay as it was, A and B too. D is poisoned before a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from cudal2gen.correctness import Comparison, compare, first_place, operands
from cudal2gen.element import Element
from cudal2gen.gpu import Empty, Operands, typed
from cudal2gen.kernel import Problem, Record
from cudal2gen.validator.problems import strides

if TYPE_CHECKING:
    import torch

GUARD = 4096  # elements before and after each matrix


class Guarded:
    """A matrix of ``rows`` by ``cols`` elements inside a larger allocation, filled with the bits of ``around``."""

    def __init__(
        self, empty: Empty, element: Element, name: str, rows: int, cols: int, stride: int, around: int
    ) -> None:
        import torch

        bits: torch.dtype = getattr(torch, element.bits)
        self.name, self._around = name, around
        whole = typed(empty, element.torch_dtype)(2 * GUARD + rows * stride)
        self._bits = whole.view(bits)
        self._bits.fill_(around)
        inside = whole[GUARD : GUARD + rows * stride].unflatten(0, (rows, stride))
        self.matrix = inside[:, :cols]
        self.bits = self.matrix.view(bits)
        self._between = inside[:, cols:].view(bits)
        self._bits_before: torch.Tensor | None = None

    def keep(self) -> None:
        """Remembers the matrix: from now on it must not change."""
        self._bits_before = self.bits.clone()

    def changes(self) -> Iterator[str]:
        """What was written that must not be."""
        if self._bits_before is not None and (places := _places(self.bits != self._bits_before)):
            yield f"input-changed: {places} of {self.name}"
        for where, bits in (
            (f"before {self.name}", self._bits[None, :GUARD]),
            (f"behind {self.name}", self._bits[None, -GUARD:]),
            (f"between rows of {self.name}", self._between),
        ):
            if places := _places(bits != self._around):
                yield f"written-outside: {places} {where}"


class Matrices:
    """A problem's guarded matrices: inputs are drawn into them, and the D of a run is compared."""

    def __init__(self, empty: Empty, record: Record, problem: Problem) -> None:
        m, n, k = problem.m, problem.n, problem.k
        stride, element, output = strides(record, n, k), record.element, record.output
        self._record, self._order = record, record.k_order(k)

        def guarded(name: str, rows: int, cols: int, ld: int) -> Guarded:
            return Guarded(empty, element, name, rows, cols, ld, element.nan)

        self.a, self.b = guarded("A", m, k, stride.a), guarded("B", n, k, stride.b_tn)
        self.b_nn = guarded("B", k, n, stride.b_nn)
        # What lies around D is a third pattern beside the poisons.
        self.d = Guarded(empty, output, "D", m, n, stride.d, output.canary)
        self.operands = Operands(self.a.matrix, self.b.matrix, self.b_nn.matrix, self.d.matrix)

    def draw(self, inputs: str, seed: int, poison: int) -> None:
        """Draws A and B of one kind of inputs, and poisons D, with one of the element's poisons."""
        import torch

        (m, k), n = self.a.matrix.shape, self.d.matrix.shape[1]
        generator = torch.Generator(self.a.matrix.device).manual_seed(seed)
        a, b = operands(inputs, m, n, k, generator, self._record.element)
        self.put(a, b, poison)

    def put(self, a: torch.Tensor, b: torch.Tensor, poison: int) -> None:
        """Copies A (m,k) and B (n,k) into place, and poisons D."""
        self.a.matrix.copy_(a)
        self.b.matrix.copy_(b)
        self.b_nn.matrix.copy_(b.T)
        self.d.bits.fill_(poison)
        for matrix in (self.a, self.b, self.b_nn):
            matrix.keep()

    def findings(self, poison: int) -> list[str]:
        """What a run did beside computing: changed inputs, writes outside of D, elements of D left unwritten."""
        findings = list(chain.from_iterable(matrix.changes() for matrix in (self.a, self.b, self.b_nn, self.d)))
        if places := _places(self.d.bits == poison):
            findings.append(f"unwritten-output: {places} of D")
        return findings

    def compare(self, inputs: str, d: torch.Tensor | None = None) -> Comparison:
        """D, or a copy of it, compared with the product."""
        d = self.d.matrix if d is None else d
        return compare(self._record.acc, inputs, self.a.matrix, self.b.matrix, d, self._order)


def _places(wrong: torch.Tensor) -> str:
    """How many elements, and the first; empty for none. ``wrong``: bool, two dimensions."""
    count = int(wrong.sum()) if wrong.numel() else 0
    if not count:
        return ""
    row, column = first_place(wrong)
    return f"{count} of {wrong.numel()} elements, first at row {row}, column {column}"
