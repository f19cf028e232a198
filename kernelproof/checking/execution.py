"""The process of a check: it opens the program, runs it on the emulated device, and reports while it runs.

It ends by the program's own exit, so every report is on its way before: findings go to standard output beside what the
program prints, and as messages to the process that waits.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from math import inf, prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, NoReturn

from kernelproof.checking import devices, names, sampling, text
from kernelproof.checking.findings import CANNOT, Cause, Run, extents, run_of
from kernelproof.checking.names import resolved, short_names
from kernelproof.checking.plan import Argument, BufferSpec, Plan
from kernelproof.checking.repetition import Repetitions
from kernelproof.emulator import (
    Buffer,
    EmulatorError,
    LaunchRefused,
    LaunchResult,
    Memory,
    Options,
    PtxError,
    Report,
    Session,
    SessionHooks,
    SessionPolicy,
    load,
)
from kernelproof.emulator.host.execution import KernelLaunch
from kernelproof.emulator.host.images import image_count
from kernelproof.emulator.host.program import KernelArgument, call
from kernelproof.emulator.host.standin import runtime_path, stand_for, stand_in_path
from kernelproof.emulator.state.sites import Site
from kernelproof.ground import places
from kernelproof.ground.errors import UserError, WrongInput
from kernelproof.ground.sandbox import Sandbox, enter, views_of_python

# Libraries whose functions the stand-in runtime has.
STOOD_FOR = ("libcuda.so.1", "libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0")


# Descriptors of the check begin here: programs close low ones, and get their numbers for files of their own.
FIRST_DESCRIPTOR = 512
PROGRESS_S = 1.0
PROCESSES = 32  # of a program in a sandbox


def box(files: Iterable[Path], seconds: float) -> Sandbox:
    """The sandbox of a process that runs what somebody else wrote: it sees some files and folders, this package, the
    stand-in runtime, and what Python has installed."""
    stand_ins = [runtime_path(), *map(stand_in_path, STOOD_FOR)]
    views = (*views_of_python(), *map(str, [*stand_ins, *files]))
    return Sandbox(views, cpu_s=int(seconds * (os.cpu_count() or 1)) + 10, gib=0.0, processes=PROCESSES)


class Message(NamedTuple):
    """From the process of a check: ``kind`` is begin, progress (``ctas``: ended, and all), loop, launch, repeated,
    finding, refused, unsupported, note, wrong, ended, failed (the check itself: why), main (the program's own code runs
    from here), or complete (all is done)."""

    kind: str
    kernel: str = ""
    text: str = ""
    finding: Report | None = None
    run: Run | None = None
    ctas: tuple[int, int] = (0, 0)


class Reporter:
    """Sends messages to the waiting process, and prints what users should see at once."""

    def __init__(self, pipe: Connection, quiet: bool, longest: float = inf) -> None:
        self.pipe = Connection(_moved(pipe.fileno()))
        pipe.close()
        self.quiet, self.output = quiet, _moved(1)
        self.unprinted = longest  # bytes that may still be printed
        self.progress_sent = 0.0
        self.printed: set[Cause] = set()
        self.libc = ctypes.CDLL(None)

    def send(self, message: Message) -> None:
        """Send a message; a receiver that has gone is no error."""
        try:
            self.pipe.send(message)
        except OSError:
            os._exit(1)

    def write(self, words: str) -> None:
        """Print behind what the program has printed so far."""
        self.libc.fflush(None)
        data = words.encode(errors="replace")
        data = data[: int(min(self.unprinted, len(data)))]
        self.unprinted -= len(data)
        with suppress(OSError):  # standard output is closed; messages go on
            while data:
                data = data[os.write(self.output, data) :]

    def progress(self, finished: int, total: int) -> None:
        """How many CTAs of a launch have ended: sent at most once a second."""
        if time.perf_counter() - self.progress_sent > PROGRESS_S:
            self.progress_sent = time.perf_counter()
            self.send(Message("progress", ctas=(finished, total)))

    def loop(self, site: Site, turns: int) -> None:
        """Report a loop that has run for many turns."""
        place = site.home or f"PTX line {site.line}"
        self.send(Message("loop", text=f"in the loop at {place} ({turns} turns and more)"))

    def finding(self, finding: Report) -> None:
        """Report a finding: printed the first time, counted always."""
        if finding.cause not in self.printed:
            self.printed.add(finding.cause)
            if not self.quiet:
                self.write(text.finding(finding))
        self.send(Message("finding", finding.kernel, finding=finding))


def _moved(descriptor: int) -> int:
    """A copy of a descriptor that the program's own closing does not reach."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)


def check_session(plan: Plan, reporter: Reporter) -> Session:
    """The emulated device of a check: findings are reported at once, and outputs checked where all CTAs ran."""
    memory = Memory()
    options = Options(
        counters=plan.counters,
        loop_limit=None,
        adverse=plan.adverse,
        progress=reporter.progress,
        looping=reporter.loop,
    )
    policy = SessionPolicy(
        devices.device(plan.device),
        options,
        sampling.sampler(plan.sample, plan.seed) if plan.sample else None,
        check_outputs=False,  # the program's main may never return: ``serve`` checks them where it can
        refusals_are_findings=True,
        hooks=CheckHooks(memory, reporter, plan.sample),
    )
    return Session(policy, memory)


class CheckHooks(SessionHooks):
    """Reports what a check's session does while it does it, and skips launches whose effect is known."""

    def __init__(self, memory: Memory, reporter: Reporter, sample: int) -> None:
        self.memory, self.reporter, self.sample, self.incomplete = memory, reporter, sample, False
        self.repetitions, self.dependences = Repetitions(memory), sampling.MemoryDependences()

    def unsupported(self, function: str) -> None:
        """Tell of a function that the emulator lacks."""
        self.reporter.send(Message("unsupported", text=function))

    def refused(self, call: str, refused: LaunchRefused, first: bool) -> None:
        """Tell why a tensor map was not made: the kernel that gets it only finds none."""
        if call == "tensor_map" and first:
            self.reporter.send(Message("note", text=str(refused)))

    def report(self, reports: list[Report], launches: list[LaunchResult]) -> None:
        """Report what the machine has found since the last time."""
        for report in reports:
            if report.kind == CANNOT:
                kernel = report.kernel
                reason = report.message.replace(kernel, names.plain(kernel)) if kernel else report.message
                self.reporter.send(Message("refused", report.kernel, reason))
                self.reporter.write(f"not checked: {reason}\n")
            else:
                self.reporter.finding(report)
        reports.clear()
        launches.clear()

    def execute(self, launch: KernelLaunch) -> LaunchResult:
        """Execute a launch, unless its effect is known."""
        if self.repetitions.repeat(launch):
            self.reporter.send(Message("repeated", launch.kernel))
            geometry = launch.geometry
            return LaunchResult(launch.kernel, geometry.grid, geometry.block, geometry.shared_bytes)
        self.reporter.send(Message("begin", launch.kernel, f"grid {extents(launch.geometry.grid)}"))
        start = time.perf_counter()
        with self.repetitions.observed(launch):
            result = launch.execute()
        if self.incomplete:
            self.dependences.excuse(launch, result.reports)
        given_up = any(report.kind == CANNOT for report in result.reports)
        if given_up or (self.sample and prod(launch.geometry.grid) > self.sample):
            self._assume_written()
        if result.output:
            self.reporter.write(result.output)
        if result.output or result.failed_asserts:
            self.repetitions.forget(launch)
        self.reporter.send(Message("launch", launch.kernel, run=run_of(result, time.perf_counter() - start)))
        return result

    def _assume_written(self) -> None:
        """CTAs that were left out, or given up, may have written anywhere, so no later read is of undefined memory."""
        if not self.incomplete:
            self.incomplete = True
            text = "not all CTAs ran to their end: what may follow from values that later launches lack is benign"
            self.reporter.send(Message("note", text=text))
        for buffer in self.memory.buffers:
            buffer.written = None


def serve(pipe: Connection, plan: Plan, box: Sandbox | None) -> None:
    """Run a plan, in a sandbox if there is one; never returns where the program's own main runs."""
    os.setsid()
    faulthandler.disable()  # a crash is the program's
    if plan.output_to_stderr:
        os.dup2(2, 1)
    if box:
        enter(box, (1, 2, pipe.fileno()), KERNELPROOF_CACHE_DIR=str(places.user_cache()))
    _cut_exit_handlers()
    reporter = Reporter(pipe, plan.quiet, box.output_bytes if box else inf)
    try:
        with check_session(plan, reporter) as session:
            library = _open(plan.library) if plan.library is not None else None
            session.programs = [load(path) for path in plan.ptx]
            if plan.main is not None:
                kernels = () if hasattr(library, "main") else tuple(session.kernels())
                _run_main(library, plan, reporter, kernels)
            elif plan.call is not None:
                _call(library, plan, session, reporter)
            else:
                _launch_all(plan, session)
    except (UserError, EmulatorError, PtxError) as error:
        reporter.send(Message("wrong", text=str(error)))
    except BaseException as error:
        reporter.send(Message("failed", text=f"the check ended with {type(error).__name__}: {error}"))
    else:
        reporter.send(Message("complete"))


def _cut_exit_handlers() -> None:
    """Makes exit run only the handlers registered after this call, flush, and end the process. Handlers that libraries
    registered before the fork (Ray, gRPC) wait for threads that do not exist in the child."""
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # exit handlers run in reverse order of registration
    libc.__cxa_atexit(libc.fflush, None, None)
    with suppress(OSError):
        streams = ctypes.CDLL("libstdc++.so.6")
        streams._ZNSt8ios_base4InitC1Ev(
            ctypes.create_string_buffer(8)
        )  # constructs std::cout and std::clog, which are raw memory before
        for stream in ("_ZSt4cout", "_ZSt4clog"):
            libc.__cxa_atexit(streams._ZNSo5flushEv, ctypes.byref(ctypes.c_char.in_dll(streams, stream)), None)


def open_library(path: Path, stood_for: Iterable[str], remedy: str = "") -> ctypes.CDLL:
    """A library with host code, bound to the stand-in runtime, which has the functions of the libraries ``stood_for``.
    Raises WrongInput, with a ``remedy``."""
    stand_for(*stood_for)
    try:
        return ctypes.CDLL(str(path.resolve()))
    except OSError as error:
        words = str(error).removeprefix(f"{path.resolve()}: ")
        raise WrongInput(
            f"{path.name} cannot be loaded: {words}; of CUDA's libraries the runtime and the driver are "
            f"emulated{remedy}"
        ) from None


def _open(path: Path) -> ctypes.CDLL:
    """The program's library, bound to the stand-in runtime. Raises WrongInput."""
    before = image_count()
    library = open_library(path, STOOD_FOR, "; name missing sources on the command line")
    if image_count() == before and b".nv_fatbin" in path.read_bytes():
        raise WrongInput(
            f"{path.name} holds kernels and does not register them: it is linked with the static CUDA runtime; link it "
            "with -cudart shared or -cudart none"
        )
    return library


def _run_main(library: ctypes.CDLL | None, plan: Plan, reporter: Reporter, kernels: Iterable[str]) -> NoReturn:
    """Call main, and leave as a program does: destructors, handlers of exit, flushed streams."""
    libc = reporter.libc
    if library is None or (main := getattr(library, "main", None)) is None:
        names = ", ".join(short_names(kernels).values()) or "none"
        raise WrongInput(f"no main to run; name a kernel with --launch (kernels: {names}), or use --call")
    assert plan.main is not None
    words = [os.fsencode(word) for word in plan.main]
    argv = (ctypes.c_char_p * (len(words) + 1))(*words, None)
    stdout = ctypes.c_void_p.in_dll(libc, "stdout")
    libc.setvbuf(stdout, None, 1, 0)  # lines, so that findings stand between them
    main.restype = ctypes.c_int
    reporter.send(Message("main"))
    code = main(len(words), argv)
    libc.exit(code)
    os._exit(code)


def _call(library: ctypes.CDLL | None, plan: Plan, session: Session, reporter: Reporter) -> None:
    """Call a function of the library."""
    assert plan.call is not None
    name, arguments = plan.call
    if library is None or getattr(library, name, None) is None:
        raise WrongInput(f'--call {name}: no such function; it must be extern "C"')
    values = [_value(argument, session, plan, {}) for argument in arguments]
    code = call(library, name, *values)
    reporter.send(Message("ended", text=f"{name} returned {code}"))
    session.check_outputs()


def _launch_all(plan: Plan, session: Session) -> None:
    """Launches that the user describes."""
    owners = session.kernels()
    shared: dict[str, Buffer] = {}
    for spec in plan.launches:
        name = resolved(spec.entry, owners)
        values = [_value(argument, session, plan, shared) for argument in spec.arguments]
        session.run(
            owners[name], name, spec.grid, spec.block, values, shared_bytes=spec.smem, cluster=spec.cluster
        )  # fmt: skip
    session.check_outputs()


def _value(argument: Argument, session: Session, plan: Plan, shared: dict[str, Buffer]) -> KernelArgument:
    if isinstance(argument, str):
        if argument not in shared:
            shared[argument] = _upload(plan.buffers[argument], session, plan.seed + len(shared), argument)
        return shared[argument]
    if isinstance(argument, BufferSpec):
        return _upload(argument, session, plan.seed + len(session.memory.buffers), "")
    return argument


def _upload(spec: BufferSpec, session: Session, seed: int, name: str) -> Buffer:
    return session.memory.upload(spec.array(seed), spec.role, name=name)
