"""Joins mma.sync instructions of a block into larger products.

A warp tile is computed by consecutive instructions that multiply each fragment of A by each fragment of B. If they are
executed one by one, each needs a NumPy call. Joined into a grid, all of them need one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kernelproof.emulator.machine.tensor import Grid, Shape


class ProductLine(NamedTuple):
    """An mma.sync in the Python text of a block. ``line``: its index in the block's lines. ``shape_name``: the name of
    its shape in the text. ``a`` to ``d``: the text of each register of an operand. ``reads``, ``writes``: names of
    registers."""

    line: int
    shape: Shape
    shape_name: str
    a: tuple[str, ...]
    b: tuple[str, ...]
    c: tuple[str, ...]
    d: tuple[str, ...]
    reads: frozenset[str]
    writes: frozenset[str]
    site: int

    @property
    def text(self) -> str:
        """The line of text that computes this product alone."""
        operands = ", ".join(map(_tuple, (self.a, self.b, self.c)))
        return f"{', '.join(self.d)} = T.mma({self.shape_name}, {operands}, m, {self.site})"


def _tuple(texts: tuple[str, ...]) -> str:
    """The text of a tuple of these expressions."""
    return f"({', '.join(texts)},)"


def join_products(lines: list[str], products: list[ProductLine], bind: Callable[[str, object], str]) -> list[str]:
    """The lines of a block with each grid of products as one line. ``bind`` makes an object visible to the text."""
    out, next_line = [], 0
    for run in _runs(products):
        out += lines[next_line : run[0].line]
        next_line = run[-1].line + 1
        while run:
            count = _largest_grid(run)
            out.append(run[0].text if count == 1 else _grid_line(run[:count], bind))
            run = run[count:]
    return out + lines[next_line:]


def _runs(products: list[ProductLine]) -> Iterator[list[ProductLine]]:
    """Split products into runs that may be computed together: products of a run have the same shape and consecutive
    lines, and none reads or writes a register that an earlier one writes."""
    run: list[ProductLine] = []
    written: frozenset[str] = frozenset()
    for product in products:
        if run and (
            product.line != run[-1].line + 1
            or product.shape is not run[0].shape
            or written & (product.reads | product.writes)
        ):
            yield run
            run, written = [], frozenset()
        run.append(product)
        written |= product.writes
    if run:
        yield run


def _largest_grid(run: list[ProductLine]) -> int:
    """The length of the longest prefix of a run that is a grid: it multiplies each of its A by each of its B once."""
    # A prefix is a grid if its pairs (A, B) all differ, and their number is the number of A times that of B. A repeated
    # pair ends the search, because every longer prefix contains it.
    lefts, rights, pairs, largest = set(), set(), set(), 1
    for count, product in enumerate(run, 1):
        lefts.add(product.a)
        rights.add(product.b)
        pairs.add((product.a, product.b))
        if len(pairs) < count:
            break
        if len(lefts) * len(rights) == count:
            largest = count
    return largest


def _grid_line(run: list[ProductLine], bind: Callable[[str, object], str]) -> str:
    """The line of text that computes a grid. ``cells`` of the grid: per product, the numbers of its A and B among the
    different A and B of the run."""
    lefts, rights = list(dict.fromkeys(p.a for p in run)), list(dict.fromkeys(p.b for p in run))
    cells = tuple((lefts.index(p.a), rights.index(p.b)) for p in run)
    grid = bind("grid", Grid(run[0].shape, len(lefts), len(rights), cells, tuple(p.site for p in run)))
    operands = [sum(lefts, ()), sum(rights, ()), sum((p.c for p in run), ())]
    targets = ", ".join(name for p in run for name in p.d)
    return f"{targets} = T.grid({grid}, {', '.join(map(_tuple, operands))}, m)"
