"""Proves that CTAs which wait for others in a loop let them run, and that launches without an end are classified.

Loops may have any shape, and as many CTAs run as the device holds. The classes are an endless loop, a deadlock, and a
grid that does not fit on the device at the same time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import Device, Memory, Options
from tests.kernelproof.emulator.build import ptx_of_text

Array = Any
# CTAs of a launch, and the kernels. ``flag``, ``data`` and ``out`` have an int for each CTA.
CTAS = 12
CODE = r"""
__device__ __forceinline__ int weak(const int* p) {
  int v; asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p)); return v;
}

// CTA b waits for CTA b + 1, in a loop of several blocks, which a flag of its own ends.
extern "C" __global__ void backwards(volatile int* flag, volatile int* data, int* out) {
  int b = blockIdx.x, before = 0;
  if (threadIdx.x) return;
  if (b + 1 < gridDim.x) {
    bool done = false;
    for (int tries = 0; !done;) {
      if (flag[b + 1] != 0) { __threadfence(); done = true; }
      else if (tries & 1) tries += 3;
      else tries = tries == 100 ? 0 : tries + 1;
    }
    before = data[b + 1];
  }
  data[b] = before + 1; out[b] = before + 1;
  __threadfence();
  flag[b] = 1;
}

// All threads of a CTA wait by a barrier with reduction for the last CTA.
extern "C" __global__ void voted(volatile int* flag, volatile int* data, int* out) {
  int b = blockIdx.x;
  if (b == gridDim.x - 1) {
    if (threadIdx.x == 5) { data[0] = 7; __threadfence(); flag[0] = 1; }
  } else {
    while (!__syncthreads_or(threadIdx.x == 37 && flag[0])) { }
    __threadfence();
  }
  if (threadIdx.x == 0) out[b] = b == gridDim.x - 1 ? 7 : data[0];
}

// The last CTA is waited for by plain loads in a loop in which nothing looks like a wait.
extern "C" __global__ void hidden(int* flag, int* data, int* out) {
  int b = blockIdx.x, n = 0;
  if (threadIdx.x) return;
  if (b == gridDim.x - 1) { flag[0] = 1; }
  else { while (weak(flag + n) == 0) n = 0; }
  out[b] = weak(flag);
}

// Every CTA arrives and waits for all others.
extern "C" __global__ void grid(int* flag, volatile int* data, int* out) {
  if (threadIdx.x) return;
  data[blockIdx.x] = blockIdx.x;
  __threadfence();
  atomicAdd(flag, 1);
  while (*(volatile int*)flag < gridDim.x) { }
  __threadfence();
  out[blockIdx.x] = data[(blockIdx.x + 1) % gridDim.x];
}

// Waits for 150 tries, then for a time, and then goes on without the flag.
extern "C" __global__ void tries(volatile int* flag, int* data, int* out) {
  if (threadIdx.x) return;
  int i = 0;
  for (; i < 150 && !flag[0]; i++) { }
  long long start = clock64();
  while (!flag[0] && clock64() - start < 4000000000ll) { }
  out[blockIdx.x] = i;
}

extern "C" __global__ void endless(int* flag, int* data, int* out) {
  if (threadIdx.x) return;
  out[blockIdx.x] = 1;
  if (blockIdx.x == 1) for (int i = 0;; i = (i + 1) & 7) if (i == out[1] + 99) break;
}

extern "C" __global__ void never(volatile int* flag, int* data, int* out) {
  int n = 0;
  if (threadIdx.x == 0) {
    for (bool done = false; !done; n++) { if (flag[blockIdx.x]) done = true; else if (n & 1) n += 2; }
  }
  out[blockIdx.x] = n;
}"""


def launch(kernel: str, options: Options, device: Device = emulator.HOPPER) -> tuple[set[str], Array, str]:
    """The violated rules, the output, and the messages of a launch."""
    memory = Memory()
    buffers = [memory.upload(np.zeros(CTAS, np.int32), "inout") for _ in range(3)]
    code = emulator.load(ptx_of_text(CODE, "sm_80"))
    result = code.launch(kernel, CTAS, 64, buffers, memory=memory, options=options, device=device)
    text = " ".join(r.message for r in result.reports)
    return {r.kind for r in result.reports}, buffers[2].download(), text


# By kernel: its output.
WANTED = {
    "backwards": CTAS - np.arange(CTAS),
    "voted": np.full(CTAS, 7),
    "hidden": np.ones(CTAS),
    "grid": (np.arange(CTAS) + 1) % CTAS,
    "tries": np.full(CTAS, 150),
}


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [64, 4096])
@pytest.mark.parametrize("adverse", [False, True])
@pytest.mark.parametrize("kernel", WANTED)
def test_ctas_that_wait_let_others_run(kernel: str, adverse: bool, lanes: int) -> None:
    rules, out, _ = launch(kernel, Options(lanes=lanes, adverse=adverse))
    assert rules == ({"global-race"} if kernel == "hidden" else set())
    np.testing.assert_array_equal(out, WANTED[kernel])


@pytest.mark.parametrize("lanes", [64, 256, 4096])
@pytest.mark.parametrize(("kernel", "rule"), [("endless", "runaway"), ("never", "deadlock")])
def test_what_never_ends_is_an_error(kernel: str, rule: str, lanes: int) -> None:
    assert launch(kernel, Options(lanes=lanes))[0] == {rule}


@pytest.mark.parametrize("lanes", [64, 4096])
@pytest.mark.parametrize("kernel", ["grid", "backwards"])
@pytest.mark.parametrize("held", [4, 12])
def test_a_device_that_holds_fewer_ctas_cannot_check(kernel: str, held: int, lanes: int) -> None:
    rules, out, text = launch(kernel, Options(lanes=lanes), Device(sm_count=held // 2, blocks_per_sm=2))
    assert rules == (set() if held == CTAS else {"launch-error"})
    assert held == CTAS or f"co-residency of {CTAS} CTAs" in text
    np.testing.assert_array_equal(out, WANTED[kernel])


def test_ctas_that_nobody_lets_go_on_are_a_deadlock_on_a_small_device() -> None:
    assert launch("never", Options(), Device(sm_count=1, blocks_per_sm=3))[0] == {"deadlock"}
