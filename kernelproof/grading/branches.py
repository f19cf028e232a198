"""Comparisons of loaded values that end alike in all calls: a source may do something else on the other side."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from kernelproof.emulator.state.sites import Site
from kernelproof.grading.constants import compared_constants
from kernelproof.grading.device import Call

MOST_LINES = 5  # in a remark


class Outcomes:
    """How the comparisons of loaded values have ended in all calls so far, by kernel and place."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, Site], set[bool]] = {}

    def add(self, call: Call) -> None:
        """Add a call that was counted."""
        for place, outcomes in call.outcomes.items():
            self.seen.setdefault(place, set()).update(outcomes)

    @property
    def one_sided(self) -> list[Site]:
        """The comparisons that have ended in one way only."""
        return [site for (_, site), outcomes in self.seen.items() if len(outcomes) < 2]

    def unmet_constants(self, ptx: str) -> list[float]:
        """The constants with which these compare; planted in inputs, they may lead to the other end."""
        found = (compared_constants(ptx, f"{site.text};") for site in self.one_sided)
        return list(dict.fromkeys(chain.from_iterable(found)))

    def remark(self) -> str:
        """What was not executed, in words; "" if there is no such comparison."""
        places = list(dict.fromkeys(map(_line, self.one_sided)))
        if not places:
            return ""
        more = f" and {len(places) - MOST_LINES} more" if len(places) > MOST_LINES else ""
        return (
            "comparisons of loaded values ended alike in all calls, so what follows from their other end was not "
            f"executed: {', '.join(places[:MOST_LINES])}{more}"
        )


def _line(site: Site) -> str:
    home = site.home
    return f"line {home.line}" if home is not None else site.place


def rotations(constants: Iterable[float], most: int) -> list[tuple[float, ...]]:
    """The first constants, so many times as there are of them, each time with another one in front."""
    known = list(constants)[:most]
    return [(*known[number:], *known[:number]) for number in range(len(known))]
