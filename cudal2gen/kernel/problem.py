"""The question: which product of matrices, with which accumulator, on which GPU."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Acc = Literal["f16", "f32"]
Layout = Literal["tn", "nn"]
SizeClass = Literal["small-m", "split-k", "tiny", "medium", "large", "huge"]
# Offsets within a CTA tile are 32-bit: a row may have so many elements.
Extent = Annotated[int, Field(ge=1, le=2**24)]

VECTOR = 8  # halves in the 16-byte vector that cp.async, ldmatrix rows and global stores move


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b."""
    return -(-a // b)


def aligned(extent: int, to: int = VECTOR) -> int:
    """The smallest multiple of ``to`` that is not below an extent."""
    return ceil_div(extent, to) * to


class Frozen(BaseModel):
    """Nothing changes after validation, nothing unknown gets in."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Problem(Frozen):
    """What is asked: D(m,n) = A(m,k) B, fp16 in and out, on one GPU.

    ``acc`` is the accumulator really in the MMA. ``layout`` ``tn``: B is stored (n,k); ``nn``: B is stored (k,n).
    """

    gpu: str
    acc: Acc
    layout: Layout
    m: Extent
    n: Extent
    k: Extent

    @property
    def mnk(self) -> str:
        return f"{self.m}_{self.n}_{self.k}"

    @property
    def key(self) -> tuple[str, str, str, int, int, int]:
        return (self.gpu, self.acc, self.layout, self.m, self.n, self.k)

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each of m*n*k."""
        return 2 * self.m * self.n * self.k

    @property
    def traffic_bytes(self) -> int:
        """Each operand once between device memory and the chip: the least that any kernel moves."""
        return 2 * (self.m * self.k + self.n * self.k + self.m * self.n)

    @property
    def size_class(self) -> SizeClass:
        """What limits problems of this kind; tuning and benchmarks are spread over these classes."""
        if self.m <= 64:
            return "small-m"
        if self.m * self.n <= 1 << 20 and self.k >= 2048:
            return "split-k"
        if self.flops <= 10**8:
            return "tiny"
        return "medium" if self.flops <= 10**10 else "large" if self.flops <= 10**12 else "huge"
