// The memory of submissions: a process-wide pool of blocks, reused by size, so that a long run neither grows nor faults
// in fresh pages.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>

#include "engine/arena.h"
#include "engine/state.h"

namespace moe_ops::engine {
namespace {

constexpr size_t kAlign = 64;
constexpr size_t kSmallestBlock = 4096;
// Free blocks beyond this are returned to the system by the next host call.
constexpr size_t kFreeBytesKept = size_t{256} << 20;
// Submissions of streams that may be in flight at once, outside graphs (docs/engine.md).
constexpr int64_t kEagerDepth = 256;

size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

int size_class(size_t capacity) {
  int index = 0;
  while ((kSmallestBlock << index) < capacity) ++index;
  return index;
}

// "255 of 'a', 1 of 'b'": whose the submissions in flight are.
std::string holders_locked() {
  std::map<std::string, int64_t> counts;
  for (Job* job : state().jobs)
    for (; job; job = job->chain)
      if (job->owner->counts_as_eager && job->owner->engine && !job->deferred) ++counts[job->owner->engine->name];
  std::string text;
  for (const auto& [name, count] : counts)
    text += (text.empty() ? "" : ", ") + std::to_string(count) + " of '" + name + "'";
  return text;
}

void trim_locked() {
  State& s = state();
  for (int c = State::kClasses - 1; c >= 0 && s.free_bytes > kFreeBytesKept; --c) {
    while (s.free[c] && s.free_bytes > kFreeBytesKept) {
      Submission* submission = s.free[c];
      s.free[c] = submission->next;
      s.free_bytes -= submission->capacity;
      std::free(submission->block);
      delete submission;
    }
  }
}

}  // namespace

size_t bytes_needed(const Geometry& g) {
  size_t rows = g.num_tokens * g.hidden_size, slots = g.num_tokens * g.top_k;
  size_t outputs = g.max_deferred > 0 ? 2 : 1;
  return aligned(rows * element_size(g.element)) + aligned(slots * 4) + outputs * aligned(slots * 8) +
         outputs * aligned(rows * 4);
}

void lay_out(Submission* submission, const Geometry& g) {
  submission->geometry = g;
  size_t rows = g.num_tokens * g.hidden_size, slots = g.num_tokens * g.top_k;
  unsigned char* at = submission->block;
  auto carve = [&at](size_t bytes) {
    unsigned char* piece = at;
    at += aligned(bytes);
    return piece;
  };
  submission->hidden_states = carve(rows * element_size(g.element));
  submission->topk_weights = reinterpret_cast<float*>(carve(slots * 4));
  submission->topk_ids = reinterpret_cast<int64_t*>(carve(slots * 8));
  submission->output = reinterpret_cast<float*>(carve(rows * 4));
  submission->deferred_ids = nullptr;
  submission->deferred_output = nullptr;
  if (g.max_deferred > 0) {
    submission->deferred_ids = reinterpret_cast<int64_t*>(carve(slots * 8));
    submission->deferred_output = reinterpret_cast<float*>(carve(rows * 4));
  }
}

Submission* acquire_locked(const Geometry& geometry) {
  State& s = state();
  trim_locked();
  size_t needed = bytes_needed(geometry);
  int c = size_class(needed);
  Submission* submission = s.free[c];
  if (submission) {
    s.free[c] = submission->next;
    s.free_bytes -= submission->capacity;
  } else {
    auto fresh = std::make_unique<Submission>();
    fresh->capacity = kSmallestBlock << c;
    void* block = nullptr;
    if (posix_memalign(&block, kAlign, fresh->capacity) != 0) throw std::bad_alloc();
    fresh->block = static_cast<unsigned char*>(block);
    submission = fresh.release();
  }
  submission->next = nullptr;
  submission->submit_ns = 0;
  lay_out(submission, geometry);
  return submission;
}

void recycle_locked(Submission* submission) noexcept {
  State& s = state();
  submission->engine.reset();
  submission->experts.reset();
  if (submission->counts_as_eager) {
    submission->counts_as_eager = false;
    --s.eager_in_flight;
  }
  if (submission->arena) {
    submission->arena->put_back(submission);
  } else {
    int c = size_class(submission->capacity);
    submission->next = s.free[c];
    s.free[c] = submission;
    s.free_bytes += submission->capacity;
  }
  s.released.notify_all();
}

Submission* acquire(const Geometry& geometry) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return acquire_locked(geometry);
}

Submission* acquire_eager(const Geometry& geometry) {
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  // The host may run ahead of the device by this much. Waiting only helps while a sync that will free something is
  // under way.
  s.released.wait(lock, [&] { return s.eager_in_flight < kEagerDepth || s.syncs_in_flight == 0; });
  if (s.eager_in_flight >= kEagerDepth)
    throw std::runtime_error("cpu_moe_submit: " + std::to_string(kEagerDepth) + " submissions are in flight (" +
                             holders_locked() +
                             ") and no sync is under way; sync their tickets, or free them with "
                             "CpuMoeEngine.discard_unsynced()");
  Submission* submission = acquire_locked(geometry);
  submission->counts_as_eager = true;
  ++s.eager_in_flight;
  return submission;
}

void* hidden_states_of(Submission* submission) { return submission->hidden_states; }
int64_t* topk_ids_of(Submission* submission) { return submission->topk_ids; }
float* topk_weights_of(Submission* submission) { return submission->topk_weights; }

void began(Submission* submission, int64_t submit_ns) noexcept { submission->submit_ns = submit_ns; }

void give_back(Submission* submission) noexcept {
  std::lock_guard<std::mutex> lock(state().mutex);
  recycle_locked(submission);
}

// --- the memory of one captured graph ---

void Arena::reserve_locked(const Geometry& geometry) {
  Group* group = find(geometry.num_tokens, geometry.hidden_size);
  if (!group) {
    groups_.push_back({geometry.num_tokens, geometry.hidden_size});
    group = &groups_.back();
  }
  // A submit with deferral gives two tickets, and a sync returns one or two: as many blocks as tickets out are always
  // enough.
  group->tickets += geometry.max_deferred > 0 ? 2 : 1;
  group->peak = std::max(group->peak, group->tickets);
  size_t bytes = bytes_needed(geometry);
  if (bytes > group->bytes) {
    // No captured call has run yet, so all blocks are free: replace them by larger ones.
    group->bytes = bytes;
    group->largest = geometry;
    while (Submission* submission = group->free) {
      group->free = submission->next;
      submission->arena = nullptr;
      recycle_locked(submission);
      --group->owned;
    }
  }
  while (group->owned < group->peak) {
    Submission* submission = acquire_locked(group->largest);
    submission->arena = this;
    submission->next = group->free;
    group->free = submission;
    ++group->owned;
  }
}

void Arena::note_sync_locked(int64_t num_tokens, int64_t hidden_size, bool with_deferred) {
  Group* group = find(num_tokens, hidden_size);
  if (!group || parallel_) return;
  group->tickets = std::max<int64_t>(0, group->tickets - (with_deferred ? 2 : 1));
}

Submission* Arena::pop_locked(const Geometry& geometry) noexcept {
  Group* group = find(geometry.num_tokens, geometry.hidden_size);
  if (!group || !group->free) return nullptr;
  Submission* submission = group->free;
  group->free = submission->next;
  submission->next = nullptr;
  ++out_;
  submission->submit_ns = 0;
  lay_out(submission, geometry);
  return submission;
}

void Arena::put_back(Submission* submission) noexcept {
  Group* group = find(submission->geometry.num_tokens, submission->geometry.hidden_size);
  submission->next = group->free;
  group->free = submission;
  --out_;
  if (dead_ && out_ == 0) dissolve();
}

void Arena::kill_locked() noexcept {
  dead_ = true;
  if (out_ == 0) dissolve();
}

// Moves every block to the process-wide pool; the pool frees memory, so that no callback does.
void Arena::dissolve() noexcept {
  for (Group& group : groups_) {
    while (Submission* submission = group.free) {
      group.free = submission->next;
      submission->arena = nullptr;
      recycle_locked(submission);
    }
  }
  delete this;
}

Arena::Group* Arena::find(int64_t num_tokens, int64_t hidden_size) noexcept {
  for (Group& group : groups_)
    if (group.num_tokens == num_tokens && group.hidden_size == hidden_size) return &group;
  return nullptr;
}

}  // namespace moe_ops::engine
