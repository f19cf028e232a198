"""Runs in the child process of a check: loads the program, runs it on the emulated device, and reports meanwhile.

The program may call ``exit`` at any time, so nothing is kept for the end. Each finding is printed immediately, between
the program's own output, and sent as a message to the parent process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf, prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, NoReturn

from kernelproof.checking import devices, names, sampling, text
from kernelproof.checking.findings import CANNOT, Run, extents, run_of
from kernelproof.checking.names import resolved, short_names
from kernelproof.checking.plan import Argument, BufferSpec, CheckPlan, example
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
from kernelproof.emulator.state.causes import Key, keys, precedence
from kernelproof.emulator.state.sites import Site
from kernelproof.ground import places
from kernelproof.ground.errors import UserError, WrongInput
from kernelproof.ground.sandbox import Sandbox, confine, views_of_python

# Libraries that a program may be linked with and that the emulated CUDA runtime replaces.
REPLACED_LIBRARIES = ("libcuda.so.1", "libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0")

# The check's own file descriptors start at this number. Programs close low numbers, or reopen them as their own files.
FIRST_DESCRIPTOR = 512
PROGRESS_S = 1.0  # least time between two messages of progress
MAX_PROCESSES = 32  # most processes of a program in a sandbox


def program_sandbox(files: Iterable[Path], seconds: float) -> Sandbox:
    """The sandbox for a process that runs untrusted code for at most ``seconds``.

    The process sees ``files`` (files and folders), this package, the emulated runtime, and the installed packages of
    Python.
    """
    stand_ins = [runtime_path(), *map(stand_in_path, REPLACED_LIBRARIES)]
    views = (*views_of_python(), *map(str, [*stand_ins, *files]))
    return Sandbox(views, cpu_s=int(seconds * (os.cpu_count() or 1)) + 10, gib=0.0, processes=MAX_PROCESSES)


class Message(NamedTuple):
    """A message from the process of a check to its parent.

    ``kind`` is one of: "begin" (a launch starts), "progress" (``ctas``: how many have ended, and how many there are),
    "loop" (a loop has run for many iterations), "launch" (a launch has run), "repeated" (a launch was skipped, since
    its effect is known), "finding", "refused" (a launch cannot be emulated), "unsupported" (a CUDA function is
    missing), "note", "wrong" (the user's input is wrong), "ended" (a called function returned), "main" (the program's
    own main is called next), "complete" (all is done) or "failed" (the check itself failed).
    """

    kind: str
    kernel: str = ""
    text: str = ""
    finding: Report | None = None
    run: Run | None = None
    ctas: tuple[int, int] = (0, 0)


class Reporter:
    """Sends messages to the parent process, and prints findings and the program's output immediately.

    ``quiet``: findings are sent only. ``max_bytes``: most bytes that may be printed; the rest is dropped.
    """

    def __init__(self, pipe: Connection, quiet: bool, max_bytes: float = inf) -> None:
        self.pipe = Connection(_high_copy(pipe.fileno()))
        pipe.close()
        self.quiet, self.output = quiet, _high_copy(1)
        self.bytes_left = max_bytes
        self.progress_sent = 0.0
        self.printed: set[Key] = set()
        self.libc = ctypes.CDLL(None)

    def send(self, message: Message) -> None:
        """Send a message. If the parent process no longer exists, end this process."""
        try:
            self.pipe.send(message)
        except OSError:
            os._exit(1)

    def write(self, words: str) -> None:
        """Print ``words`` after everything that the program has printed so far."""
        self.libc.fflush(None)  # the program's own output may still wait in the buffers of the C library
        data = words.encode(errors="replace")
        data = data[: int(min(self.bytes_left, len(data)))]
        self.bytes_left -= len(data)
        with suppress(OSError):  # If standard output is closed, findings still reach the parent as messages.
            while data:
                data = data[os.write(self.output, data) :]

    def progress(self, finished: int, total: int) -> None:
        """Send how many CTAs of a launch have ended, at most once a second."""
        if time.perf_counter() - self.progress_sent > PROGRESS_S:
            self.progress_sent = time.perf_counter()
            self.send(Message("progress", ctas=(finished, total)))

    def loop(self, site: Site, iterations: int) -> None:
        """Report a loop that has run for many iterations."""
        place = site.home or site.place
        self.send(Message("loop", text=f"in the loop at {place} ({iterations} iterations and more)"))

    def note_at_exit(self, words: Callable[[], str]) -> None:
        """Send ``words()`` as a note, unless it is empty, when the program exits and its destructors have run."""

        def send(*_: object) -> None:
            if note := words():
                self.send(Message("note", text=note))

        # The C library calls it at exit, so this object keeps a reference until then.
        self.at_exit = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)(send)
        self.libc.on_exit(self.at_exit, None)

    def finding(self, finding: Report) -> None:
        """Send a finding; print it only the first time that its cause is seen."""
        own, links = keys(finding)
        if self.printed.isdisjoint((*own, *links)) and not self.quiet:
            self.write(text.finding(finding))
        self.printed.update(own)
        self.send(Message("finding", finding.kernel, finding=finding))


def _high_copy(descriptor: int) -> int:
    """A copy of a descriptor with a number so high that the program's own ``close`` calls do not hit it."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)


def check_session(plan: CheckPlan, reporter: Reporter) -> Session:
    """The emulated device of a check. It reports each finding immediately."""
    memory = Memory(protected=plan.main is not None or plan.call is not None)
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
        check_outputs=False,  # a program's main may never return; calls and launches check their outputs themselves
        refusals_are_findings=True,
        machine_code=plan.machine_code,
        hooks=CheckHooks(memory, reporter, plan.sample),
    )
    return Session(policy, memory)


class CheckHooks(SessionHooks):
    """Reports what the emulated device does, while it does it, and skips launches whose effect is known.

    ``sample``: most CTAs of a launch that are executed; 0 for all. ``incomplete``: whether some CTAs were not executed
    so far, so that memory may lack what they would have written.
    """

    def __init__(self, memory: Memory, reporter: Reporter, sample: int) -> None:
        self.memory, self.reporter, self.sample, self.incomplete = memory, reporter, sample, False
        self.repetitions, self.dependences = Repetitions(memory), sampling.MemoryDependences()

    def unsupported(self, function: str) -> None:
        """Report a CUDA function that the emulator lacks."""
        self.reporter.send(Message("unsupported", text=function))

    def refused(self, call: str, refused: LaunchRefused, first: bool) -> None:
        """Report why a tensor map was not encoded: the kernel that uses it could only say that it is missing."""
        if call == "tensor_map" and first:
            self.reporter.send(Message("note", text=str(refused)))

    def report(self, reports: list[Report], launches: list[LaunchResult]) -> None:
        """Report what the emulator has found since the last call."""
        for report in sorted(reports, key=precedence):
            if report.kind == CANNOT:
                reason = _reason(report)
                self.reporter.send(Message("refused", report.kernel, reason))
                self.reporter.write(f"not checked: {reason}\n")
            else:
                self.reporter.finding(report)
        reports.clear()
        launches.clear()

    def execute(self, launch: KernelLaunch) -> LaunchResult:
        """Execute a launch, or apply its effect if that is known."""
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
        # A partial launch leaves memory unwritten, and a launch that prints has an effect besides memory.
        given_up = [_reason(report) for report in result.reports if report.kind == CANNOT]
        if given_up or (self.sample and prod(launch.geometry.grid) > self.sample):
            self._assume_written(given_up[0] if given_up else "not all CTAs ran")
        if result.output:
            self.reporter.write(result.output)
        if result.output or result.failed_asserts:
            self.repetitions.forget(launch)
        self.reporter.send(Message("launch", launch.kernel, run=run_of(result, time.perf_counter() - start)))
        return result

    def _assume_written(self, why: str) -> None:
        """Treat all memory as initialised from now on, since CTAs that did not run might have written anywhere.

        ``why``: the reason why they did not run, for a note.
        """
        if not self.incomplete:
            self.incomplete = True
            note = f"{why}: findings that may follow from values that later launches lack are benign"
            self.reporter.send(Message("note", text=note))
        for buffer in self.memory.buffers:
            buffer.written = None


def _reason(report: Report) -> str:
    """Why a launch could not be checked, with the kernel's plain name."""
    kernel = report.kernel
    return report.message.replace(kernel, names.plain(kernel)) if kernel else report.message


def serve(pipe: Connection, plan: CheckPlan, box: Sandbox | None) -> None:
    """Run a plan in this process, inside ``box`` if one is given. It never returns if the program's own main runs."""
    # The order matters. In a session of its own, this process can be killed by the parent with all that it started. The
    # sandbox is entered before any foreign code is loaded, and the reporter copies its descriptors before the program
    # can close or reuse any.
    os.setsid()
    faulthandler.disable()  # If the program crashes, Python's traceback would only confuse.
    if plan.output_to_stderr:
        os.dup2(2, 1)
    if box:
        confine(box, (1, 2, pipe.fileno()), KERNELPROOF_CACHE_DIR=str(places.user_cache()))
    _cut_exit_handlers()
    reporter = Reporter(pipe, plan.quiet, box.output_bytes if box else inf)
    try:
        with check_session(plan, reporter) as session:
            if plan.main is not None:
                reporter.note_at_exit(session.leaks)
            library = _open(plan.library) if plan.library is not None else None
            session.programs = [load(path) for path in plan.kernels]
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
    """Make ``exit`` run only the handlers that are registered from now on, flush the streams, and end the process.

    Libraries such as Ray and gRPC registered handlers before the fork. Those wait for threads that do not exist in this
    child process, so they would never return. Handlers run in reverse order of registration: the ``_exit`` that is
    registered first here runs after the flushes below and before all older handlers.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)
    with suppress(OSError):
        streams = ctypes.CDLL("libstdc++.so.6")
        # std::ios_base::Init constructs std::cout and std::clog; until then they are uninitialised memory.
        streams._ZNSt8ios_base4InitC1Ev(ctypes.create_string_buffer(8))
        for stream in ("_ZSt4cout", "_ZSt4clog"):
            libc.__cxa_atexit(streams._ZNSo5flushEv, ctypes.byref(ctypes.c_char.in_dll(streams, stream)), None)


def open_library(path: Path, replaced: Iterable[str], remedy: str = "") -> ctypes.CDLL:
    """Load a library with host code. The emulated runtime takes the place of the libraries named in ``replaced``.

    Raises WrongInput if the library cannot be loaded; its message ends with ``remedy``.
    """
    stand_for(*replaced)
    try:
        return ctypes.CDLL(str(path.resolve()))
    except OSError as error:
        words = str(error).removeprefix(f"{path.resolve()}: ")
        raise WrongInput(
            f"{path.name} cannot be loaded: {words}; of CUDA's libraries the runtime and the driver are "
            f"emulated{remedy}"
        ) from None


def _open(path: Path) -> ctypes.CDLL:
    """Load the program's library. Raises WrongInput, also if its kernels are invisible to the emulated runtime."""
    before = image_count()
    library = open_library(path, REPLACED_LIBRARIES, "; name missing sources on the command line")
    if image_count() == before and b".nv_fatbin" in path.read_bytes():
        raise WrongInput(
            f"{path.name} holds kernels and does not register them: it is linked with the static CUDA runtime; link it "
            "with -cudart shared or -cudart none"
        )
    return library


def _run_main(library: ctypes.CDLL | None, plan: CheckPlan, reporter: Reporter, kernels: Iterable[str]) -> NoReturn:
    """Call main, then exit as a program does: with destructors, exit handlers and flushed streams."""
    libc = reporter.libc
    if library is None or (main := getattr(library, "main", None)) is None:
        choices = ", ".join(short_names(kernels).values()) or "none"
        raise WrongInput(f"no main to run; name a kernel with --launch (kernels: {choices}), or use --call")
    assert plan.main is not None
    words = [os.fsencode(word) for word in plan.main]
    argv = (ctypes.c_char_p * (len(words) + 1))(*words, None)
    stdout = ctypes.c_void_p.in_dll(libc, "stdout")
    libc.setvbuf(stdout, None, 1, 0)  # buffered by line (_IOLBF), so that findings are printed between whole lines
    main.restype = ctypes.c_int
    reporter.send(Message("main"))
    code = main(len(words), argv)
    libc.exit(code)
    os._exit(code)


def _call(library: ctypes.CDLL | None, plan: CheckPlan, session: Session, reporter: Reporter) -> None:
    """Call the function of the library that the plan names."""
    assert plan.call is not None
    name, arguments = plan.call
    if library is None or getattr(library, name, None) is None:
        raise WrongInput(f'--call {name}: no such function; it must be extern "C"')
    values = [_value(argument, session, plan, {}) for argument in arguments]
    code = call(library, name, *values)
    reporter.send(Message("ended", text=f"{name} returned {code}"))
    session.check_outputs()


def _launch_all(plan: CheckPlan, session: Session) -> None:
    """Run the launches of the plan, in order and on the same memory."""
    owners = session.kernels()
    shared: dict[str, Buffer] = {}
    for spec in plan.launches:
        name = resolved(spec.entry, owners)
        values = [_value(argument, session, plan, shared) for argument in spec.arguments]
        kinds = [param.kind for param in owners[name].module.kernels[name].params]
        try:
            session.run(
                owners[name], name, spec.grid, spec.block, values, shared_bytes=spec.smem, cluster=spec.cluster
            )  # fmt: skip
        except EmulatorError as error:
            if len(values) == len(kinds):
                raise
            raise WrongInput(f'{error}; give for example --args "{example(kinds)}"') from None
    session.check_outputs()


def _value(argument: Argument, session: Session, plan: CheckPlan, shared: dict[str, Buffer]) -> KernelArgument:
    """The value of an argument: a number, or the buffer that is uploaded for it. ``shared``: buffers of earlier
    launches, by name."""
    if isinstance(argument, str):
        if argument not in shared:
            shared[argument] = _upload(plan.buffers[argument], session, plan.seed + len(shared), argument)
        return shared[argument]
    if isinstance(argument, BufferSpec):
        return _upload(argument, session, plan.seed + len(session.memory.buffers), "")
    return argument


def _upload(spec: BufferSpec, session: Session, seed: int, name: str) -> Buffer:
    """Copy the initial content of a buffer to the device."""
    return session.memory.upload(spec.array(seed), spec.role, name=name)
