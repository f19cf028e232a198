"""Which way of searching is better? All proposers on the same held-out problems, at equal numbers of evaluations.

In the model environment nothing is measured: what is compared is ways of searching, not kernels, and the table says so.
To keep it from going in circles, no proposer may ask the analytic model, hidden terms are added to it, and held-out
problems are removed from pretraining, from the pool of nearest problems and from what the policy was trained on.

Regret after so many evaluations: by how much the record that a search would then choose, the one with the best noisy
time, is slower than the best that is known, as a part of it. The best known of a problem is found by exhausting its
candidates, or by any search if that found a better one.
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
from cudal2gen.tuner.proposers import (
    Absent,
    Evolution,
    Heuristics,
    Learned,
    Mixture,
    Nearest,
    Proposer,
    Question,
    Random,
    Tpe,
)

AT = (8, 16, 32, 64)
CLOSE = 0.98  # of the best known speed


@dataclass(frozen=True)
class Settings:
    """``seconds``: at most so long for imitation. ``longest``: of the searches for ``CLOSE``, in evaluations."""

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
    """One proposer's: mean regret at each of ``AT`` with 95 % intervals, and evaluations until ``CLOSE``.

    ``close``: the median over problems and seeds; infinite where fewer than half of the searches got there.
    ``searched``: how far they went. ``reached``: the share that got there.
    """

    name: str
    regret: tuple[float, ...]
    bounds: tuple[tuple[float, float], ...]
    close: float
    reached: float
    searched: int


class Compared(NamedTuple):
    """Every proposer's score, and where they were compared."""

    settings: Settings
    on: str
    scores: tuple[Score, ...]
    trained_evaluations: int


def split(records: Sequence[Record], settings: Settings) -> tuple[list[Problem], list[Problem]]:
    """Problems held out, and problems to train on: the published sizes in a random order, of all size classes."""
    from cudal2gen.bench import stratified

    sizes = sorted({(record.m, record.n, record.k) for record in records})
    problems = [Problem(gpu=settings.gpu, acc=settings.acc, layout="tn", m=m, n=n, k=k) for m, n, k in sizes]
    order = stratified(problems, settings.seed)
    return order[: settings.held_out], order[settings.held_out : settings.held_out + settings.trained]


def elsewhere(records: Iterable[Record], held: Iterable[Problem]) -> list[Record]:
    """Records of other sizes than those held out, whatever their GPU."""
    out = {(problem.m, problem.n, problem.k) for problem in held}
    return [record for record in records if (record.m, record.n, record.k) not in out]


def best_known(environment: Model, found: space.Candidates, refined: int = 40) -> float:
    """The least time without noise: over all structures, and over all choices of loose heads for the best of them."""
    times = environment.true_us(found.records)
    best = float(times.min())
    for row in np.argsort(times)[:refined].tolist():
        heads = found.heads[found.records[row].family]
        choices = itertools.product(*(range(len(values)) for values in heads.values()))
        records = [found.compose(row, dict(zip(heads, one, strict=True)), "best known") for one in choices]
        best = min(best, float(environment.true_us(records).min()))
    return best


def search(
    environment: Model, proposer: Proposer, found: space.Candidates, evaluations: int, batch: int
) -> tuple[list[float], list[float]]:
    """Noisy and true times of what a proposer has evaluated, in order; fewer where it had nothing more to say."""
    trials: list[Trial] = []
    seen: set[object] = set()
    idle = 0
    while len(trials) < evaluations and idle < 5:
        asked = proposer.propose(Question(found, tuple(trials), None, frozenset(seen)), batch)
        fresh: dict[object, Record] = {}
        for one in asked:
            if one.record is not None and (key := space.key(one.record)) not in seen:
                fresh.setdefault(key, one.record)
        idle = 0 if fresh else idle + 1
        chosen = dict(list(fresh.items())[: evaluations - len(trials)])
        if chosen:
            told = environment.evaluate(found.problem, list(chosen.values()))
            seen |= chosen.keys()
            trials += told
            proposer.observe(Question(found, tuple(trials), None, frozenset(seen)), told)
    records = [parse(trial.record) for trial in trials]
    return [trial.median_us for trial in trials], environment.true_us(records).tolist()


def chosen_us(noisy: Sequence[float], true: Sequence[float]) -> list[float]:
    """After each evaluation the true time of what looks best by then."""
    found, at = [], 0
    for number, time in enumerate(noisy):
        at = number if time < noisy[at] else at
        found.append(true[at])
    return found


def regret(chosen: Sequence[float], best: float, at: int) -> float:
    """1 - best / chosen after ``at`` evaluations; of a search that ended before, what it had then."""
    return 1 - best / chosen[min(at, len(chosen)) - 1]


def until_close(chosen: Sequence[float], best: float) -> float:
    """Evaluations until what is chosen has ``CLOSE`` of the best known speed, and keeps it; infinite if never."""
    far = [number for number, time in enumerate(chosen, 1) if best / time < CLOSE]
    if not far:
        return 1.0
    return far[-1] + 1.0 if far[-1] < len(chosen) else math.inf


def summarise(name: str, runs: Sequence[Sequence[Sequence[float]]], best: Sequence[float], searched: int) -> Score:
    """``runs``: of each problem, of each seed, the chosen times. Intervals: bootstrap over problems, means of seeds."""
    pairs = list(zip(runs, best, strict=True))
    each = [[[regret(chosen, least, at) for at in AT] for chosen in seeds] for seeds, least in pairs]
    regrets = np.array(each).mean(axis=1)
    picks = np.random.default_rng(0).integers(0, len(regrets), (2000, len(regrets)))
    low, high = np.percentile(regrets[picks].mean(axis=1), (2.5, 97.5), axis=0).tolist()
    needed = [until_close(chosen, least) for seeds, least in pairs for chosen in seeds]
    return Score(
        name,
        tuple(regrets.mean(axis=0).tolist()),
        tuple(zip(low, high, strict=True)),
        median(needed),
        sum(one < math.inf for one in needed) / len(needed),
        searched,
    )


class Trained(NamedTuple):
    """Policies that were trained alike but for one thing; ``prior`` was not trained at all."""

    prior: Policy
    contrast: Policy
    group: Policy
    shuffled: Policy
    pool: list[Record]
    evaluations: int


def train(environment: Model, published: Sequence[Record], problems: Sequence[Problem], settings: Settings) -> Trained:
    """Imitation of published records, then the two updates at equal numbers of evaluations on training problems.

    ``pool``: the best record that was recorded for each training problem.
    """
    prior = Policy(settings.seed)
    prior.imitate(published, settings.imitation_seconds)
    views: list[View] = [prior.view(space.candidates(problem)) for problem in problems]
    rng = random.Random(settings.seed)
    ranked, pool = [], []
    for view in views:
        records = [view.candidates.drawn(rng, "recorded") for _ in range(settings.evaluations_each)]
        scores = rewards(environment, view.candidates.problem, records)
        ranked.append(Ranked(records, scores))
        pool.append(max(zip(scores, records, strict=True), key=lambda one: one[0])[1])
    contrast = prior.copy(settings.seed)
    policies.compare(contrast, ranked, settings.contrast_rounds, seed=settings.seed)
    shuffled = prior.copy(settings.seed)
    mixed = [Ranked(one.records, rng.sample(list(one.scores), len(one.scores))) for one in ranked]
    policies.compare(shuffled, mixed, settings.contrast_rounds, seed=settings.seed)
    group = prior.copy(settings.seed)
    spent = policies.practise(
        group, views, lambda problem, records: rewards(environment, problem, records), settings.group_rounds,
        kl=0.1, seed=settings.seed,
    )  # fmt: skip
    return Trained(prior, contrast, group, shuffled, pool, max(spent, settings.evaluations_each * len(problems)))


def rewards(environment: Model, problem: Problem, records: Sequence[Record]) -> list[float]:
    """The logarithm of speed: no reference is needed to compare records of one problem."""
    return [-math.log(trial.median_us) for trial in environment.evaluate(problem, records)]


def contestants(trained: Trained) -> dict[str, Callable[[int], Proposer]]:
    """By name, how a proposer is made of a seed. Those whose libraries are not installed are left out."""
    found: dict[str, Callable[[int], Proposer]] = {
        "random": Random,
        "nearest": lambda seed: Mixture([Nearest(trained.pool), Random(seed)]),
        "heuristics": lambda seed: _first(Heuristics(), Random(seed)),
        "tpe": Tpe,
        "evolution": Evolution,
        "prior, frozen": lambda seed: Learned(trained.prior, seed=seed, frozen=True),
        "contrast, frozen": lambda seed: Learned(trained.contrast, seed=seed, adapt=0),
        "group, frozen": lambda seed: Learned(trained.group, seed=seed, adapt=0),
        "shuffled, frozen": lambda seed: Learned(trained.shuffled, seed=seed, adapt=0),
        "policy": lambda seed: Learned(trained.contrast, seed=seed),
        "policy, shuffled": lambda seed: Learned(trained.shuffled, seed=seed, shuffled=True),
    }
    usable = {}
    for name, make in found.items():
        try:
            make(0)
        except Absent:
            continue
        usable[name] = make
    return usable


def _first(one: Proposer, then: Proposer) -> Proposer:
    """One proposer until it has nothing more to say, then the other."""

    class First:
        name = one.name

        def propose(self, question: Question, count: int) -> list[object]:
            return one.propose(question, count) or then.propose(question, count)  # type: ignore[return-value]

        def observe(self, question: Question, trials: Sequence[Trial]) -> None:
            one.observe(question, trials)
            then.observe(question, trials)

    return First()  # type: ignore[return-value]


def compare(
    published: Sequence[Record], settings: Settings, progress: Callable[[str], None] = lambda _: None
) -> Compared:
    """Trains, searches and sums up. ``published``: the catalog's records of the accumulator to imitate."""
    environment = Model(seed=settings.seed + 1)
    held, problems = split(published, settings)
    progress(f"training on {len(problems)} problems; {len(held)} are held out")
    trained = train(environment, elsewhere(published, held), problems, settings)
    spaces = [space.candidates(problem) for problem in held]
    best = [best_known(environment, found) for found in spaces]
    runs: dict[str, list[list[list[float]]]] = {}
    for name, make in contestants(trained).items():
        if settings.only and name not in settings.only:
            continue
        longest = settings.longest.get(name, AT[-1])
        progress(f"{name}: {settings.seeds} seeds, {longest} evaluations each")
        runs[name] = []
        for at, found in enumerate(spaces):
            seeds = []
            for seed in range(settings.seeds):
                noisy, true = search(environment, make(1000 * settings.seed + seed), found, longest, settings.batch)
                best[at] = min(best[at], *true)
                seeds.append(chosen_us(noisy, true))
            runs[name].append(seeds)
    scores = tuple(summarise(name, one, best, settings.longest.get(name, AT[-1])) for name, one in runs.items())
    return Compared(settings, environment.on, scores, trained.evaluations)


def markdown(found: Compared) -> str:
    """The table, and what it is a table of."""
    settings = found.settings
    rows = [
        f"# Ways of searching, {settings.gpu} {settings.acc}, compared in a model",
        "",
        f"**Modelled, not measured**: {found.on}. {settings.held_out} problems that nothing was trained on, "
        f"{settings.seeds} seeds. Trained on {settings.trained} others, {found.trained_evaluations} evaluations for "
        "each update. Regret: how much slower the chosen record is than the best known, mean over problems, "
        "with a 95 % bootstrap interval over problems.",
        "",
        "| proposer | " + " | ".join(f"regret at {at}" for at in AT) + f" | evaluations to {CLOSE:.0%} | got there |",
        "|---|" + "---:|" * (len(AT) + 2),
    ]
    for score in found.scores:
        cells = [
            f"{value:.1%} [{low:.1%}, {high:.1%}]"
            for value, (low, high) in zip(score.regret, score.bounds, strict=True)
        ]
        needed = f"{score.close:.0f}" if score.close < math.inf else f"> {score.searched}"
        rows.append(f"| {score.name} | {' | '.join(cells)} | {needed} | {score.reached:.0%} of {score.searched} |")
    return "\n".join([*rows, "", *(f"- {said}" for said in claims(found))]) + "\n"


def claims(found: Compared) -> list[str]:
    """What was to be shown, and whether it was."""
    by_name = {score.name: score for score in found.scores}
    said = []
    if (policy := by_name.get("policy")) and (blind := by_name.get("random")):
        needed = blind.close if blind.close < math.inf else float(blind.searched)
        more = "" if blind.close < math.inf else "more than "
        met = policy.close <= needed / 3
        said.append(
            f"The learned policy needs {policy.close:.0f} evaluations to {CLOSE:.0%} of the best known, "
            f"random legal search {more}{needed:.0f}: {'at most one third' if met else 'MORE than one third'}."
        )
    prior = by_name.get("prior, frozen")
    for name in ("contrast, frozen", "group, frozen", "shuffled, frozen", "policy, shuffled"):
        if prior and (one := by_name.get(name)):
            better = [at for at, mine, theirs in zip(AT, one.regret, prior.regret, strict=True) if mine < theirs]
            apart = [at for at, mine, theirs in zip(AT, one.bounds, prior.bounds, strict=True) if mine[1] < theirs[0]]
            said.append(
                f"{name}: less regret than the frozen prior at {better or 'none'} of {list(AT)}, "
                f"with intervals apart at {apart or 'none'}."
            )
    return said


def curves(found: Compared) -> list[Curve]:
    """Of every proposer."""
    return [
        Curve(score.name, [(float(at), value) for at, value in zip(AT, score.regret, strict=True)], score.bounds)
        for score in found.scores
    ]
