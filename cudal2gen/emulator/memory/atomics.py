"""atom and red: read-modify-write of shared and device memory, lane by lane in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cudal2gen.emulator.arithmetic.floats import fmin, packed, scalar16
from cudal2gen.emulator.arithmetic.types import F, S, U
from cudal2gen.emulator.memory.device import DeviceMemory
from cudal2gen.emulator.memory.shared import SharedMemory
from cudal2gen.emulator.state.arrays import Array, Mask
from cudal2gen.emulator.state.batch import BatchState
from cudal2gen.emulator.state.windows import SHIFT_TO_WINDOW, Window


class AtomicKind(NamedTuple):
    """What an atomic does: the operation (``add``, ``cas``, ...), its PTX type, the state space (``generic``: told by
    the address), and its scope with whether it acquires (``read``) and releases (``write``), as of ``state.scopes``."""

    op: str
    kind: str
    space: str
    read: int
    write: int


class Atomics:
    """The atomics of a batch."""

    def __init__(self, batch: BatchState, device: DeviceMemory, shared: SharedMemory) -> None:
        self.batch, self.device, self.shared = batch, device, shared

    def apply(self, form: AtomicKind, address: Array, value: Array, compare: Array | None, m: Mask, site: int) -> Array:
        """Read, modify, write, in lane order. ``compare``: of cas. Returns the old values."""
        if form.space == "generic":
            return self._apply_by_window(form, address, value, compare, m, site)
        batch, width = self.batch, value.dtype.itemsize
        if form.space == "shared":
            access = self.shared.touch(address, width, m, site, form.read, form.write)
            view = self.shared.views[width]
        else:
            access = self.device.touch(address, width, m, site, form.read, form.write)
            view = self.device.arena.views[width]
        if access is None:
            return batch.poison(width)
        lanes, at = access
        other = compare[lanes] if compare is not None else None
        old, changed = modify(form.op, form.kind, view, at, value[lanes], other)
        if changed:
            batch.launch.version += 1
        out = np.zeros(batch.size, value.dtype)
        out[lanes] = old
        return out

    def _apply_by_window(
        self, form: AtomicKind, address: Array, value: Array, compare: Array | None, m: Mask, site: int
    ) -> Array:
        """Of generic addresses, those of shared memory first."""
        inside = (address >> np.uint64(SHIFT_TO_WINDOW)) == Window.SHARED
        active = self.batch.running(m)
        out = self.batch.poison(value.dtype.itemsize)
        low = self.shared.of_cluster((address & np.uint64(0xFFFFFFFF)).astype(np.uint32))
        for space, places, mask in (("shared", low, active & inside), ("global", address, active & ~inside)):
            if mask.any():
                old = self.apply(form._replace(space=space), places, value, compare, mask, site)
                out[mask] = old[mask]
        return out


def _combined(op: str, kind: str, old: Array, value: Array, compare: Array | None) -> Array:
    if op == "exch":
        return value
    if op == "cas":
        assert compare is not None
        return np.where(old == compare, value, old)
    if op in ("and", "or", "xor"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op](old, value)
    if op == "inc":
        return np.where(old >= value, 0, old + 1).astype(old.dtype)
    if op == "dec":
        return np.where((old == 0) | (old > value), value, old - 1).astype(old.dtype)
    combine: Callable[[Array, Array], Array] = {
        "add": lambda a, b: a + b,
        "min": lambda a, b: fmin(a, b, False, False) if a.dtype.kind == "f" else np.minimum(a, b),
        "max": lambda a, b: fmin(a, b, False, True) if a.dtype.kind == "f" else np.maximum(a, b),
    }[op]
    if kind in ("f16x2", "bf16x2"):
        return packed(kind, combine, old, value)
    if kind in ("f16", "bf16"):
        return scalar16(kind, combine, old, value)
    bits = old.dtype.itemsize * 8
    real = F[kind] if kind[0] == "f" else S[bits] if kind[0] == "s" else U[bits]
    return np.ascontiguousarray(combine(old.view(real), value.view(real))).view(old.dtype)


def modify(op: str, kind: str, view: Array, at: Array, value: Array, compare: Array | None) -> tuple[Array, bool]:
    """Atomically change ``view[at]``, in lane order where places repeat. Returns the old values and whether anything
    changed."""
    old = np.empty(len(at), view.dtype)
    left = np.arange(len(at))
    changed = False
    while left.size:
        _, first = np.unique(at[left], return_index=True)
        now = left[first]
        before = view[at[now]]
        after = _combined(op, kind, before, value[now], None if compare is None else compare[now])
        old[now] = before
        changed = changed or bool((after != before).any())
        view[at[now]] = after
        keep = np.ones(left.size, bool)
        keep[first] = False
        left = left[keep]
    return old, changed
