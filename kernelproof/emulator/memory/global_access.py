"""Describes an access of lanes to global memory, and the tags that earlier accesses have left at its granules."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernelproof.emulator.memory.arena import Buffer
from kernelproof.emulator.memory.places import ROW, Form, Places, Rows, take
from kernelproof.emulator.memory.tags import SCOPE, SCOPE_SHIFT
from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.scopes import READ_MODIFY_WRITE, SIZE_SHIFT


class GlobalAccess(NamedTuple):
    """An access of lanes (None: all) to ``width`` bytes of a buffer each, by instruction ``site``. ``offset``: in the
    arena, per lane. ``strong``: see ``state.scopes``, 0: weak. ``form``: how the offsets lie in memory."""

    buffer: Buffer
    lanes: Array | None
    offset: Array
    width: int
    site: int
    strong: int = 0
    form: Form = Form.SCATTERED

    @property
    def bytes(self) -> Places:
        """The bytes of the buffer that it covers. Not for scattered accesses."""
        if self.form is Form.PACKED:
            start = int(self.offset[0]) - self.buffer.start
            return slice(start, start + len(self.offset) * self.width)
        return Rows(self.offset[::ROW] - self.buffer.start, ROW * self.width)


class TagOrigin(NamedTuple):
    """The accesses that have left the tags of some granules: their instructions, if these are recorded, and the sizes
    of the strong ones."""

    sites: Array | None
    granules: Places
    sizes: Array | None = None

    def site(self, element: int) -> int:
        """The instruction of one element, -1 if it is not recorded."""
        return -1 if self.sites is None else int(take(self.sites, self.granules)[element]) - 1

    def by_site(self, bad: Array) -> list[Array]:
        """Split the mask ``bad`` by the instructions that have left the tags, since each pair of instructions is a
        finding of its own."""
        if self.sites is None:
            return [bad]
        sites = take(self.sites, self.granules)
        return [bad & (sites == site) for site in np.unique(sites[bad])]

    def are_atomics(self, tags: Array) -> Array:
        """A mask of the tagged accesses that are read-modify-writes."""
        if self.sizes is None:
            return np.zeros(len(tags), bool)
        strong = tags >> SCOPE_SHIFT & SCOPE != 0
        return np.asarray(strong & (take(self.sizes, self.granules) & READ_MODIFY_WRITE != 0))

    def matches_size(self, strong: int) -> Array | bool:
        """A mask of the tagged accesses that, if they are strong, have the size of a strong access. Morally strong
        accesses must overlap completely; only read-modify-writes are atomic for each other whatever their sizes."""
        size = strong >> SIZE_SHIFT
        if self.sizes is None or not size:
            return True
        sizes = take(self.sizes, self.granules)
        both_modify = sizes & size & READ_MODIFY_WRITE != 0
        return np.asarray(both_modify | (sizes | READ_MODIFY_WRITE == size | READ_MODIFY_WRITE))
