"""Makes synthetic measurements with known speedups and noise. They are deterministic, and nothing was timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cudal2gen import results
from cudal2gen.kernel import Problem
from cudal2gen.results import DERIVED, KERNEL, Conditions, Environment, Measurement, Measurements, Timing

# torch.matmul, and every baseline from which a derived one is computed.
BASELINES = ("torch.matmul", *(part for parts in DERIVED.values() for part in parts))
# The extents of which each of m, n and k is one.
GRID = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384)
H200 = Environment(
    id="synthetic-h200",
    gpu="h200",
    name="NVIDIA H200",
    capability="9.0",
    sms=132,
    l2_bytes=60 << 20,
    memory_bytes=141 << 30,
    max_sm_mhz=1980,
    max_memory_mhz=3201,
    memory_bus_bits=6144,
    power_limit_w=700.0,
    ecc=True,
    driver="580.0",
    versions={"cuda": "13.0", "torch": "2.13.0", "cublas": "13.0.0"},
)
# Conditions of a measurement that nothing disturbed: the clocks hold and nothing throttles.
QUIET = Conditions(sm_mhz=(1965, 1980), memory_mhz=(3201,), power_w=(310.0, 655.5), temperature_c=(41, 63), throttle=())


def shapes(count: int) -> list[tuple[int, int, int]]:
    """``count`` of the grid's thousand shapes, spread evenly."""
    grid = [(m, n, k) for m in GRID for n in GRID for k in GRID]
    return [grid[i * len(grid) // count] for i in range(count)]


def timing(contender: str, event_us: Iterable[float], **fields: Any) -> Timing:
    """A contender's timing with these microseconds a call."""
    return Timing(contender=contender, calls=10, event_us=tuple(event_us), error=0.0, **fields)


def measurement(mnk: tuple[int, int, int], timings: Sequence[Timing], **overrides: Any) -> Measurement:
    """A measurement of a cold fp16 product of layout tn on an H200; ``overrides`` replace fields."""
    m, n, k = mnk
    fields: dict[str, Any] = {
        "environment": H200.id,
        "when": "2026-01-01T00:00:00Z",
        "gpu": "h200",
        "acc": "f16",
        "layout": "tn",
        "protocol": "device",
        "l2": "cold",
        "seed": 1,
        "conditions": QUIET,
    }
    return Measurement(**(fields | {"m": m, "n": n, "k": k, "timings": tuple(timings)} | overrides))


def plausible_us(mnk: tuple[int, int, int]) -> float:
    """A time in microseconds at about two thirds of an H200's roof (900e6 FLOP and 4.9e6 bytes per microsecond), plus 3
    for the launch."""
    m, n, k = mnk
    problem = Problem(gpu="h200", acc="f16", layout="tn", m=m, n=n, k=k)
    return 3.0 + 1.5 * max(problem.flops / 900e6, problem.traffic_bytes / 4.9e6)


def noisy_measurement(
    mnk: tuple[int, int, int],
    random: np.random.Generator,
    samples: int = 20,
    kernel: Callable[[tuple[int, int, int]], float] = lambda _: 1.0,
    record: str | None = None,
    **overrides: Any,
) -> Measurement:
    """Timings of all contenders of a problem: common drift, 1 % noise each, baselines slower or faster by up to a
    third.

    ``kernel``: returns how many times as fast as ``plausible_us`` our kernel is at given sizes. ``record``: its name.
    ``overrides``: fields of the measurement.
    """
    base = plausible_us(mnk) * np.exp(random.normal(0, 0.02, samples))

    def series(factor: float) -> list[float]:
        times: list[float] = (base * factor * np.exp(random.normal(0, 0.01, samples))).round(4).tolist()
        return times

    timings = [timing(KERNEL, series(1 / kernel(mnk)), record=record or "hgemm_none", digest="0" * 16)]
    timings += [timing(name, series(np.exp(random.normal(0.05, 0.12))), detail="synthetic") for name in BASELINES]
    return measurement(mnk, timings, **overrides)


def campaign(
    count: int,
    samples: int = 20,
    names: Callable[[tuple[int, int, int]], str | None] = lambda _: None,
    seed: int = 0,
    **options: Any,
) -> Measurements:
    """Measurements of ``count`` shapes by all protocols: device with cold and hot L2, offline and server. The operands
    of the largest shapes count as exceeding the L2.

    ``names``: returns the name of the record that serves given sizes. ``options``: arguments of ``noisy_measurement``.
    """
    random = np.random.default_rng(seed)
    protocols: tuple[dict[str, Any], ...] = (
        {"protocol": "device", "l2": "cold"},
        {"protocol": "device", "l2": "hot"},
        {"protocol": "offline", "l2": "hot"},
        {"protocol": "server", "l2": "hot", "target_qps": 100.0},
    )
    measurements = []
    for protocol in protocols:
        for mnk in shapes(count):
            m, n, k = mnk
            exceeded = 2 * (m * k + n * k + m * n) > 3 * H200.l2_bytes
            if exceeded and protocol["l2"] == "hot" and protocol["protocol"] == "device":
                continue
            state = protocol | ({"l2": "exceeded"} if exceeded else {})
            measurements.append(noisy_measurement(mnk, random, samples, record=names(mnk), **options, **state))
    return Measurements({H200.id: H200}, measurements)


def write(measurements: Measurements, path: Path) -> Path:
    """Writes measurements in the store's form, environments first."""
    results.append([*measurements.environments.values(), *measurements.measurements], path)
    return path
