"""Proves what contracts mean, and that a wrong contract is refused with one sentence that names the field."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kernelproof.certificates import by_contract
from kernelproof.certificates.contract_file import load
from kernelproof.certificates.formulas import number, polynomial
from kernelproof.certificates.polynomials import Polynomial
from kernelproof.cli import app
from kernelproof.ground.errors import WrongInput
from tests.kernelproof.certificates.subjects import PRODUCT, ROW_SUM, ROW_SUM_CODE, Subject, product, row_sum
from tests.kernelproof.emulator.build import stable_file

# The field that the message names, a part of the contract, and its replacement.
WRONG = [
    ("result", "A(i,k) B(j,k)", "A(i,k) + B(j,k)"),
    ("result", "D(i,j) = sum", "D(i,k) = sum"),
    ("result", "D(i,j) = sum over k", "D(i,j) = sum over j"),
    ("result", "B(j,k)", "C(j,k)"),
    ("result", "B(j,k)", "B(j,j)"),
    ("operands.B.shape", '"n", "k"] }\nD', '"n"] }\nD'),
    ("operands.B.shape", 'B = { type = "f16", shape = ["n", "k"] }', 'B = { type = "f16", shape = ["k", "n"] }'),
    ("operands.A.shape", 'A = { type = "f16", shape = ["m", "k"] }', 'A = { type = "f16", shape = ["m", "q"] }'),
    ("operands.A.type", 'A = { type = "f16"', 'A = { type = "f64"'),
    ("operands", 'A = { type = "f16"', 'A = { type = "bf16"'),
    ("operands", "D = {", "E = {"),
    ("sizes.m", "m = { multiple = 128 }", "m = { multiple = 128, most = 100 }"),
    ("launch.grid", "m = { multiple = 128 }", "m = { multiple = 64 }"),
    ("sizes.m.multiple", "m = { multiple = 128 }", "m = { multiple = 0 }"),
    ("sizes.m.even", "m = { multiple = 128 }", "m = { even = true }"),
    ("launch.grid", '"n / 128"', '"n // 128"'),
    ("launch.grid", '"n / 128"', '"n / 256"'),
    ("launch.grid", '"n / 128"', '"q / 128"'),
    ("launch.grid", '"n / 128"', '"__import__(0)"'),
    ("launch.grid", '"n / 128", "m / 128"', '"n / 128 * m / 128"'),
    ("launch.block", "[128]", "[100]"),
    ("operands.D.ld", 'D = { type = "f16"', 'D = { type = "f16", ld = "2 * n"'),
    ("launch.tile", "tile = [128, 128]", ""),
    ("parameters", '"n", "k"]\nresult', '"n", "q"]\nresult'),
    ("limits", "[sizes]", 'limits = ["m < 5"]\n[sizes]'),
    ("limits", "[sizes]", 'limits = ["m <= 64"]\n[sizes]'),
    ("write TOML", "[sizes]", "[sizes"),
]


@pytest.mark.parametrize(("field", "before", "after"), WRONG)
def test_a_wrong_contract_is_refused_and_the_field_named(field: str, before: str, after: str) -> None:
    subject = Subject("", PRODUCT).revise_contract(before, after)
    with pytest.raises(WrongInput, match=r"contract\.toml") as error:
        assert subject.contract is None
    assert field in str(error.value)
    assert "\n" not in str(error.value)


def test_a_kernel_with_other_parameters_is_refused() -> None:
    subject = product().revise_contract('"m", "n", "k"]\n', '"m", "n"]\n')
    with pytest.raises(WrongInput, match="parameters"):
        by_contract.prove(subject.ptx, subject.contract)


def command(*arguments: object) -> tuple[int, str]:
    """The exit code and the output of the command line, followed by its exception if there was one."""
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    return result.exit_code, result.output if result.exception is None else f"{result.output}{result.exception}"


@pytest.mark.parametrize("name", ["row_sums", "sum", "row_sum "])
def test_a_kernel_with_another_name_is_wrong_input_and_no_refutation(name: str) -> None:
    subject = row_sum().revise_contract('kernel = "row_sum"', f'kernel = "{name}"')
    with pytest.raises(WrongInput, match=r"kernel=.* has row_sum$"):
        by_contract.prove(subject.ptx, subject.contract)


@pytest.mark.parametrize("target", ["sm_75", "sm_52", "texmode_independent"])
def test_a_target_before_sm_80_is_wrong_input(target: str) -> None:
    subject = row_sum()
    with pytest.raises(WrongInput, match=rf"\.target {target}"):
        by_contract.prove(subject.ptx.replace(".target sm_80", f".target {target}"), subject.contract)


def test_a_file_that_is_neither_ptx_nor_cuda_source_is_wrong_input() -> None:
    other = stable_file(ROW_SUM_CODE, "row_sum.txt")
    code, text = command("prove", other, "--contract", row_sum().path)
    assert (code, "executed" in text) == (2, False)


def test_sizes_have_a_first_and_a_last_multiple() -> None:
    sizes = load(stable_file(ROW_SUM.replace("1024 }", "1024, least = 2000, most = 5000 }"), "contract.toml")).sizes
    assert (sizes["n"].first, sizes["n"].last) == (2048, 4096)
    assert (sizes["m"].first, sizes["m"].last) == (1, 1000000)


def test_a_formula_has_the_same_value_for_numbers_and_for_names() -> None:
    sizes = {"m": 384, "n": 5}
    named = {"m": Polynomial.named("tiles", 128), "n": Polynomial.named("n")}
    for formula in ("m / 128 * n", "(m - 128) / 64 + n", "2 * (m / 128 - n)", 7, "m"):
        whole = polynomial(formula, named).substituted("tiles", Polynomial.of(3)).substituted("n", Polynomial.of(5))
        assert whole.constant == number(formula, sizes)
    for formula in ("m / 256", "n / 2", "m / n", "-m", "m ** 2", "f(m)", "m if m else n", "", "m" * 300):
        with pytest.raises(WrongInput):
            polynomial(formula, named)
