// Opens the CUDA runtime of a process, or says in one sentence why kernels cannot use it. torch_range.py states the versions that
// kernels need, and the compiler's flags pass them on: CUDAL2GEN_CUDA is the major version of CUDA, CUDAL2GEN_DRIVER the branch of the
// driver, such as 580, and CUDAL2GEN_RUNTIMES a list of names of libraries.
#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <string>

namespace cudal2gen {

inline std::string cuda_version(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Returns the first runtime of CUDAL2GEN_RUNTIMES that this process has loaded, else the first one on this machine, else null.
inline void* find_runtime() {
  for (int const flags : {RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL})
    for (char const* name : {CUDAL2GEN_RUNTIMES})
      if (void* const library = dlopen(name, flags)) return library;
  return nullptr;
}

// Opens the runtime library `name`, a file name with or without a path, or that of find_runtime if name is null. Returns null and
// stores the error and its reason if there is no such library, or if it or the driver is too old.
inline void* open_runtime(char const* name, cudaError_t& error, std::string& why) {
  std::string const needed = "kernels need the runtime of CUDA " + std::to_string(CUDAL2GEN_CUDA) + " and driver " +
                             std::to_string(CUDAL2GEN_DRIVER) + " or newer";
  void* const library = name ? dlopen(name, RTLD_NOW | RTLD_LOCAL) : find_runtime();
  if (!library) {
    error = cudaErrorInitializationError;
    why = std::string(dlerror()) + "; " + needed;
    return nullptr;
  }
  auto const version_by = [library](char const* function) {
    auto const query = reinterpret_cast<cudaError_t (*)(int*)>(dlsym(library, function));
    int version = 0;
    return query && !query(&version) ? version : 0;  // 0: unknown, or no driver; the next call of the runtime reports the reason
  };
  int const runtime = version_by("cudaRuntimeGetVersion"), driver = version_by("cudaDriverGetVersion");
  if (runtime && runtime < 1000 * CUDAL2GEN_CUDA) {
    error = cudaErrorSymbolNotFound;
    why = "the CUDA runtime is of version " + cuda_version(runtime) + "; " + needed;
    return nullptr;
  }
  if (driver && driver < 1000 * CUDAL2GEN_CUDA) {
    error = cudaErrorInsufficientDriver;
    why = "the driver supports CUDA up to " + cuda_version(driver) + "; " + needed;
    return nullptr;
  }
  return library;
}

}  // namespace cudal2gen
