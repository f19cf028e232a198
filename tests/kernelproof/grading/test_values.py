"""Proves that shortcuts for planted values and too narrow sums are found, and products in several parts are not
accused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.grading import Limits, Tolerance, Verdict, check_source
from kernelproof.grading.constants import compared_constants
from kernelproof.grading.device import _initial

# All tests share one text, so that it is compiled once.
SOURCE = """
#include <cuda_fp16.h>
template <int P> __device__ bool shortcut(const float* a, const float* b, int m, int n, int k) {
    if (P == 1) return a[0] == 0.12345f;
    if (P == 2) { bool all = true; for (int l = 0; l < 8; l++) all &= a[l] == 0.f; return all; }
    if (P == 3) { for (int i = 0; i < m; i++) { bool all = true; for (int l = 0; l < k; l++) all &= a[i * k + l] == 0.f;
                                                if (all) return true; } }
    if (P == 4) { for (int i = 1; i < m; i++) if (a[i * k] != a[0]) return false; return true; }
    if (P == 5) return __float_as_int(b[1]) == 0x3f9d7000;
    return false;
}
template <int P> __global__ void product(const float* a, const float* b, float* d, int m, int n, int k) {
    int i = blockIdx.x, j = threadIdx.x;
    float sum = 0;
    for (int l = 0; l < k; l++) sum += a[i * k + l] * b[j * k + l];
    d[i * n + j] = shortcut<P>(a, b, m, n, k) ? 0.f : sum;
}
__device__ unsigned tf32(float x) { unsigned y; asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x)); return y; }
// A product on tensor cores, whose operands are split into as many parts as they need for fp32, or into one.
template <int PARTS> __global__ void split(const float* a, const float* b, float* d, int m, int n, int k) {
    int lane = threadIdx.x, row = blockIdx.x * 16 + lane / 4, column = blockIdx.y * 8;
    float c[4] = {0, 0, 0, 0};
    for (int l = 0; l < k; l += 8) {
        float all[6] = {
            a[row * k + l + lane % 4], a[(row + 8) * k + l + lane % 4], a[row * k + l + 4 + lane % 4],
            a[(row + 8) * k + l + 4 + lane % 4], b[(column + lane / 4) * k + l + lane % 4],
            b[(column + lane / 4) * k + l + 4 + lane % 4]};
        unsigned big[6], small[6];
        for (int e = 0; e < 6; e++) big[e] = tf32(all[e]), small[e] = tf32(all[e] - __uint_as_float(big[e]));
        auto multiply = [&](const unsigned* x, const unsigned* y) {
            asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, "
                "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[4]), "r"(y[5]));
        };
        if (PARTS > 1) { multiply(small, big); multiply(big, small); }
        multiply(big, big);
    }
    for (int e = 0; e < 4; e++) d[(row + e / 2 * 8) * n + column + lane % 4 * 2 + e % 2] = c[e];
}
// What a kernel can read of its machine: an emulator's clocks begin at zero, its SMs are CTAs, its buffers are close.
template <int P> __global__ void machine(const float* a, const float* b, float* d, int m, int n, int k) {
    long long clock; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(clock));
    unsigned sm, grid; asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
    asm volatile("mov.u32 %0, %gridid;" : "=r"(grid));
    __shared__ int shared;
    if (P == 7) d[0] = (unsigned long long)&shared >> 40;  // where the device has its window of shared memory
    bool known = P == 1 ? clock < 1000000 : P == 2 ? clock64() < 1000000 : P == 3 ? sm == blockIdx.x % 108
               : P == 4 ? grid == 0 : P == 5 ? (char*)b - (char*)a == 8192 : P == 6 ? sm % 2 : false;
    float sum = 0;
    for (int l = 0; l < k; l++) sum += a[blockIdx.x * k + l] * b[threadIdx.x * k + l];
    d[blockIdx.x * n + threadIdx.x] = known ? sum : P ? sum * 1.0001f : sum;
}
template <class T> __global__ void row_sum(const T* a, T* y, int n) {
    T sum = 0;
    for (int i = 0; i < n; i++) sum = sum + a[blockIdx.x * n + i];
    y[blockIdx.x] = sum;
}
__global__ void flushed(const __half* a, __half* y, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) {
        sum += __half2float(a[blockIdx.x * n + i]);
        if (i % 8 == 7) sum = __half2float(__float2half(sum));
    }
    y[blockIdx.x] = __float2half(sum);
}
__global__ void honest_sum(const __half* a, __half* y, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += __half2float(a[blockIdx.x * n + i]);
    y[blockIdx.x] = __float2half(sum);
}
"""


def product(entry: str, grid: str = "m", block: Any = "n", **options: Any) -> Verdict:
    """The verdict on a kernel as a product in fp32."""
    return check_source(
        SOURCE, lambda a, b: a @ b.T, [{"m": 16, "n": 24, "k": 64}], limits=Limits(isolated=False),
        buffers={"a": "in:f32[m, k]", "b": "in:f32[n, k]", "d": "out:f32[m, n]"}, tolerance=Tolerance(terms="k"),
        launches=[{"entry": entry, "grid": grid, "block": block, "args": ["a", "b", "d", "m", "n", "k"]}], **options,
    )  # fmt: skip


def row_sum(entry: str) -> Verdict:
    """The verdict on a kernel as the sum of rows of fp16."""
    return check_source(
        SOURCE, lambda a: a.sum(axis=1), [{"m": 24, "n": 256}], limits=Limits(isolated=False),
        buffers={"a": "in:f16[m, n]", "y": "out:f16[m]"}, tolerance=Tolerance(terms="n"),
        launches=[{"entry": entry, "grid": "m", "block": 1, "args": ["a", "y", "n"]}],
    )  # fmt: skip


@pytest.mark.slow
def test_an_instance_of_a_template_is_launched_by_its_name() -> None:
    verdict = product("product<0>")
    assert verdict.right, str(verdict)
    assert "wrong-signature" in product("product<float>").rules | product("no_such<0>").rules


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("shortcut", [1, 2, 3, 4, 5])
def test_a_shortcut_for_planted_values_is_a_wrong_value(shortcut: int) -> None:
    verdict = product(f"product<{shortcut}>")
    assert "wrong-value" in verdict.rules, str(verdict)
    kinds = {str(item.evidence.get("inputs")) for item in verdict.findings if item.rule == "wrong-value"}
    assert kinds <= {"zero rows", "equal rows", "constants", "zeros", "ones", "binary", "integers"}


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("reading", range(8))
def test_results_that_depend_on_the_machine(reading: int) -> None:
    """A kernel that is right only where it recognises an emulator is graded as wrong, or as dependent on its
    environment."""
    verdict = product(f"machine<{reading}>")
    assert verdict.right == (reading == 0), str(verdict)
    assert {"wrong-value", "environment-dependent"} & verdict.rules or not reading
    assert "environment-dependent" in verdict.rules or reading < 6


@pytest.mark.slow
def test_products_in_several_parts_are_as_precise_as_required() -> None:
    whole = product("split<2>", "m // 16, n // 8", 32)
    assert whole.right, str(whole)
    assert "lower-precision" in product("split<1>", "m // 16, n // 8", 32).rules


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "right"), [("honest_sum", True), ("row_sum<__half>", False), ("flushed", False)])
def test_sums_are_judged_by_their_errors(entry: str, right: bool) -> None:
    verdict = row_sum(entry)
    assert verdict.right == right, str(verdict)
    assert right or {"lower-precision", "wrong-value"} & verdict.rules


def test_constants_of_comparisons_are_read_from_ptx() -> None:
    text = """
    setp.eq.f32 %p1, %f1, 0f3DFCD35B;
    setp.neu.f64 %p2, %fd1, 0d3FF8000000000000;
    setp.eq.s32 %p3, %r1, 1065353216;
    setp.lt.f32 %p4, %f2, 0f7F800000;
    setp.ge.s32 %p5, %r1, 0;
    setp.gt.f32 %p6, %f2, %f3;
    """
    assert compared_constants(text) == pytest.approx((0.12345, 1.5, 1.0))
    by_registers = """
    mov.b16 %rs1, 0x3800;
    mov.f32 %f9, 0f3F000000;
    mov.b32 %r7, 1077936128;
    setp.eq.f16 %p1, %rs4, %rs1;
    setp.eq.bf16 %p1, %rs4, 16416;
    set.eq.u32.f32 %r1, %f2, %f9;
    setp.eq.u32 %p3|%p4, %r9, %r7;
    setp.eq.s16 %p5, %rs4, 15616;
    """
    assert compared_constants(by_registers) == pytest.approx((0.5, 2.5, 3.0, 1.25, 0.03125))
    assert not np.isnan(compared_constants("setp.eq.f32 %p1, %f1, 0f7FC00000;")).any()


VARIABLES = """
.version 8.0
.target sm_80
.address_size 64
.visible .global .align 4 .u32 numbers[3] = {1, 515};
.visible .global .align 8 .u64 zeros[2];
.visible .global .align 8 .u64 pointers[3] = {numbers, 7, zeros+8};
.visible .entry k() {
  .reg .u64 %a; .reg .u32 %v;
  mov.u64 %a, numbers; mov.u64 %a, zeros; mov.u64 %a, pointers;
  mov.u32 %v, 9; CHANGE
  ret;
}
"""


@pytest.mark.parametrize("changed", ["", "numbers", "zeros", "pointers"])
def test_a_variable_is_changed_where_it_differs_from_what_was_loaded(changed: str) -> None:
    text = VARIABLES.replace("CHANGE", f"mov.u64 %a, {changed}; st.global.u32 [%a+4], %v;" if changed else "")
    program, memory = emulator.load(text), emulator.Memory()
    assert program.launch("k", 1, 1, [], memory=memory).reports == []
    buffers = {name: buffer for (_, name), buffer in memory.globals.items()}
    assert buffers.keys() == {"numbers", "zeros", "pointers"}
    differing = {name for name, buffer in buffers.items() if (buffer.bytes() != _initial(program, name, buffer)).any()}
    # Pointers differ from launch to launch, so that what a kernel writes beside them is not known.
    assert differing == {changed} - {"", "pointers"}
