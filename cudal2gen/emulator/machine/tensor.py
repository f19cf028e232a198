"""Matrix instructions: mma.sync, wmma, movmatrix.

Products of mma.sync are collected and evaluated together when an accumulator is looked at.

Rounding is a model, not calibrated on hardware: operands are exact in fp32; the sixteen (or eight) products of a k-step
are summed in fp32 and added to the accumulator; an f16 accumulator is rounded once per k-step. Integer-valued data
within the range of the accumulator is exact. NaN and infinity propagate as IEEE demands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cudal2gen.emulator.memory.arena import MOVER

if TYPE_CHECKING:
    from cudal2gen.emulator.machine.batch import Batch

Array = NDArray[Any]
Mask = Array | None

# Products are evaluated when this many lanes take part in those collected: it bounds memory and suits the cache.
MAX_PENDING_LANES = 1 << 20


class Shape:
    """A kind of mma.sync: ``k`` elements deep, ``per`` elements in a 32-bit register, of type ``kind``; accumulator
    ``acc``."""

    __slots__ = ("acc", "k", "kind", "name", "per", "signed_a", "signed_b")

    def __init__(self, name: str, k: int, kind: str, acc: str, signed_a: bool = True, signed_b: bool = True) -> None:
        self.name, self.k, self.kind, self.acc = name, k, kind, acc
        self.per = {"f16": 2, "bf16": 2, "tf32": 1, "s8": 4}[kind]
        self.signed_a, self.signed_b = signed_a, signed_b


class Product:
    """A pending or finished mma: D = A * B + C for every warp of the batch."""

    __slots__ = ("a", "b", "block", "c", "column", "level", "out", "row", "shape", "unit")

    def __init__(
        self, unit: TensorUnit, shape: Shape, a: tuple[Array, ...], b: tuple[Array, ...], c: Any, level: int
    ) -> None:
        self.unit, self.shape, self.a, self.b, self.c, self.level = unit, shape, a, b, c, level
        self.block: Array | None = None
        self.row = self.column = 0
        self.out: list[Array] | None = None

    def registers(self) -> list[Array]:
        """The accumulator registers, raw bits per lane."""
        if self.out is None:
            if self.block is None:
                self.unit.flush()
            assert self.block is not None
            tile = self.block[:, self.row : self.row + 16, self.column : self.column + 8]
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
    """One register of a product, not yet looked at."""

    __slots__ = ("index", "product")

    def __init__(self, product: Product, index: int) -> None:
        self.product, self.index = product, index

    def get(self) -> Array:
        return self.product.registers()[self.index]


def force(value: Any) -> Any:
    """The array behind a register that may hold a pending accumulator."""
    return value.get() if type(value) is Accumulator else value


class TensorUnit:
    """Collects the products of a batch of ``size`` lanes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pending: list[Product] = []
        self.weight = 0

    def mma(self, shape: Shape, a: tuple[Any, ...], b: tuple[Any, ...], c: tuple[Any, ...]) -> list[Accumulator]:
        """Operands: registers (uint32 arrays, one element per lane). Returns the result registers."""
        first = c[0]
        level, addend = 0, c
        if type(first) is Accumulator:
            product = first.product
            if all(type(x) is Accumulator and x.product is product and x.index == i for i, x in enumerate(c)):
                addend = product  # type: ignore[assignment]
                level = product.level + 1 if product.block is None else 0
            else:
                addend = tuple(force(x) for x in c)
        elif any(type(x) is Accumulator for x in c):
            addend = tuple(force(x) for x in c)
        node = Product(self, shape, tuple(map(force, a)), tuple(map(force, b)), addend, level)
        self.pending.append(node)
        self.weight += 1
        if self.weight * self.size > MAX_PENDING_LANES:
            self.flush()
        return [Accumulator(node, i) for i in range(len(c))]

    def flush(self) -> None:
        """Evaluate everything pending."""
        nodes, self.pending, self.weight = self.pending, [], 0
        groups: dict[tuple[int, Shape], list[Product]] = {}
        for node in nodes:
            groups.setdefault((node.level, node.shape), []).append(node)
        operands: dict[Any, Array] = {}
        self._convert(nodes, operands)
        for level, shape in sorted(groups, key=lambda key: key[0]):
            self._level(shape, groups[(level, shape)], operands)
        for node in nodes:
            node.a = node.b = ()
            node.c = None
            node.level = 0

    def _convert(self, nodes: list[Product], operands: dict[Any, Array]) -> None:
        """Distinct fragments -> matrices: A as (warps, 16, k), B as (warps, k, 8)."""
        wanted: dict[tuple[Shape, bool], dict[tuple[int, ...], tuple[Array, ...]]] = {}
        for node in nodes:
            wanted.setdefault((node.shape, True), {})[tuple(map(id, node.a))] = node.a
            wanted.setdefault((node.shape, False), {})[tuple(map(id, node.b))] = node.b
        warps = self.size // 32
        for (shape, left), fragments in wanted.items():
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

    def _level(self, shape: Shape, nodes: list[Product], operands: dict[Any, Array]) -> None:
        lefts: dict[tuple[int, ...], int] = {}
        rights: dict[tuple[int, ...], int] = {}
        places = []
        for node in nodes:
            ka, kb = tuple(map(id, node.a)), tuple(map(id, node.b))
            places.append((lefts.setdefault(ka, len(lefts)), rights.setdefault(kb, len(rights))))
        warps = self.size // 32
        work = np.float64 if shape.kind == "s8" else np.float32
        if len(nodes) == len(lefts) * len(rights) == len(set(places)):
            # Every A fragment meets every B fragment: one large product per warp instead of many small ones.
            a = np.concatenate([operands[(shape, True, k)] for k in lefts], axis=1)
            b = np.concatenate([operands[(shape, False, k)] for k in rights], axis=2)
            out = np.matmul(a, b)
            rows, columns = [16 * i for i, _ in places], [8 * j for _, j in places]
        else:
            a = np.stack([operands[(shape, True, tuple(map(id, n.a)))] for n in nodes], axis=1)
            b = np.stack([operands[(shape, False, tuple(map(id, n.b)))] for n in nodes], axis=1)
            out = np.matmul(a, b).reshape(warps, 16 * len(nodes), 8)
            rows, columns = [16 * i for i in range(len(nodes))], [0] * len(nodes)
        previous = nodes[0].c
        shared = previous.block if type(previous) is Product else None
        if (
            shared is not None
            and shared.shape == out.shape
            and shared.dtype == work
            and all(
                type(n.c) is Product and n.c.block is shared and n.c.row == r and n.c.column == c
                for n, r, c in zip(nodes, rows, columns, strict=True)
            )
        ):
            out += shared
        else:
            for node, r, c in zip(nodes, rows, columns, strict=True):
                addend = self._addend(node, work)
                if addend is not None:
                    out[:, r : r + 16, c : c + 8] += addend
        if shape.acc == "f16":
            out = out.astype(np.float16).astype(np.float32)
        elif shape.acc == "s32":
            whole = out.astype(np.int64).astype(np.int32)
            for node, r, c in zip(nodes, rows, columns, strict=True):
                node.block, node.row, node.column = whole, r, c
            return
        for node, r, c in zip(nodes, rows, columns, strict=True):
            node.block, node.row, node.column = out, r, c

    def _addend(self, node: Product, work: Any) -> Array | None:
        c = node.c
        if type(c) is Product:
            if c.block is not None:
                return c.block[:, c.row : c.row + 16, c.column : c.column + 8].astype(work)
            c = tuple(c.registers())
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


def _decode(raw: Array, shape: Shape, signed: bool) -> Array:
    if shape.kind == "f16":
        return raw.view(np.float16).astype(np.float32)
    if shape.kind == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if shape.kind == "tf32":
        # The tensor core reads the upper 19 bits.
        return (raw & np.uint32(0xFFFFE000)).view(np.float32)
    return raw.view(np.int8 if signed else np.uint8).astype(np.float64)


class MatrixInstructions:
    """mma.sync, movmatrix and wmma of a batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.size, self.lane = batch, batch.size, batch.lane
        self.unit = TensorUnit(batch.size)

    def mma(
        self, shape: Shape, a: tuple[Any, ...], b: tuple[Any, ...], c: tuple[Any, ...], m: Mask, site: int
    ) -> list[Any]:
        if m is not None:
            self.batch.require_whole_warps(m, site)
        return list(self.unit.mma(shape, a, b, c))

    def movmatrix(self, value: Array) -> Array:
        """movmatrix.trans of one 8x8 matrix of 16-bit elements."""
        cells = value.view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1)
        return np.ascontiguousarray(cells).view(np.uint32).reshape(-1)

    def _wmma_places(
        self, part: str, layout: str, size: str, kind: str, address: Array, stride: Array | None
    ) -> tuple[list[Array], int]:
        """Addresses of the chunks that each lane moves, and the bytes of a chunk. Element e of lane l of a fragment is
        element l * n + e of the matrix, row by row for the accumulator, along the memory layout for A and B."""
        m, n, k = (int(x) for x in size.replace("m", " ").replace("n", " ").replace("k", " ").split())
        rows, columns = {"a": (m, k), "b": (k, n)}.get(part, (m, n))
        along = part in "ab" and layout == "col"
        length = rows if along else columns
        count = rows * columns // 32
        item = 2 if kind == "f16" else 4
        contiguous = part in "ab" or layout == "row"
        step = stride.astype(np.int64) if stride is not None else np.int64(length if contiguous else rows)
        chunk = min(count, 16 // item, length) if contiguous else 1
        base = address.astype(np.int64)
        out = []
        for at in range(0, count, chunk):
            element = self.lane.astype(np.int64) * count + at
            line, inside = element // length, element % length
            offset = line * step + inside if contiguous else inside * step + line
            out.append((base + offset * item).astype(address.dtype))
        return out, chunk * item

    def wmma_load(
        self,
        part: str,
        layout: str,
        size: str,
        space: str,
        kind: str,
        address: Array,
        stride: Array | None,
        registers: int,
        m: Mask,
        site: int,
    ) -> list[Array]:
        """wmma.load: fragment registers (the layout of a fragment is the machine's own)."""
        if m is not None:
            self.batch.require_whole_warps(m, site)
        places, width = self._wmma_places(part, layout, size, kind, address, stride)
        pieces = []
        for place in places:
            if space == "shared":
                got = self.batch.shared.load(place, width, m, site)
            elif space == "global":
                got = self.batch.memory.load(place, width, m, site)
            else:
                got = self.batch.memory.generic_load(place, width, m, site)
            pieces.append(np.ascontiguousarray(got).view(np.uint8).reshape(self.size, width))
        words = np.ascontiguousarray(np.concatenate(pieces, axis=1)).view(np.uint32)
        # The real fragment may have more registers than elements need: the rest repeats.
        return [np.ascontiguousarray(words[:, i % words.shape[1]]) for i in range(registers)]

    def wmma_store(
        self,
        layout: str,
        size: str,
        space: str,
        kind: str,
        address: Array,
        stride: Array | None,
        values: tuple[Array, ...],
        m: Mask,
        site: int,
    ) -> None:
        """wmma.store of an accumulator."""
        if m is not None:
            self.batch.require_whole_warps(m, site)
        places, width = self._wmma_places("d", layout, size, kind, address, stride)
        raw = np.ascontiguousarray(np.stack(values, axis=1)).view(np.uint8)
        for i, place in enumerate(places):
            piece = np.ascontiguousarray(raw[:, i * width : (i + 1) * width]).reshape(-1).view(MOVER[width])
            if space == "shared":
                self.batch.shared.store(place, piece, width, m, site)
            elif space == "global":
                self.batch.memory.store(place, piece, width, m, site)
            else:
                self.batch.memory.generic_store(place, piece, width, m, site)

    def wmma(
        self,
        size: str,
        la: str,
        lb: str,
        acc: str,
        add: str,
        a: tuple[Array, ...],
        b: tuple[Array, ...],
        c: tuple[Array, ...],
        m: Mask,
        site: int,
    ) -> list[Array]:
        """wmma.mma: D = A * B + C, rounded as mma.sync is."""
        if m is not None:
            self.batch.require_whole_warps(m, site)
        rows, columns, depth = (int(x) for x in size.replace("m", " ").replace("n", " ").replace("k", " ").split())
        warps = self.size // 32

        def matrix(registers: tuple[Array, ...], shape: tuple[int, int], kind: str, transposed: bool) -> Array:
            need = shape[0] * shape[1] // 32 * (2 if kind == "f16" else 4) // 4
            words = np.ascontiguousarray(np.stack(registers[:need], axis=1))
            values = words.view(np.float16 if kind == "f16" else np.float32).astype(np.float32)
            if transposed:
                return values.reshape(warps, shape[1], shape[0]).transpose(0, 2, 1)
            return values.reshape(warps, *shape)

        left = matrix(a, (rows, depth), "f16", la == "col")
        right = matrix(b, (depth, columns), "f16", lb == "col")
        out = left @ right + matrix(c, (rows, columns), add, False)
        cells = (
            np.ascontiguousarray(out.astype(np.float16 if acc == "f16" else np.float32))
            .reshape(self.size, -1)
            .view(np.uint32)
        )
        return [np.ascontiguousarray(cells[:, i]) for i in range(cells.shape[1])]
