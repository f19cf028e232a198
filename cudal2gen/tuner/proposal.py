"""What a proposer is asked and what it answers: questions, proposals, and the protocol of a proposer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

from cudal2gen.kernel import Fields, IllegalRecord, Problem, Record, parse
from cudal2gen.results import Trial
from cudal2gen.tuner import space
from cudal2gen.tuner.space import Candidates


class Proposal(NamedTuple):
    """A record, or fields that are none and the rules they break. ``note``: what its maker wants to be remembered."""

    proposer: str
    fields: Fields
    record: Record | None
    violation: str = ""
    note: str = ""


def proposal(proposer: str, fields: Fields, note: str = "") -> Proposal:
    """Fields put to the rules."""
    try:
        return Proposal(proposer, fields, parse(fields), note=note)
    except IllegalRecord as error:
        return Proposal(proposer, fields, None, str(error), note)


@dataclass(frozen=True)
class Question:
    """What a proposer is asked: legal candidates of a problem, and what is known of it so far.

    ``trials``: of this problem, failures with reasons among them. ``seen``: keys of what was proposed already; another
    proposal of one is not evaluated again.
    """

    candidates: Candidates
    trials: Sequence[Trial] = ()
    incumbent: Record | None = None
    proposed_keys: frozenset[object] = field(default_factory=frozenset)

    @property
    def problem(self) -> Problem:
        return self.candidates.problem

    @cached_property
    def ranked(self) -> list[Trial]:
        """Measured trials, the fastest first; of a record that was timed more than once, the last."""
        last = {trial_key(trial): trial for trial in self.trials if trial.measured}
        return sorted(last.values(), key=lambda trial: trial.cost)

    @property
    def failures(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.measured]


class Proposer(Protocol):
    """Something that proposes records for one problem after the other."""

    @property
    def name(self) -> str: ...

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Up to ``count`` proposals; fewer, or none, where it has no more to say. Raises nothing for a bad idea."""
        ...

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """What became of proposals, its own and others', as soon as it is known."""
        ...


class MissingLibrary(RuntimeError):
    """A proposer that cannot work here; the message says what to install."""


def trial_key(trial: Trial) -> tuple[str, str]:
    """Equal for trials of one kernel, launched in one way."""
    fields = {name: value for name, value in trial.record.items() if name not in space.GIVEN}
    return trial.name, repr(sorted(fields.items()))


class FixedStrategy:
    """What learns nothing from trials."""

    name = ""

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """Nothing to learn."""


def legal_proposal(proposer: str, record: Record) -> Proposal:
    """The proposal of a record, which is legal because it exists."""
    return Proposal(proposer, space.decisions(record), record)
