"""Runs a plan in a process of its own, with limits of time and memory, and collects what it reports."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NamedTuple

from kernelproof.checking import devices
from kernelproof.checking.execution import Message, serve
from kernelproof.checking.findings import Kernel
from kernelproof.checking.names import plain
from kernelproof.checking.plan import Plan
from kernelproof.checking.result import Result
from kernelproof.ground import process_tree
from kernelproof.ground.errors import WrongInput
from kernelproof.ground.sandbox import Sandbox
from kernelproof.ground.workers import Worker

STEP_S = 0.2
# By these signals a program ends itself: it fails. Others come from outside, as where memory runs out.
_OWN_SIGNALS = frozenset(
    (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP)
)

# Called while a kernel runs: its name, seconds since it began, CTAs that have ended, and CTAs in all.
Progress = Callable[[str, float, int, int], None]


def run(
    plan: Plan, target: str, seconds: float, gib: float, progress: Progress | None = None, box: Sandbox | None = None
) -> Result:
    """The result of a plan, run in a sandbox if there is one. Raises WrongInput for what the process refuses: a missing
    kernel, a wrong argument."""
    result = Result(target, devices.device(plan.device).name)
    start = time.perf_counter()
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
                _take(result, message)
            elif not alive:  # its children may hold the pipe
                raise EOFError
            if progress and running:
                progress(running.kernel, time.perf_counter() - running.start, *ctas)
            if limit := watch.passed():
                result.limited = running.kernel if running else ""
                result.ending = _excess(limit, seconds, gib, _launch(result, running, *ctas) if running else "")
                if limit == "time" and not running and not result.kernels:
                    result.ending += ". It has launched no kernel: --nvcc-args -O2 makes its own code faster"
                break
    except (EOFError, ConnectionResetError):
        _ending(result, worker.exit_code(), stage, running)
    finally:
        with suppress(ProcessLookupError):
            process_tree.kill_session(worker.pid)
        worker.end()
    result.seconds = time.perf_counter() - start
    return result


class _Running(NamedTuple):
    """A launch that has begun: its kernel, its grid as text, when it began, and the loop that it was last seen in, as
    text."""

    kernel: str
    grid: str
    start: float
    loop: str = ""


def expected(seconds: float, done: int, ctas: int) -> str:
    """The time of a launch, by that of its CTAs so far: the rest of a sentence. Empty before one has ended."""
    whole = seconds * ctas / done if done else 0.0
    amount = f"{whole:.0f} s" if whole < 120 else f"{whole / 60:.0f} min" if whole < 7200 else f"{whole / 3600:.0f} h"
    return f", all of them in about {amount}" if done else ""


def _launch(result: Result, running: _Running, done: int, ctas: int) -> str:
    """A launch that has begun: the rest of a sentence."""
    kernel = result.kernels.get(running.kernel)
    number = 1 + (kernel.launches + kernel.repetitions if kernel else 0)
    seconds = time.perf_counter() - running.start
    loop = f", at last {running.loop}" if running.loop else ""
    share = f" ({done} of {ctas} CTAs{expected(seconds, done, ctas)})" if done else ""
    return f": launch {number} of {plain(running.kernel)}, {running.grid}, ran for {seconds:.0f} s{share}{loop}"


def _excess(limit: Literal["time", "memory", "processes"], seconds: float, gib: float, launch: str) -> str:
    """A limit that is passed, and in which ``launch``: the rest of a sentence about the program."""
    if limit == "processes":
        return "starts too many processes"
    if limit == "memory":
        return f"needs more than {gib:g} GiB of memory; --memory gives it more"
    fewer = ", --sample N runs only N CTAs of a grid" if launch else ""
    return f"did not end within {seconds:.0f} s{launch}; --timeout gives it longer{fewer}"


def _take(result: Result, message: Message) -> None:
    """Enter a message into the result."""
    kernel = message.kernel
    match message.kind:
        case "finding":
            assert message.finding is not None
            result.add(message.finding)
        case "launch":
            assert message.run is not None
            result.kernels.setdefault(kernel, Kernel(kernel)).add(message.run)
        case "repeated":
            result.kernels.setdefault(kernel, Kernel(kernel)).repetitions += 1
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


def _ending(result: Result, code: int | None, stage: str, running: _Running | None) -> None:
    """Enter how the process ended. It answers by its last stage: all is done, or the program's main ended by itself;
    every other end leaves something unchecked."""
    result.exit_code = code
    if stage == "failed" or (stage == "complete" and code == 0):
        return
    ended = (
        f"was ended by {signal.Signals(-code).name}"
        if code is not None and code < 0
        else f"ended with exit code {code}"
    )
    if stage == "main" and code is not None and (code >= 0 or -code in _OWN_SIGNALS):
        if code:
            result.ending = ended
        if running:
            result.refuse(running.kernel, f"the program {ended} within a launch of {plain(running.kernel)}")
        return
    place = f" within a launch of {plain(running.kernel)}" if running else ""
    result.refuse(running.kernel if running else "", f"the process of the check {ended}{place}")
