"""Chooses the CTAs that ``--sample`` runs, and excuses findings that may follow from those that did not run.

After a partial launch, memory lacks what the other CTAs would have written. A later launch may read such values, and a
finding that depends on them is no proof of an error, so it becomes benign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from kernelproof.checking.findings import CANNOT
from kernelproof.emulator import Report
from kernelproof.emulator.frontend.flow.dependence import Dependence, memory_dependence
from kernelproof.emulator.frontend.flow.graph import build
from kernelproof.emulator.host.execution import KernelLaunch
from kernelproof.emulator.state.rules import Severity

# Rules that are broken because something did not happen, such as a write, an arrival at a barrier, or the end of a
# loop. A branch on a wrong value may be the cause, so these depend on loaded values even if their own line does not.
OMISSIONS = frozenset((
    "uninitialised-shared", "uninitialised-local", "uninitialised-global", "in-flight", "deadlock", "runaway",
    "barrier-divergence", "barrier-count", "mbarrier",
))  # fmt: skip


def sampler(count: int, seed: int) -> Callable[[tuple[int, int, int]], list[int]]:
    """Return a function that chooses the CTAs of a grid to run: its corners and ``count`` random ones, by index."""

    def chosen_ctas(grid: tuple[int, int, int]) -> list[int]:
        gx, gy, gz = grid
        total = gx * gy * gz
        if total <= count:
            return list(range(total))
        corners = {x + gx * (y + gy * z) for x in (0, gx - 1) for y in (0, gy - 1) for z in (0, gz - 1)}
        sample = np.random.default_rng(seed).choice(total, count, replace=False)
        return sorted({*corners, *map(int, sample)})

    return chosen_ctas


class MemoryDependences:
    """Knows which instructions of a kernel depend on values loaded from memory. The analysis of a kernel is cached."""

    def __init__(self) -> None:
        self._dependences: dict[tuple[str, str], Dependence] = {}

    def excuse(self, launch: KernelLaunch, reports: Iterable[Report]) -> None:
        """Make those errors of a launch benign that may follow from values that other CTAs would have written."""
        for report in reports:
            if report.is_error and report.kind != CANNOT and _follows(report, self._dependence(launch)):
                report.severity = Severity.BENIGN
                report.message += "; it may follow from values that CTAs which did not end would have written"

    def _dependence(self, launch: KernelLaunch) -> Dependence:
        """The analysis of a launch's kernel, made at its first use."""
        module, kernel = launch.module, launch.kernel
        key = module.text, kernel
        if key not in self._dependences:
            self._dependences[key] = memory_dependence(build(module, module.kernels[kernel]).blocks)
        return self._dependences[key]


def _follows(report: Report, dependence: Dependence) -> bool:
    """Whether a finding may depend on loaded values."""
    if not report.line or report.kind in OMISSIONS:
        return dependence.writes or report.line in dependence.lines
    other_line = report.other.site.line if report.other is not None else 0
    return not dependence.lines.isdisjoint((report.line, other_line))
