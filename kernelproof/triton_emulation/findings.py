"""``Findings``: the exception that a session raises at its end."""

from __future__ import annotations

from collections.abc import Sequence

from kernelproof.emulator import Report
from kernelproof.ground.errors import Failure


class Findings(Failure):
    """A session's launches broke rules; ``reports`` has what and where."""

    def __init__(self, reports: Sequence[Report]) -> None:
        super().__init__("\n".join(map(str, reports)))
        self.reports = list(reports)
