"""Proves pipes and latencies of single instructions by figures computed by hand from published rates."""

from __future__ import annotations

import pytest

from kernelproof.ground.chips import GPUS
from kernelproof.sass import Control, Instruction, Pipe, pipe_use, scoreboard

# Control bits that wait for nothing.
FREE = Control(stall=1, yields=False, write_barrier=None, read_barrier=None, waits=(), reuse=0)


def code(text: str) -> Instruction:
    """The instruction with this text."""
    opcode, _, operands = text.partition(" ")
    return Instruction(0, None, opcode, tuple(operands.split(", ")) if operands else (), FREE)


# An instruction, the architecture, and its cycles: its FMA divided by those of a sub-core per clock. These are dense
# FMA of halves: 256 on sm_80; 128 on sm_86, sm_89 and sm_120; 512 on sm_90, of which mma.sync reaches 62 %.
TENSOR = [
    ("HMMA.16816.F16", "sm_80", 2048 / 256),
    ("HMMA.16816.F32", "sm_80", 2048 / 256),
    ("HMMA.1688.F32", "sm_80", 1024 / 256),
    ("HMMA.1688.F32.TF32", "sm_80", 1024 / 128),
    ("HMMA.SP.16832.F32", "sm_80", 4096 / 512),
    ("HMMA.16816.F16", "sm_86", 2048 / 128),
    ("HMMA.16816.F16", "sm_89", 2048 / 128),
    ("HMMA.16816.F16", "sm_120a", 2048 / 128),
    ("QMMA.16832.F32.E4M3.E4M3", "sm_120a", 4096 / 256),
    ("HMMA.16816.F32", "sm_90a", 2048 / 512 / 0.62),
    ("HMMA.16816.F32", "sm_100a", 2048 / 256),
    ("IMMA.16832.S8.S8", "sm_80", 4096 / 512),
    ("DMMA.8x8x4", "sm_80", 256 / 16),
    ("HGMMA.64x256x16.F32 R24, gdesc[UR4], R24", "sm_90a", 128),
    ("HGMMA.64x64x16.F16 R24, gdesc[UR4], R24", "sm_90a", 32),
    ("QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24", "sm_90a", 64),
    # Narrow products wait for their operands: 2048 bytes of A (16 cycles) and 32 bytes per column of B.
    ("HGMMA.64x8x16.F32 R24, gdesc[UR4], R24", "sm_90a", 16 + 2),
    ("HGMMA.64x8x16.F32 R24, R4, gdesc[UR4], R24", "sm_90a", 4),
]


@pytest.mark.parametrize(("text", "sm", "cycles"), TENSOR)
def test_an_mma_takes_the_tensor_core_for_its_flop(text: str, sm: str, cycles: float) -> None:
    use = pipe_use(code(text), sm)
    assert (use.pipe, use.issue_cycles) == (Pipe.TENSOR, 1)
    assert use.busy_cycles == pytest.approx(cycles)


@pytest.mark.parametrize(
    ("gpu", "text", "cycles"),
    [
        ("rtx3090", "HMMA.16816.F16", 16),
        ("rtx3090", "HMMA.16816.F32", 32),
        ("l40s", "HMMA.16816.F32", 16),
        ("h20", "HGMMA.64x256x16.F32 R24, gdesc[UR4], R24", 512),
    ],
)
def test_a_model_may_have_less_of_its_tensor_cores(gpu: str, text: str, cycles: float) -> None:
    """A GeForce sums in fp32 at half the rate, and an L40S does not. An H20 has a quarter of an H200's rate."""
    chip = GPUS[gpu]
    assert pipe_use(code(text), chip.capability.sm, chip).busy_cycles == pytest.approx(cycles)


def test_operands_of_a_warpgroup_are_read_in_shared_memory() -> None:
    """A has 64 x 16 and B 128 x 16 halves, which are read at 128 bytes per cycle; each warp has a quarter."""
    both = pipe_use(code("HGMMA.64x128x16.F32 R24, gdesc[UR4], R24"), "sm_90a")
    only_b = pipe_use(code("HGMMA.64x128x16.F32 R24, R4, gdesc[UR4], R24"), "sm_90a")
    assert (both.data_cycles, only_b.data_cycles) == ((16 + 32) / 4, 32 / 4)


# The cycles are a warp's 32 lanes divided by a sub-core's lanes: 16 for integers, 16 (sm_80) or 32 for FP32, 4 for
# special functions.
OTHERS = [
    ("LOP3.LUT", "sm_80", Pipe.ALU, 2),
    ("F2FP.F16.F32.PACK_AB", "sm_90a", Pipe.ALU, 2),
    ("IMAD.WIDE", "sm_86", Pipe.FMA, 2),
    ("VIADD", "sm_90a", Pipe.FMA, 2),
    ("CS2R", "sm_80", Pipe.NONE, 1),
    ("CS2R", "sm_90a", Pipe.ALU, 2),
    ("SEL", "sm_90a", Pipe.ALU, 2),
    ("SEL", "sm_120a", Pipe.FMA, 1),
    ("UMOV", "sm_80", Pipe.UNIFORM, 2),
    ("UMOV", "sm_90a", Pipe.UNIFORM, 1),
    ("FFMA", "sm_80", Pipe.FMA, 2),
    ("FFMA", "sm_86", Pipe.FMA, 1),
    ("HADD2", "sm_80", Pipe.FP16, 1),
    ("HFMA2", "sm_89", Pipe.FMA, 2),
    ("DFMA", "sm_80", Pipe.FP64, 4),
    ("MUFU.RCP", "sm_90a", Pipe.XU, 8),
    ("F2I.FTZ.U32.TRUNC.NTZ", "sm_90a", Pipe.XU, 8),
    ("UIADD3", "sm_90a", Pipe.UNIFORM, 2),
    ("LDSM.16.M88.4", "sm_80", Pipe.SHARED, 4),
    ("LDS", "sm_80", Pipe.SHARED, 2),
    ("LDS.128", "sm_80", Pipe.SHARED, 4),
    ("SHFL.IDX", "sm_80", Pipe.SHARED, 2),
    ("LDGSTS.E.BYPASS.LTC128B.128", "sm_80", Pipe.GLOBAL, 4),
    ("BAR.SYNC.DEFER_BLOCKING", "sm_80", Pipe.SHARED, 2),
    ("BRA", "sm_80", Pipe.BRANCH, 1),
    ("NOP", "sm_80", Pipe.NONE, 1),
    ("UTMALDG.2D", "sm_90a", Pipe.TMA, 1),
]


@pytest.mark.parametrize(("text", "sm", "pipe", "cycles"), OTHERS)
def test_an_instruction_takes_its_pipe_for_its_lanes(text: str, sm: str, pipe: Pipe, cycles: float) -> None:
    use = pipe_use(code(text), sm)
    assert (use.pipe, use.busy_cycles) == (pipe, cycles)
    assert (use.address_cycles == 4) == (pipe in (Pipe.SHARED, Pipe.GLOBAL))


def test_scoreboards_are_free_when_measurements_say() -> None:
    """The clocks until the result is there, and until the operands have been read. A load that hits the L2 takes 262
    clocks on sm_80 and 360 on sm_120; with ``l2=False`` it hits the L1."""
    assert scoreboard("sm_80", code("LDS.128")) == (26, 9)
    assert scoreboard("sm_80", code("LDSM.16.M88.4")) == (29, 9)
    assert scoreboard("sm_80", code("STS.128")) == (0, 18)
    assert scoreboard("sm_80", code("LDGSTS.E.BYPASS.LTC128B.128"), l2=False) == (39, 13)
    assert scoreboard("sm_80", code("LDG.E.64")).result == 262 + 2
    assert scoreboard("sm_90a", code("LDG.E.128"), l2=False) == (38, 11)
    assert scoreboard("sm_120a", code("LDG.E")).result == 360
