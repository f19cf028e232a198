// A warp per 16 x 16 tile of D: fragments straight from global memory, mma.sync m16n8k16, fp32 sums.
#include <cstdint>

#include <cuda_fp16.h>

constexpr int kTile = 16, kStep = 16;

__device__ __forceinline__ uint32_t pair_at(half const* matrix, int ld, int row, int rows, int col, int cols) {
  if (row >= rows || col >= cols) return 0;
  return *reinterpret_cast<uint32_t const*>(matrix + int64_t(row) * ld + col);
}

__device__ __forceinline__ void store(half* d, int ldd, int row, int m, int col, int n, float value) {
  if (row < m && col < n) d[int64_t(row) * ldd + col] = __float2half_rn(value);
}

extern "C" __global__ void __launch_bounds__(32) gemm(
    half const* a, int lda, half const* b, int ldb, half* d, int ldd, int m, int n, int k, float* partials,
    unsigned* arrivals) {
  const int group = threadIdx.x / 4, pair = 2 * (threadIdx.x % 4);
  const int row = blockIdx.y * kTile + group, col = blockIdx.x * kTile;
  float sums[2][4] = {};
  for (int at = pair; at < k; at += kStep) {
    uint32_t left[4];
    for (int i = 0; i < 4; ++i) left[i] = pair_at(a, lda, row + i % 2 * 8, m, at + i / 2 * 8, k);
    for (int part = 0; part < 2; ++part) {
      const uint32_t right[2] = {pair_at(b, ldb, col + 8 * part + group, n, at, k),
                                 pair_at(b, ldb, col + 8 * part + group, n, at + 8, k)};
      float* sum = sums[part];
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
          : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
    }
  }
  for (int i = 0; i < 8; ++i)
    store(d, ldd, row + i % 4 / 2 * 8, m, col + i / 4 * 8 + pair + i % 2, n, sums[i / 4][i % 4]);
}
