"""Proves that findings which follow from one mistake are shown as one, in every format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernelproof.checking import compilation, expectations, plan, supervision, writing
from kernelproof.checking.result import Result
from kernelproof.emulator import Frame, Participant, Place, Report, Site, findings_document
from kernelproof.emulator.state.causes import grouped
from kernelproof.emulator.state.participants import Space
from kernelproof.ground import toolchain

PROGRAMS = Path(__file__).parent / "causes"
# Two instances of a template.
KERNELS = ("_Z4scanILi64EEvPf", "_Z4scanILi128EEvPf")


def report(kind: str, line: int, other: int = 0, buffer: str = "tile", kernel: str = KERNELS[0]) -> Report:
    """A finding at a line of a.cu that occurred three times. ``other``: the line of a race's other side, 0 if the
    finding has none."""
    first = Participant(Site(line + 100, "ld.shared.f32 %f1, [%r1]", (Frame("a.cu", line, "k"),)), (0, 0, 0), (40,))
    second = Participant(Site(other + 100, "st.shared.f32 [%r1], %f1", (Frame("a.cu", other, "k"),)), (0, 0, 0), (3,))
    place = Place(Space.SHARED, 4, buffer)
    return Report(kind, "text", kernel, first, second if other else None, place, 3)


def shown_findings(*reports: Report) -> list[tuple[str, int, int, int]]:
    """For each cause the rule, line and count of the finding that is shown, and the number of findings behind it."""
    return [
        (r.kind, r.access.site.home.line if r.access.site.home else 0, r.count, len(r.also)) for r in grouped(reports)
    ]


def test_races_of_one_buffer_that_share_lines_are_one() -> None:
    late, early = report("shared-race", 4, 6), report("shared-race", 9, 4)
    assert shown_findings(late, early, report("shared-race", 6, 9)) == [("shared-race", 4, 9, 2)]
    assert shown_findings(early, late) == [("shared-race", 4, 6, 1)]
    assert len(grouped([late, report("shared-race", 20, 21)])) == 2
    assert len(grouped([late, report("shared-race", 4, 6, "other")])) == 2
    # The last finding connects two of them.
    assert shown_findings(report("shared-race", 1, 2), report("shared-race", 3, 4), report("shared-race", 2, 3)) == [
        ("shared-race", 1, 9, 2)
    ]


def test_instances_of_a_template_are_one_kernel() -> None:
    assert shown_findings(*(report("shared-race", 4, 6, kernel=kernel) for kernel in KERNELS)) == [
        ("shared-race", 4, 6, 1)
    ]
    assert len(grouped([report("shared-race", 4, 6), report("shared-race", 4, 6, kernel="_Z4sortPf")])) == 2


def test_consequences_of_a_race_follow_it() -> None:
    unwritten = report("uninitialised-shared", 4)
    assert shown_findings(unwritten, report("shared-race", 4, 6)) == [("shared-race", 4, 6, 1)]
    assert len(grouped([unwritten, report("shared-race", 5, 6)])) == 2


def test_accesses_beyond_one_buffer_are_one() -> None:
    """38 stores beyond one buffer, three times each, are one cause. Findings without a buffer stay apart by line."""
    stores = [report("global-out-of-bounds", line, buffer="out") for line in range(10, 48)]
    key = report("global-out-of-bounds", 5, buffer="key")
    assert shown_findings(*stores, key) == [("global-out-of-bounds", 5, 3, 0), ("global-out-of-bounds", 10, 114, 37)]
    assert len(grouped([report("phase-at-exit", line, buffer="") for line in (1, 2, 2)])) == 2


def test_a_known_finding_hides_no_other(tmp_path: Path) -> None:
    """An expected finding is removed before findings are grouped by cause."""
    result = Result("a.cu", "A100")
    for one in (report("shared-race", 4, 6), report("shared-race", 9, 6)):
        result.add(one)
    file = tmp_path / "expected"
    file.write_text("shared-race * a.cu:4\n")
    expectations.apply(result, expectations.read(file))
    assert [r.access.site.line for r in result.ordered] == [109]
    assert (len(result.errors), len(result.expected)) == (1, 1)


@pytest.mark.parametrize(("name", "causes", "least"), [("scan", 1, 10), ("quicksort", 2, 20), ("blocks", 2, 15)])
@pytest.mark.slow
def test_programs_with_one_mistake(name: str, causes: int, least: int, tmp_path: Path) -> None:
    """A program whose one mistake has ``least`` findings or more is shown with ``causes`` causes in every format."""
    library = compilation.library([PROGRAMS / f"{name}.cu"], [], "sm_80", toolchain.discover())
    result = supervision.run(plan.CheckPlan("sm_80", library, main=(name,)), f"{name}.cu", 120, 4)
    findings = list(result.findings.values())
    total = sum(item.count for item in findings)
    assert (result.code, len(result.errors), len(result.ordered)) == (1, causes, causes)
    assert len(findings) >= least
    document = result.document()["findings"]
    assert (len(document), sum(item["count"] for item in document)) == (causes, total)
    assert sum(1 + len(item["also"]) for item in document) == len(findings)
    assert len(findings_document(findings)["findings"]) == causes
    assert len(list(writing.github(result))) == causes
    writing.sarif(result, tmp_path / "out.sarif")
    results = json.loads((tmp_path / "out.sarif").read_text())["runs"][0]["results"]
    assert (len(results), sum(item["occurrenceCount"] for item in results)) == (causes, total)
    writing.page(result, tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text().count('<p class="error">') == causes
