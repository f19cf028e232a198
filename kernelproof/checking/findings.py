"""Describes the kernels that a check ran, with the counters of their launches, and the source lines of a finding."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelproof.emulator import LaunchResult, Report
from kernelproof.emulator.state.sites import Frame

# The kind of a report by which the emulator refuses a launch. It is no error of the program; the launch is not checked.
CANNOT = "launch-error"

# Two findings with equal causes are the same finding and are counted together.
Cause = tuple[object, ...]


def frames(report: Report) -> tuple[Frame, ...]:
    """The source lines of a finding: first the user's own line, then the lines that are inlined into it, down to the
    instruction's own line, and last the user's callers of that line."""
    site = report.access.site
    if site.home is None:
        return ()
    inner = [frame for frame in site.frames[: site.frames.index(site.home)] if frame != site.home]
    return (site.home, *reversed(inner), *site.calls)


def local(frame: Frame) -> Frame:
    """A source line whose file name is relative if the file lies below the working directory."""
    path, folder = Path(frame.file), Path.cwd()
    return frame._replace(file=str(path.relative_to(folder))) if path.is_relative_to(folder) else frame


@dataclass
class KernelLaunches:
    """A kernel and its launches.

    ``launches`` is how many were executed, ``repetitions`` how many more were skipped because they repeated a launch on
    the same data. ``ctas``, ``seconds`` and ``counters`` are sums over the executed launches; ``grids`` counts each
    geometry.
    """

    name: str
    launches: int = 0
    repetitions: int = 0
    ctas: int = 0
    seconds: float = 0.0
    grids: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    def add(self, run: Run) -> None:
        """Add a launch that was executed."""
        self.launches += 1
        self.ctas += run.ctas
        self.seconds += run.seconds
        self.grids[run.grid] = self.grids.get(run.grid, 0) + 1
        for name, value in run.counters.items():
            self.counters[name] = self.counters.get(name, 0) + value


@dataclass(frozen=True)
class Run:
    """A launch that was executed: its grid and block as text, executed CTAs, seconds, and counters."""

    grid: str
    ctas: int
    seconds: float
    counters: dict[str, int]


def run_of(result: LaunchResult, seconds: float) -> Run:
    """The ``Run`` of a launch, from the emulator's result."""
    spelled = f"{extents(result.grid)} of {extents(result.block)}"
    counters = flat_counters(result.counters.summary()) if result.counters is not None else {}
    return Run(spelled, 0 if result.ctas is None else len(result.ctas), seconds, counters)


def extents(dims: tuple[int, int, int]) -> str:
    """A grid or a block as text, such as ``8x4``; trailing extents of 1 are left out."""
    x, y, z = dims
    return f"{x}x{y}x{z}" if z > 1 else f"{x}x{y}" if y > 1 else str(x)


def flat_counters(counters: dict[str, Any]) -> dict[str, int]:
    """The emulator's counters as flat names and integers, without the table of opcodes. Zeros are left out, except
    those of shared and global memory.

    Bank conflicts are the shared-memory wavefronts beyond the fewest possible.
    """
    out = {name: value for name, value in counters.items() if isinstance(value, int) and value}
    out |= {f"bulk {name}": value for name, value in counters["bulk"].items() if value}
    for kind, accesses in counters["shared"].items():
        out[f"{kind} conflicts"] = accesses["wavefronts"] - accesses["ideal"]
    for kind, traffic in counters["global"].items():
        out[f"{kind} sectors"], out[f"{kind} ideal sectors"] = traffic["sectors"], traffic["ideal_sectors"]
        out[f"{kind} bytes"] = traffic["bytes"]
    return out
