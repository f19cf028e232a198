"""Proves the report's statistics, floors and doubts against numbers that are computed another way."""

from __future__ import annotations

import json
import math
import operator
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudal2gen import report
from cudal2gen.generation import catalog
from cudal2gen.kernel import Problem
from cudal2gen.report import groups, page
from cudal2gen.report.statistics import best_of, summarise
from cudal2gen.results import KERNEL, Measurement, Measurements, speedup
from cudal2gen.results.ratios import Ratio, spearman
from cudal2gen.timing import model
from kernelproof.ground.element import F16
from tests.cudal2gen.measured import H200, QUIET, campaign, measurement, shapes, timing
from tests.cudal2gen.reporting import EMPTY, embedded_data, rows, section, steady, store_of, table
from tests.cudal2gen.test_cli import error


def test_spearman_with_ties() -> None:
    """By hand: ranks 1 2.5 2.5 4 and 1 3 2 4; covariance 4.5, variances 4.5 and 5."""
    assert spearman([1, 5, 5, 9], [10, 30, 20, 40]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert math.isnan(spearman([1, 1], [1, 2]))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=7))
def test_spearman_counts_pairs(pairs: list[tuple[int, int]]) -> None:
    """Twice a value's mean rank is the number of values below it, plus those up to it, plus 1. In centred ranks, the
    correlation is that of two vectors."""
    x, y = ([pair[side] for pair in pairs] for side in (0, 1))
    ranks = [[sum(b < a for b in side) + sum(b <= a for b in side) - len(side) for a in side] for side in (x, y)]
    lengths = [sum(rank * rank for rank in side) for side in ranks]
    found = spearman(x, y)
    if 0 in lengths:
        assert math.isnan(found)
        assert 1 in (len(set(x)), len(set(y)))
    else:
        assert found == pytest.approx(sum(map(operator.mul, *ranks)) / math.sqrt(lengths[0] * lengths[1]))


def test_table_1_and_2_by_hand() -> None:
    """Speedups 2, 0.5 and 1.1, the last within noise: means 1.2, median 1.1, geometric mean 1.1^(1/3)."""
    measurements = store_of(
        steady((64, 64, 64), 1.0, 2.0),
        steady((4096, 4096, 4096), 200.0, 100.0),
        steady((256, 256, 256), 10.0, 11.0, spread=0.9),
    )
    document = report.report(measurements, [])
    first = rows(table(document, "measured-1", "Table 1"))["torch.matmul"]
    assert (first["shapes"], first["mean"], first["median"]) == ("3", "1.200", "1.100")
    assert first["std"] == f"{statistics.stdev([2, 0.5, 1.1]):.3f}" == "0.755"
    assert first["geomean [95 %]"].startswith("1.032 [0.500, 2.000]")
    assert (first["wins"], first["wins beyond noise"]) == ("66.7 %", "33.3 %")
    assert (first["losses"], first["losses beyond noise"]) == ("33.3 %", "33.3 %")
    second = rows(table(document, "measured-1", "Table 2"))["torch.matmul"]
    assert (second["mean"], second["median"], second["ours taken"]) == ("1.367", "1.100", "66.7 %")
    assert second["geomean [95 %]"].startswith(f"{2.2 ** (1 / 3):.3f} [")


def test_classes_and_worst_cases() -> None:
    measurements = store_of(*(steady(mnk, 10.0, 10.0 + i) for i, mnk in enumerate(shapes(30))))
    document = report.report(measurements, [])
    classes = table(document, "measured-1", "By size class")
    problems = [measurement.problem for measurement in measurements.measurements]
    for name, _, count, *_ in classes.rows:
        assert int(count) == sum(problem.size_class == name for problem in problems)
    worst = table(document, "measured-1", "The 20 lowest speedups, over torch.matmul")
    assert [row[0] for row in worst.rows] == ["_".join(map(str, mnk)) for mnk in shapes(30)[:20]]
    assert worst.rows[0][2] == "1.000 [1.000, 1.000]"


def test_times_are_compared_with_the_floor_and_the_model() -> None:
    """The times are those of a square product at the card's peak, one bound by the bytes of A, B and D, an empty
    kernel, and one that is too fast."""
    record = next(record for record in catalog.load() if (record.gpu, record.acc, record.mnk) == (
        "h200", "f16", "4096_4096_4096"))  # fmt: skip
    square = timing(KERNEL, [250.0] * 9, record=record.name)
    measurements = [
        measurement((4096, 4096, 4096), [square]),
        measurement((16384, 64, 64), [timing(KERNEL, [0.25] * 9, record="r")]),
        measurement((64, 64, 64), [timing(KERNEL, [2.0] * 9, record="r")]),
    ]
    document = report.report(store_of(*measurements), [record])
    beside = table(document, "measured-1", "Beside the card's floor")
    columns = rows(beside)
    assert [row[0] for row in beside.rows] == ["16384_64_64", "4096_4096_4096", "64_64_64"]
    peak = 2 * 4096**3 / (4096 * 132 * 1980)
    assert float(columns["4096_4096_4096"]["floor, µs"]) == pytest.approx(peak, rel=0.01)
    moved = 2 * (16384 * 64 + 64 * 64 + 16384 * 64) / (2 * 3201e6 * 6144 / 8) * 1e6
    assert float(columns["16384_64_64"]["floor, µs"]) == pytest.approx(moved, rel=0.01)
    assert float(columns["64_64_64"]["floor, µs"]) == 0.5
    assert "faster than the card can be" in columns["16384_64_64"]["ours / floor"]
    assert "faster" not in columns["4096_4096_4096"]["ours / floor"]
    modelled = model.estimate(record).us
    assert float(columns["4096_4096_4096"]["modelled, µs"]) == pytest.approx(modelled, rel=0.01)
    assert columns["64_64_64"]["modelled, µs"] == "—"
    assert "of their modelled time (median of 1)" in " ".join(section(document, "measured-1").paragraphs)


def test_a_validation_of_the_timing_model_is_a_section(tmp_path: Path) -> None:
    row = {
        "part": "recorded", "subject": "Triton on a100", "figure": "top-1 regret", "problems": 7, "value": 0.04,
        "low": 0.03, "high": 0.05, "target": "<= 0.06", "baselines": {"random": 1.25},
    }  # fmt: skip
    path = tmp_path / "figures.json"
    path.write_text(json.dumps([row, row | {"part": "choices", "target": None}]))
    document = report.report(EMPTY, [], validated=report.validation.load(path))
    by_part = section(document, "validation").tables
    assert [part.caption.split(":")[0] for part in by_part] == ["Published choices", "Recorded timings of Triton"]
    assert by_part[1].rows == (
        ("Triton on a100", "top-1 regret", "7", "0.040", "0.030 to 0.050", "<= 0.06", "random 1.250"),
    )
    assert not [part for part in report.report(EMPTY, []).sections if part.anchor == "validation"]
    path.write_text("[{}]")
    assert "model --json" in error("report", str(path))


def test_the_dispatcher_and_nothing() -> None:
    assert best_of([Ratio(0.5, 0.4, 1.2)]) == [Ratio(1.0, 1.0, 1.2)]
    assert summarise([]) is None
    summary = summarise([Ratio(1.5, 1.2, 1.8)])
    assert summary is not None
    assert (summary.shapes, summary.std, summary.geomean.value) == (1, 0.0, pytest.approx(1.5))


@settings(max_examples=25)
@given(st.lists(st.tuples(st.floats(0.2, 5) | st.just(1.0), st.floats(0, 0.5) | st.just(0.0)), min_size=2, max_size=9))
def test_statistics_of_several_problems_are_those_of_all_of_them(draws: list[tuple[float, float]]) -> None:
    ratios = [Ratio(value, value * (1 - width), value / (1 - width)) for value, width in draws]
    summary = summarise(ratios)
    assert summary is not None
    logs = [math.log(ratio.value) for ratio in ratios]
    assert summary.geomean.value == pytest.approx(math.exp(sum(logs) / len(logs)))
    assert summary.geomean.low <= summary.geomean.value * 1.000001 <= summary.geomean.high * 1.000002
    # Of the inverse speedups, wins are losses, and the geometric mean is the inverse one.
    inverse = summarise([Ratio(1 / value, 1 / high, 1 / low) for value, low, high in ratios])
    assert inverse is not None
    assert (inverse.wins, inverse.losses) == (summary.losses, summary.wins)
    assert (inverse.sure_wins, inverse.sure_losses) == (summary.sure_losses, summary.sure_wins)
    assert inverse.geomean.value == pytest.approx(1 / summary.geomean.value)
    assert summary.wins == sum(ratio.value > 1 for ratio in ratios) / len(ratios)
    assert summary.losses == sum(ratio.value < 1 for ratio in ratios) / len(ratios)
    assert summary.sure_wins == sum(ratio.low > 1 for ratio in ratios) / len(ratios) <= summary.wins
    squares = sum((ratio.value - summary.mean) ** 2 for ratio in ratios)
    assert summary.std == pytest.approx(math.sqrt(squares / (len(ratios) - 1)))


@settings(max_examples=50)
@given(st.floats(1e-9, 1e9))
def test_numbers_of_charts_have_five_digits(value: float) -> None:
    assert page._digits(value) == float(f"{value:.4e}")


def test_max_is_the_faster_layout_problem_by_problem() -> None:
    def layouts(mnk: tuple[int, int, int], nn: float, tn: float) -> Measurement:
        return measurement(mnk, [timing(KERNEL, [1.0]), timing("cublas-nn", [nn]), timing("cublas-tn", [tn])])

    document = report.report(store_of(layouts((64, 64, 64), 2.0, 4.0), layouts((128, 64, 64), 8.0, 4.0)), [])
    columns = rows(table(document, "measured-1", "Table 1"))
    assert list(columns) == ["cublas-nn", "cublas-tn", "cublas-max"]
    assert [columns[name]["mean"] for name in columns] == ["5.000", "4.000", "3.000"]
    assert {row[1] for row in table(document, "measured-1", "By size class").rows} == {"cublas-max"}


def test_groups_keep_conditions_apart_and_large_problems_in_both_l2_states() -> None:
    measurements = campaign(60)
    sets = groups.by_conditions(measurements)
    assert [(group.protocol, group.l2) for group in sets] == [
        ("device", "cold"), ("device", "hot"), ("offline", "hot"), ("server", "hot"),
    ]  # fmt: skip
    assert [len(group.measurements) for group in sets] == [60] * 4
    exceeded = [large for large in sets[1].measurements if large.l2 == "exceeded"]
    assert exceeded
    assert all(large in sets[0].measurements for large in exceeded)
    rest = groups.by_conditions(store_of(*exceeded))
    assert [group.l2 for group in rest] == ["exceeded"]
    assert [item.acc for item in groups.by_conditions(measurements, lambda item: item.acc == "f32")] == []


def test_a_later_measurement_replaces_an_earlier_one() -> None:
    document = report.report(store_of(steady((64, 64, 64), 1.0, 2.0), steady((64, 64, 64), 1.0, 3.0)), [])
    assert rows(table(document, "measured-1", "Table 1"))["torch.matmul"]["mean"] == "3.000"


@pytest.mark.parametrize(
    ("name", "capability", "sms", "mhz", "acc", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "8.0", 108, 1410, "f32", 312),
        ("NVIDIA GeForce RTX 3090", "8.6", 82, 1695, "f16", 142),
        ("NVIDIA GeForce RTX 3090", "8.6", 82, 1695, "f32", 71),
        ("NVIDIA L40S", "8.9", 142, 2490, "f32", 362),
        ("NVIDIA H100 80GB HBM3", "9.0", 132, 1830, "f32", 989),
        ("NVIDIA GeForce RTX 5090", "12.0", 170, 2407, "f16", 419),
        ("Unknown", "99.0", 1, 1, "f16", 0),
    ],
)
def test_peaks_are_those_of_the_data_sheets(
    name: str, capability: str, sms: int, mhz: int, acc: str, peak: float
) -> None:
    card = H200.model_copy(update={"name": name, "capability": capability, "sms": sms, "max_sm_mhz": mhz})
    assert groups.roof(card, acc, F16).peak_tflops == pytest.approx(peak, abs=0.8)


def test_what_is_too_good_is_said_in_words() -> None:
    square = 2 * 4096**3 / 1e6  # µs at 1 TFLOP/s
    document = report.report(
        store_of(
            steady((4096, 4096, 4096), square / 850, square / 1200),
            steady((4096, 4096, 64), 1.0, 100.0),
            steady((2048, 2048, 2048), 100.0, 100.0),
        ),
        [],
    )
    alerts = section(document, "measured-1").alerts
    assert len(alerts) == 3
    assert any(
        "4096_4096_4096, cudal2gen: 850.0 TFLOP/s is above 800 TFLOP/s: check it by hand" in words for words in alerts
    )
    assert any("torch.matmul: 1200.0 TFLOP/s is above the roofline's 1070.5 TFLOP/s" in words for words in alerts)
    # 34.6 MB in a microsecond are 35 TB/s. If the L2 is cold, they must come from device memory.
    assert any("4096_4096_64, cudal2gen: 2147.5 TFLOP/s is above the roofline's 305.1" in words for words in alerts)
    assert "3 results are too good" in section(document, "overview").alerts[0]


def test_what_the_l2_holds_need_not_come_from_memory() -> None:
    cold, hot = (steady((1024, 1024, 64), 0.3, 10.0, l2=state) for state in ("cold", "hot"))
    roof = groups.roof(H200, "f16", F16)
    assert roof.tflops(cold) == pytest.approx(4.916736 * cold.problem.flops / cold.problem.traffic_bytes)
    assert roof.tflops(hot) == pytest.approx(roof.peak_tflops)
    assert [len(group.doubts) for group in groups.by_conditions(store_of(cold, hot))] == [1, 0]


def test_an_unknown_card_has_no_roof_and_says_so() -> None:
    card = H200.model_copy(update={"name": "a card", "capability": "99.0", "max_memory_mhz": 0})
    document = report.report(store_of(steady((64, 64, 64), 1.0, 2.0), environment=card), [])
    assert any("roofline is incomplete" in words for words in section(document, "measured-1").alerts)
    assert "not known" in document.markdown()
    assert embedded_data(document.html())["groups"]["measured-1"]["roof"] == [0, 0]


def test_conditions_are_told() -> None:
    later = H200.model_copy(update={"id": "later", "driver": "590.1", "versions": H200.versions | {"torch": "2.14"}})
    hot = QUIET.model_copy(update={"throttle": ("sw_power_cap",), "sm_mhz": (1410, 1980)})
    measurements = Measurements(
        {H200.id: H200, "later": later},
        [
            steady((64, 64, 64), 1.0, 2.0),
            steady((64, 64, 128), 1.0, 2.0, environment="later", conditions=hot, absent={"cublas-nn": "no library"}),
        ],
    )
    part = section(report.report(measurements, []), "measured-1")
    assert part.alerts[0] == "The card reported limits on its clocks: sw_power_cap in 1 of 2 measurements."
    assert part.alerts[1].startswith("The SM clock fell to 71.2 % of the highest that the card allows")
    assert part.alerts[2].startswith(
        "2 environments, with 1 and 1 measurements, differ in: driver, version of torch. A"
    )
    assert part.alerts[3] == "cublas-nn is missing in 1 of 2 problems: no library."
    environment_rows = rows(part.tables[0])
    assert environment_rows["driver"]["value"] == "580.0 / 590.1"
    assert rows(part.tables[1])["SM clock, MHz"]["lowest to highest"] == "1410 to 1980"


def test_padding_is_shown() -> None:
    padded = measurement((64, 64, 64), [timing(KERNEL, [8.0], padding_us=2.0), timing("torch.matmul", [9.0])])
    words = " ".join(section(report.report(store_of(padded), []), "measured-1").paragraphs)
    assert "The caller pads 1 of them; the copies are inside our time, 25.0 % to 25.0 % of it" in words


def test_the_interval_over_the_faster_of_two_covers_the_choice() -> None:
    """Two equally fast layouts: the faster of each resample is faster than either of them on average."""
    random = np.random.default_rng(0)
    kernel, *vendors = np.exp(random.normal(0, 0.1, (3, 41)))
    names = ("cublas-nn", "cublas-tn")
    both = measurement(
        (64, 64, 64), [timing(KERNEL, kernel), *(timing(*pair) for pair in zip(names, vendors, strict=True))]
    )
    nn, tn, fastest = (speedup(both, name) for name in (*names, "cublas-max"))
    assert nn
    assert tn
    assert fastest
    assert fastest.value == min(nn.value, tn.value)
    assert fastest.low < 1.003 * min(nn.low, tn.low)
    assert fastest.high < min(nn.high, tn.high), "as its choice favours the baseline"


def test_the_mean_of_one_problem_has_that_problems_interval() -> None:
    (ratio,) = (speedup(campaign(1).measurements[0], "torch.matmul"),)
    assert ratio is not None
    summary = summarise([ratio])
    assert summary is not None
    assert summary.geomean == ratio
    assert ratio.low < ratio.value < ratio.high


def test_an_unknown_card_has_its_own_floor_and_no_model() -> None:
    record = catalog.find(Problem(gpu="h100", acc="f32", layout="tn", m=4096, n=4096, k=64)).record
    pcie = H200.model_copy(
        update={"gpu": "", "name": "NVIDIA H100 PCIe", "sms": 114, "max_sm_mhz": 1755, "max_memory_mhz": 1593,
                "memory_bus_bits": 5120}
    )  # fmt: skip
    row = measurement((4096, 4096, 64), [timing(KERNEL, [40.0] * 9, record=record.name)], acc="f32", gpu="h100")
    document = report.report(store_of(row, environment=pcie), [record])
    (beside,) = rows(table(document, "measured-1", "Beside the card's floor")).values()
    traffic = 2 * (2 * 4096 * 64 + 4096 * 4096) / (2 * 1593 * 5120 / 8)
    assert float(beside["floor, µs"]) == pytest.approx(traffic, rel=0.01)
    assert (beside["modelled, µs"], beside["ours / modelled"]) == ("—", "—")
    card = rows(table(document, "measured-1", "Environment"))["card"]["value"]
    assert card == "NVIDIA H100 PCIe (unknown card), capability 9.0, 114 SMs"


def test_a_rate_is_suspicious_by_the_generation() -> None:
    fast = steady((8192, 8192, 8192), 2 * 8192**3 / 900e6, 2 * 8192**3 / 850e6)
    b200 = H200.model_copy(
        update={"gpu": "b200", "name": "NVIDIA B200", "capability": "10.0", "sms": 148, "max_sm_mhz": 1965}
    )
    for card, expected in ((H200, 2), (b200, 0)):
        (group,) = report.report(store_of(fast, environment=card), []).groups.values()
        assert len(group.doubts) == expected, card.name
