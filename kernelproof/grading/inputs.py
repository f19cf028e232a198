"""Draws the input values of a grade, and changes single elements of them, which must change the outputs.

The kinds of values are:

- ``normal``: normally distributed numbers; ``adversarial``: normal numbers of many magnitudes;
- ``integers`` from -2 to 2, ``binary`` (0 and 1), ``zeros`` and ``ones``: sums of products are exact;
- ``zero rows`` (zeros at the start, a row and a column of zeros), ``equal rows``, ``identity`` (in some inputs), and
  ``constants`` (with which the kernels compare loaded values): normal numbers with such values planted in them, for
  which a source may have a shortcut;
- ``IN_TURN``: several constants in all elements, one after the other, for conditions on neighbouring elements;
- ``DIRECTED``: normal numbers with a constant in half of the elements, in the other half, or in most, or with numbers
  near it in all elements. These are for comparisons that had the same result on all other kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kernelproof.grading import expressions
from kernelproof.grading.contract import Contract, ContractBuffer
from kernelproof.grading.expressions import Shape
from kernelproof.grading.formats import Array, Format

KINDS = (
    "normal", "integers", "binary", "adversarial", "zeros", "ones", "zero rows", "equal rows", "identity", "constants",
)  # fmt: skip
IN_TURN = "constants in turn"
HALVES = ("constants in one half", "constants in the other half")
# Numbers slightly above the constant in one half and below it in the other, for comparisons by order.
SIDES = ("numbers above and below constants", "numbers below and above constants")
MOST = "constants in most"
DIRECTED = (*HALVES, *SIDES, MOST)
SIDE = 1 / 64  # relative distance of the numbers of ``SIDES``, which every type distinguishes
MOST_SHARE = 0.9  # share of the elements in "most", so that two conditions are likely to hold at the same time
# Kinds for which an operation may be undefined, such as a division by zero or a logarithm.
SPECIAL = ("adversarial", "zeros", "ones", "zero rows", "equal rows", "identity", "constants", IN_TURN, *DIRECTED)
# Kinds for which a kernel may not take fewer instructions than for normal numbers.
SHORTCUTS = ("zeros", "ones", "zero rows", "identity")
# Kinds for which sums of products are exact.
EXACT = ("integers", "binary", "zeros", "ones")
# Factors for the value of a changed element. They are tried one after the other until the reference changes visibly:
# the other sign in case the function saturates, larger values in case the tolerance is loose.
FACTORS = (1.0, -1.0, 64.0, -64.0, 1024.0)
INTEGER_LIMIT = 100  # integer inputs without a range are drawn from 0 to this, excluded
START_ELEMENTS = 8  # how many elements at the start of an input are planted, since a source may look at them
IDENTITY_PROBABILITY = 0.7  # of an input of the kind "identity"; products of identities alone would hide errors
PLANTED_PART = 16  # in inputs of the kind "constants", one of this many elements gets a constant
# Powers of two by which "adversarial" numbers are multiplied: the least, and the largest for f16 (whose sums of
# products would overflow) and for other types.
LEAST_POWER, LARGEST_POWER_F16, LARGEST_POWER = -6, 3, 4
# Changes of single elements: how much is added to an integer, and the magnitude that a float gets. Normal numbers are
# much smaller, so the change is visible in a sum of them.
INTEGER_STEP, CHANGED_MAGNITUDE = 17, 24.0


def draw(
    contract: Contract, kind: str, shape: Shape, rng: np.random.Generator, constants: Sequence[float] = ()
) -> dict[str, Array]:
    """Draw values of a kind for every input and return their bits. ``constants``: those to plant, for kinds with
    constants."""
    out = {}
    for item in contract.inputs:
        values = _values(item, kind, shape, rng)
        if item.format.is_float and not item.low:
            values = planted(values, kind, rng, constants)
        out[item.name] = item.format.bits(values)
    return out


def planted(values: Array, kind: str, rng: np.random.Generator, constants: Sequence[float] = ()) -> Array:
    """The values of an input with those of its kind planted in them. Changes ``values``."""
    match kind:
        case "zero rows":
            rows = values.reshape(-1, values.shape[-1])
            rows[rng.integers(len(rows))] = 0
            rows[:, rng.integers(rows.shape[1])] = 0
            values.reshape(-1)[:START_ELEMENTS] = 0
        case "equal rows" if values.ndim > 1:
            values[...] = values[:1]
        case "identity" if values.ndim > 1 and rng.random() < IDENTITY_PROBABILITY:
            values = np.broadcast_to(np.eye(*values.shape[-2:]), values.shape).copy()
        case "constants":
            flat = values.reshape(-1)
            for number, place in enumerate(rng.integers(0, flat.size, max(1, flat.size // PLANTED_PART))):
                flat[place] = constants[number % len(constants)]
            flat[:START_ELEMENTS] = flat[-1] = constants[0]
        case _ if kind == IN_TURN:
            values = np.resize(constants, values.shape)
        case _ if kind == MOST:
            values[rng.random(values.shape) < MOST_SHARE] = constants[0]
        case _ if kind in HALVES:
            values[half_of(values, kind == HALVES[0])] = constants[0]
        case _ if kind in SIDES:
            step = abs(constants[0]) * SIDE
            values = constants[0] + np.where(half_of(values, kind == SIDES[0]), step, -step)
    return values


def half_of(values: Array, is_first: bool) -> Array:
    """A mask of a random half of all elements or, if ``is_first`` is False, of all others: the same ones in every call
    for arrays of a shape."""
    return np.asarray((np.random.default_rng(values.size).random(values.shape) < 0.5) == is_first)


def _values(item: ContractBuffer, kind: str, shape: Shape, rng: np.random.Generator) -> Array:
    """Random values of an input as fp64 or int64, in the shape of its buffer: within its range, or else as the kind
    demands."""
    extents = item.shape(shape)
    if item.low:
        low, high = expressions.value(item.low, shape), expressions.value(item.high, shape)
        if not item.format.is_float:
            return rng.integers(low, high, extents)
        return np.clip(rng.uniform(low, high, extents), *_ends(item.format, low, high))
    match kind:
        case "zeros" | "ones":
            return np.full(extents, float(kind == "ones"))
        case "binary":
            return rng.integers(0, 2, extents).astype(np.float64)
        case "integers":
            return rng.integers(0 if item.format.name[0] == "u" else -2, 3, extents).astype(np.float64)
    if not item.format.is_float:
        return rng.integers(0, INTEGER_LIMIT, extents)
    normal: Array = rng.standard_normal(extents)
    if kind == "adversarial":
        largest = LARGEST_POWER_F16 if item.format.name == "f16" else LARGEST_POWER
        normal = normal * 2.0 ** rng.integers(LEAST_POWER, largest + 1, extents)
    return normal


def _ends(number: Format, low: float, high: float) -> tuple[float, float]:
    """The least number of a type that is at least ``low``, and the largest one below ``high``. Values between them stay
    in the range when they are rounded."""

    def rounded(bound: float, up: bool) -> float:
        """The bound, rounded to the type: up to the next number, or down to the number before the bound."""
        bits = number.bits(np.array([bound])).view(f"i{number.dtype.itemsize}")
        value = float(number.values(bits.view(number.dtype))[0])
        if value >= bound if up else value < bound:
            return value
        # Read as an integer, the bits of a float grow with its magnitude: adding 1 goes away from zero. The neighbours
        # of zero are the smallest subnormal numbers, whose bits are 1, and 1 with the sign bit.
        step = (1 if (value > 0) == up else -1) if value else (1 if up else 1 + (-1 << 8 * bits.itemsize - 1))
        bits = bits + np.array(step, bits.dtype) if value else np.array([step], bits.dtype)
        return float(number.values(bits.view(number.dtype))[0])

    return rounded(low, True), rounded(high, False)


class InputChange(NamedTuple):
    """A change of one element: its buffer, its index, and the new value."""

    buffer: str
    place: tuple[int, ...]
    value: float


def changes(
    contract: Contract, bits: Mapping[str, Array], shape: Shape, rng: np.random.Generator, places: int
) -> list[InputChange]:
    """Changes to try one at a time: the last, the first, and random elements of each input, ``places`` in all."""
    out = []
    for item in contract.inputs:
        size = int(np.prod(item.shape(shape)))
        indices = [size - 1, 0, *(int(n) for n in rng.integers(0, size, max(0, places - 2)))][:places]
        for flat in dict.fromkeys(indices):
            index = tuple(int(i) for i in np.unravel_index(flat, item.shape(shape)))
            before = float(item.format.values(bits[item.name])[index])
            out.append(InputChange(item.name, index, _other_value(item, before, shape, rng)))
    return out


def _other_value(item: ContractBuffer, before: float, shape: Shape, rng: np.random.Generator) -> float:
    """Another value for an element: within its range if it has one, else large enough to be visible in a sum."""
    if item.low:
        low, high = expressions.value(item.low, shape), expressions.value(item.high, shape)
        if item.format.is_float:
            least, most = _ends(item.format, low, high)
            return least if before > (low + high) / 2 else most
        # A random step of 1 to high - low - 1, around the range's end: it never leads back to the old value.
        return float(low + (int(before) - low + 1 + int(rng.integers(0, max(1, high - low - 1)))) % (high - low))
    if not item.format.is_float:
        return before + INTEGER_STEP
    return CHANGED_MAGNITUDE if before <= 0 else -CHANGED_MAGNITUDE


def changed(contract: Contract, bits: Mapping[str, Array], change: InputChange, factor: float) -> dict[str, Array]:
    """Copy inputs with one element changed. The new value is multiplied by ``factor`` only for floats without a
    range."""
    out = dict(bits)
    array = bits[change.buffer].copy()
    item = contract.buffers[change.buffer]
    value = factor * change.value if item.format.is_float and not item.low else change.value
    array[change.place] = item.format.bits(np.array(value))
    out[change.buffer] = array
    return out
