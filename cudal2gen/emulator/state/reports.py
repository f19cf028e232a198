"""Findings: the report, and its collection in a launch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cudal2gen.emulator.state.rules import RACES, RULES, Severity


class EmulatorError(Exception):
    """The machine cannot go on: an unknown instruction, a missing kernel, a wrong argument."""


@dataclass(slots=True)
class Report:
    """One finding. Repetitions at the same instruction are counted in ``count``, the rest describes the first.

    ``kind`` is the id of a rule, ``severity`` the rule's unless the value concerned has turned out not to matter.
    ``line`` and ``text`` are the PTX instruction, ``source`` the CUDA line (if compiled with ``-lineinfo``), ``cta``
    (x, y, z), ``threads`` linear thread numbers, ``address`` a byte offset (shared) or a device address (global).
    """

    kind: str
    message: str
    kernel: str = ""
    line: int = 0
    text: str = ""
    source: str = ""
    cta: tuple[int, int, int] | None = None
    threads: tuple[int, ...] = ()
    address: int | None = None
    count: int = 1
    severity: Severity = field(init=False)

    def __post_init__(self) -> None:
        self.severity = RULES[self.kind].severity

    @property
    def is_error(self) -> bool:
        """Can a result be wrong?"""
        return self.severity is Severity.ERROR

    def __str__(self) -> str:
        where = f" [{self.source}]" if self.source else ""
        ptx = f" at PTX line {self.line}: {self.text}" if self.line else ""
        who = ""
        if self.cta is not None:
            first = ", ".join(map(str, self.threads[:8])) + (", ..." if len(self.threads) > 8 else "")
            who = f" (CTA {self.cta}" + (f", threads {first}" if first else "") + ")"
        times = f" x{self.count}" if self.count > 1 else ""
        severity = "" if self.is_error else f"{self.severity}, "
        return f"{severity}{self.kind}: {self.message}{who}{ptx}{where}{times}"


@dataclass(slots=True)
class Site:
    """Where an access comes from, for reports."""

    line: int
    text: str
    source: str


# Kind, instruction, and (for findings of no instruction) the message.
Key = tuple[str, int | None, str | None]


class Reports:
    """Findings of a launch, one per (kind, instruction)."""

    LIMIT = 200

    def __init__(self, kernel: str, sites: list[Site]) -> None:
        self.kernel, self.sites = kernel, sites
        self.by_key: dict[Key, Report] = {}
        # Findings that are benign unless the value read reaches memory: undefined values, and races.
        self.doubtful: set[Key] = set()
        self.races: set[Key] = set()

    def add(
        self,
        kind: str,
        message: str,
        site: int | None = None,
        cta: tuple[int, int, int] | None = None,
        threads: Iterable[int] = (),
        address: int | None = None,
        count: int = 1,
        doubtful: bool = False,
    ) -> None:
        """Record a finding at instruction ``site``; ``doubtful``: benign if the value turns out not to matter."""
        key = (kind, site, None if site is not None else message)
        doubts = self.races if kind in RACES else self.doubtful
        if not doubtful:
            doubts.discard(key)
        elif key not in self.by_key:
            doubts.add(key)
        old = self.by_key.get(key)
        if old is not None:
            old.count += count
            return
        if len(self.by_key) >= self.LIMIT:
            return
        at = self.sites[site] if site is not None else Site(0, "", "")
        self.by_key[key] = Report(
            kind, message, self.kernel, at.line, at.text, at.source, cta, tuple(threads), address, count
        )

    def acquit(self, doubts: set[Key]) -> None:
        """The values of some doubtful findings have turned out not to matter."""
        for key in doubts & self.by_key.keys():
            report = self.by_key[key]
            report.severity = Severity.BENIGN
            report.message += "; the value reaches no memory"

    def errors(self) -> set[Key]:
        """The errors."""
        return {key for key, report in self.by_key.items() if report.is_error}

    def list(self) -> list[Report]:
        """The findings, by PTX line."""
        return sorted(self.by_key.values(), key=lambda r: r.line)
