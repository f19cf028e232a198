"""Proves that first runs of kernels are noted on disk, by processes that live, end, hang or are killed."""

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


def runs(file: Path, card: str = "a card") -> FirstRuns:
    """The first runs of kernels on a card, as one process sees them."""
    return FirstRuns(card, file)


@contextmanager
def other(function: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Any]]:
    """Another process, and a pipe to it, which it receives first."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=function, args=(there, *arguments), daemon=True)
    process.start()
    try:
        yield process, here
    finally:
        process.kill()
        process.join()


def kill(process: Any) -> None:
    """Kills a process and waits for its end."""
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def run_one(pipe: Any, file: Path, digest: str, outcome: str = "right") -> None:
    """A first run that lasts until the pipe has something."""
    with runs(file).begin(digest) as note:
        pipe.send("running")
        pipe.recv()
        note(outcome, "")  # type: ignore[arg-type]
    pipe.send("over")
    pipe.recv()


def test_a_run_of_a_living_process_bans_nothing_and_of_a_killed_one_it_does(file: Path) -> None:
    with other(run_one, file, "slow") as (process, pipe):
        assert pipe.recv() == "running"
        near = runs(file)
        assert near.banned() == set()
        with near.begin("slow") as note:  # at the same time
            note("right", "")
        assert near.banned() == set()
        kill(process)
        assert near.banned() == runs(file).banned() == {"slow"}
        assert runs(file, "another card").banned() == set()


def test_a_run_that_ends_lifts_its_mark(file: Path) -> None:
    with other(run_one, file, "slow") as (process, pipe):
        assert pipe.recv() == "running"
        pipe.send("end")
        assert pipe.recv() == "over"
        assert runs(file).banned() == set(), "its process lives, without a lock"
        kill(process)
        assert runs(file).banned() == set()


def test_a_run_that_hangs_is_banned_until_it_ends_after_all(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with other(run_one, file, "stopped") as (process, pipe):
        assert pipe.recv() == "running"
        os.kill(process.pid, signal.SIGSTOP)
        assert runs(file).banned() == set()
        monkeypatch.setattr(first_runs, "MAX_SECONDS", 0.0)
        assert runs(file).banned() == {"stopped"}
        os.kill(process.pid, signal.SIGCONT)
        pipe.send("end")
        assert pipe.recv() == "over"
        assert runs(file).banned() == set()


@pytest.mark.parametrize("wrong_first", [True, False])
def test_what_one_process_finds_wrong_another_does_not_lift(file: Path, wrong_first: bool) -> None:
    near, far = runs(file), runs(file)
    outcomes = [("wrong", "off by one"), ("right", "")]
    with near.begin("kernel") as first, far.begin("kernel") as second:
        assert near.banned() == far.banned() == runs(file).banned() == set()
        for note, (outcome, reason) in zip((first, second), outcomes if wrong_first else outcomes[::-1], strict=True):
            note(outcome, reason)  # type: ignore[arg-type]
    assert near.banned() == far.banned() == runs(file).banned() == {"kernel"}


def test_a_block_without_an_outcome_leaves_a_ban(file: Path) -> None:
    near = runs(file)
    with pytest.raises(RuntimeError, match="a fault"), near.begin("faulty"):
        raise RuntimeError("a fault of the device")
    assert near.banned() == runs(file).banned() == {"faulty"}
    near.ban("later", "fails after its first run")
    assert near.banned() == {"faulty", "later"}


@pytest.mark.slow
def test_the_lock_is_closed_with_its_object(file: Path) -> None:
    """Python would warn of an unclosed file in whatever code runs when it is collected."""
    near = runs(file)
    with near.begin("kernel") as note:
        note("right", "")
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        del near, note
        gc.collect()
    assert [text for warning in raised if str(file.parent) in (text := str(warning.message))] == []


def test_rows_of_other_versions_and_cut_lines_hide_no_ban(file: Path) -> None:
    near = runs(file)
    with pytest.raises(ZeroDivisionError), near.begin("new"):
        raise ZeroDivisionError
    text = file.read_text()
    later = text.replace('"new"', '"later"').replace('{"kind"', '{"clock": 1, "kind"')
    (run,) = near.entries()
    older = text.replace('"new"', '"older"').replace(f'"run":"{run.number}",', "").replace('"when"', '"before"')
    strange = text.replace('"new"', '"strange"').replace('"begun"', '"melted"')
    file.write_text(text + later + older + strange)
    assert near.banned() == runs(file).banned() == {"new", "later", "older", "strange"}
    with file.open("a") as end:
        end.write('{"kind": "first ru')  # another process is writing it
    assert runs(file).banned() == near.banned()
    with file.open("a") as end:
        end.write("\n\xff\n[1]\n" + text.replace('"new"', '"last"'))
    far = runs(file)
    with pytest.warns(SkippedLine):
        assert far.banned() == {"new", "later", "older", "strange", "last"}
    assert RunId("older", "") in far.entries()


def hammer(pipe: Any, file: Path, name: str, rounds: int) -> None:
    """Begins first runs of kernels that all processes share and of kernels of its own. Some end without an outcome."""
    near = runs(file)
    for number in range(rounds):
        with near.begin(f"shared-{number % 3}") as note:
            note("right", "")
        if number % 20 == 0:
            try:
                with near.begin(f"{name}-{number}"):
                    raise ZeroDivisionError
            except ZeroDivisionError:
                pipe.send(f"{name}-{number}")
    pipe.send(f"{name} over")
    if name == "killed":
        with near.begin("killed"):
            pipe.send("running")
            time.sleep(600)


def test_processes_write_and_compact_the_file_and_lose_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_runs, "MAX_BYTES", 2000)
    here = runs(file)
    with other(hammer, file, "killed", 40) as killed, other(hammer, file, "whole", 60) as whole:
        sent: set[str] = set()
        deadline = time.monotonic() + 300
        while not {"whole over", "running"} <= sent:
            for _, pipe in (killed, whole):
                if pipe.poll(0.001):
                    sent.add(pipe.recv())
            assert not {digest for digest in here.banned() if digest.startswith("shared")}, "its process lives"
            assert time.monotonic() < deadline
        kill(killed[0])
    stay = sent - {"whole over", "killed over", "running"}
    assert len(stay) == 2 + 3
    assert here.banned() == stay | {"killed"}
    assert file.stat().st_size <= 4000 + 200 * len(stay)
    assert sorted(path.name for path in file.parent.iterdir()) == [first_runs.LOCKS, file.name]
