"""Fixed draws: ``make test`` takes the same part of a large set every time, ``make thorough`` takes the whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def drawn(items: Sequence[T], step: int) -> Sequence[T]:
    """Every ``step``-th item, the first included; all of them in ``make thorough``."""
    return items if THOROUGH else items[::step]


def drawn_by(key: Callable[[T], Hashable], items: Sequence[T], step: int) -> list[T]:
    """``drawn`` of the items of each key on its own, so that each key has at least one."""
    keys = dict.fromkeys(map(key, items))
    return [item for each in keys for item in drawn([item for item in items if key(item) == each], step)]
