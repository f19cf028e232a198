"""Proves how findings are distinguished, ordered, named and written as JSON."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from kernelproof.emulator import Frame, Memory, Options, Participant, Place, Report, Site, findings_document, load
from kernelproof.emulator.host.declarations import parameters, shared_variable
from kernelproof.emulator.state.mangled import plain_name
from kernelproof.emulator.state.participants import Space
from kernelproof.emulator.state.reports import Reports, by_cause

# A header of CUDA, which is not the user's own text.
HEADER = "/usr/local/cuda-13.0/include/cuda_fp16.hpp"


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("add", "add"),
        ("_Z4gemmIfLi4EEvPK6__halfS2_PS0_iii", "gemm"),
        ("_ZN2ns6kernelEPf", "kernel"),
        ("_ZZ7reduce3IfLi2EEvPT_S1_jE5sdata", "sdata"),
        ("_ZZN2ns6kernelEPfE4tile_0", "tile"),
        ("_ZZ4gemmIfLi4EEvPK6__halfS2_PS0_iiiENKUliiE_clEii", "lambda"),
    ],
)
def test_plain_names(mangled: str, name: str) -> None:
    assert plain_name(mangled) == name


@pytest.mark.parametrize(
    ("file", "library"),
    [
        (HEADER, True),
        ("/v/nvidia/cu13/bin/..//include/sm_20_intrinsics.hpp", True),
        ("/src/cutlass/include/cute/arch/copy.hpp", True),
        ("cute/arch/copy.hpp", True),
        ("/home/u/llm.c/dev/cuda/common.h", False),
        ("/home/u/project/include/tiles.cuh", False),
    ],
)
def test_headers_of_others(file: str, library: bool) -> None:
    assert Frame(file, 1).is_library == library


def test_the_user_s_line_comes_before_those_of_headers() -> None:
    site = Site(5, "ld", (Frame(HEADER, 7, "half"), Frame("a.cuh", 3, "fetch"), Frame("a.cu", 9, "k")))
    assert site.home == Frame("a.cuh", 3, "fetch")
    assert site.calls == (Frame("a.cu", 9, "k"),)
    assert site.source == "a.cuh:3 in fetch > cuda_fp16.hpp:7"
    assert Site(5, "ld", (Frame(HEADER, 7),)).home == Frame(HEADER, 7)


def report(kind: str, line: int, ptx: int, other: int, buffer: str = "tile") -> Report:
    """A finding about a load from shared memory and the store before it.

    ``line`` and ``other``: CUDA lines of the load and the store. ``ptx``: the PTX line of the load. It has a count of
    3, and its thread 40 is lane 8 of warp 1.
    """
    access = Participant(Site(ptx, "ld.shared.f32 %f1, [%r1]", (Frame("a.cu", line, "k"),)), (0, 0, 0), (40,))
    earlier = Participant(Site(ptx - 1, "st.shared.f32 [%r1], %f1", (Frame("a.cu", other, "k"),)), (0, 0, 0), (3,))
    return Report(kind, "text", "k", access, earlier, Place(Space.SHARED, 4, buffer), 3)


def test_one_report_per_cause() -> None:
    """Three PTX instructions of one CUDA line are one cause, counted 3 * 3 times. A finding with another line of the
    store, another buffer or another rule is a cause of its own, and the merged reports stay as they were."""
    unrolled = [report("shared-race", 9, ptx, 5) for ptx in (20, 30, 40)]
    others = [report("shared-race", 9, 50, 6), report("shared-race", 9, 60, 5, "other"), report("in-flight", 9, 60, 5)]
    merged = by_cause([*unrolled, *others])
    assert sorted((r.count, r.instructions) for r in merged) == [(3, 1), (3, 1), (3, 1), (9, 3)]
    assert [r.count for r in unrolled] == [3, 3, 3]


def test_errors_come_first_and_are_not_hidden() -> None:
    """An error comes after 50 more lint findings of one kind than the limit of a kind. The list begins with the error.
    It has as many lint findings as the limit, and a last one that counts the other 50."""
    reports = Reports("k", [Site(i + 1, f"mbarrier.init {i}") for i in range(2 * Reports.LIMIT)])
    for site in range(Reports.LIMIT + 50):
        reports.add("phase-at-exit", "text", site)
    reports.add("shared-race", "text", Reports.LIMIT + 60)
    out = reports.list()
    assert [r.kind for r in out[:2]] == ["shared-race", "phase-at-exit"]
    assert len(out) == Reports.LIMIT + 2
    assert [r.count for r in out[-2:]] == [1, 50]


def test_an_error_that_is_everywhere_hides_no_other() -> None:
    """The limit holds for each kind: one report beyond it counts the others of that kind."""
    reports = Reports("k", [Site(i + 1, f"tcgen05.ld {i}") for i in range(2 * Reports.LIMIT)])
    for site in range(Reports.LIMIT + 1):
        reports.add("tensor-memory-race", "text", site)
    reports.add("tensor-memory-registers", "text", Reports.LIMIT + 60)
    assert Counter(r.kind for r in reports.list()) == {
        "tensor-memory-race": Reports.LIMIT + 1,
        "tensor-memory-registers": 1,
    }


@pytest.mark.parametrize("all_doubtful", [True, False])
def test_findings_beyond_the_limit_are_counted(all_doubtful: bool) -> None:
    """A doubtful race is no error once its value is known not to matter. The report that counts findings beyond the
    limit is doubtful only if all of them are; here the last four are not, unless ``all_doubtful``. It also counts the
    findings that are adopted from another execution."""
    sites = [Site(i + 1, f"ld.shared {i}") for i in range(3 * Reports.LIMIT)]
    reports, others = Reports("k", sites), Reports("k", sites)
    for site in range(Reports.LIMIT + 7):
        reports.add("shared-race", "text", site, doubtful=all_doubtful or site < Reports.LIMIT + 3)
    assert sum(r.count for r in reports.list()) == Reports.LIMIT + 7
    reports.acquit(reports.races)
    assert bool(reports.errors()) != all_doubtful
    for site in range(2 * Reports.LIMIT, 2 * Reports.LIMIT + 9):
        others.add("shared-race", "text", site)
    reports.adopt(others, {"shared-race"})
    assert reports.errors()
    assert sum(r.count for r in reports.list()) == Reports.LIMIT + 16


def test_findings_as_json() -> None:
    document = json.loads(json.dumps(findings_document([report("shared-race", 9, 20, 5)])))
    assert document["version"] == 1
    (finding,) = document["findings"]
    assert (finding["rule"], finding["severity"], finding["page"]) == ("shared-race", "error", "rules/shared-race.md")
    assert (finding["access"]["warp"], finding["access"]["lane"], finding["count"]) == (1, 8, 3)
    assert finding["other"]["home"] == {"file": "a.cu", "line": 5, "function": "k"}
    assert finding["place"] == {
        "space": "shared", "address": 4, "buffer": "tile", "offset": 0, "element": "", "index": [], "note": "",
    }  # fmt: skip


def test_declarations() -> None:
    text = """
    #define TILE 16
    template <int N> __global__ void __launch_bounds__(128) scale(const float* __restrict__ a, half2 *b, int n = 3) {
      __shared__ float one[2][TILE + 1], other[8];
      __shared__ __half tile[N][TILE * 2];
    """
    assert [(p.name, p.element) for p in parameters(text, "scale", 3)] == [("a", "float"), ("b", "half2"), ("n", "int")]
    assert parameters(text, "scale", 2) == []
    shapes = [(v.element, v.extents) for name in ("one", "other", "tile") if (v := shared_variable(text, name, 512))]
    assert shapes == [("float", (2, 17)), ("float", (8,)), ("__half", (8, 32))]


# Each thread of two warps writes its own word and reads a word of the other warp.
KERNEL = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 y) {
  .reg .b32 %t, %u, %v; .reg .b64 %q;
  .shared .align 4 .b8 tile[256];
  ld.param.u64 %q, [y];
  mov.u32 %t, %tid.x; mov.u32 %v, tile; xor.b32 %u, %t, 32;
  mad.lo.u32 %u, %u, 4, %v; mad.lo.u32 %v, %t, 4, %v;
  st.shared.u32 [%v], %t;
  ld.shared.u32 %t, [%u];
  mov.u32 %u, %tid.x; mad.wide.u32 %q, %u, 4, %q;
  st.global.u32 [%q], %t;
  ret;
}
"""


@pytest.mark.parametrize("snapshot", [True, False])
def test_both_sides_of_a_race(snapshot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A race has the PTX line, thread and place of its store, also if memory is too large for a second execution.

    Line 12 of ``KERNEL`` is the load, line 11 the store. The first racing load is that of thread 0, of the word of
    thread 32 at byte 128; all 64 loads race.
    """
    if not snapshot:
        monkeypatch.setattr("kernelproof.emulator.host.execution.SNAPSHOT_LIMIT", 0)
    memory = Memory()
    y = memory.upload(np.empty(64, np.uint32), "output")
    result = load(KERNEL).launch("k", 1, 64, [0, y], memory=memory, options=Options())
    (race,) = result.reports
    assert race.other is not None
    assert (race.line, race.other.site.line, race.other.threads, race.count) == (12, 11, (32,), 64)
    assert race.place is not None
    assert (race.place.buffer, race.place.offset) == ("tile", 128)
