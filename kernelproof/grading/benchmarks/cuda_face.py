"""Makes torch on a CPU look like torch with a GPU to the code in a room (a sandboxed process).

Tensors are in the CPU's memory and say that they are on ``cuda:0``. Streams, events and properties of the device are
substitutes. Work runs immediately here, so a missing synchronisation would not show in the results; the substitutes
therefore record the streams on which work was left without a wait for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kernelproof.emulator import Device

_CUDA = re.compile(r"cuda(:\d+)?")
# Bytes of the GPU's memory, and those of them that are free, as torch reports them for every device.
TOTAL_MEMORY, FREE_MEMORY = 80 << 30, 79 << 30
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Unsupported(Exception):
    """A solution needs a part of torch that only a GPU has, so it cannot be judged here."""


# The tensors whose elements Python has read.
HOST_READS: list[Any] = []
# The messages of all Unsupported exceptions, because a solution may have caught one.
OBSTACLES: list[str] = []


def _unsupported(what: str) -> Unsupported:
    """The exception for a part of torch that is missing, after its message was added to ``OBSTACLES``."""
    OBSTACLES.append(what)
    return Unsupported(what)


class CudaFace(TorchFunctionMode):  # type: ignore[misc] # torch's class is untyped
    """Answers questions about devices as on a machine with one GPU, and redirects work for it to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _HOST_READERS:
            HOST_READS.append(args[0])
        substitute = _SUBSTITUTES.get(func)
        if substitute is not None:
            return substitute(*args)
        args = tuple(redirected(value) for value in args)
        for name in kwargs:
            kwargs[name] = redirected(kwargs[name])
        if func in _PINNABLE_FACTORIES:
            kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def redirected(value: Any) -> Any:
    """The CPU if the value is a GPU, as a device or by name; otherwise the value itself."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and _CUDA.fullmatch(value) else value


# Functions of torch, with what is called in their place.
_SUBSTITUTES: dict[Any, Callable[..., Any]] = {
    torch.Tensor.device.__get__: lambda _: GPU,
    torch.Tensor.is_cuda.__get__: lambda _: True,
    torch.Tensor.is_cpu.__get__: lambda _: False,
    torch.Tensor.get_device: lambda _: 0,
    torch.Tensor.cuda: lambda tensor, *_: tensor,
    torch.Tensor.pin_memory: lambda tensor, *_: tensor,
    torch.Tensor.is_pinned: lambda *_: True,
    torch.Tensor.record_stream: lambda *_: None,
}
# Functions that give a tensor's elements to the host.
_HOST_READERS = frozenset((torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__))
# Functions that take ``pin_memory``, which memory of the CPU cannot have here.
_PINNABLE_FACTORIES = frozenset((torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn))


class Stream:
    """A substitute for a stream. ``unjoined``: whether work was given to it for which nothing has waited since."""

    default: Stream
    current: Stream

    def __init__(self, *_: Any, **__: Any) -> None:
        self.unjoined = False
        self.cuda_stream = 0
        self.device, self.device_index = GPU, 0

    def synchronize(self) -> None:
        self.unjoined = False

    def wait_stream(self, stream: Stream) -> None:
        """Counts the work of the other stream as waited for."""
        stream.unjoined = False

    def wait_event(self, event: Event) -> None:
        event.wait()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        self._outer, Stream.current = Stream.current, self
        return self

    def __exit__(self, *_: object) -> None:
        Stream.current = self._outer


Stream.default = Stream.current = Stream()


class Event:
    """A substitute for an event. The time between two events is always 1 ms."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or Stream.current

    def wait(self, _stream: Stream | None = None) -> None:
        if self.stream is not None:
            self.stream.unjoined = False

    def synchronize(self) -> None:
        self.wait()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: Event) -> float:
        return 1.0


STREAMS: list[Stream] = []  # all streams that the solution has made


def _new_stream(*args: Any, **kwargs: Any) -> Stream:
    STREAMS.append(Stream(*args, **kwargs))
    return STREAMS[-1]


def note_work() -> None:
    """Record that work was given to the current stream."""
    if Stream.current is not Stream.default:
        Stream.current.unjoined = True


def unjoined_streams() -> int:
    """How many streams have work for which nothing has waited."""
    return sum(stream.unjoined for stream in STREAMS)


def _synchronize(*_: Any) -> None:
    """A substitute for ``torch.cuda.synchronize``."""
    for stream in STREAMS:
        stream.unjoined = False


def _set_stream(stream: Stream) -> None:
    Stream.current = stream


class _StreamContext:
    """``torch.cuda.stream(s)`` as a context; s may be None."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream or Stream.current

    def __enter__(self) -> Stream:
        return self.stream.__enter__()

    def __exit__(self, *error: object) -> None:
        self.stream.__exit__(*error)


def _refusal(what: str) -> Callable[..., Any]:
    """A substitute for a function of torch that raises Unsupported when it is called."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise _unsupported(f"{what} needs a GPU")

    return refuse


class _Guard:
    """A context that does nothing, in place of ``torch.cuda.device(n)``."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def install(device: Device) -> None:
    """Replace what torch says about GPUs, for the rest of this process."""
    major, minor = device.capability
    properties = SimpleNamespace(
        name=device.name, major=major, minor=minor, multi_processor_count=device.sm_count, warp_size=32,
        total_memory=TOTAL_MEMORY, max_threads_per_multi_processor=device.threads_per_sm, L2_cache_size=device.l2_bytes,
        regs_per_multiprocessor=device.registers_per_sm, shared_memory_per_block=49152,
        shared_memory_per_block_optin=device.smem_optin_bytes, is_integrated=False, gcnArchName="",
        shared_memory_per_multiprocessor=device.smem_per_sm_bytes,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "is_initialized": lambda: True, "init": lambda: None, "set_device": lambda *_: None,
        "get_device_capability": lambda *_: device.capability, "get_device_name": lambda *_: device.name,
        "get_device_properties": lambda *_: properties, "is_bf16_supported": lambda *_, **__: True,
        "synchronize": _synchronize, "current_stream": lambda *_: Stream.current,
        "default_stream": lambda *_: Stream.default, "Stream": _new_stream, "ExternalStream": _new_stream,
        "stream": _StreamContext, "set_stream": _set_stream, "Event": Event, "device": _Guard, "device_of": _Guard,
        "empty_cache": lambda: None, "manual_seed": lambda *_: None, "manual_seed_all": lambda *_: None,
        "memory_allocated": lambda *_: 0, "max_memory_allocated": lambda *_: 0, "memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None, "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "mem_get_info": lambda *_: (FREE_MEMORY, TOTAL_MEMORY), "CUDAGraph": _refusal("torch.cuda.CUDAGraph"),
        "graph": _refusal("torch.cuda.graph"), "make_graphed_callables": _refusal("torch.cuda.make_graphed_callables"),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.nn.Module.cuda = lambda self, *_: self
    torch.compile = lambda model=None, **_: model if model is not None else (lambda inner: inner)
    torch.version.cuda = "12.8"
    torch.Generator = _Generator
    torch.autocast = torch.amp.autocast = torch.cuda.amp.autocast = _autocast


class _Generator(torch.Generator):  # type: ignore[misc] # torch has no types
    """A generator of random numbers on the CPU, even if the caller names the GPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, redirected(device))


def _autocast(*_: Any, enabled: bool = True, **__: Any) -> Any:
    """A substitute for ``torch.autocast``, which is unsupported unless it is disabled: on a GPU it changes the types of
    other operators than on a CPU."""
    if not enabled:
        return _Guard()
    raise _unsupported("torch.autocast, which changes the types of operators")


def answer_pointers(device_address: Callable[[Any], int]) -> None:
    """Have ``data_ptr`` return addresses of the emulated device: those that ``device_address`` returns for a tensor."""
    _SUBSTITUTES[torch.Tensor.data_ptr] = device_address
