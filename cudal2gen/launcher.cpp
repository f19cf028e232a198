// The generic launcher: opens a built kernel and launches it. One binary for every kernel, every CUDA 13 runtime and
// the emulator's stand-in: the runtime is found by name when a kernel is opened, nothing is linked at build time.
//
// All functions return a cudaError_t as int; cudal2gen_message() tells in words what the last one of this thread
// refused. A kernel is opened, and loaded, for the current device. launch() allocates, waits for and queries nothing.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>

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

}  // namespace

struct cudal2gen_kernel {
  Runtime runtime;
  cudaLibrary_t library;
  cudaKernel_t kernel;
  bool predicated, nn, zsplit, persistent;
  int threads, smem_bytes, bm, bn, bk, split_k, baked_n, baked_k;
  int64_t swizzle_stride, resident;  // resident: CTAs that the device holds at once

  int64_t tiles(int m, int n) const { return ceil_div(m, bm) * ceil_div(n, bn); }
  // The arrival counters come first, padded to a multiple of 256 bytes.
  int64_t counter_bytes(int m, int n) const { return ceil_div(tiles(m, n) * 4, 256) * 256; }
};

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
  for (auto const& [name, value] : chosen)
    if (name != "swizzle_stride") return refuse(cudaErrorInvalidValue, "unknown option " + name);

  auto kernel = std::make_unique<cudal2gen_kernel>();
  void* const library = dlopen(runtime ? runtime : "libcudart.so.13", RTLD_NOW | RTLD_LOCAL);
  if (!library) return refuse(cudaErrorInitializationError, dlerror());
  if (!connect(library, kernel->runtime)) return cudaErrorSymbolNotFound;

  auto const number = [&](char const* name) { return std::strtoll(facts[name].c_str(), nullptr, 10); };
  kernel->predicated = number("predicated");
  kernel->nn = facts["layout"] == "nn";
  kernel->zsplit = facts["raster"] == "zsplit";
  kernel->persistent = facts["raster"] == "persistent";
  kernel->threads = number("threads");
  kernel->smem_bytes = number("smem_bytes");
  kernel->bm = number("bm");
  kernel->bn = number("bn");
  kernel->bk = number("bk");
  kernel->split_k = number("split_k");
  kernel->baked_n = number("baked_n");
  kernel->baked_k = number("baked_k");
  kernel->swizzle_stride = std::strtoll(chosen["swizzle_stride"].c_str(), nullptr, 10);
  if (facts["launch"] != "tiles" || !kernel->threads || !kernel->bm || !kernel->bn || !kernel->bk || !kernel->split_k)
    return refuse(cudaErrorInvalidValue, folder + "/kernel.launch is not one that this launcher understands");
  if (kernel->zsplit && kernel->swizzle_stride <= 0)
    return refuse(cudaErrorInvalidValue, "a zsplit kernel needs the option swizzle_stride=<columns>");

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
  if (kernel->persistent) {
    int per_sm = 0, sms = 0;
    error = cuda.occupancy(&per_sm, kernel->kernel, kernel->threads, kernel->smem_bytes);
    if (!error) error = cuda.device_attribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (error) return fail(error, "occupancy");
    kernel->resident = int64_t(per_sm) * sms;
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
  if (kernel->split_k == 1) return 0;
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
  if (own.predicated && k % 8) return invalid("k must be a multiple of 8: rows along k are read in 16-byte vectors");
  if (own.baked_k && (k != own.baked_k || lda != k || (!own.nn && ldb != k)))
    return invalid("this kernel has k baked in: it takes that k only, packed");
  if (own.baked_n && (n != own.baked_n || ldd != n || (own.nn && ldb != n)))
    return invalid("this kernel has n baked in: it takes that n only, packed");
  auto const misaligned = [](void const* pointer, int ld) { return reinterpret_cast<uintptr_t>(pointer) % 16 || ld % 8; };
  if (misaligned(a, lda) || misaligned(b, ldb))
    return refuse(cudaErrorMisalignedAddress, "A and B must be aligned to 16 bytes, lda and ldb be multiples of 8");
  if (own.predicated ? reinterpret_cast<uintptr_t>(d) % 2 : misaligned(d, ldd))
    return refuse(cudaErrorMisalignedAddress, "D must be aligned to 16 bytes, ldd be a multiple of 8");

  int64_t const tiles_m = ceil_div(m, own.bm), tiles_n = ceil_div(n, own.bn);
  float* partials = nullptr;
  unsigned* arrivals = nullptr;
  if (own.split_k > 1) {
    if (ceil_div(k, own.bk) < own.split_k) return invalid("k has fewer steps than this kernel has slices");
    if (!workspace || reinterpret_cast<uintptr_t>(workspace) % 256) return invalid("this kernel needs a workspace, aligned to 256 bytes");
    arrivals = static_cast<unsigned*>(workspace);
    partials = reinterpret_cast<float*>(static_cast<char*>(workspace) + own.counter_bytes(m, n));
    cudaError_t const error = own.runtime.memset_async(arrivals, 0, tiles_m * tiles_n * 4, static_cast<cudaStream_t>(stream));
    if (error) return refuse(error, own.runtime.error_string(error));
  }
  int64_t x = tiles_n, y = tiles_m * own.split_k, z = 1;
  if (own.zsplit) {
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
  void* arguments[] = {&a, &lda, &b, &ldb, &d, &ldd, &m, &n, &k, &partials, &arrivals};
  cudaError_t const error = own.runtime.launch(&config, reinterpret_cast<void const*>(own.kernel), arguments);
  if (error) return refuse(error, own.runtime.error_string(error));
  return cudaSuccess;
}

}  // extern "C"
