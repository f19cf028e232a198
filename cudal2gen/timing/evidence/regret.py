"""Recorded timings against the model's choice among the tiles that were timed: how much slower than the best one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median

from cudal2gen.timing import model
from cudal2gen.timing.evidence.findings import development, mean_finding
from cudal2gen.timing.evidence.section import Finding
from cudal2gen.timing.heuristics import MatmulHeuristics
from cudal2gen.timing.recordings import autoheuristic, triton
from cudal2gen.timing.recordings.autoheuristic import Recording, Tile
from kernelproof.ground.errors import MissingLibrary

TARGETS = {("a100", 1): 0.06, ("h100", 1): 0.04, ("a100", 3): 0.03, ("h100", 3): 0.03}

Score = Callable[[Recording, Tile], float]  # less is better


def recorded_choices(folder: Path, held_out: bool = False) -> list[Finding]:
    """Top-1 and top-3 regret by GPU. Raises WrongInput for a folder without recordings."""
    findings = []
    for gpu, recordings in autoheuristic.load(folder).items():
        part = [recording for recording in recordings if development(recording.sizes.n, recording.sizes.k) != held_out]
        development_half = [recording for recording in recordings if development(recording.sizes.n, recording.sizes.k)]
        scores: dict[str, Score] = {
            "largest tile": lambda recording, tile: -tile.bm * tile.bn,  # noqa: ARG005
            "one order": partial(_ordered, one_order(development_half)),
        }
        if (heuristics := _heuristics()) is not None:
            scores["nvidia-matmul-heuristics"] = partial(_unlike, heuristics, gpu)
        orders = {name: [_ranked(recording, score) for recording in part] for name, score in scores.items()}
        modelled = [_ranked(recording, partial(modelled_us, gpu)) for recording in part]
        for first in (1, 3):
            baselines = {
                name: fmean(map(partial(regret, first=first), part, ranked)) for name, ranked in orders.items()
            }
            if first == 1:
                baselines["random"] = fmean(map(random_regret, part))
            values = list(map(partial(regret, first=first), part, modelled))
            target = f"<= {TARGETS[gpu, first]:.2f}"
            findings.append(mean_finding("c", f"Triton on {gpu}", f"top-{first} regret", values, target, baselines))
    return findings


def modelled_us(gpu: str, recording: Recording, tile: Tile) -> float:
    """The model's time of Triton's kernel of a tile."""
    return model.estimate_kernel(triton.kernel_of(triton.problem_of(gpu, recording.sizes), tile)).us


def regret(recording: Recording, ranked: Sequence[Tile], first: int = 1) -> float:
    """The extra time of the fastest of the ``first`` tiles over the best of all tiles, as a fraction of the latter."""
    return min(recording.tiles[tile] for tile in ranked[:first]) / min(recording.tiles.values()) - 1


def random_regret(recording: Recording) -> float:
    """The expected regret of a tile chosen at random."""
    return fmean(recording.tiles.values()) / min(recording.tiles.values()) - 1


def one_order(recordings: Sequence[Recording]) -> Mapping[Tile, float]:
    """By tile, the median of its time over the best of its problem: an order learned from the development half."""
    ratios: defaultdict[Tile, list[float]] = defaultdict(list)
    for recording in recordings:
        best = min(recording.tiles.values())
        for tile, us in recording.tiles.items():
            ratios[tile].append(us / best)
    return {tile: median(values) for tile, values in ratios.items()}


def _ordered(order: Mapping[Tile, float], recording: Recording, tile: Tile) -> float:  # noqa: ARG001
    return order.get(tile, float("inf"))


def _heuristics() -> MatmulHeuristics | None:
    """The library, where it is installed."""
    try:
        return MatmulHeuristics()
    except MissingLibrary:
        return None


def _unlike(heuristics: MatmulHeuristics, gpu: str, recording: Recording, tile: Tile) -> float:
    """How far a tile is from the nearest of the library's choices: octaves of its extents, and its place among them."""
    choices = heuristics.answers(triton.problem_of(gpu, recording.sizes), 16)
    return min(
        place / 16
        + sum(
            abs(math.log2(own / other))
            for own, other in (
                (tile.bm, choice.configuration.cta_tile_m),
                (tile.bn, choice.configuration.cta_tile_n),
                (tile.bk, choice.configuration.cta_tile_k),
            )
        )
        for place, choice in enumerate(choices)
    )


def _ranked(recording: Recording, score: Score) -> list[Tile]:
    """The tiles of a problem, best score first."""
    scores = {tile: score(recording, tile) for tile in recording.tiles}
    return sorted(scores, key=scores.__getitem__)
