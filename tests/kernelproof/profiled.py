"""A small profile with known figures, for tests: two warps in an iteration of 20 cycles.

The tensor core works 16 of these cycles, in the first 3 still for the previous iteration.
"""

from __future__ import annotations

from kernelproof.ground.chips import CAPABILITIES
from kernelproof.profile.figures import Advice, Issue, Line, MainLoop, Profile, Time
from kernelproof.profile.occupancy import occupancy

# A line of CUDA whose characters mean something in HTML and Markdown.
HOSTILE = "<script>alert('x')</script> & \"quotes\" | `x`"

LINES = (
    Line(address=0, sass="LDSM.16.M88.4 R4, [R2]", pipe="shared", busy=4, stalls={"mio_throttle": 2.0},
         live=40, conflicts=0, unread=False, file="/src/kernel.cu", line=7, cuda="load(a);"),
    Line(address=16, sass="HMMA.16816.F32 R8, R4, R6, R8", pipe="tensor", busy=8,
         stalls={"short_scoreboard": 12.0, "wait": 1.0}, live=40, conflicts=0, unread=False,
         file="/src/kernel.cu", line=8, cuda=HOSTILE),
    Line(address=32, sass="@P0 BRA 0x0", pipe="branch", busy=1, stalls={}, live=30, conflicts=0, unread=False,
         file=None, line=None, cuda=None),
)  # fmt: skip
ISSUES = (
    Issue(warp=0, line=0, cycle=0, stalls={"mio_throttle": 2}),
    Issue(warp=1, line=0, cycle=1, stalls={"mio_throttle": 2}),
    Issue(warp=0, line=1, cycle=10, stalls={"wait": 1, "short_scoreboard": 8}),
    Issue(warp=0, line=2, cycle=11, stalls={}),
    Issue(warp=1, line=1, cycle=18, stalls={"wait": 1, "short_scoreboard": 15}),
    Issue(warp=1, line=2, cycle=19, stalls={}),
)
LOOP = MainLoop(
    unit="k-tile",
    rolled=True,
    warps=2,
    cycles=20,
    tensor_cycles=16,
    bound="latency: short_scoreboard",
    issue_slots=3,
    opcodes={"LDSM": 1, "HMMA": 1, "BRA": 1},
    pipes={"tensor": 0.8, "shared": 0.4, "issue port": 0.3},
    live_registers=40,
    bank_conflicts=0,
    unread=0,
    stalls={"short_scoreboard": 0.575, "selected": 0.15, "mio_throttle": 0.1, "wait": 0.05},
    idle={"short_scoreboard": 0.8, "selected": 0.2},
)
TIME = Time(
    us=12.5,
    parts={"launch": 1.5, "prologue": 1.0, "main loop": 9.0, "epilogue": 1.0},
    bounds={"tensor cores": 7.2, "machine code": 9.0, "L2": 3.0, "device memory": 5.0},
    bound="latency: short_scoreboard",
    ctas=256,
    waves=1.19,
    tail_share=0.21,
    floor_us=5.0,
)
PROFILE = Profile(
    kind="profile",
    version=1,
    modelled=True,
    kernel="hgemm_sm80_multistage_f32_tn_128x96x64_s5_185a96f481",
    arch="sm_80",
    gpu="a100",
    problem="1024_1024_64 f32 tn",
    registers=168,
    spill_bytes=0,
    instructions=200,
    loop=LOOP,
    occupancy=occupancy(CAPABILITIES["8.0"], 128, 168, 40960),
    time=TIME,
    advice=(
        Advice(change="barriers of the CTA at no cost", figure="main loop", form="machine code", before=20, after=16),
        Advice(change="--set bn=64", figure="time", form="cheap form", before=10, after=9.5),
    ),
    lines=LINES,
    issues=ISSUES,
    busy={"tensor": ((0.0, 3.0), (10.0, 26.0)), "shared": ((0.0, 8.0),)},
)
