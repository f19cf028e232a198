// The generic launcher: opens a built kernel and launches it. One binary for every kernel, every CUDA 13 runtime and
// the emulator's stand-in: the runtime is found by name when a kernel is opened, nothing is linked at build time.
//
// All functions return a cudaError_t as int; cudal2gen_message() tells in words what the last one of this thread
// refused. A kernel is opened, and loaded, for the current device. launch() waits for and queries nothing; it encodes the
// tensor maps of operands that it has not seen, and keeps them.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace {

thread_local std::string message;

int refuse(cudaError_t error, std::string const& why) {
  message = why;
  return error;
}

struct Runtime {
  decltype(&cudaLibraryLoadFromFile) load;
  decltype(&cudaLibraryUnload) unload;
  decltype(&cudaLibraryGetKernel) get_kernel;
  decltype(&cudaKernelSetAttributeForDevice) set_attribute;
  decltype(&cudaGetDevice) get_device;
  decltype(&cudaDeviceGetAttribute) device_attribute;
  cudaError_t (*attributes)(cudaFuncAttributes*, void const*);
  cudaError_t (*occupancy)(int*, void const*, int, size_t);
  decltype(&cudaMemsetAsync) memset_async;
  decltype(&cudaLaunchKernelExC) launch;
  decltype(&cudaGetErrorString) error_string;
  decltype(&cudaGetDriverEntryPointByVersion) driver_entry;
  cudaError_t (*max_clusters)(int*, void const*, cudaLaunchConfig_t const*);
};

template <class Function>
bool find(void* library, char const* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) message = std::string(name) + " is missing from the CUDA runtime; CUDA 13 has it";
  return function;
}

bool connect(void* library, Runtime& runtime) {
  return find(library, "cudaLibraryLoadFromFile", runtime.load) && find(library, "cudaLibraryUnload", runtime.unload) &&
         find(library, "cudaLibraryGetKernel", runtime.get_kernel) &&
         find(library, "cudaKernelSetAttributeForDevice", runtime.set_attribute) &&
         find(library, "cudaGetDevice", runtime.get_device) &&
         find(library, "cudaDeviceGetAttribute", runtime.device_attribute) &&
         find(library, "cudaFuncGetAttributes", runtime.attributes) &&
         find(library, "cudaOccupancyMaxActiveBlocksPerMultiprocessor", runtime.occupancy) &&
         find(library, "cudaMemsetAsync", runtime.memset_async) && find(library, "cudaLaunchKernelExC", runtime.launch) &&
         find(library, "cudaGetErrorString", runtime.error_string);
}

// What only kernels with clusters and tensor maps ask for.
bool connect_hopper(void* library, Runtime& runtime) {
  return find(library, "cudaGetDriverEntryPointByVersion", runtime.driver_entry) &&
         find(library, "cudaOccupancyMaxActiveClusters", runtime.max_clusters);
}

using Facts = std::map<std::string, std::string>;

// `name=value` tokens separated by white space.
void read_facts(std::istream& text, Facts& facts) {
  std::string token;
  while (text >> token) {
    auto const split = token.find('=');
    if (split != std::string::npos) facts[token.substr(0, split)] = token.substr(split + 1);
  }
}

constexpr int kMostRows = 1 << 24;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A box of `cols` x `rows` halves of a matrix; its swizzle is as wide as its columns. Without columns there is none.
struct Box {
  int cols = 0, rows = 0;
};

// Tensor maps by what they describe: address, columns, rows, bytes from row to row, box. Encoding takes a microsecond,
// so that of operands that come again is kept; a caller with ever new ones costs no memory.
class MapCache {
 public:
  using Key = std::array<uint64_t, 6>;
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;

  bool find(void const* matrix, int64_t cols, int64_t rows, int64_t ld, Box box, CUtensorMap& map) {
    Key const key = {reinterpret_cast<uint64_t>(matrix), uint64_t(cols), uint64_t(rows), uint64_t(ld),
                     uint64_t(box.cols), uint64_t(box.rows)};
    std::lock_guard<std::mutex> const guard(mutex_);
    auto known = maps_.find(key);
    if (known == maps_.end()) {
      cuuint64_t const extents[] = {cuuint64_t(cols), cuuint64_t(rows)}, strides[] = {cuuint64_t(ld) * 2};
      cuuint32_t const sizes[] = {cuuint32_t(box.cols), cuuint32_t(box.rows)}, steps[] = {1, 1};
      CUtensorMapSwizzle const swizzle = box.cols == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                         : box.cols == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                          : CU_TENSOR_MAP_SWIZZLE_32B;
      if (encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void*>(matrix), extents, strides, sizes, steps,
                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
        return false;
      if (maps_.size() >= kMost) maps_.clear();
      known = maps_.emplace(key, map).first;
    }
    map = known->second;
    return true;
  }

 private:
  static constexpr size_t kMost = 256;
  std::mutex mutex_;
  std::map<Key, CUtensorMap> maps_;
};

// L2 eviction priorities, as createpolicy.fractional encodes them: normal, first, last.
constexpr uint64_t kPolicies[] = {0x1000000000000000, 0x12F0000000000000, 0x14F0000000000000};

enum class Kind { kTiles, kTma, kCluster };

}  // namespace

struct cudal2gen_kernel {
  Runtime runtime;
  cudaLibrary_t library;
  cudaKernel_t kernel;
  Kind kind;
  bool predicated, nn, zsplit, persistent;
  int threads, smem_bytes, bm, bn, bk, split_k, baked_k;
  int64_t swizzle_stride, resident;  // resident: clusters, or CTAs without, that the device holds at once

  // Of kernels for compute capability 9.0. A cluster has cluster_m x cluster_n tiles, or all slices of one.
  bool workspace, pdl;
  int cluster_m, cluster_n, cluster, steps, along_n, band;  // steps: of k that a CTA holds, 0 for any number
  uint64_t policy_a, policy_b;
  Box box_a, box_b, box_d;
  mutable MapCache maps;

  int64_t clusters(int m, int n) const {
    int64_t const shared = ceil_div(ceil_div(m, bm), cluster_m) * ceil_div(ceil_div(n, bn), cluster_n);
    return workspace ? shared * split_k : shared;
  }
  int64_t tiles(int m, int n) const { return ceil_div(m, bm) * ceil_div(n, bn); }
  // The arrival counters come first, padded to a multiple of 256 bytes.
  int64_t counter_bytes(int m, int n) const { return ceil_div(tiles(m, n) * 4, 256) * 256; }
};

namespace {

cudaLaunchAttribute cluster_of(int ctas) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(ctas);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

// How many clusters, or CTAs without, the device holds at once. Clusters do not straddle its groups of SMs.
cudaError_t count_resident(cudal2gen_kernel& own, int device) {
  auto const* const function = reinterpret_cast<void const*>(own.kernel);
  int number = 0;
  if (own.cluster > 1) {
    cudaLaunchAttribute attribute = cluster_of(own.cluster);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(own.cluster), 1, 1);
    config.blockDim = dim3(unsigned(own.threads), 1, 1);
    config.dynamicSmemBytes = own.smem_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaError_t const error = own.runtime.max_clusters(&number, function, &config);
    own.resident = number;
    return error;
  }
  int sms = 0;
  cudaError_t error = own.runtime.occupancy(&number, function, own.threads, own.smem_bytes);
  if (!error) error = own.runtime.device_attribute(&sms, cudaDevAttrMultiProcessorCount, device);
  own.resident = int64_t(number) * sms;
  return error;
}

bool misaligned(void const* pointer, int ld) { return reinterpret_cast<uintptr_t>(pointer) % 16 || ld % 8; }

}  // namespace

extern "C" {

char const* cudal2gen_message() { return message.c_str(); }

// directory: a built kernel's. options: data that is not in the binary, as "swizzle_stride=2048", or null.
// runtime: the CUDA runtime library's file name or path, null for "libcudart.so.13".
int cudal2gen_open(char const* directory, char const* options, char const* runtime, cudal2gen_kernel** out) {
  message.clear();
  *out = nullptr;
  std::string const folder = directory;
  Facts facts;
  std::ifstream file(folder + "/kernel.launch");
  if (!file) return refuse(cudaErrorFileNotFound, folder + "/kernel.launch is missing; build the kernel first");
  read_facts(file, facts);
  std::istringstream given(options ? options : "");
  Facts chosen;
  read_facts(given, chosen);
  std::map<std::string, std::vector<std::string>> const known = {
      {"tiles", {"swizzle_stride"}}, {"tma", {"raster_axis", "raster_group", "hint_a", "hint_b", "pdl"}}, {"cluster", {}}};
  auto const kind = known.find(facts["launch"]);
  if (kind == known.end())
    return refuse(cudaErrorInvalidValue, folder + "/kernel.launch is not one that this launcher understands");
  for (auto const& [name, value] : chosen)
    if (std::find(kind->second.begin(), kind->second.end(), name) == kind->second.end())
      return refuse(cudaErrorInvalidValue, "unknown option " + name);

  auto kernel = std::make_unique<cudal2gen_kernel>();
  void* const library = dlopen(runtime ? runtime : "libcudart.so.13", RTLD_NOW | RTLD_LOCAL);
  if (!library) return refuse(cudaErrorInitializationError, dlerror());
  if (!connect(library, kernel->runtime)) return cudaErrorSymbolNotFound;
  kernel->kind = facts["launch"] == "tiles" ? Kind::kTiles : facts["launch"] == "tma" ? Kind::kTma : Kind::kCluster;
  if (kernel->kind != Kind::kTiles && !connect_hopper(library, kernel->runtime)) return cudaErrorSymbolNotFound;

  auto const number = [&](char const* name) { return std::strtoll(facts[name].c_str(), nullptr, 10); };
  kernel->predicated = kernel->kind != Kind::kTiles || number("predicated");
  kernel->nn = facts["layout"] == "nn";
  kernel->zsplit = facts["raster"] == "zsplit";
  kernel->persistent = facts["raster"] == "persistent" || number("persistent");
  kernel->threads = number("threads");
  kernel->smem_bytes = number("smem_bytes");
  kernel->bm = number("bm");
  kernel->bn = number("bn");
  kernel->bk = number("bk");
  kernel->split_k = number("split_k");
  kernel->baked_k = number("baked_k");
  kernel->swizzle_stride = std::strtoll(chosen["swizzle_stride"].c_str(), nullptr, 10);
  if (!kernel->threads || !kernel->bm || !kernel->bn || !kernel->bk || !kernel->split_k)
    return refuse(cudaErrorInvalidValue, folder + "/kernel.launch is not one that this launcher understands");
  if (kernel->zsplit && kernel->swizzle_stride <= 0)
    return refuse(cudaErrorInvalidValue, "a zsplit kernel needs the option swizzle_stride=<columns>");
  auto const option = [&](char const* name) { return std::strtoll(chosen[name].c_str(), nullptr, 10); };
  kernel->workspace = kernel->kind == Kind::kTiles ? kernel->split_k > 1 : facts["reduce"] == "workspace";
  kernel->cluster_m = std::max(1ll, number("cluster_m"));
  kernel->cluster_n = std::max(1ll, number("cluster_n"));
  kernel->cluster = facts["reduce"] == "cluster" ? kernel->split_k : kernel->cluster_m * kernel->cluster_n;
  kernel->steps = number("steps");
  kernel->along_n = option("raster_axis");
  kernel->band = std::max(1ll, option("raster_group"));
  // A kernel with a workspace follows the clearing of its counters: there is no kernel to overlap with, and only kernels
  // can be the earlier side of a programmatic edge in a captured graph.
  kernel->pdl = option("pdl") && !kernel->workspace;
  if (option("hint_a") < 0 || option("hint_a") > 2 || option("hint_b") < 0 || option("hint_b") > 2)
    return refuse(cudaErrorInvalidValue, "hint_a and hint_b are 0, 1 or 2: normal, first, last");
  kernel->policy_a = kPolicies[option("hint_a")];
  kernel->policy_b = kPolicies[option("hint_b")];
  auto const box = [&](std::string const& name) {
    return Box{int(number((name + "_cols").c_str())), int(number((name + "_rows").c_str()))};
  };
  kernel->box_a = box("box_a");
  kernel->box_b = box("box_b");
  kernel->box_d = box("box_d");

  Runtime const& cuda = kernel->runtime;
  std::string const cubin = folder + "/kernel.cubin";
  cudaError_t error = cuda.load(&kernel->library, cubin.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (error) return refuse(error, cubin + ": " + cuda.error_string(error));
  auto const fail = [&](cudaError_t code, std::string const& what) {
    cuda.unload(kernel->library);
    return refuse(code, what + ": " + cuda.error_string(code));
  };
  error = cuda.get_kernel(&kernel->kernel, kernel->library, facts["entry"].c_str());
  if (error) return fail(error, facts["entry"]);
  int device = 0;
  error = cuda.get_device(&device);
  if (error) return fail(error, "cudaGetDevice");
  error = cuda.set_attribute(kernel->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel->smem_bytes, device);
  if (error) return fail(error, std::to_string(kernel->smem_bytes) + " bytes of shared memory");
  // Libraries load lazily; asked for its attributes, the kernel is loaded here, and not in the first launch.
  cudaFuncAttributes loaded;
  error = cuda.attributes(&loaded, kernel->kernel);
  if (error) return fail(error, "loading " + cubin);
  if (kernel->kind == Kind::kTma) {
    cudaDriverEntryPointQueryResult found;
    error = cuda.driver_entry("cuTensorMapEncodeTiled", reinterpret_cast<void**>(&kernel->maps.encode), 12000,
                              cudaEnableDefault, &found);
    if (!error && found != cudaDriverEntryPointSuccess) error = cudaErrorSymbolNotFound;
    if (error) return fail(error, "cuTensorMapEncodeTiled of the driver");
  }
  if (kernel->persistent) {
    error = count_resident(*kernel, device);
    if (error) return fail(error, "occupancy");
    if (!kernel->resident) return fail(cudaErrorLaunchOutOfResources, "no CTA fits on this device");
  }
  *out = kernel.release();
  return cudaSuccess;
}

int cudal2gen_close(cudal2gen_kernel* kernel) {
  message.clear();
  cudaError_t const error = kernel->runtime.unload(kernel->library);
  delete kernel;
  return error;
}

// Bytes of workspace, aligned to 256, that a launch of this size needs; 0 where none.
int64_t cudal2gen_workspace_bytes(cudal2gen_kernel const* kernel, int m, int n, int k) {
  (void)k;
  if (!kernel->workspace) return 0;
  return kernel->counter_bytes(m, n) + kernel->tiles(m, n) * kernel->split_k * kernel->bm * kernel->bn * int64_t(4);
}

// D(m,n) = A(m,k) * B on the given stream. Leading dimensions in elements. workspace: cudal2gen_workspace_bytes().
int cudal2gen_launch(cudal2gen_kernel const* kernel, void const* a, int lda, void const* b, int ldb, void* d, int ldd,
                     int m, int n, int k, void* workspace, void* stream) {
  message.clear();
  cudal2gen_kernel const& own = *kernel;
  auto const invalid = [](char const* why) { return refuse(cudaErrorInvalidValue, why); };
  if (m <= 0 || n <= 0 || k <= 0) return invalid("m, n and k must be positive");
  if (m > kMostRows || lda > kMostRows || ldb > kMostRows || ldd > kMostRows || n > kMostRows || k > kMostRows)
    return invalid("sizes and leading dimensions must not exceed 16777216: offsets within a tile are 32-bit");
  if (lda < k || ldb < (own.nn ? n : k) || ldd < n) return invalid("a leading dimension is shorter than its row");
  if (!own.predicated && (m % own.bm || n % own.bn || k % own.bk))
    return invalid("the tile does not divide the problem, and this kernel has no predicates");
  if (own.kind != Kind::kTma && own.predicated && k % 8)
    return invalid("k must be a multiple of 8: rows along k are read in 16-byte vectors");
  if (own.baked_k && (k != own.baked_k || lda != k || (!own.nn && ldb != k)))
    return invalid("this kernel has k baked in: it takes that k only, packed");
  if (misaligned(a, lda) || misaligned(b, ldb))
    return refuse(cudaErrorMisalignedAddress, "A and B must be aligned to 16 bytes, lda and ldb be multiples of 8");
  bool const d_vectors = own.box_d.cols > 0 || !own.predicated;
  if (d_vectors ? misaligned(d, ldd) : reinterpret_cast<uintptr_t>(d) % 2 != 0)
    return refuse(cudaErrorMisalignedAddress, "D must be aligned to 16 bytes, ldd be a multiple of 8");

  int64_t const tiles_m = ceil_div(m, own.bm), tiles_n = ceil_div(n, own.bn);
  float* partials = nullptr;
  unsigned* arrivals = nullptr;
  if (ceil_div(k, own.bk) < own.split_k) return invalid("k has fewer steps than this kernel has slices");
  if (own.steps && ceil_div(ceil_div(k, own.bk), own.split_k) > own.steps)
    return invalid("k is larger than this kernel holds in shared memory");
  if (own.workspace) {
    if (!workspace || reinterpret_cast<uintptr_t>(workspace) % 256) return invalid("this kernel needs a workspace, aligned to 256 bytes");
    arrivals = static_cast<unsigned*>(workspace);
    partials = reinterpret_cast<float*>(static_cast<char*>(workspace) + own.counter_bytes(m, n));
    cudaError_t const error = own.runtime.memset_async(arrivals, 0, tiles_m * tiles_n * 4, static_cast<cudaStream_t>(stream));
    if (error) return refuse(error, own.runtime.error_string(error));
  }
  int64_t x = tiles_n, y = tiles_m * own.split_k, z = 1;
  if (own.kind != Kind::kTiles) {
    int64_t const clusters = own.clusters(m, n);
    x = (own.persistent && clusters > own.resident ? own.resident : clusters) * own.cluster;
    y = 1;
  } else if (own.zsplit) {
    z = ceil_div(tiles_n * own.bn, own.swizzle_stride);
    x = ceil_div(tiles_n, z);
  } else if (own.persistent) {
    x = tiles_n * y < own.resident ? tiles_n * y : own.resident;
    y = 1;
  }
  if (tiles_m * tiles_n * own.split_k > (1 << 30)) return invalid("the problem has more CTA tiles than are counted");
  if (y > 65535 || z > 65535) return invalid("the problem needs more rows or slices of CTAs than a grid has");

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(x), unsigned(y), unsigned(z));
  config.blockDim = dim3(unsigned(own.threads), 1, 1);
  config.dynamicSmemBytes = own.smem_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (own.cluster > 1) attributes[config.numAttrs++] = cluster_of(own.cluster);
  if (own.pdl) {
    attributes[config.numAttrs] = {};
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  void* matrices[] = {&a, &lda, &b, &ldb, &d, &ldd, &m, &n, &k, &partials, &arrivals};
  CUtensorMap map_a = {}, map_b = {}, map_d = {};
  int along_n = own.along_n, band = own.band;
  uint64_t policy_a = own.policy_a, policy_b = own.policy_b;
  void* maps[] = {&map_a,   &map_b, &map_d,    &d,        &ldd,      &m,       &n, &k,
                  &along_n, &band,  &policy_a, &policy_b, &partials, &arrivals};
  if (own.kind == Kind::kTma && !(own.maps.find(a, k, m, lda, own.box_a, map_a) &&
                                  own.maps.find(b, own.nn ? n : k, own.nn ? k : n, ldb, own.box_b, map_b) &&
                                  (!own.box_d.cols || own.maps.find(d, n, m, ldd, own.box_d, map_d))))
    return invalid("the driver does not encode a tensor map of these operands");
  void** const arguments = own.kind == Kind::kTma ? maps : matrices;
  cudaError_t const error = own.runtime.launch(&config, reinterpret_cast<void const*>(own.kernel), arguments);
  if (error) return refuse(error, own.runtime.error_string(error));
  return cudaSuccess;
}

}  // extern "C"
