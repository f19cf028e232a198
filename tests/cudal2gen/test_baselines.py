"""Proves how baselines call the vendor's libraries, with stand-ins for these that compute on the CPU."""

from __future__ import annotations

import gc
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudal2gen import bench, results
from cudal2gen.bench import baselines
from cudal2gen.kernel import Problem
from cudal2gen.launch.gpu import Absent, Binder, Contender, GpuError, Winner
from cudal2gen.launch.operands import Operands
from tests.cudal2gen import vendor
from tests.cudal2gen.devices import FakeDevice

pytestmark = pytest.mark.torch


@pytest.fixture
def device() -> FakeDevice:
    """A device whose clock advances by calls."""
    return FakeDevice()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> vendor.Library:
    """The stand-ins for the vendor's libraries, whose calls take time on the device's clock."""
    return vendor.install(monkeypatch, device.spend)


def problem(acc: str = "f32", m: int = 40, n: int = 24, k: int = 72) -> Problem:
    """A problem of the H200 with these sizes."""
    return Problem(gpu="h200", acc=acc, layout="tn", m=m, n=n, k=k)  # type: ignore[arg-type]


def no_race(binders: Sequence[Binder]) -> Winner:
    """A race that must not be begun."""
    raise AssertionError("nothing is raced")


def contenders(device: FakeDevice, names: list[str], acc: str, tuned: Path) -> list[Contender]:
    """The contenders of these names. ``tuned``: the file in which raced algorithms are kept."""
    return baselines.contenders(names, acc, device, tuned)  # type: ignore[arg-type]


def compute_type(acc: str) -> int:
    """The cuBLAS code of the type in which it must accumulate."""
    return vendor.COMPUTE_16F if acc == "f16" else vendor.COMPUTE_32F


def run_and_check(contender: Contender, device: FakeDevice, of: Problem, race: Any) -> Operands:
    """Runs a contender once and compares its result exactly with NumPy's for the accumulator that it must have."""
    operands = device.operands(of, 1, seed=3)[0]
    contender.prepare(of, race)
    contender.bind(operands)()
    expected = vendor.product(operands.a.numpy(), operands.b_nn.numpy(), compute_type(of.acc))
    error = np.abs(operands.d.numpy().astype(np.float64) - expected)
    assert error.max() <= 2.0**-10 * np.abs(expected).max()
    return operands


@pytest.mark.parametrize("acc", ["f16", "f32"])
@pytest.mark.parametrize("name", [name for name in baselines.DEFAULT_BASELINES if name != "torch.matmul"])
def test_the_product_is_that_of_row_major_matrices(
    name: str, acc: str, device: FakeDevice, library: vendor.Library, tmp_path: Path
) -> None:
    (contender,) = contenders(device, [name], acc, tmp_path / "lt.jsonl")
    assert contender.name == name
    run_and_check(contender, device, problem(acc), lambda binders: Winner(0, 1.0, len(binders)))
    assert set(library.computes) == {compute_type(acc)}
    assert set(library.streams) == {7}
    assert all(limit >= 32 << 20 for limit in library.workspace_limits)


@pytest.mark.parametrize("acc", ["f16", "f32"])
def test_torch_accumulates_as_we_do(acc: str, device: FakeDevice, tmp_path: Path) -> None:
    import torch

    (contender,) = contenders(device, ["torch.matmul"], acc, tmp_path)
    operands = device.operands(problem(acc), 1, seed=3)[0]
    contender.prepare(problem(acc), no_race)
    assert torch.backends.cuda.matmul.allow_fp16_accumulation is (acc == "f16")
    contender.bind(operands)()
    assert torch.allclose(operands.d.float(), operands.a.float() @ operands.b.float().T, atol=0.1)
    assert str(acc == "f16") in contender.detail


def test_the_first_of_the_heuristic_is_taken_as_it_is(
    device: FakeDevice, library: vendor.Library, tmp_path: Path
) -> None:
    library.times = [10.0, 5.0]
    (contender,) = contenders(device, ["cublaslt-heuristic-nn"], "f32", tmp_path / "lt.jsonl")
    run_and_check(contender, device, problem(), no_race)
    assert device.log == ["lt 0"]
    assert "id=0" in contender.detail
    assert not (tmp_path / "lt.jsonl").exists()


@pytest.mark.slow
def test_the_race_finds_the_fastest_and_the_store_keeps_it(
    device: FakeDevice, library: vendor.Library, tmp_path: Path
) -> None:
    library.times = [10.0, 9.0, 1.0, 6.0, 7.0, 8.0, 6.5] + [20.0] * 120
    library.refused = {2}
    tuned = tmp_path / "lt.jsonl"
    (contender,) = contenders(device, ["cublaslt-autotuning-tn"], "f16", tuned)
    of = problem("f16")
    sets = device.operands(of, 4, seed=1)
    contender.prepare(of, bench.race(device, sets))
    contender.bind(sets[0])()
    assert device.log[-1] == "lt 3"
    (stored,) = results.algorithms(tuned).values()
    assert (stored.rank, stored.median_us, stored.candidates) == (3, pytest.approx(6.0), 99)
    assert (stored.name, stored.library, stored.acc, stored.layout) == ("NVIDIA H200", "cublasLt 130000", "f16", "tn")
    assert "id=3" in contender.detail

    (again,) = contenders(device, ["cublaslt-autotuning-tn"], "f16", tuned)
    searches = library.heuristics
    run_and_check(again, device, of, no_race)
    assert library.heuristics == searches
    assert device.log[-1] == "lt 3"

    library.version = 130100
    (newer,) = contenders(device, ["cublaslt-autotuning-tn"], "f16", tuned)
    newer.prepare(of, bench.race(device, sets))
    assert len(results.algorithms(tuned)) == 2


def test_loading_kernels_is_off_the_races_clock(device: FakeDevice, library: vendor.Library, tmp_path: Path) -> None:
    library.times, library.loading_us = [10.0] * 30 + [5.0], 0.1e6
    (contender,) = contenders(device, ["cublaslt-autotuning-tn"], "f32", tmp_path / "lt.jsonl")
    contender.prepare(problem(), bench.race(device, device.operands(problem(), 1, seed=1)))
    (stored,) = results.algorithms(tmp_path / "lt.jsonl").values()
    assert (stored.rank, stored.candidates) == (30, 31)
    assert device.time > 3.1


@pytest.mark.parametrize(("us", "loading_us", "timed"), [(0.3e6, 0.0, 4), (10.0, 2e6, 3)], ids=["slow", "loading"])
def test_a_race_ends(
    us: float, loading_us: float, timed: int, device: FakeDevice, library: vendor.Library, tmp_path: Path
) -> None:
    """Slow candidates end the race's first stage, and long loading ends the first calls."""
    library.times, library.loading_us = [us] * 10, loading_us
    (contender,) = contenders(device, ["cublaslt-autotuning-tn"], "f32", tmp_path / "lt.jsonl")
    contender.prepare(problem(), bench.race(device, device.operands(problem(), 1, seed=1)))
    (stored,) = results.algorithms(tmp_path / "lt.jsonl").values()
    assert stored.candidates == timed


def test_a_baseline_is_prepared_for_a_verdict(device: FakeDevice, library: vendor.Library, tmp_path: Path) -> None:
    library.times = [10.0, 5.0]
    (contender,) = contenders(device, ["cublaslt-autotuning-tn"], "f32", tmp_path / "lt.jsonl")
    ready = bench.prepare(device, contender, problem())
    ready.bind(device.operands(problem(), 1, 0)[0])()
    assert device.log[-1] == "lt 1"


def test_no_algorithm_is_a_reason_not_a_crash(device: FakeDevice, library: vendor.Library, tmp_path: Path) -> None:
    library.refused = {0}
    (contender,) = contenders(device, ["cublaslt-autotuning-nn"], "f32", tmp_path / "lt.jsonl")
    with pytest.raises(Absent, match="none of 1 candidates runs"):
        contender.prepare(problem(), bench.race(device, device.operands(problem(), 1, 0)))
    library.times = []
    with pytest.raises(Absent, match="no algorithm"):
        contender.prepare(problem(), no_race)


def test_descriptors_end_with_their_calls(device: FakeDevice, library: vendor.Library, tmp_path: Path) -> None:
    (contender,) = contenders(device, ["cublaslt-heuristic-tn"], "f32", tmp_path / "lt.jsonl")
    contender.prepare(problem(), no_race)
    calls = [contender.bind(operands) for operands in device.operands(problem(), 3, 0)]
    assert library.alive("desc") == 1, "calls of the same sizes share them"
    calls[0]()
    del calls
    gc.collect()
    assert [library.alive(kind) for kind in ("desc", "layout", "preference")] == [0, 0, 0]


def test_the_cublas_handle_gets_a_stream_once(
    device: FakeDevice, library: vendor.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvmath.bindings import cublas

    streams = []
    set_stream = cublas.set_stream
    monkeypatch.setattr(cublas, "set_stream", lambda *arguments: (streams.append(arguments[1]), set_stream(*arguments)))
    (contender,) = contenders(device, ["cublas-nn"], "f32", tmp_path)
    call = contender.bind(device.operands(problem(), 1, 0)[0])
    call()
    call()
    assert streams == [7]
    monkeypatch.setattr(device, "stream", lambda: 9)
    contender.bind(device.operands(problem(), 1, 0)[0])()
    call()
    assert streams == [7, 9, 7], "all calls share the handle, and it is moved back for a call on the first stream"


def test_the_fakes_take_what_the_bindings_take(library: vendor.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fakes have the names and order of arguments that nvmath documents."""
    monkeypatch.undo()
    from nvmath.bindings import cublas, cublasLt

    for module, name, fake in (
        (cublas, "gemm_ex", library.blas()["gemm_ex"]),
        (cublasLt, "matmul", library.lt()["matmul"]),
        (cublasLt, "matmul_algo_get_heuristic", library.lt()["matmul_algo_get_heuristic"]),
    ):
        documented = re.search(rf"{name}\((.*?)\)", getattr(module, name).__doc__)
        assert documented
        assert [argument.split()[-1] for argument in documented[1].split(",")] == list(
            inspect.signature(fake).parameters
        )


@pytest.mark.parametrize("d", ["same", "f32"])
def test_torchs_product_of_groups_has_our_type(
    d: str, device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes the ends of the groups, and the type of D if it is not that of A and B."""
    import torch

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(torch, "_grouped_mm", lambda *tensors, **options: calls.append((tensors, options)))
    of = problem(m=24, n=16, k=8).revised(batch="grouped", d=d)
    (contender,) = contenders(device, [results.GROUPED], "f32", tmp_path / "tuned.jsonl")
    contender.prepare(of, no_race)
    ends = torch.tensor([3, 24], dtype=torch.int32)
    matrices = torch.zeros(24, 8).half(), torch.zeros(2, 16, 8).half(), torch.zeros(2, 8, 16).half()
    operands = Operands(*matrices, torch.zeros(24, 16, dtype=torch.float if d == "f32" else torch.half), ends=ends)
    contender.bind(operands)()
    (((a, b), options),) = calls
    assert a is operands.a
    assert b is operands.b_nn
    assert options.pop("offs") is ends
    assert options == ({} if d == "same" else {"out_dtype": torch.float})


def test_unknown_names_are_refused(device: FakeDevice, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cublaslt: must be of torch\.matmul, cublas-nn"):
        contenders(device, ["cublaslt"], "f32", tmp_path)


def test_missing_bindings_are_said_before_anything_is_measured(
    device: FakeDevice, library: vendor.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_not_found() -> int:
        raise RuntimeError("libcublasLt.so not found")

    from nvmath.bindings import cublasLt

    monkeypatch.setattr(cublasLt, "get_version", raise_not_found)
    with pytest.raises(GpuError, match=r"libcublasLt.so not found\): .*\[gpu\]"):
        contenders(device, ["torch.matmul", "cublas-nn"], "f32", tmp_path)
    monkeypatch.setitem(sys.modules, "nvmath.bindings", None)
    with pytest.raises(GpuError, match=r"ModuleNotFoundError: .*nvmath"):
        contenders(device, ["cublaslt-heuristic-tn"], "f32", tmp_path)
    assert contenders(device, ["torch.matmul"], "f32", tmp_path)


def test_an_algorithm_that_is_refused_later_is_absent(
    device: FakeDevice, library: vendor.Library, tmp_path: Path
) -> None:
    """Such an algorithm may be chosen for packed matrices and called on others."""
    (contender,) = contenders(device, ["cublaslt-heuristic-nn"], "f32", tmp_path / "lt.jsonl")
    contender.prepare(problem(), no_race)
    library.refused = {0}
    with pytest.raises(Absent, match="cuBLASLt refuses its algorithm: status 15"):
        contender.bind(device.operands(problem(), 1, 0)[0])()


def test_an_attribute_that_an_algorithm_lacks_is_left_out(
    device: FakeDevice, library: vendor.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvmath.bindings import cublasLt

    get = cublasLt.matmul_algo_config_get_attribute

    def some(algo: int, attr: int, *rest: int) -> None:
        if attr == int(cublasLt.MatmulAlgoConfigAttribute.CLUSTER_SHAPE_ID):
            raise library.error(7)
        get(algo, attr, *rest)

    monkeypatch.setattr(cublasLt, "matmul_algo_config_get_attribute", some)
    (contender,) = contenders(device, ["cublaslt-heuristic-nn"], "f32", tmp_path)
    contender.prepare(problem(), no_race)
    assert "tile_id=" in contender.detail
    assert "cluster" not in contender.detail


@pytest.mark.thorough
def test_compiled_torch_is_a_contender(device: FakeDevice, tmp_path: Path) -> None:
    (contender,) = contenders(device, ["torch.compile"], "f32", tmp_path)
    operands = device.operands(problem(), 1, seed=3)[0]
    contender.prepare(problem(), no_race)
    contender.bind(operands)()
    assert float((operands.d.float() - operands.a.float() @ operands.b.float().T).abs().max()) < 0.05


# A program that runs the Triton baseline.
TRITON = """
import sys
from pathlib import Path
from cudal2gen.bench import baselines
from cudal2gen.launch.gpu import Winner
from cudal2gen.kernel import Problem
from tests.cudal2gen.devices import FakeDevice
device = FakeDevice()
for acc in ("f16", "f32"):
    for m, n, k in ((40, 72, 136), (200, 300, 64)):
        of = Problem(gpu="h200", acc=acc, layout="tn", m=m, n=n, k=k)
        (contender,) = baselines.contenders(["triton"], acc, device, Path("none"))
        operands = device.operands(of, 1, seed=3)[0]
        contender.prepare(of, lambda binders: Winner(len(binders) - 2, 1.0, len(binders)))
        contender.bind(operands)()
        worst = float((operands.d.float() - operands.a.float() @ operands.b.float().T).abs().max())
        assert worst < 0.15, worst
        assert "BM=16" in contender.detail
"""


@pytest.mark.slow
def test_the_triton_peer_in_tritons_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", TRITON], env=environment, check=True, timeout=300)
