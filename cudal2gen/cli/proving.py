"""The verbs ``prove`` and ``recheck`` write and check certificates that kernels are right for every problem."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from cudal2gen.cli.building import Compilation
from cudal2gen.cli.program import app
from cudal2gen.cli.selection import ALL_HELP, FILTERS, PLAIN, VARIANT_FIELDS, Selection
from cudal2gen.kernel import Record
from kernelproof.ground.command_line import progress, signals
from kernelproof.ground.command_line.groups import Offer, verb
from kernelproof.ground.command_line.messages import EXIT_FAILED, EXIT_USAGE, error, note, refuse
from kernelproof.ground.command_line.options import Json
from kernelproof.ground.files import write
from kernelproof.ground.pages import counted

if TYPE_CHECKING:
    from cudal2gen.generation.compiler import Artifact
    from cudal2gen.results.proofs import Proof
    from cudal2gen.validator.proofs import ProofAttempt
    from kernelproof.ground.workers import Lost


@verb(app, "prove")
def prove(
    selection: Annotated[Selection, Offer(only=(*PLAIN, *VARIANT_FIELDS), wildcards=FILTERS, helps=ALL_HELP)],
    compilation: Compilation,
    changed: Annotated[
        bool,
        typer.Option("--changed", help="Only kernels without a stored proof; resumes an interrupted run."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="A folder for certificates, one file for each kernel.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove kernels right for every problem that they take.

    For every m, n, k and leading dimension: each access lies in its operand, no index overflows, each element of D is
    written once with the whole sum, no accesses race, copies are waited for, and loops end. What is assumed and what is
    not covered: docs/certificates.md. Exit code 1: an execution confirms that a kernel is wrong; 2: one is not
    certified.

    Each proof is stored before the next kernel is proven.
    """
    records = (replace(selection, everything=True) if changed and not selection.names_sizes else selection).records()
    kernels = compilation.distinct(records)
    pending = _without_proof(kernels) if changed else list(kernels.values())
    built = compilation.attempt(pending)
    attempts = _store_proofs(_proofs(built, compilation), len(built), out)
    proofs = [attempt.proof for attempt in attempts]
    for attempt in attempts:
        if as_json:
            print(attempt.proof.model_dump_json())
        elif selection.mnk:
            _print(attempt)
    if not as_json:
        _summary(proofs, len(kernels) - len(pending))
    if any(proof.outcome == "refuted" for proof in proofs) or len(proofs) < len(pending):
        raise typer.Exit(EXIT_FAILED)
    if any(proof.outcome != "certified" for proof in proofs):
        raise typer.Exit(EXIT_USAGE)


@verb(app, "recheck")
def recheck(
    files: Annotated[list[Path], typer.Argument(metavar="FILES", help="Certificates that prove --out wrote.")],
    compilation: Compilation,
) -> None:
    """Check certificates again, without any search.

    The invariants that a certificate states are checked for its kernel's PTX. Exit code 2: a certificate does not hold.
    """
    from cudal2gen.kernel import parse
    from cudal2gen.validator import proofs
    from kernelproof.certificates import NotCertified
    from kernelproof.ground.errors import reading

    failed = False
    for file in files:
        with reading(file):
            text = file.read_text()
        try:
            certified = proofs.RecordCertificate.model_validate_json(text)
        except ValueError:
            refuse(f"{file}: is no certificate that `cudal2gen prove --out` wrote")
        record = parse(certified.fields)
        (artifact,) = compilation.build([record])
        try:
            proofs.recheck(certified.certificate, record, artifact.ptx.read_text())
        except NotCertified as why:
            error(f"{file}: {why}")
            failed = True
        else:
            print(f"{file}: holds for {record.name}")
            for problems in certified.certificate.problems:
                print(f"  for {problems}")
    if failed:
        raise typer.Exit(EXIT_USAGE)


def _without_proof(kernels: dict[str, Record]) -> list[Record]:
    """The records whose kernels, given by digest, have no stored proof."""
    from cudal2gen.results import proofs

    stored = proofs.proofs()
    return [record for digest, record in kernels.items() if digest not in stored]


def _proofs(built: Sequence[tuple[Record, Artifact]], compilation: Compilation) -> Iterator[ProofAttempt | Lost]:
    """Proves the kernels in processes of their own, and yields each attempt when it ends."""
    from cudal2gen.validator import proofs

    if built:
        processes = compilation.jobs or os.cpu_count() or 1
        with closing(proofs.prove_all(built, compilation.launcher(), processes)) as answers:
            yield from answers


def _store_proofs(answers: Iterator[ProofAttempt | Lost], total: int, out: Path | None) -> list[ProofAttempt]:
    """Stores each proof before it waits for the next one. An error line names each kernel without a proof."""
    from cudal2gen import results
    from cudal2gen.results.proofs import proofs_store
    from kernelproof.ground.workers import Lost

    attempts: list[ProofAttempt] = []
    try:
        with signals.exit_restored(), progress.bar("proving") as show:
            for done, answer in enumerate(answers, 1):
                if isinstance(answer, Lost):
                    error(f"{answer.name}: {answer.reason}")
                else:
                    results.append([answer.proof], proofs_store())
                    attempts.append(answer)
                    if out is not None and answer.certified is not None:
                        write(out / f"{answer.proof.record}.json", answer.certified.model_dump_json(indent=1) + "\n")
                if show:
                    show(done, total)
    except SystemExit:
        note("interrupted; finished proofs are stored, and the same command with --changed continues")
        raise
    return attempts


def _print(attempt: ProofAttempt) -> None:
    """Prints the outcome of a proof: the problems, cases and accesses of a certificate, or why there is none."""
    proof = attempt.proof
    print(f"{proof.record}: {proof.outcome}, {proof.seconds:.1f} s")
    if attempt.certified is None:
        print(f"  why: {proof.why}")
        if proof.executed:
            print(f"  executed: {proof.executed}")
        return
    certificate = attempt.certified.certificate
    for problems in certificate.problems:
        print(f"  for {problems}")
    for claim in certificate.claims:
        cases = [f"{case.covers} ({case.instructions} instructions)" for case in claim.cases]
        print(f"  {claim.title}: {'; '.join(cases)}")
    for fact in certificate.accesses:
        print(f"  {fact}")
    print(f"  questions about integers: {certificate.bounds} by bounds, {certificate.solver} by z3")


def _summary(proofs: Sequence[Proof], known: int) -> None:
    """Prints how many kernels are certified, and why the others are not."""
    outcomes = Counter(proof.outcome for proof in proofs)
    words = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common())
    skipped = f", {known} had a proof" if known else ""
    times = [proof.seconds for proof in proofs if proof.outcome == "certified"]
    speed = f"; median {median(times):.1f} s" if times else ""
    print(f"{counted(len(proofs), 'kernel')}{skipped}: {words or 'none proven'}{speed}")
    reasons = Counter(proof.why.split(" [")[0] for proof in proofs if proof.outcome != "certified")
    for reason, number in reasons.most_common():
        print(f"  {number} x {reason}")
