// Makes planned calls without Python: operators of torch that look up a call's plan by its tensors' shapes, strides and
// types, allocate D and launch. Python decides what a call does and stores the plan here (operators/call_native.py). A
// call without a plan returns an undefined tensor, and Python makes the call.
//
// One binary serves every torch from 2.10 on, with any CUDA: it calls only C functions of torch's stable ABI, which are
// found by name when the library is connected. Nothing is linked, and no header of torch is needed to compile it.
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

// Declared as in torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h; a test compares them.
struct AtenTensorOpaque;
struct CUDAGuardOpaque;
class TorchLibraryOpaque;

namespace cudal2gen_torch {

using Tensor = AtenTensorOpaque*;
using Cell = uint64_t;  // one argument or result on an operator's stack: a number, or a tensor that the callee owns
using OperatorKernel = void (*)(Cell*, uint64_t, uint64_t);

constexpr uint64_t kTorchVersion = uint64_t(2) << 56 | uint64_t(10) << 48;

// torch's functions. Each member has the name of its function, by which it is found.
struct Torch {
  int32_t (*aoti_torch_dtype_float32)();
  int32_t (*aoti_torch_layout_strided)();
  int32_t (*aoti_torch_get_layout)(Tensor, int32_t*);
  int32_t (*aoti_torch_get_dim)(Tensor, int64_t*);
  int32_t (*aoti_torch_get_sizes)(Tensor, int64_t**);
  int32_t (*aoti_torch_get_strides)(Tensor, int64_t**);
  int32_t (*aoti_torch_get_dtype)(Tensor, int32_t*);
  int32_t (*aoti_torch_get_device_type)(Tensor, int32_t*);
  int32_t (*aoti_torch_get_device_index)(Tensor, int32_t*);
  int32_t (*aoti_torch_get_data_ptr)(Tensor, void**);
  int32_t (*aoti_torch_is_contiguous)(Tensor, bool*);
  int32_t (*aoti_torch_empty_strided)(int64_t, int64_t const*, int64_t const*, int32_t, int32_t, int32_t, Tensor*);
  int32_t (*aoti_torch_new_uninitialized_tensor)(Tensor*);
  int32_t (*aoti_torch_new_tensor_handle)(Tensor, Tensor*);
  int32_t (*aoti_torch_delete_tensor_object)(Tensor);
  int32_t (*torch_call_dispatcher)(char const*, char const*, Cell*, uint64_t);
  int32_t (*aoti_torch_library_init_impl)(char const*, char const*, char const*, uint32_t, TorchLibraryOpaque**);
  int32_t (*torch_library_impl)(TorchLibraryOpaque*, char const*, OperatorKernel, uint64_t);
};

// Functions that only a torch with CUDA has.
struct TorchCuda {
  int32_t (*aoti_torch_get_current_cuda_stream)(int32_t, void**);
  int32_t (*aoti_torch_create_cuda_guard)(int32_t, CUDAGuardOpaque**);
  int32_t (*aoti_torch_delete_cuda_guard)(CUDAGuardOpaque*);
};

}  // namespace cudal2gen_torch

using namespace cudal2gen_torch;

extern "C" {

// What a planned call does, as Python fills it in (_Plan in call_native.py; change both, and the version below).
//   torch_operator: if not null, this operator of torch is called with A, B and nothing (linear's bias); else
//   launch: cudal2gen_launch_sized of a launcher, with `sized` as its first argument, which is copied here.
//   scratch: elements of A's type. sizes: of D, which is contiguous.
//   device: the CUDA device on whose current stream to launch; -1 to launch on `stream`.
//   guard: whether another device may be the current one, so that `device` must be made current.
struct cudal2gen_plan {
  int64_t number;
  char const* torch_operator;
  int (*launch)(void const*, void const*, void const*, void*, void*, void*);
  void const* sized;
  int64_t sized_bytes;
  int64_t scratch;
  int64_t dims;
  int64_t sizes[8];
  int32_t fp32;  // D is in fp32, else of A's type
  int32_t device;
  int32_t guard;
  void* stream;
};

}  // extern "C"

namespace {

constexpr int kMostDims = 8;

Torch torch;
TorchCuda torch_cuda;
int32_t strided;

// ---- keys: what a plan depends on ----

// The kind of call, and of each tensor one word that packs dimensions (8 bits), type (16), device type (8), device index
// (16) and address modulo 16 (from bit 48), followed by its sizes and strides in turns. Two calls of one key may differ
// only in their data, so one plan serves both.
class Key {
 public:
  explicit Key(int64_t kind) { add(kind); }

  // False for a tensor that no plan serves: of another layout, without memory, or with more dimensions than fit.
  bool add(Tensor tensor, void** address) {
    int32_t layout, dtype, device_type, device_index;
    int64_t dims, *sizes, *strides;
    if (torch.aoti_torch_get_layout(tensor, &layout) || layout != strided) return false;
    if (torch.aoti_torch_get_dim(tensor, &dims) || dims > kMostDims) return false;
    if (torch.aoti_torch_get_dtype(tensor, &dtype) || torch.aoti_torch_get_device_type(tensor, &device_type) ||
        torch.aoti_torch_get_device_index(tensor, &device_index) || torch.aoti_torch_get_sizes(tensor, &sizes) ||
        torch.aoti_torch_get_strides(tensor, &strides) || torch.aoti_torch_get_data_ptr(tensor, address))
      return false;
    add(dims | int64_t(dtype) << 8 | int64_t(device_type) << 24 | int64_t(device_index & 0xffff) << 32 |
        int64_t(reinterpret_cast<uintptr_t>(*address) & 15) << 48);
    for (int64_t i = 0; i < dims; ++i) add(sizes[i]), add(strides[i]);
    return true;
  }

  uint64_t hash() const { return hash_; }
  bool operator==(Key const& other) const {
    return count_ == other.count_ && !std::memcmp(words_, other.words_, count_ * sizeof words_[0]);
  }

 private:
  void add(int64_t word) {
    words_[count_++] = word;
    hash_ = (hash_ ^ uint64_t(word)) * 0x9e3779b97f4a7c15;
    hash_ ^= hash_ >> 29;
  }

  int count_ = 0;
  uint64_t hash_ = 0;
  int64_t words_[1 + 2 * (1 + 2 * kMostDims)];
};

// ---- plans ----

struct Plan {
  Plan(Key const& key, cudal2gen_plan const& plan) : key(key), call(plan), sized(plan.sized_bytes) {
    if (plan.torch_operator) torch_operator = plan.torch_operator;
    if (plan.sized_bytes) std::memcpy(sized.data(), plan.sized, sized.size());
    int64_t stride = 1;
    for (int64_t i = call.dims; i--; stride *= call.sizes[i]) strides[i] = stride;
  }

  Key key;
  cudal2gen_plan call;
  std::string torch_operator;  // empty for a launch
  std::vector<char> sized;  // operator new aligns it for any type
  int64_t strides[kMostDims] = {};
  int64_t calls = 0;  // guarded by the table's mutex
};

// All plans. One mutex guards the maps and the counts; launches run outside of it, and hold their plan by shared_ptr, so
// that Python may drop a plan while a call uses it. If two keys have one hash, the second plan is not kept, and Python
// makes its calls.
class PlanTable {
 public:
  void put(Key const& key, cudal2gen_plan const& plan) {
    auto fresh = std::make_shared<Plan>(key, plan);
    std::lock_guard<std::mutex> const guard(mutex_);
    if (plans_.count(key.hash())) return;
    hashes_[plan.number] = key.hash();
    plans_[key.hash()] = std::move(fresh);
  }

  // The plan of a key, whose count includes this call; null if there is none.
  std::shared_ptr<Plan> count(Key const& key) {
    std::lock_guard<std::mutex> const guard(mutex_);
    auto const place = plans_.find(key.hash());
    if (place == plans_.end() || !(place->second->key == key)) return nullptr;
    ++place->second->calls;
    return place->second;
  }

  // Takes back the count of a call that Python will make and count after all.
  void uncount(Plan& plan) {
    std::lock_guard<std::mutex> const guard(mutex_);
    --plan.calls;
  }

  // Counts and drops at once, so that no call is made in between and lost to the count.
  int64_t calls(int64_t number, bool drop) {
    std::lock_guard<std::mutex> const guard(mutex_);
    auto const hash = hashes_.find(number);
    if (hash == hashes_.end()) return 0;
    auto const place = plans_.find(hash->second);
    int64_t const calls = place->second->calls;
    if (drop) plans_.erase(place), hashes_.erase(hash);
    return calls;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Plan>> plans_;  // by hash of the key
  std::unordered_map<int64_t, uint64_t> hashes_;               // by number of the plan
};

PlanTable& table() {
  static auto* const plans = new PlanTable;  // never destroyed: threads may call while the process ends
  return *plans;
}

// ---- calls ----

// Owns a tensor of an operator's stack and frees it.
class Owned {
 public:
  explicit Owned(Tensor tensor) : tensor_(tensor) {}
  Owned(Owned const&) = delete;
  ~Owned() {
    if (tensor_) torch.aoti_torch_delete_tensor_object(tensor_);
  }
  Tensor get() const { return tensor_; }
  Tensor* place() { return &tensor_; }
  Tensor release() {
    Tensor const tensor = tensor_;
    tensor_ = nullptr;
    return tensor;
  }

 private:
  Tensor tensor_;
};

Tensor as_tensor(Cell cell) { return reinterpret_cast<Tensor>(cell); }

// Makes the call's device current while it exists.
class OnDevice {
 public:
  explicit OnDevice(cudal2gen_plan const& call) {
    if (call.guard) good = !torch_cuda.aoti_torch_create_cuda_guard(call.device, &guard_);
  }
  OnDevice(OnDevice const&) = delete;
  ~OnDevice() {
    if (guard_) torch_cuda.aoti_torch_delete_cuda_guard(guard_);
  }
  bool good = true;

 private:
  CUDAGuardOpaque* guard_ = nullptr;
};

// torch's product; null if it fails or is not contiguous, and then Python makes the call.
Tensor by_torch(Plan const& plan, Tensor a, Tensor b) {
  Owned left(nullptr), right(nullptr);
  if (torch.aoti_torch_new_tensor_handle(a, left.place()) || torch.aoti_torch_new_tensor_handle(b, right.place()))
    return nullptr;
  Cell stack[] = {reinterpret_cast<Cell>(left.release()), reinterpret_cast<Cell>(right.release()), 0};
  if (torch.torch_call_dispatcher(plan.torch_operator.c_str(), "", stack, kTorchVersion)) return nullptr;
  Owned d(as_tensor(stack[0]));
  bool contiguous;
  return torch.aoti_torch_is_contiguous(d.get(), &contiguous) || !contiguous ? nullptr : d.release();
}

// D of a launch; null if anything is refused: Python then makes the call, and reports the reason.
Tensor launched(Plan const& plan, Tensor like, void const* a, void const* b) {
  cudal2gen_plan const& call = plan.call;
  OnDevice const on_device(call);
  int32_t dtype, device_type, device_index;
  if (!on_device.good || torch.aoti_torch_get_dtype(like, &dtype) ||
      torch.aoti_torch_get_device_type(like, &device_type) || torch.aoti_torch_get_device_index(like, &device_index))
    return nullptr;
  Owned d(nullptr), scratch(nullptr);
  void *d_address, *workspace = nullptr, *stream = call.stream;
  int32_t const d_dtype = call.fp32 ? torch.aoti_torch_dtype_float32() : dtype;
  if (torch.aoti_torch_empty_strided(call.dims, call.sizes, plan.strides, d_dtype, device_type, device_index, d.place()) ||
      torch.aoti_torch_get_data_ptr(d.get(), &d_address))
    return nullptr;
  int64_t const one = 1;
  if (call.scratch && (torch.aoti_torch_empty_strided(1, &call.scratch, &one, dtype, device_type, device_index, scratch.place()) ||
                       torch.aoti_torch_get_data_ptr(scratch.get(), &workspace)))
    return nullptr;
  if (call.device >= 0 && torch_cuda.aoti_torch_get_current_cuda_stream(call.device, &stream)) return nullptr;
  return call.launch(plan.sized.data(), a, b, d_address, workspace, stream) ? nullptr : d.release();
}

Tensor planned_result(Cell* stack, bool typed) {
  Owned const a(as_tensor(stack[0])), b(as_tensor(stack[1]));
  Key key(static_cast<int64_t>(stack[2]));
  void *a_address, *b_address;
  if (!key.add(a.get(), &a_address) || !key.add(b.get(), &b_address)) return nullptr;
  auto const plan = table().count(key);
  if (!plan) return nullptr;
  Tensor const d = plan->torch_operator.empty() ? launched(*plan, a.get(), a_address, b_address)
                   : typed                      ? nullptr
                                                : by_torch(*plan, a.get(), b.get());
  if (!d) table().uncount(*plan);
  return d;
}

void return_tensor(Cell* stack, Tensor d) {
  if (!d) torch.aoti_torch_new_uninitialized_tensor(&d);
  stack[0] = reinterpret_cast<Cell>(d);
}

// _planned(Tensor a, Tensor b, int kind) -> Tensor: D, or an undefined tensor if the call has no plan.
void planned(Cell* stack, uint64_t, uint64_t) { return_tensor(stack, planned_result(stack, false)); }

// The same under autocast, which would change the type of torch's product: only launches are made.
void planned_typed(Cell* stack, uint64_t, uint64_t) { return_tensor(stack, planned_result(stack, true)); }

// The same for nested tensors, which have no sizes: there is never a plan.
void unplanned(Cell* stack, uint64_t, uint64_t) {
  Owned const a(as_tensor(stack[0])), b(as_tensor(stack[1]));
  return_tensor(stack, nullptr);
}

// _plan(Tensor a, Tensor b, int kind, int plan) -> (): keeps a plan for calls of this kind with tensors like these. plan is
// the address of a cudal2gen_plan.
void keep(Cell* stack, uint64_t, uint64_t) {
  Owned const a(as_tensor(stack[0])), b(as_tensor(stack[1]));
  Key key(static_cast<int64_t>(stack[2]));
  void* address;
  if (key.add(a.get(), &address) && key.add(b.get(), &address))
    table().put(key, *reinterpret_cast<cudal2gen_plan const*>(stack[3]));
}

// ---- connection ----

thread_local std::string message;

template <class Function>
bool find(void* library, char const* name, Function& function) {
  function = reinterpret_cast<Function>(library ? dlsym(library, name) : nullptr);
  if (!function) message = std::string("torch lacks ") + name + ", which torch 2.10 has";
  return function;
}

#define FIND(functions, name) find(library, #name, functions.name)

bool connect_torch() {
  void* const library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
  return FIND(torch, aoti_torch_dtype_float32) && FIND(torch, aoti_torch_layout_strided) &&
         FIND(torch, aoti_torch_get_layout) && FIND(torch, aoti_torch_get_dim) && FIND(torch, aoti_torch_get_sizes) &&
         FIND(torch, aoti_torch_get_strides) && FIND(torch, aoti_torch_get_dtype) &&
         FIND(torch, aoti_torch_get_device_type) && FIND(torch, aoti_torch_get_device_index) &&
         FIND(torch, aoti_torch_get_data_ptr) && FIND(torch, aoti_torch_empty_strided) &&
         FIND(torch, aoti_torch_is_contiguous) && FIND(torch, aoti_torch_new_tensor_handle) &&
         FIND(torch, aoti_torch_new_uninitialized_tensor) && FIND(torch, aoti_torch_delete_tensor_object) &&
         FIND(torch, torch_call_dispatcher) &&
         FIND(torch, aoti_torch_library_init_impl) && FIND(torch, torch_library_impl);
}

bool connect_cuda() {
  void* const library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  return FIND(torch_cuda, aoti_torch_get_current_cuda_stream) && FIND(torch_cuda, aoti_torch_create_cuda_guard) &&
         FIND(torch_cuda, aoti_torch_delete_cuda_guard);
}

}  // namespace

extern "C" {

// The version of cudal2gen_plan and of the operators. Python connects a library of its own version only.
int cudal2gen_torch_version() { return 1; }

char const* cudal2gen_torch_message() { return message.c_str(); }

// Gives the operators _planned and _plan, which Python has defined in a namespace, their kernels. Returns 0, or 1 with a
// message. CompositeExplicitAutograd is below autograd and serves every device; nested tensors and autocast have keys of
// their own, which come before it.
int cudal2gen_torch_connect(char const* name) {
  if (!connect_torch()) return 1;
  strided = torch.aoti_torch_layout_strided();
  struct {
    char const *key, *name;
    OperatorKernel kernel;
  } const kernels[] = {{"CompositeExplicitAutograd", "_planned", planned},
                       {"NestedTensorCPU", "_planned", unplanned},
                       {"NestedTensorCUDA", "_planned", unplanned},
                       {"AutocastCPU", "_planned", planned_typed},
                       {"AutocastCUDA", "_planned", planned_typed},
                       {"CompositeExplicitAutograd", "_plan", keep}};
  for (auto const& kernel : kernels) {
    TorchLibraryOpaque* library = nullptr;  // never freed: its end would remove the kernels
    if (torch.aoti_torch_library_init_impl(name, kernel.key, "torch_launcher.cpp", 0, &library) ||
        torch.torch_library_impl(library, kernel.name, kernel.kernel, kTorchVersion)) {
      message = "torch refuses the operators";
      return 1;
    }
  }
  return 0;
}

// Whether plans can be kept for CUDA devices.
int cudal2gen_torch_on_cuda() { return connect_cuda(); }

// How many calls the plan of this number made; drop: it makes no more.
int64_t cudal2gen_torch_calls(int64_t number, int drop) { return table().calls(number, drop); }

}  // extern "C"
