"""The tensor core of mma.sync: products are collected, and evaluated together when an accumulator is read.

Rounding is a model, not calibrated on hardware: operands are exact in fp32; the sixteen (or eight) products of a k-step
are summed in fp32 and added to the accumulator; an f16 accumulator is rounded once per k-step. Integer-valued data
within the range of the accumulator is exact. NaN and infinity propagate as IEEE demands.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from cudal2gen.emulator.arithmetic import bf16_to_f32
from cudal2gen.emulator.state.arrays import Array

# Products are evaluated when this many lanes take part in those collected: it bounds memory and suits the cache.
MAX_PENDING_LANES = 1 << 20


# Registers of an operand, raw bits (uint32 per lane); and its identity.
Fragment = tuple[Array, ...]
Identity = tuple[int, ...]


class Shape:
    """A kind of mma.sync: ``k`` elements deep, ``per`` elements in a 32-bit register, of type ``kind``; accumulator
    ``acc``."""

    __slots__ = ("acc", "k", "kind", "name", "per", "signed_a", "signed_b")

    def __init__(self, name: str, k: int, kind: str, acc: str, signed_a: bool = True, signed_b: bool = True) -> None:
        self.name, self.k, self.kind, self.acc = name, k, kind, acc
        self.per = {"f16": 2, "bf16": 2, "tf32": 1, "s8": 4}[kind]
        self.signed_a, self.signed_b = signed_a, signed_b


class Product:
    """A pending or finished mma: D = A * B + C for every warp of the batch.

    Invariant: ``block`` is None while pending; then D is ``block[:, row : row + 16, column : column + 8]``. ``level``
    is how many pending products C depends on, one behind the other: products of one level are independent. ``c`` are
    registers, or the product whose D it is.
    """

    __slots__ = ("a", "b", "block", "c", "column", "level", "out", "row", "shape", "unit")

    def __init__(
        self,
        unit: TensorUnit,
        shape: Shape,
        a: Fragment,
        b: Fragment,
        c: Fragment | Product | None,
        level: int,
    ) -> None:
        self.unit, self.shape, self.a, self.b, self.level = unit, shape, a, b, level
        self.c: Fragment | Product | None = c
        self.block: Array | None = None
        self.row = self.column = 0
        self.out: list[Array] | None = None

    def tile(self) -> Array:
        """D, shape (warps, 16, 8); evaluates what is pending."""
        if self.block is None:
            self.unit.flush()
        assert self.block is not None
        return self.block[:, self.row : self.row + 16, self.column : self.column + 8]

    def registers(self) -> list[Array]:
        """The accumulator registers, raw bits per lane."""
        if self.out is None:
            tile = self.tile()
            warps = tile.shape[0]
            cells = tile.reshape(warps, 2, 8, 4, 2)
            if self.shape.acc == "f16":
                packed = np.ascontiguousarray(cells.transpose(1, 0, 2, 3, 4).astype(np.float16))
                self.out = list(packed.view(np.uint32).reshape(2, -1))
            else:
                regs = np.ascontiguousarray(cells.transpose(1, 4, 0, 2, 3))
                self.out = list(regs.view(np.uint32).reshape(4, -1))
        return self.out


class Accumulator:
    """One register of a product, not yet read."""

    __slots__ = ("index", "product")

    def __init__(self, product: Product, index: int) -> None:
        self.product, self.index = product, index

    def get(self) -> Array:
        """Raw bits per lane."""
        return self.product.registers()[self.index]


def force(value: Array | Accumulator) -> Array:
    """The array behind a register that may hold a pending accumulator."""
    return value.get() if isinstance(value, Accumulator) else value


# Registers as a kernel holds them; matrices by shape, side (A: True) and fragment.
Registers = tuple[Array | Accumulator, ...]
Operands = dict[tuple[Shape, bool, Identity], Array]


class TensorUnit:
    """Collects the products of a batch of ``size`` lanes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pending: list[Product] = []

    def mma(self, shape: Shape, a: Registers, b: Registers, c: Registers) -> list[Accumulator]:
        """Operands: registers (uint32 arrays, one element per lane). Returns the result registers."""
        level = 0
        addend: Fragment | Product
        whole = _whole_product(c)
        if whole is not None:
            addend = whole
            level = whole.level + 1 if whole.block is None else 0
        else:
            addend = tuple(force(x) for x in c)
        node = Product(self, shape, tuple(map(force, a)), tuple(map(force, b)), addend, level)
        self.pending.append(node)
        if len(self.pending) * self.size > MAX_PENDING_LANES:
            self.flush()
        return [Accumulator(node, i) for i in range(len(c))]

    def flush(self) -> None:
        """Evaluate everything pending."""
        nodes, self.pending = self.pending, []
        groups: dict[tuple[int, Shape], list[Product]] = {}
        for node in nodes:
            groups.setdefault((node.level, node.shape), []).append(node)
        operands: Operands = {}
        self._convert(nodes, operands)
        for level, shape in sorted(groups, key=lambda key: key[0]):
            self._level(shape, groups[(level, shape)], operands)
        for node in nodes:
            node.a = node.b = ()
            node.c = None
            node.level = 0

    def _convert(self, nodes: list[Product], operands: Operands) -> None:
        """Distinct fragments -> matrices: A as (warps, 16, k), B as (warps, k, 8)."""
        by_kind: dict[tuple[Shape, bool], dict[Identity, Fragment]] = {}
        for node in nodes:
            by_kind.setdefault((node.shape, True), {})[_identity(node.a)] = node.a
            by_kind.setdefault((node.shape, False), {})[_identity(node.b)] = node.b
        warps = self.size // 32
        for (shape, left), fragments in by_kind.items():
            per, steps = shape.per, shape.k // (4 * shape.per)
            raw = np.array(list(fragments.values()), np.uint32)
            values = _decode(raw, shape, shape.signed_a if left else shape.signed_b)
            n = len(fragments)
            # Registers of A are ordered (k half, row half); lane = 4 * row + k group; then the elements of a register.
            if left:
                cells = values.reshape(n, steps, 2, warps, 8, 4, per).transpose(0, 3, 2, 4, 1, 5, 6)
                matrices = np.ascontiguousarray(cells).reshape(n, warps, 16, shape.k)
            else:
                cells = values.reshape(n, steps, warps, 8, 4, per).transpose(0, 2, 1, 4, 5, 3)
                matrices = np.ascontiguousarray(cells).reshape(n, warps, shape.k, 8)
            for key, matrix in zip(fragments, matrices, strict=True):
                operands[(shape, left, key)] = matrix

    def _level(self, shape: Shape, nodes: list[Product], operands: Operands) -> None:
        """Evaluate independent products of one shape."""
        out, rows, columns = self._multiply(shape, nodes, operands)
        work = np.float64 if shape.kind == "s8" else np.float32
        previous = _common_block(nodes, rows, columns)
        if previous is not None and previous.shape == out.shape and previous.dtype == work:
            out += previous
        else:
            for node, r, c in zip(nodes, rows, columns, strict=True):
                addend = self._addend(node, work)
                if addend is not None:
                    out[:, r : r + 16, c : c + 8] += addend
        if shape.acc == "f16":
            out = out.astype(np.float16).astype(np.float32)
        elif shape.acc == "s32":
            out = out.astype(np.int64).astype(np.int32)
        for node, r, c in zip(nodes, rows, columns, strict=True):
            node.block, node.row, node.column = out, r, c

    def _multiply(self, shape: Shape, nodes: list[Product], operands: Operands) -> tuple[Array, list[int], list[int]]:
        """All products A * B in one block (warps, rows, columns), and the first row and column of each."""
        lefts: dict[Identity, int] = {}
        rights: dict[Identity, int] = {}
        places = []
        for node in nodes:
            ka, kb = _identity(node.a), _identity(node.b)
            places.append((lefts.setdefault(ka, len(lefts)), rights.setdefault(kb, len(rights))))
        if len(nodes) == len(lefts) * len(rights) == len(set(places)):
            # Every A fragment meets every B fragment: one large product per warp instead of many small ones.
            a = np.concatenate([operands[(shape, True, k)] for k in lefts], axis=1)
            b = np.concatenate([operands[(shape, False, k)] for k in rights], axis=2)
            return np.matmul(a, b), [16 * i for i, _ in places], [8 * j for _, j in places]
        a = np.stack([operands[(shape, True, _identity(n.a))] for n in nodes], axis=1)
        b = np.stack([operands[(shape, False, _identity(n.b))] for n in nodes], axis=1)
        out = np.matmul(a, b).reshape(self.size // 32, 16 * len(nodes), 8)
        return out, [16 * i for i in range(len(nodes))], [0] * len(nodes)

    def _addend(self, node: Product, work: DTypeLike) -> Array | None:
        """C as (warps, 16, 8); None where it is zero."""
        c = node.c
        if isinstance(c, Product):
            return c.tile().astype(work)
        assert c is not None
        warps = self.size // 32
        if all(x is c[0] for x in c) and not np.any(c[0]):
            return None
        raw = np.array(c, np.uint32)
        cells: Array
        if node.shape.acc == "f16":
            cells = raw.view(np.float16).reshape(2, warps, 8, 4, 2).transpose(1, 0, 2, 3, 4)
        else:
            kind = np.int32 if node.shape.acc == "s32" else np.float32
            cells = raw.view(kind).reshape(2, 2, warps, 8, 4).transpose(2, 0, 3, 4, 1)
        return cells.reshape(warps, 16, 8).astype(work)


def _identity(fragment: Fragment) -> Identity:
    """Registers never change in place: the same arrays are the same fragment. Only for fragments that are kept
    alive."""
    return tuple(map(id, fragment))


def _whole_product(c: Registers) -> Product | None:
    """The product of which these are all accumulators in order, if there is one."""
    first = c[0]
    if not isinstance(first, Accumulator):
        return None
    product = first.product
    if all(isinstance(x, Accumulator) and x.product is product and x.index == i for i, x in enumerate(c)):
        return product
    return None


def _common_block(nodes: list[Product], rows: list[int], columns: list[int]) -> Array | None:
    """The block in which all addends lie, each at the very place of its product."""
    first = nodes[0].c
    block = first.block if isinstance(first, Product) else None
    for node, row, column in zip(nodes, rows, columns, strict=True):
        c = node.c
        if not (isinstance(c, Product) and c.block is block and c.row == row and c.column == column):
            return None
    return block


def halves(raw: Array, kind: str) -> Array:
    """The fp32 values of 16-bit operands, f16 or bf16."""
    return raw.view(np.float16).astype(np.float32) if kind == "f16" else bf16_to_f32(raw)


def _decode(raw: Array, shape: Shape, signed: bool) -> Array:
    if shape.kind in ("f16", "bf16"):
        return halves(raw.view(np.uint16), shape.kind)
    if shape.kind == "tf32":
        # The tensor core reads the upper 19 bits.
        return (raw & np.uint32(0xFFFFE000)).view(np.float32)
    return raw.view(np.int8 if signed else np.uint8).astype(np.float64)
