"""The question: which product of matrices, with which accumulator, on which GPU."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, ValidationError

from cudal2gen.element import F16, Element
from cudal2gen.kernel.schema import IllegalRecord, Schema, explain

Acc = Literal["f16", "f32"]
Layout = Literal["tn", "nn"]
SizeClass = Literal["small-m", "split-k", "tiny", "medium", "large", "huge"]
SIZE_CLASSES: tuple[SizeClass, ...] = get_args(SizeClass)
MAX_EXTENT = 2**24  # offsets within a CTA tile are 32-bit: a row may have so many elements

VECTOR = 16 // F16.bytes  # elements in the 16-byte vector that cp.async, ldmatrix rows and global stores move


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b."""
    return -(-a // b)


def aligned(extent: int, to: int = VECTOR) -> int:
    """The smallest multiple of ``to`` that is not below an extent."""
    return ceil_div(extent, to) * to


class Problem(Schema):
    """The question: D(m,n) = A(m,k) B, on one GPU."""

    gpu: Annotated[str, Field(description="GPU model whose limits the record keeps, e.g. a100")]
    acc: Annotated[Acc, Field(description="type of the accumulator in the MMA: f16 or f32")]
    layout: Annotated[Layout, Field(description="how B is stored: tn (n,k), nn (k,n); A is (m,k), D (m,n), by rows")]
    m: Annotated[int, Field(ge=1, le=MAX_EXTENT, description="rows of A and D, elements")]
    n: Annotated[int, Field(ge=1, le=MAX_EXTENT, description="columns of B and D, elements")]
    k: Annotated[int, Field(ge=1, le=MAX_EXTENT, description="elements that are multiplied and summed for one of D")]

    def revised(self, **changes: Any) -> Self:
        """The problem with fields changed, validated anew. Raises IllegalRecord."""
        try:
            return type(self).model_validate(dict(self) | changes)
        except ValidationError as error:
            raise IllegalRecord(explain(error)) from None

    @property
    def element(self) -> Element:
        """The type of A, B and D."""
        return F16

    @property
    def mnk(self) -> str:
        return f"{self.m}_{self.n}_{self.k}"

    @property
    def key(self) -> tuple[str | int, ...]:
        """All fields, in the order in which catalogs are sorted."""
        return tuple(value for _, value in self)

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each of m*n*k."""
        return 2 * self.m * self.n * self.k

    @property
    def traffic_bytes(self) -> int:
        """Each operand once between device memory and the chip: the least that any kernel moves."""
        return self.element.bytes * (self.m * self.k + self.n * self.k + self.m * self.n)

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
