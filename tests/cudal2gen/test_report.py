"""Proves the report's figures against numbers computed another way, and its words where there are no data."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudal2gen import report, results
from cudal2gen.generation import catalog
from cudal2gen.kernel import STRUCTURES, Problem, Sm80Multistage
from cudal2gen.report import choices, groups, published
from cudal2gen.report.statistics import best_of, summarise
from cudal2gen.results import KERNEL, Measurement, Measurements, Ruling, speedup
from cudal2gen.results.proofs import Proof
from cudal2gen.results.ratios import Ratio, spearman
from cudal2gen.timing import model
from kernelproof.ground.element import F16
from kernelproof.ground.pages import Section, Table
from tests.cudal2gen.measured import H200, QUIET, campaign, measurement, shapes, timing
from tests.cudal2gen.test_cli import error

EMPTY = Measurements({}, [])


def store_of(*measurements: Measurement, environment: results.Environment = H200) -> Measurements:
    return Measurements({environment.id: environment}, list(measurements))


def steady(
    mnk: tuple[int, int, int], kernel_us: float, vendor_us: float, spread: float = 0.0, **fields: object
) -> Measurement:
    """Nine samples of ours and of torch.matmul, the latter swinging by ``spread`` to either side."""
    swing = [vendor_us * (1 + spread * (i - 4) / 4) for i in range(9)]
    return measurement(mnk, [timing(KERNEL, [kernel_us] * 9, record="r"), timing("torch.matmul", swing)], **fields)


def section(document: report.Report, anchor: str) -> Section:
    return next(part for part in document.sections if part.anchor == anchor)


def table(document: report.Report, anchor: str, start: str) -> Table:
    return next(candidate for candidate in section(document, anchor).tables if candidate.caption.startswith(start))


def rows(table: Table) -> dict[str, dict[str, str]]:
    return {row[0]: dict(zip(table.columns[1:], row[1:], strict=True)) for row in table.rows}


def embedded(page: str) -> Any:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    return json.loads(match[1])


# --- the paper's Figure 4 ---


def test_figure_4_is_the_papers_within_a_twentieth() -> None:
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
    # What the facts about the published kernels give.
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


def test_spearman_with_ties() -> None:
    """By hand: ranks 1 2.5 2.5 4 and 1 3 2 4; covariance 4.5, variances 4.5 and 5."""
    assert spearman([1, 5, 5, 9], [10, 30, 20, 40]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert math.isnan(spearman([1, 1], [1, 2]))


# --- statistics ---


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


def test_times_beside_the_floor_and_the_model() -> None:
    """A square product at the card's peak, one bound by the bytes of A, B and D, an empty kernel; one too fast."""
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


# --- roofs and doubts ---


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
    # 34.6 MB in a microsecond is 35 TB/s; cold, they must come from device memory.
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
    assert embedded(document.html())["groups"]["measured-1"]["roof"] == [0, 0]


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


# --- published ---


@pytest.mark.slow
def test_published_figures_have_their_source_and_stand_beside_ours() -> None:
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


# --- what is printed ---


@pytest.mark.slow
def test_markdown_and_page_print_the_same_figures() -> None:
    document = report.report(campaign(20), catalog.load())
    text, page = document.markdown(), document.html()
    for part in document.sections:
        for table in part.tables:
            for row in table.rows:
                escaped = " | ".join(re.sub(r"([\\`*_\[\]<>|#&])", r"\\\1", cell) for cell in row)
                assert f"| {escaped} |" in text
                for cell in row:
                    assert cell.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in page
    assert document.html() == page


def test_nothing_measured_is_said_plainly() -> None:
    document = report.report(EMPTY, catalog.load())
    assert section(document, "overview").paragraphs[0].startswith("No timing is in this report: ")
    assert [part.anchor for part in document.sections] == ["overview", "choices", "published"]
    assert "No timing is in this report" in document.html()
    filtered = report.report(campaign(2), [], lambda candidate: candidate.gpu == "a100")
    assert "No measurement matches the filters" in section(filtered, "overview").paragraphs[0]


def test_without_measurements_a_report_names_its_files_and_counts_what_there_is() -> None:
    records = [record for record in catalog.load() if record.gpu == "h200"]
    stored = catalog.entries()
    assert [entry for entry in stored if entry.problem.gpu == "h200"] == [
        (record.problem, record.origin.structure) for record in records
    ]
    case = {"findings": []}
    rulings = [
        Ruling.model_validate({"digest": digest, "on": on, "cases": cases})
        for digest, on, cases in (
            ("a", "emulator", [case]),
            ("b", "emulator", [case, case]),
            ("b", "emulator, machine code", [case]),
            ("b", "h200", [case, {"findings": ["race"]}]),
            ("c", "h200", []),
        )
    ]
    proof = {"record": "", "why": "", "executed": "", "seconds": 0.0, "instructions": 1}
    proofs = [
        Proof.model_validate(proof | {"digest": digest, "outcome": outcome})
        for digest, outcome in (("a", "certified"), ("b", "not certified"), ("c", "certified"), ("d", "refuted"))
    ]
    stock = report.Stock(["/x/measurements.jsonl"], stored, rulings, 12, "/x/build", proofs)
    document = report.report(EMPTY, [], lambda item: (item.gpu, item.acc, item.ab) == ("h200", "f16", "f16"), stock)
    assert (
        "/x/measurements.jsonl holds no measurement. 'cudal2gen bench --all'"
        in (section(document, "overview").paragraphs[0])
    )
    assert [part.anchor for part in document.sections][:2] == ["overview", "stock"]
    assert section(document, "stock").paragraphs == ("12 compiled kernels are in /x/build.",)
    of_records, of_verdicts = (rows(part) for part in section(document, "stock").tables)
    assert list(of_records) == ["h200 f16 tn"], "as the filter says"
    chosen = [record for record in records if record.problem.types == "f16"]
    counts = dict.fromkeys(("all", "modelled"), str(len(chosen)))
    assert of_records["h200 f16 tn"] == dict.fromkeys(STRUCTURES, "0") | counts
    assert list(of_verdicts["in PTX"].values()) == ["2", "0"]
    assert list(of_verdicts["in machine code"].values()) == ["1", "0"]
    assert list(of_verdicts["proven, for every problem"].values()) == ["2", "1"]
    assert list(of_verdicts["on h200"].values()) == ["0", "2"], "a verdict without a case is none"


def test_a_report_parses_the_records_that_it_is_about() -> None:
    nothing = report.named(EMPTY)
    assert {(record.gpu, record.acc, record.layout) for record in nothing} == {("a100", "f16", "tn")}
    record = catalog.find(Problem(gpu="h200", acc="f32", layout="tn", m=64, n=64, k=64)).record
    measured = measurement((64, 64, 64), [timing(KERNEL, [3.0], record=record.name)], acc="f32")
    chosen = report.named(store_of(measured))
    assert record in chosen
    assert len(nothing) < len(chosen) < 1.1 * len(nothing)
    elsewhere = measurement((64, 64, 72), [timing(KERNEL, [3.0], record=record.name)], acc="f32")
    assert report.named(store_of(elsewhere)) == catalog.load(), "a kernel of another size"


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


def test_what_a_distrustful_reader_looks_for_is_said_first() -> None:
    slow = QUIET.model_copy(update={"sm_mhz": (990, 1980), "throttle": ("SwPowerCap",)})
    later = H200.model_copy(update={"id": "later", "driver": "590.1"})
    vendors = [timing("torch.matmul", [4.0] * 9)]
    measured = [
        measurement((64, 64, 64), [timing(KERNEL, [2.0] * 9), *vendors, timing("cublas-tn", [1.0] * 9)]),
        measurement((128, 64, 64), [timing(KERNEL, [2.0] * 9), *vendors], conditions=slow),
        measurement((256, 64, 64), [timing(KERNEL, [2.0] * 9), *vendors], environment="later"),
    ]
    document = report.report(Measurements({H200.id: H200, "later": later}, measured), [])
    overview = section(document, "overview")
    assert (
        "0.500 times as fast as cublas-tn, the strictest baseline, in the geometric mean over 1 of 3 problems, of 2 "
        in (overview.paragraphs[0])
    )
    (row,) = rows(overview.tables[0]).values()
    assert (row["shapes"], row["wins beyond noise"], row["losses beyond noise"]) == ("1 of 3", "0.0 %", "100.0 %")
    alerts = section(document, "measured-1").alerts
    assert "SwPowerCap in 1 of 3 measurements" in alerts[0]
    assert "fell to 50.0 % of the highest" in alerts[1]
    assert "2 environments, with 2 and 1 measurements, differ in: driver. A figure over all" in alerts[2]


def test_the_first_figure_is_of_the_largest_set_of_conditions() -> None:
    small = H200.model_copy(update={"id": "a", "gpu": "", "name": "A card before all others by its name"})
    lucky = steady((64, 64, 64), 1.0, 9.0, environment="a")
    many = [steady((64, 64, k), 2.0, 1.0) for k in (64, 128)]
    document = report.report(Measurements({"a": small, H200.id: H200}, [lucky, *many]), [])
    assert section(document, "overview").paragraphs[0].startswith("NVIDIA H200, f16, tn, device, L2 cold: 0.500 times")
    assert [len(group.measurements) for group in document.groups.values()] == [2, 1]


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


def test_the_first_sentence_is_a_figure_and_the_lesson_comes_after_the_table() -> None:
    document = report.report(campaign(20), catalog.load())
    overview = section(document, "overview")
    assert re.search(r": \d\.\d{3} times as fast as \S+, the strictest baseline", overview.paragraphs[0])
    assert overview.notes[0].startswith("A speedup is the baseline's time")
    text = document.markdown()
    assert text.index("strictest baseline |") < text.index("A speedup is the baseline")


def test_measured_without_baselines_or_without_ours() -> None:
    kernel_only = measurement((64, 64, 64), [timing(KERNEL, [3.0])])
    vendor_only = measurement((64, 64, 128), [timing("torch.matmul", [3.0])], absent={KERNEL: "no kernel"})
    for measurements in (store_of(kernel_only), store_of(vendor_only), store_of(kernel_only, vendor_only)):
        document = report.report(measurements, [])
        assert document.html()
        assert "NVIDIA H200" in document.markdown()


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> | `a` <b>&amp; \u2028\n# x"


@pytest.mark.slow
def test_names_cannot_become_markup() -> None:
    card = H200.model_copy(update={"name": HOSTILE, "versions": {HOSTILE: HOSTILE}, "driver": HOSTILE})
    hostile = measurement(
        (64, 64, 64),
        [timing(KERNEL, [1.0], record=HOSTILE, digest=HOSTILE), timing(HOSTILE, [2.0]), timing("torch.matmul", [2.0])],
        absent={"x": HOSTILE},
        conditions=QUIET.model_copy(update={"throttle": (HOSTILE,)}),
    )
    document = report.report(store_of(hostile, environment=card), catalog.load())
    page = document.html()
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert embedded(page)["records"][0]["name"] == HOSTILE
    text = document.markdown()
    assert not re.search(r"(?<!\\)<", text)
    assert not re.search(r"^# x", text, re.MULTILINE)
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, block


@pytest.mark.slow
def test_records_are_found_by_name() -> None:
    records = catalog.load()
    record_of_problem = next(record for record in records if (record.acc, record.mnk) == ("f16", "4096_4096_64"))
    record_elsewhere = next(
        record for record in records if record.acc == "f16" and record.name != record_of_problem.name
    )

    def named(mnk: tuple[int, int, int], name: str) -> Measurement:
        return measurement(mnk, [timing(KERNEL, [1.0], record=name, digest="d"), timing("torch.matmul", [2.0])])

    page = report.report(
        store_of(
            named((4096, 4096, 64), record_of_problem.name),
            named((64, 64, 64), record_elsewhere.name),
            named((64, 64, 128), "gone"),
        ),
        records,
    ).html()
    records_by_name = {entry["name"]: entry["record"] for entry in embedded(page)["records"]}
    assert records_by_name[record_of_problem.name] == record_of_problem.model_dump(mode="json")
    assert records_by_name[record_elsewhere.name]["bm"] == record_elsewhere.bm
    assert records_by_name["gone"] is None


def test_problems_that_share_a_kernel_keep_their_own_records() -> None:
    records = [record for record in catalog.load() if record.gpu == "a100"]
    names = Counter(record.name for record in records)
    sharing = [record for record in records if record.name == names.most_common(1)[0][0]]
    assert len(sharing) > 1
    timed = [
        measurement(
            (record.m, record.n, record.k), [timing(KERNEL, [1.0], record=record.name), timing("torch.matmul", [2.0])]
        )
        for record in sharing
    ]
    data = embedded(report.report(store_of(*timed), records).html())
    for m, n, k, _, place, *_ in data["groups"]["measured-1"]["shapes"]:
        fields = data["records"][place]["record"]
        assert (fields["m"], fields["n"], fields["k"]) == (m, n, k)


# --- comparison ---


# --- the command ---
