// A producer hands one buffer to a consumer several times. bar.arrive releases and does not wait; bar.sync waits.
#define ARRIVE(number) asm volatile("bar.arrive %0, 64;" ::"n"(number) : "memory")
#define SYNC(number) asm volatile("bar.sync %0, 64;" ::"n"(number) : "memory")

constexpr int kFull = 1, kEmpty = 2, kRounds = 3;

// Wait: does the producer wait for the buffer to be empty before it fills it again? Early: does it write once more
// after it has arrived?
template <bool Wait, bool Early>
__device__ void hand_over(int* out, int producer) {
  __shared__ int buffer[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int round = 0; round < kRounds; ++round) {
    if (warp == producer) {
      if (Wait && round > 0) {
        SYNC(kEmpty);
      } else if (round > 0) {
        ARRIVE(kEmpty);
      }
      buffer[lane] = round * 32 + lane;
      ARRIVE(kFull);
      if (Early) {
        buffer[lane] = -lane;
      }
    } else {
      SYNC(kFull);
      out[round * 32 + lane] = buffer[lane];
      if (round + 1 < kRounds && Wait) {
        ARRIVE(kEmpty);
      } else if (round + 1 < kRounds) {
        SYNC(kEmpty);
      }
    }
  }
}

extern "C" __global__ void waits(int* out, int producer) { hand_over<true, false>(out, producer); }
extern "C" __global__ void only_arrives(int* out, int producer) { hand_over<false, false>(out, producer); }
extern "C" __global__ void writes_again(int* out, int producer) { hand_over<true, true>(out, producer); }

// The same buffer in global memory, between warps of a CTA.
template <bool Wait>
__device__ void hand_over_globally(int* out, int* buffer, int producer) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int round = 0; round < kRounds; ++round) {
    if (warp == producer) {
      if (Wait && round > 0) {
        SYNC(kEmpty);
      } else if (round > 0) {
        ARRIVE(kEmpty);
      }
      buffer[lane] = round * 32 + lane;
      ARRIVE(kFull);
    } else {
      SYNC(kFull);
      out[round * 32 + lane] = buffer[lane];
      if (round + 1 < kRounds && Wait) {
        ARRIVE(kEmpty);
      } else if (round + 1 < kRounds) {
        SYNC(kEmpty);
      }
    }
  }
}

extern "C" __global__ void waits_globally(int* out, int* buffer, int producer) {
  hand_over_globally<true>(out, buffer, producer);
}
extern "C" __global__ void only_arrives_globally(int* out, int* buffer, int producer) {
  hand_over_globally<false>(out, buffer, producer);
}

// Another CTA's data, which one warp has acquired, is passed on by bar.arrive to the warps that wait, and back to nobody.
extern "C" __global__ void passes_on(int* data, int* flag, int* out, int acquirer, bool waits) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (blockIdx.x == 0) {
    if (warp == 0) {
      data[lane] = 7;
      __threadfence();
      __syncwarp();
      if (lane == 0) {
        atomicExch(flag, 1);
      }
    }
    return;
  }
  if ((warp == acquirer) == waits) {
    if (warp == acquirer) {
      while (*(volatile int*)flag == 0) {
      }
      __threadfence();
    }
    ARRIVE(kFull);
  } else {
    if (warp == acquirer) {
      while (*(volatile int*)flag == 0) {
      }
      __threadfence();
    }
    SYNC(kFull);
  }
  if (warp != acquirer) {
    out[lane] = data[lane];
  }
}
