// Which slots of a token run one layer late.
#pragma once
#include <cstdint>

namespace moe_ops::engine {

// ids, weights: [T, K]. Per token, the max_deferred valid slots (0 <= id < num_experts) of lowest weight go to
// `deferred`, the others to `immediate`; of two equal weights the lower slot stays immediate, and a NaN weight counts
// as the largest. The other output holds -1 at that place; invalid ids are -1 in both. A token's split depends on that
// token alone. `immediate` may be `ids`. Returns which of the two outputs holds any valid id.
struct Split {
  bool any_immediate;
  bool any_deferred;
};
Split split_deferred(const int64_t* ids, const float* weights, int64_t num_tokens, int64_t top_k, int64_t num_experts,
                     int64_t max_deferred, int64_t* immediate, int64_t* deferred);

}  // namespace moe_ops::engine
