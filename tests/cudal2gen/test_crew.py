"""Proves that many sessions run at a time, that a killed command asks nothing twice, and what its page shows."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from cudal2gen import results
from cudal2gen.generation import catalog
from cudal2gen.results import INCUMBENT, KERNEL, Timing, Trial
from cudal2gen.tuner import memory
from cudal2gen.tuner.executor import InProcess
from cudal2gen.tuner.language_model import chat, transcript
from cudal2gen.tuner.language_model.server import Endpoint
from cudal2gen.tuner.language_model.transcript import AnswerOutcome, Exchange, Message
from cudal2gen.tuner.writing import crew, page
from cudal2gen.tuner.writing.lead import Lead
from cudal2gen.tuner.writing.modelled import ModelledTimes, Profiler
from cudal2gen.tuner.writing.proof import CheckLimits
from cudal2gen.tuner.writing.session import Session, SessionLimits
from scripts import writing_population, writing_time
from tests import browser, processes
from tests.cudal2gen import device_texts
from tests.cudal2gen.chat_server import Handler, serve_script
from tests.cudal2gen.device_texts import PROBLEM, gemm
from tests.cudal2gen.test_writing import LOOP, block, writes
from tests.packages import require
from tests.processes import wait_until

require("openai")

# The two problems, m n k.
SIZES = ((64, 48, 64), (128, 48, 64))


class Writer:
    """A model whose answers take ``seconds``, each with another unrolled loop. ``peak``: the most concurrent
    questions."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now, self.peak, self._lock, self._count = seconds, 0, 0, threading.Lock(), 0

    def __call__(self, handler: Handler) -> None:
        with self._lock:
            self.now += 1
            self._count += 1
            count, self.peak = self._count, max(self.peak, self.now)
        time.sleep(self.seconds)
        with self._lock:
            self.now -= 1
        writes({"patch": block(LOOP, f"#pragma unroll {2 + count % 7}\n{LOOP}"), "why": "unroll"})(handler)


def start(folder: Path, url: str) -> subprocess.Popen[str]:
    """Starts the command for two problems, with two trajectories of two rounds each."""
    file = folder / "catalog" / "kernels.jsonl"
    if not file.exists():
        os.environ["XDG_DATA_HOME"] = str(folder / "data")
        records = [device_texts.record(gemm(), PROBLEM.revised(m=m, n=n, k=k)) for m, n, k in SIZES]
        catalog.save(records, file)
    (folder / "settings.toml").write_text("[write]\nkernels = 1\n")
    variables = {"XDG_DATA_HOME": str(folder / "data"), "CUDAL2GEN_CATALOG": str(file)}
    command = [
        sys.executable, "-m", "cudal2gen", "write", *(f"--mnk={m}_{n}_{k}" for m, n, k in SIZES), "--acc", "f32",
        "--environment", "model", "--trials", str(folder / "trials.jsonl"), "--settings",
        str(folder / "settings.toml"), "--llm", f"first@{url},second@{url}", "--rounds", "2",
    ]  # fmt: skip
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=processes.marked_environment(folder) | variables,
    )


@pytest.mark.thorough
@pytest.mark.slow
def test_a_killed_command_asks_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    writer, exchanges = Writer(1.0), tmp_path / "trials-llm.jsonl"
    with serve_script(writer, forever=True) as server:
        first = start(tmp_path, server.url)
        wait_until(lambda: exchanges.is_file() and '"kind":"outcome"' in exchanges.read_text())
        first.send_signal(signal.SIGKILL)
        first.communicate()
        wait_until(lambda: not processes.living_processes(tmp_path), processes.END_S)
        output, errors = start(tmp_path, server.url).communicate()
        assert "4 of" not in errors
        asked = len(server.requests)
        again, errors_again = start(tmp_path, server.url).communicate()
        assert len(server.requests) == asked, "all rounds are answered"
    assert writer.peak == 4, "all sessions ask at a time"
    assert {request["model"] for request in server.requests} == {"first", "second"}
    answered = [line for line in transcript.read(exchanges) if isinstance(line, Exchange) and not line.error]
    counts = Counter((line.run, line.problem, line.digest) for line in answered)
    assert set(counts.values()) == {1}, errors
    assert output.count("kernels written") == again.count("kernels written") == 4, errors_again
    trials = Counter((trial.run, json.dumps(trial.record)) for trial in results.trials(tmp_path / "trials.jsonl"))
    assert set(trials.values()) == {1}
    assert "<h2>Families of ideas</h2>" in (tmp_path / "trials-progress.html").read_text()


def trial(us: float, unroll: int) -> Trial:
    """A trial in which a kernel takes ``us`` microseconds and the incumbent 2."""

    def timing(name: str, value: float) -> Timing:
        return Timing(contender=name, detail="", calls=1, event_us=(value,), error=0.0)

    return Trial(
        environment="model", on="m", run="r", **PROBLEM.model_dump(), proposer="writer", name="", record={"u": unroll},
        outcome="measured", timings=(timing(KERNEL, us), timing(INCUMBENT, 2.0)),
    )  # fmt: skip


def lines() -> list[transcript.Line]:
    """A transcript of three answers, each with one proposal."""
    said: list[transcript.Line] = []
    for place, why in enumerate(("prefetch by cp.async", "<script>alert(1)</script>", "unroll the loop")):
        text = json.dumps({"kernels": [{"why": why}]})
        said.append(
            Exchange(
                run="r", digest=str(place), problem=PROBLEM.title, form="schema", messages=(Message("user", "q"),),
                text=text, tokens_in=100, tokens_out=10, seconds=60,
            )
        )  # fmt: skip
        said.append(
            AnswerOutcome(
                run="r", exchange=transcript.answer_key(str(place), text), problem=PROBLEM.model_dump(mode="json"),
                stage="hgemm", proposals=({"u": place},),
            )
        )  # fmt: skip
    return said


def test_a_page_has_the_best_speed_after_each_answer() -> None:
    trials = [trial(4.0, 0), trial(1.0, 1), trial(1.6, 2)]
    (steps,) = page.progress_points(lines(), trials).values()
    assert steps == [(110, 60, 1.0), (220, 120, 2.0), (330, 180, 2.0)]
    assert page.families(lines()) == {"copies ahead": 1, "other": 1, "loops": 1}
    text = page.page(lines(), trials)
    assert "<script" not in text
    assert "http:" not in text.replace("http://www.w3.org/2000/svg", ""), "nothing is loaded"
    assert "<td>2.000</td><td>3</td><td>330</td>" in text


@pytest.mark.slow
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    try:
        browser.find()
    except browser.BrowserError as error:
        pytest.skip(str(error))
    path = tmp_path / "page.html"
    path.write_text(page.page(lines(), [trial(1.0, 1)]))
    with browser.page() as shown:
        browser.open_page(shown, path)
        assert shown.run("document.querySelectorAll('svg polyline').length") == 2
        assert shown.faults == []


def test_an_executor_takes_one_submission_at_a_time() -> None:
    inside: list[int] = []

    class Slow:
        name, on, in_order = "model", "m", True

        def submit(self, job: object, rank: int = 0) -> object:
            inside.append(1)
            assert len(inside) == 1
            time.sleep(0.01)
            inside.clear()
            return object()

    shared = crew.SerialExecutor(Slow())  # type: ignore[arg-type]
    threads = [threading.Thread(target=shared.submit, args=(None,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not inside


def test_a_simulated_gpu_is_busy_with_enough_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer takes 60 s and has three proofs of 6 s, of which 60 % lead to 1.5 s of the GPU. A single session keeps
    it busy for 2.7 of 80.7 s."""
    assert writing_time.simulate(problems=64, at_once=64, cores=16).busy >= 0.8
    monkeypatch.setattr(writing_time, "ROUNDS", 400)
    alone = writing_time.simulate(problems=2, at_once=1, cores=16)
    assert alone.busy == pytest.approx(2.7 / 80.7, rel=0.1)
    assert alone.hours == pytest.approx(2 * 400 * 80.7 / 3600, rel=0.05)


@pytest.mark.slow
def test_a_session_shows_the_faster_kernel_of_another_one_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    lead, trials, profiler = Lead(), list[Trial](), Profiler()
    incumbent = device_texts.record(gemm())

    def session(url: str, run: str) -> Session:
        made = Session(
            PROBLEM, incumbent, chat.connect(Endpoint(url, "scripted", seconds=30), tmp_path / "llm.jsonl", run=run),
            InProcess(ModelledTimes(lambda _: incumbent, profiler)), memory.Memory((), tmp_path / "lessons.md"),
            SessionLimits(rounds=1, kernels=1, bounds=CheckLimits(seconds=60, seed=1)), trials.extend, run,
            say=lambda _: None, profiler=profiler, lead=lead,
        )  # fmt: skip
        made.restore(trials)
        return made

    slower, faster, fastest = f"  __syncthreads();\n{LOOP}", f"#pragma unroll 4\n{LOOP}", f"#pragma unroll 8\n{LOOP}"
    script = (
        writes({"patch": block(LOOP, slower)}),
        writes({"patch": block(LOOP, faster)}),
        # The third session copies the second one's kernel, and when it is told so it changes that kernel.
        writes({"base": "best1", "patch": block(faster, f"// mine\n{faster}")}),
        writes({"base": "best1", "patch": block(faster, fastest)}),
    )
    with serve_script(*script) as server:
        sessions = [session(server.url, run) for run in ("first", "second", "third")]
        *_, attempts = [one.run() for one in sessions]
        assert [attempt.draft.text for attempt in attempts] == [gemm((LOOP, fastest))]
        lead = Lead()
        (again,) = session(server.url, "third").run()
        assert (again.draft.text, again.reward) == (attempts[0].draft.text, attempts[0].reward)
    assert len(server.requests) == 4, "the restart asks nothing"
    assert len(trials) == 3


def test_simulated_questions_show_what_each_way_says() -> None:
    records = [device_texts.record(gemm(), PROBLEM.revised(m=m)) for m in (64, 128, 192, 256)]
    fast, *slow = [
        writing_population.Kernel(record, us) for record, us in zip(records, (1.0, 2.0, 3.0, 4.0), strict=True)
    ]
    assert len({kernel.cell for kernel in (fast, *slow)}) == 1
    populations, rng = [slow, [fast]], random.Random(0)
    shown = {name: select(populations, 0, rng) for name, select in writing_population.SELECTIONS.items()}
    assert {name: kernels[0] is fast for name, kernels in shown.items()} == {
        "separate": False, "common": True, "islands": False, "lead": True, "separate grid": False, "common grid": True,
    }  # fmt: skip
    assert shown["common grid"] == [fast], "a cell shows its fastest kernel only"
    writing_population.migrate(populations)
    assert [[kernel.us for kernel in kernels] for kernels in populations] == [[2.0, 3.0, 4.0, 1.0], [1.0, 2.0]]
