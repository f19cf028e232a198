"""Proves bf16 operands and fp32 results in every family, in the catalog, stored rows, packs and operators."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import cudal2gen
from cudal2gen import pack, results
from cudal2gen.generation import catalog
from cudal2gen.kernel import IllegalRecord, Problem, Record, edit, serving
from cudal2gen.kernel.launch import LaunchOperands, Sizes, read
from cudal2gen.results.choice import Table
from cudal2gen.validator.correctness import Comparison, compare
from kernelproof.ground.element import BF16, F32
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice
from tests.cudal2gen.paths import BF16_IN, BF16_IN_F32_OUT, F32_OUT, RING, ring, small
from tests.cudal2gen.strategies import TO_GLOBAL, records
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import dispatch, emulated, shapes  # noqa: E402


@given(records)
def test_types_are_spelled_only_where_they_are_not_fp16(record: Record) -> None:
    line = json.loads(catalog.dump(record))
    assert {name for name in ("ab", "d") if name in line} == {
        name for name, neutral in (("ab", "f16"), ("d", "same")) if getattr(record, name) != neutral
    }
    if (record.ab, record.d) != ("f16", "same"):
        plain = record.problem.revised(ab="f16", d="same")
        assert record.at(plain).name != record.name
        assert read(record.launch.write()) == record.launch


# --- what is right ---


def compare_d(d: Any, inputs: str = "normal") -> Comparison:
    """The comparison of a D, made from the exact product by ``d``, with the reference of bf16 operands."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((24, 512), np.float32).astype(BF16.numpy_dtype) for _ in range(2))
    product = a.astype(np.float64) @ b.astype(np.float64).T
    return compare("f32", inputs, a, b, d(product), [[range(0, 512)]])


def test_the_bound_of_bf16_is_its_rounding_to_nearest() -> None:
    nearest = compare_d(lambda product: product.astype(BF16.numpy_dtype))
    assert nearest.findings == []
    assert 0.8 < nearest.max_error / (nearest.allowed or 0) <= 1, "the bound is not loose"

    def toward_zero(product: Any) -> Any:
        bits = product.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).astype(BF16.numpy_dtype)

    assert compare_d(toward_zero).findings, "cut off instead of rounded"


def test_the_bound_of_fp32_output_sees_a_rounding_in_between() -> None:
    assert compare_d(lambda product: product.astype(np.float32)).findings == []
    assert compare_d(lambda product: product.astype(np.float16).astype(np.float32)).findings
    assert compare_d(lambda product: product.astype(BF16.numpy_dtype).astype(np.float32)).findings


# --- records that serve other types ---


def revised_problem(record: Record, **fields: Any) -> Problem:
    """The record's problem with these fields changed."""
    return record.problem.revised(**fields)


def test_a_record_of_fp16_serves_bf16_and_says_so() -> None:
    stored = [small(acc="f32"), ring(), small(acc="f32", m=128), small()]
    for record in stored[:2]:
        problem = revised_problem(record, ab="bf16")
        match = catalog.nearest(problem, stored)
        assert match.record.decisions() == record.decisions()
        assert match.record.problem == problem
        assert match.record.origin.changed == ("ab",)
        assert match.note == (
            f"no record for {problem.title}; taking that of f16 {record.mnk}, whose rate is that of bf16"
        )
    own = small(**BF16_IN, stages=4)
    assert catalog.nearest(revised_problem(own), [*stored, own]) == catalog.Match(own)
    beside = catalog.nearest(revised_problem(own, m=32), [*stored, own]).record
    assert beside.decisions()["stages"] == 4, "of records as near, that of the own type"


def test_a_record_serves_fp32_output_as_its_family_stores_it() -> None:
    problem = revised_problem(small(acc="f32"), d="f32")
    match = catalog.nearest(problem, [small(acc="f32")])
    assert {name: match.record.decisions().get(name) for name in TO_GLOBAL} == TO_GLOBAL
    assert "epilogue=global" in (match.note or "")
    assert catalog.nearest(revised_problem(ring(), d="f32"), [ring()]).record.decisions()["epilogue"] == "tma"


def test_what_a_family_cannot_store_names_what_is_legal() -> None:
    with pytest.raises(IllegalRecord, match=r"^epilogue=staged:") as refused:
        small(**F32_OUT)
    changes = str(refused.value).split("(")[1].split(")")[0].split("--set ")[1:]
    legal = {name: None if value == "null" else value for name, value in (it.strip().split("=") for it in changes)}
    assert small(**F32_OUT, **legal).output is F32


def test_a_fit_finds_how_a_family_stores_fp32() -> None:
    fitted = edit(small(), {"acc": "f32", "d": "f32"}).fitted().record
    assert (fitted.d, fitted.decisions()["epilogue"]) == ("f32", "global")
    assert {name: fitted.decisions().get(name) for name in TO_GLOBAL} == TO_GLOBAL


@pytest.mark.parametrize(("ab", "d"), [("bf16", "same"), ("f16", "f32"), ("bf16", "f32")])
def test_sums_are_in_fp32(ab: Any, d: Any) -> None:
    with pytest.raises(ValueError, match="acc=f16:"):
        Problem(gpu="a100", acc="f16", layout="tn", m=8, n=8, k=8, ab=ab, d=d)


def test_bytes_are_counted_by_type() -> None:
    problem = revised_problem(small(acc="f32", m=64, n=64, k=128))
    wide = problem.revised(d="f32")
    assert wide.traffic_bytes - problem.traffic_bytes == 2 * 64 * 64
    use = serving.Use(Sizes(64, 64, 128), (False, False, True))
    assert use.copied_bytes(Sizes(60, 60, 128), wide.widths) == 2 * use.copied_bytes(Sizes(60, 60, 128), problem.widths)
    launch = small(**F32_OUT, **TO_GLOBAL).launch
    fits = [launch.takes(Sizes(64, 64, 256), LaunchOperands.packed("tn", Sizes(64, n, 256)))[2] for n in (64, 68, 66)]
    assert fits == [True, True, False], "rows of D start on 16 bytes, which are four of its elements"


# --- what is stored ---

# The fields of a problem in rows that were stored before problems had types, and two such rows.
OLD: dict[str, Any] = {"acc": "f32", "layout": "tn", "m": 64, "n": 64, "k": 128}
ALGORITHM: dict[str, Any] = OLD | {
    "kind": "algorithm", "name": "card", "library": "lt", "blob": "", "workspace_bytes": 0, "candidates": 1, "rank": 0,
    "median_us": 1.0,
}  # fmt: skip
TRIAL: dict[str, Any] = OLD | {
    "kind": "trial", "environment": "model", "on": "m", "run": "r", "gpu": "a100", "proposer": "p", "name": "n",
    "record": {}, "outcome": "illegal", "reason": "because",
}  # fmt: skip


@pytest.mark.parametrize(("row", "fields"), [(results.Algorithm, ALGORITHM), (results.Trial, TRIAL)])
def test_rows_from_before_types_stay_as_they_are(row: Any, fields: dict[str, Any]) -> None:
    old = row.model_validate(fields)
    assert (old.ab, old.d) == ("f16", "same")
    written = json.loads(old.model_dump_json())
    assert not {"ab", "d"} & set(written)
    assert fields.items() <= written.items()
    typed = row.model_validate(fields | {"ab": "bf16", "d": "f32"})
    assert row.model_validate_json(typed.model_dump_json()) == typed


def test_keys_of_rows_carry_the_types() -> None:
    kinds = [results.Algorithm.model_validate(ALGORITHM | {"ab": ab, "d": d}).key for ab, d in TYPES]
    assert len(set(kinds)) == 4
    problems = [results.Trial.model_validate(TRIAL | {"ab": ab, "d": d}).problem for ab, d in TYPES]
    assert [(problem.ab, problem.d) for problem in problems] == TYPES


# The pairs of (ab, d), and kernels of other types than fp16.
TYPES = list(product(("f16", "bf16"), ("same", "f32")))
PACKED = [
    small(**BF16_IN, padding="predicate", m=64, n=64, k=128),
    small(**BF16_IN_F32_OUT, **TO_GLOBAL, m=64, n=64, k=128),
]


@pytest.mark.slow
def test_a_table_keeps_types_apart() -> None:
    half, other = (packed.table([record], {0: 2.0}) for record in (packed.RECORDS["predicated"], PACKED[0]))
    for table, own, strange in ((half, "f16", "bf16"), (other, "bf16", "f16")):
        problem = revised_problem(table.kernels[0].record)
        operands = LaunchOperands.packed("tn", Sizes(64, 64, 128))
        assert table.choose(problem, operands).kernel == 0
        refusal = table.choose(problem.revised(ab=strange), operands)
        assert refusal.kernel is None
        assert f" a100 {'bf16 ' if strange == 'bf16' else ''}f32 tn" in refusal.reason
        dumped = json.loads(json.dumps(table.dump()))
        assert ("ab" in dumped["rows"][0]) == (own != "f16")
        assert Table.load(dumped).rows == table.rows


# --- in torch ---


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of the kernels of ``PACKED`` and one of fp16, each measured as faster than torch."""
    table = packed.table([*PACKED, packed.RECORDS["predicated"]], {0: 2.0, 1: 2.0, 2: 2.0})
    return packed.folder(table, tmp_path_factory.mktemp("typed") / "a100")


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    """An emulated device on which the test must cause no error."""
    with EmulatedDevice(PACKED[0]) as own:
        yield own
        assert own.session.errors == []


@pytest.fixture
def kernels(device: EmulatedDevice, directory: Path) -> Iterator[dispatch.Dispatcher]:
    """A dispatcher with the pack of ``directory``."""
    with emulated(OperatorDevice(device, "a100"), [pack.open_pack(directory)], prefer="kernel") as dispatcher:
        yield dispatcher


def draw_integers(device: EmulatedDevice, rows: int, cols: int, dtype: Any) -> Any:
    """Small integers of a type in the device's memory."""
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    matrix = device.empty(rows, cols).view(dtype)
    return matrix.copy_(torch.randint(-2, 3, (rows, cols), generator=generator))


@pytest.mark.torch
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 128), (33, 47, 72), (7, 5, 3)])
def test_matmul_and_linear_take_both_types(
    dtype: Any, m: int, n: int, k: int, device: EmulatedDevice, kernels: dispatch.Dispatcher
) -> None:
    a, b = draw_integers(device, m, k, dtype), draw_integers(device, n, k, dtype)
    exact = (a.double() @ b.double().t()).to(dtype)
    for d in (cudal2gen.matmul(a, b.t()), cudal2gen.linear(a, b)):
        assert d.dtype == dtype
        assert torch.equal(d, exact)
    (name,) = kernels.stats()["kernel"]
    assert name == (PACKED[0] if dtype == torch.bfloat16 else packed.RECORDS["predicated"]).name
    assert kernels.stats()["torch"] == {}


@pytest.mark.torch
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 128), (33, 47, 72)])
def test_sums_leave_as_they_are(m: int, n: int, k: int, device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    """Sums of padded operands keep their type too: this kernel needs whole tiles. For fp16 the pack has no such kernel,
    so torch computes."""
    a, b = draw_integers(device, m, k, torch.bfloat16), draw_integers(device, n, k, torch.bfloat16).t()
    d = cudal2gen.matmul(a, b, out_dtype=torch.float32)
    assert d.dtype == torch.float32
    assert torch.equal(d.double(), a.double() @ b.double())
    assert kernels.stats()["kernel"] == {PACKED[1].name: 1}
    half = cudal2gen.matmul(a.half(), b.half(), out_dtype=torch.float32)
    assert torch.equal(half, d)
    assert " a100 f32 d=f32 tn" in next(iter(kernels.stats()["torch"]))


@pytest.mark.torch
def test_types_in_operators_on_the_cpu() -> None:
    a, b = torch.randn(6, 16).bfloat16(), torch.randn(16, 10).bfloat16()
    wide = cudal2gen.matmul(a, b, out_dtype=torch.float32)
    assert torch.equal(wide, a.float() @ b.float())
    assert torch.equal(cudal2gen.matmul(a, b), wide.bfloat16())
    out = torch.empty(6, 10)
    assert cudal2gen.matmul(a, b, out_dtype=torch.float32, out=out) is out
    assert torch.equal(out, wide)
    leaf, other = a.clone().requires_grad_(), b.clone().requires_grad_()
    cudal2gen.matmul(leaf, other, out_dtype=torch.float32).sum().backward()
    assert leaf.grad.dtype == torch.bfloat16
    torch.testing.assert_close(leaf.grad, b.float().sum(1).expand(6, 16).bfloat16())
    torch.library.opcheck(torch.ops.cudal2gen.matmul.default, (leaf.detach(), b, "f32", torch.float32))
    meta = cudal2gen.matmul(a.to("meta"), b.to("meta"), out_dtype=torch.float32)
    assert (meta.dtype, meta.shape) == (torch.float32, (6, 10))
    for operands, options, error, message in (
        ((a, b.half()), {}, TypeError, "b: expected torch.bfloat16, got torch.float16"),
        ((a, b), {"acc": "f16"}, ValueError, "acc='f16': must be f32 for torch.bfloat16"),
        ((a.half(), b.half()), {"acc": "f16", "out_dtype": torch.float32}, ValueError, "must be f32 for torch.float32"),
        ((a, b), {"out_dtype": torch.float16}, TypeError, "out_dtype: expected torch.bfloat16 or torch.float32"),
        ((a, b), {"out": out}, TypeError, "out: expected torch.bfloat16, got torch.float32"),
    ):
        with pytest.raises(error, match=message):
            cudal2gen.matmul(*operands, **options)


@pytest.mark.torch
def test_a_model_of_bf16_is_patched(checkout: Path) -> None:
    torch.manual_seed(0)
    llama = shapes._from_file(checkout / "examples" / "llama.py")
    model, tokens = llama.Llama(words=32, width=32, heads=2, blocks=1).bfloat16().eval(), torch.arange(6)[None]
    before = model(tokens)
    replaced = cudal2gen.patch(model)
    assert (len(replaced.layers), replaced.left) == (8, {})
    torch.testing.assert_close(model(tokens), before, atol=2**-5, rtol=2**-6)
    collected = shapes.collect(lambda: model(tokens))
    assert {problem["ab"] for problem in collected.problems("h200", "f16")} == {"bf16"}
    assert {problem["acc"] for problem in collected.problems("h200", "f16")} == {"f32"}
    cudal2gen.unpatch(model)
    assert torch.equal(model(tokens), before)


def test_rings_of_any_type_have_the_ring_of_fp16() -> None:
    assert RING.keys() <= ring(**BF16_IN_F32_OUT).model_dump().keys()
    assert ring(**BF16_IN_F32_OUT).ring_bytes == ring().ring_bytes
    assert ring(**BF16_IN_F32_OUT).store_bytes == 2 * ring().store_bytes
    assert ring(bn=64, atom_n=64, **BF16_IN_F32_OUT).store_bytes == ring(bn=64, atom_n=64).store_bytes, (
        "boxes of 128 bytes"
    )
