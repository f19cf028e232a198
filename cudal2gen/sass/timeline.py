"""Results of a simulation: issues, and stalls by Nsight Compute's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from cudal2gen.sass.decoding import Instruction
from cudal2gen.sass.operations import Stall
from cudal2gen.sass.pipes import Pipe


@dataclass(frozen=True)
class Issue:
    """One warp's instruction, the cycle it issued in, and the cycles since the warp's issue before, by reason."""

    warp: int
    instruction: Instruction
    cycle: float
    stalls: Mapping[Stall, float]


@dataclass
class Timeline:
    """Results of a simulation. ``ends``: per warp, the cycles in which the repetitions of its parts had issued.
    ``cycles``: until the last warp's last instruction, and its stores, left the SM. ``busy``: cycles that each pipe was
    taken."""

    cycles: float = 0.0
    ends: list[list[float]] = field(default_factory=list)
    busy: dict[Pipe, float] = field(default_factory=dict)
    rows: list[tuple[int, Instruction, float, float, float, float, Stall, float, Stall]] = field(default_factory=list)

    @cached_property
    def issues(self) -> list[Issue]:
        return [_issue(*row) for row in self.rows]

    @property
    def stalls(self) -> dict[Stall, float]:
        """All warps' cycles by reason."""
        total: dict[Stall, float] = {}
        for issue in self.issues:
            for stall, cycles in issue.stalls.items():
                total[stall] = total.get(stall, 0.0) + cycles
        return total


def _issue(
    warp: int,
    instruction: Instruction,
    cycle: float,
    before: float,
    fixed: float,
    ready: float,
    reason: Stall,
    accepted: float,
    pipe: Stall,
) -> Issue:
    """Splits the cycles since the issue ``before``: the stall count until ``fixed``, a dependency until ``ready``, the
    pipe until ``accepted``, other warps until ``cycle``."""
    spans = (
        (Stall.WAIT, fixed - before - 1),
        (reason, ready - fixed),
        (pipe, accepted - ready),
        (Stall.NOT_SELECTED, cycle - accepted),
    )
    stalls = {Stall.SELECTED: 1.0}
    for stall, cycles in spans:
        if cycles > 0:
            stalls[stall] = stalls.get(stall, 0.0) + cycles
    return Issue(warp, instruction, cycle, stalls)
