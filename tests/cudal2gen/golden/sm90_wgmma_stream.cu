// D(m,n) = A(m,k) * B(n,k)^T: fp16 in and out, f32 accumulators, row-major, leading dimensions in elements.
// By a ring of TMA stages that a producer warpgroup fills, wgmma in consumer warpgroups, cooperative.
//
// Launch, all divisions rounded up:
//   grid    as many clusters as fit on the GPU, at most one per cluster tile of 256 x 256
//   cluster (2, 1, 1)
//   block   384
//   shared  229472 bytes, dynamic; above 48 KiB, so set cudaFuncAttributeMaxDynamicSharedMemorySize first
//
// Tensor maps of fp16, as (columns, rows) of a box; the swizzle is as wide as its columns, out of bounds is zero
//   A       64 x 128 of (k, m)
//   B       64 x 128 of (k, n)
//   D       64 x 16 of (n, m)
//
// Scratch, of the cluster tiles that are left when every cluster of the grid has had as many
//   partials   (tiles + clusters of the grid) * 2 tiles of 128 x 256 floats
//   arrivals   tiles * 2 counters, zero before the launch
//
// Needs   A and B and D aligned to 16 bytes, their leading dimensions multiples of 8

#include <cstdint>

#include <cuda_fp16.h>

#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>

namespace hgemm_sm90_wgmma_f32_tn_128x256x64_s4_f2dd76b9e1 {

using namespace cute;

// CTA tile in elements, the ring of k-tiles, the CTAs of a cluster that share operands.
constexpr int kBM = 128, kBN = 256, kBK = 64;
constexpr int kStages = 4, kSplitK = 1;
constexpr int kClusterM = 2, kClusterN = 1, kClusterCtas = 2;
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

// Relaxed: the fence before it releases the mbarriers, and there is nothing else to wait for.
CUTE_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
CUTE_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// At an address of any CTA of the cluster. Not .release.cluster: it would wait for all of the thread's memory accesses, and wgmma
// has read what is handed back.
CUTE_DEVICE void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
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

using TileA = AlongK<kBM>;
using TileB = AlongK<kBN>;
constexpr int kBytesA = kBM * kBK * 2, kBytesB = kBN * kBK * 2, kStageBytes = kBytesA + kBytesB;

// The rows and columns of the wgmmas are those of D.
using TileX = TileA;
using TileY = TileB;
constexpr int kRows = kBM, kCols = kBN;

// A warpgroup's share of a 64 x 256 tile: warp w has rows 16 w to 16 w + 15; of each 8 columns a lane has two
// neighbours in row lane / 4, and two more in the row 8 below.
using Accumulator = float;  // a register of one of them
constexpr int kAtomN = 256, kAtomRegisters = 128;

// d = x * y + (accumulate ? d : 0), 16 of k. Operands are descriptors of tiles in shared memory; asynchronous.
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
static_assert(kAtomsM * kAtomsN * kAtomRegisters == 128);

// Shared memory, as byte addresses: the ring, the epilogue's buffers, mbarriers.
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

// The last wave: tiles that are fewer than clusters. Their steps of k, one tile's behind the other's, are shared out
// evenly, so a cluster's share is of one tile or of two neighbours.
struct LastWave {
  int clusters, whole, tiles, steps;  // of the grid; tiles before the last wave and in it; steps of k of a tile

  CUTE_DEVICE explicit LastWave(Gemm const& gemm) : clusters(gridDim.x / kClusterCtas), steps(steps_of(gemm)) {
    const int all = clusters_m(gemm) * clusters_n(gemm);
    tiles = all % clusters;
    whole = all - tiles;
  }
  CUTE_DEVICE int begin(int cluster) const {
    return tiles * steps / clusters * cluster + min(cluster, tiles * steps % clusters);
  }
  // The cluster whose share holds a step; no share before it is empty.
  CUTE_DEVICE int cluster_at(int step) const {
    const int least = tiles * steps / clusters, longer = tiles * steps % clusters;
    return step < longer * (least + 1) ? step / (least + 1) : longer + (step - longer * (least + 1)) / least;
  }
  // Along k the cluster, the tile or both advance: no two partial sums have one place, and a tile's follow each other.
  CUTE_DEVICE int64_t part(int rank, int cluster, int tile) const {
    return int64_t(rank) * (clusters + tiles) + cluster + tile;
  }
};

// Whole tiles; then each cluster's share of the last wave, in one tile and in the next, of which either may be empty.
CUTE_DEVICE int work_items(Gemm const& gemm) {
  const LastWave last(gemm);
  return last.tiles ? last.whole + 2 * last.clusters : last.whole;
}

CUTE_DEVICE Work work_of(Gemm const& gemm, int item, int rank) {
  const LastWave last(gemm);
  if (item < last.whole) {
    return {tile_of(gemm, item, rank), 0, last.steps, -1, 0};
  }
  const int share = item - last.whole, cluster = share % last.clusters;
  const int begin = last.begin(cluster), end = last.begin(cluster + 1);
  const int boundary = min(end, (begin / last.steps + 1) * last.steps);
  const int from = share < last.clusters ? begin : boundary, to = share < last.clusters ? boundary : end;
  const int tile = min(from / last.steps, last.tiles - 1);
  return {tile_of(gemm, last.whole + tile, rank), from - tile * last.steps, to - tile * last.steps,
          to - from == last.steps ? -1 : last.part(rank, cluster, tile), tile * kClusterCtas + rank};
}

// A tile whose partial sums are `count` tiles from `first` on, in the order of k.
struct Parts : Tile {
  int64_t first;
  int count;
};

CUTE_DEVICE int tiles_in_parts(Gemm const& gemm) { return LastWave(gemm).tiles * kClusterCtas; }

CUTE_DEVICE Parts parts_of(Gemm const& gemm, int tile) {
  const LastWave last(gemm);
  const int rank = tile % kClusterCtas, in_wave = tile / kClusterCtas;
  const int from = last.cluster_at(in_wave * last.steps), to = last.cluster_at((in_wave + 1) * last.steps - 1);
  return {tile_of(gemm, last.whole + in_wave, rank), last.part(rank, from, in_wave), to - from + 1};
}

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

// Groups of columns of a wgmma that are stored at a time.
constexpr int kGroup = 64, kGroups = kAtomN / kGroup;
CUTE_DEVICE constexpr int first_column(int group) { return group * kGroup; }

// Every warp stores by itself, 16 rows of the wgmma and a group of columns at a time, through two swizzled buffers.
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
                col + share_col + j * kAtomN + first, row + share_row + i * 64);
    }
  }
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

// The accumulators of 8 columns, 4 of a lane, as floats; and back.
CUTE_DEVICE float4 load_floats(Accumulator const (&d)[kAtomRegisters], int columns) {
  return make_float4(d[columns * 4], d[columns * 4 + 1], d[columns * 4 + 2], d[columns * 4 + 3]);
}

// Vectors of four floats that a thread contributes to a tile, and threads that share a tile.
constexpr int kVectors = kAtomsM * kAtomsN * (kAtomN / 8), kSharingThreads = 128 * kSharers;

CUTE_DEVICE int sharing_group() { return (threadIdx.x - 128) / kSharingThreads; }
CUTE_DEVICE int sharing_thread() { return (threadIdx.x - 128) % kSharingThreads; }
CUTE_DEVICE void meet_sharers() {
  asm volatile("bar.sync %0, %1;" :: "r"(1 + sharing_group()), "n"(kSharingThreads) : "memory");
}

// This thread's first vector of a partial sum; its others lie kSharingThreads apart.
CUTE_DEVICE float4* partial_sum(Gemm const& gemm, int64_t part) {
  return reinterpret_cast<float4*>(gemm.partials) + part * kVectors * kSharingThreads + sharing_thread();
}

// Keeps the sum over some steps of a tile in device memory, and counts it.
CUTE_DEVICE void keep_part(Gemm const& gemm, Work const& work, Accumulators const& tCrD) {
  float4* const to = partial_sum(gemm, work.part);
  CUTE_UNROLL
  for (int vector = 0; vector < kVectors; ++vector) {
    const int columns = vector % (kAtomN / 8), atom = vector / (kAtomN / 8);
    to[vector * kSharingThreads] = load_floats(tCrD[atom / kAtomsN][atom % kAtomsN], columns);
  }
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
        const half2 upper = __floats2half2_rn(sum[v].x, sum[v].y);
        const half2 lower = __floats2half2_rn(sum[v].z, sum[v].w);
        const int columns = (first + v) % (kAtomN / 8), atom = (first + v) / (kAtomN / 8);
        store_columns(gemm, parts.row, parts.col, share_row + atom / kAtomsN * 64,
                      share_col + atom % kAtomsN * kAtomN + columns * 8,
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
    if (parts.count == 1 || parts.row >= gemm.m || parts.col >= gemm.n) {
      continue;
    }
    wait_for_parts(gemm, tile, parts.count);
    if (parts.count <= 4) {
      add_vectors<4, 4>(gemm, parts, first, last, share_row, share_col);
    } else if (parts.count <= 8) {
      add_vectors<2, 8>(gemm, parts, first, last, share_row, share_col);
    } else {
      add_vectors<1, 16>(gemm, parts, first, last, share_row, share_col);
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
    if (work.first == work.last) {
      continue;
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
  // Other CTAs' warps arrive here: this one lives until they have.
  for (int i = 0; i < kStages; ++i) {
    wait(shared.empty(place.stage), place.parity ^ 1);
    place.advance();
  }
}

// Where this lane hands stages back: the first empty barrier of a CTA that brought a part of each, 0 in lanes beyond those.
CUTE_DEVICE uint32_t empty_barriers(Shared const& shared, int rank) {
  const int lane = threadIdx.x % 32;
  const bool brings = lane % kClusterM == rank % kClusterM || lane / kClusterM == rank / kClusterM;
  return lane < kClusterCtas && brings ? at_rank(shared.empty(0), lane) : 0;
}

// This warp has read a stage: every CTA that brought a part of it may replace it.
CUTE_DEVICE void release(uint32_t empty, int stage) {
  if (empty) {
    arrive_at(empty + stage * 16);
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

  // Every cluster takes tiles until none is left.
  CUTE_NO_UNROLL
  for (int item = blockIdx.x / kClusterCtas; item < work_items(gemm); item += gridDim.x / kClusterCtas) {
    const Work work = work_of(gemm, item, rank);
    if (work.first == work.last) {
      continue;
    }

    Accumulators tCrD;
    multiply(shared, place, work.last - work.first, share_row, share_col, empty, tCrD);
    if (work.part < 0) {
      store_share(gemm, shared, work.row, work.col, share_row, share_col, tCrD);
    } else if (work.row < gemm.m && work.col < gemm.n) {
      keep_part(gemm, work, tCrD);
    }
  }
  add_parts(gemm, share_row, share_col);
  wait_for_stores<0>();  // shared memory is not given up before
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
hgemm_sm90_wgmma_f32_tn_128x256x64_s4_f2dd76b9e1(
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
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  cluster_arrive();
  cluster_wait();
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

}  // namespace hgemm_sm90_wgmma_f32_tn_128x256x64_s4_f2dd76b9e1
