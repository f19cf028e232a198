"""Includes of an untrusted text, which may only be those of the compiler and its libraries."""

from __future__ import annotations

import re

# It matches in one way only, so that no text takes long.
_COMMENT = r"(?:\s|/\*[^*]*\*+(?:[^/*][^*]*\*+)*/)*"
# Directives within comments and strings match too, because the author of the text decides where those end.
_INCLUDE = re.compile(rf"(?:^|\*/){_COMMENT}(?:#|%:|\?\?=){_COMMENT}(?:include|include_next|import|embed)\b(.*)$", re.M)
_ALLOWED = re.compile(rf"{_COMMENT}(?:<(?!/)(?!.*\.\.)[\w./+-]+>|\"(?!/)(?!.*\.\.)[\w./+-]+\")")
# Tests whether a file exists, directly or by a macro of a header or of the text. Testing whether the name itself is
# defined as a macro is allowed.
_TEST = rf"(?:\bdefined{_COMMENT}(?:\({_COMMENT})?|(?:#|%:|\?\?=){_COMMENT}ifn?def\b{_COMMENT})"
_QUESTION = re.compile(rf"({_TEST})?\b\w*(?i:has_(?:include|embed))\w*{_COMMENT}(?=(.*))")
_NEWLINE = re.compile(r"\r\n|[\r\v\f]")
_SPLICE = re.compile(r"(?:\\|\?\?/)[ \t]*\n")


def outside(source: str) -> list[str]:
    """Lines that include a file by an absolute path, a path upwards or a macro, or that ask whether a file exists."""
    joined = _SPLICE.sub("", _NEWLINE.sub("\n", source.removeprefix("\ufeff")))
    included = [match[0].strip() for match in _INCLUDE.finditer(joined) if not _ALLOWED.match(match[1])]
    names = [match for match in _QUESTION.finditer(joined) if not match[1]]
    questions = [match for match in names if not (match[2].startswith("(") and _ALLOWED.match(match[2], 1))]
    return included + [f"{match[0]}{match[2]}".strip() for match in questions]
