"""Which choices go with which sizes: the paper's Figure 4, from the catalog alone."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from cudal2gen.kernel import Record, Sm80Multistage
from cudal2gen.report.statistics import share, spearman
from cudal2gen.report.tables import Chart, Section, Table, percent

# (choice, size, Spearman's correlation in the paper; None where it prints none)
PAIRS = (("bm", "m", 0.652), ("bn", "n", 0.705), ("bk", "k", 0.256), ("bm", "bn", 0.695), ("stages", "k", 0.473))
SMALL_MNK, LARGE_MNK = 2**27, 2**36
PAPER_SWIZZLE = (0.44, 0.99)
TOLERANCE = 0.05


class Figure(NamedTuple):
    """One figure of ours beside the paper's."""

    what: str
    ours: float
    paper: float

    @property
    def agrees(self) -> bool:
        return abs(self.ours - self.paper) <= TOLERANCE


def subset(records: Sequence[Record]) -> list[Sm80Multistage]:
    """The A100 records with fp16 accumulators, B stored (N,K), and a ring of two or more stages."""
    return [
        record
        for record in records
        if isinstance(record, Sm80Multistage)
        and (record.gpu, record.acc, record.layout) == ("a100", "f16", "tn")
        and record.stages >= 2
    ]


def mnk(record: Sm80Multistage) -> int:
    """The size that the paper orders problems by."""
    return record.m * record.n * record.k


def correlations(chosen: Sequence[Sm80Multistage]) -> list[Figure]:
    """Spearman's, of every pair that the paper prints."""
    return [
        Figure(_name(choice, size), spearman(_values(chosen, choice), _values(chosen, size)), paper)
        for choice, size, paper in PAIRS
    ]


def swizzle_use(chosen: Sequence[Sm80Multistage], effective: bool = False) -> tuple[float, float]:
    """Share of records with CTAs swizzled over slices of N: of the small problems, of the large ones.

    Chosen by the record (raster zsplit), or only where that is ``effective``: more than one slice, grid.z > 1.
    """
    small = [record for record in chosen if mnk(record) <= SMALL_MNK]
    large = [record for record in chosen if mnk(record) > LARGE_MNK]
    return share(_swizzled(one, effective) for one in small), share(_swizzled(one, effective) for one in large)


def figures(chosen: Sequence[Sm80Multistage]) -> list[Figure]:
    """Everything of Figure 4 that the paper gives a number for."""
    small, large = swizzle_use(chosen)
    return [
        *correlations(chosen),
        Figure("block swizzle chosen, MNK ≤ 2^27", small, PAPER_SWIZZLE[0]),
        Figure("block swizzle chosen, MNK > 2^36", large, PAPER_SWIZZLE[1]),
    ]


def section(records: Sequence[Record]) -> Section:
    """Figure 4 as it follows from these records."""
    chosen = subset(records)
    title = "What the records choose, by size (the paper's Figure 4)"
    if not chosen:
        return Section("choices", title, ("The catalog has no A100 fp16 records with two or more stages.",))
    return Section(
        "choices",
        title,
        (
            f"From the catalog alone, no measurement: the {len(chosen)} records of family sm80_multistage for the "
            "A100, fp16 accumulators, layout tn, with stages ≥ 2. A disc is one pair of values, its area the number of "
            "records; the line joins the medians.",
        ),
        tables=(_table(chosen),),
        charts=(*(_pair_chart(chosen, *pair) for pair in PAIRS), _use_chart(chosen), _stride_chart(chosen)),
        notes=(_definition(chosen),),
    )


def _swizzled(record: Sm80Multistage, effective: bool) -> bool:
    return record.slices_n > 1 if effective else record.raster == "zsplit"


def _definition(chosen: Sequence[Sm80Multistage]) -> str:
    small, large = swizzle_use(chosen, effective=True)
    return (
        "Block swizzle “chosen” is raster zsplit in the record, as the published kernels are written. In part of them "
        "the stride covers all of N, so that grid.z is 1 and nothing is swizzled: it takes effect (grid.z > 1) in "
        f"{percent(small)} of the small and {percent(large)} of the large problems only. The paper's 44 % and 99 % "
        "agree with the choice, not with the effect."
    )


def _table(chosen: Sequence[Sm80Multistage]) -> Table:
    rows = [
        (one.what, f"{one.ours:.3f}", f"{one.paper:.3f}", f"{one.ours - one.paper:+.3f}",
         "yes" if one.agrees else "no")
        for one in figures(chosen)[:5]
    ]  # fmt: skip
    rows += [
        (one.what, percent(one.ours), percent(one.paper), f"{round(100 * (one.ours - one.paper), 1) + 0.0:+.1f} points",
         "yes" if one.agrees else "no")
        for one in figures(chosen)[5:]
    ]  # fmt: skip
    return Table(
        f"Spearman's correlations and shares over {len(chosen)} records (A100, f16, tn, stages ≥ 2), with the paper's",
        ("figure", "this catalog", "paper", "difference", f"within {TOLERANCE}"),
        tuple(rows),
    )


def _pair_chart(chosen: Sequence[Sm80Multistage], choice: str, size: str, paper: float) -> Chart:
    x, y = _values(chosen, size), _values(chosen, choice)
    own = spearman(x, y)
    return Chart(
        "discs",
        _name(choice, size),
        f"{choice.upper()} against {size.upper()}: Spearman {own:.3f}, paper {paper:.3f}.",
        {
            "x": _label(size),
            "y": _label(choice),
            "discs": [[a, b, count] for (a, b), count in sorted(Counter(zip(x, y, strict=True)).items())],
            "line": _medians(x, y),
            "linear": choice == "stages",
            "figure": f"Spearman {own:.3f} (paper {paper:.3f})",
        },
    )


def _use_chart(chosen: Sequence[Sm80Multistage]) -> Chart:
    bins: dict[int, list[Sm80Multistage]] = defaultdict(list)
    for record in chosen:
        bins[int(math.log2(mnk(record)))].append(record)
    small, large = swizzle_use(chosen)
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
                    share(_swizzled(one, False) for one in own),
                    share(_swizzled(one, True) for one in own),
                    len(own),
                ]
                for size, own in sorted(bins.items())
            ],
            "figure": f"{percent(small)} → {percent(large)} (paper 44 % → 99 %)",
        },
    )


def _stride_chart(chosen: Sequence[Sm80Multistage]) -> Chart:
    used = [record for record in chosen if record.swizzle_stride]
    x, y = [2.0 ** round(math.log2(mnk(one))) for one in used], [float(one.swizzle_stride or 0) for one in used]
    own = spearman([mnk(one) for one in used], y)
    return Chart(
        "discs",
        "Swizzle stride against size",
        f"swizzle_stride of the {len(used)} records with raster zsplit against M·N·K: Spearman {own:.3f}; "
        "the paper prints no figure.",
        {
            "x": "M·N·K",
            "y": "swizzle stride (columns)",
            "discs": [[a, b, count] for (a, b), count in sorted(Counter(zip(x, y, strict=True)).items())],
            "line": _medians(x, y),
            "linear": False,
            "figure": f"Spearman {own:.3f}, {len(used)} with zsplit",
        },
    )


def _values(chosen: Sequence[Sm80Multistage], name: str) -> list[float]:
    return [float(getattr(record, name)) for record in chosen]


def _medians(x: Sequence[float], y: Sequence[float]) -> list[list[float]]:
    columns: dict[float, list[float]] = defaultdict(list)
    for a, b in zip(x, y, strict=True):
        columns[a].append(b)
    return [[a, median(column)] for a, column in sorted(columns.items())]


def _label(name: str) -> str:
    return name if name == "stages" else name.upper()


def _name(choice: str, size: str) -> str:
    return f"{_label(choice)} against {_label(size)}"
