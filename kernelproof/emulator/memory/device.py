"""Executes the global accesses of a batch's threads, with checks of bounds, races and order (PTX ISA, "ld", "st",
"fence", "griddepcontrol", "discard")."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernelproof.emulator.memory.arena import Buffer
from kernelproof.emulator.memory.device_flags import DeviceFlags
from kernelproof.emulator.memory.device_hazards import DeviceHazards
from kernelproof.emulator.memory.device_state import DeviceState
from kernelproof.emulator.memory.global_access import GlobalAccess
from kernelproof.emulator.memory.places import ROW, Form, Places, Rows, put, take
from kernelproof.emulator.memory.shared import SharedMemory
from kernelproof.emulator.state.arrays import MOVER, SHIFT, Array, Mask, distinct, equal_bits
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.scopes import CHECKED, CONSTANT, ORDERS, READ_ONLY, Scope
from kernelproof.emulator.state.warp_clocks import WarpClocks

# Width in bytes -> an element whose bytes are all 1.
_ONES = {width: np.frombuffer(b"\1" * 16, kind)[0] for width, kind in MOVER.items()}
# A buffer, and which elements of an access lie in it (None: all).
BufferPart = tuple[Buffer, Array | None]


class DeviceAccess(NamedTuple):
    """Where lanes (None: all) access global memory. ``offset``: in the arena, per lane. ``places``: the buffers.
    ``form``: how the offsets lie in memory; SCATTERED if there are several buffers. ``elements``: the offsets in units
    of an access's width."""

    lanes: Array | None
    offset: Array
    places: list[BufferPart]
    form: Form
    elements: Places


class DeviceMemory:
    """Global accesses of the lanes of a batch. Addresses are uint64, one per lane.

    Most warps access consecutive elements. Such accesses are recognised first (``Form``), and are executed as one slice
    or by rows.
    """

    def __init__(self, batch: BatchState, clocks: WarpClocks, state: DeviceState, shared: SharedMemory) -> None:
        self.batch, self.clocks, self.state, self.shared = batch, clocks, state, shared
        self.launch, self.arena, self.counters = batch.launch, state.arena, batch.launch.counters
        self.hazards = DeviceHazards(batch, clocks, state)
        self.flags = DeviceFlags(batch, clocks, state.order)
        # The launch may overlap the previous one, so global data must not be touched before griddepcontrol.wait.
        self.needs_grid_wait = state.overlapping and batch.launch.options.hazards
        self.targets = state.targets if batch.launch.options.hazards else {}
        # The last packed access by all lanes: addresses, width and location. A kernel that updates an array in place
        # passes the same address array again.
        self._last_packed = (np.zeros(0, np.uint64), 0, DeviceAccess(None, batch.everyone, [], Form.PACKED, slice(0)))
        # The buffer of the last load.
        self.last_read: Buffer | None = None
        # Per row and warp: the tick of its last griddepcontrol.wait, 0 if it has executed none.
        self.waited: Array = np.zeros((batch.count, batch.warps_per_cta), np.int64)

    # --- programmatic dependent launch ---

    def grid_wait(self, m: Mask) -> None:
        """griddepcontrol.wait by the lanes of ``m``."""
        if self.needs_grid_wait:
            self.launch.tick += 1
            lanes = self.batch.lanes(m)
            self.waited[self.batch.row_of[lanes], self.batch.warp[lanes]] = self.launch.tick

    def check_grid_wait(self, lanes: Array | None, offset: Array, site: int) -> None:
        """Report global accesses that may happen before the previous launch has ended. ``offset``: in the arena."""
        if not self.needs_grid_wait:
            return
        if lanes is None:
            lanes = self.batch.everyone
        rows, warps = self.batch.row_of[lanes], self.batch.warp[lanes]
        bad = self.waited[rows, warps] == 0
        for i in np.flatnonzero(bad):
            # Another warp's wait suffices if a barrier orders it before this access.
            row, warp = int(rows[i]), int(warps[i])
            waited = self.waited[row]
            horizon = self.clocks.horizon(np.full(len(waited), row), np.full(len(waited), warp), np.arange(len(waited)))
            bad[i] = not ((waited > 0) & (horizon > waited)).any()
        if bad.any():
            self.batch.report_lanes(
                "grid-dependency",
                "touches global memory before griddepcontrol.wait, in a launch that may overlap the one before",
                site,
                lanes[bad],
                int(offset[bad][0]) + self.arena.base,
            )

    # --- places ---

    def locate(self, address: Array, width: int, m: Mask, site: int) -> DeviceAccess | None:
        """Locate an access. Invalid lanes are reported and left out; None if no lane remains."""
        # Arrays of registers never change in place, so the same array means the same addresses.
        if m is None and address is self._last_packed[0] and width == self._last_packed[1]:
            access = self._last_packed[2]
            self._check_target(access.places[0][0], None, access.offset, width, site)
            return access
        addresses, lanes = address, None
        if m is not None:
            lanes = self.batch.lanes(m)
            if lanes.size == 0:
                return None
            address = address[lanes]
        arena = self.arena
        offset = (address - np.uint64(arena.base)).view(np.int64)
        form = self._form(lanes, offset, width)
        # A head is the first lane of ``step`` lanes with consecutive elements, and has their lowest address. So it is
        # enough to check bounds and alignment of heads.
        step = {Form.PACKED: len(offset), Form.ROWS: ROW, Form.SCATTERED: 1}[form]
        heads = offset[::step]
        low, high = int(heads.min()), int(heads.max()) + step * width
        buffer = arena.find(low) if low >= 0 else None
        if buffer is None or high > buffer.end or int(np.bitwise_or.reduce(heads)) & (width - 1):
            return self._locate_each(lanes, offset, width, site)
        self._check_target(buffer, lanes, offset, width, site)
        elements: Places = heads >> SHIFT[width]
        if form is Form.PACKED:
            elements = slice(low >> SHIFT[width], (low >> SHIFT[width]) + step)
        elif form is Form.ROWS:
            elements = Rows(heads >> SHIFT[width])
        access = DeviceAccess(lanes, offset, [(buffer, None)], form, elements)
        if form is Form.PACKED and m is None:
            self._last_packed = addresses, width, access
        return access

    def _form(self, lanes: Array | None, offset: Array, width: int) -> Form:
        """How the lanes' offsets lie in memory. Cheap tests of the first and last lane come before those of all
        lanes."""
        # ``ramp`` is 0, width, 2 * width, ...: the offsets of consecutive elements from the first.
        first, count = int(offset[0]), len(offset)
        ramp = self.batch.identities.ramp(width)
        if int(offset[-1]) - first == (count - 1) * width and (
            lanes is None or int(lanes[-1]) - int(lanes[0]) == count - 1
        ):
            return Form.PACKED if (offset - ramp[:count] == first).all() else Form.SCATTERED
        if count % ROW or int(offset[ROW - 1]) - first != (ROW - 1) * width:
            return Form.SCATTERED
        by_row = offset.reshape(-1, ROW)
        are_rows = bool((by_row - ramp[:ROW] == by_row[:, :1]).all())
        return Form.ROWS if are_rows else Form.SCATTERED

    def _check_target(self, buffer: Buffer, lanes: Array | None, offset: Array, width: int, site: int) -> None:
        """Report an access that lands in another buffer than those from which its address is computed."""
        targets = self.targets.get(site)
        if targets is None or buffer in targets:
            return
        address = int(offset[0]) + self.arena.base
        expected = " or ".join(self.arena.label(target) for target in targets[:3])
        text = f"{width}-byte access through a pointer into {expected}, which lands in another buffer"
        accessing = self.batch.everyone if lanes is None else lanes
        self.batch.report_lanes("another-buffer", text, site, accessing, address)

    def _locate_each(self, lanes: Array | None, offset: Array, width: int, site: int) -> DeviceAccess | None:
        """The slow path of ``locate``: several buffers, or invalid lanes."""
        arena = self.arena
        starts = np.array(arena.starts, np.int64)
        ends = np.array([b.end for b in arena.buffers], np.int64)
        number = np.searchsorted(starts, offset, side="right") - 1
        if len(starts):
            outside = (number < 0) | (offset + width > ends[np.maximum(number, 0)])
        else:
            outside = np.ones(len(offset), bool)
        misaligned = (offset & (width - 1)) != 0
        bad = outside | misaligned
        if bad.any():
            if lanes is None:
                lanes = self.batch.everyone
            for wrong, kind in ((outside & ~misaligned, "global-out-of-bounds"), (misaligned, "global-misaligned")):
                if wrong.any():
                    address = int(offset[np.flatnonzero(wrong)[0]]) + arena.base
                    text = f"{width}-byte access"
                    self.batch.report_lanes(kind, text, site, lanes[wrong], address)
            lanes, offset, number = lanes[~bad], offset[~bad], number[~bad]
            if lanes.size == 0:
                return None
        places: list[BufferPart] = [(arena.buffers[int(i)], np.flatnonzero(number == i)) for i in np.unique(number)]
        for buffer, part in places:
            self._check_target(buffer, part if lanes is None else lanes[part], offset[part], width, site)
        return DeviceAccess(lanes, offset, places, Form.SCATTERED, offset >> SHIFT[width])

    def require_aligned(self, address: Array, width: int, m: Mask, site: int) -> None:
        """Report addresses that are no multiple of ``width``."""
        lanes = self.batch.lanes(m)
        misaligned = (address[lanes] & np.uint64(width - 1)) != 0
        if misaligned.any():
            first_address = int(address[lanes[misaligned][0]])
            text = f"{width}-byte access"
            self.batch.report_lanes("global-misaligned", text, site, lanes[misaligned], first_address)

    def discard(self, address: Array, m: Mask, site: int) -> None:
        """discard.L2: 128 bytes per lane become undefined until they are written again."""
        access = self.locate(address, 128, m, site)
        if access is None:
            return
        for buffer, part in access.places:
            lanes, offsets = self._part(access.lanes, access.offset, part)
            self.hazards.check_allowed(GlobalAccess(buffer, lanes, offsets, 128, site))
            if buffer.written is None:
                buffer.written = np.ones(buffer.nbytes, np.uint8)
            for start in (offsets - buffer.start).tolist():
                buffer.written[start : start + 128] = 0
                buffer.bytes()[start : start + 128] = self.launch.poison

    # --- accesses ---

    def load(self, address: Array, width: int, m: Mask, site: int, strong: int = 0) -> Array:
        """Global load of ``width`` bytes per lane. ``strong``: the load's strength, see ``state.scopes``; 0: weak."""
        read_only, constant = strong == READ_ONLY, strong == CONSTANT
        if read_only or constant:
            strong = 0
        access = self.locate(address, width, m, site)
        if access is None:
            return self.batch.poison(width)
        lanes, offset, places, form, elements = access
        if self.needs_grid_wait and not constant:
            self.check_grid_wait(lanes, offset, site)
        if self.counters is not None:
            self.counters.memory("ld.global", self.batch.size, offset, lanes, width)
        self.last_read = places[-1][0]
        for buffer, part in places:
            if buffer.written is not None or buffer.role != "input":
                buffer_access = GlobalAccess(buffer, *self._part(lanes, offset, part), width, site, strong, form)
                self.hazards.before_read(buffer_access)
                if read_only:
                    self.hazards.before_constant_read(buffer_access)
        values = take(self.arena.views[width], elements)
        if strong and not strong & CHECKED and self.flags.active:
            values = self.flags.read(lanes, offset, strong, site, values)
        if form is Form.PACKED and lanes is None:
            return values.copy()
        return values if lanes is None else self.batch.spread(values, lanes, width)

    def store(self, address: Array, value: Array, width: int, m: Mask, site: int, strong: int = 0) -> None:
        """Global store. ``strong``: the store's strength, see ``state.scopes``; 0: weak."""
        access = self.locate(address, width, m, site)
        if access is None:
            return
        lanes, offset, places, form, elements = access
        if self.needs_grid_wait:
            self.check_grid_wait(lanes, offset, site)
        if lanes is not None:
            value = value[lanes]
        if self.counters is not None:
            self.counters.memory("st.global", self.batch.size, offset, lanes, width)
        for buffer, part in places:
            buffer_access = GlobalAccess(buffer, *self._part(lanes, offset, part), width, site, strong, form)
            self.hazards.before_write(buffer_access, value if part is None else value[part])
            self.mark(buffer_access)
        view = self.arena.views[width]
        if strong and self.flags.flags_are_read and (self.flags.active or strong & ORDERS):
            old = take(view, elements) if self.flags.observed else None
            self.flags.write(lanes, offset, strong, site, old, value)
        self.launch.count_store(lambda: bool(equal_bits(take(view, elements), value).all()))
        put(view, elements, value)

    def touch(self, address: Array, width: int, m: Mask, site: int, write: int) -> tuple[Array, Array] | None:
        """Check and tag a read-modify-write, which the caller then executes and passes to ``flags``. Returns (lanes,
        element index), None if no lane remains. ``write``: the strength of its store."""
        access = self.locate(address, width, m, site)
        if access is None:
            return None
        lanes, offset, places = access.lanes, access.offset, access.places
        if lanes is None:
            lanes = self.batch.everyone
        if self.needs_grid_wait:
            self.check_grid_wait(lanes, offset, site)
        if self.counters is not None:
            self.counters.memory("atom.global", self.batch.size, offset, lanes, width)
        for buffer, part in places:
            buffer_access = GlobalAccess(buffer, *self._part(lanes, offset, part), width, site, write)
            self.hazards.before_atomic(buffer_access)
            self.mark(buffer_access)
        return lanes, offset >> SHIFT[width]

    def _part(self, lanes: Array | None, offset: Array, part: Array | None) -> tuple[Array | None, Array]:
        """The lanes and offsets of a ``BufferPart``."""
        if part is None:
            return lanes, offset
        return (self.batch.everyone if lanes is None else lanes)[part], offset[part]

    def mark(self, access: GlobalAccess) -> None:
        """Record that the bytes of a write have been written."""
        written, width = access.buffer.written, access.width
        if written is None:
            return
        if access.form is not Form.SCATTERED:
            put(written, access.bytes, 1)
            return
        relative = access.offset - access.buffer.start
        # Accesses are aligned, so marks can be set by element, unless the buffer's size is no multiple of the width.
        if len(written) % width == 0:
            written.view(MOVER[width])[relative >> SHIFT[width]] = _ONES[width]
        else:
            for k in range(width):
                written[relative + k] = 1

    # --- flags and fences ---

    def fence_proxy(self, m: Mask) -> None:
        """fence.proxy.async that covers global memory, by the lanes of ``m``."""
        if self.launch.options.hazards:
            self.launch.tick += 1
            for row in distinct(self.batch.row_of[self.batch.lanes(m)]).tolist():
                self.state.proxy_fences[int(self.batch.ctas[row])] = self.launch.tick

    def fence(self, m: Mask, scope: Scope, acquire: bool, release: bool, sequential: bool, restricted: bool) -> None:
        """A fence of all memory. Arguments: see ``SharedFlags.fence``."""
        if self.launch.options.hazards:
            if self.flags.flags_are_read:
                self.flags.fence(m, scope, acquire, release, sequential)
            self.shared.fence(m, scope, acquire, release, sequential, restricted)
