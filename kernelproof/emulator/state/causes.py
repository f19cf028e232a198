"""Groups findings by their cause: one finding is shown per cause, and the others are counted.

A missing barrier leads to findings at every instruction that it should have ordered, and a wrong size at every store
that uses it. Findings of one severity in one kernel, whatever its template arguments, have the same cause if

- they are races on one buffer that share a source line with each other, directly or through others,
- they are of another rule and about the same named buffer,
- they are of the same rule at the same source lines, and about no named buffer,
- one is a read of memory that was never written, at a line that races on the same buffer.
"""

from __future__ import annotations

from collections.abc import Iterable

from kernelproof.emulator.state.mangled import plain_name
from kernelproof.emulator.state.participants import Participant
from kernelproof.emulator.state.reports import Report, by_cause, replace_count

_RACES = frozenset(("shared-race", "global-race", "memory-scope"))
# Findings that a race may cause: the write comes after the read.
_FOLLOWING = frozenset(("uninitialised-shared", "uninitialised-global"))

Key = tuple[object, ...]


def grouped(reports: Iterable[Report]) -> list[Report]:
    """One report per cause, errors first: the first race of the cause, or else its first finding. Its ``also`` has the
    others, and its counts include them."""
    causes = sorted(by_cause(reports), key=precedence)
    groups: list[list[Report]] = []
    group_of: dict[Key, list[Report]] = {}
    for report in causes:
        own, links = keys(report)
        # The groups that a key of this report belongs to. They have one cause, so they become one group.
        linked: list[list[Report]] = []
        for key in (*own, *links):
            group = group_of.get(key)
            if group is not None and not any(group is other for other in linked):
                linked.append(group)
        group = linked[0] if linked else []
        if not linked:
            groups.append(group)
        group.append(report)
        for other in linked[1:]:
            group += other
            groups = [kept_group for kept_group in groups if kept_group is not other]
            group_of.update((key, group) for key, owner in group_of.items() if owner is other)
        group_of.update((key, group) for key in own)
    return sorted(map(_representative, groups), key=lambda report: report.order)


def precedence(report: Report) -> tuple[bool, int]:
    """The sort key of findings of one cause, of which the first is shown: races first, then the earliest finding."""
    return report.kind not in _RACES, report.serial


def keys(report: Report) -> tuple[list[Key], list[Key]]:
    """The keys that a finding shares with others of its cause; and the keys of races that may have caused it. By the
    latter the finding joins a race that was already found; they let no other finding join this one."""
    place = report.place
    buffer = place.buffer if place is not None else ""
    base = (report.severity, plain_name(report.kernel), buffer)
    lines = [_line(side) for side in (report.access, report.other) if side is not None and side.site.line]
    races: list[Key] = [("race", *base, line) for line in lines]
    if report.kind in _RACES and races:
        return races, []
    if buffer:
        own: Key = (report.kind, *base)
    else:
        own = (report.kind, *base, *(lines or (report.message,)))
    return [own], races if report.kind in _FOLLOWING else []


def _line(side: Participant) -> tuple[str, int]:
    """The user's source line of a participant; without ``-lineinfo``, the PTX line."""
    home = side.site.home
    return (home.file, home.line) if home is not None else ("", side.site.line)


def _representative(group: list[Report]) -> Report:
    """The report that is shown for a group of findings."""
    first, *others = sorted(group, key=precedence)
    counts = (sum(report.count for report in group), sum(report.instructions for report in group))
    out = replace_count(first, *counts)
    out.also = others
    return out
