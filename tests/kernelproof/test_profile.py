"""Proves the figures of cubins' profiles by hand, and that JSON, text, comparison and the verb have the same
figures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernelproof import profile, sass
from kernelproof.cli.profiling import profile_of_file
from kernelproof.ground.chips import CAPABILITIES
from kernelproof.ground.errors import WrongInput
from kernelproof.ground.pages import Table
from kernelproof.profile import advice
from kernelproof.profile.advice import NO_COPIES, NO_LOADS
from kernelproof.profile.figures import spans
from kernelproof.profile.loop import steady_window
from kernelproof.profile.occupancy import occupancy
from kernelproof.profile.picture import LANE, LEFT, picture
from kernelproof.sass import Instruction
from kernelproof.sass.decoding import FREE
from kernelproof.sass.simulation import Issue
from tests import commands
from tests.kernelproof import cubin_edits
from tests.kernelproof.emulator.build import compile_cubin, compile_file
from tests.kernelproof.profiled import HOSTILE, ISSUES, LINES, PROFILE

THREADS, SMEM_BYTES = 128, 4 * (128 + 128) * 32 * 2  # of kernels/multistage.cu: four stages of 128x128x32
SMS, MHZ = 108, 1380  # an A100, with the clock of chips.Rates


def table(sections: tuple[profile.Section, ...], anchor: str, index: int = 0) -> Table:
    """A table of the section with this anchor."""
    return next(section for section in sections if section.anchor == anchor).tables[index]


def numbers(text: str) -> list[float]:
    """The numbers in a text."""
    return [float(number) for number in re.findall(r"\d+\.?\d*", text)]


def test_occupancy_names_every_limit_and_what_one_cta_more_takes() -> None:
    """An A100's SM: 65536 registers, 164 KiB, 2048 threads; a CTA has 4 warps, a scheduler's share is 16384."""
    by_registers = occupancy(CAPABILITIES["8.0"], threads=128, registers=168, smem_bytes=40960)
    # A warp has 168 * 32 = 5376 registers, and 3 fit into 16384. A CTA has 41984 bytes (with the system's), and 4 fit
    # into 167936.
    assert by_registers.room == {"registers": 3, "shared memory": 4, "threads": 16, "blocks": 32}
    assert (by_registers.ctas, by_registers.limits, by_registers.warps) == (3, ("registers",), 3)
    assert by_registers.most_registers == 128  # 4096 for a warp
    assert by_registers.most_smem_bytes == 40960  # already small enough
    by_smem = occupancy(CAPABILITIES["8.0"], threads=256, registers=64, smem_bytes=100_000)
    assert (by_smem.ctas, by_smem.limits) == (1, ("shared memory",))
    assert by_smem.most_registers == 64  # already small enough
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
    later = {"roles", "ring", "limits", "hazards"}  # absent if they are empty
    assert set(content) == set(profile.Profile.model_fields) - later
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
    with pytest.raises(WrongInput, match="cannot read"):
        profile.load(tmp_path / "absent.json")


def test_every_field_of_the_schema_says_what_it_is() -> None:
    definitions = [profile.Profile.model_json_schema(), *profile.Profile.model_json_schema()["$defs"].values()]
    assert len(definitions) == 10
    for definition in definitions:
        assert all(node.get("description") for node in definition["properties"].values()), definition["title"]


def test_sections_have_the_figures() -> None:
    sections = profile.sections(PROFILE)
    facts = {name: numbers(text) for name, text in table(sections, "overview").rows}
    assert facts["time"] == [12.5, 2.5, 5]
    assert facts["main loop"] == [20, 2, 16, 80]
    assert facts["occupancy"] == [3, 3]
    assert facts["waves"] == [1.19, 21]
    assert facts["registers"] == [168, 40]
    assert ("main loop", "9", "72.0 %") in table(sections, "time").rows
    assert table(sections, "loop").rows[0] == ("tensor", "80.0 %")
    limits = {row[0]: [numbers(cell) for cell in row[1:]] for row in table(sections, "occupancy").rows}
    assert limits["registers"] == [[168], [3], [128]]
    assert limits["threads"] == [[128], [16], []], "it does not limit, so no change of it would help"
    advice = next(section for section in sections if section.anchor == "advice")
    saved = [(line.split(": ")[0], numbers(line.split(": ")[1])) for line in advice.paragraphs]
    assert saved == [("barriers of the CTA at no cost", [20]), ("--set bn=64", [5])]


@pytest.mark.parametrize(("cycles", "shown"), [(2.46154, [2.5]), (10.02, [10]), (0.04, [])])
def test_cycles_of_bank_conflicts_are_rounded(cycles: float, shown: list[float]) -> None:
    loop = PROFILE.loop.model_copy(update={"bank_conflicts": cycles})
    sections = profile.sections(PROFILE.model_copy(update={"loop": loop}))
    texts = [text for section in sections if section.anchor == "loop" for text in section.paragraphs]
    assert [number for text in texts if "banks" in text for number in re.findall(r"cost ([\d.]+) ", text)] == [
        f"{number:g}" for number in shown
    ]


def test_every_table_of_times_names_the_unit_where_two_columns_have_no_head() -> None:
    """A terminal prints tables of two columns without their heads."""
    pairs = [part for section in profile.sections(PROFILE) for part in section.tables if len(part.columns) == 2]
    (times,) = [part for part in pairs if part.columns[1] == "µs"]
    assert "µs" in times.caption


def test_the_listing_is_in_order_and_can_be_the_worst_lines() -> None:
    rows = table(profile.sections(PROFILE), "listing").rows
    assert [row[0].split()[1] for row in rows] == ["LDSM.16.M88.4", "HMMA.16816.F32", "@P0"]
    assert rows[1] == (f"0010 {LINES[1].sass}", "tensor", "13.0", "short_scoreboard 12, wait 1",
                       f"kernel.cu:8 {HOSTILE}")  # fmt: skip
    assert rows[2][2:] == ("0.0", "", "—")
    assert table(profile.sections(PROFILE, 1), "listing").rows == (rows[1],)


def test_the_picture_has_spans_where_the_cycles_are() -> None:
    """The picture shows cycles 0 to 20. Waits before the first issue and a pipe that is busy after the last one are cut
    off."""
    assert list(spans(ISSUES[2].cycle, ISSUES[2].stalls)) == [
        ("wait", 1, 2),
        ("short_scoreboard", 2, 10),
        ("selected", 10, 11),
    ]
    drawn = picture(PROFILE)
    assert drawn.scale == 8
    assert drawn.width == LEFT + 20 * 8 + 8
    assert [lane.name for lane in drawn.lanes] == ["warp 0", "warp 1", "tensor", "shared"]
    paths = {mark.kind: mark.path for mark in drawn.marks}
    first = drawn.lanes[0].middle - LANE / 2
    assert paths["short_scoreboard"].startswith(f"M{LEFT + 2 * 8:.1f} {first:g}h64.0")
    assert paths["selected"].count("M") == len(ISSUES)
    top = drawn.lanes[2].middle - LANE / 2
    assert paths["pipe-tensor"] == "".join(
        f"M{LEFT + begin * 8:.1f} {top:g}h{cycles * 8:.1f}v{LANE}h-{cycles * 8:.1f}z"
        for begin, cycles in ((0, 3), (10, 10))
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
    assert section.tables[0].rows[0] == ("kernel", PROFILE.kernel, "other")
    rows = {row[0]: row[1:] for part in section.tables[1:] for row in part.rows}
    assert rows["sum"] == ("12.5", "10", "0.800")
    assert rows["epilogue"] == ("1", "0", "0.000")
    assert rows["cycles per k-tile"] == ("20", "18", "0.900")
    assert rows["cycles over those of the tensor core"] == ("1.25", "1.125", "0.900")
    assert rows["barrier"] == ("0.0 %", "10.0 %", "—")
    loops = [item.model_copy(update={"time": None, "occupancy": None}) for item in (faster, PROFILE)]
    assert "A takes 10.0 % less" in profile.compare(*loops)[0].paragraphs[1]


@pytest.mark.parametrize("unit", ["k-tile", "2 k-tiles"])
@pytest.mark.parametrize("tensor_cycles", [16, 32])
def test_times_of_loops_are_compared_only_if_both_do_the_same_work(unit: str, tensor_cycles: int) -> None:
    first = PROFILE.model_copy(update={"time": None, "occupancy": None})
    changes = {"unit": unit, "tensor_cycles": tensor_cycles, "cycles": 18.0}
    second = first.model_copy(update={"loop": first.loop.model_copy(update=changes)})
    for pair in ((first, second), (second, first)):
        sentence = profile.compare(*pair)[0].paragraphs[1]
        assert ("%" in sentence) is ((unit, tensor_cycles) == ("k-tile", 16))


def test_a_profile_is_named_by_its_problem_or_else_its_kernel() -> None:
    assert PROFILE.title == f"{PROFILE.problem} on {PROFILE.gpu}"
    assert PROFILE.model_copy(update={"problem": None}).title == f"{PROFILE.kernel} on {PROFILE.gpu}"


def issues(*cycles: float, warp: int = 0) -> list[Issue]:
    """Issues of an MMA by a warp in these cycles."""
    return [Issue(warp, MMA, cycle, {}) for cycle in cycles]


# An asynchronous product, which no instruction waits for.
MMA = Instruction(0, None, "HGMMA.64x256x16.F32", (), FREE)


@pytest.mark.parametrize(
    ("warps", "start", "end", "iterations"),
    [
        pytest.param([(0, 10, 20, 30, 40), (5, 15, 25, 35, 45)], 25, 40, 1.5, id="together"),
        pytest.param([(0, 10, 20, 30), (50, 60, 70, 80)], 10, 60, 2, id="one after the other"),
        pytest.param([(7,), (9,)], 7, 10, 1, id="one iteration"),
    ],
)
def test_the_window_is_where_the_main_loop_is_steady(
    warps: list[tuple[float, ...]], start: float, end: float, iterations: float
) -> None:
    """If warps alternate, the later half of one warp's run and the first half of the next warp's make one tile."""
    issued = sorted(
        (issue for number, cycles in enumerate(warps) for issue in issues(*cycles, warp=number)),
        key=lambda issue: issue.cycle,
    )
    window = steady_window(issued, (MMA,))
    assert (window.start, window.end, window.iterations, window.warps) == (start, end, iterations, 2)
    assert [*window.earlier, *window.issues] == [issue for issue in issued if issue.cycle < end]


@pytest.fixture(scope="module")
def cubin() -> Path:
    """Two kernels, whose main loops multiply 128x128x32 by four warps."""
    return compile_file("multistage", ".cubin")


@pytest.fixture(scope="module")
def profile_without_source(cubin: Path) -> profile.Profile:
    """The profile of the cubin without its source."""
    return profile.of_cubin(cubin, "a100")


@pytest.mark.slow
def test_a_cubin_has_the_main_loop_that_follows_by_hand(cubin: Path, profile_without_source: profile.Profile) -> None:
    """128*128*32 / (4 warps * 16*8*16) = 64 MMAs of each warp, which take an A100's tensor core 8 cycles each."""
    loop = profile_without_source.loop
    assert (profile_without_source.time, profile_without_source.occupancy, profile_without_source.problem) == (
        None,
        None,
        None,
    )
    assert (profile_without_source.kernel, profile_without_source.arch, loop.unit, loop.warps) == (
        "gemm_f32",
        "sm_80",
        "iteration",
        1,
    )
    assert (loop.opcodes["HMMA"], loop.opcodes["LDGSTS"], loop.opcodes["BAR"]) == (64, 8, 1)
    assert loop.tensor_cycles == 512
    assert loop.cycles >= 512
    assert loop.pipes["tensor"] == pytest.approx(512 / loop.cycles)
    assert sum(loop.stalls.values()) == pytest.approx(1)
    assert loop.live_registers <= profile_without_source.registers
    mmas = [line for line in profile_without_source.lines if line.sass.startswith("HMMA")]
    assert all((line.pipe, line.busy) == ("tensor", 8) for line in mmas)
    assert all(line.file and line.file.endswith("multistage.cu") for line in mmas)
    assert profile.of_cubin(cubin, "a100", "f16").kernel == "gemm_f16"
    assert all(item.gain >= 0.01 for item in profile_without_source.advice)


def test_a_file_has_the_profile_of_its_code_or_the_one_that_was_saved(
    cubin: Path, profile_without_source: profile.Profile, tmp_path: Path
) -> None:
    assert profile_of_file(cubin, "a100", profile_without_source.kernel) == profile_without_source
    saved = tmp_path / "saved.json"
    saved.write_text(PROFILE.model_dump_json())
    assert profile_of_file(saved, None) == PROFILE
    launch = tmp_path / "launch.json"
    launch.write_text(json.dumps({"ctas": 216, "threads": 128, "smem_bytes": 65536, "iterations": 64}))
    launched = profile_of_file(cubin, "a100", None, launch)
    assert (profile_without_source.time, launched.time is None, launched.kernel) == (
        None,
        False,
        profile_without_source.kernel,
    )
    with pytest.raises(WrongInput):
        profile_of_file(tmp_path / "missing.cubin", "a100")


@pytest.mark.parametrize(("a", "b"), [("1024_64_64 f16", "64_64_64 f16"), (None, "64_64_64 f16"), (None, None)])
def test_a_comparison_says_of_which_problems_it_is(a: str | None, b: str | None) -> None:
    first, second = (PROFILE.model_copy(update={"problem": problem}) for problem in (a, b))
    (section,) = profile.compare(first, second)
    cells = [row[1:] for row in section.tables[0].rows]
    assert (a or "—", b or "—") in cells
    assert (PROFILE.kernel, PROFILE.kernel) in cells


def test_a_wait_that_is_taken_away_is_a_hazard(
    cubin: Path, profile_without_source: profile.Profile, tmp_path: Path
) -> None:
    """The first MMA of the kernel no longer waits for the fragments that ldmatrix loads."""
    function = next(item for item in sass.disassemble(cubin) if item.name == profile_without_source.kernel)
    mma = next(item for item in function.instructions if item.name == "HMMA" and item.control.waits)
    code = {mma.address: cubin_edits.rescheduled_code(mma, waits=())}
    edited = tmp_path / "edited.cubin"
    edited.write_bytes(cubin_edits.edit_cubin(cubin.read_bytes(), function.name, code))
    found = profile.of_cubin(edited, "a100")
    assert profile_without_source.hazards == ()
    assert {hazard.later for hazard in found.hazards} == {f"{mma.address:04x} {mma.text}"}
    assert all("LDSM" in hazard.earlier for hazard in found.hazards)
    (rows,) = (section.tables[0].rows for section in profile.sections(found) if section.anchor == "hazards")
    assert len(rows) == len(found.hazards)


def test_the_pictured_pipe_is_busy_as_long_as_the_table_says(profile_without_source: profile.Profile) -> None:
    cycles = sum(end - begin for begin, end in profile_without_source.busy["tensor"])
    assert cycles == pytest.approx(profile_without_source.loop.tensor_cycles, abs=8)
    assert list(profile_without_source.busy["tensor"]) == sorted(profile_without_source.busy["tensor"])
    assert {"shared", "global"} <= profile_without_source.busy.keys()


# A product that loads its fragments from global memory.
GLOBAL_ONLY = """
#include <mma.h>
using namespace nvcuda;
__global__ void product(const half* a, const half* b, float* d, int k) {
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> fd;
  wmma::fill_fragment(fd, 0.0f);
  for (int i = 0; i < k; i += 16) {
    wmma::load_matrix_sync(fa, a + i, k);
    wmma::load_matrix_sync(fb, b + i, k);
    wmma::mma_sync(fd, fa, fb, fd);
  }
  wmma::store_matrix_sync(d, fd, 16, wmma::mem_row_major);
}
"""


@pytest.mark.slow
def test_without_shared_memory_loads_from_global_memory_are_advised() -> None:
    advised = [item.change for item in profile.of_cubin(compile_cubin(GLOBAL_ONLY), "a100").advice]
    assert (NO_LOADS in advised, NO_COPIES in advised) == (True, False)


def test_copies_are_advised_where_a_kernel_copies(cubin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "MIN_GAIN", -1.0)
    advised = [item.change for item in profile.of_cubin(cubin, "a100").advice]
    assert (NO_LOADS in advised, NO_COPIES in advised) == (False, True)


@pytest.mark.slow
def test_mmas_from_before_the_window_keep_the_tensor_core_busy_in_it() -> None:
    """Asynchronous MMAs are issued at once, and most of the time that they take passes in the next iteration."""
    cubin = compile_file("tma_gemm", ".cubin", arch="sm_90a")
    modelled = profile.of_cubin(cubin)
    assert modelled.gpu == "h100", "the first GPU that runs sm_90a"
    busy = sum(end - begin for begin, end in modelled.busy["tensor"])
    shown = max(issue.cycle for issue in modelled.issues) + 1
    assert busy / shown == pytest.approx(modelled.loop.pipes["tensor"], rel=0.02)


@pytest.mark.slow
def test_with_a_launch_a_cubin_has_its_occupancy_and_time(cubin: Path, profile_without_source: profile.Profile) -> None:
    """An SM holds two CTAs by shared memory, 65 KiB each, and three by registers; seven waves of CTAs on each SM."""
    facts = {"ctas": SMS * 7, "threads": THREADS, "smem_bytes": SMEM_BYTES, "iterations": 100}
    launched = profile.of_cubin(cubin, "a100", None, profile.LaunchFacts(**facts))
    room, time = launched.occupancy, launched.time
    assert room is not None
    assert time is not None
    assert (room.ctas, room.limits, room.warps) == (2, ("shared memory",), 2)
    assert time.tail_share == 0
    assert time.waves == 3.5
    assert time.us == pytest.approx(sum(time.parts.values()))
    assert time.bounds["tensor cores"] == pytest.approx(7 * 100 * profile_without_source.loop.tensor_cycles / MHZ)
    assert time.parts["main loop"] == pytest.approx(100 * 7 / room.ctas * launched.loop.cycles / MHZ)
    assert time.floor_us == pytest.approx(1.6 + time.bounds["tensor cores"])
    with pytest.raises(WrongInput, match="shared memory"):
        profile.of_cubin(cubin, "a100", None, profile.LaunchFacts(**facts | {"smem_bytes": 167 << 10}))


@pytest.mark.parametrize("threads", [32, 96])
def test_schedulers_share_the_warps_of_all_resident_ctas(cubin: Path, threads: int) -> None:
    """An A100's SM has registers for 12 warps of 168 registers a thread, 3 for each of its 4 schedulers."""
    launch = profile.LaunchFacts(ctas=SMS * 12, threads=threads, smem_bytes=0, iterations=2)
    launched = profile.of_cubin(cubin, "a100", None, launch)
    assert launched.occupancy is not None
    assert (launched.occupancy.ctas * threads, launched.occupancy.warps, launched.loop.warps) == (12 * 32, 3, 3)
    assert launched.loop.tensor_cycles == 3 * 512
    assert max(launched.loop.pipes.values()) < 1.01


@pytest.mark.slow
def test_a_cubin_runs_on_gpus_of_its_architecture(cubin: Path) -> None:
    assert profile.of_cubin(cubin).gpu == "a100"
    assert profile.of_cubin(cubin, "rtx3090").gpu == "rtx3090", "8.6 runs code for 8.0"
    with pytest.raises(WrongInput, match="other"):
        profile.of_cubin(cubin, "a100", "other")
    with pytest.raises(WrongInput, match=r"sm_80.* h100 .*a100"):
        profile.of_cubin(cubin, "h100")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"ctas": 1}', "threads"),
        ('{"ctas": 1, "threads": 33, "smem_bytes": 0, "iterations": 1}', "threads"),
        ("[]", "is no object"),
        ("{", r"launch\.json: not JSON"),
    ],
)
def test_a_launch_that_makes_no_sense_is_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    path.write_text(content)
    with pytest.raises(WrongInput, match=message) as error:
        profile.LaunchFacts.load(path)
    (example,) = re.findall(r"such as (\{.*\})", str(error.value))
    path.write_text(example)
    assert profile.LaunchFacts.load(path) == profile.LaunchFacts(
        ctas=1024, threads=128, smem_bytes=65536, iterations=128
    )


def run_profile(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs ``kernelproof profile`` with these arguments."""
    return commands.run("profile", *arguments, program="kernelproof")


@pytest.mark.slow
def test_the_verb_prints_text_json_and_a_page(
    tmp_path: Path, cubin: Path, profile_without_source: profile.Profile
) -> None:
    page, saved, launch = tmp_path / "p.html", tmp_path / "p.json", tmp_path / "launch.json"
    done = run_profile(str(cubin), "--html", str(page))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "<svg" in page.read_text()
    text = run_profile(str(cubin), "--lines", "3", "--gpu", "a100").stdout
    assert len(re.findall(r"^[0-9a-f]{4} [@A-Z]", text, re.MULTILINE)) == 3
    saved.write_text(run_profile(str(cubin), "--json").stdout)
    assert profile.load(saved) == profile_without_source
    assert run_profile(str(saved), "--lines", "3").stdout == text
    launch.write_text(json.dumps({"ctas": 108, "threads": THREADS, "smem_bytes": SMEM_BYTES, "iterations": 9}))
    launched = run_profile(str(cubin), "--kernel", "f16", "--launch", str(launch), "--json")
    content = json.loads(launched.stdout)
    assert (content["kernel"], content["time"]["ctas"]) == ("gemm_f16", 108)
    compared = run_profile("--compare", str(saved), str(cubin))
    assert "1.000" in compared.stdout, compared.stderr


@pytest.mark.slow
def test_a_cuda_source_is_compiled_for_the_gpu_that_is_named() -> None:
    for gpu, sm in (("a100", "sm_80"), ("h200", "sm_90a")):
        content = json.loads(
            run_profile("tests/kernelproof/emulator/kernels/multistage.cu", "--gpu", gpu, "--json").stdout
        )
        assert (content["kernel"][:5], content["arch"]) == ("gemm_", sm)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "give one of FILE and --compare"),
        (("x.cubin", "--compare", "a.json", "b.json"), "leave out FILE"),
        (("--kernel", "f16", "--compare", "a.json", "b.json"), "--kernel"),
        (("nowhere.cubin",), "no file at nowhere.cubin"),
        (("nowhere.json",), "nowhere.json"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: tuple[str, ...], reason: str) -> None:
    refused = run_profile(*arguments)
    assert refused.returncode == 2
    assert reason in refused.stderr


# A program that compiles a product by Triton into the file that it is given.
TRITON = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def matmul(a, b, c, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    along = tl.arange(0, BK)
    at_a = a + rows[:, None] * k + along[None, :]
    at_b = b + along[:, None] * n + cols[None, :]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, k, BK):
        total += tl.dot(tl.load(at_a), tl.load(at_b))
        at_a += BK
        at_b += BK * n
    tl.store(c + rows[:, None] * n + cols[None, :], total.to(tl.float16))

tile = {"BM": 128, "BN": 128, "BK": 32}
types = {"a": "*fp16", "b": "*fp16", "c": "*fp16", "n": "i32", "k": "i32"} | dict.fromkeys(tile, "constexpr")
aligned = {(index,): [["tt.divisibility", 16]] for index in range(5)}
source = ASTSource(fn=matmul, signature=types, constexprs=tile, attrs=aligned)
compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": 4, "num_stages": 4})
open(sys.argv[1], "wb").write(compiled.asm["cubin"])
"""


@pytest.mark.slow
def test_a_kernel_of_triton_has_its_tile_in_its_main_loop(tmp_path: Path) -> None:
    """Four warps share 128x128x32: 128*128*32 / (4 * 16*8*16) = 64 MMAs of each, of 8 cycles."""
    program, cubin = tmp_path / "matmul.py", tmp_path / "matmul.cubin"
    program.write_text(TRITON)
    own_cache = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}  # a cached cubin has lines of another file
    subprocess.run([sys.executable, str(program), str(cubin)], check=True, capture_output=True, env=own_cache)
    modelled = profile.of_cubin(cubin, "a100")
    assert (modelled.kernel, modelled.arch, modelled.loop.warps) == ("matmul", "sm_80", 1)
    assert modelled.loop.opcodes["HMMA"] == 64
    assert modelled.loop.tensor_cycles == 512
    assert 512 <= modelled.loop.cycles < 1024
    assert any("tl.dot" in (line.cuda or "") for line in modelled.lines), "the lines are Python's"
