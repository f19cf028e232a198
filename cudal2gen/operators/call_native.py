"""Connects ``torch_launcher.cpp``, a library that repeats planned calls without Python.

Python plans a call. If the plan is one launch on the tensors in place, or one operator of torch, Python also stores the
plan in C++. From then on C++ makes the calls of the same kind: it looks up the plan, counts the call, allocates D and
launches. If Python drops a plan, it is removed from C++ too. A process has one such library, from a pack or compiled on
this machine; without it, Python makes every call.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cudal2gen.launch.launcher import Sized
from cudal2gen.operators.plan_requests import Run
from kernelproof.ground.errors import UserError

if TYPE_CHECKING:
    import torch

VERSION = 2  # version of cudal2gen_plan and of the operators
NAMESPACE = "cudal2gen"
MAX_DIMENSIONS = 8  # most dimensions of D in a plan
# Kinds of a call's third operand. NONE: there is none. OUT: it is D. BIAS: it is a bias that the kernel or torch's
# operator adds. BIAS_AFTER: it is a bias that torch adds to the kernel's D.
NONE, OUT, BIAS, BIAS_AFTER = range(4)
_INT = ctypes.c_int64


class _Plan(ctypes.Structure):
    """The struct ``cudal2gen_plan`` of torch_launcher.cpp. A change of its fields changes ``VERSION``."""

    _fields_ = [
        *(("number", _INT), ("torch_operator", ctypes.c_char_p), ("torch_overload", ctypes.c_char_p)),
        *(("launch", ctypes.c_void_p), ("launch_fused", ctypes.c_void_p), ("sized", Sized)),
        *(("scratch", _INT), ("dims", _INT), ("sizes", _INT * MAX_DIMENSIONS), ("spans", _INT * 3)),
        *((name, ctypes.c_int32) for name in ("third", "fp32", "device", "guard")),
        ("stream", ctypes.c_void_p),
    ]


class CallPlace(NamedTuple):
    """Where calls run. ``device``: the CUDA device, on whose current stream calls run; or -1 for the given ``stream``.
    ``guard``: whether another device may be the current one, so that C++ must switch devices."""

    device: int = -1
    guard: bool = False
    stream: int = 0


class NativeLaunch(NamedTuple):
    """A kernel's launch.

    - ``function`` and ``sized``: the results of the kernel's ``sized_call``; ``fused``: that of its ``fused_call``.
    - ``scratch``: the size of its scratch memory, in elements of A's type.
    - ``shape``: the shape of D; ``fp32``: whether D is in fp32.
    - ``place``: where it runs.
    """

    function: int
    sized: bytes
    fused: int
    scratch: int
    shape: tuple[int, ...]
    fp32: bool
    place: CallPlace


class TorchCall(NamedTuple):
    """An operator of torch by its names."""

    operator: str
    overload: str = ""


class NativeCall:
    """A plan's call as C++ makes it: a launch, or an operator of torch.

    ``run``: the same call in Python. ``third``: the kind of its third operand. ``keep`` copies the plan to C++;
    afterwards both sides identify it by its number.
    """

    _numbers = count(1)

    def __init__(self, run: Run, call: NativeLaunch | TorchCall, third: int = NONE) -> None:
        self.run, self.third, self.kept = run, third, False
        self._plan = _Plan(next(self._numbers), third=third)
        if isinstance(call, TorchCall):
            self._plan.torch_operator, self._plan.torch_overload = call.operator.encode(), call.overload.encode()
            return
        self._plan.launch, self._plan.launch_fused = call.function, call.fused
        self._plan.sized = Sized.from_buffer_copy(call.sized)
        self._plan.scratch, self._plan.fp32 = call.scratch, call.fp32
        self._plan.dims, self._plan.sizes = len(call.shape), (_INT * MAX_DIMENSIONS)(*call.shape)
        self._plan.device, self._plan.guard, self._plan.stream = call.place

    def keep(self, operands: Sequence[torch.Tensor], kind: int, spans: tuple[int, int, int]) -> None:
        """Lets C++ make calls with tensors like these from now on: A, B, and the third operand if there is one.
        ``kind``: everything else that the plan depends on; ``spans``: see ``CallPlan``."""
        self._plan.spans = (_INT * 3)(*spans)
        plan = NATIVE.plan if len(operands) == 2 else NATIVE.plan_third
        plan(*operands, kind, ctypes.addressof(self._plan))
        self.kept = True

    def calls(self, drop: bool = False) -> int:
        """The number of calls that C++ made. ``drop``: C++ makes no further ones."""
        if not self.kept:
            return 0
        self.kept = not drop
        return NATIVE.calls(self._plan.number, drop)


class Native:
    """The library of a process, and its operators.

    - ``planned(a, b, kind)`` makes a call that has a plan and returns D. It returns None without a plan, and always
      under autocast. ``planned_biased(a, b, bias, kind)`` is the same with a bias.
    - ``planned_into(a, b, out, kind)`` writes D into ``out``, and returns whether it did.
    - ``state``: who makes calls, and why, in words.
    """

    def __init__(self) -> None:
        self.planned: Callable[[torch.Tensor, torch.Tensor, int], Any] = _unplanned
        self.planned_biased: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], Any] = _unplanned
        self.planned_into: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], Any] = _unplanned
        self.plan: Callable[..., Any] = _unplanned
        self.plan_third: Callable[..., Any] = _unplanned
        self.state = "not used yet"
        self._library: ctypes.CDLL | None = None
        self._on_cuda = False
        self._lock = threading.Lock()
        self._tried: set[Path | None] = set()

    def serves(self, place: CallPlace, file: Path | None) -> bool:
        """Whether C++ can make calls on a device. The first call connects the library: ``file``, or one that is
        compiled on this machine."""
        if self._library is None and file not in self._tried:
            with self._lock:
                # A library that failed is not tried again. Two libraries would define the same operators, so the first
                # one that connects is the only one.
                for library in (file, None):
                    if self._library is None and library not in self._tried:
                        self._tried.add(library)
                        self.state = self._connect(library)
        return self._library is not None and (place.device < 0 or self._on_cuda)

    @property
    def connected(self) -> bool:
        """Whether a library is connected, so that C++ can make calls."""
        return self._library is not None

    def calls(self, number: int, drop: bool) -> int:
        """The number of calls that a plan made. ``drop``: it makes no further ones."""
        return int(self._library.cudal2gen_torch_calls(number, int(drop))) if self._library is not None else 0

    def _connect(self, file: Path | None) -> str:
        """Loads a library and defines its operators; returns the resulting state in words."""
        try:
            if file is None:
                from cudal2gen.generation import compiler  # imported late: packs have the library, and it needs jinja2

                file = compiler.torch_launcher()
            library = ctypes.CDLL(str(file))
            version = library.cudal2gen_torch_version()
            if version != VERSION:
                return f"calls are Python's: {file} has version {version}, not {VERSION}"
            connect, on_cuda = library.cudal2gen_torch_connect, library.cudal2gen_torch_on_cuda
            calls, message = library.cudal2gen_torch_calls, library.cudal2gen_torch_message
            message.restype, calls.restype = ctypes.c_char_p, _INT
            calls.argtypes = (_INT, ctypes.c_int)
            operators = _operators()
            if connect(NAMESPACE.encode()):
                return f"calls are Python's: {message().decode()}"
        except (
            UserError,
            OSError,
            AttributeError,
            RuntimeError,
        ) as error:  # no library, one of another version, or another torch
            return f"calls are Python's: {error}"
        self._on_cuda = bool(on_cuda())
        # The library is set last, because threads without the lock take it as the sign that the functions are ready.
        for name, operator in operators.items():
            setattr(self, name, operator)
        self._library = library
        return f"calls are made by {file}"


def _unplanned(*_: Any) -> None:
    """Replaces the operators of C++ while no library is connected: no call has a plan."""


_LIBRARIES: list[Any] = []  # keeps the library of operators alive, and with it its operators
SCHEMAS = {  # of the operators in torch_launcher.cpp, by the names of ``Native``'s functions
    "planned": "(Tensor a, Tensor b, int kind) -> Tensor",
    "planned_biased": "(Tensor x, Tensor weight, Tensor bias, int kind) -> Tensor",
    "planned_into": "(Tensor a, Tensor b, Tensor(a!) out, int kind) -> bool",
    "plan": "(Tensor a, Tensor b, int kind, int plan) -> ()",
    "plan_third": "(Tensor a, Tensor b, Tensor third, int kind, int plan) -> ()",
}


def _operators() -> dict[str, Any]:
    """The operators of torch_launcher.cpp, as the functions that reach torch's dispatcher fastest."""
    import torch

    if not _LIBRARIES:
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        _LIBRARIES.append(library)
        for name, schema in SCHEMAS.items():
            library.define(f"_{name}{schema}")
            library.impl(f"_{name}", torch.library.fallthrough_kernel, "Autograd")
    overloads = {name: getattr(torch.ops.cudal2gen, f"_{name}").default for name in SCHEMAS}
    return {name: getattr(overload, "_op", overload) for name, overload in overloads.items()}


NATIVE = Native()
