// What the simulated runtime (libascendcl.so) offers to the simulated operators (libopapi.so).
#pragma once

#include <acl/acl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#define SIM_EXPORT __attribute__((visibility("default")))

namespace cann_sim {

// Queues one device task on a stream or, while the stream is capturing, appends it to the captured graph.
SIM_EXPORT aclError submit(aclrtStream stream, const char* kind, std::string name, std::function<aclError()> run);

// The host-readable alias of a device range; nullptr when the range is not inside one live device allocation.
// Host addresses are returned as they are.
SIM_EXPORT void* translate(const void* address, size_t bytes);

// The text that aclGetRecentErrMsg() hands to torch_npu. Returns `code`.
SIM_EXPORT aclError fail(aclError code, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace cann_sim
