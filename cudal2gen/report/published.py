"""Reads the speedups that CUDA-L2 published (``configs/published.json``) and shows them beside ours.

The two are not the same experiment: cards and protocols differ, and the section says how.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from cudal2gen import places
from cudal2gen.kernel import GPUS
from kernelproof.ground import chips
from kernelproof.ground.pages import Section, Table, percent, ratio_text

# The number of kernels, by GPU and published accumulator, that are published as fp32 but accumulate in fp16. They were
# counted in the published source code, kernel by kernel.
MISLABELLED = {("a100", "f32"): 56, ("rtx3090", "f32"): 33, ("h100", "f32"): 192}


class PublishedSet(NamedTuple):
    """The statistics of one published set of speedups over one baseline.

    ``mean`` is arithmetic and ``std`` that of a sample; ``wins`` and ``losses`` are shares (0 to 1) of the shapes.
    ``best_of_mean`` and ``best_of_geomean`` are means of the faster of both: speedups below 1 count as 1.
    """

    gpu: str
    acc: str
    mode: str
    baseline: str
    shapes: int
    mean: float
    median: float
    std: float
    geomean: float
    wins: float
    losses: float
    best_of_mean: float
    best_of_geomean: float


class Published(NamedTuple):
    """All published figures, and their source (title, paper, repository, commit)."""

    source: dict[str, str]
    rows: tuple[PublishedSet, ...]

    def nearest(self, gpu: str, acc: str, mode: str) -> dict[str, PublishedSet]:
        """The rows of the published set that is closest to a measurement, by baseline; empty if the mode has none.

        A set with the same accumulator is preferred, then one of the same GPU, then one of a related GPU.
        """

        def distance(row: PublishedSet) -> tuple[bool, bool, bool]:
            return row.acc != acc, row.gpu != gpu, not chips.related(row.gpu, gpu)

        rows = [row for row in self.rows if row.mode == mode]
        if not rows:
            return {}
        best = min(rows, key=distance)
        return {row.baseline: row for row in rows if (row.gpu, row.acc) == (best.gpu, best.acc)}


def load() -> Published:
    """The published figures that ship with the package. Raises OSError or ValueError if the installation is damaged."""
    data: dict[str, Any] = json.loads((places.shipped("configs") / "published.json").read_text())
    return Published(data["source"], tuple(PublishedSet(**row) for row in data["rows"]))


def section(published: Published) -> Section:
    """The section with one table for each published set (GPU and accumulator), in all of its modes."""
    source = published.source
    sets = dict.fromkeys((row.gpu, row.acc) for row in published.rows)
    return Section(
        "published",
        "Speedups as published by CUDA-L2",
        (
            f"Source: {source['title']}, {source['paper']}, repository {source['repository']} (commit "
            f"{source['commit']}). Means, medians and shares of the speedup tables published there, one per set and "
            "mode; this project has not measured them again. "
            "They come from other cards under another protocol: a host clock around each call, operands just written "
            "(so in the L2 as far as they fit), allocation and padding of the candidate outside the clock, no "
            "intervals. “best-of” is max(theirs, baseline), problem by problem. Of the kernels published as fp32, "
            + ", ".join(f"{count} on the {_title(gpu)}" for (gpu, _), count in MISLABELLED.items())
            + " accumulate in fp16.",
        ),
        tables=tuple(_table(published.rows, *key) for key in sets),
    )


def _table(rows: Sequence[PublishedSet], gpu: str, acc: str) -> Table:
    """The published figures of a GPU and accumulator, a row for each baseline."""
    set_rows = [row for row in rows if (row.gpu, row.acc) == (gpu, acc)]
    modes = list(dict.fromkeys(row.mode for row in set_rows))
    by_baseline_and_mode = {(row.baseline, row.mode): row for row in set_rows}
    figures = ("mean", "median", "std", "geomean", "wins", "best-of mean")
    return Table(
        f"Published: {_title(gpu)}, {acc}, {set_rows[0].shapes} shapes, {' and '.join(modes)} mode",
        ("baseline", *(f"{mode} {figure}" for mode in modes for figure in figures)),
        tuple(
            (baseline, *(cell for mode in modes for cell in _cells(by_baseline_and_mode[baseline, mode])))
            for baseline in dict.fromkeys(row.baseline for row in set_rows)
        ),
    )


def _cells(row: PublishedSet) -> tuple[str, ...]:
    """The cells of a set in the order of the figures of ``_table``."""
    return (
        ratio_text(row.mean),
        ratio_text(row.median),
        ratio_text(row.std),
        ratio_text(row.geomean),
        percent(row.wins),
        ratio_text(row.best_of_mean),
    )


def _title(gpu: str) -> str:
    return GPUS[gpu].title
