"""Proves that every record has a verdict, and that drawn kernels compile without spills and compute right results.

The drawn kernels are A100 kernels that sum in fp16, of which half are executed too, and H200 kernels, which are only
compiled. ``make thorough`` takes all of both in place of a draw.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from cudal2gen import places, results, validator
from cudal2gen.generation import catalog, compiler
from cudal2gen.generation.renderer import render
from cudal2gen.kernel.problem import Layout
from cudal2gen.results import Verdict
from kernelproof.ground import toolchain
from tests.cpu_times import cpu_seconds
from tests.draws import THOROUGH, draw_part

pytestmark = pytest.mark.slow

A100_STEP, H200_STEP = 80, 36  # of the kernels for the A100 every 80th is drawn, and of those for the H200 every 36th
VERSIONS = {"nvcc": "13.0.88", "cutlass": "4.2.0"}  # the compilers of the stored verdicts


@pytest.fixture(scope="module")
def catalog_records() -> list[catalog.Record]:
    """All records of the checkout's catalog."""
    return catalog.load(places.shipped("configs") / "kernels.jsonl")


@pytest.fixture(scope="module")
def records(catalog_records: list[catalog.Record]) -> list[catalog.Record]:
    """The catalog's records for an A100 that sum in fp16, in layout tn."""
    return [record for record in catalog_records if (record.gpu, record.acc, record.layout) == ("a100", "f16", "tn")]


@pytest.fixture(scope="module")
def build_dir(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """None for the cache; in ``make thorough`` an empty folder, so that all kernels are compiled anew."""
    return tmp_path_factory.mktemp("kernels") if THOROUGH else None


def one_record_per_text(records: Iterable[catalog.Record], step: int) -> list[catalog.Record]:
    """One record for each distinct source text, sorted by digest (as good as random), and of these every ``step``-th;
    all of them in ``make thorough``."""
    tools = toolchain.discover()
    distinct = {compiler.job(record, tools).digest: record for record in one_record_per_binary(records)}
    return [distinct[digest] for digest in draw_part(sorted(distinct), step)]


def one_record_per_binary(records: Iterable[catalog.Record]) -> list[catalog.Record]:
    """Drops records that would give the same binary: all but the last with an equal name, architecture and launch.

    Equal names have equal texts, as tests/cudal2gen/test_renderer.py shows.
    """
    return list({(record.name, record.arch, record.launch.write()): record for record in records}.values())


def test_a_thousand_records_render_in_seconds(records: list[catalog.Record]) -> None:
    render(records[0])
    started = cpu_seconds()
    texts = {render(record) for record in records}
    seconds = cpu_seconds() - started
    print(f"\n{len(records)} records, {len(texts)} distinct texts, {seconds:.2f} s")
    assert seconds < 6, "it takes 1.5 s on an idle machine"


def test_ampere_kernels_compile_without_spills(records: list[catalog.Record], build_dir: Path | None) -> None:
    built = one_record_per_text(records, A100_STEP)
    started = cpu_seconds()
    artifacts = compiler.build(built, build_dir=build_dir)
    seconds = cpu_seconds() - started
    print(f"\n{len(built)} kernels in {seconds:.0f} CPU seconds, {compiler.peak_rss_bytes() >> 20} MiB")
    assert len({artifact.digest for artifact in artifacts}) == len(built) > 7
    faults = {record.mnk: artifact.ptxas.findings for record, artifact in zip(built, artifacts, strict=True)}
    assert {mnk: findings for mnk, findings in faults.items() if findings} == {}
    for record, artifact in zip(built, artifacts, strict=True):
        assert artifact.ptxas.smem_static_bytes == 0
        if record.family == "sm80_multistage":
            # How many CTAs fit the 65536 registers of an SM. A warp gets its registers in units of 256.
            by_registers = 65536 // (-(-artifact.ptxas.registers * 32 // 256) * 256) // (record.threads // 32)
            assert by_registers >= record.min_blocks, record.mnk
    assert seconds < 2 * 8 * 60, "the limit is eight minutes on two cores"


def test_every_record_has_a_verdict_that_it_is_right(catalog_records: list[catalog.Record], checkout: Path) -> None:
    """The verdict must be about the present text, flags and versions. ``cudal2gen validate --changed`` adds missing
    ones."""
    tools = replace(toolchain.discover(), nvcc_version=VERSIONS["nvcc"], cutlass_version=VERSIONS["cutlass"])
    verdicts = results.latest(checkout / "results" / "verdicts.jsonl")
    wrong = []
    for record in one_record_per_binary(catalog_records):
        verdict = verdicts.get((compiler.job(record, tools).digest, "emulator"))
        if verdict is None or not verdict.passed:
            wrong.append(f"{record.gpu} {record.acc} {record.mnk}")
    assert wrong == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("gpu", "layout"), draw_part([("h200", "tn"), ("h200", "nn"), ("a100", "nn"), ("a100", "tn")], 4)
)
def test_kernels_of_bf16_have_verdicts(checkout: Path, gpu: str, layout: Layout) -> None:
    """The catalog has these kernels for fp16 only. ``cudal2gen validate --all --changed --ab bf16 --gpu h200 --layout
    tn`` adds missing verdicts."""
    tools = replace(toolchain.discover(), nvcc_version=VERSIONS["nvcc"], cutlass_version=VERSIONS["cutlass"])
    verdicts = results.latest(checkout / "results" / "verdicts.jsonl")
    records = catalog.library(gpu, "f32", layout, ab="bf16", d="same")
    digests = {compiler.job(record, tools).digest: record.problem.title for record in one_record_per_binary(records)}
    assert len(digests) > 80
    assert [title for digest, title in digests.items() if (digest, "emulator") not in verdicts] == []
    assert all(verdicts[digest, "emulator"].passed for digest in digests)


def test_ampere_kernels_are_executed_anew(records: list[catalog.Record], build_dir: Path | None) -> None:
    executed = one_record_per_text(records, A100_STEP)[::2]
    work = list(zip(executed, compiler.build(executed, build_dir=build_dir), strict=True))
    started = cpu_seconds()
    launcher = compiler.launcher(build_dir=build_dir)
    judgements = list(validator.validate_all(work, launcher, os.cpu_count() or 1))
    verdicts = [judgement for judgement in judgements if isinstance(judgement, Verdict)]
    seconds = cpu_seconds() - started
    print(f"\n{len(verdicts)} kernels, {sum(len(verdict.cases) for verdict in verdicts)} cases in {seconds:.0f} CPU s")
    assert {verdict.record: verdict.findings for verdict in verdicts if not verdict.passed} == {}
    assert len(verdicts) == len(work) > 3
    assert seconds < 2 * 6 * 60, "the limit is six minutes on two cores"


@pytest.mark.thorough
def test_hopper_kernels_compile_without_a_finding(
    catalog_records: list[catalog.Record], build_dir: Path | None
) -> None:
    """A spill or a wgmma that ptxas serialises is a finding. This test only compiles; other tests execute a set of
    kernels that covers every code path."""
    records = [record for record in catalog_records if record.gpu == "h200"]
    assert len(records) == 2057
    built = one_record_per_text(records, H200_STEP)
    started = cpu_seconds()
    artifacts = compiler.build(built, build_dir=build_dir)
    seconds = cpu_seconds() - started
    print(f"\n{len(records)} records, {len(built)} kernels in {seconds:.0f} CPU seconds")
    assert len(built) > 3
    assert {artifact.digest: artifact.ptxas.findings for artifact in artifacts if artifact.ptxas.findings} == {}
    assert {artifact.ptxas.arch for artifact in artifacts} == {record.arch for record in built}
    assert seconds < 2 * 8 * 60, "the limit is eight minutes on two cores"
