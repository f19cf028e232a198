"""Proves that transcripts of a language model replay bit for bit and state the result of each answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudal2gen.kernel import Problem, space
from cudal2gen.tuner import record_answers
from cudal2gen.tuner.language_model import chat
from cudal2gen.tuner.language_model.chat import Chat, ReplayWire
from cudal2gen.tuner.language_model.server import Endpoint, ServerWire
from cudal2gen.tuner.language_model.transcript import (
    FORMS,
    AnswerOutcome,
    ChatRequest,
    Exchange,
    History,
    Message,
    Unavailable,
    read,
)
from cudal2gen.tuner.llm_proposer import LlmProposer
from cudal2gen.tuner.memory import Memory
from kernelproof.ground.errors import MissingLibrary, WrongInput
from tests.cudal2gen.asking import (
    GOOD,
    KEY,
    PROBLEM,
    Clock,
    endpoint,
    incumbent,
    question,
    search_trials,
)
from tests.cudal2gen.chat_server import fails, limits, proposes, says, serve_script
from tests.packages import require

require("openai")


@pytest.mark.slow
def test_a_transcript_replays_bit_for_bit(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    script = (
        fails(400, "no json_schema here"),
        proposes(("incumbent", {"stages": 12, "bn": 256}), ("incumbent", {"stages": 3})),
        proposes(("incumbent", {"stages": 2}), ("incumbent", {"cluster": [2, 1]})),
        fails(503),
        proposes(("best1", {"raster_group": 4}), ("worst1", {"hint_a": "first"})),
        says("nonsense \ud83d\ude80 \u2028"),
        proposes(("best1", {"raster_axis": "n"}), ("best2", {"bk": 128, "stages": 2})),
        says(None, refusal="enough"),
        proposes(("best1", {"bn": 192, "atom_n": 192}), ("best1", {"bn": 128, "atom_n": 128})),
        proposes(("best1", {"raster_group": 2}), ("best1", {"raster_group": 1})),
        fails(401, f"key {KEY}"),
    )
    with serve_script(*script, forever=True) as server:
        wire = ServerWire(endpoint(server, price_in=1.0))
        online = LlmProposer(Chat(wire, first, pause=lambda _: None), Memory(), warn=str)
        before = search_trials(online)
        assert server.requests[1]["response_format"] == {"type": "json_object"}
    replayed = LlmProposer(Chat(ReplayWire(first), second), Memory(), warn=str)
    after = search_trials(replayed)
    assert [trial.model_dump_json() for trial in after] == [trial.model_dump_json() for trial in before]
    assert len([trial for trial in before if trial.measured]) > 8
    assert first.read_bytes() == second.read_bytes()
    assert replayed.usage == online.usage
    assert KEY not in first.read_text()
    exchanges = [line for line in read(first) if isinstance(line, Exchange) and line.messages]
    assert len(exchanges) == len(server.requests)


def test_rests_are_replayed_without_a_clock(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    clock = Clock()
    with serve_script(limits("600"), says(GOOD)) as server:
        proposer = LlmProposer(Chat(ServerWire(endpoint(server)), path, None, clock.pause, clock), Memory(), warn=str)
        online = []
        for seconds in (0, 1, 1, 598):
            clock.now += seconds
            online.append(proposer.propose(question(), 8))
    replayed = LlmProposer(Chat(ReplayWire(path)), Memory(), warn=str)
    assert [replayed.propose(question(), 8) for _ in range(4)] == online
    assert [len(proposals) for proposals in online] == [0, 0, 0, 1]
    assert replayed.usage == proposer.usage


@pytest.mark.slow
def test_a_transcript_says_what_became_of_answers(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with serve_script(
        proposes(("incumbent", {"stages": 12, "bn": 256}), ("incumbent", {"stages": 3})), says("nonsense")
    ) as server:
        LlmProposer(Chat(ServerWire(endpoint(server)), path), Memory()).propose(question(), 2)
    lines = list(read(path))
    assert [line.kind for line in lines] == ["exchange", "outcome"] * 2
    for exchange, outcome in zip(lines[::2], lines[1::2], strict=True):
        assert isinstance(exchange, Exchange)
        assert isinstance(outcome, AnswerOutcome)
        assert outcome.exchange == exchange.key
        assert (Problem.model_validate(outcome.problem), outcome.stage) == (PROBLEM, "hgemm")
    first, second = lines[1::2]
    assert isinstance(first, AnswerOutcome)
    assert isinstance(second, AnswerOutcome)
    assert first.proposals[0] == space.decisions(incumbent()) | {"stages": 3}
    assert first.proposals[1]["stages"] == 12
    assert "violation" in first.proposals[1]
    assert second.proposals == ()
    assert second.fault.startswith("the answer is not the JSON object")


def test_a_replay_makes_nothing_up(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with serve_script(says(GOOD)) as server:
        LlmProposer(Chat(ServerWire(endpoint(server)), path), Memory()).propose(question(), 1)
    wire = ReplayWire(path)
    line = json.loads(path.read_text().splitlines()[0])
    request = ChatRequest(
        tuple(Message(*message) for message in line["messages"]), record_answers.schema(("sm90_wgmma",))
    )
    assert wire.send(request, "schema", PROBLEM).text == GOOD
    with pytest.raises(Unavailable, match="or no further one"):
        wire.send(request, "schema", PROBLEM)
    with pytest.raises(Unavailable, match="has no answer to this question on 4096_4096_4096"):
        ReplayWire(path).send(request, "text", PROBLEM)
    content = path.read_bytes()
    path.write_bytes(content + content[:99])
    assert ReplayWire(path).send(request, "schema", PROBLEM).text == GOOD, (
        "the half line that a killed process left is ignored"
    )
    path.write_bytes(content + b"{}\n")
    with pytest.raises(ValueError, match=r"t\.jsonl:3: "):
        ReplayWire(path)


def test_connecting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs --llm NAME@URL"):
        chat.connect(None)
    with pytest.raises(WrongInput, match=r"cannot read .*none.jsonl: No such file"):
        chat.connect(None, replay=tmp_path / "none.jsonl")
    monkeypatch.setenv("CUDAL2GEN_LLM_KEY", "abc")
    endpoint_found = Endpoint.from_environment("http://127.0.0.1:1/v1", "some", seconds=3.0)
    assert (endpoint_found.key, endpoint_found.seconds) == ("abc", 3.0)
    assert chat.connect(endpoint_found, tmp_path / "t.jsonl").wire.live
    monkeypatch.setitem(__import__("sys").modules, "openai", None)
    with pytest.raises(MissingLibrary, match=r"\[llm\]"):
        chat.connect(endpoint_found)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=6))
def test_a_history_adds_up_what_exchanges_state_and_nothing_else(lines: list[tuple[str, int, int, bool]]) -> None:
    """An exchange of which a line states no tokens, such as one that was refused, has none."""
    history = History()
    for problem, tokens_in, tokens_out, refused in lines:
        stated = {"error": "refused"} if refused else {"tokens_in": tokens_in, "tokens_out": tokens_out, "cost": 0.5}
        history.count(Exchange(run="r", digest="d", problem=problem, form=FORMS[0], **stated))
    answered = [line for line in lines if not line[3]]
    usage = history.usage
    assert (usage.exchanges, usage.failed, usage.cost) == (len(lines), len(lines) - len(answered), 0.5 * len(answered))
    assert (usage.tokens_in, usage.tokens_out) == (sum(line[1] for line in answered), sum(line[2] for line in answered))
    for problem in "ab":
        assert history.spent[problem] == sum(line[1] + line[2] for line in answered if line[0] == problem)


def test_a_proposer_says_why_the_last_question_got_no_answer() -> None:
    proposer = object.__new__(LlmProposer)
    proposer._chat = Chat(object())  # type: ignore[arg-type]
    assert proposer.failure == ""
    proposer._chat.failure = Unavailable("the server is asleep")
    assert proposer.failure == "the server is asleep"
