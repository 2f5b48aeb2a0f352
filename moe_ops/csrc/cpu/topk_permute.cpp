// topk_permute and topk_permute_out: a stable counting sort of the slots, then one copy per slot.
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "cpu/check.h"
#include "cpu/parallel.h"

namespace moe_ops {
namespace {

constexpr int64_t kCopyGrain = int64_t{1} << 16;  // bytes worth a task of their own

void check_permute(const char* op, const Tensor& hidden_states, const Tensor& topk_ids, int64_t num_experts) {
  check_rows(op, "hidden_states", hidden_states);
  check_ids(op, topk_ids, hidden_states.size(0));
  check_device(op, hidden_states, "topk_ids", topk_ids);
  MOE_REQUIRE(num_experts > 0 && num_experts <= std::numeric_limits<int32_t>::max(), op, "num_experts",
              "a positive number of experts", std::to_string(num_experts));
}

// Fills row_map and tokens_per_expert; returns the number of rows that hold a token, at most `rows`.
int64_t permutation_map(const int64_t* ids, int64_t slots, int64_t num_experts, int64_t rows, int32_t* row_map,
                        int32_t* tokens_per_expert) {
  std::vector<int64_t> next(num_experts + 1, 0);
  const auto routed = [&](int64_t id) { return id >= 0 && id < num_experts; };
  for (int64_t q = 0; q < slots; q++) {
    if (routed(ids[q])) next[ids[q] + 1]++;
  }
  for (int64_t e = 0; e < num_experts; e++) {
    tokens_per_expert[e] = int32_t(next[e + 1]);
    next[e + 1] += next[e];
  }
  const int64_t total = next[num_experts];
  for (int64_t q = 0; q < slots; q++) {
    const int64_t row = routed(ids[q]) ? next[ids[q]]++ : rows;
    row_map[q] = row < rows ? int32_t(row) : -1;
  }
  return total < rows ? total : rows;
}

void copy_rows(const Tensor& hidden_states, const int32_t* row_map, int64_t top_k, int64_t filled, Tensor& out) {
  const int64_t element = int64_t(hidden_states.element_size());
  const int64_t row_bytes = hidden_states.size(1) * element;
  const int64_t stride = hidden_states.stride(0) * element;
  const char* source = static_cast<const char*>(hidden_states.const_data_ptr());
  char* target = static_cast<char*>(out.mutable_data_ptr());
  const int64_t grain = 1 + kCopyGrain / (1 + row_bytes * top_k);
  parallel_for(0, hidden_states.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      for (int64_t k = 0; k < top_k; k++) {
        const int64_t row = row_map[t * top_k + k];
        if (row >= 0) std::memcpy(target + row * row_bytes, source + t * stride, row_bytes);
      }
    }
  });
  const int64_t tail = out.size(0) - filled;
  parallel_for(0, tail, 1 + kCopyGrain / (1 + row_bytes), [&](int64_t begin, int64_t end) {
    std::memset(target + (filled + begin) * row_bytes, 0, (end - begin) * row_bytes);
  });
}

std::tuple<Tensor, Tensor> permute_into(const Tensor& hidden_states, const Tensor& topk_ids, int64_t num_experts,
                                        Tensor& out) {
  const int64_t num_tokens = topk_ids.size(0), top_k = topk_ids.size(1);
  const Tensor rows = dense_rows(hidden_states), ids = as_int64(topk_ids);
  Tensor row_map = torch::stable::new_empty(topk_ids, {num_tokens, top_k}, ScalarType::Int);
  Tensor counts = torch::stable::new_empty(topk_ids, {num_experts}, ScalarType::Int);
  const int64_t filled = permutation_map(ids.const_data_ptr<int64_t>(), num_tokens * top_k, num_experts, out.size(0),
                                         row_map.mutable_data_ptr<int32_t>(), counts.mutable_data_ptr<int32_t>());
  copy_rows(rows, row_map.const_data_ptr<int32_t>(), top_k, filled, out);
  return {row_map, counts};
}

std::tuple<Tensor, Tensor, Tensor> topk_permute(const Tensor& hidden_states, const Tensor& topk_ids,
                                                int64_t num_experts, std::optional<int64_t> num_out_tokens,
                                                std::optional<Tensor> after) {
  constexpr const char* kOp = "topk_permute";
  check_permute(kOp, hidden_states, topk_ids, num_experts);
  check_ticket(kOp, "after", after);
  check_device(kOp, hidden_states, "after", after);
  int64_t rows = topk_ids.size(0) * topk_ids.size(1);
  if (num_out_tokens) {
    MOE_REQUIRE(*num_out_tokens >= 0, kOp, "num_out_tokens", "at least 0", std::to_string(*num_out_tokens));
    rows = *num_out_tokens;
  }
  Tensor permuted = torch::stable::new_empty(hidden_states, {rows, hidden_states.size(1)});
  auto [row_map, counts] = permute_into(hidden_states, topk_ids, num_experts, permuted);
  return {permuted, row_map, counts};
}

std::tuple<Tensor, Tensor> topk_permute_out(const Tensor& hidden_states, const Tensor& topk_ids, int64_t num_experts,
                                            Tensor out) {
  constexpr const char* kOp = "topk_permute_out";
  check_permute(kOp, hidden_states, topk_ids, num_experts);
  check_device(kOp, hidden_states, "out", out);
  const int64_t slots = topk_ids.size(0) * topk_ids.size(1), width = hidden_states.size(1);
  const bool ok = out.defined() && out.dim() == 2 && out.scalar_type() == hidden_states.scalar_type() &&
                  out.is_contiguous() && out.size(1) == width && out.size(0) >= slots;
  MOE_REQUIRE(ok, kOp, "out",
              "a contiguous [at least " + std::to_string(slots) + ", " + std::to_string(width) + "] " +
                  dtype_name(hidden_states.scalar_type()),
              describe(out));
  check_no_overlap(kOp, out, "hidden_states", hidden_states);
  check_no_overlap(kOp, out, "topk_ids", topk_ids);
  return permute_into(hidden_states, topk_ids, num_experts, out);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ops, CPU, m) {
  m.impl("topk_permute", TORCH_BOX(&topk_permute));
  m.impl("topk_permute_out", TORCH_BOX(&topk_permute_out));
}

}  // namespace moe_ops
