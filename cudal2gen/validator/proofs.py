"""Proves built kernels for every problem that their launcher accepts, and checks such proofs again."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cudal2gen.generation.compiler import Artifact
from cudal2gen.kernel import Record
from cudal2gen.results.proofs import Proof, ProofOutcome
from cudal2gen.validator.contracts import claims, problems, refusal
from cudal2gen.validator.emulated import run_case, validate
from cudal2gen.validator.problems import Shape
from kernelproof.certificates import Certificate, NotCertified
from kernelproof.certificates import prove as prove_text
from kernelproof.certificates import recheck as recheck_text
from kernelproof.emulator import EmulatorError
from kernelproof.ground import workers
from kernelproof.ground.schema import Schema
from kernelproof.ground.workers import Lost, Task

MOST_PRODUCTS = 1 << 27  # the largest m * n * k of a problem that is executed to confirm that a proof fails


class RecordCertificate(Schema):
    """A certificate of a record's kernel. ``fields``: the record, as a line of the catalog."""

    fields: dict[str, Any]
    certificate: Certificate


class ProofAttempt(NamedTuple):
    """The outcome of a proof, and the certificate if there is one."""

    proof: Proof
    certified: RecordCertificate | None


def prove(record: Record, artifact: Artifact, library: Path) -> ProofAttempt:
    """Proves a built kernel. If the proof fails, searches for a problem on which the kernel is wrong.

    ``library``: the launcher.
    """
    start = time.process_time()
    certified, why, executed = None, "", ""
    outcome: ProofOutcome = "not certified"
    try:
        if why := refusal(record):
            raise NotCertified(why)
        certificate = prove_text(artifact.ptx.read_text(), partial(claims, record), problems(record))
    except (NotCertified, EmulatorError) as error:
        why = str(error)
        seconds = time.process_time() - start
        if isinstance(error, NotCertified) and not refusal(record):
            failed, executed = _search_failure(record, artifact, library, error)
            outcome = "refuted" if failed else outcome
    else:
        seconds = time.process_time() - start
        outcome = "certified"
        certified = RecordCertificate(fields=record.model_dump(mode="json"), certificate=certificate)
    return ProofAttempt(
        Proof(
            record=record.name, digest=artifact.digest, outcome=outcome, why=why, executed=executed,
            seconds=round(seconds, 3), instructions=certified.certificate.instructions if certified else 0,
        ),
        certified,
    )  # fmt: skip


def _search_failure(record: Record, artifact: Artifact, library: Path, error: NotCertified) -> tuple[bool, str]:
    """Executes the problem that the failed proof suggests, then the stress problems of ``validate``.

    Returns whether one of them fails, and what was executed, in words.
    """
    prefix = ""
    if error.extents:
        (m, k), (_, n) = error.extents["A"], error.extents["D"]
        prefix = f"the proof fails at m={m}, n={n}, k={k}"
        if m * n * k <= MOST_PRODUCTS:
            case, _ = run_case(record, artifact, library, Shape(m, n, k), "integers")
            if not case.passed:
                return True, f"executed {m}_{n}_{k}: {'; '.join(case.findings)}"
            prefix += ", which was executed and is right"
        else:
            prefix += ", which is too large to execute"
        prefix += "; "
    verdict = validate(record, artifact, library)
    for case in verdict.cases:
        if not case.passed:
            return True, f"{prefix}executed {case.m}_{case.n}_{case.k}: {'; '.join(case.findings)}"
    return False, f"{prefix}none of {len(verdict.cases)} executions fails"


def prove_all(
    work: Iterable[tuple[Record, Artifact]], library: Path, jobs: int
) -> Generator[ProofAttempt | Lost, None, None]:
    """Proofs of many kernels as they come, from ``jobs`` processes; ``Lost`` names the record whose process died."""
    tasks = (Task(record.name, (record, artifact, library)) for record, artifact in work)
    return workers.answers(prove, tasks, jobs)


def recheck(certificate: Certificate, record: Record, ptx: str) -> None:
    """Checks a certificate again, for the PTX of its record's kernel. Raises NotCertified."""
    if not refusal(record) and certificate.problems != problems(record):
        raise NotCertified("the certificate is about other problems than the launcher's")
    recheck_text(certificate, ptx, partial(claims, record))
