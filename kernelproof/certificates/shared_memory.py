"""A CTA's shared memory in a proof: which elements it holds, and whether its threads' accesses are free of races.

Only program order and barriers of the whole CTA order accesses here. So an access can only conflict with accesses since
the last barrier, and with copies (cp.async) that have not been waited for. For each element the state has the thread
that wrote it since the barrier, the thread that read it (or a mark for several), and the thread that is copying to it.
It contains no times, so the state at a loop's head can be compared with that of an earlier iteration.

``machine`` calls this for every access. An access that may be a race raises NotCertified.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from kernelproof.certificates.cells import Cells
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import Lanes

NOBODY, SEVERAL = -1, -2  # in place of a thread's number
ELEMENT = 2  # bytes of an element


@dataclass
class Contents:
    """The state of all elements, in arrays of shape (elements,).

    ``kinds``, ``rows``, ``cols``: which datum an element is, as in ``Cells``. ``writer``, ``reader``: the thread that
    has written or read it since the last barrier, or NOBODY, or SEVERAL. ``pending``: the thread that is copying to it,
    or NOBODY.

    ``copied`` lets two states share their arrays and makes these read-only. ``own`` must be called before every change
    of an array.
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
        """All arrays with an entry for each element."""
        return self.kinds, self.rows, self.cols, self.writer, self.reader, self.pending

    def copied(self) -> Contents:
        """A copy that changes independently. It shares arrays with this state until ``own`` is called."""
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
    """Executes the accesses of a CTA's threads to its shared memory, at known addresses.

    In its methods, ``at`` has the indices of the accessed elements, shape (lanes, elements of a lane), as ``places``
    returns them. ``lanes`` has the number of each accessing thread, shape (lanes,).
    """

    def __init__(self, size: int, start: int) -> None:
        """``size``: bytes. ``start``: the address of the first byte."""
        self.elements = -(-size // ELEMENT)
        self.state, self.start, self.bytes = Contents.empty(self.elements), start, size

    def places(self, address: Lanes, size: int) -> Lanes:
        """The indices of the elements that are accessed, shape (lanes, elements of a lane), for accesses of ``size``
        bytes at an address per lane. An access to one byte, at an even address, counts as one to its element. Raises
        NotCertified if an access is not aligned or not within the memory."""
        offset = np.asarray(address).astype(np.int64) - self.start
        if offset.min() < 0 or offset.max() + size > self.bytes:
            raise NotCertified(
                f"an access to shared memory from byte {offset.min()} to {offset.max() + size} of {self.bytes}"
            )
        if (offset % max(size, ELEMENT)).any():
            raise NotCertified(f"an access of {size} bytes to shared memory is not aligned")
        return offset[:, None] // ELEMENT + np.arange(max(1, size // ELEMENT))

    def write(self, at: Lanes, lanes: Lanes, cells: Cells) -> None:
        """Lanes store elements of 16 bits. Raises NotCertified if that may be a race."""
        self._claim(at, lanes)
        state = self.state.own()
        state.writer[at] = lanes[:, None]
        state.kinds[at], state.rows[at], state.cols[at] = cells.kinds, cells.rows, cells.cols

    def _claim(self, at: Lanes, lanes: Lanes) -> None:
        """Raise NotCertified if two lanes write the same element, if another thread has accessed one since the last
        barrier, or if a copy to one is pending."""
        state, mine = self.state, lanes[:, None]
        if np.unique(at).size != at.size:
            raise NotCertified("two lanes write the same byte of shared memory in one instruction")
        if (state.pending[at] != NOBODY).any():
            raise NotCertified("shared memory is written while a copy to it is pending")
        for other, what in ((state.writer[at], "written"), (state.reader[at], "read")):
            if ((other != NOBODY) & (other != mine)).any():
                raise NotCertified(f"shared memory is written that another thread has {what} since the last barrier")

    def read(self, at: Lanes, lanes: Lanes | None) -> Cells:
        """Lanes load elements. If ``lanes`` is None, lanes of a warp load them together (ldmatrix), and any of them may
        be the reader. Raises NotCertified if that may be a race."""
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
            # If several lanes read an element in this instruction, the assignment has kept one of them, and the others
            # find a reader that is not they. Readers since the barrier (``before``) count too.
            others = (state.reader[at] != reader) | ((before != NOBODY) & (before != reader))
            state.reader[at[others]] = SEVERAL
        return Cells(state.kinds[at], state.rows[at], state.cols[at], ELEMENT)

    # --- asynchronous copies

    def copy(self, at: Lanes, lanes: Lanes, cells: Cells) -> None:
        """Lanes begin asynchronous copies, which may land at any time until they are waited for. Raises NotCertified if
        they may race with earlier accesses."""
        self._claim(at, lanes)
        state = self.state.own()
        state.pending[at] = lanes[:, None]
        state.kinds[at], state.rows[at], state.cols[at] = cells.kinds, cells.rows, cells.cols
        state.open.append(at.reshape(-1))

    def commit(self) -> None:
        """All copies since the last commit become a group. An empty group is left out if no group is pending, so that
        states with and without it are equal."""
        state = self.state
        if state.open or state.groups:
            state.groups.append(np.sort(np.concatenate(state.open)) if state.open else np.zeros(0, np.int64))
        state.open = []

    def wait(self, most: int) -> None:
        """Wait until all groups but the last ``most`` have landed. Each thread then sees its own copies. For other
        threads they are like its writes: ordered only after the next barrier."""
        state = self.state.own()
        # Empty groups at the front are dropped, too, as in ``commit``.
        while state.groups and (len(state.groups) > most or not len(state.groups[0])):
            landed = state.groups.pop(0)
            state.writer[landed] = state.pending[landed]
            state.pending[landed] = NOBODY

    def barrier(self) -> None:
        """A barrier of all threads of the CTA: accesses before it are ordered before those after it."""
        state = self.state.own()
        state.writer.fill(NOBODY)
        state.reader.fill(NOBODY)
