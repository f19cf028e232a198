"""The facts of the type of A, B and D, against NumPy and torch, and that nobody else spells them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cudal2gen.correctness import operands
from cudal2gen.element import BF16, ELEMENTS, F16, F32, Element, element_of, output_of
from cudal2gen.kernel import Problem, Record
from cudal2gen.renderer import render
from tests.paths import PATHS

# Who names the type beside the table: the launcher's own table, and those of NumPy that are the emulator's.
SPELLED = (
    r"\bb?float16\b|CUDA_R_16B?F|TYPE_B?FLOAT16|\bhalf2?( const)?[*&]|__(nv_)?b?float\w*half|__half|cuda_[bf]p?16|"
    r"__nv_bfloat|\.half\(\)(?!`)"
)
# The table, the launcher, what takes programs of any type, and vendors' headers that such programs include.
SPELLS = {"grading", "element.py", "launch.h", "triton_matmul.py", "emulator", "cublas_v2.h"}


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


def test_a_text_has_the_type_from_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(
        F16, name="other", title="other", header="other.h", cpp="other", pair="other2",
        from_floats="from_floats", from_float2="from_float2", to_float2="to_float2",
    )  # fmt: skip
    monkeypatch.setattr(Problem, "element", other)
    facts = Record.__dict__["launch_facts"].fget  # no launcher has the other type
    monkeypatch.setattr(Record, "launch_facts", property(lambda record: facts(record) | {"element": F16.name}))
    for record in (record for record in PATHS.values() if record.acc == "f32"):
        assert record.element is other
        text = render(record)
        assert "other" in text
        assert not (match := re.search(SPELLED + r"|F16|\bfp16|\.f16", text)), match


def test_a_new_type_of_a_and_b_touches_four_files(checkout: Path) -> None:
    """Those in which the name of one stands, as ARCHITECTURE.md lists them. Rooms that take programs of any type have
    tables of their own."""
    others = {"emulator", "checking", "grading", "triton_emulation"}
    package = checkout / "cudal2gen"
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    own = [path for path in files if path.relative_to(package).parts[0] not in others]
    named = {path.name for path in own if re.search(r'"bf16"|AB_BF16', path.read_text())}
    assert named == {"element.py", "launch.h", "cudal2gen.h", "pack.cpp"}
    lines = (checkout / "ARCHITECTURE.md").read_text().splitlines()
    (listed,) = (line for line in lines if line.startswith("A new type of A and B"))
    assert all(f"`{name.removesuffix('.py')}`" in listed for name in named)


def test_only_the_table_names_the_type(checkout: Path) -> None:
    package, templates = checkout / "cudal2gen", checkout / "templates"
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    for path in [*files, *templates.rglob("*.j2")]:
        if not {path.name, path.relative_to(checkout).parts[1]} & SPELLS:
            assert not (match := re.search(SPELLED, path.read_text())), f"{path} spells {match and match[0]}"
