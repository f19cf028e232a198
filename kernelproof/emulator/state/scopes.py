"""Defines scopes of memory order (PTX ISA, "Scope"): the threads with which a fence, atomic or mbarrier synchronises.

The strength of an access is one small integer, which is 0 for a weak access:

    bits 0-1  the scope (``Scope``)
    bit 2     ``ORDERS``: it acquires (a load) or releases (a store); a relaxed access is strong without it
    bit 3     ``CHECKED``: a weak load whose value a compare-and-swap checks
    bit 4     ``READ_ONLY``: a load through the read-only path, which is weak
    bits 5-7  the size of a strong access, and above it whether it is a read-modify-write
    bit 8     ``VOLATILE``: a volatile load of shared memory in a kernel without a loop that polls, which is weak
    bit 9     ``CONSTANT``: a load of constant memory, which no kernel writes
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class Scope(IntEnum):
    """The threads of a CTA, of its cluster, or of the device. Two threads synchronise only if the scope of each side
    includes the other side."""

    CTA = 1
    CLUSTER = 2
    GPU = 3


SCOPES = tuple(Scope)
_BY_NAME = {"cta": Scope.CTA, "cluster": Scope.CLUSTER, "gpu": Scope.GPU, "gl": Scope.GPU, "sys": Scope.GPU}
_BY_BITS = {int(scope): scope for scope in SCOPES}
# Set in a strong access that acquires or releases.
ORDERS = 4
# A load through the read-only path (ld.global.nc). It is weak.
READ_ONLY = 16
# A volatile load in a kernel without a polling loop. It does not race with atomics; volatile stores are weak there.
VOLATILE = 256
# A load of constant memory. It is weak, and whatever another kernel does, its value is the same.
CONSTANT = 512
# A weak load whose value a compare-and-swap checks. It takes part in races as a relaxed load would.
CHECKED = 8


# The size of a strong access above this bit: 1 for 4 bytes and less, 2 for 8, 3 for 16, with READ_MODIFY_WRITE added
# for atomics. Atomics narrower than 4 bytes are compiled to ones of 4 bytes, so all of these have one size.
SIZE_SHIFT, READ_MODIFY_WRITE = 5, 4


def sized(strong: int, width: int, read_modify_write: bool = False) -> int:
    """The strength of an access with the size of its elements, ``width`` bytes, added; 0 for a weak access."""
    size = max(width, 4).bit_length() - 2
    return strong | (size | READ_MODIFY_WRITE * read_modify_write) << SIZE_SHIFT if strong else 0


def scope_in(parts: Iterable[str], default: Scope) -> Scope:
    """The scope that an opcode names."""
    return next((_BY_NAME[part] for part in parts if part in _BY_NAME), default)


def restricted(parts: Iterable[str]) -> bool:
    """Does a fence order accesses to shared memory only (``.sync_restrict``)?"""
    return any(part.startswith("sync_restrict") for part in parts)


def scope_of(strong: int) -> Scope:
    """The scope of a strong access."""
    return _BY_BITS[strong & 3]
