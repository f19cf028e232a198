"""Replaces ``torch.utils.cpp_extension`` in a room (a sandboxed process).

The grader compiles an extension against a substitute for torch's C++ headers. Its host code runs in the room, and its
kernels run on the emulator. Operators of torch that the C++ code calls are executed by the real torch below the ledger,
so they are recorded as if Python had called them.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from kernelproof.emulator import EmulatorError, LaunchRefused
from kernelproof.grading.benchmarks.cuda_face import Unsupported
from kernelproof.grading.benchmarks.device import Compiler, RoomDevice
from kernelproof.grading.benchmarks.ledger import address
from kernelproof.grading.launcher import (
    DTYPES,
    ENTRY,
    INTEGER,
    INTEGERS,
    LIST,
    MAX_DIMS,
    NEEDS_TORCH,
    NOTHING,
    NUMBER,
    TENSOR,
    TYPE,
    ArgumentValue,
    Results,
)

TYPES = (  # in the order of ``launcher.DTYPES``, whose indices C++ uses
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
    torch.bool, torch.bfloat16,
)  # fmt: skip
assert len(TYPES) == len(DTYPES)
# Pybind's ``m.def("name", &function)``, and the beginning of any binding.
_FUNCTION_BINDING = re.compile(r"\b\w+\s*\.\s*def\s*\(\s*\"(\w+)\"\s*,\s*&?\s*([\w:]+)\s*[,)]")
_BINDING = re.compile(r"\b\w+\s*\.\s*def\s*\(")
_OPERATOR = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ArgumentValue), ctypes.c_int, ctypes.POINTER(Results)
)


class Extensions:
    """Makes the functions that replace those of ``torch.utils.cpp_extension``."""

    def __init__(self, device: RoomDevice, compiler: Compiler) -> None:
        self.device, self.compiler = device, compiler
        self.operator = _OPERATOR(self._operator)

    def load_inline(
        self, name: str, cpp_sources: str | Sequence[str], cuda_sources: str | Sequence[str] | None = None,
        functions: str | Sequence[str] | Mapping[str, str] | None = None, _extra_cflags: Any = None,
        extra_cuda_cflags: Sequence[str] | None = None, *_: Any, **__: Any,
    ) -> ModuleType:  # fmt: skip
        """Build an extension from texts and return its module. Raises RuntimeError if the compiler refuses them, as
        torch does."""
        cpp, cuda = _text(cpp_sources), _text(cuda_sources)
        if functions is None:
            bindings = dict(_FUNCTION_BINDING.findall(cpp + cuda))
            if len(bindings) != len(_BINDING.findall(cpp + cuda)):
                self._give_up(f"extension {name}: a binding that is no plain function")
        else:
            names = [functions] if isinstance(functions, str) else list(functions)
            bindings = {item: item for item in names}
            # torch puts the bindings after the C++ sources, which must declare what they bind.
            if missing := [item for item in names if not re.search(rf"\b{re.escape(item)}\b", cpp)]:
                raise RuntimeError(f"Error building extension '{name}': {missing[0]} was not declared in this scope")
        return self._module(name, f"{cpp}\n{cuda}", bindings, extra_cuda_cflags or ())

    def load(
        self, name: str, sources: str | Sequence[str], _extra_cflags: Any = None,
        extra_cuda_cflags: Sequence[str] | None = None, *_: Any, **__: Any,
    ) -> ModuleType:  # fmt: skip
        """Build an extension from files that the solution has written in its sandbox. ``sources``: their paths. Raises
        OSError for a file that is not there, and RuntimeError as ``load_inline`` does."""
        texts = []
        for path in [sources] if isinstance(sources, str) else sources:
            with open(path, encoding="utf-8") as file:  # noqa: PTH123
                texts.append(file.read())
        return self.load_inline(name, texts, None, None, None, extra_cuda_cflags)

    def _module(self, name: str, text: str, functions: Mapping[str, str], flags: Sequence[str]) -> ModuleType:
        """Let the grader compile a text and make a module of its functions. ``functions``: C++ names by Python name."""
        answer = self.compiler({"text": text, "functions": list(functions.values()), "flags": [str(f) for f in flags]})
        if reason := answer.get("missing"):
            self._give_up(f"extension {name}: {reason}")
        if reason := answer.get("refused"):
            raise RuntimeError(f"Error building extension '{name}': {reason}")
        library = ctypes.CDLL(str(answer["path"]))
        library.kernelproof_torch_is(self.operator)
        module = ModuleType(name)
        for number, function in enumerate(functions):
            entry = getattr(library, f"{ENTRY}{number}")
            setattr(module, function, self._function(function, entry, library.kernelproof_torch_release))
        return module

    def _give_up(self, reason: str) -> None:
        """Raise Unsupported, and keep the reason in case the solution catches it."""
        self.device.obstacles.append(reason)
        raise Unsupported(reason)

    def _function(self, name: str, entry: Callable[..., int], release: Callable[[], None]) -> Callable[..., Any]:
        """The Python function that calls ``entry``. ``release``: frees the results that C++ keeps for the caller."""

        def call(*args: Any) -> Any:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                return self._call(name, entry, release, args)

        call.__name__ = name
        return call

    def _call(self, name: str, entry: Callable[..., int], release: Callable[[], None], args: Sequence[Any]) -> Any:
        """Call a C++ function: copy its tensors to the device, call its ``entry``, and copy them and its results back.

        Raises RuntimeError for a C++ exception, LaunchRefused, and Unsupported for what is not emulated.
        """
        device = self.device
        used = {address(arg): arg for arg in args if isinstance(arg, torch.Tensor)} | device.pointer_tensors
        values = [self._value(arg) for arg in args]
        for tensor in device.pointer_tensors.values():
            device.upload(tensor)
        results = Results()
        with device.session() as emulated:
            code = entry((ArgumentValue * len(values))(*values), len(values), ctypes.byref(results))
            device.note_copies(used)
            device.download(used)
            out = [] if code else [self._tensor(value) for value in results.values[: results.count]]
            release()
        device.forget_freed()
        message = results.message.decode(errors="replace")
        for error in emulated.errors:
            self._give_up(f"{name}: {type(error).__name__}: {error}")
        if code == NEEDS_TORCH:
            self._give_up(f"{name}: {message}")
        if emulated.refusals and code:
            raise LaunchRefused(code, emulated.refusals[0])
        if code:
            raise RuntimeError(message)
        if results.form:
            return out if results.form == LIST else tuple(out)
        return out[0] if out else None

    def _value(self, arg: Any) -> ArgumentValue:
        """An argument for C++. Tensors are copied to the device. Raises Unsupported for other types."""
        if isinstance(arg, torch.Tensor):
            if arg.dtype not in TYPES or arg.dim() > MAX_DIMS:
                self._give_up(f"an argument of type {arg.dtype} with {arg.dim()} dimensions")
            return ArgumentValue(
                TENSOR, TYPES.index(arg.dtype), arg.dim(), (ctypes.c_int64 * MAX_DIMS)(*arg.shape),
                (ctypes.c_int64 * MAX_DIMS)(*arg.stride()), self.device.upload(arg),
            )  # fmt: skip
        if arg is None:
            return ArgumentValue(NOTHING)
        if isinstance(arg, torch.dtype) and arg in TYPES:
            return ArgumentValue(TYPE, TYPES.index(arg))
        if isinstance(arg, list | tuple) and len(arg) <= MAX_DIMS and all(isinstance(item, int) for item in arg):
            return ArgumentValue(INTEGERS, 0, len(arg), (ctypes.c_int64 * MAX_DIMS)(*arg))
        if isinstance(arg, int):
            return ArgumentValue(INTEGER, integer=arg, number=float(arg))
        if isinstance(arg, float):
            # C++ may read a number as an int64, too; one that does not fit is 0 there.
            return ArgumentValue(NUMBER, integer=int(arg) if abs(arg) < 1 << 62 else 0, number=arg)
        self._give_up(f"an argument of type {type(arg).__name__}")
        raise AssertionError

    def _tensor(self, value: ArgumentValue) -> Any:
        """The torch tensor that C++ describes by its address, sizes and strides."""
        sizes, strides = tuple(value.sizes[: value.dims]), tuple(value.strides[: value.dims])
        return self.device.tensor(sizes, strides, TYPES[value.dtype], value.data or 0)

    # --- operators that C++ calls ---

    def _operator(self, name: bytes, values: Any, count: int, results: Any) -> int:
        """Run an operator of torch for C++ code, on tensors of the device. Returns 0, or 1 with a message in
        ``results``, because no exception may pass through C."""
        try:
            arguments = [self._argument(values[number]) for number in range(count)]
            function = getattr(torch, name.decode(), None) or getattr(torch.Tensor, name.decode())
            with self.device.ledger:
                out = function(*arguments)
            if not isinstance(out, torch.Tensor):
                raise EmulatorError(f"torch.{name.decode()} with several results, in C++")
            out = out.contiguous()
            buffer = self.device.memory.allocate(out.untyped_storage().nbytes(), "scratch")
            self.device.storages[address(out)] = buffer, out
            self.device.ledger.kept.append(out)
            results[0].values[0] = self._value(out)
        except EmulatorError as error:
            self.device.obstacles.append(str(error))
            results[0].message = _message(str(error))
            return 1
        except BaseException as error:
            results[0].message = _message(f"{type(error).__name__}: {error}")
            return 1
        return 0

    def _argument(self, value: ArgumentValue) -> Any:
        """The Python value of an argument that C++ passes to an operator of torch."""
        if value.kind == TENSOR:
            tensor = self._tensor(value)
            self.device.note_copies(())
            return tensor
        if value.kind == INTEGERS:
            return list(value.sizes[: value.dims])
        if value.kind == TYPE:
            return TYPES[value.dtype]
        return {INTEGER: value.integer, NUMBER: value.number}.get(value.kind)


def _message(text: str) -> bytes:
    """The text as it fits into ``Results.message``, with a zero byte after it."""
    return text.encode()[: Results.message.size - 1]


def _text(sources: str | Sequence[str] | None) -> str:
    """The sources of an extension as one text."""
    return sources if isinstance(sources, str) else "\n".join(sources or ())
