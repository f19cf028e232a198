"""Defines what a session checks, runs and reports: ``SessionPolicy`` and ``SessionHooks``.

``kernelproof check``, the grader, the pytest plugin, Triton's launches and cudal2gen's validator all use the same
``Session``. They differ only in the ``SessionPolicy`` that they pass and, if they have to act while the session is
open, in its ``SessionHooks``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kernelproof.emulator.host.cuda import LaunchRefused
from kernelproof.emulator.host.execution import KernelLaunch
from kernelproof.emulator.state.launch_state import LaunchResult
from kernelproof.emulator.state.options import Device, Options
from kernelproof.emulator.state.participants import Dim3
from kernelproof.emulator.state.reports import Report

# Grid (x, y, z) -> linear numbers of the CTAs to run.
CtaFilter = Callable[[Dim3], Iterable[int]]


class SessionHooks:
    """Methods that a session calls while it is open. These defaults execute every launch and do nothing else; the owner
    of a session overrides those that it needs."""

    def execute(self, launch: KernelLaunch) -> LaunchResult:
        """Execute a launch. An owner may also time it, print its output, or repeat the known effect of an earlier
        launch."""
        return launch.execute()

    def report(self, reports: list[Report], launches: list[LaunchResult]) -> None:
        """Receive all findings and results so far, at the end of every runtime call and of every direct launch. An
        owner that needs each of them once empties both lists."""

    def refused(self, call: str, refused: LaunchRefused, first: bool) -> None:
        """The runtime has refused a call. ``first``: no earlier call of the session was refused for this reason."""

    def unsupported(self, function: str) -> None:
        """The program has called, for the first time, a function of CUDA's libraries that the emulator lacks."""


@dataclass(frozen=True)
class SessionPolicy:
    """What a session checks, runs and reports.

    ``device``: the emulated GPU. Without one, host code sees an A100, and a kernel that is launched without host code
    runs on a GPU that can run its PTX (``launch_limits.device_for``). ``options``: which checks and counters are on,
    the limit of loops, the order of events (``adverse``) and a function that receives progress. ``cta_filter``: the
    CTAs of each grid to run; None: all. ``check_outputs``: when the session ends without an exception and all CTAs ran,
    elements of output buffers that were never written are findings. ``refusals_are_findings``: launches and copies that
    the runtime refuses are findings too, instead of failed calls only. ``machine_code``: if a program has both PTX and
    machine code, the machine code is executed. ``hooks``: the methods that the session calls while it is open.
    """

    device: Device | None = None
    options: Options = field(default_factory=Options)
    cta_filter: CtaFilter | None = None
    check_outputs: bool = True
    refusals_are_findings: bool = False
    machine_code: bool = False
    hooks: SessionHooks = field(default_factory=SessionHooks)
