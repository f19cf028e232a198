"""Shared parts of the tuner's tests: two problems, their trials and incumbent, and a proposer with a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudal2gen.kernel import Problem, Record, parse, space
from cudal2gen.results import INCUMBENT, KERNEL, Timing, Trial
from cudal2gen.tuner.environment import ModelEnvironment, trial_of
from cudal2gen.tuner.proposal import Proposal, Question

SMALL = Problem(gpu="h200", acc="f32", layout="tn", m=256, n=512, k=256)
AMPERE = Problem(gpu="a100", acc="f16", layout="tn", m=512, n=1024, k=512)


def samples(contender: str, us: Sequence[float]) -> Timing:
    """A contender's timing with one sample for each of these microseconds."""
    return Timing(contender=contender, calls=1, event_us=tuple(us), error=0.0)


def timed_trial(
    record: Record, us: float | Sequence[float], incumbent_us: float | Sequence[float] | None = None, **details: Any
) -> Trial:
    """A measured trial of a record, and of the incumbent if it has a time. A single time counts as six equal
    samples."""
    times = [us] * 6 if isinstance(us, float) else us
    timings = [samples(KERNEL, times)]
    if incumbent_us is not None:
        timings.append(samples(INCUMBENT, [incumbent_us] * 6 if isinstance(incumbent_us, float) else incumbent_us))
    return trial_of(ModelEnvironment(), record.problem, record, "short", "measured", timings=tuple(timings), **details)


def question(problem: Problem = SMALL, trials: Sequence[Trial] = ()) -> Question:
    """A question about all candidates of a problem after these trials, without an incumbent."""
    keys = frozenset(parse(trial.record).kernel_key for trial in trials)
    return Question(space.candidates(problem), tuple(trials), None, keys)


class Scripted:
    """A proposer that proposes the items of a list, like a language model's answers. ``observed``: the number of trials
    that it was told."""

    name = "scripted"

    def __init__(self, proposals: Sequence[Proposal]) -> None:
        self.queue, self.observed = list(proposals), 0

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """The next ``count`` proposals of the list, fewer at its end."""
        answer, self.queue = self.queue[:count], self.queue[count:]
        return answer

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """Counts the trials."""
        self.observed += len(trials)


def incumbent() -> Record:
    """The slowest candidate of ``SMALL`` in the modelled environment, so that another one improves on it."""
    records = space.candidates(SMALL).records
    return records[int(ModelEnvironment(seed=5).true_us(records).argmax())]
