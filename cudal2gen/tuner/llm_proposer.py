"""A proposer that asks a language model on any chat-completions server.

``record_prompt`` writes the question and ``record_answers`` reads the answer. An answer lists changes to fields of
records and can do nothing else. An illegal change goes back to the model with the rule that it violates
(``conversation``).

With ``in_background`` an exchange runs in a thread while the GPU evaluates other proposals, and ``propose`` never
waits. Failures cost proposals but do not end the search. After a failure of the server ``chat`` backs off; a problem
whose answers were useless is skipped for some rounds.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cudal2gen.kernel import Problem, Record, parse, space
from cudal2gen.tuner import record_answers, record_prompt
from cudal2gen.tuner.language_model.chat import Chat
from cudal2gen.tuner.language_model.conversation import RETRIES, Conversation, Messages, ReadAnswer
from cudal2gen.tuner.language_model.transcript import Message, NotSent, Reply, Unavailable, Usage
from cudal2gen.tuner.memory import Memory
from cudal2gen.tuner.proposal import FixedStrategy, Proposal, Question, proposal_of_fields
from cudal2gen.tuner.record_answers import LONGEST_REASON, Fault
from cudal2gen.tuner.record_prompt import Evidence

MAX_UNTRIED = 16  # most proposed records without a trial in a prompt
MOST_SKIPPED = 16  # most rounds of a problem that are skipped after a useless answer


def _warn(text: str) -> None:
    """Prints a warning, on stderr."""
    print(text, file=sys.stderr)


@dataclass
class _Dialogue:
    """The state of the exchanges about one problem.

    - ``earlier``: proposals from answers to an earlier start of the run, which are proposed before a question is asked.
    - ``proposed``: the proposed records by their keys.
    - ``useless``: number of answers in a row without a usable proposal; ``skips``: rounds until the next question.
    - ``exchange``: the exchange that runs in the background, if there is one.
    """

    earlier: list[Proposal] = field(default_factory=list)
    proposed: dict[object, Record] = field(default_factory=dict)
    useless: int = 0
    skips: int = 0
    exchange: _Background | None = None


class _Background:
    """Runs ``work`` in a daemon thread."""

    def __init__(self, work: Callable[[], list[Proposal]]) -> None:
        self._proposals: list[Proposal] = []
        self._error: BaseException | None = None
        # The work is an argument and not an attribute, so that it is freed when the thread ends: its question is large.
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True, name="llm")
        self._thread.start()

    def _run(self, work: Callable[[], list[Proposal]]) -> None:
        try:
            self._proposals = work()
        except BaseException as error:
            self._error = error

    @property
    def ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def result(self) -> list[Proposal]:
        """Waits for the work and returns its proposals. Raises what the work raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._proposals


class LlmProposer(FixedStrategy):
    """Proposes what a language model answers. It is a ``Proposer`` and a ``SlowProposer``.

    - ``pool``: records from which a prompt shows the winners of similar problems.
    - ``budget``: most tokens of notes in a prompt. ``evidence``: see ``record_prompt.document``.
    - ``patience``: number of useless answers in a row on a problem after which its rounds are skipped: 1, 2, 4, ..
    - ``in_background``: exchanges run during evaluations. ``alone``: there is no other proposer.
    - ``warn`` receives each distinct failure once.

    It also proposes what is still illegal after the last correction, because other proposers learn from such trials.
    """

    name = record_answers.PROPOSER

    def __init__(
        self, chat: Chat, memory: Memory, pool: Sequence[Record] = (), budget: int = 1500, patience: int = 2,
        *, in_background: bool = False, warn: Callable[[str], None] = _warn, evidence: Evidence | None = None,
        alone: bool = False,
    ) -> None:  # fmt: skip
        self._alone = alone
        self._evidence = evidence
        self._chat, self._memory, self._pool, self._budget = chat, memory, pool, budget
        self._patience, self._in_background, self._warn = patience, in_background, warn
        self._warnings: set[str] = set()
        self._dialogues: dict[Problem, _Dialogue] = {}

    @property
    def failure(self) -> str:
        """Why the last question got no answer; empty if it got one."""
        return str(self._chat.failure or "")

    @property
    def usage(self) -> Usage:
        """Exchanges, tokens and cost so far."""
        return self._chat.usage

    def propose(self, question: Question, count: int) -> list[Proposal]:
        """Up to ``count`` new records, and the illegal proposals of the last answer.

        With ``in_background`` they are those of an exchange that has ended since the last call, and the next exchange
        begins.
        """
        if count < 1:
            return []
        dialogue = self._dialogues.get(question.problem)
        if dialogue is None:
            dialogue = self._dialogues[question.problem] = _Dialogue(self._earlier_proposals(question.problem))
        proposals = _unproposed(dialogue.earlier, question, count)
        dialogue.earlier = [item for item in dialogue.earlier if item not in proposals]
        if legal := [proposal.record for proposal in proposals if proposal.record]:
            dialogue.proposed |= {record.kernel_key: record for record in legal}
            return proposals
        if dialogue.exchange is not None:
            if not dialogue.exchange.ended:
                return []
            proposals += _unproposed(dialogue.exchange.result(), question, count)
            dialogue.exchange = None
            if question.last:
                return proposals
        if dialogue.skips:
            dialogue.skips -= 1
            return proposals
        messages, bases, question = self._question(question, dialogue, count)

        def converse() -> list[Proposal]:
            return self._converse(messages, bases, question, count, dialogue)

        if not self._in_background:
            return proposals + converse()
        dialogue.exchange = _Background(converse)
        return proposals

    def wait(self, problem: Problem) -> bool:
        """See ``SlowProposer``."""
        dialogue = self._dialogues.get(problem)
        if dialogue is None or dialogue.exchange is None:
            return False
        dialogue.exchange.result()
        return True

    def wait_for_server(self, problem: Problem, stop: Callable[[], bool]) -> bool:
        """See ``SlowProposer``. Raises Failure if there is no other proposer and the server refuses for good."""
        if self._alone and (failure := self._chat.failure) is not None and failure.for_good:
            raise failure.final
        waiting = "nobody else proposes, so the search waits {:.0f} s, after which the server may be asked again"
        if not self._chat.wait_for_server(stop, lambda seconds: self._warn_once(waiting.format(seconds))):
            return False
        dialogue = self._dialogues.get(problem)
        if dialogue is not None and dialogue.exchange is not None and not dialogue.exchange.result():
            dialogue.exchange = None  # it began during the back-off, so it sent no question
        return True

    def _earlier_proposals(self, problem: Problem) -> list[Proposal]:
        """The proposals from the last answers to earlier starts of the run, some of which may have no trial yet.

        The answers to the last two questions and their corrections suffice. When the run ended, the records of the last
        question may not have been evaluated, and those of the question before it may still have been under evaluation.
        """
        proposals: list[Proposal] = []
        for outcome in self._chat.history.outcomes(problem)[-2 * (1 + RETRIES) :]:
            for fields in outcome.proposals:
                own = {name: value for name, value in fields.items() if name != "violation"}
                if "violation" in fields:
                    proposals.append(Proposal(self.name, own, None, str(fields["violation"])))
                else:
                    complete = problem.model_dump(mode="json") | own | {"origin": space.tuned(self.name)}
                    proposals.append(proposal_of_fields(self.name, complete)._replace(fields=own))
        return proposals

    def _question(
        self, question: Question, dialogue: _Dialogue, count: int
    ) -> tuple[Messages, dict[str, Record], Question]:
        """The messages; the records by their labels in the messages; and ``question``, with the records that have no
        trial yet among its ``proposed_keys``."""
        bases = record_prompt.bases_of(question)
        # Proposed records have no trial if the search pruned them, or if their batch has not ended.
        tried_keys = {parse(trial.record).kernel_key for trial in question.trials if trial.outcome != "illegal"}
        untried = {key: record for key, record in dialogue.proposed.items() if key not in tried_keys}
        question = replace(question, proposed_keys=question.proposed_keys | untried.keys())
        problem = question.problem
        notes = [
            note.visible | {"because": note.relevance(problem)} for note in self._memory.recall(problem, self._budget)
        ]
        text = record_prompt.document(
            question, bases, list(untried.values())[-MAX_UNTRIED:], notes, self._pool, count, self._evidence
        )
        return (Message("system", record_prompt.SYSTEM), Message("user", text)), bases, question

    def _converse(
        self, messages: Messages, bases: Mapping[str, Record], question: Question, count: int, dialogue: _Dialogue
    ) -> list[Proposal]:
        """Asks until an answer needs no correction. Returns the proposals, legal ones first."""
        proposals: dict[object, Proposal] = {}
        faults: list[Fault] = []
        has_answer = False

        def read(reply: Reply) -> ReadAnswer:
            nonlocal faults, has_answer
            has_answer = True
            reading, faults = self._sort(reply, question, bases, count, proposals)
            return reading

        families = tuple(sorted({record.family for record in bases.values()}))
        conversation = Conversation(self._chat, question.problem, record_answers.schema(families), self._warn_once)
        try:
            conversation.hold(lambda: messages, read)
        except Unavailable as error:
            if not isinstance(error, NotSent) or error.for_good:
                self._warn_once(str(error))
        if has_answer:
            dialogue.useless = 0 if proposals else dialogue.useless + 1
            if dialogue.useless >= self._patience:
                dialogue.skips = min(2 ** (dialogue.useless - self._patience), MOST_SKIPPED)
        dialogue.proposed |= {key: proposal.record for key, proposal in [*proposals.items()][:count] if proposal.record}
        if not proposals and faults:
            self._warn_once(f"no proposal of an answer could be used: {faults[0].text}")
        refused = [fault.proposal for fault in faults if fault.proposal]
        return [*proposals.values()][:count] + refused[: record_answers.MAX_FAULTS]

    def _sort(
        self,
        reply: Reply,
        question: Question,
        bases: Mapping[str, Record],
        count: int,
        proposals: dict[object, Proposal],
    ) -> tuple[ReadAnswer, list[Fault]]:
        """Adds an answer's new, legal proposals to ``proposals``. Returns the result of reading, and the faults of the
        answer's other proposals."""
        ideas, faults = record_answers.parse_ideas(reply, 4 * count)  # more than ``count``, because some may be illegal
        known_keys = set(question.proposed_keys) | ({question.incumbent.kernel_key} if question.incumbent else set())
        answered: list[Proposal] = []  # all proposals of this answer
        for idea in ideas:
            proposal = record_answers.proposal_of(idea, bases)
            if isinstance(proposal, Fault):
                faults.append(proposal)
            elif proposal.record is not None:
                answered.append(proposal)
                key = proposal.record.kernel_key
                if key in known_keys or key in proposals:
                    faults.append(Fault(f"{record_answers.idea_line(idea)}: that kernel was tried or proposed already"))
                else:
                    proposals[key] = proposal
        answered += [fault.proposal for fault in faults if fault.proposal]
        fields = [
            proposal.fields | ({"violation": proposal.violation} if proposal.violation else {}) for proposal in answered
        ]
        fault = "" if answered else "; ".join(fault.text for fault in faults)[:LONGEST_REASON] or "no proposals"
        asks_again = len(proposals) < count and _worth_retrying(faults, proposals)
        correction = record_answers.correction(faults, count - len(proposals)) if asks_again else ""
        return ReadAnswer(fields, fault=fault, correction=correction), faults

    def _warn_once(self, text: str) -> None:
        """Warns, unless it has warned of the same before."""
        if text not in self._warnings:
            self._warnings.add(text)
            self._warn(f"proposer llm: {text}")


def _unproposed(proposals: Sequence[Proposal], question: Question, count: int) -> list[Proposal]:
    """At most ``count`` legal proposals that were not proposed before, and all illegal ones."""
    legal = [
        proposal
        for proposal in proposals
        if proposal.record is not None and proposal.record.kernel_key not in question.proposed_keys
    ]
    return legal[:count] + [proposal for proposal in proposals if proposal.record is None]


def _worth_retrying(faults: Sequence[Fault], proposals: Mapping[object, Proposal]) -> bool:
    """Whether a correction is worth an exchange: after an illegal proposal, or if nothing legal was proposed."""
    return any(fault.proposal for fault in faults) or (bool(faults) and not proposals)
