"""Measures the host's cost of a call of cudal2gen.matmul and of its parts. A stand-in replaces the CUDA runtime and
GPU.

    python -m scripts.overhead

The figures are lower bounds, because on a GPU the driver's launch is added, here and in torch's own call. torch's
figures are of 8 x 8 products on the CPU, with computation and allocation; test_operators_on_gpu.py compares the two on
a GPU. Calls alternate, in an order that is reversed every round; the least of the rounds and their median are printed.
The no-op is an operator of torch.library with the same schema, whose kernel is a Python function that returns an
existing tensor.
"""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

import cudal2gen
from cudal2gen.launch.launcher import OpenKernel
from cudal2gen.operators import call_native, check_modes, emulated
from tests.cudal2gen.idle_device import IdleDevice, open_pack

CALLS, ROUNDS = 100, 400  # rounds are short, so that nothing disturbs some of them
LIBRARIES: list[Any] = []  # keeps libraries, since an operator ends with its library


class Cost(NamedTuple):
    """Microseconds of a call: in the fastest round, and in the median one."""

    least: float
    median: float


def costs(calls: Mapping[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, Cost]:
    """The cost of each call. Calls alternate, in an order that is reversed every round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls.items())
    for _ in range(rounds):
        for name, call in order:
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
        order.reverse()
    return {name: Cost(min(series), statistics.median(series)) for name, series in times.items()}


def no_op() -> Callable[..., Any]:
    """An operator of torch.library that does nothing."""
    library = torch.library.Library("cudal2gen_overhead", "FRAGMENT")
    LIBRARIES.append(library)
    library.define('no_op(Tensor a, Tensor b, str acc="f32", ScalarType? out_dtype=None) -> Tensor')
    library.impl("no_op", lambda a, b, acc="f32", out_dtype=None: a, "CPU")  # noqa: ARG005
    operator: Callable[..., Any] = torch.ops.cudal2gen_overhead.no_op.default
    return operator


def parts(a: torch.Tensor, b: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Calls whose differences are the parts of a planned ``cudal2gen.matmul(a, b)``, which must have been called
    before."""
    planned, sparse = call_native.NATIVE.planned, a.to_sparse()
    return {
        "all": lambda: cudal2gen.matmul(a, b),
        "checks": lambda: check_modes.undispatched(a, b),
        "operator": lambda: planned(a, b, 0),
        "no launch": lambda: planned(b, a, 0),  # a plan whose launch is `return 0`
        "no plan": lambda: planned(a, b, -1),
        "no key": lambda: planned(sparse, b, 0),
        "nothing": lambda: None,
    }


def differences(cost: Mapping[str, Cost]) -> dict[str, float]:
    """The microseconds of each part, from the least costs of ``parts``."""
    us = {name: call.least - cost["nothing"].least for name, call in cost.items()}
    return {
        "the function and its arguments": us["all"] - us["checks"] - us["operator"],
        "whether a gradient, a mode or a transform is at work": us["checks"],
        "torch's parsing and dispatch of the operator": us["no key"],
        "what the tensors are, and the plan's look-up": us["no plan"] - us["no key"],
        "D: allocated, and handed to Python": us["no launch"] - us["no plan"],
        "the launch, on a runtime that does nothing": us["operator"] - us["no launch"],
    }


def plan_without_a_launch(device: IdleDevice, a: torch.Tensor, b: torch.Tensor) -> None:
    """Makes the plan of calls of (a, b) launch nothing; (a, b) must differ from other calls' operands by a shape, a
    stride or a type."""
    nothing = ctypes.cast(ctypes.CDLL(str(device.runtime_library)).cudaGetLastError, ctypes.c_void_p).value
    real = OpenKernel.sized_call
    OpenKernel.sized_call = lambda self, *sizes: (nothing, real(self, *sizes)[1])  # type: ignore[method-assign,assignment,return-value]
    try:
        cudal2gen.matmul(a, b)
    finally:
        OpenKernel.sized_call = real  # type: ignore[method-assign]


def main() -> None:
    """Prints the microseconds of calls, and of the parts of a planned one."""
    torch.set_num_threads(1)
    a, weight = (torch.randn(8, 8).half() for _ in range(2))
    b = torch.randn(8, 16).half()[:, :8]
    bias, out, strided = torch.randn(8).half(), torch.empty(8, 8).half(), torch.randn(8, 9).half()[:, :8]
    folder, idle = Path(tempfile.mkdtemp()), no_op()
    calls: dict[str, Callable[[], Any]] = {
        "torch.mm": lambda: torch.mm(a, b),
        "torch.mm(out=)": lambda: torch.mm(a, b, out=out),
        "a no-op operator": lambda: idle(a, b),
        "cudal2gen.matmul": lambda: cudal2gen.matmul(a, b),
        "the same through torch's dispatcher": lambda: torch.ops.cudal2gen.matmul.default(a, b),
        "cudal2gen.linear": lambda: cudal2gen.linear(a, weight),
        "cudal2gen.matmul(out=)": lambda: cudal2gen.matmul(a, b, out=out),
        "cudal2gen.linear with a bias": lambda: cudal2gen.linear(a, weight, bias),
        "cudal2gen.matmul, one operand copied": lambda: cudal2gen.matmul(strided, b),
    }
    pack, device = open_pack(folder), IdleDevice(folder)
    with torch.no_grad():
        with emulated(device, [pack], prefer="kernel") as dispatcher:
            for call in calls.values():
                call()
            plan_without_a_launch(device, b, a)
            _print(costs(calls))
            print()
            for name, us in differences(costs(parts(a, b))).items():
                print(f"{name:52} {us:5.2f} us")
            assert dispatcher.stats()["torch"] == {}
        biased = {"cudal2gen.linear with a kernel's bias": calls["cudal2gen.linear with a bias"]}
        with emulated(device, [open_pack(folder / "biased", "bias_n")], prefer="kernel"):
            print()
            _print(costs(biased))
        for operator in call_native.SCHEMAS:
            setattr(call_native.NATIVE, operator, call_native._unplanned)
        with emulated(IdleDevice(folder, native=False), [pack], prefer="kernel"):
            print("\nwithout C++:")
            _print(costs({name: calls[name] for name in calls if name.startswith(("cudal2gen", "the same"))}))


def _print(table: Mapping[str, Cost]) -> None:
    for name, cost in table.items():
        print(f"{name:38} {cost.least:6.2f} us, median {cost.median:6.2f}")


if __name__ == "__main__":
    main()
