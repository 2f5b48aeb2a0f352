// topk_unpermute and its backward: a gather of a token's rows and one float32 sum in slot order.
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/check.h"
#include "cpu/kernels/row_ops.h"
#include "cpu/parallel.h"

namespace moe_ops {
namespace {

constexpr int64_t kElementGrain = int64_t{1} << 14;  // elements worth a task of their own

RowType row_type(ScalarType dtype) {
  return dtype == ScalarType::Float      ? RowType::kFloat32
         : dtype == ScalarType::BFloat16 ? RowType::kBFloat16
                                         : RowType::kFloat16;
}

void check_unpermute(const char* op, const Tensor& permuted, const Tensor& row_map,
                     const std::optional<Tensor>& topk_weights) {
  check_rows(op, "permuted_hidden_states", permuted, "[rows, hidden_size]");
  MOE_REQUIRE(row_map.defined() && row_map.dim() == 2 && row_map.scalar_type() == ScalarType::Int, op, "row_map",
              "[num_tokens, top_k] int32", describe(row_map));
  if (topk_weights) check_weights(op, *topk_weights, row_map.size(0), row_map.size(1));
  check_device(op, permuted, "row_map", row_map);
  check_device(op, permuted, "topk_weights", topk_weights);
}

struct Rows {
  explicit Rows(const Tensor& tensor)
      : data(static_cast<const char*>(tensor.const_data_ptr())),
        stride(tensor.stride(0) * int64_t(tensor.element_size())) {}
  const void* operator[](int64_t row) const { return data + row * stride; }
  const char* data;
  int64_t stride;  // bytes
};

int64_t grain(int64_t width, int64_t top_k) { return 1 + kElementGrain / (1 + width * top_k); }

Tensor topk_unpermute(const Tensor& permuted_hidden_states, const Tensor& row_map, std::optional<Tensor> topk_weights) {
  check_unpermute("topk_unpermute", permuted_hidden_states, row_map, topk_weights);
  const int64_t num_tokens = row_map.size(0), top_k = row_map.size(1);
  const int64_t rows = permuted_hidden_states.size(0), width = permuted_hidden_states.size(1);
  Tensor out = torch::stable::new_empty(permuted_hidden_states, {num_tokens, width});
  const Tensor source = dense_rows(permuted_hidden_states), map = converted(row_map, ScalarType::Int);
  const std::optional<Tensor> weights = topk_weights ? std::optional<Tensor>(as_float32(*topk_weights)) : std::nullopt;
  const int32_t* slots = map.const_data_ptr<int32_t>();
  const float* slot_weights = weights ? weights->const_data_ptr<float>() : nullptr;
  const RowType type = row_type(source.scalar_type());
  const Rows values(source);
  char* result = static_cast<char*>(out.mutable_data_ptr());
  const int64_t row_bytes = width * int64_t(out.element_size());
  const RowOps& ops = row_ops();
  parallel_for(0, num_tokens, grain(width, top_k), [&](int64_t begin, int64_t end) {
    std::vector<const void*> chosen(top_k);
    std::vector<float> chosen_weights(top_k);
    for (int64_t t = begin; t < end; t++) {
      int64_t count = 0;
      for (int64_t q = t * top_k; q < (t + 1) * top_k; q++) {
        const float weight = slot_weights ? slot_weights[q] : 1.0f;
        if (slots[q] < 0 || slots[q] >= rows || weight == 0.0f) continue;
        chosen[count] = values[slots[q]];
        chosen_weights[count++] = weight;
      }
      ops.weighted_sum(type, chosen.data(), chosen_weights.data(), count, width, result + t * row_bytes);
    }
  });
  return out;
}

std::tuple<Tensor, Tensor> topk_unpermute_backward(const Tensor& grad_output, const Tensor& permuted_hidden_states,
                                                   const Tensor& row_map, std::optional<Tensor> topk_weights) {
  constexpr const char* kOp = "topk_unpermute_backward";
  check_unpermute(kOp, permuted_hidden_states, row_map, topk_weights);
  check_device(kOp, permuted_hidden_states, "grad_output", grad_output);
  const int64_t num_tokens = row_map.size(0), top_k = row_map.size(1);
  const int64_t rows = permuted_hidden_states.size(0), width = permuted_hidden_states.size(1);
  const ScalarType dtype = permuted_hidden_states.scalar_type();
  MOE_REQUIRE(grad_output.defined() && grad_output.dim() == 2 && grad_output.scalar_type() == dtype &&
                  grad_output.size(0) == num_tokens && grad_output.size(1) == width,
              kOp, "grad_output",
              "[" + std::to_string(num_tokens) + ", " + std::to_string(width) + "] " + dtype_name(dtype),
              describe(grad_output));
  Tensor grad_permuted = torch::stable::new_empty(permuted_hidden_states, {rows, width});
  Tensor grad_weights = topk_weights ? torch::stable::new_empty(row_map, {num_tokens, top_k}, ScalarType::Float)
                                     : torch::stable::new_empty(row_map, {0}, ScalarType::Float);
  const Tensor grad = dense_rows(grad_output), source = dense_rows(permuted_hidden_states);
  const Tensor map = converted(row_map, ScalarType::Int);
  const std::optional<Tensor> weights = topk_weights ? std::optional<Tensor>(as_float32(*topk_weights)) : std::nullopt;
  const int32_t* slots = map.const_data_ptr<int32_t>();
  const float* slot_weights = weights ? weights->const_data_ptr<float>() : nullptr;
  float* weight_gradients = weights ? grad_weights.mutable_data_ptr<float>() : nullptr;
  const RowType type = row_type(dtype);
  const Rows grads(grad), values(source);
  char* result = static_cast<char*>(grad_permuted.mutable_data_ptr());
  const int64_t row_bytes = width * int64_t(grad_permuted.element_size());
  const RowOps& ops = row_ops();
  parallel_for(0, rows, grain(width, 1), [&](int64_t begin, int64_t end) {
    std::memset(result + begin * row_bytes, 0, (end - begin) * row_bytes);
  });
  // Each slot owns its row of the permuted buffer, so tokens can be handled in any order.
  std::vector<bool> owned(static_cast<size_t>(rows));
  for (int64_t q = 0; q < num_tokens * top_k; q++) {
    if (slots[q] < 0 || slots[q] >= rows) continue;
    MOE_REQUIRE(!owned[slots[q]], kOp, "row_map", "a map to different rows",
                "row " + std::to_string(slots[q]) + " twice");
    owned[slots[q]] = true;
  }
  parallel_for(0, num_tokens, grain(width, top_k), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      for (int64_t q = t * top_k; q < (t + 1) * top_k; q++) {
        if (weight_gradients) weight_gradients[q] = 0.0f;
        if (slots[q] < 0 || slots[q] >= rows) continue;
        char* target = result + slots[q] * row_bytes;
        const float weight = slot_weights ? slot_weights[q] : 1.0f;
        if (weight != 0.0f) ops.scale(type, grads[t], weight, width, target);
        if (weight_gradients) weight_gradients[q] = ops.dot(type, values[slots[q]], grads[t], width);
      }
    }
  });
  return {grad_permuted, grad_weights};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ops, CPU, m) {
  m.impl("topk_unpermute", TORCH_BOX(&topk_unpermute));
  m.impl("topk_unpermute_backward", TORCH_BOX(&topk_unpermute_backward));
}

}  // namespace moe_ops
