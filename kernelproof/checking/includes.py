"""Finds includes in an untrusted text that could reveal files of this machine.

A compiler's message may quote a file that the text includes, and ``__has_include`` reveals whether a file exists. So
only headers of the compiler and its libraries may be included. The text is read by regular expressions, not by a
compiler, and each doubtful case counts as an include.
"""

from __future__ import annotations

import re

# A comment or white space. The expression can match a text in one way only, so no text makes it backtrack for long.
_COMMENT = r"(?:\s|/\*[^*]*\*+(?:[^/*][^*]*\*+)*/)*"
# Directives inside comments and strings match too, because a hostile text can make their ends hard to recognise.
_INCLUDE = re.compile(rf"(?:^|\*/){_COMMENT}(?:#|%:|\?\?=){_COMMENT}(?:include|include_next|import|embed)\b(.*)$", re.M)
# The name of a header, in brackets or quotes: no absolute path, and none that leads upwards.
_ALLOWED = re.compile(rf"{_COMMENT}(?:<(?!/)(?!.*\.\.)[\w./+-]+>|\"(?!/)(?!.*\.\.)[\w./+-]+\")")
# Expressions that ask whether a file exists, directly or through a macro. Asking whether ``__has_include`` itself is
# defined is allowed.
_DEFINED_TEST = rf"(?:\bdefined{_COMMENT}(?:\({_COMMENT})?|(?:#|%:|\?\?=){_COMMENT}ifn?def\b{_COMMENT})"
_EXISTENCE_QUERY = re.compile(rf"({_DEFINED_TEST})?\b\w*(?i:has_(?:include|embed))\w*{_COMMENT}(?=(.*))")
# Other ends of lines than \n, and a backslash (or its trigraph) that joins a line with the next.
_NEWLINE = re.compile(r"\r\n|[\r\v\f]")
_SPLICE = re.compile(r"(?:\\|\?\?/)[ \t]*\n")


def joined_lines(source: str) -> str:
    """The text after a compiler's first steps: lines that end with a backslash are joined with the next."""
    return _SPLICE.sub("", _NEWLINE.sub("\n", source.removeprefix("\ufeff")))


def revealing_lines(source: str) -> list[str]:
    """The lines that include a file by an absolute path, by a path upwards or by a macro, or ask whether it exists.

    Lines that end with a backslash are joined first, as a compiler does, since they could split a directive.
    """
    joined = joined_lines(source)
    included = [match[0].strip() for match in _INCLUDE.finditer(joined) if not _ALLOWED.match(match[1])]
    names = [match for match in _EXISTENCE_QUERY.finditer(joined) if not match[1]]
    questions = [match for match in names if not (match[2].startswith("(") and _ALLOWED.match(match[2], 1))]
    return included + [f"{match[0]}{match[2]}".strip() for match in questions]
