"""One problem's race, in stages: proposed, pruned, tried briefly, the best for longer, in turns with the incumbent.

Every trial is handed to ``store`` before anything else is done with it: a race that was killed goes on from what is
stored. A stage's order is that of the work: what cannot be legal is not compiled, what does not compile is not run,
what is wrong is not timed, and only what was fast in a short timing gets a long one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cudal2gen import model
from cudal2gen.kernel import Problem, Record, parse
from cudal2gen.results import INCUMBENT, Effort, Ratio, Trial
from cudal2gen.tuner import space
from cudal2gen.tuner.environment import refused
from cudal2gen.tuner.executor import Executor, Job
from cudal2gen.tuner.proposers import Proposal, Proposer, Question, trial_key
from cudal2gen.tuner.space import Candidates

Store = Callable[[Sequence[Trial]], None]
HALVES: tuple[tuple[Effort, int], ...] = (("medium", 8), ("long", 3))  # how many of the best are timed again
IDLE = 3  # answers without a new record after which there is nothing more to propose


@dataclass(frozen=True)
class Settings:
    """When a race ends, and what is not even compiled.

    ``evaluations``: short trials. ``patience``: so many of them without an improvement end it. ``prune``: records whose
    modelled time is more than so many times the least are left out; None for no such bound, as where a model is all
    there is.
    """

    evaluations: int = 64
    batch: int = 8
    patience: int | None = None
    prune: float | None = 4.0


@dataclass
class Race:
    """What is known of one problem's race."""

    candidates: Candidates
    incumbent: Record | None
    trials: list[Trial] = field(default_factory=list)
    pruned: int = 0
    stopped: str = ""

    @property
    def problem(self) -> Problem:
        return self.candidates.problem

    @property
    def short(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.effort == "short"]

    @property
    def failures(self) -> Counter[str]:
        return Counter(trial.outcome for trial in self.trials if not trial.measured)

    @property
    def curve(self) -> list[float]:
        """The least cost after each short evaluation; infinite before the first that was measured."""
        best, found = float("inf"), []
        for trial in self.short:
            best = min(best, trial.cost if trial.measured else float("inf"))
            found.append(best)
        return found

    @property
    def winner(self) -> Trial | None:
        """The best of those that were timed longest."""
        for effort in ("long", "medium", "short"):
            measured = [trial for trial in self.trials if trial.effort == effort and trial.measured]
            if measured:
                return min(measured, key=lambda trial: trial.cost)
        return None

    @property
    def gain(self) -> Ratio | None:
        """The incumbent's time over the winner's in the long timing; None where there was none."""
        winner = self.winner
        return winner.faster_than(INCUMBENT) if winner and winner.effort == "long" else None

    @property
    def improved(self) -> bool:
        """Whether the winner is another record, and its gain's whole interval is above 1."""
        winner, gain = self.winner, self.gain
        if winner is None or gain is None or gain.low <= 1:
            return False
        return self.incumbent is None or space.key(parse(winner.record)) != space.key(self.incumbent)

    @property
    def question(self) -> Question:
        seen = frozenset(space.key(parse(trial.record)) for trial in self.short if trial.outcome != "illegal")
        return Question(self.candidates, tuple(self.short), self.incumbent, seen)


def run(
    race: Race,
    proposer: Proposer,
    executor: Executor,
    store: Store,
    settings: Settings,
    run_name: str = "",
    out_of_time: Callable[[], bool] = lambda: False,
    progress: Callable[[Race], None] = lambda _: None,
) -> Race:
    """Runs a race to its end, from whatever trials it has."""
    bound = _bound(race.candidates, settings.prune)
    if race.trials:
        proposer.observe(race.question, race.short)
    idle = 0
    while not race.stopped:
        race.stopped = _reason_to_stop(race, settings, idle, out_of_time)
        if race.stopped:
            break
        question = race.question
        asked = proposer.propose(question, min(settings.batch, settings.evaluations - len(race.short)))
        fresh, broken = _sorted_out(question, asked)
        kept = [one for one in fresh if one.record and (bound is None or model.estimate(one.record).us <= bound)]
        race.pruned += len(fresh) - len(kept)
        idle = 0 if kept or broken else idle + 1
        told = _refusals(race, executor, broken, run_name)
        told += _evaluated(race, executor, kept, "short", run_name) if kept else []
        if told:
            store(told)
            race.trials += told
            proposer.observe(race.question, told)
        progress(race)
    for effort, most in HALVES:
        _again(race, executor, store, effort, most, run_name)
        progress(race)
    return race


def _bound(found: Candidates, factor: float | None) -> float | None:
    return None if factor is None else factor * min(model.estimate(record).us for record in found.records)


def _reason_to_stop(race: Race, settings: Settings, idle: int, out_of_time: Callable[[], bool]) -> str:
    if any(trial.effort == "long" for trial in race.trials):
        return "finished before"
    if len(race.short) >= settings.evaluations:
        return f"{settings.evaluations} evaluations"
    if out_of_time():
        return "out of time"
    if idle >= IDLE:
        return "nothing new was proposed"
    curve = race.curve
    if settings.patience and len(curve) > settings.patience and curve[-1] >= curve[-1 - settings.patience]:
        return f"no improvement in {settings.patience} evaluations"
    return ""


def _sorted_out(question: Question, asked: Iterable[Proposal]) -> tuple[list[Proposal], list[Proposal]]:
    """New records, each once, and what is none."""
    keys, fresh, broken = set(question.seen), [], []
    known = {repr(sorted(trial.record.items())) for trial in question.trials if trial.outcome == "illegal"}
    for one in asked:
        if one.record is None:
            if (said := repr(sorted(one.fields.items()))) not in known:
                known.add(said)
                broken.append(one)
        elif (key := space.key(one.record)) not in keys:
            keys.add(key)
            fresh.append(one)
    return fresh, broken


def _refusals(race: Race, executor: Executor, broken: Sequence[Proposal], run_name: str) -> list[Trial]:
    trials = [(one, refused(executor, race.problem, one.fields, one.refused)) for one in broken]
    return [trial.model_copy(update={"proposer": one.proposer, "run": run_name}) for one, trial in trials]


def _evaluated(race: Race, executor: Executor, kept: Sequence[Proposal], effort: Effort, run_name: str) -> list[Trial]:
    job = Job(race.problem, tuple(one.record for one in kept if one.record), effort)
    (done,) = executor.run([job])
    return [
        trial.model_copy(update={"proposer": one.proposer, "run": run_name})
        for one, trial in zip(kept, done.trials, strict=True)
    ]


def _again(race: Race, executor: Executor, store: Store, effort: Effort, most: int, run_name: str) -> None:
    """Times the best again, for longer; nothing where that was done already."""
    if any(trial.effort == effort for trial in race.trials):
        return
    before: Effort = "short" if effort == "medium" else "medium"
    measured = {trial_key(one): one for one in race.trials if one.effort == before and one.measured}
    best = sorted(measured.values(), key=lambda trial: trial.cost)[:most]
    if not best:
        return
    kept = [Proposal(one.proposer, one.record, parse(one.record)) for one in best]
    told = _evaluated(race, executor, kept, effort, run_name)
    store(told)
    race.trials += told
