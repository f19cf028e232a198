"""The catalog's own kernels are honest: one of each family, graded by its text, TMA and clusters included."""

from __future__ import annotations

import pytest

from cudal2gen import catalog, kernel
from cudal2gen.grading import Limits, Tolerance, Verdict, check_source
from cudal2gen.kernel import Record
from cudal2gen.kernel.launch import Cluster, Tiles, Tma
from cudal2gen.renderer import render

TILES = ["a", "k", "b", "k", "d", "n", "m", "n", "k", 0, 0]


def smallest(family: str) -> Record:
    """The family's record of least work that needs no workspace and stores whole boxes."""
    records = [
        record
        for record in catalog.load()
        if record.family == family and record.split_k == 1 and record.layout == "tn" and not stores_rests(record)
    ]
    return min(records, key=lambda record: record.launch.bm * record.launch.bn * record.k)


def stores_rests(record: Record) -> bool:
    match record.launch:
        case Tma() as launch:
            return bool(launch.box_d_rest_cols or launch.stream_k)
        case Tiles() as launch:
            return launch.raster != "plain"
    return False


def boxes(launch: Tma) -> list[str]:
    """Tensor maps of A, B and D, swizzled by the bytes of a row."""
    shapes = {"a": (launch.box_a_rows, launch.box_a_cols), "b": (launch.box_b_rows, launch.box_b_cols)}
    shapes["d"] = (launch.box_d_rows or 1, launch.box_d_cols or 8)
    return [f"map:{name}[{rows}, {cols}]/{2 * cols if cols >= 16 else 0}" for name, (rows, cols) in shapes.items()]


def graded(record: Record, text: str) -> Verdict:
    launch, grid, cluster, args = record.launch, "ceil_div(n, {bn}), ceil_div(m, {bm})", 1, TILES
    if isinstance(launch, Tma):
        cluster = launch.cluster_m * launch.cluster_n
        rows, cols = f"ceil_div(m, {launch.bm * launch.cluster_m})", f"ceil_div(n, {launch.bn * launch.cluster_n})"
        grid = f"{cluster} * {rows} * {cols}"
        args = [*boxes(launch), "d", "n", "m", "n", "k", 1, 1, 0x12F0000000000000, 0x14F0000000000000, 0, 0]
    elif isinstance(launch, Cluster):
        grid = "ceil_div(n, {bn}) * ceil_div(m, {bm})"
    described = {
        "entry": launch.entry, "grid": grid.format(bm=launch.bm, bn=launch.bn), "block": launch.threads,
        "smem": launch.smem_bytes, "cluster": cluster, "args": args,
    }  # fmt: skip
    # TMA cuts boxes at the edges; these kernels of sm_80 have whole tiles.
    ragged = isinstance(launch, Tma)
    shape = {"m": launch.bm + (8 if ragged else 0), "n": launch.bn + (16 if ragged else launch.bn), "k": record.k}
    return check_source(
        text, lambda a, b: a @ b.T, [shape], launches=[described], accumulator=record.acc,
        buffers={"a": "in:f16[m, k]", "b": "in:f16[n, k]", "d": "out:f16[m, n]"}, tolerance=Tolerance(terms="k"),
        limits=Limits(device="sm_90a" if record.gpu == "h200" else "sm_80", isolated=False),
    )  # fmt: skip


@pytest.mark.parametrize("family", [name for name, family in kernel.FAMILIES.items() if not family.TEXTUAL])
def test_rendered_kernels_are_right(family: str) -> None:
    record = smallest(family)
    verdict = graded(record, render(record))
    assert verdict.right, str(verdict)
    assert verdict.kernels[0].mma_flops >= 2 * record.launch.bm * record.launch.bn * record.k
