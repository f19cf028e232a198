"""Maps threads and registers to words of tensor memory, for each shape of tcgen05.ld and tcgen05.st.

The source is PTX ISA 9.1, tcgen05, the figures of "Data movement shape"; CuTe's SM100_TMEM_LOAD layouts agree.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.state.arrays import Array

# Shape -> the registers of a thread, and the columns of tensor memory, for .x1.
SHAPES = {"32x32b": (1, 1), "16x64b": (1, 2), "16x128b": (2, 4), "16x256b": (4, 8), "16x32bx2": (1, 1)}


class TensorFragment(NamedTuple):
    """The words that a load or store of a warp touches. ``lane``, ``column``: where each register of each thread is,
    relative to the lane and column of the address; shape (registers, 32). ``lanes``: the number of lanes touched.
    ``packed``: a register holds the lower halves of two columns, ``column`` and ``column + 1``."""

    lane: Array
    column: Array
    lanes: int
    packed: bool


@lru_cache(maxsize=256)
def fragment(shape: str, times: int, packed: bool, split: int = 0) -> TensorFragment:
    """The fragment of a shape, repeated ``.x{times}``. ``split``: columns between the halves of .16x32bx2."""
    # Each branch has the lane and the column of register r of a thread, as a figure of the PTX ISA shows them. The
    # terms 0 * r and 0 * thread only broadcast an array to the shape (registers, 32).
    thread = np.arange(32)[None, :]
    r = np.arange(SHAPES[shape][0] * times)[:, None]
    if shape == "32x32b":
        lane, column = thread + 0 * r, r + 0 * thread
    elif shape == "16x64b":
        lane, column = thread // 4 + 8 * (thread % 2) + 0 * r, 2 * r + thread // 2 % 2
    elif shape == "16x128b":
        lane, column = thread // 4 + 8 * (r % 2), 4 * (r // 2) + thread % 4
    elif shape == "16x256b":
        lane, column = thread // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (thread % 4) + r % 2
    else:
        lane, column = thread % 16 + 0 * r, r + thread // 16 * split
    return TensorFragment(lane, column * (2 if packed else 1), 32 if shape == "32x32b" else 16, packed)
