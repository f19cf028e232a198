"""The results of a set of solutions: one JSON object for a leaderboard, and one page (HTML or Markdown) for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from kernelproof.grading.verdict import Verdict
from kernelproof.ground import pages
from kernelproof.ground.pages import Section, Table

LONGEST = 300  # characters of a finding on a page; the JSON has all


class GradedSolution(BaseModel):
    """A solution's verdict. ``name`` is its file below the set's folder."""

    name: str
    verdict: Verdict


class Graded(BaseModel):
    """The verdicts of a set, in the order of names."""

    version: Literal[1] = 1
    entries: list[GradedSolution] = []

    @property
    def counts(self) -> dict[str, int]:
        """How many verdicts there are of each outcome."""
        found = Counter(entry.verdict.outcome for entry in self.entries)
        return {outcome: found[outcome] for outcome in ("right", "wrong", "not checked")}

    def sections(self) -> list[Section]:
        """The set as tables: outcomes, all solutions, and the evidence of those that are not right."""
        counts, seconds = self.counts, sum(entry.verdict.seconds for entry in self.entries)
        said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        broken = Counter(rule for entry in self.entries for rule in entry.verdict.rules)
        rules = tuple((rule, str(count)) for rule, count in broken.most_common())
        evidence = Table("What is not right", ("solution", "finding"), self._evidence())
        return [
            Section(
                "outcomes", "Outcomes", (f"{len(self.entries)} solutions: {said}; {seconds:.0f} s.",),
                tables=(Table("Broken rules", ("rule", "solutions"), rules),),
            ),
            Section("solutions", "Solutions", tables=(Table("All solutions", _COLUMNS, self._rows()),)),
            Section("evidence", "Evidence", tables=(evidence,)),
        ]  # fmt: skip

    def _rows(self) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (
                entry.name, entry.verdict.outcome, ", ".join(sorted(entry.verdict.rules)),
                ", ".join(kernel.name for kernel in entry.verdict.kernels), f"{entry.verdict.seconds:.1f}",
            )
            for entry in self.entries
        )  # fmt: skip

    def _evidence(self) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (entry.name, text[:LONGEST])
            for entry in self.entries
            for text in [
                *(f"{item.rule}: {item.message}" for item in entry.verdict.findings),
                *entry.verdict.not_checked,
            ]
        )

    def html(self) -> str:
        """The page, in one file."""
        return pages.plain(TITLE, self.sections())

    def markdown(self) -> str:
        """The page for a summary of a workflow."""
        return pages.markdown(TITLE, self.sections())


TITLE = "Graded solutions"
_COLUMNS = ("solution", "outcome", "rules", "kernels", "seconds")


def pairs(solutions: Path, references: Path) -> list[tuple[Path, Path]]:
    """The solutions of a folder, each with its reference: the file or folder of the same name, without its ending, or,
    if ``references`` is a task rather than a folder of such, that one for all."""
    found = sorted(path for path in solutions.iterdir() if path.suffix in (".py", ".cu", ".json"))
    if references.is_file() or (references / "task.yml").exists():
        return [(path, references) for path in found]
    known = {path.stem: path for path in sorted(references.iterdir())}
    return [(path, known[path.stem]) for path in found if path.stem in known]


def exit_outcome(outcomes: Sequence[str]) -> str:
    """The outcome of a set: that of the worst verdict."""
    return next((outcome for outcome in ("wrong", "not checked") if outcome in outcomes), "right")
