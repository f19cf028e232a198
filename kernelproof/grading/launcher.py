"""Compiles the host code of inline extensions against a small substitute for torch's C++ headers, and calls it.

The host code runs natively in this process; only its kernels run on the emulated device. So this module must be used
only in a child process, which is confined by a sandbox.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from kernelproof.checking import compilation, devices
from kernelproof.checking.execution import REPLACED_LIBRARIES
from kernelproof.emulator import LaunchRefused, Report
from kernelproof.emulator.host.standin import stand_for
from kernelproof.grading.contract import Buffer, Contract, HostCall
from kernelproof.grading.device import Call, MemoryCalls
from kernelproof.grading.expressions import Shape
from kernelproof.grading.formats import Array
from kernelproof.ground.toolchain import discover

INCLUDE = Path(__file__).parent / "include"
TENSOR, INTEGER, NUMBER, NOTHING = range(4)
DTYPES = ("u8", "i8", "i16", "i32", "i64", "f16", "f32", "f64", "", "bf16")  # in the order of ScalarType
MAX_DIMS, MAX_RESULTS = 8, 16


class HostFailure(Exception):
    """Host code threw an exception, or returned something that does not fit the contract."""


# The layouts of Value and Results in include/kernelproof_tensor.h.
class _Value(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int), ("dtype", ctypes.c_int), ("dims", ctypes.c_int),
        ("sizes", ctypes.c_int64 * MAX_DIMS), ("data", ctypes.c_void_p), ("integer", ctypes.c_int64),
        ("number", ctypes.c_double),
    ]  # fmt: skip


class _Results(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int), ("values", _Value * MAX_RESULTS), ("message", ctypes.c_char * 400)]


def library(text: str, function: str, device: str, arguments: tuple[str, ...], seconds: float) -> Path:
    """Compile an extension's text into a library with an entry point that calls ``function``.

    Raises Failure with the compiler's errors, also if the text uses a part of torch that the substitute lacks.
    """
    whole = (
        f"#include <kernelproof_tensor.h>\n{text}\n"
        f'extern "C" int kernelproof_entry(const kernelproof_torch::Value* values, int count, '
        f"kernelproof_torch::Results* results) {{\n"
        f"  return kernelproof_torch::invoke(&{function}, values, count, results);\n}}\n"
    )
    source = compilation.text_file(whole, ".cu")
    options = ["-std=c++17", f"-isystem={INCLUDE}", *arguments]
    return compilation.library([source], options, devices.target(device), discover(), seconds, foreign=())


class HostCalls(MemoryCalls):
    """Calls of a function of host code, whose tensors are buffers of the contract."""

    runs_host_code = True

    def __init__(self, path: Path, contract: Contract, shape: Shape, device: str) -> None:
        assert contract.call is not None
        self.host_call: HostCall = contract.call
        names = [item for item in self.host_call.args if isinstance(item, str) and item in contract.buffers]
        super().__init__(contract, shape, device, dict.fromkeys(names))
        stand_for(*REPLACED_LIBRARIES)
        self.entry: Callable[..., int] = ctypes.CDLL(str(path)).kernelproof_entry

    def call(self, inputs: Mapping[str, Array], counters: bool = False, hazards: bool = False) -> Call:
        """Call the function once. Raises HostFailure, LaunchRefused for a launch that CUDA refuses, and
        EmulatorError."""
        self.fill(inputs)
        values = [self._value(argument) for argument in self.host_call.args]
        results, result = _Results(), Call({})
        before = {key: buffer.bytes().copy() for key, buffer in self.memory.globals.items()}
        with self.session(counters, hazards) as emulated:
            code = self.entry((_Value * len(values))(*values), len(values), ctypes.byref(results))
        self.count += 1
        self.unreturned = emulated.reports
        for error in emulated.errors:
            raise error
        for launch in emulated.launches:
            result.add(launch)
        result.reports = list(emulated.reports)
        if emulated.refusals and code:
            raise LaunchRefused(code, emulated.refusals[0])
        if code:
            raise HostFailure(f"{self.host_call.function}: {results.message.decode(errors='replace')}")
        for key, buffer in self.memory.globals.items():
            changed = buffer.bytes() != before.get(key, buffer.bytes())
            if changed.any():
                result.globals_changed[key[1]] = int(changed.sum())
        self._collect(results, result)
        self.unreturned = []
        return result

    def _value(self, argument: str | int | float | Callable[..., object]) -> _Value:
        if isinstance(argument, str) and argument in self.buffers:
            item = self.contract.buffers[argument]
            extents = item.shape(self.shape)
            return _Value(
                TENSOR, DTYPES.index(item.format.name), len(extents), (ctypes.c_int64 * MAX_DIMS)(*extents),
                self.buffers[argument].address,
            )  # fmt: skip
        if argument == "None":
            return _Value(NOTHING)
        number = self.host_call.scalar(argument, self.shape)
        if isinstance(number, int):
            return _Value(INTEGER, integer=number, number=float(number))
        return _Value(NUMBER, integer=int(number), number=float(number))

    def _collect(self, results: _Results, result: Call) -> None:
        """Collect the outputs: those that were arguments, and returned tensors for the others, in order."""
        arguments = {argument for argument in self.host_call.args if isinstance(argument, str)}
        values = iter(results.values[: results.count])
        for item in self.contract.outputs:
            if item.name in arguments:
                result.outputs[item.name] = self.buffers[item.name].download()
                continue
            if (value := next(values, None)) is None:
                raise HostFailure(f"{self.host_call.function} returned {results.count} tensors, none for {item.name}")
            result.outputs[item.name] = self._returned(value, item, result)

    def _returned(self, value: _Value, item: Buffer, result: Call) -> Array:
        """The bits of a returned tensor. The tensor comes from untrusted code, so all of it is checked.

        Raises HostFailure for a wrong type or number of elements, or memory that does not belong to the device.
        """
        kind, sizes = DTYPES[value.dtype], tuple(value.sizes[: value.dims])
        extents = item.shape(self.shape)
        if kind != item.format.name or int(np.prod(sizes)) != int(np.prod(extents)):
            raise HostFailure(f"{item.name} is {kind}{list(sizes)}, not {item.format.name}{list(extents)}")
        buffer = self.memory.find((value.data or 0) - self.memory.base)
        nbytes = item.nbytes(self.shape)
        if buffer is None:
            raise HostFailure(f"{item.name} is no memory of the device")
        start = (value.data or 0) - self.memory.base - buffer.start
        if buffer.written is not None:
            missing = buffer.written[start : start + nbytes] == 0
            self.written[item.name] = ~missing.reshape(*extents, -1).any(axis=-1)
            if missing.any():
                elements = int((~self.written[item.name]).sum())
                text = f"{elements} of {self.written[item.name].size} elements of {item.name} were never written"
                result.reports.append(Report("unwritten-output", text, count=elements))
        else:
            self.written.pop(item.name, None)
        content = buffer.bytes()[start : start + nbytes].copy()
        return np.asarray(content.view(item.format.dtype).reshape(extents))
