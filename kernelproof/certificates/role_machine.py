"""Executes one role of a pipeline: some threads of a CTA, which only mbarriers order with its other threads.

A ``RoleMachine`` is a ``Machine`` of these threads alone. It checks that they do what ``pipelines`` says of their role.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kernelproof.certificates.cells import Kinds
from kernelproof.certificates.cluster_addresses import ClusterAddresses
from kernelproof.certificates.contract import Contract
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.machine import State
from kernelproof.certificates.pipelines import MBARRIER_BYTES, Protocol, Stores
from kernelproof.certificates.polynomials import ZERO, Lanes, Polynomial
from kernelproof.certificates.program import Program
from kernelproof.certificates.role_state import CONSUMER, NONE, PRODUCER, SETUP, RoleState, Split, Track
from kernelproof.certificates.waits import MOST_BYTES, WaitingMachine
from kernelproof.emulator.frontend.flow.loops import reachable
from kernelproof.emulator.hopper.register_pool import entry_registers
from kernelproof.emulator.host.launch_limits import device_for
from kernelproof.emulator.memory.shared import WINDOW_START
from kernelproof.emulator.state.arrays import Mask
from kernelproof.emulator.state.scopes import ORDERS
from kernelproof.ground.chips import WARP


class RoleMachine(WaitingMachine, ClusterAddresses):
    """A machine for the threads of one role. Methods raise NotCertified where the role breaks the protocol.

    ``threads``: their numbers in the CTA. ``group``: the number of a group of consumers. ``tiles``: how many k-tiles an
    item has. ``notes_loads``: whether the protocol notes what the producer loads, as the contents of k-tile TURN.
    ``skipped``: if another group takes the item, the number of its transactions modulo two rounds of the ring.
    """

    def __init__(
        self, program: Program, contract: Contract, kinds: Kinds, protocol: Protocol, threads: Lanes, role: str,
        group: int = 0, tiles: Polynomial = ZERO, notes_loads: bool = False,
    ) -> None:  # fmt: skip
        self.threads, self.protocol, self.role, self.group = threads, protocol, role, group
        self.pipeline = protocol.pipeline
        self.rank, self.ranks = self.pipeline.rank, self.pipeline.ranks
        tile = contract.tile if role == CONSUMER else None
        super().__init__(program, replace(contract, lanes=len(threads), tile=tile), kinds)
        self.tiles, self.notes_loads = tiles, notes_loads
        self.skipped: int | None = None
        self.warps = frozenset((threads // WARP).tolist())
        self.track = Track(Stores.none(self.memory.elements))

    def units(self) -> dict[str, dict[str, Callable[..., Any]]]:
        """The units of every role. None accesses global memory, since that is done by boxes alone."""
        return {
            "G": {"grid_wait": self.grid_wait},
            "Q": {},
            "Z": {},
            "I": {"lanes": self.lanes_of, "constant": self.constant},
            "W": {"shfl": self.shuffle, "elect": self.elect},
            "J": {"sync": self.sync, "sync_warp": self.sync_warp},
            "Y": {"converge": self.converge},
            "B": {
                "init": self.initialise, "fence_init": self.fence_init, "try_wait": self.try_wait,
                "waited": self.waits, "arrive": self.arrive,
            },
            "O": {"change": self.change_registers},
        }  # fmt: skip

    # --- running

    def start(self) -> RoleState:
        return RoleState.of(super().start(), self.track.copied())

    def enter(self, state: State) -> None:
        super().enter(state)
        assert isinstance(state, RoleState)
        self.track = state.track

    def _sides(self, block: int, taken: Lanes, registers: dict[str, Any]) -> int:
        """Run both sides of a branch to the block at which they meet. Raises Split if there is none, or if a side has a
        loop: then the sides are different roles."""
        node, join = self.program.blocks[block], self.program.joins[block]
        side_blocks = reachable(self.program.blocks, node.targets, join)
        loops = [body for body in self.program.loops.values() if block not in body]
        if join is None or any(at in body for at in side_blocks for body in loops):
            if self.scope["m"] is not None:
                raise NotCertified("threads of a warp go different ways twice")
            raise Split(registers, [(node.targets[0], taken), (node.targets[1], ~taken)])
        return super()._sides(block, taken, registers)

    def end_item(self) -> None:
        """Check what the role has done for an item, and go on to the next one."""
        track, groups = self.track, len(self.pipeline.groups)
        if not track.idle or track.stores.open:
            raise NotCertified("an item ends while a stage is filled or read")
        if self.skipped is not None:
            if track.step.terms or track.ordered or self.written or self.slices.contents.stage:
                raise NotCertified("a part of another group's item is computed")
            track.position = (track.position + self.skipped) % self.pipeline.round
        else:
            if not track.step.equals(self.tiles):
                raise NotCertified(f"an item ends after {track.step} k-tiles of {self.tiles}")
            if self.role == CONSUMER:
                self.finish_item()
                if groups > 1 and not (track.ordered and track.handed == self.warps):
                    raise NotCertified("a group has no turn at an item, or does not hand it on by each of its warps")
            elif self.written:
                raise NotCertified("the producer writes to D")
        self.written.clear()
        track.item = (track.item + 1) % self.item_round
        track.step, track.ordered, track.handed = ZERO, False, frozenset()

    @property
    def item_round(self) -> int:
        """The items after which a role is the same again. Turns alternate between two groups, and the parities of a
        group's turns between two of its items."""
        groups = len(self.pipeline.groups)
        return 2 * groups if self.role == CONSUMER and groups > 1 else 1

    def finish_item(self) -> None:
        """Check what a group has stored of its item."""
        super().finish()

    def finish(self) -> None:
        """Check the role's state when its threads end."""
        drained, self.track.drained = self.track.drained, 0
        if self.role in (PRODUCER, CONSUMER):
            self.end_item()
        if drained != (self.pipeline.stages if self.role == PRODUCER and self.pipeline.drains else 0):
            raise NotCertified("a CTA may end before others of its cluster have handed back its last stages")
        if not self.track.idle or self.track.step.terms:
            raise NotCertified("a thread ends in the middle of an item")
        self.finish_stores()

    def finish_stores(self) -> None:
        """Check that the threads have waited for their stores when they end."""
        self.track.stores.finish()

    # --- which threads

    def lanes_of(self, name: str) -> Any:
        numbers = {"%laneid": self.threads % WARP, "%tid.x": self.threads}
        if name in ("%tid.y", "%tid.z"):
            return np.zeros(self.lanes, "u4")
        return numbers[name].astype("u4") if name in numbers else super().lanes_of(name)

    def _whole_warps(self, m: Mask) -> Lanes:
        """The lanes that execute an instruction. Raises NotCertified unless they are all lanes of their warps."""
        lanes = self.active(m)
        threads = self.threads[lanes] if lanes is not None else np.zeros(0, np.int64)
        counts = np.bincount(threads // WARP)
        if lanes is None or (counts[counts > 0] != WARP).any():
            raise NotCertified("some lanes of a warp execute it, and others not")
        return lanes

    def _check_members(self, members: Any) -> None:
        """Check that an instruction's mask names all lanes of a warp."""
        if (self._number(members) != 0xFFFFFFFF).any():
            raise NotCertified("an instruction of a part of a warp is not covered")

    def converge(self, members: Any, m: Mask, *_: int) -> None:
        """Check that whole warps reach an instruction together."""
        self._whole_warps(m)
        if members is not None:
            self._check_members(members)

    def shuffle(self, mode: str, value: Any, lane: Any, clamp: Any, members: Any, m: Mask, site: int) -> Any:
        self._whole_warps(m)
        return super().shuffle(mode, value, lane, clamp, members, m, site)

    def elect(self, members: Any, m: Mask, _site: int) -> Any:
        """elect.sync, which elects lane 0 of each warp."""
        lanes = self._whole_warps(m)
        self._check_members(members)
        elected = np.zeros(self.lanes, bool)
        elected[lanes] = self.threads[lanes] % WARP == 0
        return np.zeros(self.lanes, "u4"), elected

    def sync_warp(self, members: Any, m: Mask, *_: int) -> None:
        """bar.warp.sync, by all lanes of the role's warps."""
        self._together(m)
        self._whole_warps(m)
        self._check_members(members)
        self.track.unmet = False
        self.track.stores.meet()

    def sync(self, number: Any, count: Any, m: Mask, *_: int) -> None:
        """bar.sync of the whole CTA, before its threads have roles."""
        if self.role != SETUP:
            raise NotCertified("a barrier of the CTA where its threads have roles")
        super().sync(number, count, m)
        if not self.track.fenced:
            raise NotCertified("mbarriers are used without a fence after their initialisation")

    def grid_wait(self, m: Mask) -> None:
        """griddepcontrol.wait: the kernel that was launched before this one has ended."""
        self._together(m)
        self.track.granted = True

    def change_registers(self, count: int, more: bool, m: Mask, _site: int) -> None:
        """setmaxnreg, once by each warpgroup, before its items."""
        self._together(m)
        groups, counts = np.unique(self.threads // (4 * WARP), return_counts=True)
        if self.role != NONE or (counts != 4 * WARP).any():
            raise NotCertified("setmaxnreg by a part of a warpgroup, or while it has a role")
        before = self.registers_at_entry()
        # The PTX ISA allows multiples of 8 from 24 to 256.
        if not 24 <= count <= 256 or count % 8 or (count < before if more else count > before):
            raise NotCertified(f"setmaxnreg from {before} to {count} registers")
        for group in groups.tolist():
            if self.protocol.registers.setdefault(group, count) != count:
                raise NotCertified("setmaxnreg twice in a warpgroup")

    def registers_at_entry(self) -> int:
        """How many registers a thread has before setmaxnreg."""
        texts = (ins.text for piece in self.program.pieces for ins in piece.sources)
        device = device_for(self.program.target)
        threads = self.pipeline.entry.lanes
        return entry_registers(self.program.function.attributes, threads, device.registers_per_sm, texts)

    # --- mbarriers

    def initialise(self, address: Any, count: Any, m: Mask, site: int) -> None:
        """mbarrier.init, by one thread before the barrier of the CTA or its cluster."""
        lanes = self.active(m)
        if self.role != SETUP or lanes is None or len(lanes) != 1:
            raise NotCertified("an mbarrier that is not initialised by one thread before the CTA's barrier")
        place = int(self.shared_places(address, MBARRIER_BYTES, lanes, site)[0, 0])
        self.protocol.initialise(self._one(address, lanes), place, self._one(count, lanes))
        self.track.fenced = self.track.announced = self.track.gathered = False

    def fence_init(self, m: Mask) -> None:
        """A fence after the initialisation of mbarriers, by all threads."""
        self._together(m)
        self.track.fenced = True

    def try_wait(self, address: Any, phase: Any, is_parity: bool, order: int, m: Mask, *_: int) -> None:
        """mbarrier.try_wait, by all threads of the role. Checks that its mbarrier and parity are those of the next
        transaction, or of the group's turn."""
        self._together(m)
        if not is_parity or not order & ORDERS:
            raise NotCertified("a wait for a state, or one that does not acquire, is not covered")
        at, parity = self._one(address), self._one(phase)
        self.polled = True
        expected = self.parity_due(at)
        self.track.unmet = self.role == CONSUMER
        if parity != expected:
            raise NotCertified(f"a wait for parity {parity} of an mbarrier, not {expected}")

    def parity_due(self, at: int) -> int:
        """The parity for which the role must wait now. The wait is for the mbarrier at address ``at``. Raises
        NotCertified if that is not the mbarrier for which it must wait."""
        track, stages, groups = self.track, self.pipeline.stages, len(self.pipeline.groups)
        # ``parity`` is that of the ring's round. A consumer waits for the phase of ``full`` with the round's number, a
        # producer for the phase of ``empty`` before that.
        stage, parity = track.position % stages, track.position // stages
        if self.role == PRODUCER and self.pipeline.drains and track.step.equals(self.tiles):
            return self._drain(at)
        if self.role == PRODUCER:
            self.protocol.mbarrier(self.protocol.empty, stage, at, "the stage")
            if track.filling is not None:
                raise NotCertified(f"{track.expected} bytes are expected, and {track.landed} copied")
            track.filling = stage
            return parity ^ 1
        if self.role != CONSUMER:
            raise NotCertified("a wait by threads without a role")
        if track.item % groups != self.group:
            raise NotCertified("a group takes an item out of turn")
        if at == self.protocol.full.get(stage) and (groups == 1 or track.ordered):
            self.hold(stage)
            return parity
        if groups > 1 and not track.ordered and not track.step.terms:
            self.protocol.mbarrier(self.protocol.turns, self.group, at, "the group's turn")
            # Group 0 has the first turn without an arrival, so its phases are one less than those of group 1.
            track.ordered = True
            return (track.item // groups + self.group + 1) & 1
        return self.wait_elsewhere(at)

    def hold(self, stage: int) -> None:
        """Note that a stage was waited for, to read it."""
        track = self.track
        assert track.held is not None
        if stage in track.held:
            raise NotCertified("a stage is waited for that was not handed back")
        track.held[stage] = track.step
        track.position, track.step = (track.position + 1) % self.pipeline.round, track.step + 1

    def wait_elsewhere(self, at: int) -> int:
        """The parity of a consumer's wait for another mbarrier than that of a stage or a turn. Only ``SumSender``
        allows such waits."""
        raise NotCertified(f"a wait for the mbarrier at byte {at - WINDOW_START}, not for that of the next stage")

    def _drain(self, at: int) -> int:
        """The parity of the producer's wait, after its last item, for a stage that all CTAs of the cluster hand
        back."""
        track, stages = self.track, self.pipeline.stages
        position = (track.position + track.drained) % self.pipeline.round
        self.protocol.mbarrier(self.protocol.empty, position % stages, at, "the stage")
        track.drained += 1
        return position // stages ^ 1

    def arrive(
        self, address: Any, count: int, expected: Any, m: Mask, _site: int, order: int, drops: bool
    ) -> None:  # fmt: skip
        """mbarrier.arrive, by the producer with the bytes to expect, or by one lane of a consumer's warp."""
        lanes = self.active(m)
        if lanes is None:
            return
        if drops or np.any(np.asarray(count) != 1) or not order & ORDERS:
            raise NotCertified("an arrival that is not one, or that does not release, is not covered")
        ranks, places = self.cluster_places(address, lanes)
        at = int(places[0])
        if (places != at).any():
            raise NotCertified("lanes arrive at different mbarriers at once")
        if self.role == PRODUCER and expected is not None and (ranks == self.pipeline.rank).all():
            self._expect(at, self._one(expected, lanes))
        elif self.role == CONSUMER and expected is None:
            arrivals = list(zip((self.threads[lanes] // WARP).tolist(), ranks.tolist(), strict=True))
            if len(set(arrivals)) < len(arrivals):
                raise NotCertified("several lanes of a warp arrive at an mbarrier")
            self.hand_back(at, frozenset(arrivals))
        else:
            raise NotCertified("an arrival that the role does not have")

    def _expect(self, at: int, count: int) -> None:
        """The producer says at the mbarrier of the stage that it fills how many bytes will land."""
        track = self.track
        if track.filling is None or track.expected is not None or not self.pipeline.leads:
            raise NotCertified("bytes are expected for a stage that was not waited for, or twice")
        if not 0 < count <= MOST_BYTES:
            raise NotCertified(f"{count} bytes are expected")
        self.protocol.mbarrier(self.protocol.full, track.filling, at, "the stage")
        track.expected, track.landed = count, 0

    def hand_back(self, at: int, arrivals: frozenset[tuple[int, int]]) -> None:
        """Warps arrive at the mbarriers that lie at ``at`` in their CTAs. ``arrivals``: each warp, and the rank of the
        CTA at which it arrives."""
        track, groups, returns = self.track, len(self.pipeline.groups), self.pipeline.returns
        assert track.held is not None
        if track.unmet:
            raise NotCertified("a warp arrives at an mbarrier before its lanes have met after their reads")
        warps = frozenset(warp for warp, _ in arrivals)
        if at in self.protocol.empty.values():
            stage = next(iter(track.held), None)
            if stage is None or at != self.protocol.empty.get(stage) or arrivals & track.arrived:
                raise NotCertified("a stage is handed back that is not the warp's oldest one, or twice")
            if any(rank not in returns for _, rank in arrivals):
                raise NotCertified("a stage is handed back to a CTA that has loaded no part of it")
            if any(stage in stages for stages in (*track.reading, track.opened)):
                raise NotCertified("a stage is handed back while a wgmma may read it")
            track.arrived |= arrivals
            if len(track.arrived) == len(self.warps) * len(returns):
                del track.held[stage]
                track.arrived = frozenset()
        elif groups > 1 and track.ordered and track.step.equals(self.tiles) and not warps & track.handed:
            if any(rank != self.pipeline.rank for _, rank in arrivals):
                raise NotCertified("a turn is handed on to another CTA")
            self.protocol.mbarrier(self.protocol.turns, 1 - self.group, at, "the other group's turn")
            track.handed |= warps
        else:
            self.arrive_elsewhere(at, arrivals)

    def arrive_elsewhere(self, at: int, arrivals: frozenset[tuple[int, int]]) -> None:
        """Warps arrive at another mbarrier than that of a stage or a turn. Only ``SumSender`` allows that."""
        ranks = sorted({rank for _, rank in arrivals})
        raise NotCertified(f"an arrival at byte {at - WINDOW_START} of CTAs {ranks} of the cluster is not due")
