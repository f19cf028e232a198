"""A stand-in for a GPU: tensors on the CPU, and a clock that only advances by its own work."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from cudal2gen.kernel import Problem, Record
from cudal2gen.launch.gpu import Absent, Call, CardReading, KernelContender, Race
from cudal2gen.launch.operands import Operands, draw
from cudal2gen.results import Environment

# An H200 with invented facts.
ENVIRONMENT = Environment(
    id="fake", gpu="h200", name="NVIDIA H200", capability="9.0", sms=132, l2_bytes=1 << 16, memory_bytes=1 << 37,
    max_sm_mhz=1980, max_memory_mhz=3201, memory_bus_bits=6144, power_limit_w=700.0, ecc=True, driver="580.1",
    versions={"torch": "2"},
)  # fmt: skip


class FakeDevice:
    """A ``gpu.MeasuringDevice`` whose clock only advances by ``spend`` and ``sleep``.

    ``drift``: the share by which the device slows down with every second of its own time. ``log``: what took time.
    """

    def __init__(self, drift: float = 0.0, environment: Environment = ENVIRONMENT) -> None:
        self.environment = environment
        self.time = 0.0
        self.drift = drift
        self.evictions = 0
        self.capturing = False
        self.log: list[str] = []
        self._products: dict[int, Any] = {}

    def spend(self, us: float, name: str = "") -> None:
        """Takes time on the clock. ``name``: what takes it, for ``log``."""
        self.time += us * (1 + self.drift * self.time) * 1e-6
        self.log.append(name)

    def stream(self) -> int:
        """An invented handle."""
        return 7

    def empty(self, *shape: int) -> Any:
        """A tensor that is aligned as on a GPU."""
        import torch

        size = math.prod(shape)
        buffer = torch.full((size + 128,), float("nan"), dtype=torch.float16)
        start = -buffer.data_ptr() % 256 // 2
        return buffer[start : start + size].reshape(shape)

    def operands(self, problem: Problem, count: int, seed: int, products: int = 1) -> list[Operands]:
        """``count`` sets of operands on the CPU, drawn by a seed."""
        import torch

        self._products.clear()
        return draw(problem, count, torch.Generator().manual_seed(seed), "cpu", products)

    def product(self, operands: Operands) -> Any:
        """The product of operands, computed once for all contenders."""
        key = operands.a.data_ptr()
        if key not in self._products:
            self._products[key] = (operands.a.float() @ operands.b_nn.float()).half()
        return self._products[key]

    def capture(self, calls: Sequence[Call]) -> Call:
        """A replay that makes the calls."""

        def replay() -> None:
            for call in calls:
                call()

        return replay

    def elapsed_us(self, run: Call, before: Call) -> float:
        """The microseconds of ``run`` on the clock, after ``before``."""
        before()
        start = self.time
        run()
        return (self.time - start) * 1e6

    def evict(self) -> None:
        """Counts an eviction of the L2, which takes 45 us."""
        self.evictions += 1
        self.spend(45.0, "evict")

    def synchronize(self) -> None:
        """Takes 1 us."""
        self.time += 1e-6

    def now(self) -> float:
        """The seconds of the clock."""
        return self.time

    def sleep(self, seconds: float) -> None:
        """Advances the clock."""
        self.log.append("sleep")
        self.time += seconds

    def reading(self) -> CardReading:
        """A reading of clocks and power, which is throttled after the first second."""
        return CardReading(1755, 3201, 650.0, 60, frozenset({"SwPowerCap"} if self.time > 1 else ()))


class FakeProduct:
    """A contender that computes with torch and takes ``us`` microseconds with relative noise ``noise``.

    ``faulty``: called after each launch with the operands and the number of launches so far, to spoil the result.
    ``absent``: the reason for which it cannot run, "" if it can.
    """

    detail = "a fake"

    def __init__(
        self,
        device: FakeDevice,
        name: str,
        us: float | Callable[[Problem], float],
        noise: float = 0.0,
        faulty: Callable[[Operands, int], None] | None = None,
        absent: str = "",
    ) -> None:
        self.device, self.name, self.noise, self.faulty, self.absent = device, name, noise, faulty, absent
        self.us = us
        self.rng = random.Random(name)
        self.launches = 0

    def prepare(self, problem: Problem, race: Race) -> None:
        """Sets the time of a call, or raises Absent with the reason ``absent``."""
        if self.absent:
            raise Absent(self.absent)
        self.cost = self.us(problem) if callable(self.us) else self.us

    def bind(self, operands: Operands) -> Call:
        """A call that stores the product, lets ``faulty`` spoil it, and takes its time."""
        product = self.device.product(operands)

        def call() -> None:
            self.launches += 1
            operands.d.copy_(product)
            if self.faulty:
                self.faulty(operands, self.launches)
            self.device.spend(self.cost * (1 + self.noise * self.rng.uniform(-1, 1)), self.name)

        return call


class FakeKernel(FakeProduct, KernelContender):
    """A ``FakeProduct`` that stands for a built kernel. ``copies_us``: the cost of padding, None for no padding."""

    def __init__(
        self, device: FakeDevice, record: Record, us: float, copies_us: float | None = None, **options: Any
    ) -> None:
        FakeProduct.__init__(self, device, "cudal2gen", us, **options)
        self.record, self.copies_us = record, copies_us
        self.digest = record.name

    def stages(self, operands: Operands) -> tuple[Call, Call | None]:
        """The call, and one that only copies for padding."""
        if self.copies_us is None:
            return self.bind(operands), None
        spent = self.copies_us
        return self.bind(operands), lambda: self.device.spend(spent, "copies")

    def close(self) -> None:
        """Notes the end in the log of the device."""
        self.device.log.append("closed")
