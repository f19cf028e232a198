"""Proves that an interrupted run uses the answers of the language model that it has paid for, and that a run survives a
server that refuses, restarts or streams."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cudal2gen import results
from cudal2gen.generation import catalog
from cudal2gen.results import Trial
from cudal2gen.tuner import executor, memory, search
from cudal2gen.tuner.environment import ModelEnvironment
from cudal2gen.tuner.language_model import chat, completions
from cudal2gen.tuner.language_model.chat import Chat
from cudal2gen.tuner.language_model.server import ServerWire
from cudal2gen.tuner.language_model.transcript import AnswerOutcome, ChatRequest, Exchange, Message, Unavailable, read
from cudal2gen.tuner.llm_proposer import LlmProposer
from cudal2gen.tuner.memory import Memory
from cudal2gen.tuner.writing.session import Session
from kernelproof.grading import check_source, source
from kernelproof.ground.errors import Failure
from tests.cudal2gen import test_writing
from tests.cudal2gen.asking import KEY, PROBLEM, Clock, candidates, endpoint, incumbent, question
from tests.cudal2gen.chat_server import Server, fails, proposes, says, sends, serve_script
from tests.cudal2gen.test_writing import KERNELS, LOOP, UNROLLED, block, writes
from tests.packages import require

require("openai")

# The name under which the run of a search is stored.
RUN = "model llm seed 0"
# Proposals of the scripted model: a base and its changes. The last one is illegal.
IDEAS = [("incumbent", {"stages": 3}), ("incumbent", {"raster_group": 9}), ("incumbent", {"stages": 90})]


def chat_with(server: Server, folder: Path, budget: int | None = None, run: str = RUN) -> Chat:
    """A chat with the scripted server that appends to the folder's transcript. ``budget``: most tokens of its answers
    and questions, None for no limit. ``run``: the name of the run, whose answers it uses again."""
    return chat.connect(endpoint(server), folder / "llm.jsonl", None, budget, run)


def proposals_from(server: Server, folder: Path, trials: Sequence[Trial] = (), run: str = RUN) -> list[Any]:
    """The first proposals after a new start: for each its kernel, or the rule that it violates. ``trials``: those that
    earlier starts have stored."""
    proposals = LlmProposer(chat_with(server, folder, run=run), Memory()).propose(question(tuple(trials)), 4)
    return [proposal.record.kernel_key if proposal.record else proposal.violation for proposal in proposals]


def test_a_paid_answer_without_trials_is_proposed_again_and_not_asked(tmp_path: Path) -> None:
    with serve_script(proposes(*IDEAS), forever=True) as server:
        first = proposals_from(server, tmp_path)
        count = len(server.requests)
        again = proposals_from(server, tmp_path)
        assert (again[:2], len(server.requests)) == (first[:2], count)
        assert "stages=90" in str(again[-1]), "illegal proposals are remembered too"
        trials = ModelEnvironment(lambda _: incumbent(), seed=3).evaluate(
            PROBLEM,
            [p.record for p in LlmProposer(chat_with(server, tmp_path), Memory()).propose(question(), 4) if p.record],
        )
        proposals_from(server, tmp_path, trials[:1])
        assert len(server.requests) == count, "one of the two proposals still has no trial"
        proposals_from(server, tmp_path, trials)
        assert len(server.requests) > count, "all proposals have trials"
        count = len(server.requests)
        proposals_from(server, tmp_path, run="model llm seed 1")
        assert len(server.requests) > count, "another run does not use these answers"


def test_an_answer_that_nobody_read_is_read_and_not_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "llm.jsonl"
    with serve_script(proposes(*IDEAS[:2]), forever=True) as server:
        first = proposals_from(server, tmp_path)
        exchange, _ = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(exchange + b'{"kind": "outco')  # the process ended when half of the outcome was written
        assert proposals_from(server, tmp_path) == first
        assert len(server.requests) == 1
        assert [type(line) for line in read(path)] == [Exchange, AnswerOutcome], (
            "a whole line replaces the incomplete one"
        )
        proposals_from(server, tmp_path, run="another")
        assert len(server.requests) == 2


def test_a_budget_and_its_counts_are_those_of_all_starts(tmp_path: Path) -> None:
    with serve_script(proposes(*IDEAS[:2]), says("nothing"), forever=True) as server:
        proposals_from(server, tmp_path)
        later = chat_with(server, tmp_path, 1500)
        assert str(later.usage) == "1 exchanges, 1 of them in earlier starts, 1000 tokens in, 200 out"
        proposer = LlmProposer(later, Memory(), warn=(warnings := list[str]()).append)
        assert len(proposer.propose(question(), 4)) == 2
        assert proposer.propose(question(), 4) == []
        assert len(server.requests) == 1
        assert "the budget of 1500 tokens is spent, earlier starts included, so nothing more is asked" in warnings[0]
        assert chat_with(server, tmp_path, 1500, "another").usage.tokens == 0


def test_a_question_whose_answer_is_lost_counts_its_prompt(tmp_path: Path) -> None:
    class Interrupted:
        """A connection on which a signal ends the process before the answer comes."""

        live = True

        def send(self, *_: Any) -> chat.Reply:
            raise SystemExit(130)

    path = tmp_path / "llm.jsonl"
    with pytest.raises(SystemExit):
        LlmProposer(Chat(Interrupted(), path, run=RUN), Memory()).propose(question(), 4)
    (line,) = read(path)
    assert isinstance(line, Exchange)
    assert (line.error, line.estimated, line.tokens_out) == ("interrupted", True, 0)
    assert line.tokens_in == sum(memory.tokens(message.content) for message in line.messages) > 1000


class Ended(SystemExit):
    """Stands for a signal that ends the process while trials are stored."""


@pytest.mark.parametrize("in_background", [False, True])
def test_a_search_that_was_ended_between_answer_and_trial_is_the_search_that_was_not(
    in_background: bool, tmp_path: Path
) -> None:
    script = [
        proposes(("incumbent", {"raster_group": group}), ("incumbent", {"raster_group": group, "stages": 3}))
        for group in range(9, 12)
    ]

    def resume_search(
        server: Server, folder: Path, store: Callable[[Sequence[Trial]], None] | None = None
    ) -> list[Trial]:
        """The stored trials after a search that resumes the folder's. ``store``: called in place of storing."""
        file = folder / "trials.jsonl"
        kept = results.trials(file) if file.is_file() else []
        model = ModelEnvironment(lambda _: incumbent(), seed=5)
        search.run(
            search.Search(candidates(), incumbent(), kept),
            LlmProposer(chat_with(server, folder), Memory(), in_background=in_background),
            executor.InProcess(model), store or (lambda trials: results.append(trials, file)),
            search.SearchLimits(evaluations=6, batch=2, prune=None), RUN,
        )  # fmt: skip
        return results.trials(file)

    def end(_: object) -> None:
        """Stands for the end of the process. An exception leaves threads running, so join them first."""
        for thread in threading.enumerate():
            if thread.name == "llm":
                thread.join()
        raise Ended

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with serve_script(*script) as server:
        expected = resume_search(server, whole)
        assert len(server.requests) == 3
    with serve_script(*script) as server:
        for _ in range(2):
            with pytest.raises(Ended):
                resume_search(server, parts, end)
        assert [trial.record for trial in resume_search(server, parts)] == [trial.record for trial in expected]
        assert len(server.requests) == 3


# By name: what the server answers, a part of the error, the number of requests, and whether the chat asks nothing more.
REFUSALS = {
    "401": (
        fails(401, f"Incorrect API key provided: {KEY}."),
        "answers 401: Incorrect API key provided: ***.; set its key",
        1,
        True,
    ),
    "404": (
        fails(404, "no model m"),
        "answers 404: no model m; look at NAME@URL of --llm",
        1,
        True,
    ),
    "quota": (fails(429, "no", "insufficient_quota"), "answers 429: no; add credit, or set another key", 1, True),
    "temperature": (
        fails(400, "'temperature' does not support 0.3"),
        "; leave llm.temperature out",
        1,
        True,
    ),
    "context": (
        fails(400, "the request exceeds the available context size"),
        "; serve the model with a longer context",
        2,  # the second asks for fewer tokens
        False,
    ),
    "effort": (fails(400, "reasoning_effort: none is unknown"), "; set llm.reasoning_effort in --settings", 1, True),
    "filter": (fails(400, "content management policy"), "; the server's filter refuses the question", 1, False),
    "another 400": (fails(400, "invalid"), "answers 400: invalid", 3, False),
    "page": (
        sends(f"{KEY}<html>{KEY}".encode()),
        "no chat completion, it begins '***<html>***'; check the URL",
        1,
        False,
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_what_to_do_and_ask_no_more_than_may_help(name: str) -> None:
    step, text, count, for_good = REFUSALS[name]
    with serve_script(step, forever=True) as server:
        with pytest.raises(Unavailable) as refusal:
            Chat(ServerWire(endpoint(server))).ask(
                ChatRequest((Message("system", "s"), Message("user", "u")), {}), PROBLEM
            )
        assert text in str(refusal.value)
        assert KEY not in str(refusal.value)
        assert (len(server.requests), refusal.value.for_good) == (count, for_good)


@pytest.mark.parametrize("alone", [False, True])
def test_a_key_that_is_wrong_ends_a_search_where_nobody_else_proposes(alone: bool) -> None:
    with serve_script(fails(401), forever=True) as server:
        proposer = LlmProposer(Chat(ServerWire(endpoint(server))), Memory(), warn=str, alone=alone)
        contest = search.Search(candidates(), incumbent())
        settings = search.SearchLimits(evaluations=6, batch=2, prune=None)
        place = executor.InProcess(ModelEnvironment(lambda _: incumbent(), seed=5))
        with pytest.raises(Failure, match="answers 401") if alone else nullcontext():
            search.run(contest, proposer, place, lambda _: None, settings)
        assert contest.evaluations == []


def test_a_server_that_restarts_is_waited_for(tmp_path: Path) -> None:
    clock, steps = Clock(), [proposes(("incumbent", {"raster_group": 9}), ("incumbent", {"stages": 3}))]
    with serve_script(*[fails(503)] * 9, *steps) as server:
        proposer = LlmProposer(Chat(ServerWire(endpoint(server)), None, None, clock.pause, clock), Memory(), warn=str)
        contest = search.Search(candidates(), incumbent())
        place = executor.InProcess(ModelEnvironment(lambda _: incumbent(), seed=5))
        search.run(contest, proposer, place, lambda _: None, search.SearchLimits(evaluations=2, batch=2, prune=None))
    assert contest.stop_reason == "2 evaluations"
    # After three batches without a record a search ends. If the proposer did not wait, nine refusals would be enough.
    assert sum(clock.pauses) > 60


def test_a_stream_that_nobody_asked_for_is_read() -> None:
    def event(delta: dict[str, Any], **more: Any) -> bytes:
        """A part of a streamed completion; ``more``: further fields of its choice."""
        return (
            b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta} | more], "model": "m"}).encode() + b"\n\n"
        )

    parts = [
        event({"role": "assistant", "content": ""}),
        event({"reasoning_content": "so"}),
        event({"content": '{"a"'}),
    ]
    last = event({"content": ": 1}"}, finish_reason="stop")
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}\n\n'
    answer = completions.read(b"".join([*parts, last, usage, b"data: [DONE]\n\n"]))
    assert answer == completions.Completion('{"a": 1}', "so", "", "stop", (7, 2), "m")
    with pytest.raises(ValueError, match="without its end"):
        completions.read(b"".join(parts))
    with pytest.raises(completions.ServerError, match="too many"):
        completions.read(b'data: {"error": {"message": "too many", "code": 429}}\n\n')


@pytest.mark.slow
def test_a_check_has_no_secrets_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def grade(_task: Any, verdict: Any, _stated: int) -> Any:
        names = [name for name in ("CUDAL2GEN_LLM_KEY", "HF_TOKEN", "HOME") if name in os.environ]
        return verdict.model_copy(update={"remarks": names})

    monkeypatch.setattr(source, "grade", grade)
    for name in ("CUDAL2GEN_LLM_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, KEY)
    verdict = check_source(
        "__global__ void f(float* y) {}", lambda: None, [{"n": 1}], buffers={"y": "out:f32[n]"},
        launches=[{"entry": "f", "grid": 1, "block": 1, "args": ["y"]}],
    )  # fmt: skip
    assert verdict.remarks == ["HOME"]
    assert os.environ["HF_TOKEN"] == KEY


# --- sessions of writing ---


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each test a user's folder and an empty catalog of its own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("CUDAL2GEN_CATALOG", str(tmp_path / "catalog" / "kernels.jsonl"))
    catalog.save([], tmp_path / "catalog" / "kernels.jsonl")


@pytest.mark.thorough
@pytest.mark.slow
def test_a_session_goes_on_with_the_feedback_that_the_model_had(tmp_path: Path) -> None:
    """A session that was ended after the first of two trials of an answer, after both, or during a correction asks only
    the questions without an answer, in the same words as a session that was not ended."""
    rounds = [
        writes({"patch": block("absent\n", "")}, KERNELS["race"][0]),
        writes({"patch": block(LOOP, UNROLLED)}),
        writes({"launch": {"bm": 7}, "source": "x"}, KERNELS["wrong"][0]),
    ]
    stored: list[Trial] = []
    texts: dict[str, list[str]] = {}

    def start_session(server: Server, folder: Path, most: int) -> Session:
        """Starts the session on the trials in ``stored``. A signal ends it when it has stored ``most`` more."""
        count = 0

        def store(trials: Sequence[Trial]) -> None:
            nonlocal count
            stored.extend(trials)
            if (count := count + 1) == most:
                raise Ended

        session = test_writing.session(server, folder, [], rounds=2, kernels=2)
        session.chat, session.store = chat_with(server, folder, run=RUN), store
        session.run_name = RUN
        session.restore(stored)
        session.run()
        return session

    for name, ends in (("whole", [9]), ("parts", [1, 1, 1, 9])):
        stored.clear()
        folder = tmp_path / name
        folder.mkdir()
        with serve_script(*rounds, *[says("no kernel")] * 2) as server:
            for most in ends[:-1]:
                with pytest.raises(Ended):
                    start_session(server, folder, most)
            session = start_session(server, folder, ends[-1])
            texts[name] = [json.dumps(request["messages"]) for request in server.requests]
        assert [trial.outcome for trial in stored] == ["wrong result", "measured", "illegal", "wrong result"]
        assert len(session.attempts) == 4
        answered = len(server.requests)
    assert answered == 5
    assert texts["parts"] == texts["whole"]
    assert "shared-race" in texts["parts"][2]
    assert "hint: " in texts["parts"][2], "the emulator's reports are kept too"
    with serve_script() as server:
        assert len(start_session(server, tmp_path / "parts", 9).attempts) == 4, "a session that has ended asks nothing"


def test_a_session_that_ended_after_too_many_fruitless_rounds_asks_again(tmp_path: Path) -> None:
    heard: list[str] = []

    def start(server: Server) -> Session:
        """Starts the session again, with the trials and the transcript of earlier starts."""
        session = test_writing.session(server, tmp_path, trials, rounds=60, kernels=1)
        session.chat = chat_with(server, tmp_path, run="writer")
        session.run_name, session.say = "writer", heard.append
        session.restore(list(trials))
        session.run()
        return session

    trials: list[Trial] = []
    texts = (test_writing.gemm((LOOP, f"#pragma unroll {number}\n{LOOP}")) for number in (2, 3))
    illegal = [writes({"launch": {"bm": 7}, "source": text}) for text in texts]
    with serve_script(*illegal, says("no"), forever=True) as server:
        start(server)
        asked, stored = len(server.requests), len(trials)
        assert stored == 2, "two texts with one launch are two trials"
        again = start(server)
    assert len(server.requests) == asked + 2 * 3, "two more questions, each with two corrections"
    assert len(trials) == stored, "nothing is stored twice"
    assert again.unavailable is None
    assert sum("asks as many again" in text for text in heard) == 2


@pytest.mark.slow
def test_a_session_whose_server_died_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "PAUSES", ())
    with serve_script(writes({"patch": block(LOOP, UNROLLED)})) as server:
        first = test_writing.session(server, tmp_path)
        first.chat = chat_with(server, tmp_path, run="writer")
        first.run()
    session = test_writing.session(server, tmp_path, rounds=3)
    session.chat, session.pause = chat_with(server, tmp_path, run="writer"), lambda _: None
    session.restore([])
    assert len(session.run()) == 1, "the attempt of the earlier start is used"
    assert session.unavailable is not None
    assert "cannot be reached" in str(session.unavailable.final)
    assert (session.chat.usage.answered, first.chat.usage.answered) == (0, 1)
