"""The store of verdicts: append-only JSON lines, keyed by record and binary."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from cudal2gen import places


class Case(BaseModel):
    """One execution: problem, inputs, what was compared, what was found. Errors are absolute, in D's units."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    m: int
    n: int
    k: int
    swizzle_stride: int | None
    inputs: str
    compared: str
    max_error: float
    allowed: float | None
    ctas: int
    findings: tuple[str, ...]
    options: dict[str, int] = {}  # launch options in place of the record's own

    @property
    def passed(self) -> bool:
        return not self.findings


class Verdict(BaseModel):
    """Whether one binary is right: its cases, and what its execution counted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    record: str
    digest: str
    on: str
    cases: tuple[Case, ...]
    counters: dict[str, float]

    @property
    def passed(self) -> bool:
        return bool(self.cases) and all(case.passed for case in self.cases)

    @property
    def findings(self) -> list[str]:
        """What was found, each once, with the first problem that shows it."""
        seen: dict[str, str] = {}
        for case in self.cases:
            for finding in case.findings:
                seen.setdefault(finding, f"{case.m}_{case.n}_{case.k} {case.inputs}: {finding}")
        return list(seen.values())


def store() -> Path:
    """The file of verdicts: ``CUDAL2GEN_RESULTS``, the checkout's ``results``, or the user's data folder."""
    if configured := os.environ.get("CUDAL2GEN_RESULTS"):
        return Path(configured) / "verdicts.jsonl"
    root = places.checkout()
    return (root / "results" if root is not None else places.user_data() / "results") / "verdicts.jsonl"


def append(verdicts: Iterable[Verdict], path: Path | None = None) -> None:
    """Adds verdicts. Processes take turns; a write that fails leaves the file as it was. Raises OSError."""
    target = path or store()
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = file.seek(0, os.SEEK_END)
        rest = "".join(verdict.model_dump_json() + "\n" for verdict in verdicts).encode()
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(before)
            raise


def latest(path: Path | None = None) -> dict[tuple[str, str], Verdict]:
    """The last verdict of each (digest, on). A line that a crash cut short is passed over."""
    target = path or store()
    found: dict[tuple[str, str], Verdict] = {}
    if not target.is_file():
        return found
    for line in target.read_text(errors="replace").splitlines():
        try:
            verdict = Verdict.model_validate(json.loads(line))
        except ValueError:
            continue
        found[verdict.digest, verdict.on] = verdict
    return found
