"""Executes atom and red (PTX ISA, "atom", "red"): read-modify-writes of shared and device memory.

The result is as if all lanes of a batch executed an atomic one after the other, in ascending order.
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
    """A form of atomic. ``op``: the operation (``add``, ``cas``, ...). ``kind``: its PTX type. ``space``: the state
    space; for ``generic`` the address decides. ``read`` and ``write``: the strengths of its load and its store (scope,
    acquire, release), as numbers of ``state.scopes``. ``returns``: whether the old value is used."""

    op: str
    kind: str
    space: str
    read: int
    write: int
    returns: bool = True


# Operations that are one NumPy function on integers. Only addition is the same function on floats.
_UFUNCS: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
# Those of them that have an inverse function.
_INVERSE_UFUNCS: dict[str, np.ufunc] = {"add": np.subtract, "xor": np.bitwise_xor}
_REAL_TYPES = frozenset(("f32", "f64"))
_INTEGER_TYPES = frozenset(("u32", "s32", "b32", "u64", "s64", "b64"))
# The most rounds of compare-and-swaps. Each round executes those of each place up to the next one that swaps. Few of
# them swap, since lanes of a loop mostly expect the same value. Those that are left are executed one by one.
_SWAP_ROUNDS = 8


# Some lanes, the elements that they modify, their operands, and the values with which a cas compares.
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
        lanes, indices = access
        values, compares = value[lanes], compare[lanes] if compare is not None else None
        out = np.zeros(batch.size, value.dtype) if form.returns else value
        if flags.observed and site in batch.launch.kernel.polling_heads:
            older = self._polled_values(form, flags, (lanes, indices, values, compares), view, site)
            stale = older != view[indices]
            if stale.any():
                out[lanes[stale]], current = older[stale], ~stale
                lanes, indices, values = lanes[current], indices[current], values[current]
                compares = None if compares is None else compares[current]
                if not lanes.size:
                    return out
        old, changed = modify(form.op, form.kind, view, indices, values, compares, form.returns or flags.observed)
        if flags.flags_are_read and (flags.active or (form.read | form.write) & ORDERS):
            new = _new_values(form.op, form.kind, old, values, compares) if flags.observed else None
            flags.modify(
                lanes, indices << SHIFT[width], form.read, form.write, site, old if flags.observed else None, new
            )
        if changed:
            batch.launch.version += 1
        if form.returns:
            out[lanes] = old
        return out

    def _polled_values(
        self, form: AtomicKind, flags: DeviceFlags | SharedMemory, operands: Operands, view: Array, site: int
    ) -> Array:
        """The values that the atomics of a polling loop find. Like a load, an atomic may find an older value than the
        last one, if it does not change that value: it may then come directly after the write of that value."""
        lanes, indices, values, compares = operands

        def changes_nothing(i: int, found: np.generic) -> bool:
            if compares is not None:
                return bool(found != compares[i] or found == values[i])
            old = np.full(1, found)
            return bool((_new_values(form.op, form.kind, old, values[i : i + 1], None) == old).all())

        return flags.read(
            lanes, indices << SHIFT[values.dtype.itemsize], form.read, site, view[indices], changes_nothing
        )

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


def _new_values(op: str, kind: str, old: Array, value: Array, compare: Array | None) -> Array:
    """The new values of an operation on old values, element by element."""
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


def _order_by_place(indices: Array) -> Array:
    """The permutation that sorts the indices of places. Equal ones keep their order, which is that of lanes.

    This is a radix sort by digits of 16 bits, because NumPy sorts numbers of 16 bits in linear time.
    """
    remaining = indices - indices.min()
    order: Array = np.argsort(remaining.astype(np.uint16), kind="stable")
    while (remaining := remaining >> 16).any():
        order = order[np.argsort(remaining[order].astype(np.uint16), kind="stable")]
    return order


class _Groups:
    """The elements (one per lane) of an atomic, sorted by place and then by lane. An element's position is its rank.
    ``order``: the element at each rank. ``places``: the different places. ``starts``: the rank of each place's first
    element. ``sizes``: how many elements a place has."""

    def __init__(self, indices: Array) -> None:
        self.order = _order_by_place(indices)
        places = indices[self.order]
        self.starts: Array = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
        self.sizes: Array = np.diff(self.starts, append=len(indices))
        self.places: Array = places[self.starts]

    @property
    def ordinals(self) -> Array:
        """By rank: how many elements of the same place come before."""
        return np.asarray(np.arange(len(self.order)) - np.repeat(self.starts, self.sizes))

    def rounds(self) -> Iterator[Array]:
        """Yield elements in rounds: in each, all places differ, and elements of one place come in their order."""
        by_ordinal = np.argsort(self.ordinals, kind="stable")
        start = 0
        for count in np.bincount(self.ordinals):
            yield self.order[by_ordinal[start : start + count]]
            start += count


def modify(
    op: str, kind: str, view: Array, indices: Array, value: Array, compare: Array | None, returns: bool = True
) -> tuple[Array, bool]:
    """Change ``view[indices]`` atomically: lanes with the same index modify its element one after the other. ``value``,
    ``compare``: the operands, one per lane; ``compare`` only for cas. Returns the old values (meaningless without
    ``returns``), and whether anything changed."""
    if not returns and op in _UFUNCS and (kind in _INTEGER_TYPES or (op == "add" and kind in _REAL_TYPES)):
        return value, _modify_in_place(op, kind, view, indices, value)
    groups = _Groups(indices)
    # All places differ, so the order of lanes does not matter.
    if len(groups.starts) == len(indices):
        old = view[indices]
        new = _new_values(op, kind, old, value, compare)
        view[indices] = new
        return old, bool((new != old).any())
    before, values = view[groups.places], value[groups.order]
    if op == "cas":
        assert compare is not None
        return _swap(view, indices, groups, value, compare)
    left_values = _values_left(op, kind, before, values, groups)
    if left_values is None:
        return _modify_in_rounds(op, kind, view, indices, value, compare, groups)
    # An element finds the value that the previous one of its place has left, and the first one the value before.
    found = np.concatenate((left_values[:1], left_values[:-1]))
    found[groups.starts] = before
    view[groups.places] = left_values[groups.starts + groups.sizes - 1]
    old = np.empty_like(values)
    old[groups.order] = found
    return old, bool((left_values != found).any())


def _modify_in_place(op: str, kind: str, view: Array, indices: Array, value: Array) -> bool:
    """Execute atomics whose old values are not needed; returns whether anything may have changed."""
    real = F[kind] if kind in _REAL_TYPES else S[8 * value.itemsize] if kind[0] == "s" else value.dtype
    before = None if op in _INVERSE_UFUNCS else view[indices]
    _UFUNCS[op].at(view.view(real), indices, value.view(real))
    return bool(value.any() if before is None else (view[indices] != before).any())


def _modify_in_rounds(
    op: str, kind: str, view: Array, indices: Array, value: Array, compare: Array | None, groups: _Groups
) -> tuple[Array, bool]:
    """``modify`` for any operation: each round executes one element of each place."""
    old = np.empty(len(indices), view.dtype)
    changed = False
    for elements in groups.rounds():
        # Elements of one round have distinct places, so NumPy's indexed assignment is right.
        before = view[indices[elements]]
        after = _new_values(op, kind, before, value[elements], None if compare is None else compare[elements])
        old[elements] = before
        changed = changed or bool((after != before).any())
        view[indices[elements]] = after
    return old, changed


def _values_left(op: str, kind: str, before: Array, values: Array, groups: _Groups) -> Array | None:
    """By rank: the value that an element leaves at its place; None if that takes a loop over lanes. ``before``: the
    value of each place before the atomic. ``values``: the operands, by rank."""
    if op == "exch":
        return values
    if kind not in _INTEGER_TYPES:
        return None
    if op in _INVERSE_UFUNCS:
        return _sums(_UFUNCS[op], _INVERSE_UFUNCS[op], before, values, groups)
    if op in _UFUNCS:
        real = S[8 * values.itemsize] if kind[0] == "s" else values.dtype
        first = values.view(real).copy()
        first[groups.starts] = _UFUNCS[op](before.view(real), first[groups.starts])
        return np.asarray(_running_results(_UFUNCS[op], first, groups).view(values.dtype))
    return _counter_values(op, before, values, groups)


def _sums(combine: np.ufunc, inverse: np.ufunc, before: Array, values: Array, groups: _Groups) -> Array:
    """``_values_left`` of an operation with an inverse: one running sum over the elements of all places, from which the
    contribution of earlier places is subtracted."""
    sums = combine.accumulate(values, dtype=values.dtype)
    of_earlier_places = inverse(sums[groups.starts], values[groups.starts])
    return np.asarray(combine(sums, np.repeat(inverse(before, of_earlier_places), groups.sizes)))


def _running_results(combine: np.ufunc, values: Array, groups: _Groups) -> Array:
    """By rank: an element combined with all earlier elements of its place (a parallel scan: every pass doubles how many
    are combined)."""
    ordinals, step, largest = groups.ordinals, 1, int(groups.sizes.max())
    while step < largest:
        both = combine(values[step:], values[:-step])
        values = np.concatenate((values[:step], np.where(ordinals[step:] >= step, both, values[step:])))
        step *= 2
    return values


def _counter_values(op: str, before: Array, values: Array, groups: _Groups) -> Array | None:
    """``_values_left`` of inc and dec, if all elements of a place have the same bound; else None."""
    bounds = values[groups.starts]
    if (np.repeat(bounds, groups.sizes) != values).any():
        return None
    # Both count modulo bound + 1. After a value beyond the bound comes the value that follows the cycle's last one.
    cycle = np.uint64(1) + bounds
    if not cycle.all():
        return None
    last = bounds if op == "inc" else np.zeros_like(bounds)
    start = np.where(before > bounds, last, before).astype(np.uint64)
    steps = (groups.ordinals + 1).astype(np.uint64)
    start, cycle = np.repeat(start, groups.sizes), np.repeat(cycle, groups.sizes)
    steps %= cycle
    return np.asarray(((start + (steps if op == "inc" else cycle - steps)) % cycle).astype(values.dtype))


def _swap(view: Array, indices: Array, groups: _Groups, value: Array, compare: Array) -> tuple[Array, bool]:
    """``modify`` of cas. Each round executes the elements of every place up to the next one that swaps."""
    values, compares = value[groups.order], compare[groups.order]
    # By rank: which of ``groups.places`` it is.
    place_of_rank = np.repeat(np.arange(len(groups.starts)), groups.sizes)
    # By place: the value that the next element finds.
    current = view[groups.places]
    swaps = values != compares
    found = np.empty_like(values)
    changed = False
    # Ranks of elements that have not been executed, in ascending order.
    pending = np.arange(len(indices))
    for _ in range(_SWAP_ROUNDS):
        place = place_of_rank[pending]
        hits = np.flatnonzero(swaps[pending] & (compares[pending] == current[place]))
        # Keep the first hit of each place; hits are in the order of places.
        hits = hits[np.flatnonzero(np.diff(place[hits], prepend=-1))]
        end = np.full(len(current), len(indices))
        end[place[hits]] = pending[hits]
        executed = pending <= end[place]
        found[pending[executed]] = current[place[executed]]
        current[place[hits]] = values[pending[hits]]
        changed = changed or bool(hits.size)
        pending = pending[~executed]
        if not pending.size:
            break
    view[groups.places] = current
    old = np.empty_like(values)
    old[groups.order] = found
    if pending.size:
        rest = np.sort(groups.order[pending])
        old[rest], _ = _modify_in_rounds(
            "cas", "b32", view, indices[rest], value[rest], compare[rest], _Groups(indices[rest])
        )
    return old, changed
