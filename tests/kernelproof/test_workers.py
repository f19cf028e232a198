"""Proves that workers answer tasks, die without affecting others, and die with their parent."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kernelproof.ground import process_tree, workers
from kernelproof.ground.workers import Lost, Task
from tests import processes


def act(kind: str, value: int) -> int:
    """Ends this process, fails, sleeps or returns the square of ``value``, as ``kind`` says."""
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "crashes":
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "leaves":
        os._exit(3)
    if kind == "raises":
        raise ArithmeticError("no answer")
    if kind == "greedy":
        return len(bytearray(1 << 50))
    if kind == "slow":
        time.sleep(processes.LIFE_S)
    return value * value


def tasks(*kinds: str) -> list[Task]:
    """A task of each kind, with its place as its value."""
    return [Task(f"{kind} {value}", (kind, value)) for value, kind in enumerate(kinds)]


@pytest.mark.parametrize("jobs", [1, 3])
def test_what_dies_is_named_and_the_rest_is_answered(jobs: int) -> None:
    kinds = ["fine", "killed", "fine", "crashes", "leaves", "raises", "greedy", "fine", "fine"]
    answers = list(workers.answers(act, tasks(*kinds), jobs))
    losses = {answer.name: answer.reason for answer in answers if isinstance(answer, Lost)}
    assert sorted(answer for answer in answers if not isinstance(answer, Lost)) == [0, 4, 49, 64]
    assert losses["killed 1"] == (
        "the process that ran it was ended by SIGKILL; if memory ran out, run again with fewer --jobs"
    )
    assert losses["crashes 3"] == "the process that ran it was ended by SIGSEGV"
    assert losses["leaves 4"] == "the process that ran it ended (exit code 3)"
    assert losses["raises 5"].startswith("ArithmeticError: no answer (test_workers.py:")
    assert losses["greedy 6"].startswith("MemoryError")
    assert len(answers) == len(kinds)


def test_where_memory_runs_out_a_worker_is_the_first_victim() -> None:
    (score,) = workers.answers(Path.read_text, [Task("score", (Path("/proc/self/oom_score_adj"),))], 1)
    assert score == f"{workers.FIRST_VICTIM}\n"


def test_a_closed_pool_leaves_no_process() -> None:
    begin = time.monotonic()
    with closing(workers.answers(act, tasks("fine", "slow", "slow"), 2)) as answers:
        assert next(answers) == 0
    assert time.monotonic() < begin + processes.LIFE_S, "tasks that are not asked for would sleep for longer"
    assert not list(workers.answers(act, [], 2))


# A program whose workers or other processes sleep. It is killed meanwhile.
PROGRAM = """
import sys
from kernelproof.ground import process_tree, workers
from tests.kernelproof.test_workers import act, tasks
if sys.argv[1] == "workers":
    for answer in workers.answers(act, tasks("fine", "slow", "slow"), 3):
        print(answer, flush=True)
else:
    with process_tree.started(["sh", "-c", "sleep 120 & setsid sleep 0.1; echo 0; exec sleep 120"]) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
"""


@pytest.mark.parametrize("kind", ["workers", "process tree"])
def test_descendants_of_a_killed_process_die_at_once(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, kind]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=processes.marked_environment(tmp_path))
    assert parent.stdout is not None
    assert parent.stdout.readline() == "0\n"
    assert len(processes.living_processes(tmp_path)) >= 3
    parent.kill()
    processes.wait_until(lambda: not processes.living_processes(tmp_path), processes.END_S)
    parent.communicate()


def test_a_worker_whose_parent_is_dead_already_ends() -> None:
    worker = workers.Worker("fork", lambda pipe: workers._die_with(os.getppid() + 1))
    assert worker.death() == "ended (exit code 1)"


@pytest.mark.slow
def test_a_limit_of_memory_is_of_what_a_worker_adds() -> None:
    """Each worker inherits 0.5 GiB, which does not count. Of additions of 0.4, 0.1 and 0.1 GiB only the first exceeds
    the limit of 0.2 GiB."""

    def serve(_: object, gib: float) -> None:
        os.setsid()
        processes.hold_memory(gib)

    with processes.use_memory(0.5):
        family = [workers.Worker("fork", serve, gib) for gib in (0.4, 0.1, 0.1)]
        watches = [process_tree.Watch(worker.pid, processes.LIFE_S, 0.2) for worker in family]
        limits = [""] * len(family)
        begin = time.monotonic()
        while not any(limits) or time.monotonic() < begin + 1:
            limits = [limit or watch.passed() for limit, watch in zip(limits, watches, strict=True)]
            time.sleep(0.05)
    for worker in family:
        worker.end()
    assert limits == ["memory", "", ""]


def test_no_limit_of_memory_is_evaded_by_a_process_that_may_not_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_smaps(path: str, **options: Any) -> Any:
        if path == f"/proc/{worker.pid}/smaps_rollup":
            raise PermissionError
        return open(path, **options)  # noqa: PTH123

    monkeypatch.setattr(process_tree, "open", refuse_smaps, raising=False)
    worker = workers.Worker("fork", lambda _, gib: processes.hold_memory(gib), 0.4)
    watch, limit = process_tree.Watch(worker.pid, processes.LIFE_S, 0.2), ""
    while not limit:
        limit = watch.passed()
        time.sleep(0.05)
    worker.end()
    assert limit == "memory"


def test_a_slow_measurement_of_memory_ends_with_the_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the memory of processes that fork without end takes long; the limit of time holds all the same."""
    reading_s, limit_s = 0.02, 0.3  # seconds; all the processes together would take 20 s

    def read_slowly(pid: int) -> Counter[str]:
        time.sleep(reading_s)
        return Counter()

    monkeypatch.setattr(process_tree, "session", lambda leader: range(1000))
    monkeypatch.setattr(process_tree, "resident_bytes", lambda pids: process_tree.GIB)
    monkeypatch.setattr(process_tree, "_rollup", read_slowly)
    begin, watch = time.perf_counter(), process_tree.Watch(os.getpid(), limit_s, 0.2)
    while not (limit := watch.passed()):
        time.sleep(reading_s)
    assert limit == "time"
    assert time.perf_counter() - begin < 10 * limit_s


def test_a_program_answers_with_its_exit_code_and_output() -> None:
    assert process_tree.output(["sh", "-c", "echo out; echo err >&2; exit 3"]) == (3, "out\nerr\n")
    assert process_tree.output(["sh", "-c", "kill -9 $$"]) == (128 + signal.SIGKILL, "")
    code, text = process_tree.output(["/nowhere/program"])
    assert (code, text) == (process_tree.NOT_STARTED, "error: /nowhere/program: No such file or directory\n")


def test_a_time_limit_and_the_end_of_a_block_end_a_program(tmp_path: Path) -> None:
    begin, environment = time.monotonic(), processes.marked_environment(tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        process_tree.output(["sh", "-c", "sleep 120; sleep 120"], environment, timeout_s=0.3)
    with process_tree.started(["sh", "-c", "sleep 120 & sleep 120"], environment):
        processes.wait_until(lambda: len(processes.living_processes(tmp_path)) >= 4)
    assert not processes.living_processes(tmp_path)
    assert time.monotonic() < begin + processes.LIFE_S, "the programs would sleep for longer"
