"""What ``cudal2gen train`` makes of trials and recordings: the cost model.

Families without measurements learn from the timing model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from cudal2gen.kernel import Problem, Record, space
from cudal2gen.results import Trial
from cudal2gen.timing import model
from cudal2gen.tuner import cost_model
from cudal2gen.tuner.cost_model import CostModel, TimedRecords

# Modelled training data: problems of each GPU and accumulator, and candidates of each problem.
PRIOR_PROBLEMS, PRIOR_CANDIDATES = 20, 48
PRIOR_TARGETS = (("a100", "f16"), ("a100", "f32"), ("h200", "f16"), ("h200", "f32"))


def pooled(trials: Sequence[Trial], sizes: Sequence[tuple[int, int, int]], seed: int = 0) -> CostModel:
    """The cost model of measured trials and recordings.

    Problems of sizes that are drawn from ``sizes`` (m, n, k) are added with the timing model's estimates as times. The
    model learns from them to correct nothing, so that a family without measurements is ordered by the timing model.
    """
    trained = cost_model.train([*cost_model.timed(trials), *timing_model_alone(sizes, seed)], seed)
    # Recordings of other families say little about the estimate's error for a family without measurements.
    trained.spread = max(trained.spread, cost_model.SPREAD)
    return trained


def timing_model_alone(sizes: Sequence[tuple[int, int, int]], seed: int = 0) -> list[TimedRecords]:
    """Candidates of drawn problems with the timing model's estimates as times."""
    rng = random.Random(seed)
    problems: list[TimedRecords] = []
    for gpu, acc in PRIOR_TARGETS:
        for m, n, k in rng.sample(list(sizes), min(PRIOR_PROBLEMS, len(sizes))):
            problem = Problem.model_validate({"gpu": gpu, "acc": acc, "layout": "tn", "m": m, "n": n, "k": k})
            records: Sequence[Record] = space.candidates(problem, PRIOR_CANDIDATES, seed).records
            problems.append(TimedRecords(records, [model.estimate(record).us for record in records]))
    return problems
