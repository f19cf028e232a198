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
    acquire, release), as numbers of ``state.scopes``. ``returns``: something uses the old value."""

    op: str
    kind: str
    space: str
    read: int
    write: int
    returns: bool = True


# Operations that are one NumPy function on integers. Of these only addition works on floats, too.
_SIMPLE: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
# Of these, the ones that another function takes back.
_INVERSE: dict[str, np.ufunc] = {"add": np.subtract, "xor": np.bitwise_xor}
_REALS = frozenset(("f32", "f64"))
_INTEGERS = frozenset(("u32", "s32", "b32", "u64", "s64", "b64"))
# Rounds in which compare-and-swaps of one place are executed up to the next one that swaps. Lanes of a loop expect the
# same value, so that few of them swap; what is left after these rounds goes turn by turn.
_SWAP_ROUNDS = 8


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
        if flags.flags_are_read and (flags.active or (form.read | form.write) & ORDERS):
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
        it as it is. Such a read-modify-write may come right after the write of its value."""
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
    """Elements of an atomic, sorted by place and then by lane. ``order``: the element at each rank. ``places``: the
    places. ``starts``: the rank at which the elements of a place begin. ``sizes``: how many elements a place has."""

    def __init__(self, at: Array) -> None:
        self.order = _sorted(at)
        places = at[self.order]
        self.starts: Array = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
        self.sizes: Array = np.diff(self.starts, append=len(at))
        self.places: Array = places[self.starts]

    @property
    def turn(self) -> Array:
        """By rank: how many elements of the same place come before."""
        return np.asarray(np.arange(len(self.order)) - np.repeat(self.starts, self.sizes))

    def turns(self) -> Iterator[Array]:
        """Yield elements turn by turn: within a turn all places differ, and elements of one place keep their order."""
        turn = self.turn
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
    if not returns and op in _SIMPLE and (kind in _INTEGERS or (op == "add" and kind in _REALS)):
        return value, _modify_in_place(op, kind, view, at, value)
    groups = _Groups(at)
    # All places differ, so the order of lanes does not matter.
    if len(groups.starts) == len(at):
        old = view[at]
        new = _combined(op, kind, old, value, compare)
        view[at] = new
        return old, bool((new != old).any())
    before, values = view[groups.places], value[groups.order]
    if op == "cas":
        assert compare is not None
        return _swap(view, at, groups, value, compare)
    left = _left_behind(op, kind, before, values, groups)
    if left is None:
        return _modify_by_turns(op, kind, view, at, value, compare, groups)
    # A lane finds what the lane before it has left.
    found = np.concatenate((left[:1], left[:-1]))
    found[groups.starts] = before
    view[groups.places] = left[groups.starts + groups.sizes - 1]
    old = np.empty_like(values)
    old[groups.order] = found
    return old, bool((left != found).any())


def _modify_in_place(op: str, kind: str, view: Array, at: Array, value: Array) -> bool:
    """Atomics whose old values nobody needs; returns whether anything may have changed."""
    real = F[kind] if kind in _REALS else S[8 * value.itemsize] if kind[0] == "s" else value.dtype
    before = None if op in _INVERSE else view[at]
    _SIMPLE[op].at(view.view(real), at, value.view(real))
    return bool(value.any() if before is None else (view[at] != before).any())


def _modify_by_turns(
    op: str, kind: str, view: Array, at: Array, value: Array, compare: Array | None, groups: _Groups
) -> tuple[Array, bool]:
    """``modify`` for any operation, one lane of each place at a time."""
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


def _left_behind(op: str, kind: str, before: Array, values: Array, groups: _Groups) -> Array | None:
    """By rank: what an element leaves at its place, if no loop over lanes is needed to know it. ``before``: what the
    places held. ``values``: the operands, by rank."""
    if op == "exch":
        return values
    if kind not in _INTEGERS:
        return None
    if op in _INVERSE:
        return _sums(_SIMPLE[op], _INVERSE[op], before, values, groups)
    if op in _SIMPLE:
        real = S[8 * values.itemsize] if kind[0] == "s" else values.dtype
        first = values.view(real).copy()
        first[groups.starts] = _SIMPLE[op](before.view(real), first[groups.starts])
        return np.asarray(_running(_SIMPLE[op], first, groups).view(values.dtype))
    return _counts(op, before, values, groups)


def _sums(combine: np.ufunc, take_back: np.ufunc, before: Array, values: Array, groups: _Groups) -> Array:
    """``_left_behind`` of an operation with an inverse: one running sum over all places, of which what earlier places
    contributed is taken back."""
    sums = combine.accumulate(values, dtype=values.dtype)
    ahead = take_back(sums[groups.starts], values[groups.starts])
    return np.asarray(combine(sums, np.repeat(take_back(before, ahead), groups.sizes)))


def _running(combine: np.ufunc, values: Array, groups: _Groups) -> Array:
    """By rank: the combination of an element and all elements of its place before it. Every pass doubles how many are
    combined."""
    turn, step, most = groups.turn, 1, int(groups.sizes.max())
    while step < most:
        both = combine(values[step:], values[:-step])
        values = np.concatenate((values[:step], np.where(turn[step:] >= step, both, values[step:])))
        step *= 2
    return values


def _counts(op: str, before: Array, values: Array, groups: _Groups) -> Array | None:
    """``_left_behind`` of inc and dec, if all elements of a place have one bound."""
    bounds = values[groups.starts]
    if (np.repeat(bounds, groups.sizes) != values).any():
        return None
    # Both count modulo bound + 1. A value beyond the bound is followed by the one that follows the last of the cycle.
    cycle = np.uint64(1) + bounds
    if not cycle.all():
        return None
    last = bounds if op == "inc" else np.zeros_like(bounds)
    start = np.where(before > bounds, last, before).astype(np.uint64)
    moved = (groups.turn + 1).astype(np.uint64)
    start, cycle = np.repeat(start, groups.sizes), np.repeat(cycle, groups.sizes)
    moved %= cycle
    return np.asarray(((start + (moved if op == "inc" else cycle - moved)) % cycle).astype(values.dtype))


def _swap(view: Array, at: Array, groups: _Groups, value: Array, compare: Array) -> tuple[Array, bool]:
    """Compare-and-swaps. Each round executes, of every place, the elements up to the next one that swaps."""
    values, compares = value[groups.order], compare[groups.order]
    number = np.repeat(np.arange(len(groups.starts)), groups.sizes)
    now = view[groups.places]
    swaps = values != compares
    found = np.empty_like(values)
    changed = False
    # Ranks of elements that have not been executed, in ascending order.
    todo = np.arange(len(at))
    for _ in range(_SWAP_ROUNDS):
        place = number[todo]
        hits = np.flatnonzero(swaps[todo] & (compares[todo] == now[place]))
        # Of each place the first: hits are in the order of places.
        hits = hits[np.flatnonzero(np.diff(place[hits], prepend=-1))]
        end = np.full(len(now), len(at))
        end[place[hits]] = todo[hits]
        executed = todo <= end[place]
        found[todo[executed]] = now[place[executed]]
        now[place[hits]] = values[todo[hits]]
        changed = changed or bool(hits.size)
        todo = todo[~executed]
        if not todo.size:
            break
    view[groups.places] = now
    old = np.empty_like(values)
    old[groups.order] = found
    if todo.size:
        rest = np.sort(groups.order[todo])
        old[rest], _ = _modify_by_turns("cas", "b32", view, at[rest], value[rest], compare[rest], _Groups(at[rest]))
    return old, changed
