// D(m,n) = A(m,k) * B(k,n): fp16 in and out, f16 accumulators, row-major, leading dimensions in elements.
// By a ring of TMA stages that a producer warpgroup fills, wgmma in consumer warpgroups, pingpong.
//
// Launch, all divisions rounded up:
//   grid    as many clusters as fit on the GPU, at most one per cluster tile of 48 x 64
//   cluster (1, 1, 1)
//   block   384
//   shared  168048 bytes, dynamic; above 48 KiB, so set cudaFuncAttributeMaxDynamicSharedMemorySize first
//
// Tensor maps of fp16, as (columns, rows) of a box; the swizzle is as wide as its columns, out of bounds is zero
//   A       64 x 48 of (k, m)
//   B       64 x 128 of (n, k)
//   D       16 x 48 of (n, m)
//
// Needs   A and B and D aligned to 16 bytes, their leading dimensions multiples of 8

#include <cstdint>

#include <cuda_fp16.h>

#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>

namespace hgemm_sm90_wgmma_f16_nn_48x64x128_s5_18df4a2766 {

using namespace cute;

// CTA tile in elements, the ring of k-tiles, the CTAs of a cluster that share operands.
constexpr int kBM = 48, kBN = 64, kBK = 128;
constexpr int kStages = 5, kSplitK = 1;
constexpr int kClusterM = 1, kClusterN = 1, kClusterCtas = 1;
// A producer warpgroup, then the consumers; kSharers of these share a tile, kSharersN of them along its columns.
constexpr int kConsumers = 2, kSharers = 1, kSharersN = 1;
constexpr int kThreads = 128 * (1 + kConsumers);

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

// What all lanes of a warp agree on, where the compiler sees that they do: it stays in uniform registers, of which wgmma takes
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

// A tile whose rows run across k: chunks of Width columns, each of kBK swizzled rows.
template <int Extent, int Width>
struct AcrossK {
  static constexpr int kWidth = Width, kChunkBytes = kBK * Width * 2;

  // Bytes from the tile's first to a k-block of 16 of a column; columns by Width.
  CUTE_DEVICE static constexpr int offset(int col, int block) {
    return col / Width * kChunkBytes + block * 16 * Width * 2;
  }

  // The part of the tile that this CTA brings for the Parts that share it: some rows of each chunk.
  template <int Parts, int>
  CUTE_DEVICE static void load(TensorMap const* map, uint32_t tile, uint32_t barrier, int col, int k, uint64_t policy,
                               int part, uint16_t ctas) {
    constexpr int kRows = kBK / Parts;
    CUTE_UNROLL
    for (int chunk = 0; chunk < Extent / Width; ++chunk) {
      load_box<Parts>(map, tile + chunk * kChunkBytes + part * kRows * Width * 2, barrier, col + chunk * Width,
                      k + part * kRows, policy, ctas);
    }
  }
};

using TileA = AlongK<kBM>;
using TileB = AcrossK<kBN, 64>;
constexpr int kBytesA = kBM * kBK * 2, kBytesB = kBN * kBK * 2, kStageBytes = kBytesA + kBytesB;

// D^T = B^T A^T: the rows of the wgmmas are columns of D.
using TileX = TileB;
using TileY = TileA;
constexpr int kRows = kBN, kCols = kBM;

// A warpgroup's share of a 64 x 48 tile: warp w has rows 16 w to 16 w + 15; of each 8 columns a lane has two
// neighbours in row lane / 4, and two more in the row 8 below.
using Accumulator = uint32_t;  // a register of two neighbours
constexpr int kAtomN = 48, kAtomRegisters = 12;

// d = x * y + (accumulate ? d : 0), 16 of k. Operands are descriptors of tiles in shared memory; asynchronous.
CUTE_DEVICE void wgmma(Accumulator (&d)[kAtomRegisters], uint64_t x, uint64_t y, bool accumulate) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.b32 p, %14, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n48k16.f16.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"
               "}, %12, %13, p, 1, 1, 1, 0;\n"
               "}"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
                 "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11])
               : "l"(x), "l"(y), "r"(int(accumulate)));
}

// Accumulators and operands are as the program says; wgmma may take over.
CUTE_DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
CUTE_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all committed groups but the last N are done.
template <int N>
CUTE_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}

// What wgmma is told of an operand. The low word: bytes between chunks of columns, and the low 18 bits of the address; in a
// cluster the rank of the CTA lies above them. It is 32 bits wide so that a step of the loop is one uniform addition.
CUTE_DEVICE uint32_t descriptor_low(uint32_t address, int chunk_bytes) { return chunk_bytes >> 4 << 16 | (address & 0x3ffff) >> 4; }

// The high word: swizzle mode, bytes between blocks of 8 rows.
template <int Width>
CUTE_DEVICE uint64_t descriptor(uint32_t low) {
  constexpr uint64_t kMode = Width == 64 ? 1 : Width == 32 ? 2 : 3, kBlockBytes = 8 * Width * 2;
  return (kMode << 30 | kBlockBytes >> 4) << 32 | low;
}

// A warpgroup's share of the tile: kAtomsM x kAtomsN wgmmas.
constexpr int kShareRows = kRows / (kSharers / kSharersN), kShareCols = kCols / kSharersN;
constexpr int kAtomsM = kShareRows / 64, kAtomsN = kShareCols / kAtomN;
using Accumulators = Accumulator[kAtomsM][kAtomsN][kAtomRegisters];
static_assert(kAtomsM * kAtomsN * kAtomRegisters == 12);

// Shared memory, as byte addresses: the ring, the epilogue's buffers, mbarriers.
struct Shared {
  uint32_t base;
  CUTE_DEVICE uint32_t stage(int i) const { return base + i * kStageBytes; }
  CUTE_DEVICE uint32_t buffers(int warp) const { return stage(kStages) + warp * 3072; }
  CUTE_DEVICE uint32_t full(int i) const { return stage(kStages) + 24576 + i * 16; }
  CUTE_DEVICE uint32_t empty(int i) const { return full(i) + 8; }
  CUTE_DEVICE uint32_t order(int i) const { return full(kStages) + i * 8; }
};
static_assert(kStages * kStageBytes + 24576 + kStages * 16 + 32 == 168048);
extern __shared__ __align__(1024) unsigned char smem[];

// A place in the ring, and the parity of its phase.
struct Place {
  int stage = 0;
  uint32_t parity = 0;

  CUTE_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  CUTE_DEVICE void advance(int steps) {
    parity ^= (stage + steps) / kStages & 1;
    stage = (stage + steps) % kStages;
  }
};

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
  return d[columns * 2 + e];
}

// Four 8 x 8 matrices from registers to shared memory, transposed; every lane has the address of one row.
CUTE_DEVICE void store_matrices(uint32_t target, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4 };"
               :: "r"(target), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Groups of columns of a wgmma that are stored at a time.
constexpr int kGroup = 48, kGroups = kAtomN / kGroup;
CUTE_DEVICE constexpr int first_column(int group) { return group * kGroup; }

// Every warp stores by itself, 16 rows of the wgmma and a group of columns at a time, through two swizzled buffers.
CUTE_DEVICE void store_share(Gemm const& gemm, Shared const& shared, int row, int col, int share_row, int share_col,
                             Accumulators const& tCrD) {
  constexpr int kRounds = kAtomsM * kAtomsN * kGroups, kBufferBytes = 16 * kGroup * 2;
  using TileD = decltype(composition(Swizzle<1, 0, 3>{}, Layout<Shape<Int<kGroup>, _2>, Stride<_2, _1>>{}));
  const int warp = uniform(threadIdx.x / 32) - 4, lane = threadIdx.x % 32;
  const bool leader = elect_lane();
  share_row += warp % 4 * 16;
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
      store_matrices(target + TileD{}(at + lane / 16 * 8 + lane % 8, lane / 8 % 2) * 16,
                     pair(tCrD[i][j], columns, 0), pair(tCrD[i][j], columns, 1),
                     pair(tCrD[i][j], columns + 1, 0), pair(tCrD[i][j], columns + 1, 1));
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (leader) {
      store_box(gemm.map_d, target,
                col + share_row + i * 64, row + share_col + j * kAtomN + first);
    }
  }
}

// By one thread: each full stage takes the producer's arrival and all bytes; an empty one an arrival of every warp that
// reads what this CTA brought.
CUTE_DEVICE void init_barriers(Shared const& shared) {
  for (int i = 0; i < kStages; ++i) {
    init_barrier(shared.full(i), 1);
    init_barrier(shared.empty(i), (kClusterM + kClusterN - 1) * kSharers * 4);
  }
  for (int i = 0; i < 2; ++i) {
    init_barrier(shared.order(i), 4);  // the other warpgroup's warps
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

// Where this lane hands stages back: the first empty barrier, 0 in all lanes but the first.
CUTE_DEVICE uint32_t empty_barriers(Shared const& shared, int) { return threadIdx.x % 32 == 0 ? shared.empty(0) : 0; }

// This warp has read a stage: it may be replaced.
CUTE_DEVICE void release(uint32_t empty, int stage) {
  if (empty) {
    arrive(empty + stage * 16);
  }
}

// Keeps the compiler from moving accumulators while wgmmas are on their way.
CUTE_DEVICE void pin(Accumulators& tCrD) {
  CUTE_UNROLL
  for (int i = 0; i < kAtomsM; ++i) {
    CUTE_UNROLL
    for (int j = 0; j < kAtomsN; ++j) {
      CUTE_UNROLL
      for (int e = 0; e < kAtomRegisters; ++e) {
        asm volatile("" : "+r"(tCrD[i][j][e]) :: "memory");
      }
    }
  }
}

// A warpgroup's share of a tile. A k-tile's wgmmas are issued while those of the one before run; its stage is handed
// back when they are done. Not all accumulators are defined before the first.
CUTE_DEVICE void multiply(Shared const& shared, Place& place, int steps, int share_row, int share_col, uint32_t empty,
                          Accumulators& tCrD) {
  const uint32_t x0 = descriptor_low(shared.stage(0) + kBytesA + TileX::offset(share_row, 0), TileX::kChunkBytes);
  const uint32_t y0 = descriptor_low(shared.stage(0) + 0 + TileY::offset(share_col, 0), TileY::kChunkBytes);
  int previous = 0;
  CUTE_NO_UNROLL
  for (int step = 0; step < steps; ++step) {
    wait(shared.full(place.stage), place.parity);
    const uint32_t x = x0 + place.stage * (kStageBytes / 16), y = y0 + place.stage * (kStageBytes / 16);
    pin(tCrD);
    wgmma_begin();
    CUTE_UNROLL
    for (int block = 0; block < kBK / 16; ++block) {
      CUTE_UNROLL
      for (int i = 0; i < kAtomsM; ++i) {
        CUTE_UNROLL
        for (int j = 0; j < kAtomsN; ++j) {
          wgmma(tCrD[i][j], descriptor<TileX::kWidth>(x + TileX::offset(i * 64, block) / 16),
                descriptor<TileY::kWidth>(y + TileY::offset(j * kAtomN, block) / 16), step > 0 || block > 0);
        }
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) {
      release(empty, previous);
    }
    previous = place.stage;
    place.advance();
  }
  // The other warpgroup's turn to multiply.
  if (threadIdx.x % 32 == 0) {
    arrive(shared.order(2 - threadIdx.x / 128));
  }
  wgmma_wait<0>();
  pin(tCrD);
  release(empty, previous);
}

// A consumer warpgroup: multiplies, and stores one tile while the other multiplies the next.
CUTE_DEVICE void consume(Gemm const& gemm, Shared const& shared, int rank) {
  const int warpgroup = uniform(threadIdx.x / 128) - 1;
  constexpr int share_row = 0, share_col = 0;
  const uint32_t empty = empty_barriers(shared, rank);
  Place place;
  int turn = 0;
  uint32_t parity = warpgroup ^ 1;  // the first warpgroup's first turn waits for nobody
  // Every cluster takes tiles until none is left.
  CUTE_NO_UNROLL
  for (int item = blockIdx.x / kClusterCtas; item < work_items(gemm); item += gridDim.x / kClusterCtas) {
    const Work work = work_of(gemm, item, rank);

    const bool mine = turn == warpgroup;
    turn ^= 1;
    if (!mine) {
      place.advance(work.last - work.first);
      continue;
    }
    wait(shared.order(warpgroup), parity);
    parity ^= 1;
    Accumulators tCrD;
    multiply(shared, place, work.last - work.first, share_row, share_col, empty, tCrD);
    store_share(gemm, shared, work.row, work.col, share_row, share_col, tCrD);
  }

  wait_for_stores<0>();  // shared memory is not given up before
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
hgemm_sm90_wgmma_f16_nn_48x64x128_s5_18df4a2766(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_d, half* d, int ldd, int m, int n, int k, int along_n, int band,
    uint64_t policy_a, uint64_t policy_b, float* partials, unsigned* arrivals) {
  const Gemm gemm{&map_a, &map_b, &map_d, d, ldd, m, n, k, along_n, band, policy_a, policy_b, partials, arrivals};
  const Shared shared{uniform(smem_address(smem))};
  const int warp = uniform(threadIdx.x / 32);
  constexpr int rank = 0;
  if (warp == 0 && elect_lane()) {
    prefetch_map(gemm.map_a);
    prefetch_map(gemm.map_b);
    prefetch_map(gemm.map_d);
    init_barriers(shared);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0 && elect_lane()) {
      produce(gemm, shared, rank);
    }

  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume(gemm, shared, rank);
  }
}

}  // namespace hgemm_sm90_wgmma_f16_nn_48x64x128_s5_18df4a2766
