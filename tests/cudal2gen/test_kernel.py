"""Proves that records survive writing and reading, which are legal, and the facts that derive from them."""

from __future__ import annotations

import json
import re
from itertools import product
from typing import Literal

import pytest
from hypothesis import given
from pydantic import BaseModel, create_model

from cudal2gen.generation import catalog, compiler
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import (
    FAMILIES,
    GPUS,
    IllegalRecord,
    Origin,
    Prefetch,
    Problem,
    Record,
    Sm80Multistage,
    parse,
    revise,
)
from kernelproof.ground import toolchain
from tests.cudal2gen.strategies import (
    DIRECT,
    MULTISTAGE,
    SINGLE_SHOT,
    STAGED_16,
    STRAIGHT,
    TENSOR,
    TO_GLOBAL,
    WARPS,
    WGMMA,
    direct,
    multistage,
    multistage_records,
    prefetch,
    records,
    single_shot,
    tcgen05,
    warp_mma,
    wgmma,
)


@given(records)
def test_a_record_survives_the_round_trip_through_json(record: Record) -> None:
    line = record.model_dump_json()
    assert parse(line) == record
    holders = (record, record.problem)
    neutral = {name for it in holders for name, value in it.NEUTRAL.items() if getattr(it, name) == value}
    assert set(json.loads(line)) == set(type(record).line_fields()) - neutral, "every other field is written out"


# The field that the message names, the changes that make a record illegal, and the rule that the message states (a
# pattern).
ILLEGAL = [
    ("bm", {"bm": 100}, "multiple of 16\\*mma_repeat"),
    ("bn", {"bn": 48}, "multiple of 16\\*mma_repeat"),
    ("bm", {"bm": 96}, "does not divide m=4096"),
    ("bn", {"bn": 96}, "does not divide n=4096"),
    ("bk", {"bk": 96}, "does not divide k=4096"),
    ("bk", {"bk": 40}, "multiple of 16"),
    ("bk", {"bk": 512}, "less than or equal to 256"),
    ("stages", {"stages": 14}, "less than or equal to 13"),
    ("stages", {"stages": 0}, "greater than or equal to 1"),
    ("stages", {"stages": 6}, "196608 bytes of shared memory exceed the 166912 of a100"),
    ("stages", {"gpu": "rtx3090", "stages": 4}, "131072 bytes of shared memory exceed the 101376 of rtx3090"),
    ("gpu", {"gpu": "v100"}, "must be one of a100"),
    ("mma_repeat", {"mma_repeat": [8, 8, 1]}, "2048 threads exceed the 1024"),
    ("mma_repeat.2", {"mma_repeat": [2, 2, 2]}, "input should be 1"),
    ("g2s_cols", {"g2s_cols": 16}, "must divide the 8 vectors"),
    ("g2s_cols", {"g2s_cols": 3}, "input should be 1, 2, 4"),
    ("g2s_slot", {"g2s_slot": 4}, "must not exceed 3"),
    ("g2s_slot", {"g2s_slot": 1, "stages": 1}, "must be 0 with one stage"),
    ("smem_swizzle", {"smem_swizzle": [3, 3, 2]}, "shift must not be below the bits"),
    ("smem_swizzle.1", {"smem_swizzle": [3, 2, 3]}, "greater than or equal to 3"),
    (
        "smem_swizzle",
        {"bm": 16, "bk": 16, "mma_repeat": [1, 2, 1], "smem_swizzle": [5, 4, 5], **prefetch("none")},
        "permutes blocks of 512",
    ),
    ("smem_swizzle_c", {"smem_swizzle_c": None}, "given iff r2s_bytes is 4"),
    ("prefetch.distance", prefetch("multi"), "given for kind multi"),
    ("prefetch.distance", prefetch("single", 2), "given for kind multi"),
    ("prefetch", prefetch("multi", 4), "loads 4 k-blocks ahead"),
    ("prefetch", {"bk": 16, **prefetch("single")}, "loads 1 k-blocks ahead"),
    ("swizzle_stride", {"raster": "zsplit"}, "given for raster zsplit"),
    ("swizzle_stride", {"swizzle_stride": 2048}, "given for raster zsplit"),
    ("swizzle_stride", {"raster": "zsplit", "swizzle_stride": 1, "n": 65536 * 2}, "exceed the grid's 65535"),
    ("bake.0", {"bake": ["n"]}, "input should be 'k'"),
    ("bake", {"bake": ["k", "k"]}, "at most 1 item"),
    ("unroll_k", {"unroll_k": True, "bake": ["k"], "k": 64 * 65}, "65 steps of k exceed the 64"),
    ("min_blocks", {"min_blocks": 17}, "128 threads each exceed the 2048"),
    ("k", {"k": 2**24 + 64}, "less than or equal to 16777216"),
    ("unroll_k", {"unroll_k": True}, "needs k in bake"),
    ("unroll_k", {"unroll_k": True, "bake": ["k"], "split_k": 2}, "needs k in bake and split_k=1"),
    ("c_batch", {"c_batch": 33}, "exceeds the 16 MMA tiles"),
    ("c_batch", {"c_batch": None}, "given for epilogue staged"),
    ("c_batch", {"epilogue": "direct"}, "given for epilogue staged"),
    ("c_batch", {"bk": 16, "g2s_cols": 2, "stages": 1, "c_batch": 5, **prefetch("none")}, "exceed the ring's 8192"),
    ("r2s_bytes", {"epilogue": "global"}, "given unless epilogue is global"),
    (
        "bn",
        {"bm": 32, "bn": 32, "fusion": "silu+gate", "epilogue": "direct", "c_batch": None, "g2s_cols": 4},
        "64 for gate in epilogue direct",
    ),
    ("split_k", {"split_k": 64, "k": 64}, "exceeds the 1 k-steps"),
    ("k", {"padding": "predicate", "k": 100}, "must be a multiple of 8"),
    ("bm", {"m": 128 * 65536}, "exceed the grid's 65535"),
    ("m", {"m": 0}, "greater than or equal to 1"),
    ("acc", {"acc": "bf16"}, "input should be 'f16' or 'f32'"),
    ("speed", {"speed": 1}, "extra inputs are not permitted; .* a newer version may have more"),
    ("ab", {"ab": "f8"}, "input should be 'f16' or 'bf16'"),
    ("d", {"d": "bf16"}, "input should be 'same' or 'f32'"),
    ("ab", {"ab": "bf16"}, "acc=f16: must be f32"),
    ("d", {"d": "f32"}, "acc=f16: must be f32"),
    ("d", {"acc": "f32", "d": "f32"}, "--set epilogue=global --set c_batch=null --set r2s_bytes=null --set smem_swiz"),
]


@pytest.mark.parametrize(("field", "changes", "rule"), ILLEGAL, ids=[f"{f}-{i}" for i, (f, _, _) in enumerate(ILLEGAL)])
def test_an_illegal_record_names_field_value_and_rule(field: str, changes: dict[str, object], rule: str) -> None:
    with pytest.raises(IllegalRecord) as caught:
        parse(MULTISTAGE | changes)
    message = str(caught.value)
    assert re.search(rf"\b{re.escape(field)}\b", message), message
    assert re.search(rule, message), message
    value = changes.get(field)
    if isinstance(value, (int, str)) and "extra" not in rule:
        assert f"{field}={value}" in message or f"{field}={json.dumps(value)}" in message, message


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"bm": 24}, "multiple of 16\\*mma_repeat"),
        ({"m": 40}, "does not divide m=40"),
        ({"k": 48}, "does not divide k=48"),
        ({"split_k": 5}, "exceeds the 4 k-steps"),
        ({"bk": 32}, "extra inputs"),
    ],
)
def test_the_direct_family_has_its_rules(changes: dict[str, object], rule: str) -> None:
    with pytest.raises(IllegalRecord, match=rule):
        parse(DIRECT | changes)


# Changes of WGMMA: three consumers, and sums of slices over a cluster.
THREE = {"consumers": 3, "bm": 192, "registers": [32, 160]}
SPLIT = {"reduce": "cluster", "split_k": 2, "epilogue": "direct", "bn": 128, "atom_n": 128}
ILLEGAL_WGMMA = [
    ("gpu", {"gpu": "a100"}, "sm90_wgmma needs one of h100, h200, h20"),
    ("bk", {"bk": 32}, "input should be 64 or 128"),
    ("stages", {"stages": 5}, "278640 bytes of shared memory exceed the 232448 of h200"),
    ("stages", {"stages": 1}, "greater than or equal to 2"),
    ("bm", {"bm": 64}, "multiple of 128, 2 warpgroups of 64 rows each"),
    ("bn", {"swap_ab": True, "bm": 64, "bn": 64, "atom_n": 64}, "multiple of 128, 2 warpgroups of 64 rows each"),
    ("atom_n", {"atom_n": 48}, "must divide bn=256"),
    ("atom_n", {"atom_n": 40}, "multiple of 16"),
    ("consumers", {"consumers": 1, "schedule": "pingpong"}, "must be 2 for schedule pingpong"),
    ("cluster", {"cluster": [4, 2]}, "8 CTAs exceed 4"),
    ("cluster.0", {"cluster": [3, 1]}, "input should be 1, 2 or 4"),
    ("bn", {"bn": 144, "atom_n": 144, "cluster": [4, 1]}, "multiple of 8\\*cluster\\[0\\] = 32"),
    (
        "bm",
        {"swap_ab": True, "bm": 16, "bn": 128, "atom_n": 16, "cluster": [1, 4]},
        "multiple of 8\\*cluster\\[1\\] = 32",
    ),
    ("registers.0", {"registers": [16, 232]}, "greater than or equal to 24"),
    ("registers.1", {"registers": [40, 230]}, "multiple of 8"),
    ("registers", {"registers": [40, 240]}, "520 for a producer and 2 consumers exceed the 504"),
    ("registers", {"registers": [40, 160]}, "the producer must give and consumers take"),
    (
        "registers",
        {"registers": [24, 232], "cluster": [2, 1], "layout": "nn", "bn": 208, "atom_n": 208},
        "a producer for cluster \\[2, 1\\] and boxes of 16 columns needs 32 registers",
    ),
    (
        "bn",
        {"epilogue": "direct", "bm": 256, "bn": 192, "atom_n": 192, "stages": 3},
        "and 56 besides them, exceed the 232",
    ),
    (
        "bm",
        {"epilogue": "direct", "swap_ab": True, "bm": 160, "bn": 256, "atom_n": 160, "stages": 3},
        "and 88 besides them, exceed the 232",
    ),
    (
        "bn",
        {"bm": 256, "bn": 208, "atom_n": 208, "stages": 3},
        "208 accumulator registers, and 32 besides them, exceed the 232",
    ),
    ("bn", {"bm": 256, "bn": 160, "atom_n": 160, "registers": None}, "exceed the 168 of a consumer thread"),
    ("bm", {"swap_ab": True, "bm": 256, "bn": 256, "stages": 3}, "256 accumulator registers, and 32 besides them"),
    (
        "atom_n",
        {**THREE, "bn": 208, "atom_n": 208, "stages": 3},
        "104 accumulator registers of one wgmma, and 26 beside",
    ),
    (
        "min_blocks",
        {"bn": 64, "atom_n": 64, "min_blocks": 2, "registers": None},
        "bytes of shared memory each, 1 fits on an SM",
    ),
    ("k", {"k": 100}, "multiple of 8, rows along k start on 16 bytes"),
    ("n", {"n": 100}, "multiple of 8, rows along n start on 16 bytes"),
    ("n", {"n": 100, "layout": "nn", "epilogue": "direct"}, "multiple of 8, rows along n start on 16 bytes"),
    ("reduce", {"split_k": 2}, "is given for split_k above 1"),
    ("reduce", {"reduce": "workspace"}, "is given for split_k above 1"),
    ("split_k", {**SPLIT, "split_k": 3}, "must be one of 2, 4, 8 for reduce cluster"),
    ("split_k", {"reduce": "workspace", "split_k": 64, "k": 64}, "exceeds the 1 k-steps of 64"),
    ("cluster", {**SPLIT, "cluster": [2, 1]}, "must be \\[1, 1\\] for reduce cluster"),
    ("schedule", {**SPLIT, "schedule": "pingpong"}, "must be cooperative for reduce cluster"),
    ("epilogue", {**SPLIT, "epilogue": "tma"}, "must be direct for reduce cluster"),
    ("split_k", {"stream_k": True, "split_k": 2, "reduce": "workspace"}, "must be 1 for stream_k"),
    ("schedule", {"stream_k": True, "schedule": "pingpong"}, "must be cooperative for stream_k"),
    ("acc", {"stream_k": True, "acc": "f16"}, "must be f32 for stream_k"),
    (
        "reduce",
        {**SPLIT, "bn": 256, "atom_n": 256, "stages": 2},
        "131072 bytes of partial sums exceed the ring's 98304",
    ),
    (
        "bm",
        {"m": 2**24, "n": 2**24, "bm": 64, "bn": 16, "atom_n": 16, "consumers": 1, "registers": None},
        "are counted",
    ),
    ("mma_repeat", {"mma_repeat": [1, 1, 1]}, "extra inputs"),
]
ILLEGAL_WARPS = [
    ("gpu", {"gpu": "b200"}, "sm120_mma needs one of rtx5090, rtxpro6000"),
    ("bm", {"bm": 64}, "must be a multiple of 128, 2 warpgroups of 64 rows each"),
    ("bn", {"swap_ab": True, "bn": 64}, "must be a multiple of 128, 2 warpgroups of 64 rows each"),
    ("bn", {"bn": 72}, "must be a multiple of 16, the columns that one ldmatrix brings"),
    ("bn", {"bm": 256, "bn": 208, "stages": 2}, "208 accumulator registers, and 32 besides them, exceed the 232"),
    ("cluster.0", {"cluster": [2, 1]}, "input should be 1"),
    ("consumers", {"schedule": "pingpong", "consumers": 1}, "must be 2 for schedule pingpong"),
    ("stages", {"stages": 3}, "exceed"),
    ("min_blocks", {"registers": None, "bn": 64, "min_blocks": 2}, "of shared memory each, 1 fits on an SM"),
]
ILLEGAL_TENSOR = [
    ("gpu", {"gpu": "h200"}, "sm100_tcgen05 needs one of b200"),
    ("bm", {"bm": 64}, "must be 128, the rows of tcgen05.mma that a CTA has"),
    ("bn", {"swap_ab": True, "bm": 64}, "must be 128, the rows of tcgen05.mma that a CTA has"),
    ("bn", {"bn": 264}, "must be a multiple of 16 up to 256, columns of one tcgen05.mma"),
    ("bn", {"bn": 272}, "must be a multiple of 16 up to 256, columns of one tcgen05.mma"),
    ("bm", {"swap_ab": True, "bm": 24, "bn": 128}, "must be a multiple of 16 up to 256, columns of one tcgen05.mma"),
    ("bn", {"bn": 48, "pair": True, "cluster": [2, 1]}, "must be a multiple of 32 up to 256"),
    ("bn", {"bn": 400, "accumulators": 1}, "columns of one tcgen05.mma, or of 32 up to 512, of two"),
    ("bn", {"bn": 544, "accumulators": 1}, "should be less than or equal to 512"),
    ("bn", {"bn": 480, "accumulators": 1, "pair": True, "cluster": [2, 1]}, "or of 64 up to 512, of two"),
    ("bm", {"swap_ab": True, "bm": 512, "bn": 128, "accumulators": 1}, "of one tcgen05.mma, swap_ab is for few rows"),
    ("accumulators", {"bn": 288, "stages": 3}, "must be 1 for bn=288, a CTA has 512 columns of tensor memory"),
    ("accumulators", {"bn": 512, "stages": 2}, "must be 1 for bn=512, a CTA has 512 columns of tensor memory"),
    ("stages", {"bn": 512, "accumulators": 1, "stages": 3}, "262240 bytes of shared memory exceed the 232448"),
    (
        "stages",
        {"bn": 512, "accumulators": 1, "stages": 2, "pair": True, "cluster": [2, 1], "epilogue": "direct"},
        "2 CTAs, for which an SM has shared memory, wait for 512 columns",
    ),
    ("cluster", {"pair": True}, "must be \\[2, ..\\] for pair, CTAs whose ranks differ in the last bit"),
    ("cluster", {"pair": True, "cluster": [1, 2]}, "must be \\[2, ..\\] for pair"),
    (
        "cluster",
        {"pair": True, "cluster": [2, 2], "swap_ab": True, "bn": 128},
        "must be \\[1, 2\\] with swap_ab for pair",
    ),
    ("cluster.0", {"cluster": [4, 1]}, "input should be 1 or 2"),
    ("accumulators", {"accumulators": 3}, "input should be 1 or 2"),
    ("stages", {"stages": 5}, "262272 bytes of shared memory exceed the 232448 of b200"),
    ("stages", {"stages": 2}, "2 CTAs, for which an SM has shared memory, wait for 512 columns of tensor memory each"),
    ("stages", {"bn": 96, "stages": 2}, "3 CTAs, for which an SM has shared memory, wait for 256 columns"),
    ("split_k", {"stream_k": True, "split_k": 2}, "must be 1 for stream_k"),
    ("acc", {"stream_k": True, "acc": "f16"}, "must be f32 for stream_k"),
    ("epilogue", {"swap_ab": True, "bn": 128, "fusion": "silu+gate"}, "must be direct for gate with swap_ab"),
    ("bn", {"bn": 48, "fusion": "silu+gate"}, "must be a multiple of 32 for gate in epilogue tma"),
    ("stream_k", {"batch": "grouped", "stream_k": True}, "must be false for batch=grouped"),
    ("prefetch_b", {"batch": "grouped", "prefetch_b": True}, "must be false for batch=grouped"),
    ("split_k", {"batch": "grouped", "split_k": 2}, "must be 1 for batch=grouped"),
    ("cluster", {"batch": "grouped", "cluster": [2, 1]}, "tiles of two groups share no B"),
    ("scheduler", {"scheduler": "clc", "split_k": 2}, "must be static for split_k=2, whose CTAs add each other's sums"),
    ("scheduler", {"scheduler": "clc", "stream_k": True}, "must be static for stream_k=true"),
    ("scheduler", {"scheduler": "dynamic"}, "input should be 'static' or 'clc'"),
    ("stages", {"scheduler": "clc", "stages": 5}, "262352 bytes of shared memory exceed the 232448 of b200"),
    ("k", {"k": 100}, "multiple of 8, rows along k start on 16 bytes"),
    ("n", {"n": 100}, "multiple of 8, rows along n start on 16 bytes"),
    ("consumers", {"consumers": 1}, "extra inputs"),
]
ILLEGAL_SINGLE_SHOT = [
    ("gpu", {"gpu": "l40s"}, "sm90_small needs one of h100, h200, h20"),
    ("bm", {"bm": 48}, "must be a multiple of 32, 2 warps of 16"),
    ("bn", {"bn": 80, "bm": 16}, "must be a multiple of 64, 4 warps of 16"),
    ("bn", {"bm": 256, "bn": 128}, "256 accumulator registers exceed the 128"),
    ("k_chunks", {"k": 264}, "must be at least 5, the chunks of 64 in k=264"),
    ("k_chunks", {"k": 1024, "split_k": 2}, "must be at least 8, the chunks of 64 in k=1024"),
    ("k_chunks", {"k_chunks": 32}, "393216 bytes of shared memory exceed the 232448"),
    ("split_k", {"split_k": 3}, "input should be 1, 2, 4 or 8"),
    ("split_k", {"split_k": 8}, "exceeds the 4 k-steps of 64"),
    ("swap_ab", {"swap_ab": True}, "extra inputs"),
    ("k", {"k": 100}, "multiple of 8, rows along k start on 16 bytes"),
    ("n", {"n": 100, "layout": "nn"}, "multiple of 8, rows along n start on 16 bytes"),
]
# The legal record to change, and a row of the tables above.
ILLEGAL_RINGS = [
    (base, *row)
    for base, rows in (
        (WGMMA, ILLEGAL_WGMMA),
        (SINGLE_SHOT, ILLEGAL_SINGLE_SHOT),
        (TENSOR, ILLEGAL_TENSOR),
        (WARPS, ILLEGAL_WARPS),
    )
    for row in rows
]


@pytest.mark.parametrize(
    ("base", "field", "changes", "rule"), ILLEGAL_RINGS, ids=[f"{row[1]}-{i}" for i, row in enumerate(ILLEGAL_RINGS)]
)
def test_an_illegal_record_of_later_chips_names_field_value_and_rule(
    base: dict[str, object], field: str, changes: dict[str, object], rule: str
) -> None:
    assert len(list(parse(base).violations())) == 0, "the record is legal before the change"
    with pytest.raises(IllegalRecord) as caught:
        parse(base | changes)
    message = str(caught.value)
    assert re.search(rf"(?:^|; ){re.escape(field)}\b", message), message
    assert re.search(rule, message), message


def test_all_broken_rules_are_reported_at_once() -> None:
    with pytest.raises(IllegalRecord) as caught:
        parse(MULTISTAGE | {"bm": 100, "bn": 48, "unroll_k": True})
    assert [part.split("=")[0] for part in str(caught.value).split("; ")] == ["bm", "bn", "unroll_k"]


@pytest.mark.parametrize(
    "line", ['"stages":"3"', '"stages":3.0', '"min_blocks":true', '"unroll_k":"off"', '"unroll_k":0']
)
def test_types_are_not_guessed(line: str) -> None:
    name = line.split('"')[1]
    text = json.dumps(MULTISTAGE)
    assert parse(text)
    spoiled = re.sub(rf'"{name}": [^,]+', line, text)
    with pytest.raises(IllegalRecord, match=rf"^{name}="):
        parse(spoiled)


def test_a_key_that_appears_twice_is_refused() -> None:
    with pytest.raises(IllegalRecord, match=r"^stages:"):
        parse(json.dumps(MULTISTAGE)[:-1] + ', "stages": 2}')


def test_a_missing_family_is_named() -> None:
    with pytest.raises(IllegalRecord, match=r"^family:"):
        parse('{"x": 1}')


def test_a_missing_field_is_named() -> None:
    with pytest.raises(IllegalRecord, match=r"^stages:"):
        parse({name: value for name, value in MULTISTAGE.items() if name != "stages"})


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(IllegalRecord, match=r"^family=.*sm70_volta"):
        parse(MULTISTAGE | {"family": "sm70_volta"})


def test_revise_validates_anew() -> None:
    with pytest.raises(IllegalRecord, match="stages"):
        revise(multistage(), stages=99)


def test_a_record_answers_another_problem_by_its_own_rules() -> None:
    record = multistage(m=4096, k=4096)
    problem = record.problem.revised(m=8192, k=128)
    assert record.at(problem) == revise(record, m=8192, k=128)
    assert record.at(problem).decisions() == record.decisions()
    with pytest.raises(IllegalRecord, match="does not divide m=100"):
        record.at(record.problem.revised(m=100))
    assert record.at(record.problem.revised(m=100), padding="predicate").padding == "predicate"
    with pytest.raises(IllegalRecord, match=r"^swap_ab:"):
        record.at(problem, swap_ab=True)
    with pytest.raises(IllegalRecord, match=r"^m=0:"):
        record.problem.revised(m=0)


def test_a_line_is_flat() -> None:
    assert list(json.loads(catalog.dump(direct()))) == list(DIRECT)
    with pytest.raises(IllegalRecord, match=r"^problem:"):
        parse(DIRECT | {"problem": DIRECT})
    neutral = Problem.NEUTRAL
    assert dict(direct().problem) == {name: DIRECT[name] for name in Problem.model_fields if name in DIRECT} | neutral


PLAIN = {record.family: record for record in (multistage(), direct(), wgmma(), single_shot(), tcgen05(), warp_mma())}


class Typed(Problem):
    """A problem with an additional field of a later version."""

    operand: Literal["f16", "bf16"] = "f16"


def written_forms(record: Record) -> tuple[str, str, str, str]:
    """The name, catalog line, text and binary's digest of a record."""
    return record.name, catalog.dump(record), render(record), compiler.job(record, toolchain.discover()).digest


def test_every_family_is_tried_with_a_later_field() -> None:
    """Families of texts from elsewhere are tested in ``test_device_text``."""
    assert PLAIN.keys() == {name for name, family in FAMILIES.items() if not family.TEXTUAL}


@pytest.mark.parametrize("family", sorted(PLAIN))
def test_a_later_field_of_a_family_is_silent_while_it_is_neutral(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = PLAIN[family]
    monkeypatch.setitem(FAMILIES, family, create_model("Later", __base__=type(record), colour=(str | None, None)))
    neutral = parse(catalog.dump(record))
    assert neutral.colour is None  # type: ignore[attr-defined]
    assert written_forms(neutral) == written_forms(record)
    red = revise(neutral, colour="red")
    assert all(new != old for new, old in zip(written_forms(red), written_forms(record), strict=True))
    assert parse(catalog.dump(red)) == red
    assert written_forms(revise(red, colour=None)) == written_forms(record)


@pytest.mark.parametrize("family", sorted(PLAIN))
def test_a_later_field_of_the_problem_is_silent_while_it_is_neutral(family: str) -> None:
    record = PLAIN[family]
    later = create_model("Later", __base__=type(record), problem=(Typed, ...))
    neutral, bf16 = (
        later.model_validate(dict(record) | {"problem": Typed(**dict(record.problem), operand=operand)})
        for operand in ("f16", "bf16")
    )
    assert written_forms(neutral) == written_forms(record)
    assert all(new != old for new, old in zip(written_forms(bf16), written_forms(record), strict=True))
    assert catalog.dump(bf16).startswith(catalog.dump_problem(bf16.problem))
    assert not catalog.dump(bf16).startswith(catalog.dump_problem(record.problem))
    assert bf16.key != neutral.key


@pytest.mark.parametrize("schema", [Problem, Origin, Prefetch, *FAMILIES.values()])
def test_every_field_says_what_it_does_in_a_line(schema: type[BaseModel]) -> None:
    for name, field in schema.model_fields.items():
        assert field.description, name
        assert 0 < len(field.description.splitlines()[0]) == len(field.description) <= 100, name


def test_records_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        multistage().stages = 4  # type: ignore[misc]


@pytest.mark.parametrize(("gpu", "limit"), [("a100", 163), ("rtx3090", 99), ("l40s", 99), ("h100", 227), ("h200", 227)])
def test_shared_memory_limits(gpu: str, limit: int) -> None:
    assert GPUS[gpu].capability.smem_block_bytes == limit * 1024


@pytest.mark.parametrize(
    ("kind", "distance", "fragments"),
    [("none", None, 1), ("single_intra_tile", None, 2), ("single", None, 2), ("multi", 2, 3), ("pingpong", None, 2)],
)
def test_registers_are_estimated_by_hand(kind: str, distance: int | None, fragments: int) -> None:
    # 64 accumulators; a fragment of A has 4 blocks of 4 registers, one of B 8 of 2; 32 are for addresses.
    assert multistage(**prefetch(kind, distance)).estimated_registers == 64 + fragments * (16 + 16) + 32


def test_a_staggered_prefetch_has_one_fragment_of_b() -> None:
    assert multistage(**prefetch("staggered")).estimated_registers == 64 + 2 * 16 + 16 + 32
    assert multistage(bk=16, g2s_cols=2, **prefetch("none")).estimated_registers == 64 + 32 + 32
    assert multistage(padding="predicate").estimated_registers == multistage().estimated_registers + 8


def test_derived_facts_by_hand() -> None:
    record = multistage(raster="zsplit", swizzle_stride=2048)
    assert record.threads == 128
    assert record.ring_bytes == 3 * (128 + 128) * 64 * 2 == 98304
    assert record.smem_bytes == 98304
    assert record.k_blocks == 4
    assert record.warp_m == 4
    assert record.warp_n == 8
    assert record.mma_tiles == 16
    assert record.accumulator_registers == 64
    assert record.slices_n == 2
    assert record.ctas == 32 * 32
    # A CTA takes 98304 + 1024 of the SM's 167936 bytes: one CTA on each of 108 SMs.
    assert record.ctas_per_sm(168) == 1
    assert record.waves(168) == pytest.approx(1024 / 108)
    assert record.padding_waste == 0


def test_occupancy_follows_registers_threads_and_shared_memory() -> None:
    small = multistage(stages=1, bk=32, bm=64, bn=64)  # 8 KiB
    assert small.ctas_per_sm(32) == 16  # 2048 threads / 128
    assert small.ctas_per_sm(128) == 4  # 65536 / (128 * 128)
    assert small.ctas_per_sm(255) == 2
    # Registers come from four partitions of 16384, by whole warps: 2 of 6400 fit in each, 8 in all; not 65536 / 12800.
    two_warps = multistage(stages=1, bk=32, bm=32, bn=32, mma_repeat=[1, 2, 1], c_batch=1)
    assert two_warps.ctas_per_sm(200) == 4
    three_warps = multistage(stages=1, bk=32, bm=32, bn=48, n=48, mma_repeat=[1, 3, 1], c_batch=1)
    assert three_warps.ctas_per_sm(168) == 4  # 3 of 5376 in each partition: 12 warps
    assert multistage(stages=2).ctas_per_sm(64) == 2  # 65536 + 1024 of 167936


def test_direct_stages_in_as_few_even_rounds_as_the_ring_holds() -> None:
    record = multistage(bk=16, g2s_cols=2, stages=1, **STRAIGHT, **prefetch("none"))
    assert (record.ring_bytes, record.staging_tiles, record.mma_tiles) == (8192, 4, 16)  # 4 rounds of 2048 a tile
    assert record.staging_bytes == record.smem_bytes == 8192
    assert multistage(**STRAIGHT).staging_tiles == 16  # the whole tile at once
    assert multistage(**TO_GLOBAL).staging_bytes == 0


def test_padding_waste() -> None:
    record = multistage(m=100, n=200, padding="pad")
    assert record.padding_waste == pytest.approx(128 * 256 / (100 * 200) - 1)


@given(multistage_records())
def test_smem_swizzle_is_a_bijection_on_a_stage(record: Sm80Multistage) -> None:
    of_a, of_b = (record.bm, record.bk), (record.bn, record.bk)
    for (bits, base, shift), rows, row in (
        (record.swizzle_a, *(of_a if record.along_k.a else of_a[::-1])),
        (record.swizzle_b, *(of_b if record.along_k.b else of_b[::-1])),
    ):
        mask = ((1 << bits) - 1) << (base + shift)
        image = {offset ^ ((offset & mask) >> shift) for offset in range(rows * row)}
        assert image == set(range(rows * row))


@given(multistage_records())
def test_thread_copies_cover_the_tile_exactly_once(record: Sm80Multistage) -> None:
    operands = zip((record.bm, record.bn), (record.copy_cols_a, record.copy_cols_b), record.along_k, strict=True)
    for extent, cols, along in operands:
        rows, vectors = (extent, record.bk // 8) if along else (record.bk, extent // 8)
        assert record.threads % cols == 0
        assert vectors % cols == 0
        step = record.threads // cols
        copied = [
            (row, col)
            for thread in range(record.threads)
            for row in range(thread // cols, rows, step)
            for col in range(thread % cols, vectors, cols)
        ]
        assert len(copied) == len(set(copied)) == rows * vectors


@given(multistage_records())
def test_static_steps_are_those_of_the_swizzled_layout(record: Sm80Multistage) -> None:
    """The template replaces layout evaluation by sums and xors if the record says that the results agree."""
    warps_m, warps_n, _ = record.mma_repeat
    for (bits, base, shift), along, static, extent, step in (
        (record.swizzle_a, record.along_k.a, record.static_steps_a, record.bm, 16 * warps_m),
        (record.swizzle_b, record.along_k.b, record.static_steps_b, record.bn, 16 * warps_n),
    ):
        if not static:
            continue
        vectors = (record.bk if along else extent) // 8
        # Offsets are in vectors of 8 elements, so the swizzle's base is 3 bits lower than in elements.
        mask, down = ((1 << bits) - 1) << (base - 3 + shift), shift

        def offset(row: int, col: int, vectors: int = vectors, mask: int = mask, down: int = down) -> int:
            linear = row * vectors + col
            return linear ^ ((linear & mask) >> down)

        steps = product(range(record.k_blocks), range(extent // step))
        # ``fast``: what the template computes for k-block kb and step i from the offsets of the first ones. Along k, a
        # k-block has two vectors of a row.
        for kb, i in steps:
            if along:
                places = list(product(range(step), (0, 1)))
                fast = [(offset(row, col) ^ offset(0, 2 * kb)) + i * step * vectors for row, col in places]
                slow = [offset(row + i * step, col + 2 * kb) for row, col in places]
            else:
                cols = range(i * step // 8, (i + 1) * step // 8)
                fast = [offset(row, col) + kb * 16 * vectors for row in range(16) for col in cols]
                slow = [offset(row + kb * 16, col) for row in range(16) for col in cols]
            assert fast == slow


def test_names_depend_on_code_fields_only() -> None:
    base = multistage()
    assert base.name == revise(base, m=8192, n=128, k=128, gpu="h200").name
    assert base.name != revise(base, stages=2).name
    zsplit = multistage(raster="zsplit", swizzle_stride=2048)
    assert zsplit.name == revise(zsplit, swizzle_stride=512).name != base.name
    assert base.name == revise(base, padding="pad").name != revise(base, padding="predicate").name
    baked = revise(base, bake=["k"])
    assert baked.name != revise(baked, k=2048).name
    assert baked.name == revise(baked, n=128).name
    assert direct().name != direct(split_k=2).name
    assert multistage(**STAGED_16).name != base.name
