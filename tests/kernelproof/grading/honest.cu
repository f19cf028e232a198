// Kernels that do what they say. Extents that do not divide by the tile are guarded.
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>
#include <stdint.h>
using bf16 = __nv_bfloat16;
#define KERNEL extern "C" __global__ void
#define EACH(i, n) int i = blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += gridDim.x * blockDim.x
__device__ __forceinline__ float number(float x) { return x; }
__device__ __forceinline__ float number(half x) { return __half2float(x); }
__device__ __forceinline__ float number(bf16 x) { return __bfloat162float(x); }
template <class T> __device__ __forceinline__ T as(float x);
template <> __device__ __forceinline__ float as<float>(float x) { return x; }
template <> __device__ __forceinline__ half as<half>(float x) { return __float2half(x); }
template <> __device__ __forceinline__ bf16 as<bf16>(float x) { return __float2bfloat16(x); }
__device__ __forceinline__ float warp_sum(float x) {
  for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
  for (int d = 16; d; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}
template <bool MAX> __device__ float block_reduce(float x) {
  __shared__ float part[32];
  __syncthreads();
  x = MAX ? warp_max(x) : warp_sum(x);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
  __syncthreads();
  float y = part[0];
  for (int w = 1; w < blockDim.x / 32; w++) y = MAX ? fmaxf(y, part[w]) : y + part[w];
  return y;
}

// Element by element.
KERNEL add_f32(const float* x, const float* y, float* z, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) z[i] = x[i] + y[i];
}
KERNEL axpy_vector(const float* x, const float* y, float* z, float alpha, int n) {
  int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
  if (i + 3 < n) {
    float4 a = *(const float4*)(x + i), b = *(const float4*)(y + i);
    *(float4*)(z + i) = make_float4(alpha * a.x + b.x, alpha * a.y + b.y, alpha * a.z + b.z, alpha * a.w + b.w);
  } else
    for (; i < n; i++) z[i] = alpha * x[i] + y[i];
}
KERNEL gelu_f32(const float* x, float* y, int n) {
  for (EACH(i, n)) y[i] = 0.5f * x[i] * (1.f + tanhf(0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
}
KERNEL relu_half2(const half* x, half* y, int n) {
  int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (i + 1 < n) *(half2*)(y + i) = __hmax2(*(const half2*)(x + i), __float2half2_rn(0.f));
  else if (i < n) y[i] = __hmax(x[i], __float2half(0.f));
}
KERNEL add_bf16(const bf16* x, const bf16* y, bf16* z, int n) {
  for (EACH(i, n)) z[i] = as<bf16>(number(x[i]) + number(y[i]));
}
KERNEL add_half2(const half* x, const half* y, half* z, int n) {
  int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (i + 1 < n) *(half2*)(z + i) = __hadd2(*(const half2*)(x + i), *(const half2*)(y + i));
  else if (i < n) z[i] = __hadd(x[i], y[i]);
}
KERNEL silu_mul_f16(const half* x, const half* y, half* z, int n) {
  for (EACH(i, n)) {
    float v = number(x[i]);
    z[i] = as<half>(v / (1.f + __expf(-v)) * number(y[i]));
  }
}
KERNEL sigmoid_f32(const float* x, float* y, int n) {
  for (EACH(i, n)) y[i] = 1.f / (1.f + __expf(-x[i]));
}
KERNEL clamp_in_place(float* x, int n) {
  for (EACH(i, n)) x[i] = fminf(fmaxf(x[i], -1.f), 1.f);
}
KERNEL add_i32(const int* x, const int* y, int* z, int n) {
  for (EACH(i, n)) z[i] = x[i] + 3 * y[i];
}
KERNEL axpy_f64(const double* x, const double* y, double* z, double alpha, int n) {
  for (EACH(i, n)) z[i] = alpha * x[i] + y[i];
}

// Rows of a matrix (m, n), one block each.
KERNEL sum_rows(const float* x, float* y, int n) {
  float s = 0;
  for (int j = threadIdx.x; j < n; j += 32) s += x[blockIdx.x * n + j];
  s = warp_sum(s);
  if (threadIdx.x == 0) y[blockIdx.x] = s;
}
KERNEL max_rows(const float* x, float* y, int n) {
  __shared__ float tree[128];
  float s = -INFINITY;
  for (int j = threadIdx.x; j < n; j += 128) s = fmaxf(s, x[blockIdx.x * n + j]);
  tree[threadIdx.x] = s;
  for (int d = 64; d; d /= 2) {
    __syncthreads();
    if (threadIdx.x < d) tree[threadIdx.x] = fmaxf(tree[threadIdx.x], tree[threadIdx.x + d]);
  }
  if (threadIdx.x == 0) y[blockIdx.x] = tree[0];
}
KERNEL argmax_rows(const float* x, int* y, int n) {
  int best = 0;
  for (int j = 1; j < n; j++) best = x[blockIdx.x * n + j] > x[blockIdx.x * n + best] ? j : best;
  if (threadIdx.x == 0) y[blockIdx.x] = best;
}
KERNEL fill_zero(float* y, int n) {
  for (EACH(i, n)) y[i] = 0;
}
KERNEL sum_atomic(const float* x, float* y, int n) {
  float s = 0;
  for (EACH(i, n)) s += x[i];
  s = warp_sum(s);
  if (threadIdx.x % 32 == 0) atomicAdd(y, s);
}
KERNEL sum_last_block(const float* x, float* y, float* partial, unsigned* ticket, int n) {
  float s = 0;
  for (EACH(i, n)) s += x[i];
  s = block_reduce<false>(s);
  __shared__ bool last;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = s;
    __threadfence();
    last = atomicAdd(ticket, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    __threadfence();
    float total = 0;
    for (int b = 0; b < gridDim.x; b++) total += ((volatile float*)partial)[b];
    *y = total;
  }
}
__device__ unsigned turnstile;
KERNEL sum_resetting(const float* x, float* y, float* partial, int n) {
  float s = 0;
  for (EACH(i, n)) s += x[i];
  s = block_reduce<false>(s);
  if (threadIdx.x) return;
  partial[blockIdx.x] = s;
  __threadfence();
  if (atomicAdd(&turnstile, 1) != gridDim.x - 1) return;
  __threadfence();
  float total = 0;
  for (int b = 0; b < gridDim.x; b++) total += ((volatile float*)partial)[b];
  *y = total;
  turnstile = 0;
}
KERNEL mean_columns(const float* x, float* y, int m, int n) {
  int j = blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= n) return;
  float s = 0;
  for (int i = 0; i < m; i++) s += x[i * n + j];
  y[j] = s / m;
}
template <class T> __device__ void softmax(const T* x, T* y, int n) {
  x += blockIdx.x * n, y += blockIdx.x * n;
  float top = -INFINITY, s = 0;
  for (int j = threadIdx.x; j < n; j += blockDim.x) top = fmaxf(top, number(x[j]));
  top = block_reduce<true>(top);
  for (int j = threadIdx.x; j < n; j += blockDim.x) s += __expf(number(x[j]) - top);
  s = block_reduce<false>(s);
  for (int j = threadIdx.x; j < n; j += blockDim.x) y[j] = as<T>(__expf(number(x[j]) - top) / s);
}
KERNEL softmax_f32(const float* x, float* y, int n) { softmax(x, y, n); }
KERNEL softmax_bf16(const bf16* x, bf16* y, int n) { softmax(x, y, n); }
KERNEL softmax_online(const float* x, float* y, int n) {
  int row = blockIdx.x * blockDim.y + threadIdx.y;
  x += row * n, y += row * n;
  float top = -1e30f, s = 0;
  for (int j = threadIdx.x; j < n; j += 32) {
    float next = fmaxf(top, x[j]);
    s = s * expf(top - next) + expf(x[j] - next), top = next;
  }
  float all = warp_max(top);
  s = warp_sum(s * expf(top - all));
  for (int j = threadIdx.x; j < n; j += 32) y[j] = expf(x[j] - all) / s;
}
KERNEL layer_norm(const float* x, const float* weight, const float* bias, float* y, int n, float eps) {
  x += blockIdx.x * n, y += blockIdx.x * n;
  float s = 0, v = 0;
  for (int j = threadIdx.x; j < n; j += blockDim.x) s += x[j];
  float mean = block_reduce<false>(s) / n;
  for (int j = threadIdx.x; j < n; j += blockDim.x) v += (x[j] - mean) * (x[j] - mean);
  float scale = rsqrtf(block_reduce<false>(v) / n + eps);
  for (int j = threadIdx.x; j < n; j += blockDim.x) y[j] = (x[j] - mean) * scale * weight[j] + bias[j];
}
KERNEL layer_norm_welford(const float* x, const float* weight, const float* bias, float* y, int n, float eps) {
  x += blockIdx.x * n, y += blockIdx.x * n;
  float mean = 0, m2 = 0;
  for (int j = 0; j < n; j++) {
    float d = x[j] - mean;
    mean += d / (j + 1), m2 += d * (x[j] - mean);
  }
  float scale = rsqrtf(m2 / n + eps);
  for (int j = threadIdx.x; j < n; j += blockDim.x) y[j] = (x[j] - mean) * scale * weight[j] + bias[j];
}
KERNEL rms_norm_f16(const half* x, const half* weight, half* y, int n) {
  x += blockIdx.x * n, y += blockIdx.x * n;
  float s = 0;
  for (int j = threadIdx.x; j < n; j += blockDim.x) s += number(x[j]) * number(x[j]);
  float scale = rsqrtf(block_reduce<false>(s) / n + 1e-5f);
  for (int j = threadIdx.x; j < n; j += blockDim.x) y[j] = as<half>(number(x[j]) * scale * number(weight[j]));
}

// Products D (m, n) = A (m, k) B (k, n), row by row; B (n, k) where a name ends in _tn.
KERNEL matmul_naive(const float* a, const float* b, float* d, int m, int n, int k) {
  int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x;
  if (i >= m || j >= n) return;
  float s = 0;
  for (int l = 0; l < k; l++) s += a[i * k + l] * b[l * n + j];
  d[i * n + j] = s;
}
template <class T> __device__ float tiled(const T* a, const T* b, int i, int j, int m, int n, int k) {
  __shared__ T x[16][17], y[16][17];
  float s = 0;
  int tx = threadIdx.x, ty = threadIdx.y;
  for (int l = 0; l < k; l += 16) {
    x[ty][tx] = i < m && l + tx < k ? a[i * k + l + tx] : as<T>(0);
    y[ty][tx] = j < n && l + ty < k ? b[(l + ty) * n + j] : as<T>(0);
    __syncthreads();
#pragma unroll
    for (int q = 0; q < 16; q++) s += number(x[ty][q]) * number(y[q][tx]);
    __syncthreads();
  }
  return s;
}
#define TILED(name, T, result) \
  KERNEL name(const T* a, const T* b, const T* c, T* d, int m, int n, int k) { \
    int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x; \
    float s = tiled(a, b, i, j, m, n, k); \
    if (i < m && j < n) d[i * n + j] = as<T>(result); \
  }
TILED(matmul_tiled_f32, float, s + number(c[j]))
TILED(matmul_tiled_f16, half, s + number(c[j]))
TILED(matmul_bias_relu_bf16, bf16, fmaxf(s + number(c[j]), 0.f))
KERNEL matmul_registers(const float* a, const float* b, float* d, int m, int n, int k) {
  __shared__ float x[8][32], y[8][32];
  int tx = threadIdx.x % 8, ty = threadIdx.x / 8, i0 = blockIdx.y * 32, j0 = blockIdx.x * 32;
  float s[4][4] = {};
  for (int l = 0; l < k; l += 8) {
    for (int q = threadIdx.x; q < 256; q += 64) {
      int r = q / 8, c = q % 8;
      x[c][r] = i0 + r < m && l + c < k ? a[(i0 + r) * k + l + c] : 0;
      y[q / 32][q % 32] = l + q / 32 < k && j0 + q % 32 < n ? b[(l + q / 32) * n + j0 + q % 32] : 0;
    }
    __syncthreads();
    for (int q = 0; q < 8; q++)
      for (int u = 0; u < 4; u++)
        for (int v = 0; v < 4; v++) s[u][v] += x[q][ty * 4 + u] * y[q][tx * 4 + v];
    __syncthreads();
  }
  for (int u = 0; u < 4; u++)
    for (int v = 0; v < 4; v++)
      if (i0 + ty * 4 + u < m && j0 + tx * 4 + v < n) d[(i0 + ty * 4 + u) * n + j0 + tx * 4 + v] = s[u][v];
}
template <class T, class Acc> __device__ void wmma_tn(const T* a, const T* b, Acc* d, int n, int k) {
  using namespace nvcuda::wmma;
  fragment<matrix_a, 16, 16, 16, T, row_major> x;
  fragment<matrix_b, 16, 16, 16, T, col_major> y;
  fragment<accumulator, 16, 16, 16, Acc> s;
  fill_fragment(s, (Acc)0.f);
  for (int l = 0; l < k; l += 16) {
    load_matrix_sync(x, a + blockIdx.y * 16 * k + l, k);
    load_matrix_sync(y, b + blockIdx.x * 16 * k + l, k);
    mma_sync(s, x, y, s);
  }
  store_matrix_sync(d + blockIdx.y * 16 * n + blockIdx.x * 16, s, n, mem_row_major);
}
KERNEL wmma_f16_tn(const half* a, const half* b, float* d, int n, int k) { wmma_tn<half, float>(a, b, d, n, k); }
KERNEL wmma_bf16_tn(const bf16* a, const bf16* b, float* d, int n, int k) { wmma_tn<bf16, float>(a, b, d, n, k); }
KERNEL wmma_f16_sums_tn(const half* a, const half* b, half* d, int n, int k) { wmma_tn<half, half>(a, b, d, n, k); }
KERNEL wmma_tf32_tn(const float* a, const float* b, float* d, int n, int k) {
  using namespace nvcuda::wmma;
  fragment<matrix_a, 16, 16, 8, precision::tf32, row_major> x;
  fragment<matrix_b, 16, 16, 8, precision::tf32, col_major> y;
  fragment<accumulator, 16, 16, 8, float> s;
  fill_fragment(s, 0.f);
  for (int l = 0; l < k; l += 8) {
    load_matrix_sync(x, a + blockIdx.y * 16 * k + l, k);
    load_matrix_sync(y, b + blockIdx.x * 16 * k + l, k);
    for (int t = 0; t < x.num_elements; t++) x.x[t] = __float_to_tf32(x.x[t]);
    for (int t = 0; t < y.num_elements; t++) y.x[t] = __float_to_tf32(y.x[t]);
    mma_sync(s, x, y, s);
  }
  store_matrix_sync(d + blockIdx.y * 16 * n + blockIdx.x * 16, s, n, mem_row_major);
}
KERNEL mma_f16_tn(const half* a, const half* b, half* d, int n, int k) {
  int lane = threadIdx.x, r = lane / 4, c = lane % 4 * 2;
  a += blockIdx.y * 16 * k, b += blockIdx.x * 8 * k, d += blockIdx.y * 16 * n + blockIdx.x * 8;
  float s[4] = {};
  for (int l = 0; l < k; l += 16) {
    uint32_t x[4], y[2];
    for (int q = 0; q < 4; q++) x[q] = *(const uint32_t*)(a + (r + q % 2 * 8) * k + l + c + q / 2 * 8);
    for (int q = 0; q < 2; q++) y[q] = *(const uint32_t*)(b + r * k + l + c + q * 8);
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
  }
  *(half2*)(d + r * n + c) = __floats2half2_rn(s[0], s[1]);
  *(half2*)(d + (r + 8) * n + c) = __floats2half2_rn(s[2], s[3]);
}
__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from));
}
KERNEL cp_async_tn(const half* a, const half* b, float* d, int n, int k) {
  using namespace nvcuda::wmma;
  __shared__ __align__(32) half x[2][16][16], y[2][16][16];
  int r = threadIdx.x / 2, c = threadIdx.x % 2 * 8;
  a += (blockIdx.y * 16 + r) * k + c, b += (blockIdx.x * 16 + r) * k + c;
  auto load = [&](int l, int s) {
    if (l < k) copy16(&x[s][r][c], a + l), copy16(&y[s][r][c], b + l);
    asm volatile("cp.async.commit_group;");
  };
  fragment<matrix_a, 16, 16, 16, half, row_major> u;
  fragment<matrix_b, 16, 16, 16, half, col_major> v;
  fragment<accumulator, 16, 16, 16, float> s;
  fill_fragment(s, 0.f);
  load(0, 0);
  for (int l = 0; l < k; l += 16) {
    load(l + 16, l / 16 + 1 & 1);
    asm volatile("cp.async.wait_group 1;");
    __syncthreads();
    load_matrix_sync(u, &x[l / 16 & 1][0][0], 16);
    load_matrix_sync(v, &y[l / 16 & 1][0][0], 16);
    mma_sync(s, u, v, s);
    __syncthreads();
  }
  store_matrix_sync(d + blockIdx.y * 16 * n + blockIdx.x * 16, s, n, mem_row_major);
}
KERNEL split_k_atomic(const float* a, const float* b, float* d, int m, int n, int k) {
  int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x, step = (k + gridDim.z - 1) / gridDim.z;
  if (i >= m || j >= n) return;
  float s = 0;
  for (int l = blockIdx.z * step; l < min(k, (int)(blockIdx.z + 1) * step); l++) s += a[i * k + l] * b[l * n + j];
  atomicAdd(d + i * n + j, s);
}
KERNEL split_k_partial(const float* a, const float* b, float* partial, int m, int n, int k) {
  int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x, step = (k + gridDim.z - 1) / gridDim.z;
  if (i >= m || j >= n) return;
  float s = 0;
  for (int l = blockIdx.z * step; l < min(k, (int)(blockIdx.z + 1) * step); l++) s += a[i * k + l] * b[l * n + j];
  partial[(blockIdx.z * m + i) * n + j] = s;
}
KERNEL split_k_sum(const float* partial, float* d, int size, int slices) {
  for (EACH(i, size)) {
    float s = 0;
    for (int z = 0; z < slices; z++) s += partial[z * size + i];
    d[i] = s;
  }
}
KERNEL matmul_persistent(const float* a, const float* b, float* d, unsigned* next, int m, int n, int k) {
  __shared__ int tile;
  int columns = (n + 15) / 16, tiles = (m + 15) / 16 * columns;
  for (;;) {
    if (threadIdx.x + threadIdx.y == 0) tile = atomicAdd(next, 1);
    __syncthreads();
    int t = tile;
    __syncthreads();
    if (t >= tiles) return;
    int i = t / columns * 16 + threadIdx.y, j = t % columns * 16 + threadIdx.x;
    float s = tiled(a, b, i, j, m, n, k);
    if (i < m && j < n) d[i * n + j] = s;
  }
}
KERNEL matmul_batched(const half* a, const half* b, half* d, int m, int n, int k) {
  int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x, z = blockIdx.z;
  float s = tiled(a + z * m * k, b + z * k * n, i, j, m, n, k);
  if (i < m && j < n) d[(z * m + i) * n + j] = as<half>(s);
}
KERNEL matvec_bf16(const bf16* a, const bf16* x, bf16* y, int m, int k) {
  int i = blockIdx.x * blockDim.y + threadIdx.y;
  if (i >= m) return;
  float s = 0;
  for (int l = threadIdx.x; l < k; l += 32) s += number(a[i * k + l]) * number(x[l]);
  s = warp_sum(s);
  if (threadIdx.x == 0) y[i] = as<bf16>(s);
}
KERNEL matmul_i8_tn(const int8_t* a, const int8_t* b, int* d, int m, int n, int k) {
  int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x, s = 0;
  if (i >= m || j >= n) return;
  for (int l = 0; l < k; l += 4) s = __dp4a(*(const int*)(a + i * k + l), *(const int*)(b + j * k + l), s);
  d[i * n + j] = s;
}
KERNEL outer_product(const float* x, const float* y, float* d, int m, int n) {
  for (EACH(i, m * n)) d[i] = x[i / n] * y[i % n];
}

// Others.
KERNEL transpose_shared(const float* x, float* y, int m, int n) {
  __shared__ float tile[16][17];
  int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x;
  if (i < m && j < n) tile[threadIdx.y][threadIdx.x] = x[i * n + j];
  __syncthreads();
  i = blockIdx.y * 16 + threadIdx.x, j = blockIdx.x * 16 + threadIdx.y;
  if (i < m && j < n) y[j * m + i] = tile[threadIdx.x][threadIdx.y];
}
KERNEL transpose_f16(const half* x, half* y, int m, int n) {
  for (EACH(i, m * n)) y[i % n * m + i / n] = x[i];
}
KERNEL conv_2d(const float* x, const float* w, float* y, int h, int width, int channels) {
  int q = blockIdx.x * blockDim.x + threadIdx.x, oh = h - 2, ow = width - 2;
  if (q >= oh * ow) return;
  float s = 0;
  for (int c = 0; c < channels; c++)
    for (int u = 0; u < 3; u++)
      for (int v = 0; v < 3; v++)
        s += x[(c * h + q / ow + u) * width + q % ow + v] * w[((blockIdx.y * channels + c) * 3 + u) * 3 + v];
  y[blockIdx.y * oh * ow + q] = s;
}
KERNEL conv_1d_causal(const half* x, const half* w, half* y, int n) {
  for (int t = threadIdx.x; t < n; t += blockDim.x) {
    float s = 0;
    for (int u = 0; u < 4; u++)
      if (t >= u) s += number(x[blockIdx.x * n + t - u]) * number(w[blockIdx.x * 4 + u]);
    y[blockIdx.x * n + t] = as<half>(s);
  }
}
KERNEL attention(const float* q, const float* k, const float* v, float* o, int n, int d) {
  extern __shared__ float p[];
  float top = -INFINITY, s = 0;
  for (int j = threadIdx.x; j < n; j += blockDim.x) {
    float dot = 0;
    for (int c = 0; c < d; c++) dot += q[blockIdx.x * d + c] * k[j * d + c];
    p[j] = dot * rsqrtf(d), top = fmaxf(top, p[j]);
  }
  top = block_reduce<true>(top);
  for (int j = threadIdx.x; j < n; j += blockDim.x) s += p[j] = expf(p[j] - top);
  s = block_reduce<false>(s);
  for (int c = threadIdx.x; c < d; c += blockDim.x) {
    float sum = 0;
    for (int j = 0; j < n; j++) sum += p[j] * v[j * d + c];
    o[blockIdx.x * d + c] = sum / s;
  }
}
KERNEL attention_online(const half* q, const half* k, const half* v, half* o, int n, int d, float scale) {
  int row = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x;
  if (row >= n) return;
  float top = -1e30f, sum = 0, acc = 0;
  for (int j = 0; j <= row; j++) {
    float dot = warp_sum(lane < d ? number(q[row * d + lane]) * number(k[j * d + lane]) : 0.f) * scale;
    float next = fmaxf(top, dot), fade = __expf(top - next), p = __expf(dot - next);
    sum = sum * fade + p, acc = acc * fade + (lane < d ? p * number(v[j * d + lane]) : 0.f), top = next;
  }
  if (lane < d) o[row * d + lane] = as<half>(acc / sum);
}
KERNEL gather_rows(const int* index, const float* table, float* y, int d) {
  for (int c = threadIdx.x; c < d; c += blockDim.x) y[blockIdx.x * d + c] = table[index[blockIdx.x] * d + c];
}
KERNEL scan_rows(const float* x, float* y, int n) {
  float carry = 0;
  for (int j = threadIdx.x; j - threadIdx.x < n; j += 32) {
    float s = j < n ? x[blockIdx.x * n + j] : 0;
    for (int d = 1; d < 32; d *= 2) {
      float other = __shfl_up_sync(~0u, s, d);
      if (threadIdx.x >= d) s += other;
    }
    s += carry;
    if (j < n) y[blockIdx.x * n + j] = s;
    carry = __shfl_sync(~0u, s, 31);
  }
}
KERNEL histogram(const int* x, int* y, int n) {
  __shared__ int bins[16];
  if (threadIdx.x < 16) bins[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) atomicAdd(&bins[x[i]], 1);
  __syncthreads();
  if (threadIdx.x < 16) y[threadIdx.x] = bins[threadIdx.x];
}
KERNEL max_pool(const float* x, float* y, int h, int w) {
  int q = blockIdx.x * blockDim.x + threadIdx.x, ow = w / 2;
  if (q >= h / 2 * ow) return;
  const float* p = x + q / ow * 2 * w + q % ow * 2;
  y[q] = fmaxf(fmaxf(p[0], p[1]), fmaxf(p[w], p[w + 1]));
}
KERNEL cross_entropy(const float* x, const int* label, float* y, int n) {
  float s = 0;
  x += blockIdx.x * n;
  float top = -INFINITY;
  for (int j = threadIdx.x; j < n; j += 32) top = fmaxf(top, x[j]);
  top = warp_max(top);
  for (int j = threadIdx.x; j < n; j += 32) s += expf(x[j] - top);
  s = warp_sum(s);
  if (threadIdx.x == 0) y[blockIdx.x] = logf(s) + top - x[label[blockIdx.x]];
}
KERNEL rope_f32(const float* x, const float* angle, float* y, int n, int d) {
  for (EACH(i, n * d / 2)) {
    float s = sinf(angle[i]), c = cosf(angle[i]), u = x[2 * i], v = x[2 * i + 1];
    y[2 * i] = u * c - v * s, y[2 * i + 1] = u * s + v * c;
  }
}
KERNEL scale_by_norm(const float* x, float* y, float* partial, int n) {
  auto grid = cooperative_groups::this_grid();
  float s = 0, total = 0;
  for (EACH(i, n)) s += x[i] * x[i];
  s = block_reduce<false>(s);
  if (threadIdx.x == 0) partial[blockIdx.x] = s;
  grid.sync();
  for (int p = 0; p < gridDim.x; p++) total += partial[p];
  for (EACH(i, n)) y[i] = x[i] * rsqrtf(total);
}
KERNEL scatter_add(const float* x, const int* index, float* y, int n, int d) {
  for (EACH(i, n * d)) atomicAdd(y + index[i / d] * d + i % d, x[i]);
}
KERNEL matmul_i8_scaled(const int8_t* a, const int8_t* b, const float* u, const float* v, half* d, int m, int n, int k) {
  int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x, s = 0;
  if (i >= m || j >= n) return;
  for (int l = 0; l < k; l += 4) s = __dp4a(*(const int*)(a + i * k + l), *(const int*)(b + j * k + l), s);
  d[i * n + j] = __float2half(s * u[i] * v[j]);
}
KERNEL wmma_bias_relu_tn(const half* a, const half* b, const float* bias, half* d, int n, int k) {
  using namespace nvcuda::wmma;
  __shared__ float sums[256];
  int i = blockIdx.y * 16, j = blockIdx.x * 16;
  fragment<accumulator, 16, 16, 16, float> acc;
  fragment<matrix_a, 16, 16, 16, half, row_major> fa;
  fragment<matrix_b, 16, 16, 16, half, col_major> fb;
  fill_fragment(acc, 0.f);
  for (int l = 0; l < k; l += 16) {
    load_matrix_sync(fa, a + i * k + l, k);
    load_matrix_sync(fb, b + j * k + l, k);
    mma_sync(acc, fa, fb, acc);
  }
  store_matrix_sync(sums, acc, 16, mem_row_major);
  __syncwarp();
  for (int q = threadIdx.x; q < 256; q += 32)
    d[(i + q / 16) * n + j + q % 16] = __float2half(fmaxf(sums[q] + bias[j + q % 16], 0.f));
}
