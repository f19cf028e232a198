// Loops with barriers: of equal and of different lengths, with and without a barrier behind them.

// Warp 0 goes round `first` times, the others `rest` times. Threads below `leaving` exit before.
extern "C" __global__ void rounds(float* out, int first, int rest, int more, int leaving) {
  __shared__ float s[128];
  int t = threadIdx.x;
  s[t] = t;
  __syncthreads();
  if (t < leaving) return;
  float sum = 0;
  int n = t < 32 ? first : rest;
  for (int i = 0; i < n; i++) {
    sum += s[(t + i) % 128];
    __syncthreads();  // round
  }
  if (more) __syncthreads();  // behind
  out[t] = sum;
}

// Lanes of one warp go round a different number of times.
extern "C" __global__ void lanes(float* out) {
  int t = threadIdx.x;
  for (int i = 0; i < 2 + t % 2; i++) __syncthreads();
  __syncthreads();
  out[t] = t;
}

// Two roles, each with barriers of its own, that meet at every one.
extern "C" __global__ void roles(float* out) {
  __shared__ float s[32];
  int t = threadIdx.x;
  float sum = 0;
  for (int i = 0; i < 4; i++) {
    if (t < 32) {
      s[t] = i;
      __syncthreads();
      __syncthreads();
    } else {
      __syncthreads();
      sum += s[t - 32];
      __syncthreads();
    }
  }
  out[t] = sum;
}

// Threads without work leave a reduction step by step.
extern "C" __global__ void tree(float* out) {
  __shared__ float s[256];
  int t = threadIdx.x;
  s[t] = t;
  __syncthreads();
  for (int w = 128; w > 0; w >>= 1) {
    if (t >= w) return;
    s[t] += s[t + w];
    __syncthreads();
  }
  out[0] = s[0];
}
