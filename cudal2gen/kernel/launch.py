"""Launches: the facts of a built kernel, a caller's matrices, and which of them a kernel takes without a copy.

The contract of Python, templates and the C++ launcher. ``Launch`` is what a record says of its kernel; beside a cubin
it is the file ``kernel.launch``, a line ``name=value`` per fact, which ``write`` and ``read`` spell and ``launch.h``
reads. A fact at its neutral value, its default here, is left out of the file. Leading dimensions count elements.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import Field, ValidationError

from cudal2gen.kernel.fusion import PLAIN, Fusion
from cudal2gen.kernel.problem import MAX_EXTENT, Batch, Layout, aligned
from kernelproof.ground.element import ELEMENTS, Element, ElementName, OutputName, stored
from kernelproof.ground.errors import WrongInput
from kernelproof.ground.schema import Schema

Count = Annotated[int, Field(ge=1, lt=2**31)]
Amount = Annotated[int, Field(ge=0, lt=2**31)]
Flag = Annotated[int, Field(ge=0, le=1)]
Hint = Literal["normal", "first", "last"]  # L2 eviction priorities, in the launcher's order
Raster = Literal["plain", "zsplit", "persistent"]
Reduce = Literal["none", "workspace", "cluster"]


class Sizes(NamedTuple):
    """Extents of a product."""

    m: int
    n: int
    k: int

    @property
    def text(self) -> str:
        return f"{self.m}_{self.n}_{self.k}"


class Batches(NamedTuple):
    """Products of a launch, and elements from the matrices of one to those of the next; 0 shares A, B, bias or C."""

    products: int = 1
    a: int = 0
    b: int = 0
    d: int = 0
    bias: int = 0
    c: int = 0
    aux: int = 0


class Groups(NamedTuple):
    """Groups of rows of A and D, each times its own B.

    ``ends``: device address of as many ascending int32 as ``products``, the row behind each group's last; the first
    group starts at row 0, rows behind the last group are not computed. ``b``: elements from a group's B to the next
    one's, 0 shares it; ``bias``: the same of a bias along n. A bias along m and C go by rows, as D.
    """

    ends: int
    products: int
    b: int = 0
    bias: int = 0


class Matrix(NamedTuple):
    """How a caller's matrix lies: leading dimension, and whether its address, each one's of a batch, is a multiple of
    16 bytes."""

    ld: int
    aligned: bool = True

    def in_vectors(self, element: Element) -> bool:
        """Whether every row starts on 16 bytes."""
        return self.aligned and self.ld % element.vector == 0


class Operands(NamedTuple):
    """The matrices of a product as a caller has them: A (m,k), B as the layout stores it, D (m,n), or (m,n/2) gated."""

    a: Matrix
    b: Matrix
    d: Matrix

    @classmethod
    def packed(cls, layout: Layout, n: int, k: int, fusion: Fusion = PLAIN) -> Operands:
        """Matrices without gaps between their rows."""
        return cls(Matrix(k), Matrix(k if layout == "tn" else n), Matrix(fusion.d_cols(n)))


class Option(NamedTuple):
    """A data field of records that the launcher takes when it opens a kernel, as a number: the place among ``values``,
    or the field itself where there are none."""

    name: str
    values: tuple[Any, ...] = ()

    def number(self, value: Any) -> int:
        return self.values.index(value) if self.values else int(value)

    def value(self, number: int) -> Any:
        return self.values[number] if self.values else number


class Launch(Schema):
    """What the launcher must know of any kernel; a subclass per calling convention adds its own facts.

    ``entry``: the kernel's name in the cubin. ``smem_bytes``: dynamic shared memory of a CTA. ``bk``: elements of k per
    step; a kernel needs as many steps as it has slices.
    """

    convention: ClassVar[str]
    options: ClassVar[tuple[Option, ...]] = ()

    entry: str
    layout: Layout
    threads: Count
    smem_bytes: Amount
    bm: Count
    bn: Count
    bk: Count
    split_k: Count
    fusion: Fusion = PLAIN
    element: ElementName = "f16"
    output: OutputName = "same"
    batch: Batch = "none"

    @property
    def d_vector(self) -> int:
        """Elements of D in 16 bytes."""
        return stored(self.element, self.output).vector

    @property
    def stores_vectors(self) -> bool:
        """Whether D is stored in vectors, so that its rows must start on 16 bytes."""
        return False

    @property
    def packed_k(self) -> bool:
        """Whether rows along k must be packed, since their length is compiled in."""
        return False

    def takes(self, sizes: Sizes, operands: Operands) -> tuple[bool, bool, bool]:
        """Which of A, B and D a launch of these sizes takes where they lie; the launcher refuses all others.

        Rows of A and B start on 16 bytes, and so do those of D where it is stored in vectors.
        """
        along_k = self.layout == "tn"
        row_b = sizes.k if along_k else sizes.n
        return (
            self._reads(operands.a, sizes.k, self.packed_k),
            self._reads(operands.b, row_b, self.packed_k and along_k),
            self.takes_c(sizes.n, operands.d),
        )

    def takes_c(self, n: int, c: Matrix) -> bool:
        """Whether a launch of n columns takes the C that a fused kernel adds where it lies: as it takes D."""
        return self.fusion.d_cols(n) <= c.ld <= MAX_EXTENT and (self._in_vectors(c) or not self.stores_vectors)

    def takes_aux(self, n: int, aux: Matrix) -> bool:
        """Whether a launch of n columns takes the matrix (m,n) that a fused kernel stores beside D where it lies."""
        return n <= aux.ld <= MAX_EXTENT and self._in_vectors(aux)

    def _in_vectors(self, d: Matrix) -> bool:
        return d.in_vectors(stored(self.element, self.output))

    def _reads(self, matrix: Matrix, row: int, packed: bool) -> bool:
        return (
            matrix.in_vectors(ELEMENTS[self.element])
            and row <= matrix.ld <= MAX_EXTENT
            and (matrix.ld == row or not packed)
        )

    def spaced(self, n: int, k: int, vectors: int = 1) -> Operands:
        """Matrices with so many vectors between their rows where the kernel takes such: what a test launches with."""
        vector = ELEMENTS[self.element].vector
        gap = vectors * vector
        rows_k = Matrix(aligned(k, vector) + (0 if self.packed_k else gap))
        cols = self.fusion.d_cols(n)
        rows_b = rows_k if self.layout == "tn" else Matrix(aligned(n, vector) + gap)
        return Operands(rows_k, rows_b, Matrix((aligned(cols, vector) if self.stores_vectors else cols) + gap))

    def write(self) -> str:
        """The file ``kernel.launch``. Digests of binaries cover its lines, so their order stays."""
        facts = {"launch": self.convention} | self.model_dump()
        first = [name for name in ("entry", "launch", "raster") if name in facts]
        return "".join(f"{name}={facts[name]}\n" for name in dict.fromkeys([*first, *facts]))


PDL = Option("pdl", (False, True))


class Tiles(Launch):
    """The kernel is handed matrices; its grid is tiles of D. Slices of k, if any, are summed in a workspace."""

    convention: ClassVar[str] = "tiles"
    options: ClassVar[tuple[Option, ...]] = (Option("swizzle_stride"),)

    raster: Raster
    predicated: Flag
    # Always 0: no kernel has n compiled in. The line baked_n=0 stays in kernel.launch because the digest of every built
    # kernel covers that file, and stored verdicts are keyed by the digest.
    baked_n: Annotated[int, Field(ge=0, le=0)]
    baked_k: Amount  # the k that is compiled in, 0 for none

    @property
    def stores_vectors(self) -> bool:
        return not self.predicated

    @property
    def packed_k(self) -> bool:
        return self.baked_k > 0


class Cluster(Launch):
    """The kernel is handed matrices; clusters along x, the CTAs of one share the k of a tile.

    ``steps``: of ``bk``, what a CTA holds of k at most.
    """

    convention: ClassVar[str] = "cluster"
    options: ClassVar[tuple[Option, ...]] = (PDL,)

    reduce: Reduce
    steps: Count


class Tma(Launch):
    """The kernel is handed tensor maps of A, B and, where boxes of D are stored, D; clusters along x.

    A cluster has ``cluster_m`` x ``cluster_n`` tiles, or all slices of one where ``reduce`` is cluster. Boxes are given
    as columns, which are contiguous, and rows. ``box_d_rest_cols``: columns of the boxes in which the rest of a row of
    D is stored where ``box_d_cols`` does not divide it, 0 where it does. ``stream_k``: the tiles of the last wave are
    shared out among all clusters by steps of k, and their sums meet in the workspace.
    """

    convention: ClassVar[str] = "tma"
    options: ClassVar[tuple[Option, ...]] = (
        Option("raster_axis", ("m", "n")),
        Option("raster_group"),
        Option("hint_a", get_args(Hint)),
        Option("hint_b", get_args(Hint)),
        PDL,
    )

    reduce: Reduce
    persistent: Flag
    cluster_m: Count
    cluster_n: Count
    box_a_cols: Count
    box_a_rows: Count
    box_b_cols: Count
    box_b_rows: Count
    box_d_cols: Amount
    box_d_rows: Amount
    box_d_rest_cols: Amount = 0
    stream_k: Flag = 0

    @property
    def stores_vectors(self) -> bool:
        return self.box_d_cols > 0


CONVENTIONS: dict[str, type[Launch]] = {kind.convention: kind for kind in (Tiles, Cluster, Tma)}


class LaunchFileError(WrongInput):
    """A ``kernel.launch`` that this version does not understand; the message names the fact."""


def read(text: str) -> Launch:
    """The launch of a file ``kernel.launch``. Raises LaunchFileError."""
    facts: dict[str, str] = {}
    for token in text.split():
        name, separator, value = token.partition("=")
        if not separator:
            raise LaunchFileError(f"{token} is no fact, which is name=value")
        if name in facts:
            raise LaunchFileError(f"fact {name} appears more than once")
        facts[name] = value
    if "launch" not in facts:
        raise LaunchFileError("fact launch is missing")
    if (convention := facts.pop("launch")) not in CONVENTIONS:
        raise LaunchFileError(f"launch={convention}: must be one of {', '.join(CONVENTIONS)}")
    try:
        return CONVENTIONS[convention].model_validate_strings(facts)
    except ValidationError as error:
        raise LaunchFileError("; ".join(_fault(**item) for item in error.errors(include_url=False))) from None


def _fault(type: str, loc: tuple[int | str, ...], msg: str, input: Any, **_: Any) -> str:
    """One of pydantic's findings, in the launcher's words."""
    (name,) = loc
    if type == "missing":
        return f"fact {name} is missing"
    words = msg.removeprefix("Value error, ")
    return f"unknown fact {name}" if type == "extra_forbidden" else f"{name}={input}: {words[0].lower()}{words[1:]}"
