"""Proves that Triton kernels run by their PTX: values agree with torch's, faults are found, and arguments arrive."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproof import triton_emulation
from kernelproof.emulator import EmulatorError
from kernelproof.ground.errors import MissingTool, WrongInput

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from examples import triton_kernels  # noqa: E402
from kernelproof.emulator.hopper.mbarrier import UNFENCED  # noqa: E402
from kernelproof.triton_emulation import copies  # noqa: E402
from kernelproof.triton_emulation.session import TritonLaunch  # noqa: E402

# The architectures that Triton compiles for here.
DEVICES = ("sm_80", "sm_90")
# The types of operands.
TYPES = (torch.float32, torch.float16, torch.bfloat16)
# The relative error of one rounding to each type, and that of products in tf32.
RELATIVE = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
TF32 = 2**-10


@pytest.fixture(autouse=True)
def seed() -> None:
    """Makes torch draw the same numbers in each test."""
    torch.manual_seed(0)


def is_near(actual: Any, expected: Any, relative: float) -> bool:
    """Whether two tensors agree, relative to the largest element."""
    return bool((actual.float() - expected).abs().max() <= relative * expected.abs().max())


# PTX as Triton's compiler writes it: %p1 guards the load of an element, %p2 the store of a value computed from it.
COPY = """
@%p1 ld.global.b32 {%r1}, [ %rd1 + 0 ];
add.s32 %r2, %r1, 1;
@%p2 st.global.b32 [ %rd1 + 0 ], { %r2 };
"""


def test_only_findings_in_code_of_the_compiler_are_left_out() -> None:
    """A launch leaves out two kinds of findings in code that Triton's compiler writes: a fence that it omits, and a
    load, whose value nothing uses, of an element that another thread stores."""

    def report(kind: str, message: str, other: int | None = None) -> Any:
        side = SimpleNamespace(site=SimpleNamespace(line=other))
        return SimpleNamespace(
            kind=kind, message=message, access=SimpleNamespace(site=SimpleNamespace(line=4)), other=other and side
        )

    def launch(ptx: str, *reports: Any) -> TritonLaunch:
        result: Any = SimpleNamespace(reports=list(reports))
        return TritonLaunch("k", ptx, 4, 1, 0, result)

    benign = copies.SAME_CTA_MESSAGE
    unfenced, race = report("mbarrier", f"x {UNFENCED}"), report("global-race", benign, 2)
    own = [report("mbarrier", "x"), report("global-race", f"x {UNFENCED}"), report("global-race", "x", 2),
           report("global-race", benign), report("global-race", benign, 3)]  # fmt: skip
    found = launch(COPY, *own, unfenced, race)
    assert (found.reports, found.compiler_reports) == (own, [unfenced, race])
    for before, after in (
        ("%p2", "%p1"), ("[ %rd1 + 0 ], {", "[ %rd1 + 4 ], {"), ("add.s32 %r2, %r1, 1;", "st.shared.b32 [%r9], %r1;"),
        ("1;", "1;\nsetp.eq.s32 %p3, %r2, 1;"),
    ):  # fmt: skip
        assert COPY.replace(before, after) != COPY
        assert launch(COPY.replace(before, after), race).reports == [race]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*TYPES, torch.int32, torch.int8, torch.float64])
def test_add(kind: Any) -> None:
    x, y = (torch.randint(-50, 50, (1000,)).to(kind) for _ in range(2))
    total = torch.empty_like(x)
    with triton_emulation.emulate() as session:
        session.mark_input(x, y)
        session.mark_output(total)
        triton_kernels.add[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, total, 1000, BLOCK=256)
    assert torch.equal(total, x + y)
    (launch,) = session.launches
    assert (launch.kernel, launch.result.grid, launch.result.block) == ("add", (4, 1, 1), (128, 1, 1))
    assert ".target sm_80" in launch.ptx


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_softmax(kind: Any) -> None:
    x = torch.randn(20, 300).to(kind)
    y = torch.empty_like(x)
    with triton_emulation.emulate("sm_90a") as session:
        session.mark_input(x)
        session.mark_output(y)
        triton_kernels.softmax[(8,)](x, y, 20, 300, x.stride(0), y.stride(0), BLOCK=512)
    assert is_near(y, torch.softmax(x.float(), 1), RELATIVE[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_layer_norm_forward_and_backward_with_locks(kind: Any) -> None:
    rows, columns, groups = 16, 300, 4
    x, dy = (torch.randn(rows, columns).to(kind) for _ in range(2))
    weight, bias = (torch.randn(columns).to(kind) for _ in range(2))
    y, dx = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = torch.empty(rows), torch.empty(rows)
    dweight, dbias = torch.empty(groups, columns), torch.empty(groups, columns)
    lock, filled = (torch.zeros(groups, dtype=torch.int32) for _ in range(2))
    with triton_emulation.emulate() as session:
        session.mark_input(x, dy, weight, bias)
        session.mark_output(y, dx, mean, rstd, dweight, dbias)
        triton_kernels.layer_norm[(rows,)](x, weight, bias, y, mean, rstd, columns, 1e-5, BLOCK=128)
        triton_kernels.layer_norm_backward[(rows,)](
            dy, x, weight, mean, rstd, dx, dweight, dbias, lock, filled, columns, GROUPS=groups, BLOCK=512
        )
    leaves = [tensor.float().requires_grad_() for tensor in (x, weight, bias)]
    expected = torch.nn.functional.layer_norm(leaves[0], (columns,), *leaves[1:])
    expected.backward(dy.float())
    assert is_near(y, expected, 2 * RELATIVE[kind])
    assert is_near(dx, leaves[0].grad, 2 * RELATIVE[kind])
    assert is_near(dweight.sum(0), leaves[1].grad, 2e-6)
    assert is_near(dbias.sum(0), leaves[2].grad, 2e-6)
    assert not lock.any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_matmul_of_odd_sizes_in_grouped_order(device: str, kind: Any) -> None:
    m, n, k = 190, 150, 72
    a, b, d = torch.randn(m, k).to(kind), torch.randn(k, n).to(kind), torch.empty(m, n).to(kind)
    with triton_emulation.emulate(device) as session:
        session.mark_input(a, b)
        session.mark_output(d)
        triton_kernels.matmul[(9,)](a, b, d, m, n, k, k, n, n, BM=64, BN=64, BK=32, GROUP=2)
    assert is_near(d, a.float() @ b.float(), RELATIVE[kind] + TF32 * (kind is torch.float32))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_persistent_matmul_by_descriptors_made_on_the_device(device: str, kind: Any) -> None:
    m, n, k = 190, 160, 128
    a, b, d = torch.randn(m, k).to(kind), torch.randn(k, n).to(kind), torch.empty(m, n).to(kind)
    with triton_emulation.emulate(device) as session:
        session.mark_output(d)
        triton_kernels.matmul_persistent[(4,)](a, b, d, m, n, k, BM=64, BN=64, BK=32, GROUP=2)
    assert is_near(d, a.float() @ b.float(), RELATIVE[kind])
    assert ("tensormap.replace" in session.launches[0].ptx) == (device == "sm_90")


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_matmul_by_descriptors_of_the_host(device: str, kind: Any) -> None:
    m, n, k = 190, 160, 128
    a, b, d = torch.randn(m, k).to(kind), torch.randn(k, n).to(kind), torch.empty(m, n).to(kind)
    maps = [TensorDescriptor.from_tensor(x, list(box)) for x, box in ((a, (64, 32)), (b, (32, 64)), (d, (64, 64)))]
    with triton_emulation.emulate(device) as session:
        session.mark_input(a, b)
        session.mark_output(d)
        triton_kernels.matmul_tma[(3, 3)](*maps, k, BM=64, BN=64, BK=32)
    assert is_near(d, a.float() @ b.float(), RELATIVE[kind])
    assert [report.kind for report in session.compiler_reports] == ["mbarrier"] * (device == "sm_90")


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_attention(device: str, kind: Any) -> None:
    q, k, v = (torch.randn(1, 2, 128, 64).to(kind) for _ in range(3))
    out = torch.empty_like(q)
    with triton_emulation.emulate(device) as session:
        session.mark_input(q, k, v)
        session.mark_output(out)
        triton_kernels.attention[(2, 2)](q, k, v, out, 128, 0.125, HEAD=64, BM=64, BN=32, CAUSAL=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    assert is_near(out, expected, 3 * RELATIVE[kind])


def test_a_missing_mask_is_out_of_bounds_at_its_line() -> None:
    x, y, total = torch.ones(1000), torch.ones(1000), torch.empty(1000)
    with pytest.raises(triton_emulation.Findings, match=r"sum_ptr\[1000\]") as caught, triton_emulation.emulate():
        triton_kernels.add_unmasked[(4,)](x, y, total, BLOCK=256)
    assert {report.kind for report in caught.value.reports} == {"global-out-of-bounds"}
    lines = Path(triton_kernels.__file__).read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.startswith("    tl.store(sum_ptr + index, tl.load"))
    assert {report.source.rpartition(":")[2].split()[0] for report in caught.value.reports} == {str(number)}


def test_unordered_programs_race() -> None:
    count = torch.zeros(1, dtype=torch.int32)
    with triton_emulation.emulate(check=False) as session:
        triton_kernels.count_unordered[(4,)](count)
    assert "global-race" in {report.kind for report in session.reports}


@pytest.mark.parametrize("block", [16, 64, 256])
def test_copies_of_an_element_that_are_not_used_do_not_race(block: int) -> None:
    x = torch.randn(300)
    expected = 2 * x
    with triton_emulation.emulate() as session:
        triton_kernels.double_in_place[(triton.cdiv(300, block),)](x, 300, BLOCK=block)
    assert torch.equal(x, expected)
    assert {report.kind for report in session.compiler_reports} == ({"global-race"} if block < 128 else set())


def test_copies_that_are_used_race() -> None:
    count, numbers = torch.zeros(1, dtype=torch.int32), torch.empty(128, dtype=torch.int32)
    with triton_emulation.emulate(check=False) as session:
        triton_kernels.take_numbers[(1,)](count, numbers, BLOCK=128)
    assert [report.kind for report in session.reports] == ["global-race"]
    assert not session.compiler_reports


@pytest.mark.parametrize(("config", "block", "warps"), [(None, 128, 1), (2, 512, 4)])
def test_an_autotuned_kernel_takes_one_configuration(config: int | None, block: int, warps: int) -> None:
    x = torch.randn(1000)
    y = torch.empty_like(x)
    with triton_emulation.emulate(config=config) as session:
        triton_kernels.scale[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, 2.5, 1000)
    assert torch.equal(y, 2.5 * x)
    (launch,) = session.launches
    assert (launch.result.grid[0], launch.num_warps) == (-(-1000 // block), warps)
    assert f"BLOCK: {block}" in session.notes[0]


def test_a_configuration_of_ones_own_and_a_heuristic() -> None:
    x = torch.randn(1024)
    y = torch.empty_like(x)
    with triton_emulation.emulate(config=triton.Config({"BLOCK": 64}, num_warps=8)) as session:
        triton_kernels.scale[(16,)](x, y, 0.5, 1024)
    assert torch.equal(y, 0.5 * x)
    assert session.launches[0].result.block == (256, 1, 1)
    with pytest.raises(WrongInput, match="3 configurations"), triton_emulation.emulate(config=3):
        triton_kernels.scale[(16,)](x, y, 0.5, 1024)


def test_views_of_one_storage_and_tuples() -> None:
    whole = torch.arange(512, dtype=torch.int32)
    with triton_emulation.emulate():
        triton_kernels.shift_both[(1,)]((whole[1:201], whole[256:]), 200, BLOCK=256)
    assert torch.equal(whole[256:456], torch.cat([torch.arange(2, 201, dtype=torch.int32), torch.zeros(1).int()]))
    assert torch.equal(whole[:256], torch.arange(256, dtype=torch.int32))


@pytest.mark.parametrize(
    ("device", "kind"), [("sm_90", "float8_e4m3fn"), ("sm_90", "float8_e5m2"), ("sm_80", "float8_e5m2")]
)
def test_fp8_products(device: str, kind: str) -> None:
    a, b = (torch.randint(-3, 4, (64, 64)).to(getattr(torch, kind)) for _ in range(2))
    d = torch.empty(64, 64, dtype=torch.float16)
    with triton_emulation.emulate(device):
        triton_kernels.matmul[(1,)](a, b, d, 64, 64, 64, 64, 64, 64, BM=64, BN=64, BK=32, GROUP=1)
    assert torch.equal(d.float(), a.float() @ b.float())


def test_a_cluster_of_two_ctas_for_each_program() -> None:
    a, b, d = torch.randn(128, 64).half(), torch.randn(64, 128).half(), torch.empty(128, 128).half()
    with triton_emulation.emulate("sm_90") as session:
        triton_kernels.matmul[(1,)](
            a, b, d, 128, 128, 64, 64, 128, 128, BM=128, BN=128, BK=32, GROUP=1, num_ctas=2, num_warps=8
        )
    assert session.launches[0].result.grid == (2, 1, 1)
    assert is_near(d, a.float() @ b.float(), RELATIVE[torch.float16])


@pytest.mark.parametrize(("wait", "findings"), [(True, set()), (False, {"grid-dependency"})])
def test_a_dependent_launch_waits_for_the_one_before(wait: bool, findings: set[str]) -> None:
    x = torch.arange(128, dtype=torch.int32)
    y = torch.empty_like(x)
    with triton_emulation.emulate("sm_90", check=False) as session:
        triton_kernels.increment_dependent[(2,)](x, y, wait, BLOCK=64, launch_pdl=True)
    assert {report.kind for report in session.reports} == findings
    assert torch.equal(y, x + 1)


@pytest.mark.slow
def test_sorting_running_sums_prints_and_asserts(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.randperm(256).int() + 1
    ordered, sums = torch.empty_like(x), torch.empty_like(x)
    with triton_emulation.emulate():
        compiled = triton_kernels.sort_and_sum.warmup(x, ordered, sums, BLOCK=256, debug=True, grid=(1,))
        compiled[(1, 1, 1)](x, ordered, sums, 256)
    assert torch.equal(ordered, x.sort().values)
    assert torch.equal(sums, x.cumsum(0).int())
    assert f"first: {int(x[0])}" in capfd.readouterr().out
    with pytest.raises(triton_emulation.Findings, match="not positive"), triton_emulation.emulate():
        triton_kernels.sort_and_sum[(1,)](-x, ordered, sums, BLOCK=256, debug=True)


def test_the_decorator_runs_and_raises() -> None:
    kernel = triton_emulation.emulated("sm_86")(triton_kernels.add)
    x, total = torch.ones(100), torch.empty(100)
    kernel[(1,)](x, x, total, 100, BLOCK=128)
    assert torch.equal(total, 2 * x)
    assert kernel.session is not None
    assert not kernel.session.reports
    with pytest.raises(triton_emulation.Findings):
        triton_emulation.emulated()(triton_kernels.add_unmasked)[(1,)](x, x, total, BLOCK=128)
    with pytest.raises(WrongInput, match=r"above @triton\.jit"):
        triton_emulation.emulated()(lambda: None)


def test_outputs_that_stay_unwritten_and_inputs_that_do_not() -> None:
    x, total = torch.ones(100), torch.zeros(200)
    with triton_emulation.emulate(check=False) as session:
        session.mark_input(x)
        session.mark_output(total)
        triton_kernels.add[(1,)](x, x, total, 100, BLOCK=128)
        triton_kernels.add[(1,)](x, x, x, 100, BLOCK=128)
    assert {report.kind for report in session.reports} == {"unwritten-output", "input-modified"}
    assert total[100:].isnan().all(), "stale contents cannot pass"


def test_what_cannot_be_run_is_said() -> None:
    x = torch.ones(4)
    with pytest.raises(EmulatorError, match="meta"), triton_emulation.emulate():
        triton_kernels.add[(1,)](x.to("meta"), x, x, 4, BLOCK=4)
    with pytest.raises(WrongInput, match="sm_75"):
        triton_emulation.emulate("sm_75")


def test_triton_is_restored_afterwards() -> None:
    from triton.backends import backends
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.driver import driver

    before = driver._active, dict(backends), Autotuner.run
    with triton_emulation.emulate():
        assert driver.active.get_current_target().arch == 80
    assert (driver._active, dict(backends), Autotuner.run) == before


def test_interpreted_kernels_are_refused() -> None:
    program = "from kernelproof import triton_emulation\nwith triton_emulation.emulate(): pass"
    process = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode
    assert "unset it" in process.stderr.splitlines()[-1]


def test_missing_triton_is_a_missing_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_emulation, "find_spec", lambda name: None)
    with pytest.raises(MissingTool, match="pip install triton"):
        triton_emulation.emulate()


@pytest.mark.slow
def test_the_example_of_the_guide_runs_and_prints_its_finding(checkout: Path, tmp_path: Path) -> None:
    text = (checkout / "docs" / "kernelproof" / "triton.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (printed,) = re.findall(r"```\n(global-out.*?)```", text, re.DOTALL)
    (tmp_path / "scale.py").write_text(program)
    process = subprocess.run(
        [sys.executable, "scale.py"], cwd=tmp_path, check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )  # fmt: skip
    # Triton's cache keeps the path of the first file with a kernel's text, but a finding must name this file.
    assert f"[{tmp_path}/scale.py:11 in scale]" in process.stdout
    written = re.sub(r"threads 116, [^)]*", "threads 116, ...", re.sub(r"\[/\S*/", "[", process.stdout))
    assert " ".join(written.split()) == " ".join(printed.split())
