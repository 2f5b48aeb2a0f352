// The work of a call as one list of items, in stages, that threads take in order; and counters by which an item waits
// for items before it.
//
// There are no barriers: a thread that finds a stage used up goes on with the next one. An item waits only for items
// that were taken before it, by threads that are at work on them, so that a team whose calls run one after the other
// finishes as well.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace moe_ops::mxfp4 {

// Items [begin, end) of a stage.
struct Run {
  int stage;
  int64_t begin, end;
};

class ItemQueue {
 public:
  // Neighbours are taken together while there are many: they share rows or follow one another in memory.
  void add_stage(int64_t count) { ends_.push_back((ends_.empty() ? 0 : ends_.back()) + count); }

  bool take(int num_threads, Run* run) {
    int64_t i = next_.load(std::memory_order_relaxed);
    for (;;) {
      const auto stage = std::upper_bound(ends_.begin(), ends_.end(), i);
      if (stage == ends_.end()) return false;
      const int64_t step = std::min(kLongestRun, std::max<int64_t>(1, (*stage - i) / (kRunsLeft * num_threads)));
      if (next_.compare_exchange_weak(i, i + step, std::memory_order_relaxed)) {
        const int64_t first = stage == ends_.begin() ? 0 : *(stage - 1);
        *run = {static_cast<int>(stage - ends_.begin()), i - first, i + step - first};
        return true;
      }
    }
  }

 private:
  static constexpr int64_t kLongestRun = 32, kRunsLeft = 4;
  std::vector<int64_t> ends_;
  alignas(64) std::atomic<int64_t> next_{0};
};

// How many items of each of some groups are not finished.
class Countdowns {
 public:
  explicit Countdowns(size_t size) : left_(new std::atomic<int64_t>[size]) {
    for (size_t i = 0; i < size; ++i) left_[i].store(0, std::memory_order_relaxed);
  }

  void set(size_t i, int64_t count) { left_[i].store(count, std::memory_order_relaxed); }
  void finish(size_t i, int64_t count = 1) { left_[i].fetch_sub(count, std::memory_order_acq_rel); }
  bool finished(size_t i) const { return left_[i].load(std::memory_order_acquire) == 0; }

  void wait(size_t i) const {
    constexpr int kSpins = 4096;
    for (int spin = 0; !finished(i); ++spin) {
      if (spin >= kSpins) std::this_thread::yield();
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }

 private:
  std::unique_ptr<std::atomic<int64_t>[]> left_;
};

}  // namespace moe_ops::mxfp4
