"""Proves that kernels which detect where they run, by macros or an approximate function, are not graded as right."""

from __future__ import annotations

import numpy as np
import pytest

from kernelproof.emulator import arithmetic
from kernelproof.emulator.arithmetic.approximations import ALLOWED, HALF_ALLOWED
from kernelproof.grading import Limits, Tolerance, Verdict, check_source, elsewhere

# All tests share one text, so that it is compiled only twice: with the macros of this machine, and with other ones.
SOURCE = r"""
#include <cassert>
constexpr bool within(const char* text, const char* part) {
    for (; *text; ++text) {
        int at = 0;
        while (part[at] && text[at] == part[at]) ++at;
        if (!part[at]) return true;
    }
    return false;
}
#define PASTED(A, B) A##B
#if __has_include(<cutlass/cutlass.h>)
constexpr bool has_cutlass = true;
#else
constexpr bool has_cutlass = false;
#endif
#ifdef TORCH_EXTENSION_NAME
constexpr bool is_extension = true;
#else
constexpr bool is_extension = false;
#endif
#if __has_include(<torch/extension.h>)
constexpr bool has_torch = true;
#else
constexpr bool has_torch = false;
#endif
#if __CUDACC_VER_MAJOR__ >= 12 && __CUDA_ARCH__ >= 800
#define UNROLL _Pragma("unroll 4")
#else
#define UNROLL
#endif
__constant__ bool ASKED[] = {
    false, within(__FILE__, "torch_extensions"), __CUDACC_VER_MAJOR__ == 12, !has_cutlass, is_extension, has_torch,
    CUDART_VERSION < 13000, PASTED(__CUDACC_, VER_MINOR__) == 8, within(__DATE__, "2031"),
    within(__BASE_FILE__, "/cuda.cu"), within(__builtin_FILE(), "torch"), __GNUC_PATCHLEVEL__ == 7,
    __GLIBC_MINOR__ == 31,
};
// Wrong where the answer to question `asked` is true, which it may be for users and not for the grader.
__global__ void product(const float* a, const float* b, float* d, int n, int k, int asked) {
    assert(n > 0);
    float sum = 0;
    UNROLL
    for (int l = 0; l < k; l++) sum += a[blockIdx.x * k + l] * b[threadIdx.x * k + l];
    d[blockIdx.x * n + threadIdx.x] = ASKED[asked] ? 0.f : sum;
}
// A softmax. For p of 1 it is wrong if the sine of 0.7 is the nearest number, which no GPU is known to give. For p of 3
// and 4 it is wrong if the tanh or ex2 of 0.5 in f16 is not the nearest number.
__global__ void rows(const float* x, float* y, int n, int p) {
    float total = 0, s;
    asm volatile("sin.approx.f32 %0, %1;" : "=f"(s) : "f"(0.7f));
    for (int i = 0; i < n; i++) total += __expf(x[blockIdx.x * n + i]);
    float value = __expf(x[blockIdx.x * n + threadIdx.x]) / total;
    if (p == 1 && __float_as_int(s) == 0x3f24eb73) value *= 1.01f;
    unsigned short half;
    asm volatile("tanh.approx.f16 %0, %1;" : "=h"(half) : "h"((unsigned short)0x3800));
    if (p == 3 && half != 0x3765) value *= 1.01f;
    asm volatile("ex2.approx.f16 %0, %1;" : "=h"(half) : "h"((unsigned short)0x3800));
    if (p == 4 && half != 0x3da8) value *= 1.01f;
    if (p == 2) asm("tanh.approx.f32 %0, %0;" : "+f"(value));
    y[blockIdx.x * n + threadIdx.x] = value;
}
"""


def product(asked: int) -> Verdict:
    """The verdict on a product that is zero if question ``asked`` of ``ASKED`` is true for the compiler. Question 0 is
    always false."""
    return check_source(
        SOURCE, lambda a, b: a @ b.T, [{"m": 8, "n": 16, "k": 24}], limits=Limits(isolated=False),
        buffers={"a": "in:f32[m, k]", "b": "in:f32[n, k]", "d": "out:f32[m, n]"}, tolerance=Tolerance(terms="k"),
        launches=[{"entry": "product", "grid": "m", "block": "n", "args": ["a", "b", "d", "n", "k", asked]}],
    )  # fmt: skip


def softmax(trick: int) -> Verdict:
    """The verdict on a softmax that depends on an approximate instruction.

    ``trick``, which is the kernel's argument p: 0 for none; 1, 3, 4 for a result that is multiplied by 1.01 depending
    on sin of f32, tanh of f16 or ex2 of f16; 2 for the tanh of the softmax as the result.
    """

    def reference(x: np.ndarray) -> np.ndarray:
        shares = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
        return np.tanh(shares) if trick == 2 else shares

    return check_source(
        SOURCE, reference, [{"m": 6, "n": 32}], limits=Limits(isolated=False), kinds=["normal"],
        buffers={"x": "in:f32[m, n]", "y": "out:f32[m, n]"}, operands="any", accumulator="any",
        launches=[{"entry": "rows", "grid": "m", "block": "n", "args": ["x", "y", "n", trick]}],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("asked", range(13))
def test_answers_of_the_compiler_change_no_result(asked: int) -> None:
    verdict = product(asked)
    assert verdict.rules == ({"environment-dependent"} if asked else set()), str(verdict)


@pytest.mark.slow
def test_errors_of_approximations_change_no_result() -> None:
    assert softmax(0).right, str(softmax(0))
    for probed in (1, 3, 4):
        assert softmax(probed).rules & {"environment-dependent", "wrong-value"}, probed
    # The tolerance leaves no room for the error of tanh.approx itself.
    narrow = softmax(2)
    assert narrow.rules <= {"wrong-value", "environment-dependent"}, str(narrow)
    assert not narrow.right


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_drawn_errors_are_within_what_is_allowed(name: str) -> None:
    """Errors depend on the seed alone, keep the bound, and make use of it: one is above 40 % of the bound.

    Seed 0 means no errors. Results that hardware computes exactly have none with any seed.
    """
    exact = np.random.default_rng(3).uniform(-1, 1, 4000).astype(np.float32)
    allowance = ALLOWED[name]
    once, again, other = (arithmetic.inexact(name, exact, seed) for seed in (7, 7, 8))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)
    half_ulp = np.spacing(np.abs(exact)) / 2  # the largest error of the last rounding
    errors = np.abs(once.astype(np.float64) - exact)
    assert (errors <= allowance.relative * np.abs(exact) + allowance.absolute + half_ulp).all()
    assert (errors > 0.4 * (allowance.relative * np.abs(exact) + allowance.absolute)).any()
    assert arithmetic.inexact(name, exact, 0) is exact
    special = np.array([0, -0.0, np.inf, -np.inf, 1, -1, 0.5, np.nan], np.float32)
    assert np.array_equal(arithmetic.inexact(name, special, 7), special, equal_nan=True)


@pytest.mark.parametrize(("name", "kind"), sorted(HALF_ALLOWED))
def test_drawn_errors_of_halves_are_within_what_is_allowed(name: str, kind: str) -> None:
    """Two seeds give more than 5 % of the results different values, and errors beyond those of rounding alone."""
    function = {"ex2": np.exp2, "tanh": np.tanh}[name]
    operands = np.random.default_rng(4).uniform(-3, 3, 4000).astype(np.float16)
    operands = (
        operands if kind == "f16" else arithmetic.bf16_to_f32(arithmetic.f64_to_bf16(operands.astype(np.float64)))
    )
    exact = function(operands.astype(np.float64))

    def rounded(seed: int) -> np.ndarray:
        out = arithmetic.half_approximation(name, kind, False, seed)(operands).astype(np.float64)
        return out if kind == "f16" else arithmetic.bf16_to_f32(arithmetic.f64_to_bf16(out)).astype(np.float64)

    once, again, other, none = map(rounded, (7, 7, 8, 0))
    assert np.array_equal(once, again)
    assert (once != other).mean() > 0.05
    relative, absolute = HALF_ALLOWED[name, kind]
    errors = np.abs(once - exact)
    assert (errors <= np.minimum(relative * np.abs(exact), absolute)).all()
    assert errors.max() > np.abs(none - exact).max()
    special = np.array([0, np.inf, -np.inf, np.nan], operands.dtype)
    function = arithmetic.half_approximation(name, kind, False, 7)
    plain = arithmetic.half_approximation(name, kind, False, 0)
    assert np.array_equal(function(special), plain(special), equal_nan=True)


@pytest.mark.parametrize(
    ("text", "asks"),
    [("__global__ void f(float* x) { x[0] = 1 / 2; }", False), ("#include <cuda_fp16.h>\n#pragma once\n", False)]
    + [(text, True) for text in ("__FI\\\nLE__", "# ifdef A", "%: if 1", "x = __CUDACC_VER_MINOR__;", "a ## b")],
)
def test_which_texts_may_query_the_machine(text: str, asks: bool) -> None:
    assert elsewhere.may_query_machine(text) == asks
