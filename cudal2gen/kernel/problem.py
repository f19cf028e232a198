"""Defines ``Problem``: a product of matrices, its accumulator, and the GPU that computes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, cast, get_args

from pydantic import Field, ValidationError, model_validator

from cudal2gen.kernel.fusion import GATE_COLS, PLAIN, Fusion
from cudal2gen.kernel.schema import IllegalRecord, explain
from kernelproof.ground.chips import GPUS
from kernelproof.ground.element import ELEMENTS, Element, ElementName, OutputName, stored
from kernelproof.ground.integers import ceil_div
from kernelproof.ground.schema import Schema

Acc = Literal["f16", "f32"]
Layout = Literal["tn", "nn", "nt", "tt"]
Batch = Literal["none", "strided", "grouped"]
SizeClass = Literal["small-m", "split-k", "tiny", "medium", "large", "huge"]
BATCH_TITLES: dict[Batch, str] = {"strided": "batched", "grouped": "grouped"}
SIZE_CLASSES: tuple[SizeClass, ...] = get_args(SizeClass)
# The most elements of a row. Copies have 32-bit offsets within a tile, in vectors of at least 8 elements; a tile has at
# most 512 rows, so an offset is below 2**30.
MAX_EXTENT = 2**24


class AlongK(NamedTuple):
    """Whether the rows in which A and B are stored run along k: A (m,k) or else (k,m), B (n,k) or else (k,n)."""

    a: bool
    b: bool

    @property
    def shapes(self) -> tuple[str, str]:
        """The shapes of A and B, as text."""
        return "m,k" if self.a else "k,m", "n,k" if self.b else "k,n"

    @property
    def layout(self) -> Layout:
        """The two-letter layout name for this storage. The letters are the transpose flags that a column-major BLAS
        would need for the row-major matrices: first B's, then A's."""
        return cast("Layout", ("t" if self.b else "n") + ("n" if self.a else "t"))


def rows_along_k(layout: Layout) -> AlongK:
    """Which of A and B a layout stores with their rows along k."""
    return AlongK(a=layout[1] == "n", b=layout[0] == "t")


def aligned(extent: int, multiple: int) -> int:
    """The extent, rounded up to the next multiple of ``multiple``."""
    return ceil_div(extent, multiple) * multiple


def types_text(ab: str, acc: str, d: str) -> str:
    """The types of a problem as text, see ``Problem.types``."""
    return f"{'' if ab == 'f16' else f'{ab} '}{acc}{'' if d == 'same' else f' d={d}'}"


class Problem(Schema):
    """A product to compute on one GPU: D(m,n) = A(m,k) B(k,n), with the operations of ``fusion`` applied before D is
    stored.

    In a strided batch m, n and k are the sizes of each product. In a grouped batch m is the sum over all groups.
    """

    KIND: ClassVar[tuple[str, ...]] = ("ab", "d", "acc", "layout", "batch")

    gpu: Annotated[str, Field(description="GPU model whose limits the record keeps, e.g. a100")]
    acc: Annotated[Acc, Field(description="type in which products are summed: f16 or f32")]
    layout: Annotated[
        Layout,
        Field(
            description="two letters, for B then A, both row-major: "
            "B is t = (n,k) or n = (k,n); A is n = (m,k) or t = (k,m)"
        ),
    ]
    m: Annotated[int, Field(ge=1, le=MAX_EXTENT, description="rows of A and D, elements")]
    n: Annotated[int, Field(ge=1, le=MAX_EXTENT, description="columns of B and D, elements")]
    k: Annotated[int, Field(ge=1, le=MAX_EXTENT, description="inner dimension: products summed for each element of D")]
    ab: Annotated[ElementName, Field(description=f"type of A and B: {' or '.join(ELEMENTS)}")] = "f16"
    d: Annotated[OutputName, Field(description="type of D: same as A and B, or f32, the sum as it is")] = "same"
    fusion: Annotated[
        Fusion, Field(description="applied to the sums in fp32 before D is stored: none, or parts such as bias_n+silu")
    ] = PLAIN
    batch: Annotated[
        Batch,
        Field(description="none: one product; strided: several products; grouped: groups of rows of A, each with a B"),
    ] = "none"

    @model_validator(mode="after")
    def _types_agree(self) -> Self:
        """Refuses combinations of types, fusion, batch and sizes for which no kernel can exist."""
        if self.d not in self.element.outputs:
            raise ValueError(f"d={self.d}: must be {' or '.join(self.element.outputs)} for ab={self.ab}")
        if not self.exists(self.ab, self.d, self.acc):
            cause = f"d={self.d}" if self.element.half_sums else f"ab={self.ab}"
            raise ValueError(f"acc={self.acc}: must be f32 for {cause}")
        if self.fusion.bias != "none" and not self.element.to_float2:
            raise ValueError(
                f"fusion={self.fusion}: must have no bias for ab={self.ab}, which kernels cannot convert to fp32"
            )
        if self.batched and self.fusion.aux:
            raise ValueError(
                f"batch={self.batch}: must be none for fusion={self.fusion}, aux has no stride between products"
            )
        if self.grouped and not self.along_k.a:
            raise ValueError(f"layout={self.layout}: must be tn or nn for batch=grouped, a group is rows of A (m,k)")
        if self.fusion.gate and self.n % GATE_COLS:
            raise ValueError(
                f"n={self.n}: must be a multiple of {GATE_COLS} for fusion={self.fusion}, "
                "which multiplies 8 columns by the next 8"
            )
        return self

    @staticmethod
    def exists(ab: ElementName, d: str, acc: str) -> bool:
        """Whether kernels exist for this combination of types. Sums in fp16 are never stored as fp32."""
        element = ELEMENTS[ab]
        return d in element.outputs and (acc == "f32" or (element.half_sums and d == "same"))

    def revised(self, **changes: Any) -> Self:
        """The problem with fields changed, validated anew. Raises IllegalRecord."""
        try:
            return type(self).model_validate(dict(self) | changes)
        except ValidationError as error:
            raise IllegalRecord(explain(error)) from None

    @property
    def along_k(self) -> AlongK:
        """Which of A and B are stored with their rows along k."""
        return rows_along_k(self.layout)

    @property
    def row_extents(self) -> tuple[str, ...]:
        """The extents along which rows of A and B run: k, or m for A and n for B if they are stored across k."""
        a, b = self.along_k
        return tuple(dict.fromkeys(("k" if a else "m", "k" if b else "n")))

    @property
    def element(self) -> Element:
        """The type of A and B."""
        return ELEMENTS[self.ab]

    @property
    def output(self) -> Element:
        """The type of D."""
        return self.element if self.d == "same" else stored(self.ab, self.d)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Bytes of an element of A, B and D."""
        return self.element.bytes, self.element.bytes, self.output.bytes

    @property
    def tensor_flops(self) -> float:
        """Dense FLOP per clock and SM of the GPU's tensor cores on these types, with their best instruction."""
        return GPUS[self.gpu].tensor_flops(self.acc == "f32", self.element.bytes)

    @property
    def mma_sync_flops(self) -> float:
        """Dense FLOP per clock and SM of the GPU's tensor cores on these types, with mma.sync."""
        return GPUS[self.gpu].mma_sync_flops(self.acc == "f32", self.element.bytes)

    @property
    def d_cols(self) -> int:
        """Columns of D: n, or n / 2 if pairs of columns are gated."""
        return self.fusion.d_cols(self.n)

    @property
    def types(self) -> str:
        """The accumulator type as text.

        It is preceded by the type of A and B unless that is f16, and followed by ``d=f32`` unless D has their type.
        """
        return types_text(self.ab, self.acc, self.d)

    @property
    def title(self) -> str:
        """The problem in a line."""
        return f"{self.gpu} {self.types} {self.layout} {self.mnk}{self.suffix}"

    @property
    def suffix(self) -> str:
        """Fusion and batch as text, each after a space; empty for a single plain product."""
        return f"{f' {self.fusion}' if self.fusion else ''}{f' {BATCH_TITLES[self.batch]}' if self.batched else ''}"

    @property
    def batched(self) -> bool:
        """Whether a launch computes several products; their number is an argument of the launch."""
        return self.batch != "none"

    @property
    def grouped(self) -> bool:
        """Whether the products are groups of rows of one A. The ends of the groups lie in device memory."""
        return self.batch == "grouped"

    @property
    def kind(self) -> tuple[Any, ...]:
        """Types, layout, batch and fusion. A kernel may compute other sizes than its own, but only of its kind."""
        return (*(getattr(self, name) for name in self.KIND), str(self.fusion))

    @classmethod
    def kind_of(cls, fields: Mapping[str, Any]) -> tuple[Any, ...]:
        """The kind of a problem's fields as JSON spells them."""
        return (*(fields.get(name, cls.NEUTRAL.get(name)) for name in cls.KIND), str(fields.get("fusion", PLAIN)))

    @property
    def mnk(self) -> str:
        """The sizes as text, such as 64_48_32."""
        return f"{self.m}_{self.n}_{self.k}"

    @property
    def key(self) -> tuple[str | int, ...]:
        """All fields, in the order in which catalogs are sorted."""
        return tuple(str(value) if isinstance(value, Fusion) else value for _, value in self)

    @property
    def flops(self) -> int:
        """Operations of one product: a multiplication and an addition for each of the m*n*k terms."""
        return 2 * self.m * self.n * self.k

    def flops_of(self, products: int) -> int:
        """Operations of a launch of this many products. Groups divide the m rows among them, so all groups together
        have ``flops``."""
        return self.flops if self.grouped else products * self.flops

    def elements_of(self, products: int) -> int:
        """Elements of A and B that a launch of this many products reads: each has its own B, and groups share one A."""
        return self.k * ((self.m if self.grouped else products * self.m) + products * self.n)

    def traffic_of(self, products: int) -> int:
        """The least device-memory traffic of a launch of this many products, in bytes: A, B and D once, without bias,
        C and aux."""
        d_bytes = self.output.bytes * self.m * self.d_cols * (1 if self.grouped else products)
        return self.element.bytes * self.elements_of(products) + d_bytes

    @property
    def traffic_bytes(self) -> int:
        """The least device-memory traffic of one product, in bytes: see ``traffic_of``."""
        return self.traffic_of(1)

    @property
    def size_class(self) -> SizeClass:
        """The class of the problem by what limits its speed; tuning and benchmarks sample all classes."""
        if self.m <= 64:
            return "small-m"
        if self.m * self.n <= 1 << 20 and self.k >= 2048:
            return "split-k"
        if self.flops <= 10**8:
            return "tiny"
        return "medium" if self.flops <= 10**10 else "large" if self.flops <= 10**12 else "huge"
