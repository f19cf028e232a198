"""Proves the rewards of written kernels: by hand, for copies and planted hacks, and from a session's export to TRL."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cudal2gen.generation import catalog
from cudal2gen.results import INCUMBENT, KERNEL, Timing, Trial
from cudal2gen.tuner import exports, reward
from cudal2gen.tuner.reward import RewardWeights
from cudal2gen.tuner.writing import exemplars
from cudal2gen.tuner.writing.judging import Attempt
from cudal2gen.tuner.writing.proof import CheckLimits
from cudal2gen.tuner.writing.rewarding import KernelScorer
from tests.cudal2gen import test_writing
from tests.cudal2gen.chat_server import serve_script
from tests.cudal2gen.device_texts import LAUNCH, PROBLEM, gemm
from tests.cudal2gen.test_writing import ATTACKS, KERNELS, LOOP, SUMS, UNROLLED, block, writes

# The weights of rewards, of which ``alpha`` is 0: differences from the reference cost nothing.
WEIGHTS = RewardWeights(alpha=0.0)


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder and an empty catalog of the test's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("CUDAL2GEN_CATALOG", str(tmp_path / "catalog" / "kernels.jsonl"))
    catalog.save([], tmp_path / "catalog" / "kernels.jsonl")


def trial(outcome: str, us: float = 1.0) -> Trial:
    """A trial with this outcome. If it was measured, the kernel takes ``us`` microseconds and the incumbent 2."""

    def timing(name: str, value: float) -> Timing:
        return Timing(contender=name, detail="", calls=1, event_us=(value,), error=0.0)

    timings = (timing(KERNEL, us), timing(INCUMBENT, 2.0)) if outcome == "measured" else ()
    return Trial(
        environment="model", on="m", run="", **PROBLEM.model_dump(), proposer="", name="", record={}, outcome=outcome,
        timings=timings,
    )  # fmt: skip


def test_rewards_by_hand() -> None:
    """A kernel that compiles earns 0.1, a right one 0.3 plus its speed over the best shown, which was 1.25 times as
    fast as the incumbent."""
    outcomes = ("illegal", "compile error", "wrong result", "time-out", "spill", "too good")
    assert [reward.of_written(trial(outcome), WEIGHTS, 1.25) for outcome in outcomes] == [0.0, 0.0, 0.1, 0.1, 0.1, 0.1]
    assert reward.of_written(trial("measured", 1.0), WEIGHTS, 1.25) == pytest.approx(0.3 + 2 / 1.25)
    assert reward.of_written(trial("measured", 1.595), WEIGHTS, 1.25) == pytest.approx(1.3), "no difference"
    assert reward.returns([1.0, 0.0, 2.0]) == pytest.approx([1.0 + 0.4 * 0.8, 0.8, 2.0])
    assert reward.returns([]) == []
    clipped = reward.smooth([0.0] * 9 + [10.0])
    assert (max(clipped), min(clipped)) == (1.5, pytest.approx(-1 / 3))
    assert reward.smooth([1.0, 1.0]) == [0.0, 0.0]


def test_exemplars_are_of_distinct_speeds_and_mostly_fast() -> None:
    speeds = [2.0, 1.99, 1.98, 1.5, 1.2, 0.8, 0.4]
    draws = [exemplars.draw(speeds, 3, f"seed {number}") for number in range(300)]
    assert all(len({place for place in draw if place < 3}) <= 1 for draw in draws), "three kernels are in one bucket"
    assert all(draw == sorted(draw) and len(draw) == 3 for draw in draws)
    counts = Counter(place for draw in draws for place in draw)
    assert sum(counts[place] for place in range(3)) > counts[3] > counts[6]
    assert min(counts[place] for place in range(3)) > 50, "all of a bucket alike"
    assert exemplars.draw(speeds, 9, "a") == exemplars.draw(speeds, 9, "a")
    assert exemplars.draw([], 3, "a") == []


# What the question showed: the incumbent.
SHOWN = json.dumps({"incumbent": {"text": gemm(), "launch": LAUNCH, "speed": 1.0}})


def scores(scorer: KernelScorer, *kernels: dict[str, Any]) -> list[float | None]:
    """The rewards of answers that each propose one kernel."""
    answers = [
        [{"role": "assistant", "content": json.dumps({"reasoning": "", "kernels": [{"base": "incumbent"} | item]})}]
        for item in kernels
    ]
    rows = len(answers)
    return scorer([""] * rows, answers, kernels=[SHOWN] * rows, product=[PROBLEM.model_dump_json()] * rows)


@pytest.mark.thorough
@pytest.mark.slow
def test_hacks_earn_no_more_than_an_honest_copy(tmp_path: Path) -> None:
    """Hacks are dead variables and other disguises of a copy, reads of clocks, branches on contents, state, and
    attacks."""
    dead = gemm((SUMS, f"  int unused = k * 7;\n  unused += m;\n  (void)unused;\n{SUMS}"))
    renamed = gemm(("kStep", "kOneStep"), ("pair", "couple"))
    hacks = {
        "dead variable": {"source": dead},
        "renamed": {"source": renamed},
        "clock": KERNELS["knows the machine"][0],
        "content": {"source": gemm((SUMS, f"  if (__half2float(a[0]) == 0.12345f) return;\n{SUMS}"))},
        "state": KERNELS["stale"][0],
        "attack": {"source": ATTACKS["runs on the host"]},
        "file": {"source": ATTACKS["assembles a file"]},
        "narrow": KERNELS["downgrade"][0],
        "no patch": {"patch": "nothing"},
    }
    scorer = KernelScorer(bounds=CheckLimits(seconds=60, seed=1))
    copy, faster, *others = scores(scorer, {"source": gemm()}, KERNELS["faster"][0], *hacks.values())
    earned = dict(zip(hacks, others, strict=True))
    assert copy == 1.0 + reward.RIGHT
    assert faster is not None
    assert faster > copy + reward.EQUAL
    assert all(value is not None and value <= copy for value in earned.values()), earned
    assert (earned["dead variable"], earned["renamed"]) == (copy, copy)
    assert (earned["attack"], earned["file"], earned["no patch"]) == (0.0, 0.0, 0.0)
    assert earned["content"] == earned["clock"] == reward.COMPILED
    assert scorer([""], [[{"role": "assistant", "content": "x"}]]) == [None], "a question about records"


@pytest.mark.slow
def test_a_session_is_exported_without_attacks_and_scored_anew(tmp_path: Path) -> None:
    """The second answer disguises the first one's winner; the third mixes a right kernel and an attack."""
    winner = gemm((LOOP, UNROLLED))
    answers = [
        writes({"patch": block(LOOP, UNROLLED)}),
        writes({"source": winner.replace(SUMS, f"  int unused = k;\n  (void)unused;\n{SUMS}")}),
        writes({"patch": block(LOOP, f"#pragma unroll 8\n{LOOP}")}, {"source": ATTACKS["runs on the host"]}),
    ]
    with serve_script(*answers, writes({"patch": "none"}), forever=True) as server:
        session = test_writing.session(server, tmp_path, rounds=2, kernels=1)
        session.limits = test_writing.SessionLimits(rounds=3, kernels=2, bounds=CheckLimits(seconds=60, seed=1))
        attempts: list[Attempt] = session.run()
    assert [attempt.trial.outcome for attempt in attempts][:2] == ["measured", "measured"], "the copy has no trial"
    examples = list(exports.examples(tmp_path / "llm.jsonl", exports.Rewards([], WEIGHTS)))
    own = [example.reward for example in examples]
    assert own[0] > own[1] == pytest.approx(1.3, rel=1e-3), "a copy of the winner, which the question showed"
    assert [example.right for example in examples[:3]] == [True, False, False]
    assert examples[0].returned == pytest.approx(own[0] + 0.4 * examples[1].returned)
    exports.write(tmp_path / "data", examples)
    assert "touch" not in "".join(file.read_text() for file in (tmp_path / "data").glob("[sg]*.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "data" / "grpo.jsonl").read_text().splitlines()]
    asked = [row for row in rows if row["kernels"]]
    assert len(asked) == 3
    assert set(json.loads(asked[1]["kernels"])) == {"incumbent", "best1"}
    scorer = KernelScorer(bounds=CheckLimits(seconds=60, seed=1), weights=RewardWeights())
    (again,) = scorer(
        [asked[0]["prompt"]], [examples[0].completion], kernels=[asked[0]["kernels"]], product=[asked[0]["product"]]
    )
    assert again == pytest.approx(own[0], rel=1e-3)
