"""Models edits of tensor maps by a kernel: tensormap.replace and tensormap.cp_fenceproxy of the PTX ISA."""

from __future__ import annotations

import struct

import numpy as np

from kernelproof.emulator.hopper.cluster_memory import ClusterMemory
from kernelproof.emulator.hopper.map_proxy import MapProxy
from kernelproof.emulator.hopper.tensor_map import DEVICE_TYPES, FIELDS, MAGIC, MAP_BYTES, decode, refusal_of
from kernelproof.emulator.memory.device import DeviceMemory
from kernelproof.emulator.state.arrays import Array, Mask
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.scopes import Scope

_CHUNK = 16  # bytes of an access: maps are read and written in the widest ones


class MapEdits:
    """The edits of tensor maps by a batch. Fields are read and written as ordinary memory, so that races are found. A
    published map that the driver would not have encoded is reported."""

    def __init__(self, batch: BatchState, shared: ClusterMemory, device: DeviceMemory, proxy: MapProxy) -> None:
        self.batch, self.shared, self.device, self.proxy = batch, shared, device, proxy

    def replace(self, field: str, address: Array, ordinal: int, value: Array, m: Mask, site: int) -> None:
        """tensormap.replace.tile: set one field of the map at ``address``, in shared (uint32) or global memory
        (uint64). ``ordinal``: the dimension."""
        # The field's place in the map, its code in ``struct``, and the distance of the fields of two dimensions.
        offset, code, step = FIELDS[field]
        # Each edit marks the bytes as a map, because a kernel may build one from zeros.
        self._edit(address, 0, MAGIC, m, site)
        for lane in self.batch.lanes(m).tolist():
            number = int(value[lane])
            number = DEVICE_TYPES.get(number, number) if field == "elemtype" else number + (field == "rank")
            mask = np.zeros(self.batch.size, bool)
            mask[lane] = True
            self._edit(address, offset + ordinal * step, struct.pack(code, number), mask, site)

    def _edit(self, address: Array, offset: int, raw: bytes, m: Mask, site: int) -> None:
        """Write bytes of the map at ``address`` from ``offset`` on, which lie within one chunk of 16 bytes."""
        start = offset % _CHUNK
        chunk_address = address + address.dtype.type(offset - start)
        memory = self.shared if address.dtype == np.uint32 else self.device
        chunk = memory.load(chunk_address, _CHUNK, m, site).copy()
        chunk.view(np.uint8).reshape(-1, _CHUNK)[:, start : start + len(raw)] = np.frombuffer(raw, np.uint8)
        memory.store(chunk_address, chunk, _CHUNK, m, site)

    def publish(self, destination: Array, source: Array, scope: Scope, m: Mask, site: int) -> None:
        """tensormap.cp_fenceproxy: copy the map from shared to global memory and release it to the tensor map proxy.
        The first lane of each warp copies for the whole warp."""
        lanes = self.batch.lanes(m)
        self.proxy.clocks.warp_sync(m)
        first = lanes[np.unique(lanes >> 5, return_index=True)[1]]
        mask = np.zeros(self.batch.size, bool)
        mask[first] = True
        chunks = []
        for offset in range(0, MAP_BYTES, _CHUNK):
            chunk = self.shared.load(source + np.uint32(offset), _CHUNK, mask, site)
            self.device.store(destination + np.uint64(offset), chunk, _CHUNK, mask, site)
            chunks.append(chunk[first])
        content = np.ascontiguousarray(np.stack(chunks, axis=1)).view(np.uint8).reshape(len(first), MAP_BYTES)
        for lane, raw in zip(first.tolist(), content, strict=True):
            map_ = decode(raw.tobytes())
            why = "no field of a tensor map has been set" if map_ is None else refusal_of(map_)
            if why:
                self.batch.report_lane("tensor-map", why, site, lane)
        self.proxy.release(m, scope)
        self.proxy.clocks.warp_sync(m)
