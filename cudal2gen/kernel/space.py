"""Lists the search space of a problem: legal structures, and free fields that are chosen independently of them.

Families propose decisions (``Record.candidates``). ``candidates`` keeps those that pass the record's own rules; each is
a structure. Fields that no rule ties to others (``Record.free_fields``) are chosen in addition to the structure, so
that they do not multiply the list. This module repeats no rule and knows no family.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudal2gen.kernel import (
    FAMILIES,
    GPUS,
    REGISTERS_THREAD,
    Fields,
    IllegalRecord,
    Origin,
    Problem,
    Record,
    fit,
    parse,
)

# Fields that are not decisions: those of the problem, and the origin.
NO_DECISION = frozenset({"problem", *Problem.model_fields, "origin"})


def decisions(record: Record) -> Fields:
    """A record's fields without problem and origin, as JSON values; see ``Record.decisions``."""
    return record.decisions()


@dataclass(frozen=True)
class Candidates:
    """The legal structures of one problem. ``fields`` and ``records`` have the same order."""

    problem: Problem
    fields: Sequence[Fields]
    records: Sequence[Record]

    @cached_property
    def heads(self) -> dict[str, Mapping[str, Sequence[Fields]]]:
        """The free fields of every family of these structures: family -> name of a head -> alternatives. A head is a
        group of free fields that are chosen together, as ``free_fields`` of the family states."""
        return {name: FAMILIES[name].free_fields(self.problem) for name in self.families}

    @cached_property
    def families(self) -> dict[str, Fields]:
        """The families of these structures, with the first structure of each."""
        first: dict[str, Fields] = {}
        for fields in self.fields:
            first.setdefault(fields["family"], fields)
        return first

    @cached_property
    def index(self) -> list[dict[str, int]]:
        """For each structural field (in the order of ``columns``), a number for each of its values, as JSON text."""
        values: list[dict[str, int]] = [{} for _ in self.columns]
        for fields in self.fields:
            for numbers, name in zip(values, self.columns, strict=True):
                numbers.setdefault(json.dumps(fields.get(name)), len(numbers))
        return values

    @cached_property
    def columns(self) -> list[str]:
        """The structural fields of these families."""
        names = dict.fromkeys(name for fields in self.families.values() for name in fields)
        free = {name for family in self.families for name in FAMILIES[family].FREE_FIELDS}
        return [name for name in names if name not in NO_DECISION | free]

    @cached_property
    def codes(self) -> NDArray[np.int16]:
        """The structures as numbers of ``index``: a row per structure, a column per structural field."""
        rows = [self.code(fields) for fields in self.fields]
        return np.array(rows, np.int16)

    def code(self, fields: Mapping[str, Any]) -> list[int]:
        """A record's structure as numbers of ``index``; -1 for a value that no candidate has."""
        pairs = zip(self.index, self.columns, strict=True)
        return [numbers.get(json.dumps(fields.get(name)), -1) for numbers, name in pairs]

    def distances(self, fields: Mapping[str, Any]) -> NDArray[np.int64]:
        """For each candidate, the number of structural fields in which it differs from a record."""
        distances: NDArray[np.int64] = (self.codes != np.array(self.code(fields), np.int16)).sum(axis=1)
        return distances

    def compose(self, row: int, chosen: Mapping[str, int], source: str) -> Record:
        """The record of structure ``row`` with these alternatives of its free fields, by index. Raises IllegalRecord.

        ``source``: the tuner that the record's origin names.
        """
        fields = dict(self.fields[row])
        for head, index in chosen.items():
            fields |= self.heads[fields["family"]][head][index]
        return parse(fields | {"origin": tuned(source)})

    def refusal(self, record: Record) -> str:  # noqa: ARG002
        """Why a legal record is not a candidate, or "". Here every legal record is one; see ``Recorded``."""
        return ""

    def draw(self, rng: random.Random, source: str) -> Record:
        """A random candidate, all equally likely."""
        row = rng.randrange(len(self.records))
        heads = self.heads[self.records[row].family]
        return self.compose(row, {head: rng.randrange(len(values)) for head, values in heads.items()}, source)


@dataclass(frozen=True)
class Recorded(Candidates):
    """The candidates of a problem that earlier trials recorded; free fields keep their recorded values."""

    @cached_property
    def heads(self) -> dict[str, Mapping[str, Sequence[Fields]]]:
        """Recorded candidates have no free fields."""
        return {name: {} for name in self.families}

    @cached_property
    def columns(self) -> list[str]:
        """All fields of these families."""
        names = dict.fromkeys(name for fields in self.families.values() for name in fields)
        return [name for name in names if name not in NO_DECISION]

    @cached_property
    def _keys(self) -> frozenset[object]:
        return frozenset(record.kernel_key for record in self.records)

    def refusal(self, record: Record) -> str:
        """Why a record cannot be replayed; empty if it was recorded."""
        return "" if record.kernel_key in self._keys else f"{record.name}: was not recorded for {self.problem.mnk}"


def recorded(records: Iterable[Record]) -> Recorded:
    """These records of one problem as its candidates. Raises ValueError if there are none."""
    distinct = list({record.kernel_key: record for record in records}.values())
    if not distinct:
        raise ValueError("no trials: a search among recorded trials needs a problem that has some")
    return Recorded(distinct[0].problem, [record.model_dump(mode="json") for record in distinct], distinct)


def adopt(record: Record, structures: Candidates, source: str) -> Record:
    """Another problem's decisions applied to this problem: unchanged if that is legal, otherwise the nearest legal
    record.

    A record for another GPU that is illegal here is replaced by the most similar candidate: a record of another GPU
    generation has no legal neighbour that is any good.
    """
    problem = structures.problem
    if isinstance(structures, Recorded):
        return structures.compose(int(structures.distances(decisions(record)).argmin()), {}, source)
    try:
        near = record.at(problem) if record.gpu != problem.gpu else fit(record, {}, problem).record
        return credited(near, source)
    except IllegalRecord:
        row = int(structures.distances(decisions(record)).argmin())
        return structures.compose(row, {}, source)


def credited(record: Record, source: str) -> Record:
    """The record with the tuner as its origin."""
    return record.at(record.problem, origin=Origin(source=source, structure="tuned", changed=()))


def tuned(source: str) -> Fields:
    """The origin of a record that a tuner made."""
    return {"source": source, "structure": "tuned", "changed": []}


def candidates(problem: Problem, most: int | None = None, seed: int = 0) -> Candidates:
    """Every legal structure for a problem, or the legal ones among ``most`` proposals that ``seed`` draws.

    Raises IllegalRecord if none is legal.
    """
    proposed = list(proposals(problem))
    if most is not None and len(proposed) > most:
        proposed = random.Random(f"{seed} {problem.mnk}").sample(proposed, most)
    fields: list[Fields] = []
    records: list[Record] = []
    for proposal in proposed:
        try:
            record = parse(proposal)
        except IllegalRecord:
            continue
        if record.estimated_registers <= REGISTERS_THREAD and record.ctas_per_sm(record.estimated_registers):
            fields.append(proposal)
            records.append(record)
    if not records:
        raise IllegalRecord(f"no family has a legal record for {problem.title}")
    return Candidates(problem, fields, records)


def proposals(problem: Problem) -> Iterator[Fields]:
    """The proposals of all families that serve the problem's GPU, in the order of ``FAMILIES``."""
    for name, family in FAMILIES.items():
        if family.serves(GPUS[problem.gpu]):
            start = base(problem, name)
            yield from (start | fields for fields in family.candidates(problem))


def base(problem: Problem, family: str) -> Fields:
    """Problem, family and origin of a record whose decisions are still open."""
    origin = {"source": "candidate", "structure": "modelled", "changed": []}
    return problem.model_dump(mode="json") | {"family": family, "origin": origin}


def differing(old: Record, new: Record) -> dict[str, tuple[Any, Any]]:
    """Decisions in which two records differ, with the old and the new value; None if a family has no such field."""
    before, after = (record.decisions() for record in (old, new))
    names: Iterable[str] = dict.fromkeys([*before, *after])
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}
