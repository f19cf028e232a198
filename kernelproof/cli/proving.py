"""The verbs ``prove`` and ``recheck``, for certificates that a kernel is right for all sizes of its contract."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelproof.cli.program import app
from kernelproof.ground.command_line.groups import verb
from kernelproof.ground.command_line.messages import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, refuse
from kernelproof.ground.command_line.options import Json

if TYPE_CHECKING:
    from kernelproof.certificates.by_contract import Attempt

# The exit code of each outcome.
CODES = {"certified": EXIT_DONE, "refuted": EXIT_FAILED, "not certified": EXIT_USAGE}


@verb(app, "prove")
def prove(
    file: Annotated[Path, typer.Argument(metavar="KERNEL", help="A kernel's PTX for sm_80 or later, or its .cu file.")],
    contract: Annotated[
        Path, typer.Option("--contract", metavar="FILE", help="TOML: the kernel's sizes, operands, launch, and result.")
    ],
    as_json: Json = False,
) -> None:
    """Prove a kernel right for every size that its contract allows.

    Each access lies in its operand, no index overflows, each element of D is written once with the whole sum, no
    accesses race, copies are waited for, and loops end. A .cu file is compiled for sm_80. --json prints the
    certificate, which recheck takes.

    Exit codes: 0 certified, 1 an execution shows that the kernel is wrong, 2 wrong input or not certified, 3 a missing
    tool. docs/kernelproof/prove.md has more.
    """
    from kernelproof.certificates import by_contract

    attempt = by_contract.prove(_ptx(file), by_contract.load(contract))
    if as_json:
        print(attempt.model_dump_json(indent=1))
    else:
        _print(file, attempt)
    raise typer.Exit(CODES[attempt.outcome])


@verb(app, "recheck")
def recheck(
    certificate: Annotated[Path, typer.Argument(metavar="FILE", help="A certificate that prove --json printed.")],
    file: Annotated[Path, typer.Argument(metavar="KERNEL", help="The PTX that it is about, or its .cu file.")],
) -> None:
    """Check a certificate again, without any search.

    It holds by the invariants that it states. Exit codes: 0 it holds, 2 it does not, 3 a missing tool.
    """
    from pydantic import ValidationError

    from kernelproof.certificates import NotCertified, by_contract

    text = _text(certificate)
    try:
        attempt = by_contract.Attempt.model_validate_json(text)
    except ValidationError:
        refuse(f"{certificate}: is no certificate that `kernelproof prove --json` printed")
    try:
        by_contract.recheck(attempt, _ptx(file))
    except NotCertified as error:
        refuse(f"{certificate}: {error}")
    print(f"{certificate}: holds for {file}")


def _text(file: Path) -> str:
    """The text of a file. Raises WrongInput if it cannot be read."""
    from kernelproof.ground.errors import reading

    with reading(file):
        return file.read_text(encoding="utf-8")


def _ptx(file: Path) -> str:
    """The text of a PTX file, which always has a target, or of what nvcc makes of a .cu file for sm_80.

    Raises WrongInput for another file, MissingTool without nvcc, and Failure with the compiler's errors.
    """
    from kernelproof.checking import compilation, devices
    from kernelproof.ground import toolchain

    if file.suffix == ".cu" and file.is_file():
        return _text(compilation.ptx(file, [], devices.target(), toolchain.discover()))
    text = _text(file)
    if not re.search(r"^\s*\.target\s", text, re.MULTILINE):
        refuse(f"{file}: neither PTX nor a .cu file; name the .cu file, or the PTX that Triton or `nvcc -ptx` wrote")
    return text


def _print(file: Path, attempt: Attempt) -> None:
    """Prints an attempt: what is proven and how, or why nothing is."""
    print(f"{file}: {attempt.outcome}")
    if attempt.certificate is None:
        print(f"  why: {attempt.why}")
        if attempt.executed:
            print(f"  executed: {attempt.executed}")
        return
    for problem in attempt.certificate.problems:
        print(f"  for {problem}")
    for claim in attempt.certificate.claims:
        print(f"  {claim.title}: {'; '.join(case.covers for case in claim.cases)}")
    for fact in attempt.certificate.accesses:
        print(f"  {fact}")
    print(f"  questions about integers: {attempt.certificate.bounds} by bounds, {attempt.certificate.solver} by z3")
