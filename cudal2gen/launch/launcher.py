"""Calls the generic launcher from Python: opens a built kernel and launches it on device pointers (launcher.cpp)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import TracebackType

from cudal2gen.kernel.launch import Batches, Groups
from kernelproof.ground.errors import Failure

TORCH_LIBRARY = "libcudal2gen_torch.so"  # torch_launcher.cpp, see operators.call_native
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
SINGLE = Batches()  # a single product
# Types of C arguments: the kernel's handle, a, lda, b, ldb, d, ldd, m, n, k; then the fused operands, the workspace and
# the stream.
_OPERANDS = (_POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _INT, _INT, _INT)
_LAUNCH = (*_OPERANDS, _POINTER, _POINTER, _POINTER)


class _Batches(ctypes.Structure):
    """``Batches`` of sized.h."""

    _fields_ = [("count", _INT), *((name, ctypes.c_int64) for name in ("a", "b", "d", "bias", "c", "aux"))]


class _Groups(ctypes.Structure):
    """``Groups`` of launch.h."""

    _fields_ = [("ends", _POINTER), ("count", _INT), ("b", ctypes.c_int64), ("bias", ctypes.c_int64)]


class Sized(ctypes.Structure):
    """``cudal2gen_sized`` of sized.h."""

    _fields_ = [
        ("kernel", _POINTER),
        *((name, _INT) for name in ("lda", "ldb", "ldd", "m", "n", "k")),
        ("batches", _Batches),
    ]


class Fused(ctypes.Structure):
    """``cudal2gen_fused`` of sized.h: the operands of a fused kernel besides A, B and D.

    ``bias``, ``c`` and ``aux`` are addresses, 0 if the kernel has no such part. Leading dimensions count elements.
    """

    _fields_ = [
        *(("bias", _POINTER), ("c", _POINTER), ("ldc", _INT), ("alpha", _FLOAT), ("beta", _FLOAT)),
        *(("aux", _POINTER), ("ldaux", _INT)),
    ]


class LaunchError(Failure):
    """The launcher or the CUDA runtime refused; ``code`` is the cudaError_t."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{message} (cudaError {code})")
        self.code = code


class OpenKernel:
    """A built kernel, opened for the current device of one CUDA runtime.

    ``library`` is the launcher, ``directory`` a built kernel, ``options`` its record's ``launch_options``, ``runtime``
    the CUDA runtime library, by default the system's (``torch_range.RUNTIME``). Raises LaunchError.
    """

    def __init__(
        self, library: Path, directory: Path, options: dict[str, int] | None = None, runtime: Path | None = None
    ) -> None:
        self._api = ctypes.CDLL(str(library))
        self._api.cudal2gen_message.restype = ctypes.c_char_p
        self._api.cudal2gen_launch_fused.argtypes = _LAUNCH
        self._api.cudal2gen_launch_batched.argtypes = (*_OPERANDS, _POINTER, _POINTER, _POINTER, _POINTER)
        self._api.cudal2gen_launch_grouped.argtypes = (*_OPERANDS, _POINTER, _POINTER, _POINTER)
        self._api.cudal2gen_batch_workspace_bytes.argtypes = (_POINTER, _INT, _INT, _INT, _INT)
        self._api.cudal2gen_batch_workspace_bytes.restype = ctypes.c_int64
        self._api.cudal2gen_close.argtypes = (_POINTER,)
        self._handle = ctypes.c_void_p()
        text = " ".join(f"{name}={value}" for name, value in (options or {}).items())
        self.check(
            self._api.cudal2gen_open(
                os.fsencode(directory),
                text.encode(),
                os.fsencode(runtime) if runtime else None,
                ctypes.byref(self._handle),
            )
        )

    def workspace_bytes(self, m: int, n: int, k: int, count: int = 1) -> int:
        """Bytes of scratch memory, aligned to 256, that a launch of ``count`` products of this size needs."""
        return int(self._api.cudal2gen_batch_workspace_bytes(self._handle, m, n, k, count))

    def counters(self) -> tuple[int, int]:
        """Address and bytes of the counters that launches of this kernel leave at zero; no bytes if it has none."""
        counters, address = self._api.cudal2gen_counters, _POINTER()  # looked up here: libraries of old packs lack it
        counters.argtypes, counters.restype = (_POINTER, ctypes.POINTER(_POINTER)), ctypes.c_int64
        size = int(counters(self._handle, ctypes.byref(address)))
        return address.value or 0, size

    def launch(
        self,
        a: int,
        lda: int,
        b: int,
        ldb: int,
        d: int,
        ldd: int,
        m: int,
        n: int,
        k: int,
        workspace: int = 0,
        stream: int = 0,
        fused: Fused | None = None,
        batches: Batches = SINGLE,
        groups: Groups | None = None,
    ) -> None:
        """Enqueues D = A B on the stream, for each product of a batch or for ``groups`` of rows of A.

        ``fused``: the further operands of a fused kernel. Pointers are device addresses, leading dimensions count
        elements. Raises LaunchError if the kernel or the runtime refuses, and for numbers that do not fit a C int.
        """
        self._check_extents(lda, ldb, ldd, m, n, k)
        operands = (self._handle, a, lda, b, ldb, d, ldd, m, n, k)
        extra = None if fused is None else ctypes.byref(fused)
        if groups is not None:
            self._check_several("groups", groups.products, groups.b, groups.bias)
            several = ctypes.byref(_Groups(*groups))
            self.check(self._api.cudal2gen_launch_grouped(*operands, several, extra, stream))
        elif batches == SINGLE:
            self.check(self._api.cudal2gen_launch_fused(*operands, extra, workspace, stream))
        else:
            self._check_several("products", *batches)
            batch = ctypes.byref(_Batches(*batches))
            self.check(self._api.cudal2gen_launch_batched(*operands, batch, extra, workspace, stream))

    def bound(
        self, a: int, lda: int, b: int, ldb: int, d: int, ldd: int, m: int, n: int, k: int, workspace: int = 0,
        fused: Fused | None = None,
    ) -> Callable[[int], int]:  # fmt: skip
        """``launch`` with fixed operands, as a function that takes a stream and returns a code for ``check``."""
        self._check_extents(lda, ldb, ldd, m, n, k)
        values = (self._handle.value or 0, a, lda, b, ldb, d, ldd, m, n, k)
        # Converted here once, because ctypes would convert them at every call.
        converted = [kind(value) for kind, value in zip(_LAUNCH, values, strict=False)]
        operands = None if fused is None else ctypes.byref(fused)
        return partial(self._api.cudal2gen_launch_fused, *converted, operands, _POINTER(workspace))

    @staticmethod
    def _check_extents(lda: int, ldb: int, ldd: int, m: int, n: int, k: int) -> None:
        """Raises LaunchError for numbers that do not fit a C int."""
        if not all(0 <= number < 2**31 for number in (lda, ldb, ldd, m, n, k)):
            raise LaunchError(1, f"a size or leading dimension of {m}_{n}_{k} is out of range")

    @staticmethod
    def _check_several(noun: str, count: int, *strides: int) -> None:
        """Raises LaunchError for a number of products, or a stride, that C's types do not hold."""
        if not (1 <= count < 2**31 and all(0 <= stride < 2**63 for stride in strides)):
            raise LaunchError(1, f"a batch of {count} {noun} or one of its strides is out of range")

    def sized(
        self, lda: int, ldb: int, ldd: int, m: int, n: int, k: int, batches: Batches = SINGLE
    ) -> Callable[[int, int, int, int, int], int]:
        """``launch`` with fixed sizes, as a function of a, b, d, workspace (addresses) and stream that returns a code
        for ``check``.

        Sizes are converted only once, because ctypes takes time for every argument. ``batches``: products of these
        sizes, evenly spaced in a, b and d.
        """
        sizes = self._sizes(lda, ldb, ldd, m, n, k, batches)
        call = self._api.cudal2gen_launch_sized
        call.argtypes = (_POINTER,) * 6
        address = _POINTER(ctypes.addressof(sizes))

        def launch(a: int, b: int, d: int, workspace: int, stream: int, _keep: Sized = sizes) -> int:
            return int(call(address, a, b, d, workspace, stream))

        return launch

    def sized_call(
        self, lda: int, ldb: int, ldd: int, m: int, n: int, k: int, batches: Batches = SINGLE
    ) -> tuple[int, bytes]:
        """``sized`` for callers in C++: the address of the C function, and the bytes to which its first argument
        points.

        Both are valid while the kernel is open.
        """
        return _address(self._api.cudal2gen_launch_sized), bytes(self._sizes(lda, ldb, ldd, m, n, k, batches))

    @property
    def fused_call(self) -> int:
        """The address of the C function that launches a fused kernel, valid while the kernel is open."""
        return _address(self._api.cudal2gen_launch_fused)

    def _sizes(self, lda: int, ldb: int, ldd: int, m: int, n: int, k: int, batches: Batches) -> Sized:
        """The sizes as the C function takes them. Raises LaunchError for numbers that do not fit a C int."""
        self._check_extents(lda, ldb, ldd, m, n, k)
        self._check_several("products", *batches)
        return Sized(self._handle.value, lda, ldb, ldd, m, n, k, _Batches(*batches))

    def close(self) -> None:
        """Unloads the kernel, which must not be used afterwards."""
        if self._handle:
            self.check(self._api.cudal2gen_close(self._handle))
            self._handle = ctypes.c_void_p()

    def __enter__(self) -> OpenKernel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # On a stopped device unloading fails too; the error that stopped it is the one to report.
        with suppress(LaunchError) if value else nullcontext():
            self.close()

    def check(self, code: int) -> None:
        """Raises LaunchError if the code is not 0."""
        if code:
            raise LaunchError(code, self._api.cudal2gen_message().decode())


def _address(function: object) -> int:
    """The address of a C function."""
    address = ctypes.cast(function, _POINTER).value  # type: ignore[arg-type]  # a function that ctypes found
    assert address is not None
    return address
