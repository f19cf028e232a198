// D(m,n) = A(m,k) * B(n,k)^T: fp16 in and out, f32 accumulators, row-major, leading dimensions in elements.
// By a ring of TMA stages that one warp fills, tcgen05.mma of one thread into tensor memory, four warps that store.
//
// Launch, all divisions rounded up:
//   grid    as many clusters as fit on the GPU, at most one per cluster tile of 256 x 512
//   cluster (2, 1, 1)
//   block   256
//   shared  213104 bytes, dynamic; above 48 KiB, so set cudaFuncAttributeMaxDynamicSharedMemorySize first
//
// Tensor maps of fp16, as (columns, rows) of a box; the swizzle is as wide as its columns, out of bounds is zero
//   A       64 x 128 of (k, m)
//   B       64 x 128 of (k, n)
//   D       64 x 16 of (n, m)
//
// Needs   A and B and D aligned to 16 bytes, their leading dimensions multiples of 8

#include <cstdint>

#include <cuda_fp16.h>

#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>

namespace hgemm_sm100_tcgen05_f32_tn_128x512x64_s4_863d084351 {

using namespace cute;

// CTA tile in elements, the ring of k-tiles, the CTAs of a cluster that share operands.
constexpr int kBM = 128, kBN = 512, kBK = 64;
constexpr int kStages = 4, kSplitK = 1;
constexpr int kClusterM = 2, kClusterN = 1, kClusterCtas = 2;
// Accumulators of so many tiles in tensor memory, and the columns of it that a CTA takes.
constexpr int kTiles = 1, kColumns = 512;
// Warps that load, multiply, allocate and rest; then one warpgroup that stores.
constexpr int kThreads = 256, kConsumers = 1, kSharers = 1;
// Instructions side by side along the columns of a tile. Each has a tile of the columns' operand of its own, in a stage one behind
// the other, and neighbouring columns of tensor memory.
constexpr int kPanels = 2;

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

CUTE_DEVICE int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address of the same variable in another CTA of the cluster.
CUTE_DEVICE uint32_t at_rank(uint32_t address, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// Relaxed: the fence before it releases the mbarriers, and there is nothing else to wait for.
CUTE_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
CUTE_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// At an address of any CTA of the cluster. Not .release.cluster: it would wait for all of the thread's memory accesses, and tcgen05.wait
// has read what is handed back.
CUTE_DEVICE void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// The same place in the first CTA of the pair: ranks are in the bits from 24 on.
CUTE_DEVICE uint32_t leaders(uint32_t address) { return address & 0xfeffffff; }

// A box at (column, row) of a matrix to shared memory; its bytes count on the mbarrier. Where several CTAs share it, to
// the same place in all CTAs of the mask, and on the mbarrier of each.
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

// A box from shared memory to (column, row) of D, clipped to it. Stores of one thread form groups.
CUTE_DEVICE void store_box(TensorMap const* map, uint32_t source, int col, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, { %1, %2 }], [%3];"
               :: "l"(map), "r"(col), "r"(row), "r"(source) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until all of this thread's stores but the last N have read their source.
template <int N>
CUTE_DEVICE void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(N) : "memory");
}

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
using TileB = AlongK<kBN / 2 / kPanels>;
constexpr int kBytesA = kBM * kBK * 2, kBytesB = kBN / 2 * kBK * 2, kStageBytes = kBytesA + kBytesB;

// The rows and columns of the instructions are those of D.
using TileX = TileA;
using TileY = TileB;
constexpr int kRows = kBM, kCols = kBN;

// The instruction descriptor: types of D, X and Y, whether X and Y lie across k, columns, rows of both CTAs.
constexpr uint32_t kXAcross = 0, kYAcross = 0;
constexpr uint32_t kInstruction = 1u << 4 | 0u << 7 | 0u << 10 | kXAcross << 15 | kYAcross << 16 | kCols / kPanels / 8u << 17 | 2 * kRows / 16u << 24;
static_assert(kRows == 128 && kCols / kPanels % 32 == 0 && kCols / kPanels <= 256);

// Sums in tensor memory = x * y + (accumulate ? sums : 0), 16 of k. Operands are descriptors of tiles in shared memory;
// asynchronous.
CUTE_DEVICE void mma(uint32_t sums, uint64_t x, uint64_t y, bool accumulate) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.b32 p, %4, 0;\n"
               "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n"
               "}" :: "r"(sums), "l"(x), "l"(y), "r"(kInstruction), "r"(int(accumulate)) : "memory");
}

// Arrives when this thread's multiplications so far are done, at the same place in all CTAs of the mask.
CUTE_DEVICE void commit(uint32_t barrier, uint16_t ctas) {
  asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;"
               :: "r"(barrier), "h"(ctas) : "memory");
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

// Columns of tensor memory, by a warp in each CTA of the pair; their address goes to shared memory. No more are asked for.
CUTE_DEVICE void allocate_columns(uint32_t target) {
  asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" :: "r"(target), "n"(kColumns) : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
}

// By the same warp in each CTA of the pair, when nobody uses them any more.
CUTE_DEVICE void free_columns(uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" :: "r"(columns), "n"(kColumns) : "memory");
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
constexpr int kAtomN = 64, kAtomRegisters = 32;
constexpr int kAtomsM = 2, kAtomsN = 1, kChunks = kCols / kAtomN;
constexpr int kShareRows = kRows, kShareCols = kCols;
using Accumulators = Accumulator[kAtomsM][kAtomsN][kAtomRegisters];

// Columns of the accumulators at an address of tensor memory, all lanes' when it returns.
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

// Shared memory, as byte addresses: the ring, the epilogue's buffers, mbarriers, the address of the columns of tensor memory.
struct Shared {
  uint32_t base;
  CUTE_DEVICE uint32_t stage(int i) const { return base + i * kStageBytes; }
  CUTE_DEVICE uint32_t buffers(int warp) const { return stage(kStages) + warp * 4096; }
  CUTE_DEVICE uint32_t full(int i) const { return stage(kStages) + 16384 + i * 16; }
  CUTE_DEVICE uint32_t empty(int i) const { return full(i) + 8; }
  CUTE_DEVICE uint32_t summed(int i) const { return full(kStages + i); }
  CUTE_DEVICE uint32_t stored(int i) const { return full(kStages + i) + 8; }
  CUTE_DEVICE uint32_t columns() const { return full(kStages + 2); }
};
static_assert(kStages * kStageBytes + 16384 + kStages * 16 + 48 == 213104);
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

CUTE_DEVICE int work_items(Gemm const& gemm) { return clusters_m(gemm) * clusters_n(gemm); }

CUTE_DEVICE Work work_of(Gemm const& gemm, int item, int rank) { return {tile_of(gemm, item, rank), 0, steps_of(gemm)}; }

// Two neighbours of one row, of the accumulators of 8 columns: e = 0 in row lane / 4, e = 1 in the row 8 below.
CUTE_DEVICE uint32_t pair(Accumulator const (&d)[kAtomRegisters], int columns, int e) {
  const half2 rounded = __floats2half2_rn(d[columns * 4 + e * 2], d[columns * 4 + e * 2 + 1]);
  return reinterpret_cast<uint32_t const&>(rounded);
}

// Four 8 x 8 matrices from registers to shared memory; every lane has the address of one row.
CUTE_DEVICE void store_matrices(uint32_t target, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4 };"
               :: "r"(target), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Groups of columns of a load that are stored at a time.
constexpr int kGroup = 64, kGroups = kAtomN / kGroup;
CUTE_DEVICE constexpr int first_column(int group) { return group * kGroup; }

// Every warp stores by itself, 16 rows of the load and a group of columns at a time, through two swizzled buffers.
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
    // The store before the last, which has read this buffer; after an odd number of rounds it was the last.
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

// By one thread: each full stage takes the producer's arrival and all bytes; an empty one the end of the multiplications of every
// CTA pair that reads what this CTA brought. Summed: the end of a tile's; stored: an arrival of every warp that has its accumulators.
CUTE_DEVICE void init_barriers(Shared const& shared) {
  for (int i = 0; i < kStages; ++i) {
    init_barrier(shared.full(i), 1);
    init_barrier(shared.empty(i), 1);
  }
  for (int i = 0; i < kTiles; ++i) {
    init_barrier(shared.summed(i), 1);
    init_barrier(shared.stored(i), 8);
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
      const uint32_t stage = shared.stage(place.stage), full = leaders(shared.full(place.stage));
      wait(shared.empty(place.stage), place.parity ^ 1);
      if (rank % 2 == 0) {
        expect_bytes(shared.full(place.stage), 2 * kStageBytes);
      }
      TileA::load<kClusterN, 1>(gemm.map_a, stage, full, work.row, step * kBK, gemm.policy_a, rank_n, row_ctas);
      CUTE_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        TileB::load<kClusterM / 2, 1>(gemm.map_b, stage + kBytesA + panel * (kBytesB / kPanels), full, work.col + panel * (kBN / kPanels) + rank % 2 * (kBN / kPanels / 2), step * kBK, gemm.policy_b, rank_m / 2, col_ctas);
      }
      place.advance();
    }
  }
  // Other CTAs' warps arrive here: this one lives until they have.
  for (int i = 0; i < kStages; ++i) {
    wait(shared.empty(place.stage), place.parity ^ 1);
    place.advance();
  }
}

// The CTAs that brought what this thread multiplies: all of the cluster.
CUTE_DEVICE uint16_t bringing_ctas(int) { return (1 << kClusterCtas) - 1; }

// One thread multiplies for both CTAs of the pair: a k-tile when it has arrived, into the accumulators of one tile while those of the other
// are stored. The end of a k-tile's multiplications hands its stage back.
CUTE_DEVICE void multiply(Gemm const& gemm, Shared const& shared, int rank, uint32_t columns) {
  const uint32_t x0 = descriptor_low(shared.stage(0) + 0, TileX::kChunkBytes);
  const uint32_t y0 = descriptor_low(shared.stage(0) + kBytesA, TileY::kChunkBytes);
  const uint16_t brought = bringing_ctas(rank), own = 3 << rank;
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
        CUTE_UNROLL
        for (int panel = 0; panel < kPanels; ++panel) {
          mma(columns + tile.stage * kCols + panel * (kCols / kPanels), descriptor<TileX::kWidth>(x + TileX::offset(0, block) / 16),
              descriptor<TileY::kWidth>(y + panel * (kBytesB / kPanels / 16) + TileY::offset(0, block) / 16), step > work.first || block > 0);
        }
      }
      commit(shared.empty(place.stage), brought);
      place.advance();
    }
    commit(shared.summed(tile.stage), own);
    tile.advance();
  }
  // The other CTA's warps arrive here: this one lives until they have.
  for (int i = 0; i < kTiles; ++i) {
    wait(shared.stored(tile.stage), tile.parity ^ 1);
    tile.advance();
  }
}

// Where this lane tells that accumulators are free: the first such barrier of the CTA that multiplies, 0 in all lanes but the first.
CUTE_DEVICE uint32_t stored_barriers(Shared const& shared, int rank) {
  return threadIdx.x % 32 == 0 ? at_rank(shared.stored(0), rank & ~1) : 0;
}

// This warp has a tile's accumulators in registers, or has stored them: they may be replaced.
CUTE_DEVICE void release(uint32_t stored, int tile) {
  fence_before_arrival();
  __syncwarp();
  if (stored) {
    arrive_at(stored + tile * 16);
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
      store_share(gemm, shared, work.row, work.col, share_row, share_col, tCrD);
    }

    tile.advance();
  }

  wait_for_stores<0>();  // shared memory is not given up before
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
hgemm_sm100_tcgen05_f32_tn_128x512x64_s4_863d084351(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_d, half* d, int ldd, int m, int n, int k, int along_n, int band,
    uint64_t policy_a, uint64_t policy_b, float* partials, unsigned* arrivals) {
  const Gemm gemm{&map_a, &map_b, &map_d, d, ldd, m, n, k, along_n, band, policy_a, policy_b, partials, arrivals};
  const Shared shared{uniform(smem_address(smem))};
  const int warp = uniform(threadIdx.x / 32);
  const int rank = cluster_rank();
  if (warp == 0 && elect_lane()) {
    prefetch_map(gemm.map_a);
    prefetch_map(gemm.map_b);
    prefetch_map(gemm.map_d);
    init_barriers(shared);
  }
  if (warp == 2) {
    allocate_columns(shared.columns());
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  cluster_arrive();
  cluster_wait();
  __syncthreads();
  let_next_kernel_start();
  wait_for_previous_kernel();
  const uint32_t columns = load_word(shared.columns());
  if (warp == 0) {
    if (elect_lane()) {
      produce(gemm, shared, rank);
    }
  } else if (warp == 1) {
    if (rank % 2 == 0 && elect_lane()) {
      multiply(gemm, shared, rank, columns);
    }
  } else if (warp >= 4) {
    store_tiles(gemm, shared, rank, columns);
    fence_before_arrival();
  }
  __syncwarp();
  // Nobody uses tensor memory any more, nor the other CTAs of the cluster this one.
  __syncthreads();
  cluster_arrive();
  cluster_wait();
  if (warp == 2) {
    fence_behind_wait();
    free_columns(columns);
  }
}

}  // namespace hgemm_sm100_tcgen05_f32_tn_128x512x64_s4_863d084351
