"""Counts what a launch costs: bank conflicts, sectors of global memory, instructions by opcode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernelproof.emulator.state.arrays import Array, Mask
from kernelproof.emulator.state.sites import Site

SECTOR_BYTES = 32


@dataclass
class Traffic:
    """Global requests of one kind. ``requests``: warp instructions; ``sectors`` touched and ``ideal`` (the fewest that
    hold as many bytes), each of 32 bytes; ``bytes`` moved, summed over threads."""

    requests: int = 0
    sectors: int = 0
    ideal: int = 0
    bytes: int = 0


@dataclass
class Banks:
    """Shared-memory requests of one kind: ``wavefronts`` needed and ``ideal`` (without conflicts)."""

    requests: int = 0
    wavefronts: int = 0
    ideal: int = 0

    @property
    def conflicts(self) -> int:
        """Wavefronts that bank conflicts cost."""
        return self.wavefronts - self.ideal


@dataclass
class Comparison:
    """What an instruction that compares loaded values did: its ``outcomes`` (True, False or both), and by operand the
    bits of its only value, or None if it had several."""

    outcomes: set[bool] = field(default_factory=set)
    operands: dict[int, int | None] = field(default_factory=dict)

    def add(self, outcomes: Iterable[bool], operands: Mapping[int, int | None]) -> None:
        """Add further executions."""
        self.outcomes.update(outcomes)
        for number, bits in operands.items():
            self.operands[number] = bits if self.operands.get(number, bits) == bits else None


class Counters:
    """Counters of one launch.

    - ``instructions``: opcode -> executions, counted per warp. ``barriers``: counted per CTA.
    - ``shared_banks``, ``global_traffic``: by kind of instruction (``ld.shared``, ``st.shared``, ``ldmatrix``,
      ``stmatrix``, ``cp.async``; ``ld.global``, ``st.global``, ``atom.global``).
    - ``unique_bytes``: kind -> distinct bytes that the launch touches, which is the least possible traffic.
    - ``wgmma`` instructions per warpgroup, and their ``wgmma_flops``. ``tcgen05`` products, and their
      ``tcgen05_flops``. ``mbarrier_waits`` per warp.
    - ``bulk_boxes`` that were copied, and the bytes loaded and stored. ``bulk_delivered_bytes`` counts each destination
      of a multicast.
    - ``comparisons``: instruction -> its comparisons of loaded values. ``window_readings``: instructions of the kernel
      that read upper bits of generic addresses (``flow.windows``).
    """

    def __init__(
        self, block_opcodes: list[dict[str, int]], sites: list[Site], window_readings: Sequence[Site] = ()
    ) -> None:
        self.block_opcodes, self.sites, self.window_readings = block_opcodes, sites, window_readings
        self.comparisons: dict[Site, Comparison] = {}
        self.shared_banks: dict[str, Banks] = {}
        self.global_traffic: dict[str, Traffic] = {}
        self.block_runs: dict[int, int] = {}
        self.barriers = 0
        self.cp_async = 0
        self.wgmma = self.wgmma_flops = self.tcgen05 = self.tcgen05_flops = self.mbarrier_waits = 0
        self.bulk_boxes = self.bulk_load_bytes = self.bulk_delivered_bytes = self.bulk_store_bytes = 0
        self._touched: dict[str, dict[int, Array]] = {}

    @property
    def instructions(self) -> dict[str, int]:
        """Executions per warp by opcode, most first."""
        out: dict[str, int] = {}
        for block, runs in self.block_runs.items():
            for opcode, n in self.block_opcodes[block].items():
                out[opcode] = out.get(opcode, 0) + n * runs
        return dict(sorted(out.items(), key=lambda item: -item[1]))

    def _sum(self, base: str) -> int:
        """Executions of all opcodes that begin with a name."""
        return sum(n for opcode, n in self.instructions.items() if opcode.split(".")[0] == base)

    @property
    def mma(self) -> int:
        """mma.sync executed, per warp."""
        return self._sum("mma") + self._sum("wmma")

    @property
    def ldmatrix(self) -> int:
        """ldmatrix executed, per warp."""
        return self._sum("ldmatrix")

    @property
    def unique_bytes(self) -> dict[str, int]:
        """Distinct bytes touched by the launch, by kind, in whole sectors."""
        return {kind: sum(int(a.sum()) for a in maps.values()) * SECTOR_BYTES for kind, maps in self._touched.items()}

    def block(self, index: int, size: int, m: Mask) -> None:
        """Count the start of a basic block by the lanes of ``m``, in a batch of ``size`` lanes."""
        warps = size // 32 if m is None else int(m.reshape(-1, 32).any(axis=1).sum())
        self.block_runs[index] = self.block_runs.get(index, 0) + warps

    def comparison(self, truth: Any, operands: tuple[Any, ...], m: Mask, site: int) -> None:
        """Record a comparison of loaded values for the lanes of ``m``: whether ``truth`` is not zero, and the bits of
        the ``operands``. All of these may be one number for all lanes."""
        found = self.comparisons.setdefault(self.sites[site], Comparison())
        if len(found.outcomes) < 2:
            found.add(np.unique(_active(np.asarray(truth) != 0, m)).tolist(), {})
        for number, operand in enumerate(operands):
            if found.operands.get(number, 0) is not None and (lanes := _active(np.asarray(operand), m)).size:
                first = lanes.reshape(-1)[0]
                found.add((), {number: int(first) if (lanes == first).all() else None})

    def shared(self, kind: str, address: Array, width: int, m: Mask) -> None:
        """Count a shared-memory access. Hardware serves 8 lanes at a time if each accesses 16 bytes, 16 lanes for 8
        bytes and 32 for less. Such a group needs as many wavefronts as the most different words in one bank."""
        entry = self.shared_banks.setdefault(kind, Banks())
        group_size = 8 if width == 16 else 16 if width == 8 else 32
        wide = address.astype(np.int64).reshape(-1, group_size)
        active = np.ones(wide.shape, bool) if m is None else m.reshape(-1, group_size)
        entry.requests += int(active.reshape(-1, 32).any(axis=1).sum())
        entry.ideal += int(active.any(axis=1).sum())
        # Distinct words per bank: identical addresses are one broadcast. The arrays have the shape (groups of lanes,
        # lanes of a group); inactive lanes have word -1, and ``first`` marks the first lane with each word of a group.
        unit = max(4, width)
        word = np.where(active, wide // unit, -1)
        ordered = np.sort(word, axis=1)
        first = np.ones(ordered.shape, bool)
        first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        first &= ordered >= 0
        banks = 128 // unit  # a wavefront has at most 128 bytes
        slot = np.arange(len(ordered))[:, None] * banks + ordered % banks
        per_bank = np.bincount(slot[first], minlength=len(ordered) * banks).reshape(-1, banks)
        entry.wavefronts += int(per_bank.max(axis=1).sum())

    def memory(self, kind: str, size: int, offset: Array, lanes: Array | None, width: int) -> None:
        """Count a global access, at arena offsets, by a batch of ``size`` lanes."""
        entry = self.global_traffic.setdefault(kind, Traffic())
        warp = np.arange(size) >> 5 if lanes is None else lanes >> 5
        sector = offset // SECTOR_BYTES
        # One number per warp and sector: offsets in the arena have at most 44 bits.
        pairs = np.unique(warp.astype(np.int64) << 44 | sector)
        requests = np.unique(warp)
        entry.requests += len(requests)
        entry.sectors += len(pairs)
        entry.bytes += len(offset) * width
        requested = np.bincount(warp, minlength=int(requests[-1]) + 1)[requests] * width
        entry.ideal += int((-(-requested // SECTOR_BYTES)).sum())
        # A map of touched sectors for each MiB of the arena.
        touched = self._touched.setdefault(kind, {})
        for mib in {int(x) for x in np.unique(offset >> 20)}:
            inside = sector[(offset >> 20) == mib]
            page = touched.get(mib)
            if page is None:
                page = touched[mib] = np.zeros((1 << 20) // SECTOR_BYTES, bool)
            page[inside - (mib << 20) // SECTOR_BYTES] = True

    def summary(self) -> dict[str, Any]:
        """All counters as plain numbers, for printing or JSON."""
        instructions = self.instructions
        return {
            "instructions": sum(instructions.values()),
            "mma": self.mma,
            "ldmatrix": self.ldmatrix,
            "cp_async_threads": self.cp_async,
            "barriers": self.barriers,
            "wgmma": self.wgmma,
            "wgmma_flops": self.wgmma_flops,
            "tcgen05": self.tcgen05,
            "tcgen05_flops": self.tcgen05_flops,
            "mbarrier_waits": self.mbarrier_waits,
            "bulk": {
                "boxes": self.bulk_boxes,
                "load_bytes": self.bulk_load_bytes,
                "delivered_bytes": self.bulk_delivered_bytes,
                "store_bytes": self.bulk_store_bytes,
            },
            "shared": {
                k: {"requests": b.requests, "wavefronts": b.wavefronts, "ideal": b.ideal}
                for k, b in self.shared_banks.items()
            },
            "global": {
                k: {"requests": t.requests, "sectors": t.sectors, "ideal_sectors": t.ideal, "bytes": t.bytes}
                for k, t in self.global_traffic.items()
            },
            "unique_bytes": self.unique_bytes,
            "opcodes": instructions,
        }


def _active(values: Array, m: Mask) -> Array:
    """The values of the lanes of ``m``; one value for all lanes stays one."""
    return values if m is None or values.ndim == 0 else values[m]
