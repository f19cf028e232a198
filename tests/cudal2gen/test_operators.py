"""Proves ``cudal2gen.matmul`` and ``linear`` in the emulator: numbers, layouts, plans, and what is left to torch."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cudal2gen
from cudal2gen import pack
from cudal2gen.kernel.launch import Sizes
from cudal2gen.launch.launcher import LaunchError, OpenKernel
from cudal2gen.results.choice import Prefer, TableKernel
from kernelproof.ground.chips import CardFacts
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice
from tests.cudal2gen.emulated_operators import GPU
from tests.cudal2gen.paths import PATHS
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import dispatch, emulated, plan_requests  # noqa: E402
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
def opened_pack(directory: Path) -> pack.Pack:
    """The pack of ``directory``."""
    return pack.open_pack(directory)


@pytest.fixture
def measured_dispatcher(operator_device: OperatorDevice, opened_pack: pack.Pack) -> Iterator[dispatch.Dispatcher]:
    """A dispatcher that takes measured kernels only."""
    with emulated(operator_device, [opened_pack]) as dispatcher:
        yield dispatcher


def draw_integers(device: EmulatedDevice, rows: int, cols: int, wide: int = 0, start: int = 0) -> Any:
    """Small integers in the device's memory, so that products are exact; rows are ``wide`` apart."""
    wide = wide or cols
    whole = device.empty(rows * wide + start)
    whole.fill_(float("nan"))
    matrix = whole[start:].view(rows, wide)[:, :cols]
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    return matrix.copy_(torch.randint(-2, 3, (rows, cols), generator=generator))


def product(a: Any, b: Any) -> Any:
    """The exact product, rounded to fp16."""
    return (a.double() @ b.double()).half()


def ran(dispatcher: dispatch.Dispatcher) -> tuple[int, list[str]]:
    """The number of calls of kernels, and the reasons of all other calls."""
    counted = dispatcher.stats()
    return sum(counted["kernel"].values()), sorted(counted["torch"])


# --- numbers ---


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(64, 64, 128), (1, 64, 64), (33, 1, 72), (31, 47, 8), (7, 5, 3), (40, 24, 100), (1, 1, 1), (96, 96, 64)],
)
def test_b_as_n_k_in_any_size(m: int, n: int, k: int, device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = draw_integers(device, m, k), draw_integers(device, n, k).t()
    d = cudal2gen.matmul(a, b)
    assert d.shape == (m, n)
    assert d.is_contiguous()
    assert torch.equal(d, product(a, b))
    assert ran(kernels) == (1, [])


@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 128), (31, 48, 72), (5, 7, 9), (3, 1, 64)])
def test_b_as_k_n_in_any_size(m: int, n: int, k: int, device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = draw_integers(device, m, k), draw_integers(device, k, n)
    assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    assert ran(kernels) == (1, [])


def launch_count(device: EmulatedDevice) -> int:
    """The number of launches so far."""
    return len(device.session.launches)


def test_leading_dimensions_are_served_without_a_copy(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = draw_integers(device, 40, 64, wide=80), draw_integers(device, 24, 64, wide=72).t()
    allocated: list[Any] = []
    device.empty, real = (lambda *shape: allocated.append(shape) or real(*shape)), device.empty  # type: ignore[func-returns-value,method-assign]
    assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    assert allocated == [(40, 24)], "D alone"


@pytest.mark.parametrize(("wide", "start"), [(65, 0), (64, 1), (68, 4)])
def test_rows_off_16_bytes_are_copied(
    wide: int, start: int, device: EmulatedDevice, kernels: dispatch.Dispatcher
) -> None:
    a, b = draw_integers(device, 40, 64, wide, start), draw_integers(device, 24, 64, wide, start).t()
    assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    assert ran(kernels) == (1, [])


def test_a_workspace_and_options_of_the_record(
    device: EmulatedDevice, opened_pack: pack.Pack, operator_device: OperatorDevice
) -> None:
    for name, layout in (("split", "tn"), ("zsplit", "nn"), ("whole", "tn")):
        record = packed.RECORDS[name]
        own = pack.Pack(opened_pack.directory, opened_pack.facts)
        own.table.kernels[:] = [kernel for kernel in opened_pack.table.kernels if kernel.record.name == record.name]
        a, b = draw_integers(device, 50, record.k), draw_integers(device, record.k, 90)
        b = draw_integers(device, 90, record.k).t() if layout == "tn" else b
        with emulated(operator_device, [own], prefer="kernel") as dispatcher:
            for _ in range(2):
                assert torch.equal(cudal2gen.matmul(a, b, acc=record.acc), product(a, b)), name
            assert dispatcher.stats()["kernel"] == {record.name: 2}


def test_fp16_sums_only_where_they_are_asked_for(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = device.empty(32, 128), device.empty(32, 128).t()
    a.zero_()
    a[:, ::16] = 1
    a[:, 0] = 4096
    b.fill_(1)  # 4096 and then a one in each MMA, which a sum in fp16 loses
    assert float(cudal2gen.matmul(a, b)[0, 0]) == 4104, "4103 in fp16"
    assert float(cudal2gen.matmul(a, b, acc="f16")[0, 0]) == 4096
    names = kernels.stats()["kernel"]
    assert sorted(name.split("_")[3] for name in names) == ["f16", "f32"]


def test_out_is_written_in_place(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = draw_integers(device, 40, 64), draw_integers(device, 24, 64).t()
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


def test_out_next_to_an_operand_is_no_overlap(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    whole = device.empty(24, 8)
    whole[:16].fill_(1)
    assert bool((cudal2gen.matmul(whole[:8], whole[8:16], out=whole[16:]) == 8).all())
    assert bool((whole[:16] == 1).all())
    between = device.empty(3, 8, 8)
    between.fill_(1)
    cudal2gen.matmul(between[0], between[2], out=between[1])
    assert bool((between[1] == 8).all())


def test_new_values_at_the_same_place(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    """Nothing of a call affects the next one with the same plan."""
    a, b = draw_integers(device, 33, 60), draw_integers(device, 20, 60).t()
    first = cudal2gen.matmul(a, b)
    expected = first.clone()
    a.mul_(-1)
    assert torch.equal(cudal2gen.matmul(a, b), -expected)
    assert torch.equal(first, expected), "a result is nobody else's memory"
    assert len(kernels.plans) == 1


def test_linear_flattens_batches_and_adds_the_bias(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    x, weight, bias = (
        draw_integers(device, 30, 64).view(2, 3, 5, 64),
        draw_integers(device, 24, 64),
        draw_integers(device, 1, 24).view(24),
    )
    for term in (None, bias):
        d = cudal2gen.linear(x, weight, term)
        assert d.shape == (2, 3, 5, 24)
        expected = product(x.view(30, 64), weight.t()) + (0 if term is None else term)
        assert torch.equal(d.view(30, 24), expected.half())
    single = cudal2gen.linear(x[0, 0, 0], weight)
    assert torch.equal(single, product(x[0, 0, :1], weight.t())[0])
    assert ran(kernels) == (3, [])


# Names in ``PATHS`` of kernels with tensor maps.
HOPPER = [
    "wgmma n64", "wgmma workspace", "wgmma cluster split 4 f16 nn", "wgmma nt stream", "wgmma tt swapped", "once any n",
    "once split 2", "once nt",
]  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", HOPPER)
def test_kernels_with_tensor_maps_in_ragged_sizes(name: str, tmp_path: Path) -> None:
    """Their rules say which sizes they compute without copies. For others, operands are copied to padded ones."""
    record = PATHS[name]
    own_pack = pack.open_pack(packed.folder(packed.table([record]), tmp_path / "pack"))
    with (
        EmulatedDevice(record) as device,
        emulated(OperatorDevice(device, record.gpu), [own_pack], "kernel") as dispatcher,
    ):
        sizes = [(record.m, record.n, record.k), (record.m, record.n - 1, record.k), (record.m, record.n, record.k - 3)]
        for m, n, k in [*sizes, (record.m, record.n, record.k), (record.m // 3, 24, record.k)]:
            a = draw_integers(device, m, k) if record.along_k.a else draw_integers(device, k, m).t()
            b = draw_integers(device, n, k).t() if record.along_k.b else draw_integers(device, k, n)
            d = cudal2gen.matmul(a, b, acc=record.acc)
            torch.testing.assert_close(d, product(a, b), atol=0, rtol=2**-9 if record.acc == "f16" else 0)
        assert device.session.errors == []
        counted = dispatcher.stats()
        assert counted == {"kernel": {record.name: 5}, "torch": {}}


# --- what is torch's ---


def test_strides_that_no_layout_serves(device: EmulatedDevice, kernels: dispatch.Dispatcher) -> None:
    a, b = draw_integers(device, 40, 128)[:, ::2], draw_integers(device, 24, 64).t()
    assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    every_other = draw_integers(device, 48, 128)[:, ::2]
    assert torch.equal(
        cudal2gen.matmul(draw_integers(device, 40, 64), every_other.t()),
        product(draw_integers(device, 40, 64), every_other.t()),
    )
    one_row = draw_integers(device, 1, 64).expand(40, 64)
    assert torch.equal(cudal2gen.matmul(one_row, b), product(one_row, b))
    reasons = ["strides of A that no layout serves", "strides of B that no layout serves"]
    assert ran(kernels) == (0, reasons)
    x = draw_integers(device, 30, 64).view(5, 6, 64).transpose(0, 1)
    assert torch.equal(
        cudal2gen.linear(x, draw_integers(device, 24, 64)).reshape(30, 24),
        product(x.reshape(30, 64), draw_integers(device, 24, 64).t()),
    )
    assert kernels.stats()["torch"]["strides of A that no layout serves"] == 3


@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0)])
def test_empty_products(m: int, n: int, k: int, kernels: dispatch.Dispatcher) -> None:
    a, b = torch.ones(m, k).half(), torch.ones(n, k).half()
    for d in (cudal2gen.matmul(a, b.t()), cudal2gen.linear(a, b), cudal2gen.matmul(a, torch.ones(k, n).half())):
        assert d.shape == (m, n)
        assert bool((d == 0).all())
    assert ran(kernels) == (0, ["an extent is 0"])


def test_too_large_for_a_kernel_is_computed_by_torch(kernels: dispatch.Dispatcher) -> None:
    thin = torch.zeros(1, 1).half()
    huge = thin.expand((1 << 24) + 8, 1)[:, :0]
    assert cudal2gen.matmul(huge, thin[:0]).shape == ((1 << 24) + 8, 1)
    problem, why_not = plan_requests.problem_of(("f16", "same", "f32", "tn"), Sizes((1 << 24) + 8, 64, 64))
    assert (problem, why_not) == (None, "an extent is too large")
    apart = torch.zeros((1 << 24) + 80, dtype=torch.float16).as_strided((2, 64), ((1 << 24) + 16, 1))
    assert cudal2gen.matmul(apart, torch.zeros(8, 64).half().t()).shape == (2, 8)
    assert "an extent or leading dimension exceeds 16777216" in kernels.stats()["torch"]


def test_without_measurements_torch_computes(device: EmulatedDevice, measured_dispatcher: dispatch.Dispatcher) -> None:
    a, b = draw_integers(device, 64, 128), draw_integers(device, 64, 128).t()
    assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    assert ran(measured_dispatcher) == (1, []), "measured faster"
    far = draw_integers(device, 8, 8), draw_integers(device, 8, 8)
    assert torch.equal(cudal2gen.matmul(*far), product(*far))
    assert ran(measured_dispatcher) == (1, ["nothing was measured within a factor of two"])
    assert cudal2gen.explain(a, b).endswith("64_64_128 was measured: 2.010x [2.000, 2.020] (cold L2, torch.matmul)")
    assert cudal2gen.explain(*far) == "torch: 8_8_8: nothing was measured within a factor of two"


def test_one_may_ask_for_kernels_or_for_torch(device: EmulatedDevice, measured_dispatcher: dispatch.Dispatcher) -> None:
    a, b = draw_integers(device, 8, 8), draw_integers(device, 8, 8)
    with cudal2gen.prefer("kernel"):
        cudal2gen.matmul(a, b)
    assert ran(measured_dispatcher) == (1, [])
    with cudal2gen.prefer("vendor"):
        cudal2gen.matmul(draw_integers(device, 64, 128), draw_integers(device, 64, 128).t())
    assert ran(measured_dispatcher) == (1, ["asked for"])
    with (
        pytest.raises(ValueError, match=r"^prefer='fast':"),
        cudal2gen.prefer("fast"),
    ):  # type: ignore[arg-type]
        pass


@pytest.mark.slow
def test_a_plan_made_before_gives_way_to_a_preference(
    device: EmulatedDevice, measured_dispatcher: dispatch.Dispatcher
) -> None:
    a, b = draw_integers(device, 64, 128), draw_integers(device, 64, 128).t()
    kernel = cudal2gen.explain(a, b)
    assert not kernel.startswith("torch: ")
    with cudal2gen.prefer("vendor"):
        assert cudal2gen.explain(a, b).startswith("torch: ")
    assert cudal2gen.explain(a, b) == kernel


@pytest.mark.slow
def test_the_environment_may_ask(directory: Path) -> None:
    program = "import cudal2gen, torch; cudal2gen.matmul(torch.ones(8, 8).half(), torch.ones(8, 8).half())"
    done = run_python(program, CUDAL2GEN_PREFER="sometimes")
    assert "CUDAL2GEN_PREFER=sometimes: must be one of measured, inferred, kernel, vendor" in done.stderr
    assert run_python(program, CUDAL2GEN_PREFER="kernel").returncode == 0


def run_python(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python program with further variables."""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=os.environ | env
    )


def test_a_pack_for_another_gpu_is_said_once(device: EmulatedDevice, opened_pack: pack.Pack) -> None:
    a, b = draw_integers(device, 64, 128), draw_integers(device, 64, 128).t()
    alien = CardFacts.of("NVIDIA Alien", (7, 5), 40)
    with emulated(OperatorDevice(device, alien), [opened_pack], prefer="kernel") as dispatcher:
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


def test_kernels_that_do_not_load_are_computed_by_torch(
    device: EmulatedDevice, opened_pack: pack.Pack, operator_device: OperatorDevice
) -> None:
    a, b = draw_integers(device, 64, 128), draw_integers(device, 64, 128).t()
    bare, asked = OperatorDevice(device, GPU), []
    bare.runtime = lambda cuda: asked.append(cuda) or Path("/nowhere/libcudart.so")  # type: ignore[func-returns-value,method-assign]
    with emulated(bare, [opened_pack], prefer="kernel") as dispatcher:
        with pytest.warns(UserWarning, match="cannot be loaded: .*/nowhere/libcudart.so"):
            assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
        assert dispatcher.stats()["torch"] == {"cannot be loaded": 1}
    assert asked == [13], "by the CUDA of the pack"


@pytest.mark.parametrize(("code", "mode"), [(35, "off"), (200, "off"), (209, "once"), (222, "once")])
def test_an_image_that_the_driver_refuses_is_tried_once(
    code: int, mode: races.Mode, device: EmulatedDevice, opened_pack: pack.Pack, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """There is one warning for all kernels. The next process tries again, since it may have another driver."""
    monkeypatch.setenv("CUDAL2GEN_RESULTS", str(tmp_path))
    loads: list[str] = []

    def load(words: Any) -> int:
        loads.append(ctypes.string_at(words[1]).decode())
        return code

    library_load = device.session.calls["library_load_file"]
    device.session.calls["library_load_file"] = load
    timed = racing.ClockedDevice(device, racing.Clock(device, {}, 300.0))
    a, b = draw_integers(device, 64, 128), draw_integers(device, 64, 128).t()
    prefer: Prefer = "kernel" if mode == "off" else "measured"
    with dispatch.replaced(dispatch.Dispatcher([opened_pack], timed, prefer, mode)) as dispatcher:
        message = rf"driver of .*A100.* refuses kernels of {opened_pack.directory} \(cudaError {code}\).*--gpu a100"
        with pytest.warns(UserWarning, match=message) as warned:
            products_by_torch = [cudal2gen.matmul(a[:rows], b) for rows in (64, 64, 48, 48, 33)]
        assert ["KERNELPROOF_PTXAS" in text for text in racing.library_warnings(warned)] == [code == 35], (
            "one, with what helps"
        )
        assert all(torch.equal(d, product(a[: len(d)], b)) for d in products_by_torch)
        dispatcher.forget()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
        assert len(loads) == len(set(loads)) > 0
        assert dispatcher.stats()["kernel"] == {}
    assert FirstRuns(racing.A100.name, tmp_path / "autotune-first-runs.jsonl").banned() == set()
    device.session.calls["library_load_file"] = library_load
    with dispatch.replaced(dispatch.Dispatcher([opened_pack], timed, "kernel", "off")) as dispatcher:
        assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
        assert dispatcher.stats()["torch"] == {}


def test_a_table_of_another_version_is_computed_by_torch(
    device: EmulatedDevice, opened_pack: pack.Pack, operator_device: OperatorDevice
) -> None:
    a, b = draw_integers(device, 64, 128), draw_integers(device, 64, 128).t()
    strange = pack.Pack(opened_pack.directory, opened_pack.facts)
    fields = {"acc": "f32", "layout": "tn", "m": 1, "n": 1, "k": 1, "tiles": "of another kind"}
    strange.table.kernels[:] = [TableKernel("0", fields, "table.json: kernel 0")]
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
    a, b = draw_integers(device, 64, 128), draw_integers(device, 64, 128).t()
    with dispatch.replaced(dispatch.Dispatcher(device=operator_device)), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert f"; {second} is not used: for a100 the first pack counts, {directory}; " in cudal2gen.explain(a, b)
        cudal2gen.load_pack(second)
        assert "is not used" not in cudal2gen.explain(a, b)


def test_what_the_launcher_refuses_after_all_is_computed_by_torch(
    device: EmulatedDevice, kernels: dispatch.Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = draw_integers(device, 64, 128), draw_integers(device, 64, 128).t()

    def answer_with(code: int) -> Any:
        return lambda *sizes: lambda *operands: code

    monkeypatch.setattr(OpenKernel, "sized", answer_with(1))
    for _ in range(3):
        assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    assert kernels.stats() == {"kernel": {}, "torch": {"the launcher refuses": 3}}
    monkeypatch.setattr(OpenKernel, "sized", answer_with(700))
    with pytest.raises(LaunchError) as caught:
        cudal2gen.matmul(a, draw_integers(device, 32, 128).t())
    assert caught.value.code == 700


def test_a_refused_plan_still_checks_for_shared_memory(
    device: EmulatedDevice, kernels: dispatch.Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenKernel, "sized", lambda *sizes: lambda *operands: 1)
    a, b, out = draw_integers(device, 64, 64), draw_integers(device, 64, 64).t(), device.empty(64, 64)
    assert torch.equal(cudal2gen.matmul(a, b, out=out), product(a, b))
    whole = device.empty(96, 64)
    whole.fill_(1)
    for overlapping in (whole[32:], whole[:64]):
        with pytest.raises(ValueError, match=r"^out:"):
            cudal2gen.matmul(whole[:64], b, out=overlapping)
    assert kernels.stats()["torch"] == {"the launcher refuses": 1}
    cudal2gen.matmul(a, b, out=whole[:64])
    with pytest.raises(ValueError, match=r"^out:"):
        cudal2gen.matmul(whole[:64], b, out=whole[:64])


def test_the_first_use_in_a_graph_capture_is_computed_by_torch(
    device: EmulatedDevice, operator_device: OperatorDevice, kernels: dispatch.Dispatcher
) -> None:
    """A kernel cannot be loaded while a stream is captured."""
    a, b = draw_integers(device, 64, 128), draw_integers(device, 64, 128).t()
    operator_device.captures = True
    cudal2gen.matmul(a, b)
    assert kernels.stats() == {"kernel": {}, "torch": {"first used in a graph capture": 1}}
    operator_device.captures = False
    cudal2gen.matmul(a, b)
    operator_device.captures = True
    cudal2gen.matmul(draw_integers(device, 63, 128), b)
    assert sum(kernels.stats()["kernel"].values()) == 2, "an opened kernel may be captured with new sizes"
