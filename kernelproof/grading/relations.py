"""Relations between calls: how outputs follow when inputs are permuted, scaled, repeated or added.

Nobody states them. Each entry of ``TABLE`` proposes changes of the inputs, by the names of the shape that are extents
of buffers, and the reference decides which of them hold for a problem: permuting the rows of A permutes those of a
product, permuting k changes nothing, a row of a softmax may be repeated, a convolution is linear in each of its inputs.
A kernel has to keep what its reference keeps, whatever the user's tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from kernelproof.grading import tolerance
from kernelproof.grading.answers import CheckedCall, Criteria
from kernelproof.grading.contract import ContractBuffer
from kernelproof.grading.expressions import Shape
from kernelproof.grading.formats import Array
from kernelproof.ground.errors import WrongInput

# A reference keeps a relation if it does so within this share of its largest result. It computes in fp64.
EXACT_SHARE = 1e-10
# The outputs keep it if they differ by at most this many times the largest error of that call whose errors are smaller.
MOST_OWN_ERRORS = 16.0
# Outputs of fewer elements do not show how large errors usually are.
LEAST_ELEMENTS = 16
POWERS = (0, 1, -1, 2, -2)  # to which an output may follow the scale of an input

# A change of an array, for a buffer of the contract.
Step = Callable[[ContractBuffer, Array], Array]


class Relation(NamedTuple):
    """Changed inputs, as bits, and how the outputs follow from those of the unchanged ones. ``kind`` of the base says
    with which draw they begin."""

    name: str
    bits: dict[str, Array]
    follow: Step


class Broken(NamedTuple):
    """An output that does not keep a relation: how many elements differ, the first one, by how much, and what rounding
    explains."""

    output: str
    elements: int
    first: tuple[int, ...]
    difference: float
    allowed: float


def that_hold(task: Criteria, base: CheckedCall, shape: Shape, rng: np.random.Generator) -> Iterator[Relation]:
    """The relations of the table that the reference keeps, for the inputs of a call."""
    proposals = _Proposals(task, base, shape, rng)
    for kind, propose in TABLE:
        if kind == base.kind:
            yield from propose(proposals)


def broken(
    base: CheckedCall, answer: CheckedCall, relation: Relation, buffers: Mapping[str, ContractBuffer]
) -> Iterator[Broken]:
    """Finds the outputs of a call that differ from what the relation and the base's outputs demand, beyond rounding."""
    for name, item in answer.expected.items():
        before = base.expected[name]
        old, new = (item.format.values(call.outputs[name]) for call in (base.call, answer.call))
        if old.size < LEAST_ELEMENTS or not (base.is_right and answer.is_right):
            continue
        with np.errstate(invalid="ignore"):
            followed = relation.follow(buffers[name], np.abs(old - before.values))
            own = min(_largest(followed), _largest(new - item.values))
            allowed = 2 * tolerance.noise(item) + MOST_OWN_ERRORS * own
            difference = np.abs(new - relation.follow(buffers[name], old))
        differs = np.isfinite(difference) & (difference > allowed)
        if differs.any():
            first = tuple(int(i) for i in np.argwhere(differs)[0])
            yield Broken(name, int(differs.sum()), first, float(difference[first]), float(allowed[first]))


def _largest(errors: Array) -> float:
    return float(np.abs(errors[np.isfinite(errors)]).max(initial=0.0))


class _Proposals:
    """Proposes changes of a call's inputs, and asks the reference which of them hold."""

    def __init__(self, task: Criteria, base: CheckedCall, shape: Shape, rng: np.random.Generator) -> None:
        self.task, self.base, self.shape, self.rng = task, base, shape, rng
        self.inputs, self.outputs = task.contract.inputs, task.contract.outputs
        self.results = {name: item.values for name, item in base.expected.items()}

    def changed(self, step: Step) -> dict[str, Array]:
        """The base's inputs after a change, as bits. Floats must keep all of their bits."""
        return {item.name: step(item, self.base.bits[item.name]) for item in self.inputs}

    def holds(self, change: Step, follow: Step) -> bool:
        """Whether the reference keeps a relation."""
        bits = self.changed(change)
        values = {item.name: item.format.values(bits[item.name]) for item in self.inputs}
        try:
            results = self.task.reference(values, self.shape)
        except WrongInput:
            return False
        for item, result in zip(self.outputs, results, strict=True):
            wanted = follow(item, self.results[item.name])
            finite = np.isfinite(wanted)
            largest = np.abs(wanted[finite]).max(initial=0.0)
            if not finite.all() or not np.all(np.abs(result - wanted) <= EXACT_SHARE * largest):
                return False
        return True

    def permuted(self) -> Iterator[Relation]:
        """All axes whose order does not matter, or that outputs follow: reversed, and in a drawn order."""
        for how in ("reversed", "permuted"):
            orders: dict[str, Array] = {}
            for name in self.shape:
                size = self.shape[name]
                order = np.arange(size)[::-1] if how == "reversed" else self.rng.permutation(size)
                step = _along({name: order})
                if size > 1 and any(name in _axes(item) for item in self.inputs) and self.holds(step, step):
                    orders[name] = order
            if orders:
                step = _along(orders)
                yield Relation(f"{how} along {', '.join(orders)}", self.changed(step), step)

    def repeated(self) -> Iterator[Relation]:
        """A row in place of another one, along all axes whose rows are independent."""
        sources: dict[str, Array] = {}
        for name, (first, second) in self._pairs():
            source = np.arange(self.shape[name])
            source[second] = first
            step = _along({name: source})
            if self.holds(step, step):
                sources[name] = source
        if sources:
            step = _along(sources)
            yield Relation(f"repeated along {', '.join(sources)}", self.changed(step), step)

    def scaled(self) -> Iterator[Relation]:
        """Each input to which some power of the outputs is proportional, times two or a half; else all of them."""
        floats = [item.name for item in self.inputs if item.format.is_float and not item.low]
        factors: dict[str, float] = {}
        total = 1.0
        for names in [*([name] for name in floats), floats]:
            factor = 2.0 if len(factors) % 2 == 0 else 0.5
            change = dict.fromkeys(names, factor)
            powers = (power for power in POWERS if self.holds(_times(change), _all_times(factor**power)))
            if not factors.keys() & set(names) and (power := next(powers, None)) is not None:
                factors |= change
                total *= factor**power
        if factors:
            yield Relation(f"scaled {', '.join(factors)}", self.changed(_times(factors)), _all_times(total))

    def added(self) -> Iterator[Relation]:
        """One row added to another one, of whole numbers, whose sums are exact, along the first axis that allows it."""
        for name, (first, second) in self._pairs():
            on_outputs = _adding(name, first, second, as_bits=False)
            if self.holds(change := _adding(name, first, second, as_bits=True), on_outputs):
                yield Relation(f"rows added along {name}", self.changed(change), on_outputs)
                return

    def _pairs(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yields each axis that an input has, with two indices along it that are drawn."""
        for name, size in self.shape.items():
            if size > 1 and any(name in _axes(item) for item in self.inputs):
                first, second = self.rng.choice(size, 2, replace=False)
                yield name, (int(first), int(second))


# The draw with which a relation begins, and what proposes it.
TABLE: tuple[tuple[str, Callable[[_Proposals], Iterator[Relation]]], ...] = (
    ("normal", _Proposals.permuted), ("normal", _Proposals.scaled), ("normal", _Proposals.repeated),
    ("integers", _Proposals.added),
)  # fmt: skip


def _axes(item: ContractBuffer) -> dict[str, int]:
    """The axes of a buffer whose extent is a name of the shape. A name that is there twice is left out."""
    parts = [part.strip() for part in item.extents.split(",")]
    return {part: number for number, part in enumerate(parts) if part.isidentifier() and parts.count(part) == 1}


def _along(orders: Mapping[str, Array]) -> Step:
    def step(item: ContractBuffer, array: Array) -> Array:
        for name, axis in _axes(item).items():
            if name in orders:
                array = np.take(array, orders[name], axis)
        return array

    return step


def _times(factors: Mapping[str, float]) -> Step:
    def step(item: ContractBuffer, bits: Array) -> Array:
        factor = factors.get(item.name)
        return bits if factor is None else item.format.bits(item.format.values(bits) * factor)

    return step


def _all_times(factor: float) -> Step:
    return lambda _, array: array * factor


def _adding(name: str, first: int, second: int, as_bits: bool) -> Step:
    """Add row ``first`` to row ``second`` of every buffer that has the axis ``name``."""

    def step(item: ContractBuffer, array: Array) -> Array:
        axis = _axes(item).get(name)
        if axis is None:
            return array
        rows = np.moveaxis((item.format.values(array) if as_bits else array).copy(), axis, 0)
        rows[second] += rows[first]
        out = np.moveaxis(rows, 0, axis)
        return item.format.bits(out) if as_bits else out

    return step
