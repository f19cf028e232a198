"""Makes certificates, which say what was proven of one PTX text, and checks them again without searching."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from kernelproof.certificates.contract import Contract
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.invariants import Invariant
from kernelproof.certificates.loops import REST, Case, MainLoop, Phase, Ring
from kernelproof.certificates.pipeline_proof import PipelineProof
from kernelproof.certificates.pipelines import Pipeline
from kernelproof.certificates.program import Program
from kernelproof.certificates.single_shot import SingleShot, SingleShotProof
from kernelproof.certificates.traffic import GlobalAccess, SharedAccess
from kernelproof.certificates.words import Undecided
from kernelproof.ground.schema import Schema

# What a certificate assumes, in addition to this program being right. docs/certificates.md explains each assumption.
ASSUMPTIONS = (
    "the launch is as the contract says: sizes, leading dimensions, alignment, grid and block",
    "A, B and D do not overlap, and nothing else writes them meanwhile",
    "shared memory begins at a multiple of 1024 bytes, and its variables lie there as the emulator lays them out",
    "threads are ordered by program order and barriers of the whole CTA, copies by their groups; in pipelines and "
    "clusters also by mbarriers, barriers of warps and groups, wgmma with its groups, and tcgen05 with its waits, "
    "fences and commits, whose arrivals come in order, and elect.sync elects lane 0",
    "who waits for an mbarrier sees all bytes that have come with its phase, by bulk copies or st.async",
    "CTAs that wait for each other's partial sums run at once, and counters are zero before a launch",
    "sums are sums of real numbers: in which order they are rounded is not proven",
    "ptxas translates the PTX correctly",
)


# Limits of the search for a ring, which exceed the rings of the kernels that were tried. MOST_AHEAD counts the values
# of ``ahead`` from the least one on.
MOST_PERIOD, MOST_AHEAD, MOST_PEELED = 8, 6, 1


class Claim(NamedTuple):
    """Launches for which a kernel is to be proven: a title, their contract, and what is stated of the main loop, of
    the roles of a pipeline, or of CTAs that load all of their k at once."""

    title: str
    contract: Contract
    ring: Ring | Pipeline | SingleShot


class ClaimProof(Schema):
    """A proven claim: its cases, and the invariant of the main loop (None if it needs none). ``period``, ``ahead``,
    ``peeled``: the ring that was found, if the claim states none. ``shared_accesses``, ``global_accesses``: what the
    warps of a CTA access, by instruction."""

    title: str
    cases: tuple[Case, ...]
    invariant: Invariant | None
    period: Annotated[int, Field(ge=0)] = 0
    ahead: Annotated[int, Field(ge=0)] = 0
    peeled: Annotated[int, Field(ge=0)] = 0
    roles: Annotated[tuple[Invariant, ...], Field(description="of a pipeline, the invariants of its roles")] = ()
    shared_accesses: tuple[SharedAccess, ...] = ()
    global_accesses: tuple[GlobalAccess, ...] = ()


class Certificate(Schema):
    """A proven kernel. ``ptx``: the SHA-256 of its text. ``problems``: the launches that the claims are about, in
    words. ``bounds``, ``solver``: how many questions about integers were answered by the bounds of names, and how many
    by the solver."""

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

    @property
    def accesses(self) -> tuple[str, ...]:
        """What the warps of a CTA access at once, in words, each fact once."""
        facts = [str(each) for claim in self.claims for each in (*claim.shared_accesses, *claim.global_accesses)]
        return tuple(dict.fromkeys(facts))


ClaimsOf = Callable[[Program], Iterable[Claim]]


def prove(ptx: str, claims_of: ClaimsOf, problems: tuple[str, ...] = (), kernel: str = "") -> Certificate:
    """Prove all claims about the kernel of a PTX text, and return the certificate.

    ``problems``: the launches that the claims are about, in words. ``kernel``: the kernel's name, if the text has
    several. Raises NotCertified, which says why and where.
    """
    program = Program(ptx, kernel)
    proofs, bounds, solver = [], 0, 0
    for claim in claims_of(program):
        proofs.append(_proof(program, claim))
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


def _proof(program: Program, claim: Claim) -> ClaimProof:
    """Prove one claim, in the way that its ``ring`` asks for. Raises NotCertified."""
    program.forget_traffic()
    if isinstance(claim.ring, Pipeline):
        pipeline = PipelineProof(program, claim.contract, claim.ring)
        cases = tuple(pipeline.cases())
        return ClaimProof(
            title=claim.title, cases=cases, invariant=None, roles=tuple(pipeline.invariants), **_accesses(program)
        )
    if isinstance(claim.ring, SingleShot):
        cases = tuple(SingleShotProof(program, claim.contract, claim.ring).cases())
        return ClaimProof(title=claim.title, cases=cases, invariant=None, **_accesses(program))
    if not claim.ring.period:
        return _proof_by_search(program, claim, claim.ring)
    loop = MainLoop(program, claim.contract, claim.ring)
    cases = tuple(loop.cases())
    return ClaimProof(title=claim.title, cases=cases, invariant=loop.invariant, **_accesses(program))


def _accesses(program: Program) -> dict[str, Any]:
    """The fields of a ``ClaimProof`` that state accesses."""
    traffic = program.traffic
    return {"shared_accesses": traffic.shared_accesses(), "global_accesses": traffic.global_accesses()}


def _proof_by_search(program: Program, claim: Claim, stated: Ring) -> ClaimProof:
    """Try rings until one proves the claim. If none does, raise the error of the proof that came farthest."""
    best = (-1, False, NotCertified("no ring"))
    first, hopeless = max(1, stated.least - 1), set[tuple[int, int]]()
    rings = product(range(1, MOST_PERIOD + 1), range(MOST_AHEAD), range(MOST_PEELED + 1))
    for period, ahead, peeled in sorted(rings, key=lambda ring: (sum(ring), ring)):
        if (period, peeled) in hopeless:
            continue
        ring = replace(stated, period=period, ahead=first + ahead, peeled=peeled)
        loop = MainLoop(program, claim.contract, ring)
        cases: list[Case] = []
        program.forget_traffic()
        try:
            cases += loop.cases()
        except NotCertified as error:
            if loop.phase == Phase.FEW or (loop.phase == Phase.ENTRY and not isinstance(error, Undecided)):
                raise
            best = max(best, (len(cases), bool(error.where), error), key=lambda each: each[:2])
            # A larger ``ahead`` only helps if it decides a comparison that depends on the k-tiles that are left.
            if not isinstance(error, Undecided) or REST not in error.gap.names():
                hopeless.add((period, peeled))
        else:
            return ClaimProof(
                title=claim.title, cases=tuple(cases), invariant=loop.invariant,
                period=period, ahead=ring.ahead, peeled=peeled, **_accesses(program),
            )  # fmt: skip
    raise best[2]


def recheck(certificate: Certificate, ptx: str, claims_of: ClaimsOf, kernel: str = "") -> None:
    """Check a certificate: replay its cases by its invariants, without guessing. Raises NotCertified."""
    if digest(ptx) != certificate.ptx:
        raise NotCertified("the certificate is of another text")
    if certificate.assumptions != ASSUMPTIONS:
        raise NotCertified("the certificate assumes something else than a proof does")
    program = Program(ptx, kernel)
    if program.name != certificate.kernel:
        raise NotCertified("the certificate is of another kernel")
    claims = list(claims_of(program))
    if [claim.title for claim in claims] != [proof.title for proof in certificate.claims]:
        raise NotCertified("the certificate is not of all launches")
    for claim, proof in zip(claims, certificate.claims, strict=True):
        loop = _stated_proof(program, claim, proof)
        program.forget_traffic()
        try:
            cases = tuple(loop.cases())
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # An edited invariant may name registers that do not exist, or give a word's step to a sum.
            raise NotCertified(f"the invariant of the certificate is none of this kernel: {error!r}") from error
        if cases != proof.cases:
            raise NotCertified(f"the cases of the certificate are not those of: {proof.title}")
        if _accesses(program) != {name: getattr(proof, name) for name in ("shared_accesses", "global_accesses")}:
            raise NotCertified(f"the accesses of the certificate are not those of: {proof.title}")


def _stated_proof(program: Program, claim: Claim, proof: ClaimProof) -> MainLoop | PipelineProof | SingleShotProof:
    """The proof of a claim by the ring and invariants of a certificate, which guesses nothing."""
    ring = claim.ring
    if isinstance(ring, Pipeline):
        return PipelineProof(program, claim.contract, ring, proof.roles, guesses=False)
    if isinstance(ring, SingleShot):
        return SingleShotProof(program, claim.contract, ring)
    if not ring.period:
        if not proof.period:
            raise NotCertified(f"the certificate lacks the ring of: {proof.title}")
        ring = replace(ring, period=proof.period, ahead=proof.ahead, peeled=proof.peeled)
    return MainLoop(program, claim.contract, ring, proof.invariant, guesses=False)


def digest(ptx: str) -> str:
    """The SHA-256 of a PTX text, in hexadecimal."""
    return hashlib.sha256(ptx.encode()).hexdigest()
