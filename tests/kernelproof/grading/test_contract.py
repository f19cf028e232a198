"""Proves that descriptions of launches (expressions, buffers, references, floors) are evaluated as documented, and that
wrong ones are refused with a message."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import kernelproof
from kernelproof import cli
from kernelproof.grading import (
    RULES,
    ContractLaunch,
    Finding,
    Limits,
    Tolerance,
    Verdict,
    check_source,
    description,
    inputs,
)
from kernelproof.grading.contract import buffer, parse_contract, struct
from kernelproof.grading.expressions import extents, value
from kernelproof.grading.floor import chip, floor
from kernelproof.ground.errors import WrongInput
from tests.kernelproof.grading import programs
from tests.kernelproof.grading.honest import PROGRAMS

# A shape; limits by which programs are executed in this process; and the contract of a kernel that adds two vectors.
SHAPE = {"m": 33, "n": 40}
IN_PROCESS = Limits(isolated=False)
ADD = {
    "buffers": {"x": "in:f32[n]", "y": "in:f32[n]", "z": "out:f32[n]"},
    "launches": [{"entry": "add_f32", "grid": "ceil_div(n, 64)", "block": 64, "args": ["x", "y", "z", "n"]}],
    "limits": IN_PROCESS,
}


def verdict_of_add(reference: Any = np.add, shapes: Any = ({"n": 100},), **changes: Any) -> Verdict:
    """The verdict on the honest kernel that adds vectors if its contract is changed."""
    return check_source(programs.text("honest.cu"), reference, shapes, **{**ADD, **changes})


@pytest.mark.parametrize(
    ("number", "expected"),
    [("ceil_div(m, 16)", 3), ("2 * m * n", 2640), (lambda n: n // 2, 20), (7, 7), ("m if m > n else n", 40)],
)
def test_numbers_follow_the_shape(number: Any, expected: int) -> None:
    assert value(number, SHAPE) == expected


@pytest.mark.parametrize(
    "number", ["q", "__import__('os')", "m.real", "n ** 1000", "m // 0", "[m for m in (1,)]", lambda q: q]
)
def test_other_expressions_are_refused(number: Any) -> None:
    with pytest.raises(WrongInput):
        value(number, SHAPE)


def test_extents() -> None:
    assert extents("ceil_div(n, 16), m", SHAPE) == (3, 33)
    assert extents(["n", 2], SHAPE) == (40, 2)
    with pytest.raises(WrongInput, match="positive"):
        extents("n - 40", SHAPE)


@pytest.mark.parametrize("text", ["in:f32", "into:f32[n]", "in:f33[n]", "in:f32[n]=zeros", "out:f32[]"])
def test_texts_that_describe_no_buffer_are_refused(text: str) -> None:
    with pytest.raises(WrongInput):
        buffer("x", text)


@pytest.mark.slow
def test_a_reference_gets_what_its_parameters_name() -> None:
    assert verdict_of_add(lambda y, x: x + y).right
    assert verdict_of_add(lambda x, y, n: x + y + 0 * n).right
    assert verdict_of_add(lambda *both: both[0] + both[1]).right
    assert verdict_of_add(lambda x, y: {"z": x + y}).right
    assert not verdict_of_add(lambda x, y: x - y).right


@pytest.mark.slow
def test_a_reference_of_torch() -> None:
    torch = pytest.importorskip("torch")
    assert verdict_of_add(torch.add, arrays="torch").right


@pytest.mark.parametrize(
    "changes",
    [
        {"reference": lambda x, y: x[:3]}, {"reference": lambda x, y: (x, y)}, {"reference": lambda q: q},
        {"shapes": []},
        {"shapes": [(1, 2)]}, {"launches": []}, {"claimed_us": 3.0}, {"kinds": ["odd"]}, {"gpu": "a1000"},
        {"buffers": {"x": "in:f32[n]"}}, {"draws": {"q": (1, 2)}}, {"launches": [{"entry": "add_f32"}]},
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(WrongInput):
        verdict_of_add(**changes)


def test_tuples_take_names() -> None:
    assert verdict_of_add(shapes=[(100,), (31,)], names=["n"]).shapes == [{"n": 100}, {"n": 31}]


def test_verdicts_are_json() -> None:
    verdict = verdict_of_add(lambda x, y: x - y, gpu="h200", claimed_us=5.0)
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict
    assert verdict.findings[0].evidence["count"] == 100
    assert verdict.floor_us[0] > 0
    assert "error[wrong-value]" in str(verdict)
    assert not verdict


def test_it_is_reached_from_the_package() -> None:
    assert kernelproof.check_source is check_source


@pytest.mark.slow
def test_a_source_that_does_not_compile_is_a_finding() -> None:
    verdict = check_source("__global__ void f() { nonsense }", np.add, [{"n": 4}], **ADD)
    assert verdict.rules == {"does-not-compile"}
    assert "nonsense" in verdict.findings[0].message


@pytest.mark.slow
def test_launches_that_cuda_refuses_are_wrong_and_unknown_instructions_are_not_checked() -> None:
    launch = ContractLaunch(entry="add_f32", grid=1, block=2048, args=["x", "y", "z", "n"])
    assert "launch-refused" in verdict_of_add(launches=[launch]).rules
    text = '__global__ void f(float* z) { asm volatile("tcgen05.shift.cta_group::1.down [%0];" :: "r"(0)); }'
    verdict = check_source(
        text, lambda: np.zeros(4), [{"n": 4}], buffers={"z": "out:f32[n]"},
        limits=Limits(isolated=False, device="b200"),
        launches=[{"entry": "f", "block": 32, "args": ["z"]}],
    )  # fmt: skip
    assert verdict.outcome == "not checked"
    assert "tcgen05" in verdict.not_checked[0]


@pytest.mark.parametrize(
    "launch", [{"entry": "sub_f32", "block": 32}, {"entry": "add_f32", "block": 32, "args": ["x"]}]
)
@pytest.mark.parametrize("isolated", [True, False])
def test_kernels_with_another_signature_are_wrong(launch: dict[str, Any], isolated: bool) -> None:
    verdict = verdict_of_add(launches=[launch], limits=Limits(isolated=isolated))
    assert verdict.rules == {"wrong-signature"}


def test_text_that_looks_like_ptx_is_wrong() -> None:
    verdict = check_source(".version 8.0\n.target sm_80\nnonsense", np.add, [{"n": 4}], **ADD)
    assert verdict.rules == {"does-not-compile"}


@pytest.mark.slow
def test_an_operation_may_quantise() -> None:
    text = """extern "C" __global__ void quantise(const float* x, signed char* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x, q;
        if (i >= n) return;
        asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(q) : "f"(x[i] * 16));
        y[i] = q;
    }"""
    verdict = check_source(
        text, lambda x: np.clip(np.rint(np.float32(x) * 16), -128, 127), [{"n": 300}], limits=IN_PROCESS,
        buffers={"x": "in:f32[n]", "y": "out:i8[n]"},
        launches=[{"entry": "quantise", "grid": 3, "block": 128, "args": ["x", "y", "n"]}],
    )  # fmt: skip
    assert verdict.right, str(verdict)


def test_a_product_on_a100_is_bounded_by_arithmetic() -> None:
    """A100: 312 TFLOP/s at its boost clock of 1410 MHz; the floor must not be above what that needs."""
    least = floor(chip("a100"), 2 * 8192**3, 3 * 8192**2 * 2, "f16")
    assert least.bound == "arithmetic"
    assert 0.7 * 2 * 8192**3 / 312e6 < least.us < 2 * 8192**3 / 312e6
    copy = floor(chip("a100"), 0, 4 << 30, "f32")
    assert copy.bound == "dram"
    assert 0.7 * (4 << 30) / 2.04e6 < copy.us < (4 << 30) / 2.04e6


def test_work_is_counted_from_instructions() -> None:
    program = PROGRAMS["wmma_f16_tn"]
    kernel = program.verdict(isolated=False).kernels[0]
    m, n, k = 32, 48, 64
    assert kernel.mma_flops == 2 * m * n * k
    assert kernel.name == "wmma_f16_tn"
    assert kernel.ctas == 6


@pytest.mark.slow
def test_tolerances_of_sums_are_those_of_products() -> None:
    """Whole numbers have to be exact, others within the bound of rounding each addition."""
    loose = Tolerance(absolute=1e-3)
    noisy = programs.product("f32").program("matmul_naive", reference=lambda a, b: (a @ b) * (1 + 1e-5))
    assert not noisy.verdict(isolated=False).right
    assert programs.product("f32", tolerance=loose).program(
        "matmul_naive", reference=lambda a, b: (a @ b) * (1 + 1e-5)
    ).verdict(isolated=False).right  # fmt: skip


def test_every_rule_has_a_section_and_a_hint(checkout: Path) -> None:
    text = (checkout / "docs" / "kernelproof" / "grading.md").read_text()
    assert re.findall(r"^### (.*)$", text, re.M) == list(RULES)
    assert all(rule.meaning and rule.hint for rule in RULES.values())
    assert Finding.of("unwritten-output", "").page == "rules/unwritten-output/"
    assert Finding.of("stale-result", "").page == "grading/#stale-result"


# A description in Python of a program, and its kernel.
DESCRIPTION = """
from pathlib import Path
import numpy as np
source, reference, shapes = Path("add.cu"), np.add, [{"n": 100}]
buffers = {"x": "in:f32[n]", "y": "in:f32[n]", "z": "out:f32[n]"}
launches = [{"entry": "add", "grid": "ceil_div(n, 64)", "block": 64, "args": ["x", "y", "z", "n"]}]
"""
KERNEL = """extern "C" __global__ void add(const float *x, const float *y, float *z, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) z[i] = x[i] + y[i];
}"""


@pytest.mark.slow
def test_the_verb_grades_a_description_in_python_and_in_json(tmp_path: Path) -> None:
    (tmp_path / "add.cu").write_text(KERNEL)
    (tmp_path / "half.cu").write_text(KERNEL.replace("x[i] + y[i]", "x[i]"))
    (tmp_path / "heap.cu").write_text(KERNEL.replace("int i", "if (n < 0) malloc(n); int i"))
    (tmp_path / "add.py").write_text(DESCRIPTION)
    names = {"shapes": [{"n": 100}], "buffers": ADD["buffers"], "tolerance": {"terms": 2}, "limits": {"seconds": 60}}
    launches = [{"entry": "add", "grid": 2, "block": 64, "args": ["x", "y", "z", "n"]}]
    document = {"source": "add.cu", "reference": "add.py:reference", "launches": launches, **names}
    (tmp_path / "add.json").write_text(json.dumps(document))
    (tmp_path / "other.json").write_text(json.dumps({**document, "sources": 1}))
    runner = CliRunner()

    def grade(*words: str) -> tuple[int, str]:
        paths = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in words]
        result = runner.invoke(cli.app, ["grade", *paths])
        return result.exit_code, result.output

    for words in (["add.py"], ["add.json"], ["add.py", "add.cu", "--seed", "3"]):
        assert grade(*words)[0] == 0
    code, output = grade("add.json", "half.cu", "--json")
    assert code == 1
    assert Verdict.model_validate_json(output).rules == {"wrong-value"}
    assert grade("add.py", "heap.cu")[0] == 2
    for words, message in (
        (["other.json"], "sources: no argument of check_source"),
        (["add.cu"], "describe in .py or .json"),
        (["none.py"], "none.py: No such file"),
    ):
        with pytest.raises(WrongInput, match=message):
            description.arguments(tmp_path / words[0])


@pytest.mark.parametrize(
    "kind",
    [
        "i32=3..9",
        "i64=0..2",
        "u8=7..8",
        "f32=0.5..2",
        "bf16=0.1..1",
        "f16=-1..0",
        "bf16=-3..0.7",
        "f64=0..1",
        "i16",
        "f16",
    ],
)
def test_a_changed_element_is_another_value_of_its_range(kind: str) -> None:
    format_, _, bounds = kind.partition("=")
    contract = parse_contract(
        {"x": f"in:{format_}[n]" + (f"={bounds}" if bounds else ""), "y": "out:f32[n]"},
        [{"entry": "f", "block": 1}],
        None,
    )
    low, high = (float(part) for part in bounds.split("..")) if bounds else (-np.inf, np.inf)
    rng = np.random.default_rng(6)
    item, shape = contract.buffers["x"], {"n": 4000}
    bits = inputs.draw(contract, "normal", shape, rng)
    assert ((low <= item.format.values(bits["x"])) & (item.format.values(bits["x"]) < high)).all()
    changes = inputs.changes(contract, bits, shape, rng, 30)
    assert {change.place for change in changes} >= {(0,), (3999,)}
    for change in changes:
        for factor in inputs.FACTORS:
            changed = item.format.values(inputs.changed(contract, bits, change, factor)["x"])
            differs = np.flatnonzero(changed != item.format.values(bits["x"]))
            assert (low <= changed).all()
            assert (changed < high).all()
            assert differs.tolist() == ([] if kind == "u8=7..8" else [change.place[0]])


@given(st.integers(0, 1 << 20), st.integers(1, 64))
def test_a_struct_is_the_words_that_are_listed(m: int, divisor: int) -> None:
    read = struct(f"words: m, 7, m // {divisor}", {"m": m})
    assert read == np.array([m, 7, m // divisor], "<u4").tobytes()
    assert struct("m * 2", {"m": m}) is None


@pytest.mark.parametrize("words", ["m - 2", "2 ** 32", "m / 2"])
def test_words_have_32_bits(words: str) -> None:
    with pytest.raises(WrongInput):
        struct(f"words: 1, {words}", {"m": 1})
