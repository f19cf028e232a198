// The generic launcher opens a built kernel and launches it. One binary serves every kernel, every runtime of its CUDA and the
// emulator's runtime: nothing is linked at build time, and the runtime is loaded by name when a kernel is opened.
//
// All functions return a cudaError_t as int; cudal2gen_message() returns the message of this thread's last error. A kernel is
// opened and loaded for the current device. A launch does not wait. It encodes tensor maps for operands that it has not seen
// before, and keeps them.
#include "counters.h"
#include "launch.h"
#include "map_cache.h"
#include "runtime.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <fstream>
#include <memory>
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

// The driver's functions are requested in their form of CUDA 12.0.
constexpr unsigned kDriverForm = 12000;
constexpr int64_t kMostGridYZ = 65535;  // CTAs of a grid along y, and along z

// The functions of the runtime that a kernel needs, found by name.
struct Runtime {
  decltype(&cudaLibraryLoadFromFile) load;
  decltype(&cudaLibraryUnload) unload;
  decltype(&cudaLibraryGetKernel) get_kernel;
  decltype(&cudaKernelSetAttributeForDevice) set_attribute;  // null for a runtime before 12.8, which has set_in_driver
  decltype(&cuKernelSetAttribute) set_in_driver;
  decltype(&cudaGetDevice) get_device;
  decltype(&cudaDeviceGetAttribute) device_attribute;
  cudaError_t (*attributes)(cudaFuncAttributes*, void const*);
  cudaError_t (*occupancy)(int*, void const*, int, size_t);
  decltype(&cudaLaunchKernelExC) launch;
  decltype(&cudaGetErrorString) error_string;
  decltype(&cudaGetLastError) last_error;
  // Used only by kernels with clusters or tensor maps. With a runtime before 12.8, driver_entry also finds the functions that load
  // any kernel.
  decltype(&cudaGetDriverEntryPointByVersion) driver_entry;
  cudaError_t (*max_clusters)(int*, void const*, cudaLaunchConfig_t const*);
  // Used only by kernels with counters, and by those that may overlap with the previous kernel.
  CounterRuntime counters;
  decltype(&cudaStreamIsCapturing) is_capturing;
  decltype(&cudaStreamGetCaptureInfo) capture_info;
  decltype(&cudaGraphNodeGetType) node_type;

  // Raises the limit of a kernel's dynamic shared memory.
  cudaError_t raise_smem(cudaKernel_t kernel, int bytes, int device) const {
    if (set_attribute) return set_attribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes, device);
    auto const attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    return static_cast<cudaError_t>(set_in_driver(attribute, bytes, reinterpret_cast<CUkernel>(kernel), device));
  }

  // The process shares this runtime and its last error. A failure that is reported here is cleared there, because torch's
  // next check of a launch would report it again as its own.
  int refuse(cudaError_t error, std::string const& what = "") const {
    last_error();
    return ::refuse(error, what.empty() ? error_string(error) : what + ": " + error_string(error));
  }
};

// Stores a function of the library. Returns false, with a message, if it is missing.
template <class Function>
bool find(void* library, char const* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) message = std::string(name) + " is missing from the CUDA runtime; CUDA " + std::to_string(CUDAL2GEN_CUDA) + " has it";
  return function;
}

// The same for a function of the driver.
template <class Function>
bool find_in_driver(Runtime const& runtime, char const* name, Function& function) {
  cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
  cudaError_t const error = runtime.driver_entry(name, reinterpret_cast<void**>(&function), kDriverForm, cudaEnableDefault, &status);
  if (error || status != cudaDriverEntryPointSuccess) function = nullptr;
  if (error) runtime.last_error();
  std::string const missing = " is missing from the driver; CUDA " + std::to_string(CUDAL2GEN_CUDA) + " has it";
  if (!function) message = name + (error ? std::string(": ") + runtime.error_string(error) : missing);
  return function;
}

// Finds the functions that load kernels. The runtime has them from CUDA 12.8 on. With an earlier one the driver's functions are used,
// which have the same arguments: a CUlibrary is a cudaLibrary_t, a CUkernel a cudaKernel_t, and error numbers are the same. The driver
// must be initialised first, which the runtime does when a device is queried.
bool connect_loading(void* library, Runtime& runtime) {
  if (dlsym(library, "cudaLibraryLoadFromFile"))
    return find(library, "cudaLibraryLoadFromFile", runtime.load) && find(library, "cudaLibraryUnload", runtime.unload) &&
           find(library, "cudaLibraryGetKernel", runtime.get_kernel) &&
           find(library, "cudaKernelSetAttributeForDevice", runtime.set_attribute);
  int sms = 0;
  if (runtime.device_attribute(&sms, cudaDevAttrMultiProcessorCount, 0)) runtime.last_error();
  return find(library, "cudaGetDriverEntryPointByVersion", runtime.driver_entry) &&
         find_in_driver(runtime, "cuLibraryLoadFromFile", runtime.load) &&
         find_in_driver(runtime, "cuLibraryUnload", runtime.unload) &&
         find_in_driver(runtime, "cuLibraryGetKernel", runtime.get_kernel) &&
         find_in_driver(runtime, "cuKernelSetAttribute", runtime.set_in_driver);
}

bool connect(void* library, Runtime& runtime) {
  return find(library, "cudaGetDevice", runtime.get_device) &&
         find(library, "cudaDeviceGetAttribute", runtime.device_attribute) &&
         find(library, "cudaFuncGetAttributes", runtime.attributes) &&
         find(library, "cudaOccupancyMaxActiveBlocksPerMultiprocessor", runtime.occupancy) &&
         find(library, "cudaLaunchKernelExC", runtime.launch) &&
         find(library, "cudaGetErrorString", runtime.error_string) &&
         find(library, "cudaGetLastError", runtime.last_error) && connect_loading(library, runtime);
}

bool connect_hopper(void* library, Runtime& runtime) {
  return find(library, "cudaGetDriverEntryPointByVersion", runtime.driver_entry) &&
         find(library, "cudaOccupancyMaxActiveClusters", runtime.max_clusters);
}

bool connect_counters(void* library, CounterRuntime& runtime) {
  return find(library, "cudaThreadExchangeStreamCaptureMode", runtime.capture_mode) &&
         find(library, "cudaStreamCreateWithFlags", runtime.stream_create) &&
         find(library, "cudaStreamSynchronize", runtime.stream_synchronize) &&
         find(library, "cudaStreamDestroy", runtime.stream_destroy) && find(library, "cudaStreamGetId", runtime.stream_id) &&
         find(library, "cudaMemsetAsync", runtime.memset_async) && find(library, "cudaMalloc", runtime.malloc) &&
         find(library, "cudaFree", runtime.free);
}

bool connect_capture(void* library, Runtime& runtime) {
  // CUDA 12 has this function of CUDA 13 under the name with a version; there the plain name is an older function.
  char const* const info = dlsym(library, "cudaStreamGetCaptureInfo_v3") ? "cudaStreamGetCaptureInfo_v3" : "cudaStreamGetCaptureInfo";
  return find(library, "cudaStreamIsCapturing", runtime.is_capturing) && find(library, info, runtime.capture_info) &&
         find(library, "cudaGraphNodeGetType", runtime.node_type);
}

}  // namespace

// An opened kernel. Launches may run on any threads: they change only the mutable members, which guard themselves.
struct cudal2gen_kernel {
  Launch launch;
  Options options;
  Runtime runtime = {};
  cudaLibrary_t library = nullptr;
  cudaKernel_t kernel = nullptr;
  int64_t resident = 0;  // for a persistent kernel: how many clusters (or CTAs without clusters) the device holds at once
  mutable MapCache maps;
  mutable CounterBlocks counters;
  mutable std::atomic<bool> cooperation_overlaps = true;  // false once the driver has refused a launch with both attributes

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

// Sets `resident`: how many clusters (or CTAs without clusters) the device holds at once. A cluster must fit into one GPC.
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
  bool const counts = own.launch.needs_workspace();
  if (counts && !connect_counters(library, own.runtime.counters)) return cudaErrorSymbolNotFound;
  if ((counts || own.options.overlaps) && !connect_capture(library, own.runtime)) return cudaErrorSymbolNotFound;
  return cudaSuccess;
}

// Finds the kernel in the loaded library, raises its limits, and queries what launches need to know of device and driver.
int prepare(cudal2gen_kernel& own, std::string const& cubin) {
  Runtime const& cuda = own.runtime;
  Launch const& launch = own.launch;
  cudaError_t error = cuda.get_kernel(&own.kernel, own.library, launch.entry.c_str());
  if (error) return cuda.refuse(error, launch.entry);
  int device = 0;
  error = cuda.get_device(&device);
  if (error) return cuda.refuse(error, "cudaGetDevice");
  error = cuda.raise_smem(own.kernel, launch.smem_bytes, device);
  if (error) return cuda.refuse(error, std::to_string(launch.smem_bytes) + " bytes of shared memory");
  // Libraries load kernels lazily. Asking for its attributes loads this one now instead of in the first launch.
  cudaFuncAttributes loaded;
  error = cuda.attributes(&loaded, own.kernel);
  if (error) return cuda.refuse(error, "loading " + cubin);
  if (launch.convention == Convention::kTma) {
    cudaDriverEntryPointQueryResult status;
    error = cuda.driver_entry("cuTensorMapEncodeTiled", reinterpret_cast<void**>(&own.maps.encode), kDriverForm,
                              cudaEnableDefault, &status);
    if (!error && status != cudaDriverEntryPointSuccess) error = cudaErrorSymbolNotFound;
    if (error) return cuda.refuse(error, "cuTensorMapEncodeTiled of the driver");
  }
  if (launch.persistent) {
    error = count_resident(own, device);
    if (error) return cuda.refuse(error, "occupancy");
    if (!own.resident) return cuda.refuse(cudaErrorLaunchOutOfResources, "no CTA fits on this device");
  }
  if (launch.returns_counters && (error = own.counters.open(cuda.counters))) return cuda.refuse(error, "counters");
  return cudaSuccess;
}

// ---- launching ----

// The state of a stream at a launch: whether it is captured, and if so, the capture and the nodes on which the launch depends.
struct StreamState {
  bool captured = false;
  unsigned long long capture = 0;
  cudaGraphNode_t const* nodes = nullptr;
  size_t count = 0;
};

int find_state(Runtime const& cuda, cudaStream_t stream, StreamState& state) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaError_t error = cuda.is_capturing(stream, &status);
  state.captured = status != cudaStreamCaptureStatusNone;
  if (!error && state.captured)
    error = cuda.capture_info(stream, &status, &state.capture, nullptr, &state.nodes, nullptr, &state.count);
  return error ? cuda.refuse(error) : cudaSuccess;
}

// Where a launch keeps its counters and partial sums. Partial sums are in the workspace. `clears`: the counters are there too, and a
// memset sets them to zero before the launch. That is so if the kernel does not return them to zero, or if block_of has no block for it.
struct Parts {
  unsigned* arrivals = nullptr;
  float* sums = nullptr;
  bool clears = false;
};

// Sets `parts`, and enqueues the memset if the counters are in the workspace.
int place_parts(cudal2gen_kernel const& own, Scratch const& scratch, void* workspace, cudaStream_t stream, StreamState const& state,
                Parts& parts) {
  if (!workspace || reinterpret_cast<uintptr_t>(workspace) % 256)
    return invalid("this kernel needs a workspace, aligned to 256 bytes");
  CounterRuntime const& cuda = own.runtime.counters;
  unsigned long long id = 0;
  if (cudaError_t const error = cuda.stream_id(stream, &id)) return own.runtime.refuse(error);
  parts.sums = reinterpret_cast<float*>(static_cast<char*>(workspace) + scratch.parts_at());
  parts.arrivals = own.counters.block_of(id, state.capture, scratch.tiles);
  if (parts.arrivals) return cudaSuccess;
  parts.clears = true;
  parts.arrivals = static_cast<unsigned*>(workspace);
  cudaError_t const error = cuda.memset_async(workspace, 0, scratch.counter_bytes(), stream);
  return error ? own.runtime.refuse(error) : cudaSuccess;
}

// Sets the grid of a launch of `count` products, or of `groups` groups. Plain kernels have a CTA per tile: x counts columns of tiles, y rows
// of tiles times slices of k, z products. kZsplit cuts the columns into slices of about swizzle_stride elements, which lie along z.
// Persistent kernels and clusters have grids of one dimension, and persistent ones no more CTAs than are resident at a time.
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
  if (y > kMostGridYZ || z > kMostGridYZ) return invalid("the problem needs more rows or slices of CTAs than a grid has, or more products");
  grid = dim3(unsigned(x), unsigned(y), unsigned(z));
  return cudaSuccess;
}

// Sets `allowed` to false if the kernel must not start before the previous work on the stream has ended. In a captured stream only a kernel
// can precede a programmatic launch, so after a copy or a memset, even one by the caller, the launch is an ordinary one.
int forbid_overlap_after_non_kernels(Runtime const& cuda, StreamState const& state, bool& allowed) {
  cudaError_t error = cudaSuccess;
  for (size_t i = 0; !error && i < state.count; ++i) {
    cudaGraphNodeType type = cudaGraphNodeTypeCount;
    error = cuda.node_type(state.nodes[i], &type);
    allowed = allowed && type == cudaGraphNodeTypeKernel;
  }
  return error ? cuda.refuse(error) : cudaSuccess;
}

// Returns a launch attribute of this kind that is switched on.
cudaLaunchAttribute flag(cudaLaunchAttributeID id) {
  cudaLaunchAttribute attribute = {};
  attribute.id = id;
  if (id == cudaLaunchAttributeCooperative) attribute.val.cooperative = 1;
  if (id == cudaLaunchAttributeProgrammaticStreamSerialization) attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// Launches with the attributes of the kernel. `cooperative`: all CTAs must run at the same time. `overlaps`: a programmatic launch, which may start
// before the previous kernel ends. A driver may refuse both in one launch; then the launch is repeated without the overlap.
int launch_as(cudal2gen_kernel const& own, cudaLaunchConfig_t& config, void** arguments, bool cooperative, bool overlaps) {
  cudaLaunchAttribute attributes[3];
  config.attrs = attributes;
  if (own.launch.cluster() > 1) attributes[config.numAttrs++] = cluster_of(own.launch.cluster());
  if (cooperative) attributes[config.numAttrs++] = flag(cudaLaunchAttributeCooperative);
  bool const both = cooperative && overlaps;
  if (overlaps && (!both || own.cooperation_overlaps))
    attributes[config.numAttrs++] = flag(cudaLaunchAttributeProgrammaticStreamSerialization);
  cudaError_t error = own.runtime.launch(&config, own.function(), arguments);
  if (both && own.cooperation_overlaps && (error == cudaErrorNotSupported || error == cudaErrorInvalidValue)) {
    own.runtime.last_error();
    --config.numAttrs;
    error = own.runtime.launch(&config, own.function(), arguments);
    if (!error) own.cooperation_overlaps = false;
  }
  return error ? own.runtime.refuse(error) : cudaSuccess;
}

}  // namespace

extern "C" {

char const* cudal2gen_message() { return message.c_str(); }

// Opens the built kernel in a directory, which has the files kernel.launch and kernel.cubin. options: text such as
// "swizzle_stride=2048", or null. runtime: the file name or path of the CUDA runtime library; null takes the one that find_runtime finds in
// this process or on this machine.
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
    kernel->counters.close(cuda.counters);
    if (cuda.unload(kernel->library)) cuda.last_error();
    return code;
  }
  *out = kernel.release();
  return cudaSuccess;
}

// Unloads a kernel and frees its counters and the handle, even if it returns an error. No launch may still be running.
int cudal2gen_close(cudal2gen_kernel* kernel) {
  message.clear();
  std::unique_ptr<cudal2gen_kernel> const own(kernel);
  cudaError_t const freed = own->counters.close(own->runtime.counters);
  cudaError_t const unloaded = own->runtime.unload(own->library), error = freed ? freed : unloaded;
  return error ? own->runtime.refuse(error) : cudaSuccess;
}

// Returns the workspace that a launch of `count` products of this size needs, in bytes; the workspace pointer must be
// 256-byte aligned. 0: it needs none.
int64_t cudal2gen_batch_workspace_bytes(cudal2gen_kernel const* kernel, int m, int n, int k, int count) {
  Launch const& launch = kernel->launch;
  Scratch const scratch = launch.scratch(m, n, k, count, kernel->resident);
  return scratch.parts_at() + scratch.parts * launch.bm * launch.bn * int64_t(4);
}

// The same for one product.
int64_t cudal2gen_workspace_bytes(cudal2gen_kernel const* kernel, int m, int n, int k) {
  return cudal2gen_batch_workspace_bytes(kernel, m, n, k, 1);
}

// Stores the address of the kernel's counters and returns their size in bytes, 0 if it has none. It serves to check that a launch
// leaves them at zero.
int64_t cudal2gen_counters(cudal2gen_kernel const* kernel, void const** out) {
  *out = kernel->counters.memory();
  return *out ? int64_t(CounterBlocks::kBytes) : 0;
}

namespace {

// The products of a launch: evenly spaced ones, or groups of rows if groups.count > 0.
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

// Enqueues D(m,n) = A(m,k) * B on the given stream, for each product of a batch or of groups, with the kernel's fused operations.
int enqueue(cudal2gen_kernel const* kernel, void const* a, int lda, void const* b, int ldb, void* d, int ldd, int m, int n, int k,
            Several several, cudal2gen_fused const* fused, void* workspace, void* stream) {
  message.clear();
  cudal2gen_kernel const& own = *kernel;
  Launch const& launch = own.launch;
  Matrix const in_a = {a, lda, launch.row_a(m, k)}, in_b = {b, ldb, launch.row_b(n, k)}, out_d = {d, ldd, launch.d_cols(n)};
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
  int const group_count = std::max(groups.count, 1);
  int code = choose_grid(own, m, n, k, batches.count, group_count, config.gridDim);
  if (code) return code;

  StreamState state;
  Scratch const scratch = launch.scratch(m, n, k, batches.count, own.resident);
  bool overlaps = own.options.overlaps;
  if ((scratch.tiles || overlaps) && (code = find_state(own.runtime, config.stream, state))) return code;
  Parts parts;
  if (scratch.tiles && (code = place_parts(own, scratch, workspace, config.stream, state, parts))) return code;
  overlaps = overlaps && !parts.clears;
  if (overlaps && (code = forbid_overlap_after_non_kernels(own.runtime, state, overlaps))) return code;
  CUtensorMap map_a = {}, map_b = {}, map_d = {}, map_rest = {};
  // The arguments that all kernels take, then those for a fusion and for several products. A kernel reads only its own.
  void* trailing[3] = {};
  int count = 0;
  if (launch.box_d_rest.cols) trailing[count++] = &map_rest;
  if (launch.fusion.any) trailing[count++] = &operands;
  if (launch.batch != Batch::kNone) trailing[count++] = groups.count ? static_cast<void*>(&groups) : &batches;
  bool const cooperates = scratch.tiles && launch.waits();
  if (launch.convention != Convention::kTma) {
    void* matrices[] = {&a, &lda, &b, &ldb, &d, &ldd, &m, &n, &k, &parts.sums, &parts.arrivals, trailing[0], trailing[1]};
    return launch_as(own, config, matrices, cooperates, overlaps);
  }
  Options options = own.options;
  Bands bands(launch.cluster_rows(m, group_count), launch.cluster_cols(n), options.along_n, options.band);
  void* maps[] = {&map_a, &map_b, &map_d, &d, &ldd, &m, &n, &k, &bands, &options.policy_a, &options.policy_b,
                  &parts.sums, &parts.arrivals, trailing[0], trailing[1], trailing[2]};
  int const depths = groups.count ? groups.count : batches.count;
  auto const map = [&](Matrix const& matrix, int64_t rows, int64_t stride, Box box, Element const& element, CUtensorMap& to) {
    int const depth = launch.batch == Batch::kNone ? 0 : stride ? depths : 1;
    // A single matrix has no meaningful stride, but the driver requires one.
    return own.maps.find(matrix, rows, depth, depth > 1 ? stride : matrix.ld, box, element, to);
  };
  if (!(map(in_a, launch.rows_a(m, k), batches.a, launch.box_a, launch.element, map_a) &&
        map(in_b, launch.rows_b(n, k), groups.count ? groups.b : batches.b, launch.box_b, launch.element, map_b) &&
        (!launch.box_d.cols || map(out_d, m, batches.d, launch.box_d, launch.output, map_d)) &&
        (!launch.box_d_rest.cols || map(out_d, m, batches.d, launch.box_d_rest, launch.output, map_rest))))
    return invalid("the driver does not encode a tensor map of these operands");
  return launch_as(own, config, maps, cooperates, overlaps);
}

}  // namespace

int cudal2gen_launch_fused(cudal2gen_kernel const* kernel, void const* a, int lda, void const* b, int ldb, void* d, int ldd,
                           int m, int n, int k, cudal2gen_fused const* fused, void* workspace, void* stream) {
  return enqueue(kernel, a, lda, b, ldb, d, ldd, m, n, k, {}, fused, workspace, stream);
}

// Launches several products, evenly spaced. workspace: cudal2gen_batch_workspace_bytes().
int cudal2gen_launch_batched(cudal2gen_kernel const* kernel, void const* a, int lda, void const* b, int ldb, void* d, int ldd,
                             int m, int n, int k, Batches const* batches, cudal2gen_fused const* fused, void* workspace,
                             void* stream) {
  return enqueue(kernel, a, lda, b, ldb, d, ldd, m, n, k, {*batches, {}}, fused, workspace, stream);
}

// Launches groups of rows: A (m,k) and D (m,n) have the rows of all groups, B is that of the first. The kernel reads the ends of
// groups, `groups->ends`, on the device when it runs; the host does not wait. Rows of D after the last group keep their values. If
// ends descend or exceed m, rows of D get undefined values, but nothing outside of D is written.
int cudal2gen_launch_grouped(cudal2gen_kernel const* kernel, void const* a, int lda, void const* b, int ldb, void* d, int ldd,
                             int m, int n, int k, Groups const* groups, cudal2gen_fused const* fused, void* stream) {
  message.clear();
  if (!groups || groups->count < 1) return invalid("a grouped launch has from 1 to 65535 groups");
  return enqueue(kernel, a, lda, b, ldb, d, ldd, m, n, k, {{}, *groups}, fused, nullptr, stream);
}

// Launches a kernel without fused operations.
int cudal2gen_launch(cudal2gen_kernel const* kernel, void const* a, int lda, void const* b, int ldb, void* d, int ldd,
                     int m, int n, int k, void* workspace, void* stream) {
  return enqueue(kernel, a, lda, b, ldb, d, ldd, m, n, k, {}, nullptr, workspace, stream);
}

int cudal2gen_launch_sized(cudal2gen_sized const* sized, void const* a, void const* b, void* d, void* workspace,
                           void* stream) {
  return enqueue(sized->kernel, a, sized->lda, b, sized->ldb, d, sized->ldd, sized->m, sized->n, sized->k,
                 {sized->batches, {}}, nullptr, workspace, stream);
}

}  // extern "C"
