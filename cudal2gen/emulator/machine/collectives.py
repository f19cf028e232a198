"""Instructions that the lanes of a warp execute together: shuffles, votes, matches, reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from cudal2gen.emulator.machine.batch import Batch

Array = NDArray[Any]
Mask = Array | None


class Warps:
    """The warps of a batch. Registers have shape (lanes,); inside, (warps, 32)."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.size, self.lane, self.alive = batch, batch.size, batch.lane, batch.alive

    def members(self, members: Any, m: Mask, site: int) -> Array:
        """Check the member mask of a ``.sync`` collective; returns the active mask, shape (warps, 32)."""
        active = (np.ones(self.size, bool) if m is None else m).reshape(-1, 32)
        if type(members) is int and members == 0xFFFFFFFF and m is None:
            return active
        wanted = self.batch.constant(members, 4) if type(members) is int else members
        bits = (wanted.reshape(-1, 32)[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1
        alive = self.alive.reshape(-1, 32)
        missing = (bits.astype(bool) & alive[:, None, :] & ~active[:, None, :]).any(axis=2) & active
        absent = active & (((wanted.reshape(-1, 32) >> np.arange(32, dtype=np.uint32)) & 1) == 0)
        bad = np.flatnonzero((missing | absent).reshape(-1))
        if len(bad):
            self.batch.report_lanes(
                "warp-divergence",
                "the member mask names lanes that are not here, or omits the lane that executes it",
                site,
                bad,
            )
        return active

    def shfl(
        self, mode: str, value: Array, lane: Any, clamp: Any, members: Any, m: Mask, site: int
    ) -> tuple[Array, Array]:
        """shfl.sync -> (values, predicate: the source lane was in range)."""
        self.members(members, m, site)
        self.batch.warp_sync(m)
        own = self.lane.astype(np.int64).reshape(-1, 32)

        def operand(x: Any) -> Array:
            return np.full(own.shape, x, np.int64) if type(x) is int else x.astype(np.int64).reshape(-1, 32)

        b, c = operand(lane) & 31, operand(clamp)
        segment, bound = (c >> 8) & 31, c & 31
        top = (own & segment) | (bound & ~segment & 31)
        low = own & segment
        if mode == "up":
            j = own - b
            ok = j >= (low | (bound & ~segment & 31) if False else top)
        elif mode == "down":
            j = own + b
            ok = j <= top
        elif mode == "bfly":
            j = own ^ b
            ok = j <= top
        else:
            j = low | (b & ~segment & 31)
            ok = j <= top
        j = np.where(ok, j, own)
        got = np.take_along_axis(value.reshape(-1, 32), j, axis=1).reshape(-1)
        return got, ok.reshape(-1)

    def vote(self, mode: str, value: Array, members: Any, m: Mask, site: int) -> Array:
        """vote.sync: ballot gives uint32, the others predicates."""
        active = self.members(members, m, site)
        self.batch.warp_sync(m)
        bits = value.reshape(-1, 32)
        wanted = (self.batch.constant(members, 4) if type(members) is int else members).reshape(-1, 32)
        # Lanes of one instruction may carry different member masks (disjoint groups).
        if mode == "ballot":
            mask = ((bits & active).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=1).astype(np.uint32)
            ballot: Array = (mask[:, None] & wanted).reshape(-1)
            return ballot
        group = ((wanted[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1).astype(bool) & active[:, None, :]
        some = (group & bits[:, None, :]).any(axis=2)
        every = (~group | bits[:, None, :]).all(axis=2)
        out: Array = {"any": some, "all": every, "uni": every | ~some}[mode].reshape(-1)
        return out

    def match(self, mode: str, value: Array, members: Any, m: Mask, site: int) -> tuple[Array, Array]:
        """match.sync -> (mask of lanes with the same value, predicate for .all)."""
        active = self.members(members, m, site)
        self.batch.warp_sync(m)
        wanted = (self.batch.constant(members, 4) if type(members) is int else members).reshape(-1, 32)
        group = ((wanted[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1).astype(bool) & active[:, None, :]
        v = value.reshape(-1, 32)
        same = (v[:, :, None] == v[:, None, :]) & group
        mask = (same.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=2).astype(np.uint32)
        if mode == "any":
            return mask.reshape(-1), mask.reshape(-1) != 0
        everyone = (same == group).all(axis=2)
        return np.where(everyone, wanted, 0).astype(np.uint32).reshape(-1), everyone.reshape(-1)

    def redux(self, mode: str, value: Array, members: Any, m: Mask, site: int, signed: bool) -> Array:
        """redux.sync on 32-bit integers."""
        active = self.members(members, m, site)
        self.batch.warp_sync(m)
        wanted = (self.batch.constant(members, 4) if type(members) is int else members).reshape(-1, 32)
        group = ((wanted[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1).astype(bool) & active[:, None, :]
        v = (value.view(np.int32) if signed else value).reshape(-1, 1, 32).astype(np.int64)
        if mode == "add":
            out = np.where(group, v, 0).sum(axis=2)
        elif mode == "min":
            out = np.where(group, v, 1 << 40).min(axis=2)
        elif mode == "max":
            out = np.where(group, v, -(1 << 40)).max(axis=2)
        elif mode == "and":
            out = np.bitwise_and.reduce(np.where(group, v, -1), axis=2)
        elif mode == "or":
            out = np.bitwise_or.reduce(np.where(group, v, 0), axis=2)
        else:
            out = np.bitwise_xor.reduce(np.where(group, v, 0), axis=2)
        result: Array = (out & 0xFFFFFFFF).astype(np.uint32).reshape(-1)
        return result

    def elect(self, members: Any, m: Mask, site: int) -> tuple[Array, Array]:
        """elect.sync -> (the leader's lane, predicate: this lane is the leader)."""
        self.members(members, m, site)
        bits = (self.batch.constant(members, 4) if type(members) is int else members).astype(np.int64)
        lowest = bits & -bits
        leader = np.zeros(self.size, np.int64)
        some = lowest > 0
        leader[some] = np.log2(lowest[some]).astype(np.int64)
        return leader.astype(np.uint32), leader == self.lane

    def activemask(self, m: Mask) -> Array:
        active = (np.ones(self.size, bool) if m is None else m).reshape(-1, 32)
        mask = (active.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=1).astype(np.uint32)
        return np.repeat(mask, 32)
