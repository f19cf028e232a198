// The generic launcher opens a built kernel and launches it. One binary serves every kernel, every runtime of its CUDA and the
// emulator's runtime: nothing is linked at build time, and the runtime is loaded by name when a kernel is opened.
//
// All functions return a cudaError_t as int; cudal2gen_message() returns the message of this thread's last error. A kernel is
// opened and loaded for the current device. A launch does not wait; it encodes the tensor maps of new operands and keeps
// them.
#include "launch.h"
#include "runtime.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>

using namespace cudal2gen;

namespace {

thread_local std::string message;

int refuse(cudaError_t error, std::string const& why) {
  message = why;
  return error;
}

int invalid(std::string const& why) { return refuse(cudaErrorInvalidValue, why); }

// ---- the CUDA runtime ----

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
  decltype(&cudaGetLastError) last_error;
  // Used only by kernels with clusters and tensor maps.
  decltype(&cudaGetDriverEntryPointByVersion) driver_entry;
  cudaError_t (*max_clusters)(int*, void const*, cudaLaunchConfig_t const*);
  // Used only by kernels that overlap with the previous one.
  decltype(&cudaStreamIsCapturing) is_capturing;
  decltype(&cudaStreamGetCaptureInfo) capture_info;
  decltype(&cudaGraphNodeGetType) node_type;

  // The process shares this runtime and its last error. A failure that is reported here is cleared there, because torch's
  // next check of a launch would report it again as its own.
  int refuse(cudaError_t error, std::string const& what = "") const {
    last_error();
    return ::refuse(error, what.empty() ? error_string(error) : what + ": " + error_string(error));
  }
};

template <class Function>
bool find(void* library, char const* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) message = std::string(name) + " is missing from the CUDA runtime; CUDA " + std::to_string(CUDAL2GEN_CUDA) + " has it";
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
         find(library, "cudaGetErrorString", runtime.error_string) && find(library, "cudaGetLastError", runtime.last_error);
}

bool connect_hopper(void* library, Runtime& runtime) {
  return find(library, "cudaGetDriverEntryPointByVersion", runtime.driver_entry) &&
         find(library, "cudaOccupancyMaxActiveClusters", runtime.max_clusters);
}

bool connect_capture(void* library, Runtime& runtime) {
  return find(library, "cudaStreamIsCapturing", runtime.is_capturing) &&
         find(library, "cudaStreamGetCaptureInfo", runtime.capture_info) &&
         find(library, "cudaGraphNodeGetType", runtime.node_type);
}

// ---- tensor maps ----

// A cache of tensor maps by what they describe: address, columns, rows, leading dimension, box, type, and for a batch the number of
// matrices, at least one, and the elements from one to the next. Encoding takes a microsecond, so the map of operands that come
// again is kept. The cache has a fixed size: a caller with ever new operands does not use more memory.
class MapCache {
 public:
  using Key = std::array<uint64_t, 9>;
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;

  // depth: the third extent; 0 for a map of two dimensions.
  bool find(Matrix const& matrix, int64_t rows, int depth, int64_t stride, Box box, Element const& element, CUtensorMap& map) {
    Key const key = {reinterpret_cast<uint64_t>(matrix.address), uint64_t(matrix.cols), uint64_t(rows), uint64_t(matrix.ld),
                     uint64_t(box.cols), uint64_t(box.rows), uint64_t(element.map_type), uint64_t(depth),
                     uint64_t(stride)};
    std::lock_guard<std::mutex> const guard(mutex_);
    auto kept = maps_.find(key);
    if (kept == maps_.end()) {
      cuuint64_t const extents[] = {cuuint64_t(matrix.cols), cuuint64_t(rows), cuuint64_t(depth)};
      cuuint64_t const strides[] = {cuuint64_t(matrix.ld * element.bytes), cuuint64_t(stride * element.bytes)};
      cuuint32_t const sizes[] = {cuuint32_t(box.cols), cuuint32_t(box.rows), 1}, steps[] = {1, 1, 1};
      int const row_bytes = box.cols * element.bytes;
      CUtensorMapSwizzle const swizzle = row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                         : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                           : CU_TENSOR_MAP_SWIZZLE_32B;
      if (encode(&map, element.map_type, depth ? 3 : 2, const_cast<void*>(matrix.address), extents, strides, sizes, steps,
                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
        return false;
      if (maps_.size() >= kMost) maps_.clear();
      kept = maps_.emplace(key, map).first;
    }
    map = kept->second;
    return true;
  }

 private:
  static constexpr size_t kMost = 256;
  std::mutex mutex_;
  std::map<Key, CUtensorMap> maps_;
};

}  // namespace

struct cudal2gen_kernel {
  Launch launch;
  Options options;
  Runtime runtime = {};
  cudaLibrary_t library = nullptr;
  cudaKernel_t kernel = nullptr;
  int64_t resident = 0;  // for a persistent kernel: how many clusters (or CTAs without clusters) the device holds at once
  mutable MapCache maps;

  cudal2gen_kernel(Launch launch, Options options) : launch(std::move(launch)), options(options) {}
  void const* function() const { return reinterpret_cast<void const*>(kernel); }
};

// ---- opening ----

namespace {

cudaLaunchAttribute cluster_of(int ctas) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(ctas);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

// How many clusters (or CTAs without clusters) the device holds at once. A cluster must lie in one group of SMs.
cudaError_t count_resident(cudal2gen_kernel& own, int device) {
  Launch const& launch = own.launch;
  int number = 0;
  if (launch.cluster() > 1) {
    cudaLaunchAttribute attribute = cluster_of(launch.cluster());
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(launch.cluster()), 1, 1);
    config.blockDim = dim3(unsigned(launch.threads), 1, 1);
    config.dynamicSmemBytes = launch.smem_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaError_t const error = own.runtime.max_clusters(&number, own.function(), &config);
    own.resident = number;
    return error;
  }
  int sms = 0;
  cudaError_t error = own.runtime.occupancy(&number, own.function(), launch.threads, launch.smem_bytes);
  if (!error) error = own.runtime.device_attribute(&sms, cudaDevAttrMultiProcessorCount, device);
  own.resident = int64_t(number) * sms;
  return error;
}

int connect_runtime(char const* name, cudal2gen_kernel& own) {
  cudaError_t error = cudaSuccess;
  void* const library = open_runtime(name, error, message);
  if (!library) return error;
  if (!connect(library, own.runtime)) return cudaErrorSymbolNotFound;
  if (own.launch.convention != Convention::kTiles && !connect_hopper(library, own.runtime)) return cudaErrorSymbolNotFound;
  if (own.options.overlaps && !connect_capture(library, own.runtime)) return cudaErrorSymbolNotFound;
  return cudaSuccess;
}

// In a loaded library: finds the kernel, raises its limits, and queries the facts of device and driver that launches need.
int prepare(cudal2gen_kernel& own, std::string const& cubin) {
  Runtime const& cuda = own.runtime;
  Launch const& launch = own.launch;
  cudaError_t error = cuda.get_kernel(&own.kernel, own.library, launch.entry.c_str());
  if (error) return cuda.refuse(error, launch.entry);
  int device = 0;
  error = cuda.get_device(&device);
  if (error) return cuda.refuse(error, "cudaGetDevice");
  error = cuda.set_attribute(own.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.smem_bytes, device);
  if (error) return cuda.refuse(error, std::to_string(launch.smem_bytes) + " bytes of shared memory");
  // Libraries load kernels lazily. Asking for its attributes loads this one now instead of in the first launch.
  cudaFuncAttributes loaded;
  error = cuda.attributes(&loaded, own.kernel);
  if (error) return cuda.refuse(error, "loading " + cubin);
  if (launch.convention == Convention::kTma) {
    cudaDriverEntryPointQueryResult status;
    error = cuda.driver_entry("cuTensorMapEncodeTiled", reinterpret_cast<void**>(&own.maps.encode), 12000,
                              cudaEnableDefault, &status);
    if (!error && status != cudaDriverEntryPointSuccess) error = cudaErrorSymbolNotFound;
    if (error) return cuda.refuse(error, "cuTensorMapEncodeTiled of the driver");
  }
  if (launch.persistent) {
    error = count_resident(own, device);
    if (error) return cuda.refuse(error, "occupancy");
    if (!own.resident) return cuda.refuse(cudaErrorLaunchOutOfResources, "no CTA fits on this device");
  }
  return cudaSuccess;
}

// ---- launching ----

// Clears the arrival counters, which are at the start of the workspace. The partial sums follow them.
int clear_counters(cudal2gen_kernel const& own, Scratch const& scratch, void* workspace, cudaStream_t stream) {
  if (!workspace || reinterpret_cast<uintptr_t>(workspace) % 256)
    return invalid("this kernel needs a workspace, aligned to 256 bytes");
  cudaError_t const error = own.runtime.memset_async(workspace, 0, scratch.counter_bytes(), stream);
  return error ? own.runtime.refuse(error) : cudaSuccess;
}

int choose_grid(cudal2gen_kernel const& own, int m, int n, int k, int count, int groups, dim3& grid) {
  Launch const& launch = own.launch;
  int64_t const tiles_n = ceil_div(n, launch.bn);
  int64_t x = tiles_n, y = launch.row_tiles(m, groups) * launch.split_k, z = count;
  if (launch.convention != Convention::kTiles) {
    int64_t const clusters = launch.clusters(m, n, k, count, groups);
    x = (launch.persistent ? std::min(clusters, own.resident) : clusters) * launch.cluster();
    y = z = 1;
    if (x > INT_MAX)
      return invalid("the problem needs " + std::to_string(x) + " CTAs in clusters of " + std::to_string(launch.cluster()) +
                     ", more than a grid has");
  } else if (launch.raster == Raster::kZsplit) {
    int64_t const slices = ceil_div(tiles_n * launch.bn, own.options.swizzle_stride);
    x = ceil_div(tiles_n, slices);
    z = slices * count;
  } else if (launch.persistent) {
    x = std::min(tiles_n * y * count, own.resident);
    y = z = 1;
  }
  if (y > 65535 || z > 65535) return invalid("the problem needs more rows or slices of CTAs than a grid has, or more products");
  grid = dim3(unsigned(x), unsigned(y), unsigned(z));
  return cudaSuccess;
}

// Whether the kernel may start while the previous work on the stream ends. In a captured stream only a kernel can be the earlier
// side of such an edge, so after a copy or a memset, even one by the caller, the launch is an ordinary one.
int may_overlap(cudal2gen_kernel const& own, cudaStream_t stream, bool& allowed) {
  Runtime const& cuda = own.runtime;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaError_t error = cuda.is_capturing(stream, &status);
  allowed = true;
  if (error || status == cudaStreamCaptureStatusNone) return error ? cuda.refuse(error) : cudaSuccess;
  cudaGraphNode_t const* nodes = nullptr;
  size_t count = 0;
  error = cuda.capture_info(stream, &status, nullptr, nullptr, &nodes, nullptr, &count);
  for (size_t i = 0; !error && i < count; ++i) {
    cudaGraphNodeType type = cudaGraphNodeTypeCount;
    error = cuda.node_type(nodes[i], &type);
    allowed = allowed && type == cudaGraphNodeTypeKernel;
  }
  return error ? cuda.refuse(error) : cudaSuccess;
}

}  // namespace

extern "C" {

char const* cudal2gen_message() { return message.c_str(); }

// directory: that of a built kernel. options: data that is not compiled in, such as "swizzle_stride=2048", or null.
// runtime: the file name or path of the CUDA runtime library; null for CUDAL2GEN_RUNTIME.
int cudal2gen_open(char const* directory, char const* options, char const* runtime, cudal2gen_kernel** out) {
  message.clear();
  *out = nullptr;
  std::string const facts_file = std::string(directory) + "/kernel.launch", cubin = std::string(directory) + "/kernel.cubin";
  std::ifstream file(facts_file);
  if (!file) return refuse(cudaErrorFileNotFound, facts_file + " is missing; build the kernel first");
  Tokens facts(file, "fact");
  Launch const launch(facts);
  if (std::string const fault = facts.fault(); !fault.empty())
    return invalid(facts_file + ": " + fault + "; build the kernel anew with this version");
  std::istringstream text(options ? options : "");
  Tokens option_tokens(text, "option");
  Options const settings(option_tokens, launch);
  if (std::string const fault = option_tokens.fault(); !fault.empty()) return invalid(fault);
  if (launch.raster == Raster::kZsplit && !settings.swizzle_stride)
    return invalid("a zsplit kernel needs the option swizzle_stride=<columns>");

  auto kernel = std::make_unique<cudal2gen_kernel>(launch, settings);
  if (int const code = connect_runtime(runtime, *kernel)) return code;
  Runtime const& cuda = kernel->runtime;
  cudaError_t const error = cuda.load(&kernel->library, cubin.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (error) return cuda.refuse(error, cubin);
  if (int const code = prepare(*kernel, cubin)) {
    if (cuda.unload(kernel->library)) cuda.last_error();
    return code;
  }
  *out = kernel.release();
  return cudaSuccess;
}

int cudal2gen_close(cudal2gen_kernel* kernel) {
  message.clear();
  std::unique_ptr<cudal2gen_kernel> const own(kernel);
  cudaError_t const error = own->runtime.unload(own->library);
  return error ? own->runtime.refuse(error) : cudaSuccess;
}

// The bytes of workspace, aligned to 256, that a launch of `count` products of this size needs; may be 0.
int64_t cudal2gen_batch_workspace_bytes(cudal2gen_kernel const* kernel, int m, int n, int k, int count) {
  Launch const& launch = kernel->launch;
  Scratch const scratch = launch.scratch(m, n, k, count, kernel->resident);
  return scratch.parts_at() + scratch.parts * launch.bm * launch.bn * int64_t(4);
}

int64_t cudal2gen_workspace_bytes(cudal2gen_kernel const* kernel, int m, int n, int k) {
  return cudal2gen_batch_workspace_bytes(kernel, m, n, k, 1);
}

namespace {

// The products of a launch: evenly spaced, or groups of rows. There is at least one.
struct Several {
  Batches batches;
  Groups groups;
};

Refusal refuse_several(Launch const& launch, Several const& several, int m, int n, int64_t ldd) {
  if (several.groups.count) return launch.refuse_groups(several.groups, m, n);
  if (launch.batch == Batch::kGrouped)
    return {cudaErrorInvalidValue, "this kernel is grouped: launch it by cudal2gen_launch_grouped, with the ends of its groups"};
  return launch.refuse_batches(several.batches, m, n, ldd);
}

// Enqueues D(m,n) = A(m,k) * B on the given stream, for each product of a batch or of groups, and fused if the kernel is.
int enqueue(cudal2gen_kernel const* kernel, void const* a, int lda, void const* b, int ldb, void* d, int ldd, int m, int n, int k,
            Several several, cudal2gen_fused const* fused, void* workspace, void* stream) {
  message.clear();
  cudal2gen_kernel const& own = *kernel;
  Launch const& launch = own.launch;
  Matrix const in_a = {a, lda, k}, in_b = {b, ldb, launch.nn ? n : k}, out_d = {d, ldd, launch.d_cols(n)};
  Batches& batches = several.batches;
  Groups& groups = several.groups;
  if (!a || !b || !d) return invalid(std::string(!a ? "A" : !b ? "B" : "D") + " is null");
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(unsigned(launch.threads), 1, 1);
  config.dynamicSmemBytes = launch.smem_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  Refusal refusal = launch.refuse_sizes(m, n, k);
  if (!refusal) refusal = launch.refuse_operands(in_a, in_b, out_d);
  if (!refusal && launch.fusion.any && !fused)
    refusal = {cudaErrorInvalidValue, "this kernel is fused: launch it by cudal2gen_launch_fused, with what it reads"};
  cudal2gen_fused operands = fused ? *fused : cudal2gen_fused{};
  if (!refusal) refusal = launch.refuse_fused(operands.bias, {operands.c, operands.ldc, n}, {operands.aux, operands.ldaux, n});
  if (!refusal) refusal = refuse_several(launch, several, m, n, ldd);
  if (refusal) return refuse(refusal.code, refusal.why);
  int code = choose_grid(own, m, n, k, batches.count, groups.count ? groups.count : 1, config.gridDim);
  if (code) return code;

  float* partials = nullptr;
  unsigned* arrivals = nullptr;
  if (Scratch const scratch = launch.scratch(m, n, k, batches.count, own.resident); scratch.tiles) {
    if ((code = clear_counters(own, scratch, workspace, config.stream))) return code;
    arrivals = static_cast<unsigned*>(workspace);
    partials = reinterpret_cast<float*>(static_cast<char*>(workspace) + scratch.parts_at());
  }
  bool overlaps = own.options.overlaps;
  if (overlaps && (code = may_overlap(own, config.stream, overlaps))) return code;
  cudaLaunchAttribute attributes[3];
  config.attrs = attributes;
  if (launch.cluster() > 1) attributes[config.numAttrs++] = cluster_of(launch.cluster());
  if (partials && launch.waits()) {
    attributes[config.numAttrs] = {};
    attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
    attributes[config.numAttrs++].val.cooperative = 1;
  }
  if (overlaps) {
    attributes[config.numAttrs] = {};
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  CUtensorMap map_a = {}, map_b = {}, map_d = {}, map_rest = {};
  // The arguments that all kernels take, then those for a fusion and for several products. A kernel reads only its own.
  void* more[3] = {};
  int count = 0;
  if (launch.box_rest.cols) more[count++] = &map_rest;
  if (launch.fusion.any) more[count++] = &operands;
  if (launch.batch != Batch::kNone) more[count++] = groups.count ? static_cast<void*>(&groups) : &batches;
  void* matrices[] = {&a, &lda, &b, &ldb, &d, &ldd, &m, &n, &k, &partials, &arrivals, more[0], more[1]};
  Options options = own.options;
  void* maps[] = {&map_a, &map_b, &map_d, &d, &ldd, &m, &n, &k, &options.along_n, &options.band, &options.policy_a,
                  &options.policy_b, &partials, &arrivals, more[0], more[1], more[2]};
  bool const tma = launch.convention == Convention::kTma;
  int const depths = groups.count ? groups.count : batches.count;
  auto const map = [&](Matrix const& matrix, int64_t rows, int64_t stride, Box box, Element const& element, CUtensorMap& to) {
    int const depth = launch.batch == Batch::kNone ? 0 : stride ? depths : 1;
    // A single matrix has no meaningful stride, but the driver requires one.
    return own.maps.find(matrix, rows, depth, depth > 1 ? stride : matrix.ld, box, element, to);
  };
  if (tma && !(map(in_a, m, batches.a, launch.box_a, launch.element, map_a) &&
               map(in_b, launch.nn ? k : n, groups.count ? groups.b : batches.b, launch.box_b, launch.element, map_b) &&
               (!launch.box_d.cols || map(out_d, m, batches.d, launch.box_d, launch.output, map_d)) &&
               (!launch.box_rest.cols || map(out_d, m, batches.d, launch.box_rest, launch.output, map_rest))))
    return invalid("the driver does not encode a tensor map of these operands");
  cudaError_t const error = own.runtime.launch(&config, own.function(), tma ? maps : matrices);
  return error ? own.runtime.refuse(error) : cudaSuccess;
}

}  // namespace

// Enqueues D(m,n) = activation(alpha A(m,k) * B + bias + beta C) on the given stream, with those parts that the kernel has; `fused`
// may be null if it has none. D of a gated kernel has n / 2 columns. Leading dimensions count elements. workspace:
// cudal2gen_workspace_bytes().
int cudal2gen_launch_fused(cudal2gen_kernel const* kernel, void const* a, int lda, void const* b, int ldb, void* d, int ldd,
                           int m, int n, int k, cudal2gen_fused const* fused, void* workspace, void* stream) {
  return enqueue(kernel, a, lda, b, ldb, d, ldd, m, n, k, {}, fused, workspace, stream);
}

// The same for several products, evenly spaced; workspace: cudal2gen_batch_workspace_bytes().
int cudal2gen_launch_batched(cudal2gen_kernel const* kernel, void const* a, int lda, void const* b, int ldb, void* d, int ldd,
                             int m, int n, int k, Batches const* batches, cudal2gen_fused const* fused, void* workspace,
                             void* stream) {
  return enqueue(kernel, a, lda, b, ldb, d, ldd, m, n, k, {*batches, {}}, fused, workspace, stream);
}

// The same for groups of rows: A (m,k) and D (m,n) have the rows of all groups, B is that of the first. The kernel reads the ends of
// groups, `groups->ends`, on the device when it runs; the host does not wait. Rows of D after the last group keep their values. If
// ends descend or exceed m, rows of D get undefined values, but nothing outside of D is written.
int cudal2gen_launch_grouped(cudal2gen_kernel const* kernel, void const* a, int lda, void const* b, int ldb, void* d, int ldd,
                             int m, int n, int k, Groups const* groups, cudal2gen_fused const* fused, void* stream) {
  message.clear();
  if (!groups || groups->count < 1) return invalid("a grouped launch has from 1 to 65535 groups");
  return enqueue(kernel, a, lda, b, ldb, d, ldd, m, n, k, {{}, *groups}, fused, nullptr, stream);
}

// The same for a kernel without fused parts.
int cudal2gen_launch(cudal2gen_kernel const* kernel, void const* a, int lda, void const* b, int ldb, void* d, int ldd,
                     int m, int n, int k, void* workspace, void* stream) {
  return enqueue(kernel, a, lda, b, ldb, d, ldd, m, n, k, {}, nullptr, workspace, stream);
}

// A launch with fixed sizes, for callers to whom each argument of a call costs time; also for a batch, whose workspace is
// cudal2gen_batch_workspace_bytes().
struct cudal2gen_sized {
  cudal2gen_kernel const* kernel;
  int lda, ldb, ldd, m, n, k;
  Batches batches;
};

int cudal2gen_launch_sized(cudal2gen_sized const* sized, void const* a, void const* b, void* d, void* workspace,
                           void* stream) {
  return enqueue(sized->kernel, a, sized->lda, b, sized->ldb, d, sized->ldd, sized->m, sized->n, sized->k,
                 {sized->batches, {}}, nullptr, workspace, stream);
}

}  // extern "C"
