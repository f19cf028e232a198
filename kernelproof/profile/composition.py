"""Puts a profile together from its parts, which are the same for profiles of cubins and of records."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kernelproof import sass
from kernelproof.profile import advice, figures
from kernelproof.profile.loop import Listing, source_text


def compose(
    function: sass.Function,
    listing: Listing,
    loop: figures.MainLoop,
    occupancy: figures.Occupancy | None,
    time: figures.Time | None,
    changes: Iterable[figures.Advice],
    *,
    arch: str,
    gpu: str,
    problem: str | None = None,
    source: Path | None = None,
) -> figures.Profile:
    """Returns the profile of a function.

    ``changes``: candidates for advice; those that shorten the time enough are kept. ``source``: the CUDA text that the
    function was compiled from, by default the files that the cubin names.
    """
    return figures.Profile(
        kind="profile",
        version=figures.VERSION,
        modelled=True,
        kernel=function.name,
        arch=arch,
        gpu=gpu,
        problem=problem,
        registers=function.registers,
        spill_bytes=sass.spill_bytes(function),
        instructions=len(function.instructions),
        loop=loop,
        occupancy=occupancy,
        time=time,
        advice=advice.worthwhile(list(changes)),
        lines=listing.lines(source_text(source)),
        issues=listing.issues(),
        busy=listing.busy(),
        hazards=tuple(
            figures.Hazard(earlier=_words(found.earlier), later=_words(found.later), why=found.why)
            for found in sass.hazards(function)
        ),
    )


def _words(instruction: sass.Instruction) -> str:
    """The address and the text of an instruction."""
    return f"{instruction.address:04x} {instruction.text}"
