"""Proves when a session of writing kernels ends, for drawn sequences of answers, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudal2gen.tuner.language_model.transcript import NotSent, Unavailable
from cudal2gen.tuner.writing.session import Session

# What a question brings: a new kernel, none, no answer for now, no answer because the chat backs off, or none for good.
ANSWERS = st.lists(st.sampled_from(("kernel", "nothing", "unavailable", "backs off", "for good")), max_size=12)


def expected_counts(answers: list[str], rounds: int, patience: int) -> tuple[int, int, str]:
    """How many questions are asked, how many kernels come, and the answer that makes the model unavailable."""
    asked = kernels = idle = answered = 0
    last = ""
    for answer in answers:
        if answered >= rounds or idle >= patience:
            break
        asked += 1
        if answer == "for good":
            return asked, kernels, answer
        is_answer = answer in ("kernel", "nothing")
        kernels, answered, last = kernels + (answer == "kernel"), answered + is_answer, "" if is_answer else answer
        idle = 0 if answer == "kernel" else idle + 1
    return asked, kernels, last if idle >= patience else ""


@settings(max_examples=80)
@given(ANSWERS, st.integers(1, 5), st.integers(1, 4))
def test_a_session_ends_after_its_rounds_or_when_its_patience_ends(
    answers: list[str], rounds: int, patience: int
) -> None:
    answers = [*answers, *["nothing"] * (rounds + patience)]  # enough to end any session
    attempts: list[Any] = []
    asked: list[int] = []
    pauses: list[float] = []
    failures = {"unavailable": Unavailable("", retry_after=7.0), "for good": Unavailable("", for_good=True)}
    before_back_off = Unavailable("the failure before the back-off")

    def one_round(number: int) -> None:
        answer = answers[len(asked)]
        asked.append(number)
        if answer == "kernel":
            attempts.append(answer)
        elif answer != "nothing":
            raise failures.get(answer) or NotSent("")

    session: Any = object.__new__(Session)
    session.limits = SimpleNamespace(rounds=rounds, patience=patience)
    session.problem, session.unavailable, session._answers, session.attempts = "problem", None, [], attempts
    session.chat = SimpleNamespace(history=SimpleNamespace(state=lambda *_: {}), failure=before_back_off)
    session.pause = pauses.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "_round", lambda _, number: one_round(number))
        patch.setattr(Session, "_say", lambda *_: None)
        patch.setattr(Session, "_learn", lambda _: None)
        patch.setattr(Session, "_wait_for_server", lambda _: False)
        assert session.run() is attempts
    count, kernels, last = expected_counts(answers, rounds, patience)
    assert (len(asked), len(attempts)) == (count, kernels)
    # A question without an answer is asked again.
    answered = [answer in ("kernel", "nothing") for answer in answers[:count]]
    assert asked == [1 + sum(answered[:at]) for at in range(count)]
    assert len(pauses) == sum(answer in ("unavailable", "backs off") for answer in answers[:count])
    reasons = {**failures, "backs off": before_back_off}
    assert session.unavailable is (reasons[last] if last else None)
