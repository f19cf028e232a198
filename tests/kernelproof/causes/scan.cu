// Scans in shared memory, each step an instance of a template. Behind a step a barrier is missing.
template <int N, int D>
struct Step {
  static __device__ void run(float* s, int t) {
    float before = t >= D ? s[t - D] : 0.0f;
    __syncthreads();
    s[t] += before;
    if constexpr (2 * D < N) Step<N, 2 * D>::run(s, t);
  }
};

template <int N>
__global__ void scan(const float* x, float* y, int rounds) {
  __shared__ float s[N];
  int t = threadIdx.x;
  for (int r = 0; r < rounds; r++) {
    s[t] = x[blockIdx.x * N + t];
    __syncthreads();
    Step<N, 1>::run(s, t);
    y[blockIdx.x * N + t] = s[t ^ 1];
  }
}

template <int N>
void run() {
  float *x, *y;
  cudaMalloc(&x, 2 * N * 4);
  cudaMalloc(&y, 2 * N * 4);
  cudaMemset(x, 0, 2 * N * 4);
  scan<N><<<2, N>>>(x, y, 2);
  cudaDeviceSynchronize();
}

int main() {
  run<64>();
  run<128>();
  return 0;
}
