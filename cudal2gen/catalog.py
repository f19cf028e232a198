"""``kernels.jsonl`` and records: load, find, put, save.

One line is one record, sorted by problem; fields at their neutral value are left out.
"""

from __future__ import annotations

import codecs
import fcntl
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from cudal2gen import files, places
from cudal2gen.chips import GPUS, distance, related
from cudal2gen.errors import Failure, WrongInput, parse_json
from cudal2gen.kernel import Acc, IllegalRecord, Problem, Record, Use, explain, parse, serving
from cudal2gen.kernel.fieldset import spell
from cudal2gen.kernel.fusion import Fusion

GPU_FIRST = re.compile(r'\{"gpu":"(\w+)"')  # how a line in normal form starts


class CatalogError(WrongInput):
    """A catalog that cannot be read or written; the message gives file, line, field and rule."""


@dataclass(frozen=True)
class Match:
    """A record for a problem. ``note``: where it is not the problem's own, whose it was and what changed, in a line."""

    record: Record
    note: str | None = None


def dump(record: Record) -> str:
    """The record's line, without the newline."""
    return json.dumps(record.model_dump(mode="json"), separators=(",", ":"))


def load(path: Path | None = None, gpus: Iterable[str] | None = None) -> list[Record]:
    """All records of a catalog, in its order, or those of some GPUs: lines that start with another one's name are not
    parsed, those with a name that is no GPU's are.

    Raises CatalogError for an absent file, and with ``file:line: field=value: rule`` for the first line that is
    truncated, illegal or a duplicate.
    """
    path = path or places.catalog()
    return list(_parsed(path, _content(path), None if gpus is None else frozenset(gpus)))


@lru_cache(maxsize=4)
def _parsed(path: Path, content: bytes, gpus: frozenset[str] | None) -> tuple[Record, ...]:
    """The records of a catalog's content; kept, since a command that names several problems asks for each."""
    records: list[Record] = []
    first_lines: dict[Problem, int] = {}
    for number, line in _lines(path, content):
        if gpus is not None and (start := GPU_FIRST.match(line)) and start[1] in GPUS and start[1] not in gpus:
            continue
        record = _parse(path, number, line)
        first = first_lines.setdefault(record.problem, number)
        if first != number:
            raise CatalogError(
                f"{path}:{number}: duplicate of line {first}: {record.problem.title} has a record already"
            )
        if gpus is None or record.gpu in gpus:
            records.append(record)
    return tuple(records)


@lru_cache(maxsize=2)
def _by_problem(path: Path, content: bytes) -> dict[Problem, Record]:
    return {record.problem: record for record in _parsed(path, content, None)}


def published(records: Iterable[Record], acc: Acc) -> list[Record]:
    """The A100's records as they were published, those that tuning has replaced left out: what a policy imitates."""
    return [
        record for record in records
        if (record.gpu, record.acc) == ("a100", acc) and record.origin.structure != "tuned"
    ]  # fmt: skip


def find(problem: Problem, path: Path | None = None) -> Match:
    """The record for a problem: its own, else the nearest one, changed so far that it computes this problem.

    Raises CatalogError where no record of the accumulator becomes legal.
    """
    record = own(problem, path)
    return Match(record) if record else nearest(problem, load(path))


def own(problem: Problem, path: Path | None = None) -> Record | None:
    """The problem's own record, if the catalog has one. Raises CatalogError."""
    path = path or places.catalog()
    # In normal form the problem comes first, so a record's own line is found without parsing all the others.
    content = _content(path)
    before, start, after = (b"\n" + content).partition(f"\n{dump_problem(problem)}".encode())
    if start and start not in after:
        (line,) = _lines(path, start[1:] + after.partition(b"\n")[0])
        return _parse(path, before.count(b"\n") + 1, line[1])
    return _by_problem(path, content).get(problem)


def nearest(problem: Problem, records: Iterable[Record]) -> Match:
    """The record for a problem: its own, else the nearest of these (``kernel.serving``), for exactly this problem.

    A tile that does not divide the sizes is predicated, or the caller pads; the note says whose record it is, and how
    it serves. Raises CatalogError where no record of the accumulator becomes legal.
    """
    alike = [record for record in records if record.acc == problem.acc]
    if exact := next((record for record in alike if record.mnk == problem.mnk and record.problem == problem), None):
        return Match(exact)
    distances = (serving.distance(problem, record.problem, (record.bm, record.bn)) for record in alike)
    pairs = zip(distances, alike, strict=True)
    ranked = sorted(pairs, key=lambda pair: (pair[0], _other_types(pair[1], problem)))
    if served := serving.nearest(ranked, lambda record: serving.resized(record, problem)):
        source, record, use = served
        return Match(record, _note(problem, source, record, use))
    raise CatalogError(f"no record becomes legal for {problem.title}; see 'cudal2gen list'")


def library(
    gpu: str, acc: str, layout: str, source: str | None = None, path: Path | None = None,
    *, ab: str = "f16", d: str = "same", fusion: str = "none", batch: str = "none",
) -> list[Record]:  # fmt: skip
    """Records of an accumulator for a GPU, a layout, types, fusion and batch, one for each size that has records.

    A size's own record counts first, then the nearest one of other types, another layout or GPU, changed so far that it
    is legal here; other compute capabilities stand in where no record of the GPU's own is. ``source``: the records of
    this GPU only, even where ``gpu`` has its own. Raises CatalogError where nothing is left.
    """
    target = {"gpu": gpu, "layout": layout, "ab": ab, "d": d, "fusion": Fusion.model_validate(fusion), "batch": batch}
    for tier in _tiers(gpu, acc, source, path):
        sizes: dict[str, Record] = {}
        for record in sorted(tier, key=lambda record: _moved_distance(record, target)):
            if record.mnk not in sizes and (moved := _moved(record, target)):
                sizes[record.mnk] = moved
        if sizes:
            # A size none of whose records is legal here has the nearest of another size.
            absent = [record.problem for record in tier if record.mnk not in sizes]
            for problem in {other.mnk: other.revised(**target) for other in absent}.values():
                sizes[problem.mnk] = nearest(problem, tier).record
            return sorted(sizes.values(), key=lambda record: record.key)
    raise CatalogError(f"no record of {source or 'any GPU'} with acc {acc} is legal on {gpu}; see 'cudal2gen list'")


def _tiers(gpu: str, acc: str, source: str | None, path: Path | None) -> Iterator[list[Record]]:
    """Records of an accumulator: of the GPU's capability, then of each other GPU, the nearest first."""
    kin = {other for other in (gpu, *GPUS) if related(gpu, other)}
    yield [record for record in load(path, kin) if record.acc == acc and source in (None, record.gpu)]
    others = [record for record in load(path) if record.acc == acc and source in (None, record.gpu)]
    for other in _strangers(gpu, others):
        yield [record for record in others if record.gpu == other]


def _strangers(gpu: str, records: Iterable[Record]) -> list[str]:
    """GPUs of other capabilities that have records, the nearest first."""
    others = {record.gpu for record in records if not related(gpu, record.gpu)}
    return sorted(others, key=lambda other: (distance(gpu, other), other))


def _moved_distance(record: Record, target: Mapping[str, object]) -> tuple[float, int]:
    problem = record.problem.model_copy(update=dict(target))
    return serving.distance(problem, record.problem, (record.bm, record.bn)), _other_types(record, problem)


def _other_types(record: Record, problem: Problem) -> int:
    """How many of types, fusion and batch differ: of equally distant records those with the fewest come first."""
    of_record, of_problem = ((each.ab, each.d, each.fusion, each.batch) for each in (record, problem))
    return sum(feature != other for feature, other in zip(of_record, of_problem, strict=True))


def _moved(record: Record, target: Mapping[str, object]) -> Record | None:
    """The record on another GPU, in another layout and of other types; None where it is not legal there."""
    if all(getattr(record, name) == value for name, value in target.items()):
        return record
    resized = serving.resized(record, record.problem.revised(**target))
    return resized[0] if resized else None


def load_problems(path: Path) -> list[Problem]:
    """The problems of a list, one JSON object a line, each once; fields beside a problem's (``count``) are ignored.

    Raises CatalogError with file, line and what is wrong.
    """
    if not path.is_file():
        raise CatalogError(f"no list of problems at {path}; 'cudal2gen tune-model' writes one")
    problems: dict[Problem, None] = {}
    for number, line in _lines(path, _content(path)):
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
        for name, text in record.texts.items():  # first: no line without its text
            keep_text(text, target.parent / "sources", name)
        save([*records, record], target)
    return target


def keep_text(text: str, folder: Path, name: str) -> Path:
    """Writes a text that records name by its digest; the file. Raises Failure."""
    path = folder / f"{name}.cu"
    if not path.is_file():
        files.write(path, text)
    return path


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


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        raise CatalogError(f"no catalog at {path}; set --catalog, or restore configs/kernels.jsonl") from None
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}; name another by --catalog") from None


def _lines(path: Path, content: bytes) -> Iterator[tuple[int, str]]:
    # Only a line feed ends a line: others that Unicode has may stand within a JSON text.
    for number, line in enumerate(content.split(b"\n"), start=1):
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


def _note(problem: Problem, source: Record, record: Record, use: Use) -> str:
    """Whose record serves the problem, and how, in a line."""
    origin = source.problem
    differing = [
        getattr(origin, name) for name in ("gpu", "ab", "layout") if getattr(origin, name) != getattr(problem, name)
    ]
    whose = " ".join([*differing, origin.mnk])
    whose = f"that of {whose} stands in" if origin.gpu != problem.gpu else f"taking that of {whose}"
    how = [] if origin.ab == problem.ab else [f"whose rate is that of {problem.ab}"]
    how += [] if origin.fusion == problem.fusion else [f"with {problem.fusion} fused" if problem.fusion else "unfused"]
    how += [] if origin.batch == problem.batch else [f"with batch={problem.batch}"]
    if use.launched != serving.sizes_of(problem):
        how.append(f"padded to {use.launched.text} by copies of {use.matrices}")
    elif any(use.copied):
        how.append(f"with copies of {use.matrices} to rows on 16 bytes")
    changed = [name for name in serving.changed_fields(source, record) if name not in Problem.model_fields]
    fields = record.model_dump(mode="json")
    for name in changed:
        value = fields.get(name, "none")
        how += ["predicated"] if value == "predicate" else [f"{name}={spell(value)}"] if value != "pad" else []
    return f"no record for {problem.title}; {', '.join([whose, *how])}"
