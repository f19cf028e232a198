"""Proves that the report has its most important facts first, equal figures on page and Markdown, escaped names, and
plain words if nothing was measured.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

from cudal2gen import report
from cudal2gen.generation import catalog
from cudal2gen.kernel import STRUCTURES, Problem
from cudal2gen.results import KERNEL, Measurement, Measurements, Ruling
from cudal2gen.results.proofs import Proof
from tests.cudal2gen.measured import H200, QUIET, campaign, measurement, timing
from tests.cudal2gen.reporting import EMPTY, HOSTILE, embedded_data, rows, section, steady, store_of


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
    nothing = report.needed_records(EMPTY)
    assert {(record.gpu, record.acc, record.layout) for record in nothing} == {("a100", "f16", "tn")}
    record = catalog.find(Problem(gpu="h200", acc="f32", layout="tn", m=64, n=64, k=64)).record
    measured = measurement((64, 64, 64), [timing(KERNEL, [3.0], record=record.name)], acc="f32")
    chosen = report.needed_records(store_of(measured))
    assert record in chosen
    assert len(nothing) < len(chosen) < 1.1 * len(nothing)
    elsewhere = measurement((64, 64, 72), [timing(KERNEL, [3.0], record=record.name)], acc="f32")
    assert report.needed_records(store_of(elsewhere)) == catalog.load(), "a kernel of another size"


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
    assert embedded_data(page)["records"][0]["name"] == HOSTILE
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

    def named_measurement(mnk: tuple[int, int, int], name: str) -> Measurement:
        return measurement(mnk, [timing(KERNEL, [1.0], record=name, digest="d"), timing("torch.matmul", [2.0])])

    page = report.report(
        store_of(
            named_measurement((4096, 4096, 64), record_of_problem.name),
            named_measurement((64, 64, 64), record_elsewhere.name),
            named_measurement((64, 64, 128), "gone"),
        ),
        records,
    ).html()
    records_by_name = {entry["name"]: entry["record"] for entry in embedded_data(page)["records"]}
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
    data = embedded_data(report.report(store_of(*timed), records).html())
    for m, n, k, _, place, *_ in data["groups"]["measured-1"]["shapes"]:
        fields = data["records"][place]["record"]
        assert (fields["m"], fields["n"], fields["k"]) == (m, n, k)
