"""Converts tensors of PyTorch to NumPy views of their memory, without importing torch.

Only a tensor's ``device``, ``dtype``, ``shape``, ``data_ptr``, ``is_contiguous`` and ``untyped_storage`` are used.
"""

from __future__ import annotations

import ctypes
from typing import Protocol, TypeGuard

import numpy as np

from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.reports import EmulatorError

# Element type of a tensor -> NumPy's type: an integer of the same size where NumPy lacks the type.
NUMPY = {
    "bool": "bool", "uint8": "u1", "int8": "i1", "int16": "i2", "int32": "i4", "int64": "i8",
    "uint16": "u2", "uint32": "u4", "uint64": "u8", "float16": "f2", "float32": "f4", "float64": "f8",
    "bfloat16": "u2", "float8_e4m3fn": "u1", "float8_e5m2": "u1", "float8_e4m3fnuz": "u1", "float8_e5m2fnuz": "u1",
    "float8_e8m0fnu": "u1", "float4_e2m1fn_x2": "u1",
}  # fmt: skip


class Storage(Protocol):
    """The memory of a tensor and its views."""

    def data_ptr(self) -> int:
        """The address of its first byte."""

    def nbytes(self) -> int:
        """Its size in bytes."""


class TorchTensor(Protocol):
    """The attributes of a torch.Tensor that are used here."""

    @property
    def device(self) -> object:
        """The device that it is on."""

    @property
    def dtype(self) -> object:
        """The type of its elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""

    def data_ptr(self) -> int:
        """The address of its first element."""

    def is_contiguous(self) -> bool:
        """Whether its elements are in order and without gaps."""

    def untyped_storage(self) -> Storage:
        """The storage that it shares with its views."""


def is_tensor(value: object) -> TypeGuard[TorchTensor]:
    """Whether a value has the methods of a PyTorch tensor."""
    return hasattr(value, "data_ptr") and hasattr(value, "untyped_storage")


def element_name(tensor: TorchTensor) -> str:
    """The name of a tensor's element type, without the prefix "torch.". Raises EmulatorError for types that are not in
    ``NUMPY``, such as complex and quantised ones."""
    name = str(tensor.dtype).rpartition(".")[2]
    if name not in NUMPY:
        advice = "pass torch.view_as_real(x)" if name.startswith("complex") else "pass a view of integers of that size"
        raise EmulatorError(f"a tensor of {name} cannot be an argument; {advice}")
    return name


def host_array(tensor: TorchTensor) -> Array:
    """A NumPy view of a contiguous tensor, in its shape; the element type is that of ``NUMPY``. Raises EmulatorError
    for a tensor with gaps, and as ``element_name`` and ``host_bytes`` do."""
    dtype = np.dtype(NUMPY[element_name(tensor)])
    if not tensor.is_contiguous():
        raise EmulatorError("a tensor with gaps cannot be uploaded; pass x.contiguous()")
    content = host_bytes(tensor)
    start = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    return content[start : start + int(np.prod(tensor.shape)) * dtype.itemsize].view(dtype).reshape(tensor.shape)


def host_bytes(tensor: TorchTensor) -> Array:
    """A NumPy view of the bytes of a tensor's storage, uint8 in shape (nbytes,), which is valid while the tensor lives.
    Raises EmulatorError for tensors without a storage or outside the CPU's memory."""
    place = str(tensor.device)
    if place != "cpu":
        raise EmulatorError(f"a tensor on {place} cannot be an argument; pass x.cpu()")
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError) as error:
        raise EmulatorError(f"a tensor without a storage cannot be an argument; pass x.to_dense(): {error}") from None
    nbytes = storage.nbytes()
    if not nbytes:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(storage.data_ptr()))
