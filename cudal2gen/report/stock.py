"""Writes the section of a report that counts records, verdicts and compiled kernels.

It tells a reader without measurements what the catalog holds and how much of it was checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from cudal2gen.generation.catalog import Entry
from cudal2gen.kernel import STRUCTURES, Problem
from cudal2gen.results import Ruling, executed_in
from cudal2gen.results.proofs import Proof
from kernelproof.ground.pages import Section, Table

CHANGED = "'cudal2gen validate --changed' executes the records whose binaries have no verdict."


class Stock(NamedTuple):
    """The things that the section counts.

    ``sources``: the files that were searched for measurements. ``entries``: the problems and origins of the catalog's
    records. ``verdicts``: outcomes of checks. ``builds``: the number of compiled kernels in ``folder``. ``proofs``:
    outcomes of proofs that kernels are right for every problem.
    """

    sources: Sequence[str]
    entries: Sequence[Entry]
    verdicts: Collection[Ruling]
    builds: int
    folder: str
    proofs: Collection[Proof] = ()


def section(stock: Stock, predicate: Callable[[Problem], bool]) -> Section:
    """The section with the numbers of the records whose problems satisfy ``predicate``, and of all verdicts."""
    groups: dict[str, Counter[str]] = {}
    for problem, structure in stock.entries:
        if predicate(problem):
            groups.setdefault(f"{problem.gpu} {problem.types} {problem.layout}", Counter())[structure] += 1
    rows = [
        (title, str(origins.total()), *(str(origins[structure]) for structure in STRUCTURES))
        for title, origins in sorted(groups.items())
    ]
    places = Counter((verdict.on, verdict.passed) for verdict in stock.verdicts)
    verdicts = [
        (executed_in(on), str(places[on, True]), str(places[on, False])) for on in sorted({on for on, _ in places})
    ]
    if stock.proofs:
        outcomes = Counter(proof.outcome for proof in stock.proofs)
        verdicts.append(("proven, for every problem", str(outcomes["certified"]), str(outcomes["refuted"])))
    return Section(
        "stock",
        "What there is",
        (f"{stock.builds} compiled kernels are in {stock.folder}.",),
        (),
        (
            Table("The catalog's records by GPU and origin", ("records of", "all", *STRUCTURES), tuple(rows)),
            Table("Verdicts on binaries, by place of execution", ("executed", "right", "wrong"), tuple(verdicts)),
        ),
        notes=(CHANGED,),
    )
