"""Campaigns: races over many problems, resumed from stored trials; improvements go to the catalog."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from cudal2gen import results
from cudal2gen.generation import catalog
from cudal2gen.kernel import IllegalRecord, Problem, Record, parse, space
from cudal2gen.results import INCUMBENT, Trial
from cudal2gen.tuner import race as races
from cudal2gen.tuner.executor import Executor
from cudal2gen.tuner.flight import RankedRace, ThreadedHost, run_races
from cudal2gen.tuner.proposal import Proposer
from cudal2gen.tuner.race import Race

MOST_KEPT = 32  # problems whose candidates are kept from turn to turn, some megabytes each
FIRST = 4  # evaluations of each problem before any gets more, where problems take turns
SHORT_SHARE = 0.7  # of a budget in turns, for short timings; the rest is for longer ones


@dataclass
class Standing:
    """The state of a campaign: races that ended, by the order of their ends until the campaign ends, then by that of
    their problems; races under way; faults. ``begin``: seconds of time.monotonic()."""

    problems: int
    begin: float
    races: list[Race] = field(default_factory=list)
    under_way: list[Race] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def started(self) -> list[Race]:
        return self.races + self.under_way

    @property
    def evaluations(self) -> int:
        return sum(len(race.evaluations) for race in self.started)

    @property
    def failures(self) -> Counter[str]:
        return sum((race.failures for race in self.started), Counter())

    @property
    def improved(self) -> list[Race]:
        return [race for race in self.races if race.improved]

    def early_ends(self, evaluations: int) -> Counter[str]:
        """Reasons why races of this run ended early, each with the number of races."""
        short = [race for race in self.races if len(race.evaluations) < evaluations]
        return Counter(race.stop_reason for race in short if race.stop_reason != races.FINISHED)


class Incumbents:
    """A problem's own record in a catalog, else the nearest one that is legal for it, else None."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._pool = list(records)
        self._by_key = {record.key: record for record in self._pool}
        self._by_problem: dict[Problem, Record | None] = {}

    def __call__(self, problem: Problem) -> Record | None:
        if problem not in self._by_problem:
            try:
                record = self._by_key.get(problem.key)
                self._by_problem[problem] = record or catalog.nearest(problem, self._pool).record
            except catalog.CatalogError:
                self._by_problem[problem] = None
        return self._by_problem[problem]


@dataclass(frozen=True)
class Plan:
    """What a campaign races, and where its trials go: to ``store``, under the name of the run.

    ``incumbent``, ``proposer``, ``find_candidates``: what a problem's race begins with. What a race does follows from
    its proposer and its trials, so a proposer that draws by problem and seed answers alike whatever else is under way.
    A replay's candidates are recorded records alone. ``settings``: the end of each race; ``budget_seconds``: that of
    the campaign.
    """

    problems: Sequence[Problem]
    incumbent: Callable[[Problem], Record | None]
    proposer: Callable[[Problem], Proposer]
    store: Path
    run_name: str
    settings: races.Settings
    budget_seconds: float | None = None
    find_candidates: Callable[[Problem], space.Candidates] = space.candidates

    def stored(self, card: str) -> dict[Problem, list[Trial]]:
        """The trials of this run so far; of measured ones those of ``card``, where it is known yet."""
        stored: dict[Problem, list[Trial]] = {}
        for trial in results.trials(self.store) if self.store.is_file() else []:
            if trial.run == self.run_name and (trial.environment != "gpu" or card in ("", trial.on)):
                stored.setdefault(trial.problem, []).append(trial)
        return stored


class _Campaign:
    """State that the races of a campaign share."""

    def __init__(self, plan: Plan, executor: Executor, progress: Callable[[Standing], None]) -> None:
        self._plan, self._executor, self._progress = plan, executor, progress
        self.standing = Standing(len(plan.problems), time.monotonic())
        self._stored, self._problems = plan.stored(executor.on), iter(plan.problems)

    def _out_of_time(self) -> bool:
        budget = self._plan.budget_seconds
        return budget is not None and time.monotonic() - self.standing.begin >= budget

    def begin(self, rank: int) -> RankedRace | None:
        """The next problem's race; None after the last, or when time is out."""
        plan = self._plan
        for problem in self._problems:
            if self._out_of_time():
                return None
            try:
                candidates = plan.find_candidates(problem)
            except IllegalRecord as error:
                self.standing.faults.append(f"{problem.mnk}: {error}")
                continue
            record = plan.incumbent(problem)
            if record is not None and candidates.refusal(record):
                record = None
            if record is not None:
                self._executor.prepare([record])
            race = Race(candidates, record, list(self._stored.get(problem, ())))
            self.standing.under_way.append(race)
            steps = races.steps(
                race,
                plan.proposer(problem),
                self._executor,
                lambda trials: results.append(trials, plan.store),
                plan.settings,
                plan.run_name,
                self._out_of_time,
                lambda _: self._progress(self.standing),
            )
            return RankedRace(rank, race, steps)
        return None

    def end(self, ranked: RankedRace) -> None:
        """Moves a race to those that ended."""
        race = ranked.race
        # Dropped: the candidates of a thousand problems would take gigabytes, and the trials hold the result.
        race.candidates = space.Candidates(race.problem, (), ())
        self.standing.under_way = [started for started in self.standing.under_way if started is not race]
        self.standing.races.append(race)
        self._progress(self.standing)


def run(
    plan: Plan,
    executor: Executor,
    progress: Callable[[Standing], None] = lambda _: None,
    after: Callable[[Race], None] = lambda _: None,
    in_flight: int | None = None,
) -> Standing:
    """Races every problem within the budget, several at a time, and resumes from the trials of this run in the store.

    ``after`` receives each race that ended, in the order of the problems, as ``flight`` says: a proposer that learns
    from it across problems begins race i with what races up to i - ``flight.lag`` taught. A problem without a legal
    record is a fault of the standing. ``in_flight``: races at a time, if not the executor's number.
    """
    campaign = _Campaign(plan, executor, progress)
    in_flight = max(1, min(in_flight or executor.in_flight(), len(plan.problems)))
    host = ThreadedHost(executor, in_flight)
    by_rank: list[Race] = []

    def learn(ranked: RankedRace) -> None:
        by_rank.append(ranked.race)
        after(ranked.race)

    try:
        run_races(campaign.begin, host, in_flight, campaign.end, learn)
    finally:
        host.close()
    campaign.standing.races = by_rank
    return campaign.standing


def run_in_turns(
    plan: Plan,
    executor: Executor,
    progress: Callable[[Standing], None] = lambda _: None,
    after: Callable[[Race], None] = lambda _: None,
) -> Standing:
    """``run`` where the budget is short for the problems: each gets ``FIRST`` evaluations before any gets more, then
    twice as many, and so on; then those that have a faster record than the incumbent are timed for longer, the largest
    gain first.

    ``after`` receives the races at the end. Raises ValueError for a plan without a budget.
    """
    if plan.budget_seconds is None:
        raise ValueError("problems take turns within a budget: set Plan.budget_seconds")
    plan = replace(plan, find_candidates=lru_cache(MOST_KEPT)(plan.find_candidates))
    whole = Standing(len(plan.problems), time.monotonic())
    latest: dict[Problem, Race] = {}

    def turn(problems: Sequence[Problem], share: float, settings: races.Settings, in_flight: int | None = None) -> None:
        left = share * (plan.budget_seconds or 0.0) - (time.monotonic() - whole.begin)
        if left > 0:
            part = replace(plan, problems=problems, settings=settings, budget_seconds=left)
            ended = run(part, executor, progress, in_flight=in_flight)
            latest.update({race.problem: race for race in ended.races})
            whole.faults += [fault for fault in ended.faults if fault not in whole.faults]

    most, evaluations = plan.settings.evaluations, 0
    while evaluations < most:
        evaluations = min(most, 2 * evaluations or FIRST)
        short = replace(plan.settings, evaluations=evaluations, batch=min(FIRST, plan.settings.batch), longer=False)
        turn(plan.problems, SHORT_SHARE, short)
    gains = {problem: gain for problem, race in latest.items() if (gain := _short_gain(race)) > 1}
    # One at a time: nothing is left to compile, and a race that has begun is not ended by the budget.
    turn(sorted(gains, key=lambda problem: -gains[problem]), 1.0, replace(plan.settings, evaluations=1), in_flight=1)
    whole.races = [latest[problem] for problem in plan.problems if problem in latest]
    for race in whole.races:
        if len(race.evaluations) < most and race.stop_reason != races.FINISHED:
            race.stop_reason = "out of time"
        after(race)
    return whole


def _short_gain(race: Race) -> float:
    """The incumbent's time over that of the fastest short trial; infinite without an incumbent, 0 without a trial."""
    best = min((trial for trial in race.short_trials if trial.measured), key=lambda trial: trial.cost, default=None)
    if best is None:
        return 0.0
    ratio = best.faster_than(INCUMBENT)
    return ratio.value if ratio else math.inf


def replayed(standing: Standing, least_us: Callable[[Problem], float]) -> str:
    """How much slower than the best recorded record what a replay's races chose is, in one line. ``least_us``: the
    best record's time."""
    regrets = [race.winner.median_us / least_us(race.problem) - 1 for race in standing.races if race.winner]
    if not regrets:
        return "replay: no problem was searched"
    best = sum(regret == 0 for regret in regrets)
    return (
        f"replay: chosen records are {sum(regrets) / len(regrets):.2%} slower than the best recorded ones on average, "
        f"{best} of {len(regrets)} problems' best was found"
    )


def catalog_record(race: Race) -> Record:
    """The winner as a record of the catalog: its origin names the device, the proposer and the changed fields.

    Raises ValueError for a race without an improvement.
    """
    winner = race.winner
    if winner is None or not race.improved:
        raise ValueError(f"{race.problem.mnk}: nothing improved beyond noise, so the catalog keeps its record")
    changed = sorted(_differing(race.incumbent, parse(winner.record)))
    source = f"cudal2gen tune, measured on {winner.on}, proposed by {winner.proposer}"
    origin = {"source": source, "structure": "tuned", "changed": changed}
    return parse(winner.record | {"origin": origin})


def diff(race: Race) -> list[str]:
    """The fields that the winner changes, a line each."""
    winner = race.winner
    if winner is None:
        return []
    changes = _differing(race.incumbent, parse(winner.record))
    return [f"{name}: {before!r} -> {after!r}" for name, (before, after) in changes.items()]


def _differing(old: Record | None, new: Record) -> dict[str, tuple[Any, Any]]:
    if old is None:
        return {name: (None, value) for name, value in space.decisions(new).items()}
    return space.differing(old, new)


def may_write(race: Race, verdict_clean: bool) -> str:
    """The reason that keeps a race's winner out of the catalog; empty if there is none."""
    winner = race.winner
    if winner is None or not race.improved:
        return "nothing improved beyond noise"
    if winner.environment != "gpu":
        return f"its times come from the {winner.environment} environment ({winner.on}), not from a GPU"
    if not winner.on_its_gpu:
        return f"it was measured on {winner.on}, not on {race.problem.gpu}"
    return "" if verdict_clean else "its kernel has no clean verdict"


def mean_curve(standing: Standing) -> list[tuple[float, float]]:
    """Points (evaluations, mean over races of the best cost so far), relative to each race's first cost."""
    curves = [[cost for cost in race.curve if cost != float("inf")] for race in standing.races]
    relative = [[cost / curve[0] for cost in curve] for curve in curves if curve]
    longest = max(map(len, relative), default=0)
    return [
        (index + 1.0, sum(curve[min(index, len(curve) - 1)] for curve in relative) / len(relative))
        for index in range(longest)
    ]
