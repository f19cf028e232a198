"""Defines the exception that a session raises at its end if its launches have errors."""

from __future__ import annotations

from collections.abc import Sequence

from kernelproof.emulator import Report
from kernelproof.ground.errors import Failure


class Findings(Failure):
    """A session's launches have errors, which are in ``reports``."""

    def __init__(self, reports: Sequence[Report]) -> None:
        super().__init__("\n".join(map(str, reports)))
        self.reports = list(reports)
