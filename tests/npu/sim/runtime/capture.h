// Stream capture: the tasks of one origin stream, and of the streams that join it, as a list that can be replayed.
#pragma once

#include <pthread.h>

#include <atomic>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "stream.h"

namespace cann_sim {

struct Capture {
  uint32_t id = 0;
  std::vector<Task> tasks;  // in submission order, which is a valid order of the graph also across forked streams
  std::set<Stream*> streams;
  Stream* origin = nullptr;
  pthread_t thread{};
  aclmdlRICaptureMode mode{};
  bool invalid = false;
  bool closed = false;  // set by capture end, successful or not
  std::atomic<int> running{0};
  std::vector<std::pair<aclrtCallback, void*>> on_destroy;
  struct Model* model = nullptr;
};

// What an aclmdlRI points to.
struct Model {
  std::shared_ptr<Capture> graph;
};

// False while a synchronous call is forbidden to this thread by a capture (Context::IsCaptureModeSupport of CANN).
bool synchronous_calls_allowed();

// Appends the task where the stream is capturing; false where it is not.
bool record_task(Stream* stream, Task& task);

std::shared_ptr<Capture> capture_handle(Stream* stream);
void record_join_point(Stream* stream, const char* kind);
aclError join_capture(Stream* stream, const std::shared_ptr<Capture>& capture);

}  // namespace cann_sim
