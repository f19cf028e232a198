"""Profiles: figures of kernels whose answers follow by hand, the schema, comparisons, and any project's cubins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cudal2gen import profile
from cudal2gen.chips import CAPABILITIES
from cudal2gen.errors import WrongInput
from cudal2gen.pages import Table
from cudal2gen.profile.occupancy import occupancy
from cudal2gen.profile.picture import LANE, LEFT, busy, picture, waits
from tests.profiled import HOSTILE, ISSUES, LINES, PROFILE


def table(sections: tuple[profile.Section, ...], caption: str) -> Table:
    return next(part for section in sections for part in section.tables if part.caption.startswith(caption))


def test_occupancy_names_every_limit_and_what_one_cta_more_takes() -> None:
    """An A100's SM: 65536 registers, 164 KiB, 2048 threads; a CTA has 4 warps, a scheduler's share is 16384."""
    by_registers = occupancy(CAPABILITIES["8.0"], threads=128, registers=168, smem_bytes=40960)
    # 168 * 32 = 5376 registers of a warp: 3 fit into 16384. 41984 bytes with the system's: 4 fit into 167936.
    assert by_registers.room == {"registers": 3, "shared memory": 4, "threads": 16, "blocks": 32}
    assert (by_registers.ctas, by_registers.limits, by_registers.warps) == (3, ("registers",), 3)
    assert by_registers.most_registers == 128  # 4096 of a warp
    assert by_registers.most_smem_bytes == 40960  # enough already
    by_smem = occupancy(CAPABILITIES["8.0"], threads=256, registers=64, smem_bytes=100_000)
    assert (by_smem.ctas, by_smem.limits) == (1, ("shared memory",))
    assert by_smem.most_smem_bytes == 167936 // 2 - 1024
    assert CAPABILITIES["8.0"].ctas_by_smem(by_smem.most_smem_bytes) == 2
    assert CAPABILITIES["8.0"].ctas_by_smem(by_smem.most_smem_bytes + 128) == 1
    by_threads = occupancy(CAPABILITIES["8.0"], threads=1024, registers=32, smem_bytes=0)
    assert (by_threads.ctas, by_threads.limits) == (2, ("registers", "threads"))


def test_a_saved_profile_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "kernel.json"
    path.write_text(PROFILE.model_dump_json())
    assert profile.load(path) == PROFILE
    content = json.loads(path.read_text())
    assert (content["kind"], content["version"], content["modelled"]) == ("profile", 1, True)
    assert set(content) == set(profile.Profile.model_fields)
    for change, message in (
        ({"version": 2}, "is a profile of version 2, this program reads 1"),
        ({"kind": "verdict"}, "is no profile"),
        ({"surplus": 1}, "surplus"),
        ({"registers": -1}, "registers"),
    ):
        path.write_text(json.dumps(content | change))
        with pytest.raises(WrongInput, match=message):
            profile.load(path)
    for text in ("[]", "{", ""):
        path.write_text(text)
        with pytest.raises(WrongInput, match=r"kernel\.json|JSON|line"):
            profile.load(path)
    with pytest.raises(WrongInput, match="No such file"):
        profile.load(tmp_path / "absent.json")


def test_every_field_of_the_schema_says_what_it_is() -> None:
    definitions = [profile.Profile.model_json_schema(), *profile.Profile.model_json_schema()["$defs"].values()]
    assert len(definitions) == 7
    for definition in definitions:
        assert all(node.get("description") for node in definition["properties"].values()), definition["title"]


def test_sections_have_the_figures() -> None:
    sections = profile.sections(PROFILE)
    assert "nothing is measured" in sections[0].paragraphs[0]
    facts = dict(table(sections, "The kernel").rows)
    assert facts["time"].startswith("12.5 µs, 2.50 times the floor of 5 µs")
    assert facts["main loop"] == "20 cycles a k-tile of 2 warps a scheduler, tensor bound 16 (80.0 %)"
    assert facts["occupancy"] == "3 CTAs an SM, 3 warps a scheduler, limited by registers"
    assert facts["waves"] == "1.19, 21.0 % of the SMs' time idle in the last"
    assert ("main loop", "9", "72.0 %") in table(sections, "Parts").rows
    assert table(sections, "Busy").rows[0] == ("tensor", "80.0 %")
    assert ("registers", "168 a thread", "3", "128 a thread") in table(sections, "CTAs").rows
    advice = next(section for section in sections if section.anchor == "advice")
    assert advice.paragraphs == (
        "barriers of the CTA at no cost: main loop at most 20.0 % shorter by the model",
        "--set bn=64: 5.0 % shorter by the model's cheap form",
    )


def test_the_listing_is_in_order_and_can_be_the_worst_lines() -> None:
    rows = table(profile.sections(PROFILE), "The main loop's machine code").rows
    assert [row[0].split()[1] for row in rows] == ["LDSM.16.M88.4", "HMMA.16816.F32", "@P0"]
    assert rows[1] == (f"0010 {LINES[1].sass}", "tensor", "13.0", "short_scoreboard 12, wait 1",
                       f"kernel.cu:8 {HOSTILE}")  # fmt: skip
    assert rows[2][2:] == ("0.0", "", "—")
    worst = table(profile.sections(PROFILE, 1), "The main loop's machine code: the 1 of 3")
    assert worst.rows == (rows[1],)


def test_the_picture_has_spans_where_the_cycles_are() -> None:
    """From cycle 0 to 20: what came before the first issue is left out."""
    assert list(waits(ISSUES[2])) == [("wait", 1, 2), ("short_scoreboard", 2, 10), ("selected", 10, 11)]
    assert list(busy(PROFILE, "tensor")) == [(10, 18), (18, 26)]
    assert list(busy(PROFILE, "shared")) == [(0, 4), (4, 8)]
    drawn = picture(PROFILE)
    assert drawn.scale == 8
    assert drawn.width == LEFT + 20 * 8 + 8
    assert [lane.name for lane in drawn.lanes] == ["warp 0", "warp 1", "tensor", "shared"]
    paths = {mark.kind: mark.path for mark in drawn.marks}
    first = drawn.lanes[0].middle - LANE / 2
    assert paths["short_scoreboard"].startswith(f"M{LEFT + 2 * 8:.1f} {first:g}h64.0")
    assert paths["selected"].count("M") == len(ISSUES)
    assert paths["pipe-tensor"].count("M") == 2
    assert paths["pipe-tensor"].endswith(
        f"M{LEFT + 18 * 8:.1f} {drawn.lanes[2].middle - LANE / 2:g}h16.0v{LANE}h-16.0z"
    )
    assert drawn.kinds == ("mio_throttle", "selected", "short_scoreboard", "wait")


def test_a_comparison_has_ratios() -> None:
    time = PROFILE.time
    assert time is not None
    faster = PROFILE.model_copy(
        update={
            "kernel": "other",
            "loop": PROFILE.loop.model_copy(update={"cycles": 18.0, "stalls": {"selected": 0.2, "barrier": 0.1}}),
            "time": time.model_copy(update={"us": 10.0, "parts": {"launch": 1.5, "main loop": 8.5}}),
        }
    )
    (section,) = profile.compare(PROFILE, faster)
    assert section.paragraphs[1] == "By the model B takes 20.0 % less time than A."
    assert section.tables[0].rows[0] == ("kernel", "matmul", "other")
    rows = {row[0]: row[1:] for part in section.tables[1:] for row in part.rows}
    assert rows["sum"] == ("12.5", "10", "0.800")
    assert rows["epilogue"] == ("1", "0", "0.000")
    assert rows["cycles a k-tile"] == ("20", "18", "0.900")
    assert rows["cycles over tensor bound"] == ("1.25", "1.125", "0.900")
    assert rows["barrier"] == ("0.0 %", "10.0 %", "—")
    loops = [item.model_copy(update={"time": None, "occupancy": None}) for item in (faster, PROFILE)]
    assert profile.compare(*loops)[0].paragraphs[1] == "By the model A takes 10.0 % less time for a k-tile than B."
