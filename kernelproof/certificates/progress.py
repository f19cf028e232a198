"""What a thread does when it adds partial sums: where it is, and what it has done for a tile."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum

from kernelproof.certificates.polynomials import Polynomial

Key = tuple[object, int, bool]  # a vector, which sum of it, and whether movmatrix exchanges it


class Phase(IntEnum):
    """What a thread is doing, which decides what it may do besides computing."""

    START = 0  # the way to its group's first item
    SHARE = 1  # the way to its share of the vectors
    TILE = 2  # a tile of its share
    VECTORS = 3  # the vectors of a tile


@dataclass(frozen=True)
class Stored:
    """The store of a sum: its place in D, and the vector to which it belongs. ``exactly``: it is stored if and only if
    its place lies in D and the vector in the share."""

    row: Polynomial
    col: Polynomial
    vector: Polynomial
    exactly: bool


@dataclass
class Progress:
    """What a thread has done for a tile. ``waited``: for all parts of the tile. ``counted``: its group's vectors.
    ``met``: at the group's barrier. ``added``: all vectors. ``cleared``: it has returned the counter to zero; None if
    it does so exactly when its group is the last. ``stored``: vector and element -> the store of that sum."""

    waited: bool = False
    counted: bool = False
    met: bool = False
    added: bool = False
    cleared: bool | None = False
    stored: dict[Key, Stored] = field(default_factory=dict)

    def copied(self) -> Progress:
        return replace(self, stored=dict(self.stored))
