"""Parses operands of machine code as nvdisasm prints them."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

# Such as -|R4|.H0_H0.reuse, !P0, -c[0x0][0x160], -0x1f, desc[UR4][R2.64+0x10], and a term in brackets: R2.64.
REGISTER = re.compile(r"([-~|]*)(U?R)(\d+|Z)\|?(\.64)?(?:\.reuse)?((?:\.\w+)*?)\|?(?:\.reuse)?$")
PREDICATE = re.compile(r"(!?)(U?P)(\d+|T)$")
CONSTANT = re.compile(r"([-~|]*)cx?\[(0x[0-9a-f]+)\]\[([^\]]+)\]((?:\.\w+)*)\|?$")
INTEGER = re.compile(r"-?(?:0x[0-9a-f]+|\d+)$")
# ``desc[..]`` names the descriptor of global memory, which does not change the address.
ADDRESS = re.compile(r"(?:desc\[UR\d+\])?\[(?P<inside>[^\]]*)\]$")
TERM = re.compile(r"(U?R)(\d+|Z)((?:\.\w+)*)$")
NAMED_FLOATS = {"INF": "7f800000", "QNAN": "7fffffff", "SNAN": "7f8fffff"}


class Register(NamedTuple):
    """A register of the files R and UR. ``number``: None for the zero register. ``signs``: the operators before it
    (``-``, ``~``, and ``|`` for the absolute value), the outermost first. ``wide``: it names a pair of registers.
    ``parts``: its modifiers, such as ``H0_H0``."""

    file: str
    number: int | None
    signs: str = ""
    wide: bool = False
    parts: tuple[str, ...] = ()


class Predicate(NamedTuple):
    """A predicate of the files P and UP. ``number`` is None for the true predicate."""

    file: str
    number: int | None
    negated: bool = False


class Constant(NamedTuple):
    """A word of a constant bank, at a byte offset. ``base``: the register that is added to the offset, if any.
    ``signs``, ``parts``: operators and modifiers as of a ``Register``."""

    bank: int
    offset: int
    signs: str = ""
    base: Register | None = None
    parts: tuple[str, ...] = ()


class Literal(NamedTuple):
    """A number as it was printed. Its type depends on the instruction."""

    text: str

    @property
    def integer(self) -> int | None:
        """Its value, if it was printed as an integer."""
        return int(self.text, 0) if INTEGER.match(self.text) else None

    @property
    def single(self) -> int:
        """Its bits in single precision. nvdisasm prints enough digits for them."""
        sign, name = (0x80000000, self.text[1:]) if self.text[0] == "-" else (0, self.text.removeprefix("+"))
        if name in NAMED_FLOATS:
            return sign | int(NAMED_FLOATS[name], 16)
        if name.startswith("0x"):
            return int(self.text, 0) & 0xFFFFFFFF
        return int(struct.unpack("<I", struct.pack("<f", float(self.text)))[0])

    @property
    def half(self) -> int:
        """Its bits in half precision."""
        sign, name = (0x8000, self.text[1:]) if self.text[0] == "-" else (0, self.text.removeprefix("+"))
        if name in NAMED_FLOATS:
            # The exponents of both formats are all ones; a half has 13 bits less of the mantissa.
            return sign | int(NAMED_FLOATS[name], 16) >> 13 & 0x7FFF
        return int(struct.unpack("<H", struct.pack("<e", float(self.text)))[0])


class Address(NamedTuple):
    """An address: the sum of registers, the uniform ones last, and of an offset in bytes.

    ``scale``: the factor of the first register. ``wide``: an address of 64 bits, so that the first register is a pair.
    """

    registers: tuple[Register, ...]
    offset: int
    wide: bool
    scale: int = 1


class Name(NamedTuple):
    """Anything else: a special register, a scoreboard, a label."""

    text: str


Operand = Register | Predicate | Constant | Literal | Address | Name


def operand(text: str) -> Operand:
    """Parse an operand."""
    if match := REGISTER.match(text):
        signs, file, number, wide, parts = match.groups()
        return Register(file, _number(number), signs, wide is not None, _parts(parts))
    if match := PREDICATE.match(text):
        return Predicate(match[2], _number(match[3]), match[1] == "!")
    if match := CONSTANT.match(text):
        return _constant(match)
    if match := ADDRESS.match(text):
        return _address(match["inside"])
    if INTEGER.match(text) or re.match(r"[-+]?(\d|INF$|QNAN$|SNAN$)", text):
        return Literal(text)
    return Name(text)


def _number(text: str) -> int | None:
    """The number of a register; None for the zero register or the true predicate."""
    return int(text) if text.isdigit() else None


def _parts(text: str) -> tuple[str, ...]:
    """The modifiers in a text such as ``.H0_H0``."""
    return tuple(part for part in text.split(".") if part)


def _constant(match: re.Match[str]) -> Constant:
    """The operand of a match of CONSTANT."""
    signs, bank, inside, parts = match.groups()
    base, offset = None, 0
    for term in inside.split("+"):
        if found := TERM.match(term.strip()):
            base = Register(found[1], _number(found[2]))
        else:
            offset += int(term, 0)
    return Constant(int(bank, 16), offset, signs, base, _parts(parts))


def _address(inside: str) -> Address:
    """The address with this text in its brackets."""
    registers, offset, wide, scale = [], 0, False, 1
    for term in filter(None, inside.split("+")):
        if found := TERM.match(term):
            parts = _parts(found[3])
            wide = wide or "64" in parts
            scale = next((int(part[1:]) for part in parts if re.match(r"X\d+$", part)), scale)
            registers.append(Register(found[1], _number(found[2]), wide="64" in parts))
        else:
            offset += int(term, 0)
    return Address(tuple(registers), offset, wide, scale)
