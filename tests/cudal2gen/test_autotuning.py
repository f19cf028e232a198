"""Proves what first calls measure for buckets of rows, fusions, batches and groups."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import cudal2gen
from cudal2gen import pack, results
from cudal2gen.kernel import Problem
from cudal2gen.report import groups, published, sections
from cudal2gen.results.choice import TableKernel
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice
from tests.cudal2gen.paths import small
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import dispatch, plan_requests  # noqa: E402
from cudal2gen.operators.fused_operators import gated_pair  # noqa: E402
from cudal2gen.operators.measuring import buckets, contests, races  # noqa: E402
from cudal2gen.operators.measuring.tuned import Store  # noqa: E402
from tests.cudal2gen.racing import (  # noqa: E402
    A100,
    NAMES,
    Clock,
    ClockedDevice,
    draw_product,
    measurements,
    simulated_process,
    store,
)
from tests.cudal2gen.test_fused_operators import GATES, activate, check_close, normal_half, record  # noqa: E402
from tests.cudal2gen.test_grouped_operators import ends_on  # noqa: E402

__all__ = ["store"]  # a fixture
pytestmark = pytest.mark.torch

# Kernels of each kind of product that a race is about.
BIAS, SILU = record("bias_n"), record("bias_n+silu")
STRIDED, GROUPED = (
    small(acc="f32", layout=layout, padding="predicate", m=64, n=64, k=128, batch=batch)
    for layout, batch in (("tn", "strided"), ("nn", "grouped"))
)
PREDICATED = packed.RECORDS["predicated"]
# By kernel: the microseconds on the clock.
FAST = {each.name: 200.0 for each in (PREDICATED, BIAS, SILU, STRIDED, GROUPED, *GATES)}


@pytest.fixture(scope="module")
def opened_pack(tmp_path_factory: pytest.TempPathFactory) -> pack.Pack:
    """A pack with plain, fused, batched, grouped and gated kernels."""
    gates = [gate for gate in GATES if gate.ab == "f16"]
    table = packed.table([PREDICATED, packed.RECORDS["whole"], BIAS, SILU, STRIDED, GROUPED, *gates])
    return pack.open_pack(packed.folder(table, tmp_path_factory.mktemp("packs") / "a100"))


@pytest.fixture
def clock(device: EmulatedDevice) -> Clock:
    """A clock by which torch takes 300 us, the kernels of ``FAST`` 200 us, and other kernels 250 us."""
    return Clock(device, FAST, 300.0)


@pytest.fixture
def measuring_dispatcher(device: EmulatedDevice, opened_pack: pack.Pack, clock: Clock) -> Iterator[dispatch.Dispatcher]:
    """The dispatcher of a process that measures by the clock."""
    with simulated_process(opened_pack, ClockedDevice(device, clock)) as dispatcher:
        yield dispatcher


def summary() -> list[str]:
    """The measured problems in the order of their races, each with its number of products and the function of torch
    that was its rival."""
    return [f"{row.mnk}{row.problem.suffix} x{row.products} {row.timings[1].contender}" for row in measurements()]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["once", "background"])
@pytest.mark.parametrize("content", [None, b'{"gpu": "a100", "kern', b'{"format": 99}'])
def test_a_table_that_was_damaged_after_the_opening_is_computed_by_torch(
    content: bytes | None,
    mode: races.Mode,
    device: EmulatedDevice,
    opened_pack: pack.Pack,
    clock: Clock,
    tmp_path: Path,
) -> None:
    damaged = pack.open_pack(shutil.copytree(opened_pack.directory, tmp_path / "pack"))
    (tmp_path / "pack" / "table.json").unlink()
    if content is not None:
        (tmp_path / "pack" / "table.json").write_bytes(content)
    a, b, expected = draw_product(device, (9, 24, 64))
    with simulated_process(damaged, ClockedDevice(device, clock), mode) as dispatcher:
        with pytest.warns(UserWarning, match=r"table\.json.*; make the pack anew"):
            assert torch.equal(cudal2gen.matmul(a[:6], b.t()), expected[:6])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for rows in (6, 9):
                assert torch.equal(cudal2gen.matmul(a[:rows], b.t()), expected[:rows])
        assert dispatcher.stats() == {"kernel": {}, "torch": {"pack not understood": 3}}


# --- buckets ---


def test_buckets_are_powers_of_two() -> None:
    """Up to 256 rows, a bucket ends at a power of two and begins after the one before. More rows, and rows of strided
    batches, have no bucket. Groups have buckets up to 256 rows for each group, here of 8 and of 3."""
    problem = Problem(gpu="a100", acc="f32", layout="tn", m=1, n=8, k=8)
    for rows in range(1, 600):
        least, most = buckets.bucket(problem.model_copy(update={"m": rows}))
        if rows > 256:
            assert least == most == rows
        else:
            assert least <= rows <= most
            assert (most & (most - 1), least) == (0, most // 2 + 1)
    assert buckets.bucket(problem.model_copy(update={"m": 40, "batch": "strided"}), 8) == (40, 40)
    for rows, expected in ((1, (1, 1)), (40, (33, 64)), (257, (257, 512)), (2000, (1025, 2048)), (2049, (2049, 2049))):
        assert buckets.bucket(problem.model_copy(update={"m": rows, "batch": "grouped"}), 8) == expected
    for rows, expected in ((512, (257, 512)), (513, (513, 768)), (768, (513, 768)), (769, (769, 769))):
        assert buckets.bucket(problem.model_copy(update={"m": rows, "batch": "grouped"}), 3) == expected


@pytest.mark.slow
def test_one_race_serves_all_rows_of_a_bucket(
    device: EmulatedDevice, measuring_dispatcher: dispatch.Dispatcher
) -> None:
    a, b, expected = draw_product(device, (9, 24, 64))
    for rows in (6, 5, 7, 7, 8):
        assert torch.equal(cudal2gen.matmul(a[:rows], b.t()), expected[:rows])
        assert summary() == ["8_24_64 x1 torch.matmul", "5_24_64 x1 torch.matmul"]
    assert {timing.detail for row in measurements() for timing in row.timings} == {
        "on a call's own operands, for 5 to 8 rows"
    }
    name = PREDICATED.name
    assert measuring_dispatcher.stats() == {
        "kernel": {name: 5},
        "torch": {},
        "gained_us": {name: 500},
        "by_bucket": {name: 3},
    }
    text = cudal2gen.explain(a[:6], b.t())
    assert text.startswith(f"{name}: 6_24_64 is in the bucket of 5 to 8 rows; 5_24_64 was measured: 1.500x")
    assert "bucket" not in cudal2gen.explain(a[:8], b.t())
    (group,) = groups.by_conditions(results.measurements(results.store("autotune")))
    text = " ".join(sections.section(group, "once", published.load(), {}).paragraphs)
    assert "Calls measured 2 of them on their own operands, 2 of these at an end of a bucket of rows" in text
    assert torch.equal(cudal2gen.matmul(a[:9], b.t()), expected[:9])
    assert "16_24_64 x1 torch.matmul" in summary()


class TorchWinsFiveRows(Clock):
    """A clock on which torch takes 100 us for 5 rows, and 300 us for others."""

    def elapsed_us(self, call: Callable[[], Any], times: int) -> float:
        """As for ``Clock``. ``call`` returns D, which has the rows."""
        self.torch_us = 100.0 if call().shape[0] == 5 else 300.0
        return super().elapsed_us(call, times)


@pytest.mark.slow
def test_a_bucket_is_lost_where_its_least_rows_are(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    a, b, expected = draw_product(device, (8, 24, 64))
    with simulated_process(opened_pack, ClockedDevice(device, TorchWinsFiveRows(device, FAST, 300.0))) as dispatcher:
        for rows in (6, 8, 5):
            assert torch.equal(cudal2gen.matmul(a[:rows], b.t()), expected[:rows])
        assert dispatcher.stats() == {
            "kernel": {PREDICATED.name: 1},
            "torch": {"bucket measured, not faster": 1, "measured, not faster": 1},
            "gained_us": {PREDICATED.name: 100},
        }
        assert "5 to 8 rows; 5_24_64 was measured: 0.500x" in cudal2gen.explain(a[:6], b.t())
    assert len(measurements()) == 2


@pytest.mark.slow
def test_a_hot_shape_has_a_race_of_its_own(
    device: EmulatedDevice, opened_pack: pack.Pack, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "HOT_CALLS", 3)
    a, b, expected = draw_product(device, (6, 24, 64))
    for mode in ("once", "background"):
        store = Store(A100)
        store.file.unlink(missing_ok=True)
        with simulated_process(opened_pack, ClockedDevice(device, clock), mode) as dispatcher:
            for _ in range(250):
                assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
                if len(summary()) == 3:
                    break
            assert summary()[2:] == ["6_24_64 x1 torch.matmul"]
            cudal2gen.matmul(a, b.t())
            by_bucket = dispatcher.stats()["by_bucket"][PREDICATED.name]
            cudal2gen.matmul(a, b.t())
            assert dispatcher.stats()["by_bucket"][PREDICATED.name] == by_bucket
            assert by_bucket == 4 or mode == "background"
            assert "bucket" not in cudal2gen.explain(a, b.t())


def test_a_kernel_that_does_not_take_all_rows_is_no_candidate(
    device: EmulatedDevice, measuring_dispatcher: dispatch.Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = TableKernel.use

    def only_many(kernel: TableKernel, sizes: Any, operands: Any) -> Any:
        return None if kernel.record.name == PREDICATED.name and sizes.m < 6 else use(kernel, sizes, operands)

    monkeypatch.setattr(TableKernel, "use", only_many)
    a, b, expected = draw_product(device, (8, 24, 64))
    assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
    assert {row.timings[0].record for row in measurements()} == {NAMES["whole"]}


# --- fusions, batches, groups ---


@pytest.mark.slow
def test_fused_products_race_against_torchs_own(
    device: EmulatedDevice, measuring_dispatcher: dispatch.Dispatcher, clock: Clock
) -> None:
    x, weight, bias = normal_half(device, 2, 64), normal_half(device, 48, 64, seed=1), normal_half(device, 48, seed=2)
    z = x.double() @ weight.double().mT
    check_close(cudal2gen.linear(x, weight, bias), z + bias.double(), 4)
    check_close(cudal2gen.linear(x, weight, bias, activation="silu"), activate(z + bias.double(), "silu"), 4)
    assert summary() == ["2_48_64 bias_n x1 torch.unfused", "2_48_64 bias_n+silu x1 torch.unfused"]
    assert measuring_dispatcher.stats()["kernel"] == {BIAS.name: 1, SILU.name: 1}
    assert "bias_n+silu was measured: 1.500x" in cudal2gen.explain(cudal2gen.linear, x, weight, bias, activation="silu")


@pytest.mark.slow
def test_a_fused_kernel_that_loses_leaves_the_plain_one_to_race(
    device: EmulatedDevice, measuring_dispatcher: dispatch.Dispatcher, clock: Clock
) -> None:
    clock.times_us = dict(FAST) | {BIAS.name: 400.0}
    x, weight, bias = normal_half(device, 6, 64), normal_half(device, 48, 64, seed=1), normal_half(device, 48, seed=2)
    check_close(cudal2gen.linear(x, weight, bias), x.double() @ weight.double().mT + bias.double(), 4)
    assert [row.split()[0] for row in summary()] == ["8_48_64", "8_48_64", "5_48_64"]
    assert measuring_dispatcher.stats()["kernel"] == measuring_dispatcher.stats()["by_bucket"] == {PREDICATED.name: 1}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["once", "background"])
def test_gates_and_second_outputs_race(
    device: EmulatedDevice, opened_pack: pack.Pack, clock: Clock, mode: races.Mode
) -> None:
    x, w1, w3 = normal_half(device, 2, 64), normal_half(device, 40, 64, seed=1), normal_half(device, 40, 64, seed=2)
    w13 = device.empty(80, 64).copy_(cudal2gen.interleave(w1, w3))
    x_grad = device.empty(2, 64).copy_(x).requires_grad_()
    expected = activate(x.double() @ w1.double().mT, "silu") * (x.double() @ w3.double().mT)
    with simulated_process(opened_pack, ClockedDevice(device, clock), mode) as dispatcher:
        for call in (
            lambda: cudal2gen.swiglu(x, w13), lambda: cudal2gen.swiglu(x_grad, w13).detach(),
            lambda: gated_pair(x, w1, w3, "silu"),
        ):  # fmt: skip
            for _ in range(1 if mode == "once" else 60):
                check_close(call(), expected, 8)
        assert len(summary()) == 2, "a pair is one product with its weights interleaved"
        assert {row.split()[1] for row in summary()} == {"silu+gate", "aux+silu+gate"}
        assert dispatcher.stats()["torch"].keys() <= {"fusion or batch not measured, plain not faster"}
        gates = {gate.name for gate in GATES}
        assert gates >= dispatcher.stats()["kernel"].keys()
    assert Store(A100).first_runs.banned() == set()


@pytest.mark.slow
@pytest.mark.parametrize("inner", [torch.inference_mode, torch.no_grad])
def test_a_race_goes_on_outside_of_the_mode_that_it_began_in(
    device: EmulatedDevice, opened_pack: pack.Pack, clock: Clock, inner: Callable[[], Any]
) -> None:
    """Copies of a gate's weights are kept current by the weights' versions, which tensors made in inference mode
    lack."""
    x, w1, w3 = normal_half(device, 2, 64), normal_half(device, 40, 64, seed=1), normal_half(device, 40, 64, seed=2)
    expected = activate(x.double() @ w1.double().mT, "silu") * (x.double() @ w3.double().mT)
    with simulated_process(opened_pack, ClockedDevice(device, clock), "background"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(60):
            with torch.enable_grad() if number % 3 == 2 else inner():
                check_close(gated_pair(x, w1, w3, "silu"), expected, 8)
    assert len(summary()) == 1
    assert Store(A100).first_runs.banned() == set()


def test_a_wrong_second_output_bans_its_kernel(
    device: EmulatedDevice, measuring_dispatcher: dispatch.Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = contests.bind

    def wrong(*operands: Any) -> Any:
        run = bind(*operands)

        def off(*tensors: Any) -> Any:
            result = run(*tensors)
            if isinstance(result, tuple):
                result[1][1, 9] += 100
            return result

        return off

    monkeypatch.setattr(contests, "bind", wrong)
    x, weight, bias = normal_half(device, 2, 64), normal_half(device, 48, 64, seed=1), normal_half(device, 48, seed=2)
    x.requires_grad_()
    with pytest.warns(UserWarning, match="it is not used on this card"):
        cudal2gen.linear(x, weight, bias, activation="silu")
    assert summary() == ["2_48_64 x1 torch.matmul"]


@pytest.mark.slow
def test_batches_race(device: EmulatedDevice, measuring_dispatcher: dispatch.Dispatcher) -> None:
    a, b, _ = draw_product(device, (3 * 17, 3 * 24, 64))
    a, b = a.view(3, 17, 64), b.view(3, 24, 64).mT
    expected = (a.double() @ b.double()).half()
    assert torch.equal(cudal2gen.bmm(a, b), expected)
    assert summary() == ["17_24_64 batched x3 torch.bmm"]
    wide = device.empty(3, 20, 32)
    out = wide[:, :17, :24]
    cudal2gen.matmul(a[:2], b[:2], out=out[:2])
    assert torch.equal(out[:2], expected[:2])
    assert wide[2].isnan().all(), "a race has memory of its own"
    assert summary()[1:] == ["17_24_64 batched x2 torch.bmm"]
    assert measuring_dispatcher.stats()["kernel"] == {STRIDED.name: 2}


@pytest.mark.slow
def test_a_result_with_gaps_between_its_rows_is_not_written_by_a_race(
    device: EmulatedDevice, measuring_dispatcher: dispatch.Dispatcher
) -> None:
    a, b, expected = draw_product(device, (6, 24, 64))
    wide = device.empty(6, 64)
    cudal2gen.matmul(a, b.t(), out=wide[:, :24])
    assert torch.equal(wide[:, :24], expected)
    assert wide[:, 24:].isnan().all()
    assert measuring_dispatcher.stats()["kernel"] == {PREDICATED.name: 1}


@pytest.mark.slow
@pytest.mark.parametrize("ends", [(0, 5, 5, 5, 7), (0, 0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("mode", ["once", "background"])
def test_groups_race(ends: Any, mode: races.Mode, device: EmulatedDevice, opened_pack: pack.Pack, clock: Clock) -> None:
    a, b, _ = draw_product(device, (8, 5 * 24, 64))
    weights, offs = device.empty(5, 64, 24).copy_(b.view(5, 24, 64).mT), ends_on(device, *ends)
    with simulated_process(opened_pack, ClockedDevice(device, clock), mode):
        for _ in range(1 if mode == "once" else 90):
            d = cudal2gen.grouped_mm(a, weights, offs=offs)
    start = 0
    for group, end in enumerate(ends):
        assert torch.equal(d[start:end], (a[start:end].double() @ weights[group].double()).half())
        start = end
    assert summary() == [f"{rows}_24_64 grouped x5 torch.grouped_mm" for rows in (8, 5) if ends[-1]]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["once", "background"])
def test_one_race_serves_all_rows_of_a_bucket_of_groups(
    mode: races.Mode, device: EmulatedDevice, opened_pack: pack.Pack, clock: Clock
) -> None:
    """Each call divides the rows differently among the groups, and leaves others after the last group."""
    a, b, _ = draw_product(device, (8, 5 * 24, 64))
    weights = device.empty(5, 64, 24).copy_(b.view(5, 24, 64).mT)
    a[4:].fill_(float("nan"))
    calls = [(6, (0, 3, 3, 4, 4))] * (1 if mode == "once" else 90)
    calls += [(5, (1, 2, 3, 4, 4)), (7, (0, 0, 0, 2, 4)), (8, (4, 4, 4, 4, 4)), (7, (0, 0, 0, 0, 0))]
    with simulated_process(opened_pack, ClockedDevice(device, clock), mode) as dispatcher:
        for rows, ends in calls:
            d, start = cudal2gen.grouped_mm(a[:rows], weights, offs=ends_on(device, *ends)), 0
            for group, end in enumerate(ends):
                assert torch.equal(d[start:end], (a[start:end].double() @ weights[group].double()).half())
                start = end
        assert summary() == [f"{rows}_24_64 grouped x5 torch.grouped_mm" for rows in (8, 5)]
        counts = dispatcher.stats()
        assert counts["by_bucket"] == {GROUPED.name: counts["kernel"][GROUPED.name] - 2}, "of 6 and 7 rows"
        text = cudal2gen.explain(cudal2gen.grouped_mm, a[:7], weights, offs=ends_on(device, 1, 2, 3, 4, 4))
        scope = "7_24_64 grouped is in the bucket of 5 to 8 rows; 5_24_64 x5 was measured"
        assert text.startswith(f"{GROUPED.name}: {scope}")


@pytest.mark.slow
def test_a_bucket_of_groups_is_lost_where_its_least_rows_are(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    a, b, _ = draw_product(device, (8, 5 * 24, 64))
    weights = device.empty(5, 64, 24).copy_(b.view(5, 24, 64).mT)
    with simulated_process(opened_pack, ClockedDevice(device, TorchWinsFiveRows(device, FAST, 300.0))) as dispatcher:
        for rows in (6, 8, 5):
            cudal2gen.grouped_mm(a[:rows], weights, offs=ends_on(device, 1, 2, 3, 4, 5))
        counts = dispatcher.stats()
        assert counts["kernel"] == {GROUPED.name: 1}, "at the most rows"
        assert counts["torch"] == {"bucket measured, not faster": 1, "measured, not faster": 1}


@pytest.mark.parametrize("ends", [(0, 1, 1, 5), (7, 7, 7, 7), (0, 0, 0, 0), (0, 0, 0, 1), (0, 6, 7, 9)], ids=str)
def test_groups_share_out_other_rows_as_the_call_does(ends: Any, device: EmulatedDevice) -> None:
    """A race at an end of the bucket, 5 or 8 rows, scales the ends of the call's 7 rows and rounds them up. It repeats
    the rows that belong to groups. Ends beyond 7 count as 7."""
    a, _, _ = draw_product(device, (7, 4, 8))
    a[ends[-1] :].fill_(float("nan"))
    weights, offs = device.empty(4, 8, 8), ends_on(device, *ends)
    ends = [min(end, 7) for end in ends]
    request = plan_requests.request_grouped(a, weights, offs, None)
    for rows in (5, 8):
        wide, scaled = contests._groups(OperatorDevice(device, "a100"), a, offs, request, rows)
        assert scaled.tolist() == [-(-end * rows // 7) for end in ends]
        assert (scaled.dtype, wide.shape) == (torch.int32, (rows, 8))
        assert not ends[-1] or torch.equal(wide, a[[row % ends[-1] for row in range(rows)]])


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(("rows", "ends"), [(6, (0, 0, 0, 0, 0)), (8, (1, 2, 3, 4, 5))], ids=["no rows", "infinities"])
@pytest.mark.parametrize("mode", ["once", "background"])
def test_operands_that_leave_nothing_to_compare_are_raced_again(
    mode: races.Mode, rows: int, ends: tuple[int, ...], device: EmulatedDevice, opened_pack: pack.Pack, clock: Clock
) -> None:
    a, b, _ = draw_product(device, (rows, 5 * 24, 64))
    finite = a.clone()
    weights = device.empty(5, 64, 24).copy_(b.view(5, 24, 64).mT)
    a.fill_(0 if not ends[-1] else float("inf"))
    with simulated_process(opened_pack, ClockedDevice(device, clock), mode) as dispatcher:
        for _ in range(6):
            cudal2gen.grouped_mm(a, weights, offs=ends_on(device, *ends))
        assert (summary(), Store(A100).first_runs.entries()) == ([], {})
        a.copy_(finite)
        for _ in range(20 if mode == "once" else 120):
            cudal2gen.grouped_mm(a, weights, offs=ends_on(device, 0, 1, 2, 2, 4))
        assert sorted(summary()) == [f"{bucket}_24_64 grouped x5 torch.grouped_mm" for bucket in (5, 8)]
        assert GROUPED.name in dispatcher.stats()["kernel"]


@pytest.mark.parametrize("mode", ["once", "background"])
def test_races_with_nothing_to_compare_come_to_an_end(
    mode: races.Mode, device: EmulatedDevice, opened_pack: pack.Pack, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []  # for each race the number of its call
    calls = 0
    comparable = contests.Contest.comparable.fget
    assert comparable is not None
    monkeypatch.setattr(
        contests.Contest, "comparable", property(lambda each: (begun.append(calls), comparable(each))[1])
    )
    monkeypatch.setattr(races, "MAX_INCONCLUSIVE", 5)
    a, b, _ = draw_product(device, (8, 5 * 24, 64))
    weights = device.empty(5, 64, 24).copy_(b.view(5, 24, 64).mT)
    with simulated_process(opened_pack, ClockedDevice(device, clock), mode):
        for place in range(100):
            calls = place
            cudal2gen.grouped_mm(a, weights, offs=ends_on(device, 0, 0, 0, 0, 0))
    # The pauses double: before the last three of five races they are 3, 7 and 15 calls.
    assert [later - earlier for earlier, later in pairwise(begun)] == (
        [1, 4, 8, 16] if mode == "once" else [2, 4, 8, 16]
    )
