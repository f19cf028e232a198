"""Writes the progress of written kernels as one self-contained HTML file.

The page shows the best speeds over tokens and time, the families of ideas, and the outcomes of kernels.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cudal2gen import results
from cudal2gen.kernel import Fields, Problem
from cudal2gen.results import INCUMBENT, Trial
from cudal2gen.tuner import curve
from cudal2gen.tuner.curve import Curve
from cudal2gen.tuner.language_model import answer_text, transcript
from cudal2gen.tuner.language_model.transcript import AnswerOutcome, Exchange
from kernelproof.ground import files, pages
from kernelproof.ground.pages import Section, Table

# Families of ideas, with a pattern that a family's ideas contain. An idea belongs to the first family that matches.
FAMILIES: Mapping[str, str] = {
    "copies ahead": r"prefetch|cp\.async|async|pipelin|stage|double.?buffer|tma",
    "shared memory": r"shared|swizzl|bank|ldmatrix",
    "tiles and warps": r"tile|warp|block size|cta|occupan",
    "wider accesses": r"vector|128.?bit|16.?byte|coalesc|float4|uint4",
    "loops": r"unroll|loop|branch|predicat",
    "registers": r"register|spill|reuse",
    "split k": r"split|stream.?k|reduc",
}
MOST_CURVES = 12  # most problems in a picture


class ProgressPoint(NamedTuple):
    """The state after an answer to a problem: the ``tokens`` and ``seconds`` of all problems' answers so far, and the
    ``best`` speed of this problem's kernels over the incumbent's."""

    tokens: int
    seconds: float
    best: float


def write(path: Path, exchanges: Path, store: Path) -> None:
    """Writes the page for the transcript ``exchanges`` and the trials in ``store`` to ``path``.

    Writes nothing if there is no transcript. Raises Failure.
    """
    if exchanges.is_file():
        trials = results.trials(store) if store.is_file() else []
        files.write(path, page(list(transcript.read(exchanges)), trials))


def progress_points(lines: Iterable[transcript.Line], trials: Iterable[Trial]) -> dict[str, list[ProgressPoint]]:
    """For each problem's title the state after each of its answers, in their order."""
    speeds = {_key(trial.record): speed for trial in trials if (speed := _speed(trial)) is not None}
    tokens, seconds, best = 0, 0.0, defaultdict[str, float](lambda: 1.0)
    progress: dict[str, list[ProgressPoint]] = {}
    for line in lines:
        if isinstance(line, Exchange):
            tokens, seconds = tokens + line.tokens_in + line.tokens_out, seconds + line.seconds
        elif isinstance(line, AnswerOutcome):
            title = Problem.model_validate(line.problem).title
            best[title] = max([best[title], *(speeds.get(_key(fields), 0.0) for fields in line.proposals)])
            # Tokens and seconds are 1 at least, because the pictures' horizontal axis is logarithmic.
            progress.setdefault(title, []).append(ProgressPoint(max(1, tokens), max(1.0, seconds), best[title]))
    return progress


def families(lines: Iterable[transcript.Line]) -> Counter[str]:
    """The number of ideas of each family in the answers."""
    counts: Counter[str] = Counter()
    for line in lines:
        if isinstance(line, Exchange) and not line.error:
            for idea in answer_text.last_list(answer_text.text_of(line), "kernels") or ():
                why = str(idea.get("why", "")) if isinstance(idea, dict) else ""
                matching = (name for name, pattern in FAMILIES.items() if re.search(pattern, why, re.I))
                counts[next(matching, "other")] += 1
    return counts


def page(lines: list[transcript.Line], trials: list[Trial]) -> str:
    """The page as HTML. All text that a model wrote is escaped."""
    progress = progress_points(lines, trials)
    outcome_counts = Counter(trial.outcome for trial in trials if trial.run in {line.run for line in lines})
    best = sorted(progress.items(), key=lambda item: -item[1][-1].best)
    rows = tuple((title, f"{own[-1].best:.3f}", str(len(own)), f"{own[-1].tokens:,}") for title, own in best)
    speeds = Table("Best kernels", ("problem", "times as fast as the incumbent", "answers", "tokens"), rows)
    ideas = Table("Ideas of each family", ("family", "ideas"), _text_rows(families(lines).most_common()))
    outcomes = Table("Kernels of each outcome", ("outcome", "kernels"), _text_rows(outcome_counts.most_common()))
    return pages.without_script(
        "Written kernels",
        [
            Section("best", "Best kernel of each problem", tables=(speeds,)),
            *_curves(dict(best[:MOST_CURVES])),
            Section("families", "Families of ideas", tables=(ideas,)),
            Section("ends", "How kernels ended", tables=(outcomes,)),
        ],
    )


def _curves(progress: Mapping[str, list[ProgressPoint]]) -> Iterator[Section]:
    """Two sections with a picture each: the best speeds over tokens, and over the seconds of answers."""
    for label, field in (("tokens", "tokens"), ("seconds of answers", "seconds")):
        # The legend has space only for the last word of a title, which is the size.
        curves = [
            Curve(title.rsplit(" ", 1)[-1], [(getattr(point, field), point.best) for point in points])
            for title, points in progress.items()
        ]
        if curves:
            title = f"Best over {label}"
            picture = curve.svg(title, label, "times as fast as the incumbent", curves, logarithmic=True)
            yield Section(label.replace(" ", "-"), title, pictures=(picture,))


def _text_rows(numbers: Iterable[tuple[str, int]]) -> tuple[tuple[str, str], ...]:
    """Rows with the numbers as texts."""
    return tuple((name, str(number)) for name, number in numbers)


def _speed(trial: Trial) -> float | None:
    """The speed of a measured kernel over the incumbent's; None if there is none."""
    ratio = trial.faster_than(INCUMBENT) if trial.measured else None
    return ratio.value if ratio else None


def _key(fields: Fields) -> str:
    """A key that is equal for the same text with the same launch."""
    return json.dumps({name: value for name, value in fields.items() if name != "origin"}, sort_keys=True)
