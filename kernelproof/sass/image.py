"""Reads a cubin's data: its constant banks, the variables of its module, and where its functions begin.

Constant bank 2 has a function's literals, bank 3 the module's ``__constant__`` variables, and bank 4 the addresses of
variables, which the loader writes. The comments below name relocations as nvdisasm prints them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kernelproof.ground.errors import WrongInput
from kernelproof.sass.elf import SYMBOL_BYTES, SYMBOLS, Section, sections, string

FILE_KIND = 16  # where the file's header has its kind
RELOCATABLE = 1  # ET_REL, the kind of a file: an object that was never linked
NO_BYTES = 8  # SHT_NOBITS: a section without bytes in the file
RELOCATIONS, WITH_ADDENDS = 9, 4  # SHT_REL, SHT_RELA: entries of 16 bytes, and of 24 bytes with an addend
OBJECT, FUNCTION = 1, 2  # STT_OBJECT, STT_FUNC: the type of a symbol
ENTRY = 0x10  # STO_CUDA_ENTRY: this function is a kernel
ADDRESSES = frozenset((2, 4))  # R_CUDA_64 and R_CUDA_G64: the address of a symbol, 8 bytes
LITERALS = ".nv.constant2."
BANK_4 = ".nv.constant4"
CONSTANTS, GLOBALS, ZEROED = ".nv.constant3", ".nv.global.init", ".nv.global"


class Symbol(NamedTuple):
    """A variable or function: its section, its offset and size in that section in bytes, its type (``kind``, ``OBJECT``
    or ``FUNCTION``), and whether it is a kernel."""

    name: str
    section: str
    offset: int
    size: int
    kind: int
    is_kernel: bool


class Address(NamedTuple):
    """The address of a symbol, plus an addend."""

    symbol: str
    addend: int


@dataclass(frozen=True)
class Image:
    """The data of a cubin.

    ``literals``: bank 2 of each function. ``constants``: bank 3. ``addresses``: the addresses that the loader writes
    into bank 4 and into initialised variables, by section and byte offset. ``contents``: the bytes of bank 4 and of the
    initialised variables, by section. ``relocatable``: whether the cubin was never linked.
    """

    symbols: Sequence[Symbol] = ()
    literals: Mapping[str, bytes] = field(default_factory=dict)
    constants: bytes = b""
    addresses: Mapping[str, Mapping[int, Address]] = field(default_factory=dict)
    contents: Mapping[str, bytes] = field(default_factory=dict)
    relocatable: bool = False

    def variables(self, section: str) -> Iterator[Symbol]:
        """The variables of a section."""
        return (symbol for symbol in self.symbols if symbol.section == section and symbol.kind == OBJECT)

    def functions(self, kernel: str) -> list[Symbol]:
        """The functions that lie after a kernel in its section."""
        section = f".text.{kernel}"
        return [item for item in self.symbols if item.section == section and item.kind == FUNCTION and item.offset]

    def kernels(self) -> list[str]:
        """The names of the kernels."""
        return [symbol.name for symbol in self.symbols if symbol.is_kernel]


def image(cubin: Path) -> Image:
    """The data of a cubin. Raises WrongInput if its tables contradict each other."""
    file = cubin.read_bytes()
    try:
        return _image(file)
    except (struct.error, IndexError, ValueError, UnicodeDecodeError) as error:
        raise WrongInput(f"{cubin}: is damaged: its tables of sections and symbols contradict each other") from error


def _image(file: bytes) -> Image:
    """The data of a cubin, from its sections, symbols and relocations."""
    headers = sections(file)
    symbols = list(_symbols(file, headers))
    by_name = {section.name: section.data(file) for section in headers if section.kind != NO_BYTES}
    banks = {name: data for name, data in by_name.items() if name.startswith(".nv.constant")}
    (kind,) = struct.unpack_from("<H", file, FILE_KIND)
    return Image(
        [symbol for symbol in symbols if symbol.kind in (OBJECT, FUNCTION)],
        {name.removeprefix(LITERALS): data for name, data in banks.items() if name.startswith(LITERALS)},
        banks.get(CONSTANTS, b""),
        {headers[table.info].name: dict(_addresses(file, table, symbols)) for table in headers if _relocates(table)},
        {name: by_name[name] for name in (GLOBALS, BANK_4) if name in by_name},
        kind == RELOCATABLE,
    )  # fmt: skip


def _relocates(section: Section) -> bool:
    """Whether a section lists addresses that the loader writes into data (and not into code)."""
    tables = [f"{kind}{data}" for kind in (".rel", ".rela") for data in (BANK_4, GLOBALS, CONSTANTS)]
    return section.kind in (RELOCATIONS, WITH_ADDENDS) and section.name in tables


def _symbols(file: bytes, headers: Sequence[Section]) -> Iterator[Symbol]:
    """All symbols, by number."""
    for table in headers:
        if table.kind != SYMBOLS:
            continue
        strings = headers[table.link].offset
        for at in range(table.offset, table.offset + table.size, SYMBOL_BYTES):
            name, info, other, index, offset, size = struct.unpack_from("<IBBHQQ", file, at)
            section = headers[index].name if index < len(headers) else ""
            yield Symbol(string(file, strings + name), section, offset, size, info & 15, bool(other & ENTRY))


def _addresses(file: bytes, table: Section, symbols: Sequence[Symbol]) -> Iterator[tuple[int, Address]]:
    """The addresses that a table of relocations writes, each with its byte offset in the section that it changes."""
    size = 24 if table.kind == WITH_ADDENDS else 16
    for at in range(table.offset, table.offset + table.size, size):
        offset, info = struct.unpack_from("<QQ", file, at)
        (addend,) = struct.unpack_from("<q", file, at + 16) if size == 24 else (0,)
        if info & 0xFFFFFFFF in ADDRESSES:
            yield offset, Address(symbols[info >> 32].name, addend)
