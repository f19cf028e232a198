"""Campaigns: races over many problems, resumed from stored trials; improvements go to the catalog."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cudal2gen import catalog, results
from cudal2gen.kernel import IllegalRecord, Problem, Record, parse
from cudal2gen.results import Trial
from cudal2gen.tuner import race as races
from cudal2gen.tuner import space
from cudal2gen.tuner.executor import Executor
from cudal2gen.tuner.flight import Flight, ThreadedHost, run_races
from cudal2gen.tuner.proposal import Proposer
from cudal2gen.tuner.race import Race


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


@dataclass
class _Campaign:
    """State that the races of a campaign share."""

    problems: Iterator[Problem]
    incumbent: Callable[[Problem], Record | None]
    proposer: Callable[[Problem], Proposer]
    executor: Executor
    store: Path
    settings: races.Settings
    run_name: str
    out_of_time: Callable[[], bool]
    progress: Callable[[Standing], None]
    find_candidates: Callable[[Problem], space.Candidates]
    stored: dict[Problem, list[Trial]]
    standing: Standing

    def begin(self, rank: int) -> Flight | None:
        """The next problem's race; None after the last, or when time is out."""
        for problem in self.problems:
            if self.out_of_time():
                return None
            try:
                candidates = self.find_candidates(problem)
            except IllegalRecord as error:
                self.standing.faults.append(f"{problem.mnk}: {error}")
                continue
            record = self.incumbent(problem)
            if record is not None and candidates.refusal(record):
                record = None
            race = Race(candidates, record, list(self.stored.get(problem, ())))
            self.standing.under_way.append(race)
            steps = races.steps(
                race,
                self.proposer(problem),
                self.executor,
                lambda trials: results.append(trials, self.store),
                self.settings,
                self.run_name,
                self.out_of_time,
                lambda _: self.progress(self.standing),
            )
            return Flight(rank, race, steps)
        return None

    def end(self, flight: Flight) -> None:
        """Moves a race to those that ended."""
        race = flight.race
        # Dropped: the candidates of a thousand problems would take gigabytes, and the trials hold the result.
        race.candidates = space.Candidates(race.problem, (), ())
        self.standing.under_way = [other for other in self.standing.under_way if other is not race]
        self.standing.races.append(race)
        self.progress(self.standing)


def run(
    problems: Sequence[Problem],
    incumbent: Callable[[Problem], Record | None],
    proposer: Callable[[Problem], Proposer],
    executor: Executor,
    store: Path,
    settings: races.Settings,
    run_name: str,
    budget_seconds: float | None = None,
    progress: Callable[[Standing], None] = lambda _: None,
    after: Callable[[Race], None] = lambda _: None,
    find_candidates: Callable[[Problem], space.Candidates] = space.candidates,
) -> Standing:
    """Races every problem within the budget, several at a time, and resumes from the trials of this run in ``store``.

    ``proposer``: one for each race. What a race does follows from its proposer and its trials, so a proposer that draws
    by problem and seed answers alike whatever else is under way. ``after`` receives each race that ended, in the order
    of ``problems``, as ``flight`` says: a proposer that learns from it across problems begins race i with what races
    up to i - ``flight.lag`` taught. ``find_candidates``: a replay's are recorded records alone. A problem without a
    legal record is a fault of the standing.
    """
    begin = time.monotonic()
    standing = Standing(len(problems), begin)
    stored: dict[Problem, list[Trial]] = {}
    for trial in results.trials(store) if store.is_file() else []:
        if trial.run == run_name:
            stored.setdefault(trial.problem, []).append(trial)

    def out_of_time() -> bool:
        return budget_seconds is not None and time.monotonic() - begin >= budget_seconds

    campaign = _Campaign(
        iter(problems), incumbent, proposer, executor, store, settings, run_name, out_of_time, progress,
        find_candidates, stored, standing,
    )  # fmt: skip
    in_flight = max(1, min(executor.in_flight(), len(problems)))
    host = ThreadedHost(executor, in_flight)
    ranks: list[Race] = []

    def learn(flight: Flight) -> None:
        ranks.append(flight.race)
        after(flight.race)

    try:
        run_races(campaign.begin, host, in_flight, campaign.end, learn)
    finally:
        host.close()
    standing.races = ranks
    return standing


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
