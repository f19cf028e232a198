"""Runs a plan in a child process with limits of time and memory, and collects its messages into a ``Result``.

Before the run, ptxas assembles the PTX that will be executed.

The program runs as native code in the child, so it may crash, exit, hang or fork at any time. The result therefore
counts as clean only if the child said that it had finished, or if the program's own main ended with exit code 0.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NamedTuple

from kernelproof.checking import assembly, devices, text
from kernelproof.checking.execution import Message, serve
from kernelproof.checking.findings import KernelLaunches
from kernelproof.checking.names import plain
from kernelproof.checking.plan import CheckPlan
from kernelproof.checking.result import Result
from kernelproof.ground import process_tree
from kernelproof.ground.errors import WrongInput
from kernelproof.ground.sandbox import Sandbox
from kernelproof.ground.workers import Worker

STEP_S = 0.2  # seconds between two checks of the limits
# Signals by which a faulty program ends. Others come from outside, such as SIGKILL if the system runs out of memory,
# and leave the program unchecked.
_FAULT_SIGNALS = frozenset(
    (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP)
)

# A function that is called while a kernel runs, with the kernel's name, the seconds since it began, the number of CTAs
# that have ended, and the number of all CTAs.
Progress = Callable[[str, float, int, int], None]


def run(
    plan: CheckPlan,
    target: str,
    seconds: float,
    gib: float,
    progress: Progress | None = None,
    box: Sandbox | None = None,
) -> Result:
    """Run a plan, inside ``box`` if one is given, and return its result.

    ``target`` is the program's name in the result. A run that takes longer than ``seconds``, or more than ``gib`` GiB
    of memory, is ended; the result then says so. Raises WrongInput if the child process refuses the plan, for example
    because of a missing kernel or a wrong argument.
    """
    result = Result(target, devices.device(plan.device).name)
    start = time.perf_counter()
    outcome = assembly.findings_of(plan, foreign=box is not None)
    result.notes += outcome.notes
    for finding in outcome.findings:
        result.add(finding)
        if not plan.quiet:
            print(text.finding(finding), end="", flush=True)
    worker = Worker("fork", serve, plan, box)
    watch = process_tree.Watch(worker.pid, seconds, gib, box.processes if box else 0)
    try:
        running: _Running | None = None
        stage = ""  # complete, failed or main, once the process has said so
        ctas = 0, 0
        while True:
            alive = worker.alive
            if worker.pipe.poll(STEP_S if alive else 0):
                message: Message = worker.pipe.recv()
                ctas = message.ctas
                if message.kind == "begin":
                    running = _Running(message.kernel, message.text, time.perf_counter())
                elif message.kind == "loop" and running:
                    running = running._replace(loop=message.text)
                elif message.kind != "progress":
                    running = None
                if message.kind in ("complete", "failed", "main"):
                    stage = message.kind
                _add_message(result, message)
            # The pipe alone does not show that the child has ended, because processes that it started may hold the pipe
            # open. ``alive`` was read before the poll, so every message that the child sent has been received by now.
            elif not alive:
                raise EOFError
            if progress and running:
                progress(running.kernel, time.perf_counter() - running.start, *ctas)
            if limit := watch.passed():
                result.limited = running.kernel if running else ""
                result.ending = _excess(
                    limit, seconds, gib, _launch_progress(result, running, *ctas) if running else ""
                )
                if limit == "time" and not running and not result.kernels:
                    result.ending += ". It has launched no kernel: --nvcc-args -O2 makes its own code faster"
                break
    except (EOFError, ConnectionResetError):
        _add_ending(result, worker.exit_code(), stage, running)
    finally:
        # The session, rather than the process alone: the program may have started others.
        with suppress(ProcessLookupError):
            process_tree.kill_session(worker.pid)
        worker.end()
    result.seconds = time.perf_counter() - start
    return result


class _Running(NamedTuple):
    """A launch that has begun and not ended: its kernel, its grid as text, its start in seconds, and, as text, the loop
    in which it was last seen."""

    kernel: str
    grid: str
    start: float
    loop: str = ""


def expected_time(seconds: float, done: int, ctas: int) -> str:
    """The expected time of a launch, extrapolated from the ``done`` of its ``ctas`` CTAs that ended in ``seconds``.

    It is the rest of a sentence, and empty as long as no CTA has ended.
    """
    total = seconds * ctas / done if done else 0.0
    amount = f"{total:.0f} s" if total < 120 else f"{total / 60:.0f} min" if total < 7200 else f"{total / 3600:.0f} h"
    return f", all of them in about {amount}" if done else ""


def _launch_progress(result: Result, running: _Running, done: int, ctas: int) -> str:
    """How far the running launch has come, as the rest of a sentence."""
    kernel = result.kernels.get(running.kernel)
    number = 1 + (kernel.launches + kernel.repetitions if kernel else 0)
    seconds = time.perf_counter() - running.start
    loop = f", at last {running.loop}" if running.loop else ""
    share = f" ({done} of {ctas} CTAs{expected_time(seconds, done, ctas)})" if done else ""
    return f": launch {number} of {plain(running.kernel)}, {running.grid}, ran for {seconds:.0f} s{share}{loop}"


def _excess(limit: Literal["time", "memory", "processes"], seconds: float, gib: float, launch: str) -> str:
    """Which limit was exceeded, and in which ``launch``, as the rest of a sentence about the program."""
    if limit == "processes":
        return "starts too many processes"
    if limit == "memory":
        return f"needs more than {gib:g} GiB of memory; --memory gives it more"
    fewer = ", --sample N runs only N CTAs of a grid" if launch else ""
    return f"did not end within {seconds:.0f} s{launch}; --timeout gives it longer{fewer}"


def _add_message(result: Result, message: Message) -> None:
    """Add what a message says to the result. Raises WrongInput for a message of kind 'wrong'."""
    kernel = message.kernel
    match message.kind:
        case "finding":
            assert message.finding is not None
            result.add(message.finding)
        case "launch":
            assert message.run is not None
            result.kernels.setdefault(kernel, KernelLaunches(kernel)).add(message.run)
        case "repeated":
            result.kernels.setdefault(kernel, KernelLaunches(kernel)).repetitions += 1
        case "refused":
            result.refuse(kernel, message.text)
        case "failed":
            result.refuse("", message.text)
        case "unsupported":
            result.unsupported.append(message.text)
        case "ended" | "note":
            result.notes.append(message.text)
        case "wrong":
            raise WrongInput(message.text)


def _add_ending(result: Result, code: int | None, stage: str, running: _Running | None) -> None:
    """Add to the result how the child process ended.

    The check is complete in two cases: the child said that it had finished and exited with code 0, or the program's own
    main ran and ended by itself. In every other case, even with exit code 0, something remains unchecked.
    """
    result.program_exit_code = code
    if stage == "failed" or (stage == "complete" and code == 0):
        return
    ended = (
        f"was ended by {signal.Signals(-code).name}"
        if code is not None and code < 0
        else f"ended with exit code {code}"
    )
    if stage == "main" and code is not None and (code >= 0 or -code in _FAULT_SIGNALS):
        if code:
            result.ending = ended
        if running:
            result.refuse(running.kernel, f"the program {ended} within a launch of {plain(running.kernel)}")
        return
    place = f" within a launch of {plain(running.kernel)}" if running else ""
    result.refuse(running.kernel if running else "", f"the process of the check {ended}{place}")
