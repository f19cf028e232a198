"""Proves the examples on the rules' pages: the wrong one has the page's finding at the marked lines, the right one has
none.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelproof.emulator import RULES, Participant
from tests.kernelproof.emulator.rule_examples import PAGES, WITH_EXAMPLES, Example, examples


def own_lines(side: Participant) -> set[int]:
    """The user's line of a side, and the lines of its callers."""
    site = side.site
    return {frame.line for frame in (site.home, *site.calls) if frame is not None}


def test_every_rule_has_a_page_in_the_site(checkout: Path) -> None:
    assert {path.stem for path in PAGES.glob("*.md")} - {"index"} == RULES.keys()
    navigation = (checkout / "mkdocs.yml").read_text()
    for rule, (severity, meaning, _) in RULES.items():
        text = (PAGES / f"{rule}.md").read_text()
        assert text.startswith(f"# {rule}\n\n**{severity.capitalize()}**: {meaning}.\n"), rule
        assert "## How to fix it" in text
        assert f"rules/{rule}.md" in navigation


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("rule", WITH_EXAMPLES)
def test_the_wrong_example_is_reported_at_its_line(rule: str) -> None:
    wrong = examples(rule)[0]
    report = next(report for report in wrong.run() if report.kind == rule)
    assert report.severity is RULES[rule].severity
    here, there = wrong.marked("here"), wrong.marked("there")
    assert own_lines(report.access) >= set(here)
    assert len(here) == bool(report.access.site.frames)
    if there:
        assert report.other is not None
        assert own_lines(report.other) >= set(there)
        assert report.other.cta is not None


@pytest.mark.one_in(6)
@pytest.mark.slow
@pytest.mark.parametrize("rule", WITH_EXAMPLES)
def test_the_right_example_is_clean(rule: str) -> None:
    for right in examples(rule)[1:]:
        assert [str(report) for report in right.run()] == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["plain-first-load", "global-race", "memory-scope"])
def test_races_of_ctas_have_the_same_findings_in_every_batch(rule: str) -> None:
    wrong = examples(rule)[0]
    alone, *others = ([str(report) for report in wrong.run(lanes=lanes)] for lanes in (32, 64, 128, None))
    assert alone
    assert all(findings == alone for findings in others)


@pytest.mark.parametrize(
    ("rule", "buffer", "element", "index"),
    [
        ("global-out-of-bounds", "x", "float32", (48,)),
        ("shared-race", "tile", "float", (63,)),
        ("shared-misaligned", "tile", "float", (1,)),
        ("global-misaligned", "x", "float32", (1,)),
        ("proxy-fence", "tile", "int", (0,)),
        ("grid-dependency", "x", "float32", (0,)),
        ("mbarrier", "bar", "unsigned long long", (0,)),
    ],
)
def test_a_finding_names_the_buffer_and_the_element(
    rule: str, buffer: str, element: str, index: tuple[int, ...]
) -> None:
    place = examples(rule)[0].run()[0].place
    assert place is not None
    assert (place.buffer, place.element, place.index) == (buffer, element, index)


@pytest.mark.slow
def test_the_warp_must_synchronise_before_one_lane_sets_a_flag() -> None:
    right = examples("shared-race")[2]
    assert "    __syncwarp();\n" in right.code
    assert {report.kind for report in Example(right.code.replace("    __syncwarp();\n", "")).run()} == {"shared-race"}
