"""Compiles the host code of inline extensions against a small substitute for torch's C++ headers, and calls it.

The host code runs natively in this process; only its kernels run on the emulated device. So this module must be used
only in a child process, which is confined by a sandbox.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from math import prod
from pathlib import Path

import numpy as np

from kernelproof.checking import compilation, devices
from kernelproof.checking.execution import REPLACED_LIBRARIES
from kernelproof.emulator import EmulatorError, LaunchRefused, Report
from kernelproof.emulator.host.standin import stand_for
from kernelproof.grading import elsewhere
from kernelproof.grading.contract import Contract, ContractBuffer, HostCall
from kernelproof.grading.device import Call, RepeatedCalls
from kernelproof.grading.expressions import Shape
from kernelproof.grading.formats import Array
from kernelproof.ground.errors import Failure
from kernelproof.ground.toolchain import discover

TENSOR, INTEGER, NUMBER, NOTHING, INTEGERS, TYPE = range(6)  # kinds of an ArgumentValue
LIST, TUPLE = 1, 2  # forms of Results; 0 is a single tensor
NEEDS_TORCH = 2  # the code of a call that needs the real torch
DTYPES = ("u8", "i8", "i16", "i32", "i64", "f16", "f32", "f64", "", "bf16")  # in the order of ScalarType
MAX_DIMS, MAX_RESULTS = 8, 16
# Headers of the C++ library that torch's headers include, each with names by which a text shows that it needs it.
# Extensions rarely include these headers themselves. To include all would double the time of a compilation.
_LIBRARY_HEADERS = {
    "algorithm": "all_of any_of clamp copy_if count_if find_if lower_bound max_element min_element nth_element "
    "partial_sort remove_if reverse rotate sort stable_sort transform unique upper_bound",
    "array": "array", "atomic": "atomic atomic_flag memory_order", "bitset": "bitset",
    "chrono": "chrono", "complex": "complex", "deque": "deque", "functional": "bind divides equal_to function greater "
    "hash less logical_and logical_or minus modulus multiplies negate plus reference_wrapper",
    "iomanip": "fixed hex setfill setprecision setw", "iostream": "cerr clog cout endl ostream",
    "limits": "numeric_limits", "list": "list", "map": "map multimap",
    "mutex": "call_once lock_guard mutex once_flag recursive_mutex scoped_lock unique_lock",
    "numeric": "accumulate gcd inner_product iota lcm partial_sum reduce", "queue": "priority_queue queue",
    "random": "mt19937 mt19937_64 normal_distribution random_device uniform_int_distribution",
    "set": "multiset set", "sstream": "istringstream ostringstream stringstream", "stack": "stack", "thread": "thread",
    "typeinfo": "type_info", "unordered_map": "unordered_map", "unordered_set": "unordered_set",
    "variant": "get_if holds_alternative variant visit",
}  # fmt: skip
ENTRY = "kernelproof_entry"  # the name of an entry point, which ends with the number of its function
# Further functions of a library: one frees the tensors that the last call returned, the other sets the function that
# runs operators of torch.
_SERVICES = """
extern "C" void kernelproof_torch_release() { kernelproof_torch::returned().clear(); }
extern "C" void kernelproof_torch_is(kernelproof_torch::Operator f) { kernelproof_torch::torch_operator() = f; }
"""
# The first error of a compilation that failed because the substitute lacks a part of torch.
_NOT_IN_THE_SUBSTITUTE = re.compile(
    r"kernelproof_t|\b(?:at|torch|c10)::|\"(?:torch|at|c10|py|pybind11)(?:::[^\"]*)?\"|\b(?:AT|C10|TORCH)_[A-Z]\w*"
    r"|(?:torch|ATen|c10|pybind11)/\S+: No such file"
)


class MissingPart(Exception):
    """A text uses a part of torch that the substitute lacks, so the text cannot be judged."""


class HostFailure(Exception):
    """Host code threw an exception, or returned something that does not fit the contract."""


# The layouts of Value and Results in include/kernelproof_tensor.h.
class ArgumentValue(ctypes.Structure):
    """An argument or a result of host code."""

    _fields_ = [
        ("kind", ctypes.c_int), ("dtype", ctypes.c_int), ("dims", ctypes.c_int),
        ("sizes", ctypes.c_int64 * MAX_DIMS), ("strides", ctypes.c_int64 * MAX_DIMS), ("data", ctypes.c_void_p),
        ("integer", ctypes.c_int64), ("number", ctypes.c_double),
    ]  # fmt: skip


class Results(ctypes.Structure):
    """The tensors that a call of host code returned, and in which form, or the message of its failure."""

    _fields_ = [
        ("count", ctypes.c_int),
        ("form", ctypes.c_int),
        ("values", ArgumentValue * MAX_RESULTS),
        ("message", ctypes.c_char * 400),
    ]


def library(text: str, function: str, device: str, arguments: tuple[str, ...], seconds: float) -> Path:
    """Compile an extension's text into a library with an entry point that calls ``function``.

    ``device``: a name as in ``checking.devices``. ``arguments``: further options of nvcc. ``seconds``: the time limit.
    Raises MissingPart if the first error is about a part of torch, and Failure with the compiler's errors otherwise.
    """
    return extension(text, [function], device, arguments, seconds)


def extension(text: str, functions: Sequence[str], device: str, arguments: tuple[str, ...], seconds: float) -> Path:
    """Compile an extension's text into a library with an entry point for each of ``functions``. Raises as ``library``
    does."""
    entries = "".join(
        f'extern "C" int {ENTRY}{number}(const kernelproof_torch::Value* values, int count, '
        f"kernelproof_torch::Results* results) {{\n"
        f"  return kernelproof_torch::invoke(&{function}, values, count, results);\n}}\n"
        for number, function in enumerate(functions)
    )
    with _missing_parts():
        return compilation.library(
            [_complete_file(f"{text}\n{entries}{_SERVICES}")], _options(arguments), devices.target(device), discover(),
            seconds, foreign=(), alias=elsewhere.PATH,
        )  # fmt: skip


def check(text: str, device: str, arguments: tuple[str, ...], seconds: float) -> None:
    """Compile an extension's text, with its host code, and discard the result. Raises as ``library`` does."""
    with _missing_parts():
        compilation.ptx(
            _complete_file(text), _options(arguments), devices.target(device), discover(), seconds, foreign=(),
            alias=elsewhere.PATH,
        )  # fmt: skip


def _complete_file(text: str) -> Path:
    """The file of an extension's text with the headers that it needs in front."""
    head = f'#include <kernelproof_tensor.h>\n{_library_includes(text)}#line 1 "{elsewhere.PATH}"\n'
    return compilation.text_file(head + text, ".cu")


def _options(arguments: tuple[str, ...]) -> list[str]:
    """The options of nvcc for an extension, with the folder of the substitute for torch's headers."""
    return ["-std=c++17", f"-isystem={elsewhere.INCLUDE}", *arguments]


@contextmanager
def _missing_parts() -> Iterator[None]:
    """A context that turns a Failure into MissingPart if its first error, with the types that it names, is about a part
    of torch."""
    try:
        yield
    except Failure as error:
        first, *details = [line for line in str(error).splitlines() if "error" in line or "types are" in line] or [""]
        types = "".join(takewhile(lambda line: "error" not in line, details))
        if not _NOT_IN_THE_SUBSTITUTE.search(first + types):
            raise
        raise MissingPart(f"its host code needs a part of torch that is not there without torch: {first}") from None


def _library_includes(text: str) -> str:
    """``#include`` lines for the headers that the text needs and torch's headers would include."""
    pattern = r"\b[a-z]\w+\b" if re.search(r"\busing\s+namespace\s+std\b", text) else r"\bstd\s*::\s*(\w+)"
    named = set(re.findall(pattern, text))
    return "".join(f"#include <{header}>\n" for header, names in _LIBRARY_HEADERS.items() if named & set(names.split()))


def strides(extents: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor, in elements."""
    return [prod(extents[number + 1 :]) for number in range(len(extents))]


class HostCalls(RepeatedCalls):
    """Calls of a function of host code, whose tensors are buffers of the contract."""

    runs_host_code = True

    def __init__(self, path: Path, contract: Contract, shape: Shape, device: str, environment: int = 0) -> None:
        assert contract.call is not None
        self.host_call: HostCall = contract.call
        names = [item for item in self.host_call.args if isinstance(item, str) and item in contract.buffers]
        super().__init__(contract, shape, device, dict.fromkeys(names), environment)
        stand_for(*REPLACED_LIBRARIES)
        self.entry: Callable[..., int] = getattr(ctypes.CDLL(str(path)), f"{ENTRY}0")

    def call(self, inputs: Mapping[str, Array], counters: bool = False, hazards: bool = False) -> Call:
        """Call the function once. Raises HostFailure, LaunchRefused for a launch that CUDA refuses, and
        EmulatorError."""
        self.fill(inputs)
        values = [self._value(argument) for argument in self.host_call.args]
        results, result = Results(), Call({})
        before = {key: buffer.bytes().copy() for key, buffer in self.memory.globals.items()}
        with self.session(counters, hazards) as emulated:
            code = self.entry((ArgumentValue * len(values))(*values), len(values), ctypes.byref(results))
        self.count += 1
        self.unreturned = emulated.reports
        for error in emulated.errors:
            raise error
        for launch in emulated.launches:
            result.add(launch)
        result.reports = list(emulated.reports)
        if code == NEEDS_TORCH:
            raise EmulatorError(f"{self.host_call.function} needs {results.message.decode(errors='replace')}")
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

    def _value(self, argument: str | int | float | Callable[..., object]) -> ArgumentValue:
        """An argument for the host code: a tensor in a buffer, None, or a number."""
        if isinstance(argument, str) and argument in self.buffers:
            item = self.contract.buffers[argument]
            extents = item.shape(self.shape)
            return ArgumentValue(
                TENSOR, DTYPES.index(item.format.name), len(extents), (ctypes.c_int64 * MAX_DIMS)(*extents),
                (ctypes.c_int64 * MAX_DIMS)(*strides(extents)), self.buffers[argument].address,
            )  # fmt: skip
        if argument == "None":
            return ArgumentValue(NOTHING)
        number = self.host_call.scalar(argument, self.shape)
        if isinstance(number, int):
            return ArgumentValue(INTEGER, integer=number, number=float(number))
        return ArgumentValue(NUMBER, integer=int(number), number=float(number))

    def _collect(self, results: Results, result: Call) -> None:
        """Collect the outputs: those that were arguments, and, in order, the returned tensors. Raises HostFailure."""
        arguments = {argument for argument in self.host_call.args if isinstance(argument, str)}
        values = iter(results.values[: results.count])
        for item in self.contract.outputs:
            if item.name in arguments:
                result.outputs[item.name] = self.buffers[item.name].download()
                continue
            if (value := next(values, None)) is None:
                raise HostFailure(f"{self.host_call.function} returned {results.count} tensors, none for {item.name}")
            result.outputs[item.name] = self._returned_bits(value, item, result)

    def _returned_bits(self, value: ArgumentValue, item: ContractBuffer, result: Call) -> Array:
        """The bits of a returned tensor. The tensor comes from untrusted code, so all of it is checked.

        Raises HostFailure for a wrong type or number of elements, or memory that does not belong to the device.
        """
        kind, sizes = DTYPES[value.dtype], tuple(value.sizes[: value.dims])
        # ``value.strides`` has MAX_DIMS entries; those beyond the tensor's dimensions do not matter.
        if any(n > 1 and a != b for n, a, b in zip(sizes, value.strides, strides(sizes), strict=False)):
            raise HostFailure(f"{item.name} is not contiguous")
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
