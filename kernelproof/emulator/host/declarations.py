"""Reads the parameters and shared variables of a kernel from CUDA source text, to name them in reports.

This is no parser of C++. Declarations that its patterns do not recognise are left out.
"""

from __future__ import annotations

import ast
import operator
import re
import stat
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

# Bytes of an element, by type.
ELEMENT_BYTES = {
    "char": 1, "signed char": 1, "unsigned char": 1, "int8_t": 1, "uint8_t": 1, "bool": 1, "uchar": 1,
    "__nv_fp8_e4m3": 1, "__nv_fp8_e5m2": 1,
    "short": 2, "unsigned short": 2, "int16_t": 2, "uint16_t": 2, "half": 2, "__half": 2, "__nv_bfloat16": 2,
    "nv_bfloat16": 2, "bfloat16": 2,
    "int": 4, "unsigned": 4, "unsigned int": 4, "uint": 4, "int32_t": 4, "uint32_t": 4, "float": 4, "half2": 4,
    "__half2": 4, "__nv_bfloat162": 4, "nv_bfloat162": 4,
    "long long": 8, "unsigned long long": 8, "long": 8, "unsigned long": 8, "int64_t": 8, "uint64_t": 8, "size_t": 8,
    "double": 8, "float2": 8, "int2": 8, "uint2": 8, "float4": 16, "int4": 16, "uint4": 16, "double2": 16,
}  # fmt: skip
MAX_SOURCE = 1 << 24  # bytes
MAX_DEFINITIONS = 8  # most constants, each defined by the next, that an extent may lead through
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_ALIGNMENT = re.compile(r"\b(?:alignas|__align__)\s*\([^()]*\)")
_QUALIFIERS = re.compile(
    r"\b(?:const|volatile|static|extern|__shared__|__restrict__|__restrict|restrict|__grid_constant__|typename"
    r"|std::|cuda::)"
)
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}


class Declaration(NamedTuple):
    """A name, the type of its elements ("" if it was not understood), and its extents (None: not a number)."""

    name: str
    element: str
    extents: tuple[int | None, ...] = ()

    @property
    def element_bytes(self) -> int:
        """Bytes of an element, 0 if the type is not known."""
        return ELEMENT_BYTES.get(self.element, 0)


def source_text(path: str) -> str:
    """The text of a source file without comments and alignment specifiers.

    It is "" if the file does not exist, is no regular file or exceeds ``MAX_SOURCE``: the path comes from the PTX,
    which is not trusted.
    """
    try:
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_SOURCE:
            return ""
        return _source_version(path, status.st_mtime_ns)
    except (OSError, ValueError):
        return ""


@lru_cache(maxsize=32)
def _source_version(path: str, modified_ns: int) -> str:
    """The text of a version of a file, as ``source_text`` gives it. The time is only part of the cache's key."""
    del modified_ns
    return _ALIGNMENT.sub(" ", _COMMENT.sub(" ", Path(path).read_text(errors="replace")))


def parameters(text: str, kernel: str, count: int) -> list[Declaration]:
    """The parameters of a kernel; an empty list if no definition with ``count`` parameters is recognised."""
    for m in re.finditer(rf"__global__[^;{{}}]*?\b{re.escape(kernel)}\s*\(", text):
        items = [_parameter(item) for item in _split(text, m.end())]
        if len(items) == count:
            return items
    return []


def shared_variable(text: str, name: str, nbytes: int) -> Declaration | None:
    """The declaration of a shared variable; None if none is recognised.

    ``nbytes``: its size (0: the launch sets it). If exactly one extent is not a number in the text, it follows from the
    size.
    """
    m = re.search(rf"__shared__\s+([^;(){{}}]*?)\b{re.escape(name)}\b\s*((?:\[[^\]]*\]\s*)*)", text)
    if m is None:
        return None
    words = m[1]
    if "[" in words:
        # Another variable of the same declaration comes first, so the last word is its name, not part of the type.
        words = " ".join(words.split("[")[0].split()[:-1])
    element = _element(words)
    extents = [_number(text, extent) for extent in re.findall(r"\[([^\]]*)\]", m[2])]
    unit = ELEMENT_BYTES.get(element, 0)
    if nbytes and unit and extents.count(None) == 1:
        product = 1
        for extent in extents:
            product *= extent or 1
        extents[extents.index(None)] = nbytes // unit // product or None
    return Declaration(name, element, tuple(extents))


def _split(text: str, begin: int) -> list[str]:
    """The items of a comma-separated list in parentheses, whose opening parenthesis is just before offset ``begin``. If
    it is not closed, the last item is left out."""
    depth, start = 0, begin
    items: list[str] = []
    for i in range(begin, len(text)):
        char = text[i]
        if char == ")" and depth == 0:
            return [*items, text[start:i]] if text[start:i].strip() else items
        depth += (char in "(<[{") - (char in ")>]}")
        if char == "," and depth == 0:
            items.append(text[start:i])
            start = i + 1
    return items


def _parameter(item: str) -> Declaration:
    """The declaration of a parameter; its name is "" if it was not understood."""
    item = item.split("=", maxsplit=1)[0]
    m = re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)*$", item)
    if m is None:
        return Declaration("", "")
    return Declaration(m[1], _element(item[: m.start()]))


def _element(declaration: str) -> str:
    """The type of the elements of a pointer or an array."""
    return " ".join(_QUALIFIERS.sub(" ", declaration).replace("*", " ").replace("&", " ").split())


def _number(text: str, expression: str) -> int | None:
    """The value of an extent's expression of integers and constants that the text defines; None for others."""
    try:
        return _value(text, ast.parse(expression.strip(), mode="eval").body, MAX_DEFINITIONS)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _value(text: str, node: ast.expr, depth: int) -> int:
    """The value of a node. ``depth``: how many definitions of constants it may lead through. Raises ValueError."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return int(_OPERATIONS[type(node.op)](_value(text, node.left, depth), _value(text, node.right, depth)))
    if isinstance(node, ast.Name) and depth:
        m = re.search(rf"#define\s+{node.id}\s+(.+)|\bconst(?:expr)?\s[^;=()]*\b{node.id}\s*=\s*([^;,]+)", text)
        if m is not None:
            return _value(text, ast.parse((m[1] or m[2]).strip(), mode="eval").body, depth - 1)
    raise ValueError(ast.dump(node))
