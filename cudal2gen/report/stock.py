"""The stock beside measurements: the catalog by GPU and origin, verdicts, compiled kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from cudal2gen.kernel import STRUCTURES, Record
from cudal2gen.pages import Section, Table
from cudal2gen.results import Verdict

BY_NAME = (
    "Verdicts are matched by the kernel's name. One whose text has changed since keeps its name: "
    "'cudal2gen validate --changed' executes those."
)


class Stock(NamedTuple):
    """``sources``: the files that were searched for measurements. ``builds``: compiled kernels in ``folder``."""

    sources: Sequence[str]
    verdicts: Collection[Verdict]
    builds: int
    folder: str


def section(records: Sequence[Record], stock: Stock, predicate: Callable[[Record], bool]) -> Section:
    """Tables of the catalog's records that satisfy ``predicate``, and of all verdicts."""
    wrong = {verdict.record for verdict in stock.verdicts if not verdict.passed}
    right = {verdict.record for verdict in stock.verdicts} - wrong
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if predicate(record):
            groups.setdefault((record.gpu, record.problem.types, record.layout), []).append(record)
    rows = [_row(group, right, wrong) for _, group in sorted(groups.items())]
    places = Counter((verdict.on, verdict.passed) for verdict in stock.verdicts)
    verdicts = [
        (on, str(places[on, True]), str(places[on, False])) for on in dict.fromkeys(on for on, _ in sorted(places))
    ]
    return Section(
        "stock",
        "What there is",
        (f"{stock.builds} compiled kernels are in {stock.folder}.",),
        (),
        (
            Table(
                "The catalog's records by GPU and origin, their distinct kernels, and the verdicts on these",
                ("records", *STRUCTURES, "kernels", "right", "wrong", "without a verdict"),
                tuple(rows),
            ),
            Table("Verdicts by place of execution", ("executed on", "right", "wrong"), tuple(verdicts)),
        ),
        notes=(BY_NAME,),
    )


def _row(group: Sequence[Record], right: set[str], wrong: set[str]) -> tuple[str, ...]:
    origins: Counter[str] = Counter(record.origin.structure for record in group)
    names = {record.name for record in group}
    counts = (
        *(origins[origin] for origin in STRUCTURES),
        len(names),
        len(names & right),
        len(names & wrong),
        len(names - right - wrong),
    )
    first = group[0]
    return (f"{first.gpu} {first.problem.types} {first.layout}", *map(str, counts))
