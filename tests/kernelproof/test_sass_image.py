"""Proves that the data of a cubin is what a writer of ELF files put into it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from kernelproof.sass.image import Address, Symbol, _image, image

# Sections with bytes, and the one of variables that begin as zeros, which has none.
LOADED = (".nv.constant3", ".nv.constant4", ".nv.global.init", ".nv.constant2.first", ".text.first", ".text.second")
ZEROED = ".nv.global"
OBJECT, FUNCTION, ENTRY = 1, 2, 0x10
ADDRESS_TYPES = (2, 4)  # R_CUDA_64 and R_CUDA_G64


class Relocation(NamedTuple):
    """A relocation of a section: its place, its type, the symbol's number, and an addend, None without one."""

    section: str
    offset: int
    type: int
    symbol: int
    addend: int | None


def elf_bytes(contents: dict[str, bytes], symbols: list[Symbol], relocations: list[Relocation], kind: int) -> bytes:
    """A 64-bit ELF file of a kind (1: relocatable, 2: linked). Each table of relocations has one section."""
    names = ["", *contents, ZEROED, ".symtab", ".strtab", ".shstrtab"]
    strings, places = b"\0", {"": 0}
    for text in [*names, *(symbol.name for symbol in symbols)]:
        if text not in places:
            places[text], strings = len(strings), strings + text.encode() + b"\0"
    table = b"".join(
        struct.pack("<IBBHQQ", places[each.name], each.kind, ENTRY if each.is_kernel else 0, names.index(each.section),
                    each.offset, each.size)
        for each in symbols
    )  # fmt: skip
    # Name, type, bytes, size, link and info of each section.
    rows: list[tuple[str, int, bytes, int, int, int]] = [("", 0, b"", 0, 0, 0)]
    rows += [(name, 1, data, len(data), 0, 0) for name, data in contents.items()]
    rows += [(ZEROED, 8, b"", 64, 0, 0), (".symtab", 2, table, len(table), names.index(".strtab"), 0)]
    rows += [(name, 3, strings, len(strings), 0, 0) for name in (".strtab", ".shstrtab")]
    for section, has_addends in sorted({(each.section, each.addend is not None) for each in relocations}):
        own = [each for each in relocations if (each.section, each.addend is not None) == (section, has_addends)]
        data = b"".join(
            struct.pack("<QQ", each.offset, each.symbol << 32 | each.type)
            + (struct.pack("<q", each.addend) if each.addend is not None else b"")
            for each in own
        )
        name = f".rela{section}" if has_addends else f".rel{section}"
        places[name], strings = len(strings), strings + name.encode() + b"\0"
        rows.append((name, 4 if has_addends else 9, data, len(data), names.index(".symtab"), names.index(section)))
    # The names of tables were added last, so the tables of strings are written with all of them.
    rows = [(name, type_, strings if type_ == 3 else data, len(strings) if type_ == 3 else size, link, info)
            for name, type_, data, size, link, info in rows]  # fmt: skip
    body, headers = b"", b""
    for name, type_, data, size, link, info in rows:
        headers += struct.pack("<IIQQQQIIQQ", places[name], type_, 0, 0, 64 + len(body), size, link, info, 1, 0)
        body += data
    head = struct.pack(
        "<4s12xHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01"[:4], kind, 190, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64,
        len(rows), names.index(".shstrtab"),
    )  # fmt: skip
    return b"\x7fELF\x02\x01\x01" + head[7:] + body + headers


CONTENTS = st.fixed_dictionaries({name: st.binary(max_size=40) for name in LOADED})
SYMBOLS = st.lists(
    st.builds(
        Symbol,
        name=st.sampled_from(("a", "b", "first", "second", "lengthy")),
        section=st.sampled_from((*LOADED, ZEROED)),
        offset=st.sampled_from((0, 8, 128)),
        size=st.integers(0, 64),
        kind=st.sampled_from((0, OBJECT, FUNCTION, 3)),
        is_kernel=st.booleans(),
    ),
    min_size=1,
    max_size=6,
)
RELOCATIONS = st.lists(
    st.tuples(
        st.sampled_from((".nv.constant4", ".nv.global.init", ".nv.constant3", ".text.first")), st.integers(0, 4),
        st.sampled_from((1, *ADDRESS_TYPES, 57)), st.integers(0, 5), st.none() | st.integers(-64, 64),
    ),
    max_size=6, unique_by=lambda each: each[:2],
)  # fmt: skip


@settings(max_examples=60)
@given(CONTENTS, SYMBOLS, RELOCATIONS, st.sampled_from((1, 2)))
def test_data_is_read_as_it_was_written(
    contents: dict[str, bytes], symbols: list[Symbol], drawn: list[tuple[str, int, int, int, int | None]], kind: int
) -> None:
    relocations = [
        Relocation(name, 8 * at, type_, number % len(symbols), addend) for name, at, type_, number, addend in drawn
    ]
    found = _image(elf_bytes(contents, symbols, relocations, kind))
    assert found.relocatable == (kind == 1)
    assert list(found.symbols) == [symbol for symbol in symbols if symbol.kind in (OBJECT, FUNCTION)]
    assert found.kernels() == [symbol.name for symbol in found.symbols if symbol.is_kernel]
    for section in (*LOADED, ZEROED):
        own = [symbol for symbol in symbols if symbol.section == section]
        assert list(found.variables(section)) == [symbol for symbol in own if symbol.kind == OBJECT]
        if section.startswith(".text."):
            others = [symbol for symbol in own if symbol.kind == FUNCTION and symbol.offset]
            assert found.functions(section.removeprefix(".text.")) == others
    assert found.constants == contents[".nv.constant3"]
    assert found.literals == {"first": contents[".nv.constant2.first"]}
    assert found.contents == {name: contents[name] for name in (".nv.global.init", ".nv.constant4")}
    stated = {(section, at): address for section, own in found.addresses.items() for at, address in own.items()}
    # A section has one table, with addends or without; of two tables the last one in the file counts.
    tables = {(each.section, each.addend is not None) for each in relocations}
    counted = [each for each in relocations if (each.section, True) not in tables or each.addend is not None]
    assert stated == {
        (each.section, each.offset): Address(symbols[each.symbol].name, each.addend or 0)
        for each in counted if each.type in ADDRESS_TYPES and not each.section.startswith(".text")
    }  # fmt: skip


def test_a_file_on_disk_is_read(tmp_path: Path) -> None:
    contents = dict.fromkeys(LOADED, b"x")
    symbol = Symbol("first", ".text.first", 0, 16, FUNCTION, is_kernel=True)
    path = tmp_path / "a.cubin"
    path.write_bytes(elf_bytes(contents, [symbol], [], 2))
    assert image(path).kernels() == ["first"]
