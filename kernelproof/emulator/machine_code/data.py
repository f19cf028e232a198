"""Finds the data to which machine code refers: constant banks besides bank 0, variables of the module, and functions.

Bank 2 has a kernel's literals, bank 3 the module's constants, and bank 4 addresses of variables. Code that reads a bank
at an offset in a register needs the bank as one variable, so each bank has one; the module's ``__constant__`` variables
are ranges of the variable of bank 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kernelproof.emulator.frontend.ptx import Variable
from kernelproof.sass.image import BANK_4, CONSTANTS, GLOBALS, ZEROED, Image

LITERALS, MODULE_CONSTANTS, ADDRESSES = 2, 3, 4  # numbers of banks
_BANK_3_VARIABLE, _BANK_4_VARIABLE = "$constant_bank_3", "$constant_bank_4"


class Word(NamedTuple):
    """Four bytes of a variable, at an offset in bytes, whose value is read at run time."""

    variable: str
    offset: int


class Half(NamedTuple):
    """The upper or lower four bytes of a variable's address plus an addend."""

    variable: str
    addend: int
    upper: bool


@dataclass(frozen=True)
class Data:
    """The data to which the code of a kernel refers. ``image``: the cubin's data."""

    image: Image
    kernel: str

    def word(self, bank: int, offset: int) -> int | Word | Half | None:
        """The four bytes at an offset of a bank: a literal, a word of a variable, or half of an address. None if they
        are not known."""
        if bank == LITERALS:
            data = self.image.literals.get(self.kernel, b"")
            return int.from_bytes(data[offset : offset + 4], "little") if 0 <= offset <= len(data) - 4 else None
        if bank == MODULE_CONSTANTS:
            return Word(_BANK_3_VARIABLE, offset) if 0 <= offset <= len(self.image.constants) - 4 else None
        if bank == ADDRESSES:
            address = self.image.addresses.get(BANK_4, {}).get(offset & ~7)
            return Half(address.symbol, address.addend, bool(offset & 4)) if address else None
        return None

    def variable(self, bank: int) -> str | None:
        """The name of the variable with a bank's bytes, for an access by an index; None if the bank is empty."""
        if bank == LITERALS and self.image.literals.get(self.kernel):
            return f"$constant_bank_2${self.kernel}"
        if bank == ADDRESSES and self.image.contents.get(BANK_4):
            return _BANK_4_VARIABLE
        return _BANK_3_VARIABLE if bank == MODULE_CONSTANTS and self.image.constants else None

    @property
    def literals(self) -> list[Variable]:
        """The variable of bank 2, if the kernel has literals."""
        data = self.image.literals.get(self.kernel)
        return [Variable(f"$constant_bank_2${self.kernel}", "const", len(data), 16, data)] if data else []

    def system_functions(self) -> set[str]:
        """The names of functions that the module calls and does not define, such as vprintf."""
        defined = {symbol.name for symbol in self.image.symbols if symbol.section}
        return {address.symbol for address in self.image.addresses.get(BANK_4, {}).values()} - defined

    def functions(self) -> list[int]:
        """The addresses of the functions after the kernel, to which an indirect call may lead."""
        return [symbol.offset for symbol in self.image.functions(self.kernel)]


def variables(image: Image) -> Iterator[Variable]:
    """The variables of a module, which the host can look up by name."""
    if image.constants:
        pointers = _pointers(image, CONSTANTS, 0, len(image.constants))
        yield Variable(_BANK_3_VARIABLE, "const", len(image.constants), 256, image.constants, pointers)
        for item in image.variables(CONSTANTS):
            yield Variable(item.name, "const", item.size, 16, within=(_BANK_3_VARIABLE, item.offset))
    if table := image.contents.get(BANK_4):
        yield Variable(_BANK_4_VARIABLE, "const", len(table), 256, table, _pointers(image, BANK_4, 0, len(table)))
    content = image.contents.get(GLOBALS, b"")
    for item in image.variables(GLOBALS):
        initial = content[item.offset : item.offset + item.size]
        pointers = _pointers(image, GLOBALS, item.offset, item.size)
        yield Variable(item.name, "global", item.size, 256, initial, pointers)
    for item in image.variables(ZEROED):
        yield Variable(item.name, "global", item.size, 256)


def _pointers(image: Image, section: str, start: int, size: int) -> tuple[tuple[int, str, int], ...]:
    """The addresses in a range of a section that are filled in at load time: offset in the range, symbol and addend."""
    addresses = image.addresses.get(section, {})
    return tuple(
        (offset - start, address.symbol, address.addend)
        for offset, address in addresses.items()
        if start <= offset < start + size
    )
