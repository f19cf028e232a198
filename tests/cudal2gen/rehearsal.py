"""A stand-in for a card, for rehearsals of measurements: the emulator executes kernels, and times are invented.

``CUDAL2GEN_GPU=tests.cudal2gen.rehearsal:H200`` stands for the CUDA device in every command; ``H100`` is the other
card. Names and clocks are the cards', so that records, stores and plans are those of the real day; what it stores says
``rehearsal`` in its environment, and its figures mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cudal2gen.kernel import Problem
from cudal2gen.launch import gpu
from cudal2gen.launch.gpu import Call, CardReading
from cudal2gen.launch.operands import Operands, draw
from cudal2gen.results import Environment
from kernelproof import emulator
from kernelproof.ground import chips
from kernelproof.ground.chips import GPUS, CardFacts
from tests.cudal2gen import vendor
from tests.cudal2gen.devices import ENVIRONMENT
from tests.cudal2gen.emulated import STREAM, StreamSession, allocate

if TYPE_CHECKING:
    import torch

LAUNCH_US = 8.0  # duration of every call by the stand-in clock
SYNCHRONIZE_US = 5000.0  # long, so that protocols that time the host take few samples


class Rehearsal(gpu.Gpu):
    """A ``gpu.Gpu`` on the emulator. Its clock advances by ``LAUNCH_US`` for every call that it times.

    ``CARD``: its name. ``MEMORY``: the clock of its device memory in MHz, and the bus width in bits.
    """

    CARD: str
    MEMORY: tuple[int, int]

    def __init__(self, index: int = 0) -> None:
        if index:
            raise gpu.GpuError(f"--gpu NAME:{index}: there is 1 CUDA device, counted from 0")
        self._memory = emulator.Memory()
        chip = emulator.Device.of(GPUS[self.model])
        self._emulated = replace(chip, name=self.CARD, sm_count=2, threads_per_sm=512)
        self._session = StreamSession(self._memory, self._emulated, emulator.Options(hazards=False))
        self._session.__enter__()
        self._time = 0.0
        vendor.install(pytest.MonkeyPatch(), lambda _us, _name: None)

    @property
    def facts(self) -> CardFacts:
        """The facts that a driver would report of the card."""
        model = chips.model_of(self.CARD)
        assert model is not None
        return CardFacts.of(self.CARD, GPUS[model].capability.number, GPUS[model].sms)

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability."""
        return self._emulated.capability

    @property
    def name(self) -> str:
        """The driver's name for the card."""
        return self.CARD

    @property
    def runtime_library(self) -> Path:
        """The emulator's CUDA runtime."""
        return emulator.runtime_path()

    @property
    def environment(self) -> Environment:  # type: ignore[override]
        """The environment of measurements, whose id begins with ``rehearsal``."""
        mhz, bits = self.MEMORY
        facts = {"gpu": self.model, "name": self.CARD, "max_memory_mhz": mhz, "memory_bus_bits": bits}
        identity = {"id": f"rehearsal-{self.model}", "l2_bytes": self._emulated.l2_bytes}
        return ENVIRONMENT.model_copy(update=identity | facts)

    def reading(self) -> CardReading:
        """Invented clocks in MHz, watts and degrees Celsius."""
        return CardReading(1755, self.MEMORY[0], 650.0, 60, frozenset())

    def stream(self) -> int:
        """The handle of the device's stream."""
        return STREAM

    def empty(self, *shape: int) -> torch.Tensor:
        """An fp16 tensor in the emulator's memory."""
        return allocate(self._memory, *shape)

    def operands(self, problem: Problem, count: int, seed: int, products: int = 1) -> list[Operands]:
        """``count`` references to one set of operands, since nothing here depends on addresses."""
        import torch

        (drawn,) = draw(problem, 1, torch.Generator().manual_seed(seed), "cpu", products)
        placed = {}
        for name, value in drawn.__dict__.items():
            placed[name] = value
            if isinstance(value, torch.Tensor):
                words = value.element_size() // 2
                placed[name] = self.empty(*value.shape[:-1], value.shape[-1] * words).view(value.dtype)
                placed[name].copy_(value)
        return [Operands(**placed)] * count

    def hold(self) -> None:
        """Does nothing: launches on this stream are done when they return."""

    def wait(self) -> None:
        """Raises RuntimeError if a launch has failed; launches are done when they return."""
        if self._session.errors:
            raise RuntimeError(f"CUDA error: {self._session.errors[0]}")

    def synchronize(self) -> None:
        """Does what was launched on other streams, and takes ``SYNCHRONIZE_US``."""
        for step in self._session.later:
            step()
        self._session.later.clear()
        self._time += SYNCHRONIZE_US * 1e-6

    def capture(self, calls: Sequence[Call]) -> Call:
        """A replay that executes the first call and takes the time of all, since all compute one product on the same
        operands."""

        def replay() -> None:
            calls[0]()
            self._time += LAUNCH_US * len(calls) * 1e-6

        return replay

    def elapsed_us(self, run: Call, before: Callable[[], None]) -> float:
        """The time that ``run`` takes by the clock, at least ``LAUNCH_US``."""
        before()
        start = self._time
        run()
        if self._time == start:
            self._time += LAUNCH_US * 1e-6
        return (self._time - start) * 1e6

    def evict(self) -> None:
        """Takes 45 us, about as long as a write of an L2 cache."""
        self._time += 45e-6

    def now(self) -> float:
        """The seconds of the clock, of which reading it takes 1 us."""
        self._time += 1e-6
        return self._time

    def sleep(self, seconds: float) -> None:
        """Advances the clock."""
        self._time += seconds


class H200(Rehearsal):
    """The H200."""

    CARD, MEMORY = "NVIDIA H200", (3201, 6144)


class H100(Rehearsal):
    """The H100 with HBM3."""

    CARD, MEMORY = "NVIDIA H100 80GB HBM3", (2619, 5120)
