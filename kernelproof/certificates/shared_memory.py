"""A CTA's shared memory: what its elements are, and whether the accesses of its threads are ordered.

Threads run in program order, and meet at barriers that all of them reach; nothing else orders them here. So of all
earlier accesses only those since the last barrier matter, and copies that have not been waited for: each element has
the thread that wrote it since then, the thread that read it (or that several did), and whether a copy to it is pending.
That state has no times in it, so a loop's state can be compared with that of an earlier turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from kernelproof.certificates.cells import Cells
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import Lanes

NOBODY, SEVERAL = -1, -2
ELEMENT = 2  # bytes that one tag describes


@dataclass
class Contents:
    """The elements' kinds and offsets; ``writer``, ``reader``: see the module. ``pending``: who copies to it.

    Copies of a state share arrays, which are read-only from then on; ``own`` comes before every change.
    """

    kinds: Lanes
    rows: Lanes
    cols: Lanes
    writer: Lanes
    reader: Lanes
    pending: Lanes
    groups: list[Lanes] = field(default_factory=list)  # places of each committed group of copies, the oldest first
    open: list[Lanes] = field(default_factory=list)  # places of the copies that are not committed yet

    @classmethod
    def empty(cls, size: int) -> Contents:
        """Nothing is known of ``size`` elements, and nothing has happened to them."""
        kinds, rows, cols = (np.zeros(size, np.int64) for _ in range(3))
        writer, reader, pending = (np.full(size, NOBODY, np.int32) for _ in range(3))
        return cls(kinds, rows, cols, writer, reader, pending)

    @property
    def _arrays(self) -> tuple[Lanes, ...]:
        return self.kinds, self.rows, self.cols, self.writer, self.reader, self.pending

    def copied(self) -> Contents:
        """The same state, which changes by itself."""
        for array in self._arrays:
            array.flags.writeable = False
        return replace(self, groups=list(self.groups), open=list(self.open))

    def own(self) -> Contents:
        """This state, with arrays that it shares with no other one."""
        self.kinds, self.rows, self.cols, self.writer, self.reader, self.pending = (
            array if array.flags.writeable else array.copy() for array in self._arrays
        )
        return self


class SharedMemory:
    """Accesses to a CTA's shared memory at known addresses. ``start``: the address of its first byte."""

    def __init__(self, size: int, start: int) -> None:
        self.elements = -(-size // ELEMENT)
        self.state, self.start, self.bytes = Contents.empty(self.elements), start, size

    def places(self, address: Lanes, size: int) -> Lanes:
        """The elements of accesses of ``size`` bytes: shape (lanes, elements of a lane). Checks bounds and alignment.
        A byte at an even address is taken for its whole element."""
        at = np.asarray(address).astype(np.int64) - self.start
        if at.min() < 0 or at.max() + size > self.bytes:
            raise NotCertified(f"an access to shared memory from byte {at.min()} to {at.max() + size} of {self.bytes}")
        if (at % max(size, ELEMENT)).any():
            raise NotCertified(f"an access of {size} bytes to shared memory is not aligned")
        return at[:, None] // ELEMENT + np.arange(max(1, size // ELEMENT))

    def write(self, at: Lanes, lanes: Lanes, cells: Cells) -> None:
        """Lanes store elements of 16 bits at places."""
        self._claim(at, lanes)
        state = self.state.own()
        state.writer[at] = lanes[:, None]
        state.kinds[at], state.rows[at], state.cols[at] = cells.kinds, cells.rows, cells.cols

    def _claim(self, at: Lanes, lanes: Lanes) -> None:
        """Check that nobody else has touched places since the last barrier."""
        state, mine = self.state, lanes[:, None]
        if np.unique(at).size != at.size:
            raise NotCertified("two lanes write the same byte of shared memory in one instruction")
        if (state.pending[at] != NOBODY).any():
            raise NotCertified("shared memory is written while a copy to it is pending")
        for other, what in ((state.writer[at], "written"), (state.reader[at], "read")):
            if ((other != NOBODY) & (other != mine)).any():
                raise NotCertified(f"shared memory is written that another thread has {what} since the last barrier")

    def read(self, at: Lanes, lanes: Lanes | None) -> Cells:
        """Lanes load elements; if ``lanes`` is None, those of a warp read together."""
        state = self.state.own()
        if (state.pending[at] != NOBODY).any():
            raise NotCertified("shared memory is read while a copy to it is pending")
        writer = state.writer[at]
        mine = NOBODY if lanes is None else lanes[:, None]
        if ((writer != NOBODY) & (writer != mine)).any():
            raise NotCertified("shared memory is read that another thread has written since the last barrier")
        if lanes is None:
            state.reader[at] = SEVERAL
        else:
            before = state.reader[at]
            reader = np.broadcast_to(lanes[:, None], at.shape)
            state.reader[at] = reader
            # Of several lanes that read a place now, one has been noted.
            others = (state.reader[at] != reader) | ((before != NOBODY) & (before != reader))
            state.reader[at[others]] = SEVERAL
        return Cells(state.kinds[at], state.rows[at], state.cols[at], ELEMENT)

    # --- asynchronous copies

    def copy(self, at: Lanes, lanes: Lanes, cells: Cells) -> None:
        """Lanes begin copies to places. They may land at any time until they are waited for."""
        self._claim(at, lanes)
        state = self.state.own()
        state.pending[at] = lanes[:, None]
        state.kinds[at], state.rows[at], state.cols[at] = cells.kinds, cells.rows, cells.cols
        state.open.append(at.reshape(-1))

    def commit(self) -> None:
        """All copies since the last commit are a group. An empty group behind which no other is pending has landed."""
        state = self.state
        if state.open or state.groups:
            state.groups.append(np.sort(np.concatenate(state.open)) if state.open else np.zeros(0, np.int64))
        state.open = []

    def wait(self, most: int) -> None:
        """All groups but the last ``most`` have landed, each thread's own for that thread alone."""
        state = self.state.own()
        while state.groups and (len(state.groups) > most or not len(state.groups[0])):
            landed = state.groups.pop(0)
            state.writer[landed] = state.pending[landed]
            state.pending[landed] = NOBODY

    def barrier(self) -> None:
        """All threads of the CTA meet: what they did before is before all that they do later."""
        state = self.state.own()
        state.writer.fill(NOBODY)
        state.reader.fill(NOBODY)
