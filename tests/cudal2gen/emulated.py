"""A device whose torch tensors are in the emulator's memory: real launches and matrices without a GPU.

Work on the device's own stream is done at once. Work on another stream takes effect when the whole device is
synchronised, which a verdict does not do. This order is legal, and a kernel that relies on another order fails.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cudal2gen.generation.compiler import Artifact
from cudal2gen.kernel import Record
from cudal2gen.launch.gpu import KernelContender
from cudal2gen.validator.emulated import device_of
from kernelproof import emulator
from kernelproof.ground.chips import GPUS, CardFacts

if TYPE_CHECKING:
    import torch

    from cudal2gen.operators.call_native import CallPlace

STREAM, OTHER_STREAM = 0xABC0, 0xDEF0  # invented addresses of the device's own stream and of another one


class StreamSession(emulator.Session):
    """A session in which launches on another stream take effect when the device is synchronised."""

    def __init__(self, memory: emulator.Memory, device: emulator.Device, options: emulator.Options) -> None:
        super().__init__(emulator.SessionPolicy(device, options), memory)
        self.later: list[Callable[[], None]] = []

    def launch(self, words: Any) -> int:
        """Executes a launch, whose stream is ``words[9]``. On another stream, what it writes is put off."""
        if int(words[9]) == STREAM:
            return super().launch(words)
        before = [(buffer, buffer.bytes().copy()) for buffer in self.memory.buffers]
        code = super().launch(words)
        for buffer, content in before:
            after = buffer.bytes().copy()
            if not np.array_equal(after, content):
                self.later.append(partial(_replace_bytes, buffer, after))
                buffer.bytes()[:] = content
        return code


def _replace_bytes(buffer: emulator.Buffer, content: Any) -> None:
    """Replaces a buffer's bytes."""
    buffer.bytes()[:] = content


def allocate(memory: emulator.Memory, *shape: int) -> torch.Tensor:
    """An fp16 tensor in the emulator's memory, filled with NaN. Its memory is freed with it."""
    import torch

    size = int(np.prod(shape))
    if not size:
        return torch.empty(shape, dtype=torch.float16)
    buffer = memory.allocate(2 * size, "inout")
    content = buffer.bytes()
    content[:] = 0xFF
    weakref.finalize(content, memory.free, buffer)
    return torch.from_numpy(content).view(torch.float16).view(shape)


class EmulatedDevice:
    """A ``validator.device.VerdictDevice`` for a ``with`` statement.

    ``record``: a kernel whose GPU is emulated. ``hazards``: whether the emulator looks for races. ``rounding``: how its
    tensor cores round. ``holds``, ``checked``: how often ``hold`` and ``check`` were called.
    """

    model = "emulated"

    def __init__(self, record: Record, hazards: bool = False, rounding: emulator.RoundingName = "model") -> None:
        self.memory = emulator.Memory()
        options = emulator.Options(hazards=hazards, rounding=rounding)
        self.session = StreamSession(self.memory, device_of(record), options)
        self.holds = self.checked = 0

    def __enter__(self) -> EmulatedDevice:
        self.session.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.session.__exit__(None, None, None)

    def stream(self) -> int:
        return STREAM

    def empty(self, *shape: int) -> torch.Tensor:
        return allocate(self.memory, *shape)

    def check(self, record: Record) -> None:
        self.checked += 1

    def hold(self) -> None:
        self.holds += 1

    def wait(self) -> None:
        if self.session.errors:
            raise RuntimeError(f"CUDA error: {self.session.errors[0]}")

    def synchronize(self) -> None:
        """Waits until all streams are done."""
        for step in self.session.later:
            step()
        self.session.later.clear()

    @property
    def runtime_library(self) -> Path:
        return emulator.runtime_path()

    def open(
        self, record: Record, artifact: Artifact, library: Path, stream: Callable[[], int] | None = None
    ) -> KernelContender:
        """Opens a built kernel on this device, for its stream or another one."""
        return KernelContender(
            record, artifact.directory, library, stream or self.stream, self.runtime_library, empty=self.empty
        )

    def capture(self, calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
        def replay() -> None:
            for call in calls:
                call()

        return replay


def card_of(model: str) -> CardFacts:
    """The facts that the driver of a model of ``GPUS`` reports."""
    chip = GPUS[model]
    return CardFacts.of(f"NVIDIA {chip.title}", chip.capability.number, chip.sms)


class OperatorDevice:
    """A ``devices.LaunchDevice`` for operators on an emulated device. ``card``: the facts that it reports, or the name
    of a model in ``GPUS``."""

    def __init__(self, device: EmulatedDevice, card: str | CardFacts) -> None:
        self.device, self.card = device, card_of(card) if isinstance(card, str) else card
        self.alone = True
        self.captures = False
        self.place: CallPlace | None = None  # the memory is the emulator's

    def runtime(self, cuda: int) -> Path:
        return self.device.runtime_library

    def stream(self) -> int:
        return self.device.stream()

    def empty(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        return self.device.empty(*shape[:-1], shape[-1] * like.element_size() // 2).view(like.dtype)

    def capturing(self) -> bool:
        return self.captures

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()
