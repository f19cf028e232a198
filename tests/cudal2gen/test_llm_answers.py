"""Proves which answers of a language model become records.

Answers that break a rule go back to the model with the rule.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from cudal2gen.kernel import space
from cudal2gen.tuner import record_answers
from tests.cudal2gen.asking import (
    GOOD,
    KEY,
    document,
    incumbent,
    llm_proposer,
    measure_trials,
    question,
)
from tests.cudal2gen.chat_server import (
    proposes,
    says,
    serve_script,
)  # fmt: skip
from tests.packages import require

require("openai")


def test_changes_become_records_that_the_rules_let_pass() -> None:
    with serve_script(
        proposes(("incumbent", {"stages": 3}), ("incumbent", {"cluster": [2, 1], "hint_b": "last"}))
    ) as server:
        proposer = llm_proposer(server)
        first, second = proposer.propose(question(), 8)
    assert first.record is not None
    assert second.record is not None
    assert space.differing(incumbent(), first.record) == {"stages": (4, 3)}
    assert space.differing(incumbent(), second.record) == {"cluster": ([1, 1], [2, 1]), "hint_b": ("normal", "last")}
    assert (first.proposer, first.note, first.violation) == ("llm", "idea 1", "")
    assert first.record.origin.model_dump() == {"source": "llm", "structure": "tuned", "changed": ()}
    assert server.keys == [f"Bearer {KEY}"]
    (request,) = server.requests
    assert request["response_format"]["type"] == "json_schema"
    assert request["response_format"]["json_schema"]["schema"] == record_answers.schema(
        ("sm90_small", "sm90_wgmma")[1:]
    )
    assert (request["model"], request["max_tokens"], "temperature" in request) == ("scripted", 32768, False)


def test_what_breaks_a_rule_moves_other_fields_and_keeps_the_models() -> None:
    with serve_script(proposes(("incumbent", {"stages": 6}))) as server:
        (item,) = llm_proposer(server).propose(question(), 1)
    assert len(server.requests) == 1, "other fields are moved without another exchange"
    assert item.record is not None
    assert item.record.ring_steps == 6
    moved = space.differing(incumbent(), item.record).keys() - {"stages"}
    assert moved
    for name in moved:
        assert f"; {name} " in item.note
    assert item.record.origin.structure == "tuned"


def test_what_breaks_a_rule_is_returned_with_the_rule_and_corrected() -> None:
    with serve_script(
        proposes(("incumbent", {"stages": 12, "bn": 256}), ("incumbent", {"stages": 3})),
        proposes(("incumbent", {"stages": 2})),
    ) as server:
        proposals = llm_proposer(server).propose(question(), 8)
    assert [item.record and item.record.stages for item in proposals] == [3, 2]  # type: ignore[union-attr]
    messages = server.requests[1]["messages"]
    assert [item["role"] for item in messages] == ["system", "user", "assistant", "user"]
    (refusal,) = json.loads(messages[3]["content"].splitlines()[0])["refused"]
    assert refusal.startswith('incumbent with {"stages": 12, "bn": 256}: stages=12: ')
    assert "bytes of shared memory exceed the 232448 of h200" in refusal


@pytest.mark.slow
def test_what_stays_illegal_is_asked_for_three_times_and_then_is_a_failure() -> None:
    with serve_script(proposes(("incumbent", {"stages": 12, "bn": 256})), forever=True) as server:
        warnings: list[str] = []
        proposer = llm_proposer(server, warnings)
        (item,) = proposer.propose(question(), 8)
        assert len(server.requests) == 3
        assert proposer.usage.exchanges == 3
        proposer.propose(question(), 8)
        assert proposer.propose(question(), 8) == []
        assert len(server.requests) == 6, "a problem is left out after two answers without a record"
    assert item.record is None
    assert item.violation.startswith("stages=12: ")
    assert item.fields == space.decisions(incumbent()) | {"stages": 12, "bn": 256}
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"m": 1}, "m: is part of the question"),
        ({"family": "sm90_small"}, "family: is part of the question"),
        ({"origin": {}}, "origin: is part of the question"),
        ({"record": 1, "self": 2}, "record: sm90_wgmma has no such field; self: sm90_wgmma has no such field"),
        ({"k_chunks": 2}, "k_chunks: sm90_wgmma has no such field"),
        ({"stages": "3"}, 'stages="3": input should be a valid integer'),
        ({"stages": 3.5}, "stages=3.5: input should be a valid integer"),
        ({"schedule": "; rm -rf /"}, 'schedule="; rm -rf /": input should be'),
        ({"cluster": [[[[[]]]]]}, "cluster.0=[[[[]]]]: input should be 1, 2 or 4"),
    ],
)
def test_nothing_but_the_fields_of_a_record_can_be_changed(changes: dict[str, Any], rule: str) -> None:
    with serve_script(proposes(("incumbent", changes)), forever=True) as server:
        (item,) = llm_proposer(server).propose(question(), 1)
    assert item.record is None
    assert rule in item.violation


@pytest.mark.parametrize(
    "value",
    [
        "\\ud800",
        "9" * 3000,
        "[" * 40 + "]" * 40,
        "[" * 900 + "]" * 900,
        "NaN",
        "1e999",
        '"' + "x" * 3000 + '"',
        "-Infinity",
    ],
)
def test_what_could_not_be_stored_is_no_proposal(value: str) -> None:
    value = f'"{value}"' if value.startswith("\\") else value
    # A legal idea follows the one with this value.
    ideas = '{"base": "incumbent", "changes": {"stages": %s}}, {"base": "incumbent", "changes": {"stages": 3}}'
    with serve_script(says('{"proposals": [%s]}' % (ideas % value))) as server:
        (item,) = llm_proposer(server).propose(question(), 8)
    assert item.record is not None


def test_repetitions_are_left_out_by_what_is_launched() -> None:
    (trial,) = measure_trials({"stages": 3})
    unchanged = {"hint_a": "normal"}
    ideas = [
        ("incumbent", {"stages": 3}),
        ("incumbent", unchanged),
        ("incumbent", {"stages": 2}),
        ("best1", {"stages": 2}),
    ]
    with serve_script(proposes(*ideas)) as server:
        proposals = llm_proposer(server).propose(question((trial,)), 8)
    assert [item.record and item.record.stages for item in proposals] == [2]  # type: ignore[union-attr]
    assert len(server.requests) == 1, "for one repetition among good proposals, the model is not asked again"


def test_what_was_proposed_and_is_no_trial_is_shown_and_not_proposed_again() -> None:
    answers = [("incumbent", {"stages": 3}), ("incumbent", {"stages": 2}), ("incumbent", {"raster_group": 2})]
    with serve_script(
        proposes(*answers[:2]), proposes(*answers), proposes(("incumbent", {"raster_group": 4}))
    ) as server:
        proposer = llm_proposer(server)
        assert len(proposer.propose(question(), 8)) == 2
        (item,) = proposer.propose(question(), 8)
        assert item.record is not None
        assert space.differing(incumbent(), item.record) == {"raster_group": (8, 2)}
        proposer.propose(question(measure_trials({"stages": 3}, {"stages": 2}, {"raster_group": 2})), 1)
    waiting = [document(request)["proposed, not measured yet"] for request in server.requests[:3]]
    differs = "differs from incumbent in"
    assert waiting[:2] == [[], [{differs: {"stages": 3}}, {differs: {"stages": 2}}]]
    assert waiting[2] == []


def test_nothing_but_repetitions_is_worth_asking_again() -> None:
    with serve_script(proposes(("incumbent", {})), proposes(("incumbent", {"stages": 2}))) as server:
        (item,) = llm_proposer(server).propose(question(), 1)
    assert item.record is not None
    assert "was tried or proposed already" in server.requests[1]["messages"][3]["content"]


def test_no_more_than_asked_for() -> None:
    ideas = [("incumbent", {"stages": stages, "raster_group": group}) for group in range(1, 60) for stages in (2, 3, 4)]
    with serve_script(proposes(*ideas)) as server:
        assert len(llm_proposer(server).propose(question(), 5)) == 5


@pytest.mark.parametrize(
    "text",
    [
        f"Sure! Here you are:\n```json\n{GOOD}\n```\nGood luck.",
        f"<think>{{hm}} {{}}</think> {GOOD}",
        GOOD[:-2] + ', {"base": 7}, "no", {"base": "incumbent", "changes": []}]}',
        GOOD[:-2] + ', {"base": "nobody", "changes": {}}]}',
    ],
)
def test_good_proposals_are_found_among_nonsense(text: str) -> None:
    with serve_script(says(text)) as server:
        (item,) = llm_proposer(server).propose(question(), 8)
    assert item.record is not None
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "text",
    ["", "no idea", "{", "[1]", '{"proposals": 3}', "[" * 100_000, '{"proposals":' * 3000, "9" * 10_000, "{" * 50],
)
def test_an_answer_that_is_no_json_is_told_so_and_asked_for_again(text: str) -> None:
    with serve_script(says(text), says(GOOD)) as server:
        (item,) = llm_proposer(server).propose(question(), 8)
    assert item.record is not None
    assert "not the JSON object asked for" in server.requests[1]["messages"][3]["content"]


def test_nonsense_for_ever_costs_three_exchanges_and_is_said_once() -> None:
    warnings: list[str] = []
    with serve_script(says("no idea"), forever=True) as server:
        assert llm_proposer(server, warnings).propose(question(), 8) == []
        assert len(server.requests) == 3
    (line,) = warnings
    assert line.startswith("proposer llm: no proposal of an answer could be used: the answer is not the JSON object")


def test_an_answer_that_was_cut_off_is_asked_for_shorter() -> None:
    with serve_script(says(GOOD[:30], finish="length"), says(GOOD)) as server:
        assert len(llm_proposer(server).propose(question(), 8)) == 1
    assert "cut off before its end" in server.requests[1]["messages"][3]["content"]


@pytest.mark.parametrize("step", [says(None, refusal="I will not"), says("", finish="content_filter")])
def test_a_refusal_is_said_and_not_argued_with(step: Any) -> None:
    warnings: list[str] = []
    with serve_script(step) as server:
        assert llm_proposer(server, warnings).propose(question(), 8) == []
    assert len(warnings) == 1
    assert warnings[0].startswith("proposer llm: the model refused: ")


@pytest.mark.parametrize(
    "step",
    [
        lambda: says(None, reasoning_content=f"First a draft, {{}}. So: {GOOD}"),
        lambda: says(f'<think>{{"proposals": []}} no, better: </think>{GOOD}'),
        lambda: says(f'A draft {{"proposals": []}}, and the answer {GOOD}'),
        lambda: says(None, tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": GOOD}}]),
    ],
)
def test_answers_of_models_that_reason_or_call(step: Any) -> None:
    with serve_script(step()) as server:
        (item,) = llm_proposer(server).propose(question(), 8)
    assert item.record is not None
    assert item.record.stages == 3


def test_an_answer_that_was_cut_off_while_reasoning_is_asked_for_shorter_reasoning() -> None:
    with serve_script(says(None, finish="length", reasoning_content="on and on"), says(GOOD)) as server:
        assert len(llm_proposer(server).propose(question(), 8)) == 1
    assert "cut off while reasoning" in server.requests[1]["messages"][3]["content"]
