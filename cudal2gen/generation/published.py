"""Finds the records that stand for published kernels, also where the catalog has chosen another record.

Where the timing model and published timings agree that a published kernel should split k, the catalog's record does
(``scripts/splits.py``). The record with the published structure is then a line of ``configs/published/records.jsonl``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cudal2gen import places
from cudal2gen.generation import catalog
from cudal2gen.kernel import Record

CLAIMS = ("exact", "nearest")  # structures of records that stand for a published kernel
NAME = "records.jsonl"


def replaced_path() -> Path:
    """The file of records with a published structure that are not in the catalog."""
    return places.shipped("configs") / "published" / NAME


def replaced() -> list[Record]:
    """The records with a published structure that the shipped catalog has replaced. Raises CatalogError."""
    return catalog.load(replaced_path())


def structures(records: Iterable[Record] | None = None) -> list[Record]:
    """The records that stand for published kernels, in the catalog's order: one for each problem.

    They are those of ``records`` (by default of the catalog) whose origin is exact or nearest, and ``replaced``.
    """
    chosen = catalog.load() if records is None else records
    by_problem = {record.problem: record for record in [*replaced(), *chosen] if record.origin.structure in CLAIMS}
    return sorted(by_problem.values(), key=lambda record: record.key)
