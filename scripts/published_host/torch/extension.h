// What the host code of published CUDA-L2 kernels uses of PyTorch: a tensor's sizes, type and address, checks that
// throw, the current stream. A tensor here is a view of memory that somebody else owns.
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

extern "C" cudaStream_t published_stream();  // the stream of the call in progress; in calls.cpp

namespace c10 {

struct Half {
  unsigned short bits;
};

enum class ScalarType { Half, Float };
constexpr ScalarType kHalf = ScalarType::Half, kFloat16 = ScalarType::Half;
constexpr ScalarType kFloat = ScalarType::Float, kFloat32 = ScalarType::Float;

enum class DeviceType { CPU, CUDA };
constexpr DeviceType kCPU = DeviceType::CPU, kCUDA = DeviceType::CUDA;

struct Device {
  DeviceType type() const { return DeviceType::CUDA; }
  bool is_cuda() const { return true; }
  int index() const { return 0; }
};
inline bool operator==(Device, Device) { return true; }
inline bool operator!=(Device, Device) { return false; }

struct TensorOptions {
  ScalarType dtype() const { return kHalf; }
};

inline std::ostream& operator<<(std::ostream& out, ScalarType type) {
  return out << (type == kHalf ? "Half" : "Float");
}
inline std::ostream& operator<<(std::ostream& out, TensorOptions const& options) { return out << options.dtype(); }
inline std::ostream& operator<<(std::ostream& out, Device) { return out << "cuda"; }

template <class... Parts>
std::string text(Parts const&... parts) {
  std::ostringstream out;
  (void)std::initializer_list<int>{((void)(out << parts), 0)...};
  return out.str();
}

namespace cuda {

struct CUDAStream {
  cudaStream_t stream() const { return published_stream(); }
  operator cudaStream_t() const { return published_stream(); }
};
inline CUDAStream getCurrentCUDAStream(int = -1) { return {}; }

}  // namespace cuda
}  // namespace c10

namespace at {
using namespace c10;
namespace cuda = c10::cuda;
}  // namespace at

namespace torch {
using namespace c10;
namespace cuda = c10::cuda;
constexpr ScalarType Half = kHalf;
using IntArrayRef = std::vector<int64_t>;

// A contiguous matrix of fp16 in device memory.
class Tensor {
 public:
  Tensor(void* data, int64_t rows, int64_t columns) : data_(data), sizes_{rows, columns} {}
  int64_t size(int64_t dimension) const { return sizes_[dimension < 0 ? dimension + 2 : dimension]; }
  int64_t stride(int64_t dimension) const { return dimension == 0 || dimension == -2 ? sizes_[1] : 1; }
  int64_t dim() const { return 2; }
  int64_t numel() const { return sizes_[0] * sizes_[1]; }
  int64_t element_size() const { return 2; }
  IntArrayRef sizes() const { return sizes_; }
  bool is_cuda() const { return true; }
  bool is_contiguous() const { return true; }
  bool defined() const { return true; }
  Device device() const { return {}; }
  ScalarType dtype() const { return kHalf; }
  ScalarType scalar_type() const { return kHalf; }
  TensorOptions options() const { return {}; }
  Tensor contiguous() const { return *this; }
  void* data_ptr() const { return data_; }
  void* mutable_data_ptr() const { return data_; }
  const void* const_data_ptr() const { return data_; }
  template <class T>
  T* data_ptr() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_;
  IntArrayRef sizes_;
};

}  // namespace torch

namespace at {
using Tensor = torch::Tensor;
}

#define TORCH_CHECK(condition, ...)                                                    \
  do {                                                                                 \
    if (!(condition)) throw std::runtime_error(c10::text("check failed", ##__VA_ARGS__)); \
  } while (false)
#define TORCH_INTERNAL_ASSERT(condition, ...) TORCH_CHECK(condition, ##__VA_ARGS__)
