"""Proves in rehearsal that the plan for a borrowed GPU fits its budget, and that a failing step ends alone."""

from __future__ import annotations

import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cudal2gen import results
from cudal2gen.cli.selection import Selection
from cudal2gen.generation import catalog
from cudal2gen.kernel import Problem, revise
from cudal2gen.launch import gpu
from cudal2gen.results import Measurement
from kernelproof.ground import chips
from scripts import gpu_day, race_operators
from scripts.gpu_day import PLAN, Step
from tests import processes
from tests.cudal2gen import measured
from tests.cudal2gen.devices import FakeDevice
from tests.cudal2gen.on_gpu_kernels import NN_COUNT, TN_COUNT, nearest_records
from tests.cudal2gen.paths import small
from tests.draws import THOROUGH

NO_NAME = "no name"  # stands for the card's name in rows without one


def rows(out: Path) -> list[dict[str, Any]]:
    """The journal of a call: a row for each step."""
    return [json.loads(line) for line in (out / gpu_day.JOURNAL).read_text().splitlines()]


def steps(*programs: str, seconds: int = 20) -> list[Step]:
    """Steps of one call, each of which runs a Python program."""
    return [Step(f"step {index}", 1, seconds, program, "a test") for index, program in enumerate(programs)]


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a step run a program instead of a verb."""
    command = Step.command

    def programs(step: Step, out: Path, gpu: str, budget: float, small: bool = False) -> list[str]:
        return (
            command(step, out, gpu, budget, small)
            if step.name in {each.name for each in PLAN}
            else [sys.executable, "-c", step.line, f"{budget:g}"]
        )

    monkeypatch.setattr(Step, "command", programs)


@pytest.mark.slow
def test_the_plan_fits_three_calls_and_twenty_five_minutes() -> None:
    assert gpu_day.exceeded_limits() == []
    assert {step.call for step in PLAN} == {1, 2, 3}
    assert sum(step.seconds for step in PLAN) <= 25 * 60
    longer = [Step("bench f32", 2, 571, "bench", "")]
    assert gpu_day.exceeded_limits(longer) == ["call 2: its steps take 571 s, of 570"]
    assert gpu_day.exceeded_limits([Step("a", call, 510, "bench", "") for call in (1, 2, 3)]) == [
        "all calls take 1530 s, of 1500"
    ]


@pytest.mark.slow
def test_the_budget_names_every_step_and_what_is_carried(tmp_path: Path) -> None:
    (tmp_path / "kernels.tar.xz").write_bytes(bytes(3 << 20))
    table = gpu_day.budget_table(tmp_path)
    assert all(f"| {step.name} | {step.seconds} |" in table for step in PLAN)
    assert "carried: 3.0 MiB" in table
    assert "of 64" in table
    assert "prepare` first" in gpu_day.budget_table(tmp_path / "nothing")


def test_budgets_of_steps_leave_time_to_start_and_end() -> None:
    (bench,) = (step for step in PLAN if step.name == "bench f32")
    assert bench.budget(600) == bench.seconds - gpu_day.RESERVE_SECONDS
    assert (bench.budget(100), bench.budget(3)) == (100 - gpu_day.RESERVE_SECONDS, 1), (
        "a step gets no more time than the call has left"
    )
    command = " ".join(bench.command(Path("out"), "h100", 495.0)[1:])
    assert command == "-m cudal2gen bench --all --gpu h100 --acc f32 --budget 495s"
    (tests,) = (step for step in PLAN if step.name == "tests")
    assert tests.command(Path("out"), "h100", 1)[-1] == "not sanitizer"


def test_steps_have_no_unfilled_placeholder_and_name_no_other_card() -> None:
    for step in PLAN:
        (whole,) = {" ".join(step.command(Path("out"), gpu, 30)).replace(gpu, "CARD") for gpu in gpu_day.CARDS}
        assert "{" not in whole
        assert "h200" not in whole, "no measurement may be stored as another card's"
        assert whole.count("CARD") == (step.line.count("{gpu}"))


@pytest.mark.slow
def test_steps_take_over_what_earlier_ones_leave(tmp_path: Path) -> None:
    """Unused time of earlier steps extends a step's limit, not its budget."""
    plan = [
        *steps("pass", seconds=60),
        *steps("import sys, time; print('budget', sys.argv[1]); time.sleep(4)", seconds=2),
    ]
    assert gpu_day.run_call(1, "h100", tmp_path, os.environ, plan) == 0
    assert "budget 1\n" in (tmp_path / gpu_day.LOG).read_text()


def test_a_failing_step_ends_alone(tmp_path: Path) -> None:
    plan = steps("raise SystemExit(3)", "print('second')", "import os; os.kill(os.getpid(), 9)")
    assert gpu_day.run_call(1, "h100", tmp_path, os.environ, plan) == 2
    assert [(row["step"], row["exit"]) for row in rows(tmp_path)] == [("step 0", 3), ("step 1", 0), ("step 2", -9)]
    assert {row["gpu"] for row in rows(tmp_path)} == {"h100"}
    assert [bool(row["left"]) for row in rows(tmp_path)] == [True, False, True]
    assert "second" in (tmp_path / gpu_day.LOG).read_text()


def test_only_steps_that_compile_see_the_machines_compiler(tmp_path: Path) -> None:
    program = f"import os; raise SystemExit(int({gpu_day.PREBUILT!r} in os.environ))"
    plan = [Step("finds", 1, 20, program, ""), Step("compiles", 1, 20, program, "", compiles=True)]
    assert gpu_day.run_call(1, "h100", tmp_path, os.environ | {gpu_day.PREBUILT: "file"}, plan) == 1
    assert [row["exit"] for row in rows(tmp_path)] == [1, 0]
    assert [step.name for step in PLAN if step.compiles] == ["tune"]


@pytest.mark.slow
def test_a_hanging_step_is_ended_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    program = (
        "import pathlib, subprocess, sys, time; "
        f"process = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)']); "
        f"pathlib.Path({str(child)!r}).write_text(str(process.pid)); time.sleep(120)"
    )
    begin = time.monotonic()
    assert gpu_day.run_call(1, "h100", tmp_path, os.environ, steps(program, seconds=2)) == 1
    assert time.monotonic() - begin < 110, "the step would sleep for 120"
    assert rows(tmp_path)[0]["exit"] is None
    # SIGKILL is sent at once; the kernel takes its time to act on a process that the step does not wait for.
    processes.wait_until(lambda: not processes.is_running(int(child.read_text())))


@pytest.mark.slow
def test_what_a_call_has_no_time_for_is_left(tmp_path: Path) -> None:
    plan = steps("import time; time.sleep(60)", "print('never')")
    assert gpu_day.run_call(1, "h100", tmp_path, os.environ, plan, seconds=11) == 2
    first, second = rows(tmp_path)
    assert first["exit"] is None
    assert 5 <= first["seconds"] < 55
    assert (second["seconds"], second["left"]) == (0.0, "print('never')")


@pytest.mark.slow
def test_what_outlives_a_step_delays_no_other(tmp_path: Path) -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '120'], start_new_session=True).pid, flush=True)"
    started = time.monotonic()
    assert gpu_day.run_call(1, "h100", tmp_path, os.environ, steps(program)) == 0
    assert time.monotonic() - started < 110
    text = (tmp_path / gpu_day.LOG).read_text().splitlines()
    os.kill(int(next(line for line in text if line.isdecimal())), 9)


def test_results_travel_compressed_where_they_are_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day, "FILE_BYTES", 1000)
    out, later = tmp_path / "out", tmp_path / "later"
    out.mkdir()
    lines = "".join(f'{{"row": {index % 3}}}\n' for index in range(1000))
    (out / "measurements.jsonl").write_text(lines)
    (out / "verdicts.jsonl").write_text("{}\n")
    assert gpu_day.prepare_return(out) == []
    assert lzma.decompress((out / "measurements.jsonl.xz").read_bytes()).decode() == lines
    gpu_day.copy_stores(out, later)
    assert (later / "measurements.jsonl").read_text() == lines
    assert (later / "verdicts.jsonl").read_text() == "{}\n"
    (out / "report.html").write_text("<html>")
    stored = tmp_path / "checkout" / "results" / "autotune-first-runs.jsonl"
    stored.parent.mkdir(parents=True)
    stored.write_text('{"kind":"first run"}\n')
    monkeypatch.setattr(gpu_day, "ROOT", tmp_path / "checkout")
    brought = out / stored.name  # unchanged: results/ has it already
    brought.write_bytes(stored.read_bytes())
    assert gpu_day.prepare_return(out) == []
    assert not brought.exists()
    with tarfile.open(out / gpu_day.REST) as packed:
        assert packed.getnames() == ["report.html"]
    (out / "noise.jsonl").write_bytes(os.urandom(1200))
    for index in range(6):
        (out / f"file{index}.jsonl").write_text(str(index))
    assert [fault.split(":")[0] for fault in gpu_day.prepare_return(out)] == ["noise.jsonl.xz"]
    assert len(list(out.iterdir())) == gpu_day.MAX_FILES
    gpu_day.copy_stores(out, later)
    assert [(later / f"file{index}.jsonl").read_text() for index in range(6)] == list("012345"), (
        "files beyond MAX_FILES are in REST"
    )


def test_kernels_are_packed_alike_and_unpacked_whole(tmp_path: Path) -> None:
    luggage = tmp_path / "luggage"
    luggage.mkdir()
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        (folder / "kernel.cubin").write_text(folder.name)
    archive = luggage / "kernels.tar.xz"
    gpu_day.pack_kernels(folders, b"{}", archive)
    first = archive.read_bytes()
    os.utime(folders[0] / "kernel.cubin", (1, 1))
    gpu_day.pack_kernels(folders, b"{}", archive)
    assert archive.read_bytes() == first
    environment = gpu_day.unpack(luggage, tmp_path / "machine")
    kernels = Path(environment["CUDAL2GEN_BUILD_DIR"])
    assert {path.parent.name: path.read_text() for path in kernels.glob("*/kernel.cubin")} == {"a": "a", "b": "b"}
    assert Path(environment[gpu_day.PREBUILT]).read_text() == "{}"


def test_a_card_tells_its_name_unless_the_plan_is_for_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def connect_card(name: str) -> None:
        card = SimpleNamespace(name=name, model=chips.model_of(name) or name)
        monkeypatch.setattr(gpu, "connect", lambda: card)

    for name, model in (("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200")):
        connect_card(name)
        assert (gpu_day.print_card(), capsys.readouterr().out) == (0, f"{model}\n")
    for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 NVL"):
        connect_card(name)
        assert gpu_day.print_card() == 2
        assert capsys.readouterr() == ("", f"error: this is {name}; the plan and its kernels are for h100 and h200\n")


@pytest.mark.slow
def test_the_name_comes_from_a_process_that_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    answers = (("echo a warning; echo h100", "h100", 90), ("echo h100; exit 3", "", 90), ("exec sleep 60", "", 1))
    for text, model, seconds in answers:
        monkeypatch.setattr(gpu_day, "CARD_SECONDS", seconds)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        assert gpu_day.card_of(os.environ) == model


def test_packs_of_both_cards_are_found(tmp_path: Path) -> None:
    for card in gpu_day.CARDS:
        with zipfile.ZipFile(tmp_path / f"cudal2gen_{card}-1.0+candidates-py3-none-linux_x86_64.whl", "w") as wheel:
            wheel.writestr(f"cudal2gen_pack/{card}/pack.json", "{}")
    folders = gpu_day.unpack(tmp_path, tmp_path / "machine")["CUDAL2GEN_PACK"].split(os.pathsep)
    assert [Path(folder).name for folder in folders] == ["h100", "h200"]


@pytest.mark.slow
def test_both_cards_run_the_same_kernels() -> None:
    """The kernels that ``prepare`` compiles for an H200 are those that an H100 needs."""
    sample = 40 if THOROUGH else 0  # this call derives the whole library of the other card
    names = {
        card: [
            record.name
            for record in (Selection(sample=sample, gpu=card, acc="any").records() if sample else [])
            + nearest_records(card)
        ]
        for card in gpu_day.CARDS
    }
    assert len(names["h100"]) == sample + TN_COUNT + NN_COUNT
    assert names["h100"] == names["h200"]


def test_losers_are_of_the_card_and_of_the_latest_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losers are problems of f32 whose latest kernel was slower than cuBLASLt, which takes 10 us here."""
    monkeypatch.setenv("CUDAL2GEN_RESULTS", str(tmp_path))
    h100 = measured.H200.model_copy(update={"id": "h100", "gpu": "h100", "name": "NVIDIA H100 80GB HBM3"})

    def row(m: int, us: float, **fields: object) -> Measurement:
        vendor = [measured.timing(f"cublaslt-autotuning-{layout}", [10.0] * 9) for layout in ("nn", "tn")]
        times = [measured.timing(results.KERNEL, [us] * 9), *vendor]
        return measured.measurement((m, 64, 64), times, **({"acc": "f32"} | fields))

    on_h100 = {"environment": "h100", "gpu": "h100"}
    rows = [
        row(64, 30.0, **on_h100), row(64, 9.0, **on_h100),  # measured again, faster
        row(128, 9.0, **on_h100), row(128, 12.0, l2="hot", **on_h100),
        # a row of an H200, and one whose environment and GPU contradict each other
        row(256, 99.0), row(256, 99.0, environment="h100"), row(256, 11.0, **on_h100),
        row(512, 50.0, acc="f16", **on_h100),
    ]  # fmt: skip
    results.append([measured.H200, h100, *rows], results.store("measurements"))
    monkeypatch.setattr(gpu_day, "LOSERS", 2)
    gpu_day.write_losers("h100", tmp_path / "losing.jsonl")
    assert [(problem.gpu, problem.m) for problem in catalog.load_problems(tmp_path / "losing.jsonl")] == [
        ("h100", 128), ("h100", 256),
    ]  # fmt: skip


def test_tuned_records_come_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote, local, file = tmp_path / "remote.jsonl", tmp_path / "local.jsonl", tmp_path / "tuned.jsonl"
    old, other = small(gpu="h100", acc="f32"), small(gpu="h100", acc="f32", m=128)
    origin = {"source": "cudal2gen tune", "structure": "tuned", "changed": []}
    first, second = (revise(record, stages=3, origin=origin) for record in (old, other))
    for path in (remote, local):
        catalog.save([old, other], path)
    monkeypatch.setenv("CUDAL2GEN_CATALOG", str(remote))
    gpu_day.write_tuned(file)
    assert not file.exists()
    catalog.put(first)
    gpu_day.write_tuned(file)
    catalog.save([old, second], remote)  # a later call on a machine without the first record
    gpu_day.write_tuned(file)
    monkeypatch.setenv("CUDAL2GEN_CATALOG", str(local))
    gpu_day.adopt(file)
    assert catalog.load(local) == catalog.load(file) == [first, second]


def rehearse_calls(folder: Path, *calls: int, left_out: tuple[str, ...] = ()) -> None:
    """Rehearses calls without some steps, and brings home and unpacks their results."""
    pytest.importorskip("nvmath")
    assert gpu_day.rehearse(folder, calls=calls, left_out=left_out) == 0
    for call in calls:
        gpu_day.copy_stores(folder / f"call-{call}", folder / f"brought-{call}")
        with tarfile.open(folder / f"call-{call}" / gpu_day.REST) as packed:
            packed.extractall(folder / f"rest-{call}", filter="data")
    journal = [row for call in calls for row in rows(folder / f"brought-{call}")]
    assert {row["step"] for row in journal} == {step.name for step in PLAN if step.call in calls} - {*left_out}
    assert {(row["exit"], row["gpu"]) for row in journal} == {(0, "h100")}
    assert re.search(r"ok +packs +h100 .*; h200 ", (folder / "rest-1" / gpu_day.LOG).read_text())


@pytest.mark.thorough
@pytest.mark.torch
def test_the_first_call_in_rehearsal(tmp_path: Path) -> None:
    """On an emulated H100 with an H200's records no step fails, and measurements are stored as the H100's.

    Steps that take minutes or repeat another step's command run only in ``test_the_whole_day_in_rehearsal``.
    """
    rehearse_calls(tmp_path, 1, left_out=("tests", "verdicts f16", "bits"))
    verdicts = [json.loads(line) for line in (tmp_path / "brought-1" / "verdicts.jsonl").read_text().splitlines()]
    assert sum(row["on"] == "h100" for row in verdicts) >= 2
    assert not [row for row in verdicts if row["on"] == "h200"]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.torch
def test_the_whole_day_in_rehearsal(tmp_path: Path) -> None:
    """Every step of the plan: none fails, and each leaves what the next needs."""
    rehearse_calls(tmp_path, 1, 2, 3)
    last = tmp_path / "rest-3"
    losers = [json.loads(line) for line in (last / gpu_day.LOSING).read_text().splitlines()]
    assert {(row["gpu"], row["acc"]) for row in losers} == {("h100", "f32")}
    stores = (tmp_path / "brought-3").glob("*.jsonl")
    by_name = {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in stores}
    for name in ("measurements.jsonl", "a100-records.jsonl", "operators.jsonl"):
        kinds = {(row["kind"], row["gpu"], row.get("name", NO_NAME)) for row in by_name[name]}
        assert kinds == {("environment", "h100", "NVIDIA H100 80GB HBM3"), ("measurement", "h100", NO_NAME)}, name
    page = (last / "report.html").read_text()
    assert "aims on NVIDIA H100 80GB HBM3" in page
    assert "NVIDIA H200" not in page


def race_of_operators(
    own_us: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: float = 0.0
) -> tuple[list[str], int]:
    """The lines of the table of a race, and the number of faults in it. By the stand-in clock our operator takes
    ``own_us`` and torch.matmul 10 us. ``wrong``: a number that is added to our D."""
    import cudal2gen

    card = FakeDevice()

    def product(us: float, offset: float) -> Any:
        def call(a: Any, b: Any, *, out: Any) -> None:
            card.spend(us)
            out.copy_(a.float() @ b.float() + offset)

        return call

    monkeypatch.setattr(cudal2gen, "matmul", product(own_us, wrong))
    monkeypatch.setattr("torch.matmul", product(10.0, 0.0))
    sizes = {"gpu": "h200", "acc": "f32", "layout": "tn", "m": 16, "n": 32, "k": 64}
    chosen = [Problem.model_validate(sizes | {"ab": ab}) for ab in race_operators.TYPES]
    store = tmp_path / "operators.jsonl"
    assert race_operators.race(card, chosen, store, None) == 0
    assert race_operators.race(card, chosen, store, 0.0) == 0, "what is stored is not measured again"
    return race_operators.table(results.measurements(store).latest())


@pytest.mark.slow
def test_without_a_pack_no_operators_race(checkout: Path, tmp_path: Path) -> None:
    """Without the check torch would race itself, and the step would pass. The rehearsal's device needs a process of its
    own, since it stands in for CUDA and the vendor's libraries until the process ends."""
    variables = {
        gpu.STAND_IN: "tests.cudal2gen.rehearsal:H100",
        "CUDAL2GEN_CACHE_DIR": str(tmp_path),
        "CUDAL2GEN_PACK": str(tmp_path / "nowhere"),
        "PYTHONPATH": str(checkout),
    }
    command = [sys.executable, race_operators.__file__, "--mnk", "64_64_64", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | variables)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: no pack for h100 (")
    assert "nowhere" in done.stderr
    assert not (tmp_path / "operators.jsonl").exists()


@pytest.mark.slow
def test_the_race_of_operators_says_where_a_call_is_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, faults = race_of_operators(8.0, tmp_path / "faster", monkeypatch)
    assert faults == 0
    assert "| 1.250 [1.250, 1.250] |" in lines[2]
    assert "geometric mean 1.250" in "".join(lines)
    _, faults = race_of_operators(10.05, tmp_path / "as fast", monkeypatch)
    assert faults == 0, "0.995 is within the promise"
    lines, faults = race_of_operators(10.2, tmp_path / "slower", monkeypatch)
    assert faults >= 2
    assert "fault: 16_32_64 f16, L2 cold: 0.980 of torch.matmul's speed, below 0.99" in lines
    lines, faults = race_of_operators(8.0, tmp_path / "wrong", monkeypatch, wrong=100.0)
    assert faults >= 2, lines


def test_the_race_of_operators_draws_rows_of_layers() -> None:
    chosen = race_operators.problems("h200", race_operators.drawn(16))
    assert [problem.ab for problem in chosen[:4]] == ["f16", "bf16", "f16", "bf16"]
    assert {(problem.n, problem.k) for problem in chosen} <= set(race_operators.LAYERS)
    assert [problem.m for problem in chosen].count(race_operators.PREFILL) == 2
