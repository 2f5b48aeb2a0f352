// The submissions that the captured calls of one graph share. All members expect state().mutex to be held.
#pragma once
#include <vector>

#include "engine/engine.h"

namespace moe_ops::engine {

struct SubmitCall;

class Arena {
 public:
  // While recording, on the host: makes sure that a replay finds a free block at this submit.
  void reserve_locked(const Geometry& geometry);
  void note_sync_locked(int64_t num_tokens, int64_t hidden_size, bool with_deferred);
  void set_parallel() { parallel_ = true; }
  // In callbacks. Null if every block is out.
  Submission* pop_locked(const Geometry& geometry) noexcept;
  void put_back(Submission* submission) noexcept;  // may delete the arena
  // The graph is gone; the arena deletes itself when its last submission returns.
  void kill_locked() noexcept;

 private:
  struct Group {
    int64_t num_tokens, hidden_size;
    int64_t tickets = 0, peak = 0, owned = 0;
    size_t bytes = 0;
    Geometry largest{};
    Submission* free = nullptr;
  };
  Group* find(int64_t num_tokens, int64_t hidden_size) noexcept;
  void dissolve() noexcept;
  std::vector<Group> groups_;
  int64_t out_ = 0;
  bool dead_ = false, parallel_ = false;
};

// A submission of a stream outside graphs: blocks at the documented depth, throws where waiting cannot help.
Submission* acquire_eager(const Geometry& geometry);

}  // namespace moe_ops::engine
