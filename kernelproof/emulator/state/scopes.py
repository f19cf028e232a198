"""Scopes of memory order: which threads a fence, an atomic or an mbarrier operation synchronises with."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class Scope(IntEnum):
    """The threads of a CTA, of its cluster, of the device. A synchronisation holds between two threads if the scopes of
    both sides reach the other one."""

    CTA = 1
    CLUSTER = 2
    GPU = 3


SCOPES = tuple(Scope)
_BY_NAME = {"cta": Scope.CTA, "cluster": Scope.CLUSTER, "gpu": Scope.GPU, "gl": Scope.GPU, "sys": Scope.GPU}
# A strong access is a number: its scope, with this bit if it acquires or releases; a weak one is 0.
ORDERS = 4
# A load through the read-only path, which is weak.
READ_ONLY = 16
# A weak load whose value a compare-and-swap checks: it takes part as a relaxed one.
CHECKED = 8


# Where the size of a strong access is in its number: 1 for 4 bytes and less, 2 for 8, 3 for 16; then whether it is a
# read-modify-write. Narrow atomics are made of those of 4 bytes, so these are of one size.
SIZE_SHIFT, READ_MODIFY_WRITE = 5, 4


def sized(strong: int, width: int, read_modify_write: bool = False) -> int:
    """A strong access with the bytes of its elements."""
    size = max(width, 4).bit_length() - 2
    return strong | (size | READ_MODIFY_WRITE * read_modify_write) << SIZE_SHIFT if strong else 0


def scope_in(parts: Iterable[str], default: Scope) -> Scope:
    """The scope that an opcode names."""
    return next((_BY_NAME[part] for part in parts if part in _BY_NAME), default)


def restricted(parts: Iterable[str]) -> bool:
    """Whether a fence orders what happens in shared memory only."""
    return any(part.startswith("sync_restrict") for part in parts)


def scope_of(strong: int) -> Scope:
    """The scope of a strong access."""
    return Scope(strong & Scope.GPU)
