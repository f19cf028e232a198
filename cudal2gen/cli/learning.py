"""The verbs ``train``, ``compare`` and ``export``, which concern what the tuner learns.

``train`` fits the cost model and the policy to stored trials. ``compare`` measures how well the proposers do on
problems that they were not trained on. ``export`` writes a language model's answers with their rewards, as training
data.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudal2gen.cli.program import app
from cudal2gen.cli.searching import RECORDINGS, Trials, costs_path, on_one_core, policy_path
from cudal2gen.cli.selection import Selection
from cudal2gen.generation import catalog
from cudal2gen.kernel import Acc, Record
from kernelproof.ground.command_line.groups import Offer, verb
from kernelproof.ground.command_line.messages import refuse
from kernelproof.ground.files import write

if TYPE_CHECKING:
    from cudal2gen.results import Trial
    from cudal2gen.tuner.benchmark import BenchmarkPlan
    from cudal2gen.tuner.cost_model import CostModel, TimedRecords

HELD_OUT = Annotated[
    Selection,
    Offer(
        only=("sample", "gpu", "acc"),
        helps={"sample": "the number of held-out problems; modelled training is in proportion"},
    ),
]


@verb(app, "train")
def train(
    selection: HELD_OUT,
    trials: Annotated[Trials, Offer(only=("chosen", "file", "recordings"))],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The cost model's file; by default tune finds it.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of everything random.")] = 0,
) -> None:
    """Train the tuner on stored trials and recordings.

    Trains the cost model, and the policy too if torch is installed. With --environment model they learn from that
    environment, for tune with the same environment and seed.
    """
    (acc,) = selection.accs
    modelled = trials.chosen == "model"
    if modelled and trials.recordings:
        refuse("--recordings: are not of --environment model; leave out one of them")
    path = out or costs_path(modelled, selection.gpu, acc)
    records, plan = catalog.load(), _plan(selection, acc, seed)
    timed, model = trained(trials, plan, records)
    count = sum(len(problem.records) for problem in timed)
    model.save(path)
    print(f"cost model of {count} timed records of {len(timed)} problems: {path}, {path.stat().st_size} bytes")
    _train_policy(timed, records, plan, policy_path(trials.chosen, selection.gpu, acc))


@verb(app, "compare")
def compare(
    selection: HELD_OUT,
    recordings: Annotated[
        tuple[Path, ...],
        typer.Option("--recordings", metavar="PATH", help=f"AutoHeuristic's files ({RECORDINGS}). Repeatable."),
    ] = (),
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Repeat training and searches with this many seeds.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Plot regret to this SVG file.")] = None,
) -> None:
    """Compare proposers on problems that are held out.

    Prints tables in Markdown. With --recordings the proposers rank and search what GPUs measured, for every GPU that
    was recorded; else they search in the model environment.
    """
    (acc,) = selection.accs
    if recordings:
        if plot is not None:
            refuse("--plot: has curves of the model environment alone; leave out --plot or --recordings")
        print(compared_on_recordings(recordings, selection.sample, seeds), end="")
    else:
        print(compared_in_the_model(_plan(selection, acc, 0), seeds, plot), end="")


@verb(app, "export")
def export(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write three files of JSON lines to.")],
    trials: Annotated[Trials, Offer(only=("chosen", "file", "settings_file"))],
) -> None:
    """Write a language model's answers with their rewards.

    The file has each question, its answers and the rewards that they earned, to train the model by TRL (SFT, GRPO).
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
    counts = exports.write(out, exports.examples(transcript, rewards), weights.failed)
    print(", ".join(f"{count} lines in {out / name}" for name, count in counts.items()))


def _plan(selection: Selection, acc: Acc, seed: int) -> BenchmarkPlan:
    """The plan of the comparison in the model environment, with ``--sample`` held-out problems.

    ``train`` uses the same plan, so that it trains on the same problems as ``compare``.
    """
    from cudal2gen.tuner import benchmark

    plan = benchmark.BenchmarkPlan(gpu=selection.gpu, acc=acc, seed=seed)
    return plan if selection.sample is None else benchmark.sized(plan, selection.sample)


def trained(trials: Trials, plan: BenchmarkPlan, records: list[Record]) -> tuple[list[TimedRecords], CostModel]:
    """The timed records of the chosen environment, and a cost model trained on them."""
    from cudal2gen.tuner import cost_model, training

    if trials.chosen == "model":
        timed = _modelled(plan, records)
        return timed, cost_model.train(timed, plan.seed)
    recorded = _recorded(trials)
    sizes = sorted({(record.m, record.n, record.k) for record in records})
    return cost_model.timed(recorded), training.pooled(recorded, sizes, plan.seed)


def _modelled(plan: BenchmarkPlan, records: list[Record]) -> list[TimedRecords]:
    """Timed records from the model environment, the same that ``tune --environment model --seed`` searches."""
    from cudal2gen.tuner import benchmark
    from cudal2gen.tuner.environment import Model

    _, problems = benchmark.split(catalog.published(records, plan.acc), plan)
    return benchmark.record_trials(Model(seed=plan.seed), problems, plan.evaluations_each, plan.seed)


def _recorded(trials: Trials) -> list[Trial]:
    """The stored trials that were measured on the GPU model of their record, and the recordings."""
    from cudal2gen import results
    from cudal2gen.tuner import recorded

    store = trials.file or results.store("trials")
    stored = [trial for trial in results.trials(store) if trial.on_its_gpu]
    return stored + (recorded.trials(trials.recordings) if trials.recordings else [])


def _train_policy(timed: list[TimedRecords], records: list[Record], plan: BenchmarkPlan, checkpoint: Path) -> None:
    """Trains the policy as the benchmark does and writes its checkpoint.

    It first imitates published kernels, then is updated contrastively on the timed records of this GPU.
    """
    from cudal2gen.tuner import benchmark, policy
    from cudal2gen.tuner import checkpoint as checkpoints

    gpu, acc = plan.gpu, plan.acc
    problems = [problem for problem in timed if (problem.records[0].gpu, problem.records[0].acc) == (gpu, acc)]
    problems = [
        problem for problem in problems if problem.records[0].family != "triton_tile" and len(problem.records) > 1
    ]
    if not problems:
        print(f"policy: no timed records of {gpu} {acc} to learn from; it stays as it is", file=sys.stderr)
        return
    try:
        policy.on_one_core()
    except ImportError:
        print("policy: needs torch, pip install 'cudal2gen[tune]'; it stays as it is", file=sys.stderr)
        return
    imitated = catalog.published(records, acc)
    trained = benchmark.train_policies(None, imitated, problems, plan, plan.seed)["contrast"]
    checkpoints.save(trained, checkpoint)
    print(f"policy of {len(problems)} problems: {checkpoint}")


def compared_on_recordings(paths: tuple[Path, ...], sample: int | None, seeds: int | None) -> str:
    """The tables that compare the proposers on recorded measurements. Raises WrongInput."""
    from cudal2gen.timing.recordings import autoheuristic
    from cudal2gen.tuner import ranking

    plan = ranking.RankingPlan()
    plan = replace(plan, seeds=seeds or plan.seeds, searched=sample or plan.searched)
    ranked, searched = ranking.compare(autoheuristic.problems(paths), plan, _progress)
    return ranking.markdown(ranked, searched, plan)


def compared_in_the_model(plan: BenchmarkPlan, seeds: int | None, plot: Path | None) -> str:
    """The tables that compare the proposers in ``seeds`` model environments, by one search of each problem in each."""
    from cudal2gen.tuner import benchmark, curve

    plan = replace(plan, environments=seeds or plan.environments)
    on_one_core()
    comparison = benchmark.compare(catalog.published(catalog.load(), plan.acc), plan, _progress)
    if plot is not None:
        title = f"Regret on problems held out, {plan.gpu} {plan.acc}: modelled, not measured"
        write(plot, curve.svg(title, "evaluations", "regret", benchmark.curves(comparison)))
    return benchmark.markdown(comparison)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
