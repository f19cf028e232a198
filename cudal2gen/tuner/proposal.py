"""Defines the protocol ``Proposer``, the questions that a search asks, and the proposals that proposers return.

A proposer can pick candidates, or write fields itself, as a language model does. In the second case it calls
``proposal_of_fields``: an illegal proposal contains the violated rules, and becomes a trial like any other failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

from cudal2gen.kernel import Fields, IllegalRecord, Problem, Record, parse, space
from cudal2gen.kernel.space import Candidates
from cudal2gen.results import Trial


class Proposal(NamedTuple):
    """A proposed record with its fields; or illegal fields, with the rules that they violate and without a record.
    ``note``: the proposer's remark."""

    proposer: str
    fields: Fields
    record: Record | None
    violation: str = ""
    note: str = ""


def proposal_of_fields(proposer: str, fields: Fields) -> Proposal:
    """The proposal of these fields: with a record if they are legal, else with the violated rules."""
    try:
        return Proposal(proposer, fields, parse(fields))
    except IllegalRecord as error:
        return Proposal(proposer, fields, None, str(error))


@dataclass(frozen=True)
class Question:
    """The state of a search as a proposer sees it: the candidates, and the trials so far, failures included.

    ``proposed_keys``: ``Record.kernel_key`` of the records that were proposed before; the search does not evaluate them
    again. ``last``: the search ends after this batch, so an answer that comes later is useless.
    """

    candidates: Candidates
    trials: Sequence[Trial] = ()
    incumbent: Record | None = None
    proposed_keys: frozenset[object] = field(default_factory=frozenset)
    last: bool = False

    @property
    def problem(self) -> Problem:
        """The problem of the candidates."""
        return self.candidates.problem

    @cached_property
    def ranked(self) -> list[Trial]:
        """Measured trials, the fastest first. The last trial of a record counts."""
        last = {trial_key(trial): trial for trial in self.trials if trial.measured}
        return sorted(last.values(), key=lambda trial: trial.cost)

    @property
    def failures(self) -> list[Trial]:
        """The trials without a time, illegal proposals included."""
        return [trial for trial in self.trials if not trial.measured]


class Proposer(Protocol):
    """Proposes records for one problem after the other."""

    @property
    def name(self) -> str: ...

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Up to ``count`` proposals; fewer or none if the proposer has no more. Illegal proposals raise no error."""
        ...

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """Receives new trials, including those that other proposers proposed."""
        ...


@runtime_checkable
class SlowProposer(Protocol):
    """A proposer whose answers come later. A search waits for them only if it has no other work."""

    def wait(self, problem: Problem) -> bool:
        """Waits for the answer on a problem if one is under way; returns whether one was. Raises the question's
        error."""
        ...

    def wait_for_server(self, problem: Problem, stop: Callable[[], bool]) -> bool:
        """Waits for a server that is limited or overloaded, until ``stop``; returns whether to ask it again now."""
        ...


def trial_key(trial: Trial) -> tuple[str, str]:
    """A key that is equal for trials of the same kernel with the same launch options."""
    fields = {name: value for name, value in trial.record.items() if name not in space.NO_DECISION}
    return trial.name, repr(sorted(fields.items()))


class FixedStrategy:
    """Base class of proposers that do not use ``observe``; a question has all trials anyway."""

    name = ""

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """Ignores the trials."""


def legal_proposal(proposer: str, record: Record) -> Proposal:
    """The proposal of a record, which is legal because it exists."""
    return Proposal(proposer, space.decisions(record), record)
