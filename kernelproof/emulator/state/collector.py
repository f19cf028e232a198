"""Makes Python's garbage collector run less often while a launch executes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# New objects between two collections. A collection looks at the objects of the whole program; torch and triton alone
# have 250 000. The objects of a launch mostly live as long as the launch, so few are found.
NEW_OBJECTS = 50_000


@contextmanager
def few_collections() -> Iterator[None]:
    """Collect garbage only after ``NEW_OBJECTS`` new objects, until the context ends."""
    before = gc.get_threshold()
    # A threshold of 0 switches collections off.
    if before[0]:
        gc.set_threshold(max(before[0], NEW_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
