"""Finds comparisons of loaded values that had the same result in all calls, so that one branch was never executed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from kernelproof.emulator.state.sites import Site
from kernelproof.grading.constants import compared_constants
from kernelproof.grading.device import Call

MOST_LINES = 5  # most source lines in a remark


class Outcomes:
    """The results that comparisons of loaded values had in all calls so far, by kernel and place."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, Site], set[bool]] = {}

    def add(self, call: Call) -> None:
        """Add a call that was executed with counters."""
        for place, outcomes in call.outcomes.items():
            self.seen.setdefault(place, set()).update(outcomes)

    @property
    def one_sided(self) -> list[Site]:
        """The comparisons that had only one result."""
        return [site for (_, site), outcomes in self.seen.items() if len(outcomes) < 2]

    def unmet_constants(self, ptx: str) -> list[float]:
        """The constants in the comparisons that had only one result. Inputs with these may lead to the other result."""
        found = (compared_constants(ptx, f"{site.text};") for site in self.one_sided)
        return list(dict.fromkeys(chain.from_iterable(found)))

    def remark(self) -> str:
        """A sentence that says which comparisons had only one result; "" if there are none."""
        places = list(dict.fromkeys(map(_line, self.one_sided)))
        if not places:
            return ""
        more = f" and {len(places) - MOST_LINES} more" if len(places) > MOST_LINES else ""
        return (
            "comparisons of loaded values had one result in all calls, so what follows from the other result was not "
            f"executed: {', '.join(places[:MOST_LINES])}{more}"
        )


def _line(site: Site) -> str:
    """Where a comparison is: its source line, or its place in the PTX if the line is not known."""
    home = site.home
    return f"line {home.line}" if home is not None else site.place


def rotations(constants: Iterable[float], most: int) -> list[tuple[float, ...]]:
    """All rotations of the first ``most`` constants, one for each call that plants them in its inputs: each constant
    comes first once."""
    first = list(constants)[:most]
    return [(*first[number:], *first[:number]) for number in range(len(first))]
