"""Record to CUDA source: the one Jinja environment."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cudal2gen import places
from cudal2gen.kernel import Record


def _cxx(value: Any) -> str | int:
    """The value, if it is text or an integer: everything else prints as Python, not as C++. Raises TypeError."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TypeError(f"{value!r} has no C++ spelling: a template may print text and integers only")
    return value


@cache
def _environment(folder: Path | None) -> Environment:
    """Templates of the project, behind those of a family's own folder."""
    folders = [places.shipped("templates")] if folder is None else [folder, places.shipped("templates")]
    return Environment(
        loader=FileSystemLoader(folders),
        undefined=StrictUndefined,
        finalize=_cxx,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(record: Record) -> str:
    """The kernel's complete CuTe source; equal code fields give the same bytes.

    Raises jinja2.UndefinedError or TypeError for a fault in a template, never for a legal record.
    """
    text = _environment(record.TEMPLATES).get_template(f"{record.family}.cu.j2").render(r=record)
    # A macro without output leaves an empty line.
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text))
