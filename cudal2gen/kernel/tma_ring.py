"""Defines ``TmaRing``, the base class of families with a ring of TMA stages: boxes, stores of D, and sums over k."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, get_args

from pydantic import Field

from cudal2gen.kernel.launch import Hint, Launch, Tma
from cudal2gen.kernel.problem import Problem
from cudal2gen.kernel.record import Fields, Ring
from cudal2gen.kernel.sm90 import Sm90Kernel
from kernelproof.ground.chips import GPUS
from kernelproof.ground.element import CHUNK_BYTES, Element
from kernelproof.ground.integers import ceil_div

MAX_BAND = 64  # tiles across a band
MAX_BOX = 256  # rows or columns of one TMA box
STORE_BUFFERS = 2  # store buffers per warp
BAND_WIDTHS = (1, 4, 8, 16)  # in tiles: those that the tuner tries as raster_group
# For the tuner: most stages that it tries, and bytes of shared memory that it leaves for mbarriers and other words.
MOST_STAGES, RESERVED_BYTES = 8, 512
# Data fields of a record that was not tuned.
UNTUNED: Fields = {"raster_group": 8, "hint_a": "normal", "hint_b": "normal", "pdl": False}

RingBk = Annotated[Literal[64, 128], Field(description="k of a stage, elements")]
Stages = Annotated[int, Field(ge=2, le=16, description="k-tiles in the ring in shared memory")]
RasterAxis = Annotated[Literal["m", "n"], Field(description="axis along which tiles run within a band")]
RasterGroup = Annotated[
    int, Field(ge=1, le=MAX_BAND, description="tiles of the other axis in a band, which share operands in the L2")
]
SplitK = Annotated[int, Field(ge=1, le=64, description="slices of k of a tile, each computed by another CTA")]
StoreD = Annotated[
    Literal["tma", "direct"], Field(description="D by TMA through shared memory, or straight from registers")
]
HintA = Annotated[Hint, Field(description="L2 eviction priority of A: normal, first to go, last to go")]
HintB = Annotated[Hint, Field(description="L2 eviction priority of B")]
StreamK = Annotated[
    bool,
    Field(description="share out the k-tiles of the last wave's tiles among all CTAs, which add sums in the L2"),
]
PrefetchB = Annotated[
    bool, Field(description="ask the L2 for a CTA's first tiles of B before the wait for the previous kernel")
]
SummedIn = Literal["none", "cluster", "workspace", "stream"]


class TmaRing(Ring, Sm90Kernel):
    """TMA fills stages of A and B, tensor cores read them, and each warp stores its part of D.

    ``swap_ab`` computes D^T = B^T A^T: n runs along the rows of the instruction and m along its columns. ``bm`` and
    ``bn`` remain the rows and columns of D.
    """

    if TYPE_CHECKING:  # Each family declares these fields itself, with its own bounds and their places in the line.
        swap_ab: bool
        bk: int
        stages: int
        cluster: tuple[int, int]
        raster_axis: str
        raster_group: int
        epilogue: Literal["tma", "direct"]
        stream_k: bool
        pdl: bool

    CONVENTION: ClassVar[type[Launch]] = Tma
    DATA_FIELDS: ClassVar[frozenset[str]] = Sm90Kernel.DATA_FIELDS | {option.name for option in Tma.options}

    # Where a warp's accumulators lie: rows from one warp to the next, and rows from one group of 16 to the next.
    warp_rows: ClassVar[int]
    atom_rows: ClassVar[int]
    holds_tile: ClassVar[bool]  # whether a lane holds the accumulators of all columns of its tile at once
    instruction: ClassVar[str]  # the instructions that multiply and that fetch accumulators, for comments in templates
    fragment: ClassVar[str]

    def shared_violations(self) -> Iterator[str]:
        yield from super().shared_violations()
        if self.bk % (chunk := self.element.chunk):
            yield f"bk={self.bk}: must be a multiple of {chunk}, rows along k in a stage are of {CHUNK_BYTES} bytes"

    @property
    def vector_rows(self) -> tuple[str, ...]:
        row_of_d = ("n",) if self.epilogue == "tma" else ()
        return tuple(dict.fromkeys((*self.problem.row_extents, *row_of_d)))

    def gate_violations(self, field: str, cols: int) -> Iterator[str]:
        """The rule that gated columns of D fill the boxes in which ``cols`` columns of a product are stored; the
        message blames ``field``."""
        if self.fusion.gate and self.stores_tiles == "tma":
            if self.swap_ab:
                yield "epilogue=tma: must be direct for gate with swap_ab, a warp has 8 columns of D at a time"
            elif cols % 32:
                yield f"{field}={cols}: must be a multiple of 32 for gate in epilogue tma, which stores 16 columns of D"

    def stream_violations(self) -> Iterator[str]:
        """Rules of ``stream_k``: how k is split, and in which type it is summed."""
        if self.stream_k and self.split_k > 1:
            yield f"split_k={self.split_k}: must be 1 for stream_k, which itself shares out k"
        if self.stream_k and self.acc != "f32":
            yield "acc=f16: must be f32 for stream_k, whose split of k varies with the GPU, and fp16 rounding with it"

    def group_violations(self) -> Iterator[str]:
        """The broken rules of grouped products."""
        yield from super().group_violations()
        if not self.grouped:
            return
        if self.stream_k:
            yield "stream_k=true: must be false for batch=grouped, whose tiles are counted on the device"
        if self.prefetches_b:
            yield "prefetch_b=true: must be false for batch=grouped, whose tiles are known only after the wait"
        if self.cluster[0] > 1:
            yield f"cluster={list(self.cluster)}: must be [1, ..] for batch=grouped, tiles of two groups share no B"
        if self.swap_ab and self.fusion.bias == "m":
            yield "swap_ab=true: must be false for bias_m and batch=grouped, a lane loads aligned pairs of rows' bias"

    @property
    def waits_by_mbarriers(self) -> bool:
        return True

    @property
    def shares_last_wave(self) -> bool:
        return self.stream_k

    @property
    def rows(self) -> int:
        """Extent of the tile along the rows of the instruction."""
        return self.bn if self.swap_ab else self.bm

    @property
    def cols(self) -> int:
        """Extent of the tile along the columns of the instruction."""
        return self.bm if self.swap_ab else self.bn

    @property
    def part_a(self) -> int:
        """Rows of A that a CTA's stage holds."""
        return self.bm

    @property
    def part_b(self) -> int:
        """Columns of B that a CTA's stage holds."""
        return self.bn

    @property
    def panels(self) -> int:
        """Instructions side by side along a tile's columns, each with its own part of the operand on the column
        side."""
        return 1

    @property
    def panel_b(self) -> int:
        """Columns of B that a CTA's stage holds for one panel."""
        return self.part_b // self.panels

    @property
    def sharers_a(self) -> int:
        """CTAs that share a stage's tile of A; each loads a part of it for all."""
        return self.cluster[1]

    @property
    def sharers_b(self) -> int:
        """CTAs that share a stage's tile of B; each loads a part of it for all."""
        return self.cluster[0]

    @property
    def step_bytes(self) -> int:
        return (self.part_a + self.part_b) * self.k_step * self.element.bytes

    @property
    def chunk_a(self) -> int:
        """Columns of a box of A: the 128 bytes that a swizzle covers, or ``chunk_cols`` if A is on the column side of
        the instruction and its rows run across k."""
        return self._chunk(self.along_k.a, self.swap_ab)

    @property
    def chunk_b(self) -> int:
        """Columns of a box of B, by the same rule."""
        return self._chunk(self.along_k.b, not self.swap_ab)

    def _chunk(self, along_k: bool, on_columns: bool) -> int:
        """Columns of a box of an operand. ``along_k``: whether its rows run along k; ``on_columns``: whether it is on
        the column side of the instruction."""
        return self.chunk_cols if on_columns and not along_k else self.element.chunk

    @property
    def chunk_cols(self) -> int:
        """Columns of a box of the operand on the column side of the instruction if its rows run across k: a width that
        no instruction straddles."""
        raise NotImplementedError

    @property
    def boxes_a(self) -> int:
        """Boxes in which a CTA loads its part of A if rows run along k; a box has at most ``MAX_BOX`` rows."""
        return ceil_div(self.part_a // self.sharers_a, MAX_BOX)

    @property
    def boxes_b(self) -> int:
        """Boxes in which a CTA loads its part of B for one panel if rows run along k."""
        return ceil_div(self.panel_b // self.sharers_b, MAX_BOX)

    @property
    def store_warps(self) -> int:
        """Warps that store D."""
        raise NotImplementedError

    @property
    def atom_cols(self) -> int:
        """Columns of the instruction whose accumulators a warp holds at a time."""
        raise NotImplementedError

    @property
    def alone_on_sm(self) -> bool:
        """Whether a CTA may take all shared memory of its SM."""
        return True

    @property
    def stored_n(self) -> int:
        """Columns of D that a warp stores for ``atom_cols`` columns: half as many if gated. With swapped operands they
        are rows of D."""
        return self.atom_cols if self.swap_ab else self.fusion.d_cols(self.atom_cols)

    @property
    def store_group(self) -> int:
        """Accumulator columns that a warp stores at a time: as many as fit into a box and into shared memory.

        A full box of 128 bytes is used even if it does not divide the columns, if there is memory for its buffers;
        ``store_rest`` then stores the remainder. Otherwise the group is the widest row that divides the columns.
        """
        if self.swap_ab:
            return next(rows for rows in (64, 48, 32, 16) if self.atom_cols % rows == 0)
        chunk = self.output.chunk
        free_bytes = self.target.capability.smem_block_bytes - self.ring_bytes - self.barrier_bytes
        if self.stored_n > chunk and self._buffer_bytes(chunk) <= free_bytes and self.alone_on_sm:
            return chunk
        return widest_row(self.stored_n, self.output)

    @property
    def store_rest(self) -> int:
        """The columns that ``store_group`` leaves over and that are stored separately; 0 if there are none."""
        return widest_row(remainder, self.output) if (remainder := self.stored_n % self.store_group) else 0

    @property
    def ring_bytes(self) -> int:
        """Shared memory of the stages of A and B."""
        return self.stages * self.step_bytes

    @property
    def store_bytes(self) -> int:
        """Bytes of the epilogue's buffers: two per warp, each for 16 rows or columns of D."""
        return self._buffer_bytes(self.store_group) if self.stores_tiles == "tma" else 0

    def _buffer_bytes(self, group: int) -> int:
        """Bytes of the epilogue's buffers if a warp stores this many columns at a time."""
        return self.store_warps * STORE_BUFFERS * 16 * group * self.output.bytes

    @property
    def barrier_bytes(self) -> int:
        """Bytes of the mbarriers and of the family's other small data in shared memory."""
        raise NotImplementedError

    @property
    def smem_bytes(self) -> int:
        """Bytes of ring, epilogue buffers and barriers."""
        return self.ring_bytes + self.store_bytes + self.barrier_bytes

    @property
    def summed_in(self) -> SummedIn:
        """Where partial sums over k are added: ``none``, in the shared memory of a cluster, in a workspace in device
        memory, or there for the last wave only (``stream``)."""
        return "stream" if self.stream_k else "workspace" if self.split_k > 1 else "none"

    @property
    def keeps_parts(self) -> bool:
        """Whether partial sums are written to device memory, where all CTAs then add equal shares of them."""
        return self.summed_in in ("workspace", "stream")

    @property
    def stores_tiles(self) -> Literal["tma", "direct", "parts"]:
        """How a CTA stores a tile whose whole k it computes: by TMA or directly. It is ``parts`` if k is split in a
        workspace, so that no CTA computes all k of a tile."""
        return "parts" if self.summed_in == "workspace" else self.epilogue

    @property
    def cluster_ctas(self) -> int:
        return self.cluster[0] * self.cluster[1]

    @property
    def ctas(self) -> int:
        """CTA tiles of the problem, including slices of k and tiles of clusters that reach beyond the problem."""
        clusters = ceil_div(self.tiles_m, self.cluster[0]) * ceil_div(self.tiles_n, self.cluster[1])
        return clusters * self.cluster[0] * self.cluster[1] * self.split_k

    @property
    def remarks(self) -> list[str]:
        """Notes for the author of a legal record."""
        remarks = super().remarks
        if self.summed_in == "workspace" and self.epilogue == "tma":
            remarks.append("epilogue=tma: sums from the workspace are stored from registers, as with direct")
        at_once = self.target.sms * max(1, self.ctas_per_sm(self.estimated_registers))
        if self.stream_k and self.ctas % at_once == 0:
            remarks.append(f"stream_k=true: {self.ctas} tiles fill waves of {at_once}, so nothing is shared out")
        if self.prefetches_b and not self.pdl:
            remarks.append("prefetch_b=true: without pdl no kernel runs during the wait, so nothing is asked for early")
        for name, chunk, part in (("A", self.chunk_a, self.part_a), ("B", self.chunk_b, self.part_b)):
            if chunk < self.element.chunk:
                remarks.append(f"boxes of {name} are {chunk} columns wide: {part // chunk} of them per k-tile")
        return remarks

    def cluster_warnings(self) -> Iterator[str]:
        """Warnings about clusters that reach beyond the problem or leave SMs idle."""
        if self.tiles_m % self.cluster[0] or self.tiles_n % self.cluster[1]:
            yield f"cluster={list(self.cluster)} reaches beyond the {self.tiles_m} x {self.tiles_n} tiles"
        if self.target.sms % self.cluster_ctas:
            yield f"clusters of {self.cluster_ctas} leave SMs idle"

    @property
    def tile(self) -> str:
        return f"{self.bm}x{self.bn}x{self.bk}_s{self.stages}"

    @property
    def persistent(self) -> bool:
        """Whether a CTA takes tile after tile."""
        return True

    @property
    def tensor_tiles(self) -> int:
        """Tiles whose accumulators lie in tensor memory; 0 if registers hold them."""
        return 0

    @property
    def paired(self) -> bool:
        """Whether one thread multiplies for two CTAs."""
        return False

    @property
    def prefetches_b(self) -> bool:
        """Whether the loading thread asks the L2 for its first tiles of B before it waits for the previous kernel."""
        return False

    @property
    def claims_tiles(self) -> bool:
        """Whether the grid has one cluster per tile, and running clusters claim the tiles of clusters that have not
        started (cluster launch control).

        Otherwise the grid is persistent and has as many clusters as the GPU holds.
        """
        return False

    @property
    def launch(self) -> Tma:
        """The facts by which the launcher launches the kernel, with the boxes of its tensor maps."""
        # The CTAs that share a tile load equal parts of it, so a box has only a part of its rows. These number the
        # tile's m or n if they run along k, else its k.
        along_k, (d_cols, d_rows) = self.along_k, self._box_d
        return Tma(
            **self.launch_facts,
            reduce="none" if self.summed_in == "stream" else self.summed_in,
            persistent=int(self.persistent and not self.claims_tiles),
            stream_k=int(self.stream_k),
            counters="returned" if self.keeps_parts else "cleared",
            cluster_m=self.cluster[0],
            cluster_n=self.cluster[1],
            box_a_cols=self.chunk_a,
            box_a_rows=(self.part_a // self.boxes_a if along_k.a else self.bk) // self.sharers_a,
            box_b_cols=self.chunk_b,
            box_b_rows=(self.panel_b // self.boxes_b if along_k.b else self.bk) // self.sharers_b,
            box_d_cols=d_cols,
            box_d_rows=d_rows,
            box_d_rest_cols=self.store_rest if self.stores_tiles == "tma" else 0,
        )

    @property
    def _box_d(self) -> tuple[int, int]:
        """Columns and rows of the box of one store by TMA, zeros without TMA.

        A warp stores 16 rows of D and a group of its columns. If operands are swapped, it stores 16 columns and a group
        of rows.
        """
        if self.stores_tiles != "tma":
            return 0, 0
        return (16, self.store_group) if self.swap_ab else (self.store_group, 16)

    @property
    def other_options(self) -> list[dict[str, int]]:
        """Launch options that tests try: both axes, bands of one tile and of more tiles than exist, all L2 hints, and
        overlap with the previous kernel."""
        return [
            {"raster_axis": 1, "raster_group": 1, "hint_a": 1, "hint_b": 2, "pdl": 1},
            {"raster_axis": 0, "raster_group": 2, "hint_a": 2, "hint_b": 0},
            {"raster_axis": 1, "raster_group": 64, "hint_b": 1},
        ]

    # For the tuner and the cost model.

    SIZE_VARIANTS: ClassVar[tuple[Fields, ...]] = (
        {},
        {"epilogue": "direct"},
        {"padding": "pad"},
        {"epilogue": "direct", "padding": "pad"},
    )
    FREE_FIELDS: ClassVar[frozenset[str]] = frozenset({"raster_axis", "raster_group", "hint_a", "hint_b"})

    @classmethod
    def depths(cls, problem: Problem) -> tuple[int, int]:
        """The values of ``bk`` that the tuner tries."""
        chunk = problem.element.chunk
        return chunk, 2 * chunk

    @classmethod
    def free_fields(cls, problem: Problem) -> dict[str, list[Fields]]:  # noqa: ARG003
        """The order of tiles, and L2 hints for the operands."""
        return {
            "raster_axis": [{"raster_axis": axis} for axis in "mn"],
            "raster_group": [{"raster_group": group} for group in BAND_WIDTHS],
            "hint_a": [{"hint_a": hint} for hint in get_args(Hint)],
            "hint_b": [{"hint_b": hint} for hint in get_args(Hint)],
        }


def deepest_ring(problem: Problem, extent: int, bk: int, store_warps: int) -> int:
    """Most stages that fit on the problem's GPU, up to ``MOST_STAGES``.

    ``extent``: rows of A and columns of B in a stage; ``store_warps``: warps with store buffers for TMA, 0 without.
    """
    buffers = store_warps * STORE_BUFFERS * 16 * CHUNK_BYTES
    ring_bytes = GPUS[problem.gpu].capability.smem_block_bytes - buffers - RESERVED_BYTES
    return min(MOST_STAGES, ring_bytes // (extent * bk * problem.element.bytes))


def widest_row(extent: int, element: Element) -> int:
    """The widest swizzled row (128, 64 or 32 bytes), in elements, that divides ``extent``.

    The bytes of ``extent`` are a multiple of 32.
    """
    chunk = element.chunk
    return next(row for row in (chunk, chunk // 2, chunk // 4) if extent % row == 0)
