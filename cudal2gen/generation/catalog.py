"""Loads, searches and writes the catalog of records, ``kernels.jsonl``.

Each line is one record; lines are sorted by problem. Fields with their neutral value are left out.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from cudal2gen import places
from cudal2gen.kernel import IllegalRecord, Problem, Record, Use, explain, parse, serving
from cudal2gen.kernel.fieldset import spell
from cudal2gen.kernel.fusion import PLAIN, Fusion
from cudal2gen.kernel.problem import MAX_EXTENT
from kernelproof.ground import files
from kernelproof.ground.chips import GPUS, distance, related
from kernelproof.ground.errors import Failure, WrongInput, parse_json

# Beginnings of a line in normal form: the GPU, and all fields up to the sizes.
GPU_START = re.compile(r'\{"gpu":"(\w+)"')
SIZES_START = re.compile(GPU_START.pattern + r',"acc":"(\w+)","layout":"(\w+)","m":([0-9]+),"n":([0-9]+),"k":([0-9]+),')
ANY_TILE = (MAX_EXTENT, MAX_EXTENT)  # a tile that covers every problem, so that its distance is a lower bound
FIRST_LINES = 64  # a search for the nearest record parses this many lines first


class CatalogError(WrongInput):
    """A catalog that cannot be read or written; the message gives file, line, field and rule."""


Served = tuple[Record, Record, Use]  # a record of the catalog, that record adapted to a problem, and its use


@dataclass(frozen=True)
class Match:
    """A record for a problem. ``note``: if it is not the problem's own, one line that says whose it is and what
    changed."""

    record: Record
    note: str | None = None


def dump(record: Record) -> str:
    """The record's line, without the newline."""
    return json.dumps(record.model_dump(mode="json"), separators=(",", ":"))


def load(path: Path | None = None, gpus: Iterable[str] | None = None) -> list[Record]:
    """All records of a catalog in its order, or those for some GPUs.

    With ``gpus``, lines that start with the name of another known GPU are not parsed. Raises CatalogError for an absent
    file, and with ``file:line: field=value: rule`` for the first line that is truncated, illegal or a duplicate.
    """
    path = path or places.catalog()
    return list(_parsed(path, _content(path), None if gpus is None else frozenset(gpus)))


@lru_cache(maxsize=4)
def _parsed(path: Path, content: bytes, gpus: frozenset[str] | None) -> tuple[Record, ...]:
    """The records of a catalog's content. They are cached, since a command may load the catalog once per problem."""
    records = (
        (number, _parse(path, number, line))
        for number, line in _lines(path, content)
        if gpus is None or not (start := GPU_START.match(line)) or start[1] not in GPUS or start[1] in gpus
    )
    return tuple(record for record in _by_problem(path, records).values() if gpus is None or record.gpu in gpus)


def _by_problem(path: Path, records: Iterable[tuple[int, Record]]) -> dict[Problem, Record]:
    """Records of numbered lines by problem, in order. Raises CatalogError if two records have the same problem."""
    unique: dict[Problem, Record] = {}
    first_lines: dict[Problem, int] = {}
    for number, record in records:
        first = first_lines.setdefault(record.problem, number)
        if first != number:
            raise CatalogError(
                f"{path}:{number}: duplicate of line {first}: {record.problem.title} has a record already"
            )
        unique[record.problem] = record
    return unique


def some(admits: Callable[[Problem], bool], path: Path | None = None) -> list[Record]:
    """The records of a catalog whose problems are admitted, in its order.

    Only lines with admitted GPU, accumulator, layout and sizes are parsed. ``admits`` is also called with problems that
    have only these fields, so it may read no others. Raises CatalogError like ``load``.
    """
    path = path or places.catalog()
    by_start = _by_start(path, _content(path))
    groups = [lines for lines in by_start.values() if not (start := lines[0].start) or admits(start)]
    numbered = [(line.number, _parse(path, line.number, line.text)) for line in sorted(chain(*groups))]
    return [record for record in _by_problem(path, numbered).values() if admits(record.problem)]


class Entry(NamedTuple):
    """The problem of a catalog's line and the ``structure`` of its origin. The record is not checked."""

    problem: Problem
    structure: str


def entries(path: Path | None = None) -> list[Entry]:
    """The problems for which a catalog has records, in a tenth of the time of ``load``. Raises CatalogError."""
    path = path or places.catalog()
    rows = []
    for number, line in _lines(path, _content(path)):
        try:
            values = parse_json(line)
            problem = Problem.model_validate({name: values[name] for name in Problem.model_fields if name in values})
            rows.append(Entry(problem, str(values["origin"]["structure"])))
        except (ValidationError, WrongInput, TypeError, KeyError, AttributeError):
            _parse(path, number, line)  # says what is wrong
            raise
    return rows


class _Line(NamedTuple):
    """A line of a catalog. ``start``: its GPU, accumulator, layout and sizes, which are read from a line in normal form
    without parsing it. The other fields of that problem have their defaults, not the record's values.
    """

    number: int
    text: str
    start: Problem | None


@lru_cache(maxsize=2)
def _by_start(path: Path, content: bytes) -> dict[tuple[object, ...], list[_Line]]:
    """The lines of a catalog by their start. Lines that are not in normal form have the key ()."""
    lines: dict[tuple[object, ...], list[_Line]] = {}
    for number, text in _lines(path, content):
        match = SIZES_START.match(text)
        start = None
        if match and match[1] in GPUS:
            m, n, k = map(int, match.groups()[3:])
            # The default of fusion is named, since pydantic would copy it deeply for each line.
            start = Problem.model_construct(
                None, gpu=match[1], acc=match[2], layout=match[3], m=m, n=n, k=k, fusion=PLAIN
            )
        lines.setdefault(_start(start) if start else (), []).append(_Line(number, text, start))
    return lines


def _start(problem: Problem) -> tuple[object, ...]:
    """The fields at the start of a problem's line, in the order in which lines are sorted."""
    return problem.gpu, problem.acc, problem.layout, problem.m, problem.n, problem.k


def find(problem: Problem, path: Path | None = None) -> Match:
    """The record for a problem: its own, or the nearest one with the changes that it needs to compute this problem.

    Raises CatalogError if no record with this accumulator can be adapted to the problem.
    """
    path = path or places.catalog()
    if record := own(problem, path):
        return Match(record)
    if not (by_start := _by_start(path, _content(path))):
        raise no_records(path)
    near: list[tuple[int, Record]] = []
    for lines, farther in _by_distance(problem, by_start):
        near += ((line.number, _parse(path, line.number, line.text)) for line in lines)
        served = _served(problem, [record for _, record in sorted(near, key=itemgetter(0))])
        if served and serving.cost(problem, served[0], served[2]) < farther:  # every unparsed record is farther
            return _match(problem, served)
    raise _none_legal(problem)


def no_records(path: Path | None = None) -> CatalogError:
    """The error for an empty catalog."""
    return CatalogError(f"{path or places.catalog()} has no records; set --catalog, or restore configs/kernels.jsonl")


def _by_distance(
    problem: Problem, by_start: Mapping[tuple[object, ...], list[_Line]]
) -> Iterator[tuple[list[_Line], float]]:
    """The lines with a problem's accumulator in parts, nearest first, each with a lower bound of the later distances.

    Lines that are not in normal form come with the first part, since their distance is unknown.
    """
    lines = [
        (serving.distance(problem, line.start, ANY_TILE), line)
        for line in chain(*by_start.values())
        if line.start and line.start.acc == problem.acc
    ]
    lines.sort(key=itemgetter(0))
    part, size = by_start.get((), []), FIRST_LINES
    while lines:
        part = [*part, *(line for _, line in lines[:size])]
        lines = lines[size:]
        yield part, lines[0][0] if lines else math.inf
        part, size = [], 4 * size
    if part:
        yield part, math.inf


def own(problem: Problem, path: Path | None = None) -> Record | None:
    """The problem's own record, or None. Raises CatalogError."""
    path = path or places.catalog()
    # In normal form the problem comes first, so a record's own line is found without parsing all the others.
    content = _content(path)
    before, start, after = (b"\n" + content).partition(f"\n{dump_problem(problem)}".encode())
    if start and start not in after:
        (line,) = _lines(path, start[1:] + after.partition(b"\n")[0])
        return _parse(path, before.count(b"\n") + 1, line[1])
    by_start = _by_start(path, content)
    lines = sorted(chain(by_start.get((), ()), by_start.get(_start(problem), ())), key=itemgetter(0))
    records = [(line.number, _parse(path, line.number, line.text)) for line in lines]
    return _by_problem(path, records).get(problem)


def nearest(problem: Problem, records: Iterable[Record]) -> Match:
    """The record for exactly this problem: its own, or the nearest of ``records`` by ``kernel.serving``.

    If the tile does not divide the sizes, it is predicated or the caller pads. The note says whose record it is and
    how it serves. Raises CatalogError if no record with this accumulator can be adapted to the problem.
    """
    candidates = [record for record in records if record.acc == problem.acc]
    if exact := next(
        (record for record in candidates if record.mnk == problem.mnk and record.problem == problem), None
    ):
        return Match(exact)
    if served := _served(problem, candidates):
        return _match(problem, served)
    raise _none_legal(problem)


def _served(problem: Problem, candidates: Sequence[Record]) -> Served | None:
    """The record that serves the problem best, with the changes that it needs. All candidates have its accumulator."""
    distances = (serving.distance(problem, record.problem, (record.bm, record.bn)) for record in candidates)
    pairs = zip(distances, candidates, strict=True)
    ranked = sorted(pairs, key=lambda pair: (pair[0], _other_types(pair[1], problem)))
    return serving.nearest(ranked, lambda record: serving.resized(record, problem))


def _match(problem: Problem, served: Served) -> Match:
    """The match for a record that was adapted to the problem."""
    source, record, use = served
    return Match(record, _note(problem, source, record, use))


def _none_legal(problem: Problem) -> CatalogError:
    """The error for a problem to which no record can be adapted."""
    return CatalogError(f"no record becomes legal for {problem.title}; see 'cudal2gen list'")


def library(
    gpu: str, acc: str, layout: str, source: str | None = None, path: Path | None = None,
    *, ab: str = "f16", d: str = "same", fusion: str = "none", batch: str = "none",
) -> list[Record]:  # fmt: skip
    """Records of an accumulator for a GPU, a layout, types, fusion and batch, one for each size that has records.

    For each size its own record comes first, then the nearest one of other types, another layout or GPU, changed until
    it is legal here. Other compute capabilities stand in only if the GPU's own has no record. ``source``: use only this
    GPU's records, even if ``gpu`` has its own. Raises CatalogError if no record remains.
    """
    target = {"gpu": gpu, "layout": layout, "ab": ab, "d": d, "fusion": Fusion.model_validate(fusion), "batch": batch}
    for tier in _tiers(gpu, acc, source, path):
        sizes: dict[str, Record] = {}
        for record in sorted(tier, key=lambda record: _target_distance(record, target)):
            if record.mnk not in sizes and (adapted := _adapted(record, target)):
                sizes[record.mnk] = adapted
        if sizes:
            # For a size none of whose records is legal here, the nearest record of another size is adapted.
            absent = [record.problem for record in tier if record.mnk not in sizes]
            for problem in {other.mnk: other.revised(**target) for other in absent}.values():
                sizes[problem.mnk] = nearest(problem, tier).record
            return sorted(sizes.values(), key=lambda record: record.key)
    if not load(path):
        raise no_records(path)
    raise CatalogError(f"no record of {source or 'any GPU'} with acc {acc} is legal on {gpu}; see 'cudal2gen list'")


def _tiers(gpu: str, acc: str, source: str | None, path: Path | None) -> Iterator[list[Record]]:
    """Records of an accumulator: of the GPU's capability, then of each other GPU, the nearest first."""
    same_capability = {other for other in (gpu, *GPUS) if related(gpu, other)}
    yield [record for record in load(path, same_capability) if record.acc == acc and source in (None, record.gpu)]
    candidates = [record for record in load(path) if record.acc == acc and source in (None, record.gpu)]
    for other in _unrelated_gpus(gpu, candidates):
        yield [record for record in candidates if record.gpu == other]


def _unrelated_gpus(gpu: str, records: Iterable[Record]) -> list[str]:
    """GPUs of other capabilities that have records, the nearest first."""
    gpus = {record.gpu for record in records if not related(gpu, record.gpu)}
    return sorted(gpus, key=lambda other: (distance(gpu, other), other))


def _target_distance(record: Record, target: Mapping[str, object]) -> tuple[float, int]:
    """A record's distance from the problem with its sizes and the fields of ``target``, and ``_other_types``."""
    problem = record.problem.model_copy(update=dict(target))
    return serving.distance(problem, record.problem, (record.bm, record.bn)), _other_types(record, problem)


def _other_types(record: Record, problem: Problem) -> int:
    """How many of types, fusion and batch differ. Among equally distant records, those with the fewest come first."""
    names = ("ab", "d", "fusion", "batch")
    return sum(getattr(record, name) != getattr(problem, name) for name in names)


def _adapted(record: Record, target: Mapping[str, object]) -> Record | None:
    """The record with the problem's fields changed to those of ``target``; None if that is not legal."""
    if all(getattr(record, name) == value for name, value in target.items()):
        return record
    resized = serving.resized(record, record.problem.revised(**target))
    return resized[0] if resized else None


def load_problems(path: Path) -> list[Problem]:
    """The distinct problems of a list with one JSON object per line. Other fields, such as ``count``, are ignored.

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
            reason = explain(error) if isinstance(error, ValidationError) else error
            raise CatalogError(f"{path}:{number}: not a problem: {reason}") from None
    return list(problems)


def put(record: Record, path: Path | None = None) -> Path:
    """Writes one record into the catalog, in place of the problem's old one, and returns the file.

    The first edit of an installed package copies the shipped catalog into the user's data folder. Lines of other
    problems stay as they are, and those in normal form are not parsed.
    """
    target = (path or places.editable_catalog()).resolve()
    with _exclusive_edit(target):
        source = target if target.is_file() else places.catalog()
        lines = _lines_with(record, source)
        for name, text in record.texts.items():  # written before the catalog, so that every line has its text
            keep_text(text, target.parent / "sources", name)
        files.write(target, "".join(f"{line}\n" for line in lines))
    return target


def _lines_with(record: Record, path: Path) -> list[str]:
    """The sorted lines of a catalog with a record added. Raises CatalogError if a line that must be parsed is
    illegal."""
    by_start = _by_start(path, _content(path))
    records = {line.number: _parse(path, line.number, line.text) for line in by_start.get((), ())}
    starts = {_start(item.problem) for item in (record, *records.values())}
    for line in chain(*(by_start.get(start, ()) for start in starts)):
        records[line.number] = _parse(path, line.number, line.text)
    parsed = _by_problem(path, sorted(records.items())) | {record.problem: record}
    # A key begins with the start of its line, so lines whose start no parsed record shares are sorted by that alone.
    keyed: list[tuple[tuple[object, ...], str]] = [(item.key, dump(item)) for item in parsed.values()]
    unparsed = [(start, lines) for start, lines in by_start.items() if start not in {(), *starts}]
    keyed += [(start, line.text.strip()) for start, lines in unparsed for line in lines]
    return [text for _, text in sorted(keyed, key=itemgetter(0))]


def keep_text(text: str, folder: Path, name: str) -> Path:
    """Writes a text that records name by its digest, and returns the file. Raises Failure."""
    path = folder / f"{name}.cu"
    if not path.is_file():
        files.write(path, text)
    return path


def save(records: Iterable[Record], path: Path) -> None:
    """Writes a catalog, sorted; readers see the old file or the new one, never a part."""
    files.write(path, "".join(dump(record) + "\n" for record in sorted(records, key=lambda record: record.key)))


@contextmanager
def _exclusive_edit(path: Path) -> Iterator[None]:
    """Locks a catalog from reading until writing, against other edits in this process and in others."""
    try:
        with files.locked(path.parent / f".{path.name}.lock"):
            yield
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}; it is as it was") from None


def dump_problem(problem: Problem) -> str:
    """The beginning of a catalog line whose record is for this problem."""
    # The next key is included, because the line of a problem with more fields starts with the same text.
    return json.dumps(problem.model_dump(mode="json"), separators=(",", ":"))[:-1] + ',"family":'


def _content(path: Path) -> bytes:
    """The bytes of a catalog. Raises CatalogError if it cannot be read."""
    try:
        return path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        raise CatalogError(f"no catalog at {path}; set --catalog, or restore configs/kernels.jsonl") from None
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror}; name another by --catalog") from None


def _lines(path: Path, content: bytes) -> Iterator[tuple[int, str]]:
    """The lines of a catalog that are not blank, with their numbers from 1."""
    # Only a line feed ends a line: other line separators of Unicode may occur inside a JSON text.
    for number, line in enumerate(content.split(b"\n"), start=1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise CatalogError(f"{path}:{number}: byte {error.start + 1} is not UTF-8") from None
        if text.strip():
            yield number, text


@lru_cache(maxsize=1 << 14)
def _parse(path: Path, number: int, line: str) -> Record:
    """The record in a line. Raises CatalogError with file, line and the broken rules."""
    try:
        return parse(line)
    except IllegalRecord as error:
        raise CatalogError(f"{path}:{number}: {error}") from None


def _note(problem: Problem, source: Record, record: Record, use: Use) -> str:
    """One line that says whose record serves the problem, and how."""
    origin = source.problem
    differing = [
        getattr(origin, name) for name in ("gpu", "ab", "layout") if getattr(origin, name) != getattr(problem, name)
    ]
    title = " ".join([*differing, origin.mnk])
    remark = f"that of {title} stands in" if origin.gpu != problem.gpu else f"taking that of {title}"
    details = [] if origin.ab == problem.ab else [f"whose rate is that of {problem.ab}"]
    details += (
        [] if origin.fusion == problem.fusion else [f"with {problem.fusion} fused" if problem.fusion else "unfused"]
    )
    details += [] if origin.batch == problem.batch else [f"with batch={problem.batch}"]
    if origin.gpu != problem.gpu and record.work.instruction == "mma.sync":
        share = record.target.mma_sync_share(problem.acc == "f32")
        details += [f"by mma.sync at {share:.0%} of {problem.gpu}'s tensor cores"] if share < 1.0 else []
    if use.launched != serving.sizes_of(problem):
        details.append(f"padded to {use.launched.text} by copies of {use.matrices}")
    elif any(use.copied):
        details.append(f"with copies of {use.matrices} to rows on 16 bytes")
    changed = [name for name in serving.changed_fields(source, record) if name not in Problem.model_fields]
    fields = record.model_dump(mode="json")
    for name in changed:
        value = fields.get(name, "none")
        details += ["predicated"] if value == "predicate" else [f"{name}={spell(value)}"] if value != "pad" else []
    return f"no record for {problem.title}; {', '.join([remark, *details])}"
