"""Sessions: the emulated device while a host launcher runs."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from cudal2gen.emulator.host.cuda import LAUNCH_FAILURE, NOT_SUPPORTED, LaunchRefused
from cudal2gen.emulator.host.device_calls import DeviceCalls
from cudal2gen.emulator.host.execution import output_reports
from cudal2gen.emulator.host.kernel_calls import KernelCalls
from cudal2gen.emulator.host.memory_calls import MemoryCalls
from cudal2gen.emulator.host.program import Program
from cudal2gen.emulator.host.runtime_state import CtaFilter, RuntimeState
from cudal2gen.emulator.host.standin import Words, active, standin
from cudal2gen.emulator.memory.arena import Memory
from cudal2gen.emulator.state.launch import Device, Options
from cudal2gen.emulator.state.reports import Report


class Session(RuntimeState):
    """The emulated device while a host launcher runs. Use ``emulator.session``.

    It enforces what the real runtime enforces and executes launches at once. ``launches``: results in order;
    ``reports``: all findings; ``errors``: exceptions behind failed calls; ``refusals``: why the runtime refused a call.
    """

    def __init__(
        self,
        memory: Memory | None = None,
        device: Device | None = None,
        options: Options | None = None,
        cta_filter: CtaFilter | None = None,
        programs: Iterable[Program] = (),
    ) -> None:
        super().__init__(memory or Memory(), device or Device(), options or Options(), cta_filter, list(programs))
        self.interruption: BaseException | None = None
        self.kernels = KernelCalls(self)
        self.calls = {**self.kernels.calls, **MemoryCalls(self).calls, **DeviceCalls(self).calls, "launch": self.launch}

    def __enter__(self) -> Session:
        # A fresh device: no error of an earlier session is pending.
        standin().cudaGetLastError()
        active.append(self.handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        active.pop()
        if self.interruption:
            raise self.interruption
        if kind is None and self.cta_filter is None and self.launches:
            self.reports += output_reports(self.memory, self.launches[-1].kernel)

    def handle(self, name: str, words: Words) -> int:
        """One runtime call; returns its cudaError_t. Nothing may escape through C: an error becomes a failed call and
        a report."""
        call = self.calls.get(name)
        if call is None:
            return NOT_SUPPORTED
        try:
            return call(words)
        except LaunchRefused as refused:
            self.refusals.append(str(refused))
            return refused.code
        except (KeyboardInterrupt, SystemExit) as interruption:
            self.interruption = interruption  # is raised where the session ends
            return LAUNCH_FAILURE
        except BaseException as error:
            self.errors.append(error)
            self.reports.append(Report("launch-error", f"{type(error).__name__}: {error}"))
            return LAUNCH_FAILURE

    def launch(self, words: Words) -> int:
        """A launch, its stream in ``words[9]``; for subclasses that order streams."""
        return self.kernels.launch(words)


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
    to run; with it outputs are not checked for gaps. ``programs``: where kernels are looked up beside the launcher's
    own program; a program loaded from ``DIR/kernel.ptx`` also answers cudaLibraryLoadFromFile("DIR/kernel.cubin").
    """
    return Session(memory, device, options, cta_filter, programs)
