"""Proves that the emulator executes a multistage GEMM exactly, counts its accesses, and catches its mutants."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import EmulatorError, Memory, Mutant, Options, PtxError, mutants
from tests.kernelproof.emulator.build import compile_file
from tests.kernelproof.emulator.gemm import SHARED_BYTES, gemm


@pytest.fixture(scope="module")
def text() -> str:
    """The PTX of both kernels, with fp32 and with fp16 accumulators."""
    return compile_file("multistage", ".ptx").read_text()


@pytest.fixture(scope="module")
def program(text: str) -> emulator.Program:
    """The PTX, loaded."""
    return emulator.load(text)


@pytest.mark.parametrize("kernel", ["gemm_f32", "gemm_f16"])
@pytest.mark.parametrize("mnk", [(128, 128, 32), (128, 128, 64), (256, 128, 96), (128, 384, 128), (256, 256, 288)])
def test_exact(program: emulator.Program, kernel: str, mnk: tuple[int, int, int]) -> None:
    result, exact = gemm(program, kernel, *mnk, low=-2, high=3)
    assert exact
    assert result.reports == []


@pytest.mark.parametrize("lanes", [128, 256, 4096])
def test_batches_do_not_matter(program: emulator.Program, lanes: int) -> None:
    result, exact = gemm(program, "gemm_f32", 384, 256, 96, Options(lanes=lanes))
    assert exact
    assert result.reports == []


def test_random_data_within_the_accumulator(program: emulator.Program) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((128, 512)).astype(np.float16) for _ in range(2))
    want = a.astype(np.float64) @ b.astype(np.float64).T
    errors = {}
    for kernel in ("gemm_f32", "gemm_f16"):
        memory = Memory()
        args = [
            memory.upload(a),
            memory.upload(b),
            memory.upload(np.empty((128, 128), np.float16), "output"),
            128,
            128,
            512,
        ]
        program.launch(kernel, 1, 128, args, memory=memory, shared_bytes=SHARED_BYTES)
        errors[kernel] = np.abs(args[2].download() - want).max()  # type: ignore[attr-defined]
    # With fp32 only the result is rounded: |D| is below 128, where halves are 2**-4 apart, so the error is at most
    # 2**-5. With fp16 there are 32 roundings before that, one for each 16 of k, so the error must be clearly larger.
    assert errors["gemm_f32"] <= 2**-5
    assert 2 * errors["gemm_f32"] < errors["gemm_f16"] < 1


def test_nan_and_infinity_propagate(program: emulator.Program) -> None:
    a, b = np.ones((128, 64), np.float16), np.ones((128, 64), np.float16)
    a[3, 5], a[7, 9], b[11, 9], a[20, 0] = np.nan, np.inf, 0, -np.inf
    memory = Memory()
    args = [memory.upload(a), memory.upload(b), memory.upload(np.empty((128, 128), np.float16), "output"), 128, 128, 64]
    assert program.launch("gemm_f32", 1, 128, args, memory=memory, shared_bytes=SHARED_BYTES).reports == []
    got = args[2].download()  # type: ignore[attr-defined]
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, (a.astype(np.float32) @ b.astype(np.float32).T).astype(np.float16))
    assert np.isnan(got[3]).all()
    assert np.isnan(got[7, 11])


def test_counters(program: emulator.Program) -> None:
    result, _ = gemm(program, "gemm_f16", 256, 256, 128, Options(counters=True))
    counters = result.counters
    assert counters is not None
    # There are 4 CTAs, each with 4 warps (128 threads) and a tile of 128 x 128, and 4 k-tiles of 32. A warp multiplies
    # each k-tile in 2 steps of 16, which take 32 mma and 8 ldmatrix.x4 each. A thread makes 8 copies of 16 bytes for
    # each k-tile.
    assert counters.mma == 4 * 4 * 4 * 2 * 32
    assert counters.ldmatrix == 4 * 4 * 4 * 2 * 8
    assert counters.cp_async == 4 * 128 * 4 * 8
    # Each k-tile has one barrier, and the epilogue two.
    assert counters.barriers == 4 * (4 + 2)
    banks = counters.shared_banks
    assert banks["ldmatrix"].wavefronts == banks["ldmatrix"].ideal == counters.ldmatrix * 4
    assert banks["cp.async"].conflicts == 0
    # Each CTA loads 128 rows of A and of B, with 128 halves each. A and B have 256 rows.
    loads = counters.global_traffic["ld.global"]
    assert loads.bytes == 4 * 2 * 128 * 128 * 2
    assert loads.sectors == loads.ideal == loads.bytes // 32
    assert counters.unique_bytes == {"ld.global": 2 * 256 * 128 * 2, "st.global": 256 * 256 * 2}
    assert counters.summary()["mma"] == counters.mma


def test_bank_conflicts_are_counted() -> None:
    # A stride of 128 bytes puts all 32 lanes on one bank.
    memory = Memory()
    out = memory.upload(np.empty(32, np.int32), "output")
    stride = """.version 8.0
.target sm_80
.address_size 64
.shared .align 16 .b8 s[4096];
.visible .entry k(.param .u64 p) {
  .reg .b32 %r<6>; .reg .b64 %rd<4>;
  mov.u32 %r1, %tid.x;
  mul.lo.s32 %r2, %r1, 128;
  mov.u32 %r3, s;
  add.s32 %r4, %r3, %r2;
  st.shared.u32 [%r4], %r1;
  ld.shared.u32 %r5, [%r4];
  ld.param.u64 %rd1, [p];
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  st.global.u32 [%rd3], %r5;
  ret;
}
"""
    result = emulator.load(stride).launch("k", 1, 32, [out], memory=memory, options=Options(counters=True))
    assert result.counters is not None
    assert result.counters.shared_banks["st.shared"].wavefronts == 32
    assert result.counters.shared_banks["ld.shared"].ideal == 1


# The sizes m, n, k with which mutants are executed.
SHAPES = [(128, 128, 32), (128, 128, 64), (128, 256, 96), (256, 128, 160)]
# Survivors that change nothing: (kind, text of the changed instruction).
EQUIVALENT = {
    ("swap", "bar.sync"): "the neighbour touches no memory, or waits for what has landed already",
    ("swap", "cp.async.wait_all"): "nothing is in flight after the last k-tile",
    ("drop", "cp.async.wait_all"): "nothing is in flight after the last k-tile",
    ("never", "bra"): "guards a loop against K = 0, which the launcher does not allow",
    ("unguard", "bra"): "guards a loop against K = 0, which the launcher does not allow",
    ("compare", "setp.gt.s32"): "guards a loop against K = 0, which the launcher does not allow",
}


def is_caught(mutant: Mutant, kernel: str) -> bool:
    """Whether a mutant is refused, has a finding, or computes a wrong D with one of the shapes."""
    try:
        changed = emulator.load(mutant.text)
        for m, n, k in SHAPES:
            result, exact = gemm(changed, kernel, m, n, k, Options(loop_limit=1000), low=-2, high=3)
            if result.reports or not exact:
                return True
    except (EmulatorError, PtxError):
        return True
    return False


@pytest.mark.thorough
@pytest.mark.slow
def test_mutants(text: str) -> None:
    """Every mutant is caught, except for those that change nothing."""
    body = text.split(".visible .entry gemm_f16")[1]
    alone = text.split(".visible .entry gemm_f32", maxsplit=1)[0] + ".visible .entry gemm_f16" + body
    candidates = list(mutants(alone, "gemm_f16"))
    assert len(candidates) == 327
    assert {mutant.kind for mutant in candidates} >= {
        "drop",
        "weaken",
        "swap",
        "shift",
        "shift-source",
        "shift-destination",
        "negate",
        "unguard",
        "never",
        "compare",
    }
    survivors = [mutant for mutant in candidates if not is_caught(mutant, "gemm_f16")]
    unexplained = [s.name for s in survivors if (s.kind, s.name.split()[1]) not in EQUIVALENT]
    assert unexplained == []
    assert len(survivors) == 8, [s.name for s in survivors]


def test_example_of_the_package() -> None:
    result = doctest.testmod(emulator)
    assert result.attempted > 5
    assert result.failed == 0


@pytest.mark.slow
def test_memory_stays_small(checkout: Path) -> None:
    """The memory is VmHWM of a new process. ru_maxrss would include what this process held when it started that one."""
    program = """
from pathlib import Path
from kernelproof import emulator
from tests.kernelproof.emulator.build import compile_file
from tests.kernelproof.emulator.gemm import gemm
gemm(emulator.load(compile_file("multistage", ".ptx").read_text()), "gemm_f32", 256, 256, 256)
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=checkout)
    assert int(done.stdout) < 1 << 20
