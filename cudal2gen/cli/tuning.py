"""The verb tune: a campaign over problems, and what is written of it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudal2gen import catalog, places
from cudal2gen.cli.groups import Offer, verb
from cudal2gen.cli.messages import refuse
from cudal2gen.cli.options import Duration, Names, listed_names
from cudal2gen.cli.program import app
from cudal2gen.cli.searching import LanguageModel, Reward, Trials, load_policy, on_one_core
from cudal2gen.cli.selection import FILTERS, Selection
from cudal2gen.files import write
from cudal2gen.kernel import Acc, Problem, Record

if TYPE_CHECKING:
    from cudal2gen.tuner.campaign import Standing
    from cudal2gen.tuner.executor import Executor
    from cudal2gen.tuner.llm import Llm
    from cudal2gen.tuner.memory import Memory
    from cudal2gen.tuner.policy import Policy
    from cudal2gen.tuner.proposal import Proposer
    from cudal2gen.tuner.race import Race

PROPOSERS = Names(("policy", "nearest", "evolution", "random"))
MOST_LINES = 24  # of gains that are not written: with the sums a page
SAVED_EVERY = 20  # problems between two checkpoints of a policy
TUNED = Offer(only=("mnk", "everything", "size_class", "sample", "listed", *FILTERS))


def _proposers() -> tuple[str, ...]:
    from cudal2gen.tuner import proposers

    return proposers.NAMES


@dataclass(frozen=True)
class Search:
    """Who proposes, and when a search ends."""

    proposers: Annotated[
        Names,
        listed_names(
            "--proposers",
            _proposers,
            "Any of policy, prior, llm, nearest, heuristics, tpe, evolution, random, separated by commas.",
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
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn; trials of a seed are taken up.")] = 0


@dataclass(frozen=True)
class Output:
    """What a search writes beside its trials."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change in the catalog.")] = False
    plot: Annotated[Path | None, typer.Option("--plot", help="SVG file to write: the learning curve.")] = None
    markdown: Annotated[Path | None, typer.Option("--markdown", help="With --benchmark: file for the table.")] = None


class Participants:
    """The proposers of a search. The policy and the language model are made where a proposer needs them."""

    def __init__(self, search: Search, language_model: LanguageModel, trials: Trials, gpu: str, acc: Acc) -> None:
        self._search, self._language_model, self._trials, self._acc = search, language_model, trials, acc
        default = places.build_dir() / "tuner" / f"policy-{gpu}-{acc}-{trials.environment}.pt"
        self._checkpoint = search.checkpoint or default
        self._policy: Policy | None = None
        self._llm: Llm | None = None

    def proposer(self, records: Sequence[Record], rewarded: Reward, lessons: Memory) -> Proposer:
        """All of ``--proposers``, mixed; ends the command where one of them lacks a part."""
        from cudal2gen.tuner import proposers

        def policy() -> Policy:
            self._policy = load_policy(self._checkpoint, records, self._acc, self._search.seed)
            return self._policy

        def llm() -> Llm:
            self._llm = self._language_model.connect(lessons, self._trials.store)
            return self._llm

        # In the analytic model's own environment its choices would be the answer.
        model = self._trials.environment == "model"
        pool = [record for record in records if not (model and record.origin.structure == "modelled")]
        names = self._search.proposers
        return proposers.make_proposer(names, policy, pool, self._search.seed, rewarded.settings, llm)

    def save(self) -> None:
        """Writes the policy's checkpoint, where there is a policy."""
        if self._policy is not None:
            from cudal2gen.tuner import checkpoint

            checkpoint.save(self._policy, self._checkpoint)

    def print_cost(self) -> None:
        """Says what the language model cost, where one was asked."""
        if self._llm is not None:
            print(f"llm: {self._llm.usage}")


@verb(app, "tune")
def tune(
    selection: Annotated[Selection, TUNED],
    search: Search,
    trials: Trials,
    rewarded: Reward,
    language_model: LanguageModel,
    output: Output,
    benchmark: Annotated[
        bool,
        typer.Option("--benchmark", help="Compare the proposers on held-out problems, in the model environment."),
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each proposer, for --benchmark.")] = 10,
) -> None:
    """Search for better records: propose, check, time, learn. What is beyond doubt faster goes to the catalog.

    Every trial is stored when it ends; the same command continues from the stored ones.
    """
    from cudal2gen.tuner import memory

    (acc,) = selection.accs
    if benchmark:
        if trials.chosen not in (None, "model"):
            refuse(f"--environment {trials.chosen}: --benchmark compares in the model environment only")
        _compare_proposers(selection.gpu, acc, seeds, search.seed, output)
        return
    problems = selection.problems(search.seed)
    records = catalog.load()
    executor = trials.executor(records, search.seed)
    lessons = memory.load(memory.lessons_path(trials.store))
    participants = Participants(search, language_model, trials, selection.gpu, acc)
    proposer = participants.proposer(records, rewarded, lessons)
    standing, seconds = _run(problems, records, proposer, executor, search, trials, participants, lessons)
    _print_outcome(standing, seconds, executor, trials, output)
    participants.print_cost()


def _run(
    problems: Sequence[Problem],
    records: Sequence[Record],
    proposer: Proposer,
    executor: Executor,
    search: Search,
    trials: Trials,
    participants: Participants,
    lessons: Memory,
) -> tuple[Standing, float]:
    """Runs the campaign; the result, and the seconds it took."""
    from cudal2gen.tuner import campaign, progress, race

    prune = None if trials.environment == "model" else 4.0
    settings = race.Settings(search.evaluations, patience=search.patience, prune=prune)
    name = f"{trials.environment} {','.join(search.proposers)} seed {search.seed}"
    ended = 0

    def after(race: Race) -> None:
        nonlocal ended
        lessons.learn(race)
        ended += 1
        if ended % SAVED_EVERY == 0:
            participants.save()

    begin = time.monotonic()
    incumbents = campaign.Incumbents(records)
    try:
        with progress.live_view() as show:
            standing = campaign.run(
                problems, incumbents, proposer, executor, trials.store, settings, name, search.budget, show, after
            )
    finally:
        executor.close()
        participants.save()
    return standing, time.monotonic() - begin


def _print_outcome(standing: Standing, seconds: float, executor: Executor, trials: Trials, output: Output) -> None:
    """Faults, improvements, the learning curve and the sums."""
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


def _compare_proposers(gpu: str, acc: Acc, seeds: int, seed: int, output: Output) -> None:
    from cudal2gen.tuner import benchmark, curve

    published = catalog.published(catalog.load(), acc)
    settings = benchmark.Settings(gpu=gpu, acc=acc, seeds=seeds, seed=seed)
    on_one_core()
    comparison = benchmark.compare(published, settings, lambda text: print(text, file=sys.stderr, flush=True))
    table = benchmark.markdown(comparison)
    if output.markdown is not None:
        write(output.markdown, table)
    if output.plot is not None:
        title = f"Regret on problems held out, {gpu} {acc}: modelled, not measured"
        write(output.plot, curve.svg(title, "evaluations", "regret", benchmark.curves(comparison)))
    print(table, end="")
    print(_model_against_measurements())
