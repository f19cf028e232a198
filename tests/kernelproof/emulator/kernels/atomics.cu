// A histogram in shared memory and a sum under a lock. WRONG is the fault that a variant has, RIGHT for none.

enum Fault {
  RIGHT,
  NO_BARRIER_BEFORE,  // between clearing the counters and counting
  NO_BARRIER_AFTER,   // between counting and reading the counters
  PLAIN_COUNT,        // counts without an atomic
  PLAIN_BESIDE,       // a thread stores a counter plainly beside the atomics of others, behind one of its own
  PLAIN_READ,         // a thread reads a counter while others count
  PLAIN_TOTAL,        // adds to the counters in global memory without an atomic
  CTA_SCOPE,          // adds to them by atomics of CTA scope
  NO_RELEASE,         // no fence before the lock is released
  NO_ACQUIRE,         // no fence after the lock is taken
  NARROW_FENCES,      // fences of CTA scope
  FENCED,             // right: fences that no flag needs
};

template <Fault WRONG>
__device__ void histogram(const unsigned char* data, unsigned n, unsigned* counts) {
  __shared__ unsigned local[16];
  if (threadIdx.x < 16) local[threadIdx.x] = 0;
  if (WRONG == FENCED) __threadfence();
  if (WRONG != NO_BARRIER_BEFORE) __syncthreads();
  unsigned seen = 0;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    if (WRONG == PLAIN_COUNT) {
      local[data[i]]++;
    } else {
      atomicAdd(&local[data[i]], 1);
      if (WRONG == PLAIN_BESIDE && i == 0) local[data[i]] = 7;
      if (WRONG == PLAIN_READ && i == 70) seen = local[3];
    }
  }
  if (WRONG != NO_BARRIER_AFTER) __syncthreads();
  if (threadIdx.x >= 16) return;
  unsigned* to = &counts[threadIdx.x];
  if (WRONG == PLAIN_TOTAL) *to += local[threadIdx.x];
  else if (WRONG == CTA_SCOPE) atomicAdd_block(to, local[threadIdx.x]);
  else atomicAdd(to, local[threadIdx.x] + (seen == 12345));
}

template <Fault WRONG>
__device__ void sum(const unsigned* values, unsigned* total, unsigned* lock) {
  if (threadIdx.x != 0) return;
  while (atomicCAS(lock, 0, 1) != 0) {}
  if (WRONG == NARROW_FENCES) __threadfence_block();
  else if (WRONG != NO_ACQUIRE) __threadfence();
  *total += values[blockIdx.x];
  if (WRONG == NARROW_FENCES) __threadfence_block();
  else if (WRONG != NO_RELEASE) __threadfence();
  atomicExch(lock, 0);
}

#define HISTOGRAM(WRONG) \
  extern "C" __global__ void histogram_##WRONG(const unsigned char* data, unsigned n, unsigned* counts) { \
    histogram<WRONG>(data, n, counts); \
  }
#define SUM(WRONG) \
  extern "C" __global__ void sum_##WRONG(const unsigned* values, unsigned* total, unsigned* lock) { \
    sum<WRONG>(values, total, lock); \
  }

HISTOGRAM(RIGHT)
HISTOGRAM(NO_BARRIER_BEFORE)
HISTOGRAM(NO_BARRIER_AFTER)
HISTOGRAM(PLAIN_COUNT)
HISTOGRAM(PLAIN_BESIDE)
HISTOGRAM(PLAIN_READ)
HISTOGRAM(PLAIN_TOTAL)
HISTOGRAM(CTA_SCOPE)
HISTOGRAM(FENCED)
SUM(RIGHT)
SUM(NO_RELEASE)
SUM(NO_ACQUIRE)
SUM(NARROW_FENCES)
