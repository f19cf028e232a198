"""What a thread that adds partial sums has done so far: the state that ``thread_machine`` keeps besides registers.

``sum_machine`` and ``cluster_sum_proof`` compare it with what must have happened before an instruction.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum

from kernelproof.certificates.polynomials import Polynomial

Key = tuple[object, int, bool]  # a stored sum: its vector's key, its number in the vector, whether movmatrix moved it


class Phase(IntEnum):
    """Where a thread is in the kernel, which decides which barriers, atomics and accesses it may execute."""

    START = 0  # before its group's first item
    SHARE = 1  # after the last item, before the loop over the tiles of its share
    TILE = 2  # in an iteration of that loop, outside of the loop over vectors
    VECTORS = 3  # in the loop over the vectors of a tile


@dataclass(frozen=True)
class Stored:
    """The store of a sum to D(row, col). ``vector``: the number in the tile of the vector to which it belongs; ZERO in
    clusters. ``exactly``: whether paths have met since, of which one may have left out the store because D does not
    have that element or the share not that vector."""

    row: Polynomial
    col: Polynomial
    vector: Polynomial
    exactly: bool


@dataclass
class Progress:
    """What a thread has done for a tile.

    - ``waited``: it has waited until all parts of the tile are counted. Only a group's first thread does.
    - ``counted``: it has counted its group's vectors in the tile's counter. Only a group's first thread does.
    - ``synchronised``: it has passed the group's barrier.
    - ``added``: it has added and stored all of its vectors.
    - ``cleared``: it has returned the counter to zero; None if it does so exactly when its group is the last.
    - ``stores_read``: it has waited until bulk stores of its items have read shared memory.
    - ``stored``: the sums that it has stored, in VECTORS those of the current iteration.
    """

    waited: bool = False
    counted: bool = False
    synchronised: bool = False
    added: bool = False
    cleared: bool | None = False
    stores_read: bool = False
    stored: dict[Key, Stored] = field(default_factory=dict)

    def copied(self) -> Progress:
        """A copy that changes independently."""
        return replace(self, stored=dict(self.stored))
