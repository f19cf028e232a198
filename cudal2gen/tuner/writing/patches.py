"""Applies a model's patch to a text: blocks to search and replace, or a unified diff.

If a patch does not apply, an exception explains the reason to the model.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from cudal2gen.kernel import device_text
from kernelproof.ground.errors import brief

_SEARCH, _MIDDLE, _REPLACE = (re.compile(form) for form in (r"<{5,9} ?SEARCH", r"={5,9}", r">{5,9} ?REPLACE"))
_HUNK = re.compile(r"^@@(?: -(\d+)\S* \+\S+ @@)?.*$", re.M)
MAX_PARTS = 64  # most blocks or hunks of a patch
MAX_CHARACTERS = 2 * device_text.MAX_CHARACTERS  # most characters of a patch


class _Part(NamedTuple):
    """A block or hunk: the old lines, the new lines, and the number (from 1) of the first old line; 0 if unknown."""

    before: list[str]
    after: list[str]
    line_number: int


class PatchRefused(ValueError):
    """A patch does not apply. The message says which part, and why."""


def apply(text: str, patch: str) -> str:
    """Returns the patched text. Raises PatchRefused."""
    if len(patch) > MAX_CHARACTERS:
        raise PatchRefused(f"the patch has {len(patch)} characters, {MAX_CHARACTERS} at most")
    patch = patch.replace("\r\n", "\n")
    parts = _blocks(patch) or _hunks(patch)
    if not parts:
        raise PatchRefused("the patch is neither blocks of SEARCH and REPLACE nor a unified diff with @@")
    if len(parts) > MAX_PARTS:
        raise PatchRefused(f"the patch has {len(parts)} parts, {MAX_PARTS} at most: answer with the whole text")
    lines = text.split("\n")
    shift = 0  # lines that earlier hunks added; a hunk's line number counts from the text before the patch
    for number, (before, after, line_number) in enumerate(parts, 1):
        start = _find(lines, before, line_number + shift, number)
        lines[start : start + len(before)] = after
        shift += len(after) - len(before) if line_number else 0
    if (patched := "\n".join(lines)) == text:
        raise PatchRefused("the patch changes nothing")
    return patched


def _blocks(patch: str) -> list[_Part]:
    """The blocks of SEARCH and REPLACE, which have no line numbers."""
    blocks: list[_Part] = []
    before: list[str] | None = None
    after: list[str] | None = None
    for line in patch.split("\n"):
        if before is None:
            before = [] if _SEARCH.fullmatch(line) else None
        elif after is None:
            if _MIDDLE.fullmatch(line):
                after = []
            else:
                before.append(line)
        elif _REPLACE.match(line):
            blocks.append(_Part(before, after, 0))
            before = after = None
        else:
            after.append(line)
    return blocks


def _hunks(patch: str) -> list[_Part]:
    """The hunks of a unified diff."""
    heads = list(_HUNK.finditer(patch))
    ends = [*(head.start() for head in heads[1:]), len(patch)]
    hunks = []
    for head, end in zip(heads, ends, strict=False):
        lines = patch[head.end() + 1 : end].rstrip("\n").split("\n")
        kept = [line for line in lines if not line.startswith(("\\", "--- ", "+++ ", "diff "))]
        before = [line[1:] for line in kept if line[:1] != "+"]
        after = [line[1:] for line in kept if line[:1] != "-"]
        hunks.append(_Part(before, after, int(head[1] or 0)))
    return hunks


def _find(lines: list[str], before: list[str], line_number: int, number: int) -> int:
    """The index in ``lines`` at which the lines ``before`` begin. Raises PatchRefused.

    ``line_number``: where the part states that they begin, from 1; of several matches the nearest is taken. If it is 0,
    there must be only one match. Without an exact match, trailing blanks are ignored, and then all differences in
    blanks. ``number``: the part's number for messages.
    """
    if not any(line.strip() for line in before):
        raise PatchRefused(f"part {number} has no lines to find: give some of those around the change")
    for form in (str, str.rstrip, lambda line: " ".join(line.split())):
        pattern = [form(line) for line in before]
        places = _occurrences([form(line) for line in lines], pattern)
        if len(places) == 1 or (places and line_number):
            return min(places, key=lambda start: abs(start + 1 - line_number))
        if places:
            raise PatchRefused(f"part {number} fits {len(places)} places, such as lines {places[0] + 1} and "
                               f"{places[1] + 1}: give more of the lines around it")  # fmt: skip
    first = next(line for line in before if line.strip())
    raise PatchRefused(f"part {number} is not in the text, its first line is {brief(first.strip(), 100)!r}")


def _occurrences(lines: list[str], pattern: list[str]) -> list[int]:
    """The indices at which a pattern of lines begins, overlaps included.

    The algorithm of Knuth, Morris and Pratt takes linear time. A plain search in a text of many equal lines would take
    quadratic time.
    """
    borders = [0]  # the KMP failure function: per prefix, the length of its longest proper prefix that is also a suffix
    for line in pattern[1:]:
        borders.append(_border(pattern, borders, borders[-1], line))
    places, equal = [], 0
    for number, line in enumerate(lines):
        equal = _border(pattern, borders, equal, line)
        if equal == len(pattern):
            places.append(number + 1 - equal)
            equal = borders[-1]
    return places


def _border(pattern: list[str], borders: list[int], length: int, line: str) -> int:
    """The length of the longest prefix of the pattern that ends with ``line``. ``length``: the length of the longest
    one that ends with the line before."""
    while length and pattern[length] != line:
        length = borders[length - 1]
    return length + (pattern[length] == line)
