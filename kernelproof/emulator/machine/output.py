"""Formats the text that kernels print: printf, and the messages of failed asserts."""

from __future__ import annotations

import re
import struct
from functools import lru_cache

import numpy as np

from kernelproof.emulator.memory.device import DeviceMemory
from kernelproof.emulator.memory.local import GenericMemory
from kernelproof.emulator.state.arrays import Array, Mask
from kernelproof.emulator.state.batch_state import BatchState

# A conversion of printf (flags, width, precision, length of the argument, kind), and one that has a precision, up to
# the dot.
_CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+)?)?(hh|h|ll|l|j|z|t)?([diouxXcsfFeEgGaAp%])")
_DOT = re.compile(r"%[-+ #0]*(?:\*|\d+)?\.")
MAX_STRING = 4096  # characters of a string in device memory
MAX_CHARACTERS = 1 << 20  # characters that a launch may print, as many as a device's buffer for printf holds


@lru_cache(maxsize=256)
def _pieces(form: str) -> tuple[str | tuple[str, tuple[tuple[str, int], ...]], ...]:
    """Split a format of printf into plain text and conversions. A conversion has the format that Python's ``%`` takes,
    and (kind, bytes) of each argument: ``i`` and ``u`` are integers, ``f`` is floating point, ``s`` a string."""
    out: list[str | tuple[str, tuple[tuple[str, int], ...]]] = []
    end = 0
    for m in _CONVERSION.finditer(form):
        out.append(form[end : m.start()])
        end = m.end()
        flags, width, precision, length, kind = m.groups()
        if kind == "%":
            out.append("%")
            continue
        arguments = [("i", 4) for part in (width, precision) if part == "*"]
        size = 8 if length in ("l", "ll", "j", "z", "t") or kind in "sfFeEgGaAp" else 4
        arguments.append(("f" if kind in "fFeEgGaA" else "s" if kind == "s" else "i" if kind in "dic" else "u", size))
        dot = f".{precision or ''}" if _DOT.match(m[0]) else ""
        if kind == "p":
            flags, kind = flags + "#", "x"
        # Python's % has no hexadecimal floats (a, A), so these are printed as by g.
        out.append((f"%{flags}{width or ''}{dot}{'g' if kind in 'aA' else kind}", tuple(arguments)))
    out.append(form[end:])
    return tuple(out)


class Output:
    """Prints for the lanes of a batch; at each instruction in the order of lanes."""

    def __init__(self, batch: BatchState, memory: DeviceMemory, generic: GenericMemory) -> None:
        self.batch, self.memory, self.generic = batch, memory, generic

    def _string(self, address: int) -> str:
        """A C string in global memory."""
        arena = self.memory.state.arena
        offset = address - arena.base
        if not 0 <= offset < arena.capacity:
            return "(no string)"
        raw = arena.data[offset : offset + MAX_STRING].tobytes()
        return raw.partition(b"\0")[0].decode(errors="replace")

    def print(self, form: Array, values: Array, m: Mask, site: int) -> None:
        """printf of each lane. ``form``: addresses of formats in global memory; ``values``: generic addresses of the
        arguments."""
        launch = self.batch.launch
        if launch.printed_characters > MAX_CHARACTERS:
            return
        lanes = np.flatnonzero(self.batch.running(m))
        texts: dict[int, str] = {}
        for address in np.unique(form[lanes]):
            chosen = self.batch.spread(np.ones(len(lanes), bool), lanes, 1).astype(bool) & (form == address)
            texts.update(self._texts_of_lanes(self._string(int(address)), values, chosen, site))
        launch.printed.append("".join(text for _, text in sorted(texts.items())))
        launch.printed_characters += len(launch.printed[-1])

    def _texts_of_lanes(self, form: str, values: Array, m: Array, site: int) -> dict[int, str]:
        """The text of each lane, by lane."""
        lanes = [int(lane) for lane in np.flatnonzero(m)]
        texts = dict.fromkeys(lanes, "")
        offset = 0
        for piece in _pieces(form):
            if isinstance(piece, str):
                for lane in lanes:
                    texts[lane] += piece
                continue
            conversion, arguments = piece
            columns = []
            for kind, size in arguments:
                offset = -(-offset // size) * size
                raw = self.generic.load(values + np.uint64(offset), size, m, site)
                columns.append({lane: self._value(kind, size, int(raw[lane])) for lane in lanes})
                offset += size
            for lane in lanes:
                texts[lane] += _format_arguments(conversion, tuple(column[lane] for column in columns))
        return texts

    def _value(self, kind: str, size: int, raw: int) -> int | float | str:
        """The argument of a kind in the ``size`` bytes of ``raw``."""
        if kind == "f":
            number: float = struct.unpack("<d", struct.pack("<Q", raw))[0]
            return number
        if kind == "s":
            return self._string(raw) if raw else "(null)"
        top = 1 << 8 * size - 1
        return raw - 2 * top if kind == "i" and raw & top else raw

    def assert_failed(self, text: Array, file: Array, line: Array, function: Array, m: Mask, site: int) -> None:
        """Report lanes whose assert has failed. The strings are addresses in global memory."""
        lanes = np.flatnonzero(self.batch.running(m))
        if len(lanes):
            first = int(lanes[0])
            where = f"{self._string(int(file[first]))}:{int(line[first])}"
            words = (
                f"assertion `{self._string(int(text[first]))}` failed in {self._string(int(function[first]))}, {where}"
            )
            self.batch.report_lanes("trap", words, site, lanes)
            self.batch.launch.failed_asserts = True


def _format_arguments(conversion: str, arguments: tuple[int | float | str, ...]) -> str:
    """Arguments as text. A conversion that Python refuses is printed as it is."""
    try:
        if conversion[-1] == "c":
            *before, code = arguments
            return conversion % (*before, chr(int(code) & 255))
        return conversion % arguments
    except (TypeError, ValueError, OverflowError):
        return conversion
