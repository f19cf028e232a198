"""A device of CPU tensors that runs no kernel, and a pack for it, to test the host's part of a call."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from cudal2gen import pack
from cudal2gen.kernel import Sm80Multistage
from cudal2gen.launch.gpu import GpuError
from cudal2gen.operators.call_native import CallPlace
from cudal2gen.operators.meter import Meter
from kernelproof.ground.chips import CardFacts
from tests.cudal2gen import idle_runtime, packed
from tests.cudal2gen.paths import small

if TYPE_CHECKING:
    import torch

# An invented stream.
STREAM = 0x77


class IdleDevice:
    """A ``devices.LaunchDevice``; ``native``: whether C++ may call it."""

    card, alone = CardFacts.of("NVIDIA A100", (8, 0), 108), True

    def __init__(self, folder: Path, native: bool = True) -> None:
        self.runtime_library = idle_runtime.build(folder)
        self.place = CallPlace(stream=STREAM) if native else None

    def runtime(self, cuda: int) -> Path:
        """The idle runtime, whatever CUDA is asked for."""
        return self.runtime_library

    def stream(self) -> int:
        """The stream of all calls."""
        return STREAM

    def empty(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """A tensor of the CPU."""
        return like.new_empty(shape)

    def capturing(self) -> bool:
        """No stream is captured."""
        return False

    def meter(self) -> Meter:
        """Raises GpuError: nothing can be timed."""
        raise GpuError("it has no clock")

    def current(self) -> AbstractContextManager[None]:
        """Nothing needs to be made current."""
        return nullcontext()


def records(*fusions: str) -> list[Sm80Multistage]:
    """A kernel for each layout, plain and with each of ``fusions``."""
    return [
        small(acc="f32", padding="predicate", layout=layout, k=128, fusion=fusion)
        for fusion in ("none", *fusions)
        for layout in ("tn", "nn")
    ]


def open_pack(folder: Path, *fusions: str) -> pack.Pack:
    """A pack of ``records``."""
    return pack.open_pack(packed.folder(packed.table(records(*fusions)), folder / "pack", with_ptx=False))
