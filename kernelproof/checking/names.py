"""Converts mangled names of kernels to names as people write them: demangled, and short without being ambiguous."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache

from kernelproof.emulator.state.mangled import plain_name, without_file
from kernelproof.ground.errors import WrongInput


@cache
def _demangler() -> ctypes._NamedFuncPointer | None:
    """The function ``__cxa_demangle`` of libstdc++; None if the system has no such library."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    function = library.__cxa_demangle
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    return function


@cache
def demangled(name: str) -> str:
    """The C++ name of a mangled one, such as ``void add<float>(float*, int)``; other names are returned unchanged."""
    function, name = _demangler(), without_file(name)
    if function is None or not name.startswith("_Z"):
        return name
    status = ctypes.c_int(0)
    raw = function(name.encode(), None, None, ctypes.byref(status))
    if status.value or not raw:
        return name
    text = ctypes.string_at(raw).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(raw))
    return text


def qualified(name: str) -> str:
    """The demangled name without its return type and parameters: ``add<float>``."""
    text = demangled(name)
    depth, start, end = 0, 0, len(text)  # depth of brackets; the name without return type is text[start:end]
    for i, char in enumerate(text):
        if text.startswith("(anonymous namespace)", i) or char == "<" or (char == "(" and depth):
            depth += 1
        elif char == "(" and depth == 0:
            end = i
            break
        elif char in ">)":
            depth -= 1
        elif char == " " and depth == 0:
            start = i + 1
    return text[start:end] or text


def plain(name: str) -> str:
    """The name without scopes and template arguments: ``add``.

    It also works for names that libstdc++ cannot demangle. nvcc writes such names for kernels whose template arguments
    are CuTe's layouts and atoms.
    """
    text = qualified(name)
    if text.startswith("_Z"):
        return plain_name(text)
    return text.partition("<")[0].rpartition("::")[2] or text


def short_names(names: Iterable[str]) -> dict[str, str]:
    """For each mangled name, the shortest form that no other name has."""
    distinct = list(dict.fromkeys(names))
    forms: tuple[Callable[[str], str], ...] = (plain, qualified, demangled)
    counts = [Counter(form(name) for name in distinct) for form in forms]
    return {
        name: next((form(name) for form, count in zip(forms, counts, strict=True) if count[form(name)] == 1), name)
        for name in distinct
    }


def resolved(text: str, names: Iterable[str]) -> str:
    """The mangled name that a user means by ``text``. Raises WrongInput, with the possible names, if no name or several
    fit."""
    distinct = list(dict.fromkeys(names))
    if text in distinct:
        return text
    for form in (demangled, qualified, plain):
        matches = [name for name in distinct if form(name) == text]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise WrongInput(f"kernel {text} is ambiguous: {'; '.join(map(demangled, matches))}; write one in full")
    if not distinct:
        raise WrongInput(
            f"no kernel {text}: the file has none. A template's kernel is compiled only where code launches it, or by "
            "an explicit instantiation, such as: template __global__ void scale<float>(float *, int);"
        )
    raise WrongInput(f"no kernel {text}; there are {', '.join(short_names(distinct).values())}")


def fitted(names: dict[str, str], width: int) -> dict[str, str]:
    """Short names, in which one that is longer than ``width`` is replaced by its plain name and a number."""
    counts: Counter[str] = Counter()
    out = {}
    for name, short in names.items():
        if len(short) > width:
            counts[plain(name)] += 1
            short = f"{plain(name)}<...> #{counts[plain(name)]}"
        out[name] = short
    return out
