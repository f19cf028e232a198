"""Describes launches: the facts of a built kernel, and which of a caller's matrices the kernel takes without a copy.

This is the contract between Python, the templates and the C++ launcher. A record describes its kernel by a ``Launch``.
Beside the cubin lies the file ``kernel.launch`` with one line ``name=value`` per fact; ``Launch.write`` writes it, and
``read`` and ``launch.h`` read it. Facts with their default value are left out. Leading dimensions count elements.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import Field, ValidationError

from cudal2gen.kernel.fusion import PLAIN, Fusion
from cudal2gen.kernel.problem import MAX_EXTENT, AlongK, Batch, Layout, aligned, rows_along_k
from kernelproof.ground.element import ELEMENTS, Element, ElementName, OutputName, stored
from kernelproof.ground.errors import WrongInput
from kernelproof.ground.schema import Schema

# Numbers that the launcher holds in 32 bits: from 1, from 0, and truth values.
Count = Annotated[int, Field(ge=1, lt=2**31)]
Amount = Annotated[int, Field(ge=0, lt=2**31)]
Flag = Annotated[int, Field(ge=0, le=1)]
Hint = Literal["normal", "first", "last"]  # L2 eviction priorities, in the launcher's order
Raster = Literal["plain", "zsplit", "persistent"]
Reduce = Literal["none", "workspace", "cluster"]
Counters = Literal["cleared", "returned"]


class Sizes(NamedTuple):
    """Extents of a product."""

    m: int
    n: int
    k: int

    @property
    def text(self) -> str:
        return f"{self.m}_{self.n}_{self.k}"


class Batches(NamedTuple):
    """The number of products of a launch, and for each operand the elements from one product's matrix to the next.

    Distance 0 means that all products share the operand: A, B, bias or C.
    """

    products: int = 1
    a: int = 0
    b: int = 0
    d: int = 0
    bias: int = 0
    c: int = 0
    aux: int = 0


class Groups(NamedTuple):
    """Groups of rows of A and D, each times its own B.

    ``ends``: the device address of an int32 array with one number per group, ascending: the row after the group's last
    row. The first group starts at row 0; rows after the last group are not computed. ``b``: elements from one group's B
    to the next one's, 0 if all share one B; ``bias``: the same distance for a bias along n. A bias along m has one
    element for each row of D, and C has the rows of D.
    """

    ends: int
    products: int
    b: int = 0
    bias: int = 0


class Matrix(NamedTuple):
    """The leading dimension of a caller's matrix, and whether its address is a multiple of 16 bytes (for a batch, the
    addresses of all its matrices)."""

    ld: int
    aligned: bool = True

    def in_vectors(self, element: Element) -> bool:
        """Whether every row starts at a multiple of 16 bytes."""
        return self.aligned and self.ld % element.vector == 0


class LaunchOperands(NamedTuple):
    """The matrices of a product as a caller has them: A and B as the layout stores them, D (m,n), or (m,n/2) if
    gated."""

    a: Matrix
    b: Matrix
    d: Matrix

    @classmethod
    def packed(cls, layout: Layout, sizes: Sizes, fusion: Fusion = PLAIN) -> LaunchOperands:
        """Matrices without gaps between their rows."""
        row_a, row_b = rows_of(layout, sizes)
        return cls(Matrix(row_a), Matrix(row_b), Matrix(fusion.d_cols(sizes.n)))


def rows_of(layout: Layout, sizes: Sizes) -> tuple[int, int]:
    """Elements of a row of A and of B as a layout stores them."""
    along = rows_along_k(layout)
    return sizes.k if along.a else sizes.m, sizes.k if along.b else sizes.n


class Option(NamedTuple):
    """A data field of records that the launcher takes as a number when it opens a kernel: the index in ``values``, or
    the field itself if there are no ``values``."""

    name: str
    values: tuple[Any, ...] = ()

    def number(self, value: Any) -> int:
        """The number that the launcher takes for a field's value. Raises ValueError for another value."""
        return self.values.index(value) if self.values else int(value)

    def value(self, number: int) -> Any:
        """The field's value for the launcher's number."""
        return self.values[number] if self.values else number


class Launch(Schema):
    """The facts that the launcher needs about any kernel. Each calling convention has a subclass with more facts.

    ``entry``: the kernel's name in the cubin. ``smem_bytes``: dynamic shared memory of a CTA. ``bk``: elements of k per
    step. ``split_k``: slices of k; each has at least one step.
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
    def along_k(self) -> AlongK:
        """Which operands are stored in rows along k."""
        return rows_along_k(self.layout)

    @property
    def d_vector(self) -> int:
        """Elements of D in 16 bytes."""
        return stored(self.element, self.output).vector

    @property
    def stores_vectors(self) -> bool:
        """Whether D is stored in vectors, so that its rows must start at multiples of 16 bytes."""
        return False

    @property
    def packed_k(self) -> bool:
        """Whether rows along k must be packed, because their length is compiled in."""
        return False

    def takes(self, sizes: Sizes, operands: LaunchOperands) -> tuple[bool, bool, bool]:
        """For A, B and D, whether a launch of these sizes takes the matrix where it lies. The launcher refuses others.

        Rows of A and B must start at multiples of 16 bytes, and so must rows of D if it is stored in vectors.
        """
        row_a, row_b = rows_of(self.layout, sizes)
        return (
            self._reads(operands.a, row_a, self.packed_k and self.along_k.a),
            self._reads(operands.b, row_b, self.packed_k and self.along_k.b),
            self.takes_c(sizes.n, operands.d),
        )

    def takes_c(self, n: int, c: Matrix) -> bool:
        """Whether a launch of n columns takes this C of a fused kernel where it lies. The rule is that of D."""
        return self.fusion.d_cols(n) <= c.ld <= MAX_EXTENT and (self._in_vectors(c) or not self.stores_vectors)

    def takes_aux(self, n: int, aux: Matrix) -> bool:
        """Whether a launch of n columns takes this aux (m,n) of a fused kernel where it lies."""
        return n <= aux.ld <= MAX_EXTENT and self._in_vectors(aux)

    def _in_vectors(self, d: Matrix) -> bool:
        """Whether every row of a matrix in D's type starts at a multiple of 16 bytes."""
        return d.in_vectors(stored(self.element, self.output))

    def _reads(self, matrix: Matrix, row: int, packed: bool) -> bool:
        """Whether the kernel reads A or B where it lies. ``row``: its elements; ``packed``: whether gaps are
        refused."""
        return (
            matrix.in_vectors(ELEMENTS[self.element])
            and row <= matrix.ld <= MAX_EXTENT
            and (matrix.ld == row or not packed)
        )

    def spaced(self, sizes: Sizes, vectors: int = 1) -> LaunchOperands:
        """Matrices for a test, with gaps of this many 16-byte vectors between their rows where the kernel allows
        gaps."""
        vector = ELEMENTS[self.element].vector
        gap = vectors * vector
        a, b = (
            Matrix(aligned(row, vector) + (0 if self.packed_k and along else gap))
            for row, along in zip(rows_of(self.layout, sizes), self.along_k, strict=True)
        )
        cols = self.fusion.d_cols(sizes.n)
        return LaunchOperands(a, b, Matrix((aligned(cols, vector) if self.stores_vectors else cols) + gap))

    def write(self) -> str:
        """The text of the file ``kernel.launch``. Digests of binaries cover it, so the order of lines must not
        change."""
        facts = {"launch": self.convention} | self.model_dump()
        first = [name for name in ("entry", "launch", "raster") if name in facts]
        return "".join(f"{name}={facts[name]}\n" for name in dict.fromkeys([*first, *facts]))


PDL = Option("pdl", (False, True))


class Tiles(Launch):
    """The kernel's arguments are pointers to matrices, and its grid is the tiles of D. Slices of k are summed in a
    workspace.

    ``counters``: whether the launcher clears the counters of tiles before each launch, or the kernel itself returns
    them to zero.
    """

    convention: ClassVar[str] = "tiles"
    options: ClassVar[tuple[Option, ...]] = (Option("swizzle_stride"),)

    raster: Raster
    predicated: Flag
    # Always 0: no kernel has n compiled in. The line baked_n=0 stays in kernel.launch because the digest of every built
    # kernel covers that file, and stored verdicts are keyed by the digest.
    baked_n: Annotated[int, Field(ge=0, le=0)]
    baked_k: Amount  # the k that is compiled in, 0 for none
    counters: Counters = "cleared"

    @property
    def stores_vectors(self) -> bool:
        return not self.predicated

    @property
    def packed_k(self) -> bool:
        return self.baked_k > 0


class Cluster(Launch):
    """The kernel's arguments are pointers to matrices. Clusters lie along x, and the CTAs of a cluster share a tile's
    k.

    ``steps``: how many steps of ``bk`` a CTA holds at most.
    """

    convention: ClassVar[str] = "cluster"
    options: ClassVar[tuple[Option, ...]] = (PDL,)

    reduce: Reduce
    steps: Count


class Tma(Launch):
    """The kernel's arguments are tensor maps of A, B and, if D is stored in boxes, D. Clusters lie along x.

    A cluster has ``cluster_m`` x ``cluster_n`` tiles, or all slices of one tile if ``reduce`` is cluster. A box has
    columns, which are contiguous, and rows. ``box_d_rest_cols``: columns of the boxes that store the rest of a row of
    D, 0 if ``box_d_cols`` divides the row. ``stream_k``: all clusters share the tiles of the last wave by steps of k,
    and add their partial sums in the workspace. ``counters``: see ``Tiles``.
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
    counters: Counters = "cleared"

    @property
    def stores_vectors(self) -> bool:
        return self.box_d_cols > 0


CONVENTIONS: dict[str, type[Launch]] = {kind.convention: kind for kind in (Tiles, Cluster, Tma)}


class LaunchFileError(WrongInput):
    """A file ``kernel.launch`` that this version does not understand; the message names the fact."""


def read(text: str) -> Launch:
    """The launch that the text of a file ``kernel.launch`` describes. Raises LaunchFileError."""
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
