"""Proves that torch.compile's max-autotune may choose our kernels, with stand-ins that compute on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cudal2gen
from cudal2gen import pack
from kernelproof.ground.errors import WrongInput
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import dispatch, emulated, inductor  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]
MARK = 7.0  # the result of a stand-in for a fast kernel


def available() -> bool:
    """Whether this torch has the interface of ``inductor.offer``."""
    try:
        return bool(inductor._interface())
    except WrongInput:
        return False


@pytest.fixture
def offer_to_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``offer``, in a process whose caches are empty."""
    from torch._inductor import config

    if not available():
        pytest.skip(f"torch {torch.__version__} has no such interface: see the last test")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with config.patch(max_autotune=True, compile_threads=1, fx_graph_cache=False, external_matmul=[]):
        yield inductor.offer
        inductor.withdraw()


class FastPlans:
    """Stands for ``inductor._plan``: its plans take no time and give ``MARK``. ``rows``: the rows of x in each call."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, key: tuple[Any, ...], request: Callable[[], Any]) -> dispatch.CallPlan:
        request()

        def run(x: Any, other: Any, result: Any = None) -> Any:
            self.rows.append(x.shape[0])
            width = other.shape[0] if key[0] == "linear" else other.shape[1]
            d = x.new_empty((x.shape[0], width)) if result is None or key[0] == "linear" else result
            return d.fill_(MARK)

        return dispatch.CallPlan("fast", "", run, key[0] != "linear", run)


def graph_of(function: Callable[..., Any], *inputs: Any) -> tuple[Any, list[str]]:
    """The result of a function compiled without a break, and the generated code."""
    from torch._inductor.utils import run_and_get_code

    return run_and_get_code(torch.compile(function, fullgraph=True), *inputs)  # type: ignore[no-any-return]


def test_mm_has_our_kernel_as_a_choice(offer_to_inductor: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    fast = FastPlans()
    monkeypatch.setattr(inductor, "_plan", fast)
    offer_to_inductor()
    offer_to_inductor()
    assert config.external_matmul == [inductor.cudal2gen_mm]
    a, b = torch.randn(64, 512).bfloat16(), torch.randn(512, 96).bfloat16()
    with config.patch(max_autotune_gemm_backends="TRITON"):  # on a CPU no Triton kernel can be chosen
        result, (code,) = graph_of(lambda a, b: a @ b, a, b)
    assert (result == MARK).all()
    assert code.count("extern_kernels.cudal2gen_mm(") == 1
    assert "extern_kernels.mm(" not in code
    assert fast.rows


def test_code_from_inductors_cache_finds_the_kernel(offer_to_inductor: Callable[..., None]) -> None:
    """If nothing is compiled anew, the generated code itself has to register the kernel."""
    from torch._inductor.kernel.mm import lazy_register_extern_choice
    from torch._inductor.select_algorithm import extern_kernels

    vars(extern_kernels).pop("cudal2gen_mm", None)
    lazy_register_extern_choice.cache_clear()
    offer_to_inductor()
    assert extern_kernels.cudal2gen_mm is inductor.cudal2gen_mm


def test_linear_is_timed_by_ranges_of_rows(
    offer_to_inductor: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.kernel import custom_op

    monkeypatch.setattr(custom_op, "DEFAULT_RANGE_UPPER_BOUND", 2048)
    fast = FastPlans()
    monkeypatch.setattr(inductor, "_plan", fast)
    offer_to_inductor(split_points=[4])
    weight = torch.randn(1024, 1024).bfloat16()
    compiled = torch.compile(lambda x: cudal2gen.linear(x, weight), fullgraph=True, dynamic=True)
    x = torch.randn(1000, 1024).bfloat16()
    torch._dynamo.mark_dynamic(x, 0)
    assert (compiled(x) == MARK).all()
    assert {4, 2048} <= set(fast.rows), "each range was timed at its largest number of rows"
    assert fast.rows[-1] == 1000, "the chosen kernel ran with all rows"


def test_what_no_kernel_takes_is_computed_by_torch(offer_to_inductor: Callable[..., None]) -> None:
    offer_to_inductor()
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(6, 16).to(dtype), torch.randn(16, 4).to(dtype)
        out = torch.empty(6, 4, dtype=dtype)
        inductor.cudal2gen_mm(a, b, out)
        assert torch.allclose(out, a @ b, rtol=2**-7)
    x, weight, bias = (torch.randn(*size).half() for size in ((2, 3, 16), (4, 16), (4,)))
    result = torch.ops.cudal2gen.offered_linear(x, weight, bias)
    assert torch.equal(result, torch.nn.functional.linear(x, weight, bias))
    torch.library.opcheck(torch.ops.cudal2gen.offered_linear.default, (x, weight, bias))
    with pytest.raises(TypeError, match=r"^weight:"):
        torch.ops.cudal2gen.offered_linear(x, weight.bfloat16(), bias)


def test_kernels_are_offered_without_a_measurement(offer_to_inductor: Callable[..., None], tmp_path: Path) -> None:
    offer_to_inductor()
    opened = pack.open_pack(packed.folder(packed.table(list(packed.RECORDS.values())), tmp_path / "a100"))
    with (
        EmulatedDevice(packed.RECORDS["predicated"]) as device,
        emulated(OperatorDevice(device, "a100"), [opened]) as dispatcher,
    ):
        a, b, bias = (device.empty(rows * cols).view(rows, cols) for rows, cols in ((30, 64), (24, 64), (1, 24)))
        for matrix in (a, b, bias):
            matrix.copy_(torch.randint(-2, 3, matrix.shape))
        expected, out = (a.double() @ b.double().t()).half(), device.empty(30 * 24).view(30, 24)
        inductor.cudal2gen_mm(a, b.t(), out)
        assert torch.equal(out, expected)
        assert torch.equal(torch.ops.cudal2gen.offered_linear(a, b, bias[0]), expected + bias)
        assert sum(dispatcher.stats()["kernel"].values()) == 2
        assert torch.equal(cudal2gen.linear(a, b), expected)
        assert sum(dispatcher.stats()["kernel"].values()) == 2, (
            "calls outside of torch.compile take measured kernels only"
        )


def test_wrong_split_points_are_refused(offer_to_inductor: Callable[..., None]) -> None:
    for points in ([64, 16], [0, 4], [4, 4]):
        with pytest.raises(WrongInput, match="must be positive and ascending"):
            offer_to_inductor(split_points=points)


def test_a_torch_without_the_interface_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch 2.11 the function has no ``min_speedup_threshold``; before 2.10 there is no function."""
    from torch._inductor import config

    if available():
        from torch._inductor.kernel import custom_op

        def older(custom_op: Any, configs: Any = None, split_points: Any = None) -> None:
            raise NotImplementedError

        monkeypatch.setattr(custom_op, "register_custom_op_autotuning", older)
    before = list(config.external_matmul)
    with pytest.raises(WrongInput, match="has no interface for choices of others"):
        inductor.offer()
    inductor.withdraw()
    assert config.external_matmul == before
