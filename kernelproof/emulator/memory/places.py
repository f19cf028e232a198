"""Reads and writes the places in an array that many lanes access: a slice, rows of 32 neighbours, or single elements.

NumPy reads and writes slices and rows several times faster than single elements.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.state.arrays import Array

# Lanes of a row: those of a warp.
ROW = 32


class Form(Enum):
    """How the elements that lanes access lie in memory: anywhere (scattered), consecutively within each warp (rows), or
    consecutively over all lanes (packed)."""

    SCATTERED = 0
    ROWS = 1
    PACKED = 2


class Rows(NamedTuple):
    """Rows of ``length`` neighbouring elements. ``starts``: the number of each row's first element."""

    starts: Array
    length: int = ROW


Places = Array | slice | Rows


def _by_row(array: Array, length: int) -> Array:
    """A view of an array whose element i is the row that begins at element i, as one opaque element (type V). Rows
    overlap in memory; NumPy copies each as one block."""
    size = array.dtype.itemsize
    return np.ndarray((len(array) - length + 1,), np.dtype(f"V{size * length}"), array, 0, (size,))


def take(array: Array, places: Places) -> Array:
    """The elements at places, in the order of lanes. For a slice this is a view."""
    if isinstance(places, Rows):
        return np.asarray(_by_row(array, places.length)[places.starts].view(array.dtype))
    return np.asarray(array[places])


def numbers(places: Places) -> Array:
    """The numbers of the elements at places, in the order of lanes."""
    if isinstance(places, slice):
        return np.arange(places.start, places.stop, places.step or 1)
    if isinstance(places, Rows):
        return np.asarray((places.starts[:, None] + np.arange(places.length)).reshape(-1))
    return places


def put(array: Array, places: Places, values: Array | int) -> None:
    """Write values, in the order of lanes, or the same value everywhere, to the elements at places."""
    if not isinstance(places, Rows):
        array[places] = values
        return
    if isinstance(values, int):
        values = np.full(places.length, values, array.dtype)
    row = np.dtype(f"V{array.dtype.itemsize * places.length}")
    _by_row(array, places.length)[places.starts] = np.ascontiguousarray(values, array.dtype).view(row)
