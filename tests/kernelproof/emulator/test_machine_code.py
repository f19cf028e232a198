"""Proves that machine code computes what its PTX computes, with the same findings, and that unknown code is refused."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import Device, LaunchRefused, Memory, Options
from kernelproof.emulator.machine_code.lowering import UnknownMachineCode
from kernelproof.ground.chips import GPUS
from kernelproof.ground.errors import WrongInput
from kernelproof.sass import DisassemblyError
from tests import commands
from tests.draws import THOROUGH
from tests.kernelproof.emulator import drawn_programs
from tests.kernelproof.emulator.build import assemble, compile_file, stable_file
from tests.kernelproof.emulator.gemm import gemm

# Seeds of drawn programs.
SEEDS = range(1000) if THOROUGH else range(5)


def launch_words(program: emulator.Program, words: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """The words that a drawn program writes, and the rules of its findings."""
    memory = Memory()
    out = memory.upload(np.zeros((len(words), drawn_programs.WORDS_OUT), np.uint32), "output")
    result = program.launch("k", 1, len(words), [memory.upload(words), out], memory=memory)
    return out.bytes().view(np.uint32).reshape(len(words), -1).copy(), [report.kind for report in result.reports]


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100f", "sm_120"])
@pytest.mark.parametrize("level", [0, 1, 3])
def test_drawn_programs_compute_the_same_in_both_forms(level: int, target: str) -> None:
    for seed in SEEDS if target == "sm_80" else SEEDS[: max(2, len(SEEDS) // 2)]:
        text, words = drawn_programs.text(seed, target), drawn_programs.operands(seed)
        expected, findings = launch_words(emulator.load(text), words)
        result, same = launch_words(emulator.load(assemble(text, level, target)), words)
        wrong = np.argwhere(drawn_programs.differs(expected, result))
        assert wrong.tolist() == [], f"seed {seed}"
        assert findings == same


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["gemm_f32", "gemm_f16"])
def test_a_matrix_product_is_exact(kernel: str) -> None:
    program = emulator.load(compile_file("multistage", ".cubin"))
    result, exact = gemm(program, kernel, 256, 128, 96, low=-2, high=3)
    assert exact
    assert result.reports == []


# Writes the sizes of block and grid and both numbers among its parameters.
SIZES = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u8 first, .param .u64 out, .param .u32 last)
{
.reg .b32 %r<10>; .reg .b64 %a;
ld.param.u64 %a, [out]; ld.param.u8 %r6, [first]; ld.param.u32 %r7, [last];
mov.u32 %r0, %ntid.x; mov.u32 %r1, %ntid.y; mov.u32 %r2, %ntid.z;
mov.u32 %r3, %nctaid.x; mov.u32 %r4, %nctaid.y; mov.u32 %r5, %nctaid.z;
st.global.b32 [%a], %r0; st.global.b32 [%a+4], %r1; st.global.b32 [%a+8], %r2;
st.global.b32 [%a+12], %r3; st.global.b32 [%a+16], %r4; st.global.b32 [%a+20], %r5;
st.global.b32 [%a+24], %r6; st.global.b32 [%a+28], %r7; ret;
}
"""


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89"])
def test_sizes_and_parameters_are_where_the_launch_puts_them(target: str) -> None:
    memory = Memory()
    out = memory.upload(np.zeros(8, np.uint32), "inout")
    program = emulator.load(assemble(SIZES.replace("sm_80", target), target=target))
    program.launch("k", (2, 3, 4), (5, 6, 7), [np.uint8(200), out, np.uint32(9)], memory=memory, ctas=[0])
    assert out.bytes().view(np.uint32).tolist() == [5, 6, 7, 2, 3, 4, 200, 9]


# Threads of different warps exchange words by shared memory: a race without the barrier.
RACE = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out)
{
.reg .b32 %r<6>; .reg .b64 %a<3>;
.shared .align 4 .b8 buf[512];
ld.param.u64 %a0, [out]; mov.u32 %r0, %tid.x; mov.u32 %r1, buf; shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2;
st.shared.b32 [%r3], %r0;
bar.sync 0;
xor.b32 %r4, %r3, 256; ld.shared.b32 %r5, [%r4];
mul.wide.u32 %a1, %r0, 4; add.s64 %a2, %a0, %a1; st.global.b32 [%a2], %r5; ret;
}
"""


@pytest.mark.parametrize(("dropped", "findings"), [("", []), ("bar.sync 0;", ["shared-race"])])
def test_a_race_is_named_by_its_address(dropped: str, findings: list[str]) -> None:
    """A site's line is the address of its instruction, which has 16 bytes."""
    memory = Memory()
    out = memory.upload(np.zeros(128, np.uint32), "output")
    program = emulator.load(assemble(RACE.replace(dropped, "")))
    reports = program.launch("k", 1, 128, [out], memory=memory, options=Options()).reports
    assert [report.kind for report in reports if report.is_error] == findings
    for report in reports:
        site = report.access.site
        assert site.machine_code
        assert re.match("LDS|STS", site.text)
        assert site.line % 16 == 0


def test_pointers_are_followed_through_pairs_of_registers() -> None:
    """A store that lands in a buffer other than its pointer's is wrong."""
    memory = Memory()
    out = memory.upload(np.zeros(128, np.uint32), "inout", guard=0)
    other = memory.upload(np.zeros(128, np.uint32), "inout")
    text = RACE.replace("[%a2], %r5", f"[%a2+{other.address - out.address}], %r5")
    reports = emulator.load(assemble(text)).launch("k", 1, 128, [out], memory=memory).reports
    assert {report.kind for report in reports} == {"another-buffer"}


@pytest.mark.parametrize(
    ("target", "body", "part"),
    [
        ("sm_75", "bar.sync 0;", "sm_75"),
        ("sm_80", "tex.2d.v4.f32.f32 {%f0,%f1,%f2,%f3}, [%a0, {%f0,%f1}];", "TEX"),
    ],
)
def test_what_is_not_modelled_is_refused(target: str, body: str, part: str) -> None:
    text = f""".version 8.0
.target {target}
.address_size 64
.visible .entry k(.param .u64 out)
{{ .reg .b64 %a<2>; .reg .f32 %f<4>; ld.param.u64 %a0, [out]; mov.f32 %f0, 0f00000000; mov.f32 %f1, 0f00000000;
{body} st.global.f32 [%a0], %f0; ret; }}
"""
    with pytest.raises(UnknownMachineCode, match=part):
        emulator.load(assemble(text, target=target))


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x02" + bytes(200), b"no cubin at all"])
def test_a_file_that_is_no_cubin_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "kernel.cubin"
    path.write_bytes(content)
    with pytest.raises(DisassemblyError):
        emulator.load(path)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.99])
def test_a_cubin_that_is_cut_off_is_refused(share: float, tmp_path: Path) -> None:
    whole = assemble(SIZES).read_bytes()
    path = tmp_path / "cut.cubin"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(WrongInput):
        emulator.load(path)


def test_machine_code_runs_on_its_family_alone() -> None:
    """Code of sm_86 runs on sm_86 and sm_89, but not on sm_80 or sm_90."""
    program = emulator.load(assemble(SIZES.replace("sm_80", "sm_86"), target="sm_86"))
    for chip, refused in (("a100", True), ("rtx3090", False), ("rtx4090", False), ("h200", True)):
        device, memory = Device.of(GPUS[chip]), Memory()
        arguments = [np.uint8(1), memory.upload(np.zeros(8, np.uint32), "inout"), np.uint32(2)]
        with pytest.raises(LaunchRefused) if refused else nullcontext():
            program.launch("k", 1, 1, arguments, memory=memory, device=device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "env", "code"),
    [
        ("kernel.cubin", {}, 0),
        ("cut.cubin", {}, 2),
        ("kernel.cubin", {"KERNELPROOF_NVDISASM": "/nowhere"}, 3),
    ],
)
def test_a_check_of_a_cubin_ends_in_one_line(name: str, env: dict[str, str], code: int, tmp_path: Path) -> None:
    """The exit status is 2 for a file that is no whole cubin, and 3 without nvdisasm. The error has one line."""
    content = assemble(RACE).read_bytes()
    path = tmp_path / name
    path.write_bytes(content[:1500] if name == "cut.cubin" else content)
    words = ["check", str(path), "--machine-code", "--launch", "k<<<1,128>>>", "--args", "out:u32[128]"]
    done = commands.run(*words, env=env, program="kernelproof")
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == bool(code)


# A program with a host part. Its kernel adds up quotients in shared memory.
PROGRAM = """
#include <cstdio>
__global__ void total(const float* x, float* out, int n, float divisor) {
    __shared__ float part[256];
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += 256) sum += x[i] / divisor;
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int width = 128; width; width >>= 1) {
        if (threadIdx.x < width) part[threadIdx.x] += part[threadIdx.x + width];
        BETWEEN;
    }
    if (!threadIdx.x) *out = part[0];
}
int main() {
    float *x, *out, numbers[1000], result;
    for (int i = 0; i < 1000; ++i) numbers[i] = i;
    cudaMalloc(&x, sizeof numbers), cudaMalloc(&out, 4);
    cudaMemcpy(x, numbers, sizeof numbers, cudaMemcpyHostToDevice);
    total<<<1, 256>>>(x, out, 1000, 2.f);
    cudaMemcpy(&result, out, 4, cudaMemcpyDeviceToHost);
    printf("%.0f\\n", result);
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("only", ["", " -gencode=arch=compute_80,code=sm_80"])
@pytest.mark.parametrize(("between", "code"), [("__syncthreads()", 0), ("", 1)])
def test_a_program_runs_by_its_machine_code(only: str, between: str, code: int) -> None:
    """The division calls a subroutine of machine code. Without the barrier ``between`` its steps the sum races.
    ``only``: options that compile for sm_80 alone, without PTX."""
    command = [
        "check",
        str(stable_file(PROGRAM, "total.cu")),
        "--json",
        "--machine-code",
        f"--nvcc-args=-DBETWEEN='{between}'{only}",
    ]
    done = commands.run(*command, program="kernelproof")
    assert done.returncode == code, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert {finding["rule"] for finding in findings} == ({"shared-race"} if code else set())
