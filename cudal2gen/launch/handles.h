// The packs and plans that callers have open. A handle is a number that is never given twice, in the form of a pointer, so a call
// recognises one that was destroyed, of the other kind, or never given, and reads no memory by it.
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
  static Handles& open() {
    static Handles& handles = *new Handles;
    return handles;
  }

  cudal2gen_pack* add(Pack pack) {
    std::lock_guard<std::mutex> const guard(mutex_);
    return reinterpret_cast<cudal2gen_pack*>(kept(packs_, std::move(pack)));
  }

  // pack: the handle of the plan's pack.
  cudal2gen_plan* add(Plan plan, cudal2gen_pack const* pack) {
    std::lock_guard<std::mutex> const guard(mutex_);
    return reinterpret_cast<cudal2gen_plan*>(kept(plans_, Made{std::move(plan), number(pack)}));
  }

  // Returns the pack, which lives as long as the result even if another thread closes it, or null with the reason.
  Pack find(cudal2gen_pack const* handle) {
    std::lock_guard<std::mutex> const guard(mutex_);
    Pack const pack = at(packs_, number(handle));
    if (!pack) invalid(unusable("pack", handle));
    return pack;
  }

  // Returns the plan and stores its pack, so that both live as long as the results; null with the reason if one is gone.
  Plan find(cudal2gen_plan const* handle, Pack& pack) {
    std::lock_guard<std::mutex> const guard(mutex_);
    Made const made = at(plans_, number(handle));
    pack = made.plan ? at(packs_, made.pack) : nullptr;
    if (!pack) invalid(made.plan ? "the plan's pack is closed" : unusable("plan", handle));
    return pack ? made.plan : nullptr;
  }

  // Forgets a handle. Returns what it stood for, or null with the reason.
  Pack remove(cudal2gen_pack const* handle) { return taken(packs_, "pack", handle); }
  Plan remove(cudal2gen_plan const* handle) { return taken(plans_, "plan", handle).plan; }

 private:
  struct Made {
    Plan plan;
    uint64_t pack;
    explicit operator bool() const { return bool(plan); }
  };

  static uint64_t number(void const* handle) { return reinterpret_cast<uintptr_t>(handle); }
  static std::string unusable(char const* name, void const* handle) {
    return std::string(name) + (handle ? " is not open any more, or is no handle" : " is null");
  }

  template <class Kept>
  uint64_t kept(std::unordered_map<uint64_t, Kept>& all, Kept own) {
    all.emplace(++last_, std::move(own));
    return last_;
  }

  template <class Kept>
  static Kept at(std::unordered_map<uint64_t, Kept> const& all, uint64_t number) {
    auto const found = all.find(number);
    return found == all.end() ? Kept{} : found->second;
  }

  template <class Kept>
  Kept taken(std::unordered_map<uint64_t, Kept>& all, char const* name, void const* handle) {
    std::lock_guard<std::mutex> const guard(mutex_);
    auto const found = all.find(number(handle));
    if (found == all.end()) return invalid(unusable(name, handle)), Kept{};
    Kept const own = std::move(found->second);
    all.erase(found);
    return own;
  }

  std::mutex mutex_;  // guards everything; no caller's function runs while it is held
  std::unordered_map<uint64_t, Pack> packs_;
  std::unordered_map<uint64_t, Made> plans_;
  uint64_t last_ = 0;
};

}  // namespace cudal2gen

#endif
