"""Checks the fences of the tensor map proxy, which a launch needs before it uses a tensor map that it has written."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.hopper.cluster_clocks import ClusterClocks
from kernelproof.emulator.hopper.tensor_map import MAP_BYTES
from kernelproof.emulator.memory.arena import Buffer
from kernelproof.emulator.memory.device import DeviceMemory
from kernelproof.emulator.memory.global_access import GlobalAccess
from kernelproof.emulator.memory.tags import THREAD, TICK_SHIFT
from kernelproof.emulator.state.arrays import Array, Mask, distinct
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.scopes import Scope

_CHUNK = 16  # bytes of each of the accesses that make up the read of a map
UNFENCED = "uses a tensor map in global memory that this launch has written"


class MapProxy:
    """Checks that a map which threads of this launch wrote is visible to the tensor map proxy.

    Two fences are needed, both of a scope that includes the other CTA: the writer's CTA releases after the write, and
    the user's CTA acquires the map's address before the use. Maps that earlier launches wrote need no fences here.
    """

    def __init__(self, batch: BatchState, clocks: ClusterClocks, device: DeviceMemory) -> None:
        self.batch, self.launch, self.clocks, self.device = batch, batch.launch, clocks, device
        # (row, offset in the arena) -> (warp, scope) -> the tick of the last acquire fence.
        self.acquired: dict[tuple[int, int], dict[tuple[int, Scope], int]] = {}

    def release(self, m: Mask, scope: Scope) -> None:
        """fence.proxy.tensormap::generic.release by the lanes of ``m``; tensormap.cp_fenceproxy ends with one."""
        self.launch.tick += 1
        for row in distinct(self.batch.row_of[self.batch.lanes(m)]).tolist():
            self.device.state.map_releases[int(self.batch.ctas[row]), scope] = self.launch.tick

    def acquire(self, address: Array, m: Mask, scope: Scope) -> None:
        """fence.proxy.tensormap::generic.acquire of the map at each lane's address."""
        batch = self.batch
        self.launch.tick += 1
        lanes = batch.lanes(m)
        places = zip(batch.row_of[lanes].tolist(), batch.warp[lanes].tolist(), address[lanes].tolist(), strict=True)
        for row, warp, map_address in set(places):
            fences = self.acquired.setdefault((row, map_address - self.device.arena.base), {})
            fences[warp, scope] = self.launch.tick

    def use(self, buffer: Buffer, map_offset: int, lane: int, site: int) -> None:
        """Check the read of the map at an offset in the arena by a lane's bulk copy, and the fences before it."""
        if not self.launch.options.hazards:
            return
        state, batch = self.device.state, self.batch
        tags = state.tags(buffer, self.launch.recording)
        if not tags.is_written:
            return
        first = (map_offset - buffer.start) >> tags.shift
        tag = int(tags.written[first : first + (MAP_BYTES >> tags.shift)].max())
        if not tag:
            return
        chunk_offsets = map_offset + np.arange(0, MAP_BYTES, _CHUNK)
        self.device.hazards.before_read(
            GlobalAccess(buffer, np.full(len(chunk_offsets), lane), chunk_offsets, _CHUNK, site)
        )
        writer, own_cta, tick = (tag & THREAD) // batch.width, int(batch.ctas[batch.row_of[lane]]), tag >> TICK_SHIFT
        reach = self.launch.scope_of_both(writer, own_cta)
        # Ticks order the fences: the release must be later than the write, and so must the acquire.
        fault = ""
        if not any(
            released > tick and cta == writer and scope >= reach
            for (cta, scope), released in state.map_releases.items()
        ):
            fault = "without a release of its writer to the proxy of tensor maps"
        elif not self._is_acquired(lane, map_offset, tick, reach):
            fault = "without fence.proxy.tensormap::generic.acquire of its address between"
        if fault:
            batch.report_lane(
                "tensor-map-fence", f"{UNFENCED}, {fault}", site, lane, map_offset + self.device.arena.base
            )

    def _is_acquired(self, lane: int, map_offset: int, tick: int, reach: Scope) -> bool:
        """Does an acquire fence of this scope come after the tick, and happen before the lane's next access?"""
        row, own_warp = int(self.batch.row_of[lane]), int(self.batch.warp[lane])
        clock, first = self.clocks.of_lane(lane), int(self.clocks.first[row])
        return any(
            fenced > tick and scope >= reach and (warp == own_warp or clock[first + warp] > fenced)
            for (warp, scope), fenced in self.acquired.get((row, map_offset), {}).items()
        )
