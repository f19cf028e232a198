"""Proves facts of the catalog's machine code: main loops, epilogues, and cubins without source lines."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cudal2gen.generation import compiler
from cudal2gen.kernel import Sm80Multistage
from kernelproof import sass
from kernelproof.sass import Graph, Summary
from kernelproof.sass.elf import sections
from kernelproof.sass.simulation import steady_cycles
from kernelproof.sass.stripping import EMPTIED_SECTIONS, without_lines
from scripts import machine_code
from tests.cudal2gen.paths import PATHS
from tests.cudal2gen.strategies import STRAIGHT, multistage
from tests.draws import draw_part_by_key
from tests.kernelproof.test_sass_decoding import segments
from tests.kernelproof.test_sass_simulation import MMA, code

KINDS = ("single", "single_intra_tile", "none", "multi", "pingpong", "staggered")


def prefetch(kind: str) -> dict[str, Any]:
    """The fields of a kind of prefetch."""
    return {"prefetch": {"kind": kind, "distance": 2 if kind == "multi" else None}}


# Records of sm80_multistage: one for each kind of prefetch, and three whose epilogue or loop is different.
RECORDS = {kind: multistage(bk=64, **prefetch(kind)) for kind in KINDS} | {
    "direct": multistage(bk=64, **STRAIGHT),
    "direct in two rounds": multistage(stages=1, bk=32, m=2048, bm=128, bn=256, **STRAIGHT),
    "branch": multistage(acc="f32", bm=128, bn=128, bk=32, mma_repeat=[2, 2, 1]),
}
# A record of each architecture.
OF_ARCHITECTURES = {PATHS[name].arch: PATHS[name] for name in ("single", "wgmma", "tensor", "warps")}
BUILT_AHEAD = list(RECORDS.values())


def tile_mmas(record: Sm80Multistage) -> int:
    """How many MMAs a warp executes for a k-tile."""
    return record.warp_m * record.warp_n * record.k_blocks


@pytest.fixture(scope="module")
def summaries() -> dict[str, Summary]:
    """The summaries of the machine code of ``RECORDS``."""
    artifacts = compiler.build(list(RECORDS.values()))
    return {
        name: sass.summarise(artifact.cubin, tile_mmas=tile_mmas(record))
        for (name, record), artifact in zip(RECORDS.items(), artifacts, strict=True)
    }


@pytest.mark.parametrize("name", RECORDS)
def test_no_main_loop_takes_less_than_its_bound(name: str, summaries: dict[str, Summary]) -> None:
    assert machine_code.loop_bound(RECORDS[name]) <= summaries[name].loop_cycles


def test_mmas_and_a_barrier_alone_take_the_bound_of_a_loop() -> None:
    """Two MMAs stand 23 cycles apart around a barrier. Where k is a constant, the bound counts no barrier."""
    rolled, straight = RECORDS["single"], multistage(bk=64, unroll_k=True, bake=["k"], **prefetch("single"))
    mmas = [MMA] * tile_mmas(rolled)
    assert machine_code.loop_bound(rolled) == steady_cycles([*mmas, code("BAR.SYNC")])
    assert machine_code.loop_bound(straight) == steady_cycles(mmas)


@pytest.mark.parametrize("name", RECORDS)
def test_a_main_loop_is_one_k_tile(name: str, summaries: dict[str, Summary]) -> None:
    """The loop has the MMAs, ldmatrix and copies that a k-tile needs, and no spills.

    An ldmatrix loads A for one MMA tile, or B for two. An HMMA occupies its tensor core for 8 cycles or more.
    """
    record, summary = RECORDS[name], summaries[name]
    vectors = (record.bm + record.bn) * record.bk // 8  # copies of 16 bytes, which are 8 halves
    copies = 0 if record.stages == 1 else vectors // record.threads
    assert summary.rolled
    assert summary.counts["HMMA"] == tile_mmas(record)
    assert summary.counts["LDSM"] == record.k_blocks * (record.warp_m + record.warp_n // 2)
    assert summary.counts["LDGSTS"] == copies or record.stages == 1
    assert summary.spill_bytes == 0
    assert summary.issue_slots >= tile_mmas(record)
    assert summary.loop_cycles >= 8 * tile_mmas(record)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, record in RECORDS.items() if record.predicates_copies])
def test_predicated_copies_leave_the_main_loop_one_basic_block(name: str) -> None:
    artifact = compiler.build([RECORDS[name]])[0]
    [function] = sass.disassemble(artifact.cubin)
    loops = [loop for loop in Graph(function).loops if len(loop.blocks) > 1]
    assert loops == []


@pytest.mark.parametrize("name", ["direct", "direct in two rounds"])
def test_a_direct_epilogue_computes_few_addresses(name: str, summaries: dict[str, Summary]) -> None:
    """For an MMA tile there are four stores to shared memory, a load from it, and a store to D. Addresses and barriers
    are at most 60 instructions more."""
    record = RECORDS[name]
    assert summaries[name].epilogue <= 6 * record.mma_tiles + 60


@pytest.mark.slow
@pytest.mark.parametrize("arch", OF_ARCHITECTURES)
def test_a_cubin_without_lines_is_the_same_code(arch: str, tmp_path: Path) -> None:
    """Only the sections of lines and PTX become empty, which saves more than 35 % of the bytes. The other sections move
    in the file, aligned as before, and their contents and instructions are the same."""
    (artifact,) = compiler.build([OF_ARCHITECTURES[arch]])
    whole = artifact.cubin.read_bytes()
    stripped = without_lines(whole)
    before, after = sections(whole), sections(stripped)
    emptied = {section.name for section in before if section.name in EMPTIED_SECTIONS}
    assert {".debug_line", ".nv_debug_line_sass", ".nv_debug_ptx_txt"} < emptied
    assert not any("debug_line" in section.name or "ptx" in section.name for section in after if section.size)
    for old, new in zip(before, after, strict=True):
        assert new._replace(offset=0) == old._replace(offset=0, size=0 if old.name in emptied else old.size)
        assert new.offset % max(1, new.align) == 0
        assert old.name in emptied or old.name.startswith(".nv.shared") or new.data(stripped) == old.data(whole)
    assert segments(stripped) == segments(whole)
    assert len(stripped) < 0.65 * len(whole)
    assert b".visible .entry" in whole
    assert b".visible .entry" not in stripped
    assert without_lines(stripped) == stripped
    (tmp_path / "kernel.cubin").write_bytes(stripped)
    (function,), (bare,) = sass.disassemble(artifact.cubin), sass.disassemble(tmp_path / "kernel.cubin")
    assert function.sm == arch.removesuffix("f")
    assert any(item.source for item in function.instructions)
    assert bare == replace(
        function, instructions=tuple(replace(item, source=(), ptx_line=0) for item in function.instructions)
    )


def test_a_file_of_another_layout_stays_as_it_is() -> None:
    """Returned unchanged are: no ELF file, a cubin with bytes after its end, one with a section that begins within the
    section before, and one with a byte other than 0 between two sections.

    In an ELF file of 64 bits the offset of the section table is at byte 0x28. A section's header has 64 bytes, with the
    section's offset at byte 0x18.
    """
    (artifact,) = compiler.build([OF_ARCHITECTURES["sm_90a"]])
    whole = artifact.cubin.read_bytes()
    line = next(section for section in sections(whole) if section.name == ".debug_line")
    table, names = struct.unpack_from("<Q", whole, 0x28)[0], sections(whole)[1]
    gap = names.offset + names.size
    overlapping, between = bytearray(whole), bytearray(whole)
    number = [section.name for section in sections(whole)].index(".debug_line")
    struct.pack_into("<Q", overlapping, table + 64 * number + 0x18, line.offset - 1)
    between[gap] = 1
    assert whole[gap : sections(whole)[2].offset].strip(b"\0") == b""
    for other in (b"no ELF file", whole + b"more", bytes(overlapping), bytes(between)):
        assert without_lines(other) == other


@pytest.mark.slow
def test_every_family_has_a_main_loop_and_an_epilogue() -> None:
    """``make test`` takes one path of each family, because no family has 1000; ``make thorough`` takes all paths."""
    names = draw_part_by_key(lambda name: PATHS[name].family, list(PATHS), 1000)
    for name, artifact in zip(names, compiler.build([PATHS[name] for name in names]), strict=True):
        summary = sass.summarise(artifact.cubin, tile_mmas=1)
        assert summary.epilogue > 0, name
        assert summary.registers == artifact.ptxas.registers, name
