"""Proves any kernel by a contract from a file, and checks such a proof again: what ``kernelproof prove`` calls."""

from __future__ import annotations

import re
from functools import partial
from math import prod
from pathlib import Path
from typing import Literal

from kernelproof.certificates import certificate as certificates
from kernelproof.certificates import contract_file
from kernelproof.certificates.certificate import Certificate
from kernelproof.certificates.contract_file import KernelContract
from kernelproof.certificates.execution import confirm, smallest
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.launches import claims, orders, problems
from kernelproof.certificates.words import Undecided
from kernelproof.emulator import EmulatorError, PtxError, UnknownInstruction
from kernelproof.ground.errors import WrongInput
from kernelproof.ground.schema import Schema

Outcome = Literal["certified", "refuted", "not certified"]


class Attempt(Schema):
    """The outcome of a proof.

    ``certificate``: the proof; None unless the outcome is "certified". ``why``: otherwise what could not be proven, and
    where in the PTX. ``executed``: otherwise what was executed to confirm that, and what failed.
    """

    outcome: Outcome
    contract: KernelContract
    certificate: Certificate | None = None
    why: str = ""
    executed: str = ""


def load(path: Path) -> KernelContract:
    """Read a contract from a file. Raises WrongInput, whose message names the file and the field."""
    contract = contract_file.load(path)
    try:
        _check(contract)
    except WrongInput as error:
        raise WrongInput(f"{path}: {error}") from None
    return contract


def _check(contract: KernelContract) -> None:
    """Raise WrongInput if the contract contradicts itself or is not covered, or if it allows no problem at all."""
    contract_file.check(contract)
    smallest(contract)
    tuple(orders(contract))


def prove(ptx: str, contract: KernelContract) -> Attempt:
    """Prove a PTX text by a contract that ``load`` has read. If that fails, execute the kernel on some problems, to
    find one for which it is wrong: then the outcome is "refuted", else "not certified". Raises WrongInput if the PTX
    has no kernel of the contract's name, or its parameters are others."""
    try:
        certificate = certificates.prove(ptx, partial(claims, contract), problems(contract), contract.kernel)
    except NotCertified as error:
        return _attempt_after_execution(ptx, contract, error)
    except (PtxError, UnknownInstruction) as error:
        return Attempt(outcome="not certified", contract=contract, why=str(error))
    return Attempt(outcome="certified", contract=contract, certificate=certificate)


def _attempt_after_execution(ptx: str, contract: KernelContract, error: NotCertified) -> Attempt:
    """The attempt whose proof has failed with an error, after executions that may confirm it."""
    try:
        execution = confirm(contract, ptx, error)
    except (EmulatorError, PtxError, UnknownInstruction) as unsupported:
        return Attempt(outcome="not certified", contract=contract, why=str(error), executed=f"nothing: {unsupported}")
    words = execution.fault or f"{execution.executed} problems, none of which fails"
    if execution.fault:
        return Attempt(outcome="refuted", contract=contract, why=str(error), executed=words)
    why = f"{error}{_advice(contract, ptx, error)}"
    return Attempt(outcome="not certified", contract=contract, why=why, executed=words)


def _advice(contract: KernelContract, ptx: str, error: NotCertified) -> str:
    """What to change in the contract, as the rest of a sentence; empty if nothing is known to help.

    A kernel that sums rows loads ``per_step`` elements of a row per step: those of one vector load of each of its
    threads. If a row's length is no multiple of that, a predicate guards the last step, and the proof cannot decide it.
    """
    if not isinstance(error, Undecided) or contract.meaning.is_product:
        return ""
    name = contract.extents()[contract.meaning.summed]
    threads = max(1, prod(contract.launch.block) // contract.launch.tile[0])
    per_step = threads * max(map(int, re.findall(r"\bld\.global[\w.:]*\.v([248])\.", ptx)), default=1)
    if contract.sizes[name].multiple % per_step == 0:
        return ""
    return f"; give {name} a multiple of {per_step} in [sizes], the elements that the threads of a row load at once"


def recheck(attempt: Attempt, ptx: str) -> None:
    """Check a certificate against a PTX text, without searching. Raises NotCertified if it does not hold, and
    WrongInput for a contract that ``load`` would refuse."""
    contract, certificate = attempt.contract, attempt.certificate
    if certificate is None:
        raise NotCertified("it says why a kernel is not certified, and certifies none")
    if attempt.outcome != "certified":
        raise NotCertified(f"its outcome is {attempt.outcome}")
    _check(contract)
    if certificate.problems != problems(contract):
        raise NotCertified("the certificate is about other problems than its contract")
    certificates.recheck(certificate, ptx, partial(claims, contract), contract.kernel)
