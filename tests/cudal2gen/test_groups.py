"""Proves that a grouped kernel multiplies each group of rows by its own B, with the groups' ends on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudal2gen.generation import compiler
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import IllegalRecord, Record, edit
from cudal2gen.kernel.launch import Groups, read
from cudal2gen.launch.launcher import LaunchError, OpenKernel
from cudal2gen.validator import emulated, problems, run_case
from cudal2gen.validator.problems import Shape
from kernelproof import emulator
from tests.cudal2gen.faulty import Faulty
from tests.cudal2gen.paths import PINGPONG, SWAPPED, TWO_CONSUMERS, once, ring, small
from tests.cudal2gen.strategies import STRAIGHT, TO_GLOBAL, direct, direct_records, multistage_records, wgmma_records
from tests.draws import draw_part

GROUPED: dict[str, Any] = {"batch": "grouped", "padding": "predicate"}
RING: dict[str, Any] = {"batch": "grouped"}

# Paths of groups in every family that has them: each raster, each way to store D.
RECORDS: dict[str, Record] = {
    "plain": small(**GROUPED),
    "plain nn, any n": small(**GROUPED, layout="nn", n=59, **STRAIGHT),
    "global": small(**GROUPED, **TO_GLOBAL),
    "persistent": small(**GROUPED, raster="persistent"),
    "persistent nn, baked k": small(**GROUPED, raster="persistent", layout="nn", bake=["k"], k=192),
    "direct": direct(**GROUPED),
    "wgmma": ring(**RING),
    "wgmma 1x2 nn": ring(**RING, cluster=[1, 2], layout="nn", **TWO_CONSUMERS),
    "wgmma two maps of D, pingpong": ring(**RING, **PINGPONG, bn=96, atom_n=96, n=200, acc="f16"),
    "wgmma swapped": ring(**RING, **SWAPPED),
    "wgmma swapped pingpong, d": ring(**RING, **(PINGPONG | SWAPPED), d="f32", cluster=[1, 2]),
    "wgmma d": ring(**RING, d="f32", bn=48, atom_n=48),
    "wgmma direct, any n": ring(**RING, epilogue="direct", n=133),
    "fused": small(**GROUPED, acc="f32", fusion="bias_n+residual+silu"),
    "fused direct": direct(**GROUPED, fusion="bias_m+residual+relu"),
    "fused wgmma": ring(**RING, fusion="bias_n+residual+silu"),
    "fused wgmma swapped": ring(**RING, **SWAPPED, fusion="bias_n+gelu"),
    "fused wgmma direct, rows": ring(**RING, fusion="bias_m+residual+relu", epilogue="direct"),
}

# tests/cudal2gen/test_validator.py gives a verdict for each macro in them.
EXECUTED = draw_part(list(RECORDS), 4)


def grouped_shape(record: Record, *groups: int, rows_after: int = 0, **changes: Any) -> Shape:
    """A shape with the record's n and k, these groups of rows, and further rows after the last group."""
    return replace(Shape(sum(groups) + rows_after, record.n, record.k, groups=groups), **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXECUTED)
def test_each_group_is_multiplied_by_its_own_b(name: str, library: Path) -> None:
    record = RECORDS[name]
    (artifact,) = compiler.build([record])
    assert artifact.ptxas.findings == []
    assert read((artifact.directory / "kernel.launch").read_text()) == record.launch
    bm = record.bm
    for shape, inputs in (
        (grouped_shape(record, 0, 5, bm + 1, 0, bm, 1, 0, rows_after=3), "binary"),
        (grouped_shape(record, 2 * bm + 3), "normal"),
        (grouped_shape(record, 0, 0, rows_after=bm + 1), "binary"),
        (grouped_shape(record, 3, 2, shared_b=True), "special"),
        (grouped_shape(record, 3, bm, n=record.n - 5), "integers"),
    ):
        case, done = run_case(record, artifact, library, shape, inputs, hazards=inputs == "binary")
        assert case.findings == (), shape
        assert [len(product.a) for product in done.products] == list(shape.groups)
        assert shape.shared_b or len({product.b.tobytes() for product in done.products}) == len(shape.groups)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("plain", 8), ("plain", 9), ("plain", 65), ("plain", 513), ("wgmma", 513)])
def test_any_number_of_groups_is_searched(name: str, count: int, library: Path) -> None:
    record = RECORDS[name]
    (artifact,) = compiler.build([record])
    sizes = [0] * count
    for group in {0, count // 2, count - 1}:
        sizes[group] = 3
    shape = grouped_shape(record, *sizes, n=32, k=64)
    case, done = run_case(record, artifact, library, shape, "integers", hazards=False)
    assert case.findings == ()
    assert done.tiles == len([size for size in sizes if size])


@st.composite
def grouped_records(draw: st.DrawFn) -> Record:
    """Grouped records near drawn plain ones."""
    record = draw(st.one_of(direct_records(), multistage_records(max_tile=64), wgmma_records(max_cols=64)))
    try:
        return edit(record, {"batch": "grouped"}).fitted().record
    except IllegalRecord:  # k is not a whole number of vectors
        return draw(st.just(RECORDS["plain"]))


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(grouped_records(), st.lists(st.integers(0, 70), min_size=1, max_size=6), st.integers(0, 9))
def test_drawn_groups_are_computed(record: Record, groups: list[int], rows_after: int) -> None:
    (artifact,) = compiler.build([record])
    rows_after = rows_after or int(not any(groups))
    k = record.baked_k or min(record.k, 4 * record.k_step)
    shape = grouped_shape(record, *groups, rows_after=rows_after, n=min(record.n, 2 * record.bn), k=k)
    case, _ = run_case(record, artifact, compiler.launcher(), shape, "normal", hazards=False)
    assert case.findings == ()


def test_a_verdict_tries_empty_groups_edges_many_groups_and_rows_after_them() -> None:
    for name in ("plain", "wgmma"):
        record = RECORDS[name]
        shapes = problems.stress_shapes(record)
        assert all(shape.groups and sum(shape.groups) <= shape.m for shape in shapes)
        sizes = [shape.groups for shape in shapes]
        assert any(len(groups) == 1 for groups in sizes)
        assert any(not any(groups) for groups in sizes)
        assert any(groups[0] == 0 < max(groups) for groups in sizes)
        assert any(groups[-1] == 0 < max(groups) for groups in sizes)
        assert any({1, record.bm - 1, record.bm, record.bm + 1} <= {*groups} for groups in sizes)
        assert any(len(groups) > 64 for groups in sizes)
        assert any(sum(shape.groups) < shape.m for shape in shapes)
        assert any(shape.shared_b for shape in shapes)
    case = grouped_shape(record, 3, 4, rows_after=5).case("binary", 1)
    assert case.options == {"groups": 2, "rows": 7}
    assert problems.own_shape(RECORDS["plain"]).groups == (0, 48, 0, 16)


def test_a_group_changes_names_and_texts() -> None:
    for name in ("plain", "wgmma"):
        record = RECORDS[name]
        plain = record.at(record.problem.revised(batch="none"))
        assert "_grouped_" in record.name
        assert record.problem.title.endswith(" grouped")
        assert "roup" not in plain.launch.write() + plain.name
        assert "struct Groups" not in render(plain)
        assert read(record.launch.write()) == record.launch
        assert edit(plain, {"batch": "grouped"}).fitted().record.name == record.name


# --- faults are seen ---

# For each fault of the search for a slot's group: the text, and its replacement.
SEARCH: dict[str, tuple[str, str]] = {
    "empty groups have no slots": ("begin + group * (kBM - 1)", "begin"),
    "a group that begins in the slot is passed over": ("<= slot) {", "< slot) {"),
}
# Faults of kernels with mma.sync.
FAULTS = SEARCH | {
    "every group has the first B": ("gemm.b += group * gemm.groups.b;", ""),
    "rows of D are not those of A": ("gemm.d += int64_t(begin) * gemm.ldd", "gemm.d += int64_t(begin) * gemm.lda"),
    "the next group's rows are stored": ("gemm.m = end - begin", "gemm.m = gemm.m - begin"),
}
# Faults of kernels with tensor maps.
MAP_FAULTS = {
    "every group has the first B": ("gemm.groups.b ? work.group : 0", "0"),
    "the next group's rows are stored": ("gemm.m = end;", ""),
    "boxes reach into the next group": ("> gemm.m) {", "> gemm.m + 16) {"),
    "a group's last row is not stored": ("row + line < gemm.m", "row + line + 1 < gemm.m"),
    "rows of a cut box lie apart": ("int64_t(row + line) * gemm.ldd", "int64_t(row + line) * gemm.n"),
    "a tile begins in its slot's row": ("begin + (cluster_m - first_slot(begin, group)) * kBM", "cluster_m * kBM"),
}
# A fault of kernels with a C.
FUSION_FAULTS: dict[str, tuple[str, str]] = {
    "rows of C are not those of D": ("gemm.fused.c += int64_t(begin) * gemm.fused.ldc;", ""),
}
# Pairs of a record's name and the faults to plant into its text.
FAULTS_OF_RECORDS = [("plain", FAULTS), ("wgmma", MAP_FAULTS), ("fused", FUSION_FAULTS)]
FAULTY = {
    (name, fault): Faulty(RECORDS[name], *texts)
    for name, faults in FAULTS_OF_RECORDS
    for fault, texts in faults.items()
}
BUILT_AHEAD = [*(RECORDS[name] for name in EXECUTED), *FAULTY.values()]


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), FAULTY)
def test_a_faulty_text_is_noticed(name: str, fault: str, library: Path) -> None:
    record, artifact = RECORDS[name], FAULTY[name, fault].build()
    assert render(record).count(FAULTY[name, fault].before) == 1, "the text to replace occurs once"
    shape = grouped_shape(record, 0, 5, record.bm + 1, 0, record.bm, 1, 0, 0, 2, 1, rows_after=3)
    case, _ = run_case(record, artifact, library, shape, "integers")
    assert not case.passed


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "persistent", "wgmma", "wgmma swapped"])
@pytest.mark.parametrize("ends", [[40, 8, 20], [-5, 1000000, 3], [2**31 - 1, -(2**31), 7], [64, 64, 70]])
def test_ends_out_of_order_store_nothing_outside_of_d(name: str, ends: list[int], library: Path) -> None:
    record = RECORDS[name]
    (artifact,) = compiler.build([record])
    m, n, k = 64, 64, 64
    memory = emulator.Memory()
    a, b = memory.upload(np.ones((m, k), np.float16)), memory.upload(np.ones((len(ends), n, k), np.float16))
    guarded = memory.upload(np.zeros((m + 64, n + 8), np.float16), "output", region=(slice(32, 32 + m), slice(n)))
    d = guarded.address + 32 * (n + 8) * 2
    where = memory.upload(np.array(ends, np.int32))
    with (
        emulator.session(memory, emulated.device_of(record)) as session,
        OpenKernel(library, artifact.directory, record.launch_options, emulator.runtime_path()) as kernel,
    ):
        kernel.launch(a.address, k, b.address, k, d, n + 8, m, n, k, groups=Groups(where.address, len(ends), n * k))
    assert session.errors == []


# --- what is refused ---

# A maker of records, changes, and the rule that they break.
ILLEGAL = [
    (small, {"batch": "grouped"}, "padding=none: must be predicate for batch=grouped"),
    (small, {**GROUPED, "split_k": 2}, "split_k=2: must be 1 for batch=grouped"),
    (small, {**GROUPED, "raster": "zsplit", "swizzle_stride": 64}, "raster=zsplit: must be plain or persistent"),
    (direct, {**GROUPED, "split_k": 2}, "split_k=2: must be 1 for batch=grouped"),
    (once, {"batch": "grouped"}, "batch=grouped: must be none or strided for family sm90_small"),
    (ring, {**RING, "split_k": 2, "reduce": "workspace"}, "split_k=2: must be 1 for batch=grouped"),
    (ring, {**RING, "stream_k": True}, "stream_k=true: must be false for batch=grouped"),
    (ring, {**RING, "prefetch_b": True}, "prefetch_b=true: must be false for batch=grouped"),
    (ring, {**RING, **SWAPPED, "fusion": "bias_m"}, "swap_ab=true: must be false for bias_m and batch=grouped"),
    (ring, {**RING, "cluster": [2, 1]}, r"cluster=\[2, 1\]: must be \[1, ..\] for batch=grouped"),
]


@pytest.mark.parametrize(("make", "changes", "message"), ILLEGAL)
def test_what_groups_exclude_is_refused_in_words(make: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(IllegalRecord, match=message):
        make(**changes)


# Changed arguments of a launch, its groups, and why the launcher refuses it.
REFUSED = [
    ({}, None, "this kernel is grouped: launch it by cudal2gen_launch_grouped"),
    ({}, Groups(0, 2, 64), "needs the ends of its groups"),
    ({}, Groups(2, 2, 64), "aligned to 4 bytes"),
    ({}, Groups(4, 0, 64), "a batch of 0 groups"),
    ({}, Groups(4, 65536, 64), "from 1 to 65535 groups"),
    ({}, Groups(4, 2, 4), "aligned to 16 bytes"),
    ({}, Groups(4, 2, -8), "out of range"),
    ({}, Groups(4, 65535, 64), "more rows or slices of CTAs than a grid has"),
    ({"batch": "none"}, Groups(4, 2, 64), "this kernel computes no groups; one of batch=grouped does"),
]


@pytest.mark.parametrize(("changes", "groups", "message"), REFUSED)
def test_groups_that_no_launch_takes_are_refused(
    changes: dict[str, Any], groups: Groups | None, message: str, library: Path
) -> None:
    record = small(**GROUPED | changes)
    (artifact,) = compiler.build([record])
    with (
        emulator.session(device=emulator.Device(sm_count=2)) as session,
        OpenKernel(library, artifact.directory, record.launch_options, emulator.runtime_path()) as kernel,
        pytest.raises(LaunchError, match=message),
    ):
        kernel.launch(1 << 20, 64, 1 << 21, 64, 1 << 22, 64, 1 << 17, 64, 64, groups=groups)
    assert session.launches == []
