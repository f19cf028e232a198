"""Reads the names that a programmer wrote from the mangled names of PTX (Itanium C++ ABI)."""

from __future__ import annotations

import re

_LENGTH = re.compile(r"\d+")
_STATIC = re.compile(r"__nv_static_(\d+)_")


def without_file(name: str) -> str:
    """The mangled name without the prefix that nvcc gives to static names in relocatable device code: the length of the
    file's name, and that name. Other names are returned as they are."""
    prefix = _STATIC.match(name)
    return name[prefix.end() + int(prefix[1]) + 1 :] if prefix is not None else name


def plain_name(mangled: str) -> str:
    """The innermost part of a mangled name: a function's name without parameters, or a variable's without its function.
    A name that is not mangled, or whose form is not read here, is returned unchanged."""
    mangled = without_file(mangled)
    if not mangled.startswith("_Z"):
        return mangled
    names, _ = _encoding(mangled, 2)
    return names[-1] if names else mangled


def _encoding(text: str, offset: int) -> tuple[list[str], int]:
    """The names of an encoding that begins at ``offset``, the outermost first, and where its parameters begin."""
    if text[offset : offset + 1] == "Z":
        outer, offset = _encoding(text, offset + 1)
        inner = _last_local(text, offset)
        return [*outer, inner] if inner else outer, len(text)
    # N .. E is a nested name. In it, I .. E are template arguments, S .. are substitutions, and K, V and r qualifiers.
    nested = text[offset : offset + 1] == "N"
    offset += nested
    while text[offset : offset + 1] in ("K", "V", "r", "L") and nested:
        offset += 1
    names: list[str] = []
    while offset < len(text):
        if text[offset] == "L" and text[offset + 1 : offset + 2].isdigit():
            offset += 1
        name, after = _source_name(text, offset)
        if name:
            names.append(name)
            offset = after
        elif nested and text[offset] == "I":
            offset = _skip_arguments(text, offset)
        elif nested and text[offset] == "S":
            offset = text.find("_", offset) + 1 if text[offset + 1 : offset + 2] not in ("t", "s") else offset + 2
        else:
            break
        if not nested:
            break
    return [name for name in names if not name.startswith("_GLOBAL__N_") and not name.startswith("_INTERNAL_")], offset


def _source_name(text: str, offset: int) -> tuple[str, int]:
    """A name that follows its length, and where it ends; "" if there is none."""
    length = _LENGTH.match(text, offset)
    if length is None:
        return "", offset
    end = length.end() + int(length[0])
    return (text[length.end() : end], end) if end <= len(text) else ("", offset)


def _skip_arguments(text: str, offset: int) -> int:
    """The end of template arguments that begin at ``offset``."""
    depth = 0
    while offset < len(text):
        name, after = _source_name(text, offset)
        if name:
            offset = after
            continue
        if text[offset] == "L":
            offset = text.find("E", offset + 1) + 1 or len(text)
            continue
        depth += text[offset] in "INXJ"
        depth -= text[offset] == "E"
        offset += 1
        if depth == 0:
            return offset
    return offset


def _last_local(text: str, offset: int) -> str:
    """The name of a function's local variable or lambda, which follows the function's name; "" if there is none."""
    for end in (m.end() for m in re.finditer("E", text[offset:])):
        name, after = _source_name(text, offset + end)
        # A discriminator may follow the name: _ and a number.
        if name and re.fullmatch(r"(?:_\d+_?|__\d+_)?", text[after:]):
            return name
        if text.startswith(("NKUl", "NUl", "Ul"), offset + end):
            return "lambda"
    return ""
