"""Profiles: figures of kernels whose answers follow by hand, the schema, comparisons, and any project's cubins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from cudal2gen.generation import compiler
from cudal2gen.kernel import Sm100Tcgen05
from cudal2gen.timing import profile
from cudal2gen.timing.model import estimate
from cudal2gen.timing.profile.figures import spans
from cudal2gen.timing.profile.occupancy import occupancy
from cudal2gen.timing.profile.picture import LANE, LEFT, busy, picture
from kernelproof.ground.chips import CAPABILITIES
from kernelproof.ground.errors import WrongInput
from kernelproof.ground.pages import Table
from tests import commands
from tests.cudal2gen.profiled import HOSTILE, ISSUES, LINES, PROFILE
from tests.cudal2gen.strategies import multistage, tcgen05, warp_mma

TENSOR_RECORD = tcgen05()
PAIR_RECORD = tcgen05(pair=True, cluster=[2, 1], bk=128, stages=2)
WARP_RECORD = warp_mma(m=1024, n=1024, k=1024)


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
    later = {"roles", "ring", "limits"}  # of kernels with tensor memory alone, and absent from others
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
    assert len(definitions) == 9
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
    assert list(spans(ISSUES[2].cycle, ISSUES[2].stalls)) == [
        ("wait", 1, 2),
        ("short_scoreboard", 2, 10),
        ("selected", 10, 11),
    ]
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
    assert section.tables[0].rows[0] == ("kernel", PROFILE.kernel, "other")
    rows = {row[0]: row[1:] for part in section.tables[1:] for row in part.rows}
    assert rows["sum"] == ("12.5", "10", "0.800")
    assert rows["epilogue"] == ("1", "0", "0.000")
    assert rows["cycles a k-tile"] == ("20", "18", "0.900")
    assert rows["cycles over tensor bound"] == ("1.25", "1.125", "0.900")
    assert rows["barrier"] == ("0.0 %", "10.0 %", "—")
    loops = [item.model_copy(update={"time": None, "occupancy": None}) for item in (faster, PROFILE)]
    assert profile.compare(*loops)[0].paragraphs[1] == "By the model A takes 10.0 % less time for a k-tile than B."


RECORD = multistage(bk=64)


@pytest.fixture(scope="module")
def built() -> compiler.Artifact:
    return compiler.build([RECORD])[0]


@pytest.fixture(scope="module")
def modelled(built: compiler.Artifact) -> profile.Profile:
    return profile.of_record(RECORD, built.cubin, built.source)


def test_a_record_has_the_bounds_that_follow_by_hand(modelled: profile.Profile, built: compiler.Artifact) -> None:
    """An MMA of 16x8x16 takes a tensor core of an A100 8 cycles; a scheduler has a quarter of a CTA's warps."""
    loop, time = modelled.loop, modelled.time
    mmas = RECORD.warp_m * RECORD.warp_n * RECORD.k_blocks
    assert loop.opcodes["HMMA"] == pytest.approx(mmas * loop.warps)
    assert loop.tensor_cycles == pytest.approx(8 * mmas * loop.warps)
    assert loop.cycles >= loop.tensor_cycles
    assert loop.pipes["tensor"] == pytest.approx(loop.tensor_cycles / loop.cycles)
    assert sum(loop.stalls.values()) == pytest.approx(1)
    assert loop.live_registers <= modelled.registers == built.ptxas.registers
    assert modelled.occupancy is not None
    assert modelled.occupancy.ctas == RECORD.ctas_per_sm(built.ptxas.registers)
    assert time is not None
    assert time.us == pytest.approx(sum(time.parts.values()))
    assert time.waves == RECORD.waves(built.ptxas.registers)
    per_sm = -(-RECORD.ctas // 108)
    assert time.tail_share == pytest.approx(1 - RECORD.ctas / 108 / per_sm)
    flops = 2 * RECORD.m * RECORD.n * RECORD.k
    least = max(flops / (2048 * 108 * 1380), RECORD.problem.traffic_bytes / 1.7e6)
    assert time.floor_us == pytest.approx(1.6 + least)


def test_lines_have_their_cuda_and_issues_their_place(modelled: profile.Profile) -> None:
    mmas = [line for line in modelled.lines if line.sass.startswith("HMMA")]
    assert all(line.pipe == "tensor" and line.busy == 8 for line in mmas)
    assert any("Mma::fma" in (line.cuda or "") for line in mmas)
    assert all(line.file and line.file.endswith(".cu") for line in mmas)
    assert [line.address for line in modelled.lines] == sorted(line.address for line in modelled.lines)
    for warp in {issue.warp for issue in modelled.issues}:
        own = [issue for issue in modelled.issues if issue.warp == warp]
        for before, after in pairwise(own):
            assert after.cycle - before.cycle == pytest.approx(sum(after.stalls.values()) + 1)


def test_advice_is_what_the_model_says_of_the_change(modelled: profile.Profile) -> None:
    assert all(advice.gain >= 0.01 for advice in modelled.advice)
    gains = [advice.gain for advice in modelled.advice]
    assert gains == sorted(gains, reverse=True)
    for advice in modelled.advice:
        if advice.change.startswith("--set"):
            field, value = advice.change.removeprefix("--set ").split("=")
            edited = RECORD.at(RECORD.problem, **{field: json.loads(value)})
            assert advice.after == estimate(edited).us
            assert advice.before == estimate(RECORD).us
        elif advice.figure == "main loop":
            assert modelled.loop.tensor_cycles * 0.98 <= advice.after < advice.before


@pytest.mark.parametrize("record", [TENSOR_RECORD, PAIR_RECORD], ids=("alone", "pair"))
def test_a_record_with_tensor_memory_is_counted_by_role(record: Sm100Tcgen05) -> None:
    """By hand: bk / 16 products, one copy for each operand's 64 columns of k, a commit; 8192 FLOP a clock and SM."""
    (artifact,) = compiler.build([record])
    content = profile.of_record(record, artifact.cubin, artifact.source)
    assert profile.Profile.model_validate_json(content.model_dump_json()) == content
    loads, multiplies, stores = content.roles
    blocks = record.bk // 64
    assert (multiplies.opcodes["UTCHMMA"], multiplies.opcodes["UTCBAR"]) == (record.bk // 16, 1)
    assert (loads.opcodes["UTMALDG"], stores.opcodes["LDTM"], stores.warps) == (2 * blocks, 2, 4)
    assert (multiplies.pipes["tensor"], loads.pipes["tma"]) == (record.bk // 16, 2 * blocks)
    ring = content.ring
    assert ring is not None
    columns = record.bn // 2 if record.pair else record.bn  # of B that the CTA brings
    assert (ring.stages, ring.tile_bytes) == (record.stages, 2 * (record.bm + columns) * record.bk)
    assert (ring.copies, ring.products, ring.tensor_columns) == (2 * blocks, record.bk // 16, 512)
    assert content.loop.tensor_cycles == 2 * record.bm * record.bn * record.bk / 8192
    per_sm = -(-record.ctas // 148)
    assert content.time is not None
    assert content.time.bounds["tensor cores"] == pytest.approx(2 * per_sm * 128 * 256 * record.k / 8192 / 1850)
    assert content.time.bounds[content.time.bound] == max(content.time.bounds.values())
    assert sum(content.time.parts.values()) == pytest.approx(content.time.us) == pytest.approx(estimate(record).us)
    assert content.issues == ()
    assert any("not simulated" in limit for limit in content.limits)


def test_the_page_of_a_record_with_tensor_memory_has_its_roles() -> None:
    (artifact,) = compiler.build([TENSOR_RECORD])
    content = profile.of_record(TENSOR_RECORD, artifact.cubin, artifact.source)
    assert "A ring of 4 k-tiles, 49152 bytes each, by 2 instructions of TMA" in profile.html(content)
    assert "UTCHMMA" in profile.html(content)


def test_a_record_of_warps_beside_a_producer_multiplies_what_follows_by_hand() -> None:
    """Two consumers: of each 64 rows a warp has 16, by instructions of 16 x 8 x 16; the GeForce sums f32 at half."""
    (artifact,) = compiler.build([WARP_RECORD])
    content = profile.of_record(WARP_RECORD, artifact.cubin, artifact.source)
    assert content.loop.opcodes["HMMA"] == 128 * 128 * 64 / (16 * 8 * 16) / 4
    assert content.loop.tensor_cycles == 2 * 128 * 128 * 64 / 512
    assert content.loop.bound == "tensor pipe"


def test_without_a_launch_a_cubin_has_its_main_loop(built: compiler.Artifact, modelled: profile.Profile) -> None:
    """One CTA by itself; with a launch what the record's own launch gives."""
    alone = profile.of_cubin(built.cubin, "a100")
    assert (alone.time, alone.occupancy, alone.problem) == (None, None, None)
    assert alone.loop.unit == "turn"
    assert alone.loop.warps == RECORD.threads // 128
    assert alone.loop.tensor_cycles * modelled.loop.warps == pytest.approx(
        modelled.loop.tensor_cycles * alone.loop.warps
    )
    facts = {"ctas": 108 * 7, "threads": RECORD.threads, "smem_bytes": RECORD.smem_bytes, "turns": 100}
    with pytest.raises(WrongInput, match=r"no CTA of .* fits an SM of a100 by shared memory"):
        profile.of_cubin(built.cubin, "a100", None, profile.LaunchFacts(**facts | {"smem_bytes": 167 << 10}))
    launched = profile.of_cubin(built.cubin, "a100", None, profile.LaunchFacts(**facts))
    assert launched.time is not None
    assert launched.occupancy is not None
    assert launched.occupancy == modelled.occupancy
    assert launched.time.tail_share == 0
    tensor_us = 7 * 100 * 8 * RECORD.warp_m * RECORD.warp_n * RECORD.k_blocks * (RECORD.threads // 128) / 1380
    assert launched.time.bounds["tensor cores"] == pytest.approx(tensor_us)
    turns = 100 * 7 / launched.occupancy.ctas
    assert launched.time.parts["main loop"] == pytest.approx(turns * launched.loop.cycles / 1380)
    assert profile.of_cubin(built.cubin, "rtx3090").gpu == "rtx3090", "8.6 runs code for 8.0"
    with pytest.raises(WrongInput, match="no function whose name has other"):
        profile.of_cubin(built.cubin, "a100", "other")
    with pytest.raises(WrongInput, match=r"is for sm_80, which h100 does not run; --gpu names"):
        profile.of_cubin(built.cubin, "h100")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"ctas": 1}', "threads"),
        ('{"ctas": 1, "threads": 33, "smem_bytes": 0, "turns": 1}', "threads"),
        ("[]", "is no object"),
        ("{", r"launch\.json: not JSON"),
    ],
)
def test_a_launch_that_makes_no_sense_is_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    path.write_text(content)
    with pytest.raises(WrongInput, match=message):
        profile.LaunchFacts.load(path)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.run("profile", *arguments)


def test_the_verb_prints_text_json_and_a_page(tmp_path: Path, built: compiler.Artifact) -> None:
    page, saved = tmp_path / "p.html", tmp_path / "p.json"
    done = run(str(built.cubin), "--lines", "3", "--html", str(page))
    assert done.returncode == 0, done.stderr
    assert "<svg" in page.read_text()
    text = run(str(built.cubin), "--lines", "3")
    assert "All figures are modelled" in text.stdout
    assert "WHAT WOULD HELP" in text.stdout
    content = run(str(built.cubin), "--json").stdout
    saved.write_text(content)
    assert json.loads(content)["kernel"] == RECORD.name
    compared = run("--compare", str(saved), str(built.cubin))
    assert "By the model both take the same time for a turn." in compared.stdout, compared.stderr
    for arguments, message in (
        ((), "give one of --mnk M_N_K, FILE and --compare A B"),
        (("--mnk", "64_64_64", str(built.cubin)), "give one of"),
        (("nowhere.cubin",), "no file at nowhere.cubin"),
        (("--compare", str(saved), "64_64"), "expected three sizes"),
    ):
        refused = run(*arguments)
        assert refused.returncode == 2
        assert message in refused.stderr


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
    own_cache = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}  # a cached cubin has another file's lines
    subprocess.run([sys.executable, str(program), str(cubin)], check=True, capture_output=True, env=own_cache)
    modelled = profile.of_cubin(cubin, "a100")
    assert (modelled.kernel, modelled.arch, modelled.loop.warps) == ("matmul", "sm_80", 1)
    assert modelled.loop.opcodes["HMMA"] == 64
    assert modelled.loop.tensor_cycles == 512
    assert 512 <= modelled.loop.cycles < 1024
    assert any("tl.dot" in (line.cuda or "") for line in modelled.lines), "the lines are Python's"


def test_show_has_a_short_summary_of_a_built_kernel(built: compiler.Artifact, modelled: profile.Profile) -> None:
    brief = profile.brief(RECORD, built.cubin)
    assert modelled.time is not None
    assert brief["modelled_time"] == f"{modelled.time.us:.4g} µs"
    assert brief["modelled_bound"] == modelled.time.bound
    assert f"{modelled.loop.cycles:.0f} cycles a k-tile" in brief["modelled_main_loop"]
