"""The verbs ``compare`` and ``export`` evaluate what the tuner has learned, and write training data.

``compare`` measures how well the proposers do on problems that they have not learned from. ``export`` writes a language
model's answers with their rewards.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudal2gen.cli.program import app
from cudal2gen.cli.searching import RECORDINGS, Trials
from cudal2gen.cli.selection import Selection
from cudal2gen.generation import published
from cudal2gen.kernel import Acc
from kernelproof.ground.command_line.groups import Offer, verb
from kernelproof.ground.command_line.messages import refuse
from kernelproof.ground.errors import Failure

if TYPE_CHECKING:
    from cudal2gen.tuner.benchmark import BenchmarkPlan

HeldOutProblems = Annotated[
    Selection,
    Offer(
        only=("sample", "gpu", "acc"),
        helps={"sample": "the number of held-out problems; proposers learn from a number in proportion to it"},
    ),
]


@verb(app, "compare")
def compare(
    selection: HeldOutProblems,
    recordings: Annotated[
        tuple[Path, ...],
        typer.Option("--recordings", metavar="PATH", help=f"AutoHeuristic's files ({RECORDINGS}). Repeatable."),
    ] = (),
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Repeat training and searches with this many seeds.")
    ] = None,
) -> None:
    """Compare proposers on problems that are held out.

    Prints tables in Markdown. With --recordings the proposers rank and search what GPUs measured, for every GPU that
    was recorded; else they search in the model environment.
    """
    (acc,) = selection.accs
    if recordings:
        print(compared_on_recordings(recordings, selection.sample, seeds), end="")
    else:
        print(compared_in_the_model(_plan(selection, acc), seeds), end="")


@verb(app, "export")
def export(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write three files of JSON lines to.")],
    trials: Annotated[Trials, Offer(only=("chosen", "file", "settings_file"))],
) -> None:
    """Write a language model's answers with their rewards.

    The files have the questions, answers and the rewards that these earned, to train the model by TRL (SFT, GRPO).
    """
    from cudal2gen import results
    from cudal2gen.tuner import exports

    transcript, weights = trials.transcript, trials.settings.reward.weights
    if not transcript.is_file():
        refuse(
            f"no transcript {transcript}; tune with --proposers llm first, or name one, llm.transcript in --settings"
        )
    stored = results.trials(trials.store) if trials.store.is_file() else []
    rewards = exports.Rewards(stored, weights)
    counts = exports.write(out, exports.examples(transcript, rewards))
    if not counts["answers.jsonl"]:
        raise Failure(f"{transcript} has no answer with a reward, so nothing can be learned from it")
    print(", ".join(f"{count} lines in {out / name}" for name, count in counts.items()))


def _plan(selection: Selection, acc: Acc) -> BenchmarkPlan:
    """The plan of the comparison in the model environment, with ``--sample`` held-out problems."""
    from cudal2gen.tuner import benchmark

    plan = benchmark.BenchmarkPlan(gpu=selection.gpu, acc=acc)
    return plan if selection.sample is None else benchmark.sized(plan, selection.sample)


def compared_on_recordings(paths: tuple[Path, ...], sample: int | None, seeds: int | None) -> str:
    """The tables that compare the proposers on recorded measurements. Raises WrongInput.

    ``paths``: AutoHeuristic's files. ``sample``: the number of problems to search in. ``seeds``: how often training and
    searches are repeated. None stands for the default of ``RankingPlan``.
    """
    from cudal2gen.timing.recordings import autoheuristic
    from cudal2gen.tuner import ranking

    plan = ranking.RankingPlan()
    plan = replace(plan, seeds=seeds or plan.seeds, searched=sample or plan.searched)
    recordings = autoheuristic.problems(paths)
    ranked, searched = ranking.compare(recordings, plan, _progress)
    return ranking.markdown(ranked, searched, ranking.largest_quarter(recordings, plan), plan)


def compared_in_the_model(plan: BenchmarkPlan, seeds: int | None) -> str:
    """The tables that compare the proposers in ``seeds`` model environments (None: as many as the plan says), by one
    search of each problem in each."""
    from cudal2gen.tuner import benchmark

    plan = replace(plan, environments=seeds or plan.environments)
    records = [record for record in published.structures() if (record.gpu, record.acc) == ("a100", plan.acc)]
    comparison = benchmark.compare(records, plan, _progress)
    return benchmark.markdown(comparison)


def _progress(text: str) -> None:
    """Prints a line about progress, on stderr."""
    print(text, file=sys.stderr, flush=True)
