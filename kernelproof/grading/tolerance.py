"""How far an output may be from the reference, and the comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kernelproof.grading.expressions import Number, Shape, value
from kernelproof.grading.formats import Array, Format
from kernelproof.ground.element import F16, SINGLE_ERROR

# Default tolerances, relative to the value and to the output's root mean square. They leave room for another order of
# sums and for CUDA's fast functions, not for operands of fewer bits.
DEFAULTS = {"f64": 1e-11, "f32": 2e-5, "f16": 2.0**-10, "bf16": 2.0**-7}
# The unit roundoff of operands that a kernel may round to before it multiplies.
OPERANDS = {"tf32": 2.0**-11, "f16": 2.0**-11, "bf16": 2.0**-8}
SINGLE_EXACT = 1 << 24


@dataclass(frozen=True)
class Tolerance:
    """``terms``: each output is a sum of so many products (or a sum of so many inputs) and the reference is right for
    magnitudes too, ``reference(|a|, |b|) >= sum |a_i b_i|``: then whole numbers must be exact and others within the
    bound of rounding after every addition, as ``correctness.error_bound``. Otherwise ``relative`` to the value plus
    ``absolute`` in units of the output's root mean square, by default those of the output's type."""

    relative: float | None = None
    absolute: float | None = None
    terms: Number | None = None


@dataclass(frozen=True)
class Expected:
    """An output as the reference computes it: fp64 values, and the error allowed for each (0: bits must be equal).
    ``open``: any value is right where the reference is NaN, because it is not defined for special inputs."""

    values: Array
    allowed: Array
    format: Format
    exact: bool = False
    open: bool = False

    def wrong(self, bits: Array) -> Array:
        """Where an output differs by more than is allowed."""
        undefined = np.isnan(self.values) if self.open and self.format.is_float else np.zeros(bits.shape, bool)
        return self._wrong(bits) & ~undefined

    def _wrong(self, bits: Array) -> Array:
        values = self.format.values(bits)
        rounded = self.format.values(self.format.bits(self.values)) if self.format.is_float else self.values
        if self.exact or not self.format.is_float:
            return np.asarray((values != rounded) & ~(np.isnan(values) & np.isnan(rounded)))
        with np.errstate(invalid="ignore"):
            near = np.abs(values - self.values) <= self.allowed
            spill = np.abs(self.values) + self.allowed
        equal = (values == rounded) | (np.isnan(values) & np.isnan(rounded))
        # Close to the largest number of the type both the number and infinity are right.
        overflow = np.isinf(values) & np.isinf(self.format.values(self.format.bits(spill)))
        overflow &= np.sign(values) == np.sign(self.values)
        return np.asarray(~(near | equal | overflow))


@dataclass(frozen=True)
class Precision:
    """What a kernel may compute in: ``operands`` of multiplications and ``accumulator``, names of types."""

    operands: str
    accumulator: str

    @classmethod
    def of(cls, operands: str | None, accumulator: str | None, narrowest: Format | None) -> Precision:
        """The stated precision; by default the narrowest type of inputs and outputs, and sums in fp32 (fp64 for
        fp64)."""
        name = narrowest.name if narrowest is not None else "f32"
        return cls(operands or name, accumulator or ("f64" if name == "f64" else "f32"))

    def error(self, terms: int, magnitude: Array) -> Array:
        """Largest error from rounding operands and every sum, for sums of ``terms`` products with a total
        ``magnitude``."""
        error = terms * SINGLE_ERROR * magnitude
        if self.accumulator == "f16":
            error = error + -(-terms // 8) * F16.unit_roundoff * magnitude
        elif self.accumulator == "f64":
            error = terms * 2.0**-53 * magnitude
        rounded: Array = error + 2 * OPERANDS.get(self.operands, 0.0) * magnitude * 1.01
        return rounded


def expected(
    values: Array, magnitude: Array | None, output: Format, tolerance: Tolerance, precision: Precision, shape: Shape
) -> Expected:
    """What an output has to be. ``magnitude``: the reference of absolute values, where ``tolerance`` has terms."""
    if not output.is_float:
        return Expected(np.asarray(values), np.zeros(np.shape(values)), output, exact=True)
    values = np.asarray(values, np.float64)
    if magnitude is not None and tolerance.terms is not None:
        error = precision.error(int(value(tolerance.terms, shape)), np.asarray(magnitude, np.float64))
        allowed = error + output.unit_roundoff * (np.abs(values) + error) + output.least_error
        return Expected(values, allowed, output)
    default = DEFAULTS[output.name]
    relative = default if tolerance.relative is None else tolerance.relative
    absolute = default if tolerance.absolute is None else tolerance.absolute
    finite = values[np.isfinite(values)]
    scale = float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0
    with np.errstate(invalid="ignore"):
        allowed = relative * np.abs(values) + absolute * scale + output.least_error
    return Expected(values, allowed, output)


def noise(item: Expected) -> Array:
    """Error that rounding alone may cause in an output, whatever the tolerance."""
    return expected(item.values, None, item.format, Tolerance(), Precision("f32", "f32"), {}).allowed


def is_exact(bits: Mapping[str, Array], magnitude: Array, precision: Precision, output: Format) -> bool:
    """Are all sums of whole numbers exact in the accumulator, so that an output is the reference rounded once?"""
    limit = F16.exact if precision.accumulator == "f16" else SINGLE_EXACT
    integers = all(np.all(np.mod(array, 1) == 0) for array in bits.values() if array.dtype.kind == "f")
    return integers and output.is_float and bool(np.all(np.abs(magnitude) <= limit))
