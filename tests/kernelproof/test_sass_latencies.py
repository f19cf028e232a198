"""Proves the table of fixed latencies by known figures and by how the installed ptxas schedules."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from kernelproof.ground import toolchain
from kernelproof.sass.decoding import Instruction
from kernelproof.sass.latencies import TABLE, fixed, scoreboard
from scripts import latencies

# Producer, reader, and the cycles on sm_80, sm_86, sm_89, sm_90a, sm_100a and sm_120a. NVIDIA's own tables in Mesa's
# compiler agree except for HMMA on sm_80, for which a microbenchmark of the A100 and the H800 has 24.6 and 24.1.
FIGURES = [
    ("HMMA.16816.F32", "HMMA.16816.F32", (24, 24, 24, 24, 20, 29)),
    ("HMMA.16816.F16", "STG.E", (23, 23, 23, 23, 19, 28)),
    ("HMMA.1688.F32", "HMMA.1688.F32", (16, 16, 16, 16, 20, 29)),
    ("FFMA", "FFMA", (4, 4, 4, 4, 4, 4)),
    ("FFMA", "STG.E", (5, 5, 5, 5, 5, 5)),
    ("FFMA", "LOP3.LUT", (5, 5, 5, 5, 5, 5)),
    ("IADD3", "LOP3.LUT", (4, 4, 4, 4, 4, 4)),
    ("IADD3", "IMAD", (5, 5, 5, 5, 5, 5)),
    ("LOP3.LUT", "LDSM.16.M88.4", (5, 5, 5, 5, 5, 5)),
    ("F2FP.F16.F32.PACK_AB", "HMMA.16816.F32", (7, 7, 7, 7, 7, 7)),
    ("ISETP.GE.AND", "BRA", (13, 13, 13, 13, 13, 13)),
    ("ISETP.GE.AND", "guard", (13, 13, 13, 13, 13, 13)),
    ("ULOP3.LUT", "UIADD3", (4, 4, 4, 4, 4, 4)),
]


@pytest.mark.parametrize(("producer", "reader", "cycles"), FIGURES)
def test_the_table_has_known_latencies(producer: str, reader: str, cycles: tuple[int, ...]) -> None:
    assert tuple(fixed(sm, producer, reader) for sm in latencies.SMS) == cycles


def test_a_longer_latency_stands_for_an_unknown_reader_and_none_for_a_variable_one() -> None:
    assert fixed("sm_80", "HMMA.16816.F32", "MUFU.RCP") == 24
    assert fixed("sm_90", "FFMA", "FFMA") == 4
    assert fixed("sm_80", "LDSM.16.M88.4", "HMMA.16816.F32") is None


@pytest.mark.parametrize("opcode", ["LDG.E", "LDS", "STS", "STG.E", "LDL", "STL"])
@pytest.mark.parametrize("sm", ["sm_80", "sm_90a", "sm_120a"])
@pytest.mark.parametrize("l2", [True, False])
def test_accesses_of_less_than_32_bits_take_as_long_as_those_of_32_and_larger_ones_no_less(
    opcode: str, sm: str, l2: bool
) -> None:
    times = [
        scoreboard(sm, Instruction.bare(opcode + width), l2=l2) for width in (".U8", ".U16", "", ".64", ".128")
    ]  # fmt: skip
    assert times[0] == times[1] == times[2]
    for shorter, longer in pairwise(times):
        assert shorter.result <= longer.result
        assert shorter.read <= longer.read


@pytest.mark.slow
def test_the_installed_ptxas_schedules_as_the_table_says() -> None:
    version = toolchain.discover().nvcc_version
    toolkits = json.loads(TABLE.read_text())
    if version not in toolkits:
        pytest.skip(f"no table of ptxas {version}: python scripts/latencies.py")
    (table,) = latencies.tables(["sm_80"]).values()
    recorded = toolkits[version]["sm_80"]
    # The table is from more kernels. A pair may be closer there, but not if both are adjacent instructions here.
    assert all(
        recorded[name][reader] <= cycles for name, readers in table.items() for reader, cycles in readers.items()
    )
    names = ("HMMA.16816", "HMMA.1688", "FFMA", "LOP3", "IADD3", "F2FP")
    assert {name: table[name] for name in names} == {
        name: {reader: recorded[name][reader] for reader in table[name]} for name in names
    }
