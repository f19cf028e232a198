"""Devices on which kernels are launched: a CUDA device of torch, and what tests put in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cudal2gen.launch.gpu import card_facts, runtime
from cudal2gen.operators.call_native import MemoryPlace
from cudal2gen.operators.meter import CudaMeter, Meter
from kernelproof.ground.chips import CardFacts

if TYPE_CHECKING:
    import torch


class LaunchDevice(Protocol):
    """What a device must offer to be launched on."""

    @property
    def card(self) -> CardFacts:
        """The facts that decide which kernels run there and which measurements count."""
        ...

    def runtime(self, cuda: int) -> Path:
        """The CUDA runtime for kernels of this CUDA's major version. Raises GpuError if there is none."""
        ...

    @property
    def alone(self) -> bool:
        """Whether it is the only device, and thus always the current one."""
        ...

    @property
    def stream(self) -> Callable[[], int]:
        """A function that returns the current stream."""
        ...

    def empty(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Memory for elements of the tensor's type."""
        ...

    @property
    def place(self) -> MemoryPlace | None:
        """The device for calls from C++; None if C++ cannot allocate its memory."""
        ...

    def capturing(self) -> bool:
        """Whether a graph is captured by its current stream or by that of the current device: waiting for one device
        may end a capture on another."""
        ...

    def meter(self) -> Meter:
        """Its clock. Raises GpuError if none can be read."""
        ...

    def current(self) -> AbstractContextManager[None]:
        """A context in which it is the current device."""
        ...


class Cuda:
    """A CUDA device of torch."""

    def __init__(self, index: int) -> None:
        import torch

        self._torch, self._index = torch, index
        self.card = card_facts(torch.cuda.get_device_properties(index))
        self.alone = torch.cuda.device_count() == 1
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.stream: Callable[[], int] = partial(raw or _current_stream, index)
        self.place = MemoryPlace(index, guard=not self.alone)

    def runtime(self, cuda: int) -> Path:
        return runtime(cuda)

    def empty(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        return like.new_empty(shape)

    def meter(self) -> Meter:
        return CudaMeter(self._index)

    def capturing(self) -> bool:
        # torch tells it of the current device only, so that device and this one are asked in turn.
        captures = self._torch.cuda.is_current_stream_capturing
        if captures() or self.alone:
            return bool(captures())
        with self.current():
            return bool(captures())

    @contextmanager
    def current(self) -> Iterator[None]:
        with self._torch.cuda.device(self._index):
            yield


def _current_stream(index: int) -> int:
    import torch

    return int(torch.cuda.current_stream(index).cuda_stream)


class StaleMemory:
    """A device whose memory is NaN of every type, all bits set: a result that a kernel does not write shows."""

    def __init__(self, device: LaunchDevice) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def empty(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """See ``LaunchDevice.empty``."""
        import torch

        memory = self._device.empty(like, *shape)
        memory.view(torch.uint8).fill_(255)
        return memory
