"""Proves every fused epilogue in every family against an fp64 reference, and that faults in one are caught."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudal2gen.generation import catalog, compiler
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import IllegalRecord, Problem, Record, parse, revise
from cudal2gen.kernel.fusion import ACTIVATIONS, PARTS, PLAIN, Activation, Fusion
from cudal2gen.kernel.launch import Launch, LaunchFileError, Matrix, read
from cudal2gen.kernel.problem import MAX_EXTENT
from cudal2gen.launch.launcher import Fused, LaunchError, OpenKernel
from cudal2gen.validator import fused, run_case
from cudal2gen.validator.correctness import operands
from cudal2gen.validator.problems import Shape
from kernelproof.ground.element import F16, F32
from tests.cudal2gen import faulty
from tests.cudal2gen.faulty import Faulty
from tests.cudal2gen.paths import FUSED, WIDE_TILE, once, ring, small
from tests.cudal2gen.strategies import TO_GLOBAL, direct, fusions
from tests.draws import draw_part

# Pairs of an activation and the axis of a bias; one in three unless all are run.
BIASED = draw_part([*product(ACTIVATIONS, ("n", "m"))], 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the facts of a kernel's launch."""
    return tmp_path_factory.mktemp("kernel")


def findings(kernel: Record | Faulty, library: Path, inputs: str, hazards: bool = False) -> tuple[str, ...]:
    """What ptxas and one execution of a kernel find. A batch has two products; groups include an empty one."""
    (artifact,) = faulty.build([kernel])
    record = kernel.record if isinstance(kernel, Faulty) else kernel
    groups = (record.m // 3, 0, record.m - record.m // 3) if record.batch == "grouped" else ()
    shape = Shape(record.m, record.n, record.k, batch=2 if record.batch == "strided" else 1, groups=groups)
    case, _ = run_case(record, artifact, library, shape, inputs, hazards=hazards)
    return (*artifact.ptxas.findings, *case.findings)


# tests/cudal2gen/test_validator.py gives verdicts for them.
EXECUTED = draw_part(list(FUSED), 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXECUTED)
def test_a_fused_kernel_computes(name: str, library: Path) -> None:
    record = FUSED[name]
    for inputs in ("integers", "normal", "special"):
        assert findings(record, library, inputs, hazards=inputs == "integers") == (), inputs
    directory = compiler.build([record])[0].directory
    assert read((directory / "kernel.launch").read_text()) == record.launch
    assert record.launch.fusion == record.fusion


def test_the_kernels_above_have_every_part_in_every_family() -> None:
    families = {record.family for record in FUSED.values()}
    for family, activation in product(families, ACTIVATIONS):
        own = [record.fusion for record in FUSED.values() if record.family == family]
        assert activation == "none" or activation in {fusion.activation for fusion in own}, (family, activation)
        assert {"n", "m"} <= {fusion.bias for fusion in own}, family


def in_every_family(activation: str, bias: str) -> list[Record]:
    """A record of each family whose fusion is a bias and an activation."""
    fusion = f"bias_{bias}" + ("" if activation == "none" else f"+{activation}")
    return [family(fusion=fusion) for family in (small, direct, ring, once)]


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "bias"), BIASED)
def test_every_activation_and_bias_in_every_family(activation: str, bias: str, library: Path) -> None:
    for record in in_every_family(activation, bias):
        for inputs in ("integers", "normal"):
            assert findings(record, library, inputs) == (), (record.name, inputs)


# --- the value ---


@given(fusions())
def test_a_text_spells_a_fusion(fusion: Fusion) -> None:
    assert Fusion.model_validate(fusion.text) == fusion
    assert bool(fusion) == (fusion.text != "none") == (fusion != PLAIN)
    assert json.loads(Fusion.model_dump_json(fusion)) == str(fusion)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("silu+bias_n", "must stand in the order of application, bias_n+silu"),
        ("bias_n+bias_m", "bias appears more than once"),
        ("relu+relu", "activation appears more than once"),
        ("bias_n+", "'' is no part of a fusion; parts are alpha, bias_n"),
        ("swish", "'swish' is no part"),
        ("none+relu", "'none' is no part"),
        ("residual+silu+gate", "residual excludes gate"),
        ("bias_n+aux", "aux needs an activation or gate"),
        ("gate+silu", "must stand in the order of application, silu+gate"),
    ],
)
def test_what_is_no_fusion_is_refused_in_words_by_all(
    text: str, words: str, library: Path, idle: Path, tmp_path: Path
) -> None:
    with pytest.raises(IllegalRecord, match="fusion") as caught:
        parse(json.loads(catalog.dump(small())) | {"fusion": text})
    assert words in str(caught.value)
    facts = small().launch.write() + f"fusion={text}\n"
    with pytest.raises(LaunchFileError, match="fusion="):
        read(facts)
    (tmp_path / "kernel.launch").write_text(facts)
    with pytest.raises(LaunchError, match="fusion="):
        OpenKernel(library, tmp_path, {}, idle)


@settings(max_examples=30)
@given(fusions(), st.lists(st.sampled_from([*PARTS, "none", ""]), max_size=3))
def test_both_sides_of_the_contract_read_a_fusion(
    library: Path, idle: Path, folder: Path, fusion: Fusion, parts: list[str]
) -> None:
    for text in (fusion.text, "+".join(parts)):
        facts = small().launch.write() + f"fusion={text}\n"
        (folder / "kernel.launch").write_text(facts)
        try:
            legal = read(facts).fusion.text == text
        except LaunchFileError:
            legal = False
        try:
            OpenKernel(library, folder, {}, idle).close()
            opened = True
        except LaunchError:
            opened = False
        assert opened == legal, text


@pytest.mark.parametrize("record", [small(), direct(), ring(), once()])
def test_a_plain_record_says_nothing_of_a_fusion(record: Record) -> None:
    fusion = revise(record, fusion="bias_n+silu")
    assert "fusion" not in catalog.dump(record) + record.launch.write() + record.name
    assert "Fused" not in render(record)
    assert revise(fusion, fusion="none") == record
    assert parse(catalog.dump(fusion)) == fusion
    assert "_bias_n_silu_" in fusion.name
    assert "fusion=bias_n+silu\n" in fusion.launch.write()
    assert json.loads(catalog.dump(fusion))["fusion"] == "bias_n+silu"


# --- records that serve it ---


@pytest.mark.slow
def test_a_fused_problem_takes_the_record_of_the_plain_one_and_says_so() -> None:
    plain = next(record for record in catalog.load() if record.gpu == "a100" and not record.caller_pads)
    match = catalog.nearest(plain.problem.revised(fusion="bias_n+relu"), catalog.load())
    assert match.record.fusion.text == "bias_n+relu"
    assert match.record.at(plain.problem, origin=plain.origin) == plain
    assert f"taking that of {plain.mnk}, with bias_n+relu fused" in match.note


def test_a_plain_problem_prefers_plain_records() -> None:
    plain = small()
    other = revise(plain, fusion="relu")
    assert catalog.nearest(plain.problem, [other, plain]).record == plain
    assert catalog.nearest(other.problem, [plain, other]).record == other
    assert catalog.nearest(plain.problem, [other]).record.decisions() == plain.decisions()
    several = plain.problem.revised(batch="strided")
    assert "fusion" not in catalog.nearest(several, [other, plain]).record.origin.changed
    assert Problem.kind_of(json.loads(catalog.dump(other))) == other.problem.kind != plain.problem.kind


# --- what a launch takes ---

# Kernels that take a C.
TAKING = [small(fusion="bias_n+residual"), ring(fusion="residual", n=64), ring(fusion="residual", epilogue="direct")]
TAKING += [small(fusion="residual+relu", padding="predicate", acc="f32", d="f32", **TO_GLOBAL)]


@settings(max_examples=100)
@given(st.sampled_from(TAKING), st.sampled_from([56, 63, 64, 65, 66, 68, 72, MAX_EXTENT + 8]), st.booleans())
def test_the_launcher_refuses_the_c_that_python_says_is_not_taken(
    library: Path, idle: Path, folder: Path, record: Record, ldc: int, aligned: bool
) -> None:
    launch: Launch = record.launch
    m, n, k = record.bm, 64, 64 * record.split_k
    (folder / "kernel.launch").write_text(launch.write())
    operands = Fused(1 << 23, (1 << 24) + (0 if aligned else 4), ldc, 1.0, 1.0)
    with OpenKernel(library, folder, record.launch_options, idle) as kernel:
        call = kernel.bound(1 << 20, k, 1 << 21, k, 1 << 22, n, m, n, k, fused=operands)
        assert (call(0) == 0) == launch.takes_c(n, Matrix(ldc, aligned))


def test_a_launch_without_what_is_fused_is_refused_in_words(library: Path, idle: Path, tmp_path: Path) -> None:
    record = small(fusion="bias_n+residual")
    (tmp_path / "kernel.launch").write_text(record.launch.write())
    product = (1 << 20, 64, 1 << 21, 64, 1 << 22, 32, 32, 32, 64)
    with OpenKernel(library, tmp_path, {}, idle) as kernel:
        for operands, words in (
            (None, "this kernel is fused: launch it by cudal2gen_launch_fused"),
            (Fused(0, 1 << 23, 32), "adds a bias, which must be aligned to 16 bytes"),
            (Fused((1 << 23) + 8, 1 << 23, 32), "adds a bias, which must be aligned to 16 bytes"),
            (Fused(1 << 23, 0, 32), "adds beta C: C must be there"),
            (Fused(1 << 23, 1 << 23, 24), "adds beta C: C must be there, ldc hold its rows"),
            (Fused(1 << 23, 1 << 23, 33), "C must lie as D"),
        ):
            with pytest.raises(LaunchError, match=words):
                kernel.launch(*product, fused=operands)
        kernel.launch(*product, fused=Fused(1 << 23, 1 << 23, 32))


# --- the reference ---


def test_the_reference_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    z = np.linspace(-30, 30, 4001)
    tensor = torch.from_numpy(z)
    for activation, function in (
        ("relu", torch.relu),
        ("silu", torch.nn.functional.silu),
        ("gelu", torch.nn.functional.gelu),
        ("gelu_tanh", lambda value: torch.nn.functional.gelu(value, approximate="tanh")),
    ):
        np.testing.assert_allclose(fused.apply(activation, z), function(tensor).numpy(), rtol=1e-7, atol=1e-13)


def test_no_activation_is_steeper_than_its_slope() -> None:
    z = np.linspace(-20, 20, 400_001)
    for activation, slope in fused.SLOPES.items():
        steepest = float(abs(np.diff(fused.apply(activation, z)) / np.diff(z)).max())
        assert 0.97 * slope < steepest < slope + 1e-9, activation


@pytest.mark.parametrize(("fusion", "part"), [("bias_n+silu", "bias"), ("residual", "c"), ("alpha", "alpha")])
def test_a_part_that_is_left_out_is_noticed(fusion: str, part: str) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 32, 64)).astype(np.float16)
    parts = Fusion.model_validate(fusion)
    operands = fused.draw(parts, "normal", 32, 32, rng, F16, F32)
    order = [[range(64)]]
    product = fused.FusedProduct("f32", parts, "normal", a, b, operands, order, F32)
    right = product.compare(product.reference().result.astype(np.float32))
    assert right.findings == []
    without = operands._replace(**{part: 1.0 if part == "alpha" else np.zeros_like(getattr(operands, part))})
    wrong = replace(product, operands=without).reference().result.astype(np.float32)
    assert product.compare(wrong).wrong > 512


@pytest.mark.torch
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("inputs", ["integers", "normal", "special"])
def test_tensors_are_compared_as_arrays_and_a_part_as_the_whole(
    activation: Activation, inputs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    for acc, bias in (("f32", "m"), ("f16", "n")):
        parts = Fusion(scale=True, bias=bias, residual=True, activation=activation)
        rng, order = np.random.default_rng(3), [[range(0, 8), range(8, 16)]]
        a, b = operands(inputs, 24, 40, 16, rng, F16)
        extra = fused.draw(parts, inputs, 24, 40, rng, F16, F16)
        product = fused.FusedProduct(acc, parts, inputs, a, b, extra, order, F16)
        d = product.reference().result.astype(np.float16)
        d[5, 7], d[20, 3] = 300.0, np.inf
        answers = []
        for chunk in (1 << 27, 200):
            monkeypatch.setattr(fused, "CHUNK", chunk)
            for arrays in (np.asarray, torch.from_numpy):
                read = fused.FusedOperands(arrays(extra.bias), arrays(extra.c))
                answers.append(replace(product, a=arrays(a), b=arrays(b), operands=read).compare(arrays(d)))
        first, *others = answers
        assert first.wrong in (1, 2)
        for other in others:
            assert (other.wrong, other.first, other.compared) == (first.wrong, first.first, first.compared)
            bounds = [(each.max_error, each.allowed or 0.0) for each in (other, first)]
            assert bounds[0] == pytest.approx(bounds[1], rel=1e-6)
        monkeypatch.setattr(fused, "MAX_FULL_BOUND", 24 * 40 * 4)
        sampled = product.compare(d)
        assert sampled.wrong - first.wrong in (0, 1), "an element of a sampled row counts twice"
        assert ("in 6 rows" in sampled.compared) == (acc == "f16" and inputs == "normal")
        monkeypatch.undo()


def test_a_gated_element_beyond_the_range_of_d_is_infinite() -> None:
    a, b = np.ones((8, 512), np.float16), np.ones((16, 512), np.float16)
    parts, order = Fusion(activation="silu", gate=True), [[range(512)]]
    for value, wrong in ((np.inf, 0), (-np.inf, 64), (np.nan, 64), (65504.0, 64)):
        d = np.full((8, 8), value, np.float16)
        product = fused.FusedProduct("f32", parts, "binary", a, b, fused.FusedOperands(None, None), order, F16)
        compared = product.compare(d)
        assert compared.wrong == wrong, value


# --- faults of a kernel that its verdict must show ---

# By what is wrong: a record, a part of its text, and the faulty text.
FAULTS = {
    "the bias of the wrong column": Faulty(
        small(fusion="bias_n+silu"),
        "tile_n * kBN + warp_n * 16);",
        "tile_n * kBN + (warp_n ^ 1) * 16);",
    ),
    "the bias of columns for rows": Faulty(
        small(fusion="bias_m+relu", acc="f32"),
        "threadIdx.x % 32 / 4 + fused_x(i)",
        "threadIdx.x % 32 / 4",
    ),
    "beta applied per slice": Faulty(
        direct(fusion="residual", split_k=2, acc="f32"),
        "  if (!reduce_slices(",
        "  fuse(gemm, tile_m * kBM + warp_m * 16 + lane / 4, tile_n * kBN + warp_n * 16 + lane % 4 * 2, tCrD);\n"
        "  if (!reduce_slices(",
    ),
    "C of the row above": Faulty(direct(fusion="residual"), "source + int64_t(e * 8)", "source + int64_t(e * 4)"),
    "alpha after the bias": Faulty(
        direct(fusion="alpha+bias_n"),
        "fmaf(gemm.fused.alpha, sum.y, bias.y)",
        "gemm.fused.alpha * (sum.y + bias.y)",
    ),
    "gelu for silu": Faulty(once(fusion="silu"), "-1.44269504f", "-2.45546696f"),
    "the bias of another lane": Faulty(ring(fusion="bias_n+gelu", n=64), '"r"(lanes * 4)', '"r"((lanes ^ 1) * 4)'),
    "pairs swapped": Faulty(small(fusion="silu+gate", **WIDE_TILE), "z(j), z(j + 1)", "z(j + 1), z(j)"),
    "NaN lost by relu": Faulty(direct(fusion="relu"), "max.NaN.f32", "max.f32"),
}
BUILT_AHEAD = [
    *(FUSED[name] for name in EXECUTED),
    *FAULTS.values(),
    *(record for names in BIASED for record in in_every_family(*names)),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, library: Path) -> None:
    kinds = ("special",) if "NaN" in fault else ("normal",)
    assert any("wrong-value" in finding for inputs in kinds for finding in findings(FAULTS[fault], library, inputs))
