"""``kernels.jsonl`` and records: load, find, put, save.

One line is one record, sorted by problem; fields at their neutral value are left out.
"""

from __future__ import annotations

import codecs
import fcntl
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from cudal2gen import files, places
from cudal2gen.chips import stand_ins
from cudal2gen.errors import Failure, WrongInput, parse_json
from cudal2gen.kernel import Acc, IllegalRecord, Layout, Origin, Problem, Record, explain, parse, revise


class CatalogError(WrongInput):
    """A catalog that cannot be read or written; the message gives file, line, field and rule."""


@dataclass(frozen=True)
class Match:
    """A record that answers a problem. ``note``: for the user, where it is not the problem's own."""

    record: Record
    note: str | None = None


def dump(record: Record) -> str:
    """The record's line, without the newline."""
    return json.dumps(record.model_dump(mode="json"), separators=(",", ":"))


def load(path: Path | None = None) -> list[Record]:
    """All records of a catalog, in its order.

    Raises CatalogError for an absent file, and with ``file:line: field=value: rule`` for the first line that is
    truncated, illegal or a duplicate.
    """
    path = path or places.catalog()
    records: list[Record] = []
    first_lines: dict[Problem, int] = {}
    for number, line in _lines(path):
        record = _parse(path, number, line)
        first = first_lines.setdefault(record.problem, number)
        if first != number:
            raise CatalogError(
                f"{path}:{number}: duplicate of line {first}: {_spelling(record.problem)} has a record already"
            )
        records.append(record)
    return records


def published(records: Iterable[Record], acc: Acc) -> list[Record]:
    """The A100's records as they were published, those that tuning has replaced left out: what a policy imitates."""
    return [
        record for record in records
        if (record.gpu, record.acc) == ("a100", acc) and record.origin.structure != "tuned"
    ]  # fmt: skip


def find(problem: Problem, path: Path | None = None) -> Match:
    """The record for a problem: its own, else the nearest legal one with a note that says so.

    Off the grid of sizes it is the nearest larger record; for a GPU or layout without records, a related GPU's or
    layout's. Raises CatalogError where no record of the accumulator fits.
    """
    path = path or places.catalog()
    # In normal form the problem comes first, so a record's own line is found without parsing all the others.
    start = dump_problem(problem)
    own = [(number, line) for number, line in _lines(path) if line.startswith(start)]
    if len(own) == 1:
        return Match(_parse(path, *own[0]))
    records = load(path)
    exact = next((record for record in records if record.key == problem.key), None)
    return Match(exact) if exact else nearest(problem, records)


def nearest(problem: Problem, records: Iterable[Record]) -> Match:
    """The closest legal record for a problem that has none; see ``find``."""
    for record in _candidates(problem, records):
        if moved := _moved(record, problem.gpu, problem.layout):
            return Match(moved, _note(problem, record))
    raise CatalogError(
        f"no record for {_spelling(problem)}, and none of another GPU or size is legal there; see 'cudal2gen list'"
    )


def fit(problem: Problem, records: Iterable[Record]) -> Match:
    """A record for exactly this problem: its own, else the nearest one with the problem's sizes.

    A tile that does not divide the sizes is predicated, or padded by the caller. Raises CatalogError where no record of
    the accumulator becomes legal.
    """
    records = list(records)
    if own := next((record for record in records if record.key == problem.key), None):
        return Match(own)
    for record in _candidates(problem, records):
        moved = [name for name in Problem.model_fields if getattr(record.problem, name) != getattr(problem, name)]
        for padding in ({}, {"padding": "predicate"}, {"padding": "pad"}):
            changed = sorted([*moved, *(name for name in padding if getattr(record, name, None) != padding[name])])
            origin = Origin(source=record.origin.source, structure="modelled", changed=tuple(changed))
            try:
                fitted = record.at(problem, **padding, origin=origin)
            except IllegalRecord:
                continue
            names = ", ".join(changed)
            return Match(
                fitted, f"{_spelling(problem)} takes the record of {_spelling(record.problem)}, {names} changed"
            )
    raise CatalogError(f"no record becomes legal for {_spelling(problem)}; see 'cudal2gen list'")


def library(gpu: str, acc: str, layout: str, source: str | None = None, path: Path | None = None) -> list[Record]:
    """All records of a GPU, accumulator and layout; where there are none, those of a related GPU or layout, moved here.

    ``source``: the records of this GPU only, even where ``gpu`` has its own. Records that are not legal on ``gpu`` are
    left out. Raises CatalogError where nothing is left.
    """
    for group in _groups(gpu, acc, layout, load(path)):
        if source in (None, group[0].gpu):
            moved = [record for record in (_moved(record, gpu, layout) for record in group) if record]
            if moved:
                return moved
    raise CatalogError(f"no record of {source or 'any GPU'} with acc {acc} is legal on {gpu}; see 'cudal2gen list'")


def _groups(gpu: str, acc: str, layout: str, records: Iterable[Record]) -> Iterator[list[Record]]:
    """Records of an accumulator, by GPU and layout. The order of every search is here.

    The GPU's own come first, then those of its stand-ins, then of other GPUs by name; of each GPU those of the layout
    before those of the other. No group is empty.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.acc == acc:
            groups.setdefault((record.gpu, record.layout), []).append(record)
    related = (gpu, *stand_ins(gpu))
    others = sorted({name for name, _ in groups} - set(related))
    layouts = sorted(get_args(Layout), key=lambda name: name != layout)
    return (groups[key] for key in product((*related, *others), layouts) if key in groups)


def _candidates(problem: Problem, records: Iterable[Record]) -> Iterator[Record]:
    """Records that may stand in for a problem's own, group by group, the closest in size first."""
    for group in _groups(problem.gpu, problem.acc, problem.layout, records):
        yield from sorted(group, key=lambda record: _distance(problem, record))


def _moved(record: Record, gpu: str, layout: str) -> Record | None:
    """The record on another GPU and in another layout; None where it is not legal there."""
    if (record.gpu, record.layout) == (gpu, layout):
        return record
    try:
        return revise(record, gpu=gpu, layout=layout)
    except IllegalRecord:
        return None


def load_problems(path: Path) -> list[Problem]:
    """The problems of a list, one JSON object a line, each once; fields beside a problem's (``count``) are ignored.

    Raises CatalogError with file, line and what is wrong.
    """
    if not path.is_file():
        raise CatalogError(f"no list of problems at {path}; 'cudal2gen tune-model' writes one")
    problems: dict[Problem, None] = {}
    for number, line in _lines(path):
        try:
            values = parse_json(line)
            if not isinstance(values, dict):
                raise CatalogError("not a JSON object")
            fields = {name: values[name] for name in Problem.model_fields if name in values}
            problems[Problem.model_validate(fields)] = None
        except (ValidationError, WrongInput) as error:
            what = explain(error) if isinstance(error, ValidationError) else error
            raise CatalogError(f"{path}:{number}: not a problem: {what}") from None
    return list(problems)


def put(record: Record, path: Path | None = None) -> Path:
    """Writes one record into the catalog, in place of the problem's old one, and returns the file.

    The first edit of an installed package copies the shipped catalog into the user's data folder.
    """
    target = (path or places.editable_catalog()).resolve()
    with _exclusive_edit(target):
        source = target if target.is_file() else places.catalog()
        records = [old for old in load(source) if old.key != record.key]
        save([*records, record], target)
    return target


def save(records: Iterable[Record], path: Path) -> None:
    """Writes a catalog, sorted; readers see the old file or the new one, never a part."""
    files.write(path, "".join(dump(record) + "\n" for record in sorted(records, key=lambda record: record.key)))


@contextmanager
def _exclusive_edit(path: Path) -> Iterator[None]:
    """Keeps other edits of a catalog waiting, of this process and of others, from reading it to writing it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}; it is as it was") from None


def dump_problem(problem: Problem) -> str:
    """How a line of a catalog starts whose record answers this problem."""
    # With the key that follows: a problem of more fields starts with the same ones.
    return json.dumps(problem.model_dump(mode="json"), separators=(",", ":"))[:-1] + ',"family":'


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise CatalogError(f"no catalog at {path}; set --catalog, or restore configs/kernels.jsonl") from None
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}; name another by --catalog") from None
    # Only a line feed ends a line: others that Unicode has may stand within a JSON text.
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise CatalogError(f"{path}:{number}: byte {error.start + 1} is not UTF-8") from None
        if text.strip():
            yield number, text


def _parse(path: Path, number: int, line: str) -> Record:
    try:
        return parse(line)
    except IllegalRecord as error:
        raise CatalogError(f"{path}:{number}: {error}") from None


def _distance(problem: Problem, record: Record) -> tuple[bool, float]:
    """A key for sorting: records that hold the problem first, then the smaller sum of logarithms of the size ratios."""
    pairs = [(problem.m, record.m), (problem.n, record.n), (problem.k, record.k)]
    return any(size < extent for extent, size in pairs), sum(abs(math.log2(size / extent)) for extent, size in pairs)


def _note(problem: Problem, record: Record) -> str:
    if record.mnk == problem.mnk:
        differing = [name for name in ("gpu", "layout") if getattr(record, name) != getattr(problem, name)]
        how = f"with {' and '.join(differing)} changed"
    else:
        larger = record.m >= problem.m and record.n >= problem.n and record.k >= problem.k
        how = "the nearest larger one" if larger else "the nearest one"
    return f"no record for {_spelling(problem)}; taking that of {_spelling(record.problem)}, {how}"


def _spelling(problem: Problem) -> str:
    return f"{problem.gpu} {problem.acc} {problem.layout} {problem.mnk}"
