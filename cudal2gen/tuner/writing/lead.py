"""Keeps the fastest kernel that the sessions on one problem have written, so that each of them can show it.

``scripts/writing_population.py`` compares this with other ways of sharing kernels.
"""

from __future__ import annotations

import threading

from cudal2gen.tuner.writing.judging import Attempt


class Lead:
    """The fastest right kernel of the sessions on one problem. Their threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fastest: Attempt | None = None

    @property
    def fastest(self) -> Attempt | None:
        """The kernel with the least cost of those offered; None if no right one was offered yet."""
        with self._lock:
            return self._fastest

    def offer(self, attempt: Attempt) -> None:
        """Makes a right kernel the fastest, if its cost is less than that of the present one."""
        if not attempt.trial.measured:
            return
        with self._lock:
            if self._fastest is None or attempt.trial.cost < self._fastest.trial.cost:
                self._fastest = attempt
