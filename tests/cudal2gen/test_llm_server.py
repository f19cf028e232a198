"""Proves how slow, failing and unusual servers are used, with pauses after failures, budgets and costs."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from cudal2gen.tuner.language_model.chat import Chat
from cudal2gen.tuner.language_model.server import KEY_HINT, ServerWire, retry_after
from cudal2gen.tuner.language_model.transcript import ChatRequest, Message, NotSent, Unavailable
from cudal2gen.tuner.llm_proposer import LlmProposer
from cudal2gen.tuner.memory import Memory, tokens
from cudal2gen.tuner.proposers import Mixture, Random
from tests.cudal2gen.asking import (
    GOOD,
    KEY,
    PROBLEM,
    SMALL,
    Clock,
    endpoint,
    llm_proposer,
    question,
    search_trials,
)
from tests.cudal2gen.chat_server import (
    Step,
    completion,
    dribbles,
    fails,
    floods,
    limits,
    proposes,
    reply,
    says,
    sends,
    serve_script,
    waits,
)  # fmt: skip
from tests.packages import require

require("openai")


@pytest.mark.slow
@pytest.mark.parametrize("step", [waits(3), dribbles(3)])
def test_a_slow_server_is_left_for_longer_each_time_and_asked_again(step: Any) -> None:
    warnings: list[str] = []
    clock = Clock()

    def slow(handler: Any) -> None:
        clock.now += 15
        step(handler)

    with serve_script(slow, slow, says(GOOD)) as server:
        proposer = llm_proposer(server, warnings, clock=clock, seconds=1.5)
        for requests, seconds in ((1, 15), (2, 30)):
            assert [proposer.propose(question(), 8) for _ in range(9)] == [[]] * 9
            assert len(server.requests) == requests
            clock.now += seconds - 0.1
            assert proposer.propose(question(), 8) == []
            clock.now += 0.1
        assert len(proposer.propose(question(), 8)) == 1
    (line,) = warnings
    assert "1.5 s" in line


def test_a_failure_that_took_no_time_leaves_out_a_few_questions() -> None:
    clock = Clock()
    with serve_script(*[fails(401)] * 5, says(GOOD), fails(500), forever=True) as server:
        proposer = llm_proposer(server, clock=clock)
        rounds = []
        for _ in range(24):
            before = len(server.requests)
            proposer.propose(question(), 1)
            rounds.append(len(server.requests) - before)
    assert rounds == [1, 0, 1, 0, 0, *[1, 0, 0, 0, 0] * 3, 1, 3, 0, 0], (
        "quick failures leave out 1, 2, 4, 4 and 4 questions"
    )
    assert clock.pauses == [1.0, 4.0], "only the server's error is tried again, after 1 and 4 s"


def test_a_failing_server_is_asked_three_times_and_may_recover() -> None:
    warnings: list[str] = []
    clock = Clock()
    with serve_script(fails(500), fails(503), says(GOOD)) as server:
        proposer = llm_proposer(server, warnings, clock=clock)
        assert len(proposer.propose(question(), 8)) == 1
    assert (warnings, clock.pauses) == ([], [1.0, 4.0])
    assert (proposer.usage.exchanges, proposer.usage.failed) == (3, 2)
    with serve_script(fails(500, "boom"), forever=True) as server:
        proposer = llm_proposer(server, warnings)
        assert [proposer.propose(question(), 8) for _ in range(3)] == [[], [], []]
        assert len(server.requests) == 3
    assert "answers 500" in warnings[0]


def test_a_wrong_key_rests_the_model_and_is_not_shown() -> None:
    warnings: list[str] = []
    clock = Clock()
    with serve_script(fails(401, f"Incorrect API key provided: {KEY}", "invalid_request_error"), says(GOOD)) as server:
        proposer = llm_proposer(server, warnings, clock=clock)
        assert [proposer.propose(question(), 8) for _ in range(2)] == [[], []]
        assert len(server.requests) == 1
        assert len(proposer.propose(question(), 8)) == 1
    (line,) = warnings
    assert "answers 401" in line
    assert line.endswith(KEY_HINT)
    assert "***" in line
    assert KEY not in line


def test_an_address_without_a_server_is_named() -> None:
    warnings: list[str] = []
    with serve_script() as server:
        server_down = server
    assert llm_proposer(server_down, warnings).propose(question(), 8) == []
    assert "cannot be reached" in warnings[0]


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{}]}', b'{"choices": [{"message": null}]}', b"\xff" * 50,
     b'{"choices": [{"message": {"content": "\\ud800"}}]}', b"[" * 100_000],
)  # fmt: skip
def test_what_is_no_chat_completion(body: bytes) -> None:
    warnings: list[str] = []
    with serve_script(sends(body)) as server:
        assert llm_proposer(server, warnings).propose(question(), 8) == []
    assert "is no chat completion" in warnings[0]


def test_an_endless_answer_is_not_read_to_its_end() -> None:
    warnings: list[str] = []
    with serve_script(floods()) as server:
        assert llm_proposer(server, warnings).propose(question(), 8) == []
    assert "longer than 1048576 bytes" in warnings[0]


def test_servers_without_schemas_are_asked_in_a_plainer_form_from_then_on() -> None:
    refusal = fails(400, "response_format json_schema is not supported", "invalid_request_error")
    with serve_script(refusal, refusal, says(GOOD), proposes(("incumbent", {"stages": 2}))) as server:
        proposer = llm_proposer(server)
        assert len(proposer.propose(question(), 1)) == 1
        assert len(proposer.propose(question(), 1)) == 1
    forms = [request.get("response_format", {}).get("type") for request in server.requests]
    assert forms == ["json_schema", "json_object", None, None]


def test_a_question_that_no_form_helps_is_not_held_against_the_schema() -> None:
    warnings: list[str] = []
    with serve_script(*[fails(400, "nonsense")] * 3, says(GOOD)) as server:
        proposer = llm_proposer(server, warnings)
        assert proposer.propose(question(), 1) == []
        assert len(proposer.propose(question(), 1)) == 1
    assert server.requests[3]["response_format"]["type"] == "json_schema"
    assert "nonsense" in warnings[0]


def http_date(seconds: float) -> str:
    """A time in the form of HTTP's headers."""
    return formatdate(seconds, usegmt=True)


def test_a_server_says_when_it_is_asked_again() -> None:
    clock = Clock()
    with serve_script(limits("3"), limits("100"), says(GOOD), limits(http_date(time.time() + 60))) as server:
        proposer = llm_proposer(server, clock=clock)
        assert proposer.propose(question(), 1) == []
        assert clock.pauses == [3.0], "a wait of 3 s passes within the call, the model rests for one of 100 s"
        clock.now += 99.9
        assert proposer.propose(question(), 1) == []
        assert len(server.requests) == 2
        clock.now += 0.1
        assert len(proposer.propose(question(), 1)) == 1
        assert proposer.propose(question(), 1) == []
        clock.now += 50
        assert proposer.propose(question(), 1) == []
        assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), ("0.5", 0.5), ("-3", 0.0), ("1e9", 3600.0), ("nan", None), ("soon", None), ("", None),
     (http_date(1060), 60.0), (http_date(900), 0.0), ("Mon, 01 Jan 99999999999999999999 00:00:00 GMT", None)],
)  # fmt: skip
def test_times_to_retry(value: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": value}, 1000.0) == seconds


def test_a_budget_of_tokens_is_spent_once_and_the_search_goes_on() -> None:
    warnings: list[str] = []
    with serve_script(proposes(("incumbent", {"stages": 3})), forever=True) as server:
        proposer = llm_proposer(server, warnings, tokens=6000)
        trials = search_trials(Mixture([proposer, Random(1)]))
        count = len(server.requests)
    assert 1 <= count <= 5
    assert proposer.usage.tokens == 1200 * count <= 6000
    assert len([trial for trial in trials if trial.effort == "short"]) == 12
    assert "the budget of 6000 tokens is spent" in warnings[-1]


@pytest.mark.parametrize(
    ("message", "text", "reasoning"),
    [
        ({"content": "a", "reasoning_content": "because"}, "a", "because"),
        ({"content": "a", "reasoning": "because"}, "a", "because"),
        ({"content": "<think>because</think> a"}, " a", "because"),
        ({"content": "because</think>a"}, "a", "because"),
        ({"content": "<think>because, and then"}, "", "because, and then"),
        ({"content": None, "reasoning_content": "because"}, "", "because"),
        ({"content": "a", "reasoning": {"effort": "low"}}, "a", ""),
    ],
)
def test_reasoning_is_kept_apart_from_the_answer(message: dict[str, Any], text: str, reasoning: str) -> None:
    with serve_script(says(message["content"], **{k: v for k, v in message.items() if k != "content"})) as server:
        request = ChatRequest((Message("system", "s"), Message("user", "u")), {})
        reply = Chat(ServerWire(endpoint(server))).ask(request, PROBLEM)
    assert (reply.text, reply.reasoning) == (text, reasoning)


def answer_step(**changes: Any) -> Step:
    """A good answer with other fields besides the text."""
    return lambda handler: reply(handler, 200, completion(GOOD) | changes)


@pytest.mark.parametrize(
    "step",
    [
        answer_step(service_tier="on_demand"),
        answer_step(created=1.5, object="chat"),
        sends(json.dumps({"choices": [{"message": {"content": GOOD}}]}).encode()),
        says(GOOD, finish="eos"),
        answer_step(usage={"prompt_tokens": None, "completion_tokens": None}),
        says([{"type": "thinking", "thinking": [{"type": "text", "text": "So"}]}, {"type": "text", "text": GOOD}]),
    ],
)
def test_an_answer_is_read_whatever_else_a_server_writes(step: Step) -> None:
    with serve_script(step) as server:
        (item,) = llm_proposer(server).propose(question(), 8)
    assert item.record is not None


@pytest.mark.parametrize("counts", [(-5000, 200), (1000, -1), (True, 200)])
def test_impossible_counts_of_tokens_are_estimated(counts: tuple[int, int]) -> None:
    with serve_script(says(GOOD, usage=counts)) as server:
        request = ChatRequest((Message("system", "s" * 400), Message("user", "u" * 400)), {})
        answer = Chat(ServerWire(endpoint(server))).ask(request, PROBLEM)
    assert answer.estimated
    assert answer.tokens_in == 2 * tokens("s" * 400)
    assert answer.tokens_out == tokens(GOOD)


def test_an_error_with_status_200_is_the_error_that_it_names() -> None:
    clock = Clock()
    body = {"error": {"message": f"upstream is overloaded, key {KEY}", "code": 502}}
    with serve_script(lambda handler: reply(handler, 200, body), says(GOOD)) as server:
        assert len(llm_proposer(server, clock=clock).propose(question(), 1)) == 1
    assert clock.pauses == [1.0]
    warnings: list[str] = []
    with serve_script(
        lambda handler: reply(handler, 200, body | {"error": {"message": f"no credit for {KEY}"}})
    ) as server:
        assert llm_proposer(server, warnings).propose(question(), 1) == []
    assert warnings == [f"proposer llm: {server.url} answers: no credit for ***"]


def test_a_server_may_know_the_token_limit_by_its_new_name_only() -> None:
    with serve_script(fails(400, "Use 'max_completion_tokens' instead of 'max_tokens'."), says(GOOD)) as server:
        assert len(llm_proposer(server, max_tokens=77).propose(question(), 1)) == 1
    assert [(request.get("max_tokens"), request.get("max_completion_tokens")) for request in server.requests] == [
        (77, None),
        (None, 77),
    ]


def streams(*deltas: str, counts: tuple[int, int] = (10, 20)) -> Step:
    """An answer as a stream of chunks. The last chunk has the token counts and no choice."""
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": {"content": delta}}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    chunks.append({"choices": [], "usage": dict(zip(("prompt_tokens", "completion_tokens"), counts, strict=True))})
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return sends("".join([*events, "data: [DONE]\n\n"]).encode())


def test_a_request_suits_models_that_reason() -> None:
    with serve_script(streams(GOOD[:9], GOOD[9:])) as server:
        wire = ServerWire(endpoint(server, reasoning_effort="low", extra_body={"top_k": 20}))
        answer = Chat(wire).ask(ChatRequest((Message("system", "s"), Message("user", "u")), {}), PROBLEM)
    (request,) = server.requests
    assert (request["stream"], request["stream_options"]) == (True, {"include_usage": True})
    assert (request["max_tokens"], request["reasoning_effort"], request["top_k"]) == (32768, "low", 20)
    assert (answer.text, answer.tokens_in, answer.tokens_out, answer.estimated) == (GOOD, 10, 20, False)


def test_a_stream_may_be_longer_than_an_answer_and_not_endless() -> None:
    question = ChatRequest((Message("system", "s"), Message("user", "u")), {})
    with serve_script(streams(*["word"] * 20_000)) as server:
        assert Chat(ServerWire(endpoint(server))).ask(question, PROBLEM).text == "word" * 20_000
    with (
        serve_script(streams(*["word"] * 20_000), forever=True) as server,
        pytest.raises(Unavailable, match="longer than"),
    ):
        Chat(ServerWire(endpoint(server, max_tokens=100))).ask(question, PROBLEM)


def test_what_a_server_does_not_know_is_left_out() -> None:
    refusals = (fails(400, "Unknown parameter: 'stream_options'."), fails(400, "exceeds the context length of 16384"))
    with serve_script(*refusals, says(GOOD), says(GOOD)) as server:
        chat = Chat(ServerWire(endpoint(server)), pause=lambda _: None)
        for word in ("u", "v"):
            chat.ask(ChatRequest((Message("system", "s"), Message("user", word)), {}), PROBLEM)
    sent = [("stream" in request, request["max_tokens"]) for request in server.requests]
    assert sent == [(True, 32768), (False, 32768), (False, 8192), (False, 8192)]


def test_cost_is_tokens_times_prices() -> None:
    with serve_script(says(GOOD, usage=(2000, 300)), says(GOOD, usage=(500, 100))) as server:
        proposer = llm_proposer(server, price_in=2.5, price_out=10.0)
        proposer.propose(question(), 1)
        proposer.propose(question(problem=SMALL), 1)
    usage = proposer.usage
    assert (usage.tokens_in, usage.tokens_out) == (2500, 400)
    assert usage.cost == pytest.approx(2500 * 2.5e-6 + 400 * 10e-6)
    assert str(usage) == "2 exchanges, 2500 tokens in, 400 out, cost 0.0103"


def test_tokens_that_nobody_counted_are_guessed_and_named_so(tmp_path: Path) -> None:
    with serve_script(says(GOOD, usage=None)) as server:
        LlmProposer(Chat(ServerWire(endpoint(server)), tmp_path / "t.jsonl"), Memory()).propose(question(), 1)
    line = json.loads((tmp_path / "t.jsonl").read_text().splitlines()[0])
    assert line["estimated"] is True
    assert line["tokens_out"] == -(-len(GOOD) * 2 // 7)


def test_a_server_of_another_kind_of_key() -> None:
    with serve_script(says(GOOD)) as server:
        LlmProposer(Chat(ServerWire(replace(endpoint(server), key=""))), Memory()).propose(question(), 1)
    assert server.keys == ["Bearer none"]


def test_a_problem_has_a_share_of_the_tokens() -> None:
    with serve_script(says(GOOD), forever=True) as server:
        chat = Chat(ServerWire(endpoint(server)), problem_budget=2500)
        requests = [ChatRequest((Message("system", "s"), Message("user", str(number))), {}) for number in range(4)]
        for problem, number in ((PROBLEM, 0), (PROBLEM, 1), (SMALL, 3)):
            chat.ask(requests[number], problem)
        chat.ask(requests[2], PROBLEM)
        with pytest.raises(NotSent, match="problem_tokens") as refused:
            chat.ask(requests[3], PROBLEM)
    assert refused.value.for_good
    assert len(server.requests) == 4
