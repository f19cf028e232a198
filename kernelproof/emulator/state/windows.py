"""Defines the layout of generic addresses: the top byte names the state space, the rest is an address in that space.

Global memory lies in the host's memory, at the same addresses. These are below 2**56, so their top byte is 0, that of
global memory, and the generic address of global memory is the address itself.
"""

from __future__ import annotations

from enum import IntEnum

SHIFT_TO_WINDOW = 56


class Window(IntEnum):
    """The top byte of a generic address."""

    GLOBAL = 0
    SHARED = 1
    LOCAL = 2
    PARAM = 3


def window_of(space: str) -> Window:
    """The window of a state space as PTX spells it. Unknown names give GLOBAL, as does const, which lies there."""
    return Window.__members__.get(space.upper(), Window.GLOBAL)
