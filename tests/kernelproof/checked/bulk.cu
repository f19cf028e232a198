// A bulk store, or a bulk load, on a stream; then a fill of the same memory on another, "ordered" behind it or not.
#include <cstdint>
#include <cstring>
#include <cuda_runtime.h>
__global__ void store(int *y) {
  __shared__ alignas(16) int tile[64];
  tile[threadIdx.x] = threadIdx.x;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" ::"l"(y), "r"((uint32_t)__cvta_generic_to_shared(tile)) : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
  }
}
__global__ void load(const int *x, int *y) {
  __shared__ alignas(16) int tile[64];
  __shared__ alignas(8) uint64_t full;
  uint32_t bar = (uint32_t)__cvta_generic_to_shared(&full), to = (uint32_t)__cvta_generic_to_shared(tile);
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 256;" ::"r"(bar) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" ::"r"(to), "l"(x), "r"(bar) : "memory");
  }
  asm volatile("{\n.reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n@!p bra again;\n}" ::"r"(bar) : "memory");
  y[threadIdx.x] = tile[threadIdx.x];
}
int main(int, char **argv) {
  bool loads = !strcmp(argv[1], "load"), ordered = !strcmp(argv[2], "ordered");
  int *x, *y;
  cudaStream_t a, b;
  cudaMalloc(&x, 256), cudaMalloc(&y, 256);
  cudaMemset(x, 0, 256);
  cudaStreamCreate(&a), cudaStreamCreate(&b);
  if (loads) load<<<1, 64, 0, a>>>(x, y);
  else store<<<1, 64, 0, a>>>(x);
  if (ordered) cudaStreamSynchronize(a);
  cudaMemsetAsync(x + 63, 0, 4, b);
  return cudaDeviceSynchronize();
}
