"""Executes and checks bulk copies of the PTX ISA: cp.async.bulk, cp.async.bulk.tensor and cp.reduce.async.bulk.

A load reads its source when it is issued, and its data lands when the phase of its mbarrier has been waited for. A
store writes when it is issued; its write counts as in flight, and its source as being read, until its group has been
waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.hopper.async_reads import Elements
from kernelproof.emulator.hopper.cluster_clocks import ClusterClocks
from kernelproof.emulator.hopper.cluster_memory import ClusterMemory
from kernelproof.emulator.hopper.map_proxy import MapProxy
from kernelproof.emulator.hopper.mbarrier import MBarriers
from kernelproof.emulator.hopper.peers import RANK_SHIFT, WITHIN, Peers
from kernelproof.emulator.hopper.tensor_map import (
    MAP_BYTES,
    SWIZZLE_SPAN,
    Box,
    TensorMap,
    decode,
    place,
    place_inside,
    refusal_of,
    swizzled,
)
from kernelproof.emulator.memory.device import DeviceMemory
from kernelproof.emulator.memory.global_access import GlobalAccess
from kernelproof.emulator.memory.shared import WINDOW_START
from kernelproof.emulator.state.arrays import MOVER, SHIFT, Array, Mask
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.reports import EmulatorError
from kernelproof.emulator.state.scopes import Scope, sized
from kernelproof.emulator.state.windows import SHIFT_TO_WINDOW, Window

# For cp.reduce: CUtensorMapDataType -> the element type, and name in PTX -> the operation.
_REDUCED_TYPES = {6: np.float16, 7: np.float32, 2: np.uint32, 3: np.int32, 8: np.float64}
_REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}


class Delivery(NamedTuple):
    """The destination of a bulk copy to shared memory. ``address``, ``bar_address``: per lane, the shared memory
    addresses of the data and of the mbarrier. ``ranks``: for multicast, per lane a mask with a bit for each CTA that
    receives the data; None without multicast. ``paired`` (cta_group::2): the mbarrier may also lie in the other CTA of
    the receiver's pair; its address says in which of the two."""

    address: Array
    bar_address: Array
    ranks: Array | None
    paired: bool = False


class StoredBox(NamedTuple):
    """A lane's store of the box at some coordinates of a tensor, from the address ``source`` in shared memory."""

    lane: int
    map_: TensorMap
    coordinates: list[int]
    source: int


class Bulk:
    """The bulk copies of a batch.

    Three mappings have the stores in flight of each lane. ``open_stores``: the ticks of stores that are in no group
    yet. ``groups``: for each group that was committed and not waited for, the ticks of its stores, oldest group first.
    ``writes``: for each group, its writes to global memory; the last entry is for stores that are in no group yet.
    ``writes`` may be longer than ``groups``, because a wait with ``.read`` ends the reads of a group and not its
    writes.
    """

    def __init__(
        self,
        batch: BatchState,
        clocks: ClusterClocks,
        peers: Peers,
        shared: ClusterMemory,
        mbarriers: MBarriers,
        device: DeviceMemory,
        map_proxy: MapProxy,
    ) -> None:
        self.batch, self.launch = batch, batch.launch
        self.clocks, self.peers, self.shared, self.mbarriers, self.device = clocks, peers, shared, mbarriers, device
        self.map_proxy, self.arena, self.counters = map_proxy, device.arena, batch.launch.counters
        self.hazards = batch.launch.options.hazards
        self.maps: dict[bytes, TensorMap | None] = {}
        # (offset, bytes, span) -> the result of ``tensor_map.swizzled``.
        self.swizzled_offsets: dict[tuple[int, int, int], Array] = {}
        self.open_stores: dict[int, list[int]] = {}
        self.groups: dict[int, list[list[int]]] = {}
        self.writes: dict[int, list[list[GlobalAccess]]] = {}
        # The instruction of each lane's last store.
        self.sites: dict[int, int] = {}

    def _lanes(self, m: Mask) -> Iterator[int]:
        """The running lanes of ``m``."""
        return iter(self.batch.lanes(m).tolist())

    # --- boxes ---

    def _map(self, address: int, lane: int, site: int) -> TensorMap | None:
        """The tensor map at a generic address (kernel parameter or global memory); None, and a report, if none is
        there."""
        if address >> SHIFT_TO_WINDOW == Window.PARAM:
            raw = self.device.state.parameters[address & 0xFFFFFFFF :][:MAP_BYTES]
        else:
            offset = address - self.arena.base
            buffer = self.arena.find(offset) if 0 <= offset < self.arena.capacity else None
            raw = b"" if buffer is None else self.arena.data[offset : offset + MAP_BYTES].tobytes()
            if buffer is not None and offset + MAP_BYTES <= buffer.end:
                self.map_proxy.use(buffer, offset, lane, site)
        # The content of a map is its key, so a map that a kernel edits in place is decoded anew.
        if raw not in self.maps:
            map_ = decode(raw)
            self.maps[raw] = None if map_ is None or refusal_of(map_) else map_
        out = self.maps[raw]
        if out is None or address % 64:
            text = f"there is no tensor map of cuTensorMapEncodeTiled at {address:#x}"
            self.batch.report_lane("tensor-map", text, site, lane)
            return None
        if out.interleave or any(step != 1 for step in out.steps):
            raise EmulatorError("tensor maps with interleave or element strides are not modelled")
        return out

    def _swizzled(self, offset: int, nbytes: int, span: int) -> Array:
        """The result of ``tensor_map.swizzled``, computed once for each combination of arguments."""
        key = (offset, nbytes, span)
        out = self.swizzled_offsets.get(key)
        if out is None:
            out = self.swizzled_offsets[key] = swizzled(offset, nbytes, span)
        return out

    def _check_box(self, map_: TensorMap, box: Box, lane: int, site: int) -> bool:
        """Does the box have bytes inside of the tensor, and do they lie in one buffer? Other buffers are reported."""
        inside = box.rows[box.rows != -1]
        if inside.size == 0 or box.low >= box.high:
            return False
        low, high = int(inside.min()) + box.low, int(inside.max()) + box.high
        buffer = self.arena.find(low) if 0 <= low < self.arena.capacity else None
        if buffer is None or high > buffer.end:
            address = map_.address if buffer is None else self.arena.base + high - 1
            text = f"the tensor map reaches {self.arena.describe(address)}"
            self.batch.report_lane("global-out-of-bounds", text, site, lane, address)
            return False
        return True

    def _read_box(self, map_: TensorMap, coordinates: list[int], lane: int, site: int) -> Array:
        """The content of a box as 16-byte elements; bytes outside of the tensor are zero."""
        inside = self._read_inside(map_, coordinates, lane, site)
        if inside is not None:
            return inside
        box = place(map_, coordinates, self.arena)
        out = np.zeros((len(box.rows), box.inner), np.uint8)
        if self._check_box(map_, box, lane, site):
            inside_rows = np.flatnonzero(box.rows != -1)
            rows = box.rows[inside_rows]
            if (box.low | box.high) & 15 == 0 and int(rows[0]) & 15 == 0:
                chunks = np.arange(box.low // 16, box.high // 16)
                out.view(MOVER[16])[inside_rows[:, None], chunks] = self.arena.views[16][(rows >> 4)[:, None] + chunks]
            else:
                inside = np.arange(box.low, box.high)
                out[inside_rows[:, None], inside] = self.arena.data[rows[:, None] + inside]
            self._touch_global(rows, box, lane, site, write=False)
        return out.reshape(-1).view(MOVER[16])

    def _read_inside(self, map_: TensorMap, coordinates: list[int], lane: int, site: int) -> Array | None:
        """Fast path: the content of a box that lies inside of its tensor and in an input, so that only bounds need a
        check; None for other boxes."""
        extent = place_inside(map_, coordinates, self.arena)
        if extent is None:
            return None
        first, stride, nbytes = extent
        buffer = self.arena.find(first) if 0 <= first < self.arena.capacity else None
        if buffer is None or first + nbytes > buffer.end or buffer.written is not None or buffer.role != "input":
            return None
        self.device.check_grid_wait(np.array([lane]), np.array([first]), site)
        shape = map_.box[1], map_.box[0] * map_.element_bytes // 16
        view: Array = np.ndarray(shape, MOVER[16], self.arena.data, first, (stride, 16))
        return view.copy().reshape(-1)

    def _touch_global(self, rows: Array, box: Box, lane: int, site: int, write: bool, reduced: int = 0) -> None:
        """Check and tag the accesses of a copy to global memory. ``rows``: the offsets of the box's rows in the arena.
        ``reduced``: the bytes of an element of a reduction, whose accesses are relaxed atomics of GPU scope (PTX ISA);
        0: no reduction."""
        device = self.device
        first = int(rows[0]) + box.low
        device.check_grid_wait(np.array([lane]), np.array([first]), site)
        buffer = self.arena.find(first)
        assert buffer is not None
        # A read of an input, which nobody may write, needs neither check nor tag.
        if not write and buffer.written is None and buffer.role == "input":
            return
        width = reduced or 16
        # Tags are for the widest accesses that are aligned in every row and divide a row's length.
        while (first | (box.high - box.low) | int(np.bitwise_or.reduce(rows + box.low))) & (width - 1):
            width //= 2
        offset = (rows[:, None] + np.arange(box.low, box.high, width)).reshape(-1)
        strong = sized(Scope.GPU, width, read_modify_write=True) if reduced else 0
        access = GlobalAccess(buffer, np.full(len(offset), lane), offset, width, site, strong)
        if write:
            if reduced:
                device.hazards.before_atomic(access)
            else:
                device.hazards.before_write(access, None)
            device.mark(access)
            self._begin_write(access, [lane])
        else:
            device.hazards.before_copy(access)

    def _begin_write(self, access: GlobalAccess, lanes: list[int]) -> None:
        """Keep a store's write as in flight until each of its lanes has waited for its group."""
        if not self.hazards:
            return
        self.device.hazards.begin_copy(access)
        of_lane = self.batch.everyone if access.lanes is None else access.lanes
        for lane in lanes:
            by_lane = of_lane == lane
            part = access if len(lanes) == 1 else access._replace(lanes=of_lane[by_lane], offset=access.offset[by_lane])
            self.writes.setdefault(lane, [[]])[-1].append(part)

    # --- loads ---

    def load_tensor(self, address: Array, coordinates: list[Array], delivery: Delivery, m: Mask, site: int) -> None:
        """cp.async.bulk.tensor to the shared memory of this CTA or of several CTAs of the cluster."""
        for lane in self._lanes(m):
            map_ = self._map(int(address[lane]), lane, site)
            if map_ is not None:
                data = self._read_box(map_, _signed(coordinates, lane), lane, site)
                self._deliver(data, delivery, SWIZZLE_SPAN[map_.swizzle], 128, lane, site)

    def prefetch_tensor(self, address: Array, coordinates: list[Array], m: Mask, site: int) -> None:  # noqa: ARG002
        """cp.async.bulk.prefetch.tensor to the L2, which changes no value. It may precede griddepcontrol.wait, because
        the device's memory is coherent in the L2."""
        for lane in self._lanes(m):
            self._map(int(address[lane]), lane, site)

    def load(self, source: Array, size: Array, delivery: Delivery, m: Mask, site: int, shared: bool) -> None:
        """cp.async.bulk of consecutive bytes to shared memory, from global memory or from this CTA's shared memory
        (``shared``)."""
        for lane in self._lanes(m):
            count, start = int(size[lane]), int(source[lane])
            if count % 16 or start % 16 or count == 0:
                text = f"bulk copy of {count} bytes from {start:#x}: both must be multiples of 16"
                self.batch.report_lane("shared-misaligned", text, site, lane)
            elif shared:
                origin = self._shared_places(start, count, lane, site)
                if origin is not None:
                    self._deliver(self.shared.views[16][origin], delivery, 16, 16, lane, site, origin)
            else:
                box = self._consecutive_box(start, count, lane, site)
                if box is not None:
                    offset = int(box.rows[0])
                    data = self.arena.views[16][offset >> 4 : (offset + count) >> 4].copy()
                    self._touch_global(box.rows, box, lane, site, write=False)
                    self._deliver(data, delivery, 16, 16, lane, site)

    def _consecutive_box(self, address: int, count: int, lane: int, site: int) -> Box | None:
        """Consecutive bytes of global memory as a box of one row; None, and a report, if they exceed their buffer."""
        offset = address - self.arena.base
        buffer = self.arena.find(offset)
        if buffer is None or offset + count > buffer.end:
            text = f"bulk copy of {count} bytes: {self.arena.describe(address)}"
            self.batch.report_lane("global-out-of-bounds", text, site, lane, address)
            return None
        return Box(np.array([offset]), count, 0, count)

    def _shared_places(self, start: int, count: int, lane: int, site: int) -> Array | None:
        """The indices of the 16-byte elements of consecutive bytes in the lane's CTA; None, and a report, if they
        exceed its shared memory."""
        offset = start - WINDOW_START
        if not self.shared.fits(offset, offset + count, lane, site):
            return None
        return self.shared.chunks(int(self.batch.row_of[lane]), offset + np.arange(0, count, 16))

    def _receivers(self, delivery: Delivery, lane: int) -> list[int]:
        """The ranks of the CTAs that receive a lane's copy."""
        if delivery.ranks is not None:
            mask = int(delivery.ranks[lane])
            return [rank for rank in range(16) if mask >> rank & 1]
        return [self._rank(int(delivery.address[lane]), lane)]

    def _rank(self, address: int, lane: int) -> int:
        """The rank of the CTA that an address names."""
        rank = (address >> RANK_SHIFT) - 1
        return int(self.batch.rank[self.batch.row_of[lane]]) if rank < 0 else rank

    def _deliver(
        self, data: Array, delivery: Delivery, span: int, align: int, lane: int, site: int, origin: Array | None = None
    ) -> None:
        """Send 16-byte elements to shared memory. ``span``: bytes of a row of the swizzle pattern (16: none).
        ``align``: the alignment in bytes that the destination needs. ``origin``: the elements of the lane's own shared
        memory that are copied; None for a copy from global memory."""
        offset = (int(delivery.address[lane]) & WITHIN) - WINDOW_START
        bar_offset = (int(delivery.bar_address[lane]) & WITHIN) - WINDOW_START
        if (offset + WINDOW_START) % align:
            text = f"bulk copy to shared offset {offset}, which is no multiple of {align}"
            self.batch.report_lane("shared-misaligned", text, site, lane, offset)
            return
        ranks = self._receivers(delivery, lane)
        signal = self._rank(int(delivery.bar_address[lane]), lane)
        if delivery.ranks is None and signal >> delivery.paired != ranks[0] >> delivery.paired:
            target = "the pair of CTAs that the copy goes to" if delivery.paired else "the CTA that the copy goes to"
            self.batch.report_lane("cluster", f"the mbarrier lies outside of {target}", site, lane)
            return
        nbytes = data.size * 16
        if self.counters is not None:
            self.counters.bulk_boxes += 1
            self.counters.bulk_load_bytes += nbytes
            self.counters.bulk_delivered_bytes += nbytes * len(ranks)
        places = self._swizzled(offset, nbytes, span)
        for rank in ranks:
            # The CTAs of a pair have the ranks 2 i and 2 i + 1. The mbarrier's address says which of them is signalled.
            signalled = rank & ~1 | signal & 1 if delivery.paired else rank
            self._deliver_to((rank, signalled), data, offset, places, bar_offset, lane, site, origin)

    def _deliver_to(
        self,
        ranks: tuple[int, int],
        data: Array,
        offset: int,
        places: Array,
        bar_offset: int,
        lane: int,
        site: int,
        origin: Array | None,
    ) -> None:
        """Send a copy to one receiver. ``ranks``: the rank of the CTA that gets the data and that of the CTA whose
        mbarrier is signalled. ``offset``: the destination's first byte. ``places``: the offsets of all its 16-byte
        elements. Data and mbarrier have the same offsets in every CTA."""
        batch = self.batch
        own = int(batch.row_of[lane])
        if max(ranks) >= batch.cluster_size:
            text = f"names CTA {max(ranks)} of a cluster of {batch.cluster_size}"
            batch.report_lane("cluster", text, site, lane)
            return
        row, bar_row = (self.peers.row_of_rank(own, rank) for rank in ranks)
        lanes = np.array([lane])
        if not self.shared.fits(offset, offset + data.size * 16, lane, site):
            return
        for other in {row, bar_row} - {own} if self.hazards else ():
            self.peers.visit(other, lanes, site, remember=False)
        bar = self.mbarriers.find(bar_row, bar_offset, lanes, site, asynchronous=True)
        if bar is None:
            return
        if origin is not None and self.hazards:
            # Waiting for the mbarrier's phase also implies that the source has been read.
            reader = int(self.clocks.groups + batch.warp[lane])
            begin = int(origin[0]) * 16 - own * self.shared.stride
            self.shared.async_read(
                Elements(origin, begin, begin + data.size * 16), lane, own, reader, site, "a bulk copy", bar.column
            )
        elements = Elements(self.shared.chunks(row, places), offset, offset + data.size * 16)
        self.mbarriers.start_copy(elements, data, 16, bar, lane, row, site)

    # --- stores ---

    def _read_shared(self, lane: int, source: Elements, row: int, site: int) -> Array:
        """The bytes that a lane's store sends. They count as being read until its group has been waited for."""
        if self.hazards:
            reader = int(self.clocks.groups + self.batch.warp[lane])
            self.shared.async_read(source, lane, row, reader, site, "a bulk store")
            self._open_store(lane, site)
        return np.ascontiguousarray(self.shared.views[16][source.indices]).view(np.uint8)

    def _open_store(self, lane: int, site: int) -> None:
        """Keep a store of a lane that is in no group yet."""
        self.open_stores.setdefault(lane, []).append(self.launch.tick)
        self.sites[lane] = site

    def store_tensor(
        self, address: Array, coordinates: list[Array], source: Array, reduction: str, m: Mask, site: int
    ) -> None:
        """cp.async.bulk.tensor (or cp.reduce) from shared to global memory."""
        first_of: dict[tuple[int, ...], int] = {}
        boxes: list[StoredBox] = []
        for lane in self._lanes(m):
            # If several lanes of a warp name the same box (CUTLASS has such code), the box is stored once, but the
            # store belongs to the group of each of these lanes.
            key = (lane >> 5, int(address[lane]), int(source[lane]), *(int(c[lane]) for c in coordinates))
            if first_of.setdefault(key, lane) != lane and not reduction:
                if self.hazards:
                    self._open_store(lane, site)
                continue
            map_ = self._map(int(address[lane]), lane, site)
            if map_ is not None:
                boxes.append(StoredBox(lane, map_, _signed(coordinates, lane), int(source[lane])))
        if reduction or len(boxes) < 2 or not self._store_together(boxes, site):
            for box in boxes:
                self._store_box(box, reduction, site)

    def _store_together(self, boxes: list[StoredBox], site: int) -> bool:
        """Fast path: store disjoint boxes that lie inside of one tensor, if no check needs a closer look; otherwise do
        nothing and return False."""
        map_, arena = boxes[0].map_, self.arena
        # Corners are different multiples of the box, and rows of the tensor do not overlap: then no two boxes share a
        # byte, so the order in which they are stored does not matter.
        corners = {tuple(box.coordinates) for box in boxes}
        are_disjoint = len(corners) == len(boxes) and all(
            coordinate % extent == 0 for corner in corners for coordinate, extent in zip(corner, map_.box, strict=True)
        )
        are_disjoint = are_disjoint and len(map_.dims) == 2 and map_.strides[0] >= map_.dims[0] * map_.element_bytes
        extents = [place_inside(map_, box.coordinates, arena) for box in boxes] if are_disjoint else [None]
        sources = [box.source - WINDOW_START for box in boxes]
        fits = min(sources) >= 0 and max(sources) + map_.nbytes <= self.shared.size
        if None in extents or any(box.map_ is not map_ or box.source % 128 for box in boxes) or not fits:
            return False
        # ``first``, shape (boxes,): the arena offset of each box's first byte.
        first = np.array([extent[0] for extent in extents if extent is not None])
        _, stride, nbytes = extents[0] or (0, 0, 0)
        low, high = int(first.min()), int(first.max()) + nbytes
        buffer = arena.find(low) if 0 <= low < arena.capacity else None
        if buffer is None or high > buffer.end:
            return False
        lanes = np.array([box.lane for box in boxes])
        rows = self.batch.row_of[lanes]
        span = SWIZZLE_SPAN[map_.swizzle]
        # Shape (boxes, 16-byte elements of a box): the indices of the sources in the batch's shared memory.
        source_offsets = np.stack([self._swizzled(offset, map_.nbytes, span) for offset in sources])
        indices = self.shared.chunks(rows[:, None], source_offsets)
        if self.hazards:
            if not self.shared.store_reads(indices, (min(sources), max(sources) + map_.nbytes), lanes, rows):
                return False
            for box in boxes:
                self._open_store(box.lane, site)
        if self.counters is not None:
            self.counters.bulk_boxes += len(boxes)
            self.counters.bulk_store_bytes += len(boxes) * map_.nbytes
        self.device.check_grid_wait(lanes, first, site)
        # The offsets of a box's 16-byte elements from its first byte, shape (rows, elements of a row).
        within_box = np.arange(map_.box[1])[:, None] * stride + np.arange(0, map_.box[0] * map_.element_bytes, 16)
        offset = (first[:, None] + within_box.reshape(-1)).reshape(-1)
        access = GlobalAccess(buffer, np.repeat(lanes, within_box.size), offset, 16, site)
        self.device.hazards.before_write(access, None)
        self.device.mark(access)
        self._begin_write(access, lanes.tolist())
        arena.views[16][offset >> SHIFT[16]] = self.shared.views[16].take(indices).reshape(-1)
        self.launch.version += 1
        return True

    def _store_box(self, stored: StoredBox, reduction: str, site: int) -> None:
        """Store one box, or reduce it into global memory, with every check. ``reduction``: its name in PTX, or ""."""
        lane, map_, coordinates, source = stored
        row, offset = int(self.batch.row_of[lane]), source - WINDOW_START
        if source % 128:
            text = f"bulk store from shared offset {offset}, which is no multiple of 128"
            self.batch.report_lane("shared-misaligned", text, site, lane, offset)
            return
        if not self.shared.fits(offset, offset + map_.nbytes, lane, site):
            return
        indices = self.shared.chunks(row, self._swizzled(offset, map_.nbytes, SWIZZLE_SPAN[map_.swizzle]))
        raw = self._read_shared(lane, Elements(indices, offset, offset + map_.nbytes), row, site)
        if self.counters is not None:
            self.counters.bulk_boxes += 1
            self.counters.bulk_store_bytes += map_.nbytes
        box = place(map_, coordinates, self.arena)
        if not self._check_box(map_, box, lane, site):
            return
        inside_rows = np.flatnonzero(box.rows != -1)
        rows, data = box.rows[inside_rows], raw.reshape(-1, box.inner)[inside_rows]
        self._touch_global(rows, box, lane, site, write=True, reduced=map_.element_bytes if reduction else 0)
        self.launch.version += 1
        if reduction:
            self._reduce(rows, box, data, reduction, map_.dtype)
        else:
            self._write(rows, box, data)

    def _reduce(self, rows: Array, box: Box, data: Array, reduction: str, dtype: int) -> None:
        """Combine data (rows, bytes) with global memory. Raises EmulatorError for operations that are not modelled."""
        if dtype not in _REDUCED_TYPES or reduction not in _REDUCTIONS:
            raise EmulatorError(f"cp.reduce {reduction} on data type {dtype} is not modelled")
        kind, combine = _REDUCED_TYPES[dtype], _REDUCTIONS[reduction]
        for row, new in zip(rows, data, strict=True):
            old = self.arena.data[row + box.low : row + box.high].view(kind)
            old[:] = combine(old, new[box.low : box.high].view(kind))

    def _write(self, rows: Array, box: Box, data: Array) -> None:
        """Store data (rows, bytes) at the arena offsets of rows, as far as it lies inside of the tensor."""
        # Rows that consist of 16-byte elements are stored in this unit. Strides are multiples of 16, so the alignment
        # of the first row is that of all.
        if (box.low | box.high) & 15 == 0 and int(rows[0]) & 15 == 0:
            chunks = np.arange(box.low // 16, box.high // 16)
            wide = np.ascontiguousarray(data).view(MOVER[16])
            self.arena.views[16][(rows >> SHIFT[16])[:, None] + chunks] = wide[:, chunks]
        else:
            inside = np.arange(box.low, box.high)
            self.arena.data[rows[:, None] + inside] = data[:, inside]

    def store(self, destination: Array, source: Array, size: Array, m: Mask, site: int) -> None:
        """cp.async.bulk of consecutive bytes from shared to global memory."""
        for lane in self._lanes(m):
            count, start = int(size[lane]), int(destination[lane])
            if count % 16 or start % 16 or int(source[lane]) % 16 or not count:
                text = f"bulk copy of {count} bytes to {start:#x}: size and both addresses must be multiples of 16"
                self.batch.report_lane("global-misaligned", text, site, lane, start)
                continue
            places = self._shared_places(int(source[lane]), count, lane, site)
            if places is None:
                continue
            begin = int(source[lane]) - WINDOW_START
            row = int(self.batch.row_of[lane])
            data = self._read_shared(lane, Elements(places, begin, begin + count), row, site)
            box = self._consecutive_box(start, count, lane, site)
            if box is not None:
                self._touch_global(box.rows, box, lane, site, write=True)
                self.launch.version += 1
                self._write(box.rows, box, data.reshape(1, -1))

    # --- groups of stores ---

    def commit(self, m: Mask) -> None:
        """cp.async.bulk.commit_group: the stores of each lane become a group."""
        for lane in self._lanes(m):
            ticks = self.open_stores.pop(lane, None)
            if ticks is not None or lane in self.groups:
                self.groups.setdefault(lane, []).append(ticks or [])
            if lane in self.writes:
                self.writes[lane].append([])

    def wait(self, pending: int, reads: bool, m: Mask) -> None:
        """cp.async.bulk.wait_group: all but the ``pending`` newest groups of the lanes are complete, or (``reads``)
        have read their source."""
        if not self.hazards:
            return
        self.launch.tick += 1
        done = []
        for lane in self._lanes(m):
            if not reads and lane in self.writes:
                self._end_writes(lane, pending)
            groups = self.groups.get(lane)
            if groups is not None and len(groups) > pending:
                self.groups[lane] = groups[len(groups) - pending :] if pending else []
                done.append(lane)
        for warp in sorted({lane >> 5 for lane in done}):
            # Other lanes of the warp, and younger groups, may have stores in flight. All stores of a warp share one
            # column of the clocks, so the wait only shows that stores older than each of those have ended.
            unfinished = [
                tick
                for other in range(32 * warp, 32 * warp + 32)
                for group in (*self.groups.get(other, ()), self.open_stores.get(other, ()))
                for tick in group
            ]
            row, index = divmod(warp, self.clocks.warps)
            clock = self.clocks.empty()
            self.clocks.set(clock, self.clocks.bulk_column(row, index), min(unfinished, default=self.launch.tick))
            self.clocks.acquire(np.array([lane for lane in done if lane >> 5 == warp]), clock)

    def _end_writes(self, lane: int, pending: int) -> None:
        """Complete the writes of all but a lane's ``pending`` newest groups."""
        *groups, still_open = self.writes[lane]
        ended = max(0, len(groups) - pending)
        for group in groups[:ended]:
            for access in group:
                self.device.hazards.end_copy(access)
        self.writes[lane] = [*groups[ended:], still_open]

    def exited(self, row: int) -> None:
        """Report a bulk store that may still read the shared memory of a CTA that has ended."""
        batch = self.batch
        for lane in {*self.groups, *self.open_stores}:
            if int(batch.row_of[lane]) == row and (any(self.groups.get(lane, ())) or self.open_stores.get(lane)):
                batch.report_lane(
                    "in-flight",
                    "the CTA exits while a bulk store may still read its shared memory "
                    "(cp.async.bulk.wait_group.read is missing)",
                    self.sites[lane],
                    lane,
                )
                return


def _signed(coordinates: list[Array], lane: int) -> list[int]:
    """A lane's coordinates, whose registers hold signed 32-bit integers."""
    return [int(c[lane].view(np.int32)) for c in coordinates]
