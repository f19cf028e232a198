"""Reads the stored outcomes of ``cudal2gen prove``: which binaries are certified for every problem, and why others are
not.

The commands ``show``, ``validate``, ``pack`` and ``report`` use them.
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

    ``certified``: the proof holds. ``not certified``: ``why`` says what could not be proven, and where in the PTX. The
    kernel was then executed on problems, if possible on the one that the failure suggests; ``executed`` names them.
    ``refuted``: one of these executions failed. ``seconds``: processor time of the proof alone. ``instructions``: how
    many instructions a CTA executed in all cases of the proof.
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
    """The outcome of a proof in the words of messages. ``proof``: None if none was tried."""
    if proof is None:
        return "not tried; cudal2gen prove tries it"
    return "for every problem" if proof.outcome == "certified" else f"{proof.outcome}: {proof.why}"
