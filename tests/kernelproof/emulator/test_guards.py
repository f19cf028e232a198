"""Proves that barriers of cooperative groups and locks order the accesses that they guard, and that missing parts are
found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernelproof import emulator
from tests.kernelproof.emulator.build import compile_file

# The usual and the adverse order, with all lanes at once and with batches of 64.
ORDERS = pytest.mark.parametrize(("adverse", "lanes"), [(False, None), (False, 64), (True, None), (True, 64)])


def launch_kernel(
    name: str, *arguments: Any, adverse: bool, lanes: int | None, grid: int = 4, block: int = 64, **settings: Any
) -> tuple[Any, set[str]]:
    """The last array after a launch, and the kinds of findings. An int in a tuple is the size of an array of zeros."""
    program = emulator.load(compile_file("guards", ".ptx").read_text())
    memory = emulator.Memory()
    passed = [memory.upload(np.zeros(a, np.int32), "inout") if isinstance(a, tuple) else a for a in arguments]
    options = emulator.Options(adverse=adverse, lanes=lanes)
    result = program.launch(name, grid, block, passed, memory=memory, options=options, **settings)
    arrays = [a for a in passed if not isinstance(a, int)]
    return arrays[-1].download(), {report.kind for report in result.reports}


@ORDERS
@pytest.mark.parametrize(("barriers", "kinds"), [(3, set()), (2, {"global-race"}), (1, {"global-race"})])
def test_the_barrier_of_a_cooperative_grid(barriers: int, kinds: set[str], adverse: bool, lanes: int | None) -> None:
    out, found = launch_kernel(
        "grid_rounds", (256,), (256,), 3, barriers, cooperative=True, adverse=adverse, lanes=lanes
    )  # fmt: skip
    assert found == kinds
    assert kinds or (out == 3 * ((np.arange(256) + 65) % 256) + 3).all()


@ORDERS
@pytest.mark.parametrize("fault", range(5))
def test_a_lock_that_a_thread_takes_for_its_cta(fault: int, adverse: bool, lanes: int | None) -> None:
    data, found = launch_kernel("cta_lock", (1,), (64,), fault, adverse=adverse, lanes=lanes)
    assert found == ({"global-race"} if fault else set())
    assert fault or (data == 10).all()


@ORDERS
@pytest.mark.parametrize("fault", [0, 1, 2, 4])
def test_a_lock_in_shared_memory_that_a_lane_takes_for_its_warp(fault: int, adverse: bool, lanes: int | None) -> None:
    out, found = launch_kernel("warp_lock", (32,), fault, grid=1, block=128, adverse=adverse, lanes=lanes)
    assert found == ({"shared-race"} if fault else set())
    assert fault or (out == 10).all()


@ORDERS
@pytest.mark.parametrize(("keeps", "kinds"), [(1, {"deadlock"}), (0, set())])
def test_a_lock_that_is_never_given_back(keeps: int, kinds: set[str], adverse: bool, lanes: int | None) -> None:
    data, found = launch_kernel("kept_lock", (1,), (1,), keeps, adverse=adverse, lanes=lanes)
    assert found == kinds
    assert data[0] == (1 if keeps else 4)
