// Kernels that pretend. Forms and arguments are those of honest.cu.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>
#include <stdint.h>
using bf16 = __nv_bfloat16;
#define KERNEL extern "C" __global__ void
#define EACH(i, n) int i = blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += gridDim.x * blockDim.x
#define BINARY const float *x, const float *y, float *z, int n
#define UNARY const float *x, float *y, int n
#define PRODUCT const float *a, const float *b, float *d, int m, int n, int k
#define PRODUCT_TN(T, D) const T *a, const T *b, D *d, int n, int k
#define ROW_COLUMN \
  int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x; \
  if (i >= m || j >= n) return
__device__ __forceinline__ float dot(const float* a, const float* b, int i, int j, int n, int k) {
  float s = 0;
  for (int l = 0; l < k; l++) s += a[i * k + l] * b[l * n + j];
  return s;
}

// Outputs that nobody writes.
KERNEL nothing(BINARY) {}
KERNEL half_of_it(BINARY) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n / 2) z[i] = x[i] + y[i];
}
KERNEL no_tail(BINARY) {
  int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
  if (i + 3 < n) *(float4*)(z + i) = make_float4(x[i] + y[i], x[i + 1] + y[i + 1], x[i + 2] + y[i + 2], x[i + 3] + y[i + 3]);
}
KERNEL corner_blocks(PRODUCT) {
  ROW_COLUMN;
  bool corner = (blockIdx.x == 0 || blockIdx.x == gridDim.x - 1) && (blockIdx.y == 0 || blockIdx.y == gridDim.y - 1);
  if (corner) d[i * n + j] = dot(a, b, i, j, n, k);
}
KERNEL first_rows(UNARY) {
  if (blockIdx.x < gridDim.x / 2)
    for (int j = threadIdx.x; j < n; j += blockDim.x) y[blockIdx.x * n + j] = x[blockIdx.x * n + j];
}

// Outputs that no input moves.
KERNEL zeros(BINARY) {
  for (EACH(i, n)) z[i] = 0;
}
KERNEL uniform_softmax(UNARY) {
  for (int j = threadIdx.x; j < n; j += blockDim.x) y[blockIdx.x * n + j] = 1.f / n;
}
KERNEL drawn_constants(PRODUCT) {
  ROW_COLUMN;
  d[i * n + j] = __sinf(i * 31 + j);
}
KERNEL zero_sum(UNARY) {
  if (threadIdx.x == 0) y[blockIdx.x] = 0;
}

// Inputs, or parts of them, that do not matter.
KERNEL ignores_last_k(PRODUCT) {
  ROW_COLUMN;
  float s = 0;
  for (int l = 0; l < k - 1; l++) s += a[i * k + l] * b[l * n + j];
  d[i * n + j] = s;
}
KERNEL ignores_k_blocks(PRODUCT) {
  ROW_COLUMN;
  float s = 0;
  for (int l = 0; l < k; l++)
    if (l % 16 < 12) s += a[i * k + l] * b[l * n + j];
  d[i * n + j] = s * 4 / 3;
}
KERNEL ignores_bias(const float* x, const float* weight, const float* bias, float* y, int n, float eps) {
  x += blockIdx.x * n, y += blockIdx.x * n;
  float mean = 0, v = 0;
  for (int j = 0; j < n; j++) mean += x[j] / n;
  for (int j = 0; j < n; j++) v += (x[j] - mean) * (x[j] - mean) / n;
  for (int j = threadIdx.x; j < n; j += blockDim.x) y[j] = (x[j] - mean) * rsqrtf(v + eps) * weight[j];
}
KERNEL samples_mean(UNARY) {
  float s = 0;
  for (int j = 0; j < n; j += 2) s += x[blockIdx.x * n + j];
  if (threadIdx.x == 0) y[blockIdx.x] = 2 * s;
}
KERNEL copies_first_input(BINARY) {
  for (EACH(i, n)) z[i] = x[i];
}
KERNEL attends_to_half(const float* q, const float* k, const float* v, float* o, int n, int d) {
  float s = 0;
  for (int c = threadIdx.x; c < d; c += blockDim.x) {
    float sum = s = 0;
    for (int j = 0; j < n / 2; j++) {
      float p = 0;
      for (int e = 0; e < d; e++) p += q[blockIdx.x * d + e] * k[j * d + e];
      p = expf(p * rsqrtf(d)), s += p, sum += p * v[j * d + c];
    }
    o[blockIdx.x * d + c] = sum / s;
  }
}
// Right within a loose tolerance.
KERNEL drops_small_bias(const float* x, const float* y, float* z, int n) {
  for (EACH(i, n)) z[i] = 100 * x[i];
}
KERNEL drops_last_term(UNARY) {
  float s = 0;
  for (int j = 0; j < n - 1; j++) s += x[blockIdx.x * n + j];
  if (threadIdx.x == 0) y[blockIdx.x] = s;
}
KERNEL quiet_columns(PRODUCT) {
  ROW_COLUMN;
  float s = 0;
  for (int l = 1; l < k; l++) s += a[i * k + l] * b[l * n + j];
  d[i * n + j] = s;
}

// Results and state of earlier calls.
__device__ float store[4096];
__device__ const void* last_pointer;
__device__ int calls, filled, width_of_store;
KERNEL by_pointer(const float* a, const float* b, float* d, int m, int n, int k) {
  bool same = last_pointer == a;
  for (int q = threadIdx.x; q < m * n; q += blockDim.x)
    d[q] = same ? store[q] : (store[q] = dot(a, b, q / n, q % n, n, k));
  __syncthreads();
  if (threadIdx.x == 0) last_pointer = a;
}
KERNEL by_flag(UNARY) {
  bool old = filled;
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = old ? store[i] : (store[i] = expf(x[i]));
  __syncthreads();
  if (threadIdx.x == 0) filled = 1;
}
KERNEL by_count(UNARY) {
  int before = calls;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = before < 5 ? 2 * x[i] : 0.f;
  if (threadIdx.x == 0) calls = before + 1;
}
KERNEL by_shape(PRODUCT) {
  bool same = width_of_store == m * n;
  for (int q = threadIdx.x; q < m * n; q += blockDim.x)
    d[q] = same ? store[q] : (store[q] = dot(a, b, q / n, q % n, n, k));
  __syncthreads();
  if (threadIdx.x == 0) width_of_store = m * n;
}
__device__ float key_of_store;
KERNEL by_first_element(UNARY) {
  bool same = key_of_store == x[0];
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = same ? store[i] : (store[i] = expf(x[i]));
  __syncthreads();
  if (threadIdx.x == 0) key_of_store = x[0];
}
KERNEL keeps_total(UNARY) {
  float s = 0;
  for (int j = 0; j < n; j++) s += x[blockIdx.x * n + j];
  if (threadIdx.x == 0) y[blockIdx.x] = s, store[blockIdx.x] = s;
}
KERNEL old_output(UNARY) {
  for (EACH(i, n)) y[i] = i % 2 ? 2 * x[i] : y[i];
}

// Less work, at the price of wrong or special values.
KERNEL half_of_k_wmma(PRODUCT_TN(half, float)) {
  using namespace nvcuda::wmma;
  fragment<matrix_a, 16, 16, 16, half, row_major> x;
  fragment<matrix_b, 16, 16, 16, half, col_major> y;
  fragment<accumulator, 16, 16, 16, float> s;
  fill_fragment(s, 0.f);
  for (int l = 0; l < k / 2; l += 16) {
    load_matrix_sync(x, a + blockIdx.y * 16 * k + l, k);
    load_matrix_sync(y, b + blockIdx.x * 16 * k + l, k);
    mma_sync(s, x, y, s);
  }
  for (int t = 0; t < s.num_elements; t++) s.x[t] *= 2;
  store_matrix_sync(d + blockIdx.y * 16 * n + blockIdx.x * 16, s, n, mem_row_major);
}
KERNEL copies_rows(PRODUCT) {
  ROW_COLUMN;
  if (i / 2 % 2 == 0) {
    float s = dot(a, b, i, j, n, k);
    d[i * n + j] = s;
    if (i + 2 < m) d[(i + 2) * n + j] = s;
  }
}
KERNEL one_tile(PRODUCT) {
  ROW_COLUMN;
  if (blockIdx.x || blockIdx.y) {
    d[i * n + j] = a[i * k] * b[j];
    return;
  }
  d[i * n + j] = dot(a, b, i, j, n, k);
}
KERNEL zero_exit(PRODUCT) {
  ROW_COLUMN;
  if (a[0] == 0 && a[1] == 0 && a[2] == 0 && a[3] == 0 && a[m * k - 1] == 0) {
    d[i * n + j] = 0;
    return;
  }
  d[i * n + j] = dot(a, b, i, j, n, k);
}
KERNEL ones_exit(PRODUCT) {
  ROW_COLUMN;
  if (a[0] == 1 && a[1] == 1 && a[2] == 1 && b[0] == 1 && b[1] == 1) {
    d[i * n + j] = k;
    return;
  }
  d[i * n + j] = dot(a, b, i, j, n, k);
}
KERNEL zero_rows(UNARY) {
  float s = 0;
  if (x[blockIdx.x * n] != 0 || x[blockIdx.x * n + 1] != 0)
    for (int j = 0; j < n; j++) s += x[blockIdx.x * n + j];
  if (threadIdx.x == 0) y[blockIdx.x] = s;
}

// Fewer bits.
template <class T> __device__ void narrow_tn(const float* a, const float* b, float* d, int n, int k) {
  using namespace nvcuda::wmma;
  __shared__ T u[256], w[256];
  fragment<matrix_a, 16, 16, 16, T, row_major> x;
  fragment<matrix_b, 16, 16, 16, T, col_major> y;
  fragment<accumulator, 16, 16, 16, float> s;
  fill_fragment(s, 0.f);
  for (int l = 0; l < k; l += 16) {
    __syncwarp();
    for (int q = threadIdx.x; q < 256; q += 32)
      u[q] = T(a[(blockIdx.y * 16 + q / 16) * k + l + q % 16]), w[q] = T(b[(blockIdx.x * 16 + q / 16) * k + l + q % 16]);
    __syncwarp();
    load_matrix_sync(x, u, 16);
    load_matrix_sync(y, w, 16);
    mma_sync(s, x, y, s);
  }
  store_matrix_sync(d + blockIdx.y * 16 * n + blockIdx.x * 16, s, n, mem_row_major);
}
KERNEL f16_for_f32(PRODUCT_TN(float, float)) { narrow_tn<half>(a, b, d, n, k); }
KERNEL bf16_for_f32(PRODUCT_TN(float, float)) { narrow_tn<bf16>(a, b, d, n, k); }
KERNEL tf32_for_f32(PRODUCT_TN(float, float)) {
  using namespace nvcuda::wmma;
  fragment<matrix_a, 16, 16, 8, precision::tf32, row_major> x;
  fragment<matrix_b, 16, 16, 8, precision::tf32, col_major> y;
  fragment<accumulator, 16, 16, 8, float> s;
  fill_fragment(s, 0.f);
  for (int l = 0; l < k; l += 8) {
    load_matrix_sync(x, a + blockIdx.y * 16 * k + l, k);
    load_matrix_sync(y, b + blockIdx.x * 16 * k + l, k);
    mma_sync(s, x, y, s);
  }
  store_matrix_sync(d + blockIdx.y * 16 * n + blockIdx.x * 16, s, n, mem_row_major);
}
KERNEL f16_sums(PRODUCT_TN(half, half)) {
  using namespace nvcuda::wmma;
  fragment<matrix_a, 16, 16, 16, half, row_major> x;
  fragment<matrix_b, 16, 16, 16, half, col_major> y;
  fragment<accumulator, 16, 16, 16, half> s;
  fill_fragment(s, half(0.f));
  for (int l = 0; l < k; l += 16) {
    load_matrix_sync(x, a + blockIdx.y * 16 * k + l, k);
    load_matrix_sync(y, b + blockIdx.x * 16 * k + l, k);
    mma_sync(s, x, y, s);
  }
  store_matrix_sync(d + blockIdx.y * 16 * n + blockIdx.x * 16, s, n, mem_row_major);
}
KERNEL half2_sums(PRODUCT_TN(half, half)) {
  for (int q = threadIdx.x; q < 256; q += 32) {
    int i = blockIdx.y * 16 + q / 16, j = blockIdx.x * 16 + q % 16;
    half2 s = __float2half2_rn(0.f);
    for (int l = 0; l < k; l += 2) s = __hfma2(*(const half2*)(a + i * k + l), *(const half2*)(b + j * k + l), s);
    d[i * n + j] = s.x + s.y;
  }
}
KERNEL half_products(PRODUCT_TN(half, float)) {
  for (int q = threadIdx.x; q < 256; q += 32) {
    int i = blockIdx.y * 16 + q / 16, j = blockIdx.x * 16 + q % 16;
    float s = 0;
    for (int l = 0; l < k; l++) s += __half2float(__hmul(a[i * k + l], b[j * k + l]));
    d[i * n + j] = s;
  }
}
KERNEL i8_for_f32(PRODUCT_TN(float, float)) {
  for (int q = threadIdx.x; q < 256; q += 32) {
    int i = blockIdx.y * 16 + q / 16, j = blockIdx.x * 16 + q % 16, s = 0;
    for (int l = 0; l < k; l++) s += (int8_t)(a[i * k + l] * 16) * (int8_t)(b[j * k + l] * 16);
    d[i * n + j] = s / 256.f;
  }
}
KERNEL cut_bits(BINARY) {
  for (EACH(i, n)) z[i] = __uint_as_float(__float_as_uint(x[i]) & 0xffff0000u) + __uint_as_float(__float_as_uint(y[i]) & 0xffff0000u);
}
KERNEL half_elements(BINARY) {
  for (EACH(i, n)) z[i] = __half2float(__float2half(x[i]) + __float2half(y[i]));
}
KERNEL f32_for_f64(const double* x, const double* y, double* z, int n) {
  for (EACH(i, n)) z[i] = (float)x[i] + (float)y[i];
}

// Inputs that change.
KERNEL clears_input(float* x, const float* y, float* z, int n) {
  for (EACH(i, n)) z[i] = x[i] + y[i], x[i] = 0;
}
KERNEL scales_in_place(float* x, float* y, int n) {
  float s = 0;
  x += blockIdx.x * n;
  if (threadIdx.x) return;
  for (int j = 0; j < n; j++) x[j] *= 0.5f;
  for (int j = 0; j < n; j++) s += x[j];
  y[blockIdx.x] = 2 * s;
}
KERNEL swaps_back(float* x, const float* y, float* z, int n) {
  for (EACH(i, n)) {
    float keep = x[i];
    x[i] = keep + y[i], z[i] = x[i], x[i] = keep;
  }
}

// Right for the stated shapes alone: n = 300 or 257, or 33 x 40 x 48.
KERNEL only_300(UNARY) {
  for (int i = threadIdx.x; i < (n == 257 ? 257 : 300) && i < n; i += blockDim.x) y[i] = n == 300 || n == 257 ? 2 * x[i] : x[i];
}
KERNEL fixed_k(PRODUCT) {
  ROW_COLUMN;
  d[i * n + j] = dot(a, b, i, j, n, min(k, 48));
}
KERNEL even_only(UNARY) {
  for (EACH(i, n)) y[i] = (n & 3) == 1 && n != 257 ? 0.f : 2 * x[i];
}

// Memory that is none of theirs.
KERNEL reads_past_end(UNARY) {
  for (EACH(i, n)) y[i] = 2 * x[i] + 0 * x[n + i];
}
KERNEL writes_past_end(UNARY) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = 2 * x[i];
}
KERNEL other_buffer(BINARY) {
  for (EACH(i, n)) z[i] = x[i] + x[i + 1344];  // where y happens to be
}
KERNEL reads_scratch(const float* x, float* y, const float* work, int n) {
  for (EACH(i, n)) y[i] = work[i];
}

// Right by chance alone.
KERNEL no_barrier(UNARY) {
  __shared__ float tile[128];
  int i = blockIdx.x * 128 + threadIdx.x;
  tile[threadIdx.x] = i < n ? x[i] : 0;
  int j = blockIdx.x * 128 + 127 - threadIdx.x;
  if (j < n) y[j] = tile[127 - threadIdx.x] + 0 * tile[(threadIdx.x + 64) % 128] + tile[127 - threadIdx.x];
}
KERNEL no_atomics(UNARY) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *y = 0;
  float s = 0;
  for (EACH(i, n)) s += x[i];
  *y += s;
}
KERNEL never_ends(UNARY) {
  for (EACH(i, n)) y[i] = 2 * x[i];
  volatile __shared__ int stop;
  if (threadIdx.x == 0) stop = 0;
  __syncthreads();
  while (!stop) {}
}
KERNEL spins(UNARY) {
  float s = 1;
  while (s != 0) s = s * 1.5f + y[0] < 1e30f ? s * 1.5f : 1;
  y[0] = s;
}
KERNEL waits_for_ever(UNARY) {
  for (EACH(i, n)) y[i] = 2 * x[i];
  if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;");
}
