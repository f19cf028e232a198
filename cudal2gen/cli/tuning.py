"""The verb ``tune`` searches for faster records of many problems and writes those that it finds to the catalog."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from cudal2gen.cli.options import Duration
from cudal2gen.cli.program import app
from cudal2gen.cli.searching import LanguageModel, ModelServer, Trials
from cudal2gen.cli.selection import FILTERS, GPU_HELP, Selection
from cudal2gen.generation import catalog
from cudal2gen.kernel import Problem, Record
from kernelproof.ground.command_line.groups import Offer, verb
from kernelproof.ground.command_line.options import Names, listed_names
from kernelproof.ground.errors import Failure

if TYPE_CHECKING:
    from cudal2gen.kernel.space import Candidates
    from cudal2gen.results import Trial
    from cudal2gen.tuner.campaign import CampaignState
    from cudal2gen.tuner.environment import EvaluationPlace
    from cudal2gen.tuner.executor import Executor
    from cudal2gen.tuner.llm_proposer import LlmProposer
    from cudal2gen.tuner.memory import Memory
    from cudal2gen.tuner.named_proposers import ProposerFactory
    from cudal2gen.tuner.search import Search

PROPOSERS = Names(("cost-model",))
MOST_LINES = 24  # most gains that are printed but not written, so that the output fits a page
PRUNE = 4.0  # records are not measured if their modelled time exceeds this multiple of the least modelled time
TUNE_SELECTION = Offer(
    only=("mnk", "everything", "size_class", "sample", "problem_file", *FILTERS),
    indexed=("gpu",),
    helps={"gpu": GPU_HELP},
)


def _proposers() -> tuple[str, ...]:
    """The names that ``--proposers`` takes."""
    from cudal2gen.tuner import named_proposers

    return named_proposers.NAMES


@dataclass(frozen=True)
class SearchOptions:
    """The options that say which proposers suggest records, and when a search ends."""

    proposers: Annotated[
        Names,
        listed_names(
            "--proposers",
            _proposers,
            "Any of cost-model, llm, nearest, heuristics, random, separated by commas.",
        ),
    ] = PROPOSERS
    budget: Duration = None
    evaluations: Annotated[
        int, typer.Option("--evaluations", min=1, help="How many records to time for each problem.")
    ] = 64
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of everything random; another one starts a run of its own.")
    ] = 0


class Participants:
    """The proposers of a campaign. The language model is made only if a proposer needs it."""

    def __init__(self, options: SearchOptions, server: str, trials: Trials) -> None:
        self._options, self._trials = options, trials
        self._language_model = LanguageModel(server, trials)
        self.run_name = f"{trials.environment} {','.join(options.proposers)} seed {options.seed}"
        self._llm: LlmProposer | None = None

    def factory(self, records: Sequence[Record], lessons: Memory, place: EvaluationPlace) -> ProposerFactory:
        """The factory of all ``--proposers``. Ends the command if one of them lacks a library or a server.

        ``records``: the catalog. ``place``: where trials run.
        """
        from cudal2gen.tuner import named_proposers, training

        # The model environment scores records by the timing model. Records that this model itself chose would give the
        # answer away, so proposers must not see them.
        model = self._trials.environment == "model"
        pool = [record for record in records if not (model and record.origin.structure == "modelled")]
        self.learning = training.Learning(pool, self._options.seed)
        self.learning.learn(self._stored(place))

        def llm() -> LlmProposer:
            self._llm = self._language_model.proposer(lessons, pool, self.run_name, self._llm_alone)
            return self._llm

        return named_proposers.ProposerFactory(self._options.proposers, self.learning, self._options.seed, llm)

    def _stored(self, place: EvaluationPlace) -> list[Trial]:
        """The stored trials from which the cost model learns at the start.

        Every run learns from the trials that a GPU measured. Trials of a model or of recordings teach only their own
        run, so that runs can be compared.
        """
        from cudal2gen import results

        if "cost-model" not in self._options.proposers or not self._trials.store.is_file():
            return []
        return [
            trial
            for trial in results.trials(self._trials.store)
            if (trial.environment, trial.on) == (place.name, place.on)
            and (place.name == "gpu" or trial.run == self.run_name)
        ]

    @property
    def interruption(self) -> str:
        """The message after an interruption: what is stored, and how to resume."""
        if self._llm is not None:
            return self._language_model.interruption(self._llm.usage, self._trials.store)
        return f"interrupted: trials are in {self._trials.store}; the same command continues from there"

    @property
    def _llm_alone(self) -> bool:
        """Whether the language model is the only proposer."""
        return self._options.proposers == ("llm",)

    def print_cost(self) -> None:
        """Prints what the language model cost, if one was asked.

        Raises Failure if it answered no question of this start, or is the only proposer and did not answer in the end.
        """
        if self._llm is not None:
            print(self._language_model.cost(self._llm.usage))
            if self._llm.failure and (self._llm_alone or not self._llm.usage.answered):
                raise Failure(
                    f"the model did not answer: {self._llm.failure}; then the same command continues from there"
                )


@verb(app, "tune")
def tune(
    selection: Annotated[Selection, TUNE_SELECTION],
    options: SearchOptions,
    trials: Trials,
    llm: ModelServer = "",
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change in the catalog.")] = False,
) -> None:
    """Search for faster records: propose, check and time them. What is beyond doubt faster goes into the catalog.

    Every trial is stored when it ends; the same command continues from the stored ones. With --recordings the search is
    among recorded trials alone.
    """
    from cudal2gen.kernel import space
    from cudal2gen.tuner import campaign, memory
    from cudal2gen.tuner.executor import InProcess

    trials = replace(trials, device=selection.device)
    participants = Participants(options, llm, trials)
    records = catalog.load()
    replay = trials.replay(selection.admits) if trials.recordings else None
    problems = replay.problems if replay and not selection.names_sizes else selection.problems(options.seed)
    executor = InProcess(replay) if replay else trials.executor(records, options.seed)
    lessons = memory.load(memory.lessons_path(trials.store))
    factory = participants.factory(records, lessons, executor)
    find_candidates = replay.candidates if replay else space.candidates
    state, seconds = _run(
        problems, records, factory, executor, options, trials, participants, lessons, find_candidates=find_candidates
    )
    if replay:
        print(campaign.replay_summary(state, replay.least_us))
    _print_outcome(state, seconds, options.evaluations, executor, trials, dry_run=dry_run)
    participants.print_cost()
    if not state.evaluations:
        raise Failure("no record was tried: see above why the proposers had none")


def _run(
    problems: Sequence[Problem],
    records: Sequence[Record],
    factory: ProposerFactory,
    executor: Executor,
    options: SearchOptions,
    trials: Trials,
    participants: Participants,
    lessons: Memory,
    *,
    find_candidates: Callable[[Problem], Candidates],
) -> tuple[CampaignState, float]:
    """Runs the campaign; returns its final state and the seconds that it took."""
    from cudal2gen.tuner import campaign, progress
    from cudal2gen.tuner.search import SearchLimits

    measured = trials.environment == "gpu"
    limits = SearchLimits(
        options.evaluations, patience=trials.settings.search.patience, prune=PRUNE if measured else None
    )

    def store_lessons(search: Search) -> None:
        lessons.learn(search)
        lessons.learn_setbacks(search)

    start_time = time.monotonic()
    incumbents = campaign.Incumbents(records)
    plan = campaign.CampaignPlan(
        problems, incumbents, factory.proposer, trials.store, participants.run_name, limits, options.budget,
        find_candidates, lambda search: participants.learning.learn(search.trials),
    )  # fmt: skip
    try:
        with progress.live_view() as show:
            in_turns = options.budget is not None and measured
            state = (campaign.run_in_turns if in_turns else campaign.run)(plan, executor, show, store_lessons)
    except SystemExit:
        print(participants.interruption, file=sys.stderr)
        raise
    finally:
        executor.close()
    return state, time.monotonic() - start_time


def _print_outcome(
    state: CampaignState, seconds: float, evaluations: int, executor: Executor, trials: Trials, *, dry_run: bool
) -> None:
    """Prints faults, improvements and totals, and writes improved records unless ``dry_run``.

    ``evaluations``: the most evaluations of each problem.
    """
    from cudal2gen.tuner import progress

    for fault in state.faults:
        print(f"fault: {fault}", file=sys.stderr)
    if executor.name == "gpu" or dry_run:
        for search in state.improved:
            write_improved(search, dry_run)
    else:
        print_gains(state.improved)
    print(progress.line(state, seconds))
    for reason, count in state.early_ends(evaluations).items():
        print(f"{count} of {state.problems} problems ended before {evaluations} evaluations: {reason}")
    print(f"trials in {trials.store}")
    if executor.name == "model":
        print(_model_against_measurements())


def print_gains(searches: Sequence[Search]) -> None:
    """Prints the largest gains, one line each, for an environment whose records are not written to the catalog."""
    from cudal2gen.tuner import campaign, progress

    largest = sorted(searches, key=lambda search: search.gain.value if search.gain else 0.0, reverse=True)
    for search in largest[:MOST_LINES]:
        proposer = search.winner.proposer if search.winner else ""
        print(f"{search.problem.mnk}: {progress.gain(search)}, proposed by {proposer}")
    if len(largest) > MOST_LINES:
        print(f"and {len(largest) - MOST_LINES} smaller gains")
    if largest:
        reason = campaign.write_obstacle(largest[0], verdict_clean=False)
        print(f"not written: {reason}; --dry-run prints the fields in which records differ")


def write_improved(search: Search, dry_run: bool) -> None:
    """Prints a gain and writes its record to the catalog; if that is not allowed, prints why and what would change."""
    from cudal2gen import results
    from cudal2gen.tuner import campaign, progress

    winner = search.winner
    if winner is None:
        return
    verdicts = results.latest() if winner.environment == "gpu" else {}
    clean = any(
        verdict.passed for (digest, on), verdict in verdicts.items() if digest == winner.digest and on != "emulator"
    )
    print(f"{search.problem.mnk}: {progress.gain(search)}, proposed by {winner.proposer}")
    refusal = campaign.write_obstacle(search, clean)
    if dry_run or refusal:
        for line in campaign.diff(search):
            print(f"  {line}")
        print(f"  not written: {refusal or 'this is a dry run'}")
        return
    print(f"  written to {catalog.put(campaign.catalog_record(search))}")


def _model_against_measurements() -> str:
    """A sentence on how well the timing model orders records compared with measurements."""
    from cudal2gen import results
    from cudal2gen.tuner.environment import agreement

    correlation = agreement(results.trials())
    if math.isnan(correlation):
        return "the analytic model has not been compared with measurements: no problem has three measured trials"
    return f"rank correlation of the analytic model with measured trials: {correlation:.3f}"
