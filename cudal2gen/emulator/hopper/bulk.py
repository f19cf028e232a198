"""Bulk copies: tensor maps, boxes with swizzle and zero fill, runs of bytes, multicast, stores and their groups."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cudal2gen.emulator.hopper.cluster_memory import RANK_SHIFT
from cudal2gen.emulator.memory.arena import SHIFT, Memory
from cudal2gen.emulator.memory.shared import WINDOW_START

if TYPE_CHECKING:
    from cudal2gen.emulator.hopper.mbarrier import MBarrier
    from cudal2gen.emulator.machine.batch import Batch

Array = NDArray[Any]
Mask = Array | None
MAGIC = b"TILEDMAP"
MAP_BYTES = 128
_LAYOUT = struct.Struct("<8s2iQ5Q5Q5H5H4B")
# CUtensorMapDataType -> bytes.
ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 4, 11: 4, 12: 4}
# CUtensorMapSwizzle -> bytes of a row of the pattern.
SWIZZLE_SPAN = {0: 16, 1: 32, 2: 64, 3: 128}


class TensorMap(NamedTuple):
    """What cuTensorMapEncodeTiled was given. ``strides`` in bytes, of dimensions 1 and up; innermost first."""

    dtype: int
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    interleave: int
    swizzle: int
    promotion: int
    fill: int

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of a box in shared memory."""
        out = self.item
        for extent in self.box:
            out *= extent
        return out

    def encode(self) -> bytes:
        """The 128 opaque bytes."""

        def five(values: tuple[int, ...]) -> list[int]:
            return [*values, 0, 0, 0, 0, 0][:5]

        raw = _LAYOUT.pack(
            MAGIC, self.dtype, len(self.dims), self.address, *five(self.dims), *five(self.strides), *five(self.box),
            *five(self.steps), self.interleave, self.swizzle, self.promotion, self.fill,
        )  # fmt: skip
        return raw.ljust(MAP_BYTES, b"\0")


def decode(raw: bytes) -> TensorMap | None:
    """The map behind 128 bytes, None where they are none."""
    if raw[:8] != MAGIC:
        return None
    f = _LAYOUT.unpack(raw[: _LAYOUT.size])
    rank = f[2]
    return TensorMap(
        f[1],
        f[3],
        f[4 : 4 + rank],
        f[9 : 9 + rank - 1],
        f[14 : 14 + rank],
        f[19 : 19 + rank],
        f[24],
        f[25],
        f[26],
        f[27],
    )


def refuse(map_: TensorMap) -> str:
    """Why the driver would not encode this map; empty if it would."""
    rank = len(map_.dims)
    if not 1 <= rank <= 5:
        return f"rank {rank}, allowed are 1 to 5"
    if map_.dtype not in ELEMENT_BYTES:
        return f"data type {map_.dtype} is unknown"
    if map_.swizzle not in SWIZZLE_SPAN or map_.interleave not in (0, 1, 2) or map_.fill not in (0, 1):
        return "interleave, swizzle or fill out of range"
    align = 32 if map_.interleave == 2 else 16
    if map_.address % align or not map_.address:
        return f"address {map_.address:#x} is no multiple of {align}"
    for i, extent in enumerate(map_.dims):
        if not 1 <= extent <= 1 << 32:
            return f"extent {extent} of dimension {i}, allowed are 1 to 2^32"
    for i, stride in enumerate(map_.strides):
        if stride % align or stride >= 1 << 40:
            return f"stride of {stride} bytes of dimension {i + 1}: a multiple of {align} below 2^40 is needed"
    for i, extent in enumerate(map_.box):
        if not 1 <= extent <= 256:
            return f"box extent {extent} of dimension {i}, allowed are 1 to 256"
    for i, step in enumerate(map_.steps):
        if not 1 <= step <= 8:
            return f"element stride {step} of dimension {i}, allowed are 1 to 8"
    inner = map_.box[0] * map_.item
    if map_.interleave == 0 and inner % 16:
        return f"the box's inner dimension has {inner} bytes, no multiple of 16"
    if map_.swizzle and inner > SWIZZLE_SPAN[map_.swizzle]:
        return f"the box's inner dimension has {inner} bytes, the swizzle spans {SWIZZLE_SPAN[map_.swizzle]}"
    if map_.interleave == 2 and map_.swizzle != 1:
        return "interleave 32B needs swizzle 32B"
    return ""


class Box(NamedTuple):
    """Where a box lies in global memory: arena offset of every row (-1: outside the tensor), the bytes of a row,
    and which of these [low, high) are inside."""

    rows: Array
    inner: int
    low: int
    high: int


def place(map_: TensorMap, coordinates: list[int], memory: Memory) -> Box:
    """The rows of a box, outermost slowest."""
    rows: Array = np.full(1, map_.address - memory.base, np.int64)
    valid: Array = np.ones(1, bool)
    for d in range(len(map_.dims) - 1, 0, -1):
        index = coordinates[d] + np.arange(map_.box[d]) * map_.steps[d]
        rows = (rows[:, None] + index * map_.strides[d - 1]).reshape(-1)
        valid = (valid[:, None] & (index >= 0) & (index < map_.dims[d])).reshape(-1)
    first, inner = coordinates[0] * map_.item, map_.box[0] * map_.item
    low = min(max(0, -first), inner)
    high = max(low, min(inner, map_.dims[0] * map_.item - first))
    return Box(np.where(valid, rows + first, -1), inner, low, high)


class Bulk:
    """The bulk copies of a batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.launch = batch, batch.launch
        self.hazards = batch.launch.options.hazards
        self.maps: dict[bytes, TensorMap | None] = {}
        # Per lane: ticks of the stores not yet committed, and of committed groups that still read shared memory.
        self.open: dict[int, list[int]] = {}
        self.groups: dict[int, list[list[int]]] = {}
        self.sites: dict[int, int] = {}

    # --- tensor maps ---

    def _map(self, address: int, lane: int, site: int) -> TensorMap | None:
        memory = self.launch.memory
        if address >> 56 == 3:
            raw = self.launch.params[address & 0xFFFFFFFF :][:MAP_BYTES]
        else:
            at = address - memory.base
            raw = b"" if memory.find(at) is None else memory.data[at : at + MAP_BYTES].tobytes()
        if raw not in self.maps:
            self.maps[raw] = decode(raw)
        out = self.maps[raw]
        if out is None or address % 64:
            self.batch.report_lanes(
                "tensor-map", f"no tensor map of cuTensorMapEncodeTiled lies at {address:#x}", site, np.array([lane])
            )
            return None
        if out.interleave or any(step != 1 for step in out.steps):
            from cudal2gen.emulator.state.hazards import EmulatorError

            raise EmulatorError("tensor maps with interleave or element strides are not modelled")
        return out

    def _chunks(self, offset: int, nbytes: int, span: int) -> Array:
        """Byte offsets in shared memory of the 16-byte elements of a box."""
        linear = offset + WINDOW_START + np.arange(0, nbytes, 16)
        linear ^= ((linear >> 7) & (span // 16 - 1)) << 4
        return linear - WINDOW_START

    def _check_box(self, map_: TensorMap, box: Box, lane: int, site: int) -> bool:
        """Do the rows lie inside one buffer? Reports if not."""
        memory = self.launch.memory
        inside = box.rows[box.rows != -1]
        if inside.size == 0 or box.low >= box.high:
            return False
        low, high = int(inside.min()) + box.low, int(inside.max()) + box.high
        buffer = memory.find(low) if 0 <= low < memory.capacity else None
        if buffer is None or high > buffer.end:
            at = map_.address if buffer is None else memory.base + high - 1
            self.batch.report_lanes(
                "global-out-of-bounds",
                f"the tensor map reaches {memory.describe(at)}",
                site, np.array([lane]), at,
            )  # fmt: skip
            return False
        return True

    def _read(self, map_: TensorMap, coordinates: list[int], lane: int, site: int) -> Array:
        """A box as 16-byte elements, zero outside the tensor."""
        memory = self.launch.memory
        box = place(map_, coordinates, memory)
        out = np.zeros((len(box.rows), box.inner), np.uint8)
        if not self._check_box(map_, box, lane, site):
            return out.reshape(-1).view(memory.views[16].dtype)
        there = np.flatnonzero(box.rows != -1)
        rows = box.rows[there]
        if (box.low | box.high) & 15 == 0 and int(rows[0]) & 15 == 0:
            chunks = np.arange(box.low // 16, box.high // 16)
            wide = out.view(memory.views[16].dtype)
            wide[there[:, None], chunks] = memory.views[16][(rows >> 4)[:, None] + chunks]
        else:
            inside = np.arange(box.low, box.high)
            out[there[:, None], inside] = memory.data[rows[:, None] + inside]
        self._global(rows, box, lane, site, write=False)
        return out.reshape(-1).view(memory.views[16].dtype)

    def _global(self, rows: Array, box: Box, lane: int, site: int, write: bool) -> None:
        """Bookkeeping of the global side of a copy."""
        memory, device = self.launch.memory, self.batch.memory
        device.guard(np.array([lane]), site)
        first = int(rows[0]) + box.low
        buffer = memory.find(first)
        assert buffer is not None
        if not write and buffer.written is None and buffer.role == "input":
            return
        width = 16
        while (first | (box.high - box.low) | int(np.bitwise_or.reduce(rows + box.low))) & (width - 1):
            width //= 2
        offset = (rows[:, None] + np.arange(box.low, box.high, width)).reshape(-1)
        lanes = np.full(len(offset), lane)
        if write:
            device.before_write(buffer, lanes, offset, width, site, None, False)
            device.mark(buffer, offset, width)
        else:
            device.before_read(buffer, lanes, offset, width, site, False)

    # --- loads ---

    def load_tensor(
        self, address: Array, coordinates: list[Array], to: Array, bar: Array, ranks: Array | None, m: Mask, site: int
    ) -> None:
        """cp.async.bulk.tensor to shared memory, of this CTA or (``ranks``: a bit per CTA) several of the cluster."""
        for lane in self.batch.lanes(m) if m is not None else np.arange(self.batch.size):
            lane = int(lane)
            map_ = self._map(int(address[lane]), lane, site)
            if map_ is None:
                continue
            data = self._read(map_, [int(c[lane].view(np.int32)) for c in coordinates], lane, site)
            self._deliver(data, int(to[lane]), int(bar[lane]), None if ranks is None else int(ranks[lane]),
                          SWIZZLE_SPAN[map_.swizzle], 128, lane, site)  # fmt: skip

    def load(
        self, source: Array, size: Array, to: Array, bar: Array, ranks: Array | None, m: Mask, site: int, shared: bool
    ) -> None:
        """cp.async.bulk of a run of bytes from global memory (or this CTA's shared memory) to shared memory."""
        memory = self.launch.memory
        for lane in self.batch.lanes(m) if m is not None else np.arange(self.batch.size):
            lane = int(lane)
            count = int(size[lane])
            start = int(source[lane])
            if count % 16 or start % 16 or count == 0:
                self.batch.report_lanes(
                    "shared-misaligned", f"bulk copy of {count} bytes from {start:#x}: multiples of 16 needed", site,
                    np.array([lane]),
                )  # fmt: skip
                continue
            origin = None
            if shared:
                origin = self._shared_places(start, count, lane, site)
                if origin is None:
                    continue
                data = self.batch.shared.views[16][origin]
            else:
                at = start - memory.base
                buffer = memory.find(at)
                if buffer is None or at + count > buffer.end:
                    self.batch.report_lanes(
                        "global-out-of-bounds", f"bulk copy of {count} bytes: {memory.describe(start)}", site,
                        np.array([lane]), start,
                    )  # fmt: skip
                    continue
                data = memory.views[16][at >> 4 : (at + count) >> 4].copy()
                self._global(np.array([at]), Box(np.array([at]), count, 0, count), lane, site, write=False)
            chosen = None if ranks is None else int(ranks[lane])
            self._deliver(data, int(to[lane]), int(bar[lane]), chosen, 16, 16, lane, site, origin)

    def _shared_places(self, start: int, count: int, lane: int, site: int) -> Array | None:
        """16-byte elements of a run of bytes in the lane's CTA."""
        shared: Any = self.batch.shared
        offset = start - WINDOW_START
        if not shared.fits(offset, offset + count, lane, site):
            return None
        at: Array = shared.chunks(int(self.batch.row_of[lane]), offset + np.arange(0, count, 16))
        return at

    def _deliver(
        self,
        data: Array,
        to: int,
        bar_address: int,
        ranks: int | None,
        span: int,
        align: int,
        lane: int,
        site: int,
        origin: Array | None = None,
    ) -> None:
        """Send 16-byte elements to shared memory. ``origin``: where in the lane's own they come from."""
        batch = self.batch
        shared: Any = batch.shared
        barriers = batch.barriers
        own = int(batch.row_of[lane])
        first = own - int(batch.rank[own])
        low = (1 << RANK_SHIFT) - 1
        offset, bar_offset = (to & low) - WINDOW_START, (bar_address & low) - WINDOW_START
        if ranks is None:
            rank = (to >> RANK_SHIFT) - 1
            rows = [own if rank < 0 else first + rank]
        else:
            rows = [first + r for r in range(16) if ranks >> r & 1]
        if (offset + WINDOW_START) % align:
            batch.report_lanes(
                "shared-misaligned",
                f"bulk copy to shared offset {offset}: no multiple of {align}",
                site,
                np.array([lane]),
                offset,
            )
            return
        if self.launch.counters is not None:
            self.launch.counters.bulk_boxes += 1
            self.launch.counters.bulk_load_bytes += data.size * 16
            self.launch.counters.bulk_delivered_bytes += data.size * 16 * len(rows)
        for row in rows:
            if row - first >= batch.cluster_size:
                batch.report_lanes(
                    "cluster", f"names CTA {row - first} of a cluster of {batch.cluster_size}", site, np.array([lane])
                )
                continue
            if not shared.fits(offset, offset + data.size * 16, lane, site):
                continue
            if row != own and self.hazards:
                barriers.visit(row, np.array([lane]), site, remember=False)
            bar = barriers.find(row, bar_offset, np.array([lane]), site, asynchronous=True)
            if bar is None:
                continue
            if origin is not None and self.hazards:
                # Whoever waits for the copy knows that its source has been read.
                reader = int(batch.clocks.groups + batch.warp[lane])
                shared.async_read(origin, lane, own, reader, site, "a bulk copy", bar.column)
            at = shared.chunks(row, self._chunks(offset, data.size * 16, span))
            self._fly(at, data, 16, bar, lane, row, site)

    def _fly(self, at: Array, data: Array, width: int, bar: MBarrier, lane: int, row: int, site: int) -> None:
        """``data`` is under way to elements of ``width`` bytes, and lands with the mbarrier's phase."""
        shared: Any = self.batch.shared
        shared.async_write(at, lane, row, bar.column, site, width)

        def land(tick: int) -> None:
            shared.land(at, data, bar.column, tick, width)

        self.batch.barriers.deliver(bar, data.size * width, land)

    def store_async(self, address: Array, value: Array, width: int, bar_address: Array, m: Mask, site: int) -> None:
        """st.async of ``width`` bytes per lane."""
        batch = self.batch
        shared: Any = batch.shared
        low = np.uint32((1 << RANK_SHIFT) - 1)
        everyone = batch.lanes(m) if m is not None else np.arange(batch.size)
        # The mbarrier's phase says that it has arrived.
        lanes, rows = batch.barriers.rows(address[everyone], everyone, site, remember=False)
        for lane, row in zip(lanes, rows, strict=True):
            lane, row = int(lane), int(row)
            offset, place = int(address[lane] & low) - WINDOW_START, int(bar_address[lane] & low) - WINDOW_START
            bar = batch.barriers.find(row, place, np.array([lane]), site)
            if bar is None or not shared.fits(offset, offset + width, lane, site):
                continue
            if offset % width:
                batch.report_lanes(
                    "shared-misaligned", f"st.async of {width} bytes to shared offset {offset}", site, np.array([lane])
                )
                continue
            at = np.array([(offset + row * shared.stride) >> SHIFT[width]])
            self._fly(at, value[lane : lane + 1].copy(), width, bar, lane, row, site)

    # --- stores ---

    def _remember(self, lane: int, at: Array, row: int, site: int) -> None:
        """A store of this lane reads shared memory until its group has been waited for."""
        batch = self.batch
        shared: Any = batch.shared
        reader = int(batch.clocks.groups + batch.warp[lane])
        shared.async_read(at, lane, row, reader, site, "a bulk store")
        self.open.setdefault(lane, []).append(self.launch.tick)
        self.sites[lane] = site

    def store_tensor(
        self, address: Array, coordinates: list[Array], source: Array, reduction: str, m: Mask, site: int
    ) -> None:
        """cp.async.bulk.tensor (or cp.reduce) from shared to global memory."""
        batch, memory = self.batch, self.launch.memory
        shared: Any = batch.shared
        done: dict[tuple[int, ...], int] = {}
        for lane in batch.lanes(m) if m is not None else np.arange(batch.size):
            lane = int(lane)
            # A warp whose lanes all name one box stores it once (CUTLASS has such code); each lane has its group.
            key = (lane >> 5, int(address[lane]), int(source[lane]), *(int(c[lane]) for c in coordinates))
            if done.setdefault(key, lane) != lane and not reduction:
                if self.hazards:
                    self.open.setdefault(lane, []).append(self.launch.tick)
                    self.sites[lane] = site
                continue
            map_ = self._map(int(address[lane]), lane, site)
            if map_ is None:
                continue
            row, offset = int(batch.row_of[lane]), int(source[lane]) - WINDOW_START
            if (offset + WINDOW_START) % 128:
                batch.report_lanes(
                    "shared-misaligned", f"bulk store from shared offset {offset}: no multiple of 128", site,
                    np.array([lane]), offset,
                )  # fmt: skip
                continue
            if not shared.fits(offset, offset + map_.nbytes, lane, site):
                continue
            at = shared.chunks(row, self._chunks(offset, map_.nbytes, SWIZZLE_SPAN[map_.swizzle]))
            if self.hazards:
                self._remember(lane, at, row, site)
            if self.launch.counters is not None:
                self.launch.counters.bulk_boxes += 1
                self.launch.counters.bulk_store_bytes += map_.nbytes
            box = place(map_, [int(c[lane].view(np.int32)) for c in coordinates], memory)
            if not self._check_box(map_, box, lane, site):
                continue
            there = np.flatnonzero(box.rows != -1)
            rows = box.rows[there]
            data = np.ascontiguousarray(shared.views[16][at]).view(np.uint8).reshape(-1, box.inner)[there]
            self._global(rows, box, lane, site, write=True)
            self._write(rows, box, data, reduction, map_)

    def _write(self, rows: Array, box: Box, data: Array, reduction: str, map_: TensorMap | None) -> None:
        memory = self.launch.memory
        self.launch.version += 1
        if reduction:
            assert map_ is not None
            kind = {6: np.float16, 7: np.float32, 2: np.uint32, 3: np.int32, 8: np.float64}.get(map_.dtype)
            if kind is None or reduction not in ("add", "min", "max"):
                from cudal2gen.emulator.state.hazards import EmulatorError

                raise EmulatorError(f"cp.reduce {reduction} on data type {map_.dtype} is not modelled")
            combine: Any = {"add": np.add, "min": np.minimum, "max": np.maximum}[reduction]
            for place_, new in zip(rows, data, strict=True):
                old = memory.data[place_ + box.low : place_ + box.high].view(kind)
                old[:] = combine(old, new[box.low : box.high].view(kind))
            return
        if (box.low | box.high) & 15 == 0 and int(rows[0]) & 15 == 0:
            chunks = np.arange(box.low // 16, box.high // 16)
            wide = np.ascontiguousarray(data).view(memory.views[16].dtype)
            memory.views[16][(rows >> SHIFT[16])[:, None] + chunks] = wide[:, chunks]
        else:
            inside = np.arange(box.low, box.high)
            memory.data[rows[:, None] + inside] = data[:, inside]

    def store(self, to: Array, source: Array, size: Array, m: Mask, site: int) -> None:
        """cp.async.bulk of a run of bytes from shared to global memory."""
        batch, memory = self.batch, self.launch.memory
        for lane in batch.lanes(m) if m is not None else np.arange(batch.size):
            lane = int(lane)
            count, start = int(size[lane]), int(to[lane])
            if count % 16 or start % 16 or int(source[lane]) % 16 or not count:
                batch.report_lanes(
                    "global-misaligned", f"bulk copy of {count} bytes to {start:#x}: multiples of 16 are needed", site,
                    np.array([lane]), start,
                )  # fmt: skip
                continue
            places = self._shared_places(int(source[lane]), count, lane, site)
            at = start - memory.base
            buffer = memory.find(at)
            if places is None:
                continue
            if self.hazards:
                self._remember(lane, places, int(batch.row_of[lane]), site)
            data: Array = batch.shared.views[16][places]
            if buffer is None or at + count > buffer.end:
                batch.report_lanes(
                    "global-out-of-bounds", f"bulk copy of {count} bytes: {memory.describe(start)}", site,
                    np.array([lane]), start,
                )  # fmt: skip
                continue
            box = Box(np.array([at]), count, 0, count)
            self._global(box.rows, box, lane, site, write=True)
            self._write(box.rows, box, data.view(np.uint8).reshape(1, -1), "", None)

    def commit(self, m: Mask) -> None:
        """cp.async.bulk.commit_group."""
        for lane in self.batch.lanes(m) if m is not None else np.arange(self.batch.size):
            lane = int(lane)
            opened = self.open.pop(lane, None)
            if opened is not None or lane in self.groups:
                self.groups.setdefault(lane, []).append(opened or [])

    def wait(self, pending: int, m: Mask) -> None:
        """cp.async.bulk.wait_group(.read): all but the ``pending`` newest groups have read their source."""
        batch = self.batch
        if not self.hazards:
            return
        self.launch.tick += 1
        done = []
        for lane in batch.lanes(m) if m is not None else np.arange(batch.size):
            groups = self.groups.get(int(lane))
            if groups is not None and len(groups) > pending:
                self.groups[int(lane)] = groups[len(groups) - pending :] if pending else []
                done.append(int(lane))
        for warp in {lane >> 5 for lane in done}:
            # Other lanes of the warp, and younger groups, may have stores under way.
            left = [
                tick
                for other in range(32 * warp, 32 * warp + 32)
                for group in (*self.groups.get(other, ()), self.open.get(other, ()))
                for tick in group
            ]
            row, index = divmod(warp, batch.clocks.warps)
            clock = np.zeros(batch.clocks.columns, np.int64)
            column = batch.clocks.bulk + int(batch.rank[row]) * batch.clocks.warps + index
            clock[column] = min(left, default=self.launch.tick)
            batch.clocks.acquire(np.array([lane for lane in done if lane >> 5 == warp]), clock)
        batch.shared.retag()

    def exited(self, row: int) -> None:
        """A CTA has ended: no bulk store may still read its shared memory."""
        batch = self.batch
        for lane in {*self.groups, *self.open}:
            if int(batch.row_of[lane]) == row and (any(self.groups.get(lane, ())) or self.open.get(lane)):
                batch.report(
                    "in-flight",
                    "the CTA exits while a bulk store may still read its shared memory "
                    "(cp.async.bulk.wait_group.read is missing)",
                    self.sites[lane], row, (int(batch.thread[lane]),),
                )  # fmt: skip
                return
