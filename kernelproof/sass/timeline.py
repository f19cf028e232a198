"""Results of a simulation: issues, and stalls by Nsight Compute's names."""

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
    """One warp's instruction, the cycle it issued in, and the cycles since the warp's issue before, by reason."""

    warp: int
    instruction: Instruction
    cycle: float
    stalls: Mapping[Stall, float]


class Row(NamedTuple):
    """An issue in ``cycle``, as the simulation appends it. The cycles since the warp's issue ``before``: the stall
    count until ``fixed``, a dependency, for ``reason``, until ``ready``, the pipe, which ``throttle`` names, until
    ``accepted``, other warps until ``cycle``."""

    warp: int
    instruction: Instruction
    cycle: float
    before: float
    fixed: float
    ready: float
    reason: Stall
    accepted: float
    throttle: Stall

    @property
    def issue(self) -> Issue:
        """The cycles split by reason."""
        spans = (
            (Stall.WAIT, self.fixed - self.before - 1),
            (self.reason, self.ready - self.fixed),
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
    """Results of a simulation. ``ends``: per warp, the cycles in which the repetitions of its parts had issued.
    ``cycles``: until the last warp's last instruction, and its stores, left the SM. ``busy``: cycles that each pipe was
    taken."""

    cycles: float = 0.0
    ends: list[list[float]] = field(default_factory=list)
    busy: dict[Pipe, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @cached_property
    def issues(self) -> list[Issue]:
        return [row.issue for row in self.rows]

    @property
    def stalls(self) -> dict[Stall, float]:
        """All warps' cycles by reason."""
        total: dict[Stall, float] = {}
        for issue in self.issues:
            for stall, cycles in issue.stalls.items():
                total[stall] = total.get(stall, 0.0) + cycles
        return total
