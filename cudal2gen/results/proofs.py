"""The stored outcomes of ``cudal2gen prove``: which binaries are certified for every problem, which are not, and why.

``show``, ``validate``, ``pack`` and ``report`` read them here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from cudal2gen.results.rows import Line
from cudal2gen.results.storage import read, store

ProofOutcome = Literal["certified", "not certified", "refuted"]


class Proof(Line):
    """The outcome of the proof of one binary, which ``digest`` names.

    ``certified``: it holds. ``not certified``: ``why`` says what could not be proven, and where in the PTX; the kernel
    was then executed, where possible on the problem that the failure suggests, and ``executed`` says which.
    ``refuted``: one of these executions failed. ``seconds``: processor time of the proof alone. ``instructions``: how
    many a CTA executed in all cases of the proof.
    """

    record: str
    digest: str
    outcome: ProofOutcome
    why: str
    executed: str
    seconds: float
    instructions: int


def proofs_store() -> Path:
    """The file of proofs."""
    return store("proofs")


def proofs(path: Path | None = None) -> dict[str, Proof]:
    """The last proof of each binary, by its digest."""
    return {proof.digest: proof for _, proof in read(TypeAdapter(Proof), path or proofs_store())}


def in_words(proof: Proof | None) -> str:
    """The outcome of a proof as messages say it. ``proof``: None if none was tried."""
    if proof is None:
        return "not tried; cudal2gen prove tries it"
    return "for every problem" if proof.outcome == "certified" else f"{proof.outcome}: {proof.why}"
