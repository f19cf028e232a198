"""Proves facts of the kernels' PTX: counts and order of instructions, rounds, registers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations, groupby, product
from typing import Any

import pytest

from cudal2gen import places
from cudal2gen.generation import catalog, compiler
from cudal2gen.kernel import MmaSyncKernel, Sm80Direct, Sm80Multistage
from tests.cudal2gen.strategies import STAGED_8, STAGED_16, STRAIGHT, TO_GLOBAL, direct, multistage, prefetch
from tests.cudal2gen.test_renderer import CODE_CHANGES, DATA_CHANGES, pair
from tests.draws import THOROUGH, draw_part

# By part of an instruction: the letter that stands for it in ``order``.
TOKENS = {
    "ldmatrix": "L",
    "mma.sync": "M",
    "cp.async.cg": "C",
    "cp.async.wait_": "W",
    "cp.async.commit_group": "F",
    "bar.sync": "B",
    "barrier.sync": "B",
}
# One warp of two MMA rows and four MMA columns: 4 ldmatrix and 8 mma a k-block, 4 k-blocks and 16 cp.async a k-tile.
ONE_WARP: dict[str, Any] = {
    "bm": 32,
    "bn": 32,
    "bk": 64,
    "mma_repeat": [1, 1, 1],
    "g2s_cols": 4,
    "m": 64,
    "n": 64,
    "k": 256,
}
# The fields of each kind of prefetch; "multi" also with distance 3.
KINDS = {
    "single": prefetch("single"),
    "single_intra_tile": prefetch("single_intra_tile"),
    "none": prefetch("none"),
    "multi": prefetch("multi", 2),
    "multi3": prefetch("multi", 3),
    "pingpong": prefetch("pingpong"),
    "staggered": prefetch("staggered"),
}


def ptx(record: Sm80Multistage | Sm80Direct) -> str:
    """The PTX of a compiled record."""
    return compiler.build([record])[0].ptx.read_text()


def instructions(text: str) -> list[str]:
    """The instructions of a kernel, without comments, line information and empty lines."""
    body = text[text.index("{", text.index(".entry")) :]
    lines = (re.sub(r"//.*", "", line).strip() for line in body.splitlines())
    return [line for line in lines if line and not line.startswith((".loc", ".file", ".reg"))]


def main_loop(text: str) -> list[str]:
    """The innermost loop that holds the MMAs."""
    lines = instructions(text)
    loops = []
    for end, line in enumerate(lines):
        if branch := re.search(r"bra(?:\.uni)?\s+(\$L\w+);", line):
            label = branch.group(1) + ":"
            if label in lines[:end]:
                loop = lines[lines.index(label) : end + 1]
                if any("mma.sync" in item for item in loop):
                    loops.append(loop)
    return min(loops, key=len)


def order(lines: list[str]) -> str:
    """The kinds of instructions in order, with run lengths: L4M8 is four ldmatrix, then eight mma."""
    kinds = [token for line in lines for name, token in TOKENS.items() if name in line]
    return "".join(f"{token}{len(list(run))}" for token, run in groupby(kinds))


def count(lines: list[str], pattern: str) -> int:
    """The number of lines that match a pattern."""
    return sum(bool(re.search(pattern, line)) for line in lines)


# Changes of a record whose instructions are counted.
COUNTED: Sequence[dict[str, Any]] = draw_part([
    {},
    {"acc": "f32"},
    {"layout": "nn"},
    {"bk": 32, "stages": 5, "raster": "zsplit", "swizzle_stride": 2048},
    {"bn": 256, "bk": 32},
    {"bm": 96, "bn": 96, "m": 96, "n": 96},
    {"stages": 1},
    {"stages": 2},
    {"raster": "persistent"},
    {"padding": "predicate"},
    {"split_k": 2},
    {"mma_repeat": [1, 4, 1], "g2s_cols": 8},
    {"bm": 16, "bn": 64, "mma_repeat": [1, 4, 1], "c_batch": 1},
    *KINDS.values(),
], 2)  # fmt: skip


@pytest.mark.parametrize("changes", COUNTED, ids=str)
def test_a_k_tile_has_the_instructions_that_follow_from_the_record(changes: dict[str, Any]) -> None:
    record = multistage(**changes)
    loop = main_loop(ptx(record))
    assert count(loop, "mma.sync") == record.warp_m * record.warp_n * record.k_blocks
    transposed = record.layout == "nn"
    assert count(loop, r"ldmatrix.*\.x4\.m8n8\.shared") == (
        record.warp_m * record.k_blocks + (0 if transposed else record.warp_n // 2 * record.k_blocks)
    )
    assert count(loop, r"ldmatrix.*\.x4\.trans") == (record.warp_n // 2 * record.k_blocks if transposed else 0)
    rows_a, rows_b = record.threads // record.g2s_cols, record.threads // record.copy_cols_b
    copies = -(-record.bm // rows_a) * (record.bk // 8 // record.g2s_cols)
    tile_b = (record.bk, record.bn // 8) if transposed else (record.bn, record.bk // 8)
    copies += -(-tile_b[0] // rows_b) * (tile_b[1] // record.copy_cols_b)
    assert count(loop, r"cp\.async\.cg") == copies
    acc = "f32.f16.f16.f32" if record.acc == "f32" else "f16.f16.f16.f16"
    assert count(loop, "mma.sync") == count(loop, re.escape(f"m16n8k16.row.col.{acc}"))
    for local in (r"ld\.local", r"st\.local"):
        assert count(instructions(ptx(record)), local) == 0


# By prefetch kind: the main loop's instructions in the notation of ``order``, with copies in slot 0 of a ring of three
# stages. An M8 is one of four k-blocks.
ORDERS = {
    "single": "L4 C16 F1 M8 L4 M8 L4 M8 W1 B1 L4 M8",
    "multi": "L4 C16 F1 M8 L4 M8 W1 B1 L4 M8 L4 M8",
    "multi3": "L4 C16 F1 M8 W1 B1 L4 M8 L4 M8 L4 M8",
    "none": "L4 C16 F1 M8 L4 M8 L4 M8 L4 M8 W1 B1",
    "single_intra_tile": "L4 C16 F1 M8 L4 M8 L4 M16 W1 B1 L4",
    "staggered": "L2 C16 F1 M8 L4 M8 L4 M8 L2 W1 B1 L2 M8 L2",
    "pingpong": "C16 F1 L2 M4 L2 M4 L2 M4 L2 M4 L2 M4 L2 M4 W1 B1 L2 M4 L2 M4",
}


@pytest.mark.parametrize("kind", ORDERS)
def test_a_prefetch_kind_orders_a_k_tile_as_it_says(kind: str) -> None:
    loop = main_loop(ptx(_one_warp(**KINDS[kind])))
    assert order(loop) == ORDERS[kind].replace(" ", "")


def _one_warp(**changes: Any) -> Sm80Multistage:
    """A record of one warp, with changes."""
    return multistage(**(ONE_WARP | changes))


def test_prefetch_kinds_differ_pairwise() -> None:
    loops = {kind: order(main_loop(ptx(_one_warp(**change)))) for kind, change in KINDS.items()}
    assert {kind: loops[kind] for kind in ORDERS} == {kind: text.replace(" ", "") for kind, text in ORDERS.items()}
    for a, b in combinations(loops, 2):
        assert loops[a] != loops[b], (a, b)


# The prefetch kinds in straight-line code.
UNROLLED: list[dict[str, Any]] = [{"bake": ["k"], "k": 256, "unroll_k": True, **kind} for kind in KINDS.values()]


def live_fragments(record: Sm80Multistage) -> int:
    """The largest number of registers that hold live fragments at one point of straight-line code."""
    lines = [line for line in instructions(ptx(record)) if "ldmatrix" in line or "mma.sync" in line]
    loaded: dict[str, int] = {}
    last_use: dict[str, int] = {}
    for at, line in enumerate(lines):
        groups = re.findall(r"\{([^}]*)\}", line)
        if "ldmatrix" in line:
            loaded |= {name.strip(): at for name in groups[0].split(",")}
        else:
            last_use |= {name.strip(): at for group in groups[1:3] for name in group.split(",")}
    spans = [(start, last_use[name]) for name, start in loaded.items() if name in last_use]
    return max(sum(start <= at < end for start, end in spans) for at in range(len(lines)))


def test_prefetch_kinds_keep_as_many_fragments_as_they_say() -> None:
    """A warp's fragments of one k-block are 8 registers of A and 8 of B. ``none`` holds one k-block's, ``single`` two,
    and ``multi`` one more than its distance."""
    live = {kind: live_fragments(_one_warp(**change)) for kind, change in zip(KINDS, UNROLLED, strict=True)}
    assert live["none"] == 16
    assert live["single"] == live["single_intra_tile"] == 32
    assert live["staggered"] == 24
    assert live["multi"] == 48
    assert live["multi3"] == 64
    assert 16 < live["pingpong"] < 32, "the one fragment fills while the other drains"


PLACED: list[dict[str, Any]] = [{"g2s_slot": 1}, {"g2s_slot": 3}, {"stages": 1}, {"stages": 1, **KINDS["none"]}]


def test_the_copy_moves_with_its_slot() -> None:
    assert order(main_loop(ptx(_one_warp(g2s_slot=1)))) == "L4M8L4C16F1M8L4M8W1B1L4M8"
    assert order(main_loop(ptx(_one_warp(g2s_slot=3)))) == "L4M8L4M8L4M8C16F1W1B1L4M8", (
        "in the last slot before the wait"
    )


def test_a_ring_of_one_stage_copies_between_two_barriers() -> None:
    assert order(main_loop(ptx(_one_warp(stages=1)))) == "L4M8L4M8L4M8B1C16F1W1B1L4M8"
    assert order(main_loop(ptx(_one_warp(stages=1, **KINDS["none"])))) == "L4M8" * 4 + "B1C16F1W1B1"


# The ways to store a tile, with rounds of several sizes.
EPILOGUES = {
    "staged": {"c_batch": 2},
    "staged in one round": {"c_batch": 16},
    "staged with 8 bytes": {"c_batch": 2, **STAGED_8},
    "staged with 16 bytes": {"c_batch": 2, **STAGED_16},
    "staged, last round short": {"c_batch": 3},
    "direct": STRAIGHT,
    "direct with 16 bytes": STRAIGHT | STAGED_16,
    "direct in two rounds": STRAIGHT | {"stages": 1, "bk": 32},
    "global": TO_GLOBAL,
}
# For an epilogue of 16 MMA tiles of a warp, how many of these a thread executes: barriers, stores to shared memory,
# loads from it, stores to global memory.
ROUNDS = {
    "staged": (16, 64, 16, 16),
    "staged in one round": (2, 64, 16, 16),
    "staged with 8 bytes": (16, 32, 64, 16),
    "staged with 16 bytes": (16, 16, 64, 16),
    "staged, last round short": (12, 64, 16, 16),
    "direct": (2, 64, 16, 16),
    "direct with 16 bytes": (2, 16, 64, 16),
    "direct in two rounds": (4, 64, 16, 16),
    "global": (0, 0, 0, 64),
}


DRAWN_EPILOGUES = draw_part([*product(EPILOGUES, ("f16", "f32"))], 3)


def epilogue(record: Sm80Multistage) -> list[str]:
    """The instructions from the last MMA on."""
    lines = instructions(ptx(record))
    last = max(at for at, line in enumerate(lines) if "mma.sync" in line)
    return lines[last:]


@pytest.mark.parametrize(("kind", "acc"), DRAWN_EPILOGUES)
def test_an_epilogue_goes_through_shared_memory_as_often_as_it_says(kind: str, acc: str) -> None:
    lines = epilogue(multistage(acc=acc, **EPILOGUES[kind]))
    counts = tuple(count(lines, rf"^{name}") for name in (r"bar\w*\.sync", r"st\.shared", r"ld\.shared", r"st\.global"))
    assert counts == ROUNDS[kind]
    assert count(lines, r"cvt\.rn\.f16x2\.f32") == (64 if acc == "f32" else 0)


@pytest.mark.slow
def test_staged_rounds_before_the_barrier_and_direct_after() -> None:
    """fp32 accumulators are rounded when they are copied to the temporary fragment."""
    staged = epilogue(multistage(acc="f32", c_batch=16))
    straight = epilogue(multistage(acc="f32", **STRAIGHT))

    def first(lines: list[str], pattern: str) -> int:
        return next(at for at, line in enumerate(lines) if re.search(pattern, line))

    assert first(staged, r"cvt\.rn\.f16x2") < first(staged, r"bar\w*\.sync")
    assert first(straight, r"cvt\.rn\.f16x2") > first(straight, r"bar\w*\.sync")


def anonymous(record: Sm80Multistage | Sm80Direct) -> list[str]:
    """The instructions, and launch bounds, with the kernel's name removed."""
    text = ptx(record)
    bounds = re.findall(r"\.(?:maxntid|minnctapersm) .*", text)
    return [re.sub(rf"\w*{record.name}\w*", "name", line) for line in instructions(text)] + bounds


# tests/cudal2gen/test_renderer.py shows that each of them changes the text.
CODE_FIELDS = draw_part(sorted(CODE_CHANGES), 3)


@pytest.mark.parametrize("field", CODE_FIELDS)
def test_a_code_field_changes_the_ptx(field: str) -> None:
    before, after = pair(CODE_CHANGES, field)
    assert anonymous(before) != anonymous(after)


# By field of sm80_direct: a change of it, with the fields that the change needs.
DIRECT_CHANGES: dict[str, dict[str, Any]] = {
    "ab": {"acc": "f32", "ab": "bf16"},
    "acc": {"acc": "f32"},
    "d": {"acc": "f32", "d": "f32"},
    "fusion": {"fusion": "relu"},
    "batch": {"batch": "strided"},
    "layout": {"layout": "nn"},
    "bm": {"bm": 16},
    "bn": {"bn": 16},
    "mma_repeat": {"mma_repeat": [2, 1, 1]},
    "bake": {"bake": ["k"]},
    "unroll_k": {"bake": ["k"], "unroll_k": True},
    "padding": {"padding": "predicate"},
    "split_k": {"split_k": 2},
}


def direct_pair(field: str) -> tuple[Sm80Direct, Sm80Direct]:
    """Two direct records that differ in this field."""
    after = DIRECT_CHANGES[field]
    return direct(**{name: value for name, value in after.items() if name != field}), direct(**after)


DIRECT_FIELDS = draw_part(list(DIRECT_CHANGES), 3)


@pytest.mark.parametrize("field", DIRECT_FIELDS)
def test_a_code_field_of_the_direct_family_changes_the_ptx(field: str) -> None:
    before, after = direct_pair(field)
    assert anonymous(before) != anonymous(after)
    assert {"family", *DIRECT_CHANGES} == set(Sm80Direct.line_fields()) - Sm80Direct.DATA_FIELDS


@pytest.mark.parametrize("field", sorted(DATA_CHANGES))
def test_a_data_field_shares_the_binary_within_an_architecture(field: str) -> None:
    before, after = pair(DATA_CHANGES, field)
    first, second = compiler.build([before, after])
    assert (first.digest == second.digest) == (before.target.capability.sm == after.target.capability.sm)


def everywhere(gpu: str) -> Sequence[Sm80Multistage | Sm80Direct]:
    """Records of both families whose code differs most between architectures."""
    samples = [
        multistage(gpu=gpu, stages=2),
        multistage(gpu=gpu, stages=2, acc="f32", layout="nn", padding="predicate", **prefetch("pingpong")),
        multistage(gpu=gpu, stages=2, raster="persistent", split_k=2, **STRAIGHT, **STAGED_16),
        direct(gpu=gpu),
        direct(gpu=gpu, acc="f32", layout="nn", padding="predicate", split_k=2),
    ]
    return draw_part(samples, 2)


ARCHITECTURES = draw_part(["a100", "rtx3090", "rtx4090", "h100", "b200", "rtx5090"], 2)


@pytest.mark.parametrize("gpu", ARCHITECTURES)
def test_the_families_compile_for_every_architecture(gpu: str) -> None:
    samples = everywhere(gpu)
    for record, artifact in zip(samples, compiler.build(samples), strict=True):
        assert artifact.ptxas.arch == record.target.capability.sm
        assert artifact.ptxas.findings == []
        assert f".target {record.target.capability.sm}" in artifact.ptx.read_text()


# Records that ask for 1 to 4 resident CTAs.
BOUNDED = [multistage(stages=1, bm=64, bn=64, min_blocks=blocks, c_batch=1) for blocks in (1, 2, 3, 4)]


def test_registers_stay_within_the_occupancy_that_min_blocks_asks_for() -> None:
    for record in BOUNDED:
        registers = compiler.build([record])[0].ptxas.registers
        assert record.ctas_per_sm(registers) >= record.min_blocks


def longest_unrolled() -> MmaSyncKernel:
    """The record of the catalog with the longest unrolled text."""
    own = catalog.load(places.shipped("configs") / "kernels.jsonl")
    return max(
        (record for record in own if isinstance(record, MmaSyncKernel) and record.unroll_k),
        key=lambda record: -(-record.k // record.k_step) * record.warp_m * record.warp_n,
    )


# The longest text takes nvcc ten seconds and more, and the catalog a second to read.
FULLY_UNROLLED = [
    direct(bake=["k"], k=64 * 32, unroll_k=True),
    _one_warp(bk=32, bake=["k"], k=64 * 32, unroll_k=True),
    *([longest_unrolled()] if THOROUGH else []),
]


def test_unrolling_leaves_no_loop() -> None:
    """This holds for both families at the rule's limit of 64 steps; ``make thorough`` adds the catalog's longest
    text."""
    for record in FULLY_UNROLLED:
        assert -(-record.k // record.k_step) == 64
        lines = instructions(ptx(record))
        per_step = record.warp_m * record.warp_n * record.k_step // 16
        assert count(lines, "mma.sync") == per_step * -(-record.k // record.k_step), record.mnk
        labels = [line.rstrip(":") for line in lines if line.startswith("$")]
        for label in labels:
            branches = [at for at, line in enumerate(lines) if "bra" in line and line.endswith(f"{label};")]
            start = lines.index(f"{label}:")
            backward = [at for at in branches if at > start]
            assert not any("mma.sync" in line for at in backward for line in lines[start:at])


def test_min_blocks_bounds_registers_up_to_the_limit_of_its_rule() -> None:
    used = [compiler.build([small_bounded])[0].ptxas.registers for small_bounded in BOUNDED_UP_TO_THE_LIMIT]
    assert used[-1] <= 32 < min(used[:-1])


# A small kernel that asks for more and more resident CTAs.
BOUNDED_UP_TO_THE_LIMIT = [
    multistage(stages=1, bm=32, bn=32, mma_repeat=[2, 2, 1], min_blocks=blocks, c_batch=1, m=64, n=64)
    for blocks in (1, 8, 16)
]


def test_static_shared_memory_is_what_the_record_counts() -> None:
    for record in (multistage(), multistage(split_k=2), direct(), direct(split_k=2)):
        nbytes = compiler.build([record])[0].ptxas.smem_static_bytes
        assert (nbytes + 15) // 16 * 16 == record.smem_static_bytes


def test_the_direct_family_uses_no_shared_memory() -> None:
    lines = instructions(ptx(direct(k=128)))
    assert count(lines, r"\.shared") == 0
    assert count(lines, r"ld\.global\.nc\.v4") == 2 * (4 + 4), "a step ahead and one in the loop: 4 rows of A, 4 of B"
    assert count(main_loop(ptx(direct())), "mma.sync") == 2 * 4 * 2


BUILT_AHEAD = [
    *(multistage(**changes) for changes in COUNTED),
    *(_one_warp(**changes) for changes in (*KINDS.values(), *UNROLLED, *PLACED)),
    *(multistage(acc=acc, **EPILOGUES[kind]) for kind, acc in DRAWN_EPILOGUES),
    *(record for field in CODE_FIELDS for record in pair(CODE_CHANGES, field)),
    *(record for field in DATA_CHANGES for record in pair(DATA_CHANGES, field)),
    *(record for field in DIRECT_FIELDS for record in direct_pair(field)),
    *(record for gpu in ARCHITECTURES for record in everywhere(gpu)),
    *BOUNDED,
    *BOUNDED_UP_TO_THE_LIMIT,
    *FULLY_UNROLLED,
    multistage(acc="f32", c_batch=16),
    multistage(split_k=2),
    direct(split_k=2),
    direct(k=128),
]
