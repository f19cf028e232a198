"""Tensors of PyTorch as arguments: their storage is copied to the device once per memory, and back when a launch ends.

Views of one storage stay views of one buffer, and addresses keep their distance from its start, so alignments are the
tensor's own. The host side is never copied: bytes go between the tensor's own memory and the device's.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kernelproof.emulator.memory.arena import Buffer, Memory
from kernelproof.emulator.memory.tensors import NUMPY, Tensor, element_name, host_bytes
from kernelproof.emulator.state.arrays import POISON, Array


class Tensors:
    """The tensors of one launch or session, by their storage. ``roles``: of storages, by address; others are
    ``inout``."""

    def __init__(self, memory: Memory, roles: Mapping[int, str] | None = None) -> None:
        self.memory, self.roles = memory, roles or {}
        self._placed: dict[int, tuple[Buffer, Array, Tensor]] = {}

    def address(self, tensor: Tensor, name: str = "", role: str = "inout") -> int:
        """The device address of its first element; its storage is uploaded. ``name``: of the argument, for findings;
        ``role``: of a storage that ``roles`` lacks. Raises EmulatorError for tensors that cannot be arguments."""
        kind, content = element_name(tensor), host_bytes(tensor)
        start = tensor.untyped_storage().data_ptr()
        if start not in self._placed:
            buffer = self.memory.allocate(len(content), self.roles.get(start, role), name=name)
            _describe(buffer, tensor, kind)
            self._placed[start] = buffer, content, tensor
        buffer = self._placed[start][0]
        if buffer.role == "input" and start not in self.roles:
            buffer.role = role
        buffer.bytes()[:] = POISON if buffer.role == "output" else content
        return buffer.address + tensor.data_ptr() - start

    def store(self) -> None:
        """Copy back what kernels may have written."""
        for buffer, content, _ in self._placed.values():
            if buffer.role != "input":
                content[:] = buffer.bytes()


def _describe(buffer: Buffer, tensor: Tensor, element: str) -> None:
    """Name elements and extents of a buffer after a tensor: in one dimension where the tensor is not all of it."""
    dtype, extents = np.dtype(NUMPY[element]), tuple(map(int, tensor.shape))
    if buffer.nbytes % dtype.itemsize == 0:
        whole = tensor.is_contiguous() and int(np.prod(extents)) * dtype.itemsize == buffer.nbytes
        buffer.dtype, buffer.element = dtype, element
        buffer.shape = extents if whole else (buffer.nbytes // dtype.itemsize,)
