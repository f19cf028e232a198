// Shared-memory kernels, right and wrong: what is wrong is in the name.
#include <cooperative_groups.h>
#include <cuda_fp16.h>
#include <stdint.h>

__device__ __forceinline__ uint32_t smem_u32(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

extern "C" __global__ void naive_gemm(const half* a, const half* b, float* d, int m, int n, int k) {
  const int row = blockIdx.y * blockDim.y + threadIdx.y, col = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= m || col >= n) return;
  float sum = 0;
  for (int i = 0; i < k; ++i) sum += __half2float(a[row * k + i]) * __half2float(b[col * k + i]);
  d[row * n + col] = sum;
}
extern "C" __global__ void naive_gemm_no_bounds(const half* a, const half* b, float* d, int m, int n, int k) {
  const int row = blockIdx.y * blockDim.y + threadIdx.y, col = blockIdx.x * blockDim.x + threadIdx.x;
  if (col >= n) return;
  float sum = 0;
  for (int i = 0; i < k; ++i) sum += __half2float(a[row * k + i]) * __half2float(b[col * k + i]);
  d[row * n + col] = sum;
}

template <bool kFirst, bool kSecond>
__device__ void tiled(const float* a, const float* b, float* d, int n) {
  __shared__ float sa[16][17], sb[16][17];
  const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16 + y, col = blockIdx.x * 16 + x;
  float sum = 0;
  for (int t = 0; t < n / 16; ++t) {
    sa[y][x] = a[row * n + t * 16 + x];
    sb[y][x] = b[(t * 16 + y) * n + col];
    if (kFirst) __syncthreads();
#pragma unroll
    for (int i = 0; i < 16; ++i) sum += sa[y][i] * sb[i][x];
    if (kSecond) __syncthreads();
  }
  d[row * n + col] = sum;
}
extern "C" __global__ void tiled_gemm(const float* a, const float* b, float* d, int n) { tiled<true, true>(a, b, d, n); }
extern "C" __global__ void tiled_gemm_no_first_barrier(const float* a, const float* b, float* d, int n) { tiled<false, true>(a, b, d, n); }
extern "C" __global__ void tiled_gemm_no_second_barrier(const float* a, const float* b, float* d, int n) { tiled<true, false>(a, b, d, n); }

// Sum of 256 values per block: shuffles, then a few words of shared memory.
extern "C" __global__ void warp_reduce(const float* x, float* out) {
  __shared__ float part[8];
  float v = x[blockIdx.x * 256 + threadIdx.x];
  for (int o = 16; o; o >>= 1) v += __shfl_down_sync(0xffffffffu, v, o);
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = v;
  __syncthreads();
  if (threadIdx.x < 32) {
    v = threadIdx.x < 8 ? part[threadIdx.x] : 0.f;
    for (int o = 4; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    if (threadIdx.x == 0) out[blockIdx.x] = v;
  }
}
// Warp-synchronous exchange through shared memory.
template <bool kSync>
__device__ void exchange(const int* x, int* out) {
  __shared__ int s[128];
  const int t = threadIdx.x;
  s[t] = x[t];
  if (kSync) __syncwarp();
  out[t] = s[t ^ 5];
}
extern "C" __global__ void warp_exchange(const int* x, int* out) { exchange<true>(x, out); }
extern "C" __global__ void warp_exchange_no_sync(const int* x, int* out) { exchange<false>(x, out); }
extern "C" __global__ void warp_exchange_other_warp(const int* x, int* out) {
  __shared__ int s[128];
  const int t = threadIdx.x;
  s[t] = x[t];
  __syncwarp();
  out[t] = s[t ^ 37];
}
extern "C" __global__ void private_update(const int* x, int* out) {
  __shared__ int s[128];
  const int t = threadIdx.x;
  s[t] = x[t];
  for (int i = 0; i < 4; ++i) s[t] += i * s[t];
  out[t] = s[t];
}
extern "C" __global__ void byte_writers(const uint8_t* x, uint8_t* out) {
  __shared__ uint8_t s[128];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[127 - threadIdx.x];
}
extern "C" __global__ void reads_uninitialised(int* out) {
  __shared__ int s[64];
  if (threadIdx.x < 32) s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void shared_out_of_bounds(int* out) {
  extern __shared__ int dyn[];
  dyn[threadIdx.x * 2] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = dyn[(threadIdx.x ^ 1) * 2];
}
extern "C" __global__ void shared_misaligned(int* out) {
  __shared__ char s[1024];
  *reinterpret_cast<int*>(s + threadIdx.x * 5) = 1;
  out[threadIdx.x] = threadIdx.x;
}
extern "C" __global__ void same_value_writers(int* out) {
  __shared__ int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x & 1) flag = 7;
  __syncthreads();
  out[threadIdx.x] = flag;
}
// The sum is 1 or 2: the atomic may come before the store, and leaves what that writes if it does.
template <typename T>
__device__ __forceinline__ void add_and_store(T* word) {
  if (threadIdx.x == 0) atomicAdd(word, 1);
  if (threadIdx.x == 32) *word = 1;
}
extern "C" __global__ void atomic_and_same_store(int* out) {
  __shared__ int word;
  if (threadIdx.x == 0) word = 0;
  __syncthreads();
  add_and_store(&word);
  __syncthreads();
  out[threadIdx.x] = word;
}
extern "C" __global__ void atomic_and_same_store_global(int* word) { add_and_store(word); }
extern "C" __global__ void different_value_writers(int* out) {
  __shared__ int flag;
  flag = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = flag;
}

// Named barriers: two halves of the block hand a buffer back and forth.
template <bool kWait>
__device__ void handover(const int* x, int* out, int rounds) {
  __shared__ int s[64];
  const int t = threadIdx.x;
  if (t < 64) {
    for (int r = 0; r < rounds; ++r) {
      if (r && kWait) asm volatile("bar.sync 2, 128;" ::: "memory");
      s[t] = x[r * 64 + t];
      asm volatile("bar.arrive 1, 128;" ::: "memory");
    }
  } else {
    for (int r = 0; r < rounds; ++r) {
      asm volatile("bar.sync 1, 128;" ::: "memory");
      out[r * 64 + (t - 64)] = s[63 - (t - 64)];
      if (r + 1 < rounds && kWait) asm volatile("bar.arrive 2, 128;" ::: "memory");
    }
  }
}
extern "C" __global__ void named_barriers(const int* x, int* out, int rounds) { handover<true>(x, out, rounds); }
extern "C" __global__ void named_barriers_no_back_pressure(const int* x, int* out, int rounds) { handover<false>(x, out, rounds); }
extern "C" __global__ void half_barriers(const int* x, int* out) {
  __shared__ int s[128];
  const int t = threadIdx.x;
  for (int i = 0; i < 3; ++i) {
    s[t] = x[t] + i;
    asm volatile("bar.sync %0, 64;" ::"r"(1 + t / 64) : "memory");
    const int v = s[t ^ 63];
    asm volatile("bar.sync %0, 64;" ::"r"(1 + t / 64) : "memory");
    out[i * 128 + t] = v;
  }
}
extern "C" __global__ void half_barriers_cross(const int* x, int* out) {
  __shared__ int s[128];
  const int t = threadIdx.x;
  s[t] = x[t];
  asm volatile("bar.sync %0, 64;" ::"r"(1 + t / 64) : "memory");
  out[t] = s[t ^ 127];
}
// All lanes of a warp read a word, then the last of them writes it.
template <bool kSync>
__device__ void broadcast(const int* x, int* out) {
  __shared__ int s[32];
  const int t = threadIdx.x;
  s[t] = x[t];
  __syncwarp();
  const int v = s[5];
  if (kSync) __syncwarp();
  if (t == 31) s[5] = v + 1;
  __syncwarp();
  out[t] = v + s[t];
}
extern "C" __global__ void broadcast_then_write(const int* x, int* out) { broadcast<true>(x, out); }
extern "C" __global__ void broadcast_then_write_no_sync(const int* x, int* out) { broadcast<false>(x, out); }
// One lane reads a word, then another reads and writes it.
extern "C" __global__ void readers_in_turn_no_sync(const int* x, int* out) {
  __shared__ volatile int s[32];
  const int t = threadIdx.x;
  s[t] = x[t];
  __syncwarp();
  int v = 0;
  if (t == 3) v = s[5];
  if (t == 31) v = s[5];
  if (t == 31) s[5] = v + 2;
  out[t] = v;
}
extern "C" __global__ void volatile_reduce(const int* x, int* out) {
  __shared__ volatile int s[64];
  const int t = threadIdx.x;
  s[t] = x[t];
  __syncthreads();
  if (t < 32) {
    s[t] = s[t] + s[t + 32];
    __syncwarp();
    for (int k = 16; k; k >>= 1) {
      const int v = s[t + k < 32 ? t + k : t];
      __syncwarp();
      if (t + k < 32) s[t] = s[t] + v;
      __syncwarp();
    }
    if (t == 0) out[0] = s[0];
  }
}
// One warp tells another through a flag.
template <bool kFence>
__device__ void flag_in_shared(const int* x, int* out) {
  __shared__ volatile int flag;
  __shared__ int s[32];
  const int t = threadIdx.x;
  if (t == 0) flag = 0;
  __syncthreads();
  if (t < 32) {
    s[t] = x[t];
    if (kFence) __threadfence_block();
    __syncwarp();
    if (t == 0) flag = 1;
  } else {
    if (t == 32)
      while (flag == 0) {}
    __syncwarp();
    __threadfence_block();
    out[t - 32] = s[63 - t];
  }
}
extern "C" __global__ void shared_flag(const int* x, int* out) { flag_in_shared<true>(x, out); }
extern "C" __global__ void shared_flag_no_fence(const int* x, int* out) { flag_in_shared<false>(x, out); }
// Blocks whose threads are no whole number of warps.
extern "C" __global__ void odd_block(const int* x, int* out) {
  __shared__ int s[100];
  const int t = threadIdx.y * 10 + threadIdx.x;
  s[t] = x[blockIdx.x * 100 + t];
  __syncthreads();
  for (int k = 64; k; k >>= 1) {
    if (t < k && t + k < 100) s[t] += s[t + k];
    __syncthreads();
  }
  if (t == 0) out[blockIdx.x] = s[0];
}
// The lanes of a warp meet at barriers on both sides of a branch.
extern "C" __global__ void warp_barrier_on_both_sides(const int* x, int* out) {
  __shared__ int s[64];
  const int t = threadIdx.x;
  if (t & 1) {
    s[t] = x[t] * 2;
    __syncwarp();
    out[t] = s[t ^ 3];
  } else {
    s[t] = x[t] * 3;
    __syncwarp();
    out[t] = s[t ^ 3] + 1;
  }
}
// Reads what nobody wrote, and drops it or not.
template <bool kUse>
__device__ void garbage(const int* x, int* out, int n) {
  __shared__ int s[128];
  const int t = threadIdx.x;
  if (t < n) s[t] = x[t];
  __syncthreads();
  const int v = *reinterpret_cast<volatile int*>(&s[127 - t]);
  out[t] = kUse || t >= 128 - n ? v : 5;
}
extern "C" __global__ void garbage_dropped(const int* x, int* out, int n) { garbage<false>(x, out, n); }
extern "C" __global__ void garbage_used(const int* x, int* out, int n) { garbage<true>(x, out, n); }
extern "C" __global__ void nested_loops(const int* x, int* out, int n) {
  const int t = threadIdx.x;
  int s = 0;
  for (int i = 0; i < x[t] % 7; i++) {
    for (int j = 0; j <= i; j++) {
      if ((i + j + t) % 3 == 0) continue;
      if ((i * j + t) % 11 == 5) break;
      s += i * j + 1;
    }
    if (s > n) {
      s -= n;
      continue;
    }
    s += 2;
  }
  out[t] = s;
}
extern "C" __global__ void divergent_barrier(int* out, int n) {
  if (threadIdx.x < 100) return;
  asm volatile("bar.sync 0, 128;" ::: "memory");
  out[threadIdx.x] = n;
}
// Some threads leave before barriers at which all of the CTA wait: early, and while the others wait already.
extern "C" __global__ void early_leavers(int* out, int n) {
  __shared__ int s[128];
  const int t = threadIdx.x;
  s[t] = t;
  if (t < n) return;
  __syncthreads();
  int sum = s[127 - t];
  if (t >= 96) {
    for (int i = 0; i < t - 90; ++i) sum += s[i];
    out[t] = sum;
    return;
  }
  __syncthreads();
  out[t] = sum;
}
extern "C" __global__ void early_return_of_blocks(int* out, int n) {
  __shared__ int s[64];
  if (blockIdx.x >= n) return;
  s[threadIdx.x] = blockIdx.x;
  __syncthreads();
  out[blockIdx.x * 64 + threadIdx.x] = s[63 - threadIdx.x] + threadIdx.x;
}
extern "C" __global__ void endless(int* out, volatile int n) {
  unsigned i = 1;
  while (i != 0) i = i * 2 + 1 + (n > 100);
  out[threadIdx.x] = i;
}
extern "C" __global__ void shared_atomics(const int* x, int* out) {
  __shared__ int bins[16];
  if (threadIdx.x < 16) bins[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(&bins[x[threadIdx.x] & 15], 1);
  __syncthreads();
  if (threadIdx.x < 16) out[threadIdx.x] = bins[threadIdx.x];
}
extern "C" __global__ void shared_atomics_no_barrier(const int* x, int* out) {
  __shared__ int bins[16];
  if (threadIdx.x < 16) bins[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(&bins[x[threadIdx.x] & 15], 1);
  if (threadIdx.x >= 128 && threadIdx.x < 144) out[threadIdx.x - 128] = bins[threadIdx.x - 128];
}

// cp.async with a tail: whole 16-byte chunks, zero-filled past n halves.
template <bool kWait, bool kBarrier, bool kClamp>
__device__ void fill(const half* x, half* out, int n) {
  __shared__ __align__(16) half s[1024];
  const int at = threadIdx.x * 8;
  int bytes = (n - at) * 2;
  bytes = bytes < 0 ? 0 : bytes > 16 ? 16 : bytes;
  if (!kClamp) bytes = 16;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_u32(s + at)), "l"(bytes ? x + at : x), "r"(bytes));
  asm volatile("cp.async.commit_group;");
  if (kWait) asm volatile("cp.async.wait_group 0;");
  if (kBarrier) __syncthreads();
  const int from = (127 - threadIdx.x) * 8;
  *reinterpret_cast<uint4*>(out + at) = *reinterpret_cast<uint4*>(s + from);
}
extern "C" __global__ void zero_fill(const half* x, half* out, int n) { fill<true, true, true>(x, out, n); }
extern "C" __global__ void zero_fill_no_wait(const half* x, half* out, int n) { fill<false, true, true>(x, out, n); }
extern "C" __global__ void zero_fill_no_barrier(const half* x, half* out, int n) { fill<true, false, true>(x, out, n); }
extern "C" __global__ void zero_fill_no_clamp(const half* x, half* out, int n) { fill<true, true, false>(x, out, n); }
extern "C" __global__ void ignore_source(const half* x, half* out, int n) {
  __shared__ __align__(16) half s[1024];
  const int at = threadIdx.x * 8;
  asm volatile("{ .reg .pred p; setp.ge.s32 p, %2, %3; cp.async.ca.shared.global [%0], [%1], 8, p; }" ::"r"(smem_u32(s + at)), "l"(x + at), "r"(at), "r"(n));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_u32(s + at + 4)), "l"(x + at));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_u32(s + at + 6)), "l"(x + at + 2));
  asm volatile("cp.async.wait_all;");
  for (int i = 0; i < 8; ++i) out[at + i] = s[at + i];
}
extern "C" __global__ void transposed_matrix(const half* x, half* out) {
  __shared__ __align__(16) half s[16][16];
  const int t = threadIdx.x;
  for (int i = t; i < 256; i += 32) s[i / 16][i % 16] = x[i];
  __syncwarp();
  uint32_t r[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(smem_u32(&s[t & 15][(t >> 4) * 8])));
  for (int i = 0; i < 4; ++i) {
    const half2 h = *reinterpret_cast<half2*>(&r[i]);
    const int row = (i & 1) * 8, col = (i >> 1) * 8;
    out[(col + t / 4) * 16 + row + t % 4 * 2] = h.x;
    out[(col + t / 4) * 16 + row + t % 4 * 2 + 1] = h.y;
  }
}
