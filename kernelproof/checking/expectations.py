"""Reads a project's list of expected findings, which do not count as errors, and applies it to a result.

Each line of the file is ``RULE``, ``RULE KERNEL`` or ``RULE KERNEL FILE:LINE``. A star as the kernel matches every
kernel, the line number may be omitted, and a # begins a comment.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kernelproof.checking.findings import frames
from kernelproof.checking.names import demangled, plain, qualified
from kernelproof.checking.result import Result
from kernelproof.emulator import RULES, Report
from kernelproof.ground.errors import WrongInput, reading


class Expectation(NamedTuple):
    """One line of the file; empty parts, and line 0, match everything. ``text``: the line without its comment."""

    rule: str
    kernel: str
    file: str
    line: int
    text: str

    def matches(self, finding: Report) -> bool:
        """Whether a finding matches the expectation."""
        names = (finding.kernel, plain(finding.kernel), qualified(finding.kernel), demangled(finding.kernel))
        return (
            finding.kind == self.rule
            and self.kernel in ("", "*", *names)
            and (not self.file or any(self._is_at(place.file, place.line) for place in frames(finding)))
        )

    def _is_at(self, file: str, line: int) -> bool:
        """Whether a source line is the expected one; the expected file may be the end of a path."""
        return (file == self.file or file.endswith(f"/{self.file}")) and self.line in (0, line)


def read(path: Path) -> tuple[Expectation, ...]:
    """Read the expectations in a file. Raises WrongInput."""
    with reading(path):
        lines = path.read_text().splitlines()
    expectations = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        rule, kernel, place = (*words, "", "")[:3]
        file, _, at = place.rpartition(":") if ":" in place else (place, "", "0")
        if rule not in RULES or len(words) > 3 or not at.isdecimal():
            raise WrongInput(
                f"{path}:{number}: {line.strip()!r} is not RULE [KERNEL [FILE[:LINE]]]; "
                "rules: docs/kernelproof/check.md"
            )
        expectations.append(Expectation(rule, kernel, file, int(at), " ".join(words)))
    return tuple(expectations)


def apply(result: Result, expectations: Sequence[Expectation]) -> None:
    """Move expected findings to ``result.expected``, and add a note for each expectation that no finding matches."""
    used: set[Expectation] = set()
    for key, finding in list(result.findings.items()):
        match = next((item for item in expectations if item.matches(finding)), None)
        if match is not None:
            used.add(match)
            result.expected.append(result.findings.pop(key))
    result.notes += [f"expected and not seen: {item.text}" for item in expectations if item not in used]
