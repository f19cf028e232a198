"""Judges the machine code of kernels: the emulator executes the cubin in place of its PTX.

Code with an instruction that the emulator does not execute gets no verdict and is never called wrong.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from cudal2gen.generation.compiler import Artifact
from cudal2gen.kernel import Record
from cudal2gen.results import IN_MACHINE_CODE, MachineCode, Verdict
from cudal2gen.validator.emulated import validate
from kernelproof import emulator
from kernelproof.ground import workers
from kernelproof.ground.workers import Lost, Task


class Unexecuted(NamedTuple):
    """A kernel whose machine code the emulator does not execute: its record's name, its digest, and why."""

    name: str
    digest: str
    reason: str


def judge(
    record: Record, artifact: Artifact, library: Path, rounding: emulator.RoundingName = "model"
) -> Verdict | Unexecuted:
    """The verdict on the machine code of a built kernel. ``library``: the launcher."""
    try:
        return validate(record, artifact, library, rounding, machine_code=True)
    except emulator.UnknownMachineCode as error:
        return Unexecuted(record.name, artifact.digest, str(error).removeprefix(f"{record.name}: "))


def judge_all(
    work: Iterable[tuple[Record, Artifact]], library: Path, jobs: int, rounding: emulator.RoundingName = "model"
) -> Generator[Verdict | Unexecuted | Lost, None, None]:
    """Verdicts on many kernels as they come, from ``jobs`` processes; ``Lost`` names the record whose process died.

    Closing the iterator ends the processes. Raises EmulatorError without a C compiler.
    """
    emulator.runtime_path()  # built once, before the worker processes need it
    tasks = (Task(record.name, (record, artifact, library, rounding)) for record, artifact in work)
    return workers.answers(judge, tasks, jobs)


def stored_verdict(artifact: Artifact, stored: Mapping[tuple[str, str], Verdict]) -> Verdict | None:
    """The stored verdict on a kernel's machine code, or None if there is none for exactly its present cubin.

    ``stored``: verdicts by digest and origin (``Verdict.on``).
    """
    verdict = stored.get((artifact.digest, IN_MACHINE_CODE))
    return verdict if verdict and verdict.machine_code == MachineCode.of(artifact.cubin.read_bytes()) else None
