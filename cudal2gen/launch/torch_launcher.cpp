// Defines operators of torch that make planned calls without Python. Python decides what a call does, and stores the plan
// here (operators/call_native.py). An operator looks up the plan by the shapes, strides and types of the call's tensors.
// Then it allocates D unless that is an argument, and launches a kernel; or it calls an operator of torch that the plan
// names. Without a plan it returns an undefined tensor, or false if D is an argument, and then Python makes the call.
//
// One binary serves every torch from 2.10 on, with any CUDA: it calls only C functions of torch's stable ABI, which are
// found by name when the library is connected. Nothing is linked, and no header of torch is needed to compile it.
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "sized.h"

// Declared as in torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h; a test compares them.
struct AtenTensorOpaque;
struct CUDAGuardOpaque;
class TorchLibraryOpaque;

namespace cudal2gen_torch {

using Tensor = AtenTensorOpaque*;
using Cell = uint64_t;  // one argument or result on an operator's stack: a number, or a tensor that the callee owns
// The implementation of an operator: its stack, the number of arguments, the number of results.
using OperatorKernel = void (*)(Cell*, uint64_t, uint64_t);

// torch 2.10 as the stable ABI packs a version: the major number in the highest byte, the minor one in the next.
constexpr uint64_t kTorchVersion = uint64_t(2) << 56 | uint64_t(10) << 48;

// torch's functions. Each member has the name of the function that it points to.
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
  int32_t (*aoti_torch_cpu_add_Tensor)(Tensor, Tensor, double, Tensor*);
  int32_t (*torch_call_dispatcher)(char const*, char const*, Cell*, uint64_t);
  int32_t (*aoti_torch_library_init_impl)(char const*, char const*, char const*, uint32_t, TorchLibraryOpaque**);
  int32_t (*torch_library_impl)(TorchLibraryOpaque*, char const*, OperatorKernel, uint64_t);
};

// Functions that only a torch with CUDA has.
struct TorchCuda {
  int32_t (*aoti_torch_get_current_cuda_stream)(int32_t, void**);
  int32_t (*aoti_torch_create_cuda_guard)(int32_t, CUDAGuardOpaque**);
  int32_t (*aoti_torch_delete_cuda_guard)(CUDAGuardOpaque*);
  int32_t (*aoti_torch_cuda_add_Tensor)(Tensor, Tensor, double, Tensor*);
};

}  // namespace cudal2gen_torch

using namespace cudal2gen_torch;

extern "C" {

// The third operand of a call: none, D itself, linear's bias that the kernel adds, or linear's bias that torch adds to the kernel's D.
enum cudal2gen_third { kNone, kOut, kBias, kBiasAfter };

// A planned call, filled in by Python (_Plan in call_native.py; change both, and the version below).
//   torch_operator: null if the call launches a kernel. Otherwise the call goes to this operator of torch, with A, B and the third
//   operand; for linear without a bias, the third operand is none.
//   torch_overload: the name of the operator's overload; empty for the first one.
//   launch, launch_fused: the functions cudal2gen_launch_sized and cudal2gen_launch_fused of a launcher. A kernel is launched by
//   launch_fused if the third operand is kBias, else by launch.
//   sized: the kernel and its sizes.
//   scratch: the size of the workspace in elements of A's type. dims, sizes: the shape of D, which is contiguous. spans: bytes that A, B,
//   and D if it is kOut, reach from their addresses.
//   device: the CUDA device on whose current stream to launch; -1 to launch on `stream`.
//   guard: whether another device may be the current one, so that `device` must be made current.
struct cudal2gen_plan {
  int64_t number;
  char const *torch_operator, *torch_overload;
  decltype(&cudal2gen_launch_sized) launch;
  decltype(&cudal2gen_launch_fused) launch_fused;
  cudal2gen_sized sized;
  int64_t scratch;
  int64_t dims;
  int64_t sizes[8];
  int64_t spans[3];
  int32_t third;  // a cudal2gen_third
  int32_t fp32;   // D is in fp32, else of A's type
  int32_t device;
  int32_t guard;
  void* stream;
};

}  // extern "C"

namespace {

constexpr int kMostDims = 8;

Torch torch;
TorchCuda torch_cuda;
int32_t strided;  // torch's number of the layout of ordinary tensors

// ---- keys: what a plan depends on ----

// The first word is the kind of call. For each tensor there is a word with the number of dimensions (8 bits), type (16), device
// type (8), device index (16) and address modulo 16 (from bit 48), then its sizes and strides, alternating. Two calls with equal
// keys may differ only in their data, so one plan serves both.
class Key {
 public:
  explicit Key(int64_t kind) { add(kind); }

  // Adds a tensor and stores its address. Returns false if no plan serves it: it is not strided, has no memory, or more than
  // kMostDims dimensions.
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
  // Mixes a word into the hash: an odd factor spreads its bits upwards, and the shift brings them back down.
  void add(int64_t word) {
    words_[count_++] = word;
    hash_ = (hash_ ^ uint64_t(word)) * 0x9e3779b97f4a7c15;
    hash_ ^= hash_ >> 29;
  }

  int count_ = 0;
  uint64_t hash_ = 0;
  int64_t words_[1 + 3 * (1 + 2 * kMostDims)];
};

// ---- plans ----

struct Plan {
  Plan(Key const& key, cudal2gen_plan const& plan) : key(key), call(plan) {
    if (plan.torch_operator) torch_operator = plan.torch_operator, torch_overload = plan.torch_overload;
    int64_t stride = 1;
    for (int64_t i = call.dims; i--; stride *= call.sizes[i]) strides[i] = stride;
  }

  Key key;
  cudal2gen_plan call;
  std::string torch_operator, torch_overload;  // empty for a launch
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

  // Returns how many calls a plan has made, and drops the plan if asked to. One lock covers both, so every call is counted.
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

// Makes the call's device current during the guard's lifetime. `good`: whether torch did so.
class DeviceGuard {
 public:
  explicit DeviceGuard(cudal2gen_plan const& call) {
    if (call.guard) good = !torch_cuda.aoti_torch_create_cuda_guard(call.device, &guard_);
  }
  DeviceGuard(DeviceGuard const&) = delete;
  ~DeviceGuard() {
    if (guard_) torch_cuda.aoti_torch_delete_cuda_guard(guard_);
  }
  bool good = true;

 private:
  CUDAGuardOpaque* guard_ = nullptr;
};

// The operands of a call: A, B and the third one, or null. Each tensor comes with the address of its first element.
struct Operands {
  Owned a, b, third;
  void *a_address = nullptr, *b_address = nullptr, *third_address = nullptr;

  // Takes them from an operator's stack.
  Operands(Cell* stack, bool with_third)
      : a(as_tensor(stack[0])), b(as_tensor(stack[1])), third(with_third ? as_tensor(stack[2]) : nullptr) {}

  // Adds the operands to the key of a plan. Returns false if no plan serves such operands.
  bool describe(Key& key) {
    return key.add(a.get(), &a_address) && key.add(b.get(), &b_address) &&
           (!third.get() || key.add(third.get(), &third_address));
  }

  // Whether D, the third operand, shares memory with A or B. spans: that of the plan.
  bool overlap(int64_t const* spans) const {
    auto const within = [&](void const* address, int64_t span) {
      int64_t const before = static_cast<char const*>(third_address) - static_cast<char const*>(address);
      return -spans[2] < before && before < span;
    };
    return within(a_address, spans[0]) || within(b_address, spans[1]);
  }
};

// Calls torch's product. Returns null, so that Python makes the call, if it fails or if the D that it allocated is not contiguous.
Tensor call_torch(Plan const& plan, Operands const& operands) {
  Owned left(nullptr), right(nullptr), third(nullptr);
  Tensor const a = operands.a.get(), b = operands.b.get(), c = operands.third.get();
  if (torch.aoti_torch_new_tensor_handle(a, left.place()) || torch.aoti_torch_new_tensor_handle(b, right.place()) ||
      (c && torch.aoti_torch_new_tensor_handle(c, third.place())))
    return nullptr;
  Cell stack[] = {reinterpret_cast<Cell>(left.release()), reinterpret_cast<Cell>(right.release()),
                  reinterpret_cast<Cell>(third.release())};
  // An optional tensor that is present is a pointer to a cell on the heap, which torch deletes.
  if (c && plan.call.third != kOut) stack[2] = reinterpret_cast<Cell>(new Cell(stack[2]));
  if (torch.torch_call_dispatcher(plan.torch_operator.c_str(), plan.torch_overload.c_str(), stack, kTorchVersion))
    return nullptr;
  Owned d(as_tensor(stack[0]));
  if (plan.call.third == kOut) return d.release();  // the caller chose its strides
  bool contiguous;
  return torch.aoti_torch_is_contiguous(d.get(), &contiguous) || !contiguous ? nullptr : d.release();
}

// Launches a kernel and returns D. Returns null if anything is refused: Python then makes the call and reports the reason.
Tensor launch_kernel(Plan const& plan, Operands const& operands) {
  cudal2gen_plan const& call = plan.call;
  DeviceGuard const guard(call);
  Tensor const like = operands.a.get();
  int32_t dtype, device_type, device_index;
  if (!guard.good || torch.aoti_torch_get_dtype(like, &dtype) ||
      torch.aoti_torch_get_device_type(like, &device_type) || torch.aoti_torch_get_device_index(like, &device_index))
    return nullptr;
  Owned d(nullptr), scratch(nullptr);
  void *d_address = operands.third_address, *workspace = nullptr, *stream = call.stream;
  int32_t const d_dtype = call.fp32 ? torch.aoti_torch_dtype_float32() : dtype;
  if (call.third == kOut ? torch.aoti_torch_new_tensor_handle(operands.third.get(), d.place())
                         : torch.aoti_torch_empty_strided(call.dims, call.sizes, plan.strides, d_dtype, device_type,
                                                          device_index, d.place()) ||
                               torch.aoti_torch_get_data_ptr(d.get(), &d_address))
    return nullptr;
  int64_t const one = 1;
  if (call.scratch && (torch.aoti_torch_empty_strided(1, &call.scratch, &one, dtype, device_type, device_index, scratch.place()) ||
                       torch.aoti_torch_get_data_ptr(scratch.get(), &workspace)))
    return nullptr;
  if (call.device >= 0 && torch_cuda.aoti_torch_get_current_cuda_stream(call.device, &stream)) return nullptr;
  void *const a = operands.a_address, *const b = operands.b_address;
  if (call.third == kBias) {
    cudal2gen_sized const& sized = call.sized;
    cudal2gen_fused const fused = {operands.third_address, nullptr, 0, 1, 0, nullptr, 0};
    int const code = call.launch_fused(sized.kernel, a, sized.lda, b, sized.ldb, d_address, sized.ldd, sized.m, sized.n, sized.k, &fused,
                                       workspace, stream);
    return code ? nullptr : d.release();
  }
  if (call.launch(&call.sized, a, b, d_address, workspace, stream)) return nullptr;
  if (call.third != kBiasAfter) return d.release();
  auto const add = call.device >= 0 ? torch_cuda.aoti_torch_cuda_add_Tensor : torch.aoti_torch_cpu_add_Tensor;
  Tensor sum = nullptr;
  return add(d.get(), operands.third.get(), 1, &sum) ? nullptr : sum;
}

// Returns D of a call that has a plan; null if it has none, or if Python has to make the call.
Tensor planned_result(Operands& operands, int64_t kind) {
  Key key(kind);
  if (!operands.describe(key)) return nullptr;
  auto const plan = table().count(key);
  if (!plan) return nullptr;
  bool const overlap = plan->call.third == kOut && operands.overlap(plan->call.spans);
  Tensor const d = overlap                         ? nullptr
                   : plan->torch_operator.empty() ? launch_kernel(*plan, operands)
                                                  : call_torch(*plan, operands);
  if (!d) table().uncount(*plan);
  return d;
}

void return_tensor(Cell* stack, Tensor d) {
  if (!d) torch.aoti_torch_new_uninitialized_tensor(&d);
  stack[0] = reinterpret_cast<Cell>(d);
}

// _planned(Tensor a, Tensor b, int kind) -> Tensor: D, or an undefined tensor if the call has no plan.
void planned(Cell* stack, uint64_t, uint64_t) {
  Operands operands(stack, false);
  return_tensor(stack, planned_result(operands, static_cast<int64_t>(stack[2])));
}

// _planned_biased(Tensor x, Tensor weight, Tensor bias, int kind) -> Tensor: as _planned, for a linear layer with a bias.
void planned_biased(Cell* stack, uint64_t, uint64_t) {
  Operands operands(stack, true);
  return_tensor(stack, planned_result(operands, static_cast<int64_t>(stack[3])));
}

// _planned_into(Tensor a, Tensor b, Tensor(a!) out, int kind) -> bool: writes D into out; false if the call has no plan.
void planned_into(Cell* stack, uint64_t, uint64_t) {
  Operands operands(stack, true);
  Owned const d(planned_result(operands, static_cast<int64_t>(stack[3])));
  stack[0] = d.get() != nullptr;
}

// Replace the operators above where a call never has a plan: with nested tensors, which have no sizes, under autocast, and with
// tensors that are conjugated or negated lazily. They answer that there is no plan. Each takes over the tensors on its stack,
// which Operands releases.
void unplanned(Cell* stack, uint64_t, uint64_t) {
  Operands const operands(stack, false);
  return_tensor(stack, nullptr);
}

void unplanned_biased(Cell* stack, uint64_t, uint64_t) {
  Operands const operands(stack, true);
  return_tensor(stack, nullptr);
}

void unplanned_into(Cell* stack, uint64_t, uint64_t) {
  Operands const operands(stack, true);
  stack[0] = false;
}

void keep_plan(Operands operands, int64_t kind, Cell plan) {
  Key key(kind);
  if (operands.describe(key)) table().put(key, *reinterpret_cast<cudal2gen_plan const*>(plan));
}

// _plan(Tensor a, Tensor b, int kind, int plan) -> (): keeps a plan for calls of this kind with tensors like these. plan is
// the address of a cudal2gen_plan.
void keep(Cell* stack, uint64_t, uint64_t) { keep_plan({stack, false}, static_cast<int64_t>(stack[2]), stack[3]); }

// _plan_third(Tensor a, Tensor b, Tensor third, int kind, int plan) -> (): the same with a third operand.
void keep_third(Cell* stack, uint64_t, uint64_t) { keep_plan({stack, true}, static_cast<int64_t>(stack[3]), stack[4]); }

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
         FIND(torch, aoti_torch_cpu_add_Tensor) && FIND(torch, torch_call_dispatcher) &&
         FIND(torch, aoti_torch_library_init_impl) && FIND(torch, torch_library_impl);
}

bool connect_cuda() {
  void* const library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  return FIND(torch_cuda, aoti_torch_get_current_cuda_stream) && FIND(torch_cuda, aoti_torch_create_cuda_guard) &&
         FIND(torch_cuda, aoti_torch_delete_cuda_guard) && FIND(torch_cuda, aoti_torch_cuda_add_Tensor);
}

}  // namespace

extern "C" {

// The version of cudal2gen_plan and of the operators. Python connects a library of its own version only.
int cudal2gen_torch_version() { return 2; }

char const* cudal2gen_torch_message() { return message.c_str(); }

// Registers the kernels of the operators below, which Python has defined in the namespace `name`. Returns 0, or 1 with a message.
// The dispatch key CompositeExplicitAutograd comes after autograd and serves every device. Nested tensors, autocast, and lazy
// conjugates and negatives have dispatch keys that come before it. For them Python makes the calls, since operands may have to be
// cast, and torch passes such an ``out`` only to an operator that returns it.
int cudal2gen_torch_connect(char const* name) {
  if (!connect_torch()) return 1;
  strided = torch.aoti_torch_layout_strided();
  struct {
    char const* name;
    OperatorKernel kernel, unplanned;  // null: not registered
  } const operators[] = {{"_planned", planned, unplanned},
                         {"_planned_biased", planned_biased, unplanned_biased},
                         {"_planned_into", planned_into, unplanned_into},
                         {"_plan", keep, nullptr},
                         {"_plan_third", keep_third, nullptr}};
  for (auto const& op : operators)
    for (char const* key : {"CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA", "AutocastCPU", "AutocastCUDA",
                            "Conjugate", "Negative"}) {
      OperatorKernel const kernel = std::string_view(key) == "CompositeExplicitAutograd" ? op.kernel : op.unplanned;
      TorchLibraryOpaque* library = nullptr;  // never freed: its end would remove the kernels
      if (kernel && (torch.aoti_torch_library_init_impl(name, key, "torch_launcher.cpp", 0, &library) ||
                     torch.torch_library_impl(library, op.name, kernel, kTorchVersion))) {
        message = "torch refuses the operators";
        return 1;
      }
    }
  return 0;
}

// Whether plans can be kept for CUDA devices.
int cudal2gen_torch_on_cuda() { return connect_cuda(); }

// Returns how many calls the plan of this number made. drop: removes the plan.
int64_t cudal2gen_torch_calls(int64_t number, int drop) { return table().calls(number, drop); }

}  // extern "C"
