"""Proves that both accesses of a race in shared memory are named, and that the second is by another lane."""

from __future__ import annotations

import numpy as np
import pytest

from kernelproof.emulator import Memory, load
from tests.kernelproof.emulator.build import ptx_of_text

# Each lane reads its own word and another lane's, and writes its own word without a barrier in between. BEFORE and
# AFTER are the two reads, in either order. Comments mark the lines of both sides of the race.
ROTATED = """
extern "C" __global__ void kernel(float* x) {
  __shared__ float s[32];
  int i = threadIdx.x;
  s[i] = x[i];
  __syncwarp();
  BEFORE
  AFTER
  s[i] = u + v;  // here
  __syncwarp();
  x[i] = s[i];
}
"""
OTHERS, OWN = "float v = s[(i + 1) % 32];  // there", "float u = s[i];"
SCAN = """
extern "C" __global__ void kernel(float* x) {
  __shared__ float s[32];
  int i = threadIdx.x;
  s[i] = x[i];
  __syncwarp();
  for (int d = 1; d < 32; d *= 2) {
    float v = 0;
    if (i >= d) v = s[i - d];  // there
    s[i] = s[i] + v;  // here
    __syncwarp();
  }
  x[i] = s[i];
}
"""
TEXTS = {
    "own read last": ROTATED.replace("BEFORE", OTHERS).replace("AFTER", OWN),
    "own read first": ROTATED.replace("BEFORE", OWN).replace("AFTER", OTHERS),
    "several lanes": ROTATED.replace("BEFORE", "float v = s[i / 2];  // there").replace("AFTER", OWN),
    "scan": SCAN,
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_other_side_is_the_read_of_another_lane(name: str) -> None:
    text = TEXTS[name]
    memory = Memory()
    x = memory.upload(np.ones(32, np.float32), "inout")
    reports = load(ptx_of_text(text, "sm_80")).launch("kernel", 1, 32, [x], memory=memory).reports
    here, there = (
        {i for i, line in enumerate(text.split("\n"), 1) if f"// {mark}" in line} for mark in ("here", "there")
    )
    assert reports
    for report in reports:
        assert report.kind == "shared-race"
        assert report.other is not None
        sides = [side.site.home.line for side in (report.access, report.other) if side.site.home is not None]
        assert set(sides[:1]) == here
        assert set(sides[1:]) == there
