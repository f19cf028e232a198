"""The type of the numbers in A, B and D: every fact of it, for all who name, store, draw, copy or bound them.

The type in which a kernel sums is another matter: ``Problem.acc``. A new type of A and B is an entry of ``ELEMENTS``
here and of ``kElements`` in ``launch.h``, and a name in ``cudal2gen.h``; D has the type of A and B, or is fp32.
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

VECTOR_BYTES = 16  # what cp.async, a row of ldmatrix and stores to global memory move; tensor maps need rows of them
SINGLE_ERROR = 2.0**-24  # relative, of rounding to the nearest fp32 number
CHUNK_BYTES = 128  # a row of the widest swizzle
MMA_BYTES = 32  # of a row of A or B in one MMA of any tensor core (PTX ISA: k16 of 16 bits, k32 of 8 bits)


@dataclass(frozen=True)
class Element:
    """A binary floating-point type of IEEE 754's form.

    ``name``: of PTX. ``title``: in prose. ``dtype``: of NumPy arrays, by ``ml_dtypes`` where NumPy lacks it,
    and torch tensors. ``significand``: bits, the implicit one among them; ``exponent``: bits. ``poisons``: the bits, as
    signed integers, of a NaN that no arithmetic makes and of a number; ``canary``: of another number.
    """

    name: str
    title: str
    dtype: str
    significand: int
    exponent: int
    poisons: tuple[int, int]
    canary: int
    # C++: the header, the type, a pair of it; functions from two floats or a float2 to a pair, and from that to float2,
    # empty where there are none.
    header: str
    cpp: str
    pair: str
    from_floats: str
    from_float2: str
    to_float2: str
    cuda_type: str  # cudaDataType, for cuBLAS
    heuristics: str  # letter of nvMatmulHeuristics
    half_sums: bool = False  # whether tensor cores sum its products in fp16 too
    outputs: tuple[OutputName, ...] = ("same", "f32")  # types of D that kernels store of such A and B
    tcgen05: int = 0  # code of A and B in the instruction descriptor of tcgen05.mma kind::f16 (PTX ISA)

    @property
    def bytes(self) -> int:
        return (self.significand + self.exponent) // 8

    @property
    def vector(self) -> int:
        """Elements that are moved at a time."""
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
        """The last integer up to which the type has them all."""
        return 1 << self.significand

    @property
    def unit_roundoff(self) -> float:
        """The largest relative error of rounding to nearest."""
        return 2.0**-self.significand

    @property
    def least_error(self) -> float:
        """The largest absolute error of rounding to a subnormal number: half of the least one."""
        return 2.0 ** (1 - self._bias - self.significand)

    @property
    def nan(self) -> int:
        """Bits of a quiet NaN that differs from the one of arithmetic."""
        infinity = ((1 << self.exponent) - 1) << (self.significand - 1)
        return infinity | 1 << (self.significand - 2) | 1

    @property
    def bits(self) -> str:
        """The signed integer, of NumPy and torch, that has the same bits."""
        return f"int{8 * self.bytes}"

    @property
    def packed_pair(self) -> str:
        """C++: a pair as registers hold it until it is stored, one register wide for elements of 16 bits."""
        return "uint32_t" if self.bytes == 2 else self.pair

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        import numpy as np

        if not hasattr(np, self.dtype):
            import ml_dtypes  # noqa: F401  # from then on NumPy knows its types by name

        return np.dtype(self.dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def spell(self, number: float) -> builtins.bytes:
        """A positive normal number that the type has exactly, as it lies in memory."""
        fraction, exponent = math.frexp(number)
        stored = int(math.ldexp(fraction, self.significand)) - (1 << (self.significand - 1))
        return (stored | (exponent - 1 + self._bias) << (self.significand - 1)).to_bytes(self.bytes, "little")

    @property
    def _bias(self) -> int:
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
    """The name of the element of a NumPy or torch type; None where it is no element's."""
    element = element_or_none(dtype)
    return next((name for name, item in ELEMENTS.items() if item is element), None)


def stored(ab: ElementName, d: OutputName) -> Element:
    """The element of D, by the names of a problem's types."""
    return F32 if d == "f32" else ELEMENTS[ab]


class Typed(Protocol):
    """A NumPy array or a torch tensor."""

    @property
    def dtype(self) -> object: ...


def element_of(array: Typed) -> Element:
    """The element of A or B. Raises TypeError where the type of the array or tensor is none of theirs."""
    if (element := element_or_none(array.dtype)) is None:
        raise TypeError(f"expected {dtypes(array)}, got {array.dtype}")
    return element


def output_of(array: Typed) -> Element:
    """The element of D, which may be fp32. Raises TypeError."""
    return F32 if str(array.dtype).removeprefix("torch.") == F32.dtype else element_of(array)


@cache  # asked at every call of an operator
def element_or_none(dtype: object) -> Element | None:
    """The element of a NumPy or torch type; None where it is no element's."""
    name = str(dtype).removeprefix("torch.")
    return next((element for element in ELEMENTS.values() if element.dtype == name), None)


def dtypes(array: Typed) -> str:
    """The types of elements, as the array's library names them."""
    prefix = "torch." if str(array.dtype).startswith("torch.") else ""
    return " or ".join(prefix + element.dtype for element in ELEMENTS.values())
