"""Recorded timings of Triton's matrix products, as PyTorch's AutoHeuristic writes them.

A file is a line of JSON about the device, a line of column names, and a row per timing: m, k, n, types, strides, a
``choice`` such as ``type=triton_BLOCK-M=64_BLOCK-K=32_BLOCK-N=128_numstages=3_numwarps=4`` or ``extern_mm`` (cuBLAS),
and ``feedback``, milliseconds of a product whose operands the L2 has forgotten. Public sets of the A100 and the H100:
github.com/AlnisM/autoheuristic-datasets.
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

CHOICE = re.compile(r"type=triton_BLOCK-M=(\d+)_BLOCK-K=(\d+)_BLOCK-N=(\d+)_numstages=(\d+)_numwarps=(\d+)")
GPUS = {(8, 0): "a100", (9, 0): "h100"}
# What a product depends on: types, extents, and strides of A along m and k, of B along k and n.
OPERANDS = (
    "mat1_dtype", "mat2_dtype", "m", "n", "k", *(f"mat{which}_stride_{axis}" for which in (1, 2) for axis in (0, 1)),
)  # fmt: skip
MIN_TILES = 10  # least tiles of a problem for a choice among them to be meaningful


class Tile(NamedTuple):
    """A configuration of Triton's kernel, in Triton's terms: ``stages`` is its ``num_stages``."""

    bm: int
    bn: int
    bk: int
    stages: int
    warps: int


class Sizes(NamedTuple):
    """D (m, n) = A (m, k) B (k, n)."""

    m: int
    n: int
    k: int


class Row(NamedTuple):
    """One timing in microseconds. ``tile``: None for cuBLAS. ``layout``: None where A is stored by columns."""

    gpu: str
    sizes: Sizes
    layout: Layout | None
    tile: Tile | None
    us: float


class Recording(NamedTuple):
    """A problem's median times in microseconds, by tile; ``vendor_us``: cuBLAS's, None where it was not timed."""

    sizes: Sizes
    tiles: dict[Tile, float]
    vendor_us: float | None


def load(folder: Path) -> dict[str, list[Recording]]:
    """By GPU, the fp16 problems of all files in a folder and its subfolders whose rows are whole 16-byte vectors.

    Problems with fewer than ``MIN_TILES`` tiles are left out. Raises WrongInput where no file is one of recordings.
    """
    rows: dict[tuple[str, Sizes], dict[Tile | None, list[float]]] = {}
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
    """The problems of files and folders with their layout of B, which ``load`` ignores; without A stored by columns.

    Sums are in fp32, as Triton's are. Problems with fewer than ``MIN_TILES`` tiles are left out.
    """
    times: dict[tuple[str, Sizes, Layout], dict[Tile | None, list[float]]] = {}
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


def timings(path: Path) -> Iterator[Row]:
    """Rows of one file; none where it is no such file, or of another GPU. Raises WrongInput for rows without a time."""
    try:
        yield from _timings(path)
    except (IndexError, ValueError) as error:
        raise WrongInput(f"{path}: a row has no timing ({error!r}); unpack the archive anew, or move it") from None


def _timings(path: Path) -> Iterator[Row]:
    # A file has a hundred rows of each product, and of each choice, so each is read once.
    product, choice = cache(_product), cache(_choice)
    with reading(path), path.open(encoding="utf-8", errors="replace", newline="") as lines:
        gpu = _gpu(next(lines, ""))
        if gpu is None:
            return
        rows = csv.reader(_without_headers(lines))
        if not (names := next(rows, [])):
            return
        operands = itemgetter(*map(names.index, OPERANDS))
        at_choice, at_time = names.index("choice"), names.index("feedback")
        for row in rows:
            if (question := product(operands(row))) is not None:
                for tile in choice(row[at_choice]):
                    yield Row(gpu, *question, tile, float(row[at_time]) * 1e3)


def _product(operands: tuple[str, ...]) -> tuple[Sizes, Layout | None] | None:
    """Sizes and layout by the columns ``OPERANDS``; None for other types, and where rows are no whole vectors."""
    if set(operands[:2]) != {f"torch.{F16.dtype}"}:
        return None
    m, n, k, *strides = map(int, operands[2:])
    if n % F16.vector or any(stride % F16.vector for stride in strides if stride != 1):
        return None
    sizes = Sizes(m, n, k)
    return sizes, _layout(sizes, strides)


def _choice(text: str) -> tuple[Tile | None, ...]:
    """The tile, or None for cuBLAS; empty for any other choice."""
    if match := CHOICE.fullmatch(text):
        bm, bk, bn, stages, warps = map(int, match.groups())
        return (Tile(bm, bn, bk, stages, warps),)
    return (None,) if text == "extern_mm" else ()


def _layout(sizes: Sizes, strides: Sequence[int]) -> Layout | None:
    """How B is stored where A is by rows. ``strides``: of A along m and k, of B along k and n, in elements."""
    if strides[:2] != [sizes.k, 1]:
        return None
    return "nn" if strides[2:] == [sizes.n, 1] else "tn" if strides[2:] == [1, sizes.k] else None


def _gpu(header: str) -> str | None:
    """The GPU of a file by its first line."""
    try:
        major, minor = json.loads(header)["device_capa"]
    except (ValueError, KeyError, TypeError):
        return None
    return GPUS.get((major, minor))


def _without_headers(lines: Iterable[str]) -> Iterator[str]:
    """The lines but for blank ones; a file that was joined of several repeats its first two."""
    names = ""
    for line in lines:
        if not line.strip() or line.startswith("{") or line == names:
            continue
        names = names or line
        yield line
