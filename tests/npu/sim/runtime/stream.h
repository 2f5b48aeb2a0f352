// Streams: one worker thread each, tasks in order, errors kept until somebody synchronises.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../simulation.h"

namespace cann_sim {

struct Capture;

struct Task {
  const char* kind;
  std::string name;
  std::function<aclError()> run;
  int stream;
};

// Who dispatches the host callbacks of a stream. A stream that used one mechanism refuses the other (107011).
enum class Subscription { kNone, kUser, kRuntime };

class Stream {
 public:
  Stream(int id, int device, bool is_default);
  ~Stream();
  void push(Task task);
  bool idle();
  aclError synchronize(int milliseconds);  // -1: no limit; hands out the first error of a task and forgets it

  const int id;
  const int device;
  const bool is_default;
  Capture* capture = nullptr;  // the capture that this stream takes part in
  bool unjoined = false;       // work of a forked stream that the origin has not waited for
  Subscription subscription = Subscription::kNone;
  uint64_t subscriber = 0;

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  bool busy_ = false;
  bool stop_ = false;
  aclError first_error_ = ACL_SUCCESS;
  std::thread worker_;
};

struct Context {
  int device;
  Stream* default_stream;
};

int current_device();  // -1 before aclrtSetDevice on this thread
int device_count();
Context* context_of(int device);
Stream* resolve(aclrtStream handle);  // nullptr is the default stream of the current context
bool is_live(Stream* stream);
std::vector<Stream*> live_streams(int device);

}  // namespace cann_sim
