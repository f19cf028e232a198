"""Executes ldmatrix and stmatrix (PTX ISA), which move 8x8 matrices of 16-bit elements between shared memory and a
warp's registers."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.memory.shared import SharedMemory
from kernelproof.emulator.state.arrays import MOVER, Array, Mask
from kernelproof.emulator.state.batch_state import BatchState


class MatrixMemory:
    """ldmatrix and stmatrix of a batch. The first 8 * n lanes of each warp have the addresses of the rows of n
    matrices."""

    def __init__(self, batch: BatchState, shared: SharedMemory) -> None:
        self.batch, self.shared = batch, shared

    def _address_lanes(self, matrices: int, m: Mask) -> Mask:
        """The lanes whose addresses are used."""
        if matrices == 4:
            return m
        chosen = np.zeros((self.batch.size // 32, 32), bool)
        chosen[:, : 8 * matrices] = True
        return chosen.reshape(-1) if m is None else chosen.reshape(-1) & m

    def load(self, address: Array, matrices: int, m: Mask, site: int, transpose: bool) -> list[Array]:
        """ldmatrix: one register (uint32 per lane) per matrix. Lane l gets elements 2 * (l % 4) and the next of row
        l / 4."""
        batch, shared = self.batch, self.shared
        batch.require_whole_warps(m, site)
        mask = self._address_lanes(matrices, m)
        access = shared.locate(address, 16, mask, site)
        if access is None:
            return [batch.poison(4)] * matrices
        lanes, elements, offset = access
        if shared.counters is not None:
            shared.counters.shared("ldmatrix", address, 16, mask)
        if shared.hazards:
            shared.read_together(lanes, elements, 16, site, offset)
        rows: Array = shared.trial_values(shared.views[16][elements], lanes, elements)
        if lanes is not None:
            rows = batch.spread(rows, lanes, 16)
        # The axes are warp, matrix, row and element of the row. A register holds two neighbouring elements.
        warps = batch.size // 32
        if transpose:
            cells = rows.view(np.uint16).reshape(warps, 4, 8, 8)[:, :matrices].transpose(1, 0, 3, 2)
            registers = np.ascontiguousarray(cells).view(np.uint32).reshape(matrices, batch.size)
        else:
            words = rows.view(np.uint32).reshape(warps, 4, 32)[:, :matrices].transpose(1, 0, 2)
            registers = np.ascontiguousarray(words).reshape(matrices, batch.size)
        return list(registers)

    def store(self, address: Array, values: tuple[Array, ...], m: Mask, site: int, transpose: bool) -> None:
        """stmatrix of one register (uint32 per lane) per matrix."""
        batch, matrices = self.batch, len(values)
        batch.require_whole_warps(m, site)
        warps = batch.size // 32
        cells = np.stack(values).view(np.uint16).reshape(matrices, warps, 8, 8)
        if transpose:
            cells = cells.transpose(0, 1, 3, 2)
        rows = np.zeros((warps, 4, 8, 8), np.uint16)
        rows[:, :matrices] = cells.transpose(1, 0, 2, 3)
        mask = self._address_lanes(matrices, m)
        self.shared.store(address, rows.reshape(-1).view(MOVER[16]), 16, mask, site, kind="stmatrix")
