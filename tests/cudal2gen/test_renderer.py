"""Proves that rendered text is pure and well-formed, and depends on exactly the fields of code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from jinja2 import Environment, meta

from cudal2gen import places
from cudal2gen.generation import catalog, compiler
from cudal2gen.generation.renderer import _cxx, render
from cudal2gen.kernel import FAMILIES, Record, Sm80Multistage, parse
from cudal2gen.kernel.mma_sync import MmaTiles
from tests.cudal2gen.paths import ring
from tests.cudal2gen.strategies import (
    DIRECT,
    STAGED_16,
    STRAIGHT,
    TO_GLOBAL,
    direct,
    multistage,
    prefetch,
    records,
    single_shot,
    tcgen05,
    warp_mma,
    wgmma,
)
from tests.draws import draw_part

GOLDEN = Path(__file__).parent / "golden"

# By field of code, which must reach the text: changes of the plain record that make the field's change legal, and that
# change. A field of data must leave the text as it is.
CODE_CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "acc": ({}, {"acc": "f32"}),
    "ab": ({"acc": "f32"}, {"ab": "bf16"}),
    "d": ({"acc": "f32", **TO_GLOBAL}, {"d": "f32"}),
    "fusion": ({}, {"fusion": "bias_n+silu"}),
    "layout": ({}, {"layout": "nn"}),
    "batch": ({}, {"batch": "strided"}),
    "bm": ({}, {"bm": 64}),
    "bn": ({}, {"bn": 64}),
    "bk": ({}, {"bk": 32}),
    "stages": ({}, {"stages": 4}),
    "mma_repeat": ({}, {"mma_repeat": [1, 4, 1]}),
    "min_blocks": ({}, {"min_blocks": 2}),
    "smem_swizzle": ({}, {"smem_swizzle": [2, 3, 3]}),
    "smem_swizzle_c": ({}, {"smem_swizzle_c": [2, 3, 3]}),
    "g2s_cols": ({}, {"g2s_cols": 8}),
    "g2s_slot": ({}, {"g2s_slot": 1}),
    "raster": ({}, {"raster": "persistent"}),
    "prefetch": ({}, prefetch("staggered")),
    "unroll_k": ({"bake": ["k"], "k": 128}, {"unroll_k": True}),
    "bake": ({}, {"bake": ["k"]}),
    "epilogue": ({}, STRAIGHT),
    "c_batch": ({}, {"c_batch": 2}),
    "r2s_bytes": ({}, STAGED_16),
    "padding": ({}, {"padding": "predicate"}),
    "split_k": ({}, {"split_k": 2}),
    "family": ({}, DIRECT | {"m": 4096, "n": 4096, "k": 4096}),
}
DATA_CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpu": ({}, {"gpu": "h200"}),
    "m": ({}, {"m": 128}),
    "n": ({}, {"n": 128}),
    "k": ({}, {"k": 64}),
    "swizzle_stride": ({"raster": "zsplit", "swizzle_stride": 2048}, {"swizzle_stride": 100}),
    "origin": ({}, {"origin": {"source": "elsewhere", "structure": "tuned", "changed": ["bm"]}}),
    "padding": ({}, {"padding": "pad"}),
}


# The same for the other families, with changes of their own plain records. An empty change: ``hopper_pairs`` has one.
SPLIT: dict[str, Any] = {"split_k": 2, "reduce": "workspace", "epilogue": "direct"}
WGMMA_CODE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "acc": ({}, {"acc": "f16"}),
    "ab": ({}, {"ab": "bf16"}),
    "d": ({}, {"d": "f32"}),
    "fusion": ({}, {"fusion": "bias_n+silu"}),
    "layout": ({}, {"layout": "nn"}),
    "batch": ({}, {"batch": "strided"}),
    "bm": ({}, {"bm": 256, "bn": 128, "atom_n": 128}),
    "bn": ({}, {"bn": 192, "atom_n": 64}),
    "swap_ab": ({}, {}),
    "bk": ({}, {"bk": 128, "stages": 2}),
    "stages": ({}, {"stages": 3}),
    "cluster": ({}, {"cluster": [2, 1]}),
    "consumers": ({"bm": 192, "bn": 128, "atom_n": 128, "consumers": 1, "registers": None}, {"consumers": 3}),
    "atom_n": ({}, {"atom_n": 128}),
    "schedule": ({"bn": 128, "atom_n": 128}, {"schedule": "pingpong"}),
    "split_k": (SPLIT, {"split_k": 3}),
    "reduce": (SPLIT | {"bn": 128, "atom_n": 128}, {"reduce": "cluster"}),
    "epilogue": ({}, {"epilogue": "direct"}),
    "registers": ({}, {"registers": None}),
    "min_blocks": ({"bm": 128, "bn": 32, "atom_n": 32, "registers": None}, {"min_blocks": 2}),
    "stream_k": ({}, {"stream_k": True}),
    "prefetch_b": ({}, {"prefetch_b": True}),
    "family": ({}, {}),
}
WGMMA_DATA: dict[str, dict[str, Any]] = {
    "gpu": {"gpu": "h100"},
    "m": {"m": 8},
    "n": {"n": 72},
    "k": {"k": 264},
    "origin": {"origin": {"source": "elsewhere", "structure": "tuned", "changed": ["bm"]}},
    "raster_axis": {"raster_axis": "n"},
    "raster_group": {"raster_group": 1},
    "hint_a": {"hint_a": "first"},
    "hint_b": {"hint_b": "last"},
    "pdl": {"pdl": True},
    "padding": {"padding": "pad", "k": 263},
}
TENSOR_CODE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{field: WGMMA_CODE[field] for field in ("acc", "ab", "d", "fusion", "layout", "batch", "epilogue", "stream_k")},
    "bm": ({"swap_ab": True, "bm": 64, "bn": 128}, {"bm": 32}),
    "bn": ({}, {"bn": 128}),
    "swap_ab": ({"bn": 128}, {"swap_ab": True}),
    "bk": ({}, {"bk": 128, "stages": 2}),
    "stages": ({}, {"stages": 3}),
    "cluster": ({}, {"cluster": [2, 1]}),
    "pair": ({"cluster": [2, 1]}, {"pair": True}),
    "accumulators": ({}, {"accumulators": 1}),
    "scheduler": ({}, {"scheduler": "clc"}),
    "prefetch_b": ({}, {"prefetch_b": True}),
    "split_k": ({}, {"split_k": 3}),
    "family": ({}, {}),
}
TENSOR_DATA: dict[str, dict[str, Any]] = {name: change for name, change in WGMMA_DATA.items() if name != "gpu"}
WARPS_CODE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{field: WGMMA_CODE[field] for field in ("acc", "ab", "d", "fusion", "layout", "batch", "epilogue", "stream_k")},
    "bm": ({"bm": 128}, {"bm": 256, "bn": 32, "stages": 2}),
    "bn": ({}, {"bn": 64}),
    "swap_ab": ({}, {"swap_ab": True}),
    "bk": ({"bn": 32}, {"bk": 128}),
    "stages": ({"bn": 32}, {"stages": 3}),
    "consumers": ({}, {"consumers": 1, "registers": None, "bn": 64}),
    "schedule": ({}, {"schedule": "pingpong"}),
    "registers": ({}, {"registers": None}),
    "min_blocks": ({"registers": None, "bn": 64, "bm": 64, "consumers": 1}, {"min_blocks": 2}),
    "split_k": ({}, {"split_k": 3}),
    "cluster": ({}, {}),
    "family": ({}, {}),
}
ONCE_CODE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "acc": ({}, {"acc": "f16"}),
    "ab": ({}, {"ab": "bf16"}),
    "d": ({}, {"d": "f32"}),
    "fusion": ({}, {"fusion": "bias_n+silu"}),
    "layout": ({}, {"layout": "nn"}),
    "batch": ({}, {"batch": "strided"}),
    "bm": ({}, {"bm": 16}),
    "bn": ({}, {"bn": 32}),
    "k_chunks": ({}, {"k_chunks": 5}),
    "split_k": ({}, {"split_k": 2}),
    "family": ({}, {}),
}
ONCE_DATA: dict[str, dict[str, Any]] = {
    "gpu": {"gpu": "h100"},
    "m": {"m": 8},
    "n": {"n": 72},
    "k": {"k": 136},
    "origin": {"origin": {"source": "elsewhere", "structure": "tuned", "changed": ["bm"]}},
    "pdl": {"pdl": True},
    "padding": {"padding": "pad", "k": 135},
}


def strict(fields: dict[str, Any]) -> Record:
    """The record with these of the given fields that its family has."""
    family = FAMILIES[fields["family"]]
    return parse({name: value for name, value in fields.items() if name in family.line_fields()})


def pair(changes: dict[str, tuple[dict[str, Any], dict[str, Any]]], field: str) -> tuple[Record, Record]:
    """Two legal records that differ in a field of ``changes``: before the change and after it."""
    start, change = changes[field]
    before = multistage(**start)
    return before, strict(before.model_dump(mode="json") | change)


def test_every_field_is_listed_as_code_or_data() -> None:
    for family, code, data in (
        ("sm80_multistage", CODE_CHANGES, DATA_CHANGES),
        ("sm80_direct", CODE_CHANGES, DATA_CHANGES),
        ("sm90_wgmma", WGMMA_CODE, WGMMA_DATA),
        ("sm90_small", ONCE_CODE, ONCE_DATA),
        ("sm100_tcgen05", TENSOR_CODE, TENSOR_DATA | {"gpu": {}}),
        ("sm120_mma", WARPS_CODE, TENSOR_DATA | {"gpu": {}}),
    ):
        fields, data_fields = set(FAMILIES[family].line_fields()), FAMILIES[family].DATA_FIELDS
        assert fields - data_fields <= set(code)
        assert set(data) >= data_fields
    assert set(DATA_CHANGES) - {"padding"} == Sm80Multistage.DATA_FIELDS
    assert set(WGMMA_DATA) == FAMILIES["sm90_wgmma"].DATA_FIELDS
    assert set(ONCE_DATA) == FAMILIES["sm90_small"].DATA_FIELDS


@pytest.mark.parametrize("field", sorted(CODE_CHANGES))
def test_a_code_field_changes_the_text(field: str) -> None:
    before, after = pair(CODE_CHANGES, field)
    assert _anonymous(before) != _anonymous(after)


@pytest.mark.parametrize("field", sorted(DATA_CHANGES))
def test_a_data_field_leaves_the_text_as_it_is(field: str) -> None:
    before, after = pair(DATA_CHANGES, field)
    assert before != after
    assert render(before) == render(after)


def hopper_pairs() -> list[tuple[str, Record, Record]]:
    """Pairs of records of other families that differ in a code field and what it needs, each with the field."""
    pairs: list[tuple[str, Record, Record]] = []
    for make, changes in (
        (wgmma, WGMMA_CODE),
        (single_shot, ONCE_CODE),
        (tcgen05, TENSOR_CODE),
        (warp_mma, WARPS_CODE),
    ):
        for field, (start, change) in changes.items():
            if change:
                pairs.append((field, make(**start), make(**(start | change))))
    pairs += [("swap_ab", ring(bm=64, bn=64, atom_n=64), ring(bm=64, bn=64, atom_n=64, swap_ab=True))]
    return [*pairs, ("family", wgmma(), single_shot())]


PAIRS = hopper_pairs()
COMPILED_PAIRS = draw_part(PAIRS, 6)  # one in six, unless all are run
BUILT_AHEAD = [record for _, before, after in COMPILED_PAIRS for record in (before, after)]


@pytest.mark.slow
def test_a_code_field_of_hopper_changes_the_text() -> None:
    assert [(before.family, field) for field, before, after in PAIRS if _anonymous(before) == _anonymous(after)] == []


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(before, after, id=f"{before.family}-{field}") for field, before, after in COMPILED_PAIRS],
)
def test_a_code_field_of_hopper_changes_the_ptx(before: Record, after: Record) -> None:
    """The PTX differs, apart from names and line numbers. This is stronger than a difference of the text."""
    ptx = []
    for record in (before, after):
        text = compiler.build([record])[0].ptx.read_text().replace(record.name, "name")
        text = re.sub(r"_ZN\d+name", "_ZNname", text)  # mangled names have the name's length
        ptx.append(re.sub(r"^\t\.(?:loc|file).*\n", "", text, flags=re.MULTILINE))
    assert ptx[0] != ptx[1]


@pytest.mark.parametrize("field", sorted(TENSOR_DATA))
def test_a_data_field_of_blackwell_leaves_text_and_binary_as_they_are(field: str) -> None:
    before = tcgen05()
    after = strict(before.model_dump(mode="json") | TENSOR_DATA[field])
    assert before != after
    assert render(before) == render(after)
    assert before.launch == after.launch


@pytest.mark.parametrize("field", sorted(WGMMA_DATA))
def test_a_data_field_of_hopper_leaves_text_and_binary_as_they_are(field: str) -> None:
    start = single_shot() if field in ONCE_DATA else wgmma()
    for before, change in ((wgmma(), WGMMA_DATA[field]), (start, ONCE_DATA.get(field, WGMMA_DATA[field]))):
        after = strict(before.model_dump(mode="json") | change)
        assert before != after
        assert render(before) == render(after)
        assert before.launch == after.launch


def test_a_baked_k_is_code() -> None:
    assert render(multistage(bake=["k"])) != render(multistage(bake=["k"], k=2048))
    assert render(multistage(bake=["k"])) == render(multistage(bake=["k"], n=2048))


def _anonymous(record: Record) -> str:
    """The code of a text: no names derived from the record, no comments."""
    return re.sub(r"//.*", "", render(record).replace(record.name, "name"))


@given(records)
def test_every_legal_record_renders_to_well_formed_text(record: Record) -> None:
    text = render(record)
    code = re.sub(r"//.*", "", text)
    for opening, closing in ("()", "{}", "[]"):
        assert code.count(opening) == code.count(closing)
    assert text.count(f"namespace {record.name} {{") == 1
    entry = rf"\n{record.name}\(({record.element.cpp} const\* a, int (lda|/\* lda \*/),|\n)"
    assert re.search(entry, text), "the entry has the record's name"
    assert "// Launch" in text
    assert text.endswith("\n")
    assert not re.search(r"[ \t]+$", text, re.MULTILINE), "no trailing blanks"
    assert "\n\n\n" not in text
    assert not re.search(r"\b(None|True|False|Undefined)\b", code), "no Python spelling"
    for leaked in ("{{", "}}", "{%", "%}", "{#", "#}"):
        assert leaked not in code.replace("}};", "")
    assert max(len(line) for line in text.splitlines()) <= 260
    if isinstance(record, MmaTiles):
        assert _unread(record, code) == []


EVERYWHERE = ("m", "n", "fused")


def _unread(record: Record, code: str) -> list[str]:
    """The constants, members of Gemm and parameters of the kernel that the code of a text names and does not read.

    Gemm has the extents of D and the fused operands in every kernel.
    """
    code = re.sub(r"/\*.*?\*/", "", code)
    constants = re.findall(r"\b(\w+) =", "".join(re.findall(r"constexpr int ([^;]*);", code)))
    members = re.findall(r"(\w+)(?: = \d+)?;", code.split("struct Gemm {")[1].split("};")[0])
    parameters, body = code.split(f"\n{record.name}(")[1].split(") {", 1)
    return [
        *(name for name in constants if len(re.findall(rf"\b{name}\b", code)) == 1),
        *(name for name in members if name not in EVERYWHERE and not re.search(rf"(\.|\bGemm::){name}\b", code)),
        *(name for name in re.findall(r"(\w+)(?:,|$)", parameters) if not re.search(rf"\b{name}\b", body)),
    ]


@pytest.mark.slow
@given(records)
def test_rendering_is_deterministic(record: Record) -> None:
    assert render(record) == render(parse(record.model_dump_json()))


@pytest.mark.slow
def test_rendering_is_the_same_in_another_process() -> None:
    record = multistage()
    program = (
        "from cudal2gen.kernel import parse; from cudal2gen.generation.renderer import render; "
        f"print(render(parse({record.model_dump_json()!r})), end='')"
    )
    for seed in ("1", "2"):
        process = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        assert process.stdout == render(record)


@pytest.mark.slow
@pytest.mark.parametrize("writable", [True, False])
def test_compiled_templates_are_reused_where_the_cache_can_be_written(tmp_path: Path, writable: bool) -> None:
    record, cache = multistage(), tmp_path / "cache"
    if not writable:
        cache.write_text("a file")
    program = (
        "import jinja2; from cudal2gen.kernel import parse; from cudal2gen.generation.renderer import render\n"
        "compiled = []\n"
        "compile = jinja2.Environment._compile\n"
        "jinja2.Environment._compile = lambda self, *words: (compiled.append(words), compile(self, *words))[1]\n"
        f"text = render(parse({record.model_dump_json()!r})); print(len(compiled)); print(text, end='')"
    )
    counts = []
    for _ in range(2):
        process = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True,
            env=os.environ | {"CUDAL2GEN_CACHE_DIR": str(cache)},
        )  # fmt: skip
        count, text = process.stdout.split("\n", 1)
        assert text == render(record)
        counts.append(int(count))
    assert counts[0] > 5
    assert counts[1] == (0 if writable else counts[0])


@pytest.mark.parametrize("value", [None, True, 1.5, (1, 2), [1]])
def test_what_has_no_cpp_spelling_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="has no C\\+\\+ spelling"):
        _cxx(value)


# One record of each family. The paths of covering.py execute what else the templates can yield.
GOLDENS: dict[str, Record] = {
    "sm80_multistage": multistage(raster="zsplit", swizzle_stride=2048, bn=256, bk=32),
    "sm80_direct": direct(),
    "sm90_wgmma": wgmma(cluster=[2, 1]),
    "sm90_small": single_shot(split_k=2),
    "sm100_tcgen05": tcgen05(pair=True, cluster=[2, 1], bn=128, scheduler="clc"),
    "sm120_mma": warp_mma(),
}


@pytest.mark.parametrize("name", sorted(GOLDENS))
def test_golden_text(name: str, request: pytest.FixtureRequest) -> None:
    """A change of the templates shows here; ``make goldens`` accepts it."""
    path = GOLDEN / f"{name}.cu"
    assert path.read_text() == render(GOLDENS[name])


def test_clusters_do_not_wait_for_memory_to_hand_back_a_stage() -> None:
    """ptxas puts a MEMBAR.ALL.GPU before a release to a cluster, which takes hundreds of clocks in every k-tile."""
    text = render(ring(cluster=[2, 1]))
    assert "mbarrier.arrive.shared::cluster.b64" in text
    assert "release.cluster.shared::cluster" not in text
    assert "barrier.cluster.arrive.relaxed" in text
    assert "barrier.cluster.arrive.release" not in text


@pytest.mark.slow
def test_records_of_one_text_share_one_name() -> None:
    texts: dict[str, str] = {}
    for record in catalog.load(places.shipped("configs") / "kernels.jsonl")[::7]:
        text = render(record)
        assert texts.setdefault(record.name, text) == text


@pytest.mark.slow
def test_templates_follow_their_rules(checkout: Path) -> None:
    """Macros of kernels have at most one level of `if`, no include, and explicit arguments."""
    templates = checkout / "templates"
    for path in sorted([*templates.glob("*.cu.j2"), *(templates / "macros").glob("*.j2")]):
        text = path.read_text()
        assert "{% include" not in text
        depth = 0
        for tag in re.findall(r"{%-?\s*(if|endif)\b", text):
            depth += 1 if tag == "if" else -1
            assert depth <= 1, path
        free = meta.find_undeclared_variables(Environment().parse(text))
        assert free <= ({"r"} if path.name.endswith(".cu.j2") else set()), "macros see their arguments only"


if __name__ == "__main__":
    for golden, golden_record in GOLDENS.items():
        (GOLDEN / f"{golden}.cu").write_text(render(golden_record))
