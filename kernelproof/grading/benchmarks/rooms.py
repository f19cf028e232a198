"""Starts rooms and sends them requests. A room is a sandboxed process that executes one untrusted Python file."""

from __future__ import annotations

import faulthandler
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from kernelproof.checking import assembly, execution, includes
from kernelproof.grading import launcher
from kernelproof.grading.benchmarks import wire
from kernelproof.ground import places, process_tree, sandbox
from kernelproof.ground.errors import Failure, MissingTool, WrongInput
from kernelproof.ground.workers import Worker

STEP_S = 0.05  # seconds between two checks of the limits while the grader waits for a room
MOST_COMPILATIONS = 12  # how many extensions a solution may have compiled
# Options of nvcc that change what a kernel computes. All others are left out, since they could name programs or files.
_OPTION = re.compile(
    r"-[DU]\w+(=[\w.+-]*)?|--?use_fast_math|--?(fmad|ftz|prec-div|prec-sqrt)=(true|false)|--extended-lambda"
)


class RoomLost(Exception):
    """A room has died, exceeded a limit, or cannot be confined. The message is the rest of a sentence.

    ``limit``: the limit that was exceeded ("time", "memory" or "processes"), or "".
    """

    def __init__(self, text: str, limit: str = "") -> None:
        super().__init__(text)
        self.limit = limit


class NoTorch(Exception):
    """Torch is not installed."""


class Room:
    """A running room, seen from the grader.

    ``seconds`` and ``gib`` limit the room's process, ``compile_s`` each compilation. ``remarks``: what the user should
    know about its compilations.
    """

    def __init__(self, device: str, seconds: float, gib: float, compile_s: float) -> None:
        self.device, self.seconds, self.gib, self.compile_s = device, seconds, gib, compile_s
        self.remarks: list[str] = []
        self.compilations = 0
        cache = places.user_cache() / "check"
        cache.mkdir(parents=True, exist_ok=True)
        self.box = execution.program_sandbox([cache], seconds + compile_s)
        self.worker = Worker("fork", _serve, device, self.box)
        self.watch = process_tree.Watch(self.worker.pid, seconds, gib, self.box.processes)

    def ask(
        self, do: str, tensors: Sequence[wire.Tensor] = (), **fields: Any
    ) -> tuple[wire.Message, list[wire.Tensor]]:
        """Send a request and wait for its answer. Meanwhile, compile the extensions that the room needs.

        ``do``: the name of the request, as in ``Guest.serve``; ``fields``: its other parts. Returns the answer and its
        tensors. Raises RoomLost.
        """
        file = self.worker.pipe.fileno()
        try:
            wire.send(file, {"do": do, **fields}, tensors)
            while True:
                answer, arrays = wire.receive(file, self._wait)
                if "compile" not in answer:
                    break
                wire.send(file, self._compile(answer["compile"]))
        except (EOFError, OSError):
            raise RoomLost(f"the process of the {'reference' if do in ('reference', 'draw') else 'solution'} "
                           f"{self.worker.death()}") from None  # fmt: skip
        except wire.BrokenMessage as error:
            raise RoomLost(f"the room's answer is unreadable: {error}") from None
        if "confinement" in answer:
            raise RoomLost(f"the sandbox fails: {answer['confinement']}")
        return answer, arrays

    def _wait(self) -> None:
        """Wait until the room has written something. Raises RoomLost if it exceeds a limit."""
        while not self.worker.pipe.poll(STEP_S):
            if limit := self.watch.passed():
                text = {"time": f"takes more than {self.seconds:g} s", "memory": f"needs more than {self.gib:g} GiB"}
                raise RoomLost(text.get(limit, "starts too many processes"), limit)

    def _compile(self, request: Any) -> wire.Message:
        """Compile an extension for the room. The answer has its path, or the reason why there is none.

        The request is untrusted, since the room's code may have written it.
        """
        try:
            text = str(request["text"])
            functions = [str(name) for name in request["functions"]]
            flags = [str(flag) for flag in request["flags"]]
        except (TypeError, KeyError):
            return {"missing": "no request of a compilation"}
        self.compilations += 1
        if self.compilations > MOST_COMPILATIONS:
            return {"missing": f"more than {MOST_COMPILATIONS} extensions"}
        if not all(name.replace("::", "").replace("_", "a").isalnum() for name in functions):
            return {"refused": f"{functions}: no names of functions"}
        if lines := includes.revealing_lines(text):
            return {"refused": f"a file that is not there is included: {lines[0]}"}
        options = ("--expt-relaxed-constexpr", *(flag for flag in flags if _OPTION.fullmatch(flag)))
        try:
            path = launcher.extension(text, functions, self.device, options, self.compile_s)
            for code in assembly.embedded(path, self.device):
                answer = assembly.answer_of(code, self.device, foreign=True)
                if answer.refusals:
                    return self._compile_error(f"ptxas: {answer.refusals[0].message}")
                if answer.unable:
                    self.remarks.append(f"ptxas did not assemble the PTX: {answer.unable}")
        except (launcher.MissingPart, WrongInput, MissingTool) as error:
            return {"missing": str(error)}
        except Failure as error:
            if "did not end within" in str(error):
                return {"missing": str(error)}
            return self._compile_error(str(error))
        return {"path": str(path)}

    def _compile_error(self, text: str) -> wire.Message:
        """The answer for an extension that does not compile. A solution may catch the error, so it is also a remark."""
        self.remarks.append(f"an extension does not compile: {text[:600]}")
        return {"refused": text}

    def end(self) -> None:
        """Kill the room and all that it started."""
        with suppress(ProcessLookupError):
            process_tree.kill_session(self.worker.pid)
        self.worker.end()


@contextmanager
def room(device: str, seconds: float, gib: float, compile_s: float) -> Iterator[Room]:
    """A context with a room, which ends with it. Raises NoTorch if torch is not installed."""
    try:
        from kernelproof.grading.benchmarks import guest  # noqa: F401 # imported before the fork, so that rooms need not
    except ImportError:
        raise NoTorch("cannot judge: needs torch, for the CPU (pip install torch)") from None
    opened = Room(device, seconds, gib, compile_s)
    try:
        yield opened
    finally:
        opened.end()


def _serve(pipe: Connection, device: str, box: sandbox.Sandbox) -> None:
    """The main function of a room's process. The process is confined before it reads anything of untrusted files."""
    os.setsid()
    faulthandler.disable()
    file = pipe.fileno()
    from kernelproof.grading.benchmarks import guest

    try:
        sandbox.confine(box, (file,), KERNELPROOF_CACHE_DIR=str(places.user_cache()), TRITON_CACHE_DIR="/tmp/triton")
    except sandbox.ConfinementError as error:
        wire.send(file, {"confinement": str(error)})
        return
    guest.Guest(file, device).serve()
