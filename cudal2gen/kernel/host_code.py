"""Finds host code in a CUDA text. The text of a kernel must have none.

Host code is never compiled or run here, but somebody who reads the text, or a model that learns from it, could take it
for harmless. The search follows scopes but not types: outside of bodies, every function, and every declaration with
parentheses, must be device code or ``constexpr``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

_TOKEN = re.compile(r"[A-Za-z_]\w*|[{}();:=<>~]|->|::")
_DIRECTIVE = re.compile(r"^[ \t]*#[^\n]*", re.M)
_HOST_FUNCTIONS = re.compile(
    r"\b(?:system|popen|exec[lv]\w*|v?fork|posix_spawn\w*|dlopen|dlsym|syscall|fopen|freopen|ofstream|ifstream|fstream|"
    r"socket|unlink|getenv|setenv|putenv|mmap)\b"
)
_DEVICE_QUALIFIERS = frozenset(
    ("__device__", "__global__", "CUTE_DEVICE", "CUTLASS_DEVICE", "CUTE_HOST_DEVICE", "CUTLASS_HOST_DEVICE")
)
_QUALIFIER_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+[^\n]*\b(?:__device__|__global__)", re.M)
_CONSTANT_QUALIFIERS = frozenset(("constexpr", "consteval", "static_assert"))
# Words other than device qualifiers that permit a declaration with parentheses: it is constant, or declares no code.
_HARMLESS_WORDS = _CONSTANT_QUALIFIERS | {"__shared__", "__constant__", "using", "typedef", "default", "delete"}
_CLASS_KEYWORDS = frozenset(("struct", "class", "union"))


def findings(bare: str) -> Iterator[tuple[int, str]]:
    """Yields the offset of each piece of host code, and what is wrong with it.

    ``bare``: the text with blanks in place of comments and strings.
    """
    for match in _HOST_FUNCTIONS.finditer(bare):
        yield match.start(), f"{match[0]} is a function of the host"
    yield from _Scopes(_DEVICE_QUALIFIERS | set(_QUALIFIER_MACRO.findall(bare))).read(
        _DIRECTIVE.sub(lambda match: " " * len(match[0]), bare)
    )


class _Scopes:
    """Reads tokens with a stack of scopes, one per open brace.

    Declarations are collected in the scopes ``outer`` and ``class``. ``code`` is a device body or an initialiser,
    ``constant`` a constexpr body. ``device``: the qualifiers of device code, including macros that the text defines.
    """

    def __init__(self, device: frozenset[str]) -> None:
        self._device = device
        self._stack = ["outer"]
        self._head: list[str] = []  # tokens of the declaration so far
        self._start = 0
        self._depth = 0  # open parentheses of this declaration

    def read(self, text: str) -> Iterator[tuple[int, str]]:
        """Yields offset and fault of each piece of host code."""
        for match in _TOKEN.finditer(text):
            token, place = match[0], match.start()
            if self._stack[-1] in ("code", "constant"):
                if self._stack[-1] == "constant" and token == "asm":
                    yield place, "asm in a function of the host: write __device__"
                self._skip_body(token)
            elif token == "{":
                yield from self._open_brace(place)
            elif token in (";", "}") and not self._depth:
                yield from self._end_declaration(token)
            elif token == ":" and self._head in (["public"], ["private"], ["protected"]):
                self._head = []
            else:
                if not self._head:
                    self._start = place
                self._depth += (token == "(") - (token == ")")
                self._head.append(token)

    def _skip_body(self, token: str) -> None:
        """Follows the braces of a body or initialiser, whose other tokens do not matter."""
        if token == "{":
            self._stack.append(self._stack[-1])
        elif token == "}":
            self._stack.pop()
            if self._head:
                self._head.append(token)  # the brace ended an initialiser, and its declaration continues

    def _open_brace(self, place: int) -> Iterator[tuple[int, str]]:
        """Handles a brace after a declaration's head. It opens a scope or a body, which ends the head, or an
        initialiser, after which the same declaration goes on."""
        head = _without_template(self._head)
        is_code = "(" in head and not self._depth and "=" not in head
        # A constructor's list of initialised members, such as "Tile(int x) : x_{x}": this brace initialises a member.
        initializes_member = (")", ":") in itertools.pairwise(head) and head[-1] not in (")", "}")
        if self._depth or initializes_member or (not is_code and not _scope(head)):
            self._stack.append("code")  # an initialiser, or a brace in parentheses: skipped, and the head is kept
            return
        self._head = []
        if (scope := _scope(head)) and not (is_code and self._device & set(head)):
            self._stack.append(scope)
        elif self._device & set(head):
            self._stack.append("code")
        else:
            self._stack.append("constant")
            if not _CONSTANT_QUALIFIERS & set(head):
                yield place, "a function of the host: write __device__"

    def _end_declaration(self, token: str) -> Iterator[tuple[int, str]]:
        """Handles the semicolon or closing brace after a declaration, which must not be one of host code."""
        head, self._head = self._head, []
        # A member of a class with a default value, such as "int x = f(1);", is initialised by device code.
        member = self._stack[-1] == "class" and "=" in head[: head.index("(")] if "(" in head else False
        if "(" in head and not member and not (self._device | _HARMLESS_WORDS) & set(head):
            yield self._start, "a declaration of the host: write __device__, or constexpr"
        if token == "}" and len(self._stack) > 1:
            if head:
                yield self._start, "a declaration without its end"
            self._stack.pop()


def _scope(head: Sequence[str]) -> str:
    """The scope that a head opens: ``outer``, ``class``, ``code`` for enumerators, or "" for none."""
    if "namespace" in head or head == ["extern"]:
        return "outer"
    if "enum" in head:
        return "code"
    return "class" if _CLASS_KEYWORDS & set(head) else ""


def _without_template(head: Sequence[str]) -> list[str]:
    """A declaration's head without its template parameters, among which ``class`` and parentheses may stand."""
    if not head or head[0] != "template":
        return list(head)
    depth = 0
    for place, token in enumerate(head):
        depth += (token == "<") - (token == ">")
        if place and not depth:
            return _without_template(head[place + 1 :])
    return list(head)
