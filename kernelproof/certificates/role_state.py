"""Holds how far the threads of a role have come in a proof. Also names the roles.

In a pipelined kernel the threads of a CTA have roles: a producer loads k-tiles of A and B to a ring of stages in shared
memory, and consumers multiply them. An item is a piece of work of the CTA, such as one tile of D. A role does one item
after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kernelproof.certificates.cluster_sums import SumTrack
from kernelproof.certificates.machine import State
from kernelproof.certificates.pipelines import Stores
from kernelproof.certificates.polynomials import ZERO, Lanes, Polynomial
from kernelproof.certificates.tensor_memory import TensorTrack

SETUP, NONE, PRODUCER, CONSUMER = "before its CTA's barrier", "without a role", "producer", "consumer"
MULTIPLIER, ENDING = "multiplier", "after its items"  # only where accumulators are in tensor memory


class Split(Exception):
    """Threads of a role take two ways at a branch that do not meet again. ``registers``: their registers at the branch,
    by the names of variables. ``sides``: for each way its first block, and a mask of the threads that take it."""

    def __init__(self, registers: dict[str, Any], sides: list[tuple[int, Lanes]]) -> None:
        super().__init__("threads of a role go different ways")
        self.registers, self.sides = registers, sides


@dataclass
class Track:
    """How far a role has come. Before the CTA's barrier, all threads have the role SETUP.

    - ``position``: the number of its next transaction (to fill or to read one stage), modulo two rounds of the ring.
    - ``item``: the number of its item, modulo ``RoleMachine.item_round``. ``step``: how many k-tiles of this item the
      role has filled or waited for.
    - ``stores``: the shared memory from which its warps store to D.
    - ``granted``: the role knows that the kernel that was launched before this one has ended.
    - ``fenced``: no mbarrier was initialised after the last fence. ``announced``: the CTA has arrived at its cluster's
      barrier, and none was initialised since. ``gathered``: it has also waited there, and none was initialised since.

    A producer also has these:

    - ``filling``: the stage that it fills; None if it has not yet waited for the next one.
    - ``boxes``: what it has loaded for this stage: for each box the rank of a CTA that gets it, and the elements of
      that CTA's shared memory to which it goes.
    - ``expected``: the bytes that the stage's mbarrier expects; None if this was not said yet. ``landed``: the bytes of
      the boxes.
    - ``drained``: how many stages it has waited for after its last item.

    A consumer also has these:

    - ``held``: the stages that it may read, the oldest first, each with its k-tile's number in the item.
    - ``arrived``: pairs (warp, rank): the warp has handed back the oldest of these stages to the CTA of that rank.
    - ``unmet``: its lanes have waited or read and were not synchronised since.
    - ``ordered``: where two groups take turns, it is this group's turn. ``handed``: the warps that have handed the turn
      on to the other group. With tensor memory: the warps that have handed back the accumulators of the item.
    - ``reading``: for each commit group of wgmma that was not waited for, the stages that it reads; the oldest group
      comes first. ``opened``: the stages that are read by products since the last commit.
    - ``sums``: what it has done after its products, if the CTAs of a cluster add partial sums.

    ``tensor``: how far the role has come with accumulators in tensor memory. ``published``: all threads have passed a
    barrier of the CTA since these accumulators were allocated.
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
        """Whether the role is between two transactions: it neither fills, reads nor drains a stage."""
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
        each is read by its own commit group of wgmma."""
        held = {(position - i) % stages: step - i for i in range(count, 0, -1)}
        reading = tuple(frozenset((stage,)) for stage in held)
        return replace(
            self, position=position, step=step, held=held, reading=reading, opened=frozenset(), filling=None,
            arrived=frozenset(),
        )  # fmt: skip

    def alike(self, other: Track) -> bool:
        """Whether the role has come as far in this track as in the other one.

        ``unmet`` may be true of the other track alone, which then claims less.
        """
        held, other_held = self.held or {}, other.held or {}
        return (
            (self.position, self.filling, self.arrived, self.reading, self.opened, self.ordered, self.handed)
            == (other.position, other.filling, other.arrived, other.reading, other.opened, other.ordered, other.handed)
            and (self.granted, self.sums) == (other.granted, other.sums)
            and self.tensor.alike(other.tensor)
            and self.unmet <= other.unmet
            and self.step.equals(other.step)
            and list(held) == list(other_held)
            and all(held[stage].equals(other_held[stage]) for stage in held)
        )


class RoleState(State):
    """The state of a ``RoleMachine``: that of a machine, and how far its role has come."""

    track: Track

    @classmethod
    def of(cls, state: State, track: Track) -> RoleState:
        out = cls(state.block, state.registers, state.shared, state.slab, state.written)
        out.track = track
        return out

    def copied(self) -> RoleState:
        return RoleState.of(super().copied(), self.track.copied())
