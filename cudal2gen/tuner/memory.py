"""Stores notes for a language model: notes on architectures, and lessons of campaigns on which changes helped.

A note is a section of a Markdown file: a heading, lines ``key: value``, an empty line, and text. The keys ``gpus`` and
``classes`` (size classes) limit its scope; without them it applies to every problem. ``source`` names its origin.
``measured`` names a device, or says no. The package ships notes in ``tuner/notes``. Lessons are appended to a file next
to their trials, so lessons of the model environment are separate from measured ones.

The authors of notes are unknown, so a prompt passes notes as data and never as instructions.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from cudal2gen import places
from cudal2gen.kernel import Problem, Record, SizeClass, parse, space
from cudal2gen.results import INCUMBENT, Trial
from cudal2gen.results.ratios import Ratio
from kernelproof.ground import chips, files

if TYPE_CHECKING:
    from cudal2gen.tuner.search import Search

SHIPPED = places.PACKAGE / "tuner" / "notes"
CLASSES: tuple[str, ...] = get_args(SizeClass)
MAX_NOTE = 2000  # most characters of a note in a prompt
SETBACKS, MAX_SETBACKS = 3, 6  # fewest trials that show a change to be slower; most changes in a lesson
CHARACTERS_PER_TOKEN = 3.5  # a safe guess for English mixed with numbers and current tokenisers
# Lines of a file of notes: the heading of a note, and its fields. Below: characters that a terminal may obey or hide.
_HEADING = re.compile(r"^## +(.+?)\s*$")
_KEY = re.compile(r"^(gpus|classes|source|measured|problem|changes|gain): *(.*?)\s*$")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def tokens(text: str) -> int:
    """An estimate of a text's tokens, enough for a budget; tokenisers differ."""
    return math.ceil(len(text) / CHARACTERS_PER_TOKEN)


@dataclass(frozen=True)
class Note:
    """A note. A lesson also has a ``problem`` (the problem's title), ``changes`` (the changed fields as JSON, each with
    its old and new value) and a ``gain`` (the speedup with its interval).
    """

    title: str
    text: str
    gpus: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    source: str = ""
    measured: str = "no"
    problem: str = ""
    changes: str = ""
    gain: str = ""

    def holds_for(self, problem: Problem) -> bool:
        """Whether the note covers the problem's architecture and size class."""
        related = not self.gpus or any(chips.related(gpu, problem.gpu) for gpu in self.gpus)
        return related and (not self.classes or problem.size_class in self.classes)

    def relevance(self, problem: Problem) -> str:
        """Words that say how closely the note's scope matches the problem, which decides its ``rank``."""
        gpu = "of this GPU" if problem.gpu in self.gpus else "of this architecture" if self.gpus else "of any GPU"
        sizes = f"{problem.size_class} problems" if self.classes else "problems of any size"
        distance = f", its sizes {self._distance(problem):.1f} doublings away" if self.problem else ""
        return f"{gpu}, {sizes}{distance}"

    def rank(self, problem: Problem) -> tuple[float, ...]:
        """A sort key, smaller for more specific notes: of this GPU, of this size class, of near sizes."""
        kinship = 0 if problem.gpu in self.gpus else 1 if self.gpus else 2
        return (kinship, 0 if self.classes else 1, self._distance(problem))

    def _distance(self, problem: Problem) -> float:
        """The sum of |log2| of the ratios of the extents; 100 for a note that is not about a certain problem."""
        sizes = re.fullmatch(r"\S+ \S+ \S+ (\d{1,9})_(\d{1,9})_(\d{1,9})", self.problem)
        if sizes is None:
            return 100.0
        pairs = zip((problem.m, problem.n, problem.k), (max(1, int(extent)) for extent in sizes.groups()), strict=True)
        return sum(abs(math.log2(a / b)) for a, b in pairs)

    @property
    def markdown(self) -> str:
        """The note as a section of a file."""
        lists = {"gpus": ", ".join(self.gpus), "classes": ", ".join(self.classes)}
        texts = {name: getattr(self, name) for name in ("source", "measured", "problem", "changes", "gain")}
        lines = [f"{name}: {value}" for name, value in (lists | texts).items() if value]
        return "\n".join([f"## {self.title}", *lines, "", self.text]).rstrip() + "\n"

    @property
    def visible(self) -> dict[str, str]:
        """The note's fields for a prompt: printable characters only, at most ``MAX_NOTE`` in each field."""
        texts = {name: getattr(self, name) for name in ("title", "text", "measured", "source", "changes", "gain")}
        return {name: _UNPRINTABLE.sub("", value)[:MAX_NOTE] for name, value in texts.items() if value}


def parse_notes(text: str) -> Iterator[Note]:
    """The notes of a Markdown text. Text before the first heading, and sections of another form, are skipped."""
    for section in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        lines = section.splitlines()
        heading = _HEADING.match(lines[0]) if lines else None
        if heading is None:
            continue
        keys: dict[str, str] = {}
        while len(lines) > len(keys) + 1 and (match := _KEY.match(lines[len(keys) + 1])):
            if match[1] in keys:
                break
            keys[match[1]] = match[2]
        body = "\n".join(lines[len(keys) + 1 :]).strip()
        gpus, classes = (tuple(re.findall(r"[^,\s]+", keys.pop(name, ""))) for name in ("gpus", "classes"))
        yield Note(heading[1], body, gpus, classes, **keys)


def lessons_path(trials: Path) -> Path:
    """The path of the lessons for a file of trials. So measured and modelled lessons are in separate files."""
    return trials.with_name(f"{trials.stem}-lessons.md")


@dataclass(frozen=True)
class Memory:
    """Notes, and the ``file`` of lessons. Without a file lessons are not stored."""

    notes: Sequence[Note] = ()
    file: Path | None = None

    def recall(self, problem: Problem, budget: int = 1500) -> list[Note]:
        """Notes that cover a problem, the most specific first, with at most about ``budget`` tokens in total."""
        notes: list[Note] = []
        lessons = parse_notes(_text(self.file)) if self.file is not None else ()
        applicable = [note for note in (*self.notes, *lessons) if note.holds_for(problem)]
        for note in sorted(applicable, key=lambda note: note.rank(problem)):
            size = tokens(json.dumps(note.visible))
            if size <= budget:
                notes.append(note)
                budget -= size
        return notes

    def learn(self, search: Search) -> Note | None:
        """Appends and returns the lesson of a search's improvement; None if there is none or the file has it already.

        Raises OSError if the file cannot be written.
        """
        winner, gain = search.winner, search.gain
        if self.file is None or winner is None or gain is None or not search.improved or search.incumbent is None:
            return None
        if winner.environment == "replay":  # the lesson was appended when the trial was measured
            return None
        note = lesson(search.problem, search.incumbent, parse(winner.record), gain, winner.environment, winner.on)
        return note if _append(note, self.file) else None

    def learn_setbacks(self, search: Search) -> Note | None:
        """Appends and returns the lesson of changes that never helped (``setbacks``); None if there is none, or if the
        file has it already. Raises OSError if the file cannot be written."""
        if self.file is None or search.incumbent is None:
            return None
        note = setbacks(search.problem, search.incumbent, search.evaluations)
        return note if note and _append(note, self.file) else None

    def keep(self, note: Note) -> bool:
        """Appends a note, unless there is no file or the file has it already. Returns whether it appended. Raises
        OSError."""
        return self.file is not None and _append(note, self.file)


def load(file: Path | None = None) -> Memory:
    """The memory of the shipped notes and of the lessons in a file, which need not exist yet."""
    shipped = [note for path in sorted(SHIPPED.glob("*.md")) for note in parse_notes(path.read_text(encoding="utf-8"))]
    return Memory(tuple(shipped), file)


def lesson(problem: Problem, old: Record, new: Record, gain: Ratio, environment: str, on: str) -> Note:
    """The lesson of an improvement: the problem, the changed fields, the gain."""
    changed = space.differing(old, new)
    text = ", ".join(f"{name} {json.dumps(before)} -> {json.dumps(after)}" for name, (before, after) in changed.items())
    factor = f"{gain.value:.3f} ({gain.low:.3f} to {gain.high:.3f})"
    return Note(
        title=f"{problem.title}: {factor} times faster",
        text=f"{problem.size_class} problem, {old.family} to {new.family}: {text}.",
        gpus=(problem.gpu,),
        classes=(problem.size_class,),
        source="cudal2gen tune",
        measured=f"yes, on {on}" if environment == "gpu" else f"no: {environment} environment, {on}",
        problem=problem.title,
        changes=json.dumps({name: list(pair) for name, pair in changed.items()}),
        gain=factor,
    )


def setbacks(problem: Problem, incumbent: Record, trials: Iterable[Trial]) -> Note | None:
    """The lesson of changes that never helped; None if there are none, or in a replay.

    A change never helped if at least ``SETBACKS`` trials have it, and all of them are slower than the incumbent beyond
    noise. The lesson has the ``MAX_SETBACKS`` changes whose best trials are slowest.
    """
    ratios: dict[tuple[str, str, str], list[Ratio]] = {}
    measured = set()
    for trial in trials:
        ratio = trial.faster_than(INCUMBENT)
        if ratio is None or trial.environment == "replay" or trial.record.get("family") != incumbent.family:
            continue
        measured.add(f"yes, on {trial.on}" if trial.environment == "gpu" else f"no: {trial.environment} environment")
        for name, pair in space.differing(incumbent, parse(trial.record)).items():
            before, after = map(json.dumps, pair)
            ratios.setdefault((name, before, after), []).append(ratio)
    worst = sorted(
        (max(ratio.value for ratio in group), len(group), change)
        for change, group in ratios.items()
        if len(group) >= SETBACKS and all(ratio.high < 1 for ratio in group)
    )[:MAX_SETBACKS]
    if not worst:
        return None
    text = "; ".join(
        f"{name} {before} -> {after}: {count} trials, at best {best:.3f} times the incumbent's speed"
        for best, count, (name, before, after) in worst
    )
    changes = {name: [json.loads(before), json.loads(after)] for _, _, (name, before, after) in worst}
    return Note(
        title=f"{problem.title}: changes that were slower",
        text=f"{problem.size_class} problem, {incumbent.family}: {text}.",
        gpus=(problem.gpu,),
        classes=(problem.size_class,),
        source="cudal2gen tune",
        measured=", ".join(sorted(measured)),
        problem=problem.title,
        changes=json.dumps(changes),
    )


def _append(note: Note, path: Path) -> bool:
    """Adds a lesson unless the file has the same changes for the same problem. Returns whether it added. A file lock
    serialises processes."""
    with files.locked(path) as file:
        file.seek(0)
        existing = file.read().decode(errors="replace")
        if any((stored.problem, stored.changes) == (note.problem, note.changes) for stored in parse_notes(existing)):
            return False
        # A killed process may have left half a section without a line break, so a line break precedes each section.
        files.append(file, (("\n" if existing else "") + note.markdown).encode(errors="replace"))
        return True


def _text(path: Path) -> str:
    """A file's text; empty if there is no file. Invalid UTF-8 is replaced: a damaged file must not stop a search."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
