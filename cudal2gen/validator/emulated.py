"""Judges a kernel in the emulator: executes its PTX or machine code on the CPU, through the launcher, and compares D.

Every problem is executed once with hazard detection. If warpgroups wait for each other at mbarriers, the largest
problem is executed again in an adverse order. Leading dimensions are longer than rows, unless sizes are compiled in or
counters are taken. The elements between rows are NaN in A and B, and must not be written in D.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from cudal2gen.generation.compiler import Artifact
from cudal2gen.kernel import Record, aligned, ceil_div
from cudal2gen.kernel.fusion import GATE_COLS
from cudal2gen.kernel.launch import Groups
from cudal2gen.launch.launcher import Fused, LaunchError, OpenKernel
from cudal2gen.results import IN_MACHINE_CODE, IN_PTX, Case, MachineCode, Verdict, executed
from cudal2gen.validator import fused
from cudal2gen.validator.correctness import Comparison, compare, operands
from cudal2gen.validator.problems import CLUSTERS, Shape, batches, kinds, stress_shapes, strides, thorough_shape
from kernelproof import emulator
from kernelproof.ground import workers
from kernelproof.ground.workers import Lost, Task

Array = NDArray[Any]

LOOP_ROOM = 10_000  # backward branches allowed for copies and stores, in addition to those for steps of k


class ComputedProduct(NamedTuple):
    """The computed part of one product: A (computed rows,k), B (computed columns,k) and D (computed rows,columns).

    ``fused``: the operands besides A and B. ``aux``: the output besides D.
    """

    a: Array
    b: Array
    d: Array
    fused: fused.FusedOperands[Array]
    aux: Array | None = None


@dataclass(frozen=True)
class Execution:
    """The result of one launch.

    ``products``: for each product, the rows and columns of D that were computed, and what they are computed from. A and
    B are padded with zeros to the k of the launch, which may exceed the problem's. ``ctas``: how many CTAs were
    executed, 0 if the launch was refused. ``tiles``: how many tiles were executed, over all products. ``findings`` are
    errors, ``remarks`` the emulator's other reports. ``counters``: None unless asked for.
    """

    products: tuple[ComputedProduct, ...]
    ctas: int
    tiles: int
    findings: tuple[str, ...]
    remarks: tuple[str, ...]
    counters: emulator.Counters | None

    @property
    def a(self) -> Array:
        """A of the first product; ``b`` and ``d`` likewise."""
        return self.products[0].a

    @property
    def b(self) -> Array:
        return self.products[0].b

    @property
    def d(self) -> Array:
        return self.products[0].d


def device_of(record: Record, sms: int = CLUSTERS) -> emulator.Device:
    """The record's GPU with few SMs that hold one CTA each, so that a persistent kernel's CTAs take several tiles."""
    return replace(emulator.Device.of(record.target), sm_count=sms, threads_per_sm=record.threads)


class Modes(TypedDict, total=False):
    """Keyword arguments of ``execute``."""

    hazards: bool
    counters: bool
    adverse: bool
    rounding: emulator.RoundingName
    seed: int
    machine_code: bool


class _Matrices:
    """A launch's matrices in the emulator's memory; only ``rows`` and ``cols`` of D are computed.

    If the launch is larger than the problem, the rest of A and B is zero, because callers pad with zeros. ``inputs``: a
    kind of ``problems.kinds``. ``packed``: leading dimensions are as short as possible, as users have them.
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


def _is_fault(record: Record, report: emulator.Report) -> bool:
    """Whether a report is a finding. All errors are. In kernels of our own families (not ``TEXTUAL``), a missing fence
    of the canonical patterns of tcgen05 is one too, even if no result depends on the fence."""
    return report.is_error or (report.kind == "tcgen05-fence" and not record.TEXTUAL)


def _arrival_findings(kernel: OpenKernel, memory: emulator.Memory) -> list[str]:
    """A finding if a launch leaves arrival counters in device memory that are not zero.

    The next launch on its stream would start with them.
    """
    address, size = kernel.counters()
    arrivals = memory.find(address - memory.base) if size else None
    nonzero = [] if arrivals is None else np.flatnonzero(arrivals.bytes().view(np.uint32)).tolist()
    if not nonzero:
        return []
    return [f"counters-left: {len(nonzero)} counters are not zero after the launch, the first is number {nonzero[0]}"]


def execute(
    record: Record,
    artifact: Artifact,
    library: Path,
    shape: Shape,
    inputs: str,
    *,
    hazards: bool = True,
    counters: bool = False,
    adverse: bool = False,
    rounding: emulator.RoundingName = "model",
    seed: int = 0,
    machine_code: bool = False,
) -> Execution:
    """Launches a built kernel on one problem in the emulator. A faulty kernel raises nothing; it gives findings.

    ``library``: the launcher's shared library. ``inputs``: a kind of ``problems.kinds``. ``counters``: count what the
    launch executes, with matrices that are packed as users have them. ``machine_code``: execute the cubin's
    instructions in place of the PTX. ``hazards``, ``adverse``, ``rounding``: see ``emulator.Options``.

    Raises UnknownMachineCode if the emulator does not know an instruction of the cubin, and EmulatorError without a C
    compiler.
    """
    m, n, k = shape.launched(record)
    tiles_m, tiles_n = _executed_tiles(shape, record)
    rows, cols = _extents(tiles_m, record.bm, m), _extents(tiles_n, record.bn, n)
    # Counters describe the layout that users have, without space between rows.
    matrices = _Matrices(record, shape, rows, cols, inputs, seed, packed=counters)
    options = record.launch_options | shape.launch_options
    corners = partial(_corner_ctas, tiles_m=tiles_m, tiles_n=tiles_n, split_k=record.split_k)
    # The loops of a correct kernel make at most 16 iterations per k-step, added up over all tiles.
    row_tiles = ceil_div(m, record.bm) * shape.batch + len(shape.groups)
    iterations = LOOP_ROOM + 16 * row_tiles * ceil_div(n, record.bn) * ceil_div(k, record.k_step)
    modes = emulator.Options(
        hazards=hazards, counters=counters, loop_limit=iterations, adverse=adverse, rounding=rounding
    )
    device = device_of(record, CLUSTERS * record.cluster_ctas)
    findings: list[str] = []
    memory, cta_filter = matrices.memory, corners if shape.corners else None
    policy = emulator.SessionPolicy(device, modes, cta_filter, machine_code=machine_code)
    with emulator.Session(policy, memory) as session:
        try:
            with OpenKernel(library, artifact.directory, options, emulator.runtime_path()) as kernel:
                size = kernel.workspace_bytes(m, n, k, matrices.batches.products)
                workspace = memory.allocate(size, "scratch", name="workspace").address if size else 0
                # Work that the launcher put on another stream than the caller's would race with the kernel, and the
                # race would be a finding.
                stream = session.streams.new_stream() if size else 0
                kernel.launch(
                    *matrices.arguments, workspace, stream, fused=matrices.fused_arguments, **matrices.batch_arguments
                )
                findings += _arrival_findings(kernel, memory)
        except LaunchError as error:
            findings.append(f"launch-refused: {error}")
    findings += [str(report) for report in session.reports if _is_fault(record, report)]
    if unknown := next((error for error in session.errors if isinstance(error, emulator.UnknownMachineCode)), None):
        raise unknown
    findings += [f"emulator: {error}" for error in session.errors]
    launch = session.launches[-1] if session.launches else None
    ctas = 0 if launch is None else len(launch.ctas) if launch.ctas is not None else int(np.prod(launch.grid))
    tiles = sum(ceil_div(size, record.bm) for size in shape.groups) if shape.groups else len(tiles_m) * shape.batch
    return Execution(
        matrices.products,
        ctas,
        tiles * len(tiles_n),
        tuple(findings),
        tuple(str(report) for report in session.reports if not _is_fault(record, report)),
        launch.counters if launch else None,
    )


def _executed_tiles(shape: Shape, record: Record) -> tuple[list[int], list[int]]:
    """Rows and columns of tiles; the tiles where they cross are executed. Without ``shape.corners`` these are all.

    With it, they are the first and last row of tiles, and the first and last column of tiles of the first and of the
    last slice of columns.
    """

    tiles_m, tiles_n = ceil_div(shape.m, record.bm), ceil_div(shape.n, record.bn)
    if not shape.corners:
        return list(range(tiles_m)), list(range(tiles_n))
    width = tiles_n  # how many columns of tiles a slice of columns has
    if stride := shape.swizzle_stride or record.launch_options.get("swizzle_stride"):
        width = ceil_div(tiles_n, ceil_div(tiles_n * record.bn, stride))
    ends = {0, width - 1, (tiles_n - 1) // width * width, tiles_n - 1}
    return sorted({0, tiles_m - 1}), sorted(ends)


def _corner_ctas(grid: tuple[int, int, int], tiles_m: list[int], tiles_n: list[int], split_k: int) -> Array:
    """The linear indices of the CTAs that compute these tiles, with all their slices of k, and of the grid's last
    CTA."""
    x_size, y_size, z_size = grid
    # z is the slice of columns and x the column of tiles in it. y counts rows of tiles, and in each the slices of k.
    rows = [tile * split_k + part for tile in tiles_m for part in range(split_k)]
    numbers = {(tile // x_size * y_size + y) * x_size + tile % x_size for tile in tiles_n for y in rows}
    return np.array(sorted(numbers | {x_size * y_size * z_size - 1}))


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


def _extents(tiles: list[int], tile: int, extent: int) -> Array:
    """The rows or columns of a matrix that lie in these tiles; ``tile``: the size of a tile."""
    return np.concatenate([np.arange(i * tile, min((i + 1) * tile, extent)) for i in tiles])


def _compare_product(record: Record, inputs: str, product: ComputedProduct, order: list[list[list[int]]]) -> Comparison:
    """Compares one product's D, and its auxiliary output if it has one. ``order``: see ``Record.k_order``."""
    a, b, d, fused_operands, aux = product
    if record.fusion:
        fused_product = fused.FusedProduct(
            record.acc, record.fusion, inputs, a, b, fused_operands, order, record.output
        )
        return fused_product.compare_stored(d, aux)
    return compare(record.acc, inputs, a, b, d, order)


def run_case(
    record: Record, artifact: Artifact, library: Path, shape: Shape, inputs: str, **modes: Unpack[Modes]
) -> tuple[Case, Execution]:
    """Executes one problem and compares its results. Arguments and errors: see ``execute``."""
    execution = execute(record, artifact, library, shape, inputs, **modes)
    comparison, wrong = Comparison("nothing", 0), []
    if execution.ctas:
        order = record.k_order(execution.a.shape[1])
        products = [product for product in execution.products if product.d.size]
        comparisons = [_compare_product(record, inputs, product, order) for product in products]
        comparison = max(comparisons, key=lambda part: (part.wrong, part.max_error), default=comparison)
        wrong = [finding for part in comparisons for finding in part.findings]
    compared = comparison.compared + (", warpgroups in adverse order" if modes.get("adverse") else "")
    findings = [*execution.findings, *wrong]
    case = shape.case(
        inputs, execution.ctas, compared, findings, comparison.max_error, comparison.allowed, execution.remarks
    )
    return case, execution


def verdict_origin(rounding: emulator.RoundingName, machine_code: bool = False) -> str:
    """How a verdict's field ``on`` names this emulator: whether it executed machine code, and the rounding of its
    tensor cores if that is not its default model."""
    form = IN_MACHINE_CODE if machine_code else IN_PTX
    return form if rounding == "model" else f"{form}, {rounding} rounding"


def validate(
    record: Record,
    artifact: Artifact,
    library: Path,
    rounding: emulator.RoundingName = "model",
    machine_code: bool = False,
) -> Verdict:
    """The verdict on one built kernel, from the emulator. Arguments and errors: see ``execute``."""
    cases: list[Case] = []
    figures: dict[str, float] = {}
    shapes = stress_shapes(record)
    thorough = thorough_shape(record, shapes)
    for shape in shapes:
        # Hazards do not depend on data, so one kind of inputs is enough to find them.
        for number, inputs in enumerate(kinds(shape, shape == thorough, record.output.exact)):
            case, execution = run_case(
                record, artifact, library, shape, inputs,
                hazards=number == 0, counters=number == 1 and shape == thorough, rounding=rounding, seed=len(cases),
                machine_code=machine_code,
            )  # fmt: skip
            cases.append(case)
            figures |= summary(record, execution)
    if record.waits_by_mbarriers:
        largest = max(shapes, key=lambda shape: shape.m * shape.n * shape.k)
        modes = Modes(adverse=True, rounding=rounding, machine_code=machine_code)
        cases.append(run_case(record, artifact, library, largest, "binary", **modes)[0])
    return Verdict(
        record=record.name,
        digest=artifact.digest,
        on=verdict_origin(rounding, machine_code),
        cases=tuple(cases),
        counters=figures,
        machine_code=MachineCode.of(artifact.cubin.read_bytes()) if machine_code else None,
    )


def summary(record: Record, execution: Execution) -> dict[str, float]:
    """The counters of a launch as one flat table, without instructions that the kernel does not have.

    Figures per k-tile are per warp; those of wgmma, tcgen05 and mbarriers are per CTA. Empty without counters.
    """
    counters = execution.counters
    if counters is None:
        return {}
    steps = execution.tiles * ceil_div(execution.a.shape[1], record.k_step)
    warp_steps = steps * record.threads // 32
    table: dict[str, float] = {
        "mma_per_k_tile": counters.mma / warp_steps,
        "wgmma_per_k_tile": counters.wgmma / steps,
        "tcgen05_per_k_tile": counters.tcgen05 / steps,
        "ldmatrix_per_k_tile": counters.ldmatrix / warp_steps,
        "mbarrier_waits_per_k_tile": counters.mbarrier_waits / steps,
        "bytes tma load": counters.bulk_load_bytes,
        "bytes tma delivered": counters.bulk_delivered_bytes,
        "bytes tma store": counters.bulk_store_bytes,
    }
    table["barriers"] = counters.barriers
    table["instructions_per_k_tile"] = sum(counters.instructions.values()) / warp_steps
    for kind, banks in counters.shared_banks.items():
        table[f"bank_conflicts {kind}"] = banks.conflicts
    for kind, traffic in counters.global_traffic.items():
        table[f"sectors_over_ideal {kind}"] = round(traffic.sectors / max(1, traffic.ideal), 3)
        table[f"bytes {kind}"] = traffic.bytes
    for kind, size in counters.unique_bytes.items():
        table[f"unique_bytes {kind}"] = size
    return executed(table)


def validate_all(
    work: Iterable[tuple[Record, Artifact]],
    library: Path,
    jobs: int,
    rounding: emulator.RoundingName = "model",
) -> Generator[Verdict | Lost, None, None]:
    """Verdicts on many kernels as they come, from ``jobs`` processes; ``Lost`` names the record whose process died.

    Closing the iterator ends the processes. Raises EmulatorError without a C compiler.
    """
    emulator.runtime_path()  # built once, before the worker processes need it
    tasks = (Task(record.name, (record, artifact, library, rounding)) for record, artifact in work)
    return workers.answers(validate, tasks, jobs)
