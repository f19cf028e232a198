// D(m,n) = A(m,k) * B on TMA and wgmma: a producer warp, two consumer warpgroups, a ring of stages, clusters with multicast.
// B is (n,k) or, with NN, (k,n). Pingpong: the consumers take tiles in turn. The host side launches it with its tensor maps.
#include "hopper.cuh"

namespace tma_gemm {

constexpr int BK = 64, kStages = 3, kThreads = 384;

template <int BN_, int CM_, int CN_, bool NN_, bool HALF_, bool PP_>
struct Config {
  static constexpr int BM = PP_ ? 64 : 128, BN = BN_, CM = CM_, CN = CN_, CS = CM_ * CN_;
  static constexpr bool NN = NN_, HALF = HALF_, PP = PP_;
  static constexpr int kA = BM * BK * 2, kB = BN * BK * 2, kStage = kA + kB;
  // Two store buffers of 16 x 64 halves per consumer warp.
  static constexpr int kStore = 8 * 2 * 2048;
  static constexpr int kShared = 1024 + kStages * kStage + kStore + 2 * kStages * 8 + 16;
};

template <class C>
__global__ __launch_bounds__(kThreads, 1) void gemm(__grid_constant__ CUtensorMap const ta, __grid_constant__ CUtensorMap const tb,
                                                    __grid_constant__ CUtensorMap const td, int m, int n, int k) {
  extern __shared__ uint8_t raw[];
  uint32_t const base = (address(raw) + 1023) & ~1023u;
  uint32_t const store = base + kStages * C::kStage, bars = store + C::kStore;
  auto const full = [&](int s) { return bars + 8 * s; };
  auto const empty = [&](int s) { return bars + 8 * (kStages + s); };
  auto const order = [&](int g) { return bars + 8 * (2 * kStages + g); };
  int const warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), group = warp / 4;
  uint32_t const rank = rank_in_cluster();
  int const cx = rank % C::CN, cy = rank / C::CN;

  if (warp == 0 && elected()) {
    prefetch_map(&ta);
    prefetch_map(&tb);
    prefetch_map(&td);
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(full(s), 1);
      mbarrier_init(empty(s), (C::CM + C::CN - 1) * (C::PP ? 4 : 8));
    }
    mbarrier_init(order(0), 4);
    mbarrier_init(order(1), 4);
    fence_mbarrier_init();
  }
  if constexpr (C::CS > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  }
  __syncthreads();
#ifdef PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

  int const tiles_n = (n + C::BN * C::CN - 1) / (C::BN * C::CN), tiles_m = (m + C::BM * C::CM - 1) / (C::BM * C::CM);
  int const tiles = tiles_m * tiles_n, steps = (k + BK - 1) / BK;
  int const first = blockIdx.x / C::CN, stride = gridDim.x / C::CN;

  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 8 && elected()) {
      int s = 0, phase = 0;
      for (int t = first; t < tiles; t += stride) {
        int const row = (t / tiles_n * C::CM + cy) * C::BM, column = (t % tiles_n * C::CN + cx) * C::BN;
#pragma unroll 1
        for (int i = 0; i < steps; ++i) {
          mbarrier_wait(empty(s), phase ^ 1);
          mbarrier_expect(full(s), C::kStage);
          uint32_t const a = base + s * C::kStage, b = a + C::kA;
          constexpr int ra = C::BM / C::CN;
          if constexpr (C::CN > 1)
            tma_load_multicast(&ta, full(s), a + cx * ra * 128, i * BK, row + cx * ra, ((1 << C::CN) - 1) << (cy * C::CN));
          else
            tma_load(&ta, full(s), a, i * BK, row);
          uint16_t mask = 0;
          for (int y = 0; y < C::CM; ++y) mask |= 1 << (y * C::CN + cx);
          if constexpr (C::NN) {
            constexpr int rb = BK / C::CM;
            for (int j = 0; j < C::BN / 64; ++j) {
              uint32_t const to = b + j * 64 * 128 + cy * rb * 128;
              if constexpr (C::CM > 1)
                tma_load_multicast(&tb, full(s), to, column + j * 64, i * BK + cy * rb, mask);
              else
                tma_load(&tb, full(s), to, column + j * 64, i * BK);
            }
          } else {
            constexpr int rb = C::BN / C::CM;
            if constexpr (C::CM > 1)
              tma_load_multicast(&tb, full(s), b + cy * rb * 128, i * BK, column + cy * rb, mask);
            else
              tma_load(&tb, full(s), b, i * BK, column);
          }
          if (++s == kStages) s = 0, phase ^= 1;
        }
      }
      if constexpr (C::CS > 1)
#pragma unroll 1
        for (int i = 0; i < kStages; ++i) {
          mbarrier_wait(empty(s), phase ^ 1);
          if (++s == kStages) s = 0, phase ^= 1;
        }
#ifdef PDL
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  int const lane = threadIdx.x % 32;
  bool const leader = elected();
  uint32_t const buffer = store + warp * 2 * 2048;
  auto const release = [&](int s) {
    if constexpr (C::CS == 1) {
      if (leader) mbarrier_arrive(empty(s));
    } else {
      // Lane r tells CTA r, if that writes to this one.
      if (lane < C::CS && (lane % C::CN == cx || lane / C::CN == cy)) mbarrier_arrive_cluster(empty(s), lane);
    }
  };
  using Element = std::conditional_t<C::HALF, uint32_t, float>;
  constexpr int kRegisters = C::HALF ? C::BN / 4 : C::BN / 2;
  int s = 0, phase = 0, turn = 0, stored = 0;
  auto const skip = [&](int count) {
    s += count;
    phase ^= (s / kStages) & 1;
    s %= kStages;
  };
  int t = first;
  if (C::PP && group == 1) {
    t += stride;
    skip(steps);
  }
  for (; t < tiles; t += C::PP ? 2 * stride : stride) {
    int const row = (t / tiles_n * C::CM + cy) * C::BM + (C::PP ? 0 : group * 64), column = (t % tiles_n * C::CN + cx) * C::BN;
    Element acc[kRegisters];
    if (C::PP) {
      // The first consumer goes first: its barrier is taken as passed.
      mbarrier_wait(order(group), turn ^ (group == 0));
      turn ^= 1;
    }
    int previous = -1;
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      mbarrier_wait(full(s), phase);
      uint32_t const a = base + s * C::kStage + (C::PP ? 0 : group * 64 * 128), b = base + s * C::kStage + C::kA;
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < BK / 16; ++j) {
        uint64_t const da = descriptor(a + j * 32, 16, 1024);
        uint64_t const db = C::NN ? descriptor(b + j * 16 * 128, 64 * 128, 1024) : descriptor(b + j * 32, 16, 1024);
        wgmma<C::BN, C::NN>(acc, da, db, i || j);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (previous >= 0) release(previous);
      previous = s;
      skip(1);
    }
    wgmma_wait<0>();
    release(previous);
    if (C::PP) {
      if (leader) mbarrier_arrive(order(group ^ 1));
      skip(steps);
    }
    // Each warp stores its 16 rows in pieces of 64 columns.
#pragma unroll
    for (int c = 0; c < C::BN / 64; ++c) {
      uint32_t const to = buffer + (stored & 1) * 2048;
      ++stored;
      if (leader) bulk_wait_read<1>();
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t r[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          if constexpr (C::HALF) {
            r[q] = acc[(c * 4 + j) * 4 + q];
          } else {
            __half2 const h = __floats2half2_rn(acc[(c * 4 + j) * 8 + 2 * q], acc[(c * 4 + j) * 8 + 2 * q + 1]);
            r[q] = *reinterpret_cast<uint32_t const*>(&h);
          }
        }
        int const x = 2 * j + lane / 16, y = lane % 16;
        stmatrix4(to + y * 128 + ((x ^ (y & 7)) << 4), r[0], r[1], r[2], r[3]);
      }
      fence_async();
      __syncwarp();
      if (leader) {
        tma_store(&td, to, column + c * 64, row + (warp % 4) * 16);
        bulk_commit();
      }
    }
  }
  if (leader) bulk_wait_read<0>();
}

template <class C>
int launch(void const* a, void const* b, void* d, int m, int n, int k, int clusters, int pdl) {
  CUtensorMap ta, tb, td;
  int error = encode(&ta, a, k, m, k, BK, C::BM / C::CN);
  if (!error) error = C::NN ? encode(&tb, b, n, k, n, 64, BK / C::CM) : encode(&tb, b, k, n, k, BK, C::BN / C::CM);
  if (!error) error = encode(&td, d, n, m, n, 64, 16);
  if (error) return error;
  error = cudaFuncSetAttribute(gemm<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kShared);
  if (error) return error;
  cudaLaunchConfig_t config = {};
  int const tiles = ((m + C::BM * C::CM - 1) / (C::BM * C::CM)) * ((n + C::BN * C::CN - 1) / (C::BN * C::CN));
  config.gridDim = dim3((clusters && clusters < tiles ? clusters : tiles) * C::CN, C::CM, 1);
  config.blockDim = dim3(kThreads, 1, 1);
  config.dynamicSmemBytes = C::kShared;
  cudaLaunchAttribute attributes[2];
  clustered(attributes, C::CN, C::CM, pdl);
  config.attrs = attributes;
  config.numAttrs = 2;
  void* arguments[] = {&ta, &tb, &td, &m, &n, &k};
  return cudaLaunchKernelExC(&config, reinterpret_cast<void const*>(&gemm<C>), arguments);
}

}  // namespace tma_gemm

using namespace tma_gemm;

// clusters: at most so many are launched (0: one per tile).
#define ENTRY(name, ...)                                                                                           \
  extern "C" int name(void const* a, void const* b, void* d, int m, int n, int k, int clusters, int pdl) {         \
    return launch<Config<__VA_ARGS__>>(a, b, d, m, n, k, clusters, pdl);                                          \
  }
//                 BN  CM CN  NN     HALF   pingpong
ENTRY(tn_f32_1x1, 128, 1, 1, false, false, false)
ENTRY(nn_f32_1x1, 128, 1, 1, true, false, false)
ENTRY(tn_f16_2x1, 128, 2, 1, false, true, false)
ENTRY(nn_f32_2x1, 64, 2, 1, true, false, false)
ENTRY(tn_f32_1x2, 64, 1, 2, false, false, false)
ENTRY(nn_f16_2x2, 128, 2, 2, true, true, false)
ENTRY(tn_f32_pingpong, 64, 1, 1, false, false, true)
ENTRY(nn_f32_pingpong_2x1, 64, 2, 1, true, false, true)
