"""Proves the examples on the rules' pages: the wrong one has the page's finding at the marked lines, the right one has
none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kernelproof.emulator import HOPPER, RULES, Device, Memory, Options, Participant, Report, load
from kernelproof.ground.chips import GPUS
from tests.kernelproof.emulator.build import compiled_text

PAGES = Path(__file__).parents[3] / "docs" / "kernelproof" / "rules"
# Broken by host code, not by a kernel; the examples of some are programs, which test_host_order.py runs.
OF_THE_HOST = {"launch-error", "launch-refused", "copy-out-of-bounds", "grid-sync"}
WITH_PROGRAMS = {"stream-race", "host-race", "host-access", "use-after-free", "invalid-free", "copy-direction"}
OF_CHECKS = {"does-not-assemble"}  # test_assembly.py runs its example
OF_MACHINE_CODE = {"register-hazard"}  # no source has it: test_machine_schedules.py edits a cubin
WITH_EXAMPLES = sorted(RULES.keys() - OF_THE_HOST - WITH_PROGRAMS - OF_CHECKS - OF_MACHINE_CODE)
TYPES = {"float": np.dtype("f4"), "float4": np.dtype("(4,)f4"), "int": np.dtype("i4")}
DEVICES = {"sm_90a": HOPPER, "sm_100a": Device.of(GPUS["b200"])}
HEAD = re.compile(r"// <<<(\d+), (\d+)>>>(?: cluster (\d+):)?( overlapping:)?( adverse:)? (.*?)(?: \((sm_\w+)\))?$")


class Example(NamedTuple):
    """A program of a page. Its first line is a comment: grid, block, cluster, arguments, architecture."""

    code: str

    def marked(self, mark: str) -> list[int]:
        """The lines (from 1) that a comment marks."""
        lines = self.code.split("\n")
        return [i for i, line in enumerate(lines, 1) if re.search(rf"//.*\b{mark}\b", line)]

    def run(self) -> list[Report]:
        head = HEAD.match(self.code.split("\n")[0])
        assert head is not None, self.code
        grid, block, cluster, overlapping, adverse, arguments, arch = head.groups()
        program = load(compiled_text(self.code, arch=arch or "sm_80"))
        memory = Memory()
        settings: dict[str, Any] = {"device": DEVICES[arch]} if arch else {}
        return program.launch(
            program.kernels[0],
            int(grid),
            int(block),
            [argument(text.strip(), memory) for text in arguments.split(",")],
            memory=memory,
            cluster=int(cluster or 1),
            overlapping=overlapping is not None,
            options=Options(loop_limit=2000, lanes=64, adverse=adverse is not None),
            **settings,
        ).reports


def argument(text: str, memory: Memory) -> Any:
    """``5``, ``zeros BYTES``, or ``ROLE TYPE[COUNT]``, of which ``region N`` elements may be written."""
    if text.isdigit():
        return int(text)
    if text.startswith("zeros"):
        return bytes(int(text.split()[1]))
    m = re.match(r"(in|out|inout|scratch) (\w+)\[(\d+)\](?: region (\d+))?$", text)
    assert m is not None, text
    role = {"in": "input", "out": "output"}.get(m[1], m[1])
    kind, count = TYPES[m[2]], int(m[3])
    values = np.zeros((count, *kind.shape), kind.base) if role != "input" else np.arange(count, dtype=kind)
    return memory.upload(values, role, region=slice(0, int(m[4])) if m[4] else None)


def own_lines(side: Participant) -> set[int]:
    """The user's line of a side, and the lines of its callers."""
    site = side.site
    return {frame.line for frame in (site.home, *site.calls) if frame is not None}


def examples(rule: str) -> list[Example]:
    text = (PAGES / f"{rule}.md").read_text()
    return [Example(code) for code in re.findall(r"```cuda\n(.*?)```", text, re.S)]


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
