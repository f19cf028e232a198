// D(m,n) = A(m,k) * B(n,k)^T: fp16 in and out, f16 accumulators, row-major, leading dimensions in elements.
// Method: cp.async into a ring of stages in shared memory, then ldmatrix and mma.sync.
//
// Launch, all divisions rounded up:
//   grid   (n / 256 / column_slices, m / 128, column_slices)
//          column_slices = (n rounded up to a multiple of 256) / (columns of a slice, which the caller chooses)
//   block  128
//   shared 73728 bytes, dynamic; above 48 KiB, so set cudaFuncAttributeMaxDynamicSharedMemorySize first
//
// Compile nvcc -std=c++17 --expt-relaxed-constexpr -arch=sm_80 -I CUTLASS/include, or for any later GPU
//
// Needs  m, n, k multiples of 128, 256, 32; pointers aligned to 16 bytes, leading dimensions multiples of 8

#include <cstdint>

#include <cuda_fp16.h>

#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>
#include <cute/tensor_impl.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>

namespace hgemm_sm80_multistage_f16_tn_128x256x32_s3_0ea8206fe5 {

using namespace cute;

// The CTA tile in elements, its MMA warps, and what each warp owns: kMmaM blocks of 16 rows, kMmaN blocks of 8 columns.
constexpr int kBM = 128, kBN = 256;
constexpr int kWarpsM = 2, kWarpsN = 2;
constexpr int kThreads = 32 * kWarpsM * kWarpsN;
constexpr int kMmaM = kBM / (16 * kWarpsM);
constexpr int kMmaN = kBN / (8 * kWarpsN);
constexpr int kVectorBits = 3, kVector = 1 << kVectorBits;  // halves in the 16 bytes that one copy instruction moves
static_assert(kThreads == 128 && kBM % (16 * kWarpsM) == 0 && kBN % (16 * kWarpsN) == 0);

// The ring: kStages k-tiles of A and of B, each a swizzled tile of 16-byte vectors.
constexpr int kBK = 32, kStages = 3;
constexpr int kBlocks = kBK / 16;  // MMA steps (k-blocks) in a k-tile
constexpr int kVectorsK = kBK / kVector;
// Records state swizzles of halves. They keep vectors whole, so as swizzles of vectors they have a smaller base.
using TileA = decltype(composition(Swizzle<3, 3 - kVectorBits, 3>{},
                                   Layout<Shape<Int<kBM>, Int<kVectorsK>>, Stride<Int<kVectorsK>, _1>>{}));
using TileB = decltype(composition(Swizzle<3, 3 - kVectorBits, 3>{},
                                   Layout<Shape<Int<kBN>, Int<kVectorsK>>, Stride<Int<kVectorsK>, _1>>{}));
constexpr int kStageA = cosize_v<TileA>, kStageB = cosize_v<TileB>;
static_assert(kStages * (kStageA + kStageB) * sizeof(uint128_t) == 73728);

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

// Copies one 16-byte vector by cp.async to a shared address if active.
CUTE_DEVICE void copy_vector(uint128_t const* source, uint32_t target, bool active) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.b32 p, %2, 0;\n"
               "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n"
               "}" :: "r"(target), "l"(source), "r"(int(active)));
}

// A thread's part of the copy of one operand's k-tile: the vectors (row + i * kLoadRows, col + j * Cols) of the tile.
template <class Tile, int Cols>
struct Copy {
  static constexpr int kRows = size<0>(Tile{}), kVectors = size<1>(Tile{});
  static constexpr int kLoadRows = kThreads / Cols;
  static constexpr int kStageBytes = cosize_v<Tile> * sizeof(uint128_t);
  static constexpr int kPeriod = 64;  // after this many vectors every swizzle of this kernel repeats
  static_assert(kThreads % Cols == 0 && kVectors % Cols == 0);

  uint32_t stages;  // shared address of the ring's first stage
  half const* source;  // this thread's first vector of the next k-tile
  int ld;
  int64_t step;  // elements from one k-tile to the next

  CUTE_DEVICE static int row() { return threadIdx.x / Cols; }
  CUTE_DEVICE static int col() { return threadIdx.x % Cols; }

  // Returns the byte offset of vector (i, j) in a stage. If a row step is a multiple of the swizzle's period, i adds a constant.
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
          copy_vector(&gX(i, j), stages + stage * kStageBytes + offset(i, j), active);
        }
      }
    }
    source += step;
  }
};

// Stores a pair of columns to shared memory.
CUTE_DEVICE void store_packet(uint32_t* target, uint32_t pair) { *target = pair; }

// Stores eight elements of a row of D.
CUTE_DEVICE void store_vector(Gemm const& gemm, int row, int col, uint4 value) {
  *reinterpret_cast<uint4*>(gemm.d + int64_t(row) * gemm.ldd + col) = value;
}

// Computes one CTA tile of D: rows from tile_m * kBM, columns from tile_n * kBN.
CUTE_DEVICE void compute_tile(Gemm const& gemm, int tile_m, int tile_n) {
  extern __shared__ uint128_t smem[];
  uint128_t* const sA = smem;
  uint128_t* const sB = smem + kStages * kStageA;
  const int warp_m = threadIdx.x / 32 % kWarpsM;
  const int warp_n = threadIdx.x / 32 / kWarpsM;
  const int lane = threadIdx.x % 32;

  constexpr int first = 0;
  const int tiles = (gemm.k + kBK - 1) / kBK;

  using CopyA = Copy<TileA, 4>;
  using CopyB = Copy<TileB, 4>;
  const int row_a = tile_m * kBM + CopyA::row(), col_a = first * kBK + CopyA::col() * kVector;
  const int row_b = tile_n * kBN + CopyB::row(), col_b = first * kBK + CopyB::col() * kVector;
  CopyA copy_a{cast_smem_ptr_to_uint(sA), gemm.a + int64_t(row_a) * gemm.lda + col_a, gemm.lda, kBK};
  CopyB copy_b{cast_smem_ptr_to_uint(sB), gemm.b + int64_t(row_b) * gemm.ldb + col_b, gemm.ldb, kBK};

  // Fragments for mma.sync, one per k-block of a k-tile. The loop below decides how many are in use at a time.
  Tensor tCrA = make_tensor<uint32_t>(Shape<_4, Int<kMmaM>, Int<kBlocks>>{});
  Tensor tCrB = make_tensor<uint32_t>(Shape<_2, Int<kMmaN>, Int<kBlocks>>{});
  TensorD tCrD;
  CUTE_UNROLL
  for (int i = 0; i < size(tCrD); ++i) {
    tCrD(i) = 0;
  }

  // The row of a tile whose address this lane passes to ldmatrix. Warps interleave: a warp's blocks are kWarpsM * 16 rows apart.
  const int row_lda = warp_m * 16 + lane % 16, col_lda = lane / 16;
  auto load_a_block = [&](int stage, int kb, int i) {
    SM75_U32x4_LDSM_N::copy(sA[((stage * kStageA + TileA{}(row_lda, col_lda)) ^ TileA{}(0, kb * 2)) +
                               i * (16 * kWarpsM * kVectorsK)],
                            tCrA(0, i, kb), tCrA(1, i, kb), tCrA(2, i, kb), tCrA(3, i, kb));
  };
  const int row_ldb = warp_n * 16 + lane % 8 + lane / 16 * 8, col_ldb = lane / 8 % 2;
  auto load_b_block = [&](int stage, int kb, int j) {
    SM75_U32x4_LDSM_N::copy(sB[((stage * kStageB + TileB{}(row_ldb, col_ldb)) ^ TileB{}(0, kb * 2)) +
                               j * (8 * kWarpsN * kVectorsK)],
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

  // Odd rows go through the columns backwards, so that the last B fragment of a row is the first one of the next row.
  auto multiply_row = [&](int kb, int i) {
    CUTE_UNROLL
    for (int step = 0; step < kMmaN; ++step) {
      const int j = i % 2 ? kMmaN - 1 - step : step;
      Mma::fma(tCrD(0, i, j), tCrD(1, i, j),
               tCrA(0, i, kb), tCrA(1, i, kb), tCrA(2, i, kb), tCrA(3, i, kb), tCrB(0, j, kb), tCrB(1, j, kb),
               tCrD(0, i, j), tCrD(1, i, j));
    }
  };
  auto multiply = [&](int kb) {
    CUTE_UNROLL
    for (int i = 0; i < kMmaM; ++i) {
      multiply_row(kb, i);
    }
  };

  // Fills all stages but one. Every step commits a group, with or without a copy, so that wait<kStages - 2> always means
  // that the next k-tile has arrived.
  int copied = 0, read = 0, write = 0;
  auto copy_next = [&] {
    if (copied < tiles) {
      copy_a(write, true);
      copy_b(write, true);
      ++copied;
      write = write + 1 == kStages ? 0 : write + 1;
    }
    cp_async_fence();
  };
  CUTE_UNROLL
  for (int stage = 0; stage < kStages - 1; ++stage) {
    copy_next();
  }

  // Fragments are loaded 1 k-block(s) before their MMAs, also from one k-tile to the next.
  cp_async_wait<kStages - 2>();
  __syncthreads();
  CUTE_UNROLL
  for (int kb = 0; kb < 1; ++kb) {
    load_a(read, kb);
    load_b(read, kb);
  }
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
      load_a(read, (kb + 1) % kBlocks);
      load_b(read, (kb + 1) % kBlocks);
      if (kb == 0) {
        copy_next();
      }
      multiply(kb);
    }
  }

  // MMA tiles pass through shared memory, kBatch of them at a time, by way of a temporary fragment in D's type.
  constexpr int kBatch = 4, kMmaTilesN = kMmaN / 2, kMmaTiles = kMmaM * kMmaTilesN;
  // One MMA tile of each warp is staged row by row and swizzled. It is written a pair at a time and read back as vectors.
  constexpr int kPairBits = 1;  // log2 of the halves in a pair
  using TileC = decltype(composition(Swizzle<3, 3 - kPairBits, 3>{},
                                     Layout<Shape<Int<16 * kWarpsM>, Int<8 * kWarpsN>>, Stride<Int<8 * kWarpsN>, _1>>{}));
  static_assert(kBatch * kThreads * sizeof(uint128_t) <= 73728);
  uint32_t* const sC = reinterpret_cast<uint32_t*>(smem);
  const int row_put = warp_m * 16 + lane / 4, pair_put = warp_n * 8 + lane % 4;
  // Stores this thread's four pairs of an MMA tile: rows row_put and row_put + 8, of 8 columns and of the next 8.
  auto put = [&](uint32_t* tile, auto&& value) {
    CUTE_UNROLL
    for (int e = 0; e < 4; e += 1) {
      store_packet(tile + (TileC{}(row_put, pair_put) ^ TileC{}(e % 2 * 8, e / 2 * 4)),
                   value(e));
    }
  };
  const int row_get = threadIdx.x / (2 * kWarpsN), vector_get = threadIdx.x % (2 * kWarpsN);
  auto get = [&](uint32_t const* tile) {
    return *reinterpret_cast<uint4 const*>(tile + TileC{}(row_get, vector_get * 4));
  };
  CUTE_UNROLL
  for (int begin = 0; begin < kMmaTiles; begin += kBatch) {
    Tensor tCrC = make_tensor<uint32_t>(Shape<_4, Int<kBatch>>{});
    CUTE_UNROLL
    for (int t = begin; t < min(begin + kBatch, kMmaTiles); ++t) {
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) {
        tCrC(e, t - begin) = pair(tCrD, e % 2, t / kMmaTilesN, t % kMmaTilesN * 2 + e / 2);
      }
    }
    __syncthreads();  // all warps have finished with the ring, or with the previous tiles
    CUTE_UNROLL
    for (int t = begin; t < min(begin + kBatch, kMmaTiles); ++t) {
      put(sC + (t - begin) * kThreads * 4, [&](int e) { return tCrC(e, t - begin); });
    }
    __syncthreads();
    CUTE_UNROLL
    for (int t = begin; t < min(begin + kBatch, kMmaTiles); ++t) {
      store_vector(gemm, tile_m * kBM + t / kMmaTilesN * 16 * kWarpsM + row_get,
                   tile_n * kBN + t % kMmaTilesN * 16 * kWarpsN + vector_get * kVector,
                   get(sC + (t - begin) * kThreads * 4));
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
hgemm_sm80_multistage_f16_tn_128x256x32_s3_0ea8206fe5(half const* a, int lda, half const* b, int ldb, half* d, int ldd,
    int m, int n, int k, float* /* partials */, unsigned* /* arrivals */) {
  const Gemm gemm{a, lda, b, ldb, d, ldd, m, n, k};
  // Each index of grid.z has a slice of the columns, so that CTAs that run together share columns of B in the L2.
  const int tile_n = blockIdx.z * gridDim.x + blockIdx.x;
  if (tile_n * kBN >= gemm.n) {
    return;
  }
  compute_tile(gemm, blockIdx.y, tile_n);
}

}  // namespace hgemm_sm80_multistage_f16_tn_128x256x32_s3_0ea8206fe5
