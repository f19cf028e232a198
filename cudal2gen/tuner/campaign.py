"""Runs campaigns, which search for faster records of many problems, and decides which winners may enter the catalog.

A campaign resumes from the trials that are stored under its name.
"""

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
from cudal2gen.tuner import search as problem_search
from cudal2gen.tuner.concurrent_searches import RankedSearch, ThreadedHost, run_searches
from cudal2gen.tuner.executor import Executor
from cudal2gen.tuner.proposal import Proposer
from cudal2gen.tuner.search import Search, SearchLimits

# For ``run_in_turns``, which searches the problems in several rounds:
MOST_KEPT = 32  # problems whose candidates are kept from round to round; they take some megabytes each
FIRST_EVALUATIONS = 4  # evaluations of each problem in the first round
ROUND_BATCH = 4  # most evaluations of a batch in each round
SHORT_SHARE = 0.7  # fraction of the budget for short timings; the rest is for longer ones


@dataclass
class CampaignState:
    """The state of a campaign.

    - ``problems``: the number of problems; ``start_time``: when the campaign began, in seconds of time.monotonic().
    - ``searches``: the searches that have ended, in the order in which they ended. When the campaign is over, they are
      in the order of the problems.
    - ``under_way``: the searches that have begun and not ended.
    - ``faults``: problems that could not be searched, each with the reason.
    """

    problems: int
    start_time: float
    searches: list[Search] = field(default_factory=list)
    under_way: list[Search] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def started(self) -> list[Search]:
        """All searches that have begun: first those that have ended, then those under way."""
        return self.searches + self.under_way

    @property
    def evaluations(self) -> int:
        """The number of short timings of legal records in all searches, stored ones of earlier runs included."""
        return sum(len(search.evaluations) for search in self.started)

    @property
    def failures(self) -> Counter[str]:
        """The number of trials without a time in all searches, by outcome."""
        return sum((search.failures for search in self.started), Counter())

    @property
    def improved(self) -> list[Search]:
        """The ended searches whose winner is faster than the incumbent beyond noise."""
        return [search for search in self.searches if search.improved]

    def early_ends(self, evaluations: int) -> Counter[str]:
        """Counts, by reason, the searches of this run that ended with fewer than ``evaluations`` evaluations."""
        short = [search for search in self.searches if len(search.evaluations) < evaluations]
        return Counter(search.stop_reason for search in short if search.stop_reason != problem_search.FINISHED)


class Incumbents:
    """Finds the record that a problem's search must beat.

    It is the problem's own record among ``records``, else the nearest problem's record that is legal for this problem;
    None without one.
    """

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
class CampaignPlan:
    """The problems of a campaign, and how each of them is searched.

    - ``incumbent``, ``proposer`` and ``find_candidates`` give what a problem's search begins with. A proposer should
      draw random numbers by problem and seed, so that other searches that are under way do not change its proposals.
    - ``store``: the file of the trials, which bear the name ``run_name``.
    - ``limits`` end each search; ``budget_seconds`` ends the campaign.
    - ``learn`` receives each search that ended, so that proposers of later searches can learn from it. It is called in
      the order of the problems and with the lag of ``concurrent_searches``; ``run_in_turns`` calls it in each round.
    """

    problems: Sequence[Problem]
    incumbent: Callable[[Problem], Record | None]
    proposer: Callable[[Problem], Proposer]
    store: Path
    run_name: str
    limits: SearchLimits
    budget_seconds: float | None = None
    find_candidates: Callable[[Problem], space.Candidates] = space.candidates
    learn: Callable[[Search], None] = lambda _: None

    def stored(self, card: str) -> dict[Problem, list[Trial]]:
        """The stored trials of this run, by problem. Measurements on another GPU than ``card`` are left out; if
        ``card`` is "", because the GPU is not yet known, all are taken."""
        stored: dict[Problem, list[Trial]] = {}
        for trial in results.trials(self.store) if self.store.is_file() else []:
            if trial.run == self.run_name and (trial.environment != "gpu" or card in ("", trial.on)):
                stored.setdefault(trial.problem, []).append(trial)
        return stored


class _Campaign:
    """Begins and ends the searches of a campaign, and keeps its state."""

    def __init__(self, plan: CampaignPlan, executor: Executor, progress: Callable[[CampaignState], None]) -> None:
        self._plan, self._executor, self._progress = plan, executor, progress
        self.state = CampaignState(len(plan.problems), time.monotonic())
        self._stored, self._problems = plan.stored(executor.on), iter(plan.problems)

    def _out_of_time(self) -> bool:
        """Whether the budget is spent; a campaign without one has time."""
        budget = self._plan.budget_seconds
        return budget is not None and time.monotonic() - self.state.start_time >= budget

    def begin(self, rank: int) -> RankedSearch | None:
        """Begins the search of the next problem that has candidates, and returns it with its number ``rank``.

        Returns None after the last problem, or when the budget is spent. A problem without a legal record becomes one
        of the state's ``faults``.
        """
        plan = self._plan
        for problem in self._problems:
            if self._out_of_time():
                return None
            try:
                candidates = plan.find_candidates(problem)
            except IllegalRecord as error:
                self.state.faults.append(f"{problem.mnk}: {error}")
                continue
            record = plan.incumbent(problem)
            if record is not None and candidates.refusal(record):
                record = None
            if record is not None:
                self._executor.prepare([record])
            search = Search(candidates, record, list(self._stored.get(problem, ())))
            self.state.under_way.append(search)
            steps = problem_search.steps(
                search,
                plan.proposer(problem),
                self._executor,
                lambda trials: results.append(trials, plan.store),
                plan.limits,
                plan.run_name,
                self._out_of_time,
                lambda _: self._progress(self.state),
            )
            return RankedSearch(rank, search, steps)
        return None

    def end(self, ranked: RankedSearch) -> None:
        """Moves a search to those that ended."""
        search = ranked.search
        # Candidates of a thousand problems would take gigabytes; the result is in the trials.
        search.candidates = space.Candidates(search.problem, (), ())
        self.state.under_way = [started for started in self.state.under_way if started is not search]
        self.state.searches.append(search)
        self._progress(self.state)


def run(
    plan: CampaignPlan,
    executor: Executor,
    progress: Callable[[CampaignState], None] = lambda _: None,
    after: Callable[[Search], None] = lambda _: None,
    in_flight: int | None = None,
) -> CampaignState:
    """Searches every problem within the budget, several at a time, and resumes from the stored trials of this run.

    ``after`` receives each search that ended, in the order of the problems and with the lag of ``concurrent_searches``.
    A problem without a legal record becomes one of the state's ``faults``. ``in_flight``: the number of concurrent
    searches; by default the executor decides.
    """
    campaign = _Campaign(plan, executor, progress)
    in_flight = max(1, min(in_flight or executor.in_flight(), len(plan.problems)))
    host = ThreadedHost(executor, in_flight)
    by_rank: list[Search] = []

    def learn(ranked: RankedSearch) -> None:
        by_rank.append(ranked.search)
        plan.learn(ranked.search)
        after(ranked.search)

    try:
        run_searches(campaign.begin, host, in_flight, campaign.end, learn)
    finally:
        host.close()
    campaign.state.searches = by_rank
    return campaign.state


def run_in_turns(
    plan: CampaignPlan,
    executor: Executor,
    progress: Callable[[CampaignState], None] = lambda _: None,
    after: Callable[[Search], None] = lambda _: None,
) -> CampaignState:
    """Searches the problems in rounds, for a budget that may be too short for all evaluations of ``run``.

    Each problem gets ``FIRST_EVALUATIONS`` in the first round, and each further round doubles their number. The rounds
    may take 70 % of the budget (``SHORT_SHARE``). The rest is kept for longer timings of the winners of problems with a
    gain, the largest gain first. ``progress`` receives the state of each round, ``after`` the searches at the end.
    Raises ValueError for a plan without a budget.
    """
    if plan.budget_seconds is None:
        raise ValueError("run_in_turns needs a budget: set CampaignPlan.budget_seconds")
    plan = replace(plan, find_candidates=lru_cache(MOST_KEPT)(plan.find_candidates))
    total = CampaignState(len(plan.problems), time.monotonic())
    latest: dict[Problem, Search] = {}

    def search_round(
        problems: Sequence[Problem], budget_part: float, limits: SearchLimits, in_flight: int | None = None
    ) -> None:
        """Searches the problems until all rounds so far have spent ``budget_part`` (0 to 1) of the plan's budget."""
        seconds_left = budget_part * (plan.budget_seconds or 0.0) - (time.monotonic() - total.start_time)
        if seconds_left > 0:
            part = replace(plan, problems=problems, limits=limits, budget_seconds=seconds_left)
            ended = run(part, executor, progress, in_flight=in_flight)
            latest.update({search.problem: search for search in ended.searches})
            total.faults += [fault for fault in ended.faults if fault not in total.faults]

    most, evaluations = plan.limits.evaluations, 0
    while evaluations < most:
        evaluations = min(most, 2 * evaluations or FIRST_EVALUATIONS)
        short = replace(plan.limits, evaluations=evaluations, batch=min(ROUND_BATCH, plan.limits.batch), longer=False)
        search_round(plan.problems, SHORT_SHARE, short)
    gains = {problem: gain for problem, search in latest.items() if (gain := _short_gain(search)) > 1}
    # One search at a time: the kernels are compiled already, so concurrency gains nothing, and a search that has begun
    # runs past the budget, so several would exceed it together. No new candidates: one evaluation, and a longer timing.
    by_gain = sorted(gains, key=lambda problem: -gains[problem])
    search_round(by_gain, 1.0, replace(plan.limits, evaluations=1), in_flight=1)
    total.searches = [latest[problem] for problem in plan.problems if problem in latest]
    for search in total.searches:
        if len(search.evaluations) < most and search.stop_reason != problem_search.FINISHED:
            search.stop_reason = "out of time"
        after(search)
    return total


def _short_gain(search: Search) -> float:
    """The incumbent's time over that of the fastest short trial; infinite without an incumbent, 0 without a trial."""
    best = min((trial for trial in search.short_trials if trial.measured), key=lambda trial: trial.cost, default=None)
    if best is None:
        return 0.0
    ratio = best.faster_than(INCUMBENT)
    return ratio.value if ratio else math.inf


def replay_summary(state: CampaignState, least_us: Callable[[Problem], float]) -> str:
    """One line that says how much slower the chosen records are than the best recorded ones.

    ``least_us`` gives the best recorded time of a problem, in µs.
    """
    regrets = [search.winner.median_us / least_us(search.problem) - 1 for search in state.searches if search.winner]
    if not regrets:
        return "replay: no problem was searched"
    best = sum(regret == 0 for regret in regrets)
    return (
        f"replay: chosen records are {sum(regrets) / len(regrets):.2%} slower than the best recorded ones on average, "
        f"{best} of {len(regrets)} problems' best was found"
    )


def catalog_record(search: Search) -> Record:
    """The winner as a record of the catalog, whose origin names the device, the proposer and the changed fields.

    Raises ValueError for a search without an improvement.
    """
    winner = search.winner
    if winner is None or not search.improved:
        raise ValueError(f"{search.problem.mnk}: nothing improved beyond noise, so the catalog keeps its record")
    changed = sorted(_differing(search.incumbent, parse(winner.record)))
    source = f"cudal2gen tune, measured on {winner.on}, proposed by {winner.proposer}"
    origin = {"source": source, "structure": "tuned", "changed": changed}
    return parse(winner.record | {"origin": origin})


def diff(search: Search) -> list[str]:
    """The fields that the winner changes, a line each."""
    winner = search.winner
    if winner is None:
        return []
    changes = _differing(search.incumbent, parse(winner.record))
    return [f"{name}: {before!r} -> {after!r}" for name, (before, after) in changes.items()]


def _differing(old: Record | None, new: Record) -> dict[str, tuple[Any, Any]]:
    """For each field in which the records differ the old and the new value; without an old record, all fields."""
    if old is None:
        return {name: (None, value) for name, value in space.decisions(new).items()}
    return space.differing(old, new)


def write_obstacle(search: Search, verdict_clean: bool) -> str:
    """Why a search's winner may not be written to the catalog; empty if it may."""
    winner = search.winner
    if winner is None or not search.improved:
        return "nothing improved beyond noise"
    if winner.environment != "gpu":
        return f"its times come from the {winner.environment} environment ({winner.on}), not from a GPU"
    if not winner.on_its_gpu:
        return f"it was measured on {winner.on}, not on {search.problem.gpu}"
    return "" if verdict_clean else "its kernel has no clean verdict"
