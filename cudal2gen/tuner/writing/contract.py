"""Describes the launch of a record's kernel to the grader ``check_source``.

The description states in expressions of m, n and k what ``launcher.cpp`` does on a device: grid, arguments, tensor
maps and workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import Record, aligned
from cudal2gen.kernel.launch import Cluster, Launch, Tiles, Tma
from cudal2gen.kernel.problem import AlongK
from kernelproof.grading import Tolerance

Array = NDArray[np.float64]

PERSISTENT_CLUSTERS = 2  # clusters of a persistent grid; few, so that each of them computes several tiles
POLICIES = (0x1000000000000000, 0x12F0000000000000, 0x14F0000000000000)  # L2 cache policies, as in ``launch.h``


def description(record: Record) -> dict[str, Any]:
    """The keyword arguments of ``check_source``, except source and limits."""
    launch = record.launch
    element, output = record.element.name, record.output.name
    shape_a, shape_b = (shape.replace(",", ", ") for shape in record.along_k.shapes)
    buffers = {"a": f"in:{element}[{shape_a}]", "b": f"in:{element}[{shape_b}]", "d": f"out:{output}[m, n]"}
    workspace: list[int | str] = [0, 0]
    if _has_workspace(launch):
        # With stream_k each running cluster stores at most two partial tiles of the last wave.
        is_stream_k = isinstance(launch, Tma) and launch.stream_k
        tiles = f"{PERSISTENT_CLUSTERS if is_stream_k else _tiles(launch)} * {_cluster(launch)}"
        parts_of_tile = 2 if is_stream_k else launch.split_k
        buffers["partials"] = f"scratch:f32[{tiles} * {parts_of_tile * launch.bm * launch.bn}]"
        buffers["arrivals"] = f"scratch:u32[{tiles}]=zeros"
        workspace = ["partials", "arrivals"]
    shapes, draws = _shapes(record)
    return {
        "reference": _reference(record.along_k),
        "shapes": shapes,
        "draws": draws,
        "buffers": buffers,
        "launches": [_launch(record, launch, workspace)],
        "tolerance": Tolerance(terms="k"),
        "accumulator": record.acc,
        "operands": element,
    }


def _reference(along_k: AlongK) -> Callable[[Array, Array], Array]:
    """A function that computes D from A and B as they are stored."""
    return lambda a, b: (a if along_k.a else a.T) @ (b.T if along_k.b else b)


def _has_workspace(launch: Launch) -> bool:
    """Whether a launch passes memory for partial sums."""
    if isinstance(launch, Tiles):
        return launch.split_k > 1
    return isinstance(launch, Tma) and (launch.reduce == "workspace" or launch.stream_k > 0)


def _cluster(launch: Launch) -> int:
    """The number of CTAs of a cluster."""
    if isinstance(launch, Cluster | Tma) and launch.reduce == "cluster":
        return launch.split_k
    return launch.cluster_m * launch.cluster_n if isinstance(launch, Tma) else 1


def _tiles(launch: Launch) -> str:
    """The number of clusters that cover D, each with one tile for every CTA, as an expression."""
    along_m, along_n = (launch.cluster_m, launch.cluster_n) if isinstance(launch, Tma) else (1, 1)
    return f"ceil_div(m, {launch.bm * along_m}) * ceil_div(n, {launch.bn * along_n})"


def _bands(launch: Tma, along_n: int, width: int) -> str:
    """The struct ``Bands`` of a launch's text, as a list of expressions. ``width``: the tiles across a whole band."""
    rows, cols = (
        f"ceil_div({x}, {tile * ctas})" for x, tile, ctas in (
            ("m", launch.bm, launch.cluster_m), ("n", launch.bn, launch.cluster_n)
        )
    )  # fmt: skip
    along, across = (cols, rows) if along_n else (rows, cols)
    words = [str(along_n), along, across]
    for divisor in (f"({along} * {width})", str(width), f"max({across} % {width}, 1)"):
        shift = f"int(log2({divisor}))"
        words += [divisor, f"(2 ** (32 + {shift}) - 1) // {divisor}", shift]
    return f"words: {', '.join(words)}"


def _launch(record: Record, launch: Launch, workspace: list[int | str]) -> dict[str, Any]:
    """The entry of the list ``launches``: the kernel's arguments in the order of its signature, and its grid in CTAs.

    ``workspace``: the arguments for partial sums and arrival counters.
    """
    described: dict[str, Any] = {
        "entry": launch.entry, "block": launch.threads, "smem": launch.smem_bytes, "cluster": _cluster(launch),
    }  # fmt: skip
    ld_a, ld_b = (shape[-1] for shape in record.along_k.shapes)
    if isinstance(launch, Tma):
        options = record.launch_options
        rest = [_map("d", launch.box_d_rows, launch.box_d_rest_cols, record.output.bytes)]
        described["args"] = [
            *_maps(record, launch), "d", "n", "m", "n", "k",
            _bands(launch, options.get("raster_axis", 0), options.get("raster_group", 1)),
            POLICIES[options.get("hint_a", 0)], POLICIES[options.get("hint_b", 0)],
            *workspace, *(rest if launch.box_d_rest_cols else []),
        ]  # fmt: skip
        slices = (
            f"ceil_div(k, {launch.bk})" if launch.stream_k else launch.split_k if launch.reduce == "workspace" else 1
        )
        clusters = f"{_tiles(launch)} * {slices}"
        number = f"min({clusters}, {PERSISTENT_CLUSTERS})" if launch.persistent else clusters
        cooperative = _has_workspace(launch)
        return described | {"grid": f"({number}) * {_cluster(launch)}", "cooperative": cooperative}
    described["args"] = ["a", ld_a, "b", ld_b, "d", "n", "m", "n", "k", *workspace]
    if isinstance(launch, Cluster):
        return described | {"grid": f"{_tiles(launch)} * {_cluster(launch)}"}
    return described | {"grid": _grid(launch, record.launch_options)}


def _grid(launch: Launch, options: dict[str, int]) -> str:
    """The grid of the convention ``tiles``, as an expression."""
    grid_x, grid_y = f"ceil_div(n, {launch.bn})", f"ceil_div(m, {launch.bm}) * {launch.split_k}"
    raster = launch.raster if isinstance(launch, Tiles) else "plain"
    if raster == "persistent":
        return f"min({grid_x} * {grid_y}, {PERSISTENT_CLUSTERS})"
    if raster == "zsplit":
        slices = f"ceil_div({grid_x} * {launch.bn}, {options['swizzle_stride']})"
        return f"ceil_div({grid_x}, {slices}), {grid_y}, {slices}"
    return f"{grid_x}, {grid_y}"


def _maps(record: Record, launch: Tma) -> list[str]:
    """The tensor maps of A, B and D. A kernel that stores D without TMA does not read the map of D."""
    nbytes = record.element.bytes
    d = _map("d", launch.box_d_rows, launch.box_d_cols, record.output.bytes) if launch.box_d_cols else "map:d[1, 8]"
    return [
        _map("a", launch.box_a_rows, launch.box_a_cols, nbytes),
        _map("b", launch.box_b_rows, launch.box_b_cols, nbytes),
        d,
    ]


def _map(name: str, rows: int, cols: int, nbytes: int) -> str:
    """A tensor map whose boxes have these rows and columns. The swizzle follows from the bytes of a box's row."""
    row = cols * nbytes
    return f"map:{name}[{rows}, {cols}]/{row if row in (64, 128) else 32}"


def _shapes(record: Record) -> tuple[list[dict[str, int]], dict[str, tuple[int, int]]]:
    """The shapes to check, and for some extents the range from which further ones are drawn.

    The shapes have one step of k, and one step more than the ring holds. They are no multiples of the tile if the
    kernel allows that.
    """
    bm, bn, bk, launch = record.bm, record.bn, record.k_step, record.launch
    ring = record.ring_steps + 1
    steps = [max(record.split_k, count) for count in (1, ring)]
    # Rows across k, and rows of D that are stored in vectors, must start at a multiple of 16 bytes.
    vector, along = record.element.vector, record.along_k
    multiple_m = 1 if along.a else vector
    multiple_n = launch.d_vector if launch.stores_vectors else 1 if along.b else vector
    if not record.predicated:
        sizes = [(bm, 2 * bn, bk * steps[0]), (2 * bm, bn, bk * steps[1])]
        draws: dict[str, tuple[int, int]] = {}
    else:
        sizes = [
            (aligned(bm + 3, multiple_m), aligned(bn + 5, multiple_n), bk * steps[0]),
            (aligned(bm - 1, multiple_m), aligned(bn + 1, multiple_n), bk * steps[1] - vector),
        ]
        extents = (("m", bm, multiple_m), ("n", bn, multiple_n))
        draws = {name: (1, tile + tile // 2) for name, tile, multiple in extents if multiple == 1}
    most = record.most_k
    ks = [record.baked_k or (min(k, most) if most else k) for _, _, k in sizes]
    return [{"m": m, "n": n, "k": k} for (m, n, _), k in zip(sizes, ks, strict=True)], draws
