"""Accesses of lanes to global memory: where they go, what earlier ones left there, and which of those come before."""

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
        """Its bytes in the buffer; not for scattered accesses."""
        if self.form is Form.PACKED:
            start = int(self.offset[0]) - self.buffer.start
            return slice(start, start + len(self.offset) * self.width)
        return Rows(self.offset[::ROW] - self.buffer.start, ROW * self.width)


class TagOrigin(NamedTuple):
    """Where the tags of an access's granules come from: the instructions that left them, if those are recorded, and the
    sizes of strong accesses among them."""

    sites: Array | None
    granules: Places
    sizes: Array | None = None

    def site(self, element: int) -> int:
        """The instruction of one element, -1 if it is not recorded."""
        return -1 if self.sites is None else int(take(self.sites, self.granules)[element]) - 1

    def by_site(self, bad: Array) -> list[Array]:
        """The ``bad`` elements, by the instructions that have left their tags: each pair is a finding of its own."""
        if self.sites is None:
            return [bad]
        sites = take(self.sites, self.granules)
        return [bad & (sites == site) for site in np.unique(sites[bad])]

    def are_atomics(self, tags: Array) -> Array:
        """Which of the tagged accesses are read-modify-writes?"""
        if self.sizes is None:
            return np.zeros(len(tags), bool)
        strong = tags >> SCOPE_SHIFT & SCOPE != 0
        return np.asarray(strong & (take(self.sizes, self.granules) & READ_MODIFY_WRITE != 0))

    def matches_size(self, strong: int) -> Array | bool:
        """Which of them, if strong, cover exactly the bytes that a strong access covers? Morally strong accesses must
        overlap completely; read-modify-writes are atomic for each other whatever their sizes."""
        size = strong >> SIZE_SHIFT
        if self.sizes is None or not size:
            return True
        sizes = take(self.sizes, self.granules)
        both_modify = sizes & size & READ_MODIFY_WRITE != 0
        return np.asarray(both_modify | (sizes | READ_MODIFY_WRITE == size | READ_MODIFY_WRITE))
