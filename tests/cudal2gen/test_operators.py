"""``cudal2gen.matmul`` and ``linear``: numbers, layouts, plans, fallbacks, refusals; kernels run in the emulator."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cudal2gen
from cudal2gen import pack
from cudal2gen.kernel.launch import Sizes
from cudal2gen.launch.launcher import LaunchError, OpenKernel
from cudal2gen.results.choice import Kernel, Prefer
from kernelproof.ground.chips import CardFacts
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice
from tests.cudal2gen.emulated_operators import GPU
from tests.cudal2gen.paths import PATHS
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import devices, dispatch, emulated, plan_requests, plans  # noqa: E402
from cudal2gen.operators.measuring import races  # noqa: E402
from cudal2gen.operators.measuring.first_runs import FirstRuns  # noqa: E402
from tests.cudal2gen import racing  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack in which the predicated kernel was measured faster on its own problem."""
    table = packed.table(list(packed.RECORDS.values()), {0: 2.0, 2: 2.0})
    return packed.folder(table, tmp_path_factory.mktemp("packs") / GPU)


@pytest.fixture(scope="module")
def opened(directory: Path) -> pack.Pack:
    return pack.open_pack(directory)


@pytest.fixture
def measured(operator_device: OperatorDevice, opened: pack.Pack) -> Iterator[dispatch.Dispatcher]:
    with emulated(operator_device, [opened]) as dispatcher:
        yield dispatcher


def drawn(device: EmulatedDevice, rows: int, cols: int, wide: int = 0, start: int = 0) -> Any:
    """Small integers in the device's memory, so that products are exact; rows are ``wide`` apart."""
    wide = wide or cols
    whole = device.empty(rows * wide + start)
    whole.fill_(float("nan"))
    matrix = whole[start:].view(rows, wide)[:, :cols]
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    return matrix.copy_(torch.randint(-2, 3, (rows, cols), generator=generator))


def product(a: Any, b: Any) -> Any:
    return (a.double() @ b.double()).half()


def ran(dispatcher: dispatch.Dispatcher) -> tuple[int, list[str]]:
    """Calls of kernels, and the reasons of all others."""
    counted = dispatcher.stats()
    return sum(counted["kernel"].values()), sorted(counted["torch"])


# --- numbers ---


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(64, 64, 128), (1, 64, 64), (33, 1, 72), (31, 47, 8), (7, 5, 3), (40, 24, 100), (1, 1, 1), (96, 96, 64)],
)
def test_b_as_n_k_in_any_size(m: int, n: int, k: int, device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = drawn(device, m, k), drawn(device, n, k).t()
    d = cudal2gen.matmul(a, b)
    assert d.shape == (m, n)
    assert d.is_contiguous()
    assert torch.equal(d, product(a, b))
    assert ran(kernels) == (1, [])


@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 128), (31, 48, 72), (5, 7, 9), (3, 1, 64)])
def test_b_as_k_n_in_any_size(m: int, n: int, k: int, device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = drawn(device, m, k), drawn(device, k, n)
    assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    assert ran(kernels) == (1, [])


def launched(device: EmulatedDevice) -> int:
    return len(device.session.launches)


def test_leading_dimensions_are_served_without_a_copy(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = drawn(device, 40, 64, wide=80), drawn(device, 24, 64, wide=72).t()
    nothing: list[Any] = []
    device.empty, real = (lambda *shape: nothing.append(shape) or real(*shape)), device.empty  # type: ignore[func-returns-value,method-assign]
    assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    assert nothing == [(40, 24)], "D alone is allocated"


@pytest.mark.parametrize(("wide", "start"), [(65, 0), (64, 1), (68, 4)])
def test_rows_off_16_bytes_are_copied(
    wide: int, start: int, device: EmulatedDevice, kernels: dispatch.Dispatcher
) -> None:
    a, b = drawn(device, 40, 64, wide, start), drawn(device, 24, 64, wide, start).t()
    assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    assert ran(kernels) == (1, [])


def test_a_workspace_and_options_of_the_record(
    device: EmulatedDevice, opened: pack.Pack, operator_device: OperatorDevice
) -> None:
    for name, layout in (("split", "tn"), ("zsplit", "nn"), ("whole", "tn")):
        record = packed.RECORDS[name]
        own = pack.Pack(opened.directory, opened.facts)
        own.table.kernels[:] = [kernel for kernel in opened.table.kernels if kernel.record.name == record.name]
        a, b = drawn(device, 50, record.k), drawn(device, record.k, 90)
        b = drawn(device, 90, record.k).t() if layout == "tn" else b
        with emulated(operator_device, [own], prefer="kernel") as dispatcher:
            for _ in range(2):
                assert torch.equal(cudal2gen.matmul(a, b, acc=record.acc), product(a, b)), name
            assert dispatcher.stats()["kernel"] == {record.name: 2}


def test_fp16_sums_only_where_they_are_asked_for(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = device.empty(32, 128), device.empty(32, 128).t()
    a.zero_()
    a[:, ::16] = 1
    a[:, 0] = 4096
    b.fill_(1)  # 4096 and then a one in each MMA, which fp16 loses
    assert float(cudal2gen.matmul(a, b)[0, 0]) == 4104, "4103 in fp16"
    assert float(cudal2gen.matmul(a, b, acc="f16")[0, 0]) == 4096
    names = kernels.stats()["kernel"]
    assert sorted(name.split("_")[3] for name in names) == ["f16", "f32"]


def test_out_is_written_in_place(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = drawn(device, 40, 64), drawn(device, 24, 64).t()
    whole = device.empty(40, 32)
    out = whole[:, :24]
    version = out._version
    assert cudal2gen.matmul(a, b, out=out) is out
    assert torch.equal(out, product(a, b))
    assert bool(whole[:, 24:].isnan().all()), "what is beside it stays"
    assert out._version > version
    column_major = device.empty(24, 40).t()
    cudal2gen.matmul(a, b, out=column_major)
    assert torch.equal(column_major, product(a, b))
    assert ran(kernels) == (1, ["strides of D that no layout serves"])


def test_out_beside_an_operand_is_no_overlap(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    whole = device.empty(24, 8)
    whole[:16].fill_(1)
    assert bool((cudal2gen.matmul(whole[:8], whole[8:16], out=whole[16:]) == 8).all())
    assert bool((whole[:16] == 1).all())
    between = device.empty(3, 8, 8)
    between.fill_(1)
    cudal2gen.matmul(between[0], between[2], out=between[1])
    assert bool((between[1] == 8).all())


def test_new_values_at_the_same_place(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    """Nothing of a call reaches the next one with the same plan."""
    a, b = drawn(device, 33, 60), drawn(device, 20, 60).t()
    first = cudal2gen.matmul(a, b)
    expected = first.clone()
    a.mul_(-1)
    assert torch.equal(cudal2gen.matmul(a, b), -expected)
    assert torch.equal(first, expected), "a result is nobody else's memory"
    assert len(kernels.plans) == 1


def test_linear_flattens_batches_and_adds_the_bias(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    x, weight, bias = drawn(device, 30, 64).view(2, 3, 5, 64), drawn(device, 24, 64), drawn(device, 1, 24).view(24)
    for term in (None, bias):
        d = cudal2gen.linear(x, weight, term)
        assert d.shape == (2, 3, 5, 24)
        expected = product(x.view(30, 64), weight.t()) + (0 if term is None else term)
        assert torch.equal(d.view(30, 24), expected.half())
    single = cudal2gen.linear(x[0, 0, 0], weight)
    assert torch.equal(single, product(x[0, 0, :1], weight.t())[0])
    assert ran(kernels) == (3, [])


HOPPER = ["wgmma n64", "wgmma workspace", "wgmma cluster split 4 f16 nn", "once any n", "once split 2"]


@pytest.mark.parametrize("name", HOPPER)
def test_kernels_with_tensor_maps_in_ragged_sizes(name: str, tmp_path: Path) -> None:
    """Their rules say which sizes they take as they are; others are padded by 8, or not theirs."""
    record = PATHS[name]
    opened = pack.open_pack(packed.folder(packed.table([record]), tmp_path / "pack"))
    with (
        EmulatedDevice(record) as device,
        emulated(OperatorDevice(device, record.gpu), [opened], "kernel") as dispatcher,
    ):
        sizes = [(record.m, record.n, record.k), (record.m, record.n - 1, record.k), (record.m, record.n, record.k - 3)]
        for m, n, k in [*sizes, (record.m, record.n, record.k), (record.m // 3, 24, record.k)]:
            a = drawn(device, m, k)
            b = drawn(device, n, k).t() if record.layout == "tn" else drawn(device, k, n)
            d = cudal2gen.matmul(a, b, acc=record.acc)
            torch.testing.assert_close(d, product(a, b), atol=0, rtol=2**-9 if record.acc == "f16" else 0)
        assert device.session.errors == []
        counted = dispatcher.stats()
        assert counted == {"kernel": {record.name: 5}, "torch": {}}


# --- what is torch's ---


def test_strides_that_no_layout_serves(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = drawn(device, 64, 40).t(), drawn(device, 24, 64).t()
    assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    every_other = drawn(device, 48, 128)[:, ::2]
    assert torch.equal(
        cudal2gen.matmul(drawn(device, 40, 64), every_other.t()), product(drawn(device, 40, 64), every_other.t())
    )
    one_row = drawn(device, 1, 64).expand(40, 64)
    assert torch.equal(cudal2gen.matmul(one_row, b), product(one_row, b))
    reasons = ["strides of A that no layout serves", "strides of B that no layout serves"]
    assert ran(kernels) == (0, reasons)
    x = drawn(device, 30, 64).view(5, 6, 64).transpose(0, 1)
    assert torch.equal(
        cudal2gen.linear(x, drawn(device, 24, 64)).reshape(30, 24),
        product(x.reshape(30, 64), drawn(device, 24, 64).t()),
    )
    assert kernels.stats()["torch"]["strides of A that no layout serves"] == 3


@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0)])
def test_empty_products(m: int, n: int, k: int, kernels: dispatch.Dispatcher) -> None:
    a, b = torch.ones(m, k).half(), torch.ones(n, k).half()
    for d in (cudal2gen.matmul(a, b.t()), cudal2gen.linear(a, b), cudal2gen.matmul(a, torch.ones(k, n).half())):
        assert d.shape == (m, n)
        assert bool((d == 0).all())
    assert ran(kernels) == (0, ["an extent is 0"])


def test_too_large_for_a_kernel_is_torchs(kernels: dispatch.Dispatcher) -> None:
    thin = torch.zeros(1, 1).half()
    huge = thin.expand((1 << 24) + 8, 1)[:, :0]
    assert cudal2gen.matmul(huge, thin[:0]).shape == ((1 << 24) + 8, 1)
    problem, why_not = plan_requests.problem_of(("f16", "same", "f32", "tn"), Sizes((1 << 24) + 8, 64, 64))
    assert (problem, why_not) == (None, "an extent is too large")
    apart = torch.zeros((1 << 24) + 80, dtype=torch.float16).as_strided((2, 64), ((1 << 24) + 16, 1))
    assert cudal2gen.matmul(apart, torch.zeros(8, 64).half().t()).shape == (2, 8)
    assert "an extent or leading dimension exceeds 16777216" in kernels.stats()["torch"]


def test_without_measurements_torch_computes(device: EmulatedDevice, measured: dispatch.Dispatcher) -> None:
    a, b = drawn(device, 64, 128), drawn(device, 64, 128).t()
    assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    assert ran(measured) == (1, []), "measured faster"
    far = drawn(device, 8, 8), drawn(device, 8, 8)
    assert torch.equal(cudal2gen.matmul(*far), product(*far))
    assert ran(measured) == (1, ["nothing was measured within a factor of two"])
    assert cudal2gen.explain(a, b).endswith("64_64_128 was measured: 2.010x [2.000, 2.020] (cold L2, torch.matmul)")
    assert cudal2gen.explain(*far) == "torch: 8_8_8: nothing was measured within a factor of two"


def test_one_may_ask_for_kernels_or_for_torch(device: EmulatedDevice, measured: dispatch.Dispatcher) -> None:
    a, b = drawn(device, 8, 8), drawn(device, 8, 8)
    with cudal2gen.prefer("kernel"):
        cudal2gen.matmul(a, b)
    assert ran(measured) == (1, [])
    with cudal2gen.prefer("vendor"):
        cudal2gen.matmul(drawn(device, 64, 128), drawn(device, 64, 128).t())
    assert ran(measured) == (1, ["asked for"])
    with (
        pytest.raises(ValueError, match="prefer='fast': must be one of measured, inferred, kernel, vendor"),
        cudal2gen.prefer("fast"),
    ):  # type: ignore[arg-type]
        pass


@pytest.mark.slow
def test_a_plan_made_before_gives_way_to_a_preference(device: EmulatedDevice, measured: dispatch.Dispatcher) -> None:
    a, b = drawn(device, 64, 128), drawn(device, 64, 128).t()
    kernel = cudal2gen.explain(a, b)
    assert not kernel.startswith("torch: ")
    with cudal2gen.prefer("vendor"):
        assert cudal2gen.explain(a, b).startswith("torch: ")
    assert cudal2gen.explain(a, b) == kernel


def test_the_environment_may_ask(directory: Path) -> None:
    program = "import cudal2gen, torch; cudal2gen.matmul(torch.ones(8, 8).half(), torch.ones(8, 8).half())"
    done = run(program, CUDAL2GEN_PREFER="sometimes")
    assert "CUDAL2GEN_PREFER=sometimes: must be one of measured, inferred, kernel, vendor" in done.stderr
    assert run(program, CUDAL2GEN_PREFER="kernel").returncode == 0


def run(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=os.environ | env
    )


def test_a_pack_for_another_gpu_is_said_once(device: EmulatedDevice, opened: pack.Pack) -> None:
    a, b = drawn(device, 64, 128), drawn(device, 64, 128).t()
    alien = CardFacts.of("NVIDIA Alien", (7, 5), 40)
    with emulated(OperatorDevice(device, alien), [opened], prefer="kernel") as dispatcher:
        with pytest.warns(
            UserWarning,
            match=r"no kernels for NVIDIA Alien \(sm_75, 40 SMs\): packs are there for a100; torch computes",
        ):
            cudal2gen.matmul(a, b)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                assert torch.equal(cudal2gen.matmul(a, b.contiguous()), product(a, b))
        assert dispatcher.stats()["torch"] == {"no pack for this GPU": 4}
    with (
        emulated(OperatorDevice(device, "h200"), []),
        pytest.warns(UserWarning, match="no pack is installed"),
    ):
        cudal2gen.matmul(a, b)


def test_kernels_that_do_not_load_are_torchs(
    device: EmulatedDevice, opened: pack.Pack, operator_device: OperatorDevice
) -> None:
    a, b = drawn(device, 64, 128), drawn(device, 64, 128).t()
    bare = OperatorDevice(device, GPU)
    type(bare).runtime_library, real = property(lambda _: Path("/nowhere/libcudart.so")), type(bare).runtime_library  # type: ignore[assignment]
    try:
        with emulated(bare, [opened], prefer="kernel") as dispatcher:
            with pytest.warns(UserWarning, match="cannot be loaded: .*/nowhere/libcudart.so"):
                assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
            assert dispatcher.stats()["torch"] == {"cannot be loaded": 1}
    finally:
        type(bare).runtime_library = real  # type: ignore[assignment]


@pytest.mark.parametrize(("code", "mode"), [(200, "off"), (209, "once"), (222, "once")])
def test_an_image_that_the_driver_refuses_is_tried_once(
    code: int, mode: races.Mode, device: EmulatedDevice, opened: pack.Pack, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One warning for all kernels; the next process, which may have another driver, tries again."""
    monkeypatch.setenv("CUDAL2GEN_RESULTS", str(tmp_path))
    loads: list[str] = []

    def load(words: Any) -> int:
        loads.append(ctypes.string_at(words[1]).decode())
        return code

    library_load = device.session.calls["library_load_file"]
    device.session.calls["library_load_file"] = load
    timed = racing.Timed(device, racing.Clock(device, {}, 300.0))
    a, b = drawn(device, 64, 128), drawn(device, 64, 128).t()
    prefer: Prefer = "kernel" if mode == "off" else "measured"
    with dispatch.replaced(dispatch.Dispatcher([opened], timed, prefer, mode)) as dispatcher:
        message = rf"driver of .*A100.* refuses kernels of {opened.directory} \(cudaError {code}\).*--gpu a100"
        with pytest.warns(UserWarning, match=message) as warned:
            products_by_torch = [cudal2gen.matmul(a[:rows], b) for rows in (64, 64, 48, 48, 33)]
        assert len(racing.own(warned)) == 1
        assert all(torch.equal(d, product(a[: len(d)], b)) for d in products_by_torch)
        dispatcher.forget()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
        assert len(loads) == len(set(loads)) > 0
        assert dispatcher.stats()["kernel"] == {}
    assert FirstRuns(racing.A100.name, tmp_path / "autotune-first-runs.jsonl").banned() == set()
    device.session.calls["library_load_file"] = library_load
    with dispatch.replaced(dispatch.Dispatcher([opened], timed, "kernel", "off")) as dispatcher:
        assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
        assert dispatcher.stats()["torch"] == {}


def test_a_table_of_another_version_is_torchs(
    device: EmulatedDevice, opened: pack.Pack, operator_device: OperatorDevice
) -> None:
    a, b = drawn(device, 64, 128), drawn(device, 64, 128).t()
    strange = pack.Pack(opened.directory, opened.facts)
    fields = {"acc": "f32", "layout": "tn", "m": 1, "n": 1, "k": 1, "tiles": "of another kind"}
    strange.table.kernels[:] = [Kernel("0", fields, "table.json: kernel 0")]
    with emulated(operator_device, [strange], prefer="kernel") as dispatcher:
        with pytest.warns(UserWarning, match=r"table\.json: kernel 0: family: .*; make the pack anew"):
            assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
        assert dispatcher.stats()["torch"] == {"pack not understood": 1}


def test_a_second_pack_is_named_by_explain(
    device: EmulatedDevice, operator_device: OperatorDevice, directory: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    second = shutil.copytree(directory, tmp_path / "second")
    monkeypatch.setenv("CUDAL2GEN_PACK", f"{directory}{os.pathsep}{second}")
    a, b = drawn(device, 64, 128), drawn(device, 64, 128).t()
    with dispatch.replaced(dispatch.Dispatcher(device=operator_device)), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert f"; {second} is not used: for a100 the first pack counts, {directory}; " in cudal2gen.explain(a, b)
        cudal2gen.load_pack(second)
        assert "is not used" not in cudal2gen.explain(a, b)


def test_what_the_launcher_refuses_after_all_is_torchs(
    device: EmulatedDevice, kernels: dispatch.Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = drawn(device, 64, 128), drawn(device, 64, 128).t()

    def answering(code: int) -> Any:
        return lambda *sizes: lambda *operands: code

    monkeypatch.setattr(OpenKernel, "sized", answering(1))
    for _ in range(3):
        assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    assert kernels.stats() == {"kernel": {}, "torch": {"the launcher refuses": 3}}
    monkeypatch.setattr(OpenKernel, "sized", answering(700))
    with pytest.raises(LaunchError, match="cudaError 700"):
        cudal2gen.matmul(a, drawn(device, 32, 128).t())


def test_a_refused_plan_still_checks_for_shared_memory(
    device: EmulatedDevice, kernels: dispatch.Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenKernel, "sized", lambda *sizes: lambda *operands: 1)
    a, b, out = drawn(device, 64, 64), drawn(device, 64, 64).t(), device.empty(64, 64)
    assert torch.equal(cudal2gen.matmul(a, b, out=out), product(a, b))
    whole = device.empty(96, 64)
    whole.fill_(1)
    for overlapping in (whole[32:], whole[:64]):
        with pytest.raises(ValueError, match="out: shares memory with a or b"):
            cudal2gen.matmul(whole[:64], b, out=overlapping)
    assert kernels.stats()["torch"] == {"the launcher refuses": 1}
    cudal2gen.matmul(a, b, out=whole[:64])
    with pytest.raises(ValueError, match="out: shares memory with a or b"):
        cudal2gen.matmul(whole[:64], b, out=whole[:64])


def test_the_first_use_in_a_graph_capture_is_torchs(
    device: EmulatedDevice, operator_device: OperatorDevice, kernels: dispatch.Dispatcher
) -> None:
    """Loading a kernel is no work for a stream that is being captured."""
    a, b = drawn(device, 64, 128), drawn(device, 64, 128).t()
    operator_device.captures = True
    cudal2gen.matmul(a, b)
    assert kernels.stats() == {"kernel": {}, "torch": {"first used in a graph capture": 1}}
    operator_device.captures = False
    cudal2gen.matmul(a, b)
    operator_device.captures = True
    cudal2gen.matmul(drawn(device, 63, 128), b)
    assert sum(kernels.stats()["kernel"].values()) == 2, "an opened kernel may be captured with new sizes"


# --- what is refused ---

HALF = torch.zeros(8, 8).half()
PAIR = torch.zeros(16, 8).half()
REFUSED: list[tuple[tuple[Any, Any], dict[str, Any], type[Exception], str]] = [
    ((HALF.float(), HALF), {}, TypeError, "a: expected torch.float16 or torch.bfloat16, got torch.float32"),
    ((HALF, HALF.bfloat16()), {}, TypeError, "b: expected torch.float16, got torch.bfloat16"),
    ((HALF, HALF.to_sparse()), {}, (TypeError, NotImplementedError), "b: expected a strided tensor|sparse|Sparse"),  # type: ignore[list-item]
    ((HALF.sum(), HALF), {}, ValueError, r"a and b must have dimensions, got shapes \(\) and \(8, 8\)"),
    ((HALF[0, :4], HALF), {}, ValueError, r"a \(4,\) and b \(8, 8\) do not fit: K is 4 and 8"),
    (
        (HALF.expand(3, 8, 8), HALF.expand(5, 2, 8, 8)),
        {},
        ValueError,
        r"a \(3, 8, 8\) and b \(5, 2, 8, 8\) do not fit: batch dimensions \(3,\) and \(5, 2\)",
    ),
    ((HALF.float(), HALF.float()), {"out_dtype": torch.half}, TypeError, "a: expected torch.float16 or .* got torch.f"),
    ((HALF.float(), HALF.float()), {"acc": "f16"}, TypeError, "with acc or out_dtype, got torch.float32"),
    ((HALF, HALF[:4]), {}, ValueError, r"a \(8, 8\) and b \(4, 8\) do not fit: K is 8 and 4"),
    ((HALF, HALF), {"acc": "bf16"}, ValueError, "acc='bf16': must be f32 or f16"),
    ((HALF, HALF), {"out": HALF.float()}, TypeError, "out: expected torch.float16"),
    ((HALF, HALF), {"out": HALF[:4].clone()}, ValueError, r"out: expected the shape \(8, 8\), got \(4, 8\)"),
    ((HALF, HALF.clone()), {"out": HALF}, ValueError, "out: shares memory with a or b"),
    ((HALF.clone(), PAIR[1:9]), {"out": PAIR[:8]}, ValueError, "out: shares memory with a or b"),
    ((PAIR[:8], HALF.clone()), {"out": PAIR[7:15]}, ValueError, "out: shares memory with a or b"),
    ((HALF, HALF.to("meta")), {}, ValueError, "a and b are on different devices: cpu, meta"),
    ((HALF.clone().requires_grad_(), HALF), {"out": HALF.clone()}, ValueError, "out: is not differentiable"),
]


@pytest.mark.parametrize(
    ("operands", "options", "error", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_is_no_product_is_refused(
    operands: Any, options: Any, error: Any, message: str, kernels: dispatch.Dispatcher
) -> None:
    for _ in range(2):
        with pytest.raises(error, match=message):
            cudal2gen.matmul(*operands, **options)
    assert kernels.stats() == {"kernel": {}, "torch": {}}


def test_what_is_no_linear_layer_is_refused() -> None:
    for arguments, error, message in (
        ((HALF, HALF.float()), TypeError, "weight: expected torch.float16"),
        ((HALF, HALF[0]), ValueError, "weight must be a matrix"),
        ((HALF.sum(), HALF), ValueError, r"x have a dimension, got \(8, 8\) and \(\)"),
        ((HALF[:, :4], HALF), ValueError, r"x \(8, 4\) and weight \(8, 8\) do not fit: K is 4 and 8"),
        ((HALF, HALF, HALF), ValueError, r"bias: expected the shape \(8,\), got \(8, 8\)"),
        ((HALF, HALF, HALF[0].float()), TypeError, "bias: expected torch.float16"),
    ):
        with pytest.raises(error, match=message):
            cudal2gen.linear(*arguments)


NO_TENSORS: dict[str, tuple[Callable[[], Any], str]] = {
    "matmul of text": (lambda: cudal2gen.matmul("x", HALF), "a: expected a tensor, got str; torch.as_tensor makes one"),
    "matmul of a number": (lambda: cudal2gen.matmul(HALF, 2), "b: expected a tensor, got int; torch.as_tensor"),
    "matmul of an array": (lambda: cudal2gen.matmul(HALF, HALF.numpy()), "b: expected a tensor, got ndarray"),
    "out": (lambda: cudal2gen.matmul(HALF, HALF, out=3), "out: expected a tensor, got int"),
    "bmm": (lambda: cudal2gen.bmm(HALF[None], [1]), "b: expected a tensor, got list"),
    "linear": (lambda: cudal2gen.linear(None, HALF), "x: expected a tensor, got NoneType"),
    "bias": (lambda: cudal2gen.linear(HALF, HALF, 1.5), "bias: expected a tensor, got float"),
    "activation": (lambda: cudal2gen.linear(HALF, 2, activation="relu"), "weight: expected a tensor, got int"),
    "swiglu": (lambda: cudal2gen.swiglu(HALF, None), "w13: expected a tensor, got NoneType"),
    "grouped": (lambda: cudal2gen.grouped_mm(HALF, 3, offs=HALF), "mat_b: expected a tensor, got int"),
    "offs": (lambda: cudal2gen.grouped_mm(HALF, HALF[None], offs=[8]), "offs: expected a tensor, got list"),
    "interleave": (lambda: cudal2gen.interleave(HALF, "w"), "w3: expected a tensor, got str"),
    "deinterleave": (lambda: cudal2gen.deinterleave(8), "w13: expected a tensor, got int"),
    "explain alone": (
        lambda: cudal2gen.explain(HALF),
        "explain: missing a required argument: 'b'; give all arguments of cudal2gen.matmul but out",
    ),
    "explain text": (lambda: cudal2gen.explain("x", HALF), "a: expected a tensor, got str"),
    "explain swiglu": (lambda: cudal2gen.explain(cudal2gen.swiglu, HALF, 2), "w13: expected a tensor, got int"),
    "explain grouped": (
        lambda: cudal2gen.explain(cudal2gen.grouped_mm, mat_a=HALF, mat_b=3),
        "mat_b: expected a tensor, got int",
    ),
    "patch": (lambda: cudal2gen.patch(3), "model: expected a torch.nn.Module, got int; give the model itself"),
    "unpatch": (lambda: cudal2gen.unpatch("model"), "model: expected a torch.nn.Module, got str"),
}


@pytest.mark.parametrize(("call", "message"), NO_TENSORS.values(), ids=NO_TENSORS.keys())
def test_what_is_no_tensor_is_named(call: Callable[[], Any], message: str) -> None:
    for _ in range(2):
        with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
            call()


def test_shapes_of_huge_products_without_data() -> None:
    a, b = (torch.empty(1 << 20, 1 << 20, dtype=torch.float16, device="meta") for _ in range(2))
    assert cudal2gen.matmul(a, b).shape == (1 << 20, 1 << 20)
    assert cudal2gen.linear(a[None], b).shape == (1, 1 << 20, 1 << 20)
    with pytest.raises(ValueError, match="do not fit"):
        cudal2gen.matmul(a, b[:8])


# --- a real device, as far as one can be had without it ---


def test_a_cuda_device_is_asked_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    class There:
        def __init__(self, index: int) -> None:
            events.append(index)

        def __enter__(self) -> None:
            events.append("in")

        def __exit__(self, *_: object) -> None:
            events.append("out")

    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", There)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1000 + index, raising=False)
    card = devices.Cuda(1)
    assert (card.card.text, card.card.model, card.alone, card.stream(), card.capturing()) == (
        "NVIDIA H200 (sm_90, 132 SMs)",
        "h200",
        False,
        1001,
        True,
    )
    with card.current():
        events.append("work")
    assert events == [1, "in", "work", "out"]
    assert card.empty(torch.ones(2).half(), 3, 4).shape == (3, 4)
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=2000 + index))
    assert devices.Cuda(1).stream() == 2001, "where torch lacks the short way"


@pytest.mark.parametrize("count", [1, 2])
def test_a_capture_is_seen_on_either_device(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tensors, and the current one, which may be another."""
    current, captured = [0], {0}

    @contextmanager
    def entered(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] in captured)
    cards = [devices.Cuda(index) for index in range(count)]
    assert [card.capturing() for card in cards] == [True] * count
    captured.clear()
    assert [card.capturing() for card in cards] == [False] * count
    captured.add(1)
    assert [card.capturing() for card in cards] == [False, True][:count]
    assert current == [0]


def test_one_of_several_devices_is_made_current(
    device: EmulatedDevice, operator_device: OperatorDevice, opened: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int] = []

    @contextmanager
    def current() -> Iterator[None]:
        entered.append(launched(device))
        yield

    operator_device.alone, operator_device.current = False, current  # type: ignore[method-assign]
    a, b = drawn(device, 40, 64), drawn(device, 24, 64).t()
    with emulated(operator_device, [opened], prefer="kernel"):
        for _ in range(2):
            assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    assert entered == [0, 0, 1], "when the kernel is opened, and at each launch"


# --- on the CPU, and as torch's operators ---


def test_cpu_tensors_are_torchs_with_fp32_sums() -> None:
    a, b = torch.randn(40, 1000).half(), torch.randn(1000, 24).half()
    before = cudal2gen.stats()["torch"].get("on the CPU", 0)
    assert torch.equal(cudal2gen.matmul(a, b), (a.float() @ b.float()).half())
    assert torch.equal(cudal2gen.matmul(a, b, acc="f16"), (a.float() @ b.float()).half())
    out = torch.empty(40, 24).half()
    assert torch.equal(cudal2gen.matmul(a, b, out=out), cudal2gen.matmul(a, b))
    assert cudal2gen.stats()["torch"]["on the CPU"] == before + 4


@pytest.mark.slow
def test_torch_checks_the_operators() -> None:
    a, b, bias = torch.randn(6, 5).half(), torch.randn(5, 7).half(), torch.randn(7).half()
    ops = torch.ops.cudal2gen
    for differentiable in (False, True):
        x, y, z = (tensor.clone().requires_grad_(differentiable) for tensor in (a, b, bias))
        torch.library.opcheck(ops.matmul.default, (x, y))
        torch.library.opcheck(ops.matmul.default, (x, y.detach(), "f16"))
        torch.library.opcheck(ops.linear.default, (x.view(2, 3, 5), y.t(), z))
        torch.library.opcheck(ops.linear.default, (x, y.t().contiguous()))
    torch.library.opcheck(ops.matmul.out, (a, b), {"out": torch.empty(6, 7).half()})


def test_gradients_are_those_of_torch() -> None:
    a, b, bias = torch.randn(6, 5).half(), torch.randn(7, 5).half(), torch.randn(7).half()

    def gradients(function: Any) -> list[Any]:
        inputs = [tensor.clone().requires_grad_() for tensor in (a, b, bias)]
        function(*inputs).square().sum().backward()
        return [tensor.grad for tensor in inputs]

    for own, reference in (
        (lambda x, w, c: cudal2gen.matmul(x, w.t()) + c, lambda x, w, c: x @ w.t() + c),
        (cudal2gen.linear, torch.nn.functional.linear),
        (lambda x, w, c: cudal2gen.linear(x.view(2, 3, 5), w, c), torch.nn.functional.linear),
    ):
        for gradient, expected in zip(gradients(own), gradients(reference), strict=True):
            torch.testing.assert_close(gradient, expected, atol=0.05, rtol=0.01)
    frozen = torch.nn.Parameter(b, requires_grad=False)
    x = a.clone().requires_grad_()
    cudal2gen.linear(x, frozen).sum().backward()
    assert x.grad is not None
    assert frozen.grad is None


def test_gradients_through_kernels(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    x, weight = drawn(device, 40, 64), drawn(device, 24, 64)
    x.requires_grad_()
    cudal2gen.linear(x, weight).backward(drawn(device, 40, 24))
    assert torch.equal(x.grad, product(drawn(device, 40, 24), weight))
    assert ran(kernels) == (2, [])


def compiled(function: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def test_compiled_without_a_graph_break(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = drawn(device, 40, 64), drawn(device, 24, 64).t()

    def model(x: Any, y: Any) -> Any:
        d = cudal2gen.matmul(x, y)
        return d, cudal2gen.linear(cudal2gen.matmul(d, y.t()), y.t()), d + 1

    expected = model(a, b)
    before = ran(kernels)[0]
    for dynamic in (False, True):
        results = compiled(model, dynamic=dynamic)(a, b)
        assert all(torch.equal(result, other) for result, other in zip(results, expected, strict=True))
    assert ran(kernels) == (before + 6, [])


def test_compiled_with_out_and_gradients() -> None:
    a, b, weight = torch.randn(6, 5).half(), torch.randn(5, 7).half(), torch.randn(3, 7).half()

    def writes(x: Any, y: Any, out: Any) -> Any:
        cudal2gen.matmul(x, y, out=out)
        return out + 1

    out = torch.empty(6, 7).half()
    assert torch.equal(compiled(writes)(a, b, out), cudal2gen.matmul(a, b) + 1)
    assert torch.equal(out, cudal2gen.matmul(a, b))

    def loss(x: Any, w: Any) -> Any:
        return cudal2gen.linear(cudal2gen.matmul(x, b), w).sum()

    for function in (loss, compiled(loss)):
        x, w = a.clone().requires_grad_(), weight.clone().requires_grad_()
        function(x, w).backward()
        torch.testing.assert_close(w.grad, cudal2gen.matmul(a, b).sum(0).expand(3, 7), atol=0.02, rtol=0.01)


@pytest.mark.slow
def test_first_seen_by_the_compiler() -> None:
    program = """
import torch, cudal2gen
f = torch.compile(lambda a, b: cudal2gen.matmul(a, b) * 2, fullgraph=True, backend="aot_eager")
a = torch.ones(8, 8).half()
assert float(f(a, a)[0, 0]) == 16
"""
    done = run(program)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys, cudal2gen; assert 'matmul' in dir(cudal2gen); assert 'torch' not in sys.modules"
    done = run(program)
    assert done.returncode == 0, done.stderr
    missing = run("import cudal2gen; cudal2gen.nothing")
    assert "module 'cudal2gen' has no attribute 'nothing'" in missing.stderr


def test_who_watches_sees_the_operators() -> None:
    """Modes, transforms and tracers are not passed by."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    a = torch.ones(8, 8).half()
    with Watch():
        cudal2gen.matmul(a, a)
        cudal2gen.linear(a, a)
    assert [name for name in calls if "cudal2gen" in name] == ["cudal2gen.matmul.default", "cudal2gen.linear.default"]
    assert "cudal2gen.matmul" in str(make_fx(lambda x: cudal2gen.matmul(x, x))(a).graph)


def test_many_threads_make_one_plan(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    """Kernels are opened once; the emulator itself runs one launch at a time, so only plans are made together."""
    a, b = drawn(device, 64, 128), drawn(device, 64, 128).t()
    explanations: list[str] = []
    threads = [threading.Thread(target=lambda: explanations.append(cudal2gen.explain(a, b))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(explanations)) == 1
    assert len(kernels._packs._opened) == 1
    assert len(kernels.plans) == 1


def test_ever_new_shapes_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_PLANS", 4)
    dispatcher = dispatch.Dispatcher([])
    monkeypatch.setattr(dispatch.Current, "dispatcher", dispatcher)
    for k in range(1, 12):
        cudal2gen.matmul(torch.ones(2, k).half(), torch.ones(k, 2).half())
    assert len(dispatcher.plans) <= 4
    assert dispatcher.stats()["torch"] == {"on the CPU": 11}, "what was forgotten is counted"
