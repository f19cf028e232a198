"""The emulated device of a room (a sandboxed process): copies torch's storages to it and records what kernels write."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import numpy as np
import torch

from kernelproof.emulator import Buffer, LaunchResult, Memory, Options, Report, Session, SessionHooks, SessionPolicy
from kernelproof.emulator import Device as Chip
from kernelproof.emulator.host.execution import KernelLaunch
from kernelproof.emulator.memory.tensors import host_bytes
from kernelproof.grading import branches
from kernelproof.grading.benchmarks.cuda_face import note_work
from kernelproof.grading.benchmarks.ledger import Ledger, address
from kernelproof.grading.constants import compared_constants

NEW, OLD = 1, 2  # in Buffer.written: bytes that the current launch wrote, and those that were defined before


class RoomDevice(SessionHooks):
    """The memory in which torch's storages have buffers, and the launches on it.

    ``obstacles``: why something could not be executed; a solution may have caught the exception, so it is kept here.
    ``constants``: the numbers with which executed kernels compare values. ``outcomes``: the results of comparisons of
    loaded values. ``windows``: what is wrong with instructions that read where the device has its windows of shared and
    local memory. ``storages``: the buffer and a tensor of each storage, by address. ``pointer_tensors``: tensors whose
    address Python code has asked for.
    """

    def __init__(self, chip: Chip, ledger: Ledger) -> None:
        self.memory = Memory(protected=True)
        self.chip, self.ledger = chip, ledger
        self.environments = count(1)
        self.reports: list[Report] = []
        self.obstacles: list[str] = []
        self.constants: dict[float, None] = {}
        self.outcomes = branches.Outcomes()
        self.windows: list[str] = []
        self.storages: dict[int, tuple[Buffer, Any]] = {}
        self.pointer_tensors: dict[int, Any] = {}

    def session(self) -> Session:
        """The device, open for the runtime calls of one function.

        Each session has other clocks, SM numbers and errors of approximate functions, so that no solution is right only
        because of these.
        """
        options = Options(counters=True, environment=next(self.environments))
        return Session(SessionPolicy(self.chip, options, check_outputs=False, hooks=self), self.memory)

    def draw_environments(self, seed: int) -> None:
        """Draw the first environment from a seed; later sessions take the following ones."""
        self.environments = count(int(np.random.default_rng([seed, 3]).integers(1, 1 << 30)))

    # --- torch's storages ---

    def upload(self, tensor: Any) -> int:
        """Copy a tensor's storage to the device; returns the device address of its first element."""
        key, content = address(tensor), host_bytes(tensor)
        entry = self.storages.get(key)
        if entry is None or entry[0] not in self.memory.buffers or entry[0].nbytes != len(content):
            entry = self.storages[key] = self.memory.allocate(len(content), "scratch"), tensor
        buffer = entry[0]
        buffer.bytes()[:] = content
        assert buffer.written is not None
        buffer.written[:] = OLD
        return int(buffer.address + tensor.data_ptr() - tensor.untyped_storage().data_ptr())

    def download(self, keys: Iterable[int]) -> None:
        """Copy storages back from the device. ``keys``: their addresses."""
        for key in keys:
            buffer, tensor = self.storages[key]
            host_bytes(tensor)[:] = buffer.bytes()

    def device_address(self, tensor: Any) -> int:
        """The device address of a tensor, for code that passes pointers as numbers."""
        with torch._C.DisableTorchFunction():
            self.pointer_tensors[address(tensor)] = tensor
            return self.upload(tensor)

    def tensor(self, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, place: int) -> Any:
        """Return the tensor at the device address ``place``. Its ``sizes`` and ``strides`` count elements.

        The tensor uses the storage of the buffer at that address, into which the buffer's contents are copied. If the
        buffer has no storage yet, it gets one. Raises RuntimeError if no buffer has the address.
        """
        buffer = self.memory.find(place - self.memory.base)
        if buffer is None:
            raise RuntimeError("a tensor is no memory of the device")
        size = dtype.itemsize
        at = place - buffer.address
        entry = next((item for item in self.storages.values() if item[0] is buffer), None)
        if entry is None:
            # ``set_`` below needs a storage of whole elements.
            storage = torch.empty(buffer.nbytes // size * size, dtype=torch.uint8)
            self.ledger.kept.append(storage)
            self.ledger.origins[address(storage)] = self.ledger.union([self.key(buffer)])
            self.storages[address(storage)] = entry = buffer, storage
        host_bytes(entry[1])[:] = buffer.bytes()[: entry[1].untyped_storage().nbytes()]
        return torch.empty(0, dtype=dtype).set_(entry[1].untyped_storage(), at // size, sizes, strides)

    def forget_freed(self) -> None:
        """Forget the storages whose buffer host code has freed; they get a new buffer when they are used again."""
        alive = set(map(id, self.memory.buffers))
        self.storages = {key: item for key, item in self.storages.items() if id(item[0]) in alive}

    def key(self, buffer: Buffer) -> int:
        """The ledger's key of a buffer: the address of its storage, or a unique number below -1 if it has none."""
        return next((key for key, item in self.storages.items() if item[0] is buffer), -2 - buffer.start)

    # --- launches ---

    def execute(self, launch: KernelLaunch) -> LaunchResult:
        """Execute a launch and record which storages it read and wrote."""
        note_work()
        self._take_written_keys()
        result = launch.execute()
        self.note_comparisons(launch.module.text, result)
        # Every 64-bit word of the parameters that lies in a buffer counts as a pointer that the kernel reads.
        words = struct.unpack(f"<{len(launch.parameters) // 8}Q", launch.parameters[: len(launch.parameters) // 8 * 8])
        found = (self.memory.find(word - self.memory.base) for word in words)
        read = {self.key(buffer) for buffer in found if buffer is not None}
        self.ledger.add_launch(launch.kernel, read, self._take_written_keys())
        return result

    def note_comparisons(self, ptx: str, result: LaunchResult) -> None:
        """Record the constants in the comparisons of a launch's PTX, the results of those of loaded values, and
        readings of the device's windows."""
        self.constants |= dict.fromkeys(compared_constants(ptx))
        assert result.counters is not None
        self.windows += map(branches.window_message, result.counters.window_readings)
        self.outcomes.add({(result.kernel, site): item for site, item in result.counters.comparisons.items()})

    def note_copies(self, before: Iterable[int]) -> None:
        """Record buffers that were written without a launch, for example by copies of the runtime. Their origin is that
        of the storages ``before`` and of all buffers."""
        if written := self._take_written_keys():
            origin = self.ledger.union({*before, *map(self.key, self.memory.buffers)})
            for key in written:
                self.ledger.origins[key] = origin

    def _take_written_keys(self) -> set[int]:
        """The keys of all buffers that were written since the last call of this function."""
        out = set()
        for buffer in self.memory.buffers:
            if buffer.written is not None and (mask := buffer.written == NEW).any():
                buffer.written[mask] = OLD
                out.add(self.key(buffer))
        return out

    def report(self, reports: list[Report], launches: list[LaunchResult]) -> None:
        """Keep all findings."""
        self.reports += reports
        reports.clear()
        launches.clear()

    def unsupported(self, function: str) -> None:
        """Keep an obstacle for a function of CUDA's libraries that the emulator lacks."""
        self.obstacles.append(f"{function} is not emulated")


def bits_of(tensor: Any) -> np.ndarray[Any, Any]:
    """A contiguous copy of a tensor's bits, in its shape."""
    copy = tensor.detach().contiguous().clone()
    kind = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}.get(copy.dtype)
    return np.asarray((copy.view(kind) if kind is not None else copy).numpy())


# Sends a request to compile an extension to the grader, and returns its answer.
Compiler = Callable[[dict[str, Any]], dict[str, Any]]
