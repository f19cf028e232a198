"""Is a built kernel right? Executes its PTX on the CPU, through the launcher, and compares with NumPy.

What is compared, by inputs; the reference is the fp64 product:

- ``binary``, 0 and 1: equality up to 2048, above it an fp32 accumulator gives the reference rounded to fp16, an fp16
  accumulator at least 2048. ``sparse``: the same with so few ones that the reference stays below 2048.
- ``integers``, -2 to 2: equality. All partial sums stay below 2048, where fp16 is exact.
- ``normal``: an error bound from the accumulator, see ``error_bound``. ``cancelling``: the same where the sum is zero,
  so that D shows the errors of rounding alone.
- ``special``: NaN and infinities in A and B reach exactly the elements of D that the reference says.

Every problem is executed once with hazard detection; the largest of a kernel whose warpgroups wait for each other by
mbarriers once more, in an order that is adverse to it. Leading dimensions are longer than the rows where nothing is
baked in, and what lies between is NaN in A and B, forbidden in D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudal2gen import emulator
from cudal2gen.compiler import Artifact
from cudal2gen.kernel import Record, aligned, ceil_div
from cudal2gen.launcher import LaunchError, OpenKernel
from cudal2gen.results import Case, Verdict

Array = NDArray[Any]

INPUTS = ("binary", "sparse", "integers", "normal", "cancelling", "special")
EXACT = 2048  # the last integer up to which fp16 has them all
SMALL_PROBLEM = 1 << 24  # m n k up to which a record's own problem is executed as a whole
SMS = 2


@dataclass(frozen=True)
class Shape:
    """A problem to execute. ``swizzle_stride`` and ``options``: launch options in place of the record's own.

    ``corners``: the corner CTAs of the grid only.
    """

    m: int
    n: int
    k: int
    swizzle_stride: int | None = None
    corners: bool = False
    options: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Execution:
    """What one launch gave: the part of D that was computed, and the operands of that part."""

    a: Array
    b: Array
    d: Array
    ctas: int
    tiles: int
    findings: tuple[str, ...]
    counters: emulator.Counters | None


def stress_shapes(record: Record) -> list[Shape]:
    """Problems that exercise a record.

    One and several CTAs in each direction; k below, at and above the ring; ragged edges where they are predicated;
    slices of several widths; the record's own problem where it is small.
    """
    bm, bn, bk = record.bm, record.bn, record.k_step
    stages = record.ring_steps
    least = record.split_k
    below, at, above = (bk * max(least, tiles) for tiles in (stages - 1, stages, stages + 2))
    shapes = [(bm, bn, bk * least), (2 * bm, bn, below), (bm, 2 * bn, at), (2 * bm, 3 * bn, above)]
    if record.split_k > 1:
        shapes += [(bm, bn, bk * (least + 1)), (bm, bn, bk * least * (stages + 1))]
    if record.predicated:
        shapes += [(2 * bm - 3, 2 * bn - 5, above - 8), (bm + 1, bn + 8, bk * least - 8)]
        # A last k-tile of one vector, wherever in the loop it comes; every remainder of n; edges all over the tile.
        shapes += [(1, 1, bk * tiles + 8) for tiles in sorted({least - 1, least, least + stages + 1})]
        shapes += [(bm - e, bn * e // 64 * 8 + e, bk * least) for e in range(2, 8)]
        shapes += [(bm * e // 8 + 1, bn, bk * least) for e in range(2, 8)]
    baked = [(m, n, record.baked_k or k) for m, n, k in shapes]
    if record.m * record.n * record.k <= SMALL_PROBLEM:
        baked.append((record.m, record.n, record.k))
    if record.caller_pads:
        baked = [(aligned(m, bm), aligned(n, bn), aligned(k, bk)) for m, n, k in baked]
    fitting = [
        (m, n, k)
        for m, n, k in dict.fromkeys(baked)
        if k > 0 and ceil_div(k, bk) >= record.split_k and k <= (record.most_k or k)
    ]
    found = [
        Shape(m, n, k, stride)
        for m, n, k in fitting
        for stride in [record.launch_options.get("swizzle_stride"), *record.other_strides(n)]
    ]
    # Other orders of tiles than the record's own.
    m, n, k = 2 * bm, 3 * bn, record.baked_k or bk * least
    return found + [Shape(m, n, k, options=tuple(options.items())) for options in record.other_options]


def own_shape(record: Record) -> Shape:
    """The record's own problem; only the corners of its grid where it is too large to execute as a whole.

    Where CTAs of the grid are not tiles of the problem, a large one shrinks to three tiles in each direction.
    """
    m, n, k = record.m, record.n, record.k
    if record.caller_pads:
        m, n, k = record.tiles_m * record.bm, record.tiles_n * record.bn, aligned(k, record.k_step)
    if m * n * k <= SMALL_PROBLEM:
        return Shape(m, n, k)
    if not record.grid_is_tiles:
        return Shape(min(m, 3 * record.bm), min(n, 3 * record.bn), k)
    return Shape(m, n, k, corners=True)


def operands(inputs: str, m: int, n: int, k: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """A (m,k) and B (n,k), fp16, of one kind of inputs."""
    sizes = ((m, k), (n, k))
    if inputs in ("binary", "sparse"):
        # The mean of the reference is k times the square of the density.
        density = 0.5 if inputs == "binary" else min(0.5, (EXACT / 4 / k) ** 0.5)
        a, b = ((rng.random(size, np.float32) < density).astype(np.float16) for size in sizes)
        return a, b
    if inputs == "integers":
        a, b = (rng.integers(-2, 3, size, np.int8).astype(np.float16) for size in sizes)
        return a, b
    a, b = (rng.standard_normal(size, np.float32).astype(np.float16) for size in sizes)
    if inputs == "cancelling":
        half = k // 2
        a[:, half : 2 * half], b[:, half : 2 * half] = -a[:, :half][:, ::-1], b[:, :half][:, ::-1]
        a, b = a * np.float16(8), b * np.float16(8)
        a[:, 2 * half :] = 0
    if inputs == "special":
        a[0, k // 2], a[m - 1, k - 1], b[n - 1, 0], b[n // 2, k // 3] = np.inf, np.nan, -np.inf, np.nan
    return a, b


def compare(
    acc: str, inputs: str, a: Array, b: Array, d: Array, order: list[list[list[int]]]
) -> tuple[str, float, float | None, list[str]]:
    """What was compared, the largest error, the error allowed there (None for equality), and what was found wrong."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        reference = wide_a @ wide_b.T
    if inputs == "special":
        same_nan = np.isnan(reference) == np.isnan(d)
        same_inf = np.where(np.isinf(reference) | np.isinf(d), reference == d, True) | np.isnan(reference)
        wrong = ~(same_nan & same_inf)
        return "NaN and infinities in their places", float(wrong.sum()), None, _wrong(wrong, reference, d)
    error = np.abs(d.astype(np.float64) - reference)
    error[np.isnan(error)] = np.inf
    worst = float(error.max())
    if inputs in ("normal", "cancelling"):
        allowed = error_bound(acc, wide_a, wide_b, reference, order)
        at = np.unravel_index(np.argmax(error / allowed), error.shape)
        found = _wrong(error > allowed, reference, d)
        return "error bound of the accumulator", float(error[at]), float(allowed[at]), found
    exact = np.abs(reference) <= EXACT
    rounded = d != reference.astype(np.float16)
    wrong = rounded if acc == "f32" else np.where(exact, rounded, ~(d >= EXACT))
    said = "equality" if exact.all() else "equality up to 2048"
    return said, float(error[exact].max(initial=0.0)) if exact.any() else worst, None, _wrong(wrong, reference, d)


def error_bound(acc: str, a: Array, b: Array, reference: Array, order: list[list[list[int]]]) -> Array:
    """Largest |D - reference| that rounding explains, elementwise. a (m,k), b (n,k), reference (m,n), all fp64.

    ``order``: the k of each partial sum, see ``k_order``. fp32 accumulator: k additions, each with a relative error of
    2^-24 of the sum of magnitudes; then one rounding to fp16. fp16 accumulator: a partial sum is rounded to fp16 after
    every 8 of k at most (mma.sync may take its 16 in two steps), which costs 2^-11 of the sum so far and of the error
    it carries; what is added between two roundings has at least fp32's precision, and so has the sum of slices.
    """
    within: Array = a.shape[1] * 2.0**-24 * (np.abs(a) @ np.abs(b).T)
    if acc == "f32":
        stored: Array = within + 2.0**-11 * (np.abs(reference) + within) + 2.0**-25
        return stored
    error = within
    for part in order:
        partial_sum, carried = np.zeros_like(reference), np.zeros_like(reference)
        for step in part:
            partial_sum += a[:, step] @ b[:, step].T
            carried += 2.0**-11 * (np.abs(partial_sum) + carried) + 2.0**-25
        error = error + carried
    return error if len(order) == 1 else error + 2.0**-11 * (np.abs(reference) + error) + 2.0**-25


def _wrong(wrong: Array, reference: Array, d: Array) -> list[str]:
    if not wrong.any():
        return []
    rows, cols = np.nonzero(wrong)
    row, col = int(rows[0]), int(cols[0])
    return [
        f"wrong-value: {len(rows)} of {wrong.size} elements, first at row {row}, column {col}: "
        f"{d[row, col]} instead of {reference[row, col]:.6g}"
    ]


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
    seed: int = 0,
) -> Execution:
    """Launches a built kernel on one problem in the emulator. Never raises for a faulty kernel: that is a finding.

    ``hazards``, ``counters``, ``adverse``: see ``emulator.Options``.
    """
    m, n, k = shape.m, shape.n, shape.k
    # Elements between rows. A baked k must be packed, and what is counted should be as a user has it.
    pad_k, pad_n = 0 if record.baked_k or counters else 8, 0 if counters else 8
    lda, ldd = aligned(k) + pad_k, (aligned(n) if record.stores_vectors else n) + pad_n
    ldb = lda if record.layout == "tn" else aligned(n) + pad_n
    tiles_m, tiles_n = _executed(shape, record)
    rows, cols = _covered(tiles_m, record.bm, m), _covered(tiles_n, record.bn, n)
    a, b = operands(inputs, len(rows), len(cols), k, np.random.default_rng(seed))

    memory = emulator.Memory()
    buffer_a = memory.allocate(m * lda * 2, "inout", name="A")
    buffer_b = memory.allocate((n if record.layout == "tn" else k) * ldb * 2, "inout", name="B")
    buffer_d = memory.upload(np.broadcast_to(np.float16(0), (m, ldd)), "output", region=np.s_[:, :n], name="D")
    _fill(buffer_a, (m, lda), rows, np.arange(k), a)
    if record.layout == "tn":
        _fill(buffer_b, (n, ldb), cols, np.arange(k), b)
    else:
        _fill(buffer_b, (k, ldb), np.arange(k), cols, b.T)
    buffer_a.role = buffer_b.role = "input"

    options = dict(record.launch_options)
    if shape.swizzle_stride is not None:
        options["swizzle_stride"] = shape.swizzle_stride
    options |= dict(shape.options)
    gpu = record.target
    # An SM holds one CTA, so that a persistent kernel's take several tiles each.
    device = emulator.Device(
        sm_count=SMS * record.cluster_ctas,
        smem_optin_bytes=gpu.smem_block_bytes,
        capability=_capability(gpu.sm),
        name=gpu.title,
        smem_per_sm_bytes=gpu.smem_sm_bytes,
        threads_per_sm=record.threads,
    )
    chosen = None
    if shape.corners:
        chosen = partial(_chosen_ctas, tiles_m=tiles_m, tiles_n=tiles_n, split_k=record.split_k)
    findings: list[str] = []
    # No loop of a right kernel turns more often than all its tiles have steps; the rest is room for copies and stores.
    turns = 10_000 + 16 * ceil_div(m, record.bm) * ceil_div(n, record.bn) * ceil_div(k, record.k_step)
    modes = emulator.Options(hazards=hazards, counters=counters, loop_limit=turns, adverse=adverse)
    with emulator.session(memory, device, modes, cta_filter=chosen) as session:
        try:
            with OpenKernel(library, artifact.directory, options, emulator.runtime_path()) as kernel:
                size = kernel.workspace_bytes(m, n, k)
                workspace = memory.allocate(size, "scratch", name="workspace").address if size else 0
                pointers = (buffer_a.address, lda, buffer_b.address, ldb, buffer_d.address, ldd)
                kernel.launch(*pointers, m, n, k, workspace)
        except LaunchError as error:
            findings.append(f"launch-refused: {error}")
    findings += [str(report) for report in session.reports] + [f"emulator: {error}" for error in session.errors]
    d = buffer_d.bytes().view(np.float16).reshape(m, ldd)[np.ix_(rows, cols)]
    launch = session.launches[-1] if session.launches else None
    executed = 0 if launch is None else len(launch.ctas) if launch.ctas is not None else int(np.prod(launch.grid))
    return Execution(
        a, b, d, executed, len(tiles_m) * len(tiles_n), tuple(findings), launch.counters if launch else None
    )


def _executed(shape: Shape, record: Record) -> tuple[list[int], list[int]]:
    """Rows and columns of tiles that are executed: all of them, or the first and last of the grid and of its slices."""
    tiles_m, tiles_n = ceil_div(shape.m, record.bm), ceil_div(shape.n, record.bn)
    if not shape.corners:
        return list(range(tiles_m)), list(range(tiles_n))
    width = tiles_n
    if stride := shape.swizzle_stride or record.launch_options.get("swizzle_stride"):
        width = ceil_div(tiles_n, ceil_div(tiles_n * record.bn, stride))
    ends = {0, width - 1, (tiles_n - 1) // width * width, tiles_n - 1}
    return sorted({0, tiles_m - 1}), sorted(ends)


def _chosen_ctas(grid: tuple[int, int, int], tiles_m: list[int], tiles_n: list[int], split_k: int) -> Array:
    """Linear numbers of the CTAs of these tiles, with all their slices of k, and of the grid's last CTA."""
    x_size, y_size, z_size = grid
    rows = [tile * split_k + part for tile in tiles_m for part in range(split_k)]
    chosen = {(tile // x_size * y_size + y) * x_size + tile % x_size for tile in tiles_n for y in rows}
    return np.array(sorted(chosen | {x_size * y_size * z_size - 1}))


def _covered(tiles: list[int], tile: int, extent: int) -> Array:
    return np.concatenate([np.arange(i * tile, min((i + 1) * tile, extent)) for i in tiles])


def _fill(buffer: emulator.Buffer, shape: tuple[int, int], rows: Array, cols: Array, values: Array) -> None:
    """Writes a part of a matrix; the rest of the rows that it touches is NaN."""
    matrix = buffer.bytes().view(np.float16).reshape(shape)
    matrix[rows] = np.nan
    matrix[np.ix_(rows, cols)] = values


def _capability(sm: str) -> tuple[int, int]:
    number = sm.removeprefix("sm_")
    return int(number[:-1]), int(number[-1])


def run_case(
    record: Record, artifact: Artifact, library: Path, shape: Shape, inputs: str, **options: Any
) -> tuple[Case, Execution]:
    """Executes one problem with one kind of inputs and compares."""
    done = execute(record, artifact, library, shape, inputs, **options)
    if done.ctas:
        compared, worst, allowed, wrong = compare(record.acc, inputs, done.a, done.b, done.d, record.k_order(shape.k))
    else:
        compared, worst, allowed, wrong = "nothing", 0.0, None, []
    if options.get("adverse"):
        compared += ", warpgroups in adverse order"
    findings = (*done.findings, *wrong)
    case = Case(
        m=shape.m,
        n=shape.n,
        k=shape.k,
        swizzle_stride=shape.swizzle_stride,
        inputs=inputs,
        compared=compared,
        max_error=worst,
        allowed=allowed,
        ctas=done.ctas,
        findings=findings,
        options=dict(shape.options),
    )
    return case, done


def validate(record: Record, artifact: Artifact, library: Path) -> Verdict:
    """The verdict on one built kernel, from the emulator. ``library``: the launcher."""
    cases: list[Case] = []
    counters: dict[str, float] = {}
    shapes = stress_shapes(record)
    largest = max(shapes, key=lambda shape: (shape.k, shape.m * shape.n))
    for shape in shapes:
        # Hazards do not depend on data: one kind of inputs finds them.
        for number, inputs in enumerate(kinds(shape, thorough=shape == largest)):
            case, done = run_case(
                record, artifact, library, shape, inputs,
                hazards=number == 0, counters=number == 1 and shape == largest, seed=len(cases),
            )  # fmt: skip
            cases.append(case)
            counters |= summary(record, done)
    if record.waits_by_mbarriers:
        most = max(shapes, key=lambda shape: shape.m * shape.n * shape.k)
        cases.append(run_case(record, artifact, library, most, "binary", adverse=True)[0])
    return Verdict(
        record=record.name,
        digest=artifact.digest,
        on="emulator",
        cases=tuple(cases),
        counters=counters,
    )


def kinds(shape: Shape, thorough: bool) -> Iterator[str]:
    """The kinds of inputs that a problem is executed with."""
    yield "binary"
    if shape.k > 2 * EXACT:
        yield "sparse"
    if thorough:
        yield from ("integers", "normal", "special")


def summary(record: Record, done: Execution) -> dict[str, float]:
    """What a launch counted, as one flat table; figures per k-tile are per warp. Empty without counters."""
    counters = done.counters
    if counters is None:
        return {}
    work = done.tiles * ceil_div(done.a.shape[1], record.k_step) * record.threads // 32
    table: dict[str, float] = {
        "mma_per_k_tile": counters.mma / work,
        "ldmatrix_per_k_tile": counters.ldmatrix / work,
        "barriers": counters.barriers,
        "instructions_per_k_tile": sum(counters.instructions.values()) / work,
    }
    if counters.bulk_boxes:
        steps = done.tiles * ceil_div(done.a.shape[1], record.k_step)
        table |= {
            "wgmma_per_k_tile": counters.wgmma / steps,
            "mbarrier_waits_per_k_tile": counters.mbarrier_waits / steps,
            "bytes tma load": counters.bulk_load_bytes,
            "bytes tma delivered": counters.bulk_delivered_bytes,
            "bytes tma store": counters.bulk_store_bytes,
        }
    for kind, banks in counters.shared_banks.items():
        table[f"bank_conflicts {kind}"] = banks.conflicts
    for kind, traffic in counters.global_traffic.items():
        table[f"sectors_over_ideal {kind}"] = round(traffic.sectors / max(1, traffic.ideal), 3)
        table[f"bytes {kind}"] = traffic.bytes
    for kind, size in counters.unique_bytes.items():
        table[f"unique_bytes {kind}"] = size
    return table


def validate_all(
    work: Iterable[tuple[Record, Artifact]],
    library: Path,
    jobs: int,
    done: Callable[[Verdict], None] = lambda _: None,
) -> list[Verdict]:
    """Verdicts on many kernels, in ``jobs`` processes; ``done`` is called with each as it comes."""
    verdicts = []
    with ProcessPoolExecutor(jobs) as pool:
        futures = [pool.submit(validate, record, artifact, library) for record, artifact in work]
        try:
            for future in as_completed(futures):
                verdicts.append(future.result())
                done(verdicts[-1])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return verdicts
