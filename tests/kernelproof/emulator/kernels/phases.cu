// Kernels of sm_90 whose CTAs run different numbers of rounds: a ring of mbarriers, and a cluster that exchanges values.
#include <cuda/barrier>
#include <cooperative_groups.h>
#include <cstdint>
namespace cg = cooperative_groups;

__device__ __forceinline__ uint32_t place(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init(uint64_t* bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(place(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(place(bar)) : "memory");
}
__device__ __forceinline__ void wait(uint64_t* bar, int parity) {
  asm volatile("{ .reg .pred P; again: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1; @!P bra again; }"
               ::"r"(place(bar)), "r"(parity) : "memory");
}

// Warp 0 fills, warp 1 empties; CTA b runs rounds[b] rounds. fault 1: the producer does not wait for the consumer.
extern "C" __global__ void ring(const int* rounds, int* out, int fault) {
  __shared__ uint64_t full[2], empty[2];
  __shared__ int data[2][32];
  int t = threadIdx.x, lane = t & 31, n = rounds[blockIdx.x], sum = 0;
  if (t == 0) for (int s = 0; s < 2; s++) { init(&full[s], 32); init(&empty[s], 32); }
  __syncthreads();
  if (t < 32) {
    for (int i = 0; i < n; i++) {
      if (i > 1 && !(fault && blockIdx.x == 1)) wait(&empty[i & 1], (i / 2 - 1) & 1);
      data[i & 1][lane] = i + t;
      arrive(&full[i & 1]);
    }
  } else {
    for (int i = 0; i < n; i++) {
      wait(&full[i & 1], i / 2 & 1);
      sum += data[i & 1][31 - lane];
      arrive(&empty[i & 1]);
    }
    out[blockIdx.x * 32 + lane] = sum;
  }
}

// Each CTA of a pair reads the other's word, rounds[pair] times. fault 1: the second barrier of a round is left out.
extern "C" __global__ void __cluster_dims__(2, 1, 1) exchange(const int* rounds, int* out, int fault) {
  __shared__ int word[64];
  cg::cluster_group cluster = cg::this_cluster();
  int t = threadIdx.x, n = rounds[blockIdx.x / 2], sum = 0;
  int* other = cluster.map_shared_rank(word, cluster.block_rank() ^ 1);
  for (int i = 0; i < n; i++) {
    word[t] = blockIdx.x + i + t;
    cluster.sync();
    sum += other[(t + 1) % 64];
    if (!(fault && blockIdx.x / 2 == 1)) cluster.sync();
  }
  cluster.sync();
  out[blockIdx.x * 64 + t] = sum;
}
