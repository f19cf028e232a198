"""Writes the sections of a report as one self-contained HTML file, or as Markdown with the same words and tables.

Markdown has neither charts nor pictures. An HTML page is made from a template that imports ``page/parts.html.j2`` of
this folder, and contains its style.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent  # has the folder ``page`` with the templates that all pages use
STYLE = FOLDER / "page" / "style.css"  # the style of every page


class Table(NamedTuple):
    """A table of text cells. The first column names the row; ``caption`` names figures, problems and conditions."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Chart(NamedTuple):
    """A picture that the script of the page draws (``html``).

    ``kind``: the name of the script's function that draws it, such as "roofline". ``data``: what this function reads,
    which is passed as JSON. ``text`` describes the picture in words.
    """

    kind: str
    title: str
    text: str
    data: dict[str, Any]


class Section(NamedTuple):
    """A part of a report.

    ``anchor``: the id of its HTML element. ``alerts``: warnings, which are shown before the tables. ``notes``:
    sentences below the tables and pictures. ``pictures``: SVG elements, which need no script.
    """

    anchor: str
    title: str
    paragraphs: tuple[str, ...] = ()
    alerts: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    pictures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def html(folder: Path, template: str, *, styles: Sequence[str] = (), script: str | None = None, **values: Any) -> str:
    """Renders a page from a template in a folder.

    ``styles`` and ``script`` name files in the folder whose contents are embedded, after the style of all pages.
    ``values`` are escaped, except for those that the template marks as safe.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader([folder, FOLDER]), undefined=StrictUndefined, autoescape=True)
    style = "".join(path.read_text() for path in (STYLE, *(folder / name for name in styles)))
    if script is not None:
        values["script"] = (folder / script).read_text()
    return environment.get_template(template).render(style=style, **values)


def without_script(title: str, sections: Sequence[Section]) -> str:
    """Renders a page with the sections' paragraphs, tables and pictures only: it leaves out charts, alerts and
    notes."""
    return html(FOLDER, "page/sections.html.j2", title=title, sections=sections)


def embedded(data: Any) -> str:
    """JSON for a script element. No character in it can end the element or open another one."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def markdown(title: str, sections: Sequence[Section]) -> str:
    """Returns the title and the sections as Markdown, which leaves out charts and pictures."""
    blocks = [f"# {_escaped(title)}"]
    for section in sections:
        blocks.append(f"## {_escaped(section.title)}")
        blocks += [_escaped(text) for text in section.paragraphs]
        blocks += [f"> **Note.** {_escaped(text)}" for text in section.alerts]
        blocks += [_table(table) for table in section.tables]
        blocks += [_escaped(text) for text in section.notes]
    return "\n\n".join(blocks) + "\n"


def _table(table: Table) -> str:
    """A table as Markdown, with its caption above it."""
    columns, *rows = ([_escaped(cell) for cell in row] for row in (table.columns, *table.rows))
    return f"**{_escaped(table.caption)}**\n\n{grid(columns, rows)}"


def grid(columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> str:
    """A Markdown table, without a final line break. The cells are Markdown themselves.

    ``left``: how many columns hold words, which are aligned to the left; the others hold numbers.
    """
    rule = ["---"] * left + ["---:"] * (len(columns) - left)
    lines = [f"| {' | '.join(map(str, row))} |" for row in (columns, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])


def _escaped(text: str) -> str:
    """The text on one line, with escapes: no character in it can open a cell, a tag or a link."""
    flat = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"([\\`*_\[\]<>|#&])", r"\\\1", flat)


def ratio_text(value: float) -> str:
    """The text of a ratio such as a speedup: 1.250; a dash for NaN."""
    return "—" if math.isnan(value) else f"{value:.3f}"


def percent(share: float) -> str:
    """The text of a share from 0 to 1, such as 44.0 %; a dash for NaN."""
    return "—" if math.isnan(share) else f"{100 * share:.1f} %"


def microseconds(value: float) -> str:
    """The text of a time in microseconds, with four significant digits."""
    return f"{value:.4g}" if value < 10000 else f"{value:.0f}"


def counted(number: float, noun: str) -> str:
    """A number with a noun in the singular or plural: 1 launch, 2 launches."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number if isinstance(number, int) else format(number, 'g')} {noun}{plural}"


def spread(values: Sequence[float]) -> str:
    """The range of some readings, from the smallest to the largest."""
    if not values:
        return "not read"
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
