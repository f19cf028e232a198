"""Checks whether the timing model prefers the kernels that others found fastest on hardware. It needs no GPU.

``published_choices``: how far at the front is a published kernel of CUDA-L2 if all legal candidates for its problem are
sorted by modelled time? ``published_tiles``: does the model choose the tile that a search of CUTLASS's kernels chose on
an H100? docs/timing-evidence.md has the answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np

from cudal2gen.kernel import IllegalRecord, Problem, Record, parse, space
from cudal2gen.timing import model
from cudal2gen.timing.evidence.findings import interval, is_development, mean_finding
from cudal2gen.timing.evidence.published import SETS, hopper_configurations, regenerated
from cudal2gen.timing.evidence.section import Finding

CANDIDATES = 400  # most candidates of a problem; if there are more, a random sample
TILE = (128, 256)  # the tile of most published H100 kernels; a baseline of ``published_tiles`` always chooses it


def published_choices(problems: int, held_out: bool = False) -> list[Finding]:
    """The median rank of published kernels' records among legal candidates: 0 if none is modelled as faster, 1 if all.

    ``problems``: how many problems of each set are drawn, by a digest of their extents. ``held_out``: as in
    ``published_tiles``.
    """
    findings, all_ranks = [], []
    for gpu, acc in SETS:
        records = sorted(
            regenerated(gpu, acc, held_out), key=lambda record: hashlib.sha256(record.mnk.encode()).hexdigest()
        )[:problems]
        ranks = [rank(record) for record in records]
        all_ranks += ranks
        findings.append(_median_finding(f"{gpu} {acc}", ranks, None))
    return [*findings, _median_finding("all", all_ranks, "<= 0.10")]


def rank(record: Record) -> float:
    """The share of candidates for a record's problem that are modelled as faster. Equally fast ones count half."""
    candidates = space.candidates(record.problem, most=CANDIDATES).records
    own = model.estimate(record).us
    times = [model.estimate(candidate).us for candidate in candidates]
    return (sum(us < own for us in times) + sum(us == own for us in times) / 2) / len(times)


def published_tiles(held_out: bool = False) -> list[Finding]:
    """How often the model's choice has the tile of a published H100 configuration.

    The first finding is about a choice among all candidates, the second about a choice among candidates whose tile some
    published kernel has. ``held_out``: whether to use the problems that were held out while the model's constants were
    chosen, or the others.
    """
    configurations = hopper_configurations()
    tiles = {(facts["bm"], facts["bn"]) for facts in configurations}
    hits: list[float] = []
    restricted_hits: list[float] = []
    baseline_hits: list[float] = []
    for facts in configurations:
        if is_development(facts["n"], facts["k"]) == held_out:
            continue
        published = (facts["bm"], facts["bn"])
        problem = Problem(gpu="h100", acc="f32", layout="tn", m=facts["m"], n=facts["n"], k=facts["k"])
        times = tile_times(problem)
        hits.append(min(times, key=times.__getitem__) == published)
        published_times = {tile: us for tile, us in times.items() if tile in tiles}
        best = min(published_times, key=published_times.__getitem__, default=None)
        restricted_hits.append(best == published)
        baseline_hits.append(published == TILE)
    baselines = {f"always {TILE[0]}x{TILE[1]}": float(np.mean(baseline_hits))}
    figure = "share with the tile"
    return [
        mean_finding("tiles", "H100, all candidates", figure, hits, ">= 0.66 (150 of 226)", baselines),
        mean_finding("tiles", "H100, tiles that were published", figure, restricted_hits, None, baselines),
    ]


def tile_times(problem: Problem) -> dict[tuple[int, int], float]:
    """For each tile, the least modelled time of candidates with it, in microseconds."""
    times: dict[tuple[int, int], float] = {}
    for record in _deepest_candidates(problem):
        us = model.estimate(record).us
        tile = (record.bm, record.bn)
        times[tile] = min(us, times.get(tile, us))
    return times


def _deepest_candidates(problem: Problem) -> Iterator[Record]:
    """The legal candidates. If several differ only in ``stages``, only the one with the most stages is yielded.

    On the H100, families propose these in the order of descending stages.
    """
    decided = set()
    for fields in space.proposals(problem):
        key = str({name: value for name, value in fields.items() if name != "stages"})
        if key in decided:
            continue
        try:
            record = parse(fields)
        except IllegalRecord:
            continue
        decided.add(key)
        if not record.spill_remarks:
            yield record


def _median_finding(subject: str, ranks: Sequence[float], target: str | None) -> Finding:
    """The finding of a median rank, one rank for each problem."""
    array = np.array(ranks)
    low, high = interval(len(array), lambda places: float(np.median(array[places])))
    return Finding("choices", subject, "median rank", len(ranks), median(ranks), low, high, target, {"random": 0.5})
