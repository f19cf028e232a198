"""The parts of tune that search for nothing: training what proposes, and comparing proposers."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudal2gen import places
from cudal2gen.cli.searching import LanguageModel, Reward, Trials, on_one_core
from cudal2gen.cli.selection import Selection
from cudal2gen.generation import catalog
from cudal2gen.kernel import Acc, Record
from kernelproof.ground.command_line.messages import refuse
from kernelproof.ground.files import write

if TYPE_CHECKING:
    from cudal2gen.results import Trial
    from cudal2gen.tuner.benchmark import Settings
    from cudal2gen.tuner.cost_model import CostModel, TimedRecords


def costs_path(trials: Trials, gpu: str, acc: Acc, chosen: Path | None) -> Path:
    """Where ``--train`` writes the cost model: a modelled one of its own for each GPU and accumulator."""
    kind = f"-{gpu}-{acc}-model" if trials.environment == "model" else ""
    return chosen or places.build_dir() / "tuner" / f"cost-model{kind}.npz"


def load_costs(path: Path, chosen: bool) -> CostModel:
    """The trained cost model of a file; the shipped one where the file is the default and absent."""
    from cudal2gen.tuner import cost_model

    return cost_model.load(path if chosen or path.is_file() else cost_model.SHIPPED)


def train(selection: Selection, acc: Acc, trials: Trials, seed: int, costs: Path | None, checkpoint: Path) -> None:
    """Trains the cost model and, where torch is, the policy; writes both."""
    from cudal2gen.tuner import cost_model, training

    path = costs_path(trials, selection.gpu, acc, costs)
    records = catalog.load()
    if trials.environment == "model":
        timed = _modelled(_settings(selection, acc, seed), records)
        model = cost_model.train(timed, seed)
    else:
        recorded = _recorded(trials)
        timed = cost_model.timed(recorded)
        sizes = sorted({(record.m, record.n, record.k) for record in records})
        model = training.pooled(recorded, sizes, seed)
    count = sum(len(problem.records) for problem in timed)
    model.save(path)
    print(f"cost model of {count} timed records of {len(timed)} problems: {path}, {path.stat().st_size} bytes")
    _train_policy(timed, records, _settings(selection, acc, seed), checkpoint)


def export(trials: Trials, language_model: LanguageModel, rewarded: Reward, folder: Path) -> None:
    """Writes the transcript's answers with the rewards of their trials as training data."""
    from cudal2gen import results
    from cudal2gen.tuner import exports

    transcript, settings = language_model.file(trials), rewarded.settings
    if not transcript.is_file():
        refuse(
            f"--export: no transcript {transcript}; search with --proposers llm first, or name one, --llm-transcript"
        )
    stored = results.trials(trials.store) if trials.store.is_file() else []
    rewards = exports.Rewards(stored, settings)
    counts = exports.write(folder, exports.examples(transcript, rewards), settings.failed)
    print(", ".join(f"{count} lines in {folder / name}" for name, count in counts.items()))


def _settings(selection: Selection, acc: Acc, seed: int) -> Settings:
    """Of the comparison, and of training as it trains; ``--sample``: for so many held-out problems."""
    from cudal2gen.tuner import benchmark

    settings = benchmark.Settings(gpu=selection.gpu, acc=acc, seed=seed)
    return settings if selection.sample is None else benchmark.sized(settings, selection.sample)


def _modelled(settings: Settings, records: list[Record]) -> list[TimedRecords]:
    """What the benchmark records in the environment that ``tune --environment model --seed`` searches."""
    from cudal2gen.tuner import benchmark
    from cudal2gen.tuner.environment import Model

    _, problems = benchmark.split(catalog.published(records, settings.acc), settings)
    return benchmark.record_trials(Model(seed=settings.seed), problems, settings.evaluations_each, settings.seed)


def _recorded(trials: Trials) -> list[Trial]:
    """Trials of the store that cards of the records' own models measured, and recordings."""
    from cudal2gen import results
    from cudal2gen.tuner import recorded

    stored = [trial for trial in results.trials(trials.store) if trial.on_its_gpu]
    return stored + (recorded.trials(trials.recordings) if trials.recordings else [])


def _train_policy(timed: list[TimedRecords], records: list[Record], settings: Settings, checkpoint: Path) -> None:
    """The policy as the benchmark has it: imitation, then the contrastive update on timed records of this GPU."""
    from cudal2gen.tuner import benchmark, policy
    from cudal2gen.tuner import checkpoint as checkpoints

    gpu, acc = settings.gpu, settings.acc
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
    trained = benchmark.train_policies(None, imitated, problems, settings, settings.seed)["contrast"]
    checkpoints.save(trained, checkpoint)
    print(f"policy of {len(problems)} problems: {checkpoint}")


@dataclass(frozen=True)
class Repetitions:
    """How often ``--benchmark`` repeats what is random."""

    seeds: Annotated[int, typer.Option(min=1, help="Searches of each proposer and problem, for --benchmark.")] = 3
    environments: Annotated[
        int, typer.Option("--environment-seeds", min=1, help="Seeds of hidden terms and training, for --benchmark.")
    ] = 3


def compare(
    selection: Selection,
    acc: Acc,
    trials: Trials,
    repetitions: Repetitions,
    seed: int,
    markdown: Path | None,
    plot: Path | None,
) -> None:
    """Prints and writes the tables: recordings first, then the model environment.

    ``--sample``: the number of held-out problems that are searched; the model environment's training is in proportion.
    """
    if trials.chosen == "gpu":
        refuse("--environment gpu: --benchmark compares on --recordings and in the model environment")
    if trials.chosen == "replay" and not trials.recordings:
        refuse("--environment replay: --benchmark needs --recordings, files that others measured")
    tables = []
    if trials.recordings and trials.chosen != "model":
        tables.append(_on_recordings(trials.recordings, selection.sample, seed))
    if trials.chosen != "replay":
        tables.append(_in_the_model(_settings(selection, acc, seed), repetitions, plot))
    text = "\n".join(tables)
    if markdown is not None:
        write(markdown, text)
    print(text, end="")


def _on_recordings(paths: tuple[Path, ...], sample: int | None, seed: int) -> str:
    from cudal2gen.timing.recordings import autoheuristic
    from cudal2gen.tuner import ranking

    settings = ranking.Settings(seed=seed)
    if sample is not None:
        settings = replace(settings, searched=sample)
    ranked, searched = ranking.compare(autoheuristic.problems(paths), settings, _progress)
    return ranking.markdown(ranked, searched, settings)


def _in_the_model(settings: Settings, repetitions: Repetitions, plot: Path | None) -> str:
    from cudal2gen.tuner import benchmark, curve

    settings = replace(settings, environments=repetitions.environments, seeds=repetitions.seeds)
    on_one_core()
    comparison = benchmark.compare(catalog.published(catalog.load(), settings.acc), settings, _progress)
    if plot is not None:
        title = f"Regret on problems held out, {settings.gpu} {settings.acc}: modelled, not measured"
        write(plot, curve.svg(title, "evaluations", "regret", benchmark.curves(comparison)))
    return benchmark.markdown(comparison)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
