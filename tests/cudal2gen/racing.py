"""A clock on which tests set the times of kernels, and processes on an emulated device that measure with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import WarningMessage

import pytest

from cudal2gen import pack, results
from cudal2gen.launch.gpu import GpuError
from kernelproof.ground.chips import CardFacts
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice
from tests.cudal2gen.measured import H200
from tests.packages import require

if TYPE_CHECKING:
    from cudal2gen.operators import dispatch
    from cudal2gen.operators.measuring import races
else:
    require("torch")
    from cudal2gen.operators import dispatch

import torch

# The environment of the emulated card.
A100 = H200.model_copy(
    update={
        "id": "emulated-a100",
        "gpu": "a100",
        "name": "NVIDIA A100",
        "capability": "8.0",
        "sms": 108,
        "max_sm_mhz": 1410,
    }
)
# m, n and k of a small product.
SIZES = (30, 24, 64)


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A test's own folder of results."""
    monkeypatch.setenv("CUDAL2GEN_RESULTS", str(tmp_path))
    return tmp_path


def library_warnings(warned: Iterable[WarningMessage]) -> list[str]:
    """The texts of the library's warnings. Others are left out: objects of other tests may warn when they are
    collected."""
    return [text for warning in warned if (text := str(warning.message)).startswith("cudal2gen: ")]


class Clock:
    """A meter of races by which a call takes the time that is set for the kernel that it launches, or for torch.

    ``times_us``: microseconds by the kernel's name, 250 for others; ``torch_us``: those of a call that launches none.
    ``seconds``: the time on this clock; ``evicted``: how often the L2 was made cold; ``busy``: set by a test to have a
    device that is not idle.
    """

    def __init__(self, device: EmulatedDevice, times_us: Mapping[str, float], torch_us: float) -> None:
        self.device, self.times_us, self.torch_us = device, times_us, torch_us
        self.environment, self.busy, self.seconds, self.evicted = A100, False, 0.0, 0

    def elapsed_us(self, call: Callable[[], object], times: int) -> float:
        """The device's time of ``times`` calls. Only one of them is made."""
        before = len(self.device.session.launches)
        call()
        launches = [launch.kernel for launch in self.device.session.launches[before:]]
        us = self.times_us.get(launches[0], 250.0) if launches else self.torch_us
        self.seconds += us * times / 1e6
        return us * times

    def host_us(self, call: Callable[[], object], times: int) -> float:
        """The host's time of ``times`` calls."""
        return 0.0

    def evict(self) -> None:
        """Counts that the L2 was made cold."""
        self.evicted += 1

    def synchronize(self) -> None:
        self.device.synchronize()

    def idle(self) -> bool:
        """Whether the device has no other work."""
        return not self.busy

    def now(self) -> float:
        """Seconds on this clock."""
        return self.seconds


class ClockedDevice(OperatorDevice):
    """An operators' device that measures by a test's clock; without a clock it cannot measure."""

    def __init__(self, device: EmulatedDevice, clock: Clock | None, card: str | CardFacts = "a100") -> None:
        super().__init__(device, card)
        self.clock = clock

    def meter(self) -> Clock:
        """The clock. Raises GpuError without one."""
        if self.clock is None:
            raise GpuError("NVML is missing")
        return self.clock


@contextmanager
def simulated_process(
    opened_pack: pack.Pack, device: OperatorDevice, mode: races.Mode = "once"
) -> Iterator[dispatch.Dispatcher]:
    """The dispatcher of a simulated process, which has read nothing yet that earlier ones stored."""
    with dispatch.replaced(dispatch.Dispatcher([opened_pack], device, mode=mode)) as dispatcher:
        yield dispatcher


def tuner_of(dispatcher: dispatch.Dispatcher) -> races.Autotuner | None:
    """The autotuner of a dispatcher for its device; None if it measures nothing."""
    assert dispatcher.device is not None
    return dispatcher._measuring.tuner(-1, dispatcher.device)


def draw_product(device: EmulatedDevice, sizes: tuple[int, int, int] = SIZES) -> tuple[Any, Any, Any]:
    """A (m,k), B (n,k), both of integers from -2 to 2, and their product (m,n), all in fp16."""
    m, n, k = sizes
    a, b = device.empty(m, k), device.empty(n, k)
    for matrix in (a, b):
        matrix.copy_(torch.randint(-2, 3, matrix.shape))
    return a, b, (a.double() @ b.double().t()).half()


def measurements() -> list[results.Measurement]:
    """The measurements of races in the test's store."""
    return results.measurements(results.store("autotune")).measurements


# The names of kernels by the short names of their records.
NAMES = {name: record.name for name, record in packed.RECORDS.items()}


def launch_counts(device: EmulatedDevice) -> dict[str, int]:
    """How often each kernel was launched on the device, by the short names of kernels with launches."""
    counts = dict.fromkeys(NAMES, 0)
    for launch in device.session.launches:
        counts[next(name for name, full in NAMES.items() if full == launch.kernel)] += 1
    return {name: count for name, count in counts.items() if count}
