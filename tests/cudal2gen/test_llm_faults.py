"""Proves that a campaign ends with its result although its server is faulty, and uses the server again after it
recovers.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from cudal2gen import results
from cudal2gen.kernel import Problem, Record
from cudal2gen.results import Trial
from cudal2gen.tuner import campaign, executor, search
from cudal2gen.tuner.environment import ModelEnvironment
from cudal2gen.tuner.language_model.chat import Chat, ReplayWire
from cudal2gen.tuner.language_model.server import ServerWire
from cudal2gen.tuner.llm_proposer import LlmProposer
from cudal2gen.tuner.memory import Memory
from cudal2gen.tuner.proposers import Mixture, Random
from tests.cudal2gen.asking import PROBLEM, Clock, candidates, endpoint, incumbent
from tests.cudal2gen.chat_server import (
    Handler,
    Step,
    breaks_off,
    dribbles,
    fails,
    floods,
    hangs_up,
    limits,
    proposes,
    says,
    sends,
    serve_script,
    waits,
)
from tests.packages import require

require("openai")

CALL = {"id": "1", "type": "function", "function": {"name": "tune", "arguments": '{"stages": '}}


def rate_limit_until(handler: Handler) -> None:
    """A rate limit that ends at a date, two minutes after the answer."""
    limits(formatdate(time.time() + 120, usegmt=True))(handler)


# By what is wrong with it: an answer of the server.
FAULTS: dict[str, Step] = {
    "rate limit in seconds": limits("5"),
    "rate limit as a date": rate_limit_until,
    "server error": fails(500),
    "wrong key": fails(401),
    "no answer": waits(3),
    "half an answer": breaks_off(b'{"choices": [{"index": 0, "mess'),
    "no bytes at all": hangs_up,
    "garbage": sends(bytes(range(256)) * 9),
    "a page": sends(b"<!DOCTYPE html><html><body>Bad gateway</body></html>"),
    "no choices": sends(b'{"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": []}'),
    "other JSON": says('{"proposals": {"stages": 3}}'),
    "prose": says("I would rather write a poem."),
    "a call": says(None, tool_calls=[CALL]),
    "endless stream": dribbles(3),
    "huge body": floods(),
    "brackets": says("[" * 200_000),
    "a refusal": says(None, refusal="I will not."),
}


class Server:
    """A server's script: one fault after the other, and then proposals.

    ``faults``: those to come; the first one is every answer until ``advance``. ``raised``: those that were answered.
    ``groups``: the next raster_group to propose, so that no proposal is made twice.
    """

    def __init__(self) -> None:
        self.faults = list(FAULTS)
        self.raised: set[str] = set()
        self.groups = itertools.count(9)

    def __call__(self, handler: Handler) -> None:
        if self.faults:
            self.raised.add(self.faults[0])
            return FAULTS[self.faults[0]](handler)
        return proposes(("incumbent", {"raster_group": next(self.groups)}))(handler)

    def advance(self) -> None:
        """Goes on to the next fault if the first one was answered."""
        if self.faults and self.faults[0] in self.raised:
            self.faults.pop(0)


class PatientEnvironment(ModelEnvironment):
    """An environment that waits for the exchanges during an evaluation, so that each batch gets the next fault."""

    def evaluate(self, problem: Problem, records: Sequence[Record], effort: Any = "short") -> list[Trial]:
        for thread in threading.enumerate():
            if thread.name == "llm":
                thread.join(60)
        return super().evaluate(problem, records, effort)


def run_campaign(
    proposer: Mixture, store: Path, progress: Callable[[campaign.CampaignState], None]
) -> campaign.CampaignState:
    """Runs a campaign of one problem."""
    plan = campaign.CampaignPlan(
        [PROBLEM], lambda _: incumbent(), lambda _: proposer, store, "run",
        search.SearchLimits(evaluations=120, batch=3, prune=None), find_candidates=lambda _: candidates(),
    )  # fmt: skip
    return campaign.run(plan, executor.InProcess(PatientEnvironment(lambda _: incumbent(), seed=5)), progress)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True])
def test_a_campaign_survives_every_fault_and_uses_a_model_that_recovers(beside: bool, tmp_path: Path) -> None:
    clock, warnings, script = Clock(), list[str](), Server()
    transcript = tmp_path / "t.jsonl"

    def progress(_: campaign.CampaignState) -> None:
        clock.now += 700  # longer than any rest
        script.advance()

    with serve_script(script, forever=True) as server:
        chat = Chat(ServerWire(endpoint(server, seconds=1.5)), transcript, None, clock.pause, clock)
        proposer = Mixture([LlmProposer(chat, Memory(), in_background=beside, warn=warnings.append), Random(1)])
        standing = run_campaign(proposer, tmp_path / "trials.jsonl", progress)
    (contest,) = standing.searches
    assert script.raised == set(FAULTS)
    assert contest.stop_reason == "120 evaluations"
    assert contest.winner is not None
    assert contest.winner.effort in ("long", "final")
    assert [trial.outcome for trial in contest.evaluations] == ["measured"] * 120
    assert sum(trial.proposer == "llm" for trial in contest.evaluations) >= 3, (
        "the model is used again after its server recovers"
    )
    assert len(results.trials(tmp_path / "trials.jsonl")) == len(contest.trials)
    text = "\n".join(warnings)
    for word in ("429", "500", "401", "1.5 s", "broke off", "cannot be reached", "no chat completion", "1048576 bytes"):
        assert word in text, word
    assert "no proposal of an answer could be used" in text
    assert "the model refused: I will not." in text
    if not beside:
        replay(transcript, standing, progress)


def replay(transcript: Path, standing: campaign.CampaignState, progress: Any) -> None:
    """Repeats the campaign from its transcript, without a server or pauses, and checks that it has the same trials."""
    proposer = Mixture([LlmProposer(Chat(ReplayWire(transcript)), Memory(), warn=str), Random(1)])
    again = run_campaign(proposer, transcript.with_name("again.jsonl"), progress)
    assert [json.loads(trial.model_dump_json()) for trial in again.searches[0].trials] == [
        json.loads(trial.model_dump_json()) for trial in standing.searches[0].trials
    ]
