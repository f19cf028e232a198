"""Proves how kernels that a model writes are judged: right ones, wrong ones, cheats, and attacks on this machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from cudal2gen import cli, results
from cudal2gen.generation import catalog
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import Record, parse
from cudal2gen.launch import gpu
from cudal2gen.results import Trial
from cudal2gen.tuner import memory, reward
from cudal2gen.tuner.executor import InProcess
from cudal2gen.tuner.language_model import chat
from cudal2gen.tuner.language_model.server import Endpoint
from cudal2gen.tuner.language_model.transcript import AnswerOutcome, Reply, read
from cudal2gen.tuner.writing import counters, kernel_answers, kernel_prompt, outcome, patches, proof
from cudal2gen.tuner.writing.kernel_answers import Base
from cudal2gen.tuner.writing.modelled import ModelledTimes, Profiler
from cudal2gen.tuner.writing.proof import CheckLimits
from cudal2gen.tuner.writing.session import Attempt, Session, SessionLimits
from tests import processes
from tests.cudal2gen import device_texts
from tests.cudal2gen.chat_server import Server, Step, fails, says, serve_script
from tests.cudal2gen.device_texts import LAUNCH, PROBLEM, gemm

# Parts of the right kernel, and the unrolled loop by which the scripted model makes it faster. Answers change ``BASE``.
LOOP = "  for (int at = pair; at < k; at += kStep) {\n"
UNROLLED = f"#pragma unroll 4\n{LOOP}"
SUMS = "  float sums[2][4] = {};\n"
BASE = Base(gemm(), LAUNCH)


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder and an empty catalog of the test's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("CUDAL2GEN_CATALOG", str(tmp_path / "catalog" / "kernels.jsonl"))
    catalog.save([], tmp_path / "catalog" / "kernels.jsonl")


def block(before: str, after: str) -> str:
    """The patch of an answer that replaces ``before``, whole lines, by ``after``."""
    return f"<<<<<<< SEARCH\n{before}=======\n{after}>>>>>>> REPLACE\n"


def writes(*kernels: dict[str, Any]) -> Step:
    """An answer with these kernels."""
    ideas = [{"why": f"idea {number}", "base": "incumbent"} | item for number, item in enumerate(kernels, 1)]
    return says(json.dumps({"reasoning": "latency of the loads bounds the loop", "kernels": ideas}))


def session(server: Server, tmp_path: Path, trials: list[Trial] | None = None, **settings: Any) -> Session:
    """A session in which the scripted server writes kernels for ``PROBLEM``; ``settings`` are its limits."""
    incumbent = device_texts.record(gemm())
    profiler = Profiler()
    stored: list[Trial] = [] if trials is None else trials
    return Session(
        PROBLEM, incumbent, chat.connect(Endpoint(server.url, "scripted", seconds=30), tmp_path / "llm.jsonl"),
        InProcess(ModelledTimes(lambda _: incumbent, profiler)), memory.Memory((), tmp_path / "lessons.md"),
        SessionLimits(**({"rounds": 1, "kernels": 16, "bounds": CheckLimits(seconds=60, seed=1)} | settings)),
        stored.extend,
        say=lambda _: None, profiler=profiler,
    )  # fmt: skip


# --- what a scripted model writes ---

# Sums that begin with what another lane stored, and the right kernel's stores of D.
REVERSED = "  const float zero = zeros[31 - threadIdx.x];\n  float sums[2][4] = {{zero}};\n"
STORE = "  for (int i = 0; i < 8; ++i)\n    store"
# The kernel with fp16 accumulators.
F16 = gemm(
    ("f32.f16.f16.f32", "f16.f16.f16.f16"),
    (
        '{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "\n          "{%0, %1, %2, %3};',
        '{%0, %1}, {%2, %3, %4, %5}, {%6, %7}, "\n          "{%0, %1};',
    ),
    (': "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])', ': "+r"(sum[0]), "+r"(sum[1])'),
    ("float* sum = sums", "uint32_t* sum = sums"),
    (SUMS, "  uint32_t sums[2][2] = {};\n"),
    ("sums[i / 4][i % 4]", "__half2float(reinterpret_cast<half const*>(sums[i / 4])[i % 4])"),
)
# The kernel that keeps its sums in device memory, and returns them at the next call.
STALE = gemm(
    ('extern "C"', '__device__ float kept[64][256];\n__device__ int filled[64];\n\nextern "C"'),
    (
        STORE,
        """  const int cta = (blockIdx.x + blockIdx.y * gridDim.x) % 64;
  for (int i = 0; i < 8; ++i) {
    float* value = &kept[cta][threadIdx.x * 8 + i];
    if (filled[cta]) sums[i / 4][i % 4] = *value;
    *value = sums[i / 4][i % 4];
  }
  __syncwarp();
  filled[cta] = 1;
"""
        + STORE,
    ),
)
# By name: a kernel of an answer, the outcome of its trial, and the beginning of the reason.
KERNELS: dict[str, tuple[dict[str, Any], str, str]] = {
    "faster": ({"patch": block(LOOP, UNROLLED)}, "measured", ""),
    "wrong": (
        {"source": gemm(("i % 2 * 8, m, at + i / 2 * 8", "i / 2 * 8, m, at + i % 2 * 8"))},
        "wrong result", "wrong-value: ",
    ),
    "race": (
        {"patch": block(SUMS, f"  __shared__ float zeros[32];\n  zeros[threadIdx.x] = 0.0f;\n{REVERSED}")},
        "wrong result", "shared-race: read after write",
    ),
    "downgrade": ({"source": F16}, "wrong result", "lower-precision: accumulator is f16, f32 is required"),
    "stale": ({"source": STALE}, "wrong result", "stale-result: 399 of 399 wrong elements"),
    "unwritten": (
        {"source": gemm((STORE, f"  if (blockIdx.x) return;\n{STORE}"))}, "wrong result", "unwritten-output: ",
    ),
    "endless": (
        {"patch": block(SUMS, f"{SUMS}  __shared__ volatile int ready;\n  ready = 0;\n  while (!ready) {{\n  }}\n")},
        "time-out", "deadlock: ",
    ),
    "spilled": (
        {"source": gemm(
            (SUMS, f"{SUMS}  float many[64];\n  for (int i = 0; i < 64; ++i) many[(i * m) % 64] = i;\n"),
            ("sums[i / 4][i % 4]);", "sums[i / 4][i % 4] + 0 * many[(i * n) % 64]);"),
        )},
        "spill", "has a stack frame of 256 bytes",
    ),
    "knows the machine": (
        {"source": gemm((STORE, f"  if (clock64() < 0) return;\n{STORE}"))},
        "wrong result", "machine-register: reads %clock64",
    ),
    "misspelt": (
        {"patch": block(SUMS, "  flaot sums[2][4] = {};\n")}, "compile error", "kernel.cu(22): error: identifier",
    ),
    "wider": ({"launch": {"block": 64}, "patch": block(LOOP, f"#pragma unroll 2\n{LOOP}")}, "wrong result", ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Attempt]:
    """All kernels, written in one answer."""
    folder = tmp_path_factory.mktemp("writing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        with serve_script(writes(*(item for item, _, _ in KERNELS.values()))) as server:
            written = session(server, folder)
            attempts = written.run()
        assert len(server.requests) == 1
        return dict(zip(KERNELS, attempts, strict=True))


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_each_kernel_ends_as_it_must(name: str, attempts: dict[str, Attempt]) -> None:
    _, outcome, reason = KERNELS[name]
    attempt = attempts[name]
    assert attempt.trial.outcome == outcome, attempt.report
    assert attempt.trial.reason.startswith(reason)
    assert (attempt.reward > reward.RIGHT) == (outcome == "measured")
    assert (attempt.reward == 0) == (outcome in ("illegal", "compile error"))
    assert (attempt.trial.environment, attempt.trial.on[:12]) == ("model", "timing model")
    assert parse(attempt.trial.record) == attempt.record


@pytest.mark.slow
def test_reports_say_where_in_the_author_s_own_lines(attempts: dict[str, Attempt]) -> None:
    lines = attempts["race"].draft.text.splitlines()
    (number,) = (place for place, line in enumerate(lines, 1) if "zeros[31 - threadIdx.x]" in line)
    assert f"line={number}," in attempts["race"].report
    assert "hint: " in attempts["race"].report
    reports = "".join(attempt.report + attempt.trial.reason for attempt in attempts.values())
    assert "hgemm_" not in reports
    assert "/" not in reports.replace("and/or", "").partition("error")[0]


# Texts that would reach beyond the kernel. CANARY is a file that none may make.
ATTACKS = {
    "reads a file": f'#include "/etc/passwd"\n{gemm()}',
    "asks for a file": f'#if __has_include("/etc/passwd")\n#endif\n{gemm()}',
    "assembles a file": gemm((SUMS, f'{SUMS}  asm volatile(".incbin \\"/etc/passwd\\"");\n')),
    "measures the preprocessor": f'#pragma GCC dependency "/etc/passwd"\n{gemm()}',
    "runs on the host": 'extern "C" int system(const char*);\n'
    f'struct Host {{ Host() {{ system("touch CANARY"); }} }};\nstatic Host host;\n{gemm()}',
    "is no kernel": 'extern "C" int system(const char*);\nint main() { return system("touch CANARY"); }\n',
    "hides its end": gemm((SUMS, f'{SUMS}  asm volatile("}} .visible .entry other() {{");\n')),
    "prints": gemm((SUMS, f'{SUMS}  printf("%d", k);\n')),
    "calls the host": gemm((SUMS, f'{SUMS}  asm volatile("call system;");\n')),
}


@pytest.mark.thorough
def test_nothing_of_the_host_is_touched(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    texts = [text.replace("CANARY", str(canary)) for text in ATTACKS.values()]
    with serve_script(*[writes(*({"source": text} for text in texts))] * 3, forever=True) as server:
        attempts = session(server, tmp_path).run()
    ended = {name: attempt.trial.outcome for name, attempt in zip(ATTACKS, attempts, strict=False)}
    assert ended == {
        "reads a file": "illegal",
        "asks for a file": "illegal",
        "assembles a file": "illegal",
        "measures the preprocessor": "illegal",
        "runs on the host": "illegal",
        "is no kernel": "illegal",
        "hides its end": "compile error",
        "prints": "illegal",
        "calls the host": "compile error",
    }
    assert not canary.exists()
    assert "root:" not in "".join(attempt.report for attempt in attempts)


# --- errors before there is a kernel ---


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ("no patch at all", "neither blocks"),
        (block("  float totals[2][4] = {};\n", ""), "part 1 is not in the text, its first line is 'float totals"),
        (block("}\n", ""), "part 1 fits 3 places, such as lines"),
        (block("\n", "int x;\n"), "part 1 has no lines to find"),
        (block(SUMS, SUMS), "changes nothing"),
        ("@@ -1,1 +1,1 @@\n-absent line\n+x\n", "part 1 is not in the text"),
    ],
)
def test_a_patch_that_does_not_apply_is_refused_in_words(patch: str, message: str) -> None:
    with pytest.raises(patches.PatchRefused, match=message):
        patches.apply(gemm(), patch)


def test_a_patch_is_read_in_one_pass() -> None:
    start = time.process_time()
    for patch in ("<<<<< SEARCH\n" * 500 + "=====\n" * 20_000, "<<<<< SEARCH\n" * 20_000, "x" * 300_000):
        with pytest.raises(patches.PatchRefused):
            patches.apply(gemm(), patch)
    assert time.process_time() - start < 3


def test_a_patch_of_equal_lines_is_found_in_one_pass() -> None:
    lines = ["x"] * 60_000
    start = time.process_time()
    with pytest.raises(patches.PatchRefused, match="part 1 fits 30001 places"):
        patches.apply("\n".join(lines), block("x\n" * 30_000, "y\n"))
    with pytest.raises(patches.PatchRefused, match="part 1 is not in the text"):
        patches.apply("\n".join(lines), block("x\n" * 30_000 + "y\n", "z\n"))
    assert time.process_time() - start < 3
    text = "\n".join(["a", "a", "b", "a", "a", "a", "b", "c"])
    assert patches.apply(text, block("a\na\nb\nc\n", "d\n")) == "a\na\nb\na\nd"


def test_patches_apply() -> None:
    unrolled = gemm((LOOP, UNROLLED))
    assert patches.apply(gemm(), block(LOOP, UNROLLED)) == unrolled
    assert patches.apply(gemm(), block(LOOP.strip() + "\n", UNROLLED)) == unrolled, "blanks differ"
    assert patches.apply(gemm(), block(SUMS, "").replace("\n", "\r\n")) == gemm((SUMS, ""))
    both = gemm((LOOP, UNROLLED), ("kStep = 16", "kStep = 16, kWarp = 32"))
    diff = kernel_prompt.difference(gemm(), both)
    assert patches.apply(gemm(), diff) == both
    moved = diff.replace("@@ -", "@@ -9", 1)
    assert patches.apply(gemm(), moved) == both, "numbers of lines are hints"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("I cannot.", "the answer is not the JSON object with kernels"),
        ('{"kernels": [{"base": "best7", "patch": "x"}]}', "base best7: must be one of incumbent"),
        ('{"kernels": [{"source": "a", "patch": "b"}]}', "either source, a whole text, or patch"),
        ('{"kernels": [{"source": "a", "launch": {"grid": 3}}]}', "launch: grid: must be among bm, bn"),
        ('{"kernels": [{"source": 3}]}', "kernel 1: source=3"),
        ('{"kernels": [7]}', "kernel 1: "),
    ],
)
def test_answers_that_are_no_kernels(text: str, message: str) -> None:
    drafts, faults = kernel_answers.drafts(Reply(text=text), {"incumbent": BASE}, 4)
    assert not drafts
    assert message in faults[0]


@pytest.mark.parametrize("form", ["object", "amid prose", "fenced text", "fenced patch"])
def test_answers_are_read_in_every_form(form: str) -> None:
    patch = block(LOOP, UNROLLED)
    item = {"why": "w", "base": "incumbent", "patch": patch, "source": "", "launch": {"stages": 2}}
    text = {
        "object": json.dumps({"reasoning": "r", "kernels": [item]}),
        "amid prose": f"Think: {{not JSON}}. {json.dumps({'reasoning': 'r', 'kernels': [item]})} Done.",
        "fenced text": f'w\n```json\n{{"stages": 2}}\n```\n```cuda\n{patches.apply(gemm(), patch)}```\n',
        "fenced patch": f'w\n```json\n{{"stages": 2}}\n```\n```\n{patch}```\n',
    }[form]
    (draft,), faults = kernel_answers.drafts(Reply(text=text), {"incumbent": BASE}, 4)
    assert not faults
    assert draft == kernel_answers.Draft("incumbent", "w", patches.apply(gemm(), patch), LAUNCH | {"stages": 2})


def test_faults_go_back_and_cost_no_evaluation(tmp_path: Path) -> None:
    trials: list[Trial] = []
    script = [writes({"patch": block("absent\n", "")}), writes({"launch": {"bm": 7}, "source": gemm()}), says("no")]
    with serve_script(*script) as server:
        written = session(server, tmp_path, trials, kernels=1)
        written.run()
    assert [trial.outcome for trial in trials] == ["illegal"]
    assert "bm=7: input should be greater than or equal to 16" in trials[0].reason
    corrections = [request["messages"][-1]["content"] for request in server.requests[1:]]
    assert "kernel 1: part 1 is not in the text" in corrections[0]
    assert "a kernel is illegal: bm=7" in corrections[1]


@pytest.mark.parametrize("status", [401, 500])
def test_a_server_that_fails_ends_a_session(status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "PAUSES", ())
    seconds = [0.0]
    with serve_script(fails(status), forever=True) as server:
        written = session(server, tmp_path, rounds=9)
        written.chat.clock = lambda: sum(seconds)
        written.pause = seconds.append
        assert written.run() == []
    assert len(server.requests) == (1 if status == 401 else 2)
    assert len(seconds) == len(server.requests) + (status == 500), "it waits for a rest to end"


# --- what the next question shows ---


class Story(NamedTuple):
    """A session that has ended, the requests of its model, and its folder."""

    session: Session
    requests: list[dict[str, Any]]
    folder: Path


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """A session of two rounds: a slower kernel and one with a race, then a faster one, by a patch of the slower one."""
    folder = tmp_path_factory.mktemp("story")
    slower = "  if (k < 0) return;\n  __syncthreads();\n"
    rounds = [
        writes({"patch": block(LOOP, f"{slower}{LOOP}")}, KERNELS["race"][0]),
        writes({"base": "best1", "patch": block(f"{slower}{LOOP}", UNROLLED), "why": "loads overlap"}),
    ]
    with pytest.MonkeyPatch.context() as patch, serve_script(*rounds) as server:
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        written = session(server, folder, rounds=2)
        written.run()
        yield Story(written, server.requests, folder)


@pytest.mark.slow
def test_the_next_question_shows_texts_times_evidence_and_reports(
    story: Story,
) -> None:
    first, second = (request["messages"][1]["content"] for request in story.requests)
    assert story.requests[0]["messages"][0]["content"] == kernel_prompt.system()
    for needed in (
        gemm().strip(),
        "a100 f32 tn 64_48_64",
        "tiles raster=plain",
        "ptxas: ",
        "main loop: ",
        "warps wait for: ",
    ):
        assert needed in first, needed
    assert "modelled from machine code, not measured" in first
    assert "## best1: " in second
    assert "times as fast as the incumbent" in second
    assert "## wrong result: shared-race: read after write" in second
    assert "+  zeros[threadIdx.x] = 0.0f;" in second
    assert "counted in the emulator: mma_per_k_tile 2" in second


@pytest.mark.slow
def test_a_winner_becomes_a_record_and_a_proposal(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    written = story.session
    monkeypatch.setenv("XDG_DATA_HOME", str(story.folder / "data"))
    winner = written.winner
    assert winner is not None
    assert winner.draft.why == "loads overlap"
    assert winner.draft.text == gemm((LOOP, UNROLLED))
    page = outcome.proposal(written, winner)
    for needed in (
        " us (modelled, timing model of machine code, nothing measured): ",
        "+#pragma unroll 4",
        "| wrong result |",
        "## Machine evidence",
        winner.record.name,
    ):
        assert needed in page, needed
    record = outcome.catalog_record(written, winner)
    assert (record.origin.structure, record.origin.changed) == ("modelled", ("text",))
    catalog.put(record)
    assert catalog.find(PROBLEM).record == record
    assert catalog.dump(record) in page


def test_lessons_are_kept_also_of_what_failed(
    story: Story,
) -> None:
    titles = [note.title for note in memory.parse_notes((story.folder / "lessons.md").read_text())]
    assert titles[0].startswith("A written kernel, 2.")
    assert titles[1] == "A written kernel, failed, wrong result"
    recalled = memory.load(story.folder / "lessons.md").recall(PROBLEM)
    assert any("shared-race" in note.text for note in recalled)


def test_a_question_cannot_be_closed_by_what_it_quotes() -> None:
    variant = kernel_prompt.ShownKernel("incumbent", "1 us", "```\n# Task", LAUNCH, f"// ````\n{gemm()}")
    text = kernel_prompt.question(PROBLEM, [variant], [], [], "modelled", 1)
    assert "\n`````cuda\n// ````\n" in text


# --- a device's profiler ---

# The output of Nsight Compute's command line for one kernel.
NCU = """==PROF== Connected to process 1
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","gemm","Command line profiler metrics","gpu__time_duration.sum","us","3.52"
"0","1","gemm","Command line profiler metrics","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","41.20"
"0","1","gemm","Command line profiler metrics","other__metric.sum","","1"
==PROF== Disconnected from process 1
"""


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (NCU, "counted by Nsight Compute: time under the profiler, cold 3.52 us, device memory throughput 41.20 %"),
        ("==ERROR== ERR_NVGPUCTRPERM: no permission\n", "Nsight Compute: ERR_NVGPUCTRPERM: no permission"),
        ("error: no CUDA-capable device is detected\n", "Nsight Compute: no CUDA-capable device is detected"),
        ("", "Nsight Compute: no metrics"),
    ],
)
def test_metrics_of_a_profiler_are_read(
    output: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for ncu prints what ncu's documentation shows, and notes its arguments."""
    monkeypatch.setattr(gpu, "runtime", lambda cuda=13: Path(f"libcudart.so.{cuda}"))
    (tmp_path / "output").write_text(output)
    profiler = tmp_path / "ncu"
    profiler.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/call\ncat {tmp_path}/output\n')
    profiler.chmod(0o755)
    record = device_texts.record(gemm())
    assert counters.lines(record, 0, profiler) == [line]
    call = (tmp_path / "call").read_text()
    assert f"--kernel-name {record.name} " in call
    assert "-m cudal2gen.validator.sanitizer" in call
    assert '"m": 64, "n": 48, "k": 64' in call


def test_the_profiler_is_asked_once_for_each_kernel(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(story.folder / "data"))
    names: list[str] = []

    def metrics(record: Record) -> list[str]:
        names.append(record.name)
        return ["counted by Nsight Compute: tensor pipe 40 %"]

    written = replace(story.session, metrics=metrics, _metrics={})
    for _ in range(2):
        assert "- counted by Nsight Compute: tensor pipe 40 %" in written._question(written._bases())
    assert len(names) == len(set(names)) == 3


def test_rewards_go_to_the_transcript(story: Story) -> None:
    """One line for each answer, for ``tune --export``: the mean reward of its kernels."""
    outcomes = [line for line in read(story.folder / "llm.jsonl") if isinstance(line, AnswerOutcome)]
    first, second = ([attempt.reward for attempt in story.session.attempts[part]] for part in (slice(2), slice(2, 3)))
    assert [line.reward for line in outcomes] == pytest.approx([sum(first) / 2, sum(second)])
    assert {line.stage for line in outcomes} == {"hgemm"}


# --- limits of checks ---


@pytest.mark.slow
def test_a_check_ends_at_its_limits() -> None:
    assert proof.call_within_limits(time.sleep, (30,), CheckLimits(seconds=0.5)).outcome == "time-out"
    little = CheckLimits(seconds=30, gib=0.25)
    with processes.use_memory(0.5):  # a check does not count memory that it inherits from this process
        assert proof.call_within_limits(processes.hold_memory, (0.3,), little).outcome == "wrong result"
        assert proof.call_within_limits(processes.hold_memory, (0.1, 0.4), little) is None
    assert proof.call_within_limits(os._exit, (3,), little).outcome == "wrong result"
    assert proof.call_within_limits(len, ("four",), little) == 4


# --- the command ---


@pytest.mark.slow
def test_the_command_writes_proves_times_and_proposes(
    tmp_path: Path,
) -> None:
    file = tmp_path / "catalog" / "kernels.jsonl"
    catalog.save([device_texts.record(gemm())], file)
    trials, settings = tmp_path / "trials.jsonl", tmp_path / "settings.toml"
    settings.write_text("[write]\nkernels = 2\n")
    options = [
        "write", "--mnk", PROBLEM.mnk, "--acc", "f32", "--environment", "model", "--trials", str(trials),
        "--settings", str(settings),
    ]  # fmt: skip
    with serve_script(writes(KERNELS["wrong"][0], KERNELS["faster"][0]), writes(KERNELS["race"][0])) as server:
        first = CliRunner().invoke(cli.app, [*options, "--llm", f"scripted@{server.url}", "--rounds", "1"])
        more = ["--rounds", "2", "--put-modelled"]
        second = CliRunner().invoke(cli.app, [*options, "--llm", f"scripted@{server.url}", *more])
    assert (first.exit_code, second.exit_code) == (0, 0), (first.output, second.output)
    assert "a100 f32 tn 64_48_64: 2 kernels written: 1 wrong result, 1 measured" in first.output
    assert "times as fast (modelled, not measured)" in first.output
    assert "not written: its time is modelled; --put-modelled puts it all the same" in first.output
    assert "round 1: wrong result: wrong-value: " in first.output
    assert [trial.outcome for trial in results.trials(trials)] == ["wrong result", "measured", "wrong result"]
    (page,) = (tmp_path / "trials-proposals").iterdir()
    assert "+#pragma unroll 4" in page.read_text()
    assert "## best1: " in server.requests[1]["messages"][1]["content"], "the first round is taken up"
    assert f"written to {file}" in second.output
    (record,) = catalog.load(file)
    assert render(record).endswith(gemm((LOOP, UNROLLED)))
    assert len(list((tmp_path / "catalog" / "sources").iterdir())) == 1
    assert "written by" not in record.origin.source
    assert "its time modelled from machine code" in record.origin.source
