"""Maps types of PTX to those of NumPy: U and S by the bits of an unsigned or signed integer, F by a float's name."""

from __future__ import annotations

from typing import Any

import numpy as np

U: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
S: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
F: dict[str, Any] = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


def type_bits(kind: str) -> int:
    """Bits of a scalar PTX type."""
    return 16 if kind == "bf16" else int(kind[1:])
