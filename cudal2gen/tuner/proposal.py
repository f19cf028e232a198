"""Questions to proposers, their proposals, and the protocol ``Proposer``.

A proposer that writes fields itself rather than picking candidates, as a language model does, answers with
``proposal``: an illegal one carries the violated rule, and becomes a trial like any other failure.
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
    """A record; or fields with the rules that they violate, and no record. ``note``: the proposer's own remark."""

    proposer: str
    fields: Fields
    record: Record | None
    violation: str = ""
    note: str = ""


def proposal(proposer: str, fields: Fields) -> Proposal:
    """The proposal of these fields: with a record where they are legal, else with the violated rules."""
    try:
        return Proposal(proposer, fields, parse(fields))
    except IllegalRecord as error:
        return Proposal(proposer, fields, None, str(error))


@dataclass(frozen=True)
class Question:
    """The legal candidates of a problem, and its trials so far, failures included.

    ``proposed_keys``: ``Record.kernel_key`` of the records proposed before; the search does not evaluate them again.
    ``last``: the search ends after this batch, so nothing that comes later is of use.
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
        """Measured trials, fastest first; for a record with several, the last one."""
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
        """Up to ``count`` proposals; fewer, or none, when it has no more. An illegal proposal raises nothing."""
        ...

    def observe(self, question: Question, trials: Sequence[Trial]) -> None:
        """Receives the trials of all proposers' proposals as soon as they end."""
        ...


@runtime_checkable
class Awaited(Protocol):
    """A proposer whose answers come later. A search waits for them only when no other work is left."""

    def wait(self, problem: Problem) -> bool:
        """Waits for an answer under way on a problem; whether there was one. Raises what asking for it raised."""
        ...

    def wait_for_server(self, problem: Problem, stop: Callable[[], bool]) -> bool:
        """If a server asked for time, waits until it may be asked again and returns whether it may. ``stop`` ends the
        waiting."""
        ...


def trial_key(trial: Trial) -> tuple[str, str]:
    """Equal for trials of one kernel with equal launch options."""
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
