"""Proves that ``fit`` finds a legal record near an edit, with the values that the user named."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudal2gen.generation import catalog
from cudal2gen.kernel import (
    FAMILIES,
    Fields,
    Fit,
    IllegalRecord,
    IllegalValue,
    Problem,
    Record,
    fit,
    fitting,
    parse,
)
from cudal2gen.kernel.fieldset import fieldset
from cudal2gen.kernel.suggestions import unknown_field
from tests.cudal2gen import strategies
from tests.cudal2gen.strategies import direct, multistage, single_shot, wgmma
from tests.draws import THOROUGH

DRAWS = 200 if THOROUGH else 50
SECONDS = 1.0  # the processor time that one fit may take; typical fits take a tenth of it


def record_of(gpu: str, mnk: tuple[int, int, int], acc: str = "f16") -> Record:
    """The catalog's record for a problem of layout tn."""
    m, n, k = mnk
    fields = {"gpu": gpu, "acc": acc, "layout": "tn", "m": m, "n": n, "k": k}
    return catalog.find(Problem.model_validate(fields)).record


def flat(record: Record) -> Fields:
    """A record's fields by flat names such as ``tile.m``."""
    return fieldset(type(record)).flat(record.model_dump(mode="json"))


def with_values(record: Record, values: Fields) -> Record:
    """The record with these values of its flat fields, legal or not."""
    return fieldset(type(record)).record(record.problem, record.origin, flat(record) | values)


def check_fit(record: Record, named: Fields, answer: Fit) -> None:
    """Checks what holds for every fit."""
    assert parse(answer.record.model_dump(mode="json")) == answer.record, "legal"
    assert (answer.record.problem, answer.record.family) == (record.problem, record.family)
    before, after = flat(record) | named, flat(answer.record)
    assert {name: after[name] for name in named} == named
    moved = {difference.field: (difference.before, difference.after) for difference in answer.differences}
    assert moved == {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert (not moved) == (not with_values(record, named).broken_rules()), "a legal record is not changed"
    for difference in answer.differences:
        less = with_values(answer.record, {difference.field: difference.before})
        assert less.broken_rules() or less.spill_remarks, f"{difference} is not needed"
        assert difference.reason


# Edits of a Hopper record.
HOPPER = [
    *({"bn": bn} for bn in (192, 160, 96, 64)),
    *({"bm": bm} for bm in (64, 48, 16)),
    {"split_k": 2},
    {"consumers": 1},
    {"consumers": 3},
    {"bk": 128},
    *({"stages": stages} for stages in (8, 10, 12, 16)),
    {"schedule": "pingpong"},
    {"reduce": "cluster"},
    {"bm": 48, "bn": 192},
]
# Edits of an Ampere record.
AMPERE = [
    *({"bm": bm} for bm in (16, 48, 64, 96, 160, 256)),
    *({"bn": bn} for bn in (48, 64, 96, 160, 192)),
    *({"bk": bk} for bk in (16, 64, 128)),
    *({"stages": stages} for stages in (1, 2, 5, 8)),
    *({"mma_repeat": warps} for warps in ([1, 1, 1], [4, 2, 1], [2, 4, 1], [3, 1, 1])),
    *({"epilogue": epilogue} for epilogue in ("staged", "direct", "global")),
    {"prefetch.kind": "multi"},
    {"unroll_k": True},
    {"split_k": 2},
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("gpu", "mnk", "named"),
    [
        *(("h200", (4096, 4096, 4096), named) for named in HOPPER),
        *(("a100", (4096, 4096, 4096), named) for named in AMPERE),
        *((gpu, (512, 4096, 4096), {"bm": 96}) for gpu in ("h200", "a100")),
    ],
    ids=str,
)
def test_what_a_user_tries_is_fitted(gpu: str, mnk: tuple[int, int, int], named: Fields) -> None:
    record = record_of(gpu, mnk)
    started = time.process_time()
    answer = fit(record, named)
    assert time.process_time() - started < SECONDS
    check_fit(record, named, answer)


def test_differences_by_hand() -> None:
    ring = fit(wgmma(), {"stages": 8}).differences
    assert [str(difference) for difference in fit(multistage(stages=3), {"bm": 96}).differences] == [
        "padding none -> predicate: bm=96: does not divide m=4096; padding must be predicate or pad for such a tile"
    ]
    assert "stages=8: " in ring[0].reason
    assert "bytes of shared memory exceed" in ring[0].reason
    (stages,) = fit(multistage(stages=5), {"bk": 128}).differences
    assert stages.setting == "stages=2"
    assert stages.reason == "327680 bytes of shared memory exceed the 166912 of a100"


def test_a_fit_for_another_problem() -> None:
    problem = multistage().problem.revised(m=4000)
    answer = fit(multistage(), {}, problem)
    assert answer.record.problem == problem
    assert [difference.setting for difference in answer.differences] == ["padding=predicate"]


def test_a_fit_avoids_what_is_likely_to_spill() -> None:
    """304 rows need one row of warps or 19. With one row and four columns of warps a thread has enough registers."""
    answer = fit(multistage(bm=128, bn=128, stages=2), {"bm": 304})
    assert flat(answer.record)["mma_repeat"] == [1, 4, 1]
    assert not answer.record.spill_remarks


@pytest.mark.parametrize(
    ("record", "named"),
    [
        (multistage(), {"bm": 1000}),
        (multistage(), {"epilogue": "tma"}),
        (wgmma(), {"bk": 96}),
        (wgmma(), {"zebra": 1}),
        (wgmma(), {"prefetch.kind": "multi"}),
    ],
)
def test_a_value_that_its_field_never_takes_is_refused_at_once(record: Record, named: Fields) -> None:
    with pytest.raises(IllegalValue) as refusal:
        fit(record, named)
    assert str(refusal.value).startswith(next(iter(named)))


def test_what_the_rules_leave_no_room_for_is_refused() -> None:
    with pytest.raises(IllegalRecord, match="no legal sm80_multistage record with bk=16"):
        fit(multistage(), {"bk": 16, "prefetch.distance": 3})


def legal_neighbour(record: Record, records: list[Record], rng: random.Random) -> Record | None:
    """A legal record of the same problem and family: a candidate, or another record's decisions."""
    candidates = list(type(record).candidates(record.problem))
    line = record.model_dump(mode="json")
    for _ in range(200):
        try:
            if candidates and rng.random() < 0.5:
                return parse(line | rng.choice(candidates))
            other = rng.choice(records)
            if (other.family, other.acc) == (record.family, record.acc):
                return other.at(record.problem)
        except IllegalRecord:
            continue
    return None


def draw_illegal_edits(count: int) -> list[tuple[Record, Fields]]:
    """Records of the catalog, each with one or two values of another legal record, which may break a rule."""
    rng, records = random.Random(20), catalog.load()
    illegal: list[tuple[Record, Fields]] = []
    while len(illegal) < count:
        record = rng.choice(records)
        if (target := legal_neighbour(record, records, rng)) is None:
            continue
        before, after = flat(record), flat(target)
        differing = [name for name in before if before[name] != after[name]]
        names = rng.sample(differing, min(len(differing), rng.choice((1, 2))))
        named = {name: after[name] for name in names}
        # Half of such edits are legal already. A fit is needed for the other half.
        if with_values(record, named).broken_rules():
            illegal.append((record, named))
    return illegal


@pytest.mark.slow
def test_nearly_all_drawn_edits_are_fitted() -> None:
    missed, seconds = [], []
    for record, named in draw_illegal_edits(DRAWS):
        started = time.process_time()
        try:
            answer = fit(record, named)
        except IllegalRecord as error:
            missed.append(f"{record.gpu} {record.acc} {record.mnk}: {error}")
        else:
            check_fit(record, named, answer)
        seconds.append(time.process_time() - started)
    print(*missed, sep="\n")
    assert len(missed) <= DRAWS // 20, missed
    assert sorted(seconds)[DRAWS // 2] < SECONDS / 2


@st.composite
def edits(draw: st.DrawFn) -> tuple[Record, Fields]:
    """A legal record of any family, and one or two values that the fields' types allow."""
    record: Record = draw(
        st.one_of(
            strategies.multistage_records(),
            st.sampled_from([direct(), wgmma(), wgmma(acc="f16"), single_shot(), record_of("h200", (64, 4096, 4096))]),
        )
    )
    values = fieldset(type(record)).values
    names = draw(
        st.lists(st.sampled_from([name for name in values if values[name]]), min_size=1, max_size=2, unique=True)
    )
    named: dict[str, Any] = {name: draw(st.sampled_from(values[name])) for name in names}
    return record, named


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(edits())
def test_whatever_is_returned_is_legal_named_and_needed(edit: tuple[Record, Fields]) -> None:
    record, named = edit
    try:
        answer = fit(record, named)
    except IllegalRecord:
        assert with_values(record, named).broken_rules()
    else:
        check_fit(record, named, answer)


def test_values_of_every_listed_field_pass_its_type() -> None:
    for record in (multistage(), direct(), wgmma(), single_shot()):
        own, start = fieldset(type(record)), flat(record)
        for name, values in own.values.items():
            for value in values:
                try:
                    parse(record.model_dump(mode="json") | own.nested(start | {name: value}))
                except IllegalValue as error:
                    pytest.fail(f"{name}={value}: {error}")
                except IllegalRecord:
                    continue


def test_fields_that_follow_exist() -> None:
    for family in FAMILIES.values():
        assert set(fieldset(family).values) >= family.FOLLOWING


def test_suggestions() -> None:
    assert unknown_field(type(wgmma()), "clusters", "h200").endswith("did you mean cluster?")
    assert unknown_field(type(wgmma()), "workspace", "h200").endswith("did you mean reduce=workspace?")


@given(st.sets(st.sampled_from(("prefetch", "prefetch.kind", "prefetch.distance", "bm", "kind"))))
def test_a_part_of_a_field_is_named_with_the_field(named: set[str]) -> None:
    search: Any = SimpleNamespace(named=named)
    for name in ("bm", "prefetch", "prefetch.kind", "prefetch.distance"):
        whole = name.split(".")[0]
        assert fitting._Search.is_named(search, name) == (bool(named & {name, whole})), name
