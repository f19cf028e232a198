"""Formats findings and kernels as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import PurePosixPath

from kernelproof.checking.findings import KernelLaunches, frames, local
from kernelproof.checking.names import plain
from kernelproof.emulator import Report
from kernelproof.emulator.state.sites import Frame
from kernelproof.ground.pages import counted

LONGEST_LIST = 8  # most grids listed for a kernel, and most places for a cause


def finding(item: Report) -> str:
    """A finding in full: what is wrong, where, in which threads, the other access of a race, and what to do."""
    lines = frames(item)
    at = [f" in {plain(item.kernel)}"] if item.kernel else []
    at += [f" at {local(lines[0]).file}:{lines[0].line}"] if lines else []
    place = f": {item.place}" if item.place is not None else ""
    out = [f"{item.severity}: {item.kind}{''.join(at)}: {item.message}{place}"]
    out += [f"    by way of {way}" for way in _inlined_places(lines[1:])]
    if item.access.cta is not None:
        out.append(f"    {item.access.who}")
    if item.line:
        out.append(f"    {item.access.site.place}: {' '.join(item.text.split())}")
    if item.other is not None:
        site = item.other.site
        home = local(site.home) if site.home else None
        where = f"at {home.file}:{home.line}" if home else f"at {site.place}" if site.line else ""
        out.append(f"    the other side: {' '.join(filter(None, (item.other.who, where)))}")
        if site.machine_code:
            out.append(f"    {site.place}: {site.text}")
    out.append(f"    hint: {item.hint}")
    return "\n".join(out) + "\n"


def others(item: Report) -> str:
    """A line with the other findings of the same cause: where they are, and how many."""
    places: dict[str, int] = {}
    for other in item.also:
        at = f"{other.kind} at {_sides(other)}" if other.kind != item.kind else _sides(other)
        places[at] = places.get(at, 0) + other.count
    listed = [f"{at}{f' {times(count)}' if count > 1 else ''}" for at, count in places.items()]
    more = f", {len(listed) - LONGEST_LIST} more" if len(listed) > LONGEST_LIST else ""
    return f"{item.kind} at {_sides(item)}: the same mistake also shows at {', '.join(listed[:LONGEST_LIST])}{more}"


def _sides(item: Report) -> str:
    """The source line of a finding; for a race, the lines of both accesses."""
    sides = [item.access.site, *([item.other.site] if item.other is not None and item.other.site.line else [])]
    homes = [site.home for site in sides]
    names = [
        f"{PurePosixPath(home.file).name}:{home.line}" if home else site.place
        for home, site in zip(homes, sides, strict=True)
    ]
    return " and ".join(dict.fromkeys(names))


def _inlined_places(lines: Sequence[Frame]) -> Iterator[str]:
    """The source lines by which a finding is reached. Lines of the program are given in full; consecutive lines of
    library headers are joined and shortened to ``file:line``."""
    for is_library, group in groupby(lines, lambda frame: frame.is_library):
        if is_library:
            yield " > ".join(f"{PurePosixPath(frame.file).name}:{frame.line}" for frame in group)
        else:
            yield from (str(local(frame)) for frame in group)


def times(count: int) -> str:
    """How often something was found, in words."""
    return "once" if count == 1 else f"{count} times"


def kernel_lines(name: str, kernel: KernelLaunches, findings: list[Report]) -> list[str]:
    """The lines of a kernel in the summary."""
    grids = [f"{spelled}{f' x{count}' if count > 1 else ''}" for spelled, count in kernel.grids.items()]
    more = f", {len(grids) - LONGEST_LIST} more" if len(grids) > LONGEST_LIST else ""
    counts: dict[str, int] = {}
    for item in sorted(findings, key=lambda item: item.order):
        rule = f"{item.severity} {item.kind}"
        counts[rule] = counts.get(rule, 0) + item.count
    outcome = ", ".join(f"{rule} {times(count)}" for rule, count in counts.items()) or "no findings"
    repetitions = f", {counted(kernel.repetitions, 'repetition')} on the same data" if kernel.repetitions else ""
    head = f"{name}: {counted(kernel.launches, 'launch')} in {kernel.seconds:.2f} s{repetitions}; {outcome}"
    lines = [head, f"    grid {', '.join(grids[:LONGEST_LIST])}{more}"]
    if kernel.counters:
        lines.append("    " + ", ".join(f"{name} {value}" for name, value in kernel.counters.items()))
    return lines
