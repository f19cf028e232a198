"""Lends a test's arrays to kernels: their bytes are copied to the device before a launch, and back after it.

Arrays that overlap share a buffer, in which their addresses keep their distance. Every other array has a buffer of its
own, so an access beyond an array is found even if the array is a view of a larger one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from kernelproof.emulator import Buffer, Memory, Report
from kernelproof.emulator.host.execution import output_reports
from kernelproof.emulator.host.program import KernelArgument
from kernelproof.emulator.memory.tensors import TorchTensor, host_array, host_bytes, is_tensor
from kernelproof.emulator.state.arrays import Array


@dataclass(frozen=True)
class ArrayRole:
    """An array with a role: ``input`` (a write is a finding), ``output`` (every element must be written), ``inout``, or
    ``scratch`` (its content is undefined before the launch)."""

    array: Array | TorchTensor
    role: str


@dataclass
class Span:
    """The host memory of one array, or of several that overlap.

    ``start``: its first address; ``end``: the address after its last byte. ``array``: the array, if it is a single one
    without gaps. ``number``: the number of the first argument in it.
    """

    start: int
    end: int
    role: str
    array: Array | TorchTensor | None
    number: int
    buffer: Buffer | None = None

    @property
    def content(self) -> Array:
        """A view of the bytes, shape (end - start,), uint8."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * (self.end - self.start)).from_address(self.start))


class Loan:
    """The arrays among the arguments of a launch, while they are on the device."""

    def __init__(self, memory: Memory, arguments: Sequence[object]) -> None:
        self.memory = memory
        self.spans = _merged_spans(
            span for number, argument in enumerate(arguments) if (span := _span(argument, number)) is not None
        )
        for span in self.spans:
            content = span.content if span.array is None else span.array
            span.buffer = memory.upload(content, span.role)

    def argument(self, argument: object) -> KernelArgument:
        """The argument to pass to a kernel or launcher. An array is replaced by its buffer or its device address."""
        extent = _span(argument)
        if extent is None:
            return cast(KernelArgument, argument)
        span = next(span for span in self.spans if span.start <= extent.start and extent.end <= span.end)
        assert span.buffer is not None
        start = _first_address(argument)
        return span.buffer if span.start == start else span.buffer.address + start - span.start

    def unwritten(self, kernel: str = "") -> list[Report]:
        """Findings for elements of outputs that the launch did not write."""
        starts = set()
        for span in self.spans:
            assert span.buffer is not None
            span.buffer.name = f"argument {span.number}"
            starts.add(span.buffer.start)
        # A report's place has the address of an element. Less the element's offset, it is the start of its buffer.
        return [
            report
            for report in output_reports(self.memory, kernel)
            if (place := report.place) is not None and place.address - place.offset - self.memory.base in starts
        ]

    def store(self) -> None:
        """Copy the contents of buffers that a launch may write back to the arrays, and free the device memory."""
        for span in self.spans:
            assert span.buffer is not None
            if span.role not in ("input", "scratch") and span.end > span.start:
                span.content[:] = span.buffer.bytes()
            self.memory.free(span.buffer)


def _span(argument: object, number: int = 0) -> Span | None:
    """The host memory of an array; None for other arguments. Raises EmulatorError for tensors not on the CPU."""
    role = "inout"
    if isinstance(argument, ArrayRole):
        role, argument = argument.role, argument.array
    if is_tensor(argument):
        # If a tensor has gaps, its entire storage is copied.
        content = host_array(argument) if argument.is_contiguous() else host_bytes(argument)
        start = content.ctypes.data
        return Span(start, start + content.nbytes, role, argument if argument.is_contiguous() else content, number)
    if not isinstance(argument, np.ndarray):
        return None
    if not argument.flags.writeable:
        role = "input"
    start, end = _extent(argument)
    return Span(start, end, role, argument if argument.flags.c_contiguous else None, number)


def _extent(array: Array) -> tuple[int, int]:
    """The address of an array's first byte, and the one after its last byte."""
    first = array.ctypes.data
    if not array.size:
        return first, first
    steps = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
    low, high = sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps)
    return first + low, first + high + array.itemsize


def _first_address(argument: object) -> int:
    """The address of an array's first element."""
    if isinstance(argument, ArrayRole):
        argument = argument.array
    return argument.data_ptr() if is_tensor(argument) else cast(Array, argument).ctypes.data


def _merged_spans(spans: Iterable[Span]) -> list[Span]:
    """The spans in order of address; spans that overlap are merged into one."""
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
