"""Compares proposers on the same held-out problems of the model environment, at equal numbers of evaluations.

The tables compare ways of searching and say nothing of kernels. Two things keep the results from being circular: the
environment is the frozen model times hidden terms, which no proposer may ask (the timing model, a relative, may be
asked); and held-out problems are absent from imitation, from the pool of nearest problems, and from all training.

The regret after n evaluations is 1 - best / selected. "selected" is the true time of the record with the best noisy
time so far; "best" is the least true time of the problem, over all its candidates and all searches.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import Acc, Problem, Record, parse, space
from cudal2gen.results import Trial, ratios
from cudal2gen.timing.model import estimate_kernel
from cudal2gen.timing.recordings.tile import kernel_of
from cudal2gen.tuner import cost_model
from cudal2gen.tuner import policy as policies
from cudal2gen.tuner.climbing import CostModelProposer, HillClimbing, ModelOrder
from cudal2gen.tuner.cost_model import CostModel, TimedRecords
from cudal2gen.tuner.curve import Curve
from cudal2gen.tuner.environment import Environment, Model
from cudal2gen.tuner.policy import Policy, Ranked, View
from cudal2gen.tuner.proposal import Proposal, Proposer, Question
from cudal2gen.tuner.proposers import Evolution, Heuristics, Mixture, Nearest, PolicyProposer, Random, Tpe
from kernelproof.ground.errors import MissingLibrary
from kernelproof.ground.pages import grid

CHECKPOINTS = (4, 8, 16, 32)
CLOSE = 0.98  # a search is close at this share of the best known speed


@dataclass(frozen=True)
class BenchmarkPlan:
    """The sizes of a comparison.

    - ``held_out`` and ``trained``: numbers of problems to search in and to learn from.
    - ``environments``: so many hidden terms, each with its own training; ``seeds``: searches of a problem in each.
    - ``evaluations_each``: trials of a training problem; ``longest``: evaluations of a search, by proposer.
    - ``imitation_seconds``: limit of the policy's imitation.
    - ``controls``: also compare parts of the policy's training, training on shuffled rewards, and searches that learn
      nothing from other problems.
    - ``only``: names of the proposers to compare; all if empty.
    """

    gpu: str = "h200"
    acc: Acc = "f32"
    held_out: int = 20
    trained: int = 160
    environments: int = 3
    seeds: int = 1
    batch: int = 8
    evaluations_each: int = 96
    contrast_rounds: int = 500
    group_rounds: int = 120
    longest: Mapping[str, int] = field(default_factory=dict)
    imitation_seconds: float = 30.0
    seed: int = 0
    controls: bool = False
    only: tuple[str, ...] = ()


def sized(plan: BenchmarkPlan, held_out: int) -> BenchmarkPlan:
    """The plan for ``held_out`` problems, with training problems, rounds and seconds in proportion."""
    share = held_out / plan.held_out
    return replace(
        plan,
        held_out=held_out,
        trained=math.ceil(share * plan.trained),
        contrast_rounds=math.ceil(share * plan.contrast_rounds),
        group_rounds=math.ceil(share * plan.group_rounds),
        imitation_seconds=share * plan.imitation_seconds,
    )


class Score(NamedTuple):
    """One proposer's mean regret at each of ``CHECKPOINTS`` with 95 % intervals, and evaluations until ``CLOSE``.

    ``close``: the median over problems and seeds, infinite if fewer than half of the searches get there; ``reached``:
    the share (0 to 1) of searches that do; ``longest``: evaluations of a search.
    """

    name: str
    regret: tuple[float, ...]
    bounds: tuple[tuple[float, float], ...]
    close: float
    reached: float
    longest: int


class Comparison(NamedTuple):
    """Every proposer's score, and the environment of the comparison."""

    plan: BenchmarkPlan
    on: str
    scores: tuple[Score, ...]
    trained_evaluations: int


def split(records: Sequence[Record], plan: BenchmarkPlan) -> tuple[list[Problem], list[Problem]]:
    """The problems held out and the problems to train on, drawn from the published sizes by size class."""
    from cudal2gen.bench import stratified

    sizes = sorted({(record.m, record.n, record.k) for record in records})
    problems = [Problem(gpu=plan.gpu, acc=plan.acc, layout="tn", m=m, n=n, k=k) for m, n, k in sizes]
    order = stratified(problems, plan.seed)
    return order[: plan.held_out], order[plan.held_out : plan.held_out + plan.trained]


def other_sizes(records: Iterable[Record], held_out: Iterable[Problem]) -> list[Record]:
    """The records whose sizes are not held out, on any GPU."""
    sizes = {(problem.m, problem.n, problem.k) for problem in held_out}
    return [record for record in records if (record.m, record.n, record.k) not in sizes]


def best_known(environment: Model, candidates: space.Candidates, refined: int = 16) -> float:
    """The least true time in µs: over all structures, and over all free fields of the ``refined`` best structures."""
    times = environment.true_us(candidates.records)
    best = float(times.min())
    for row in np.argsort(times)[:refined].tolist():
        heads = candidates.heads[candidates.records[row].family]
        choices = itertools.product(*(range(len(values)) for values in heads.values()))
        records = [candidates.compose(row, dict(zip(heads, choice, strict=True)), "best known") for choice in choices]
        best = min(best, float(environment.true_us(records).min()))
    return best


class TimedEnvironment(Environment, Protocol):
    """An environment that has a true time beside a trial's."""

    def true_us(self, records: Sequence[Record]) -> NDArray[np.float64]: ...


def search(
    environment: TimedEnvironment, proposer: Proposer, candidates: space.Candidates, evaluations: int, batch: int
) -> tuple[list[float], list[float]]:
    """The noisy and the true times of a proposer's evaluations in µs, in order; fewer if it has no more proposals."""
    trials: list[Trial] = []
    keys: set[object] = set()
    idle = 0
    while len(trials) < evaluations and idle < 5:
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
    times = environment.true_us([parse(trial.record) for trial in trials]).tolist()
    return [trial.median_us for trial in trials], times


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

    Each of 2000 resamples draws environments (or training seeds) and problems.
    """
    rng = np.random.default_rng(0)
    environments = rng.integers(0, len(regrets), (2000, len(regrets)))
    problems = rng.integers(0, regrets.shape[1], (2000, regrets.shape[1]))
    means = [regrets[some][:, others].mean((0, 1)) for some, others in zip(environments, problems, strict=True)]
    low, high = ratios.percentile_interval(means).tolist()
    return tuple(regrets.mean((0, 1)).tolist()), tuple(zip(low, high, strict=True))


Runs = Sequence[Sequence[Sequence[float]]]  # selected times by problem and by seed of the search


def summarise(name: str, runs: Sequence[Runs], best: Sequence[Sequence[float]], longest: int) -> Score:
    """The score of ``runs[environment][problem][seed]``. Its intervals are over environments and problems, of the means
    over seeds."""
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
    return Score(
        name,
        means,
        bounds,
        median(lengths),
        sum(length < math.inf for length in lengths) / len(lengths),
        longest,
    )


class Trained(NamedTuple):
    """Everything that was trained on an environment's training problems.

    ``pool``: the best record of each problem; ``portfolio``: the few of them that serve most problems, best first;
    ``policies``: by name, empty without torch.
    """

    pool: list[Record]
    portfolio: list[Record]
    costs: CostModel
    policies: Mapping[str, Policy]
    evaluations: int


def record_trials(environment: Environment, problems: Sequence[Problem], count: int, seed: int) -> list[TimedRecords]:
    """The times of ``count`` random legal records of each problem."""
    rng = random.Random(seed)
    recorded = []
    for problem in problems:
        candidates = space.candidates(problem, 2 * count, seed)
        records = [candidates.draw(rng, "recorded") for _ in range(count)]
        trials = environment.evaluate(problem, records)
        recorded.append(TimedRecords(records, [trial.median_us for trial in trials]))
    return recorded


def train(
    environment: Model, published: Sequence[Record], problems: Sequence[Problem], plan: BenchmarkPlan, seed: int
) -> Trained:
    """Records trials of the training problems, and trains the cost model and the policies on them."""
    recorded = record_trials(environment, problems, plan.evaluations_each, seed)
    pool = [min(zip(timed.us, timed.records, strict=True), key=lambda pair: pair[0])[1] for timed in recorded]
    policies = train_policies(environment, published, recorded, plan, seed)
    portfolio = choose_portfolio(environment, pool, problems)
    return Trained(pool, portfolio, cost_model.train(recorded, seed), policies, plan.evaluations_each * len(problems))


def choose_portfolio(
    environment: Environment, pool: Sequence[Record], problems: Sequence[Problem], size: int = 8, tried: int = 24
) -> list[Record]:
    """A few records of the pool that together come nearest to the best times of the training problems.

    They are chosen greedily among ``tried`` records.
    """
    members = pool[:: max(1, len(pool) // tried)][:tried]
    costs = []
    for problem in problems[:: max(1, len(problems) // tried)]:
        candidates = space.candidates(problem, 200)
        adopted = [space.adopt(record, candidates, "portfolio") for record in members]
        us = np.array([trial.median_us for trial in environment.evaluate(problem, adopted)])
        costs.append(np.log(us / us.min()))
    table, chosen = np.array(costs), list[int]()
    reached = np.full(len(table), np.inf)
    for _ in range(min(size, len(members))):
        means = np.minimum(table, reached[:, None]).mean(0)
        means[chosen] = np.inf
        chosen.append(int(means.argmin()))
        reached = np.minimum(reached, table[:, chosen[-1]])
    return [members[place] for place in chosen]


def train_policies(
    environment: Environment | None,
    published: Sequence[Record],
    recorded: Sequence[TimedRecords],
    plan: BenchmarkPlan,
    seed: int,
) -> dict[str, Policy]:
    """The policies by name: imitation of published records, then the contrastive update. Empty without torch.

    With ``controls`` also the group-relative update at an equal number of evaluations, and training on shuffled
    rewards, both in ``environment``.
    """
    try:
        policies.on_one_core()
    except ImportError:
        return {}
    prior = Policy(seed)
    prior.imitate(published, plan.imitation_seconds)
    ranked = [Ranked(timed.records, [-math.log(us) for us in timed.us]) for timed in recorded]
    contrast = prior.copy(seed)
    policies.compare(contrast, ranked, plan.contrast_rounds, seed=seed)
    if environment is None or not plan.controls:
        return {"prior": prior, "contrast": contrast}
    rng = random.Random(seed)
    shuffled, group = prior.copy(seed), prior.copy(seed)
    permuted = [Ranked(pair.records, rng.sample(list(pair.scores), len(pair.scores))) for pair in ranked]
    policies.compare(shuffled, permuted, plan.contrast_rounds, seed=seed)
    views: list[View] = [prior.view(space.candidates(timed.records[0].problem)) for timed in recorded]
    policies.practise(
        group, views, lambda problem, records: rewards(environment, problem, records), plan.group_rounds,
        kl=0.1, seed=seed,
    )  # fmt: skip
    return {"prior": prior, "contrast": contrast, "group": group, "shuffled": shuffled}


def rewards(environment: Environment, problem: Problem, records: Sequence[Record]) -> list[float]:
    """The logarithm of speed, which compares records of one problem without a reference."""
    return [-math.log(trial.median_us) for trial in environment.evaluate(problem, records)]


Makers = dict[str, Callable[[int], Proposer]]


def timing_model(records: Sequence[Record]) -> list[float]:
    """The timing model's times in microseconds."""
    return [estimate_kernel(kernel_of(record)).us for record in records]


def contestants(trained: Trained, controls: bool = False) -> Makers:
    """For each name a function that makes the proposer of a seed. Proposers without their library are left out."""

    def climbing(make: Callable[[int], Proposer]) -> Callable[[int], Proposer]:
        return lambda seed: HillClimbing(make(seed), "climbing", seed)

    makers: Makers = {
        "random": Random,
        "nearest + hill climbing": climbing(lambda _: Nearest(trained.pool)),
        "timing model + hill climbing": climbing(lambda _: ModelOrder("timing model", timing_model)),
        "portfolio + hill climbing": climbing(lambda _: Nearest(trained.portfolio, ordered=True)),
        "cost model + hill climbing": climbing(lambda _: ModelOrder("cost model", trained.costs.times)),
        "nvidia-matmul-heuristics": lambda seed: Relay(Heuristics(), Random(seed)),
        "cost model, as shipped": lambda _: CostModelProposer(cost_model.load()),
        "cost model": lambda _: CostModelProposer(trained.costs, trained.pool),
    }
    if "contrast" in trained.policies:
        makers["policy"] = lambda seed: PolicyProposer(trained.policies["contrast"], seed=seed)
    if controls:
        makers |= _controls(trained)
    installed = {}
    for name, make in makers.items():
        try:
            make(0)
        except MissingLibrary:
            continue
        installed[name] = make
    return installed


def _controls(trained: Trained) -> Makers:
    makers: Makers = {
        "nearest": lambda seed: Mixture([Nearest(trained.pool), Random(seed)]),
        "tpe": Tpe,
        "evolution": Evolution,
    }
    policies = trained.policies
    if policies:
        makers |= {
            "prior, frozen": lambda seed: PolicyProposer(policies["prior"], seed=seed, frozen=True),
            "contrast, frozen": lambda seed: PolicyProposer(policies["contrast"], seed=seed, adapt=0),
            "group, frozen": lambda seed: PolicyProposer(policies["group"], seed=seed, adapt=0),
            "shuffled, frozen": lambda seed: PolicyProposer(policies["shuffled"], seed=seed, adapt=0),
            "policy, shuffled": lambda seed: PolicyProposer(policies["shuffled"], seed=seed, shuffled=True),
        }
    return makers


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
) -> Comparison:
    """Trains, searches and scores. ``published``: the catalog's records of the accumulator to imitate."""
    held_out, problems = split(published, plan)
    spaces = [space.candidates(problem) for problem in held_out]
    imitated = other_sizes(published, held_out)
    runs: dict[str, list[list[list[list[float]]]]] = {}
    best: list[list[float]] = []
    evaluations = 0
    for number in range(plan.environments):
        environment = Model(seed=plan.seed + 1 + number)
        progress(f"{environment.on}: training on {len(problems)} problems; {len(held_out)} are held out")
        trained = train(environment, imitated, problems, plan, plan.seed + number)
        evaluations = trained.evaluations
        best.append([best_known(environment, candidates) for candidates in spaces])
        for name, make in contestants(trained, plan.controls).items():
            if plan.only and name not in plan.only:
                continue
            progress(f"{environment.on}: {name}")
            runs.setdefault(name, []).append(_searches(environment, make, spaces, best[-1], name, plan))
    scores = tuple(
        summarise(name, searches, best, plan.longest.get(name, CHECKPOINTS[-1])) for name, searches in runs.items()
    )
    return Comparison(plan, "analytic model of 2026-11-22 with hidden terms", scores, evaluations)


def _searches(
    environment: Model,
    make: Callable[[int], Proposer],
    spaces: Sequence[space.Candidates],
    best: list[float],
    name: str,
    plan: BenchmarkPlan,
) -> list[list[list[float]]]:
    """The selected times by problem and seed. Lowers ``best`` if a search finds a faster record."""
    longest = plan.longest.get(name, CHECKPOINTS[-1])
    runs = []
    for index, candidates in enumerate(spaces):
        seeds = []
        for seed in range(plan.seeds):
            noisy, true = search(environment, make(1000 * plan.seed + seed), candidates, longest, plan.batch)
            best[index] = min(best[index], *true)
            seeds.append(selected_us(noisy, true))
        runs.append(seeds)
    return runs


def markdown(comparison: Comparison) -> str:
    """The table with its conditions and claims."""
    plan = comparison.plan
    lines = [
        f"# Ways of searching, {plan.gpu} {plan.acc}, compared in a model",
        "",
        f"**Modelled, not measured**: {comparison.on}. {plan.held_out} problems absent from all training, "
        f"{plan.environments} seeds of hidden terms and training, {plan.seeds} of each search. Trained on "
        f"{plan.trained} others, {comparison.trained_evaluations} evaluations. Regret: 1 - best known time / "
        "chosen record's time, mean over problems, with a 95 % bootstrap interval over hidden terms and problems.",
        "",
    ]
    regrets = [f"regret at {count}" for count in CHECKPOINTS]
    rows = []
    for score in comparison.scores:
        cells = [
            f"{value:.1%} [{low:.1%}, {high:.1%}]"
            for value, (low, high) in zip(score.regret, score.bounds, strict=True)
        ]
        length = f"{score.close:.0f}" if score.close < math.inf else f"> {score.longest}"
        rows.append([score.name, *cells, length, f"{score.reached:.0%} of {score.longest}"])
    table = grid(["proposer", *regrets, f"evaluations to {CLOSE:.0%}", "got there"], rows)
    return "\n".join([*lines, table, "", *(f"- {claim}" for claim in claims(comparison))]) + "\n"


def claims(comparison: Comparison) -> list[str]:
    """Sentences that state each expectation and whether the scores meet it."""
    by_name = {score.name: score for score in comparison.scores}
    sentences = []
    costs, climbing = by_name.get("cost model"), by_name.get("nearest + hill climbing")
    if costs and climbing:
        for place, count in list(enumerate(CHECKPOINTS))[1:]:
            share = costs.regret[place] / climbing.regret[place] if climbing.regret[place] else math.inf
            sentences.append(
                f"After {count} evaluations the cost model's regret is {share:.2f} of that of nearest + hill climbing: "
                f"{'at most half' if share <= 0.5 else 'MORE than half'}."
            )
    ordered = sorted(comparison.scores, key=lambda score: score.regret[-1])
    if ordered:
        sentences.append(f"Least regret after {CHECKPOINTS[-1]} evaluations: {ordered[0].name}.")
    prior = by_name.get("prior, frozen")
    return sentences + [
        _against(prior, by_name[name])
        for name in ("contrast, frozen", "group, frozen", "shuffled, frozen", "policy, shuffled")
        if prior and name in by_name
    ]


def _against(prior: Score, score: Score) -> str:
    """Compares a trained policy's regret with that of the prior from which it started."""
    better = [c for c, value, other in zip(CHECKPOINTS, score.regret, prior.regret, strict=True) if value < other]
    apart = [c for c, value, other in zip(CHECKPOINTS, score.bounds, prior.bounds, strict=True) if value[1] < other[0]]
    return (
        f"{score.name}: less regret than the frozen prior at {better or 'none'} of {list(CHECKPOINTS)}, "
        f"with intervals apart at {apart or 'none'}."
    )


def curves(comparison: Comparison) -> list[Curve]:
    """The learning curve of every proposer."""
    return [
        Curve(
            score.name,
            [(float(count), value) for count, value in zip(CHECKPOINTS, score.regret, strict=True)],
            score.bounds,
        )
        for score in comparison.scores
    ]
