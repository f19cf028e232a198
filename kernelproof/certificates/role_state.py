"""Holds how far a role's threads are in a proof: in the ring of stages and in their item. Also names the roles."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kernelproof.certificates.cluster_sums import SumTrack
from kernelproof.certificates.machine import State
from kernelproof.certificates.pipelines import Stores
from kernelproof.certificates.polynomials import ZERO, Lanes, Polynomial
from kernelproof.certificates.tensor_memory import TensorTrack

SETUP, NONE, PRODUCER, CONSUMER = "before its CTA's barrier", "without a role", "producer", "consumer"
MULTIPLIER, ENDING = "multiplier", "behind its items"  # only where accumulators are in tensor memory


class Split(Exception):
    """Threads of a role take different ways that do not meet again. ``sides``: for each way its first block, and which
    of the threads take it."""

    def __init__(self, registers: dict[str, Any], sides: list[tuple[int, Lanes]]) -> None:
        super().__init__("threads of a role go different ways")
        self.registers, self.sides = registers, sides


@dataclass
class Track:
    """How far a role is.

    - ``position``: the number of its next transaction, modulo two rounds of the ring.
    - ``item``: the number of its item, modulo two turns of all groups. ``step``: the k-tiles of it that have passed.
    - ``granted``: the kernel that was launched before has ended.
    - ``fenced``: no mbarrier was initialised since the last fence for that. ``announced``: none was initialised since
      the CTA has arrived at its cluster's barrier, and ``gathered``: since it has waited there.

    A producer also has these:

    - ``filling``: the stage that it has waited for. ``boxes``: the rank and the places of each box that it has loaded.
    - ``expected``, ``landed``: the bytes that the stage expects, and those of the boxes.
    - ``drained``: how many stages it has waited for after its last item.

    A consumer also has these:

    - ``held``: the stages that it may read, each with its k-tile's number in the item.
    - ``arrived``: the warps that have handed back the first of these stages, each with the rank of the CTA that gets
      it.
    - ``unmet``: lanes have waited or read since they last met.
    - ``ordered``: it has its turn. ``handed``: the warps that have handed the turn on.
    - ``reading``: the stages that each group of wgmma reads which was not waited for, the oldest group first.
      ``opened``: the stages that products read which are in no group yet.
    - ``sums``: what it has done after its products, where the CTAs of a cluster add.

    ``tensor``: how far it is with accumulators in tensor memory. ``published``: it has passed a barrier of the CTA
    since these were allocated.
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
    gathered: bool = False
    published: bool = False
    sums: SumTrack = field(default_factory=SumTrack)
    tensor: TensorTrack = field(default_factory=TensorTrack)

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
        tensor = self.tensor.substituted(name, value)
        return replace(self, step=self.step.substituted(name, value), held=held, tensor=tensor)

    def at(self, position: int, step: Polynomial, stages: int, count: int) -> Track:
        """The track at the head of the loop over k-tiles. The stages of the last ``count`` k-tiles are still held, and
        each is read by its own group of wgmma."""
        held = {(position - i) % stages: step - i for i in range(count, 0, -1)}
        reading = tuple(frozenset((stage,)) for stage in held)
        return replace(
            self, position=position, step=step, held=held, reading=reading, opened=frozenset(), filling=None,
            arrived=frozenset(),
        )  # fmt: skip

    def alike(self, other: Track) -> bool:
        """Whether this role is as far as the other one. ``unmet`` may be true of the other alone, which claims less."""
        mine, its = self.held or {}, other.held or {}
        return (
            (self.position, self.filling, self.arrived, self.reading, self.opened, self.ordered, self.handed)
            == (other.position, other.filling, other.arrived, other.reading, other.opened, other.ordered, other.handed)
            and (self.granted, self.sums) == (other.granted, other.sums)
            and self.tensor.alike(other.tensor)
            and self.unmet <= other.unmet
            and self.step.equals(other.step)
            and list(mine) == list(its)
            and all(mine[stage].equals(its[stage]) for stage in mine)
        )


class RoleState(State):
    """The state of a ``RoleMachine``: that of a machine, and how far its role is."""

    track: Track

    @classmethod
    def of(cls, state: State, track: Track) -> RoleState:
        out = cls(state.block, state.registers, state.shared, state.slab, state.written)
        out.track = track
        return out

    def copied(self) -> RoleState:
        return RoleState.of(super().copied(), self.track.copied())
