// Work on default streams of threads, and kernels that wait for work on another stream. Compiled with
// --default-stream per-thread.
#include <cstdio>
#include <cstring>
#include <thread>

__global__ void fill(int* p, int v) { p[threadIdx.x] = v; }
__global__ void waits(volatile int* flag, int* out) {
  while (*flag == 0) {
  }
  *out = 1;
}
__global__ void sets(volatile int* flag) { *flag = 1; }
__global__ void gather(volatile int* count, int* out) {
  __shared__ char much[48 * 1024];
  much[threadIdx.x] = 0;
  atomicAdd((int*)count, 1);
  while (*count < gridDim.x) {
  }
  out[blockIdx.x] = much[threadIdx.x];
}

int main(int, char** argv) {
  int *a, *flag, host[32];
  cudaMalloc(&a, 1 << 16);
  cudaMalloc(&flag, 4);
  cudaMemset(flag, 0, 4);
  cudaStream_t other, free_stream;
  cudaStreamCreate(&other);
  cudaStreamCreateWithFlags(&free_stream, cudaStreamNonBlocking);
  cudaDeviceSynchronize();
  const char* which = argv[1];
  if (!strcmp(which, "threads")) {  // two threads, two default streams, one buffer
    std::thread([&] { fill<<<1, 32>>>(a, 1); }).join();
    fill<<<1, 32>>>(a, 2);
  } else if (!strcmp(which, "one thread")) {
    fill<<<1, 32>>>(a, 1);
    fill<<<1, 32>>>(a, 2);
    fill<<<1, 32, 0, cudaStreamPerThread>>>(a, 3);
  } else if (!strcmp(which, "a blocking stream")) {  // does not wait for a thread's default stream
    fill<<<1, 32, 0, other>>>(a, 1);
    fill<<<1, 32>>>(a, 2);
  } else if (!strcmp(which, "legacy")) {  // the default stream of all waits for both
    fill<<<1, 32, 0, other>>>(a, 1);
    fill<<<1, 32, 0, cudaStreamLegacy>>>(a, 2);
    fill<<<1, 32>>>(a, 3);
  } else if (!strcmp(which, "copied")) {
    fill<<<1, 32>>>(a, 1);
    cudaMemcpy(host, a, 128, cudaMemcpyDeviceToHost);
    fill<<<1, 32, 0, other>>>(a, host[0]);
  } else if (!strcmp(which, "waits")) {
    waits<<<1, 1, 0, free_stream>>>(flag, a);
    sets<<<1, 1, 0, other>>>(flag);
  } else if (!strcmp(which, "gathers")) {  // more CTAs than the device holds
    gather<<<1000, 1>>>(flag, a);
    fill<<<1, 32>>>(a + 2000, 1);
  }
  cudaDeviceSynchronize();
  cudaStreamDestroy(other);
  cudaStreamDestroy(free_stream);
  cudaFree(a);
  cudaFree(flag);
}
