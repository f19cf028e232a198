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


def _encoding(text: str, at: int) -> tuple[list[str], int]:
    """The names of an encoding, the outermost first, and where its parameters begin."""
    if text[at : at + 1] == "Z":
        outer, at = _encoding(text, at + 1)
        inner = _last_local(text, at)
        return [*outer, inner] if inner else outer, len(text)
    nested = text[at : at + 1] == "N"
    at += nested
    while text[at : at + 1] in ("K", "V", "r", "L") and nested:
        at += 1
    names: list[str] = []
    while at < len(text):
        if text[at] == "L" and text[at + 1 : at + 2].isdigit():
            at += 1
        name, after = _source_name(text, at)
        if name:
            names.append(name)
            at = after
        elif nested and text[at] == "I":
            at = _skip_arguments(text, at)
        elif nested and text[at] == "S":
            at = text.find("_", at) + 1 if text[at + 1 : at + 2] not in ("t", "s") else at + 2
        else:
            break
        if not nested:
            break
    return [name for name in names if not name.startswith("_GLOBAL__N_") and not name.startswith("_INTERNAL_")], at


def _source_name(text: str, at: int) -> tuple[str, int]:
    """A name that follows its length, and where it ends; "" if there is none."""
    length = _LENGTH.match(text, at)
    if length is None:
        return "", at
    end = length.end() + int(length[0])
    return (text[length.end() : end], end) if end <= len(text) else ("", at)


def _skip_arguments(text: str, at: int) -> int:
    """The end of template arguments that begin at ``at``."""
    depth = 0
    while at < len(text):
        name, after = _source_name(text, at)
        if name:
            at = after
            continue
        if text[at] == "L":
            at = text.find("E", at + 1) + 1 or len(text)
            continue
        depth += text[at] in "INXJ"
        depth -= text[at] == "E"
        at += 1
        if depth == 0:
            return at
    return at


def _last_local(text: str, at: int) -> str:
    """The name of a function's local variable or lambda, which follows the function's name; "" if there is none."""
    for end in (m.end() for m in re.finditer("E", text[at:])):
        name, after = _source_name(text, at + end)
        # Behind the name may come a discriminator: _ and a number.
        if name and re.fullmatch(r"(?:_\d+_?|__\d+_)?", text[after:]):
            return name
        if text.startswith(("NKUl", "NUl", "Ul"), at + end):
            return "lambda"
    return ""
