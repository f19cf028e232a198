// Autotuning for callers in C: times the kernels of a pack and the vendor's product on the caller's operands and stream. A
// kernel is chosen only if it wins twice: in a heat of all contenders, and then in a duel with the vendor's product (race_rule.h).
#include "handles.h"
#include "pack.h"
#include "race_rule.h"

#include <algorithm>
#include <bitset>
#include <chrono>
#include <cmath>
#include <memory>
#include <new>
#include <utility>

using namespace cudal2gen;

namespace {

constexpr size_t kMostKernels = 8, kMostRounds = 16, kMostPairs = 64, kFewestPairs = 12;
constexpr double kSampleUs = 50;    // length of a sample; events resolve half a microsecond, so the error is about 1 %
constexpr int kVendor = -1;

using Clock = std::chrono::steady_clock;

// A race of the vendor's product and the kernels that compute it, on the caller's operands. A contender is an index of plans_, or kVendor.
// Functions return a code, CUDAL2GEN_OK if all went well.
class Race {
 public:
  Race(cudal2gen_pack& pack, cudal2gen_call const& call, cudal2gen_vendor vendor, void* context, double milliseconds)
      : pack_(pack), host_(pack.host), call_(call), vendor_(vendor), context_(context),
        deadline_(Clock::now() + std::chrono::microseconds(int64_t(milliseconds * 1e3))) {}
  Race(Race const&) = delete;
  ~Race() {
    for (cudaEvent_t event : {start_, stop_})
      if (event) host_.event_destroy(event);
  }

  // Stores the plan of the fastest kernel with its speedup, or returns CUDAL2GEN_VENDOR if no kernel wins.
  int choose(cudal2gen_problem const& problem, cudal2gen_plan& best) {
    if (int const code = prepare()) return code;
    if (int const code = admit(problem)) return code;
    if (plans_.empty()) return refuse(CUDAL2GEN_VENDOR, "no kernel of this pack computes it with these operands and this workspace");
    if (int const code = heat(best)) return code;
    return vendor_ ? duel(best) : int(CUDAL2GEN_OK);
  }

 private:
  // Checks that the stream can be timed, and makes the events.
  int prepare() {
    if (!host_.event_create || !host_.event_destroy || !host_.event_record || !host_.event_synchronize || !host_.event_elapsed ||
        !host_.is_capturing)
      return refuse(cudaErrorSymbolNotFound, "the CUDA runtime lacks events");
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaError_t error = host_.is_capturing(stream(), &status);
    if (!error && status != cudaStreamCaptureStatusNone)
      return refuse(CUDAL2GEN_VENDOR, "the stream is captured, where nothing can be timed");
    if (!error) error = host_.event_create(&start_);
    if (!error) error = host_.event_create(&stop_);
    return error ? host_.failed(error) : CUDAL2GEN_OK;
  }

  // Makes plans of the nearest kernels that accept the operands, and runs each once, since a first launch also loads. Then sets
  // calls_ to the number of calls that fill a sample.
  int admit(cudal2gen_problem const& problem) {
    for (int number : pack_.candidates(problem)) {
      if (plans_.size() == kMostKernels) break;
      cudal2gen_plan const plan = {&pack_, problem, {number, 0}};
      int code = pack_.open(number);
      if (code == CUDAL2GEN_REFUSED) continue;
      if (code) return code;
      if (plan.answer().workspace_bytes > call_.workspace_bytes) continue;
      plans_.push_back(plan);
      code = enqueue(int(plans_.size()) - 1);
      if (code == CUDAL2GEN_INVALID_VALUE || code == cudaErrorMisalignedAddress) plans_.pop_back();
      else if (code) return code;
    }
    double us = 0;
    if (plans_.empty()) return CUDAL2GEN_OK;
    // The first sample only warms up.
    if (int const code = sample(vendor_ ? kVendor : 0, us)) return code;
    if (int const code = sample(vendor_ ? kVendor : 0, us)) return code;
    calls_ = std::max(1, int(kSampleUs / std::max(us, 1.0)));  // a call counts as at least a microsecond
    return CUDAL2GEN_OK;
  }

  // Times all contenders round robin for half of the remaining time. Each round starts with another contender. Stores the plan of the
  // fastest kernel, which becomes plans_[0], and in heat_logs_ how each kernel compares with the vendor.
  int heat(cudal2gen_plan& best) {
    Clock::time_point const half = Clock::now() + (deadline_ - Clock::now()) / 2;
    int const first = vendor_ ? kVendor : 0, count = int(plans_.size()) - first;
    std::vector<std::vector<double>> logs(plans_.size() + 1);  // of the microseconds of each contender; the vendor's are last
    std::vector<double>& vendor = logs.back();
    for (size_t round = 0; round < kMostRounds && (!round || Clock::now() < half); ++round)
      for (int i = 0; i < count; ++i) {
        int const contender = first + int((round + size_t(i)) % size_t(count));
        double us = 0;
        if (int const code = sample(contender, us)) return code;
        (contender == kVendor ? vendor : logs[size_t(contender)]).push_back(std::log(us));
      }
    size_t fastest = 0;
    for (size_t i = 0; i < plans_.size(); ++i) {
      if (median(logs[i]) < median(logs[fastest])) fastest = i;
      std::vector<double> ratios;
      for (size_t round = 0; round < vendor.size(); ++round) ratios.push_back(vendor[round] - logs[i][round]);
      if (vendor_) heat_logs_.push_back(median(ratios));
    }
    std::swap(plans_[0], plans_[fastest]);
    best = plans_[0];
    return CUDAL2GEN_OK;
  }

  // Times the vendor and the fastest kernel in pairs, and stores the plan's speedup if the rule accepts the kernel. The order within the
  // pairs follows the Thue-Morse sequence (the parity of the ones in the pair's number), so that no period of a disturbance favours one.
  int duel(cudal2gen_plan& best) {
    std::vector<double> logs;
    while (logs.size() < kMostPairs && Clock::now() < deadline_) {
      int const first = std::bitset<32>(logs.size()).count() % 2 ? 0 : kVendor;
      double us[2] = {};
      if (int const code = sample(first, us[0])) return code;
      if (int const code = sample(first == kVendor ? 0 : kVendor, us[1])) return code;
      logs.push_back(std::log(first == kVendor ? us[0] / us[1] : us[1] / us[0]));
    }
    if (logs.size() < kFewestPairs) return refuse(CUDAL2GEN_VENDOR, "the time did not suffice for " + std::to_string(kFewestPairs) + " pairs");
    if (!accepts(logs, heat_logs_)) return refuse(CUDAL2GEN_VENDOR, "no kernel was faster than the vendor's product by more than noise and bias explain");
    best.choice.speedup = std::exp(median_lower_bound(logs));
    return CUDAL2GEN_OK;
  }

  cudaStream_t stream() const { return static_cast<cudaStream_t>(call_.stream); }

  // Enqueues one call of a contender on the stream.
  int enqueue(int contender) {
    if (contender == kVendor) {
      int const code = vendor_(context_, call_.stream);
      return code ? refuse(CUDAL2GEN_VENDOR, "the vendor's product failed with code " + std::to_string(code)) : CUDAL2GEN_OK;
    }
    return plans_[size_t(contender)].run(call_.a, call_.lda, call_.b, call_.ldb, call_.d, call_.ldd, call_.operands,
                                         call_.workspace, call_.stream);
  }

  // Stores the microseconds of a contender's call: the mean of calls_ consecutive calls between two events.
  int sample(int contender, double& us) {
    cudaError_t error = host_.event_record(start_, stream());
    for (int i = 0; i < calls_ && !error; ++i)
      if (int const code = enqueue(contender)) return code;
    if (!error) error = host_.event_record(stop_, stream());
    if (!error) error = host_.event_synchronize(stop_);
    float milliseconds = 0;
    if (!error) error = host_.event_elapsed(&milliseconds, start_, stop_);
    us = std::max(double(milliseconds) * 1e3 / calls_, 1e-3);
    return error ? host_.failed(error) : CUDAL2GEN_OK;
  }

  cudal2gen_pack& pack_;
  HostRuntime const& host_;
  cudal2gen_call const& call_;
  cudal2gen_vendor const vendor_;
  void* const context_;
  Clock::time_point const deadline_;
  std::vector<cudal2gen_plan> plans_;
  std::vector<double> heat_logs_;  // for each kernel the log ratio of the vendor's time to its own in the heat; empty without a vendor
  cudaEvent_t start_ = nullptr, stop_ = nullptr;
  int calls_ = 1;  // calls in a sample
};

}  // namespace

extern "C" int cudal2gen_plan_autotune(cudal2gen_pack* handle, cudal2gen_problem const* problem, cudal2gen_call const* call,
                                       cudal2gen_vendor vendor, void* context, double milliseconds,
                                       cudal2gen_answer* answer, cudal2gen_plan** out) {
  refuse(CUDAL2GEN_OK, "");
  if (!out) return invalid("out is null");
  *out = nullptr;
  return guarded([&] {
    Handles::Pack const pack = Handles::of_process().find(handle);
    if (!pack) return int(CUDAL2GEN_INVALID_VALUE);
    if (!problem || !call) return invalid(!problem ? "problem is null" : "call is null");
    if (!(milliseconds > 0 && milliseconds <= 60e3)) return invalid("milliseconds must be from above 0 to 60000");
    auto plan = std::make_shared<cudal2gen_plan>();
    int code = check(*problem);
    if (code) return code;
    bool const nothing = !problem->m || !problem->n || !problem->k || !products_of(*problem);
    code = nothing ? make_plan(*pack, *problem, *plan) : Race(*pack, *call, vendor, context, milliseconds).choose(*problem, *plan);
    if (code) return code;
    if (answer) *answer = plan->answer();
    *out = Handles::of_process().add(std::move(plan), handle);
    return refuse(CUDAL2GEN_OK, "");  // clears the messages of kernels that were not admitted
  });
}
