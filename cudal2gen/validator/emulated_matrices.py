"""Places the matrices of a launch in the emulator's memory, and reads the computed part of D from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import Record, aligned
from cudal2gen.kernel.fusion import GATE_COLS
from cudal2gen.kernel.launch import Groups
from cudal2gen.launch.launcher import Fused
from cudal2gen.validator import fused
from cudal2gen.validator.correctness import operands
from cudal2gen.validator.problems import Shape, batches, strides
from kernelproof import emulator

Array = NDArray[Any]


class ComputedProduct(NamedTuple):
    """The computed part of one product: A (computed rows,k), B (computed columns,k) and D (computed rows,columns).

    ``fused``: the operands besides A and B. ``aux``: the output besides D.
    """

    a: Array
    b: Array
    d: Array
    fused: fused.FusedOperands[Array]
    aux: Array | None = None


class EmulatedMatrices:
    """A launch's matrices in the emulator's memory; only ``rows`` and ``cols`` of D are computed.

    If the launch is larger than the problem, the rest of A and B is zero, because callers pad with zeros. ``inputs``: a
    kind of ``problems.kinds``. ``packed``: leading dimensions are as short as possible, as users have them.

    ``arguments``, ``batch_arguments`` and ``fused_arguments`` are those of ``OpenKernel.launch``. After the launch,
    ``products`` has the computed part of D.
    """

    def __init__(
        self, record: Record, shape: Shape, rows: Array, cols: Array, inputs: str, seed: int, packed: bool
    ) -> None:
        sizes = shape.launched(record)
        (m, n, k), (lda, ldb, ldd) = sizes, strides(record, sizes, packed)
        self.memory = emulator.Memory()
        self._grouped = bool(shape.groups)
        self._rows, self._cols = shape.rows(rows), cols[cols < shape.n]
        self._d_cols = _cols_of_d(record, self._cols)
        self._type, self._type_d = record.element.numpy_dtype, record.output.numpy_dtype
        self.batches, vector = batches(record, shape, packed), record.element.vector
        rng = np.random.default_rng(seed)
        # Only the factors of the computed part of D are drawn.
        products = [
            _draw_factors(record, inputs, len(product_rows), len(self._cols), shape.k, rng)
            for product_rows in self._rows
        ]
        self._fused = [
            _draw_fused(record, inputs, len(product_rows), len(self._cols), shape.k, rng) for product_rows in self._rows
        ]
        # The k of the launch may be larger than that of the problem. A shared B is stored once.
        all_a = [_zero_padded(a, len(a), k) for a, _ in products]
        all_b = [_zero_padded(b, len(b), k) for _, b in (products[:1] if shape.shared_b else products)]
        self._operands = list(zip(all_a, all_b * (len(products) if shape.shared_b else 1), strict=True))
        padded_a = self._by_rows(all_a, rows)
        padded_b = [_zero_padded(b, len(cols), k) for b in all_b]
        address_a = self._upload_factor("A", record.along_k.a, (m, lda), rows, padded_a, self.batches.a)
        address_b = self._upload_factor("B", record.along_k.b, (n, ldb), cols, padded_b, self.batches.b)
        self._d_shape = (m, ldd)
        # A kernel that stores no vectors must take a D and a C that are aligned only to an element.
        self._offset_d = 1 if shape.m % 2 and not (packed or record.launch.stores_vectors) else 0
        # The elements of the buffer of D in which each product's m x ldd matrix lies.
        starts = [self._offset_d + number * self.batches.d for number in range(len(products))]
        self._slices_of_d = [slice(start, start + m * ldd) for start in starts]
        self._d = self._output("D", self._mask_of_d(record.fusion.d_cols(n)))
        self._aux_shape = (m, aligned(n, vector) + vector)
        self._aux = self._output("aux", _column_mask(self._aux_shape, n)) if record.fusion.aux else None
        address_d = self._d.address + self._offset_d * self._type_d.itemsize
        self.arguments = (address_a, lda, address_b, ldb, address_d, ldd, m, n, k)
        self.batch_arguments = self._batch_arguments(shape)
        self.fused_arguments = self._fused_arguments(record, (m, n, ldd), rows, cols) if record.fusion else None

    def _upload_factor(
        self, name: str, along_k: bool, extent_and_ld: tuple[int, int], rows: Array, values: list[Array], stride: int
    ) -> int:
        """Uploads A (m,k) or B (n,k) as it is stored, in rows along k or across it, and returns its address.

        ``values``: for each product the given ``rows`` with all of k. ``extent_and_ld``: m or n of the launch, and the
        leading dimension. ``stride``: elements from one product's matrix to the next.
        """
        (extent, ld), depth = extent_and_ld, values[0].shape[1]
        if along_k:
            return self._input(name, (extent, ld), rows, np.arange(depth), values, stride)
        return self._input(name, (depth, ld), np.arange(depth), rows, [value.T for value in values], stride)

    def _by_rows(self, values: list[Array], rows: Array) -> list[Array]:
        """Arranges values that have a row for each computed row of D as they lie in memory.

        In a batch, each product is padded with rows of zeros to the rows of the launch. Groups are stacked in one
        matrix without padding, and the rows after the last group are NaN.
        """
        if self._grouped:
            stacked = np.concatenate(values)
            after = np.full((len(rows) - len(stacked), stacked.shape[1]), np.nan, stacked.dtype)
            return [np.concatenate([stacked, after])]
        return [_zero_padded(value, len(rows), value.shape[1]) for value in values]

    def _output(self, name: str, mask: Array) -> emulator.Buffer:
        """A matrix in which the kernel must write exactly the elements of the mask."""
        zeros = np.broadcast_to(self._type_d.type(0), mask.shape)
        return self.memory.upload(zeros, "output", region=mask, name=name)

    def _mask_of_d(self, n: int) -> Array:
        """The mask of the elements of D that the products write: their rows, and ``n`` columns."""
        (m, ldd), last = self._d_shape, self._slices_of_d[-1]
        mask = np.zeros(last.stop, bool)
        for part, rows in zip(self._slices_of_d, self._rows, strict=True):
            matrix = mask[part].reshape(self._d_shape)
            matrix[rows if self._grouped else slice(m), :n] = True
        return mask.reshape(self._d_shape) if len(mask) == m * ldd else mask

    def _batch_arguments(self, shape: Shape) -> dict[str, Any]:
        """The launcher's arguments that describe the products of a batch, or the groups."""
        if not shape.groups:
            return {"batches": self.batches}
        ends = self.memory.upload(np.cumsum(shape.groups).astype(np.int32), name="ends")
        return {"groups": Groups(ends.address, len(shape.groups), self.batches.b, self.batches.bias)}

    def _fused_arguments(self, record: Record, extents: tuple[int, int, int], rows: Array, cols: Array) -> Fused:
        """The launcher's arguments for fused operands: uploads bias and C, and names aux.

        Bias and C are padded with zeros, as callers pad them, and are NaN where no executed CTA may read.
        ``extents``: m and n of the launch, and the leading dimension of C.
        """
        m, n, ld = extents
        bias, c = 0, 0
        vectors = [further.bias for further in self._fused if further.bias is not None]
        matrices = [further.c for further in self._fused if further.c is not None]
        if record.fusion.bias == "n":
            values = [_zero_padded(vector[None, :], 1, len(cols)) for vector in vectors]
            bias = self._input("bias", (1, n), np.arange(1), cols, values, self.batches.bias)
        if record.fusion.bias == "m":
            values = [column.T for column in self._by_rows([vector[:, None] for vector in vectors], rows)]
            bias = self._input("bias", (1, m), np.arange(1), rows, values, self.batches.bias)
        if matrices:
            values = self._by_rows([_zero_padded(matrix, len(matrix), len(cols)) for matrix in matrices], rows)
            c = self._input("C", (m, ld), rows, cols, values, self.batches.c, of_d=True)
        aux, ldaux = (self._aux.address, self._aux_shape[1]) if self._aux else (0, 0)
        return Fused(bias, c, ld, self._fused[0].alpha, self._fused[0].beta, aux, ldaux)

    def _input(
        self,
        name: str,
        size: tuple[int, int],
        rows: Array,
        cols: Array,
        values: list[Array],
        stride: int = 0,
        of_d: bool = False,
    ) -> int:
        """Uploads one matrix of ``size`` for each of ``values``, and returns the address of the first.

        The matrices start ``stride`` elements apart. The values lie in the given rows and columns. The rest of those
        rows is NaN, and so is the space between matrices. ``of_d``: the matrices have the type and the alignment of D.
        """
        dtype, offset = (self._type_d, self._offset_d) if of_d else (self._type, 0)
        elements = offset + (len(values) - 1) * stride + size[0] * size[1]
        buffer = self.memory.allocate(elements * dtype.itemsize, "inout", name=name)
        contents = buffer.bytes().view(dtype)
        if len(values) > 1:
            contents[:] = np.nan
        for number, value in enumerate(values):
            matrix = contents[offset + number * stride :][: size[0] * size[1]].reshape(size)
            matrix[rows] = np.nan
            matrix[np.ix_(rows, cols)] = value
        buffer.role = "input"
        return buffer.address + offset * dtype.itemsize

    @property
    def products(self) -> tuple[ComputedProduct, ...]:
        """The computed part of each product."""
        elements = self._d.bytes().view(self._type_d)
        places = zip(self._slices_of_d, self._rows, strict=True)
        parts = [elements[part].reshape(self._d_shape)[np.ix_(rows, self._d_cols)] for part, rows in places]
        aux = None
        if self._aux:  # aux exists for a single product only
            aux = self._aux.bytes().view(self._type_d).reshape(self._aux_shape)[np.ix_(self._rows[0], self._cols)]
        return tuple(
            ComputedProduct(a, b, d, fused_operands, aux)
            for (a, b), d, fused_operands in zip(self._operands, parts, self._fused, strict=True)
        )


def _draw_factors(record: Record, inputs: str, m: int, n: int, k: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """A (m,k) and B (n,k), where m may be 0."""
    a, b = operands(inputs, max(1, m), n, k, rng, record.element)
    return a[:m], b


def _draw_fused(
    record: Record, inputs: str, m: int, n: int, k: int, rng: np.random.Generator
) -> fused.FusedOperands[Array]:
    """The operands besides A and B of a fused product with m rows, where m may be 0."""
    fused_operands = fused.draw(record.fusion, inputs, max(1, m), n, rng, record.element, record.output, k=k)
    return fused_operands.of_rows(record.fusion, slice(m))


def _cols_of_d(record: Record, cols: Array) -> Array:
    """The columns of D that are computed from some columns of the product: the same ones, or one for each gated
    pair."""
    if not record.fusion.gate:
        return cols
    # Of each GATE_COLS columns of the product, column i of the first half and column i of the second give one column.
    half = GATE_COLS // 2
    first = cols[cols % GATE_COLS < half]
    cols_of_d: Array = first // GATE_COLS * half + first % half
    return cols_of_d


def _column_mask(shape: tuple[int, int], n: int) -> Array:
    """The mask of the first n columns of a matrix."""
    mask = np.zeros(shape, bool)
    mask[:, :n] = True
    return mask


def _zero_padded(matrix: Array, rows: int, cols: int) -> Array:
    """The matrix, padded with zeros below and to the right."""
    return np.pad(matrix, [(0, rows - matrix.shape[0]), (0, cols - matrix.shape[1])])
