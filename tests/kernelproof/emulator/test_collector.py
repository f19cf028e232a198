"""Proves that a launch leaves the garbage collector as it was."""

from __future__ import annotations

import gc

import pytest

from kernelproof.emulator.state.collector import NEW_OBJECTS, few_collections


def fail(seen: list[tuple[int, int, int]]) -> None:
    """Raises an error after a look at the collector's thresholds."""
    with few_collections():
        seen.append(gc.get_threshold())
        raise KeyError


@pytest.mark.parametrize("threshold", [700, 0, 10 * NEW_OBJECTS])
def test_the_collector_is_left_as_it_was(threshold: int) -> None:
    before, seen = gc.get_threshold(), []
    try:
        gc.set_threshold(threshold, 7, 8)
        with pytest.raises(KeyError):
            fail(seen)
        assert gc.get_threshold() == (threshold, 7, 8)
    finally:
        gc.set_threshold(*before)
    assert seen == [(max(threshold, NEW_OBJECTS) if threshold else 0, 7, 8)]
