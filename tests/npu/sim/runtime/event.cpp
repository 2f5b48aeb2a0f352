// Events. A wait takes the record that was asked for last; inside a capture an event makes a stream join.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "capture.h"
#include "common.h"
#include "stream.h"

namespace cann_sim {
namespace {

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t asked = 0;  // records queued so far
  uint64_t done = 0;   // the last record that ran
  std::chrono::steady_clock::time_point time;
  std::shared_ptr<Capture> capture;  // the capture in which it was recorded last

  bool inside_open_capture() const { return capture != nullptr && !capture->closed; }
};

// Tasks keep the event alive: CANN allows to destroy an event whose record is still queued.
using Handle = std::shared_ptr<Event>;
const Handle& event_of(aclrtEvent handle) { return *static_cast<Handle*>(handle); }

}  // namespace
}  // namespace cann_sim

using namespace cann_sim;

ACL_API aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  *event = new Handle(std::make_shared<Event>());
  return ACL_SUCCESS;
}

ACL_API aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) {
  return aclrtCreateEventExWithFlag(event, flag);
}

ACL_API aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<Handle*>(event);
  return ACL_SUCCESS;
}

ACL_API aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  SIM_NOT_IN_CALLBACK("aclrtRecordEvent");
  const Handle event = event_of(handle);
  Stream* stream = resolve(stream_handle);
  if (stream->capture != nullptr) {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->capture = capture_handle(stream);
    record_join_point(stream, "EVENT_RECORD");
    return ACL_SUCCESS;
  }
  uint64_t version;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->capture.reset();
    version = ++event->asked;
  }
  return submit(stream_handle, "EVENT_RECORD", "", [event, version]() -> aclError {
    {
      std::lock_guard<std::mutex> lock(event->mutex);
      event->done = std::max(event->done, version);
      event->time = std::chrono::steady_clock::now();
    }
    event->changed.notify_all();
    return ACL_SUCCESS;
  });
}

ACL_API aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  SIM_NOT_IN_CALLBACK("aclrtStreamWaitEvent");
  const Handle event = event_of(handle);
  Stream* stream = resolve(stream_handle);
  if (event->inside_open_capture()) return join_capture(stream, event->capture);
  uint64_t version;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    version = event->asked;
  }
  if (stream->capture != nullptr && version > 0) {
    return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "waiting for an event that was recorded outside the capture");
  }
  return submit(stream_handle, "EVENT_WAIT", "", [event, version]() -> aclError {
    std::unique_lock<std::mutex> lock(event->mutex);
    event->changed.wait(lock, [&] { return event->done >= version; });
    return ACL_SUCCESS;
  });
}

ACL_API aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }

ACL_API aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  SIM_NOT_IN_CALLBACK("aclrtSynchronizeEvent");
  const Handle event = event_of(handle);
  if (event->inside_open_capture()) return fail(ACL_ERROR_RT_EVENT_CAPTURED, "synchronizing a captured event");
  trace("HOST", -1, "SYNCHRONIZE", "event");
  std::unique_lock<std::mutex> lock(event->mutex);
  const uint64_t version = event->asked;
  event->changed.wait(lock, [&] { return event->done >= version; });
  return ACL_SUCCESS;
}

ACL_API aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  const Handle event = event_of(handle);
  if (event->inside_open_capture()) return fail(ACL_ERROR_RT_EVENT_CAPTURED, "querying a captured event");
  std::lock_guard<std::mutex> lock(event->mutex);
  *status = event->done >= event->asked ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

ACL_API aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
  aclrtEventRecordedStatus recorded;
  const aclError code = aclrtQueryEventStatus(event, &recorded);
  if (code != ACL_SUCCESS) return code;
  *status =
      recorded == ACL_EVENT_RECORDED_STATUS_COMPLETE ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

ACL_API aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent from, aclrtEvent to) {
  const Handle first = event_of(from), last = event_of(to);
  if (first->inside_open_capture() || last->inside_open_capture()) {
    return fail(ACL_ERROR_RT_EVENT_CAPTURED, "elapsed time of a captured event");
  }
  *milliseconds = std::chrono::duration<float, std::milli>(last->time - first->time).count();
  return ACL_SUCCESS;
}
