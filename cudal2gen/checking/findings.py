"""Findings of a check: where, what, how often; and the kernels that ran."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from cudal2gen.checking.names import demangled
from cudal2gen.emulator import RULES, LaunchResult, Report

# The machine cannot execute a launch: no finding about the program, but what it asks for is not checked.
CANNOT = "launch-error"
_PLACE = re.compile(r"(.+?):(\d+)(?: \(inlined at (.+):(\d+)\))?$")


@dataclass(frozen=True)
class Place:
    """A line of CUDA source."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class Finding:
    """A finding, one per rule and instruction of a kernel. ``places``: the source line and the call sites that it is
    inlined at, innermost first. ``cta`` and ``threads`` are of the first occurrence, ``count`` sums over launches."""

    rule: str
    severity: str
    message: str
    kernel: str
    places: tuple[Place, ...] = ()
    ptx_line: int = 0
    ptx: str = ""
    cta: tuple[int, int, int] | None = None
    threads: tuple[int, ...] = ()
    count: int = 1
    launches: int = 1

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What the same finding of another launch shares."""
        return self.rule, self.kernel, self.ptx_line, "" if self.ptx_line else self.message

    @property
    def is_error(self) -> bool:
        """Can a result be wrong?"""
        return self.severity == "error"

    @property
    def place(self) -> Place | None:
        """The line to show first: the innermost one."""
        return self.places[0] if self.places else None

    def record(self) -> dict[str, Any]:
        """The finding as JSON."""
        fields = asdict(self)
        fields["kernel_full"] = demangled(self.kernel)
        fields["meaning"] = RULES[self.rule].meaning
        return fields


def of_report(report: Report) -> Finding:
    """The finding of an emulator's report."""
    places: tuple[Place, ...] = ()
    if match := _PLACE.match(report.source):
        places = (Place(match[1], int(match[2])),)
        if match[3]:
            places += (Place(match[3], int(match[4])),)
    return Finding(
        report.kind, report.severity.value, report.message, report.kernel, places, report.line,
        " ".join(report.text.split()), report.cta, report.threads, report.count,
    )  # fmt: skip


@dataclass
class Kernel:
    """A kernel and its launches: how many ran, how many more were repetitions that change nothing and so were not run
    again, the CTAs executed, and counters summed over launches."""

    name: str
    launches: int = 0
    repetitions: int = 0
    ctas: int = 0
    seconds: float = 0.0
    grids: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    def add(self, run: Run) -> None:
        """Count a launch that ran."""
        self.launches += 1
        self.ctas += run.ctas
        self.seconds += run.seconds
        self.grids[run.grid] = self.grids.get(run.grid, 0) + 1
        for name, value in run.counters.items():
            self.counters[name] = self.counters.get(name, 0) + value


@dataclass(frozen=True)
class Run:
    """A launch that ran: grid and block as text, CTAs executed, its time and counters."""

    grid: str
    ctas: int
    seconds: float
    counters: dict[str, int]


def run_of(result: LaunchResult, seconds: float) -> Run:
    """What is kept of a launch."""
    spelled = f"{_extents(result.grid)} of {_extents(result.block)}"
    counters = numbers(result.counters.summary()) if result.counters is not None else {}
    return Run(spelled, 0 if result.ctas is None else len(result.ctas), seconds, counters)


def _extents(dims: tuple[int, int, int]) -> str:
    x, y, z = dims
    return f"{x}x{y}x{z}" if z > 1 else f"{x}x{y}" if y > 1 else str(x)


def numbers(counters: dict[str, Any]) -> dict[str, int]:
    """Counters without opcodes, and bank conflicts and sectors by kind."""
    out = {name: value for name, value in counters.items() if isinstance(value, int) and value}
    for kind, banks in counters["shared"].items():
        out[f"{kind} conflicts"] = banks["wavefronts"] - banks["ideal"]
    for kind, traffic in counters["global"].items():
        out[f"{kind} sectors"], out[f"{kind} ideal sectors"] = traffic["sectors"], traffic["ideal_sectors"]
    return out
