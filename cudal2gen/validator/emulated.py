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
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from cudal2gen.generation.compiler import Artifact
from cudal2gen.kernel import Record, ceil_div
from cudal2gen.launch.launcher import LaunchError, OpenKernel
from cudal2gen.results import IN_MACHINE_CODE, IN_PTX, Case, MachineCode, Verdict, executed
from cudal2gen.validator import fused
from cudal2gen.validator.correctness import Comparison, compare
from cudal2gen.validator.emulated_matrices import ComputedProduct, EmulatedMatrices
from cudal2gen.validator.problems import CLUSTERS, Shape, kinds, stress_shapes, thorough_shape
from kernelproof import emulator
from kernelproof.ground import workers
from kernelproof.ground.workers import Lost, Task

Array = NDArray[Any]

LOOP_ROOM = 10_000  # backward branches allowed for copies and stores, in addition to those for steps of k


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
    matrices = EmulatedMatrices(record, shape, rows, cols, inputs, seed, packed=counters)
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
