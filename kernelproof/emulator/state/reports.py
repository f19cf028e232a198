"""Collects findings: ``Report`` is one finding, and ``Reports`` has those of a launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count as numbers

from kernelproof.emulator.state.participants import Participant, Place, place_of_finding
from kernelproof.emulator.state.rules import RACES, RULES, SEVERITIES, UNSPECIFIED, Rule, Severity
from kernelproof.emulator.state.sites import NOWHERE, Frame, Site


class EmulatorError(Exception):
    """The emulator cannot continue, because of an unknown instruction, a missing kernel or a wrong argument."""


# The message of the finding that counts those of a kind beyond ``Reports.LIMIT``.
MORE_OF_KIND = "more of this kind, by other instructions"

# Numbers the findings of a process in the order in which they are made.
_serials = numbers()


@dataclass(slots=True)
class Report:
    """One finding. Repetitions of its cause are counted in ``count``; the other fields describe the first one.

    ``kind``: the id of a rule. ``severity``: that of the rule, or benign if the finding was acquitted
    (``Reports.acquit``). ``access``: the side that breaks the rule. ``other``: the other side of a race, which is the
    earlier access. ``place``: the memory that the finding is about. ``instructions``: how many PTX instructions have
    findings of this cause. ``hint``: what to do, by default that of the rule. ``serial``: ascends from finding to
    finding. ``also``: other findings of the same mistake (``causes.grouped``).
    """

    kind: str
    message: str
    kernel: str = ""
    access: Participant = field(default_factory=Participant)
    other: Participant | None = None
    place: Place | None = None
    count: int = 1
    instructions: int = 1
    hint: str = ""
    serial: int = field(default_factory=lambda: next(_serials), compare=False, repr=False)
    also: list[Report] = field(default_factory=list)
    severity: Severity = field(init=False)

    def __post_init__(self) -> None:
        self.severity = RULES[self.kind].severity
        self.hint = self.hint or RULES[self.kind].hint

    @property
    def rule(self) -> Rule:
        """The rule that is broken: what it means, and what to do."""
        return RULES[self.kind]

    @property
    def is_error(self) -> bool:
        """Can a result be wrong?"""
        return self.severity is Severity.ERROR

    @property
    def line(self) -> int:
        """The PTX line, 0 if no instruction is to blame."""
        return self.access.site.line

    @property
    def text(self) -> str:
        """The PTX instruction."""
        return self.access.site.text

    @property
    def source(self) -> str:
        """The CUDA line (if compiled with ``-lineinfo``), the user's own before those of headers."""
        return self.access.site.source

    @property
    def cta(self) -> tuple[int, int, int] | None:
        """(x, y, z) of the CTA."""
        return self.access.cta

    @property
    def threads(self) -> tuple[int, ...]:
        """Linear numbers of the threads."""
        return self.access.threads

    @property
    def address(self) -> int | None:
        """A byte offset (shared) or a device address (global)."""
        return None if self.place is None else self.place.address

    @property
    def cause(self) -> tuple[object, ...]:
        """The key that findings of one cause share: rule, severity, kernel, buffer, and the CUDA lines of both sides
        (without ``-lineinfo`` the PTX lines)."""
        buffer = self.place.buffer if self.place is not None else ""
        # Without an instruction or a line, only the message distinguishes findings.
        alone = self.message if not self.line and not self.access.site.frames else ""
        other = self.other.where if self.other is not None else None
        return self.kind, self.severity, self.kernel, self.access.where, other, buffer, alone

    @property
    def order(self) -> tuple[int, bool, str, int, int]:
        """The sort key: by severity, then by the user's line, then by PTX line. A finding that only counts others comes
        last in its severity."""
        home = self.access.site.home or Frame("", 0)
        return SEVERITIES.index(self.severity), self.message.startswith(MORE_OF_KIND), home.file, home.line, self.line

    def __str__(self) -> str:
        where = f": {self.place}" if self.place is not None else ""
        who = f" ({self.access.who})" if self.access.cta is not None else ""
        other = ""
        if self.other is not None:
            other = f"; the other side: {self.other.who}" + (f" {self.other.at}" if self.other.site.line else "")
        instruction = f" {self.access.at}" if self.line else ""
        times = f" x{self.count}" if self.count > 1 else ""
        severity = "" if self.is_error else f"{self.severity}, "
        return f"{severity}{self.kind}: {self.message}{where}{who}{instruction}{other}{times}"


def by_cause(reports: Iterable[Report]) -> list[Report]:
    """One report per cause, with the sum of the counts: errors first, then by place in the source."""
    causes: dict[tuple[object, ...], Report] = {}
    for report in reports:
        first = causes.get(report.cause)
        if first is None:
            causes[report.cause] = replace_count(report, report.count, report.instructions)
        else:
            first.count += report.count
            # Findings of one instruction may differ in the other side's instruction. They count as one instruction.
            if report.line != first.line:
                first.instructions += report.instructions
    return sorted(causes.values(), key=lambda report: report.order)


def replace_count(report: Report, count: int, instructions: int) -> Report:
    """The same finding with other counts."""
    copy = replace(report, count=count, instructions=instructions)
    copy.severity = report.severity
    return copy


# Kind, instruction, the other side's instruction, and (for findings of no instruction) the message.
Key = tuple[str, int | None, int | None, str | None]


class Reports:
    """Findings of a launch, one per (kind, instruction, instruction of the other side)."""

    # The most reports of a kind, so that a frequent kind does not fill the list. One more report counts the others.
    LIMIT = 200

    def __init__(self, kernel: str, sites: Sequence[Site]) -> None:
        self.kernel, self.sites = kernel, sites
        self.by_key: dict[Key, Report] = {}
        # Doubtful findings, by what was read. Reads of undefined memory (``undefined``) and races become benign if the
        # value that was read affects no memory. Findings about a value that PTX leaves open (``unspecified``) are then
        # dropped.
        self.undefined: set[Key] = set()
        self.races: set[Key] = set()
        self.unspecified: set[Key] = set()
        self.kinds: Counter[str] = Counter()

    def add(
        self,
        kind: str,
        message: str,
        site: int | Site | None = None,
        cta: tuple[int, int, int] | None = None,
        threads: Iterable[int] = (),
        *,
        address: int | None = None,
        count: int = 1,
        doubtful: bool = False,
        other: Participant | None = None,
    ) -> None:
        """Record a finding at an instruction, which is given by its number or, for machine code, as a ``Site``.
        ``doubtful``: the finding is acquitted or dropped if the value that the instruction read or computed affects no
        memory. ``other``: the other side of a race."""
        number = site.line if isinstance(site, Site) else site
        key = (kind, number, None if other is None else other.site.line, None if site is not None else message)
        if key not in self.by_key and self.kinds[kind] >= self.LIMIT:
            site, message, cta, threads, address, other = None, MORE_OF_KIND, None, (), None, None
            key = (kind, None, None, message)
        # A finding is doubtful only if every occurrence of it is.
        doubts = self.races if kind in RACES else self.unspecified if kind in UNSPECIFIED else self.undefined
        if not doubtful:
            doubts.discard(key)
        elif key not in self.by_key:
            doubts.add(key)
        old = self.by_key.get(key)
        if old is not None:
            old.count += count
            return
        self.kinds[kind] += 1
        access_site = site if isinstance(site, Site) else NOWHERE if site is None else self.sites[site]
        access = Participant(access_site, cta, tuple(threads))
        self.by_key[key] = Report(kind, message, self.kernel, access, other, place_of_finding(kind, address), count)

    @property
    def one_sided(self) -> bool:
        """Is there a race whose other side has known threads, but no known instruction?"""
        return any(r.other is not None and not r.other.site.line for r in self.by_key.values())

    def acquit(self, doubts: set[Key]) -> None:
        """Make doubtful findings benign, after executions with other values have had the same result."""
        for key in doubts & self.by_key.keys():
            report = self.by_key[key]
            report.severity = Severity.BENIGN
            report.message += "; the value reaches no memory"

    def forget(self, doubts: set[Key]) -> None:
        """Drop findings about values that no rule of PTX defines, since no result depends on them."""
        for key in doubts & self.by_key.keys():
            self.kinds[self.by_key.pop(key).kind] -= 1

    def adopt(self, others: Reports, kinds: Container[str]) -> None:
        """Add the errors of these kinds that another execution has found and this one has not."""
        for key in others.errors() - self.by_key.keys():
            report = others.by_key[key]
            if report.kind in kinds and self.kinds[report.kind] < self.LIMIT:
                self.kinds[report.kind] += 1
                self.by_key[key] = report
            elif report.kind in kinds:
                self.add(report.kind, MORE_OF_KIND, count=report.count)
                self.by_key[report.kind, None, None, MORE_OF_KIND].severity = report.severity

    def errors(self) -> set[Key]:
        """The keys of the errors."""
        return {key for key, report in self.by_key.items() if report.is_error}

    def list(self) -> list[Report]:
        """The findings, one per cause, errors first."""
        return by_cause(self.by_key.values())
