"""Draws learning curves as SVG that needs no other file and no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 420, 64, 40, 150, 44  # in pixels: the picture, and the plot's margins
COLOURS = (
    "#1b6ca8",
    "#d1495b",
    "#2e8b57",
    "#8a5fbf",
    "#c77d18",
    "#4d4d4d",
    "#00868b",
    "#a0522d",
    "#6b8e23",
    "#b03a7a",
    "#0b0b0b",
    "#e377c2",
)


class Curve(NamedTuple):
    """Points (evaluations, value). ``bounds``: the interval (low, high) of each value, or empty."""

    name: str
    points: Sequence[tuple[float, float]]
    bounds: Sequence[tuple[float, float]] = ()


def svg(title: str, x_label: str, y_label: str, curves: Sequence[Curve], logarithmic: bool = False) -> str:
    """A picture of curves whose horizontal axis is logarithmic. ``logarithmic``: the vertical axis is too; all values
    must then be above 0. Raises ValueError if no curve has a point."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        raise ValueError("no curve has a point; tune something first")
    highest = max([y for _, y in points] + [high for curve in curves for _, high in curve.bounds]) or 1.0
    lowest = min(y for _, y in points) if logarithmic else 0.0
    first, last = min(x for x, _ in points), max(x for x, _ in points)

    # The pixel coordinates of a value on each axis; y grows downwards in SVG.
    def at_x(x: float) -> float:
        span = math.log(last / first) or 1.0
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log(x / first) / span)

    def at_y(y: float) -> float:
        height = math.log(y / lowest) / (math.log(highest / lowest) or 1.0) if logarithmic else y / highest
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - height)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="12"><title>{escape(title)}</title>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>",
    ]
    # The axes: a line for each value of ``_lines``, and a label below each power of two and at both ends.
    for y in _lines(lowest, highest):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 6}" y="{at_y(y) + 4:.1f}" text-anchor="end">{y:.3g}</text>'
        )
    for x in sorted({x for x, _ in points if math.log2(x) % 1 == 0} | {first, last}):
        parts.append(f'<text x="{at_x(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        if curve.bounds:
            xs = [x for x, _ in curve.points]
            upper = [f"{at_x(x):.1f},{at_y(high):.1f}" for x, (_, high) in zip(xs, curve.bounds, strict=True)]
            lower = [f"{at_x(x):.1f},{at_y(low):.1f}" for x, (low, _) in zip(xs, curve.bounds, strict=True)]
            parts.append(f'<polygon points="{" ".join(upper + lower[::-1])}" fill="{colour}" opacity="0.15"/>')
        line = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in curve.points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        # The legend, in the right margin: a bar of the curve's colour and its name.
        legend_y = TOP + 18 * number
        parts.append(
            f'<rect x="{WIDTH - RIGHT + 12}" y="{legend_y - 1}" width="12" height="4" fill="{colour}"/>'
            f'<text x="{WIDTH - RIGHT + 30}" y="{legend_y + 5}">{escape(curve.name)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _lines(lowest: float, highest: float) -> list[float]:
    """The values of horizontal lines: at equal distances from 0, or, if ``lowest`` is above 0, at powers of two."""
    if lowest:
        powers = range(math.ceil(math.log2(lowest)), math.floor(math.log2(highest)) + 1)
        return [2.0**power for power in powers]
    spacing = _spacing(highest)
    return [spacing * step for step in range(int(highest / spacing) + 1)]


def _spacing(highest: float) -> float:
    """The distance of horizontal lines: 1, 2 or 5 times a power of ten, so that two to six of them fit."""
    unit = 10.0 ** math.floor(math.log10(highest))
    return next(step * unit for step in (0.2, 0.5, 1.0, 2.0) if highest / (step * unit) < 6)
