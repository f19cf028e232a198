"""Runs command lines in forks of a process that has imported the program, since these start immediately."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, NamedTuple

# The program of the process that forks commands.
START = "from tests.commands import serve; serve({program!r})"
# Modules of a program: the command line and the modules that its verbs import.
IMPORTED_AHEAD = {
    "cudal2gen": (
        "cudal2gen.cli", "rich.table", "cudal2gen.bench", "cudal2gen.report", "cudal2gen.validator",
        "cudal2gen.timing.profile", "cudal2gen.tuner.search",
    ),
    "kernelproof": (
        "kernelproof.cli", "rich.table", "kernelproof.checking.supervision", "kernelproof.grading",
        "kernelproof.profile",
    ),
}  # fmt: skip
READ_AT_START = ("PYTHON", "LD_")  # prefixes of variables that Python or its loader reads before the program


class Usage:
    """CPU seconds of the commands that have ended. ``cpu_times`` adds them to those of this process's own children."""

    seconds = 0.0


class Server(NamedTuple):
    """A process with the pipes for its requests and its answers, which are a line of JSON each."""

    process: subprocess.Popen[str]
    requests: IO[str]
    answers: IO[str]


@cache
def server(program: str, _owner: int) -> Server:
    """The process that forks commands. It ends when this process closes its end of the pipe.

    ``_owner``: the id of this process, so that a fork of it does not share the pipe.
    """
    start = START.format(program=program)
    process = subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    return Server(process, process.stdin, process.stdout)


def run(
    *arguments: str, env: dict[str, str] | None = None, program: str = "cudal2gen"
) -> subprocess.CompletedProcess[str]:
    """Runs ``cudal2gen`` or ``kernelproof`` with variables added to this environment; returns exit code and output."""
    command = [sys.executable, "-m", program, *arguments]
    variables = os.environ | (env or {})
    if any(name.startswith(READ_AT_START) for name in env or {}):
        return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    with TemporaryDirectory(prefix="test-command-") as folder:
        _, requests, answers = server(program, os.getpid())
        request = {"arguments": arguments, "variables": variables, "directory": str(Path.cwd()), "outputs": folder}
        requests.write(json.dumps(request) + "\n")
        requests.flush()
        code, seconds = json.loads(answers.readline())
        Usage.seconds += seconds
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(command, code, out, err)


def serve(program: str) -> None:
    """Forks a child for each request, and answers with its exit code and CPU seconds.

    The child returns from ``main`` and ends like any Python process.
    """
    import gc

    cli, *imported = map(import_module, IMPORTED_AHEAD[program])
    if program == "cudal2gen":
        import_module("cudal2gen.generation.catalog").load()  # takes a second, is read by most verbs, and stays cached
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _become(program, **json.loads(line))
            cli.main()
            return
        _, status, usage = os.wait4(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime]), flush=True)
    del imported


def _become(program: str, arguments: list[str], variables: dict[str, str], directory: str, outputs: str) -> None:
    """Gives this process the arguments, variables and folder of a request, and the files ``out`` and ``err`` of the
    folder ``outputs`` as its outputs."""
    sys.argv = [program, *arguments]
    os.environ.clear()
    os.environ.update(variables)
    with contextlib.suppress(FileNotFoundError):
        os.chdir(directory)
    for descriptor, name in ((0, os.devnull), (1, f"{outputs}/out"), (2, f"{outputs}/err")):
        flags = os.O_WRONLY | os.O_CREAT if descriptor else os.O_RDONLY
        opened = os.open(name, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
