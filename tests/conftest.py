"""Settings that all tests share, and kernels compiled ahead of them."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from cudal2gen import gpu, places
from cudal2gen.kernel import FAMILIES
from tests import draws, faulty

pytest_plugins = ["tests.cpu_times", "tests.emulated_operators"]

# Compiled kernels outlive a clone: they are cached by content, outside of it, unless the caller says where.
os.environ.setdefault("CUDAL2GEN_BUILD_DIR", str(places.user_cache() / "test-build"))

# The processes that share the tests share the cores too, and a second thread of one spins while it waits for the first.
# Those inherit it, as do the commands that tests run.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples every time, so that a failure belongs to the change that brought it; "thorough" looks for new ones.
settings.register_profile(
    "ci", deadline=None, max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.register_profile("thorough", parent=settings.get_profile("ci"), derandomize=False, max_examples=1000)
# They start first, so that no worker is left with a long test when the others have ended.
LONGEST = [
    "test_gpu_day.py", "test_multistage.py", "test_library.py", "test_ray.py", "test_fuzz_cli.py", "test_validator.py",
    "test_mutation.py", "test_tune_cli.py",
]  # fmt: skip
REHEARSED = 1  # case of each test
LEFT_OUT = pytest.StashKey[str]()
DISPATCH = "cudal2gen.operators.dispatch"
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
if settings.default.derandomize:
    draws.without_constants_of_modules()


def pytest_configure() -> None:
    """Here output is not captured yet: the traceback of a kernel that hangs goes where the user sees it."""
    gpu.TRACEBACK_FD = os.dup(2)
    # Shells start jobs in the background with SIGINT ignored, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def without_a_gpu() -> str:
    """Why tests marked ``gpu`` cannot run here; empty where they can."""
    if os.environ.get(gpu.STAND_IN):
        return ""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if os.environ.get(gpu.STAND_IN):
        rehearse(config, items)
        return
    if on_gpu and (reason := without_a_gpu()):
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.stash[LEFT_OUT] = f"{len(on_gpu)} tests need a GPU and were left out: {reason}"


def rehearse(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a stand-in for a card: one case of every test, but for those that only a real card can answer."""
    cases: dict[object, int] = {}
    left_out = []
    for item in items:
        function = getattr(item, "function", item)
        cases[function] = cases.get(function, 0) + 1
        if item.get_closest_marker("card"):
            item.add_marker(pytest.mark.skip(reason="asks CUDA itself, which a rehearsal has not"))
        elif cases[function] > REHEARSED:
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """What was imported and collected lives as long as the process: the collector of garbage need not look at it."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if LEFT_OUT in config.stash:
        terminalreporter.write_line(config.stash[LEFT_OUT])


@pytest.fixture(scope="session", autouse=True)
def _kernels_compiled_ahead(request: pytest.FixtureRequest) -> None:
    """Compiles what the collected modules list as ``BUILT_AHEAD``.

    In batches a kernel takes a fifth of the time that it takes alone. Workers that start together share the work: the
    compiler locks each kernel.
    """
    modules = dict.fromkeys(item.module for item in request.session.items if isinstance(item, pytest.Function))
    if records := [record for module in modules for record in getattr(module, "BUILT_AHEAD", ())]:
        faulty.build(records)


@pytest.fixture(autouse=True)
def _state_as_it_was() -> Iterator[None]:
    """Recorded tiles are a family while recordings are read; other tests count families. The operators' dispatcher is
    made by the first call, by the environment of that moment."""
    families, before = dict(FAMILIES), _dispatcher()
    yield
    FAMILIES.clear()
    FAMILIES.update(families)
    if _dispatcher() is not before:
        sys.modules[DISPATCH].Current.dispatcher = before


def _dispatcher() -> object:
    return sys.modules[DISPATCH].Current.dispatcher if DISPATCH in sys.modules else None


@pytest.fixture(autouse=True)
def _numbers_drawn_alike() -> None:
    """What a test draws without a seed does not depend on the tests before it."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)


@pytest.fixture
def checkout() -> Path:
    root = places.checkout()
    assert root is not None, "the tests run from a checkout"
    return root
