"""Proves that vectorised atomics of many lanes have the same results as atomics executed lane after lane."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelproof.emulator.memory.atomics import modify
from kernelproof.emulator.state.arrays import Array

MEMORY = 1 << 18  # elements; the largest index is 39 * 5000
TYPES = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64, "f32": np.float32, "f64": np.float64}


def lane_by_lane(op: str, kind: str, view: Array, at: Array, value: Array, compare: Array | None) -> Array:
    """The old values if one atomic is executed at a time. ``view`` is memory, ``at`` the element of each lane, and
    ``compare`` what cas expects there."""
    old = np.empty_like(value)
    for i in range(len(at)):
        lane = slice(i, i + 1)
        old[lane], _ = modify(op, kind, view, at[lane], value[lane], None if compare is None else compare[lane])
    return old


@pytest.mark.one_in(3)
@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("op", ["add", "xor", "and", "or", "min", "max", "exch", "cas", "inc", "dec"])
@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**32 - 1),
    places=st.sampled_from((1, 3, 40)),
    stride=st.sampled_from((1, 5000)),
    equal=st.booleans(),
)
def test_many_lanes_are_one_after_the_other(
    op: str, kind: str, returns: bool, seed: int, places: int, stride: int, equal: bool
) -> None:
    """``places``, ``stride``: how many elements lanes access, and how far these are apart. ``equal``: whether all lanes
    have the same operand."""
    if kind[0] == "f" and op not in ("add", "min", "max", "exch"):
        return
    rng = np.random.default_rng(seed)
    lanes = int(rng.integers(1, 70))
    unsigned = np.dtype(f"u{np.dtype(TYPES[kind]).itemsize}")
    if kind[0] == "f":
        memory, value = rng.standard_normal(MEMORY).astype(TYPES[kind]), rng.standard_normal(lanes).astype(TYPES[kind])
    else:
        high = 5 if op in ("cas", "inc", "dec") else 1 << 31 - (kind[0] == "s")
        memory, value = (rng.integers(0, high, n).astype(TYPES[kind]) for n in (MEMORY, lanes))
    view, value = memory.view(unsigned), value.view(unsigned)
    if equal:
        value[:] = value[0]
    compare = rng.integers(0, 5, lanes).astype(unsigned) if op == "cas" else None
    at = rng.integers(0, places, lanes) * stride
    want = view.copy()
    old = lane_by_lane(op, kind, want, at, value, compare)
    result, changed = modify(op, kind, view, at, value, compare, returns)
    assert np.array_equal(view, want)
    if returns:
        assert np.array_equal(result, old)
        assert changed or np.array_equal(old, want[at])


def test_every_swap_of_a_chain_finds_what_the_one_before_has_left() -> None:
    """Each of 40 lanes, at two addresses, expects the value that the previous lane writes."""
    lanes = np.arange(40, dtype=np.uint32)
    view = np.zeros(2, np.uint32)
    old, changed = modify("cas", "b32", view, lanes % 2, lanes // 2 + 1, lanes // 2)
    assert np.array_equal(old, lanes // 2)
    assert (view.tolist(), changed) == ([20, 20], True)


@pytest.mark.parametrize(
    ("op", "value", "changes"),
    [("max", 3, False), ("max", 9, True), ("or", 5, False), ("add", 0, False), ("cas", 5, False)],
)
@pytest.mark.parametrize("returns", [True, False])
def test_atomics_that_leave_all_as_it_is_change_nothing(op: str, value: int, changes: bool, returns: bool) -> None:
    """This matters because a loop that waits while nothing changes is reported as endless."""
    view, at = np.full(4, 5, np.uint32), np.array([1, 1, 2])
    _, changed = modify(op, "u32", view, at, np.full(3, value, np.uint32), np.full(3, 5, np.uint32), returns)
    assert changed == changes == bool((view != 5).any())
