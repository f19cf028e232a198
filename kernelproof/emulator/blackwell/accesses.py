"""Executes and checks the accesses of warps to tensor memory: tcgen05.ld, .st, .wait and .fence of the PTX ISA."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernelproof.emulator.blackwell.allocation import Allocation
from kernelproof.emulator.blackwell.fragments import TensorFragment, fragment
from kernelproof.emulator.blackwell.pending import LoadedRegister, PendingLoads
from kernelproof.emulator.blackwell.tensor_clocks import TensorClocks
from kernelproof.emulator.blackwell.tensor_memory import COLUMNS, GROUP_LANES, LOAD, STORE, Region, TensorMemory
from kernelproof.emulator.state.arrays import Array, Mask, distinct
from kernelproof.emulator.state.batch_state import BatchState


class TensorAccess(NamedTuple):
    """The modifiers of a tcgen05.ld or .st: its ``shape``, its repetition ``.x{times}``, whether it packs two 16-bit
    halves into a register, and (``split``) the columns between the two parts of .16x32bx2."""

    shape: str
    times: int
    packed: bool
    split: int = 0

    @property
    def fragment(self) -> TensorFragment:
        """The place of each register in tensor memory."""
        return fragment(self.shape, self.times, self.packed, self.split)


class TensorAccesses:
    """The accesses of warps to tensor memory. Values are copied when the instruction is issued. Until the access is
    complete, its registers (``PendingLoads``) and the tags of the memory record that it is pending."""

    def __init__(
        self,
        batch: BatchState,
        clocks: TensorClocks,
        memory: TensorMemory,
        allocation: Allocation,
        pending: PendingLoads,
    ) -> None:
        self.batch, self.launch, self.clocks = batch, batch.launch, clocks
        self.memory, self.allocation, self.pending = memory, allocation, pending
        self.hazards = batch.launch.options.hazards

    def _warps(self, m: Mask, site: int) -> list[int]:
        """The warps (lane >> 5) of the batch that execute an instruction; incomplete warps are reported."""
        self.batch.require_whole_warps(m, site)
        warps: list[int] = distinct(self.batch.lanes(m) >> 5).tolist()
        return warps

    # --- places ---

    def _place(self, access: TensorAccess, address: Array, warp: int, site: int) -> tuple[int, int]:
        """The first lane and column of tensor memory in a warp's access; cells that the warp must not touch are
        reported. The column is -1 if the access exceeds tensor memory."""
        lanes = np.arange(32 * warp, 32 * warp + 32)
        first = int(address[lanes[0]])
        index = warp % self.batch.warps_per_cta
        lane, column = first >> 16, first & 0xFFFF
        # The warp may touch 32 lanes from ``own_lane`` on. An access of 16 lanes is to the first or second half of
        # them.
        own_lane, height = 32 * (index % 4), access.fragment.lanes
        if (address[lanes] != first).any():
            text = "the lanes of a warp name different addresses of tensor memory"
            self.batch.report_lanes("tensor-memory-bounds", text, site, lanes)
        if lane not in (own_lane, own_lane + 32 - height):
            text = f"lane {lane} of tensor memory: warp {index} may touch lanes {own_lane} to {own_lane + 31} "
            text += "(of its index % 4)"
            self.batch.report_lanes("tensor-memory-bounds", text, site, lanes)
            # Continue with the warp's own lanes, in the half that the address names. According to DeepGEMM, hardware
            # ignores the other bits of the lane.
            lane = own_lane + (32 - height if lane % 32 else 0)
        row, high = warp // self.batch.warps_per_cta, column + self._width(access)
        if high > COLUMNS or not self.allocation.owned[row, column:high].all():
            text = f"columns {column} to {high - 1} of tensor memory, which the CTA has not allocated"
            self.batch.report_lanes("tensor-memory-bounds", text, site, lanes)
            if high > COLUMNS:
                column = -1
        elif self.hazards:
            self.allocation.check_access(row, column, high, int(lanes[0]), site)
        return lane, column

    def _width(self, access: TensorAccess) -> int:
        """The number of columns from the first to the last one that an access touches."""
        # The last register of the last thread is in the last column; a packed one is in the column after it, too.
        return int(access.fragment.column[-1, -1]) + 1 + int(access.packed)

    def _regions(self, access: TensorAccess, row: int, lane: int, column: int) -> list[Region]:
        """The regions that an access touches: two for .16x32bx2, else one."""
        groups = slice(lane // GROUP_LANES, (lane + access.fragment.lanes) // GROUP_LANES)
        if access.shape != "16x32bx2":
            return [Region(row, groups, column, column + self._width(access))]
        # A packed register takes two columns. The two parts begin ``distance`` columns apart.
        width = access.times * (2 if access.packed else 1)
        distance = access.split * (2 if access.packed else 1)
        return [Region(row, groups, start, start + width) for start in (column, column + distance)]

    # --- loads and stores ---

    def load(self, access: TensorAccess, address: Array, m: Mask, site: int) -> list[LoadedRegister]:
        """tcgen05.ld. ``address``: per lane, lane << 16 | column in tensor memory. Returns the registers that it
        writes. Registers of accesses beyond tensor memory have all bits set."""
        layout = access.fragment
        out = np.full((len(layout.lane), self.batch.size), 0xFFFFFFFF, np.uint32)
        warps = self._warps(m, site)
        for warp in warps:
            row, index = divmod(warp, self.batch.warps_per_cta)
            lane, column = self._place(access, address, warp, site)
            if column < 0:
                continue
            for region in self._regions(access, row, lane, column) if self.hazards else ():
                self.memory.load(region, index, site)
            data, threads = self.memory.data[row], slice(32 * warp, 32 * warp + 32)
            if access.shape == "32x32b" and not access.packed:
                out[:, threads] = data[lane : lane + 32, column : column + access.times].T
            elif access.packed:
                low, high = (data[lane + layout.lane, column + layout.column + i] & 0xFFFF for i in (0, 1))
                out[:, threads] = low | high << np.uint32(16)
            else:
                out[:, threads] = data[lane + layout.lane, column + layout.column]
        load = self.pending.begin(np.array(warps, np.int64))
        return [LoadedRegister(value, load) for value in out]

    def store(self, access: TensorAccess, address: Array, values: tuple[Array, ...], m: Mask, site: int) -> None:
        """tcgen05.st of one register per value. ``address``: as for ``load``."""
        layout = access.fragment
        words = np.stack(values)
        for warp in self._warps(m, site):
            row, index = divmod(warp, self.batch.warps_per_cta)
            lane, column = self._place(access, address, warp, site)
            if column < 0:
                continue
            for region in self._regions(access, row, lane, column) if self.hazards else ():
                self.memory.store(region, index, site)
            values_of_warp, data = words[:, 32 * warp : 32 * warp + 32], self.memory.data[row]
            if access.packed:
                data[lane + layout.lane, column + layout.column] = values_of_warp & np.uint32(0xFFFF)
                data[lane + layout.lane, column + layout.column + 1] = values_of_warp >> np.uint32(16)
            else:
                data[lane + layout.lane, column + layout.column] = values_of_warp
        self.launch.version += 1

    # --- waits and fences ---

    def wait(self, kind: int, m: Mask, site: int) -> None:
        """tcgen05.wait::ld (``LOAD``) or tcgen05.wait::st (``STORE``)."""
        self._complete(kind, self._warps(m, site))

    def wait_scoreboard(self, m: Mask, site: int) -> None:  # noqa: ARG002
        """A wait for the scoreboard of loads, by any lanes of a warp."""
        self._complete(LOAD, distinct(self.batch.lanes(m) >> 5).tolist())

    def _complete(self, kind: int, warps: list[int]) -> None:
        """All accesses of a kind by some warps (lane >> 5) are complete."""
        self.launch.tick += 1
        for warp in warps:
            self.memory.wait(*divmod(warp, self.batch.warps_per_cta), kind)
        if kind == LOAD:
            self.pending.wait(np.array(warps, np.int64))

    def wait_load(self, m: Mask, site: int) -> None:
        """tcgen05.wait::ld."""
        self.wait(LOAD, m, site)

    def wait_store(self, m: Mask, site: int) -> None:
        """tcgen05.wait::st."""
        self.wait(STORE, m, site)

    def fence_before(self, m: Mask) -> None:
        """tcgen05.fence::before_thread_sync: the next synchronisation of these warps also orders their completed
        accesses to tensor memory."""
        if not self.hazards:
            return
        self.launch.tick += 1
        for warp in distinct(self.batch.lanes(m) >> 5).tolist():
            row, index = divmod(warp, self.batch.warps_per_cta)
            tick = self.memory.completed_before(row, index)
            self.clocks.learn(row, np.array([index]), self.clocks.access_column(row, index), tick)

    def fence_after(self, m: Mask) -> None:
        """tcgen05.fence::after_thread_sync by the lanes of ``m``."""
        if self.hazards:
            self.clocks.fence_after(m)
