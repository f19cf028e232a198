"""Sends and receives messages between the grader and a room: each is a JSON object, followed by the bytes of tensors.

A room's messages are untrusted, so nothing is unpickled, and every length is checked before memory is allocated.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kernelproof.emulator.arithmetic import bf16_to_f32
from kernelproof.grading.formats import Array

_LENGTH = struct.Struct("<Q")
# Limits of a message: bytes of its JSON object, bytes of all tensors, dimensions of a tensor.
MOST_HEADER, MOST_BYTES, MOST_DIMENSIONS = 1 << 24, 1 << 32, 16
_READ = 1 << 20  # bytes of one read
# torch's names of types, with NumPy's types for their bits.
BITS = {
    "float32": "f4", "float64": "f8", "float16": "f2", "bfloat16": "u2", "int64": "i8", "int32": "i4", "int16": "i2",
    "int8": "i1", "uint8": "u1", "bool": "u1",
}  # fmt: skip
FLOATS = frozenset(("float16", "bfloat16", "float32", "float64"))

Message = dict[str, Any]


class Tensor(NamedTuple):
    """A tensor in a message. ``type`` is the name of its type in torch; ``bits`` is an array of its shape."""

    type: str
    bits: Array

    @property
    def is_float(self) -> bool:
        """Whether the elements are floating-point numbers."""
        return self.type in FLOATS

    def values(self) -> Array:
        """The tensor's numbers: fp64 for floats, int64 for all others."""
        if self.type == "bfloat16":
            return np.asarray(bf16_to_f32(np.ascontiguousarray(self.bits)), np.float64).reshape(self.bits.shape)
        return self.bits.astype(np.float64 if self.is_float else np.int64)


class BrokenMessage(Exception):
    """The other side closed the pipe in the middle of a message, or sent bytes that are no message."""


def send(file: int, message: Message, tensors: Sequence[Tensor] = ()) -> None:
    """Write a message to a file descriptor."""
    header = json.dumps({**message, "tensors": [[item.type, list(item.bits.shape)] for item in tensors]}).encode()
    _write(file, _LENGTH.pack(len(header)) + header)
    for item in tensors:
        _write(file, np.ascontiguousarray(item.bits).tobytes())


def _write(file: int, data: bytes) -> None:
    """Writes all bytes."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def receive(file: int, wait: Callable[[], None] = lambda: None) -> tuple[Message, list[Tensor]]:
    """Read a message. ``wait`` is called before every read; it returns once something can be read, or raises.

    Raises BrokenMessage, and EOFError if the pipe is closed before a message begins.
    """
    (length,) = _LENGTH.unpack(_read(file, _LENGTH.size, wait, first=True))
    if length > MOST_HEADER:
        raise BrokenMessage(f"a message of {length} bytes")
    try:
        message = json.loads(_read(file, length, wait))
        kinds = [(str(kind), tuple(int(extent) for extent in shape)) for kind, shape in message.pop("tensors")]
        types = [np.dtype(BITS[kind]) for kind, _ in kinds]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenMessage(f"no message: {type(error).__name__}") from None
    out: list[Tensor] = []
    left = MOST_BYTES
    for (kind, shape), dtype in zip(kinds, types, strict=True):
        if len(shape) > MOST_DIMENSIONS or any(extent < 0 for extent in shape):
            raise BrokenMessage(f"a tensor of shape {shape}")
        nbytes = prod(shape) * dtype.itemsize
        left -= nbytes
        if left < 0:
            raise BrokenMessage(f"tensors of more than {MOST_BYTES} bytes")
        out.append(Tensor(kind, np.frombuffer(_read(file, nbytes, wait), dtype).reshape(shape)))
    return message, out


def _read(file: int, count: int, wait: Callable[[], None], first: bool = False) -> bytes:
    """Reads ``count`` bytes. Raises BrokenMessage, or EOFError if the ``first`` bytes of a message never come."""
    data = bytearray()
    while len(data) < count:
        wait()
        part = os.read(file, min(_READ, count - len(data)))
        if not part:
            if first and not data:
                raise EOFError
            raise BrokenMessage("the pipe was closed in the middle of a message")
        data += part
    return bytes(data)
