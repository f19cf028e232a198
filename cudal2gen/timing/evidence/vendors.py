"""Finds why modelled speedups are in the wrong order: because of the vendor's modelled time, or of the kernel's.

A modelled speedup is a stand-in for the vendor's time, divided by the kernel's modelled time. On recorded timings the
true times of cuBLAS and of the fastest tile are known, so each of the two can be replaced by the truth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cudal2gen.timing.evidence.findings import Array, interval, is_development, rank_correlation
from cudal2gen.timing.evidence.regret import modelled_us
from cudal2gen.timing.evidence.section import Finding
from cudal2gen.timing.evidence.speedups import LARGE_FLOPS
from cudal2gen.timing.heuristics import MatmulHeuristics
from cudal2gen.timing.recordings import autoheuristic, triton
from cudal2gen.timing.recordings.autoheuristic import Recording
from kernelproof.ground.errors import MissingLibrary


class _Times(NamedTuple):
    """True and modelled times of cuBLAS and of the fastest recorded tile, in microseconds, one element per problem.

    ``vendor``, ``kernel``: the true times. ``stand_in``: the modelled time of cuBLAS. ``modelled``: that of the tile.
    """

    flops: Array
    vendor: Array
    kernel: Array
    stand_in: Array
    modelled: Array


def recorded_vendors(folder: Path, held_out: bool = False) -> list[Finding]:
    """For each GPU, how well speedups over cuBLAS are ordered if cuBLAS has its true times and kernels modelled ones.

    The baselines use the stand-in for cuBLAS's times. Returns an empty list without nvidia-matmul-heuristics.
    """
    try:
        heuristics = MatmulHeuristics()
    except MissingLibrary:
        return []
    findings = []
    for gpu, recordings in autoheuristic.load(folder).items():
        part = [item for item in recordings if is_development(item.sizes.n, item.sizes.k) != held_out]
        findings += list(_findings(gpu, _times(gpu, [item for item in part if item.vendor_us], heuristics)))
    return findings


def _times(gpu: str, recordings: Sequence[Recording], heuristics: MatmulHeuristics) -> _Times:
    """The times of recordings that have a time of cuBLAS. ``heuristics`` gives the stand-in's times."""
    rows = []
    for item in recordings:
        assert item.vendor_us is not None
        problem = triton.problem_of(gpu, item.sizes)
        tile = min(item.tiles, key=item.tiles.__getitem__)
        rows.append(
            (
                problem.flops,
                item.vendor_us,
                item.tiles[tile],
                heuristics.least_us(problem),
                modelled_us(gpu, item, tile),
            )
        )
    return _Times(*np.array(rows, np.float64).reshape(-1, 5).T)


def _findings(gpu: str, times: _Times) -> Iterator[Finding]:
    """The findings of all problems and of the large ones; of three problems at least, since fewer have no order."""
    for name, chosen in (("", times.flops > 0), (f", above {LARGE_FLOPS:.0e} FLOP", times.flops > LARGE_FLOPS)):
        if chosen.sum() >= 3:
            yield _finding(f"speedups over cuBLAS on {gpu}{name}", _Times(*(column[chosen] for column in times)))


def _finding(subject: str, times: _Times) -> Finding:
    """The rank correlation of speedups with the true ones if only the kernel's time is modelled.

    Among the baselines are correlations with the vendor's time modelled too, or alone, and the standard deviations of
    the logarithm of modelled over true times.
    """
    true = times.vendor / times.kernel
    predicted = times.vendor / times.modelled
    low, high = interval(len(true), lambda places: rank_correlation(predicted[places], true[places]))
    baselines: Mapping[str, float] = {
        "stand-in and modelled kernel": rank_correlation(times.stand_in / times.modelled, true),
        "stand-in and true kernel": rank_correlation(times.stand_in / times.kernel, true),
        "spread of the stand-in": float(np.log(times.stand_in / times.vendor).std()),
        "spread of the model": float(np.log(times.modelled / times.kernel).std()),
    }
    value = rank_correlation(predicted, true)
    return Finding(
        "vendors",
        subject,
        "Spearman, true vendor and modelled kernel",
        len(true),
        value,
        low,
        high,
        None,
        dict(baselines),
    )
