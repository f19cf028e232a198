// D(m,n) = A(m,k) * B(n,k)^T: fp16 in and out, f32 accumulators, row-major, leading dimensions in elements.
// Method: a producer warpgroup loads by TMA into a ring of stages, consumer warpgroups multiply by wgmma, cooperative.
//
// Launch, all divisions rounded up:
//   grid    as many clusters as fit on the GPU, at most one per cluster tile of 256 x 256
//   cluster (2, 1, 1)
//   block   384
//   shared  229472 bytes, dynamic; above 48 KiB, so set cudaFuncAttributeMaxDynamicSharedMemorySize first
//
// Tensor maps of fp16, with boxes of columns x rows; the swizzle is as wide as a box, elements out of bounds are zero
//   A       64 x 128 of (k, m)
//   B       64 x 128 of (k, n)
//   D       64 x 16 of (n, m)
//
// Compile nvcc -std=c++17 --expt-relaxed-constexpr -gencode arch=compute_90a,code=sm_90a -I CUTLASS/include
//
// Needs   A and B and D aligned to 16 bytes, their leading dimensions multiples of 8

#include <cstdint>

#include <cuda_fp16.h>

#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>

namespace hgemm_sm90_wgmma_f32_tn_128x256x64_s4_b2fa221cc9 {

using namespace cute;

// The CTA tile in elements, the ring of k-tiles, and the CTAs of a cluster, which share operands.
constexpr int kBM = 128, kBN = 256, kBK = 64;
constexpr int kStages = 4;
constexpr int kClusterM = 2, kClusterN = 1, kClusterCtas = 2;
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
// registers, from which wgmma takes its descriptors.
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
// thread: after wgmma_wait, the thread has read what it hands back.
CUTE_DEVICE void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Loads a box at (column, row) of a matrix to shared memory; its bytes count on the mbarrier. If several CTAs share it, it is loaded
// to the same place in all CTAs of the mask, and counts on the mbarrier of each.
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

// Rows and columns of the wgmmas are rows and columns of D.
using TileX = TileA;
using TileY = TileB;
constexpr int kRows = kBM, kCols = kBN;

// A warpgroup's share of a 64 x 256 tile: warp w has rows 16 w to 16 w + 15. Of every 8 columns a lane has two
// neighbours in row lane / 4, and two more in the row 8 below.
using Accumulator = float;  // a register has one sum
constexpr int kAtomN = 256, kAtomRegisters = 128;

// d = x * y + (accumulate ? d : 0), for 16 of k. x and y are descriptors of tiles in shared memory. The instruction is asynchronous.
CUTE_DEVICE void wgmma(Accumulator (&d)[kAtomRegisters], uint64_t x, uint64_t y, bool accumulate) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.b32 p, %130, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
               "}, %128, %129, p, 1, 1, 0, 0;\n"
               "}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                 "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                 "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
                 "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
                 "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
                 "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
                 "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
                 "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
                 "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
                 "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
                 "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
               : "l"(x), "l"(y), "r"(int(accumulate)));
}

// Orders the program's earlier accesses to accumulators and operands before the wgmmas that follow.
CUTE_DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
CUTE_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all committed groups but the last N are done.
template <int N>
CUTE_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}

// The descriptor of an operand. Its low word has the bytes between chunks of columns and the low 18 bits of the address; in a cluster
// the rank of the CTA is in the bits above these. It is 32 bits wide so that a step of the loop is one uniform addition.
CUTE_DEVICE uint32_t descriptor_low(uint32_t address, int chunk_bytes) { return chunk_bytes >> 4 << 16 | (address & 0x3ffff) >> 4; }

// Its high word has the swizzle mode and the bytes between blocks of 8 rows.
template <int Width>
CUTE_DEVICE uint64_t descriptor(uint32_t low) {
  constexpr uint64_t kMode = Width == 64 ? 1 : Width == 32 ? 2 : 3, kBlockBytes = 8 * Width * 2;
  return (kMode << 30 | kBlockBytes >> 4) << 32 | low;
}

// A warpgroup's share of the tile: kAtomsM x kAtomsN wgmmas.
constexpr int kShareRows = kRows / (kSharers / kSharersN), kShareCols = kCols / kSharersN;
constexpr int kAtomsM = kShareRows / 64, kAtomsN = kShareCols / kAtomN;
using Accumulators = Accumulator[kAtomsM][kAtomsN][kAtomRegisters];
static_assert(kAtomsM * kAtomsN * kAtomRegisters == 128);

// Addresses of bytes in shared memory: the ring, the epilogue's buffers, the mbarriers.
struct Shared {
  uint32_t base;
  CUTE_DEVICE uint32_t stage(int i) const { return base + i * kStageBytes; }
  CUTE_DEVICE uint32_t buffers(int warp) const { return stage(kStages) + warp * 4096; }
  CUTE_DEVICE uint32_t full(int i) const { return stage(kStages) + 32768 + i * 16; }
  CUTE_DEVICE uint32_t empty(int i) const { return full(i) + 8; }
  CUTE_DEVICE uint32_t order(int i) const { return full(kStages) + i * 8; }
};
static_assert(kStages * kStageBytes + 32768 + kStages * 16 + 32 == 229472);
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

// The groups of columns of a wgmma that are stored at a time.
constexpr int kGroup = 64, kGroups = kAtomN / kGroup;
CUTE_DEVICE constexpr int first_column(int group) { return group * kGroup; }

// Each warp stores by itself, 16 rows of the wgmma and a group of columns at a time, through two swizzled buffers.
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
  // Warps of other CTAs arrive at this CTA's mbarriers, so it must not exit before they have.
  for (int i = 0; i < kStages; ++i) {
    wait(shared.empty(place.stage), place.parity ^ 1);
    place.advance();
  }
}

// Returns the mbarrier at which this lane hands back stage 0. There is one such lane for each CTA that loads a part of the stages; the
// other lanes get 0.
CUTE_DEVICE uint32_t empty_barriers(Shared const& shared, int rank) {
  const int lane = threadIdx.x % 32;
  const bool brings = lane % kClusterM == rank % kClusterM || lane / kClusterM == rank / kClusterM;
  return lane < kClusterCtas && brings ? at_rank(shared.empty(0), lane) : 0;
}

// Tells each CTA that loaded a part of a stage that this warp has read it, so that it may be overwritten.
CUTE_DEVICE void release(uint32_t empty, int stage) {
  if (empty) {
    arrive_at(empty + stage * 16);
  }
}

// Keeps the compiler from moving accumulators while wgmmas are in flight.
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

// Multiplies a warpgroup's share of a tile. The wgmmas of a k-tile are issued while those of the previous k-tile run, and when the
// latter are done, their stage is handed back. The first wgmmas overwrite the accumulators, which need no initial value.
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

extern "C" __global__ void __cluster_dims__(kClusterCtas) __launch_bounds__(kThreads, 1)
hgemm_sm90_wgmma_f32_tn_128x256x64_s4_b2fa221cc9(
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
  } else if (warp == 2 && elected) {
    prefetch_map(gemm.map_a);
    prefetch_map(gemm.map_b);
    prefetch_map(gemm.map_d);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  cluster_arrive();
  cluster_wait();
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

}  // namespace hgemm_sm90_wgmma_f32_tn_128x256x64_s4_b2fa221cc9
