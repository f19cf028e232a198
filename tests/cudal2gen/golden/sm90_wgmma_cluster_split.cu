// D(m,n) = A(m,k) * B(n,k)^T: fp16 in and out, f32 accumulators, row-major, leading dimensions in elements.
// By a ring of TMA stages that a producer warpgroup fills, wgmma in consumer warpgroups, cooperative.
//
// Launch, all divisions rounded up:
//   grid    (m / 128 * n / 128 * 4, 1, 1)
//   cluster (4, 1, 1)
//   block   384
//   shared  131168 bytes, dynamic; above 48 KiB, so set cudaFuncAttributeMaxDynamicSharedMemorySize first
//
// Tensor maps of fp16, as (columns, rows) of a box; the swizzle is as wide as its columns, out of bounds is zero
//   A       64 x 128 of (k, m)
//   B       64 x 128 of (k, n)
//   D       is not read
//
// Needs   A and B aligned to 16 bytes, their leading dimensions multiples of 8

#include <cstdint>

#include <cuda_fp16.h>

#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>

namespace hgemm_sm90_wgmma_f32_tn_128x128x64_s4_0c82857792 {

using namespace cute;

// CTA tile in elements, the ring of k-tiles, the CTAs of a cluster that share operands.
constexpr int kBM = 128, kBN = 128, kBK = 64;
constexpr int kStages = 4, kSplitK = 4;
constexpr int kClusterM = 1, kClusterN = 1, kClusterCtas = 4;
// A producer warpgroup, then the consumers; kSharers of these share a tile, kSharersN of them along its columns.
constexpr int kConsumers = 2, kSharers = 2, kSharersN = 1;
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

CUTE_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
CUTE_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

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

// The rows and columns of the wgmmas are those of D.
using TileX = TileA;
using TileY = TileB;
constexpr int kRows = kBM, kCols = kBN;

// A warpgroup's share of a 64 x 64 tile: warp w has rows 16 w to 16 w + 15; of each 8 columns a lane has two
// neighbours in row lane / 4, and two more in the row 8 below.
using Accumulator = float;  // a register of one of them
constexpr int kAtomN = 64, kAtomRegisters = 32;

// d = x * y + (accumulate ? d : 0), 16 of k. Operands are descriptors of tiles in shared memory; asynchronous.
CUTE_DEVICE void wgmma(Accumulator (&d)[kAtomRegisters], uint64_t x, uint64_t y, bool accumulate) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
               "}, %32, %33, p, 1, 1, 0, 0;\n"
               "}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
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
static_assert(kAtomsM * kAtomsN * kAtomRegisters == 64);

// Shared memory, as byte addresses: the ring, the epilogue's buffers, mbarriers.
struct Shared {
  uint32_t base;
  CUTE_DEVICE uint32_t stage(int i) const { return base + i * kStageBytes; }
  CUTE_DEVICE uint32_t buffers(int warp) const { return stage(kStages) + warp * 0; }
  CUTE_DEVICE uint32_t full(int i) const { return stage(kStages) + 0 + i * 16; }
  CUTE_DEVICE uint32_t empty(int i) const { return full(i) + 8; }
  CUTE_DEVICE uint32_t order(int i) const { return full(kStages) + i * 8; }
};
static_assert(kStages * kStageBytes + 0 + kStages * 16 + 32 == 131168);
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
  return {(cluster_m * kClusterM + 0) * kBM, (cluster_n * kClusterN + 0) * kBN};
}

CUTE_DEVICE Work work_of(Gemm const& gemm, int item, int rank) {
  const int64_t steps = steps_of(gemm);
  return {tile_of(gemm, item, rank), int(steps * rank / kSplitK), int(steps * (rank + 1) / kSplitK)};
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

// A warp's 16 rows and 8 columns of the wgmma, for the tile of D at (row, col).
CUTE_DEVICE void store_columns(Gemm const& gemm, int row, int col, int x, int y, uint32_t upper, uint32_t lower) {
  const int lane = threadIdx.x % 32;
  x += threadIdx.x / 32 % 4 * 16;
  store_pair(gemm, row + x + lane / 4, col + y + lane % 4 * 2, upper);
  store_pair(gemm, row + x + 8 + lane / 4, col + y + lane % 4 * 2, lower);
}

CUTE_DEVICE void store_share(Gemm const& gemm, Shared const&, int row, int col, int share_row, int share_col,
                             Accumulators const& tCrD) {
  CUTE_UNROLL
  for (int i = 0; i < kAtomsM; ++i) {
    CUTE_UNROLL
    for (int j = 0; j < kAtomsN; ++j) {
      CUTE_UNROLL
      for (int columns = 0; columns < kAtomN / 8; ++columns) {
        store_columns(gemm, row, col, share_row + i * 64, share_col + j * kAtomN + columns * 8,
                      pair(tCrD[i][j], columns, 0), pair(tCrD[i][j], columns, 1));
      }
    }
  }
}

// The accumulators of 8 columns, 4 of a lane, as floats; and back.
CUTE_DEVICE float4 load_floats(Accumulator const (&d)[kAtomRegisters], int columns) {
  return make_float4(d[columns * 4], d[columns * 4 + 1], d[columns * 4 + 2], d[columns * 4 + 3]);
}

// The sum of a vector over the CTAs of the cluster, in rank order; all have it at the same address.
CUTE_DEVICE float4 sum_over_cluster(uint32_t address) {
  float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
  CUTE_UNROLL
  for (int slice = 0; slice < kSplitK; ++slice) {
    float4 part;
    asm volatile("ld.shared::cluster.v4.f32 { %0, %1, %2, %3 }, [%4];"
                 : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w)
                 : "r"(at_rank(address, slice)) : "memory");
    sum.x += part.x;
    sum.y += part.y;
    sum.z += part.z;
    sum.w += part.w;
  }
  return sum;
}

// Each CTA of the cluster has the sum over its slice of k in its accumulators. They meet in shared memory, where the
// operands were; every CTA adds a part of the columns in rank order, and stores it.
CUTE_DEVICE void reduce_and_store(Gemm const& gemm, int row, int col, int share_row, int share_col, int thread, int rank,
                                  Accumulators const& tCrD) {
  constexpr int kSharingThreads = 128 * kSharers, kVectors = kAtomsM * kAtomsN * (kAtomN / 8);
  float4* const partials = reinterpret_cast<float4*>(smem) + thread;
  asm volatile("bar.sync 1, %0;" :: "n"(kSharingThreads) : "memory");  // all warps have read the operands
  CUTE_UNROLL
  for (int vector = 0; vector < kVectors; ++vector) {
    const int columns = vector % (kAtomN / 8), atom = vector / (kAtomN / 8);
    partials[vector * kSharingThreads] = load_floats(tCrD[atom / kAtomsN][atom % kAtomsN], columns);
  }
  cluster_arrive();
  cluster_wait();
  CUTE_NO_UNROLL
  for (int vector = rank; vector < kVectors; vector += kSplitK) {
    const float4 sum = sum_over_cluster(smem_address(partials + vector * kSharingThreads));
    const half2 upper = __floats2half2_rn(sum.x, sum.y), lower = __floats2half2_rn(sum.z, sum.w);
    const int columns = vector % (kAtomN / 8), atom = vector / (kAtomN / 8);
    store_columns(gemm, row, col, share_row + atom / kAtomsN * 64, share_col + atom % kAtomsN * kAtomN + columns * 8,
                  reinterpret_cast<uint32_t const&>(upper), reinterpret_cast<uint32_t const&>(lower));
  }
  // Nobody leaves while others may read from it.
  cluster_arrive();
  cluster_wait();
}

// By one thread: each full stage takes the producer's arrival and all bytes; an empty one an arrival of every warp that
// reads what this CTA brought.
CUTE_DEVICE void init_barriers(Shared const& shared) {
  for (int i = 0; i < kStages; ++i) {
    init_barrier(shared.full(i), 1);
    init_barrier(shared.empty(i), (kClusterM + kClusterN - 1) * kSharers * 4);
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
  {
    const Work work = work_of(gemm, blockIdx.x / kClusterCtas, rank);
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
        asm volatile("" : "+f"(tCrD[i][j][e]) :: "memory");
      }
    }
  }
}

// A warpgroup's share of a tile. A k-tile's wgmmas are issued while those of the one before run; its stage is handed
// back when they are done. Not all accumulators are defined before the first.
CUTE_DEVICE void multiply(Shared const& shared, Place& place, int steps, int share_row, int share_col, uint32_t empty,
                          Accumulators& tCrD) {
  const uint32_t x0 = descriptor_low(shared.stage(0) + 0 + TileX::offset(share_row, 0), TileX::kChunkBytes);
  const uint32_t y0 = descriptor_low(shared.stage(0) + kBytesA + TileY::offset(share_col, 0), TileY::kChunkBytes);
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

  wgmma_wait<0>();
  pin(tCrD);
  release(empty, previous);
}

// A consumer warpgroup: multiplies, then stores its share.
CUTE_DEVICE void consume(Gemm const& gemm, Shared const& shared, int rank) {
  const int warpgroup = uniform(threadIdx.x / 128) - 1;
  const int share_row = warpgroup / kSharersN * kShareRows, share_col = warpgroup % kSharersN * kShareCols;
  const uint32_t empty = empty_barriers(shared, rank);
  Place place;

  {
    const Work work = work_of(gemm, blockIdx.x / kClusterCtas, rank);

    Accumulators tCrD;
    multiply(shared, place, work.last - work.first, share_row, share_col, empty, tCrD);
    reduce_and_store(gemm, work.row, work.col, share_row, share_col, threadIdx.x - 128, rank, tCrD);
  }

}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
hgemm_sm90_wgmma_f32_tn_128x128x64_s4_0c82857792(
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
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    cluster_arrive();
    cluster_wait();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume(gemm, shared, rank);
  }
}

}  // namespace hgemm_sm90_wgmma_f32_tn_128x128x64_s4_0c82857792
