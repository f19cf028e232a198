"""Proves the proposers that learn nothing, and the arithmetic that compares proposers."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from cudal2gen.generation import catalog
from cudal2gen.kernel import Problem, revise, space
from cudal2gen.tuner import benchmark, curve
from cudal2gen.tuner.named_proposers import ProposerFactory
from cudal2gen.tuner.proposers import Mixture, Nearest, Random
from cudal2gen.tuner.training import Learning
from tests.cudal2gen.searched import SMALL, question, timed_trial
from tests.packages import require


def test_random_proposes_all_kinds() -> None:
    proposals = Random(1).propose(question(), 200)
    assert len({item.record.name for item in proposals if item.record}) > 100
    assert all(item.record and item.record.problem == SMALL for item in proposals)


def test_nearest_takes_the_nearest_first_and_never_the_asked_problem_itself() -> None:
    candidates = space.candidates(SMALL)
    nearest, farthest, same_problem = (
        revise(candidates.records[index], m=m) for index, m in ((3, 512), (40, 2048), (9, 256))
    )
    proposals = Nearest([farthest, same_problem, nearest]).propose(question(), 8)
    assert [space.decisions(item.record) for item in proposals if item.record] == [
        space.decisions(nearest),
        space.decisions(farthest),
    ]
    assert Nearest([nearest]).propose(question(trials=[timed_trial(revise(nearest, m=256), 5.0)]), 8) == []


def test_heuristics_become_legal_candidates_with_their_tiles() -> None:
    require("nvMatmulHeuristics")
    large = Problem(gpu="h200", acc="f32", layout="tn", m=4096, n=4096, k=4096)
    request = question(large)
    proposer = ProposerFactory(["heuristics"], Learning()).proposer(SMALL)
    tiles = {(item.record.bm, item.record.bn) for item in proposer.propose(request, 16) if item.record}
    assert tiles & {(128, 256), (256, 128)}
    assert proposer.propose(request, 16) == [], "it proposes what it knows once"


def test_a_mixture_shares_and_fills_up() -> None:
    neighbour = revise(space.candidates(SMALL).records[3], m=512)
    mixture = Mixture([Nearest([neighbour]), Random(0), Random(1)])
    proposals = mixture.propose(question(), 9)
    assert len(proposals) == 9
    assert [item.proposer for item in proposals].count("nearest") == 1


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="oracle: must be of cost-model, llm, nearest"):
        ProposerFactory(["random", "oracle"], Learning())


def test_regret_and_evaluations_until_close_by_hand() -> None:
    # Each record has a measured time, which includes noise, and a true time. ``selected`` has the true time of the
    # record that was measured fastest so far: 10, then 8 (measured as 7.9), and at last 9 (measured as 7).
    selected = benchmark.selected_us([10.0, 7.9, 8.5, 7.0], [10.0, 8.0, 8.4, 9.0])
    assert selected == [10.0, 8.0, 8.0, 9.0]
    assert benchmark.regret(selected, 8.0, 1) == pytest.approx(0.2)
    assert benchmark.regret(selected, 8.0, 64) == pytest.approx(1 / 9)
    assert benchmark.until_close(selected, 8.0) == math.inf, "it does not keep what it had"
    assert benchmark.until_close([10.0, 8.1, 8.0], 8.0) == 2
    assert benchmark.until_close([8.0], 8.0) == 1


def test_scores_average_seeds_and_resample_problems() -> None:
    runs = [[[10.0] * 8, [5.0] * 8], [[8.0] * 8, [8.0] * 8]]
    score = benchmark.summarise("x", [runs], [[5.0, 8.0]])
    # A regret is 1 - least / selected time. Problem one, whose least time is 5, has 1 - 5/10 and 0 with its two seeds,
    # on average 0.25. Problem two has 0. Three of the four searches find the best record.
    assert score.regret == pytest.approx((0.125,) * 4)
    assert score.bounds[0] == pytest.approx((0.0, 0.25))
    assert score.reached == 0.75
    assert score.close == 1


def test_held_out_sizes_are_nowhere_else() -> None:
    published = [record for record in catalog.load() if record.gpu == "a100" and record.acc == "f16"]
    held_out, train = benchmark.split(published, benchmark.BenchmarkPlan())
    assert (len(held_out), len(train)) == (24, 144)
    assert not {item.mnk for item in held_out} & {item.mnk for item in train}
    assert len({item.size_class for item in held_out}) >= 5


def test_a_curve_is_one_svg_without_scripts() -> None:
    picture = curve.svg(
        "a < b", "evaluations", "regret", [curve.Curve("x", [(8, 0.2), (64, 0.1)], [(0.1, 0.3), (0.0, 0.2)])]
    )
    assert picture.count("<polyline") == 1
    assert picture.count("<polygon") == 1
    assert "a &lt; b" in picture
    assert "script" not in picture
    with pytest.raises(ValueError, match="no curve has a point"):
        curve.svg("t", "x", "y", [])


# The tuner's modules, from bottom to top: each may import only those before it.
ORDER = [
    "environment", "on_gpu", "reward", "proposal", "proposers", "facts",
    "regression", "cost_model", "climbing", "recorded", "training", "named_proposers", "background_builds", "executor",
    "ray_executor", "search", "memory", "curriculum", "language_model.transcript", "language_model.completions",
    "language_model.server", "language_model.chat", "language_model.answer_text", "language_model.conversation",
    "record_answers", "record_prompt", "llm_proposer", "exports", "concurrent_searches", "campaign", "progress",
    "curve", "benchmark", "ranking", "writing.patches", "writing.kernel_answers", "writing.contract", "writing.review",
    "writing.proof", "writing.evidence", "writing.counters", "writing.modelled", "writing.exemplars",
    "writing.kernel_prompt", "writing.judging", "writing.lead", "writing.rewarding", "writing.session",
    "writing.outcome", "writing.crew", "writing.page",
]  # fmt: skip


def test_the_tuners_modules_import_strictly_downwards_and_are_all_described(checkout: Path) -> None:
    folder = checkout / "cudal2gen" / "tuner"
    described = "".join((checkout / "docs" / page).read_text() for page in ("tuner.md", "writing.md"))
    modules = {".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("*.py")}
    assert {name for name in modules if not name.endswith("__init__")} == set(ORDER)
    for index, name in enumerate(ORDER):
        assert f"`{name.rpartition('.')[2]}`" in described
        text = (folder / f"{name.replace('.', '/')}.py").read_text()
        for above in ORDER[index:]:
            package, _, module = above.rpartition(".")
            place = f"cudal2gen.tuner{'.' * bool(package)}{package}"
            assert f"from {place}.{module} import" not in text, (name, above)
            assert not re.search(rf"^from {re.escape(place)} import .*\b{module}\b", text, re.MULTILINE), (name, above)
