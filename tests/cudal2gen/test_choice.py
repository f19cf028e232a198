"""Proves which kernel serves a problem: by its measurement, its neighbours', and the price of padding; and the reasons
given.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cudal2gen import results
from cudal2gen.generation import answers, catalog
from cudal2gen.generation.catalog import CatalogError
from cudal2gen.kernel import Problem, Record
from cudal2gen.kernel.launch import LaunchOperands, Matrix, Sizes, rows_of
from cudal2gen.results import choice
from cudal2gen.results.choice import Row, Table, TableKernel, tabulate
from tests.cudal2gen import measured
from tests.cudal2gen.packed import NOTHING, row
from tests.cudal2gen.paths import PATHS, once, ring, small
from tests.cudal2gen.test_cli import error, run


def kernel(record: Record) -> TableKernel:
    """A kernel of a table, whose digest is its name."""
    return TableKernel(record.name, record.model_dump(mode="json"))


def use_of(record: Record, m: int, n: int, k: int, operands: LaunchOperands | None = None) -> choice.Use | None:
    """How a record's kernel would compute a problem with these operands (packed ones by default); None if it cannot."""
    packed = LaunchOperands.packed(record.layout, Sizes(m, n, k))
    return kernel(record).use(Sizes(m, n, k), operands or packed)


def problem(m: int, n: int, k: int, **more: Any) -> Problem:
    """A problem of the A100 with these sizes."""
    return Problem(**({"gpu": "a100", "acc": "f32", "layout": "tn", "m": m, "n": n, "k": k} | more))


# --- which sizes and operands a binary serves ---


# A kernel for any sizes, and one for whole tiles.
PREDICATED = small(acc="f32", padding="predicate", m=64, n=64, k=128)
WHOLE = small(acc="f32", m=96, n=96, k=64)


@pytest.mark.parametrize(
    ("record", "sizes", "launched", "copied"),
    [
        (PREDICATED, (64, 64, 128), (64, 64, 128), "..."),
        (PREDICATED, (1, 3, 8), (1, 3, 8), "..."),
        (PREDICATED, (33, 31, 20), (33, 31, 24), "AB."),
        (WHOLE, (32, 64, 128), (32, 64, 128), "..."),
        (WHOLE, (33, 64, 128), (64, 64, 128), "A.D"),
        (WHOLE, (33, 33, 33), (64, 64, 64), "ABD"),
        (small(padding="pad", m=61, n=59, k=250), (32, 64, 128), (32, 64, 128), "..."),
        (small(padding="pad", m=61, n=59, k=250), (31, 64, 128), (32, 64, 128), "A.D"),
        (small(layout="nn", padding="predicate"), (8, 16, 24), (8, 16, 24), "..."),
        (small(layout="nn", padding="predicate"), (8, 17, 24), (8, 17, 24), ".B."),
        (small(bake=["k"], k=192), (32, 32, 192), (32, 32, 192), "..."),
        (small(bake=["k"], k=192), (32, 32, 190), (32, 32, 192), "AB."),
        (small(bake=["k"], k=192, padding="predicate"), (5, 56, 192), (5, 56, 192), "..."),
    ],
)
def test_one_binary_serves_other_sizes(
    record: Record, sizes: tuple[int, int, int], launched: tuple[int, int, int], copied: str
) -> None:
    answer = use_of(record, *sizes)
    assert answer is not None
    assert answer.launched == launched
    assert "".join(name if copy else "." for name, copy in zip("ABD", answer.copied, strict=True)) == copied


@pytest.mark.parametrize(
    ("record", "sizes"),
    [
        (small(bake=["k"], k=192), (32, 32, 256)),
        (small(split_k=2, padding="predicate"), (32, 32, 64)),
        (WHOLE, (1 << 24, 1 << 24, 64)),
    ],
)
def test_some_sizes_a_binary_does_not_serve(record: Record, sizes: tuple[int, int, int]) -> None:
    assert use_of(record, *sizes) is None


@pytest.mark.parametrize(
    ("record", "a", "b", "d", "copied"),
    [
        (PREDICATED, Matrix(136), Matrix(128), Matrix(64), (False, False, False)),
        (PREDICATED, Matrix(132), Matrix(128), Matrix(64), (True, False, False)),
        (PREDICATED, Matrix(128, False), Matrix(128, False), Matrix(64, False), (True, True, False)),
        (WHOLE, Matrix(128), Matrix(128), Matrix(64, False), (False, False, True)),
        (WHOLE, Matrix(128), Matrix(129), Matrix(66), (False, True, True)),
        (small(acc="f32", bake=["k"], k=128), Matrix(136), Matrix(128), Matrix(64), (True, False, False)),
        (small(acc="f32", layout="nn", bake=["k"], k=128), Matrix(128), Matrix(72), Matrix(72), (False, False, False)),
    ],
)
def test_operands_that_do_not_lie_as_the_kernel_asks_are_copied(
    record: Record, a: Matrix, b: Matrix, d: Matrix, copied: tuple[bool, bool, bool]
) -> None:
    answer = use_of(record, 64, 64, 128, LaunchOperands(a, b, d))
    assert answer is not None
    assert answer.copied == copied


# Operands of a caller who pads: whole tiles for mma.sync, whole vectors along the rows for wgmma and cp.async.
PADDED = {
    "wgmma nt padded": (PATHS["wgmma nt padded"], Sizes(200, 136, 325), (True, False, True)),
    "pad": (small(padding="pad", m=61, n=59, k=250), Sizes(64, 64, 256), (True, True, True)),
    "fused multistage padded by its caller": (
        PATHS["fused multistage padded by its caller"],
        Sizes(64, 64, 256),
        (True, True, True),
    ),
    "fused multistage gated, padded by its caller": (
        PATHS["fused multistage gated, padded by its caller"],
        Sizes(64, 64, 256),
        (True, True, True),
    ),
    "small direct padded by its caller": (
        PATHS["small direct padded by its caller"],
        Sizes(64, 64, 128),
        (True, True, True),
    ),
    "wgmma padded": (ring(padding="pad", k=325), Sizes(200, 136, 328), (True, True, False)),
    "wgmma padded nn": (ring(padding="pad", layout="nn", n=133, k=325), Sizes(200, 136, 328), (True, True, True)),
    "tensor single accumulators": (PATHS["tensor single accumulators"], Sizes(200, 136, 328), (True, True, False)),
    "warps f16, stage of 128": (PATHS["warps f16, stage of 128"], Sizes(200, 136, 328), (True, True, False)),
    "once padded": (once(padding="pad", k=125), Sizes(64, 64, 128), (True, True, False)),
}


def test_every_family_and_option_is_served_as_it_is() -> None:
    for name, record in PATHS.items():
        if name in PADDED:
            continue
        answer = use_of(record, record.m, record.n, record.k)
        assert answer is not None, name
        assert answer.launched == (record.m, record.n, record.k), name
        rows = rows_of(record.layout, Sizes(record.m, record.n, record.k))
        assert answer.copied == (rows[0] % 8 != 0, rows[1] % 8 != 0, False), name  # rows off 16 bytes


@pytest.mark.parametrize("name", PADDED)
def test_a_padded_record_copies_what_is_launched_larger(name: str) -> None:
    record, launched, copied = PADDED[name]
    assert use_of(record, record.m, record.n, record.k) == (launched, copied)


# --- measured problems ---


def table(lows: dict[int, float], records: list[Record] | None = None, bandwidth: float = 1e9) -> Table:
    """A table in which the records with these numbers were measured at these speedups. ``bandwidth``: that of
    device memory in bytes a microsecond."""
    records = records or [PREDICATED, WHOLE]
    own = tabulate("a100", records, NOTHING)
    return replace(own, rows=[row(records[i], i, low) for i, low in lows.items()], bandwidth=bandwidth)


def choose(own: Table, m: int, n: int, k: int, **more: Any) -> choice.Choice:
    """The table's choice for a problem. ``more``: acc, layout, operands, or arguments of ``choose``."""
    posed = problem(m, n, k, **{name: more.pop(name) for name in ("acc", "layout") if name in more})
    operands = more.pop("operands", LaunchOperands.packed(posed.layout, Sizes(m, n, k)))
    return own.choose(posed, operands, **more)


@pytest.mark.parametrize(("low", "wins"), [(0.5, False), (1.0, False), (1.009, False), (1.01, True), (2.0, True)])
def test_a_kernel_must_win_by_more_than_noise(low: float, wins: bool) -> None:
    answer = choose(table({0: low}), 64, 64, 128)
    assert (answer.kernel == 0) == wins
    assert answer.short == ("measured" if wins else "measured, not faster")
    assert f"64_64_128 was measured: {low + 0.01:.3f}x [{low:.3f}, {low + 0.02:.3f}]" in answer.reason


def test_copies_are_priced_in() -> None:
    """A copy takes 3 us and the time of its bytes at half of the bandwidth; the kernel takes 100 us."""
    apart = LaunchOperands(Matrix(132), Matrix(128), Matrix(64))
    assert choose(table({0: 1.05}), 64, 64, 128, operands=apart).kernel == 0
    slow = choose(table({0: 1.03}), 64, 64, 128, operands=apart)
    assert (slow.kernel, slow.short) == (None, "copies too dear")
    assert "3.0 us of copies added" in slow.reason
    assert choose(table({0: 1.05}, bandwidth=3e4), 64, 64, 128, operands=apart).kernel is None
    assert choose(table({0: 1.05}), 64, 64, 128, extra_us=10.0).kernel is None
    assert choice.Use(Sizes(64, 64, 64), (True, False, True)).copied_bytes(Sizes(33, 64, 64), (2, 2, 2)) == 2 * (
        33 * 64 + 2 * 64 * 64 + 33 * 64 + 64 * 64
    )


def test_what_a_padded_measurement_has_in_it_is_not_priced_again() -> None:
    record = small(acc="f32", padding="pad", m=61, n=59, k=250)
    assert choose(table({0: 1.02}, [record], bandwidth=1.0), 61, 59, 250).kernel == 0


def test_neighbours_answer_for_ragged_sizes() -> None:
    """The estimate subtracts the kernel's loss by its tiles: 60 of 64 rows are used."""
    won = table({0: 1.5})
    answer = choose(won, 60, 64, 128)
    assert (answer.kernel, answer.short) == (0, "estimated")
    assert f"{1.5 * 60 / 64:.3f}x expected with the kernel of 64_64_128" in answer.reason
    assert choose(won, 33, 64, 128).short == "estimated, not faster", "half of the tiles are empty"
    assert choose(won, 65, 64, 128).kernel is None
    assert choose(won, 31, 64, 128).short == "nothing was measured within a factor of two"
    assert choose(won, 64, 64, 257).short == "nothing was measured within a factor of two"
    assert choose(table({0: 1.0 + choice.MARGIN + choice.STRETCH}), 64, 64, 120).kernel == 0
    assert choose(table({0: 1.05}), 64, 64, 120).kernel is None, "a stretch needs a wider margin"


def test_vectors_are_not_estimated() -> None:
    thin = small(acc="f32", padding="predicate", m=2, n=64, k=128)
    won = table({0: 50.0}, [thin])
    assert choose(won, 3, 64, 128).short == "estimated"
    assert choose(won, 1, 64, 128).short == "vector, not measured"
    own = small(acc="f32", padding="predicate", m=1, n=64, k=128)
    assert choose(table({0: 1.5}, [own]), 1, 64, 128).short == "measured"


def test_all_neighbours_must_be_won() -> None:
    records = [PREDICATED, small(acc="f32", padding="predicate", m=96, n=96, k=128)]
    assert choose(table({0: 1.5, 1: 1.5}, records), 90, 90, 128).kernel is not None
    lost = choose(table({0: 1.5, 1: 0.9}, records), 90, 90, 128)
    assert (lost.kernel, lost.short) == (None, "neighbours not all won")
    assert "96_96_128 0.910x" in lost.reason
    assert "64_64_128 1.510x" in lost.reason


def test_an_estimate_is_never_better_than_its_neighbours() -> None:
    won = table({0: 1.5})
    for m, n, k in itertools.product((40, 57, 64, 96, 128), (40, 64, 111), (96, 120, 128, 200)):
        answer = choose(won, m, n, k)
        if answer.kernel is not None and answer.short == "estimated":
            assert float(answer.reason.split("x")[0]) <= 1.5 + 1e-3, (m, n, k)


def test_more_elements_than_an_int_counts() -> None:
    sizes = (1 << 17, 1 << 16, 128)
    answer = use_of(PREDICATED, *sizes)
    assert answer is not None
    assert answer.launched == sizes
    assert answer.copied_bytes(Sizes(*sizes), (2, 2, 2)) == 0
    assert choose(table({0: 2.0}), *sizes).short == "nothing was measured within a factor of two"
    padded = use_of(WHOLE, (1 << 17) - 1, 1 << 16, 64)
    assert padded is not None
    assert padded.copied_bytes(Sizes((1 << 17) - 1, 1 << 16, 64), (2, 2, 2)) > 1 << 34


def test_other_layouts_and_accumulators_have_no_kernels() -> None:
    for more in ({"layout": "nn"}, {"acc": "f16"}):
        answer = choose(table({0: 2.0}), 64, 64, 128, **more)
        assert answer.kernel is None
        assert answer.reason.endswith(f" a100 {more.get('acc', 'f32')} {more.get('layout', 'tn')}")


def test_on_request_the_nearest_kernel_is_taken_and_a_copy_counts_as_an_octave() -> None:
    both = table({}, [PREDICATED, WHOLE])
    assert choose(both, 96, 96, 64, prefer="kernel").kernel == 1
    assert choose(both, 90, 96, 64, prefer="kernel").kernel == 1, "two copies, the other is three octaves farther"
    assert choose(both, 70, 80, 80, prefer="kernel").kernel == 0, "the nearer one would copy A, B and D"
    answer = choose(both, 90, 90, 63, prefer="kernel")
    assert answer.use is not None
    assert answer.use.copied == (True, True, True)
    assert choose(both, 96, 96, 64, prefer="vendor").short == "asked for"
    baked = table({}, [small(acc="f32", bake=["k"], k=192)])
    assert choose(baked, 32, 32, 256, prefer="kernel").short == "no kernel serves these operands"


def test_the_vendor_computes_what_no_launcher_takes() -> None:
    far = LaunchOperands(Matrix(1 << 25), Matrix(128), Matrix(64))
    for prefer in ("kernel", "measured"):
        answer = choose(table({0: 2.0}), 64, 64, 128, operands=far, prefer=prefer)
        assert answer.short == "an extent or leading dimension exceeds 16777216"


# --- fused and batched problems ---


# A kernel with a fusion, one for batches, and a list of both with the plain kernel.
FUSED = PREDICATED.at(PREDICATED.problem.revised(fusion="bias_n+silu"))
BATCHED = PREDICATED.at(PREDICATED.problem.revised(batch="strided"))
WITH_FUSED = [PREDICATED, FUSED, BATCHED]


def choose_for_record(own: Table, record: Record, **more: Any) -> choice.Choice:
    """The table's choice for a record's problem, with packed operands."""
    return own.choose(record.problem, LaunchOperands.packed("tn", Sizes(record.m, record.n, record.k)), **more)


@pytest.mark.parametrize("record", [FUSED, BATCHED], ids=["fused", "batched"])
def test_an_unmeasured_fusion_claims_no_speed(record: Record) -> None:
    number = WITH_FUSED.index(record)
    won = table({0: 1.5}, WITH_FUSED)
    answer = choose_for_record(won, record)
    assert (answer.kernel, answer.short) == (None, "fusion or batch not measured")
    assert f"64_64_128{record.problem.suffix} was not measured; the plain product: 64_64_128 was measured: 1.5" in (
        answer.reason
    )
    allowed = choose_for_record(won, record, prefer="inferred")
    assert (allowed.kernel, allowed.inferred) == (number, True)
    lost = choose_for_record(table({0: 0.9}, WITH_FUSED), record, prefer="inferred")
    assert (lost.kernel, lost.short) == (None, "fusion or batch not measured, plain not faster")
    absent = choose_for_record(
        table({0: 1.5}, [PREDICATED, WHOLE.at(WHOLE.problem.revised(fusion="bias_n+silu"))]), FUSED
    )
    assert absent.short == "no kernel with this fusion or batch"
    none = choose_for_record(table({0: 1.5}), record, prefer="inferred")
    assert none.kernel is None
    assert none.reason.endswith(f" a100 f32 tn{record.problem.suffix}")
    assert choose_for_record(won, record, prefer="kernel").kernel == number
    assert choose_for_record(won, record, prefer="vendor").kernel is None
    assert not choose_for_record(won, PREDICATED, prefer="inferred").inferred, "it was measured"


def test_a_fusion_that_was_measured_speaks_for_itself() -> None:
    own = table({0: 1.5, 1: 0.9}, WITH_FUSED)
    assert choose_for_record(own, FUSED, prefer="inferred").short == "measured, not faster"
    won = choose_for_record(table({0: 0.9, 1: 1.2}, WITH_FUSED), FUSED)
    assert (won.kernel, won.inferred) == (1, False)
    assert won.reason.startswith("64_64_128 bias_n+silu was measured: 1.210x")
    near = FUSED.problem.revised(m=60)
    assert (
        table({1: 1.5}, WITH_FUSED).choose(near, LaunchOperands.packed("tn", Sizes(64, 64, 128))).short == "estimated"
    )


def test_batches_are_measured_by_their_number_of_products() -> None:
    own = replace(table({}, WITH_FUSED), rows=[row(BATCHED, 2, 1.5, products=8)])
    assert choose_for_record(own, BATCHED, products=8).short == "measured"
    assert choose_for_record(own, BATCHED, products=8).reason.startswith("64_64_128 x8 was measured")
    assert choose_for_record(own, BATCHED, products=12).short == "estimated"
    assert choose_for_record(own, BATCHED, products=17).short == "fusion or batch not measured, plain not faster"


def test_an_estimate_of_groups_counts_the_tiles_that_each_fills() -> None:
    """With tiles of 32 rows, 64 rows in two groups fill two tiles, and in four groups half of four. The number of
    groups does not multiply the work."""
    grouped = PREDICATED.at(PREDICATED.problem.revised(batch="grouped"))
    own = replace(table({}, [grouped]), rows=[row(grouped, 0, 1.5, products=2)])

    def expected_choice(rows: int, groups: int) -> tuple[str, str]:
        posed = grouped.problem.model_copy(update={"m": rows})
        answer = own.choose(posed, LaunchOperands.packed("tn", Sizes(64, 64, 128)), products=groups)
        return answer.short, answer.reason[:21]

    assert expected_choice(128, 4) == ("estimated", "1.500x expected with ")
    assert expected_choice(64, 1) == ("estimated", "1.500x expected with ")
    assert expected_choice(64, 4) == ("estimated, not faster", "only 0.750x expected ")
    assert expected_choice(66, 2) == ("estimated, not faster", "only 0.773x expected ")
    assert expected_choice(40, 4) == ("estimated, not faster", "only 0.469x expected ")


def test_a_pack_keeps_what_goes_with_a_winner() -> None:
    own = table({0: 1.5, 3: 0.9}, [*WITH_FUSED, WHOLE, WHOLE.at(WHOLE.problem.revised(fusion="bias_n"))])
    assert [kernel.record for kernel in own.chosen().kernels] == WITH_FUSED


def test_old_tables_say_nothing_of_fusions() -> None:
    plain = table({0: 1.5}).dump()
    assert "fusion" not in str(plain["rows"])
    assert "products" not in str(plain["rows"])
    fused = replace(table({1: 1.5}, WITH_FUSED), rows=[row(FUSED, 1, 1.5), row(BATCHED, 2, 1.5, products=8)])
    again = Table.load(json.loads(json.dumps(fused.dump())))
    assert again.rows == fused.rows
    assert again.dump() == fused.dump()


# --- from measurements ---


def measurements_of(record: Record, ratios: dict[str, float], **more: Any) -> list[results.Measurement]:
    """Measurements of a problem in both L2 states. ``ratios``: by keys such as ``torch.matmul cold``."""
    measurements = []
    for l2 in ("cold", "hot"):
        own = measured.timing("cudal2gen", [10.0, 10.1, 9.9, 10.0], record=record.name, digest="d")
        baselines = [
            measured.timing(name.split()[0], [10.0 * ratio, 10.1 * ratio, 9.9 * ratio, 10.0 * ratio])
            for name, ratio in ratios.items()
            if name.endswith(l2)
        ]
        fields = {"acc": record.acc, "layout": record.layout, "l2": l2, "digest": "d"} | more
        measurements.append(measured.measurement((record.m, record.n, record.k), [own, *baselines], **fields))
    return measurements


def h200_table(records: list[Record], measurements: list[results.Measurement], **more: Any) -> Table:
    """The table of an H200's records and measurements."""
    return tabulate("h200", records, results.Measurements({measured.H200.id: measured.H200}, measurements), **more)


# A record of an H200, and ratios of the times of two baselines in both states of the L2.
RECORD = small(gpu="h200", acc="f32")
RATIOS = {"torch.matmul cold": 1.2, "torch.matmul hot": 1.1, "cublas-tn cold": 1.3, "cublas-tn hot": 1.4}


def test_the_worst_state_against_what_torch_calls_counts() -> None:
    (only,) = h200_table([RECORD], measurements_of(RECORD, RATIOS)).rows
    assert only.kernel == 0
    assert only.speedup == pytest.approx((1.1, 1.1, 1.1), abs=0.001)
    assert only.state == "hot L2, torch.matmul"
    assert (only.us, only.vendor_us) == pytest.approx((10.0, 11.0))
    (worse,) = h200_table([RECORD], measurements_of(RECORD, RATIOS | {"cublas-tn cold": 0.9})).rows
    assert worse.state == "cold L2, cublas-tn", "torch.matmul of a transposed B is cuBLAS's own"
    assert not worse.wins
    (other,) = h200_table([RECORD], measurements_of(RECORD, RATIOS | {"cublas-nn cold": 0.5})).rows
    assert other.wins, "another layout's time is no rival"


def test_measurements_that_do_not_count() -> None:
    assert h200_table([RECORD], measurements_of(RECORD, {"cublas-tn cold": 1.2})).rows == [], (
        "torch.matmul was not there"
    )
    assert h200_table([RECORD], measurements_of(RECORD, RATIOS, protocol="offline")).rows == []
    assert h200_table([RECORD], measurements_of(RECORD, RATIOS, gpu="h100")).notes
    environment = measured.H200.model_copy(update={"gpu": "h100"})
    measurements = results.Measurements({environment.id: environment}, measurements_of(RECORD, RATIOS))
    assert tabulate("h200", [RECORD], measurements).rows == [], "another card's"
    unknown = h200_table([small(gpu="h200", acc="f32", stages=4)], measurements_of(RECORD, RATIOS))
    assert unknown.rows == []
    assert unknown.notes == ["1 measured kernels are not among these, or were compiled otherwise"]
    assert h200_table([RECORD], measurements_of(RECORD, RATIOS), digest=lambda _: "e").rows == [], (
        "another compiler's binary"
    )
    assert len(h200_table([RECORD], measurements_of(RECORD, RATIOS), digest=lambda _: "d").rows) == 1


def test_the_last_measurement_of_a_kernel_and_the_best_kernel_count() -> None:
    again = measurements_of(RECORD, RATIOS) + measurements_of(RECORD, dict.fromkeys(RATIOS, 0.8))
    assert not h200_table([RECORD], again).rows[0].wins
    # Two records for one problem, like those that a tuner measures.
    better = small(gpu="h200", acc="f32", stages=4)
    both = measurements_of(RECORD, RATIOS) + measurements_of(better, dict.fromkeys(RATIOS, 1.5))
    (only,) = h200_table([RECORD, better], both).rows
    assert only.kernel == 1


def test_fused_and_batched_measurements_have_rivals_of_their_own() -> None:
    fused = RECORD.at(RECORD.problem.revised(fusion="bias_n"))
    batched = RECORD.at(RECORD.problem.revised(batch="strided"))
    unfused = {"torch.unfused cold": 1.3, "torch.unfused hot": 1.3, "torch.epilogue cold": 1.1}
    products = {"torch.bmm cold": 1.4, "torch.bmm hot": 1.2}
    measurements = [
        *measurements_of(RECORD, RATIOS),
        *measurements_of(fused, unfused, fusion="bias_n"),
        *measurements_of(batched, products, batch="strided", products=4),
        *measurements_of(batched, dict.fromkeys(products, 0.8), batch="strided", products=8),
    ]
    rows = h200_table([RECORD, fused, batched], measurements).rows
    states = {(row.fusion.text, row.products, row.state, round(row.speedup[1], 3)) for row in rows}
    assert states == {
        ("none", 1, "hot L2, torch.matmul", 1.1),
        ("bias_n", 1, "cold L2, torch.epilogue", 1.1),
        ("none", 4, "hot L2, torch.bmm", 1.2),
        ("none", 8, "cold L2, torch.bmm", 0.8),
    }
    latest = results.Measurements({measured.H200.id: measured.H200}, measurements).latest()
    assert len(latest) == len(measurements)
    plain, *others = (json.loads(each.model_dump_json()) for each in latest[::2])
    assert not {"fusion", "batch", "products"} & plain.keys()
    assert [(each.get("fusion"), each.get("batch"), each.get("products")) for each in others] == [
        ("bias_n", None, None),
        (None, "strided", 4),
        (None, "strided", 8),
    ]
    assert h200_table([fused], measurements_of(fused, {"torch.matmul cold": 1.3}, fusion="bias_n")).rows == []


def test_a_table_is_what_was_dumped() -> None:
    own = h200_table([RECORD], measurements_of(RECORD, RATIOS))
    again = Table.load(own.dump())
    assert again.dump() == own.dump()
    assert isinstance(again.rows[0], Row)
    assert again.kernels[0].record == RECORD
    assert own.bandwidth == measured.H200.bandwidth_bytes_us


# --- records for problems off the grid ---


@pytest.mark.parametrize(
    ("sizes", "padding"), [((128, 64, 256), "none"), ((61, 64, 256), "predicate"), ((64, 64, 250), "pad")]
)
def test_a_record_is_fitted_to_a_problem(sizes: tuple[int, int, int], padding: str) -> None:
    fit = catalog.nearest(problem(*sizes, acc="f16"), [small()])
    assert (fit.record.m, fit.record.n, fit.record.k, fit.record.padding) == (*sizes, padding)
    assert fit.record.origin.structure == "edited"
    how = {"none": "", "predicate": ", predicated", "pad": ", padded to 64_64_256 by copies of A and B"}[padding]
    assert fit.note == f"no record for a100 f16 tn {sizes[0]}_{sizes[1]}_{sizes[2]}; taking that of 64_64_256{how}"
    own = catalog.nearest(small().problem, [small()])
    assert own == catalog.Match(small())


@pytest.mark.slow
def test_a_table_serves_all_problems_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus: list[str] = []

    def count_and_load(gpu: str, records: list[Record], measured: results.Measurements) -> Table:
        gpus.append(gpu)
        return tabulate(gpu, records, measured)

    monkeypatch.setattr(answers, "tabulate", count_and_load)
    by_catalog = answers.Answers(NOTHING)
    problems = [problem(m, 4096, 4096, acc=acc) for acc in ("f16", "f32") for m in (4000, 4001, 4096)]
    matches = [by_catalog(each) for each in problems]
    assert gpus == ["a100", "a100"], "one of fp16 sums, one of fp32 sums"
    assert matches == [answers.answer(each, NOTHING) for each in problems]
    assert [bool(match.note) for match in matches] == [True, True, False] * 2


def test_a_problem_that_no_record_fits() -> None:
    with pytest.raises(CatalogError, match="no record becomes legal for a100 f32 tn 64_64_64"):
        catalog.nearest(problem(64, 64, 64), [small()])


# --- the command ---


@pytest.mark.slow
def test_explain_says_what_would_run_and_why(tmp_path: Path) -> None:
    env = {"CUDAL2GEN_RESULTS": str(tmp_path), "CUDAL2GEN_PACK": ""}
    text = run("explain", "--mnk", "4096_4096_64", env=env).stdout
    assert text.startswith(
        "runs     torch.matmul\nbecause  4096_4096_64: nothing was measured within a factor of two\n"
    )
    assert "instead  hgemm_sm80_multistage_f16_tn" in text
    record = catalog.find(Problem(gpu="a100", acc="f16", layout="tn", m=4096, n=4096, k=64)).record
    environment = measured.H200.model_copy(update={"gpu": "a100"})
    measurements = measurements_of(record, RATIOS, gpu="a100", acc="f16")
    file = measured.write(results.Measurements({environment.id: environment}, measurements), tmp_path / "m.jsonl")
    text = run("explain", "--mnk", "4096_4096_64", "--from", str(file), env=env).stdout
    assert text.startswith(f"runs     {record.name}, of 4096_4096_64; launched as 4096_4096_64, no copies\n")
    assert "4096_4096_64 was measured: 1.100x [1.100, 1.100] (hot L2, torch.matmul)" in text
    assert "asked    no pack; the catalog, 1 problems measured\n" in text
    near = run("explain", "--mnk", "4000_4096_64", "--from", str(file), "--json", env=env).stdout
    assert "expected with the kernel of 4096_4096_64" in near
    assert "--mnk 4096: expected three sizes" in error("explain", "--mnk", "4096")
    assert "no results file at /nowhere" in error("explain", "--mnk", "64_64_64", "--from", "/nowhere")
