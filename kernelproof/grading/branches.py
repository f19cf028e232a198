"""Finds comparisons of loaded values that had the same result in all calls, so that one branch was never executed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from kernelproof.emulator.state.counters import Comparison
from kernelproof.emulator.state.sites import Site
from kernelproof.grading import constants

MOST_LINES = 5  # most source lines in a remark


class Outcomes:
    """The results that comparisons of loaded values had in all calls so far, by kernel and place."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, Site], Comparison] = {}

    def add(self, comparisons: Mapping[tuple[str, Site], Comparison]) -> None:
        """Add the comparisons of a launch or call that was executed with counters."""
        for place, item in comparisons.items():
            self.seen.setdefault(place, Comparison()).add(item.outcomes, item.operands)

    @property
    def one_sided(self) -> list[Site]:
        """The comparisons that had only one result."""
        return [site for (_, site), item in self.seen.items() if len(item.outcomes) < 2]

    def unmet_constants(self) -> list[float]:
        """The numbers in the comparisons that had only one result. Inputs with these may lead to the other result.

        A number is an operand that had one value in all calls: a constant of the text, of a table in memory, or an
        argument of the kernel.
        """
        numbers = chain.from_iterable(
            constants.readings(bits, _type(site))
            for (_, site), item in self.seen.items()
            for bits in item.operands.values()
            if len(item.outcomes) < 2 and bits is not None
        )
        return list(dict.fromkeys(filter(constants.is_plantable, numbers)))

    def remark(self) -> str:
        """A sentence that says which comparisons had only one result; "" if there are none."""
        places = list(dict.fromkeys(map(line, self.one_sided)))
        if not places:
            return ""
        more = f" and {len(places) - MOST_LINES} more" if len(places) > MOST_LINES else ""
        return (
            "comparisons of loaded values had one result in all calls, so what follows from the other result was not "
            f"executed: {', '.join(places[:MOST_LINES])}{more}"
        )


def _type(site: Site) -> str:
    """The type of the operands of a comparison: the last part of its opcode, which may follow a guard."""
    opcode = next(word for word in site.text.split() if not word.startswith("@"))
    return opcode.rstrip(";").split(".")[-1]


def window_message(site: Site) -> str:
    """The message of a finding on an instruction that reads upper bits of a generic address."""
    return (
        f"{line(site)} reads upper bits of a generic address of shared or local memory, which say where the device has "
        "its windows"
    )


def line(site: Site) -> str:
    """Where a comparison is: its source line, or its place in the PTX if the line is not known."""
    home = site.home
    return f"line {home.line}" if home is not None else site.place


def rotations(constants: Iterable[float], most: int) -> list[tuple[float, ...]]:
    """All rotations of the first ``most`` constants, one for each call that plants them in its inputs: each constant
    comes first once."""
    first = list(constants)[:most]
    return [(*first[number:], *first[:number]) for number in range(len(first))]
