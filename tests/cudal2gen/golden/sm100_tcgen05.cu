// D(m,n) = A(m,k) * B(n,k)^T: fp16 in and out, f32 accumulators, row-major, leading dimensions in elements.
// Method: one warp loads by TMA into a ring of stages, one thread multiplies by tcgen05.mma into tensor memory, four warps store.
//
// Launch, all divisions rounded up:
//   grid    one cluster per cluster tile of 256 x 128; running clusters claim those of others
//   cluster (2, 1, 1)
//   block   256
//   shared  114880 bytes, dynamic; above 48 KiB, so set cudaFuncAttributeMaxDynamicSharedMemorySize first
//
// Tensor maps of fp16, with boxes of columns x rows; the swizzle is as wide as a box, elements out of bounds are zero
//   A       64 x 128 of (k, m)
//   B       64 x 64 of (k, n)
//   D       64 x 16 of (n, m)
//
// Compile nvcc -std=c++17 --expt-relaxed-constexpr -gencode arch=compute_100f,code=sm_100f -I CUTLASS/include
//
// Needs   A and B and D aligned to 16 bytes, their leading dimensions multiples of 8

#include <cstdint>

#include <cuda_fp16.h>

#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>

namespace hgemm_sm100_tcgen05_f32_tn_128x128x64_s4_ee205822b7 {

using namespace cute;

// The CTA tile in elements, the ring of k-tiles, and the CTAs of a cluster, which share operands.
constexpr int kBM = 128, kBN = 128, kBK = 64;
constexpr int kStages = 4;
constexpr int kClusterM = 2, kClusterN = 1, kClusterCtas = 2;
// How many tiles have their accumulators in tensor memory, and how many columns of it a CTA allocates.
constexpr int kTiles = 2, kColumns = 256;
// Four warps, which load, multiply, allocate and claim tiles; then a warpgroup, which stores.
constexpr int kThreads = 256;
// How many items of work a CTA may hold in advance.
constexpr int kSlots = 2;

// A CUtensorMap, as the driver encodes it.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// A number by which numbers of tiles are divided, and its reciprocal, which the launcher computes: shift = floor(log2(number)) and
// multiplier = (2^(32 + shift) - 1) / number, rounded down. Quotients of dividends below 2^31 are then exact.
struct Divisor {
  uint32_t number, multiplier, shift;
  CUTE_DEVICE uint32_t quotient(uint32_t dividend) const { return __umulhi(dividend + 1, multiplier) >> shift; }
};

// How cluster tiles are numbered: in bands that run along n (along_n = 1) or along m (0), of `along` tiles, and lie side by side across the
// other axis, which has `across` tiles. A whole band is `width` tiles wide and has `tiles` = along * width. If the last band is narrower,
// it is `last_width` wide; if not, last_width is 1.
struct Bands {
  uint32_t along_n, along, across;
  Divisor tiles, width, last_width;
};

// The problem, as the caller passed it.
struct Gemm {
  TensorMap const *map_a, *map_b, *map_d;
  half* d;
  int ldd;
  int m, n;
  int k;
  Bands bands;
  uint64_t policy_a, policy_b;  // L2 eviction priorities of loads

};

// Returns true in one lane of a warp, always the same one. In a branch on it, TMA is issued once instead of lane by lane.
CUTE_DEVICE bool elect_lane() {
  uint32_t elected;
  asm volatile("{\n"
               ".reg .pred p;\n"
               "elect.sync _|p, 0xffffffff;\n"
               "selp.u32 %0, 1, 0, p;\n"
               "}" : "=r"(elected));
  return elected;
}

// Returns a value on which all lanes of a warp agree, in a way that tells the compiler so: the value then stays in uniform
// registers, from which tcgen05.mma takes its descriptors.
CUTE_DEVICE uint32_t uniform(uint32_t value) { return __shfl_sync(0xffffffff, value, 0); }

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

// Arrives at an mbarrier of any CTA of the cluster. .release.cluster is not needed, and would wait for all memory accesses of this
// thread: after tcgen05.wait, the thread has read what it hands back.
CUTE_DEVICE void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Returns the same address in the first CTA of the pair: the rank is in the bits from 24 on.
CUTE_DEVICE uint32_t leaders(uint32_t address) { return address & 0xfeffffff; }

// Loads a box at (column, row) of a matrix to shared memory; its bytes count on the mbarrier. If several CTAs share it, it is loaded
// to the same place in all CTAs of the mask, and counts on the mbarrier of each.
template <int Sharing>
CUTE_DEVICE void load_box(TensorMap const* map, uint32_t target, uint32_t barrier, int col, int row, uint64_t policy,
                          uint16_t ctas) {
  if constexpr (Sharing == 1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2.L2::cache_hint"
                 " [%0], [%1, { %2, %3 }], [%4], %5;"
                 :: "r"(target), "l"(map), "r"(col), "r"(row), "r"(barrier), "l"(policy) : "memory");
  } else {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 ".cta_group::2.L2::cache_hint [%0], [%1, { %2, %3 }], [%4], %5, %6;"
                 :: "r"(target), "l"(map), "r"(col), "r"(row), "r"(barrier), "h"(ctas), "l"(policy) : "memory");
  }
}

CUTE_DEVICE void prefetch_map(TensorMap const* map) { asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory"); }

// Stores a box from shared memory to (column, row) of D, clipped to D. Each store is a group of its own.
CUTE_DEVICE void store_box(TensorMap const* map, uint32_t source, int col, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, { %1, %2 }], [%3];"
               :: "l"(map), "r"(col), "r"(row), "r"(source) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all of this thread's stores but the last N have read their source.
template <int N>
CUTE_DEVICE void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(N) : "memory");
}

// A tile whose rows run along k, in chunks of 64 k. A chunk has Extent rows of 128 swizzled bytes.
template <int Extent>
struct AlongK {
  static constexpr int kWidth = 64, kChunkBytes = Extent * kWidth * 2;

  // Returns the bytes from the start of the tile to a row's k-block of 16, before the swizzle, which repeats every 8 rows.
  CUTE_DEVICE static constexpr int offset(int row, int block) {
    return row * kWidth * 2 + block / 4 * kChunkBytes + block % 4 * 32;
  }

  // Loads one of the Parts parts of a tile, in Boxes boxes of rows, to all CTAs that share the tile.
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
using TileB = AlongK<kBN / 2>;
constexpr int kBytesA = kBM * kBK * 2, kBytesB = kBN / 2 * kBK * 2, kStageBytes = kBytesA + kBytesB;

// Rows and columns of the instructions are rows and columns of D.
using TileX = TileA;
using TileY = TileB;
constexpr int kRows = kBM, kCols = kBN;

// The instruction descriptor: types of D, X and Y, whether X and Y lie across k, columns, rows of both CTAs.
constexpr uint32_t kXAcross = 0, kYAcross = 0;
constexpr uint32_t kInstruction = 1u << 4 | 0u << 7 | 0u << 10 | kXAcross << 15 | kYAcross << 16 | kCols / 8u << 17 | 2 * kRows / 16u << 24;
static_assert(kRows == 128 && kCols % 32 == 0 && kCols <= 256);

// Sums in tensor memory = x * y + (accumulate ? sums : 0), for 16 of k. x and y are descriptors of tiles in shared memory. The
// instruction is asynchronous.
CUTE_DEVICE void mma(uint32_t sums, uint64_t x, uint64_t y, bool accumulate) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.b32 p, %4, 0;\n"
               "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n"
               "}" :: "r"(sums), "l"(x), "l"(y), "r"(kInstruction), "r"(int(accumulate)) : "memory");
}

// Arrives when all multiplications that this thread has issued are done, at the same mbarrier in all CTAs of the mask.
CUTE_DEVICE void commit(uint32_t barrier, uint16_t ctas) {
  asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;"
               :: "r"(barrier), "h"(ctas) : "memory");
}

// The descriptor of an operand. Its low word has the bytes between chunks of columns and the low 18 bits of the address; in a
// cluster, the rank of the CTA is in the bits above these.
CUTE_DEVICE uint32_t descriptor_low(uint32_t address, int chunk_bytes) { return chunk_bytes >> 4 << 16 | (address & 0x3ffff) >> 4; }

// Its high word has the swizzle mode, a constant bit, and the bytes between blocks of 8 rows.
template <int Width>
CUTE_DEVICE uint64_t descriptor(uint32_t low) {
  constexpr uint64_t kMode = Width == 64 ? 2 : Width == 32 ? 4 : 6, kBlockBytes = 8 * Width * 2;
  return (kMode << 29 | 1 << 14 | kBlockBytes >> 4) << 32 | low;
}

// A warp in each CTA of the pair allocates columns of tensor memory. Their address goes to shared memory. The CTA allocates no more.
CUTE_DEVICE void allocate_columns(uint32_t target) {
  asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" :: "r"(target), "n"(kColumns) : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
}

// The same warp in each CTA of the pair frees them when no thread uses them any more.
CUTE_DEVICE void free_columns(uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" :: "r"(columns), "n"(kColumns) : "memory");
}

CUTE_DEVICE uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// fence_before_arrival orders this thread's earlier accesses to tensor memory before the arrival that follows it. fence_behind_wait
// orders its later accesses after the wait that precedes it. Neither of them waits.
CUTE_DEVICE void fence_before_arrival() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
CUTE_DEVICE void fence_behind_wait() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// A warp's share of kAtomN columns. Its 32 lanes of tensor memory are rows. Of 16 rows and 8 columns a lane has two neighbours in
// row lane / 4, and two more in the row 8 below.
using Accumulator = float;  // a register has one sum
constexpr int kAtomN = 64, kAtomRegisters = 32;
constexpr int kAtomsM = 2, kAtomsN = 1, kChunks = kCols / kAtomN;
using Accumulators = Accumulator[kAtomsM][kAtomsN][kAtomRegisters];

// Loads columns of accumulators from an address of tensor memory. When it returns, the registers of all lanes are valid.
CUTE_DEVICE void load_sums(uint32_t at, Accumulators& tCrD) {
  asm volatile(
      "tcgen05.ld.sync.aligned.16x256b.x8.b32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, [%64];\n"
      "tcgen05.ld.sync.aligned.16x256b.x8.b32 {"
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, [%65];\n"
      "tcgen05.wait::ld.sync.aligned;"
      : "=f"(tCrD[0][0][0]), "=f"(tCrD[0][0][1]), "=f"(tCrD[0][0][2]), "=f"(tCrD[0][0][3]), "=f"(tCrD[0][0][4]), "=f"(tCrD[0][0][5]), "=f"(tCrD[0][0][6]), "=f"(tCrD[0][0][7]),
        "=f"(tCrD[0][0][8]), "=f"(tCrD[0][0][9]), "=f"(tCrD[0][0][10]), "=f"(tCrD[0][0][11]), "=f"(tCrD[0][0][12]), "=f"(tCrD[0][0][13]), "=f"(tCrD[0][0][14]), "=f"(tCrD[0][0][15]),
        "=f"(tCrD[0][0][16]), "=f"(tCrD[0][0][17]), "=f"(tCrD[0][0][18]), "=f"(tCrD[0][0][19]), "=f"(tCrD[0][0][20]), "=f"(tCrD[0][0][21]), "=f"(tCrD[0][0][22]), "=f"(tCrD[0][0][23]),
        "=f"(tCrD[0][0][24]), "=f"(tCrD[0][0][25]), "=f"(tCrD[0][0][26]), "=f"(tCrD[0][0][27]), "=f"(tCrD[0][0][28]), "=f"(tCrD[0][0][29]), "=f"(tCrD[0][0][30]), "=f"(tCrD[0][0][31]),
        "=f"(tCrD[1][0][0]), "=f"(tCrD[1][0][1]), "=f"(tCrD[1][0][2]), "=f"(tCrD[1][0][3]), "=f"(tCrD[1][0][4]), "=f"(tCrD[1][0][5]), "=f"(tCrD[1][0][6]), "=f"(tCrD[1][0][7]),
        "=f"(tCrD[1][0][8]), "=f"(tCrD[1][0][9]), "=f"(tCrD[1][0][10]), "=f"(tCrD[1][0][11]), "=f"(tCrD[1][0][12]), "=f"(tCrD[1][0][13]), "=f"(tCrD[1][0][14]), "=f"(tCrD[1][0][15]),
        "=f"(tCrD[1][0][16]), "=f"(tCrD[1][0][17]), "=f"(tCrD[1][0][18]), "=f"(tCrD[1][0][19]), "=f"(tCrD[1][0][20]), "=f"(tCrD[1][0][21]), "=f"(tCrD[1][0][22]), "=f"(tCrD[1][0][23]),
        "=f"(tCrD[1][0][24]), "=f"(tCrD[1][0][25]), "=f"(tCrD[1][0][26]), "=f"(tCrD[1][0][27]), "=f"(tCrD[1][0][28]), "=f"(tCrD[1][0][29]), "=f"(tCrD[1][0][30]), "=f"(tCrD[1][0][31])
      : "r"(at), "r"(at + (16 << 16)) : "memory");
}

// Addresses of bytes in shared memory: the ring, the epilogue's buffers, the mbarriers, and the word with the address of tensor memory.
struct Shared {
  uint32_t base;
  CUTE_DEVICE uint32_t stage(int i) const { return base + i * kStageBytes; }
  CUTE_DEVICE uint32_t buffers(int warp) const { return stage(kStages) + warp * 4096; }
  CUTE_DEVICE uint32_t full(int i) const { return stage(kStages) + 16384 + i * 16; }
  CUTE_DEVICE uint32_t empty(int i) const { return full(i) + 8; }
  CUTE_DEVICE uint32_t summed(int i) const { return full(kStages + i); }
  CUTE_DEVICE uint32_t stored(int i) const { return full(kStages + i) + 8; }
  CUTE_DEVICE uint32_t columns() const { return full(kStages + 2); }
  CUTE_DEVICE uint32_t response() const { return full(kStages + 3); }
  CUTE_DEVICE uint32_t answered() const { return full(kStages + 4); }
  CUTE_DEVICE uint32_t item(int i) const { return full(kStages + 4) + 8 + i * 4; }
  CUTE_DEVICE uint32_t handed(int i) const { return full(kStages + 5 + i); }
  CUTE_DEVICE uint32_t taken(int i) const { return full(kStages + 5 + i) + 8; }
  CUTE_DEVICE uint32_t begun() const { return full(kStages + 5 + kSlots); }
};
static_assert(kStages * kStageBytes + 16384 + kStages * 16 + 128 == 114880);
extern __shared__ __align__(1024) unsigned char smem[];

// A position among Count stages or tiles, and the parity of its phase.
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

// One item of work of a CTA: a tile, and steps [first, last) of k.
struct Work : Tile {
  int first, last;

};

// Returns how many cluster tiles cover D.
CUTE_DEVICE int cluster_tiles(Gemm const& gemm) { return gemm.bands.along * gemm.bands.across; }
CUTE_DEVICE int steps_of(Gemm const& gemm) { return uint32_t(gemm.k + kBK - 1) / kBK; }

// Returns a CTA's part of a cluster's tile. Tiles follow each other along one axis, in bands of a few tiles of the other axis, so
// that clusters that run together share operands in the L2.
CUTE_DEVICE Tile tile_of(Gemm const& gemm, uint32_t tile, uint32_t rank) {
  Bands const& bands = gemm.bands;
  const uint32_t band = bands.tiles.quotient(tile), in_band = tile - band * bands.tiles.number;
  const uint32_t first = band * bands.width.number;  // across, of the tiles of the band
  const Divisor width = bands.across - first < bands.width.number ? bands.last_width : bands.width;
  const int at_along = width.quotient(in_band), at_across = first + in_band - at_along * width.number;
  const int cluster_m = bands.along_n ? at_across : at_along, cluster_n = bands.along_n ? at_along : at_across;
  return {(cluster_m * kClusterM + int(rank % kClusterM)) * kBM, (cluster_n * kClusterN + int(rank / kClusterM)) * kBN};
}

CUTE_DEVICE int work_items(Gemm const& gemm) { return cluster_tiles(gemm); }

CUTE_DEVICE Work work_of(Gemm const& gemm, int item, int rank) { return {tile_of(gemm, item, rank), 0, steps_of(gemm)}; }

// Returns two neighbours in a row, from the accumulators of 8 columns: e = 0 in row lane / 4, e = 1 in the row 8 below.
CUTE_DEVICE uint32_t pair(Accumulator const (&d)[kAtomRegisters], int columns, int e) {
  const half2 rounded = __floats2half2_rn(d[columns * 4 + e * 2], d[columns * 4 + e * 2 + 1]);
  return reinterpret_cast<uint32_t const&>(rounded);
}

// Stores four 8 x 8 matrices from registers to shared memory; each lane passes the address of one row.
CUTE_DEVICE void store_matrices(uint32_t target, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4 };"
               :: "r"(target), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// The groups of columns of a load that are stored at a time.
constexpr int kGroup = 64, kGroups = kAtomN / kGroup;
CUTE_DEVICE constexpr int first_column(int group) { return group * kGroup; }

// Each warp stores by itself, 16 rows of the load and a group of columns at a time, through two swizzled buffers.
CUTE_DEVICE void store_share(Gemm const& gemm, Shared const& shared, int row, int col, int share_row, int share_col,
                             Accumulators const& tCrD) {
  constexpr int kRounds = kAtomsM * kAtomsN * kGroups, kBufferBytes = 16 * kGroup * 2;
  using TileD = decltype(composition(Swizzle<kGroup / 32 + 1, 0, 3>{},
                                     Layout<Shape<_16, Int<kGroup / 8>>, Stride<Int<kGroup / 8>, _1>>{}));
  const int warp = uniform(threadIdx.x / 32) - 4, lane = threadIdx.x % 32;
  const bool leader = elect_lane();
  share_row += warp % 4 * 32;
  CUTE_UNROLL
  for (int round = 0; round < kRounds; ++round) {
    const int i = round / (kAtomsN * kGroups), j = round / kGroups % kAtomsN, group = round % kGroups;
    const int first = first_column(group);
    const uint32_t target = shared.buffers(warp) + round % 2 * kBufferBytes;
    // Wait for the last store that reads this buffer. It is the last but one of all, since two buffers alternate; but if a tile has
    // an odd number of rounds, the first round of the next tile uses the buffer of the very last store.
    if (leader) {
      if (round == 0 && kRounds % 2) {
        wait_for_stores<0>();
      } else {
        wait_for_stores<1>();
      }
    }
    __syncwarp();
    CUTE_UNROLL
    for (int at = 0; at < kGroup; at += 16) {
      const int columns = (first + at) / 8;
      store_matrices(target + TileD{}(lane % 16, at / 8 + lane / 16) * 16,
                     pair(tCrD[i][j], columns, 0), pair(tCrD[i][j], columns, 1),
                     pair(tCrD[i][j], columns + 1, 0), pair(tCrD[i][j], columns + 1, 1));
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (leader) {
      store_box(gemm.map_d, target,
                col + share_col + j * kAtomN + first, row + share_row + i * 16);
    }
  }
}

// Called by one thread. The events that complete a phase. full: the producer's arrival and all bytes of a stage. empty: the end of the
// multiplications of each CTA pair that reads what this CTA loaded. summed: the end of a tile's multiplications. stored: one arrival of
// each warp that stores the tile.
CUTE_DEVICE void init_barriers(Shared const& shared) {
  for (int i = 0; i < kStages; ++i) {
    init_barrier(shared.full(i), 1);
    init_barrier(shared.empty(i), 1);
  }
  for (int i = 0; i < kTiles; ++i) {
    init_barrier(shared.summed(i), 1);
    init_barrier(shared.stored(i), 8);
  }
  // The events that complete a phase. answered: the arrival of the request and the 16 bytes of its response. handed: an item is in
  // the slot. Only in the cluster's first CTA: taken: each warp of the cluster that reads items has arrived; begun: loading of an
  // item begins.
  init_barrier(shared.answered(), 1);
  init_barrier(shared.begun(), 1);
  for (int i = 0; i < kSlots; ++i) {
    init_barrier(shared.handed(i), 1);
    init_barrier(shared.taken(i), 11);
  }
}

// Asks to cancel a cluster that has not started. The 16 bytes of the response count on the mbarrier.
CUTE_DEVICE void request(uint32_t response, uint32_t answered) {
  expect_bytes(answered, 16);
  asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];"
               :: "r"(response), "r"(answered) : "memory");
}

// Returns the item of the cluster that was cancelled, or -1 if none was. Afterwards the response may be overwritten.
CUTE_DEVICE int claimed_item(uint32_t response) {
  int first;
  asm volatile("{\n"
               ".reg .pred p;\n"
               ".reg .b128 r;\n"
               "ld.shared.b128 r, [%1];\n"
               "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, r;\n"
               "mov.b32 %0, -1;\n"
               "@p clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %0, r;\n"
               "}" : "=&r"(first) : "r"(response) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  return first < 0 ? first : first / kClusterCtas;
}

// The item's bytes count on the mbarrier of the CTA that gets it, so they need no fence.
CUTE_DEVICE void hand(Shared const& shared, int slot, int item) {
  for (int cta = 0; cta < kClusterCtas; ++cta) {
    const uint32_t handed = at_rank(shared.handed(slot), cta);
    asm volatile("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], 4;" :: "r"(handed) : "memory");
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                 :: "r"(at_rank(shared.item(slot), cta)), "r"(item), "r"(handed) : "memory");
  }
}

// .release.cluster is not needed, and would wait for all memory accesses of this thread: it has read the item, and passes no data on.
CUTE_DEVICE void take(Shared const& shared, int slot) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(at_rank(shared.taken(slot), 0)) : "memory");
}

// One thread of a cluster claims items and hands them to all its CTAs. The last one it hands over is negative. It claims an item when
// loading of the previous item begins, so a cluster holds at most one item that it has not begun; the rest is left to other clusters.
// The hardware may answer that no cluster is pending although many are. Then this cluster ends, and the pending clusters start
// and compute their own tiles. So all tiles are computed, whatever the hardware answers.
CUTE_DEVICE void claim_items(Shared const& shared) {
  Turn<kSlots> slot;
  uint32_t parity = 0;
  int item;
  CUTE_NO_UNROLL
  do {
    wait(shared.begun(), parity);
    wait(shared.taken(slot.stage), slot.parity ^ 1);
    request(shared.response(), shared.answered());
    wait(shared.answered(), parity);
    parity ^= 1;
    item = claimed_item(shared.response());
    hand(shared, slot.stage, item);
    slot.advance();
  } while (item >= 0);
  // Warps of other CTAs arrive at this CTA's mbarriers, so it must not exit before they have.
  for (int i = 0; i < kSlots; ++i) {
    wait(shared.taken(slot.stage), slot.parity ^ 1);
    slot.advance();
  }
}

// Returns the next item handed to this CTA, negative if there is none. It is called by one thread, or by a warp, whose first lane waits.
template <bool Warp>
CUTE_DEVICE int next_item(Shared const& shared, Turn<kSlots>& slot) {
  int item = 0;
  if (!Warp || threadIdx.x % 32 == 0) {
    wait(shared.handed(slot.stage), slot.parity);
    item = int(load_word(shared.item(slot.stage)));
    take(shared, slot.stage);
  }
  slot.advance();
  if constexpr (Warp) {
    __syncwarp();
    item = int(uniform(item));
  }
  return item;
}

// One thread loads k-tiles, each into the next stage, as soon as consumers have handed it back.
CUTE_DEVICE void produce(Gemm const& gemm, Shared const& shared, uint32_t rank) {
  const int rank_m = rank % kClusterM, rank_n = rank / kClusterM % kClusterN;
  // CTAs in the same row of the cluster share A, those in the same column share B.
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
  // The tile for which this cluster was launched, then the tiles that it claims.
  Turn<kSlots> slot;
  CUTE_NO_UNROLL
  for (int item = blockIdx.x / kClusterCtas; item >= 0; item = next_item<false>(shared, slot)) {
    // The cluster may claim the next item now.
    if (rank == 0) {
      arrive(shared.begun());
    }
    const Work work = work_of(gemm, item, rank);

    // The tile is known before the wait; the loads behind it read what the previous kernel wrote. ptxas moves the wait above
    // arithmetic, but not above a branch on its result. This one is always taken. For later tiles the wait returns at once.
    if (work.row + work.col >= 0) {
      wait_for_previous_kernel();
    }
    for (int step = work.first; step < work.last; ++step) {
      const uint32_t stage = shared.stage(place.stage), full = leaders(shared.full(place.stage));
      wait(shared.empty(place.stage), place.parity ^ 1);
      if (rank % 2 == 0) {
        expect_bytes(shared.full(place.stage), 2 * kStageBytes);
      }
      TileA::load<kClusterN, 1>(gemm.map_a, stage, full, work.row, step * kBK, gemm.policy_a, rank_n, row_ctas);
      TileB::load<kClusterM / 2, 1>(gemm.map_b, stage + kBytesA, full, work.col + rank % 2 * (kBN / 2), step * kBK, gemm.policy_b, rank_m / 2, col_ctas);
      place.advance();
    }
  }
  // Warps of other CTAs arrive at this CTA's mbarriers, so it must not exit before they have.
  for (int i = 0; i < kStages; ++i) {
    wait(shared.empty(place.stage), place.parity ^ 1);
    place.advance();
  }
}

// The CTAs that loaded what this thread multiplies: all of the cluster.
CUTE_DEVICE uint16_t bringing_ctas(int) { return (1 << kClusterCtas) - 1; }

// One thread multiplies for both CTAs of the pair: each k-tile as soon as it has arrived. It fills the accumulators of one tile while those of
// the other are stored. When the multiplications of a k-tile end, its stage is handed back.
CUTE_DEVICE void multiply(Gemm const& gemm, Shared const& shared, int rank, uint32_t columns) {
  const uint32_t x0 = descriptor_low(shared.stage(0) + 0, TileX::kChunkBytes);
  const uint32_t y0 = descriptor_low(shared.stage(0) + kBytesA, TileY::kChunkBytes);
  const uint16_t brought = bringing_ctas(rank), own = 3 << rank;
  Place place;
  Turn<kTiles> tile;
  // The tile for which this cluster was launched, then the tiles that it claims.
  Turn<kSlots> slot;
  CUTE_NO_UNROLL
  for (int item = blockIdx.x / kClusterCtas; item >= 0; item = next_item<false>(shared, slot)) {
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
  // Warps of the other CTA arrive at this CTA's mbarriers, so it must not exit before they have.
  for (int i = 0; i < kTiles; ++i) {
    wait(shared.stored(tile.stage), tile.parity ^ 1);
    tile.advance();
  }
}

// Returns the mbarrier, in the CTA that multiplies, at which the first lane reports the accumulators of tile 0 as free; 0 in the others.
CUTE_DEVICE uint32_t stored_barriers(Shared const& shared, int rank) {
  return threadIdx.x % 32 == 0 ? at_rank(shared.stored(0), rank & ~1) : 0;
}

// Tells the thread that multiplies that this warp has read a tile's accumulators, so that they may be overwritten.
CUTE_DEVICE void release(uint32_t stored, int tile) {
  fence_before_arrival();
  __syncwarp();
  if (stored) {
    arrive_at(stored + tile * 16);
  }
}

// Each warp stores the rows of a tile that lie in its lanes of tensor memory, some columns at a time, while the next tile is multiplied.
CUTE_DEVICE void store_tiles(Gemm const& gemm, Shared const& shared, int rank, uint32_t columns) {
  constexpr int share_row = 0;
  const uint32_t lanes = columns + (uniform(threadIdx.x / 32) % 4 << 21);
  const uint32_t stored = stored_barriers(shared, rank);
  Turn<kTiles> tile;
  // The tile for which this cluster was launched, then the tiles that it claims.
  Turn<kSlots> slot;
  CUTE_NO_UNROLL
  for (int item = blockIdx.x / kClusterCtas; item >= 0; item = next_item<true>(shared, slot)) {
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
      store_share(gemm, shared, work.row, work.col, share_row, share_col, tCrD);
    }

    tile.advance();
  }

  wait_for_stores<0>();  // they must have read shared memory before the CTA exits
}

extern "C" __global__ void __cluster_dims__(kClusterCtas) __launch_bounds__(kThreads, 1)
hgemm_sm100_tcgen05_f32_tn_128x128x64_s4_ee205822b7(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_d, half* d, int ldd, int m, int n, int k, const __grid_constant__ Bands bands,
    uint64_t policy_a, uint64_t policy_b, float* partials, unsigned* arrivals) {
  const Gemm gemm{&map_a, &map_b, &map_d, d, ldd, m, n, k, bands, policy_a, policy_b};
  const Shared shared{uniform(smem_address(smem))};
  const int warp = uniform(threadIdx.x / 32);
  const int rank = cluster_rank();
  const bool elected = elect_lane();
  // Warp 0 loads, so other warps set up what the first load needs.
  if (warp == 1 && elected) {
    init_barriers(shared);
  }
  if (warp == 3 && elected) {
    prefetch_map(gemm.map_a);
    prefetch_map(gemm.map_b);
    prefetch_map(gemm.map_d);
  }
  if (warp == 2) {
    allocate_columns(shared.columns());
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  cluster_arrive();
  cluster_wait();
  __syncthreads();
  let_next_kernel_start();
  if (warp == 0) {
    if (elected) {
      produce(gemm, shared, rank);
    }
  } else if (warp == 1) {
    if (rank % 2 == 0 && elected) {
      multiply(gemm, shared, rank, load_word(shared.columns()));
    }
  } else if (warp == 3) {
    if (rank == 0 && elect_lane()) {
      wait_for_previous_kernel();
      claim_items(shared);
    }
  } else if (warp >= 4) {
    wait_for_previous_kernel();
    store_tiles(gemm, shared, rank, load_word(shared.columns()));
    fence_before_arrival();
  }
  __syncwarp();
  // Wait until no thread uses tensor memory, and no other CTA of the cluster uses this one.
  __syncthreads();
  cluster_arrive();
  cluster_wait();
  if (warp == 2) {
    fence_behind_wait();
    free_columns(load_word(shared.columns()));
  }
}

}  // namespace hgemm_sm100_tcgen05_f32_tn_128x128x64_s4_ee205822b7
