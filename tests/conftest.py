"""Settings that the tests of both packages share. Nothing here imports either of them before a test asks for it."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from tests import disassembly, draws

pytest_plugins = ["tests.cpu_times"]

# Several processes share the cores, so one thread each is enough: a second one spins while it waits for the first.
# Worker processes and the commands that tests run inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples are drawn every time, so that a new failure is due to a change. "thorough" draws new ones.
settings.register_profile(
    "ci", deadline=None, max_examples=30, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.register_profile("thorough", parent=settings.get_profile("ci"), derandomize=False, max_examples=1000)
# The files that start first, so that no worker is left with a long test when the others have ended.
LONGEST = [
    "test_gpu_day.py", "test_installed.py", "test_multistage.py", "test_library.py", "test_ray.py", "test_fuzz_cli.py",
    "test_validator.py", "test_mutation.py", "test_tune_cli.py",
]  # fmt: skip
# The folder with the packages, the scripts and the stores.
CHECKOUT = Path(__file__).parents[1]
STDERR = pytest.StashKey[int]()  # the user's stderr, to which tracebacks go although output is captured
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
if settings.default.derandomize:
    draws.without_constants_of_modules()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Keeps the user's stderr: output is not captured yet."""
    config.stash[STDERR] = os.dup(2)
    # Shells start jobs in the background with SIGINT ignored, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # after -k, so that the case that -k selects is the first one of its test
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out thorough tests and cases beyond the draw unless all are asked for, and puts the longest files
    first."""
    long = {item for item in items if item.get_closest_marker("thorough")} | undrawn_cases(items)
    if long and not draws.THOROUGH:
        config.hook.pytest_deselected(items=[*long])
        items[:] = [item for item in items if item not in long]
    order = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def undrawn_cases(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases that ``one_in(step)`` leaves to ``make thorough``: all but every ``step``-th of a test's cases."""
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            cases.setdefault((item.nodeid.partition("[")[0], *mark.args), []).append(item)
    return {item for (_, step), of_test in cases.items() for number, item in enumerate(of_test) if number % step}


def pytest_collection_finish() -> None:
    """Exempts imported and collected objects from garbage collection, since they live as long as the process."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _numbers_drawn_alike() -> None:
    """Makes what a test draws without a seed independent of the tests before it."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _disassembler_that_remembers() -> None:
    """Makes the tests and the commands that they run use a caching stand-in for nvdisasm."""
    from kernelproof.ground import places, toolchain

    with suppress(toolchain.ToolchainError):
        script = disassembly.caching_disassembler(toolchain.find_nvdisasm(), places.user_cache())
        os.environ.setdefault("KERNELPROOF_NVDISASM", str(script))


# Folders of the checkout whose files no test may change.
STORES = ("results", "configs")


def _state_of_stores() -> dict[str, tuple[int, int]]:
    """Size and time of change of each file in the checkout's stores, by path."""
    entries = [entry for name in STORES for entry in os.scandir(CHECKOUT / name)]
    return {entry.path: (entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries}


@pytest.fixture(autouse=True)
def _stores_of_the_checkout_as_they_were() -> Iterator[None]:
    """Fails if a test changes the checkout's ``results`` or ``configs``: tests use their own stores and catalogs."""
    before = _state_of_stores()
    yield
    assert _state_of_stores() == before, "this test, or one that ran at the same time, wrote into the checkout"


@pytest.fixture
def checkout() -> Path:
    """The root of this checkout."""
    return CHECKOUT
