"""Models wgmma of the PTX ISA ("Asynchronous Warpgroup Level Matrix Instructions") and its groups.

Values are computed when the instruction is issued. Sums are rounded once per instruction, as ``machine.tensor``
describes. Operands count as being read, and accumulators as undefined, until the instruction's group has been waited
for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernelproof.emulator.arithmetic.operands import elements
from kernelproof.emulator.arithmetic.tensor_rounding import ROUNDED_KINDS, ROUNDINGS, add_products
from kernelproof.emulator.hopper.async_reads import Elements
from kernelproof.emulator.hopper.cluster_clocks import ClusterClocks
from kernelproof.emulator.hopper.cluster_memory import ClusterMemory
from kernelproof.emulator.hopper.pattern import Pattern, Strides, numbers, pattern
from kernelproof.emulator.hopper.tile import Register, Sums, Tile, TileRegister, WgmmaForm, add_accumulators
from kernelproof.emulator.state.arrays import Array, Mask, distinct
from kernelproof.emulator.state.batch_state import BatchState

# Bytes of a row of the swizzle pattern, by the layout field of a descriptor: no swizzle, 128, 64, 32 bytes.
SPAN_OF_LAYOUT = {0: 16, 1: 128, 2: 64, 3: 32}


def strides(descriptor: int) -> Strides:
    """The fields of a descriptor (PTX ISA, "Matrix Descriptor Format"). Its address and offsets are in units of 16
    bytes, 14 bits each."""
    return Strides(
        address=(descriptor & 0x3FFF) << 4,
        leading=(descriptor >> 16 & 0x3FFF) << 4,
        stride=(descriptor >> 32 & 0x3FFF) << 4,
        base=descriptor >> 49 & 7,
        span=SPAN_OF_LAYOUT[descriptor >> 62],
    )


class OperandPlaces(NamedTuple):
    """The places of an operand of several warpgroups in shared memory. ``indices``: those of its 16-byte elements in
    the batch's shared memory, shape (warpgroups, elements). ``slot_of``: for each warpgroup a number that is equal for
    warpgroups with the same operand; None if all differ. ``fits``: do all elements lie in shared memory? ``extent``:
    the offsets [low, high) in a CTA's shared memory between which all elements of all warpgroups lie."""

    indices: Array
    slot_of: list[int] | None
    fits: bool
    extent: tuple[int, int]


# The most operands whose places are cached. A ring of stages uses the same operands again and again.
MAX_PLACES = 256


class Warpgroups:
    """The warpgroups of a batch, numbered row by row.

    The wgmma groups of each warpgroup are numbered from 1 on. ``committed``, shape (warpgroups,), is the last group
    that was committed. ``retired``, shape (4 warps, warpgroups), is the last one that each warp has waited for: the
    warps of a warpgroup commit together, but each waits on its own. ``fenced``: no other instruction has touched
    registers that wgmma uses since the last wgmma.fence. Invariants: retired <= committed; a tile whose group is larger
    than a warp's ``retired`` is in use for that warp.
    """

    def __init__(self, batch: BatchState, clocks: ClusterClocks, shared: ClusterMemory) -> None:
        self.batch, self.launch, self.clocks, self.shared = batch, batch.launch, clocks, shared
        self.hazards = batch.launch.options.hazards
        self.per_row = -(-batch.warps_per_cta // 4)
        self.count = batch.count * self.per_row
        self.of_lane: Array = batch.row_of * self.per_row + (batch.warp >> 2)
        # First lane of every warpgroup.
        self.starts = [q // self.per_row * batch.width + q % self.per_row * 128 for q in range(self.count)]
        self.committed: Array = np.zeros(self.count, np.int64)
        self.retired: Array = np.zeros((4, self.count), np.int64)
        # The number of a lane's warp in its warpgroup.
        self.warp_of_lane: Array = batch.warp & 3
        # Per warpgroup, the tick at which each group was committed.
        self.group_ticks: list[list[int]] = [[] for _ in range(self.count)]
        self.fenced: Array = np.zeros(self.count, bool)
        # The mask of the last access to registers since a fence, which is compared by identity; False: no access.
        self.last_touch: Mask | bool = False
        self.first_lanes: Array = np.array(self.starts)
        self.places: dict[tuple[bytes, tuple[int, ...], int, bool], OperandPlaces] = {}

    # --- registers in other instructions ---

    def read(self, value: Register, m: Mask, site: int) -> Array:
        """The content of a register that an ordinary instruction reads; a register in use is reported."""
        if isinstance(value, TileRegister) and not value.tile.lent:
            self._check_unused(value.tile, m, site, "reads")
            self._touch(m)
        return self.plain(value)

    def overwrite(self, value: Register, m: Mask, site: int) -> None:
        """Check that an ordinary instruction may write a register; a register in use is reported."""
        if isinstance(value, TileRegister):
            self._check_unused(value.tile, m, site, "writes")
        self._touch(m)

    def _touch(self, m: Mask) -> None:
        """Note an access to registers by the lanes of ``m``: their warpgroups need a new wgmma.fence."""
        # Masks never change in place, so a second access under the same mask since the fence has no effect.
        if m is None or m is not self.last_touch:
            self.last_touch = m
            self.fenced[self._warpgroups_of(m)] = False

    def _warpgroups_of(self, m: Mask) -> Array | slice:
        """The warpgroups of the lanes in a mask."""
        return slice(None) if m is None else distinct(self.of_lane[self.batch.lanes(m)])

    def _check_unused(self, tile: Tile, m: Mask, site: int, verb: str) -> None:
        """Report an access to a tile that a wgmma still uses."""
        # Shape (4, warpgroups): per warp of each warpgroup, whether it has not waited for the group that uses the tile.
        busy = tile.group > self.retired
        if not self.hazards or not busy.any():
            return
        lanes = busy[self.warp_of_lane, self.of_lane] & self.batch.running(m)
        if lanes.any():
            operand = "a source" if tile.lent else "an accumulator"
            text = f"{verb} {operand} of a wgmma that has not been waited for"
            self.batch.report_lanes("wgmma-registers", text, site, np.flatnonzero(lanes))

    def merge(self, m: Mask, new: Register, old: Register) -> Register:
        """The register after an assignment under a mask: lanes outside of the mask keep the old content and the group
        that uses it."""
        if old is None or new is old or m is None:
            return new
        if isinstance(new, TileRegister) and isinstance(old, TileRegister) and new.is_same(old):
            return new
        if new is None:
            return old
        out = np.where(m, self.plain(new), self.plain(old))
        group = np.zeros(self.count, np.int64)
        chosen = np.zeros(self.count, bool)
        chosen[self.of_lane[m]] = True
        tiles = [value.tile for value in (new, old) if isinstance(value, TileRegister)]
        for value, mask in ((new, chosen), (old, ~chosen)):
            if isinstance(value, TileRegister):
                group[mask] = value.tile.group[mask]
        if (group > self.retired).any():
            return TileRegister(Tile(out.reshape(1, -1), group, all(tile.lent for tile in tiles)), 0)
        return out

    def plain(self, value: Register) -> Array:
        """The content of a register (zeros before its first write), without the checks of ``read``."""
        if isinstance(value, np.ndarray):
            return value
        return np.zeros(self.batch.size, np.uint32) if value is None else value.get()

    # --- wgmma ---

    def fence(self, m: Mask) -> None:
        """wgmma.fence by the lanes of ``m``."""
        self.last_touch = False
        self.fenced[self._warpgroups_of(m)] = True

    def _full_warpgroups(self, m: Mask, site: int) -> list[int]:
        """The warpgroups of which all lanes are in the mask; those of which only some are, are reported."""
        batch = self.batch
        if m is None:
            if batch.width % 128 == 0:
                return list(range(self.count))
            m = batch.alive
        out = []
        for q in distinct(self.of_lane[batch.lanes(m)]).tolist():
            start = self.starts[q]
            members = m[start : start + 128]
            if members.size == 128 and members.all() and (start + 127) // batch.width == start // batch.width:
                out.append(q)
            else:
                lanes = np.flatnonzero(m & (self.of_lane == q))
                batch.report_lanes("warp-divergence", "only a part of a warpgroup executes wgmma", site, lanes)
        return out

    def mma(
        self,
        form: WgmmaForm,
        d: tuple[Register, ...],
        a: Array | tuple[Register, ...],
        b: Array,
        scale: bool | int | Array,
        m: Mask,
        site: int,
    ) -> list[TileRegister]:
        """wgmma.mma_async; returns the accumulators ``d`` afterwards. ``a``: descriptors (uint64 per lane) or
        registers. ``b``: descriptors. ``scale``: whether products are added to the accumulators, or replace
        them; if it is an array, its shape is (lanes,)."""
        warpgroups = self._full_warpgroups(m, site)
        old, group = self._accumulators(d)
        sums = old.sums
        if warpgroups:
            starts = tuple(self.starts[q] for q in warpgroups)
            if isinstance(a, tuple):
                left = self._from_registers(a, form, starts)
            else:
                left = self._operand(form.kind_a, a, 64, form.m_major_a, warpgroups, site)
            right = self._operand(form.kind_b, b, form.n, form.n_major_b, warpgroups, site, transposed=True)
            keep = [bool(scale)] * len(starts) if isinstance(scale, bool | int) else scale[list(starts)].tolist()
            before = old.block_of(starts, form) if any(keep) else None
            if sums is not None and sums.starts != starts:  # the old sums cover other warpgroups: write them first
                old = Tile(old.registers, group)
            sums = Sums(starts, self._new_sums(form, left, right, before, keep))
            self._check_fenced(warpgroups, site)
            group[warpgroups] = self.committed[warpgroups] + 1
            if self.launch.counters is not None:
                self.launch.counters.wgmma += len(warpgroups)
                self.launch.counters.wgmma_flops += len(warpgroups) * 2 * 64 * form.n * form.k
        tile = Tile(old.base, group, sums=sums)
        return [TileRegister(tile, i) for i in range(len(d))]

    def _new_sums(self, form: WgmmaForm, left: Array, right: Array, before: Array | None, keep: list[bool]) -> Array:
        """The new D from operands (warpgroups, 64, k) and (warpgroups, k, n). The old D, ``before``, is added for
        warpgroups with ``keep``."""
        rounding = ROUNDINGS.get(self.launch.options.rounding)
        if rounding is None or form.acc != "f32" or form.kind_a not in ROUNDED_KINDS:
            product = np.matmul(left, right)
            return add_accumulators(form, -product if form.sign < 0 else product, before, keep)
        total = np.zeros((*left.shape[:2], form.n), np.float32)
        if before is not None:
            total[keep] = before[keep]
        return add_products(-left if form.sign < 0 else left, right, total, rounding)

    def _accumulators(self, d: tuple[Register, ...]) -> tuple[Tile, Array]:
        """The accumulators before an mma as one tile, and a copy of its ``group``, the wgmma groups that use it."""
        # The usual case: the registers are all those of a tile, in order, so nothing is copied.
        first = d[0]
        if isinstance(first, TileRegister) and len(first.tile.base) == len(d):
            tile = first.tile
            if all(isinstance(x, TileRegister) and x.tile is tile and x.index == i for i, x in enumerate(d)):
                return tile, tile.group.copy()
        group = np.zeros(self.count, np.int64)
        for x in d:
            if isinstance(x, TileRegister):
                np.maximum(group, x.tile.group, out=group)
        return Tile(np.stack([self.plain(x) for x in d]), group), group

    def _check_fenced(self, warpgroups: list[int], site: int) -> None:
        """Report warpgroups whose registers were accessed since their last wgmma.fence."""
        bad = [q for q in warpgroups if not self.fenced[q]]
        if self.hazards and bad:
            start = self.starts[bad[0]]
            text = "registers have been accessed since the last wgmma.fence of this warpgroup, or there was none"
            self.batch.report_lanes("wgmma-registers", text, site, np.arange(start, start + 128))
            self.fenced[bad] = True

    def lend(self, registers: tuple[Register, ...], m: Mask) -> list[TileRegister]:
        """The A registers of the mma just issued, as registers in use: they must not be written until its group has
        been waited for."""
        group = np.zeros(self.count, np.int64)
        chosen = self._warpgroups_of(m)
        group[chosen] = self.committed[chosen] + 1
        for value in registers:
            if isinstance(value, TileRegister) and value.tile.lent:
                np.maximum(group, value.tile.group, out=group)
        tile = Tile(np.stack([self.plain(r) for r in registers]), group, lent=True)
        return [TileRegister(tile, i) for i in range(len(registers))]

    # --- operands ---

    def _from_registers(self, registers: tuple[Register, ...], form: WgmmaForm, starts: tuple[int, ...]) -> Array:
        """Operand A in registers as numbers, shape (warpgroups, 64, k)."""
        plain = [self.plain(r) for r in registers]
        raw = np.stack([np.stack([r[s : s + 128] for r in plain]) for s in starts])
        values = elements(np.ascontiguousarray(raw).view(np.uint8), form.kind_a)
        # Layout (PTX ISA): register r of warp w holds row 16 * w + 8 * (r % 2) + lane / 4; r / 2 selects the half of k.
        # The axes are warpgroup, r / 2, r % 2, w, lane / 4, lane % 4 and element.
        cells = values.reshape(len(starts), 2, 2, 4, 8, 4, -1).transpose(0, 3, 2, 4, 1, 5, 6)
        return np.ascontiguousarray(cells).reshape(len(starts), 64, form.k)

    def _operand(
        self,
        kind: str,
        descriptors: Array,
        rows: int,
        rows_contiguous: bool,
        warpgroups: list[int],
        site: int,
        transposed: bool = False,
    ) -> Array:
        """A or B of every warpgroup as numbers, shape (warpgroups, rows, elements along k); with ``transposed`` the
        last two are exchanged."""
        indices, slot_of = self._places(descriptors, rows, rows_contiguous, warpgroups, site)
        count = len(warpgroups) if slot_of is None else max(slot_of) + 1
        if slot_of is not None:
            indices = indices[[slot_of.index(slot) for slot in range(count)]]
        raw = self.shared.views[16].take(indices)
        values = numbers(raw, kind, rows, rows_contiguous, transposed)
        return values if slot_of is None else values[slot_of]

    def _places(
        self, descriptors: Array, rows: int, rows_contiguous: bool, warpgroups: list[int], site: int
    ) -> tuple[Array, list[int] | None]:
        """The indices of the 16-byte elements of an operand of every warpgroup, shape (warpgroups, elements), and
        ``OperandPlaces.slot_of``. The reads are checked and tagged."""
        starts = self.first_lanes[warpgroups]
        descriptor_of_warpgroup = descriptors[starts]
        key = (descriptor_of_warpgroup.tobytes(), tuple(warpgroups), rows, rows_contiguous)
        places = self.places.get(key)
        if places is None:
            if len(self.places) >= MAX_PLACES:
                self.places.clear()
            places = self.places[key] = self._find_places(
                descriptor_of_warpgroup, starts, rows, rows_contiguous, warpgroups
            )
        indices, slot_of, fits, extent = places
        if fits and bool((descriptors[starts[:, None] + np.arange(128)] == descriptor_of_warpgroup[:, None]).all()):
            # All threads of each warpgroup name the same operand, so one check of all warpgroups is tried first.
            batch_rows, readers = starts // self.batch.width, np.array(warpgroups) % self.per_row
            if not self.hazards or self.shared.wgmma_read(indices, extent, starts, batch_rows, readers, site):
                return indices, slot_of
        patterns = [self._pattern(int(descriptor), rows, rows_contiguous) for descriptor in descriptor_of_warpgroup]
        checked = [
            self._checked_elements(q, pattern, descriptors, site)
            for q, pattern in zip(warpgroups, patterns, strict=True)
        ]
        return np.stack(checked), slot_of

    def _find_places(
        self, descriptor_of_warpgroup: Array, starts: Array, rows: int, rows_contiguous: bool, warpgroups: list[int]
    ) -> OperandPlaces:
        """Find an operand of several warpgroups in shared memory. ``starts``: the warpgroups' first lanes."""
        patterns = [self._pattern(descriptor, rows, rows_contiguous) for descriptor in descriptor_of_warpgroup.tolist()]
        batch_rows = starts // self.batch.width
        indices = np.stack([pattern.chunks for pattern in patterns]) + (batch_rows * (self.shared.stride >> 4))[:, None]
        # Warpgroups of a CTA often share an operand.
        slots: dict[tuple[int, int], int] = {}
        shared_by = [
            slots.setdefault(pair, len(slots))
            for pair in zip(batch_rows.tolist(), descriptor_of_warpgroup.tolist(), strict=True)
        ]
        fits = all(pattern.low >= 0 and pattern.high <= self.shared.size for pattern in patterns)
        extent = min(pattern.low for pattern in patterns), max(pattern.high for pattern in patterns)
        return OperandPlaces(indices, shared_by if len(slots) < len(warpgroups) else None, fits, extent)

    def _checked_elements(self, q: int, pattern: Pattern, descriptors: Array, site: int) -> Array:
        """The indices of the 16-byte elements of one warpgroup's operand, with every check."""
        start = self.starts[q]
        if (descriptors[start : start + 128] != descriptors[start]).any():
            text = "the threads of a warpgroup have different descriptors of one operand"
            self.batch.report_lanes("wgmma-descriptor", text, site, np.arange(start, start + 128))
        offsets, row = pattern.offsets, start // self.batch.width
        if not self.shared.fits(pattern.low, pattern.high, start, site):
            offsets = np.clip(offsets, 0, self.shared.size - 16)
        indices = self.shared.chunks(row, offsets)
        if self.hazards:
            source = Elements(indices, int(offsets.min()), int(offsets.max()) + 16)
            self.shared.async_read(source, start, row, q % self.per_row, site, "wgmma")
        return indices

    def _pattern(self, descriptor: int, rows: int, rows_contiguous: bool) -> Pattern:
        """The 16-byte elements that a descriptor names, in the order that ``numbers`` expects."""
        return pattern(strides(descriptor), rows, rows_contiguous)

    # --- wgmma groups ---

    def commit(self, m: Mask, site: int) -> None:
        """wgmma.commit_group by the lanes of ``m``."""
        self.launch.tick += 1
        for q in self._full_warpgroups(m, site):
            self.committed[q] += 1
            self.group_ticks[q].append(self.launch.tick)

    def wait(self, pending: int, m: Mask) -> None:
        """wgmma.wait_group: the warps of ``m`` have waited for all but the ``pending`` newest wgmma groups, so the
        operands of the completed groups have been read."""
        batch = self.batch
        lanes = batch.lanes(m)
        warpgroups = self.of_lane[lanes]
        for q in distinct(warpgroups).tolist():
            done = int(self.committed[q]) - pending
            if done <= 0:
                continue
            row, index = divmod(q, self.per_row)
            warps = distinct(batch.warp[lanes[warpgroups == q]])
            # A wait covers only the warps that execute it.
            self.retired[warps & 3, q] = np.maximum(self.retired[warps & 3, q], done)
            if self.hazards:
                column = self.clocks.wgmma_column(row, index)
                self.clocks.learn(row, warps, column, self.group_ticks[q][done - 1])
