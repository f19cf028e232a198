"""Asks a language model a question and sends faulty answers back for correction.

A caller writes the question and reads the answers, which may be records or kernels. A faulty answer goes back with its
faults, at most ``RETRIES`` times. Every answer gets an ``AnswerOutcome`` in the transcript. Answers to an earlier start
of the run are used before the model is asked again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cudal2gen.kernel import Fields, Problem
from cudal2gen.tuner.language_model.chat import Chat
from cudal2gen.tuner.language_model.transcript import ChatRequest, Exchange, Message, Reply, Unavailable

RETRIES = 2  # repetitions of a question after faulty answers
QUESTION_MESSAGES = 2  # messages of a question without corrections: system and user
LONGEST_FAULT = 400  # most characters of an outcome's fault

Messages = tuple[Message, ...]


class ReadAnswer(NamedTuple):
    """The result of reading an answer. All fields but ``correction`` are those of its ``AnswerOutcome``.

    ``correction``: the message that asks for a better answer; empty if none is needed.
    """

    proposals: Sequence[Fields] = ()
    reward: float | None = None
    fault: str = ""
    correction: str = ""
    right: bool | None = None


@dataclass
class Conversation:
    """Conducts the exchanges about one problem.

    - ``say`` receives the model's refusals to answer.
    - ``stored``: answers to earlier starts of the run, in their order, which are used before new ones.
    - ``ask_again`` says whether to repeat a question that got no answer; it may wait before it returns.
    """

    chat: Chat
    problem: Problem
    schema: dict[str, Any]
    say: Callable[[str], None]
    stored: deque[Exchange] = field(default_factory=deque)
    ask_again: Callable[[Unavailable], bool] = lambda _: False

    def hold(self, question: Callable[[], Messages], read: Callable[[Reply], ReadAnswer]) -> None:
        """Asks the question and its corrections until an answer needs none, or after ``RETRIES`` corrections.

        ``question`` makes the messages; it is called only if there is no stored answer. Raises Unavailable if a
        question gets no answer, and whatever ``read`` raises.
        """
        messages: Messages = ()
        for turn in range(1 + RETRIES):
            stored = self._stored_answer(turn)
            if stored is None and turn and self.stored:
                return  # the next stored answer is to another question
            messages = stored.messages if stored else messages or question()
            request = ChatRequest(messages, self.schema)
            reply = stored.reply if stored else self._ask(request)
            if reply.refusal:
                self.say(f"the model refused: {reply.refusal[:LONGEST_FAULT]}")
                reading = ReadAnswer(fault="the model refused")
            else:
                reading = read(reply)
            if stored is None or not self.chat.history.concluded(stored.key):
                self.chat.conclude(
                    request, reply, self.problem, reading.proposals,
                    reward=reading.reward, fault=reading.fault[:LONGEST_FAULT],
                    right=reading.right,
                )  # fmt: skip
            if not reading.correction:
                return
            messages = (*messages, Message("assistant", reply.text), Message("user", reading.correction))

    def _stored_answer(self, turn: int) -> Exchange | None:
        """The next stored answer if it is to a question (``turn`` 0), or to a correction (later turns); else None.

        An answer to a correction is dropped if the answer to its question is missing.
        """
        while self.stored and not turn and len(self.stored[0].messages) > QUESTION_MESSAGES:
            self.stored.popleft()
        if self.stored and (len(self.stored[0].messages) > QUESTION_MESSAGES) == bool(turn):
            return self.stored.popleft()
        return None

    def _ask(self, request: ChatRequest) -> Reply:
        """The model's answer, asked for as often as ``ask_again`` says. Raises Unavailable."""
        while True:
            try:
                return self.chat.ask(request, self.problem)
            except Unavailable as error:
                if not self.ask_again(error):
                    raise
