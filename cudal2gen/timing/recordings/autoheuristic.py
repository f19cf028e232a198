"""Reads recorded timings of Triton's matrix products, in the format of PyTorch's AutoHeuristic.

A file has a line of JSON about the device, a line of column names, and a row per timing: m, k, n, types, strides, a
``choice`` such as ``type=triton_BLOCK-M=64_BLOCK-K=32_BLOCK-N=128_numstages=3_numwarps=4`` or ``extern_mm`` (cuBLAS),
and ``feedback``, the milliseconds of a product whose operands are not in the L2. Public sets of the A100 and the H100
are in github.com/AlnisM/autoheuristic-datasets.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import NamedTuple

from cudal2gen.kernel import Layout, Problem
from kernelproof.ground.element import F16
from kernelproof.ground.errors import WrongInput, reading

# How a recording names a Triton kernel, and the GPU on which it was timed: by compute capability.
CHOICE = re.compile(r"type=triton_BLOCK-M=(\d+)_BLOCK-K=(\d+)_BLOCK-N=(\d+)_numstages=(\d+)_numwarps=(\d+)")
GPUS = {(8, 0): "a100", (9, 0): "h100"}
# Columns that describe a product: types, extents, strides of A along m and k, and strides of B along k and n.
OPERANDS = (
    "mat1_dtype", "mat2_dtype", "m", "n", "k", *(f"mat{which}_stride_{axis}" for which in (1, 2) for axis in (0, 1)),
)  # fmt: skip
MIN_TILES = 10  # with fewer tiles a choice among them means little, and the problem is left out


class Tile(NamedTuple):
    """A configuration of Triton's kernel, in Triton's terms: ``stages`` is its ``num_stages``."""

    bm: int
    bn: int
    bk: int
    stages: int
    warps: int


class RecordedSizes(NamedTuple):
    """Extents of D (m, n) = A (m, k) B (k, n), in elements."""

    m: int
    n: int
    k: int


class RecordedTiming(NamedTuple):
    """One timing. ``layout``: how B is stored; None unless A is packed by rows and B packed either way. ``tile``: None
    for cuBLAS."""

    gpu: str
    sizes: RecordedSizes
    layout: Layout | None
    tile: Tile | None
    us: float


class Recording(NamedTuple):
    """The median time of each tile for a problem, in microseconds. ``vendor_us``: that of cuBLAS, None if not timed."""

    sizes: RecordedSizes
    tiles: dict[Tile, float]
    vendor_us: float | None


def load(folder: Path) -> dict[str, list[Recording]]:
    """The recordings in the files of a folder and its subfolders, by GPU.

    They are of fp16 problems whose rows are multiples of 16 bytes, with at least ``MIN_TILES`` tiles. Raises WrongInput
    if no file has recordings.
    """
    rows: dict[tuple[str, RecordedSizes], dict[Tile | None, list[float]]] = {}
    for path in sorted(folder.rglob("*.txt")):
        for row in timings(path):
            rows.setdefault((row.gpu, row.sizes), {}).setdefault(row.tile, []).append(row.us)
    recordings: dict[str, list[Recording]] = {}
    for (gpu, sizes), times in sorted(rows.items()):
        tiles = {tile: median(us) for tile, us in times.items() if tile is not None}
        if len(tiles) >= MIN_TILES:
            vendor = median(times[None]) if None in times else None
            recordings.setdefault(gpu, []).append(Recording(sizes, tiles, vendor))
    if not recordings:
        raise WrongInput(
            f"{folder}: no recorded timings of an A100 or H100 in *.txt here: name the folder into which the "
            "archives of github.com/AlnisM/autoheuristic-datasets are unpacked"
        )
    return recordings


def problems(paths: Iterable[Path]) -> dict[Problem, Recording]:
    """The recordings in files and folders, by problem. Unlike ``load`` this tells layouts of B apart.

    Problems whose A is stored by columns, or with fewer than ``MIN_TILES`` tiles, are left out. Sums are in fp32, as
    Triton's are.
    """
    times: dict[tuple[str, RecordedSizes, Layout], dict[Tile | None, list[float]]] = {}
    for path in paths:
        for file in sorted(path.rglob("*.txt")) if path.is_dir() else [path]:
            for row in timings(file):
                if row.layout is not None:
                    times.setdefault((row.gpu, row.sizes, row.layout), {}).setdefault(row.tile, []).append(row.us)
    recordings = {}
    for (gpu, sizes, layout), times_of in times.items():
        tiles = {tile: median(us) for tile, us in times_of.items() if tile is not None}
        if len(tiles) >= MIN_TILES:
            vendor = median(times_of[None]) if None in times_of else None
            problem = Problem(gpu=gpu, acc="f32", layout=layout, m=sizes.m, n=sizes.n, k=sizes.k)
            recordings[problem] = Recording(sizes, tiles, vendor)
    return recordings


def timings(path: Path) -> Iterator[RecordedTiming]:
    """The timings in a file; none if it has another format or GPU. Raises WrongInput for rows without a time."""
    try:
        yield from _timings(path)
    except (IndexError, ValueError) as error:
        raise WrongInput(f"{path}: a row has no timing ({error!r}); unpack the archive anew, or move it") from None


def _timings(path: Path) -> Iterator[RecordedTiming]:
    """The timings of one of PyTorch's files; none if it does not name a known GPU."""
    # A file has about a hundred rows of each product and of each choice, so each text is parsed once.
    product, choice = cache(_product), cache(_choice)
    with reading(path), path.open(encoding="utf-8", errors="replace", newline="") as lines:
        gpu = _gpu(next(lines, ""))
        if gpu is None:
            return
        rows = csv.reader(_without_headers(lines))
        if not (names := next(rows, [])):
            return
        operands = itemgetter(*map(names.index, OPERANDS))
        choice_column, time_column = names.index("choice"), names.index("feedback")
        for row in rows:
            if (sizes_and_layout := product(operands(row))) is not None:
                for tile in choice(row[choice_column]):
                    yield RecordedTiming(gpu, *sizes_and_layout, tile, float(row[time_column]) * 1e3)


def _product(operands: tuple[str, ...]) -> tuple[RecordedSizes, Layout | None] | None:
    """Sizes and layout by the columns ``OPERANDS``. None if the type is not fp16, or if rows are no whole vectors."""
    if set(operands[:2]) != {f"torch.{F16.dtype}"}:
        return None
    m, n, k, *strides = map(int, operands[2:])
    if n % F16.vector or any(stride % F16.vector for stride in strides if stride != 1):
        return None
    sizes = RecordedSizes(m, n, k)
    return sizes, _layout(sizes, strides)


def _choice(text: str) -> tuple[Tile | None, ...]:
    """The choice in a tuple: a tile, or None for cuBLAS. Empty for any other choice."""
    if match := CHOICE.fullmatch(text):
        bm, bk, bn, stages, warps = map(int, match.groups())
        return (Tile(bm, bn, bk, stages, warps),)
    return (None,) if text == "extern_mm" else ()


def _layout(sizes: RecordedSizes, strides: Sequence[int]) -> Layout | None:
    """How B is stored; None unless A is packed by rows and B packed either way.

    ``strides``: of A along m and k, of B along k and n, in elements.
    """
    if strides[:2] != [sizes.k, 1]:
        return None
    return "nn" if strides[2:] == [sizes.n, 1] else "tn" if strides[2:] == [1, sizes.k] else None


def _gpu(header: str) -> str | None:
    """The GPU that the first line of a file names; None for others and for lines of another format."""
    try:
        major, minor = json.loads(header)["device_capa"]
    except (ValueError, KeyError, TypeError):
        return None
    return GPUS.get((major, minor))


def _without_headers(lines: Iterable[str]) -> Iterator[str]:
    """The lines without blank ones and repeated headers: a file may be a concatenation."""
    names = ""
    for line in lines:
        if not line.strip() or line.startswith("{") or line == names:
            continue
        names = names or line
        yield line
