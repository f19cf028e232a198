// A substitute for torch's C++ headers: the part of the interface that launchers of inline extensions use. It has tensors
// in memory of the (emulated) CUDA runtime, factories, checks, dispatch by type, and the current stream. No operation here
// computes a result: operators of torch are passed to the real torch, which also records them. They throw NeedsTorch if
// the process has no torch.
#pragma once

#include <kernelproof_build.h>
#include <cuda_runtime.h>

#include <cfloat>
#include <climits>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <iosfwd>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// Torch's headers include nearly all of the C++ library. Here that would be most of the time of a compilation, so
// launcher.py includes only those headers whose names a text uses.

namespace kernelproof_torch {

struct Half : __half {
  using __half::__half;
  __host__ __device__ Half(__half x) : __half(x) {}
};
struct BFloat16 : __nv_bfloat16 {
  using __nv_bfloat16::__nv_bfloat16;
  __host__ __device__ BFloat16(__nv_bfloat16 x) : __nv_bfloat16(x) {}
};

enum class ScalarType : int { Byte, Char, Short, Int, Long, Half, Float, Double, Bool, BFloat16, Undefined };
constexpr ScalarType kByte = ScalarType::Byte, kUInt8 = kByte, kChar = ScalarType::Char, kInt8 = kChar,
                     kShort = ScalarType::Short, kInt16 = kShort, kInt = ScalarType::Int, kInt32 = kInt,
                     kLong = ScalarType::Long, kInt64 = kLong, kHalf = ScalarType::Half, kFloat16 = kHalf,
                     kFloat = ScalarType::Float, kFloat32 = kFloat, kDouble = ScalarType::Double, kFloat64 = kDouble,
                     kBool = ScalarType::Bool, kBFloat16 = ScalarType::BFloat16;
inline int64_t elementSize(ScalarType t) {
  constexpr int bytes[] = {1, 1, 2, 4, 8, 2, 4, 8, 1, 2, 1};
  return bytes[int(t)];
}
inline const char* toString(ScalarType t) {
  constexpr const char* names[] = {"Byte", "Char", "Short", "Int", "Long", "Half", "Float", "Double", "Bool", "BFloat16", "?"};
  return names[int(t)];
}
template <class C, class Traits>
std::basic_ostream<C, Traits>& operator<<(std::basic_ostream<C, Traits>& out, ScalarType t) { return out << toString(t); }

struct Device;
struct IntArrayRef;
std::string spelled(const Device&);
std::string spelled(const IntArrayRef&);
inline std::string spelled(ScalarType t) { return toString(t); }
// The text of a value in a message. Values of other types appear as a question mark; no result depends on a message.
template <class T> std::string spelled(const T& x) {
  if constexpr (std::is_same_v<T, char>) return std::string(1, x);
  else if constexpr (std::is_arithmetic_v<T>) return std::to_string(x);
  else if constexpr (std::is_convertible_v<const T&, std::string>) return x;
  else return "?";
}
template <class... T> [[noreturn]] void fail(const T&... words) {
  throw std::runtime_error((std::string() + ... + spelled(words)));
}
inline void cuda_check(cudaError_t code) {
  if (code != cudaSuccess) fail("CUDA: ", cudaGetErrorString(code));
}

using DeviceIndex = int8_t;
enum class DeviceType { CPU, CUDA };
constexpr DeviceType kCPU = DeviceType::CPU, kCUDA = DeviceType::CUDA;
struct Device {
  DeviceType kind = kCUDA;
  Device(DeviceType kind = kCUDA, int = 0) : kind(kind) {}
  Device(const char* text) : kind(std::strncmp(text, "cuda", 4) ? kCPU : kCUDA) {}
  bool is_cuda() const { return kind == kCUDA; }
  bool is_cpu() const { return kind == kCPU; }
  DeviceType type() const { return kind; }
  DeviceIndex index() const { return 0; }
  bool operator==(const Device& other) const { return kind == other.kind; }
  bool operator!=(const Device& other) const { return kind != other.kind; }
};
inline std::string spelled(const Device& d) { return d.is_cuda() ? "cuda:0" : "cpu"; }
template <class C, class Traits> std::basic_ostream<C, Traits>& operator<<(std::basic_ostream<C, Traits>& out, const Device& d) {
  return out << (d.is_cuda() ? "cuda:0" : "cpu");
}

struct IntArrayRef : std::vector<int64_t> {
  IntArrayRef() = default;
  IntArrayRef(std::vector<int64_t> values) : std::vector<int64_t>(std::move(values)) {}
  IntArrayRef(int64_t value) : std::vector<int64_t>(1, value) {}
  IntArrayRef(std::initializer_list<int64_t> values) : std::vector<int64_t>(values) {}
  std::vector<int64_t> vec() const { return *this; }
};
inline std::string spelled(const IntArrayRef& values) {
  std::string text = "[";
  for (auto value : values) text += (text.size() > 1 ? ", " : "") + std::to_string(value);
  return text + "]";
}

struct TensorOptions {
  ScalarType type = kFloat;
  Device place = kCUDA;
  TensorOptions() = default;
  TensorOptions(ScalarType type) : type(type) {}
  TensorOptions(Device place) : place(place) {}
  TensorOptions(DeviceType place) : place(place) {}
  TensorOptions dtype(ScalarType t) const { TensorOptions out = *this; out.type = t; return out; }
  TensorOptions device(Device d, int = 0) const { TensorOptions out = *this; out.place = d; return out; }
  TensorOptions requires_grad(bool) const { return *this; }
  template <class T> TensorOptions layout(T) const { return *this; }
  template <class T> TensorOptions memory_format(T) const { return *this; }
};
inline TensorOptions dtype(ScalarType t) { return TensorOptions(t); }
inline TensorOptions device(Device d) { return TensorOptions(d); }

template <class T> struct type_of;
#define KERNELPROOF_TYPE(cpp, name) template <> struct type_of<cpp> { static constexpr ScalarType value = ScalarType::name; };
KERNELPROOF_TYPE(uint8_t, Byte) KERNELPROOF_TYPE(int8_t, Char) KERNELPROOF_TYPE(int16_t, Short) KERNELPROOF_TYPE(int, Int)
KERNELPROOF_TYPE(int64_t, Long) KERNELPROOF_TYPE(long long, Long) KERNELPROOF_TYPE(Half, Half) KERNELPROOF_TYPE(__half, Half)
KERNELPROOF_TYPE(float, Float) KERNELPROOF_TYPE(double, Double) KERNELPROOF_TYPE(bool, Bool) KERNELPROOF_TYPE(BFloat16, BFloat16)
KERNELPROOF_TYPE(__nv_bfloat16, BFloat16)
#undef KERNELPROOF_TYPE

// Views of a tensor that are passed to kernels by value: x[i][j] is an element, and sizes and strides are in elements.
template <class T> struct DefaultPtrTraits { typedef T* PtrType; };
template <class T> struct RestrictPtrTraits { typedef T* __restrict__ PtrType; };
template <class T, size_t N, template <class> class P = DefaultPtrTraits, class Index = int64_t> struct TensorAccessor {
  __host__ __device__ TensorAccessor(T* data, const Index* sizes, const Index* strides)
      : data_(data), sizes_(sizes), strides_(strides) {}
  __host__ __device__ auto operator[](Index i) const -> decltype(auto) {
    if constexpr (N == 1) return (data_[i * strides_[0]]);
    else return TensorAccessor<T, N - 1, P, Index>(data_ + i * strides_[0], sizes_ + 1, strides_ + 1);
  }
  __host__ __device__ Index size(Index i) const { return sizes_[i]; }
  __host__ __device__ Index stride(Index i) const { return strides_[i]; }
  __host__ __device__ T* data() const { return data_; }
 private:
  typename P<T>::PtrType data_;
  const Index *sizes_, *strides_;
};
template <class T, size_t N, template <class> class P = DefaultPtrTraits, class Index = int64_t>
struct GenericPackedTensorAccessor {
  GenericPackedTensorAccessor(T* data, const int64_t* sizes, const int64_t* strides) : data_(data) {
    for (size_t i = 0; i < N; i++) sizes_[i] = Index(sizes[i]), strides_[i] = Index(strides[i]);
  }
  __host__ __device__ auto operator[](Index i) const -> decltype(auto) {
    return TensorAccessor<T, N, P, Index>(data_, sizes_, strides_)[i];
  }
  __host__ __device__ Index size(Index i) const { return sizes_[i]; }
  __host__ __device__ Index stride(Index i) const { return strides_[i]; }
  __host__ __device__ T* data() const { return data_; }
 private:
  typename P<T>::PtrType data_;
  Index sizes_[N], strides_[N];
};
template <class T, size_t N, template <class> class P = DefaultPtrTraits>
using PackedTensorAccessor32 = GenericPackedTensorAccessor<T, N, P, int32_t>;
template <class T, size_t N, template <class> class P = DefaultPtrTraits>
using PackedTensorAccessor64 = GenericPackedTensorAccessor<T, N, P, int64_t>;

// An argument or a result, as launcher.py passes it. kind is 0 for a tensor, 1 for an integer, 2 for a number, 3 for None,
// 4 for a list of integers, 5 for a type. A list has its integers in sizes, and their number in dims. Strides count
// elements. The layouts of Value and Results must equal those in launcher.py.
struct Value {
  int kind, dtype, dims;
  int64_t sizes[8], strides[8];
  void* data;
  int64_t integer;
  double number;
};
struct Results {
  int count, form;  // form is 0 for a tensor, 1 for a list, 2 for a tuple
  Value values[16];
  char message[400];
};
// A function that runs an operator by the real torch; null if the process has no torch.
using Operator = int (*)(const char* name, const Value* arguments, int count, Results* results);
inline Operator& torch_operator() {
  static Operator function = nullptr;
  return function;
}
// The code needs a part of torch that is missing here, so it cannot be graded.
struct NeedsTorch : std::runtime_error { using std::runtime_error::runtime_error; };

// The operators of torch that code may call as functions and as methods of a tensor.
#define KERNELPROOF_OPERATORS(X) \
  X(abs) X(add) X(addmm) X(amax) X(amin) X(argmax) X(argmin) X(bmm) X(clamp) X(clone) X(conv1d) X(conv2d) X(conv3d) \
  X(conv_transpose1d) X(conv_transpose2d) X(conv_transpose3d) X(cos) X(cumprod) X(cumsum) X(div) X(exp) X(expand) \
  X(flip) X(gelu) X(index_select) X(layer_norm) X(linear) X(log) X(log_softmax) X(logsumexp) X(matmul) X(maximum) \
  X(mean) X(minimum) X(mm) X(mul) X(mv) X(narrow) X(neg) X(norm) X(permute) X(pow) X(prod) X(relu) X(repeat) X(rsqrt) \
  X(select) X(sigmoid) X(silu) X(sin) X(softmax) X(sqrt) X(square) X(squeeze) X(std) X(sub) X(sum) X(tanh) X(tril) \
  X(triu) X(var)

class Tensor {
 public:
  Tensor() = default;
  // A tensor in memory that the caller owns, or in fresh memory if data is null.
  Tensor(std::vector<int64_t> sizes, ScalarType type, void* data = nullptr) : sizes_(std::move(sizes)), type_(type) {
    strides_.resize(sizes_.size());
    int64_t stride = 1;
    for (int i = int(sizes_.size()) - 1; i >= 0; i--) strides_[i] = stride, stride *= sizes_[i];
    if (data) {
      memory_ = std::shared_ptr<void>(data, [](void*) {});
    } else {
      cuda_check(cudaMalloc(&data, std::max<int64_t>(nbytes(), 1)));
      memory_ = std::shared_ptr<void>(data, [](void* p) { cudaFree(p); });
    }
    data_ = data;
  }
  explicit Tensor(const Value& v)
      : Tensor(std::vector<int64_t>(v.sizes, v.sizes + v.dims), ScalarType(v.dtype), v.data) {
    strides_.assign(v.strides, v.strides + v.dims);
  }
  bool defined() const { return data_ != nullptr; }
  void* data_ptr() const { return data_; }
  template <class T> T* data_ptr() const {
    if (type_of<std::remove_const_t<T>>::value != type_) fail("expected another scalar type than ", type_);
    return static_cast<T*>(data_);
  }
  template <class T> T* data() const { return data_ptr<T>(); }
  template <class T> T* mutable_data_ptr() const { return data_ptr<T>(); }
  void* mutable_data_ptr() const { return data_; }
  template <class T> const T* const_data_ptr() const { return data_ptr<std::remove_const_t<T>>(); }
  const void* const_data_ptr() const { return data_; }
  int64_t dim() const { return int64_t(sizes_.size()); }
  int64_t ndimension() const { return dim(); }
  int64_t size(int64_t i) const { return sizes_.at(i < 0 ? i + dim() : i); }
  int64_t stride(int64_t i) const { return strides_.at(i < 0 ? i + dim() : i); }
  IntArrayRef sizes() const { return sizes_; }
  IntArrayRef strides() const { return strides_; }
  int64_t numel() const {
    int64_t count = 1;
    for (auto size : sizes_) count *= size;
    return count;
  }
  int64_t element_size() const { return elementSize(type_); }
  int64_t itemsize() const { return element_size(); }
  int64_t nbytes() const { return numel() * element_size(); }
  ScalarType dtype() const { return type_; }
  ScalarType scalar_type() const { return type_; }
  ScalarType type() const { return type_; }
  Device device() const { return kCUDA; }
  bool is_cuda() const { return true; }
  bool is_cpu() const { return false; }
  bool requires_grad() const { return false; }
  DeviceIndex get_device() const { return 0; }
  TensorOptions options() const { return TensorOptions(type_); }
  bool is_contiguous() const {
    int64_t stride = 1;
    for (int64_t i = dim() - 1; i >= 0; stride *= sizes_[i--])
      if (sizes_[i] != 1 && strides_[i] != stride) return false;
    return true;
  }
  Tensor contiguous() const { return is_contiguous() ? *this : operate("contiguous", *this); }
  Tensor cuda() const { return *this; }
  Tensor detach() const { return *this; }
  Tensor to(ScalarType t) const {
    return t == type_ ? *this : operate("to", *this, t);
  }
  Tensor to(Device) const { return *this; }
  // A negative size is the one that the others leave. The result shares memory if this tensor is contiguous.
  Tensor view(IntArrayRef sizes) const {
    int64_t known = 1, open = -1;
    for (size_t i = 0; i < sizes.size(); i++) sizes[i] < 0 ? open = int64_t(i) : known *= sizes[i];
    if (open >= 0) sizes[open] = numel() / known;
    Tensor out = contiguous();
    Tensor shaped(sizes, type_, data_);
    if (shaped.numel() != numel()) fail("view: another number of elements");
    out.sizes_ = shaped.sizes_, out.strides_ = shaped.strides_;
    return out;
  }
  Tensor reshape(IntArrayRef sizes) const { return view(std::move(sizes)); }
  Tensor flatten() const { return view({int64_t(-1)}); }
  Tensor unsqueeze(int64_t i) const {
    Tensor out = *this;
    i = i < 0 ? i + dim() + 1 : i;
    out.sizes_.insert(out.sizes_.begin() + i, 1), out.strides_.insert(out.strides_.begin() + i, 1);
    return out;
  }
  Tensor slice(int64_t i, std::optional<int64_t> start = {}, std::optional<int64_t> end = {}, int64_t step = 1) const {
    Tensor out = *this;
    i = i < 0 ? i + dim() : i;
    auto within = [n = size(i)](int64_t at) { return std::min(std::max(at < 0 ? at + n : at, int64_t(0)), n); };
    int64_t first = within(start.value_or(0)), last = std::max(within(end.value_or(size(i))), first);
    out.data_ = static_cast<char*>(data_) + first * stride(i) * element_size();
    out.sizes_.at(i) = (last - first + step - 1) / step, out.strides_.at(i) = stride(i) * step;
    return out;
  }
  Tensor transpose(int64_t i, int64_t j) const {
    Tensor out = *this;
    i = i < 0 ? i + dim() : i, j = j < 0 ? j + dim() : j;
    std::swap(out.sizes_.at(i), out.sizes_.at(j)), std::swap(out.strides_.at(i), out.strides_.at(j));
    return out;
  }
  Tensor t() const { return transpose(0, 1); }
#define KERNELPROOF_METHOD(name) \
  template <class... A> Tensor name(const A&... a) const { return operate(#name, *this, a...); } \
  template <class... A> Tensor name(IntArrayRef first, const A&... a) const { return operate(#name, *this, first, a...); }
  KERNELPROOF_OPERATORS(KERNELPROOF_METHOD)
#undef KERNELPROOF_METHOD
  // An operator of the real torch; its result is fresh memory.
  template <class... A> static Tensor operate(const char* name, const A&... a) {
    if (!torch_operator()) throw NeedsTorch(std::string("an operator of torch: ") + name);
    const Value values[] = {packed(a)...};
    Results results;
    if (torch_operator()(name, values, sizeof...(A), &results)) fail(results.message);
    return Tensor(results.values[0]);
  }
  Value value() const {
    Value v{};
    if (dim() > 8) fail("more than 8 dimensions");
    v.dtype = int(type_), v.dims = int(dim()), v.data = data_;
    for (int i = 0; i < v.dims; i++) v.sizes[i] = sizes_[i], v.strides[i] = strides_[i];
    return v;
  }
  Tensor& zero_() {
    cuda_check(cudaMemset(data_, 0, nbytes()));
    return *this;
  }
  Tensor& fill_(double value) {
    switch (type_) {
      case ScalarType::Half: return filled(Half(__float2half(float(value))));
      case ScalarType::BFloat16: return filled(BFloat16(__float2bfloat16(float(value))));
      case ScalarType::Float: return filled(float(value));
      case ScalarType::Double: return filled(value);
      case ScalarType::Long: return filled(int64_t(value));
      case ScalarType::Int: return filled(int(value));
      case ScalarType::Short: return filled(short(value));
      case ScalarType::Bool: return filled(value != 0);
      default: return filled(int8_t(int(value)));
    }
  }
  template <class T, size_t N> TensorAccessor<T, N> accessor() const { return view_of<TensorAccessor<T, N>, T, N>(); }
  template <class T, size_t N, template <class> class P = DefaultPtrTraits>
  PackedTensorAccessor32<T, N, P> packed_accessor32() const { return view_of<PackedTensorAccessor32<T, N, P>, T, N>(); }
  template <class T, size_t N, template <class> class P = DefaultPtrTraits>
  PackedTensorAccessor64<T, N, P> packed_accessor64() const { return view_of<PackedTensorAccessor64<T, N, P>, T, N>(); }

 private:
  template <class T> Tensor& filled(T value) {
    std::unique_ptr<T[]> values(new T[numel()]);  // no std::vector, whose bool is packed
    for (int64_t i = 0; i < numel(); i++) values[i] = value;
    cuda_check(cudaMemcpy(data_, values.get(), nbytes(), cudaMemcpyHostToDevice));
    return *this;
  }
  static Value packed(const Tensor& x) { return x.value(); }
  static Value packed(const IntArrayRef& values) {
    Value v{4};
    if (values.size() > 8) throw NeedsTorch("a list of more than 8 numbers");
    v.dims = int(values.size());
    for (int i = 0; i < v.dims; i++) v.sizes[i] = values[i];
    return v;
  }
  static Value packed(ScalarType t) { return Value{5, int(t)}; }
  static Value packed(std::nullopt_t) { return Value{3}; }
  template <class T> static std::enable_if_t<std::is_arithmetic_v<T>, Value> packed(T x) {
    Value v{std::is_integral_v<T> ? 1 : 2};
    v.integer = int64_t(x), v.number = double(x);
    return v;
  }
  template <class View, class T, size_t N> View view_of() const {
    if (dim() != int64_t(N)) fail("expected ", N, " dimensions, not ", dim());
    return View(data_ptr<T>(), sizes_.data(), strides_.data());
  }
  std::vector<int64_t> sizes_, strides_;
  ScalarType type_ = ScalarType::Undefined;
  std::shared_ptr<void> memory_;
  void* data_ = nullptr;
};

#define KERNELPROOF_FUNCTION(name) \
  template <class... A> Tensor name(const Tensor& x, const A&... a) { return Tensor::operate(#name, x, a...); } \
  template <class... A> Tensor name(const Tensor& x, IntArrayRef first, const A&... a) { return Tensor::operate(#name, x, first, a...); }
KERNELPROOF_OPERATORS(KERNELPROOF_FUNCTION)
#undef KERNELPROOF_FUNCTION
#define KERNELPROOF_ARITHMETIC(sign, name) \
  inline Tensor operator sign(const Tensor& x, const Tensor& y) { return Tensor::operate(name, x, y); } \
  inline Tensor operator sign(const Tensor& x, double y) { return Tensor::operate(name, x, y); }
KERNELPROOF_ARITHMETIC(+, "add") KERNELPROOF_ARITHMETIC(-, "sub") KERNELPROOF_ARITHMETIC(*, "mul")
KERNELPROOF_ARITHMETIC(/, "div")
#undef KERNELPROOF_ARITHMETIC

inline Tensor empty(IntArrayRef sizes, TensorOptions options = {}) { return Tensor(sizes, options.type); }
inline Tensor zeros(IntArrayRef sizes, TensorOptions options = {}) { return empty(sizes, options).zero_(); }
inline Tensor full(IntArrayRef sizes, double value, TensorOptions options = {}) { return empty(sizes, options).fill_(value); }
inline Tensor ones(IntArrayRef sizes, TensorOptions options = {}) { return full(sizes, 1, options); }
inline Tensor empty_like(const Tensor& x) { return empty(x.sizes(), x.options()); }
inline Tensor empty_like(const Tensor& x, TensorOptions options) { return empty(x.sizes(), options); }
inline Tensor zeros_like(const Tensor& x) { return zeros(x.sizes(), x.options()); }
inline Tensor zeros_like(const Tensor& x, TensorOptions options) { return zeros(x.sizes(), options); }
inline Tensor full_like(const Tensor& x, double value) { return full(x.sizes(), value, x.options()); }
inline Tensor ones_like(const Tensor& x) { return full_like(x, 1); }

struct CUDAStream {
  cudaStream_t stream() const { return nullptr; }
  operator cudaStream_t() const { return nullptr; }
};
inline CUDAStream getCurrentCUDAStream(int = 0) { return {}; }
struct CUDAGuard {
  template <class T> explicit CUDAGuard(const T&) {}
};
using OptionalCUDAGuard = CUDAGuard;
inline Device device_of(const Tensor&) { return kCUDA; }
inline cudaDeviceProp* getCurrentDeviceProperties() {
  static cudaDeviceProp facts;
  cuda_check(cudaGetDeviceProperties(&facts, 0));
  return &facts;
}

// The argument of type T that a Value stands for. Throws NeedsTorch if no argument of this type can be passed.
template <class T> struct converted {
  static T from(const Value& v) {
    if constexpr (!std::is_arithmetic_v<T>) throw NeedsTorch("an argument that is no number, list or tensor");
    else return T(v.kind == 2 ? v.number : v.integer);
  }
};
template <> struct converted<Tensor> {
  static Tensor from(const Value& v) {
    if (v.kind != 0) fail("a tensor is needed");
    return Tensor(v);
  }
};
template <> struct converted<ScalarType> { static ScalarType from(const Value& v) { return ScalarType(v.dtype); } };
template <> struct converted<IntArrayRef> {
  static IntArrayRef from(const Value& v) { return std::vector<int64_t>(v.sizes, v.sizes + v.dims); }
};
template <class T> struct converted<std::vector<T>> {
  static std::vector<T> from(const Value& v) {
    if constexpr (!std::is_arithmetic_v<T>) throw NeedsTorch("a list that is an argument");
    else return std::vector<T>(v.sizes, v.sizes + v.dims);
  }
};
template <> struct converted<std::string> {
  static std::string from(const Value&) { throw NeedsTorch("a text that is an argument"); }
};
template <class T> struct converted<std::optional<T>> {
  static std::optional<T> from(const Value& v) { return v.kind == 3 ? std::nullopt : std::optional<T>(converted<T>::from(v)); }
};

// The tensors that a call returned. They stay allocated until the next call, so that the caller can read them.
inline std::vector<Tensor>& returned() {
  static std::vector<Tensor> tensors;
  return tensors;
}
inline void keep(const Tensor& x) { returned().push_back(x); }
inline void keep(const std::vector<Tensor>& all) { for (auto& x : all) keep(x); }
template <class... T> void keep(const std::tuple<T...>& all) { std::apply([](auto&... x) { (keep(x), ...); }, all); }

// Calls a function with its arguments converted from values, and keeps the tensors that it returns.
template <class R, class... A, size_t... I>
void invoke_with(R (*function)(A...), const Value* values, std::index_sequence<I...>) {
  std::tuple<std::decay_t<A>...> arguments{converted<std::decay_t<A>>::from(values[I])...};
  if constexpr (std::is_void_v<R>) function(std::get<I>(arguments)...);
  else keep(function(std::get<I>(arguments)...));
}
// The `form` of Results by the type that a function returns.
template <class R> constexpr int form_of = std::is_same_v<R, Tensor> || std::is_void_v<R> ? 0 : 2;
template <class T> constexpr int form_of<std::vector<T>> = 1;
// Calls a function of the extension, waits for the device, and stores its results. Returns 0; or 1 if something failed, or 2 if a part of
// torch is needed that is missing here, both with a message.
template <class R, class... A> int invoke(R (*function)(A...), const Value* values, int count, Results* results) {
  try {
    returned().clear();
    if (count != sizeof...(A)) fail("takes ", sizeof...(A), " arguments, not ", count);
    invoke_with(function, values, std::index_sequence_for<A...>{});
    cuda_check(cudaDeviceSynchronize());
    if (returned().size() > 16) fail("more than 16 results");
    results->count = 0, results->form = form_of<std::decay_t<R>>;
    for (auto& x : returned()) {
      results->values[results->count++] = x.value();
    }
    return 0;
  } catch (const NeedsTorch& error) {
    std::strncpy(results->message, error.what(), sizeof results->message - 1);
    return 2;
  } catch (const std::exception& error) {
    std::strncpy(results->message, error.what(), sizeof results->message - 1);
    return 1;
  }
}

struct PythonModule {
  template <class... T> PythonModule& def(T&&...) { return *this; }
  const char*& doc() { static const char* text; return text; }
};
}  // namespace kernelproof_torch

namespace c10 {
using namespace kernelproof_torch;
template <class T> using optional = std::optional<T>;
constexpr std::nullopt_t nullopt = std::nullopt;
template <class T> using ArrayRef = std::vector<T>;
namespace cuda { using namespace kernelproof_torch; }
}  // namespace c10
namespace at {
using namespace kernelproof_torch;
template <class T> using optional = std::optional<T>;
namespace cuda { using namespace kernelproof_torch; }
}  // namespace at
namespace torch {
using namespace kernelproof_torch;
template <class T> using optional = std::optional<T>;
}  // namespace torch
namespace py = kernelproof_torch;
namespace pybind11 { using namespace kernelproof_torch; }

#define TORCH_CHECK(condition, ...) \
  do { \
    if (!(condition)) ::kernelproof_torch::fail("check failed: " #condition " ", ##__VA_ARGS__); \
  } while (0)
#define AT_ASSERTM TORCH_CHECK
#define TORCH_INTERNAL_ASSERT TORCH_CHECK
#define AT_ERROR(...) ::kernelproof_torch::fail(__VA_ARGS__)
#define C10_CUDA_CHECK(call) ::kernelproof_torch::cuda_check(call)
#define AT_CUDA_CHECK C10_CUDA_CHECK
#define C10_CUDA_KERNEL_LAUNCH_CHECK() C10_CUDA_CHECK(cudaGetLastError())
#define PYBIND11_MODULE(name, variable) [[maybe_unused]] static void kernelproof_binds(::kernelproof_torch::PythonModule& variable)

#define KERNELPROOF_CASE(kind, cpp, ...) \
  case ::kernelproof_torch::ScalarType::kind: { \
    using scalar_t = cpp; \
    __VA_ARGS__(); \
    break; \
  }
#define KERNELPROOF_DISPATCH(type, name, cases) \
  switch (type) { \
    cases default : ::kernelproof_torch::fail(name, ": not for ", type); \
  }
#define KERNELPROOF_FLOATING(...) KERNELPROOF_CASE(Float, float, __VA_ARGS__) KERNELPROOF_CASE(Double, double, __VA_ARGS__)
#define KERNELPROOF_HALF(...) KERNELPROOF_CASE(Half, ::kernelproof_torch::Half, __VA_ARGS__)
#define KERNELPROOF_BF16(...) KERNELPROOF_CASE(BFloat16, ::kernelproof_torch::BFloat16, __VA_ARGS__)
#define AT_DISPATCH_FLOATING_TYPES(type, name, ...) \
  [&] { auto kernelproof_type = type; KERNELPROOF_DISPATCH(kernelproof_type, name, KERNELPROOF_FLOATING(__VA_ARGS__)) }()
#define AT_DISPATCH_FLOATING_TYPES_AND_HALF(type, name, ...) \
  [&] { auto kernelproof_type = type; KERNELPROOF_DISPATCH(kernelproof_type, name, KERNELPROOF_FLOATING(__VA_ARGS__) KERNELPROOF_HALF(__VA_ARGS__)) }()
#define AT_DISPATCH_FLOATING_TYPES_AND2(first, second, type, name, ...) \
  [&] { auto kernelproof_type = type; KERNELPROOF_DISPATCH(kernelproof_type, name, KERNELPROOF_FLOATING(__VA_ARGS__) KERNELPROOF_HALF(__VA_ARGS__) KERNELPROOF_BF16(__VA_ARGS__)) }()
