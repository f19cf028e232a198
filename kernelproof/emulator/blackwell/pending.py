"""Tracks registers that tcgen05.ld writes, whose values are valid only after tcgen05.wait::ld."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.machine.tensor import Accumulator, force
from kernelproof.emulator.state.arrays import Array, Mask
from kernelproof.emulator.state.batch_state import BatchState


class LoadedRegister:
    """A register that a tcgen05.ld writes. ``value``: raw bits per lane. ``load``: per warp of the batch, the number of
    the load that wrote the register, 0 for warps without such a load."""

    __slots__ = ("load", "value")

    def __init__(self, value: Array, load: Array) -> None:
        self.value, self.load = value, load


# A register that tcgen05.ld or mma.sync writes. None: not written yet.
Register = Array | LoadedRegister | Accumulator | None


class PendingLoads:
    """The tcgen05.ld of a batch, numbered from 1 on in every warp. ``last_loads``: per warp, the number of its last
    one. ``waited_loads``: per warp, the number of the last load that a tcgen05.wait::ld has covered."""

    def __init__(self, batch: BatchState) -> None:
        self.batch = batch
        self.hazards = batch.launch.options.hazards
        warps = batch.size // 32
        self.last_loads: Array = np.zeros(warps, np.int64)
        self.waited_loads: Array = np.zeros(warps, np.int64)

    def begin(self, warps: Array) -> Array:
        """Begin a load of some warps; returns its number for each of them, and 0 for the other warps."""
        self.last_loads[warps] += 1
        out = np.zeros(len(self.last_loads), np.int64)
        out[warps] = self.last_loads[warps]
        return out

    def wait(self, warps: Array) -> None:
        """tcgen05.wait::ld by some warps."""
        self.waited_loads[warps] = self.last_loads[warps]

    # --- registers in other instructions: the kernel's Python function calls these methods ---

    def read(self, value: Register, m: Mask, site: int) -> Array:
        """The content of a register that another instruction reads; a load that is pending is reported."""
        self._check(value, m, site, "reads")
        return self.plain(value)

    def overwrite(self, value: Register, m: Mask, site: int) -> None:
        """Check that another instruction may write a register; a load that is pending is reported."""
        self._check(value, m, site, "writes")

    def _check(self, value: Register, m: Mask, site: int, verb: str) -> None:
        """Report an access to a register whose load is pending. ``verb``: the access in words."""
        if not self.hazards or not isinstance(value, LoadedRegister):
            return
        busy = value.load > self.waited_loads
        if busy.any():
            lanes = np.flatnonzero(np.repeat(busy, 32) & self.batch.running(m))
            if lanes.size:
                text = f"{verb} a register of a tcgen05.ld that no tcgen05.wait::ld of this warp follows yet"
                self.batch.report_lanes("tensor-memory-registers", text, site, lanes)

    def merge(self, m: Mask, new: Register, old: Register) -> Register:
        """The register after an assignment under the mask ``m`` (None: all lanes). Lanes outside of it keep the old
        content, and warps without a lane in it keep the number of the old content's load."""
        if old is None or new is old or m is None:
            return new
        if new is None:
            return old
        value = np.where(m, self.plain(new), self.plain(old))
        load = np.zeros(len(self.last_loads), np.int64)
        chosen = m.reshape(-1, 32).any(axis=1)
        for register, mask in ((new, chosen), (old, ~chosen)):
            if isinstance(register, LoadedRegister):
                load[mask] = register.load[mask]
        return LoadedRegister(value, load) if (load > self.waited_loads).any() else value

    def plain(self, value: Register) -> Array:
        """The content of a register (zeros before its first write), without the checks of ``read``."""
        if isinstance(value, LoadedRegister):
            return value.value
        return np.zeros(self.batch.size, np.uint32) if value is None else force(value)
