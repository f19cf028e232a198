"""Proves how the facts about schedules are drawn from ptxas's output, and that kernels of pairs have the pairs."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from kernelproof.sass import disassemble
from kernelproof.sass.scheduling import ANY, SchedulingFacts
from scripts import scheduling, scheduling_pairs

OLD = {
    "scoreboards": "LDG LDS", "late": "STG", "late_uniform": "",
    "latencies": {"alu": {"alu": 4, "data": 5, ANY: 3}, "uniform": {"uniform": 4, ANY: 3}},
}  # fmt: skip


def study(**distances: Counter[int]) -> scheduling.Study:
    """A study with distances from the ALU to readers by role. LDS was read without a wait."""
    found = scheduling.Study()
    found.distances.update({("alu", role): cycles for role, cycles in distances.items()})
    found.unguarded.add(("LDS", "result"))
    return found


def test_a_distance_below_a_stored_bound_replaces_it() -> None:
    found = study(alu=Counter({4: 600}), data=Counter({4: 1, 5: 900}), tensor=Counter({7: 500}))
    facts = scheduling.combine(OLD, scheduling.row(found), found)
    assert facts["latencies"] == {
        "alu": {"alu": 4, "data": 4, "tensor": 7, ANY: 3}, "uniform": {"uniform": 4, ANY: 3},
    }  # fmt: skip
    assert facts["scoreboards"] == "LDG"


def test_a_bound_needs_many_pairs() -> None:
    few = study(tensor=Counter({7: scheduling.ENOUGH - 1}))
    rare = study(tensor=Counter({7: scheduling.SUPPORT - 1, 8: scheduling.ENOUGH}))
    for found in few, rare:
        assert "tensor" not in scheduling.combine(OLD, scheduling.row(found), found)["latencies"]["alu"]


@pytest.mark.slow
def test_kernels_of_pairs_have_their_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of each reader that is rare, a sum stands right before it."""
    monkeypatch.setattr(scheduling_pairs, "RARE_DRAWS", 1)
    monkeypatch.setattr(scheduling_pairs, "DRAWS", 0)
    monkeypatch.setattr(scheduling_pairs, "PRODUCERS", {"sum": "add.s32 {r}, {x}, %y1;"})
    monkeypatch.setattr(scheduling_pairs, "MORE_PRODUCERS", {})
    scheduling_pairs.assemble("sm_100a", tmp_path)
    found = scheduling.Study()
    for function in chain.from_iterable(map(disassemble, tmp_path.glob("*.cubin"))):
        found.note_scoreboards(function)
        found.note_accesses(function, SchedulingFacts("sm_100a", *map(frozenset, (found.results, (), ())), {}))
    roles = {role for _, role in found.distances}
    assert {"constant", "mbarrier", "jump", "branch"} <= roles
