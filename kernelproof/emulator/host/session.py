"""Sessions: the emulated device while a host launcher runs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from kernelproof.emulator.host.cuda import LAUNCH_FAILURE, NO_IMAGE, NOT_SUPPORTED, LaunchRefused
from kernelproof.emulator.host.device_calls import DeviceCalls
from kernelproof.emulator.host.execution import output_reports
from kernelproof.emulator.host.kernel_calls import KernelCalls
from kernelproof.emulator.host.memory_calls import MemoryCalls
from kernelproof.emulator.host.program import Program, session_tensors
from kernelproof.emulator.host.runtime_state import CtaFilter, RuntimeState
from kernelproof.emulator.host.standin import Words, active, standin
from kernelproof.emulator.host.streams import Streams
from kernelproof.emulator.host.tensors import Tensors
from kernelproof.emulator.memory.arena import Memory
from kernelproof.emulator.state.launch import Device, Options
from kernelproof.emulator.state.reports import Report

WAITING_CALLS = frozenset(("synchronize", "stream_synchronize", "event_synchronize", "memcpy", "launch"))


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
        self.streams = Streams(self)
        self.kernels = KernelCalls(self, self.streams)
        self.lock = threading.RLock()
        self.calls = {
            **self.kernels.calls,
            **MemoryCalls(self, self.streams).calls,
            **DeviceCalls(self).calls,
            **self.streams.calls,
            "launch": self.launch,
            "unsupported": self.answer_unsupported,
        }

    def __enter__(self) -> Self:
        # A fresh device: no error of an earlier session is pending.
        standin().cudaGetLastError()
        active.append(self.handle)
        session_tensors.append(Tensors(self.memory))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        active.pop()
        session_tensors.pop()
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
            with self.lock:  # host threads launch too
                return call(words) or (self.device_failure if name in WAITING_CALLS else 0)
        except LaunchRefused as refused:
            self.refuse(name, refused)
            return refused.code
        except (KeyboardInterrupt, SystemExit) as interruption:
            self.interruption = interruption  # is raised where the session ends
            return LAUNCH_FAILURE
        except BaseException as error:
            self.errors.append(error)
            self.reports.append(Report("launch-error", f"{type(error).__name__}: {error}"))
            return LAUNCH_FAILURE

    def refuse(self, call: str, refused: LaunchRefused) -> None:  # noqa: ARG002 - for subclasses
        """The runtime refuses a call; for subclasses that say so at once."""
        self.refusals.append(str(refused))

    @staticmethod
    def refusal(call: str, refused: LaunchRefused) -> Report | None:
        """A refused call as a report: a launch that never ran, a copy that was not made; None for other calls, which
        programs may make to see what there is. A file without PTX for the device says nothing about the program."""
        if refused.code == NO_IMAGE:
            return Report("launch-error", str(refused), refused.kernel)
        if call in ("launch", "graph_launch"):
            return Report("launch-refused", str(refused), refused.kernel)
        if call in ("memcpy", "memset", "memcpy_to_symbol", "memcpy_from_symbol"):
            return Report("copy-out-of-bounds", str(refused))
        return None

    def answer_unsupported(self, words: Words) -> int:
        """A function of the real libraries that nothing here stands for: its name."""
        self.unsupported[ctypes.string_at(words[0]).decode()] += 1
        return NOT_SUPPORTED

    def launch(self, words: Words) -> int:
        """A launch, its stream in ``words[9]``; for subclasses that order streams."""
        return self.kernels.launch(words)


class StrictSession(Session):
    """A session in which launches and copies that the runtime refuses are findings."""

    def refuse(self, call: str, refused: LaunchRefused) -> None:
        super().refuse(call, refused)
        report = self.refusal(call, refused)
        if report is not None:
            self.reports.append(report)


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
