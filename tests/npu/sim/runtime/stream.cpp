#include "stream.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <map>
#include <set>

#include "capture.h"
#include "common.h"

namespace cann_sim {
namespace {

std::atomic<long> task_delay_us{number_setting("CANN_SIM_TASK_DELAY_US", 0)};

std::mutex registry_mutex;
std::set<Stream*> streams;
std::map<int, Context*> contexts;
std::atomic<int> next_stream{0};
thread_local int thread_device = -1;

Stream* create_stream(int device, bool is_default) {
  Stream* stream = new Stream(next_stream++, device, is_default);
  std::lock_guard<std::mutex> lock(registry_mutex);
  streams.insert(stream);
  return stream;
}

}  // namespace

Stream::Stream(int id, int device, bool is_default) : id(id), device(device), is_default(is_default) {
  worker_ = std::thread([this] { work(); });
}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  worker_.join();
}

void Stream::work() {
  const std::string name = "npu_stream" + std::to_string(id);
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
  thread_device = device;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    aclError code;
    {
      Task task = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      if (const long delay = task_delay_us) usleep(static_cast<useconds_t>(delay));
      trace("RUN", id, task.kind, task.name);
      code = task.run();
    }  // what the task holds is released before the stream counts as idle
    lock.lock();
    if (code != ACL_SUCCESS && first_error_ == ACL_SUCCESS) first_error_ = code;
    busy_ = false;
    changed_.notify_all();
  }
}

void Stream::push(Task task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(task));
  }
  changed_.notify_all();
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_;
}

aclError Stream::synchronize(int milliseconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto done = [&] { return queue_.empty() && !busy_; };
  if (milliseconds < 0) {
    changed_.wait(lock, done);
  } else if (!changed_.wait_for(lock, std::chrono::milliseconds(milliseconds), done)) {
    return ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
  }
  const aclError code = first_error_;
  first_error_ = ACL_SUCCESS;
  return code;
}

int current_device() { return thread_device; }

int device_count() {
  static const int count = static_cast<int>(number_setting("CANN_SIM_DEVICES", 1));
  return count;
}

Context* context_of(int device) {
  {
    std::lock_guard<std::mutex> lock(registry_mutex);
    auto found = contexts.find(device);
    if (found != contexts.end()) return found->second;
  }
  Context* context = new Context{device, create_stream(device, true)};
  std::lock_guard<std::mutex> lock(registry_mutex);
  return contexts.emplace(device, context).first->second;
}

Stream* resolve(aclrtStream handle) {
  if (handle != nullptr) return static_cast<Stream*>(handle);
  return context_of(thread_device < 0 ? 0 : thread_device)->default_stream;
}

bool is_live(Stream* stream) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  return streams.count(stream) != 0;
}

std::vector<Stream*> live_streams(int device) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  std::vector<Stream*> found;
  for (Stream* stream : streams) {
    if (stream->device == device) found.push_back(stream);
  }
  return found;
}

aclError submit(aclrtStream handle, const char* kind, std::string name, std::function<aclError()> run) {
  Stream* stream = resolve(handle);
  if (!is_live(stream)) return fail(ACL_ERROR_RT_PARAM_INVALID, "the stream was destroyed");
  Task task{kind, std::move(name), std::move(run), stream->id};
  if (record_task(stream, task)) return ACL_SUCCESS;
  trace("QUEUE", stream->id, kind, task.name);
  stream->push(std::move(task));
  return ACL_SUCCESS;
}

}  // namespace cann_sim

using namespace cann_sim;

// For tests: every task waits this long before it runs, so that a missing synchronisation shows.
ACL_API void cann_sim_set_task_delay(long microseconds) { task_delay_us = microseconds; }

ACL_API aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(device_count());
  return ACL_SUCCESS;
}

ACL_API aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= device_count()) return fail(ACL_ERROR_RT_INVALID_DEVICEID, "no device %d", device);
  thread_device = device;
  context_of(device);
  return ACL_SUCCESS;
}

ACL_API aclError aclrtGetDevice(int32_t* device) {
  if (thread_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *device = thread_device;
  return ACL_SUCCESS;
}

ACL_API aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }

ACL_API aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (thread_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = context_of(thread_device);
  return ACL_SUCCESS;
}

ACL_API aclError aclrtSetCurrentContext(aclrtContext context) {
  if (context == nullptr) return ACL_ERROR_RT_CONTEXT_NULL;
  thread_device = static_cast<Context*>(context)->device;
  return ACL_SUCCESS;
}

ACL_API aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags != nullptr) *flags = 0;
  *active = 1;
  return ACL_SUCCESS;
}

ACL_API aclError aclrtCreateStream(aclrtStream* stream) {
  SIM_NOT_IN_CALLBACK("aclrtCreateStream");
  *stream = create_stream(thread_device < 0 ? 0 : thread_device, false);
  return ACL_SUCCESS;
}

ACL_API aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  return aclrtCreateStream(stream);
}

ACL_API aclError aclrtDestroyStream(aclrtStream handle) {
  SIM_NOT_IN_CALLBACK("aclrtDestroyStream");
  Stream* stream = static_cast<Stream*>(handle);
  if (!is_live(stream)) return ACL_ERROR_RT_PARAM_INVALID;
  if (stream->capture != nullptr) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "destroying a capturing stream");
  stream->synchronize(-1);
  {
    std::lock_guard<std::mutex> lock(registry_mutex);
    streams.erase(stream);
  }
  delete stream;
  return ACL_SUCCESS;
}

ACL_API aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

ACL_API aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = resolve(stream)->id;
  return ACL_SUCCESS;
}

ACL_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t milliseconds) {
  SIM_NOT_IN_CALLBACK("aclrtSynchronizeStream");
  Stream* stream = resolve(handle);
  if (!is_live(stream)) return ACL_ERROR_RT_PARAM_INVALID;
  if (stream->capture != nullptr) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "synchronizing a capturing stream");
  trace("HOST", stream->id, "SYNCHRONIZE", "stream");
  return stream->synchronize(milliseconds);
}

ACL_API aclError aclrtSynchronizeStream(aclrtStream stream) { return aclrtSynchronizeStreamWithTimeout(stream, -1); }

ACL_API aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  Stream* stream = resolve(handle);
  if (stream->capture != nullptr) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "querying a capturing stream");
  *status = stream->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

ACL_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) {
  SIM_NOT_IN_CALLBACK("aclrtSynchronizeDevice");
  const std::vector<Stream*> all = live_streams(thread_device < 0 ? 0 : thread_device);
  for (Stream* stream : all) {
    if (stream->capture != nullptr) {
      return fail(ACL_ERROR_RT_STREAM_CAPTURED, "synchronizing the device while a stream is capturing");
    }
  }
  trace("HOST", -1, "SYNCHRONIZE", "device");
  aclError first = ACL_SUCCESS;
  for (Stream* stream : all) {
    const aclError code = stream->synchronize(milliseconds);
    if (first == ACL_SUCCESS) first = code;
  }
  return first;
}

ACL_API aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }

ACL_API aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
ACL_API aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return ACL_SUCCESS; }
