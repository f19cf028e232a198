"""Comparison of proposers on the same held-out problems, at equal numbers of evaluations.

It runs in the model environment, so it compares ways of searching, not kernels, and its table says so. Against circular
results, no proposer may ask the analytic model, the environment multiplies it by hidden terms, and held-out problems
are absent from imitation, from the pool of nearest problems and from the policy's training.

Regret after n evaluations: 1 - best / selected, where "selected" is the true time of the record with the best noisy
time so far, and "best" is the least true time of the problem, over all its candidates and all searches.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np

from cudal2gen.kernel import Acc, Problem, Record, parse
from cudal2gen.results import Trial
from cudal2gen.tuner import policy as policies
from cudal2gen.tuner import space
from cudal2gen.tuner.curve import Curve
from cudal2gen.tuner.environment import Model
from cudal2gen.tuner.policy import Policy, Ranked, View
from cudal2gen.tuner.proposal import MissingLibrary, Proposal, Proposer, Question
from cudal2gen.tuner.proposers import Evolution, Heuristics, Mixture, Nearest, PolicyProposer, Random, Tpe

CHECKPOINTS = (8, 16, 32, 64)
CLOSE = 0.98  # of the best known speed


@dataclass(frozen=True)
class Settings:
    """Numbers of problems, seeds and evaluations. ``longest``: evaluations of a search, by proposer.

    ``imitation_seconds``: limit of the imitation. ``only``: names of proposers to compare, all if empty.
    """

    gpu: str = "h200"
    acc: Acc = "f32"
    held_out: int = 20
    trained: int = 160
    seeds: int = 10
    batch: int = 8
    evaluations_each: int = 96
    contrast_rounds: int = 500
    group_rounds: int = 120
    longest: Mapping[str, int] = field(default_factory=lambda: {"random": 1024, "policy": 128})
    imitation_seconds: float = 60.0
    seed: int = 0
    only: tuple[str, ...] = ()


class Score(NamedTuple):
    """One proposer's mean regret at each of ``CHECKPOINTS`` with 95 % intervals, and evaluations until ``CLOSE``.

    ``close``: the median over problems and seeds, infinite where fewer than half of the searches reach it;
    ``reached``: the share (0 to 1) of searches that do; ``longest``: evaluations of a search.
    """

    name: str
    regret: tuple[float, ...]
    bounds: tuple[tuple[float, float], ...]
    close: float
    reached: float
    longest: int


class Comparison(NamedTuple):
    """Every proposer's score, and the environment of the comparison."""

    settings: Settings
    on: str
    scores: tuple[Score, ...]
    trained_evaluations: int


def split(records: Sequence[Record], settings: Settings) -> tuple[list[Problem], list[Problem]]:
    """Problems held out, and problems to train on: the published sizes in a random order, stratified by size class."""
    from cudal2gen.bench import stratified

    sizes = sorted({(record.m, record.n, record.k) for record in records})
    problems = [Problem(gpu=settings.gpu, acc=settings.acc, layout="tn", m=m, n=n, k=k) for m, n, k in sizes]
    order = stratified(problems, settings.seed)
    return order[: settings.held_out], order[settings.held_out : settings.held_out + settings.trained]


def other_sizes(records: Iterable[Record], held_out: Iterable[Problem]) -> list[Record]:
    """The records whose sizes are not held out, on any GPU."""
    sizes = {(problem.m, problem.n, problem.k) for problem in held_out}
    return [record for record in records if (record.m, record.n, record.k) not in sizes]


def best_known(environment: Model, candidates: space.Candidates, refined: int = 40) -> float:
    """The least true time in µs: over all structures, and over all free fields of the ``refined`` best structures."""
    times = environment.true_us(candidates.records)
    best = float(times.min())
    for row in np.argsort(times)[:refined].tolist():
        heads = candidates.heads[candidates.records[row].family]
        choices = itertools.product(*(range(len(values)) for values in heads.values()))
        records = [candidates.compose(row, dict(zip(heads, choice, strict=True)), "best known") for choice in choices]
        best = min(best, float(environment.true_us(records).min()))
    return best


def search(
    environment: Model, proposer: Proposer, candidates: space.Candidates, evaluations: int, batch: int
) -> tuple[list[float], list[float]]:
    """Noisy and true times in µs of a proposer's evaluations, in order; fewer than asked where it runs dry."""
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
    """After each evaluation the true time of the record with the best noisy time so far."""
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


def summarise(name: str, runs: Sequence[Sequence[Sequence[float]]], best: Sequence[float], longest: int) -> Score:
    """The score of ``runs[problem][seed]``, selected times. Intervals: bootstrap over problems, of means over seeds."""
    pairs = list(zip(runs, best, strict=True))
    regrets_by_seed = [
        [[regret(times, least, count) for count in CHECKPOINTS] for times in seeds] for seeds, least in pairs
    ]
    regrets = np.array(regrets_by_seed).mean(axis=1)
    picks = np.random.default_rng(0).integers(0, len(regrets), (2000, len(regrets)))
    low, high = np.percentile(regrets[picks].mean(axis=1), (2.5, 97.5), axis=0).tolist()
    lengths = [until_close(times, least) for seeds, least in pairs for times in seeds]
    return Score(
        name,
        tuple(regrets.mean(axis=0).tolist()),
        tuple(zip(low, high, strict=True)),
        median(lengths),
        sum(length < math.inf for length in lengths) / len(lengths),
        longest,
    )


class TrainedPolicies(NamedTuple):
    """Policies from one prior: trained on pairs, on groups, and on shuffled rewards as a control."""

    prior: Policy
    contrast: Policy
    group: Policy
    shuffled: Policy
    pool: list[Record]
    evaluations: int


def train(
    environment: Model, published: Sequence[Record], problems: Sequence[Problem], settings: Settings
) -> TrainedPolicies:
    """Imitates published records, then applies both updates at equal numbers of evaluations on training problems.

    ``pool`` of the result: the best recorded record of each training problem.
    """
    prior = Policy(settings.seed)
    prior.imitate(published, settings.imitation_seconds)
    views: list[View] = [prior.view(space.candidates(problem)) for problem in problems]
    rng = random.Random(settings.seed)
    ranked, pool = [], []
    for view in views:
        records = [view.candidates.draw(rng, "recorded") for _ in range(settings.evaluations_each)]
        scores = rewards(environment, view.candidates.problem, records)
        ranked.append(Ranked(records, scores))
        pool.append(max(zip(scores, records, strict=True), key=lambda pair: pair[0])[1])
    contrast = prior.copy(settings.seed)
    policies.compare(contrast, ranked, settings.contrast_rounds, seed=settings.seed)
    shuffled = prior.copy(settings.seed)
    permuted = [Ranked(pair.records, rng.sample(list(pair.scores), len(pair.scores))) for pair in ranked]
    policies.compare(shuffled, permuted, settings.contrast_rounds, seed=settings.seed)
    group = prior.copy(settings.seed)
    spent = policies.practise(
        group, views, lambda problem, records: rewards(environment, problem, records), settings.group_rounds,
        kl=0.1, seed=settings.seed,
    )  # fmt: skip
    return TrainedPolicies(
        prior, contrast, group, shuffled, pool, max(spent, settings.evaluations_each * len(problems))
    )


def rewards(environment: Model, problem: Problem, records: Sequence[Record]) -> list[float]:
    """The logarithm of speed, which compares records of one problem without a reference."""
    return [-math.log(trial.median_us) for trial in environment.evaluate(problem, records)]


def contestants(trained: TrainedPolicies) -> dict[str, Callable[[int], Proposer]]:
    """Functions from a seed to a proposer, by name, without those whose libraries are not installed."""
    makers: dict[str, Callable[[int], Proposer]] = {
        "random": Random,
        "nearest": lambda seed: Mixture([Nearest(trained.pool), Random(seed)]),
        "heuristics": lambda seed: Relay(Heuristics(), Random(seed)),
        "tpe": Tpe,
        "evolution": Evolution,
        "prior, frozen": lambda seed: PolicyProposer(trained.prior, seed=seed, frozen=True),
        "contrast, frozen": lambda seed: PolicyProposer(trained.contrast, seed=seed, adapt=0),
        "group, frozen": lambda seed: PolicyProposer(trained.group, seed=seed, adapt=0),
        "shuffled, frozen": lambda seed: PolicyProposer(trained.shuffled, seed=seed, adapt=0),
        "policy": lambda seed: PolicyProposer(trained.contrast, seed=seed),
        "policy, shuffled": lambda seed: PolicyProposer(trained.shuffled, seed=seed, shuffled=True),
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
    """Two proposers in sequence: the second answers once the first has no more proposals; both observe every trial."""

    def __init__(self, first: Proposer, second: Proposer) -> None:
        self.name = first.name
        self._first, self._second = first, second

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """The first proposer's answer, or the second's where that is empty."""
        return self._first.propose(question, count) or self._second.propose(question, count)

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """Hands the trials to both."""
        self._first.observe(question, trials)
        self._second.observe(question, trials)


def compare(
    published: Sequence[Record], settings: Settings, progress: Callable[[str], None] = lambda _: None
) -> Comparison:
    """Trains, searches and scores. ``published``: the catalog's records of the accumulator to imitate."""
    environment = Model(seed=settings.seed + 1)
    held_out, problems = split(published, settings)
    progress(f"training on {len(problems)} problems; {len(held_out)} are held out")
    trained = train(environment, other_sizes(published, held_out), problems, settings)
    spaces = [space.candidates(problem) for problem in held_out]
    best = [best_known(environment, candidates) for candidates in spaces]
    runs: dict[str, list[list[list[float]]]] = {}
    for name, make in contestants(trained).items():
        if settings.only and name not in settings.only:
            continue
        longest = settings.longest.get(name, CHECKPOINTS[-1])
        progress(f"{name}: {settings.seeds} seeds, {longest} evaluations each")
        runs[name] = []
        for index, candidates in enumerate(spaces):
            seeds = []
            for seed in range(settings.seeds):
                noisy, true = search(
                    environment, make(1000 * settings.seed + seed), candidates, longest, settings.batch
                )
                best[index] = min(best[index], *true)
                seeds.append(selected_us(noisy, true))
            runs[name].append(seeds)
    scores = tuple(
        summarise(name, searches, best, settings.longest.get(name, CHECKPOINTS[-1])) for name, searches in runs.items()
    )
    return Comparison(settings, environment.on, scores, trained.evaluations)


def markdown(comparison: Comparison) -> str:
    """The table with its conditions and claims."""
    settings = comparison.settings
    rows = [
        f"# Ways of searching, {settings.gpu} {settings.acc}, compared in a model",
        "",
        f"**Modelled, not measured**: {comparison.on}. {settings.held_out} problems absent from all training, "
        f"{settings.seeds} seeds. Trained on {settings.trained} others, {comparison.trained_evaluations} evaluations "
        "for each update. Regret: the chosen record's slowdown against the best known one, mean over problems, with a "
        "95 % bootstrap interval over problems.",
        "",
        "| proposer | "
        + " | ".join(f"regret at {count}" for count in CHECKPOINTS)
        + f" | evaluations to {CLOSE:.0%} | got there |",
        "|---|" + "---:|" * (len(CHECKPOINTS) + 2),
    ]
    for score in comparison.scores:
        cells = [
            f"{value:.1%} [{low:.1%}, {high:.1%}]"
            for value, (low, high) in zip(score.regret, score.bounds, strict=True)
        ]
        length = f"{score.close:.0f}" if score.close < math.inf else f"> {score.longest}"
        rows.append(f"| {score.name} | {' | '.join(cells)} | {length} | {score.reached:.0%} of {score.longest} |")
    return "\n".join([*rows, "", *(f"- {claim}" for claim in claims(comparison))]) + "\n"


def claims(comparison: Comparison) -> list[str]:
    """Sentences that state each expectation and whether the scores meet it."""
    by_name = {score.name: score for score in comparison.scores}
    sentences = []
    if (policy := by_name.get("policy")) and (blind := by_name.get("random")):
        length = blind.close if blind.close < math.inf else float(blind.longest)
        prefix = "" if blind.close < math.inf else "more than "
        reached = policy.close <= length / 3
        sentences.append(
            f"The learned policy needs {policy.close:.0f} evaluations to {CLOSE:.0%} of the best known, "
            f"random legal search {prefix}{length:.0f}: {'at most one third' if reached else 'MORE than one third'}."
        )
    prior = by_name.get("prior, frozen")
    for name in ("contrast, frozen", "group, frozen", "shuffled, frozen", "policy, shuffled"):
        if prior and (score := by_name.get(name)):
            better = [
                count
                for count, value, reference in zip(CHECKPOINTS, score.regret, prior.regret, strict=True)
                if value < reference
            ]
            separate = [
                count
                for count, value, reference in zip(CHECKPOINTS, score.bounds, prior.bounds, strict=True)
                if value[1] < reference[0]
            ]
            sentences.append(
                f"{name}: less regret than the frozen prior at {better or 'none'} of {list(CHECKPOINTS)}, "
                f"with intervals apart at {separate or 'none'}."
            )
    return sentences


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
