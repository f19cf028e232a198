"""Questions to proposers, their proposals, and the protocol ``Proposer``.

A proposer may write fields itself in place of picking candidates, as a language model does. It then calls ``proposal``:
an illegal proposal carries the violated rule, and becomes a trial like any other failure.
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
    """A proposed record; or illegal fields with the rules that they violate, and no record. ``note``: the proposer's
    remark."""

    proposer: str
    fields: Fields
    record: Record | None
    violation: str = ""
    note: str = ""


def proposal(proposer: str, fields: Fields) -> Proposal:
    """The proposal of these fields: with a record if they are legal, else with the violated rules."""
    try:
        return Proposal(proposer, fields, parse(fields))
    except IllegalRecord as error:
        return Proposal(proposer, fields, None, str(error))


@dataclass(frozen=True)
class Question:
    """The legal candidates of a problem, and its trials so far, failures included.

    ``proposed_keys``: ``Record.kernel_key`` of the records that were proposed before, which are not evaluated again.
    ``last``: the search ends after this batch, so a later answer is of no use.
    """

    candidates: Candidates
    trials: Sequence[Trial] = ()
    incumbent: Record | None = None
    proposed_keys: frozenset[object] = field(default_factory=frozenset)
    last: bool = False

    @property
    def problem(self) -> Problem:
        return self.candidates.problem

    @cached_property
    def ranked(self) -> list[Trial]:
        """Measured trials, the fastest first. The last trial of a record counts."""
        last = {trial_key(trial): trial for trial in self.trials if trial.measured}
        return sorted(last.values(), key=lambda trial: trial.cost)

    @property
    def failures(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.measured]


class Proposer(Protocol):
    """Proposes records for one problem after the other."""

    @property
    def name(self) -> str: ...

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Up to ``count`` proposals; fewer, or none, if it has no more. An illegal proposal raises nothing."""
        ...

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """Receives new trials, those of other proposers included."""
        ...


@runtime_checkable
class SlowProposer(Protocol):
    """A proposer whose answers come later. A search waits for them only if it has no other work."""

    def wait(self, problem: Problem) -> bool:
        """Waits for the answer on a problem that is under way; whether there was one. Raises what asking raised."""
        ...

    def wait_for_server(self, problem: Problem, stop: Callable[[], bool]) -> bool:
        """Waits for a server that asked for time, until ``stop``; whether it may be asked again now."""
        ...


def trial_key(trial: Trial) -> tuple[str, str]:
    """A key that trials of one kernel with equal launch options share."""
    fields = {name: value for name, value in trial.record.items() if name not in space.NO_DECISION}
    return trial.name, repr(sorted(fields.items()))


class FixedStrategy:
    """A proposer that ignores trials."""

    name = ""

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """Ignores them."""


def legal_proposal(proposer: str, record: Record) -> Proposal:
    """The proposal of a record, which is legal because it exists."""
    return Proposal(proposer, space.decisions(record), record)
