"""Reads the resources of kernels from a cubin's ELF file: registers, stack, static shared memory and threads.

ptxas stores them as numbered attributes in the sections ``.nv.info`` (of all functions) and ``.nv.info.<function>``.
The comments below name each number as nvdisasm prints it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kernelproof.ground.errors import WrongInput

REGISTERS, STACK, MAX_THREADS, THREADS = 0x2F, 0x11, 0x05, 0x10  # EIATTR_REGCOUNT, FRAME_SIZE, MAX_THREADS, REQNTID
WHOLE_STACK = 0x12  # EIATTR_MIN_STACK_SIZE
PARAMETER, PARAMETER_BANK = 0x17, 0x0A  # EIATTR_KPARAM_INFO, EIATTR_PARAM_CBANK
JUMPS = 0x34  # EIATTR_INDIRECT_BRANCH_TARGETS
NEW_ABI = 8  # the version of the ABI in the header of cubins of CUDA 13
CLUSTER = 0x3D  # EIATTR_CTA_PER_CLUSTER
SIZED = 4  # EIFMT_SVAL: the attribute states the length of its value; attributes of other formats have two bytes
SYMBOLS = 2  # SHT_SYMTAB
SYMBOL_BYTES = 24  # size of an entry of the symbol table
SECTION = "<IIQQQQIIQQ"  # the header of a section
# If a cubin has this section, the system reserves SYSTEM_BYTES of each CTA's shared memory, and the size of the
# function's own section of shared memory includes them.
RESERVED = ".nv.shared.reserved.0"
SYSTEM_BYTES = 1024
TOOLS = ".note.nv.tkinfo"  # the name, version and options of the assembler
VERSION = re.compile(rb"\0ptxas\0[^\0]*\bV(\d+(?:\.\d+)+)\0")


@dataclass(frozen=True)
class Resources:
    """The resources of one function.

    ``registers`` and ``stack_bytes``: per thread; ``whole_stack_bytes``: the stack including that of the functions that
    it calls. ``shared_bytes``: static shared memory per CTA. ``threads``: per CTA, as the source demands (``reqntid``)
    or else allows (``maxntid``); None if it states neither. ``parameters``: byte offset and size of each parameter of a
    kernel; ``parameter_base``: where parameters begin in constant bank 0. ``jumps``: the address of each jump by a
    table, and the addresses to which it may lead. ``cluster``: the CTAs of a cluster along each axis, if the source
    demands clusters.
    """

    registers: int = 0
    stack_bytes: int = 0
    whole_stack_bytes: int = 0
    shared_bytes: int = 0
    threads: int | None = None
    parameters: tuple[tuple[int, int], ...] = ()
    parameter_base: int | None = None
    jumps: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    cluster: tuple[int, ...] | None = None


class Section(NamedTuple):
    """The header of a section, with its fields in the order of the file, and its name."""

    name_at: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry: int
    name: str

    def data(self, file: bytes) -> bytes:
        """The bytes of the section in its file."""
        return file[self.offset : self.offset + self.size]


def resources(cubin: Path) -> dict[str, Resources]:
    """The resources of each function of a cubin, by name. Raises WrongInput if it is no 64-bit ELF file."""
    file = cubin.read_bytes()
    if not is_elf(file):
        raise WrongInput(f"{cubin}: is no 64-bit ELF file; give a cubin of CUDA 11 or later")
    headers = sections(file)
    by_name = {section.name: section for section in headers}
    names = _symbols(file, headers)
    counts: dict[int, dict[int, int]] = {REGISTERS: {}, STACK: {}, WHOLE_STACK: {}}
    if info := by_name.get(".nv.info"):
        for attribute, value in _attributes(info.data(file)):
            if attribute in counts and len(value) >= 8:
                symbol, count = struct.unpack_from("<II", value)
                counts[attribute][symbol] = count
    result = {}
    for symbol, registers in counts[REGISTERS].items():
        name = names.get(symbol, "")
        shared = by_name.get(f".nv.shared.{name}")
        own = by_name.get(f".nv.info.{name}")
        result[name] = Resources(
            registers=registers,
            stack_bytes=counts[STACK].get(symbol, 0),
            whole_stack_bytes=max(counts[STACK].get(symbol, 0), counts[WHOLE_STACK].get(symbol, 0)),
            shared_bytes=max(0, shared.size - (SYSTEM_BYTES if RESERVED in by_name else 0)) if shared else 0,
            threads=_threads(own.data(file)) if own else None,
            parameters=_parameters(own.data(file)) if own else (),
            parameter_base=_parameter_base(own.data(file)) if own else None,
            jumps=dict(_jumps(own.data(file))) if own else {},
            cluster=_cluster(own.data(file)) if own else None,
        )
    return result


def assembler(file: bytes) -> str:
    """The version of ptxas that made a cubin, such as 13.0.88; empty if the cubin does not say."""
    notes = b"".join(section.data(file) for section in sections(file) if section.name == TOOLS)
    version = VERSION.search(notes)
    return version.group(1).decode() if version else ""


def capability(file: bytes) -> int:
    """The compute capability of a cubin, such as 80; 0 if the file is no cubin."""
    if not is_elf(file) or len(file) < 0x40:
        return 0
    (flags,) = struct.unpack_from("<I", file, 0x30)  # e_flags; byte 8 of the header is the version of the ABI
    # The lowest byte of the flags has the capability in cubins of CUDA 12, and the second byte in those of CUDA 13.
    return int(flags >> 8 & 0xFF if file[8] >= NEW_ABI else flags & 0xFF)


def is_elf(file: bytes) -> bool:
    """Whether a file is a 64-bit ELF file."""
    return file[:5] == b"\x7fELF\x02"


def sections(file: bytes) -> list[Section]:
    """The sections of a 64-bit ELF file. Their positions in the list are their numbers in the file.

    Raises struct.error if the file ends before its table of sections does.
    """
    # From the ELF header: the offset of the table (e_shoff), the size and the number of its entries (e_shentsize,
    # e_shnum), and the number of the section with the names (e_shstrndx).
    (table,) = struct.unpack_from("<Q", file, 0x28)
    size, count, names = struct.unpack_from("<HHH", file, 0x3A)
    rows = [struct.unpack_from(SECTION, file, table + size * index) for index in range(count)]
    strings = rows[names][4] if rows else 0  # the offset of the section that has the names of all sections
    return [Section._make((*row, string(file, strings + row[0]))) for row in rows]


def _symbols(file: bytes, headers: list[Section]) -> dict[int, str]:
    """The names of the symbols, by number."""
    names: dict[int, str] = {}
    for section in headers:
        if section.kind == SYMBOLS:
            strings = headers[section.link].offset
            for index in range(section.size // SYMBOL_BYTES):
                (name,) = struct.unpack_from("<I", file, section.offset + SYMBOL_BYTES * index)
                names[index] = string(file, strings + name)
    return names


def string(file: bytes, start: int) -> str:
    """The zero-terminated text that begins at byte ``start`` of a file."""
    return file[start : file.index(b"\0", start)].decode()


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The number and the value of each attribute of format ``SIZED`` in a section."""
    at = 0
    while at + 4 <= len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        # The value of another format is in the two bytes of ``size`` itself.
        if kind == SIZED:
            yield attribute, data[at : at + size]
            at += size


def _threads(data: bytes) -> int | None:
    """Threads per CTA: those that the source demands, or else allows."""
    sizes = {key: value for key, value in _attributes(data) if key in (THREADS, MAX_THREADS) and len(value) >= 12}
    value = sizes.get(THREADS) or sizes.get(MAX_THREADS)
    if value is None:
        return None
    x, y, z = struct.unpack_from("<III", value)
    return int(x * y * z)


def _parameters(data: bytes) -> tuple[tuple[int, int], ...]:
    """The byte offset and size of each parameter. Each has an attribute with its number, its offset, and its size in
    the upper 14 bits of the last word."""
    found = [struct.unpack_from("<4xHHI", value) for key, value in _attributes(data) if key == PARAMETER]
    return tuple((offset, word >> 18) for _, offset, word in sorted(found))


def _jumps(data: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The address and the targets of each jump by a table. The attribute has for each of them its address, a zero, the
    number of targets, and the targets, as 32-bit words."""
    for key, value in _attributes(data):
        words = struct.unpack(f"<{len(value) // 4}I", value) if key == JUMPS else ()
        at = 0
        while at + 3 <= len(words):
            address, _, count = words[at : at + 3]
            yield address, tuple(dict.fromkeys(words[at + 3 : at + 3 + count]))
            at += 3 + count


def _parameter_base(data: bytes) -> int | None:
    """The byte offset of a kernel's parameters in constant bank 0."""
    return next(
        (struct.unpack_from("<4xH", value)[0] for key, value in _attributes(data) if key == PARAMETER_BANK), None
    )


def _cluster(data: bytes) -> tuple[int, ...] | None:
    """The CTAs of a cluster along each axis; None if the source demands no clusters."""
    return next((struct.unpack_from("<III", value) for key, value in _attributes(data) if key == CLUSTER), None)
