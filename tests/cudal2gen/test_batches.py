"""Proves in every family that one launch computes several products, at strides that the caller gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudal2gen.generation import catalog, compiler
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import IllegalRecord, Record, ceil_div, edit
from cudal2gen.kernel.fusion import PLAIN
from cudal2gen.kernel.launch import Batches, Sizes, read
from cudal2gen.launch.launcher import LaunchError, OpenKernel
from cudal2gen.validator import emulated, problems, run_case
from cudal2gen.validator.problems import Shape
from kernelproof import emulator
from tests.cudal2gen.faulty import Faulty
from tests.cudal2gen.paths import IN_CLUSTER, PINGPONG, SWAPPED, TWO_CONSUMERS, once, ring, small
from tests.cudal2gen.strategies import STRAIGHT, TO_GLOBAL, direct, plain_records, records_of_any_product
from tests.draws import draw_part

STRIDED: dict[str, Any] = {"batch": "strided"}
TYPES: dict[str, Any] = {"ab": "bf16", "acc": "f32"}
RAGGED: dict[str, Any] = {"padding": "predicate", "m": 61, "n": 59, "k": 248}

# Paths of batches in every family: each raster, each way to sum slices, each way to store D.
BATCHED: dict[str, Record] = {
    "plain": small(**STRIDED),
    "plain nn ragged split": small(**STRIDED, layout="nn", split_k=2, **RAGGED, **STRAIGHT),
    "zsplit": small(**STRIDED, raster="zsplit", swizzle_stride=48, n=160),
    "zsplit split": small(**STRIDED, raster="zsplit", swizzle_stride=32, split_k=3, acc="f32"),
    "persistent": small(**STRIDED, raster="persistent"),
    "persistent nn split ragged": small(**STRIDED, layout="nn", raster="persistent", split_k=2, **RAGGED, **TO_GLOBAL),
    "baked k": small(**STRIDED, bake=["k"], k=192),
    "direct": direct(**STRIDED),
    "direct nn ragged split": direct(**STRIDED, layout="nn", split_k=2, **RAGGED | {"k": 120}),
    "wgmma": ring(**STRIDED),
    "wgmma 2x1 nn": ring(**STRIDED, cluster=[2, 1], layout="nn"),
    "wgmma two maps of D, pingpong": ring(**STRIDED, **PINGPONG, bn=96, atom_n=96, n=200, cluster=[1, 2], acc="f16"),
    "wgmma swapped f32": ring(**STRIDED, **SWAPPED, acc="f32", d="f32"),
    "wgmma direct, any n": ring(**STRIDED, epilogue="direct", n=133),
    "wgmma workspace": ring(**STRIDED, **TWO_CONSUMERS, split_k=3, reduce="workspace"),
    "wgmma stream": ring(**STRIDED, stream_k=True, m=150, layout="nn"),
    "wgmma cluster": ring(**STRIDED, **IN_CLUSTER, split_k=2),
    "once": once(**STRIDED),
    "once nn split": once(**STRIDED, layout="nn", split_k=2, k=256, n=56),
    "fused": small(**STRIDED, fusion="bias_n+residual+silu", **TYPES),
    "fused split ragged": small(**STRIDED, fusion="alpha+bias_m+residual+relu", split_k=2, **RAGGED, **TO_GLOBAL),
    "fused wgmma": ring(**STRIDED, fusion="bias_n+residual+silu"),
    "fused wgmma workspace": ring(**STRIDED, fusion="bias_m+residual+gelu", split_k=3, reduce="workspace"),
    "fused wgmma cluster": ring(**STRIDED, fusion="bias_n+relu", **IN_CLUSTER, split_k=2),
    "fused once": once(**STRIDED, fusion="bias_n+residual+relu", split_k=2, k=256),
}

# A part suffices, because test_validator.py executes every branch of the templates, those of batches included.
EXECUTED = draw_part(list(BATCHED), 4)


def own_problem(record: Record, batch: int, shared_b: bool = False) -> Shape:
    """The record's own problem, with ``batch`` products in a launch."""
    stride = record.launch_options.get("swizzle_stride")
    return Shape(record.m, record.n, record.k, stride, batch=batch, shared_b=shared_b)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", EXECUTED)
def test_each_product_of_a_batch_is_computed(name: str, library: Path) -> None:
    record = BATCHED[name]
    (artifact,) = compiler.build([record])
    assert artifact.ptxas.findings == []
    assert read((artifact.directory / "kernel.launch").read_text()) == record.launch
    for shape, inputs in (
        (own_problem(record, 3), "binary"),
        (own_problem(record, 2, shared_b=True), "normal"),
        (own_problem(record, 1), "normal"),
    ):
        case, done = run_case(record, artifact, library, shape, inputs, hazards=inputs == "binary")
        assert case.findings == (), shape
        first, *others = done.products
        assert len(done.products) == shape.batch
        assert not shape.shared_b or (first.b == others[0].b).all()
        assert not (first.a == others[0].a).all() if others else True


batched_records = records_of_any_product(plain_records, st.just(PLAIN), st.just("strided"))


@settings(max_examples=40)
@given(batched_records)
def test_a_batch_changes_names_and_texts_and_nothing_of_plain_records(record: Record) -> None:
    plain = record.at(record.problem.revised(batch="none"))
    assert plain.name != record.name
    assert "_batched_" in record.name
    assert "product" not in render(plain)
    assert '"batch"' not in catalog.dump(plain)
    assert "batch" not in plain.launch.write()
    assert read(record.launch.write()) == record.launch
    assert edit(plain, {"batch": "strided"}).fitted().record.name == record.name


def test_a_verdict_tries_batches_of_batched_records_only() -> None:
    record = BATCHED["plain nn ragged split"]
    shapes = problems.stress_shapes(record)
    assert {(shape.batch, shape.shared_b) for shape in shapes} == {(1, False), (2, False), (3, False), (3, True)}
    plain = problems.stress_shapes(record.at(record.problem.revised(batch="none")))
    assert {shape.batch for shape in plain} == {1}
    case = next(shape for shape in shapes if shape.shared_b).case("binary", 1)
    assert case.options == {"batch": 3, "shared_b": 1}


def test_room_between_products_is_forbidden_ground(library: Path) -> None:
    """A verdict places elements between one product's B or D and the next, which no kernel may touch."""
    record = BATCHED["direct"]
    shape = own_problem(record, 2)
    _, b, d = (problems.batches(record, shape)[index] for index in (1, 2, 3))
    lda, _, ldd = problems.strides(record, Sizes(record.m, record.n, record.k))
    assert d > record.m * ldd
    assert b > record.n * lda
    assert problems.batches(record, replace(shape, batch=1)) == Batches()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "wgmma", "wgmma direct, any n", "once"])
def test_products_may_lie_side_by_side_in_d(name: str, library: Path) -> None:
    """All products are columns of one matrix D, with 8 columns between them that no kernel may write."""
    record = BATCHED[name]
    (artifact,) = compiler.build([record])
    m, n, k, count = record.m, 64, 128, 3
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-2, 3, (count, extent, k)).astype(np.float16) for extent in (m, n))
    memory = emulator.Memory()
    matrices = memory.upload(a), memory.upload(b)
    stored = np.zeros((m, count * (n + 8)), bool)
    for product in range(count):
        stored[:, product * (n + 8) :][:, :n] = True
    d = memory.upload(np.zeros(stored.shape, np.float16), "output", region=stored)
    with (
        emulator.session(memory, emulated.device_of(record)) as session,
        OpenKernel(library, artifact.directory, record.launch_options, emulator.runtime_path()) as kernel,
    ):
        addresses = (matrices[0].address, k, matrices[1].address, k, d.address, stored.shape[1])
        kernel.launch(*addresses, m, n, k, batches=Batches(count, m * k, n * k, n + 8))
    assert [*session.errors, *(str(report) for report in session.reports if report.is_error)] == []
    whole = d.bytes().view(np.float16).reshape(stored.shape)
    wide = np.einsum("pmk,pnk->pmn", a.astype(np.float32), b.astype(np.float32)).astype(np.float16)
    for product in range(count):
        assert (whole[:, product * (n + 8) :][:, :n] == wide[product]).all()


# --- faults are seen ---
# Each fault has a text of the generated CUDA, and the text that replaces it.

FAULTS: dict[str, tuple[str, str]] = {
    "the batch of a product is off by one": ("product_of(gemm, blockIdx.z)", "product_of(gemm, blockIdx.z + 1)"),
    "every product is the first": ("product_of(gemm, blockIdx.z)", "product_of(gemm, 0)"),
    "A advances by B's stride": ("gemm.a += batch * gemm.batches.a", "gemm.a += batch * gemm.batches.b"),
    "B advances by A's stride": ("gemm.b += batch * gemm.batches.b", "gemm.b += batch * gemm.batches.a"),
    "D advances by A's stride": ("gemm.d += batch * gemm.batches.d", "gemm.d += batch * gemm.batches.a"),
    "D does not advance": ("gemm.d += batch * gemm.batches.d;", ""),
    # That products share counters could not be seen: here CTAs of one product run after those of another, and counters
    # are zero again in between. This fault therefore places them before the scratch.
    "a product's counters before the first": ("gemm.arrivals += batch * tiles;", "gemm.arrivals -= batch * tiles;"),
    "products share partial sums": ("gemm.partials += batch * tiles * kSplitK * (kBM * kBN);", ""),
}
OF_MAPS: dict[str, tuple[str, str]] = {
    "the batch of a tile is off by one": ("* kBN, batch}", "* kBN, batch + 1}"),
    "B is not shared": ("gemm.batches.b ? work.batch : 0", "work.batch"),
    "A is shared": ("gemm.batches.a ? work.batch : 0", "0"),
    "D is stored to the first": ("gemm.batch = batch;", ""),
    "one product is computed": ("cluster_tiles(gemm) * gemm.batches.count;", "cluster_tiles(gemm);"),
}
OF_FUSED: dict[str, tuple[str, str]] = {
    "products share the bias": ("gemm.fused.bias += batch * gemm.batches.bias;", ""),
    "C advances by the bias's stride": ("batch * gemm.batches.c", "batch * gemm.batches.bias"),
}
# The faults, each with a record whose text it changes.
PLACES = [("plain nn ragged split", FAULTS), ("wgmma", OF_MAPS), ("fused", OF_FUSED)]
PLACED = {(name, fault): Faulty(BATCHED[name], *texts) for name, faults in PLACES for fault, texts in faults.items()}
BUILT_AHEAD = [*(BATCHED[name] for name in EXECUTED), *PLACED.values()]


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), PLACED)
def test_a_faulty_text_is_noticed(name: str, fault: str, library: Path) -> None:
    record, artifact = BATCHED[name], PLACED[name, fault].build()
    assert render(record).count(PLACED[name, fault].before) == 1, "the fault has one place"
    cases = [
        run_case(record, artifact, library, own_problem(record, 3, shared_b), "integers")[0]
        for shared_b in (False, True)
    ]
    assert not all(case.passed for case in cases)


# --- what is refused ---


def test_a_second_output_excludes_a_batch() -> None:
    with pytest.raises(IllegalRecord, match=r"^batch=strided:"):
        small(**STRIDED, acc="f32", fusion="aux+silu")


# The record's changed fields, batches at m = n = 32 and k = 64, and a part of the error. A and B have 32 * 64 elements
# and D 32 * 32. A grid has at most 65535 products along z, and a launch at most 2**30 tiles.
REFUSED = [
    ({}, Batches(0), "a batch of 0 products"),
    ({}, Batches(2, 64, 64, 8), "matrices D of a batch overlap"),
    ({}, Batches(2, 4, 64, 32 * 32), "aligned to 16 bytes"),
    ({}, Batches(2, 64, 64, 32 * 32 + 4), "aligned to 16 bytes"),
    ({}, Batches(65536, 64, 64, 32 * 32), "than a grid has, or more products"),
    ({"raster": "persistent"}, Batches(2**30 + 1, 0, 0, 32 * 32), "more CTA tiles than are counted"),
    ({"batch": "none"}, Batches(2, 64, 64, 32 * 32), "one of batch=strided computes several"),
    ({}, Batches(2, -8, 64, 32 * 32), "out of range"),
]


@pytest.mark.parametrize(("changes", "batches", "message"), REFUSED)
def test_batches_that_no_launch_takes_are_refused(
    changes: dict[str, Any], batches: Batches, message: str, library: Path
) -> None:
    record = small(**STRIDED | changes)
    (artifact,) = compiler.build([record])
    with (
        emulator.session(device=emulator.Device(sm_count=2)) as session,
        OpenKernel(library, artifact.directory, record.launch_options, emulator.runtime_path()) as kernel,
        pytest.raises(LaunchError, match=message),
    ):
        kernel.launch(1 << 20, 64, 1 << 21, 64, 1 << 22, 32, 32, 32, 64, batches=batches)
    assert session.launches == []


@pytest.mark.slow
def test_scratch_is_of_all_products(library: Path) -> None:
    """Scratch has a counter of 4 bytes for each tile, rounded up to 256 bytes, and each slice's partial sums in f32."""
    for name in ("zsplit split", "wgmma workspace"):
        record = BATCHED[name]
        (artifact,) = compiler.build([record])
        with (
            emulator.session(device=emulated.device_of(record)),
            OpenKernel(library, artifact.directory, record.launch_options, emulator.runtime_path()) as kernel,
        ):
            tiles = ceil_div(record.m, record.bm) * ceil_div(record.n, record.bn)
            for products in (1, 3):
                counters = ceil_div(4 * tiles * products, 256) * 256
                partials = 4 * products * tiles * record.split_k * record.bm * record.bn
                assert kernel.workspace_bytes(record.m, record.n, record.k, products) == counters + partials
