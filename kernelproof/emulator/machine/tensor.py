"""Evaluates mma.sync: products are collected, and evaluated together when an accumulator is read.

Rounding follows a model that was not calibrated on hardware. An option selects others, see
``arithmetic.tensor_rounding``. In the model, operands are exact in fp32. The products of one instruction along k are
summed in fp32 and added to the accumulator, and an f16 accumulator is rounded once per instruction. Integer-valued data
within the range of the accumulator is exact. NaN and infinity propagate as IEEE 754 demands.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from kernelproof.emulator.arithmetic.operands import halves, split_halves
from kernelproof.emulator.arithmetic.tensor_rounding import ROUNDED_KINDS, TensorRounding, add_products
from kernelproof.emulator.state.arrays import MOVER, Array

# Collected products of PENDING_LANES lanes are evaluated when a product follows that depends on them, since their
# operands are still in the cache then. At MAX_PENDING_LANES they are evaluated in any case, which bounds memory.
PENDING_LANES, MAX_PENDING_LANES = 1 << 18, 1 << 20


# The registers of an operand, raw bits (uint32 per lane); and the identities of those arrays.
Fragment = tuple[Array, ...]
Identity = tuple[int, ...]


class Shape:
    """A kind of mma.sync: ``k`` elements deep, ``per_register`` elements of type ``kind`` in a 32-bit register,
    accumulators of type ``acc``."""

    __slots__ = ("acc", "k", "kind", "name", "per_register", "signed_a", "signed_b")

    def __init__(self, name: str, k: int, kind: str, acc: str, signed_a: bool = True, signed_b: bool = True) -> None:
        self.name, self.k, self.kind, self.acc = name, k, kind, acc
        self.per_register = {"f16": 2, "bf16": 2, "tf32": 1, "s8": 4}[kind]
        self.signed_a, self.signed_b = signed_a, signed_b


class MmaProduct:
    """A pending or finished mma: D = A * B + C for every warp of the batch.

    Invariant: ``block`` is None while the product is pending; then D is ``block[:, row : row + 16, column : column +
    8]``. ``c`` are registers, or the product whose D is this product's C. ``level`` is the length of the chain of
    pending products that C depends on, so products of one level are independent of each other. ``out``: the accumulator
    registers, after the first read.
    """

    __slots__ = ("a", "b", "block", "c", "column", "level", "out", "row", "shape", "unit")

    def __init__(
        self,
        unit: TensorUnit,
        shape: Shape,
        a: Fragment,
        b: Fragment,
        c: Fragment | MmaProduct | None,
        level: int,
    ) -> None:
        self.unit, self.shape, self.a, self.b, self.level = unit, shape, a, b, level
        self.c: Fragment | MmaProduct | None = c
        self.block: Array | None = None
        self.row = self.column = 0
        self.out: list[Array] | None = None

    def tile(self) -> Array:
        """D, shape (warps, 16, 8). If D is pending, all pending products are evaluated."""
        if self.block is None:
            self.unit.flush()
        assert self.block is not None
        return self.block[:, self.row : self.row + 16, self.column : self.column + 8]

    def registers(self) -> list[Array]:
        """The accumulator registers, raw bits per lane."""
        if self.out is None:
            tile = self.tile()
            warps = tile.shape[0]
            # Layout (PTX ISA): rows by (half, 8 lane groups), columns by (4 lanes of a group, 2 elements of a lane).
            cells = tile.reshape(warps, 2, 8, 4, 2)
            if self.shape.acc == "f16":
                packed = np.ascontiguousarray(cells.transpose(1, 0, 2, 3, 4).astype(np.float16))
                self.out = list(packed.view(np.uint32).reshape(2, -1))
            else:
                regs = np.ascontiguousarray(cells.transpose(1, 4, 0, 2, 3))
                self.out = list(regs.view(np.uint32).reshape(4, -1))
        return self.out


class Grid(NamedTuple):
    """Independent products of one shape: each of ``rows`` fragments of A with each of ``columns`` fragments of B.
    ``cells``: the row and column of each product; ``sites``: their instructions."""

    shape: Shape
    rows: int
    columns: int
    cells: tuple[tuple[int, int], ...]
    sites: tuple[int, ...]

    def has_layout_of(self, other: Grid) -> bool:
        """Do the sums of two grids have the same layout?"""
        return self is other or (self.cells == other.cells and self.shape.acc == other.shape.acc)


class Products:
    """The finished products of a grid, in one ``block`` of shape (warps, 16 * rows, 8 * columns). ``accumulators``:
    their registers, product by product. ``out``: the bits of these registers, after the first read."""

    __slots__ = ("accumulators", "block", "grid", "out")

    def __init__(self, grid: Grid, block: Array) -> None:
        self.grid, self.block = grid, block
        count = 2 if grid.shape.acc == "f16" else 4
        self.accumulators = tuple([Accumulator(self, i) for i in range(count * len(grid.cells))])
        self.out: list[Array] | None = None

    def registers(self) -> list[Array]:
        """The accumulator registers, raw bits per lane."""
        if self.out is None:
            grid = self.grid
            # As in ``MmaProduct.registers``, for all rows and columns of the grid.
            cells = self.block.reshape(-1, grid.rows, 2, 8, grid.columns, 4, 2)
            if grid.shape.acc == "f16":
                cells = np.ascontiguousarray(cells.transpose(1, 4, 2, 0, 3, 5, 6).astype(np.float16))
            else:
                cells = np.ascontiguousarray(cells.transpose(1, 4, 2, 6, 0, 3, 5))
            words = cells.view(np.uint32).reshape(grid.rows, grid.columns, -1, 32 * self.block.shape[0])
            self.out = [register for row, column in grid.cells for register in words[row, column]]
        return self.out


class Accumulator:
    """One register of a product's accumulator, whose bits are computed when it is read."""

    __slots__ = ("index", "product")

    def __init__(self, product: MmaProduct | Products, index: int) -> None:
        self.product, self.index = product, index

    def get(self) -> Array:
        """Raw bits per lane."""
        return self.product.registers()[self.index]


def force(value: Array | Accumulator) -> Array:
    """The bits of a register, which may be an accumulator."""
    return value.get() if isinstance(value, Accumulator) else value


# Registers as the local variables of a kernel have them.
Registers = tuple[Array | Accumulator, ...]


class TensorUnit:
    """Collects the products of a batch of ``size`` lanes. ``rounding``: how fp32 sums are rounded, bit by bit; None for
    the model of this module."""

    def __init__(self, size: int, rounding: TensorRounding | None = None) -> None:
        self.size, self.rounding = size, rounding
        self.pending: list[MmaProduct] = []
        # The highest level of a pending product.
        self.deepest = 0

    def mma(self, shape: Shape, a: Registers, b: Registers, c: Registers) -> list[Accumulator]:
        """Collect a product; returns the registers of its result. Operands are registers (uint32, one per lane)."""
        level = 0
        addend: Fragment | MmaProduct
        previous = _product_of(c)
        if previous is not None:
            addend = previous
            is_last = previous.block is None and previous.level == self.deepest
            if is_last and len(self.pending) * self.size >= PENDING_LANES:
                self.flush()
            level = previous.level + 1 if previous.block is None else 0
        else:
            addend = tuple(force(x) for x in c)
        node = MmaProduct(self, shape, tuple(map(force, a)), tuple(map(force, b)), addend, level)
        self.pending.append(node)
        self.deepest = max(self.deepest, level)
        if len(self.pending) * self.size > MAX_PENDING_LANES:
            self.flush()
        return [Accumulator(node, i) for i in range(len(c))]

    def grid(self, grid: Grid, a: Fragment, b: Fragment, c: Registers) -> tuple[Accumulator, ...]:
        """Evaluate a grid of products together and return their registers. ``a`` and ``b`` are in the order of
        fragments, ``c`` and the result in that of products."""
        shape = grid.shape
        if self.rounding is not None:
            return self._one_by_one(grid, a, b, c)
        out = np.matmul(self._left(a, grid.rows, shape), self._right(b, grid.columns, shape))
        first = c[0].product if isinstance(c[0], Accumulator) else None
        if isinstance(first, Products) and first.grid.has_layout_of(grid) and c == first.accumulators:
            out += first.block
        else:
            registers, count = tuple(map(force, c)), len(c) // len(grid.cells)
            for i, (row, column) in enumerate(grid.cells):
                addend = self._matrix(registers[i * count : i * count + count], shape, out.dtype)
                if addend is not None:
                    out[:, 16 * row : 16 * row + 16, 8 * column : 8 * column + 8] += addend
        return Products(grid, _in_accumulators(out, shape)).accumulators

    def _one_by_one(self, grid: Grid, a: Fragment, b: Fragment, c: Registers) -> tuple[Accumulator, ...]:
        """Collect the products of a grid like single ones."""
        out: list[Accumulator] = []
        count, per_a, per_b = len(c) // len(grid.cells), len(a) // grid.rows, len(b) // grid.columns
        for i, (row, column) in enumerate(grid.cells):
            left, right = a[row * per_a : (row + 1) * per_a], b[column * per_b : (column + 1) * per_b]
            out += self.mma(grid.shape, left, right, c[i * count : (i + 1) * count])
        return tuple(out)

    def flush(self) -> None:
        """Evaluate all pending products, level by level."""
        nodes, self.pending, self.deepest = self.pending, [], 0
        groups: dict[tuple[int, Shape], list[MmaProduct]] = {}
        for node in nodes:
            groups.setdefault((node.level, node.shape), []).append(node)
        for level, shape in sorted(groups, key=lambda key: key[0]):
            self._level(shape, groups[(level, shape)])
        for node in nodes:
            # Finished products keep no operands, so that memory is freed.
            node.a = node.b = ()
            node.c = None
            node.level = 0

    def _level(self, shape: Shape, nodes: list[MmaProduct]) -> None:
        """Evaluate independent products of one shape."""
        if self.rounding is not None and shape.acc == "f32" and shape.kind in ROUNDED_KINDS:
            for node in nodes:
                addend = self._addend(node, np.float32)
                a, b = self._left(node.a, 1, shape), self._right(node.b, 1, shape)
                before = np.zeros((len(a), 16, 8), np.float32) if addend is None else addend
                node.block = add_products(a, b, before, self.rounding)
                node.row = node.column = 0
            return
        out, rows, columns = self._multiply(shape, nodes)
        sum_type = np.float64 if shape.kind == "s8" else np.float32  # fp64 holds the sums of s8 exactly
        previous = _common_block(nodes, rows, columns)
        if previous is not None and previous.shape == out.shape and previous.dtype == sum_type:
            out += previous
        else:
            for node, r, c in zip(nodes, rows, columns, strict=True):
                addend = self._addend(node, sum_type)
                if addend is not None:
                    out[:, r : r + 16, c : c + 8] += addend
        out = _in_accumulators(out, shape)
        for node, r, c in zip(nodes, rows, columns, strict=True):
            node.block, node.row, node.column = out, r, c

    def _multiply(self, shape: Shape, nodes: list[MmaProduct]) -> tuple[Array, list[int], list[int]]:
        """All products A * B in one block, shape (warps, rows, columns), and the first row and column of each
        product."""
        lefts: dict[Identity, Fragment] = {}
        rights: dict[Identity, Fragment] = {}
        pairs = []
        for node in nodes:
            # ``lefts`` and ``rights`` keep the fragments alive while their identities are compared.
            pair = _identity(node.a), _identity(node.b)
            lefts[pair[0]], rights[pair[1]] = node.a, node.b
            pairs.append(pair)
        if len(nodes) == len(lefts) * len(rights) == len(set(pairs)):
            # Every fragment of A is multiplied by every fragment of B: one large product per warp replaces many small
            # ones.
            a = self._left(tuple(chain(*lefts.values())), len(lefts), shape)
            b = self._right(tuple(chain(*rights.values())), len(rights), shape)
            rows = {key: 16 * i for i, key in enumerate(lefts)}
            columns = {key: 8 * i for i, key in enumerate(rights)}
            return np.matmul(a, b), [rows[i] for i, _ in pairs], [columns[j] for _, j in pairs]
        n, warps = len(nodes), self.size // 32
        a = self._left(tuple(chain(*(node.a for node in nodes))), n, shape).reshape(warps, n, 16, shape.k)
        b = self._right(tuple(chain(*(node.b for node in nodes))), n, shape).reshape(warps, shape.k, n, 8)
        b = b.transpose(0, 2, 1, 3)
        out = np.matmul(a, np.ascontiguousarray(b)).reshape(warps, 16 * n, 8)
        return out, [16 * i for i in range(n)], [0] * n

    def _left(self, registers: Fragment, n: int, shape: Shape) -> Array:
        """``n`` fragments of A, one below the other, as numbers: shape (warps, 16 * n, k)."""
        # Layout (PTX ISA): registers go by (k half, row half), lanes by 4 * row + k group, then come the elements of a
        # register. So four neighbouring lanes hold 16 bytes of one row, which move as one element.
        warps, steps = self.size // 32, shape.k // (4 * shape.per_register)
        raw = np.concatenate(registers).view(MOVER[16]).reshape(n, steps, 2, warps, 8)
        rows = np.ascontiguousarray(raw.transpose(3, 0, 2, 4, 1)).view(np.uint32)
        return _decode(rows, shape, shape.signed_a).reshape(warps, 16 * n, shape.k)

    def _right(self, registers: Fragment, n: int, shape: Shape) -> Array:
        """``n`` fragments of B, side by side, as numbers: shape (warps, k, 8 * n)."""
        # Layout (PTX ISA): registers go by k, lanes by 4 * column + k group, then come the elements of a register.
        warps, steps = self.size // 32, shape.k // (4 * shape.per_register)
        raw = np.concatenate(registers).reshape(n, steps, warps, 8, 4).transpose(2, 1, 4, 0, 3)
        words = np.ascontiguousarray(raw).reshape(warps, steps * 4, 8 * n)
        if shape.per_register == 2:
            return split_halves(words, shape.kind).reshape(warps, shape.k, 8 * n)
        values = _decode(words, shape, shape.signed_b).reshape(warps, steps * 4, 8 * n, shape.per_register)
        return np.ascontiguousarray(values.transpose(0, 1, 3, 2)).reshape(warps, shape.k, 8 * n)

    def _addend(self, node: MmaProduct, sum_type: DTypeLike) -> Array | None:
        """The C of a product as numbers of ``sum_type``, shape (warps, 16, 8); None if it is zero."""
        c = node.c
        if isinstance(c, MmaProduct):
            return c.tile().astype(sum_type)
        assert c is not None
        return self._matrix(c, node.shape, sum_type)

    def _matrix(self, c: Fragment, shape: Shape, sum_type: DTypeLike) -> Array | None:
        """The registers of C as a matrix, shape (warps, 16, 8); None if it is zero."""
        warps = self.size // 32
        # Accumulators that a kernel sets to zero mostly share one array, which is tested only once.
        if all(x is c[0] for x in c) and not np.any(c[0]):
            return None
        raw = np.array(c, np.uint32)
        cells: Array
        if shape.acc == "f16":
            cells = raw.view(np.float16).reshape(2, warps, 8, 4, 2).transpose(1, 0, 2, 3, 4)
        else:
            kind = np.int32 if shape.acc == "s32" else np.float32
            cells = raw.view(kind).reshape(2, 2, warps, 8, 4).transpose(2, 0, 3, 4, 1)
        return cells.reshape(warps, 16, 8).astype(sum_type)


def _identity(fragment: Fragment) -> Identity:
    """The identity of a fragment, by those of its arrays: registers never change in place. It is valid only while the
    fragment is kept alive."""
    return tuple(map(id, fragment))


def _in_accumulators(sums: Array, shape: Shape) -> Array:
    """Sums rounded or converted to the type of the shape's accumulators."""
    if shape.acc == "f16":
        return halves(sums.astype(np.float16).view(np.uint16), "f16")
    if shape.acc == "s32":
        return np.asarray(sums.astype(np.int64).astype(np.int32))
    return sums


def _product_of(c: Registers) -> MmaProduct | None:
    """The product of which these registers are all accumulators, in order; None if there is none."""
    first = c[0]
    if not isinstance(first, Accumulator):
        return None
    product = first.product
    for index, x in enumerate(c):
        if not isinstance(x, Accumulator) or x.product is not product or x.index != index:
            return None
    return product if isinstance(product, MmaProduct) else None


def _common_block(nodes: list[MmaProduct], rows: list[int], columns: list[int]) -> Array | None:
    """The block in which the addends of all products lie, each at the place of its product; None if there is none."""
    first = nodes[0].c
    block = first.block if isinstance(first, MmaProduct) else None
    for node, row, column in zip(nodes, rows, columns, strict=True):
        c = node.c
        if not (isinstance(c, MmaProduct) and c.block is block and c.row == row and c.column == column):
            return None
    return block


def _decode(raw: Array, shape: Shape, signed: bool) -> Array:
    """The elements of an operand as numbers."""
    if shape.kind in ("f16", "bf16"):
        return halves(raw.view(np.uint16), shape.kind)
    if shape.kind == "tf32":
        # The tensor core reads the upper 19 bits.
        return (raw & np.uint32(0xFFFFE000)).view(np.float32)
    return raw.view(np.int8 if signed else np.uint8).astype(np.float64)
