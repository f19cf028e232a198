"""Executes instructions that lanes of a warp execute together (PTX ISA): shfl, vote, match, redux, elect, activemask.

A ``.sync`` instruction also synchronises its members, so it orders their memory accesses.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernelproof.emulator.state.arrays import Array, Mask, Scalar, bits_of, words_of
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.warp_clocks import WarpClocks

# Operation of redux -> the value of lanes that take no part, and the function that combines the values of a warp, shape
# (warps, 32, 32), int64. The neutral value of min and of max lies beyond all 32-bit integers.
_REDUCTIONS: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "add": (0, lambda v: np.asarray(v.sum(axis=2))),
    "min": (1 << 40, lambda v: np.asarray(v.min(axis=2))),
    "max": (-(1 << 40), lambda v: np.asarray(v.max(axis=2))),
    "and": (-1, lambda v: np.asarray(np.bitwise_and.reduce(v, axis=2))),
    "or": (0, lambda v: np.asarray(np.bitwise_or.reduce(v, axis=2))),
    "xor": (0, lambda v: np.asarray(np.bitwise_xor.reduce(v, axis=2))),
}


class Warps:
    """The collectives of a batch. Registers have shape (lanes,); inside a method they have shape (warps, 32)."""

    def __init__(self, batch: BatchState, clocks: WarpClocks) -> None:
        self.batch, self.clocks = batch, clocks

    def gather(self, m: Mask) -> None:
        """Note that lanes have executed an instruction that all lanes of a warp execute together."""
        self.clocks.releases.gather(m)

    def _active(self, m: Mask) -> Array:
        """The lanes of ``m`` in shape (warps, 32)."""
        return (np.ones(self.batch.size, bool) if m is None else m).reshape(-1, 32)

    def _require_members(self, members: Scalar, m: Mask, site: int) -> Array:
        """Report a member mask that names lanes which do not execute the instruction, omits one that does, or differs
        between members. Returns the mask of active lanes, shape (warps, 32)."""
        active = self._active(m)
        if isinstance(members, int) and members == 0xFFFFFFFF and m is None:
            return active
        words = self.batch.words(members)
        alive = self.batch.alive.reshape(-1, 32)
        # Shape (warps, 32 lanes, 32 named lanes) before ``any``.
        missing = (bits_of(words) & alive[:, None, :] & ~active[:, None, :]).any(axis=2) & active
        absent = active & (((words >> np.arange(32, dtype=np.uint32)) & 1) == 0)
        bad = np.flatnonzero((missing | absent).reshape(-1))
        if len(bad):
            text = "the member mask names lanes that do not execute the instruction, or omits the lane that does"
            self.batch.report_lanes("warp-divergence", text, site, bad)
        elif not isinstance(members, int):
            executing = bits_of(words) & active[:, None, :]
            unequal = active & (executing & (words[:, None, :] != words[:, :, None])).any(axis=2)
            if unequal.any():
                text = "lanes that execute the instruction together name different members"
                self.batch.report_lanes("warp-divergence", text, site, np.flatnonzero(unequal))
        return active

    def _synchronise(self, members: Scalar, m: Mask, site: int) -> Array:
        """The members synchronise: what they did before happens before what they do next."""
        active = self._require_members(members, m, site)
        self.clocks.warp_sync(m, members)
        return active

    def _groups(self, members: Scalar, active: Array) -> Array:
        """For each lane the lanes that take part with it, shape (warps, 32, 32). Lanes may name disjoint groups."""
        return bits_of(self.batch.words(members)) & active[:, None, :]

    def shfl(
        self, mode: str, value: Array, lane: Scalar, clamp: Scalar, members: Scalar, m: Mask, site: int
    ) -> tuple[Array, Array]:
        """shfl.sync: (values, predicate: the source lane was in range). ``lane``, ``clamp``: the operands b and c."""
        active = self._synchronise(members, m, site)
        own = self.batch.lane.astype(np.int64).reshape(-1, 32)
        b, c = self.batch.words(lane).astype(np.int64) & 31, self.batch.words(clamp).astype(np.int64)
        # The operand c cuts a warp into segments: bits 8-12 are the mask of the segment, bits 0-4 the clamp. ``low`` is
        # the first lane of a lane's own segment, ``top`` its limit.
        segment, bound = (c >> 8) & 31, c & 31
        low = own & segment
        top = low | (bound & ~segment & 31)
        source = {"up": own - b, "down": own + b, "bfly": own ^ b, "idx": low | (b & ~segment & 31)}[mode]
        inside = source >= top if mode == "up" else source <= top
        source = np.where(inside, source, own)
        out = np.take_along_axis(value.reshape(-1, 32), source, axis=1).reshape(-1)
        bad = inside & active & ~np.take_along_axis(active, source, axis=1)
        if bad.any():
            text = "shfl.sync takes the value of a lane that does not execute it"
            self.batch.report_lanes("shuffle-source", text, site, np.flatnonzero(bad), doubtful=True)
            out = np.where(bad.reshape(-1), self.batch.unspecified(value.dtype.itemsize), out)
        return out, inside.reshape(-1)

    def vote(self, mode: str, value: Array, members: Scalar, m: Mask, site: int) -> Array:
        """vote.sync: ballot gives uint32, the other modes predicates."""
        active = self._synchronise(members, m, site)
        bits = value.reshape(-1, 32)
        if mode == "ballot":
            return np.asarray((words_of(bits & active)[:, None] & self.batch.words(members)).reshape(-1))
        group = self._groups(members, active)
        some = (group & bits[:, None, :]).any(axis=2)
        all_set = (~group | bits[:, None, :]).all(axis=2)
        return np.asarray({"any": some, "all": all_set, "uni": all_set | ~some}[mode].reshape(-1))

    def match(self, mode: str, value: Array, members: Scalar, m: Mask, site: int) -> tuple[Array, Array]:
        """match.sync: (mask of the lanes with the same value, predicate of match.all)."""
        group = self._groups(members, self._synchronise(members, m, site))
        v = value.reshape(-1, 32)
        same = (v[:, :, None] == v[:, None, :]) & group
        if mode == "any":
            mask = words_of(same).reshape(-1)
            return mask, mask != 0
        everyone = (same == group).all(axis=2)
        return np.where(everyone, self.batch.words(members), 0).astype(np.uint32).reshape(-1), everyone.reshape(-1)

    def redux(self, mode: str, value: Array, members: Scalar, m: Mask, site: int, signed: bool) -> Array:
        """redux.sync on 32-bit integers."""
        group = self._groups(members, self._synchronise(members, m, site))
        v = (value.view(np.int32) if signed else value).reshape(-1, 1, 32).astype(np.int64)
        neutral, combine = _REDUCTIONS[mode]
        out = combine(np.where(group, v, neutral))
        return np.asarray((out & 0xFFFFFFFF).astype(np.uint32).reshape(-1))

    def elect(self, members: Scalar, m: Mask, site: int) -> tuple[Array, Array]:
        """elect.sync: (the leader's lane, predicate: this lane is the leader). The leader is the lowest member."""
        self._require_members(members, m, site)
        bits = self.batch.words(members).reshape(-1).astype(np.int64)
        # The lowest set bit of the member mask.
        lowest = bits & -bits
        leader = np.zeros(self.batch.size, np.int64)
        some = lowest > 0
        leader[some] = np.log2(lowest[some]).astype(np.int64)
        return leader.astype(np.uint32), leader == self.batch.lane

    def activemask(self, m: Mask) -> Array:
        """activemask: the lanes that execute it together."""
        return np.repeat(words_of(self._active(m)), 32)
