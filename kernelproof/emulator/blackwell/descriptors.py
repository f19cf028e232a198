"""Decodes the descriptors of tcgen05.mma: the instruction descriptor (32 bits) and shared memory descriptors (64 bits).

Their fields and legal values are in PTX ISA 9.1, tcgen05, "Instruction descriptor", "Shared memory descriptor" and
"Shapes and data types". The shared memory descriptor differs from wgmma's in bits 46 to 48 and in the swizzle, which
has three bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from kernelproof.emulator.hopper.pattern import Strides

# Bits 61 to 63 of a shared memory descriptor -> bytes of a row of the swizzle pattern.
ROW_BYTES = {0: 16, 2: 128, 4: 64, 6: 32}
# Type numbers in an instruction descriptor -> types of A and B, and of D.
INPUT_TYPES, SUM_TYPES = {0: "f16", 1: "bf16"}, {0: "f16", 1: "f32"}


class ProductShape(NamedTuple):
    """A decoded instruction descriptor of kind::f16. ``m``, ``n``: rows and columns of D, of both CTAs of a pair.
    ``kind_a``, ``kind_b``, ``acc``: the types of A, B and D. ``sign``: -1.0 if products are negated, else 1.0.
    ``m_major_a``: A is M-major, not K-major. ``n_major_b``: B is N-major."""

    m: int
    n: int
    kind_a: str
    kind_b: str
    acc: str
    sign: float
    m_major_a: bool
    n_major_b: bool


def is_tf32(bits: int) -> bool:
    """Whether an instruction descriptor gives A and B the type number of kind::tf32."""
    return bits >> 7 & 7 == bits >> 10 & 7 == 2


@lru_cache(maxsize=256)
def product_shape(bits: int, group: int) -> tuple[ProductShape | None, str]:
    """Decode an instruction descriptor of kind::f16. ``group``: the cta_group, 1 or 2. Returns the decoded shape (None
    if the product cannot be executed) and the fault of the descriptor in words ("" if there is none)."""
    # Bits 4 and 5: type of D. 7 to 9 and 10 to 12: types of A and B. 13 and 14: negate A and B. 15 and 16: A is
    # M-major, B is N-major. 17 to 22: N / 8. 24 to 28: M / 16.
    kind_a, kind_b, acc = INPUT_TYPES.get(bits >> 7 & 7), INPUT_TYPES.get(bits >> 10 & 7), SUM_TYPES.get(bits >> 4 & 3)
    m, n = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3
    if kind_a is None or kind_b is None or acc is None:
        text = f"types {bits >> 4 & 3} of D, {bits >> 7 & 7} of A, {bits >> 10 & 7} of B are none of kind::f16"
        return None, text
    if kind_a != kind_b:
        return None, f"A is {kind_a} and B is {kind_b}"
    if acc == "f16" and kind_a == "bf16":
        return None, "bf16 is summed in f32 only"
    rows, step = ((64, 128), 16 if m == 128 else 8) if group == 1 else ((128, 256), 16)
    if m not in rows or n % step or not step <= n <= 256:
        legal = f"M {rows[0]} or {rows[1]}, N a multiple of {step} up to 256"
        return None, f"M {m}, N {n} with cta_group::{group}: {legal}"
    # Bits of sparsity, reserved bits and the maximum shift of weight-stationary products must be zero.
    reserved = bits & (1 << 2 | 1 << 3 | 1 << 6 | 1 << 23 | 1 << 29 | 3 << 30 | 3)
    fault = f"bits {reserved:#x}, which are zero for a dense product of kind::f16, are set" if reserved else ""
    sign = -1.0 if (bits >> 13 ^ bits >> 14) & 1 else 1.0
    return ProductShape(m, n, kind_a, kind_b, acc, sign, bool(bits >> 15 & 1), bool(bits >> 16 & 1)), fault


@lru_cache(maxsize=4096)
def strides(bits: int) -> tuple[Strides | None, str]:
    """Decode a shared memory descriptor. Returns the operand's address and strides in bytes (None if the descriptor is
    illegal or not modelled) and the fault of the descriptor in words ("" if there is none)."""
    if bits >> 46 & 7 != 1:
        return None, f"bits 46 to 48 are {bits >> 46 & 7:#05b}, not 0b001 (of wgmma they are zero)"
    if bits >> 53 & 0xFF:
        return None, f"bits 53 to 60 are {bits >> 53 & 0xFF:#x}, not zero"
    if bits >> 52 & 1:
        return None, "an absolute leading offset (bit 52) exists on sm_103a only"
    swizzle = bits >> 61
    if swizzle == 1:
        return None, "the 128-byte swizzle of 32-byte atoms (1 in bits 61 to 63) is not modelled"
    if swizzle not in ROW_BYTES:
        return None, f"{swizzle} in bits 61 to 63 is no swizzle: 0 none, 2 128 bytes, 4 64 bytes, 6 32 bytes"
    # Bits 0 to 13, 16 to 29 and 32 to 45: the address and both strides, in units of 16 bytes.
    address, leading, stride = ((bits >> low & 0x3FFF) << 4 for low in (0, 16, 32))
    return Strides(address, leading, stride, bits >> 49 & 7, ROW_BYTES[swizzle]), ""
