"""Converts nested Python values with tensors to messages and back, inside rooms."""

from __future__ import annotations

from typing import Any

import torch

from kernelproof.grading.benchmarks.cuda_face import Unsupported
from kernelproof.grading.benchmarks.device import bits_of
from kernelproof.grading.benchmarks.wire import BITS, Tensor


def packed(value: Any, out: list[Tensor]) -> Any:
    """A value as JSON; its tensors are appended to ``out``. Raises Unsupported for other types."""
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        if name not in BITS or value.is_sparse or value.is_quantized:
            raise Unsupported(f"a tensor of {value.dtype}")
        out.append(Tensor(name, bits_of(value).view(BITS[name])))
        return {"tensor": len(out) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        return {"dict": [[packed(key, out), packed(item, out)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [packed(item, out) for item in value]}
    raise Unsupported(f"an input of type {type(value).__name__}")


def unpacked(value: Any, tensors: list[Tensor]) -> Any:
    """The value in a message, with new tensors. Raises ValueError for a message of another form."""
    match value:
        case {"tensor": number}:
            return tensor_of(tensors[number])
        case {"value": inner}:
            return inner
        case {"dtype": name}:
            return getattr(torch, name)
        case {"dict": items}:
            return {unpacked(key, tensors): unpacked(item, tensors) for key, item in items}
        case {"tuple": items}:
            return tuple(unpacked(item, tensors) for item in items)
        case {"list": items}:
            return [unpacked(item, tensors) for item in items]
    raise ValueError(f"no value: {value!r}")


def tensor_of(item: Tensor) -> Any:
    """The tensor of torch with the type and bits of a message's tensor."""
    bits = item.bits.copy()
    if item.type == "bfloat16":
        return torch.from_numpy(bits.view("i2")).view(torch.bfloat16)
    if item.type == "bool":
        return torch.from_numpy(bits).view(torch.bool)
    return torch.from_numpy(bits)
