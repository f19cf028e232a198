"""How far the threads of a role are, and which roles there are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kernelproof.certificates.machine import State
from kernelproof.certificates.pipelines import Stores
from kernelproof.certificates.polynomials import ZERO, Lanes, Polynomial

SETUP, NONE, PRODUCER, CONSUMER = "before its CTA's barrier", "without a role", "producer", "consumer"


class Split(Exception):
    """Threads of a role go different ways for good. ``sides``: for each the block, and which of the threads."""

    def __init__(self, registers: dict[str, Any], sides: list[tuple[int, Lanes]]) -> None:
        super().__init__("threads of a role go different ways")
        self.registers, self.sides = registers, sides


@dataclass
class Track:
    """How far a role is. ``position``: of its next transaction, modulo two rounds of the ring. ``item``: of its item,
    modulo two turns of all groups; ``step``: the k-tiles of the item that it has passed.

    Of a producer, ``filling``: the stage that it has waited for; ``expected``, ``landed``: bytes. Of a consumer,
    ``held``: stages that it may read, and their k-tiles in the item; ``arrived``: warps that have handed back the first
    of them; ``unmet``: since lanes have last met they have waited or read; ``ordered``: it has its turn; ``handed``:
    warps that have handed it on. ``granted``: the kernel before it has ended. ``fenced``: no mbarrier was initialised
    since the last fence for that.
    """

    stores: Stores
    position: int = 0
    item: int = 0
    step: Polynomial = ZERO
    filling: int | None = None
    expected: int | None = None
    landed: int = 0
    held: dict[int, Polynomial] | None = None
    arrived: frozenset[int] = frozenset()
    unmet: bool = False
    ordered: bool = False
    handed: frozenset[int] = frozenset()
    granted: bool = False
    fenced: bool = True

    def copied(self) -> Track:
        return replace(self, stores=self.stores.copied(), held=dict(self.held or {}))

    @property
    def idle(self) -> bool:
        """Is it between two transactions?"""
        return self.filling is None and not self.held and not self.arrived


class RoleState(State):
    """A state with a track."""

    track: Track

    @classmethod
    def of(cls, state: State, track: Track) -> RoleState:
        out = cls(state.block, state.registers, state.shared, state.left, state.written)
        out.track = track
        return out

    def copied(self) -> RoleState:
        return RoleState.of(super().copied(), self.track.copied())
