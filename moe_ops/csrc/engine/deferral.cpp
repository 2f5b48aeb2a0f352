#include "engine/deferral.h"

#include <cmath>
#include <limits>

namespace moe_ops::engine {

Split split_deferred(const int64_t* ids, const float* weights, int64_t num_tokens, int64_t top_k, int64_t num_experts,
                     int64_t max_deferred, int64_t* immediate, int64_t* deferred) {
  Split split{false, false};
  for (int64_t token = 0; token < num_tokens; ++token) {
    const float* weight = weights + token * top_k;
    const int64_t* id = ids + token * top_k;
    int64_t* now = immediate + token * top_k;
    int64_t* later = deferred ? deferred + token * top_k : nullptr;
    for (int64_t k = 0; k < top_k; ++k) {
      now[k] = id[k] >= 0 && id[k] < num_experts ? id[k] : -1;
      if (later) later[k] = -1;
    }
    // Selection of a few slots out of a few: repeated minimum beats a sort and needs no memory.
    for (int64_t round = 0; later && round < max_deferred; ++round) {
      int64_t lowest = -1;
      float lowest_weight = 0;
      for (int64_t k = 0; k < top_k; ++k) {
        if (now[k] < 0 || weight[k] == 0) continue;  // no work
        float w = std::isnan(weight[k]) ? std::numeric_limits<float>::infinity() : weight[k];
        if (lowest < 0 || w <= lowest_weight) {
          lowest = k;
          lowest_weight = w;
        }
      }
      if (lowest < 0) break;
      later[lowest] = now[lowest];
      now[lowest] = -1;
      split.any_deferred = true;
    }
    for (int64_t k = 0; k < top_k; ++k) split.any_immediate |= now[k] >= 0;
  }
  return split;
}

}  // namespace moe_ops::engine
