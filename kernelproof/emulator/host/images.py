"""Reads fat binaries: the PTX and machine code that nvcc embeds in a program, and that the program registers or loads.

The layout is that of CUDA 13's ``fatbinary``: a wrapper points to a header, and entries follow the header. The program
that contains an image is trusted, so sizes in the image are not checked.
"""

from __future__ import annotations

import ctypes
import struct
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kernelproof.emulator.frontend.linking import link
from kernelproof.emulator.frontend.ptx import LinkError
from kernelproof.emulator.host.cuda import INVALID_IMAGE, NO_IMAGE, LaunchRefused
from kernelproof.emulator.host.launch_limits import runs
from kernelproof.emulator.host.program import Program, load
from kernelproof.emulator.host.standin import standin
from kernelproof.emulator.state.options import Device
from kernelproof.ground.errors import WrongInput

ELF = b"\x7fELF"  # how a cubin begins
# Magic numbers of the wrapper and the header; the kind of entries with PTX; flags of compressed entries.
_WRAPPER, _HEADER = 0x466243B1, 0xBA55ED50
_PTX = 1
_LZ4, _ZSTD = 0x2000, 0x8000
# The libraries that decompress entries, if the system has them.
_LIBRARIES = {_LZ4: "liblz4.so.1", _ZSTD: "libzstd.so.1"}


@dataclass(frozen=True)
class ImageEntry:
    """An entry of a fat binary: PTX or machine code for compute capability ``sm`` (80 for 8.0). ``content``: its bytes,
    empty if this system cannot decompress them."""

    ptx: bool
    sm: int
    content: bytes

    @property
    def text(self) -> str:
        """The PTX, empty for machine code."""
        return self.content.rstrip(b"\0").decode() if self.ptx else ""


def entries(address: int) -> list[ImageEntry]:
    """The entries of a fat binary in memory, or of the wrapper that points to one. Raises LaunchRefused."""
    magic = int.from_bytes(ctypes.string_at(address, 4), "little")
    if magic == _WRAPPER:
        address = int.from_bytes(ctypes.string_at(address + 8, 8), "little")
        magic = int.from_bytes(ctypes.string_at(address, 4), "little")
    if magic != _HEADER:
        raise LaunchRefused(INVALID_IMAGE, "a registered image is no fat binary")
    # Header: magic (4 bytes), version (2), its own size (2), bytes of all entries (8).
    header, size = struct.unpack("<HQ", ctypes.string_at(address + 6, 10))
    entry_address, end = address + header, address + header + size
    parts = []
    while entry_address < end:
        # Entry: kind (2 bytes), version (2), size of its head (4), size of its payload (8), size of the compressed
        # content (4, at 16); at 28 the compute capability (4), at 40 flags (8), at 56 the size of the content (8).
        kind, _, head, payload = struct.unpack("<HHIQ", ctypes.string_at(entry_address, 16))
        sm = int.from_bytes(ctypes.string_at(entry_address + 28, 4), "little")
        flags = int.from_bytes(ctypes.string_at(entry_address + 40, 8), "little")
        compressed = flags & (_LZ4 | _ZSTD)
        raw = ctypes.string_at(entry_address + head, payload)
        if compressed:
            compressed_size, plain_size = struct.unpack("<I36xQ", ctypes.string_at(entry_address + 16, 48))
            raw = _decompressed(raw[:compressed_size], plain_size, compressed)
        parts.append(ImageEntry(kind == _PTX, sm, raw))
        entry_address += head + payload
    return parts


def _decompressed(raw: bytes, size: int, compression: int) -> bytes:
    """The decompressed content, ``size`` bytes; empty if the system lacks the library for this ``compression`` (_LZ4 or
    _ZSTD) or if decompression fails."""
    out = ctypes.create_string_buffer(size)
    try:
        library = ctypes.CDLL(_LIBRARIES[compression])
    except OSError:
        return b""
    if compression == _ZSTD:
        library.ZSTD_decompress.restype = ctypes.c_size_t
        written = library.ZSTD_decompress(out, ctypes.c_size_t(size), raw, ctypes.c_size_t(len(raw)))
    else:
        written = library.LZ4_decompress_safe(raw, out, len(raw), size)
    return out.raw if written == size else b""


def is_fat_binary(address: int) -> bool:
    """Does a fat binary, or a wrapper of one, lie at this address?"""
    return int.from_bytes(ctypes.string_at(address, 4), "little") in (_WRAPPER, _HEADER)


@lru_cache(maxsize=64)
def _parsed(text: str) -> Program:
    """The program of a PTX text; each text is parsed once."""
    return Program(text + "\n")


def cubin_at(address: int) -> bytes:
    """The bytes of a cubin in memory. An ELF header does not state the size: the tables of sections and of segments
    come last, so the cubin ends with the later one."""
    # The ELF header has the offsets of both tables at byte 0x20, and the bytes and numbers of their entries at 0x36.
    segments, sections = struct.unpack("<QQ", ctypes.string_at(address + 0x20, 16))
    segment_size, segment_count, section_size, section_count = struct.unpack("<4H", ctypes.string_at(address + 0x36, 8))
    end = max(segments + segment_size * segment_count, sections + section_size * section_count)
    return ctypes.string_at(address, end)


@lru_cache(maxsize=64)
def machine_program(content: bytes) -> Program:
    """The program of a cubin, whose machine code is executed. Raises LaunchRefused for content that is no cubin or has
    instructions that are not modelled."""
    try:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(content)
            file.flush()
            return load(Path(file.name))
    except WrongInput as error:
        raise LaunchRefused(INVALID_IMAGE, f"the machine code cannot be read: {error}") from None


@lru_cache(maxsize=16)
def _linked(programs: tuple[Program, ...]) -> Program:
    """The program that results from linking relocatable device code. Raises LaunchRefused if it cannot be linked."""
    try:
        return Program(link([program.module for program in programs]))
    except LinkError as error:
        raise LaunchRefused(NO_IMAGE, f"device code cannot be linked: {error}") from None


def program_of(address: int, device: Device, machine_code: bool = False) -> Program:
    """The program that a device loads from a fat binary. Raises LaunchRefused if no entry fits the device.

    It is the PTX with the newest target that the device can run. Machine code is chosen if there is no PTX, or if
    ``machine_code`` is true and some of it fits.
    """
    parts = entries(address)
    if machine_code or not any(part.ptx for part in parts):
        major, minor = device.capability
        cubins = [part for part in parts if not part.ptx and part.sm // 10 == major and part.sm % 10 <= minor]
        if cubins:
            return machine_program(max(cubins, key=lambda part: part.sm).content)
    texts = [part.text for part in parts if part.text]
    programs = [_parsed(text) for text in texts]
    usable = [program for program in programs if runs(program.module.target, device)]
    if usable:
        return max(usable, key=lambda program: _newness(program.module.target))
    if programs:
        targets = ", ".join(program.module.target for program in programs)
        raise LaunchRefused(
            NO_IMAGE, f"the program has PTX of {targets}, and the device is {sm_name(device)}; choose another one"
        )
    if any(part.ptx for part in parts):
        raise LaunchRefused(
            NO_IMAGE,
            f"the PTX in this program is compressed, and the system lacks {' or '.join(_LIBRARIES.values())}; compile "
            "it with nvcc --no-compress",
        )
    present = ", ".join(f"sm_{part.sm}" for part in parts) or "nothing"
    raise LaunchRefused(
        NO_IMAGE,
        f"the program has no PTX, only machine code ({present}), and the device is {sm_name(device)}; choose another "
        "one, or compile with -gencode arch=compute_80,code=compute_80",
    )


def _newness(target: str) -> tuple[int, int]:
    """A key that is greater for newer targets, and for more specific ones: sm_90, sm_100, sm_100f, sm_100a."""
    number, suffix = target.removeprefix("sm_").rstrip("af"), target[-1]
    return int(number) if number.isdigit() else 0, "fa".find(suffix)


def sm_name(device: Device) -> str:
    """The architecture of a device, such as sm_80."""
    return f"sm_{device.capability[0]}{device.capability[1]}"


def registered(image: int, device: Device, machine_code: bool = False) -> Program:
    """The program of the registered image of this number, linked with the images of its group. Raises LaunchRefused."""
    wrapper, group = _image(image)
    if wrapper is None:
        raise LaunchRefused(INVALID_IMAGE, f"image {image} was never registered")
    if not group:
        return program_of(wrapper, device, machine_code)
    images = (_image(number) for number in range(image_count()))
    return _linked(
        tuple(program_of(address, device, machine_code) for address, other in images if address and other == group)
    )


def _image(number: int) -> tuple[int | None, int]:
    """The address of a registered image's wrapper (None if no image has this number), and the group of images that it
    is linked with (0: none)."""
    group = ctypes.c_void_p()
    return standin().emulator_image(number, ctypes.byref(ctypes.c_int(0)), ctypes.byref(group)), group.value or 0


def image_count() -> int:
    """How many images have been registered in this process."""
    number = 0
    while _image(number)[0] is not None:
        number += 1
    return number
