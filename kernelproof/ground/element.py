"""Defines the number types of A, B and D, with all facts about them: names, storage and precision.

D has the type of A and B, or is fp32. The type in which a kernel sums is ``Problem.acc``, which this module does not
define. To add an operand type, add an entry to ``ELEMENTS`` here and to ``kElements`` in ``launch.h``, and a name in
``cudal2gen.h``.
"""

from __future__ import annotations

import builtins
import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

ElementName = Literal["f16", "bf16"]  # of A and B
OutputName = Literal["same", "f32"]  # of D; same: as A and B

# Bytes that cp.async, a row of ldmatrix and a store move. Tensor maps need rows of a multiple of these.
VECTOR_BYTES = 16
SINGLE_ERROR = 2.0**-24  # the relative error of rounding to the nearest fp32 number
CHUNK_BYTES = 128  # a row of the widest swizzle
MMA_BYTES = 32  # bytes of a row of A or B in one MMA of any tensor core (PTX ISA: k16 of 16 bits, k32 of 8 bits)


@dataclass(frozen=True)
class Element:
    """A binary floating-point type in the form of IEEE 754.

    ``name``: its name in PTX; ``title``: its name in prose; ``dtype``: its name in torch and in NumPy, where it may
    come from ``ml_dtypes``. ``significand``: the number of its bits, including the implicit one; ``exponent``: the
    number of its bits. ``poisons`` are bit patterns, as signed integers, with which outputs are filled: a NaN that no
    arithmetic produces, and a number. ``canary`` is the bit pattern of another number, which fills the memory around
    outputs.
    """

    name: str
    title: str
    dtype: str
    significand: int
    exponent: int
    poisons: tuple[int, int]
    canary: int
    # C++ names: the header, the type, and the type of a pair; the functions that convert two floats or a float2 to a
    # pair, and a pair to a float2, which are "" if there are none.
    header: str
    cpp: str
    pair: str
    from_floats: str
    from_float2: str
    to_float2: str
    cuda_type: str  # cudaDataType, for cuBLAS
    heuristics: str  # its letter in nvMatmulHeuristics
    half_sums: bool = False  # whether tensor cores can also sum its products in fp16
    outputs: tuple[OutputName, ...] = ("same", "f32")  # types of D that kernels can store for such A and B
    tcgen05: int = 0  # its code in the instruction descriptor of tcgen05.mma kind::f16 (PTX ISA)

    @property
    def bytes(self) -> int:
        """Bytes of an element."""
        return (self.significand + self.exponent) // 8

    @property
    def vector(self) -> int:
        """Elements in ``VECTOR_BYTES``."""
        return VECTOR_BYTES // self.bytes

    @property
    def chunk(self) -> int:
        """Elements in a row of the widest swizzle."""
        return CHUNK_BYTES // self.bytes

    @property
    def mma_k(self) -> int:
        """The k of an MMA."""
        return MMA_BYTES // self.bytes

    @property
    def exact(self) -> int:
        """The integer up to which the type represents all integers."""
        return 1 << self.significand

    @property
    def unit_roundoff(self) -> float:
        """The largest relative error of rounding to nearest."""
        return 2.0**-self.significand

    @property
    def least_error(self) -> float:
        """The largest absolute error of rounding to a subnormal number: half of the smallest one."""
        return 2.0 ** (1 - self._bias - self.significand)

    @property
    def nan(self) -> int:
        """The bits of a quiet NaN that differs from the NaN that arithmetic produces."""
        infinity = ((1 << self.exponent) - 1) << (self.significand - 1)
        return infinity | 1 << (self.significand - 2) | 1

    @property
    def bits(self) -> str:
        """The name, in NumPy and torch, of the signed integer type with the same number of bits."""
        return f"int{8 * self.bytes}"

    @property
    def packed_pair(self) -> str:
        """The C++ type that holds a pair in registers before it is stored: one register for elements of 16 bits."""
        return "uint32_t" if self.bytes == 2 else self.pair

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The type in NumPy. Raises ImportError if it needs ``ml_dtypes``, which is not installed."""
        import numpy as np

        if not hasattr(np, self.dtype):
            import ml_dtypes  # noqa: F401  # the import adds its types to NumPy by name

        return np.dtype(self.dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type in torch. Raises ImportError without torch."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def spell(self, number: float) -> builtins.bytes:
        """The bytes in memory of a positive normal number, which the type must represent exactly."""
        # The fraction is at least 1/2, so its highest bit is the implicit one, which is not stored.
        fraction, exponent = math.frexp(number)
        stored = int(math.ldexp(fraction, self.significand)) - (1 << (self.significand - 1))
        return (stored | (exponent - 1 + self._bias) << (self.significand - 1)).to_bytes(self.bytes, "little")

    @property
    def _bias(self) -> int:
        """What is added to an exponent before it is stored."""
        return (1 << (self.exponent - 1)) - 1


F16 = Element(
    name="f16", title="fp16", dtype="float16", significand=11, exponent=5,
    poisons=(0x7D5A, 0xBADA - 0x10000), canary=0x5A5A,
    header="cuda_fp16.h", cpp="half", pair="half2",
    from_floats="__floats2half2_rn", from_float2="__float22half2_rn", to_float2="__half22float2",
    cuda_type="CUDA_R_16F", heuristics="H", half_sums=True,
)  # fmt: skip

BF16 = Element(
    name="bf16", title="bf16", dtype="bfloat16", significand=8, exponent=8,
    poisons=(0x7FA5, 0xBADA - 0x10000), canary=0x5A5A,
    header="cuda_bf16.h", cpp="__nv_bfloat16", pair="__nv_bfloat162",
    from_floats="__floats2bfloat162_rn", from_float2="__float22bfloat162_rn", to_float2="__bfloat1622float2",
    cuda_type="CUDA_R_16BF", heuristics="T", tcgen05=1,
)  # fmt: skip
F32 = Element(
    name="f32", title="fp32", dtype="float32", significand=24, exponent=8,
    poisons=(0x7FA5A5A5, 0xBADABADA - (1 << 32)), canary=0x5A5A5A5A,
    header="", cpp="float", pair="float2", from_floats="make_float2", from_float2="", to_float2="",
    cuda_type="CUDA_R_32F", heuristics="S",
)  # fmt: skip

ELEMENTS: dict[ElementName, Element] = {"f16": F16, "bf16": BF16}  # of A and B


def name_of(dtype: object) -> ElementName | None:
    """The name of the element for a NumPy or torch type; None if there is none."""
    element = element_or_none(dtype)
    return next((name for name, item in ELEMENTS.items() if item is element), None)


def stored(ab: ElementName, d: OutputName) -> Element:
    """The element of D, given the names of a problem's types."""
    return F32 if d == "f32" else ELEMENTS[ab]


class Typed(Protocol):
    """A NumPy array or a torch tensor."""

    @property
    def dtype(self) -> object: ...


def element_of(array: Typed) -> Element:
    """The element of A or B. Raises TypeError if the array or tensor has another type."""
    if (element := element_or_none(array.dtype)) is None:
        raise TypeError(f"expected {dtypes(array)}, got {array.dtype}")
    return element


def output_of(array: Typed) -> Element:
    """The element of D, which may be fp32. Raises TypeError for another type."""
    return F32 if str(array.dtype).removeprefix("torch.") == F32.dtype else element_of(array)


@cache  # called at every call of an operator
def element_or_none(dtype: object) -> Element | None:
    """The element for a NumPy or torch type; None if there is none."""
    name = str(dtype).removeprefix("torch.")
    return next((element for element in ELEMENTS.values() if element.dtype == name), None)


def dtypes(array: Typed) -> str:
    """The types of all elements, by their names in the array's library."""
    prefix = "torch." if str(array.dtype).startswith("torch.") else ""
    return " or ".join(prefix + element.dtype for element in ELEMENTS.values())
