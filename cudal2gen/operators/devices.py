"""Defines the protocol of devices on which kernels are launched, and the class of torch's CUDA devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cudal2gen.launch.gpu import card_facts, runtime
from cudal2gen.operators.call_native import CallPlace
from cudal2gen.operators.meter import CudaMeter, Meter
from kernelproof.ground.chips import CardFacts

if TYPE_CHECKING:
    import torch


class LaunchDevice(Protocol):
    """A device on which kernels can be launched."""

    @property
    def card(self) -> CardFacts:
        """The facts that decide which kernels run there and which measurements count."""
        ...

    def runtime(self, cuda: int) -> Path:
        """The CUDA runtime for kernels of this CUDA's major version. Raises GpuError if there is none."""
        ...

    @property
    def alone(self) -> bool:
        """Whether this is the only device, and thus always the current one."""
        ...

    @property
    def stream(self) -> Callable[[], int]:
        """A function that returns the current stream."""
        ...

    def empty(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Uninitialised memory of this shape, for elements of the tensor's type."""
        ...

    @property
    def place(self) -> CallPlace | None:
        """Where C++ makes calls; None if C++ cannot allocate the device's memory."""
        ...

    def capturing(self) -> bool:
        """Whether the current stream of this device or of the current device captures a graph. Waiting for one device
        may end a capture on another, so both count."""
        ...

    def meter(self) -> Meter:
        """The device's clock. Raises GpuError if it cannot be read."""
        ...

    def current(self) -> AbstractContextManager[None]:
        """A context in which this is the current device."""
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
        self.place = CallPlace(index, guard=not self.alone)

    def runtime(self, cuda: int) -> Path:
        """See ``LaunchDevice``."""
        return runtime(cuda)

    def empty(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """See ``LaunchDevice``."""
        return like.new_empty(shape)

    def meter(self) -> Meter:
        """See ``LaunchDevice``."""
        return CudaMeter(self._index)

    def capturing(self) -> bool:
        """See ``LaunchDevice``."""
        # torch answers for the current device only, so this device is made the current one for a second question.
        captures = self._torch.cuda.is_current_stream_capturing
        if captures() or self.alone:
            return bool(captures())
        with self.current():
            return bool(captures())

    @contextmanager
    def current(self) -> Iterator[None]:
        """See ``LaunchDevice``."""
        with self._torch.cuda.device(self._index):
            yield


def _current_stream(index: int) -> int:
    """The handle of torch's current stream on a GPU."""
    import torch

    return int(torch.cuda.current_stream(index).cuda_stream)


class StaleMemory:
    """A device whose new memory has all bits set, which is NaN in every type, so that unwritten results are noticed."""

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
