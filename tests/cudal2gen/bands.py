"""Computes what the launcher should tell a kernel about the numbering of tiles: the struct Bands of ``tma.j2``."""

from __future__ import annotations

from tests.kernelproof.certificates.test_reciprocals import constants

WORDS = 12  # words of 32 bits in the struct


def last_width(across: int, band: int) -> int:
    """Tiles across the last band if it is narrower than ``band``, else 1."""
    return across % band or 1


def reciprocal(divisor: int) -> tuple[int, int, int]:
    """A divisor, and what a kernel multiplies and shifts by to divide by it."""
    return divisor, *constants(divisor)


def words(rows: int, cols: int, along_n: int, band: int) -> list[int]:
    """The struct for so many rows and columns of cluster tiles, in bands of a width, as words of 32 bits."""
    along, across = (cols, rows) if along_n else (rows, cols)
    divisors = along * band, band, last_width(across, band)
    return [along_n, along, across, *(word for each in divisors for word in reciprocal(each))]


def reciprocal_names(rows: int, cols: int, along_n: int, band: int) -> dict[str, int]:
    """A claim has names for the multipliers and shifts of a launch. Returns the value of each."""
    values = words(rows, cols, along_n, band)
    stems = {"tiles": 3, "width": 6, "last": 9}
    parts = {"multiplier": 1, "shift": 2}
    return {f"{stem}_{part}": values[at + i] for stem, at in stems.items() for part, i in parts.items()}
