"""Implements pytest's hooks: the mark ``emulated``, the fixture ``cuda_emulator``, and test failures by findings.

Every pytest run in an environment imports this module, so it imports nothing but pytest until a test needs more.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from kernelproof.testing.emulation import CudaEmulator, MarkOptions

FIXTURE, MARK = "cuda_emulator", "emulated"
MISSING = "kernelproof_missing"  # the ini option
TITLE = "CUDA findings"  # of the section of a test report
_EMULATOR = pytest.StashKey["CudaEmulator"]()
_MARK_ALONE = pytest.StashKey[bool]()  # set if a test has the fixture only because of its mark


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ini option."""
    parser.addini(MISSING, "tests that need a missing compiler: fail (default) or skip", default="fail")


def pytest_configure(config: pytest.Config) -> None:
    """Describe the mark, and check the value of the ini option."""
    config.addinivalue_line(
        "markers",
        f"{MARK}(device='sm_80', adverse=False, allow=(), counters=False, triton=None): CUDA kernels run on the "
        "emulated GPU, and errors that it finds fail the test, except those of rules whose ids are in allow",
    )
    if config.getini(MISSING) not in ("fail", "skip"):
        raise pytest.UsageError(f"{MISSING} = {config.getini(MISSING)}: fail or skip")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give a marked test the fixture, before all its other fixtures."""
    names = getattr(item, "fixturenames", None)
    if names is not None and FIXTURE not in names and item.get_closest_marker(MARK):
        vars(item)["fixturenames"] = [FIXTURE, *names]  # parametrised tests share the old list
        item.stash[_MARK_ALONE] = True


@pytest.fixture
def cuda_emulator(request: pytest.FixtureRequest) -> Generator[CudaEmulator]:
    """An emulated GPU: compile or load kernels and launch them on arrays; errors that it finds fail the test."""
    from kernelproof.testing.emulation import CudaEmulator

    item = request.node

    def missing(reason: str) -> NoReturn:
        if request.config.getini(MISSING) == "skip":
            pytest.skip(reason)
        pytest.fail(f"{reason} (to skip such tests: {MISSING} = skip in pytest's ini file)", pytrace=False)

    folders = (item.path.parent, request.config.rootpath)
    emulator = CudaEmulator(_settings(item), folders, missing)
    item.stash[_EMULATOR] = emulator
    emulator.start(needed=item.stash.get(_MARK_ALONE, False))
    yield emulator
    emulator.end()


def _settings(item: pytest.Item) -> MarkOptions:
    """The options of the test's marks; those of the function override those of its class and module."""
    from kernelproof.ground.errors import WrongInput
    from kernelproof.testing.emulation import MarkOptions

    options: dict[str, Any] = {}
    for mark in reversed(list(item.iter_markers(MARK))):
        options |= {**dict(zip(("device",), mark.args, strict=False)), **mark.kwargs}
    try:
        return MarkOptions.of(options)
    except WrongInput as error:
        refusal = str(error)
    pytest.fail(f"@pytest.mark.{MARK}: {refusal}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """After the test's body, fail the test if there are errors, or show them in addition to the test's own failure."""
    try:
        outcome = yield
    finally:
        emulator = item.stash.get(_EMULATOR, None)
        if emulator is not None:
            emulator.end()
            if text := emulator.report():
                item.add_report_section("call", TITLE, text)
    if emulator is not None and (summary := emulator.failure()):
        pytest.fail(summary, pytrace=False)
    return outcome


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the findings of tests that passed: benign ones, lints, and those that are allowed."""
    is_first = True
    for report in terminalreporter.stats.get("passed", []):
        for name, text in report.sections:
            if TITLE in name:
                if is_first:
                    terminalreporter.section(f"{TITLE} that fail no test")
                    is_first = False
                terminalreporter.write_line(report.nodeid)
                terminalreporter.write_line(text)
