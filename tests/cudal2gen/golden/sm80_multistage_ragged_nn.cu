// D(m,n) = A(m,k) * B(k,n): fp16 in and out, f32 accumulators, row-major, leading dimensions in elements.
// By a ring of cp.async stages in shared memory, ldmatrix, mma.sync.
//
// Launch, all divisions rounded up:
//   grid   (at most n / 128 * m / 128 * 4, 1, 1): as many CTAs as fit on the GPU
//   block  128
//   shared 98304 bytes, dynamic; above 48 KiB, so set cudaFuncAttributeMaxDynamicSharedMemorySize first
//
// Scratch
//   gemm.partials   m / 128 * n / 128 * 4 tiles of 128 x 128 floats
//   gemm.arrivals   m / 128 * n / 128 counters, zero before the launch
//
// Needs  k a multiple of 8; A and B aligned to 16 bytes, lda and ldb multiples of 8

#include <cstdint>

#include <cuda_fp16.h>

#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>
#include <cute/tensor_impl.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>

namespace hgemm_sm80_multistage_f32_nn_128x128x64_s3_3776245fde {

using namespace cute;

// CTA tile in elements, MMA warps, and what each warp owns: kMmaM blocks of 16 rows, kMmaN blocks of 8 columns.
constexpr int kBM = 128, kBN = 128;
constexpr int kWarpsM = 2, kWarpsN = 2;
constexpr int kThreads = 32 * kWarpsM * kWarpsN;
constexpr int kMmaM = kBM / (16 * kWarpsM);
constexpr int kMmaN = kBN / (8 * kWarpsN);
constexpr int kVectorBits = 3, kVector = 1 << kVectorBits;  // halves in the 16 bytes that one copy instruction moves
static_assert(kThreads == 128 && kBM % (16 * kWarpsM) == 0 && kBN % (16 * kWarpsN) == 0);

// The ring: kStages k-tiles of A and of B, each a swizzled tile of 16-byte vectors.
constexpr int kBK = 64, kStages = 3;
constexpr int kBlocks = kBK / 16;  // MMA steps (k-blocks) in a k-tile
constexpr int kVectorsK = kBK / kVector;
// Swizzles are stated on halves; on vectors, which they keep whole, the base is smaller.
using TileA = decltype(composition(Swizzle<3, 3 - kVectorBits, 3>{},
                                   Layout<Shape<Int<kBM>, Int<kVectorsK>>, Stride<Int<kVectorsK>, _1>>{}));
constexpr int kVectorsN = kBN / kVector;
using TileB = decltype(composition(Swizzle<3, 3 - kVectorBits, 4>{},
                                   Layout<Shape<Int<kBK>, Int<kVectorsN>>, Stride<Int<kVectorsN>, _1>>{}));
constexpr int kStageA = cosize_v<TileA>, kStageB = cosize_v<TileB>;
static_assert(kStages * (kStageA + kStageB) * sizeof(uint128_t) == 98304);

// Accumulators of mma.sync.m16n8k16: two floats for row lane / 4, two more for the row 8 below.
using Mma = SM80_16x8x16_F32F16F16F32_TN;
using TensorD = decltype(make_tensor<float>(Shape<_4, Int<kMmaM>, Int<kMmaN>>{}));

CUTE_DEVICE uint32_t pair(TensorD const& tCrD, int half_tile, int i, int j) {
  const half2 rounded = __floats2half2_rn(tCrD(2 * half_tile, i, j), tCrD(2 * half_tile + 1, i, j));
  return reinterpret_cast<uint32_t const&>(rounded);
}

// The problem, as the kernel was handed it.
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
  float* partials;
  unsigned* arrivals;
};

// One 16-byte vector by cp.async to a shared address, if active; beyond the first `bytes` it is filled with zeros.
CUTE_DEVICE void copy_vector(uint128_t const* source, uint32_t target, bool active, int bytes) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.b32 p, %2, 0;\n"
               "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %3;\n"
               "}" :: "r"(target), "l"(source), "r"(int(active)), "r"(bytes));
}

// A thread's share of the copy of one operand's k-tile: vectors (row + i * kLoadRows, col + j * Cols) of the tile.
template <class Tile, int Cols>
struct Copy {
  static constexpr int kRows = size<0>(Tile{}), kVectors = size<1>(Tile{});
  static constexpr int kLoadRows = kThreads / Cols;
  static constexpr int kStageBytes = cosize_v<Tile> * sizeof(uint128_t);
  static constexpr int kPeriod = 128;  // vectors after which every swizzle here repeats its phase
  static_assert(kThreads % Cols == 0 && kVectors % Cols == 0);

  uint32_t stages;  // shared address of the ring's first stage
  half const* source;  // this thread's first vector of the next k-tile
  int ld;
  int64_t step;  // elements from one k-tile to the next
  int rows, cols;  // valid rows, and valid elements in a row, from this thread's first vector on
  int row_step, col_step;  // what a k-tile takes off them
  CUTE_DEVICE static int row() { return threadIdx.x / Cols; }
  CUTE_DEVICE static int col() { return threadIdx.x % Cols; }

  // Bytes into a stage. Where a static row step keeps the phase of the swizzle, it is one addition for all i.
  CUTE_DEVICE static uint32_t offset(int i, int j) {
    if constexpr (kLoadRows * kVectors % kPeriod == 0) {
      return sizeof(uint128_t) * Tile{}(row(), col() + j * Cols) + i * int(kLoadRows * kVectors * sizeof(uint128_t));
    } else {
      return sizeof(uint128_t) * Tile{}(row() + i * kLoadRows, col() + j * Cols);
    }
  }

  CUTE_DEVICE void operator()(int stage, bool active) {
    Tensor gX = make_tensor(make_gmem_ptr(reinterpret_cast<uint128_t const*>(source)),
                            make_layout(Shape<Int<ceil_div(kRows, kLoadRows)>, Int<kVectors / Cols>>{},
                                        make_stride(kLoadRows * (ld / kVector), Int<Cols>{})));
    CUTE_UNROLL
    for (int i = 0; i < size<0>(gX); ++i) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(gX); ++j) {
        if (kRows % kLoadRows == 0 || row() + i * kLoadRows < kRows) {
          const int bytes = i * kLoadRows < rows ? 2 * max(0, min(kVector, cols - j * Cols * kVector)) : 0;
          copy_vector(&gX(i, j), stages + stage * kStageBytes + offset(i, j), active, bytes);
        }
      }
    }
    source += step;
    rows -= row_step;
    cols -= col_step;
  }
};

constexpr int kSplitK = 4;
constexpr int kPairs = kBM * kBN / kThreads / 2;  // pairs of floats that a thread contributes to a tile

// The most pairs that are loaded at once: they divide a thread's evenly, so that every trip to the L2 is a full one.
constexpr int pairs_at_once(int most) { return kPairs % most ? pairs_at_once(most - 1) : most; }
constexpr int kPairsAtOnce = pairs_at_once(kPairs < 16 ? kPairs : 16);
constexpr int kSlicesAtOnce = 16 / kPairsAtOnce < kSplitK ? 16 / kPairsAtOnce : kSplitK;

// Adds consecutive slices in their order; their loads are in flight together.
template <int Slices>
CUTE_DEVICE void add_slices(float2 const* partials, float2 (&sum)[kPairsAtOnce]) {
  float2 part[Slices][kPairsAtOnce];
  CUTE_UNROLL
  for (int s = 0; s < Slices; ++s) {
    CUTE_UNROLL
    for (int i = 0; i < kPairsAtOnce; ++i) {
      part[s][i] = __ldcg(partials + int64_t(s) * (kBM * kBN / 2) + i * kThreads);
    }
  }
  CUTE_UNROLL
  for (int s = 0; s < Slices; ++s) {
    CUTE_UNROLL
    for (int i = 0; i < kPairsAtOnce; ++i) {
      sum[i].x += part[s][i].x;
      sum[i].y += part[s][i].y;
    }
  }
}

// Sets tCrD to the sum of all slices, in slice order, in the CTA that arrives last; false in the others.
CUTE_DEVICE bool reduce_slices(Gemm const& gemm, int tile, int slice, TensorD& tCrD) {
  __shared__ bool last;
  float2* const partials =
      reinterpret_cast<float2*>(gemm.partials) + int64_t(tile) * kSplitK * (kBM * kBN / 2) + threadIdx.x;
  CUTE_UNROLL
  for (int i = 0; i < kPairs; ++i) {
    partials[int64_t(slice) * (kBM * kBN / 2) + i * kThreads] = make_float2(tCrD(2 * i), tCrD(2 * i + 1));
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(gemm.arrivals + tile, 1u) == kSplitK - 1;
  }
  __syncthreads();
  if (!last) {
    return false;
  }
  __threadfence();
  CUTE_UNROLL
  for (int first = 0; first < kPairs; first += kPairsAtOnce) {
    float2 sum[kPairsAtOnce] = {};
    CUTE_NO_UNROLL
    for (int s = 0; s + kSlicesAtOnce <= kSplitK; s += kSlicesAtOnce) {
      add_slices<kSlicesAtOnce>(partials + int64_t(s) * (kBM * kBN / 2) + first * kThreads, sum);
    }
    if constexpr (kSplitK % kSlicesAtOnce > 0) {
      constexpr int kRest = kSplitK % kSlicesAtOnce;
      add_slices<kRest>(partials + int64_t(kSplitK - kRest) * (kBM * kBN / 2) + first * kThreads, sum);
    }
    CUTE_UNROLL
    for (int j = 0; j < kPairsAtOnce; ++j) {
      const int i = first + j;
      tCrD(2 * i) = sum[j].x;
      tCrD(2 * i + 1) = sum[j].y;
    }
  }
  return true;
}

// Two neighbours in one row of D; one by one at the right edge, and where rows are not aligned.
CUTE_DEVICE void store_pair(Gemm const& gemm, int row, int col, uint32_t value) {
  half* const target = gemm.d + int64_t(row) * gemm.ldd + col;
  if (row < gemm.m && col + 2 <= gemm.n && reinterpret_cast<uintptr_t>(target) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(target) = value;
  } else if (row < gemm.m) {
    CUTE_UNROLL
    for (int e = 0; e < 2; ++e) {
      if (col + e < gemm.n) {
        target[e] = reinterpret_cast<half const*>(&value)[e];
      }
    }
  }
}

// One CTA tile of D: rows from tile_m * kBM, columns from tile_n * kBN, slice `slice` of k.
CUTE_DEVICE void compute_tile(Gemm const& gemm, int tile_m, int tile_n, int slice) {
  extern __shared__ uint128_t smem[];
  uint128_t* const sA = smem;
  uint128_t* const sB = smem + kStages * kStageA;
  const int warp_m = threadIdx.x / 32 % kWarpsM;
  const int warp_n = threadIdx.x / 32 / kWarpsM;
  const int lane = threadIdx.x % 32;

  // This slice's k-tiles: [first, last) of the whole.
  const int total = (gemm.k + kBK - 1) / kBK;
  const int first = int(int64_t(total) * slice / kSplitK);
  const int tiles = int(int64_t(total) * (slice + 1) / kSplitK) - first;

  using CopyA = Copy<TileA, 4>;
  using CopyB = Copy<TileB, 8>;
  const int row_a = tile_m * kBM + CopyA::row(), col_a = first * kBK + CopyA::col() * kVector;
  const int row_b = first * kBK + CopyB::row(), col_b = tile_n * kBN + CopyB::col() * kVector;
  CopyA copy_a{cast_smem_ptr_to_uint(sA), gemm.a + int64_t(row_a) * gemm.lda + col_a, gemm.lda, kBK, gemm.m - row_a, gemm.k - col_a, 0, kBK};
  CopyB copy_b{cast_smem_ptr_to_uint(sB), gemm.b + int64_t(row_b) * gemm.ldb + col_b, gemm.ldb,
               int64_t(kBK) * gemm.ldb, gemm.k - row_b, gemm.n - col_b, kBK, 0};

  // Fragments of mma.sync, one per k-block of a k-tile; the loop below decides how many live at a time.
  Tensor tCrA = make_tensor<uint32_t>(Shape<_4, Int<kMmaM>, Int<kBlocks>>{});
  Tensor tCrB = make_tensor<uint32_t>(Shape<_2, Int<kMmaN>, Int<kBlocks>>{});
  TensorD tCrD;
  CUTE_UNROLL
  for (int i = 0; i < size(tCrD); ++i) {
    tCrD(i) = 0;
  }

  // The row of a tile that this lane hands to ldmatrix. Warps interleave: their blocks are kWarpsM * 16 rows apart.
  const int row_lda = warp_m * 16 + lane % 16, col_lda = lane / 16;
  auto load_a_block = [&](int stage, int kb, int i) {
    SM75_U32x4_LDSM_N::copy(sA[((stage * kStageA + TileA{}(row_lda, col_lda)) ^ TileA{}(0, kb * 2)) +
                               i * (16 * kWarpsM * kVectorsK)],
                            tCrA(0, i, kb), tCrA(1, i, kb), tCrA(2, i, kb), tCrA(3, i, kb));
  };
  const int row_ldb = lane % 16, col_ldb = warp_n * 2 + lane / 16;
  auto load_b_block = [&](int stage, int kb, int j) {
    SM75_U16x8_LDSM_T::copy(sB[stage * kStageB + TileB{}(row_ldb, col_ldb + j * kWarpsN) + kb * (16 * kVectorsN)],
                            tCrB(0, j, kb), tCrB(1, j, kb), tCrB(0, j + 1, kb), tCrB(1, j + 1, kb));
  };
  auto load_a = [&](int stage, int kb) {
    CUTE_UNROLL
    for (int i = 0; i < kMmaM; ++i) {
      load_a_block(stage, kb, i);
    }
  };
  auto load_b = [&](int stage, int kb) {
    CUTE_UNROLL
    for (int j = 0; j < kMmaN; j += 2) {
      load_b_block(stage, kb, j);
    }
  };

  // Serpentine over the columns, so that the B fragment of a turn is used twice in a row.
  auto multiply_row = [&](int kb, int i) {
    CUTE_UNROLL
    for (int step = 0; step < kMmaN; ++step) {
      const int j = i % 2 ? kMmaN - 1 - step : step;
      Mma::fma(tCrD(0, i, j), tCrD(1, i, j), tCrD(2, i, j), tCrD(3, i, j),
               tCrA(0, i, kb), tCrA(1, i, kb), tCrA(2, i, kb), tCrA(3, i, kb), tCrB(0, j, kb), tCrB(1, j, kb),
               tCrD(0, i, j), tCrD(1, i, j), tCrD(2, i, j), tCrD(3, i, j));
    }
  };

  // Fill all stages but one. Every step commits, with or without a copy, so that wait<kStages - 2> always means
  // "the next k-tile is here".
  int copied = 0, read = 0, write = 0;
  auto copy_next = [&] {
    copy_a(write, copied < tiles);
    copy_b(write, copied < tiles);
    ++copied;
    write = write + 1 == kStages ? 0 : write + 1;
    cp_async_fence();
  };
  CUTE_UNROLL
  for (int stage = 0; stage < kStages - 1; ++stage) {
    copy_next();
  }

  // Two fragments take turns: while the MMAs of one run, row by row, the other is loaded between them.
  cp_async_wait<kStages - 2>();
  __syncthreads();
  load_a(read, 0);
  load_b(read, 0);
  CUTE_NO_UNROLL
  for (int tile = 0; tile < tiles; ++tile) {
    CUTE_UNROLL
    for (int kb = 0; kb < kBlocks; ++kb) {
      if (kb == kBlocks - 1) {
        cp_async_wait<kStages - 2>();
        __syncthreads();
        if (tile + 1 < tiles) {
          read = read + 1 == kStages ? 0 : read + 1;
        }
      }
      if (kb == 0) {
        copy_next();
      }
      CUTE_UNROLL
      for (int i = 0; i < kMmaM; ++i) {
        load_a_block(read, (kb + 1) % kBlocks, i);
        CUTE_UNROLL
        for (int j = i * kMmaN / kMmaM / 2 * 2; j < (i + 1) * kMmaN / kMmaM / 2 * 2; j += 2) {
          load_b_block(read, (kb + 1) % kBlocks, j);
        }
        multiply_row(kb, i);
      }
    }
  }

  if (!reduce_slices(gemm, tile_m * ((gemm.n + kBN - 1) / kBN) + tile_n, slice, tCrD)) {
    return;
  }

  // Accumulators straight to global memory, a pair at a time.
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
hgemm_sm80_multistage_f32_nn_128x128x64_s3_3776245fde(half const* a, int lda, half const* b, int ldb, half* d, int ldd,
    int m, int n, int k, float* partials, unsigned* arrivals) {
  const Gemm gemm{a, lda, b, ldb, d, ldd, m, n, k, partials, arrivals};
  // Every CTA takes tiles until none is left.
  const int tiles_n = (gemm.n + kBN - 1) / kBN;
  const int work = ((gemm.m + kBM - 1) / kBM) * tiles_n * kSplitK;
  CUTE_NO_UNROLL
  for (int item = blockIdx.x; item < work; item += gridDim.x) {
    compute_tile(gemm, item / kSplitK / tiles_n, item / kSplitK % tiles_n, item % kSplitK);
    __syncthreads();  // the next tile's copies overwrite what this one staged
  }
}

}  // namespace hgemm_sm80_multistage_f32_nn_128x128x64_s3_3776245fde
