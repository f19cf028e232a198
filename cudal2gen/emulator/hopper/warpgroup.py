"""wgmma: products of warpgroups from shared memory, their accumulators and groups.

Values are computed at issue, rounded as ``machine.tensor`` describes (fp32 sums once per instruction, fp16 likewise);
what an instruction reads counts as being read, and its accumulators as undefined, until its group has been waited for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cudal2gen.emulator.arithmetic.operands import ELEMENT_BITS, elements, rounded
from cudal2gen.emulator.hopper.clocks import ClusterClocks
from cudal2gen.emulator.hopper.cluster_memory import ClusterMemory
from cudal2gen.emulator.machine.tensor import Accumulator
from cudal2gen.emulator.memory.shared import WINDOW_START
from cudal2gen.emulator.state.arrays import Array, Mask, distinct
from cudal2gen.emulator.state.batch import BatchState

# Bytes of a row of the swizzle pattern, by the layout field of a descriptor: none, 128, 64, 32.
SPAN = {0: 16, 1: 128, 2: 64, 3: 32}


class Form(NamedTuple):
    """A kind of wgmma.mma_async: ``n`` columns, types of A and B (of one width), accumulator ``acc``; A from registers
    (``registers``) or shared memory; operands M- or N-major (``along_a``, ``along_b``); sign of A times that of B;
    ``saturate``: s32 sums are clamped."""

    n: int
    kind_a: str
    kind_b: str
    acc: str
    registers: bool
    along_a: bool
    along_b: bool
    sign: float
    saturate: bool = False

    @property
    def k(self) -> int:
        """Elements along k: 32 bytes."""
        return 256 // ELEMENT_BITS[self.kind_a]


class Tile:
    """Registers of a wgmma: ``registers`` (registers, lanes) and, per warpgroup, the group that uses them last. Those
    of A are only ``lent``: they may be read meanwhile."""

    __slots__ = ("group", "lent", "registers")

    def __init__(self, registers: Array, group: Array, lent: bool = False) -> None:
        self.registers, self.group, self.lent = registers, group, lent


class TileRegister:
    """One register of a tile."""

    __slots__ = ("index", "tile")

    def __init__(self, tile: Tile, index: int) -> None:
        self.tile, self.index = tile, index

    def is_same(self, other: TileRegister) -> bool:
        """Is it the same register of the same tile?"""
        return self.tile is other.tile and self.index == other.index

    def get(self) -> Array:
        """Raw bits per lane."""
        out: Array = self.tile.registers[self.index]
        return out


# What a register may hold that wgmma or mma writes. None: not written yet.
Register = Array | TileRegister | Accumulator | None


class Warpgroups:
    """The warpgroups of a batch, numbered row by row.

    Groups of wgmma count from 1 per warpgroup: ``committed`` is the last one closed, ``retired`` the last waited for.
    Invariants: retired <= committed; a tile whose group is beyond ``retired`` is under way; ``fenced`` says that since
    the last wgmma.fence no other instruction has touched registers that wgmma uses.
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
        self.retired: Array = np.zeros(self.count, np.int64)
        # Per warpgroup, the tick at which each group was committed.
        self.group_ticks: list[list[int]] = [[] for _ in range(self.count)]
        self.fenced: Array = np.zeros(self.count, bool)
        # The mask of the last access to registers since a fence; False: none, so that masks compare by identity.
        self.last_touch: Mask | bool = False
        self.patterns: dict[tuple[int, int, bool], Array] = {}

    # --- registers under other instructions ---

    def read(self, value: Register, m: Mask, site: int) -> Array:
        """The array behind a register that an ordinary instruction reads."""
        if isinstance(value, TileRegister) and not value.tile.lent:
            self._check_settled(value.tile, m, site, "reads")
            self._touch(m)
        return self._plain(value)

    def overwrite(self, value: Register, m: Mask, site: int) -> None:
        """An ordinary instruction is about to write a register that wgmma uses."""
        if isinstance(value, TileRegister):
            self._check_settled(value.tile, m, site, "writes")
        self._touch(m)

    def _touch(self, m: Mask) -> None:
        if m is None or m is not self.last_touch:
            self.last_touch = m
            self.fenced[self._groups_of(m)] = False

    def _groups_of(self, m: Mask) -> Array | slice:
        return slice(None) if m is None else distinct(self.of_lane[self.batch.lanes(m)])

    def _check_settled(self, tile: Tile, m: Mask, site: int, what: str) -> None:
        busy = tile.group > self.retired
        if not self.hazards or not busy.any():
            return
        lanes = busy[self.of_lane] & self.batch.running(m)
        if lanes.any():
            operand = "a source" if tile.lent else "an accumulator"
            text = f"{what} {operand} of a wgmma that has not been waited for"
            self.batch.report_lanes("wgmma-registers", text, site, np.flatnonzero(lanes))

    def merge(self, m: Mask, new: Register, old: Register) -> Register:
        """Masked assignment of registers that wgmma uses: lanes outside keep the old register, with the group that it
        waits for."""
        if old is None or new is old or m is None:
            return new
        if isinstance(new, TileRegister) and isinstance(old, TileRegister) and new.is_same(old):
            return new
        if new is None:
            return old
        out = np.where(m, self._plain(new), self._plain(old))
        group = np.zeros(self.count, np.int64)
        chosen = np.zeros(self.count, bool)
        chosen[self.of_lane[m]] = True
        tiles = [value.tile for value in (new, old) if isinstance(value, TileRegister)]
        for value, which in ((new, chosen), (old, ~chosen)):
            if isinstance(value, TileRegister):
                group[which] = value.tile.group[which]
        if (group > self.retired).any():
            return TileRegister(Tile(out.reshape(1, -1), group, all(tile.lent for tile in tiles)), 0)
        return out

    def _plain(self, value: Register) -> Array:
        if isinstance(value, np.ndarray):
            return value
        return np.zeros(self.batch.size, np.uint32) if value is None else value.get()

    # --- wgmma ---

    def fence(self, m: Mask) -> None:
        """wgmma.fence."""
        self.last_touch = False
        self.fenced[self._groups_of(m)] = True

    def _whole(self, m: Mask, site: int) -> list[int]:
        """The warpgroups in the mask; incomplete ones are reported and left out."""
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
                batch.report_lanes("warp-divergence", "wgmma by a part of a warpgroup only", site, lanes)
        return out

    def mma(
        self,
        form: Form,
        d: tuple[Register, ...],
        a: Array | tuple[Register, ...],
        b: Array,
        scale: bool | int | Array,
        m: Mask,
        site: int,
    ) -> list[TileRegister]:
        """wgmma.mma_async. ``a``: descriptors (uint64 per lane) or registers; ``scale``: keep the accumulators."""
        groups = self._whole(m, site)
        old, group = self._accumulators(d)
        new = old.copy()
        if groups:
            starts = [self.starts[q] for q in groups]
            if isinstance(a, tuple):
                left = self._from_registers(a, form, starts)
            else:
                left = self._operand(form.kind_a, a, 64, form.along_a, groups, site)
            right = self._operand(form.kind_b, b, form.n, form.along_b, groups, site)
            product = np.matmul(left, right.transpose(0, 2, 1))
            if form.sign < 0:
                product = -product
            keep = [bool(scale) if isinstance(scale, bool | int) else bool(scale[s]) for s in starts]
            self._accumulate(form, new, product, starts, keep)
            self._check_fenced(groups, site)
            group[groups] = self.committed[groups] + 1
            if self.launch.counters is not None:
                self.launch.counters.wgmma += len(groups)
                self.launch.counters.wgmma_flops += len(groups) * 2 * 64 * form.n * form.k
        tile = Tile(new, group)
        return [TileRegister(tile, i) for i in range(len(d))]

    def _accumulators(self, d: tuple[Register, ...]) -> tuple[Array, Array]:
        """(registers, lanes) and the groups that use them, of the accumulators before an mma."""
        first = d[0]
        if isinstance(first, TileRegister) and all(
            isinstance(x, TileRegister) and x.tile is first.tile and x.index == i for i, x in enumerate(d)
        ):
            return first.tile.registers, first.tile.group.copy()
        group = np.zeros(self.count, np.int64)
        for x in d:
            if isinstance(x, TileRegister):
                np.maximum(group, x.tile.group, out=group)
        return np.stack([self._plain(x) for x in d]), group

    def _accumulate(self, form: Form, registers: Array, product: Array, starts: list[int], keep: list[bool]) -> None:
        """Add products (warpgroups, 64, n) to the accumulators where ``keep``, else set them.

        Rows are 16 * warp + 8 * half + lane / 4, columns 8 * i + lane % 4 * 2 + j.
        """
        count = len(starts)
        cells = product.reshape(count, 4, 2, 8, form.n // 8, 4, 2)
        if form.acc == "f16":
            ordered = np.ascontiguousarray(cells.transpose(0, 4, 2, 1, 3, 5, 6)).reshape(count, -1, 128, 2)
            for total, s, add in zip(ordered, starts, keep, strict=True):
                if add:
                    before = np.ascontiguousarray(registers[:, s : s + 128]).view(np.float16).reshape(total.shape)
                    total = total + before.astype(np.float32)
                registers[:, s : s + 128] = total.astype(np.float16).reshape(len(total), -1).view(np.uint32)
            return
        by_register = np.ascontiguousarray(cells.transpose(0, 4, 2, 6, 1, 3, 5)).reshape(count, -1, 128)
        if form.acc == "s32":
            whole = registers.view(np.int32)
            for total, s, add in zip(by_register, starts, keep, strict=True):
                sums = total + whole[:, s : s + 128] if add else total
                whole[:, s : s + 128] = rounded(sums, "s32", form.saturate)
            return
        floats = registers.view(np.float32)
        for total, s, add in zip(by_register, starts, keep, strict=True):
            if add:
                floats[:, s : s + 128] += total
            else:
                floats[:, s : s + 128] = total

    def _check_fenced(self, groups: list[int], site: int) -> None:
        bad = [q for q in groups if not self.fenced[q]]
        if self.hazards and bad:
            start = self.starts[bad[0]]
            text = "registers have been accessed since the last wgmma.fence of this warpgroup, or there was none"
            self.batch.report_lanes("wgmma-registers", text, site, np.arange(start, start + 128))
            self.fenced[bad] = True

    def lend(self, registers: tuple[Register, ...], m: Mask) -> list[TileRegister]:
        """The A registers of the mma just issued: not to be written before its group has been waited for."""
        group = np.zeros(self.count, np.int64)
        chosen = self._groups_of(m)
        group[chosen] = self.committed[chosen] + 1
        for value in registers:
            if isinstance(value, TileRegister) and value.tile.lent:
                np.maximum(group, value.tile.group, out=group)
        tile = Tile(np.stack([self._plain(r) for r in registers]), group, lent=True)
        return [TileRegister(tile, i) for i in range(len(registers))]

    # --- operands ---

    def _from_registers(self, registers: tuple[Register, ...], form: Form, starts: list[int]) -> Array:
        plain = [self._plain(r) for r in registers]
        raw = np.stack([np.stack([r[s : s + 128] for r in plain]) for s in starts])
        values = elements(np.ascontiguousarray(raw).view(np.uint8), form.kind_a)
        # Register r: rows 8 * (r % 2), and of the half r / 2 of k the elements of one register.
        cells = values.reshape(len(starts), 2, 2, 4, 8, 4, -1).transpose(0, 3, 2, 4, 1, 5, 6)
        return np.ascontiguousarray(cells).reshape(len(starts), 64, form.k)

    def _operand(self, kind: str, descriptors: Array, rows: int, along: bool, groups: list[int], site: int) -> Array:
        """A or B of every warpgroup as numbers, (warpgroups, rows, elements along k)."""
        batch, shared = self.batch, self.shared
        places: list[Array] = []
        # Warpgroups of a CTA often share an operand.
        slots: dict[tuple[int, int], int] = {}
        slot_of = []
        for q in groups:
            start = self.starts[q]
            row = start // batch.width
            descriptor = int(descriptors[start])
            if (descriptors[start : start + 128] != descriptors[start]).any():
                text = "the threads of a warpgroup have different descriptors of one operand"
                batch.report_lanes("wgmma-descriptor", text, site, np.arange(start, start + 128))
            slot_of.append(slots.setdefault((row, descriptor), len(slots)))
            offsets = self._pattern(descriptor, rows, along)
            if not shared.fits(int(offsets.min()), int(offsets.max()) + 16, start, site):
                offsets = np.clip(offsets, 0, shared.size - 16)
            at = shared.chunks(row, offsets)
            if self.hazards:
                shared.async_read(at, start, row, q % self.per_row, site, "wgmma")
            if slot_of[-1] == len(places):
                places.append(at)
        raw = shared.views[16][np.stack(places)]
        values = elements(np.ascontiguousarray(raw).view(np.uint8), kind)
        if len(places) < len(groups):
            values = values[slot_of]
        if along:
            # Of 16-bit elements only: 16 rows of k, each with the elements along m or n.
            return values.reshape(len(groups), 16, rows).transpose(0, 2, 1)
        return values.reshape(len(groups), rows, -1)

    def _pattern(self, descriptor: int, rows: int, along: bool) -> Array:
        """Byte offsets in the CTA's shared memory of the 16-byte elements of an operand, in ``_operand``'s order."""
        key = (descriptor, rows, along)
        out = self.patterns.get(key)
        if out is not None:
            return out
        address = (descriptor & 0x3FFF) << 4
        leading = (descriptor >> 16 & 0x3FFF) << 4
        stride = (descriptor >> 32 & 0x3FFF) << 4
        base = descriptor >> 49 & 7
        span = SPAN[descriptor >> 62]
        wide = span // 16
        if along:
            k, chunk = np.arange(16)[:, None], np.arange(rows // 8)[None, :]
            if wide == 1:
                linear = chunk * stride + k % 8 * 16 + k // 8 * leading
            else:
                linear = chunk % wide * 16 + chunk // wide * leading + k % 8 * span + k // 8 * stride
        else:
            r, chunk = np.arange(rows)[:, None], np.arange(2)[None, :]
            if wide == 1:
                linear = r % 8 * 16 + r // 8 * stride + chunk * leading
            else:
                linear = r % 8 * span + r // 8 * stride + chunk * 16
        linear = linear.reshape(-1) + address
        linear ^= (((linear >> 7) - base) & (wide - 1)) << 4
        out = self.patterns[key] = linear - WINDOW_START
        return out

    # --- groups ---

    def commit(self, m: Mask, site: int) -> None:
        """wgmma.commit_group."""
        self.launch.tick += 1
        for q in self._whole(m, site):
            self.committed[q] += 1
            self.group_ticks[q].append(self.launch.tick)

    def wait(self, pending: int, m: Mask) -> None:
        """wgmma.wait_group: all but the ``pending`` newest groups are complete, and the waiting warps know what they
        have read."""
        batch = self.batch
        lanes = batch.lanes(m)
        groups = self.of_lane[lanes]
        for q in distinct(groups).tolist():
            done = int(self.committed[q]) - pending
            if done <= 0:
                continue
            self.retired[q] = max(int(self.retired[q]), done)
            if self.hazards:
                row, index = divmod(q, self.per_row)
                warps = distinct(batch.warp[lanes[groups == q]])
                column = self.clocks.wgmma_column(row, index)
                self.clocks.learn(row, warps, column, self.group_ticks[q][done - 1])
