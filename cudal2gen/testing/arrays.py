"""Arrays of a test as memory of the device: their bytes go there before a launch, and back behind it.

Arrays that overlap share a buffer, in which their addresses keep their distance; all others have one of their own, so
that an access beyond an array is found even where it is a view of a larger one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard, cast

import numpy as np

from cudal2gen.emulator import Buffer, Memory, Place, Report
from cudal2gen.emulator.host.execution import output_reports
from cudal2gen.emulator.host.program import KernelArgument
from cudal2gen.emulator.state.arrays import Array
from cudal2gen.errors import WrongInput


class Tensor(Protocol):
    """What is used of a torch.Tensor."""

    device: object
    dtype: object
    shape: tuple[int, ...]

    def data_ptr(self) -> int:
        """Where its first element is."""

    def element_size(self) -> int:
        """Bytes of an element."""

    def stride(self) -> tuple[int, ...]:
        """Steps of its dimensions, in elements."""


@dataclass(frozen=True)
class Role:
    """An array with a role: ``input`` (a write is a finding), ``output`` (every element must be written), ``inout``, or
    ``scratch`` (undefined before)."""

    array: Array | Tensor
    role: str


@dataclass
class Span:
    """Host memory of one array or of several that overlap: its addresses, role, the array if it is one without gaps,
    and the number of the first argument that lies there."""

    start: int
    end: int
    role: str
    array: Array | None
    number: int
    buffer: Buffer | None = None

    @property
    def content(self) -> Array:
        """Its bytes: a view, shape (end - start,), uint8."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * (self.end - self.start)).from_address(self.start))


class Loan:
    """The arrays among some arguments, on the device."""

    def __init__(self, memory: Memory, arguments: Sequence[object]) -> None:
        self.memory = memory
        self.spans = _merged(
            span for number, argument in enumerate(arguments) if (span := _span(argument, number)) is not None
        )
        for span in self.spans:
            content = span.content if span.array is None else span.array
            span.buffer = memory.upload(content, span.role)

    def argument(self, argument: object) -> KernelArgument:
        """An argument as kernels and launchers take it: addresses on the device for arrays."""
        own = _span(argument)
        if own is None:
            return cast(KernelArgument, argument)
        span = next(span for span in self.spans if span.start <= own.start and own.end <= span.end)
        assert span.buffer is not None
        start = _first(argument)
        return span.buffer if span.start == start else span.buffer.address + start - span.start

    def unwritten(self, kernel: str = "") -> list[Report]:
        """What the launch left out of outputs."""
        starts = set()
        for span in self.spans:
            assert span.buffer is not None
            span.buffer.name = f"argument {span.number}"
            starts.add(span.buffer.start)
        reports = output_reports(self.memory, kernel)
        return [item for item in reports if item.place is not None and self._start(item.place) in starts]

    def _start(self, place: Place) -> int:
        return place.address - place.offset - self.memory.base

    def store(self) -> None:
        """Write what the device has to the arrays, and free its memory."""
        for span in self.spans:
            assert span.buffer is not None
            if span.role not in ("input", "scratch") and span.end > span.start:
                span.content[:] = span.buffer.bytes()
            self.memory.free(span.buffer)


def _span(argument: object, number: int = 0) -> Span | None:
    """The host memory of an array; None for other arguments. Raises WrongInput for tensors elsewhere."""
    role = "inout"
    if isinstance(argument, Role):
        role, argument = argument.role, argument.array
    if isinstance(argument, np.ndarray):
        if not argument.flags.writeable:
            role = "input"
        whole = argument if argument.flags.c_contiguous else None
        return _extent(argument.ctypes.data, argument.shape, argument.strides, argument.itemsize, role, whole, number)
    if not _is_tensor(argument):
        return None
    if str(argument.device) != "cpu":
        raise WrongInput(f"a tensor on {argument.device} cannot be an argument; pass x.cpu()")
    size = argument.element_size()
    strides = [size * step for step in argument.stride()]
    return _extent(argument.data_ptr(), argument.shape, strides, size, role, None, number)


def _extent(
    start: int, shape: Sequence[int], strides: Sequence[int], size: int, role: str, array: Array | None, number: int
) -> Span:
    """The addresses of elements of ``size`` bytes, the first of them at ``start``; strides in bytes, of any sign."""
    if 0 in shape:
        return Span(start, start, role, array, number)
    steps = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    low, high = sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps)
    return Span(start + low, start + high + size, role, array, number)


def _first(argument: object) -> int:
    """Where an array's first element is."""
    if isinstance(argument, Role):
        argument = argument.array
    return argument.ctypes.data if isinstance(argument, np.ndarray) else cast(Tensor, argument).data_ptr()


def _is_tensor(argument: object) -> TypeGuard[Tensor]:
    return hasattr(argument, "data_ptr") and hasattr(argument, "element_size")


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Spans that do not overlap, by address."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        last = merged[-1] if merged else None
        if last is None or span.start >= last.end:
            merged.append(span)
            continue
        if span.end > last.end:
            last.end, last.array = span.end, None
        if last.role != span.role:
            last.role = "inout"
    return merged
