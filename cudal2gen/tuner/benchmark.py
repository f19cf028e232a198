"""Compares proposers on the same held-out problems of the model environment, at equal numbers of evaluations.

The tables compare ways of searching and say nothing about kernels. Two rules keep the results from being circular:

- The environment's times are those of the frozen model, multiplied by hidden terms. Proposers may use neither the
  frozen model nor the hidden terms. They may use the timing model, which resembles the frozen one.
- A campaign over other problems runs first. Proposers learn from its trials alone, and the records that they take from
  the nearest problems are its best records.

The regret after n evaluations is 1 - best / selected. "selected" is the true time of the record with the best noisy
time so far; "best" is the least true time of the problem, over all its candidates and all searches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import Acc, Problem, Record, parse, space
from cudal2gen.results import Trial, ratios
from cudal2gen.timing.model import estimate_kernel
from cudal2gen.timing.recordings.tile import kernel_of
from cudal2gen.tuner.climbing import CostModelProposer, HillClimbing, ModelOrder
from cudal2gen.tuner.cost_model import CostModel
from cudal2gen.tuner.environment import Environment, ModelEnvironment
from cudal2gen.tuner.proposal import Proposal, Proposer, Question
from cudal2gen.tuner.proposers import Heuristics, Nearest, Random
from cudal2gen.tuner.training import Learning
from kernelproof.ground.errors import MissingLibrary
from kernelproof.ground.pages import grid

CHECKPOINTS = (4, 8, 16, 32)  # numbers of evaluations after which regrets are compared
CLOSE = 0.98  # a search is close if its selected record reaches this fraction of the best known speed
MAX_IDLE = 5  # answers in a row without a new record after which a search ends
RESAMPLES = 2000  # resamples of a bootstrap interval


@dataclass(frozen=True)
class BenchmarkPlan:
    """The sizes of a comparison.

    - ``held_out``: number of problems in which the proposers search; ``tuned``: number of problems of the campaign.
    - ``environments``: number of model environments, each with its own hidden terms and its own campaign.
    - ``seeds``: searches of each proposer for each problem and environment.
    - ``evaluations``: evaluations of each of the campaign's problems; ``batch``: most proposals of an answer.
    - ``seed``: everything random follows from it.
    """

    gpu: str = "h200"
    acc: Acc = "f32"
    held_out: int = 24
    tuned: int = 144
    environments: int = 3
    seeds: int = 1
    batch: int = 8
    evaluations: int = 32
    seed: int = 0


def sized(plan: BenchmarkPlan, held_out: int) -> BenchmarkPlan:
    """The plan for ``held_out`` problems, with the campaign's problems in proportion."""
    return replace(plan, held_out=held_out, tuned=math.ceil(held_out / plan.held_out * plan.tuned))


class Score(NamedTuple):
    """One proposer's mean ``regret`` at each of ``CHECKPOINTS``, with 95 % intervals (``bounds``).

    ``close``: the median number of evaluations until a search is close (``CLOSE``); infinite if fewer than half of the
    searches get close. ``reached``: the fraction of searches that do.
    """

    name: str
    regret: tuple[float, ...]
    bounds: tuple[tuple[float, float], ...]
    close: float
    reached: float


class ProposerComparison(NamedTuple):
    """Every proposer's score, and the environment of the comparison."""

    plan: BenchmarkPlan
    on: str
    scores: tuple[Score, ...]
    learned: int  # timed records of a campaign


def split(records: Sequence[Record], plan: BenchmarkPlan) -> tuple[list[Problem], list[Problem]]:
    """The problems held out and the campaign's problems, drawn from the published sizes by size class."""
    from cudal2gen.bench import stratified

    sizes = sorted({(record.m, record.n, record.k) for record in records})
    problems = [Problem(gpu=plan.gpu, acc=plan.acc, layout="tn", m=m, n=n, k=k) for m, n, k in sizes]
    order = stratified(problems, plan.seed)
    return order[: plan.held_out], order[plan.held_out : plan.held_out + plan.tuned]


def best_known(environment: ModelEnvironment, candidates: space.Candidates, refined: int = 16) -> float:
    """The least true time in µs: over all structures, and over all free fields of the ``refined`` best structures.

    All values of the free fields of all structures would take too long.
    """
    times = environment.true_us(candidates.records)
    best = float(times.min())
    for row in np.argsort(times)[:refined].tolist():
        heads = candidates.heads[candidates.records[row].family]  # the values of each group of free fields
        choices = itertools.product(*(range(len(values)) for values in heads.values()))
        records = [candidates.compose(row, dict(zip(heads, choice, strict=True)), "best known") for choice in choices]
        best = min(best, float(environment.true_us(records).min()))
    return best


class TimedEnvironment(Environment, Protocol):
    """An environment that also gives the true times of records in µs, without the noise of its trials."""

    def true_us(self, records: Sequence[Record]) -> NDArray[np.float64]: ...


def search(
    environment: TimedEnvironment, proposer: Proposer, candidates: space.Candidates, evaluations: int, batch: int
) -> list[Trial]:
    """The trials of a proposer's first ``evaluations`` evaluations, in order; fewer if it has no more proposals.

    ``batch``: most proposals of an answer.
    """
    trials: list[Trial] = []
    keys: set[object] = set()
    idle = 0
    while len(trials) < evaluations and idle < MAX_IDLE:
        proposals = proposer.propose(Question(candidates, tuple(trials), None, frozenset(keys)), batch)
        records: dict[object, Record] = {}
        for proposal in proposals:
            if proposal.record is not None and (key := proposal.record.kernel_key) not in keys:
                records.setdefault(key, proposal.record)
        idle = 0 if records else idle + 1
        selected = dict(list(records.items())[: evaluations - len(trials)])
        if selected:
            results = environment.evaluate(candidates.problem, list(selected.values()))
            keys |= selected.keys()
            trials += results
            proposer.observe(Question(candidates, tuple(trials), None, frozenset(keys)), results)
    return trials


def selected_times(environment: TimedEnvironment, trials: Sequence[Trial]) -> tuple[list[float], float]:
    """``selected_us`` of a search's trials, and the least true time among them, in µs."""
    true = environment.true_us([parse(trial.record) for trial in trials]).tolist()
    return selected_us([trial.median_us for trial in trials], true), min(true)


def selected_us(noisy: Sequence[float], true: Sequence[float]) -> list[float]:
    """For each evaluation, the true time of the record with the best noisy time so far."""
    selected, best = [], 0
    for number, time in enumerate(noisy):
        best = number if time < noisy[best] else best
        selected.append(true[best])
    return selected


def regret(times: Sequence[float], best: float, count: int) -> float:
    """1 - best / time after ``count`` evaluations, or at the end of a shorter search."""
    return 1 - best / times[min(count, len(times)) - 1]


def until_close(times: Sequence[float], best: float) -> float:
    """Evaluations until the selected record reaches ``CLOSE`` of the best speed and stays there; infinite if never."""
    slow = [number for number, time in enumerate(times, 1) if best / time < CLOSE]
    if not slow:
        return 1.0
    return slow[-1] + 1.0 if slow[-1] < len(times) else math.inf


def interval(regrets: NDArray[np.float64]) -> tuple[tuple[float, ...], tuple[tuple[float, float], ...]]:
    """Means of regrets of shape (environments, problems, counts), with 95 % bootstrap intervals.

    Each resample draws environments (or training seeds) and problems.
    """
    rng = np.random.default_rng(0)
    environments = rng.integers(0, len(regrets), (RESAMPLES, len(regrets)))
    problems = rng.integers(0, regrets.shape[1], (RESAMPLES, regrets.shape[1]))
    draws = zip(environments, problems, strict=True)
    means = [regrets[environment_rows][:, problem_rows].mean((0, 1)) for environment_rows, problem_rows in draws]
    low, high = ratios.percentile_interval(means).tolist()
    return tuple(regrets.mean((0, 1)).tolist()), tuple(zip(low, high, strict=True))


Runs = Sequence[Sequence[Sequence[float]]]  # selected times by problem and by seed of the search


def summarise(name: str, runs: Sequence[Runs], best: Sequence[Sequence[float]]) -> Score:
    """The score of a proposer from its ``runs[environment][problem][seed]``.

    ``best[environment][problem]`` is the least true time in µs. Regrets are first averaged over seeds; the intervals
    then resample environments and problems.
    """
    pairs = [list(zip(searches, least, strict=True)) for searches, least in zip(runs, best, strict=True)]
    regrets = [
        [
            np.mean([[regret(times, least, count) for count in CHECKPOINTS] for times in seeds], axis=0)
            for seeds, least in problems
        ]
        for problems in pairs
    ]
    means, bounds = interval(np.array(regrets))
    lengths = [until_close(times, least) for problems in pairs for seeds, least in problems for times in seeds]
    return Score(name, means, bounds, median(lengths), sum(length < math.inf for length in lengths) / len(lengths))


def campaign(environment: ModelEnvironment, problems: Sequence[Problem], plan: BenchmarkPlan, seed: int) -> Learning:
    """What ``tune`` has learned after it searched these problems one after the other, without earlier trials.

    ``seed``: that of the cost model's training.
    """
    learning = Learning(seed=seed)
    for problem in problems:
        proposer = CostModelProposer(learning.model, learning.pool)
        learning.learn(search(environment, proposer, space.candidates(problem), plan.evaluations, plan.batch))
    return learning


Makers = dict[str, Callable[[int], Proposer]]  # by a proposer's name, a function that makes the proposer from a seed


def modelled_times(records: Sequence[Record]) -> list[float]:
    """The timing model's estimates for the records, in microseconds."""
    return [estimate_kernel(kernel_of(record)).us for record in records]


def contestants(learning: Learning) -> Makers:
    """For each name a function that makes a proposer from a seed. Proposers whose library is missing are left out."""
    pool = learning.pool

    def climbing(make: Callable[[int], Proposer]) -> Callable[[int], Proposer]:
        return lambda seed: HillClimbing(make(seed), "climbing", seed)

    makers: Makers = {
        "random": Random,
        "nearest + hill climbing": climbing(lambda _: Nearest(pool)),
        "timing model + hill climbing": climbing(lambda _: ModelOrder("timing model", modelled_times)),
        "nvidia-matmul-heuristics": lambda seed: Relay(Heuristics(), Random(seed)),
        "cost model, first problem": lambda _: CostModelProposer(CostModel()),
        "cost model, untrained": lambda _: CostModelProposer(CostModel(), pool),
        "cost model": lambda _: CostModelProposer(learning.model, pool),
    }
    installed = {}
    for name, make in makers.items():
        try:
            make(0)
        except MissingLibrary:
            continue
        installed[name] = make
    return installed


class Relay:
    """Two proposers in sequence: the second answers when the first has no more proposals. Both observe every trial."""

    def __init__(self, first: Proposer, second: Proposer) -> None:
        self.name = first.name
        self._first, self._second = first, second

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """The first proposer's answer, or the second's if that is empty."""
        return self._first.propose(question, count) or self._second.propose(question, count)

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """Hands the trials to both."""
        self._first.observe(question, trials)
        self._second.observe(question, trials)


def compare(
    published: Sequence[Record], plan: BenchmarkPlan, progress: Callable[[str], None] = lambda _: None
) -> ProposerComparison:
    """Runs a campaign in each environment, lets every proposer search the held-out problems, and scores them.

    ``published``: records from whose sizes the problems are drawn.
    """
    held_out, problems = split(published, plan)
    spaces = [space.candidates(problem) for problem in held_out]
    runs: dict[str, list[list[list[list[float]]]]] = {}
    best: list[list[float]] = []
    learned = 0
    for number in range(plan.environments):
        environment = ModelEnvironment(seed=plan.seed + 1 + number)
        progress(f"{environment.on}: a campaign of {len(problems)} problems; {len(held_out)} are held out")
        learning = campaign(environment, problems, plan, plan.seed + number)
        learned = learning.record_count
        best.append([best_known(environment, candidates) for candidates in spaces])
        for name, make in contestants(learning).items():
            progress(f"{environment.on}: {name}")
            runs.setdefault(name, []).append(_searches(environment, make, spaces, best[-1], plan))
    scores = tuple(summarise(name, searches, best) for name, searches in runs.items())
    return ProposerComparison(plan, "analytic model of 2026-11-22 with hidden terms", scores, learned)


def _searches(
    environment: ModelEnvironment,
    make: Callable[[int], Proposer],
    spaces: Sequence[space.Candidates],
    best: list[float],
    plan: BenchmarkPlan,
) -> list[list[list[float]]]:
    """The selected times by problem and seed. Lowers ``best`` if a search finds a faster record."""
    runs = []
    for index, candidates in enumerate(spaces):
        seeds = []
        for seed in range(plan.seeds):
            trials = search(environment, make(1000 * plan.seed + seed), candidates, CHECKPOINTS[-1], plan.batch)
            times, least = selected_times(environment, trials)
            best[index] = min(best[index], least)
            seeds.append(times)
        runs.append(seeds)
    return runs


def markdown(comparison: ProposerComparison) -> str:
    """The comparison as a Markdown page: its conditions, the table, and the claims."""
    plan = comparison.plan
    lines = [
        f"# Ways of searching, {plan.gpu} {plan.acc}, compared in a model",
        "",
        f"**Modelled, not measured**: {comparison.on}. {plan.held_out} problems that were never tuned, "
        f"{plan.environments} seeds of hidden terms, {plan.seeds} of each search. Before that, a campaign tunes "
        f"{plan.tuned} other problems with {plan.evaluations} evaluations each. Proposers learn from its "
        f"{comparison.learned} timed records, and nearest takes its best records. Regret: 1 - best known time / chosen "
        "record's time, mean over problems, with a 95 % bootstrap interval over hidden terms and problems.",
        "",
    ]
    regrets = [f"regret at {count}" for count in CHECKPOINTS]
    rows = []
    for score in comparison.scores:
        cells = [
            f"{value:.1%} [{low:.1%}, {high:.1%}]"
            for value, (low, high) in zip(score.regret, score.bounds, strict=True)
        ]
        length = f"{score.close:.0f}" if score.close < math.inf else f"> {CHECKPOINTS[-1]}"
        rows.append([score.name, *cells, length, f"{score.reached:.0%}"])
    table = grid(["proposer", *regrets, f"evaluations to {CLOSE:.0%}", "got there"], rows)
    return "\n".join([*lines, table, "", *(f"- {claim}" for claim in claims(comparison))]) + "\n"


def claims(comparison: ProposerComparison) -> list[str]:
    """Sentences that state each expectation and whether the scores meet it."""
    by_name = {score.name: score for score in comparison.scores}
    sentences = []
    costs, climbing = by_name.get("cost model"), by_name.get("nearest + hill climbing")
    if costs and climbing:
        for place, count in list(enumerate(CHECKPOINTS))[1:]:
            ratio = costs.regret[place] / climbing.regret[place] if climbing.regret[place] else math.inf
            sentences.append(
                f"After {count} evaluations the cost model's regret is {ratio:.2f} of that of nearest + hill climbing: "
                f"{'at most half' if ratio <= 0.5 else 'MORE than half'}."
            )
    ordered = sorted(comparison.scores, key=lambda score: score.regret[-1])
    if ordered:
        sentences.append(f"Least regret after {CHECKPOINTS[-1]} evaluations: {ordered[0].name}.")
    return sentences
