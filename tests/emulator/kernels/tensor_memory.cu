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

// A 128-byte swizzled, K-major operand of 64 halves a row.
__device__ u64 swizzled(unsigned address) {
  return (u64)(address >> 4 & 0x3FFF) | (u64)(1024 >> 4) << 32 | 1ull << 46 | 2ull << 61;
}

__device__ void fill(unsigned short* tile, const unsigned short* from, int rows) {
  for (int i = threadIdx.x; i < rows * 8; i += blockDim.x) {
    int row = i / 8, chunk = i % 8;
    for (int j = 0; j < 8; j++) tile[row * 64 + (chunk ^ row % 8) * 8 + j] = from[row * 64 + chunk * 8 + j];
  }
}

// D (128, n) = A (128, 64) B (n, 64)^T, `turns` times, in f32; 128 threads.
extern "C" __global__ void tile(const unsigned short* a, const unsigned short* b, float* d, int n, unsigned form,
                                int turns) {
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
  for (int turn = 0; turn < turns; turn++) {
    if (warp == 0 && elect()) {
#pragma unroll 1
      for (int k = 0; k < 4; k++)
        asm volatile("{.reg .pred p; setp.ne.u32 p, %4, 0; tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;}"
                     :: "r"(t), "l"(swizzled(at(as)) + 2 * k), "l"(swizzled(at(bs)) + 2 * k), "r"(form), "r"(turn + k)
                     : "memory");
      asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" :: "r"(at(&bar))
                   : "memory");
    }
    wait(at(&bar), turn & 1);
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
