// D(m,n) = A(m,k) * B(n,k)^T: fp16 in and out, f32 accumulators, row-major, leading dimensions in elements.
// In fp32, before the one rounding to D's type: silu(A B + bias of a column (n)).
// By a ring of TMA stages that one warp fills, tcgen05.mma of one thread into tensor memory, four warps that store.
//
// Launch, all divisions rounded up:
//   grid    as many clusters as fit on the GPU, at most one per cluster tile of 32 x 128 * 3
//   cluster (1, 1, 1)
//   block   256
//   shared  82032 bytes, dynamic; above 48 KiB, so set cudaFuncAttributeMaxDynamicSharedMemorySize first
//
// Tensor maps of fp16, as (columns, rows) of a box; the swizzle is as wide as its columns, out of bounds is zero
//   A       64 x 32 of (k, m)
//   B       64 x 128 of (k, n)
//   D       is not read
//
// Scratch, of all tiles in whole clusters
//   partials   tiles * 3 tiles of 32 x 128 floats
//   arrivals   tiles counters, zero before the launch
//
// Needs   A and B aligned to 16 bytes, their leading dimensions multiples of 8

#include <cstdint>

#include <cuda_fp16.h>

#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>

namespace hgemm_sm100_tcgen05_f32_tn_bias_n_silu_32x128x64_s4_9e3922971d {

using namespace cute;

// CTA tile in elements, the ring of k-tiles, the CTAs of a cluster that share operands.
constexpr int kBM = 32, kBN = 128, kBK = 64;
constexpr int kStages = 4, kSplitK = 3;
constexpr int kClusterM = 1, kClusterN = 1, kClusterCtas = 1;
// Accumulators of so many tiles in tensor memory, and the columns of it that a CTA takes.
constexpr int kTiles = 2, kColumns = 64;
// Warps that load, multiply, allocate and rest; then one warpgroup that stores.
constexpr int kThreads = 256, kConsumers = 1, kSharers = 1;

// What is read beside A and B, as the kernel was handed it. C (m,n) by rows.
struct Fused {
  half const* bias;
  half const* c;
  int ldc;
  float alpha, beta;
};

// A CUtensorMap, as the driver encodes it.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// The problem, as the kernel was handed it.
struct Gemm {
  TensorMap const *map_a, *map_b, *map_d;
  half* d;
  int ldd;
  int m, n;
  int k;
  int along_n;  // raster: consecutive tiles go along n in bands of `band` tiles of m, or the other way round
  int band;
  uint64_t policy_a, policy_b;  // L2 eviction priorities of loads
  float* partials;
  unsigned* arrivals;

  Fused fused;
};

// One lane of a warp, always the same one. TMA in a branch on it is issued once, not lane by lane.
CUTE_DEVICE bool elect_lane() {
  uint32_t elected;
  asm volatile("{\n"
               ".reg .pred p;\n"
               "elect.sync _|p, 0xffffffff;\n"
               "selp.u32 %0, 1, 0, p;\n"
               "}" : "=r"(elected));
  return elected;
}

// What all lanes of a warp agree on, where the compiler sees that they do: it stays in uniform registers, of which tcgen05.mma takes
// its descriptors.
CUTE_DEVICE uint32_t uniform(uint32_t value) { return __shfl_sync(0xffffffff, value, 0); }

CUTE_DEVICE uint32_t smem_address(void const* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Waits for the kernel before this one in the stream, where the launch lets the two overlap.
CUTE_DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel start its prologue once every CTA has come here. It waits for the end of this one, which comes after
// the end of the one before: so this is right even before this kernel's own wait.
CUTE_DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

CUTE_DEVICE void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

// One arrival, and that so many bytes are on their way.
CUTE_DEVICE void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

CUTE_DEVICE void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Until the phase of this parity is over.
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

// A box at (column, row) of a matrix to shared memory; its bytes count on the mbarrier. Where several CTAs share it, to
// the same place in all CTAs of the mask, and on the mbarrier of each.
template <int Sharing>
CUTE_DEVICE void load_box(TensorMap const* map, uint32_t target, uint32_t barrier, int col, int row, uint64_t policy,
                          uint16_t ctas) {
  if constexpr (Sharing == 1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, { %2, %3 }], [%4], %5;"
                 :: "r"(target), "l"(map), "r"(col), "r"(row), "r"(barrier), "l"(policy) : "memory");
  } else {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 ".L2::cache_hint [%0], [%1, { %2, %3 }], [%4], %5, %6;"
                 :: "r"(target), "l"(map), "r"(col), "r"(row), "r"(barrier), "h"(ctas), "l"(policy) : "memory");
  }
}

CUTE_DEVICE void prefetch_map(TensorMap const* map) { asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory"); }

// A tile whose rows run along k: chunks of 64 k, each of Extent rows of 128 swizzled bytes.
template <int Extent>
struct AlongK {
  static constexpr int kWidth = 64, kChunkBytes = Extent * kWidth * 2;

  // Bytes from the tile's first to a row's k-block of 16; rows by 8.
  CUTE_DEVICE static constexpr int offset(int row, int block) {
    return row * kWidth * 2 + block / 4 * kChunkBytes + block % 4 * 32;
  }

  // The part of the tile that this CTA brings for the Parts that share it, in Boxes of rows.
  template <int Parts, int Boxes>
  CUTE_DEVICE static void load(TensorMap const* map, uint32_t tile, uint32_t barrier, int row, int k, uint64_t policy,
                               int part, uint16_t ctas) {
    constexpr int kBoxRows = Extent / Parts / Boxes;
    CUTE_UNROLL
    for (int chunk = 0; chunk < kBK / kWidth; ++chunk) {
      CUTE_UNROLL
      for (int box = 0; box < Boxes; ++box) {
        const int first = (part * Boxes + box) * kBoxRows;
        load_box<Parts>(map, tile + offset(first, chunk * 4), barrier, k + chunk * kWidth, row + first, policy, ctas);
      }
    }
  }
};

using TileA = AlongK<kBM>;
using TileB = AlongK<kBN>;
constexpr int kBytesA = kBM * kBK * 2, kBytesB = kBN * kBK * 2, kStageBytes = kBytesA + kBytesB;

// D^T = B^T A^T: the rows of the instructions are columns of D.
using TileX = TileB;
using TileY = TileA;
constexpr int kRows = kBN, kCols = kBM;

// The instruction descriptor: types of D, X and Y, whether X and Y lie across k, columns, rows.
constexpr uint32_t kXAcross = 0, kYAcross = 0;
constexpr uint32_t kInstruction = 1u << 4 | 0u << 7 | 0u << 10 | kXAcross << 15 | kYAcross << 16 | kCols / 8u << 17 | kRows / 16u << 24;
static_assert(kRows == 128 && kCols % 16 == 0 && kCols <= 256);

// Sums in tensor memory = x * y + (accumulate ? sums : 0), 16 of k. Operands are descriptors of tiles in shared memory;
// asynchronous.
CUTE_DEVICE void mma(uint32_t sums, uint64_t x, uint64_t y, bool accumulate) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.b32 p, %4, 0;\n"
               "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n"
               "}" :: "r"(sums), "l"(x), "l"(y), "r"(kInstruction), "r"(int(accumulate)) : "memory");
}

// Arrives when this thread's multiplications so far are done.
CUTE_DEVICE void commit(uint32_t barrier, uint16_t) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" :: "r"(barrier) : "memory");
}

// What tcgen05.mma is told of an operand. The low word: bytes between chunks of columns, and the low 18 bits of the address; in
// a cluster the rank of the CTA lies above them.
CUTE_DEVICE uint32_t descriptor_low(uint32_t address, int chunk_bytes) { return chunk_bytes >> 4 << 16 | (address & 0x3ffff) >> 4; }

// The high word: swizzle mode, a constant bit, bytes between blocks of 8 rows.
template <int Width>
CUTE_DEVICE uint64_t descriptor(uint32_t low) {
  constexpr uint64_t kMode = Width == 64 ? 2 : Width == 32 ? 4 : 6, kBlockBytes = 8 * Width * 2;
  return (kMode << 29 | 1 << 14 | kBlockBytes >> 4) << 32 | low;
}

// Columns of tensor memory, by a warp; their address goes to shared memory. No more are asked for.
CUTE_DEVICE void allocate_columns(uint32_t target) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" :: "r"(target), "n"(kColumns) : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}

// By the same warp, when nobody uses them any more.
CUTE_DEVICE void free_columns(uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" :: "r"(columns), "n"(kColumns) : "memory");
}

CUTE_DEVICE uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// Orders this thread's earlier use of tensor memory before the arrival that follows, and its later use behind the wait before.
// Neither waits for anything.
CUTE_DEVICE void fence_before_arrival() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
CUTE_DEVICE void fence_behind_wait() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// A warp's share of kAtomN columns: its 32 lanes of tensor memory are rows; of 16 rows and 8 columns a lane has two neighbours in
// row lane / 4, and two more in the row 8 below.
using Accumulator = float;  // a register of one of them
constexpr int kAtomN = 32, kAtomRegisters = 16;
constexpr int kAtomsM = 2, kAtomsN = 1, kChunks = kCols / kAtomN;
constexpr int kShareRows = kRows, kShareCols = kCols;
using Accumulators = Accumulator[kAtomsM][kAtomsN][kAtomRegisters];

// Columns of the accumulators at an address of tensor memory, all lanes' when it returns.
CUTE_DEVICE void load_sums(uint32_t at, Accumulators& tCrD) {
  asm volatile(
      "tcgen05.ld.sync.aligned.16x256b.x4.b32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, [%32];\n"
      "tcgen05.ld.sync.aligned.16x256b.x4.b32 {"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, [%33];\n"
      "tcgen05.wait::ld.sync.aligned;"
      : "=f"(tCrD[0][0][0]), "=f"(tCrD[0][0][1]), "=f"(tCrD[0][0][2]), "=f"(tCrD[0][0][3]), "=f"(tCrD[0][0][4]), "=f"(tCrD[0][0][5]), "=f"(tCrD[0][0][6]), "=f"(tCrD[0][0][7]),
        "=f"(tCrD[0][0][8]), "=f"(tCrD[0][0][9]), "=f"(tCrD[0][0][10]), "=f"(tCrD[0][0][11]), "=f"(tCrD[0][0][12]), "=f"(tCrD[0][0][13]), "=f"(tCrD[0][0][14]), "=f"(tCrD[0][0][15]),
        "=f"(tCrD[1][0][0]), "=f"(tCrD[1][0][1]), "=f"(tCrD[1][0][2]), "=f"(tCrD[1][0][3]), "=f"(tCrD[1][0][4]), "=f"(tCrD[1][0][5]), "=f"(tCrD[1][0][6]), "=f"(tCrD[1][0][7]),
        "=f"(tCrD[1][0][8]), "=f"(tCrD[1][0][9]), "=f"(tCrD[1][0][10]), "=f"(tCrD[1][0][11]), "=f"(tCrD[1][0][12]), "=f"(tCrD[1][0][13]), "=f"(tCrD[1][0][14]), "=f"(tCrD[1][0][15])
      : "r"(at), "r"(at + (16 << 16)) : "memory");
}

// Shared memory, as byte addresses: the ring, the epilogue's buffers, mbarriers, the address of the columns of tensor memory.
struct Shared {
  uint32_t base;
  CUTE_DEVICE uint32_t stage(int i) const { return base + i * kStageBytes; }
  CUTE_DEVICE uint32_t buffers(int warp) const { return stage(kStages) + warp * 0; }
  CUTE_DEVICE uint32_t full(int i) const { return stage(kStages) + 0 + i * 16; }
  CUTE_DEVICE uint32_t empty(int i) const { return full(i) + 8; }
  CUTE_DEVICE uint32_t summed(int i) const { return full(kStages + i); }
  CUTE_DEVICE uint32_t stored(int i) const { return full(kStages + i) + 8; }
  CUTE_DEVICE uint32_t columns() const { return full(kStages + 2); }
};
static_assert(kStages * kStageBytes + 0 + kStages * 16 + 48 == 82032);
extern __shared__ __align__(1024) unsigned char smem[];

// A place among Count stages or tiles, and the parity of its phase.
template <int Count>
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  CUTE_DEVICE void advance() {
    if (++stage == Count) {
      stage = 0;
      parity ^= 1;
    }
  }
};
using Place = Turn<kStages>;

// A tile of D at (row, col).
struct Tile {
  int row, col;
};

// What a CTA does at a time: a tile, steps [first, last) of k.
struct Work : Tile {
  int first, last;
  int64_t part;  // the place of its partial sum among all, in tiles; negative for a whole tile
  int tile;      // the place of its counter: which of the tiles that are kept in parts
};

// Tiles of clusters along m and n.
CUTE_DEVICE int clusters_m(Gemm const& gemm) { return (gemm.m + kBM * kClusterM - 1) / (kBM * kClusterM); }
CUTE_DEVICE int clusters_n(Gemm const& gemm) { return (gemm.n + kBN * kClusterN - 1) / (kBN * kClusterN); }
CUTE_DEVICE int steps_of(Gemm const& gemm) { return (gemm.k + kBK - 1) / kBK; }

// A CTA's part of a cluster's tile. Tiles go along one axis in bands of a few tiles of the other, so that what runs
// together shares operands in L2.
CUTE_DEVICE Tile tile_of(Gemm const& gemm, int tile, int rank) {
  const int along = gemm.along_n ? clusters_n(gemm) : clusters_m(gemm);
  const int across = gemm.along_n ? clusters_m(gemm) : clusters_n(gemm);
  const int band = tile / (along * gemm.band) * gemm.band;
  const int in_band = tile - band * along;
  const int width = min(gemm.band, across - band);
  const int at_along = in_band / width, at_across = band + in_band % width;
  const int cluster_m = gemm.along_n ? at_across : at_along, cluster_n = gemm.along_n ? at_along : at_across;
  return {(cluster_m * kClusterM + rank % kClusterM) * kBM, (cluster_n * kClusterN + rank / kClusterM) * kBN};
}

CUTE_DEVICE int work_items(Gemm const& gemm) { return clusters_m(gemm) * clusters_n(gemm) * kSplitK; }

CUTE_DEVICE Work work_of(Gemm const& gemm, int item, int rank) {
  const int64_t steps = steps_of(gemm);
  const int slice = item % kSplitK, tile = item / kSplitK * kClusterCtas + rank;
  return {tile_of(gemm, item / kSplitK, rank), int(steps * slice / kSplitK), int(steps * (slice + 1) / kSplitK),
          int64_t(tile) * kSplitK + slice, tile};
}

// A tile whose partial sums are `count` tiles from `first` on, in the order of k.
struct Parts : Tile {
  int64_t first;
  int count;
};

CUTE_DEVICE int tiles_in_parts(Gemm const& gemm) { return clusters_m(gemm) * clusters_n(gemm) * kClusterCtas; }

CUTE_DEVICE Parts parts_of(Gemm const& gemm, int tile) {
  return {tile_of(gemm, tile / kClusterCtas, tile % kClusterCtas), int64_t(tile) * kSplitK, kSplitK};
}

// A lane's sums: those of 8 columns of a load lie fused_x(i) rows below and fused_y(j) columns behind the first ones.
constexpr int kFusedX = kAtomsM, kFusedY = kAtomsN * (kAtomN / 8);
CUTE_DEVICE constexpr int fused_x(int i) { return i * 16; }
CUTE_DEVICE constexpr int fused_y(int j) { return j * 8; }

CUTE_DEVICE float4 sums(Accumulators const& tCrD, int i, int j) {
  Accumulator const (&d)[kAtomRegisters] = tCrD[i][j / (kAtomN / 8)];
  const int columns = j % (kAtomN / 8);
  return make_float4(d[columns * 4], d[columns * 4 + 1], d[columns * 4 + 2], d[columns * 4 + 3]);
}
CUTE_DEVICE void set_sums(Accumulators& tCrD, int i, int j, float4 sum) {
  Accumulator (&d)[kAtomRegisters] = tCrD[i][j / (kAtomN / 8)];
  const int first = j % (kAtomN / 8) * 4;
  d[first + 0] = sum.x;
  d[first + 1] = sum.y;
  d[first + 2] = sum.z;
  d[first + 3] = sum.w;
}

// 1 / (1 + 2^power)
CUTE_DEVICE float inverse_of_one_more(float power) {
  float exponential, result;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(power));
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponential + 1.0f));
  return result;
}

// x / (1 + exp(-x))
CUTE_DEVICE float activation(float value) { return value * inverse_of_one_more(value * -1.44269504f); }

// The bias of elements `at` and `at` + 8.
CUTE_DEVICE half2 load_bias(Gemm const& gemm, int at) {
  return half2(__ldg(gemm.fused.bias + min(at, gemm.n - 1)), __ldg(gemm.fused.bias + min(at + 8, gemm.n - 1)));
}

// The bias of all sums of a lane, in a warp whose first is that of element `at`.
struct Biases {
  half2 pairs[kFusedX];
};

CUTE_DEVICE Biases load_biases(Gemm const& gemm, int at) {
  Biases biases;
  CUTE_UNROLL
  for (int i = 0; i < kFusedX; ++i) {
    biases.pairs[i] = load_bias(gemm, at + threadIdx.x % 32 / 4 + fused_x(i));
  }
  return biases;
}

// Four sums with all that is added to them.
CUTE_DEVICE float4 added(Gemm const& gemm, float4 sum, float2 bias) {
  return make_float4(sum.x + bias.x, sum.y + bias.x,
                     sum.z + bias.y, sum.w + bias.y);
}

// The same as it is stored; the first is at (row, col) of the product.
CUTE_DEVICE float4 finished(Gemm const& gemm, int row, int col, float4 z) {
  return make_float4(activation(z.x), activation(z.y), activation(z.z), activation(z.w));
}

// All that is fused with all sums of a lane, in place; the first is at (row, col) of the product.
CUTE_DEVICE void fuse(Gemm const& gemm, int row, int col, Biases const& biases, Accumulators& tCrD) {
  CUTE_UNROLL
  for (int begin = 0; begin < kFusedY; begin += 4) {

    CUTE_UNROLL
    for (int i = 0; i < kFusedX; ++i) {
      if (gemm.ldd == 0) {  // never: sums from here on wait for those before, or registers run short
        break;
      }

      auto z = [&](int j) { return added(gemm, sums(tCrD, i, j), __half22float2(biases.pairs[i])); };
      CUTE_UNROLL
      for (int j = begin; j < min(begin + 4, kFusedY); ++j) {
        set_sums(tCrD, i, j, finished(gemm, row + fused_y(j), col + fused_x(i), z(j)));
      }
    }
  }
}

// The same of a sum by itself, whose first element is at (row, col).
CUTE_DEVICE float4 fused_at(Gemm const& gemm, int row, int col, float4 sum) {
  auto z = [&](int col, float4 sum) { return added(gemm, sum, __half22float2(load_bias(gemm, col))); };
  return finished(gemm, row, col, z(col, sum));
}

// All that is fused with a warpgroup's share of a tile of D at (row, col).
CUTE_DEVICE void fuse_share(Gemm const& gemm, int row, int col, int share_row, int share_col, Biases const& biases, Accumulators& tCrD) {
  const int x = share_row + threadIdx.x / 32 % 4 * 32 + threadIdx.x % 32 / 4, y = share_col + threadIdx.x % 4 * 2;
  fuse(gemm, row + y, col + x, biases, tCrD);
}

CUTE_DEVICE float4 fused_vector(Gemm const& gemm, int row, int col, int share_row, int share_col, int vector, float4 sum) {
  const int x = share_row + threadIdx.x / 32 % 4 * 32 + threadIdx.x % 32 / 4, y = share_col + threadIdx.x % 4 * 2;
  return fused_at(gemm, row + y + fused_y(vector % (kChunks * kFusedY)), col + x + fused_x(vector / (kChunks * kFusedY)), sum);
}

// Two neighbours of one row, of the accumulators of 8 columns: e = 0 in row lane / 4, e = 1 in the row 8 below.
CUTE_DEVICE uint32_t pair(Accumulator const (&d)[kAtomRegisters], int columns, int e) {
  const half2 rounded = __floats2half2_rn(d[columns * 4 + e * 2], d[columns * 4 + e * 2 + 1]);
  return reinterpret_cast<uint32_t const&>(rounded);
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

// A warp's 16 rows and 8 columns of the load, which are columns and rows of D, for the tile of D at (row, col).
CUTE_DEVICE void store_columns(Gemm const& gemm, int row, int col, int x, int y, uint32_t upper, uint32_t lower) {
  const int lane = threadIdx.x % 32;
  x += threadIdx.x / 32 % 4 * 32;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(upper));
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(lower));
  store_pair(gemm, row + y + lane / 4, col + x + lane % 4 * 2, upper);
  store_pair(gemm, row + y + lane / 4, col + x + 8 + lane % 4 * 2, lower);
}

// The accumulators of 8 columns, 4 of a lane, as floats; and back.
CUTE_DEVICE float4 load_floats(Accumulator const (&d)[kAtomRegisters], int columns) {
  return make_float4(d[columns * 4], d[columns * 4 + 1], d[columns * 4 + 2], d[columns * 4 + 3]);
}

// Vectors of four floats that a thread contributes to a tile, and threads that share a tile.
constexpr int kVectors = kAtomsM * kChunks * (kAtomN / 8), kSharingThreads = 128 * kSharers;

CUTE_DEVICE int sharing_group() { return (threadIdx.x - 128) / kSharingThreads; }
CUTE_DEVICE int sharing_thread() { return (threadIdx.x - 128) % kSharingThreads; }
CUTE_DEVICE void meet_sharers() {
  asm volatile("bar.sync %0, %1;" :: "r"(1 + sharing_group()), "n"(kSharingThreads) : "memory");
}

// This thread's first vector of a partial sum; its others lie kSharingThreads apart.
CUTE_DEVICE float4* partial_sum(Gemm const& gemm, int64_t part) {
  return reinterpret_cast<float4*>(gemm.partials) + part * kVectors * kSharingThreads + sharing_thread();
}

// Keeps some columns of the sum over some steps of a tile in device memory.
CUTE_DEVICE void keep_columns(Gemm const& gemm, Work const& work, int chunk, Accumulators const& tCrD) {
  float4* const to = partial_sum(gemm, work.part);
  CUTE_UNROLL
  for (int vector = 0; vector < kAtomsM * (kAtomN / 8); ++vector) {
    const int columns = vector % (kAtomN / 8), i = vector / (kAtomN / 8);
    to[((i * kChunks + chunk) * (kAtomN / 8) + columns) * kSharingThreads] = load_floats(tCrD[i][0], columns);
  }
}

// Counts a partial sum of which all columns are kept.
CUTE_DEVICE void count_part(Gemm const& gemm, Work const& work) {
  meet_sharers();
  if (sharing_thread() == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;"
                 :: "l"(__cvta_generic_to_global(gemm.arrivals + work.tile)) : "memory");
  }
}

// Until all parts of a tile are kept: every CTA keeps all of its own before it waits here.
CUTE_DEVICE void wait_for_parts(Gemm const& gemm, int tile, unsigned count) {
  if (sharing_thread() == 0) {
    unsigned kept;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                   : "=r"(kept) : "l"(__cvta_generic_to_global(gemm.arrivals + tile)) : "memory");
    } while (kept < count);
  }
  meet_sharers();
}

// A vector from the L2, or zeros.
CUTE_DEVICE float4 load_if(bool condition, float4 const* from) {
  float4 vector = {0.0f, 0.0f, 0.0f, 0.0f};
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.b32 p, %5, 0;\n"
               "@p ld.global.cg.v4.f32 { %0, %1, %2, %3 }, [%4];\n"
               "}" : "+f"(vector.x), "+f"(vector.y), "+f"(vector.z), "+f"(vector.w)
               : "l"(__cvta_generic_to_global(from)), "r"(int(condition)) : "memory");
  return vector;
}

// Adds vectors [first, last) of a tile over its parts, in the order of k, and stores them to D. The loads of so many
// vectors and parts are in flight together.
template <int Vectors, int Slices>
CUTE_DEVICE void add_vectors(Gemm const& gemm, Parts const& parts, int first, int last, int share_row, int share_col) {
  float4 const* const from = partial_sum(gemm, parts.first);
  CUTE_NO_UNROLL
  for (; first < last; first += Vectors) {
    float4 sum[Vectors] = {};
    CUTE_NO_UNROLL
    for (int slice = 0; slice < parts.count; slice += Slices) {
      float4 part[Vectors][Slices];
      CUTE_UNROLL
      for (int i = 0; i < Vectors * Slices; ++i) {
        const int v = i / Slices, s = i % Slices;
        part[v][s] = load_if(first + v < last && slice + s < parts.count,
                             from + (int64_t(slice + s) * kVectors + first + v) * kSharingThreads);
      }
      CUTE_UNROLL
      for (int i = 0; i < Vectors * Slices; ++i) {
        const int v = i / Slices, s = i % Slices;
        sum[v].x += part[v][s].x;
        sum[v].y += part[v][s].y;
        sum[v].z += part[v][s].z;
        sum[v].w += part[v][s].w;
      }
    }
    CUTE_UNROLL
    for (int v = 0; v < Vectors; ++v) {
      if (first + v < last) {
        sum[v] = fused_vector(gemm, parts.row, parts.col, share_row, share_col, first + v, sum[v]);
        const half2 upper = __floats2half2_rn(sum[v].x, sum[v].y);
        const half2 lower = __floats2half2_rn(sum[v].z, sum[v].w);
        const int columns = (first + v) % (kAtomN / 8), atom = (first + v) / (kAtomN / 8);
        store_columns(gemm, parts.row, parts.col, share_row + atom / kChunks * 16,
                      share_col + atom % kChunks * kAtomN + columns * 8,
                      reinterpret_cast<uint32_t const&>(upper), reinterpret_cast<uint32_t const&>(lower));
      }
    }
  }
}

// Every group of consumers adds its share of the vectors of all tiles that are kept in parts, one tile's or several's.
CUTE_DEVICE void add_parts(Gemm const& gemm, int share_row, int share_col) {
  constexpr int kGroups = kConsumers / kSharers;
  const int64_t vectors = int64_t(tiles_in_parts(gemm)) * kVectors;
  const int group = blockIdx.x * kGroups + sharing_group(), groups = gridDim.x * kGroups;
  const int64_t end = vectors * (group + 1) / groups;
  CUTE_NO_UNROLL
  for (int64_t at = vectors * group / groups; at < end;) {
    const int tile = int(at / kVectors), first = int(at % kVectors);
    const int last = int(min(int64_t(kVectors), end - at + first));
    at += last - first;
    const Parts parts = parts_of(gemm, tile);
    if (parts.row >= gemm.m || parts.col >= gemm.n) {
      continue;
    }
    wait_for_parts(gemm, tile, parts.count);
    constexpr int kTrips = kSplitK < 16 ? 1 : kSplitK / 8;
    constexpr int kVectorsAtOnce = kSplitK < 8 ? (kSplitK + 7) / kSplitK : 1;
    constexpr int kSlicesAtOnce = (kSplitK + kTrips - 1) / kTrips;
    add_vectors<kVectorsAtOnce, kSlicesAtOnce>(gemm, parts, first, last, share_row, share_col);
  }
}

// By one thread: each full stage takes the producer's arrival and all bytes; an empty one the end of the multiplications of every
// CTA that reads what this CTA brought. Summed: the end of a tile's; stored: an arrival of every warp that has its accumulators.
CUTE_DEVICE void init_barriers(Shared const& shared) {
  for (int i = 0; i < kStages; ++i) {
    init_barrier(shared.full(i), 1);
    init_barrier(shared.empty(i), 1);
  }
  for (int i = 0; i < kTiles; ++i) {
    init_barrier(shared.summed(i), 1);
    init_barrier(shared.stored(i), 4);
  }
}

// One thread brings k-tiles, as stages are handed back.
CUTE_DEVICE void produce(Gemm const& gemm, Shared const& shared, int rank) {
  const int rank_m = rank % kClusterM, rank_n = rank / kClusterM % kClusterN;
  // CTAs of one row of the cluster share A, those of one column share B.
  uint16_t row_ctas = 0, col_ctas = 0;
  CUTE_UNROLL
  for (int i = 0; i < kClusterN; ++i) {
    row_ctas |= 1 << (rank_m + i * kClusterM);
  }
  CUTE_UNROLL
  for (int i = 0; i < kClusterM; ++i) {
    col_ctas |= 1 << (i + rank_n * kClusterM);
  }
  Place place;
  // Every cluster takes tiles until none is left.
  CUTE_NO_UNROLL
  for (int item = blockIdx.x / kClusterCtas; item < work_items(gemm); item += gridDim.x / kClusterCtas) {
    const Work work = work_of(gemm, item, rank);

    for (int step = work.first; step < work.last; ++step) {
      const uint32_t stage = shared.stage(place.stage), full = shared.full(place.stage);
      wait(shared.empty(place.stage), place.parity ^ 1);
      expect_bytes(full, kStageBytes);
      TileA::load<kClusterN, 1>(gemm.map_a, stage, full, work.row, step * kBK, gemm.policy_a, rank_n, row_ctas);
      TileB::load<kClusterM, 1>(gemm.map_b, stage + kBytesA, full, work.col, step * kBK, gemm.policy_b, rank_m, col_ctas);
      place.advance();
    }
  }

}

// The CTAs that brought what this thread multiplies: all of the cluster.
CUTE_DEVICE uint16_t bringing_ctas(int) { return (1 << kClusterCtas) - 1; }

// One thread multiplies: a k-tile when it has arrived, into the accumulators of one tile while those of the other
// are stored. The end of a k-tile's multiplications hands its stage back.
CUTE_DEVICE void multiply(Gemm const& gemm, Shared const& shared, int rank, uint32_t columns) {
  const uint32_t x0 = descriptor_low(shared.stage(0) + kBytesA, TileX::kChunkBytes);
  const uint32_t y0 = descriptor_low(shared.stage(0) + 0, TileY::kChunkBytes);
  const uint16_t brought = bringing_ctas(rank), own = 1 << rank;
  Place place;
  Turn<kTiles> tile;
  // Every cluster takes tiles until none is left.
  CUTE_NO_UNROLL
  for (int item = blockIdx.x / kClusterCtas; item < work_items(gemm); item += gridDim.x / kClusterCtas) {
    const Work work = work_of(gemm, item, rank);

    wait(shared.stored(tile.stage), tile.parity ^ 1);
    fence_behind_wait();
    CUTE_NO_UNROLL
    for (int step = work.first; step < work.last; ++step) {
      wait(shared.full(place.stage), place.parity);
      fence_behind_wait();
      const uint32_t x = x0 + place.stage * (kStageBytes / 16), y = y0 + place.stage * (kStageBytes / 16);
      CUTE_UNROLL
      for (int block = 0; block < kBK / 16; ++block) {
        mma(columns + tile.stage * kCols, descriptor<TileX::kWidth>(x + TileX::offset(0, block) / 16),
            descriptor<TileY::kWidth>(y + TileY::offset(0, block) / 16), step > work.first || block > 0);
      }
      commit(shared.empty(place.stage), brought);
      place.advance();
    }
    commit(shared.summed(tile.stage), own);
    tile.advance();
  }

}

// Where this lane tells that accumulators are free: the first such barrier, 0 in all lanes but the first.
CUTE_DEVICE uint32_t stored_barriers(Shared const& shared, int) { return threadIdx.x % 32 == 0 ? shared.stored(0) : 0; }

// This warp has a tile's accumulators in registers, or has stored them: they may be replaced.
CUTE_DEVICE void release(uint32_t stored, int tile) {
  fence_before_arrival();
  __syncwarp();
  if (stored) {
    arrive(stored + tile * 16);
  }
}

// A warp stores the rows of a tile that lie in its lanes of tensor memory, some columns at a time, while the next tile is multiplied.
CUTE_DEVICE void store_tiles(Gemm const& gemm, Shared const& shared, int rank, uint32_t columns) {
  constexpr int share_row = 0;
  const uint32_t lanes = columns + (uniform(threadIdx.x / 32) % 4 << 21);
  const uint32_t stored = stored_barriers(shared, rank);
  Turn<kTiles> tile;
  // Every cluster takes tiles until none is left.
  CUTE_NO_UNROLL
  for (int item = blockIdx.x / kClusterCtas; item < work_items(gemm); item += gridDim.x / kClusterCtas) {
    const Work work = work_of(gemm, item, rank);

    wait(shared.summed(tile.stage), tile.parity);
    fence_behind_wait();
    CUTE_NO_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int share_col = chunk * kAtomN;
      Accumulators tCrD;
      load_sums(lanes + tile.stage * kCols + share_col, tCrD);
      if (chunk == kChunks - 1) {
        release(stored, tile.stage);
      }
      if (work.row < gemm.m && work.col < gemm.n) {
        keep_columns(gemm, work, chunk, tCrD);
      }
    }
    if (work.row < gemm.m && work.col < gemm.n) {
      count_part(gemm, work);
    }
    tile.advance();
  }
  add_parts(gemm, 0, 0);

}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
hgemm_sm100_tcgen05_f32_tn_bias_n_silu_32x128x64_s4_9e3922971d(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_d, half* d, int ldd, int m, int n, int k, int along_n, int band,
    uint64_t policy_a, uint64_t policy_b, float* partials, unsigned* arrivals, Fused fused) {
  const Gemm gemm{&map_a, &map_b, &map_d, d, ldd, m, n, k, along_n, band, policy_a, policy_b, partials, arrivals, fused};
  const Shared shared{uniform(smem_address(smem))};
  const int warp = uniform(threadIdx.x / 32);
  constexpr int rank = 0;
  if (warp == 0 && elect_lane()) {
    prefetch_map(gemm.map_a);
    prefetch_map(gemm.map_b);

    init_barriers(shared);
  }
  if (warp == 2) {
    allocate_columns(shared.columns());
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();

  let_next_kernel_start();
  wait_for_previous_kernel();
  const uint32_t columns = load_word(shared.columns());
  if (warp == 0) {
    if (elect_lane()) {
      produce(gemm, shared, rank);
    }
  } else if (warp == 1) {
    if (elect_lane()) {
      multiply(gemm, shared, rank, columns);
    }
  } else if (warp >= 4) {
    store_tiles(gemm, shared, rank, columns);
    fence_before_arrival();
  }
  __syncwarp();
  // Nobody uses tensor memory any more.
  __syncthreads();

  if (warp == 2) {
    fence_behind_wait();
    free_columns(columns);
  }
}

}  // namespace hgemm_sm100_tcgen05_f32_tn_bias_n_silu_32x128x64_s4_9e3922971d
