// D(m,n) = A(m,k) * B(n,k)^T: fp16 in and out, f16 accumulators, row-major, leading dimensions in elements.
// Method: mma.sync on fragments that are loaded directly from global memory, without a ring in shared memory.
//
// Launch, all divisions rounded up:
//   grid   (n / 32, m / 32, 1)
//   block  32
//   shared 0 bytes, dynamic
//
// Compile nvcc -std=c++17 --expt-relaxed-constexpr -arch=sm_80 -I CUTLASS/include, or for any later GPU
//
// Needs  m, n, k multiples of 32, 32, 32; pointers aligned to 16 bytes, leading dimensions multiples of 8

#include <cstdint>

#include <cuda_fp16.h>

#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>
#include <cute/tensor_impl.hpp>
#include <cute/arch/mma_sm80.hpp>

namespace hgemm_sm80_direct_f16_tn_32x32_260df53446 {

using namespace cute;

// The CTA tile in elements, its MMA warps, and what each warp owns: kMmaM blocks of 16 rows, kMmaN blocks of 8 columns.
constexpr int kBM = 32, kBN = 32;
constexpr int kWarpsM = 1, kWarpsN = 1;
constexpr int kThreads = 32 * kWarpsM * kWarpsN;
constexpr int kMmaM = kBM / (16 * kWarpsM);
constexpr int kMmaN = kBN / (8 * kWarpsN);
constexpr int kVectorBits = 3, kVector = 1 << kVectorBits;  // halves in the 16 bytes that one copy instruction moves
static_assert(kThreads == 32 && kBM % (16 * kWarpsM) == 0 && kBN % (16 * kWarpsN) == 0);
constexpr int kStep = 32;  // k of one step: each lane loads one vector per row, enough for two MMAs

// Accumulators of mma.sync.m16n8k16: a pair of halves for row lane / 4, another for the row 8 below.
using Mma = SM80_16x8x16_F16F16F16F16_TN;
using TensorD = decltype(make_tensor<uint32_t>(Shape<_2, Int<kMmaM>, Int<kMmaN>>{}));

CUTE_DEVICE uint32_t pair(TensorD const& tCrD, int half_tile, int i, int j) { return tCrD(half_tile, i, j); }

// The problem, as the caller passed it.
struct Gemm {
  half const* a;
  int lda;
  half const* b;
  int ldb;
  half* d;
  int ldd;
  int m;
  int n;
  int k;
};

// Stores two neighbours in a row of D.
CUTE_DEVICE void store_pair(Gemm const& gemm, int row, int col, uint32_t value) {
  *reinterpret_cast<uint32_t*>(gemm.d + int64_t(row) * gemm.ldd + col) = value;
}

// Loads elements (row, k) to (row, k + 7) of a matrix whose k is contiguous.
CUTE_DEVICE uint4 load_along_k(half const* matrix, int ld, int /* rows */, int /* k_end */, int row, int k) {
  return __ldg(reinterpret_cast<uint4 const*>(matrix + int64_t(row) * ld + k));
}

// Computes one CTA tile of D: rows from tile_m * kBM, columns from tile_n * kBN.
CUTE_DEVICE void compute_tile(Gemm const& gemm, int tile_m, int tile_n) {
  const int warp_m = threadIdx.x / 32 % kWarpsM;
  const int warp_n = threadIdx.x / 32 / kWarpsM;
  const int lane = threadIdx.x % 32;

  constexpr int first = 0;
  const int last = (gemm.k + kStep - 1) / kStep;

  // Two sets of fragments alternate: the next step's loads are in flight while this step is multiplied.
  const int row_a = tile_m * kBM + warp_m * 16 + lane / 4;
  const int row_b = tile_n * kBN + warp_n * 16 + lane / 4;
  using FragmentA = decltype(make_tensor<uint4>(Shape<_2, Int<kMmaM>>{}));
  using FragmentB = decltype(make_tensor<uint4>(Shape<Int<kMmaN>>{}));
  auto load = [&](int step, FragmentA& tCrA, FragmentB& tCrB) {
    const int k = step * kStep + lane % 4 * kVector;
    CUTE_UNROLL
    for (int i = 0; i < kMmaM; ++i) {
      tCrA(0, i) = load_along_k(gemm.a, gemm.lda, gemm.m, gemm.k, row_a + i * 16 * kWarpsM, k);
      tCrA(1, i) = load_along_k(gemm.a, gemm.lda, gemm.m, gemm.k, row_a + i * 16 * kWarpsM + 8, k);
    }
    CUTE_UNROLL
    for (int j = 0; j < kMmaN; ++j) {
      tCrB(j) = load_along_k(gemm.b, gemm.ldb, gemm.n, gemm.k, row_b + j / 2 * 16 * kWarpsN + j % 2 * 8, k);
    }
  };
  TensorD tCrD;
  CUTE_UNROLL
  for (int i = 0; i < size(tCrD); ++i) {
    tCrD(i) = 0;
  }
  auto multiply = [&](FragmentA const& tCrA, FragmentB const& tCrB) {
    CUTE_UNROLL
    for (int i = 0; i < kMmaM; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < kMmaN; ++j) {
        Mma::fma(tCrD(0, i, j), tCrD(1, i, j),
                 tCrA(0, i).x, tCrA(1, i).x, tCrA(0, i).y, tCrA(1, i).y, tCrB(j).x, tCrB(j).y,
                 tCrD(0, i, j), tCrD(1, i, j));
        Mma::fma(tCrD(0, i, j), tCrD(1, i, j),
                 tCrA(0, i).z, tCrA(1, i).z, tCrA(0, i).w, tCrA(1, i).w, tCrB(j).z, tCrB(j).w,
                 tCrD(0, i, j), tCrD(1, i, j));
      }
    }
  };
  FragmentA tCrA, tCrA_next;
  FragmentB tCrB, tCrB_next;
  load(first, tCrA, tCrB);
  CUTE_NO_UNROLL
  for (int step = first; step < last; ++step) {
    if (step + 1 < last) {
      load(step + 1, tCrA_next, tCrB_next);
    }
    multiply(tCrA, tCrB);
    tCrA = tCrA_next;
    tCrB = tCrB_next;
  }

  // The accumulators are stored directly to global memory, a pair at a time.
  CUTE_UNROLL
  for (int i = 0; i < kMmaM; ++i) {
    CUTE_UNROLL
    for (int j = 0; j < kMmaN; ++j) {
      CUTE_UNROLL
      for (int half_tile = 0; half_tile < 2; ++half_tile) {
        store_pair(gemm, tile_m * kBM + (i * kWarpsM + warp_m) * 16 + half_tile * 8 + lane / 4,
                   tile_n * kBN + (j / 2 * kWarpsN + warp_n) * 16 + j % 2 * 8 + lane % 4 * 2,
                   pair(tCrD, half_tile, i, j));
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
hgemm_sm80_direct_f16_tn_32x32_260df53446(half const* a, int lda, half const* b, int ldb, half* d, int ldd,
    int m, int n, int k, float* /* partials */, unsigned* /* arrivals */) {
  const Gemm gemm{a, lda, b, ldb, d, ldd, m, n, k};
  compute_tile(gemm, blockIdx.y, blockIdx.x);
}

}  // namespace hgemm_sm80_direct_f16_tn_32x32_260df53446
