"""Reads recorded measurements as trials, from AutoHeuristic's files and from files of trials that ``tune`` wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from cudal2gen import results
from cudal2gen.kernel import Problem
from cudal2gen.results import KERNEL, Timing, Trial
from cudal2gen.timing.recordings import autoheuristic, tile
from cudal2gen.timing.recordings.autoheuristic import Recording
from cudal2gen.tuner.cost_model import TimedRecords
from kernelproof.ground.chips import GPUS
from kernelproof.ground.errors import WrongInput

VENDOR = "cublas"


def trials(paths: Sequence[Path], admits: Callable[[Problem], bool] = lambda _: True) -> list[Trial]:
    """The recorded trials of the problems for which ``admits`` is true.

    Files ``*.jsonl`` have trials; other paths are AutoHeuristic's files or folders. Raises WrongInput if a path is
    missing, or if there is no trial.
    """
    recorded: list[Trial] = []
    for path in paths:
        if not path.exists():
            raise WrongInput(
                f"{path}: no such file or folder; name files of trials (*.jsonl) or AutoHeuristic's files or folders"
            )
        if path.suffix == ".jsonl":
            recorded += [trial for trial in results.trials(path) if admits(trial.problem)]
    for problem, recording in autoheuristic.problems(path for path in paths if path.suffix != ".jsonl").items():
        if admits(problem):
            recorded += as_trials(problem, recording)
    if not recorded:
        raise WrongInput(
            f"{', '.join(map(str, paths))}: no recorded trial of the chosen GPU, types and layout; name files of "
            "trials (*.jsonl) or the unpacked archives of github.com/AlnisM/autoheuristic-datasets, which have f32 sums"
        )
    return recorded


def as_trials(problem: Problem, recording: Recording) -> list[Trial]:
    """A recording's tiles as trials of effort ``long``, each with the vendor's time if the recording has it."""
    tile.register()
    vendor = () if recording.vendor_us is None else (_timing(VENDOR, recording.vendor_us),)
    fields = problem.model_dump()
    return [
        Trial(
            environment="replay",
            on=f"{GPUS[problem.gpu].title}, recorded by AutoHeuristic",
            run="",
            **fields,
            proposer="",
            name=(record := tile.record_of(problem, configuration)).name,
            record=record.model_dump(mode="json"),
            effort="long",
            outcome="measured",
            timings=(_timing(KERNEL, us), *vendor),
        )
        for configuration, us in recording.tiles.items()
    ]


def timed(recordings: Iterable[tuple[Problem, Recording]]) -> dict[Problem, TimedRecords]:
    """The recordings as training data for the cost model."""
    tile.register()
    return {
        problem: TimedRecords(
            [tile.record_of(problem, configuration) for configuration in recording.tiles],
            list(recording.tiles.values()),
        )
        for problem, recording in recordings
    }


def _timing(contender: str, us: float) -> Timing:
    return Timing(contender=contender, calls=1, event_us=(us,), error=0.0)
