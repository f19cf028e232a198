"""Parses the contract of a kernel: its buffers (roles, types, extents) and its launches, as functions of the shape."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kernelproof.grading.expressions import Number, Shape, extents, value
from kernelproof.grading.formats import FORMATS, Format
from kernelproof.ground.errors import WrongInput, invalid

ROLES = {"in": "input", "out": "output", "inout": "inout", "scratch": "scratch"}
FORM = "in|out|inout|scratch:TYPE[EXTENTS], then optionally =LOW..HIGH or =zeros"
# A buffer in this form (role, type, extents, contents), a scalar (type, value) and a tensor map (buffer, box, swizzle).
_BUFFER = re.compile(r"(in|out|inout|scratch):(\w+)\[([^\]]*)\](?:=(.+))?")
_SCALAR = re.compile(r"(\w+):(.+)")
_WORDS = "words:"
_MAP = re.compile(r"map:(\w+)\[([^\]]+)\](?:/(\d+))?")


@dataclass(frozen=True)
class ContractBuffer:
    """A buffer of every call.

    ``extents``: one expression per dimension, separated by commas. ``low`` and ``high`` (excluded) bound the random
    numbers of an input, for example of indices. ``zeroed`` marks scratch memory that is set to zero before each call.
    """

    name: str
    role: str
    format: Format
    extents: str
    low: str = ""
    high: str = ""
    zeroed: bool = False

    @property
    def is_input(self) -> bool:
        """Whether the kernel reads what is in the buffer at the launch."""
        return self.role in ("in", "inout")

    @property
    def is_output(self) -> bool:
        """Whether the kernel's result is compared."""
        return self.role in ("out", "inout")

    def shape(self, shape: Shape) -> tuple[int, ...]:
        """The buffer's extents for a problem shape. Raises WrongInput."""
        result = value(f"({self.extents},)", shape)
        if not all(isinstance(extent, int) and extent > 0 for extent in result):
            raise WrongInput(
                f"buffer {self.name}: extents {result} of shape {dict(shape)} are not all positive integers"
            )
        return tuple(result)

    def nbytes(self, shape: Shape) -> int:
        """The buffer's size in bytes for a problem shape."""
        return math.prod(self.shape(shape)) * self.format.dtype.itemsize


def buffer(name: str, text: str) -> ContractBuffer:
    """Parse a buffer, such as ``in:f16[m, k]``. Raises WrongInput."""
    match = _BUFFER.fullmatch(text.strip())
    if match is None or not match[3].strip():
        raise WrongInput(f"buffer {name}: {text!r}: write {FORM}")
    role, kind, dims, content = match.groups()
    if kind not in FORMATS:
        raise WrongInput(f"buffer {name}: type {kind!r}: one of {', '.join(FORMATS)}")
    low, dots, high = (content or "").partition("..")
    if content and not dots and (content != "zeros" or role != "scratch"):
        raise WrongInput(f"buffer {name}: content {content!r}: LOW..HIGH for inputs, zeros for scratch")
    return ContractBuffer(name, role, FORMATS[kind], dims, low if dots else "", high, content == "zeros")


class ContractLaunch(BaseModel):
    """A launch of a kernel. Its numbers are constants, expressions in names of the shape, or functions of them.

    ``entry`` is the kernel's name as people write it. ``grid``, ``block`` and ``cluster`` are one to three numbers;
    ``smem`` is bytes of dynamic shared memory. ``args`` has one entry per parameter: the name of a buffer, a number
    that takes the parameter's type, a number with a type of its own (``"i64: m * n"``), a struct of unsigned words of
    32 bits (``"words: m, n // 8"``), or the tensor map of a buffer. ``"map:a[64, 32]/64"`` has boxes of 64 rows by 32
    columns and a swizzle of 64 bytes.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    entry: str
    grid: Number | list[Number] | tuple[Number, ...] = 1
    block: Number | list[Number] | tuple[Number, ...]
    smem: Number = 0
    cluster: Number | list[Number] | tuple[Number, ...] = 1
    cooperative: bool = False
    args: Annotated[list[Number], Field(default_factory=list)]

    def geometry(self, shape: Shape) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
        """Grid, block, cluster and bytes of dynamic shared memory. Raises WrongInput."""
        smem = value(self.smem, shape)
        if not isinstance(smem, int) or smem < 0:
            raise WrongInput(f"launch of {self.entry}: smem {smem!r}: bytes, an integer from 0")
        return extents(self.grid, shape), extents(self.block, shape), extents(self.cluster, shape), smem

    def scalar(self, argument: Number, shape: Shape) -> int | float | np.generic:
        """The value of an argument that is no buffer. Raises WrongInput."""
        return _scalar(argument, shape, f"launch of {self.entry}")


class HostCall(BaseModel):
    """A call of a C++ function of the host code.

    ``args`` are names of buffers, which are passed as tensors, numbers as in ``ContractLaunch``, and ``"None"``. The
    function returns the outputs that are no arguments, in the order of the buffers.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    function: str
    args: Annotated[list[Number], Field(default_factory=list)]

    def scalar(self, argument: Number, shape: Shape) -> int | float:
        """The value of an argument that is no buffer. Raises WrongInput."""
        number = _scalar(argument, shape, f"call of {self.function}")
        return number.item() if isinstance(number, np.generic) else number


def _scalar(argument: Number, shape: Shape, place: str) -> int | float | np.generic:
    """The number of an argument, with a NumPy type if the argument states one. ``place``: the call, for messages."""
    typed = _SCALAR.fullmatch(argument) if isinstance(argument, str) else None
    number = value(typed[2] if typed else argument, shape)
    if not isinstance(number, int | float):
        raise WrongInput(f"{place}: argument {argument!r} is {number!r}, no number")
    if typed is None:
        return number
    if typed[1] not in FORMATS:
        raise WrongInput(f"{place}: type {typed[1]!r}: one of {', '.join(FORMATS)}")
    scalar: np.generic = FORMATS[typed[1]].bits(np.array([number]))[0]
    return scalar


def struct(argument: Number, shape: Shape) -> bytes | None:
    """The bytes of an argument that is a struct of words; None for all others. Raises WrongInput."""
    if not isinstance(argument, str) or not argument.startswith(_WORDS):
        return None
    words = value(f"({argument.removeprefix(_WORDS)},)", shape)
    if not all(isinstance(word, int) and 0 <= word < 1 << 32 for word in words):
        raise WrongInput(f"argument {argument!r} is {words}; words are integers from 0 to 2^32 - 1")
    return b"".join(word.to_bytes(4, "little") for word in words)


class MapBox(NamedTuple):
    """A tensor map: its buffer, the extents of a box (outermost first), and the swizzle in bytes (0: none)."""

    buffer: str
    extents: tuple[int, ...]
    swizzle: int


def box(argument: Number, shape: Shape) -> MapBox | None:
    """Parse an argument that is a tensor map; None for all others. Raises WrongInput."""
    match = _MAP.fullmatch(argument) if isinstance(argument, str) else None
    if match is None:
        return None
    swizzle = int(match[3] or 0)
    if swizzle not in (0, 32, 64, 128):
        raise WrongInput(f"argument {argument!r}: a swizzle of 32, 64 or 128 bytes, or none")
    return MapBox(match[1], tuple(value(f"({match[2]},)", shape)), swizzle)


@dataclass(frozen=True)
class Contract:
    """What the user states about a source: the buffers by name, and the launches of one call in order, or instead a
    call of host code."""

    buffers: Mapping[str, ContractBuffer]
    launches: tuple[ContractLaunch, ...]
    call: HostCall | None = None

    @property
    def inputs(self) -> list[ContractBuffer]:
        return [item for item in self.buffers.values() if item.is_input]

    @property
    def outputs(self) -> list[ContractBuffer]:
        return [item for item in self.buffers.values() if item.is_output]

    @property
    def narrowest(self) -> Format | None:
        """The float type with the shortest significand among inputs and outputs; None without floats."""
        floats = [item.format for item in self.buffers.values() if item.role != "scratch" and item.format.is_float]
        return min(floats, key=lambda item: item.significand, default=None)

    def traffic(self, shape: Shape) -> int:
        """The fewest bytes that a call reads and writes: every input and output once."""
        return sum(item.nbytes(shape) * (item.is_input + item.is_output) for item in self.buffers.values())


def parse_contract(
    buffers: Mapping[str, str],
    launches: Sequence[ContractLaunch | Mapping[str, Any]],
    call: HostCall | Mapping[str, Any] | None = None,
) -> Contract:
    """Parse and check the user's description of buffers and launches, or of a call. Raises WrongInput."""
    if bool(launches) == (call is not None):
        raise WrongInput("describe either launches or a call of host code")
    parsed = {name: buffer(name, text) for name, text in buffers.items()}
    if not any(item.is_output for item in parsed.values()):
        raise WrongInput("buffers: none is out or inout, so there is nothing to compare")
    try:
        checked = tuple(
            launch if isinstance(launch, ContractLaunch) else ContractLaunch.model_validate(launch, strict=False)
            for launch in launches
        )
        host = HostCall.model_validate(call) if call is not None else None
    except ValidationError as error:
        raise invalid("call" if call else "launches", error) from None
    return Contract(parsed, checked, host)


def named_shapes(shapes: Sequence[Shape | Sequence[int]], names: Sequence[str]) -> list[dict[str, int]]:
    """All shapes as dictionaries; the values of tuples get the ``names``. Raises WrongInput."""
    out = []
    for shape in shapes:
        if isinstance(shape, Mapping):
            out.append(dict(shape))
            continue
        if len(shape) != len(names):
            raise WrongInput(
                f"shape {tuple(shape)}: {len(names)} names ({', '.join(names) or 'none'}); give dictionaries, or names="
            )
        out.append(dict(zip(names, shape, strict=True)))
    if not out:
        raise WrongInput("shapes: none; give at least one, such as {'m': 64, 'n': 48, 'k': 32}")
    return out
