"""What a session checks, runs and reports: the one place where its owners differ.

``kernelproof check``, the grader, the pytest plugin, Triton's launches and cudal2gen's validator all use the same
``Session``. Each of them describes its wishes in a ``SessionPolicy`` and, if it has to act while the session is open,
in ``SessionHooks``.
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
    """What the owner of a session does while the session is open. These defaults execute every launch and do nothing
    else; override the methods that matter to you."""

    def execute(self, launch: KernelLaunch) -> LaunchResult:
        """Execute a launch. An owner may also time it, print its output, or know its effect from an earlier launch."""
        return launch.execute()

    def report(self, reports: list[Report], launches: list[LaunchResult]) -> None:
        """Receive all findings and results so far, at the end of every runtime call and of every direct launch. An
        owner that passes them on at once empties both lists."""

    def refused(self, call: str, refused: LaunchRefused, first: bool) -> None:
        """The runtime has refused a call. ``first``: no earlier call of the session was refused for this reason."""

    def unsupported(self, function: str) -> None:
        """The program has called, for the first time, a function of CUDA's libraries that the emulator lacks."""


@dataclass(frozen=True)
class SessionPolicy:
    """What a session checks, runs and reports.

    ``device``: the emulated GPU. Without one, host code sees an A100, and a kernel that is launched without host code
    runs on the first GPU that its PTX is for. ``options``: which checks and counters are on, the limit of loops, the
    order of events (``adverse``) and who is told of progress. ``cta_filter``: the CTAs of each grid to run; None: all.
    ``check_outputs``: when the session ends without an exception and all CTAs ran, elements of output buffers that
    were never written are findings. ``refusals_are_findings``: launches and copies that the runtime refuses are
    findings too, instead of failed calls only. ``machine_code``: where a program carries both forms, machine code is
    executed in place of PTX. ``hooks``: what the owner does meanwhile.
    """

    device: Device | None = None
    options: Options = field(default_factory=Options)
    cta_filter: CtaFilter | None = None
    check_outputs: bool = True
    refusals_are_findings: bool = False
    machine_code: bool = False
    hooks: SessionHooks = field(default_factory=SessionHooks)
