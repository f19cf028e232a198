// One tile of a product by tcgen05.mma, operands written by threads: K-major, 128-byte swizzle.
typedef unsigned long long u64;

__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ bool elect() {
  unsigned p;
  asm volatile("{.reg .pred e; elect.sync _|e, -1; selp.u32 %0, 1, 0, e;}" : "=r"(p));
  return p;
}

__device__ void wait(unsigned bar, unsigned parity) {
  unsigned done = 0;
  while (!done)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
}

// The descriptor of a K-major operand with rows of 64 halves and a swizzle of 128 bytes; 8 rows take 1024 bytes.
__device__ u64 swizzled(unsigned address) {
  return (u64)(address >> 4 & 0x3FFF) | (u64)(1024 >> 4) << 32 | 1ull << 46 | 2ull << 61;
}

__device__ void fill(unsigned short* tile, const unsigned short* from, int rows) {
  for (int i = threadIdx.x; i < rows * 8; i += blockDim.x) {
    int row = i / 8, chunk = i % 8;
    for (int j = 0; j < 8; j++) tile[row * 64 + (chunk ^ row % 8) * 8 + j] = from[row * 64 + chunk * 8 + j];
  }
}

// D (128, n) = A (128, 64) B (n, 64)^T, `repeats` times, in f32; 128 threads.
extern "C" __global__ void tile(const unsigned short* a, const unsigned short* b, float* d, int n, unsigned form,
                                int repeats) {
  __shared__ alignas(1024) unsigned short as[128 * 64], bs[256 * 64];
  __shared__ alignas(8) u64 bar;
  __shared__ unsigned taddr;
  int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at(&bar)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (warp == 0) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 256;" :: "r"(at(&taddr)) : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
  }
  fill(as, a, 128);
  fill(bs, b, n);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  unsigned t = taddr;
  for (int round = 0; round < repeats; round++) {
    if (warp == 0 && elect()) {
#pragma unroll 1
      for (int k = 0; k < 4; k++)
        asm volatile("{.reg .pred p; setp.ne.u32 p, %4, 0; tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;}"
                     :: "r"(t), "l"(swizzled(at(as)) + 2 * k), "l"(swizzled(at(bs)) + 2 * k), "r"(form), "r"(round + k)
                     : "memory");
      asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" :: "r"(at(&bar))
                   : "memory");
    }
    wait(at(&bar), round & 1);
  }
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
#pragma unroll 1
  for (int c = 0; c < n; c += 8) {
    float v[8];
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]), "=f"(v[4]), "=f"(v[5]), "=f"(v[6]), "=f"(v[7])
                 : "r"(t + (warp * 32 << 16) + c));
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
    for (int j = 0; j < 8; j++) d[threadIdx.x * n + c + j] = v[j];
  }
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  if (warp == 0) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 256;" :: "r"(t));
}

// --- pairs

struct alignas(64) TensorMap { char bytes[128]; };

__device__ void box(unsigned to, const TensorMap* map, int x, int y, unsigned bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2 "
               "[%0], [%1, {%2, %3}], [%4];" :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(bar) : "memory");
}

__device__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

// D (m, n) = A (m, k) B (n, k)^T by a pair of CTAs. Each loads half of A and of B by TMA; the even one multiplies.
// For m = 256 each lane has a row of D. For m = 128 a CTA has 64 rows, and lanes from 64 on have the second half of n.
extern "C" __global__ void __cluster_dims__(2)
pair(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, float* d, int m, int n, int k,
     unsigned form) {
  extern __shared__ __align__(1024) unsigned short tiles[][128 * 64];
  auto as = tiles, bs = tiles + 2;
  __shared__ alignas(8) u64 full[2], empty[2], ready;
  __shared__ unsigned taddr;
  int warp = threadIdx.x / 32;
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" :: "r"(at(&full[i])) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at(&empty[i])) : "memory");
    }
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at(&ready)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (warp == 0)
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], 256;" :: "r"(at(&taddr)) : "memory");
  cluster_sync();
  unsigned t = taddr;
  int bytes = (m + n) / 2 * 128;
  if (warp == 1 && elect()) {
    for (int i = 0; i < k / 64; i++) {
      int s = i % 2;
      if (i >= 2) wait(at(&empty[s]), (i / 2 - 1) & 1);
      unsigned leader = at(&full[s]) & 0xFEFFFFFF;  // the mbarrier of the even CTA: bit 24 is the rank
      asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;"
                   :: "r"(leader), "r"(bytes) : "memory");
      box(at(as[s]), &a, i * 64, rank * m / 2, leader);
      box(at(bs[s]), &b, i * 64, rank * n / 2, leader);
    }
  }
  if (warp == 0 && rank == 0 && elect()) {
    for (int i = 0; i < k / 64; i++) {
      int s = i % 2;
      wait(at(&full[s]), i / 2 & 1);
      asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
#pragma unroll 1
      for (int j = 0; j < 4; j++)
        asm volatile("{.reg .pred p; setp.ne.u32 p, %4, 0; tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;}"
                     :: "r"(t), "l"(swizzled(at(as[s])) + 2 * j), "l"(swizzled(at(bs[s])) + 2 * j), "r"(form),
                     "r"(i + j) : "memory");
      asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;"
                   :: "r"(at(&empty[s])), "h"((short)3) : "memory");
    }
    asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;"
                 :: "r"(at(&ready)), "h"((short)3) : "memory");
  }
  wait(at(&ready), 0);
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  int columns = m == 256 ? n : n / 2;
  int row = rank * m / 2 + (m == 256 ? threadIdx.x : threadIdx.x % 64);
  int column = m == 256 ? 0 : threadIdx.x / 64 * columns;
#pragma unroll 1
  for (int c = 0; c < columns; c += 8) {
    float v[8];
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]), "=f"(v[4]), "=f"(v[5]), "=f"(v[6]), "=f"(v[7])
                 : "r"(t + (warp * 32 << 16) + c));
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
    for (int j = 0; j < 8; j++) d[row * n + column + c + j] = v[j];
  }
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  cluster_sync();
  if (warp == 0) asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, 256;" :: "r"(t));
}

// --- cluster launch control

__device__ void request(unsigned response, unsigned bar) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 16;" :: "r"(bar) : "memory");
  asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];"
               :: "r"(response), "r"(bar) : "memory");
}

// Counts how often each CTA's work is done, and how much of it each CTA that runs does.
extern "C" __global__ void claims(int* times, int* done) {
  __shared__ alignas(16) unsigned response[4];
  __shared__ alignas(8) u64 bar;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at(&bar)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  int tile = blockIdx.x + gridDim.x * blockIdx.y;
  for (int round = 0;; round++) {
    if (threadIdx.x == 0) {
      request(at(response), at(&bar));
      atomicAdd(&times[tile], 1);
      atomicAdd(&done[blockIdx.x + gridDim.x * blockIdx.y], 1);
    }
    wait(at(&bar), round & 1);
    unsigned more, x, y;
    asm volatile("{.reg .pred p; .reg .b128 r; ld.shared.b128 r, [%3];"
                 "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, r; selp.u32 %0, 1, 0, p;"
                 "@p clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%1, %2, _, _}, r;}"
                 : "=r"(more), "=r"(x), "=r"(y) : "r"(at(response)) : "memory");
    if (!more) break;
    tile = x + gridDim.x * y;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
  }
}
