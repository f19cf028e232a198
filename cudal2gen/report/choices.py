"""Shows how tiles, stages and swizzles depend on the problem's size, as Figure 4 of the CUDA-L2 paper does.

The numbers are computed from our catalog's records for the A100 and printed beside those of the paper. They agree if
the catalog reproduces the choices of the published kernels.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from cudal2gen.kernel import Problem, Record, ceil_div
from cudal2gen.report.statistics import share
from cudal2gen.results.ratios import spearman
from kernelproof.ground.pages import Chart, Section, Table, percent

# (decision, size, Spearman's rank correlation that the paper prints for the two)
PAIRS = (("bm", "m", 0.652), ("bn", "n", 0.705), ("bk", "k", 0.256), ("bm", "bn", 0.695), ("stages", "k", 0.473))
SMALL_MNK, LARGE_MNK = 2**27, 2**36  # problems up to the first M·N·K are small, those above the second large
PAPER_SWIZZLE = (0.44, 0.99)  # the paper's shares of kernels with block swizzle: small problems, large problems
TOLERANCE = 0.05  # a number agrees with the paper's if it differs by no more


class Decisions(NamedTuple):
    """The sizes of a problem, and the fields of its record that Figure 4 shows. Extents are in elements."""

    family: str
    m: int
    n: int
    k: int
    bm: int
    bn: int
    bk: int
    stages: int
    raster: str
    swizzle_stride: int | None

    @property
    def mnk(self) -> int:
        """M·N·K, the size by which the paper orders problems."""
        return self.m * self.n * self.k

    def swizzled(self, effective: bool) -> bool:
        """Whether the record chooses block swizzle; with ``effective``, whether the swizzle changes the order of tiles.

        It changes nothing if one stride covers all of N, because the grid then has a single slice.
        """
        if not effective:
            return self.raster == "zsplit"
        stride = self.swizzle_stride
        return bool(stride) and ceil_div(ceil_div(self.n, self.bn) * self.bn, stride or 1) > 1


class PaperNumber(NamedTuple):
    """A number that the paper prints in Figure 4, and its value in this catalog."""

    name: str
    catalog: float
    paper: float

    @property
    def agrees(self) -> bool:
        """Whether the two differ by at most ``TOLERANCE``."""
        return abs(self.catalog - self.paper) <= TOLERANCE


def is_counted(problem: Problem) -> bool:
    """Whether a problem's record is counted in this section: A100, fp16 accumulators, B stored (N,K)."""
    return (problem.gpu, problem.acc, problem.layout) == ("a100", "f16", "tn")


def subset(records: Sequence[Record]) -> list[Decisions]:
    """The decisions of the records that ``is_counted`` admits and that have two pipeline stages or more.

    Records of a family that lacks one of the fields of ``Decisions`` are left out.
    """
    rows = [
        Decisions(*(getattr(record, name) for name in Decisions._fields))
        for record in records
        if is_counted(record.problem) and set(Decisions._fields) <= record.line_fields().keys()
    ]
    return [row for row in rows if row.stages >= 2]


def correlations(rows: Sequence[Decisions]) -> list[PaperNumber]:
    """Spearman's correlation for every pair of decision and size that the paper prints."""
    return [
        PaperNumber(_name(decision, size), spearman(_values(rows, decision), _values(rows, size)), paper)
        for decision, size, paper in PAIRS
    ]


def swizzle_use(rows: Sequence[Decisions], effective: bool = False) -> tuple[float, float]:
    """The shares (0 to 1) of records with block swizzle: among problems with M·N·K up to ``SMALL_MNK``, and among those
    above ``LARGE_MNK``."""
    small = [row for row in rows if row.mnk <= SMALL_MNK]
    large = [row for row in rows if row.mnk > LARGE_MNK]
    return share(row.swizzled(effective) for row in small), share(row.swizzled(effective) for row in large)


def shares(rows: Sequence[Decisions]) -> list[PaperNumber]:
    """The two shares of block swizzle that the paper prints."""
    small, large = swizzle_use(rows)
    return [
        PaperNumber("block swizzle chosen, MNK ≤ 2^27", small, PAPER_SWIZZLE[0]),
        PaperNumber("block swizzle chosen, MNK > 2^36", large, PAPER_SWIZZLE[1]),
    ]


def section(records: Sequence[Record]) -> Section:
    """The section with Figure 4 as computed from these records."""
    rows = subset(records)
    title = "What the records choose, by size (the paper's Figure 4)"
    if not rows:
        return Section("choices", title, ("The catalog has no A100 fp16 records with two or more stages.",))
    families = " and ".join(sorted({row.family for row in rows}))
    return Section(
        "choices",
        title,
        (
            f"Computed from the catalog, not measured: {len(rows)} records of family {families} for the A100, fp16 "
            "accumulators, layout tn, stages ≥ 2. A disc is one pair of values, its area the number of records; the "
            "line joins the medians.",
        ),
        tables=(_table(rows),),
        charts=(*(_pair_chart(rows, *pair) for pair in PAIRS), _use_chart(rows), _stride_chart(rows)),
        notes=(_definition(rows),),
    )


def _definition(rows: Sequence[Decisions]) -> str:
    """A note on what counts as block swizzle: its choice in the record, and its effect on the order of tiles."""
    small, large = swizzle_use(rows, effective=True)
    return (
        "Block swizzle “chosen” means raster zsplit in the record, as the published kernels are written. In part of "
        "these records the stride covers all of N, so grid.z is 1 and swizzling changes nothing: it takes effect "
        f"(grid.z > 1) in {percent(small)} of the small and {percent(large)} of the large problems only. The paper's "
        "44 % and 99 % agree with the choice, not with the effect."
    )


def _table(rows: Sequence[Decisions]) -> Table:
    """A table with a row for each compared number: that of the catalog, that of the paper, and the difference."""
    cells = [
        (f"{number.catalog:.3f}", f"{number.paper:.3f}", f"{number.catalog - number.paper:+.3f}")
        for number in correlations(rows)
    ]
    cells += [
        (
            percent(number.catalog),
            percent(number.paper),
            # + 0.0 turns a difference of -0.0 into 0.0.
            f"{round(100 * (number.catalog - number.paper), 1) + 0.0:+.1f} points",
        )
        for number in shares(rows)
    ]
    numbers = [*correlations(rows), *shares(rows)]
    return Table(
        f"Spearman's correlations and shares over {len(rows)} records (A100, f16, tn, stages ≥ 2), with the paper's",
        ("figure", "this catalog", "paper", "difference", f"within {TOLERANCE}"),
        tuple(
            (number.name, *texts, "yes" if number.agrees else "no")
            for number, texts in zip(numbers, cells, strict=True)
        ),
    )


def _discs(x: Sequence[float], y: Sequence[float], x_label: str, y_label: str) -> dict[str, object]:
    """The data of a chart of discs: each distinct (x, y) with its count, and the line of the medians of y by x."""
    return {
        "x": x_label,
        "y": y_label,
        "discs": [[a, b, count] for (a, b), count in sorted(Counter(zip(x, y, strict=True)).items())],
        "line": _medians(x, y),
    }


def _pair_chart(rows: Sequence[Decisions], decision: str, size: str, paper: float) -> Chart:
    """A chart of a decision against a size. ``paper``: the correlation that the paper prints."""
    x, y = _values(rows, size), _values(rows, decision)
    correlation = spearman(x, y)
    caption = f"Spearman {correlation:.3f} (paper {paper:.3f})"
    return Chart(
        "discs",
        _name(decision, size),
        f"{decision.upper()} against {size.upper()}: Spearman {correlation:.3f}, paper {paper:.3f}.",
        _discs(x, y, _label(size), _label(decision)) | {"linear": decision == "stages", "figure": caption},
    )


def _use_chart(rows: Sequence[Decisions]) -> Chart:
    """The chart of how many records choose block swizzle, in bins of log2 M·N·K."""
    bins: dict[int, list[Decisions]] = defaultdict(list)
    for row in rows:
        bins[int(math.log2(row.mnk))].append(row)
    small, large = swizzle_use(rows)
    return Chart(
        "shares",
        "Block swizzle: chosen (light), in effect (dark)",
        f"Share of records with block swizzle by log2 MNK: chosen in {percent(small)} at MNK ≤ 2^27 (paper 44 %) and "
        f"{percent(large)} above 2^36 (paper 99 %).",
        {
            "x": "log₂ M·N·K",
            "y": "% of records",
            "bins": [
                [
                    size,
                    share(row.swizzled(effective=False) for row in members),
                    share(row.swizzled(effective=True) for row in members),
                    len(members),
                ]
                for size, members in sorted(bins.items())
            ],
            "figure": f"{percent(small)} → {percent(large)} (paper 44 % → 99 %)",
        },
    )


def _stride_chart(rows: Sequence[Decisions]) -> Chart:
    """A chart of the swizzle strides against M·N·K."""
    strides = [(row.mnk, float(row.swizzle_stride)) for row in rows if row.swizzle_stride]
    x, y = [2.0 ** round(math.log2(mnk)) for mnk, _ in strides], [stride for _, stride in strides]
    correlation = spearman([mnk for mnk, _ in strides], y)
    caption = f"Spearman {correlation:.3f}, {len(strides)} with zsplit"
    return Chart(
        "discs",
        "Swizzle stride against size",
        f"swizzle_stride of the {len(strides)} records with raster zsplit against M·N·K: Spearman {correlation:.3f}; "
        "the paper prints no figure.",
        _discs(x, y, "M·N·K", "swizzle stride (columns)") | {"linear": False, "figure": caption},
    )


def _values(rows: Sequence[Decisions], name: str) -> list[float]:
    """The field of this name, a size or a decision, of each row."""
    return [float(getattr(row, name)) for row in rows]


def _medians(x: Sequence[float], y: Sequence[float]) -> list[list[float]]:
    """For each distinct x, in ascending order, the pair of x and the median of its y."""
    columns: dict[float, list[float]] = defaultdict(list)
    for a, b in zip(x, y, strict=True):
        columns[a].append(b)
    return [[a, median(column)] for a, column in sorted(columns.items())]


def _label(name: str) -> str:
    """A decision or size as an axis shows it."""
    return name if name == "stages" else name.upper()


def _name(decision: str, size: str) -> str:
    """The name of the number, and of the chart, of a decision against a size."""
    return f"{_label(decision)} against {_label(size)}"
