"""Opens sessions: an emulated device on which a host launcher, or Python code directly, launches kernels."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from kernelproof.emulator.host.callsites import HostSite
from kernelproof.emulator.host.cuda import LAUNCH_FAILURE, NO_IMAGE, NOT_SUPPORTED, LaunchRefused
from kernelproof.emulator.host.device_calls import DeviceCalls
from kernelproof.emulator.host.execution import output_reports
from kernelproof.emulator.host.images import image_count, registered
from kernelproof.emulator.host.kernel_calls import KernelCalls
from kernelproof.emulator.host.memory_calls import MemoryCalls
from kernelproof.emulator.host.policy import CtaFilter, SessionPolicy
from kernelproof.emulator.host.program import Dim, KernelArgument, Program, as_dim, session_tensors
from kernelproof.emulator.host.runtime_state import Call, RuntimeState
from kernelproof.emulator.host.standin import Words, active, frames, standin
from kernelproof.emulator.host.streams import Streams
from kernelproof.emulator.host.tensors import Tensors
from kernelproof.emulator.memory.arena import Memory
from kernelproof.emulator.state.launch_state import LaunchResult
from kernelproof.emulator.state.options import Device, Options
from kernelproof.emulator.state.reports import Report
from kernelproof.ground.pages import counted

# Calls whose result tells the program that a kernel has failed.
WAITING_CALLS = frozenset(("synchronize", "stream_synchronize", "event_synchronize", "memcpy", "launch"))
LAUNCHING_CALLS = frozenset(("launch", "graph_launch"))
# Calls by which guard.c asks about an access of host code that has faulted.
JUDGED_CALLS = frozenset(("host_access", "host_range"))
COPYING_CALLS = frozenset(("memcpy", "memset", "memcpy_to_symbol", "memcpy_from_symbol"))


class Session(RuntimeState):
    """The emulated device under one policy.

    In a ``with`` statement it answers the runtime calls of host launchers: it refuses what the real runtime refuses,
    and executes a launch before the call returns. ``run`` launches a kernel without host code and needs no ``with``
    statement. ``reports`` has the findings of both.
    """

    def __init__(
        self, policy: SessionPolicy | None = None, memory: Memory | None = None, programs: Iterable[Program] = ()
    ) -> None:
        super().__init__(memory or Memory(), policy or SessionPolicy(), list(programs))
        # KeyboardInterrupt or SystemExit, which must not pass through C; it is raised when the session ends.
        self.interruption: BaseException | None = None
        self.streams = Streams(self)
        self.kernel_calls = KernelCalls(self, self.streams)
        self.memory_calls = MemoryCalls(self, self.streams)
        self.lock = threading.RLock()  # host threads launch too
        self.first_image = 0
        self.calls = {
            **self.kernel_calls.calls,
            **self.memory_calls.calls,
            **DeviceCalls(self).calls,
            **self.streams.calls,
            "launch": self.launch,
            "unsupported": self.answer_unsupported,
        }

    def __enter__(self) -> Self:
        # The runtime keeps the last error per process: a new session must not see that of an earlier one.
        standin().cudaGetLastError()
        self.first_image = image_count()
        active.append(self.handle)
        # If host code has a mapping of the memory, guard.c asks this session about faults of host code there.
        view = self.memory.host_view
        standin().emulator_guard(*((view.base, view.base + view.nbytes) if view is not None else (0, 0)))
        session_tensors.append(Tensors(self.memory))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        active.pop()
        session_tensors.pop()
        standin().emulator_guard(0, 0)
        if self.interruption:
            raise self.interruption
        if kind is None and self.policy.check_outputs and self.launches:
            self.check_outputs()

    # --- runtime calls ---

    def handle(self, name: str, words: Words) -> int:
        """Answer one runtime call; returns its cudaError_t. Nothing may be raised through C: an exception becomes a
        failed call and a finding."""
        call = self.calls.get(name)
        if call is None:
            return NOT_SUPPORTED
        with self.lock:
            outer = self.site
            if self.memory.host_view is not None:
                self.site = HostSite(frames())
            code = self._answer(name, call, words)
            if name not in JUDGED_CALLS:
                self.streams.order.settle()
            self.site = outer
        self.policy.hooks.report(self.reports, self.launches)
        return code

    def _answer(self, name: str, call: Call, words: Words) -> int:
        """The cudaError_t of a call. An exception that the call raises becomes a finding."""
        try:
            return call(words) or (self.device_failure if name in WAITING_CALLS else 0)
        except LaunchRefused as refused:
            self._refuse(name, refused)
            return refused.code
        except (KeyboardInterrupt, SystemExit) as interruption:
            self.interruption = interruption
        except BaseException as error:
            self.errors.append(error)
            self.reports.append(Report("launch-error", f"{type(error).__name__}: {error}"))
        return LAUNCH_FAILURE

    def _refuse(self, call: str, refused: LaunchRefused) -> None:
        """Record why a call is refused; as a finding, too, if the policy says so."""
        self.policy.hooks.refused(call, refused, str(refused) not in self.refusals)
        self.refusals.append(str(refused))
        report = refusal_report(call, refused) if self.policy.refusals_are_findings else None
        if report is not None:
            report.access = self.site.participant()
            self.reports.append(report)

    def answer_unsupported(self, words: Words) -> int:
        """Answer a call of a function that the emulator lacks. Word: the function's name."""
        name = ctypes.string_at(words[0]).decode()
        self.unsupported[name] += 1
        if self.unsupported[name] == 1:
            self.policy.hooks.unsupported(name)
        return NOT_SUPPORTED

    def launch(self, words: Words) -> int:
        """Answer a launch; ``words[9]`` is its stream. Subclasses override this to order streams."""
        return self.kernel_calls.launch(words)

    # --- launches without host code ---

    def run(
        self,
        program: Program,
        kernel: str,
        grid: Dim,
        block: Dim,
        args: Sequence[KernelArgument],
        *,
        shared_bytes: int = 0,
        cluster: Dim = 1,
        overlapping: bool = False,
        cooperative: bool = False,
        memory: Memory | None = None,
    ) -> LaunchResult:
        """Run one kernel as the policy says; arguments are those of ``Program.launch``.

        ``memory``: memory for this launch only, whose outputs are checked when it ends if the policy checks outputs;
        the session's memory if None. Raises LaunchRefused if the CUDA runtime would refuse the launch, EmulatorError
        for instructions and features that the emulator does not support.
        """
        policy = self.policy
        tensors = Tensors(memory or self.memory)
        launch = program.prepare(
            kernel, grid, block, args, tensors, policy.device, policy.options, shared_bytes=shared_bytes,
            ctas=policy.cta_filter(as_dim(grid)) if policy.cta_filter is not None and not cooperative else None,
            cluster=cluster, overlapping=overlapping, cooperative=cooperative,
        )  # fmt: skip
        result = policy.hooks.execute(launch)
        tensors.store()
        if memory is not None and policy.check_outputs and policy.cta_filter is None:
            result.reports += output_reports(memory, launch.kernel)
        self.record(result)
        policy.hooks.report(self.reports, self.launches)
        return result

    # --- kernels, outputs and leaks ---

    def kernels(self) -> dict[str, Program]:
        """All kernels by name: those of ``programs``, and those that libraries registered since the session began."""
        images = (
            registered(number, self.device, self.policy.machine_code)
            for number in range(self.first_image, image_count())
        )
        return {name: program for program in (*self.programs, *images) for name in program.kernels}

    def check_outputs(self) -> None:
        """Report elements of output buffers that were never written, unless some CTAs were left out."""
        if self.policy.cta_filter is None:
            self.reports += output_reports(self.memory, self.launches[-1].kernel if self.launches else "")
            self.policy.hooks.report(self.reports, self.launches)

    def leaks(self) -> str:
        """The allocations that host code has not freed, in words; "" if there are none."""
        leaked = self.memory_calls.leaked()
        if not leaked:
            return ""
        nbytes, first = sum(buffer.nbytes for buffer in leaked), leaked[0]
        where = f", allocated at {first.allocated_at}" if first.allocated_at else ""
        return (
            f"never freed: {counted(len(leaked), 'allocation')} of CUDA, {nbytes} bytes in all; the first is "
            f"{self.memory.name(first)} ({first.nbytes} bytes{where})"
        )


def refusal_report(call: str, refused: LaunchRefused) -> Report | None:
    """The finding for a refused launch or copy, which has not been done. None for other calls, because programs make
    them to see what the device can do. Missing code for the device is a ``launch-error``, since it is no fault of the
    kernel."""
    if refused.code == NO_IMAGE:
        return Report("launch-error", str(refused), refused.kernel)
    if refused.rule:
        return Report(refused.rule, str(refused), refused.kernel)
    if call in LAUNCHING_CALLS:
        return Report("launch-refused", str(refused), refused.kernel)
    return Report("copy-out-of-bounds", str(refused)) if call in COPYING_CALLS else None


def session(
    memory: Memory | None = None,
    device: Device | None = None,
    options: Options | None = None,
    cta_filter: CtaFilter | None = None,
    programs: Iterable[Program] = (),
) -> Session:
    """A device for host launchers, to be used in a ``with`` statement; outside of one every runtime call fails with
    cudaErrorNoDevice.

    ``memory``: where buffers live (a fresh one if None). ``cta_filter``: grid (x, y, z) -> linear numbers of the CTAs
    to run; with it, outputs are not checked for gaps. ``programs``: programs in which kernels are looked up, in
    addition to the launcher's own. cudaLibraryLoadFromFile("DIR/kernel.cubin") uses a program that was loaded from
    ``DIR/kernel.ptx``.
    """
    return Session(SessionPolicy(device, options or Options(), cta_filter), memory, programs)
