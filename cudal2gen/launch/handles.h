// Holds the packs and plans that callers have open, by handle. A handle is a number that is never given twice, in the form of a pointer. It is
// looked up and never dereferenced, so a call recognises a handle that was destroyed, is of the other kind, or was never given.
#ifndef CUDAL2GEN_HANDLES_H
#define CUDAL2GEN_HANDLES_H

#include "pack.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace cudal2gen {

class Handles {
 public:
  using Pack = std::shared_ptr<cudal2gen_pack>;
  using Plan = std::shared_ptr<cudal2gen_plan const>;

  // The handles of this process. They are never destroyed, since a thread may still call while the process ends.
  static Handles& of_process() {
    static Handles& handles = *new Handles;
    return handles;
  }

  cudal2gen_pack* add(Pack pack) {
    std::lock_guard<std::mutex> const guard(mutex_);
    return reinterpret_cast<cudal2gen_pack*>(insert(packs_, std::move(pack)));
  }

  // pack: the handle of the plan's pack.
  cudal2gen_plan* add(Plan plan, cudal2gen_pack const* pack) {
    std::lock_guard<std::mutex> const guard(mutex_);
    return reinterpret_cast<cudal2gen_plan*>(insert(plans_, OpenPlan{std::move(plan), number_of(pack)}));
  }

  // Returns the pack, which lives as long as the result even if another thread closes it, or null with the reason.
  Pack find(cudal2gen_pack const* handle) {
    std::lock_guard<std::mutex> const guard(mutex_);
    Pack const pack = lookup(packs_, number_of(handle));
    if (!pack) invalid(unusable("pack", handle));
    return pack;
  }

  // Returns the plan and stores its pack, so that both live as long as the results; null with the reason if one is gone.
  Plan find(cudal2gen_plan const* handle, Pack& pack) {
    std::lock_guard<std::mutex> const guard(mutex_);
    OpenPlan const found = lookup(plans_, number_of(handle));
    pack = found.plan ? lookup(packs_, found.pack) : nullptr;
    if (!pack) invalid(found.plan ? "the plan's pack is closed" : unusable("plan", handle));
    return pack ? found.plan : nullptr;
  }

  // Forgets a handle. Returns what it stood for, or null with the reason.
  Pack remove(cudal2gen_pack const* handle) { return erase(packs_, "pack", handle); }
  Plan remove(cudal2gen_plan const* handle) { return erase(plans_, "plan", handle).plan; }

 private:
  struct OpenPlan {
    Plan plan;
    uint64_t pack;  // the number of its pack's handle
    explicit operator bool() const { return bool(plan); }
  };

  static uint64_t number_of(void const* handle) { return reinterpret_cast<uintptr_t>(handle); }
  static std::string unusable(char const* name, void const* handle) {
    return std::string(name) + (handle ? " is not open any more, or is no handle" : " is null");
  }

  // Returns the number of the new handle.
  template <class Value>
  uint64_t insert(std::unordered_map<uint64_t, Value>& all, Value value) {
    all.emplace(++last_, std::move(value));
    return last_;
  }

  // Returns the value of a handle's number, or an empty one.
  template <class Value>
  static Value lookup(std::unordered_map<uint64_t, Value> const& all, uint64_t number) {
    auto const found = all.find(number);
    return found == all.end() ? Value{} : found->second;
  }

  template <class Value>
  Value erase(std::unordered_map<uint64_t, Value>& all, char const* name, void const* handle) {
    std::lock_guard<std::mutex> const guard(mutex_);
    auto const found = all.find(number_of(handle));
    if (found == all.end()) return invalid(unusable(name, handle)), Value{};
    Value const value = std::move(found->second);
    all.erase(found);
    return value;
  }

  std::mutex mutex_;  // guards everything; no caller's function runs while it is held
  std::unordered_map<uint64_t, Pack> packs_;
  std::unordered_map<uint64_t, OpenPlan> plans_;
  uint64_t last_ = 0;  // the newest handle's number
};

}  // namespace cudal2gen

#endif
