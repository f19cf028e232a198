"""The verb tune: a campaign over problems, and what is written of it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudal2gen import places
from cudal2gen.cli import learning
from cudal2gen.cli.options import Duration
from cudal2gen.cli.program import app
from cudal2gen.cli.searching import LanguageModel, Reward, Trials, load_policy
from cudal2gen.cli.selection import FILTERS, Selection
from cudal2gen.cli.writing import Writing
from cudal2gen.generation import catalog
from cudal2gen.kernel import Acc, Problem, Record
from kernelproof.ground.command_line.groups import Offer, verb
from kernelproof.ground.command_line.options import Names, listed_names
from kernelproof.ground.errors import Failure
from kernelproof.ground.files import write

if TYPE_CHECKING:
    from cudal2gen.kernel.space import Candidates
    from cudal2gen.tuner.campaign import Standing
    from cudal2gen.tuner.cost_model import CostModel
    from cudal2gen.tuner.executor import Executor
    from cudal2gen.tuner.llm import Llm
    from cudal2gen.tuner.memory import Memory
    from cudal2gen.tuner.policy import Policy
    from cudal2gen.tuner.race import Race
    from cudal2gen.tuner.roster import Roster

PROPOSERS = Names(("cost-model",))
MOST_LINES = 24  # of gains that are not written: with the sums a page
SAVED_EVERY = 20  # problems between two checkpoints of a policy
TUNED = Offer(only=("mnk", "everything", "size_class", "sample", "listed", *FILTERS))


def _proposers() -> tuple[str, ...]:
    from cudal2gen.tuner import roster

    return roster.NAMES


@dataclass(frozen=True)
class Search:
    """Who proposes, and when a search ends."""

    proposers: Annotated[
        Names,
        listed_names(
            "--proposers",
            _proposers,
            "Any of cost-model, policy, prior, llm, nearest, heuristics, tpe, evolution, random, separated by commas.",
        ),
    ] = PROPOSERS
    budget: Duration = None
    evaluations: Annotated[int, typer.Option("--evaluations", min=1, help="Short timings of each problem.")] = 64
    patience: Annotated[
        int | None, typer.Option(min=1, help="End a problem after so many evaluations without an improvement.")
    ] = None
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="The policy's file; made by imitating published kernels.")
    ] = None
    costs: Annotated[
        Path | None,
        typer.Option("--cost-model", help="The cost model's file; else what --train wrote, or ships."),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn; trials of a seed are taken up.")] = 0


@dataclass(frozen=True)
class Output:
    """What a search writes beside its trials."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change in the catalog.")] = False
    plot: Annotated[Path | None, typer.Option("--plot", help="SVG file to write: the learning curve.")] = None
    markdown: Annotated[Path | None, typer.Option("--markdown", help="With --benchmark: file for the table.")] = None
    export: Annotated[
        Path | None,
        typer.Option(
            "--export",
            metavar="DIR",
            help="Write the language model's exchanges with their rewards, for SFT and GRPO by TRL; search nothing.",
        ),
    ] = None


class Participants:
    """The proposers of a search. The policy and the language model are made where a proposer needs them."""

    def __init__(self, search: Search, language_model: LanguageModel, trials: Trials, gpu: str, acc: Acc) -> None:
        self._search, self._language_model, self._trials = search, language_model, trials
        self.run_name = f"{trials.environment} {','.join(search.proposers)} seed {search.seed}"
        self._gpu, self._acc = gpu, acc
        default = places.build_dir() / "tuner" / f"policy-{gpu}-{acc}-{trials.environment}.pt"
        self.checkpoint = search.checkpoint or default
        self._policy: Policy | None = None
        self._llm: Llm | None = None

    def roster(self, records: Sequence[Record], rewarded: Reward, lessons: Memory) -> Roster:
        """All of ``--proposers``; ends the command where one of them lacks a part."""
        from cudal2gen.tuner import roster

        def policy() -> Policy:
            self._policy = load_policy(self.checkpoint, records, self._acc, self._search.seed)
            return self._policy

        # In the analytic model's own environment its choices would be the answer.
        model = self._trials.environment == "model"
        pool = [record for record in records if not (model and record.origin.structure == "modelled")]

        def llm() -> Llm:
            self._llm = self._language_model.connect(lessons, self._trials, pool, self.run_name, self._alone)
            return self._llm

        names = self._search.proposers
        return roster.Roster(names, policy, pool, self._search.seed, rewarded.settings, llm, self._costs)

    def _costs(self) -> CostModel:
        path = learning.costs_path(self._trials, self._gpu, self._acc, self._search.costs)
        return learning.load_costs(path, self._search.costs is not None)

    def save(self) -> None:
        """Writes the policy's checkpoint, where there is a policy."""
        if self._policy is not None:
            from cudal2gen.tuner import checkpoint

            checkpoint.save(self._policy, self.checkpoint)

    @property
    def interrupted(self) -> str:
        """What is stored, and how the search goes on."""
        if self._llm is not None:
            return self._language_model.interrupted(self._llm.usage, self._trials, self._trials.store)
        return f"interrupted: trials are in {self._trials.store}; the same command takes them up"

    @property
    def _alone(self) -> bool:
        return self._search.proposers == ("llm",)

    def print_cost(self) -> None:
        """Says what the language model cost, where one was asked. Raises Failure where nobody else proposes and it did
        not answer."""
        if self._llm is not None:
            transcript = self._language_model.replay or self._language_model.file(self._trials)
            print(f"llm: {self._llm.usage}; transcript: {transcript}")
            if self._alone and self._llm.failure:
                raise Failure(f"the model did not answer: {self._llm.failure}; then the same command goes on")


@verb(app, "tune")
def tune(
    selection: Annotated[Selection, TUNED],
    search: Search,
    trials: Trials,
    rewarded: Reward,
    language_model: LanguageModel,
    output: Output,
    repetitions: learning.Repetitions,
    writing: Writing,
    benchmark: Annotated[
        bool,
        typer.Option(
            "--benchmark",
            help="Compare proposers on held-out problems: of --recordings, then in the model environment.",
        ),
    ] = False,
    train: Annotated[
        bool,
        typer.Option("--train", help="Train cost model and policy on stored trials and --recordings; search nothing."),
    ] = False,
) -> None:
    """Search for better records: propose, check, time, learn. What is beyond doubt faster goes to the catalog.

    Every trial is stored when it ends; the same command continues from the stored ones.
    """
    from cudal2gen.kernel import space
    from cudal2gen.tuner import campaign, memory
    from cudal2gen.tuner.executor import InProcess

    (acc,) = selection.accs
    if benchmark:
        learning.compare(selection, acc, trials, repetitions, search.seed, output.markdown, output.plot)
        return
    if output.export is not None:
        learning.export(trials, language_model, rewarded, output.export)
        return
    if writing.rounds:
        problems = selection.problems(search.seed)
        writing.write_kernels(problems, search.seed, trials, rewarded, language_model, output.dry_run)
        return
    participants = Participants(search, language_model, trials, selection.gpu, acc)
    if train:
        learning.train(selection, acc, trials, search.seed, search.costs, participants.checkpoint)
        return
    records = catalog.load()
    replay = trials.replay(selection.admits) if trials.environment == "replay" else None
    everything = replay is not None and not selection.names_sizes
    problems = replay.problems if replay and everything else selection.problems(search.seed)
    executor = InProcess(replay) if replay else trials.executor(records, search.seed)
    lessons = memory.load(memory.lessons_path(trials.store))
    roster = participants.roster(records, rewarded, lessons)
    find = replay.candidates if replay else space.candidates
    standing, seconds = _run(
        problems, records, roster, executor, search, trials, participants, lessons, find_candidates=find
    )
    if replay:
        print(campaign.replayed(standing, replay.least_us))
    _print_outcome(standing, seconds, search.evaluations, executor, trials, output)
    participants.print_cost()


def _run(
    problems: Sequence[Problem],
    records: Sequence[Record],
    roster: Roster,
    executor: Executor,
    search: Search,
    trials: Trials,
    participants: Participants,
    lessons: Memory,
    *,
    find_candidates: Callable[[Problem], Candidates],
) -> tuple[Standing, float]:
    """Runs the campaign; the result, and the seconds it took."""
    from cudal2gen.tuner import campaign, progress, race

    prune = 4.0 if trials.environment == "gpu" else None
    settings = race.Settings(search.evaluations, patience=search.patience, prune=prune)
    ended = 0

    def after(race: Race) -> None:
        nonlocal ended
        roster.conclude(race.problem)
        lessons.learn(race)
        lessons.learn_setbacks(race)
        ended += 1
        if ended % SAVED_EVERY == 0:
            participants.save()

    begin = time.monotonic()
    incumbents = campaign.Incumbents(records)
    plan = campaign.Plan(
        problems, incumbents, roster.proposer, trials.store, participants.run_name, settings, search.budget,
        find_candidates,
    )  # fmt: skip
    try:
        with progress.live_view() as show:
            in_turns = search.budget is not None and trials.environment == "gpu"
            standing = (campaign.run_in_turns if in_turns else campaign.run)(plan, executor, show, after)
    except SystemExit:
        print(participants.interrupted, file=sys.stderr)
        raise
    finally:
        executor.close()
        participants.save()
    return standing, time.monotonic() - begin


def _print_outcome(
    standing: Standing, seconds: float, evaluations: int, executor: Executor, trials: Trials, output: Output
) -> None:
    """Faults, improvements, the learning curve and the sums. ``evaluations``: of each problem, at most."""
    from cudal2gen.tuner import campaign, curve, progress

    for fault in standing.faults:
        print(f"fault: {fault}", file=sys.stderr)
    if executor.name == "gpu" or output.dry_run:
        for race in standing.improved:
            write_improved(race, output.dry_run)
    else:
        print_gains(standing.improved)
    if output.plot is not None:
        points = campaign.mean_curve(standing)
        curves = [curve.Curve("best so far", points)] if points else []
        title = f"Best cost so far, mean of {len(standing.races)} problems, {executor.name} environment: {executor.on}"
        write(output.plot, curve.svg(title, "evaluations", "cost, first = 1", curves))
    print(progress.line(standing, seconds))
    for reason, count in standing.early_ends(evaluations).items():
        print(f"{count} of {standing.problems} problems ended before {evaluations} evaluations: {reason}")
    print(f"trials in {trials.store}")
    if executor.name == "model":
        print(_model_against_measurements())


def print_gains(races: Sequence[Race]) -> None:
    """A line for each of the largest gains of an environment whose records are not written: a page at most."""
    from cudal2gen.tuner import campaign, progress

    largest = sorted(races, key=lambda race: race.gain.value if race.gain else 0.0, reverse=True)
    for race in largest[:MOST_LINES]:
        proposer = race.winner.proposer if race.winner else ""
        print(f"{race.problem.mnk}: {progress.gain(race)}, proposed by {proposer}")
    if len(largest) > MOST_LINES:
        print(f"and {len(largest) - MOST_LINES} smaller gains")
    if largest:
        reason = campaign.may_write(largest[0], verdict_clean=False)
        print(f"not written: {reason}; --dry-run prints the fields in which records differ")


def write_improved(race: Race, dry_run: bool) -> None:
    """Prints a gain and writes its record to the catalog; where that is not allowed, why, and what would change."""
    from cudal2gen import results
    from cudal2gen.tuner import campaign, progress

    winner = race.winner
    if winner is None:
        return
    verdicts = results.latest() if winner.environment == "gpu" else {}
    clean = any(
        verdict.passed for (digest, on), verdict in verdicts.items() if digest == winner.digest and on != "emulator"
    )
    print(f"{race.problem.mnk}: {progress.gain(race)}, proposed by {winner.proposer}")
    refusal = campaign.may_write(race, clean)
    if dry_run or refusal:
        for line in campaign.diff(race):
            print(f"  {line}")
        print(f"  not written: {refusal or 'this is a dry run'}")
        return
    print(f"  written to {catalog.put(campaign.catalog_record(race))}")


def _model_against_measurements() -> str:
    """How far the analytic model orders records as measurements do."""
    from cudal2gen import results
    from cudal2gen.tuner.environment import agreement

    correlation = agreement(results.trials())
    if math.isnan(correlation):
        return "the analytic model has not been compared with measurements: no problem has three measured trials"
    return f"rank correlation of the analytic model with measured trials: {correlation:.3f}"
