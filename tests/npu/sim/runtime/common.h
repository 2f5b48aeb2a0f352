// Settings, messages and the trace of the simulated runtime.
#pragma once

#include <cstdlib>
#include <cstring>
#include <string>

#include "../simulation.h"

#define ACL_API extern "C" SIM_EXPORT

namespace cann_sim {

// Environment settings are read once, when the library is loaded.
inline const char* setting(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : fallback;
}
inline long number_setting(const char* name, long fallback) {
  const char* value = setting(name, nullptr);
  return value != nullptr ? std::strtol(value, nullptr, 10) : fallback;
}

// One line of the trace: QUEUE, RUN, CAPTURE, REPLAY or HOST (a call that makes the host wait), then kind and name.
void trace(const char* action, int stream, const char* kind, const std::string& name);

// True on the thread that is running a host callback; `refuse_in_callback` names what CANN forbids there.
bool in_callback();
aclError refuse_in_callback(const char* call);

}  // namespace cann_sim

#define SIM_NOT_IN_CALLBACK(call)                                               \
  do {                                                                          \
    if (::cann_sim::in_callback()) return ::cann_sim::refuse_in_callback(call); \
  } while (0)
