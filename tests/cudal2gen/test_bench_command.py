"""Proves that the verb ``bench`` measures, resumes and refuses, on a device whose clock the test sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cudal2gen import bench, results
from cudal2gen.bench import baselines
from cudal2gen.cli import options
from cudal2gen.generation import answers, catalog
from cudal2gen.kernel import Problem, Record
from cudal2gen.launch.gpu import reserved_device
from cudal2gen.results import choice
from kernelproof.ground.chips import GPUS, CardFacts
from tests import commands
from tests.cudal2gen.devices import ENVIRONMENT, FakeDevice, FakeKernel, FakeProduct
from tests.cudal2gen.test_bench import stored_measurements

pytestmark = pytest.mark.torch


class FakeCard(FakeDevice):
    """The stand-in that the command line opens instead of a GPU."""

    facts = CardFacts.of("NVIDIA H200", (9, 0), 132)
    record_model = "h200"

    def __init__(self, index: int) -> None:
        super().__init__()

    def check(self, record: Record) -> None:
        """Refuses records of another capability."""
        assert record.arch.startswith("sm_90")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the bench command on a fake card; returns exit code, output and errors."""
    from typer.testing import CliRunner

    from cudal2gen import cli
    from cudal2gen.launch import gpu
    from cudal2gen.validator.device import BuiltKernel

    def open_fake(built: BuiltKernel, card: FakeCard) -> FakeKernel:
        kernel = FakeKernel(card, built.record, 8.0)
        kernel.digest = built.artifact.digest
        return kernel

    monkeypatch.setattr(gpu, "connect", FakeCard)
    monkeypatch.setattr(BuiltKernel, "open", open_fake)
    real = baselines.contenders
    monkeypatch.setattr(baselines, "_check_vendor", lambda: None)

    def contenders(names: list[str], acc: Any, device: Any, tuned: Path) -> list[Any]:
        real(names, acc, device, tuned)
        return [FakeProduct(device, name, 9.0) for name in names]

    monkeypatch.setattr(baselines, "contenders", contenders)

    monkeypatch.setenv("CUDAL2GEN_RESULTS", str(tmp_path))

    def invoke(*arguments: str) -> Any:
        out = () if any("records=" in word for word in arguments) else ("--out", str(tmp_path / "m.jsonl"))
        return CliRunner().invoke(cli.app, ["bench", "--timing", "warmup=0", *out, *arguments])

    return invoke


@pytest.mark.slow
def test_the_command_measures_and_resumes(command: Any, tmp_path: Path) -> None:
    chosen = ["--mnk", "64_64_64", "--mnk", "128_64_64", "--acc", "f32"]
    done = command(*chosen)
    assert done.exit_code == 0, done.output
    assert "2 problems, 0 of them stored before: 4 measurements added" in done.stdout
    assert "0 problems left, 0 faults" in done.stdout
    assert {measurement.gpu for measurement in stored_measurements(tmp_path / "m.jsonl")} == {"h200"}
    assert stored_measurements(tmp_path / "m.jsonl")[0].contenders[:2] == ["cudal2gen", "torch.matmul"]
    assert len(stored_measurements(tmp_path / "m.jsonl")[0].contenders) == 11
    assert "2 of them stored before: 0 measurements" in command(*chosen).stdout
    assert "0 of them stored before: 4 measurements" in command(*chosen, "--again").stdout
    hosted = command(
        "--mnk", "64_64_64", "--acc", "f32", "--timing", "protocol=server+offline", "--timing", "seconds=0.01"
    )
    assert "2 measurements added" in hosted.stdout
    few = command("--mnk", "64_64_64", "--acc", "f32", "--again", "--baselines", "cublas-nn,cublas-tn")
    assert few.exit_code == 0
    assert stored_measurements(tmp_path / "m.jsonl")[-1].contenders == [
        "cudal2gen",
        "cublas-nn",
        "cublas-tn",
        "cublas-max",
    ]


def test_missing_vendor_packages_are_reported_before_anything_is_compiled(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cudal2gen.generation import compiler
    from cudal2gen.launch import gpu

    def fail_to_import() -> None:
        raise gpu.GpuError("cuBLAS and cuBLASLt cannot be called")

    compiled: list[Any] = []
    monkeypatch.setattr(baselines, "_check_vendor", fail_to_import)
    monkeypatch.setattr(compiler, "build", lambda *records, **_: compiled.append(records))
    done = command("--mnk", "64_64_64", "--acc", "f32")
    assert (done.exit_code, compiled) == (3, [])
    assert done.stderr.splitlines()[-1] == "error: cuBLAS and cuBLASLt cannot be called"


def test_a_stopped_device_is_one_line_of_the_command(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise bench.Stopped("64_64_64: k or a baseline stopped the device: CUDA error: an illegal memory access")

    monkeypatch.setattr(bench, "run", stop)
    done = command("--mnk", "64_64_64", "--acc", "f32")
    assert (done.exit_code, done.stderr.splitlines()[-1][:26]) == (1, "error: 64_64_64: k or a ba")


def test_a_measurement_is_of_the_card_that_takes_it(command: Any, tmp_path: Path) -> None:
    done = command("--mnk", "64_64_64", "--acc", "f32", "--gpu", "h100")
    assert done.exit_code == 2
    assert "h100: this is NVIDIA H200, and measurements are of the card that takes them; leave out" in done.stderr
    assert not (tmp_path / "m.jsonl").exists()


@pytest.mark.slow
def test_a_card_without_records_is_measured_with_the_nearest_ones_under_its_own_name(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pcie = CardFacts.of("NVIDIA H100 PCIe", (9, 0), 114)
    own = {"id": "pcie", "gpu": "", "name": pcie.name, "sms": pcie.sms}
    monkeypatch.setattr(FakeCard, "facts", pcie)
    monkeypatch.setattr(FakeCard, "record_model", pcie.stand_ins(GPUS)[0])
    monkeypatch.setattr(
        FakeCard, "__init__", lambda self, _: FakeDevice.__init__(self, 0.0, ENVIRONMENT.model_copy(update=own))
    )
    done = command("--mnk", "64_64_64", "--acc", "f32", "--baselines", "torch.matmul")
    assert done.exit_code == 0, done.output
    assert (
        "NVIDIA H100 PCIe (sm_90, 114 SMs) has no records of its own: measuring those of h100, under its" in done.stderr
    )
    measured = results.measurements(tmp_path / "m.jsonl")
    assert {row.gpu for row in measured.measurements} == {"h100"}
    assert [(card.gpu, card.name, card.sms) for card in measured.environments.values()] == [("", pcie.name, 114)]
    # Therefore no pack and no choice for an H100 uses another card's measurements.
    records = answers.measured_records(measured.measurements[0].problem, measured)
    assert choice.tabulate("h100", records, measured).rows == []
    whole = {id_: card.model_copy(update={"gpu": "h100"}) for id_, card in measured.environments.items()}
    assert len(choice.tabulate("h100", records, measured._replace(environments=whole)).rows) == 1


@pytest.mark.slow
def test_the_command_takes_another_gpus_records(command: Any, tmp_path: Path) -> None:
    done = command("--mnk", "64_64_64", "--acc", "f32", "--where", "records=rtx3090", "--baselines", "none")
    assert done.exit_code == 0, done.output
    record = catalog.find(Problem(gpu="rtx3090", acc="f32", layout="tn", m=64, n=64, k=64)).record
    timing = stored_measurements(tmp_path / "rtx3090-records.jsonl")[0].timings[0]
    assert timing.record == record.name
    assert not (tmp_path / "measurements.jsonl").exists(), "they would replace those of the card's own records"
    odd = command("--mnk", "65_64_64", "--acc", "f32", "--where", "records=rtx3090", "--baselines", "none")
    assert odd.exit_code == 0, odd.output
    assert "that of rtx3090 64_64_64 stands in, by mma.sync at 62% of h200's tensor cores, predicated" in odd.stderr
    assert stored_measurements(tmp_path / "rtx3090-records.jsonl")[-1].mnk == "65_64_64"


@pytest.mark.slow
def test_the_command_measures_a_list_of_problems_at_their_own_sizes(command: Any, tmp_path: Path) -> None:
    """``show`` then explains a measurement by the record that was made for its problem."""
    problems = tmp_path / "problems.jsonl"
    line = '{"gpu":"h200","acc":"f32","layout":"tn","m":%d,"n":%d,"k":%d,"count":2}\n'
    problems.write_text(line % (17, 96, 72) + line % (64, 64, 64) + line.replace("tn", "nn") % (64, 64, 64))
    done = command("--where", f"problems={problems}", "--acc", "f32")
    assert done.exit_code == 0, done.output
    assert "1 problems of" in done.stderr
    assert "are not for h200 f32 tn, and left out" in done.stderr
    assert "no record for h200 f32 tn 17_96_72; taking that of" in done.stderr
    assert {measurement.mnk for measurement in stored_measurements(tmp_path / "m.jsonl")} == {"17_96_72", "64_64_64"}
    arguments = [
        "explain",
        "--mnk",
        "17_96_72",
        "--gpu",
        "h200",
        "--acc",
        "f32",
        "--from",
        str(tmp_path / "m.jsonl"),
    ]
    explanation = commands.run(*arguments).stdout
    assert "of 17_96_72; launched as 17_96_72, no copies" in explanation
    assert "17_96_72 was measured: 1.125x" in explanation
    assert "no problem for h200 f16 tn" in command("--where", f"problems={problems}", "--acc", "f16").stderr
    missing = command("--where", f"problems={tmp_path}/none.jsonl", "--acc", "f32")
    assert (missing.exit_code, f"{tmp_path}/none.jsonl" in missing.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --mnk M_N_K, --all, --class NAME, --sample N and --problems FILE"),
        (["--all", "--where", "sample=3"], "give one of"),
        (["--mnk", "64_64"], "expected three sizes"),
        (
            ["--mnk", "64_64_64", "--timing", "protocol=hot"],
            "'--timing protocol': 'hot'",
        ),
        (["--mnk", "64_64_64", "--budget", "8x"], "'--budget': '8x'"),
        (["--mnk", "64_64_64", "--budget", "-1m"], "'--budget': '-1m'"),
        (
            ["--mnk", "64_64_64", "--baselines", "cublaslt"],
            "'--baselines': 'cublaslt'",
        ),
    ],
)
def test_what_the_command_refuses(command: Any, arguments: list[str], message: str) -> None:
    done = command(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(("text", "seconds"), [("8m", 480.0), ("90s", 90.0), ("1.5h", 5400.0), ("7", 7.0)])
def test_durations(text: str, seconds: float) -> None:
    assert options.seconds(text) == seconds


def test_two_at_once_would_measure_each_other(command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDAL2GEN_CACHE_DIR", str(tmp_path / "cache"))
    chosen = ["--mnk", "64_64_64", "--acc", "f32", "--baselines", "none"]
    with reserved_device(0):
        refused = command(*chosen)
    assert refused.exit_code == 3
    assert "another process measures on device 0" in refused.stderr
    assert command(*chosen).exit_code == 0


def test_without_a_gpu_the_command_says_so() -> None:
    done = commands.run("bench", "--mnk", "64_64_64")
    assert done.returncode == 3
    assert done.stderr.startswith("error: torch sees no CUDA device; without one, the emulator runs kernels")
