// Inline PTX of the asynchronous units: mbarriers, bulk copies, wgmma, clusters.
#pragma once
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#define DEVICE __device__ __forceinline__

DEVICE uint32_t address(void const* p) { return uint32_t(__cvta_generic_to_shared(p)); }
DEVICE uint32_t mapped(uint32_t at, uint32_t rank) {
  uint32_t out;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(at), "r"(rank));
  return out;
}
DEVICE bool elected() {
  uint32_t yes;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(yes));
  return yes;
}
DEVICE uint32_t rank_in_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

DEVICE void mbarrier_init(uint32_t bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void mbarrier_expect(uint32_t bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void mbarrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
DEVICE void mbarrier_arrive_cluster(uint32_t bar, uint32_t rank) {
  asm volatile("{\n .reg .b32 r;\n mapa.shared::cluster.u32 r, %0, %1;\n mbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(bar), "r"(rank)
               : "memory");
}
DEVICE void mbarrier_wait(uint32_t bar, int parity) {
  asm volatile(
      "{\n .reg .pred p;\nagain:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @p bra done;\n bra again;\ndone:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

DEVICE void tma_load(CUtensorMap const* map, uint32_t bar, uint32_t to, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
               "l"(map), "r"(bar), "r"(x), "r"(y)
               : "memory");
}
DEVICE void tma_load_multicast(CUtensorMap const* map, uint32_t bar, uint32_t to, int x, int y, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(bar), "h"(mask), "r"(x), "r"(y)
      : "memory");
}
DEVICE void tma_store(CUtensorMap const* map, uint32_t from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from), "r"(x), "r"(y)
               : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N>
DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
DEVICE void prefetch_map(CUtensorMap const* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

DEVICE void stmatrix4(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// 128-byte swizzle; strides in bytes.
DEVICE uint64_t descriptor(uint32_t at, uint32_t leading, uint32_t stride) {
  return uint64_t((at & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | uint64_t(1) << 62;
}

#define R4(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define R16(c, d, i) R4(c, d, i), R4(c, d, i + 4), R4(c, d, i + 8), R4(c, d, i + 12)
#define R32(c, d) R16(c, d, 0), R16(c, d, 16)
#define R64(c, d) R32(c, d), R16(c, d, 32), R16(c, d, 48)
#define N32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define N64 N32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA(shape, names, a, b, s, t)                                                                                          \
  "{\n .reg .pred p;\n setp.ne.b32 p, " s ", 0;\n wgmma.mma_async.sync.aligned." shape " {" names "}, " a ", " b ", p, 1, 1, 0, " t ";\n}"
#define PLUS_F(x) "+f"(x)
#define PLUS_R(x) "+r"(x)

template <int N, bool NN>
DEVICE void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (N == 64)
    asm volatile(WGMMA("m64n64k16.f32.f16.f16", N32, "%32", "%33", "%34", "%35") : R32(PLUS_F, d) : "l"(a), "l"(b), "r"(accumulate), "n"(int(NN)));
  else
    asm volatile(WGMMA("m64n128k16.f32.f16.f16", N64, "%64", "%65", "%66", "%67") : R64(PLUS_F, d) : "l"(a), "l"(b), "r"(accumulate), "n"(int(NN)));
}
template <int N, bool NN>
DEVICE void wgmma(uint32_t (&d)[N / 4], uint64_t a, uint64_t b, int accumulate) {
  static_assert(N == 128);
  asm volatile(WGMMA("m64n128k16.f16.f16.f16", N32, "%32", "%33", "%34", "%35") : R32(PLUS_R, d) : "l"(a), "l"(b), "r"(accumulate), "n"(int(NN)));
}

// --- host ---

using Encode = int (*)(CUtensorMap*, int, unsigned, void*, uint64_t const*, uint64_t const*, uint32_t const*, uint32_t const*, int, int, int, int);

inline int encode(CUtensorMap* map, void const* p, int inner, int outer, int ld, int columns, int rows) {
  static Encode function = nullptr;
  if (!function) {
    cudaDriverEntryPointQueryResult found;
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", reinterpret_cast<void**>(&function), 12000, cudaEnableDefault, &found);
    if (error) return error;
  }
  uint64_t const extent[2] = {uint64_t(inner), uint64_t(outer)}, pitch[1] = {uint64_t(ld) * 2};
  uint32_t const box[2] = {uint32_t(columns), uint32_t(rows)}, step[2] = {1, 1};
  return function(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void*>(p), extent, pitch, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

inline void clustered(cudaLaunchAttribute* attributes, int x, int y, int pdl) {
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = x;
  attributes[0].val.clusterDim.y = y;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = pdl;
}
