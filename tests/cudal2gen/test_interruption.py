"""Proves on real processes that a signal ends long verbs cleanly, and that they resume from what they stored."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudal2gen import results
from cudal2gen.generation import catalog, compiler
from kernelproof import emulator
from kernelproof.ground.command_line import signals
from tests import processes
from tests.cudal2gen.chat_server import limits, proposes, serve_script
from tests.cudal2gen.paths import small
from tests.packages import require
from tests.processes import wait_until

# The variable by which commands use a stand-in for the GPU.
REHEARSAL = {"CUDAL2GEN_GPU": "tests.cudal2gen.rehearsal:H200"}


BUILT_AHEAD = [small(m=64, n=64, k=64 * stages, stages=stages) for stages in (1, 2, 3, 4)]


class Place:
    """A catalog of four kernels and a store of results, in which commands run. ``mark``: the variable by which their
    processes are found."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder
        self.store = folder / "results"
        catalog.save(BUILT_AHEAD, folder / "kernels.jsonl")
        self._variables = {
            "CUDAL2GEN_CATALOG": str(folder / "kernels.jsonl"),
            "CUDAL2GEN_RESULTS": str(self.store),
            "CUDAL2GEN_CACHE_DIR": str(folder / "cache"),  # which has the lock of each device
        }

    def start(self, *arguments: str, variables: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts a command with these variables."""
        environment = processes.marked_environment(self.mark) | self._variables | (variables or {})
        command = [sys.executable, "-m", "cudal2gen", *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def rows(self, name: str) -> int:
        """The number of rows of a stored file."""
        path = self.store / f"{name}.jsonl"
        return path.read_text().count("\n") if path.is_file() else 0

    def end(self, process: subprocess.Popen[str], number: signal.Signals) -> str:
        """Sends a signal, waits until the process and its descendants have ended, and returns what it wrote to
        stderr."""
        assert process.poll() is None, process.communicate()
        process.send_signal(number)
        wait_until(lambda: not processes.living_processes(self.mark), processes.END_S)
        _, errors = process.communicate(timeout=processes.END_S)
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), errors
        assert "Traceback" not in errors
        return errors


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A folder of its own, whose processes are killed after the test."""
    yield Place(tmp_path)
    processes.kill(tmp_path)


@pytest.mark.slow
def test_a_terminated_validate_goes_on_where_it_was(place: Place) -> None:
    first = place.start("validate", "--all", "--jobs", "1")
    wait_until(lambda: place.rows("verdicts"))
    errors = place.end(first, signal.SIGTERM)
    stored = place.rows("verdicts")
    assert 0 < stored < len(BUILT_AHEAD)
    assert errors == "note: interrupted; finished verdicts are stored, and the same command with --changed continues\n"
    output, errors = place.start("validate", "--all", "--changed", "--jobs", "1").communicate()
    assert re.match(rf"4 records, {4 - stored} kernels? executed in \d+ cases, {stored} had a verdict", output), errors
    assert place.rows("verdicts") == len(BUILT_AHEAD)


@pytest.mark.slow
def test_workers_of_a_killed_validate_die(place: Place) -> None:
    process = place.start("validate", "--all", "--jobs", "2")
    wait_until(lambda: place.rows("verdicts"))
    assert len(processes.living_processes(place.mark)) == 3
    place.end(process, signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_the_failure_of_its_kernel(place: Place) -> None:
    process = place.start("validate", "--all", "--jobs", "2")
    wait_until(lambda: processes.workers_of(process.pid))
    os.kill(processes.workers_of(process.pid)[0], signal.SIGKILL)
    output, errors = process.communicate()
    assert re.fullmatch(
        r"error: hgemm_\w+: the process that ran it was ended by SIGKILL; if memory ran out, "
        r"run again with fewer --jobs\n",
        errors,
    )
    assert output.endswith(": 3 right, 0 wrong, 1 without a verdict\n")
    assert (process.returncode, place.rows("verdicts")) == (1, 3)


@pytest.mark.slow
def test_verdicts_are_looked_up_before_anything_is_compiled(place: Place, tmp_path: Path) -> None:
    output, errors = place.start("validate", "--mnk", "64_64_64").communicate()
    assert output.endswith(": 1 right, 0 wrong\n"), errors
    elsewhere = ("--build-dir", str(tmp_path / "elsewhere"))
    output, errors = place.start(*elsewhere, "validate", "--changed", "--mnk", "64_64_64").communicate()
    assert output == "1 record, 0 kernels executed in 0 cases, 1 had a verdict: 0 right, 0 wrong\n", errors
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.slow
def test_what_a_killed_search_measures_and_compiles_dies_with_it(place: Place) -> None:
    pytest.importorskip("torch")
    arguments = ("--mnk", "64_64_64", "--gpu", "h200", "--acc", "f32", "--proposers", "random")
    process = place.start("--build-dir", str(place.mark / "build"), "tune", *arguments, variables=REHEARSAL)
    wait_until(lambda: any("process_tree" in line for line in processes.living_processes(place.mark).values()))
    assert any("spawn_main" in line for line in processes.living_processes(place.mark).values()), (
        "a worker process compiles"
    )
    place.end(process, signal.SIGKILL)


@pytest.mark.slow
def test_an_interrupted_search_keeps_its_trials(place: Place) -> None:
    trials = place.mark / "trials.jsonl"
    arguments = ("--mnk", "4096_256_64", "--gpu", "h200", "--acc", "f32", "--environment", "model")
    process = place.start(
        "tune", *arguments, "--proposers", "random", "--evaluations", "100000", "--trials", str(trials)
    )
    wait_until(lambda: trials.is_file() and trials.stat().st_size)
    assert f"interrupted: trials are in {trials}; the same command continues from there" in place.end(
        process, signal.SIGINT
    )
    assert results.trials(trials)


@pytest.mark.slow
def test_a_search_that_waits_for_a_language_model_is_interrupted_and_resumed(place: Place) -> None:
    require("openai")
    trials, transcript = place.mark / "trials.jsonl", place.mark / "trials-llm.jsonl"
    first, second = (
        proposes(*(("incumbent", {"stages": stages, "c_batch": batch}) for stages in (2, 3))) for batch in (1, 2)
    )
    with serve_script(first, limits("600"), second, forever=True) as server:
        arguments = (
            "tune", "--mnk", "64_64_64", "--acc", "f16", "--environment", "model", "--proposers", "llm", "--llm",
            f"scripted@{server.url}", "--evaluations", "4", "--trials", str(trials),
        )  # fmt: skip
        process = place.start(*arguments)
        wait_until(lambda: transcript.is_file() and "429" in transcript.read_text())
        place.end(process, signal.SIGINT)
        kept = results.trials(trials)
        assert [trial.proposer for trial in kept] == ["llm", "llm"]
        output, errors = place.start(*arguments).communicate()
    assert "1 of 1 problems, 4 evaluations in" in output, errors
    assert results.trials(trials)[:2] == kept, "stored trials are not repeated"


@pytest.mark.thorough
def test_a_terminated_benchmark_keeps_what_it_measured(place: Place) -> None:
    pytest.importorskip("torch")
    arguments = ("--all", "--baselines", "none", "--set", "gpu=h200", "--gpu", "a100")
    process = place.start("bench", *arguments, variables=REHEARSAL)
    wait_until(lambda: place.rows("measurements") > 1)
    place.end(process, signal.SIGTERM)
    assert place.rows("measurements") > 1


# Locks a mutex twice, and so waits forever in C, where no signal is handled.
STUCK_PROGRAM = """
import ctypes
from kernelproof.ground.command_line import signals
signals.handle()
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
print("locked", flush=True)
libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.slow
def test_a_call_that_never_returns_is_ended_too(place: Place) -> None:
    environment = processes.marked_environment(place.mark)
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK_PROGRAM], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    process.terminate()
    process.communicate(timeout=processes.END_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert signals.GRACE_S <= 1, "a command promises to end within two seconds"


# The signal arrives while a row is written. pydantic replaces an exception in its serializer by a ValueError.
WRITING_PROGRAM = """
import os, signal
from pydantic import BaseModel, model_serializer
from cudal2gen.cli import app, main

class Row(BaseModel):
    @model_serializer
    def spell(self):
        os.kill(os.getpid(), signal.SIGINT)
        return {}

app.command("write")(lambda: Row().model_dump_json())
main()
"""


def test_a_signal_while_a_row_is_written_ends_with_its_code(place: Place) -> None:
    command = [sys.executable, "-c", WRITING_PROGRAM, "write"]
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, env=processes.marked_environment(place.mark)
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGINT, "", "")


@pytest.mark.parametrize("interruption", [SystemExit(143), KeyboardInterrupt()])
def test_an_interruption_within_a_launch_ends_the_session(interruption: BaseException) -> None:
    def interrupt(words: object) -> int:
        raise interruption

    artifact, library = compiler.build(BUILT_AHEAD[:1])[0], compiler.launcher()
    session = emulator.session()
    session.calls["launch"] = interrupt
    with pytest.raises(type(interruption)):
        launch_and_fail(session, artifact.directory, library)
    assert session.reports == []


def launch_and_fail(session: emulator.Session, directory: Path, library: Path) -> None:
    """Launches a kernel of 64 x 64 x 64, which must fail."""
    from cudal2gen.launch.launcher import LaunchError, OpenKernel

    with session, OpenKernel(library, directory, {}, emulator.runtime_path()) as kernel:
        matrices = [session.memory.allocate(64 * 64 * 2, "inout").address for _ in range(3)]
        with pytest.raises(LaunchError):
            kernel.launch(matrices[0], 64, matrices[1], 64, matrices[2], 64, 64, 64, 64)
