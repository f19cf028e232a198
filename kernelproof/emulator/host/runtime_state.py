"""The emulated device that runtime calls act on, and how they write their results."""

from __future__ import annotations

import ctypes
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kernelproof.emulator.host.execution import Launch
from kernelproof.emulator.host.program import Program
from kernelproof.emulator.host.standin import Words
from kernelproof.emulator.memory.arena import Memory
from kernelproof.emulator.state.launch import Device, LaunchResult, Options
from kernelproof.emulator.state.reports import Report

CtaFilter = Callable[[tuple[int, int, int]], Iterable[int]]
# Answers one runtime call with a cudaError_t.
Call = Callable[[Words], int]


@dataclass
class RuntimeState:
    """``launches``: results in order; ``reports``: all findings; ``errors``: exceptions behind failed calls;
    ``refusals``: why the runtime refused a call; ``unsupported``: functions called that nothing here stands for, each
    with a count; ``device_failure``: what calls that wait for the device answer once a kernel has failed."""

    memory: Memory
    device: Device
    options: Options
    cta_filter: CtaFilter | None
    programs: list[Program]
    launches: list[LaunchResult] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    unsupported: Counter[str] = field(default_factory=Counter)
    device_failure: int = 0

    def execute(self, launch: Launch) -> LaunchResult:
        """Execute a launch; for subclasses that do more about it."""
        return launch.execute()


def put(address: int, form: str, *values: int) -> None:
    """Write a call's result through a pointer; ``form``: as of ``struct``."""
    raw = struct.pack("<" + form, *values)
    ctypes.memmove(address, raw, len(raw))
