"""Tries many variants of one record: builds each, checks it in the emulator, and times it on a GPU if there is one.

``fit`` makes a legal record for every combination of some fields' values; several combinations may lead to the same
kernel.

    variants = grid.fit(record, {"bm": (64, 128, 256), "stages": range(2, 6)})
    rows = grid.judged(grid.built(variants.candidates))
    for row in grid.best(rows, 5): ...

``built``, ``judged`` and ``timed`` are the stages. ``judged`` and ``timed`` return their rows with the results added; a
kernel that fails in one stage skips the next. Builds and verdicts are cached by content, so a second call repeats
neither. ``modelled_us`` is the timing model's estimate, ``timing`` the measurement of a GPU.
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
from cudal2gen.timing.model import worth

if TYPE_CHECKING:
    from cudal2gen.generation.compiler import Artifact, Progress
    from cudal2gen.launch.gpu import Gpu
    from cudal2gen.results import Timing, Verdict
    from kernelproof.ground.toolchain import Toolchain

# How a kernel ended. "spill" includes stack frames; "slow" is a performance warning of ptxas; "too good" is a time that
# is shorter than the hardware allows.
Outcome = Literal["no verdict", "right", "compile error", "spill", "slow", "wrong result", "too good"]
SECONDS = 0.1  # seconds of timing for each kernel


@dataclass(frozen=True)
class Candidate:
    """One kernel of the grid.

    ``edits``: the texts of all edits that lead to this kernel. ``differences``: the fields that had to change together
    with the first of these edits, and why. ``start``: whether it is the kernel of the unedited record.
    """

    record: Record
    edits: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    start: bool = False


class Refusal(NamedTuple):
    """An edit for which no legal record was found, and the rule that forbids it."""

    edit: str
    reason: str


class Grid(NamedTuple):
    """The kernels that edits lead to (the unedited record's first), and the edits that rules forbid."""

    candidates: list[Candidate]
    refusals: list[Refusal]


@dataclass(frozen=True)
class TriedKernel:
    """A kernel and the results of the stages. ``reason``: why it failed. ``stored``: whether an earlier call stored its
    verdict."""

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
        """The timing model's estimate in microseconds, not a measurement."""
        return model.estimate(self.record).us

    @property
    def ctas_per_sm(self) -> int:
        return self.record.ctas_per_sm(self._registers)

    @property
    def waves(self) -> float:
        """How many times the kernel's CTAs fill all SMs of the GPU, one after another; may be a fraction."""
        return self.record.waves(self._registers)

    @property
    def _registers(self) -> int:
        return self.artifact.ptxas.registers if self.artifact else self.record.estimated_registers


def edits(record: Record, values: Mapping[str, Iterable[Any]]) -> dict[str, Edit]:
    """The edits for every combination of some fields' JSON values, by their text. Raises IllegalValue if a name is not
    that of a field."""
    combinations = [dict(zip(values, row, strict=True)) for row in product(*values.values())]
    return {
        " ".join(f"{name}={spell(value)}" for name, value in fields.items()): edit(record, fields)
        for fields in combinations
    }


def fit(record: Record, values: Mapping[str, Iterable[Any]]) -> Grid:
    """The grid of every combination of some fields' JSON values."""
    return fitted(record, edits(record, values))


def fitted(record: Record, edits: Mapping[str, Edit], progress: Progress | None = None) -> Grid:
    """The grid of some edits of a record, given by their text: the nearest legal record of each.

    Edits that lead to the same kernel share a candidate. One fit takes 30 ms in the median and up to half a second.
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
) -> list[TriedKernel]:
    """Compiles the candidates, ``jobs`` at a time.

    A kernel that does not compile, spills registers or has a performance warning of ptxas gets that outcome.
    """
    from cudal2gen.generation import compiler

    records = [candidate.record for candidate in candidates]
    artifacts = compiler.attempt(records, tools=tools, jobs=jobs, progress=progress)
    return [_after_build(candidate, artifact) for candidate, artifact in zip(candidates, artifacts, strict=True)]


def _after_build(candidate: Candidate, artifact: Artifact | Exception) -> TriedKernel:
    """The row of a kernel after its compilation. ``artifact``: the compiler's error if it failed."""
    if isinstance(artifact, Exception):
        return TriedKernel(candidate, outcome="compile error", reason=str(artifact))
    ptxas = artifact.ptxas
    if not ptxas.findings:
        return TriedKernel(candidate, artifact)
    spills = ptxas.spill_store_bytes or ptxas.spill_load_bytes or ptxas.stack_bytes
    return TriedKernel(candidate, artifact, outcome="spill" if spills else "slow", reason="; ".join(ptxas.findings))


def judged(
    rows: Sequence[TriedKernel],
    library: Path | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
    store: Path | None = None,
) -> list[TriedKernel]:
    """Adds the emulator's verdict to each row, from ``store`` if it is there. New verdicts are stored as they arrive.

    ``library``: the compiled launcher, or None to compile it. Kernels with the shortest modelled time are judged first,
    so that an interrupted call has judged the most promising ones. A kernel whose process dies gets no verdict;
    ``reason`` says why.
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
        return [_with_verdict(row, verdicts, stored) for row in rows]
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
        for row in (_with_verdict(row, verdicts, stored) for row in rows)
    ]


def _with_verdict(row: TriedKernel, verdicts: Mapping[tuple[str, str], Verdict], stored: set[str]) -> TriedKernel:
    """The row with the emulator's verdict, if there is one. ``stored``: the digests whose verdicts an earlier call
    stored."""
    digest = row.artifact.digest if row.artifact else ""
    verdict = verdicts.get((digest, "emulator"))
    if row.reason or verdict is None:
        return row
    row = replace(row, verdict=verdict, stored=digest in stored)
    if verdict.passed:
        return replace(row, outcome="right")
    reason = "; ".join(verdict.findings[:2]) or "its verdict has no case"
    return replace(row, outcome="wrong result", reason=reason)


def timed(
    rows: Sequence[TriedKernel], card: Gpu, library: Path, seconds: float = SECONDS, seed: int = 0
) -> list[TriedKernel]:
    """Times the right kernels on a GPU for ``seconds`` each, alternately on the same data; see ``bench.in_turns``."""
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


def ranked(rows: Iterable[TriedKernel]) -> list[TriedKernel]:
    """The rows with the fastest first: kernels with a GPU's time, then those with a modelled time only, and last the
    kernels that are not right. Modelled times sort only where their order is worth something (``worth.sorts``)."""

    def place(row: TriedKernel) -> tuple[bool, bool, float]:
        modelled = row.modelled_us if worth.sorts(row.record.problem) else 0.0
        return not row.right, row.timing is None, row.timing.median_us if row.timing else modelled

    return sorted(rows, key=place)


def best(rows: Sequence[TriedKernel], count: int) -> list[TriedKernel]:
    """The fastest right kernels: by the GPU's time if any kernel has one, otherwise by the modelled time."""
    measured = [row for row in rows if row.right and row.timing]
    return ranked(measured or [row for row in rows if row.right])[:count]
