"""Decides how far an output may differ from the reference, and finds the elements that differ by more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kernelproof.grading.expressions import Number, Shape, value
from kernelproof.grading.formats import Array, Format
from kernelproof.ground.element import F16, SINGLE_ERROR

# Default tolerances, relative to the value and to the output's root mean square. They allow another order of sums and
# CUDA's fast functions, but no operands with fewer bits.
DEFAULTS = {"f64": 1e-11, "f32": 2e-5, "f16": 2.0**-10, "bf16": 2.0**-7}
# The unit roundoff of the types to which a kernel may round operands before it multiplies.
OPERAND_ROUNDOFF = {"tf32": 2.0**-11, "f16": 2.0**-11, "bf16": 2.0**-8}
SINGLE_EXACT = 1 << 24  # fp32 represents all integers up to this one


@dataclass(frozen=True)
class Tolerance:
    """How much an output may differ from the reference.

    If ``terms`` is given, each output is a sum of that many products or inputs. Called on magnitudes, the reference
    must then bound the sum of their magnitudes: ``reference(|a|, |b|) >= sum |a_i b_i|``. Results on whole numbers must
    be exact, and others must be within the bound for rounding after every addition.

    Without ``terms`` the allowed error is ``relative`` times the value plus ``absolute`` times the output's root mean
    square; the defaults depend on its type.
    """

    relative: float | None = None
    absolute: float | None = None
    terms: Number | None = None


@dataclass(frozen=True)
class Expected:
    """An output as the reference computes it, in fp64, and the allowed error of each element.

    ``usual`` estimates the root mean square of an honest error, if the output is a sum of products of normal numbers;
    otherwise it is None. If ``exact`` is True, the output must be the reference rounded once. If ``allows_undefined``
    is True, any value is right where the reference is NaN, because the operation may be undefined for special inputs.
    """

    values: Array
    allowed: Array
    format: Format
    exact: bool = False
    allows_undefined: bool = False
    usual: Array | None = None

    def wrong(self, bits: Array) -> Array:
        """A mask of the elements that differ by more than is allowed. ``bits``: the output as it is stored."""
        wrong = self._wrong(bits)
        return wrong & ~np.isnan(self.values) if self.allows_undefined and self.format.is_float else wrong

    def _wrong(self, bits: Array) -> Array:
        """A mask of the elements that differ by more than is allowed, also where the reference is undefined."""
        values = self.format.values(bits)
        rounded = self.format.values(self.format.bits(self.values)) if self.format.is_float else self.values
        if self.exact or not self.format.is_float:
            return np.asarray((values != rounded) & ~(np.isnan(values) & np.isnan(rounded)))
        with np.errstate(invalid="ignore"):
            near = np.abs(values - self.values) <= self.allowed
            farthest = np.abs(self.values) + self.allowed
        equal = (values == rounded) | (np.isnan(values) & np.isnan(rounded))
        # If the allowed range reaches beyond the largest number of the type, infinity of the same sign is right too.
        overflow = np.isinf(values) & np.isinf(self.format.values(self.format.bits(farthest)))
        overflow &= np.sign(values) == np.sign(self.values)
        return np.asarray(~(near | equal | overflow))


@dataclass(frozen=True)
class Precision:
    """The least precise types in which a kernel may multiply (``operands``) and sum (``accumulator``), by name.

    ``rounds_operands``: some input has more bits than ``operands``, so a kernel may round it.
    """

    operands: str
    accumulator: str
    rounds_operands: bool = True

    @classmethod
    def of(
        cls, operands: str | None, accumulator: str | None, narrowest: Format | None, inputs: Sequence[Format] = ()
    ) -> Precision:
        """The stated types. By default, operands have the narrowest type of inputs and outputs, and sums are in fp32,
        or in fp64 if that type is fp64. Operands are not rounded if no input has a wider type."""
        name = narrowest.name if narrowest is not None else "f32"
        operands = operands or name
        widest = min((item.unit_roundoff for item in inputs if item.is_float), default=0.0)
        rounds = widest < OPERAND_ROUNDOFF.get(operands, 0.0)
        return cls(operands, accumulator or ("f64" if name == "f64" else "f32"), rounds)

    def error(self, terms: int, magnitude: Array) -> Array:
        """The largest error from rounding operands and partial sums.

        Each output is a sum of ``terms`` products whose magnitudes sum to ``magnitude``. Tensor cores with an fp16
        accumulator round once per 8 products.
        """
        error = terms * SINGLE_ERROR * magnitude
        if self.accumulator == "f16":
            error = error + -(-terms // 8) * F16.unit_roundoff * magnitude
        elif self.accumulator == "f64":
            error = terms * 2.0**-53 * magnitude
        rounding = OPERAND_ROUNDOFF.get(self.operands, 0.0) if self.rounds_operands else 0.0
        # Both operands of a product are rounded; the factor 1.01 covers the product of their errors.
        rounded: Array = error + 2 * rounding * magnitude * 1.01
        return rounded

    def usual_error(self, magnitude: Array) -> Array:
        """An estimate of the root mean square of the error of a sum as in ``error``, for products of normal numbers.

        The error of n additions grows as sqrt(n) * sqrt(sum of the squared products). A product of two normal numbers
        has the mean square 1 and the mean magnitude 2 / pi. So the second root is pi / 2 * magnitude / sqrt(n), and the
        error is pi / 2, about 1.6, times magnitude times the unit roundoff. Operands of a narrower type add an error
        per product that is larger by three orders of magnitude.
        """
        unit = {"f64": 2.0**-53, "f16": F16.unit_roundoff}.get(self.accumulator, 2.0**-24)
        rounding = OPERAND_ROUNDOFF.get(self.operands, 0.0) if self.rounds_operands else 0.0
        usual: Array = (1.6 * unit + rounding) * magnitude
        return usual


def expected(
    values: Array, magnitude: Array | None, output: Format, tolerance: Tolerance, precision: Precision, shape: Shape
) -> Expected:
    """Combines reference values with the tolerance. ``magnitude`` is the reference of the inputs' absolute values; it
    is needed only if the tolerance has terms."""
    if not output.is_float:
        return Expected(np.asarray(values), np.zeros(np.shape(values)), output, exact=True)
    values = np.asarray(values, np.float64)
    if magnitude is not None and tolerance.terms is not None:
        magnitude = np.asarray(magnitude, np.float64)
        # The sum has the error of its precision, and is rounded once more to the output's type.
        error = precision.error(int(value(tolerance.terms, shape)), magnitude)
        usual = np.hypot(precision.usual_error(magnitude), output.unit_roundoff * np.abs(values)) + output.least_error
        allowed = error + output.unit_roundoff * (np.abs(values) + error) + output.least_error
        return Expected(values, allowed, output, usual=usual)
    default = DEFAULTS[output.name]
    relative = default if tolerance.relative is None else tolerance.relative
    absolute = default if tolerance.absolute is None else tolerance.absolute
    finite = values[np.isfinite(values)]
    scale = float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0
    with np.errstate(invalid="ignore"):
        allowed = relative * np.abs(values) + absolute * scale + output.least_error
    return Expected(values, allowed, output)


def noise(item: Expected) -> Array:
    """The error of each element that rounding alone may cause, whatever the user's tolerance."""
    return expected(item.values, None, item.format, Tolerance(), Precision("f32", "f32"), {}).allowed


def is_exact(inputs: Mapping[str, Array], magnitude: Array, precision: Precision, output: Format) -> bool:
    """Whether all inputs are whole numbers and all sums are exact in the accumulator.

    ``inputs``: the values of each buffer, in numbers of its type. ``magnitude``: the sum of the magnitudes of each
    output's terms. Then every order of sums gives the same result, and the output must be the reference rounded once.
    """
    limit = F16.exact if precision.accumulator == "f16" else SINGLE_EXACT
    integers = all(np.all(np.mod(array, 1) == 0) for array in inputs.values() if array.dtype.kind == "f")
    return integers and output.is_float and bool(np.all(np.abs(magnitude) <= limit))
