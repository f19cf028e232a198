"""Proves that kernels are checked by the relations that their reference satisfies, on stated and other shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from kernelproof.grading import Limits, Tolerance, Verdict, check_source, inputs, relations, shapes
from kernelproof.grading.answers import CheckedCall, Criteria
from kernelproof.grading.contract import parse_contract
from kernelproof.grading.device import Call
from kernelproof.grading.reference import Reference
from kernelproof.grading.tolerance import Precision, expected
from kernelproof.ground.errors import WrongInput

# A product that is wrong by 0.04 or 5 for inputs that a probe recognises; probe 0 recognises none. All tests share one
# text, so that it is compiled once.
SOURCE = """
__device__ const float table[2] = {0.625f, 0.3125f};
template <int P> __device__ bool probes(const float* a, const float* b, int n, int k) {
    if (P == 1) return a[0] < a[k];
    if (P == 2) return fabsf(a[3]) > 1.9f * fabsf(b[0]);
    if (P == 3) return (a[1] == 1.25f) + (a[2] == 2.5f) + (a[3] == 3.5f) + (a[4] == 4.5f) + 5 * (a[k] == 0.777f) > 4;
    if (P == 4) return a[0] * a[5] == 0.777f;
    if (P == 5) return b[k + 2] == 0.31f && a[3 * k + 1] == 0.31f;
    if (P == 6) return k != 64;
    if (P == 7) return a[0] == a[k] && a[0] != 0.f;
    if (P == 8) {
        unsigned met;
        asm("set.eq.u32.f32 %0, %1, %2;" : "=r"(met) : "f"(a[k + 2]), "f"(0.625f));
        return met;
    }
    if (P == 9) return a[0] == table[n % 2];
    if (P == 10) return a[3] == 0.12345f && a[4] == 0.5f;
    if (P == 11) return a[0] > 7.5f;
    return false;
}
template <int P> __global__ void product(const float* a, const float* b, float* d, int m, int n, int k) {
    int i = blockIdx.x, j = threadIdx.x;
    float sum = 0;
    for (int l = 0; l < k; l++) sum += a[i * k + l] * b[j * k + l];
    d[i * n + j] = sum + (probes<P>(a, b, n, k) ? P < 3 ? 0.04f : 5.f : 0.f);
}
"""
LOOSE = Tolerance(absolute=0.01, relative=0.0)


def verdict_of_product(probe: int, **options: Any) -> Verdict:
    """The verdict on the product with this probe. ``options``: further arguments of ``check_source``."""
    options = {"tolerance": Tolerance(terms="k"), **options}
    return check_source(
        SOURCE, lambda a, b: a @ b.T, [{"m": 16, "n": 24, "k": 64}], limits=Limits(isolated=False, places=2),
        buffers={"a": "in:f32[m, k]", "b": "in:f32[n, k]", "d": "out:f32[m, n]"},
        launches=[{"entry": f"product<{probe}>", "grid": "m", "block": "n", "args": ["a", "b", "d", "m", "n", "k"]}],
        **options,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("probe", [1, 2])
def test_what_is_within_a_loose_tolerance_breaks_a_relation(probe: int) -> None:
    """Which inputs get the error depends on their values, so other ones do after a permutation or scaling."""
    assert verdict_of_product(0, tolerance=LOOSE).right
    verdict = verdict_of_product(probe, tolerance=LOOSE)
    assert verdict.rules == {"broken-relation"}, str(verdict)
    for finding in verdict.findings:
        assert finding.evidence["difference"] > finding.evidence["allowed"]  # type: ignore[operator]


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("probe", [3, 5, 7, 8, 9, 10, 11])
def test_comparisons_that_draws_do_not_meet_are_aimed_at(probe: int) -> None:
    """Inputs are aimed at more constants than any program has, at two constants together, at equal rows, at comparisons
    that make no predicate, at a constant in memory, at neighbouring constants, and at a limit."""
    verdict = verdict_of_product(probe)
    kinds = {item.evidence["inputs"] for item in verdict.findings if item.rule == "wrong-value"}
    assert kinds, str(verdict)
    assert probe < 9 or any("constants" in str(kind) for kind in kinds)


@pytest.mark.slow
def test_what_no_draw_has_executed_is_said() -> None:
    verdict = verdict_of_product(4)
    line = next(number for number, text in enumerate(SOURCE.splitlines(), 1) if "P == 4" in text)
    assert verdict.right, str(verdict)
    assert any(f"line {line}" in remark for remark in verdict.remarks), verdict.remarks
    assert verdict_of_product(0).remarks == []


@pytest.mark.slow
def test_another_shape_than_the_stated_ones_is_drawn() -> None:
    verdict = verdict_of_product(6)
    assert verdict.right
    assert any("not right on" in remark for remark in verdict.remarks), verdict.remarks
    assert not verdict_of_product(6, draws={}).remarks
    assert "shape-special-case" in verdict_of_product(6, draws={"k": (32, 63)}).rules
    assert verdict_of_product(0).calls == verdict_of_product(0, draws={}).calls + 2


def test_drawn_shapes_are_no_larger_than_stated_ones_and_share_their_divisors() -> None:
    for seed in range(40):
        one = shapes.unstated_shape([{"m": 64, "k": 3, "n": 37}], seed)
        assert one is not None
        assert one["k"] == 3
        assert one["m"] in (32, 48)
        assert 18 <= one["n"] < 37
        many = shapes.unstated_shape([{"m": 24, "n": 5}, {"m": 72, "n": 50}, {"m": 96, "n": 10}], seed)
        assert many is not None
        assert many["m"] in (48,)
        assert many["n"] == 5
    assert shapes.unstated_shape([{"m": 8}], 0) is None
    assert shapes.unstated_shape([{"m": 64}, {"m": 128}], 0) is None


def test_shapes_are_drawn_from_the_ranges_and_one_is_odd() -> None:
    for seed in range(40):
        anywhere, odd = shapes.drawn_shapes({"m": 64, "n": 32, "k": 7}, {"m": (10, 20), "n": (4, 4)}, seed)
        for shape in (anywhere, odd):
            assert 10 <= shape["m"] <= 20
            assert (shape["n"], shape["k"]) == (4, 7)
        assert odd["m"] % 2
        assert shapes.drawn_shapes({"m": 64}, {"m": (10, 20)}, seed) == shapes.drawn_shapes(
            {"m": 64}, {"m": (10, 20)}, seed
        )
    assert len({shapes.drawn_shapes({"m": 64}, {"m": (10, 2000)}, seed)[0]["m"] for seed in range(40)}) > 30
    assert shapes.drawn_shapes({"m": 64}, {}, 0) == []
    with pytest.raises(WrongInput):
        shapes.drawn_shapes({"m": 64}, {"x": (1, 2)}, 0)


# --- which relations hold ---

# By name: a shape, the buffers, the reference, and the relations that hold for it.
FORMS: dict[str, tuple[dict[str, int], Mapping[str, str], Callable[..., Any], set[str]]] = {
    "product": (
        {"m": 5, "n": 6, "k": 7}, {"a": "in:f16[m, k]", "b": "in:f16[k, n]", "d": "out:f32[m, n]"},
        lambda a, b: a @ b, {"along m, n, k", "scaled a, b", "repeated along m, n"},
    ),
    "softmax": (
        {"m": 5, "n": 6}, {"x": "in:f32[m, n]", "y": "out:f32[m, n]"},
        lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True), {"along m, n", "repeated along m"},
    ),
    "norm": (
        {"m": 5, "n": 6}, {"x": "in:f32[m, n]", "w": "in:f32[n]", "y": "out:f32[m, n]"},
        lambda x, w: x / np.sqrt((x * x).mean(1, keepdims=True)) * w,
        {"along m, n", "scaled x, w", "repeated along m"},
    ),
    "convolution": (
        {"c": 3, "f": 4, "h": 6}, {"x": "in:f32[c, h]", "w": "in:f32[f, c, 3]", "y": "out:f32[f, h - 2]"},
        lambda x, w: np.stack([sum(w[:, :, t] @ x[:, i + t] for t in range(3)) for i in range(x.shape[1] - 2)], 1),
        {"along c, f", "scaled x, w", "repeated along f"},
    ),
    "prefix sums": (
        {"m": 9, "n": 6}, {"x": "in:f32[m, n]", "y": "out:f32[m, n]"}, lambda x: x.cumsum(1),
        {"along m", "scaled x", "repeated along m"},
    ),
    "sums of whole numbers": (
        {"m": 20, "n": 6}, {"x": "in:i32[m, n]", "y": "out:i32[m]"}, lambda x: x.sum(1),
        {"along m, n", "repeated along m"},
    ),
    "a sum of two": (
        {"n": 6}, {"x": "in:f32[n]", "y": "in:f32[n]", "z": "out:f32[n]"}, lambda x, y: x + y,
        {"along n", "scaled x, y", "repeated along n"},
    ),
}  # fmt: skip


def checked_kernel(name: str, kind: str) -> tuple[Criteria, CheckedCall, dict[str, int]]:
    """The criteria, the checked call and the shape of a kernel without errors. ``kind``: how its inputs are drawn."""
    shape, buffers, function, _ = FORMS[name]
    contract = parse_contract(buffers, [{"entry": "f", "block": 1}], None)
    precision = Precision("f32", "f32")
    criteria = Criteria(lambda: None, contract, Reference(function, contract), Tolerance(), precision)  # type: ignore[arg-type, return-value]
    bits = inputs.draw(contract, kind, shape, np.random.default_rng(5))
    (result,) = criteria.reference({item.name: item.format.values(bits[item.name]) for item in contract.inputs}, shape)
    (output,) = contract.outputs
    wanted = {output.name: expected(result, None, output.format, criteria.tolerance, precision, shape)}
    return criteria, CheckedCall(kind, bits, Call({output.name: output.format.bits(result)}), wanted), shape


@pytest.mark.parametrize("name", FORMS)
def test_the_reference_decides_which_relations_hold(name: str) -> None:
    criteria, base, shape = checked_kernel(name, "normal")
    found = list(relations.valid_relations(criteria, base, shape, np.random.default_rng(1)))
    names = {item.name for item in found}
    reordered = [
        {item.removeprefix(kind) for item in names if item.startswith(kind)} for kind in ("permuted ", "reversed ")
    ]
    assert reordered[0] == reordered[1], "both hold along the same axes"
    assert {item.removeprefix("reversed ") for item in names if not item.startswith("permuted")} == FORMS[name][3]
    for relation in found:
        assert any(not np.array_equal(relation.bits[key], base.bits[key]) for key in base.bits)


def test_what_a_reference_refuses_is_no_relation() -> None:
    criteria, base, shape = checked_kernel("softmax", "normal")

    def picky(x: Any) -> Any:
        if not np.array_equal(x, base.bits["x"]):
            raise ValueError("it knows no other")
        return x

    criteria = dataclasses.replace(criteria, reference=Reference(picky, criteria.contract))
    assert not list(relations.valid_relations(criteria, base, shape, np.random.default_rng(1)))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", ["normal", "integers"])
def test_a_kernel_that_computes_the_reference_keeps_all_of_them(name: str, kind: str) -> None:
    criteria, base, shape = checked_kernel(name, kind)
    (output,) = criteria.contract.outputs
    found = list(relations.valid_relations(criteria, base, shape, np.random.default_rng(1)))
    assert bool(found) == (kind == "normal" or name not in ("softmax", "norm"))
    for relation in found:
        values = {item.name: item.format.values(relation.bits[item.name]) for item in criteria.contract.inputs}
        (result,) = criteria.reference(values, shape)
        wanted = {output.name: expected(result, None, output.format, criteria.tolerance, criteria.precision, shape)}
        answer = CheckedCall(kind, relation.bits, Call({output.name: output.format.bits(result)}), wanted)
        assert not list(relations.broken_relations(base, answer, relation, criteria.contract.buffers)), relation.name
        wrong = answer.call.outputs[output.name].copy()
        wrong.reshape(-1)[3] += 1
        answer.call.outputs[output.name] = wrong
        broken = list(relations.broken_relations(base, answer, relation, criteria.contract.buffers))
        places = [(item.elements, np.ravel_multi_index(item.first, wrong.shape)) for item in broken]
        assert places == [(1, 3)] * (wrong.size >= relations.LEAST_ELEMENTS)
        answer.wrong[output.name] = np.ones(wrong.shape, bool)  # wrong values are another finding
        assert not list(relations.broken_relations(base, answer, relation, criteria.contract.buffers))
