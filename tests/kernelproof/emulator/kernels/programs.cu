// CTAs that execute programs of their own, so that any CTAs can meet in one batch. A program is a row of numbers; right
// programs and racing ones are drawn by the test.

#include <cuda_pipeline.h>

constexpr int THREADS = 96, PLACES = 128;

__device__ __forceinline__ void named(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Work w has steps programs[w * longest] up to the first 0. CTA b does work order[b].
extern "C" __global__ void interpret(const int* programs, const int* order, const int* in, int* scratch, int* out,
                                     int longest) {
  __shared__ int data[PLACES], count;
  int t = threadIdx.x, warp = t / 32, work = order[blockIdx.x], sum = work;
  data[t] = t;
  if (t == 0) count = 0;
  if (t < PLACES - THREADS) data[THREADS + t] = t;
  scratch[work * THREADS + t] = t;
  __syncthreads();
  for (int step = 0; step < longest; step++) {
    int op = programs[work * longest + step];
    if (op == 0) break;
    switch (op) {
      case 1: __syncthreads(); break;
      case 2: __syncwarp(); break;
      case 3: data[t] = sum; break;
      case 4: sum += data[t]; break;
      case 5: sum += data[(t + 1) % THREADS]; break;
      case 6: data[(t + 33) % THREADS] = sum + 1; break;
      case 7: sum += __shfl_xor_sync(0xffffffff, sum, 1); break;
      case 8: if (warp < 2) named(1, 64); break;
      case 9: atomicAdd(&count, t); break;
      case 10: __pipeline_memcpy_async(&data[t], &in[t], 4); __pipeline_commit(); break;
      case 11: __pipeline_wait_prior(0); break;
      case 12: if (t == 40) data[0] = sum; break;
      case 13: sum += __syncthreads_count(sum & 1); break;
      case 14: for (int i = 0; i < warp * 3; i++) sum = sum * 3 + data[PLACES - 1 - i]; break;
      case 15: if (warp == 0) arrive(2, 64); else if (warp == 1) named(2, 64); break;
      case 16: scratch[work * THREADS + t] = sum; break;
      case 17: sum += scratch[work * THREADS + (t + 32) % THREADS]; break;
      case 18: __threadfence_block(); break;
      case 19: if (warp == 2) { out[work * THREADS + t] = sum; return; } break;
      case 20: if (t < 64) { for (int i = 0; i <= t % 3; i++) { sum += data[t]; __syncwarp(__activemask()); } } break;
      case 21: sum += count; break;
      case 22: { int2 both = *reinterpret_cast<int2*>(&data[2 * (t % 48)]); sum += both.x ^ both.y; } break;
    }
  }
  out[work * THREADS + t] = sum;
}

// The same for CTAs of 64 threads that share all words of x, with stores that may leave the value which is there.
extern "C" __global__ void share(const int* programs, const int* order, int* x, int* out, int longest) {
  int t = threadIdx.x, work = order[blockIdx.x], sum = work;
  for (int step = 0; step < longest; step++) {
    int op = programs[work * longest + step];
    if (op == 0) break;
    int* word = x + (op & 1) * 64;
    switch (op / 2) {
      case 1: sum += word[t]; break;
      case 2: sum += word[(t + 1) % 64]; break;
      case 3: word[t] = sum; break;
      case 4: word[(t + 32) % 64] = sum + t; break;
      case 5: word[t] = 1; break;
      case 6: atomicAdd(word + t, 1); break;
      case 7: __threadfence(); break;
      case 8: __syncthreads(); break;
    }
  }
  out[work * 64 + t] = sum;
}
