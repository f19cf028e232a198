"""Executes a role of a CTA whose accumulators are in tensor memory, and checks what ``tensor_memory`` says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kernelproof.certificates.cells import Cells, Unknown
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.pipelines import Pipeline
from kernelproof.certificates.polynomials import Lanes, Polynomial
from kernelproof.certificates.role_state import CONSUMER, ENDING, MULTIPLIER, SETUP
from kernelproof.certificates.tensor_memory import BASE, Reading, TensorTrack
from kernelproof.certificates.tensor_products import TensorProducts
from kernelproof.certificates.warpgroup_machine import WarpgroupMachine
from kernelproof.certificates.words import Word
from kernelproof.emulator.blackwell.accesses import TensorAccess
from kernelproof.emulator.blackwell.tensor_memory import COLUMNS
from kernelproof.emulator.memory.shared import WINDOW_START
from kernelproof.emulator.state.arrays import Mask
from kernelproof.ground.chips import WARP

COLUMNS_OWNER = -2  # owns the word of shared memory that has the address of tensor memory; no other owner is negative
WORD = 4  # bytes


class Loading(Unknown):
    """A register that a tcgen05.ld writes; without the checks of ``TensorMachine.loaded``, nothing is known of it.
    ``load``: the number of that load in its machine."""

    def __init__(self, cells: Cells, load: int) -> None:
        self.cells, self.load = cells, load


class TensorMachine(TensorProducts):
    """The machine of a role of a CTA with tensor memory. Methods raise NotCertified for an instruction that comes too
    early, too late, or from other threads than it must.

    ``loads``, ``awaited``: how many tcgen05.ld were issued, and waited for. After the last item, ``joined`` says
    whether the lanes of each warp have met, and ``met`` lists the barriers that have been passed.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.loads = self.awaited = 0
        self.met: tuple[str, ...] = ()
        self.joined = False

    def units(self) -> dict[str, dict[str, Callable[..., Any]]]:
        """The units of every role, and those of tensor memory."""
        units = super().units()
        memory: dict[str, Callable[..., Any]] = {
            "load": self.load_sums, "wait_load": self.wait_for_loads, "fence_before": self.fence_before,
            "fence_after": self.fence_after,
        }  # fmt: skip
        registers: dict[str, Callable[..., Any]] = {
            "read": self.loaded, "overwrite": self.check_loaded, "plain": self.loaded,
        }  # fmt: skip
        allocation: dict[str, Callable[..., Any]] = {
            "alloc": self.allocate, "relinquish": self.relinquish, "dealloc": self.free,
        }  # fmt: skip
        return units | {
            "TA": allocation, "TM": memory, "TP": {"mma": self.add_products, "commit": self.commit_to},
            "X": registers, "S": units["S"] | {"load": self.load_address},
        }  # fmt: skip

    # --- the allocation

    def allocate(self, cta_group: int, address: Any, columns: Any, m: Mask, _resume: int, site: int) -> None:
        """tcgen05.alloc, by one warp before the CTA's barrier."""
        lanes = self._one_warp(m)
        if self.role != SETUP or cta_group != self.plan.cta_group:
            raise NotCertified("tensor memory is allocated after the CTA's barrier, or for another cta_group")
        word = self.shared_places(address, WORD, lanes[:1], site)[0]
        self.protocol.claim(word, COLUMNS_OWNER, fresh=True)
        self.protocol.tensor.allocate(self._one(columns, lanes), int(self.threads[lanes[0]]) // WARP, word)
        self.track.published = False

    def relinquish(self, cta_group: int, m: Mask, _site: int) -> None:
        """tcgen05.relinquish_alloc_permit, after the allocation."""
        self._one_warp(m)
        if self.role != SETUP or cta_group != self.plan.cta_group or not self.protocol.tensor.count:
            raise NotCertified("the permit to allocate is given back before the allocation, or by another cta_group")

    def _one_warp(self, m: Mask) -> Lanes:
        """The lanes of the warp that executes this. Raises NotCertified if several do."""
        lanes = self._whole_warps(m)
        if len(lanes) != WARP:
            raise NotCertified("several warps allocate or free tensor memory")
        return lanes

    def load_address(self, address: Any, size: int, m: Mask, site: int, *_: int) -> Word:
        """ld.shared of the address of tensor memory, after a barrier of the CTA."""
        lanes = self.active(m)
        if lanes is None:
            raise NotCertified("no lane of a CTA executes a load from shared memory")
        places = self.shared_places(address, size, lanes, site)
        if size != WORD or (places != self.protocol.tensor.word).any() or not self.track.published:
            raise NotCertified("a load from shared memory that is not of the published address of tensor memory")
        self.facts.bounds.setdefault((BASE,), (0, COLUMNS))
        return Word(Polynomial.named(BASE), 32, self.facts)

    def free(self, cta_group: int, address: Any, columns: Any, m: Mask, _site: int) -> None:
        """tcgen05.dealloc, by the warp that has allocated, after all barriers and a tcgen05.fence."""
        tensor, lanes = self.protocol.tensor, self._one_warp(m)
        if self.role != ENDING or self.met != self.meetings or not self.track.tensor.fenced:
            raise NotCertified("tensor memory is freed before a barrier and a fence after its last use")
        mine = int(self.threads[lanes[0]]) // WARP == tensor.warp and cta_group == self.plan.cta_group
        if not mine or self._one(columns, lanes) != tensor.count or self._addresses(address).any() or tensor.freed:
            raise NotCertified("other columns than those that the warp has allocated are freed, or twice")
        tensor.freed = True

    # --- waits and barriers

    def parity_due(self, at: int) -> int:
        if self.role == MULTIPLIER:
            return self._parity_for_multiplier(at)
        if self.role == CONSUMER:
            return self._parity_for_group(at)
        return super().parity_due(at)

    def _parity_for_multiplier(self, at: int) -> int:
        """The multiplier waits for the item's accumulators, then for its k-tiles, and in the end, in a pair, for all
        accumulators."""
        track, plan, protocol = self.track, self.plan, self.protocol
        tensor = track.tensor = replace(track.tensor, fenced=False)
        item = track.item
        if tensor.passed:
            track.tensor = replace(tensor, drained=tensor.drained + 1)
            item = (track.item + track.tensor.drained) % plan.round
        elif tensor.opened:
            stage = track.position % self.pipeline.stages
            if at != protocol.full.get(stage):
                raise NotCertified(f"a wait for byte {at - WINDOW_START}, not for the mbarrier of the next stage")
            expected = track.position // self.pipeline.stages
            self.hold(stage)
            return expected
        else:
            track.tensor = replace(tensor, opened=True)
        protocol.mbarrier(protocol.tensor.stored, item % plan.tiles, at, "the accumulators that are stored")
        # The parity of phase item / N - 1, as ``tensor_memory`` says.
        return item // plan.tiles ^ 1

    def _parity_for_group(self, at: int) -> int:
        """The group waits for the sums of its item."""
        track, plan, protocol = self.track, self.plan, self.protocol
        if track.tensor.opened:
            raise NotCertified("a group waits twice for the sums of an item")
        protocol.mbarrier(protocol.tensor.summed, track.item % plan.tiles, at, "the item's sums")
        track.tensor = replace(track.tensor, opened=True, fenced=False)
        track.step = self.tiles
        return track.item // plan.tiles

    def hand_back(self, at: int, arrivals: frozenset[tuple[int, int]]) -> None:
        """mbarrier.arrive by warps of the group that have loaded the sums of an item."""
        track, protocol, place = self.track, self.protocol, self.track.item % self.plan.tiles
        warps = frozenset(warp for warp, _ in arrivals)
        if self.role != CONSUMER or track.tensor.reading != Reading.MET or warps & track.handed:
            raise NotCertified("accumulators are handed back before a warp's lanes have loaded them and met, or twice")
        if any(rank != self.pipeline.leader for _, rank in arrivals):
            raise NotCertified("accumulators are handed back to a CTA that does not multiply")
        leader = protocol.cluster[self.pipeline.leader]
        leader.mbarrier(leader.tensor.stored, place, at, "the accumulators that are stored")
        track.handed |= warps

    @property
    def item_round(self) -> int:
        return self.plan.round if self.role in (MULTIPLIER, CONSUMER) else super().item_round

    def sync_warp(self, members: Any, m: Mask, *_: int) -> None:
        """bar.warp.sync. After the last item, lanes of a warp reach it on different paths, and all meet there."""
        if self.role == ENDING:
            self._together(m)
            self._check_members(members)
            if self.met:
                raise NotCertified("the lanes of a warp meet after a barrier of the CTA")
            self.joined = True
            return
        super().sync_warp(members, m)
        if self.track.tensor.reading == Reading.FENCED:
            self.track.tensor = replace(self.track.tensor, reading=Reading.MET)

    def converge(self, members: Any, m: Mask, *_: int) -> None:
        # After bar.warp.sync the lanes of a warp are together, though they are not in one machine.
        if not (self.role == ENDING and self.joined):
            super().converge(members, m)

    def sync(self, number: Any, count: Any, m: Mask, *_: int) -> None:
        """A barrier of the CTA. After the last item, all threads meet there."""
        if self.role == ENDING:
            self._together(m)
            if self._number(number).any() or np.any(self._number(count)):
                raise NotCertified("after their items, threads meet at a barrier that is not the CTA's")
            self._passed("cta")
            return
        super().sync(number, count, m)
        if self.role == SETUP:
            self.track.published = True

    def announce(self, m: Mask, releases: bool, site: int) -> None:
        if self.role != ENDING:
            super().announce(m, releases, site)
            return
        self._together(m)
        self._passed("arrival")

    def await_cluster(self, m: Mask, *_: int) -> None:
        if self.role != ENDING:
            super().await_cluster(m)
            return
        self._together(m)
        self._passed("cluster")

    @property
    def meetings(self) -> tuple[str, ...]:
        """The barriers that all threads pass after their items, in order."""
        return ("cta", "arrival", "cluster") if self.pipeline.ranks > 1 else ("cta",)

    def _passed(self, barrier: str) -> None:
        """Notes that the threads have met at a barrier of the end. Raises NotCertified if it is not the next one that
        is due."""
        self.met = (*self.met, barrier)
        self.track.tensor = replace(self.track.tensor, fenced=False)
        if not self.joined or self.met != self.meetings[: len(self.met)]:
            raise NotCertified("after their items, threads do not pass the barriers of the CTA and of its cluster")

    def fence_before(self, m: Mask) -> None:
        """tcgen05.fence::before_thread_sync: loads that have been waited for are ordered before what follows."""
        lanes = self.active(m)
        if lanes is not None and len(lanes) == self.lanes and self.track.tensor.reading == Reading.LOADED:
            self.track.tensor = replace(self.track.tensor, reading=Reading.FENCED)

    def fence_after(self, m: Mask) -> None:
        """tcgen05.fence::after_thread_sync, by all threads of the role that use tensor memory after it."""
        if self.role == ENDING:
            self._one_warp(m)
        else:
            self._together(m)
        self.track.tensor = replace(self.track.tensor, fenced=True)

    # --- items

    def end_item(self) -> None:
        """Checks that the role is done with the accumulators of an item, and begins the next one."""
        track = self.track
        if self.role == MULTIPLIER and (not track.tensor.passed or track.tensor.drained):
            raise NotCertified("an item ends before its sums are committed, or the next one begins too late")
        if self.role == CONSUMER and self.skipped is None and track.handed != self.warps:
            raise NotCertified("an item ends before all warps have handed back its accumulators")
        super().end_item()
        track.tensor = TensorTrack()

    def finish(self) -> None:
        """Check the role's state when its threads end, or reach the block where all threads meet."""
        if self.role == ENDING:
            if self.met != self.meetings:
                raise NotCertified("threads end before they have passed the barriers of the CTA and of its cluster")
            return
        if self.role == MULTIPLIER:
            if self.track.tensor.drained != (self.plan.tiles if self.plan.paired else 0):
                raise NotCertified("a CTA may end before others have handed back its accumulators")
            self.track.tensor = replace(self.track.tensor, drained=0)
            self.end_item()
        super().finish()

    # --- loads of sums

    def load_sums(self, access: TensorAccess, address: Any, m: Mask, _site: int) -> list[Loading]:
        """tcgen05.ld by all warps of the group."""
        self._together(m)
        self._whole_warps(m)
        track, tensor = self.track, self.protocol.tensor
        place = track.item % self.plan.tiles
        if self.role != CONSUMER or not (track.tensor.opened and track.tensor.fenced) or track.handed:
            raise NotCertified("sums are loaded that were not waited for, without a fence, or that were handed back")
        lanes, columns = self._lanes_and_columns(access, address)
        sums = tensor.left.get(place)
        if sums is None:
            raise NotCertified("sums are loaded that no product has written")
        self.loads += 1
        track.tensor = replace(track.tensor, reading=Reading.LOADING)
        track.unmet = True
        steps = (0, 1) if access.packed else (0,)
        out = []
        for lane, column in zip(lanes, columns, strict=True):
            at = np.stack([column + step for step in steps], 1)
            if (tensor.owner[at] != place).any():
                raise NotCertified("accumulators of another item are loaded")
            kinds, rows, cols = (x[lane[:, None], at] for x in (sums.kinds, sums.rows, sums.cols))
            out.append(Loading(Cells(kinds, rows, cols, tensor.width), self.loads))
        if tensor.width * len(steps) != WORD:
            raise NotCertified(f"sums of {tensor.width} bytes are not loaded in registers of {WORD}")
        return out

    def _lanes_and_columns(self, access: TensorAccess, address: Any) -> tuple[Lanes, Lanes]:
        """The lane and the column of tensor memory from which each register is loaded; shape (registers, threads).
        Warp w may load only from the 32 lanes that begin at 32 * (w % 4)."""
        addresses = self._addresses(address).reshape(-1, WARP)
        if (addresses != addresses[:, :1]).any() or access.split:
            raise NotCertified("the lanes of a warp load from different addresses of tensor memory")
        fragment = access.fragment
        width = int(fragment.column.max()) + 1 + int(access.packed)
        lanes, columns = [], []
        for at, thread in zip(addresses[:, 0].tolist(), self.threads[::WARP].tolist(), strict=True):
            lane, column = self.protocol.tensor.location(at, width)
            own = thread // WARP % 4 * WARP
            if lane not in (own, own + WARP - fragment.lanes):
                raise NotCertified(f"warp {thread // WARP} loads from lane {lane} of tensor memory, not from its own")
            lanes.append(lane + fragment.lane)
            columns.append(column + fragment.column)
        return np.concatenate(lanes, 1), np.concatenate(columns, 1)

    def wait_for_loads(self, m: Mask, _site: int) -> None:
        """tcgen05.wait::ld by all warps of the group."""
        self._together(m)
        self.awaited = self.loads
        if self.track.tensor.reading == Reading.LOADING:
            self.track.tensor = replace(self.track.tensor, reading=Reading.LOADED)

    def check_loaded(self, value: Any, *_: Any) -> None:
        """Check that the load of a register has been waited for."""
        if isinstance(value, Loading) and value.load > self.awaited:
            raise NotCertified("a register of a tcgen05.ld is used before it was waited for")

    def loaded(self, value: Any, *_: Any) -> Any:
        """The content of a register."""
        self.check_loaded(value)
        return value.cells if isinstance(value, Loading) else value


def machine_of(pipeline: Pipeline) -> type[WarpgroupMachine]:
    """The machine that executes the roles of a pipeline."""
    return WarpgroupMachine if pipeline.tensor is None else TensorMachine
