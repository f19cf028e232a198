"""A CTA's shared memory in a proof: which elements it holds, and whether its threads' accesses are ordered.

Only program order, and barriers that all threads reach, order accesses here. So of all earlier accesses only those
matter that came after the last barrier, and copies that have not been waited for. Each element of the memory has the
thread that wrote it since the barrier, the thread that read it (or a mark for several), and the thread that is copying
to it. This state contains no times, so the state of a loop can be compared with that of an earlier iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from kernelproof.certificates.cells import Cells
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import Lanes

NOBODY, SEVERAL = -1, -2
ELEMENT = 2  # bytes of an element


@dataclass
class Contents:
    """The state of all elements, each array of shape (elements,). ``kinds``, ``rows``, ``cols``: as in ``Cells``.
    ``writer``, ``reader``: the thread that has accessed an element since the last barrier, or NOBODY or SEVERAL.
    ``pending``: the thread that is copying to it, or NOBODY.

    Copies of a state share arrays, which are read-only from then on. ``own`` must be called before every change.
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
        """The state of ``size`` unknown elements that nobody has accessed."""
        kinds, rows, cols = (np.zeros(size, np.int64) for _ in range(3))
        writer, reader, pending = (np.full(size, NOBODY, np.int32) for _ in range(3))
        return cls(kinds, rows, cols, writer, reader, pending)

    @property
    def _arrays(self) -> tuple[Lanes, ...]:
        return self.kinds, self.rows, self.cols, self.writer, self.reader, self.pending

    def copied(self) -> Contents:
        """A copy that changes independently."""
        for array in self._arrays:
            array.flags.writeable = False
        return replace(self, groups=list(self.groups), open=list(self.open))

    def own(self) -> Contents:
        """This state, after it has copied all arrays that it shares with another one."""
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
        """Check that no other thread has accessed places since the last barrier, and that no copy to them is
        pending."""
        state, mine = self.state, lanes[:, None]
        if np.unique(at).size != at.size:
            raise NotCertified("two lanes write the same byte of shared memory in one instruction")
        if (state.pending[at] != NOBODY).any():
            raise NotCertified("shared memory is written while a copy to it is pending")
        for other, what in ((state.writer[at], "written"), (state.reader[at], "read")):
            if ((other != NOBODY) & (other != mine)).any():
                raise NotCertified(f"shared memory is written that another thread has {what} since the last barrier")

    def read(self, at: Lanes, lanes: Lanes | None) -> Cells:
        """Lanes load elements. If ``lanes`` is None, the lanes of a warp read them together."""
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
            # If several lanes read a place in this instruction, the assignment has kept one of them.
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
        """All copies since the last commit become a group. An empty group that follows no pending one is left out."""
        state = self.state
        if state.open or state.groups:
            state.groups.append(np.sort(np.concatenate(state.open)) if state.open else np.zeros(0, np.int64))
        state.open = []

    def wait(self, most: int) -> None:
        """Wait until all groups but the last ``most`` have landed. Each thread then sees its own copies; to the others
        they are like its writes."""
        state = self.state.own()
        while state.groups and (len(state.groups) > most or not len(state.groups[0])):
            landed = state.groups.pop(0)
            state.writer[landed] = state.pending[landed]
            state.pending[landed] = NOBODY

    def barrier(self) -> None:
        """All threads of the CTA meet: earlier accesses are ordered before all later ones."""
        state = self.state.own()
        state.writer.fill(NOBODY)
        state.reader.fill(NOBODY)
