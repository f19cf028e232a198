#include <cstdio>

#include "linked.h"

#ifdef NO_VARIABLE
extern __constant__ float factor;
#else
__constant__ float factor = 2.0f;
#endif
__device__ float table[4] = {0, 1, 2, 3};
static __device__ int offset = 7;
static __device__ __noinline__ float own(float x) { return x * 10; }
#ifndef NO_FUNCTION
__device__ float scaled(float x) { return own(x) * factor + offset; }
#endif

static __global__ void beyond(float *values, int n) {
  if (threadIdx.x == 0) printf("%s %d\n", "calls", calls);
  values[n] = through_shared(2.0f);
}

void other(float *values, int n) { beyond<<<1, 1>>>(values, n); }
