"""Implements ``--cpu-times``, a table of the CPU seconds of each test file, with those of ended child processes.

CPU seconds show the effect of a change of the tests, since unlike durations they hardly depend on what else runs.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from tests import commands

BEFORE = pytest.StashKey[float]()
SET_UPS = pytest.StashKey[Counter[str]]()


def cpu_seconds() -> float:
    """User and system seconds of this process, of its children that have ended, and of ``tests.commands``."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return commands.Usage.seconds + sum(usage.ru_utime + usage.ru_stime for usage in usages)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", action="store_true", help="print the CPU seconds of each test file at the end")


def pytest_configure(config: pytest.Config) -> None:
    """Prints the table in the process that collects the reports of all workers."""
    config.stash[SET_UPS] = Counter()
    if config.getoption("--cpu-times") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Table(), "cpu-times-table")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the count, so that the first report does not include imports."""
    session.config.stash[BEFORE] = cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Attributes the CPU seconds of a session's fixture to the fixture's name, not to the file that uses it first."""
    before = cpu_seconds()
    value = yield
    if fixturedef.scope == "session":
        request.config.stash[SET_UPS][f"(set-up) {fixturedef.argname}"] += cpu_seconds() - before
    return value


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Stores the CPU seconds since the previous report in a report, which a worker process sends with it."""
    report = yield
    now, set_ups = cpu_seconds(), item.config.stash[SET_UPS]
    own = now - item.config.stash[BEFORE] - set_ups.total()
    report.__dict__["cpu_seconds"] = {**set_ups, report.nodeid.partition("::")[0]: own}
    item.config.stash[BEFORE] = now
    set_ups.clear()
    return report


class Table:
    """Sums the CPU seconds in reports, and prints them below the other results."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds.update(report.__dict__["cpu_seconds"])
        self.tests[report.nodeid.partition("::")[0]] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("CPU seconds by file")
        for name, seconds in self.seconds.most_common():
            terminalreporter.write_line(f"{seconds:8.1f}  {self.tests[name]:5d} tests  {name}")
        terminalreporter.write_line(f"{self.seconds.total():8.1f}  {self.tests.total():5d} tests  in all")
