"""Grids of edits of one record: edits are fitted, and each distinct kernel is built, judged in the emulator, and timed.

    variants = grid.fit(record, {"bm": (64, 128, 256), "stages": range(2, 6)})
    rows = grid.judged(grid.built(variants.candidates))
    for row in grid.best(rows, 5): ...

``built``, ``judged`` and ``timed`` take rows and return them with more in them; a kernel that fails a stage skips the
next. Builds and verdicts are kept by content, so a second call repeats neither. Times of the analytic model stand in
``modelled_us``, times of a GPU in ``timing``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from cudal2gen import results
from cudal2gen.kernel import Difference, Edit, IllegalRecord, Record, edit, spell
from cudal2gen.timing import model

if TYPE_CHECKING:
    from cudal2gen.generation.compiler import Artifact, Progress
    from cudal2gen.launch.gpu import Gpu
    from cudal2gen.results import Timing, Verdict
    from kernelproof.ground.toolchain import Toolchain

# Where a kernel ended. "spill" includes a stack frame, "slow" is a warning of ptxas, "too good" an impossible time.
Outcome = Literal["no verdict", "right", "compile error", "spill", "slow", "wrong result", "too good"]
SECONDS = 0.1  # seconds of timing for each kernel


@dataclass(frozen=True)
class Candidate:
    """A kernel of the grid. ``edits``: the spellings of those that lead to it; ``differences``: the fields that follow
    the first of them, and why. ``start``: whether it is the kernel of the record that is edited."""

    record: Record
    edits: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    start: bool = False


class Refusal(NamedTuple):
    """An edit without a legal record nearby, and the rule that refuses it."""

    edit: str
    reason: str


class Grid(NamedTuple):
    """The kernels that edits lead to, the edited record first, and the edits that the rules refuse."""

    candidates: list[Candidate]
    refusals: list[Refusal]


@dataclass(frozen=True)
class Row:
    """A kernel and the results of the stages. ``reason``: why it failed. ``stored``: whether its verdict was stored by
    an earlier call."""

    candidate: Candidate
    artifact: Artifact | None = None
    verdict: Verdict | None = None
    timing: Timing | None = None
    outcome: Outcome = "no verdict"
    reason: str = ""
    stored: bool = False

    @property
    def record(self) -> Record:
        return self.candidate.record

    @property
    def right(self) -> bool:
        """Whether the kernel has a verdict, and nothing is wrong with it."""
        return self.outcome == "right"

    @property
    def modelled_us(self) -> float:
        """The analytic model's estimate, not a measurement."""
        return model.estimate(self.record).us

    @property
    def ctas_per_sm(self) -> int:
        return self.record.ctas_per_sm(self._registers)

    @property
    def waves(self) -> float:
        """How often the kernel fills the GPU."""
        return self.record.waves(self._registers)

    @property
    def _registers(self) -> int:
        return self.artifact.ptxas.registers if self.artifact else self.record.estimated_registers


def edits(record: Record, values: Mapping[str, Iterable[Any]]) -> dict[str, Edit]:
    """Every combination of some fields' JSON values, by its spelling. Raises IllegalValue for a name of no field."""
    combinations = [dict(zip(values, row, strict=True)) for row in product(*values.values())]
    return {
        " ".join(f"{name}={spell(value)}" for name, value in fields.items()): edit(record, fields)
        for fields in combinations
    }


def fit(record: Record, values: Mapping[str, Iterable[Any]]) -> Grid:
    """The grid of every combination of some fields' JSON values."""
    return fitted(record, edits(record, values))


def fitted(record: Record, edits: Mapping[str, Edit], progress: Progress | None = None) -> Grid:
    """The nearest legal records to some edits of a record, by spelling; edits to one kernel share a candidate.

    A fit takes 30 ms in the median, and up to half a second.
    """
    grid = Grid([], [])
    candidates = {record.kernel_key: Candidate(record, start=True)}
    for number, spelling in enumerate(edits, start=1):
        try:
            near, differences = edits[spelling].fitted()
        except IllegalRecord as error:
            grid.refusals.append(Refusal(spelling, str(error)))
        else:
            candidate = candidates.get(near.kernel_key, Candidate(near, differences=differences))
            candidates[near.kernel_key] = replace(candidate, edits=(*candidate.edits, spelling))
        if progress:
            progress(number, len(edits))
    grid.candidates.extend(candidates.values())
    return grid


def built(
    candidates: Sequence[Candidate],
    tools: Toolchain | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """Compiled kernels. What does not compile, spills, or is slow to ptxas is an outcome; see ``compiler.attempt``."""
    from cudal2gen.generation import compiler

    records = [candidate.record for candidate in candidates]
    artifacts = compiler.attempt(records, tools=tools, jobs=jobs, progress=progress)
    return [_of_build(candidate, artifact) for candidate, artifact in zip(candidates, artifacts, strict=True)]


def _of_build(candidate: Candidate, artifact: Artifact | Exception) -> Row:
    if isinstance(artifact, Exception):
        return Row(candidate, outcome="compile error", reason=str(artifact))
    ptxas = artifact.ptxas
    if not ptxas.findings:
        return Row(candidate, artifact)
    spills = ptxas.spill_store_bytes or ptxas.spill_load_bytes or ptxas.stack_bytes
    return Row(candidate, artifact, outcome="spill" if spills else "slow", reason="; ".join(ptxas.findings))


def judged(
    rows: Sequence[Row],
    library: Path | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
    store: Path | None = None,
) -> list[Row]:
    """Verdicts of the emulator, from ``store`` where it has them; each new one is stored as it is made.

    ``library``: the launcher, compiled if None. The kernels that are modelled fastest come first. One whose process
    dies has no verdict, and the reason.
    """
    from cudal2gen import validator
    from cudal2gen.generation import compiler
    from kernelproof.ground.workers import Lost

    verdicts = results.latest(store)
    stored = {digest for digest, on in verdicts if on == "emulator"}
    kernels = {
        row.artifact.digest: (row.record, row.artifact)
        for row in sorted(rows, key=lambda row: row.modelled_us)
        if row.artifact and not row.reason and row.artifact.digest not in stored
    }
    if not kernels:
        return [_of_verdict(row, verdicts, stored) for row in rows]
    lost: dict[str, str] = {}
    with closing(validator.validate_all(kernels.values(), library or compiler.launcher(), jobs)) as judgements:
        for number, judgement in enumerate(judgements, start=1):
            if isinstance(judgement, Lost):
                lost[judgement.name] = judgement.reason
            else:
                results.append([judgement], store)
                verdicts[judgement.digest, "emulator"] = judgement
            if progress:
                progress(number, len(kernels))
    return [
        replace(row, reason=row.reason or lost.get(row.record.name, ""))
        for row in (_of_verdict(row, verdicts, stored) for row in rows)
    ]


def _of_verdict(row: Row, verdicts: Mapping[tuple[str, str], Verdict], stored: set[str]) -> Row:
    digest = row.artifact.digest if row.artifact else ""
    verdict = verdicts.get((digest, "emulator"))
    if row.reason or verdict is None:
        return row
    row = replace(row, verdict=verdict, stored=digest in stored)
    if verdict.passed:
        return replace(row, outcome="right")
    reason = "; ".join(verdict.findings[:2]) or "its verdict has no case"
    return replace(row, outcome="wrong result", reason=reason)


def timed(rows: Sequence[Row], card: Gpu, library: Path, seconds: float = SECONDS, seed: int = 0) -> list[Row]:
    """Times of a GPU for the kernels that are right, taken in turns on the same data; see ``bench.in_turns``."""
    from cudal2gen import bench
    from cudal2gen.validator.device import BuiltKernel

    kernels = {
        str(index): partial(BuiltKernel(row.record, row.artifact, library).open, card)
        for index, row in enumerate(rows)
        if row.artifact and row.right
    }
    if not kernels:
        return list(rows)
    turns = bench.in_turns(card, rows[0].record.problem, kernels, seconds=seconds, warmup_seconds=1.0, seed=seed)
    answers = []
    for index, row in enumerate(rows):
        name = str(index)
        if timing := turns.timings.get(name):
            answers.append(replace(row, timing=timing))
        elif reason := turns.too_good.get(name):
            answers.append(replace(row, outcome="too good", reason=reason))
        elif reason := turns.absent.get(name):
            answers.append(replace(row, outcome="wrong result", reason=reason))
        else:
            answers.append(row)
    return answers


def ranked(rows: Iterable[Row]) -> list[Row]:
    """The fastest first: by the GPU's time, then by the model's; those that are not right come last."""

    def place(row: Row) -> tuple[bool, bool, float]:
        return not row.right, row.timing is None, row.timing.median_us if row.timing else row.modelled_us

    return sorted(rows, key=place)


def best(rows: Sequence[Row], count: int) -> list[Row]:
    """The fastest kernels that are right: by the GPU's time where any has one, else by the model's."""
    measured = [row for row in rows if row.right and row.timing]
    return ranked(measured or [row for row in rows if row.right])[:count]
