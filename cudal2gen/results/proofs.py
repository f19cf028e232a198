"""Proofs of kernels: which binaries are certified for every problem that they take, which are not, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from cudal2gen.results.rows import Line
from cudal2gen.results.storage import read, store

ProofOutcome = Literal["certified", "not certified", "refuted"]


class Proof(Line):
    """What the proof of one binary has come to.

    ``digest``: the binary's. ``why``: what could not be proven, and where in the PTX; ``executed``: what executions say
    then. ``refuted`` means that one has failed. ``seconds`` of a processor, for the proof alone. ``instructions``: how
    many a CTA has executed in all cases of the proof.
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
    """What a proof says of every problem that its kernel takes; None if none was tried."""
    if proof is None:
        return "not tried; cudal2gen prove tries it"
    return "for every problem" if proof.outcome == "certified" else f"{proof.outcome}: {proof.why}"
