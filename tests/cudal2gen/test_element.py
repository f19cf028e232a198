"""Proves the facts of operand types against NumPy and torch, and that no other module spells them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cudal2gen.generation.renderer import render
from cudal2gen.kernel import FAMILIES, IllegalRecord, Problem, Sm90Wgmma, revise
from cudal2gen.kernel.launch import Sizes
from cudal2gen.launch.operands import draw
from cudal2gen.timing.model import estimate, floor
from cudal2gen.validator.correctness import INPUTS, library, operands
from cudal2gen.validator.problems import stress_shapes, strides
from kernelproof.ground.element import BF16, ELEMENTS, F16, F32, Element, element_of, output_of
from tests.cudal2gen.paths import PATHS, ring

# A type may be named outside the table only in the launcher's own table and in the emulator's tables of NumPy types.
TYPE_NAMES = (
    r"\bb?float16\b|CUDA_R_16B?F|TYPE_B?FLOAT16|\bhalf2?( const)?[*&]|__(nv_)?b?float\w*half|__half|cuda_[bf]p?16|"
    r"__nv_bfloat|\.half\(\)(?!`)"
)
# Files and folders that may name types: the table, the launcher, code that takes programs of any type, and vendors'
# headers that such programs include.
MAY_NAME_TYPES = {"grading", "element.py", "launch.h", "triton_matmul.py", "emulator", "cublas_v2.h"}


@pytest.mark.parametrize("element", [*ELEMENTS.values(), F32], ids=[*ELEMENTS, "f32"])
def test_facts_follow_from_the_bits_of_significand_and_exponent(element: Element) -> None:
    facts = torch.finfo(element.torch_dtype)
    assert element.bytes == facts.bits // 8
    assert element.unit_roundoff == facts.eps / 2
    assert element.least_error == facts.smallest_normal * facts.eps / 2
    every = torch.tensor([element.exact - 1, element.exact, element.exact + 1], dtype=torch.float64)
    assert every.to(element.torch_dtype).double().tolist() == [element.exact - 1, element.exact, element.exact]


@pytest.mark.parametrize("element", [*ELEMENTS.values(), F32], ids=[*ELEMENTS, "f32"])
def test_bits_are_those_of_torch(element: Element) -> None:
    for number in (1, 2, 3, 0.375, element.exact):
        spelled = torch.frombuffer(bytearray(element.spell(number)), dtype=element.torch_dtype)
        assert spelled.tolist() == [number]
    bits = torch.tensor([element.nan, *element.poisons, element.canary]).to(getattr(torch, element.bits))
    assert bits.view(element.torch_dtype).isnan().tolist() == [True, True, False, False]
    assert len(set(bits.tolist())) == 4


def test_an_array_has_the_element_of_its_type() -> None:
    for element in ELEMENTS.values():
        tensor = torch.zeros(1, dtype=element.torch_dtype)
        assert element_of(np.zeros(1, element.numpy_dtype)) is element_of(tensor) is output_of(tensor) is element
        for rng in (np.random.default_rng(0), torch.Generator().manual_seed(0)):
            assert {element_of(matrix) for matrix in operands("normal", 4, 4, 4, rng, element)} == {element}
    assert output_of(np.zeros(1, np.float32)) is output_of(torch.zeros(1)) is F32
    with pytest.raises(TypeError, match="expected float16 or bfloat16, got float64"):
        element_of(np.zeros(1))
    with pytest.raises(TypeError, match=r"expected torch\.float16 or torch\.bfloat16, got torch\.float32"):
        element_of(torch.zeros(1))


def test_numpy_and_torch_round_to_an_element_alike() -> None:
    numbers = np.linspace(-3, 3, 4097, dtype=np.float32)
    for element in (F16, BF16):
        rounded = torch.from_numpy(numbers).to(element.torch_dtype).float().numpy()
        assert (numbers.astype(element.numpy_dtype).astype(np.float32) == rounded).all()


@pytest.mark.slow
def test_a_text_has_the_type_from_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(
        F16, name="other", title="other", header="other.h", cpp="other", pair="other2",
        from_floats="from_floats", from_float2="from_float2", to_float2="to_float2",
    )  # fmt: skip
    monkeypatch.setattr(Problem, "element", other)
    for record in (record for record in PATHS.values() if record.acc == "f32"):
        assert record.element is other
        text = render(record)
        assert "other" in text
        assert not (match := re.search(TYPE_NAMES + r"|F16|\bfp16|\.f16", text)), match


# A made-up type of 8 bits, and fields of a record that is legal for it.
NARROW = replace(
    F16, name="narrow", dtype="float8_e4m3fn", significand=4, exponent=4, outputs=("f32",), half_sums=False,
    to_float2="",
)  # fmt: skip
DEEP: dict[str, Any] = {"acc": "f32", "d": "f32", "n": 144, "bk": 128}


def test_a_record_has_the_width_from_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a type of half the width, vectors, chunks and MMAs have twice as many elements, in the same bytes and
    time."""

    def facts(record: Sm90Wgmma) -> tuple[Any, ...]:
        launch, time = record.launch, (estimate(record).bounds_us["mma"], floor(record.problem).compute_us)
        boxes = (launch.box_a_rows, launch.box_b_rows, launch.box_d_cols, launch.box_d_rows)
        return boxes, record.smem_bytes, record.step_bytes, record.work, time

    def k_extents(record: Sm90Wgmma) -> list[int]:
        launch, sizes = record.launch, Sizes(record.m, 144, record.k)
        across = revise(record, layout="nn", n=144)
        of_b, gap = strides(across, sizes).b - 144, launch.spaced(sizes).a.ld - record.k
        ks = [shape.k for shape in stress_shapes(record)]
        return [launch.bk, launch.box_a_cols, launch.box_b_cols, gap, of_b, math.gcd(*ks)]

    half = ring(**DEEP | {"bk": 64, "k": 256})
    expected, doubled = facts(half), [2 * extent for extent in k_extents(half)]
    monkeypatch.setitem(ELEMENTS, "f16", NARROW)
    monkeypatch.setattr(Sm90Wgmma, "OPERAND_BYTES", (1,))
    record = ring(**DEEP, k=512)
    assert (facts(record), k_extents(record)) == (expected, doubled)
    assert "wgmma.mma_async.sync.aligned.m64n32k32.f32.narrow.narrow" in (text := render(record))
    assert "leading dimensions multiples of 16" in text


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"bk": 64}, "bk=64: must be a multiple of 128"),
        ({"k": 328}, "k=328: must be a multiple of 16"),
        ({"d": "same"}, "d=same: must be f32 for ab=f16"),
        ({"fusion": "bias_n"}, "fusion=bias_n: must have no bias for ab=f16"),
    ],
)
def test_rules_have_the_width_from_the_type(
    fields: dict[str, Any], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setitem(ELEMENTS, "f16", NARROW)
    monkeypatch.setattr(Sm90Wgmma, "OPERAND_BYTES", (1,))
    with pytest.raises(IllegalRecord, match=rule):
        ring(**DEEP | {"k": 512} | fields)
    existing = [d for d in ("same", "f32") for acc in ("f16", "f32") if Problem.exists("f16", d, acc)]
    assert existing == ["f32"]


@pytest.mark.parametrize("inputs", INPUTS)
def test_operands_of_8_bits_are_drawn_by_both_libraries(inputs: str) -> None:
    for rng in (np.random.default_rng(0), torch.Generator().manual_seed(0)):
        a, b = operands(inputs, 16, 16, 64, rng, NARROW)
        assert a.dtype in (NARROW.numpy_dtype, NARROW.torch_dtype)
        if inputs == "cancelling":
            wide_a, wide_b = library(a).wide(a), library(b).wide(b)
            assert abs(wide_a).max() > 16
            assert abs(wide_a @ wide_b.T).max() == 0


def test_a_problem_of_8_bits_has_normal_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    record = ring(**DEEP)
    monkeypatch.setitem(ELEMENTS, "f16", NARROW)
    (drawn,) = draw(record.problem, 1, torch.Generator().manual_seed(0), "cpu")
    assert drawn.a.dtype == drawn.b.dtype == torch.float8_e4m3fn
    assert 0.9 < float(drawn.a.float().std()) < 1.1
    assert (drawn.b_nn.float() == drawn.b.float().T).all()


def test_a_family_refuses_widths_that_its_text_does_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record for record in PATHS.values() if record.d == "f32" and record.fusion.bias == "none"]
    for name in ELEMENTS:
        monkeypatch.setitem(ELEMENTS, name, NARROW)
    assert {record.family for record in records} == set(FAMILIES) - {"cuda_source"}
    for record in records:
        with pytest.raises(IllegalRecord, match=f"^ab={record.ab}:"):
            record.at(record.problem)


def test_a_new_type_of_a_and_b_is_named_in_three_files(checkout: Path) -> None:
    """ARCHITECTURE.md lists the files that name a type of A and B. Rooms that accept programs of any type have tables
    of their own."""
    folders = (checkout / "cudal2gen", checkout / "kernelproof" / "ground")
    own = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    named = {path.name for path in own if re.search(r'"bf16"|AB_BF16', path.read_text())}
    assert named == {"element.py", "launch.h", "cudal2gen.h"}
    text = (checkout / "ARCHITECTURE.md").read_text()
    listed = text[text.index("An **operand type**") :]
    assert all(name in listed for name in named)


def test_only_the_table_names_the_type(checkout: Path) -> None:
    package, templates = checkout / "cudal2gen", checkout / "templates"
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    for path in [*files, *templates.rglob("*.j2")]:
        if not {path.name, path.relative_to(checkout).parts[1]} & MAY_NAME_TYPES:
            assert not (match := re.search(TYPE_NAMES, path.read_text())), f"{path} spells {match and match[0]}"
