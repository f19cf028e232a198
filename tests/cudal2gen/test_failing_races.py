"""Proves that a wrong or faulting kernel is banned, that an unusable store ends races, and that no call fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cudal2gen
from cudal2gen import pack, results
from cudal2gen.launch.launcher import LaunchError
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import dispatch  # noqa: E402
from cudal2gen.operators.measuring import contests, races  # noqa: E402
from cudal2gen.operators.measuring.tuned import Store  # noqa: E402
from tests.cudal2gen.racing import (  # noqa: E402
    A100,
    NAMES,
    Clock,
    ClockedDevice,
    draw_product,
    launch_counts,
    library_warnings,
    measurements,
    simulated_process,
    store,
    tuner_of,
)
from tests.cudal2gen.test_races import disable_buckets, opened_pack  # noqa: E402

__all__ = ["disable_buckets", "opened_pack", "store"]  # fixtures

pytestmark = pytest.mark.torch


# --- kernels that fail ---


def last_reason(digest: str) -> str:
    """The reason in the last entry of the store about the kernel with this digest."""
    return [row.reason for run, row in Store(A100).first_runs.entries().items() if run.digest == digest][-1]


@pytest.mark.slow
def test_a_wrong_kernel_is_banned_for_good(
    device: EmulatedDevice, opened_pack: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(device, {NAMES["whole"]: 1.0}, 300.0)
    a, b, expected = draw_product(device)
    bind = contests.bind

    def wrong(device_: Any, kernel: Any, use: Any, request: Any, layout: Any) -> Any:
        run = bind(device_, kernel, use, request, layout)

        def off(a: Any, b: Any, out: Any) -> Any:
            d = run(a, b, out)
            if device.session.launches[-1].kernel == NAMES["whole"]:
                d[3, 5] += 1
            return d

        return off

    monkeypatch.setattr(contests, "bind", wrong)
    with simulated_process(opened_pack, ClockedDevice(device, clock)) as dispatcher:
        with pytest.warns(UserWarning, match=f"{NAMES['whole']}: an error of 1, .* it is not used on this card"):
            assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert list(dispatcher.stats()["kernel"]) == [NAMES["predicated"]]
    (digest,) = Store(A100).first_runs.banned()
    assert "an error of 1" in last_reason(digest)
    before = launch_counts(device)["whole"]
    with simulated_process(opened_pack, ClockedDevice(device, clock)):
        cudal2gen.matmul(a[:20], b.t())
    assert launch_counts(device)["whole"] == before


def test_a_kernel_faster_than_the_card_is_banned(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    """By the clock it takes 0.1 us."""
    clock = Clock(device, {NAMES["whole"]: 0.1}, 300.0)
    a, b, _ = draw_product(device)
    with simulated_process(opened_pack, ClockedDevice(device, clock)) as dispatcher:
        cudal2gen.matmul(a, b.t())
        assert list(dispatcher.stats()["kernel"]) == [NAMES["predicated"]]
    assert len(Store(A100).first_runs.banned()) == 1


def test_a_stale_result_does_not_pass(
    device: EmulatedDevice, opened_pack: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that leaves an element unwritten fails, whatever the memory held before."""
    a, b, expected = draw_product(device)

    class Stale(ClockedDevice):
        """A device whose new memory holds the right result already."""

        def empty(self, like: Any, *shape: int) -> Any:
            return super().empty(like, *shape).copy_(expected)

    monkeypatch.setattr(contests, "bind", lambda stale, *_: lambda a, b, out: stale.empty(a, *expected.shape))
    with (
        simulated_process(opened_pack, Stale(device, Clock(device, {}, 300.0))),
        pytest.warns(UserWarning, match="an error of inf"),
    ):
        cudal2gen.matmul(a, b.t())
    assert len(Store(A100).first_runs.banned()) >= 2
    assert measurements() == []


def test_a_refused_launch_costs_the_kernel_only(
    device: EmulatedDevice, opened_pack: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Any:
        raise LaunchError(1, "no")

    monkeypatch.setattr(contests, "bind", refused)
    a, b, expected = draw_product(device)
    with simulated_process(opened_pack, ClockedDevice(device, Clock(device, {}, 300.0))):
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
    assert {row.reason for row in Store(A100).first_runs.entries().values()} == {"does not run: no (cudaError 1)"}
    assert Store(A100).first_runs.banned() == set(), (
        "a later process tries again: memory or the driver may have been the reason"
    )


def test_a_kernel_that_faults_after_its_first_run_is_banned(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    class Faulty(Clock):
        """A clock on which a kernel that is faster than torch faults when it is timed."""

        def elapsed_us(self, call: Callable[[], object], times: int) -> float:
            us = super().elapsed_us(call, times)
            if us < times * self.torch_us:
                raise RuntimeError("an illegal memory access")
            return us

    clock = Faulty(device, {NAMES["whole"]: 200.0, NAMES["predicated"]: 400.0, NAMES["split"]: 400.0}, 300.0)
    a, b, expected = draw_product(device)
    with (
        simulated_process(opened_pack, ClockedDevice(device, clock)),
        pytest.warns(UserWarning, match="an illegal memory access"),
    ):
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
    (digest,) = Store(A100).first_runs.banned()
    assert last_reason(digest) == "fails after its first run: an illegal memory access"


def test_the_callers_own_work_costs_no_race_its_budget(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    """The stream has half a second of work when the call is made."""

    class Behind(Clock):
        pending = 0.5

        def synchronize(self) -> None:
            self.seconds, self.pending = self.seconds + self.pending, 0.0
            super().synchronize()

        def elapsed_us(self, call: Callable[[], object], times: int) -> float:
            self.synchronize()
            return super().elapsed_us(call, times)

    a, b, expected = draw_product(device)
    with simulated_process(opened_pack, ClockedDevice(device, Behind(device, {}, 300.0))):
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
    assert len(measurements()) == 1


@pytest.mark.parametrize("mode", ["once", "background"])
@pytest.mark.parametrize("name", ["autotune", "autotune-first-runs"])
def test_a_store_that_cannot_be_used_stops_the_races(
    device: EmulatedDevice, opened_pack: pack.Pack, store: Path, name: str, mode: races.Mode
) -> None:
    (store / f"{name}.jsonl").mkdir()
    a, b, expected = draw_product(device)
    with simulated_process(opened_pack, ClockedDevice(device, Clock(device, {}, 300.0)), mode):
        with pytest.warns(UserWarning, match=rf"no autotuning: .*{name}.jsonl.*by CUDAL2GEN_RESULTS") as warned:
            products = [cudal2gen.matmul(a, b.t()) for _ in range(3)]
        assert len(library_warnings(warned)) == 1
        assert all(torch.equal(d, expected) for d in products)
        tuner = tuner_of(dispatch.current())
        assert tuner is not None
        assert tuner.halted
    assert launch_counts(device) == {}


def refuse_writes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes a file of the store refuse all writes from now on."""
    append = results.append

    def appended(lines: Any, path: Path) -> None:
        if path.name == f"{name}.jsonl":
            raise OSError(28, "No space left on device", str(path))
        append(lines, path)

    monkeypatch.setattr(results, "append", appended)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["once", "background"])
def test_what_a_full_store_does_not_take_counts_in_the_process(
    device: EmulatedDevice, opened_pack: pack.Pack, mode: races.Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, expected = draw_product(device)
    clock = Clock(device, {NAMES["whole"]: 200.0}, 300.0)
    with (
        simulated_process(opened_pack, ClockedDevice(device, clock), mode) as dispatcher,
        monkeypatch.context() as patch,
    ):
        refuse_writes(patch, "autotune")
        with pytest.warns(UserWarning, match=r"cannot use .*autotune.jsonl: No space left.*make room there") as warned:
            products = [cudal2gen.matmul(a, b.t()) for _ in range(60)]
        assert all(torch.equal(d, expected) for d in products)
        assert len(library_warnings(warned)) == 1
        assert dispatcher.stats()["kernel"][NAMES["whole"]] > 1
        dispatcher.forget()
        before = clock.seconds
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert torch.equal(cudal2gen.matmul(a[:20], b.t()), expected[:20])
        assert clock.seconds == before, "nothing more is raced"
        assert "was measured: 1.500x" in cudal2gen.explain(a, b.t())
        assert measurements() == []
        patch.undo()
        tuner = tuner_of(dispatcher)
        assert tuner is not None
        tuner.store.add([])
    assert [row.mnk for row in measurements()] == ["30_24_64"], "stored where a later race can"


def test_what_was_measured_counts_where_nothing_can_be_banned(
    device: EmulatedDevice, opened_pack: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of results cannot be written by later processes."""
    a, b, expected = draw_product(device)
    clock = Clock(device, {NAMES["whole"]: 200.0}, 300.0)
    with simulated_process(opened_pack, ClockedDevice(device, clock)):
        cudal2gen.matmul(a, b.t())
    refuse_writes(monkeypatch, "autotune-first-runs")
    before = launch_counts(device)
    with simulated_process(opened_pack, ClockedDevice(device, clock)) as dispatcher:
        with pytest.warns(UserWarning, match=r"cannot use .*autotune-first-runs.jsonl: No space left"):
            assert torch.equal(cudal2gen.matmul(a[:20], b.t()), expected[:20])
        assert launch_counts(device) == before, "no kernel runs that could not be banned"
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert dispatcher.stats()["kernel"] == {NAMES["whole"]: 1}


@pytest.mark.slow
def test_a_pack_with_other_kernels_races_once_more(
    device: EmulatedDevice, opened_pack: pack.Pack, tmp_path: Path
) -> None:  # fmt: skip
    """A loss holds until a pack has new kernels. A win whose kernel is gone does not count."""
    few = packed.table([packed.RECORDS["predicated"]])
    older = pack.open_pack(packed.folder(few, tmp_path / "older"))
    a, b, expected = draw_product(device)
    clock = Clock(device, dict.fromkeys(NAMES.values(), 310.0) | {NAMES["whole"]: 200.0}, 300.0)

    def call_matmul(with_pack: pack.Pack, seconds: float = races.PROCESS_SECONDS) -> tuple[list[str], bool]:
        """What computed, and whether something was raced."""
        before = clock.seconds
        with simulated_process(with_pack, ClockedDevice(device, clock)) as dispatcher:
            tuner = tuner_of(dispatcher)
            assert tuner is not None
            tuner.spent = races.PROCESS_SECONDS - seconds
            for _ in range(2):
                assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
            return [*dispatcher.stats()["kernel"], *dispatcher.stats()["torch"]], clock.seconds > before

    assert call_matmul(older) == (["measured, not faster"], True)
    assert call_matmul(older) == (["measured, not faster"], False)
    assert call_matmul(opened_pack, seconds=0.0) == (["measured, not faster"], False), (
        "without time the loss still counts"
    )
    assert call_matmul(opened_pack) == ([NAMES["whole"]], True)
    assert call_matmul(opened_pack) == ([NAMES["whole"]], False)
    assert call_matmul(older) == (["measured, not faster"], False), "it has been raced with these"
    others = packed.table([packed.RECORDS["predicated"], packed.RECORDS["split"]])
    other = pack.open_pack(packed.folder(others, tmp_path / "other"))
    assert call_matmul(other, seconds=0.0) == (["measured, not faster"], False), "the kernel that won is gone"
    assert call_matmul(other) == (["measured, not faster"], True)
    assert len(measurements()) == 3


class Failing(Clock):
    """A clock on which no call can be timed."""

    def elapsed_us(self, call: Callable[[], object], times: int) -> float:
        """Fails as torch does if an event was destroyed."""
        raise RuntimeError("an event is gone")


@pytest.mark.parametrize("mode", ["once", "background"])
def test_a_race_that_fails_costs_no_call(device: EmulatedDevice, opened_pack: pack.Pack, mode: races.Mode) -> None:
    a, b, expected = draw_product(device)
    clock = Failing(device, {}, 300.0)
    with (
        simulated_process(opened_pack, ClockedDevice(device, clock), mode),
        pytest.warns(UserWarning, match="an event is gone"),
    ):
        products = [cudal2gen.matmul(a, b.t()) for _ in range(9)]
    assert all(torch.equal(d, expected) for d in products)
    assert Store(A100).first_runs.banned() == set()


@pytest.mark.parametrize("where", ["bind", "Contest.compare"])
def test_a_full_memory_bans_nothing(
    where: str, device: EmulatedDevice, opened_pack: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(f"cudal2gen.operators.measuring.contests.{where}", full)
    a, b, expected = draw_product(device)
    with (
        simulated_process(opened_pack, ClockedDevice(device, Clock(device, {}, 300.0))),
        pytest.warns(UserWarning, match="no memory"),
    ):
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
    assert Store(A100).first_runs.banned() == set()
