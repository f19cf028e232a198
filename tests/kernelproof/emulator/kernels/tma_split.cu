// D(m,n) = A(m,k) * B(n,k), the k range split over a cluster: one 64x64 tile per cluster, each CTA takes a slice of k in one
// shot, keeps its partial sums in its own shared memory, and adds up its part of everybody's registers.
#include "hopper.cuh"

namespace tma_split {

constexpr int kThreads = 128, kChunks = 4, kChunk = 2 * 64 * 64 * 2, kShared = 1024 + kChunks * kChunk + 16;

template <int SPLIT>
__global__ __launch_bounds__(kThreads, 2) void gemm(__grid_constant__ CUtensorMap const ta, __grid_constant__ CUtensorMap const tb,
                                                    __half* __restrict__ d, int m, int n, int k) {
  extern __shared__ uint8_t raw[];
  uint32_t const base = (address(raw) + 1023) & ~1023u, bar = base + kChunks * kChunk;
  int const rank = rank_in_cluster(), steps = (k + 63) / 64, per = (steps + SPLIT - 1) / SPLIT;
  int const low = min(rank * per, steps), count = min(steps, low + per) - low;
  int const tile = blockIdx.x / SPLIT, tiles_n = (n + 63) / 64, row = tile / tiles_n * 64, column = tile % tiles_n * 64;
  if (threadIdx.x / 32 == 0 && elected()) {
    mbarrier_init(bar, 1);
    fence_mbarrier_init();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    mbarrier_expect(bar, count * kChunk);
    for (int i = 0; i < count; ++i) {
      tma_load(&ta, bar, base + i * kChunk, (low + i) * 64, row);
      tma_load(&tb, bar, base + i * kChunk + kChunk / 2, (low + i) * 64, column);
    }
  }
  __syncthreads();
  mbarrier_wait(bar, 0);
  float acc[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    acc[i] = 0;
    // The compiler must not move this behind the fence.
    asm volatile("" : "+f"(acc[i])::"memory");
  }
  wgmma_fence();
  for (int i = 0; i < count; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t const a = base + i * kChunk + j * 32;
      wgmma<64, false>(acc, descriptor(a, 16, 1024), descriptor(a + kChunk / 2, 16, 1024), 1);
    }
  wgmma_commit();
  wgmma_wait<0>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i)
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(base + (i * kThreads + threadIdx.x) * 16), "f"(acc[4 * i]),
                 "f"(acc[4 * i + 1]), "f"(acc[4 * i + 2]), "f"(acc[4 * i + 3])
                 : "memory");
  cluster_arrive();
  cluster_wait();
#pragma unroll
  for (int i = 0; i < 8 / SPLIT; ++i) {
    int const part = rank * (8 / SPLIT) + i;
    float sum[4] = {};
#pragma unroll
    for (int r = 0; r < SPLIT; ++r) {
      float v[4];
      asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                   : "r"(mapped(base + (part * kThreads + threadIdx.x) * 16, r)));
      for (int j = 0; j < 4; ++j) sum[j] += v[j];
    }
    int const y = row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, x = column + part * 8 + threadIdx.x % 4 * 2;
    if (x < n) {
      if (y < m) *reinterpret_cast<__half2*>(d + int64_t(y) * n + x) = __floats2half2_rn(sum[0], sum[1]);
      if (y + 8 < m) *reinterpret_cast<__half2*>(d + int64_t(y + 8) * n + x) = __floats2half2_rn(sum[2], sum[3]);
    }
  }
  cluster_arrive();
  cluster_wait();
}

template <int SPLIT>
int launch(void const* a, void const* b, void* d, int m, int n, int k, int pdl) {
  CUtensorMap ta, tb;
  int error = encode(&ta, a, k, m, k, 64, 64);
  if (!error) error = encode(&tb, b, k, n, k, 64, 64);
  if (!error) error = cudaFuncSetAttribute(gemm<SPLIT>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(((m + 63) / 64) * ((n + 63) / 64) * SPLIT, 1, 1);
  config.blockDim = dim3(kThreads, 1, 1);
  config.dynamicSmemBytes = kShared;
  cudaLaunchAttribute attributes[2];
  clustered(attributes, SPLIT, 1, pdl);
  config.attrs = attributes;
  config.numAttrs = 2;
  int clusters = 0;
  error = cudaOccupancyMaxActiveClusters(&clusters, gemm<SPLIT>, &config);
  if (error || !clusters) return error ? error : -1;
  void* arguments[] = {&ta, &tb, &d, &m, &n, &k};
  return cudaLaunchKernelExC(&config, reinterpret_cast<void const*>(&gemm<SPLIT>), arguments);
}

}  // namespace tma_split

extern "C" int split_2(void const* a, void const* b, void* d, int m, int n, int k, int, int pdl) {
  return tma_split::launch<2>(a, b, d, m, n, k, pdl);
}
extern "C" int split_4(void const* a, void const* b, void* d, int m, int n, int k, int, int pdl) {
  return tma_split::launch<4>(a, b, d, m, n, k, pdl);
}
