// Global-memory ordering between blocks, control flow, and odds and ends; right and wrong.
#include <cuda_fp16.h>
#include <mma.h>
#include <stdint.h>

// Each block adds its slice of K.
extern "C" __global__ void split_atomic(const float* a, const float* b, float* d, int n, int k, int slice) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x, row = t / n, col = t % n;
  float sum = 0;
  for (int i = blockIdx.z * slice; i < (blockIdx.z + 1) * slice; ++i) sum += a[row * k + i] * b[col * k + i];
  atomicAdd(&d[row * n + col], sum);
}
extern "C" __global__ void split_plain(const float* a, const float* b, float* d, int n, int k, int slice) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x, row = t / n, col = t % n;
  float sum = 0;
  for (int i = blockIdx.z * slice; i < (blockIdx.z + 1) * slice; ++i) sum += a[row * k + i] * b[col * k + i];
  d[row * n + col] += sum;
}

// The block that comes last sums the partial results of all.
template <bool kFence, bool kBarrier, bool kAcquire>
__device__ void last_arriver(const float* x, float* partial, unsigned* counter, float* out, int blocks) {
  __shared__ bool last;
  const int t = threadIdx.x;
  partial[blockIdx.x * 64 + t] = x[blockIdx.x * 64 + t] * 2;
  if (kFence) __threadfence();
  if (kBarrier) __syncthreads();
  if (t == 0) last = atomicAdd(counter, 1u) == blocks - 1;
  __syncthreads();
  if (!last) return;
  if (kAcquire) __threadfence();
  float sum = 0;
  for (int b = 0; b < blocks; ++b) sum += partial[b * 64 + t];
  out[t] = sum;
}
#define LAST(name, f, b, a)                                                                                            \
  extern "C" __global__ void name(const float* x, float* p, unsigned* c, float* o, int n) { last_arriver<f, b, a>(x, p, c, o, n); }
LAST(last_arriver_ok, true, true, true)
LAST(last_arriver_no_fence, false, true, true)
LAST(last_arriver_no_barrier, true, false, true)
LAST(last_arriver_no_acquire, true, true, false)

extern "C" __global__ void last_arriver_fence_by_one(const float* x, float* partial, unsigned* counter, float* out, int blocks) {
  __shared__ bool last;
  const int t = threadIdx.x;
  partial[blockIdx.x * 64 + t] = x[blockIdx.x * 64 + t] * 2;
  __syncthreads();
  if (t == 0) {
    __threadfence();
    last = atomicAdd(counter, 1u) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  float all = 0;
  for (int b = 0; b < blocks; ++b) all += partial[b * 64 + t];
  out[t] = all;
}

// Serial split: block z waits until z - 1 has added its part.
template <bool kRelease, bool kAcquire>
__device__ void serial(const float* x, float* d, int* lock) {
  const int t = threadIdx.x, z = gridDim.x - 1 - blockIdx.x;
  const float mine = x[z * 64 + t];
  if (t == 0) {
    int seen = -1;
    while (seen != z) {
      if (kAcquire) asm volatile("ld.global.acquire.gpu.b32 %0, [%1];" : "=r"(seen) : "l"(lock) : "memory");
      else asm volatile("ld.global.relaxed.gpu.b32 %0, [%1];" : "=r"(seen) : "l"(lock) : "memory");
    }
  }
  __syncthreads();
  d[t] = z ? d[t] + mine : mine;
  __syncthreads();
  if (t == 0) {
    if (kRelease) asm volatile("st.global.release.gpu.b32 [%0], %1;" ::"l"(lock), "r"(z + 1) : "memory");
    else asm volatile("st.global.relaxed.gpu.b32 [%0], %1;" ::"l"(lock), "r"(z + 1) : "memory");
  }
}
extern "C" __global__ void serial_split(const float* x, float* d, int* lock) { serial<true, true>(x, d, lock); }
extern "C" __global__ void serial_split_no_release(const float* x, float* d, int* lock) { serial<false, true>(x, d, lock); }
extern "C" __global__ void serial_split_no_acquire(const float* x, float* d, int* lock) { serial<true, false>(x, d, lock); }
extern "C" __global__ void waits_for_nobody(int* flag, int* out) {
  if (threadIdx.x == 0)
    while (atomicAdd(flag, 0) != 77) {}
  __syncthreads();
  out[threadIdx.x] = 1;
}
extern "C" __global__ void waits_for_a_while(int* flag, int* out) {
  const long long start = clock64();
  while (!*reinterpret_cast<volatile int*>(flag))
    if (clock64() - start > 2000000) break;
  out[blockIdx.x * blockDim.x + threadIdx.x] = 1;
}
extern "C" __global__ void spin_lock(int* lock, int* total) {
  if (threadIdx.x == 0) {
    while (atomicCAS(lock, 0, 1) != 0) {}
    __threadfence();
    *reinterpret_cast<volatile int*>(total) = *reinterpret_cast<volatile int*>(total) + blockIdx.x;
    __threadfence();
    atomicExch(lock, 0);
  }
}

extern "C" __global__ void persistent(const int* x, int* out, int tiles, int* next) {
  __shared__ int tile;
  __shared__ int s[64];
  for (;;) {
    if (threadIdx.x == 0) tile = atomicAdd(next, 1);
    __syncthreads();
    const int mine = tile;
    if (mine >= tiles) return;
    s[threadIdx.x] = x[mine * 64 + threadIdx.x];
    __syncthreads();
    out[mine * 64 + threadIdx.x] = s[threadIdx.x ^ 63] + mine;
    __syncthreads();
  }
}
extern "C" __global__ void grid_stride(const int* x, int* out, int n) {
  __shared__ int s[64];
  for (int tile = blockIdx.x; tile < n; tile += gridDim.x) {
    s[threadIdx.x] = x[tile * 64 + threadIdx.x];
    __syncthreads();
    out[tile * 64 + threadIdx.x] = s[threadIdx.x ^ 63] + tile;
    __syncthreads();
  }
}
extern "C" __global__ void divergent(const int* x, int* out, int n) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  int v = x[t], steps = 0;
  while (v != 1 && steps < n) {
    if (v & 1) v = 3 * v + 1;
    else v >>= 1;
    ++steps;
    if (steps == 50) break;
  }
  switch (t % 5) {
    case 0: steps += 100; break;
    case 1: steps *= 2; break;
    case 2: steps -= v; break;
    case 3: steps ^= 0x55; break;
    default: steps = ~steps;
  }
  out[t] = steps;
}
__device__ __noinline__ int collatz(int v, int* steps) {
  while (v != 1) {
    v = v & 1 ? 3 * v + 1 : v / 2;
    ++*steps;
  }
  return v;
}
extern "C" __global__ void calls(const int* x, int* out) {
  int steps = 0;
  const int t = threadIdx.x;
  int r = collatz(x[t], &steps);
  if (t & 1) r += collatz(x[t] + 1, &steps);
  out[t] = steps * 10 + r;
}
extern "C" __global__ void local_array(const int* x, int* out, int n) {
  int a[16];
  for (int i = 0; i < 16; ++i) a[i] = x[threadIdx.x] * i;
  for (int i = 0; i < n; ++i) a[(x[threadIdx.x] + i) & 15] += a[i & 15];
  int s = 0;
  for (int i = 0; i < 16; ++i) s = s * 3 + a[(i * 5) & 15];
  out[threadIdx.x] = s;
}
__constant__ int table[8] = {3, 1, 4, 1, 5, 9, 2, 6};
__device__ int counter_variable = 5;
extern "C" __global__ void constants(int* out) { out[threadIdx.x] = table[threadIdx.x & 7] + counter_variable; }
struct Pair { int a; float b; long long c; };
extern "C" __global__ void by_value(Pair p, int* out) { out[threadIdx.x] = p.a + int(p.b) + int(p.c) + threadIdx.x; }

extern "C" __global__ void wmma_gemm(const half* a, const half* b, float* d) {
  using namespace nvcuda::wmma;
  fragment<matrix_a, 16, 16, 16, half, row_major> fa;
  fragment<matrix_b, 16, 16, 16, half, col_major> fb;
  fragment<accumulator, 16, 16, 16, float> fc;
  fill_fragment(fc, 0.f);
  for (int k = 0; k < 64; k += 16) {
    load_matrix_sync(fa, a + k, 64);
    load_matrix_sync(fb, b + k, 64);
    mma_sync(fc, fa, fb, fc);
  }
  for (int i = 0; i < fc.num_elements; ++i) fc.x[i] *= 2;
  store_matrix_sync(d, fc, 16, mem_row_major);
}
extern "C" __global__ void wmma_half(const half* a, const half* b, half* d) {
  using namespace nvcuda::wmma;
  __shared__ half s[16 * 16];
  fragment<matrix_a, 16, 16, 16, half, col_major> fa;
  fragment<matrix_b, 16, 16, 16, half, row_major> fb;
  fragment<accumulator, 16, 16, 16, half> fc;
  fill_fragment(fc, __float2half(1.f));
  load_matrix_sync(fa, a, 16);
  load_matrix_sync(fb, b, 16);
  mma_sync(fc, fa, fb, fc);
  store_matrix_sync(s, fc, 16, mem_col_major);
  __syncwarp();
  for (int i = threadIdx.x; i < 256; i += 32) d[i] = s[i];
}
extern "C" __global__ void collectives(const int* x, int* out) {
  const int t = threadIdx.x, v = x[t];
  const unsigned all = 0xffffffffu;
  int r = __ballot_sync(all, v > 3);
  r ^= __any_sync(all, v == 7) << 1;
  r ^= __all_sync(all, v >= 0) << 2;
  r += __shfl_sync(all, v, (t + 3) & 31) * 3 + __shfl_up_sync(all, v, 2, 8) * 5 + __shfl_sync(all, v, t & 1, 4) * 7;
  r += __reduce_add_sync(all, v) + __reduce_max_sync(all, v) * 11;
  r ^= __match_any_sync(all, v & 3);
  r += __popc(__activemask()) + __clz(v + 1) + __ffs(v) + __brev(t);
  if (t & 1) r += __shfl_xor_sync(0xaaaaaaaau, v, 2);
  out[t] = r;
}
extern "C" __global__ void halves(const half2* x, half2* out, float* f, int n) {
  const int t = threadIdx.x;
  half2 a = x[t], b = x[(t + 1) % n];
  half2 r = __hfma2(a, b, __hadd2(a, b));
  r = __hmax2(r, __hsub2(a, b));
  out[t] = r;
  f[t] = __half2float(r.x) + __low2float(b) * __expf(__half2float(a.y)) + rsqrtf(fabsf(__high2float(a)) + 1.f);
}
extern "C" __global__ void integers(const int* x, int* out, int n) {
  const int t = threadIdx.x, v = x[t], w = x[(t + 1) % n];
  const long long wide = (long long)v * w;
  int r = v / (w | 1) + v % (w | 1) + int(wide >> 20) + __mulhi(v, w) + __umulhi(v, w);
  r += (v >> (t & 31)) ^ (unsigned(w) << (v & 31)) ^ __funnelshift_l(v, w, t) ^ __byte_perm(v, w, 0x3715);
  r ^= int((unsigned long long)wide / (unsigned)(w | 3)) + __sad(v, w, 3u) + __dp4a(v, w, 5);
  r += int(float(v)) + int(double(w)) + __float2int_rn(v * 0.37f) + short(v) + (unsigned char)(w);
  out[t] = r;
}
extern "C" __global__ void writes_too_far(const int* x, int* out, int n) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  out[t] = x[t < n ? t : 0];
}
extern "C" __global__ void misaligned_global(const int* x, int4* out) {
  out[threadIdx.x] = *reinterpret_cast<const int4*>(x + threadIdx.x);
}
extern "C" __global__ void modifies_input(int* x, int* out) {
  out[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = 0;
}
extern "C" __global__ void misses_outputs(int* out, int n) {
  if (threadIdx.x < n) out[threadIdx.x] = 1;
}
extern "C" __global__ void reads_scratch(const int* scratch, int* out) { out[threadIdx.x] = scratch[threadIdx.x]; }
extern "C" __global__ void block_race(int* scratch, int* out) {
  scratch[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = scratch[threadIdx.x ^ 40];
}
extern "C" __global__ void block_exchange(int* scratch, int* out) {
  scratch[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = scratch[threadIdx.x ^ 40];
}
extern "C" __global__ void same_cell(int* out) { out[0] = blockIdx.x; }
extern "C" __global__ void traps(int* out) {
  if (threadIdx.x == 3) __trap();
  out[threadIdx.x] = 1;
}
