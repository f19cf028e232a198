"""wgmma: products of warpgroups from shared memory, their accumulators and groups; setmaxnreg.

Values are computed at issue, rounded as ``tensor`` describes (fp32 sums once per instruction, fp16 likewise); what an
instruction reads counts as being read, and its accumulators as undefined, until its group has been waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cudal2gen.emulator.hopper.clocks import distinct
from cudal2gen.emulator.machine.tensor import Accumulator
from cudal2gen.emulator.memory.shared import WINDOW_START

if TYPE_CHECKING:
    from cudal2gen.emulator.machine.batch import Batch

Array = NDArray[Any]
Mask = Array | None
# Bytes of a row of the swizzle pattern, by the layout field of a descriptor: none, 128, 64, 32.
SPAN = {0: 16, 1: 128, 2: 64, 3: 32}


class Form:
    """A kind of wgmma.mma_async: ``n`` columns, operands of type ``kind``, accumulator ``acc``; A from registers
    (``registers``) or shared memory; operands M- or N-major (``along_a``, ``along_b``); signs of A and B."""

    __slots__ = ("acc", "along_a", "along_b", "kind", "n", "registers", "sign")

    def __init__(self, n: int, kind: str, acc: str, registers: bool, along_a: bool, along_b: bool, sign: float) -> None:
        self.n, self.kind, self.acc, self.registers = n, kind, acc, registers
        self.along_a, self.along_b, self.sign = along_a, along_b, sign


class Tile:
    """Registers of a wgmma: ``registers`` (registers, lanes) and, per warpgroup, the group that uses them last. Those
    of A are only ``lent``: they may be read meanwhile."""

    __slots__ = ("group", "lent", "registers")

    def __init__(self, registers: Array, group: Array, lent: bool = False) -> None:
        self.registers, self.group, self.lent = registers, group, lent


class Held:
    """One accumulator register of a tile."""

    __slots__ = ("index", "tile")

    def __init__(self, tile: Tile, index: int) -> None:
        self.tile, self.index = tile, index


class Warpgroups:
    """The warpgroups of a batch, numbered row by row."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.launch = batch, batch.launch
        self.hazards = batch.launch.options.hazards
        self.warps = batch.width // 32
        self.per_row = -(-self.warps // 4)
        n = batch.count * self.per_row
        self.of_lane = batch.row_of * self.per_row + (batch.warp >> 2)
        self.starts = [q // self.per_row * batch.width + q % self.per_row * 128 for q in range(n)]
        self.committed: Array = np.zeros(n, np.int64)
        self.retired: Array = np.zeros(n, np.int64)
        self.group_ticks: list[list[int]] = [[] for _ in range(n)]
        # Has a wgmma.fence followed the last access to registers by other instructions?
        self.fenced: Array = np.zeros(n, bool)
        self.last_touch: Any = self
        self.patterns: dict[tuple[int, int, int, bool], Array] = {}
        self.limits: dict[int, list[tuple[int, int]]] = {}
        self.limit_warps: dict[int, int] = {}

    # --- registers ---

    def read(self, value: Any, m: Mask, site: int) -> Any:
        """The array behind a register that an ordinary instruction reads."""
        if type(value) is np.ndarray:
            return value
        if type(value) is Held:
            if not value.tile.lent:
                self._settled(value.tile, m, site, "reads")
                self._touch(m)
            return value.tile.registers[value.index]
        if type(value) is Accumulator:
            return value.get()
        return np.zeros(self.batch.size, np.uint32)

    def overwrite(self, value: Any, m: Mask, site: int) -> None:
        """An ordinary instruction is about to write a register that wgmma uses."""
        if type(value) is Held:
            self._settled(value.tile, m, site, "writes")
        self._touch(m)

    def _touch(self, m: Mask) -> None:
        if m is not self.last_touch or m is None:
            self.last_touch = m
            if m is None:
                self.fenced[:] = False
            else:
                self.fenced[distinct(self.of_lane[self.batch.lanes(m)])] = False

    def _settled(self, tile: Tile, m: Mask, site: int, what: str) -> None:
        busy = tile.group > self.retired
        if not self.hazards or not busy.any():
            return
        lanes = busy[self.of_lane] & (self.batch.alive if m is None else m)
        if lanes.any():
            self.batch.report_lanes(
                "wgmma-registers",
                f"{what} {'a source' if tile.lent else 'an accumulator'} of a wgmma that has not been waited for",
                site,
                np.flatnonzero(lanes),
            )

    def merge(self, m: Mask, new: Any, old: Any) -> Any:
        """Masked assignment of accumulator registers."""
        if old is None or new is old or m is None:
            return new
        if type(new) is Held and type(old) is Held and new.tile is old.tile and new.index == old.index:
            return new
        values = [
            v.tile.registers[v.index] if type(v) is Held else v.get() if type(v) is Accumulator else v
            for v in (new, old)
        ]
        if values[0] is None:
            return old
        out = np.where(m, values[0], values[1])
        group = np.zeros(len(self.retired), np.int64)
        chosen = np.zeros(len(self.retired), bool)
        chosen[self.of_lane[m]] = True
        for value, which in ((new, chosen), (old, ~chosen)):
            if type(value) is Held:
                group[which] = value.tile.group[which]
        if (group > self.retired).any():
            lent = all(value.tile.lent for value in (new, old) if type(value) is Held)
            return Held(Tile(out.reshape(1, -1), group, lent), 0)
        return out

    # --- wgmma ---

    def fence(self, m: Mask) -> None:
        """wgmma.fence."""
        self.last_touch = self
        if m is None:
            self.fenced[:] = True
        else:
            self.fenced[distinct(self.of_lane[self.batch.lanes(m)])] = True

    def _whole(self, m: Mask, site: int) -> list[int]:
        """The warpgroups in the mask; incomplete ones are reported and left out."""
        batch = self.batch
        if m is None:
            if batch.width % 128 == 0:
                return list(range(len(self.starts)))
            m = batch.alive
        out = []
        for q in distinct(self.of_lane[batch.lanes(m)]):
            start = self.starts[q]
            part = m[start : start + 128]
            if part.size == 128 and part.all() and (start + 127) // batch.width == start // batch.width:
                out.append(int(q))
            else:
                lanes = np.flatnonzero(m & (self.of_lane == q))
                batch.report_lanes("warp-divergence", "wgmma by a part of a warpgroup only", site, lanes)
        return out

    def mma(self, form: Form, d: tuple[Any, ...], a: Any, b: Array, scale: Any, m: Mask, site: int) -> list[Held]:
        """wgmma.mma_async. ``a``: descriptors or registers; ``scale``: keep the accumulators (bool or per lane)."""
        batch = self.batch
        groups = self._whole(m, site)
        first = d[0]
        if type(first) is Held and all(
            type(x) is Held and x.tile is first.tile and x.index == i for i, x in enumerate(d)
        ):
            old, group = first.tile.registers, first.tile.group.copy()
        else:
            parts = [self._plain(x) for x in d]
            old, group = np.stack(parts), np.zeros(len(self.retired), np.int64)
            for x in d:
                if type(x) is Held:
                    np.maximum(group, x.tile.group, out=group)
        new = old.copy()
        if groups:
            starts = [self.starts[q] for q in groups]
            left = (
                self._from_registers(a, form, starts)
                if form.registers
                else self._operand(form, a, 64, form.along_a, groups, site)
            )
            right = self._operand(form, b, form.n, form.along_b, groups, site)
            product = np.matmul(left, right.transpose(0, 2, 1))
            if form.sign < 0:
                product = -product
            # Rows are 16 * warp + 8 * half + lane / 4, columns 8 * i + lane % 4 * 2 + j.
            cells = product.reshape(len(groups), 4, 2, 8, form.n // 8, 4, 2)
            keep = [bool(scale) if isinstance(scale, bool | int) else bool(scale[s]) for s in starts]
            if form.acc == "f16":
                ordered: Array = np.ascontiguousarray(cells.transpose(0, 4, 2, 1, 3, 5, 6))
                ordered = ordered.reshape(len(groups), -1, 128, 2)
                for i, s in enumerate(starts):
                    total = ordered[i]
                    if keep[i]:
                        before = np.ascontiguousarray(old[:, s : s + 128]).view(np.float16).reshape(total.shape)
                        total = total + before.astype(np.float32)
                    new[:, s : s + 128] = total.astype(np.float16).reshape(len(total), -1).view(np.uint32)
            else:
                ordered = np.ascontiguousarray(cells.transpose(0, 4, 2, 6, 1, 3, 5)).reshape(len(groups), -1, 128)
                floats = new.view(np.float32)
                for i, s in enumerate(starts):
                    if keep[i]:
                        floats[:, s : s + 128] += ordered[i]
                    else:
                        floats[:, s : s + 128] = ordered[i]
            if self.hazards:
                bad = [q for q in groups if not self.fenced[q]]
                if bad:
                    start = self.starts[bad[0]]
                    batch.report_lanes(
                        "wgmma-registers",
                        "registers have been accessed since the last wgmma.fence of this warpgroup, or there was none",
                        site,
                        np.arange(start, start + 128),
                    )
                    self.fenced[bad] = True
            group[groups] = self.committed[groups] + 1
            if self.launch.counters is not None:
                self.launch.counters.wgmma += len(groups)
                self.launch.counters.wgmma_flops += len(groups) * 2 * 64 * form.n * 16
        tile = Tile(new, group)
        return [Held(tile, i) for i in range(len(d))]

    def lend(self, registers: tuple[Any, ...], m: Mask) -> list[Held]:
        """The A registers of the mma just issued: not to be written before its group has been waited for."""
        group = np.zeros(len(self.retired), np.int64)
        chosen = distinct(self.of_lane if m is None else self.of_lane[self.batch.lanes(m)])
        group[chosen] = self.committed[chosen] + 1
        for value in registers:
            if type(value) is Held and value.tile.lent:
                np.maximum(group, value.tile.group, out=group)
        tile = Tile(np.stack([self._plain(r) for r in registers]), group, lent=True)
        return [Held(tile, i) for i in range(len(registers))]

    def _plain(self, value: Any) -> Array:
        if type(value) is Held:
            return value.tile.registers[value.index]  # type: ignore[no-any-return]
        if type(value) is Accumulator:
            return value.get()
        return np.zeros(self.batch.size, np.uint32) if value is None else value

    def _from_registers(self, registers: tuple[Array, ...], form: Form, starts: list[int]) -> Array:
        raw = np.stack([np.stack([self._plain(r)[s : s + 128] for r in registers]) for s in starts])
        values = _floats(np.ascontiguousarray(raw).view(np.uint16), form.kind)
        # Register r: rows 8 * (r % 2), columns 8 * (r / 2), two neighbours each.
        cells = values.reshape(len(starts), 2, 2, 4, 8, 4, 2).transpose(0, 3, 2, 4, 1, 5, 6)
        return np.ascontiguousarray(cells).reshape(len(starts), 64, 16)

    def _operand(self, form: Form, descriptors: Array, rows: int, along: bool, groups: list[int], site: int) -> Array:
        """A or B of every warpgroup as (warpgroups, rows, 16) in fp32."""
        batch, shared = self.batch, self.batch.shared
        places: list[Array] = []
        # Warpgroups of a CTA often share an operand.
        slots: dict[tuple[int, int], int] = {}
        which = []
        for q in groups:
            start = self.starts[q]
            row = start // batch.width
            descriptor = int(descriptors[start])
            which.append(slots.setdefault((row, descriptor), len(slots)))
            offsets = self._pattern(descriptor, rows, along)
            low, high = int(offsets.min()), int(offsets.max()) + 16
            if not shared.fits(low, high, start, site):  # type: ignore[attr-defined]
                offsets = np.clip(offsets, 0, shared.size - 16)
            at = shared.chunks(row, offsets)  # type: ignore[attr-defined]
            if self.hazards:
                shared.async_read(at, start, row, q % self.per_row, site, "wgmma")  # type: ignore[attr-defined]
            if which[-1] == len(places):
                places.append(at)
        got = shared.views[16][np.stack(places)]
        values = _floats(np.ascontiguousarray(got).view(np.uint16), form.kind)
        if len(places) < len(groups):
            values = values[which]
        if along:
            # 16 rows of k, each with the elements along m or n.
            return values.reshape(len(groups), 16, rows).transpose(0, 2, 1)
        return values.reshape(len(groups), rows, 16)

    def _pattern(self, descriptor: int, rows: int, along: bool) -> Array:
        """Byte offsets in the CTA's shared memory of the 16-byte elements of an operand, in ``_operand``'s order."""
        key = (descriptor, rows, 0, along)
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

    def commit(self, m: Mask, site: int) -> None:
        """wgmma.commit_group."""
        self.launch.tick += 1
        for q in self._whole(m, site):
            self.committed[q] += 1
            self.group_ticks[q].append(self.launch.tick)
        self.batch.shared.retag()

    def wait(self, pending: int, m: Mask) -> None:
        """wgmma.wait_group: all but the ``pending`` newest groups are complete."""
        batch = self.batch
        lanes = np.arange(batch.size) if m is None else batch.lanes(m)
        for q in distinct(self.of_lane[lanes]):
            done = int(self.committed[q]) - pending
            if done <= 0:
                continue
            self.retired[q] = max(int(self.retired[q]), done)
            if self.hazards:
                row, group = divmod(int(q), self.per_row)
                column = batch.clocks.wgmma + int(batch.rank[row]) * self.per_row + group
                warps = distinct(batch.warp[lanes[self.of_lane[lanes] == q]])
                known = batch.clocks.known
                known[row, warps, column] = np.maximum(known[row, warps, column], self.group_ticks[q][done - 1])

    # --- setmaxnreg ---

    def set_registers(self, count: int, more: bool, m: Mask, site: int) -> None:
        """setmaxnreg.inc (``more``) or .dec: a warpgroup's registers per thread."""
        batch = self.batch
        lanes = np.arange(batch.size) if m is None else batch.lanes(m)
        if not 24 <= count <= 256 or count % 8:
            batch.report_lanes("registers", f"setmaxnreg {count}: multiples of 8 from 24 to 256", site, lanes)
        for q in distinct(self.of_lane[lanes]):
            before = self.limits[int(q)][-1][0] if int(q) in self.limits else self.entry_registers()
            if count < before if more else count > before:
                what = f"setmaxnreg.{'inc' if more else 'dec'} to {count} where a thread has {before} registers"
                batch.report_lanes("registers", what, site, lanes)
            warps = len(distinct(batch.warp[lanes[self.of_lane[lanes] == q]]))
            self.limits.setdefault(int(q), []).append((count, site))
            self.limit_warps[int(q)] = self.limit_warps.get(int(q), 0) + warps

    def entry_registers(self) -> int:
        """Registers per thread that ptxas can count on at entry."""
        attributes = self.launch.compiled.attributes
        fixed = attributes.get("maxnreg")
        if fixed:
            return fixed[0]
        blocks = (attributes.get("minnctapersm") or (1,))[0]
        limit = attributes.get("maxntid") or attributes.get("reqntid")
        threads = int(np.prod(limit)) if limit else self.launch.threads
        per = self.launch.device.registers_per_sm // blocks // (-(-threads // 128) * 128)
        return min(255, per // 8 * 8)

    def exited(self, row: int) -> None:
        """A CTA has ended: did its warpgroups' registers fit, and was every setmaxnreg executed by whole warpgroups?"""
        batch = self.batch
        mine = {q: steps for q, steps in self.limits.items() if q // self.per_row == row}
        if not mine:
            return
        for q, steps in mine.items():
            warps = min(4, self.warps - 4 * (q % self.per_row))
            if self.limit_warps[q] != warps * len({site for _, site in steps}) and self.limit_warps[q] % warps:
                batch.report(
                    "registers",
                    f"setmaxnreg was executed by {self.limit_warps[q]} of {warps} warps of a warpgroup",
                    steps[0][1], row, (),
                )  # fmt: skip
        entry = self.entry_registers()
        pool = entry * self.per_row
        final = [mine[q][-1][0] if q in mine else entry for q in range(row * self.per_row, (row + 1) * self.per_row)]
        if sum(final) > pool:
            worst = max(mine, key=lambda q: mine[q][-1][0])
            batch.report(
                "registers",
                f"setmaxnreg waits for ever: the warpgroups want {' + '.join(map(str, final))} registers per thread, "
                f"the CTA has {self.per_row} * {entry} = {pool}",
                mine[worst][-1][1], row, (),
            )  # fmt: skip


def _floats(raw: Array, kind: str) -> Array:
    if kind == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view(np.float16).astype(np.float32)
