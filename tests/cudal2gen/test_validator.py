"""Proves that every path of the templates is right, and that the checks notice faulty kernels."""

from __future__ import annotations

import random
import re
import shutil
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin
from unittest import mock

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cudal2gen import places, validator
from cudal2gen.generation import catalog, compiler
from cudal2gen.kernel import FAMILIES, IllegalRecord, Layout, Record, revise
from cudal2gen.kernel.fusion import PARTS
from cudal2gen.results import Verdict
from cudal2gen.validator import Shape, emulated, stress_shapes
from cudal2gen.validator.problems import kinds, thorough_shape
from kernelproof import emulator
from kernelproof.emulator.hopper.bulk import Bulk
from kernelproof.emulator.hopper.cluster_memory import ClusterMemory
from tests.cudal2gen import covering
from tests.cudal2gen.covering import BRANCHES, COVERING
from tests.cudal2gen.paths import PATHS, once, small
from tests.cudal2gen.strategies import direct, prefetch, records
from tests.draws import THOROUGH, draw_part

# A smaller batch would be compiled again at every step, and the message names the record anyway.
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)


# ``make test`` executes every branch, and one in this many of the paths that only add values and combinations.
REPEATING = draw_part([name for name in PATHS if name not in BRANCHES], 60)
# The paths that are executed, with their numbers.
EXECUTED = {name: number for number, name in enumerate(PATHS) if name in BRANCHES or name in REPEATING}
BUILT_AHEAD = [PATHS[name] for name in EXECUTED]


COMPLETE_STEP = 64  # one path in this many has a complete verdict; the others have ``some_shapes`` and ``some_kinds``
SHAPE_STEP = 24  # the others have the problem with all inputs, and one in this many of the other problems
# Every path has binary inputs, which show wrong copies and products. Wrong rounding and propagation are faults of
# macros that several paths share, so neighbouring paths have different inputs.
KINDS_OF_INPUTS = (("binary", "integers", "normal"), ("binary", "special"), ("binary", "integers"))


def some_shapes(record: Record, number: int) -> list[Shape]:
    """The problem that is executed with all inputs, and a part of the others, which differs between neighbouring paths.
    In ``make thorough`` all problems. ``number``: that of the path."""
    shapes = stress_shapes(record)
    if THOROUGH or number % COMPLETE_STEP == 0:
        return shapes
    thorough = thorough_shape(record, shapes)
    rest = number % SHAPE_STEP
    return [shape for place, shape in enumerate(shapes) if shape == thorough or place % SHAPE_STEP == rest]


def marks(name: str, number: int) -> list[pytest.MarkDecorator]:
    """``slow``, unless the path has a complete verdict that takes about a second, as it does without mbarriers."""
    quick = number % COMPLETE_STEP == 0 and not PATHS[name].waits_by_mbarriers
    return [] if quick else [pytest.mark.slow]


def some_kinds(shape: Shape, thorough: bool, exact: int, number: int) -> list[str]:
    """``problems.kinds``, the kinds of inputs of a problem, without those that path ``number`` leaves to others."""
    taken = (*KINDS_OF_INPUTS[number % len(KINDS_OF_INPUTS)], "sparse")
    return [kind for kind in kinds(shape, thorough, exact) if kind in taken]


@pytest.mark.parametrize(
    ("number", "name"),
    [pytest.param(number, name, marks=marks(name, number), id=name) for name, number in EXECUTED.items()],
)
def test_every_path_is_right(number: int, name: str, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = THOROUGH or number % COMPLETE_STEP == 0
    some = {*KINDS_OF_INPUTS[number % len(KINDS_OF_INPUTS)]}
    inputs = {"binary", "integers", "normal", "special"} if whole else some
    monkeypatch.setattr(emulated, "stress_shapes", partial(some_shapes, number=number))
    if not whole:
        monkeypatch.setattr(emulated, "kinds", partial(some_kinds, number=number))
    record = PATHS[name]
    verdict = validator.validate(record, compiler.build([record])[0], library)
    assert verdict.findings == []
    assert verdict.passed
    assert {case.inputs for case in verdict.cases} >= inputs
    assert all(case.ctas for case in verdict.cases)
    # A and B, of 2 bytes an element, are loaded once for each CTA that needs them. With split_k, each slice's partial
    # sums in f32 are loaded once more. A bias and C would add to that, so kernels with fusion are left out.
    if record.family == "sm80_multistage" and not record.predicated and not record.fusion:
        largest = thorough_shape(record, stress_shapes(record))
        tiles = -(-largest.m // record.bm) * -(-largest.n // record.bn)
        k = -(-largest.k // record.bk) * record.bk  # with padding
        operand_bytes = tiles * (record.bm + record.bn) * k * 2
        partial_bytes = tiles * record.bm * record.bn * 4 * record.split_k if record.split_k > 1 else 0
        assert verdict.counters["bytes ld.global"] == operand_bytes + partial_bytes
    multiplied = {name for name in verdict.counters if re.match("(wg)?mma_|tcgen05_", name)}
    multiplies = record.work.instruction.partition(".")[0]
    assert multiplied == {f"{multiplies}_per_k_tile"}
    # TMA delivers every k-tile to every CTA. It loads A once for the CTAs that lie along n in a cluster, and B once for
    # those that lie along m, because they share it by multicast.
    if "bytes tma load" in verdict.counters:
        largest = thorough_shape(record, stress_shapes(record))
        across, along = getattr(record, "cluster", (1, 1))
        row_tiles = sum(-(-rows // (record.bm * across)) for rows in largest.groups or (largest.m,))
        clusters = row_tiles * -(-largest.n // (record.bn * along))
        k_tiles = clusters * across * along * -(-largest.k // record.k_step)
        steps = k_tiles * record.k_step * 2
        assert verdict.counters["bytes tma delivered"] == k_tiles * record.step_bytes
        assert verdict.counters["bytes tma load"] == steps * record.bm // along + steps * record.bn // across


def choices(annotation: Any) -> list[Any]:
    """The values that a field's type lists; none if it is a range."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if annotation is bool:
        return [False, True]
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return [value for part in parts for value in ([None] if part is NoneType else choices(part))]


# By family and field: the values that are legal in other families only.
ILLEGAL = {("sm90_small", "batch"): {"grouped"}, ("sm80_direct", "layout"): {"nt", "tt"}}


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if not family.TEXTUAL])
def test_every_value_of_every_field_is_executed_on_a_gpu_and_in_make_thorough(family: str) -> None:
    executed = [PATHS[name] for name in COVERING if PATHS[name].family == family]
    for name, field in FAMILIES[family].line_fields().items():
        if name == "gpu":
            continue
        illegal = ILLEGAL.get((family, name), set())
        missing = set(choices(field.annotation)) - illegal - {getattr(record, name) for record in executed}
        assert not missing, f"{name}: {missing} is executed nowhere"
    assert {part for record in executed for part in record.fusion.text.split("+")} == {*PARTS, "none"}
    for batch in {record.batch for record in executed}:
        assert any(record.fusion.gate for record in executed if record.batch == batch), f"{batch}, gated"
    if family == "sm100_tcgen05":
        assert {(1, 1), (2, 1), (1, 2), (2, 2)} <= {record.cluster for record in executed}
        assert {16, 32, 64} <= {record.atom_cols for record in executed}, "every load from tensor memory"
        for layout, pair, swap_ab in product(get_args(Layout), (False, True), (False, True)):
            if (layout, pair, swap_ab) != ("tn", True, True):
                assert any(
                    (record.layout, record.pair, record.swap_ab) == (layout, pair, swap_ab) for record in executed
                )
    if family == "sm90_wgmma":
        assert {(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)} <= {record.cluster for record in executed}
        assert set(range(16, 257, 16)) == {record.atom_n for record in executed}, "every width of the instruction"
        assert {2, 4, 8} <= {record.split_k for record in executed if record.reduce == "cluster"}
        for layout, acc in product(get_args(Layout), ("f16", "f32")):
            assert any((record.layout, record.acc) == (layout, acc) for record in executed)


@pytest.mark.slow
def test_every_branch_of_the_templates_is_executed(checkout: Path) -> None:
    """Every branch is executed in each family in which any path takes it. ``make goldens`` renews the list."""
    branches, known = covering.branches_by_path(checkout)
    assert not set(known) - set().union(*branches.values()), "branches that no path takes"
    shown = covering.features_by_family(branches)
    assert set().union(*(shown[name] for name in BRANCHES)) == set().union(*shown.values())
    assert (*covering.sets(checkout),) == (BRANCHES, COVERING[len(BRANCHES) :])


DRAWN = 8 if THOROUGH else 2  # records of one example
# Drawn records whose tiles are soon executed.
SMALL_TILES = records.filter(lambda record: record.bm * record.bn <= 128 * 128)
# Changes of fields of sm80_multistage, of which ``variants`` combines some.
CHANGES: list[dict[str, Any]] = [
    {"stages": 1, "g2s_slot": 0},
    {"stages": 2},
    {"padding": "predicate"},
    {"layout": "nn"},
    {"layout": "nt"},
    {"layout": "tt"},
    {"acc": "f32"},
    {"raster": "persistent", "swizzle_stride": None},
    {"split_k": 2},
    {"g2s_slot": 1},
    prefetch("staggered"),
    prefetch("pingpong"),
    prefetch("none"),
    {"epilogue": "global", "c_batch": None, "r2s_bytes": None, "smem_swizzle_c": None},
]


def variants(lines: list[Record], rng: random.Random, number: int) -> list[Record]:
    """``number`` legal records: each is one of ``lines``, the catalog's, with one to three of CHANGES, apart from those
    that would be illegal. All texts differ from each other and from that of the catalog's line."""
    draw_part: dict[str, Record] = {}
    while len(draw_part) < number:
        line = record = rng.choice(lines)
        for change in rng.sample(CHANGES, rng.randint(1, 3)):
            with suppress(IllegalRecord):
                record = revise(record, **change)
        if record.name != line.name:
            draw_part[record.name] = record
    return list(draw_part.values())


def check_records(records: list[Record], library: Path) -> None:
    """Checks that records are right: the first by a whole verdict, the others by ``some_shapes``."""
    for number, (record, artifact) in enumerate(zip(records, compiler.build(records), strict=True)):
        with mock.patch.object(emulated, "stress_shapes", partial(some_shapes, number=number)):
            assert validator.validate(record, artifact, library).findings == [], catalog.dump(record)


@pytest.mark.slow
class TestRecordsDrawnAtRandom:
    """Hypothesis draws different records, which are compiled in batches and must be right."""

    @given(st.lists(SMALL_TILES, min_size=DRAWN, max_size=DRAWN, unique_by=lambda record: record.name))
    @settings(max_examples=40 if THOROUGH else 1, phases=NO_SHRINKING)
    def test_legal_records_are_right(self, library: Path, draw_part: list[Record]) -> None:
        check_records(draw_part, library)

    @given(st.integers(0, 2**32))
    @settings(max_examples=20 if THOROUGH else 1, phases=NO_SHRINKING)
    def test_mutations_of_catalog_lines_are_right(self, library: Path, seed: int) -> None:
        mutated = variants(catalog.load(places.shipped("configs") / "kernels.jsonl"), random.Random(seed), DRAWN)
        check_records(mutated, library)


@pytest.mark.slow
def test_verdicts_of_many_kernels_come_from_processes(library: Path) -> None:
    """Right kernels and a wrong one are each reported once, in whatever order they finish."""
    kernels = [small(m=32, n=32, k=64, acc=acc) for acc in ("f16", "f32")]
    built = compiler.build(kernels)
    swapped = (kernels[1], built[0])  # the fp16 kernel under the fp32 record's name
    work = [*zip(kernels, built, strict=True), swapped]
    judgements = list(validator.validate_all(work, library, jobs=2))
    verdicts = [judgement for judgement in judgements if isinstance(judgement, Verdict)]
    assert len(verdicts) == 3, judgements
    assert {(verdict.record, verdict.digest): verdict.passed for verdict in verdicts} == {
        (kernels[0].name, built[0].digest): True,
        (kernels[1].name, built[1].digest): True,
        (kernels[1].name, built[0].digest): False,
    }
    alone = validator.validate(kernels[0], built[0], library)
    assert alone in verdicts, "the same verdict as in this process"


def test_shapes_stress_a_record() -> None:
    """The record's tile is 32 * 32 * 64, its ring has three stages, and its own problem is four k-tiles long."""
    shapes = stress_shapes(small(stages=3))
    sizes = {(shape.m, shape.n, shape.k // 64) for shape in shapes}
    assert (32, 32, 1) in sizes
    assert {k for _, _, k in sizes} >= {1, 2, 3, 5}, "k below, at and above the ring"
    assert any(m > 32 and n > 32 for m, n, _ in sizes)
    assert (64, 64, 4) in sizes, "its own problem"
    ragged = stress_shapes(small(padding="predicate"))
    assert any(shape.m % 32 and shape.n % 8 and shape.k % 64 for shape in ragged)
    assert (1, 1) in {(shape.m, shape.n) for shape in ragged}
    strides = {shape.swizzle_stride for shape in stress_shapes(small(raster="zsplit", swizzle_stride=4096))}
    assert strides == {4096, 32, 48}
    assert {shape.k for shape in stress_shapes(small(bake=["k"], k=192))} == {192}
    assert min(shape.k for shape in stress_shapes(small(split_k=3))) == 3 * 64
    # If shared memory holds all of a CTA's k at once, every chunk of every slice is used.
    assert max(shape.k for shape in stress_shapes(once(k_chunks=3, split_k=4, k=1 << 9))) == 3 * 4 * 64


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"raster": "zsplit", "swizzle_stride": 1000}, {}, {"split_k": 2}, {"raster": "persistent"}]
)
def test_a_records_own_large_problem_runs_in_part(changes: dict[str, Any], library: Path) -> None:
    record = small(m=4096, n=4096, k=2048, **changes)
    shape = validator.own_shape(record)
    case, done = validator.run_case(record, compiler.build([record])[0], library, shape, "normal", counters=True)
    assert case.passed, case.findings
    assert shape.corners == ("raster" not in changes or changes["raster"] != "persistent")
    assert case.ctas <= 20
    counters = validator.summary(record, done)
    assert counters["mma_per_k_tile"] == record.warp_m * record.warp_n * record.k_blocks


@pytest.mark.parametrize("layout", ["tn", "nn"])
def test_a_padded_problem_runs_at_its_own_size(layout: str, library: Path) -> None:
    record = small(m=61, n=45, k=70, padding="pad", layout=layout)
    shape = validator.own_shape(record)
    (artifact,) = compiler.build([record])
    for inputs in ("integers", "special"):
        case, done = validator.run_case(record, artifact, library, shape, inputs)
        assert (case.passed, case.m, case.n, case.k) == (True, 61, 45, 70), case.findings
        assert (done.a.shape, done.b.shape, done.d.shape) == ((61, 128), (45, 128), (61, 45))
        assert not done.a[:, 70:].any()
        assert not done.b[:, 70:].any()
        if inputs == "integers":
            np.testing.assert_array_equal(done.d, done.a.astype(np.float32) @ done.b.astype(np.float32).T)
    assert shape in stress_shapes(record)


def test_an_fp16_accumulator_in_an_fp32_kernel_is_noticed(library: Path) -> None:
    """Sums of products of 0 and 1 are exact in fp16 too, so a test with these inputs alone does not notice it."""
    honest, swapped = small(acc="f32"), compiler.build([small()])[0]
    shape = Shape(64, 96, 320)
    binary, _ = validator.run_case(honest, swapped, library, shape, "binary")
    assert binary.passed
    random, _ = validator.run_case(honest, swapped, library, shape, "normal")
    assert not random.passed
    assert random.findings[0].startswith("wrong-value")


@pytest.mark.parametrize(
    "record", [small(), small(split_k=3), direct(), direct(split_k=3)], ids=lambda record: record.name
)
def test_the_order_of_k_has_every_k_once(record: Record) -> None:
    """``k_order`` has a list for each slice of k, and in it a list for each group of up to 8 k that are added at
    once."""
    for k in (96, 200, 328):
        order = record.k_order(k)
        assert len(order) == record.split_k
        assert sorted(k for part in order for group in part for k in group) == list(range(k))


@pytest.mark.slow
def test_the_direct_family_adds_k_by_lanes(library: Path) -> None:
    """An MMA uses four of a lane's eight k. If k ends within a step, its groups are shorter but not shifted."""
    assert direct().k_order(32)[0][:2] == [[0, 1, 8, 9, 16, 17, 24, 25], [2, 3, 10, 11, 18, 19, 26, 27]]
    assert direct().k_order(24)[0] == [
        [e + pair for lane in (0, 8, 16) for e in (lane, lane + 1)] for pair in (0, 2, 4, 6)
    ]
    record = direct(bm=64, layout="nn", padding="predicate", mma_repeat=[2, 2, 1], m=39, n=47, k=24)
    artifact = compiler.build([record])[0]
    for seed in range(20):
        case, _ = validator.run_case(record, artifact, library, Shape(128, 96, 24), "normal", hazards=False, seed=seed)
        assert case.findings == ()


@pytest.mark.slow
def test_one_warp_needs_its_barrier_as_well(library: Path, tmp_path: Path) -> None:
    """ldmatrix reads what other lanes copied. Running in all lanes together does not order it after their copies."""
    record = small(mma_repeat=[1, 1, 1])
    built = compiler.build([record])[0]
    lines = built.ptx.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if "bar.sync" in line)
    faulty = compiler.Artifact(tmp_path / "faulty", built.ptxas)
    shutil.copytree(built.directory, faulty.directory)
    faulty.ptx.write_text("\n".join(lines[:first] + lines[first + 1 :]))
    case, _ = validator.run_case(record, faulty, library, Shape(32, 32, 64), "binary")
    assert any("ldmatrix" in finding for finding in case.findings), case.findings


@pytest.mark.slow
def test_a_descriptor_that_keeps_the_rank_is_noticed(library: Path, tmp_path: Path) -> None:
    """The rank of the CTA is above the 18 bits of an address, and would be added to the distance between chunks of
    columns."""
    record = PATHS["wgmma 2x1 nn, three chunks"]
    built = compiler.build([record])[0]
    faulty = compiler.Artifact(tmp_path / "faulty", built.ptxas)
    shutil.copytree(built.directory, faulty.directory)
    shape = Shape(record.m, record.n, record.k)
    assert validator.run_case(record, built, library, shape, "binary")[0].passed
    unmasked = [mutant for mutant in emulator.mutants(built.ptx.read_text()) if mutant.kind == "unmask"]
    passed = []
    for mutant in unmasked:
        faulty.ptx.write_text(mutant.text)
        passed.append(validator.run_case(record, faulty, library, shape, "binary")[0].passed)
    # The fault in A may pass, since rows of A are along k, where the field is not used.
    assert False in passed


@pytest.mark.parametrize("name", ["tensor pair, full size", "tensor", "wgmma 2x2"])
def test_boxes_of_a_right_kernel_are_checked_as_a_whole(
    name: str, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TMA's boxes are checked at once. The checks by element and by lane, which take several times as long, are for
    boxes with a finding, so a right kernel never calls them."""
    slow_checks: list[str] = []
    for unit, method in ((ClusterMemory, "async_read"), (ClusterMemory, "_report_early_write"), (Bulk, "_store_box")):
        check = getattr(unit, method)

        def counted(*arguments: Any, check: Any = check, method: str = method) -> None:
            slow_checks.append(method)
            check(*arguments)

        monkeypatch.setattr(unit, method, counted)
    record = PATHS[name]
    shape = Shape(2 * record.cluster[0] * record.bm, 2 * record.cluster[1] * record.bn, 4 * record.bk)
    case, execution = validator.run_case(record, compiler.build([record])[0], library, shape, "binary")
    assert case.passed
    assert execution.ctas
    assert slow_checks == []


def test_a_refused_launch_is_a_finding(library: Path) -> None:
    record = small()
    case, _ = validator.run_case(record, compiler.build([record])[0], library, Shape(40, 32, 64), "binary")
    assert not case.passed
    assert "the tile does not divide the problem" in case.findings[0]
