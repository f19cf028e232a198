"""Fixed draws: ``make test`` takes the same part of a large set every time, ``make thorough`` takes the whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

# Whether this is ``make thorough``.
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def draw_part(items: Sequence[T], step: int) -> Sequence[T]:
    """Every ``step``-th item, the first included; all of them in ``make thorough``."""
    return items if THOROUGH else items[::step]


def draw_few_by_key(key: Callable[[T], Hashable], items: Sequence[T], most: int) -> list[T]:
    """At most ``most`` items of each key, spread evenly; all of them in ``make thorough``."""
    keys = dict.fromkeys(map(key, items))
    groups = [[item for item in items if key(item) == each] for each in keys]
    return [item for group in groups for item in draw_part(group, -(-len(group) // most))]


def draw_part_by_key(key: Callable[[T], Hashable], items: Sequence[T], step: int) -> list[T]:
    """``draw_part`` applied to the items of each key, so that each key has at least one."""
    keys = dict.fromkeys(map(key, items))
    return [item for each in keys for item in draw_part([item for item in items if key(item) == each], step)]


def without_constants_of_modules() -> None:
    """Makes Hypothesis draw the same in every process from now on.

    By default it also draws constants of this checkout's imported modules. These depend on earlier tests, on any change
    of a module, and on the folder's name. Old versions of Hypothesis do not draw them.
    """
    with suppress(ImportError):
        from hypothesis.internal.conjecture import providers
        from hypothesis.internal.constants_ast import Constants

        providers._get_local_constants = Constants
