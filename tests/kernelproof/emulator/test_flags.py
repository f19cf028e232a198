"""Proves that flags and counters order exactly what they should.

A waiting thread gets the oldest value that ends its wait, and is ordered after the write of that value. The kernels and
their arguments are described in kernels/flags.cu. Unless a test says otherwise, ``reader`` is the waiting CTA or warp,
and ``lanes`` the number of threads that the emulator executes at a time, None for all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernelproof import emulator
from tests.kernelproof.emulator.build import compile_file

# The finding of every wrong order.
RACE = {"global-race"}
I32 = np.int32


def execute(
    name: str, *arguments: Any, grid: int = 2, block: int = 32, adverse: bool = False, lanes: int | None = None
) -> tuple[list[Any], set[str]]:
    """The arrays after a launch of kernel ``name``, and the kinds of errors. An argument that is an int in a tuple is
    the size of an array of zeros; other arguments are passed by value."""
    program = emulator.load(compile_file("flags", ".ptx").read_text())
    memory = emulator.Memory()
    arrays = [memory.upload(np.zeros(a, I32), "inout") if isinstance(a, tuple) else a for a in arguments]
    options = emulator.Options(adverse=adverse, lanes=lanes)
    result = program.launch(name, grid, block, arrays, memory=memory, options=options)
    left = [a.download() for a in arrays if not isinstance(a, int | bool)]
    return left, {report.kind for report in result.reports if report.is_error}


# A test runs in both orders of events.
ADVERSE = pytest.mark.parametrize("adverse", [False, True])


@pytest.mark.one_in(3)
@ADVERSE
@pytest.mark.parametrize("lanes", [32, None])
@pytest.mark.parametrize("reader", [0, 2, 4])
@pytest.mark.parametrize(("least", "kinds"), [(4, set()), (3, RACE), (1, RACE)])
@pytest.mark.parametrize("name", ["parts_acquired", "parts_fenced", "parts_polled_atomically"])
def test_who_waits_for_too_few_arrivals(
    name: str, least: int, kinds: set[str], reader: int, lanes: int | None, adverse: bool
) -> None:
    """Each of five CTAs, or warps, has the part 1 + its number; the reader adds up the other four."""
    (_, _, out), found = execute(name, (160,), (1,), (32,), reader, least, grid=5, adverse=adverse, lanes=lanes)
    assert found == kinds
    assert kinds or (out == 15 - reader - 1).all()


@ADVERSE
@pytest.mark.parametrize("lanes", [32, None])
@pytest.mark.parametrize("reader", [0, 1])
@pytest.mark.parametrize(("heeds", "kinds"), [(True, set()), (False, RACE)])
def test_who_looks_at_a_flag_once(heeds: bool, kinds: set[str], reader: int, lanes: int | None, adverse: bool) -> None:
    (_, _, out), found = execute("looks_once", (32,), (1,), (32,), reader, heeds, adverse=adverse, lanes=lanes)
    assert found == kinds
    assert kinds or (out == 5).all()


@ADVERSE
@pytest.mark.parametrize("lanes", [32, None])
@pytest.mark.parametrize(("least", "kinds"), [(4, set()), (3, RACE)])
def test_a_barrier_of_the_grid(least: int, kinds: set[str], lanes: int | None, adverse: bool) -> None:
    (_, _, out), found = execute(
        "grid_barrier", (256,), (1,), (256,), 3, least, grid=4, block=64, adverse=adverse, lanes=lanes
    )
    assert found == kinds
    # In three rounds the four CTAs store 0 to 11, and each adds up all of them.
    assert kinds or (out == sum(range(12))).all()


@ADVERSE
@pytest.mark.parametrize(("last", "plain", "kinds"), [(3, False, set()), (3, True, RACE), (2, True, RACE)])
def test_the_last_of_several_ctas(last: int, plain: bool, kinds: set[str], adverse: bool) -> None:
    (_, _, out), found = execute("ticket_reduction", (4,), (1,), (1,), last, plain, grid=4, adverse=adverse)
    assert found == kinds
    assert last < 3 or out[0] == 10


@ADVERSE
def test_decoupled_look_back(adverse: bool) -> None:
    """CTA i contributes 1 + i to the running sum."""
    left, found = execute("look_back", (8,), (8,), (8,), (8,), grid=8, adverse=adverse)
    assert found == set()
    assert (left[3] == np.cumsum(np.arange(1, 9))).all()


@pytest.mark.parametrize("lanes", [32, None])
@pytest.mark.parametrize(("adverse", "kinds"), [(False, set()), (True, {"stale-read"})])
def test_look_back_without_fences(kinds: set[str], lanes: int | None, adverse: bool) -> None:
    left, found = execute("look_back_unfenced", (8,), (8,), (8,), (8,), grid=8, adverse=adverse, lanes=lanes)
    assert found == kinds
    assert (left[3] == np.cumsum(np.arange(1, 9))).all()


@pytest.mark.parametrize("reader", [0, 1])
@pytest.mark.parametrize("lanes", [32, None])
@pytest.mark.parametrize(
    ("fences", "adverse", "kinds"), [(True, True, set()), (False, False, set()), (False, True, {"stale-read"})]
)
def test_a_message_without_fences(fences: bool, adverse: bool, kinds: set[str], lanes: int | None, reader: int) -> None:
    (_, _, out), found = execute("message", (1,), (1,), (1,), reader, fences, adverse=adverse, lanes=lanes)
    assert found == kinds
    assert out[0] == 3


def test_the_store_that_was_not_seen_is_named() -> None:
    program = emulator.load(compile_file("flags", ".ptx").read_text())
    memory = emulator.Memory()
    arrays = [memory.upload(np.zeros(1, I32), "inout") for _ in range(3)]
    result = program.launch(
        "message", 2, 32, [*arrays, 0, False], memory=memory, options=emulator.Options(adverse=True)
    )
    (report,) = result.reports
    assert report.other is not None
    assert report.other.cta == (1, 0, 0)
    assert report.other.site.text.startswith("st.volatile")
    assert report.access.cta == (0, 0, 0)
    assert report.access.site.text.startswith("ld.volatile")


@pytest.mark.parametrize("reader", [0, 1])
def test_an_old_hint_does_no_harm(reader: int) -> None:
    (_, out), found = execute("hint", (2,), (2,), reader, adverse=True)
    assert found == set()
    assert out.tolist() == [1, 0]


@ADVERSE
@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize(("fences", "kinds"), [(True, set()), (False, RACE)])
def test_locks(kind: int, fences: bool, kinds: set[str], adverse: bool) -> None:
    left, found = execute("locked", (1,), (1,), (1,), kind, fences, grid=6, adverse=adverse)
    assert found == kinds
    assert left[0][0] == 21  # 1 to 6, which the six CTAs add


@ADVERSE
@pytest.mark.parametrize("reader", [0, 1])
def test_a_sequence_lock(reader: int, adverse: bool) -> None:
    (_, _, out), found = execute("sequence", (2,), (1,), (2,), reader, 5, adverse=adverse)
    assert found == set()
    assert out.tolist() == [0, 1]


@ADVERSE
@pytest.mark.parametrize("starter", [0, 1])
@pytest.mark.parametrize(("waits", "kinds"), [(True, set()), (False, RACE)])
def test_a_flag_that_is_used_again(waits: bool, kinds: set[str], starter: int, adverse: bool) -> None:
    (_, _, out), found = execute("ball", (32,), (1,), (96,), starter, 3, waits, adverse=adverse)
    assert found >= kinds
    assert kinds or not found
    assert kinds or (out.reshape(3, 32) == np.arange(3)[:, None] * 100 + np.arange(32)).all()


@ADVERSE
@pytest.mark.parametrize("lanes", [32, None])
def test_fences_of_all_ctas_have_an_order(lanes: int | None, adverse: bool) -> None:
    (_, out), found = execute("dekker", (2,), (2,), adverse=adverse, lanes=lanes)
    assert found == set()
    assert out.any()


@ADVERSE
@pytest.mark.parametrize("setter", [0, 1])
def test_a_barrier_passes_on_what_a_thread_has_seen(setter: int, adverse: bool) -> None:
    (_, out), found = execute("looks_again", (1,), (64,), setter, block=64, adverse=adverse)
    assert found == set()
    assert (out == 1).all()


@ADVERSE
def test_a_queue_of_items(adverse: bool) -> None:
    (_, _, out), found = execute("queue", (1,), (9,), (288,), 9, grid=3, block=32, adverse=adverse)
    assert found == set()
    assert (out.reshape(9, 32) == np.arange(1, 10)[:, None]).all()


@ADVERSE
@pytest.mark.parametrize("reader", [0, 2, 4])
@pytest.mark.parametrize(("least", "kinds"), [(4, set()), (3, {"shared-race"}), (1, {"shared-race"})])
def test_warps_that_count(least: int, kinds: set[str], reader: int, adverse: bool) -> None:
    (out,), found = execute("warps_count", (32,), reader, least, grid=1, block=160, adverse=adverse)
    assert found == kinds
    assert kinds or (out == 15 - reader - 1).all()


@ADVERSE
@pytest.mark.parametrize("reader", [0, 1])
@pytest.mark.parametrize(("heeds", "kinds"), [(True, set()), (False, {"shared-race"})])
def test_a_warp_that_looks_once(heeds: bool, kinds: set[str], reader: int, adverse: bool) -> None:
    (out,), found = execute("warp_looks_once", (32,), reader, heeds, grid=1, block=64, adverse=adverse)
    assert found >= kinds
    assert kinds or not found
    assert kinds or (out == 5).all()


@ADVERSE
@pytest.mark.parametrize("setter", [0, 1])
@pytest.mark.parametrize(("releases", "acquires"), [(True, True), (False, True), (True, False)])
def test_an_atomic_object_in_shared_memory(releases: bool, acquires: bool, setter: int, adverse: bool) -> None:
    arguments = setter, releases, acquires
    (out,), found = execute("atomic_in_shared", (32,), *arguments, grid=1, block=64, adverse=adverse)
    ordered = releases and acquires
    assert found == (set() if ordered else {"shared-race"})
    assert not ordered or (out == 5).all()


@ADVERSE
@pytest.mark.parametrize(("kind", "races"), [(0, False), (1, False), (2, True), (3, True), (4, True)])
def test_a_look_before_an_atomic(kind: int, races: bool, adverse: bool) -> None:
    (out,), found = execute("largest", (128,), kind, grid=1, block=128, adverse=adverse)
    assert found == ({"shared-race"} if races else set())
    assert races or (out == 100).all()


@pytest.mark.one_in(2)
@pytest.mark.slow
@ADVERSE
@pytest.mark.parametrize("space", [0, 1])
@pytest.mark.parametrize("lanes", [128, None])
def test_a_latch(lanes: int | None, space: int, adverse: bool) -> None:
    left, found = execute("latch", (4,), (256,), space, grid=2, block=128, lanes=lanes, adverse=adverse)
    assert found == set()
    assert (left[1].reshape(2, 128) == np.arange(128)[::-1]).all()
