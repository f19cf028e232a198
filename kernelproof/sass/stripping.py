"""Removes from a cubin the source lines and the PTX text of -lineinfo, half of its bytes, which no launch reads.

Their sections become empty but remain in the file: sections and symbols keep their numbers, so references to them need
no change. All other bytes move towards the start by multiples of the largest alignment, so that sections remain aligned
and segments remain contiguous.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kernelproof.sass.elf import SECTION, Section, is_elf, sections

# Sections that relate machine code to lines of the source.
_LINES = ("debug_line", "nv_debug_line_sass", "nv_debug_ptx_txt")
# Prefixes of sections of code and of their relocations; cubins of sm_100 and later have code in a second form (merc).
_PREFIXES = (".", ".rel.", ".rela.", ".nv.merc.", ".nv.merc.rela.")
EMPTIED_SECTIONS = frozenset(f"{prefix}{name}" for prefix in _PREFIXES for name in _LINES)
_NO_BYTES = 8  # SHT_NOBITS: the section has no bytes in the file
_TABLES = 0x20  # where the file's header has the offsets of the segment table and of the section table
_SEGMENT_COUNT = 0x38  # where it has the number of segments
_SEGMENT_BYTES, _SECTION_BYTES = 56, 64  # size of the header of a segment, and of a section


class _Piece(NamedTuple):
    """Bytes of the file that move together: a section, the file's header, or a table of headers.

    ``number``: the number of the section; ``_pieces`` numbers the others. ``align``: in bytes.
    """

    number: int
    offset: int
    size: int
    align: int


def without_lines(cubin: bytes) -> bytes:
    """Returns the cubin with empty sections where their names are in ``EMPTIED_SECTIONS``.

    A file that is no cubin, or is not laid out as ptxas of CUDA 13 does it, is returned unchanged.
    """
    if not is_elf(cubin):
        return cubin
    headers = sections(cubin)
    emptied = {number for number, section in enumerate(headers) if section.name in EMPTIED_SECTIONS}
    pieces = _pieces(cubin, headers)
    new_offsets = _places(pieces, emptied)
    shifts = [_shift(segment, pieces, new_offsets, emptied) for segment in _segments(cubin)]
    if not _cover(cubin, pieces) or None in shifts:
        return cubin
    stripped = bytearray(max(new_offsets[piece.number] + piece.size for piece in pieces if piece.number not in emptied))
    for piece in pieces:
        if piece.number not in emptied:
            place = new_offsets[piece.number]
            stripped[place : place + piece.size] = cubin[piece.offset : piece.offset + piece.size]
    # The headers still have the old offsets and sizes. The offset in a segment's header is at byte 8.
    section_table, segment_table = (new_offsets[len(headers) + index] for index in range(2))
    struct.pack_into("<QQ", stripped, _TABLES, segment_table, section_table)
    for number, section in enumerate(headers[1:], 1):
        size = 0 if number in emptied else section.size
        header = section._replace(offset=new_offsets[number], size=size)[:-1]
        struct.pack_into(SECTION, stripped, section_table + _SECTION_BYTES * number, *header)
    for number, (segment, shift) in enumerate(zip(_segments(cubin), shifts, strict=True)):
        struct.pack_into("<Q", stripped, segment_table + _SEGMENT_BYTES * number + 8, segment.offset + (shift or 0))
    return bytes(stripped)


def _pieces(cubin: bytes, headers: Sequence[Section]) -> list[_Piece]:
    """The pieces of a cubin, in the order of the file.

    Number 0 is the file's header, then come the sections, the section table, and last the segment table.
    """
    segment_table, section_table = struct.unpack_from("<QQ", cubin, _TABLES)
    pieces = [_Piece(0, 0, _SECTION_BYTES, 1)]
    for number, section in enumerate(headers[1:], 1):
        size = 0 if section.kind == _NO_BYTES else section.size
        pieces.append(_Piece(number, section.offset, size, max(1, section.align)))
    pieces.append(_Piece(len(headers), section_table, _SECTION_BYTES * len(headers), 8))
    pieces.append(_Piece(len(headers) + 1, segment_table, _SEGMENT_BYTES * len(_segments(cubin)), 8))
    return sorted(pieces, key=lambda piece: (piece.offset, piece.number))


def _cover(cubin: bytes, pieces: Sequence[_Piece]) -> bool:
    """Whether the pieces are the entire cubin: only zeros lie between them, and no two overlap partially."""
    end = 0
    for offset, size in sorted({(piece.offset, piece.size) for piece in pieces if piece.size}):
        if offset < end or any(cubin[end:offset]):
            return False
        end = offset + size
    return end == len(cubin)


def _places(pieces: Sequence[_Piece], emptied: Collection[int]) -> dict[int, int]:
    """The new offset of each piece, by number, if the emptied ones have no bytes. Sections that share bytes still
    do."""
    places: dict[int, int] = {}
    shared: dict[tuple[int, int], int] = {}
    end, step = 0, max(piece.align for piece in pieces)
    for piece in pieces:
        size = 0 if piece.number in emptied else piece.size
        place = shared.get((piece.offset, size)) if size else None
        if place is None:
            # The offset keeps its remainder modulo `step`, so that every alignment still holds.
            place = end + (piece.offset - end) % step
            end = place + size
            shared[piece.offset, size] = place
        places[piece.number] = place
    return places


class _Segment(NamedTuple):
    """Bytes of the file that the driver loads together."""

    offset: int
    size: int


def _segments(cubin: bytes) -> list[_Segment]:
    """The segments of a cubin, from its segment table."""
    (table,) = struct.unpack_from("<Q", cubin, _TABLES)
    (count,) = struct.unpack_from("<H", cubin, _SEGMENT_COUNT)
    fields = (struct.unpack_from("<IIQQQQQQ", cubin, table + _SEGMENT_BYTES * index) for index in range(count))
    return [_Segment(offset, size) for _, _, offset, _, _, size, *_ in fields]


def _shift(
    segment: _Segment, pieces: Sequence[_Piece], places: Mapping[int, int], emptied: Collection[int]
) -> int | None:
    """By how many bytes a segment moves; None if its pieces would not move together."""
    end = segment.offset + segment.size
    within = [
        piece
        for piece in pieces
        if piece.number not in emptied and segment.offset <= piece.offset and piece.offset + piece.size <= end
    ]
    shifts = {places[piece.number] - piece.offset for piece in within}
    begins = any(piece.offset == segment.offset for piece in within)
    return shifts.pop() if len(shifts) == 1 and begins else None
