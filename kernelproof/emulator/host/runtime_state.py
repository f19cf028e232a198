"""Keeps the state of the emulated device that runtime calls read and change, and writes the results of calls."""

from __future__ import annotations

import ctypes
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kernelproof.emulator.host.callsites import UNKNOWN, HostSite
from kernelproof.emulator.host.policy import SessionPolicy
from kernelproof.emulator.host.program import Program
from kernelproof.emulator.host.standin import Words
from kernelproof.emulator.memory.arena import Memory
from kernelproof.emulator.state.launch_state import LaunchResult
from kernelproof.emulator.state.options import Device, Options
from kernelproof.emulator.state.reports import Report

# Answers one runtime call with a cudaError_t.
Call = Callable[[Words], int]


@dataclass
class RuntimeState:
    """The emulated device, and the results and findings so far.

    ``programs``: programs in which kernels are looked up, in addition to the launcher's own. ``launches``: results in
    order. ``reports``: all findings. ``errors``: exceptions that made calls fail. ``refusals``: why the runtime refused
    calls. ``unsupported``: functions called that the emulator lacks -> number of calls. ``device_failure``: the
    cudaError_t that calls which wait for the device return after a kernel has failed, else 0. ``site``: the line of
    host code that makes the present call, if it is known.
    """

    memory: Memory
    policy: SessionPolicy
    programs: list[Program]
    launches: list[LaunchResult] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    unsupported: Counter[str] = field(default_factory=Counter)
    device_failure: int = 0
    site: HostSite = UNKNOWN
    device: Device = field(init=False)
    options: Options = field(init=False)

    def __post_init__(self) -> None:
        self.device, self.options = self.policy.device or Device(), self.policy.options

    def record(self, result: LaunchResult) -> None:
        """Keep the result and the findings of a launch."""
        self.launches.append(result)
        self.reports += result.reports


def put(address: int, form: str, *values: int) -> None:
    """Write values to host memory, as results of a call. ``form``: their format of ``struct``, without byte order."""
    raw = struct.pack("<" + form, *values)
    ctypes.memmove(address, raw, len(raw))
