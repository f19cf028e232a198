"""Proves the file that records each kernel's first run on a card: a kernel whose first run hangs, crashes or is wrong
stays banned for every process.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.packages import require

require("torch")

from cudal2gen.operators.measuring import first_runs  # noqa: E402
from cudal2gen.operators.measuring.first_runs import FirstRuns, RunId  # noqa: E402
from kernelproof.ground.errors import SkippedLine  # noqa: E402

pytestmark = pytest.mark.torch

FORK = multiprocessing.get_context("fork")  # fast, and children inherit descriptors


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of a store in a folder that does not exist yet."""
    return tmp_path / "store" / "runs.jsonl"


def open_store(file: Path, card: str = "a card") -> FirstRuns:
    """A store of a card's first runs, as another process would open it: it has read nothing yet."""
    return FirstRuns(card, file)


@contextmanager
def other_process(function: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Any]]:
    """Runs ``function(pipe, *arguments)`` in another process; yields the process and our end of the pipe."""
    our_end, its_end = FORK.Pipe()
    process = FORK.Process(target=function, args=(its_end, *arguments), daemon=True)
    process.start()
    try:
        yield process, our_end
    finally:
        process.kill()
        process.join()


def kill(process: Any) -> None:
    """Kills a process and waits for its end."""
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def run_one(pipe: Any, file: Path, digest: str, outcome: str = "right") -> None:
    """Begins a first run, and ends it when a message arrives on the pipe. A second message ends the process."""
    with open_store(file).begin(digest) as note:
        pipe.send("running")
        pipe.recv()
        note(outcome, "")  # type: ignore[arg-type]
    pipe.send("over")
    pipe.recv()


def test_a_run_bans_its_kernel_only_once_its_process_is_killed(file: Path) -> None:
    with other_process(run_one, file, "slow") as (process, pipe):
        assert pipe.recv() == "running"
        store = open_store(file)
        assert store.banned() == set()
        with store.begin("slow") as note:  # a second run of the kernel, while the other process still runs it
            note("right", "")
        assert store.banned() == set()
        kill(process)
        assert store.banned() == open_store(file).banned() == {"slow"}
        assert open_store(file, "another card").banned() == set()


def test_a_run_that_ends_bans_nothing(file: Path) -> None:
    with other_process(run_one, file, "slow") as (process, pipe):
        assert pipe.recv() == "running"
        pipe.send("end")
        assert pipe.recv() == "over"
        assert open_store(file).banned() == set(), "its process lives, but holds no lock"
        kill(process)
        assert open_store(file).banned() == set()


def test_a_kernel_that_hangs_is_banned_until_its_run_ends_after_all(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with other_process(run_one, file, "stopped") as (process, pipe):
        assert pipe.recv() == "running"
        os.kill(process.pid, signal.SIGSTOP)
        assert open_store(file).banned() == set()
        monkeypatch.setattr(first_runs, "MAX_SECONDS", 0.0)
        assert open_store(file).banned() == {"stopped"}
        os.kill(process.pid, signal.SIGCONT)
        pipe.send("end")
        assert pipe.recv() == "over"
        assert open_store(file).banned() == set()


@pytest.mark.parametrize("wrong_first", [True, False])
def test_a_right_run_does_not_lift_the_ban_of_a_wrong_one(file: Path, wrong_first: bool) -> None:
    store, other_store = open_store(file), open_store(file)
    outcomes = [("wrong", "off by one"), ("right", "")]
    with store.begin("kernel") as first, other_store.begin("kernel") as second:
        assert store.banned() == other_store.banned() == open_store(file).banned() == set()
        for note, (outcome, reason) in zip((first, second), outcomes if wrong_first else outcomes[::-1], strict=True):
            note(outcome, reason)  # type: ignore[arg-type]
    assert store.banned() == other_store.banned() == open_store(file).banned() == {"kernel"}


def test_a_run_without_an_outcome_bans_its_kernel(file: Path) -> None:
    store = open_store(file)
    with pytest.raises(RuntimeError, match="a fault"), store.begin("faulty"):
        raise RuntimeError("a fault of the device")
    assert store.banned() == open_store(file).banned() == {"faulty"}
    store.ban("later", "fails after its first run")
    assert store.banned() == {"faulty", "later"}


@pytest.mark.slow
def test_the_lock_is_closed_with_its_store(file: Path) -> None:
    """If the lock's file stayed open, Python would warn when it is collected, in unrelated code."""
    store = open_store(file)
    with store.begin("kernel") as note:
        note("right", "")
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        del store, note
        gc.collect()
    assert [text for warning in raised if str(file.parent) in (text := str(warning.message))] == []


def test_rows_of_other_versions_and_cut_lines_hide_no_ban(file: Path) -> None:
    store = open_store(file)
    with pytest.raises(ZeroDivisionError), store.begin("new"):
        raise ZeroDivisionError
    text = file.read_text()
    # A row of a later version, which has one more field.
    later = text.replace('"new"', '"later"').replace('{"kind"', '{"clock": 1, "kind"')
    # A row of an older version, without the fields ``run`` and ``when``. The unknown field in place of ``when`` is
    # ignored.
    (run,) = store.entries()
    older = text.replace('"new"', '"older"').replace(f'"run":"{run.number}",', "").replace('"when"', '"before"')
    # A row with an outcome that this version does not know.
    strange = text.replace('"new"', '"strange"').replace('"begun"', '"melted"')
    file.write_text(text + later + older + strange)
    assert store.banned() == open_store(file).banned() == {"new", "later", "older", "strange"}
    with file.open("a") as end:
        end.write('{"kind": "first ru')  # another process is writing it
    assert open_store(file).banned() == store.banned()
    with file.open("a") as end:
        # Ends the cut line and adds two more invalid ones. All three are skipped.
        end.write("\n\xff\n[1]\n" + text.replace('"new"', '"last"'))
    other_store = open_store(file)
    with pytest.warns(SkippedLine):
        assert other_store.banned() == {"new", "later", "older", "strange", "last"}
    assert RunId("older", "") in other_store.entries()


def run_many(pipe: Any, file: Path, name: str, rounds: int) -> None:
    """Runs a kernel in each round that other processes run too; every 20th round leaves a ban on a kernel of its own.

    The process named "killed" then begins a run that it does not end.
    """
    store = open_store(file)
    for number in range(rounds):
        with store.begin(f"shared-{number % 3}") as note:
            note("right", "")
        if number % 20 == 0:
            try:
                with store.begin(f"{name}-{number}"):
                    raise ZeroDivisionError
            except ZeroDivisionError:
                pipe.send(f"{name}-{number}")
    pipe.send(f"{name} over")
    if name == "killed":
        with store.begin("killed"):
            pipe.send("running")
            time.sleep(600)


def test_processes_write_and_compact_the_file_and_lose_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_runs, "MAX_BYTES", 2000)
    store = open_store(file)
    with other_process(run_many, file, "killed", 40) as killed, other_process(run_many, file, "whole", 60) as whole:
        sent: set[str] = set()
        deadline = time.monotonic() + 300
        while not {"whole over", "running"} <= sent:
            for _, pipe in (killed, whole):
                if pipe.poll(0.001):
                    sent.add(pipe.recv())
            assert not {digest for digest in store.banned() if digest.startswith("shared")}, "its process lives"
            assert time.monotonic() < deadline
        kill(killed[0])
    failed = sent - {"whole over", "killed over", "running"}
    assert len(failed) == 2 + 3  # rounds 0 and 20 of 40, and rounds 0, 20 and 40 of 60
    assert store.banned() == failed | {"killed"}
    # Twice MAX_BYTES, and less than 200 bytes for each ban.
    assert file.stat().st_size <= 4000 + 200 * len(failed)
    assert sorted(path.name for path in file.parent.iterdir()) == [first_runs.LOCKS, file.name]
