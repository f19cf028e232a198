"""Proves that a thread which arrives at a barrier without waiting releases its accesses, and acquires nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernelproof import emulator
from tests.kernelproof.emulator.build import compile_file

# A buffer of 96 numbers.
OUT = np.arange(96, dtype=np.int32)


def launch_kernel(name: str, *arguments: Any, grid: int = 1, block: int = 64, **options: Any) -> tuple[Any, set[str]]:
    """The kernel's first array afterwards, and the kinds of its findings."""
    program = emulator.load(compile_file("arrivals", ".ptx").read_text())
    memory = emulator.Memory()
    arrays = [memory.upload(a.copy(), "inout") if isinstance(a, np.ndarray) else a for a in arguments]
    result = program.launch(name, grid, block, arrays, memory=memory, **options)
    return arrays[0].download(), {report.kind for report in result.reports}


@pytest.mark.parametrize("adverse", [False, True])
@pytest.mark.parametrize("producer", [0, 1])
@pytest.mark.parametrize(
    ("name", "kinds"), [("waits", set()), ("only_arrives", {"shared-race"}), ("writes_again", {"shared-race"})]
)
def test_a_buffer_that_warps_hand_over(name: str, kinds: set[str], producer: int, adverse: bool) -> None:
    out, found = launch_kernel(name, np.zeros(96, np.int32), producer, options=emulator.Options(adverse=adverse))
    assert found == kinds
    assert kinds or (out == OUT).all()


@pytest.mark.parametrize("producer", [0, 1])
@pytest.mark.parametrize(("name", "kinds"), [("waits_globally", set()), ("only_arrives_globally", {"global-race"})])
def test_a_buffer_in_global_memory(name: str, kinds: set[str], producer: int) -> None:
    out, found = launch_kernel(name, np.zeros(96, np.int32), np.zeros(32, np.int32), producer)
    assert found == kinds
    assert kinds or (out == OUT).all()


@pytest.mark.parametrize("acquirer", [0, 1])
@pytest.mark.parametrize(("arrives", "kinds"), [(True, set()), (False, {"global-race"})])
def test_what_another_cta_released_is_passed_on_by_an_arrival(arrives: bool, kinds: set[str], acquirer: int) -> None:
    data, flag, out = np.zeros(32, np.int32), np.zeros(1, np.int32), np.zeros(32, np.int32)
    _, found = launch_kernel("passes_on", data, flag, out, acquirer, arrives, grid=2)
    assert found == kinds
