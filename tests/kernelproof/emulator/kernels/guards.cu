// Real barriers of a grid and locks as guards of data: right programs, and the same with a fault.
#include <cooperative_groups.h>
namespace cg = cooperative_groups;

// What another CTA wrote is read behind a barrier of the grid, in several rounds. `barriers`: bit 0: the barrier before
// the read, bit 1: the one behind it.
extern "C" __global__ void grid_rounds(int* data, int* out, int rounds, int barriers) {
  cg::grid_group grid = cg::this_grid();
  const int n = gridDim.x * blockDim.x, own = blockIdx.x * blockDim.x + threadIdx.x;
  int sum = 0;
  for (int round = 0; round < rounds; ++round) {
    data[own] = round + own;
    if (barriers & 1) {
      grid.sync();
    }
    sum += data[(own + blockDim.x + 1) % n];
    if (barriers & 2) {
      grid.sync();
    }
  }
  out[own] = sum;
}

// A lock in global memory that one thread of each CTA takes for all of them. Fault 1: no fence behind the taking;
// 2: no fence before the release; 3: no barrier between the data and the release; 4: nobody takes the lock.
extern "C" __global__ void cta_lock(int* lock, int* data, int fault) {
  if (threadIdx.x == 0 && fault != 4) {
    while (atomicCAS(lock, 0, 1) != 0) {
    }
    if (fault != 1) {
      __threadfence();
    }
  }
  __syncthreads();
  data[threadIdx.x] += blockIdx.x + 1;
  if (fault != 3) {
    __syncthreads();
  }
  if (threadIdx.x == 0 && fault != 4) {
    if (fault != 2) {
      __threadfence();
    }
    atomicExch(lock, 0);
  }
}

// A lock in shared memory that one lane of each warp takes for its warp. Faults as above, with barriers of the warp.
extern "C" __global__ void warp_lock(int* out, int fault) {
  __shared__ int lock, data[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    lock = 0;
  }
  if (warp == 0) {
    data[lane] = 0;
  }
  __syncthreads();
  if (lane == 0 && fault != 4) {
    while (atomicCAS(&lock, 0, 1) != 0) {
    }
    if (fault != 1) {
      __threadfence_block();
    }
  }
  __syncwarp();
  data[lane] += warp + 1;
  if (fault != 3) {
    __syncwarp();
  }
  if (lane == 0 && fault != 4) {
    if (fault != 2) {
      __threadfence_block();
    }
    atomicExch(&lock, 0);
  }
  __syncthreads();
  if (warp == 0) {
    out[lane] = data[lane];
  }
}

// The same lock, which the CTA that has taken it may keep.
extern "C" __global__ void kept_lock(int* lock, int* data, int keeps) {
  if (threadIdx.x == 0) {
    while (atomicCAS(lock, 0, 1) != 0) {
    }
    __threadfence();
    *data += 1;
    __threadfence();
    if (!keeps) {
      atomicExch(lock, 0);
    }
  }
}
