"""Shapes of tcgen05.ld and tcgen05.st: the thread and register of each word of tensor memory.

Source: PTX ISA 9.1, figures of "Data movement shape" of tcgen05; the layouts of CuTe's SM100_TMEM_LOAD say the same.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.state.arrays import Array

# Registers of a thread for x1, and columns.
SHAPES = {"32x32b": (1, 1), "16x64b": (1, 2), "16x128b": (2, 4), "16x256b": (4, 8), "16x32bx2": (1, 1)}


class Fragment(NamedTuple):
    """A load or store of a warp: per register and thread, shape (registers, 32), the lane (from the warp's first one,
    or the one that the address names) and the column (from the address). ``lanes``: how many it touches; ``packed``:
    a register holds the lower halves of two columns, the second ``column + 1``."""

    lane: Array
    column: Array
    lanes: int
    packed: bool


@lru_cache(maxsize=256)
def fragment(shape: str, times: int, packed: bool, split: int = 0) -> Fragment:
    """The fragment of a shape, ``.x{times}``; ``split``: columns between the halves of .16x32bx2."""
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
    return Fragment(lane, column * (2 if packed else 1), 32 if shape == "32x32b" else 16, packed)
