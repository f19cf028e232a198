"""Rendered text: pure, well-formed, and exactly as sensitive to fields as it claims."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from jinja2 import Environment, meta

from cudal2gen import catalog, places
from cudal2gen.kernel import KernelBase, Sm80Direct, Sm80Multistage, parse
from cudal2gen.renderer import _cxx, render
from tests.strategies import DIRECT, STAGED_8, STAGED_16, STRAIGHT, TO_GLOBAL, direct, multistage, prefetch, records

GOLDEN = Path(__file__).parent / "golden"

# One legal change of every field that must reach the text.
CODE_CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "acc": ({}, {"acc": "f32"}),
    "layout": ({}, {"layout": "nn"}),
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


def strict(fields: dict[str, Any]) -> Sm80Multistage | Sm80Direct:
    family = Sm80Direct if fields.get("family") == "sm80_direct" else Sm80Multistage
    return parse({name: value for name, value in fields.items() if name in family.model_fields})


def pair(changes: dict[str, tuple[dict[str, Any], dict[str, Any]]], field: str) -> tuple[Any, Any]:
    start, change = changes[field]
    before = multistage(**start)
    return before, strict(before.model_dump(mode="json") | change)


def test_every_field_is_listed_as_code_or_data() -> None:
    for family in (Sm80Multistage, Sm80Direct):
        code = set(family.model_fields) - family.DATA_FIELDS
        assert code <= set(CODE_CHANGES)
        assert set(DATA_CHANGES) >= family.DATA_FIELDS
    assert set(DATA_CHANGES) - {"padding"} == Sm80Multistage.DATA_FIELDS


@pytest.mark.parametrize("field", sorted(CODE_CHANGES))
def test_a_code_field_changes_the_text(field: str) -> None:
    before, after = pair(CODE_CHANGES, field)
    assert _anonymous(before) != _anonymous(after)


@pytest.mark.parametrize("field", sorted(DATA_CHANGES))
def test_a_data_field_leaves_the_text_as_it_is(field: str) -> None:
    before, after = pair(DATA_CHANGES, field)
    assert before != after
    assert render(before) == render(after)


def test_baked_sizes_are_code() -> None:
    assert render(multistage(bake=["k"])) != render(multistage(bake=["k"], k=2048))
    assert render(multistage(bake=["n", "k"])) != render(multistage(bake=["n", "k"], n=2048))
    assert render(multistage(bake=["k"])) == render(multistage(bake=["k"], n=2048))


def _anonymous(record: Sm80Multistage | Sm80Direct) -> str:
    """The code of a text: no names derived from the record, no comments."""
    return re.sub(r"//.*", "", render(record).replace(record.name, "name"))


@given(records)
def test_every_legal_record_renders_to_well_formed_text(record: Sm80Multistage | Sm80Direct) -> None:
    text = render(record)
    code = re.sub(r"//.*", "", text)
    for opening, closing in ("()", "{}", "[]"):
        assert code.count(opening) == code.count(closing)
    assert text.count(f"namespace {record.name} {{") == 1
    assert f"\n{record.name}(half const* a, int lda" in text, "the entry has the record's name"
    assert "// Launch" in text
    assert text.endswith("\n")
    assert not re.search(r"[ \t]+$", text, re.MULTILINE), "no trailing blanks"
    assert "\n\n\n" not in text
    assert not re.search(r"\b(None|True|False|Undefined)\b", code), "no Python spelling"
    for leaked in ("{{", "}}", "{%", "%}", "{#", "#}"):
        assert leaked not in code.replace("}};", "")
    assert max(len(line) for line in text.splitlines()) <= 260


@given(records)
def test_rendering_is_deterministic(record: Sm80Multistage | Sm80Direct) -> None:
    assert render(record) == render(parse(record.model_dump_json()))


def test_rendering_is_the_same_in_another_process() -> None:
    record = multistage()
    program = (
        "from cudal2gen.kernel import parse; from cudal2gen.renderer import render; "
        f"print(render(parse({record.model_dump_json()!r})), end='')"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        assert done.stdout == render(record)


@pytest.mark.parametrize("value", [None, True, 1.5, (1, 2), [1]])
def test_what_has_no_cpp_spelling_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="has no C\\+\\+ spelling"):
        _cxx(value)


GOLDENS: dict[str, KernelBase] = {
    "sm80_multistage": multistage(raster="zsplit", swizzle_stride=2048, bn=256, bk=32),
    "sm80_multistage_ragged_nn": multistage(
        acc="f32", layout="nn", padding="predicate", split_k=4, raster="persistent", **prefetch("pingpong"), **TO_GLOBAL
    ),
    "sm80_multistage_one_stage": multistage(
        stages=1, bake=["k"], k=128, unroll_k=True, epilogue="direct", c_batch=None, **STAGED_8, **prefetch("none")
    ),
    "sm80_direct": direct(),
}


@pytest.mark.parametrize("name", sorted(GOLDENS))
def test_golden_text(name: str, request: pytest.FixtureRequest) -> None:
    """A change of the templates shows here; ``make goldens`` accepts it."""
    path = GOLDEN / f"{name}.cu"
    assert path.read_text() == render(GOLDENS[name])  # type: ignore[arg-type]


def test_records_of_one_text_share_one_name() -> None:
    texts: dict[str, str] = {}
    for record in catalog.load(places.shipped("configs") / "kernels.jsonl")[::7]:
        text = render(record)
        assert texts.setdefault(record.name, text) == text


def test_templates_follow_their_rules(checkout: Path) -> None:
    """Of kernels: at most one level of `if` in a macro, no include, explicit arguments."""
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
        (GOLDEN / f"{golden}.cu").write_text(render(golden_record))  # type: ignore[arg-type]
