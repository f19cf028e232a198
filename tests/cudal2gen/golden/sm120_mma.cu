// D(m,n) = A(m,k) * B(n,k)^T: fp16 in and out, f32 accumulators, row-major, leading dimensions in elements.
// Method: a producer warpgroup loads by TMA into a ring of stages, consumer warpgroups multiply by ldmatrix and mma.sync, cooperative.
//
// Launch, all divisions rounded up:
//   grid    as many clusters as fit on the GPU, at most one per cluster tile of 128 x 128
//   cluster (1, 1, 1)
//   block   384
//   shared  98368 bytes, dynamic; above 48 KiB, so set cudaFuncAttributeMaxDynamicSharedMemorySize first
//
// Tensor maps of fp16, with boxes of columns x rows; the swizzle is as wide as a box, elements out of bounds are zero
//   A       64 x 128 of (k, m)
//   B       64 x 128 of (k, n)
//   D       64 x 16 of (n, m)
//
// Compile nvcc -std=c++17 --expt-relaxed-constexpr -gencode arch=compute_120f,code=sm_120f -I CUTLASS/include
//
// Needs   A and B and D aligned to 16 bytes, their leading dimensions multiples of 8

#include <cstdint>

#include <cuda_fp16.h>

#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>

namespace hgemm_sm120_mma_f32_tn_128x128x64_s2_d54e21efa0 {

using namespace cute;

// The CTA tile in elements, the ring of k-tiles, and the CTAs of a cluster, which share operands.
constexpr int kBM = 128, kBN = 128, kBK = 64;
constexpr int kStages = 2;
constexpr int kClusterM = 1, kClusterN = 1, kClusterCtas = 1;
// One producer warpgroup, then the consumers. kSharers consumers share a tile, kSharersN of them along its columns.
constexpr int kConsumers = 2, kSharers = 2, kSharersN = 1;
constexpr int kThreads = 128 * (1 + kConsumers);

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
// registers.
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

// Loads a box at (column, row) of a matrix to shared memory; its bytes count on the mbarrier. If several CTAs share it, it is loaded
// to the same place in all CTAs of the mask, and counts on the mbarrier of each.
template <int Sharing>
CUTE_DEVICE void load_box(TensorMap const* map, uint32_t target, uint32_t barrier, int col, int row, uint64_t policy,
                          uint16_t ctas) {
  if constexpr (Sharing == 1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, { %2, %3 }], [%4], %5;"
                 :: "r"(target), "l"(map), "r"(col), "r"(row), "r"(barrier), "l"(policy) : "memory");
  } else {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 ".L2::cache_hint [%0], [%1, { %2, %3 }], [%4], %5, %6;"
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
using TileB = AlongK<kBN>;
constexpr int kBytesA = kBM * kBK * 2, kBytesB = kBN * kBK * 2, kStageBytes = kBytesA + kBytesB;

// Rows and columns of the mma.syncs are rows and columns of D.
using TileX = TileA;
using TileY = TileB;
constexpr int kRows = kBM, kCols = kBN;

// A warpgroup's share of 64 x 128: warp w has rows 16 w to 16 w + 15. Of every 8 columns a lane has two
// neighbours in row lane / 4, and two more in the row 8 below.
using Accumulator = float;  // a register has one sum
constexpr int kAtomN = 128, kAtomRegisters = kAtomN / 2;

// d += x * y, for 16 rows, 8 columns and 16 of k.
CUTE_DEVICE void mma(float* d, uint32_t const (&x)[4], uint32_t y0, uint32_t y1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y0), "r"(y1));
}

// A fragment is 16 rows (or columns) and 16 of k of a tile. Its registers are those of mma.sync: (0..7, k 0..7), (8..15, k 0..7),
// (0..7, k 8..15), (8..15, k 8..15). Each lane passes the address of one row of 16 bytes to ldmatrix. The swizzle depends on the lane
// alone, so constant offsets are added to the lane's address, or applied to its vector by an exclusive or.
template <class Tile>
struct Fragments;

template <int Extent>
struct Fragments<AlongK<Extent>> {
  using Tile = AlongK<Extent>;

  CUTE_DEVICE static uint32_t first(uint32_t tile, int row) {
    const int lane = threadIdx.x % 32;
    return tile + Tile::offset(row + lane % 16, 0) + (lane / 16 ^ lane % 8) * 16;
  }
  CUTE_DEVICE static void load(uint32_t (&f)[4], uint32_t first, int row, int block) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"((first ^ block % 4 * 32) + Tile::offset(row, block / 4 * 4)) : "memory");
  }
};

// A warpgroup's share of the tile: kAtomsM x kAtomsN blocks of 64 rows.
constexpr int kShareRows = kRows / (kSharers / kSharersN), kShareCols = kCols / kSharersN;
constexpr int kAtomsM = kShareRows / 64, kAtomsN = kShareCols / kAtomN;
using Accumulators = Accumulator[kAtomsM][kAtomsN][kAtomRegisters];
static_assert(kAtomsM * kAtomsN * kAtomRegisters == 64);

// Addresses of bytes in shared memory: the ring, the epilogue's buffers, the mbarriers.
struct Shared {
  uint32_t base;
  CUTE_DEVICE uint32_t stage(int i) const { return base + i * kStageBytes; }
  CUTE_DEVICE uint32_t buffers(int warp) const { return stage(kStages) + warp * 4096; }
  CUTE_DEVICE uint32_t full(int i) const { return stage(kStages) + 32768 + i * 16; }
  CUTE_DEVICE uint32_t empty(int i) const { return full(i) + 8; }
  CUTE_DEVICE uint32_t order(int i) const { return full(kStages) + i * 8; }
};
static_assert(kStages * kStageBytes + 32768 + kStages * 16 + 32 == 98368);
extern __shared__ __align__(1024) unsigned char smem[];

// A position in the ring, and the parity of its phase.
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

// The groups of columns of a warpgroup that are stored at a time.
constexpr int kGroup = 64, kGroups = kAtomN / kGroup;
CUTE_DEVICE constexpr int first_column(int group) { return group * kGroup; }

// Each warp stores by itself, 16 rows of the warpgroup and a group of columns at a time, through two swizzled buffers.
CUTE_DEVICE void store_share(Gemm const& gemm, Shared const& shared, int row, int col, int share_row, int share_col,
                             Accumulators const& tCrD) {
  constexpr int kRounds = kAtomsM * kAtomsN * kGroups, kBufferBytes = 16 * kGroup * 2;
  using TileD = decltype(composition(Swizzle<kGroup / 32 + 1, 0, 3>{},
                                     Layout<Shape<_16, Int<kGroup / 8>>, Stride<Int<kGroup / 8>, _1>>{}));
  const int warp = uniform(threadIdx.x / 32) - 4, lane = threadIdx.x % 32;
  const bool leader = elect_lane();
  share_row += warp % 4 * 16;
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
                col + share_col + j * kAtomN + first, row + share_row + i * 64);
    }
  }
}

// Called by one thread. A stage is full after the producer's arrival and all its bytes, and empty after one arrival of each warp
// that reads what this CTA loaded.
CUTE_DEVICE void init_barriers(Shared const& shared) {
  for (int i = 0; i < kStages; ++i) {
    init_barrier(shared.full(i), 1);
    init_barrier(shared.empty(i), (kClusterM + kClusterN - 1) * kSharers * 4);
  }

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
  // Each cluster takes tiles until none is left.
  CUTE_NO_UNROLL
  for (int item = blockIdx.x / kClusterCtas; item < work_items(gemm); item += gridDim.x / kClusterCtas) {
    const Work work = work_of(gemm, item, rank);

    // The tile is known before the wait; the loads behind it read what the previous kernel wrote. ptxas moves the wait above
    // arithmetic, but not above a branch on its result. This one is always taken. For later tiles the wait returns at once.
    if (work.row + work.col >= 0) {
      wait_for_previous_kernel();
    }
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

// Returns the mbarrier at which the first lane hands back stage 0; 0 in the other lanes.
CUTE_DEVICE uint32_t empty_barriers(Shared const& shared, int) { return threadIdx.x % 32 == 0 ? shared.empty(0) : 0; }

// Tells the producer that this warp has read a stage, so that it may be overwritten.
CUTE_DEVICE void release(uint32_t empty, int stage) {
  if (empty) {
    arrive(empty + stage * 16);
  }
}

// Multiplies a warpgroup's share of a tile. A warp hands a stage back when it has all fragments from it.
CUTE_DEVICE void multiply(Shared const& shared, Place& place, int steps, int share_row, int share_col, uint32_t empty,
                          Accumulators& tCrD) {
  const int row = share_row + uniform(threadIdx.x / 32) % 4 * 16;
  const uint32_t x0 = Fragments<TileX>::first(shared.stage(0) + 0, row);
  const uint32_t y0 = Fragments<TileY>::first(shared.stage(0) + kBytesA, share_col);
  CUTE_UNROLL
  for (int i = 0; i < kAtomsM; ++i) {
    CUTE_UNROLL
    for (int e = 0; e < kAtomRegisters; ++e) {
      tCrD[i][0][e] = 0;
    }
  }
  CUTE_NO_UNROLL
  for (int step = 0; step < steps; ++step) {
    wait(shared.full(place.stage), place.parity);
    const uint32_t x = x0 + place.stage * kStageBytes, y = y0 + place.stage * kStageBytes;
    CUTE_UNROLL
    for (int block = 0; block < kBK / 16; ++block) {
      uint32_t fragments[kAtomsM][4];
      CUTE_UNROLL
      for (int i = 0; i < kAtomsM; ++i) {
        Fragments<TileX>::load(fragments[i], x, i * 64, block);
      }
      CUTE_UNROLL
      for (int col = 0; col < kAtomN; col += 16) {
        uint32_t columns[4];
        Fragments<TileY>::load(columns, y, col, block);
        CUTE_UNROLL
        for (int i = 0; i < kAtomsM; ++i) {
          mma(tCrD[i][0] + col / 8 * 4, fragments[i], columns[0], columns[2]);
          mma(tCrD[i][0] + (col / 8 + 1) * 4, fragments[i], columns[1], columns[3]);
        }
      }
    }
    __syncwarp();
    release(empty, place.stage);
    place.advance();
  }

}

// A consumer warpgroup multiplies, then stores its share.
CUTE_DEVICE void consume(Gemm const& gemm, Shared const& shared, int rank) {
  const int warpgroup = uniform(threadIdx.x / 128) - 1;
  const int share_row = warpgroup / kSharersN * kShareRows, share_col = warpgroup % kSharersN * kShareCols;
  const uint32_t empty = empty_barriers(shared, rank);
  Place place;

  // Each cluster takes tiles until none is left.
  CUTE_NO_UNROLL
  for (int item = blockIdx.x / kClusterCtas; item < work_items(gemm); item += gridDim.x / kClusterCtas) {
    const Work work = work_of(gemm, item, rank);

    Accumulators tCrD;
    multiply(shared, place, work.last - work.first, share_row, share_col, empty, tCrD);
    store_share(gemm, shared, work.row, work.col, share_row, share_col, tCrD);
  }

  wait_for_stores<0>();  // they must have read shared memory before the CTA exits
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
hgemm_sm120_mma_f32_tn_128x128x64_s2_d54e21efa0(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_d, half* d, int ldd, int m, int n, int k, const __grid_constant__ Bands bands,
    uint64_t policy_a, uint64_t policy_b, float* partials, unsigned* arrivals) {
  const Gemm gemm{&map_a, &map_b, &map_d, d, ldd, m, n, k, bands, policy_a, policy_b};
  const Shared shared{uniform(smem_address(smem))};
  const int warp = uniform(threadIdx.x / 32);
  constexpr int rank = 0;
  const bool elected = elect_lane();
  // Warp 0 loads, so other warps set up what the first load needs.
  if (warp == 1 && elected) {
    init_barriers(shared);
  } else if (warp == 2 && elected) {
    prefetch_map(gemm.map_a);
    prefetch_map(gemm.map_b);
    prefetch_map(gemm.map_d);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  let_next_kernel_start();
  if (warp < 4) {
    // Loading needs few registers per thread. The others go to the consumers' threads.
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0 && elected) {
      produce(gemm, shared, rank);
    }
  } else {
    // Waits until the producer has released these registers.
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait_for_previous_kernel();
    consume(gemm, shared, rank);
  }
}

}  // namespace hgemm_sm120_mma_f32_tn_128x128x64_s2_d54e21efa0
