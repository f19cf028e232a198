// Threads that wait for each other by flags and counters in global memory: right programs, and the same with a fault.
#include <cuda/atomic>

__device__ int relaxed(int const* flag) { return *(int const volatile*)flag; }
__device__ int acquired(int* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ void arrive(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// The CTA `reader` waits for `least` arrivals of the others and then reads the parts of all.
__device__ void parts(int* data, int* counter, int* out, int reader, int least, bool acquire) {
  const int cta = blockIdx.x;
  if (cta != reader) {
    data[cta * 32 + threadIdx.x] = cta + 1;
    __syncwarp();
    if (threadIdx.x == 0) {
      if (acquire) {
        arrive(counter);
      } else {
        __threadfence();
        atomicAdd(counter, 1);
      }
    }
    return;
  }
  if (threadIdx.x == 0) {
    if (acquire) {
      while (acquired(counter) < least) {
      }
    } else {
      while (relaxed(counter) < least) {
      }
      __threadfence();
    }
  }
  __syncwarp();
  int sum = 0;
  for (int other = 0; other < gridDim.x; ++other) {
    sum += other == reader ? 0 : data[other * 32 + threadIdx.x];
  }
  out[threadIdx.x] = sum;
}
extern "C" __global__ void parts_acquired(int* data, int* counter, int* out, int reader, int least) {
  parts(data, counter, out, reader, least, true);
}
extern "C" __global__ void parts_fenced(int* data, int* counter, int* out, int reader, int least) {
  parts(data, counter, out, reader, least, false);
}
// The same, polled by an atomic that changes nothing.
extern "C" __global__ void parts_polled_atomically(int* data, int* counter, int* out, int reader, int least) {
  const int cta = blockIdx.x;
  if (cta != reader) {
    data[cta * 32 + threadIdx.x] = cta + 1;
    __threadfence();
    __syncwarp();
    if (threadIdx.x == 0) {
      atomicAdd(counter, 1);
    }
    return;
  }
  if (threadIdx.x == 0) {
    while (atomicAdd(counter, 0) < least) {
    }
  }
  __syncwarp();
  __threadfence();
  int sum = 0;
  for (int other = 0; other < gridDim.x; ++other) {
    sum += other == reader ? 0 : data[other * 32 + threadIdx.x];
  }
  out[threadIdx.x] = sum;
}

// The CTA `reader` looks at the flag once, and reads the data whatever it has seen, or only if the flag is set.
extern "C" __global__ void looks_once(int* data, int* flag, int* out, int reader, bool heeds) {
  if (blockIdx.x != reader) {
    data[threadIdx.x] = 5;
    __syncwarp();
    if (threadIdx.x == 0) {
      arrive(flag);
    }
    return;
  }
  const int seen = acquired(flag);
  out[threadIdx.x] = seen || !heeds ? data[threadIdx.x] : 5;
}

// A barrier of the grid, in several rounds. A CTA waits for `least` arrivals per round.
extern "C" __global__ void grid_barrier(int* data, int* counter, int* out, int rounds, int least) {
  const int cta = blockIdx.x, ctas = gridDim.x;
  int sum = 0;
  for (int round = 0; round < rounds; ++round) {
    data[cta * blockDim.x + threadIdx.x] = round * ctas + cta;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(counter, 1);
      while (relaxed(counter) < 2 * round * ctas + least) {
      }
      __threadfence();
    }
    __syncthreads();
    for (int other = 0; other < ctas; ++other) {
      sum += data[other * blockDim.x + threadIdx.x];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(counter, 1);
      while (relaxed(counter) < 2 * round * ctas + ctas + least) {
      }
      __threadfence();
    }
    __syncthreads();
  }
  out[cta * blockDim.x + threadIdx.x] = sum;
}

// threadFenceReduction: the CTA with the last ticket adds the parts of all. `last`: that ticket. Volatile loads need no
// fence behind the ticket; plain ones do.
extern "C" __global__ void ticket_reduction(int* parts, unsigned* tickets, int* out, int last, bool plain) {
  __shared__ bool am_last;
  if (threadIdx.x == 0) {
    ((int volatile*)parts)[blockIdx.x] = blockIdx.x + 1;
    __threadfence();
    am_last = atomicInc(tickets, gridDim.x - 1) == last;
  }
  __syncthreads();
  if (am_last && threadIdx.x == 0) {
    int sum = 0;
    for (int i = 0; i < gridDim.x; ++i) {
      sum += plain ? __ldcg(parts + i) : ((int volatile*)parts)[i];
    }
    *out = sum;
  }
}

// Decoupled look-back: a running sum over CTAs. State 1: the CTA's own sum, state 2: the sum up to it.
__device__ void look_back_from(int* own, int* upto, int* state, int* out, bool fences, bool waits) {
  const int cta = blockIdx.x;
  if (threadIdx.x != 0) {
    return;
  }
  const int mine = cta + 1;
  ((int volatile*)own)[cta] = mine;
  if (fences) {
    __threadfence();
  }
  ((int volatile*)state)[cta] = 1;
  int before = 0;
  for (int i = cta - 1; i >= 0; --i) {
    int seen;
    do {
      seen = relaxed(state + i);
    } while (waits && seen == 0);
    __threadfence();
    if (seen == 2) {
      before += ((int volatile*)upto)[i];
      break;
    }
    before += ((int volatile*)own)[i];
  }
  ((int volatile*)upto)[cta] = before + mine;
  if (fences) {
    __threadfence();
  }
  ((int volatile*)state)[cta] = 2;
  out[cta] = before + mine;
}
extern "C" __global__ void look_back(int* own, int* upto, int* state, int* out) {
  look_back_from(own, upto, state, out, true, true);
}
extern "C" __global__ void look_back_unfenced(int* own, int* upto, int* state, int* out) {
  look_back_from(own, upto, state, out, false, true);
}

// Volatile data behind a volatile flag. The last of three values that are written counts.
extern "C" __global__ void message(int* data, int* flag, int* out, int reader, bool fences) {
  if (threadIdx.x != 0) {
    return;
  }
  if (blockIdx.x != reader) {
    for (int i = 1; i <= 3; ++i) {
      *(int volatile*)data = i;
    }
    if (fences) {
      __threadfence();
    }
    *(int volatile*)flag = 1;
  } else {
    while (relaxed(flag) == 0) {
    }
    *out = relaxed(data);
  }
}
// A hint that may be old without harm: the result is the same.
extern "C" __global__ void hint(int* found, int* out, int reader) {
  if (threadIdx.x != 0) {
    return;
  }
  if (blockIdx.x != reader) {
    *(int volatile*)found = 1;
    *(int volatile*)(found + 1) = 1;
  } else {
    while (relaxed(found + 1) == 0) {
    }
    if (relaxed(found) == 0) {
      out[1] = 0;
    }
    out[0] = 1;
  }
}

// Locks around an addition. Kind 0: atomicCAS and atomicExch; 1: given back by a volatile store; 2: tickets.
extern "C" __global__ void locked(int* total, int* lock, int* serving, int kind, bool fences) {
  if (threadIdx.x != 0) {
    return;
  }
  int ticket = 0;
  if (kind == 2) {
    ticket = atomicAdd(lock, 1);
    while (relaxed(serving) != ticket) {
    }
  } else {
    while (atomicCAS(lock, 0, 1) != 0) {
    }
  }
  __threadfence();
  *total += blockIdx.x + 1;
  if (fences) {
    __threadfence();
  }
  if (kind == 0) {
    atomicExch(lock, 0);
  } else if (kind == 1) {
    *(int volatile*)lock = 0;
  } else {
    *(int volatile*)serving = ticket + 1;
  }
}

// A seqlock: the reader takes two words that belong together.
extern "C" __global__ void sequence(int* words, int* number, int* out, int reader, int rounds) {
  if (threadIdx.x != 0) {
    return;
  }
  if (blockIdx.x != reader) {
    for (int i = 1; i <= rounds; ++i) {
      *(int volatile*)number = 2 * i - 1;
      __threadfence();
      ((int volatile*)words)[0] = i;
      ((int volatile*)words)[1] = -i;
      __threadfence();
      *(int volatile*)number = 2 * i;
    }
    return;
  }
  int first, x, y, last;
  do {
    first = relaxed(number);
    __threadfence();
    x = relaxed(words);
    y = relaxed(words + 1);
    __threadfence();
    last = relaxed(number);
  } while (first != last || first % 2 || first == 0);
  out[0] = x + y;
  out[1] = first == 2 * x;
}

// Two CTAs play ball: a flag that is set and reset, and data of both directions.
extern "C" __global__ void ball(int* data, int* flag, int* out, int starter, int rounds, bool waits) {
  const bool starts = blockIdx.x == starter;
  for (int round = 0; round < rounds; ++round) {
    if (starts) {
      if (threadIdx.x == 0 && (waits || round == 0)) {
        while (relaxed(flag) != 0) {
        }
        __threadfence();
      }
      __syncthreads();
      data[threadIdx.x] = round * 100 + threadIdx.x;
      __syncthreads();
      if (threadIdx.x == 0) {
        __threadfence();
        *(int volatile*)flag = 1;
      }
    } else {
      if (threadIdx.x == 0) {
        while (relaxed(flag) != 1) {
        }
        __threadfence();
      }
      __syncthreads();
      out[round * 32 + threadIdx.x] = data[threadIdx.x];
      __syncthreads();
      if (threadIdx.x == 0) {
        __threadfence();
        *(int volatile*)flag = 0;
      }
    }
  }
}

// Dekker: at most one of two CTAs may see that the other has not come yet.
extern "C" __global__ void dekker(int* came, int* out) {
  if (threadIdx.x == 0) {
    *(int volatile*)(came + blockIdx.x) = 1;
    __threadfence();
    out[blockIdx.x] = relaxed(came + 1 - blockIdx.x);
  }
}

// One thread of a CTA polls, and the others look at the flag behind a barrier: they must not see less.
extern "C" __global__ void looks_again(int* flag, int* out, int setter) {
  if (blockIdx.x == setter) {
    if (threadIdx.x == 0) {
      __threadfence();
      for (int i = 1; i <= 3; ++i) {
        *(int volatile*)flag = i;
      }
    }
    return;
  }
  if (threadIdx.x == 0) {
    while (relaxed(flag) < 2) {
    }
  }
  __syncthreads();
  out[threadIdx.x] = relaxed(flag) >= 2;
}

// A persistent kernel: CTAs draw items of a queue, and each waits for the item before its own.
extern "C" __global__ void queue(int* next, int* done, int* out, int items) {
  __shared__ int item;
  for (;;) {
    __syncthreads();
    if (threadIdx.x == 0) {
      item = atomicAdd(next, 1);
    }
    __syncthreads();
    const int mine = item;
    if (mine >= items) {
      return;
    }
    if (threadIdx.x == 0 && mine > 0) {
      while (acquired(done + mine - 1) == 0) {
      }
    }
    __syncthreads();
    out[mine * 32 + threadIdx.x] = (mine ? out[(mine - 1) * 32 + threadIdx.x] : 0) + 1;
    __syncthreads();
    if (threadIdx.x == 0) {
      arrive(done + mine);
    }
  }
}

// Warps of a CTA count in shared memory; the warp `reader` waits for `least` of the others.
extern "C" __global__ void warps_count(int* out, int reader, int least) {
  __shared__ int part[8][32];
  __shared__ int counter;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    counter = 0;
  }
  __syncthreads();
  if (warp != reader) {
    part[warp][lane] = warp + 1;
    __syncwarp();
    __threadfence_block();
    if (lane == 0) {
      atomicAdd(&counter, 1);
    }
  } else {
    if (lane == 0) {
      while (*(int volatile*)&counter < least) {
      }
    }
    __threadfence_block();
    __syncwarp();
    int sum = 0;
    for (int other = 0; other < blockDim.x / 32; ++other) {
      sum += other == reader ? 0 : part[other][lane];
    }
    out[lane] = sum;
  }
}

// One warp looks once at a flag in shared memory that another warp sets, and later waits for it.
extern "C" __global__ void warp_looks_once(int* out, int reader, bool heeds) {
  __shared__ int data[32];
  __shared__ int flag;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    flag = 0;
  }
  __syncthreads();
  if (warp != reader) {
    data[lane] = 5;
    __syncwarp();
    __threadfence_block();
    if (lane == 0) {
      *(int volatile*)&flag = 1;
    }
  } else {
    const int seen = *(int volatile*)&flag;
    __threadfence_block();
    out[lane] = seen || !heeds ? data[lane] : 5;
    while (*(int volatile*)&flag == 0) {
    }
  }
}

// A warp writes, and one of its threads sets a flag in shared memory through a generic address, as cuda::atomic_ref
// does. The other warp waits for the flag.
extern "C" __global__ void atomic_in_shared(int* out, int setter, bool releases, bool acquires) {
  __shared__ int data[32];
  __shared__ int flag;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  cuda::atomic_ref<int, cuda::thread_scope_block> reference(flag);
  if (threadIdx.x == 0) {
    flag = 0;
  }
  __syncthreads();
  if (warp == setter) {
    data[lane] = 5;
    __syncwarp();
    if (lane == 3) {
      reference.store(1, releases ? cuda::std::memory_order_release : cuda::std::memory_order_relaxed);
    }
  } else {
    while (reference.load(acquires ? cuda::std::memory_order_acquire : cuda::std::memory_order_relaxed) == 0) {
    }
    out[lane] = data[31 - lane];
  }
}

// The largest number of a CTA. Threads look before they change it: by a load of kind 0 volatile, 1 relaxed, 2 weak; with
// kind 3 they write it without an atomic, and with kind 4 the volatile reads are not over when it is set back.
extern "C" __global__ void largest(int* out, int kind) {
  __shared__ int most;
  const int mine = (threadIdx.x * 37 + 5) % 101;
  if (threadIdx.x == 0) {
    most = 0;
  }
  __syncthreads();
  cuda::atomic_ref<int, cuda::thread_scope_block> reference(most);
  int const volatile& seen = most;
  if (kind == 0 && mine > seen) {
    atomicMax(&most, mine);
  }
  if (kind == 1 && mine > reference.load(cuda::std::memory_order_relaxed)) {
    reference.fetch_max(mine, cuda::std::memory_order_relaxed);
  }
  if (kind == 2 && mine > most) {
    atomicMax(&most, mine);
  }
  if (kind == 3 && mine > seen) {
    most = mine;
  }
  int early = 0;
  if (kind == 4) {
    early = seen;
    if (threadIdx.x == 0) {
      most = 1;
    }
  }
  __syncthreads();
  out[threadIdx.x] = most + early;
}

__device__ long long acquired_64(long long* place) {
  long long value;
  asm volatile("ld.acquire.cta.b64 %0, [%1];" : "=l"(value) : "l"(place) : "memory");
  return value;
}
__device__ long long relaxed_64(long long* place) {
  long long value;
  asm volatile("ld.relaxed.cta.b64 %0, [%1];" : "=l"(value) : "l"(place) : "memory");
  return value;
}

// Threads count down to 0 and wait for that as a latch does: before it polls, a thread looks whether the counter is
// still what it was. With `space` 1 the counter is in global memory.
extern "C" __global__ void latch(long long* counters, int* out, int space) {
  __shared__ int data[128];
  __shared__ long long in_shared;
  long long* counter = space == 1 ? counters + blockIdx.x : &in_shared;
  if (threadIdx.x == 0) {
    *counter = blockDim.x;
  }
  __syncthreads();
  data[threadIdx.x] = threadIdx.x;
  long long old;
  asm volatile("atom.add.release.cta.b64 %0, [%1], %2;" : "=l"(old) : "l"(counter), "l"(-1ll) : "memory");
  long long value = acquired_64(counter);
  while (value != 0) {
    if (relaxed_64(counter) == value) {
      while (relaxed_64(counter) == value) {
      }
    }
    value = acquired_64(counter);
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = data[blockDim.x - 1 - threadIdx.x];
}
