"""Writes the results of a set of solutions: JSON for a leaderboard, and an HTML or Markdown page for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from kernelproof.grading.verdict import Verdict
from kernelproof.ground import pages
from kernelproof.ground.pages import Section, Table

LONGEST_FINDING = 300  # most characters of a finding on a page; the JSON object has all


class GradedSolution(BaseModel):
    """A solution's verdict. ``name`` is the name of the solution's file."""

    name: str
    verdict: Verdict


class GradedSet(BaseModel):
    """The verdicts of a set, in the order of names."""

    version: Literal[1] = 1
    entries: list[GradedSolution] = []

    @property
    def counts(self) -> dict[str, int]:
        """How many verdicts there are of each outcome."""
        found = Counter(entry.verdict.outcome for entry in self.entries)
        return {outcome: found[outcome] for outcome in ("right", "wrong", "not checked")}

    def sections(self) -> list[Section]:
        """The set as tables: outcomes, all solutions, and the evidence against those that are not right."""
        counts, seconds = self.counts, sum(entry.verdict.seconds for entry in self.entries)
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        broken = Counter(rule for entry in self.entries for rule in entry.verdict.rules)
        rules = tuple((rule, str(count)) for rule, count in broken.most_common())
        evidence = Table("What is not right", ("solution", "finding"), self._evidence())
        return [
            Section(
                "outcomes", "Outcomes", (f"{len(self.entries)} solutions: {outcomes}; {seconds:.0f} s.",),
                tables=(Table("Broken rules", ("rule", "solutions"), rules),),
            ),
            Section("solutions", "Solutions", tables=(Table("All solutions", _COLUMNS, self._rows()),)),
            Section("evidence", "Evidence", tables=(evidence,)),
        ]  # fmt: skip

    def _rows(self) -> tuple[tuple[str, ...], ...]:
        """A row of the table for each solution."""
        return tuple(
            (
                entry.name, entry.verdict.outcome, ", ".join(sorted(entry.verdict.rules)),
                ", ".join(kernel.name for kernel in entry.verdict.kernels), f"{entry.verdict.seconds:.1f}",
            )
            for entry in self.entries
        )  # fmt: skip

    def _evidence(self) -> tuple[tuple[str, ...], ...]:
        """A row for each finding and each unchecked part of a solution, with the text's beginning."""
        return tuple(
            (entry.name, text[:LONGEST_FINDING])
            for entry in self.entries
            for text in [
                *(f"{item.rule}: {item.message}" for item in entry.verdict.findings),
                *entry.verdict.not_checked,
            ]
        )

    def html(self) -> str:
        """The page, in one file."""
        return pages.without_script(TITLE, self.sections())

    def markdown(self) -> str:
        """The page for a summary of a workflow."""
        return pages.markdown(TITLE, self.sections())


TITLE = "Graded solutions"
_COLUMNS = ("solution", "outcome", "rules", "kernels", "seconds")


def pairs(solutions: Path, references: Path) -> list[tuple[Path, Path]]:
    """The solutions of a folder, each with its reference.

    If ``references`` is one task, it is the reference of all. Otherwise ``references`` is a folder, and a solution's
    reference is the file or folder in it with the solution's name, apart from suffixes; solutions without one are left
    out.
    """
    files = sorted(path for path in solutions.iterdir() if path.suffix in (".py", ".cu", ".json"))
    if references.is_file() or (references / "task.yml").exists():
        return [(path, references) for path in files]
    by_stem = {path.stem: path for path in sorted(references.iterdir())}
    return [(path, by_stem[path.stem]) for path in files if path.stem in by_stem]


def exit_outcome(outcomes: Sequence[str]) -> str:
    """The outcome of a set of verdicts, which is the worst of theirs."""
    return next((outcome for outcome in ("wrong", "not checked") if outcome in outcomes), "right")
