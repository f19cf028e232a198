"""Draws the main loop over time, with a lane for each warp of a scheduler and one for each pipe that is busy."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from kernelproof.profile import figures
from kernelproof.profile.figures import Profile

LANE, GAP, TOP, LEFT = 22, 6, 26, 92  # pixels: height of a lane, gap between lanes, space above them and for names
WIDTH, MIN_SCALE, MAX_SCALE = 1080, 1.0, 8.0  # width to fill, in pixels; least and most pixels per cycle
RIGHT, LABEL = 8, 60  # pixels: space to the right of the lanes, and least distance of two labels of the time axis
# Possible distances of two labels of the time axis, in cycles.
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


class Lane(NamedTuple):
    """The lane of a warp or a pipe: its name, and the middle of its height in pixels."""

    name: str
    middle: float


class Mark(NamedTuple):
    """All spans of one stall reason, or of one pipe (``pipe-NAME``), as one SVG path."""

    kind: str
    path: str


class Picture(NamedTuple):
    """What the page draws, in pixels. ``scale``: pixels per cycle. ``kinds``: the stall reasons, for the legend."""

    width: float
    height: float
    scale: float
    lanes: tuple[Lane, ...]
    ticks: tuple[tuple[float, str], ...]
    marks: tuple[Mark, ...]
    kinds: tuple[str, ...]


def picture(profile: Profile) -> Picture:
    """Draws a profile's issues, from the first to the last. Waits before the first issue are cut off."""
    issues = profile.issues
    start = min((issue.cycle for issue in issues), default=0.0)
    end = max((issue.cycle + 1 for issue in issues), default=1.0)
    scale = min(MAX_SCALE, max(MIN_SCALE, WIDTH / (end - start)))
    # Lanes are stacked from the top: first the warps, then the pipes. Time runs to the right, ``scale`` pixels per
    # cycle.
    warps = sorted({issue.warp for issue in issues})
    names = [*(f"warp {warp}" for warp in warps), *profile.busy]
    tops = {name: TOP + at * (LANE + GAP) for at, name in enumerate(names)}
    spans: dict[str, list[tuple[float, float, float]]] = defaultdict(list)  # kind -> top of the lane, first cycle, end
    for issue in issues:
        for kind, left, right in figures.spans(issue.cycle, issue.stalls):
            if right > start:
                spans[kind].append((tops[f"warp {issue.warp}"], max(left, start), right))
    for pipe, busy in profile.busy.items():
        inside = ((max(left, start), min(right, end)) for left, right in busy)
        spans[f"pipe-{pipe}"] += [(tops[pipe], left, right) for left, right in inside if left < right]
    marks = [
        Mark(kind, "".join(_bar(top, (left - start) * scale, (right - left) * scale) for top, left, right in bars))
        for kind, bars in spans.items()
    ]
    height = TOP + len(names) * (LANE + GAP)
    spacing = next((tick for tick in TICKS if tick * scale >= LABEL), TICKS[-1])
    ticks = tuple((LEFT + cycle * scale, str(cycle)) for cycle in range(0, int(end - start) + 1, spacing))
    lanes = tuple(Lane(name, top + LANE / 2) for name, top in tops.items())
    kinds = tuple(kind for kind in sorted(spans) if not kind.startswith("pipe-"))
    return Picture(LEFT + (end - start) * scale + RIGHT, height, scale, lanes, ticks, tuple(marks), kinds)


def _bar(top: float, left: float, width: float) -> str:
    """A rectangle of an SVG path, in pixels. ``left`` counts from the start of the lanes."""
    return f"M{LEFT + left:.1f} {top:g}h{width:.1f}v{LANE}h-{width:.1f}z"
