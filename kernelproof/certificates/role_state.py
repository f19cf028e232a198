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

    Of a producer, ``filling``: the stage that it has waited for; ``expected``, ``landed``: bytes; ``boxes``: the rank
    and the places of each box of a k-tile; ``drained``: stages that it has waited for behind its last item. Of a
    consumer, ``held``: stages that it may read, and their k-tiles in the item; ``arrived``: warps that have handed back
    the first of them, and the ranks to which; ``unmet``: since lanes have last met they have waited or read;
    ``ordered``: it has its turn; ``handed``: warps that have handed it on. ``reading``: the stages that each group of
    wgmma reads which was not waited for, the oldest first; ``opened``: those that products in no group yet read.

    ``granted``: the kernel before it has ended. ``fenced``: no mbarrier was initialised since the last fence for that,
    and ``announced``: since the CTA has arrived at its cluster's barrier.
    """

    stores: Stores
    position: int = 0
    item: int = 0
    step: Polynomial = ZERO
    filling: int | None = None
    expected: int | None = None
    landed: int = 0
    held: dict[int, Polynomial] | None = None
    boxes: tuple[tuple[int, Lanes], ...] = ()
    drained: int = 0
    arrived: frozenset[tuple[int, int]] = frozenset()
    unmet: bool = False
    ordered: bool = False
    handed: frozenset[int] = frozenset()
    reading: tuple[frozenset[int], ...] = ()
    opened: frozenset[int] = frozenset()
    granted: bool = False
    fenced: bool = True
    announced: bool = False

    def copied(self) -> Track:
        return replace(self, stores=self.stores.copied(), held=dict(self.held or {}))

    @property
    def idle(self) -> bool:
        """Is it between two transactions?"""
        return (
            self.filling is None and not self.drained and not (self.held or self.arrived or self.reading or self.opened)
        )

    def substituted(self, name: str, value: Polynomial) -> Track:
        """The track for the problems in which a name has a value."""
        held = {stage: step.substituted(name, value) for stage, step in (self.held or {}).items()}
        return replace(self, step=self.step.substituted(name, value), held=held)

    def at(self, position: int, step: Polynomial, stages: int, behind: int) -> Track:
        """A consumer's track at the head of its loop over k-tiles: the stages of so many k-tiles before are held, and
        each is read by a group of wgmma of its own."""
        held = {(position - i) % stages: step - i for i in range(behind, 0, -1)}
        reading = tuple(frozenset((stage,)) for stage in held)
        return replace(
            self, position=position, step=step, held=held, reading=reading, opened=frozenset(), filling=None,
            arrived=frozenset(),
        )  # fmt: skip

    def alike(self, other: Track) -> bool:
        """Is it as far in its item as another one, in the same place? The other may have met less."""
        mine, its = self.held or {}, other.held or {}
        return (
            (self.position, self.filling, self.arrived, self.reading, self.opened, self.ordered, self.handed)
            == (other.position, other.filling, other.arrived, other.reading, other.opened, other.ordered, other.handed)
            and self.granted == other.granted
            and self.unmet <= other.unmet
            and self.step.equals(other.step)
            and list(mine) == list(its)
            and all(mine[stage].equals(its[stage]) for stage in mine)
        )


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
