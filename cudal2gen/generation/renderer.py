"""Renders a record to CUDA source. The only Jinja environment for kernels is here."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from jinja2 import Environment, FileSystemBytecodeCache, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket

from cudal2gen import places
from cudal2gen.kernel import Record


def _cxx(value: Any) -> str | int:
    """The value if it is text or an integer; Jinja would print others in Python's spelling. Raises TypeError."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TypeError(f"{value!r} has no C++ spelling: a template may print text and integers only")
    return value


class _Syntax(TypedDict):
    """How Jinja reads a template."""

    trim_blocks: bool
    lstrip_blocks: bool
    keep_trailing_newline: bool
    autoescape: bool


SYNTAX = _Syntax(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)


class _CompiledTemplates(FileSystemBytecodeCache):
    """Templates compiled to Python, in the user's cache; compiling them takes half of a cold start.

    Jinja compares the source of a template with the cached one. The syntax is covered by the folder's name.
    """

    def __init__(self) -> None:
        syntax = hashlib.sha256(repr(SYNTAX).encode()).hexdigest()[:16]
        super().__init__(str(places.user_cache() / "templates" / syntax), "%s")

    def load_bytecode(self, bucket: Bucket) -> None:
        """Loads a template if the cache can be read."""
        with suppress(OSError):
            super().load_bytecode(bucket)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Stores a template. If the cache cannot be written, the next process compiles it again."""
        with suppress(OSError):
            Path(self.directory).mkdir(parents=True, exist_ok=True)
            super().dump_bytecode(bucket)


@cache
def _environment(folder: Path | None) -> Environment:
    """An environment with a family's own folder of templates, if it has one, before the project's."""
    folders = [places.shipped("templates")] if folder is None else [folder, places.shipped("templates")]
    return Environment(
        loader=FileSystemLoader(folders),
        undefined=StrictUndefined,
        finalize=_cxx,
        bytecode_cache=_CompiledTemplates(),
        **SYNTAX,
    )


def render(record: Record) -> str:
    """The complete CUDA source of the record's kernel. Records with equal code fields give the same bytes.

    Raises jinja2.UndefinedError or TypeError only if a template has a fault; a legal record is never the cause.
    """
    text = _environment(record.TEMPLATES).get_template(f"{record.family}.cu.j2").render(r=record)
    # Removes the empty lines that macros without output leave.
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text))
