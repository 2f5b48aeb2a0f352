// Words in pinned memory that a device writes and a thread of ours looks at, instead of host functions of a stream,
// which the driver starts 50 to 200 us after they may run.
#pragma once
#include <cstdint>

namespace moe_ops::engine {

struct Doorbell {
  const int64_t* rung;        // not 0 once the device has come to this point of its stream
  bool (*ready)(void* call);  // whether `run` would not wait; null: never waits
  void (*run)(void* call);    // as a host function; called once
  void* call;
  int64_t* answered;  // becomes 1 after `run`, may be null
};

// Makes sure that the thread is there; throws where it cannot be. To be called before the device is given work whose
// end depends on it.
void watch_words();

// Runs the call once its word is set. Calls of one stream run in the order in which they are given.
void when_rung(const Doorbell& bell) noexcept;

// Waits until the thread has run every call that does not wait and whose word was set before.
void settle_rung();

}  // namespace moe_ops::engine
