"""Proves that right kernels with a contract are certified, and that kernels with a fault never are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kernelproof.certificates import NotCertified, by_contract, certificate
from kernelproof.certificates.execution import confirm
from kernelproof.certificates.polynomials import Polynomial
from kernelproof.certificates.words import Undecided
from kernelproof.cli import app
from kernelproof.emulator import mutants
from tests.draws import draw_few_by_key
from tests.kernelproof.certificates.subjects import PRODUCT, ROW_SUM_CODE, Subject, product, row_sum
from tests.kernelproof.emulator.build import ptx_of_text, stable_file

# Faults planted in kernels that sum rows: a part of the text, and its replacement.
FAULTS = {
    "a row is a float longer": ("i < n;", "i <= n;"),
    "the last iteration is missing": ("i < n;", "i < n - 1024;"),
    "an element is added twice": ("v.z + v.w", "v.z + v.z"),
    "lanes 8 to 15 are left out": ("offset = 16", "offset = 4"),
    "a lane takes another's elements": ("thread * 4", "thread / 2 * 8"),
    "one warp's sum is missing": ("lane < 8", "lane < 7"),
    "every lane stores": ("if (lane == 0) y", "if (lane < 2) y"),
    "the difference in place of the sum": ("sum += v.x", "sum -= v.x"),
}
# The faults that an execution shows, so that the kernel is refuted and not only uncertified.
REFUTED = (
    "a row is a float longer",
    "the last iteration is missing",
    "an element is added twice",
    "one warp's sum is missing",
)


def reason_of_refusal(subject: Subject) -> str:
    """Why a kernel is not certified; empty if it is."""
    attempt = by_contract.prove(subject.ptx, subject.contract)
    assert attempt.outcome == "certified" or attempt.why
    return attempt.why


def command(*arguments: object) -> tuple[int, str]:
    """The exit code and the output of the command line."""
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    return result.exit_code, result.output


@pytest.mark.slow
def test_sums_of_rows_are_certified_and_their_certificate_holds(tmp_path: Path) -> None:
    subject, ptx, certificate = row_sum(), tmp_path / "k.ptx", tmp_path / "c.json"
    ptx.write_text(subject.ptx)
    code, text = command("prove", ptx, "--contract", subject.path, "--json")
    assert (code, json.loads(text)["outcome"]) == (0, "certified")
    certificate.write_text(text)
    assert command("recheck", certificate, ptx)[0] == 0
    ptx.write_text(subject.ptx.replace("bar.sync", "// bar.sync"))
    assert command("recheck", certificate, ptx)[0] == 2
    assert command("recheck", ptx, ptx)[0] == 2


@pytest.mark.slow
def test_a_cuda_source_is_compiled_and_certified_and_a_fault_is_shown_at_its_line(tmp_path: Path) -> None:
    source, certificate = stable_file(ROW_SUM_CODE, "row_sum.cu"), tmp_path / "c.json"
    code, text = command("prove", source, "--contract", row_sum().path, "--json")
    assert (code, json.loads(text)["outcome"]) == (0, "certified")
    certificate.write_text(text)
    assert command("recheck", certificate, source)[0] == 0
    wrong = ROW_SUM_CODE.replace("lane < 8", "lane < 7")
    code, text = command("prove", stable_file(wrong, "row_sum.cu"), "--contract", row_sum().path, "--json")
    assert (code, json.loads(text)["outcome"]) == (1, "refuted")
    assert re.search(r"row_sum\.cu:\d+ in row_sum", text)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_sums_of_rows_with_a_fault_are_refused(fault: str) -> None:
    subject = row_sum(*FAULTS[fault])
    attempt = by_contract.prove(subject.ptx, subject.contract)
    assert attempt.outcome == ("refuted" if fault in REFUTED else attempt.outcome) != "certified"


@pytest.mark.slow
def test_an_overflow_at_large_sizes_is_refused_and_with_a_limit_there_is_none() -> None:
    assert reason_of_refusal(row_sum().revise_contract('limits = ["m * ld <= 2147483647"]\n', ""))
    assert not reason_of_refusal(row_sum().revise_contract("2147483647", "1000000"))


@pytest.mark.slow
def test_a_contract_that_promises_less_than_the_kernel_needs_is_refuted(tmp_path: Path) -> None:
    """With any ``ld`` some float4 is misaligned, which an execution shows (exit code 1). For rows of any multiple of
    512 floats nothing is proven (exit code 2)."""
    ptx = tmp_path / "k.ptx"
    ptx.write_text(row_sum().ptx)
    assert (
        command("prove", ptx, "--contract", row_sum().revise_contract("ld = { multiple = 4 }", "ld = { }").path)[0] == 1
    )
    assert (
        command("prove", ptx, "--contract", row_sum().revise_contract("multiple = 1024", "multiple = 512").path)[0] == 2
    )


@pytest.mark.slow
def test_a_sum_without_its_barrier_is_not_certified() -> None:
    assert not reason_of_refusal(row_sum())
    without = row_sum("__syncthreads();", "")
    attempt = by_contract.prove(without.ptx, without.contract)
    assert (attempt.outcome, "shared-race" in attempt.executed) == ("refuted", True)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["terms", "ring", "contract", "case"])
def test_a_changed_certificate_does_not_hold(change: str) -> None:
    """Changed are the terms of the loop's sums, the period of a ring of stages with its cases, a size in the contract,
    or the number of cases."""
    subject = row_sum()
    fields = json.loads(by_contract.prove(subject.ptx, subject.contract).model_dump_json())
    (claim,) = fields["certificate"]["claims"]
    if change == "terms":
        claim["invariant"]["terms"] = {register: step + 1024 for register, step in claim["invariant"]["terms"].items()}
    elif change == "ring":
        claim["period"] = 0
        claim["cases"] = [
            case for case in claim["cases"] if case["covers"][0].isdecimal() and "q" not in case["covers"]
        ]
    elif change == "contract":
        fields["contract"]["sizes"]["m"]["most"] = 2000000
    else:
        claim["cases"].pop()
    with pytest.raises(NotCertified):
        by_contract.recheck(by_contract.Attempt.model_validate_json(json.dumps(fields)), subject.ptx)


@pytest.mark.slow
def test_a_product_is_certified_and_its_certificate_holds() -> None:
    subject = product()
    attempt = by_contract.prove(subject.ptx, subject.contract)
    assert attempt.outcome == "certified"
    by_contract.recheck(by_contract.Attempt.model_validate_json(attempt.model_dump_json()), subject.ptx)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"n / 128", "m / 128"', '"m / 128", "n / 128"'),
        ("k = { multiple = 32 }", "k = { multiple = 16 }"),
        ("shared = 65536", "shared = 32768"),
        ('"m", "n", "k"]\n', '"n", "m", "k"]\n'),
        ('B = { type = "f16"', 'B = { type = "f16", alignment = 8'),
    ],
)
def test_a_product_is_not_what_another_contract_says(before: str, after: str) -> None:
    assert reason_of_refusal(product().revise_contract(before, after))


@pytest.mark.parametrize(("multiple", "advised"), [(1024, []), (512, ["1024"])])
def test_where_rows_end_amid_a_load_the_multiple_is_advised(
    multiple: int, advised: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 threads load 4 elements each at once."""

    def undecided(*_arguments: object) -> None:
        raise Undecided(Polynomial.of(0))

    monkeypatch.setattr(certificate, "prove", undecided)
    subject = row_sum().revise_contract("multiple = 1024", f"multiple = {multiple}")
    assert re.findall(r"n a multiple of (\d+)", reason_of_refusal(subject)) == advised


# A product that loads its fragments from global memory, a warp for each tile.
WMMA = """
#include <mma.h>
using namespace nvcuda;
extern "C" __global__ void gemm_f16(const half* a, const half* b, half* d, int m, int n, int k) {
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 16, half> fd;
  wmma::fill_fragment(fd, 0.0f);
  for (int i = 0; i < k; i += 16) {
    wmma::load_matrix_sync(fa, a + blockIdx.y * 16 * k + i, k);
    wmma::load_matrix_sync(fb, b + blockIdx.x * 16 * k + i, k);
    wmma::mma_sync(fd, fa, fb, fd);
  }
  wmma::store_matrix_sync(d + blockIdx.y * 16 * n + blockIdx.x * 16, fd, n, wmma::mem_row_major);
}
"""


@pytest.mark.slow
def test_a_product_by_wmma_is_not_certified_and_its_first_wmma_is_named() -> None:
    subject = Subject(ptx_of_text(WMMA, "sm_80"), PRODUCT)
    attempt = by_contract.prove(subject.ptx, subject.contract)
    line = 1 + next(i for i, text in enumerate(subject.ptx.splitlines()) if "wmma." in text)
    assert (attempt.outcome == "certified", f"[PTX line {line}: wmma.load." in attempt.why) == (False, True)


@pytest.mark.slow
def test_changed_sums_of_rows_are_refused_or_no_execution_fails() -> None:
    """Changes are of barriers, predicates, accesses, shuffles and sums, a few of each kind."""
    subject = row_sum()
    few = draw_few_by_key(lambda mutant: mutant.kind, list(mutants(subject.ptx, arithmetic=True)), 3)
    certified = [mutant for mutant in few if not reason_of_refusal(Subject(mutant.text, subject.text))]
    assert len(certified) < len(few) / 3, "most changes are faults"
    unproven = NotCertified("executed all the same")
    assert [each.name for each in certified if confirm(subject.contract, each.text, unproven).fault] == []
