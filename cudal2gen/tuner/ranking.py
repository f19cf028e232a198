"""Compares on recordings of real GPUs how well proposers rank and search the records of held-out problems.

Sizes (m, n, k) are divided into folds, which are the same for all GPUs and layouts. Each fold is held out once, and
models are trained on the other folds alone. The regret is the time of the chosen record over that of the best recorded
one, minus 1.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from cudal2gen.kernel import Problem, Record
from cudal2gen.timing.recordings.autoheuristic import MIN_TILES, Recording, Tile
from cudal2gen.timing.recordings.tile import TritonTile, record_of
from cudal2gen.tuner import benchmark, cost_model, recorded
from cudal2gen.tuner.climbing import CostModelProposer, HillClimbing, ModelOrder
from cudal2gen.tuner.cost_model import CostModel
from cudal2gen.tuner.environment import Replay
from cudal2gen.tuner.facts import Facts, facts
from cudal2gen.tuner.proposal import Proposer
from cudal2gen.tuner.proposers import Heuristics, Nearest, Random
from kernelproof.ground.errors import MissingLibrary, WrongInput
from kernelproof.ground.pages import grid

Recordings = Mapping[Problem, Recording]
# Regrets: (GPU, proposer) -> (seed, the problem's key) -> a regret for each number of trials.
Regrets = dict[tuple[str, str], dict[tuple[int, object], list[float]]]
CHECKPOINTS = (1, 2, 4, 8)  # numbers of trials after which regrets of searches are compared
FIRST_CHOICES = (1, 3)  # numbers of a ranking's first records of which the best counts
TARGETS = {"a100": 0.015, "h100": 0.02}  # most top-1 regret of the cost model on each GPU


@dataclass(frozen=True)
class RankingPlan:
    """The sizes of a comparison.

    - ``folds``: number of parts into which the sizes are divided.
    - ``seeds``: number of repetitions, each with other folds and newly trained models.
    - ``searched``: number of held-out problems of each GPU in which proposers search.
    - ``seed``: the first seed; the draw of the searched problems follows from it too.
    """

    folds: int = 4
    seeds: int = 2
    searched: int = 40
    seed: int = 0


class RankingScore(NamedTuple):
    """A proposer's mean ``regret`` on a GPU's problems after each number of trials in ``counts``.

    ``problems``: the number of problems; ``bounds``: 95 % intervals over problems and seeds.
    """

    gpu: str
    name: str
    problems: int
    counts: tuple[int, ...]
    regret: tuple[float, ...]
    bounds: tuple[tuple[float, float], ...]


class Fold(NamedTuple):
    """The recordings ``held_out`` with their facts (``described``); and ``model``, ``ratios`` and ``best``, which
    come from the other recordings, ``trained``."""

    seed: int
    trained: Recordings
    held_out: Recordings
    described: Mapping[Problem, Facts]
    model: CostModel
    ratios: Mapping[str, Mapping[Tile, float]]  # GPU -> tile -> its median time over its problem's best
    best: Mapping[str, list[Record]]  # GPU -> the best record of each training problem


def folds(recordings: Recordings, plan: RankingPlan, progress: Callable[[str], None]) -> Iterator[Fold]:
    """Yields every fold of every seed, with models trained without it. Raises WrongInput for fewer sizes than folds."""
    sizes = sorted({(problem.m, problem.n, problem.k) for problem in recordings})
    if len(sizes) < plan.folds:
        raise WrongInput(
            f"--recordings: {len(sizes)} sizes of fp16 products with timings of {MIN_TILES} tiles or more, where a "
            f"comparison needs {plan.folds}; name *_mm.txt of github.com/AlnisM/autoheuristic-datasets, unpacked"
        )
    described = {p: (facts(timed.records), timed) for p, timed in recorded.timed(recordings.items()).items()}
    for seed in range(plan.seed, plan.seed + plan.seeds):
        parts = np.random.default_rng(seed).permutation(len(sizes)) % plan.folds
        part_of = dict(zip(sizes, parts.tolist(), strict=True))
        for part in range(plan.folds):
            progress(f"recordings, seed {seed}: training without part {part + 1} of {plan.folds}")
            trained = {p: recording for p, recording in recordings.items() if part_of[p.m, p.n, p.k] != part}
            held_out = {p: recording for p, recording in recordings.items() if part_of[p.m, p.n, p.k] == part}
            model = cost_model.train_described([described[problem] for problem in trained], seed)
            facts_of = {problem: described[problem][0] for problem in held_out}
            yield Fold(seed, trained, held_out, facts_of, model, *_summaries(trained))


def largest_quarter(recordings: Recordings, plan: RankingPlan) -> dict[tuple[str, str], list[float]]:
    """Regrets of first choices for the problems in each GPU's highest quarter by FLOP, by GPU and ranking.

    Models are trained on the smaller problems alone.
    """
    flops: dict[str, list[int]] = {}
    for problem in recordings:
        flops.setdefault(problem.gpu, []).append(problem.flops)
    least = {gpu: float(np.quantile(values, 0.75)) for gpu, values in flops.items()}
    trained = {p: recording for p, recording in recordings.items() if p.flops < least[p.gpu]}
    held_out = {p: recording for p, recording in recordings.items() if p.flops >= least[p.gpu]}
    described = {p: (facts(timed.records), timed) for p, timed in recorded.timed(recordings.items()).items()}
    model = cost_model.train_described([described[problem] for problem in trained], plan.seed)
    facts_of = {problem: described[problem][0] for problem in held_out}
    fold = Fold(plan.seed, trained, held_out, facts_of, model, *_summaries(trained))
    regrets: dict[tuple[str, str], list[float]] = {}
    for problem, recording in held_out.items():
        for name, order in _orders(fold, problem, recording).items():
            regrets.setdefault((problem.gpu, name), []).append(order[0] / min(order) - 1)
    return regrets


def _summaries(trained: Recordings) -> tuple[dict[str, dict[Tile, float]], dict[str, list[Record]]]:
    """``Fold.ratios`` and ``Fold.best`` from the training recordings."""
    ratios: dict[str, defaultdict[Tile, list[float]]] = {}
    best: dict[str, list[Record]] = {}
    for problem, recording in trained.items():
        fastest = min(recording.tiles, key=recording.tiles.__getitem__)
        best.setdefault(problem.gpu, []).append(record_of(problem, fastest))
        by_tile = ratios.setdefault(problem.gpu, defaultdict(list))
        for tile, us in recording.tiles.items():
            by_tile[tile].append(us / recording.tiles[fastest])
    medians = {gpu: {tile: median(values) for tile, values in by_tile.items()} for gpu, by_tile in ratios.items()}
    return medians, best


def proposers(fold: Fold, gpu: str, seed: int) -> dict[str, Proposer]:
    """The proposers of the comparison, without those whose libraries are not installed."""
    ratios = fold.ratios[gpu]

    def portfolio(records: Sequence[Record]) -> list[float]:
        """For each record the median ratio of its tile's time to the best, over the training problems."""
        return [
            ratios.get(record.configuration, math.inf) if isinstance(record, TritonTile) else math.inf
            for record in records
        ]

    modelled = ModelOrder("timing model", benchmark.modelled_times)
    compared: dict[str, Proposer] = {
        "random": Random(seed),
        "portfolio": ModelOrder("portfolio", portfolio),
        "timing model + hill climbing": HillClimbing(modelled, "climbing", seed, 2),
        "nearest + hill climbing": HillClimbing(Nearest(fold.best[gpu]), "climbing", seed, 2),
        "cost model + hill climbing": HillClimbing(CostOrder(fold.model), "climbing", seed, 2),
        "cost model": CostModelProposer(fold.model, fold.best[gpu]),
    }
    with suppress(MissingLibrary):
        compared["nvidia-matmul-heuristics"] = benchmark.Relay(Heuristics(), Random(seed))
    return compared


class CostOrder(ModelOrder):
    """Proposes in the order of the cost model's predictions, without learning from trials of the problem."""

    def __init__(self, model: CostModel) -> None:
        super().__init__("cost model", model.times)


def compare(
    recordings: Recordings, plan: RankingPlan, progress: Callable[[str], None] = lambda _: None
) -> tuple[list[RankingScore], list[RankingScore]]:
    """The scores of rankings of all problems, and those of searches in the problems of ``sample``."""
    ranked: Regrets = {}
    searched: Regrets = {}
    replays = {p: Replay(recorded.as_trials(p, recordings[p])) for p in sample(recordings, plan)}
    for fold in folds(recordings, plan, progress):
        for problem, recording in fold.held_out.items():
            for name, order in _orders(fold, problem, recording).items():
                regrets = [min(order[:count]) / min(order) - 1 for count in FIRST_CHOICES]
                ranked.setdefault((problem.gpu, name), {})[fold.seed, problem.key] = regrets
            if problem in replays:
                for name, regrets in _searches(fold, problem, replays[problem]).items():
                    searched.setdefault((problem.gpu, name), {})[fold.seed, problem.key] = regrets
    return _rows(ranked, FIRST_CHOICES), _rows(searched, CHECKPOINTS)


def sample(recordings: Recordings, plan: RankingPlan) -> set[Problem]:
    """The problems of each GPU in which proposers search; they are the same for every seed."""
    generator = random.Random(plan.seed)
    by_gpu: dict[str, list[Problem]] = {}
    for problem in sorted(recordings, key=lambda problem: problem.key):
        by_gpu.setdefault(problem.gpu, []).append(problem)
    return {p for problems in by_gpu.values() for p in generator.sample(problems, min(plan.searched, len(problems)))}


def _orders(fold: Fold, problem: Problem, recording: Recording) -> dict[str, list[float]]:
    """For each ranking's name the recorded times of a problem's tiles in µs, in the ranking's order."""
    us = list(recording.tiles.values())
    ratios, described = fold.ratios[problem.gpu], fold.described[problem]
    scores = {
        "portfolio": [ratios.get(tile, math.inf) for tile in recording.tiles],
        "timing model": described.modelled_us.tolist(),
        "cost model": fold.model.times_of(described),
    }
    return {name: [us[index] for index in np.argsort(score, kind="stable")] for name, score in scores.items()}


def _searches(fold: Fold, problem: Problem, replay: Replay) -> dict[str, list[float]]:
    """For each proposer's name the regret at each of ``CHECKPOINTS``."""
    candidates, best = replay.candidates(problem), min(fold.held_out[problem].tiles.values())
    regrets = {}
    for name, proposer in proposers(fold, problem.gpu, fold.seed).items():
        times, _ = benchmark.selected_times(replay, benchmark.search(replay, proposer, candidates, CHECKPOINTS[-1], 1))
        regrets[name] = [times[min(count, len(times)) - 1] / best - 1 for count in CHECKPOINTS]
    return regrets


def _rows(values: Regrets, counts: tuple[int, ...]) -> list[RankingScore]:
    """The score of each proposer on each GPU. ``counts``: the numbers of trials to which the regrets belong."""
    rows = []
    for (gpu, name), regrets in sorted(values.items()):
        # Every seed holds out every problem once, so each seed has a row of the same problems in the same order.
        seeds = len({seed for seed, _ in regrets})
        table = np.array([regret for _, regret in sorted(regrets.items())]).reshape(seeds, -1, len(counts))
        means, bounds = benchmark.interval(table)
        rows.append(RankingScore(gpu, name, table.shape[1], counts, means, bounds))
    return rows


def markdown(
    ranked: Sequence[RankingScore],
    searched: Sequence[RankingScore],
    quarter: Mapping[tuple[str, str], Sequence[float]],
    plan: RankingPlan,
) -> str:
    """The comparison as a Markdown page with tables, conditions and claims. ``quarter``: see ``largest_quarter``."""
    lines = [
        "# Recorded on real GPUs",
        "",
        "Triton's matrix products as PyTorch's AutoHeuristic timed them on an A100 and an H100: fp16, sums in fp32, A "
        f"by rows. Sizes are held out in {plan.folds} parts, {plan.seeds} seeds of parts and training. Regret: "
        "the chosen tile's time over the best recorded one's, minus 1; 95 % bootstrap intervals over seeds and "
        "problems.",
        "",
    ]
    for title, rows in (("Ranking, no evaluation", ranked), ("Search, one evaluation at a time", searched)):
        if rows:
            label = "top-{}" if rows is ranked else "regret at {}"
            lines += [f"## {title}", "", _table(rows, label), ""]
    lines += ["## The largest quarter, learned from smaller problems", "", "Regret of the first choice.", ""]
    cells = [
        [gpu, name, len(values), f"{sum(values) / len(values):.2%}"] for (gpu, name), values in sorted(quarter.items())
    ]
    lines += [grid(["GPU", "proposer", "problems", "top-1"], cells, left=2), ""]
    return "\n".join([*lines, *(f"- {claim}" for claim in claims(ranked))]) + "\n"


def _table(rows: Sequence[RankingScore], label: str) -> str:
    """A table of regrets, with a confidence interval for each number of trials. ``label``: the head of a column."""
    cells = []
    for row in rows:
        regrets = [f"{v:.2%} [{low:.2%}, {high:.2%}]" for v, (low, high) in zip(row.regret, row.bounds, strict=True)]
        cells.append([row.gpu, row.name, row.problems, *regrets])
    return grid(["GPU", "proposer", "problems", *map(label.format, rows[0].counts)], cells, left=2)


def claims(ranked: Sequence[RankingScore]) -> list[str]:
    """Sentences that state whether the cost model's top-1 regret meets the targets."""
    return [
        f"{row.gpu}: the cost model's top-1 regret is {row.regret[0]:.2%}, target {TARGETS[row.gpu]:.1%}: "
        f"{'met' if row.regret[0] <= TARGETS[row.gpu] else 'MISSED'}."
        for row in ranked
        if row.name == "cost model" and row.gpu in TARGETS
    ]
