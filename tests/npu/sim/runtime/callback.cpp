// Host callbacks. aclrtLaunchCallback runs on the thread that subscribed to the stream and pumps reports;
// aclrtLaunchHostFunc on one thread that the runtime keeps per context. Both block the stream where asked to.
#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "common.h"
#include "stream.h"

namespace cann_sim {
namespace {

const bool strict = number_setting("CANN_SIM_STRICT", 0) != 0;
thread_local bool running_callback = false;

struct Report {
  aclrtCallback function;
  void* user_data;
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
};

// The queue of one dispatching thread.
class Dispatcher {
 public:
  aclError post(aclrtCallback function, void* user_data, bool block) {
    auto report = std::make_shared<Report>();
    report->function = function;
    report->user_data = user_data;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(report);
    }
    changed_.notify_all();
    if (block) {
      std::unique_lock<std::mutex> lock(report->mutex);
      report->changed.wait(lock, [&] { return report->done; });
    }
    return ACL_SUCCESS;
  }

  aclError pump(int milliseconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto ready = [&] { return !queue_.empty(); };
    if (milliseconds < 0) {
      changed_.wait(lock, ready);
    } else if (!changed_.wait_for(lock, std::chrono::milliseconds(milliseconds), ready)) {
      return ACL_ERROR_RT_REPORT_TIMEOUT;
    }
    auto report = queue_.front();
    queue_.pop_front();
    lock.unlock();
    running_callback = true;
    report->function(report->user_data);
    running_callback = false;
    {
      std::lock_guard<std::mutex> done(report->mutex);
      report->done = true;
    }
    report->changed.notify_all();
    return ACL_SUCCESS;
  }

  int streams = 0;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Report>> queue_;
};

std::mutex dispatcher_mutex;
std::map<uint64_t, std::shared_ptr<Dispatcher>> subscribers;  // by thread id
std::map<int, std::shared_ptr<Dispatcher>> context_threads;   // by device

std::shared_ptr<Dispatcher> find_subscriber(uint64_t thread) {
  std::lock_guard<std::mutex> lock(dispatcher_mutex);
  auto found = subscribers.find(thread);
  return found != subscribers.end() ? found->second : nullptr;
}

std::shared_ptr<Dispatcher> context_dispatcher(int device) {
  std::lock_guard<std::mutex> lock(dispatcher_mutex);
  std::shared_ptr<Dispatcher>& dispatcher = context_threads[device];
  if (dispatcher == nullptr) {
    dispatcher = std::make_shared<Dispatcher>();
    std::thread([dispatcher] {
      pthread_setname_np(pthread_self(), "acl_host_func");
      for (;;) dispatcher->pump(-1);
    }).detach();
  }
  return dispatcher;
}

}  // namespace

bool in_callback() { return running_callback; }

aclError refuse_in_callback(const char* call) {
  std::fprintf(stderr, "[cann_sim] FORBIDDEN: %s inside a host callback\n", call);
  if (strict) std::abort();
  return fail(ACL_ERROR_RT_INTERNAL_ERROR, "%s inside a host callback is forbidden by CANN and may deadlock", call);
}

}  // namespace cann_sim

using namespace cann_sim;

ACL_API aclError aclrtSubscribeReport(uint64_t thread, aclrtStream handle) {
  Stream* stream = resolve(handle);
  if (stream->subscription == Subscription::kRuntime) {
    return fail(ACL_ERROR_RT_STREAM_SUBSCRIBE, "the stream is already used by aclrtLaunchHostFunc");
  }
  if (stream->subscription == Subscription::kUser) {
    return fail(ACL_ERROR_RT_STREAM_SUBSCRIBE, "the stream is already subscribed");
  }
  stream->subscription = Subscription::kUser;
  stream->subscriber = thread;
  std::lock_guard<std::mutex> lock(dispatcher_mutex);
  std::shared_ptr<Dispatcher>& dispatcher = subscribers[thread];
  if (dispatcher == nullptr) dispatcher = std::make_shared<Dispatcher>();
  dispatcher->streams++;
  return ACL_SUCCESS;
}

ACL_API aclError aclrtUnSubscribeReport(uint64_t thread, aclrtStream handle) {
  Stream* stream = resolve(handle);
  if (stream->subscription != Subscription::kUser || stream->subscriber != thread) {
    return fail(ACL_ERROR_RT_STREAM_SUBSCRIBE, "the stream is not subscribed by this thread");
  }
  stream->subscription = Subscription::kNone;
  std::lock_guard<std::mutex> lock(dispatcher_mutex);
  auto found = subscribers.find(thread);
  if (found != subscribers.end() && --found->second->streams == 0) subscribers.erase(found);
  return ACL_SUCCESS;
}

ACL_API aclError aclrtLaunchCallback(aclrtCallback function, void* user_data, aclrtCallbackBlockType block,
                                     aclrtStream handle) {
  SIM_NOT_IN_CALLBACK("aclrtLaunchCallback");
  if (function == nullptr) return ACL_ERROR_RT_PARAM_INVALID;
  Stream* stream = resolve(handle);
  if (stream->subscription == Subscription::kRuntime) {
    return fail(ACL_ERROR_RT_STREAM_SUBSCRIBE, "the stream is already used by aclrtLaunchHostFunc");
  }
  auto dispatcher = stream->subscription == Subscription::kUser ? find_subscriber(stream->subscriber) : nullptr;
  if (dispatcher == nullptr) {
    return fail(ACL_ERROR_RT_STREAM_NO_CB_REG, "the stream is not bound to a thread: call aclrtSubscribeReport first");
  }
  return submit(handle, "CALLBACK", "aclrtLaunchCallback",
                [=] { return dispatcher->post(function, user_data, block == ACL_CALLBACK_BLOCK); });
}

ACL_API aclError aclrtProcessReport(int32_t milliseconds) {
  if (milliseconds < -1 || milliseconds == 0)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "report timeout %d", milliseconds);
  auto dispatcher = find_subscriber(static_cast<uint64_t>(pthread_self()));
  if (dispatcher == nullptr) return fail(ACL_ERROR_RT_THREAD_SUBSCRIBE, "this thread is not subscribed to a stream");
  return dispatcher->pump(milliseconds);
}

ACL_API aclError aclrtLaunchHostFunc(aclrtStream handle, aclrtHostFunc function, void* arguments) {
  SIM_NOT_IN_CALLBACK("aclrtLaunchHostFunc");
  if (function == nullptr) return ACL_ERROR_RT_PARAM_INVALID;
  Stream* stream = resolve(handle);
  if (stream->subscription == Subscription::kUser) {
    return fail(ACL_ERROR_RT_STREAM_SUBSCRIBE, "the stream is subscribed by aclrtSubscribeReport");
  }
  stream->subscription = Subscription::kRuntime;
  auto dispatcher = context_dispatcher(stream->device);
  return submit(handle, "HOSTFUNC", "aclrtLaunchHostFunc", [=] { return dispatcher->post(function, arguments, true); });
}
