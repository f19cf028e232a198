"""Checks relations between calls: how outputs must change when inputs are permuted, scaled, repeated or added.

For example, permuting the rows of A permutes those of a product, permuting k changes nothing, a row of a softmax may be
repeated, and a convolution is linear in each of its inputs. The user does not state relations. Each entry of ``TABLE``
proposes some along the axes of the buffers, and those that the reference satisfies are valid for the problem. A kernel
has to satisfy them as well, whatever the user's tolerance.
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

# The reference, which computes in fp64, satisfies a relation if it is off by at most this share of its largest result.
EXACT_SHARE = 1e-10
# Besides rounding, an output may be off by this many times the smaller of the two calls' largest errors.
MOST_OWN_ERRORS = 16.0
LEAST_ELEMENTS = 16  # smaller outputs are not judged, since they do not show how large errors usually are
POWERS = (0, 1, -1, 2, -2)  # an output may be proportional to one of these powers of an input

# A change of an array, for a buffer of the contract.
Step = Callable[[ContractBuffer, Array], Array]


class Relation(NamedTuple):
    """A change of the inputs, after which the outputs are known.

    ``bits``: the changed inputs. ``follow``: turns the outputs for the unchanged inputs into those for the changed
    ones.
    """

    name: str
    bits: dict[str, Array]
    follow: Step


class BrokenRelation(NamedTuple):
    """An output that does not satisfy a relation.

    ``elements``: how many differ. ``first``: the index of the first one, ``difference``: by how much it differs, and
    ``allowed``: the difference that rounding explains.
    """

    output: str
    elements: int
    first: tuple[int, ...]
    difference: float
    allowed: float


def valid_relations(
    criteria: Criteria, base: CheckedCall, shape: Shape, rng: np.random.Generator
) -> Iterator[Relation]:
    """The relations that the reference satisfies for the inputs of a call, among those that ``TABLE`` proposes."""
    proposals = _Proposals(criteria, base, shape, rng)
    for kind, propose in TABLE:
        if kind == base.kind:
            yield from propose(proposals)


def broken_relations(
    base: CheckedCall, answer: CheckedCall, relation: Relation, buffers: Mapping[str, ContractBuffer]
) -> Iterator[BrokenRelation]:
    """Finds the outputs of the call ``answer`` that differ, by more than rounding, from what the relation demands.

    ``base``: the call with unchanged inputs. ``buffers``: those of the contract, by name. An output is skipped if it is
    small, or if one of the calls was not right.
    """
    for name, item in answer.expected.items():
        before = base.expected[name]
        old, new = (item.format.values(call.outputs[name]) for call in (base.call, answer.call))
        if old.size < LEAST_ELEMENTS or not (base.is_right and answer.is_right):
            continue
        # Errors move with the elements, so the base's errors are compared where the relation puts them.
        with np.errstate(invalid="ignore"):
            followed = relation.follow(buffers[name], np.abs(old - before.values))
            error = min(_largest_magnitude(followed), _largest_magnitude(new - item.values))
            allowed = 2 * tolerance.noise(item) + MOST_OWN_ERRORS * error  # both calls round
            difference = np.abs(new - relation.follow(buffers[name], old))
        differs = np.isfinite(difference) & (difference > allowed)
        if differs.any():
            first = tuple(int(i) for i in np.argwhere(differs)[0])
            yield BrokenRelation(name, int(differs.sum()), first, float(difference[first]), float(allowed[first]))


def _largest_magnitude(errors: Array) -> float:
    """The largest magnitude of the finite elements; 0 if there are none."""
    return float(np.abs(errors[np.isfinite(errors)]).max(initial=0.0))


class _Proposals:
    """Proposes changes of a call's inputs, and yields those for which the reference satisfies a relation."""

    def __init__(self, criteria: Criteria, base: CheckedCall, shape: Shape, rng: np.random.Generator) -> None:
        self.criteria, self.base, self.shape, self.rng = criteria, base, shape, rng
        self.inputs, self.outputs = criteria.contract.inputs, criteria.contract.outputs
        self.results = {name: item.values for name, item in base.expected.items()}

    def changed(self, step: Step) -> dict[str, Array]:
        """The bits of the base's inputs after a change. The change must be exact."""
        return {item.name: step(item, self.base.bits[item.name]) for item in self.inputs}

    def holds(self, change: Step, follow: Step) -> bool:
        """Whether the reference satisfies a relation: after ``change``, its results are those that ``follow`` gives."""
        bits = self.changed(change)
        values = {item.name: item.format.values(bits[item.name]) for item in self.inputs}
        try:
            results = self.criteria.reference(values, self.shape)
        except WrongInput:
            return False
        for item, result in zip(self.outputs, results, strict=True):
            expected = follow(item, self.results[item.name])
            finite = np.isfinite(expected)
            largest = np.abs(expected[finite]).max(initial=0.0)
            if not finite.all() or not np.all(np.abs(result - expected) <= EXACT_SHARE * largest):
                return False
        return True

    def permutations(self) -> Iterator[Relation]:
        """Permutes every axis along which a permutation of the inputs permutes the outputs alike or changes nothing.
        The order is first reversed, then random."""
        for kind in ("reversed", "permuted"):
            orders: dict[str, Array] = {}
            for name in self.shape:
                size = self.shape[name]
                order = np.arange(size)[::-1] if kind == "reversed" else self.rng.permutation(size)
                step = _with_reordered({name: order})
                if size > 1 and any(name in _axes(item) for item in self.inputs) and self.holds(step, step):
                    orders[name] = order
            if orders:
                step = _with_reordered(orders)
                yield Relation(f"{kind} along {', '.join(orders)}", self.changed(step), step)

    def repetitions(self) -> Iterator[Relation]:
        """Replaces a row by another one, along all axes whose rows are independent."""
        sources: dict[str, Array] = {}
        for name, (first, second) in self._pairs():
            source = np.arange(self.shape[name])
            source[second] = first
            step = _with_reordered({name: source})
            if self.holds(step, step):
                sources[name] = source
        if sources:
            step = _with_reordered(sources)
            yield Relation(f"repeated along {', '.join(sources)}", self.changed(step), step)

    def scalings(self) -> Iterator[Relation]:
        """Multiplies each input by 2 or 1/2 if the outputs are proportional to a power of it. If that is true of no
        single input, all inputs are multiplied together."""
        floats = [item.name for item in self.inputs if item.format.is_float and not item.low]
        factors: dict[str, float] = {}
        total = 1.0
        for names in [*([name] for name in floats), floats]:
            factor = 2.0 if len(factors) % 2 == 0 else 0.5
            change = dict.fromkeys(names, factor)
            powers = (
                power
                for power in POWERS
                if self.holds(_with_multiplied(change), _with_outputs_multiplied(factor**power))
            )
            if not factors.keys() & set(names) and (power := next(powers, None)) is not None:
                factors |= change
                total *= factor**power
        if factors:
            yield Relation(
                f"scaled {', '.join(factors)}", self.changed(_with_multiplied(factors)), _with_outputs_multiplied(total)
            )

    def additions(self) -> Iterator[Relation]:
        """Adds a row to another one, along the first axis that allows it. The inputs are integers: sums are exact."""
        for name, (first, second) in self._pairs():
            on_outputs = _with_added_row(name, first, second, as_bits=False)
            if self.holds(change := _with_added_row(name, first, second, as_bits=True), on_outputs):
                yield Relation(f"rows added along {name}", self.changed(change), on_outputs)
                return

    def _pairs(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yields each axis that an input has, with two random indices along it."""
        for name, size in self.shape.items():
            if size > 1 and any(name in _axes(item) for item in self.inputs):
                first, second = self.rng.choice(size, 2, replace=False)
                yield name, (int(first), int(second))


# The kind of inputs that is changed, and the function that proposes the changes.
TABLE: tuple[tuple[str, Callable[[_Proposals], Iterator[Relation]]], ...] = (
    ("normal", _Proposals.permutations), ("normal", _Proposals.scalings), ("normal", _Proposals.repetitions),
    ("integers", _Proposals.additions),
)  # fmt: skip


def _axes(item: ContractBuffer) -> dict[str, int]:
    """Name -> axis number, for the axes whose extent is a single name. Names that occur twice are left out."""
    parts = [part.strip() for part in item.extents.split(",")]
    return {part: number for number, part in enumerate(parts) if part.isidentifier() and parts.count(part) == 1}


def _with_reordered(orders: Mapping[str, Array]) -> Step:
    """A step that takes the elements along some axes in other orders, given as indices."""

    def step(item: ContractBuffer, array: Array) -> Array:
        for name, axis in _axes(item).items():
            if name in orders:
                array = np.take(array, orders[name], axis)
        return array

    return step


def _with_multiplied(factors: Mapping[str, float]) -> Step:
    """A step that multiplies buffers, given as bits, by factors."""

    def step(item: ContractBuffer, bits: Array) -> Array:
        factor = factors.get(item.name)
        return bits if factor is None else item.format.bits(item.format.values(bits) * factor)

    return step


def _with_outputs_multiplied(factor: float) -> Step:
    """A step that multiplies every array, given as numbers, by a factor."""
    return lambda _, array: array * factor


def _with_added_row(name: str, first: int, second: int, as_bits: bool) -> Step:
    """A step that adds row ``first`` to row ``second`` of every buffer with the axis ``name``."""

    def step(item: ContractBuffer, array: Array) -> Array:
        axis = _axes(item).get(name)
        if axis is None:
            return array
        rows = np.moveaxis((item.format.values(array) if as_bits else array).copy(), axis, 0)
        rows[second] += rows[first]
        out = np.moveaxis(rows, 0, axis)
        return item.format.bits(out) if as_bits else out

    return step
