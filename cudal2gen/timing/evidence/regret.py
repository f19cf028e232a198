"""Computes regret on recorded timings: how much slower the model's choice of a tile is than the fastest timed tile."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median

from cudal2gen.results.ratios import spearman
from cudal2gen.timing import model
from cudal2gen.timing.evidence.findings import is_development, mean_finding
from cudal2gen.timing.evidence.section import Finding
from cudal2gen.timing.heuristics import MatmulHeuristics
from cudal2gen.timing.model.worth import SHORT_K
from cudal2gen.timing.recordings import autoheuristic, triton
from cudal2gen.timing.recordings.autoheuristic import Recording, Tile
from kernelproof.ground.errors import MissingLibrary

# The largest accepted mean regret, by GPU and how many top-ranked tiles are tried (the best counts).
TARGETS = {("a100", 1): 0.06, ("h100", 1): 0.04, ("a100", 3): 0.03, ("h100", 3): 0.03}
NEAR = 1.3  # a tile is near the best if its time is at most this multiple of the best time
FEWEST = 5  # the fewest tiles for which a rank correlation is computed
CHOICES = 16  # choices of nvidia-matmul-heuristics for a problem

Score = Callable[[Recording, Tile], float]  # the score of one tile of a recording; the tile with the least is chosen


def recorded_choices(folder: Path, held_out: bool = False) -> list[Finding]:
    """Mean regret for each GPU, of the model's first choice and of the best of its first three.

    ``held_out``: True: evaluate the held-out problems; False: those for which ``is_development`` is true. Raises
    WrongInput if the folder has no recordings.
    """
    findings = []
    for gpu, recordings in autoheuristic.load(folder).items():
        selected = [
            recording for recording in recordings if is_development(recording.sizes.n, recording.sizes.k) != held_out
        ]
        development_half = [
            recording for recording in recordings if is_development(recording.sizes.n, recording.sizes.k)
        ]
        scores: dict[str, Score] = {
            "largest tile": lambda recording, tile: -tile.bm * tile.bn,  # noqa: ARG005
            "one order": partial(_median_ratio, median_ratios(development_half)),
        }
        if (heuristics := _heuristics()) is not None:
            scores["nvidia-matmul-heuristics"] = partial(_distance, heuristics, gpu)
        rankings = {name: [_ranked(recording, score) for recording in selected] for name, score in scores.items()}
        modelled = [_ranked(recording, partial(modelled_us, gpu)) for recording in selected]
        for first in (1, 3):
            baselines = {
                name: fmean(map(partial(regret, first=first), selected, ranked)) for name, ranked in rankings.items()
            }
            if first == 1:
                baselines["random"] = fmean(map(random_regret, selected))
            values = list(map(partial(regret, first=first), selected, modelled))
            target = f"<= {TARGETS[gpu, first]:.2f}"
            findings.append(
                mean_finding("recorded", f"Triton on {gpu}", f"top-{first} regret", values, target, baselines)
            )
        findings += _rank_correlation_findings(gpu, selected)
    return findings


def _rank_correlation_findings(gpu: str, recordings: Sequence[Recording]) -> Iterator[Finding]:
    """How well the model orders the tiles of a problem, as the mean rank correlation of modelled with recorded times.

    There is a finding for all tiles and one for those near the best, each for short and for long k.
    """
    for name, chosen in (
        (f", k <= {SHORT_K}", [item for item in recordings if item.sizes.k <= SHORT_K]),
        (f", k > {SHORT_K}", [item for item in recordings if item.sizes.k > SHORT_K]),
    ):
        for figure, ratio in (("order of tiles", math.inf), (f"order of tiles within {NEAR:g} of the best", NEAR)):
            values = [value for item in chosen if (value := _rank_correlation(gpu, item, ratio)) is not None]
            if values:
                yield mean_finding("recorded", f"Triton on {gpu}{name}", figure, values, None, {"random": 0.0})


def _rank_correlation(gpu: str, recording: Recording, ratio: float) -> float | None:
    """The rank correlation over the tiles within a ratio of the best; None for fewer than ``FEWEST`` tiles."""
    least = min(recording.tiles.values())
    near = {tile: us for tile, us in recording.tiles.items() if us <= ratio * least}
    if len(near) < FEWEST:
        return None
    return spearman([modelled_us(gpu, recording, tile) for tile in near], list(near.values()))


def modelled_us(gpu: str, recording: Recording, tile: Tile) -> float:
    """The modelled time of Triton's kernel with a tile, in microseconds."""
    return model.estimate_kernel(triton.kernel_of(triton.problem_of(gpu, recording.sizes), tile)).us


def regret(recording: Recording, ranked: Sequence[Tile], first: int = 1) -> float:
    """The fraction by which the fastest of the ``first`` ranked tiles is slower than the fastest of all tiles."""
    return min(recording.tiles[tile] for tile in ranked[:first]) / min(recording.tiles.values()) - 1


def random_regret(recording: Recording) -> float:
    """The expected regret of a tile chosen at random."""
    return fmean(recording.tiles.values()) / min(recording.tiles.values()) - 1


def median_ratios(recordings: Sequence[Recording]) -> Mapping[Tile, float]:
    """For each tile the median, over problems, of its time divided by the best: one order for all problems."""
    ratios: defaultdict[Tile, list[float]] = defaultdict(list)
    for recording in recordings:
        best = min(recording.tiles.values())
        for tile, us in recording.tiles.items():
            ratios[tile].append(us / best)
    return {tile: median(values) for tile, values in ratios.items()}


def _median_ratio(ratios: Mapping[Tile, float], recording: Recording, tile: Tile) -> float:  # noqa: ARG001
    """The ``Score`` of a tile by ``median_ratios``; infinite for a tile that it does not have."""
    return ratios.get(tile, float("inf"))


def _heuristics() -> MatmulHeuristics | None:
    """nvidia-matmul-heuristics, or None if it is not installed."""
    try:
        return MatmulHeuristics()
    except MissingLibrary:
        return None


def _distance(heuristics: MatmulHeuristics, gpu: str, recording: Recording, tile: Tile) -> float:
    """The ``Score`` of a tile by nvidia-matmul-heuristics: how far it is from the nearest of the first choices.

    The distance is the sum of |log2| of the extents' ratios, plus the choice's place as a fraction of 1, so that the
    place only decides between tiles that are equally near.
    """
    choices = heuristics.answers(triton.problem_of(gpu, recording.sizes), CHOICES)
    return min(
        place / CHOICES
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
    """The tiles of a recording, the least score first."""
    scores = {tile: score(recording, tile) for tile in recording.tiles}
    return sorted(scores, key=scores.__getitem__)
