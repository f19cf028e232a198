"""Proves that figures of the paper are recomputed from the catalog, and printed with ours and with their source."""

from __future__ import annotations

import pytest

from cudal2gen import report
from cudal2gen.generation import catalog
from cudal2gen.kernel import Sm80Multistage
from cudal2gen.report import choices, published
from tests.cudal2gen.measured import campaign
from tests.cudal2gen.reporting import EMPTY, section, table


def test_figure_4_is_the_papers_within_a_twentieth() -> None:
    """``paper`` has correlations and shares as printed in figure 4. Those of the catalog differ by up to 0.05, and the
    exact ones guard the catalog against changes."""
    rows = choices.subset(catalog.load())
    figures = {figure.name: figure.catalog for figure in [*choices.correlations(rows), *choices.shares(rows)]}
    assert len(rows) == 941
    paper = {
        "BM against M": 0.652,
        "BN against N": 0.705,
        "BK against K": 0.256,
        "BM against BN": 0.695,
        "stages against K": 0.473,
        "block swizzle chosen, MNK ≤ 2^27": 0.44,
        "block swizzle chosen, MNK > 2^36": 0.99,
    }
    assert set(figures) == set(paper)
    for name, value in paper.items():
        assert abs(figures[name] - value) <= 0.05, name
    # Recomputed from the published kernels.
    assert figures == pytest.approx(
        dict(zip(paper, (0.652, 0.704, 0.300, 0.696, 0.442, 0.440, 0.986), strict=True)), abs=0.0006
    )


def test_figure_4_says_that_a_chosen_swizzle_need_not_take_effect() -> None:
    rows = choices.subset(catalog.load())
    small, large = choices.swizzle_use(rows, effective=True)
    assert (round(small, 3), round(large, 3)) == (0.215, 0.819)
    document = report.report(EMPTY, catalog.load())
    assert "21.5 % of the small and 81.9 % of the large" in section(document, "choices").notes[0]
    assert "941 records (A100, f16, tn, stages ≥ 2)" in section(document, "choices").tables[0].caption
    assert all(row[-1] == "yes" for row in section(document, "choices").tables[0].rows)


def test_a_figure_off_the_papers_is_said_to_be_off() -> None:
    records = [record for record in catalog.load() if isinstance(record, Sm80Multistage) and record.k < 1024]
    part = choices.section(records)
    assert {row[-1] for row in part.tables[0].rows} == {"yes", "no"}
    assert choices.section([]).paragraphs[0].startswith("The catalog has no")


def test_the_charts_of_figure_4_hold_every_record() -> None:
    charts = section(report.report(EMPTY, catalog.load()), "choices").charts
    assert [chart.kind for chart in charts] == ["discs"] * 5 + ["shares", "discs"]
    for chart in charts[:5]:
        assert sum(count for *_, count in chart.data["discs"]) == 941
    assert sum(bar[3] for bar in charts[5].data["bins"]) == 941
    assert sum(count for *_, count in charts[6].data["discs"]) == 723


@pytest.mark.slow
def test_published_figures_have_their_source_and_are_compared_with_ours() -> None:
    figures = published.load()
    assert len(figures.rows) == 4 * 2 * 10
    assert figures.source["paper"] == "arXiv 2512.02551"
    best = next(iter(figures.nearest("a100", "f16", "offline").values()))
    assert (best.gpu, best.acc, best.baseline, best.shapes) == ("a100", "f16", "torch.matmul", 1000)
    assert (best.mean, best.wins) == (1.2214, 0.897)
    assert {row.gpu for row in figures.nearest("h200", "f32", "server").values()} == {"h100"}
    document = report.report(campaign(20), [])
    assert (
        "DeepReinforce, arXiv 2512.02551, repository deepreinforce-ai/CUDA-L2"
        in section(document, "published").paragraphs[0]
    )
    beside = table(
        document, "measured-1", "Beside CUDA-L2's published figures (arXiv 2512.02551). Not the same experiment."
    )
    assert "NVIDIA H200, f16, tn, device, L2 cold" in beside.caption
    assert "Theirs: A100, f16, offline" in beside.caption
    assert beside.rows[0][:3:2] == ("torch.matmul", "1.221")
