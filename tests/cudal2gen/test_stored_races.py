"""Proves that no content of a file of races makes a call fail or choose a kernel that cannot serve it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cudal2gen
from cudal2gen import pack
from cudal2gen.results import KERNEL, MIN_US, ON_OPERANDS, Measurement, Timing
from cudal2gen.results.choice import Table
from kernelproof.ground.errors import SkippedLine
from tests.cudal2gen import measured, packed
from tests.cudal2gen.emulated import EmulatedDevice
from tests.cudal2gen.fuzzed import ANYTHING, examples, limit_time, mutate_lines
from tests.packages import require

torch = require("torch")

from cudal2gen.operators.measuring.first_runs import FirstRuns, RunEntry  # noqa: E402
from cudal2gen.operators.measuring.tuned import MAX_US, Store  # noqa: E402
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

__all__ = ["store"]  # a fixture
pytestmark = pytest.mark.torch
# The short names of the kernels of the pack.
KERNELS = ("predicated", "whole", "nn", "f16")
ROWS = 300  # more than a bucket has


@cache
def table() -> Table:
    """A table of ``KERNELS`` without measurements."""
    return packed.table([packed.RECORDS[name] for name in KERNELS])


@pytest.fixture(scope="module")
def opened_pack(tmp_path_factory: pytest.TempPathFactory) -> pack.Pack:
    """The pack of ``table``."""
    return pack.open_pack(packed.folder(table(), tmp_path_factory.mktemp("packs") / "a100"))


def race(name: str = "predicated", kernel_us: float = 100.0, torch_us: float = 200.0, calls: int = 10) -> Measurement:
    """The measurement of a race that the kernel of ``KERNELS`` with this name won. ``calls``: those of a sample."""
    kernel = table().kernels[KERNELS.index(name)]
    offer = Store(A100, Path("nowhere")).offer(table(), table().kernels[0].record.problem)

    def timing(contender: str, us: float, digest: str | None = None) -> Timing:
        samples = (us,) * 12
        return Timing(
            contender=contender, digest=digest, detail=ON_OPERANDS, calls=calls, event_us=samples, error=0.0
        )  # fmt: skip

    timings = [timing(KERNEL, kernel_us, kernel.digest), timing("torch.matmul", torch_us)]
    return measured.measurement(
        (ROWS, 64, 64), timings, environment=A100.id, gpu="a100", acc="f32", l2="hot", digest=kernel.digest,
        options=kernel.record.launch_options, offer=offer,
    )  # fmt: skip


@cache
def stored_lines() -> list[str]:
    """The lines of a store: two environments, and three races."""
    other = A100.model_copy(update={"id": "other", "driver": "1"})
    return [row.model_dump_json() for row in (A100, other, race(), race("whole"), race("nn"))]


@pytest.mark.slow
@given(data=st.data())
@examples(60)
def test_whatever_a_store_of_races_holds(data: st.DataObject, tmp_path: Path) -> None:
    whole = [line.encode() for line in stored_lines()]
    lines = data.draw(st.lists(mutate_lines(stored_lines()) | ANYTHING | st.sampled_from(whole), max_size=4))
    own = Store(A100, tmp_path)
    own.file.write_bytes(b"\n".join([whole[0], *lines]) + b"\n")
    with warnings.catch_warnings(record=True) as skipped, limit_time():
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # of other tests' garbage
        raced = own.tables(table()).complete
    assert all(issubclass(warning.category, SkippedLine) for warning in skipped)
    for row in raced.rows:
        kernel = table().kernels[row.kernel or 0]
        assert (kernel.fields["acc"], kernel.fields["layout"]) == (row.acc, row.layout)
        assert MIN_US <= row.us <= MAX_US
        assert MIN_US <= row.vendor_us <= MAX_US


# Lines of a file of first runs.
TRIALS = [
    RunEntry(card=A100.name, version="1", digest=digest, run=run, when=1.7e9, outcome=outcome).model_dump_json()
    for digest, run, outcome in (("a", "1", "begun"), ("b", "2", "right"), ("c", "", "wrong"), ("d", "3", "later"))
]


@pytest.mark.slow
@given(
    lines=st.lists(mutate_lines(TRIALS) | ANYTHING | st.sampled_from([line.encode() for line in TRIALS]), max_size=4)
)
@examples(60)
def test_whatever_a_file_of_first_runs_holds(lines: list[bytes], tmp_path: Path) -> None:
    """The bans of complete lines hold, and first runs continue."""
    file = tmp_path / "autotune-first-runs.jsonl"
    file.write_bytes(b"\n".join([*lines, TRIALS[2].encode()]) + b"\n")
    with warnings.catch_warnings(record=True) as skipped, limit_time():
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # of other tests' garbage
        runs = FirstRuns(A100.name, file)
        assert "c" in runs.banned()
        with runs.begin("e") as note:
            note("wrong", "")
        assert {"c", "e"} <= FirstRuns(A100.name, file).banned()
    assert all(issubclass(warning.category, SkippedLine) for warning in skipped)


# Races that no card can have had, or that are not about the product of the call.
NONSENSE: dict[str, Callable[[], Any]] = {
    "a kernel faster than any": lambda: race(kernel_us=1e-4),
    "torch slower than a race lasts": lambda: race(torch_us=1e30),
    "a kernel of B stored otherwise": lambda: race("nn"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NONSENSE)
def test_a_nonsensical_race_counts_for_nothing(
    name: str,
    device: EmulatedDevice,
    opened_pack: pack.Pack,
    store: Path,
) -> None:
    """A call that finds such a race races anew."""
    row = NONSENSE[name]()
    (store / "autotune.jsonl").write_text(f"{A100.model_dump_json()}\n{row.model_dump_json()}\n")
    a, b, expected = draw_product(device, (ROWS, 64, 64))
    clock = Clock(device, {NAMES["whole"]: 200.0}, 300.0)
    with simulated_process(opened_pack, ClockedDevice(device, clock)) as dispatcher:
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert dispatcher.stats()["kernel"] == {NAMES["whole"]: 1}
    assert len(measurements()) == 2


def test_a_race_as_it_was_stored_counts(device: EmulatedDevice, opened_pack: pack.Pack, store: Path) -> None:
    (store / "autotune.jsonl").write_text(f"{A100.model_dump_json()}\n{race().model_dump_json()}\n")
    a, b, expected = draw_product(device, (ROWS, 64, 64))
    with simulated_process(opened_pack, ClockedDevice(device, Clock(device, {}, 300.0))) as dispatcher:
        assert torch.equal(cudal2gen.matmul(a, b.t()), expected)
        assert dispatcher.stats()["kernel"] == {NAMES["predicated"]: 1}
    assert len(measurements()) == 1
