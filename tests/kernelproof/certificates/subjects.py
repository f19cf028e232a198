"""Kernels with contracts, for tests of certificates: a multistage product of matrices, and sums of rows."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

from kernelproof.certificates.by_contract import load
from kernelproof.certificates.contract_file import KernelContract
from tests.kernelproof.emulator.build import compile_file, ptx_of_text, stable_file

PRODUCT = """
kernel = "gemm_f16"
parameters = ["A", "B", "D", "m", "n", "k"]
result = "D(i,j) = sum over k of A(i,k) B(j,k)"

[sizes]
m = { multiple = 128 }
n = { multiple = 128 }
k = { multiple = 32 }

[operands]
A = { type = "f16", shape = ["m", "k"] }
B = { type = "f16", shape = ["n", "k"] }
D = { type = "f16", shape = ["m", "n"] }

[launch]
grid = ["n / 128", "m / 128"]
block = [128]
shared = 65536
tile = [128, 128]
"""

ROW_SUM = """
kernel = "row_sum"
parameters = ["A", "D", "n", "ld"]
result = "D(i) = sum over k of A(i,k)"
limits = ["m * ld <= 2147483647"]

[sizes]
m = { most = 1000000 }
n = { multiple = 1024 }
ld = { multiple = 4 }

[operands]
A = { type = "f32", shape = ["m", "n"], ld = "ld" }
D = { type = "f32", shape = ["m"] }

[launch]
grid = ["m"]
block = [64, 4]
tile = [1]
"""

ROW_SUM_CODE = """
extern "C" __global__ void row_sum(const float* __restrict__ x, float* __restrict__ y, int n, int ld) {
  __shared__ float partial[8];
  const int thread = threadIdx.x + threadIdx.y * blockDim.x, warp = thread / 32, lane = thread % 32;
  const float* row = x + int(blockIdx.x) * ld;
  float sum = 0;
  for (int i = thread * 4; i < n; i += 1024) {
    const float4 v = *reinterpret_cast<const float4*>(row + i);
    sum += v.x + v.y + v.z + v.w;
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (lane == 0) partial[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    sum = lane < 8 ? partial[lane] : 0.0f;
    for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_down_sync(~0u, sum, offset);
    if (lane == 0) y[blockIdx.x] = sum;
  }
}
"""


class Subject(NamedTuple):
    """A kernel's PTX, and the text of its contract."""

    ptx: str
    text: str

    @property
    def path(self) -> Path:
        """The file of the contract."""
        return stable_file(self.text, "contract.toml")

    @property
    def contract(self) -> KernelContract:
        """The contract, as read from that file."""
        return load(self.path)

    def revise_contract(self, before: str, after: str) -> Subject:
        """The same kernel with another contract: ``after`` stands for every ``before`` in its text."""
        assert before in self.text
        return Subject(self.ptx, self.text.replace(before, after))


@cache
def product() -> Subject:
    """The subject of the matrix product, as compiled."""
    return Subject(compile_file("multistage", ".ptx").read_text(), PRODUCT)


@cache
def row_sum(before: str = "", after: str = "") -> Subject:
    """The subject of the sums of rows. In its CUDA text, ``after`` stands for every ``before``."""
    assert before in ROW_SUM_CODE
    return Subject(ptx_of_text(ROW_SUM_CODE.replace(before, after), "sm_80"), ROW_SUM)
