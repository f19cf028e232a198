"""Stores matrices in guarded memory, which reveals accesses outside of them.

Every matrix lies inside a larger allocation, and its rows are longer than needed unless sizes are compiled in. The
elements around A, B, bias and C are NaN. The elements around D and aux, and all inputs, must not change. The products
of a batch lie one after the other, with space between them. D and aux are poisoned before a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from cudal2gen.kernel import Problem, Record, aligned
from cudal2gen.kernel.fusion import ALPHA, BETA
from cudal2gen.kernel.launch import Sizes
from cudal2gen.launch.operands import Empty, Operands, typed
from cudal2gen.validator import fused
from cudal2gen.validator.correctness import Comparison, compare, first_place, operands
from cudal2gen.validator.problems import strides
from kernelproof.ground.element import Element

if TYPE_CHECKING:
    import torch

GUARD = 4096  # guard elements before and after each matrix


class GuardedMatrix:
    """A matrix of ``rows`` by ``cols`` elements inside a larger allocation, in which each element has the bits
    ``guard_bits`` at first.

    ``stride``: elements from one row to the next. ``count``: how many such matrices there are, as a tensor of three
    dimensions, with ``gap`` elements between them; None for one matrix of two dimensions.
    """

    def __init__(
        self,
        empty: Empty,
        element: Element,
        name: str,
        rows: int,
        cols: int,
        stride: int,
        guard_bits: int,
        *,
        count: int | None = None,
        gap: int = 0,
    ) -> None:
        import torch

        bits: torch.dtype = getattr(torch, element.bits)
        self.name, self._guard_bits = name, guard_bits
        # GUARD elements, the products one after the other, GUARD elements. Each product has ``rows`` rows of ``stride``
        # elements, the first ``cols`` of which belong to the matrix, and then ``gap`` elements.
        step, number = rows * stride + gap, count or 1
        memory = typed(empty, element.torch_dtype)(2 * GUARD + number * step)
        self._bits = memory.view(bits)
        self._bits.fill_(guard_bits)
        products = memory[GUARD : GUARD + number * step].unflatten(0, (number, step))
        inside = products[:, : rows * stride].unflatten(1, (rows, stride))
        matrices = inside[:, :, :cols]
        self.matrix = matrices if count is not None else matrices[0]
        self.bits = self.matrix.view(bits)
        between = inside[:, :, cols:].view(bits)  # a view, so that writes are seen
        self._between = between if count is not None else between[0]
        self._between_products = products[:, rows * stride :].view(bits)
        self._bits_before: torch.Tensor | None = None

    def keep(self) -> None:
        """Remembers the content, which must not change afterwards."""
        self._bits_before = self.bits.clone()

    def changes(self) -> Iterator[str]:
        """Descriptions of forbidden writes."""
        if self._bits_before is not None and (places := _places(self.bits != self._bits_before)):
            yield f"input-changed: {places} of {self.name}"
        for place, bits in (
            (f"before {self.name}", self._bits[None, :GUARD]),
            (f"after {self.name}", self._bits[None, -GUARD:]),
            (f"between rows of {self.name}", self._between),
            (f"between products of {self.name}", self._between_products),
        ):
            if places := _places(bits != self._guard_bits):
                yield f"written-outside: {places} {place}"


class _Part(NamedTuple):
    """One product of a launch: its number, and its part of each matrix and of the bias."""

    number: int
    a: torch.Tensor
    b: torch.Tensor
    d: torch.Tensor
    bias: torch.Tensor | None
    c: torch.Tensor | None
    aux: torch.Tensor | None = None


class Matrices:
    """The guarded matrices of a problem. Inputs are drawn into them, and the outputs of a run, D and aux, are compared.

    ``count``: the products of a strided batch; ``shared_b``: they share one B. ``groups``: for a grouped batch the rows
    of each group, from the first row on. Rows of D after the last group must not change.
    """

    def __init__(
        self,
        empty: Empty,
        record: Record,
        problem: Problem,
        count: int = 1,
        shared_b: bool = False,
        groups: tuple[int, ...] = (),
    ) -> None:
        m, n, k = problem.m, problem.n, problem.k
        stride, along, fusion = strides(record, Sizes(m, n, k)), record.along_k, record.fusion
        element, output, vector = record.element, record.output, record.element.vector
        self._groups = groups or ((m,) if record.grouped else ())
        self._record, self._order, self._count = record, record.k_order(k), len(self._groups) or count
        # How many B there are, and how many A, C and D; None for a matrix without a dimension of products.
        count_b = None if not record.batched else 1 if shared_b else self._count
        count_d = None if record.grouped else self._count if record.batched else None

        def guarded_input(
            name: str, rows: int, cols: int, ld: int, number: int | None = count_d, gaps: int = 1
        ) -> GuardedMatrix:
            gap = 0 if number is None else gaps * vector
            return GuardedMatrix(empty, element, name, rows, cols, ld, element.nan, count=number, gap=gap)

        stored_a = guarded_input("A", *((m, k) if along.a else (k, m)), stride.a)
        stored_b = guarded_input("B", *((n, k) if along.b else (k, n)), stride.b, count_b, 2)
        # Views of the stored matrices as A (m,k) and B (n,k), or with products as the first dimension.
        self._a = stored_a.matrix if along.a else stored_a.matrix.mT
        self._b = stored_b.matrix if along.b else stored_b.matrix.mT
        # The pattern around D differs from both poisons.
        gap_d = 0 if count_d is None else 3 * (vector if record.launch.stores_vectors else 1)
        self.d = GuardedMatrix(empty, output, "D", m, problem.d_cols, stride.d, output.canary, count=count_d, gap=gap_d)
        self._inputs = {"A": stored_a, "B": stored_b}
        more: dict[str, torch.Tensor | float] = {}
        if fusion.bias != "none":
            extent = n if fusion.bias == "n" else m
            is_batched = record.batched and not (record.grouped and fusion.bias == "m")
            bias = guarded_input(
                "bias",
                self._count if is_batched else 1,
                extent,
                aligned(extent, vector) + (vector if is_batched else 0),
                None,
            )
            self._inputs["bias"], more["bias"] = bias, bias.matrix if is_batched else bias.matrix[0]
        if fusion.residual:
            c = GuardedMatrix(empty, output, "C", m, problem.d_cols, stride.d, output.nan, count=count_d, gap=gap_d)
            self._inputs["C"], more["c"] = c, c.matrix
        more |= ({"alpha": ALPHA} if fusion.scale else {}) | ({"beta": BETA} if fusion.residual else {})
        self._outputs = [self.d]
        if fusion.aux:  # aux exists for a single product only
            aux = GuardedMatrix(empty, output, "aux", m, n, aligned(n, vector) + vector, output.canary)
            more["aux"] = aux.matrix
            self._outputs.append(aux)
        if self._groups:
            more["ends"] = _ends(empty, self._groups)
        b = self._b.expand(self._count, -1, -1) if record.batched else self._b
        self.operands = Operands(self._a, b, b.mT, self.d.matrix, **more)

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        """The outputs of a run: D, and aux if the fusion has it."""
        return tuple(matrix.matrix for matrix in self._outputs)

    def _parts(self, d: torch.Tensor, aux: torch.Tensor | None = None) -> list[_Part]:
        """The products that have at least one row. ``d`` and ``aux``: the outputs of a run, or copies of them."""
        operands, record = self.operands, self._record
        if not record.batched:
            return [_Part(0, operands.a, operands.b, d, operands.bias, operands.c, aux)]
        bias = operands.bias
        if not self._groups:
            return [
                _Part(
                    i,
                    operands.a[i],
                    operands.b[i],
                    d[i],
                    None if bias is None else bias[i],
                    None if operands.c is None else operands.c[i],
                )
                for i in range(self._count)
            ]
        parts, start = [], 0
        for i, size in enumerate(self._groups):
            rows = slice(start, start := start + size)
            group_bias = None if bias is None else bias[i] if record.fusion.bias == "n" else bias[rows]
            parts.append(
                _Part(
                    i,
                    operands.a[rows],
                    operands.b[i],
                    d[rows],
                    group_bias,
                    None if operands.c is None else operands.c[rows],
                )
            )
        return [part for part in parts if part.d.shape[0]]

    def draw(self, inputs: str, seed: int, poison: int) -> None:
        """Draws A and B of one kind of inputs, and bias and C of a fused product. Fills D and aux with one of the
        element's poisons."""
        record = self._record
        n, k = self._b.shape[-2:]
        generator = self._generator(seed)
        # Rows after the last group stay NaN.
        self._a.fill_(float("nan"))
        for number, part in enumerate(self._parts(self.d.matrix)):
            rows = part.a.shape[0]
            a, b = operands(inputs, rows, n, k, generator, record.element)
            fused_operands = fused.draw(record.fusion, inputs, rows, n, generator, record.element, record.output, k=k)
            part.a.copy_(a)
            # A shared B is drawn once, for the first product.
            if number == 0 or self._b.ndim == 2 or self._b.shape[0] > 1:
                part.b.copy_(b)
            for target, values in ((part.bias, fused_operands.bias), (part.c, fused_operands.c)):
                if target is not None and values is not None:
                    target.copy_(values)
        self._prepare(poison)

    def _generator(self, seed: int) -> torch.Generator:
        """A generator of random numbers on the device of A."""
        import torch

        return torch.Generator(self._a.device).manual_seed(seed)

    def put(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        poison: int,
        bias: torch.Tensor | None = None,
        c: torch.Tensor | None = None,
    ) -> None:
        """Copies A (m,k), B (n,k), and bias and C of a fused product into place, and poisons D and aux. For a batch the
        shapes are (products,m,k) and so on."""
        self._a.copy_(a)
        self._b.copy_(b)
        for target, values in ((self.operands.bias, bias), (self.operands.c, c)):
            if target is not None and values is not None:
                target.copy_(values)
        self._prepare(poison)

    def _prepare(self, poison: int) -> None:
        """Poisons D and aux before a run, and remembers the inputs, which the run must not change."""
        for matrix in self._outputs:
            matrix.bits.fill_(poison)
        for matrix in self._inputs.values():
            matrix.keep()

    def findings(self, poison: int) -> list[str]:
        """Faults of a run other than wrong values: changed inputs, writes outside of D and aux, and elements of these
        that were not written."""
        findings = list(chain.from_iterable(matrix.changes() for matrix in (*self._inputs.values(), *self._outputs)))
        after = self.d.bits[sum(self._groups) :] if self._groups else self.d.bits[:0]
        if places := _places(after != poison):
            findings.append(f"written-outside: {places} after the last group of D")
        for matrix, bits in zip(self._outputs, self.computed_bits, strict=True):
            if places := _places(bits == poison):
                findings.append(f"unwritten-output: {places} of {matrix.name}")
        return findings

    @property
    def computed_bits(self) -> tuple[torch.Tensor, ...]:
        """The bits of a run's outputs, without rows after the last group."""
        rows = slice(sum(self._groups)) if self._groups else slice(None)
        return tuple(matrix.bits[rows] for matrix in self._outputs)

    def holds(self, bits: Sequence[torch.Tensor]) -> bool:
        """Whether the outputs of the run have these bits."""
        return all(
            bool((current == expected).all()) for current, expected in zip(self.computed_bits, bits, strict=True)
        )

    def compare(self, inputs: str, stored: Sequence[torch.Tensor] | None = None) -> Comparison:
        """Compares the outputs of a run, or copies of them, with the product. For a batch the worst product is
        returned, with its number."""
        parts = self._parts(*(self.stored if stored is None else stored))
        if not parts:
            return Comparison("nothing", 0)
        comparisons = [self._compare_part(inputs, part) for part in parts]
        part, worst = max(zip(parts, comparisons, strict=True), key=lambda pair: (pair[1].wrong, pair[1].max_error))
        numbered = worst.wrong and self._record.batched
        return replace(worst, first=f"product {part.number}, {worst.first}") if numbered else worst

    def _compare_part(self, inputs: str, part: _Part) -> Comparison:
        """Compares one product. ``inputs``: their kind."""
        record = self._record
        _, a, b, d, bias, c, aux = part
        if not record.fusion:
            return compare(record.acc, inputs, a, b, d, self._order)
        fused_operands = fused.FusedOperands(bias, c, self.operands.alpha, self.operands.beta)
        product = fused.FusedProduct(
            record.acc, record.fusion, inputs, a, b, fused_operands, self._order, record.output
        )
        return product.compare_stored(d, aux)


def _ends(empty: Empty, groups: tuple[int, ...]) -> torch.Tensor:
    """The row after each group's last one, in the device's memory."""
    import torch

    ends = empty(2 * len(groups)).view(torch.int32)
    return ends.copy_(torch.tensor(groups).cumsum(0))


def _places(wrong: torch.Tensor) -> str:
    """Describes how many elements are wrong, and where the first one is; empty for none.

    ``wrong``: bool, with two dimensions, or three if the first counts products.
    """
    count = int(wrong.sum()) if wrong.numel() else 0
    if not count:
        return ""
    row, column = first_place(wrong.reshape(-1, wrong.shape[-1]))
    product, row = divmod(row, wrong.shape[-2])
    of_product = f"product {product}, " if wrong.ndim == 3 else ""
    return f"{count} of {wrong.numel()} elements, first at {of_product}row {row}, column {column}"
