#include "common.h"

#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <vector>

namespace cann_sim {
namespace {

thread_local std::string recent_error;
const bool trace_to_stderr = number_setting("CANN_SIM_TRACE", 0) != 0;

std::mutex trace_mutex;
bool recording = false;
std::string recorded;

}  // namespace

aclError fail(aclError code, const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  recent_error = "EE9999: " + std::string(text) + " (error code " + std::to_string(code) + ")";
  if (trace_to_stderr) std::fprintf(stderr, "[cann_sim] %s\n", recent_error.c_str());
  return code;
}

void trace(const char* action, int stream, const char* kind, const std::string& name) {
  if (trace_to_stderr) std::fprintf(stderr, "[cann_sim] %s stream %d %s %s\n", action, stream, kind, name.c_str());
  std::lock_guard<std::mutex> lock(trace_mutex);
  if (!recording) return;
  recorded += action;
  recorded += ' ';
  recorded += std::to_string(stream);
  recorded += ' ';
  recorded += kind;
  recorded += ' ';
  recorded += name;
  recorded += '\n';
}

}  // namespace cann_sim

using namespace cann_sim;

ACL_API const char* aclGetRecentErrMsg() {
  static thread_local std::string text;
  text.swap(recent_error);
  recent_error.clear();
  return text.empty() ? nullptr : text.c_str();
}

ACL_API void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

// For tests: start or stop recording, and read what was recorded (one line a task) since the last start.
ACL_API void cann_sim_trace_record(int on) {
  std::lock_guard<std::mutex> lock(trace_mutex);
  recording = on != 0;
  if (recording) recorded.clear();
}

ACL_API const char* cann_sim_trace_read() {
  static std::string text;
  std::lock_guard<std::mutex> lock(trace_mutex);
  text = recorded;
  return text.c_str();
}
