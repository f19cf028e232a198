// Two files of relocatable device code: this one has main, linked_other.cu the functions and variables that it uses.
#include <cstdio>
#include <cstdlib>

#include "linked.h"

__device__ int calls;
static __device__ int offset = 5;
static __device__ __noinline__ float own(float x) { return x + offset; }

__global__ void sum(float *values, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    values[i] = scaled(own(values[i])) + table[i % 4] + through_shared(1.0f);
    atomicAdd(&calls, 1);
  }
}

int main() {
  const int n = 100;
  float *values, host[n];
  cudaMalloc(&values, sizeof host);
  for (int i = 0; i < n; ++i) host[i] = float(i);
  cudaMemcpy(values, host, sizeof host, cudaMemcpyHostToDevice);
  sum<<<2, 64>>>(values, n);
  cudaMemcpy(host, values, sizeof host, cudaMemcpyDeviceToHost);
  int count = 0;
  cudaMemcpyFromSymbol(&count, calls, sizeof count);
  bool right = count == n;
  for (int i = 0; i < n; ++i) right = right && host[i] == 2 * 10 * (float(i) + 5) + 7 + float(i % 4) + 1;
  other(values, n);
  return right && cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}
