// What the operators of mixture-of-experts layers share.
#pragma once

#include <limits>

#include "operator.h"

namespace cann_sim {

constexpr int64_t kUnwrittenIndex = -12345;

inline bool is_950() { return std::string(aclrtGetSocName()).rfind("Ascend950", 0) == 0; }

// What the device leaves unwritten must not look like a result.
inline void poison(at::Tensor rows) {
  if (rows.is_floating_point()) {
    rows.fill_(std::numeric_limits<double>::quiet_NaN());
  } else {
    rows.fill_(kUnwrittenIndex);
  }
}

}  // namespace cann_sim
