// D(m,n) = A(m,k) * B(n,k)^T: fp16 in and out, f32 accumulators, row-major, leading dimensions in elements.
// Method: cp.async of all operands at once, mma.sync as they arrive.
//
// Launch, all divisions rounded up:
//   grid    ((m / 32) * (n / 64) * 2, 1, 1)
//   cluster (2, 1, 1)
//   block   128
//   shared  57344 bytes, dynamic; above 48 KiB, so set cudaFuncAttributeMaxDynamicSharedMemorySize first
//
// Compile nvcc -std=c++17 --expt-relaxed-constexpr -gencode arch=compute_90a,code=sm_90a -I CUTLASS/include
//
// Needs   k a multiple of 8, at most 512; A and B aligned to 16 bytes, lda and ldb multiples of 8

#include <cstdint>

#include <cuda_fp16.h>

#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>
#include <cute/tensor_impl.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>

namespace hgemm_sm90_small_f32_tn_32x64_c4_50c31b7042 {

using namespace cute;

// The CTA tile in elements, its MMA warps, and what each warp owns: kMmaM blocks of 16 rows, kMmaN blocks of 8 columns.
constexpr int kBM = 32, kBN = 64;
constexpr int kWarpsM = 2, kWarpsN = 2;
constexpr int kThreads = 32 * kWarpsM * kWarpsN;
constexpr int kMmaM = kBM / (16 * kWarpsM);
constexpr int kMmaN = kBN / (8 * kWarpsN);
constexpr int kVectorBits = 3, kVector = 1 << kVectorBits;  // halves in the 16 bytes that one copy instruction moves
static_assert(kThreads == 128 && kBM % (16 * kWarpsM) == 0 && kBN % (16 * kWarpsN) == 0);
constexpr int kSplitK = 2;  // CTAs of a cluster, which share the k of a tile

// The ring: kStages k-tiles of A and of B, each a swizzled tile of 16-byte vectors.
constexpr int kBK = 64, kStages = 4;
constexpr int kBlocks = kBK / 16;  // MMA steps (k-blocks) in a k-tile
constexpr int kVectorsK = kBK / kVector;
// Records state swizzles of halves. They keep vectors whole, so as swizzles of vectors they have a smaller base.
using TileA = decltype(composition(Swizzle<3, 3 - kVectorBits, 3>{},
                                   Layout<Shape<Int<kBM>, Int<kVectorsK>>, Stride<Int<kVectorsK>, _1>>{}));
using TileB = decltype(composition(Swizzle<3, 3 - kVectorBits, 3>{},
                                   Layout<Shape<Int<kBN>, Int<kVectorsK>>, Stride<Int<kVectorsK>, _1>>{}));
constexpr int kStageA = cosize_v<TileA>, kStageB = cosize_v<TileB>;
static_assert(kStages * (kStageA + kStageB) * sizeof(uint128_t) == 49152);

// Accumulators of mma.sync.m16n8k16: two floats for row lane / 4, two more for the row 8 below.
using Mma = SM80_16x8x16_F32F16F16F32_TN;
using TensorD = decltype(make_tensor<float>(Shape<_4, Int<kMmaM>, Int<kMmaN>>{}));

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

CUTE_DEVICE uint32_t smem_address(void const* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Waits for the previous kernel of the stream if the launch lets the two overlap.
CUTE_DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel start its prologue once every CTA has called it. The next kernel waits for the end of this one, which comes
// after the end of the previous one, so a call before this kernel's own wait is correct too.
CUTE_DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

CUTE_DEVICE void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

// Arrives once, and adds this many bytes of asynchronous copies to what the phase waits for.
CUTE_DEVICE void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

CUTE_DEVICE void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Returns when the phase of this parity is complete.
CUTE_DEVICE void wait(uint32_t barrier, uint32_t parity) {
  uint32_t over;
  do {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}" : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
  } while (!over);
}

CUTE_DEVICE int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Returns the address of the same variable in the CTA of this rank of the cluster.
CUTE_DEVICE uint32_t at_rank(uint32_t address, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// Relaxed is enough: the fence before it publishes the mbarriers, and the CTAs share no other memory at this point.
CUTE_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
CUTE_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Copies the first `bytes` of a 16-byte vector by cp.async to a shared address if active, and fills the rest with zeros.
CUTE_DEVICE void copy_vector(uint128_t const* source, uint32_t target, bool active, int bytes) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.b32 p, %2, 0;\n"
               "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %3;\n"
               "}" :: "r"(target), "l"(source), "r"(int(active)), "r"(bytes));
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
  int rows, cols;  // valid rows, and valid elements in a row, counted from this thread's first vector
  int row_step, col_step;  // by how much each k-tile reduces them
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

// Stores two neighbours in a row of D; one by one at the right edge and if the address is not aligned.
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

// A thread's vectors of four floats of a tile are distributed to the CTAs of the cluster round robin, kTogether at a time. A CTA sums
// its vectors over all slices.
constexpr int kVectors = kMmaM * kMmaN, kSharingThreads = kThreads, kTogether = 1;
constexpr int kRounds = kVectors / (kTogether * kSplitK), kRest = kVectors / kTogether % kSplitK;
CUTE_DEVICE constexpr int vectors_of(int rank) { return (kRounds + (rank < kRest)) * kTogether; }
CUTE_DEVICE constexpr int vector_at(int rank, int i) { return (i / kTogether * kSplitK + rank) * kTogether + i % kTogether; }

// Called by one thread. The mbarrier's phase completes with the last byte of this CTA's vectors.
CUTE_DEVICE void expect_sums(uint32_t arrived, int rank) {
  init_barrier(arrived, 1);
  expect_bytes(arrived, kSplitK * vectors_of(rank) * kSharingThreads * 16);
}

// Stores a vector to the shared memory of a CTA of the cluster. Its bytes count on the mbarrier there, so no fence is needed, and the
// CTA that stores may exit.
CUTE_DEVICE void send(uint32_t target, uint32_t barrier, float4 vector) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], { %1, %2, %3, %4 }, [%5];"
               :: "r"(target), "f"(vector.x), "f"(vector.y), "f"(vector.z), "f"(vector.w), "r"(barrier) : "memory");
}

// Returns the sum of a vector over the slices, in the order of ranks. Each slice has `count` vectors per thread.
CUTE_DEVICE float4 sum_over_slices(float4 const* from, int count) {
  float4 part[kSplitK];
  CUTE_UNROLL
  for (int slice = 0; slice < kSplitK; ++slice) {
    part[slice] = from[slice * count * kSharingThreads];
  }
  float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
  CUTE_UNROLL
  for (int slice = 0; slice < kSplitK; ++slice) {
    sum.x += part[slice].x;
    sum.y += part[slice].y;
    sum.z += part[slice].z;
    sum.w += part[slice].w;
  }
  return sum;
}

// Returns the accumulators of MMA (i, j) as floats.
CUTE_DEVICE float4 load_floats(TensorD const& tCrD, int i, int j) {
  return make_float4(tCrD(0, i, j), tCrD(1, i, j), tCrD(2, i, j), tCrD(3, i, j));
}

// Calls body(Int<0>{}), body(Int<1>{}) and so on, for every index of a sequence.
template <int... I, class Body>
CUTE_DEVICE void for_each_index(int_sequence<I...>, Body&& body) {
  (body(Int<I>{}), ...);
}

// Computes one CTA tile of D: rows from tile_m * kBM, columns from tile_n * kBN, slice `slice` of k.
CUTE_DEVICE void compute_tile(Gemm const& gemm, int tile_m, int tile_n, int slice) {
  extern __shared__ uint128_t smem[];
  uint128_t* const sA = smem;
  uint128_t* const sB = smem + kStages * kStageA;
  const int warp_m = threadIdx.x / 32 % kWarpsM;
  const int warp_n = threadIdx.x / 32 / kWarpsM;
  const int lane = threadIdx.x % 32;
  __shared__ __align__(8) uint64_t sum_barrier;
  const uint32_t arrived = smem_address(&sum_barrier);
  if (threadIdx.x == 0) {
    expect_sums(arrived, slice);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_arrive();

  // The k-tiles of this slice are [first, first + tiles).
  const int total = (gemm.k + kBK - 1) / kBK;
  const int first = int(int64_t(total) * slice / kSplitK);
  const int tiles = int(int64_t(total) * (slice + 1) / kSplitK) - first;

  using CopyA = Copy<TileA, 8>;
  using CopyB = Copy<TileB, 8>;
  const int row_a = tile_m * kBM + CopyA::row(), col_a = first * kBK + CopyA::col() * kVector;
  const int row_b = tile_n * kBN + CopyB::row(), col_b = first * kBK + CopyB::col() * kVector;
  CopyA copy_a{cast_smem_ptr_to_uint(sA), gemm.a + int64_t(row_a) * gemm.lda + col_a, gemm.lda, kBK, gemm.m - row_a, gemm.k - col_a, 0, kBK};
  CopyB copy_b{cast_smem_ptr_to_uint(sB), gemm.b + int64_t(row_b) * gemm.ldb + col_b, gemm.ldb, kBK, gemm.n - row_b, gemm.k - col_b, 0, kBK};

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
    SM75_U32x4_LDSM_N::copy(sA[stage * kStageA + (TileA{}(row_lda, col_lda) ^ TileA{}(0, kb * 2)) +
                               i * (16 * kWarpsM * kVectorsK)],
                            tCrA(0, i, kb), tCrA(1, i, kb), tCrA(2, i, kb), tCrA(3, i, kb));
  };
  const int row_ldb = warp_n * 16 + lane % 8 + lane / 16 * 8, col_ldb = lane / 8 % 2;
  auto load_b_block = [&](int stage, int kb, int j) {
    SM75_U32x4_LDSM_N::copy(sB[stage * kStageB + (TileB{}(row_ldb, col_ldb) ^ TileB{}(0, kb * 2)) +
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
      Mma::fma(tCrD(0, i, j), tCrD(1, i, j), tCrD(2, i, j), tCrD(3, i, j),
               tCrA(0, i, kb), tCrA(1, i, kb), tCrA(2, i, kb), tCrA(3, i, kb), tCrB(0, j, kb), tCrB(1, j, kb),
               tCrD(0, i, j), tCrD(1, i, j), tCrD(2, i, j), tCrD(3, i, j));
    }
  };
  auto multiply = [&](int kb) {
    CUTE_UNROLL
    for (int i = 0; i < kMmaM; ++i) {
      multiply_row(kb, i);
    }
  };

  let_next_kernel_start();
  wait_for_previous_kernel();
  // All chunks are requested at once, and each is multiplied as soon as it has arrived.
  CUTE_UNROLL
  for (int chunk = 0; chunk < kStages; ++chunk) {
    copy_a(chunk, chunk < tiles);
    copy_b(chunk, chunk < tiles);
    cp_async_fence();
  }
  for_each_index(make_int_sequence<kStages>{}, [&](auto chunk) {
    if (chunk < tiles) {
      cp_async_wait<kStages - 1 - chunk>();
      __syncthreads();
      CUTE_UNROLL
      for (int kb = 0; kb < kBlocks; ++kb) {
        load_a(chunk, kb);
        load_b(chunk, kb);
        multiply(kb);
      }
    }
  });

  // Stores MMAs after summing them over the cluster, in the order of ranks; each CTA stores a part.
  auto store_mma = [&](int i, int j, uint32_t upper, uint32_t lower) {
    const int row = tile_m * kBM + (i * kWarpsM + warp_m) * 16 + lane / 4;
    const int col = tile_n * kBN + (j / 2 * kWarpsN + warp_n) * 16 + j % 2 * 8 + lane % 4 * 2;
    store_pair(gemm, row, col, upper);
    store_pair(gemm, row + 8, col, lower);
  };
  // After the operands, the shared memory of every CTA has room for the parts of its vectors.
  uint128_t* const sums = smem + kStages * (kStageA + kStageB);
  static_assert(kStages * (kStageA + kStageB) * 16 + kSplitK * vectors_of(0) * kThreads * 16 == 57344);
  cluster_wait();
  CUTE_UNROLL
  for (int to = 0; to < kSplitK; ++to) {
    const uint32_t target = at_rank(smem_address(sums), to) + (slice * vectors_of(to) * kThreads + threadIdx.x) * 16;
    CUTE_UNROLL
    for (int i = 0; i < vectors_of(to); ++i) {
      send(target + i * kThreads * 16, at_rank(arrived, to), load_floats(tCrD, vector_at(to, i) / kMmaN, vector_at(to, i) % kMmaN));
    }
  }
  wait(arrived, 0);
  const int count = vectors_of(slice);
  float4 const* const parts = reinterpret_cast<float4 const*>(sums) + threadIdx.x;
  CUTE_UNROLL
  for (int i = 0; i < vectors_of(0); i += kTogether) {
    if (i < count) {
      const int mma = vector_at(slice, i);
      const float4 sum = sum_over_slices(parts + i * kThreads, count);
      const half2 upper = __floats2half2_rn(sum.x, sum.y), lower = __floats2half2_rn(sum.z, sum.w);
      store_mma(mma / kMmaN, mma % kMmaN, reinterpret_cast<uint32_t const&>(upper), reinterpret_cast<uint32_t const&>(lower));
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
hgemm_sm90_small_f32_tn_32x64_c4_50c31b7042(half const* a, int lda, half const* b, int ldb, half* d, int ldd,
    int m, int n, int k, float* /* partials */, unsigned* /* arrivals */) {
  const Gemm gemm{a, lda, b, ldb, d, ldd, m, n, k};
  const int slice = cluster_rank();
  const int tiles_n = (gemm.n + kBN - 1) / kBN, tile = blockIdx.x / kSplitK;
  compute_tile(gemm, tile / tiles_n, tile % tiles_n, slice);
}

}  // namespace hgemm_sm90_small_f32_tn_32x64_c4_50c31b7042
