"""Decides whether kernels that a language model has written are right, and says what is wrong with the others.

The stages: the text is compiled; ptxas must not have found spilled registers or the like; the PTX must not read
registers that tell machines or times apart; the grader executes it and detects cheats; ``review`` searches the PTX; the
emulator gives its verdict. The first stage that fails ends the proof.

A "text" here is the CUDA source that the model has written. No part of it runs on this machine's processor: its device
code is compiled within limits, and the emulator executes the PTX in processes with limits of time and memory.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cudal2gen import validator
from cudal2gen.generation import compiler
from cudal2gen.generation.compiler import Artifact, BuildError
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import Record
from cudal2gen.results import Outcome, Verdict
from cudal2gen.tuner.executor import NoAnswer
from cudal2gen.tuner.writing import review
from cudal2gen.tuner.writing.contract import description
from kernelproof.grading import RULES as GRADE_RULES
from kernelproof.grading import Finding, Limits, check_source
from kernelproof.grading import Verdict as Grade
from kernelproof.ground import process_tree
from kernelproof.ground.errors import Failure, brief
from kernelproof.ground.workers import Worker

ENDLESS = frozenset(("runaway", "time-limit", "deadlock"))  # rules that a kernel breaks if it never ends
LONGEST_REASON, LONGEST_REPORT = 400, 6000  # most characters of a reason and of a report
MAX_FINDINGS = 8  # most findings in a report
STEP_S = 0.05  # seconds between two checks of a process's limits
# Special registers by which a kernel could tell the emulator from a GPU, or a check from a timed call.
_IDENTIFYING_REGISTERS = re.compile(r"%(?:clock|globaltimer|n?smid|n?warpid|gridid|envreg|current_graph_exec|pm\d)\w*")
_LOG = re.compile(r"; all messages are in (\S+\.log)")  # the end of a compiler's error, with the path of its log
_COMMAND = re.compile(r"\bsandbox\.py |^FAILED:|^ninja:")  # lines of a build log that are commands
_SCRATCH = re.compile(r"[^\s\"']*(?:/failed/[0-9a-f]+|_[0-9a-f]{10}(?:_1)?)\.cu")  # paths of the compiled source


@dataclass(frozen=True)
class CheckLimits:
    """Limits of each stage that executes a kernel: its seconds, and the GiB of memory that it may allocate.

    ``seed``: the seed of random inputs and shapes. The model must not know these, because it could write a kernel that
    is right for them alone.
    """

    seconds: float = 120.0
    gib: float = 8.0
    seed: int = field(default_factory=lambda: secrets.randbits(32))


@dataclass(frozen=True)
class CheckResult:
    """The result of checking a kernel. The ``outcome`` of a right kernel is "measured", because it may be timed.

    - ``reason``: the fault in one line.
    - ``report``: all findings with locations and evidence, for the model that wrote the text.
    - ``counters``: what the emulator counted during its verdict.
    """

    outcome: Outcome
    reason: str = ""
    report: str = ""
    artifact: Artifact | None = None
    verdict: Verdict | None = None
    counters: Mapping[str, float] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether the kernel passed all stages."""
        return self.outcome == "measured"

    @property
    def max_error(self) -> float:
        """The largest absolute error of the verdict's cases; 0 without a verdict."""
        return max((case.max_error for case in self.verdict.cases), default=0.0) if self.verdict else 0.0


def prove(record: Record, bounds: CheckLimits) -> CheckResult:
    """Runs the stages on a record whose kernel is a model's text, up to the first that fails. Raises MissingTool
    without a compiler."""
    (outcome,) = compiler.attempt([record])
    if isinstance(outcome, BuildError):
        return _compile_failure(outcome, _offset(record))
    if findings := outcome.ptxas.findings:
        reason = "; ".join(findings)
        return CheckResult("spill", reason, f"ptxas: {reason}; {outcome.ptxas.registers} registers a thread", outcome)
    if registers := sorted(set(_IDENTIFYING_REGISTERS.findall(outcome.ptx.read_text()))):
        reason = f"machine-register: reads {', '.join(registers)}, which tell machines or times apart"
        return CheckResult(
            "wrong result", reason, f"{reason}; results and work must depend on the arguments alone", outcome
        )
    if (failed := _grade_failure(record, outcome, bounds)) is not None:
        return failed
    if findings := review_findings(record, outcome.ptx.read_text()):
        return CheckResult(
            "wrong result", brief(findings[0], LONGEST_REASON), "\n".join(findings[:MAX_FINDINGS]), outcome
        )
    return _verdict_result(record, outcome, compiler.launcher(), bounds)


def review_findings(record: Record, ptx: str) -> list[str]:
    """The findings of ``review`` in the PTX of a written kernel."""
    arguments = [str(argument) for argument in description(record)["launches"][0]["args"]]
    buffers = ("a", "b", "d", "partials", "arrivals")
    pointers = [at for at, name in enumerate(arguments) if name in buffers or name.startswith("map:")]
    outputs = [at for at in pointers if arguments[at].startswith(("d", "map:d"))]
    inputs = [at for at in pointers if arguments[at] in ("a", "b")]
    return review.findings(ptx, pointers, outputs, inputs)


def _offset(record: Record) -> int:
    """The number of lines of the rendered source before the first line of its text."""
    (text,) = record.texts.values()
    source = render(record)
    return source.count("\n", 0, source.index(text))


def _compile_failure(error: BuildError, offset: int) -> CheckResult:
    """The compiler's errors without the commands and paths of this machine, which are of no use to the model.

    Line numbers are those of the text, which begins ``offset`` lines after the start of the source.
    """
    reason = str(error)
    report = reason
    if (log := _LOG.search(reason)) is not None:
        with suppress(OSError):
            report = Path(log[1]).read_text(errors="replace")
    lines = [line.strip() for line in report.splitlines() if line.strip() and not _COMMAND.search(line)]
    faults = [_SCRATCH.sub("kernel.cu", line) for line in lines if re.search(r"error|fatal|limit|memory", line)]
    faults = faults or [_SCRATCH.sub("kernel.cu", _LOG.sub("", reason))]
    faults = [re.sub(r"(?<=kernel\.cu\()\d+", lambda match: str(int(match[0]) - offset), line) for line in faults]
    return CheckResult("compile error", brief(faults[0], LONGEST_REASON), "\n".join(faults)[:LONGEST_REPORT])


def _grade_failure(record: Record, artifact: Artifact, bounds: CheckLimits) -> CheckResult | None:
    """The grader's findings as a result; None if the kernel computes the complete product from its inputs in its
    types."""
    limits = Limits(device=record.arch, seconds=bounds.seconds, gib=bounds.gib, seed=bounds.seed)
    grade = check_source(artifact.ptx.read_text(), **description(record), limits=limits)
    if grade.right:
        return None
    findings = _causes(grade)
    reason = f"not checked: {'; '.join(grade.not_checked)}"
    if findings:
        reason = f"{findings[0].rule}: {findings[0].message}"
    outcome: Outcome = "time-out" if grade.rules & ENDLESS else "wrong result"
    report = _report(findings, grade.not_checked, _offset(record)).replace(record.name, "the kernel")
    return CheckResult(outcome, brief(reason.replace(f"{record.name}: ", ""), LONGEST_REASON), report, artifact)


def _causes(grade: Grade) -> list[Finding]:
    """The first finding of each rule, causes before consequences: kernels that never end, then broken rules of the
    machine, then wrong results."""
    first: dict[str, Finding] = {}
    for item in grade.findings:
        first.setdefault(item.rule, item)

    def rank(item: Finding) -> int:
        return 0 if item.rule in ENDLESS else 2 if item.rule in GRADE_RULES else 1

    return sorted(first.values(), key=rank)


def _report(findings: Sequence[Finding], not_checked: Sequence[str], offset: int) -> str:
    """The findings with their evidence, for the model that wrote the text. It begins after ``offset`` lines."""
    lines = []
    for item in findings[:MAX_FINDINGS]:
        details = {name: value for name, value in item.evidence.items() if value not in ("", [], None, 0)}
        details.pop("ptx_line", None)
        if isinstance(line := details.get("line"), int):
            details["line"] = line - offset
        place = ", ".join(f"{name}={value}" for name, value in details.items())
        sizes = ", ".join(f"{name}={extent}" for name, extent in item.shape.items())
        lines.append(f"{item.rule}: {item.message}")
        lines += [f"  where: {brief(place, 300)}"] if place else []
        lines += [f"  problem: {sizes}"] if sizes else []
        lines.append(f"  hint: {item.hint}")
    lines += [f"not checked: {reason}" for reason in not_checked]
    return "\n".join(lines)[:LONGEST_REPORT]


def _verdict_result(record: Record, artifact: Artifact, library: Path, bounds: CheckLimits) -> CheckResult:
    """The result of the emulator's verdict on the test problems that every record of the catalog must pass."""
    answer = call_within_limits(validator.emulated.validate, (record, artifact, library), bounds)
    if isinstance(answer, NoAnswer):
        return CheckResult(
            answer.outcome, f"its verdict {answer.reason}", f"the emulator's verdict {answer.reason}", artifact
        )
    assert isinstance(answer, Verdict)
    if answer.passed:
        return CheckResult("measured", artifact=artifact, verdict=answer, counters=answer.counters)
    endless = all(re.search(r"runaway|deadlock", finding) for finding in answer.findings)
    reason = next(iter(answer.findings), "no case was executed")
    report = "\n".join(answer.findings[:MAX_FINDINGS])[:LONGEST_REPORT]
    return CheckResult(
        "time-out" if endless else "wrong result", brief(reason, LONGEST_REASON), report, artifact, answer
    )


def call_within_limits(function: Callable[..., Any], arguments: tuple[object, ...], bounds: CheckLimits) -> Any:
    """Calls a function of this package in a separate process. Returns its answer, or a ``NoAnswer``."""
    worker = Worker("fork", _serve, function, arguments)
    watch = process_tree.Watch(worker.pid, bounds.seconds, bounds.gib)
    try:
        while not worker.pipe.poll(STEP_S):
            if limit := watch.passed():
                if limit == "memory":
                    return NoAnswer(f"needs more than {bounds.gib:g} GiB", "wrong result")
                return NoAnswer(f"did not end within {bounds.seconds:g} s", "time-out")
        return worker.pipe.recv()
    except (EOFError, OSError):
        return NoAnswer(worker.death(), "wrong result")
    finally:
        with suppress(ProcessLookupError):
            process_tree.kill_session(worker.pid)
        worker.end()


def _serve(pipe: Connection, function: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    """Runs in the separate process: calls the function and sends its answer."""
    os.setsid()  # so that kill_session ends the processes that the function starts too
    try:
        pipe.send(function(*arguments))
    except Failure as error:
        pipe.send(NoAnswer(f"failed: {error}", "wrong result"))
