"""Proves which arguments operators refuse, with an error that names them, and what operators query of a CUDA device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import cudal2gen
from cudal2gen import pack
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import devices, dispatch, emulated  # noqa: E402
from tests.cudal2gen.test_operators import directory, draw_integers, launch_count, opened_pack, product  # noqa: E402

pytestmark = pytest.mark.torch

__all__ = ["directory", "opened_pack"]  # fixtures


# --- what is refused ---

# A matrix (8,8) in fp16, of which most calls are made.
HALF = torch.zeros(8, 8).half()
PAIR = torch.zeros(16, 8).half()  # memory of two such matrices, whose parts may overlap
# The operands and options of a call of matmul, its error, and a pattern of the message.
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
    ((HALF, HALF.clone()), {"out": PAIR[:1].expand(8, 8)}, ValueError, "out: several elements lie in one place"),
    ((HALF, HALF.clone()), {"out": PAIR.as_strided((8, 8), (7, 1))}, ValueError, "out: several elements lie in one"),
    (
        (HALF.expand(3, 8, 8), HALF.clone()),
        {"out": PAIR.as_strided((3, 8, 8), (32, 8, 1))},
        ValueError,
        "out: several elements lie in one place",
    ),
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


# Calls, and the words of their error: the argument comes first.
NO_TENSORS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "matmul of text": (lambda: cudal2gen.matmul("x", HALF), ("a", "str")),
    "matmul of a number": (lambda: cudal2gen.matmul(HALF, 2), ("b", "int")),
    "matmul of an array": (lambda: cudal2gen.matmul(HALF, HALF.numpy()), ("b", "ndarray")),
    "out": (lambda: cudal2gen.matmul(HALF, HALF, out=3), ("out", "int")),
    "bmm": (lambda: cudal2gen.bmm(HALF[None], [1]), ("b", "list")),
    "linear": (lambda: cudal2gen.linear(None, HALF), ("x", "NoneType")),
    "bias": (lambda: cudal2gen.linear(HALF, HALF, 1.5), ("bias", "float")),
    "activation": (lambda: cudal2gen.linear(HALF, 2, activation="relu"), ("weight", "int")),
    "swiglu": (lambda: cudal2gen.swiglu(HALF, None), ("w13", "NoneType")),
    "grouped": (lambda: cudal2gen.grouped_mm(HALF, 3, offs=HALF), ("mat_b", "int")),
    "offs": (lambda: cudal2gen.grouped_mm(HALF, HALF[None], offs=[8]), ("offs", "list")),
    "interleave": (lambda: cudal2gen.interleave(HALF, "w"), ("w3", "str")),
    "deinterleave": (lambda: cudal2gen.deinterleave(8), ("w13", "int")),
    "explain alone": (
        lambda: cudal2gen.explain(HALF),
        ("explain", "'b'", "cudal2gen.matmul"),
    ),
    "explain text": (lambda: cudal2gen.explain("x", HALF), ("a", "str")),
    "explain swiglu": (lambda: cudal2gen.explain(cudal2gen.swiglu, HALF, 2), ("w13", "int")),
    "explain grouped": (
        lambda: cudal2gen.explain(cudal2gen.grouped_mm, mat_a=HALF, mat_b=3),
        ("mat_b", "int"),
    ),
    "patch": (lambda: cudal2gen.patch(3), ("model", "torch.nn.Module", "int")),
    "unpatch": (lambda: cudal2gen.unpatch("model"), ("model", "torch.nn.Module", "str")),
}


@pytest.mark.parametrize(("call", "names"), NO_TENSORS.values(), ids=NO_TENSORS.keys())
def test_what_is_no_tensor_is_named(call: Callable[[], Any], names: tuple[str, ...]) -> None:
    """A second call is refused like the first."""
    for _ in range(2):
        with pytest.raises(TypeError) as refusal:
            call()
        message = str(refusal.value)
        assert message.startswith(f"{names[0]}: ")
        assert all(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) for name in names), message


def test_shapes_of_huge_products_without_data() -> None:
    a, b = (torch.empty(1 << 20, 1 << 20, dtype=torch.float16, device="meta") for _ in range(2))
    assert cudal2gen.matmul(a, b).shape == (1 << 20, 1 << 20)
    assert cudal2gen.linear(a[None], b).shape == (1, 1 << 20, 1 << 20)
    with pytest.raises(ValueError, match="do not fit"):
        cudal2gen.matmul(a, b[:8])


# --- a real device, as far as one can be had without it ---


def test_a_cuda_device_is_asked_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    class DeviceBlock:
        """Stands in for ``torch.cuda.device``, and notes its index and when the block begins and ends."""

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
    monkeypatch.setattr(torch.cuda, "device", DeviceBlock)
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
    """A capture may be on the tensors' device, or on the current device if that is another one."""
    current, captured = [0], {0}

    @contextmanager
    def enter(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] in captured)
    cards = [devices.Cuda(index) for index in range(count)]
    assert [card.capturing() for card in cards] == [True] * count
    captured.clear()
    assert [card.capturing() for card in cards] == [False] * count
    captured.add(1)
    assert [card.capturing() for card in cards] == [False, True][:count]
    assert current == [0]


def test_one_of_several_devices_is_made_current(
    device: EmulatedDevice, operator_device: OperatorDevice, opened_pack: pack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches_at_entry: list[int] = []

    @contextmanager
    def current() -> Iterator[None]:
        launches_at_entry.append(launch_count(device))
        yield

    operator_device.alone, operator_device.current = False, current  # type: ignore[method-assign]
    a, b = draw_integers(device, 40, 64), draw_integers(device, 24, 64).t()
    with emulated(operator_device, [opened_pack], prefer="kernel"):
        for _ in range(2):
            assert torch.equal(cudal2gen.matmul(a, b), product(a, b))
    assert launches_at_entry == [0, 0, 1], "when the kernel is opened, and at each launch"
