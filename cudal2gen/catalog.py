"""``kernels.jsonl`` and records: load, find, put, save.

One line is one record, sorted by problem, every field written out.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from cudal2gen import places
from cudal2gen.kernel import IllegalRecord, Problem, Record, explain, parse, revise

# Where a GPU has no records of its own: whose to try, before all others.
STAND_INS = {
    "l40s": ("rtx3090",),
    "rtx5090": ("rtx3090", "l40s"),
    "h100": ("h200", "a100"),
    "h200": ("h100", "a100"),
    "rtx3090": ("l40s", "a100"),
    "a100": ("h200", "h100"),
}


class CatalogError(ValueError):
    """A catalog that cannot be read or written; the message gives file, line, field and rule."""


@dataclass(frozen=True)
class Found:
    """A record for a problem, and what the user should know where it is not the problem's own."""

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
    seen: dict[object, int] = {}
    for number, line in _lines(path):
        record = _parse(path, number, line)
        if record.key in seen:
            raise CatalogError(
                f"{path}:{number}: duplicate of line {seen[record.key]}: {_spell(record)} has a record already"
            )
        seen[record.key] = number
        records.append(record)
    return records


def find(problem: Problem, path: Path | None = None) -> Found:
    """The record for a problem: its own, else the nearest legal one with a note that says so.

    Off the grid of sizes it is the nearest larger record; for a GPU or layout without records, a related GPU's or
    layout's. Raises CatalogError where no record of the accumulator fits.
    """
    path = path or places.catalog()
    # In normal form the problem comes first, so a record's own line is found without parsing all the others.
    start = dump_problem(problem)
    own = [(number, line) for number, line in _lines(path) if line.startswith(start)]
    if len(own) == 1:
        return Found(_parse(path, *own[0]))
    records = load(path)
    exact = next((record for record in records if record.key == problem.key), None)
    return Found(exact) if exact else nearest(problem, records)


def nearest(problem: Problem, records: Iterable[Record]) -> Found:
    """The closest legal record for a problem that has none; see ``find``."""
    same_acc = [record for record in records if record.acc == problem.acc]
    sources = [problem.gpu, *STAND_INS.get(problem.gpu, ())]
    sources += sorted({record.gpu for record in same_acc} - set(sources))
    layouts = [problem.layout, *({"tn", "nn"} - {problem.layout})]
    for gpu in sources:
        for layout in layouts:
            pool = [record for record in same_acc if (record.gpu, record.layout) == (gpu, layout)]
            for record in sorted(pool, key=lambda record: _distance(problem, record)):
                try:
                    taken = revise(record, gpu=problem.gpu, layout=problem.layout)
                except IllegalRecord:
                    continue
                return Found(taken, _note(problem, record))
    raise CatalogError(
        f"no record for {_spell(problem)}, and none of another GPU or size is legal there; see 'cudal2gen list'"
    )


def fitted(problem: Problem, records: Iterable[Record]) -> Found:
    """A record for exactly this problem: its own, else the nearest one with the problem's sizes.

    A tile that does not divide the sizes is predicated, or padded by the caller. Raises CatalogError where no record of
    the accumulator becomes legal.
    """
    records = list(records)
    if own := next((record for record in records if record.key == problem.key), None):
        return Found(own)
    asked = problem.model_dump()
    sources = {gpu: at for at, gpu in enumerate((problem.gpu, *STAND_INS.get(problem.gpu, ())))}
    pool = [record for record in records if record.acc == problem.acc]
    strange = len(sources)
    pool.sort(key=lambda one: (sources.get(one.gpu, strange), one.layout != problem.layout, _distance(problem, one)))
    for record in pool:
        for padding in ({}, {"padding": "predicate"}, {"padding": "pad"}):
            changed = sorted(name for name, value in (asked | padding).items() if getattr(record, name, None) != value)
            origin = {"source": record.origin.source, "structure": "modelled", "changed": changed}
            try:
                taken = revise(record, **asked, **padding, origin=origin)
            except IllegalRecord:
                continue
            return Found(taken, f"{_spell(problem)} takes the record of {_spell(record)}, {', '.join(changed)} changed")
    raise CatalogError(f"no record becomes legal for {_spell(problem)}; see 'cudal2gen list'")


def problems(path: Path) -> list[Problem]:
    """The problems of a list, one JSON object a line, each once; what else a line says (``count``) is passed over.

    Raises CatalogError with file, line and what is wrong.
    """
    if not path.is_file():
        raise CatalogError(f"no list of problems at {path}")
    found: dict[Problem, None] = {}
    for number, line in _lines(path):
        try:
            values = json.loads(line)
            found[Problem.model_validate({name: values[name] for name in Problem.model_fields})] = None
        except (ValueError, TypeError, KeyError) as error:
            what = explain(error) if isinstance(error, ValidationError) else f"not a problem ({error})"
            raise CatalogError(f"{path}:{number}: {what}") from None
    return list(found)


def library(gpu: str, acc: str, layout: str, of: str | None = None, path: Path | None = None) -> list[Record]:
    """All records of a GPU, accumulator and layout; where there are none, a related GPU's or layout's, taken over.

    ``of``: take this GPU's records, whatever there is. Records that are not legal on ``gpu`` are left out. Raises
    CatalogError where nothing is left.
    """
    records = [record for record in load(path) if record.acc == acc]
    others = sorted({record.gpu for record in records} - {gpu, *STAND_INS.get(gpu, ())})
    for source in [of] if of else [gpu, *STAND_INS.get(gpu, ()), *others]:
        for stored in (layout, *({"tn", "nn"} - {layout})):
            pool = [record for record in records if (record.gpu, record.layout) == (source, stored)]
            taken = [one for record in pool if (one := _taken_over(record, gpu, layout))]
            if taken:
                return taken
    raise CatalogError(f"no record of {of or 'any GPU'} with acc {acc} is legal on {gpu}; see 'cudal2gen list'")


def _taken_over(record: Record, gpu: str, layout: str) -> Record | None:
    if (record.gpu, record.layout) == (gpu, layout):
        return record
    try:
        return revise(record, gpu=gpu, layout=layout)
    except IllegalRecord:
        return None


def put(record: Record, path: Path | None = None) -> Path:
    """Writes one record into the catalog, in place of the problem's old one; answers the file that was written."""
    target = (path or places.editable_catalog()).resolve()
    with _edited_alone(target):
        source = target if target.is_file() else places.catalog()
        records = [old for old in load(source) if old.key != record.key]
        save([*records, record], target)
    return target


def save(records: Iterable[Record], path: Path) -> None:
    """Writes a catalog, sorted; readers see the old file or the new one, never a part."""
    path = path.resolve()
    lines = "".join(dump(record) + "\n" for record in sorted(records, key=lambda record: record.key))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=".kernels-")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
            Path(scratch).chmod(path.stat().st_mode if path.exists() else 0o644)
            Path(scratch).replace(path)
        except BaseException:
            Path(scratch).unlink()
            raise
    except OSError as error:
        raise CatalogError(f"cannot write {path}: {error.strerror}; the catalog is as it was") from error


@contextmanager
def _edited_alone(path: Path) -> Iterator[None]:
    """Holds off other edits of a catalog, in this process and in others, from reading it to writing it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise CatalogError(f"cannot write {path}: {error.strerror}; the catalog is as it was") from error


def dump_problem(problem: Problem) -> str:
    """How a line of a catalog starts whose record answers this problem."""
    fields = {name: getattr(problem, name) for name in Problem.model_fields}
    return json.dumps(fields, separators=(",", ":"))[:-1] + ","


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise CatalogError(f"no catalog at {path}; set --catalog, or restore configs/kernels.jsonl") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield number, line


def _parse(path: Path, number: int, line: str) -> Record:
    try:
        return parse(line)
    except IllegalRecord as error:
        raise CatalogError(f"{path}:{number}: {error}") from None


def _distance(problem: Problem, record: Record) -> tuple[bool, float]:
    """Records that hold the problem come first, then the smaller ratio of sizes, as a sum of logarithms."""
    pairs = [(problem.m, record.m), (problem.n, record.n), (problem.k, record.k)]
    return any(own < asked for asked, own in pairs), sum(abs(math.log2(own / asked)) for asked, own in pairs)


def _note(problem: Problem, record: Record) -> str:
    asked, taken = _spell(problem), _spell(record)
    larger = record.m >= problem.m and record.n >= problem.n and record.k >= problem.k
    how = "the nearest larger one" if larger and record.mnk != problem.mnk else "the nearest one"
    if record.mnk == problem.mnk:
        differing = [name for name in ("gpu", "layout") if getattr(record, name) != getattr(problem, name)]
        how = f"with {' and '.join(differing)} changed"
    return f"no record for {asked}; taking that of {taken}, {how}"


def _spell(problem: Problem) -> str:
    return f"{problem.gpu} {problem.acc} {problem.layout} {problem.mnk}"
