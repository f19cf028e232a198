"""atom and red (PTX ISA, "atom", "red"): read-modify-write of shared and device memory.

The lanes of a warp execute an atomic one after the other; here all lanes of a batch do, in ascending order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from kernelproof.emulator.arithmetic.floats import fmin, packed, scalar16
from kernelproof.emulator.arithmetic.types import F, S, U
from kernelproof.emulator.memory.device import DeviceMemory
from kernelproof.emulator.memory.device_flags import DeviceFlags
from kernelproof.emulator.memory.shared import SharedMemory
from kernelproof.emulator.state.arrays import SHIFT, Array, Mask
from kernelproof.emulator.state.batch_state import BatchState
from kernelproof.emulator.state.scopes import ORDERS
from kernelproof.emulator.state.windows import SHIFT_TO_WINDOW, Window


class AtomicKind(NamedTuple):
    """What an atomic does. ``op`` is the operation (``add``, ``cas``, ...), ``kind`` its PTX type, ``space`` the state
    space (``generic``: the address tells). ``read`` and ``write`` are the strengths of its load and its store (scope,
    acquire, release), as numbers of ``state.scopes``. ``returns``: the old value is used."""

    op: str
    kind: str
    space: str
    read: int
    write: int
    returns: bool = True


# Operations with an inverse, on types whose bits are integers: see ``_modify_sums``.
_INVERTIBLE: dict[str, tuple[np.ufunc, np.ufunc]] = {
    "add": (np.add, np.subtract),
    "xor": (np.bitwise_xor, np.bitwise_xor),
}
# Operations that are one NumPy function on such integers. Of these only addition works on floats, too.
_SIMPLE: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_REALS = frozenset(("f32", "f64"))
_INTEGERS = frozenset(("u32", "s32", "b32", "u64", "s64", "b64"))


# Of some lanes: the lanes, the elements that they modify, their operands, and with which values a cas compares.
Operands = tuple[Array, Array, Array, Array | None]


class Atomics:
    """The atomics of a batch."""

    def __init__(self, batch: BatchState, device: DeviceMemory, shared: SharedMemory) -> None:
        self.batch, self.device, self.shared = batch, device, shared

    def apply(self, form: AtomicKind, address: Array, value: Array, compare: Array | None, m: Mask, site: int) -> Array:
        """Read, modify and write in lane order; returns the old values. ``compare``: the value that cas expects."""
        if form.space == "generic":
            return self._apply_by_window(form, address, value, compare, m, site)
        batch, width = self.batch, value.dtype.itemsize
        if form.space == "shared":
            flags: DeviceFlags | SharedMemory = self.shared
            access = self.shared.touch(address, width, m, site)
            view = self.shared.views[width]
        else:
            flags = self.device.flags
            access = self.device.touch(address, width, m, site, form.write)
            view = self.device.arena.views[width]
        if access is None:
            return batch.poison(width)
        lanes, at = access
        values, other = value[lanes], compare[lanes] if compare is not None else None
        out = np.zeros(batch.size, value.dtype) if form.returns else value
        if flags.observed and site in batch.launch.kernel.polls:
            older = self._polled(form, flags, (lanes, at, values, other), view, site)
            stale = older != view[at]
            if stale.any():
                out[lanes[stale]], current = older[stale], ~stale
                lanes, at, values = lanes[current], at[current], values[current]
                other = None if other is None else other[current]
                if not lanes.size:
                    return out
        old, changed = modify(form.op, form.kind, view, at, values, other, form.returns or flags.observed)
        if flags.active or (form.read | form.write) & ORDERS:
            new = _combined(form.op, form.kind, old, values, other) if flags.observed else None
            flags.modify(lanes, at << SHIFT[width], form.read, form.write, site, old if flags.observed else None, new)
        if changed:
            batch.launch.version += 1
        if form.returns:
            out[lanes] = old
        return out

    def _polled(
        self, form: AtomicKind, flags: DeviceFlags | SharedMemory, operands: Operands, view: Array, site: int
    ) -> Array:
        """What the atomics of a loop that polls find: as a load would, an older value than the last one, if they leave
        it as it is. Such a read-modify-write may come right behind the write of its value."""
        lanes, at, values, other = operands

        def leaves(i: int, found: np.generic) -> bool:
            compared = None if other is None else other[i : i + 1]
            old = np.full(1, found)
            return bool((_combined(form.op, form.kind, old, values[i : i + 1], compared) == old).all())

        return flags.read(lanes, at << SHIFT[values.dtype.itemsize], form.read, site, view[at], leaves)

    def _apply_by_window(
        self, form: AtomicKind, address: Array, value: Array, compare: Array | None, m: Mask, site: int
    ) -> Array:
        """An atomic at generic addresses: first the lanes whose address is in shared memory, then the others."""
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


def _sorted(at: Array) -> Array:
    """The order that sorts places; equal places keep their order, which is that of lanes.

    This is a radix sort by digits of 16 bits, because NumPy sorts numbers of 16 bits in linear time.
    """
    left = at - at.min()
    order: Array = np.argsort(left.astype(np.uint16), kind="stable")
    while (left := left >> 16).any():
        order = order[np.argsort(left[order].astype(np.uint16), kind="stable")]
    return order


class _Groups:
    """Elements of an atomic, sorted by place and then by lane. ``order``: the element at each rank. ``starts``: the
    rank at which the elements of a place begin. ``sizes``: how many elements a place has."""

    def __init__(self, at: Array) -> None:
        self.order = _sorted(at)
        places = at[self.order]
        self.starts: Array = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
        self.sizes: Array = np.diff(self.starts, append=len(at))
        self.places: Array = places[self.starts]

    def turns(self) -> Iterator[Array]:
        """Yield elements turn by turn: within a turn all places differ, and elements of one place keep their order."""
        turn = np.arange(len(self.order)) - np.repeat(self.starts, self.sizes)
        by_turn = np.argsort(turn, kind="stable")
        at = 0
        for count in np.bincount(turn):
            yield self.order[by_turn[at : at + count]]
            at += count


def modify(
    op: str, kind: str, view: Array, at: Array, value: Array, compare: Array | None, returns: bool = True
) -> tuple[Array, bool]:
    """Change ``view[at]`` atomically, in lane order where places repeat. Returns the old values (meaningless without
    ``returns``) and whether anything changed."""
    simple = None if returns else _SIMPLE.get(op)
    if simple is not None and (kind in _INTEGERS or (op == "add" and kind in _REALS)):
        real = F[kind] if kind in _REALS else S[8 * value.itemsize] if kind[0] == "s" else value.dtype
        simple.at(view.view(real), at, value.view(real))
        return value, True
    groups = _Groups(at)
    # All places differ, so the order of lanes does not matter.
    if len(groups.starts) == len(at):
        old = view[at]
        new = _combined(op, kind, old, value, compare)
        view[at] = new
        return old, bool((new != old).any())
    if kind in _INTEGERS and op in _INVERTIBLE:
        return _modify_sums(_INVERTIBLE[op], view, groups, value)
    old = np.empty(len(at), view.dtype)
    changed = False
    for now in groups.turns():
        # Elements of one turn have distinct places, so NumPy's indexed assignment is right.
        before = view[at[now]]
        after = _combined(op, kind, before, value[now], None if compare is None else compare[now])
        old[now] = before
        changed = changed or bool((after != before).any())
        view[at[now]] = after
    return old, changed


def _modify_sums(
    operations: tuple[np.ufunc, np.ufunc], view: Array, groups: _Groups, value: Array
) -> tuple[Array, bool]:
    """Fast path for an operation with an inverse: the value that a lane finds is the old one combined with the running
    sum of the lanes before it. ``sums`` runs over all places; what earlier places contributed is taken back."""
    combine, take_back = operations
    values = value[groups.order]
    sums = combine.accumulate(values, dtype=values.dtype)
    # Running sum of the elements before this one, over all places.
    ahead = take_back(sums, values)
    before = view[groups.places]
    # Each place's old value, less what elements of other places have added to the running sum.
    base = take_back(before, ahead[groups.starts])
    earlier = combine(ahead, np.repeat(base, groups.sizes))
    view[groups.places] = combine(base, sums[groups.starts + groups.sizes - 1])
    old = np.empty_like(values)
    old[groups.order] = earlier
    return old, bool(values.any())
