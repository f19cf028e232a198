"""Proves that the report judges the project's aims, and the timing model by size class, as its figures say."""

from __future__ import annotations

import pytest

from cudal2gen import report
from cudal2gen.generation import catalog
from cudal2gen.kernel import Problem, revise
from cudal2gen.report import aims
from cudal2gen.results import KERNEL, Environment, Measurement
from cudal2gen.results.ratios import spearman
from cudal2gen.timing import model
from tests.cudal2gen.measured import H200, measurement, timing
from tests.cudal2gen.reporting import rows, store_of, table

# Sizes m, n, k. The aims of f32 are a speedup of 1.05 over all problems, of 1.0 over those of at least 1e10 FLOP, and
# of 1.15 over the class split-k. The aim of f16 is 1.1 over all problems.
SPLIT_K = (128, 128, 16384)
LARGE, SMALL = (4096, 4096, 4096), (64, 64, 64)


def measurement_with_cublaslt(mnk: tuple[int, int, int], speedup: float, **fields: object) -> Measurement:
    """A measurement on an H200 in which the faster of cuBLASLt's layouts takes ``speedup`` times our time."""
    vendors = [timing(f"cublaslt-autotuning-{layout}", [10.0 * speedup] * 9) for layout in ("nn", "tn")]
    return measurement(mnk, [timing(KERNEL, [10.0] * 9, record="r"), *vendors], **fields)


def aim_rows(*measurements: Measurement, card: Environment = H200) -> dict[str, dict[str, str]]:
    """The rows of the table of aims in a report on these measurements: by the aim's title, cells by column."""
    document = report.report(store_of(*measurements, environment=card), [])
    return rows(table(document, "measured-1", f"The project's aims on {card.name}, "))


def test_aims_have_figures_of_their_problems_alone() -> None:
    figures = aim_rows(
        measurement_with_cublaslt(SMALL, 1.21, acc="f32"),
        measurement_with_cublaslt(SPLIT_K, 1.0, acc="f32"),
        measurement_with_cublaslt(LARGE, 1.0, acc="f32"),
    )
    # The speedups are 1.21, 1 and 1, so their geometric mean is the cube root of 1.21. Its interval includes the aim.
    everything, large, split_k = figures["all problems"], figures["at least 1e+10 FLOP"], figures["class split-k"]
    assert (everything["measured"], everything["reached"]) == ("3", "within noise, of 3 problems")
    assert float(everything["geomean speedup [95 %]"].split()[0]) == pytest.approx(1.21 ** (1 / 3), abs=0.001)
    assert (large["measured"], large["geomean speedup [95 %]"].split()[0], large["reached"]) == (
        "1",
        "1.000",
        "yes, of 3 problems",
    )
    assert (split_k["measured"], split_k["aim"], split_k["reached"]) == ("1", "1.150", "no, of 3 problems")


def test_an_aim_that_is_missed_by_little_is_missed() -> None:
    assert aim_rows(measurement_with_cublaslt(SMALL, 1.049, acc="f32"))["all problems"]["reached"] == "no, of 1 problem"
    assert (
        aim_rows(measurement_with_cublaslt(SMALL, 1.051, acc="f32"))["all problems"]["reached"] == "yes, of 1 problem"
    )
    f16 = aim_rows(measurement_with_cublaslt(SMALL, 1.09, acc="f16"))
    assert list(f16) == ["all problems"]
    assert (f16["all problems"]["aim"], f16["all problems"]["reached"]) == ("1.100", "no, of 1 problem")


def test_aims_name_the_card_that_measured() -> None:
    h100 = H200.model_copy(update={"gpu": "h100", "name": "NVIDIA H100 80GB HBM3"})
    for gpu in ("h100", "h200"):  # even if the problem names another GPU
        row = aim_rows(measurement_with_cublaslt(SMALL, 1.2, acc="f32", gpu=gpu), card=h100)["all problems"]
        assert row["reached"] == "yes, of 1 problem"
    a100 = H200.model_copy(update={"gpu": "a100", "name": "NVIDIA A100-SXM4-80GB"})
    document = report.report(store_of(measurement_with_cublaslt(SMALL, 1.2, acc="f32"), environment=a100), [])
    assert not [part for part in document.sections[1].tables if part.caption.startswith("The project's aims")]


def test_the_timing_model_is_the_measuring_cards() -> None:
    """An H200's record that was measured on an H100 is compared with the modelled time of an H100."""
    record = catalog.find(Problem(gpu="h200", acc="f32", layout="tn", m=4096, n=4096, k=64)).record
    times = {card: model.estimate(revise(record, gpu=card)).us for card in ("h100", "h200")}
    assert times["h100"] > 1.1 * times["h200"], "device memory bounds it"
    h100 = H200.model_copy(update={"gpu": "h100", "name": "NVIDIA H100 80GB HBM3"})
    row = measurement((4096, 4096, 64), [timing(KERNEL, [20.0] * 9, record=record.name)], acc="f32", gpu="h100")
    document = report.report(store_of(row, environment=h100), [record])
    (measured_row,) = rows(table(document, "measured-1", "Beside the card's floor")).values()
    assert float(measured_row["ours / modelled"]) == pytest.approx(20.0 / times["h100"], abs=0.001)


def test_aims_concern_one_baseline_protocol_and_state_of_the_l2() -> None:
    elsewhere = measurement(SMALL, [timing(KERNEL, [1.0] * 9), timing("torch.matmul", [2.0] * 9)], acc="f32")
    for other in (elsewhere, measurement_with_cublaslt(SMALL, 2.0, acc="f32", l2="hot")):
        document = report.report(store_of(other), [])
        captions = [part.caption for part in document.sections[1].tables]
        assert not [caption for caption in captions if caption.startswith("The project's aims")], aims.BASELINE


@pytest.mark.slow
def test_the_timing_model_is_judged_by_size_class() -> None:
    """Three tiny kernels take 2, 4 and 3 times their modelled time, so the median is 3. A rank correlation needs more
    than the one huge kernel, which takes 1.5 times its modelled time."""
    chosen = [record for record in catalog.load() if (record.gpu, record.acc) == ("h200", "f32")]
    tiny = [record for record in chosen if record.problem.size_class == "tiny" and record.layout == "tn"][:3]
    huge = next(record for record in chosen if record.problem.size_class == "huge" and record.layout == "tn")
    factors = [2.0, 4.0, 3.0]
    measured = [
        (record, model.estimate(record).us * factor)
        for record, factor in [*zip(tiny, factors, strict=True), (huge, 1.5)]
    ]
    measurements = [
        measurement((record.m, record.n, record.k), [timing(KERNEL, [us] * 9, record=record.name)], acc="f32")
        for record, us in measured
    ]
    document = report.report(store_of(*measurements), [*tiny, huge])
    columns = rows(table(document, "measured-1", "The timing model, by size class"))
    assert set(columns) == {"tiny", "huge"}
    assert columns["tiny"]["kernels"] == "3"
    assert columns["tiny"]["ours / modelled, median"] == "3.000"
    assert columns["huge"]["eight of ten"] == "1.500 to 1.500"
    assert columns["huge"]["rank correlation"] == "—"
    correlation = spearman([us for _, us in measured[:3]], [model.estimate(record).us for record in tiny])
    assert columns["tiny"]["rank correlation"] == f"{correlation:.2f}"
