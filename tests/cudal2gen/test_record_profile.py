"""Proves a record's profile by figures worked out by hand, its advice about fields, and the verb."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from cudal2gen.generation import compiler
from cudal2gen.kernel import Sm100Tcgen05
from cudal2gen.timing import profile
from cudal2gen.timing.model import estimate
from kernelproof.profile import LaunchFacts, Profile, html, load, of_cubin
from tests import commands
from tests.cudal2gen.strategies import multistage, tcgen05, warp_mma

TENSOR_RECORD = tcgen05()
PAIR_RECORD = tcgen05(pair=True, cluster=[2, 1], bk=128, stages=2)
WARP_RECORD = warp_mma(m=1024, n=1024, k=1024)
RECORD = multistage(bk=64)


@pytest.fixture(scope="module")
def compiled_record() -> compiler.Artifact:
    """The compiled ``RECORD``."""
    return compiler.build([RECORD])[0]


@pytest.fixture(scope="module")
def record_profile(compiled_record: compiler.Artifact) -> Profile:
    """The profile of the compiled record."""
    return profile.of_record(RECORD, compiled_record.cubin, compiled_record.source)


@pytest.fixture(scope="module")
def in_tensor_memory() -> Profile:
    """The profile of the compiled ``TENSOR_RECORD``."""
    (artifact,) = compiler.build([TENSOR_RECORD])
    return profile.of_record(TENSOR_RECORD, artifact.cubin, artifact.source)


@pytest.mark.slow
def test_a_record_has_the_bounds_that_follow_by_hand(
    record_profile: Profile, compiled_record: compiler.Artifact
) -> None:
    """A tensor core of an A100 takes 8 cycles for 16x8x16; a scheduler has a quarter of a CTA's warps.

    The floor is 1.6 us for the launch, and the longer of two times: that of the FLOP, at 2048 per clock on each of 108
    SMs at 1380 MHz, and that of the bytes, at 1.7e6 per microsecond.
    """
    loop, time = record_profile.loop, record_profile.time
    mmas = RECORD.warp_m * RECORD.warp_n * RECORD.k_blocks
    assert loop.opcodes["HMMA"] == pytest.approx(mmas * loop.warps)
    assert loop.tensor_cycles == pytest.approx(8 * mmas * loop.warps)
    assert loop.cycles >= loop.tensor_cycles
    assert loop.pipes["tensor"] == pytest.approx(loop.tensor_cycles / loop.cycles)
    assert sum(loop.stalls.values()) == pytest.approx(1)
    assert loop.live_registers <= record_profile.registers == compiled_record.ptxas.registers
    assert record_profile.occupancy is not None
    assert record_profile.occupancy.ctas == RECORD.ctas_per_sm(compiled_record.ptxas.registers)
    assert time is not None
    assert time.us == pytest.approx(sum(time.parts.values()))
    assert time.waves == RECORD.waves(compiled_record.ptxas.registers)
    busiest_ctas = -(-RECORD.ctas // 108)  # of the SM with most CTAs
    assert time.tail_share == pytest.approx(1 - RECORD.ctas / 108 / busiest_ctas)
    flops = 2 * RECORD.m * RECORD.n * RECORD.k
    least = max(flops / (2048 * 108 * 1380), RECORD.problem.traffic_bytes / 1.7e6)
    assert time.floor_us == pytest.approx(1.6 + least)


def test_lines_have_their_cuda_and_issues_their_place(record_profile: Profile) -> None:
    mmas = [line for line in record_profile.lines if line.sass.startswith("HMMA")]
    assert all(line.pipe == "tensor" and line.busy == 8 for line in mmas)
    assert any("Mma::fma" in (line.cuda or "") for line in mmas)
    assert all(line.file and line.file.endswith(".cu") for line in mmas)
    assert [line.address for line in record_profile.lines] == sorted(line.address for line in record_profile.lines)
    for warp in {issue.warp for issue in record_profile.issues}:
        own = [issue for issue in record_profile.issues if issue.warp == warp]
        for before, after in pairwise(own):
            assert after.cycle - before.cycle == pytest.approx(sum(after.stalls.values()) + 1)


def test_advice_is_what_the_model_says_of_the_change(record_profile: Profile) -> None:
    assert all(advice.gain >= 0.01 for advice in record_profile.advice)
    gains = [advice.gain for advice in record_profile.advice]
    assert gains == sorted(gains, reverse=True)
    for advice in record_profile.advice:
        if advice.change.startswith("--set"):
            field, value = advice.change.removeprefix("--set ").split("=")
            edited = RECORD.at(RECORD.problem, **{field: json.loads(value)})
            assert advice.after == estimate(edited).us
            assert advice.before == estimate(RECORD).us
        elif advice.figure == "main loop":
            assert record_profile.loop.tensor_cycles * 0.98 <= advice.after < advice.before


@pytest.mark.slow
@pytest.mark.parametrize("record", [TENSOR_RECORD, PAIR_RECORD], ids=("alone", "pair"))
def test_a_record_with_tensor_memory_is_counted_by_role(record: Sm100Tcgen05) -> None:
    """By hand: bk / 16 MMAs, a copy per operand and 64 columns of k, and a commit; 8192 FLOP per clock and SM."""
    (artifact,) = compiler.build([record])
    content = profile.of_record(record, artifact.cubin, artifact.source)
    assert Profile.model_validate_json(content.model_dump_json()) == content
    loads, multiplies, stores = content.roles
    blocks = record.bk // 64
    assert (multiplies.opcodes["UTCHMMA"], multiplies.opcodes["UTCBAR"]) == (record.bk // 16, 1)
    assert (loads.opcodes["UTMALDG"], stores.opcodes["LDTM"], stores.warps) == (2 * blocks, 2, 4)
    assert (multiplies.pipes["tensor"], loads.pipes["tma"]) == (record.bk // 16, 2 * blocks)
    ring = content.ring
    assert ring is not None
    columns = record.bn // 2 if record.pair else record.bn  # columns of B that the CTA loads
    assert (ring.stages, ring.tile_bytes) == (record.stages, 2 * (record.bm + columns) * record.bk)
    assert (ring.copies, ring.products, ring.tensor_columns) == (2 * blocks, record.bk // 16, 512)
    assert content.loop.tensor_cycles == 2 * record.bm * record.bn * record.bk / 8192
    busiest_ctas = -(-record.ctas // 148)  # of the SM with most CTAs, of 148
    assert content.time is not None
    assert content.time.bounds["tensor cores"] == pytest.approx(2 * busiest_ctas * 128 * 256 * record.k / 8192 / 1850)
    assert content.time.bounds[content.time.bound] == max(content.time.bounds.values())
    assert sum(content.time.parts.values()) == pytest.approx(content.time.us) == pytest.approx(estimate(record).us)
    assert content.issues == ()
    assert any("not simulated" in limit for limit in content.limits)


def test_the_figures_of_a_record_with_tensor_memory_agree(in_tensor_memory: Profile) -> None:
    """The main loop's cycles and shares are those of its time; each role and the listing have what the loops have."""
    content, modelled = in_tensor_memory, estimate(TENSOR_RECORD)
    loop, time = content.loop, content.time
    assert time is not None
    k_tiles = -(-TENSOR_RECORD.ctas // 148) * -(-TENSOR_RECORD.k // TENSOR_RECORD.bk)  # of the busiest of 148 SMs
    assert (loop.unit, loop.rolled, loop.warps, loop.bank_conflicts) == ("k-tile", True, 1, 0)
    assert loop.cycles == pytest.approx(time.parts["main loop"] * 1850 / k_tiles)
    assert time.parts["main loop"] == modelled.main_us
    bounds = {name: us / modelled.main_us for name, us in time.bounds.items()}
    assert loop.pipes["tensor"] == pytest.approx(bounds["tensor cores"])
    assert (loop.pipes["L2"], loop.pipes["shared"]) == (bounds["L2"], bounds["shared memory"])
    assert loop.tensor_cycles == pytest.approx(loop.pipes["tensor"] * loop.cycles)
    loads, multiplies, _ = content.roles
    assert loop.opcodes == multiplies.opcodes
    assert loop.issue_slots == multiplies.instructions == sum(multiplies.opcodes.values())
    assert loop.pipes["issue port"] == pytest.approx(loop.issue_slots / loop.cycles)
    assert Counter(line.pipe for line in content.lines) == Counter(multiplies.pipes) + Counter(loads.pipes)
    tensor = [line for line in content.lines if line.pipe == "tensor"]
    assert sum(line.busy for line in tensor) == pytest.approx(loop.tensor_cycles)
    assert 0 < loop.live_registers <= content.registers


def test_the_page_of_a_record_with_tensor_memory_has_its_roles_and_no_picture(in_tensor_memory: Profile) -> None:
    page = html(in_tensor_memory)
    assert all(text in page for text in ("49152 bytes", "UTCHMMA", 'id="roles"'))
    assert "<svg" not in page


@pytest.mark.slow
def test_a_record_of_warps_and_a_producer_multiplies_what_follows_by_hand() -> None:
    """Two consumers: a warp multiplies 16 of each 64 rows by 16 x 8 x 16; a GeForce sums f32 at half the rate."""
    (artifact,) = compiler.build([WARP_RECORD])
    content = profile.of_record(WARP_RECORD, artifact.cubin, artifact.source)
    assert content.loop.opcodes["HMMA"] == 128 * 128 * 64 / (16 * 8 * 16) / 4
    assert content.loop.tensor_cycles == 2 * 128 * 128 * 64 / 512
    assert content.loop.bound == "tensor pipe"


@pytest.mark.slow
def test_a_cubin_with_the_launch_of_a_record_has_its_occupancy(
    compiled_record: compiler.Artifact, record_profile: Profile
) -> None:
    facts = LaunchFacts(ctas=RECORD.ctas, threads=RECORD.threads, smem_bytes=RECORD.smem_bytes, iterations=100)
    launched = of_cubin(compiled_record.cubin, RECORD.gpu, launch=facts)
    assert launched.occupancy == record_profile.occupancy
    assert launched.loop.tensor_cycles * record_profile.loop.warps == pytest.approx(
        record_profile.loop.tensor_cycles * launched.loop.warps
    )


def run_profile(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs ``cudal2gen profile`` with these arguments."""
    return commands.run("profile", *arguments)


@pytest.mark.slow
def test_the_verb_profiles_a_record_and_compares_it_with_a_cubin(
    tmp_path: Path, compiled_record: compiler.Artifact
) -> None:
    page, saved = tmp_path / "p.html", tmp_path / "p.json"
    size = ("--mnk", RECORD.mnk)
    done = run_profile(*size, "--html", str(page))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "<svg" in page.read_text()
    saved.write_text(run_profile(*size, "--json").stdout)
    content = load(saved)
    assert (content.problem or "").startswith(RECORD.mnk)
    assert str(content.registers) in run_profile(*size).stdout
    compared = run_profile("--compare", f"{RECORD.mnk} acc={RECORD.acc}", str(compiled_record.cubin))
    assert RECORD.name in compared.stdout, compared.stderr
    assert "1.000" in run_profile("--compare", str(saved), RECORD.mnk).stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "give one of --mnk M_N_K and --compare"),
        (("--mnk", "64_64_64", "--compare", "a.json", "b.json"), "leave out --mnk"),
        (("--compare", "64_64", "64_64_64"), "expected three sizes"),
        (("--compare", " ", "64_64_64"), "empty"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: tuple[str, ...], reason: str) -> None:
    refused = run_profile(*arguments)
    assert refused.returncode == 2
    assert reason in refused.stderr


def test_show_has_a_short_summary_of_a_built_kernel(
    compiled_record: compiler.Artifact, record_profile: Profile
) -> None:
    brief = profile.brief(RECORD, compiled_record.cubin)
    assert record_profile.time is not None
    assert brief["modelled_time"] == f"{record_profile.time.us:.4g} µs"
    assert brief["modelled_bound"] == record_profile.time.bound
    assert f"{record_profile.loop.cycles:.0f} cycles" in brief["modelled_main_loop"]
