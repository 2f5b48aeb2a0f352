#include "capture.h"

#include <cstdio>
#include <map>

#include "common.h"

namespace cann_sim {
namespace {

std::mutex capture_mutex;
std::map<Capture*, std::shared_ptr<Capture>> open_captures;
std::atomic<uint32_t> next_capture{0};
thread_local aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

aclError replay(Capture& graph) {
  aclError code = ACL_SUCCESS;
  for (Task& task : graph.tasks) {
    trace("REPLAY", task.stream, task.kind, task.name);
    code = task.run();
    if (code != ACL_SUCCESS) break;
  }
  graph.running--;
  return code;
}

}  // namespace

bool synchronous_calls_allowed() {
  if (thread_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return true;
  bool any_global = false, own_thread_local = false;
  std::lock_guard<std::mutex> lock(capture_mutex);
  for (const auto& [capture, handle] : open_captures) {
    any_global |= capture->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
    own_thread_local |=
        capture->mode == ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL && pthread_equal(capture->thread, pthread_self()) != 0;
  }
  if (thread_mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL) return !any_global && !own_thread_local;
  return !own_thread_local;
}

bool record_task(Stream* stream, Task& task) {
  std::lock_guard<std::mutex> lock(capture_mutex);
  if (stream->capture == nullptr) return false;
  trace("CAPTURE", stream->id, task.kind, task.name);
  stream->unjoined = true;
  stream->capture->tasks.push_back(std::move(task));
  return true;
}

std::shared_ptr<Capture> capture_handle(Stream* stream) {
  std::lock_guard<std::mutex> lock(capture_mutex);
  return open_captures.at(stream->capture);
}

void record_join_point(Stream* stream, const char* kind) {
  std::lock_guard<std::mutex> lock(capture_mutex);
  stream->capture->tasks.push_back({kind, "", [] { return ACL_SUCCESS; }, stream->id});
  stream->unjoined = false;
}

aclError join_capture(Stream* stream, const std::shared_ptr<Capture>& capture) {
  if (stream->is_default) return fail(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT, "the default stream cannot join a capture");
  std::lock_guard<std::mutex> lock(capture_mutex);
  if (stream->capture != nullptr && stream->capture != capture.get()) {
    capture->invalid = stream->capture->invalid = true;
    return fail(ACL_ERROR_STREAM_CAPTURE_CONFLICT, "the streams of two captures depend on each other");
  }
  stream->capture = capture.get();
  capture->streams.insert(stream);
  capture->tasks.push_back({"EVENT_WAIT", "", [] { return ACL_SUCCESS; }, stream->id});
  if (stream != capture->origin) stream->unjoined = true;
  return ACL_SUCCESS;
}

}  // namespace cann_sim

using namespace cann_sim;

ACL_API aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  SIM_NOT_IN_CALLBACK("aclmdlRICaptureBegin");
  Stream* stream = resolve(handle);
  if (stream->is_default) return fail(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT, "the default stream cannot be captured");
  std::lock_guard<std::mutex> lock(capture_mutex);
  if (stream->capture != nullptr) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "the stream is already capturing");
  auto capture = std::make_shared<Capture>();
  capture->id = next_capture++;
  capture->origin = stream;
  capture->streams.insert(stream);
  capture->thread = pthread_self();
  capture->mode = mode;
  capture->model = new Model{capture};
  open_captures[capture.get()] = capture;
  stream->capture = capture.get();
  stream->unjoined = false;
  return ACL_SUCCESS;
}

ACL_API aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* model) {
  Stream* stream = resolve(handle);
  if (!is_live(stream)) return ACL_ERROR_RT_PARAM_INVALID;
  std::lock_guard<std::mutex> lock(capture_mutex);
  *status = stream->capture == nullptr ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
            : stream->capture->invalid ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                                       : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
  if (model != nullptr) *model = stream->capture != nullptr ? stream->capture->model : nullptr;
  return ACL_SUCCESS;
}

ACL_API aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return ACL_SUCCESS;
}

ACL_API aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* model) {
  Stream* stream = resolve(handle);
  *model = nullptr;
  std::lock_guard<std::mutex> lock(capture_mutex);
  if (stream->capture == nullptr) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "the stream is not capturing");
  const std::shared_ptr<Capture> capture = open_captures.at(stream->capture);
  if (capture->origin != stream) {
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture began on another stream");
  }
  aclError code = ACL_SUCCESS;
  if (capture->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED && pthread_equal(capture->thread, pthread_self()) == 0) {
    code = ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD;
  } else if (capture->invalid) {
    code = ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED;
  }
  for (Stream* member : capture->streams) {
    if (code == ACL_SUCCESS && member != stream && member->unjoined) code = ACL_ERROR_RT_STREAM_UNJOINED;
    member->capture = nullptr;
    member->unjoined = false;
  }
  capture->closed = true;
  open_captures.erase(capture.get());
  if (code != ACL_SUCCESS) {
    delete capture->model;
    return fail(code, "the capture failed");
  }
  *model = capture->model;
  return ACL_SUCCESS;
}

ACL_API aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream) {
  SIM_NOT_IN_CALLBACK("aclmdlRIExecuteAsync");
  if (resolve(stream)->capture != nullptr) {
    return fail(ACL_ERROR_RT_STREAM_CAPTURED, "executing a model on a capturing stream");
  }
  std::shared_ptr<Capture> graph = static_cast<Model*>(handle)->graph;
  graph->running++;
  return submit(stream, "MODEL", "replay", [graph] { return replay(*graph); });
}

ACL_API aclError aclmdlRIDestroy(aclmdlRI handle) {
  Model* model = static_cast<Model*>(handle);
  if (model->graph->running > 0) return fail(ACL_ERROR_RT_MODEL_RUNNING, "destroying a running model");
  for (auto& [callback, user_data] : model->graph->on_destroy) callback(user_data);
  delete model;
  return ACL_SUCCESS;
}

ACL_API aclError aclmdlRIDestroyRegisterCallback(aclmdlRI handle, aclrtCallback callback, void* user_data) {
  static_cast<Model*>(handle)->graph->on_destroy.emplace_back(callback, user_data);
  return ACL_SUCCESS;
}

ACL_API aclError aclmdlRIGetId(aclmdlRI handle, uint32_t* id) {
  *id = static_cast<Model*>(handle)->graph->id;
  return ACL_SUCCESS;
}

ACL_API aclError aclmdlRIDebugJsonPrint(aclmdlRI handle, const char* path, uint32_t) {
  const Capture& graph = *static_cast<Model*>(handle)->graph;
  FILE* file = std::fopen(path, "w");
  if (file == nullptr) return ACL_ERROR_RT_FILE_OPEN;
  std::fputs("[", file);
  for (size_t i = 0; i < graph.tasks.size(); i++) {
    const Task& task = graph.tasks[i];
    std::fprintf(file, "%s{\"model\":%u,\"stream\":%d,\"task\":%zu,\"type\":\"%s\",\"name\":\"%s\"}",
                 i > 0 ? ",\n" : "", graph.id, task.stream, i, task.kind, task.name.c_str());
  }
  std::fputs("]\n", file);
  std::fclose(file);
  return ACL_SUCCESS;
}

// Updating captured tasks in place (task groups) is not modelled.
ACL_API aclError aclmdlRICaptureTaskGrpBegin(aclrtStream) {
  return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "task groups are not simulated");
}
