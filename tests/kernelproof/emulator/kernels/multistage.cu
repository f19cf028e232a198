// cp.async ring with ldmatrix and mma.sync: D[M,N] = A[M,K] * B[N,K]^T, tiles divide the problem.
#include <cuda_fp16.h>
#include <stdint.h>

constexpr int kBM = 128, kBN = 128, kBK = 32, kStages = 4, kThreads = 128;

__device__ __forceinline__ uint32_t smem_u32(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void cp16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(dst), "l"(src));
}
// 64-byte rows of 4 chunks: permute chunks by row so that eight rows of ldmatrix hit eight bank groups.
__device__ __forceinline__ uint32_t at(int row, int chunk) {
  return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4);
}

template <class Acc>
__device__ __forceinline__ void mma(Acc* d, const uint32_t* a, const uint32_t* b);
template <>
__device__ __forceinline__ void mma<float>(float* d, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma<uint32_t>(uint32_t* d, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};\n"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ uint32_t pack(const float* d, int half) {
  __half2 h = __floats2half2_rn(d[2 * half], d[2 * half + 1]);
  return *reinterpret_cast<uint32_t*>(&h);
}
__device__ __forceinline__ uint32_t pack(const uint32_t* d, int half) { return d[half]; }

template <class Acc, int kAccs>
__device__ __forceinline__ void gemm(const half* A, const half* B, half* D, int M, int N, int K) {
  extern __shared__ __align__(128) char smem[];
  constexpr int kTileBytes = kBM * kBK * 2;
  const uint32_t base = smem_u32(smem);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int wm = (warp & 1) * 64, wn = (warp >> 1) * 64;
  const half* gA = A + size_t(blockIdx.y) * kBM * K;
  const half* gB = B + size_t(blockIdx.x) * kBN * K;
  auto load = [&](int tile, int stage) {
    const uint32_t sA = base + stage * kTileBytes, sB = base + (kStages + stage) * kTileBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = (tid >> 2) + i * 32, chunk = tid & 3;
      cp16(sA + at(row, chunk), gA + size_t(row) * K + tile * kBK + chunk * 8);
      cp16(sB + at(row, chunk), gB + size_t(row) * K + tile * kBK + chunk * 8);
    }
  };
  const int tiles = K / kBK;
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < tiles) load(s, s);
    asm volatile("cp.async.commit_group;\n");
  }
  Acc acc[4][8][kAccs] = {};
  for (int t = 0; t < tiles; ++t) {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kStages - 2));
    __syncthreads();
    const int next = t + kStages - 1;
    if (next < tiles) load(next, next % kStages);
    asm volatile("cp.async.commit_group;\n");
    const uint32_t sA = base + (t % kStages) * kTileBytes, sB = base + (kStages + t % kStages) * kTileBytes;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t a[4][4], b[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t p = sA + at(wm + i * 16 + (lane & 15), k * 2 + (lane >> 4));
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(a[i][0]), "=r"(a[i][1]), "=r"(a[i][2]), "=r"(a[i][3]) : "r"(p) : "memory");
        const uint32_t q = sB + at(wn + i * 16 + (lane & 7) + ((lane >> 4) << 3), k * 2 + ((lane >> 3) & 1));
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(b[i][0]), "=r"(b[i][1]), "=r"(b[i][2]), "=r"(b[i][3]) : "r"(q) : "memory");
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) mma<Acc>(acc[i][j], a[i], &b[j >> 1][(j & 1) * 2]);
    }
  }
  asm volatile("cp.async.wait_all;\n");
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = wm + i * 16 + (lane >> 2) + h * 8, col = wn + j * 8 + (lane & 3) * 2;
        *reinterpret_cast<uint32_t*>(smem + row * 272 + col * 2) = pack(acc[i][j], h);
      }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int row = i * 8 + (tid >> 4), col = (tid & 15) * 8;
    *reinterpret_cast<uint4*>(D + (size_t(blockIdx.y) * kBM + row) * N + blockIdx.x * kBN + col) =
        *reinterpret_cast<uint4*>(smem + row * 272 + col * 2);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gemm_f32(const half* A, const half* B, half* D, int M, int N, int K) {
  gemm<float, 4>(A, B, D, M, N, K);
}
extern "C" __global__ void __launch_bounds__(kThreads) gemm_f16(const half* A, const half* B, half* D, int M, int N, int K) {
  gemm<uint32_t, 2>(A, B, D, M, N, K);
}

extern "C" int launch(const half* A, const half* B, half* D, int M, int N, int K, int f16) {
  auto* kernel = f16 ? gemm_f16 : gemm_f32;
  const int bytes = kStages * (kBM + kBN) * kBK * 2;
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  kernel<<<dim3(N / kBN, M / kBM), kThreads, bytes>>>(A, B, D, M, N, K);
  return cudaGetLastError();
}
