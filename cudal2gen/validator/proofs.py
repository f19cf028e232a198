"""Proves built kernels for every problem that their launcher accepts, and checks such proofs again."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable
from functools import partial
from pathlib import Path

from cudal2gen.generation.compiler import Artifact
from cudal2gen.kernel import Record
from cudal2gen.results.proofs import Proof
from cudal2gen.validator.contracts import claims, refusal
from cudal2gen.validator.emulated import run_case, validate
from cudal2gen.validator.problems import Shape
from kernelproof.certificates import Certificate, NotCertified
from kernelproof.certificates import prove as prove_text
from kernelproof.certificates import recheck as recheck_text
from kernelproof.emulator.state.reports import EmulatorError
from kernelproof.ground import workers
from kernelproof.ground.workers import Lost, Task

MOST_PRODUCTS = 1 << 27  # of a problem that is executed to confirm that a proof fails


def prove(record: Record, artifact: Artifact, library: Path) -> Proof:
    """The proof of a built kernel. If it fails, a problem that shows it is looked for; ``library``: the launcher."""
    start = time.process_time()
    certificate, why, executed, outcome = None, "", "", "certified"
    try:
        certificate = prove_text(artifact.ptx.read_text(), partial(claims, record))
    except NotCertified as error:
        outcome, why = "not certified", str(error)
        seconds = time.process_time() - start
        if not refusal(record):
            failed, executed = _executed(record, artifact, library, error)
            outcome = "refuted" if failed else outcome
    except EmulatorError as error:
        outcome, why, seconds = "not certified", str(error), time.process_time() - start
    else:
        seconds = time.process_time() - start
    return Proof.model_validate(
        {
            "record": record.name,
            "digest": artifact.digest,
            "outcome": outcome,
            "why": why,
            "executed": executed,
            "seconds": round(seconds, 3),
            "fields": record.model_dump(mode="json"),
            "certificate": None if certificate is None else certificate.model_dump(mode="json"),
        }
    )


def _executed(record: Record, artifact: Artifact, library: Path, error: NotCertified) -> tuple[bool, str]:
    """Whether an execution fails that the failed proof suggests, and what was executed."""
    named = ""
    if error.extents:
        (m, k), (_, n) = error.extents["A"], error.extents["D"]
        named = f"the proof fails at m={m}, n={n}, k={k}"
        if m * n * k <= MOST_PRODUCTS:
            case, _ = run_case(record, artifact, library, Shape(m, n, k), "integers")
            if not case.passed:
                return True, f"executed {m}_{n}_{k}: {'; '.join(case.findings)}"
            named += ", which was executed and is right"
        else:
            named += ", which is too large to execute"
        named += "; "
    verdict = validate(record, artifact, library)
    for case in verdict.cases:
        if not case.passed:
            return True, f"{named}executed {case.m}_{case.n}_{case.k}: {'; '.join(case.findings)}"
    return False, f"{named}none of {len(verdict.cases)} executions fails"


def prove_all(work: Iterable[tuple[Record, Artifact]], library: Path, jobs: int) -> Generator[Proof | Lost, None, None]:
    """Proofs of many kernels as they come, from ``jobs`` processes; ``Lost`` names the record whose process died."""
    tasks = (Task(record.name, (record, artifact, library)) for record, artifact in work)
    return workers.answers(prove, tasks, jobs)


def recheck(proof: Proof, record: Record, ptx: str) -> None:
    """Check a certificate again, for the PTX of its record's kernel. Raises NotCertified."""
    if proof.certificate is None:
        raise NotCertified(f"{proof.record} has no certificate")
    certificate = Certificate.model_validate_json(json.dumps(proof.certificate))
    recheck_text(certificate, ptx, partial(claims, record))
