"""The emulated device that runtime calls act on, and how they write their results."""

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
    """The emulated device and what has happened on it.

    ``programs``: where kernels are looked up beside the launcher's own program. ``launches``: results in order;
    ``reports``: all findings; ``errors``: exceptions behind failed calls; ``refusals``: why the runtime refused calls;
    ``unsupported``: functions called that the emulator lacks, each with a count; ``device_failure``: the cudaError_t
    that calls which wait for the device return once a kernel has failed, else 0. ``site``: where host code stands, as
    far as that is known.
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
        """Keep what a launch did and found."""
        self.launches.append(result)
        self.reports += result.reports


def put(address: int, form: str, *values: int) -> None:
    """Write a call's result through a pointer. ``form``: the format of ``struct``, without byte order."""
    raw = struct.pack("<" + form, *values)
    ctypes.memmove(address, raw, len(raw))
