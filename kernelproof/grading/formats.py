"""Defines the number types of buffers: how bits are converted to fp64 or int64 and back, and how values round."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernelproof.checking.plan import DTYPES
from kernelproof.emulator.arithmetic import bf16_to_f32, f64_to_bf16

Array = NDArray[Any]


class Format(NamedTuple):
    """A number type.

    ``dtype`` is the NumPy type that holds the bits. For floats, ``significand`` is the number of its bits (0 for
    integers) and ``least_exponent`` the exponent of the smallest normal number.
    """

    name: str
    dtype: np.dtype[Any]
    significand: int = 0
    least_exponent: int = 0

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point type."""
        return self.significand > 0

    @property
    def unit_roundoff(self) -> float:
        """The largest relative error of rounding to nearest; 0 for integers."""
        return 2.0**-self.significand if self.significand else 0.0

    @property
    def least_error(self) -> float:
        """The largest absolute error of rounding to a subnormal number; 0 for integers."""
        return 2.0 ** (self.least_exponent - self.significand) if self.significand else 0.0

    def values(self, bits: Array) -> Array:
        """Convert an array of bits to numbers: fp64 for floats, int64 for integers, and uint64 for u64."""
        if self.name == "bf16":
            return bf16_to_f32(np.ascontiguousarray(bits)).astype(np.float64)
        return bits.astype(np.float64 if self.is_float else np.uint64 if self.name == "u64" else np.int64)

    def bits(self, values: Array) -> Array:
        """Convert numbers to bits by rounding to nearest; overflow gives infinities."""
        with np.errstate(over="ignore", invalid="ignore"):
            if self.name == "bf16":
                rounded: Array = f64_to_bf16(np.ascontiguousarray(values, np.float64))
                return rounded.reshape(np.shape(values)).astype(self.dtype)
            return np.asarray(values).astype(self.dtype)


# For each float type: the bits of its significand, and the exponent of its smallest normal number.
_FLOATS = {"f16": (11, -14), "bf16": (8, -126), "f32": (24, -126), "f64": (53, -1022)}
FORMATS = {name: Format(name, np.dtype(dtype), *_FLOATS.get(name, ())) for name, dtype in DTYPES.items()}
