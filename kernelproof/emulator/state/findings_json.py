"""Converts findings to JSON. Fields of a version keep their name and meaning; new fields may be added."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from kernelproof.emulator.state.causes import grouped
from kernelproof.emulator.state.participants import Participant, Place
from kernelproof.emulator.state.reports import Report
from kernelproof.emulator.state.sites import Frame

VERSION = 1


class FrameFields(TypedDict):
    """A line of CUDA source; ``function`` is "" if the PTX does not say."""

    file: str
    line: int
    function: str


class ParticipantFields(TypedDict):
    """A side of a finding.

    - ``home``: the user's own line. ``chain``: all lines, the innermost first, each inlined at the next one.
    - ``ptx``, ``ptx_line``: the PTX instruction; the line is 0 if no instruction is known. If machine code was
      executed, ``ptx`` is empty, ``address`` and ``sass`` are those of its instruction, and ``ptx_line`` is 0 if the
      cubin does not say it.
    - ``cta``: [x, y, z]. ``threads``: linear numbers in the CTA. ``warp``, ``lane``: those of the first thread.
    - ``agent``: what acts for the threads, in words.
    """

    home: FrameFields | None
    chain: list[FrameFields]
    ptx_line: int
    ptx: str
    address: int | None
    sass: str
    cta: list[int] | None
    threads: list[int]
    warp: int | None
    lane: int | None
    agent: str


class PlaceFields(TypedDict):
    """The first byte of memory that a finding is about.

    ``space``: global or shared. ``address``: a device address, or a byte offset in shared memory. ``buffer``: the
    buffer's name, "" if unknown. ``offset``: bytes from its start. ``element``: the type of its elements. ``index``:
    the element, as [row, column] if the shape is known, and [] if the type is not. ``note``: more, in words.
    """

    space: str
    address: int
    buffer: str
    offset: int
    element: str
    index: list[int]
    note: str


class AlsoFields(TypedDict):
    """Another finding of the same cause. ``access``, ``other``: the user's own lines of its two sides; None without
    line information. ``ptx_line``: the line of the instruction that breaks the rule."""

    rule: str
    message: str
    kernel: str
    access: FrameFields | None
    other: FrameFields | None
    ptx_line: int
    count: int


class FindingFields(TypedDict):
    """A finding for each cause. ``rule``: a key of ``RULES``. ``severity``: error, benign or lint. ``access`` breaks
    the rule, and ``other`` is the earlier access of a race. ``count``: how often the cause was found. ``instructions``:
    at how many PTX instructions. ``also``: other findings of the cause, which are part of the counts. ``page``: the
    page about the rule, relative to ``docs/kernelproof``. ``text``: the finding as people read it. All other fields
    describe the first occurrence."""

    rule: str
    severity: str
    message: str
    hint: str
    page: str
    kernel: str
    access: ParticipantFields
    other: ParticipantFields | None
    place: PlaceFields | None
    count: int
    instructions: int
    also: list[AlsoFields]
    text: str


class FindingsDocument(TypedDict):
    """All findings, errors first. ``version``: that of the fields."""

    version: int
    findings: list[FindingFields]


def findings_document(reports: Iterable[Report]) -> FindingsDocument:
    """The findings of any number of launches, one per cause."""
    return {"version": VERSION, "findings": [finding_fields(report) for report in grouped(reports)]}


def finding_fields(report: Report) -> FindingFields:
    """A finding as JSON."""
    return {
        "rule": report.kind,
        "severity": str(report.severity),
        "message": report.message,
        "hint": report.hint,
        "page": f"rules/{report.kind}.md",
        "kernel": report.kernel,
        "access": _participant(report.access),
        "other": None if report.other is None else _participant(report.other),
        "place": None if report.place is None else _place(report.place),
        "count": report.count,
        "instructions": report.instructions,
        "also": [_also(other) for other in report.also],
        "text": str(report),
    }


def _also(report: Report) -> AlsoFields:
    """Another finding of a cause as JSON."""
    home, other = report.access.site.home, report.other.site.home if report.other is not None else None
    return {
        "rule": report.kind,
        "message": report.message,
        "kernel": report.kernel,
        "access": None if home is None else _frame(home),
        "other": None if other is None else _frame(other),
        "ptx_line": report.access.site.ptx_line if report.access.site.machine_code else report.line,
        "count": report.count,
    }


def _participant(side: Participant) -> ParticipantFields:
    """A side of a finding as JSON."""
    machine_code = side.site.machine_code
    return {
        "home": None if side.site.home is None else _frame(side.site.home),
        "chain": [_frame(frame) for frame in side.site.frames],
        "ptx_line": side.site.ptx_line if machine_code else side.site.line,
        "ptx": "" if machine_code else side.site.text,
        "address": side.site.line if machine_code else None,
        "sass": side.site.text if machine_code else "",
        "cta": None if side.cta is None else list(side.cta),
        "threads": list(side.threads),
        "warp": side.warp,
        "lane": side.lane,
        "agent": side.agent,
    }


def _frame(frame: Frame) -> FrameFields:
    """A source line as JSON."""
    return {"file": frame.file, "line": frame.line, "function": frame.function}


def _place(place: Place) -> PlaceFields:
    """A place in memory as JSON."""
    return {
        "space": str(place.space),
        "address": place.address,
        "buffer": place.buffer,
        "offset": place.offset,
        "element": place.element,
        "index": list(place.index),
        "note": place.note,
    }
