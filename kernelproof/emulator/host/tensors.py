"""Passes PyTorch tensors to kernels: copies their storages to device memory, and back when a launch ends.

Tensors that share a storage share a buffer, and keep their distances from its start, so the alignment of a tensor is
preserved. There is no further copy on the host: bytes are copied between the tensor's own memory and the device's.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kernelproof.emulator.memory.arena import Buffer, Memory
from kernelproof.emulator.memory.tensors import NUMPY, TorchTensor, element_name, host_bytes
from kernelproof.emulator.state.arrays import POISON, Array


class Tensors:
    """The tensors of one launch or session. ``roles``: address of a storage -> role of its buffer; see ``address`` for
    other storages."""

    def __init__(self, memory: Memory, roles: Mapping[int, str] | None = None) -> None:
        self.memory, self.roles = memory, roles or {}
        self._uploads: dict[int, tuple[Buffer, Array, TorchTensor]] = {}

    def address(self, tensor: TorchTensor, name: str = "", role: str = "inout") -> int:
        """Upload a tensor's storage; returns the device address of the tensor's first element. ``name``: what findings
        call the argument. ``role``: the role of a storage that ``roles`` lacks. Raises EmulatorError for tensors that
        cannot be arguments."""
        kind, content = element_name(tensor), host_bytes(tensor)
        start = tensor.untyped_storage().data_ptr()
        if start not in self._uploads:
            buffer = self.memory.allocate(len(content), self.roles.get(start, role), name=name)
            _describe(buffer, tensor, kind)
            self._uploads[start] = buffer, content, tensor
        buffer = self._uploads[start][0]
        if buffer.role == "input" and start not in self.roles:
            buffer.role = role
        buffer.bytes()[:] = POISON if buffer.role == "output" else content
        return buffer.address + tensor.data_ptr() - start

    def store(self) -> None:
        """Copy the buffers that kernels may have written back to their tensors."""
        for buffer, content, _ in self._uploads.values():
            if buffer.role != "input":
                content[:] = buffer.bytes()


def _describe(buffer: Buffer, tensor: TorchTensor, element: str) -> None:
    """Give a buffer the element type and shape of a tensor, or one dimension if the tensor is only a part of it."""
    dtype, extents = np.dtype(NUMPY[element]), tuple(map(int, tensor.shape))
    if buffer.nbytes % dtype.itemsize == 0:
        is_whole = tensor.is_contiguous() and int(np.prod(extents)) * dtype.itemsize == buffer.nbytes
        buffer.dtype, buffer.element = dtype, element
        buffer.shape = extents if is_whole else (buffer.nbytes // dtype.itemsize,)
