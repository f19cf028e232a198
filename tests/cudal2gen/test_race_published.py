"""Proves that wrong published kernels are not timed, that padding counts, and that a crash ends one kernel only.

The kernels here are stand-ins of this project, which are called like published ones.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cudal2gen import bench, results
from cudal2gen.kernel import Problem
from cudal2gen.launch.gpu import Absent
from cudal2gen.launch.operands import Operands
from scripts import race_published
from scripts.published_library import Library, Source, build, libraries, padded, tile
from scripts.race_published import Published, main, until_possible
from tests.cudal2gen.emulated import EmulatedDevice

FOLDER = "kernels/h100_F32F16F16F32"
# One thread for each element of D. STAND_IN names a fault.
KERNEL = """
#include <torch/extension.h>
#include <torch/types.h>
template <class Sum>
__global__ void product(const half* a, const half* b, half* d, int m, int n, int k) {
  const int row = blockIdx.x, column = threadIdx.x;
  Sum sum = 0.f;
  for (int i = 0; i < k; i += 16) {
    float part = (float)sum;
    for (int j = i; j < i + 16 && j < k; ++j) part += __half2float(a[row * k + j]) * __half2float(b[column * k + j]);
    sum = (Sum)part;
  }
  d[row * n + column] = __float2half((float)sum);
}
static bool fault(const char* name) {
  const char* chosen = std::getenv("STAND_IN");
  return chosen != nullptr && std::string(chosen) == name;
}
void cuda_l2_h100_fp32(torch::Tensor a, torch::Tensor b, torch::Tensor b_col_major, torch::Tensor c) {
  TORCH_CHECK(a.dtype() == torch::kHalf && a.size(1) == b.size(0) && !fault("refusal"), "sizes: ", a.size(1));
  const int m = a.size(0), n = b.size(1), k = a.size(1);
  const half *left = (half*)a.data_ptr(), *right = b_col_major.data_ptr<half>();
  cudaStream_t stream = nullptr;
  static cudaStream_t kept = nullptr;
  if (fault("streams")) cudaStreamCreate(&stream);
  if (fault("own stream")) {
    if (kept == nullptr) cudaStreamCreate(&kept);
    stream = kept;
  }
  if (fault("zeros")) cudaMemset(a.data_ptr(), 0, 64);
  if (fault("end") && m == 128) std::abort();
  if (fault("fp16 sums")) product<half><<<m, n>>>(left, right, (half*)c.data_ptr(), m, n, k);
  else product<float><<<m, n, 0, stream>>>(left, right, (half*)c.data_ptr(), m, n, k);
  cudaDeviceSynchronize();
}
"""
# The lines of a published text that state its tile, with spaces as they occur.
TILE = "auto BM = Int<96>{}; \nauto BN = Int< 32 >{};\n  auto BK = Int<48>{};"
# The problem of the stand-in.
PROBLEM = Problem(gpu="h200", acc="f32", layout="tn", m=64, n=64, k=64)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The stand-in kernel, compiled from a checkout that the test writes."""
    folder = tmp_path_factory.mktemp("published")
    source = folder / "checkout" / FOLDER / "64_64_64.cu"
    source.parent.mkdir(parents=True)
    source.write_text(KERNEL)
    return build(folder / "checkout", Source("h100", "f32", "64_64_64"), "h200", folder / "built")


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    """An emulated device for the published problem."""
    from cudal2gen.generation import catalog

    record = next(record for record in catalog.load() if record.problem == PROBLEM)
    with EmulatedDevice(record) as emulated:
        yield emulated


def operands(device: EmulatedDevice) -> Operands:
    """Normally distributed operands of 64 x 64 x 64, with B stored both ways."""
    import torch

    generator = torch.Generator().manual_seed(1)
    tensors = {name: device.empty(64, 64) for name in ("a", "b", "b_nn", "d")}
    for name in ("a", "b"):
        tensors[name].copy_(torch.randn(64, 64, generator=generator))
    tensors["b_nn"].copy_(tensors["b"].t())
    return Operands(**tensors)


def trial_file(kernel: Library) -> Path:
    """The file that exists while a published kernel's library is tried, and after a try that crashed."""
    return kernel.path.with_suffix(".trial")


def assert_product(matrices: Operands) -> None:
    """Checks D within the rounding of fp16."""
    expected = matrices.a.double() @ matrices.b.double().t()
    assert (matrices.d.double() - expected).abs().max() < 2e-2


def prepared_contender(device: EmulatedDevice, kernel: Library) -> Published:
    """The published kernel as a contender, prepared for its problem."""
    published = Published("h100", device, {PROBLEM: kernel}, True, [], trial_file(kernel))  # type: ignore[arg-type]
    published.prepare(PROBLEM, None)  # type: ignore[arg-type]
    return published


def test_whole_tiles_are_what_the_published_benchmark_passes() -> None:
    assert tile(TILE) == (96, 32, 48)
    assert tile("auto BM = Int<96>{};") is None
    assert padded(TILE, (64, 64, 64)) == (96, 64, 96)
    assert padded("auto BM = Int<96>{};", (64, 64, 64)) == (64, 64, 64)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_right_kernel_is_called_through_its_own_host_function(kernel: Library, device: EmulatedDevice) -> None:
    folder = kernel.path.parent
    assert list(libraries(folder)) == [kernel]
    written = kernel.path.stat().st_mtime_ns
    assert build(folder.parent / "checkout", kernel.source, "h200", folder) == kernel
    assert kernel.path.stat().st_mtime_ns == written
    published, matrices = prepared_contender(device, kernel), operands(device)
    call = published.bind(matrices)
    matrices.d.fill_(0)
    call()
    assert_product(matrices)
    assert published.stages(matrices)[1] is None
    assert "at unknown, sm_90a" in published.detail


@pytest.mark.slow
def test_a_stream_of_its_own_is_the_measurements(
    kernel: Library, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, matrices = prepared_contender(device, kernel), operands(device)
    monkeypatch.setenv("STAND_IN", "own stream")
    call = published.bind(matrices)
    matrices.d.fill_(0)
    call()
    assert_product(matrices)  # nothing waited for the device before


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("fp16 sums", "wrong result, as of sums in fp16: an error of"),
        ("zeros", "wrong result: an error of"),
        ("refusal", "sizes: 64"),
        ("streams", "a CUDA graph cannot hold it: 1 of its calls use several streams"),
    ],
)
def test_a_fault_makes_a_kernel_absent(
    kernel: Library, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    published = prepared_contender(device, kernel)
    monkeypatch.setenv("STAND_IN", fault)
    with pytest.raises(Absent, match=reason):
        published.bind(operands(device))
    assert not trial_file(kernel).exists()


def test_a_checkout_is_compiled_as_far_as_it_has_kernels(kernel: Library, capsys: pytest.CaptureFixture[str]) -> None:
    folder = kernel.path.parent
    command = ["--mnk", "64_64_64", "--mnk", "128_64_128", "--built", str(folder), "--build-only"]
    assert main([str(folder.parent / "checkout"), *command]) == 0
    assert f"1 published kernels of 2 problems, compiled into {folder}" in capsys.readouterr().out
    assert list(libraries(folder)) == [kernel]
    assert main([str(folder), *command]) == 2
    assert "no folder kernels" in capsys.readouterr().err


def test_an_impossible_time_makes_a_published_kernel_absent_and_the_race_begins_again(
    kernel: Library, device: EmulatedDevice
) -> None:
    published = prepared_contender(device, kernel)

    def race(_: object) -> bench.RunOutcome:
        published.prepare(PROBLEM, None)  # type: ignore[arg-type]
        raise bench.TooGood("0.1 us", published.name)

    with pytest.raises(bench.TooGood):
        until_possible(race, [], [])
    with pytest.raises(Absent, match=r"0\.1 us"):
        until_possible(race, [published], [])


def test_padding_is_in_the_timing(kernel: Library, device: EmulatedDevice) -> None:
    published, matrices = prepared_contender(device, replace(kernel, padded=(96, 64, 96))), operands(device)
    assert "padded to 96_64_96, in the timing" in published.detail
    call = published.bind(matrices)
    _, copies = published.stages(matrices)
    assert copies is not None
    matrices.a.mul_(2)  # every call must copy it anew
    call()
    assert_product(matrices)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_kernel_that_ends_the_process_is_stored_as_absent_and_the_race_goes_on(
    kernel: Library, tmp_path: Path
) -> None:
    """The race runs on an H100, with kernels that were compiled for an H200."""
    built = tmp_path / "built"
    shutil.copytree(kernel.path.parent, built)
    described = json.loads(kernel.path.with_suffix(".json").read_text())
    described["source"]["mnk"] = "128_64_128"
    described["padded"] = [128, 64, 128]
    (built / "other.json").write_text(json.dumps(described))
    command = [sys.executable, "-m", "scripts.race_published", "--built", str(built), "--out", str(tmp_path)]
    command += ["--baselines", "none", "--benchmark-seconds", "0.01", "--warmup-seconds", "0", "--budget", "1h"]
    environment = os.environ | {
        "CUDAL2GEN_GPU": "tests.cudal2gen.rehearsal:H100",
        "CUDAL2GEN_CACHE_DIR": str(tmp_path / "cache"),  # which has the lock of each device
        "STAND_IN": "end",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = results.measurements(tmp_path / "published.jsonl").measurements
    assert {(row.gpu, row.mnk, row.l2) for row in rows} == {
        ("h100", mnk, l2) for mnk in ("64_64_64", "128_64_128") for l2 in ("cold", "hot")
    }
    for row in rows:
        assert row.timing("cudal2gen")
        assert (row.timing("cuda-l2-h100") is not None) == (row.mnk == "64_64_64")
        if row.mnk != "64_64_64":
            assert row.absent["cuda-l2-h100"].endswith("128_64_128.cu stopped the device or ended the process")
    assert "| 64_64_64 | f32 | device, hot |" in done.stdout
    assert "- f32 128_64_128 not timed: " in done.stdout


def test_a_spent_budget_starts_no_further_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def end_by_signal(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        """A process that a kernel ends, after more than the budget."""
        assert not started, "the budget is spent"
        started.append(command[-1])
        Path(command[command.index("--trial") + 1]).write_text("a.so")
        monkeypatch.setattr(race_published.time, "monotonic", lambda: 1e9)
        return subprocess.CompletedProcess(command, -11)

    monkeypatch.setattr(race_published.subprocess, "run", end_by_signal)
    monkeypatch.setattr(race_published.time, "monotonic", lambda: 0.0)
    assert race_published.supervise([], 60.0) == 0
    assert started == ["60.0s"]
