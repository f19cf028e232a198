"""Certificates: what was proven of one PTX text, and how to check it again without searching."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kernelproof.certificates.contract import Contract
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.invariants import Invariant
from kernelproof.certificates.loops import Case, MainLoop, Ring
from kernelproof.certificates.program import Program
from kernelproof.ground.schema import Schema

# What a certificate rests on, beside this program: docs/certificates.md explains each.
ASSUMPTIONS = (
    "the launch is as the contract says: sizes, leading dimensions, alignment, grid and block",
    "A, B and D do not overlap, and nothing else writes them meanwhile",
    "shared memory begins at a multiple of 1024 bytes",
    "threads are ordered by program order and barriers of the whole CTA, copies by their groups",
    "sums are sums of real numbers: in which order they are rounded is not proven",
    "ptxas translates the PTX correctly",
)


class Claim(NamedTuple):
    """Launches for which a kernel is to be proven: a title, their contract, and what is stated of the main loop."""

    title: str
    contract: Contract
    ring: Ring


class ClaimProof(Schema):
    """A proven claim: its cases, and the invariant of the main loop (None if it needs none)."""

    title: str
    cases: tuple[Case, ...]
    invariant: Invariant | None


class Certificate(Schema):
    """A proven kernel. ``ptx``: the SHA-256 of its text. ``problems``: the launches that the claims are about, in
    words. ``bounds``, ``solver``: how many questions about integers the bounds of names answered, and how many the
    solver."""

    kernel: str
    ptx: str
    problems: tuple[str, ...]
    assumptions: tuple[str, ...]
    claims: tuple[ClaimProof, ...]
    bounds: int
    solver: int

    @property
    def instructions(self) -> int:
        """How many instructions a CTA has executed in all cases."""
        return sum(case.instructions for claim in self.claims for case in claim.cases)


ClaimsOf = Callable[[Program], Iterable[Claim]]


def prove(ptx: str, claims_of: ClaimsOf, problems: tuple[str, ...] = ()) -> Certificate:
    """The certificate of a PTX text for all claims, which are about ``problems``. Raises NotCertified, which says why
    and where."""
    program = Program(ptx)
    proofs, bounds, solver = [], 0, 0
    for claim in claims_of(program):
        loop = MainLoop(program, claim.contract, claim.ring)
        cases = tuple(loop.cases())
        proofs.append(ClaimProof(title=claim.title, cases=cases, invariant=loop.invariant))
        bounds += claim.contract.facts.questions["bounds"]
        solver += claim.contract.facts.questions["solver"]
    return Certificate(
        kernel=program.name,
        ptx=digest(ptx),
        problems=problems,
        assumptions=ASSUMPTIONS,
        claims=tuple(proofs),
        bounds=bounds,
        solver=solver,
    )


def recheck(certificate: Certificate, ptx: str, claims_of: ClaimsOf) -> None:
    """Check a certificate by its invariants; nothing is guessed. Raises NotCertified."""
    if digest(ptx) != certificate.ptx:
        raise NotCertified("the certificate is of another text")
    program = Program(ptx)
    claims = list(claims_of(program))
    if [claim.title for claim in claims] != [proof.title for proof in certificate.claims]:
        raise NotCertified("the certificate is not of all launches")
    for claim, proof in zip(claims, certificate.claims, strict=True):
        loop = MainLoop(program, claim.contract, claim.ring, proof.invariant, guesses=False)
        if tuple(loop.cases()) != proof.cases:
            raise NotCertified(f"the cases of the certificate are not those of: {proof.title}")


def digest(ptx: str) -> str:
    """The name of a PTX text."""
    return hashlib.sha256(ptx.encode()).hexdigest()
