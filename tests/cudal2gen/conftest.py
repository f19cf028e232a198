"""Settings of the tests of ``cudal2gen``. It also compiles kernels ahead of the tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudal2gen import places
from cudal2gen.generation import compiler
from cudal2gen.kernel import FAMILIES
from cudal2gen.launch import gpu
from tests.conftest import STDERR
from tests.cudal2gen import faulty, idle_runtime
from tests.cudal2gen.emulated_operators import device, kernels, opened_pack, operator_device

__all__ = ["device", "kernels", "opened_pack", "operator_device"]  # fixtures

# Compiled kernels outlive a clone: they are cached by content, outside of it, unless the caller says where.
os.environ.setdefault("CUDAL2GEN_BUILD_DIR", str(places.user_cache() / "test-build"))

REHEARSED = 1  # how many cases of a test run on a stand-in for a card
LEFT_OUT = pytest.StashKey[str]()  # the line of the summary about tests that need a GPU
# The module with the operators' dispatcher. It imports torch, so it is looked up only if it is loaded.
DISPATCH = "cudal2gen.operators.dispatch"


@pytest.hookimpl(trylast=True)  # after the shared conftest, which opens that file
def pytest_configure(config: pytest.Config) -> None:
    """Sends the traceback of a hanging kernel to the user's stderr."""
    gpu.TRACEBACK_FD = config.stash[STDERR]


def gpu_obstacle() -> str:
    """Why tests marked ``gpu`` cannot run here; empty where they can."""
    if os.environ.get(gpu.STAND_IN):
        return ""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that need a GPU where there is none, and keeps few tests on a stand-in for one."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if os.environ.get(gpu.STAND_IN):
        rehearse(config, items)
        return
    if on_gpu and (reason := gpu_obstacle()):
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.stash[LEFT_OUT] = f"{len(on_gpu)} tests need a GPU and were left out: {reason}"


def rehearse(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a stand-in for a card, keeps one case of every test, and skips tests that need a real card."""
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if LEFT_OUT in config.stash:
        terminalreporter.write_line(config.stash[LEFT_OUT])


@pytest.fixture(scope="session", autouse=True)
def _compile_ahead(request: pytest.FixtureRequest) -> None:
    """Compiles what the collected modules list as ``BUILT_AHEAD``.

    In batches a kernel takes a fifth of the time that it takes alone. Workers that start together share the work: the
    compiler locks each kernel.
    """
    modules = dict.fromkeys(item.module for item in request.session.items if isinstance(item, pytest.Function))
    if records := [record for module in modules for record in getattr(module, "BUILT_AHEAD", ())]:
        faulty.build(records)


@pytest.fixture(scope="module")
def library() -> Path:
    """The host launcher."""
    return compiler.launcher()


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CUDA runtime that launches nothing and counts its calls."""
    return idle_runtime.build(tmp_path_factory.mktemp("runtime"))


@pytest.fixture(autouse=True)
def _restore_state() -> Iterator[None]:
    """Restores global state after each test: the family of recorded tiles, which exists while recordings are read, and
    the operators' dispatcher, which the first call makes from the environment."""
    families, before = dict(FAMILIES), _dispatcher()
    yield
    FAMILIES.clear()
    FAMILIES.update(families)
    if _dispatcher() is not before:
        sys.modules[DISPATCH].Current.dispatcher = before


def _dispatcher() -> object:
    """The operators' current dispatcher; None if no test has imported them."""
    return sys.modules[DISPATCH].Current.dispatcher if DISPATCH in sys.modules else None
