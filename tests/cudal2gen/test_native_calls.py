"""Proves that C++ makes planned calls with the same numbers and counts as Python, and which calls stay with Python."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import cudal2gen
from cudal2gen import pack
from cudal2gen.launch import launcher
from cudal2gen.launch.launcher import LaunchError, OpenKernel
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import call_kernels, call_native, dispatch, emulated, torch_operators  # noqa: E402
from scripts import overhead  # noqa: E402
from tests.cudal2gen import idle_device  # noqa: E402

pytestmark = pytest.mark.torch

# The signatures of cudal2gen_launch_sized and of cudal2gen_launch_fused, and NumPy's types.
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 6)
FUSED = ctypes.CFUNCTYPE(ctypes.c_int, *launcher._LAUNCH)
NUMPY = {torch.float16: np.float16, torch.float32: np.float32}


class Reference:
    """Implements ``cudal2gen_launch_sized`` and ``_fused`` for C++ by NumPy.

    - ``layout``, ``d_type``: those of the next launches, which do not say them.
    - ``code``: what launches return; 0 for success.
    - ``fused``: the further operands of fused launches so far.
    - ``streams``, ``workspaces``: the addresses that each launch so far was given.
    """

    def __init__(self) -> None:
        self.function, self.fused_function = CALLBACK(self.launch), FUSED(self.launch_fused)
        self.fused: list[launcher.Fused] = []
        self.layout, self.d_type, self.code = "nn", np.float16, 0
        self.streams: list[int] = []
        self.workspaces: list[int | None] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes opened kernels tell C++ the addresses of these functions instead of the launcher's."""
        real = OpenKernel.sized_call

        def call_with_sizes(kernel: OpenKernel, *sizes: Any) -> tuple[int, bytes]:
            address = ctypes.cast(self.function, ctypes.c_void_p).value
            assert address is not None
            return address, real(kernel, *sizes)[1]

        monkeypatch.setattr(OpenKernel, "sized_call", call_with_sizes)
        fused = ctypes.cast(self.fused_function, ctypes.c_void_p).value
        monkeypatch.setattr(OpenKernel, "fused_call", property(lambda _: fused))

    def launch_fused(
        self, kernel: int, a: int, lda: int, b: int, ldb: int, d: int, ldd: int, m: int, n: int, k: int, fused: int,
        workspace: int | None, stream: int,
    ) -> int:  # fmt: skip
        """``cudal2gen_launch_fused``: A, B and D are addresses, ld in elements; ``fused`` is the address of a
        ``Fused``, of which the bias of D's columns is added."""
        sizes = launcher.Sized(kernel, lda, ldb, ldd, m, n, k, launcher._Batches(1))
        code = self.launch(ctypes.addressof(sizes), a, b, d, workspace, stream)
        self.fused.append(launcher.Fused.from_buffer_copy(launcher.Fused.from_address(fused)))
        if not code:
            matrix(d, self.d_type, (m, n), ldd, 0)[:] += matrix(self.fused[-1].bias, np.float16, (1, n), n, 0)
        return code

    def launch(self, sized: int, a: int, b: int, d: int, workspace: int | None, stream: int) -> int:
        """``cudal2gen_launch_sized``: ``sized`` is the address of a ``Sized``, A, B and D are addresses of matrices."""
        self.streams.append(stream)
        self.workspaces.append(workspace)
        if self.code:
            return self.code
        sizes = launcher.Sized.from_address(sized)
        m, n, k, batches = sizes.m, sizes.n, sizes.k, sizes.batches
        for number in range(batches.count):
            left = matrix(a, np.float16, (m, k), sizes.lda, number * batches.a)
            stored = (n, k) if self.layout == "tn" else (k, n)
            right = matrix(b, np.float16, stored, sizes.ldb, number * batches.b)
            right = right.T if self.layout == "tn" else right
            product = left.astype(np.float64) @ right.astype(np.float64)
            matrix(d, self.d_type, (m, n), sizes.ldd, number * batches.d)[:] = product
        return 0


def matrix(address: int, dtype: Any, shape: tuple[int, int], ld: int, start: int) -> Any:
    """The memory ``start`` elements after an address, as a matrix whose rows are ``ld`` elements apart."""
    rows, cols = shape
    count = (rows - 1) * ld + cols
    content = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(
        address + start * np.dtype(dtype).itemsize
    )
    flat = np.frombuffer(content, dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, (ld * flat.itemsize, flat.itemsize))


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Reference:
    """A ``Reference`` for launches of C++. Launches of Python compute nothing."""
    own = Reference()
    own.install(monkeypatch)
    return own


@pytest.fixture(scope="module")
def opened_pack(tmp_path_factory: pytest.TempPathFactory) -> pack.Pack:
    """A pack of the idle device's kernels, without fusions."""
    return idle_device.open_pack(tmp_path_factory.mktemp("packs"))


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> idle_device.IdleDevice:
    """A device that accepts launches and computes nothing."""
    return idle_device.IdleDevice(tmp_path_factory.mktemp("runtime"))


@pytest.fixture
def dispatcher(device: idle_device.IdleDevice, opened_pack: pack.Pack, reference: Reference) -> Iterator[Any]:
    """A dispatcher on the idle device whose kernels compute by ``reference``."""
    with emulated(device, [opened_pack], prefer="kernel") as own:
        yield own


def draw_integers(*shape: int, seed: int = 0) -> Any:
    """Small integers in fp16, so that products are exact."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).half()


def product(a: Any, b: Any) -> Any:
    """The exact product, rounded to fp16."""
    return (a.double() @ b.double()).half()


def kernel_calls(dispatcher: dispatch.Dispatcher) -> int:
    """The number of calls that ran on a kernel."""
    return sum(dispatcher.stats()["kernel"].values())


# --- numbers ---


@pytest.mark.slow
def test_the_second_call_is_made_by_cpp(dispatcher: dispatch.Dispatcher, reference: Reference) -> None:
    a, b = draw_integers(48, 64), draw_integers(64, 40, seed=1)
    cudal2gen.matmul(a, b)
    assert reference.streams == [], "the first is Python's"
    for _ in range(3):
        d = cudal2gen.matmul(a, b)
        assert torch.equal(d, product(a, b))
        assert (d.shape, d.dtype, d.is_contiguous(), d.requires_grad) == ((48, 40), torch.float16, True, False)
    assert reference.streams == [idle_device.STREAM] * 3
    assert dispatcher.stats()["torch"] == {}
    assert kernel_calls(dispatcher) == 4
    assert "made by" in call_native.NATIVE.state
    on_cuda = call_native.NATIVE.serves(call_native.CallPlace(device=0), None)
    assert on_cuda == (torch.version.cuda is not None), "plans of CUDA devices need a torch with CUDA"


@pytest.mark.parametrize("layout", ["nn", "tn"])
def test_leading_dimensions_batches_and_rows(
    layout: str, dispatcher: dispatch.Dispatcher, reference: Reference
) -> None:
    reference.layout = layout
    a, b = draw_integers(48, 96)[:, :64], draw_integers(64, 72, seed=1)[:, :40]
    b = draw_integers(40, 96, seed=1)[:, :64].t() if layout == "tn" else b
    for left in (a, draw_integers(2, 3, 8, 64), draw_integers(64)):
        cudal2gen.matmul(left, b)
        assert torch.equal(cudal2gen.matmul(left, b), product(left, b))
    assert len(reference.streams) == 3


def test_plans_of_batch_invariant_calls_are_their_own(dispatcher: dispatch.Dispatcher, reference: Reference) -> None:
    a, b = draw_integers(48, 64), draw_integers(64, 40, seed=1)
    for count, invariant in ((0, False), (1, False), (1, True), (2, True), (3, False)):
        cudal2gen.matmul(a, b, batch_invariant=invariant)
        assert len(reference.streams) == count, "the first call of each kind is Python's"
    assert kernel_calls(dispatcher) == 5


def test_linear(dispatcher: dispatch.Dispatcher, reference: Reference) -> None:
    reference.layout = "tn"
    x, weight = draw_integers(2, 5, 64), draw_integers(40, 64, seed=1)
    for _ in range(2):
        d = cudal2gen.linear(x, weight)
    assert torch.equal(d, product(x, weight.t()))
    assert d.shape == (2, 5, 40)
    assert len(reference.streams) == 1


# --- what is a kind of call ---


def test_calls_that_differ_have_plans_of_their_own(dispatcher: dispatch.Dispatcher, reference: Reference) -> None:
    """Plans depend on shapes, strides, alignment, types, and the arguments that are no tensors."""
    whole, b = draw_integers(97, 128), draw_integers(64, 40, seed=1)
    start = whole.view(-1)
    kinds = [
        whole[:48, :64],
        whole[:47, :64],
        whole[:1, :64],
        whole[0, :64],
        start[: 48 * 64].view(48, 64),
        start[: 48 * 72].view(48, 72)[:, :64],
    ]
    for a in kinds:
        for _ in range(2):
            d = cudal2gen.matmul(a, b)
        assert torch.equal(d, product(a, b)), (a.shape, a.stride())
    assert len(reference.streams) == len(kinds)
    shifted = start[8 : 8 + 48 * 64].view(48, 64)  # 16 bytes further on; this is no new kind
    assert torch.equal(cudal2gen.matmul(shifted, b), product(shifted, b))
    assert len(reference.streams) == len(kinds) + 1
    unaligned = start[4 : 4 + 48 * 64].view(48, 64)  # 8 bytes off a vector, so that the plan copies, which Python does
    for _ in range(2):
        cudal2gen.matmul(unaligned, b)
    assert len(reference.streams) == len(kinds) + 1
    assert len(dispatcher.plans) == len(kinds) + 1


def test_types_are_kinds(dispatcher: dispatch.Dispatcher, reference: Reference) -> None:
    a, b = draw_integers(48, 64), draw_integers(64, 40, seed=1)
    for _ in range(2):
        cudal2gen.matmul(a, b)
    assert cudal2gen.matmul(a.bfloat16(), b.bfloat16()).dtype == torch.bfloat16
    assert cudal2gen.matmul(a, b, out_dtype=torch.float32).dtype == torch.float32
    assert cudal2gen.matmul(a.float(), b.float()).dtype == torch.float32
    with pytest.raises(TypeError, match="expected"):
        cudal2gen.matmul(a, b.float())
    with pytest.raises(ValueError, match="acc='f64'"):
        cudal2gen.matmul(a, b, acc="f64")  # type: ignore[arg-type]
    assert len(reference.streams) == 1


# --- counts, and when C++ stops ---


def test_whatever_changes_a_plan_ends_it_in_c(
    dispatcher: dispatch.Dispatcher, reference: Reference, opened_pack: pack.Pack
) -> None:
    a, b = draw_integers(48, 64), draw_integers(64, 40, seed=1)

    def calls() -> int:
        before = len(reference.streams)
        cudal2gen.matmul(a, b)
        return len(reference.streams) - before

    assert [calls() for _ in range(3)] == [0, 1, 1]
    with cudal2gen.prefer("vendor"):
        assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
        assert calls() == 0
    assert [calls(), calls()] == [0, 1], "the plan is made anew"
    with cudal2gen.autotune("off"):
        assert [calls(), calls()] == [0, 1]
    dispatcher.add(opened_pack)
    assert [calls(), calls()] == [0, 1]
    assert list(dispatcher.stats()["torch"].values()) == [2]
    assert kernel_calls(dispatcher) == 9
    assert cudal2gen.explain(cudal2gen.matmul, a, b).startswith("hgemm"), "explaining counts nothing"
    assert kernel_calls(dispatcher) == 9


def test_a_plan_that_races_or_was_dropped_is_not_kept(dispatcher: dispatch.Dispatcher) -> None:
    a, b = draw_integers(48, 64), draw_integers(64, 40, seed=1)
    cudal2gen.matmul(a, b)
    (plan,) = dispatcher.plans.values()
    assert plan.native is not None
    assert plan.count(drop=True) == 1
    run, plan.run = plan.run, plan.by_torch
    dispatcher.keep(plan, 0, a, b)
    assert not plan.native.kept
    plan.run = run
    dispatcher.forget()
    dispatcher.keep(plan, 0, a, b)
    assert not plan.native.kept


def test_another_dispatcher_has_plans_of_its_own(
    dispatcher: dispatch.Dispatcher, reference: Reference, device: idle_device.IdleDevice
) -> None:
    a, b = draw_integers(48, 64), draw_integers(64, 40, seed=1)
    for _ in range(3):
        cudal2gen.matmul(a, b)
    with emulated(device, []) as other:
        with pytest.warns(UserWarning, match="no pack is installed"):
            d = cudal2gen.matmul(a, b)
        assert torch.equal(d, product(a, b))
        assert (other.stats()["kernel"], kernel_calls(dispatcher)) == ({}, 3)
    for _ in range(2):
        cudal2gen.matmul(a, b)
    assert (kernel_calls(dispatcher), len(reference.streams)) == (5, 3)


def test_what_the_launcher_refuses_is_computed_by_torch(dispatcher: dispatch.Dispatcher, reference: Reference) -> None:
    """C++ returns nothing, and Python's launch reports the reason."""
    a, b = draw_integers(48, 64), draw_integers(64, 40, seed=1)
    for _ in range(2):
        cudal2gen.matmul(a, b)
    reference.code = 1
    (plan,) = dispatcher.plans.values()

    def refused(*_: Any) -> Any:
        raise LaunchError(1, "no")

    cudal2gen.matmul(a, b)
    assert (kernel_calls(dispatcher), len(reference.streams)) == (3, 2), "Python's launch was accepted"
    plan.run = refused
    for _ in range(2):
        assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    assert dispatcher.stats() == {"kernel": {plan.name: 3}, "torch": {"the launcher refuses": 2}}
    assert len(reference.streams) == 3, "C++ is not asked again"


def test_threads_are_counted_exactly(device: idle_device.IdleDevice, opened_pack: pack.Pack) -> None:
    pairs = [(draw_integers(rows, 64), draw_integers(64, 40, seed=1)) for rows in (8, 16)]
    with emulated(device, [opened_pack], prefer="kernel") as dispatcher:

        def work() -> None:
            for _ in range(500):
                for a, b in pairs:
                    cudal2gen.matmul(a, b)

        work()
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        counts = [1000]
        while any(thread.is_alive() for thread in threads):
            counts.append(kernel_calls(dispatcher))
        for thread in threads:
            thread.join()
        assert counts == sorted(counts)
        assert kernel_calls(dispatcher) == 5000


# --- torch's products ---


def plan_as_on_gpu(monkeypatch: pytest.MonkeyPatch, *planners: str) -> list[tuple[Any, ...]]:
    """Makes C++ compute all planned calls, with torch's products as calls of an operator, as on a GPU. The list gets
    the name and arguments of each call of ``planners``, functions of ``torch_operators``."""
    cudal2gen.matmul(draw_integers(48, 64), draw_integers(64, 40))  # makes the C++ function available
    monkeypatch.setattr(call_kernels, "on_gpu", lambda _: True)
    planned_calls: list[tuple[Any, ...]] = []

    def recorded(name: str, real: Callable[..., Any], *call: Any) -> Any:
        planned_calls.append((name, *call))
        return real(*call)

    for name in planners:
        monkeypatch.setattr(torch_operators, name, partial(recorded, name, getattr(torch_operators, name)))
    return planned_calls


def test_cpp_also_makes_the_calls_that_torch_computes(
    dispatcher: dispatch.Dispatcher, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, C++ also makes the calls that torch computes; under autocast Python makes them, with cast operands."""
    planned_calls = plan_as_on_gpu(monkeypatch, "plan_matmul")
    a, b = draw_integers(48, 64).float(), draw_integers(64, 40, seed=1).float()
    for _ in range(3):
        assert torch.equal(cudal2gen.matmul(a, b), a @ b)
    assert len(planned_calls) == 1
    with torch.autocast("cpu", torch.bfloat16):
        d = cudal2gen.matmul(a, b)
    assert (d.dtype, [call[1].dtype for call in planned_calls]) == (torch.bfloat16, [torch.float32, torch.bfloat16])
    left = draw_integers(3, 48, 64).float()
    for _ in range(2):
        assert torch.equal(cudal2gen.matmul(left, b), left @ b)
    for _ in range(3):
        assert torch.equal(cudal2gen.linear(a, b.t()), torch.nn.functional.linear(a, b.t()))
    counts = dispatcher.stats()["torch"]
    assert len(counts) == 2
    for end, count in (("torch.float32", 8), ("a100 bf16 f32 nn", 1)):
        assert [number for reason, number in counts.items() if reason.endswith(end)] == [count]
    a, b = a.double(), b.double()
    for _ in range(2):
        assert torch.equal(cudal2gen.matmul(a, b, out_dtype=torch.float64), a @ b)
    with pytest.raises(TypeError, match="with acc or out_dtype"):
        cudal2gen.matmul(a, b, acc="f16", out_dtype=torch.float64)
    assert reference.streams == []


def test_python_reports_a_failure_of_torch(
    dispatcher: dispatch.Dispatcher, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plan_as_on_gpu(monkeypatch)
    a, b = torch.zeros(8, 8, dtype=torch.bool), torch.zeros(8, 8, dtype=torch.bool)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="not implemented for 'Bool'"):
            cudal2gen.matmul(a, b)


# --- calls that Python makes ---


@pytest.mark.slow
def test_gradients_modes_and_transforms(dispatcher: dispatch.Dispatcher, reference: Reference) -> None:
    a, b = draw_integers(48, 64), draw_integers(64, 40, seed=1)
    for _ in range(2):
        cudal2gen.matmul(a, b)
    before = len(reference.streams)
    with torch.inference_mode():
        assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    assert len(reference.streams) == before + 1
    left = a.clone().requires_grad_()
    for _ in range(2):
        d = cudal2gen.matmul(left, b)
    assert torch.equal(d, product(a, b))
    d.backward(torch.ones_like(d))
    assert left.grad is not None
    with torch.no_grad():
        assert not cudal2gen.matmul(left, b).requires_grad
    operators: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            operators.append(str(function))
            return function(*arguments, **(options or {}))

    with Watch():
        cudal2gen.matmul(a, b)
    assert operators == ["cudal2gen.matmul.default"], "and no operator of C++"
    mapped = torch.vmap(cudal2gen.matmul, in_dims=(0, None))(torch.stack([a, a]), b)
    assert mapped.shape == (2, 48, 40)
    assert torch.compile(cudal2gen.matmul, backend="eager", fullgraph=True)(a, b).shape == (48, 40)


def test_memory_that_is_not_the_tensor(dispatcher: dispatch.Dispatcher, reference: Reference) -> None:
    """The operands are a negated view, a tensor without memory, and plain ones of the same shapes before and after
    these."""
    a, b = draw_integers(48, 64), draw_integers(64, 40, seed=1)
    negated = torch._neg_view(draw_integers(48, 128, seed=2))[:, :64]
    none = torch._efficientzerotensor((48, 64), dtype=torch.float16)
    for x in (negated, none, a):
        cudal2gen.matmul(x, b)  # by Python, which computes nothing here
    for x in (negated, none, a, negated):
        assert torch.equal(cudal2gen.matmul(x, b), product(x, b))
    out = torch.empty(48, 40).half()
    for x in (a, negated, none, a):
        cudal2gen.matmul(x, b, out=out)  # by Python
        for _ in range(2):
            assert torch.equal(cudal2gen.matmul(x, b, out=out), product(x, b))
    reference.layout, weight = "tn", b.t().contiguous()
    for bias in (draw_integers(40), torch._neg_view(draw_integers(40))):
        for x in (a, negated, none):
            cudal2gen.linear(x, weight, bias)  # by Python
            for _ in range(2):
                assert torch.equal(cudal2gen.linear(x, weight, bias), product(x, b) + bias)


def test_no_tangent_is_dropped(dispatcher: dispatch.Dispatcher) -> None:
    a, b = draw_integers(48, 64), draw_integers(64, 40, seed=1)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
        for call in (cudal2gen.matmul, torch.ops.cudal2gen.matmul):
            d = torch.autograd.forward_ad.unpack_dual(call(dual, b))
            close = {"atol": 1e-2, "rtol": 1e-2}
            torch.testing.assert_close(d.primal, a @ b, **close)
            torch.testing.assert_close(d.tangent, torch.ones_like(a) @ b, **close)
        with pytest.raises(RuntimeError, match="forward AD with mm_out that does not support it"):
            cudal2gen.matmul(dual, b, out=torch.empty(48, 40).half())
        assert cudal2gen.matmul(a, b).shape == (48, 40)


@pytest.mark.filterwarnings("ignore")  # torch warns about its own tensors
def test_tensors_that_c_does_not_know(dispatcher: dispatch.Dispatcher, reference: Reference) -> None:
    """Calls with them fail or are computed by torch, as without C++."""
    a, b = draw_integers(48, 64), draw_integers(64, 40, seed=1)
    for _ in range(2):
        cudal2gen.matmul(a, b)
    strange = [
        a.to_sparse(),
        a.to("meta"),
        torch.nested.nested_tensor([a, a]),
        torch.quantize_per_tensor(a.float(), 0.1, 0, torch.qint8),
        a.float().to_mkldnn(),
        a.view(48, *[1] * 8, 64),
    ]
    with_library = [outcome(tensor, b) for tensor in strange]
    planned, call_native.NATIVE.planned = call_native.NATIVE.planned, call_native._unplanned
    try:
        assert with_library == [outcome(tensor, b) for tensor in strange]
    finally:
        call_native.NATIVE.planned = planned
    assert len(reference.streams) == 1


def outcome(a: Any, b: Any) -> str:
    """The shape, type and device of a product, or the error that it raises."""
    try:
        d = cudal2gen.matmul(a, b)
        return f"{d.shape} {d.dtype} {d.device}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# --- what a call costs ---


def test_a_planned_call_costs_little_more_than_a_no_op(device: idle_device.IdleDevice, opened_pack: pack.Pack) -> None:
    """A planned call costs at most two no-ops of torch.library more than one no-op does.

    On known machines it costs 1.1 to 1.5 no-ops more.

    The times are minima of short alternating rounds, which are repeated while they are disturbed.
    """
    a, b, idle = draw_integers(8, 8), draw_integers(8, 8, seed=1), overhead.no_op()
    with torch.no_grad(), emulated(device, [opened_pack], prefer="kernel") as dispatcher:
        cudal2gen.matmul(a, b)
        least = {"matmul": float("inf"), "no-op": float("inf")}
        for _ in range(10):
            cost = overhead.costs({"matmul": lambda: cudal2gen.matmul(a, b), "no-op": lambda: idle(a, b)}, rounds=40)
            least = {name: min(least[name], cost[name].least) for name in least}
            if least["matmul"] - least["no-op"] < 2 * least["no-op"]:
                break
        assert least["matmul"] - least["no-op"] < 2 * least["no-op"], least
        assert dispatcher.stats()["torch"] == {}
