"""Holds the results of a simulation: when each warp issued, and what it waited for (Nsight Compute's stall names)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from kernelproof.sass.decoding import Instruction
from kernelproof.sass.operations import Stall
from kernelproof.sass.pipes import Pipe


@dataclass(frozen=True)
class Issue:
    """A warp issues an instruction in ``cycle``. ``stalls``: the cycles since its previous issue, by reason."""

    warp: int
    instruction: Instruction
    cycle: float
    stalls: Mapping[Stall, float]


class RawIssue(NamedTuple):
    """An issue as the simulation records it; ``issue`` splits its cycles by reason.

    The warp issued its previous instruction in ``previous_cycle``. It waited for the stall count until ``stall_end``,
    for a dependency (``reason``) until ``ready``, for the pipe (``throttle``) until ``accepted``, and for other warps
    until ``cycle``.
    """

    warp: int
    instruction: Instruction
    cycle: float
    previous_cycle: float
    stall_end: float
    ready: float
    reason: Stall
    accepted: float
    throttle: Stall

    @property
    def issue(self) -> Issue:
        """The issue with its cycles by reason."""
        spans = (
            (Stall.WAIT, self.stall_end - self.previous_cycle - 1),
            (self.reason, self.ready - self.stall_end),
            (self.throttle, self.accepted - self.ready),
            (Stall.NOT_SELECTED, self.cycle - self.accepted),
        )
        stalls = {Stall.SELECTED: 1.0}
        for stall, cycles in spans:
            if cycles > 0:
                stalls[stall] = stalls.get(stall, 0.0) + cycles
        return Issue(self.warp, self.instruction, self.cycle, stalls)


@dataclass
class Timeline:
    """Results of a simulation.

    ``cycles``: cycles until the last warp has issued its last instruction. ``ends``: for each warp, the cycles in which
    it issued the last instruction of each repetition of its parts. ``busy``: cycles for which each pipe was occupied.
    ``raw_issues``: all issues, in the order of time; empty unless ``simulate`` was called with ``detail``.
    """

    cycles: float = 0.0
    ends: list[list[float]] = field(default_factory=list)
    busy: dict[Pipe, float] = field(default_factory=dict)
    raw_issues: list[RawIssue] = field(default_factory=list)

    @cached_property
    def issues(self) -> list[Issue]:
        """All issues, in the order of time; empty if ``raw_issues`` is."""
        return [raw.issue for raw in self.raw_issues]

    @property
    def stalls(self) -> dict[Stall, float]:
        """The cycles of all warps, by reason."""
        total: dict[Stall, float] = {}
        for issue in self.issues:
            for stall, cycles in issue.stalls.items():
                total[stall] = total.get(stall, 0.0) + cycles
        return total
