"""Searches for a faster record of one problem: propose, prune, time briefly, then time the best ones for longer.

The stages are ordered by their cost: only legal records are compiled, only compiled kernels are checked, only correct
ones are timed, and only fast ones are timed for longer. The last stage times the winner again and alone, because the
winner of a comparison looks faster than it is. Every trial is stored before the search uses it, so a killed search
resumes from its trials.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cudal2gen.kernel import Problem, Record, parse
from cudal2gen.kernel.space import Candidates
from cudal2gen.results import INCUMBENT, Effort, Trial
from cudal2gen.results.ratios import Ratio
from cudal2gen.timing import model
from cudal2gen.tuner.environment import EvaluationPlace, refusal_trial
from cudal2gen.tuner.executor import EvaluationJob, Executor
from cudal2gen.tuner.proposal import Proposal, Proposer, Question, SlowProposer, trial_key

Store = Callable[[Sequence[Trial]], None]
# How many of the best records each later stage times. The final one is skipped unless the long one shows a gain.
STAGES: tuple[tuple[Effort, int], ...] = (("medium", 8), ("long", 3), ("final", 1))
# For each later effort the one before it, whose best records it times.
PREVIOUS_EFFORT: dict[Effort, Effort] = {"medium": "short", "long": "medium", "final": "long"}
FINISHED = "finished before"  # the stop reason of a search that an earlier run has finished
MAX_IDLE_BATCHES = 3  # number of batches in a row without a new legal record after which a search ends


@dataclass(frozen=True)
class SearchLimits:
    """When a search ends, and which records it skips.

    - ``evaluations``: most short trials of legal records; ``batch``: most of them in one batch.
    - ``patience``: number of trials in a row without an improvement after which the search ends; None for no limit.
    - ``prune``: records whose modelled time exceeds this multiple of the least modelled time are skipped; None for no
      limit.
    - ``longer``: whether the best records are timed again for longer.
    """

    evaluations: int = 64
    batch: int = 8
    patience: int | None = None
    prune: float | None = 4.0
    longer: bool = True


@dataclass
class Search:
    """The state of one problem's search: its candidates, incumbent and trials.

    - ``pruned``: number of legal proposals that were skipped because of their modelled times.
    - ``stop_reason``: why no more records are proposed; empty before that.
    """

    candidates: Candidates
    incumbent: Record | None
    trials: list[Trial] = field(default_factory=list)
    pruned: int = 0
    stop_reason: str = ""

    @property
    def problem(self) -> Problem:
        """The problem of the candidates."""
        return self.candidates.problem

    @property
    def short_trials(self) -> list[Trial]:
        """The trials of the effort ``short``, illegal proposals included."""
        return [trial for trial in self.trials if trial.effort == "short"]

    @property
    def evaluations(self) -> list[Trial]:
        """Short trials of legal records. Illegal proposals are not counted, because they take no time."""
        return [trial for trial in self.short_trials if trial.outcome != "illegal"]

    @property
    def failures(self) -> Counter[str]:
        """The number of trials without a time, by outcome."""
        return Counter(trial.outcome for trial in self.trials if not trial.measured)

    @property
    def curve(self) -> list[float]:
        """The least cost after each evaluation; infinite before the first measured one."""
        best, costs = float("inf"), []
        for trial in self.evaluations:
            best = min(best, trial.cost if trial.measured else float("inf"))
            costs.append(best)
        return costs

    @property
    def winner(self) -> Trial | None:
        """The best trial of the longest effort with measured trials; None if nothing was measured."""
        for effort in ("final", "long", "medium", "short"):
            measured = [trial for trial in self.trials if trial.effort == effort and trial.measured]
            if measured:
                return min(measured, key=lambda trial: trial.cost)
        return None

    @property
    def gain(self) -> Ratio | None:
        """The incumbent's time over the winner's in the final timing, else in the long one; None before that."""
        winner = self.winner
        return winner.faster_than(INCUMBENT) if winner and winner.effort in ("final", "long") else None

    @property
    def improved(self) -> bool:
        """Whether the winner is another record than the incumbent, and faster beyond noise: the interval of its gain in
        the final timing is entirely above 1."""
        return self.promising and self.winner is not None and self.winner.effort == "final"

    @property
    def promising(self) -> bool:
        """Whether the winner is another record than the incumbent, and faster by the final or else the long timing.

        The long timing alone is no evidence of an improvement. It chose the winner, and the least of several noisy
        times is on average too short.
        """
        winner, gain = self.winner, self.gain
        if winner is None or gain is None or gain.low <= 1:
            return False
        return self.incumbent is None or parse(winner.record).kernel_key != self.incumbent.kernel_key

    @property
    def question(self) -> Question:
        """The state of the search as a proposer sees it."""
        keys = frozenset(parse(trial.record).kernel_key for trial in self.evaluations)
        return Question(self.candidates, tuple(self.short_trials), self.incumbent, keys)


class ProposerStep(NamedTuple):
    """A step in which the proposer observes the trials ``new`` and then proposes up to ``most`` records.

    No other step of the search uses the proposer at the same time, so any thread may run the step. ``run`` appends the
    answer to ``proposals``. ``stop`` says when to stop waiting for an answer. Records with a longer modelled time than
    ``bound_us`` are pruned.
    """

    proposer: Proposer
    question: Question
    new: Sequence[Trial]
    most: int
    proposals: list[Proposal]
    stop: Callable[[], bool] = lambda: False
    bound_us: float | None = None

    @property
    def affordable(self) -> list[Proposal]:
        """The new legal proposals within ``bound_us``, which the search evaluates next."""
        return [
            proposal
            for proposal in _triage(self.question, self.proposals)[0]
            if proposal.record and (self.bound_us is None or model.estimate(proposal.record).us <= self.bound_us)
        ]

    def run(self) -> None:
        """Observes the new trials, then proposes. Without a legal proposal it waits for an answer that is under way, or
        for a server that is limited or overloaded, and proposes again."""
        if self.new:
            self.proposer.observe(self.question, self.new)
        if self.most:
            self._propose()
            may_wait = True  # for an answer under way; once, and once more after each wait for the server
            while isinstance(self.proposer, SlowProposer) and not any(proposal.record for proposal in self.proposals):
                if self.proposer.wait_for_server(self.question.problem, self.stop):
                    may_wait = True
                elif may_wait and self.proposer.wait(self.question.problem):
                    may_wait = False
                else:
                    break
                self._propose()

    def _propose(self) -> None:
        self.proposals.extend(self.proposer.propose(self.question, self.most))


class Evaluation(NamedTuple):
    """A step in which an executor evaluates a job. ``trials`` receives one trial for each of its records."""

    job: EvaluationJob
    trials: list[Trial]


Steps = Iterator[ProposerStep | Evaluation]


def run(
    search: Search,
    proposer: Proposer,
    executor: Executor,
    store: Store,
    limits: SearchLimits,
    run_name: str = "",
    out_of_time: Callable[[], bool] = lambda: False,
    progress: Callable[[Search], None] = lambda _: None,
) -> Search:
    """Runs a search to its end, starting from the trials in it. ``store`` receives each new trial."""
    for step in steps(search, proposer, executor, store, limits, run_name, out_of_time, progress):
        if isinstance(step, ProposerStep):
            step.run()
        else:
            step.trials.extend(executor.submit(step.job).result())
    return search


def steps(
    search: Search,
    proposer: Proposer,
    place: EvaluationPlace,
    store: Store,
    limits: SearchLimits,
    run_name: str = "",
    out_of_time: Callable[[], bool] = lambda: False,
    progress: Callable[[Search], None] = lambda _: None,
) -> Steps:
    """Yields the steps of a search. The caller completes each step before it takes the next.

    So the steps of several searches can be interleaved. A search depends on its proposals and trials alone, and not on
    the times at which they arrive. ``place`` is where the executor evaluates; trials of illegal proposals name it.
    """
    prune, records = limits.prune, search.candidates.records
    bound = None if prune is None else prune * min(model.estimate(record).us for record in records)
    new, idle = search.short_trials, 0
    while not search.stop_reason:
        search.stop_reason = _reason_to_stop(search, limits, idle, out_of_time)
        if search.stop_reason:
            break
        left = limits.evaluations - len(search.evaluations)
        question = replace(search.question, last=left <= limits.batch)
        yield (step := ProposerStep(proposer, question, new, min(limits.batch, left), [], out_of_time, bound))
        legal, illegal = _triage(question, step.proposals)
        affordable = step.affordable
        search.pruned += len(legal) - len(affordable)
        idle = 0 if affordable else idle + 1
        new = _refusals(search, place, illegal, run_name)
        if affordable:
            yield (evaluation := _evaluation(search, affordable, "short"))
            new += _attributed(affordable, evaluation, run_name)
        if new:
            store(new)
            search.trials += new
        progress(search)
    if new:
        yield ProposerStep(proposer, search.question, new, 0, [])
    for effort, most in STAGES if limits.longer else ():
        if best := _best(search, effort, most):
            yield (evaluation := _evaluation(search, best, effort))
            trials = _attributed(best, evaluation, run_name)
            store(trials)
            search.trials += trials
        progress(search)


def _reason_to_stop(search: Search, limits: SearchLimits, idle: int, out_of_time: Callable[[], bool]) -> str:
    """Why the search proposes no more records; empty if it goes on. ``idle``: the number of batches in a row without a
    new legal record."""
    if any(trial.effort == "long" for trial in search.trials):  # an earlier run stored them
        return FINISHED
    if len(search.evaluations) >= limits.evaluations:
        return f"{limits.evaluations} evaluations"
    if out_of_time():
        return "out of time"
    if idle >= MAX_IDLE_BATCHES:
        return "nothing new was proposed"
    curve = search.curve
    if limits.patience and len(curve) > limits.patience and curve[-1] >= curve[-1 - limits.patience]:
        return f"no improvement in {limits.patience} evaluations"
    return ""


def _triage(question: Question, proposals: Iterable[Proposal]) -> tuple[list[Proposal], list[Proposal]]:
    """The new legal proposals and the new illegal ones. A record or an illegal set of fields is new only once."""
    keys, legal, illegal = set(question.proposed_keys), [], []
    stored = {repr(sorted(trial.record.items())) for trial in question.trials if trial.outcome == "illegal"}
    for proposal in proposals:
        if proposal.record is None:
            if (text := repr(sorted(proposal.fields.items()))) not in stored:
                stored.add(text)
                illegal.append(proposal)
        elif (key := proposal.record.kernel_key) not in keys:
            keys.add(key)
            if refusal := question.candidates.refusal(proposal.record):
                illegal.append(proposal._replace(record=None, violation=refusal))
            else:
                legal.append(proposal)
    return legal, illegal


def _refusals(search: Search, place: EvaluationPlace, proposals: Sequence[Proposal], run_name: str) -> list[Trial]:
    """The trials of illegal proposals."""
    trials = [
        (proposal, refusal_trial(place, search.problem, proposal.fields, proposal.violation)) for proposal in proposals
    ]
    return [trial.model_copy(update={"proposer": proposal.proposer, "run": run_name}) for proposal, trial in trials]


def _evaluation(search: Search, proposals: Sequence[Proposal], effort: Effort) -> Evaluation:
    """The evaluation of those proposals that are legal records."""
    records = tuple(proposal.record for proposal in proposals if proposal.record)
    return Evaluation(EvaluationJob(search.problem, records, effort), [])


def _attributed(proposals: Sequence[Proposal], evaluation: Evaluation, run_name: str) -> list[Trial]:
    """The trials of an evaluation, with the proposer of each record and the name of the run."""
    return [
        trial.model_copy(update={"proposer": proposal.proposer, "run": run_name})
        for proposal, trial in zip(proposals, evaluation.trials, strict=True)
    ]


def _best(search: Search, effort: Effort, most: int) -> list[Proposal]:
    """The best records of the effort before this one, as proposals to time again.

    Empty if trials of this effort exist, and for the final effort if the search is not ``promising``.
    """
    if any(trial.effort == effort for trial in search.trials) or (effort == "final" and not search.promising):
        return []
    before = PREVIOUS_EFFORT[effort]
    measured = {trial_key(trial): trial for trial in search.trials if trial.effort == before and trial.measured}
    best = sorted(measured.values(), key=lambda trial: trial.cost)[:most]
    return [Proposal(trial.proposer, trial.record, parse(trial.record)) for trial in best]
