"""Emulates local memory of every thread, kernel parameters, and generic addresses (PTX ISA, "State Spaces", "cvta")."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kernelproof.emulator.memory.device import DeviceMemory
from kernelproof.emulator.memory.shared import SharedMemory
from kernelproof.emulator.state.arrays import MOVER, Array, Mask
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.windows import SHIFT_TO_WINDOW, Window

_LOW_WORD = np.uint64(0xFFFFFFFF)
_WINDOW_SHIFT, _OWNER_SHIFT = np.uint64(SHIFT_TO_WINDOW), np.uint64(32)
# A generic address of a local variable has the numbers of its CTA and thread in these bits, from bit 32 on. Numbers of
# CTAs wrap at 2^14, so use by a thread of a CTA that far away is missed. A thread's use of its own variables is never
# reported.
_CTA_BITS, _THREAD_BITS = 14, 10


class LocalMemory:
    """Local memory, ``nbytes`` per lane. Addresses are offsets, uint64. A generic address contains the number of its
    thread from bit 32 on, so that use by another thread is noticed."""

    def __init__(self, batch: BatchState, nbytes: int) -> None:
        self.batch = batch
        cta = np.asarray(batch.ctas, np.uint64)[batch.row_of] & np.uint64((1 << _CTA_BITS) - 1)
        number = cta << np.uint64(_THREAD_BITS) | batch.thread.astype(np.uint64)
        # Per lane: the upper half of its generic addresses. Invariant: owner == address >> 32 for own variables.
        self.owner: Array = number | np.uint64(Window.LOCAL << SHIFT_TO_WINDOW - 32)
        self.data: Array = np.full((batch.size, nbytes) if nbytes else (0, 0), batch.launch.poison, np.uint8)
        # Which bytes have been written; None: not tracked.
        self.written = np.zeros(self.data.shape, bool) if batch.launch.options.hazards else None

    def _locate(self, address: Array, width: int, m: Mask, site: int) -> tuple[Array, Array]:
        """The lanes of a valid access, and their offsets. Invalid lanes are reported and left out."""
        lanes = self.batch.lanes(m)
        offset = address[lanes].astype(np.int64)
        bad = (offset < 0) | (offset + width > self.data.shape[1]) | ((offset & (width - 1)) != 0)
        if bad.any():
            text = f"{width}-byte access at local offset {int(offset[bad][0])} of {self.data.shape[1]}"
            self.batch.report_lanes("local-out-of-bounds", text, site, lanes[bad])
            lanes, offset = lanes[~bad], offset[~bad]
        return lanes, offset

    def generic(self, address: Array) -> Array:
        """The generic addresses of local offsets."""
        return self.owner << _OWNER_SHIFT | address

    def offsets(self, address: Array, mask: Array, site: int) -> Array:
        """The local offsets of generic addresses. Use of another thread's variables is reported."""
        low: Array = address & _LOW_WORD
        other = mask & ((address >> _OWNER_SHIFT) != self.owner) & (low < self.data.shape[1])
        if other.any():
            lanes = np.flatnonzero(other)
            number = int(address[lanes[0]] >> _OWNER_SHIFT)
            cta, thread = number >> _THREAD_BITS & (1 << _CTA_BITS) - 1, number & (1 << _THREAD_BITS) - 1
            text = (
                f"uses the address of a local variable of thread {thread} of CTA {cta}: for this thread it names a "
                "variable of its own"
            )
            self.batch.report_lanes("foreign-local", text, site, lanes)
        return low

    def load(self, address: Array, width: int, m: Mask, site: int) -> Array:
        """Read ``width`` bytes per lane."""
        lanes, offset = self._locate(address, width, m, site)
        places = lanes[:, None], offset[:, None] + np.arange(width)
        if self.written is not None and not self.written[places].all():
            bad = ~self.written[places].all(axis=1)
            text = f"reads local memory that the thread has not written, local offset {int(offset[bad][0])}"
            self.batch.report_lanes("uninitialised-local", text, site, lanes[bad], doubtful=True)
        raw = self.data[places]
        return self.batch.spread(np.ascontiguousarray(raw).reshape(-1).view(MOVER[width]), lanes, width)

    def store(self, address: Array, value: Array, width: int, m: Mask, site: int) -> None:
        """Write MOVER[width] values, one per lane."""
        lanes, offset = self._locate(address, width, m, site)
        raw = np.ascontiguousarray(value[lanes]).view(np.uint8).reshape(-1, width)
        places = lanes[:, None], offset[:, None] + np.arange(width)
        self.batch.launch.count_store(lambda: np.array_equal(self.data[places], raw))
        self.data[places] = raw
        if self.written is not None:
            self.written[places] = True


class ParameterBlock:
    """The kernel's parameter block, at offsets from its start."""

    def __init__(self, batch: BatchState, block: bytes) -> None:
        self.batch, self.block = batch, block

    def constant(self, offset: int, width: int) -> int:
        """A parameter at an offset that all lanes share, as raw bits."""
        return int.from_bytes(self.block[offset : offset + width], "little")

    def load(self, address: Array, width: int, m: Mask, site: int) -> Array:
        """Read parameters at offsets that differ per lane."""
        offsets = address.astype(np.int64)
        bad = (offsets < 0) | (offsets + width > len(self.block)) | (offsets & (width - 1) != 0)
        if m is not None:
            bad &= m
        if bad.any():
            lanes = np.flatnonzero(bad)
            text = f"reads {width} bytes at byte {int(offsets[lanes[0]])} of {len(self.block)} of kernel parameters"
            self.batch.report_lanes("global-out-of-bounds", text, site, lanes)
        # Offsets of reported and of inactive lanes are clipped. Beyond the block lie 16 bytes of zeros or more, since
        # the widest access has 16.
        raw = np.frombuffer(self.block.ljust(-(-len(self.block) // 16) * 16 + 16, b"\0"), np.uint8)
        offsets = np.clip(offsets, 0, len(raw) - width)
        out = np.ascontiguousarray(raw[offsets[:, None] + np.arange(width)])
        return out.reshape(-1).view(MOVER[width])


class GenericMemory:
    """Accesses through generic addresses, whose top byte is the state space (``Window``). Parameters are read-only."""

    def __init__(
        self,
        batch: BatchState,
        device: DeviceMemory,
        shared: SharedMemory,
        local: LocalMemory,
        parameters: ParameterBlock,
    ) -> None:
        self.batch, self.device, self.shared, self.local = batch, device, shared, local
        self.parameters = parameters

    def _spaces(self, address: Array, m: Mask) -> Iterator[tuple[Window, Array]]:
        """Yield (window, mask of the lanes whose addresses lie in it). Unknown windows count as the last one, PARAM."""
        top = address >> _WINDOW_SHIFT
        active = np.ones(self.batch.size, bool) if m is None else m
        for space in Window:
            mask = active & (top >= space if space is Window.PARAM else top == space)
            if mask.any():
                yield space, mask

    def convert(self, address: Array, space: Window, m: Mask, site: int) -> Array:
        """cvta.to of a space: addresses within that space. The result for addresses of other spaces is unspecified."""
        outside = (address >> _WINDOW_SHIFT) != space
        low: Array = address & _LOW_WORD
        if not outside.any():
            return low
        lanes = np.flatnonzero(outside & self.batch.running(m))
        if len(lanes):
            text = f"cvta.to.{space.name.lower()} of {int(address[lanes[0]]):#x}, an address of another space"
            self.batch.report_lanes("address-space", text, site, lanes, doubtful=True)
        return np.where(outside, self.batch.unspecified(8) & _LOW_WORD, low)

    def in_shared(self, address: Array, m: Mask, site: int) -> Array:
        """Convert a generic address, which must lie in the shared memory of the lane's CTA, to one of that space."""
        lanes = self.batch.lanes(m)
        outside = (address[lanes] >> _WINDOW_SHIFT) != Window.SHARED
        if outside.any():
            first = int(address[lanes[outside][0]])
            text = f"the generic address {first:#x} is not of shared memory"
            self.batch.report_lanes("shared-out-of-bounds", text, site, lanes[outside])
        return self.shared.of_cta((address & _LOW_WORD).astype(np.uint32), m, site)

    def load(self, address: Array, width: int, m: Mask, site: int, strong: int = 0, in_shared: int = 0) -> Array:
        """Read ``width`` bytes per lane. ``strong``: see ``DeviceMemory.load``; ``in_shared``: the same for lanes whose
        addresses are in shared memory."""
        if m is None and not (address >> _WINDOW_SHIFT).any():
            return self.device.load(address, width, m, site, strong)
        out = self.batch.poison(width)
        low = address & _LOW_WORD
        for space, mask in self._spaces(address, m):
            if space is Window.SHARED:
                shared_address = self.shared.of_cluster(low.astype(np.uint32))
                values = self.shared.load(shared_address, width, mask, site, in_shared)
            elif space is Window.LOCAL:
                values = self.local.load(self.local.offsets(address, mask, site), width, mask, site)
            elif space is Window.PARAM:
                values = self.parameters.load(low, width, mask, site)
            else:
                values = self.device.load(address, width, mask, site, strong)
            out[mask] = values[mask]
        return out

    def store(
        self, address: Array, value: Array, width: int, m: Mask, site: int, strong: int = 0, in_shared: int = 0
    ) -> None:
        """Write MOVER[width] values, one per lane. Parameters are not writable: such an address is out of bounds.
        ``strong``, ``in_shared``: see ``load``."""
        if m is None and not (address >> _WINDOW_SHIFT).any():
            self.device.store(address, value, width, m, site, strong)
            return
        low = address & _LOW_WORD
        for space, mask in self._spaces(address, m):
            if space is Window.SHARED:
                shared_address = self.shared.of_cluster(low.astype(np.uint32))
                self.shared.store(shared_address, value, width, mask, site, in_shared)
            elif space is Window.LOCAL:
                self.local.store(self.local.offsets(address, mask, site), value, width, mask, site)
            else:
                self.device.store(address, value, width, mask, site, strong)
