"""Matrices in guarded memory: what a kernel reads or writes outside of them shows.

All matrices lie inside larger allocations, and their rows are longer than what is computed unless sizes are compiled
in: what lies around A, B, bias and C is NaN, what lies around D must stay as it was, the inputs too. Products of a
batch lie one behind the other, with room between them. D is poisoned before a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from cudal2gen import fused
from cudal2gen.correctness import Comparison, compare, first_place, operands
from cudal2gen.element import Element
from cudal2gen.kernel import Problem, Record, aligned
from cudal2gen.kernel.fusion import ALPHA, BETA
from cudal2gen.operands import Empty, Operands, typed
from cudal2gen.validator.problems import PADDING, strides

if TYPE_CHECKING:
    import torch

GUARD = 4096  # elements before and after each matrix


class Guarded:
    """A matrix of ``rows`` by ``cols`` elements inside a larger allocation, filled with the bits of ``around``.

    ``count``: so many of them, of three dimensions, with ``gap`` elements from the end of one to the next; None for one
    of two dimensions.
    """

    def __init__(
        self,
        empty: Empty,
        element: Element,
        name: str,
        rows: int,
        cols: int,
        stride: int,
        around: int,
        count: int | None = None,
        gap: int = 0,
    ) -> None:
        import torch

        bits: torch.dtype = getattr(torch, element.bits)
        self.name, self._around = name, around
        step, number = rows * stride + gap, count or 1
        whole = typed(empty, element.torch_dtype)(2 * GUARD + number * step)
        self._bits = whole.view(bits)
        self._bits.fill_(around)
        products = whole[GUARD : GUARD + number * step].unflatten(0, (number, step))
        inside = products[:, : rows * stride].unflatten(1, (rows, stride))
        matrices = inside[:, :, :cols]
        self.matrix = matrices if count is not None else matrices[0]
        self.bits = self.matrix.view(bits)
        between = inside[:, :, cols:].view(bits)  # no copy: what is written there must show
        self._between = between if count is not None else between[0]
        self._behind_products = products[:, rows * stride :].view(bits)
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
            (f"between products of {self.name}", self._behind_products),
        ):
            if places := _places(bits != self._around):
                yield f"written-outside: {places} {where}"


class Matrices:
    """A problem's guarded matrices: inputs are drawn into them, and the D of a run is compared.

    ``count``: products of a batch; ``shared_b``: all of one B.
    """

    def __init__(self, empty: Empty, record: Record, problem: Problem, count: int = 1, shared_b: bool = False) -> None:
        m, n, k = problem.m, problem.n, problem.k
        stride, element, output, fusion = strides(record, n, k), record.element, record.output, record.fusion
        self._record, self._order, self._count = record, record.k_order(k), count
        several = count if record.batched else None
        several_b = None if several is None else 1 if shared_b else several

        def guarded(name: str, rows: int, cols: int, ld: int, number: int | None = several, gaps: int = 1) -> Guarded:
            gap = 0 if number is None else gaps * PADDING
            return Guarded(empty, element, name, rows, cols, ld, element.nan, number, gap)

        self.a, self.b = guarded("A", m, k, stride.a), guarded("B", n, k, stride.b_tn, several_b, 2)
        self.b_nn = guarded("B", k, n, stride.b_nn, several_b, 2)
        # What lies around D is a third pattern beside the poisons.
        gap_d = 0 if several is None else 3 * (PADDING if record.launch.stores_vectors else 1)
        self.d = Guarded(empty, output, "D", m, problem.d_cols, stride.d, output.canary, several, gap_d)
        self._read = {"A": self.a, "B": self.b, "B as (k,n)": self.b_nn}
        self.operands = Operands(self.a.matrix, *self._expanded(), self.d.matrix)
        if fusion.bias != "none":
            extent = n if fusion.bias == "n" else m
            bias = guarded("bias", 1, extent, aligned(extent), None)
            self._read["bias"], self.operands = bias, replace(self.operands, bias=bias.matrix[0])
        if fusion.residual:
            c = Guarded(empty, output, "C", m, problem.d_cols, stride.d, output.nan)
            self._read["C"], self.operands = c, replace(self.operands, c=c.matrix)
        self.operands = replace(
            self.operands, alpha=ALPHA if fusion.scale else 1.0, beta=BETA if fusion.residual else 1.0
        )

    def _expanded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """B in both layouts, one for each product."""
        b, b_nn = self.b.matrix, self.b_nn.matrix
        if not self._record.batched:
            return b, b_nn
        return b.expand(self._count, -1, -1), b_nn.expand(self._count, -1, -1)

    def draw(self, inputs: str, seed: int, poison: int) -> None:
        """Draws A and B of one kind of inputs, with bias and C of a fused product, and poisons D, with one of the
        element's poisons."""
        import torch

        record = self._record
        (m, k), n = self.a.matrix.shape[-2:], self.b.matrix.shape[-2]
        generator = torch.Generator(self.a.matrix.device).manual_seed(seed)
        pairs = [operands(inputs, m, n, k, generator, record.element) for _ in range(self._count)]
        read = fused.draw(record.fusion, inputs, m, n, generator, record.element, record.output)
        if not record.batched:
            (a, b), *_ = pairs
            self.put(a, b, poison, read.bias, read.c)
            return
        several_b = pairs[:1] if self.b.matrix.shape[0] == 1 else pairs
        self.put(torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in several_b]), poison)

    def put(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        poison: int,
        bias: torch.Tensor | None = None,
        c: torch.Tensor | None = None,
    ) -> None:
        """Copies A (m,k) and B (n,k), of a batch (products,m,k) and so on, into place, and bias and C of a fused
        product; poisons D."""
        self.a.matrix.copy_(a)
        self.b.matrix.copy_(b)
        self.b_nn.matrix.copy_(b.transpose(-2, -1))
        for own, values in ((self.operands.bias, bias), (self.operands.c, c)):
            if own is not None and values is not None:
                own.copy_(values)
        self.d.bits.fill_(poison)
        for matrix in self._read.values():
            matrix.keep()

    def findings(self, poison: int) -> list[str]:
        """What a run did beside computing: changed inputs, writes outside of D, elements of D left unwritten."""
        findings = list(chain.from_iterable(matrix.changes() for matrix in (*self._read.values(), self.d)))
        if places := _places(self.d.bits == poison):
            findings.append(f"unwritten-output: {places} of D")
        return findings

    def compare(self, inputs: str, d: torch.Tensor | None = None) -> Comparison:
        """D, or a copy of it, compared with the product; of a batch the worst product, whose number it names."""
        own, d = self.operands, self.d.matrix if d is None else d
        record = self._record
        if record.fusion:
            read = fused.FusedOperands(own.bias, own.c, own.alpha, own.beta)
            return fused.compare(record.acc, record.fusion, inputs, own.a, own.b, read, d, self._order, record.output)
        if not record.batched:
            return compare(record.acc, inputs, own.a, own.b, d, self._order)
        comparisons = [
            compare(record.acc, inputs, *product, self._order) for product in zip(own.a, own.b, d, strict=True)
        ]
        number, worst = max(enumerate(comparisons), key=lambda pair: (pair[1].wrong, pair[1].max_error))
        return replace(worst, first=f"product {number}, {worst.first}") if worst.wrong else worst


def _places(wrong: torch.Tensor) -> str:
    """How many elements, and the first; empty for none. ``wrong``: bool, two dimensions, or three of products."""
    count = int(wrong.sum()) if wrong.numel() else 0
    if not count:
        return ""
    row, column = first_place(wrong.reshape(-1, wrong.shape[-1]))
    product, row = divmod(row, wrong.shape[-2])
    of_product = f"product {product}, " if wrong.ndim == 3 else ""
    return f"{count} of {wrong.numel()} elements, first at {of_product}row {row}, column {column}"
